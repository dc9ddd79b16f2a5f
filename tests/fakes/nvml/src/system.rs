//! Init, shutdown, versions.
#![expect(unsafe_code, reason = "exports entry points under their C names")]

use std::ffi::{c_char, c_int, c_uint};
use std::fs;

use crate::abi::Out;
use crate::code::{self, Code};
use crate::{entry, events, session};

#[unsafe(no_mangle)]
extern "C" fn nvmlInit() -> c_uint {
    session::init("nvmlInit")
}

#[unsafe(no_mangle)]
extern "C" fn nvmlInit_v2() -> c_uint {
    through_the_global_scope().unwrap_or_else(|| session::init("nvmlInit_v2"))
}

/// `nvmlInitWithFlags` as the program's global scope has it, where `FAKE_NVML_RECURSE=1` asks for that: an interposed library meets
/// itself (HK-03).
fn through_the_global_scope() -> Option<c_uint> {
    if std::env::var_os("FAKE_NVML_RECURSE").is_none_or(|v| v != "1") {
        return None;
    }
    // SAFETY: a look-up by a name that ends with a null byte.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"nvmlInitWithFlags".as_ptr()) };
    if found.is_null() {
        return None;
    }
    // SAFETY: the name has this signature in every version of the interface.
    let call = unsafe { std::mem::transmute::<*mut libc::c_void, extern "C" fn(c_uint) -> c_uint>(found) };
    Some(call(0))
}

/// The flags (start without cards, do not attach) change nothing here.
#[unsafe(no_mangle)]
extern "C" fn nvmlInitWithFlags(_flags: c_uint) -> c_uint {
    session::init("nvmlInitWithFlags")
}

#[unsafe(no_mangle)]
extern "C" fn nvmlErrorString(result: c_uint) -> *const c_char {
    code::text(result).as_ptr()
}

entry! {
    fn nvmlShutdown() |_| {
        if session::shutdown() {
            events::forget_all();
        }
        Ok(())
    }

    fn nvmlSystemGetDriverVersion(version: Out<c_char>, length: c_uint) |session| {
        version.put_text(length, &session.state.driver.version)
    }

    fn nvmlSystemGetNVMLVersion(version: Out<c_char>, length: c_uint) |session| {
        version.put_text(length, &session.state.driver.nvml)
    }

    fn nvmlSystemGetCudaDriverVersion(version: Out<c_int>) |session| {
        version.put(session.state.driver.cuda)
    }

    fn nvmlSystemGetCudaDriverVersion_v2(version: Out<c_int>) |session| {
        version.put(session.state.driver.cuda)
    }

    fn nvmlSystemGetProcessName(pid: c_uint, name: Out<c_char>, length: c_uint) |_| {
        let command = fs::read_to_string(format!("/proc/{pid}/cmdline")).map_err(|_| Code::NOT_FOUND)?;
        name.put_text(length, command.split('\0').next().unwrap_or_default())
    }
}
