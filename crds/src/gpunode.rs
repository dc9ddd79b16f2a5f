//! `GPUNode`: one per node, named like it. Admins write `spec`, the node's agent alone writes `status`.

#![expect(clippy::duplicated_attributes, reason = "each printer column has a type and a path of its own")]

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Wishes of the admin for this node's cards.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[kube(
    group = "mullion.io",
    version = "v1alpha1",
    kind = "GPUNode",
    plural = "gpunodes",
    shortname = "gn",
    category = "mullion",
    status = "GPUNodeStatus",
    derive = "Default",
    derive = "PartialEq",
    doc = "One node's cards: the admin's wishes in spec, what the node's agent found in status. Named like its node.",
    printcolumn(
        name = "USABLE-GPUS",
        type_ = "string",
        json_path = ".status.summary.gpus",
        description = "Cards that can be given out, whoever holds part of them, of all cards"
    ),
    printcolumn(
        name = "FREE-MEM",
        type_ = "string",
        json_path = ".status.summary.freeMemory",
        description = "Memory that can still be granted, of all that can"
    ),
    printcolumn(name = "MIG", type_ = "string", json_path = ".status.summary.mig"),
    printcolumn(name = "LAYOUT", type_ = "string", json_path = ".status.summary.layout"),
    printcolumn(name = "HEALTH", type_ = "string", json_path = ".status.summary.health"),
    printcolumn(
        name = "CORDON",
        type_ = "boolean",
        json_path = ".spec.cordon",
        description = "The admin has closed the whole node for new GPU pods"
    ),
    printcolumn(name = "AGE", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct GPUNodeSpec {
    /// What holds for every card that no entry of `cards` matches.
    #[serde(flatten)]
    pub all: CardWish,
    /// Wishes for single cards. An entry with a uuid wins over one with a model.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64))]
    #[x_kube(validation = Rule::new(
        "self.all(c, self.exists_one(d, has(d.uuid) == has(c.uuid) && \
         (has(c.uuid) ? d.uuid == c.uuid : (has(d.model) && has(c.model) && d.model == c.model))))"
    ).message("each uuid and each model may appear once: join its wishes in one entry"))]
    pub cards: Vec<CardWishFor>,
}

/// Wishes for a card. What is left out keeps its default.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct CardWish {
    /// How the card is given out: `shared` (default), `exclusive` or `mig`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<Mode>,
    /// How many containers may share the card, 1 to 128. Default 10.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 128))]
    pub split_count: Option<u32>,
    /// Memory that may be granted, in percent of the physical memory, 100 to 1000. Default 100.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 100, max = 1000))]
    pub memory_scaling: Option<u32>,
    /// Compute that may be granted, in percent of the card, 100 to 1000. Default 100.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 100, max = 1000))]
    pub core_scaling: Option<u32>,
    /// True: no new pod is given the card, or, as `spec.cordon`, any card of the node; pods that find no other place stay
    /// Pending. Pods that have their share of it keep it: those that were placed before still start, those that run run
    /// on, and their containers may restart. Nothing is evicted: delete the pods, or drain the node, to empty it. False or
    /// left out: open.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cordon: Option<bool>,
}

/// Each entry names one card by `uuid`, or all cards of a `model`, and says what is wanted for them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[x_kube(validation = Rule::new("has(self.uuid) != has(self.model)").message(
    "exactly one of uuid and model must be given"
))]
#[serde(rename_all = "camelCase")]
pub struct CardWishFor {
    /// Uuid of the card, exactly as NVML reports it. Exactly one of `uuid` and `model` is given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 40), regex(pattern = "^GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$"))]
    pub uuid: Option<String>,
    /// Product name, exactly as NVML reports it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 96))]
    pub model: Option<String>,
    /// The wishes.
    #[serde(flatten)]
    pub wish: CardWish,
}

/// How a card is given out: `shared` (default), in slices of memory and compute; `exclusive`, whole and to one container at a
/// time; `mig`, in MIG instances. These are not given out yet, so that `mig` closes the card for new GPU pods: as `spec.mode`
/// every card of the node that no entry of `spec.cards` says otherwise of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// Slices in MiB and percent.
    #[default]
    Shared,
    /// One container at a time, whole.
    Exclusive,
    /// MIG instances; none is given out yet, so the card takes no new pods.
    Mig,
}

/// What the node's agent found. It alone writes this.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct GPUNodeStatus {
    /// Uid of the Node object that the agent runs under: the cards belong to that machine and no other.
    #[serde(default, rename = "nodeUID")]
    pub node_uid: String,
    /// Grows with every inventory that the agent writes.
    #[serde(default)]
    pub observation: i64,
    /// Kernel boot id of the node.
    #[serde(default)]
    pub boot_id: String,
    /// NVIDIA driver version; absent without a driver.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub driver_version: Option<String>,
    /// Version of the agent that wrote this.
    #[serde(default)]
    pub agent_version: String,
    /// True while a planned stop of the agent keeps new pods away.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub closed: bool,
    /// One entry per card.
    #[serde(default)]
    pub cards: Vec<Card>,
    /// Each distinct MIG profile table once; cards name its hash.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mig_tables: Vec<MigTable>,
    /// `DriverReady`, `PluginRegistered`, `CDISpecFound`, `TopologyAligned`, `ResourceConflict`, `PodCgroupsSeen`,
    /// `AuditWritable`, `LibraryFound`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".into()]))]
    pub conditions: Vec<Condition>,
    /// Sums for the printer columns, derived from the rest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub summary: Option<Summary>,
}

/// Derived texts for `kubectl get gpunodes`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Summary {
    /// Usable cards of all cards, such as `3/4`.
    pub gpus: String,
    /// Memory of the cards that this node's allocations leave free, such as `310Gi/316Gi`.
    pub free_memory: String,
    /// MIG mode over the cards, such as `off` or `2/4 on`.
    pub mig: String,
    /// MIG instances over the cards, such as `6x1g.10gb,1x3g.40gb`; `-` without any.
    #[serde(default)]
    pub layout: String,
    /// `Healthy`, or what is wrong, such as `1 unhealthy (XID 79)`.
    pub health: String,
}

/// One card.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Card {
    /// Identity.
    pub uuid: String,
    /// NVML's index; not stable over reboots.
    pub index: u32,
    /// Device minor: `/dev/nvidia<minor>`.
    pub minor: u32,
    /// Product name as NVML reports it.
    pub model: String,
    /// `nvidia`.
    pub vendor: String,
    /// Architecture, such as `hopper`.
    pub architecture: String,
    /// Physical memory in MiB.
    #[serde(rename = "memoryMiB")]
    pub memory_mib: i64,
    /// Streaming multiprocessors; absent where the driver does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sms: Option<u32>,
    /// NUMA node, where the platform has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub numa_node: Option<u32>,
    /// PCI address, such as `0000:1b:00.0`.
    pub pci_address: String,
    /// Paths to other cards of the node.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub links: Vec<Link>,
    /// Fault state.
    pub health: Health,
    /// MIG state; absent where the card cannot do MIG.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mig: Option<CardMig>,
}

/// The path between two cards.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Link {
    /// Uuid of the other card.
    pub peer: String,
    /// `NVLink<n>` with the number of links, or the PCI level: `SameBoard`, `SingleSwitch`, `MultiSwitch`,
    /// `HostBridge`, `SameNode`, `System`.
    pub kind: String,
}

/// Fault state of a card.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Health {
    /// `Healthy` or `Unhealthy`.
    pub state: HealthState,
    /// Last critical XID; absent when none was seen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub xid: Option<u64>,
    /// Why, in words, when unhealthy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// Since when the state holds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since: Option<Time>,
}

/// Fault state of a card, in a word.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum HealthState {
    /// No fault seen.
    #[default]
    Healthy,
    /// Nothing new is placed on it.
    Unhealthy,
}

/// MIG state of a card.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct CardMig {
    /// The mode that is in force.
    pub current: bool,
    /// The mode after the next reset or reboot.
    pub pending: bool,
    /// Hash of the card's profile table in `status.migTables`; absent where the driver lists none now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub table: Option<String>,
    /// Live instances.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub instances: Vec<MigInstance>,
}

/// A profile table as NVML reports it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct MigTable {
    /// Hash that cards name.
    pub hash: String,
    /// Grid units: the largest start + size.
    pub width: u32,
    /// Rows.
    pub profiles: Vec<MigProfile>,
}

/// One row of a profile table.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct MigProfile {
    /// NVML's `id` of the GPU instance profile.
    pub gi_profile_id: u32,
    /// NVML's enum value that was asked with.
    pub gi_enum: u32,
    /// NVML's `id` of the full-size compute instance profile; absent where it is not known before creation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ci_profile_id: Option<u32>,
    /// Name for people, as this driver spells it.
    pub name: String,
    /// Memory in MiB.
    #[serde(rename = "memoryMiB")]
    pub memory_mib: i64,
    /// Streaming multiprocessors.
    pub sms: u32,
    /// Grid units that an instance takes.
    pub size: u32,
    /// Legal starts.
    pub starts: Vec<u32>,
    /// Most instances, as the driver says (compared only).
    pub max_count: u32,
    /// Media and copy engines.
    #[serde(default)]
    pub engines: MigEngines,
    /// `me`, `meAll`, `noMe`, `gfx`, `double`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub flags: Vec<String>,
}

/// Engines of a profile.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct MigEngines {
    /// Copy engines.
    pub copy: u32,
    /// Decoders.
    pub dec: u32,
    /// Encoders.
    pub enc: u32,
    /// JPEG engines.
    pub jpeg: u32,
    /// Optical flow engines.
    pub ofa: u32,
}

/// A live MIG instance.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct MigInstance {
    /// Profile id.
    pub gi_profile_id: u32,
    /// First grid unit.
    pub start: u32,
    /// Grid units.
    pub size: u32,
    /// GPU instance id.
    pub gi: u32,
    /// Compute instance id; absent for a GPU instance without one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ci: Option<u32>,
    /// MIG uuid; absent without a compute instance.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uuid: Option<String>,
    /// `Held`, `Free`, `Idle`, `Residue` or `Foreign`.
    pub state: String,
}
