//! A pod, trimmed to what is decided by.

use k8s_openapi::api::core::v1::{ContainerStatus, Pod};
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
#[expect(clippy::struct_excessive_bools, reason = "each is a fact of its own that the API server shows")]
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
    /// Version of the object that was read.
    pub version: String,
    /// A container of it that asks for GPUs has started once.
    pub started: bool,
    /// A container of it that asks for GPUs runs.
    pub running: bool,
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
        let request = parse_pod(&view, defaults);
        let asks = |name: &str| {
            let wishes = request.iter().flatten().flat_map(|request| &request.containers);
            wishes.into_iter().any(|wish| wish.name == name)
        };
        let statuses = status.into_iter().flat_map(|s| [&s.init_container_statuses, &s.container_statuses]);
        let asking = || statuses.clone().flatten().flatten().filter(|c| asks(&c.name));
        let started = asking().any(has_started);
        let running = asking().any(|c| c.state.as_ref().is_some_and(|state| state.running.is_some()));
        Some(Self {
            pod: mullion_crds::pod::pod_ref(object)?,
            request,
            version: object.resource_version().unwrap_or_default(),
            started,
            running,
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

    /// Its containers hold what the node gave them: one has started, and the pod has not ended. From then on its
    /// node's agent keeps that for it, whatever becomes of the allocation.
    #[must_use]
    pub fn holds(&self) -> bool {
        self.node.is_some() && self.started && self.phase != Phase::Ended
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

/// Whether a container runs or ever did. One that could not be created never held anything.
fn has_started(status: &ContainerStatus) -> bool {
    let ran = |state: &Option<k8s_openapi::api::core::v1::ContainerState>| {
        state.as_ref().is_some_and(|state| state.running.is_some() || state.terminated.is_some())
    };
    ran(&status.state) || ran(&status.last_state) || status.restart_count > 0
}
