//! What a launch on one card has to do with: the card's words in the two files.

use core::sync::atomic::AtomicU8;
use core::sync::atomic::Ordering::Relaxed;

use mullion_pace::policy::{self, Policy};
use mullion_pace::{Bucket, Terms};

use super::events::device_count;
use crate::container::{Card, CardWords, Container, HamiTail, Page, PageCard};

/// A card of the container, as a launch sees it.
pub(crate) trait Lane: Copy {
    /// The card's place in the container.
    fn index(&self) -> usize;
    fn page(&self) -> &Page;
    fn card(&self) -> &PageCard;
    fn words(&self) -> &CardWords;
    fn tail(&self) -> &HamiTail;
    /// The limits come from the environment: no agent writes the page, and HAMi's monitor may write the file.
    fn by_hand(&self) -> bool;
    /// The user's where the limits are given by hand; with a page the agent knows it, and says so by the switch.
    fn policy(&self) -> Policy;

    /// Whether launches have to pay now.
    #[inline]
    fn is_limited(&self) -> bool {
        let rate = self.card().rate.load(Relaxed);
        Terms { scale: 1, rate, burst: 0 }.limited()
            && self.policy().throttles(self.tail().utilization_switch.load(Relaxed))
    }

    /// The terms of a launch now; `None` = no limit.
    #[inline]
    fn terms(&self) -> Option<Terms> {
        self.is_limited().then(|| Terms {
            scale: self.card().scale.load(Relaxed),
            rate: self.card().rate.load(Relaxed),
            burst: self.card().burst.load(Relaxed),
        })
    }

    #[inline]
    fn bucket(&self) -> Bucket<'_> {
        Bucket::over(&self.words().tat)
    }

    /// Whether the gate is closed `waited_ns` after a launch came to it.
    fn is_gated(&self, now_ns: u64, waited_ns: u64) -> bool {
        let recent = self.tail().recent_kernel.load(Relaxed);
        let age = match (self.by_hand(), self.page().heartbeat.load(Relaxed)) {
            (true, _) => None,
            // Never looked after: as good as dead.
            (false, 0) => Some(u64::MAX),
            (false, beat) => Some(now_ns.saturating_sub(beat)),
        };
        policy::gate_closed(recent, age, waited_ns)
    }
}

/// A card of this process's container.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Own<'a> {
    container: &'a Container,
    card: &'a Card,
}

impl Lane for Own<'_> {
    #[inline]
    fn index(&self) -> usize {
        usize::from(self.card.index)
    }
    #[inline]
    fn page(&self) -> &Page {
        self.container.page
    }
    #[inline]
    fn card(&self) -> &PageCard {
        self.card.terms
    }
    #[inline]
    fn words(&self) -> &CardWords {
        self.card.words
    }
    #[inline]
    fn tail(&self) -> &HamiTail {
        self.container.hami()
    }
    #[inline]
    fn by_hand(&self) -> bool {
        self.container.by_hand
    }
    #[inline]
    fn policy(&self) -> Policy {
        self.container.policy
    }
}

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

impl<'a> Own<'a> {
    /// The lane of the current card, where that is one of the container's. The driver is asked only where there is a
    /// choice.
    #[inline]
    pub(crate) fn current(container: &'a Container) -> Option<Self> {
        let card = match ONLY.load(Relaxed) {
            NOT_ASKED => only(container),
            MANY => container.current_card(),
            index => container.card_at(index),
        };
        card.map(|card| Self { container, card })
    }

    /// The lanes of all cards.
    pub(crate) fn all(container: &'a Container) -> impl Iterator<Item = Self> {
        container.cards().map(move |card| Self { container, card })
    }
}
