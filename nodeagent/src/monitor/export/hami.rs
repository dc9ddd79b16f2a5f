//! HAMi's names, labels and constant label: those of its monitor (v2.10, `cmd/vGPUmonitor/metrics.go`), and of old.

use std::fmt;

use prometheus_client::encoding::DescriptorEncoder;

use super::{Exporter, GAUGE, OfCard, Slice, Whole, family};
use crate::monitor::snapshot::{Card, Snapshot};

/// Constant label of every metric of HAMi's.
const ZONE: (&str, &str) = ("zone", "vGPU");

impl Exporter {
    pub(super) fn hami(
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
                let (index, kind) = (card.index.to_string(), kind(card));
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

    pub(super) fn legacy(
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
                let (index, kind) = (card.index.to_string(), kind(card));
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

/// HAMi's monitor writes the prefix always, also before a name that begins with it; its scheduler, and so our controller,
/// only where it is missing. Dashboards made for HAMi know both.
fn kind(card: &Card) -> String {
    format!("NVIDIA-{}", card.model)
}

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
