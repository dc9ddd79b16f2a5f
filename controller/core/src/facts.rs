//! The facts that a ledger is folded from. Shells translate API objects into these; see `mullion-crds`.

use serde::{Deserialize, Serialize};

use crate::units::{AllocationUid, CoreShare, GpuUuid, Mib, NodeName, NodeUid, PodUid};

/// How a card is given out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum CardMode {
    /// Slices in MiB and percent.
    #[default]
    Shared,
    /// One container at a time, whole.
    Exclusive,
    /// MIG instances; not given out as slices.
    Mig,
}

/// One card as its node's agent reported it, with the admin's wishes already worked in.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CardFact {
    /// Identity; never the index.
    pub uuid: GpuUuid,
    /// NVML's index at the time of the report: for people and for order only.
    pub index: u32,
    /// Product name as NVML reports it.
    pub model: String,
    /// What may be granted: physical memory times the admin's memory scaling.
    pub memory: Mib,
    /// What may be granted in percent of SMs: 100 times the admin's core scaling.
    pub cores: u32,
    /// How many containers may share the card.
    pub slots: u32,
    /// NUMA node, where the platform has one.
    pub numa_node: Option<u32>,
    /// The agent sees no fault on it.
    pub healthy: bool,
    /// The admin wants nothing new on it.
    pub cordoned: bool,
    /// How it is given out.
    pub mode: CardMode,
}

/// A `GPUNode`, as its agent last wrote it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeFact {
    /// Name of the node.
    pub name: NodeName,
    /// Uid of the Node object that the agent ran under when it wrote this.
    pub node_uid: NodeUid,
    /// Grows with every inventory that the agent writes.
    pub observation: u64,
    /// The admin, or a planned stop of the agent, closed the whole node for new pods.
    pub cordoned: bool,
    /// The driver answers.
    pub driver_ready: bool,
    /// All cards, by uuid.
    pub cards: Vec<CardFact>,
}

/// A Node object, trimmed to what a decision needs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KubeNodeFact {
    /// Name of the node.
    pub name: NodeName,
    /// Its uid; must equal [`NodeFact::node_uid`].
    pub uid: NodeUid,
    /// Allocatable of the count resource as the kubelet publishes it: zero while the device plugin is dead.
    pub allocatable_slots: u64,
}

/// What kind of container a request came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ContainerKind {
    /// An init container that ends before the next one starts.
    Init,
    /// A native sidecar: an init container with `restartPolicy: Always`.
    Sidecar,
    /// A container of `spec.containers`.
    App,
}

/// One card given to one container.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct DeviceGrant {
    /// Which card.
    pub uuid: GpuUuid,
    /// Memory limit on it.
    pub memory: Mib,
    /// Compute share of it.
    pub cores: CoreShare,
}

/// What one container of an allocation was given. Containers without GPUs do not appear.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ContainerGrant {
    /// Name of the container: the identity, never its position.
    pub name: String,
    /// What kind it is.
    pub kind: ContainerKind,
    /// Distinct cards, in the order in which the container sees them.
    pub devices: Vec<DeviceGrant>,
}

/// Which pod.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct PodRef {
    /// Namespace of the pod and of its allocation.
    pub namespace: String,
    /// Name of the pod.
    pub name: String,
    /// Uid of the pod.
    pub uid: PodUid,
}

/// A `VGPUAllocation`, trimmed to what a decision needs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AllocationFact {
    /// Uid of the object.
    pub uid: AllocationUid,
    /// Name of the object, in the pod's namespace.
    pub name: String,
    /// Whom it belongs to.
    pub pod: PodRef,
    /// Where.
    pub node: NodeName,
    /// 1 + the highest that its decider had seen on the node.
    pub sequence: u64,
    /// Creation time of the object, Unix seconds.
    pub created: i64,
    /// In spec order: init containers and sidecars as declared, then app containers.
    pub containers: Vec<ContainerGrant>,
    /// The agent has handed out at least one grant of it.
    pub prepared: bool,
    /// The agent has seen every ordinary init container end well: they no longer count.
    pub init_done: bool,
    /// The agent (or, for a node that is gone, the controller) has proved that nothing of it is left.
    pub released: bool,
}

/// A fact, in the past tense; appended once, never edited.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Event {
    /// An agent reported its node.
    NodeObserved(NodeFact),
    /// The `GPUNode` object is gone.
    NodeGone(NodeName),
    /// The Node object was seen.
    KubeNodeObserved(KubeNodeFact),
    /// The Node object is gone.
    KubeNodeGone(NodeName),
    /// The `VGPUAllocation` was seen. Flags only ever rise; the rest is immutable.
    AllocationObserved(AllocationFact),
    /// The `VGPUAllocation` is gone. Its finalizer makes that a proof of release.
    AllocationGone(AllocationUid),
    /// A `VGPUAllocation` is there and cannot be read: what it gives away is not known.
    AllocationUnreadable {
        /// Uid of the object.
        uid: AllocationUid,
        /// Its node, where at least that could be read.
        node: Option<NodeName>,
    },
    /// A container of that pod that asks for GPUs has started there, and the pod has not ended.
    PodStarted {
        /// Uid of the pod.
        pod: PodUid,
        /// Where it is bound.
        node: NodeName,
    },
    /// The pod has ended, or is gone.
    PodEnded(PodUid),
    /// This process is about to create that allocation (its uid is not known yet and ignored).
    /// Ends when an allocation of the same pod is observed, or by [`Event::HoldEnded`].
    Held(AllocationFact),
    /// The allocation that this process held capacity for will not come.
    HoldEnded(PodUid),
}
