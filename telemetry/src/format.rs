//! The log layer: text or JSON, with the trace id of the innermost span that has one.

use std::fmt;

use tracing::{Event, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::fmt::format::{Format, JsonFields, Writer};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields, MakeWriter};
use tracing_subscriber::registry::LookupSpan;

use crate::LogFormat;
use crate::trace::InTrace;

/// The layer that writes log lines to `writer`.
pub(crate) fn layer<S, W>(format: LogFormat, writer: W) -> Box<dyn Layer<S> + Send + Sync>
where
    S: Subscriber + for<'lookup> LookupSpan<'lookup>,
    W: for<'w> MakeWriter<'w> + Send + Sync + 'static,
{
    let layer = tracing_subscriber::fmt::layer().with_writer(writer);
    match format {
        LogFormat::Text => layer
            .with_ansi(false)
            .event_format(WithTrace { inner: Format::default(), splice: splice_text })
            .boxed(),
        LogFormat::Json => {
            let inner = Format::default().json().flatten_event(false).with_current_span(false);
            layer
                .with_ansi(false)
                .fmt_fields(JsonFields::new())
                .event_format(WithTrace { inner, splice: splice_json })
                .boxed()
        }
    }
}

/// Another format's line with the trace id put in.
struct WithTrace<F> {
    inner: F,
    splice: fn(&str, &str) -> String,
}

impl<S, N, F> FormatEvent<S, N> for WithTrace<F>
where
    S: Subscriber + for<'lookup> LookupSpan<'lookup>,
    N: for<'w> FormatFields<'w> + 'static,
    F: FormatEvent<S, N>,
{
    fn format_event(
        &self,
        ctx: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let trace = ctx.event_scope().into_iter().flatten().find_map(|span| {
            let extensions = span.extensions();
            extensions.get::<InTrace>().map(|at| at.0)
        });
        let Some(trace) = trace else { return self.inner.format_event(ctx, writer, event) };
        let mut line = String::new();
        self.inner.format_event(ctx, Writer::new(&mut line), event)?;
        writer.write_str(&(self.splice)(&line, &trace.to_string()))
    }
}

/// At the end, where an eye that does not need it stops reading.
fn splice_text(line: &str, trace: &str) -> String {
    format!("{} trace_id={trace}\n", line.trim_end())
}

/// As the first member of the object; the name is OpenTelemetry's for JSON logs.
fn splice_json(line: &str, trace: &str) -> String {
    line.replacen('{', &format!("{{\"trace_id\":\"{trace}\","), 1)
}
