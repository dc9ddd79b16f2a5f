//! Who uses a card and how it fares.
#![expect(unsafe_code, reason = "exports entry points under their C names")]

use std::ffi::{c_uint, c_ulonglong};
use std::time::{SystemTime, UNIX_EPOCH};

use fake_state::{Card, EccCounts};
use nvml_wrapper_sys::bindings::{
    nvmlProcessDetail_v1_t, nvmlProcessDetailList_v1_t, nvmlProcessInfo_v1_t, nvmlProcessInfo_v2_t,
    nvmlProcessUtilizationInfo_v1_t, nvmlProcessUtilizationSample_t, nvmlProcessesUtilizationInfo_v1_t,
    nvmlUtilization_t,
};

use crate::abi::{Out, length, list, version_of};
use crate::code::Code;
use crate::device::MIB;
use crate::entry;
use crate::handles::Handle;
use crate::live::{self, Busy};
use crate::session::{Device, Session};

/// Instance ids of what is in none.
pub(crate) const NO_INSTANCE: c_uint = c_uint::MAX;

/// `NVML_DEVICE_ARCH_BLACKWELL`: from there on cards answer `nvmlDeviceGetProcessesUtilizationInfo` alone.
const BLACKWELL: u32 = 10;

/// `nvmlMemoryLocation_t`: device memory holds all of the simulated errors; the first value that does
/// not exist.
const DEVICE_MEMORY: u32 = 2;
const LOCATIONS: u32 = 8;

/// Modes of `nvmlProcessDetailList_v1_t`.
const COMPUTE: c_uint = 0;
const GRAPHICS: c_uint = 1;
const MPS: c_uint = 2;

entry! {
    fn nvmlDeviceGetComputeRunningProcesses(
        device: Handle, count: Out<c_uint>, infos: Out<nvmlProcessInfo_v1_t>,
    ) |session| {
        let all: Vec<_> = processes(session, &session.device(device)?)
            .into_iter()
            .map(|p| nvmlProcessInfo_v1_t { pid: p.pid, usedGpuMemory: p.bytes })
            .collect();
        list(infos, count, &all, Err(Code::INSUFFICIENT_SIZE))
    }

    fn nvmlDeviceGetComputeRunningProcesses_v2(
        device: Handle, count: Out<c_uint>, infos: Out<nvmlProcessInfo_v2_t>,
    ) |session| {
        put_processes(session, device, count, infos)
    }

    fn nvmlDeviceGetComputeRunningProcesses_v3(
        device: Handle, count: Out<c_uint>, infos: Out<nvmlProcessInfo_v2_t>,
    ) |session| {
        put_processes(session, device, count, infos)
    }

    fn nvmlDeviceGetGraphicsRunningProcesses(
        device: Handle, count: Out<c_uint>, _infos: Out<nvmlProcessInfo_v1_t>,
    ) |session| {
        put_no_processes(session, device, count)
    }

    fn nvmlDeviceGetGraphicsRunningProcesses_v2(
        device: Handle, count: Out<c_uint>, _infos: Out<nvmlProcessInfo_v2_t>,
    ) |session| {
        put_no_processes(session, device, count)
    }

    fn nvmlDeviceGetGraphicsRunningProcesses_v3(
        device: Handle, count: Out<c_uint>, _infos: Out<nvmlProcessInfo_v2_t>,
    ) |session| {
        put_no_processes(session, device, count)
    }

    fn nvmlDeviceGetRunningProcessDetailList(device: Handle, list: Out<nvmlProcessDetailList_v1_t>) |session| {
        let device = session.device(device)?;
        let asked = list.get()?;
        if asked.version != version_of::<nvmlProcessDetailList_v1_t>(1) {
            return Err(Code::ARGUMENT_VERSION_MISMATCH);
        }
        let all: Vec<_> = match asked.mode {
            COMPUTE => processes(session, &device).into_iter().map(detail).collect(),
            // Nobody draws on the simulated cards, and there is no MPS.
            GRAPHICS | MPS => Vec::new(),
            _ => return Err(Code::INVALID_ARGUMENT),
        };
        list.put(nvmlProcessDetailList_v1_t { numProcArrayEntries: length(&all), ..asked })?;
        let array = Out::from_pointer(asked.procArray);
        if asked.numProcArrayEntries < length(&all) { Err(Code::INSUFFICIENT_SIZE) } else { array.fill(&all) }
    }

    fn nvmlDeviceGetUtilizationRates(device: Handle, utilization: Out<nvmlUtilization_t>) |session| {
        let card = without_mig(session, device)?;
        let live = session.live(card).map_or(0, |(live, place)| live.utilization(place));
        let gpu = card.utilization().saturating_add(live).min(100);
        utilization.put(nvmlUtilization_t { gpu, memory: card.memory_utilization })
    }

    fn nvmlDeviceGetProcessUtilization(
        device: Handle,
        samples: Out<nvmlProcessUtilizationSample_t>,
        count: Out<c_uint>,
        last_seen: c_ulonglong,
    ) |session| {
        let card = without_mig(session, device)?;
        if card.architecture >= BLACKWELL {
            return Err(Code::NOT_SUPPORTED);
        }
        let all: Vec<_> = busy(session, card, last_seen).into_iter().map(|b| nvmlProcessUtilizationSample_t {
            pid: b.pid,
            timeStamp: b.at_us,
            smUtil: b.percent,
            memUtil: 0,
            encUtil: 0,
            decUtil: 0,
        }).collect();
        if all.is_empty() {
            count.put(0)?;
            return Err(Code::NOT_FOUND);
        }
        list(samples, count, &all, Err(Code::INSUFFICIENT_SIZE))
    }

    fn nvmlDeviceGetProcessesUtilizationInfo(
        device: Handle, info: Out<nvmlProcessesUtilizationInfo_v1_t>,
    ) |session| {
        let card = without_mig(session, device)?;
        let asked = info.get()?;
        if asked.version != version_of::<nvmlProcessesUtilizationInfo_v1_t>(1) {
            return Err(Code::ARGUMENT_VERSION_MISMATCH);
        }
        let found = busy(session, card, asked.lastSeenTimeStamp);
        let all: Vec<_> = found.into_iter().map(|b| nvmlProcessUtilizationInfo_v1_t {
            timeStamp: b.at_us,
            pid: b.pid,
            smUtil: b.percent,
            memUtil: 0,
            encUtil: 0,
            decUtil: 0,
            jpgUtil: 0,
            ofaUtil: 0,
        }).collect();
        info.put(nvmlProcessesUtilizationInfo_v1_t { processSamplesCount: length(&all), ..asked })?;
        let array = Out::from_pointer(asked.procUtilArray);
        if all.is_empty() {
            Err(Code::NOT_FOUND)
        } else if array.is_null() || asked.processSamplesCount < length(&all) {
            Err(Code::INSUFFICIENT_SIZE)
        } else {
            array.fill(&all)
        }
    }

    fn nvmlDeviceGetEccMode(device: Handle, current: Out<c_uint>, pending: Out<c_uint>) |session| {
        let ecc = &session.gpu(device)?.ecc;
        current.put(ecc.current.into())?;
        pending.put(ecc.pending.into())
    }

    fn nvmlDeviceGetTotalEccErrors(
        device: Handle, kind: c_uint, counter: c_uint, count: Out<c_ulonglong>,
    ) |session| {
        count.put(ecc_errors(session.gpu(device)?, kind, counter)?)
    }

    fn nvmlDeviceGetMemoryErrorCounter(
        device: Handle, kind: c_uint, counter: c_uint, location: c_uint, count: Out<c_ulonglong>,
    ) |session| {
        let errors = ecc_errors(session.gpu(device)?, kind, counter)?;
        match location {
            DEVICE_MEMORY => count.put(errors),
            0..LOCATIONS => count.put(0),
            _ => Err(Code::INVALID_ARGUMENT),
        }
    }

    fn nvmlDeviceGetTemperature(device: Handle, sensor: c_uint, temperature: Out<c_uint>) |session| {
        let card = session.gpu(device)?;
        if sensor == 0 { temperature.put(card.temperature_c) } else { Err(Code::INVALID_ARGUMENT) }
    }

    fn nvmlDeviceGetPowerUsage(device: Handle, power: Out<c_uint>) |session| {
        power.put(session.gpu(device)?.power_mw)
    }
}

/// A process as the lists show it.
#[derive(Clone, Copy, Debug)]
struct Shown {
    pid: u32,
    bytes: u64,
    gpu_instance: Option<u32>,
}

/// The processes of a card, or of the GPU instance behind a MIG device: the state file's, then on whole cards those that run.
fn processes(session: &Session, device: &Device<'_>) -> Vec<Shown> {
    let gi = device.mig.map(|(gi, _)| gi.id);
    let stated = device.card.processes.iter().filter(|p| gi.is_none() || p.gpu_instance == gi);
    let mut all: Vec<_> = stated
        .map(|p| Shown { pid: p.pid, bytes: p.memory_mib.saturating_mul(MIB), gpu_instance: p.gpu_instance })
        .collect();
    if let Some((live, place)) = session.live(device.card).filter(|_| gi.is_none()) {
        let running = live::running(live, place).into_iter();
        all.extend(running.map(|r| Shown { pid: r.pid, bytes: r.bytes, gpu_instance: None }));
    }
    all
}

/// Busy shares: the state file's processes are as busy now as it says, running ones in the newest window after `since`.
fn busy(session: &Session, card: &Card, since: u64) -> Vec<Busy> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let at_us = u64::try_from(now.as_micros()).unwrap_or(u64::MAX);
    let stated = card.processes.iter().map(|p| Busy { pid: p.pid, at_us, percent: p.sm_percent });
    let mut all: Vec<Busy> = stated.collect();
    if let Some((live, place)) = session.live(card) {
        all.extend(live::busy(live, place, since));
    }
    all
}

fn put_processes(
    session: &Session,
    device: Handle,
    count: Out<c_uint>,
    infos: Out<nvmlProcessInfo_v2_t>,
) -> Result<(), Code> {
    let all: Vec<_> = processes(session, &session.device(device)?)
        .into_iter()
        .map(|p| nvmlProcessInfo_v2_t {
            pid: p.pid,
            usedGpuMemory: p.bytes,
            gpuInstanceId: p.gpu_instance.unwrap_or(NO_INSTANCE),
            computeInstanceId: p.gpu_instance.map_or(NO_INSTANCE, |_| 0),
        })
        .collect();
    list(infos, count, &all, Err(Code::INSUFFICIENT_SIZE))
}

fn detail(shown: Shown) -> nvmlProcessDetail_v1_t {
    nvmlProcessDetail_v1_t {
        pid: shown.pid,
        usedGpuMemory: shown.bytes,
        gpuInstanceId: shown.gpu_instance.unwrap_or(NO_INSTANCE),
        computeInstanceId: shown.gpu_instance.map_or(NO_INSTANCE, |_| 0),
        usedGpuCcProtectedMemory: 0,
    }
}

/// Nobody draws on the simulated cards.
fn put_no_processes(session: &Session, device: Handle, count: Out<c_uint>) -> Result<(), Code> {
    session.device(device)?;
    count.put(0)
}

/// Busy times are not told while MIG is on.
fn without_mig(session: &Session, device: Handle) -> Result<&Card, Code> {
    let card = session.device(device)?.card;
    if card.mig.current { Err(Code::NOT_SUPPORTED) } else { Ok(card) }
}

/// `nvmlMemoryErrorType_t` 0 is corrected, 1 uncorrected; `nvmlEccCounterType_t` 0 volatile, 1 aggregate.
fn ecc_errors(card: &Card, kind: c_uint, counter: c_uint) -> Result<c_ulonglong, Code> {
    if !card.ecc.current {
        return Err(Code::NOT_SUPPORTED);
    }
    let EccCounts { corrected, uncorrected } = match counter {
        0 => &card.ecc.volatile,
        1 => &card.ecc.aggregate,
        _ => return Err(Code::INVALID_ARGUMENT),
    };
    match kind {
        0 => Ok(*corrected),
        1 => Ok(*uncorrected),
        _ => Err(Code::INVALID_ARGUMENT),
    }
}
