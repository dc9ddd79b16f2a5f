//! `VGPUAllocation`: who has which slice of which card. The controller creates it at bind, the node's agent
//! writes its status, and it ends when its release is proved.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// True unless a condition that was True of `Prepared`, `InitDone`, `Released` no longer is. What the ledger folds
/// from these three only ever rises, so a fresh list must show what the watch has shown.
const RISEN_STAYS_RISEN: &str = "!has(oldSelf.status) || !has(oldSelf.status.conditions) || \
    ['Prepared', 'InitDone', 'Released'].all(t, \
    !oldSelf.status.conditions.exists(c, c.type == t && c.status == 'True') || \
    (has(self.status) && has(self.status.conditions) && \
    self.status.conditions.exists(c, c.type == t && c.status == 'True')))";

/// The decision: immutable.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
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
    doc = "Who has which slice of which card: the decision for one pod, and what became of it on the node.",
    selectable = ".spec.nodeName",
    selectable = ".spec.pod.name",
    printcolumn(name = "POD", type_ = "string", json_path = ".spec.pod.name"),
    printcolumn(name = "NODE", type_ = "string", json_path = ".spec.nodeName"),
    printcolumn(name = "GPU", type_ = "string", json_path = ".spec.summary.gpu"),
    printcolumn(name = "KIND", type_ = "string", json_path = ".spec.summary.kind"),
    printcolumn(
        name = "MEM(MIB)",
        type_ = "integer",
        json_path = ".spec.summary.memoryMiB",
        description = "At the pod's peak, over all its cards"
    ),
    printcolumn(
        name = "CORES",
        type_ = "integer",
        json_path = ".spec.summary.corePercent",
        description = "Percent of a card's SMs, at the pod's peak, summed over its cards; 0 is best effort"
    ),
    printcolumn(name = "PHASE", type_ = "string", json_path = ".status.phase"),
    printcolumn(name = "AGE", type_ = "date", json_path = ".metadata.creationTimestamp"),
    validation = Rule::new("self.spec == oldSelf.spec").message(
        "spec is immutable: it is the decision for one pod; delete the pod to end it"
    ),
    validation = Rule::new(
        "self.metadata.name.endsWith('-' + self.spec.pod.uid.substring(0, 8))"
    ).message("metadata.name must end in - and the first 8 characters of spec.pod.uid: it is what keeps a pod to one allocation"),
    validation = Rule::new(RISEN_STAYS_RISEN).message(
        "conditions Prepared, InitDone and Released never fall: a new decision needs a new pod"
    ),
    validation = Rule::new(
        "!has(oldSelf.status) || oldSelf.status.phase != 'Released' || (has(self.status) && self.status.phase == 'Released')"
    ).message("status.phase Released is final")
)]
#[serde(rename_all = "camelCase")]
pub struct VGPUAllocationSpec {
    /// The pod that it belongs to.
    pub pod: PodReference,
    /// The node.
    #[schemars(length(min = 1, max = 253), regex(pattern = "^[a-z0-9]([-.a-z0-9]*[a-z0-9])?$"))]
    pub node_name: String,
    /// 1 + the highest that the decider had seen on the node: orders allocations that collide.
    #[schemars(range(min = 1))]
    pub sequence: i64,
    /// One entry per container that has GPUs, by name: init containers and sidecars as declared, then app
    /// containers.
    #[schemars(length(min = 1, max = 64))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["name".into()]))]
    pub containers: Vec<ContainerAllocation>,
    /// The printer columns, derived from the rest.
    pub summary: Summary,
    /// Why this node and these cards.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decision: Option<Decision>,
}

/// A pod, by name and uid.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PodReference {
    /// Name; the namespace is the allocation's.
    #[schemars(length(min = 1, max = 253))]
    pub name: String,
    /// Uid.
    #[schemars(length(min = 8, max = 64))]
    pub uid: String,
}

/// What `kubectl get` shows of a decision.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Summary {
    /// The first card, shortened, and how many more, such as `GPU-1b9e41ad +1`.
    #[schemars(length(max = 64))]
    pub gpu: String,
    /// `vgpu` or `mig`.
    pub kind: DeviceKind,
    /// MiB at the pod's peak, summed over its cards.
    #[serde(rename = "memoryMiB")]
    #[schemars(range(min = 0))]
    pub memory_mib: i64,
    /// Percent of a card's SMs at the pod's peak, summed over its cards; 0 is best effort.
    #[schemars(range(min = 0))]
    pub core_percent: i64,
}

/// What the devices of an allocation are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum DeviceKind {
    /// Slices in MiB and percent.
    #[default]
    Vgpu,
    /// MIG instances.
    Mig,
}

/// What one container asked for and got.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[x_kube(validation = Rule::new("self.devices.size() == self.request.count").message(
    "devices must be as many as request.count"
))]
#[serde(rename_all = "camelCase")]
pub struct ContainerAllocation {
    /// Name of the container.
    #[schemars(length(min = 1, max = 63))]
    pub name: String,
    /// `init`, `sidecar` or `app`.
    pub kind: Kind,
    /// The request as it was asked.
    pub request: Request,
    /// The cards given, in the order in which the container sees them.
    #[schemars(length(min = 1, max = 64))]
    #[x_kube(validation = Rule::new("self.all(d, has(d.mig) || self.exists_one(e, e.uuid == d.uuid))").message(
        "a container is given each card once"
    ))]
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
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[x_kube(validation = Rule::new("has(self.memoryMiB) != has(self.memoryPercent)").message(
    "exactly one of memoryMiB and memoryPercent must be given"
))]
#[serde(rename_all = "camelCase")]
pub struct Request {
    /// Number of cards.
    #[schemars(range(min = 1, max = 64))]
    pub count: u32,
    /// Memory on each card in MiB; absent when `memoryPercent` is given.
    #[serde(default, rename = "memoryMiB", skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub memory_mib: Option<i64>,
    /// Memory on each card in percent of the card; absent when `memoryMiB` is given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 100))]
    pub memory_percent: Option<u32>,
    /// Share of each card's SMs in percent; 0 is best effort.
    #[schemars(range(max = 100))]
    pub core_percent: u32,
}

/// One card, or a MIG instance of it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Device {
    /// Uuid of the card.
    #[schemars(length(min = 1, max = 80))]
    pub uuid: String,
    /// Memory limit in MiB.
    #[serde(rename = "memoryMiB")]
    #[schemars(range(min = 1))]
    pub memory_mib: i64,
    /// Share of the card's SMs in percent; 0 is best effort, 100 unthrottled.
    #[schemars(range(max = 100))]
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
    #[schemars(range(max = 63))]
    pub start: u32,
    /// Grid units.
    #[schemars(range(min = 1, max = 64))]
    pub size: u32,
}

/// Why this node and these cards.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Decision {
    /// Node policy and card policy, such as `binpack/spread`.
    #[schemars(length(max = 64))]
    pub code: String,
    /// Score of the node, 0 to 100.
    pub node_score: i64,
    /// Scores of the cards chosen.
    #[schemars(length(max = 128))]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub card_scores: Vec<CardScore>,
}

/// Score of a card at the time of the decision.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct CardScore {
    /// Uuid of the card.
    #[schemars(length(min = 1, max = 80))]
    pub uuid: String,
    /// 0 to 100; what it means depends on the policy.
    pub score: i64,
}

/// What became of it on the node.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct VGPUAllocationStatus {
    /// Derived from the conditions.
    #[serde(default)]
    pub phase: Phase,
    /// `Bound`, `Prepared`, `Enforced`, `InitDone`, `DevicesHealthy` (once a card failed), `Released`; `Prepared`,
    /// `InitDone` and `Released` never fall.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".into()]))]
    pub conditions: Vec<Condition>,
    /// One entry per container that was prepared.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["name".into()]))]
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
    #[schemars(length(min = 1, max = 63))]
    pub name: String,
    /// Name of its CDI device, `mullion.io/grant=<this>`.
    #[schemars(length(max = 64))]
    pub grant: String,
    /// The kubelet's device ids.
    #[schemars(length(max = 64), inner(length(max = 64)))]
    pub device_ids: Vec<String>,
    /// MIG uuids, in the order of `spec.containers[].devices`.
    #[schemars(length(max = 64), inner(length(max = 80)))]
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
