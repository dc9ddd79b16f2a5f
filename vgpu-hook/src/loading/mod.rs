//! The ways in which a program gets at the driver's functions: `dlsym`, `dlvsym`, `dlopen`, `dlmopen` and
//! `cuGetProcAddress`.
//!
//! The four functions of the loader are exported as tail jumps: they decide, and then either answer or jump to the
//! loader's own function with the program's arguments and return address in place, because the loader looks at the
//! caller (`RTLD_NEXT`, `$ORIGIN`, namespaces). A name of the table is always answered with its wrapper, whatever the
//! handle, as long as the program has loaded the driver; without a driver every name is answered as without this library.

#![expect(unsafe_code, reason = "functions of the loader, and tail jumps to them")]

pub(crate) mod proc_address;

use core::ffi::{CStr, c_char, c_int, c_void};
use core::ptr::{null, with_exposed_provenance};
use core::sync::atomic::{AtomicUsize, Ordering::Acquire, Ordering::Release};

use crate::driver::elf;
use crate::{container, table};

/// Exported names that are not a driver's.
pub(crate) const NAMES: [&str; 4] = ["dlmopen", "dlopen", "dlsym", "dlvsym"];

/// The next function of a name behind this library in the search order.
#[derive(Debug)]
struct Next {
    name: &'static CStr,
    address: AtomicUsize,
}

static DLSYM: Next = Next::new(c"dlsym");
static DLVSYM: Next = Next::new(c"dlvsym");
static DLOPEN: Next = Next::new(c"dlopen");
static DLMOPEN: Next = Next::new(c"dlmopen");

impl Next {
    const fn new(name: &'static CStr) -> Self {
        Self { name, address: AtomicUsize::new(0) }
    }

    /// Its address; 0 when no loaded image has it (before glibc 2.34 a program may have no `libdl`).
    fn address(&self) -> usize {
        match self.address.load(Acquire) {
            0 => {
                let found = elf::next_function(self.name).unwrap_or(0);
                self.address.store(found, Release);
                found
            }
            known => known,
        }
    }
}

const RTLD_LAZY: c_int = 1;
const RTLD_NOLOAD: c_int = 4;
const RTLD_DEEPBIND: usize = 8;
const RTLD_NODELETE: c_int = 0x1000;
const RTLD_DEFAULT: usize = 0;
const RTLD_NEXT: usize = usize::MAX;

/// A handle of an image that is loaded already, kept for good; null when there is none.
fn keep(path: &CStr) -> *mut c_void {
    let dlopen = DLOPEN.address();
    if dlopen == 0 {
        return core::ptr::null_mut();
    }
    // SAFETY: the address of the loader's `dlopen`.
    let dlopen = unsafe {
        core::mem::transmute::<usize, unsafe extern "C" fn(*const c_char, c_int) -> *mut c_void>(dlopen)
    };
    // SAFETY: a NUL-terminated path; nothing new is loaded, so no code of others runs.
    unsafe { dlopen(path.as_ptr(), RTLD_LAZY | RTLD_NOLOAD | RTLD_NODELETE) }
}

/// Keeps a driver's library loaded for good, because its functions' addresses are remembered.
pub(crate) fn pin(path: &CStr) {
    if !path.is_empty() {
        keep(path);
    }
}

/// What a tail jump does: jump to `target`, or return `value` when there is no target.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Decision {
    value: usize,
    target: usize,
}

impl Decision {
    const fn answer(value: usize) -> Self {
        Self { value, target: 0 }
    }

    /// The loader's own function; a null answer when there is none.
    fn pass(next: &Next) -> Self {
        Self { value: 0, target: next.address() }
    }
}

/// The first three arguments of the call, which a decision may change.
type Arguments = [usize; 3];

/// Exports `$name` as a tail jump decided by `$decide(&mut arguments, return address)`.
macro_rules! tail_jump {
    ($name:ident, $decide:path) => {
        /// Decides, then returns or jumps with the caller's registers and return address.
        #[cfg_attr(feature = "preload", unsafe(no_mangle))]
        #[unsafe(naked)]
        unsafe extern "C" fn $name() {
            #[cfg(target_arch = "x86_64")]
            core::arch::naked_asm!(
                ".cfi_startproc",
                "sub rsp, 24",
                ".cfi_adjust_cfa_offset 24",
                "mov [rsp], rdi",
                "mov [rsp + 8], rsi",
                "mov [rsp + 16], rdx",
                "mov rdi, rsp",
                "mov rsi, [rsp + 24]",
                "call {decide}",
                "mov r11, rdx",
                "mov rdi, [rsp]",
                "mov rsi, [rsp + 8]",
                "mov rdx, [rsp + 16]",
                "add rsp, 24",
                ".cfi_adjust_cfa_offset -24",
                "test r11, r11",
                "jnz 2f",
                "ret",
                "2: jmp r11",
                ".cfi_endproc",
                decide = sym $decide,
            );
            #[cfg(target_arch = "aarch64")]
            core::arch::naked_asm!(
                "stp x29, x30, [sp, #-48]!",
                "mov x29, sp",
                "stp x0, x1, [sp, #16]",
                "str x2, [sp, #32]",
                "add x0, sp, #16",
                "mov x1, x30",
                "bl {decide}",
                "mov x16, x1",
                "mov x17, x0",
                "ldp x0, x1, [sp, #16]",
                "ldr x2, [sp, #32]",
                "ldp x29, x30, [sp], #48",
                "cbnz x16, 2f",
                "mov x0, x17",
                "ret",
                "2: br x16",
                decide = sym $decide,
            );
        }
    };
}

tail_jump!(dlsym, decide_dlsym);
tail_jump!(dlvsym, decide_dlvsym);
tail_jump!(dlopen, decide_dlopen);
tail_jump!(dlmopen, decide_dlmopen);

extern "C" fn decide_dlsym(arguments: &mut Arguments, caller: usize) -> Decision {
    look_up(arguments, caller, false)
}

extern "C" fn decide_dlvsym(arguments: &mut Arguments, caller: usize) -> Decision {
    look_up(arguments, caller, true)
}

/// `dlsym(handle, name)` and `dlvsym(handle, name, version)`.
fn look_up(arguments: &mut Arguments, caller: usize, versioned: bool) -> Decision {
    let next = if versioned { &DLVSYM } else { &DLSYM };
    let [handle, name, version] = *arguments;
    if name == 0 {
        return Decision::pass(next);
    }
    // SAFETY: the program passes a NUL-terminated name.
    let name = unsafe { CStr::from_ptr(with_exposed_provenance(name)) };
    let symbol = name.to_bytes();
    let wrapper = if symbol.starts_with(b"dl") {
        own(symbol).filter(|_| !interposes(caller, symbol))
    } else if table::library_of(symbol).is_some() {
        let Some(row) = table::find(symbol) else { return Decision::pass(next) };
        if row.real.address().is_err() {
            return look_up_without_driver(arguments, next, name);
        }
        Some(row.wrapper.0.expose_provenance())
    } else {
        None
    };
    match wrapper {
        // A version that does not exist is not found, and the loader says so.
        Some(_) if versioned && handle != RTLD_NEXT && found(handle, name, version) == Some(0) => {
            Decision::pass(next)
        }
        Some(wrapper) => Decision::answer(wrapper),
        None => Decision::pass(next),
    }
}

/// The exported function of the loader's that is called `symbol`.
fn own(symbol: &[u8]) -> Option<usize> {
    let function = match symbol {
        b"dlsym" => dlsym,
        b"dlvsym" => dlvsym,
        b"dlopen" => dlopen,
        b"dlmopen" => dlmopen,
        _ => return None,
    };
    Some((function as unsafe extern "C" fn() as *const c_void).expose_provenance())
}

/// Whether the image that asks has a function `symbol` itself: it stands in for the loader's as well, and would call
/// this library for ever if it were answered with this library's.
fn interposes(caller: usize, symbol: &[u8]) -> bool {
    elf::containing(caller).is_some_and(|image| image.function(symbol).is_some())
}

/// What the loader finds, asked from here; `None` when it cannot be asked. `version` is 0 for `dlsym`.
fn found(handle: usize, name: &CStr, version: usize) -> Option<usize> {
    let next = if version == 0 { &DLSYM } else { &DLVSYM };
    let function = next.address();
    if function == 0 {
        return None;
    }
    // SAFETY: the address of the loader's `dlsym` or `dlvsym`; the former ignores a third argument.
    let function = unsafe {
        core::mem::transmute::<usize, unsafe extern "C" fn(usize, *const c_char, *const c_char) -> usize>(
            function,
        )
    };
    let version: *const c_char = if version == 0 { null() } else { with_exposed_provenance(version) };
    // SAFETY: the program's own handle, name and version.
    Some(unsafe { function(handle, name.as_ptr(), version) })
}

/// A name of the table while the driver that has it is not loaded, or too old for it: whoever would find the function
/// exported by this library must find none, as without the library.
fn look_up_without_driver(arguments: &mut Arguments, next: &Next, name: &CStr) -> Decision {
    let [handle, _, version] = *arguments;
    let version = if core::ptr::eq(next, &raw const DLVSYM) { version } else { 0 };
    let everywhere = matches!(handle, RTLD_DEFAULT | RTLD_NEXT);
    if !everywhere {
        let is_ours =
            |address: usize| elf::containing(address).is_some_and(|image| image.contains(elf::here()));
        if !found(handle, name, version).is_some_and(is_ours) {
            return Decision::pass(next);
        }
    }
    // Asked of the C library alone, the loader finds nothing, and says so (`dlerror`).
    let libc =
        elf::find(|image| image.is_called(b"libc.so")).map_or(core::ptr::null_mut(), |libc| keep(libc.path));
    if libc.is_null() {
        return Decision::answer(0);
    }
    arguments[0] = libc.expose_provenance();
    Decision::pass(next)
}

/// `dlopen(file, flags)`: a library that is bound to its own needs first (`RTLD_DEEPBIND`) would not find the wrappers.
extern "C" fn decide_dlopen(arguments: &mut Arguments, _caller: usize) -> Decision {
    if arguments[1] & RTLD_DEEPBIND != 0 {
        if container::refuses() {
            arguments[1] &= !RTLD_DEEPBIND;
        } else {
            container::count_escape();
        }
    }
    Decision::pass(&DLOPEN)
}

/// `dlmopen(namespace, file, flags)`: what is loaded into another namespace does not see this library. It is counted.
extern "C" fn decide_dlmopen(arguments: &mut Arguments, _caller: usize) -> Decision {
    const LM_ID_BASE: usize = 0;
    if arguments[0] != LM_ID_BASE {
        container::count_escape();
    } else if arguments[2] & RTLD_DEEPBIND != 0 && container::refuses() {
        arguments[2] &= !RTLD_DEEPBIND;
    }
    Decision::pass(&DLMOPEN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_are_not_ours_are_passed_on() {
        for name in
            [c"malloc", c"cudaMalloc", c"curl_easy_init", c"cublasCreate_v2", c"dlerror", c"nvtxMarkA", c""]
        {
            let mut arguments = [RTLD_DEFAULT, name.as_ptr().expose_provenance(), 0];
            let decision = decide_dlsym(&mut arguments, elf::here());
            assert_eq!(decision, Decision { value: 0, target: DLSYM.address() }, "{name:?}");
            assert_eq!(arguments[0], RTLD_DEFAULT, "{name:?}");
        }
    }

    #[test]
    fn every_exported_name_of_the_loader_is_answered() {
        for name in NAMES {
            assert!(own(name.as_bytes()).is_some(), "{name}");
        }
        assert_eq!(own(b"dlclose"), None);
    }

    #[test]
    fn without_a_driver_the_loader_says_that_there_is_no_function() {
        for handle in [RTLD_DEFAULT, RTLD_NEXT] {
            let mut arguments = [handle, c"cuInit".as_ptr().expose_provenance(), 0];
            let decision = decide_dlsym(&mut arguments, elf::here());
            assert_eq!(decision.target, DLSYM.address());
            assert_ne!(arguments[0], handle);
            assert_eq!(found(arguments[0], c"cuInit", 0), Some(0));
        }
    }

    #[test]
    fn deep_binding_is_left_alone_where_nothing_is_enforced() {
        let mut arguments = [0, 1 | RTLD_DEEPBIND, 0];
        let _ = decide_dlopen(&mut arguments, 0);
        assert_eq!(arguments[1], if container::refuses() { 1 } else { 1 | RTLD_DEEPBIND });
    }
}
