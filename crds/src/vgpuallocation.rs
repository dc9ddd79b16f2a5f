//! `VGPUAllocation`: who has which slice of which card. The controller creates it at bind, the node's agent
//! writes its status, and it ends when its release is proved.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The decision: immutable.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "mullion.io",
    version = "v1alpha1",
    kind = "VGPUAllocation",
    plural = "vgpuallocations",
    shortname = "vga",
    category = "mullion",
    namespaced,
    status = "VGPUAllocationStatus",
    derive = "Default",
    derive = "PartialEq",
    selectable = ".spec.nodeName",
    selectable = ".spec.pod.name"
)]
#[serde(rename_all = "camelCase")]
pub struct VGPUAllocationSpec {
    /// The pod that it belongs to.
    pub pod: PodReference,
    /// The node.
    pub node_name: String,
    /// 1 + the highest that the decider had seen on the node: orders allocations that collide.
    pub sequence: i64,
    /// One entry per container that has GPUs, by name.
    pub containers: Vec<ContainerAllocation>,
    /// Why this node and these cards.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decision: Option<Decision>,
}

/// A pod, by name and uid.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PodReference {
    /// Name; the namespace is the allocation's.
    pub name: String,
    /// Uid.
    pub uid: String,
}

/// What one container asked for and got.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ContainerAllocation {
    /// Name of the container.
    pub name: String,
    /// `init`, `sidecar` or `app`.
    pub kind: Kind,
    /// The request as it was asked.
    pub request: Request,
    /// The cards given, in the order in which the container sees them.
    pub devices: Vec<Device>,
}

/// What kind of container it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// An init container that ends before the next one starts.
    Init,
    /// An init container with `restartPolicy: Always`.
    Sidecar,
    /// A container of `spec.containers`.
    #[default]
    App,
}

/// A request, after defaults.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Request {
    /// Number of cards.
    pub count: u32,
    /// Memory on each card in MiB; absent when `memoryPercent` is given.
    #[serde(default, rename = "memoryMiB", skip_serializing_if = "Option::is_none")]
    pub memory_mib: Option<i64>,
    /// Memory on each card in percent of the card; absent when `memoryMiB` is given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_percent: Option<u32>,
    /// Share of each card's SMs in percent; 0 is best effort.
    pub core_percent: u32,
}

/// One card, or a MIG instance of it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Device {
    /// Uuid of the card.
    pub uuid: String,
    /// Memory limit in MiB.
    #[serde(rename = "memoryMiB")]
    pub memory_mib: i64,
    /// Share of the card's SMs in percent; 0 is best effort, 100 unthrottled.
    pub core_percent: u32,
    /// For a MIG instance: which.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mig: Option<MigPlacement>,
}

/// Profile and placement of a MIG instance.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct MigPlacement {
    /// NVML's id of the GPU instance profile.
    pub profile_id: u32,
    /// First grid unit.
    pub start: u32,
    /// Grid units.
    pub size: u32,
}

/// Why this node and these cards.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Decision {
    /// Node policy and card policy, such as `binpack/spread`.
    pub code: String,
    /// Score of the node, 0 to 100.
    pub node_score: i64,
    /// Scores of the cards chosen.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub card_scores: Vec<CardScore>,
}

/// Score of a card at the time of the decision.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct CardScore {
    /// Uuid of the card.
    pub uuid: String,
    /// 0 to 100; what it means depends on the policy.
    pub score: i64,
}

/// What became of it on the node.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct VGPUAllocationStatus {
    /// Derived from the conditions.
    #[serde(default)]
    pub phase: Phase,
    /// `Bound`, `Prepared`, `Enforced`, `InitDone`, `Released`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
    /// One entry per container that was prepared.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub containers: Vec<ContainerStatus>,
    /// With `Released`: the agent's inventory number that no longer shows anything of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub released_observation: Option<i64>,
}

/// What the node gave a container.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ContainerStatus {
    /// Name of the container.
    pub name: String,
    /// Name of its CDI device, `mullion.io/grant=<this>`.
    pub grant: String,
    /// The kubelet's device ids.
    pub device_ids: Vec<String>,
    /// MIG uuids, in the order of `spec.containers[].devices`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mig_uuids: Vec<String>,
}

/// Where an allocation stands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
pub enum Phase {
    /// Decided; the node has not acted yet.
    #[default]
    Bound,
    /// At least one container was given its devices.
    Prepared,
    /// The pod has ended; the node is proving that nothing is left.
    Releasing,
    /// Nothing is left; the capacity is free.
    Released,
    /// Lost against an earlier allocation; its pod is evicted.
    Void,
    /// The node could not give what was decided; its pod is evicted.
    Failed,
}
