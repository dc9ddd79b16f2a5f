//! One trace per pod, without a header.
//!
//! Webhook, filter, bind, prepare and release of one pod run in different processes which share nothing but
//! the pod. So its UID *is* the trace id, and every span of it that has no parent of its own hangs under the
//! same virtual root span, whose id is derived from the UID as well and which nobody ever sends.
//!
//! The webhook is the exception: the API server gives a pod its UID only after admission (the registry's store
//! fills the system fields, behind the mutating webhooks). Its span therefore lives in a trace of its
//! own, derived from the AdmissionReview's UID, and the webhook leaves an [`AdmissionStamp`] on the pod in the
//! annotation [`ADMISSION_ANNOTATION`]. Whoever binds the pod reads it and calls [`record_admission`], which
//! repeats the webhook's span inside the pod's trace. The stamp is a correlation id and no state: nothing is
//! decided by it, and a missing or forged one costs a span in a trace and nothing else.

use std::fmt;
use std::str::FromStr;
use std::time::{Duration, SystemTime};

use opentelemetry::trace::{
    Link, Span as _, SpanContext, SpanKind, TraceContextExt as _, TraceFlags, TraceState, Tracer as _,
};
pub use opentelemetry::trace::{SpanId, TraceId};
use opentelemetry::{Context, KeyValue};
use sha2::{Digest as _, Sha256};
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt as _;
use tracing_subscriber::Registry;
use tracing_subscriber::registry::LookupSpan as _;
use uuid::Uuid;

use crate::export::Tracer;

/// Where the webhook leaves its [`AdmissionStamp`] on the pod. It overwrites what stands there: a user cannot
/// know a stamp, and on reinvocation the last call counts. It is not under `mullion.io/`, because state is: annotations there are
/// refused on every pod that a user creates, and what the webhook adds counts as the user's.
pub const ADMISSION_ANNOTATION: &str = "trace.mullion.io/admission";

/// The trace a span was put into, kept with the span for the log formats.
pub(crate) struct InTrace(pub(crate) TraceId);

/// The trace of a pod: the sixteen bytes of its UID, or the first sixteen of the UID's SHA-256 where it is no
/// UUID (a static pod's is a hash of its manifest) or the nil one.
#[must_use]
pub fn trace_id(pod_uid: &str) -> TraceId {
    match Uuid::parse_str(pod_uid) {
        Ok(uuid) if !uuid.is_nil() => TraceId::from_bytes(uuid.into_bytes()),
        _ => TraceId::from_bytes(hash(&[pod_uid])),
    }
}

/// The virtual root span of a pod's trace: the first eight bytes of SHA-256(`mullion root` ‖ UID).
#[must_use]
pub fn root_span_id(pod_uid: &str) -> SpanId {
    SpanId::from_bytes(hash(&["mullion root", pod_uid]))
}

/// The trace of one admission request: the first sixteen bytes of SHA-256(`mullion admission` ‖ its UID). It
/// is a hash so that it never meets a pod's trace.
#[must_use]
pub fn admission_trace(request_uid: &str) -> TraceId {
    TraceId::from_bytes(hash(&["mullion admission", request_uid]))
}

/// Puts `span` into the trace of a pod. Call it before the first span inside of it is made: that one takes its
/// trace from `span` for good. (`Span::current()` at the beginning of an instrumented function is fine.)
pub fn in_pod_trace(span: &Span, pod_uid: &str) {
    put(span, trace_id(pod_uid), root_span_id(pod_uid));
}

/// Puts `span` into the trace of an admission request; see [`in_pod_trace`].
pub fn in_admission_trace(span: &Span, request_uid: &str) {
    put(span, admission_trace(request_uid), root_span_id(request_uid));
}

/// An `info` span in the trace of a pod, with the field `pod_uid` and any others that follow:
/// `pod_span!("bind", uid, %node)`.
#[macro_export]
macro_rules! pod_span {
    ($name:expr, $pod_uid:expr $(, $($field:tt)*)?) => {{
        let pod_uid: &str = $pod_uid;
        let span = $crate::tracing::info_span!($name, pod_uid = pod_uid $(, $($field)*)?);
        $crate::in_pod_trace(&span, pod_uid);
        span
    }};
}

fn put(span: &Span, trace: TraceId, root: SpanId) {
    span.with_subscriber(|(id, dispatch)| {
        if let Some(span) = dispatch.downcast_ref::<Registry>().and_then(|registry| registry.span(id)) {
            span.extensions_mut().replace(InTrace(trace));
        }
    });
    // Fails when export is off, which is fine, or when it has children already, which the caller was told.
    let _ = span.set_parent(Context::new().with_remote_span_context(remote(trace, root)));
}

fn remote(trace: TraceId, span: SpanId) -> SpanContext {
    SpanContext::new(trace, span, TraceFlags::SAMPLED, true, TraceState::NONE)
}

/// The first `N` bytes of the SHA-256 over the parts. `N` is at most 32.
fn hash<const N: usize>(parts: &[&str]) -> [u8; N] {
    let mut sha = Sha256::new();
    for part in parts {
        sha.update(part.as_bytes());
    }
    let mut bytes = [0; N];
    for (to, from) in bytes.iter_mut().zip(sha.finalize()) {
        *to = from;
    }
    bytes
}

/// When a pod was admitted, and in which trace: `<trace id>-<start>-<end>`, all in lower-case hex, the times
/// in nanoseconds since 1970.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdmissionStamp {
    trace: TraceId,
    start: u64,
    end: u64,
}

impl AdmissionStamp {
    /// The stamp for an AdmissionReview's `request.uid` that was worked on from `start` to `end`.
    #[must_use]
    pub fn new(request_uid: &str, start: SystemTime, end: SystemTime) -> Self {
        Self { trace: admission_trace(request_uid), start: nanos(start), end: nanos(end) }
    }
}

impl fmt::Display for AdmissionStamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{:x}-{:x}", self.trace, self.start, self.end)
    }
}

/// A text that is no [`AdmissionStamp`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "not an admission stamp: it is written by the webhook as <trace id>-<start>-<end> in hex; leave it out"
)]
pub struct NotAStamp;

impl FromStr for AdmissionStamp {
    type Err = NotAStamp;

    fn from_str(text: &str) -> Result<Self, NotAStamp> {
        let hex = |part: &str| u64::from_str_radix(part, 16).map_err(|_| NotAStamp);
        let mut parts = text.split('-');
        let (Some(trace), Some(start), Some(end), None) =
            (parts.next(), parts.next(), parts.next(), parts.next())
        else {
            return Err(NotAStamp);
        };
        let trace = TraceId::from_hex(trace).ok().filter(|id| *id != TraceId::INVALID).ok_or(NotAStamp)?;
        let stamp = Self { trace, start: hex(start)?, end: hex(end)? };
        // One spelling per stamp, so that reading and writing agree.
        (stamp.start <= stamp.end && stamp.to_string() == text).then_some(stamp).ok_or(NotAStamp)
    }
}

/// Repeats the webhook's span, with its own times and a link to its own trace, inside the trace of the pod.
/// Does nothing when export is off. Call it once per pod: in bind, which succeeds once.
pub fn record_admission(pod_uid: &str, stamp: &AdmissionStamp) {
    tracing::dispatcher::get_default(|dispatch| {
        let Some(Tracer(tracer)) = dispatch.downcast_ref::<Tracer>() else { return };
        let parent =
            Context::new().with_remote_span_context(remote(trace_id(pod_uid), root_span_id(pod_uid)));
        let mut span = tracer
            .span_builder("webhook")
            .with_kind(SpanKind::Server)
            .with_start_time(time(stamp.start))
            .with_attributes([KeyValue::new("pod_uid", pod_uid.to_owned())])
            .with_links(vec![Link::with_context(remote(
                stamp.trace,
                SpanId::from_bytes(hash(&[&stamp.to_string()])),
            ))])
            .start_with_context(tracer, &parent);
        span.end_with_timestamp(time(stamp.end));
    });
}

fn nanos(at: SystemTime) -> u64 {
    // Before 1970 or after 2554 the clock is broken; the trace then shows 1970.
    at.duration_since(SystemTime::UNIX_EPOCH).ok().and_then(|d| u64::try_from(d.as_nanos()).ok()).unwrap_or(0)
}

fn time(nanos: u64) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_nanos(nanos)
}
