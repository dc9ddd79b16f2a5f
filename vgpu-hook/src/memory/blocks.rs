//! What the driver really takes from a card for a request of `cuMemAlloc` and its like.
//!
//! It takes blocks of 2 MiB. A request above 1 MiB gets whole blocks of its own; a smaller one is cut out of a
//! block that it shares with others, and the block goes back to the card when its last piece does. (Seen by watching
//! `cuMemGetInfo` and NVML with drivers 535 to 570.) So a limit is kept to the byte only if blocks are counted: here,
//! per card, how many pieces and how much of each block are in use. The first piece in a block pays for the block.
//!
//! No lock: one word per block holds all. A thread killed, or a fork, in between leaves nothing held. Two threads that
//! get the first pieces of one block at the same time may enter it twice; then one of them gives way. Where pieces of others
//! have come to both by then, the block is charged twice until one of the two is empty, and never too little.

use core::ptr::null_mut;
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};
use core::sync::atomic::{AtomicPtr, AtomicU64};

use super::arena;

/// Size of a block, and its alignment.
pub(crate) const BLOCK: u64 = 2 << 20;
/// The largest request that shares a block.
pub(crate) const LARGEST_PIECE: u64 = 1 << 20;
/// What pieces are cut in.
pub(crate) const UNIT: u64 = 512;

/// Words for the blocks of one card: 1 MiB, of which only what is touched is real. 131,072 blocks are 256 GiB of pieces.
const WORDS: usize = 1 << 17;
/// Places in which a block may stand.
const PLACES: usize = 16;

/// How a request is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Served {
    /// By blocks of its own, so many bytes of them.
    Blocks(u64),
    /// By a piece of a block.
    Piece,
}

/// How the driver serves a request of `bytes`.
#[inline]
pub(crate) const fn served(bytes: u64) -> Served {
    if bytes > LARGEST_PIECE { Served::Blocks(round_up(bytes, BLOCK)) } else { Served::Piece }
}

/// Rounds up to a multiple of a power of two; `u64::MAX` where that is too much, which no limit admits.
#[inline]
pub(crate) const fn round_up(bytes: u64, unit: u64) -> u64 {
    match bytes.checked_add(unit - 1) {
        Some(sum) => sum & !(unit - 1),
        None => u64::MAX,
    }
}

/// The blocks of one card in which this process has pieces.
#[derive(Debug)]
pub(crate) struct Blocks {
    words: AtomicPtr<AtomicU64>,
    /// Grows with each block entered: tells whether another one was meanwhile.
    entered: AtomicU64,
}

/// A block's number, the units used in it and the pieces in it, in one word; 0 is nobody's.
#[derive(Clone, Copy)]
struct Word(u64);

impl Word {
    const PIECE: u64 = 1;
    const ONE_UNIT: u64 = 1 << 13;
    const NUMBER: u32 = 26;

    const fn first(number: u64, units: u64) -> u64 {
        (number << Self::NUMBER) | (units * Self::ONE_UNIT) | Self::PIECE
    }

    const fn number(self) -> u64 {
        self.0 >> Self::NUMBER
    }

    const fn units(self) -> u64 {
        self.0 / Self::ONE_UNIT % (1 << 13)
    }

    const fn pieces(self) -> u64 {
        self.0 % Self::ONE_UNIT
    }
}

const _: () = assert!(BLOCK / UNIT < 1 << 13 && (u64::MAX >> Word::NUMBER) >= (1 << 57) / BLOCK);

const fn units_of(bytes: u64) -> u64 {
    round_up(bytes, UNIT) / UNIT
}

/// What came of a piece's entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Entered {
    /// It is the first in its block: it pays.
    First,
    /// Its block is paid for.
    Another,
    /// There is no place left to count its block: it pays for one alone.
    Alone,
}

impl Blocks {
    pub(crate) const fn new() -> Self {
        Self { words: AtomicPtr::new(null_mut()), entered: AtomicU64::new(0) }
    }

    fn places(words: &[AtomicU64], number: u64) -> &[AtomicU64] {
        let hash = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        let first = usize::try_from(hash).unwrap_or(0) % (WORDS / PLACES) * PLACES;
        words.get(first..first + PLACES).unwrap_or_default()
    }

    /// The driver gave a piece of `bytes` at `address`.
    #[inline]
    pub(crate) fn enter(&self, address: u64, bytes: u64) -> Entered {
        let Some(words) = arena::words_at(&self.words, WORDS) else { return Entered::Alone };
        let (number, units) = (address / BLOCK, units_of(bytes));
        let places = Self::places(words, number);
        let entered = self.entered.load(Acquire);
        let mut free = None;
        for place in places {
            let mut word = place.load(Acquire);
            while Word(word).number() == number && word != 0 {
                let next = word + units * Word::ONE_UNIT + Word::PIECE;
                match place.compare_exchange(word, next, AcqRel, Acquire) {
                    Ok(_) => return Entered::Another,
                    Err(now) => word = now,
                }
            }
            if word == 0 && free.is_none() {
                free = Some(place);
            }
        }
        let first = Word::first(number, units);
        for place in free.into_iter().chain(places) {
            if place.compare_exchange(0, first, AcqRel, Acquire).is_ok() {
                // Of two threads that enter a block at once the one that comes second here gives way.
                let is_alone = self.entered.fetch_add(1, AcqRel) == entered;
                let joined = !is_alone && join(places, place, number, units);
                return if joined { Entered::Another } else { Entered::First };
            }
        }
        Entered::Alone
    }

    /// The driver took back a piece; whether that was the last one of its block, so that the block is free.
    #[inline]
    pub(crate) fn leave(&self, address: u64, bytes: u64) -> bool {
        let Some(words) = arena::existing_at(&self.words, WORDS) else { return false };
        let (number, units) = (address / BLOCK, units_of(bytes));
        for place in Self::places(words, number) {
            let mut word = place.load(Acquire);
            while Word(word).number() == number && Word(word).pieces() > 0 {
                let last = Word(word).pieces() == 1;
                // Entered twice by two threads, the halves may be left crosswise: only the number of pieces is exact.
                let taken = units.min(Word(word).units()) * Word::ONE_UNIT + Word::PIECE;
                let next = if last { 0 } else { word - taken };
                match place.compare_exchange(word, next, AcqRel, Acquire) {
                    Ok(_) => return last,
                    Err(now) => word = now,
                }
            }
        }
        false
    }

    /// Whether some block has room for a piece of `bytes`, as far as numbers tell.
    pub(crate) fn may_have_room(&self, bytes: u64) -> bool {
        let units = units_of(bytes);
        let words = arena::existing_at(&self.words, WORDS).unwrap_or_default();
        words.iter().any(|word| {
            let word = Word(word.load(Relaxed));
            word.pieces() > 0 && word.units() + units <= BLOCK / UNIT
        })
    }
}

/// Another thread may have entered the same block at the same time, at another of its `places`: whether the piece just
/// entered at `mine` now stands there.
#[cold]
fn join(places: &[AtomicU64], mine: &AtomicU64, number: u64, units: u64) -> bool {
    for place in places.iter().filter(|place| !core::ptr::eq(*place, mine)) {
        let mut word = place.load(Acquire);
        while Word(word).number() == number && Word(word).pieces() > 0 {
            let next = word + units * Word::ONE_UNIT + Word::PIECE;
            match place.compare_exchange(word, next, AcqRel, Acquire) {
                Ok(_) => return take_out(mine, number, units, place),
                Err(now) => word = now,
            }
        }
    }
    false
}

/// The piece stands twice, at `mine` and at `other`: takes it out at one of them. Whether what is left was paid for by
/// another piece.
#[cold]
fn take_out(mine: &AtomicU64, number: u64, units: u64, other: &AtomicU64) -> bool {
    if mine.compare_exchange(Word::first(number, units), 0, AcqRel, Acquire).is_ok() {
        return true;
    }
    // Others have joined at `mine` meanwhile.
    let mut word = other.load(Acquire);
    loop {
        // Where all other pieces have left `other`, the last of them did not take its block along.
        let is_last = Word(word).pieces() <= 1;
        let taken = units.min(Word(word).units()) * Word::ONE_UNIT + Word::PIECE;
        let next = if is_last { 0 } else { word - taken };
        match other.compare_exchange(word, next, AcqRel, Acquire) {
            Ok(_) => return is_last,
            Err(now) => word = now,
        }
    }
}

#[cfg(test)]
mod tests {
    extern crate std;

    use std::vec::Vec;

    use super::*;

    #[test]
    fn requests_get_blocks_or_pieces() {
        for (case, bytes, want) in [
            ("one byte", 1, Served::Piece),
            ("the largest piece", 1 << 20, Served::Piece),
            ("one more", (1 << 20) + 1, Served::Blocks(BLOCK)),
            ("a block", BLOCK, Served::Blocks(BLOCK)),
            ("a block and a byte", BLOCK + 1, Served::Blocks(2 * BLOCK)),
            ("absurd", u64::MAX - 5, Served::Blocks(u64::MAX)),
        ] {
            assert_eq!(served(bytes), want, "{case}");
        }
    }

    #[test]
    fn the_first_piece_pays_and_the_last_gives_back() {
        let blocks = Blocks::new();
        let block = 0x7000_0000_0000;
        assert!(!blocks.leave(block, 512));
        assert_eq!(blocks.enter(block, 1), Entered::First);
        assert_eq!(blocks.enter(block + 512, LARGEST_PIECE), Entered::Another);
        assert_eq!(blocks.enter(block + BLOCK, 512), Entered::First);
        assert!(blocks.may_have_room(LARGEST_PIECE));
        assert!(!blocks.leave(block, 1));
        assert!(blocks.leave(block + 512, LARGEST_PIECE));
        assert!(!blocks.leave(block + 512, LARGEST_PIECE), "left twice");
        assert!(blocks.leave(block + BLOCK, 512));
        assert!(!blocks.may_have_room(1));
    }

    #[test]
    fn a_full_block_has_no_room() {
        let blocks = Blocks::new();
        for piece in 0..2 {
            blocks.enter(piece * LARGEST_PIECE, LARGEST_PIECE);
        }
        assert!(!blocks.may_have_room(1));
        blocks.leave(0, LARGEST_PIECE);
        assert!(blocks.may_have_room(LARGEST_PIECE) && !blocks.may_have_room(LARGEST_PIECE + 1));
    }

    #[test]
    fn threads_pay_for_each_block_once_in_the_end() {
        let blocks = std::sync::Arc::new(Blocks::new());
        let paid = std::sync::Arc::new(AtomicU64::new(0));
        let threads: Vec<_> = (0..4_u64)
            .map(|thread| {
                let (blocks, paid) = (blocks.clone(), paid.clone());
                std::thread::spawn(move || {
                    for round in 0..20_000_u64 {
                        let address = (round % 3) * BLOCK + thread * 4096;
                        if blocks.enter(address, 4096) != Entered::Another {
                            paid.fetch_add(1, Relaxed);
                        }
                        if blocks.leave(address, 4096) {
                            paid.fetch_sub(1, Relaxed);
                        }
                    }
                })
            })
            .collect();
        for thread in threads {
            thread.join().unwrap();
        }
        assert_eq!(paid.load(Relaxed), 0);
    }

    #[test]
    fn where_no_place_is_left_a_piece_pays_alone() {
        let blocks = Blocks::new();
        let mut alone = 0;
        for block in 0..WORDS as u64 {
            alone += u64::from(blocks.enter(block * BLOCK, 1) == Entered::Alone);
        }
        assert!(alone > 0 && alone < WORDS as u64 / 4, "{alone}");
    }
}
