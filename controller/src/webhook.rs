//! The mutating admission webhook: pods that ask for GPUs are read once, filled in or refused.
//!
//! It is stateless, so every replica serves it. `matchConditions` keep all other pods away from it.

pub mod certificate;
mod pace;
pub mod patch;
pub mod review;
pub mod tls;

use std::sync::Arc;
use std::time::{Instant, SystemTime};

use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use futures::StreamExt;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Pod;
use kube::core::admission::{AdmissionRequest, AdmissionResponse, AdmissionReview};
use mullion_core::request::Defaults;
use mullion_telemetry::trace::AdmissionStamp;
use serde_json::{Value, json};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::guard::Guard;
use crate::metrics::Metrics;

/// Largest body taken. The API server takes objects of 3 MiB (its `MaxRequestBodyBytes`), and a review may carry one
/// twice, as it was and as it is to be: 6 MiB, and as much again as half of one for the rest and for escapes.
const BODY_LIMIT: usize = 8 << 20;

/// How much of all bodies together is held at one time. Whoever reaches the port may send; four of the largest, or a
/// thousand ordinary ones, fit into the controller's 512 MiB beside what is read from them.
const BODY_BUDGET: usize = 4 * BODY_LIMIT;

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
    budget: Arc<Semaphore>,
}

impl Webhook {
    /// The one route.
    pub fn routes(self) -> Router {
        let shared = Shared { webhook: self, budget: Arc::new(Semaphore::new(BODY_BUDGET)) };
        Router::new().route("/webhook", post(webhook)).with_state(shared)
    }
}

async fn webhook(State(Shared { webhook, budget }): State<Shared>, body: Body) -> Response {
    let (begun, since) = (Instant::now(), SystemTime::now());
    let read = match collect(body, &budget).await {
        // The share of the budget is given back when the answer is made.
        Ok((body, _share)) => read(&body),
        Err(refused) => Err(refused),
    };
    let (outcome, response) = match read {
        Ok(request) => {
            let span = tracing::info_span!(
                "webhook",
                namespace = request.namespace.as_deref().unwrap_or_default(),
                pod = request.name,
                dry_run = request.dry_run,
            );
            mullion_telemetry::in_admission_trace(&span, &request.uid);
            span.in_scope(|| {
                let stamp = || AdmissionStamp::new(&request.uid, since, SystemTime::now());
                let (outcome, response) = review::review(&request, &webhook.defaults, stamp);
                let reason = response.result.message.as_str();
                tracing::info!(allowed = response.allowed, code = outcome, reason, "reviewed pod");
                (outcome, axum::Json(wire(response)).into_response())
            })
        }
        Err(Refused { status, code, text }) => {
            tracing::warn!(code, error = text, "call refused");
            (code, (status, format!("{code}: {text}")).into_response())
        }
    };
    webhook.metrics.call("webhook", outcome, begun.elapsed().as_secs_f64());
    response
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
}

/// Reads a body, each piece against the limit and the budget as it comes: what a caller says its length will be is
/// worth nothing.
async fn collect(
    body: Body,
    budget: &Arc<Semaphore>,
) -> Result<(Vec<u8>, Option<OwnedSemaphorePermit>), Refused> {
    let (mut read, mut share): (Vec<u8>, Option<OwnedSemaphorePermit>) = (Vec::new(), None);
    let mut pieces = body.into_data_stream();
    while let Some(piece) = pieces.next().await {
        let piece = piece.map_err(|error| Refused::malformed(format!("it broke off: {error}")))?;
        if read.len() + piece.len() > BODY_LIMIT {
            let text = format!("longer than {BODY_LIMIT} bytes, which no review of the API server is");
            return Err(Refused { status: StatusCode::PAYLOAD_TOO_LARGE, code: "BodyTooLarge", text });
        }
        let wanted = u32::try_from(piece.len()).unwrap_or(u32::MAX);
        let Ok(more) = Arc::clone(budget).try_acquire_many_owned(wanted) else {
            let text = "too many large bodies at a time: try again".to_owned();
            return Err(Refused { status: StatusCode::SERVICE_UNAVAILABLE, code: "TooManyBodies", text });
        };
        match &mut share {
            Some(share) => share.merge(more),
            None => share = Some(more),
        }
        read.extend_from_slice(&piece);
    }
    Ok((read, share))
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
    let review: AdmissionReview<Guard<Pod>> = serde_json::from_slice(body)
        .map_err(|error| Refused::malformed(format!("not an AdmissionReview: {error}")))?;
    let request = review.try_into();
    request.map_err(|error| Refused::malformed(format!("an AdmissionReview without a request: {error}")))
}

#[cfg(test)]
mod tests;
