//! Memory pools: charged with what they hold, not with what is allocated from them.
//!
//! A pool takes memory from the card in pieces of its own choice and keeps it when an allocation is freed, until a
//! synchronisation, a trim or its end. So the charge of each pool follows the driver's own figure
//! (`CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT`), which is read after each call that may change it.

use core::ptr::null_mut;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64};

use mullion_accounting::Entry;

use super::arena::{Arena, Entries};
use super::blocks::{BLOCK, round_up};
use super::charge;
use super::looks::Followed;
use super::measured::Measuring;
use crate::container::{Card, Container, Held, Lock};
use crate::cuda::{CUmemoryPool, CUresult};
use crate::driver;
use crate::sys;

/// `CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT`.
const RESERVED: u32 = 5;
/// `CU_MEMPOOL_ATTR_USED_MEM_CURRENT`.
const USED: u32 = 7;

/// In what pools grow, as far as is known: 32 MiB was seen with drivers 535 to 570.
const GROWTH: u64 = 32 << 20;

/// Pools that one process may have at a time.
const RECORDS: usize = 4096;

/// Not on a card that is counted: in the host's memory, or somebody else's.
const UNCOUNTED: u32 = u32::MAX;

const FREE: u32 = 0;
const LIVE: u32 = 1;
/// The program destroyed it while allocations were left: it ends with the last of them.
const ORPHAN: u32 = 2;

/// Of a record's readers: there may be some.
const OPEN: u32 = 1 << 31;

/// One pool.
#[repr(C, align(64))]
#[derive(Debug)]
pub(super) struct Record {
    lock: Lock,
    state: AtomicU32,
    card: AtomicU32,
    handle: AtomicU64,
    charged: AtomicU64,
    /// Allocations from it.
    live: AtomicU64,
    /// [`OPEN`] while the holder is at the driver for an allocation, and how many others read meanwhile what the pool holds.
    readers: AtomicU32,
    /// Somebody came in vain to look: the holder looks once more.
    missed: AtomicBool,
}

/// All pools of this process.
#[derive(Debug)]
pub(crate) struct Pools {
    lock: Lock,
    records: AtomicPtr<Record>,
    /// Records that were ever used.
    count: AtomicU32,
    by_handle: Entries,
    /// In what pools grow here.
    growth: AtomicU64,
}

/// What the driver says of a pool.
fn attribute(pool: u64, which: u32) -> Option<u64> {
    let ask = driver::function!(
        cuMemPoolGetAttribute: unsafe extern "C" fn(CUmemoryPool, u32, *mut u64) -> CUresult
    )?;
    let mut value = 0;
    // SAFETY: the driver writes one number.
    let result = unsafe { ask(pointer(pool), which, &raw mut value) };
    result.is_ok().then_some(value)
}

fn pointer(handle: u64) -> CUmemoryPool {
    core::ptr::with_exposed_provenance_mut(usize::try_from(handle).unwrap_or(0))
}

/// A pool whose record is held: what it holds can be followed through one call of the driver. That may wait, so nobody
/// waits for the record who only comes to look.
#[derive(Debug)]
pub(super) struct Following<'r> {
    record: &'r Record,
    card: &'r Card,
    measuring: &'r Measuring,
    _held: Held<'r>,
}

impl Drop for Following<'_> {
    fn drop(&mut self) {
        if self.record.missed.swap(false, Relaxed) {
            self.look();
        }
    }
}

impl<'r> Following<'r> {
    /// The card that the pool is on.
    pub(super) fn card(&self) -> &'r Card {
        self.card
    }

    /// Bytes that the pool holds, and how many of them are in use; brings the charge up to date. The driver knows nothing
    /// of a pool that was destroyed, or no longer means this one.
    pub(super) fn look(&self) -> (u64, u64) {
        if self.record.state.load(Relaxed) != LIVE {
            return (self.charged(), self.charged());
        }
        let reserved = self.reserved();
        self.follow(reserved);
        (reserved, attribute(self.record.handle.load(Relaxed), USED).unwrap_or(reserved))
    }

    /// What the driver says that the pool holds.
    pub(super) fn reserved(&self) -> u64 {
        attribute(self.record.handle.load(Relaxed), RESERVED).unwrap_or(self.charged())
    }

    pub(super) fn charged(&self) -> u64 {
        self.record.charged.load(Relaxed)
    }

    fn follow(&self, reserved: u64) {
        let charged = self.record.charged.swap(reserved, Relaxed);
        if charged > reserved {
            self.measuring.stir(self.card);
        }
        if charged != reserved {
            self.card.memory.adjust(charged, reserved);
            charge::note_peak(self.card);
        }
    }

    /// The pool holds `reserved` bytes now, and the difference is charged already.
    pub(super) fn settled(&self, reserved: u64) {
        self.record.charged.store(reserved, Relaxed);
    }

    /// Whether the pool is gone: nobody has anything of it, and nobody can allocate from it any more. It is charged no longer
    /// then.
    fn is_over(&self) -> bool {
        let is_over = self.record.state.load(Relaxed) == ORPHAN && self.record.live.load(Relaxed) == 0;
        if is_over {
            self.follow(0);
            self.record.state.store(FREE, Release);
        }
        is_over
    }

    /// Gives what is unused back to the card; whether that was anything.
    pub(super) fn trim(&self) -> bool {
        let (reserved, used) = self.look();
        if reserved <= used || self.record.state.load(Relaxed) != LIVE {
            return false;
        }
        let trim = driver::function!(cuMemPoolTrimTo: unsafe extern "C" fn(CUmemoryPool, usize) -> CUresult);
        if let Some(trim) = trim {
            // SAFETY: a live pool.
            let _ = unsafe { trim(pointer(self.record.handle.load(Relaxed)), 0) };
        }
        self.look().0 < reserved
    }

    /// Until what comes of it goes, the pool is not destroyed, nothing of it is charged, and others may read what it holds.
    pub(super) fn opens(&self) -> Opened<'_> {
        self.record.readers.store(OPEN, SeqCst);
        Opened(self.record)
    }

    pub(super) fn entered(&self) {
        self.record.live.fetch_add(1, Relaxed);
    }
}

/// A pool whose holder is at the driver.
#[derive(Debug)]
pub(super) struct Opened<'r>(&'r Record);

impl Drop for Opened<'_> {
    fn drop(&mut self) {
        let mut readers = self.0.readers.fetch_and(!OPEN, SeqCst) & !OPEN;
        while readers != 0 {
            sys::sleep_ns(10_000);
            readers = self.0.readers.load(SeqCst);
        }
    }
}

impl Record {
    /// By how much a pool holds more than is charged, whose holder is at the driver for an allocation.
    fn uncharged(&self) -> Option<i64> {
        let enters = |readers| (readers & OPEN != 0).then_some(readers + 1);
        self.readers.fetch_update(SeqCst, SeqCst, enters).ok()?;
        let reserved = attribute(self.handle.load(Relaxed), RESERVED);
        let charged = self.charged.load(Relaxed);
        self.readers.fetch_sub(1, SeqCst);
        Some(reserved?.cast_signed() - charged.cast_signed())
    }
}

impl Pools {
    pub(super) const fn new() -> Self {
        Self {
            lock: Lock::new(),
            records: AtomicPtr::new(null_mut()),
            count: AtomicU32::new(0),
            by_handle: Arena::table(),
            growth: AtomicU64::new(GROWTH),
        }
    }

    /// By how much a pool grows at most when it lacks `bytes`.
    pub(super) fn growth_for(&self, bytes: u64) -> u64 {
        round_up(bytes, self.growth.load(Relaxed))
    }

    /// A pool grew by `bytes`: where that is no multiple of the step taken for granted, it grows in blocks.
    pub(super) fn learn_growth(&self, bytes: u64) {
        if !bytes.is_multiple_of(self.growth.load(Relaxed)) {
            self.growth.store(BLOCK, Relaxed);
        }
    }

    fn records(&self) -> &[Record] {
        let at = self.records.load(Acquire);
        if at.is_null() {
            return &[];
        }
        let count = usize::try_from(self.count.load(Acquire)).unwrap_or(RECORDS).min(RECORDS);
        // SAFETY: the mapping has room for all records; zero is a free one.
        unsafe { core::slice::from_raw_parts(at, count) }
    }

    fn record(&self, pool: u64) -> Option<(u64, &Record)> {
        let index = self.by_handle.get(pool)?.note;
        Some((index, self.records().get(usize::try_from(index).ok()?)?))
    }

    /// Whether the pool has a record.
    pub(super) fn knows(&self, pool: u64) -> bool {
        self.by_handle.get(pool).is_some()
    }

    /// Whether there is no such pool, or no longer: the program has destroyed it, perhaps while allocations were left.
    #[cold]
    pub(super) fn is_none(&self, pool: u64) -> bool {
        // Whoever destroys one holds it.
        let _held = self.lock.lock();
        let is_orphan =
            |record: &Record| record.state.load(Relaxed) == ORPHAN && record.handle.load(Relaxed) == pool;
        !self.knows(pool) && (self.records().iter().any(is_orphan) || attribute(pool, RESERVED).is_none())
    }

    /// Gives a pool a record; `None` for a pool that is not counted. `false` where there is no room.
    pub(super) fn add(&self, pool: u64, card: Option<&Card>) -> bool {
        let _held = self.lock.lock();
        if self.by_handle.get(pool).is_some() {
            return true;
        }
        if self.records.load(Relaxed).is_null() {
            let Ok(new) = sys::map_private(RECORDS * size_of::<Record>()) else { return false };
            self.records.store(new.cast(), Release);
        }
        let free = self.records().iter().position(|record| record.state.load(Acquire) == FREE);
        let index = free.unwrap_or(self.records().len());
        if index == RECORDS {
            return false;
        }
        if free.is_none() {
            self.count.fetch_add(1, Release);
        }
        let Some(record) = self.records().get(index) else { return false };
        record.card.store(card.map_or(UNCOUNTED, |card| card.index.into()), Relaxed);
        record.handle.store(pool, Relaxed);
        record.charged.store(0, Relaxed);
        record.live.store(0, Relaxed);
        record.missed.store(false, Relaxed);
        record.readers.store(0, Relaxed);
        record.state.store(LIVE, Release);
        self.by_handle.insert(pool, &Entry { note: index as u64, ..Entry::default() }).is_ok()
    }

    fn follow<'r>(container: &'r Container, record: &'r Record, wait: bool) -> Option<Following<'r>> {
        let card = u8::try_from(record.card.load(Relaxed)).ok().and_then(|index| container.card_at(index))?;
        let held = if wait { record.lock.lock() } else { record.lock.try_lock()? };
        Some(Following { record, card, measuring: &container.books.measuring, _held: held })
    }

    /// Holds a pool's record; `None` for one that is not counted. Also the record's number, for [`Self::left`].
    pub(super) fn hold<'r>(&'r self, container: &'r Container, pool: u64) -> Option<(u64, Following<'r>)> {
        let (index, record) = self.record(pool)?;
        Some((index, Self::follow(container, record, true)?))
    }

    /// Reads what one pool holds, or leaves it to whoever holds the record.
    pub(super) fn observe(&self, container: &Container, pool: u64) {
        if let Some((_, record)) = self.record(pool) {
            Self::observe_one(container, record);
        }
    }

    /// Reads what all pools hold: after a call that may have made any of them give memory back.
    pub(super) fn observe_all(&self, container: &Container) {
        let is_worth_it =
            |record: &&Record| record.charged.load(Relaxed) != 0 || record.state.load(Relaxed) == ORPHAN;
        for record in self.records().iter().filter(is_worth_it) {
            Self::observe_one(container, record);
        }
    }

    /// Reads what the pools on one card hold; also how much more those hold than is charged that were held.
    pub(super) fn look_at(&self, container: &Container, card: &Card) -> Followed {
        let is_worth_it = |record: &&Record| {
            record.card.load(Relaxed) == u32::from(card.index)
                && (record.readers.load(Relaxed) != 0
                    || record.charged.load(Relaxed) != 0
                    || record.state.load(Relaxed) == ORPHAN)
        };
        let look = |record: &Record| {
            if Self::observe_one(container, record) {
                Followed::ALL
            } else {
                Followed { is_all: false, uncharged: record.uncharged() }
            }
        };
        self.records().iter().filter(is_worth_it).map(look).fold(Followed::ALL, Followed::with)
    }

    fn observe_one(container: &Container, record: &Record) -> bool {
        if record.card.load(Relaxed) == UNCOUNTED {
            return true;
        }
        let Some(following) = Self::follow(container, record, false) else {
            record.missed.store(true, Relaxed);
            return false;
        };
        if !following.is_over() {
            following.look();
        }
        true
    }

    /// Makes the pools on `card` give back what they do not use; whether any did. A pool that is held is left alone.
    pub(super) fn give_way(&self, container: &Container, card: &Card) -> bool {
        let mut any = container.books.graphs.give_way(container, card);
        for record in self.records() {
            if record.card.load(Relaxed) != u32::from(card.index) || record.charged.load(Relaxed) == 0 {
                continue;
            }
            let before = record.charged.load(Relaxed);
            if let Some(following) = Self::follow(container, record, false) {
                any |= following.is_over() || following.trim() || following.charged() < before;
            }
        }
        any
    }

    /// An allocation of the pool with this record was freed.
    pub(super) fn left(&self, index: u64) {
        if let Some(record) = usize::try_from(index).ok().and_then(|index| self.records().get(index)) {
            let _ = record.live.fetch_update(Relaxed, Relaxed, |live| live.checked_sub(1));
        }
    }

    /// The program is about to destroy a pool: what is left of it then.
    pub(super) fn end(
        &self,
        container: &Container,
        pool: u64,
        destroy: impl FnOnce() -> CUresult,
    ) -> CUresult {
        let _held = self.lock.lock();
        let Some(entry) = self.by_handle.take(pool) else { return destroy() };
        let record = usize::try_from(entry.note).ok().and_then(|index| self.records().get(index));
        let following = record.and_then(|record| Self::follow(container, record, true));
        if let Some(following) = &following {
            // What it still has then is in use, if only until a stream has come to its free.
            following.trim();
        }
        let result = destroy();
        if !result.is_ok() {
            let _ = self.by_handle.insert(pool, &entry);
            return result;
        }
        match (record, following) {
            (Some(record), Some(following)) if record.live.load(Relaxed) > 0 || following.charged() > 0 => {
                record.state.store(ORPHAN, Release);
            }
            (Some(record), Some(following)) => {
                following.follow(0);
                record.state.store(FREE, Release);
            }
            (Some(record), None) => record.state.store(FREE, Release),
            (None, _) => {}
        }
        result
    }
}
