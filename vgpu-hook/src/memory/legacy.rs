//! Names of CUDA 3.1, whose addresses have 32 bits. The driver still exports them; nothing built since 2010 calls them.
//! Where a limit applies they are refused, which no program can tell from a driver that dropped them.

use core::ffi::{c_uint, c_void};

use super::{Pass, counted};
use crate::cuda::{CUdeviceptrV1, CUresult};

fn answer(real: impl FnOnce() -> CUresult) -> CUresult {
    match counted() {
        Ok(_) => CUresult::NOT_SUPPORTED,
        Err(Pass::Driver) => real(),
        Err(Pass::Refused(result)) => result,
    }
}

/// `cuMemAlloc`.
///
/// # Safety
/// As the function of that name.
pub(crate) unsafe fn alloc_v1(
    real: unsafe extern "C" fn(*mut CUdeviceptrV1, c_uint) -> CUresult,
    pointer: *mut CUdeviceptrV1,
    bytes: c_uint,
) -> CUresult {
    // SAFETY: the caller's own arguments.
    answer(|| unsafe { real(pointer, bytes) })
}

/// `cuMemAllocPitch`.
///
/// # Safety
/// As the function of that name.
pub(crate) unsafe fn alloc_pitch_v1(
    real: unsafe extern "C" fn(*mut CUdeviceptrV1, *mut c_uint, c_uint, c_uint, c_uint) -> CUresult,
    pointer: *mut CUdeviceptrV1,
    pitch: *mut c_uint,
    width: c_uint,
    height: c_uint,
    element: c_uint,
) -> CUresult {
    // SAFETY: the caller's own arguments.
    answer(|| unsafe { real(pointer, pitch, width, height, element) })
}

/// `cuMemFree`.
///
/// # Safety
/// As the function of that name.
pub(crate) unsafe fn free_v1(
    real: unsafe extern "C" fn(CUdeviceptrV1) -> CUresult,
    pointer: CUdeviceptrV1,
) -> CUresult {
    // Nothing was allocated by such a name, so there is nothing to count.
    // SAFETY: the caller's own argument.
    unsafe { real(pointer) }
}

/// `cuArrayCreate` and `cuArray3DCreate`.
///
/// # Safety
/// As the functions of those names.
pub(crate) unsafe fn array_v1(
    real: unsafe extern "C" fn(*mut *mut c_void, *const c_void) -> CUresult,
    array: *mut *mut c_void,
    descriptor: *const c_void,
) -> CUresult {
    // SAFETY: the caller's own arguments.
    answer(|| unsafe { real(array, descriptor) })
}
