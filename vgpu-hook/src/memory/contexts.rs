//! Contexts: what each takes of its card, and what goes with it.
//!
//! A primary context is made by the first of several retains and gone with the last release, or by a reset. What was
//! allocated in a context, also its arrays and modules, goes with it.

use core::ffi::{c_int, c_uint, c_void};
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use core::sync::atomic::{AtomicU64, fence};

use mullion_accounting::Entry;
use mullion_region::MAX_DEVICES;

use super::arrays::small_is_gone;
use super::context_charge::Making;
use super::looks;
use super::modules::{Departure, Group, Left};
use super::{Here, Kind, Pass, counted, current_context, key_of, linear};
use crate::container::{self, Card, Container, Held, Lock};
use crate::cuda::{CUcontext, CUdevice, CUresult};
use crate::driver;
use crate::launch;

/// The primary contexts of this process, by card.
#[derive(Debug)]
pub(crate) struct Contexts {
    /// By card: held while one is made or ended. Not one for all: the end of one may wait for work that waits for another
    /// card's thread.
    locks: [Lock; MAX_DEVICES],
    /// Held while one is counted as ended.
    counting: Lock,
    primary: [AtomicU64; MAX_DEVICES],
    /// Contexts by card.
    count: [AtomicU64; MAX_DEVICES],
    /// The one context of a card that has just one; else 0.
    only: [AtomicU64; MAX_DEVICES],
    /// Contexts that have ended, in units of [`Ends::ONE`], and how many are about to: what was in these is gone sooner than it is
    /// off the books.
    ends: AtomicU64,
    /// The last ones that have ended.
    last: [AtomicU64; LAST],
}

/// Contexts that ended and are kept in mind.
const LAST: usize = 8;

/// How many contexts have ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ends(u64);

impl Ends {
    const ONE: u64 = 1 << 16;

    const fn count(self) -> u64 {
        self.0 / Self::ONE
    }
}

/// A context is about to end, until this goes. From before the driver is asked until nothing in the books is left of it.
pub(super) struct Ending<'c>(&'c Contexts);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.0.ends.fetch_sub(1, SeqCst);
    }
}

impl Contexts {
    pub(super) const fn new() -> Self {
        Self {
            locks: [const { Lock::new() }; MAX_DEVICES],
            counting: Lock::new(),
            primary: [const { AtomicU64::new(0) }; MAX_DEVICES],
            count: [const { AtomicU64::new(0) }; MAX_DEVICES],
            only: [const { AtomicU64::new(0) }; MAX_DEVICES],
            ends: AtomicU64::new(0),
            last: [const { AtomicU64::new(0) }; LAST],
        }
    }

    /// Keeps others from making or ending contexts on a card.
    pub(super) fn hold(&self, card: &Card) -> Option<Held<'_>> {
        self.locks.get(usize::from(card.index)).map(Lock::lock)
    }

    /// How many contexts have ended.
    #[inline]
    pub(super) fn ended(&self) -> Ends {
        Ends(self.ends.load(Acquire) & !(Ends::ONE - 1))
    }

    /// Whether any context has ended since `before` had, or is about to.
    #[inline]
    pub(super) fn any_since(&self, before: Ends) -> bool {
        self.ends.load(Acquire) != before.0
    }

    /// Whether `context` is among those that have ended since `before` had; where too many have, it is not told.
    pub(super) fn has_ended_since(&self, before: Ends, context: u64) -> bool {
        let newest = self.ended().count();
        let since = newest.saturating_sub(before.count());
        (1..=since.min(LAST as u64)).any(|back| {
            let place = usize::try_from(newest.wrapping_sub(back)).unwrap_or(0) % LAST;
            self.last.get(place).is_some_and(|last| last.load(Relaxed) == context)
        })
    }

    /// Whether `context` is among the last ones that have ended.
    pub(super) fn is_among_last(&self, context: u64) -> bool {
        // 0 stands for no context, and where none has been entered yet.
        context != 0 && self.last.iter().any(|last| last.load(Relaxed) == context)
    }

    /// A context may be about to end: to be called before the driver is asked.
    pub(super) fn ending(&self) -> Ending<'_> {
        self.ends.fetch_add(1, SeqCst);
        Ending(self)
    }

    /// `context` is about to be taken off the books.
    fn ends(&self, context: u64) {
        let _held = self.counting.lock();
        let number = self.ended().count();
        if let Some(last) = self.last.get(usize::try_from(number).unwrap_or(0) % LAST) {
            last.store(context, Relaxed);
        }
        self.ends.fetch_add(Ends::ONE, Release);
        // See `Here::is_over`.
        fence(SeqCst);
    }

    /// The context of a card on which this process has just one: then the driver need not be asked which it is. Else 0.
    #[inline]
    pub(super) fn only(&self, card: &Card) -> u64 {
        self.only.get(usize::from(card.index)).map_or(0, |only| only.load(Relaxed))
    }

    /// There is one more context on `card`, or one less. The lock is held.
    pub(super) fn changed(&self, container: &Container, card: &Card, more: bool) {
        let index = usize::from(card.index);
        let (Some(count), Some(only)) = (self.count.get(index), self.only.get(index)) else { return };
        let before = count.load(Relaxed);
        let now = if more { before + 1 } else { before.saturating_sub(1) };
        count.store(now, Relaxed);
        only.store(if now == 1 { any_context(container, card).unwrap_or(0) } else { 0 }, Relaxed);
    }

    pub(super) fn primary(&self, card: &Card) -> Option<&AtomicU64> {
        self.primary.get(usize::from(card.index))
    }

    /// The card's primary context; 0 = there is none.
    pub(super) fn primary_handle(&self, card: &Card) -> u64 {
        self.primary(card).map_or(0, |place| place.load(Relaxed))
    }
}

/// Any context of this process on `card`.
pub(super) fn any_context(container: &Container, card: &Card) -> Option<u64> {
    another_context(container, card, 0)
}

/// Any but this one.
pub(super) fn another_context(container: &Container, card: &Card, context: u64) -> Option<u64> {
    let mut found = None;
    container.books.objects.drain(
        |_, entry| {
            if entry.kind == Kind::Context as u8 && entry.card == card.index && entry.note != context {
                found = Some(entry.note);
            }
            false
        },
        |_, _| {},
    );
    found
}

/// The card of a context.
pub(crate) fn card_of_context(container: &Container, context: u64) -> Option<&Card> {
    // Hardly a process has several on one card: then nobody need be asked.
    let only = container.cards().find(|card| container.books.contexts.only(card) == context);
    only.or_else(|| container.card(looks::device_of(context)?))
}

pub(super) fn card_of(device: CUdevice) -> Result<(&'static Container, &'static Card), Pass> {
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
    // With the lock also where there is one already: its last reference may be given up at the same time.
    container.books.measuring.prepare(card);
    let _held = container.books.contexts.hold(card);
    if looks::primary_is_active(device) {
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
pub(super) fn make_primary(
    container: &'static Container,
    card: &Card,
    retain: impl FnOnce(*mut CUcontext) -> CUresult,
) -> Result<CUcontext, CUresult> {
    let making = Making::begin(container, card).ok_or(CUresult::OUT_OF_MEMORY)?;
    container::fault_point();
    let mut made = core::ptr::null_mut();
    let result = retain(&raw mut made);
    container::fault_point();
    if !result.is_ok() {
        making.failed(result);
        return Err(result);
    }
    let handle = made.addr() as u64;
    let mut is_there = true;
    let release = || {
        is_there = !container.device(card).is_some_and(release_at_driver);
        !is_there
    };
    let has_room = making.made(handle, release);
    if let Some(place) = container.books.contexts.primary(card).filter(|_| is_there) {
        place.store(handle, Relaxed);
    }
    if has_room { Ok(made) } else { Err(CUresult::OUT_OF_MEMORY) }
}

/// A reference to a card's primary context was given up: charges it no longer if that was the last one, and says so. What of
/// it is in use still is for [`Departure::over`]. The lock is held.
pub(super) fn primary_left(
    container: &'static Container,
    card: &Card,
    device: CUdevice,
) -> (bool, Option<Left>) {
    if looks::primary_is_active(device) {
        return (false, None);
    }
    let context = container.books.contexts.primary(card).map_or(0, |place| place.swap(0, Relaxed));
    (true, gone(container, context, Kind::Context))
}

/// Gives up a reference to a primary context; whether the driver took it back.
#[cold]
pub(super) fn release_at_driver(device: CUdevice) -> bool {
    let release = driver::function!(cuDevicePrimaryCtxRelease_v2: unsafe extern "C" fn(CUdevice) -> CUresult);
    // SAFETY: the reference that was just taken.
    release.is_some_and(|release| unsafe { release(device) }.is_ok())
}

/// `cuDevicePrimaryCtxRelease` and `cuDevicePrimaryCtxReset`, both forms.
///
/// # Safety
/// As `cuDevicePrimaryCtxRelease_v2`.
pub(crate) unsafe fn primary_end(
    real: unsafe extern "C" fn(CUdevice) -> CUresult,
    device: CUdevice,
) -> CUresult {
    let Ok((container, card)) = card_of(device) else {
        // SAFETY: the caller's own argument.
        return unsafe { real(device) };
    };
    let _held = container.books.contexts.hold(card);
    let known = container.books.contexts.primary_handle(card);
    let ending = launch::Ending::begin(container, known, card.index);
    let departure = Departure::begin(container, Some(card), known);
    let _ending = container.books.contexts.ending();
    let hidden = container.books.measuring.hidden_many(Some(card));
    container::fault_point();
    // SAFETY: the caller's own argument.
    let result = unsafe { real(device) };
    container::fault_point();
    let (is_gone, left) = if result.is_ok() { primary_left(container, card, device) } else { (false, None) };
    ending.over(is_gone);
    drop(hidden);
    departure.over(left);
    result
}

/// A context is gone, and with it what was made in it. What was charged for its images.
#[must_use]
fn gone(container: &'static Container, context: u64, kind: Kind) -> Option<Left> {
    if context == 0 {
        return None;
    }
    let books = &container.books;
    // First: who enters something from now on sees that it came too late, and what was entered before is found below.
    books.contexts.ends(context);
    if let Some(entry) = books.objects.take(key_of(kind, context))
        && let Some(card) = container.card_at(entry.card)
    {
        card.memory.free(entry.size);
        books.contexts.changed(container, card, false);
    }
    // See `Books::has_ended`.
    fence(SeqCst);
    let of_context = |_: u64, entry: &Entry| entry.note == context && entry.kind != Kind::Pooled as u8;
    books
        .pointers
        .drain(of_context, |address, entry| linear::is_gone_with_context(container, address, &entry));
    let mut left = None;
    books.objects.drain(of_context, |_, entry| {
        if entry.kind == Kind::Images as u8 {
            // As long as those who look know of this call: what stays is put back.
            left = container.card_at(entry.card).map(|card| {
                let bytes = Group::charged(&entry);
                card.memory.free(bytes);
                Left { card, bytes }
            });
        } else {
            object_is_gone(container, &entry);
        }
    });
    books.pools.observe_all(container);
    left
}

/// An object is gone with its context.
fn object_is_gone(container: &'static Container, entry: &Entry) {
    let Some(card) = container.card_at(entry.card) else { return };
    if entry.kind == Kind::SmallArray as u8 {
        small_is_gone(container, card, entry.size, None);
    } else if entry.kind != Kind::Module as u8 {
        card.memory.free(entry.size);
    }
}

/// The driver has just given an object's handle that will be entered under `key`: what stands there belongs to a context that
/// is ending (see [`Here::any_ends`]).
#[inline]
pub(super) fn bury_object(now: Here, key: u64) {
    if now.any_ends()
        && !now.is_ended()
        && let Some(stale) = now.container.books.objects.take(key)
    {
        object_is_gone(now.container, &stale);
    }
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
    container.books.measuring.prepare(card);
    let _held = container.books.contexts.hold(card);
    let Some(making) = Making::begin(container, card) else { return CUresult::OUT_OF_MEMORY };
    container::fault_point();
    let mut made = core::ptr::null_mut();
    let result = real(&raw mut made);
    container::fault_point();
    if !result.is_ok() {
        making.failed(result);
        return result;
    }
    let destroy = || {
        let destroy = driver::function!(cuCtxDestroy_v2: unsafe extern "C" fn(CUcontext) -> CUresult);
        // SAFETY: a context that nobody knows of.
        destroy.is_some_and(|destroy| unsafe { destroy(made) }.is_ok())
    };
    if !making.made(made.addr() as u64, destroy) {
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
    let Ok(container) = counted() else {
        // SAFETY: the caller's own argument.
        return unsafe { real(context) };
    };
    let handle = context.addr() as u64;
    let ending = launch::Ending::begin(container, handle, 0);
    let entry = container.books.objects.get(key_of(Kind::Context, handle));
    let card = entry.and_then(|entry| container.card_at(entry.card));
    let _held = card.and_then(|card| container.books.contexts.hold(card));
    let departure = Departure::begin(container, card, handle);
    let _ending = container.books.contexts.ending();
    let hidden = container.books.measuring.hidden_many(card);
    container::fault_point();
    // SAFETY: the caller's own argument.
    let result = unsafe { real(context) };
    container::fault_point();
    let is_gone = result.is_ok() && is_gone();
    let left = if is_gone { gone(container, handle, Kind::Context) } else { None };
    ending.over(is_gone);
    drop(hidden);
    departure.over(left);
    result
}
