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
    session::init("nvmlInit_v2")
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
