//! What this process knows of the cluster: one ledger, folded from watches, and the few objects behind it.
//!
//! Nothing here is written by hand: every number is a fold of facts. A watch that was interrupted lists anew, and
//! what is missing from the new list is gone (FS-09); an object that cannot be read is passed over, loudly, and
//! what was known of it stays. An allocation of which nothing was known closes its node.

mod facts;
mod pods;
mod watches;

use std::collections::BTreeSet;

use mullion_core::facts::PodRef;
use mullion_core::request::{Defaults, PodRequest};
use mullion_core::units::NodeName;
use mullion_crds::VGPUAllocation;
use mullion_crds::object::allocation_object;
use parking_lot::{Mutex, RwLock};
use tokio::sync::watch;

pub use facts::{Change, Facts, NodeRecord};
pub use pods::{Phase, PodRecord};
pub(crate) use watches::Resume;
pub use watches::run;

use crate::error::Error;

/// The sources that have to be listed before anything can be decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Source {
    /// `VGPUAllocation`.
    Allocations,
    /// `GPUNode`.
    GpuNodes,
    /// Node.
    Nodes,
    /// Pods under our scheduler's name.
    Pods,
    /// Pending pods under other schedulers' names; nothing is decided by them.
    Strangers,
}

impl Source {
    /// What `/readyz` and errors call it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Allocations => "VGPUAllocation",
            Self::GpuNodes => "GPUNode",
            Self::Nodes => "Node",
            Self::Pods => "Pod",
            Self::Strangers => "UnmanagedPod",
        }
    }
}

/// Everything known, behind one lock that is never held over an await.
#[derive(Debug)]
pub struct Store {
    facts: RwLock<Facts>,
    unsynced: Mutex<BTreeSet<Source>>,
    changed: watch::Sender<u64>,
}

/// What an allocation for a pod on a node starts from.
#[derive(Debug)]
pub enum Claim {
    /// The pod has it already, on this node.
    Existing(Box<VGPUAllocation>),
    /// The pod has one that cannot be used: it has to go first.
    Stale(Box<VGPUAllocation>),
    /// Capacity is held for this object, which is to be created now.
    Held(Box<VGPUAllocation>),
}

impl Store {
    /// Nothing known yet.
    #[must_use]
    pub fn new(defaults: Defaults) -> Self {
        let wanted = [Source::Allocations, Source::GpuNodes, Source::Nodes, Source::Pods];
        Self {
            facts: RwLock::new(Facts::new(defaults)),
            unsynced: Mutex::new(wanted.into_iter().collect()),
            changed: watch::Sender::new(0),
        }
    }

    /// Looks at what is known. Must not block.
    pub fn read<T>(&self, look: impl FnOnce(&Facts) -> T) -> T {
        look(&self.facts.read())
    }

    /// Changes what is known, and wakes those who wait for changes.
    pub fn write<T>(&self, change: impl FnOnce(&mut Facts) -> T) -> T {
        let result = change(&mut self.facts.write());
        self.changed.send_modify(|count| *count += 1);
        result
    }

    /// Takes the nodes on which capacity may have become free since the last call.
    pub fn take_gained(&self) -> BTreeSet<NodeName> {
        self.facts.write().take_gained()
    }

    /// Wakes at every change.
    #[must_use]
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    /// Notes that a source has been listed completely, once.
    pub fn synced(&self, source: Source) {
        self.unsynced.lock().remove(&source);
    }

    /// Whether everything has been listed that a decision depends on.
    ///
    /// # Errors
    /// [`Error::NotReady`] naming what is missing.
    pub fn ready(&self) -> Result<(), Error> {
        let unsynced = self.unsynced.lock();
        if unsynced.is_empty() {
            return Ok(());
        }
        let names: Vec<&str> = unsynced.iter().map(|source| source.name()).collect();
        Err(Error::NotReady { missing: names.join(", ") })
    }

    /// Decides the cards for `pod` on `node` and holds them, in one step; or finds what the pod has already.
    ///
    /// `now` is the time in Unix seconds; it orders this hold against other deciders' allocations.
    ///
    /// # Errors
    /// [`Error::NoFit`] when the node does not fit (any more).
    pub fn claim(
        &self,
        pod: &PodRef,
        request: &PodRequest,
        node: &NodeName,
        now: i64,
    ) -> Result<Claim, Error> {
        self.write(|facts| {
            if let Some(object) = facts.allocation_of_pod(pod.uid.as_str()) {
                let object = object.clone();
                let usable = object.spec.node_name == node.0 && facts.usable(&object);
                let object = Box::new(object);
                return Ok(if usable { Claim::Existing(object) } else { Claim::Stale(object) });
            }
            let placement = facts
                .ledger()
                .fit(request, node)
                .map_err(|refusal| Error::NoFit { refusal: Box::new(refusal) })?;
            let sequence = facts.ledger().next_sequence(node);
            let object = allocation_object(pod, node, sequence, request, &placement);
            let mut hold = mullion_crds::facts::allocation(&object);
            hold.created = now;
            facts.fold(&mullion_core::facts::Event::Held(hold));
            Ok(Claim::Held(Box::new(object)))
        })
    }
}

#[cfg(test)]
mod tests;
