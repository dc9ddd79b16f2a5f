//! Arrays and mipmapped arrays.
//!
//! How much one takes the driver says only of arrays with deferred mapping, so one of the same shape is made for the
//! question; it takes nothing. Where the driver has no such arrays (before 11.6) the card is looked at before and
//! after. An array of up to 1 MiB shares a block with others, and nobody says which: for those the looks before and after
//! tell whether a block was taken or given back.

use core::ffi::c_uint;
use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::Relaxed;

use mullion_accounting::Entry;
use mullion_region::MAX_DEVICES;

use super::blocks::{self, BLOCK, Served};
use super::measured::{self, Look};
use super::{Here, Kind, Pass, charge, counted, here, key_of};
use crate::container::{self, Card, Container};
use crate::cuda::{
    Array3dDescriptor, ArrayDescriptor, ArrayMemoryRequirements, CUarray, CUdevice, CUmipmappedArray,
    CUresult,
};
use crate::driver;

/// `CUDA_ARRAY3D_SPARSE`: its memory is that of the handles mapped to it.
const SPARSE: c_uint = 0x40;
/// `CUDA_ARRAY3D_DEFERRED_MAPPING`: the same.
const DEFERRED: c_uint = 0x80;

/// Blocks of small arrays that outlived the array which paid for them, by card.
#[derive(Debug)]
pub(crate) struct Outlived([AtomicU64; MAX_DEVICES]);

impl Outlived {
    pub(super) const fn new() -> Self {
        Self([const { AtomicU64::new(0) }; MAX_DEVICES])
    }

    fn of(&self, card: &Card) -> Option<&AtomicU64> {
        self.0.get(usize::from(card.index))
    }

    fn add(&self, card: &Card) {
        if let Some(count) = self.of(card) {
            count.fetch_add(1, Relaxed);
        }
    }

    fn take(&self, card: &Card) -> bool {
        self.of(card)
            .is_some_and(|count| count.fetch_update(Relaxed, Relaxed, |count| count.checked_sub(1)).is_ok())
    }
}

/// What an array of this shape needs, by the driver's word.
fn needed(device: CUdevice, shape: &Array3dDescriptor, levels: Option<c_uint>) -> Option<u64> {
    let mut question = *shape;
    question.flags |= DEFERRED;
    let mut requirements = ArrayMemoryRequirements::default();
    let mut handle = core::ptr::null_mut();
    if let Some(levels) = levels {
        let make = driver::function!(cuMipmappedArrayCreate: unsafe extern "C" fn(*mut CUmipmappedArray, *const Array3dDescriptor, c_uint) -> CUresult)?;
        let ask = driver::function!(cuMipmappedArrayGetMemoryRequirements: unsafe extern "C" fn(*mut ArrayMemoryRequirements, CUmipmappedArray, CUdevice) -> CUresult)?;
        let end =
            driver::function!(cuMipmappedArrayDestroy: unsafe extern "C" fn(CUmipmappedArray) -> CUresult)?;
        // SAFETY: a shape and a place of ours.
        if !unsafe { make(&raw mut handle, &raw const question, levels) }.is_ok() {
            return None;
        }
        // SAFETY: the array just made.
        let result = unsafe { ask(&raw mut requirements, handle, device) };
        // SAFETY: nobody else knows of it.
        let _ = unsafe { end(handle) };
        return result.is_ok().then_some(requirements.size as u64);
    }
    let make = driver::function!(cuArray3DCreate_v2: unsafe extern "C" fn(*mut CUarray, *const Array3dDescriptor) -> CUresult)?;
    let ask = driver::function!(cuArrayGetMemoryRequirements: unsafe extern "C" fn(*mut ArrayMemoryRequirements, CUarray, CUdevice) -> CUresult)?;
    let end = driver::function!(cuArrayDestroy: unsafe extern "C" fn(CUarray) -> CUresult)?;
    // SAFETY: a shape and a place of ours.
    if !unsafe { make(&raw mut handle, &raw const question) }.is_ok() {
        return None;
    }
    // SAFETY: the array just made.
    let result = unsafe { ask(&raw mut requirements, handle, device) };
    // SAFETY: nobody else knows of it.
    let _ = unsafe { end(handle) };
    result.is_ok().then_some(requirements.size as u64)
}

/// At least so much an array of this shape takes: 16 bytes per element is the most that there is.
fn least(shape: &Array3dDescriptor) -> u64 {
    let side = |side: usize| (side as u64).max(1);
    side(shape.width).saturating_mul(side(shape.height)).saturating_mul(side(shape.depth))
}

/// Makes an array.
///
/// # Safety
/// `place` is null or a place for a handle, `shape` null or a shape.
unsafe fn create(
    kind: Kind,
    place: *mut CUarray,
    shape: *const Array3dDescriptor,
    levels: Option<c_uint>,
    mut real: impl FnMut(*mut CUarray) -> CUresult,
) -> CUresult {
    // SAFETY: as the caller says.
    let shape = unsafe { shape.as_ref() };
    let (now, shape) = match (here(), shape) {
        (Ok(now), Some(shape)) if !place.is_null() && shape.flags & (SPARSE | DEFERRED) == 0 => (now, shape),
        (Err(Pass::Refused(result)), _) => return result,
        _ => return real(place),
    };
    let device = now.container.device(now.card).unwrap_or(0);
    let needed = needed(device, shape, levels);
    let expected = needed.unwrap_or(least(shape));
    let asked = match blocks::served(expected) {
        Served::Blocks(size) => size,
        Served::Piece => BLOCK,
    };
    let sure = needed.is_some() && asked > BLOCK;
    let Some(claim) = charge::ask(now.container, now.card, asked) else { return CUresult::OUT_OF_MEMORY };
    let before = if sure { None } else { measured::look(now.card) };
    let mut made = core::ptr::null_mut();
    container::fault_point();
    let result = real(&raw mut made);
    container::fault_point();
    if !result.is_ok() {
        charge::undo(now.card, claim, result);
        return result;
    }
    let size = match before.zip(measured::look(now.card)) {
        Some((before, after)) if !sure => taken(before, after, expected, needed.is_some()),
        _ => asked,
    };
    if size > asked {
        let more = charge::try_ask(now.container, now.card, size - asked);
        charge::settle(now.card, claim);
        let Some(more) = more else {
            destroy_at_driver(kind, made);
            now.card.memory.free(asked);
            charge::refused(now.card);
            return CUresult::OUT_OF_MEMORY;
        };
        charge::settle(now.card, more);
    } else {
        charge::settle_at(now.card, claim, size);
    }
    let entry = Entry { size, card: now.card.index, kind: kind as u8, note: now.context };
    let _ = now.container.books.objects.insert(key_of(kind, made.addr() as u64), &entry);
    // SAFETY: not null, so the caller's place for a result.
    unsafe { place.write(made) };
    result
}

/// What an array took by the looks before and after.
fn taken(before: Look, after: Look, expected: u64, known: bool) -> u64 {
    // A small one takes a block or none; one of which the driver did not say the size, up to 64 bytes per element
    // where 1 was the least.
    let most = if known { BLOCK } else { blocks::round_up(expected.saturating_mul(64), BLOCK) };
    blocks::round_up(after.since(before, most), BLOCK)
}

#[cold]
fn destroy_at_driver(kind: Kind, handle: CUarray) {
    let end = if kind == Kind::Mipmap {
        driver::function!(cuMipmappedArrayDestroy: unsafe extern "C" fn(CUarray) -> CUresult)
    } else {
        driver::function!(cuArrayDestroy: unsafe extern "C" fn(CUarray) -> CUresult)
    };
    if let Some(end) = end {
        // SAFETY: an array that nobody knows of.
        let _ = unsafe { end(handle) };
    }
}

/// `cuArrayCreate`.
///
/// # Safety
/// As `cuArrayCreate_v2`.
pub(crate) unsafe fn array_create(
    real: unsafe extern "C" fn(*mut CUarray, *const ArrayDescriptor) -> CUresult,
    array: *mut CUarray,
    descriptor: *const ArrayDescriptor,
) -> CUresult {
    // SAFETY: null, or the caller's shape.
    let shape = unsafe { descriptor.as_ref() }.map(|flat| Array3dDescriptor {
        width: flat.width,
        height: flat.height,
        depth: 0,
        format: flat.format,
        channels: flat.channels,
        flags: 0,
    });
    let shape = shape.as_ref().map_or(core::ptr::null(), core::ptr::from_ref);
    // SAFETY: the caller's own arguments; the handle goes to a place of ours.
    let real = |place| unsafe { real(place, descriptor) };
    // SAFETY: null, or valid as the caller says.
    unsafe { create(Kind::Array, array, shape, None, real) }
}

/// `cuArray3DCreate`.
///
/// # Safety
/// As `cuArray3DCreate_v2`.
pub(crate) unsafe fn array_3d_create(
    real: unsafe extern "C" fn(*mut CUarray, *const Array3dDescriptor) -> CUresult,
    array: *mut CUarray,
    descriptor: *const Array3dDescriptor,
) -> CUresult {
    // SAFETY: the caller's own arguments; the handle goes to a place of ours.
    let real = |place| unsafe { real(place, descriptor) };
    // SAFETY: null, or valid as the caller says.
    unsafe { create(Kind::Array, array, descriptor, None, real) }
}

/// `cuMipmappedArrayCreate`.
///
/// # Safety
/// As `cuMipmappedArrayCreate`.
pub(crate) unsafe fn mipmap_create(
    real: unsafe extern "C" fn(*mut CUmipmappedArray, *const Array3dDescriptor, c_uint) -> CUresult,
    array: *mut CUmipmappedArray,
    descriptor: *const Array3dDescriptor,
    levels: c_uint,
) -> CUresult {
    // SAFETY: the caller's own arguments; the handle goes to a place of ours.
    let real = |place| unsafe { real(place, descriptor, levels) };
    // SAFETY: null, or valid as the caller says.
    unsafe { create(Kind::Mipmap, array, descriptor, Some(levels), real) }
}

/// `cuArrayDestroy`. Levels and planes of others are in no table, the driver refuses them.
///
/// # Safety
/// As `cuArrayDestroy`.
pub(crate) unsafe fn array_destroy(
    real: unsafe extern "C" fn(CUarray) -> CUresult,
    array: CUarray,
) -> CUresult {
    // SAFETY: the caller's own argument.
    destroy(Kind::Array, array, || unsafe { real(array) })
}

/// `cuMipmappedArrayDestroy`.
///
/// # Safety
/// As `cuMipmappedArrayDestroy`.
pub(crate) unsafe fn mipmap_destroy(
    real: unsafe extern "C" fn(CUmipmappedArray) -> CUresult,
    array: CUmipmappedArray,
) -> CUresult {
    // SAFETY: the caller's own argument.
    destroy(Kind::Mipmap, array, || unsafe { real(array) })
}

fn destroy(kind: Kind, handle: CUarray, real: impl FnOnce() -> CUresult) -> CUresult {
    let Ok(container) = counted() else { return real() };
    let key = key_of(kind, handle.addr() as u64);
    let Some(entry) = container.books.objects.take(key) else { return real() };
    let Some(card) = container.card_at(entry.card) else { return real() };
    let small = entry.size <= BLOCK;
    let now = here().ok().filter(|now| small && now.card.index == card.index);
    let before = now.and_then(|now: Here| measured::look(now.card));
    container::fault_point();
    let result = real();
    container::fault_point();
    if !result.is_ok() {
        let _ = container.books.objects.insert(key, &entry);
        return result;
    }
    let after = now.and_then(|now| measured::look(now.card));
    // Back to the card went a block, or, if not all of the block's arrays are gone, nothing.
    let given_back = before.zip(after).map(|(before, after)| before.since(after, u64::MAX) >= BLOCK);
    settle_end(container, card, entry.size, if small { given_back } else { Some(true) });
    result
}

/// An array that was charged `size` is gone; `given_back` says whether a block went back with it, if that is known.
fn settle_end(container: &Container, card: &Card, size: u64, given_back: Option<bool>) {
    let outlived = &container.books.outlived;
    match (size, given_back) {
        // It did not pay, and the block of one that is gone already went back with it.
        (0, Some(true)) => {
            if outlived.take(card) {
                card.memory.free(BLOCK);
            }
        }
        (0, _) => {}
        // It paid, and others still use the block.
        (_, Some(false)) => outlived.add(card),
        (size, _) => card.memory.free(size),
    }
}
