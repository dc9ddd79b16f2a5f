//! The mutating admission webhook: pods that ask for GPUs are read once, filled in or refused.
//!
//! It is stateless, so every replica serves it. `matchConditions` keep all other pods away from it.

pub mod certificate;
pub mod patch;
pub mod review;
pub mod tls;

use std::time::{Instant, SystemTime};

use axum::Router;
use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use k8s_openapi::ByteString;
use kube::core::DynamicObject;
use kube::core::admission::{AdmissionRequest, AdmissionResponse, AdmissionReview};
use mullion_core::request::Defaults;
use mullion_telemetry::trace::AdmissionStamp;
use serde_json::{Value, json};

use crate::metrics::Metrics;

/// Largest body taken. The API server takes objects of 3 MiB, and a review may carry one twice.
const BODY_LIMIT: usize = 16 << 20;

/// What the handler needs.
#[derive(Clone, Debug)]
pub struct Webhook {
    /// How wishes are read that a pod leaves open.
    pub defaults: Defaults,
    /// Where calls are counted.
    pub metrics: Metrics,
}

impl Webhook {
    /// The one route.
    pub fn routes(self) -> Router {
        Router::new()
            .route("/webhook", post(webhook))
            .layer(DefaultBodyLimit::max(BODY_LIMIT))
            .with_state(self)
    }
}

async fn webhook(State(webhook): State<Webhook>, body: Bytes) -> Response {
    let (begun, since) = (Instant::now(), SystemTime::now());
    let (outcome, response) = match read(&body) {
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
        Err(text) => {
            tracing::warn!(error = text, "call refused");
            ("MalformedBody", (StatusCode::BAD_REQUEST, text).into_response())
        }
    };
    webhook.metrics.call("webhook", outcome, begun.elapsed().as_secs_f64());
    response
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

fn read(body: &Bytes) -> Result<AdmissionRequest<DynamicObject>, String> {
    let review: AdmissionReview<DynamicObject> = serde_json::from_slice(body)
        .map_err(|error| format!("MalformedBody: not an AdmissionReview: {error}"))?;
    let request = review.try_into();
    request.map_err(|error| format!("MalformedBody: an AdmissionReview without a request: {error}"))
}

#[cfg(test)]
mod tests;
