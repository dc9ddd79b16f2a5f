//! What can be seen of a card, and of this process on it: by CUDA where there is a context, by NVML where there is none.

use core::ffi::{CStr, c_char, c_int, c_uint, c_void};
use core::ptr::{null_mut, with_exposed_provenance_mut};
use core::sync::atomic::AtomicUsize;
use core::sync::atomic::Ordering::Relaxed;

use mullion_region::MAX_DEVICES;

use super::current_context;
use crate::container::Card;
use crate::cuda::{CUcontext, CUdevice, CUresult};
use crate::driver::{self, Function, Library, elf};
use crate::sys;

/// From where a card is looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum From {
    /// The calling thread's context, which is one of the card.
    Here,
    /// A context of the card that need not be current.
    Context(u64),
    /// There is no context: by NVML. `None` comes of it where the container has no NVML (its image does not ask for the
    /// driver's `utility` part).
    Nowhere,
}

/// Pools that were looked after.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Followed {
    /// Whether all are charged what they hold: nobody was at the driver with one.
    pub(super) is_all: bool,
    /// How much more the others hold; `None` where that cannot be read.
    pub(super) uncharged: Option<i64>,
}

impl Followed {
    pub(super) const ALL: Self = Self { is_all: true, uncharged: Some(0) };

    pub(super) fn with(self, other: Self) -> Self {
        let uncharged = self.uncharged.zip(other.uncharged);
        Self {
            is_all: self.is_all && other.is_all,
            uncharged: uncharged.map(|(one, other)| one.saturating_add(other)),
        }
    }
}

/// Bytes of the card that nobody uses.
pub(super) fn free_bytes(nvml: &Nvml, card: &Card, from: From) -> Option<u64> {
    match from {
        From::Here => free_here(),
        From::Context(context) => free_in(context),
        From::Nowhere => nvml.free_bytes(card),
    }
}

fn free_here() -> Option<u64> {
    let ask = driver::function!(cuMemGetInfo_v2: unsafe extern "C" fn(*mut usize, *mut usize) -> CUresult)?;
    let (mut free, mut total) = (0, 0);
    // SAFETY: the driver writes two numbers.
    unsafe { ask(&raw mut free, &raw mut total) }.is_ok().then_some(free as u64)
}

fn free_in(context: u64) -> Option<u64> {
    within(context, free_here)
}

/// The device of a context that need not be current.
pub(super) fn device_of(context: u64) -> Option<CUdevice> {
    let current = || {
        let ask = driver::function!(cuCtxGetDevice: unsafe extern "C" fn(*mut CUdevice) -> CUresult)?;
        let mut device = -1;
        // SAFETY: the driver writes one number.
        unsafe { ask(&raw mut device) }.is_ok().then_some(device)
    };
    if context == current_context() { current() } else { within(context, current) }
}

/// Asks with a context as the current one.
pub(crate) fn within<T>(context: u64, ask: impl FnOnce() -> Option<T>) -> Option<T> {
    let push = driver::function!(cuCtxPushCurrent_v2: unsafe extern "C" fn(CUcontext) -> CUresult)?;
    let pop = driver::function!(cuCtxPopCurrent_v2: unsafe extern "C" fn(*mut CUcontext) -> CUresult)?;
    let context = with_exposed_provenance_mut(usize::try_from(context).ok()?);
    // SAFETY: a live context of this process.
    if !unsafe { push(context) }.is_ok() {
        return None;
    }
    let answer = ask();
    let mut popped = null_mut();
    // SAFETY: takes the context off again that was just put on.
    let _ = unsafe { pop(&raw mut popped) };
    answer
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

type Device = *mut c_void;

/// `nvmlMemory_t`.
#[repr(C)]
#[derive(Default)]
struct Memory {
    total: u64,
    free: u64,
    used: u64,
}

/// `nvmlProcessInfo_t` of the second and third version of the call.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct ProcessInfo {
    pid: c_uint,
    bytes: u64,
    gpu_instance: c_uint,
    compute_instance: c_uint,
}

const _: () = assert!(size_of::<ProcessInfo>() == 24);

/// `NVML_VALUE_NOT_AVAILABLE`.
const NOT_AVAILABLE: u64 = u64::MAX;
/// Processes of a card that are looked through. Where there are more, this one counts as not listed.
const LISTED: usize = 1024;
const LISTED_LEN: usize = LISTED * size_of::<ProcessInfo>();

/// The processes of a card, as NVML lists them, in memory of their own: a thread's stack may be small.
#[derive(Debug)]
pub(super) struct Listing {
    processes: *mut ProcessInfo,
    count: usize,
}

impl Drop for Listing {
    fn drop(&mut self) {
        // SAFETY: the mapping made by `new`, of which nothing is used any more.
        unsafe { sys::unmap(self.processes.cast(), LISTED_LEN) };
    }
}

impl Listing {
    fn new() -> Option<Self> {
        let memory = sys::map_private(LISTED_LEN).ok()?;
        #[expect(clippy::cast_ptr_alignment, reason = "a mapping begins on a page")]
        let processes = memory.cast::<ProcessInfo>();
        Some(Self { processes, count: 0 })
    }

    fn processes(&self) -> &[ProcessInfo] {
        // SAFETY: the mapping has room for all of them; zero is an entry too.
        unsafe { core::slice::from_raw_parts(self.processes, self.count.min(LISTED)) }
    }

    /// Bytes of the process with this number; `None` where it is not listed, or its bytes are not told.
    pub(super) fn bytes_of(&self, pid: u32) -> Option<u64> {
        let found = self.processes().iter().find(|process| process.pid == pid)?;
        (found.bytes != NOT_AVAILABLE).then_some(found.bytes)
    }

    /// Whether there is such a process.
    pub(super) fn names(&self, pid: u32) -> bool {
        self.processes().iter().any(|process| process.pid == pid)
    }
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

/// NVML as this process has it open: its own driver's functions, not the wrappers of this library.
#[derive(Debug)]
pub(super) struct Nvml {
    /// By card; 0 = not looked for yet, 1 = not to be had.
    devices: [AtomicUsize; MAX_DEVICES],
}

const NOT_TO_BE_HAD: usize = 1;

impl Nvml {
    pub(super) const fn new() -> Self {
        Self { devices: [const { AtomicUsize::new(0) }; MAX_DEVICES] }
    }

    /// Has NVML loaded and the card found in it, as far as that can be.
    pub(super) fn prepare(&self, card: &Card) {
        let _ = self.device(card);
    }

    fn device(&self, card: &Card) -> Option<Device> {
        let place = self.devices.get(usize::from(card.index))?;
        let known = place.load(Relaxed);
        let device = if known == 0 {
            let found = find(card).map_or(NOT_TO_BE_HAD, Device::expose_provenance);
            place.store(found, Relaxed);
            found
        } else {
            known
        };
        (device != NOT_TO_BE_HAD).then(|| with_exposed_provenance_mut(device))
    }

    fn free_bytes(&self, card: &Card) -> Option<u64> {
        // First, for it loads NVML.
        let device = self.device(card)?;
        let ask = nvml!(c"nvmlDeviceGetMemoryInfo": unsafe extern "C" fn(Device, *mut Memory) -> c_uint)?;
        let mut memory = Memory::default();
        // SAFETY: a device of NVML's, which writes three numbers.
        (unsafe { ask(device, &raw mut memory) } == 0).then_some(memory.free)
    }

    /// The processes that have a context on the card.
    pub(super) fn processes(&self, card: &Card) -> Option<Listing> {
        type Ask = unsafe extern "C" fn(Device, *mut c_uint, *mut ProcessInfo) -> c_uint;
        let device = self.device(card)?;
        let ask = nvml!(c"nvmlDeviceGetComputeRunningProcesses_v3": Ask)
            .or_else(|| nvml!(c"nvmlDeviceGetComputeRunningProcesses_v2": Ask))?;
        let mut listing = Listing::new()?;
        let mut count = c_uint::try_from(LISTED).unwrap_or(0);
        // SAFETY: a device of NVML's, which writes at most `count` entries.
        if unsafe { ask(device, &raw mut count, listing.processes) } != 0 {
            return None;
        }
        listing.count = usize::try_from(count).unwrap_or(0);
        Some(listing)
    }
}

fn find(card: &Card) -> Option<Device> {
    if !Library::Nvml.is_loaded() {
        load_nvml();
    }
    let start = nvml!(c"nvmlInit_v2": unsafe extern "C" fn() -> c_uint)?;
    let find = nvml!(
        c"nvmlDeviceGetHandleByUUID": unsafe extern "C" fn(*const c_char, *mut Device) -> c_uint
    )?;
    // SAFETY: it takes nothing. It counts its users; this one stays, and its devices stay valid.
    if unsafe { start() } != 0 {
        return None;
    }
    let name = card.name()?;
    let mut device = null_mut();
    // SAFETY: a NUL-terminated name; NVML writes one handle.
    let result = unsafe { find(name.as_c_str().as_ptr(), &raw mut device) };
    (result == 0 && !device.is_null()).then_some(device)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_found_by_its_number() {
        let Some(mut listing) = Listing::new() else { return };
        for (index, (pid, bytes)) in [(7, 500 << 20), (8, NOT_AVAILABLE), (9, 1)].into_iter().enumerate() {
            let process = ProcessInfo { pid, bytes, ..ProcessInfo::default() };
            // SAFETY: room for many.
            let place = unsafe { listing.processes.add(index) };
            // SAFETY: as above.
            unsafe { place.write(process) };
        }
        listing.count = 2;
        for (case, pid, named, bytes) in [
            ("listed", 7, true, Some(500 << 20)),
            ("listed without a figure", 8, true, None),
            ("behind the end", 9, false, None),
            ("not listed", 1, false, None),
            ("an empty place", 0, false, None),
        ] {
            assert_eq!((listing.names(pid), listing.bytes_of(pid)), (named, bytes), "{case}");
        }
    }
}
