//! What a launch costs: measured where it was, guessed where it was not.

use core::sync::atomic::Ordering::Relaxed;
use core::sync::atomic::{AtomicU16, AtomicU32, AtomicU64};

use crate::AHEAD_NS;

/// One launch in this many is measured of a function that is short and has been measured a few times, one in
/// [`SAMPLE_EVERY_YOUNG`] until then. Of those that take a tenth of a millisecond one in 32 is, of those that take a whole
/// one in eight, and each that takes ten: there are few of them, and the two events cost nothing beside them.
pub const SAMPLE_EVERY: u32 = 256;
/// One launch in this many of a short function with few measurements is measured.
pub const SAMPLE_EVERY_YOUNG: u32 = 64;
/// Measurements until a function is known well.
const YOUNG: u16 = 8;
/// What a launch of a function is charged whose first measurement is still under way: this, doubled with every launch once
/// the measured one runs.
pub const UNKNOWN_NS: u64 = 1_000_000;
/// Launches of one unmeasured function after which the next has to wait [`AHEAD_NS`](crate::AHEAD_NS) at a share of
/// 50 %: 1 + 2 + 4 + ... ms reach a second with the tenth. The queue that a tenant can build before its kernel is known
/// is at most this many kernels deep (deeper by one for each halving of that second: none at smaller shares).
pub const BURST_LAUNCHES: u32 = 10;
/// What one wave of resident threads is guessed to take: between a small elementwise kernel (2-5 us) and a tile of a
/// large matrix product (50-100 us). A guess.
const WAVE_NS: u64 = 10_000;
/// The least that a pair of events around a kernel shows: their resolution is half a microsecond, and a kernel without work
/// takes longer than that between them. Less is a driver that errs, and is believed when it says so twice.
pub const LEAST_NS: u64 = 1_000;
/// The class of graphs in a [`Key`]; grids have the classes 0..=62.
pub const GRAPH_CLASS: u32 = 63;

/// The size of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size {
    /// Blocks in the grid.
    pub blocks: u64,
    /// Threads in a block.
    pub threads: u64,
}

impl Size {
    /// From the driver's six numbers; whatever they are, nothing overflows.
    #[must_use]
    #[inline]
    pub const fn new(grid: [u32; 3], block: [u32; 3]) -> Self {
        Self { blocks: product(grid), threads: product(block) }
    }

    /// Class 0..=62: the binary logarithm of the number of blocks.
    #[inline]
    const fn class(self) -> u32 {
        let class = (self.blocks | 1).ilog2();
        if class < GRAPH_CLASS { class } else { GRAPH_CLASS - 1 }
    }
}

#[inline]
const fn product(n: [u32; 3]) -> u64 {
    (n[0] as u64 * n[1] as u64).saturating_mul(n[2] as u64)
}

/// A guess of what a launch costs in ns of card: the waves that its threads need, times ten microseconds. `resident` is
/// how many threads the card can hold at once (SMs x threads per SM); 0 counts as 1.
#[must_use]
pub const fn guess_ns(size: Size, resident: u64) -> u64 {
    let resident = if resident == 0 { 1 } else { resident };
    let waves = size.blocks.saturating_mul(size.threads).div_ceil(resident);
    let waves = if waves == 0 { 1 } else { waves };
    waves.saturating_mul(WAVE_NS)
}

/// What is measured together: one function at one size of grid, or one executable graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Key(u64);

impl Key {
    /// A function's handle and the size of its launch.
    #[must_use]
    #[inline]
    pub const fn function(handle: u64, size: Size) -> Self {
        Self::new(handle, size.class())
    }

    /// An executable graph's handle.
    #[must_use]
    #[inline]
    pub const fn graph(handle: u64) -> Self {
        Self::new(handle, GRAPH_CLASS)
    }

    /// Handles are addresses, below 2^57 on both architectures. 0 marks a free entry.
    #[inline]
    const fn new(handle: u64, class: u32) -> Self {
        let key = handle << 6 | class as u64;
        Self(if key == 0 { u64::MAX } else { key })
    }

    /// The key as a number, never 0.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }

    /// The key of which [`Key::get`] gave the number.
    #[must_use]
    pub const fn from_raw(raw: u64) -> Self {
        Self(if raw == 0 { u64::MAX } else { raw })
    }
}

/// How far the first measurement of a key has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// None is under way: the launch before could not be measured.
    None,
    /// It waits for its turn in its stream, which may take as long as the program likes.
    Queued,
    /// It has been on the card for this many ns.
    Running(u64),
}

/// What the next launch of a key costs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quote {
    /// ns of card.
    pub ns: u64,
    /// Whether this launch should be measured.
    pub sample: bool,
    /// Whether the number was measured; otherwise it is a guess, or the price of not knowing.
    pub known: bool,
    index: Option<usize>,
}

/// A key that was measured: what most launches need, and no more.
#[derive(Clone, Copy, Debug)]
pub struct Known<'a> {
    entry: &'a Entry,
    /// ns of card.
    pub ns: u64,
}

impl Known<'_> {
    /// Enters a launch that went for this; whether it should be measured.
    #[inline]
    #[must_use]
    pub fn book(self) -> bool {
        let seen = self.entry.seen.load(Relaxed);
        let due = self.entry.is_due(seen, self.ns);
        self.entry.book(seen, self.ns);
        due
    }
}

/// What a measurement of a key says about the launches before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Correction {
    /// They were charged right, or were corrected before.
    None,
    /// Charge this many ns more.
    Charge(u64),
    /// Give this many ns back.
    Refund(u64),
}

/// A measurement of more than this many times what is known is either of a kernel that was held up (by another process's
/// time slices, or a thread that lost its CPU) or the first of a function that takes longer now. The next ones tell.
const JUMP: u64 = 8;
/// While this many measurements are still to come, each launch is measured.
const WATCH: u16 = 8;
/// In [`Entry::watch`]: the last measurement was of nothing.
const LOW: u16 = 1 << 8;
/// The most that launches are charged later because their function turned out to take longer now.
const MOST_OWED: u64 = AHEAD_NS / 2;
const ENTRIES: usize = 1024;
const PROBES: usize = 16;
const ENTRY_BITS: u32 = ENTRIES.trailing_zeros();
const _: () = assert!(ENTRIES.is_power_of_two() && PROBES < ENTRIES);

#[derive(Debug)]
struct Entry {
    key: AtomicU64,
    /// Smoothed measured cost in ns; 0 = not measured yet.
    cost: AtomicU64,
    /// ns charged to the launches so far, while the function is young.
    charged: AtomicU64,
    /// Launches. Counted with plain loads and stores: a lost count shifts a sample by one launch.
    seen: AtomicU32,
    /// Measurements, up to [`YOUNG`].
    measured: AtomicU16,
    /// Not 0 = each launch is measured: measurements for which that goes on, and [`LOW`].
    watch: AtomicU16,
    /// `seen` at the last measurement.
    since: AtomicU32,
    /// us that launches were charged too little, if the next measurement agrees with the last one.
    owed_us: AtomicU32,
}

impl Entry {
    const fn new() -> Self {
        Self {
            key: AtomicU64::new(0),
            cost: AtomicU64::new(0),
            charged: AtomicU64::new(0),
            seen: AtomicU32::new(0),
            measured: AtomicU16::new(0),
            watch: AtomicU16::new(0),
            since: AtomicU32::new(0),
            owed_us: AtomicU32::new(0),
        }
    }

    /// Whether the next launch of a known function is to be measured.
    #[inline]
    fn is_due(&self, seen: u32, cost_ns: u64) -> bool {
        let every = match cost_ns {
            _ if self.watch.load(Relaxed) != 0 => return true,
            10_000_000.. => return true,
            1_000_000.. => 8,
            100_000.. => 32,
            _ if self.measured.load(Relaxed) < YOUNG => SAMPLE_EVERY_YOUNG,
            _ => SAMPLE_EVERY,
        };
        seen.is_multiple_of(every)
    }

    #[inline]
    fn book(&self, seen: u32, ns: u64) {
        self.seen.store(seen.wrapping_add(1), Relaxed);
        if self.measured.load(Relaxed) < YOUNG {
            self.charged.store(self.charged.load(Relaxed).saturating_add(ns), Relaxed);
        }
    }

    fn clear(&self) {
        self.cost.store(0, Relaxed);
        self.charged.store(0, Relaxed);
        self.seen.store(0, Relaxed);
        self.measured.store(0, Relaxed);
        self.since.store(0, Relaxed);
        self.watch.store(0, Relaxed);
        self.owed_us.store(0, Relaxed);
    }

    /// Whether a measurement is to be believed: one of nothing is when it comes twice.
    fn believes(&self, ns: u64, old: u64) -> bool {
        let watch = self.watch.load(Relaxed);
        let low = ns < LEAST_NS && (old == 0 || old > JUMP * LEAST_NS);
        let believed = !low || watch & LOW != 0;
        self.watch.store(if believed { (watch & !LOW).saturating_sub(1) } else { LOW | WATCH }, Relaxed);
        believed
    }

    /// The function seems to take longer now: it is as good as a new one. What the launches since the last measurement
    /// should have been charged is owed until the next one agrees.
    fn rise(&self, ns: u64, old: u64) {
        let launches = self.seen.load(Relaxed).wrapping_sub(self.since.load(Relaxed));
        let owed = (ns - old).saturating_mul(launches.into()).min(MOST_OWED) / 1_000;
        self.clear();
        self.cost.store(ns, Relaxed);
        self.measured.store(1, Relaxed);
        self.owed_us.store(u32::try_from(owed).unwrap_or(0), Relaxed);
        self.watch.store(WATCH, Relaxed);
    }
}

/// The costs of one process: a table of fixed size. A key that finds no place in it is charged by its guess.
#[derive(Debug)]
pub struct Costs {
    entries: [Entry; ENTRIES],
}

impl Default for Costs {
    fn default() -> Self {
        Self::new()
    }
}

impl Costs {
    /// An empty table.
    #[must_use]
    #[expect(clippy::large_stack_arrays, reason = "40 KiB; the library's is a static")]
    pub const fn new() -> Self {
        Self { entries: [const { Entry::new() }; ENTRIES] }
    }

    /// What a launch of `key` costs. `guess_ns` and `progress` are asked for only where nothing was measured; `measurable`
    /// says that the launch can be measured.
    ///
    /// While the first measured launch runs the price doubles with every further one, for a queue cannot be taken back:
    /// see [`BURST_LAUNCHES`]. The measurement settles the account ([`Costs::measured`]). Several of the first launches
    /// are measured, for the first may wait in its stream for what the others do in theirs.
    #[inline]
    pub fn quote(
        &self,
        key: Key,
        measurable: bool,
        guess_ns: impl FnOnce() -> u64,
        progress: impl FnOnce() -> Progress,
    ) -> Quote {
        let Some(index) = self.find(key) else {
            return Quote { ns: guess_ns(), sample: false, known: false, index: None };
        };
        let Some(entry) = self.entries.get(index) else {
            return Quote { ns: guess_ns(), sample: false, known: false, index: None };
        };
        let (cost, seen) = (entry.cost.load(Relaxed), entry.seen.load(Relaxed));
        if cost != 0 {
            let sample = measurable && entry.is_due(seen, cost);
            return Quote { ns: cost, sample, known: true, index: Some(index) };
        }
        if !measurable {
            return Quote { ns: guess_ns(), sample: false, known: false, index: Some(index) };
        }
        let guess = guess_ns();
        let ns = match progress() {
            Progress::None if seen > 0 => guess,
            Progress::None | Progress::Queued => guess.max(UNKNOWN_NS),
            Progress::Running(ns) => guess.max(UNKNOWN_NS << seen.min(BURST_LAUNCHES)).max(ns),
        };
        let sample = seen == 0 || seen.is_power_of_two() || entry.watch.load(Relaxed) != 0;
        Quote { ns, sample, known: false, index: Some(index) }
    }

    /// The cost of `key`, where it was measured.
    #[inline]
    #[must_use]
    pub fn known(&self, key: Key) -> Option<Known<'_>> {
        let entry = self.find_existing(key).and_then(|i| self.entries.get(i))?;
        let ns = entry.cost.load(Relaxed);
        (ns != 0).then_some(Known { entry, ns })
    }

    /// Enters a launch that went for `quote`.
    #[inline]
    pub fn book(&self, quote: &Quote) {
        let Some(entry) = quote.index.and_then(|i| self.entries.get(i)) else { return };
        entry.book(entry.seen.load(Relaxed), quote.ns);
    }

    /// Enters a measurement: the first counts whole and settles the launches before it, a later one counts a quarter.
    ///
    /// A measurement can be far too high, where the thread lost its CPU between event and launch or others had the card,
    /// but not too low. So while a function is young, one that is far below what is known takes its place, and settles
    /// again. After one that is far above, the function is young again and each launch is measured: a few launches wait
    /// until the next one has told which it was.
    pub fn measured(&self, key: Key, ns: u64) -> Correction {
        let Some(entry) = self.find(key).and_then(|i| self.entries.get(i)) else { return Correction::None };
        let (old, measured) = (entry.cost.load(Relaxed), entry.measured.load(Relaxed));
        if !entry.believes(ns, old) {
            return Correction::None;
        }
        let ns = ns.clamp(LEAST_NS, 1 << 40);
        let owed = u64::from(entry.owed_us.swap(0, Relaxed)) * 1_000;
        let charge_owed = || if owed == 0 { Correction::None } else { Correction::Charge(owed) };
        if old != 0 && ns > old.saturating_mul(JUMP) {
            entry.rise(ns, old);
            return charge_owed();
        }
        entry.measured.store((measured + 1).min(YOUNG), Relaxed);
        entry.since.store(entry.seen.load(Relaxed), Relaxed);
        if old != 0 && (measured >= YOUNG || ns >= old / 4) {
            entry.cost.store(((old - old / 4) + ns / 4).max(1), Relaxed);
            entry.charged.store(entry.charged.load(Relaxed).saturating_add(owed), Relaxed);
            return charge_owed();
        }
        entry.cost.store(ns, Relaxed);
        let due = ns.saturating_mul(entry.seen.load(Relaxed).into());
        let charged = entry.charged.swap(due, Relaxed);
        match due.cmp(&charged) {
            core::cmp::Ordering::Equal => Correction::None,
            core::cmp::Ordering::Greater => Correction::Charge(due - charged),
            core::cmp::Ordering::Less => Correction::Refund(charged - due),
        }
    }

    /// Forgets `key`: its handle is gone and may come again for something else. The entry stays in its place, so that
    /// keys behind it are still found.
    pub fn forget(&self, key: Key) {
        if let Some(entry) = self.find_existing(key).and_then(|i| self.entries.get(i)) {
            entry.clear();
        }
    }

    #[inline]
    fn slots(key: Key) -> impl Iterator<Item = usize> {
        // Fibonacci hashing: handles differ in their middle bits.
        let start = (key.0.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - ENTRY_BITS)) as usize;
        (0..PROBES).map(move |i| (start + i) & (ENTRIES - 1))
    }

    #[inline]
    fn find(&self, key: Key) -> Option<usize> {
        for index in Self::slots(key) {
            let entry = self.entries.get(index)?;
            let found = entry.key.load(Relaxed);
            if found == key.0 {
                return Some(index);
            }
            if found == 0 {
                match entry.key.compare_exchange(0, key.0, Relaxed, Relaxed) {
                    Ok(_) => return Some(index),
                    Err(other) if other == key.0 => return Some(index),
                    Err(_) => {}
                }
            }
        }
        None
    }

    #[inline]
    fn find_existing(&self, key: Key) -> Option<usize> {
        Self::slots(key).find(|i| self.entries.get(*i).is_some_and(|e| e.key.load(Relaxed) == key.0))
    }
}
