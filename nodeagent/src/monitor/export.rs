//! The last look as metrics: our names, HAMi's of today and HAMi's of old, so that whoever comes from there keeps his
//! dashboards. What is scraped was computed before; a scrape touches no file and no driver.
//!
//! HAMi's names, labels and constant label are those of its monitor (v2.10, `cmd/vGPUmonitor/metrics.go`). All our own
//! carry the labels `node`, `namespace`, `pod`, `container` and, for a card, `device_uuid`, by which they join with the
//! controller's.

mod hami;
mod ours;

use std::collections::BTreeSet;
use std::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, MetricEncoder};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;

use crate::monitor::Latest;
use crate::monitor::snapshot::{Card, Container, Measured, Snapshot};
use crate::monitor::usage::CardUsage;

/// Shows the last look.
#[derive(Debug)]
pub struct Exporter {
    /// The last look.
    pub latest: Latest,
    /// Name of the node.
    pub node: String,
    /// HAMi's names from before v2.10 as well.
    pub legacy: bool,
}

/// A card of a container, with all that is known of it.
struct Slice<'a> {
    container: &'a Container,
    place: String,
    card: &'a str,
    limit: u64,
    cores: u64,
    /// `None` where the usage file tells nothing.
    usage: Option<&'a CardUsage>,
    measured: Option<&'a Measured>,
}

impl<'a> Slice<'a> {
    fn all(snapshot: &'a Snapshot) -> Vec<Self> {
        let mut all = Vec::new();
        for container in snapshot.shown() {
            let usage = container.usage.as_ref().ok();
            let mut push = |place: usize, card: &'a str, limit, cores| {
                all.push(Self {
                    container,
                    place: place.to_string(),
                    card,
                    limit,
                    cores,
                    usage: usage.and_then(|u| u.cards.get(place)),
                    measured: container.measured.get(place),
                });
            };
            if let Some(limits) = &container.limits {
                // Limits are shown from the moment of their promise, whatever has become of the file.
                for (place, limit) in limits.iter().enumerate() {
                    let cores = if limit.cores == 0 { 100 } else { limit.cores.into() };
                    push(place, &limit.card, limit.memory, cores);
                }
            } else if let Some(usage) = usage {
                // A tenant's word: names of cards that the node does not have would be series without end, and a name that
                // stands twice would be a series twice, for which a scrape is refused as a whole.
                let mut left: BTreeSet<&str> = snapshot.known.iter().map(String::as_str).collect();
                for (place, card) in usage.cards.iter().enumerate() {
                    if left.remove(card.card.as_str()) {
                        push(place, &card.card, card.limit, card.cores);
                    }
                }
            }
        }
        all
    }

    /// Share of time with a kernel on the card in percent: the driver's word, else that of HAMi's library.
    fn busy_percent(&self) -> Option<u64> {
        let measured = self.measured.and_then(|m| m.per_mille).map(|m| u64::from(m) / 10);
        measured.or_else(|| self.usage.filter(|_| self.container.limits.is_none()).map(|u| u.told_sm))
    }

    /// HAMi's label is 40 bytes long, which is every uuid of today.
    fn short_card(&self) -> &'a str {
        self.card.get(..40).unwrap_or(self.card)
    }
}

/// One name's worth of numbers.
struct Family<'a> {
    encoder: MetricEncoder<'a>,
}

impl Family<'_> {
    fn add<const N: usize>(&mut self, labels: [(&str, &str); N], number: impl Number) -> fmt::Result {
        number.encode(self.encoder.encode_family(&labels)?)
    }
}

/// A number that can be shown.
trait Number {
    fn encode(self, encoder: MetricEncoder<'_>) -> fmt::Result;
}

impl Number for f64 {
    fn encode(self, encoder: MetricEncoder<'_>) -> fmt::Result {
        ConstGauge::new(self).encode(encoder)
    }
}

impl Number for bool {
    fn encode(self, encoder: MetricEncoder<'_>) -> fmt::Result {
        ConstGauge::new(i64::from(self)).encode(encoder)
    }
}

/// Bytes, counts and percent as whole numbers.
struct Whole(u64);

impl Number for Whole {
    fn encode(self, encoder: MetricEncoder<'_>) -> fmt::Result {
        ConstGauge::new(i64::try_from(self.0).unwrap_or(i64::MAX)).encode(encoder)
    }
}

/// What only grows while a container runs.
struct Count(u64);

impl Number for Count {
    fn encode(self, encoder: MetricEncoder<'_>) -> fmt::Result {
        ConstCounter::new(self.0).encode(encoder)
    }
}

/// Seconds that only grow.
struct Seconds(u64);

impl Number for Seconds {
    fn encode(self, encoder: MetricEncoder<'_>) -> fmt::Result {
        ConstCounter::new(seconds(self.0)).encode(encoder)
    }
}

/// ns as seconds.
#[expect(
    clippy::cast_precision_loss,
    reason = "ns of a container's life: 53 bits are a hundred days to the ns"
)]
fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

fn family<'a>(
    encoder: &'a mut DescriptorEncoder<'_>,
    name: &'a str,
    help: &str,
    kind: MetricType,
) -> Result<Family<'a>, fmt::Error> {
    Ok(Family { encoder: encoder.encode_descriptor(name, help, None, kind)? })
}

impl Collector for Exporter {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let snapshot = self.latest.get();
        let slices = Slice::all(&snapshot);
        self.ours(&mut encoder, &snapshot, &slices)?;
        self.hami(&mut encoder, &snapshot, &slices)?;
        if self.legacy {
            self.legacy(&mut encoder, &snapshot, &slices)?;
        }
        Ok(())
    }
}

/// A number with its kind.
enum Shown {
    Whole(u64),
    Count(u64),
    Seconds(u64),
    Gauge(f64),
}

impl Number for Shown {
    fn encode(self, encoder: MetricEncoder<'_>) -> fmt::Result {
        match self {
            Self::Whole(number) => Whole(number).encode(encoder),
            Self::Count(number) => Count(number).encode(encoder),
            Self::Seconds(ns) => Seconds(ns).encode(encoder),
            Self::Gauge(number) => number.encode(encoder),
        }
    }
}

const GAUGE: MetricType = MetricType::Gauge;
const COUNTER: MetricType = MetricType::Counter;

/// A metric about a `T`: name, help, kind, and its number.
type Metric<T> = (&'static str, &'static str, MetricType, fn(&T) -> Option<Shown>);

/// Each metric of a table, for those of `things` that have it.
fn families<'a, T: 'a, I: Iterator<Item = &'a T>, const N: usize>(
    encoder: &mut DescriptorEncoder<'_>,
    table: &[Metric<T>],
    things: impl Fn() -> I,
    labels: impl Fn(&'a T) -> [(&'a str, &'a str); N],
) -> fmt::Result {
    for (name, help, kind, number) in table {
        let mut family = family(encoder, name, help, *kind)?;
        for thing in things() {
            let Some(number) = number(thing) else { continue };
            family.add(labels(thing), number)?;
        }
    }
    Ok(())
}

/// A metric about a card of the node.
type OfCard = (&'static str, &'static str, fn(&Card) -> Option<u64>);
