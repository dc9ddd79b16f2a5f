use std::borrow::Borrow;
use std::collections::{BTreeMap, BTreeSet};

use jiff::Timestamp;
use serde::Serialize;

use crate::{
    AllocationRef, CardSeen, CardState, ContainerKind, ContainerShares, Error, Event, PodRef, Row, Share,
};

/// What a node's events add up to: who holds what since when.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeLedger {
    /// Number of the last row folded in.
    pub seq: u64,
    /// Boot in which the last agent started.
    pub boot_id: Option<String>,
    /// Its version.
    pub agent_version: Option<String>,
    /// Slots of the last registration.
    pub slots: Option<u32>,
    /// Number of the last inventory.
    pub observation: u64,
    /// The cards in it.
    pub cards: Vec<CardSeen>,
    /// Last health of each card that ever changed.
    pub health: BTreeMap<String, CardHealth>,
    /// What is held, by the allocation's uid.
    pub allocations: BTreeMap<String, HeldAllocation>,
    /// Grants that still exist, by name.
    pub grants: BTreeMap<String, Grant>,
    /// Uids of released allocations and names of grants that are over, none of which ever comes again: a row that was
    /// written late brings none back.
    #[serde(skip)]
    over: BTreeSet<String>,
}

/// Health of a card.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct CardHealth {
    /// What it is.
    pub state: CardState,
    /// The XID that caused it.
    pub xid: Option<u64>,
    /// Since when.
    pub since: Timestamp,
    /// Why.
    pub message: String,
}

/// An allocation that holds cards: reserved and neither voided nor released.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct HeldAllocation {
    /// Name of the object.
    pub name: String,
    /// Whose.
    pub pod: PodRef,
    /// Its sequence; 0 where only its preparation is known.
    pub sequence: u64,
    /// Creation time of the object, Unix seconds.
    pub created: i64,
    /// Since when it holds its cards.
    pub since: Timestamp,
    /// Every ordinary init container has ended.
    pub init_done: bool,
    /// What each container has.
    pub containers: BTreeMap<String, HeldContainer>,
}

/// A container's part of an allocation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct HeldContainer {
    /// Its kind.
    pub kind: ContainerKind,
    /// Its cards in its own order.
    pub devices: Vec<Share>,
    /// Its grant, once prepared.
    pub grant: Option<String>,
    /// The kubelet's device ids, once prepared.
    pub device_ids: Vec<String>,
    /// When it was last prepared.
    pub prepared: Option<Timestamp>,
}

/// A grant given to the kubelet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Grant {
    /// Slots it stands for.
    pub device_ids: Vec<String>,
    /// When `Allocate` answered with it.
    pub issued: Timestamp,
    /// Uid of the allocation it was filled for.
    pub allocation: Option<String>,
    /// Container it was filled for.
    pub container: Option<String>,
}

/// Somebody who has a card.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Holder {
    /// Which allocation.
    pub allocation: AllocationRef,
    /// Whose.
    pub pod: PodRef,
    /// Which container.
    pub container: String,
    /// Its kind.
    pub container_kind: ContainerKind,
    /// What it has.
    pub share: Share,
    /// Since when the card is held for it.
    pub since: Timestamp,
    /// When its container was last prepared; absent while it is only reserved.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prepared: Option<Timestamp>,
}

impl Holder {
    /// Since when it is in the state it is in: last prepared, or reserved.
    #[must_use]
    pub fn state_since(&self) -> Timestamp {
        self.prepared.unwrap_or(self.since)
    }
}

/// Folds rows, oldest first, into a ledger.
///
/// # Errors
/// [`Error::UnknownEvent`] for a row of a newer release: a ledger that leaves facts out would be wrong.
pub fn replay<R: Borrow<Row>>(rows: impl IntoIterator<Item = R>) -> Result<NodeLedger, Error> {
    let mut ledger = NodeLedger::default();
    for row in rows {
        let row = row.borrow();
        ledger.apply(row.seq, row.time, &row.event()?);
    }
    Ok(ledger)
}

impl NodeLedger {
    /// Folds in the event of row `seq`. A row that is known already changes nothing.
    pub fn apply(&mut self, seq: u64, time: Timestamp, event: &Event) {
        if seq <= self.seq {
            return;
        }
        self.seq = seq;
        match event {
            Event::AgentStarted { boot_id, agent_version } => {
                self.boot_id = Some(boot_id.clone());
                self.agent_version = Some(agent_version.clone());
            }
            Event::PluginRegistered { slots, .. } => self.slots = Some(*slots),
            Event::InventoryChanged { observation, cards, .. } => {
                self.observation = *observation;
                self.cards.clone_from(cards);
            }
            Event::HealthChanged { card, state, xid, message } => {
                let health = CardHealth { state: *state, xid: *xid, since: time, message: message.clone() };
                self.health.insert(card.clone(), health);
            }
            Event::AllocationReserved { allocation, .. } | Event::Prepared { allocation, .. }
                if self.over.contains(&allocation.uid) =>
            {
                if let Some(grant) = event.grant() {
                    self.end_grant(grant);
                }
            }
            Event::AllocationReserved { allocation, pod, sequence, created, containers } => {
                let held = self.held(allocation, pod, time);
                held.sequence = *sequence;
                held.created = *created;
                for ContainerShares { name, kind, devices } in containers {
                    held.container(name, *kind).devices.clone_from(devices);
                }
            }
            Event::GrantIssued { grant, device_ids } => {
                let issued =
                    Grant { device_ids: device_ids.clone(), issued: time, allocation: None, container: None };
                if !self.over.contains(grant) {
                    self.grants.entry(grant.clone()).or_insert(issued);
                }
            }
            Event::GrantWithdrawn { grant, .. } => self.end_grant(grant),
            Event::Prepared { allocation, pod, container, container_kind, grant, device_ids, devices } => {
                let part = self.held(allocation, pod, time).container(container, *container_kind);
                part.devices.clone_from(devices);
                part.device_ids.clone_from(device_ids);
                part.grant = Some(grant.clone());
                part.prepared = Some(time);
                let grant = self.grants.entry(grant.clone()).or_insert_with(|| Grant {
                    device_ids: device_ids.clone(),
                    issued: time,
                    allocation: None,
                    container: None,
                });
                grant.allocation = Some(allocation.uid.clone());
                grant.container = Some(container.clone());
            }
            Event::InitDone { allocation, .. } => {
                if let Some(held) = self.allocations.get_mut(&allocation.uid) {
                    held.init_done = true;
                }
            }
            Event::AllocationVoided { allocation, .. } | Event::Released { allocation, .. } => {
                self.allocations.remove(&allocation.uid);
                let its = |grant: &Grant| grant.allocation.as_ref() == Some(&allocation.uid);
                let over = self.grants.extract_if(.., |_, grant| its(grant)).map(|(name, _)| name);
                self.over.extend(over);
                // A void one may be prepared all the same by an agent that sees it otherwise.
                if matches!(event, Event::Released { .. }) {
                    self.over.insert(allocation.uid.clone());
                }
            }
            Event::PrepareRefused { .. }
            | Event::ContainerStarted { .. }
            | Event::UsageMinute { .. }
            | Event::LimitBypassed { .. }
            | Event::BypassEnded { .. }
            | Event::UsageFileDamaged { .. }
            | Event::UsageFileReadable { .. }
            | Event::AuditGap { .. } => {}
        }
    }

    /// Who has `card` (or a MIG instance by its own uuid), in order of allocation and container. An ordinary init
    /// container has it until the pod's init containers have ended.
    #[must_use]
    pub fn holders(&self, card: &str) -> Vec<Holder> {
        let is_it = |share: &&Share| {
            share.card == card || share.mig.as_ref().and_then(|mig| mig.uuid.as_deref()) == Some(card)
        };
        let mut holders = Vec::new();
        for (uid, held) in &self.allocations {
            let live = |part: &HeldContainer| part.kind != ContainerKind::Init || !held.init_done;
            for (container, part) in held.containers.iter().filter(|(_, part)| live(part)) {
                holders.extend(part.devices.iter().filter(is_it).map(|share| Holder {
                    allocation: AllocationRef { uid: uid.clone(), name: held.name.clone() },
                    pod: held.pod.clone(),
                    container: container.clone(),
                    container_kind: part.kind,
                    share: share.clone(),
                    since: held.since,
                    prepared: part.prepared,
                }));
            }
        }
        holders
    }

    fn end_grant(&mut self, grant: &str) {
        self.grants.remove(grant);
        self.over.insert(grant.to_owned());
    }

    fn held(&mut self, allocation: &AllocationRef, pod: &PodRef, time: Timestamp) -> &mut HeldAllocation {
        self.allocations.entry(allocation.uid.clone()).or_insert_with(|| HeldAllocation {
            name: allocation.name.clone(),
            pod: pod.clone(),
            sequence: 0,
            created: 0,
            since: time,
            init_done: false,
            containers: BTreeMap::new(),
        })
    }
}

impl HeldAllocation {
    fn container(&mut self, name: &str, kind: ContainerKind) -> &mut HeldContainer {
        self.containers.entry(name.to_owned()).or_insert_with(|| HeldContainer {
            kind,
            devices: Vec::new(),
            grant: None,
            device_ids: Vec::new(),
            prepared: None,
        })
    }
}
