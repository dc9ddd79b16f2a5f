//! What Kubernetes users see as Events: a card that failed or came back, on the node and on the pods that have it, and
//! a tenant who breaks a bound.

use std::sync::Arc;

use k8s_openapi::api::core::v1::ObjectReference;
use kube::Client;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use mullion_core::facts::PodRef;
use mullion_core::units::NodeName;
use mullion_crds::pod::object_reference;
use tracing::warn;

use crate::error::Error;
use crate::metrics::Metrics;
use crate::prepare::files::Oversize;
use crate::world::Shared;

/// Publishes Events.
#[derive(Clone)]
pub struct Announcer {
    recorder: Recorder,
    shared: Arc<Shared>,
    metrics: Arc<Metrics>,
    node: NodeName,
}

impl std::fmt::Debug for Announcer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Announcer").field("node", &self.node).finish_non_exhaustive()
    }
}

impl Announcer {
    /// Publishes through `client` in the name of the agent on `node`.
    #[must_use]
    pub fn new(client: Client, shared: Arc<Shared>, metrics: Arc<Metrics>, node: NodeName) -> Self {
        let reporter =
            Reporter { controller: "mullion-nodeagent".to_owned(), instance: Some(node.0.clone()) };
        Self { recorder: Recorder::new(client, reporter), shared, metrics, node }
    }

    /// A card fell ill or is well again: one Event on the node, one on each pod that has it.
    pub fn card(&self, uuid: &str, failed: bool, message: &str) {
        let (type_, reason) =
            if failed { (EventType::Warning, "CardUnhealthy") } else { (EventType::Normal, "CardRecovered") };
        let mut objects = self.pods(uuid);
        objects.push(self.node());
        for object in objects {
            let event = Event {
                type_,
                reason: reason.to_owned(),
                note: Some(format!("card {uuid}: {message}")),
                action: "CheckHealth".to_owned(),
                secondary: None,
            };
            self.publish(event, object);
        }
    }

    /// A container's usage file is more than it was made as, and is cut back: an Event on its pod.
    pub fn usage_cut(&self, pod: &PodRef, container: &str, over: &Oversize) {
        let note = format!("the usage file of container {container} {over}: it is cut back");
        self.usage_bound(pod, "UsageFileCut", note);
    }

    /// It cannot be cut back, and takes what it takes until nobody has it any more: an Event on its pod.
    pub fn usage_not_cut(&self, pod: &PodRef, container: &str, over: &Oversize) {
        let note =
            format!("the usage file of container {container} {over}, and cannot be cut back: delete the pod");
        self.usage_bound(pod, "UsageFileNotCut", note);
    }

    fn usage_bound(&self, pod: &PodRef, reason: &str, note: String) {
        let event = Event {
            type_: EventType::Warning,
            reason: reason.to_owned(),
            note: Some(note),
            action: "CheckUsageFile".to_owned(),
            secondary: None,
        };
        self.publish(event, object_reference(pod));
    }

    /// A container holds more than its limit explains, as `bypass` says, or no longer does: an Event on its pod.
    pub fn limit(&self, pod: &mullion_audit::PodRef, container: &str, bypass: Option<&str>) {
        let (type_, reason, note) = match bypass {
            Some(bypass) => (EventType::Warning, "LimitBypassed", format!("container {container}: {bypass}")),
            None => (
                EventType::Normal,
                "LimitHoldsAgain",
                format!("container {container} holds no more than its limit explains"),
            ),
        };
        let action = "CheckLimits".to_owned();
        let event = Event { type_, reason: reason.to_owned(), note: Some(note), action, secondary: None };
        let pod =
            PodRef { namespace: pod.namespace.clone(), name: pod.name.clone(), uid: pod.uid.as_str().into() };
        self.publish(event, object_reference(&pod));
    }

    /// A container's usage file cannot be read, as `fault` says, or can be again: an Event on its pod.
    pub fn usage_file(&self, pod: &mullion_audit::PodRef, container: &str, fault: Option<&str>) {
        let (type_, reason, note) = match fault {
            Some(fault) => {
                (EventType::Warning, "UsageFileDamaged", format!("container {container}: {fault}"))
            }
            None => (
                EventType::Normal,
                "UsageFileReadable",
                format!("the usage file of container {container} can be read again"),
            ),
        };
        let action = "CheckUsageFile".to_owned();
        let event = Event { type_, reason: reason.to_owned(), note: Some(note), action, secondary: None };
        let pod =
            PodRef { namespace: pod.namespace.clone(), name: pod.name.clone(), uid: pod.uid.as_str().into() };
        self.publish(event, object_reference(&pod));
    }

    /// A wish of the pod's cannot be read, and the default holds: an Event on it.
    pub fn wish(&self, pod: &PodRef, code: &'static str, problem: &str) {
        let event = Event {
            type_: EventType::Warning,
            reason: code.to_owned(),
            note: Some(format!("{problem}; until then the default holds")),
            action: "ReadWishes".to_owned(),
            secondary: None,
        };
        self.publish(event, object_reference(pod));
    }

    fn node(&self) -> ObjectReference {
        ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("Node".to_owned()),
            name: Some(self.node.0.clone()),
            uid: Some(self.shared.read(|w| w.node_uid.clone())).filter(|u| !u.is_empty()),
            ..ObjectReference::default()
        }
    }

    fn pods(&self, card: &str) -> Vec<ObjectReference> {
        self.shared.read(|w| {
            let held = w.ledger.allocations_on(&w.node).filter(|a| !a.released && a.prepared);
            let held = held
                .filter(|a| a.containers.iter().flat_map(|c| &c.devices).any(|d| d.uuid.as_str() == card));
            held.map(|a| object_reference(&a.pod)).collect()
        })
    }

    /// In the background: an Event is never worth waiting for.
    fn publish(&self, event: Event, object: ObjectReference) {
        let recorder = self.recorder.clone();
        self.metrics.api_write("events");
        tokio::spawn(async move {
            let what = format!("publish {} on {}", event.reason, object.name.as_deref().unwrap_or_default());
            if let Err(error) = recorder.publish(&event, &object).await.map_err(Error::api(what)) {
                warn!(code = error.code(), error = %mullion_telemetry::source_chain(&error), "Event lost");
            }
        });
    }
}
