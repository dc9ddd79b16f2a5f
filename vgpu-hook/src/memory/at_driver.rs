//! Calls at the driver that the account does not tell of: those that give memory back, and small arrays.

use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::SeqCst;

/// Of a word: one that is there.
const ONE: u64 = 1;
/// One of those that are there and may give back several things one after the other.
const MANY: u64 = 1 << 16;
/// One that ever came: so that a word which is what it was says that nobody came or went.
const CAME: u64 = 1 << 32;
const LOW: u64 = MANY - 1;

/// Such calls, counted in one word. On a cache line of its own: it changes with each free, and what lies beside it is read
/// with each call.
#[derive(Debug)]
#[repr(align(128))]
pub(super) struct AtDriver(AtomicU64);

impl AtDriver {
    pub(super) const fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// A call by which one thing goes, at one moment.
    #[inline]
    pub(super) fn one(&self) -> Hidden<'_> {
        self.begin(ONE)
    }

    /// A call by which many things may go.
    pub(super) fn many(&self) -> Hidden<'_> {
        self.begin(ONE | MANY)
    }

    #[inline]
    fn begin(&self, by: u64) -> Hidden<'_> {
        let number = self.0.fetch_add(CAME | by, SeqCst) / CAME;
        Hidden { calls: self, by, number }
    }

    /// Something went without such a call: the word is not what it was.
    pub(super) fn stir(&self) {
        self.0.fetch_add(CAME, SeqCst);
    }

    pub(super) fn word(&self) -> Word {
        Word(self.0.load(SeqCst))
    }
}

/// A call at the driver, until this goes.
#[derive(Debug)]
pub(super) struct Hidden<'m> {
    calls: &'m AtDriver,
    by: u64,
    /// How many had come before.
    number: u64,
}

impl Hidden<'_> {
    /// Tells it from others of its kind; not 0.
    pub(super) fn name(&self) -> u64 {
        self.number << 1 | 1
    }
}

impl Drop for Hidden<'_> {
    #[inline]
    fn drop(&mut self) {
        self.calls.0.fetch_sub(self.by, SeqCst);
    }
}

/// The calls at one time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Word(u64);

impl Word {
    /// How many are there.
    pub(super) const fn count(self) -> u64 {
        self.0 & LOW
    }

    /// Whether one of them may give back many things.
    pub(super) const fn is_many(self) -> bool {
        (self.0 / MANY) & LOW != 0
    }

    pub(super) const fn bits(self) -> u64 {
        self.0
    }
}

/// Who is at the driver, and what is in the books meanwhile: what stays the same tells that nobody has come or gone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Standing {
    pub(super) hidden: Word,
    pub(super) anywhere: Word,
    pub(super) small: Word,
    /// Which of the calls for small arrays has the turn.
    pub(super) caller: u64,
    pub(super) claimed: u64,
    pub(super) settled: u64,
    /// Of the whole container; 0 where that is not asked for.
    pub(super) total: u64,
    pub(super) asked: u64,
}

impl Standing {
    /// As far as it is this process's.
    pub(super) fn own(self) -> Self {
        Self { total: 0, asked: 0, ..self }
    }

    /// Whether any call but the looker's own is there.
    pub(super) fn is_busy(self, mine: u64) -> bool {
        let calls = self.hidden.count() + self.anywhere.count() + self.small.count();
        calls > mine || self.claimed != self.settled
    }

    /// Calls at the driver beside `mine` that give something back, each at one moment; `None` where one may take several.
    pub(super) fn beside(self, mine: u64) -> Option<u64> {
        let is_known = self.anywhere.count() == 0 && !self.hidden.is_many();
        is_known.then(|| (self.hidden.count() + self.small.count()).saturating_sub(mine))
    }

    /// Tells it from others, but for calls for small arrays: those come and go.
    pub(super) fn name(self) -> u64 {
        let Self { hidden, anywhere, small: _, caller: _, claimed, settled, total, asked } = self;
        name_of(&[hidden.bits(), anywhere.bits(), claimed, settled, total, asked])
    }

    /// Tells the calls that give something back from others, where this can be told of all beside `mine`.
    pub(super) fn name_beside(self, mine: u64, has_turn: bool) -> Option<u64> {
        match self.small.count().saturating_sub(mine) {
            0 => Some(name_of(&[self.hidden.bits()])),
            1 if self.caller != 0 && !has_turn => Some(name_of(&[self.hidden.bits(), self.caller])),
            _ => None,
        }
    }
}

fn name_of(words: &[u64]) -> u64 {
    words.iter().fold(1, |name, word| (name ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_says_who_is_there_and_that_nobody_came_or_went() {
        let calls = AtDriver::new();
        let first = calls.one();
        let before = calls.word();
        assert_eq!((before.count(), before.is_many()), (1, false));
        let second = calls.many();
        assert_eq!((calls.word().count(), calls.word().is_many()), (2, true));
        assert_ne!(first.name(), second.name());
        drop(second);
        assert_eq!((calls.word().count(), calls.word().is_many()), (1, false));
        assert_ne!(calls.word(), before, "one has come and gone");
        let before = calls.word();
        calls.stir();
        assert_ne!(calls.word(), before);
        drop(first);
        assert_eq!(calls.word().count(), 0);
    }
}
