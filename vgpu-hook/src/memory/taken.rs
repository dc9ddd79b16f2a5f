//! What a measurement found, and how far that goes.

/// What was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Taken {
    /// Bytes that the driver took, less than 0 where it gave some back.
    pub(super) bytes: i64,
    pub(super) trust: Trust,
}

/// How far what was found can be relied on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Trust {
    /// NVML's own figure of this process.
    Full,
    /// The card was looked at; other containers could have moved the figure.
    Card,
    /// The same, and processes of this container were busy.
    Busy,
}

impl Taken {
    /// Bytes taken, at most `most`: other containers could have moved the card's figure, and the process's own what the
    /// driver does by itself (it brings in managed memory, and what is freed may stand in NVML's list for a moment).
    pub(super) fn more(self, most: u64) -> u64 {
        u64::try_from(self.bytes).unwrap_or(0).min(most)
    }

    /// Bytes given back, at most `most` as above.
    pub(super) fn less(self, most: u64) -> u64 {
        u64::try_from(self.bytes.saturating_neg()).unwrap_or(0).min(most)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_taken_has_bounds() {
        for (case, bytes, more, less) in [
            ("as seen", 300, 300, 0),
            ("more than can be", 500, 400, 0),
            ("given back", -500, 0, 400),
            ("nothing", 0, 0, 0),
        ] {
            let taken = Taken { bytes, trust: Trust::Full };
            assert_eq!((taken.more(400), taken.less(400)), (more, less), "{case}");
        }
    }
}
