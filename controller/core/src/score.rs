//! Which node is better, and how good a card was.
//!
//! One measure for both: how full something is after the pod has been placed, as the mean of three parts in
//! percent (slots, memory, compute; HAMi's three, with the pod itself counted in). Under binpack fuller is
//! better, under spread emptier.

use serde::{Deserialize, Serialize};

use crate::charge::{Sum, slot_limit};
use crate::facts::{CardFact, CardMode};
use crate::ledger::CardUsage;
use crate::request::Policy;
use crate::units::GpuUuid;

/// One in fine units, so that two nodes which differ by one small pod still differ.
const WHOLE: u128 = 1_000_000;

/// How full, in percent `0..=100`, rounded down.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Parts {
    /// Shares of cards.
    pub slots: u8,
    /// Memory.
    pub memory: u8,
    /// Compute.
    pub cores: u8,
}

/// How well a node suits a pod, after placing it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct NodeScore {
    /// `0..=100`, higher is better: the mean of the parts under binpack, 100 less that under spread.
    pub value: i64,
    /// How full the node is afterwards.
    pub parts: Parts,
}

/// How well a card suited a pod, after placing it.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct CardScore {
    /// The card.
    pub uuid: GpuUuid,
    /// `0..=100`, higher is better, by the pod's card policy.
    pub value: i64,
    /// How full the card is afterwards.
    pub parts: Parts,
}

/// Used and total of something, per dimension.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Fill {
    used: [u128; 3],
    total: [u128; 3],
}

impl Fill {
    /// One card with `used` on it. A card in MIG mode has nothing that a slice could fill.
    pub(crate) fn of_card(card: &CardFact, used: &Sum) -> Self {
        if card.mode == CardMode::Mig {
            return Self::default();
        }
        Self {
            used: [used.slots.into(), used.memory.into(), used.cores.into()],
            total: [slot_limit(card).into(), card.memory.0.into(), card.cores.into()],
        }
    }

    /// Adds another card.
    pub(crate) fn add(&mut self, other: Self) {
        for part in 0..3 {
            self.used[part] += other.used[part];
            self.total[part] += other.total[part];
        }
    }

    /// Uses more of what is there.
    pub(crate) fn use_more(&mut self, more: &Sum) {
        for (used, more) in self.used.iter_mut().zip([more.slots, more.memory, more.cores]) {
            *used += u128::from(more);
        }
    }

    /// Each part in millionths; a part without capacity counts as empty, one that is over-full as full.
    fn fine(&self) -> [u128; 3] {
        std::array::from_fn(|part| {
            (self.used[part] * WHOLE).checked_div(self.total[part]).unwrap_or(0).min(WHOLE)
        })
    }

    /// The mean of the parts, in millionths.
    pub(crate) fn mean(&self) -> u64 {
        let [slots, memory, cores] = self.fine();
        u64::try_from((slots + memory + cores) / 3).unwrap_or(u64::MAX)
    }

    fn parts(&self) -> Parts {
        let [slots, memory, cores] =
            self.fine().map(|fine| u8::try_from(fine * 100 / WHOLE).unwrap_or(u8::MAX));
        Parts { slots, memory, cores }
    }

    fn value(&self, policy: Policy) -> i64 {
        let mean = i64::try_from(u128::from(self.mean()) * 100 / WHOLE).unwrap_or(100);
        match policy {
            Policy::Binpack => mean,
            Policy::Spread => 100 - mean,
        }
    }

    pub(crate) fn node_score(&self, policy: Policy) -> NodeScore {
        NodeScore { value: self.value(policy), parts: self.parts() }
    }

    pub(crate) fn card_score(&self, policy: Policy, uuid: GpuUuid) -> CardScore {
        CardScore { uuid, value: self.value(policy), parts: self.parts() }
    }
}

/// Scores a node by what is used on its cards once the pod is placed.
#[must_use]
pub fn node_score(policy: Policy, after: &[CardUsage]) -> NodeScore {
    let mut fill = Fill::default();
    for card in after {
        let used = Sum {
            memory: card.used.memory.0,
            cores: card.used.cores,
            slots: card.used.slots,
            ..Sum::default()
        };
        fill.add(Fill::of_card(&card.card, &used));
    }
    fill.node_score(policy)
}
