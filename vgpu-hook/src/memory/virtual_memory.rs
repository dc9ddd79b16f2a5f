//! `cuMemCreate` and what is done with its handles.
//!
//! The memory is there until the last reference to its handle is released *and* the last mapping is gone: programs
//! release the handle right after mapping and rely on that. So both are counted. Reserving addresses, mapping and
//! access rights cost nothing by themselves. An imported handle is charged to the process that made it.

use core::ffi::c_void;
use core::ops::Range;
use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::Relaxed;

use mullion_accounting::Entry;

use super::arena::{Arena, Entries};
use super::blocks::round_up;
use super::{Pass, charge, counted};
use crate::container::{self, Container, Lock};
use crate::cuda::{
    CUdeviceptr, CUmemAllocationProp, CUmemGenericAllocationHandle, CUresult, CUuint64, LOCATION_DEVICE,
};
use crate::driver;
use crate::sys;

/// The allocations of this process.
#[derive(Debug)]
pub(crate) struct Allocations {
    lock: Lock,
    next: AtomicU64,
    next_mark: AtomicU64,
    /// Mappings that are at the driver and have no address in the books yet.
    coming: AtomicU64,
    /// By our own number; `note` is references << 32 | mappings.
    by_number: Entries,
    /// By handle; `size` is the references that the program holds by it, `note` our number.
    handles: Entries,
    /// By address, and the mark of the call that is about to take it away; `size` is the length of the mapping, `note` our
    /// number.
    mappings: Entries,
}

const REFERENCE: u64 = 1 << 32;
const MAPPING: u64 = 1;
/// Mappings lie at multiples of this at least (the smallest granularity that a driver tells, for memory of the host).
const STEP: u64 = 64 << 10;
/// Calls that can take mappings away at the same time: their marks fit below an address.
const MOST_MARKS: u64 = STEP - 1;
/// Steps without a mapping after which the table is looked through instead of the range.
const MISSES: u32 = 64;
/// How often it is tried to retain what may have been mapped just now, in pauses of 0.1 ms.
const COMING: u32 = 50;

impl Allocations {
    pub(super) const fn new() -> Self {
        Self {
            lock: Lock::new(),
            next: AtomicU64::new(1),
            next_mark: AtomicU64::new(0),
            coming: AtomicU64::new(0),
            by_number: Arena::table(),
            handles: Arena::table(),
            mappings: Arena::table(),
        }
    }

    /// Enters a new allocation; `false` where there is no memory for it.
    fn add(&self, handle: u64, size: u64, card: u8) -> bool {
        let _held = self.lock.lock();
        let number = self.next.fetch_add(1, Relaxed);
        let new = Entry { size, card, kind: 1, note: REFERENCE };
        let by_handle = Entry { size: 1, card, kind: 1, note: number };
        self.by_number.insert(number, &new).is_ok() && self.handles.insert(handle, &by_handle).is_ok()
    }

    /// Changes the counts of an allocation; what it was when nothing holds it any more.
    fn change(&self, number: u64, change: impl FnOnce(u64) -> u64) -> Option<Entry> {
        let mut entry = self.by_number.take(number)?;
        entry.note = change(entry.note);
        if entry.note == 0 {
            return Some(entry);
        }
        // The place that it came from is free again.
        let _ = self.by_number.insert(number, &entry);
        None
    }

    /// Takes one reference out of the table before the driver is asked.
    fn take_reference(&self, handle: u64) -> Option<Entry> {
        let _held = self.lock.lock();
        let entry = self.handles.take(handle)?;
        if entry.size > 1 {
            let _ = self.handles.insert(handle, &Entry { size: entry.size - 1, ..entry });
        }
        Some(entry)
    }

    /// The driver refused: the reference is back.
    fn put_reference(&self, handle: u64, entry: &Entry) {
        let _held = self.lock.lock();
        // Others may have retained or released it meanwhile.
        let left = self.handles.take(handle).map_or(0, |left| left.size);
        let _ = self.handles.insert(handle, &Entry { size: left + 1, ..*entry });
    }

    fn drop_reference(&self, entry: &Entry) -> Option<Entry> {
        let _held = self.lock.lock();
        self.change(entry.note, |counts| counts.saturating_sub(REFERENCE))
    }

    /// One more mapping of a handle, which has no address in the books yet.
    fn add_mapping(&self, handle: u64) -> Option<Entry> {
        let _held = self.lock.lock();
        let by_handle = self.handles.get(handle)?;
        self.change(by_handle.note, |counts| counts + MAPPING);
        self.coming.fetch_add(1, Relaxed);
        Some(by_handle)
    }

    /// The driver made a mapping of `size` bytes.
    fn place_mapping(&self, address: u64, size: u64, mapping: &Entry) {
        let _held = self.lock.lock();
        self.coming.fetch_sub(1, Relaxed);
        let _ = self.mappings.insert(address, &Entry { size, ..*mapping });
    }

    fn drop_mapping(&self, mapping: &Entry) -> Option<Entry> {
        let _held = self.lock.lock();
        self.coming.fetch_sub(1, Relaxed);
        self.change(mapping.note, |counts| counts.saturating_sub(MAPPING))
    }

    /// Marks the mappings that begin in a range as those of one call: by this mark, 0 where there are none.
    fn mark_mappings(&self, range: &Range<u64>) -> u64 {
        let _held = self.lock.lock();
        let mark = 1 + self.next_mark.fetch_add(1, Relaxed) % MOST_MARKS;
        let mut is_any = false;
        self.take_mappings(range, 0, |address, mapping| {
            is_any = true;
            let _ = self.mappings.insert(address | mark, &mapping);
        });
        if is_any { mark } else { 0 }
    }

    /// The driver refused to take marked mappings away: those that are there all the same are so in the books.
    fn unmark_mappings(&self, range: &Range<u64>, mark: u64, mut gone: impl FnMut(Entry)) {
        let _held = self.lock.lock();
        self.take_mappings(range, mark, |address, mapping| {
            if self.is_mapped(address, &mapping) {
                let _ = self.mappings.insert(address, &mapping);
            } else {
                let last = self.change(mapping.note, |counts| counts.saturating_sub(MAPPING));
                last.into_iter().for_each(&mut gone);
            }
        });
    }

    /// Whether the driver still has a mapping that stands under a mark alone: else another thread has taken it away, and may have
    /// mapped something else there. The lock is held.
    #[cold]
    fn is_mapped(&self, address: u64, mapping: &Entry) -> bool {
        if self.mappings.get(address).is_some() {
            return false;
        }
        let Some(handle) = retain_at_driver(address) else { return false };
        release_at_driver(handle);
        self.is_of(mapping, handle, address)
    }

    /// Whether what the driver has at `address` by this handle is the mapping that stood there. The lock is held.
    fn is_of(&self, mapping: &Entry, handle: u64, address: u64) -> bool {
        if let Some(known) = self.handles.get(handle) {
            return known.note == mapping.note;
        }
        // A handle that nobody holds is in no table: then what begins below and reaches as far tells.
        self.covering(address).is_none_or(|(mark, other)| mark != 0 || other.note == mapping.note)
    }

    /// The mapping that `address` lies in, and its mark: what is marked may be gone, and another one be there.
    fn covering(&self, address: u64) -> Option<(u64, Entry)> {
        let mut found: Option<(u64, Entry)> = None;
        self.mappings.drain(
            |key, entry| {
                let (start, mark) = (key - key % STEP, key % STEP);
                let is_there = start <= address && address - start < entry.size;
                if is_there && (found.is_none() || mark == 0) {
                    found = Some((mark, *entry));
                }
                false
            },
            |_, _| {},
        );
        found
    }

    /// The driver took marked mappings away.
    fn drop_mappings(&self, range: &Range<u64>, mark: u64, mut gone: impl FnMut(Entry)) {
        let _held = self.lock.lock();
        self.take_mappings(range, mark, |_, mapping| {
            let last = self.change(mapping.note, |counts| counts.saturating_sub(MAPPING));
            last.into_iter().for_each(&mut gone);
        });
    }

    /// Takes the mappings of a mark (0: those without one) that begin in a range out of the table. The lock is held.
    fn take_mappings(&self, range: &Range<u64>, mark: u64, mut out: impl FnMut(u64, Entry)) {
        let (mut at, mut misses) = (round_up(range.start, STEP), 0);
        // From one to the next, as they usually lie.
        while at < range.end && misses < MISSES {
            if let Some(entry) = self.mappings.take(at | mark) {
                misses = 0;
                out(at, entry);
                at = at.saturating_add(entry.size.max(STEP));
            } else {
                // One that is not counted, as of imported memory; another may follow.
                misses += 1;
                at = at.saturating_add(STEP);
            }
        }
        // A program may name a range of any size: what there is is looked through, not the range.
        if at < range.end {
            let is_meant = |key: u64, _: &Entry| key % STEP == mark && range.contains(&(key - mark));
            self.mappings.drain(is_meant, |key, entry| out(key - mark, entry));
        }
    }

    /// Enters the reference that `ask` gets to what is mapped at `address`. The lock is held all the while, as the driver only
    /// looks something up: what another thread unmaps meanwhile leaves the books when the reference is in them.
    fn retain(
        &self,
        address: u64,
        ask: impl Fn() -> Result<CUmemGenericAllocationHandle, CUresult>,
    ) -> Result<CUmemGenericAllocationHandle, CUresult> {
        let mut tries = 0;
        loop {
            let held = self.lock.lock();
            let handle = ask()?;
            let known = self.handles.take(handle);
            if known.is_some() || tries == COMING || self.coming.load(Relaxed) == 0 {
                self.enter_reference(handle, address, known);
                return Ok(handle);
            }
            // The mapping may be one that has just come, of a handle that was released since.
            release_at_driver(handle);
            drop(held);
            sys::sleep_ns(100_000);
            tries += 1;
        }
    }

    /// One more reference by a handle that `known` was taken out for. The lock is held.
    fn enter_reference(&self, handle: u64, address: u64, known: Option<Entry>) {
        let mut mapping = self.mappings.get(address);
        if mapping.is_none() && known.is_none() {
            mapping = self.covering(address).map(|(_, entry)| entry);
        }
        let Some(number) = known.or(mapping).map(|entry| entry.note) else { return };
        let base = known.unwrap_or(Entry { size: 0, card: 0, kind: 1, note: number });
        let _ = self.handles.insert(handle, &Entry { size: base.size + 1, ..base });
        self.change(number, |counts| counts + REFERENCE);
    }
}

fn free(container: &Container, gone: Option<Entry>) {
    if let Some(entry) = gone
        && let Some(card) = container.card_at(entry.card)
    {
        card.memory.free(entry.size);
    }
}

/// `cuMemCreate`.
///
/// # Safety
/// As `cuMemCreate`.
pub(crate) unsafe fn create(
    real: unsafe extern "C" fn(
        *mut CUmemGenericAllocationHandle,
        usize,
        *const CUmemAllocationProp,
        CUuint64,
    ) -> CUresult,
    handle: *mut CUmemGenericAllocationHandle,
    size: usize,
    properties: *const CUmemAllocationProp,
    flags: CUuint64,
) -> CUresult {
    let container = match counted() {
        Ok(container) => container,
        Err(Pass::Refused(result)) => return result,
        // SAFETY: the caller's own arguments.
        Err(Pass::Driver) => return unsafe { real(handle, size, properties, flags) },
    };
    // SAFETY: null, or the caller's structure.
    let location = unsafe { properties.as_ref() }.map(|properties| properties.location);
    let card = location
        .filter(|location| location.kind == LOCATION_DEVICE)
        .and_then(|location| container.card(location.id));
    let (Some(card), false) = (card, handle.is_null()) else {
        // Memory of the host, or something that the driver will refuse.
        // SAFETY: the caller's own arguments.
        return unsafe { real(handle, size, properties, flags) };
    };
    container.books.measuring.heed();
    let Some(claim) = charge::ask(container, card, size as u64) else { return CUresult::OUT_OF_MEMORY };
    let mut place = 0;
    container::fault_point();
    // SAFETY: the caller's own arguments; the result goes to a place of ours.
    let result = unsafe { real(&raw mut place, size, properties, flags) };
    container::fault_point();
    if !result.is_ok() {
        charge::undo(card, claim, result);
        return result;
    }
    charge::settle(card, claim);
    if !container.books.allocations.add(place, size as u64, card.index) {
        release_at_driver(place);
        card.memory.free(size as u64);
        return CUresult::OUT_OF_MEMORY;
    }
    // SAFETY: not null, so the caller's place for a result.
    unsafe { handle.write(place) };
    result
}

/// A reference to what is mapped at an address.
#[cold]
fn retain_at_driver(address: CUdeviceptr) -> Option<CUmemGenericAllocationHandle> {
    let retain = driver::function!(
        cuMemRetainAllocationHandle: unsafe extern "C" fn(*mut CUmemGenericAllocationHandle, *mut c_void) -> CUresult
    )?;
    let mut handle = 0;
    let address = core::ptr::without_provenance_mut(usize::try_from(address).ok()?);
    // SAFETY: the driver writes one handle; it says no to an address at which nothing is mapped.
    unsafe { retain(&raw mut handle, address) }.is_ok().then_some(handle)
}

#[cold]
fn release_at_driver(handle: CUmemGenericAllocationHandle) {
    let release =
        driver::function!(cuMemRelease: unsafe extern "C" fn(CUmemGenericAllocationHandle) -> CUresult);
    if let Some(release) = release {
        // SAFETY: a reference that nobody knows of.
        let _ = unsafe { release(handle) };
    }
}

/// `cuMemRelease`.
///
/// # Safety
/// As `cuMemRelease`.
pub(crate) unsafe fn release(
    real: unsafe extern "C" fn(CUmemGenericAllocationHandle) -> CUresult,
    handle: CUmemGenericAllocationHandle,
) -> CUresult {
    let known = counted().ok().and_then(|container| {
        container.books.allocations.take_reference(handle).map(|entry| (container, entry))
    });
    let _hidden = known.as_ref().map(|(container, entry)| {
        let measuring = &container.books.measuring;
        container
            .card_at(entry.card)
            .map_or_else(|| measuring.hidden_many(None), |card| measuring.hidden(card))
    });
    container::fault_point();
    // SAFETY: the caller's own argument.
    let result = unsafe { real(handle) };
    container::fault_point();
    if let Some((container, entry)) = known {
        // It is unknown to the driver: another thread has released what this reference stood for.
        if result.is_ok() || result == CUresult::INVALID_VALUE {
            free(container, container.books.allocations.drop_reference(&entry));
        } else {
            container.books.allocations.put_reference(handle, &entry);
        }
    }
    result
}

/// `cuMemRetainAllocationHandle`: one more reference to be released.
///
/// # Safety
/// As `cuMemRetainAllocationHandle`.
pub(crate) unsafe fn retain(
    real: unsafe extern "C" fn(*mut CUmemGenericAllocationHandle, *mut c_void) -> CUresult,
    handle: *mut CUmemGenericAllocationHandle,
    address: *mut c_void,
) -> CUresult {
    let (Ok(container), false) = (counted(), handle.is_null()) else {
        // SAFETY: the caller's own arguments.
        return unsafe { real(handle, address) };
    };
    let ask = || {
        let mut place = 0;
        // SAFETY: the caller's own address; the result goes to a place of ours.
        let result = unsafe { real(&raw mut place, address) };
        if result.is_ok() { Ok(place) } else { Err(result) }
    };
    match container.books.allocations.retain(address.addr() as u64, ask) {
        // SAFETY: not null, so the caller's place for a result.
        Ok(retained) => unsafe { handle.write(retained) },
        Err(result) => return result,
    }
    CUresult::SUCCESS
}

/// `cuMemMap`.
///
/// # Safety
/// As `cuMemMap`.
pub(crate) unsafe fn map(
    real: unsafe extern "C" fn(CUdeviceptr, usize, usize, CUmemGenericAllocationHandle, CUuint64) -> CUresult,
    address: CUdeviceptr,
    size: usize,
    offset: usize,
    handle: CUmemGenericAllocationHandle,
    flags: CUuint64,
) -> CUresult {
    // Before the driver: a release in between must see the mapping.
    let added = counted().ok().and_then(|container| {
        let mapping = container.books.allocations.add_mapping(handle)?;
        Some((container, mapping))
    });
    // SAFETY: the caller's own arguments.
    let result = unsafe { real(address, size, offset, handle, flags) };
    if let Some((container, mapping)) = added {
        if result.is_ok() {
            container.books.allocations.place_mapping(address, size as u64, &mapping);
        } else {
            free(container, container.books.allocations.drop_mapping(&mapping));
        }
    }
    result
}

/// `cuMemUnmap`: takes away all mappings in a range.
///
/// # Safety
/// As `cuMemUnmap`.
pub(crate) unsafe fn unmap(
    real: unsafe extern "C" fn(CUdeviceptr, usize) -> CUresult,
    address: CUdeviceptr,
    size: usize,
) -> CUresult {
    let Ok(container) = counted() else {
        // SAFETY: the caller's own arguments.
        return unsafe { real(address, size) };
    };
    let _hidden = container.books.measuring.hidden_many(None);
    let allocations = &container.books.allocations;
    let range = address..address.saturating_add(size as u64);
    // By a mark, since another thread may map something there as soon as the driver has agreed.
    let mark = allocations.mark_mappings(&range);
    // SAFETY: the caller's own arguments.
    let result = unsafe { real(address, size) };
    if mark == 0 {
        return result;
    }
    if result.is_ok() {
        allocations.drop_mappings(&range, mark, |gone| free(container, Some(gone)));
    } else {
        allocations.unmark_mappings(&range, mark, |gone| free(container, Some(gone)));
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reference_that_came_beside_a_refused_release_counts() {
        const HANDLE: u64 = 5;
        const ADDRESS: u64 = 64 * STEP;
        let allocations = Allocations::new();
        assert!(allocations.add(HANDLE, STEP, 3));
        let Some(mapping) = allocations.add_mapping(HANDLE) else { panic!("no handle") };
        allocations.place_mapping(ADDRESS, STEP, &mapping);
        let Some(released) = allocations.take_reference(HANDLE) else { panic!("no reference") };
        assert_eq!(allocations.retain(ADDRESS, || Ok(HANDLE)), Ok(HANDLE));
        allocations.put_reference(HANDLE, &released);
        for reference in 0..2 {
            let Some(entry) = allocations.take_reference(HANDLE) else { panic!("no reference {reference}") };
            assert_eq!(allocations.drop_reference(&entry), None, "the mapping is left");
        }
        assert!(allocations.take_reference(HANDLE).is_none());
        let mut gone = None;
        let range = ADDRESS..ADDRESS + STEP;
        let mark = allocations.mark_mappings(&range);
        allocations.drop_mappings(&range, mark, |entry| gone = Some((entry.size, entry.card)));
        assert_eq!(gone, Some((STEP, 3)));
    }

    #[test]
    fn a_mapping_that_another_one_covers_by_now_is_not_put_back() {
        const HANDLE: u64 = 5;
        const ADDRESS: u64 = 64 * STEP;
        let allocations = Allocations::new();
        let mapping = |note| Entry { size: 4 * STEP, card: 0, kind: 1, note };
        let stale = mapping(1);
        assert!(allocations.is_of(&stale, HANDLE, ADDRESS), "nothing else is known there");
        // Being taken away itself, it may be gone.
        let _ = allocations.mappings.insert((ADDRESS - STEP) | 7, &mapping(2));
        assert!(allocations.is_of(&stale, HANDLE, ADDRESS));
        let _ = allocations.mappings.insert(ADDRESS - 2 * STEP, &mapping(3));
        assert!(!allocations.is_of(&stale, HANDLE, ADDRESS), "the other one's handle was released");
        assert!(allocations.is_of(&stale, HANDLE, ADDRESS + 8 * STEP));
        // A handle that is held says itself whose it is.
        assert!(allocations.add(HANDLE, 4 * STEP, 0));
        assert!(allocations.is_of(&stale, HANDLE, ADDRESS));
        assert!(!allocations.is_of(&mapping(2), HANDLE, ADDRESS));
    }
}
