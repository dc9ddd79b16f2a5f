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
/// Key of a place that is being written or emptied, or put in again as it was: for some instructions.
const BUSY: u64 = u64::MAX;
/// How often a place that is busy is looked at again, by whoever would miss a key there. Its thread may have lost its core;
/// in a forked child it is not there any more.
const LOOKS: u32 = 1 << 14;

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
                return Err(Miss::Perhaps);
            }
            let entry = Entry::of(size.peek(), tag.peek(), note.peek());
            k.publish(FREE);
            Ok(entry)
        })
    }

    /// Takes `key` out if its entry is one that `wanted` picks: one of several, where it was entered more than once.
    pub fn take_if(&self, key: u64, wanted: impl Fn(&Entry) -> bool) -> Option<Entry> {
        self.find(key, |place| take_place(place, key, &wanted))
    }

    /// Looks `key` up.
    #[must_use]
    pub fn get(&self, key: u64) -> Option<Entry> {
        self.find(key, |[k, size, tag, note]| {
            let entry = Entry::of(size.read(), tag.read(), note.read());
            // Still there, so nothing else was written over it meanwhile.
            if k.peek() == key { Ok(entry) } else { Err(Miss::Perhaps) }
        })
    }

    /// Gives `key` another size and returns the former: of several changes at once each sees the one before it, and
    /// whoever takes it out the last.
    pub fn swap_size(&self, key: u64, size: u64) -> Option<u64> {
        self.find(key, |[k, word, _, _]| {
            // Nobody takes it out in between and the size goes to nobody, or to another key's entry.
            if !k.grab(key, BUSY) {
                return Err(Miss::Perhaps);
            }
            let former = word.peek();
            word.put(size);
            k.publish(key);
            Ok(former)
        })
    }

    /// Takes out every entry that `gone` picks, and hands it to `out`.
    pub fn drain(&self, mut gone: impl FnMut(u64, &Entry) -> bool, mut out: impl FnMut(u64, Entry)) {
        for piece in (0..LEVELS).filter_map(|level| self.pieces.existing(level)) {
            for place in piece.chunks_exact(ENTRY) {
                let [k, size, tag, note] = place else { continue };
                // Once more where another one was at the place at the same moment.
                loop {
                    let key = settled(k);
                    let entry = Entry::of(size.peek(), tag.peek(), note.peek());
                    if key == FREE || key == BUSY || !gone(key, &entry) {
                        break;
                    }
                    if let Ok(entry) = take_place([k, size, tag, note], key, |entry| gone(key, entry)) {
                        out(key, entry);
                        break;
                    }
                }
            }
        }
    }

    /// The first answer of `visit` for a place that holds `key`.
    #[inline]
    fn find<T>(&self, key: u64, visit: impl Fn([&P::Word; ENTRY]) -> Result<T, Miss>) -> Option<T> {
        let found = self.scan(key, |found| found == key, |_, place| visit(place).ok());
        if found.is_some() { found } else { self.find_again(key, visit) }
    }

    /// A place at which somebody is busy may hold the key in a moment.
    #[cold]
    #[inline(never)]
    fn find_again<T>(&self, key: u64, visit: impl Fn([&P::Word; ENTRY]) -> Result<T, Miss>) -> Option<T> {
        for _ in 0..LOOKS {
            let mut is_sure = true;
            let is_meant = |found| found == key || found == BUSY;
            let found = self.scan(key, is_meant, |found, place| {
                let answer = if found == key { visit(place) } else { Err(Miss::Perhaps) };
                is_sure &= !matches!(answer, Err(Miss::Perhaps));
                answer.ok()
            });
            if found.is_some() || is_sure {
                return found;
            }
            P::Word::pause();
        }
        None
    }

    /// The first answer of `visit` for those of the places of `key` whose own key `is_meant`.
    #[inline]
    fn scan<T>(
        &self,
        key: u64,
        is_meant: impl Fn(u64) -> bool,
        mut visit: impl FnMut(u64, [&P::Word; ENTRY]) -> Option<T>,
    ) -> Option<T> {
        if key == FREE || key == BUSY {
            return None;
        }
        for level in (0..=self.top()).rev() {
            let Some(piece) = self.pieces.existing(level) else { continue };
            for bucket in buckets(piece, level, key) {
                for place in bucket.chunks_exact(ENTRY) {
                    let [k, size, tag, note] = place else { continue };
                    let found = k.read();
                    if is_meant(found)
                        && let Some(answer) = visit(found, [k, size, tag, note])
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

/// Why nothing was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Miss {
    /// It is not there.
    Surely,
    /// Another one was there at the same moment.
    Perhaps,
}

/// Takes out what stands at a place under `key`, if `wanted` picks it. It is looked at again when nobody else can change it:
/// between a look and that, the key may have been taken out and entered anew.
fn take_place<W: Cell>(
    [k, size, tag, note]: [&W; ENTRY],
    key: u64,
    mut wanted: impl FnMut(&Entry) -> bool,
) -> Result<Entry, Miss> {
    let look = || Entry::of(size.peek(), tag.peek(), note.peek());
    if !wanted(&look()) {
        return Err(Miss::Surely);
    }
    if !k.grab(key, BUSY) {
        return Err(Miss::Perhaps);
    }
    let entry = look();
    let is_wanted = wanted(&entry);
    k.publish(if is_wanted { FREE } else { key });
    if is_wanted { Ok(entry) } else { Err(Miss::Perhaps) }
}

/// The key of a place, as soon as nobody is busy there.
fn settled<W: Cell>(k: &W) -> u64 {
    let mut key = k.read();
    for _ in 0..LOOKS {
        if key != BUSY {
            break;
        }
        W::pause();
        key = k.read();
    }
    key
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
