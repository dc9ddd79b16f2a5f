//! What can go wrong when telemetry starts or ends, and how any error's whole chain is written to a log.

use std::fmt::Write as _;

use opentelemetry_otlp::ExporterBuildError;
use opentelemetry_sdk::error::OTelSdkError;
use tracing::dispatcher::SetGlobalDefaultError;
use tracing_subscriber::filter::ParseError;

/// Everything this crate refuses.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// `--log-level` is no filter.
    #[error(
        "--log-level {value:?} is not a log filter: give a level (error, warn, info, debug, trace) or pairs such as \
         `warn,mullion_controller=debug`"
    )]
    LogFilter {
        /// What was given.
        value: String,
        /// Why it could not be read.
        source: ParseError,
    },
    /// `--otlp-endpoint` has no usable scheme.
    #[error(
        "--otlp-endpoint {endpoint:?} does not start with http://: write it with the scheme, e.g. http://127.0.0.1:4317"
    )]
    EndpointScheme {
        /// What was given.
        endpoint: String,
    },
    /// `--otlp-endpoint` asks for TLS.
    #[error(
        "--otlp-endpoint {endpoint:?} asks for TLS, which the exporter is built without: send to a collector on the \
         node or in the pod over http:// and let that one speak TLS"
    )]
    EndpointTls {
        /// What was given.
        endpoint: String,
    },
    /// The exporter refused its settings.
    #[error(
        "the OTLP exporter for {endpoint:?} cannot start: check --otlp-endpoint and the OTEL_EXPORTER_OTLP_* variables"
    )]
    Exporter {
        /// Where to.
        endpoint: String,
        /// The exporter's word.
        source: ExporterBuildError,
    },
    /// No thread for the exporter.
    #[error(
        "the OTLP exporter's thread cannot start: raise the limit of processes, or leave --otlp-endpoint out"
    )]
    Runtime {
        /// The system's word.
        source: std::io::Error,
    },
    /// `init` was called twice, or after someone else's.
    #[error(
        "a tracing subscriber is installed already: call mullion_telemetry::init once, before anything else"
    )]
    Installed {
        /// tracing's word.
        source: SetGlobalDefaultError,
    },
    /// The last spans were not delivered.
    #[error("the last spans did not reach {endpoint:?}: see whether the collector is up")]
    Flush {
        /// Where to.
        endpoint: String,
        /// The exporter's word.
        source: OTelSdkError,
    },
}

impl Error {
    /// The stable name of the error for logs, metrics and Events.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::LogFilter { .. } => "LogFilterInvalid",
            Self::EndpointScheme { .. } => "OtlpEndpointScheme",
            Self::EndpointTls { .. } => "OtlpEndpointTls",
            Self::Exporter { .. } => "OtlpExporterFailed",
            Self::Runtime { .. } => "OtlpRuntimeFailed",
            Self::Installed { .. } => "TelemetryInstalled",
            Self::Flush { .. } => "OtlpFlushFailed",
        }
    }
}

/// The error and all its causes, outermost first, joined by `: `.
///
/// Our errors keep the cause out of their own text; other people's often repeat it, at any distance: a cause whose
/// text is there already is not written again, and one that begins with the text before it goes on from there.
#[must_use]
pub fn source_chain(error: &(dyn std::error::Error + 'static)) -> String {
    let mut chain = error.to_string();
    let mut before = chain.clone();
    let mut next = error.source();
    while let Some(cause) = next {
        let text = cause.to_string();
        if !chain.contains(&text) {
            match text.strip_prefix(&before).filter(|_| chain.ends_with(&before)) {
                Some(rest) => chain.push_str(rest),
                // Writing to a String cannot fail.
                None => _ = write!(chain, ": {text}"),
            }
        }
        before = text;
        next = cause.source();
    }
    chain
}
