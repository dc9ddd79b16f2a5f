//! What NVML's samples say of the utilisation of a container on a card.

/// The shortest window over which a driver averages: 1/6 s.
pub const MIN_WINDOW_NS: u64 = 166_000_000;
/// The longest: 1 s.
pub const MAX_WINDOW_NS: u64 = 1_000_000_000;
/// A newest sample may be this old and the container still at work: drivers were seen to answer with time stamps up to
/// 9 s old.
pub const STALE_NS: u64 = 10_000_000_000;

/// What is known about the utilisation of a container on a card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reading {
    /// Share of time in which it had a kernel on the card, in 1/1000 (1000 = all the time).
    Present {
        /// 0..=1000.
        per_mille: u32,
        /// Time that it is the mean of.
        covered_ns: u64,
    },
    /// There are new samples, too few to judge by.
    Gathering,
    /// NVML answered and has named no process of it for long: none was busy, or too little to be listed.
    Absent,
    /// NVML answered, with samples that are known already.
    Stale {
        /// Age of the newest.
        age_ns: u64,
    },
    /// NVML failed, or could not be asked.
    Missing,
}
