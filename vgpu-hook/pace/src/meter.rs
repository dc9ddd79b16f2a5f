//! From NVML's samples to the utilisation of a container on a card.

use alloc::collections::BTreeMap;

use crate::sample::{MAX_WINDOW_NS, MIN_WINDOW_NS, Reading, STALE_NS};

/// Samples are taken together until they cover this much. Longer than two windows, so that a load of long kernels, which
/// shows as 100 % in one window and not at all in the next, is seen as what it is.
const COVER_NS: u64 = 2_000_000_000;
/// A container that is at work and held back shows up at least this often: the longest wait and the longest window. A
/// longer gap was a pause.
const PAUSE_NS: u64 = crate::AHEAD_NS + MAX_WINDOW_NS;

/// No time stamp is further ahead of the clock than this: a window, by which a hold is, and as much again.
const EARLY_NS: u64 = 2 * MAX_WINDOW_NS;

/// A sample in quarters of a point. NVML gives whole points and does not say how it rounds, and with several processes
/// the error adds up: a quarter more halves it both for rounding down and for rounding to the nearest.
fn quarters(percent: u32) -> u64 {
    u64::from(percent) * 4 + u64::from(percent != 0 && percent != 100)
}

/// Collects the samples of one container on one card.
///
/// NVML lists a process only in windows in which it was busy, may answer with a sample again or with several, and may be
/// seconds late. So each sample counts once, for its window; a window without one counts as idle, but only up to the
/// newest sample: what comes after it is not known yet.
///
/// Samples are kept until a reading has taken them, so that as many processes as there are count, each with all its
/// windows.
#[derive(Clone, Debug)]
pub struct Meter {
    /// Percent by time stamp and process: what no reading has taken yet.
    samples: BTreeMap<(u64, u32), u32>,
    /// The newest time stamp of each process, and the answer that it came with.
    newest: BTreeMap<u32, (u64, u64)>,
    /// Answers of the driver so far.
    answers: u64,
    window_ns: u64,
    taken_until: u64,
    held: bool,
}

impl Default for Meter {
    fn default() -> Self {
        Self::new()
    }
}

impl Meter {
    /// A meter without samples. The window is taken for the longest until samples show a shorter one.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            samples: BTreeMap::new(),
            newest: BTreeMap::new(),
            answers: 0,
            window_ns: MAX_WINDOW_NS,
            taken_until: 0,
            held: false,
        }
    }

    /// Enters a sample: `percent` of the window that ended at `at_ns` (the driver's time stamp, in the clock that
    /// [`Meter::take`] is asked in). Known ones, and percentages that are none, are left out.
    pub fn push(&mut self, process: u32, at_ns: u64, percent: u32) {
        if at_ns == 0 || percent > 100 || self.samples.contains_key(&(at_ns, process)) {
            return;
        }
        let before = self.newest.get(&process).copied();
        let newest = before.map_or(at_ns, |(before_ns, _)| before_ns.max(at_ns));
        self.newest.insert(process, (newest, self.answers));
        if at_ns <= self.taken_until {
            // What was taken is not looked at again: what the driver repeats of it says nothing new.
            return;
        }
        self.samples.insert((at_ns, process), percent);
        // A driver that lists each window of a process shows by them how long one is. One that lists the newest only, of a
        // process that pauses, shows nothing by the time between two answers.
        let gap = before.filter(|(_, answer)| *answer == self.answers).map(|(ns, _)| at_ns.abs_diff(ns));
        if let Some(gap) = gap.filter(|gap| *gap >= MIN_WINDOW_NS * 9 / 10) {
            self.window_ns = self.window_ns.min(gap.max(MIN_WINDOW_NS));
        }
    }

    /// The newest time stamp.
    fn newest(&self) -> Option<u64> {
        self.newest.values().map(|(at_ns, _)| *at_ns).max()
    }

    /// The window that the samples have shown.
    #[must_use]
    pub const fn window_ns(&self) -> u64 {
        self.window_ns
    }

    /// How old the newest sample is; `None` where there is none.
    #[must_use]
    pub fn age_ns(&self, now_ns: u64) -> Option<u64> {
        Some(now_ns.saturating_sub(self.newest()?))
    }

    /// Tells whether the container is held to its share from `now_ns` on. True where the last reading says something of
    /// that share: it was held before already. What it used while it ran freely must not count as more than its share,
    /// so samples of windows that began before the hold are left out.
    pub fn held(&mut self, held: bool, now_ns: u64) -> bool {
        let before = core::mem::replace(&mut self.held, held);
        if held && !before {
            self.taken(now_ns.saturating_add(self.window_ns));
        }
        held && before
    }

    /// Nothing up to `until` counts any more.
    fn taken(&mut self, until: u64) {
        self.taken_until = self.taken_until.max(until);
        self.samples = self.samples.split_off(&(self.taken_until.saturating_add(1), 0));
    }

    /// The container's utilisation since the last [`Reading::Present`], after a call that NVML answered.
    pub fn take(&mut self, now_ns: u64) -> Reading {
        self.answers += 1;
        if self.newest().unwrap_or(0).max(self.taken_until) > now_ns.saturating_add(EARLY_NS) {
            // The clock was set back: until it has caught up, nothing would be new.
            let (answers, window_ns, held) = (self.answers, self.window_ns, self.held);
            *self = Self { answers, window_ns, held, taken_until: now_ns, ..Self::new() };
            return Reading::Gathering;
        }
        let Some(newest) = self.newest() else { return Reading::Absent };
        self.newest.retain(|_, (at_ns, _)| now_ns.saturating_sub(*at_ns) <= 2 * STALE_NS);
        if newest <= self.taken_until {
            let age_ns = now_ns.saturating_sub(newest);
            return if age_ns <= STALE_NS { Reading::Stale { age_ns } } else { Reading::Absent };
        }
        let (mut begin, mut previous) = (self.taken_until, self.taken_until);
        for &(at_ns, _) in self.samples.keys() {
            if at_ns - previous > PAUSE_NS {
                begin = at_ns.saturating_sub(self.window_ns).max(begin);
            }
            previous = at_ns;
        }
        let covered_ns = newest - begin;
        if covered_ns < COVER_NS {
            let is_over = now_ns.saturating_sub(newest) > STALE_NS;
            if is_over {
                // No more will come: the container stopped before there were enough.
                self.taken(newest);
            }
            return if is_over { Reading::Absent } else { Reading::Gathering };
        }
        // A sample stands for its window, and for no time for which another one of its process does.
        let mut counted: BTreeMap<u32, u64> = BTreeMap::new();
        let mut busy = 0;
        for (&(at_ns, process), percent) in self.samples.range((begin.saturating_add(1), 0)..) {
            let before = counted.insert(process, at_ns).unwrap_or(begin);
            busy += quarters(*percent) * self.window_ns.min(at_ns - before);
        }
        self.taken(newest);
        let per_mille = (busy / (covered_ns / 10 * 4)).min(1000);
        Reading::Present { per_mille: u32::try_from(per_mille).unwrap_or(1000), covered_ns }
    }
}
