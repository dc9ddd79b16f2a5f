//! Modules and libraries: code and globals, charged with what the process has more of after loading, or, where NVML
//! does not say that or the card is not shared, with what the card has less of.
//!
//! With lazy loading (the default since CUDA 12.2) a function's code comes with its first use, which is not seen here.

use core::ffi::{c_char, c_uint, c_void};

use mullion_accounting::Entry;

use super::looks::From;
use super::{Kind, Pass, charge, counted, here, key_of};
use crate::container;
use crate::cuda::{CUlibrary, CUmodule, CUresult};
use crate::driver;

/// An image is not believed to take more: the largest library of kernels known is below 1 GiB.
const MOST: u64 = 1 << 30;

type Unload = unsafe extern "C" fn(*mut c_void) -> CUresult;

/// Charges what `real` loads.
///
/// # Safety
/// `place` is null or a place for a handle.
unsafe fn load(
    kind: Kind,
    place: *mut *mut c_void,
    real: impl FnOnce(*mut *mut c_void) -> CUresult,
    unload: impl FnOnce() -> Option<Unload>,
) -> CUresult {
    let now = match here() {
        Ok(now) if !place.is_null() => now,
        Err(Pass::Refused(result)) => return result,
        _ => return real(place),
    };
    let alone = now.card.is_shared();
    let measuring = &now.container.books.measuring;
    let measurement = measuring.begin(now.container, now.card, From::Here, alone);
    let mut loaded = core::ptr::null_mut();
    container::fault_point();
    let result = real(&raw mut loaded);
    container::fault_point();
    if !result.is_ok() {
        measurement.abandon();
        return result;
    }
    let charged = measurement.end(|_, taken| {
        let taken = taken.map_or(0, |taken| taken.more(MOST));
        let Some(claim) = charge::ask(now.container, now.card, taken) else {
            if let Some(unload) = unload() {
                // SAFETY: an image that nobody knows of.
                let _ = unsafe { unload(loaded) };
            }
            return false;
        };
        charge::settle(now.card, claim);
        // A library belongs to no context.
        let note = if kind == Kind::Module { now.context } else { 0 };
        let entry = Entry { size: taken, card: now.card.index, kind: kind as u8, note };
        let _ = now.container.books.objects.insert(key_of(kind, loaded.addr() as u64), &entry);
        true
    });
    if !charged {
        return CUresult::OUT_OF_MEMORY;
    }
    // SAFETY: not null, so the caller's place for a result.
    unsafe { place.write(loaded) };
    result
}

fn unload_module() -> Option<Unload> {
    driver::function!(cuModuleUnload: Unload)
}

fn unload_library() -> Option<Unload> {
    driver::function!(cuLibraryUnload: Unload)
}

/// `cuModuleLoad`.
///
/// # Safety
/// As `cuModuleLoad`.
pub(crate) unsafe fn module_load(
    real: unsafe extern "C" fn(*mut CUmodule, *const c_char) -> CUresult,
    module: *mut CUmodule,
    path: *const c_char,
) -> CUresult {
    // SAFETY: the caller's own arguments; the handle goes to a place of ours.
    let ask = |place| unsafe { real(place, path) };
    // SAFETY: null or the caller's place for a result.
    unsafe { load(Kind::Module, module, ask, unload_module) }
}

/// `cuModuleLoadData` and `cuModuleLoadFatBinary`.
///
/// # Safety
/// As `cuModuleLoadData`.
pub(crate) unsafe fn module_load_data(
    real: unsafe extern "C" fn(*mut CUmodule, *const c_void) -> CUresult,
    module: *mut CUmodule,
    image: *const c_void,
) -> CUresult {
    // SAFETY: the caller's own arguments; the handle goes to a place of ours.
    let ask = |place| unsafe { real(place, image) };
    // SAFETY: null or the caller's place for a result.
    unsafe { load(Kind::Module, module, ask, unload_module) }
}

/// `cuModuleLoadDataEx`.
///
/// # Safety
/// As `cuModuleLoadDataEx`.
pub(crate) unsafe fn module_load_data_ex(
    real: unsafe extern "C" fn(
        *mut CUmodule,
        *const c_void,
        c_uint,
        *mut c_uint,
        *mut *mut c_void,
    ) -> CUresult,
    module: *mut CUmodule,
    image: *const c_void,
    count: c_uint,
    options: *mut c_uint,
    values: *mut *mut c_void,
) -> CUresult {
    // SAFETY: the caller's own arguments; the handle goes to a place of ours.
    let ask = |place| unsafe { real(place, image, count, options, values) };
    // SAFETY: null or the caller's place for a result.
    unsafe { load(Kind::Module, module, ask, unload_module) }
}

type LoadLibrary = unsafe extern "C" fn(
    *mut CUlibrary,
    *const c_void,
    *mut c_uint,
    *mut *mut c_void,
    c_uint,
    *mut c_uint,
    *mut *mut c_void,
    c_uint,
) -> CUresult;

/// `cuLibraryLoadData` and `cuLibraryLoadFromFile`.
///
/// # Safety
/// As `cuLibraryLoadData`.
#[expect(clippy::too_many_arguments, reason = "the driver's own")]
pub(crate) unsafe fn library_load(
    real: LoadLibrary,
    library: *mut CUlibrary,
    what: *const c_void,
    jit_options: *mut c_uint,
    jit_values: *mut *mut c_void,
    jit_count: c_uint,
    options: *mut c_uint,
    values: *mut *mut c_void,
    count: c_uint,
) -> CUresult {
    let real = |place| {
        // SAFETY: the caller's own arguments; the handle goes to a place of ours.
        unsafe { real(place, what, jit_options, jit_values, jit_count, options, values, count) }
    };
    // SAFETY: null or the caller's place for a handle.
    unsafe { load(Kind::Library, library, real, unload_library) }
}

/// `cuModuleUnload`.
///
/// # Safety
/// As `cuModuleUnload`.
pub(crate) unsafe fn module_unload(real: Unload, module: CUmodule) -> CUresult {
    // SAFETY: the caller's own argument.
    end(Kind::Module, module, || unsafe { real(module) })
}

/// `cuLibraryUnload`.
///
/// # Safety
/// As `cuLibraryUnload`.
pub(crate) unsafe fn library_unload(real: Unload, library: CUlibrary) -> CUresult {
    // SAFETY: the caller's own argument.
    end(Kind::Library, library, || unsafe { real(library) })
}

fn end(kind: Kind, handle: *mut c_void, real: impl FnOnce() -> CUresult) -> CUresult {
    let Ok(container) = counted() else { return real() };
    let key = key_of(kind, handle.addr() as u64);
    let Some(entry) = container.books.objects.take(key) else { return real() };
    let Some(card) = container.card_at(entry.card) else { return real() };
    let _hidden = container.books.measuring.hidden();
    container::fault_point();
    let result = real();
    container::fault_point();
    if result.is_ok() {
        card.memory.free(entry.size);
    } else {
        let _ = container.books.objects.insert(key, &entry);
    }
    result
}
