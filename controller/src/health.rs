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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::extender::Extender;
    use crate::extender::bind::Binder;
    use crate::extender::wire::ExtenderArgs;
    use crate::fake_api::FakeApi;
    use crate::store::Source;
    use crate::webhook::certificate::{Rules, make};
    use axum::body::Body;
    use axum::http::Request;
    use std::time::Duration;
    use tower::ServiceExt;

    async fn get(health: &Health, path: &str) -> (u16, String) {
        let request = Request::get(path).body(Body::empty()).unwrap();
        let response = health.clone().routes().oneshot(request).await.unwrap();
        let code = response.status().as_u16();
        let bytes = axum::body::to_bytes(response.into_body(), usize::MAX).await.unwrap();
        (code, String::from_utf8(bytes.to_vec()).unwrap())
    }

    // HA-03: readiness is what filter and webhook would answer, in every state.
    #[tokio::test]
    async fn ready_means_able_to_answer() {
        let rules =
            Rules { names: vec!["x".to_owned()], lifetime: Duration::from_hours(1), trust: Duration::ZERO };
        let pair = make(&rules, 0).unwrap().current;
        for (case, listed, certificate, missing) in [
            ("nothing", 0, false, "VGPUAllocation, GPUNode, Node, Pod"),
            ("pods not listed", 3, true, "Pod"),
            ("no certificate", 4, false, "the webhook's certificate"),
            ("everything", 4, true, ""),
        ] {
            let store = Arc::new(Store::new(mullion_core::request::Defaults::default()));
            let identity = Identity::default();
            for source in
                [Source::Allocations, Source::GpuNodes, Source::Nodes, Source::Pods].into_iter().take(listed)
            {
                store.synced(source);
            }
            if certificate {
                identity.load("s", &pair.certificate, &pair.key).unwrap();
            }
            let metrics = Metrics::new();
            let binder = Binder::new(FakeApi::default().cluster(), Arc::clone(&store), Arc::default());
            let extender = Extender::new(Arc::clone(&store), Arc::new(binder), metrics.clone());
            let args: ExtenderArgs =
                serde_json::from_str(r#"{"Pod":{"metadata":{}},"NodeNames":[]}"#).unwrap();
            let filter_answers = extender.filter(&args).error.is_empty();
            let health = Health { store, identity: identity.clone(), metrics };
            let (code, text) = get(&health, "/readyz").await;
            assert_eq!(code == 200, filter_answers && identity.loaded(), "{case}: {text}");
            assert!(text.contains(missing), "{case}: {text}");
            assert_eq!(get(&health, "/healthz").await.0, 200, "{case}: alive all the same");
        }
    }

    #[tokio::test]
    async fn metrics_are_open_metrics() {
        let store = Arc::new(Store::new(mullion_core::request::Defaults::default()));
        store.write(|facts| {
            let cards = vec![crate::fixtures::card("GPU-1", 1000)];
            facts.fold(&mullion_core::facts::Event::NodeObserved(crate::fixtures::node("n", cards)))
        });
        let metrics = Metrics::new();
        metrics.watch_cards(Arc::clone(&store));
        metrics.call("filter", "ok", 0.001);
        let health = Health { store, identity: Identity::default(), metrics };
        let (code, text) = get(&health, "/metrics").await;
        assert_eq!(code, 200);
        for line in [
            "mullion_calls_total{call=\"filter\",outcome=\"ok\"} 1\n",
            "mullion_call_duration_seconds_count{call=\"filter\"} 1\n",
            "hami_gpu_memory_limit_bytes{zone=\"vGPU\",node=\"n\",device_uuid=\"GPU-1\",device_index=\"0\",device_type=\"NVIDIA H100 80GB HBM3\"} 1048576000\n",
            "mullion_ledger_drift 0\n",
        ] {
            assert!(text.contains(line), "{line} is not in {text}");
        }
        assert!(text.ends_with("# EOF\n"));
    }
}
