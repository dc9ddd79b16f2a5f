//! The verdict on one pod.

use k8s_openapi::api::core::v1::Pod;
use kube::core::Status;
use kube::core::admission::{AdmissionRequest, AdmissionResponse, Operation};
use mullion_core::request::{
    Defaults, PodRequest, PodView, RequestError, admit_pod, mentions_us, owned_annotation, warnings,
};
use mullion_crds::names::SCHEDULER;
use mullion_telemetry::trace::AdmissionStamp;

use super::patch;
use crate::guard::Guard;

/// Scheduler names that are taken over: what the API server fills in, and HAMi's.
const TAKEN_OVER: [&str; 2] = ["default-scheduler", "hami-scheduler"];

/// Longest warning that every client shows whole (Kubernetes truncates beyond 256).
const WARNING: usize = 256;

/// Why a pod is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// Its wishes cannot be taken.
    #[error(transparent)]
    Request(#[from] RequestError),
    /// Not a pod as we know it.
    #[error("the pod cannot be read: {reason}")]
    Unreadable {
        /// What is wrong with it.
        reason: String,
    },
    /// Nothing in it.
    #[error("spec.containers is empty: give the pod a container")]
    NoContainers,
    /// The scheduler was stepped over.
    #[error(
        "spec.nodeName is {node:?}: a pod that asks for GPUs must be scheduled, drop nodeName and use spec.nodeSelector"
    )]
    NodeName {
        /// The node.
        node: String,
    },
    /// Another scheduler knows nothing of the cards.
    #[error(
        "spec.schedulerName is {name:?}, which gives out no GPUs: drop it or set it to {SCHEDULER}, or drop the GPU resources"
    )]
    OtherScheduler {
        /// Its name.
        name: String,
    },
}

impl Refusal {
    /// The stable name, shared by log, answer and metric.
    #[must_use]
    pub const fn code(&self) -> &'static str {
        match self {
            Self::Request(error) => error.code(),
            Self::Unreadable { .. } => "PodUnreadable",
            Self::NoContainers => "NoContainers",
            Self::NodeName { .. } => "NodeNameSet",
            Self::OtherScheduler { .. } => "OtherScheduler",
        }
    }
}

/// Judges the pod in `request`. Returns a word for the metric and the answer. `stamp` is asked for once, at the
/// end, for a pod that is patched.
pub fn review(
    request: &AdmissionRequest<Guard<Pod>>,
    defaults: &Defaults,
    stamp: impl FnOnce() -> AdmissionStamp,
) -> (&'static str, AdmissionResponse) {
    let mut response = AdmissionResponse::from(request);
    let about_pods = request.kind.kind == "Pod" && request.kind.group.is_empty();
    let Some(object) =
        request.object.as_ref().filter(|_| about_pods && request.operation == Operation::Create)
    else {
        return ("not_ours", response);
    };
    let pod = object.0.as_ref().map_err(|remains| Refusal::Unreadable { reason: remains.error.clone() });
    let verdict = pod.and_then(|pod| {
        let view = view(pod, request.namespace.as_deref());
        response.warnings = said(&view);
        Ok((judge(&view, defaults)?, pod))
    });
    match verdict {
        Ok((None, _)) => ("not_ours", response),
        Ok((Some(wish), pod)) => match response.with_patch(patch::patch(pod, &wish, &stamp())) {
            Ok(patched) => ("ok", patched),
            Err(error) => {
                let mut response = AdmissionResponse::from(request);
                refuse(&mut response, 500, "PatchFailed", &format!("the patch cannot be written: {error}"));
                ("PatchFailed", response)
            }
        },
        Err(refusal) => {
            refuse(&mut response, 422, refusal.code(), &refusal.to_string());
            (refusal.code(), response)
        }
    }
}

/// The pod as a request is read from it.
fn view(pod: &Pod, namespace: Option<&str>) -> PodView {
    let mut view = mullion_crds::pod::view(pod);
    if view.namespace.is_empty() {
        namespace.unwrap_or_default().clone_into(&mut view.namespace);
    }
    view
}

/// What the pod asks for; `None` when it has nothing to do with us.
///
/// # Errors
/// A [`Refusal`]: everything that would be ignored or go around us otherwise.
pub fn judge(pod: &PodView, defaults: &Defaults) -> Result<Option<PodRequest>, Refusal> {
    if pod.containers.is_empty() {
        return Err(Refusal::NoContainers);
    }
    if !mentions_us(pod) {
        return Ok(None);
    }
    let Some(request) = admit_pod(pod, defaults)? else { return Ok(None) };
    if let Some(node) = &pod.node_name {
        return Err(Refusal::NodeName { node: node.clone() });
    }
    match pod.scheduler_name.as_deref() {
        None => {}
        Some(name) if name == SCHEDULER || TAKEN_OVER.contains(&name) => {}
        Some(name) => return Err(Refusal::OtherScheduler { name: name.to_owned() }),
    }
    Ok(Some(request))
}

fn said(pod: &PodView) -> Option<Vec<String>> {
    let mut all = warnings(pod);
    if !mentions_us(pod)
        && let Some(key) = owned_annotation(pod)
    {
        all.push(format!("annotation {key} is written by the system only and has no effect here: drop it"));
    }
    for text in &mut all {
        if let Some((end, _)) = text.char_indices().nth(WARNING) {
            text.truncate(end);
        }
    }
    (!all.is_empty()).then_some(all)
}

fn refuse(response: &mut AdmissionResponse, status: u16, code: &str, text: &str) {
    response.allowed = false;
    response.patch = None;
    response.result = Status::failure(&format!("{code}: {text}"), code).with_code(status);
}
