//! The schema of a simulated node.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// Events older than the newest this many are forgotten; a reader that far behind has stopped reading.
const EVENTS_KEPT: usize = 256;

/// Type of an XID event (`nvmlEventTypeXidCriticalError`).
const EVENT_XID: u64 = 8;

/// Environment variable that names the folder of a container's device nodes: cards without one are not listed. The host,
/// where it is absent, sees all.
pub const NODES_ENV: &str = "MULLION_FAKE_DEV";

fn nodes_folder() -> Option<&'static Path> {
    static FOLDER: OnceLock<Option<PathBuf>> = OnceLock::new();
    FOLDER.get_or_init(|| std::env::var_os(NODES_ENV).map(PathBuf::from)).as_deref()
}

/// Everything that the driver of one node knows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NodeState {
    /// The node's name.
    pub node: String,
    /// Versions of the driver.
    pub driver: Driver,
    /// The cards by index.
    pub cards: Vec<Card>,
    /// Sequence number that the next event gets; the first is 1.
    pub next_event: u64,
    /// The newest events, oldest first.
    pub events: Vec<Event>,
    /// Errors to answer with, by entry point; `*` stands for every one.
    pub errors: BTreeMap<String, InjectedError>,
    /// Milliseconds that an entry point waits before it answers; `*` stands for every one.
    pub latencies: BTreeMap<String, u64>,
    /// Calls so far by entry point, over all processes. Kept beside the file, filled in by
    /// [`crate::Store::read_with_calls`] only.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub calls: BTreeMap<String, u64>,
}

/// Versions as the system queries tell them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Driver {
    /// Driver version, for example `570.124.06`.
    pub version: String,
    /// Library version, for example `12.570.124.06`.
    pub nvml: String,
    /// CUDA version as 1000 × major + 10 × minor.
    pub cuda: i32,
}

/// One card.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Card {
    /// `GPU-` and a name-based UUID of node and index.
    pub uuid: String,
    /// Place in the device list as long as every card is listed.
    pub index: u32,
    /// Number of the device node `/dev/nvidia<minor>`.
    pub minor: u32,
    /// Product name.
    pub model: String,
    /// `nvmlBrandType_t`.
    pub brand: u32,
    /// `nvmlDeviceArchitecture_t`: 7 Ampere, 9 Hopper, 10 Blackwell.
    pub architecture: u32,
    /// CUDA compute capability, major and minor.
    pub compute: (i32, i32),
    /// Address and ids on the bus.
    pub pci: Pci,
    /// Memory in MiB, the reserved part included.
    pub memory_mib: u64,
    /// MiB that the driver keeps for itself.
    pub reserved_mib: u64,
    /// Streaming multiprocessors.
    pub sms: u32,
    /// CUDA cores.
    pub cores: u32,
    /// NUMA node, or none where the platform does not say.
    pub numa_node: Option<u32>,
    /// CPUs near the card, one bit each, in words of 64.
    pub cpu_affinity: Vec<u64>,
    /// Ways to the other cards.
    pub links: Vec<Link>,
    /// Memory errors.
    pub ecc: Ecc,
    /// MIG mode, grid and instances.
    pub mig: Mig,
    /// Who runs on the card.
    pub processes: Vec<Process>,
    /// Busy time of the memory interface in percent.
    pub memory_utilization: u32,
    /// Core temperature in °C.
    pub temperature_c: u32,
    /// Power draw in mW.
    pub power_mw: u32,
    /// Fallen off the bus: every call about it answers `GPU_IS_LOST`.
    pub lost: bool,
    /// In the device list at all; a lost card stays in it.
    pub present: bool,
}

/// Where a card sits on the bus.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pci {
    /// `domain:bus:device.function` with a domain of eight digits.
    pub bus_id: String,
    /// Device id in the upper, vendor id in the lower half.
    pub device_id: u32,
    /// Subsystem id, packed the same way.
    pub subsystem_id: u32,
}

/// The way to another card.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// Its uuid.
    pub peer: String,
    /// Active NVLink lanes to it; 0 is none.
    pub nvlinks: u32,
    /// `nvmlGpuTopologyLevel_t`: 10 one switch, 20 several, 30 host bridge, 40 NUMA node, 50 system.
    pub level: u32,
}

/// ECC mode and counters.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ecc {
    /// On now.
    pub current: bool,
    /// On after the next reboot.
    pub pending: bool,
    /// Since the driver was loaded.
    pub volatile: EccCounts,
    /// Over the card's life.
    pub aggregate: EccCounts,
}

/// Memory errors so far.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EccCounts {
    /// Single-bit errors.
    pub corrected: u64,
    /// Double-bit errors.
    pub uncorrected: u64,
}

/// MIG on one card.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mig {
    /// Whether the card knows MIG.
    pub capable: bool,
    /// Mode now.
    pub current: bool,
    /// Mode after the next reset.
    pub pending: bool,
    /// Name of the profile table, see [`crate::mig::table`].
    pub table: String,
    /// GPU instance id that was given last; ids go round, so they do not follow from the placement.
    pub last_id: u32,
    /// Live GPU instances by id.
    pub instances: Vec<GpuInstance>,
}

/// Units of a grid: `start` and `size`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Placement {
    /// First unit.
    pub start: u32,
    /// How many.
    pub size: u32,
}

impl Placement {
    /// Whether both take a unit.
    #[must_use]
    pub fn overlaps(self, other: Self) -> bool {
        self.start < other.start.saturating_add(other.size)
            && other.start < self.start.saturating_add(self.size)
    }
}

/// A live GPU instance.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GpuInstance {
    /// Id on its card, 1 to 14.
    pub id: u32,
    /// Id of its profile (`info.id`, not the enum).
    pub profile_id: u32,
    /// Where it sits.
    pub placement: Placement,
    /// Its compute instances by id.
    pub compute: Vec<ComputeInstance>,
}

/// A live compute instance, which is one MIG device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ComputeInstance {
    /// Id in its GPU instance, 0 to 7.
    pub id: u32,
    /// Id of its profile.
    pub profile_id: u32,
    /// Compute slices of the GPU instance.
    pub placement: Placement,
    /// `MIG-` and a name-based UUID of card, GPU instance and compute instance: it recurs with the ids.
    pub uuid: String,
    /// Index of the MIG device under its card; slots that became free are holes until taken again.
    pub slot: u32,
}

/// A process on a card.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Process {
    /// On the host.
    pub pid: u32,
    /// Memory it holds.
    pub memory_mib: u64,
    /// Busy share of the SMs in percent.
    pub sm_percent: u32,
    /// The GPU instance it runs in, if any.
    pub gpu_instance: Option<u32>,
}

/// Something that event sets deliver.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Event {
    /// Grows by one per event of the node.
    pub sequence: u64,
    /// The card's uuid.
    pub card: String,
    /// Event type bit; 8 is a critical XID.
    pub kind: u64,
    /// The XID for XID events.
    pub data: u64,
    /// GPU instance and compute instance, where the driver attributes the event to them.
    pub instance: Option<(u32, u32)>,
}

/// An error that an entry point answers with.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct InjectedError {
    /// `nvmlReturn_t`.
    pub code: u32,
    /// Calls that still get it.
    pub remaining: u64,
}

/// A name-based UUID of ours: same name, same UUID, on every machine.
pub(crate) fn named_uuid(name: &str) -> Uuid {
    Uuid::new_v5(&Uuid::NAMESPACE_DNS, format!("{name}.fake.mullion.io").as_bytes())
}

impl NodeState {
    /// Queues an XID event for everyone who listens to the card.
    pub fn push_xid(&mut self, card: &str, xid: u64, instance: Option<(u32, u32)>) {
        self.events.push(Event {
            sequence: self.next_event,
            card: card.to_owned(),
            kind: EVENT_XID,
            data: xid,
            instance,
        });
        self.next_event += 1;
        let surplus = self.events.len().saturating_sub(EVENTS_KEPT);
        self.events.drain(..surplus);
    }

    /// The card with that uuid.
    #[must_use]
    pub fn card(&self, uuid: &str) -> Option<&Card> {
        self.cards.iter().find(|c| c.uuid == uuid)
    }

    /// The card with that uuid, to be changed.
    pub fn card_mut(&mut self, uuid: &str) -> Option<&mut Card> {
        self.cards.iter_mut().find(|c| c.uuid == uuid)
    }

    /// The cards that the driver lists, in the order of their index; in a container, those whose device nodes it has.
    pub fn listed(&self) -> impl Iterator<Item = &Card> {
        self.listed_in(nodes_folder())
    }

    fn listed_in<'a>(&'a self, nodes: Option<&'a Path>) -> impl Iterator<Item = &'a Card> {
        let seen = move |card: &Card| {
            nodes.is_none_or(|folder| folder.join(format!("nvidia{}", card.minor)).exists())
        };
        self.cards.iter().filter(move |c| c.present && seen(c))
    }

    /// The error that this call has to answer with, counted down; none when none is due.
    pub fn take_error(&mut self, call: &str) -> Option<u32> {
        let key = self.injected_key(call)?;
        let injected = self.errors.get_mut(&key)?;
        let code = injected.code;
        injected.remaining = injected.remaining.saturating_sub(1);
        if injected.remaining == 0 {
            self.errors.remove(&key);
        }
        Some(code)
    }

    /// Whether [`Self::take_error`] would give one.
    #[must_use]
    pub fn has_error(&self, call: &str) -> bool {
        self.injected_key(call).is_some()
    }

    fn injected_key(&self, call: &str) -> Option<String> {
        [call, "*"].into_iter().find(|k| self.errors.contains_key(*k)).map(str::to_owned)
    }

    /// Milliseconds that this call takes.
    #[must_use]
    pub fn latency_ms(&self, call: &str) -> u64 {
        self.latencies.get(call).or_else(|| self.latencies.get("*")).copied().unwrap_or(0)
    }
}

impl Card {
    /// MiB held by processes.
    #[must_use]
    pub fn used_mib(&self) -> u64 {
        let held = self.processes.iter().fold(0_u64, |sum, p| sum.saturating_add(p.memory_mib));
        held.min(self.memory_mib.saturating_sub(self.reserved_mib))
    }

    /// Busy share of the SMs in percent, over all processes.
    #[must_use]
    pub fn utilization(&self) -> u32 {
        self.processes.iter().fold(0_u32, |sum, p| sum.saturating_add(p.sm_percent)).min(100)
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_container_sees_the_cards_whose_nodes_it_has() {
        let state = crate::profile::node("h100x4", "node-a").unwrap();
        let folder = tempfile::tempdir().unwrap();
        for name in ["nvidia2", "nvidia3", "nvidiactl"] {
            std::fs::write(folder.path().join(name), "").unwrap();
        }
        let minors = |nodes| state.listed_in(nodes).map(|c| c.minor).collect::<Vec<_>>();
        assert_eq!(minors(None), [0, 1, 2, 3], "the host");
        assert_eq!(minors(Some(folder.path())), [2, 3]);
    }
}
