//! What a usage file says of a container, in numbers that mean something: each is bounded by what can be true, and what
//! had to be cut is marked. Pure.

use mullion_region::hami::Layout;

use crate::monitor::files::{Foreign, Ours};

/// What a container may use of one card, by its allocation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limit {
    /// Uuid of the card.
    pub card: String,
    /// Memory in bytes.
    pub memory: u64,
    /// Percent of the SMs; 0 is best effort.
    pub cores: u8,
}

/// What a container uses of one card, by its own account.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CardUsage {
    /// Uuid of the card.
    pub card: String,
    /// Memory limit in bytes; 0 = none.
    pub limit: u64,
    /// Limit of the SMs in percent; 100 = none.
    pub cores: u64,
    /// Bytes held by processes that live.
    pub used: u64,
    /// Bytes of contexts among them, where the library tells them apart.
    pub context: u64,
    /// Bytes of modules among them, likewise.
    pub module: u64,
    /// Bytes of allocations among them.
    pub buffer: u64,
    /// Most bytes ever held at once.
    pub peak: u64,
    /// Allocations that the limit refused.
    pub limit_hits: u64,
    /// Allocations within the limit for which the card itself had no memory.
    pub card_full: u64,
    /// Launches that waited.
    pub waits: u64,
    /// How long they did, ns.
    pub wait_ns: u64,
    /// Card time charged to launches, ns.
    pub spent_ns: u64,
    /// First launch, Unix time in ns; 0 = none.
    pub first_launch_ns: u64,
    /// Last launch, likewise.
    pub last_launch_ns: u64,
    /// Utilisation by the account of HAMi's library, percent.
    pub told_sm: u64,
}

/// What a container uses, by its own account.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContainerUsage {
    /// Layout of its file.
    pub layout: Layout,
    /// Processes that ever attached.
    pub attached: u64,
    /// Processes that live.
    pub processes: usize,
    /// Slots that another library took.
    pub foreign: u64,
    /// Look-ups that the library could not answer.
    pub escapes: u64,
    /// Processes that were refused the cards.
    pub refused: u64,
    /// `priority`; 0 is the most urgent.
    pub priority: i32,
    /// `utilization_switch`.
    pub switch: i32,
    /// `recent_kernel`.
    pub recent_kernel: i32,
    /// Its cards in its own order.
    pub cards: Vec<CardUsage>,
    /// A number was larger than can be true, and was cut.
    pub capped: bool,
}

/// Bounds a tenant's numbers.
#[derive(Debug, Default)]
struct Bound {
    capped: bool,
}

impl Bound {
    fn at(&mut self, number: u64, most: u64) -> u64 {
        self.capped |= number > most;
        number.min(most)
    }
}

/// Reads a file of ours. `limits` are by the allocation, never by the file; `memory` is what a card has, where the driver
/// says.
#[must_use]
pub fn of_ours(ours: &Ours, limits: &[Limit], memory: impl Fn(&str) -> Option<u64>) -> ContainerUsage {
    let mut bound = Bound::default();
    let cards = limits.iter().zip(&ours.hot.cards).enumerate().map(|(place, (limit, hot))| {
        // Memory of the host may stand behind a limit, so that it can be above what the card has.
        let most = memory(&limit.card).unwrap_or(0).max(limit.memory);
        let settled = ours.alive.iter().filter_map(|a| a.cards.get(place)).map(|slot| slot.settled);
        let used = bound.at(settled.fold(0, u64::saturating_add), most);
        CardUsage {
            card: limit.card.clone(),
            limit: limit.memory,
            cores: if limit.cores == 0 { 100 } else { limit.cores.into() },
            used,
            buffer: used,
            peak: bound.at(hot.peak, most),
            limit_hits: hot.limit_hits,
            card_full: hot.card_full,
            waits: hot.waits,
            wait_ns: hot.wait_ns,
            spent_ns: hot.spent_ns,
            first_launch_ns: hot.first_launch,
            last_launch_ns: hot.last_launch,
            ..CardUsage::default()
        }
    });
    let cards = cards.collect();
    ContainerUsage {
        layout: ours.header.layout,
        attached: ours.hot.attached,
        processes: ours.alive.len(),
        foreign: ours.hot.foreign,
        escapes: ours.hot.escapes,
        refused: ours.hot.refused,
        priority: ours.header.priority,
        switch: ours.header.utilization_switch,
        recent_kernel: ours.header.recent_kernel,
        cards,
        capped: bound.capped,
    }
}

/// Reads a file of HAMi's library, whose limits nobody else tells us.
#[must_use]
pub fn of_foreign(file: &Foreign, memory: impl Fn(&str) -> Option<u64>) -> ContainerUsage {
    let mut bound = Bound::default();
    let header = &file.header;
    let cards = header.devices.iter().enumerate().map(|(place, device)| {
        let card = device.uuid.as_str();
        let most = memory(card).unwrap_or(u64::MAX).max(device.memory_limit);
        let mut sum = |field: fn(&mullion_region::hami::ProcessCard) -> u64, most: u64| {
            let all = file.processes.iter().filter_map(|p| p.cards.get(place)).map(field);
            bound.at(all.fold(0, u64::saturating_add), most)
        };
        let used = sum(|c| c.used.total, most);
        CardUsage {
            card: card.to_owned(),
            limit: device.memory_limit,
            cores: device.sm_limit.min(100),
            used,
            context: sum(|c| c.used.context, most),
            module: sum(|c| c.used.module, most),
            buffer: sum(|c| c.used.data, most),
            peak: used,
            last_launch_ns: header.last_kernel_time.saturating_mul(1_000_000_000),
            // Each process's is a share of the card, so that they add up to the card at most.
            told_sm: sum(|c| c.sm_util, 100),
            ..CardUsage::default()
        }
    });
    let cards = cards.collect();
    ContainerUsage {
        layout: header.layout,
        attached: u64::from(!file.processes.is_empty()),
        processes: file.processes.len(),
        foreign: 0,
        escapes: 0,
        refused: 0,
        priority: header.priority,
        switch: header.utilization_switch,
        recent_kernel: header.recent_kernel,
        cards,
        capped: bound.capped,
    }
}
