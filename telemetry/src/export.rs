//! The OTLP side: an exporter with a thread of its own, and the guard that flushes it.

use std::fmt;
use std::time::Duration;

use opentelemetry::KeyValue;
use opentelemetry::trace::TracerProvider as _;
use opentelemetry_otlp::{SpanExporter, WithExportConfig as _};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{SdkTracer, SdkTracerProvider};
use tokio::runtime::{Builder, Runtime};
use tracing::{Subscriber, warn};
use tracing_subscriber::Layer;
use tracing_subscriber::filter::filter_fn;
use tracing_subscriber::registry::LookupSpan;

use crate::{Error, exported, source_chain};

/// How long the end of a process may wait for its last spans.
const FLUSH: Duration = Duration::from_secs(5);

/// A running exporter.
pub(crate) struct Export {
    endpoint: String,
    provider: SdkTracerProvider,
    service: &'static str,
    // The channel's tasks live here and not in the program's runtime, so that spans still leave while that one
    // shuts down, and so that `init` works before it exists.
    runtime: Runtime,
}

impl Export {
    pub(crate) fn start(service: &'static str, version: &'static str, endpoint: &str) -> Result<Self, Error> {
        check(endpoint)?;
        let runtime = Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("otlp")
            .enable_all()
            .build()
            .map_err(|source| Error::Runtime { source })?;
        let exporter = {
            let _inside = runtime.enter();
            SpanExporter::builder()
                .with_tonic()
                .with_endpoint(endpoint)
                .build()
                .map_err(|source| Error::Exporter { endpoint: endpoint.to_owned(), source })?
        };
        let resource = Resource::builder()
            .with_service_name(service)
            .with_attribute(KeyValue::new("service.version", version))
            .build();
        let provider =
            SdkTracerProvider::builder().with_resource(resource).with_batch_exporter(exporter).build();
        Ok(Self { endpoint: endpoint.to_owned(), provider, service, runtime })
    }

    /// The layers that turn our spans into OpenTelemetry's.
    pub(crate) fn layers<S>(&self) -> impl Layer<S> + Send + Sync + use<S>
    where
        S: Subscriber + for<'lookup> LookupSpan<'lookup> + Send + Sync,
    {
        let tracer = self.provider.tracer(self.service);
        let spans = tracing_opentelemetry::layer()
            .with_tracer(tracer.clone())
            .with_location(false)
            .with_threads(false)
            // Else a span would start, and keep its parent, when it is entered: too early for a function that learns
            // inside of its own span which pod it works for.
            .with_context_activation(false)
            .with_filter(filter_fn(exported));
        spans.and_then(Tracer(tracer))
    }

    fn stop(self) -> Result<(), Error> {
        // Shutting down alone reports only that time ran out, not that the spans were refused.
        let flushed = self.provider.force_flush();
        let stopped = self.provider.shutdown_with_timeout(FLUSH);
        // A plain drop would block, which an async caller may not.
        self.runtime.shutdown_background();
        flushed.and(stopped).map_err(|source| Error::Flush { endpoint: self.endpoint, source })
    }
}

/// An endpoint without scheme would mean https to the exporter, and fail later and in silence.
fn check(endpoint: &str) -> Result<(), Error> {
    let endpoint = endpoint.to_owned();
    if endpoint.starts_with("https://") {
        return Err(Error::EndpointTls { endpoint });
    }
    if endpoint.strip_prefix("http://").is_none_or(str::is_empty) {
        return Err(Error::EndpointScheme { endpoint });
    }
    Ok(())
}

/// A layer that does nothing but let [`crate::trace`] find the tracer of the subscriber in force, for spans
/// whose times are given.
#[derive(Debug)]
pub(crate) struct Tracer(pub(crate) SdkTracer);

impl<S: Subscriber> Layer<S> for Tracer {}

/// Keeps telemetry running; end it with [`Guard::shutdown`].
#[must_use = "spans are lost unless the guard is kept and shut down"]
pub struct Guard(Option<Export>);

impl Guard {
    pub(crate) fn new(export: Option<Export>) -> Self {
        Self(export)
    }

    /// Sends the last spans and stops the exporter; waits for at most ten seconds. Does nothing when export
    /// is off.
    ///
    /// # Errors
    /// [`Error::Flush`] when they could not be delivered.
    pub fn shutdown(mut self) -> Result<(), Error> {
        self.0.take().map_or(Ok(()), Export::stop)
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if let Some(Err(error)) = self.0.take().map(Export::stop) {
            warn!(code = error.code(), error = source_chain(&error), "spans lost");
        }
    }
}

impl fmt::Debug for Guard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let endpoint = self.0.as_ref().map(|export| export.endpoint.as_str());
        f.debug_struct("Guard").field("endpoint", &endpoint).finish()
    }
}
