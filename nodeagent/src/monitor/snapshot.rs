//! What the last look saw, for whoever asks until the next one.

use std::collections::{BTreeMap, BTreeSet};

use mullion_audit::PodRef;

use crate::monitor::usage::{ContainerUsage, Limit};
use crate::nvml::sample::CardSample;

/// Everything that the last look saw.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Snapshot {
    /// When it was, Unix time in ns; 0 = never.
    pub unix_ns: u64,
    /// The node's cards, as far as the driver told.
    pub cards: Vec<Card>,
    /// Uuids of all cards that the driver ever told of.
    pub known: BTreeSet<String>,
    /// Containers with a slice, those of HAMi among them.
    pub containers: Vec<Container>,
}

/// A card.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Card {
    /// Its uuid.
    pub uuid: String,
    /// Its place in NVML's list.
    pub index: u32,
    /// Product name.
    pub model: String,
    /// Bytes in all and in use.
    pub memory: Option<(u64, u64)>,
    /// Percent of time in which any kernel ran, and in which memory was read or written.
    pub utilization: Option<(u32, u32)>,
}

impl Card {
    /// What of a sample is shown.
    #[must_use]
    pub fn of(sample: &CardSample) -> Self {
        Self {
            uuid: sample.uuid.clone(),
            index: sample.index,
            model: sample.model.clone(),
            memory: sample.memory,
            utilization: sample.utilization,
        }
    }
}

/// What the driver says of a container on a card.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Measured {
    /// Uuid of the card.
    pub card: String,
    /// Processes of the container that it lists.
    pub processes: usize,
    /// Their host pids, also of those of which it does not say how much they hold.
    pub pids: BTreeSet<u32>,
    /// Their memory in bytes; `None` where it is not known.
    pub bytes: Option<u64>,
    /// The same by host pid.
    pub by_process: BTreeMap<u32, u64>,
    /// Share of time with a kernel of it on the card, in 1/1000; `None` where it is not known.
    pub per_mille: Option<u32>,
    /// Time of the newest measurement (Unix, ns) and percent, by host pid.
    pub sm_by_process: BTreeMap<u32, (u64, u32)>,
    /// Scale of the cost of a launch on the control page, 16.16 fixed point.
    pub scale: Option<u32>,
}

/// A container with a slice.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "none of them excludes another")]
pub struct Container {
    /// Its pod.
    pub pod: PodRef,
    /// Its name.
    pub container: String,
    /// What it may use; `None` for one of HAMi's, whose file alone says so.
    pub limits: Option<Vec<Limit>>,
    /// What its usage file says, or the code of why that tells nothing.
    pub usage: Result<ContainerUsage, &'static str>,
    /// What the driver says, by card.
    pub measured: Vec<Measured>,
    /// It holds more than can be explained.
    pub bypassed: bool,
    /// It is held to its share of the SMs.
    pub throttled: bool,
    /// It waits for a more urgent one.
    pub gated: bool,
    /// Another pod has its pod's name by now, and with it the series.
    pub succeeded: bool,
}

impl Snapshot {
    /// Containers that have series: of pods that had a name one after the other, those of the last one. What is left of
    /// the others shows in the condition `Released` of their allocations.
    pub fn shown(&self) -> impl Iterator<Item = &Container> {
        self.containers.iter().filter(|c| !c.succeeded)
    }
}
