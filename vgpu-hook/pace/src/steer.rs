//! The agent's side: one bounded step of a PI loop per period.

use crate::Reading;

/// Scale 1.0 in 16.16 fixed point.
pub const SCALE_ONE: u32 = 1 << 16;
/// Smallest scale, 1/64: costs are too high by the kernels that overlap on the card.
pub const MIN_SCALE: u32 = SCALE_ONE / 64;
/// Largest scale, 65,535: a guess from the grid may be too low by the length of the kernel over ten microseconds.
pub const MAX_SCALE: u32 = u32::MAX;

/// Errors are relative to the share, in 1/1000, and cut here: three times the share. Within the cut they are linear, so
/// that readings which vary around the share leave the scale where it is.
const ERROR_CAP: i64 = 3000;
/// Integral gain per second, in 1/1000. A reading covers two seconds or more and is up to a window old: a gain of 0.2
/// leaves a loop with three seconds of delay well damped.
const INTEGRAL: i64 = 200;
/// An error of three tenths of the share that stays on one side grows the gain with every reading, up to four times:
/// only a guess of the cost is that wrong for that long.
const LARGE: i64 = 300;
const GROWTH: i64 = 3;
/// Gain of the error's change, in 1/1000.
const PROPORTIONAL: i64 = 50;
/// Most that the scale is moved in a second, in 1/1000: a factor of two.
const MOST: i64 = 1000;
/// Time that a step may stand for: after a pause there is one step, not many.
const LONGEST_NS: u64 = 3_000_000_000;
/// The scale is raised to this many times what the library's own estimate calls for, and no further: where more does not
/// help (a kernel longer than two seconds of its share), it would only starve the short kernels that come after.
const HEADROOM: u64 = 4;
/// How long a container has to be absent before that says something.
const ABSENT_NS: u64 = 2_000_000_000;

/// What the agent saw of a container on a card since the last period.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Observation {
    /// Utilisation.
    pub reading: Reading,
    /// Whether the container launched anything (its last launch or its spent time moved).
    pub launched: bool,
    /// Launches that waited.
    pub waits: u64,
    /// How long they waited, all processes together.
    pub waited_ns: u64,
    /// Time since the last period.
    pub elapsed_ns: u64,
}

/// State of the loop for one container on one card. Nothing in it depends on the size of the card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Steer {
    scale: u32,
    error: i64,
    /// Readings in a row with a large error on the same side.
    streak: i64,
    /// Since the last reading that was judged.
    launched: bool,
    waits: u64,
    waited_ns: u64,
    elapsed_ns: u64,
    spent_ns: u64,
}

impl Default for Steer {
    fn default() -> Self {
        Self::new(SCALE_ONE)
    }
}

impl Steer {
    /// A loop that goes on from `scale`, as found on a control page after a restart of the agent.
    #[must_use]
    pub const fn new(scale: u32) -> Self {
        let scale = if scale < MIN_SCALE { MIN_SCALE } else { scale };
        Self {
            scale,
            error: 0,
            streak: 0,
            launched: false,
            waits: 0,
            waited_ns: 0,
            elapsed_ns: 0,
            spent_ns: 0,
        }
    }

    /// The scale for the control page.
    #[must_use]
    pub const fn scale(self) -> u32 {
        self.scale
    }

    /// Enters what the library charged since the last period, before the scale, less what it gave back (the word `spent_ns` of
    /// the usage file). Without it the scale does not rise above one: a multiple of nothing is nothing, and what is raised meanwhile
    /// would starve whoever comes next.
    #[must_use]
    pub const fn spent(self, ns: u64) -> Self {
        Self { spent_ns: self.spent_ns.saturating_add(ns), ..self }
    }

    /// The largest scale that makes sense where `used_per_mille` of the time since the last judged reading was used.
    fn ceiling(&self, used_per_mille: u64) -> u64 {
        let used_ns = u128::from(used_per_mille) * u128::from(self.elapsed_ns) / 1000;
        let ceiling = used_ns * u128::from(HEADROOM * u64::from(SCALE_ONE));
        let ceiling = ceiling.checked_div(u128::from(self.spent_ns)).unwrap_or(0);
        u64::try_from(ceiling).unwrap_or(u64::MAX).max(SCALE_ONE.into())
    }

    /// One step towards `target_percent`.
    ///
    /// | seen | step |
    /// | --- | --- |
    /// | more than the share | costs go up |
    /// | less, and launches waited for a twentieth of the time | costs go down |
    /// | less, and launches did not wait | none: the tenant did not want more |
    /// | absent for two seconds, launches waited | as nothing used: the bucket holds it too tight |
    /// | absent otherwise | none: idle, or too little to be seen |
    /// | gathering, stale or missing | none |
    #[must_use]
    pub fn step(mut self, target_percent: u32, seen: &Observation) -> Self {
        if target_percent == 0 || target_percent >= 100 {
            return self;
        }
        self.launched |= seen.launched;
        self.waits = self.waits.saturating_add(seen.waits);
        self.waited_ns = self.waited_ns.saturating_add(seen.waited_ns);
        self.elapsed_ns = self.elapsed_ns.saturating_add(seen.elapsed_ns);
        let waited = self.waits > 0 && self.waited_ns.saturating_mul(20) >= self.elapsed_ns;
        let (used, covered_ns) = match seen.reading {
            Reading::Present { per_mille, covered_ns } => (i64::from(per_mille.min(1000)), covered_ns),
            Reading::Absent if self.elapsed_ns < ABSENT_NS => return self,
            Reading::Absent if self.launched && waited => (0, self.elapsed_ns),
            Reading::Absent => return Self { error: 0, ..Self::new(self.scale) },
            Reading::Gathering | Reading::Stale { .. } | Reading::Missing => return self,
        };
        let share = i64::from(target_percent) * 10;
        let error = ((used - share) * 1000 / share).min(ERROR_CAP);
        if error < 0 && !waited {
            return Self::new(self.scale);
        }
        let ms = i64::try_from(covered_ns.min(LONGEST_NS) / 1_000_000).unwrap_or(0);
        let most = MOST * ms / 1000;
        let large = error.abs() >= LARGE && (error > 0) == (self.error > 0);
        let streak = if large { (self.streak + 1).min(GROWTH) } else { 0 };
        let gain = INTEGRAL * (1 + streak);
        let step =
            (gain * error / 1000 * ms / 1000 + PROPORTIONAL * (error - self.error) / 1000).clamp(-most, most);
        let old = i64::from(self.scale);
        let scale = if step >= 0 {
            let ceiling = i64::try_from(self.ceiling(used.unsigned_abs())).unwrap_or(i64::MAX);
            (old * (1000 + step) / 1000).min(ceiling.max(old))
        } else {
            old * 1000 / (1000 - step)
        };
        let scale = u32::try_from(scale.clamp(MIN_SCALE.into(), MAX_SCALE.into())).unwrap_or(self.scale);
        Self { error, streak, ..Self::new(scale) }
    }
}
