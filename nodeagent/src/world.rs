//! What the agent knows: one value behind one lock, changed by whoever learns something, and a bell that rings on
//! every change. Nobody holds the lock across IO.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;

use mullion_core::facts::{AllocationFact, CardMode, Event};
use mullion_core::ledger::{Ledger, Standing};
use mullion_core::request::ComputeWishes;
use mullion_core::units::{AllocationUid, GpuUuid, NodeName, PodUid};
use mullion_crds::facts;
use mullion_crds::gpunode::{Card, GPUNode};
use mullion_crds::vgpuallocation::VGPUAllocation;
use parking_lot::RwLock;
use tokio::sync::watch;

use crate::device_plugin::slots::Offer;
use crate::health::Known;
use crate::inventory;
use crate::monitor::engine::Verdict;
use crate::nvml::XidSeen;
use crate::prepare::CardView;
use crate::prepare::driver_files::CardName;
use crate::state::Grant;

/// What the driver says as a whole.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Driver {
    /// It has not been asked yet in this run.
    #[default]
    Unknown,
    /// It answers.
    Ready {
        /// Its version.
        version: String,
    },
    /// It does not answer.
    Down {
        /// Stable code.
        code: &'static str,
        /// Why, in words.
        reason: String,
    },
}

/// What a container of a pod is doing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ContainerSeen {
    /// Runtime's id of the running container.
    pub running: Option<String>,
    /// Runs that the kubelet tells of, the last one that ended included: the runtime's id and when it started, in RFC 3339.
    pub runs: BTreeMap<String, Option<String>>,
}

/// A pod of this node, trimmed to what the agent needs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodSeen {
    /// Namespace.
    pub namespace: String,
    /// Name.
    pub name: String,
    /// `Succeeded` or `Failed`.
    pub ended: bool,
    /// Every ordinary init container has ended well and an app container has started.
    pub init_done: bool,
    /// Its containers.
    pub containers: BTreeMap<String, ContainerSeen>,
    /// How containers want their share of compute to be held, where that is not the default.
    pub wishes: BTreeMap<String, ComputeWishes>,
    /// Wishes that cannot be read; for them the default stands.
    pub misread: Vec<Misread>,
}

/// A container's wish that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Misread {
    /// Whose.
    pub container: String,
    /// Stable code.
    pub code: &'static str,
    /// What is wrong, and what to write.
    pub message: String,
}

/// Conditions of the node that are not read from cards.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeSigns {
    /// The kubelet watches our slots.
    pub registered: bool,
    /// NVIDIA's CDI spec: its files, or why there is none.
    pub cdi: Option<Result<String, String>>,
    /// The library that containers get; or the code and the reason why there is none, and whether that refuses them.
    pub library: Option<Result<String, (&'static str, String, bool)>>,
    /// The kubelet's topology policy, where it is known.
    pub topology: Option<String>,
    /// Sockets of other plugins for our resource.
    pub rivals: Vec<String>,
    /// Where the kubelet keeps the cgroups of pods, or why nobody knows.
    pub cgroups: Option<Result<String, (&'static str, String)>>,
    /// Whether the audit log takes rows, or why not; `None` until it was tried.
    pub audit: Option<Result<(), (&'static str, String)>>,
}

/// What shows that something of a pod is left, so that its slice is not free.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Witness {
    /// Its cgroup is there.
    #[error(
        "the pod's cgroup {path:?} is there: a process of it has not ended (one that hangs in the driver may need the \
         card's reset), or the kubelet has not cleared up"
    )]
    Cgroup {
        /// Which.
        path: PathBuf,
    },
    /// A process of it runs outside of where its cgroup was looked for.
    #[error("process {pid} of the pod runs: end it")]
    Running {
        /// On the host.
        pid: u32,
    },
    /// The driver lists a process of it that has ended.
    #[error(
        "the driver still lists process {pid} of the pod on card {card}, which has ended: wait until it lets go of it, or \
         reset the card"
    )]
    Process {
        /// Uuid of the card.
        card: String,
        /// On the host.
        pid: u32,
    },
    /// It cannot be found out.
    #[error("whether anything of the pod is left cannot be found out ({code}): the agent's log says why")]
    Unproved {
        /// Code of the error.
        code: &'static str,
    },
}

impl Witness {
    /// The stable name.
    #[must_use]
    pub const fn code(&self) -> &'static str {
        match self {
            Self::Cgroup { .. } => "CgroupLives",
            Self::Running { .. } => "ProcessLives",
            Self::Process { .. } => "ProcessOnCard",
            Self::Unproved { .. } => "ReleaseUnproved",
        }
    }
}

/// An allocation that this node cannot give.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    /// Stable code.
    pub code: &'static str,
    /// Why.
    pub message: String,
    /// It lost against another one.
    pub void: bool,
}

/// What the agent knows.
#[derive(Debug, Default)]
#[expect(clippy::struct_excessive_bools, reason = "none of them excludes another")]
pub struct World {
    /// This node.
    pub node: NodeName,
    /// This boot.
    pub boot_id: String,
    /// Uid of the Node object; empty until it is known.
    pub node_uid: String,
    /// Number of the last inventory that was written.
    pub observation: i64,
    /// The fold of everything below.
    pub ledger: Ledger,
    /// Cards that the driver told, now or before in this boot. `None` until then.
    pub cards: Option<BTreeMap<String, Known>>,
    /// XIDs of cards that were not known when they came.
    pub early_xids: Vec<XidSeen>,
    /// MIG tables by hash.
    pub mig_tables: BTreeMap<String, mullion_crds::gpunode::MigTable>,
    /// The driver.
    pub driver: Driver,
    /// The `GPUNode` as the API server last showed it; `None` when it does not exist.
    pub gpunode: Option<GPUNode>,
    /// The API server has answered about the `GPUNode` in this run.
    pub gpunode_known: bool,
    /// Allocations of this node by uid, as the API server last showed them.
    pub allocations: BTreeMap<AllocationUid, Arc<VGPUAllocation>>,
    /// Filled grants by name.
    pub grants: BTreeMap<String, Grant>,
    /// Those of former runs are among them. `false` while a state file that was lost is not made anew: then a file without
    /// an owner may be a running container's.
    pub grants_known: bool,
    /// Grants that `Allocate` answered with and that nobody has filled, with when that was, in Unix seconds. The audit log
    /// has those of former runs.
    pub issued: BTreeMap<String, i64>,
    /// Pods of this node by uid; `None` until the first list in this run.
    pub pods: Option<BTreeMap<PodUid, PodSeen>>,
    /// The API server has listed this node's allocations in this run.
    pub allocations_listed: bool,
    /// Pods that were deleted in this run and had an allocation here: their uids never come back.
    pub deleted_pods: BTreeSet<PodUid>,
    /// Allocations whose pod has ended: nothing of them is prepared any more.
    pub releasing: BTreeSet<AllocationUid>,
    /// Of those, the ones that take long, with what still shows them alive.
    pub waiting: BTreeMap<AllocationUid, Witness>,
    /// Allocations that somebody else took from the API server while a container may run on their cards: they hold
    /// until that is over, as any other.
    pub orphans: BTreeSet<AllocationUid>,
    /// Allocations that cannot be given.
    pub refused: BTreeMap<AllocationUid, Refused>,
    /// What the monitor thinks of allocations' limits; `None` until its first look in this run.
    pub verdicts: Option<BTreeMap<AllocationUid, Verdict>>,
    /// Host pids by which the driver has listed a pod's processes on a card, while they lived: in this run of the agent or,
    /// in this boot, in a former one.
    pub card_pids: BTreeMap<PodUid, BTreeSet<u32>>,
    /// Ids that the kubelet's checkpoint gives to containers.
    pub kubelet_ids: BTreeSet<String>,
    /// Other conditions.
    pub signs: NodeSigns,
    /// A planned stop is under way.
    pub closed: bool,
}

impl World {
    /// A `GPUNode` of the admin's wishes and what the agent itself knows, ahead of the API server.
    #[must_use]
    pub fn own_node(&self) -> GPUNode {
        let mut object = self.gpunode.clone().unwrap_or_default();
        object.metadata.name = Some(self.node.0.clone());
        object.status = Some(inventory::describe(self, jiff::Timestamp::UNIX_EPOCH));
        object
    }

    /// Folds the node's own cards and the admin's wishes into the ledger.
    pub fn refold_node(&mut self) {
        if self.cards.is_none() {
            return;
        }
        if let Some(fact) = facts::node(&self.own_node()) {
            self.ledger.apply(&Event::NodeObserved(fact));
        }
    }

    /// Takes in an allocation of this node. Flags that only this agent knows yet are kept by the ledger.
    pub fn see_allocation(&mut self, object: VGPUAllocation) {
        let fact = facts::allocation(&object);
        self.orphans.remove(&fact.uid);
        self.allocations.insert(fact.uid.clone(), Arc::new(object));
        self.ledger.apply(&Event::AllocationObserved(fact));
    }

    /// An allocation is gone from the API server. Absence frees nothing: one that was prepared and is not released
    /// stays, as an orphan.
    pub fn lose_allocation(&mut self, uid: &AllocationUid) {
        let held = self.ledger.allocation(uid).filter(|f| !f.released).map(|f| f.prepared);
        let prepared = held == Some(true) && self.allocations.contains_key(uid);
        if prepared || held.is_some() && self.grants_of(uid).next().is_some() {
            self.refused.remove(uid);
            self.orphans.insert(uid.clone());
            return;
        }
        self.orphans.remove(uid);
        self.allocations.remove(uid);
        if let Some(pod) = self.ledger.allocation(uid).map(|fact| fact.pod.uid.clone()) {
            self.deleted_pods.remove(&pod);
            self.card_pids.remove(&pod);
        }
        self.refused.remove(uid);
        self.releasing.remove(uid);
        self.waiting.remove(uid);
        self.ledger.apply(&Event::AllocationGone(uid.clone()));
    }

    /// Marks an allocation as prepared, ahead of the API server.
    pub fn mark(&mut self, uid: &AllocationUid, change: impl Fn(&mut AllocationFact)) {
        if let Some(mut fact) = self.ledger.allocation(uid).cloned() {
            change(&mut fact);
            self.ledger.apply(&Event::AllocationObserved(fact));
        }
    }

    /// The pod's allocation and what the ledger makes of it.
    #[must_use]
    pub fn allocation_of(&self, pod: &PodUid) -> Option<(&AllocationFact, Option<Standing>)> {
        let fact = self.ledger.of_pod(pod)?;
        let over = self.releasing.contains(&fact.uid);
        Some((fact, if over { Some(Standing::Released) } else { self.ledger.standing(&fact.uid) }))
    }

    /// The cards for a decision.
    #[must_use]
    pub fn card_views(&self) -> Option<BTreeMap<GpuUuid, CardView>> {
        let cards = self.cards.as_ref()?;
        let fact = self.ledger.node(&self.node)?;
        let modes: BTreeMap<&str, CardMode> = fact.cards.iter().map(|c| (c.uuid.as_str(), c.mode)).collect();
        let down = match &self.driver {
            Driver::Down { reason, .. } => Some(reason.clone()),
            _ => None,
        };
        let scaling = |card: &Card| {
            let wish = self.gpunode.as_ref().map(|n| facts::wish_for(n, &card.uuid, &card.model));
            wish.and_then(|w| w.memory_scaling).unwrap_or(100)
        };
        let view = |known: &Known| {
            let card = &known.card;
            CardView {
                name: CardName { uuid: card.uuid.clone(), index: card.index, minor: card.minor },
                mode: modes.get(card.uuid.as_str()).copied().unwrap_or_default(),
                present: known.present,
                replaced_by: known.replaced_by.clone(),
                fault: down.clone().or_else(|| known.fault()),
                memory_scaling: scaling(card),
            }
        };
        Some(cards.iter().map(|(uuid, known)| (uuid.as_str().into(), view(known))).collect())
    }

    /// What the cards offer the kubelet; `None` until the cards are known.
    #[must_use]
    pub fn offer(&self) -> Option<Offer> {
        let cards = self.cards.as_ref()?;
        let fact = self.ledger.node(&self.node)?;
        let mut offer = Offer::default();
        for card in fact.cards.iter().filter(|c| c.mode != CardMode::Mig) {
            offer.total = offer.total.saturating_add(card.slots);
            let present = cards.get(card.uuid.as_str()).is_some_and(|k| k.present);
            if card.healthy && present && fact.driver_ready {
                offer.usable = offer.usable.saturating_add(card.slots);
            }
        }
        Some(offer)
    }

    /// Slots that a container has, by our record or the kubelet's.
    #[must_use]
    pub fn slots_in_use(&self) -> BTreeSet<String> {
        let granted = self.grants.values().flat_map(|g| g.device_ids.iter().cloned());
        granted.chain(self.kubelet_ids.iter().cloned()).collect()
    }

    /// Whether an allocation that is not released has the card.
    #[must_use]
    pub fn holds_card(&self, uuid: &str) -> bool {
        let mut held = self.ledger.allocations_on(&self.node).filter(|a| !a.released);
        held.any(|a| a.containers.iter().flat_map(|c| &c.devices).any(|d| d.uuid.as_str() == uuid))
    }

    /// The grants of an allocation.
    pub fn grants_of<'a>(&'a self, uid: &'a AllocationUid) -> impl Iterator<Item = &'a Grant> {
        self.grants.values().filter(move |g| g.allocation == uid.as_str())
    }
}

/// The world, shared.
#[derive(Debug)]
pub struct Shared {
    world: RwLock<World>,
    bell: watch::Sender<u64>,
}

impl Shared {
    /// Shares a world.
    #[must_use]
    pub fn new(world: World) -> Arc<Self> {
        Arc::new(Self { world: RwLock::new(world), bell: watch::Sender::new(0) })
    }

    /// Looks at it.
    pub fn read<T>(&self, look: impl FnOnce(&World) -> T) -> T {
        look(&self.world.read())
    }

    /// Changes it and rings the bell.
    pub fn change<T>(&self, change: impl FnOnce(&mut World) -> T) -> T {
        let result = change(&mut self.world.write());
        self.bell.send_modify(|n| *n = n.wrapping_add(1));
        result
    }

    /// Changes it where `change` says that it did, and only then rings the bell.
    pub fn change_if(&self, change: impl FnOnce(&mut World) -> bool) {
        if change(&mut self.world.write()) {
            self.bell.send_modify(|n| *n = n.wrapping_add(1));
        }
    }

    /// Rings on every change.
    #[must_use]
    pub fn bell(&self) -> watch::Receiver<u64> {
        self.bell.subscribe()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mullion_crds::vgpuallocation::{PodReference, VGPUAllocationSpec};

    fn object() -> VGPUAllocation {
        let spec = VGPUAllocationSpec {
            pod: PodReference { name: "p".to_owned(), uid: "pod".to_owned() },
            node_name: "n".to_owned(),
            ..VGPUAllocationSpec::default()
        };
        let mut object = VGPUAllocation::new("p-pod", spec);
        object.metadata.uid = Some("a".to_owned());
        object
    }

    /// An allocation that was prepared, or not.
    fn world(prepared: bool) -> World {
        let mut world = World { node: "n".into(), ..World::default() };
        world.see_allocation(object());
        if prepared {
            let grant = Grant {
                grant: "g".to_owned(),
                allocation: "a".to_owned(),
                pod: "pod".to_owned(),
                container: "main".to_owned(),
                device_ids: vec!["slot-0000".to_owned()],
                enforced: true,
                unenforced: None,
            };
            world.grants.insert(grant.grant.clone(), grant);
            world.mark(&"a".into(), |f| f.prepared = true);
        }
        world
    }

    #[test]
    fn an_allocation_taken_away_by_hand_holds_its_cards_while_its_container_may_run() {
        for (case, prepared, released, held) in [
            ("never prepared", false, false, false),
            ("prepared", true, false, true),
            ("prepared and released", true, true, false),
        ] {
            let mut world = world(prepared);
            world.mark(&"a".into(), |f| f.released = released);
            world.lose_allocation(&"a".into());
            assert_eq!(world.allocation_of(&"pod".into()).is_some(), held, "{case}");
            assert_eq!(world.allocations.contains_key(&AllocationUid::from("a")), held, "{case}");
            assert_eq!(world.orphans.len(), usize::from(held), "{case}");
        }
    }

    #[test]
    fn an_orphan_ends_with_its_release_or_when_it_comes_back() {
        let mut orphan = world(true);
        orphan.lose_allocation(&"a".into());
        orphan.grants.clear();
        orphan.mark(&"a".into(), |f| f.released = true);
        orphan.lose_allocation(&"a".into());
        assert!(orphan.orphans.is_empty() && orphan.allocations.is_empty());
        assert_eq!(orphan.ledger.allocation(&"a".into()), None);

        let mut back = world(true);
        back.lose_allocation(&"a".into());
        back.see_allocation(object());
        assert!(back.orphans.is_empty() && back.allocation_of(&"pod".into()).is_some());
    }
}
