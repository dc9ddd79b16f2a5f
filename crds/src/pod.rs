//! A Kubernetes pod as the core sees it.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Container, ObjectReference, Pod};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use mullion_core::facts::{ContainerKind, PodRef};
use mullion_core::request::{ContainerView, PodView};

/// The pod, trimmed to what a request depends on; quantities stay as they are written.
///
/// At admission the name may still be empty (`generateName`) and the namespace may be missing: the request says it.
#[must_use]
pub fn view(pod: &Pod) -> PodView {
    let meta = &pod.metadata;
    let spec = pod.spec.as_ref();
    let init = spec.iter().flat_map(|s| s.init_containers.iter().flatten()).map(|c| {
        let sidecar = c.restart_policy.as_deref() == Some("Always");
        container(c, if sidecar { ContainerKind::Sidecar } else { ContainerKind::Init })
    });
    let apps = spec.iter().flat_map(|s| &s.containers).map(|c| container(c, ContainerKind::App));
    PodView {
        namespace: meta.namespace.clone().unwrap_or_default(),
        name: meta.name.clone().unwrap_or_default(),
        uid: meta.uid.as_deref().map(Into::into),
        annotations: meta.annotations.clone().unwrap_or_default(),
        labels: meta.labels.clone().unwrap_or_default(),
        node_name: spec.and_then(|s| s.node_name.clone()).filter(|n| !n.is_empty()),
        scheduler_name: spec.and_then(|s| s.scheduler_name.clone()).filter(|n| !n.is_empty()),
        containers: init.chain(apps).collect(),
    }
}

/// Which pod this is; `None` for one that the API server has not stored yet.
#[must_use]
pub fn pod_ref(pod: &Pod) -> Option<PodRef> {
    Some(PodRef {
        namespace: pod.metadata.namespace.clone()?,
        name: pod.metadata.name.clone()?,
        uid: pod.metadata.uid.as_deref()?.into(),
    })
}

/// The pod as an Event names it.
#[must_use]
pub fn object_reference(pod: &PodRef) -> ObjectReference {
    ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("Pod".to_owned()),
        namespace: Some(pod.namespace.clone()),
        name: Some(pod.name.clone()),
        uid: Some(pod.uid.0.clone()),
        ..ObjectReference::default()
    }
}

fn container(container: &Container, kind: ContainerKind) -> ContainerView {
    let resources = container.resources.as_ref();
    let env = container.env.iter().flatten().map(|e| {
        // An entry with neither value nor source is the empty string.
        let value = match (&e.value, &e.value_from) {
            (None, Some(_)) => None,
            (value, _) => Some(value.clone().unwrap_or_default()),
        };
        (e.name.clone(), value)
    });
    ContainerView {
        name: container.name.clone(),
        kind,
        limits: quantities(resources.and_then(|r| r.limits.as_ref())),
        requests: quantities(resources.and_then(|r| r.requests.as_ref())),
        env: env.collect(),
        privileged: container.security_context.as_ref().and_then(|s| s.privileged).unwrap_or(false),
    }
}

fn quantities(map: Option<&BTreeMap<String, Quantity>>) -> BTreeMap<String, String> {
    map.into_iter().flatten().map(|(key, quantity)| (key.clone(), quantity.0.clone())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn pod(value: serde_json::Value) -> Pod {
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn keeps_spec_order_and_tells_sidecars_from_init_containers() {
        let pod = pod(json!({
            "metadata": {"name": "p", "namespace": "n", "uid": "u-1", "labels": {"a": "b"},
                "annotations": {"hami.io/gpu-scheduler-policy": "spread"}},
            "spec": {
                "schedulerName": "mullion-scheduler",
                "initContainers": [
                    {"name": "i1"},
                    {"name": "s1", "restartPolicy": "Always", "resources": {"limits": {"nvidia.com/gpu": 1}}},
                    {"name": "i2"},
                ],
                "containers": [
                    {"name": "b", "securityContext": {"privileged": true}},
                    {"name": "a", "resources": {
                        "limits": {"nvidia.com/gpumem": "20k"}, "requests": {"nvidia.com/gpumem": "3000"}}},
                ],
            },
        }));
        let view = view(&pod);
        let kinds: Vec<_> = view.containers.iter().map(|c| (c.name.as_str(), c.kind)).collect();
        assert_eq!(
            kinds,
            [
                ("i1", ContainerKind::Init),
                ("s1", ContainerKind::Sidecar),
                ("i2", ContainerKind::Init),
                ("b", ContainerKind::App),
                ("a", ContainerKind::App),
            ]
        );
        assert_eq!(view.containers[1].limits["nvidia.com/gpu"], "1", "a bare number is read like a text");
        assert!(view.containers[3].privileged);
        assert_eq!(view.containers[4].limits["nvidia.com/gpumem"], "20k", "as written");
        assert_eq!(view.containers[4].requests["nvidia.com/gpumem"], "3000");
        assert_eq!(view.annotations["hami.io/gpu-scheduler-policy"], "spread");
        assert_eq!(view.labels["a"], "b");
        assert_eq!(view.scheduler_name.as_deref(), Some("mullion-scheduler"));
        assert_eq!(view.node_name, None);
        let reference = pod_ref(&pod).unwrap();
        assert_eq!((reference.namespace.as_str(), reference.uid.as_str()), ("n", "u-1"));
    }

    #[test]
    fn environment_tells_a_value_from_a_source() {
        let pod = pod(json!({"metadata": {"generateName": "p-"}, "spec": {"nodeName": "", "containers": [{
            "name": "a", "env": [
                {"name": "PLAIN", "value": "true"},
                {"name": "BARE"},
                {"name": "FROM", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
                {"name": "TWICE", "value": "first"},
                {"name": "TWICE", "value": "last"},
            ],
        }]}}));
        let view = view(&pod);
        let env = &view.containers[0].env;
        assert_eq!(env["PLAIN"].as_deref(), Some("true"));
        assert_eq!(env["BARE"].as_deref(), Some(""));
        assert_eq!(env["FROM"], None);
        assert_eq!(env["TWICE"].as_deref(), Some("last"), "the kubelet lets the last one win");
        assert_eq!((view.name.as_str(), view.node_name), ("", None));
        assert_eq!(pod_ref(&pod), None);
    }

    #[test]
    fn an_empty_object_is_an_empty_pod() {
        assert_eq!(view(&Pod::default()), PodView::default());
    }
}
