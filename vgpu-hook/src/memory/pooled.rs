//! Stream-ordered allocations, and what a program does with pools.

use core::ffi::{c_int, c_void};

use mullion_accounting::Entry;

use super::blocks::{UNIT, round_up};
use super::pools::Following;
use super::{Here, Kind, Pass, charge, counted, here, linear, looks};
use crate::container::{self, Card};
use crate::cuda::{
    CUcontext, CUdevice, CUdeviceptr, CUenum, CUmemPoolProps, CUmemoryPool, CUresult, CUstream, CUuint64,
    LOCATION_DEVICE,
};
use crate::driver;
use crate::launch;

/// `CU_MEM_ALLOCATION_TYPE_MANAGED` (13.0): charged in full, as by `cuMemAllocManaged`, wherever it is at a time.
const MANAGED: CUenum = 2;

type Alloc = unsafe extern "C" fn(*mut CUdeviceptr, usize, CUstream) -> CUresult;
type AllocFrom = unsafe extern "C" fn(*mut CUdeviceptr, usize, CUmemoryPool, CUstream) -> CUresult;
type Free = unsafe extern "C" fn(CUdeviceptr, CUstream) -> CUresult;

/// `cuMemAllocAsync`, on the legacy default stream's side.
///
/// # Safety
/// As `cuMemAllocAsync`.
pub(crate) unsafe fn alloc_async(
    real: Alloc,
    address: *mut CUdeviceptr,
    bytes: usize,
    stream: CUstream,
) -> CUresult {
    // SAFETY: the caller's own arguments; the address is a place of ours.
    let ask = |place| unsafe { real(place, bytes, stream) };
    // SAFETY: null or the caller's place for a result.
    unsafe { from_current_pool(address, bytes, stream, ask, false) }
}

/// `cuMemAllocAsync` on each thread's own default stream.
///
/// # Safety
/// As `cuMemAllocAsync_ptsz`.
pub(crate) unsafe fn alloc_async_ptsz(
    real: Alloc,
    address: *mut CUdeviceptr,
    bytes: usize,
    stream: CUstream,
) -> CUresult {
    // SAFETY: the caller's own arguments; the address is a place of ours.
    let ask = |place| unsafe { real(place, bytes, stream) };
    // SAFETY: null or the caller's place for a result.
    unsafe { from_current_pool(address, bytes, stream, ask, true) }
}

/// `cuMemAllocFromPoolAsync`.
///
/// # Safety
/// As `cuMemAllocFromPoolAsync`.
pub(crate) unsafe fn alloc_from_pool(
    real: AllocFrom,
    address: *mut CUdeviceptr,
    bytes: usize,
    pool: CUmemoryPool,
    stream: CUstream,
) -> CUresult {
    // SAFETY: the caller's own arguments; the address is a place of ours.
    let ask = |place| unsafe { real(place, bytes, pool, stream) };
    // SAFETY: null or the caller's place for a result.
    unsafe { from_pool(address, bytes, pool, stream, ask, false) }
}

/// `cuMemAllocFromPoolAsync` on each thread's own default stream.
///
/// # Safety
/// As `cuMemAllocFromPoolAsync_ptsz`.
pub(crate) unsafe fn alloc_from_pool_ptsz(
    real: AllocFrom,
    address: *mut CUdeviceptr,
    bytes: usize,
    pool: CUmemoryPool,
    stream: CUstream,
) -> CUresult {
    // SAFETY: the caller's own arguments; the address is a place of ours.
    let ask = |place| unsafe { real(place, bytes, pool, stream) };
    // SAFETY: null or the caller's place for a result.
    unsafe { from_pool(address, bytes, pool, stream, ask, true) }
}

/// 0, 1 and 2 stand for default streams, which belong to the current context.
const LAST_DEFAULT: usize = 2;

/// Where the calling thread is, or, without a context, its stream: only for default streams the driver asks for a context.
fn here_or_at(stream: CUstream) -> Result<Here, Pass> {
    let now = here();
    if !matches!(now, Err(Pass::Driver)) || stream.addr() <= LAST_DEFAULT {
        return now;
    }
    let container = counted()?;
    let ended = container.books.contexts.ended();
    let card = device_by_stream(stream).and_then(|device| container.card(device)).ok_or(Pass::Driver)?;
    Ok(Here { container, card, context: 0, ended })
}

/// The device whose pool `stream` allocates from.
fn device_of(now: Here, stream: CUstream) -> Option<CUdevice> {
    let own = if stream.addr() <= LAST_DEFAULT { None } else { device_by_stream(stream) };
    own.or_else(|| now.container.device(now.card))
}

pub(crate) fn device_by_stream(stream: CUstream) -> Option<CUdevice> {
    let own = driver::function!(cuStreamGetDevice: unsafe extern "C" fn(CUstream, *mut CUdevice) -> CUresult);
    let mut device = -1;
    match own {
        // SAFETY: the caller's stream; the driver writes one number.
        Some(ask) if unsafe { ask(stream, &raw mut device) }.is_ok() => Some(device),
        _ => device_by_context(stream),
    }
}

/// The same before CUDA 12.8: the device of the stream's context.
#[cold]
fn device_by_context(stream: CUstream) -> Option<CUdevice> {
    let ask = driver::function!(cuStreamGetCtx: unsafe extern "C" fn(CUstream, *mut CUcontext) -> CUresult)?;
    let mut context = core::ptr::null_mut();
    // SAFETY: the caller's stream; the driver writes one handle.
    if !unsafe { ask(stream, &raw mut context) }.is_ok() {
        return None;
    }
    looks::device_of(context.addr() as u64)
}

/// # Safety
/// `address` is null or a place for a result.
unsafe fn from_current_pool(
    address: *mut CUdeviceptr,
    bytes: usize,
    stream: CUstream,
    ask: impl FnOnce(*mut CUdeviceptr) -> CUresult,
    per_thread: bool,
) -> CUresult {
    let now = match here_or_at(stream) {
        Ok(now) if !address.is_null() => now,
        Err(Pass::Refused(result)) => return result,
        _ => return ask(address),
    };
    let current =
        driver::function!(cuDeviceGetMemPool: unsafe extern "C" fn(*mut CUmemoryPool, CUdevice) -> CUresult);
    let mut pool = core::ptr::null_mut();
    let device = device_of(now, stream);
    // SAFETY: the driver writes one handle.
    let found =
        current.zip(device).is_some_and(|(ask, device)| unsafe { ask(&raw mut pool, device) }.is_ok());
    if !found {
        return ask(address);
    }
    // SAFETY: as the caller says.
    unsafe { counted_alloc(now, address, bytes, pool, stream, ask, per_thread) }
}

/// # Safety
/// `address` is null or a place for a result.
unsafe fn from_pool(
    address: *mut CUdeviceptr,
    bytes: usize,
    pool: CUmemoryPool,
    stream: CUstream,
    ask: impl FnOnce(*mut CUdeviceptr) -> CUresult,
    per_thread: bool,
) -> CUresult {
    let now = match here_or_at(stream) {
        Ok(now) if !address.is_null() && !pool.is_null() => now,
        Err(Pass::Refused(result)) => return result,
        _ => return ask(address),
    };
    // SAFETY: as the caller says.
    unsafe { counted_alloc(now, address, bytes, pool, stream, ask, per_thread) }
}

/// The card of a pool that is a device's own, not always the current one's.
fn owner(now: Here, pool: u64) -> Option<&'static Card> {
    let own = driver::function!(
        cuDeviceGetDefaultMemPool: unsafe extern "C" fn(*mut CUmemoryPool, CUdevice) -> CUresult
    );
    let is_owner = |card: &&Card| {
        let mut found = core::ptr::null_mut();
        own.zip(now.container.device(card)).is_some_and(|(own, device)| {
            // SAFETY: the driver writes one handle.
            unsafe { own(&raw mut found, device) }.is_ok() && found.addr() as u64 == pool
        })
    };
    now.container.cards().find(is_owner)
}

/// Follows the pool through one allocation, which is charged to the pool's card, whatever the current one is.
///
/// # Safety
/// `address` is a place for a result.
unsafe fn counted_alloc(
    now: Here,
    address: *mut CUdeviceptr,
    bytes: usize,
    pool: CUmemoryPool,
    stream: CUstream,
    ask: impl FnOnce(*mut CUdeviceptr) -> CUresult,
    per_thread: bool,
) -> CUresult {
    let container = now.container;
    let pools = &container.books.pools;
    let pool = pool.addr() as u64;
    // Under capture it becomes a node of a graph: no memory comes with it until a launch, and it is never the pool's.
    container.books.graphs.expect_allocations();
    if launch::is_captured(stream, per_thread) {
        return ask(address);
    }
    if !pools.knows(pool) {
        // One that no device names holds managed memory, which goes to the current one like any other.
        let adopted = match owner(now, pool) {
            Some(card) => pools.add(pool, Some(card)),
            None if pools.is_none(pool) => return CUresult::INVALID_VALUE,
            None => pools.add(pool, Some(now.card)),
        };
        if !adopted {
            return CUresult::OUT_OF_MEMORY;
        }
    }
    let Some((index, following)) = pools.hold(container, pool) else { return ask(address) };
    let card = following.card();
    let wanted = round_up(bytes as u64, UNIT);
    let missing = || {
        let (reserved, used) = following.look();
        wanted.saturating_sub(reserved.saturating_sub(used))
    };
    // All of it first, because what the pool holds may be in pieces too small.
    let claim = [wanted, missing()]
        .into_iter()
        .find_map(|bytes| charge::try_ask(container, card, pools.growth_for(bytes)))
        .or_else(|| {
            let trimmed = following.trim();
            trimmed.then(|| charge::try_ask(container, card, pools.growth_for(wanted))).flatten()
        })
        .or_else(|| charge::ask_again(container, card, pools.growth_for(missing())));
    let Some(claim) = claim else {
        charge::refused(card);
        return CUresult::OUT_OF_MEMORY;
    };
    // A trim may have changed it.
    let before = following.charged();
    let mut place = 0;
    container::fault_point();
    let opened = following.opens();
    let result = ask(&raw mut place);
    drop(opened);
    container::fault_point();
    let after = following.reserved();
    if !result.is_ok() {
        charge::undo(card, claim, result);
        following.look();
        return result;
    }
    let grown = after.saturating_sub(before);
    pools.learn_growth(grown);
    let claimed = claim.bytes();
    if grown > claimed {
        // It grew by more than could be known beforehand.
        charge::settle(card, claim);
        following.settled(before + claimed);
        match charge::ask_to_the_end(container, card, grown - claimed) {
            Some(more) => {
                charge::settle(card, more);
                following.settled(after);
            }
            None => return take_back(&following, place, stream, per_thread),
        }
    } else {
        charge::settle_at(card, claim, grown);
        if after < before {
            container.books.measuring.stir(card);
            card.memory.free(before - after);
        }
        following.settled(after);
    }
    let entry = Entry { size: wanted, card: card.index, kind: Kind::Pooled as u8, note: index };
    linear::bury(now, place);
    if container.books.pointers.insert(place, &entry).is_err() {
        return take_back(&following, place, stream, per_thread);
    }
    following.entered();
    // SAFETY: the caller's place for a result.
    unsafe { address.write(place) };
    result
}

/// The pool passed the limit for this allocation: it goes back, and the pool gives up what it does not need. Until it has,
/// all of it is charged.
#[cold]
fn take_back(
    following: &Following<'_>,
    address: CUdeviceptr,
    stream: CUstream,
    per_thread: bool,
) -> CUresult {
    let free = if per_thread {
        driver::function!(cuMemFreeAsync_ptsz: Free)
    } else {
        driver::function!(cuMemFreeAsync: Free)
    };
    if let Some(free) = free {
        // SAFETY: an allocation that nobody knows of, and the stream that it was made on.
        let _ = unsafe { free(address, stream) };
    }
    following.look();
    following.trim();
    charge::refused(following.card());
    CUresult::OUT_OF_MEMORY
}

/// `cuMemFreeAsync`.
///
/// # Safety
/// As `cuMemFreeAsync`.
pub(crate) unsafe fn free_async(real: Free, pointer: CUdeviceptr, stream: CUstream) -> CUresult {
    // SAFETY: the caller's own arguments.
    linear::free_by(pointer, linear::When::InOrder, || unsafe { real(pointer, stream) })
}

/// `cuMemPoolCreate`.
///
/// # Safety
/// As `cuMemPoolCreate`.
pub(crate) unsafe fn pool_create(
    real: unsafe extern "C" fn(*mut CUmemoryPool, *const CUmemPoolProps) -> CUresult,
    pool: *mut CUmemoryPool,
    properties: *const CUmemPoolProps,
) -> CUresult {
    let container = match counted() {
        Ok(container) => Some(container),
        Err(Pass::Refused(result)) => return result,
        Err(Pass::Driver) => None,
    };
    // SAFETY: the caller's own arguments.
    let result = unsafe { real(pool, properties) };
    let Some(container) = container.filter(|_| result.is_ok()) else { return result };
    // SAFETY: the driver took it, so it is there.
    let CUmemPoolProps { kind, location, .. } = unsafe { properties.read() };
    let card = match (kind, location.kind) {
        (_, LOCATION_DEVICE) => container.card(location.id),
        // Without a context it is not said which card is meant.
        (MANAGED, _) => container.current_card().or_else(|| container.cards().next()),
        _ => None,
    };
    // SAFETY: the driver has just written it.
    let made = unsafe { pool.read() };
    if container.books.pools.add(made.addr() as u64, card) {
        container.books.pools.observe(container, made.addr() as u64);
        return result;
    }
    destroy_at_driver(made);
    CUresult::OUT_OF_MEMORY
}

#[cold]
fn destroy_at_driver(pool: CUmemoryPool) {
    if let Some(destroy) = driver::function!(cuMemPoolDestroy: unsafe extern "C" fn(CUmemoryPool) -> CUresult)
    {
        // SAFETY: a pool that nobody knows of.
        let _ = unsafe { destroy(pool) };
    }
}

/// `cuMemPoolImportFromShareableHandle`: its maker is charged.
///
/// # Safety
/// As `cuMemPoolImportFromShareableHandle`.
pub(crate) unsafe fn pool_import(
    real: unsafe extern "C" fn(*mut CUmemoryPool, *mut c_void, u32, CUuint64) -> CUresult,
    pool: *mut CUmemoryPool,
    handle: *mut c_void,
    kind: u32,
    flags: CUuint64,
) -> CUresult {
    // SAFETY: the caller's own arguments.
    let result = unsafe { real(pool, handle, kind, flags) };
    if result.is_ok()
        && let Ok(container) = counted()
    {
        // SAFETY: the driver has just written it.
        let imported = unsafe { pool.read() };
        container.books.pools.add(imported.addr() as u64, None);
    }
    result
}

/// `cuMemPoolDestroy`.
///
/// # Safety
/// As `cuMemPoolDestroy`.
pub(crate) unsafe fn pool_destroy(
    real: unsafe extern "C" fn(CUmemoryPool) -> CUresult,
    pool: CUmemoryPool,
) -> CUresult {
    // SAFETY: the caller's own argument.
    let destroy = || unsafe { real(pool) };
    match counted() {
        Ok(container) => container.books.pools.end(container, pool.addr() as u64, destroy),
        Err(_) => destroy(),
    }
}

fn then_observe(pool: CUmemoryPool, real: impl FnOnce() -> CUresult) -> CUresult {
    let result = real();
    if let Ok(container) = counted() {
        container.books.pools.observe(container, pool.addr() as u64);
    }
    result
}

/// `cuMemPoolTrimTo`.
///
/// # Safety
/// As `cuMemPoolTrimTo`.
pub(crate) unsafe fn pool_trim(
    real: unsafe extern "C" fn(CUmemoryPool, usize) -> CUresult,
    pool: CUmemoryPool,
    keep: usize,
) -> CUresult {
    // SAFETY: the caller's own arguments.
    then_observe(pool, || unsafe { real(pool, keep) })
}

/// `cuMemPoolSetAttribute`: a lower threshold lets it give memory back.
///
/// # Safety
/// As `cuMemPoolSetAttribute`.
pub(crate) unsafe fn pool_set_attribute(
    real: unsafe extern "C" fn(CUmemoryPool, c_int, *mut c_void) -> CUresult,
    pool: CUmemoryPool,
    attribute: c_int,
    value: *mut c_void,
) -> CUresult {
    // SAFETY: the caller's own arguments.
    then_observe(pool, || unsafe { real(pool, attribute, value) })
}

fn then_observe_all(real: impl FnOnce() -> CUresult) -> CUresult {
    let result = real();
    if let Ok(container) = counted() {
        container.books.pools.observe_all(container);
        container.books.graphs.observe_launched(container);
        launch::settle(container);
    }
    result
}

/// `cuStreamSynchronize`, after which pools give back what they hold beyond their threshold.
///
/// # Safety
/// As `cuStreamSynchronize`.
pub(crate) unsafe fn stream_synchronize(
    real: unsafe extern "C" fn(CUstream) -> CUresult,
    stream: CUstream,
) -> CUresult {
    // SAFETY: the caller's own argument.
    then_observe_all(|| unsafe { real(stream) })
}

/// `cuEventSynchronize`, and `cuCtxSynchronize` of a given context.
///
/// # Safety
/// As `cuEventSynchronize`.
pub(crate) unsafe fn synchronize_on(
    real: unsafe extern "C" fn(*mut c_void) -> CUresult,
    on: *mut c_void,
) -> CUresult {
    // SAFETY: the caller's own argument.
    then_observe_all(|| unsafe { real(on) })
}

/// `cuCtxSynchronize`.
///
/// # Safety
/// As `cuCtxSynchronize`.
pub(crate) unsafe fn context_synchronize(real: unsafe extern "C" fn() -> CUresult) -> CUresult {
    // SAFETY: it takes nothing.
    then_observe_all(|| unsafe { real() })
}
