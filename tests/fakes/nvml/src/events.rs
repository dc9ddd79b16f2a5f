//! Event sets: what is queued in the state file reaches every set that listens to the card.
#![expect(unsafe_code, reason = "exports entry points under their C names")]

use std::collections::BTreeMap;
use std::ffi::{c_uint, c_ulonglong};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use fake_state::Event;
use nvml_wrapper_sys::bindings::{nvmlDevice_st, nvmlEventData_t};

use crate::abi::Out;
use crate::code::Code;
use crate::entry;
use crate::handles::{self, Handle, Identity};
use crate::session::{Session, card_handle};
use crate::usage::NO_INSTANCE;

/// `nvmlEventTypeSingleBitEccError` | `DoubleBitEccError` | `PState` | `XidCriticalError` | `Clock`.
const SUPPORTED: u64 = 1 | 2 | 4 | 8 | 16;

/// How often a waiting call looks at the state file.
const POLL: Duration = Duration::from_millis(20);

/// A card that a set listens to.
#[derive(Clone, Copy)]
struct Watch {
    kinds: u64,
    /// First event not yet delivered.
    next: u64,
}

type Sets = BTreeMap<u64, BTreeMap<String, Watch>>;

/// The live sets by number.
static SETS: Mutex<Sets> = Mutex::new(BTreeMap::new());

fn sets() -> MutexGuard<'static, Sets> {
    SETS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Frees every set, as the last shutdown does.
pub(crate) fn forget_all() {
    sets().clear();
}

/// What the first version of the wait call fills.
#[repr(C)]
#[derive(Clone, Copy)]
struct EventDataV1 {
    device: *mut nvmlDevice_st,
    event_type: c_ulonglong,
    event_data: c_ulonglong,
}

entry! {
    fn nvmlDeviceGetSupportedEventTypes(device: Handle, kinds: Out<c_ulonglong>) |session| {
        session.gpu(device)?;
        kinds.put(SUPPORTED)
    }

    fn nvmlEventSetCreate(set: Out<Handle>) |_| {
        let mut sets = sets();
        // A freed number is taken again, so that handles do not pile up.
        let number = (0..=u64::MAX).find(|n| !sets.contains_key(n)).ok_or(Code::UNKNOWN)?;
        set.put(handles::of(Identity::EventSet { number }))?;
        sets.insert(number, BTreeMap::new());
        Ok(())
    }

    fn nvmlEventSetFree(set: Handle) |_| {
        let number = number(set)?;
        sets().remove(&number).map(drop).ok_or(Code::INVALID_ARGUMENT)
    }

    fn nvmlDeviceRegisterEvents(device: Handle, kinds: c_ulonglong, set: Handle) |session| {
        let card = session.gpu(device)?;
        let number = number(set)?;
        if kinds & !SUPPORTED != 0 {
            return Err(Code::NOT_SUPPORTED);
        }
        let mut sets = sets();
        let watches = sets.get_mut(&number).ok_or(Code::INVALID_ARGUMENT)?;
        let watch = Watch { kinds: 0, next: session.state.next_event };
        watches.entry(card.uuid.clone()).or_insert(watch).kinds |= kinds;
        Ok(())
    }

    fn nvmlEventSetWait(set: Handle, data: Out<EventDataV1>, timeout_ms: c_uint) |_| {
        let (device, event) = wait(set, timeout_ms)?;
        let device = device.pointer();
        data.put(EventDataV1 { device, event_type: event.kind, event_data: event.data })
    }

    fn nvmlEventSetWait_v2(set: Handle, data: Out<nvmlEventData_t>, timeout_ms: c_uint) |_| {
        let (device, event) = wait(set, timeout_ms)?;
        let (gpuInstanceId, computeInstanceId) = event.instance.unwrap_or((NO_INSTANCE, NO_INSTANCE));
        data.put(nvmlEventData_t {
            device: device.pointer(),
            eventType: event.kind,
            eventData: event.data,
            gpuInstanceId,
            computeInstanceId,
        })
    }
}

fn number(set: Handle) -> Result<u64, Code> {
    match handles::identity(set) {
        Some(Identity::EventSet { number }) => Ok(number),
        _ => Err(Code::INVALID_ARGUMENT),
    }
}

/// Blocks until an event for the set is there, or the time is over. No lock is held while it sleeps.
fn wait(set: Handle, timeout_ms: c_uint) -> Result<(Handle, Event), Code> {
    let number = number(set)?;
    let start = Instant::now();
    let timeout = Duration::from_millis(timeout_ms.into());
    loop {
        if let Some(found) = take(number, &Session::now()?)? {
            return Ok(found);
        }
        let left = timeout.saturating_sub(start.elapsed());
        if left.is_zero() {
            return Err(Code::TIMEOUT);
        }
        thread::sleep(left.min(POLL));
    }
}

/// The oldest event that the set has not had yet.
fn take(number: u64, session: &Session) -> Result<Option<(Handle, Event)>, Code> {
    let mut sets = sets();
    let watches = sets.get_mut(&number).ok_or(Code::INVALID_ARGUMENT)?;
    for event in &session.state.events {
        let Some(watch) = watches.get_mut(&event.card) else { continue };
        if event.sequence < watch.next || event.kind & watch.kinds == 0 {
            continue;
        }
        watch.next = event.sequence + 1;
        let Some(card) = session.state.card(&event.card) else { continue };
        return Ok(Some((card_handle(card), event.clone())));
    }
    Ok(None)
}
