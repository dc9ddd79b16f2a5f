//! What a launch on one card has to do with: the card's words in the two files.

use core::ptr::with_exposed_provenance_mut;
use core::sync::atomic::Ordering::Relaxed;
use core::sync::atomic::{AtomicU8, AtomicU32, AtomicU64};

use mullion_pace::policy::{self, JUST_LAUNCHED, Policy};
use mullion_pace::{Bucket, Terms};

use super::PACER;
use super::calls::PER_THREAD;
use super::events::{Handle, context_of, current_device, device_count};
use super::pacer::STAMP_EVERY;
use crate::container::{Card, CardWords, Container, HamiTail, Page, PageCard};
use crate::memory;

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
        self.is_limited().then(|| self.page_terms())
    }

    /// The terms on the page, whether they are held to now or not.
    #[inline]
    fn page_terms(&self) -> Terms {
        Terms {
            scale: self.card().scale.load(Relaxed),
            rate: self.card().rate.load(Relaxed),
            burst: self.card().burst.load(Relaxed),
        }
    }

    #[inline]
    fn bucket(&self) -> Bucket<'_> {
        Bucket::over(&self.words().tat)
    }

    /// Whether the gate is closed `waited_ns` after a launch came to it.
    fn is_gated(&self, now_ns: u64, waited_ns: u64) -> bool {
        is_gated(self, now_ns, waited_ns)
    }
}

/// As [`Lane::is_gated`].
pub(super) fn is_gated(lane: &impl Lane, now_ns: u64, waited_ns: u64) -> bool {
    let recent = lane.tail().recent_kernel.load(Relaxed);
    let age = match (lane.by_hand(), lane.page().heartbeat.load(Relaxed)) {
        (true, _) => None,
        // Never looked after: as good as dead.
        (false, 0) => Some(u64::MAX),
        (false, beat) => Some(now_ns.saturating_sub(beat)),
    };
    policy::gate_closed(recent, age, waited_ns)
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

/// The place of the only card of this process, or one of those below. A forked child has the same cards.
static ONLY: AtomicU8 = AtomicU8::new(NOT_ASKED);
const NOT_ASKED: u8 = u8::MAX;
/// A choice of cards, of which at least one has a share of compute.
const SHARES: u8 = u8::MAX - 1;
/// A choice of cards without any.
const NO_SHARES: u8 = u8::MAX - 2;

static CALM: Calm = Calm::new();

/// CUDA's number of the card that was current first, and behind it, in the last byte, its place. Never changed, so that
/// threads with a card each do not write it by turns.
static FIRST: AtomicU32 = AtomicU32::new(u32::MAX);

/// The current card. Most programs use one, whatever they see: told by a comparison, which the processor foresees, all
/// that follows need not wait for the driver's answer.
#[inline]
fn current(container: &Container) -> Option<&Card> {
    let device = current_device()?;
    let first = FIRST.load(Relaxed);
    if device.cast_unsigned() == first >> 8 {
        container.card_at(first.to_le_bytes()[0])
    } else {
        container.card(device)
    }
}

/// The card that a launch into `stream` runs on: the stream's, whatever is current. The driver lets a thread launch there that
/// has no current context, or another card's.
fn card_of(container: &Container, stream: Handle) -> Option<&Card> {
    if stream <= PER_THREAD {
        return current(container);
    }
    let card = match context_of(stream) {
        Some(context) => memory::card_of_context(container, context as u64),
        // The driver does not say it of a green context's.
        None => memory::device_by_stream(with_exposed_provenance_mut(stream))
            .and_then(|device| container.card(device)),
    };
    card.or_else(|| current(container))
}

/// A launch's card where there is a choice, and the launch has to do with it.
#[inline(never)]
fn chosen(container: &Container, choice: u8, stream: Handle) -> Option<&Card> {
    match choice {
        NO_SHARES if CALM.lets_pass(container.page, container.hami()) => None,
        NO_SHARES => look(container, stream),
        SHARES => card_of(container, stream),
        _ => only(container, stream),
    }
}

/// Finds out whether there is a choice of cards; the launch's one.
#[cold]
fn only(container: &Container, stream: Handle) -> Option<&Card> {
    let mut cards = container.cards();
    let only = cards.next().filter(|_| cards.next().is_none() && device_count() == Some(1));
    let choice = if has_shares(container) { SHARES } else { NO_SHARES };
    let current = container.current_card();
    if let Some(card) = current
        && let Some(device) = container.device(card)
    {
        FIRST.store(device.cast_unsigned() << 8 | u32::from(card.index), Relaxed);
    }
    ONLY.store(only.map_or(choice, |card| card.index), Relaxed);
    only.or_else(|| card_of(container, stream))
}

fn has_shares(container: &Container) -> bool {
    container.cards().any(|card| Own { container, card }.page_terms().limited())
}

/// A launch has to do with its card, where there is a choice and no card has a share.
#[cold]
fn look(container: &Container, stream: Handle) -> Option<&Card> {
    if has_shares(container) {
        // Limits by hand can be others in a forked child.
        ONLY.store(SHARES, Relaxed);
    }
    let card = card_of(container, stream)?;
    if CALM.look(container.page.heartbeat.load(Relaxed)) {
        PACER.stamp_next(card.index);
    }
    Some(card)
}

/// The launches of a process that has a choice of cards and a share of none: only for a stamp has the card to be known, and
/// to ask the driver for it costs more than all else. Counted with plain loads and stores, as the stamps are.
#[derive(Debug)]
pub(super) struct Calm {
    /// The agent's heartbeat at the last look.
    beat: AtomicU64,
    /// Launches that may pass until the next one is looked at.
    left: AtomicU32,
    /// Launches that are still looked at one by one since the heartbeat moved: most likely there is one on each card in
    /// use among them.
    close: AtomicU32,
}

/// See [`Calm::close`].
const CLOSE: u32 = 32;
/// As [`STAMP_EVERY`]: of cards that are used in turns each gets its stamp.
const PASS: u32 = STAMP_EVERY - 1;

impl Calm {
    pub(super) const fn new() -> Self {
        Self { beat: AtomicU64::new(0), left: AtomicU32::new(0), close: AtomicU32::new(0) }
    }

    /// Whether a launch has nothing to do with its card.
    #[inline]
    pub(super) fn lets_pass(&self, page: &Page, tail: &HamiTail) -> bool {
        let left = self.left.load(Relaxed);
        let calm = left != 0
            && tail.recent_kernel.load(Relaxed) == JUST_LAUNCHED
            && page.heartbeat.load(Relaxed) == self.beat.load(Relaxed);
        if calm {
            self.left.store(left - 1, Relaxed);
        }
        calm
    }

    /// Of a launch that was not let pass: whether its card's stamps are to be renewed although the heartbeat stands still.
    pub(super) fn look(&self, beat: u64) -> bool {
        let moved = self.beat.swap(beat, Relaxed) != beat;
        let close = if moved { CLOSE } else { self.close.load(Relaxed) };
        self.close.store(close.saturating_sub(1), Relaxed);
        self.left.store(if close == 0 { PASS } else { 0 }, Relaxed);
        close == 0
    }
}

impl<'a> Own<'a> {
    /// The lane of the current card, where that is one of the container's and a launch would have to do with it.
    pub(crate) fn current(container: &'a Container) -> Option<Self> {
        Self::of(container, 0)
    }

    /// The lane of the card that a launch into `stream` runs on, where that is one of the container's and the launch has to do
    /// with it. The driver is asked only where there is a choice.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a call here costs as much as all that it does")]
    pub(crate) fn of(container: &'a Container, stream: Handle) -> Option<Self> {
        let only = ONLY.load(Relaxed);
        let card = match only {
            SHARES if stream <= PER_THREAD => current(container),
            SHARES | NO_SHARES | NOT_ASKED => chosen(container, only, stream),
            index => container.card_at(index),
        };
        card.map(|card| Self { container, card })
    }

    /// The lanes of all cards.
    pub(crate) fn all(container: &'a Container) -> impl Iterator<Item = Self> {
        container.cards().map(move |card| Self { container, card })
    }
}
