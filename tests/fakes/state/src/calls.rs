//! The driver's entry points and how often each was called.
//!
//! Counts live beside the state file, one small file per process and user of it, so that a call neither
//! takes the lock nor makes every reader re-read: `<state file>.calls/<pid>`, [`NAMES`]`.len()` native
//! 64-bit counters, the process being the only writer.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use crate::{Error, store};

/// Every entry point of the fake driver, sorted.
pub const NAMES: &[&str] = &[
    "nvmlComputeInstanceDestroy",
    "nvmlComputeInstanceGetInfo_v2",
    "nvmlDeviceCreateGpuInstance",
    "nvmlDeviceCreateGpuInstanceWithPlacement",
    "nvmlDeviceGetArchitecture",
    "nvmlDeviceGetAttributes_v2",
    "nvmlDeviceGetBrand",
    "nvmlDeviceGetComputeInstanceId",
    "nvmlDeviceGetComputeRunningProcesses",
    "nvmlDeviceGetComputeRunningProcesses_v2",
    "nvmlDeviceGetComputeRunningProcesses_v3",
    "nvmlDeviceGetCount",
    "nvmlDeviceGetCount_v2",
    "nvmlDeviceGetCpuAffinity",
    "nvmlDeviceGetCpuAffinityWithinScope",
    "nvmlDeviceGetCudaComputeCapability",
    "nvmlDeviceGetDeviceHandleFromMigDeviceHandle",
    "nvmlDeviceGetEccMode",
    "nvmlDeviceGetGpuInstanceById",
    "nvmlDeviceGetGpuInstanceId",
    "nvmlDeviceGetGpuInstancePossiblePlacements",
    "nvmlDeviceGetGpuInstancePossiblePlacements_v2",
    "nvmlDeviceGetGpuInstanceProfileInfo",
    "nvmlDeviceGetGpuInstanceProfileInfoByIdV",
    "nvmlDeviceGetGpuInstanceProfileInfoV",
    "nvmlDeviceGetGpuInstanceRemainingCapacity",
    "nvmlDeviceGetGpuInstances",
    "nvmlDeviceGetGraphicsRunningProcesses",
    "nvmlDeviceGetGraphicsRunningProcesses_v2",
    "nvmlDeviceGetGraphicsRunningProcesses_v3",
    "nvmlDeviceGetHandleByIndex",
    "nvmlDeviceGetHandleByIndex_v2",
    "nvmlDeviceGetHandleByPciBusId",
    "nvmlDeviceGetHandleByPciBusId_v2",
    "nvmlDeviceGetHandleByUUID",
    "nvmlDeviceGetIndex",
    "nvmlDeviceGetMaxMigDeviceCount",
    "nvmlDeviceGetMemoryAffinity",
    "nvmlDeviceGetMemoryErrorCounter",
    "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetMemoryInfo_v2",
    "nvmlDeviceGetMigDeviceHandleByIndex",
    "nvmlDeviceGetMigMode",
    "nvmlDeviceGetMinorNumber",
    "nvmlDeviceGetName",
    "nvmlDeviceGetNumGpuCores",
    "nvmlDeviceGetNumaNodeId",
    "nvmlDeviceGetNvLinkCapability",
    "nvmlDeviceGetNvLinkRemotePciInfo_v2",
    "nvmlDeviceGetNvLinkState",
    "nvmlDeviceGetNvLinkVersion",
    "nvmlDeviceGetP2PStatus",
    "nvmlDeviceGetPciInfo_v3",
    "nvmlDeviceGetPowerUsage",
    "nvmlDeviceGetProcessUtilization",
    "nvmlDeviceGetProcessesUtilizationInfo",
    "nvmlDeviceGetRunningProcessDetailList",
    "nvmlDeviceGetSupportedEventTypes",
    "nvmlDeviceGetTemperature",
    "nvmlDeviceGetTopologyCommonAncestor",
    "nvmlDeviceGetTotalEccErrors",
    "nvmlDeviceGetUUID",
    "nvmlDeviceGetUtilizationRates",
    "nvmlDeviceIsMigDeviceHandle",
    "nvmlDeviceRegisterEvents",
    "nvmlDeviceSetMigMode",
    "nvmlErrorString",
    "nvmlEventSetCreate",
    "nvmlEventSetFree",
    "nvmlEventSetWait",
    "nvmlEventSetWait_v2",
    "nvmlGpuInstanceCreateComputeInstance",
    "nvmlGpuInstanceCreateComputeInstanceWithPlacement",
    "nvmlGpuInstanceDestroy",
    "nvmlGpuInstanceGetComputeInstanceById",
    "nvmlGpuInstanceGetComputeInstancePossiblePlacements",
    "nvmlGpuInstanceGetComputeInstanceProfileInfo",
    "nvmlGpuInstanceGetComputeInstanceProfileInfoV",
    "nvmlGpuInstanceGetComputeInstanceRemainingCapacity",
    "nvmlGpuInstanceGetComputeInstances",
    "nvmlGpuInstanceGetInfo",
    "nvmlInit",
    "nvmlInitWithFlags",
    "nvmlInit_v2",
    "nvmlShutdown",
    "nvmlSystemGetCudaDriverVersion",
    "nvmlSystemGetCudaDriverVersion_v2",
    "nvmlSystemGetDriverVersion",
    "nvmlSystemGetNVMLVersion",
    "nvmlSystemGetProcessName",
];

/// Place of an entry point in [`NAMES`] and in a counter file.
#[must_use]
pub fn index_of(name: &str) -> Option<usize> {
    NAMES.binary_search(&name).ok()
}

/// Folder of the counter files of a state file.
#[must_use]
pub fn folder(state: &Path) -> PathBuf {
    store::with_suffix(state, ".calls")
}

/// Counts over all processes; entry points that were never called are left out.
///
/// # Errors
/// [`Error::Io`] when a counter file cannot be read.
pub fn sum(state: &Path) -> Result<BTreeMap<String, u64>, Error> {
    let folder = folder(state);
    let mut totals = BTreeMap::new();
    if !folder.exists() {
        return Ok(totals);
    }
    for entry in fs::read_dir(&folder).map_err(store::io("list", &folder))? {
        let path = entry.map_err(store::io("list", &folder))?.path();
        let bytes = fs::read(&path).map_err(store::io("read", &path))?;
        // A process of another build may have left fewer or more counters; `zip` takes what both know.
        for (name, word) in NAMES.iter().zip(bytes.as_chunks::<8>().0) {
            let count = u64::from_ne_bytes(*word);
            if count > 0 {
                *totals.entry((*name).to_owned()).or_default() += count;
            }
        }
    }
    Ok(totals)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_sorted_so_that_they_are_found() {
        assert!(NAMES.is_sorted());
        for (i, name) in NAMES.iter().enumerate() {
            assert_eq!(index_of(name), Some(i), "{name}");
        }
        assert_eq!(index_of("nvmlDeviceGetNothing"), None);
    }

    #[test]
    fn counts_of_all_processes_are_summed() {
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("s.json");
        assert_eq!(sum(&state).unwrap(), BTreeMap::new());
        fs::create_dir(folder(&state)).unwrap();
        let place = index_of("nvmlInit_v2").unwrap();
        for (pid, count) in [("10", 3_u64), ("11", 4)] {
            let mut words = vec![0_u64; NAMES.len()];
            words[place] = count;
            let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_ne_bytes()).collect();
            fs::write(folder(&state).join(pid), bytes).unwrap();
        }
        assert_eq!(sum(&state).unwrap(), BTreeMap::from([("nvmlInit_v2".to_owned(), 7)]));
    }
}
