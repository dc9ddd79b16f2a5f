//! A pod's annotations: wishes that are honoured, wishes that are not supported yet, and keys that are not the
//! user's to write.

use super::quantity::shown;
use super::{CORES, COUNT, Defaults, MEMORY, MEMORY_PERCENTAGE, PRIORITY, PodView, Policy, RequestError};

/// Which node: `binpack` or `spread` (HAMi's key).
pub const NODE_POLICY: &str = "hami.io/node-scheduler-policy";
/// Which card: `binpack` or `spread` (HAMi's key).
pub const CARD_POLICY: &str = "hami.io/gpu-scheduler-policy";

/// Wishes of HAMi and of ours that are not served yet: refused, because a wish that is ignored is a wish broken.
const UNSUPPORTED: [&str; 9] = [
    "hami.io/device-scoring-weights",
    "mullion.io/mig-profile",
    "mullion.io/mig-spread",
    "nvidia.com/nouse-gputype",
    "nvidia.com/nouse-gpuuuid",
    "nvidia.com/numa-bind",
    "nvidia.com/use-gputype",
    "nvidia.com/use-gpuuuid",
    "nvidia.com/vgpu-mode",
];

/// Words of HAMi for [`CARD_POLICY`] that are not served yet.
const UNSUPPORTED_CARD_POLICIES: [&str; 4] = ["topology-aware", "mutex", "numa", "numa-bind"];

/// State that HAMi keeps in annotations. A pod that brings it along claims an allocation that it does not have.
const OWNED: [&str; 7] = [
    "hami.io/bind-phase",
    "hami.io/bind-time",
    "hami.io/vgpu-devices-allocated",
    "hami.io/vgpu-devices-to-allocate",
    "hami.io/vgpu-mig-allocations",
    "hami.io/vgpu-node",
    "hami.io/vgpu-time",
];

/// Everything else under this prefix is written by Mullion's own parts.
const OWN_PREFIX: &str = "mullion.io/";

/// Resource names that users write as annotations, where they do nothing.
const RESOURCES: [&str; 5] = [COUNT, MEMORY, MEMORY_PERCENTAGE, CORES, PRIORITY];

/// HAMi's label that takes a pod out of its webhook; ours is a label of the namespace only.
const HAMI_OPT_OUT: (&str, &str) = ("hami.io/webhook", "ignore");

/// An annotation of `pod` that only a system component may write (HAMi's allocation state, `mullion.io/` other
/// than documented wishes), if it has one.
#[must_use]
pub fn owned_annotation(pod: &PodView) -> Option<&str> {
    let owned =
        |key: &&str| OWNED.contains(key) || (key.starts_with(OWN_PREFIX) && !UNSUPPORTED.contains(key));
    pod.annotations.keys().map(String::as_str).find(owned)
}

/// Checks every annotation that says how GPUs are to be chosen; returns the node and the card policy.
pub(super) fn policies(pod: &PodView, defaults: &Defaults) -> Result<(Policy, Policy), RequestError> {
    for key in RESOURCES {
        if let Some(value) = pod.annotations.get(key) {
            return Err(RequestError::ResourceAsAnnotation { key: key.to_owned(), value: shown(value) });
        }
    }
    for key in UNSUPPORTED {
        if let Some(value) = pod.annotations.get(key) {
            return Err(RequestError::UnsupportedAnnotation { key: key.to_owned(), value: shown(value) });
        }
    }
    Ok((
        policy(pod, NODE_POLICY, defaults.node_policy, &[])?,
        policy(pod, CARD_POLICY, defaults.card_policy, &UNSUPPORTED_CARD_POLICIES)?,
    ))
}

/// Reads one policy as a whole token: a typo is not a default (FS-04).
fn policy(pod: &PodView, key: &str, default: Policy, later: &[&str]) -> Result<Policy, RequestError> {
    let Some(value) = pod.annotations.get(key) else { return Ok(default) };
    match value.as_str() {
        "binpack" => Ok(Policy::Binpack),
        "spread" => Ok(Policy::Spread),
        _ => {
            let known = |word: &str| matches!(word, "binpack" | "spread") || later.contains(&word);
            let chain = value.contains(',') && value.split(',').all(|word| known(word.trim()));
            let (key, shown) = (key.to_owned(), shown(value));
            if later.contains(&value.as_str()) || (chain && !later.is_empty()) {
                Err(RequestError::UnsupportedPolicy { key, value: shown })
            } else {
                Err(RequestError::UnknownPolicy { key, value: shown })
            }
        }
    }
}

/// How the names of wishes about cards and policies begin: who writes another name behind it has made a slip.
/// Not each word that begins with `use` is one of them (`nvidia.com/user`, `nvidia.com/used-by`).
const WISHES_BEGIN: [&str; 5] =
    ["nvidia.com/use-", "nvidia.com/usegpu", "nvidia.com/nouse", "hami.io/node-sched", "hami.io/gpu-sched"];

/// Whether `key` looks like a wish and is none.
fn is_slip(key: &str) -> bool {
    let begins = WISHES_BEGIN.iter().any(|begin| key.starts_with(begin));
    begins && !UNSUPPORTED.contains(&key) && ![NODE_POLICY, CARD_POLICY].contains(&key)
}

/// What a pod's author should know although the pod is taken: wishes in places where nobody reads them (WH-08).
///
/// For a pod that asks for GPUs a resource written as an annotation is an error of
/// [`parse_pod`](super::parse_pod) instead.
#[must_use]
pub fn warnings(pod: &PodView) -> Vec<String> {
    let mut warnings = Vec::new();
    for key in RESOURCES {
        if pod.annotations.contains_key(key) {
            warnings.push(format!(
                "annotation {key} has no effect: it is a resource and belongs under resources.limits of a container"
            ));
        }
    }
    if !super::mentions_us(pod) {
        return warnings;
    }
    for key in pod.annotations.keys().filter(|key| is_slip(key)) {
        warnings.push(format!("annotation {} has no effect: there is no wish of that name", shown(key)));
    }
    let (key, value) = HAMI_OPT_OUT;
    if pod.labels.get(key).is_some_and(|v| v == value) {
        warnings.push(format!(
            "label {key}={value} has no effect on a pod: put the opt-out label on its namespace"
        ));
    }
    warnings
}
