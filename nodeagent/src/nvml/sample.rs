//! What cards do now: memory, busyness and processes of each. Asked once per period for the whole node; a call that
//! fails costs what it would have told and nothing else.

use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};

use crate::nvml::{Trouble, sys};

/// Memory of one process on one card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessMemory {
    /// On the host.
    pub pid: u32,
    /// In bytes; `None` where the driver does not say.
    pub bytes: Option<u64>,
}

/// How busy one process kept a card's SMs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Busy {
    /// On the host.
    pub pid: u32,
    /// Unix time in µs of the driver's measurement.
    pub at_us: u64,
    /// Percent of the card's SMs.
    pub sm: u32,
}

/// One card, as far as it answered.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CardSample {
    /// Its uuid.
    pub uuid: String,
    /// Its place in NVML's list.
    pub index: u32,
    /// Product name; empty where the driver does not say.
    pub model: String,
    /// Bytes in all and in use.
    pub memory: Option<(u64, u64)>,
    /// Percent of time in which any kernel ran, and in which memory was read or written.
    pub utilization: Option<(u32, u32)>,
    /// Who holds memory; `None` where the driver does not say.
    pub processes: Option<Vec<ProcessMemory>>,
    /// Measurements of the last seconds, many per process, also ones that were told before; a process that did nothing
    /// has none. `None` where the driver does not say.
    pub busy: Option<Vec<Busy>>,
    /// Calls that failed; a card that cannot do something is no trouble.
    pub troubles: Vec<Trouble>,
}

/// One look at all cards.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sample {
    /// Cards that could be identified.
    pub cards: Vec<CardSample>,
    /// Places of the list whose card does not even say who it is.
    pub nameless: Vec<Trouble>,
}

/// Looks at all cards; measurements of processes are those after `since_us` (Unix time in µs).
///
/// # Errors
/// [`Trouble`] when the driver as a whole does not answer.
pub fn sample(nvml: &Nvml, since_us: u64) -> Result<Sample, Trouble> {
    let count = nvml.device_count().map_err(|e| Trouble::new("nvmlDeviceGetCount_v2", &e))?;
    let mut sample = Sample::default();
    for index in 0..count {
        match card(nvml, index, since_us) {
            Ok(card) => sample.cards.push(card),
            Err(trouble) => sample.nameless.push(trouble),
        }
    }
    Ok(sample)
}

fn card(nvml: &Nvml, index: u32, since_us: u64) -> Result<CardSample, Trouble> {
    let device =
        nvml.device_by_index(index).map_err(|e| Trouble::new("nvmlDeviceGetHandleByIndex_v2", &e))?;
    let uuid = device.uuid().map_err(|e| Trouble::new("nvmlDeviceGetUUID", &e))?;
    let mut troubles = Vec::new();
    let mut ask = Asking { troubles: &mut troubles };
    let model = ask.told("nvmlDeviceGetName", device.name()).unwrap_or_default();
    let memory = ask.told("nvmlDeviceGetMemoryInfo_v2", device.memory_info()).map(|m| (m.total, m.used));
    let utilization =
        ask.told("nvmlDeviceGetUtilizationRates", device.utilization_rates()).map(|u| (u.gpu, u.memory));
    let processes = processes(&device, &mut ask);
    let busy = busy(&device, since_us, &mut ask);
    Ok(CardSample { uuid, index, model, memory, utilization, processes, busy, troubles })
}

struct Asking<'a> {
    troubles: &'a mut Vec<Trouble>,
}

impl Asking<'_> {
    fn told<T>(&mut self, call: &'static str, answer: Result<T, NvmlError>) -> Option<T> {
        match answer {
            Ok(told) => Some(told),
            // With MIG on, or on a card that cannot: nothing failed.
            Err(NvmlError::NotSupported) => None,
            Err(error) => {
                self.troubles.push(Trouble::new(call, &error));
                None
            }
        }
    }
}

fn processes(device: &Device<'_>, ask: &mut Asking<'_>) -> Option<Vec<ProcessMemory>> {
    let lists = [
        ("nvmlDeviceGetComputeRunningProcesses_v3", device.running_compute_processes()),
        ("nvmlDeviceGetGraphicsRunningProcesses_v3", device.running_graphics_processes()),
    ];
    let mut found: Option<Vec<ProcessMemory>> = None;
    for (call, list) in lists {
        let Some(list) = ask.told(call, list) else { continue };
        let found = found.get_or_insert_default();
        for process in list {
            let bytes = match process.used_gpu_memory {
                UsedGpuMemory::Used(bytes) => Some(bytes),
                UsedGpuMemory::Unavailable => None,
            };
            // A process that computes and draws is in both lists with the same sum.
            match found.iter_mut().find(|p| p.pid == process.pid) {
                Some(known) => known.bytes = known.bytes.max(bytes),
                None => found.push(ProcessMemory { pid: process.pid, bytes }),
            }
        }
    }
    found
}

fn busy(device: &Device<'_>, since_us: u64, ask: &mut Asking<'_>) -> Option<Vec<Busy>> {
    match device.process_utilization_stats(since_us) {
        Ok(all) => Some(all.iter().map(|s| Busy { pid: s.pid, at_us: s.timestamp, sm: s.sm_util }).collect()),
        // Nobody did anything since then.
        Err(NvmlError::NotFound) => Some(Vec::new()),
        // Newer cards answer another call only.
        Err(NvmlError::NotSupported) => match sys::processes_utilization(device, since_us) {
            Ok(all) => Some(all),
            Err(NvmlError::NotFound) => Some(Vec::new()),
            Err(NvmlError::FailedToLoadSymbol(_) | NvmlError::FunctionNotFound) => None,
            Err(error) => ask.told("nvmlDeviceGetProcessesUtilizationInfo", Err(error)),
        },
        Err(error) => ask.told("nvmlDeviceGetProcessUtilization", Err(error)),
    }
}
