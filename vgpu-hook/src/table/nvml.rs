//! NVML's view of a card.

use core::ffi::c_uint;

use super::table;
use crate::nvml::{self, DetailList, Device, Memory, MemoryV2, NvmlReturn, ProcessV1, ProcessV2};

table! { Nvml;
    nvmlDeviceGetMemoryInfo(device: Device, memory: *mut Memory) -> NvmlReturn, since 0, View: nvml::memory_v1;
    nvmlDeviceGetMemoryInfo_v2(device: Device, memory: *mut MemoryV2) -> NvmlReturn, since 0, View: nvml::memory_v2;
    nvmlDeviceGetComputeRunningProcesses(device: Device, count: *mut c_uint, list: *mut ProcessV1) -> NvmlReturn, since 0, View: nvml::compute_v1;
    nvmlDeviceGetComputeRunningProcesses_v2(device: Device, count: *mut c_uint, list: *mut ProcessV2) -> NvmlReturn, since 0, View: nvml::compute_v2;
    nvmlDeviceGetComputeRunningProcesses_v3(device: Device, count: *mut c_uint, list: *mut ProcessV2) -> NvmlReturn, since 0, View: nvml::compute_v2;
    nvmlDeviceGetGraphicsRunningProcesses(device: Device, count: *mut c_uint, list: *mut ProcessV1) -> NvmlReturn, since 0, View: nvml::others_v1;
    nvmlDeviceGetGraphicsRunningProcesses_v2(device: Device, count: *mut c_uint, list: *mut ProcessV2) -> NvmlReturn, since 0, View: nvml::others_v2;
    nvmlDeviceGetGraphicsRunningProcesses_v3(device: Device, count: *mut c_uint, list: *mut ProcessV2) -> NvmlReturn, since 0, View: nvml::others_v2;
    nvmlDeviceGetMPSComputeRunningProcesses(device: Device, count: *mut c_uint, list: *mut ProcessV1) -> NvmlReturn, since 0, View: nvml::others_v1;
    nvmlDeviceGetMPSComputeRunningProcesses_v2(device: Device, count: *mut c_uint, list: *mut ProcessV2) -> NvmlReturn, since 0, View: nvml::others_v2;
    nvmlDeviceGetMPSComputeRunningProcesses_v3(device: Device, count: *mut c_uint, list: *mut ProcessV2) -> NvmlReturn, since 0, View: nvml::others_v2;
    nvmlDeviceGetRunningProcessDetailList(device: Device, list: *mut DetailList) -> NvmlReturn, since 0, View: nvml::details;
}
