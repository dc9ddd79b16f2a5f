//! The cards of one node and what a pod's containers would add to them, phase by phase.

use crate::charge::{Short, Sum, bears, leaves_compute};
use crate::facts::{CardFact, ContainerKind};
use crate::ledger::Card;
use crate::refusal::Code;
use crate::request::{ContainerRequest, MemoryAsk, Policy};
use crate::score::Fill;
use crate::units::Mib;

use super::Shape;

/// Most steps of the exact search on one node. It runs only for pods whose containers fit one by one and not in
/// the first way that was tried; past this the node is refused although a way might exist. A bound for pods made
/// to be hard (15 containers over 8 uneven cards reach it, in 0.3 ms): filter asks a thousand nodes in one call.
const SEARCH_STEPS: usize = 2048;
/// Most work of that search, as steps times cards times phases, which is what a step costs: a pod with many phases
/// gets fewer steps. 2,048 steps over 16 cards with four phases.
const SEARCH_WORK: usize = SEARCH_STEPS * 64;

/// What `request` would be given on `card`.
pub(super) fn memory_on(card: &CardFact, request: &ContainerRequest) -> Mib {
    match request.memory {
        MemoryAsk::Mib(memory) => memory,
        MemoryAsk::Percent(percent) => card.memory.share(percent),
    }
}

/// Which rule keeps any newcomer off a card.
pub(super) fn closed(card: &CardFact) -> Option<Code> {
    if !card.healthy {
        Some(Code::CardsUnhealthy)
    } else if card.mode == crate::facts::CardMode::Mig {
        Some(Code::CardsInMigMode)
    } else if card.cordoned {
        Some(Code::CardsClosed)
    } else {
        None
    }
}

/// A trial placement of one pod on one node.
pub(super) struct Board<'a> {
    shape: &'a Shape<'a>,
    /// The cards that newcomers may have.
    pub(super) cards: Vec<&'a Card>,
    /// What the pod adds, by card and phase.
    added: Vec<Sum>,
    /// Chosen cards, by container; positions in `cards`.
    pub(super) chosen: Vec<Vec<usize>>,
    /// Steps of the search that are left.
    steps: usize,
}

impl<'a> Board<'a> {
    pub(super) fn new(shape: &'a Shape<'a>, cards: &'a [Card]) -> Self {
        let cards: Vec<&Card> = cards.iter().filter(|c| closed(&c.fact).is_none()).collect();
        let added = vec![Sum::default(); cards.len() * shape.phases.len()];
        let chosen = vec![Vec::new(); shape.request.containers.len()];
        Self { shape, cards, added, chosen, steps: 0 }
    }

    fn request(&self, container: usize) -> &'a ContainerRequest {
        &self.shape.request.containers[container].request
    }

    fn added(&self, card: usize) -> &[Sum] {
        let phases = self.shape.phases.len();
        &self.added[card * phases..(card + 1) * phases]
    }

    /// The pod's peak on a card so far.
    pub(super) fn peak(&self, card: usize) -> Sum {
        self.added(card).iter().fold(Sum::default(), |peak, sum| peak.peak(*sum))
    }

    /// Whether `container` may go on `card` beside what the trial has placed; the rule that is hit otherwise.
    fn admits(&self, container: usize, card: usize) -> Result<(), Short> {
        let (request, Card { fact, used }) = (self.request(container), self.cards[card]);
        let memory = memory_on(fact, request);
        if memory > fact.memory || memory.0 == 0 {
            return Err(Short { code: Code::CardTooSmall, asked: memory.0.max(1), free: fact.memory.0 });
        }
        let phases = &self.shape.of_container[container];
        phases.iter().try_for_each(|&phase| {
            let sum = self.added(card)[phase].plus(memory, request.cores);
            bears(fact, used, &sum).and_then(|()| leaves_compute(fact, used, &sum))
        })
    }

    fn put(&mut self, container: usize, card: usize) {
        let request = self.request(container);
        let memory = memory_on(&self.cards[card].fact, request);
        let phases = self.shape.phases.len();
        for &phase in &self.shape.of_container[container] {
            let sum = &mut self.added[card * phases + phase];
            *sum = sum.plus(memory, request.cores);
        }
        self.chosen[container].push(card);
    }

    fn clear(&mut self) {
        self.added.fill(Sum::default());
        for chosen in &mut self.chosen {
            chosen.clear();
        }
    }

    /// The cards that may take `container`, best first.
    ///
    /// Sidecars and apps: by the card policy, counted after the placement. An ordinary init container: where
    /// the pod's peak rises least, then by the policy. Ties: index, then uuid (the order of `cards`).
    fn candidates(&self, container: usize) -> Vec<usize> {
        let request = self.request(container);
        let wish = &self.shape.request.containers[container];
        let rank = |card: usize| {
            let Card { fact, used } = self.cards[card];
            let before = self.peak(card);
            let mut after = before;
            for &phase in &self.shape.of_container[container] {
                after = after.peak(self.added(card)[phase].plus(memory_on(fact, request), request.cores));
            }
            let full = Fill::of_card(fact, &used.and(after)).mean();
            let rise = if wish.kind == ContainerKind::Init {
                full.saturating_sub(Fill::of_card(fact, &used.and(before)).mean())
            } else {
                0
            };
            let by_policy = match self.shape.request.card_policy {
                Policy::Binpack => u64::MAX - full,
                Policy::Spread => full,
            };
            (rise, by_policy)
        };
        let admitted = (0..self.cards.len()).filter(|&card| self.admits(container, card).is_ok());
        let mut ranked: Vec<_> = admitted.map(|card| (rank(card), card)).collect();
        ranked.sort_unstable();
        ranked.into_iter().map(|(_, card)| card).collect()
    }

    /// Places container after container on the best cards; false when one finds too few.
    pub(super) fn greedy(&mut self) -> bool {
        for &container in &self.shape.order {
            let count = self.request(container).count as usize;
            let candidates = self.candidates(container);
            if candidates.len() < count {
                return false;
            }
            for &card in &candidates[..count] {
                self.put(container, card);
            }
        }
        true
    }

    /// Tries every way, best cards first; false when there is none, or none was found in time.
    pub(super) fn exact(&mut self) -> bool {
        self.clear();
        self.steps = (SEARCH_WORK / self.added.len().max(1)).min(SEARCH_STEPS);
        self.enough_in_sum() && self.extend(0)
    }

    /// A necessary condition that costs little: each phase as a whole against what the cards have left.
    fn enough_in_sum(&self) -> bool {
        let mut free = Sum::default();
        for Card { fact, used } in &self.cards {
            free = free.and(Sum {
                memory: fact.memory.0.saturating_sub(used.memory),
                cores: u64::from(fact.cores).saturating_sub(used.cores),
                slots: crate::charge::slot_limit(fact).saturating_sub(used.slots),
                ..Sum::default()
            });
        }
        self.shape.phases.iter().all(|phase| {
            let mut asked = Sum::default();
            for request in phase.iter().map(|&c| self.request(c)) {
                let memory = match request.memory {
                    MemoryAsk::Mib(memory) => memory,
                    MemoryAsk::Percent(_) => Mib(0),
                };
                for _ in 0..request.count {
                    asked = asked.plus(memory, request.cores);
                }
            }
            asked.memory <= free.memory && asked.cores <= free.cores && asked.slots <= free.slots
        })
    }

    /// Places the containers from position `at` of the order on.
    fn extend(&mut self, at: usize) -> bool {
        let Some(&container) = self.shape.order.get(at) else { return true };
        let candidates = self.candidates(container);
        let mut picked = Vec::with_capacity(self.request(container).count as usize);
        self.combine(at, &candidates, &mut picked)
    }

    /// Chooses the remaining cards of one container out of `candidates`, then goes on with the next container.
    ///
    /// The cards of one container are distinct, so placing it on one does not change whether it may go on
    /// another: the candidates stay valid.
    fn combine(&mut self, at: usize, candidates: &[usize], picked: &mut Vec<usize>) -> bool {
        let container = self.shape.order[at];
        let missing = self.request(container).count as usize - picked.len();
        if missing == 0 {
            let saved = self.added.clone();
            for &card in picked.iter() {
                self.put(container, card);
            }
            if self.extend(at + 1) {
                return true;
            }
            self.added = saved;
            self.chosen[container].clear();
            return false;
        }
        for (position, &card) in candidates.iter().enumerate() {
            if candidates.len() - position < missing {
                return false;
            }
            // A card that is in every way like one that led nowhere leads nowhere.
            if candidates[..position].iter().any(|&tried| self.alike(tried, card)) {
                continue;
            }
            if self.steps == 0 {
                return false;
            }
            self.steps -= 1;
            picked.push(card);
            if self.combine(at, &candidates[position + 1..], picked) {
                return true;
            }
            picked.pop();
        }
        false
    }

    fn alike(&self, a: usize, b: usize) -> bool {
        let (one, other) = (self.cards[a], self.cards[b]);
        let capacity = |c: &CardFact| (c.memory, c.cores, c.slots, c.mode);
        one.used == other.used
            && capacity(&one.fact) == capacity(&other.fact)
            && self.added(a) == self.added(b)
    }

    /// Whether `container` could go on `card` if it were the pod's only one.
    pub(super) fn alone(&self, container: usize, card: usize) -> Result<(), Short> {
        let (request, Card { fact, used }) = (self.request(container), self.cards[card]);
        let memory = memory_on(fact, request);
        if memory > fact.memory || memory.0 == 0 {
            return Err(Short { code: Code::CardTooSmall, asked: memory.0.max(1), free: fact.memory.0 });
        }
        let sum = Sum::default().plus(memory, request.cores);
        bears(fact, used, &sum).and_then(|()| leaves_compute(fact, used, &sum))
    }
}
