//! Who uses a card and how it fares.
#![expect(unsafe_code, reason = "exports entry points under their C names")]

use std::ffi::{c_uint, c_ulonglong};
use std::time::{SystemTime, UNIX_EPOCH};

use fake_state::{Card, EccCounts, Process};
use nvml_wrapper_sys::bindings::{
    nvmlProcessInfo_v1_t, nvmlProcessInfo_v2_t, nvmlProcessUtilizationSample_t, nvmlUtilization_t,
};

use crate::abi::{Out, list};
use crate::code::Code;
use crate::device::MIB;
use crate::entry;
use crate::handles::Handle;
use crate::session::{Device, Session};

/// Instance ids of what is in none.
pub(crate) const NO_INSTANCE: c_uint = c_uint::MAX;

/// `nvmlMemoryLocation_t`: device memory holds all of the simulated errors; the first value that does
/// not exist.
const DEVICE_MEMORY: u32 = 2;
const LOCATIONS: u32 = 8;

entry! {
    fn nvmlDeviceGetComputeRunningProcesses(
        device: Handle, count: Out<c_uint>, infos: Out<nvmlProcessInfo_v1_t>,
    ) |session| {
        let all: Vec<_> = processes(&session.device(device)?)
            .map(|p| nvmlProcessInfo_v1_t { pid: p.pid, usedGpuMemory: p.memory_mib.saturating_mul(MIB) })
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

    fn nvmlDeviceGetUtilizationRates(device: Handle, utilization: Out<nvmlUtilization_t>) |session| {
        let card = without_mig(session, device)?;
        utilization.put(nvmlUtilization_t { gpu: card.utilization(), memory: card.memory_utilization })
    }

    fn nvmlDeviceGetProcessUtilization(
        device: Handle,
        samples: Out<nvmlProcessUtilizationSample_t>,
        count: Out<c_uint>,
        _last_seen: c_ulonglong,
    ) |session| {
        let card = without_mig(session, device)?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let timeStamp = c_ulonglong::try_from(now.as_micros()).unwrap_or(c_ulonglong::MAX);
        let all: Vec<_> = card.processes.iter().map(|p| nvmlProcessUtilizationSample_t {
            pid: p.pid,
            timeStamp,
            smUtil: p.sm_percent,
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

/// The processes of a card, or of the GPU instance behind a MIG device.
fn processes<'a>(device: &Device<'a>) -> impl Iterator<Item = &'a Process> + use<'a> {
    let gi = device.mig.map(|(gi, _)| gi.id);
    device.card.processes.iter().filter(move |p| gi.is_none() || p.gpu_instance == gi)
}

fn put_processes(
    session: &Session,
    device: Handle,
    count: Out<c_uint>,
    infos: Out<nvmlProcessInfo_v2_t>,
) -> Result<(), Code> {
    let all: Vec<_> = processes(&session.device(device)?)
        .map(|p| nvmlProcessInfo_v2_t {
            pid: p.pid,
            usedGpuMemory: p.memory_mib.saturating_mul(MIB),
            gpuInstanceId: p.gpu_instance.unwrap_or(NO_INSTANCE),
            computeInstanceId: p.gpu_instance.map_or(NO_INSTANCE, |_| 0),
        })
        .collect();
    list(infos, count, &all, Err(Code::INSUFFICIENT_SIZE))
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
