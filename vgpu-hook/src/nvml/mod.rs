//! NVML's view of a card, as large and as full as the container's slice is.
//!
//! The driver is asked first in every function, so that a handle that is not valid, a library that is not initialised or
//! a permission that is missing is answered as ever; then the figures are exchanged for the container's. They are those
//! that `cuMemGetInfo` gives, and the processes listed are the container's own, with the pids that it knows them by. A
//! program that never uses CUDA (`nvidia-smi`) gets them as well: the first question attaches it.

#![expect(unsafe_code, reason = "calls NVML, and writes what the program asks for")]

mod processes;

use core::ffi::{CStr, c_char, c_int, c_uint, c_void};

pub(crate) use processes::{
    DetailList, ProcessV1, ProcessV2, compute_v1, compute_v2, details, others_v1, others_v2,
};

use crate::container::{self, Card};
use crate::driver::{Function, Library, Missing};
use crate::memory::view;
use crate::table::Absent;

/// `nvmlReturn_t`.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub(crate) struct NvmlReturn(pub(crate) c_int);

impl NvmlReturn {
    pub(crate) const SUCCESS: Self = Self(0);
    pub(crate) const INVALID_ARGUMENT: Self = Self(2);
    pub(crate) const INSUFFICIENT_SIZE: Self = Self(7);
    pub(crate) const LIBRARY_NOT_FOUND: Self = Self(12);
    pub(crate) const FUNCTION_NOT_FOUND: Self = Self(13);
    pub(crate) const MEMORY: Self = Self(20);
    pub(crate) const ARGUMENT_VERSION_MISMATCH: Self = Self(25);
}

impl Absent for NvmlReturn {
    fn absent(missing: Missing) -> Self {
        match missing {
            Missing::Library => Self::LIBRARY_NOT_FOUND,
            Missing::Function => Self::FUNCTION_NOT_FOUND,
        }
    }
}

/// `nvmlDevice_t`.
pub(crate) type Device = *mut c_void;

/// `nvmlMemory_t`, in bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Memory {
    pub(crate) total: u64,
    pub(crate) free: u64,
    pub(crate) used: u64,
}

/// `nvmlMemory_v2_t`, in bytes: what the driver keeps for itself is `reserved`, and not among `used`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct MemoryV2 {
    pub(crate) version: c_uint,
    pub(crate) total: u64,
    pub(crate) reserved: u64,
    pub(crate) free: u64,
    pub(crate) used: u64,
}

const _: () = assert!(size_of::<Memory>() == 24 && size_of::<MemoryV2>() == 40);

/// Longest uuid in NVML's writing, with its NUL (`NVML_DEVICE_UUID_V2_BUFFER_SIZE`).
const UUID_LEN: usize = 96;

/// The card of the container that this handle stands for; `None` where nothing limits it.
fn card(device: Device) -> Option<&'static Card> {
    static UUID: Function = Function::new(Library::Nvml, c"nvmlDeviceGetUUID");
    let container = container::for_nvml()?;
    let address = UUID.address().ok()?;
    // SAFETY: the type of `nvmlDeviceGetUUID`.
    let get_uuid = unsafe {
        core::mem::transmute::<usize, unsafe extern "C" fn(Device, *mut c_char, c_uint) -> NvmlReturn>(
            address,
        )
    };
    let mut uuid = [0_u8; UUID_LEN];
    // SAFETY: NVML writes at most so many bytes; the handle is one that it has just accepted.
    let result = unsafe { get_uuid(device, uuid.as_mut_ptr().cast(), 96) };
    if result != NvmlReturn::SUCCESS {
        return None;
    }
    let card = container.card_by_uuid(CStr::from_bytes_until_nul(&uuid).ok()?.to_str().ok()?)?;
    container.reap_now_and_then(card);
    Some(card)
}

/// `nvmlDeviceGetMemoryInfo`.
///
/// # Safety
/// As that function.
pub(crate) unsafe fn memory_v1(
    real: unsafe extern "C" fn(Device, *mut Memory) -> NvmlReturn,
    device: Device,
    memory: *mut Memory,
) -> NvmlReturn {
    // SAFETY: the caller's own arguments.
    let result = unsafe { real(device, memory) };
    if result == NvmlReturn::SUCCESS
        // SAFETY: NVML has just written there.
        && let Some((total, free, used)) = slice(device, unsafe { memory.read() }.total)
    {
        // SAFETY: as above.
        unsafe { memory.write(Memory { total, free, used }) };
    }
    result
}

/// `nvmlDeviceGetMemoryInfo_v2`.
///
/// # Safety
/// As that function.
pub(crate) unsafe fn memory_v2(
    real: unsafe extern "C" fn(Device, *mut MemoryV2) -> NvmlReturn,
    device: Device,
    memory: *mut MemoryV2,
) -> NvmlReturn {
    // SAFETY: the caller's own arguments.
    let result = unsafe { real(device, memory) };
    if result == NvmlReturn::SUCCESS
        // SAFETY: NVML has just written there.
        && let MemoryV2 { version, total, .. } = unsafe { memory.read() }
        && let Some((total, free, used)) = slice(device, total)
    {
        // SAFETY: as above.
        unsafe { memory.write(MemoryV2 { version, total, reserved: 0, free, used }) };
    }
    result
}

/// Total, free and used bytes of a card whose real size is `physical`, as `cuMemGetInfo` gives them.
fn slice(device: Device, physical: u64) -> Option<(u64, u64, u64)> {
    let card = card(device)?;
    let (free, total) = view(card.limit()?, card.used(), physical);
    Some((total, free, total - free))
}
