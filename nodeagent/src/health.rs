//! Whether a card can be used: a state machine per card, fed by looks at the driver and by XIDs.
//!
//! Nothing is final: a card that answers well for some looks in a row is healthy again, whatever made it ill.

use std::collections::BTreeMap;
use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use mullion_audit::{CardState, Event as AuditEvent};
use mullion_crds::gpunode::{Card, Health, HealthState};
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;
use tokio::time::MissedTickBehavior;
use tracing::{info, warn};

use crate::audit::Audit;
use crate::config::HealthSettings;
use crate::error::Error;
use crate::events::Announcer;
use crate::nvml::{DriverHandle, SeenCard, Survey, Trouble, XidSeen};
use crate::state::{Key, State};
use crate::world::{Driver, Refused, Shared, World};

/// Looks with an error other than "lost" before a card counts as ill: one is a hiccup.
const ERRORS_TO_FAIL: u32 = 2;

/// XIDs that wait for their card to be known, at most.
const EARLY_XIDS: usize = 64;

/// Pause before the driver is asked a second time.
const HICCUP: std::time::Duration = std::time::Duration::from_millis(500);

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

/// The shell: looks at the driver, listens to XIDs, tells the world.
pub struct Watcher {
    /// The driver.
    pub driver: DriverHandle,
    /// XIDs as they come.
    pub xids: mpsc::UnboundedReceiver<XidSeen>,
    /// The world.
    pub shared: Arc<Shared>,
    /// The audit log.
    pub audit: Audit,
    /// The state file.
    pub state: State,
    /// How to judge.
    pub settings: HealthSettings,
    /// Who tells Kubernetes.
    pub announcer: Announcer,
}

impl std::fmt::Debug for Watcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Watcher").field("settings", &self.settings).finish_non_exhaustive()
    }
}

impl Watcher {
    /// Looks and listens until dropped.
    pub async fn run(mut self) {
        let mut ticks = tokio::time::interval(self.settings.poll);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut listening = true;
        loop {
            tokio::select! {
                _ = ticks.tick() => self.look().await,
                xid = self.xids.recv(), if listening => match xid {
                    Some(seen) => self.xid(seen).await,
                    None => listening = false,
                },
            }
        }
    }

    async fn look(&self) {
        let now = Timestamp::now();
        let mut result = self.driver.survey().await;
        if result.is_err() {
            // The driver was loaded anew; one failure is a hiccup.
            tokio::time::sleep(HICCUP).await;
            result = self.driver.survey().await;
        }
        let turns = match result {
            Ok(survey) => {
                let mut turns = BTreeMap::new();
                let mut changed = false;
                self.shared.change_if(|world| {
                    let before = (world.cards.clone(), world.driver.clone(), world.refused.len());
                    turns = take_in(world, &survey, &self.settings, now);
                    changed = before != (world.cards.clone(), world.driver.clone(), world.refused.len());
                    if changed {
                        world.refold_node();
                    }
                    changed
                });
                if changed {
                    self.keep().await;
                }
                turns
            }
            Err(error) => {
                self.driver_down(&error);
                BTreeMap::new()
            }
        };
        self.tell(turns).await;
    }

    /// For the next run in this boot.
    async fn keep(&self) {
        let Some(cards) = self.shared.read(|w| w.cards.clone()) else { return };
        if let Err(error) = self.state.put(Key::Cards, &cards).await {
            warn!(code = error.code(), error = %mullion_telemetry::source_chain(&error), "cards not kept");
        }
    }

    fn driver_down(&self, error: &Error) {
        let reason = match error {
            Error::Driver { detail, .. } if !detail.is_empty() => format!("{error}: {detail}"),
            _ => error.to_string(),
        };
        let down = Driver::Down { code: error.code(), reason };
        self.shared.change_if(|world| {
            if world.driver == down {
                return false;
            }
            warn!(code = error.code(), %error, "the driver does not answer");
            world.driver = down;
            world.refold_node();
            true
        });
    }

    async fn xid(&self, seen: XidSeen) {
        let now = Timestamp::now();
        info!(card = seen.card, xid = seen.xid, "XID");
        let mut turns = BTreeMap::new();
        let mut changed = false;
        self.shared.change_if(|world| {
            let card = seen.card.clone();
            let (moved, turn) = hear(world, seen, &self.settings, now);
            turns.extend(turn.map(|turn| (card, turn)));
            changed = moved;
            if changed {
                world.refold_node();
            }
            changed
        });
        if changed {
            self.keep().await;
        }
        self.tell(turns).await;
    }

    /// Each turn once to the log, the audit log and Kubernetes.
    async fn tell(&self, turns: BTreeMap<String, Turn>) {
        for (card, turn) in turns {
            let (state, xid, message) = match &turn {
                Turn::Failed(illness) => (CardState::Unhealthy, illness.xid, illness.message.clone()),
                Turn::Recovered => (CardState::Healthy, None, "it answers again".to_owned()),
            };
            warn!(card, ?state, reason = message, "health of a card changed");
            let event =
                AuditEvent::HealthChanged { card: card.clone(), state, xid, message: message.clone() };
            if let Err(error) = self.audit.append(event).await {
                warn!(code = error.code(), error = %mullion_telemetry::source_chain(&error), "health not audited");
            }
            self.announcer.card(&card, matches!(turn, Turn::Failed(_)), &message);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mullion_crds::vgpuallocation::{ContainerAllocation, Device, VGPUAllocation, VGPUAllocationSpec};
    use std::time::Duration;

    fn settings() -> HealthSettings {
        HealthSettings { ignored_xids: vec![13], poll: Duration::from_secs(5), recovery_checks: 3 }
    }

    fn run(signs: &[Sign]) -> Vec<&'static str> {
        let mut health = CardHealth::default();
        let turn = |sign| match step(&mut health, sign, &settings(), Timestamp::UNIX_EPOCH) {
            None => "",
            Some(Turn::Failed(_)) => "failed",
            Some(Turn::Recovered) => "recovered",
        };
        signs.iter().map(turn).collect()
    }

    // DP-09, HA-06
    #[test]
    fn a_card_falls_ill_once_and_comes_back_after_enough_good_looks() {
        use Sign::{Error, Good, Lost, Unlisted, Xid};
        let (lost, error) =
            (Lost("NVML_ERROR_GPU_IS_LOST"), Error("nvmlDeviceGetMemoryInfo_v2", "NVML_ERROR_UNKNOWN"));
        for (case, signs, want) in [
            ("well", vec![Good, Good], vec!["", ""]),
            ("an application's XID", vec![Xid(13), Good], vec!["", ""]),
            (
                "a critical XID",
                vec![Xid(79), Good, Good, Good, Good],
                vec!["failed", "", "", "recovered", ""],
            ),
            ("lost at once", vec![lost.clone()], vec!["failed"]),
            ("XID, then lost: one report", vec![Xid(79), lost.clone(), lost.clone()], vec!["failed", "", ""]),
            (
                "good looks are counted in a row",
                vec![lost.clone(), Good, Good, lost, Good, Good, Good],
                vec!["failed", "", "", "", "", "", "recovered"],
            ),
            ("one error is a hiccup", vec![error.clone(), Good, error.clone(), Good], vec!["", "", "", ""]),
            ("two are not", vec![error.clone(), error], vec!["", "failed"]),
            ("gone from the list", vec![Unlisted, Good, Good, Good], vec!["failed", "", "", "recovered"]),
        ] {
            assert_eq!(run(&signs), want, "{case}");
        }
    }

    fn survey(cards: &[&str], nameless: usize) -> Survey {
        let card = |uuid: &&str| SeenCard {
            card: Card { uuid: (*uuid).to_owned(), memory_mib: 1000, ..Card::default() },
            table: None,
            trouble: None,
        };
        let trouble = Trouble {
            call: "nvmlDeviceGetUUID",
            code: "NVML_ERROR_GPU_IS_LOST",
            lost: true,
            detail: String::new(),
        };
        Survey {
            driver_version: "570".to_owned(),
            cards: cards.iter().map(card).collect(),
            nameless: vec![trouble; nameless],
        }
    }

    fn states(world: &World) -> Vec<(String, bool, bool)> {
        let cards = world.cards.iter().flatten();
        cards.map(|(uuid, k)| (uuid.clone(), k.present, k.fault().is_none())).collect()
    }

    /// An allocation on this node with one container and a slice of `card`.
    fn allocation_of_card(card: &str) -> VGPUAllocation {
        let device = Device { uuid: card.to_owned(), memory_mib: 1, ..Device::default() };
        let container = ContainerAllocation {
            name: "c".to_owned(),
            devices: vec![device],
            ..ContainerAllocation::default()
        };
        let spec = VGPUAllocationSpec {
            node_name: "n".to_owned(),
            containers: vec![container],
            ..VGPUAllocationSpec::default()
        };
        let mut object = VGPUAllocation::new("a", spec);
        object.metadata.uid = Some("uid".to_owned());
        object
    }

    #[test]
    fn a_card_that_is_lost_stays_and_one_that_is_not_listed_goes_unless_someone_has_it() {
        let mut world = World { node: "n".into(), ..World::default() };
        let now = Timestamp::UNIX_EPOCH;
        take_in(&mut world, &survey(&["A", "B", "C"], 0), &settings(), now);
        world.refold_node();
        world.see_allocation(allocation_of_card("B"));

        let turns = take_in(&mut world, &survey(&["A", "B"], 1), &settings(), now);
        assert_eq!(turns.keys().collect::<Vec<_>>(), ["C"], "lost, not gone");
        let owned = |s: &str| s.to_owned();
        assert_eq!(
            states(&world),
            [(owned("A"), true, true), (owned("B"), true, true), (owned("C"), true, false)]
        );

        let turns = take_in(&mut world, &survey(&["A"], 0), &settings(), now);
        assert_eq!(turns.keys().collect::<Vec<_>>(), ["B"]);
        assert_eq!(states(&world), [(owned("A"), true, true), (owned("B"), false, false)], "C had nobody");

        for _ in 0..3 {
            take_in(&mut world, &survey(&["A", "B"], 0), &settings(), now);
        }
        assert_eq!(states(&world), [(owned("A"), true, true), (owned("B"), true, true)]);
    }

    /// A node with a card that a prepared allocation has.
    fn node_with_a_pod_on(card: &str, uuids: &[&str]) -> World {
        let mut world = World { node: "n".into(), ..World::default() };
        take_in(&mut world, &placed(uuids), &settings(), Timestamp::UNIX_EPOCH);
        world.refold_node();
        world.see_allocation(allocation_of_card(card));
        world.mark(&"uid".into(), |fact| fact.prepared = true);
        world
    }

    /// Cards in the places 0, 1, …
    fn placed(uuids: &[&str]) -> Survey {
        let mut survey = survey(uuids, 0);
        for (place, seen) in (0_u32..).zip(&mut survey.cards) {
            (seen.card.minor, seen.card.pci_address) = (place, format!("00000000:0{place}:00.0"));
        }
        survey
    }

    // Design section 4: the pod is evicted instead, and the card stays closed until all its allocations are released.
    #[test]
    fn the_pods_of_a_replaced_card_go_and_its_successor_is_closed_until_they_have() {
        let now = Timestamp::UNIX_EPOCH;
        let mut world = node_with_a_pod_on("A", &["A", "B"]);
        take_in(&mut world, &placed(&["C", "B"]), &settings(), now);
        let fault = |world: &World, uuid: &str| world.cards.as_ref().unwrap()[uuid].fault();
        assert_eq!(fault(&world, "A").unwrap(), "card C is in its place");
        assert!(fault(&world, "C").unwrap().contains("place of card A"));
        assert_eq!(fault(&world, "B"), None);
        let refused = &world.refused[&"uid".into()];
        assert_eq!((refused.code, refused.void), ("DeviceGone", false));
        world.refold_node();
        assert!(world.card_views().unwrap()[&"A".into()].replaced_by.is_some());
        for _ in 0..5 {
            take_in(&mut world, &placed(&["C", "B"]), &settings(), now);
        }
        assert!(fault(&world, "C").is_some(), "for as long as it takes");
        world.mark(&"uid".into(), |fact| fact.released = true);
        for _ in 0..settings().recovery_checks {
            assert!(fault(&world, "C").is_some());
            take_in(&mut world, &placed(&["C", "B"]), &settings(), now);
        }
        assert_eq!(states(&world), [("B".to_owned(), true, true), ("C".to_owned(), true, true)]);
    }

    #[test]
    fn a_card_that_is_only_away_keeps_its_pods() {
        let mut world = node_with_a_pod_on("A", &["A", "B"]);
        let mut away = placed(&["A", "B"]);
        away.cards.remove(0);
        take_in(&mut world, &away, &settings(), Timestamp::UNIX_EPOCH);
        assert!(world.refused.is_empty());
        assert_eq!(world.cards.as_ref().unwrap()["A"].fault().unwrap(), "the driver does not list it");
    }

    #[test]
    fn an_xid_before_the_first_look_counts_with_it() {
        let now = Timestamp::UNIX_EPOCH;
        let mut world = World { node: "n".into(), ..World::default() };
        let xid = |card: &str| XidSeen { card: card.to_owned(), xid: 79 };
        for card in ["A", "stranger"] {
            assert_eq!(hear(&mut world, xid(card), &settings(), now), (false, None));
        }
        let turns = take_in(&mut world, &survey(&["A", "B"], 0), &settings(), now);
        assert_eq!(turns.keys().collect::<Vec<_>>(), ["A"]);
        assert_eq!(world.cards.as_ref().unwrap()["A"].health.last_xid, Some(79));
        assert!(world.early_xids.is_empty());
        let (changed, turn) = hear(&mut world, xid("B"), &settings(), now);
        assert!(changed && matches!(turn, Some(Turn::Failed(_))));
    }
}
