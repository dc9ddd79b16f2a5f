//! What a measurement found, and how far that goes.

use super::blocks::BLOCK;

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
    /// With the blocks that may be charged to small arrays instead: of their calls meanwhile `unclear` ones saw more than they
    /// can do, and in `clear` ones nothing but a block seemed to move. They have `spare` blocks that are not certainly theirs.
    pub(super) fn undoubted(self, unclear: u64, clear: u64, spare: u64) -> Self {
        // What takes a block at one moment, and seems to have taken none, may have done so in one of the clear ones. Of a context's
        // end, of whose images nothing stays as a rule, that is a block too much at most, until the images that stay have gone.
        let doubtful = if self.bytes == 0 { unclear + clear.min(1) } else { unclear };
        let bytes = self.bytes.saturating_add((doubtful.min(spare) * BLOCK).cast_signed());
        Self { bytes, ..self }
    }

    /// What is believed of something that is not known to take more than `most`. All of what was seen where nobody else's doing
    /// can be in it: else what takes more would be had for that much. A quiet look at a card that is not shared is as good as
    /// the process's own figure.
    pub(super) fn believed(self, most: u64, is_shared: bool) -> u64 {
        match self.trust {
            Trust::Full => u64::MAX,
            Trust::Card if !is_shared => u64::MAX,
            Trust::Card | Trust::Busy => most,
        }
    }

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

    #[test]
    fn only_what_others_may_have_done_has_a_bound() {
        for (trust, is_shared, want) in [
            (Trust::Full, true, u64::MAX),
            (Trust::Card, false, u64::MAX),
            (Trust::Card, true, 5),
            (Trust::Busy, false, 5),
        ] {
            assert_eq!(
                Taken { bytes: 9, trust }.believed(5, is_shared),
                want,
                "{trust:?}, shared: {is_shared}"
            );
        }
    }

    #[test]
    fn what_small_arrays_may_have_been_charged_instead_counts_as_far_as_they_can_spare_it() {
        let block = BLOCK.cast_signed();
        for (case, bytes, unclear, clear, spare, want) in [
            ("nobody else was there", block, 0, 0, 9, block),
            ("it was seen apart", block, 0, 3, 9, block),
            ("it came together with an array", block, 1, 3, 9, 2 * block),
            ("it came instead of an array", 0, 0, 3, 9, block),
            ("all blocks are theirs", 0, 1, 3, 0, 0),
            ("one block is not theirs", block, 3, 0, 1, 2 * block),
            ("an image went", -2 * block, 1, 0, 9, -block),
        ] {
            let taken = Taken { bytes, trust: Trust::Full };
            assert_eq!(taken.undoubted(unclear, clear, spare).bytes, want, "{case}");
        }
    }
}
