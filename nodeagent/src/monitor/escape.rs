//! Whether a container holds more of a card than its limit lets it: the driver's word against the library's account.
//! A preload is cooperative, and this is what tells of those who do not cooperate. Pure.
//!
//! The driver counts for each process what no allocation of the program is: its context, the code of loaded modules,
//! stacks and printf buffers. On cards of today that is 0.3 to 0.6 GiB per process, more with many kernels loaded
//! eagerly. So each process with memory on the card is granted a margin beyond what the library accounted for. Bytes
//! that were just freed stand in the driver's list for a moment longer: one look alone proves nothing.

/// Bytes beyond its account that each process on a card is granted: 1 GiB.
pub const MARGIN: u64 = 1 << 30;
/// So many looks in a row must agree before it is said that a limit is passed.
pub const LOOKS: u8 = 2;
/// And so many, about a minute, before that is taken back: each turn is an Event, a write and a row, and a program that
/// comes and goes around the margin would make them all day.
pub const CALM_LOOKS: u8 = 70;

/// What a container holds of one card, by two words.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// Bytes of its processes by the driver's.
    pub by_driver: u64,
    /// Processes of it that the driver lists.
    pub processes: usize,
    /// Bytes by the library's; 0 where its file cannot be read.
    pub by_account: u64,
    /// Its limit.
    pub limit: u64,
}

impl Held {
    /// The most that can be true. An account above the limit was not written by the library.
    #[must_use]
    pub fn most(&self, margin: u64) -> u64 {
        let processes = u64::try_from(self.processes).unwrap_or(u64::MAX);
        self.by_account.min(self.limit).saturating_add(margin.saturating_mul(processes))
    }
}

/// Memory that no account explains.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bypass {
    /// Uuid of the card.
    pub card: String,
    /// Who holds how much.
    pub held: Held,
    /// The most that can be true.
    pub most: u64,
}

impl std::fmt::Display for Bypass {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Held { by_driver, processes, by_account, limit } = self.held;
        let hold = if processes == 1 { "process holds" } else { "processes hold" };
        write!(
            f,
            "{processes} {hold} {} MiB of card {} by the driver's word, with a limit of {} MiB and {} MiB \
             accounted for; {} MiB can be explained. A process runs without the library (LD_PRELOAD or \
             /etc/ld.so.preload changed, another library before it, a static program), or the container's usage file \
             was changed or tells nothing: see the container's processes",
            by_driver >> 20,
            self.card,
            limit >> 20,
            by_account >> 20,
            self.most >> 20,
        )
    }
}

/// The first card of which more is held than can be explained.
#[must_use]
pub fn bypass<'a>(cards: impl IntoIterator<Item = (&'a str, Held)>, margin: u64) -> Option<Bypass> {
    let over = |(card, held): (&str, Held)| {
        let most = held.most(margin);
        (held.by_driver > most).then(|| Bypass { card: card.to_owned(), held, most })
    };
    cards.into_iter().find_map(over)
}

/// What is thought of a container over time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Suspicion {
    /// Looks in a row that contradict what is thought.
    against: u8,
    /// What is thought.
    pub bypass: Option<Bypass>,
}

impl Suspicion {
    /// Takes in a look; true when what is thought has turned. A look that did not come about (no driver, processes not
    /// known) is not taken in.
    pub fn look(&mut self, seen: Option<Bypass>) -> bool {
        if seen.is_some() == self.bypass.is_some() {
            self.against = 0;
            return false;
        }
        self.against += 1;
        let enough = if self.bypass.is_some() { CALM_LOOKS } else { LOOKS };
        if self.against < enough {
            return false;
        }
        *self = Self { against: 0, bypass: seen };
        true
    }

    /// Whether the last look agrees with what is thought.
    #[must_use]
    pub const fn is_sure(&self) -> bool {
        self.against == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const GIB: u64 = 1 << 30;

    fn held(by_driver: u64, processes: usize, by_account: u64, limit: u64) -> Held {
        Held { by_driver, processes, by_account, limit }
    }

    #[test]
    fn what_contexts_and_late_frees_explain_is_no_bypass() {
        for (case, held, want) in [
            ("nothing", held(0, 0, 0, 4 * GIB), false),
            ("a context only, not attached yet", held(GIB / 2, 1, 0, 4 * GIB), false),
            ("what is accounted for, and a context", held(4 * GIB + GIB / 2, 1, 4 * GIB, 4 * GIB), false),
            ("eight processes at the limit", held(12 * GIB, 8, 4 * GIB, 4 * GIB), false),
            ("at the margin", held(5 * GIB, 1, 4 * GIB, 4 * GIB), false),
            ("a byte beyond it", held(5 * GIB + 1, 1, 4 * GIB, 4 * GIB), true),
            ("within the limit, without the library", held(3 * GIB, 1, 0, 4 * GIB), true),
            ("an account that the tenant wrote himself", held(40 * GIB, 1, u64::MAX, 4 * GIB), true),
            ("the file is cut", held(2 * GIB, 1, 0, 4 * GIB), true),
        ] {
            assert_eq!(bypass([("GPU-0", held)], MARGIN).is_some(), want, "{case}");
        }
        let both = [("GPU-0", held(0, 0, 0, GIB)), ("GPU-1", held(9 * GIB, 1, 0, GIB))];
        let found = bypass(both, MARGIN).unwrap();
        assert_eq!((found.card.as_str(), found.most), ("GPU-1", GIB));
        assert!(found.to_string().contains("9216 MiB of card GPU-1"), "{found}");
    }

    #[test]
    fn it_takes_two_looks_to_suspect_and_a_minute_to_believe_again() {
        let bad = || bypass([("GPU-0", held(9 * GIB, 1, 0, GIB))], MARGIN);
        let mut thought = Suspicion::default();
        assert!(!thought.look(None) && !thought.look(bad()) && !thought.look(None));
        assert!(!thought.look(bad()) && thought.bypass.is_none());
        assert!(thought.look(bad()) && thought.bypass.is_some(), "twice in a row");
        for calm in [1, CALM_LOOKS - 1] {
            assert!((0..calm).all(|_| !thought.look(None)) && !thought.look(bad()), "{calm}");
        }
        assert!((1..CALM_LOOKS).all(|_| !thought.look(None)) && thought.bypass.is_some());
        assert!(thought.look(None) && thought.bypass.is_none());
    }

    proptest! {
        /// Whoever keeps to his limit and to the margin is never suspected.
        #[test]
        fn nobody_is_suspected_for_what_is_accounted_for(
            limit in 1..=(1_u64 << 40), part in 0.0..=1.0_f64, contexts in proptest::collection::vec(0..=MARGIN, 1..16),
        ) {
            #[expect(clippy::cast_precision_loss, clippy::cast_sign_loss, clippy::cast_possible_truncation, reason = "a part")]
            let by_account = ((limit as f64 * part) as u64).min(limit);
            let by_driver = by_account + contexts.iter().sum::<u64>();
            let held = Held { by_driver, processes: contexts.len(), by_account, limit };
            prop_assert_eq!(bypass([("GPU-0", held)], MARGIN), None);
        }
    }
}
