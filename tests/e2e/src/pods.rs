//! Pods to test with, built step by step.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Container, EnvVar, Pod, PodSpec, ResourceRequirements};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube::api::ObjectMeta;

/// Image that every lab node has.
pub const IMAGE: &str = "lab.local/busybox:1";

/// A container that sleeps (and ends at once on SIGTERM), asking for `limits`.
#[must_use]
pub fn container(name: &str, limits: &[(&str, &str)]) -> Container {
    running(name, limits, "trap 'exit 0' TERM; while :; do sleep 1000 & wait; done")
}

/// A container that runs `script`, asking for `limits`.
#[must_use]
pub fn running(name: &str, limits: &[(&str, &str)], script: &str) -> Container {
    let limits: BTreeMap<String, Quantity> =
        limits.iter().map(|(k, v)| ((*k).to_owned(), Quantity((*v).to_owned()))).collect();
    Container {
        name: name.to_owned(),
        image: Some(IMAGE.to_owned()),
        image_pull_policy: Some("Never".to_owned()),
        command: Some(vec!["/bin/sh".to_owned(), "-c".to_owned(), script.to_owned()]),
        resources: (!limits.is_empty())
            .then(|| ResourceRequirements { limits: Some(limits), ..ResourceRequirements::default() }),
        ..Container::default()
    }
}

/// The limits of a slice.
#[must_use]
pub fn slice<'a>(memory: &'a str, cores: &'a str) -> Vec<(&'a str, &'a str)> {
    vec![("nvidia.com/gpu", "1"), ("nvidia.com/gpumem", memory), ("nvidia.com/gpucores", cores)]
}

/// A pod of `containers`, for its builder methods below.
#[must_use]
pub fn pod(name: &str, containers: Vec<Container>) -> Pod {
    Pod {
        metadata: ObjectMeta { name: Some(name.to_owned()), ..ObjectMeta::default() },
        spec: Some(PodSpec {
            containers,
            termination_grace_period_seconds: Some(1),
            automount_service_account_token: Some(false),
            ..PodSpec::default()
        }),
        status: None,
    }
}

/// A pod of one container with a slice.
#[must_use]
pub fn slice_pod(name: &str, memory: &str, cores: &str) -> Pod {
    pod(name, vec![container("main", &slice(memory, cores))])
}

/// How often the app containers of a pod were started again.
#[must_use]
pub fn restarts(pod: &Pod) -> i32 {
    pod.status.iter().flat_map(|s| s.container_statuses.iter().flatten()).map(|c| c.restart_count).sum()
}

/// Changes to a pod.
pub trait Build: Sized {
    /// Runs only on `node` (through affinity by name, so that the scheduler still decides).
    #[must_use]
    fn on(self, node: &str) -> Self;
    /// With an annotation.
    #[must_use]
    fn annotated(self, key: &str, value: &str) -> Self;
    /// With init containers.
    #[must_use]
    fn with_inits(self, inits: Vec<Container>) -> Self;
    /// With an environment variable in every app container.
    #[must_use]
    fn with_env(self, name: &str, value: &str) -> Self;
}

impl Build for Pod {
    fn on(mut self, node: &str) -> Self {
        let affinity = serde_json::json!({"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {
            "nodeSelectorTerms": [{"matchFields": [
                {"key": "metadata.name", "operator": "In", "values": [node]}]}]}}});
        if let Some(spec) = &mut self.spec {
            spec.affinity = serde_json::from_value(affinity).ok();
        }
        self
    }

    fn annotated(mut self, key: &str, value: &str) -> Self {
        self.metadata.annotations.get_or_insert_default().insert(key.to_owned(), value.to_owned());
        self
    }

    fn with_inits(mut self, inits: Vec<Container>) -> Self {
        if let Some(spec) = &mut self.spec {
            spec.init_containers = Some(inits);
        }
        self
    }

    fn with_env(mut self, name: &str, value: &str) -> Self {
        for container in self.spec.iter_mut().flat_map(|spec| &mut spec.containers) {
            let variable = EnvVar { name: name.to_owned(), value: Some(value.to_owned()), value_from: None };
            container.env.get_or_insert_default().push(variable);
        }
        self
    }
}
