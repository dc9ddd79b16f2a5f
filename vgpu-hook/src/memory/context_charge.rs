//! What a context is charged that is being made.

use core::ffi::c_uint;
use core::sync::atomic::Ordering::Relaxed;

use mullion_accounting::Entry;

use super::alone::Alone;
use super::contexts::any_context;
use super::looks::From;
use super::measured::Measurement;
use super::taken::{Taken, Trust};
use super::{Kind, charge, key_of};
use crate::container::{self, Card, Container, Notice};
use crate::cuda::{CUcontext, CUdevice, CUresult};
use crate::driver;

/// A context is not believed to take more. The largest seen took 1.1 GiB (eight cards with peer access).
pub(super) const MOST: u64 = 2 << 30;

/// A context that is about to be made.
pub(super) struct Making<'c> {
    container: &'static Container,
    card: &'c Card,
    measurement: Measurement<'c>,
    /// Whether it is the first of this process on the card.
    is_first: bool,
    /// Charged in advance: the size that others of the container had, 0 where that is not known.
    paid: u64,
}

impl<'c> Making<'c> {
    /// Looks at the card. `None` where there is no room for a context.
    pub(super) fn begin(container: &'static Container, card: &'c Card) -> Option<Self> {
        let known = card.words.context_bytes.load(Relaxed).min(MOST);
        let other = any_context(container, card);
        let pay = || {
            let paid = charge::advance(container, card, known);
            if paid.is_none() {
                charge::refused(card);
                tell_if_too_large(container, card, known);
            }
            paid
        };
        let (measurement, paid) = container.books.measuring.begin_context(container, card, other, pay)?;
        let is_first = other.is_none();
        Some(Self { container, card, measurement, is_first, paid })
    }

    pub(super) fn failed(self, result: CUresult) {
        self.measurement.abandon_and(|| charge::undo_advance(self.card, self.paid, result));
    }

    /// Charges a context just made, or ends it by `release` where the limit has no room for it; whether it had. `release` says
    /// whether it has ended: else it stays charged.
    pub(super) fn made(self, context: u64, release: impl FnOnce() -> bool) -> bool {
        let Self { container, card, measurement, is_first, paid } = self;
        let refused = measurement.end(|looking, taken| {
            let mut bytes = size_of_context(taken, paid, is_first);
            // Nobody knows, or a neighbour freed more than it took.
            if bytes == 0 && is_first && taken.is_none_or(|taken| taken.trust != Trust::Full) {
                bytes = size_of_another(looking, container, card, context).unwrap_or(0);
            }
            if !charge_context(container, card, paid, bytes) {
                tell_if_too_large(container, card, bytes);
                // Until it is ended.
                card.memory.force(bytes - paid);
                return Some(bytes);
            }
            // What was refused is not learnt: no other context would be tried then, by which it could be found to take less.
            if bytes > 0 {
                learn(card, bytes, taken.map_or(Trust::Card, |taken| taken.trust));
            }
            enter(container, card, context, bytes);
            None
        });
        let Some(bytes) = refused else { return true };
        // Without a lock: whoever looks at another card need not wait for the end of a context.
        let _hidden = container.books.measuring.hidden_many(Some(card));
        if release() {
            card.memory.free(bytes);
        } else {
            enter(container, card, context, bytes);
        }
        false
    }
}

/// Enters a context for which `bytes` are charged. The card's lock of contexts is held.
fn enter(container: &Container, card: &Card, context: u64, bytes: u64) {
    let entry = Entry { size: bytes, card: card.index, kind: Kind::Context as u8, note: context };
    let _ = container.books.objects.insert(key_of(Kind::Context, context), &entry);
    container.books.contexts.changed(container, card, true);
}

/// A program that cannot even make a context sees no more than that the card is full.
#[cold]
fn tell_if_too_large(container: &Container, card: &Card, needed: u64) {
    if let Some(limit) = card.limit().filter(|limit| *limit < needed) {
        let ordinal = container.device(card).and_then(|device| usize::try_from(device).ok()).unwrap_or(0);
        let by_hand = container.by_hand.then(|| container::memory_variable(ordinal));
        Notice::BelowContext { ordinal, by_hand, limit, needed }.say();
    }
}

/// Charges `bytes` where `paid` are charged; whether the limit has room for them. Where not, `paid` stay charged.
fn charge_context(container: &Container, card: &Card, paid: u64, bytes: u64) -> bool {
    if bytes <= paid {
        card.memory.free(paid - bytes);
        return true;
    }
    let more = charge::ask(container, card, bytes - paid);
    more.map(|more| charge::settle(card, more)).is_some()
}

/// What to charge for a context by what was seen, where other ones took `known` (0: that is not known). Only this
/// process's own figure says more than the others did: else a neighbour's memory may be in it. It says less only where
/// that is clear, since a process that frees something meanwhile makes it seem a bit less.
fn size_of_context(taken: Option<Taken>, known: u64, is_first: bool) -> u64 {
    let Some(taken) = taken else { return known };
    let bytes = taken.more(MOST);
    // A first context takes something.
    let is_possible = bytes > 0 || !is_first;
    let is_clearly_less = bytes < known - known / 8 && is_possible;
    match taken.trust {
        Trust::Full if is_possible => bytes,
        Trust::Card if is_clearly_less => bytes,
        _ if known == 0 => bytes,
        _ => known,
    }
}

/// What a second context on the card takes, which is made for this question and ended: where there is no NVML, nobody can
/// tell what the first one took. Asked once in a container, since what comes of it is remembered.
#[cold]
fn size_of_another(looking: &Alone<'_>, container: &Container, card: &Card, context: u64) -> Option<u64> {
    type Create = unsafe extern "C" fn(*mut CUcontext, c_uint, CUdevice) -> CUresult;
    let create = driver::function!(cuCtxCreate_v2: Create)?;
    let destroy = driver::function!(cuCtxDestroy_v2: unsafe extern "C" fn(CUcontext) -> CUresult)?;
    let device = container.device(card)?;
    let look = || looking.glance(container, card, From::Context(context));
    let before = look();
    let mut other = core::ptr::null_mut();
    // SAFETY: a device of this process; the context goes to a place of ours.
    if !unsafe { create(&raw mut other, 0, device) }.is_ok() {
        return None;
    }
    let after = look();
    // SAFETY: a context that nobody knows of. It was current, and the one before it is so again.
    let _ = unsafe { destroy(other) };
    u64::try_from(looking.change(before, after)?.alone()?).ok().map(|bytes| bytes.min(MOST))
}

/// Remembers what a context takes: as it is for sure, or the smallest that was seen, since a larger one may have had a
/// neighbour's memory in it.
fn learn(card: &Card, bytes: u64, trust: Trust) {
    let word = &card.words.context_bytes;
    let _ = word.fetch_update(Relaxed, Relaxed, |known| {
        (trust == Trust::Full || known == 0 || bytes < known).then_some(bytes)
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_context_is_charged_by_the_best_that_is_known() {
        let seen = |bytes, trust| Some(Taken { bytes, trust });
        for (case, taken, known, is_first, want) in [
            ("its own figure", seen(500, Trust::Full), 300, true, 500),
            ("the first of a container", seen(500, Trust::Card), 0, true, 500),
            ("a neighbour's memory in it", seen(900, Trust::Card), 500, true, 500),
            ("something was freed meanwhile", seen(480, Trust::Card), 500, true, 500),
            ("clearly less", seen(100, Trust::Card), 500, false, 100),
            ("nothing, as a second one may", seen(0, Trust::Card), 500, false, 0),
            ("nothing, as a first one cannot", seen(0, Trust::Card), 500, true, 500),
            ("nothing by its own figure, as a first one cannot", seen(0, Trust::Full), 500, true, 500),
            ("clearly less in company", seen(100, Trust::Busy), 500, true, 500),
            ("not to be seen", None, 500, true, 500),
            ("nor known", None, 0, true, 0),
        ] {
            assert_eq!(size_of_context(taken, known, is_first), want, "{case}");
        }
    }
}
