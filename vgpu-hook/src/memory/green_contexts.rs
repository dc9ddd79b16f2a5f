//! Green contexts: a part of a card's SMs, with the card's primary context behind it.

use core::ffi::c_uint;

use mullion_accounting::Entry;

use super::context_charge::MOST;
use super::contexts::{any_context, card_of, make_primary, primary_left, release_at_driver};
use super::looks::{self, From};
use super::modules::Departure;
use super::{Kind, Pass, charge, counted, key_of};
use crate::container::{Card, Container};
use crate::cuda::{CUcontext, CUdevResourceDesc, CUdevice, CUgreenCtx, CUresult};
use crate::driver;
use crate::launch;

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
    container.books.measuring.prepare(card);
    let _held = container.books.contexts.hold(card);
    let retain = driver::function!(
        cuDevicePrimaryCtxRetain: unsafe extern "C" fn(*mut CUcontext, CUdevice) -> CUresult
    );
    // Held for this call, so that the primary context is made, and charged, before the green one.
    let retained = retain.filter(|_| !looks::primary_is_active(device));
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
        let departure =
            Departure::begin(container, Some(card), container.books.contexts.primary_handle(card));
        let _ending = container.books.contexts.ending();
        // Where no green one was made, the primary context ends here.
        let hidden = container.books.measuring.hidden_many(Some(card));
        release_at_driver(device);
        let (_, left) = primary_left(container, card, device);
        drop(hidden);
        departure.over(left);
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
    let from = any_context(container, card).map_or(From::Nowhere, From::Context);
    let measurement = container.books.measuring.begin(container, card, from, true);
    let mut made = core::ptr::null_mut();
    // SAFETY: the caller's own arguments; the context is a place of ours.
    let result = unsafe { real(&raw mut made, resources, device, flags) };
    if !result.is_ok() {
        measurement.abandon();
        return result;
    }
    let refused = measurement.end(|_, taken| {
        let taken = taken.map_or(0, |taken| taken.more(MOST));
        let Some(claim) = charge::ask(container, card, taken) else {
            // Until it is ended.
            card.memory.force(taken);
            return Some(taken);
        };
        charge::settle(card, claim);
        enter(container, card, made, taken);
        None
    });
    if let Some(taken) = refused {
        let _hidden = container.books.measuring.hidden_many(Some(card));
        let destroy = driver::function!(cuGreenCtxDestroy: unsafe extern "C" fn(CUgreenCtx) -> CUresult);
        // SAFETY: a context that nobody knows of.
        let is_gone = destroy.is_some_and(|destroy| unsafe { destroy(made) }.is_ok());
        if is_gone {
            card.memory.free(taken);
        } else {
            enter(container, card, made, taken);
        }
        return CUresult::OUT_OF_MEMORY;
    }
    // SAFETY: not null, so the caller's place for a result.
    unsafe { context.write(made) };
    result
}

/// Enters a green context for which `bytes` are charged.
fn enter(container: &Container, card: &Card, context: CUgreenCtx, bytes: u64) {
    let handle = context.addr() as u64;
    let entry = Entry { size: bytes, card: card.index, kind: Kind::GreenContext as u8, note: handle };
    let _ = container.books.objects.insert(key_of(Kind::GreenContext, handle), &entry);
}

/// The context by which a green one is launched into, 0 = not known.
fn context_of(green: CUgreenCtx) -> u64 {
    let ask = driver::function!(
        cuCtxFromGreenCtx: unsafe extern "C" fn(*mut CUcontext, CUgreenCtx) -> CUresult
    );
    let mut context = core::ptr::null_mut();
    // SAFETY: a place for the answer, and the caller's own argument.
    let known = ask.is_some_and(|ask| unsafe { ask(&raw mut context, green) }.is_ok());
    if known { context.addr() as u64 } else { 0 }
}

/// `cuGreenCtxDestroy`.
///
/// # Safety
/// As `cuGreenCtxDestroy`.
pub(crate) unsafe fn green_destroy(
    real: unsafe extern "C" fn(CUgreenCtx) -> CUresult,
    context: CUgreenCtx,
) -> CUresult {
    let Ok(container) = counted() else {
        // SAFETY: the caller's own argument.
        return unsafe { real(context) };
    };
    let key = key_of(Kind::GreenContext, context.addr() as u64);
    let entry = container.books.objects.take(key);
    let ending = launch::Ending::begin(container, context_of(context), entry.map_or(0, |entry| entry.card));
    let _held = entry.and_then(|entry| container.books.contexts.hold(container.card_at(entry.card)?));
    let card = entry.and_then(|entry| container.card_at(entry.card));
    // It may have been the last to hold the primary context.
    let known = card.map_or(0, |card| container.books.contexts.primary_handle(card));
    let primary = card.map(|card| launch::Ending::begin(container, known, card.index));
    let departure = Departure::begin(container, card, known);
    let _ending = container.books.contexts.ending();
    let hidden = container.books.measuring.hidden_many(card);
    // SAFETY: the caller's own argument.
    let result = unsafe { real(context) };
    ending.over(result.is_ok());
    if let Some(entry) = entry
        && let Some(card) = container.card_at(entry.card)
    {
        // Unknown to the driver: another thread has destroyed it, which did not find it in the table.
        if !result.is_ok() && result != CUresult::INVALID_HANDLE {
            let _ = container.books.objects.insert(key, &entry);
            return result;
        }
        card.memory.free(entry.size);
        let device = container.device(card);
        let (is_gone, left) = device.map_or((false, None), |device| primary_left(container, card, device));
        if let Some(primary) = primary {
            primary.over(is_gone);
        }
        drop(hidden);
        departure.over(left);
    }
    result
}
