//! Memory of the tables: pages of this process's own, made as they are needed and never given back.

#![expect(unsafe_code, reason = "hands out mapped memory")]

use core::ptr::null_mut;
use core::sync::atomic::Ordering::{AcqRel, Acquire};
use core::sync::atomic::{AtomicPtr, AtomicU64};

use mullion_accounting::{LEVELS, Pieces, Table, piece_len};

use crate::sys;

/// A table of allocations.
pub(super) type Entries = Table<Arena>;

/// The pieces of one table.
#[derive(Debug)]
pub(super) struct Arena {
    pieces: [AtomicPtr<AtomicU64>; LEVELS],
}

impl Arena {
    pub(super) const fn table() -> Entries {
        Table::new(Self { pieces: [const { AtomicPtr::new(null_mut()) }; LEVELS] }, AtomicU64::new(0))
    }
}

/// Zeroed words, made once and kept at `place`; `None` where there is no memory.
pub(super) fn words_at(place: &AtomicPtr<AtomicU64>, count: usize) -> Option<&[AtomicU64]> {
    if let Some(words) = existing_at(place, count) {
        return Some(words);
    }
    let bytes = count * size_of::<u64>();
    let new = sys::map_private(bytes).ok()?;
    if place.compare_exchange(null_mut(), new.cast(), AcqRel, Acquire).is_err() {
        // SAFETY: another thread was first, nothing knows of this mapping.
        unsafe { sys::unmap(new, bytes) };
    }
    existing_at(place, count)
}

/// The same, where they are made already.
#[inline]
pub(super) fn existing_at(place: &AtomicPtr<AtomicU64>, count: usize) -> Option<&[AtomicU64]> {
    let words = place.load(Acquire);
    // SAFETY: `words_at` made `count` words there, which stay.
    (!words.is_null()).then(|| unsafe { core::slice::from_raw_parts(words, count) })
}

impl Pieces for Arena {
    type Word = AtomicU64;

    #[inline]
    fn piece(&self, level: usize) -> Option<&[AtomicU64]> {
        words_at(self.pieces.get(level)?, piece_len(level))
    }

    #[inline]
    fn existing(&self, level: usize) -> Option<&[AtomicU64]> {
        existing_at(self.pieces.get(level)?, piece_len(level))
    }
}
