//! The way of a launch: stamps, gate, bucket, driver.

use core::num::NonZeroU64;
use core::sync::atomic::Ordering::Relaxed;
use core::sync::atomic::{AtomicI64, AtomicU32, AtomicU64};

use mullion_pace::policy::{JUST_LAUNCHED, STAMP_NS};
use mullion_pace::{
    AHEAD_NS, Admission, CLOSE_EVERY_NS, Correction, Costs, Key, Progress, Quote, SLICE_NS, Sample, Size,
    Terms, guess_ns,
};
use mullion_region::MAX_DEVICES;

use super::Lane;
use super::capture::Captures;
use super::events::{Begun, Ended, Events, Handle, Lost, Measuring, Sampler, number_of, sample_of};
use crate::cuda::CUresult;
use crate::sys::{clock, futex_wait};

/// What is launched.
#[derive(Clone, Copy, Debug)]
pub(super) struct Request {
    pub(super) key: Key,
    /// `None` for a graph.
    pub(super) size: Option<Size>,
    pub(super) stream: Handle,
}

/// A graph that cannot be measured is taken for this long. A guess.
const GRAPH_NS: u64 = 1_000_000;
/// Threads of a card that does not say: 132 SMs of 2,048.
const RESIDENT: u64 = 132 * 2048;
/// Launches after which stamps are looked at even though the agent's heartbeat does not move. A prime: it is one of these launches
/// that is measured because it is time, and in a program whose steps are 2^n launches that must not always be the same one.
pub(super) const STAMP_EVERY: u32 = 61;
/// Slices while a measurement is under way: what it says may end the wait.
const MEASURING_SLICE_NS: u64 = 1_000_000;

/// What a process keeps per card. Counted with plain loads and stores: threads may lose some of each other's counts,
/// which shifts a sample or rounds an estimate.
#[derive(Debug)]
struct Local {
    /// Launches that may pass until the stamps are looked at.
    left: AtomicU32,
    beat: AtomicU64,
    /// What launches were charged when they went, in all. It goes round.
    charged_ns: AtomicI64,
    /// What was charged more since, in all, or less.
    corrected_ns: AtomicI64,
    /// What was added of both to the container's word.
    told_ns: AtomicI64,
    /// Threads that the card can hold at once, 0 = not asked yet.
    resident: AtomicU64,
    /// The clock when it was last read.
    now: AtomicU64,
    /// The clock when it was last time to measure a launch.
    sampled: AtomicU64,
}

impl Local {
    #[inline]
    fn spent(&self, ns: u64) {
        self.charged_ns.store(self.charged_ns.load(Relaxed).wrapping_add_unsigned(ns), Relaxed);
    }

    fn corrected(&self, ns: i64) {
        self.corrected_ns.fetch_add(ns, Relaxed);
    }

    /// What is to be added to the container's word. That only grows: what was given back is made up for first.
    fn untold_ns(&self) -> u64 {
        let (charged, told) = (self.charged_ns.load(Relaxed), self.told_ns.load(Relaxed));
        let spent = charged.wrapping_add(self.corrected_ns.load(Relaxed));
        let Ok(more @ 1..) = u64::try_from(spent.wrapping_sub(told)) else { return 0 };
        // Another thread tells it.
        if self.told_ns.compare_exchange(told, spent, Relaxed, Relaxed).is_err() {
            return 0;
        }
        more
    }
}

/// The state of one process.
#[derive(Debug)]
pub(super) struct Pacer {
    pub(super) costs: Costs,
    pub(super) sampler: Sampler,
    pub(super) captures: Captures,
    local: [Local; MAX_DEVICES],
}

/// What a launch has paid, and whether it is to be measured: one register, and so is `Option` of it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Paid(NonZeroU64);

impl Paid {
    const NOTHING: Self = Self(NonZeroU64::MIN);

    #[inline]
    fn new(ns: u64, sample: Sample) -> Self {
        Self(NonZeroU64::MIN | (ns << 3 | u64::from(number_of(sample)) << 1))
    }

    #[inline]
    pub(super) const fn is_sample(self) -> bool {
        self.0.get() & 6 != 0
    }

    #[expect(clippy::cast_possible_truncation, reason = "two bits")]
    const fn sample(self) -> Sample {
        sample_of(self.0.get() as u32 >> 1 & 3)
    }

    pub(super) const fn ns(self) -> u64 {
        self.0.get() >> 3
    }
}

impl Pacer {
    pub(super) const fn new() -> Self {
        Self {
            costs: Costs::new(),
            sampler: Sampler::new(),
            captures: Captures::new(),
            local: [const {
                Local {
                    left: AtomicU32::new(0),
                    beat: AtomicU64::new(0),
                    charged_ns: AtomicI64::new(0),
                    corrected_ns: AtomicI64::new(0),
                    told_ns: AtomicI64::new(0),
                    resident: AtomicU64::new(0),
                    now: AtomicU64::new(0),
                    sampled: AtomicU64::new(0),
                }
            }; MAX_DEVICES],
        }
    }

    /// What every launch passes: whether it has to pay.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a call here costs as much as all that it does")]
    pub(super) fn has_to_pay(
        &self,
        lane: &impl Lane,
        stream: impl FnOnce() -> Handle,
        events: &impl Events,
    ) -> bool {
        if self.captures.any() && self.captures.hold(stream(), events) {
            return false;
        }
        self.stamp(lane);
        lane.is_limited()
    }

    /// Lets `request` go to the driver by `call` when its time has come.
    #[cfg(test)]
    pub(super) fn launch(
        &self,
        lane: &impl Lane,
        request: &Request,
        events: &impl Events,
        call: impl FnOnce() -> CUresult,
    ) -> CUresult {
        if !self.has_to_pay(lane, || request.stream, events) {
            return call();
        }
        let paid = self.pay_known(lane, request.key).unwrap_or_else(|| self.pay(lane, request, events));
        if paid.is_sample() {
            return self.measured(lane, request, paid, events, call);
        }
        let result = call();
        if !result.is_ok() {
            self.give_back(lane, request.key, paid);
        }
        result
    }

    /// Pays for a launch that may go at once, as far as is known without a look at the clock; `None` = that cannot be
    /// told, and nothing was paid. This is the way of most launches, so it does no more than it must: that there is a
    /// limit was seen [before](Self::has_to_pay), and a bucket without one admits nobody here.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "its only caller stands apart already")]
    pub(super) fn pay_known(&self, lane: &impl Lane, key: Key) -> Option<Paid> {
        let local = self.local.get(lane.index())?;
        let known = self.costs.known(key)?;
        let now = local.now.load(Relaxed);
        lane.bucket().admit_at_past(now, known.ns, lane.page_terms()).then(|| {
            local.spent(known.ns);
            Paid::new(known.ns, known.book())
        })
    }

    /// Waits until `request` may go.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "its only caller stands apart already")]
    pub(super) fn pay(&self, lane: &impl Lane, request: &Request, events: &impl Events) -> Paid {
        let (Some(terms), Some(local)) = (lane.terms(), self.local.get(lane.index())) else {
            return Paid::NOTHING;
        };
        let Some(quote) = self.admit(lane, local, terms, request, true, events) else {
            return Paid::NOTHING;
        };
        local.spent(quote.ns);
        Paid::new(quote.ns, quote.sample)
    }

    /// Launches by `call` and measures it.
    #[cold]
    pub(super) fn measured(
        &self,
        lane: &impl Lane,
        request: &Request,
        paid: Paid,
        events: &impl Events,
        call: impl FnOnce() -> CUresult,
    ) -> CUresult {
        self.poll(lane, events);
        // It may have waited since that was asked.
        let captured = self.captures.any() && self.captures.hold(request.stream, events);
        let result = if captured {
            call()
        } else {
            let (card, key, stream) = (lane.index(), request.key, request.stream);
            let what = Measuring { card, key, stream, paid_ns: paid.ns(), sample: paid.sample() };
            let (result, begun) = self.sampler.measure(&what, events, call);
            match begun {
                Begun::Failed => self.costs.failed(key),
                Begun::NoPlace if what.sample == Sample::Chance && result.is_ok() => {
                    self.correct(lane, self.costs.missed(key, what.paid_ns));
                }
                _ => {}
            }
            result
        };
        if !result.is_ok() {
            self.give_back(lane, request.key, paid);
        }
        result
    }

    /// The driver refused a launch that had paid.
    #[cold]
    pub(super) fn give_back(&self, lane: &impl Lane, key: Key, paid: Paid) {
        // There was no limit while it waited: it is in no account.
        if paid.ns() == 0 {
            return;
        }
        self.costs.refused(key, paid.ns());
        if let Some(terms) = lane.terms() {
            if let Some(local) = self.local.get(lane.index()) {
                local.corrected(i64::try_from(paid.ns()).map_or(0, i64::wrapping_neg));
            }
            lane.bucket().settle(clock::coarse_ns(), paid.ns(), 0, terms);
        }
    }

    /// A graph is gone: its handle may come again for another one.
    pub(super) fn forget(&self, key: Key) {
        self.sampler.forget(key);
        self.costs.forget(key);
    }

    /// Admits `request` on a card that it is not launched from.
    pub(super) fn admit_only(&self, lane: &impl Lane, request: &Request, events: &impl Events) {
        self.stamp(lane);
        if let (Some(terms), Some(local)) = (lane.terms(), self.local.get(lane.index()))
            && let Some(quote) = self.admit(lane, local, terms, request, false, events)
        {
            local.spent(quote.ns);
        }
    }

    /// The marks by which others see that the container is at work, and the gate. The agent's heartbeat is the clock that
    /// says when to renew them, for reading a clock would cost more than all the rest.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a call here costs as much as all that it does")]
    fn stamp(&self, lane: &impl Lane) {
        let Some(local) = self.local.get(lane.index()) else { return };
        let (left, beat) = (local.left.load(Relaxed), lane.page().heartbeat.load(Relaxed));
        let quiet = lane.tail().recent_kernel.load(Relaxed) == JUST_LAUNCHED;
        if quiet && beat == local.beat.load(Relaxed) && left != 0 {
            local.left.store(left - 1, Relaxed);
        } else {
            local.beat.store(beat, Relaxed);
            renew(lane, local);
        }
    }

    /// The next launch on the card at `index` renews its stamps.
    pub(super) fn stamp_next(&self, index: u8) {
        if let Some(local) = self.local.get(usize::from(index)) {
            local.left.store(0, Relaxed);
        }
    }

    /// Waits until the bucket admits `request` and books it: what it was charged. `None` = the limit is gone.
    #[inline(never)]
    fn admit(
        &self,
        lane: &impl Lane,
        local: &Local,
        terms: Terms,
        request: &Request,
        measurable: bool,
        events: &impl Events,
    ) -> Option<Quote> {
        let now = clock::coarse_ns();
        local.now.store(now, Relaxed);
        let quote = self.quote(lane, request, measurable, now, events);
        let quote = match lane.bucket().admit(now, quote.ns, terms) {
            Admission::Go => quote,
            Admission::Wait(ns) => self.wait(lane, request, measurable, ns, events)?,
        };
        self.costs.book(&quote);
        let due = now.saturating_sub(local.sampled.load(Relaxed)) >= CLOSE_EVERY_NS;
        if due && measurable && quote.known {
            self.costs.measure_soon(&quote);
            local.sampled.store(now, Relaxed);
        }
        Some(quote)
    }

    fn quote(
        &self,
        lane: &impl Lane,
        request: &Request,
        measurable: bool,
        now: u64,
        events: &impl Events,
    ) -> Quote {
        let guess = || self.guess(lane, request, events);
        let known = self.costs.quote(request.key, measurable, guess, || Progress::None);
        if known.known || !measurable {
            return known;
        }
        self.unknown(lane, request, now, events)
    }

    #[cold]
    fn guess(&self, lane: &impl Lane, request: &Request, events: &impl Events) -> u64 {
        let (Some(size), Some(local)) = (request.size, self.local.get(lane.index())) else { return GRAPH_NS };
        let mut resident = local.resident.load(Relaxed);
        if resident == 0 {
            resident = events.resident_threads().unwrap_or(RESIDENT);
            local.resident.store(resident, Relaxed);
        }
        guess_ns(size, resident)
    }

    /// A quote for what is not measured yet: perhaps by now it is.
    #[cold]
    fn unknown(&self, lane: &impl Lane, request: &Request, now: u64, events: &impl Events) -> Quote {
        let measurable = events.usable();
        if measurable {
            self.poll(lane, events);
        }
        let guess = || self.guess(lane, request, events);
        let progress = || self.sampler.progress(request.key, now, events);
        self.costs.quote(request.key, measurable, guess, progress)
    }

    #[cold]
    fn wait(
        &self,
        lane: &impl Lane,
        request: &Request,
        measurable: bool,
        first_ns: u64,
        events: &impl Events,
    ) -> Option<Quote> {
        lane.words().waits.fetch_add(1, Relaxed);
        let (mut ns, mut since) = (first_ns, clock::coarse_ns());
        loop {
            let measuring = measurable && self.sampler.flying(events.context());
            let slice = if measuring { MEASURING_SLICE_NS } else { SLICE_NS };
            sleep(lane, ns.min(slice));
            let now = clock::coarse_ns();
            lane.words().wait_ns.fetch_add(now.saturating_sub(since), Relaxed);
            if measurable {
                self.poll(lane, events);
            }
            since = pass_gate(lane).unwrap_or(now);
            let terms = lane.terms()?;
            let quote = self.quote(lane, request, measurable, now, events);
            match lane.bucket().admit(now, quote.ns, terms) {
                Admission::Go => return Some(quote),
                Admission::Wait(more) => ns = more,
            }
        }
    }

    /// Enters the measurements that have ended.
    pub(super) fn poll(&self, lane: &impl Lane, events: &impl Events) {
        self.sampler.poll(events, |ended| self.enter(lane, &ended));
    }

    /// Enters a measurement that has ended.
    pub(super) fn enter(&self, lane: &impl Lane, ended: &Ended) {
        match &ended.found {
            Ok(measurement) => {
                let correction = self.costs.measured(measurement);
                if ended.card == lane.index() {
                    self.correct(lane, correction);
                }
            }
            Err(key) => self.costs.failed(*key),
        }
    }

    /// A context was ended while launches in it were on their way, and the driver has waited for them: nobody will know what
    /// each of them took, but together it was no more than the time since the first one.
    pub(super) fn lost(&self, lane: &impl Lane, lost: &Lost) {
        let took = clock::monotonic_ns().saturating_sub(lost.from).min(AHEAD_NS);
        self.correct(lane, Correction::Charge(took.saturating_sub(lost.paid_ns)));
    }

    fn correct(&self, lane: &impl Lane, correction: Correction) {
        if let (Some(terms), Some(local)) = (lane.terms(), self.local.get(lane.index())) {
            local.corrected(correction.charge_ns());
            lane.bucket().correct(clock::coarse_ns(), correction, terms);
        }
    }
}

/// Sleeps for `ns` at most, or until the agent has something new.
fn sleep(lane: &impl Lane, ns: u64) {
    let word = &lane.page().futex;
    let seen = word.load(Relaxed);
    // Time over, woken, interrupted or changed already: all of them mean to look again.
    let _ = futex_wait(word.as_ptr(), seen, ns.clamp(1, SLICE_NS));
}

/// Waits while a more urgent container is at work; when that was over, if it waited. Not counted among the waits for the
/// bucket: the agent would take them for a share that is held too tight.
fn pass_gate(lane: &impl Lane) -> Option<u64> {
    let gated = lane.tail().recent_kernel.load(Relaxed);
    if gated >= 0 {
        return None;
    }
    let began = clock::coarse_ns();
    loop {
        let now = clock::coarse_ns();
        if !lane.is_gated(now, now.saturating_sub(began)) {
            if lane.by_hand() {
                // Whoever closed it is gone, or would have opened it: the next launch need not wait as long again.
                let _ = lane.tail().recent_kernel.compare_exchange(gated, 0, Relaxed, Relaxed);
            }
            return Some(now);
        }
        sleep(lane, SLICE_NS);
    }
}

#[cold]
fn renew(lane: &impl Lane, local: &Local) {
    local.left.store(STAMP_EVERY - 1, Relaxed);
    let _ = pass_gate(lane);
    // The next launch looks at the clock: who pays little for what takes long now could go on by an old one for long, and it
    // is those that pay by the clock of which one is measured from time to time.
    local.now.store(0, Relaxed);
    let untold_ns = local.untold_ns();
    if untold_ns != 0 {
        lane.words().spent_ns.fetch_add(untold_ns, Relaxed);
    }
    let recent = &lane.tail().recent_kernel;
    let value = recent.load(Relaxed);
    if value >= 0 && value != JUST_LAUNCHED {
        // Not over a gate that was closed meanwhile.
        let _ = recent.compare_exchange(value, JUST_LAUNCHED, Relaxed, Relaxed);
    }
    let (now, words) = (clock::realtime_ns(), lane.words());
    if words.first_launch.load(Relaxed) == 0 {
        let _ = words.first_launch.compare_exchange(0, now, Relaxed, Relaxed);
    }
    let last = words.last_launch.load(Relaxed);
    // A stamp ahead of now is a clock that was set back, or a tenant's.
    if now.wrapping_sub(last) >= STAMP_NS {
        words.last_launch.store(now, Relaxed);
        lane.tail().last_kernel_time.store(now / 1_000_000_000, Relaxed);
    }
}
