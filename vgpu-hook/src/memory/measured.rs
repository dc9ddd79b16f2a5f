//! What the driver takes from a card without saying how much: found by looking at the card before and after.
//!
//! The difference holds whatever other processes did meanwhile. What those of this container did is known and taken out;
//! what other containers did is not, so a difference is believed only up to what the thing in question can be. The
//! agent's comparison with NVML by process finds the rest.

use core::ffi::{CStr, c_char, c_int, c_uint, c_void};

use crate::container::Card;
use crate::cuda::{CUcontext, CUdevice, CUresult};
use crate::driver::{self, Function, Library, elf};

/// A state of a card.
#[derive(Clone, Copy, Debug)]
pub(super) struct Look {
    free: u64,
    /// What the container had by its own books.
    counted: u64,
}

impl Look {
    /// Bytes that the card has less of since `before`, at most `most`.
    pub(super) fn since(self, before: Self, most: u64) -> u64 {
        let less = i128::from(before.free) - i128::from(self.free);
        let counted = i128::from(self.counted) - i128::from(before.counted);
        u64::try_from(less - counted).unwrap_or(0).min(most)
    }

    /// Whether the container's books are as they were `before`. Where they are not, some of its processes were between the
    /// driver and the books at one of the two looks, and the difference is off by that, either way.
    pub(super) fn is_quiet_since(self, before: Self) -> bool {
        self.counted == before.counted
    }
}

/// The card of the calling thread's context.
pub(super) fn look(card: &Card) -> Option<Look> {
    let ask = driver::function!(cuMemGetInfo_v2: unsafe extern "C" fn(*mut usize, *mut usize) -> CUresult)?;
    let (mut free, mut total) = (0, 0);
    let counted = card.memory.total();
    // SAFETY: the driver writes two numbers.
    let result = unsafe { ask(&raw mut free, &raw mut total) };
    result.is_ok().then_some(Look { free: free as u64, counted })
}

/// The card of a context that need not be current.
pub(super) fn look_in(card: &Card, context: u64) -> Option<Look> {
    let push = driver::function!(cuCtxPushCurrent_v2: unsafe extern "C" fn(CUcontext) -> CUresult)?;
    let pop = driver::function!(cuCtxPopCurrent_v2: unsafe extern "C" fn(*mut CUcontext) -> CUresult)?;
    let context = core::ptr::with_exposed_provenance_mut(usize::try_from(context).ok()?);
    // SAFETY: a live context of this process.
    if !unsafe { push(context) }.is_ok() {
        return None;
    }
    let seen = look(card);
    let mut popped = core::ptr::null_mut();
    // SAFETY: takes the context off again that was just put on.
    let _ = unsafe { pop(&raw mut popped) };
    seen
}

type Device = *mut c_void;

#[repr(C)]
#[derive(Default)]
struct Memory {
    total: u64,
    free: u64,
    used: u64,
}

macro_rules! nvml {
    ($name:literal: $type:ty) => {{
        static FUNCTION: Function = Function::new(Library::Nvml, $name);
        FUNCTION.address().ok().map(|address| {
            // SAFETY: NVML's function of this name has this type (`nvml.h`).
            unsafe { core::mem::transmute::<usize, $type>(address) }
        })
    }};
}

/// A card on which this process has no context yet: only NVML can tell. `None` where the container has no NVML (its
/// image does not ask for the driver's `utility` part).
pub(super) fn look_without_context(card: &Card) -> Option<Look> {
    if !Library::Nvml.is_loaded() {
        load_nvml();
    }
    let start = nvml!(c"nvmlInit_v2": unsafe extern "C" fn() -> c_uint)?;
    let find = nvml!(
        c"nvmlDeviceGetHandleByUUID": unsafe extern "C" fn(*const c_char, *mut Device) -> c_uint
    )?;
    let ask = nvml!(c"nvmlDeviceGetMemoryInfo": unsafe extern "C" fn(Device, *mut Memory) -> c_uint)?;
    // SAFETY: it takes nothing. It counts its users; this one stays.
    if unsafe { start() } != 0 {
        return None;
    }
    let name = card.name()?;
    let (mut device, mut memory) = (core::ptr::null_mut(), Memory::default());
    // SAFETY: a NUL-terminated name; NVML writes one handle.
    if unsafe { find(name.as_c_str().as_ptr(), &raw mut device) } != 0 {
        return None;
    }
    let counted = card.memory.total();
    // SAFETY: NVML writes three numbers.
    let result = unsafe { ask(device, &raw mut memory) };
    (result == 0).then_some(Look { free: memory.free, counted })
}

/// The program has not loaded NVML, so this library does. If there is none, the loader's note of that is taken away
/// again, so that the program does not find it.
fn load_nvml() {
    const RTLD_LAZY: c_int = 1;
    const NAME: &CStr = c"libnvidia-ml.so.1";
    let Some(open) = elf::next_function(c"dlopen") else { return };
    // SAFETY: the C library's function of this name has this type.
    let open = unsafe {
        core::mem::transmute::<usize, unsafe extern "C" fn(*const c_char, c_int) -> *mut c_void>(open)
    };
    // SAFETY: a NUL-terminated name.
    if unsafe { open(NAME.as_ptr(), RTLD_LAZY) }.is_null()
        && let Some(error) = elf::next_function(c"dlerror")
    {
        // SAFETY: as above.
        let error = unsafe { core::mem::transmute::<usize, unsafe extern "C" fn() -> *const c_char>(error) };
        // SAFETY: it takes nothing.
        unsafe { error() };
    }
}

/// Whether a device's primary context exists.
pub(super) fn primary_is_active(device: CUdevice) -> bool {
    let ask = driver::function!(
        cuDevicePrimaryCtxGetState: unsafe extern "C" fn(CUdevice, *mut c_uint, *mut c_int) -> CUresult
    );
    let (mut flags, mut active) = (0, 0);
    // SAFETY: the driver writes two numbers.
    ask.is_some_and(|ask| unsafe { ask(device, &raw mut flags, &raw mut active) }.is_ok()) && active != 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_container_did_meanwhile_is_taken_out() {
        let before = Look { free: 1000, counted: 100 };
        for (case, free, counted, want) in [
            ("nothing happened", 1000, 100, 0),
            ("the driver took 300", 700, 100, 300),
            ("and another process of the container 200", 500, 300, 300),
            ("another one freed 50", 750, 50, 300),
            ("another container freed more than that", 1500, 100, 0),
            ("another container took a lot", 0, 100, 400),
        ] {
            assert_eq!(Look { free, counted }.since(before, 400), want, "{case}");
        }
    }
}
