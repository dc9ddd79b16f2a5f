//! `FAKE_CUDA_RECURSE=1`: `cuInit` calls entry points through the program's global scope first, as some drivers do, so that an
//! interposed library meets itself (HK-03).
#![expect(unsafe_code, reason = "looks symbols up and calls them")]

use std::ffi::{c_int, c_uint};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;

static INSIDE: AtomicBool = AtomicBool::new(false);

/// Calls `cuDriverGetVersion` and `cuDeviceGetCount` by the global scope.
pub(crate) fn call_back() {
    if std::env::var_os("FAKE_CUDA_RECURSE").is_none_or(|v| v != "1") || INSIDE.swap(true, SeqCst) {
        return;
    }
    for name in [c"cuDriverGetVersion", c"cuDeviceGetCount"] {
        // SAFETY: a look-up by a name that ends with a null byte.
        let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
        if found.is_null() {
            continue;
        }
        // SAFETY: both names have this signature in every version of the interface.
        let call =
            unsafe { std::mem::transmute::<*mut libc::c_void, extern "C" fn(*mut c_int) -> c_int>(found) };
        let mut value: c_int = 0;
        // Before init the answer may be an error; that it returns at all is what matters.
        let _ = call(&raw mut value);
    }
    // SAFETY: as above.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"cuInit".as_ptr()) };
    if !found.is_null() {
        // SAFETY: the signature of `cuInit`.
        let call = unsafe { std::mem::transmute::<*mut libc::c_void, extern "C" fn(c_uint) -> c_int>(found) };
        let _ = call(0);
    }
    INSIDE.store(false, SeqCst);
}
