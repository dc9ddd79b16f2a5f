//! From NVML's samples to the utilisation of a container on a card.

/// The shortest window over which a driver averages: 1/6 s.
pub const MIN_WINDOW_NS: u64 = 166_000_000;
/// The longest: 1 s.
pub const MAX_WINDOW_NS: u64 = 1_000_000_000;
/// A newest sample older than this says nothing about now: three of the longest windows. Drivers were seen to answer
/// with time stamps up to 9 s old.
pub const STALE_NS: u64 = 3_000_000_000;

/// Time over which [`Meter::reading`] averages. Longer than two windows, so that a load of long kernels, which shows as
/// 100 % in one window and not at all in the next, is seen as what it is.
const SPAN_NS: u64 = 2_000_000_000;
const KEPT: usize = 128;

/// What is known about the utilisation of a container on a card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reading {
    /// Share of time in which it had a kernel on the card, in 1/1000 (1000 = all the time).
    Present {
        /// 0..=1000.
        per_mille: u32,
    },
    /// NVML answered and named no process of it: none was busy in the last period.
    Absent,
    /// NVML answered with old samples only.
    Stale {
        /// Age of the newest.
        age_ns: u64,
    },
    /// NVML failed, or could not be asked.
    Missing,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Sample {
    process: u32,
    at_ns: u64,
    percent: u32,
}

/// Collects the samples of one container on one card. NVML lists a process only in windows in which it was busy, and
/// may answer with a sample again or with several: each counts once, for its window, and a window without a sample
/// counts as idle.
#[derive(Clone, Debug)]
pub struct Meter {
    samples: [Sample; KEPT],
    next: usize,
    window_ns: u64,
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
            samples: [Sample { process: 0, at_ns: 0, percent: 0 }; KEPT],
            next: 0,
            window_ns: MAX_WINDOW_NS,
        }
    }

    /// Enters a sample: `percent` of the window that ended at `at_ns` (the driver's time stamp, in the clock that
    /// [`Meter::reading`] is asked in). Known ones, and percentages that are none, are left out.
    pub fn push(&mut self, process: u32, at_ns: u64, percent: u32) {
        let known = |s: &Sample| s.process == process && s.at_ns == at_ns;
        if at_ns == 0 || percent > 100 || self.samples.iter().any(known) {
            return;
        }
        let before =
            self.samples.iter().filter(|s| s.process == process && s.at_ns < at_ns).map(|s| s.at_ns).max();
        if let Some(gap) = before.filter(|b| *b != 0).map(|b| at_ns - b)
            && gap >= MIN_WINDOW_NS * 9 / 10
        {
            self.window_ns = self.window_ns.min(gap.max(MIN_WINDOW_NS));
        }
        if let Some(place) = self.samples.get_mut(self.next) {
            *place = Sample { process, at_ns, percent };
        }
        self.next = (self.next + 1) % KEPT;
    }

    /// The window that the samples have shown.
    #[must_use]
    pub const fn window_ns(&self) -> u64 {
        self.window_ns
    }

    /// The container's utilisation up to `now_ns`, after a call that NVML answered.
    #[must_use]
    pub fn reading(&self, now_ns: u64) -> Reading {
        let Some(newest) = self.samples.iter().map(|s| s.at_ns).filter(|at| *at != 0).max() else {
            return Reading::Absent;
        };
        let age_ns = now_ns.saturating_sub(newest);
        if age_ns > STALE_NS {
            // Old samples, seen before, of a container that has been idle since.
            return Reading::Absent;
        }
        // The newest window may have ended up to one window ago.
        let end = newest.max(now_ns.saturating_sub(self.window_ns));
        let start = end.saturating_sub(SPAN_NS);
        let busy: u64 = self
            .samples
            .iter()
            .filter(|s| s.at_ns > start && s.at_ns <= end)
            .map(|s| u64::from(s.percent) * self.window_ns.min(s.at_ns - start))
            .sum();
        let per_mille = (busy / (SPAN_NS / 10)).min(1000);
        Reading::Present { per_mille: u32::try_from(per_mille).unwrap_or(1000) }
    }

    /// As [`Meter::reading`], where this call answered with `returned` as its newest time stamp for the container
    /// (`None` = it named no process of it). A call that gives only old stamps is told apart from one that gives none.
    #[must_use]
    pub fn reading_after(&self, now_ns: u64, returned: Option<u64>) -> Reading {
        match returned.map(|at| now_ns.saturating_sub(at)) {
            Some(age_ns) if age_ns > STALE_NS => Reading::Stale { age_ns },
            _ => self.reading(now_ns),
        }
    }
}
