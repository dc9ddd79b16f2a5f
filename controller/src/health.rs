//! `/healthz`, `/readyz`, `/metrics`.
//!
//! `/readyz` says what the next call of filter and webhook would find (HA-03): it asks the same two questions.

use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;

use crate::error::Error;
use crate::metrics::{CONTENT_TYPE, Metrics};
use crate::store::Store;
use crate::webhook::tls::Identity;

/// What the handlers look at.
#[derive(Clone, Debug)]
pub struct Health {
    /// Filter and bind need it listed.
    pub store: Arc<Store>,
    /// The webhook needs a certificate.
    pub identity: Identity,
    /// What is shown under `/metrics`.
    pub metrics: Metrics,
}

impl Health {
    /// The three routes.
    pub fn routes(self) -> Router {
        Router::new()
            .route("/healthz", get(|| async { "ok" }))
            .route("/readyz", get(readyz))
            .route("/metrics", get(metrics))
            .with_state(self)
    }

    /// Whether extender and webhook can answer.
    ///
    /// # Errors
    /// [`Error::NotReady`] naming what is missing.
    pub fn ready(&self) -> Result<(), Error> {
        self.store.ready()?;
        if self.identity.loaded() {
            Ok(())
        } else {
            Err(Error::NotReady { missing: "the webhook's certificate".to_owned() })
        }
    }
}

async fn readyz(State(health): State<Health>) -> Response {
    match health.ready() {
        Ok(()) => "ok".into_response(),
        Err(error) => (StatusCode::SERVICE_UNAVAILABLE, format!("{}: {error}", error.code())).into_response(),
    }
}

async fn metrics(State(health): State<Health>) -> Response {
    match health.metrics.encode() {
        Ok(text) => ([(header::CONTENT_TYPE, CONTENT_TYPE)], text).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}
