//! What is allocated: key -> size, card and kind, in open-addressed pieces of memory that the caller hands in.
//!
//! A key has eight places in each piece, in two neighbouring buckets of 128 bytes. An entry goes into the first free one
//! of the largest piece in use, then of the smaller ones; when all are taken, the next piece, four times as large, is
//! asked for. Nothing ever moves, so nothing needs a lock: a place is taken by a compare-and-swap of its key.

use crate::Cell;

/// Pieces that a table can have.
pub const LEVELS: usize = 8;

/// Words of an entry: key, size, tag, note.
const ENTRY: usize = 4;
/// Words of a bucket: four entries, two cache lines.
const BUCKET: usize = 4 * ENTRY;
/// Binary logarithm of the buckets of the smallest piece.
const BASE: usize = 7;

/// Key of a place that is free.
const FREE: u64 = 0;
/// Key of a place that is being written or emptied.
const BUSY: u64 = u64::MAX;

/// Words of the piece of `level`: 512 entries (16 KiB), then four times as many each.
#[must_use]
pub const fn piece_len(level: usize) -> usize {
    BUCKET << (BASE + 2 * level)
}

/// The memory of a table.
pub trait Pieces {
    /// The words.
    type Word: Cell;

    /// The piece of `level`, which is below [`LEVELS`]: [`piece_len`] words, all zero at first, the same ones at each
    /// call. `None` where there is no memory.
    fn piece(&self, level: usize) -> Option<&[Self::Word]>;

    /// The same, but `None` where [`Self::piece`] has not made it yet.
    fn existing(&self, level: usize) -> Option<&[Self::Word]>;
}

/// What is known of one allocation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Entry {
    /// Bytes charged.
    pub size: u64,
    /// Card charged.
    pub card: u8,
    /// Kind of allocation; its meaning is the caller's.
    pub kind: u8,
    /// Anything more, e.g. the pool it is from.
    pub note: u64,
}

impl Entry {
    const fn tag(&self) -> u64 {
        (self.card as u64) << 8 | self.kind as u64
    }

    const fn of(size: u64, tag: u64, note: u64) -> Self {
        let [kind, card, ..] = tag.to_le_bytes();
        Self { size, card, kind, note }
    }
}

/// Why an entry was not taken in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TableError {
    /// 0 and `u64::MAX` are no keys.
    Key,
    /// No memory for a larger piece.
    Memory,
}

/// Keys and their entries.
#[derive(Debug)]
pub struct Table<P: Pieces> {
    pieces: P,
    /// The largest piece in use.
    top: P::Word,
}

impl<P: Pieces> Table<P> {
    /// An empty table; `top` is a word of value 0.
    pub const fn new(pieces: P, top: P::Word) -> Self {
        Self { pieces, top }
    }

    /// Where the memory comes from.
    pub const fn pieces(&self) -> &P {
        &self.pieces
    }

    /// Takes in `key`, which must not be in the table: a second entry of the same key would be found first or last.
    ///
    /// # Errors
    /// [`TableError`].
    #[inline]
    pub fn insert(&self, key: u64, entry: &Entry) -> Result<(), TableError> {
        if key == FREE || key == BUSY {
            return Err(TableError::Key);
        }
        let top = self.top();
        match self.pieces.piece(top) {
            Some(piece) if place(piece, top, key, entry) => Ok(()),
            _ => self.insert_elsewhere(top, key, entry),
        }
    }

    #[cold]
    #[inline(never)]
    fn insert_elsewhere(&self, top: usize, key: u64, entry: &Entry) -> Result<(), TableError> {
        for level in (0..top).rev() {
            if self.pieces.existing(level).is_some_and(|piece| place(piece, level, key, entry)) {
                return Ok(());
            }
        }
        for level in top + 1..LEVELS {
            let piece = self.pieces.piece(level).ok_or(TableError::Memory)?;
            // Before the entry: whoever gets to know the key must find it.
            self.raise(level);
            if place(piece, level, key, entry) {
                return Ok(());
            }
        }
        Err(TableError::Memory)
    }

    /// Takes `key` out; of several that take the same key at once one gets it.
    #[inline]
    pub fn take(&self, key: u64) -> Option<Entry> {
        self.find(key, |[k, size, tag, note]| {
            if !k.grab(key, BUSY) {
                return None;
            }
            let entry = Entry::of(size.peek(), tag.peek(), note.peek());
            k.publish(FREE);
            Some(entry)
        })
    }

    /// Looks `key` up.
    #[must_use]
    pub fn get(&self, key: u64) -> Option<Entry> {
        self.find(key, |[k, size, tag, note]| {
            let entry = Entry::of(size.read(), tag.read(), note.read());
            // Still there, so nothing else was written over it meanwhile.
            (k.peek() == key).then_some(entry)
        })
    }

    /// Gives `key` another size and returns the former: of several changes at once each sees the one before it.
    pub fn swap_size(&self, key: u64, size: u64) -> Option<u64> {
        self.find(key, |[_, word, _, _]| Some(word.exchange(size)))
    }

    /// Takes out every entry that `gone` picks, and hands it to `out`.
    pub fn drain(&self, mut gone: impl FnMut(u64, &Entry) -> bool, mut out: impl FnMut(u64, Entry)) {
        for piece in (0..LEVELS).filter_map(|level| self.pieces.existing(level)) {
            for place in piece.chunks_exact(ENTRY) {
                let [k, size, tag, note] = place else { continue };
                let key = k.read();
                if key == FREE || key == BUSY {
                    continue;
                }
                let entry = Entry::of(size.peek(), tag.peek(), note.peek());
                if gone(key, &entry) && k.grab(key, BUSY) {
                    let entry = Entry::of(size.peek(), tag.peek(), note.peek());
                    k.publish(FREE);
                    out(key, entry);
                }
            }
        }
    }

    /// The first answer of `visit` for a place that holds `key`.
    #[inline]
    fn find<T>(&self, key: u64, visit: impl Fn([&P::Word; ENTRY]) -> Option<T>) -> Option<T> {
        if key == FREE || key == BUSY {
            return None;
        }
        for level in (0..=self.top()).rev() {
            let Some(piece) = self.pieces.existing(level) else { continue };
            for bucket in buckets(piece, level, key) {
                for place in bucket.chunks_exact(ENTRY) {
                    if let [k, size, tag, note] = place
                        && k.read() == key
                        && let Some(answer) = visit([k, size, tag, note])
                    {
                        return Some(answer);
                    }
                }
            }
        }
        None
    }

    #[inline]
    fn top(&self) -> usize {
        usize::try_from(self.top.peek()).unwrap_or(LEVELS).min(LEVELS - 1)
    }

    fn raise(&self, level: usize) {
        let level = level as u64;
        let mut top = self.top.peek();
        while top < level && !self.top.grab(top, level) {
            top = self.top.peek();
        }
    }
}

/// Writes an entry into a free place of `key` in `piece`; whether there was one.
#[inline]
fn place<W: Cell>(piece: &[W], level: usize, key: u64, entry: &Entry) -> bool {
    for bucket in buckets(piece, level, key) {
        for place in bucket.chunks_exact(ENTRY) {
            if let [k, size, tag, note] = place
                && k.peek() == FREE
                && k.grab(FREE, BUSY)
            {
                size.put(entry.size);
                tag.put(entry.tag());
                note.put(entry.note);
                k.publish(key);
                return true;
            }
        }
    }
    false
}

/// The two buckets of `key` in the piece of `level`: neighbours, so that the second is often fetched with the first.
#[inline]
fn buckets<W>(piece: &[W], level: usize, key: u64) -> [&[W]; 2] {
    let hash = (key ^ key >> 32).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let first = usize::try_from(hash >> (64 - BASE - 2 * level)).unwrap_or_default();
    [first, first ^ 1].map(|bucket| piece.get(bucket * BUCKET..(bucket + 1) * BUCKET).unwrap_or_default())
}
