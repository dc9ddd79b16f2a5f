//! `MIGLayout`: wanted MIG instances. The kind is complete so that objects can be kept in Git already; nothing
//! acts on it yet.

#![expect(clippy::duplicated_attributes, reason = "each printer column has a type and a path of its own")]

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Wanted instances on the selected cards. Checked and kept, not acted on yet.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[x_kube(validation = Rule::new("(self.strategy == 'Dynamic') == has(self.dynamic)").message(
    "dynamic must be given with strategy Dynamic, and only then"
))]
#[kube(
    group = "mullion.io",
    version = "v1alpha1",
    kind = "MIGLayout",
    plural = "miglayouts",
    shortname = "ml",
    category = "mullion",
    status = "MIGLayoutStatus",
    derive = "Default",
    derive = "PartialEq",
    doc = "Wanted MIG instances on the selected cards. Not acted on yet: an object of this kind is checked and kept, but no instance \
           is made or removed for it, and its status stays empty. A GPUNode's `mode: mig` only closes cards for new GPU pods.",
    printcolumn(name = "TARGETS", type_ = "integer", json_path = ".status.summary.targets"),
    printcolumn(name = "APPLIED", type_ = "integer", json_path = ".status.summary.applied"),
    printcolumn(name = "BLOCKED", type_ = "integer", json_path = ".status.summary.blocked"),
    printcolumn(name = "FAILED", type_ = "integer", json_path = ".status.summary.failed"),
    printcolumn(name = "AGE", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct MIGLayoutSpec {
    /// Which cards of which nodes.
    pub selector: Selector,
    /// `Static`: exactly `instances`. `Dynamic`: these, and more on request within `dynamic`.
    #[serde(default)]
    pub strategy: Strategy,
    /// Always made, on every card. Required, because an empty list empties the cards: write `[]` to mean it.
    #[schemars(length(max = 16))]
    pub instances: Vec<WantedInstances>,
    /// Bounds of what requests may add; only with strategy `Dynamic`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dynamic: Option<Dynamic>,
    /// `Auto`, or `PlanOnly`: dry run and pause.
    #[serde(default)]
    pub apply: Apply,
    /// What happens to pods that are in the way.
    #[serde(default)]
    pub drain: Drain,
    /// How much may change at once.
    #[serde(default)]
    pub disruption_budget: DisruptionBudget,
    /// What happens to instances that are not ours.
    #[serde(default)]
    pub foreign: ForeignPolicy,
}

/// Which cards.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Selector {
    /// Node labels; empty selects every node.
    #[serde(default)]
    pub nodes: LabelSelector,
    /// Cards of those nodes.
    #[serde(default)]
    pub cards: CardSelector,
}

/// Cards by model or PCI id, never by index.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct CardSelector {
    /// Product names, exactly as NVML reports them.
    #[schemars(length(max = 32), inner(length(min = 1, max = 96)))]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub models: Vec<String>,
    /// PCI device ids, such as `20B0`.
    #[schemars(length(max = 32), inner(length(max = 4), regex(pattern = "^[0-9A-Fa-f]{4}$")))]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pci_ids: Vec<String>,
    /// Only the first n by PCI address; absent means all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 64))]
    pub per_node: Option<u32>,
}

/// How the wanted instances are meant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Strategy {
    /// Exactly `instances`.
    #[default]
    Static,
    /// `instances`, and more on request.
    Dynamic,
}

/// A number of equal instances.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[x_kube(validation = Rule::new("!has(self.starts) || self.starts.size() == self.count").message(
    "starts must name one start for each of count, or be left out"
))]
#[serde(rename_all = "camelCase")]
pub struct WantedInstances {
    /// Profile name, such as `3g.20gb`.
    #[schemars(length(min = 1, max = 64))]
    pub profile: String,
    /// How many on each card.
    #[schemars(range(min = 1, max = 16))]
    pub count: u32,
    /// Where, one start each; absent leaves it to the planner.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16), inner(range(max = 63)))]
    #[x_kube(validation = Rule::new("self.all(s, self.exists_one(t, t == s))").message(
        "starts must differ: two instances cannot begin at one place"
    ))]
    pub starts: Vec<u32>,
}

/// Bounds of dynamic requests.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[x_kube(
    validation = Rule::new("!has(self.max) || self.max.all(p, p in self.profiles)").message(
        "max may name only profiles that profiles lists"
    ),
    validation = Rule::new("!has(self.keepCreatable) || self.keepCreatable.all(p, p in self.profiles)").message(
        "keepCreatable may name only profiles that profiles lists"
    )
)]
#[serde(rename_all = "camelCase")]
pub struct Dynamic {
    /// Profiles that requests may make, and what the placement rule counts.
    #[schemars(length(min = 1, max = 32), inner(length(min = 1, max = 64)))]
    pub profiles: Vec<String>,
    /// Most instances of a profile on each card.
    #[schemars(extend("maxProperties" = 32))]
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub max: BTreeMap<String, u32>,
    /// Instances that must stay creatable: others may not take their last place.
    #[schemars(extend("maxProperties" = 32))]
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub keep_creatable: BTreeMap<String, u32>,
    /// Also advertise `nvidia.com/mig-*` resources.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub named: Option<bool>,
}

/// Whether plans are carried out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Apply {
    /// Carry plans out.
    #[default]
    Auto,
    /// Publish plans only.
    PlanOnly,
}

/// What happens to pods that are in the way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Drain {
    /// Change unblocked cards only.
    #[default]
    WhenIdle,
    /// Take no new pods and wait.
    Close,
    /// Take no new pods and evict (disruption budgets hold).
    Evict,
}

/// How much may change at once.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct DisruptionBudget {
    /// Cards that may be changing at the same time.
    #[schemars(range(min = 1))]
    pub max_cards: u32,
}

impl Default for DisruptionBudget {
    fn default() -> Self {
        Self { max_cards: 1 }
    }
}

/// What happens to instances that are not ours.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ForeignPolicy {
    /// Leave the card alone.
    #[default]
    Refuse,
    /// Matching idle instances become ours.
    Adopt,
}

/// How far the layout is applied.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct MIGLayoutStatus {
    /// Generation that this status speaks of.
    #[serde(default)]
    pub observed_generation: i64,
    /// Numbers of cards.
    #[serde(default)]
    pub summary: LayoutSummary,
    /// Cards whose plan may be carried out.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub granted: Vec<GrantedPlan>,
    /// Cards that are not as wanted, at most 64.
    #[schemars(length(max = 64))]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cards: Vec<LayoutCard>,
}

/// Numbers of cards by state.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct LayoutSummary {
    /// Cards selected.
    pub targets: u32,
    /// As wanted.
    pub applied: u32,
    /// Changing.
    pub progressing: u32,
    /// Waiting for an allocation.
    pub blocked: u32,
    /// A step failed.
    pub failed: u32,
    /// Selected, but the node's own `spec` says otherwise.
    pub excluded: u32,
}

/// A plan that may be carried out.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct GrantedPlan {
    /// Node.
    pub node: String,
    /// Card uuid.
    pub card: String,
    /// Hash of the plan.
    pub plan_hash: String,
}

/// A card that is not as wanted.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct LayoutCard {
    /// Node.
    pub node: String,
    /// Card uuid.
    pub card: String,
    /// Hash of the plan.
    pub plan_hash: String,
    /// What is left to do.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub steps: Vec<LayoutStep>,
    /// Who is in the way.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub blocked_by: Vec<Blocker>,
    /// The last failure.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_error: Option<StepError>,
}

/// One step of a plan.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct LayoutStep {
    /// `keep`, `create` or `destroy`.
    pub op: String,
    /// Profile name.
    pub profile: String,
    /// First grid unit.
    pub start: u32,
    /// Grid units.
    pub size: u32,
    /// `Waiting`, `Blocked`, `Running` or `Done`.
    pub state: String,
}

/// Who is in the way of a step.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Blocker {
    /// `Allocation`, `Foreign` or `Process`.
    pub kind: String,
    /// Its name.
    pub name: String,
    /// What it holds, such as `2g.10gb 4:2`.
    pub holds: String,
}

/// A failed step.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct StepError {
    /// NVML's name of the error.
    pub code: String,
    /// Journal number of the step.
    pub step: i64,
    /// Who holds the instance, where known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub holder: Option<String>,
}
