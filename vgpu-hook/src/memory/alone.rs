//! Looks around one call: for a small array, or within the end of a measurement.

use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::{Relaxed, SeqCst};

use super::at_driver::{Hidden, Standing};
use super::looks::From;
use super::measured::{ALONE, BY_CUDA, Measuring, Uncounted};
use crate::container::{Card, Container, Held};
use crate::sys;

/// The turn among calls for small arrays.
#[derive(Debug)]
pub(super) struct Turn<'m> {
    caller: &'m AtomicU64,
    _held: Held<'m>,
}

impl<'m> Turn<'m> {
    pub(super) fn new(caller: &'m AtomicU64, held: Held<'m>) -> Self {
        Self { caller, _held: held }
    }

    /// Makes known which call has it.
    pub(super) fn is_of(&self, call: &Hidden<'_>) {
        self.caller.store(call.name(), SeqCst);
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.caller.store(0, SeqCst);
    }
}

/// Looks around a call that is over at once, or within the end of a measurement. The fields go in this order: who has the turn
/// next sees this call no longer beside its own.
#[derive(Debug)]
pub(super) struct Alone<'m> {
    pub(super) measuring: &'m Measuring,
    /// Whether the process's own figure is asked for: that takes longer than a look at the card, which is as good unless
    /// others are busy there.
    pub(super) own: bool,
    /// The call, of which others see that something is going on: they look before it or after it.
    pub(super) hidden: Option<Hidden<'m>>,
    /// The turn among such calls; none where that was waited for in vain.
    pub(super) turn: Option<Turn<'m>>,
    /// Of the measurement.
    pub(super) _held: Option<Held<'m>>,
}

/// What was seen at one time.
#[derive(Clone, Copy, Debug)]
pub(super) struct Glance(Uncounted);

/// What changed between two times.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Change {
    pub(super) bytes: i64,
    /// Who was at the driver all the time, and may have given something back in between.
    beside: Option<Standing>,
}

impl Change {
    /// Where nobody was at the driver.
    pub(super) fn alone(self) -> Option<i64> {
        self.beside.is_none().then_some(self.bytes)
    }
}

impl Alone<'_> {
    /// Bytes in use that stand in no books; only the difference to another one says something. What the caller has charged
    /// in advance counts as in the books.
    pub(super) fn glance(&self, container: &Container, card: &Card, from: From) -> Glance {
        Glance(self.measuring.look(container, card, from, self.own, self.mine()))
    }

    fn mine(&self) -> u64 {
        u64::from(self.hidden.is_some())
    }

    /// By how much what is in use has grown from `before` to `after`; `None` where that cannot be told.
    ///
    /// Beside a call that is still at the driver it can be told where the same ones were there, and the same stood in the
    /// books, both times. What is asked for by such calls can only seem to be more than it is then: what was there by the first
    /// time and not charged stands in the books by the second. What they give back can have gone in between, once for each.
    pub(super) fn change(&self, before: Glance, after: Glance) -> Option<Change> {
        let (Glance(before), Glance(after)) = (before, after);
        let change = |way: usize, is_quiet: bool, standing: [_; 2]| {
            let beside = if is_quiet { None } else { Some(self.beside(standing)?) };
            let bytes = after.seen(way)?.saturating_sub(before.seen(way)?);
            Some(Change { bytes, beside })
        };
        let on_card = change(BY_CUDA, before.is_quiet && after.is_quiet, [before.all, after.all]);
        if !self.own {
            return on_card;
        }
        let own = change(ALONE, before.is_own_quiet && after.is_own_quiet, [before.own, after.own]);
        if own.map(|own| own.bytes) != on_card.map(|on_card| on_card.bytes) {
            self.is_disturbed();
        }
        own
    }

    /// The calls that stayed at the driver all the time beside this one, if nothing else happened.
    fn beside(&self, [before, after]: [Option<Standing>; 2]) -> Option<Standing> {
        let standing = before.filter(|_| before == after)?;
        standing.beside(self.mine()).map(|_| standing)
    }

    /// Whether an answer is believed that is wrong if one of the calls `beside` gave a block back just then. Each of them can
    /// do that once, so as many answers as there are calls are not believed, for as long as the same calls are there.
    pub(super) fn believes(&self, card: &Card, change: Change) -> bool {
        change.beside.is_none_or(|beside| {
            self.measuring.has_disbelieved(card, beside, self.mine(), self.turn.is_some())
        })
    }

    /// What was seen cannot have been this process's doing alone: for a while its own figure is asked for.
    pub(super) fn is_disturbed(&self) {
        self.measuring.disturbed_ns.store(sys::clock::coarse_ns().max(1), Relaxed);
    }
}
