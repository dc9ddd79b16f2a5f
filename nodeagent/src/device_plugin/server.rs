//! The gRPC side: what the kubelet calls.

use std::collections::BTreeSet;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Instant;

use futures::future::BoxFuture;
use futures::{Stream, StreamExt};
use jiff::Timestamp;
use mullion_audit::{Entry, Event as AuditEvent};
use mullion_crds::names::GRANT_KIND;
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::WatchStream;
use tonic::{Request, Response, Status};
use tracing::{Instrument, info, warn};

use crate::device_plugin::slots;
use crate::error::Error;
use crate::kubelet::HEALTHY;
use crate::kubelet::deviceplugin::device_plugin_server::DevicePlugin;
use crate::kubelet::deviceplugin::{
    AllocateRequest, AllocateResponse, CdiDevice, ContainerAllocateResponse, Device, DevicePluginOptions,
    Empty, ListAndWatchResponse, PreStartContainerRequest, PreStartContainerResponse,
    PreferredAllocationRequest, PreferredAllocationResponse,
};
use crate::metrics::Metrics;
use crate::prepare::Refusal;
use crate::world::Shared;

/// What `PreStartContainer` does with an id set.
pub type Prepare = Arc<dyn Fn(BTreeSet<String>) -> BoxFuture<'static, Result<(), Refusal>> + Send + Sync>;

/// What we can do, told to the kubelet at `Register` and again at `GetDevicePluginOptions`: one function, so that
/// both say the same.
#[must_use]
pub fn options() -> DevicePluginOptions {
    DevicePluginOptions { pre_start_required: true, get_preferred_allocation_available: false }
}

/// The service. Clones share everything.
#[derive(Clone)]
pub struct Service {
    slots: watch::Receiver<Arc<Vec<String>>>,
    streams: Arc<watch::Sender<usize>>,
    prepare: Prepare,
    shared: Arc<Shared>,
    metrics: Arc<Metrics>,
    facts: mpsc::UnboundedSender<Entry>,
}

impl std::fmt::Debug for Service {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Service").field("streams", &*self.streams.borrow()).finish_non_exhaustive()
    }
}

impl Service {
    /// A service that offers whatever `slots` holds and tells `facts` for the audit log.
    #[must_use]
    pub fn new(
        slots: watch::Receiver<Arc<Vec<String>>>,
        prepare: Prepare,
        shared: Arc<Shared>,
        metrics: Arc<Metrics>,
        facts: mpsc::UnboundedSender<Entry>,
    ) -> Self {
        Self { slots, streams: Arc::new(watch::Sender::new(0)), prepare, shared, metrics, facts }
    }

    /// The number of open `ListAndWatch` streams.
    #[must_use]
    pub fn streams(&self) -> watch::Receiver<usize> {
        self.streams.subscribe()
    }
}

/// Counts a stream for as long as it is open.
struct Open(Arc<watch::Sender<usize>>);

impl Open {
    fn new(streams: &Arc<watch::Sender<usize>>) -> Self {
        streams.send_modify(|n| *n += 1);
        Self(Arc::clone(streams))
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.send_modify(|n| *n = n.saturating_sub(1));
    }
}

fn list(slots: &[String]) -> ListAndWatchResponse {
    let device = |id: &String| Device { id: id.clone(), health: HEALTHY.to_owned(), topology: None };
    ListAndWatchResponse { devices: slots.iter().map(device).collect() }
}

#[tonic::async_trait]
impl DevicePlugin for Service {
    async fn get_device_plugin_options(
        &self,
        _: Request<Empty>,
    ) -> Result<Response<DevicePluginOptions>, Status> {
        Ok(Response::new(options()))
    }

    type ListAndWatchStream = Pin<Box<dyn Stream<Item = Result<ListAndWatchResponse, Status>> + Send>>;

    async fn list_and_watch(&self, _: Request<Empty>) -> Result<Response<Self::ListAndWatchStream>, Status> {
        let open = Open::new(&self.streams);
        let stream = WatchStream::new(self.slots.clone()).map(move |slots| {
            let _ = &open;
            Ok(list(&slots))
        });
        info!(slots = self.slots.borrow().len(), "kubelet watches our slots");
        Ok(Response::new(Box::pin(stream)))
    }

    async fn get_preferred_allocation(
        &self,
        _: Request<PreferredAllocationRequest>,
    ) -> Result<Response<PreferredAllocationResponse>, Status> {
        Err(Status::unimplemented("a slot belongs to no card, so none is preferred to another"))
    }

    async fn allocate(
        &self,
        request: Request<AllocateRequest>,
    ) -> Result<Response<AllocateResponse>, Status> {
        let mut container_responses = Vec::new();
        let containers = request.into_inner().container_requests;
        if let Some(id) = containers.iter().flat_map(|c| &c.devices_ids).find(|id| !slots::is_name(id)) {
            let text = format!("{id:?} is no slot of this plugin: slots are slot-0000 to slot-9999");
            return Err(Status::invalid_argument(text));
        }
        for container in containers {
            let mut bytes = [0; 8];
            getrandom::fill(&mut bytes)
                .map_err(|e| Status::internal(format!("no random bytes for a grant's name: {e}")))?;
            let grant = hex::encode(bytes);
            let cdi_devices = vec![CdiDevice { name: format!("{GRANT_KIND}={grant}") }];
            // Whoever releases looks after the name until somebody fills it.
            self.shared.change_if(|world| {
                world.issued.insert(grant.clone(), Timestamp::now().as_second());
                false
            });
            // Not waited for: an error here would fail the pod for good, and an answer gives nothing yet. Without a log
            // PreStartContainer refuses.
            let mut device_ids = container.devices_ids;
            device_ids.sort_unstable();
            let _ = self.facts.send(AuditEvent::GrantIssued { grant, device_ids }.into());
            container_responses.push(ContainerAllocateResponse { cdi_devices, ..Default::default() });
        }
        Ok(Response::new(AllocateResponse { container_responses }))
    }

    async fn pre_start_container(
        &self,
        request: Request<PreStartContainerRequest>,
    ) -> Result<Response<PreStartContainerResponse>, Status> {
        let started = Instant::now();
        let ids: BTreeSet<String> = request.into_inner().devices_ids.into_iter().collect();
        let (prepared, metrics) = ((self.prepare)(ids.clone()), Arc::clone(&self.metrics));
        // A call that the kubelet gives up ends here only: it is one of the slowest, and counts.
        let done = tokio::spawn(
            async move {
                let result = prepared.await;
                metrics.prepared(started.elapsed(), result.as_ref().err().map(Refusal::code));
                result
            }
            .in_current_span(),
        );
        let result =
            done.await.unwrap_or_else(|source| Err(Refusal::Failed { source: Error::Broken { source } }));
        match result {
            Ok(()) => Ok(Response::new(PreStartContainerResponse {})),
            Err(refusal) => {
                warn!(?ids, code = refusal.code(), reason = %mullion_telemetry::source_chain(&refusal),
                    "refused to prepare a container");
                let text = format!("{}: {}", refusal.code(), mullion_telemetry::source_chain(&refusal));
                Err(if refusal.retriable() {
                    Status::unavailable(text)
                } else {
                    Status::failed_precondition(text)
                })
            }
        }
    }
}
