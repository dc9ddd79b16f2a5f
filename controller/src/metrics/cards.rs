//! What is granted, by card and by container: HAMi's names, labels and constant label (v2.10, `cmd/scheduler/metrics.go`),
//! so that its dashboards keep working, and ours with the labels that the agents' series have.
//!
//! Read from the ledger at each scrape. HAMi's label `device_cores` is left out: its value is what is granted just now, so
//! that a series would end with each pod that comes.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use mullion_core::facts::{AllocationFact, ContainerKind, DeviceGrant};
use mullion_core::ledger::{CardUsage, Ledger, Standing};
use mullion_core::units::NodeName;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, MetricEncoder};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::gauge::ConstGauge;

use crate::store::Store;

/// Constant label of every metric of HAMi's.
const ZONE: (&str, &str) = ("zone", "vGPU");

/// Shows the ledger.
pub(super) struct Cards(pub(super) Arc<Store>);

impl fmt::Debug for Cards {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cards").finish_non_exhaustive()
    }
}

/// A metric about a card, as a whole number.
type OfCard = (&'static str, &'static str, fn(&CardUsage) -> u64);

const OF_CARD: [OfCard; 5] = [
    ("hami_gpu_memory_limit_bytes", "HAMi: memory of the card that may be granted", |c| {
        c.card.memory.bytes()
    }),
    ("hami_gpu_memory_allocated_bytes", "HAMi: memory of the card that is granted", |c| {
        c.used.memory.bytes()
    }),
    ("hami_gpu_core_limit_ratio", "HAMi: compute of the card that may be granted", |c| c.card.cores.into()),
    ("hami_gpu_core_allocated_ratio", "HAMi: compute of the card that is granted", |c| c.used.cores),
    ("hami_gpu_shared_count", "HAMi: containers on the card", |c| c.used.slots),
];

/// A card of a container.
struct Slice {
    node: String,
    namespace: String,
    pod: String,
    container: String,
    /// Place among the pod's containers that have GPUs.
    place: String,
    device: DeviceGrant,
}

/// A metric about a card of a container: HAMi's name, ours, what it is, and its number.
type OfSlice = (&'static str, &'static str, &'static str, fn(&DeviceGrant) -> u64);

const OF_SLICE: [OfSlice; 2] = [
    (
        "hami_vgpu_memory_allocated_bytes",
        "mullion_container_memory_allocated_bytes",
        "memory of the card that the container is granted",
        |d| d.memory.bytes(),
    ),
    (
        "hami_vgpu_core_allocated_ratio",
        "mullion_container_core_allocated_percent",
        "compute of the card that the container is granted; 0 is what others leave",
        |d| d.cores.get().into(),
    ),
];

/// Cards of the allocations that hold, of each container that still counts.
fn slices(ledger: &Ledger) -> Vec<Slice> {
    let holds = |a: &&AllocationFact| ledger.standing(&a.uid) == Some(Standing::Holds);
    let mut all = Vec::new();
    for allocation in ledger.allocations().filter(holds) {
        for (place, container) in allocation.containers.iter().enumerate() {
            if container.kind == ContainerKind::Init && allocation.init_done {
                continue;
            }
            all.extend(container.devices.iter().map(|device| Slice {
                node: allocation.node.0.clone(),
                namespace: allocation.pod.namespace.clone(),
                pod: allocation.pod.name.clone(),
                container: container.name.clone(),
                place: place.to_string(),
                device: device.clone(),
            }));
        }
    }
    all
}

/// Adds up what has the same labels, which a scrape may show only once: while the cards of a pod that is gone are not
/// given back yet, one of the same name, such as a `StatefulSet`'s, may have its own already, and both hold.
fn summed<'a, const N: usize>(
    all: &'a [Slice],
    labels: impl Fn(&'a Slice) -> [(&'static str, &'a str); N],
    number: fn(&DeviceGrant) -> u64,
) -> BTreeMap<[(&'static str, &'a str); N], u64> {
    let mut sums = BTreeMap::new();
    for slice in all {
        *sums.entry(labels(slice)).or_default() += number(&slice.device);
    }
    sums
}

/// Labels of HAMi's metrics about a card of a container.
fn of_hami(s: &Slice) -> [(&'static str, &str); 6] {
    [
        ZONE,
        ("namespace", &s.namespace),
        ("node", &s.node),
        ("pod", &s.pod),
        ("container_index", &s.place),
        ("device_uuid", s.device.uuid.as_str()),
    ]
}

/// Labels of ours, which are those of the agents.
fn of_ours(s: &Slice) -> [(&'static str, &str); 5] {
    [
        ("node", &s.node),
        ("namespace", &s.namespace),
        ("pod", &s.pod),
        ("container", &s.container),
        ("device_uuid", s.device.uuid.as_str()),
    ]
}

fn show<const N: usize>(
    family: &mut MetricEncoder<'_>,
    labels: [(&str, &str); N],
    number: &impl EncodeMetric,
) -> fmt::Result {
    number.encode(family.encode_family(&labels)?)
}

impl Collector for Cards {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let (cards, slices) = self.0.read(|facts| {
            let ledger = facts.ledger();
            let on = |node: &NodeName| {
                let name = node.0.clone();
                ledger.card_usage(node).into_iter().map(move |usage| (name.clone(), usage))
            };
            let cards: Vec<(String, CardUsage)> = ledger.nodes().flat_map(on).collect();
            (cards, slices(ledger))
        });
        for (name, help, number) in OF_CARD {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            for (node, usage) in &cards {
                let index = usage.card.index.to_string();
                show(&mut family, of_card(node, &index, usage), &ConstGauge::new(number(usage)))?;
            }
        }
        let (name, help) =
            ("hami_node_gpu_memory_allocated_ratio", "HAMi: part of the card's memory that is granted");
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
        for (node, usage) in &cards {
            let index = usage.card.index.to_string();
            show(&mut family, of_card(node, &index, usage), &ConstGauge::new(part(usage)))?;
        }
        for (hami, ours, help, number) in OF_SLICE {
            let text = format!("HAMi: {help}");
            let mut family = encoder.encode_descriptor(hami, &text, None, MetricType::Gauge)?;
            for (labels, sum) in summed(&slices, of_hami, number) {
                show(&mut family, labels, &ConstGauge::new(sum))?;
            }
            let mut text = help.to_owned();
            text.get_mut(..1).unwrap_or_default().make_ascii_uppercase();
            let mut family = encoder.encode_descriptor(ours, &text, None, MetricType::Gauge)?;
            for (labels, sum) in summed(&slices, of_ours, number) {
                show(&mut family, labels, &ConstGauge::new(sum))?;
            }
        }
        Ok(())
    }
}

fn of_card<'a>(node: &'a str, index: &'a str, usage: &'a CardUsage) -> [(&'a str, &'a str); 5] {
    [
        ZONE,
        ("node", node),
        ("device_uuid", usage.card.uuid.as_str()),
        ("device_index", index),
        ("device_type", &usage.card.model),
    ]
}

/// Of MiB: cards have less than 2^53 of them.
#[expect(clippy::cast_precision_loss, reason = "MiB of a card")]
fn part(usage: &CardUsage) -> f64 {
    usage.used.memory.0 as f64 / usage.card.memory.0.max(1) as f64
}
