//! The lists of processes on a card.
//!
//! A process of CUDA is listed with the bytes that the usage file charges it with, so that the list and the memory in
//! use agree; which processes those are the usage file knows too, while the driver's list has the host's pids, or this
//! container's, depending on the driver. The lists of graphics and MPS are the driver's, without other containers'
//! processes.

#![expect(unsafe_code, reason = "calls NVML, and writes what the program asks for")]

use core::ffi::c_uint;

use super::{Device, NvmlReturn, card};
use crate::container::{Card, Process};
use crate::driver::{Function, Library};
use crate::sys;

/// `nvmlProcessInfo_v1_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ProcessV1 {
    pub(crate) pid: c_uint,
    pub(crate) bytes: u64,
}

/// `nvmlProcessInfo_v2_t`, which v3 of the functions uses too.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ProcessV2 {
    pub(crate) pid: c_uint,
    pub(crate) bytes: u64,
    pub(crate) gpu_instance: c_uint,
    pub(crate) compute_instance: c_uint,
}

/// `nvmlProcessDetail_v1_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Detail {
    pub(crate) pid: c_uint,
    pub(crate) bytes: u64,
    pub(crate) gpu_instance: c_uint,
    pub(crate) compute_instance: c_uint,
    /// Of them, what confidential computing protects.
    pub(crate) protected: u64,
}

/// `nvmlProcessDetailList_v1_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct DetailList {
    version: c_uint,
    /// [`COMPUTE`], 1 = graphics, 2 = MPS.
    mode: c_uint,
    count: c_uint,
    entries: *mut Detail,
}

const _: () = assert!(size_of::<ProcessV1>() == 16 && size_of::<ProcessV2>() == 24);
const _: () = assert!(size_of::<Detail>() == 32 && size_of::<DetailList>() == 24);

/// `nvmlProcessDetailList_v1`: the number of the form, and its size.
const DETAILS_V1: c_uint = 0x0100_0018;
/// `NVML_PROCESS_MODE_COMPUTE`.
const COMPUTE: c_uint = 0;

/// An entry of any form.
trait Entry: Copy {
    fn new(pid: c_uint, bytes: u64, instances: (c_uint, c_uint)) -> Self;
    fn pid(&mut self) -> &mut c_uint;
}

impl Entry for ProcessV1 {
    fn new(pid: c_uint, bytes: u64, _: (c_uint, c_uint)) -> Self {
        Self { pid, bytes }
    }
    fn pid(&mut self) -> &mut c_uint {
        &mut self.pid
    }
}

impl Entry for ProcessV2 {
    fn new(pid: c_uint, bytes: u64, (gpu_instance, compute_instance): (c_uint, c_uint)) -> Self {
        Self { pid, bytes, gpu_instance, compute_instance }
    }
    fn pid(&mut self) -> &mut c_uint {
        &mut self.pid
    }
}

impl Entry for Detail {
    fn new(pid: c_uint, bytes: u64, (gpu_instance, compute_instance): (c_uint, c_uint)) -> Self {
        Self { pid, bytes, gpu_instance, compute_instance, protected: 0 }
    }
    fn pid(&mut self) -> &mut c_uint {
        &mut self.pid
    }
}

type List<T> = unsafe extern "C" fn(Device, *mut c_uint, *mut T) -> NvmlReturn;

/// Asks NVML for a list.
fn asking<T>(real: List<T>) -> impl Fn(Device, *mut c_uint, *mut T) -> NvmlReturn {
    // SAFETY: a number that is valid or the program's, and a list that is null, as long as that says, or the program's.
    move |device, count, list| unsafe { real(device, count, list) }
}

/// `nvmlDeviceGetComputeRunningProcesses`.
///
/// # Safety
/// As that function.
pub(crate) unsafe fn compute_v1(
    real: List<ProcessV1>,
    device: Device,
    count: *mut c_uint,
    list: *mut ProcessV1,
) -> NvmlReturn {
    // SAFETY: as the caller says.
    unsafe { compute(asking(real), device, count, list) }
}

/// `nvmlDeviceGetComputeRunningProcesses_v2` and `_v3`.
///
/// # Safety
/// As those functions.
pub(crate) unsafe fn compute_v2(
    real: List<ProcessV2>,
    device: Device,
    count: *mut c_uint,
    list: *mut ProcessV2,
) -> NvmlReturn {
    // SAFETY: as the caller says.
    unsafe { compute(asking(real), device, count, list) }
}

/// `nvmlDeviceGetGraphicsRunningProcesses` and `nvmlDeviceGetMPSComputeRunningProcesses`.
///
/// # Safety
/// As those functions.
pub(crate) unsafe fn others_v1(
    real: List<ProcessV1>,
    device: Device,
    count: *mut c_uint,
    list: *mut ProcessV1,
) -> NvmlReturn {
    // SAFETY: as the caller says.
    unsafe { others(asking(real), device, count, list) }
}

/// The same, `_v2` and `_v3`.
///
/// # Safety
/// As those functions.
pub(crate) unsafe fn others_v2(
    real: List<ProcessV2>,
    device: Device,
    count: *mut c_uint,
    list: *mut ProcessV2,
) -> NvmlReturn {
    // SAFETY: as the caller says.
    unsafe { others(asking(real), device, count, list) }
}

/// `nvmlDeviceGetRunningProcessDetailList`.
///
/// # Safety
/// As that function.
pub(crate) unsafe fn details(
    real: unsafe extern "C" fn(Device, *mut DetailList) -> NvmlReturn,
    device: Device,
    list: *mut DetailList,
) -> NvmlReturn {
    if list.is_null() {
        // SAFETY: the caller's own arguments; NVML refuses them.
        return unsafe { real(device, list) };
    }
    // SAFETY: every form of the list begins with its version.
    let version = unsafe { list.cast::<c_uint>().read() };
    if version != DETAILS_V1 {
        // A form that only the driver knows: its answer would show the whole card.
        if card(device).is_some_and(|card| card.limit().is_some()) {
            return NvmlReturn::ARGUMENT_VERSION_MISMATCH;
        }
        // SAFETY: the caller's own arguments.
        return unsafe { real(device, list) };
    }
    // SAFETY: a list of this version.
    let DetailList { mode, entries, .. } = unsafe { list.read() };
    // SAFETY: as above.
    let count = unsafe { &raw mut (*list).count };
    // The same question as the other lists are asked.
    let ask = |device: Device, count: *mut c_uint, entries: *mut Detail| {
        // SAFETY: a number of ours, or the caller's in its list.
        let mut asked = DetailList { version, mode, count: unsafe { count.read() }, entries };
        // SAFETY: a list with room for so many entries.
        let result = unsafe { real(device, &raw mut asked) };
        // SAFETY: as above.
        unsafe { count.write(asked.count) };
        result
    };
    if mode == COMPUTE {
        // SAFETY: as the caller says.
        unsafe { compute(ask, device, count, entries) }
    } else {
        // SAFETY: as the caller says.
        unsafe { others(ask, device, count, entries) }
    }
}

/// The container's processes with memory on the card. `real` asks NVML, in whatever form.
///
/// # Safety
/// As NVML's function: `count` is null or valid, `list` null or valid for as many entries.
unsafe fn compute<T: Entry>(
    real: impl Fn(Device, *mut c_uint, *mut T) -> NvmlReturn,
    device: Device,
    count: *mut c_uint,
    list: *mut T,
) -> NvmlReturn {
    let mut there = 0;
    let asked = real(device, &raw mut there, core::ptr::null_mut());
    let card = if count.is_null() || !matches!(asked, NvmlReturn::SUCCESS | NvmlReturn::INSUFFICIENT_SIZE) {
        None
    } else {
        card(device).filter(|card| card.limit().is_some())
    };
    let Some(card) = card else { return real(device, count, list) };
    let instances = instances(device);
    // SAFETY: as the caller says.
    let mut answer = unsafe { Answer::new(count, list) };
    card.each_process(&mut |process: Process| {
        if process.bytes > 0 {
            answer.add(T::new(process.pid.cast_unsigned(), process.bytes, instances));
        }
    });
    answer.end()
}

/// The driver's list without the processes of others, under the pids of this container.
///
/// # Safety
/// As [`compute`].
unsafe fn others<T: Entry>(
    real: impl Fn(Device, *mut c_uint, *mut T) -> NvmlReturn,
    device: Device,
    count: *mut c_uint,
    list: *mut T,
) -> NvmlReturn {
    let mut there: c_uint = 0;
    let asked = real(device, &raw mut there, core::ptr::null_mut());
    let card = (!count.is_null() && asked == NvmlReturn::INSUFFICIENT_SIZE).then(|| card(device)).flatten();
    let Some(card) = card.filter(|card| card.limit().is_some()) else {
        // Nothing is listed, or nothing is limited.
        return real(device, count, list);
    };
    // More may start meanwhile.
    let room = there.saturating_add(64);
    let len = room as usize * size_of::<T>();
    let Ok(scratch) = sys::map_private(len) else { return NvmlReturn::MEMORY };
    let mut got = room;
    // There is room for so many entries.
    let result = real(device, &raw mut got, scratch.cast());
    let result = if result == NvmlReturn::SUCCESS {
        // SAFETY: NVML has filled in `got` entries, at most those that there is room for; pages are aligned for them.
        let entries = unsafe { core::slice::from_raw_parts(scratch.cast::<T>(), got.min(room) as usize) };
        // SAFETY: as the caller says.
        unsafe { filter(card, entries, count, list) }
    } else {
        result
    };
    // SAFETY: mapped above; the entries are no longer used.
    unsafe { sys::unmap(scratch, len) };
    result
}

/// # Safety
/// As [`compute`].
unsafe fn filter<T: Entry>(card: &Card, entries: &[T], count: *mut c_uint, list: *mut T) -> NvmlReturn {
    // SAFETY: as the caller says.
    let mut answer = unsafe { Answer::new(count, list) };
    for &(mut entry) in entries {
        let listed = entry.pid().cast_signed();
        let mut own = None;
        card.each_process(&mut |process| {
            // The host's pid is certain. While the agent has not said it, a driver that translates pids is believed.
            if process.host_pid == listed || (process.host_pid == 0 && process.pid == listed) {
                own = Some(process.pid);
            }
        });
        if let Some(pid) = own {
            *entry.pid() = pid.cast_unsigned();
            answer.add(entry);
        }
    }
    answer.end()
}

/// MIG's instances that the handle stands for, all ones without MIG.
fn instances(device: Device) -> (c_uint, c_uint) {
    static GPU: Function = Function::new(Library::Nvml, c"nvmlDeviceGetGpuInstanceId");
    static COMPUTE: Function = Function::new(Library::Nvml, c"nvmlDeviceGetComputeInstanceId");
    let ask = |function: &Function| {
        let address = function.address().ok()?;
        // SAFETY: the type of both functions.
        let function = unsafe {
            core::mem::transmute::<usize, unsafe extern "C" fn(Device, *mut c_uint) -> NvmlReturn>(address)
        };
        let mut id = 0;
        // SAFETY: a handle that NVML has just accepted, and a place for the answer.
        let result = unsafe { function(device, &raw mut id) };
        (result == NvmlReturn::SUCCESS).then_some(id)
    };
    (ask(&GPU).unwrap_or(c_uint::MAX), ask(&COMPUTE).unwrap_or(c_uint::MAX))
}

/// A list that the program gets, as NVML gives them: as many entries as there is room for, else none, and their number.
struct Answer<T> {
    count: *mut c_uint,
    list: *mut T,
    room: c_uint,
    len: c_uint,
}

impl<T: Entry> Answer<T> {
    /// # Safety
    /// `count` is valid; `list` is null or valid for as many entries as `count` says.
    unsafe fn new(count: *mut c_uint, list: *mut T) -> Self {
        // SAFETY: as the caller says.
        let room = unsafe { count.read() };
        Self { count, list, room, len: 0 }
    }

    fn add(&mut self, entry: T) {
        if !self.list.is_null() && self.len < self.room {
            // SAFETY: inside of the program's room.
            let place = unsafe { self.list.add(self.len as usize) };
            // SAFETY: as above.
            unsafe { place.write(entry) };
        }
        self.len += 1;
    }

    fn end(self) -> NvmlReturn {
        // SAFETY: valid, as `new` was told.
        unsafe { self.count.write(self.len) };
        if self.len > self.room {
            NvmlReturn::INSUFFICIENT_SIZE
        } else if self.len > 0 && self.list.is_null() {
            NvmlReturn::INVALID_ARGUMENT
        } else {
            NvmlReturn::SUCCESS
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_that_does_not_fit_says_how_many_there_are() {
        for (case, room, entries, want, count) in [
            ("fits", 3, 2, NvmlReturn::SUCCESS, 2),
            ("fits exactly", 2, 2, NvmlReturn::SUCCESS, 2),
            ("too small", 1, 2, NvmlReturn::INSUFFICIENT_SIZE, 2),
            ("a question for the number", 0, 2, NvmlReturn::INSUFFICIENT_SIZE, 2),
            ("none", 0, 0, NvmlReturn::SUCCESS, 0),
        ] {
            let (mut number, mut list) = (room, [ProcessV2::default(); 4]);
            // SAFETY: a valid number, and more entries than it says.
            let mut answer = unsafe { Answer::new(&raw mut number, list.as_mut_ptr()) };
            for pid in 1..=entries {
                answer.add(ProcessV2::new(pid, 10, (c_uint::MAX, c_uint::MAX)));
            }
            assert_eq!((answer.end(), number), (want, count), "{case}");
            assert_eq!(list[room as usize], ProcessV2::default(), "{case}: nothing past the program's room");
        }
    }

    #[test]
    fn without_a_list_only_the_number_is_answered() {
        let mut number = 5;
        // SAFETY: a valid number and no list.
        let mut answer = unsafe { Answer::<ProcessV1>::new(&raw mut number, core::ptr::null_mut()) };
        answer.add(ProcessV1::new(1, 2, (0, 0)));
        assert_eq!((answer.end(), number), (NvmlReturn::INVALID_ARGUMENT, 1));
    }
}
