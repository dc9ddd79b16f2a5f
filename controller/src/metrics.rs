//! What the controller counts, as OpenMetrics.
//!
//! Counters are named without `_total`: the encoder appends it. Gauges about cards are derived from the ledger at
//! scrape time, so that a card that is gone leaves no series behind.

mod cards;

use std::fmt;
use std::sync::Arc;

use parking_lot::Mutex;
use prometheus_client::encoding::{EncodeLabelSet, text};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

use crate::store::Store;
use cards::Cards;

/// Content type of `/metrics`.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Upper bounds of the duration buckets, in seconds: filter and prioritize take well under a millisecond a call,
/// bind and webhook a few, and kube-scheduler gives up after 30 s.
const SECONDS: [f64; 14] =
    [0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 5.0, 10.0, 20.0, 30.0];

/// One of our HTTP calls, and how it ended.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct CallLabels {
    /// `filter`, `prioritize`, `bind`, `webhook`.
    pub call: &'static str,
    /// `ok`, or the stable code of what went wrong.
    pub outcome: &'static str,
}

/// One of our HTTP calls.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct DurationLabels {
    /// `filter`, `prioritize`, `bind`, `webhook`.
    pub call: &'static str,
}

/// A kind of object.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct KindLabels {
    /// The kind.
    pub kind: &'static str,
}

/// Why a node was refused.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct CodeLabels {
    /// The rule's code.
    pub code: &'static str,
}

/// What a reconciler did.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ActionLabels {
    /// `undo`, `release`, `evict`, `poke`, `report`, `certificate`.
    pub action: &'static str,
    /// `ok`, or the stable code of what went wrong.
    pub outcome: &'static str,
}

/// Every metric of the controller.
#[derive(Clone)]
pub struct Metrics {
    /// Calls by outcome.
    pub calls: Family<CallLabels, Counter>,
    /// How long calls took.
    pub durations: Family<DurationLabels, Histogram, fn() -> Histogram>,
    /// Nodes refused by filter, by rule.
    pub refusals: Family<CodeLabels, Counter>,
    /// Verdicts of filter and prioritize that were remembered.
    pub cache_hits: Counter,
    /// Verdicts that had to be worked out.
    pub cache_misses: Counter,
    /// What the reconcilers did.
    pub actions: Family<ActionLabels, Counter>,
    /// Objects that could not be read and were passed over.
    pub invalid_objects: Family<KindLabels, Counter>,
    /// Watches that broke and were started anew.
    pub watch_errors: Family<KindLabels, Counter>,
    /// Pods that ask for our resources and are not ours (WH-04).
    pub unmanaged_gpu_pods: Gauge,
    /// Differences between the ledger and a fresh fold of the same objects (FS-09); always 0.
    pub ledger_drift: Gauge,
    /// Cards on which more stands than they have; 0 unless an admin lowered a card's capacity.
    pub overcommitted_cards: Gauge,
    /// Allocations that cannot be read, and pods that run without theirs; 0 unless somebody went around Mullion.
    pub unaccounted: Gauge,
    /// 1 while this replica runs the reconcilers.
    pub leader: Gauge,
    registry: Arc<Mutex<Registry>>,
}

impl fmt::Debug for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Metrics").finish_non_exhaustive()
    }
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl Metrics {
    /// All metrics at zero, registered.
    #[must_use]
    pub fn new() -> Self {
        let histogram: fn() -> Histogram = || Histogram::new(SECONDS);
        let metrics = Self {
            calls: Family::default(),
            durations: Family::new_with_constructor(histogram),
            refusals: Family::default(),
            cache_hits: Counter::default(),
            cache_misses: Counter::default(),
            actions: Family::default(),
            invalid_objects: Family::default(),
            watch_errors: Family::default(),
            unmanaged_gpu_pods: Gauge::default(),
            ledger_drift: Gauge::default(),
            overcommitted_cards: Gauge::default(),
            unaccounted: Gauge::default(),
            leader: Gauge::default(),
            registry: Arc::default(),
        };
        metrics.register();
        metrics
    }

    fn register(&self) {
        let mut guard = self.registry.lock();
        let registry = guard.sub_registry_with_prefix("mullion");
        registry.register("calls", "Calls answered, by outcome", self.calls.clone());
        registry.register_with_unit(
            "call_duration",
            "Time from a call's arrival to its answer",
            Unit::Seconds,
            self.durations.clone(),
        );
        registry.register("filter_refusals", "Nodes refused by filter, by rule", self.refusals.clone());
        registry.register(
            "verdict_cache_hits",
            "Verdicts on nodes that were remembered",
            self.cache_hits.clone(),
        );
        registry.register(
            "verdict_cache_misses",
            "Verdicts on nodes that were worked out",
            self.cache_misses.clone(),
        );
        registry.register("reconcile_actions", "What the reconcilers did", self.actions.clone());
        registry.register(
            "invalid_objects",
            "Objects that could not be read and were passed over",
            self.invalid_objects.clone(),
        );
        registry.register("watch_errors", "Watches that broke and were resumed", self.watch_errors.clone());
        registry.register(
            "unmanaged_gpu_pods",
            "Pending pods that ask for GPUs under another scheduler's name",
            self.unmanaged_gpu_pods.clone(),
        );
        registry.register(
            "ledger_drift",
            "Differences between the ledger and a fresh fold of the same objects; always 0",
            self.ledger_drift.clone(),
        );
        registry.register(
            "overcommitted_cards",
            "Cards on which more stands than they have",
            self.overcommitted_cards.clone(),
        );
        registry.register(
            "unaccounted",
            "Allocations that cannot be read and pods that run without theirs; their nodes take no new GPU pods",
            self.unaccounted.clone(),
        );
        registry.register("leader", "1 while this replica runs the reconcilers", self.leader.clone());
    }

    /// Adds gauges about every card and what is granted of it, read from `store` at each scrape.
    pub fn watch_cards(&self, store: Arc<Store>) {
        self.registry.lock().register_collector(Box::new(Cards(store)));
    }

    /// Counts a call and how long it took.
    pub fn call(&self, call: &'static str, outcome: &'static str, seconds: f64) {
        self.calls.get_or_create(&CallLabels { call, outcome }).inc();
        self.durations.get_or_create(&DurationLabels { call }).observe(seconds);
    }

    /// Counts what a reconciler did.
    pub fn action(&self, action: &'static str, outcome: &'static str) {
        self.actions.get_or_create(&ActionLabels { action, outcome }).inc();
    }

    /// The text of `/metrics`.
    ///
    /// # Errors
    /// Never in practice: writing to a String does not fail.
    pub fn encode(&self) -> Result<String, fmt::Error> {
        let mut text = String::new();
        text::encode(&mut text, &self.registry.lock())?;
        Ok(text)
    }
}

#[cfg(test)]
mod tests;
