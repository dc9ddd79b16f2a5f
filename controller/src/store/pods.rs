//! A pod, trimmed to what is decided by.

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use mullion_core::facts::PodRef;
use mullion_core::request::{Defaults, PodRequest, RequestError, parse_pod};
use mullion_core::units::NodeName;
use mullion_crds::names::POKE_ANNOTATION;
use mullion_telemetry::trace::ADMISSION_ANNOTATION;

/// How far a pod has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// No container of it has started.
    Pending,
    /// At least one has.
    Running,
    /// It has succeeded or failed.
    Ended,
}

/// A pod, trimmed.
#[derive(Clone, Debug)]
pub struct PodRecord {
    /// Which.
    pub pod: PodRef,
    /// Where it is bound.
    pub node: Option<NodeName>,
    /// What it asks for, or why that cannot be taken.
    pub request: Result<Option<PodRequest>, RequestError>,
    /// It is being deleted.
    pub deleting: bool,
    /// How far it has come.
    pub phase: Phase,
    /// kube-scheduler has tried it and found no node.
    pub unschedulable: bool,
    /// Name of its scheduler.
    pub scheduler: String,
    /// Its priority.
    pub priority: i32,
    /// When it was created, Unix seconds.
    pub created: i64,
    /// A controller owns it, so that it comes back after an eviction.
    pub owned: bool,
    /// How often it was poked.
    pub pokes: u64,
    /// When and in which trace it was admitted.
    pub admission: Option<String>,
}

impl PodRecord {
    /// Trims `object`; `None` for one without a name or uid, which no API server has stored.
    #[must_use]
    pub fn read(object: &Pod, defaults: &Defaults) -> Option<Self> {
        let view = mullion_crds::pod::view(object);
        let status = object.status.as_ref();
        let condition = status
            .and_then(|s| s.conditions.as_ref())
            .and_then(|all| all.iter().find(|condition| condition.type_ == "PodScheduled"));
        let phase = status.and_then(|s| s.phase.as_deref()).unwrap_or_default();
        Some(Self {
            pod: mullion_crds::pod::pod_ref(object)?,
            request: parse_pod(&view, defaults),
            node: view.node_name.map(NodeName::from),
            deleting: object.metadata.deletion_timestamp.is_some(),
            phase: match phase {
                "Running" => Phase::Running,
                "Succeeded" | "Failed" => Phase::Ended,
                _ => Phase::Pending,
            },
            unschedulable: condition.is_some_and(|c| c.status == "False"),
            scheduler: view.scheduler_name.unwrap_or_default(),
            priority: object.spec.as_ref().and_then(|s| s.priority).unwrap_or(0),
            created: object.creation_timestamp().map_or(0, |t| t.0.as_second()),
            owned: object.owner_references().iter().any(|owner| owner.controller == Some(true)),
            pokes: object.annotations().get(POKE_ANNOTATION).and_then(|n| n.parse().ok()).unwrap_or(0),
            admission: object.annotations().get(ADMISSION_ANNOTATION).cloned(),
        })
    }

    /// `namespace/name`.
    #[must_use]
    pub fn full_name(&self) -> String {
        format!("{}/{}", self.pod.namespace, self.pod.name)
    }

    /// It waits for a node, as far as we can tell.
    #[must_use]
    pub const fn waiting(&self) -> bool {
        self.node.is_none() && !self.deleting && matches!(self.phase, Phase::Pending)
    }
}
