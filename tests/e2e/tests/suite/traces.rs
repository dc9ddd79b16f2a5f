//! One pod is one trace, across processes, with no header passed between them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use anyhow::{Context, Result, bail};
use kube::ResourceExt;
use mullion_e2e::Scope;
use mullion_e2e::pods::{Build, slice_pod};
use mullion_e2e::scope::{PATIENCE, eventually};
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{
    TraceService, TraceServiceServer,
};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, Status};

/// Names of spans with the service that sent them, by trace id.
type Traces = Arc<Mutex<BTreeMap<Vec<u8>, BTreeSet<(String, String)>>>>;

struct Collector(Traces);

#[tonic::async_trait]
impl TraceService for Collector {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        for resource in request.into_inner().resource_spans {
            let attributes = resource.resource.unwrap_or_default().attributes;
            let service =
                attributes.into_iter().find(|a| a.key == "service.name").and_then(|a| a.value?.value);
            let Some(Value::StringValue(service)) = service else {
                return Err(Status::invalid_argument("no service.name"));
            };
            let mut traces = self.0.lock().map_err(|_| Status::internal("poisoned"))?;
            for span in resource.scope_spans.into_iter().flat_map(|scope| scope.spans) {
                traces.entry(span.trace_id).or_default().insert((service.clone(), span.name));
            }
        }
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

/// The lab is started with `--otlp-endpoint http://10.97.0.1:4317`; the receiver lives as long as this test.
#[tokio::test]
async fn a_pod_is_one_trace_from_admission_to_release() -> Result<()> {
    let scope = Scope::new("traces").await?;
    let traces = Traces::default();
    let listener =
        tokio::net::TcpListener::bind("10.97.0.1:4317").await.context("the lab's bridge address")?;
    let server = tonic::transport::Server::builder()
        .add_service(TraceServiceServer::new(Collector(Arc::clone(&traces))))
        .serve_with_incoming(TcpListenerStream::new(listener));
    let server = tokio::spawn(server);
    scope.create(&slice_pod("traced", "500", "2").on("node-b")).await?;
    let made = scope.running("traced").await?;
    let uid = made.uid().context("no uid")?;
    scope.delete("traced").await?;
    let id = mullion_telemetry::trace_id(&uid).to_bytes().to_vec();
    let want = [
        ("mullion-controller", "webhook"),
        ("mullion-controller", "filter"),
        ("mullion-controller", "bind"),
        ("mullion-nodeagent", "prepare"),
        ("mullion-nodeagent", "release"),
    ];
    let seen = eventually("all spans of the pod in one trace", PATIENCE, || async {
        let traces = traces.lock().map_err(|_| anyhow::anyhow!("poisoned"))?;
        let spans = traces.get(&id).cloned().unwrap_or_default();
        let missing: Vec<_> =
            want.iter().filter(|(s, n)| !spans.contains(&((*s).to_owned(), (*n).to_owned()))).collect();
        if missing.is_empty() { Ok(Some(())) } else { bail!("missing {missing:?} among {spans:?}") }
    })
    .await;
    server.abort();
    seen?;
    scope.remove().await
}
