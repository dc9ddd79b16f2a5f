//! Every call to the API server that changes something, each with a deadline and a verdict on its outcome: done,
//! refused, or unknown.

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Binding, Namespace, Node, ObjectReference, Pod};
use kube::api::{Api, DeleteParams, EvictParams, ListParams, Patch, PatchParams, PostParams, Preconditions};
use kube::core::Status;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use kube::{Client, ResourceExt};
use mullion_core::facts::PodRef;
use mullion_core::units::{AllocationUid, NodeName};
use mullion_crds::{GPUNode, VGPUAllocation, names};
use serde_json::json;
use tokio::sync::Semaphore;

use crate::error::Error;

/// How many writes of binds are under way at once; more wait here for their turn. The client speaks HTTP/1.1, where
/// every call under way is a connection of its own: without a bound, a burst of pods opens hundreds, each with a TLS
/// handshake and buffers on both sides (docs/benchmarks.md has the figures). 16 at 5 ms each are 3,000 writes a second.
const BINDS: usize = 16;

/// Deadline of one call.
pub const CALL_LIMIT: Duration = Duration::from_secs(4);

/// The API server, for this process.
#[derive(Clone)]
pub struct Cluster {
    client: Client,
    recorder: Recorder,
    binds: Arc<Semaphore>,
}

impl fmt::Debug for Cluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cluster").finish_non_exhaustive()
    }
}

impl Cluster {
    /// Calls through `client`; Events name `instance` as their reporter.
    ///
    /// The client must not retry by itself: what a call that failed did is looked up, not guessed.
    #[must_use]
    pub fn new(client: Client, instance: &str) -> Self {
        let reporter = Reporter {
            controller: names::CONTROLLER_MANAGER.to_owned(),
            instance: Some(instance.to_owned()),
        };
        Self {
            recorder: Recorder::new(client.clone(), reporter),
            client,
            binds: Arc::new(Semaphore::new(BINDS)),
        }
    }

    /// The client, for watches.
    #[must_use]
    pub fn client(&self) -> Client {
        self.client.clone()
    }

    fn allocations(&self, namespace: &str) -> Api<VGPUAllocation> {
        Api::namespaced(self.client.clone(), namespace)
    }

    fn pods(&self, namespace: &str) -> Api<Pod> {
        Api::namespaced(self.client.clone(), namespace)
    }

    /// Runs one call under the deadline.
    ///
    /// # Errors
    /// [`Error::ApiRefused`] where it surely did not happen, else [`Error::ApiUnknown`] or
    /// [`Error::ApiTimeout`].
    pub async fn call<T>(
        &self,
        verb: &'static str,
        object: impl FnOnce() -> String,
        work: impl Future<Output = Result<T, kube::Error>>,
    ) -> Result<T, Error> {
        match tokio::time::timeout(CALL_LIMIT, work).await {
            Ok(Ok(value)) => Ok(value),
            Ok(Err(source)) => Err(failed(verb, object(), source)),
            Err(_) => Err(Error::ApiTimeout { verb, object: object(), limit: CALL_LIMIT }),
        }
    }

    /// Like [`Self::call`], for the two writes of a bind, in turn. The deadline runs once it is this call's turn.
    async fn call_in_turn<T>(
        &self,
        object: impl FnOnce() -> String,
        work: impl Future<Output = Result<T, kube::Error>>,
    ) -> Result<T, Error> {
        // The semaphore is never closed.
        let _turn = self.binds.acquire().await;
        self.call("POST", object, work).await
    }

    /// Reads a pod from the API server itself.
    ///
    /// # Errors
    /// See [`Self::call`].
    pub async fn pod(&self, namespace: &str, name: &str) -> Result<Option<Pod>, Error> {
        let api = self.pods(namespace);
        self.call("GET", || format!("pod {namespace}/{name}"), api.get_opt(name)).await
    }

    /// Reads a Node.
    ///
    /// # Errors
    /// See [`Self::call`].
    pub async fn node(&self, name: &str) -> Result<Option<Node>, Error> {
        let api: Api<Node> = Api::all(self.client.clone());
        self.call("GET", || format!("node {name}"), api.get_opt(name)).await
    }

    /// Whether the labels of a namespace take its pods out of the webhook; one that is gone has no pods.
    ///
    /// # Errors
    /// See [`Self::call`].
    pub async fn opted_out(&self, namespace: &str) -> Result<bool, Error> {
        let api: Api<Namespace> = Api::all(self.client.clone());
        let found = self.call("GET", || format!("namespace {namespace}"), api.get_opt(namespace)).await?;
        let opts_out = |(key, value): (&String, &String)| {
            names::OPT_OUT_LABELS.contains(&key.as_str()) && value == names::OPT_OUT
        };
        Ok(found.is_none_or(|namespace| namespace.labels().iter().any(opts_out)))
    }

    /// Reads a `GPUNode`.
    ///
    /// # Errors
    /// See [`Self::call`].
    pub async fn gpu_node(&self, name: &str) -> Result<Option<GPUNode>, Error> {
        let api: Api<GPUNode> = Api::all(self.client.clone());
        self.call("GET", || format!("gpunode {name}"), api.get_opt(name)).await
    }

    /// Reads an allocation.
    ///
    /// # Errors
    /// See [`Self::call`].
    pub async fn allocation(&self, namespace: &str, name: &str) -> Result<Option<VGPUAllocation>, Error> {
        let api = self.allocations(namespace);
        self.call("GET", || format!("allocation {namespace}/{name}"), api.get_opt(name)).await
    }

    /// Lists the allocations on a node.
    ///
    /// # Errors
    /// See [`Self::call`].
    pub async fn allocations_on(&self, node: &str) -> Result<Vec<VGPUAllocation>, Error> {
        let api: Api<VGPUAllocation> = Api::all(self.client.clone());
        let params = ListParams::default().fields(&format!("spec.nodeName={node}"));
        let list = self.call("LIST", || format!("allocations on node {node}"), api.list(&params)).await?;
        Ok(list.items)
    }

    /// Creates an allocation.
    ///
    /// # Errors
    /// See [`Self::call`].
    pub async fn create_allocation(&self, object: &VGPUAllocation) -> Result<VGPUAllocation, Error> {
        let api = self.allocations(&object.namespace().unwrap_or_default());
        let params =
            PostParams { field_manager: Some(names::CONTROLLER_MANAGER.to_owned()), ..PostParams::default() };
        self.call_in_turn(|| format!("allocation {}", full_name(object)), api.create(&params, object)).await
    }

    /// Binds a pod, this one and no later one of its name.
    ///
    /// # Errors
    /// See [`Self::call`].
    pub async fn bind(&self, pod: &PodRef, node: &NodeName) -> Result<(), Error> {
        let api = self.pods(&pod.namespace);
        let mut binding = Binding {
            target: ObjectReference {
                api_version: Some("v1".to_owned()),
                kind: Some("Node".to_owned()),
                name: Some(node.0.clone()),
                ..ObjectReference::default()
            },
            ..Binding::default()
        };
        binding.metadata.name = Some(pod.name.clone());
        binding.metadata.namespace = Some(pod.namespace.clone());
        binding.metadata.uid = Some(pod.uid.0.clone());
        let params = PostParams::default();
        let work = api.create_subresource::<Binding, Status>("binding", &pod.name, &params, &binding);
        let object = || format!("binding of pod {}/{} to node {node}", pod.namespace, pod.name);
        self.call_in_turn(object, work).await.map(|_| ())
    }

    /// Takes our finalizer off an allocation as it was last read; `None` when the object is gone.
    ///
    /// # Errors
    /// See [`Self::call`]; a conflict means that it has changed since.
    pub async fn strip_finalizer(&self, seen: &VGPUAllocation) -> Result<Option<VGPUAllocation>, Error> {
        let namespace = seen.namespace().unwrap_or_default();
        let kept: Vec<&String> = seen.finalizers().iter().filter(|f| *f != names::FINALIZER).collect();
        let patch = json!({"metadata": {
            "uid": seen.uid(),
            "resourceVersion": seen.resource_version(),
            "finalizers": kept,
        }});
        let api = self.allocations(&namespace);
        let params = PatchParams {
            field_manager: Some(names::CONTROLLER_MANAGER.to_owned()),
            ..PatchParams::default()
        };
        let name = seen.name_any();
        let object = || format!("finalizers of allocation {namespace}/{name}");
        let patch = Patch::Merge(&patch);
        let found = self.call("PATCH", object, api.patch(&name, &params, &patch)).await;
        absent_is_none(found)
    }

    /// Gives an allocation as it was last read a new version, so that nobody undoes it by what was read before; `None`
    /// when the object is gone.
    ///
    /// # Errors
    /// See [`Self::call`]; a conflict means that it has changed since.
    pub async fn take_up(&self, seen: &VGPUAllocation) -> Result<Option<VGPUAllocation>, Error> {
        let namespace = seen.namespace().unwrap_or_default();
        let version = seen.resource_version();
        let patch = json!({"metadata": {
            "uid": seen.uid(),
            "resourceVersion": version,
            // Another value each time: a patch that changes nothing makes no version.
            "annotations": {names::TAKEN_UP_ANNOTATION: version.clone().unwrap_or_default()},
        }});
        let api = self.allocations(&namespace);
        let params = PatchParams {
            field_manager: Some(names::CONTROLLER_MANAGER.to_owned()),
            ..PatchParams::default()
        };
        let name = seen.name_any();
        let object = || format!("allocation {namespace}/{name}");
        let patch = Patch::Merge(&patch);
        absent_is_none(self.call("PATCH", object, api.patch(&name, &params, &patch)).await)
    }

    /// Deletes an allocation, this one in this version and no other.
    ///
    /// # Errors
    /// See [`Self::call`]; a conflict means that it has changed since.
    pub async fn delete_allocation(&self, seen: &VGPUAllocation) -> Result<(), Error> {
        let namespace = seen.namespace().unwrap_or_default();
        let params = DeleteParams {
            preconditions: Some(Preconditions { uid: seen.uid(), resource_version: seen.resource_version() }),
            ..DeleteParams::default()
        };
        let api = self.allocations(&namespace);
        let name = seen.name_any();
        let object = || format!("allocation {namespace}/{name}");
        absent_is_none(self.call("DELETE", object, api.delete(&name, &params)).await).map(|_| ())
    }

    /// Replaces the status of an allocation as it was last read; `None` when the object is gone.
    ///
    /// # Errors
    /// See [`Self::call`]; a conflict means that it has changed since.
    pub async fn patch_allocation_status(
        &self,
        seen: &VGPUAllocation,
        status: &serde_json::Value,
    ) -> Result<Option<VGPUAllocation>, Error> {
        let namespace = seen.namespace().unwrap_or_default();
        let patch = json!({
            "metadata": {"uid": seen.uid(), "resourceVersion": seen.resource_version()},
            "status": status,
        });
        let api = self.allocations(&namespace);
        let params = PatchParams {
            field_manager: Some(names::CONTROLLER_MANAGER.to_owned()),
            ..PatchParams::default()
        };
        let name = seen.name_any();
        let object = || format!("status of allocation {namespace}/{name}");
        let patch = Patch::Merge(&patch);
        absent_is_none(self.call("PATCH", object, api.patch_status(&name, &params, &patch)).await)
    }

    /// Asks for a pod to be evicted, this one and no later one of its name. True when the pod is (being) removed,
    /// false when a disruption budget forbids it for now.
    ///
    /// # Errors
    /// See [`Self::call`].
    pub async fn evict(&self, pod: &PodRef) -> Result<bool, Error> {
        let api = self.pods(&pod.namespace);
        let preconditions = Preconditions { uid: Some(pod.uid.0.clone()), resource_version: None };
        let params = EvictParams {
            delete_options: Some(DeleteParams {
                preconditions: Some(preconditions),
                ..DeleteParams::default()
            }),
            post_options: PostParams::default(),
        };
        let object = || format!("eviction of pod {}/{}", pod.namespace, pod.name);
        match self.call("POST", object, api.evict(&pod.name, &params)).await {
            Ok(_) => Ok(true),
            Err(error) => match error.status() {
                Some(status) if status.code == 429 => Ok(false),
                // Gone, or another pod of that name: there is nothing left to evict.
                Some(status) if status.is_not_found() || status.is_conflict() => Ok(true),
                _ => Err(error),
            },
        }
    }

    /// Sets one annotation of a pod, this one and no later one of its name; false when it is gone.
    ///
    /// # Errors
    /// See [`Self::call`].
    pub async fn annotate_pod(&self, pod: &PodRef, key: &str, value: &str) -> Result<bool, Error> {
        let patch = json!({"metadata": {"uid": pod.uid.0, "annotations": {key: value}}});
        let api = self.pods(&pod.namespace);
        let params = PatchParams {
            field_manager: Some(names::CONTROLLER_MANAGER.to_owned()),
            ..PatchParams::default()
        };
        let object = || format!("annotation {key} of pod {}/{}", pod.namespace, pod.name);
        let patch = Patch::Merge(&patch);
        match self.call("PATCH", object, api.patch(&pod.name, &params, &patch)).await {
            Ok(_) => Ok(true),
            Err(error) => match error.status() {
                Some(status) if status.is_not_found() || status.is_conflict() => Ok(false),
                _ => Err(error),
            },
        }
    }

    /// Writes an Event about a pod. What cannot be written is logged: an Event is news, not state.
    pub async fn tell(&self, pod: &PodRef, type_: EventType, reason: &str, action: &str, note: String) {
        let event = Event {
            type_,
            reason: reason.to_owned(),
            note: Some(note),
            action: action.to_owned(),
            secondary: None,
        };
        let object = mullion_crds::pod::object_reference(pod);
        let written = tokio::time::timeout(CALL_LIMIT, self.recorder.publish(&event, &object)).await;
        match written {
            Ok(Ok(())) => {}
            Ok(Err(error)) => {
                tracing::warn!(reason, pod = %pod.name, error = %mullion_telemetry::source_chain(&error), "event not written");
            }
            Err(_) => tracing::warn!(reason, pod = %pod.name, "event not written in time"),
        }
    }
}

/// `namespace/name` of an allocation.
#[must_use]
pub fn full_name(object: &VGPUAllocation) -> String {
    format!("{}/{}", object.namespace().unwrap_or_default(), object.name_any())
}

/// Uid of an allocation.
#[must_use]
pub fn uid(object: &VGPUAllocation) -> AllocationUid {
    object.uid().unwrap_or_default().into()
}

/// A call that ended in an error: refused for certain, or of unknown outcome.
///
/// A 4xx answer comes from a server that has decided not to act, except 408 (it gave up waiting). A 5xx may have
/// been sent after the write went through, and an error of the connection says nothing at all.
#[must_use]
pub fn failed(verb: &'static str, object: String, source: kube::Error) -> Error {
    let refused = match &source {
        kube::Error::Api(status) => (400..500).contains(&status.code) && status.code != 408,
        kube::Error::BuildRequest(_) => true,
        _ => false,
    };
    let source = Box::new(source);
    if refused {
        Error::ApiRefused { verb, object, source }
    } else {
        Error::ApiUnknown { verb, object, source }
    }
}

fn absent_is_none<T>(result: Result<T, Error>) -> Result<Option<T>, Error> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error) if error.status().is_some_and(Status::is_not_found) => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use axum::body::Body;
    use http::{Request, Response, StatusCode};
    use tower::service_fn;

    use super::*;

    /// A burst of pods does not become a burst of connections; whoever waits for its turn is not late for that.
    #[tokio::test(start_paused = true)]
    async fn binds_write_in_turn_and_other_calls_do_not_wait() {
        let (now, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let (counted, highest) = (Arc::clone(&now), Arc::clone(&most));
        let service = service_fn(move |request: Request<kube::client::Body>| {
            let (now, most) = (Arc::clone(&counted), Arc::clone(&highest));
            async move {
                let writes = request.method() == http::Method::POST;
                if writes {
                    most.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                    tokio::time::sleep(CALL_LIMIT * 3 / 4).await;
                    now.fetch_sub(1, Ordering::SeqCst);
                }
                let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 404,
                    "reason": "NotFound", "message": ""});
                let mut answer = Response::new(Body::from(status.to_string()));
                *answer.status_mut() = StatusCode::NOT_FOUND;
                Ok::<_, Infallible>(answer)
            }
        });
        let cluster = Cluster::new(Client::new(service, "default"), "test");
        let pod = PodRef { namespace: "ns".to_owned(), name: "p".to_owned(), uid: "u".into() };
        let node = NodeName::from("n");
        let binds = futures::future::join_all((0..100).map(|_| cluster.bind(&pod, &node)));
        let begun = tokio::time::Instant::now();
        let read = async {
            tokio::task::yield_now().await;
            cluster.pod("ns", "p").await.map(|found| (found.is_none(), begun.elapsed()))
        };
        let (bound, read) = tokio::join!(binds, read);
        assert_eq!(most.load(Ordering::SeqCst), BINDS);
        assert!(bound.iter().all(|result| result.as_ref().is_err_and(|error| error.code() == "ApiRefused")));
        let (absent, waited) = read.unwrap();
        assert!(absent && waited < CALL_LIMIT / 4, "{waited:?}");
    }
}
