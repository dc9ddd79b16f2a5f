//! Logs and traces of every Mullion program: one set of flags, one way to start, one trace per pod.
//!
//! A GPU request passes through several processes (webhook and extender, then the agent of the chosen node)
//! that have no call between them to carry a trace header. So nothing is carried: the trace id *is* the pod's
//! UID, which each of them knows, see [`trace`]. With export off (the default) no OpenTelemetry layer is
//! installed; the trace id still stands in every log line written inside such a span.

mod error;
mod export;
mod format;
pub mod trace;

use std::io;

use clap::ValueEnum;
use tracing::level_filters::LevelFilter;
use tracing::{Dispatch, Metadata};
use tracing_subscriber::filter::{FilterExt, FilterFn, filter_fn};
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::{EnvFilter, Layer};

pub use error::{Error, source_chain};
pub use export::Guard;
pub use trace::{admission_trace, in_admission_trace, in_pod_trace, root_span_id, trace_id};
#[doc(hidden)]
pub use tracing;

/// Appended below what the user gives: the exporter's own chatter counts only when something is wrong.
const QUIET: &str = "opentelemetry=warn";

/// Spans and events of targets with this prefix (our crates) are exported, and always kept for log context.
const OURS: &str = "mullion";

/// How log lines look.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// One line for people.
    #[default]
    Text,
    /// One JSON object per line.
    Json,
}

/// The flags every program shares; `#[command(flatten)]` them.
#[derive(Clone, Debug, clap::Args)]
// Without a group of its own: its name, `Args`, would meet that of the program's own flags.
#[group(skip)]
pub struct Args {
    /// Form of the log lines on stderr.
    #[arg(long, env = "MULLION_LOG_FORMAT", value_enum, default_value_t = LogFormat::Text, global = true)]
    pub log_format: LogFormat,

    /// What is logged, in the syntax of tracing's `EnvFilter`: `info`, `warn,mullion_controller=debug`.
    #[arg(long, env = "MULLION_LOG", default_value = "info", global = true)]
    pub log_level: String,

    /// OTLP/gRPC collector that gets the traces, e.g. `http://127.0.0.1:4317`; off when absent or empty.
    #[arg(long, env = "MULLION_OTLP_ENDPOINT", value_name = "URL", global = true)]
    pub otlp_endpoint: Option<String>,
}

impl Default for Args {
    fn default() -> Self {
        Self { log_format: LogFormat::Text, log_level: "info".to_owned(), otlp_endpoint: None }
    }
}

/// Installs logs, and traces when an endpoint is given, for the whole process.
///
/// `service` becomes `service.name` of the exported spans, `version` `service.version`. Call it once, first
/// thing in `main`, inside or outside of an async runtime; keep the [`Guard`] and end with [`Guard::shutdown`].
///
/// # Errors
/// A malformed filter or endpoint, or a subscriber that is installed already.
pub fn init(service: &'static str, version: &'static str, args: &Args) -> Result<Guard, Error> {
    let (dispatch, guard) = build(service, version, args)?;
    tracing::dispatcher::set_global_default(dispatch).map_err(|source| Error::Installed { source })?;
    Ok(guard)
}

/// Like [`init`], but hands the subscriber over instead of installing it: for tests and for programs with
/// more than one.
///
/// # Errors
/// A malformed filter or endpoint.
pub fn build(service: &'static str, version: &'static str, args: &Args) -> Result<(Dispatch, Guard), Error> {
    build_to(service, version, args, io::stderr)
}

fn build_to<W>(
    service: &'static str,
    version: &'static str,
    args: &Args,
    writer: W,
) -> Result<(Dispatch, Guard), Error>
where
    W: for<'w> MakeWriter<'w> + Send + Sync + 'static,
{
    let filter = EnvFilter::try_new(format!("{QUIET},{}", args.log_level))
        .map_err(|source| Error::LogFilter { value: args.log_level.clone(), source })?;
    let export = match args.otlp_endpoint.as_deref().filter(|endpoint| !endpoint.is_empty()) {
        Some(endpoint) => Some(export::Export::start(service, version, endpoint)?),
        None => None,
    };
    let layers = export.as_ref().map(export::Export::layers);
    // Our own spans pass whatever the level, so that a warning is logged with its pod and trace id even at `warn`.
    let logs = format::layer(args.log_format, writer).with_filter(filter.or(our_spans()));
    let subscriber = tracing_subscriber::registry().with(logs).with(layers);
    Ok((Dispatch::new(subscriber), Guard::new(export)))
}

fn our_spans() -> FilterFn<impl Fn(&Metadata<'_>) -> bool> {
    filter_fn(|meta| meta.is_span() && exported(meta)).with_max_level_hint(LevelFilter::INFO)
}

/// Ours at `info` or above. Anything wider would export the exporter's own HTTP/2 spans, without end.
fn exported(meta: &Metadata<'_>) -> bool {
    meta.target().starts_with(OURS) && *meta.level() <= LevelFilter::INFO
}

#[cfg(test)]
mod tests;
