//! One node of the ledger: its facts, its allocations in fold order, and what the fold makes of them.

use std::cmp::Ordering;
use std::collections::BTreeSet;
use std::sync::Arc;

use crate::charge::{Footprint, Sum, bears, footprint};
use crate::facts::{AllocationFact, CardFact, KubeNodeFact, NodeFact};
use crate::units::{AllocationUid, PodUid};

use super::{Shortage, Standing, Unaccounted};

/// A card and what stands on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Card {
    pub(crate) fact: CardFact,
    /// Sum of the peaks of all allocations that hold.
    pub(crate) used: Sum,
}

/// An allocation, or a hold for one, on the node.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub(super) fact: Arc<AllocationFact>,
    /// This process is about to create it.
    pub(super) hold: bool,
    pub(super) footprint: Footprint,
    pub(super) standing: Standing,
}

impl Entry {
    pub(super) fn new(fact: Arc<AllocationFact>, hold: bool) -> Self {
        let footprint = footprint(&fact);
        Self { fact, hold, footprint, standing: Standing::Released }
    }

    /// The order of the fold: prepared first, then sequence, creation time, uid. A hold stands where its
    /// allocation will, so that nothing changes when that is observed.
    fn order(&self, other: &Self) -> Ordering {
        fn key(entry: &Entry) -> (bool, u64, i64, bool, &AllocationUid, &PodUid) {
            let fact = &entry.fact;
            (!fact.prepared, fact.sequence, fact.created, entry.hold, &fact.uid, &fact.pod.uid)
        }
        key(self).cmp(&key(other))
    }
}

/// Everything known of one node.
#[derive(Clone, Debug, Default)]
pub(crate) struct Node {
    pub(crate) fact: Option<NodeFact>,
    pub(crate) kube: Option<KubeNodeFact>,
    /// By index, then uuid.
    pub(crate) cards: Vec<Card>,
    /// Device ids that the kubelet has given out, or will.
    pub(crate) slots_used: u64,
    /// What holds cards here without our knowing which.
    pub(crate) unaccounted: BTreeSet<Unaccounted>,
    /// The ledger's generation at the last change that a fit on this node can see.
    pub(super) generation: u64,
    pub(super) entries: Vec<Entry>,
}

impl Node {
    /// Nothing is known of it any more.
    pub(super) fn is_empty(&self) -> bool {
        self.fact.is_none() && self.kube.is_none() && self.entries.is_empty() && self.unaccounted.is_empty()
    }

    /// Replaces the inventory.
    pub(super) fn observe(&mut self, fact: Option<NodeFact>) {
        let mut cards: Vec<Card> = fact
            .iter()
            .flat_map(|f| &f.cards)
            .map(|card| Card { fact: card.clone(), used: Sum::default() })
            .collect();
        // The whole fact is in the order, so that a report which names a uuid twice folds the same way always.
        cards.sort_by(|a, b| {
            let key = |c: &Card| (c.fact.index, c.fact.memory, c.fact.cores, c.fact.slots);
            key(a).cmp(&key(b)).then_with(|| a.fact.uuid.cmp(&b.fact.uuid))
        });
        let mut seen = std::collections::BTreeSet::new();
        cards.retain(|card| seen.insert(card.fact.uuid.clone()));
        cards.sort_by(|a, b| (a.fact.index, &a.fact.uuid).cmp(&(b.fact.index, &b.fact.uuid)));
        self.cards = cards;
        self.fact = fact;
    }

    /// Adds or replaces an entry; call [`Self::fold`] afterwards.
    pub(super) fn put(&mut self, entry: Entry) {
        let position = self.entries.partition_point(|e| e.order(&entry) == Ordering::Less);
        self.entries.insert(position, entry);
    }

    /// Takes out the allocation with that uid, or the hold of that pod.
    pub(super) fn take(&mut self, which: &Which) -> Option<Entry> {
        let position = self.entries.iter().position(|e| which.is(e))?;
        Some(self.entries.remove(position))
    }

    pub(super) fn entry(&self, which: &Which) -> Option<&Entry> {
        self.entries.iter().find(|e| which.is(e))
    }

    /// Works out anew what stands and what is used. Returns whether a fit could tell the difference.
    pub(super) fn fold(&mut self) -> bool {
        let before: Vec<Sum> = self.cards.iter().map(|c| c.used).collect();
        let slots_before = self.slots_used;
        for card in &mut self.cards {
            card.used = Sum::default();
        }
        self.slots_used = 0;
        for entry in &mut self.entries {
            entry.standing = stand(&self.cards, entry);
            if entry.standing == Standing::Holds {
                for load in &entry.footprint.loads {
                    if let Some(card) = self.cards.iter_mut().find(|c| c.fact.uuid == load.uuid) {
                        card.used = card.used.and(load.peak);
                    }
                }
            }
            // The kubelet has admitted a void pod too, and counts it until it is gone.
            if !entry.fact.released {
                self.slots_used = self.slots_used.saturating_add(entry.footprint.tokens);
            }
        }
        slots_before != self.slots_used || before.iter().ne(self.cards.iter().map(|c| &c.used))
    }
}

/// What the fold makes of `entry`, given what holds before it.
fn stand(cards: &[Card], entry: &Entry) -> Standing {
    if entry.fact.released {
        return Standing::Released;
    }
    if entry.fact.prepared {
        return Standing::Holds;
    }
    for load in &entry.footprint.loads {
        let Some(card) = cards.iter().find(|c| c.fact.uuid == load.uuid) else {
            return Standing::DeviceGone { uuid: load.uuid.clone() };
        };
        for phase in &load.phases {
            if let Err(short) = bears(&card.fact, &card.used, phase) {
                let (code, asked, free) = (short.code, short.asked, short.free);
                return Standing::Void { by: Shortage { uuid: load.uuid.clone(), code, asked, free } };
            }
        }
    }
    Standing::Holds
}

/// Names an entry of a node.
#[derive(Clone, Copy, Debug)]
pub(super) enum Which<'a> {
    /// The allocation with that uid.
    Allocation(&'a AllocationUid),
    /// The hold for that pod.
    Hold(&'a PodUid),
}

impl Which<'_> {
    fn is(&self, entry: &Entry) -> bool {
        match self {
            Self::Allocation(uid) => !entry.hold && entry.fact.uid == **uid,
            Self::Hold(pod) => entry.hold && entry.fact.pod.uid == **pod,
        }
    }
}
