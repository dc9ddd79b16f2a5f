//! Start of the driver, and the ways to ask it for functions.

#![allow(clippy::wildcard_imports, reason = "the ABI's types")]

use core::ffi::{c_char, c_int, c_uint, c_void};

use super::table;
use crate::container;
use crate::cuda::*;
use crate::loading::proc_address;

table! { Cuda;
    cuInit(flags: c_uint) -> CUresult, since 2000, Nothing: container::init;
    cuGetProcAddress(name: *const c_char, function: *mut *mut c_void, version: c_int, flags: CUuint64) -> CUresult, since 11030, Nothing: proc_address::v1;
    cuGetProcAddress_ptsz(name: *const c_char, function: *mut *mut c_void, version: c_int, flags: CUuint64) -> CUresult, since 11030, Nothing: proc_address::v1_per_thread;
    cuGetProcAddress_v2(name: *const c_char, function: *mut *mut c_void, version: c_int, flags: CUuint64, status: *mut CUenum) -> CUresult, since 12000, Nothing: proc_address::v2;
    cuGetProcAddress_v2_ptsz(name: *const c_char, function: *mut *mut c_void, version: c_int, flags: CUuint64, status: *mut CUenum) -> CUresult, since 12000, Nothing: proc_address::v2_per_thread;
}
