//! Addresses, and the rule by which a card gives memory for them.
//!
//! Every device address is an address of this process: a range of 4 TiB that is reserved, never committed, and shared by all
//! cards, so that copies really copy. Where the system refuses the range, addresses are numbers and copies do nothing.
//!
//! The rule (observed on cards of the last generations with driver branches 535 to 570, by watching `cuMemGetInfo`): a card gives
//! memory in blocks of 2 MiB. A request of up to 1 MiB is cut out of a block in units of 512 bytes, and a block
//! goes back when its last piece does; a larger one gets whole blocks of its own. Linear memory, arrays and code share no blocks.
#![expect(unsafe_code, reason = "reserves an address range")]

use std::collections::{BTreeMap, BTreeSet};

use crate::abi::Code;

/// What a card gives at least.
pub(crate) const BLOCK: u64 = 2 << 20;
/// Alignment of `cuMemAlloc` addresses, and the unit of a block's pieces.
pub(crate) const UNIT: u64 = 512;
/// The largest request that shares a block.
pub(crate) const LARGEST_PIECE: u64 = 1 << 20;

const RANGE: u64 = 4 << 40;
/// Where addresses start when there is no range behind them.
const NUMBERS: u64 = 0x7000_0000_0000;

/// Rounds up to a multiple; saturates.
pub(crate) fn round_up(value: u64, unit: u64) -> u64 {
    value.div_ceil(unit).saturating_mul(unit)
}

/// Free ranges, joined with their neighbours; the best fit is taken, the lowest of equals.
#[derive(Debug, Default)]
pub(crate) struct Ranges {
    by_start: BTreeMap<u64, u64>,
    by_length: BTreeSet<(u64, u64)>,
}

impl Ranges {
    fn put(&mut self, start: u64, length: u64) {
        if length > 0 {
            self.by_start.insert(start, length);
            self.by_length.insert((length, start));
        }
    }

    fn pull(&mut self, start: u64) -> Option<u64> {
        let length = self.by_start.remove(&start)?;
        self.by_length.remove(&(length, start));
        Some(length)
    }

    pub(crate) fn take(&mut self, length: u64) -> Option<u64> {
        let &(found, start) = self.by_length.range((length, 0)..).next()?;
        self.pull(start);
        self.put(start + length, found - length);
        Some(start)
    }

    /// As [`Self::take`], at a multiple of `alignment`.
    fn take_aligned(&mut self, length: u64, alignment: u64) -> Option<u64> {
        let wide = length.checked_add(alignment)?;
        let start = self.take(wide)?;
        let aligned = round_up(start, alignment);
        self.give(start, aligned - start, u64::MAX);
        self.give(aligned + length, start + wide - aligned - length, u64::MAX);
        Some(aligned)
    }

    /// Puts a range back and answers the whole free range that it is now part of; ranges never join across a multiple of `wall`.
    pub(crate) fn give(&mut self, start: u64, length: u64, wall: u64) -> (u64, u64) {
        let (mut start, mut length) = (start, length);
        if length == 0 {
            return (start, 0);
        }
        let same = |a: u64, b: u64| a / wall == b / wall;
        if let Some((&before, &size)) = self.by_start.range(..start).next_back()
            && before + size == start
            && same(before, start)
        {
            self.pull(before);
            (start, length) = (before, length + size);
        }
        let end = start + length;
        if same(start, end)
            && let Some(size) = self.pull(end)
        {
            length += size;
        }
        self.put(start, length);
        (start, length)
    }
}

/// The process's device addresses.
#[derive(Debug)]
pub(crate) struct Space {
    free: Ranges,
    pub(crate) start: u64,
    /// Whether there is memory behind the addresses.
    pub(crate) backed: bool,
    /// Blocks that something was copied to, by number.
    touched: BTreeSet<u64>,
}

impl Space {
    pub(crate) fn reserve() -> Self {
        let mapped = map(RANGE);
        let first = mapped.map_or(NUMBERS, |start| round_up(start, BLOCK));
        let mut free = Ranges::default();
        free.put(first, RANGE - 2 * BLOCK);
        Self { free, start: first, backed: mapped.is_some(), touched: BTreeSet::new() }
    }

    /// Addresses for `length` bytes, a multiple of [`BLOCK`].
    pub(crate) fn take(&mut self, length: u64, alignment: u64) -> Result<u64, Code> {
        let found = if alignment <= BLOCK {
            self.free.take(length)
        } else {
            self.free.take_aligned(length, alignment)
        };
        found.ok_or(Code::OUT_OF_MEMORY)
    }

    pub(crate) fn give(&mut self, start: u64, length: u64) {
        let blocks = start / BLOCK..(start + length).div_ceil(BLOCK);
        if self.touched.range(blocks.clone()).next().is_some() {
            self.touched.retain(|b| !blocks.contains(b));
            forget(start, length);
        }
        self.free.give(start, length, u64::MAX);
    }

    /// Notes that the program wrote to a range.
    pub(crate) fn touch(&mut self, address: u64, length: u64) {
        self.touched.extend(address / BLOCK..(address + length).div_ceil(BLOCK));
    }

    /// Whether both ends of the range are ours and memory.
    pub(crate) fn holds(&self, address: u64, length: u64) -> bool {
        let end = self.start + RANGE - 2 * BLOCK;
        self.backed && address >= self.start && address.checked_add(length).is_some_and(|e| e <= end)
    }
}

fn map(length: u64) -> Option<u64> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    let length = usize::try_from(length).ok()?;
    // SAFETY: a new mapping at a place of the system's choice.
    let start =
        unsafe { libc::mmap(std::ptr::null_mut(), length, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
    if start == libc::MAP_FAILED {
        return None;
    }
    // SAFETY: the mapping that was just made; a child has no use for it.
    unsafe { libc::madvise(start, length, libc::MADV_DONTFORK) };
    // SAFETY: as above; a core file has no use for it either.
    unsafe { libc::madvise(start, length, libc::MADV_DONTDUMP) };
    Some(start.addr() as u64)
}

/// Lets the pages of a range go.
fn forget(start: u64, length: u64) {
    let (Ok(start), Ok(length)) = (usize::try_from(start), usize::try_from(length)) else { return };
    // SAFETY: a part of the reserved range that no allocation covers any more.
    unsafe { libc::madvise(std::ptr::with_exposed_provenance_mut(start), length, libc::MADV_DONTNEED) };
}

/// What a block's pieces are: those of different uses share no block, because pages of arrays are of a kind of their own (tiles), and code
/// lies in a range of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Use {
    Linear,
    Array,
    Code,
}

/// The shared blocks of one card, by use.
#[derive(Debug, Default)]
pub(crate) struct Shared([Pieces; 3]);

impl Shared {
    pub(crate) fn of(&mut self, what: Use) -> &mut Pieces {
        &mut self.0[what as usize]
    }
}

/// Pieces of the blocks of one card and use.
#[derive(Debug, Default)]
pub(crate) struct Pieces {
    free: Ranges,
}

impl Pieces {
    /// A piece of a block that is there already.
    pub(crate) fn take(&mut self, length: u64) -> Option<u64> {
        self.free.take(round_up(length, UNIT))
    }

    /// Adds a block.
    pub(crate) fn add_block(&mut self, start: u64) {
        self.free.give(start, BLOCK, BLOCK);
    }

    /// Puts a piece back; answers the block when nothing of it is in use any more.
    pub(crate) fn give(&mut self, start: u64, length: u64) -> Option<u64> {
        let (whole, size) = self.free.give(start, round_up(length, UNIT), BLOCK);
        (size == BLOCK).then(|| {
            self.free.pull(whole);
            whole
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_join_within_their_block_only() {
        let mut pieces = Pieces::default();
        assert_eq!(pieces.take(1), None);
        pieces.add_block(4 * BLOCK);
        pieces.add_block(5 * BLOCK);
        let a = pieces.take(LARGEST_PIECE).unwrap();
        let b = pieces.take(LARGEST_PIECE).unwrap();
        let c = pieces.take(1).unwrap();
        assert_eq!((a, b, c), (4 * BLOCK, 4 * BLOCK + LARGEST_PIECE, 5 * BLOCK));
        assert_eq!(pieces.give(a, LARGEST_PIECE), None);
        assert_eq!(pieces.give(c, 1), Some(5 * BLOCK));
        assert_eq!(pieces.give(b, LARGEST_PIECE), Some(4 * BLOCK));
        assert_eq!(pieces.take(1), None);
    }

    #[test]
    fn aligned_ranges_lose_nothing() {
        let mut ranges = Ranges::default();
        ranges.put(BLOCK, 64 * BLOCK);
        let at = ranges.take_aligned(4 * BLOCK, 16 * BLOCK).unwrap();
        assert_eq!(at % (16 * BLOCK), 0);
        assert_eq!(ranges.give(at, 4 * BLOCK, u64::MAX), (BLOCK, 64 * BLOCK));
    }
}
