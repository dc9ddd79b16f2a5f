//! `cuGetProcAddress`: the driver is asked first, then its answer is exchanged for the wrapper of the same form.

#![expect(unsafe_code, reason = "calls the driver")]

use core::ffi::{c_char, c_int, c_void};

use crate::cuda::{CUenum, CUresult, CUuint64};

/// `cuGetProcAddress` of CUDA 11.3.
///
/// # Safety
/// As `cuGetProcAddress`.
pub(crate) unsafe fn v1(
    real: unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_int, CUuint64) -> CUresult,
    name: *const c_char,
    function: *mut *mut c_void,
    version: c_int,
    flags: CUuint64,
) -> CUresult {
    // SAFETY: the caller's own arguments.
    unsafe { real(name, function, version, flags) }
}

/// `cuGetProcAddress` of CUDA 12.0, which also says why there is no function.
///
/// # Safety
/// As `cuGetProcAddress_v2`.
pub(crate) unsafe fn v2(
    real: unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_int, CUuint64, *mut CUenum) -> CUresult,
    name: *const c_char,
    function: *mut *mut c_void,
    version: c_int,
    flags: CUuint64,
    status: *mut CUenum,
) -> CUresult {
    // SAFETY: the caller's own arguments.
    unsafe { real(name, function, version, flags, status) }
}
