//! The NVML calls that `nvml-wrapper` lacks or gets wrong: its `possible_placements` returns an empty list always (it
//! fills a vector's capacity and never sets the length).

#![expect(unsafe_code, reason = "NVML entry points that the wrapper does not offer in a usable form")]

use std::ffi::{c_char, c_uint};
use std::mem::size_of;

use nvml_wrapper::Device;
use nvml_wrapper::error::{NvmlError, nvml_sym, nvml_try, nvml_try_count};
use nvml_wrapper_sys::bindings::{
    nvmlDevice_t, nvmlGpuInstancePlacement_t, nvmlGpuInstanceProfileInfo_v2_t,
    nvmlProcessUtilizationInfo_v1_t, nvmlProcessesUtilizationInfo_v1_t,
};

use crate::nvml::sample::Busy;

/// More placements than any grid has; a driver that announces more is not believed.
const MOST_PLACEMENTS: c_uint = 64;

/// What NVML tells of a GPU instance profile.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Profile {
    /// The numbers.
    pub info: ProfileInfo,
    /// Legal placements, start and size.
    pub placements: Vec<(u32, u32)>,
}

/// The fields of `nvmlGpuInstanceProfileInfo_v2_t` that we use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProfileInfo {
    /// `id`.
    pub id: u32,
    /// `sliceCount`.
    pub slices: u32,
    /// `instanceCount`.
    pub instances: u32,
    /// `multiprocessorCount`.
    pub sms: u32,
    /// `copyEngineCount`.
    pub copy: u32,
    /// `decoderCount`.
    pub dec: u32,
    /// `encoderCount`.
    pub enc: u32,
    /// `jpegCount`.
    pub jpeg: u32,
    /// `ofaCount`.
    pub ofa: u32,
    /// `memorySizeMB`, which is MiB.
    pub memory_mib: u64,
    /// `name`.
    pub name: String,
}

fn handle(device: &Device<'_>) -> nvmlDevice_t {
    // SAFETY: reading the handle is harmless; it is used only while `device`, and with it the library, is borrowed.
    unsafe { device.handle() }
}

/// Tells handles of devices apart: NVML gives the same one for the same card until it is shut down.
#[must_use]
pub fn identity(device: &Device<'_>) -> usize {
    handle(device).addr()
}

/// A GPU instance profile by NVML's enum value, with its placements.
///
/// # Errors
/// NVML's; `NotSupported` for a profile that the card does not have.
pub fn profile(device: &Device<'_>, value: u32) -> Result<Profile, NvmlError> {
    let info = profile_info(device, value)?;
    let placements = placements(device, info.id)?;
    Ok(Profile { info, placements })
}

fn profile_info(device: &Device<'_>, value: u32) -> Result<ProfileInfo, NvmlError> {
    let call = nvml_sym(device.nvml().lib().nvmlDeviceGetGpuInstanceProfileInfoV.as_ref())?;
    let size = size_of::<nvmlGpuInstanceProfileInfo_v2_t>();
    let mut info = nvmlGpuInstanceProfileInfo_v2_t {
        // NVML_STRUCT_VERSION of nvml.h: the size, with the version in the top byte.
        version: c_uint::try_from(size).unwrap_or(0) | (2 << 24),
        id: 0,
        isP2pSupported: 0,
        sliceCount: 0,
        instanceCount: 0,
        multiprocessorCount: 0,
        copyEngineCount: 0,
        decoderCount: 0,
        encoderCount: 0,
        jpegCount: 0,
        ofaCount: 0,
        memorySizeMB: 0,
        name: [0; 96],
    };
    // SAFETY: the handle belongs to the library that `call` is from; `info` is a writable struct of the version that it
    // says.
    nvml_try(unsafe { call(handle(device), value, &raw mut info) })?;
    Ok(ProfileInfo {
        id: info.id,
        slices: info.sliceCount,
        instances: info.instanceCount,
        sms: info.multiprocessorCount,
        copy: info.copyEngineCount,
        dec: info.decoderCount,
        enc: info.encoderCount,
        jpeg: info.jpegCount,
        ofa: info.ofaCount,
        memory_mib: info.memorySizeMB,
        name: text(&info.name),
    })
}

fn placements(device: &Device<'_>, profile_id: u32) -> Result<Vec<(u32, u32)>, NvmlError> {
    let call = nvml_sym(device.nvml().lib().nvmlDeviceGetGpuInstancePossiblePlacements_v2.as_ref())?;
    let mut count: c_uint = 0;
    // SAFETY: with no array the call only writes the number of placements to `count`.
    nvml_try_count(unsafe { call(handle(device), profile_id, std::ptr::null_mut(), &raw mut count) })?;
    if count == 0 || count > MOST_PLACEMENTS {
        return Ok(Vec::new());
    }
    let mut found = vec![nvmlGpuInstancePlacement_t { start: 0, size: 0 }; count as usize];
    // SAFETY: the array has room for `count` placements, and NVML writes no more than that.
    nvml_try(unsafe { call(handle(device), profile_id, found.as_mut_ptr(), &raw mut count) })?;
    found.truncate(count as usize);
    Ok(found.iter().map(|p| (p.start, p.size)).collect())
}

/// Most processes on one card; a driver that announces more is not believed.
const MOST_PROCESSES: c_uint = 65_536;

/// How busy processes kept a card after `since_us`: what cards answer that do not know
/// `nvmlDeviceGetProcessUtilization` any more.
///
/// # Errors
/// NVML's; `NotFound` where nobody did anything.
pub fn processes_utilization(device: &Device<'_>, since_us: u64) -> Result<Vec<Busy>, NvmlError> {
    let call = nvml_sym(device.nvml().lib().nvmlDeviceGetProcessesUtilizationInfo.as_ref())?;
    let size = size_of::<nvmlProcessesUtilizationInfo_v1_t>();
    let mut info = nvmlProcessesUtilizationInfo_v1_t {
        // NVML_STRUCT_VERSION of nvml.h, as above.
        version: c_uint::try_from(size).unwrap_or(0) | (1 << 24),
        processSamplesCount: 0,
        lastSeenTimeStamp: since_us,
        procUtilArray: std::ptr::null_mut(),
    };
    // SAFETY: with no array the call only writes the number of samples into `info`.
    nvml_try_count(unsafe { call(handle(device), &raw mut info) })?;
    if info.processSamplesCount == 0 || info.processSamplesCount > MOST_PROCESSES {
        return Ok(Vec::new());
    }
    let empty = nvmlProcessUtilizationInfo_v1_t {
        timeStamp: 0,
        pid: 0,
        smUtil: 0,
        memUtil: 0,
        encUtil: 0,
        decUtil: 0,
        jpgUtil: 0,
        ofaUtil: 0,
    };
    let mut found = vec![empty; info.processSamplesCount as usize];
    info.procUtilArray = found.as_mut_ptr();
    // SAFETY: the array has room for the number of samples that `info` says, and NVML writes no more than that.
    nvml_try(unsafe { call(handle(device), &raw mut info) })?;
    found.truncate(info.processSamplesCount as usize);
    Ok(found.iter().map(|s| Busy { pid: s.pid, at_us: s.timeStamp, sm: s.smUtil }).collect())
}

/// A C string in a fixed array; what is not ASCII is left out.
fn text(chars: &[c_char]) -> String {
    let bytes = chars.iter().map(|c| c.cast_unsigned()).take_while(|b| *b != 0);
    bytes.filter(u8::is_ascii).map(char::from).collect()
}
