//! What the agent counts, and the page that shows it.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::Registry;
use tokio::net::TcpListener;

use crate::audit::Audit;
use crate::error::Error;
use crate::monitor::export::Exporter;
use crate::world::{Driver, Shared};

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CodeLabel {
    code: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CallLabel {
    call: &'static str,
}

/// A driver's call, and the card that it was about; empty for the driver as a whole.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct DriverLabel {
    call: &'static str,
    device_uuid: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CardLabel {
    device_uuid: String,
}

/// Counters that the parts of the agent raise.
#[derive(Debug)]
pub struct Metrics {
    prepare: Histogram,
    refusals: Family<CodeLabel, Counter>,
    nvml_errors: Family<DriverLabel, Counter>,
    api_writes: Family<CallLabel, Counter>,
}

impl Default for Metrics {
    fn default() -> Self {
        Self {
            // 0.25 ms to 16 s: a call takes about 1 ms, waiting for an allocation up to 20 s.
            prepare: Histogram::new(exponential_buckets(0.000_25, 2.0, 17)),
            refusals: Family::default(),
            nvml_errors: Family::default(),
            api_writes: Family::default(),
        }
    }
}

impl Metrics {
    /// A `PreStartContainer` ended, with the code of its refusal if it was refused.
    pub fn prepared(&self, took: Duration, refusal: Option<&'static str>) {
        self.prepare.observe(took.as_secs_f64());
        if let Some(code) = refusal {
            self.refusals.get_or_create(&CodeLabel { code }).inc();
        }
    }

    /// A call of the driver failed.
    pub fn nvml_error(&self, call: &'static str) {
        self.nvml_card_error(call, "");
    }

    /// A call of the driver failed for one card.
    pub fn nvml_card_error(&self, call: &'static str, card: &str) {
        self.nvml_errors.get_or_create(&DriverLabel { call, device_uuid: card.to_owned() }).inc();
    }

    /// The API server was written to.
    pub fn api_write(&self, call: &'static str) {
        self.api_writes.get_or_create(&CallLabel { call }).inc();
    }
}

/// Gauges derived from the world at scrape time, so that no label set outlives what it is about.
struct WorldGauges {
    shared: Arc<Shared>,
    audit: Audit,
}

impl fmt::Debug for WorldGauges {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WorldGauges").finish_non_exhaustive()
    }
}

impl Collector for WorldGauges {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let (offer, in_use, registered, driver, cards, over, observation) = self.shared.read(|w| {
            let cards = w.cards.iter().flatten();
            let cards: Vec<(String, bool)> =
                cards.map(|(uuid, k)| (uuid.clone(), k.present && k.fault().is_none())).collect();
            (
                w.offer().unwrap_or_default(),
                w.slots_in_use().len(),
                w.signs.registered,
                matches!(w.driver, Driver::Ready { .. }),
                cards,
                w.ledger.overcommitted().len(),
                w.observation,
            )
        });
        let number = |n: usize| i64::try_from(n).unwrap_or(i64::MAX);
        let audit_ok = self.audit.is_ok();
        for (name, help, value) in [
            ("mullion_agent_slots", "Slots of all cards.", i64::from(offer.total)),
            (
                "mullion_agent_slots_usable",
                "Slots of cards that take containers now.",
                i64::from(offer.usable),
            ),
            ("mullion_agent_slots_in_use", "Slots that containers have.", number(in_use)),
            (
                "mullion_agent_plugin_registered",
                "1 while the kubelet watches our slots.",
                i64::from(registered),
            ),
            ("mullion_agent_driver_ready", "1 while the driver answers.", i64::from(driver)),
            ("mullion_agent_audit_writable", "1 while the audit log takes rows.", i64::from(audit_ok)),
            ("mullion_agent_cards_overcommitted", "Cards with more given out than they have.", number(over)),
            ("mullion_agent_observation", "Number of the last inventory.", observation),
        ] {
            let gauge = ConstGauge::new(value);
            gauge.encode(encoder.encode_descriptor(name, help, None, gauge.metric_type())?)?;
        }
        let kind = ConstGauge::<i64>::new(0).metric_type();
        let mut family = encoder.encode_descriptor(
            "mullion_agent_card_healthy",
            "1 for a card without a fault.",
            None,
            kind,
        )?;
        for (device_uuid, healthy) in cards {
            let gauge = ConstGauge::new(i64::from(healthy));
            gauge.encode(family.encode_family(&CardLabel { device_uuid })?)?;
        }
        Ok(())
    }
}

/// Everything that is shown at `/metrics`.
#[must_use]
pub fn registry(metrics: &Metrics, shared: &Arc<Shared>, audit: Audit, exporter: Exporter) -> Registry {
    let mut all = Registry::default();
    // Whoever scrapes many agents tells them apart by it, whatever his own labels are called.
    let node = (Cow::Borrowed("node"), Cow::Owned(exporter.node.clone()));
    let registry = all.sub_registry_with_label(node);
    let build = Info::new(vec![("version", env!("CARGO_PKG_VERSION"))]);
    registry.register("mullion_agent_build", "Version of the agent", build);
    registry.register(
        "mullion_agent_prepare_seconds",
        "Time of a PreStartContainer call",
        metrics.prepare.clone(),
    );
    registry.register(
        "mullion_agent_prepare_refusals",
        "Containers that were refused, by code",
        metrics.refusals.clone(),
    );
    registry.register(
        "mullion_nvml_errors",
        "Failed calls of the driver, by call and card",
        metrics.nvml_errors.clone(),
    );
    registry.register("mullion_agent_api_writes", "Writes to the API server", metrics.api_writes.clone());
    registry.register_collector(Box::new(WorldGauges { shared: Arc::clone(shared), audit }));
    // It has the label where HAMi has it, too.
    all.register_collector(Box::new(exporter));
    all
}

/// Serves `/metrics`, `/healthz` and `/readyz`.
///
/// # Errors
/// [`Error::Listen`].
pub async fn serve(
    address: std::net::SocketAddr,
    registry: Registry,
    shared: Arc<Shared>,
) -> Result<(), Error> {
    let failed = |source| Error::Listen { address: address.to_string(), source };
    let listener = TcpListener::bind(address).await.map_err(failed)?;
    let app = Router::new()
        .route("/metrics", get(scrape))
        .route("/healthz", get(|| async { "ok" }))
        .route("/readyz", get(ready))
        .with_state((Arc::new(registry), shared));
    axum::serve(listener, app).await.map_err(failed)
}

type Page = State<(Arc<Registry>, Arc<Shared>)>;

async fn scrape(State((registry, _)): Page) -> Response {
    let mut text = String::new();
    match prometheus_client::encoding::text::encode(&mut text, &registry) {
        Ok(()) => {
            let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
            ([(header::CONTENT_TYPE, kind)], text).into_response()
        }
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

/// Ready is who can start containers: the kubelet watches our slots.
async fn ready(State((_, shared)): Page) -> Response {
    if shared.read(|w| w.signs.registered) {
        "ok".into_response()
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, "the kubelet does not watch our slots").into_response()
    }
}
