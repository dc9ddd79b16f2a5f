//! The agent's side: one bounded step of a PI loop per period.

use crate::Reading;

/// Scale 1.0 in 16.16 fixed point.
pub const SCALE_ONE: u32 = 1 << 16;
/// Smallest scale, 1/64: costs are too high by the kernels that overlap on the card.
pub const MIN_SCALE: u32 = SCALE_ONE / 64;
/// Largest scale, 65,535: a guess from the grid may be too low by the length of the kernel over ten microseconds.
pub const MAX_SCALE: u32 = u32::MAX;

/// Errors are relative to the share and cut here, in 1/1000: three times the share.
const ERROR_CAP: i64 = 3000;
/// Integral gain per second, in 1/1000. Samples are averaged over two seconds and up to a second old: a gain of 0.25
/// leaves a loop with two seconds of delay well damped.
const INTEGRAL: i64 = 250;
/// Gain of the error's change, in 1/1000.
const PROPORTIONAL: i64 = 50;
/// Most that the scale is moved in a second, in 1/1000: a factor of two.
const MOST: i64 = 1000;
/// Time that a step may stand for: after a pause there is one step, not many.
const LONGEST_NS: u64 = 2_000_000_000;

/// What the agent saw of a container on a card since the last step.
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
    /// Time since the last step.
    pub elapsed_ns: u64,
}

/// State of the loop for one container on one card. Nothing in it depends on the size of the card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Steer {
    scale: u32,
    error: i64,
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
        Self { scale: if scale < MIN_SCALE { MIN_SCALE } else { scale }, error: 0 }
    }

    /// The scale for the control page.
    #[must_use]
    pub const fn scale(self) -> u32 {
        self.scale
    }

    /// One step towards `target_percent`.
    ///
    /// | seen | step |
    /// | --- | --- |
    /// | more than the share | costs go up |
    /// | less, and launches waited for a twentieth of the time | costs go down |
    /// | less, and launches did not wait | none: the tenant did not want more |
    /// | absent, launches waited | as less than the share: the bucket holds it too tight |
    /// | absent otherwise | none: idle, or too little to be seen |
    /// | stale or missing | none |
    #[must_use]
    pub fn step(self, target_percent: u32, seen: &Observation) -> Self {
        if target_percent == 0 || target_percent >= 100 || seen.elapsed_ns == 0 {
            return self;
        }
        let waited = seen.waits > 0 && seen.waited_ns.saturating_mul(20) >= seen.elapsed_ns;
        let used = match seen.reading {
            Reading::Present { per_mille } => i64::from(per_mille.min(1000)),
            Reading::Absent if seen.launched && waited => 0,
            Reading::Absent | Reading::Stale { .. } | Reading::Missing => return self,
        };
        let share = i64::from(target_percent) * 10;
        // Relative in both directions, so that twice and half the share are equally wrong.
        let error = if used >= share {
            ((used - share) * 1000 / share).min(ERROR_CAP)
        } else {
            -((share - used) * 1000 / used.max(share / 8).max(1)).min(ERROR_CAP)
        };
        if error < 0 && !waited {
            return Self { error: 0, ..self };
        }
        let elapsed_ms = i64::try_from(seen.elapsed_ns.min(LONGEST_NS) / 1_000_000).unwrap_or(0);
        let most = MOST * elapsed_ms / 1000;
        let step = (INTEGRAL * error / 1000 * elapsed_ms / 1000 + PROPORTIONAL * (error - self.error) / 1000)
            .clamp(-most, most);
        let scale = i64::from(self.scale);
        let scale = if step >= 0 { scale * (1000 + step) / 1000 } else { scale * 1000 / (1000 - step) };
        let scale = scale.clamp(MIN_SCALE.into(), MAX_SCALE.into());
        Self { scale: u32::try_from(scale).unwrap_or(self.scale), error }
    }
}
