//! The facts and the fold.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use k8s_openapi::api::core::v1::{Node, Pod};
use kube::ResourceExt;
use mullion_core::facts::{AllocationFact, Event};
use mullion_core::ledger::{Ledger, Standing};
use mullion_core::request::{COUNT, Defaults};
use mullion_core::units::{AllocationUid, NodeName, PodUid};
use mullion_crds::{GPUNode, VGPUAllocation, names};

use super::pods::{Phase, PodRecord};

/// How many pods that are gone are remembered, to tell an allocation whose pod was never bound from one whose pod
/// was. Each is some 50 bytes.
const DEPARTED: usize = 20_000;

/// Taint by which an admin says that a node is powered off for good (Kubernetes, "Non-graceful node shutdown").
const OUT_OF_SERVICE: &str = "node.kubernetes.io/out-of-service";

/// What happened to an object, whatever the kind.
#[derive(Clone, Debug)]
pub enum Change<K> {
    /// It is there, like this.
    Seen(Box<K>),
    /// It is gone: its key, and its last state where that could be read.
    Gone(String, Option<Box<K>>),
    /// It is there and cannot be read.
    Unreadable {
        /// Its uid.
        uid: String,
        /// `spec.nodeName`, where at least that can be read.
        node: Option<String>,
    },
    /// A list is about to be asked for.
    Listing,
    /// A list is complete; whatever is not among these keys is gone. Keys: see each `Facts::…_listed`.
    Listed(BTreeSet<String>),
}

/// A Node, trimmed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeRecord {
    /// Its uid.
    pub uid: String,
    /// When the object was created, Unix seconds.
    pub created: i64,
    /// An admin has declared it dead.
    pub out_of_service: bool,
    /// It takes no new pods (`kubectl cordon`).
    pub unschedulable: bool,
}

/// Everything known.
#[derive(Debug)]
pub struct Facts {
    defaults: Defaults,
    ledger: Ledger,
    allocations: BTreeMap<AllocationUid, VGPUAllocation>,
    gpu_nodes: BTreeMap<String, GPUNode>,
    nodes: BTreeMap<String, NodeRecord>,
    slots: BTreeMap<String, mullion_core::facts::KubeNodeFact>,
    pods: BTreeMap<PodUid, PodRecord>,
    strangers: BTreeMap<PodUid, PodRecord>,
    departed: BTreeMap<PodUid, bool>,
    departed_order: VecDeque<PodUid>,
    gained: BTreeSet<NodeName>,
    /// While allocations are being listed: those that were first seen since the list was asked for.
    fresh: Option<BTreeSet<AllocationUid>>,
}

impl Facts {
    pub(super) fn new(defaults: Defaults) -> Self {
        Self {
            defaults,
            ledger: Ledger::default(),
            allocations: BTreeMap::new(),
            gpu_nodes: BTreeMap::new(),
            nodes: BTreeMap::new(),
            slots: BTreeMap::new(),
            pods: BTreeMap::new(),
            strangers: BTreeMap::new(),
            departed: BTreeMap::new(),
            departed_order: VecDeque::new(),
            gained: BTreeSet::new(),
            fresh: None,
        }
    }

    /// The fold.
    #[must_use]
    pub const fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// How wishes are read that a pod leaves open.
    #[must_use]
    pub const fn defaults(&self) -> &Defaults {
        &self.defaults
    }

    /// Every allocation as a fact and as an object, by uid.
    pub fn allocations(&self) -> impl Iterator<Item = (&AllocationFact, &VGPUAllocation)> {
        self.allocations.iter().filter_map(|(uid, object)| Some((self.ledger.allocation(uid)?, object)))
    }

    /// The allocation with that uid.
    #[must_use]
    pub fn allocation(&self, uid: &AllocationUid) -> Option<&VGPUAllocation> {
        self.allocations.get(uid)
    }

    /// The allocation of the pod with that uid.
    #[must_use]
    pub fn allocation_of_pod(&self, pod: &str) -> Option<&VGPUAllocation> {
        let fact = self.ledger.of_pod(&pod.into())?;
        self.allocations.get(&fact.uid)
    }

    /// Whether a pod can be bound to what `object` gives: it stands, nobody is removing it, and it bears our finalizer.
    ///
    /// An undo that stopped half way has taken the finalizer off. Bound like that, the allocation would vanish with
    /// its pod's object, before the node has proved that nothing of the pod is left.
    #[must_use]
    pub fn usable(&self, object: &VGPUAllocation) -> bool {
        object.metadata.deletion_timestamp.is_none()
            && object.finalizers().iter().any(|finalizer| finalizer == names::FINALIZER)
            && self.ledger.standing(&crate::cluster::uid(object)) == Some(Standing::Holds)
    }

    /// The Node of that name.
    #[must_use]
    pub fn node(&self, name: &str) -> Option<&NodeRecord> {
        self.nodes.get(name)
    }

    /// The pod with that uid, of those under our scheduler's name.
    #[must_use]
    pub fn pod(&self, uid: &str) -> Option<&PodRecord> {
        self.pods.get(&PodUid::from(uid))
    }

    /// Every pod under our scheduler's name.
    pub fn pods(&self) -> impl Iterator<Item = &PodRecord> {
        self.pods.values()
    }

    /// Every pending pod under another scheduler's name that mentions our resources.
    pub fn strangers(&self) -> impl Iterator<Item = &PodRecord> {
        self.strangers.values()
    }

    /// For a pod whose end was seen: whether it had been bound by then. `None` when its end was not seen.
    #[must_use]
    pub fn departed_bound(&self, uid: &str) -> Option<bool> {
        self.departed.get(&PodUid::from(uid)).copied()
    }

    /// Takes the nodes on which capacity may have become free since the last call.
    pub fn take_gained(&mut self) -> BTreeSet<NodeName> {
        std::mem::take(&mut self.gained)
    }

    /// Folds one fact, and notes the node if it may have gained.
    pub fn fold(&mut self, event: &Event) -> bool {
        let node = self.may_gain(event);
        let before = self.ledger.generation();
        let unplaced = self.ledger.unplaced();
        let changed = self.ledger.apply(event);
        // A report that no fit can tell from the one before (its number has grown) is no gain.
        if self.ledger.generation() != before
            && let Some(node) = node
        {
            self.gained.insert(node);
        }
        if self.ledger.unplaced() < unplaced {
            self.gained.extend(self.ledger.nodes().cloned());
        }
        changed
    }

    /// The node on which `event` may free something, by what is known before it.
    fn may_gain(&self, event: &Event) -> Option<NodeName> {
        match event {
            Event::NodeObserved(fact) => Some(fact.name.clone()),
            Event::KubeNodeObserved(fact) => Some(fact.name.clone()),
            Event::AllocationObserved(fact) => {
                let Some(known) = self.ledger.allocation(&fact.uid) else {
                    // It may be the one that a pod there was missing, or that could not be read.
                    let closed = self.ledger.unaccounted(&fact.node).next().is_some();
                    return closed.then(|| fact.node.clone());
                };
                let freed = (fact.released && !known.released) || (fact.init_done && !known.init_done);
                freed.then(|| fact.node.clone())
            }
            Event::AllocationGone(uid) => {
                let Some(known) = self.ledger.allocation(uid) else {
                    let mut unreadable = self.ledger.unreadable();
                    return unreadable.find(|(other, _)| *other == uid)?.1.cloned();
                };
                (!known.released).then(|| known.node.clone())
            }
            Event::HoldEnded(pod) => self.ledger.hold_of(pod).map(|hold| hold.node.clone()),
            Event::PodEnded(pod) => self.ledger.started_on(pod).cloned(),
            Event::NodeGone(_)
            | Event::KubeNodeGone(_)
            | Event::Held(_)
            | Event::AllocationUnreadable { .. }
            | Event::PodStarted { .. } => None,
        }
    }

    /// An allocation was seen, by a watch or in an answer of the API server.
    pub fn allocation_seen(&mut self, object: VGPUAllocation) {
        let fact = mullion_crds::facts::allocation(&object);
        let uid = fact.uid.clone();
        if uid.as_str().is_empty() {
            return;
        }
        let known = self.ledger.allocation(&uid).is_some();
        self.fold(&Event::AllocationObserved(fact));
        if let Some(fresh) = self.fresh.as_mut().filter(|_| !known) {
            fresh.insert(uid.clone());
        }
        // An answer may be older or newer than what the watch said: the ledger's flags only rise, and of the
        // object the one with the later version is kept where both are numbers.
        let older = |known: &VGPUAllocation| newer(&object, known).is_some_and(|newer| !newer);
        if self.ledger.allocation(&uid).is_some() && !self.allocations.get(&uid).is_some_and(older) {
            self.allocations.insert(uid, object);
        }
    }

    /// An allocation is gone.
    pub fn allocation_gone(&mut self, uid: &AllocationUid) {
        self.allocations.remove(uid);
        self.fold(&Event::AllocationGone(uid.clone()));
    }

    /// An allocation is there and cannot be read; of its node what could be.
    pub fn allocation_unreadable(&mut self, uid: String, node: Option<String>) {
        self.fold(&Event::AllocationUnreadable { uid: uid.into(), node: node.map(Into::into) });
    }

    /// Allocations are about to be listed.
    pub fn allocations_listing(&mut self) {
        self.fresh = Some(BTreeSet::new());
    }

    /// All allocations are listed; `uids` are those that existed when they were.
    ///
    /// One that was first seen since then, in the answer to its creation, may be younger than the list: it stays,
    /// and the watch that follows the list reports its end. Ending it here would be for good.
    pub fn allocations_listed(&mut self, uids: &BTreeSet<String>) {
        let fresh = self.fresh.take().unwrap_or_default();
        let unreadable = self.ledger.unreadable().map(|(uid, _)| uid.clone());
        let known = self.ledger.allocations().map(|fact| fact.uid.clone()).chain(unreadable);
        let lost: Vec<AllocationUid> =
            known.filter(|uid| !uids.contains(uid.as_str()) && !fresh.contains(uid)).collect();
        for uid in lost {
            tracing::info!(%uid, "allocation vanished between two lists");
            self.allocation_gone(&uid);
        }
    }

    /// A `GPUNode` was seen.
    pub fn gpu_node_seen(&mut self, object: GPUNode) {
        let name = object.name_any();
        match mullion_crds::facts::node(&object) {
            Some(fact) => self.fold(&Event::NodeObserved(fact)),
            None => self.fold(&Event::NodeGone(name.as_str().into())),
        };
        self.gpu_nodes.insert(name, object);
    }

    /// A `GPUNode` is gone.
    pub fn gpu_node_gone(&mut self, name: &str) {
        self.gpu_nodes.remove(name);
        self.fold(&Event::NodeGone(name.into()));
    }

    /// All `GPUNode`s are listed; `names` are those that exist.
    pub fn gpu_nodes_listed(&mut self, names: &BTreeSet<String>) {
        let lost: Vec<String> = self.gpu_nodes.keys().filter(|n| !names.contains(*n)).cloned().collect();
        for name in lost {
            self.gpu_node_gone(&name);
        }
    }

    /// A Node was seen.
    pub fn node_seen(&mut self, object: &Node) {
        let name = object.name_any();
        let fact = mullion_crds::facts::kube_node(object, COUNT);
        self.fold(&Event::KubeNodeObserved(fact.clone()));
        self.slots.insert(name.clone(), fact);
        let record = Self::trim(object);
        let before = self.nodes.insert(name.clone(), record.clone());
        if before.is_some_and(|b| b.unschedulable && !record.unschedulable) {
            self.gained.insert(name.into());
        }
    }

    /// What is kept of a Node.
    #[must_use]
    pub fn trim(object: &Node) -> NodeRecord {
        let spec = object.spec.as_ref();
        let taints = spec.and_then(|s| s.taints.as_ref());
        NodeRecord {
            uid: object.uid().unwrap_or_default(),
            created: object.creation_timestamp().map_or(0, |t| t.0.as_second()),
            out_of_service: taints.is_some_and(|t| t.iter().any(|taint| taint.key == OUT_OF_SERVICE)),
            unschedulable: spec.and_then(|s| s.unschedulable).unwrap_or(false),
        }
    }

    /// A Node is gone.
    pub fn node_gone(&mut self, name: &str) {
        self.nodes.remove(name);
        self.slots.remove(name);
        self.fold(&Event::KubeNodeGone(name.into()));
    }

    /// All Nodes are listed; `names` are those that exist.
    pub fn nodes_listed(&mut self, names: &BTreeSet<String>) {
        let lost: Vec<String> = self.nodes.keys().filter(|n| !names.contains(*n)).cloned().collect();
        for name in lost {
            self.node_gone(&name);
        }
    }

    /// A pod under our scheduler's name was seen.
    pub fn pod_seen(&mut self, object: &Pod) {
        if let Some(record) = PodRecord::read(object, &self.defaults) {
            let pod = record.pod.uid.clone();
            match &record.node {
                Some(node) if record.holds() => {
                    self.fold(&Event::PodStarted { pod, node: node.clone() });
                }
                _ if record.phase == Phase::Ended => {
                    self.fold(&Event::PodEnded(pod));
                }
                _ => {}
            }
            self.pods.insert(record.pod.uid.clone(), record);
        }
    }

    /// A pod under our scheduler's name is gone; `last` is its final state.
    pub fn pod_gone(&mut self, uid: String, last: Option<&Pod>) {
        let uid = PodUid::from(uid);
        self.pods.remove(&uid);
        self.fold(&Event::PodEnded(uid.clone()));
        if let Some(last) = last {
            let node = last.spec.as_ref().and_then(|s| s.node_name.as_deref());
            self.depart(uid, node.is_some_and(|n| !n.is_empty()));
        }
    }

    /// All pods under our scheduler's name are listed; `uids` are those that exist.
    pub fn pods_listed(&mut self, uids: &BTreeSet<String>) {
        // What happened to them between two lists is not known: no `departed` entry.
        let lost: Vec<PodUid> =
            self.pods.keys().filter(|uid| !uids.contains(uid.as_str())).cloned().collect();
        for uid in lost {
            self.pods.remove(&uid);
            self.fold(&Event::PodEnded(uid));
        }
    }

    /// A pending pod under another scheduler's name was seen.
    pub fn stranger_seen(&mut self, object: &Pod) {
        let mentions = mullion_core::request::mentions_us(&mullion_crds::pod::view(object));
        let Some(record) = PodRecord::read(object, &self.defaults) else { return };
        // One that asks for none of them (`nvidia.com/gpu: 0`) misses nothing.
        if mentions && !matches!(record.request, Ok(None)) {
            self.strangers.insert(record.pod.uid.clone(), record);
        }
    }

    /// A pod under another scheduler's name is gone, or no longer pending.
    pub fn stranger_gone(&mut self, uid: &str) {
        self.strangers.remove(&PodUid::from(uid));
    }

    /// All pending pods under other schedulers' names are listed; `uids` are those that exist.
    pub fn strangers_listed(&mut self, uids: &BTreeSet<String>) {
        self.strangers.retain(|uid, _| uids.contains(uid.as_str()));
    }

    fn depart(&mut self, uid: PodUid, bound: bool) {
        if self.departed.insert(uid.clone(), bound).is_none() {
            self.departed_order.push_back(uid);
        }
        if self.departed_order.len() > DEPARTED
            && let Some(oldest) = self.departed_order.pop_front()
        {
            self.departed.remove(&oldest);
        }
    }

    /// How many allocations, cards and nodes the ledger sees otherwise than a fold of the same objects from nothing.
    #[must_use]
    pub fn drift(&self) -> usize {
        let mut fresh = Ledger::default();
        for fact in self.gpu_nodes.values().filter_map(mullion_crds::facts::node) {
            fresh.apply(&Event::NodeObserved(fact));
        }
        for fact in self.slots.values() {
            fresh.apply(&Event::KubeNodeObserved(fact.clone()));
        }
        for fact in self.allocations.values().map(mullion_crds::facts::allocation) {
            fresh.apply(&Event::AllocationObserved(fact));
        }
        for hold in self.ledger.holds() {
            fresh.apply(&Event::Held(hold.clone()));
        }
        for (uid, node) in self.ledger.unreadable() {
            fresh.apply(&Event::AllocationUnreadable { uid: uid.clone(), node: node.cloned() });
        }
        for record in self.pods.values().filter(|record| record.holds()) {
            if let Some(node) = record.node.clone() {
                fresh.apply(&Event::PodStarted { pod: record.pod.uid.clone(), node });
            }
        }
        let standings = |ledger: &Ledger| -> BTreeMap<AllocationUid, Option<Standing>> {
            ledger
                .allocations()
                .map(|fact: &AllocationFact| (fact.uid.clone(), ledger.standing(&fact.uid)))
                .collect()
        };
        let (ours, theirs) = (standings(&self.ledger), standings(&fresh));
        let uids: BTreeSet<&AllocationUid> = ours.keys().chain(theirs.keys()).collect();
        let allocations = uids.iter().filter(|uid| ours.get(**uid) != theirs.get(**uid)).count();
        let nodes: BTreeSet<&NodeName> = self.ledger.nodes().chain(fresh.nodes()).collect();
        let cards = nodes.iter().filter(|n| self.ledger.card_usage(n) != fresh.card_usage(n)).count();
        let unaccounted = |n: &&&NodeName| !self.ledger.unaccounted(n).eq(fresh.unaccounted(n));
        allocations + cards + nodes.iter().filter(unaccounted).count()
    }
}

/// Whether `a` is a later version than `b` of the same object; `None` where a version is no number.
fn newer(a: &VGPUAllocation, b: &VGPUAllocation) -> Option<bool> {
    let version = |object: &VGPUAllocation| object.resource_version()?.parse::<u128>().ok();
    Some(version(a)? >= version(b)?)
}
