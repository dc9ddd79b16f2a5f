//! Whether a card can be used: a state machine per card, fed by looks at the driver and by XIDs.
//!
//! Nothing is final: a card that answers well for some looks in a row is healthy again, whatever made it ill.

mod watch;

use std::collections::BTreeMap;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use mullion_crds::gpunode::{Card, Health, HealthState};
use serde::{Deserialize, Serialize};
use tracing::warn;

use crate::config::HealthSettings;
use crate::nvml::{SeenCard, Survey, Trouble, XidSeen};
use crate::world::{Driver, Refused, World};
pub use watch::Watcher;

/// Looks with an error other than "lost" before a card counts as ill: one is a hiccup.
const ERRORS_TO_FAIL: u32 = 2;

/// XIDs that wait for their card to be known, at most.
const EARLY_XIDS: usize = 64;

/// What is wrong with a card.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Illness {
    /// The XID that began it, if it was one.
    pub xid: Option<u64>,
    /// In words.
    pub message: String,
}

/// Health of one card.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CardHealth {
    /// What is wrong; `None` for a healthy card.
    pub illness: Option<Illness>,
    /// Since when that holds.
    pub since: Option<Timestamp>,
    /// Last critical XID ever seen.
    pub last_xid: Option<u64>,
    /// Bad looks in a row.
    bad: u32,
    /// Good looks in a row since it fell ill.
    good: u32,
}

/// A card that the driver told.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Known {
    /// What it is; its `health` field is not used.
    pub card: Card,
    /// The driver lists it.
    pub present: bool,
    /// Its health.
    pub health: CardHealth,
    /// The card that is in its place now; it comes back under no other name.
    #[serde(default)]
    pub replaced_by: Option<String>,
}

impl Known {
    /// What is wrong with it.
    #[must_use]
    pub fn fault(&self) -> Option<String> {
        self.health.illness.as_ref().map(|i| i.message.clone())
    }

    /// The card as it is reported, health included.
    #[must_use]
    pub fn reported(&self) -> Card {
        let health = Health {
            state: if self.health.illness.is_some() { HealthState::Unhealthy } else { HealthState::Healthy },
            xid: self.health.last_xid,
            message: self.fault(),
            // Kubernetes keeps whole seconds: with more the report would differ from what was written for ever.
            since: self.health.since.and_then(|t| Timestamp::from_second(t.as_second()).ok()).map(Time),
        };
        Card { health, ..self.card.clone() }
    }
}

/// What was seen of a card.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Sign {
    /// It answers.
    Good,
    /// It has fallen off the bus or needs a reset.
    Lost(&'static str),
    /// A call about it failed.
    Error(&'static str, &'static str),
    /// The driver does not list it.
    Unlisted,
    /// Another card is in its place.
    Replaced(String),
    /// It is in the place of a card that somebody still has: what was given of that one would reach this one.
    Inherited(String),
    /// It reported an XID.
    Xid(u64),
}

/// A change of a card's health.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Turn {
    /// It fell ill.
    Failed(Illness),
    /// It is well again.
    Recovered,
}

/// Takes in a sign.
pub fn step(health: &mut CardHealth, sign: &Sign, settings: &HealthSettings, now: Timestamp) -> Option<Turn> {
    let illness = match sign {
        Sign::Good => {
            health.bad = 0;
            health.illness.as_ref()?;
            health.good += 1;
            if health.good < settings.recovery_checks {
                return None;
            }
            (health.illness, health.since, health.good) = (None, Some(now), 0);
            return Some(Turn::Recovered);
        }
        Sign::Error(call, code) => {
            health.bad += 1;
            health.good = 0;
            if health.bad < ERRORS_TO_FAIL {
                return None;
            }
            Illness { xid: None, message: format!("{call} answered {code}") }
        }
        Sign::Lost(code) => Illness { xid: None, message: format!("the driver lost it ({code})") },
        Sign::Unlisted => Illness { xid: None, message: "the driver does not list it".to_owned() },
        Sign::Replaced(by) => Illness { xid: None, message: format!("card {by} is in its place") },
        Sign::Inherited(from) => {
            let message = format!("it is in the place of card {from}, which is not released yet");
            Illness { xid: None, message }
        }
        Sign::Xid(xid) if settings.ignored_xids.contains(xid) => return None,
        Sign::Xid(xid) => {
            health.last_xid = Some(*xid);
            Illness { xid: Some(*xid), message: format!("XID {xid}") }
        }
    };
    health.good = 0;
    // One illness, one report: what it began with says most.
    if health.illness.is_some() {
        return None;
    }
    (health.illness, health.since) = (Some(illness.clone()), Some(now));
    Some(Turn::Failed(illness))
}

/// Takes in a look at the driver: cards come, change, vanish. Returns the changes of health by uuid.
///
/// A card that the driver no longer lists stays, unhealthy, for as long as an allocation has it; so does one that
/// cannot be told from others that are lost. Cards of an earlier driver or boot that nobody has are dropped.
///
/// One that was replaced never comes back, and what was given of it (device nodes, by number) now means its successor: its
/// pods are to go, and the successor stays closed until they have.
pub fn take_in(
    world: &mut World,
    survey: &Survey,
    settings: &HealthSettings,
    now: Timestamp,
) -> BTreeMap<String, Turn> {
    let mut cards = world.cards.take().unwrap_or_default();
    let mut turns = BTreeMap::new();
    let lost = survey.nameless.iter().find(|t| t.lost).or(survey.nameless.first());
    let replaced = replaced(world, &cards, survey);
    for SeenCard { card, trouble, table } in &survey.cards {
        let known = cards.entry(card.uuid.clone()).or_default();
        known.card = card.clone();
        known.present = true;
        known.replaced_by = None;
        let from = replaced.iter().find(|(_, by)| **by == card.uuid).map(|(from, _)| from);
        let sign = match (trouble, from) {
            (Some(trouble), _) => sign(trouble),
            (None, Some(from)) => Sign::Inherited(from.clone()),
            (None, None) => Sign::Good,
        };
        if let Some(turn) = step(&mut known.health, &sign, settings, now) {
            turns.insert(card.uuid.clone(), turn);
        }
        if let Some(table) = table {
            world.mig_tables.insert(table.hash.clone(), table.clone());
        }
    }
    let seen = |uuid: &String| survey.cards.iter().any(|s| s.card.uuid == *uuid);
    let missing: Vec<String> = cards.keys().filter(|u| !seen(u)).cloned().collect();
    for uuid in missing {
        let held = world.holds_card(&uuid);
        let Some(known) = cards.get_mut(&uuid) else { continue };
        known.replaced_by = replaced.get(&uuid).cloned();
        let sign = match (&known.replaced_by, lost) {
            (Some(by), _) => Sign::Replaced(by.clone()),
            (None, Some(trouble)) => sign(trouble),
            (None, None) if held => Sign::Unlisted,
            (None, None) => {
                cards.remove(&uuid);
                continue;
            }
        };
        known.present = lost.is_some() && known.replaced_by.is_none();
        if let Some(turn) = step(&mut known.health, &sign, settings, now) {
            turns.insert(uuid, turn);
        }
    }
    // Those that came before their card was known.
    for XidSeen { card, xid } in std::mem::take(&mut world.early_xids) {
        let Some(known) = cards.get_mut(&card) else {
            warn!(card, xid, "XID of a card that the driver does not list");
            continue;
        };
        if let Some(turn) = step(&mut known.health, &Sign::Xid(xid), settings, now) {
            turns.insert(card, turn);
        }
    }
    send_away(world, &replaced);
    let named: Vec<String> = cards.values().filter_map(|k| k.card.mig.as_ref()?.table.clone()).collect();
    world.mig_tables.retain(|hash, _| named.contains(hash));
    world.cards = Some(cards);
    world.driver = Driver::Ready { version: survey.driver_version.clone() };
    turns
}

/// Cards that somebody has and that are not listed, while another one is in their place: by uuid, with their successor.
fn replaced(world: &World, cards: &BTreeMap<String, Known>, survey: &Survey) -> BTreeMap<String, String> {
    let listed = |uuid: &str| survey.cards.iter().any(|s| s.card.uuid == uuid);
    let missing = cards.values().filter(|k| !listed(&k.card.uuid) && world.holds_card(&k.card.uuid));
    let pair = |k: &Known| {
        let there = |c: &Card| c.pci_address == k.card.pci_address || c.minor == k.card.minor;
        let by = survey.cards.iter().find(|s| !k.card.pci_address.is_empty() && there(&s.card))?;
        Some((k.card.uuid.clone(), by.card.uuid.clone()))
    };
    missing.filter_map(pair).collect()
}

/// Nothing of an allocation of a replaced card can start again: its pod is to be placed anew.
fn send_away(world: &mut World, replaced: &BTreeMap<String, String>) {
    let mut refused = Vec::new();
    for (uuid, by) in replaced {
        let held = world.ledger.allocations_on(&world.node).filter(|a| !a.released && a.prepared);
        for fact in
            held.filter(|a| a.containers.iter().flat_map(|c| &c.devices).any(|d| d.uuid.as_str() == uuid))
        {
            let message = format!("card {uuid} was replaced by {by}: the pod is placed anew");
            refused.push((fact.uid.clone(), Refused { code: "DeviceGone", message, void: false }));
        }
    }
    for (uid, why) in refused {
        world.refused.entry(uid).or_insert(why);
    }
}

/// Takes in an XID; of a card that is not known it waits for the next look. Returns whether the card is changed, and how.
pub fn hear(
    world: &mut World,
    seen: XidSeen,
    settings: &HealthSettings,
    now: Timestamp,
) -> (bool, Option<Turn>) {
    let Some(known) = world.cards.as_mut().and_then(|c| c.get_mut(&seen.card)) else {
        if world.early_xids.len() < EARLY_XIDS {
            world.early_xids.push(seen);
        }
        return (false, None);
    };
    let before = known.health.clone();
    let turn = step(&mut known.health, &Sign::Xid(seen.xid), settings, now);
    (before != known.health, turn)
}

fn sign(trouble: &Trouble) -> Sign {
    if trouble.lost { Sign::Lost(trouble.code) } else { Sign::Error(trouble.call, trouble.code) }
}

#[cfg(test)]
mod tests;
