//! The fold: facts in, what is free out.
//!
//! Every process that needs to know what is free folds the same facts with [`Ledger::apply`]. Allocations of a
//! node stand in one order (prepared first, then sequence, creation time, uid); one that does not fit after
//! those before it is *void*: it is charged nothing, its node's agent refuses it and the controller evicts its
//! pod. So two deciders that did not see each other can never over-give a card.

mod node;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::charge::{Sum, slot_limit};
use crate::facts::{AllocationFact, CardFact, Event, KubeNodeFact, NodeFact};
use crate::placement::Placement;
use crate::refusal::{Code, Refusal};
use crate::request::PodRequest;
use crate::units::{AllocationUid, GpuUuid, Mib, NodeName, PodUid};
pub(crate) use node::{Card, Node};
use node::{Entry, Which};

/// How many ended allocations are remembered, so that a late observation does not bring one back. Many more than
/// a watch can have under way; at about 100 bytes each.
const TOMBSTONES: usize = 65_536;

/// What the fold makes of an allocation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Standing {
    /// It has what it says, and is charged for it.
    Holds,
    /// It does not fit after those before it: charged nothing, must never be prepared.
    Void {
        /// What it lacks.
        by: Shortage,
    },
    /// Proven to be over.
    Released,
    /// It was never prepared, and its node does not report that card (any more).
    DeviceGone {
        /// The card.
        uuid: GpuUuid,
    },
}

/// What a void allocation lacks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shortage {
    /// On which card.
    pub uuid: GpuUuid,
    /// By which rule.
    pub code: Code,
    /// How much it asks for, in the rule's unit (MiB, percent, containers).
    pub asked: u64,
    /// How much those before it leave.
    pub free: u64,
}

impl fmt::Display for Shortage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { uuid, code, asked, free } = self;
        write!(f, "card {uuid}: {code}: {free} free of {asked} asked")
    }
}

/// An amount of one card, or of what is left of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// Memory.
    pub memory: Mib,
    /// Percent of SMs.
    pub cores: u64,
    /// Containers.
    pub slots: u64,
}

/// A card and how it is used.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CardUsage {
    /// The card.
    pub card: CardFact,
    /// Sum over the allocations that hold.
    pub used: Usage,
    /// What is left; zero where more is used than there is.
    pub free: Usage,
}

/// Something that holds cards of a node, while which and how much is not known. Nothing new is placed there.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Unaccounted {
    /// An allocation that cannot be read.
    Allocation(AllocationUid),
    /// A pod that runs there and has no allocation there: somebody took that away by hand. Its node's agent keeps
    /// its cards for it until it has ended, and would refuse whatever is placed on them.
    Pod(PodUid),
}

/// A card on which more stands than it has.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Overcommit {
    /// Its node.
    pub node: NodeName,
    /// The card.
    pub uuid: GpuUuid,
    /// What stands on it.
    pub used: Usage,
    /// What it has.
    pub capacity: Usage,
}

/// What is known of the cluster's GPUs. A value: cloning it gives a world to try things in.
#[derive(Clone, Debug, Default)]
pub struct Ledger {
    generation: u64,
    nodes: BTreeMap<NodeName, Node>,
    allocations: BTreeMap<AllocationUid, Arc<AllocationFact>>,
    by_pod: BTreeMap<PodUid, BTreeSet<AllocationUid>>,
    holds: BTreeMap<PodUid, Arc<AllocationFact>>,
    /// Allocations that cannot be read, and where they are.
    unreadable: BTreeMap<AllocationUid, Option<NodeName>>,
    /// How many of those name no node: any node may be theirs.
    nowhere: usize,
    /// Pods whose containers with GPUs have started, until they end.
    started: BTreeMap<PodUid, NodeName>,
    gone: BTreeSet<AllocationUid>,
    gone_order: VecDeque<AllocationUid>,
}

impl Ledger {
    /// Folds `events` into an empty ledger.
    pub fn replay<'a>(events: impl IntoIterator<Item = &'a Event>) -> Self {
        let mut ledger = Self::default();
        for event in events {
            ledger.apply(event);
        }
        ledger
    }

    /// Folds in one fact; true if anything changed.
    ///
    /// A fact is never refused. One that is known already changes nothing, and facts about different objects
    /// may come in any order. Of one `GPUNode` or Node the last report counts, as a watch delivers them; an
    /// allocation's flags only ever rise, and one that is gone stays gone.
    pub fn apply(&mut self, event: &Event) -> bool {
        match event {
            Event::NodeObserved(fact) => self.node_observed(fact),
            Event::NodeGone(name) => self.node_gone(name),
            Event::KubeNodeObserved(fact) => self.kube_node(&fact.name, Some(fact)),
            Event::KubeNodeGone(name) => self.kube_node(name, None),
            Event::AllocationObserved(fact) => self.allocation_observed(fact),
            Event::AllocationGone(uid) => self.allocation_gone(uid),
            Event::AllocationUnreadable { uid, node } => self.allocation_unreadable(uid, node.as_ref()),
            Event::PodStarted { pod, node } => self.pod_started(pod, node),
            Event::PodEnded(pod) => self.pod_ended(pod),
            Event::Held(fact) => self.held(fact),
            Event::HoldEnded(pod) => self.end_hold(pod),
        }
    }

    /// Grows with every change that can alter any fit, and with no other.
    #[must_use]
    pub const fn generation(&self) -> u64 {
        self.generation
    }

    /// The generation at the last change that can alter a fit on `node`; 0 when nothing is known of it.
    #[must_use]
    pub fn node_generation(&self, node: &NodeName) -> u64 {
        self.nodes.get(node).map_or(0, |n| n.generation)
    }

    /// Every node with a `GPUNode` or with allocations.
    pub fn nodes(&self) -> impl Iterator<Item = &NodeName> {
        self.nodes.iter().filter(|(_, n)| n.fact.is_some() || !n.entries.is_empty()).map(|(name, _)| name)
    }

    /// The `GPUNode` of that name, as last observed.
    #[must_use]
    pub fn node(&self, node: &NodeName) -> Option<&NodeFact> {
        self.nodes.get(node)?.fact.as_ref()
    }

    /// The Node of that name, as last observed.
    #[must_use]
    pub fn kube_node_of(&self, node: &NodeName) -> Option<&KubeNodeFact> {
        self.nodes.get(node)?.kube.as_ref()
    }

    /// Each card of `node` by index, with what is used of it and what is left.
    #[must_use]
    pub fn card_usage(&self, node: &NodeName) -> Vec<CardUsage> {
        self.nodes.get(node).into_iter().flat_map(|n| &n.cards).map(card_usage).collect()
    }

    /// Device ids that the kubelet of `node` has given out or will: every allocation that is not released
    /// counts (void ones too, since their pods are admitted), and every hold.
    #[must_use]
    pub fn slots_used(&self, node: &NodeName) -> u64 {
        self.nodes.get(node).map_or(0, |n| n.slots_used)
    }

    /// The allocation with that uid.
    #[must_use]
    pub fn allocation(&self, uid: &AllocationUid) -> Option<&AllocationFact> {
        self.allocations.get(uid).map(Arc::as_ref)
    }

    /// The pod's allocation; where there are several (one is being removed), one that is not released, and of
    /// those the first in uid order.
    #[must_use]
    pub fn of_pod(&self, pod: &PodUid) -> Option<&AllocationFact> {
        let mut all = self.by_pod.get(pod)?.iter().filter_map(|uid| self.allocation(uid));
        let first = all.next()?;
        if first.released { Some(all.find(|a| !a.released).unwrap_or(first)) } else { Some(first) }
    }

    /// Every allocation that is known, by uid.
    pub fn allocations(&self) -> impl Iterator<Item = &AllocationFact> {
        self.allocations.values().map(Arc::as_ref)
    }

    /// Every allocation that cannot be read, with its node where that is known.
    pub fn unreadable(&self) -> impl Iterator<Item = (&AllocationUid, Option<&NodeName>)> {
        self.unreadable.iter().map(|(uid, node)| (uid, node.as_ref()))
    }

    /// Where the pod's containers with GPUs have started, until it ends.
    #[must_use]
    pub fn started_on(&self, pod: &PodUid) -> Option<&NodeName> {
        self.started.get(pod)
    }

    /// What holds cards of `node` while which is not known; see also [`Self::unplaced`].
    pub fn unaccounted(&self, node: &NodeName) -> impl Iterator<Item = &Unaccounted> + use<'_> {
        self.nodes.get(node).into_iter().flat_map(|n| &n.unaccounted)
    }

    /// How many allocations cannot be read so far that not even their node is known. While there is one, no node
    /// takes anything new.
    #[must_use]
    pub const fn unplaced(&self) -> usize {
        self.nowhere
    }

    /// What this process holds for a pod.
    #[must_use]
    pub fn hold_of(&self, pod: &PodUid) -> Option<&AllocationFact> {
        self.holds.get(pod).map(Arc::as_ref)
    }

    /// Everything that this process holds, by pod.
    pub fn holds(&self) -> impl Iterator<Item = &AllocationFact> {
        self.holds.values().map(Arc::as_ref)
    }

    /// The allocations on `node` in fold order: prepared first, then sequence, creation time, uid. No holds.
    pub fn allocations_on(&self, node: &NodeName) -> impl Iterator<Item = &AllocationFact> + use<'_> {
        let entries = self.nodes.get(node).into_iter().flat_map(|n| &n.entries);
        entries.filter(|e| !e.hold).map(|e| e.fact.as_ref())
    }

    /// What the fold makes of an allocation; `None` for one that is not known.
    #[must_use]
    pub fn standing(&self, uid: &AllocationUid) -> Option<Standing> {
        let node = self.nodes.get(&self.allocations.get(uid)?.node)?;
        node.entry(&Which::Allocation(uid)).map(|e| e.standing.clone())
    }

    /// What the fold makes of a hold; `None` when there is none. A hold turns void when another decider's
    /// allocation took its place.
    #[must_use]
    pub fn hold_standing(&self, pod: &PodUid) -> Option<Standing> {
        let node = self.nodes.get(&self.holds.get(pod)?.node)?;
        node.entry(&Which::Hold(pod)).map(|e| e.standing.clone())
    }

    /// The allocations on `node` that are void, in fold order.
    #[must_use]
    pub fn void_on(&self, node: &NodeName) -> Vec<AllocationUid> {
        let entries = self.nodes.get(node).into_iter().flat_map(|n| &n.entries);
        entries
            .filter(|e| !e.hold && matches!(e.standing, Standing::Void { .. }))
            .map(|e| e.fact.uid.clone())
            .collect()
    }

    /// The sequence for a new allocation on `node`: 1 + the highest that is known there, holds included.
    #[must_use]
    pub fn next_sequence(&self, node: &NodeName) -> u64 {
        let entries = self.nodes.get(node).into_iter().flat_map(|n| &n.entries);
        entries.map(|e| e.fact.sequence).max().unwrap_or(0).saturating_add(1)
    }

    /// The cards on which more stands than they have.
    ///
    /// Empty, unless an admin lowered a card's capacity under containers that run already.
    #[must_use]
    pub fn overcommitted(&self) -> Vec<Overcommit> {
        let cards = self.nodes.iter().flat_map(|(name, n)| n.cards.iter().map(move |c| (name, c)));
        let over = |(name, card): (&NodeName, &Card)| {
            let (used, capacity) = (usage(&card.used), capacity(&card.fact));
            let fits = used.memory <= capacity.memory
                && used.cores <= capacity.cores
                && used.slots <= capacity.slots;
            let (node, uuid) = (name.clone(), card.fact.uuid.clone());
            (!fits).then_some(Overcommit { node, uuid, used, capacity })
        };
        cards.filter_map(over).collect()
    }

    /// [`crate::placement::fit`] as a method.
    ///
    /// # Errors
    /// A [`Refusal`] when `node` cannot take the pod.
    pub fn fit(&self, request: &PodRequest, node: &NodeName) -> Result<Placement, Refusal> {
        crate::placement::fit(request, self, node)
    }

    /// What placement decides from.
    pub(crate) fn state(&self, node: &NodeName) -> Option<&Node> {
        self.nodes.get(node)
    }

    fn node_observed(&mut self, fact: &NodeFact) -> bool {
        let node = self.nodes.entry(fact.name.clone()).or_default();
        let visible = match &node.fact {
            Some(known) if known == fact => return false,
            Some(known) => {
                known.node_uid != fact.node_uid
                    || known.cordoned != fact.cordoned
                    || known.driver_ready != fact.driver_ready
                    || known.cards != fact.cards
            }
            None => true,
        };
        node.observe(Some(fact.clone()));
        node.fold();
        self.settle(&fact.name, visible);
        true
    }

    fn node_gone(&mut self, name: &NodeName) -> bool {
        let Some(node) = self.nodes.get_mut(name).filter(|n| n.fact.is_some()) else { return false };
        node.observe(None);
        node.fold();
        self.settle(name, true);
        true
    }

    fn kube_node(&mut self, name: &NodeName, fact: Option<&KubeNodeFact>) -> bool {
        if self.kube_node_of(name) == fact {
            return false;
        }
        self.nodes.entry(name.clone()).or_default().kube = fact.cloned();
        self.settle(name, true);
        true
    }

    fn allocation_observed(&mut self, seen: &AllocationFact) -> bool {
        if self.gone.contains(&seen.uid) {
            return false;
        }
        self.end_unreadable(&seen.uid);
        let known = self.allocations.get(&seen.uid);
        // Only an allocation that was not known yet can be the one that a hold stood for.
        let new = known.is_none();
        let fact = match known {
            None => seen.clone(),
            Some(known) => {
                let (prepared, init_done, released) = (
                    known.prepared || seen.prepared,
                    known.init_done || seen.init_done,
                    known.released || seen.released,
                );
                if (prepared, init_done, released) == (known.prepared, known.init_done, known.released) {
                    return false;
                }
                AllocationFact { prepared, init_done, released, ..known.as_ref().clone() }
            }
        };
        let held = if new { self.holds.remove(&seen.pod.uid) } else { None };
        let fact = Arc::new(fact);
        self.by_pod.entry(fact.pod.uid.clone()).or_default().insert(fact.uid.clone());
        self.allocations.insert(fact.uid.clone(), Arc::clone(&fact));
        if let Some(held) = held.as_ref().filter(|h| h.node != fact.node) {
            self.take(&held.node, &Which::Hold(&fact.pod.uid));
        }
        let name = fact.node.clone();
        let node = self.nodes.entry(name.clone()).or_default();
        node.take(&Which::Allocation(&fact.uid));
        if held.is_some() {
            node.take(&Which::Hold(&fact.pod.uid));
        }
        node.put(Entry::new(fact, false));
        let visible = node.fold();
        self.settle(&name, visible);
        if new {
            self.account(&seen.pod.uid);
        }
        true
    }

    fn allocation_gone(&mut self, uid: &AllocationUid) -> bool {
        if !self.gone.insert(uid.clone()) {
            return false;
        }
        self.gone_order.push_back(uid.clone());
        if self.gone_order.len() > TOMBSTONES
            && let Some(oldest) = self.gone_order.pop_front()
        {
            self.gone.remove(&oldest);
        }
        self.end_unreadable(uid);
        let Some(fact) = self.allocations.remove(uid) else { return true };
        if let Some(uids) = self.by_pod.get_mut(&fact.pod.uid) {
            uids.remove(uid);
            if uids.is_empty() {
                self.by_pod.remove(&fact.pod.uid);
            }
        }
        self.take(&fact.node, &Which::Allocation(uid));
        self.account(&fact.pod.uid);
        true
    }

    fn allocation_unreadable(&mut self, uid: &AllocationUid, node: Option<&NodeName>) -> bool {
        // What was known of it stays: all of it that matters here is immutable.
        if self.gone.contains(uid) || self.allocations.contains_key(uid) {
            return false;
        }
        if self.unreadable.get(uid).is_some_and(|known| known.as_ref() == node) {
            return false;
        }
        self.end_unreadable(uid);
        self.unreadable.insert(uid.clone(), node.cloned());
        if let Some(node) = node {
            self.mark(node, Unaccounted::Allocation(uid.clone()), true);
        } else {
            self.nowhere += 1;
            self.settle_all();
        }
        true
    }

    fn end_unreadable(&mut self, uid: &AllocationUid) {
        match self.unreadable.remove(uid) {
            Some(Some(node)) => self.mark(&node, Unaccounted::Allocation(uid.clone()), false),
            Some(None) => {
                self.nowhere -= 1;
                self.settle_all();
            }
            None => {}
        }
    }

    fn pod_started(&mut self, pod: &PodUid, node: &NodeName) -> bool {
        if self.started_on(pod) == Some(node) {
            return false;
        }
        self.pod_ended(pod);
        self.started.insert(pod.clone(), node.clone());
        self.account(pod);
        true
    }

    fn pod_ended(&mut self, pod: &PodUid) -> bool {
        let Some(node) = self.started.remove(pod) else { return false };
        self.mark(&node, Unaccounted::Pod(pod.clone()), false);
        true
    }

    /// Notes whether a pod that has started has an allocation where it is.
    fn account(&mut self, pod: &PodUid) {
        let Some(node) = self.started.get(pod).cloned() else { return };
        let mut all = self.by_pod.get(pod).into_iter().flatten().filter_map(|uid| self.allocations.get(uid));
        let without = !all.any(|allocation| allocation.node == node);
        self.mark(&node, Unaccounted::Pod(pod.clone()), without);
    }

    fn mark(&mut self, name: &NodeName, what: Unaccounted, there: bool) {
        let node = self.nodes.entry(name.clone()).or_default();
        let before = node.unaccounted.is_empty();
        if there {
            node.unaccounted.insert(what);
        } else {
            node.unaccounted.remove(&what);
        }
        let visible = before != node.unaccounted.is_empty();
        self.settle(name, visible);
    }

    /// Notes a change that a fit on any node can see.
    fn settle_all(&mut self) {
        self.generation += 1;
        for node in self.nodes.values_mut() {
            node.generation = self.generation;
        }
    }

    fn held(&mut self, fact: &AllocationFact) -> bool {
        let mut fact = fact.clone();
        fact.uid = AllocationUid::default();
        (fact.prepared, fact.init_done, fact.released) = (false, false, false);
        let pod = fact.pod.uid.clone();
        if self.hold_of(&pod) == Some(&fact) {
            return false;
        }
        self.end_hold(&pod);
        let fact = Arc::new(fact);
        self.holds.insert(pod, Arc::clone(&fact));
        let name = fact.node.clone();
        let node = self.nodes.entry(name.clone()).or_default();
        node.put(Entry::new(fact, true));
        let visible = node.fold();
        self.settle(&name, visible);
        true
    }

    fn end_hold(&mut self, pod: &PodUid) -> bool {
        let Some(held) = self.holds.remove(pod) else { return false };
        self.take(&held.node, &Which::Hold(pod));
        true
    }

    /// Takes an entry off a node.
    fn take(&mut self, name: &NodeName, which: &Which) {
        let Some(node) = self.nodes.get_mut(name) else { return };
        node.take(which);
        let visible = node.fold();
        self.settle(name, visible);
    }

    /// Notes a change of a node that a fit can see, and forgets a node of which nothing is left.
    fn settle(&mut self, name: &NodeName, visible: bool) {
        if visible {
            self.generation += 1;
        }
        let Some(node) = self.nodes.get_mut(name) else { return };
        if visible {
            node.generation = self.generation;
        }
        if node.is_empty() {
            self.nodes.remove(name);
        }
    }
}

fn usage(sum: &Sum) -> Usage {
    Usage { memory: Mib(sum.memory), cores: sum.cores, slots: sum.slots }
}

fn capacity(card: &CardFact) -> Usage {
    Usage { memory: card.memory, cores: card.cores.into(), slots: slot_limit(card) }
}

fn card_usage(card: &Card) -> CardUsage {
    let (used, capacity) = (usage(&card.used), capacity(&card.fact));
    let free = Usage {
        memory: Mib(capacity.memory.0.saturating_sub(used.memory.0)),
        cores: capacity.cores.saturating_sub(used.cores),
        slots: capacity.slots.saturating_sub(used.slots),
    };
    CardUsage { card: card.fact.clone(), used, free }
}
