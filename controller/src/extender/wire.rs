//! What kube-scheduler sends and reads: `k8s.io/kube-scheduler/extender/v1`, Go structs without JSON tags, so that
//! field names are `PascalCase`. Go reads any case; so do we, as far as anything is known to send it.

use std::borrow::Cow;
use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Pod;
use mullion_core::units::NodeName;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::value::RawValue;

use crate::error::Error;
use crate::guard::brief;

/// Node name -> reason.
pub type FailedNodes = BTreeMap<NodeName, Cow<'static, str>>;

/// The pod of a call: who it is, and the rest as text. What it asks for is known from the watch as a rule, and a pod is
/// a few KiB of JSON twice per pod.
#[derive(Clone, Debug)]
pub struct PodText {
    /// Who it is.
    pub key: PodKey,
    text: Box<RawValue>,
}

/// Who a pod is.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct PodKey {
    /// Name.
    pub name: String,
    /// Namespace.
    pub namespace: String,
    /// Uid.
    pub uid: String,
    /// Version of the object; its wishes may change while it waits.
    pub resource_version: String,
}

#[derive(Deserialize)]
struct Keyed {
    #[serde(default)]
    metadata: PodKey,
}

impl<'de> Deserialize<'de> for PodText {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = Box::<RawValue>::deserialize(deserializer)?;
        let keyed: Keyed = serde_json::from_str(text.get()).map_err(D::Error::custom)?;
        Ok(Self { key: keyed.metadata, text })
    }
}

impl PodText {
    /// All of it.
    ///
    /// # Errors
    /// [`Error::ConfigValue`] when it is no pod.
    pub fn read(&self) -> Result<Pod, Error> {
        serde_json::from_str(self.text.get()).map_err(|error| Error::ConfigValue {
            field: "Pod",
            value: brief(&error),
            fix: "send the pod as the API server shows it",
        })
    }
}

/// Body of filter and prioritize.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct ExtenderArgs {
    /// The pod to place.
    #[serde(rename = "Pod", alias = "pod", default)]
    pub pod: Option<PodText>,
    /// The candidates: names, since we ask for `nodeCacheCapable: true`.
    #[serde(rename = "NodeNames", alias = "nodenames", alias = "nodeNames", default)]
    pub node_names: Option<Vec<NodeName>>,
}

impl ExtenderArgs {
    /// Pod and names.
    ///
    /// # Errors
    /// [`Error::ConfigValue`] when one is missing: the scheduler's configuration is not ours.
    pub fn parts(&self) -> Result<(&PodText, &[NodeName]), Error> {
        let missing = |field, fix| Error::ConfigValue { field, value: String::new(), fix };
        let pod = self.pod.as_ref().ok_or_else(|| missing("Pod", "send the pod to place"))?;
        let fix = "set nodeCacheCapable: true in the extender's entry of KubeSchedulerConfiguration";
        Ok((pod, self.node_names.as_deref().ok_or_else(|| missing("NodeNames", fix))?))
    }

    /// The pod's uid, or nothing.
    #[must_use]
    pub fn pod_uid(&self) -> &str {
        self.pod.as_ref().map_or("", |pod| pod.key.uid.as_str())
    }

    /// How many candidates.
    #[must_use]
    pub fn node_count(&self) -> usize {
        self.node_names.as_ref().map_or(0, Vec::len)
    }
}

/// Answer of filter.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "PascalCase")]
pub struct FilterResult {
    /// Every node that fits.
    pub node_names: Option<Vec<NodeName>>,
    /// Nodes where taking pods off could help.
    pub failed_nodes: FailedNodes,
    /// Nodes where it could not.
    pub failed_and_unresolvable_nodes: FailedNodes,
    /// A fault of our own.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub error: String,
}

impl FilterResult {
    /// Every node fits.
    #[must_use]
    pub fn all(names: &[NodeName]) -> Self {
        Self { node_names: Some(names.to_vec()), ..Self::default() }
    }
}

/// One entry of prioritize's answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "PascalCase")]
pub struct HostPriority {
    /// Node.
    pub host: NodeName,
    /// Higher is better.
    pub score: i64,
}

/// Body of bind.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct BindingArgs {
    /// Name of the pod.
    #[serde(rename = "PodName", alias = "podname", alias = "podName")]
    pub pod_name: String,
    /// Its namespace.
    #[serde(rename = "PodNamespace", alias = "podnamespace", alias = "podNamespace")]
    pub pod_namespace: String,
    /// Its uid.
    #[serde(rename = "PodUID", alias = "poduid", alias = "podUID")]
    pub pod_uid: String,
    /// Where kube-scheduler wants it.
    #[serde(rename = "Node", alias = "node")]
    pub node: String,
}

impl BindingArgs {
    /// Refuses names that are none: they become parts of paths in calls to the API server.
    ///
    /// # Errors
    /// [`Error::ConfigValue`] with the first field that is not as kube-scheduler sends it.
    pub fn check(&self) -> Result<(), Error> {
        let fields = [
            ("PodName", &self.pod_name),
            ("PodNamespace", &self.pod_namespace),
            ("PodUID", &self.pod_uid),
            ("Node", &self.node),
        ];
        let plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
        let is_name = |text: &str| {
            let (bytes, ends) = (text.as_bytes(), (text.bytes().next(), text.bytes().last()));
            bytes.len() <= 253
                && matches!(ends, (Some(first), Some(last)) if plain(first) && plain(last))
                && bytes.iter().all(|&b| plain(b) || b == b'-' || b == b'.')
        };
        match fields.into_iter().find(|(_, value)| !is_name(value)) {
            None => Ok(()),
            Some((field, value)) => {
                let value: String = value.chars().take(64).collect();
                let fix = "send a name of up to 253 lower-case letters, digits, '-' and '.'";
                Err(Error::ConfigValue { field, value, fix })
            }
        }
    }
}

/// Answer of bind.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "PascalCase")]
pub struct BindingResult {
    /// Empty when the pod is bound.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub error: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_binding_with_a_name_that_is_none_is_refused() {
        let good = BindingArgs {
            pod_name: "a-pod.0".into(),
            pod_namespace: "team-a".into(),
            pod_uid: "3f2b1c0d-1111-2222-3333-444455556666".into(),
            node: "node-a.example".into(),
        };
        assert!(good.check().is_ok());
        let long = "a".repeat(254);
        for bad in ["", "..", "../..", "a/b", "a?b", "A", "a b", "-a", "a.", "ä", "a%2fb", long.as_str()] {
            for field in 0..4 {
                let mut args = good.clone();
                let slot = match field {
                    0 => &mut args.pod_name,
                    1 => &mut args.pod_namespace,
                    2 => &mut args.pod_uid,
                    _ => &mut args.node,
                };
                bad.clone_into(slot);
                let refusal = args.check().unwrap_err();
                assert!(
                    matches!(refusal, Error::ConfigValue { .. }),
                    "{bad:?} as field {field}: {refusal:?}"
                );
            }
        }
    }
}
