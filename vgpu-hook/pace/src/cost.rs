//! What a launch costs: measured where it was, guessed where it was not.
//!
//! A function may take another time with each launch. So three things are kept apart:
//! * A launch that is measured pays what it took, neither more nor less: the price at which it went is corrected
//!   ([`Measurement::paid_ns`]).
//! * The others pay the mean. Only launches that were picked by chance count for it ([`Sample::Chance`]): neither the rhythm of
//!   a program nor what was measured before says which these are.
//! * Where a measurement is far above the mean, each launch is measured for a while ([`Sample::Close`]). That is how a
//!   function is found out that takes longer from now on, and one that varies is charged launch by launch.

use core::sync::atomic::Ordering::Relaxed;
use core::sync::atomic::{AtomicU32, AtomicU64};

use crate::entry::{Entry, MOST_NS};

/// What a launch of a function is charged whose first measurement is still under way: this, doubled with every launch once
/// the measured one runs.
pub const UNKNOWN_NS: u64 = 1_000_000;
/// Launches of one unmeasured function after which the next has to wait [`AHEAD_NS`](crate::AHEAD_NS) at a share of
/// 50 %: 1 + 2 + 4 + ... ms reach a second with the tenth. The queue that a tenant can build before its kernel is known, once that
/// runs, is about this many kernels deep.
pub const BURST_LAUNCHES: u32 = 10;
/// Where launches pay by the clock, one of the next few is measured so long after that was last done, whatever its
/// function: one that takes longer than it did is soon found out, and two events cost nothing in such a time.
pub const CLOSE_EVERY_NS: u64 = 5_000_000;
/// What one wave of resident threads is guessed to take: between a small elementwise kernel (2-5 us) and a tile of a
/// large matrix product (50-100 us). A guess.
const WAVE_NS: u64 = 10_000;
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

    /// Of a graph that was [forgotten](Costs::forget) while a launch of it was measured: what that took is due from this
    /// launch, and says nothing of whatever has the handle now. No graph has the handle 0.
    pub const FORGOTTEN: Self = Self::graph(0);

    /// Whether it is of a graph.
    #[must_use]
    pub const fn is_graph(self) -> bool {
        self.0 & 63 == GRAPH_CLASS as u64
    }

    /// Whether a launch of `other` that is measured for `sample` tells what one of this costs, of which nothing is known: a new
    /// graph is taken for those before it, for many programs make one for each step and launch none twice.
    #[must_use]
    pub fn is_told_by(self, other: Self, sample: Sample) -> bool {
        other == self || (self.is_graph() && other.is_graph() && sample == Sample::First)
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

/// How far the first measurement of a key has come. Of several the greatest counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Progress {
    /// None is under way.
    None,
    /// It waits for its turn in its stream, which may take as long as the program likes.
    Queued,
    /// It has been on the card for this many ns.
    Running(u64),
}

/// Whether a launch is measured, and for what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sample {
    /// It is not.
    No,
    /// Nothing is known of its function yet.
    First,
    /// Picked by chance: counts for the mean.
    Chance,
    /// One of those looked at closely: says what it cost itself, and whether its function takes longer now.
    Close,
}

/// What the next launch of a key costs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quote {
    /// ns of card.
    pub ns: u64,
    /// Whether this launch should be measured.
    pub sample: Sample,
    /// Whether the number was measured; otherwise it is a guess, or the price of not knowing.
    pub known: bool,
    /// It is of a graph, and none was measured yet.
    first_graph: bool,
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
    pub fn book(self) -> Sample {
        self.entry.book(self.ns)
    }
}

/// A launch that was measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Measurement {
    /// Its key.
    pub key: Key,
    /// Time between its two events.
    pub ns: u64,
    /// Time that the host took from before the first event until after the second one, 0 where the card had other work for all
    /// of it. As much of `ns` may be none of the card's: a thread that lost its CPU, or a function whose code had to be loaded
    /// first.
    pub host_ns: u64,
    /// What it paid.
    pub paid_ns: u64,
    /// What it was measured for.
    pub sample: Sample,
}

/// What a measurement of a key says about what was charged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Correction {
    /// It was right.
    None,
    /// The launches of it so far: charge this many ns more.
    Charge(u64),
    /// The launches of it so far: give this many ns back.
    Refund(u64),
    /// The one launch that was measured.
    Launch {
        /// What it paid.
        paid_ns: u64,
        /// What it should have paid.
        due_ns: u64,
    },
}

impl Correction {
    /// Of several launches, from what they paid to what they should have paid.
    pub(crate) const fn of_all(paid: u64, due: u64) -> Self {
        if due > paid {
            Self::Charge(due - paid)
        } else if paid > due {
            Self::Refund(paid - due)
        } else {
            Self::None
        }
    }

    /// Of one launch.
    pub(crate) const fn of_one(paid_ns: u64, due_ns: u64) -> Self {
        if due_ns == paid_ns { Self::None } else { Self::Launch { paid_ns, due_ns } }
    }

    /// What is charged with it in all: ns, less than 0 where something is given back.
    #[must_use]
    pub fn charge_ns(self) -> i64 {
        let signed = |ns: u64| i64::try_from(ns).unwrap_or(i64::MAX);
        match self {
            Self::None => 0,
            Self::Charge(ns) => signed(ns),
            Self::Refund(ns) => -signed(ns),
            Self::Launch { paid_ns, due_ns } => signed(due_ns) - signed(paid_ns),
        }
    }
}

const ENTRIES: usize = 1024;
const PROBES: usize = 16;
const ENTRY_BITS: u32 = ENTRIES.trailing_zeros();
const _: () = assert!(ENTRIES.is_power_of_two() && PROBES < ENTRIES);

/// The costs of one process: a table of fixed size. A key that is in use finds a place in it where one of sixteen is free,
/// forgotten, or of a key that was not launched lately. Those that find none are taken for one function that varies.
#[derive(Debug)]
pub struct Costs {
    entries: [Entry; ENTRIES],
    others: Entry,
    /// What graphs took when they were measured first, smoothed; 0 = none was. Many programs make a new one for each step.
    graph_ns: AtomicU64,
    /// Launches of graphs before that.
    graphs: AtomicU32,
}

impl Default for Costs {
    fn default() -> Self {
        Self::new()
    }
}

impl Costs {
    /// An empty table.
    #[must_use]
    #[expect(clippy::large_stack_arrays, reason = "64 KiB; the library's is a static")]
    pub const fn new() -> Self {
        Self {
            entries: [const { Entry::new() }; ENTRIES],
            others: Entry::new(),
            graph_ns: AtomicU64::new(0),
            graphs: AtomicU32::new(0),
        }
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
        let index = self.find(key);
        let entry = self.at(index);
        let quote = Quote { ns: entry.cost(), sample: Sample::No, known: true, first_graph: false, index };
        if quote.ns != 0 {
            return if measurable { Quote { sample: entry.sample(), ..quote } } else { quote };
        }
        let guess = self.guess(key, guess_ns());
        let quote = Quote { ns: guess, known: false, first_graph: self.is_first_graph(key), ..quote };
        if !measurable {
            return quote;
        }
        let (seen, progress) = (entry.launches(), progress());
        // Of graphs that are new each time none would ever be launched again.
        let before = if quote.first_graph { self.graphs.load(Relaxed) } else { seen };
        let blind = progress == Progress::None && entry.fails();
        let ns = match progress {
            _ if blind => guess,
            Progress::None | Progress::Queued => guess.max(UNKNOWN_NS),
            Progress::Running(ns) => guess.max(UNKNOWN_NS << before.min(BURST_LAUNCHES)).max(ns),
        };
        // Where nothing is under way that would tell, this one is to.
        let first = seen == 0
            || seen.is_power_of_two()
            || entry.is_watched()
            || (progress == Progress::None && !blind);
        Quote { ns, sample: if first { Sample::First } else { Sample::No }, ..quote }
    }

    /// Whether `key` is of a graph, and none was measured yet: then they are counted as launches of one function.
    fn is_first_graph(&self, key: Key) -> bool {
        key.is_graph() && self.graph_ns.load(Relaxed) == 0
    }

    /// A graph's kernels are not known one by one: it is taken for those before it.
    fn guess(&self, key: Key, guess_ns: u64) -> u64 {
        if key.is_graph() { guess_ns.max(self.graph_ns.load(Relaxed)) } else { guess_ns }
    }

    /// The cost of `key`, where it was measured.
    #[inline]
    #[must_use]
    pub fn known(&self, key: Key) -> Option<Known<'_>> {
        let entry = self.existing(key)?;
        let ns = entry.cost();
        (ns != 0).then_some(Known { entry, ns })
    }

    /// Enters a launch that went for `quote`.
    #[inline]
    pub fn book(&self, quote: &Quote) {
        let _ = self.at(quote.index).book(quote.ns);
        if quote.first_graph {
            self.graphs.fetch_add(1, Relaxed);
        }
    }

    /// A launch of `key` that went could not be measured, and not for want of a place: those after it go for their guess.
    pub fn failed(&self, key: Key) {
        if let Some(entry) = self.existing(key) {
            entry.fail();
        }
    }

    /// What a launch that was picked by chance and went for `paid_ns` pays more, for it found no place to be measured: picked
    /// launches find one where few are on their way, after long ones, and the mean would be of those that do.
    pub fn missed(&self, key: Key, paid_ns: u64) -> Correction {
        self.existing(key).unwrap_or(&self.others).missed(paid_ns)
    }

    /// It is time to measure a launch of what went for `quote`: one of the next few is.
    pub fn measure_soon(&self, quote: &Quote) {
        self.at(quote.index).measure_soon();
    }

    /// Takes a launch that went for `paid_ns` out of the account again: the driver refused it.
    pub fn refused(&self, key: Key, paid_ns: u64) {
        if self.is_first_graph(key) {
            let _ = self.graphs.fetch_update(Relaxed, Relaxed, |graphs| graphs.checked_sub(1));
        }
        self.existing(key).unwrap_or(&self.others).refused(paid_ns);
    }

    /// Enters a measurement. The first one settles what the launches before it were charged, a later one what the measured
    /// launch was.
    pub fn measured(&self, measured: &Measurement) -> Correction {
        if measured.key.is_graph() && measured.sample == Sample::First {
            let old = self.graph_ns.load(Relaxed);
            let new = if old == 0 { measured.ns } else { old - old / 4 + measured.ns / 4 };
            self.graph_ns.store(new.min(crate::AHEAD_NS), Relaxed);
        }
        if measured.key == Key::FORGOTTEN {
            return Correction::of_one(measured.paid_ns, measured.ns.min(MOST_NS));
        }
        self.existing(measured.key).unwrap_or(&self.others).measured(measured)
    }

    /// Forgets `key`: its handle is gone and may come again for something else. The entry keeps its place until another key
    /// needs it, so that keys behind it are still found.
    pub fn forget(&self, key: Key) {
        if let Some(entry) = self.existing(key) {
            entry.clear();
        }
    }

    /// Some functions are gone, nobody knows which: their handles may come again for others, of which the next launches tell.
    pub fn functions_gone(&self) {
        let functions =
            self.entries.iter().filter(|entry| !Key::from_raw(entry.key.load(Relaxed)).is_graph());
        functions.for_each(Entry::look_closely);
    }

    #[inline]
    fn slots(key: Key) -> impl Iterator<Item = usize> {
        // Fibonacci hashing: handles differ in their middle bits.
        let start = (key.0.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - ENTRY_BITS)) as usize;
        (0..PROBES).map(move |i| (start + i) & (ENTRIES - 1))
    }

    #[inline]
    fn at(&self, index: Option<usize>) -> &Entry {
        index.and_then(|i| self.entries.get(i)).unwrap_or(&self.others)
    }

    /// The place of `key`, which gets one where it has none.
    #[inline]
    fn find(&self, key: Key) -> Option<usize> {
        for index in Self::slots(key) {
            let entry = self.entries.get(index)?;
            match entry.key.load(Relaxed) {
                found if found == key.0 => return Some(index),
                0 => match entry.key.compare_exchange(0, key.0, Relaxed, Relaxed) {
                    Ok(_) => return Some(index),
                    Err(other) if other == key.0 => return Some(index),
                    Err(_) => {}
                },
                _ => {}
            }
        }
        self.replace(key)
    }

    /// Gives `key` the place of another one that was not launched since the last time that somebody looked for a place here.
    #[cold]
    fn replace(&self, key: Key) -> Option<usize> {
        let mut spare = None;
        for index in Self::slots(key) {
            let entry = self.entries.get(index)?;
            let idle = entry.was_idle();
            if idle && spare.is_none() {
                spare = Some((index, entry, entry.key.load(Relaxed)));
            }
        }
        let (index, entry, old) = spare?;
        // Of two threads that want the place one gets it; the other one is one of the others for once.
        entry.key.compare_exchange(old, key.0, Relaxed, Relaxed).ok()?;
        entry.clear();
        Some(index)
    }

    #[inline]
    fn existing(&self, key: Key) -> Option<&Entry> {
        Self::slots(key).find_map(|i| self.entries.get(i).filter(|e| e.key.load(Relaxed) == key.0))
    }
}
