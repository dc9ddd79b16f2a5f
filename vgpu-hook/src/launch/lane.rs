//! What a launch on one card has to do with: the card's words in the two files.

use core::sync::atomic::AtomicU8;
use core::sync::atomic::Ordering::Relaxed;

use mullion_pace::policy::{self, Policy};
use mullion_pace::{Bucket, Terms};

use super::events::device_count;
use crate::container::{Card, CardWords, Container, HamiTail, Page, PageCard};

/// The place of the only card of this process, or one of the two below. A forked child has the same cards.
static ONLY: AtomicU8 = AtomicU8::new(NOT_ASKED);
const NOT_ASKED: u8 = u8::MAX;
const MANY: u8 = u8::MAX - 1;

/// Finds out whether there is a choice of cards; the current one.
#[cold]
fn only(container: &Container) -> Option<&Card> {
    let mut cards = container.cards();
    let only = cards.next().filter(|_| cards.next().is_none() && device_count() == Some(1));
    ONLY.store(only.map_or(MANY, |card| card.index), Relaxed);
    only.or_else(|| container.current_card())
}

/// A card of the container, as a launch sees it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lane<'a> {
    /// The card's place in the container.
    pub(crate) index: usize,
    pub(crate) page: &'a Page,
    pub(crate) card: &'a PageCard,
    pub(crate) words: &'a CardWords,
    pub(crate) tail: &'a HamiTail,
    /// The limits come from the environment: no agent writes the page, and HAMi's monitor may write the file.
    pub(crate) by_hand: bool,
    /// The user's where the limits are given by hand; with a page the agent knows it, and says so by the switch.
    pub(crate) policy: Policy,
}

impl<'a> Lane<'a> {
    #[inline]
    fn of(container: &'a Container, card: &'a Card) -> Self {
        Self {
            index: usize::from(card.index),
            page: container.page,
            card: card.terms,
            words: card.words,
            tail: container.hami(),
            by_hand: container.by_hand,
            policy: container.policy,
        }
    }

    /// The lane of the current card, where that is one of the container's. The driver is asked only where there is a
    /// choice.
    #[inline]
    pub(crate) fn current(container: &'a Container) -> Option<Self> {
        let card = match ONLY.load(Relaxed) {
            NOT_ASKED => only(container),
            MANY => container.current_card(),
            index => container.card_at(index),
        };
        card.map(|card| Self::of(container, card))
    }

    /// The lanes of all cards.
    pub(crate) fn all(container: &'a Container) -> impl Iterator<Item = Self> {
        container.cards().map(|card| Self::of(container, card))
    }

    /// The terms of a launch now; `None` = no limit.
    #[inline]
    pub(super) fn terms(&self) -> Option<Terms> {
        let terms = Terms {
            scale: self.card.scale.load(Relaxed),
            rate: self.card.rate.load(Relaxed),
            burst: self.card.burst.load(Relaxed),
        };
        if !terms.limited() {
            return None;
        }
        self.policy.throttles(self.tail.utilization_switch.load(Relaxed)).then_some(terms)
    }

    #[inline]
    pub(super) fn bucket(&self) -> Bucket<'a> {
        Bucket::over(&self.words.tat)
    }

    /// Whether the gate is closed `waited_ns` after a launch came to it.
    pub(super) fn gated(&self, now_ns: u64, waited_ns: u64) -> bool {
        let recent = self.tail.recent_kernel.load(Relaxed);
        let age = match (self.by_hand, self.page.heartbeat.load(Relaxed)) {
            (true, _) => None,
            // Never looked after: as good as dead.
            (false, 0) => Some(u64::MAX),
            (false, beat) => Some(now_ns.saturating_sub(beat)),
        };
        policy::gate_closed(recent, age, waited_ns)
    }
}
