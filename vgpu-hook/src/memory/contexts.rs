//! Contexts: what each takes of its card, and what goes with it.
//!
//! A primary context is made by the first of several retains and gone with the last release, or by a reset. What was
//! allocated in a context, also its arrays and modules, goes with it.

use core::ffi::{c_int, c_uint, c_void};
use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::Relaxed;

use mullion_accounting::{Claim, Entry};
use mullion_region::MAX_DEVICES;

use super::blocks::{BLOCK, round_up};
use super::measured::{self, Look};
use super::{Kind, Pass, charge, counted, current_context, here, key_of, linear};
use crate::container::{self, Card, Container, Lock};
use crate::cuda::{CUcontext, CUdevResourceDesc, CUdevice, CUgreenCtx, CUresult};
use crate::driver;
use crate::launch;

/// A context is not believed to take more. The largest seen took 1.1 GiB (eight cards with peer access).
const MOST: u64 = 2 << 30;

/// The primary contexts of this process, by card.
#[derive(Debug)]
pub(crate) struct Contexts {
    /// Making and ending one looks at the card before and after.
    lock: Lock,
    primary: [AtomicU64; MAX_DEVICES],
    /// Contexts by card.
    count: [AtomicU64; MAX_DEVICES],
    /// The one context of a card that has just one; else 0.
    only: [AtomicU64; MAX_DEVICES],
}

impl Contexts {
    pub(super) const fn new() -> Self {
        Self {
            lock: Lock::new(),
            primary: [const { AtomicU64::new(0) }; MAX_DEVICES],
            count: [const { AtomicU64::new(0) }; MAX_DEVICES],
            only: [const { AtomicU64::new(0) }; MAX_DEVICES],
        }
    }

    /// The context of a card on which this process has just one: then the driver need not be asked which it is. Else 0.
    #[inline]
    pub(super) fn only(&self, card: &Card) -> u64 {
        self.only.get(usize::from(card.index)).map_or(0, |only| only.load(Relaxed))
    }

    /// There is one more context on `card`, or one less. The lock is held.
    fn changed(&self, container: &Container, card: &Card, more: bool) {
        let index = usize::from(card.index);
        let (Some(count), Some(only)) = (self.count.get(index), self.only.get(index)) else { return };
        let before = count.load(Relaxed);
        let now = if more { before + 1 } else { before.saturating_sub(1) };
        count.store(now, Relaxed);
        only.store(if now == 1 { any_context(container, card).unwrap_or(0) } else { 0 }, Relaxed);
    }

    fn primary(&self, card: &Card) -> Option<&AtomicU64> {
        self.primary.get(usize::from(card.index))
    }
}

/// What is known of a card before a context is made on it.
struct Before<'c> {
    container: &'static Container,
    card: &'c Card,
    look: Option<Look>,
    /// A context of this process on the card, which can be asked afterwards too.
    other: Option<u64>,
    /// Room for a context of the size that others of the container had.
    claim: Option<Claim>,
}

/// Any context of this process on `card`.
fn any_context(container: &Container, card: &Card) -> Option<u64> {
    let mut found = None;
    container.books.objects.drain(
        |_, entry| {
            if entry.kind == Kind::Context as u8 && entry.card == card.index {
                found = Some(entry.note);
            }
            false
        },
        |_, _| {},
    );
    found
}

impl<'c> Before<'c> {
    /// Looks at the card. `None` where there is no room for a context.
    fn now(container: &'static Container, card: &'c Card) -> Option<Self> {
        let known = card.words.context_bytes.load(Relaxed).min(MOST);
        let claim = if known == 0 { None } else { Some(charge::ask(container, card, known)?) };
        let other = any_context(container, card);
        let look = match other {
            Some(context) => measured::look_in(card, context),
            None => measured::look_without_context(card),
        };
        Some(Self { container, card, look, other, claim })
    }

    fn failed(self, result: CUresult) {
        if let Some(claim) = self.claim {
            charge::undo(self.card, claim, result);
        }
    }

    /// Charges a context just made; `false` where the limit has no room for it.
    fn made(self, context: u64, kind: Kind) -> bool {
        let Self { container, card, look, other, claim } = self;
        let after = match (look, other) {
            (None, _) => None,
            (_, Some(other)) => measured::look_in(card, other),
            (_, None) => measured::look_without_context(card),
        };
        let claimed = claim.as_ref().map(Claim::bytes);
        let taken = match (look, after) {
            (Some(before), Some(after)) => {
                // The claim is part of what the container has by its books, and not taken yet.
                let taken = after.since(before, MOST);
                let quiet = after.is_quiet_since(before) && (other.is_some() || taken > 0);
                claimed.map_or(taken, |known| if quiet { less_than_known(taken, known) } else { known })
            }
            _ => claimed.unwrap_or(0),
        };
        if kind == Kind::Context && taken > 0 {
            learn(card, taken);
        }
        match claim {
            Some(claim) => charge::settle_at(card, claim, taken),
            None => match charge::ask(container, card, taken) {
                Some(claim) => charge::settle(card, claim),
                None => return false,
            },
        }
        let entry = Entry { size: taken, card: card.index, kind: kind as u8, note: context };
        let _ = container.books.objects.insert(key_of(kind, context), &entry);
        container.books.contexts.changed(container, card, true);
        true
    }
}

/// What to charge for a context that seems to take `taken`, where others took `known`: no more than that, and less only
/// where it is clearly less, since a process that frees something meanwhile makes it seem a bit less.
fn less_than_known(taken: u64, known: u64) -> u64 {
    if taken < known - known / 8 { taken } else { known }
}

/// Remembers the smallest context seen: a larger one may have had a neighbour's memory in it.
fn learn(card: &Card, taken: u64) {
    let word = &card.words.context_bytes;
    let _ = word.fetch_update(Relaxed, Relaxed, |known| (known == 0 || taken < known).then_some(taken));
}

fn card_of(device: CUdevice) -> Result<(&'static Container, &'static Card), Pass> {
    let container = counted()?;
    Ok((container, container.card(device).ok_or(Pass::Driver)?))
}

/// `cuDevicePrimaryCtxRetain`.
///
/// # Safety
/// As `cuDevicePrimaryCtxRetain`.
pub(crate) unsafe fn primary_retain(
    real: unsafe extern "C" fn(*mut CUcontext, CUdevice) -> CUresult,
    context: *mut CUcontext,
    device: CUdevice,
) -> CUresult {
    let (container, card) = match card_of(device) {
        Ok(found) if !context.is_null() => found,
        Err(Pass::Refused(result)) => return result,
        // SAFETY: the caller's own arguments.
        _ => return unsafe { real(context, device) },
    };
    if container.books.contexts.primary(card).is_some_and(|known| known.load(Relaxed) != 0)
        && measured::primary_is_active(device)
    {
        // SAFETY: the caller's own arguments.
        return unsafe { real(context, device) };
    }
    let _held = container.books.contexts.lock.lock();
    if measured::primary_is_active(device) {
        // SAFETY: the caller's own arguments.
        return unsafe { real(context, device) };
    }
    // SAFETY: the caller's device; the result goes to a place of ours.
    match make_primary(container, card, |place| unsafe { real(place, device) }) {
        Ok(made) => {
            // SAFETY: not null, so the caller's place for a result.
            unsafe { context.write(made) };
            CUresult::SUCCESS
        }
        Err(result) => result,
    }
}

/// Makes a card's primary context by its first `retain`, and charges it. The lock is held.
fn make_primary(
    container: &'static Container,
    card: &Card,
    retain: impl FnOnce(*mut CUcontext) -> CUresult,
) -> Result<CUcontext, CUresult> {
    let before = Before::now(container, card).ok_or(CUresult::OUT_OF_MEMORY)?;
    container::fault_point();
    let mut made = core::ptr::null_mut();
    let result = retain(&raw mut made);
    container::fault_point();
    if !result.is_ok() {
        before.failed(result);
        return Err(result);
    }
    let handle = made.addr() as u64;
    if !before.made(handle, Kind::Context) {
        if let Some(device) = container.device(card) {
            release_at_driver(device);
        }
        return Err(CUresult::OUT_OF_MEMORY);
    }
    if let Some(place) = container.books.contexts.primary(card) {
        place.store(handle, Relaxed);
    }
    Ok(made)
}

/// A reference to a card's primary context was given up: charges it no longer if that was the last one. The lock is
/// held.
fn primary_left(container: &'static Container, card: &Card, device: CUdevice) {
    if measured::primary_is_active(device) {
        return;
    }
    let context = container.books.contexts.primary(card).map_or(0, |place| place.swap(0, Relaxed));
    gone(container, context, Kind::Context);
}

#[cold]
fn release_at_driver(device: CUdevice) {
    let release = driver::function!(cuDevicePrimaryCtxRelease_v2: unsafe extern "C" fn(CUdevice) -> CUresult);
    if let Some(release) = release {
        // SAFETY: the reference that was just taken.
        let _ = unsafe { release(device) };
    }
}

/// `cuDevicePrimaryCtxRelease` and `cuDevicePrimaryCtxReset`, both forms.
///
/// # Safety
/// As `cuDevicePrimaryCtxRelease_v2`.
pub(crate) unsafe fn primary_end(
    real: unsafe extern "C" fn(CUdevice) -> CUresult,
    device: CUdevice,
) -> CUresult {
    launch::context_gone();
    let Ok((container, card)) = card_of(device) else {
        // SAFETY: the caller's own argument.
        return unsafe { real(device) };
    };
    let _held = container.books.contexts.lock.lock();
    container::fault_point();
    // SAFETY: the caller's own argument.
    let result = unsafe { real(device) };
    container::fault_point();
    if result.is_ok() {
        primary_left(container, card, device);
    }
    result
}

/// A context is gone, and with it what was made in it.
fn gone(container: &'static Container, context: u64, kind: Kind) {
    if context == 0 {
        return;
    }
    let books = &container.books;
    if let Some(entry) = books.objects.take(key_of(kind, context))
        && let Some(card) = container.card_at(entry.card)
    {
        card.memory.free(entry.size);
        books.contexts.changed(container, card, false);
    }
    let of_context = |_: u64, entry: &Entry| entry.note == context && entry.kind != Kind::Pooled as u8;
    books.pointers.drain(of_context, |address, entry| {
        if let Some(card) = container.card_at(entry.card) {
            linear::give_back(container, card, address, &entry);
        }
    });
    books.objects.drain(of_context, |_, entry| {
        if let Some(card) = container.card_at(entry.card) {
            card.memory.free(entry.size);
        }
    });
    books.pools.observe_all(container);
}

/// Makes a context by any of the four forms of `cuCtxCreate`.
fn create(
    context: *mut CUcontext,
    device: CUdevice,
    real: impl FnOnce(*mut CUcontext) -> CUresult,
) -> CUresult {
    let (container, card) = match card_of(device) {
        Ok(found) if !context.is_null() => found,
        Err(Pass::Refused(result)) => return result,
        _ => return real(context),
    };
    let _held = container.books.contexts.lock.lock();
    let Some(before) = Before::now(container, card) else { return CUresult::OUT_OF_MEMORY };
    container::fault_point();
    let mut made = core::ptr::null_mut();
    let result = real(&raw mut made);
    container::fault_point();
    if !result.is_ok() {
        before.failed(result);
        return result;
    }
    if !before.made(made.addr() as u64, Kind::Context) {
        let destroy = driver::function!(cuCtxDestroy_v2: unsafe extern "C" fn(CUcontext) -> CUresult);
        if let Some(destroy) = destroy {
            // SAFETY: a context that nobody knows of.
            let _ = unsafe { destroy(made) };
        }
        return CUresult::OUT_OF_MEMORY;
    }
    // SAFETY: not null, so the caller's place for a result.
    unsafe { context.write(made) };
    result
}

/// `cuCtxCreate` and `cuCtxCreate_v2`.
///
/// # Safety
/// As `cuCtxCreate_v2`.
pub(crate) unsafe fn context_create(
    real: unsafe extern "C" fn(*mut CUcontext, c_uint, CUdevice) -> CUresult,
    context: *mut CUcontext,
    flags: c_uint,
    device: CUdevice,
) -> CUresult {
    // SAFETY: the caller's own arguments; the context is a place of ours.
    create(context, device, |place| unsafe { real(place, flags, device) })
}

/// `cuCtxCreate_v3`.
///
/// # Safety
/// As `cuCtxCreate_v3`.
pub(crate) unsafe fn context_create_v3(
    real: unsafe extern "C" fn(*mut CUcontext, *mut c_void, c_int, c_uint, CUdevice) -> CUresult,
    context: *mut CUcontext,
    affinity: *mut c_void,
    count: c_int,
    flags: c_uint,
    device: CUdevice,
) -> CUresult {
    // SAFETY: the caller's own arguments; the context is a place of ours.
    create(context, device, |place| unsafe { real(place, affinity, count, flags, device) })
}

/// `cuCtxCreate_v4`.
///
/// # Safety
/// As `cuCtxCreate_v4`.
pub(crate) unsafe fn context_create_v4(
    real: unsafe extern "C" fn(*mut CUcontext, *mut c_void, c_uint, CUdevice) -> CUresult,
    context: *mut CUcontext,
    parameters: *mut c_void,
    flags: c_uint,
    device: CUdevice,
) -> CUresult {
    // SAFETY: the caller's own arguments; the context is a place of ours.
    create(context, device, |place| unsafe { real(place, parameters, flags, device) })
}

/// `cuCtxDestroy`, both forms.
///
/// # Safety
/// As `cuCtxDestroy_v2`.
pub(crate) unsafe fn context_destroy(
    real: unsafe extern "C" fn(CUcontext) -> CUresult,
    context: CUcontext,
) -> CUresult {
    // SAFETY: the caller's own arguments.
    unsafe { end(real, context, || true) }
}

/// `cuCtxDetach`: ends the current context if nobody else has attached to it (`cuCtxAttach`), and then it is current no
/// longer.
///
/// # Safety
/// As `cuCtxDetach`.
pub(crate) unsafe fn context_detach(
    real: unsafe extern "C" fn(CUcontext) -> CUresult,
    context: CUcontext,
) -> CUresult {
    // SAFETY: the caller's own arguments.
    unsafe { end(real, context, || current_context() != context.addr() as u64) }
}

/// Calls `real`, and enters the end of the context if it `is_gone` then.
///
/// # Safety
/// As `cuCtxDestroy_v2`.
unsafe fn end(
    real: unsafe extern "C" fn(CUcontext) -> CUresult,
    context: CUcontext,
    is_gone: impl FnOnce() -> bool,
) -> CUresult {
    launch::context_gone();
    let Ok(container) = counted() else {
        // SAFETY: the caller's own argument.
        return unsafe { real(context) };
    };
    let _held = container.books.contexts.lock.lock();
    let handle = context.addr() as u64;
    container::fault_point();
    // SAFETY: the caller's own argument.
    let result = unsafe { real(context) };
    container::fault_point();
    if result.is_ok() && is_gone() {
        gone(container, handle, Kind::Context);
    }
    result
}

/// `CU_LIMIT_PRINTF_FIFO_SIZE` and `CU_LIMIT_MALLOC_HEAP_SIZE`: sizes in bytes. The limit before them, the stack's, is
/// one per thread.
const IN_BYTES: core::ops::RangeInclusive<c_uint> = 1..=2;
/// `CU_LIMIT_DEV_RUNTIME_PENDING_LAUNCH_COUNT`: those behind it steer caches and take nothing.
const LAST_OF_MEMORY: c_uint = 4;

/// How much more and how much less a context can take when `limit` goes from `former` to `value`. What others on the
/// card do meanwhile must not be taken for this context's.
fn believable(limit: c_uint, former: Option<usize>, value: usize) -> (u64, u64) {
    let Some(former) = former else { return (MOST, 0) };
    let step = value.abs_diff(former) as u64;
    let most = if IN_BYTES.contains(&limit) { round_up(step, BLOCK) } else { MOST };
    match value.cmp(&former) {
        core::cmp::Ordering::Greater => (most, 0),
        core::cmp::Ordering::Less => (0, most),
        core::cmp::Ordering::Equal => (0, 0),
    }
}

/// `cuCtxSetLimit`: a larger stack, heap or buffer takes memory at once.
///
/// # Safety
/// As `cuCtxSetLimit`.
pub(crate) unsafe fn context_set_limit(
    real: unsafe extern "C" fn(c_uint, usize) -> CUresult,
    limit: c_uint,
    value: usize,
) -> CUresult {
    let Some(now) = here().ok().filter(|_| limit <= LAST_OF_MEMORY) else {
        // SAFETY: the caller's own arguments.
        return unsafe { real(limit, value) };
    };
    let ask = driver::function!(cuCtxGetLimit: unsafe extern "C" fn(*mut usize, c_uint) -> CUresult);
    let mut former = 0;
    // SAFETY: the driver writes one number.
    let former = ask.is_some_and(|ask| unsafe { ask(&raw mut former, limit) }.is_ok()).then_some(former);
    let before = measured::look(now.card);
    // SAFETY: the caller's own arguments.
    let result = unsafe { real(limit, value) };
    let (Some(before), Some(after)) = (before, measured::look(now.card)) else { return result };
    if !result.is_ok() {
        return result;
    }
    let (most_more, most_less) = believable(limit, former, value);
    let (more, less) = (after.since(before, most_more), before.since(after, most_less));
    let key = key_of(Kind::Context, now.context);
    let Some(entry) = now.container.books.objects.get(key) else { return result };
    if more > 0 {
        let Some(claim) = charge::ask(now.container, now.card, more) else {
            if let Some(former) = former {
                // SAFETY: what it was before.
                let _ = unsafe { real(limit, former) };
            }
            return CUresult::OUT_OF_MEMORY;
        };
        charge::settle(now.card, claim);
        now.container.books.objects.swap_size(key, entry.size + more);
    } else if less > 0 {
        let freed = less.min(entry.size);
        now.container.books.objects.swap_size(key, entry.size - freed);
        now.card.memory.free(freed);
    }
    result
}

/// `cuGreenCtxCreate`. A green context holds the card's primary context, and makes it where there is none yet.
///
/// # Safety
/// As `cuGreenCtxCreate`.
pub(crate) unsafe fn green_create(
    real: unsafe extern "C" fn(*mut CUgreenCtx, CUdevResourceDesc, CUdevice, c_uint) -> CUresult,
    context: *mut CUgreenCtx,
    resources: CUdevResourceDesc,
    device: CUdevice,
    flags: c_uint,
) -> CUresult {
    let (container, card) = match card_of(device) {
        Ok(found) if !context.is_null() => found,
        Err(Pass::Refused(result)) => return result,
        // SAFETY: the caller's own arguments.
        _ => return unsafe { real(context, resources, device, flags) },
    };
    let _held = container.books.contexts.lock.lock();
    let retain = driver::function!(
        cuDevicePrimaryCtxRetain: unsafe extern "C" fn(*mut CUcontext, CUdevice) -> CUresult
    );
    // Held for this call, so that the primary context is made, and charged, before the green one.
    let retained = retain.filter(|_| !measured::primary_is_active(device));
    if let Some(retain) = retained {
        // SAFETY: the caller's device; the result goes to a place of ours.
        if let Err(result) = make_primary(container, card, |place| unsafe { retain(place, device) }) {
            return result;
        }
    }
    // SAFETY: as the caller says.
    let result =
        unsafe { green_create_beside_primary(real, context, resources, (container, card, device), flags) };
    if retained.is_some() {
        release_at_driver(device);
        primary_left(container, card, device);
    }
    result
}

/// # Safety
/// As `cuGreenCtxCreate`; `context` is a place for a result.
unsafe fn green_create_beside_primary(
    real: unsafe extern "C" fn(*mut CUgreenCtx, CUdevResourceDesc, CUdevice, c_uint) -> CUresult,
    context: *mut CUgreenCtx,
    resources: CUdevResourceDesc,
    (container, card, device): (&'static Container, &'static Card, CUdevice),
    flags: c_uint,
) -> CUresult {
    let other = any_context(container, card);
    let before = other.and_then(|other| measured::look_in(card, other));
    let mut made = core::ptr::null_mut();
    // SAFETY: the caller's own arguments; the context is a place of ours.
    let result = unsafe { real(&raw mut made, resources, device, flags) };
    if !result.is_ok() {
        return result;
    }
    let after = other.and_then(|other| measured::look_in(card, other));
    let taken = before.zip(after).map_or(0, |(before, after)| after.since(before, MOST));
    let handle = made.addr() as u64;
    let entry = Entry { size: taken, card: card.index, kind: Kind::GreenContext as u8, note: handle };
    let Some(claim) = charge::ask(container, card, taken) else {
        let destroy = driver::function!(cuGreenCtxDestroy: unsafe extern "C" fn(CUgreenCtx) -> CUresult);
        if let Some(destroy) = destroy {
            // SAFETY: a context that nobody knows of.
            let _ = unsafe { destroy(made) };
        }
        return CUresult::OUT_OF_MEMORY;
    };
    charge::settle(card, claim);
    let _ = container.books.objects.insert(key_of(Kind::GreenContext, handle), &entry);
    // SAFETY: not null, so the caller's place for a result.
    unsafe { context.write(made) };
    result
}

/// `cuGreenCtxDestroy`.
///
/// # Safety
/// As `cuGreenCtxDestroy`.
pub(crate) unsafe fn green_destroy(
    real: unsafe extern "C" fn(CUgreenCtx) -> CUresult,
    context: CUgreenCtx,
) -> CUresult {
    launch::context_gone();
    let Ok(container) = counted() else {
        // SAFETY: the caller's own argument.
        return unsafe { real(context) };
    };
    let _held = container.books.contexts.lock.lock();
    let key = key_of(Kind::GreenContext, context.addr() as u64);
    let entry = container.books.objects.take(key);
    // SAFETY: the caller's own argument.
    let result = unsafe { real(context) };
    if let Some(entry) = entry
        && let Some(card) = container.card_at(entry.card)
    {
        if !result.is_ok() {
            let _ = container.books.objects.insert(key, &entry);
            return result;
        }
        card.memory.free(entry.size);
        if let Some(device) = container.device(card) {
            primary_left(container, card, device);
        }
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_takes_and_gives_only_what_its_change_can() {
        for (case, limit, former, value, want) in [
            ("a larger heap", 2, Some(8 << 20), (16 << 20) + 1, ((8 << 20) + BLOCK, 0)),
            ("a smaller heap", 2, Some(16 << 20), 8 << 20, (0, 8 << 20)),
            ("the same", 2, Some(8 << 20), 8 << 20, (0, 0)),
            ("more stack for each thread", 0, Some(1024), 2048, (MOST, 0)),
            ("less stack for each thread", 0, Some(2048), 1024, (0, MOST)),
            ("from nobody knows what", 2, None, 8 << 20, (MOST, 0)),
        ] {
            assert_eq!(believable(limit, former, value), want, "{case}");
        }
    }
}
