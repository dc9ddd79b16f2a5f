//! What is known of one function at one size of grid, or of one graph.

use core::sync::atomic::Ordering::Relaxed;
use core::sync::atomic::{AtomicBool, AtomicU8, AtomicU16, AtomicU32, AtomicU64};

use crate::AHEAD_NS;
use crate::cost::{Correction, Measurement, Sample};

/// One launch in this many is measured of a function that is short and has been measured a few times, one in
/// [`SAMPLE_EVERY_YOUNG`] until then. Of those of which one took a tenth of a millisecond one in 32 is, of those of which one
/// took a whole one in 16, and each where one took ten: there are few of them, and the two events cost nothing beside them.
pub const SAMPLE_EVERY: u32 = 256;
/// One launch in this many of a short function with few measurements is measured.
pub const SAMPLE_EVERY_YOUNG: u32 = 64;
/// In [`Entry::rate`].
const SELDOM: u32 = SAMPLE_EVERY.ilog2();
const SELDOM_YOUNG: u32 = SAMPLE_EVERY_YOUNG.ilog2();
const EACH: u32 = 0;
/// So many shorter measurements by chance in a row before a function is measured less often: what comes once in a hundred
/// launches is not lost sight of.
const HOLD: u8 = u8::MAX;
/// Measurements until a function is known well.
const YOUNG: u16 = 8;
/// The least that a pair of events around a kernel shows: their resolution is half a microsecond, and a kernel without work
/// takes longer than that between them. Less is a driver that errs, and is believed when it says so twice.
pub const LEAST_NS: u64 = 1_000;
/// The most that is believed, 18 minutes: sums of it do not overflow.
pub(crate) const MOST_NS: u64 = 1 << 40;
/// A measurement of more than this many times the mean is of a kernel that was held up (by another process's time slices), of
/// a function that varies, or the first of one that takes longer now. The next ones tell.
const JUMP: u64 = 8;
/// After such a one this many measurements are of each launch.
const WATCH: u16 = 32;
/// Where one is measured because it is time, it is one of the next so many.
const SOON: u32 = 8;
/// So many measurements in a row, of which the first is such a one and each of more than twice the mean, are of a function that
/// takes longer now.
const RISES: u8 = 4;
/// A launch and its two events take a few us, and tens of them on a busy machine. What takes longer was held up.
const SLOW_HOST_NS: u64 = 100_000;
/// A slow host is an excuse for one measurement in so many, and for [`EXCUSES`] before that: where it is slow around each launch
/// (a launch that answers only when its kernel has ended), what it takes away would be all that the card did.
const EXCUSE_EVERY: u8 = 32;
const EXCUSES: u8 = 3;
/// In [`Entry::watch`]: the last measurement was of nothing.
const LOW: u16 = 1 << 8;
/// The most that launches are charged later because their function turned out to take longer now.
const MOST_OWED: u64 = AHEAD_NS / 2;

/// Counted with plain loads and stores: threads may lose some of each other's counts, or count some twice, which shifts a
/// sample or rounds a mean.
#[derive(Debug)]
pub(crate) struct Entry {
    /// Whose it is, 0 = nobody's yet.
    pub(crate) key: AtomicU64,
    /// Mean of what launches took, in ns; 0 = not measured yet.
    cost: AtomicU64,
    /// ns charged to the launches so far, while the function is young.
    charged: AtomicU64,
    /// Launches.
    seen: AtomicU32,
    /// `seen` at which a launch is measured because it is time.
    close_at: AtomicU32,
    /// `seen` when somebody last looked for a place.
    idle_at: AtomicU32,
    /// `seen` at the last measurement.
    since: AtomicU32,
    /// us that launches were charged too little, if the function takes longer now.
    owed_us: AtomicU32,
    /// Measurements, up to [`YOUNG`].
    measured: AtomicU16,
    /// Not 0 = each launch is measured: measurements for which that goes on, and [`LOW`].
    watch: AtomicU16,
    /// Measurements far above the mean, in a row.
    rises: AtomicU8,
    /// One launch in 2^this is measured, by the longest of the last measurements. The mean would not do: where a function
    /// varies it would be looked at less often just when the mean is too low.
    rate: AtomicU32,
    /// Measurements that may still be shorter before it is measured less often.
    hold: AtomicU8,
    /// The longest of the last measurements, in ns; an older one counts less.
    longest: AtomicU64,
    /// Measurements on a quick host that it takes until all of [`EXCUSES`] are there again.
    excused: AtomicU8,
    /// A launch of it could not be measured.
    fails: AtomicBool,
}

impl Entry {
    pub(crate) const fn new() -> Self {
        Self {
            key: AtomicU64::new(0),
            cost: AtomicU64::new(0),
            charged: AtomicU64::new(0),
            seen: AtomicU32::new(0),
            close_at: AtomicU32::new(u32::MAX),
            idle_at: AtomicU32::new(0),
            since: AtomicU32::new(0),
            owed_us: AtomicU32::new(0),
            measured: AtomicU16::new(0),
            watch: AtomicU16::new(0),
            rises: AtomicU8::new(0),
            rate: AtomicU32::new(SELDOM),
            hold: AtomicU8::new(0),
            longest: AtomicU64::new(0),
            excused: AtomicU8::new(0),
            fails: AtomicBool::new(false),
        }
    }

    pub(crate) fn clear(&self) {
        self.cost.store(0, Relaxed);
        self.charged.store(0, Relaxed);
        self.seen.store(0, Relaxed);
        self.close_at.store(u32::MAX, Relaxed);
        self.idle_at.store(0, Relaxed);
        self.since.store(0, Relaxed);
        self.owed_us.store(0, Relaxed);
        self.measured.store(0, Relaxed);
        self.watch.store(0, Relaxed);
        self.rises.store(0, Relaxed);
        self.rate.store(SELDOM, Relaxed);
        self.hold.store(0, Relaxed);
        self.longest.store(0, Relaxed);
        self.excused.store(0, Relaxed);
        self.fails.store(false, Relaxed);
    }

    #[inline]
    pub(crate) fn cost(&self) -> u64 {
        self.cost.load(Relaxed)
    }

    pub(crate) fn launches(&self) -> u32 {
        self.seen.load(Relaxed)
    }

    pub(crate) fn is_watched(&self) -> bool {
        self.watch.load(Relaxed) != 0
    }

    fn is_young(&self) -> bool {
        self.measured.load(Relaxed) < YOUNG
    }

    pub(crate) fn fails(&self) -> bool {
        self.fails.load(Relaxed)
    }

    pub(crate) fn fail(&self) {
        self.fails.store(true, Relaxed);
    }

    /// What a launch pays more that was to be measured and found no place: as if it were the longest, where they differ.
    pub(crate) fn missed(&self, paid_ns: u64) -> Correction {
        let longest = self.longest.load(Relaxed);
        let varies = longest / 2 > self.cost() && !self.is_young() && self.rate.load(Relaxed) != SELDOM;
        if varies && longest > paid_ns { Correction::of_one(paid_ns, longest) } else { Correction::None }
    }

    /// The next launches are measured: they tell whether it takes longer now.
    pub(crate) fn look_closely(&self) {
        if self.cost() != 0 {
            self.watch.store(self.watch.load(Relaxed).max(RISES.into()), Relaxed);
        }
    }

    /// Whether there was no launch since this was asked last.
    pub(crate) fn was_idle(&self) -> bool {
        let seen = self.seen.load(Relaxed);
        self.idle_at.swap(seen, Relaxed) == seen
    }

    /// One of the next few launches is measured. Which one depends on no clock, and so on no rhythm of the program: what is due
    /// by time may always be the same kind of launch.
    pub(crate) fn measure_soon(&self) {
        let seen = self.seen.load(Relaxed);
        self.close_at.store(seen.wrapping_add(mixed(seen) % SOON), Relaxed);
    }

    /// Whether the next launch of a known function is to be measured.
    #[inline]
    pub(crate) fn sample(&self) -> Sample {
        let seen = self.seen.load(Relaxed);
        let rate = match self.rate.load(Relaxed) {
            EACH => return Sample::Chance,
            SELDOM if self.is_young() => SELDOM_YOUNG,
            rate => rate,
        };
        if is_picked(seen, rate) {
            Sample::Chance
        } else if self.is_watched() || seen == self.close_at.load(Relaxed) {
            Sample::Close
        } else {
            Sample::No
        }
    }

    /// Enters a launch that went for `ns`.
    #[inline]
    pub(crate) fn book(&self, ns: u64) -> Sample {
        let sample = self.sample();
        self.seen.store(self.seen.load(Relaxed).wrapping_add(1), Relaxed);
        if self.is_young() {
            self.note(Correction::Charge(ns));
        }
        sample
    }

    pub(crate) fn refused(&self, ns: u64) {
        self.seen.store(self.seen.load(Relaxed).saturating_sub(1), Relaxed);
        self.note(Correction::Refund(ns));
    }

    fn note(&self, correction: Correction) {
        let charged = self.charged.load(Relaxed).saturating_add_signed(correction.charge_ns());
        self.charged.store(charged, Relaxed);
    }

    /// Enters a measurement: see [`crate::Costs::measured`].
    pub(crate) fn measured(&self, measurement: &Measurement) -> Correction {
        let (old, watched) = (self.cost(), self.is_watched());
        let ns = self.believable(measurement, old);
        if !self.believes(ns, old) {
            return Correction::None;
        }
        let (nothing, ns) = (ns < LEAST_NS, ns.clamp(LEAST_NS, MOST_NS));
        let young = self.is_young();
        self.measured.store((self.measured.load(Relaxed) + 1).min(YOUNG), Relaxed);
        self.rate_by(ns, measurement.sample);
        let seen = self.seen.load(Relaxed);
        let launches = seen.saturating_sub(self.since.swap(seen, Relaxed));
        // A measurement can be far too high, where others had the card, but not too low: of the first few the lowest counts,
        // where they differ that much.
        if old == 0 || (young && ns < old / 4) {
            self.cost.store(ns, Relaxed);
            let due = ns.saturating_mul(seen.into());
            return Correction::of_all(self.charged.swap(due, Relaxed), due);
        }
        let rises = self.rises.load(Relaxed);
        let owed = if ns > old.saturating_mul(if rises > 0 { 2 } else { JUMP }) {
            self.rise(rises + 1, ns, old, launches)
        } else {
            self.rises.store(0, Relaxed);
            None
        };
        // While each launch is measured the mean only rises: it is for those that are not, and what was seen last must not be
        // forgotten before one of them has paid it.
        let counts = !watched || ns > old || self.rate.load(Relaxed) == EACH;
        // A measurement of nothing counts as well once it is believed: its function would be looked at closely for ever.
        if owed.is_none() && (young || nothing || (measurement.sample == Sample::Chance && counts)) {
            self.cost.store((old - old / 4 + ns / 4).max(1), Relaxed);
        }
        // What those paid that went before anything was known was settled by the first one.
        let paid = if measurement.sample == Sample::First { ns } else { measurement.paid_ns };
        let correction = Correction::of_one(paid, ns.saturating_add(owed.unwrap_or(0)));
        if young {
            self.note(correction);
        }
        correction
    }

    /// What a measurement says of the card's time: where the host was slow, what is known already, as far as that can be.
    fn believable(&self, measurement: &Measurement, old: u64) -> u64 {
        let Measurement { ns, host_ns, .. } = *measurement;
        let excused = self.excused.load(Relaxed);
        if host_ns < SLOW_HOST_NS {
            self.excused.store(excused.saturating_sub(1), Relaxed);
            return ns;
        }
        if ns <= old || excused > (EXCUSES - 1) * EXCUSE_EVERY {
            return ns;
        }
        self.excused.store(excused + EXCUSE_EVERY, Relaxed);
        // The next launches tell whether that was right.
        self.watch.store(self.watch.load(Relaxed).max(EXCUSES.into()), Relaxed);
        old.max(ns.saturating_sub(host_ns))
    }

    fn rate_by(&self, ns: u64, sample: Sample) {
        let rate = match ns {
            10_000_000.. => EACH,
            1_000_000.. => 4,
            100_000.. => 5,
            _ => SELDOM,
        };
        let hold = self.hold.load(Relaxed);
        let longest = self.longest.load(Relaxed);
        self.longest.store(ns.max(longest - longest / u64::from(HOLD)), Relaxed);
        if rate <= self.rate.load(Relaxed) || hold == 0 {
            self.rate.store(rate, Relaxed);
            self.hold.store(HOLD, Relaxed);
        } else if sample != Sample::Close {
            self.hold.store(hold - 1, Relaxed);
        }
    }

    /// Whether a measurement is to be believed: one of nothing is when it comes twice.
    fn believes(&self, ns: u64, old: u64) -> bool {
        let watch = self.watch.load(Relaxed);
        let low = ns < LEAST_NS && (old == 0 || old > JUMP * LEAST_NS);
        let believed = !low || watch & LOW != 0;
        self.watch.store(if believed { (watch & !LOW).saturating_sub(1) } else { LOW | WATCH }, Relaxed);
        believed
    }

    /// A measurement far above the mean, or one that follows such a one: the next ones are of each launch. What is owed for the
    /// `launches` since the measurement before, once it is clear that the function takes longer now.
    fn rise(&self, rises: u8, ns: u64, old: u64, launches: u32) -> Option<u64> {
        if rises == 1 {
            let owed = (ns - old).saturating_mul(launches.saturating_sub(1).into()).min(MOST_OWED) / 1_000;
            self.owed_us.store(u32::try_from(owed).unwrap_or(0), Relaxed);
            self.watch.store(WATCH, Relaxed);
        }
        if rises < RISES {
            self.rises.store(rises, Relaxed);
            return None;
        }
        self.rises.store(0, Relaxed);
        self.cost.store(ns, Relaxed);
        Some(u64::from(self.owed_us.swap(0, Relaxed)) * 1_000)
    }
}

/// Whether launch number `seen` is the one of its 2^`bits` that is measured: another place in each, which does not follow from
/// those before, so that no rhythm of a program has always the same kind of launch measured.
#[inline]
const fn is_picked(seen: u32, bits: u32) -> bool {
    mixed(seen >> bits) >> (32 - bits) == seen & ((1 << bits) - 1)
}

/// A number that looks like any, as `MurmurHash3` ends.
#[inline]
const fn mixed(number: u32) -> u32 {
    let n = number.wrapping_add(1).wrapping_mul(0x85eb_ca6b);
    let n = (n ^ n >> 13).wrapping_mul(0xc2b2_ae35);
    n ^ n >> 16
}
