//! A small OTLP/gRPC receiver that keeps the spans it gets, for tests of what our programs send.

use std::sync::Arc;

use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{
    TraceService, TraceServiceServer,
};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::trace::v1::Span;
use parking_lot::Mutex;
use tokio::net::TcpListener;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, Status};

/// Service name and span, as they came.
pub type Received = Arc<Mutex<Vec<(String, Span)>>>;

struct Collector(Received);

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
            let spans = resource.scope_spans.into_iter().flat_map(|scope| scope.spans);
            self.0.lock().extend(spans.map(|span| (service.clone(), span)));
        }
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

/// Takes spans from `listener` into `received` until it is dropped.
///
/// # Errors
/// When the server breaks down.
pub async fn receive(listener: TcpListener, received: Received) -> Result<(), tonic::transport::Error> {
    tonic::transport::Server::builder()
        .add_service(TraceServiceServer::new(Collector(received)))
        .serve_with_incoming(TcpListenerStream::new(listener))
        .await
}
