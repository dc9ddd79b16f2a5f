//! What a pod asks for, parsed once: webhook, extender, agent and CLI all call [`parse_pod`].
//!
//! HAMi's resource names and annotations are taken. What is malformed, contradictory or not supported yet is
//! refused with a sentence that names the field, the value and the way out; nothing is ignored.

mod compute;
mod quantity;
mod wishes;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::facts::ContainerKind;
use crate::units::{CoreShare, Mib, Percent, PodUid};
pub use compute::{CORE_POLICY, ComputeWishes, TASK_PRIORITY, compute_wishes, compute_wishes_as_far_as_read};
use quantity::{shown, whole};
pub use wishes::{CARD_POLICY, NODE_POLICY, owned_annotation, warnings};

/// How many distinct cards a container wants. The kubelet counts it too: one slot a card.
pub const COUNT: &str = "nvidia.com/gpu";
/// Memory per card in MiB.
pub const MEMORY: &str = "nvidia.com/gpumem";
/// Memory per card in percent of the card.
pub const MEMORY_PERCENTAGE: &str = "nvidia.com/gpumem-percentage";
/// Compute per card in percent of its SMs.
pub const CORES: &str = "nvidia.com/gpucores";
/// HAMi's priority between the processes on a card; not supported yet.
pub(crate) const PRIORITY: &str = "nvidia.com/priority";
/// NVIDIA's own resources for MIG instances; not supported yet.
const MIG_PREFIX: &str = "nvidia.com/mig-";
/// What people write when they mean [`MEMORY`], [`MEMORY_PERCENTAGE`] or [`CORES`]. No device plugin is known to offer
/// these; every other name below `nvidia.com/` may be one (passthrough plugins name resources after cards, network
/// operators after whatever they like), so it is left alone.
pub const MISSPELT: [&str; 6] = [
    "nvidia.com/mem",
    "nvidia.com/memory",
    "nvidia.com/mem-percentage",
    "nvidia.com/memory-percentage",
    "nvidia.com/core",
    "nvidia.com/cores",
];

/// Cards that one container may ask for. No machine has more: the largest have 16, and 64 leaves room.
pub const MAX_COUNT: u32 = 64;
/// Largest memory that a container may ask for, per card: what HAMi's annotations and its 32-bit readers hold.
pub const MAX_MEMORY: Mib = Mib(i32::MAX as u64);
/// Containers of a pod that may ask for GPUs: what an allocation holds. It also bounds what a pod that was made to be
/// hard costs: phases times containers times cards are looked at for every node.
pub const MAX_CONTAINERS: usize = 64;
/// The variable by which a container switches HAMi's limits off.
const DISABLE_CONTROL: &str = "CUDA_DISABLE_CONTROL";

/// A container of a pod spec, trimmed to what a request depends on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContainerView {
    /// Its name: the identity within the pod.
    pub name: String,
    /// What kind it is.
    pub kind: ContainerKind,
    /// `resources.limits`, values as written.
    pub limits: BTreeMap<String, String>,
    /// `resources.requests`, values as written.
    pub requests: BTreeMap<String, String>,
    /// Environment; `None` for a value that comes from elsewhere (`valueFrom`).
    pub env: BTreeMap<String, Option<String>>,
    /// `securityContext.privileged`.
    pub privileged: bool,
}

/// A pod, trimmed to what a request depends on. Shells build it from the API object.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodView {
    /// Namespace.
    pub namespace: String,
    /// Name; may be empty while the API server has not made one up yet.
    pub name: String,
    /// Uid, once it has one.
    pub uid: Option<PodUid>,
    /// Annotations.
    pub annotations: BTreeMap<String, String>,
    /// Labels.
    pub labels: BTreeMap<String, String>,
    /// `spec.nodeName`.
    pub node_name: Option<String>,
    /// `spec.schedulerName`.
    pub scheduler_name: Option<String>,
    /// In spec order: init containers and sidecars as declared, then app containers.
    pub containers: Vec<ContainerView>,
}

/// Memory per card.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum MemoryAsk {
    /// So many MiB.
    Mib(Mib),
    /// So much of whichever card it will be; 100 is the whole card.
    Percent(Percent),
}

impl fmt::Display for MemoryAsk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Mib(memory) => memory.fmt(f),
            Self::Percent(percent) => write!(f, "{} %", percent.get()),
        }
    }
}

/// What one container asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ContainerRequest {
    /// Distinct cards, `1..=`[`MAX_COUNT`].
    pub count: u32,
    /// Memory on each of them.
    pub memory: MemoryAsk,
    /// Compute on each of them.
    pub cores: CoreShare,
}

/// A container that asks for GPUs.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ContainerWish {
    /// Its name.
    pub name: String,
    /// What kind it is.
    pub kind: ContainerKind,
    /// What it asks for.
    pub request: ContainerRequest,
}

/// Fill one thing before the next, or keep things even.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Policy {
    /// The fullest that still fits.
    #[default]
    Binpack,
    /// The emptiest.
    Spread,
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Binpack => "binpack",
            Self::Spread => "spread",
        })
    }
}

/// What the cluster's admin set for wishes that a pod leaves open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Defaults {
    /// Among nodes. HAMi's default: binpack.
    pub node_policy: Policy,
    /// Among the cards of a node. HAMi's default: spread.
    pub card_policy: Policy,
    /// Memory per card of a container that names none; `None` is the whole card. With a value, a bare count is
    /// a best-effort slice of that size.
    pub memory: Option<Mib>,
}

impl Default for Defaults {
    fn default() -> Self {
        Self { node_policy: Policy::Binpack, card_policy: Policy::Spread, memory: None }
    }
}

/// What a pod asks for. Two pods with equal requests are refused alike, so it is also the key under which
/// refusals are kept.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct PodRequest {
    /// The containers that ask for GPUs, in spec order; never empty, at most [`MAX_CONTAINERS`].
    pub containers: Vec<ContainerWish>,
    /// Among nodes.
    pub node_policy: Policy,
    /// Among the cards of a node.
    pub card_policy: Policy,
}

impl PodRequest {
    /// Device ids that the kubelet will need for the pod at one time: the peak over its phases.
    #[must_use]
    pub fn slots(&self) -> u64 {
        crate::charge::phases(self.containers.iter().map(|c| c.kind))
            .iter()
            .map(|phase| phase.iter().map(|&c| u64::from(self.containers[c].request.count)).sum())
            .max()
            .unwrap_or(0)
    }
}

/// Why a pod's wishes cannot be taken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// Not a number as we take them.
    #[error("container {container}: {key} \"{value}\" is refused: {hint}")]
    Quantity {
        /// Container.
        container: String,
        /// Resource.
        key: String,
        /// As written.
        value: String,
        /// What to write instead.
        hint: String,
    },
    /// A number outside of its range.
    #[error("container {container}: {key} {value} is outside the range {least} to {most}: {hint}")]
    OutOfRange {
        /// Container.
        container: String,
        /// Resource.
        key: String,
        /// As read.
        value: u64,
        /// Least value taken.
        least: u64,
        /// Largest value taken.
        most: u64,
        /// What to write instead.
        hint: String,
    },
    /// Limit and request of one resource differ.
    #[error(
        "container {container}: {key} is {limit} in resources.limits and {request} in resources.requests: make them equal or drop the request"
    )]
    LimitDiffers {
        /// Container.
        container: String,
        /// Resource.
        key: String,
        /// The limit.
        limit: u64,
        /// The request.
        request: u64,
    },
    /// Memory asked in MiB and in percent.
    #[error(
        "container {container}: {MEMORY} and {MEMORY_PERCENTAGE} contradict each other: keep one of them"
    )]
    MemoryTwice {
        /// Container.
        container: String,
    },
    /// No card, but something of it.
    #[error("container {container}: {COUNT} is 0 but {key} is set: set {COUNT} to at least 1 or drop {key}")]
    CountZero {
        /// Container.
        container: String,
        /// The other resource.
        key: String,
    },
    /// A resource that is not served.
    #[error("container {container}: {key} is not supported: {}", instead_of(key))]
    UnsupportedResource {
        /// Container.
        container: String,
        /// Resource.
        key: String,
    },
    /// A privileged container sees every card whatever it was given.
    #[error(
        "container {container}: it is privileged and asks for GPUs, so no limit would hold: drop securityContext.privileged"
    )]
    Privileged {
        /// Container.
        container: String,
    },
    /// The container switches limits off.
    #[error(
        "container {container}: env {DISABLE_CONTROL} would switch its limits off, which is not supported: drop it"
    )]
    ControlDisabled {
        /// Container.
        container: String,
    },
    /// The container lifts its own share of compute.
    #[error(
        "container {container}: env {CORE_POLICY}=disable would lift its share of compute, which only an admin does (container.disableCoreLimit of the node agent): drop it, or write default or force"
    )]
    CoreLimitLifted {
        /// Container.
        container: String,
    },
    /// No policy at all.
    #[error("container {container}: env {CORE_POLICY}=\"{value}\" is unknown: write default or force")]
    UnknownCorePolicy {
        /// Container.
        container: String,
        /// As written.
        value: String,
    },
    /// No priority.
    #[error(
        "container {container}: env {TASK_PRIORITY}=\"{value}\" is no priority: write a whole number, 0 (most urgent) to 2147483647, or drop it (1)"
    )]
    MalformedPriority {
        /// Container.
        container: String,
        /// As written.
        value: String,
    },
    /// A wish that is not served.
    #[error("annotation {key}=\"{value}\" is not supported yet: drop it")]
    UnsupportedAnnotation {
        /// Annotation.
        key: String,
        /// As written.
        value: String,
    },
    /// A policy of HAMi that is not served.
    #[error("annotation {key}=\"{value}\" is not supported yet: use binpack or spread")]
    UnsupportedPolicy {
        /// Annotation.
        key: String,
        /// As written.
        value: String,
    },
    /// No policy at all.
    #[error("annotation {key}=\"{value}\" is unknown: valid values are binpack and spread")]
    UnknownPolicy {
        /// Annotation.
        key: String,
        /// As written.
        value: String,
    },
    /// A resource in the wrong place.
    #[error(
        "annotation {key}=\"{value}\" has no effect: move it to resources.limits of the container that needs it"
    )]
    ResourceAsAnnotation {
        /// Annotation.
        key: String,
        /// As written.
        value: String,
    },
    /// State in a user's hand.
    #[error("annotation {key} is written by the system only: drop it")]
    OwnedAnnotation {
        /// Annotation.
        key: String,
    },
    /// More containers with GPUs than an allocation holds.
    #[error(
        "the pod has {count} containers that ask for GPUs, of at most {MAX_CONTAINERS}: split it into several pods"
    )]
    TooManyContainers {
        /// How many.
        count: usize,
    },
    /// Two containers of one name: what was given could not be told apart.
    #[error("container name {container} appears twice: give each container a name of its own")]
    DuplicateContainer {
        /// Container.
        container: String,
    },
}

impl RequestError {
    /// The stable name, shared by log, Event, metric and CLI.
    #[must_use]
    pub const fn code(&self) -> &'static str {
        match self {
            Self::Quantity { .. } => "MalformedQuantity",
            Self::OutOfRange { .. } => "QuantityOutOfRange",
            Self::LimitDiffers { .. } => "LimitDiffersFromRequest",
            Self::MemoryTwice { .. } => "MemoryAskedTwice",
            Self::CountZero { .. } => "CountZero",
            Self::UnsupportedResource { .. } => "UnsupportedResource",
            Self::Privileged { .. } => "PrivilegedContainer",
            Self::ControlDisabled { .. } => "ControlDisabled",
            Self::CoreLimitLifted { .. } => "CoreLimitLifted",
            Self::UnknownCorePolicy { .. } => "UnknownCorePolicy",
            Self::MalformedPriority { .. } => "MalformedPriority",
            Self::UnsupportedAnnotation { .. } => "UnsupportedAnnotation",
            Self::UnsupportedPolicy { .. } => "UnsupportedPolicy",
            Self::UnknownPolicy { .. } => "UnknownPolicy",
            Self::ResourceAsAnnotation { .. } => "ResourceAsAnnotation",
            Self::OwnedAnnotation { .. } => "OwnedAnnotation",
            Self::TooManyContainers { .. } => "TooManyContainers",
            Self::DuplicateContainer { .. } => "DuplicateContainer",
        }
    }
}

/// What to ask for instead of a resource that is not served.
fn instead_of(key: &str) -> &'static str {
    if key.ends_with("/priority") {
        "write CUDA_TASK_PRIORITY (0 = most urgent) into the container's env"
    } else if key.contains("/mig-") {
        "MIG instances are not given out yet; use nvidia.com/gpu, gpumem or gpumem-percentage, and gpucores"
    } else {
        "use nvidia.com/gpu, nvidia.com/gpumem or nvidia.com/gpumem-percentage, and nvidia.com/gpucores"
    }
}

/// Whether a resource name is one of the four that are served.
fn is_served(key: &str) -> bool {
    matches!(key, COUNT | MEMORY | MEMORY_PERCENTAGE | CORES)
}

/// Whether a resource name is ours to answer for: served, not served yet, or a misspelt neighbour.
///
/// Other `nvidia.com/` resources (network cards, for one) belong to other drivers.
fn is_ours(key: &str) -> bool {
    key.starts_with(COUNT) || key == PRIORITY || key.starts_with(MIG_PREFIX) || MISSPELT.contains(&key)
}

/// Whether any container names any resource of ours, supported or not.
#[must_use]
pub fn mentions_us(pod: &PodView) -> bool {
    pod.containers.iter().any(|c| c.limits.keys().chain(c.requests.keys()).any(|key| is_ours(key)))
}

/// Reads one resource: the limit, or the request where there is no limit.
fn amount(container: &ContainerView, key: &str) -> Result<Option<u64>, RequestError> {
    let read = |text: Option<&String>| text.map(|t| whole(&container.name, key, t)).transpose();
    let (limit, request) = (read(container.limits.get(key))?, read(container.requests.get(key))?);
    match (limit, request) {
        (Some(limit), Some(request)) if limit != request => Err(RequestError::LimitDiffers {
            container: shown(&container.name),
            key: key.to_owned(),
            limit,
            request,
        }),
        _ => Ok(limit.or(request)),
    }
}

/// `value` if it lies in `least..=most`.
fn within(
    container: &ContainerView,
    key: &str,
    value: u64,
    (least, most): (u64, u64),
    hint: &str,
) -> Result<u64, RequestError> {
    if (least..=most).contains(&value) {
        return Ok(value);
    }
    Err(RequestError::OutOfRange {
        container: shown(&container.name),
        key: key.to_owned(),
        value,
        least,
        most,
        hint: hint.to_owned(),
    })
}

/// Parses what one container asks for; `None` when it asks for none of our resources.
///
/// | named | count | memory | cores |
/// | --- | --- | --- | --- |
/// | count alone | as named | whole card | 100 |
/// | memory | 1 if not named | as named | best effort if not named |
/// | percentage 100 | 1 if not named | whole card | 100 if not named |
/// | cores without memory | 1 if not named | whole card | as named |
///
/// # Errors
/// [`RequestError`]: a malformed or contradictory quantity, a resource that is not served, a privileged
/// container, or one that switches limits off.
pub fn parse_container(
    container: &ContainerView,
    defaults: &Defaults,
) -> Result<Option<ContainerRequest>, RequestError> {
    let name = || shown(&container.name);
    let named = container.limits.keys().chain(container.requests.keys());
    if let Some(key) = named.into_iter().find(|key| is_ours(key) && !is_served(key)) {
        return Err(RequestError::UnsupportedResource { container: name(), key: shown(key) });
    }
    let count = amount(container, COUNT)?;
    let memory = amount(container, MEMORY)?;
    let percentage = amount(container, MEMORY_PERCENTAGE)?;
    let cores = amount(container, CORES)?;
    let other = [(memory, MEMORY), (percentage, MEMORY_PERCENTAGE), (cores, CORES)]
        .into_iter()
        .find_map(|(value, key)| value.map(|_| key));
    let count = match (count, other) {
        (None | Some(0), None) => return Ok(None),
        (Some(0), Some(key)) => {
            return Err(RequestError::CountZero { container: name(), key: key.to_owned() });
        }
        (Some(count), _) => within(
            container,
            COUNT,
            count,
            (1, MAX_COUNT.into()),
            "it counts cards; memory goes to nvidia.com/gpumem",
        )?,
        (None, Some(_)) => 1,
    };
    let ask = match (memory, percentage) {
        (Some(_), Some(_)) => return Err(RequestError::MemoryTwice { container: name() }),
        (Some(mib), None) => {
            let hint = "it counts MiB per card; drop it to ask for the whole card";
            Some(MemoryAsk::Mib(Mib(within(container, MEMORY, mib, (1, MAX_MEMORY.0), hint)?)))
        }
        (None, Some(percent)) => {
            let hint = "drop it to ask for the whole card";
            let percent = within(container, MEMORY_PERCENTAGE, percent, (1, 100), hint)?;
            Some(MemoryAsk::Percent(percentage_of(percent)))
        }
        (None, None) => defaults.memory.map(MemoryAsk::Mib),
    };
    let ask = ask.unwrap_or(MemoryAsk::Percent(Percent::WHOLE));
    let cores = match cores {
        Some(cores) => {
            let hint = "it is a share of one card's compute; ask for more cards by nvidia.com/gpu";
            core_share(within(container, CORES, cores, (0, 100), hint)?)
        }
        None if ask == MemoryAsk::Percent(Percent::WHOLE) => CoreShare::WHOLE,
        None => CoreShare::BEST_EFFORT,
    };
    if container.privileged {
        return Err(RequestError::Privileged { container: name() });
    }
    if container.env.get(DISABLE_CONTROL).is_some_and(|value| !keeps_control(value.as_deref())) {
        return Err(RequestError::ControlDisabled { container: name() });
    }
    Ok(Some(ContainerRequest { count: u32::try_from(count).unwrap_or(MAX_COUNT), memory: ask, cores }))
}

/// A number that was checked to lie in `1..=100`.
fn percentage_of(checked: u64) -> Percent {
    u8::try_from(checked).ok().and_then(Percent::new).unwrap_or(Percent::WHOLE)
}

/// A number that was checked to lie in `0..=100`.
fn core_share(checked: u64) -> CoreShare {
    u8::try_from(checked).ok().and_then(CoreShare::new).unwrap_or(CoreShare::WHOLE)
}

/// Whether a value of [`DISABLE_CONTROL`] surely leaves limits on; one that comes from elsewhere may not.
fn keeps_control(value: Option<&str>) -> bool {
    matches!(value, Some("" | "0" | "false" | "False" | "FALSE"))
}

/// Parses what a pod asks for; `None` when it has nothing to do with us.
///
/// For pods that exist already: annotations that only the system writes are passed over, since Mullion's own
/// parts may have written them by then, and since they decide nothing. Admission calls [`admit_pod`].
///
/// # Errors
/// [`RequestError`]: the first wish, in spec order, that cannot be taken.
pub fn parse_pod(pod: &PodView, defaults: &Defaults) -> Result<Option<PodRequest>, RequestError> {
    let mut names = BTreeSet::new();
    let mut containers = Vec::new();
    for container in &pod.containers {
        if let Some(request) = parse_container(container, defaults)? {
            let (name, kind) = (container.name.clone(), container.kind);
            containers.push(ContainerWish { name, kind, request });
        }
    }
    if containers.is_empty() {
        return Ok(None);
    }
    if containers.len() > MAX_CONTAINERS {
        return Err(RequestError::TooManyContainers { count: containers.len() });
    }
    for container in &pod.containers {
        if !names.insert(container.name.as_str()) {
            return Err(RequestError::DuplicateContainer { container: shown(&container.name) });
        }
    }
    let (node_policy, card_policy) = wishes::policies(pod, defaults)?;
    Ok(Some(PodRequest { containers, node_policy, card_policy }))
}

/// [`parse_pod`] for a pod that is being created: also refuses annotations that only the system may write
/// (WH-06), on every pod that names a resource of ours, and what [`compute_wishes`] refuses.
///
/// # Errors
/// As [`parse_pod`] and [`compute_wishes`], and [`RequestError::OwnedAnnotation`].
pub fn admit_pod(pod: &PodView, defaults: &Defaults) -> Result<Option<PodRequest>, RequestError> {
    let request = parse_pod(pod, defaults)?;
    let asking = |container: &&ContainerView| {
        request.iter().flat_map(|r| &r.containers).any(|wish| wish.name == container.name)
    };
    for container in pod.containers.iter().filter(asking) {
        compute_wishes(container)?;
    }
    match owned_annotation(pod) {
        Some(key) if mentions_us(pod) => Err(RequestError::OwnedAnnotation { key: shown(key) }),
        _ => Ok(request),
    }
}

#[cfg(test)]
mod tests;
