//! What is ours, with the labels `node`, `namespace`, `pod`, `container` and, for a card, `device_uuid`.

use std::fmt;

use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::metrics::MetricType;

use super::{COUNTER, Exporter, GAUGE, Metric, OfCard, Shown, Slice, Whole, families, family, seconds};
use crate::monitor::snapshot::{Container, Snapshot};

/// A [`Metric`] of any slice, however long it lives.
type OfSlice = (&'static str, &'static str, MetricType, fn(&Slice<'_>) -> Option<Shown>);

/// Ours, by card of a container.
const SLICES: &[OfSlice] = &[
    (
        "mullion_container_memory_limit_bytes",
        "Memory that the container may hold of the card; of pods of one name, the last one's, as in all series of containers.",
        GAUGE,
        |s| Some(Shown::Whole(s.limit)),
    ),
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
        "Time of the card charged to launches, less what was paid back to them: an estimate.",
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

fn flag(set: bool) -> Shown {
    Shown::Whole(u64::from(set))
}

/// Ours, by container.
const CONTAINERS: &[Metric<Container>] = &[
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

/// The labels of a container.
fn of_container<'a>(node: &'a str, container: &'a Container) -> [(&'a str, &'a str); 4] {
    [
        ("node", node),
        ("namespace", &container.pod.namespace),
        ("pod", &container.pod.name),
        ("container", &container.container),
    ]
}

impl Exporter {
    pub(super) fn ours(
        &self,
        encoder: &mut DescriptorEncoder<'_>,
        snapshot: &Snapshot,
        slices: &[Slice<'_>],
    ) -> fmt::Result {
        let node = self.node.as_str();
        families(
            encoder,
            SLICES,
            || slices.iter(),
            |slice| {
                let [node, namespace, pod, container] = of_container(node, slice.container);
                [node, namespace, pod, container, ("device_uuid", slice.card)]
            },
        )?;
        families(encoder, CONTAINERS, || snapshot.shown(), |container| of_container(node, container))?;
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
}
