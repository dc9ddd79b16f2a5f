//! What a pod's containers take from a card, and the one rule for what a card bears.
//!
//! The ledger's fold and the search for a placement share this file, so that a placement which was found is one
//! that the fold lets stand.

use crate::facts::{AllocationFact, CardFact, CardMode, ContainerKind};
use crate::refusal::Code;
use crate::units::{CoreShare, GpuUuid, Mib};

/// Total SM percent of a card whose compute is neither scaled up nor down. Only on such a card does a share of
/// 100 mean "alone on the card" (as in HAMi: with core scaling, 100 is one share among several).
pub(crate) const UNSCALED_CORES: u32 = 100;

/// The phases of a pod, each a list of positions in the container list: for every ordinary init container
/// itself and the sidecars declared before it; last of all, every sidecar and app container.
///
/// The last phase is always there, even when it is empty.
pub(crate) fn phases(kinds: impl Iterator<Item = ContainerKind>) -> Vec<Vec<usize>> {
    let mut phases = Vec::new();
    let (mut sidecars, mut lasting) = (Vec::new(), Vec::new());
    for (position, kind) in kinds.enumerate() {
        match kind {
            ContainerKind::Init => {
                let mut phase: Vec<usize> = sidecars.clone();
                phase.push(position);
                phases.push(phase);
                continue;
            }
            ContainerKind::Sidecar => sidecars.push(position),
            ContainerKind::App => {}
        }
        lasting.push(position);
    }
    phases.push(lasting);
    phases
}

/// What runs on one card at one time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Sum {
    /// MiB.
    pub(crate) memory: u64,
    /// Percent of SMs.
    pub(crate) cores: u64,
    /// Containers.
    pub(crate) slots: u64,
    /// Containers with a share of 100.
    pub(crate) whole: u64,
    /// Containers with a share of 0.
    pub(crate) best_effort: u64,
}

impl Sum {
    /// One more container. Saturates: a sum past `u64::MAX` fits nowhere in any case.
    pub(crate) fn plus(mut self, memory: Mib, cores: CoreShare) -> Self {
        self.memory = self.memory.saturating_add(memory.0);
        self.cores = self.cores.saturating_add(u64::from(cores.get()));
        self.slots = self.slots.saturating_add(1);
        self.whole += u64::from(cores == CoreShare::WHOLE);
        self.best_effort += u64::from(cores == CoreShare::BEST_EFFORT);
        self
    }

    /// The larger of both, per dimension: the peak of two phases.
    pub(crate) fn peak(self, other: Self) -> Self {
        Self {
            memory: self.memory.max(other.memory),
            cores: self.cores.max(other.cores),
            slots: self.slots.max(other.slots),
            whole: self.whole.max(other.whole),
            best_effort: self.best_effort.max(other.best_effort),
        }
    }

    /// Both at the same time.
    pub(crate) fn and(self, other: Self) -> Self {
        Self {
            memory: self.memory.saturating_add(other.memory),
            cores: self.cores.saturating_add(other.cores),
            slots: self.slots.saturating_add(other.slots),
            whole: self.whole.saturating_add(other.whole),
            best_effort: self.best_effort.saturating_add(other.best_effort),
        }
    }
}

/// How many containers a card takes at one time.
pub(crate) fn slot_limit(card: &CardFact) -> u64 {
    match card.mode {
        CardMode::Shared => u64::from(card.slots),
        CardMode::Exclusive => u64::from(card.slots.min(1)),
        CardMode::Mig => 0,
    }
}

/// Whether both together are more than `limit`; a sum past 64 bits always is.
fn over(used: u64, more: u64, limit: u64) -> bool {
    used.checked_add(more).is_none_or(|sum| sum > limit)
}

/// What a card lacks: the rule that was hit, how much was asked and how much is left (in the rule's unit).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Short {
    pub(crate) code: Code,
    pub(crate) asked: u64,
    pub(crate) free: u64,
}

/// Whether `card` bears one phase of a pod beside what the other pods on it (`used`) take at their peak.
///
/// Every condition here is symmetric: a set of pods that was let in one after the other is let in again in any
/// other order. The fold depends on that, since pods are prepared in another order than they were decided in.
pub(crate) fn bears(card: &CardFact, used: &Sum, phase: &Sum) -> Result<(), Short> {
    let short =
        |code, asked, limit: u64, taken: u64| Err(Short { code, asked, free: limit.saturating_sub(taken) });
    if phase.slots == 0 {
        return Ok(());
    }
    if card.mode == CardMode::Mig {
        return short(Code::CardsInMigMode, phase.slots, 0, 0);
    }
    let slots = slot_limit(card);
    if card.mode == CardMode::Exclusive && over(used.slots, phase.slots, slots) {
        return short(Code::CardExclusive, phase.slots, slots, used.slots);
    }
    if over(used.slots, phase.slots, slots) {
        return short(Code::CardSlotsTaken, phase.slots, slots, used.slots);
    }
    let alone = (phase.whole > 0 && (used.slots > 0 || phase.slots > 1)) || used.whole > 0;
    if card.cores == UNSCALED_CORES && alone {
        return short(Code::CardExclusive, phase.slots, 1, used.slots);
    }
    let memory = card.memory.0;
    if over(used.memory, phase.memory, memory) {
        return short(Code::MemoryShort, phase.memory, memory, used.memory);
    }
    let cores = u64::from(card.cores);
    if over(used.cores, phase.cores, cores) {
        return short(Code::CoresShort, phase.cores, cores, used.cores);
    }
    Ok(())
}

/// Whether a container that takes what others leave would find anything left.
///
/// Asked of newcomers only, and never by the fold: a best-effort pod keeps its place when reserved shares fill
/// the card later, as in HAMi.
pub(crate) fn leaves_compute(card: &CardFact, used: &Sum, phase: &Sum) -> Result<(), Short> {
    let taken = used.cores.saturating_add(phase.cores);
    if phase.best_effort > 0 && taken >= u64::from(card.cores) {
        return Err(Short { code: Code::CoresShort, asked: 1, free: 0 });
    }
    Ok(())
}

/// One allocation's load on one card.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Load {
    pub(crate) uuid: GpuUuid,
    /// Every phase that still counts and uses the card.
    pub(crate) phases: Vec<Sum>,
    /// Their peak, which is what is charged.
    pub(crate) peak: Sum,
}

/// One allocation's load on its node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Footprint {
    pub(crate) loads: Vec<Load>,
    /// Device ids that the kubelet gives the pod. It keeps those of finished init containers until the pod
    /// ends, so this does not shrink with `init_done`.
    pub(crate) tokens: u64,
}

/// Works out what `allocation` takes.
pub(crate) fn footprint(allocation: &AllocationFact) -> Footprint {
    let containers = &allocation.containers;
    let phases = phases(containers.iter().map(|c| c.kind));
    let devices = |phase: &Vec<usize>| {
        phase.iter().map(|&c| containers[c].devices.len() as u64).fold(0u64, u64::saturating_add)
    };
    let tokens = phases.iter().map(devices).max().unwrap_or(0);
    let counted = if allocation.init_done { &phases[phases.len() - 1..] } else { &phases[..] };
    let mut loads: Vec<Load> = Vec::new();
    // Cards stay with the allocation even when no phase that still counts uses them: a card that went away
    // makes the allocation void, whichever of its containers it was for.
    for device in containers.iter().flat_map(|c| &c.devices) {
        if !loads.iter().any(|l| l.uuid == device.uuid) {
            loads.push(Load { uuid: device.uuid.clone(), phases: Vec::new(), peak: Sum::default() });
        }
    }
    for load in &mut loads {
        for phase in counted {
            let sum = phase
                .iter()
                .flat_map(|&c| &containers[c].devices)
                .filter(|d| d.uuid == load.uuid)
                .fold(Sum::default(), |sum, d| sum.plus(d.memory, d.cores));
            if sum.slots > 0 {
                load.phases.push(sum);
                load.peak = load.peak.peak(sum);
            }
        }
    }
    Footprint { loads, tokens }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn phases_follow_the_order_of_declaration() {
        use ContainerKind::{App, Init, Sidecar};
        for (case, kinds, want) in [
            ("one app", vec![App], vec![vec![0]]),
            ("two apps run together", vec![App, App], vec![vec![0, 1]]),
            ("inits run one by one", vec![Init, Init, App], vec![vec![0], vec![1], vec![2]]),
            (
                "a sidecar stays for what comes after it",
                vec![Init, Sidecar, Init, App],
                vec![vec![0], vec![1, 2], vec![1, 3]],
            ),
            ("no app runs before the inits, wherever it is listed", vec![App, Init], vec![vec![1], vec![0]]),
            ("init only", vec![Init], vec![vec![0], vec![]]),
            ("nothing", vec![], vec![vec![]]),
        ] {
            assert_eq!(phases(kinds.into_iter()), want, "{case}");
        }
    }
}
