//! What kube-scheduler sends and reads: `k8s.io/kube-scheduler/extender/v1`, Go structs without JSON tags, so that
//! field names are `PascalCase`. Go reads any case; so do we, as far as anything is known to send it.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Pod;
use serde::{Deserialize, Serialize};

use crate::error::Error;

/// Node name -> reason.
pub type FailedNodes = BTreeMap<String, String>;

/// Body of filter and prioritize.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct ExtenderArgs {
    /// The pod to place.
    #[serde(rename = "Pod", alias = "pod", default)]
    pub pod: Option<Box<Pod>>,
    /// The candidates: names, since we ask for `nodeCacheCapable: true`.
    #[serde(rename = "NodeNames", alias = "nodenames", alias = "nodeNames", default)]
    pub node_names: Option<Vec<String>>,
}

impl ExtenderArgs {
    /// Pod and names.
    ///
    /// # Errors
    /// [`Error::ConfigValue`] when one is missing: the scheduler's configuration is not ours.
    pub fn parts(&self) -> Result<(&Pod, &[String]), Error> {
        let missing = |field, fix| Error::ConfigValue { field, value: String::new(), fix };
        let pod = self.pod.as_deref().ok_or_else(|| missing("Pod", "send the pod to place"))?;
        let fix = "set nodeCacheCapable: true in the extender's entry of KubeSchedulerConfiguration";
        Ok((pod, self.node_names.as_deref().ok_or_else(|| missing("NodeNames", fix))?))
    }

    /// The pod's uid, or nothing.
    #[must_use]
    pub fn pod_uid(&self) -> &str {
        self.pod.as_ref().and_then(|pod| pod.metadata.uid.as_deref()).unwrap_or_default()
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
    pub node_names: Option<Vec<String>>,
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
    pub fn all(names: &[String]) -> Self {
        Self { node_names: Some(names.to_vec()), ..Self::default() }
    }
}

/// One entry of prioritize's answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "PascalCase")]
pub struct HostPriority {
    /// Node.
    pub host: String,
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

/// Answer of bind.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "PascalCase")]
pub struct BindingResult {
    /// Empty when the pod is bound.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub error: String,
}
