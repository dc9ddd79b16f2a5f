//! The last look as metrics: our names, HAMi's of today and HAMi's of old, so that whoever comes from there keeps his
//! dashboards. What is scraped was computed before; a scrape touches no file and no driver.
//!
//! HAMi's names, labels and constant label are those of its monitor (v2.10, `cmd/vGPUmonitor/metrics.go`). All our own
//! carry the labels `node`, `namespace`, `pod`, `container` and, for a card, `device_uuid`, by which they join with the
//! controller's.

use std::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, MetricEncoder};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;

use crate::monitor::Latest;
use crate::monitor::snapshot::{Card, Container, Measured, Snapshot};
use crate::monitor::usage::CardUsage;

/// Constant label of every metric of HAMi's.
const ZONE: (&str, &str) = ("zone", "vGPU");

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
        for container in &snapshot.containers {
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
                // A tenant's word: names of cards that the node does not have would be series without end.
                let known =
                    |uuid: &str| snapshot.cards.is_empty() || snapshot.cards.iter().any(|c| c.uuid == uuid);
                for (place, card) in usage.cards.iter().enumerate().filter(|(_, c)| known(&c.card)) {
                    push(place, &card.card, card.limit, card.cores);
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

/// A metric of ours about a card of a container: name, help, kind, and its number.
type OfSlice = (&'static str, &'static str, MetricType, fn(&Slice<'_>) -> Option<Shown>);

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

/// Ours, by card of a container.
const SLICES: &[OfSlice] = &[
    ("mullion_container_memory_limit_bytes", "Memory that the container may hold of the card.", GAUGE, |s| {
        Some(Shown::Whole(s.limit))
    }),
    (
        "mullion_container_memory_used_bytes",
        "Memory that the container holds of the card, by the library's account.",
        GAUGE,
        |s| s.usage.map(|u| Shown::Whole(u.used)),
    ),
    (
        "mullion_container_memory_peak_bytes",
        "Most memory that the container held of the card at once, by the library's account.",
        GAUGE,
        |s| s.usage.map(|u| Shown::Whole(u.peak)),
    ),
    (
        "mullion_container_memory_driver_bytes",
        "Memory of the container's processes on the card, by the driver's word: contexts and code are part of it.",
        GAUGE,
        |s| s.measured?.bytes.map(Shown::Whole),
    ),
    (
        "mullion_container_core_limit_percent",
        "Share of the card's time that the container may have; 100 is no limit.",
        GAUGE,
        |s| Some(Shown::Whole(s.cores)),
    ),
    (
        "mullion_container_core_used_percent",
        "Share of time in which a kernel of the container was on the card, by the driver's word.",
        GAUGE,
        |s| s.busy_percent().map(Shown::Whole),
    ),
    (
        "mullion_container_launch_cost_scale",
        "Factor by which the agent corrects the estimated cost of launches; 1 is none.",
        GAUGE,
        |s| {
            s.measured?.scale.map(|scale| Shown::Gauge(f64::from(scale) / f64::from(mullion_pace::SCALE_ONE)))
        },
    ),
    ("mullion_container_limit_hits", "Allocations that the memory limit refused.", COUNTER, |s| {
        s.usage.map(|u| Shown::Count(u.limit_hits))
    }),
    (
        "mullion_container_card_full",
        "Allocations within the limit for which the card itself had no memory.",
        COUNTER,
        |s| s.usage.map(|u| Shown::Count(u.card_full)),
    ),
    (
        "mullion_container_launch_waits",
        "Launches that waited for the container's share of the card.",
        COUNTER,
        |s| s.usage.map(|u| Shown::Count(u.waits)),
    ),
    (
        "mullion_container_launch_wait_seconds",
        "How long launches waited, all processes together.",
        COUNTER,
        |s| s.usage.map(|u| Shown::Seconds(u.wait_ns)),
    ),
    (
        "mullion_container_launch_cost_seconds",
        "Time of the card charged to launches: an estimate.",
        COUNTER,
        |s| s.usage.map(|u| Shown::Seconds(u.spent_ns)),
    ),
    (
        "mullion_container_first_launch_timestamp_seconds",
        "When the container first launched a kernel on the card; absent before that.",
        GAUGE,
        |s| s.usage.filter(|u| u.first_launch_ns > 0).map(|u| Shown::Gauge(seconds(u.first_launch_ns))),
    ),
    (
        "mullion_container_last_launch_timestamp_seconds",
        "When the container last launched a kernel on the card; absent before the first one.",
        GAUGE,
        |s| s.usage.filter(|u| u.last_launch_ns > 0).map(|u| Shown::Gauge(seconds(u.last_launch_ns))),
    ),
];

/// A metric about a card of the node.
type OfCard = (&'static str, &'static str, fn(&Card) -> Option<u64>);

/// A metric of ours about a container.
type OfContainer = (&'static str, &'static str, MetricType, fn(&Container) -> Option<Shown>);

fn flag(set: bool) -> Shown {
    Shown::Whole(u64::from(set))
}

/// Ours, by container.
const CONTAINERS: &[OfContainer] = &[
    (
        "mullion_container_hook_attached",
        "1 once a process of the container has asked for its cards through the library.",
        GAUGE,
        |c| Some(flag(c.usage.as_ref().is_ok_and(|u| u.attached > 0))),
    ),
    ("mullion_container_usage_readable", "1 while the container's usage file can be read.", GAUGE, |c| {
        Some(flag(c.usage.is_ok()))
    }),
    (
        "mullion_container_usage_capped",
        "1 while the usage file holds a number that cannot be true, which was cut: its tenant writes into it.",
        GAUGE,
        |c| Some(flag(c.usage.as_ref().is_ok_and(|u| u.capped))),
    ),
    (
        "mullion_container_limit_bypassed",
        "1 while the driver shows more memory than the library's account explains.",
        GAUGE,
        |c| Some(flag(c.bypassed)),
    ),
    (
        "mullion_container_throttled",
        "1 while the container is held to its share of time; it runs freely while nobody else needs the card.",
        GAUGE,
        |c| Some(flag(c.throttled)),
    ),
    (
        "mullion_container_gated",
        "1 while launches of the container wait for a more urgent one.",
        GAUGE,
        |c| Some(flag(c.gated)),
    ),
    ("mullion_container_processes", "Processes of the container that use its cards.", GAUGE, |c| {
        c.usage.as_ref().ok().map(|u| Shown::Whole(u64::try_from(u.processes).unwrap_or(u64::MAX)))
    }),
    (
        "mullion_container_hook_refused",
        "Processes that were refused the cards since no limit could be kept.",
        COUNTER,
        |c| c.usage.as_ref().ok().map(|u| Shown::Count(u.refused)),
    ),
    (
        "mullion_container_hook_escapes",
        "Look-ups of driver functions that the library could not answer with its own.",
        COUNTER,
        |c| c.usage.as_ref().ok().map(|u| Shown::Count(u.escapes)),
    ),
    ("mullion_container_hook_foreign", "Slots of the usage file that another library took.", COUNTER, |c| {
        c.usage.as_ref().ok().map(|u| Shown::Count(u.foreign))
    }),
];

impl Exporter {
    fn ours(
        &self,
        encoder: &mut DescriptorEncoder<'_>,
        snapshot: &Snapshot,
        slices: &[Slice<'_>],
    ) -> fmt::Result {
        let node = self.node.as_str();
        for (name, help, kind, number) in SLICES {
            let mut family = family(encoder, name, help, *kind)?;
            for slice in slices {
                let Some(number) = number(slice) else { continue };
                let c = slice.container;
                let labels = [
                    ("node", node),
                    ("namespace", &c.pod.namespace),
                    ("pod", &c.pod.name),
                    ("container", &c.container),
                    ("device_uuid", slice.card),
                ];
                family.add(labels, number)?;
            }
        }
        for (name, help, kind, number) in CONTAINERS {
            let mut family = family(encoder, name, help, *kind)?;
            for c in &snapshot.containers {
                let Some(number) = number(c) else { continue };
                let labels = [
                    ("node", node),
                    ("namespace", c.pod.namespace.as_str()),
                    ("pod", &c.pod.name),
                    ("container", &c.container),
                ];
                family.add(labels, number)?;
            }
        }
        let help = "Usage files that cannot be read, by code.";
        let mut unreadable = family(encoder, "mullion_usage_files_unreadable", help, GAUGE)?;
        let mut codes: Vec<&str> =
            snapshot.containers.iter().filter_map(|c| c.usage.as_ref().err().copied()).collect();
        codes.sort_unstable();
        for code in codes.chunk_by(|a, b| a == b) {
            let name = code.first().copied().unwrap_or_default();
            let count = u64::try_from(code.len()).unwrap_or(u64::MAX);
            unreadable.add([("node", node), ("code", name)], Whole(count))?;
        }
        let cards: [OfCard; 4] = [
            ("mullion_card_memory_bytes", "Memory of the card.", |c| Some(c.memory?.0)),
            ("mullion_card_memory_used_bytes", "Memory of the card in use by anybody.", |c| {
                Some(c.memory?.1)
            }),
            ("mullion_card_utilization_percent", "Share of time in which any kernel was on the card.", |c| {
                Some(c.utilization?.0.into())
            }),
            (
                "mullion_card_memory_utilization_percent",
                "Share of time in which the card's memory was read or written.",
                |c| Some(c.utilization?.1.into()),
            ),
        ];
        for (name, help, number) in cards {
            let mut family = family(encoder, name, help, GAUGE)?;
            for card in &snapshot.cards {
                let Some(number) = number(card) else { continue };
                let index = card.index.to_string();
                let labels = [
                    ("node", node),
                    ("device_uuid", card.uuid.as_str()),
                    ("device_index", &index),
                    ("device_type", &card.model),
                ];
                family.add(labels, Whole(number))?;
            }
        }
        let help = "When containers were last looked at; 0 is never.";
        let mut last = family(encoder, "mullion_monitor_last_look_timestamp_seconds", help, GAUGE)?;
        last.add([("node", node)], seconds(snapshot.unix_ns))
    }

    fn hami(
        &self,
        encoder: &mut DescriptorEncoder<'_>,
        snapshot: &Snapshot,
        slices: &[Slice<'_>],
    ) -> fmt::Result {
        let hosts: [(OfCard, bool); 3] = [
            (
                ("hami_host_gpu_memory_used_bytes", "HAMi: memory of the card in use.", |c| {
                    Some(c.memory?.1)
                }),
                true,
            ),
            (
                ("hami_host_gpu_utilization_ratio", "HAMi: utilization of the card, 0 to 100.", |c| {
                    Some(c.utilization?.0.into())
                }),
                true,
            ),
            (
                (
                    "hami_host_gpu_memory_controller_utilization_ratio",
                    "HAMi: utilization of the card's memory controller, 0 to 100.",
                    |c| Some(c.utilization?.1.into()),
                ),
                false,
            ),
        ];
        for ((name, help, number), with_node) in hosts {
            let mut family = family(encoder, name, help, GAUGE)?;
            for card in &snapshot.cards {
                let Some(number) = number(card) else { continue };
                let (index, kind) = (card.index.to_string(), format!("NVIDIA-{}", card.model));
                let rest =
                    [("device_index", index.as_str()), ("device_uuid", &card.uuid), ("device_type", &kind)];
                let [a, b, c] = rest;
                if with_node {
                    family.add([ZONE, ("node", &self.node), a, b, c], Whole(number))?;
                } else {
                    family.add([ZONE, a, b, c], Whole(number))?;
                }
            }
        }
        for (name, help, number) in OF_HAMI {
            let mut family = family(encoder, name, help, GAUGE)?;
            for slice in slices {
                let Some(number) = number(slice, snapshot.unix_ns) else { continue };
                let c = slice.container;
                let labels = [
                    ZONE,
                    ("namespace", &c.pod.namespace),
                    ("pod", &c.pod.name),
                    ("container", &c.container),
                    ("vdevice_index", &slice.place),
                    ("device_uuid", slice.short_card()),
                ];
                family.add(labels, Whole(number))?;
            }
        }
        Ok(())
    }

    fn legacy(
        &self,
        encoder: &mut DescriptorEncoder<'_>,
        snapshot: &Snapshot,
        slices: &[Slice<'_>],
    ) -> fmt::Result {
        let hosts: [OfCard; 2] = [
            ("HostGPUMemoryUsage", "HAMi before v2.10: memory of the card in use.", |c| Some(c.memory?.1)),
            ("HostCoreUtilization", "HAMi before v2.10: utilization of the card, 0 to 100.", |c| {
                Some(c.utilization?.0.into())
            }),
        ];
        for (name, help, number) in hosts {
            let mut family = family(encoder, name, help, GAUGE)?;
            for card in &snapshot.cards {
                let Some(number) = number(card) else { continue };
                let (index, kind) = (card.index.to_string(), format!("NVIDIA-{}", card.model));
                let labels = [
                    ZONE,
                    ("nodeid", self.node.as_str()),
                    ("deviceidx", &index),
                    ("deviceuuid", &card.uuid),
                    ("devicetype", &kind),
                ];
                family.add(labels, Whole(number))?;
            }
        }
        for (name, help, number) in OF_OLD_HAMI {
            let mut family = family(encoder, name, help, GAUGE)?;
            for slice in slices {
                let Some(number) = number(slice, snapshot.unix_ns) else { continue };
                family.add(old_labels(slice), Whole(number))?;
            }
        }
        let help = "HAMi before v2.10: memory that the container holds of the card, its parts in the labels.";
        let mut family = family(encoder, "Device_memory_desc_of_container", help, GAUGE)?;
        for slice in slices {
            let Some(usage) = slice.usage else { continue };
            let [zone, namespace, pod, container, place, card] = old_labels(slice);
            let (context, module, data) =
                (usage.context.to_string(), usage.module.to_string(), usage.buffer.to_string());
            let parts =
                [("context", context.as_str()), ("module", &module), ("data", &data), ("offset", "0")];
            let [context, module, data, offset] = parts;
            let labels = [zone, namespace, pod, container, place, card, context, module, data, offset];
            family.add(labels, Whole(usage.used))?;
        }
        Ok(())
    }
}

/// A metric of HAMi's about a card of a container, with the time of the look.
type OfHami = (&'static str, &'static str, fn(&Slice<'_>, u64) -> Option<u64>);

/// HAMi's of today.
const OF_HAMI: &[OfHami] = &[
    ("hami_vgpu_memory_used_bytes", "HAMi: memory that the container holds of the card.", |s, _| {
        s.usage.map(|u| u.used)
    }),
    ("hami_vgpu_memory_limit_bytes", "HAMi: memory that the container may hold of the card.", |s, _| {
        Some(s.limit)
    }),
    ("hami_container_device_memory_bytes", "HAMi: memory that the container holds of the card.", |s, _| {
        s.usage.map(|u| u.used)
    }),
    ("hami_container_device_utilization_ratio", "HAMi: utilization by the container, 0 to 100.", |s, _| {
        s.busy_percent()
    }),
    (
        "hami_container_last_kernel_elapsed_seconds",
        "HAMi: time since the container's last launch; absent before the first one.",
        since_launch,
    ),
    ("hami_vgpu_memory_context_bytes", "HAMi: memory of contexts.", |s, _| s.usage.map(|u| u.context)),
    ("hami_vgpu_memory_module_bytes", "HAMi: memory of modules.", |s, _| s.usage.map(|u| u.module)),
    ("hami_vgpu_memory_buffer_bytes", "HAMi: memory of allocations.", |s, _| s.usage.map(|u| u.buffer)),
];

/// HAMi's of old.
const OF_OLD_HAMI: &[OfHami] = &[
    (
        "vGPU_device_memory_usage_in_bytes",
        "HAMi before v2.10: memory that the container holds of the card.",
        |s, _| s.usage.map(|u| u.used),
    ),
    (
        "vGPU_device_memory_limit_in_bytes",
        "HAMi before v2.10: memory that the container may hold of the card.",
        |s, _| Some(s.limit),
    ),
    (
        "Device_utilization_desc_of_container",
        "HAMi before v2.10: utilization by the container, 0 to 100.",
        |s, _| s.busy_percent(),
    ),
    (
        "Device_last_kernel_of_container",
        "HAMi before v2.10: time since the container's last launch.",
        since_launch,
    ),
];

fn since_launch(slice: &Slice<'_>, now_ns: u64) -> Option<u64> {
    let last = slice.usage.map(|u| u.last_launch_ns).filter(|at| *at > 0)?;
    Some(now_ns.saturating_sub(last) / 1_000_000_000)
}

fn old_labels<'a>(slice: &'a Slice<'_>) -> [(&'static str, &'a str); 6] {
    let c = slice.container;
    [
        ZONE,
        ("podnamespace", &c.pod.namespace),
        ("podname", &c.pod.name),
        ("ctrname", &c.container),
        ("vdeviceid", &slice.place),
        ("deviceuuid", slice.short_card()),
    ]
}
