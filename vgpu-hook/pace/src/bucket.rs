//! The bucket: virtual scheduling (GCRA) over one shared word.

use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::Relaxed;

use crate::Correction;

/// How far ahead of now the word may lie: the longest that one launch can make the next ones wait.
pub const AHEAD_NS: u64 = 2_000_000_000;
/// The longest that a waiting launch may sleep before it looks again, so that a new scale, rate or gate is seen.
pub const SLICE_NS: u64 = 50_000_000;

/// The rate of a whole card: ns of card per second of time.
const WHOLE_CARD: u64 = 1_000_000_000;
/// Tries against other launches before the word is left as it is. Others made progress in each of them; only a writer
/// that is no launch can go on for long.
const TRIES: u32 = 64;

/// What a container may use of a card: the rate, scale and burst of its control page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terms {
    /// Scale of a launch's cost, 16.16 fixed point; 0 counts as the smallest.
    pub scale: u32,
    /// ns of the whole card per second of time. 0 and a whole card or more mean no limit.
    pub rate: u64,
    /// How much unused time may be saved, in ns of time (not of card). Never more than [`AHEAD_NS`].
    pub burst: u64,
}

impl Terms {
    /// Whether there is anything to hold a launch to.
    #[must_use]
    #[inline]
    pub const fn limited(&self) -> bool {
        self.rate != 0 && self.rate < WHOLE_CARD
    }

    /// ns of time that `cost_ns` of card stand for, at most twice [`AHEAD_NS`].
    ///
    /// Each step stays below 2^63: cost and weighted cost are cut at [`AHEAD_NS`] < 2^31, the scale is below 2^32 and
    /// a second has fewer than 2^30 ns. Cutting loses nothing, since a price is never below the weighted cost.
    #[inline]
    fn price(&self, cost_ns: u64) -> u64 {
        let scale = if self.scale == 0 { 1 } else { self.scale };
        let weighted = ((min(cost_ns, AHEAD_NS) * u64::from(scale)) >> 16).clamp(1, AHEAD_NS);
        // Rate 0 is no limit and does not come here; said so that no division can fail.
        min((weighted * WHOLE_CARD).checked_div(self.rate).unwrap_or(0), 2 * AHEAD_NS)
    }

    #[inline]
    fn burst(&self) -> u64 {
        min(self.burst, AHEAD_NS)
    }
}

#[inline]
const fn min(a: u64, b: u64) -> u64 {
    if a < b { a } else { b }
}

/// The bucket's answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Admission {
    /// The launch is charged and may go.
    Go,
    /// Nothing was charged; ask again after this many ns, at most [`AHEAD_NS`]. Sleep in slices of [`SLICE_NS`].
    Wait(u64),
}

/// A view of the shared word: `CLOCK_MONOTONIC` ns up to which the container has spent its rate.
///
/// A launch goes when that time has come, and moves the word on by its price. So a launch pays after it went, a process
/// that is killed while it waits has taken nothing, and a launch without measured cost is made up for by the next one.
/// The tenant can write anything into the word: what lies further ahead than [`AHEAD_NS`] is cut, in the word as well,
/// and what lies further back than the burst counts as the burst.
#[derive(Clone, Copy, Debug)]
pub struct Bucket<'a>(&'a AtomicU64);

impl<'a> Bucket<'a> {
    /// The bucket over `word`.
    #[must_use]
    #[inline]
    pub const fn over(word: &'a AtomicU64) -> Self {
        Self(word)
    }

    /// May a launch of `cost_ns` go at `now`? `now` may be coarse, and may be older than another process's.
    #[inline]
    pub fn admit(self, now: u64, cost_ns: u64, terms: Terms) -> Admission {
        if !terms.limited() {
            return Admission::Go;
        }
        let (price, burst) = (terms.price(cost_ns), terms.burst());
        let latest = now.saturating_add(AHEAD_NS);
        let mut word = self.0.load(Relaxed);
        for _ in 0..TRIES {
            let spent = word.max(now.saturating_sub(burst));
            if spent > now {
                if spent <= latest {
                    return Admission::Wait(spent - now);
                }
                // A clock that went back, or a tenant's word. Unless it is cut here it never comes any closer.
                match self.0.compare_exchange_weak(word, latest, Relaxed, Relaxed) {
                    Ok(_) => return Admission::Wait(AHEAD_NS),
                    Err(found) => word = found,
                }
                continue;
            }
            match self.0.compare_exchange_weak(word, min(spent + price, latest), Relaxed, Relaxed) {
                Ok(_) => return Admission::Go,
                Err(found) => word = found,
            }
        }
        Admission::Go
    }

    /// As [`Bucket::admit`], with a `then` that may be long past, where that is enough to say that the launch may go. It
    /// charges only when it says so. This spares the reading of a clock, and gives nothing away but one burst: what the
    /// container saved between `then` and now is not counted.
    #[inline]
    #[must_use]
    pub fn admit_at_past(self, then: u64, cost_ns: u64, terms: Terms) -> bool {
        let word = self.0.load(Relaxed);
        let spent = word.max(then.saturating_sub(terms.burst()));
        terms.limited()
            && spent <= then
            && self.0.compare_exchange(word, spent + terms.price(cost_ns), Relaxed, Relaxed).is_ok()
    }

    /// Charges `cost_ns` without asking: a launch turned out to have cost more than it was charged.
    pub fn charge(self, now: u64, cost_ns: u64, terms: Terms) {
        if terms.limited() && cost_ns != 0 {
            let (price, floor) = (terms.price(cost_ns), now.saturating_sub(terms.burst()));
            let latest = now.saturating_add(AHEAD_NS);
            self.update(|word| min(word.max(floor).saturating_add(price), latest));
        }
    }

    /// Gives `cost_ns` back: a launch turned out to have cost less than it was charged. At most [`AHEAD_NS`] of time, which is
    /// the most that it waited for.
    pub fn refund(self, now: u64, cost_ns: u64, terms: Terms) {
        if terms.limited() && cost_ns != 0 {
            let price = min(terms.price(cost_ns), AHEAD_NS);
            let latest = now.saturating_add(AHEAD_NS);
            self.update(|word| min(word, latest).saturating_sub(price));
        }
    }

    /// Sets right what one launch paid. Of prices above [`AHEAD_NS`] no more than that was taken, and no more is due.
    pub fn settle(self, now: u64, paid_ns: u64, due_ns: u64, terms: Terms) {
        if !terms.limited() {
            return;
        }
        let price = |ns| if ns == 0 { 0 } else { min(terms.price(ns), AHEAD_NS) };
        let (paid, due) = (price(paid_ns), price(due_ns));
        let (floor, latest) = (now.saturating_sub(terms.burst()), now.saturating_add(AHEAD_NS));
        if due > paid {
            self.update(|word| min(word.max(floor).saturating_add(due - paid), latest));
        } else {
            self.update(|word| min(word, latest).saturating_sub(paid - due));
        }
    }

    /// Applies what a measurement said.
    pub fn correct(self, now: u64, correction: Correction, terms: Terms) {
        match correction {
            Correction::None => {}
            Correction::Charge(ns) => self.charge(now, ns, terms),
            Correction::Refund(ns) => self.refund(now, ns, terms),
            Correction::Launch { paid_ns, due_ns } => self.settle(now, paid_ns, due_ns, terms),
        }
    }

    fn update(self, f: impl Fn(u64) -> u64) {
        let mut word = self.0.load(Relaxed);
        for _ in 0..TRIES {
            match self.0.compare_exchange_weak(word, f(word), Relaxed, Relaxed) {
                Ok(_) => return,
                Err(found) => word = found,
            }
        }
    }
}
