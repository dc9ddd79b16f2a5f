//! The mutating admission webhook: pods that ask for GPUs are read once, filled in or refused.
//!
//! It is stateless, so every replica serves it. `matchConditions` keep all other pods away from it.

mod bodies;
mod caller;
pub mod certificate;
mod pace;
pub mod patch;
pub mod review;
pub mod tls;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Instant, SystemTime};

use axum::Router;
use axum::extract::{ConnectInfo, Request, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Pod;
use kube::core::admission::{AdmissionRequest, AdmissionResponse, AdmissionReview};
use mullion_core::request::Defaults;
use mullion_telemetry::trace::AdmissionStamp;
use serde_json::{Value, json};

use crate::guard::{Guard, brief};
use crate::metrics::Metrics;
use crate::weigh;
use bodies::{Bodies, Bounds};
use caller::Caller;

/// What the handler needs.
#[derive(Clone, Debug)]
pub struct Webhook {
    /// How wishes are read that a pod leaves open.
    pub defaults: Defaults,
    /// Where calls are counted.
    pub metrics: Metrics,
}

#[derive(Clone, Debug)]
struct Shared {
    webhook: Webhook,
    bodies: Arc<Bodies>,
}

impl Webhook {
    /// The one route. Callers are told apart by their address (`ConnectInfo`), where the server gives it.
    pub fn routes(self) -> Router {
        self.routes_within(Bounds::default())
    }

    fn routes_within(self, bounds: Bounds) -> Router {
        let shared = Shared { webhook: self, bodies: Arc::new(Bodies::new(bounds)) };
        Router::new().route("/webhook", post(webhook)).with_state(shared)
    }
}

async fn webhook(State(shared): State<Shared>, request: Request) -> Response {
    let (begun, since) = (Instant::now(), SystemTime::now());
    let metrics = shared.webhook.metrics.clone();
    let (outcome, response) =
        answer(shared, request, since).await.unwrap_or_else(|Refused { status, code, text }| {
            tracing::warn!(code, error = text, "call refused");
            (code, (status, format!("{code}: {text}")).into_response())
        });
    metrics.call("webhook", outcome, begun.elapsed().as_secs_f64());
    response
}

type Answer = (&'static str, Response);

async fn answer(shared: Shared, request: Request, since: SystemTime) -> Result<Answer, Refused> {
    let Shared { webhook, bodies } = shared;
    let caller = request.extensions().get::<ConnectInfo<SocketAddr>>().map(|peer| Caller::from(peer.0.ip()));
    let (body, place) = bodies.take(request.into_body(), caller).await?;
    let reader = bodies.reader(caller).await?;
    // Reading a large one takes a while, in which filter and bind need their threads. It goes on when the caller hangs
    // up, and keeps others from being read as long as it does.
    let work = tokio::task::spawn_blocking(move || {
        let _until_then = (place, reader);
        judge(&webhook, &body, since)
    });
    work.await.unwrap_or_else(|_| {
        let text = "the answer could not be made".to_owned();
        Err(Refused { status: StatusCode::INTERNAL_SERVER_ERROR, code: "TaskBroke", text })
    })
}

fn judge(webhook: &Webhook, body: &[u8], since: SystemTime) -> Result<Answer, Refused> {
    let request = read(body)?;
    let span = tracing::info_span!(
        "webhook",
        namespace = request.namespace.as_deref().unwrap_or_default(),
        pod = request.name,
        dry_run = request.dry_run,
    );
    mullion_telemetry::in_admission_trace(&span, &request.uid);
    Ok(span.in_scope(|| {
        let stamp = || AdmissionStamp::new(&request.uid, since, SystemTime::now());
        let (outcome, response) = review::review(&request, &webhook.defaults, stamp);
        let reason = response.result.message.as_str();
        tracing::info!(allowed = response.allowed, code = outcome, reason, "reviewed pod");
        (outcome, axum::Json(wire(response)).into_response())
    }))
}

/// A call that is no review, or cannot be taken now.
#[derive(Debug)]
struct Refused {
    status: StatusCode,
    code: &'static str,
    text: String,
}

impl Refused {
    fn malformed(text: String) -> Self {
        Self { status: StatusCode::BAD_REQUEST, code: "MalformedBody", text }
    }

    fn too_complex(refusal: &weigh::Refusal) -> Self {
        Self { status: StatusCode::BAD_REQUEST, code: refusal.code(), text: refusal.to_string() }
    }
}

/// The review as the API server reads it. kube writes the patch as a list of numbers; base64 is what is asked for.
fn wire(mut response: AdmissionResponse) -> Value {
    let patch = response.patch.take().map(ByteString);
    let mut review = json!(response.into_review());
    if let Some(patch) = patch {
        review["response"]["patch"] = json!(patch);
    }
    review
}

fn read(body: &[u8]) -> Result<AdmissionRequest<Guard<Pod>>, Refused> {
    weigh::weigh(body).map_err(|refusal| Refused::too_complex(&refusal))?;
    let review: AdmissionReview<Guard<Pod>> = serde_json::from_slice(body)
        .map_err(|error| Refused::malformed(format!("not an AdmissionReview: {}", brief(&error))))?;
    let request = review.try_into();
    request.map_err(|error| Refused::malformed(format!("an AdmissionReview without a request: {error}")))
}

#[cfg(test)]
mod tests;
