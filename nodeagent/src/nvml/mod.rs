//! The NVIDIA driver, behind a thread of its own: NVML blocks, and its handles borrow from it.
//!
//! [`survey`] reads the cards, [`sample`] what they do, [`sys`] holds the few calls that need `unsafe`. The library is loaded anew after it
//! stopped answering, so that a driver that appears or is replaced is picked up.

pub mod sample;
pub mod survey;
pub mod sys;

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use mullion_crds::gpunode::{Card, MigTable};
use nvml_wrapper::bitmasks::event::EventTypes;
use nvml_wrapper::enums::event::XidError;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{EventSet, Nvml};
use tokio::sync::{mpsc as tokio_mpsc, oneshot};
use tracing::{debug, info};

use crate::error::Error;
use crate::metrics::Metrics;
use sample::Sample;

/// How long a caller waits for the thread; a call of the driver that hangs must not hang the agent.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long one wait for an event lasts, and so how late a new card is listened to.
const EVENT_WAIT_MS: u32 = 2000;
/// Pause before the driver is tried again by the event thread.
const EVENT_RETRY: Duration = Duration::from_secs(2);

/// A call that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trouble {
    /// NVML entry point.
    pub call: &'static str,
    /// NVML's name of the answer.
    pub code: &'static str,
    /// The card has fallen off the bus or needs a reset.
    pub lost: bool,
    /// The wrapper's words.
    pub detail: String,
}

impl Trouble {
    fn new(call: &'static str, error: &NvmlError) -> Self {
        let lost = matches!(error, NvmlError::GpuLost | NvmlError::ResetRequired);
        Self { call, code: name(error), lost, detail: error.to_string() }
    }
}

impl From<Trouble> for Error {
    fn from(trouble: Trouble) -> Self {
        Self::Driver { call: trouble.call, code: trouble.code, detail: trouble.detail }
    }
}

/// NVML's own name of an error (`nvmlReturn_t`), or ours for what the wrapper adds.
#[must_use]
pub fn name(error: &NvmlError) -> &'static str {
    match error {
        NvmlError::Uninitialized => "NVML_ERROR_UNINITIALIZED",
        NvmlError::InvalidArg => "NVML_ERROR_INVALID_ARGUMENT",
        NvmlError::NotSupported => "NVML_ERROR_NOT_SUPPORTED",
        NvmlError::NoPermission => "NVML_ERROR_NO_PERMISSION",
        NvmlError::NotFound => "NVML_ERROR_NOT_FOUND",
        NvmlError::InsufficientSize(_) => "NVML_ERROR_INSUFFICIENT_SIZE",
        NvmlError::InsufficientPower => "NVML_ERROR_INSUFFICIENT_POWER",
        NvmlError::DriverNotLoaded => "NVML_ERROR_DRIVER_NOT_LOADED",
        NvmlError::Timeout => "NVML_ERROR_TIMEOUT",
        NvmlError::IrqIssue => "NVML_ERROR_IRQ_ISSUE",
        NvmlError::LibraryNotFound | NvmlError::LibloadingError(_) => "NVML_ERROR_LIBRARY_NOT_FOUND",
        NvmlError::FunctionNotFound | NvmlError::FailedToLoadSymbol(_) => "NVML_ERROR_FUNCTION_NOT_FOUND",
        NvmlError::CorruptedInfoROM => "NVML_ERROR_CORRUPTED_INFOROM",
        NvmlError::GpuLost => "NVML_ERROR_GPU_IS_LOST",
        NvmlError::ResetRequired => "NVML_ERROR_RESET_REQUIRED",
        NvmlError::OperatingSystem => "NVML_ERROR_OPERATING_SYSTEM",
        NvmlError::LibRmVersionMismatch => "NVML_ERROR_LIB_RM_VERSION_MISMATCH",
        NvmlError::InUse => "NVML_ERROR_IN_USE",
        NvmlError::InsufficientMemory => "NVML_ERROR_MEMORY",
        NvmlError::NoData => "NVML_ERROR_NO_DATA",
        NvmlError::Unknown => "NVML_ERROR_UNKNOWN",
        _ => "NVML_ANSWER_UNREADABLE",
    }
}

/// A card that could be identified.
#[derive(Clone, Debug, PartialEq)]
pub struct SeenCard {
    /// What it is; health is left at its default.
    pub card: Card,
    /// Its MIG profiles.
    pub table: Option<MigTable>,
    /// It does not answer.
    pub trouble: Option<Trouble>,
}

/// What the driver told in one look.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Survey {
    /// Version of the driver.
    pub driver_version: String,
    /// Cards that could be identified.
    pub cards: Vec<SeenCard>,
    /// Places of the list whose card does not even say who it is.
    pub nameless: Vec<Trouble>,
}

/// Pids on cards, by uuid.
pub type Pids = BTreeMap<String, Vec<u32>>;

enum Request {
    Survey(oneshot::Sender<Result<Survey, Trouble>>),
    Pids(Vec<String>, oneshot::Sender<Result<Pids, Trouble>>),
    Sample(u64, oneshot::Sender<Result<Sample, Trouble>>),
}

impl Request {
    fn is_abandoned(&self) -> bool {
        match self {
            Self::Survey(reply) => reply.is_closed(),
            Self::Pids(_, reply) => reply.is_closed(),
            Self::Sample(_, reply) => reply.is_closed(),
        }
    }
}

/// The way to the driver's thread. It ends with the last clone.
#[derive(Clone, Debug)]
pub struct DriverHandle {
    requests: mpsc::Sender<Request>,
}

/// An XID that a card reported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct XidSeen {
    /// Uuid of the card.
    pub card: String,
    /// The XID; 999 where the driver does not say which.
    pub xid: u64,
}

impl DriverHandle {
    /// Starts the thread; `library` is loaded when the first request comes.
    ///
    /// # Errors
    /// [`Error::Thread`].
    pub fn start(library: Option<PathBuf>, metrics: Arc<Metrics>) -> Result<Self, Error> {
        let (requests, inbox) = mpsc::channel();
        spawn("nvml", move || serve(&inbox, library.as_deref().map(Path::as_os_str), &metrics))?;
        Ok(Self { requests })
    }

    /// Reads all cards.
    ///
    /// # Errors
    /// [`Error::Driver`] when there is no driver, or it does not answer.
    pub async fn survey(&self) -> Result<Survey, Error> {
        self.ask(Request::Survey, "survey").await
    }

    /// The host pids of compute and graphics processes on each of `cards`. A card that is lost or not listed has none.
    ///
    /// # Errors
    /// [`Error::Driver`]: then nothing is known.
    pub async fn pids(&self, cards: Vec<String>) -> Result<Pids, Error> {
        self.ask(|reply| Request::Pids(cards, reply), "pids").await
    }

    /// What all cards do now; measurements of processes are those after `since_us` (Unix time in µs).
    ///
    /// # Errors
    /// [`Error::Driver`]: then nothing is known.
    pub async fn sample(&self, since_us: u64) -> Result<Sample, Error> {
        self.ask(|reply| Request::Sample(since_us, reply), "sample").await
    }

    async fn ask<T>(
        &self,
        request: impl FnOnce(oneshot::Sender<Result<T, Trouble>>) -> Request,
        what: &'static str,
    ) -> Result<T, Error> {
        let silent = |code| Error::Driver { call: what, code, detail: String::new() };
        let (reply, answer) = oneshot::channel();
        self.requests.send(request(reply)).map_err(|_| silent("NVML_THREAD_ENDED"))?;
        match tokio::time::timeout(PATIENCE, answer).await {
            Ok(Ok(result)) => result.map_err(Error::from),
            Ok(Err(_)) => Err(silent("NVML_THREAD_ENDED")),
            Err(_) => Err(silent("NVML_NO_ANSWER")),
        }
    }
}

/// Whether an error of the driver as a whole means that there is none: then nothing runs on a card. All else says nothing
/// about that.
#[must_use]
pub fn is_absence(code: &str) -> bool {
    matches!(code, "NVML_ERROR_LIBRARY_NOT_FOUND" | "NVML_ERROR_DRIVER_NOT_LOADED")
}

fn spawn(name: &'static str, body: impl FnOnce() + Send + 'static) -> Result<(), Error> {
    let thread = std::thread::Builder::new().name(name.to_owned()).spawn(body);
    thread.map(drop).map_err(|source| Error::Thread { name, source })
}

fn load(library: Option<&OsStr>) -> Result<Nvml, Trouble> {
    let mut builder = Nvml::builder();
    if let Some(path) = library {
        builder.lib_path(path);
    }
    builder.init().map_err(|e| Trouble::new("nvmlInit_v2", &e))
}

fn serve(inbox: &mpsc::Receiver<Request>, library: Option<&OsStr>, metrics: &Metrics) {
    let mut nvml: Option<Nvml> = None;
    let mut cache = survey::Cache::default();
    while let Ok(request) = inbox.recv() {
        // Who asked while the driver hung has gone.
        if request.is_abandoned() {
            continue;
        }
        let driver = match nvml.take() {
            Some(driver) => Ok(driver),
            None => load(library),
        };
        let failed = match (request, driver) {
            (Request::Survey(reply), Ok(driver)) => {
                let result = survey::survey(&driver, &mut cache);
                let failed = result.as_ref().err().cloned();
                if let Ok(found) = &result {
                    let cards = found.cards.iter().filter_map(|c| c.trouble.as_ref());
                    cards.chain(&found.nameless).for_each(|t| metrics.nvml_error(t.call));
                }
                let _ = reply.send(result);
                nvml = Some(driver);
                failed
            }
            (Request::Pids(cards, reply), Ok(driver)) => {
                let result = pids(&driver, &cards);
                let failed = result.as_ref().err().cloned();
                let _ = reply.send(result);
                nvml = Some(driver);
                failed
            }
            (Request::Sample(since_us, reply), Ok(driver)) => {
                let result = sample::sample(&driver, since_us);
                let failed = result.as_ref().err().cloned();
                if let Ok(found) = &result {
                    for card in &found.cards {
                        card.troubles.iter().for_each(|t| metrics.nvml_card_error(t.call, &card.uuid));
                    }
                    found.nameless.iter().for_each(|t| metrics.nvml_error(t.call));
                }
                let _ = reply.send(result);
                nvml = Some(driver);
                failed
            }
            (Request::Sample(_, reply), Err(trouble)) => {
                let _ = reply.send(Err(trouble.clone()));
                Some(trouble)
            }
            (Request::Survey(reply), Err(trouble)) => {
                let _ = reply.send(Err(trouble.clone()));
                Some(trouble)
            }
            (Request::Pids(_, reply), Err(trouble)) => {
                let _ = reply.send(Err(trouble.clone()));
                Some(trouble)
            }
        };
        if let Some(trouble) = failed {
            metrics.nvml_error(trouble.call);
            debug!(call = trouble.call, code = trouble.code, "the driver is loaded anew at the next request");
            // A driver that was replaced never answers through the old handle again.
            nvml = None;
            cache = survey::Cache::default();
        }
    }
}

fn pids(nvml: &Nvml, cards: &[String]) -> Result<Pids, Trouble> {
    let mut all = Pids::new();
    for uuid in cards {
        let device = match nvml.device_by_uuid(uuid.as_str()) {
            Ok(device) => device,
            Err(NvmlError::GpuLost | NvmlError::NotFound | NvmlError::ResetRequired) => {
                all.insert(uuid.clone(), Vec::new());
                continue;
            }
            Err(error) => return Err(Trouble::new("nvmlDeviceGetHandleByUUID", &error)),
        };
        let mut found = Vec::new();
        for (call, processes) in [
            ("nvmlDeviceGetComputeRunningProcesses_v3", device.running_compute_processes()),
            ("nvmlDeviceGetGraphicsRunningProcesses_v3", device.running_graphics_processes()),
        ] {
            match processes {
                Ok(processes) => found.extend(processes.iter().map(|p| p.pid)),
                Err(NvmlError::GpuLost | NvmlError::NotSupported | NvmlError::ResetRequired) => {}
                Err(error) => return Err(Trouble::new(call, &error)),
            }
        }
        all.insert(uuid.clone(), found);
    }
    Ok(all)
}

/// Stops the event thread when dropped (it ends within its current wait).
#[derive(Debug)]
pub struct EventThread(Arc<AtomicBool>);

impl Drop for EventThread {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Starts the thread that listens for XIDs of all cards.
///
/// # Errors
/// [`Error::Thread`].
pub fn listen(
    library: Option<PathBuf>,
    metrics: Arc<Metrics>,
) -> Result<(EventThread, tokio_mpsc::UnboundedReceiver<XidSeen>), Error> {
    let (events, received) = tokio_mpsc::unbounded_channel();
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = Arc::clone(&stop);
    spawn("nvml-events", move || {
        while !stopped.load(Ordering::Relaxed) && !events.is_closed() {
            if let Err(trouble) = listen_once(library.as_deref().map(Path::as_os_str), &stopped, &events) {
                debug!(call = trouble.call, code = trouble.code, "no events from the driver");
                metrics.nvml_error(trouble.call);
                std::thread::sleep(EVENT_RETRY);
            }
        }
    })?;
    Ok((EventThread(stop), received))
}

/// Listens until the set of cards changes or something fails.
fn listen_once(
    library: Option<&OsStr>,
    stopped: &AtomicBool,
    events: &tokio_mpsc::UnboundedSender<XidSeen>,
) -> Result<(), Trouble> {
    let nvml = load(library)?;
    let count = nvml.device_count().map_err(|e| Trouble::new("nvmlDeviceGetCount_v2", &e))?;
    let mut deaf = BTreeMap::new();
    let (set, uuids) = 'without: loop {
        let mut uuids = BTreeMap::new();
        let mut set = nvml.create_event_set().map_err(|e| Trouble::new("nvmlEventSetCreate", &e))?;
        for index in (0..count).filter(|index| !deaf.contains_key(index)) {
            let named = nvml.device_by_index(index).and_then(|device| Ok((device.uuid()?, device)));
            let registered = named.map(|(uuid, device)| {
                uuids.insert(sys::identity(&device), uuid);
                device
            });
            let Ok(device) = registered else { continue };
            // The set is used up by a failure; cards that cannot report must not silence the others.
            let Ok(with) = device.register_events(EventTypes::CRITICAL_XID_ERROR, set) else {
                deaf.insert(index, reports(&nvml, index));
                continue 'without;
            };
            set = with;
        }
        break (set, uuids);
    };
    info!(cards = uuids.len(), of = count, "listening for XIDs");
    // What does not report now may do so when it is well again; what says that it does and was refused will not.
    let missing: Vec<u32> = (0..count)
        .filter(|index| match deaf.get(index) {
            Some(refused) => !refused,
            None => !nvml
                .device_by_index(*index)
                .and_then(|d| d.uuid())
                .is_ok_and(|u| uuids.values().any(|k| *k == u)),
        })
        .collect();
    wait(&nvml, &set, count, &uuids, &missing, stopped, events)
}

/// Whether the card at `index` answers, and says that it reports XIDs.
fn reports(nvml: &Nvml, index: u32) -> bool {
    let supported = nvml.device_by_index(index).and_then(|device| {
        device.uuid()?;
        device.supported_event_types()
    });
    supported.is_ok_and(|types| types.contains(EventTypes::CRITICAL_XID_ERROR))
}

fn wait(
    nvml: &Nvml,
    set: &EventSet<'_>,
    count: u32,
    uuids: &BTreeMap<usize, String>,
    missing: &[u32],
    stopped: &AtomicBool,
    events: &tokio_mpsc::UnboundedSender<XidSeen>,
) -> Result<(), Trouble> {
    while !stopped.load(Ordering::Relaxed) && !events.is_closed() {
        match set.wait(EVENT_WAIT_MS) {
            Ok(event) => {
                let xid = match event.event_data {
                    Some(XidError::Value(xid)) => xid,
                    Some(XidError::Unknown) => 999,
                    None => continue,
                };
                let known = uuids.get(&sys::identity(&event.device)).cloned();
                if let Some(card) = known.or_else(|| event.device.uuid().ok()) {
                    let _ = events.send(XidSeen { card, xid });
                }
            }
            Err(NvmlError::Timeout) => {
                let now = nvml.device_count().map_err(|e| Trouble::new("nvmlDeviceGetCount_v2", &e))?;
                if now != count || missing.iter().any(|index| reports(nvml, *index)) {
                    return Ok(());
                }
            }
            Err(error) => return Err(Trouble::new("nvmlEventSetWait_v2", &error)),
        }
    }
    Ok(())
}
