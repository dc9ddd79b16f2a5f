//! Measuring launches: a pair of events around one.
//!
//! Nothing is measured in a stream under capture, where an event would become part of the graph. What is done to events
//! is done with the thread's capture mode set to relaxed, so that no capture is invalidated which is under way in another
//! stream, or which another thread begins meanwhile.

#![expect(unsafe_code, reason = "calls the driver")]

use core::ffi::{c_int, c_uint};
use core::ptr::{null_mut, with_exposed_provenance_mut};
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize};

use mullion_pace::{Key, Measurement, Progress, Sample};

use super::calls::PER_THREAD;
use crate::cuda::{CUcontext, CUdevice, CUenum, CUevent, CUresult, CUstream};
use crate::driver::function;
use crate::memory;
use crate::sys::{clock, sleep_ns};

/// An address as the driver's handles are.
pub(crate) type Handle = usize;

/// What became of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Query {
    Done,
    NotYet,
    Failed,
}

/// What is asked of the driver. Tests have their own.
pub(crate) trait Events {
    /// Whether launches can be measured at all.
    fn usable(&self) -> bool;
    /// The current context, 0 = none.
    fn context(&self) -> Handle;
    fn create(&self) -> Option<Handle>;
    /// Destroys an event of `context`, which lives and need not be the current one.
    fn destroy(&self, event: Handle, context: Handle);
    fn record(&self, event: Handle, stream: Handle) -> bool;
    fn query(&self, event: Handle) -> Query;
    fn elapsed_ns(&self, start: Handle, stop: Handle) -> Option<u64>;
    /// Sets the thread's capture mode; the one before it.
    fn exchange_mode(&self, mode: CUenum) -> CUenum;
    /// Whether what is put into `stream` is captured instead of run.
    fn capturing(&self, stream: Handle) -> bool;
    /// Threads that the current card can hold at once.
    fn resident_threads(&self) -> Option<u64>;
}

/// The driver itself, with the current context, or another one that is made the current one for a question.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Driver {
    /// 0 = the current one.
    other: Handle,
}

impl Driver {
    pub(crate) const HERE: Self = Self { other: 0 };

    /// With the context that `stream` belongs to: no other one's events can be recorded in it.
    pub(super) fn at(stream: Handle) -> Self {
        let other = context_of(stream).filter(|context| *context != Self::HERE.context());
        Self { other: other.unwrap_or(0) }
    }

    fn within<T>(self, ask: impl FnOnce() -> Option<T>) -> Option<T> {
        if self.other == 0 { ask() } else { memory::within(self.other as u64, ask) }
    }
}

/// `CU_STREAM_CAPTURE_MODE_RELAXED`.
const RELAXED: CUenum = 2;
/// `CUDA_ERROR_NOT_READY`.
const NOT_READY: CUresult = CUresult(600);

impl Events for Driver {
    fn usable(&self) -> bool {
        function!(cuThreadExchangeStreamCaptureMode: unsafe extern "C" fn(*mut CUenum) -> CUresult).is_some()
            && function!(cuEventElapsedTime: unsafe extern "C" fn(*mut f32, CUevent, CUevent) -> CUresult)
                .is_some()
    }

    fn context(&self) -> Handle {
        if self.other != 0 {
            return self.other;
        }
        let mut context = null_mut();
        let Some(get) = function!(cuCtxGetCurrent: unsafe extern "C" fn(*mut CUcontext) -> CUresult) else {
            return 0;
        };
        // SAFETY: a place for the answer.
        let result = unsafe { get(&raw mut context) };
        if result.is_ok() { context.expose_provenance() } else { 0 }
    }

    fn create(&self) -> Option<Handle> {
        let create = function!(cuEventCreate: unsafe extern "C" fn(*mut CUevent, c_uint) -> CUresult)?;
        let mut event = null_mut();
        self.within(|| {
            // SAFETY: a place for the answer.
            unsafe { create(&raw mut event, 0) }.is_ok().then(|| event.expose_provenance())
        })
    }

    fn destroy(&self, event: Handle, context: Handle) {
        let Some(destroy) = function!(cuEventDestroy_v2: unsafe extern "C" fn(CUevent) -> CUresult) else {
            return;
        };
        // SAFETY: an event of ours, which nobody else has any more.
        let _ =
            Self { other: context }.within(|| Some(unsafe { destroy(with_exposed_provenance_mut(event)) }));
    }

    fn record(&self, event: Handle, stream: Handle) -> bool {
        let Some(record) = function!(cuEventRecord: unsafe extern "C" fn(CUevent, CUstream) -> CUresult)
        else {
            return false;
        };
        let (event, stream) = (with_exposed_provenance_mut(event), with_exposed_provenance_mut(stream));
        // SAFETY: an event of ours and the stream that the program launches into.
        self.within(|| unsafe { record(event, stream) }.is_ok().then_some(())).is_some()
    }

    fn query(&self, event: Handle) -> Query {
        let Some(query) = function!(cuEventQuery: unsafe extern "C" fn(CUevent) -> CUresult) else {
            return Query::Failed;
        };
        // SAFETY: an event of ours, in a context that lives.
        match self.within(|| Some(unsafe { query(with_exposed_provenance_mut(event)) })) {
            Some(CUresult::SUCCESS) => Query::Done,
            Some(NOT_READY) => Query::NotYet,
            _ => Query::Failed,
        }
    }

    fn elapsed_ns(&self, start: Handle, stop: Handle) -> Option<u64> {
        let elapsed =
            function!(cuEventElapsedTime: unsafe extern "C" fn(*mut f32, CUevent, CUevent) -> CUresult)?;
        let mut ms = 0.0_f32;
        let (start, stop) = (with_exposed_provenance_mut(start), with_exposed_provenance_mut(stop));
        // SAFETY: two events of ours that have happened.
        self.within(|| unsafe { elapsed(&raw mut ms, start, stop) }.is_ok().then_some(()))?;
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "the cast saturates; the driver gives milliseconds"
        )]
        Some((ms * 1_000_000.0) as u64)
    }

    fn exchange_mode(&self, mode: CUenum) -> CUenum {
        let mut mode = mode;
        if let Some(exchange) =
            function!(cuThreadExchangeStreamCaptureMode: unsafe extern "C" fn(*mut CUenum) -> CUresult)
        {
            // SAFETY: reads and writes the mode.
            let _ = unsafe { exchange(&raw mut mode) };
        }
        mode
    }

    fn capturing(&self, stream: Handle) -> bool {
        let Some(ask) =
            function!(cuStreamIsCapturing: unsafe extern "C" fn(CUstream, *mut CUenum) -> CUresult)
        else {
            return false;
        };
        let mut status = 0;
        // SAFETY: the stream that the program launches into, and a place for the answer.
        let result = unsafe { ask(with_exposed_provenance_mut(stream), &raw mut status) };
        // An error means that the launch will fail as well: the default stream beside a capture.
        !result.is_ok() || status != 0
    }

    fn resident_threads(&self) -> Option<u64> {
        let device = self.within(current_device)?;
        let attribute = function!(
            cuDeviceGetAttribute: unsafe extern "C" fn(*mut c_int, CUenum, CUdevice) -> CUresult
        )?;
        let ask = |which| {
            let mut value = 0;
            // SAFETY: a place for the answer.
            let result = unsafe { attribute(&raw mut value, which, device) };
            u64::try_from(value).ok().filter(|_| result.is_ok())
        };
        Some(ask(MULTIPROCESSOR_COUNT)? * ask(MAX_THREADS_PER_MULTIPROCESSOR)?)
    }
}

/// `CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT` and `_MAX_THREADS_PER_MULTIPROCESSOR`.
const MULTIPROCESSOR_COUNT: CUenum = 16;
const MAX_THREADS_PER_MULTIPROCESSOR: CUenum = 39;

/// The card of the current context.
pub(super) fn current_device() -> Option<CUdevice> {
    let current = function!(cuCtxGetDevice: unsafe extern "C" fn(*mut CUdevice) -> CUresult)?;
    let mut device = -1;
    // SAFETY: a place for the answer.
    unsafe { current(&raw mut device) }.is_ok().then_some(device)
}

/// The context of a stream that the program made; the default ones are the current context's.
pub(super) fn context_of(stream: Handle) -> Option<Handle> {
    if stream <= PER_THREAD {
        return None;
    }
    let ask = function!(cuStreamGetCtx: unsafe extern "C" fn(CUstream, *mut CUcontext) -> CUresult)?;
    let mut context = null_mut();
    // SAFETY: the stream that the program launches into, and a place for the answer.
    let result = unsafe { ask(with_exposed_provenance_mut(stream), &raw mut context) };
    Some(context.expose_provenance()).filter(|context| result.is_ok() && *context != 0)
}

/// Cards that this process sees.
pub(super) fn device_count() -> Option<c_int> {
    let ask = function!(cuDeviceGetCount: unsafe extern "C" fn(*mut c_int) -> CUresult)?;
    let mut count = 0;
    // SAFETY: a place for the answer.
    unsafe { ask(&raw mut count) }.is_ok().then_some(count)
}

const FREE: u32 = 0;
const TAKEN: u32 = 1;
const FLYING: u32 = 2;
/// As those two, of a context that may be ending.
const FREE_HELD: u32 = 3;
const FLYING_HELD: u32 = 4;
/// Another context takes the place: who ends the one that it is of waits until its events are destroyed.
const LEFT: u32 = 5;

/// Between two looks at a place that is [`LEFT`]: about as long as that takes.
const LEFT_NS: u64 = 10_000;

/// One measurement, or the place for one. Its events stay for the next in the same context.
#[derive(Debug)]
struct Slot {
    state: AtomicU32,
    /// A [`Sample`], as a number.
    sample: AtomicU32,
    card: AtomicUsize,
    context: AtomicUsize,
    start: AtomicUsize,
    stop: AtomicUsize,
    key: AtomicU64,
    paid_ns: AtomicU64,
    host_ns: AtomicU64,
    /// When the launch went.
    from: AtomicU64,
    /// When the launch was first seen to have begun, coarse ns.
    began: AtomicU64,
}

impl Slot {
    const fn new() -> Self {
        Self {
            state: AtomicU32::new(FREE),
            sample: AtomicU32::new(0),
            card: AtomicUsize::new(0),
            context: AtomicUsize::new(0),
            start: AtomicUsize::new(0),
            stop: AtomicUsize::new(0),
            key: AtomicU64::new(0),
            paid_ns: AtomicU64::new(0),
            host_ns: AtomicU64::new(0),
            from: AtomicU64::new(0),
            began: AtomicU64::new(0),
        }
    }

    fn is(&self, state: u32) -> bool {
        self.state.load(Relaxed) == state
    }

    fn is_of(&self, context: Handle) -> bool {
        self.context.load(Relaxed) == context
    }

    fn key(&self) -> Key {
        Key::from_raw(self.key.load(Relaxed))
    }

    fn measurement(&self, ns: u64) -> Measurement {
        Measurement {
            key: self.key(),
            ns,
            host_ns: self.host_ns.load(Relaxed),
            paid_ns: self.paid_ns.load(Relaxed),
            sample: sample_of(self.sample.load(Relaxed)),
        }
    }

    fn take(&self, from: u32) -> bool {
        self.change(from, TAKEN)
    }

    fn change(&self, from: u32, to: u32) -> bool {
        self.state.compare_exchange(from, to, AcqRel, Relaxed).is_ok()
    }

    fn put(&self, state: u32) {
        self.state.store(state, Release);
    }

    /// Destroys the events of a place that is [`LEFT`], and takes it.
    fn clear(&self, events: &dyn Events) {
        let context = self.context.load(Relaxed);
        // It may have lost them since it was looked at.
        if context != 0 {
            relaxed(events, || {
                events.destroy(self.start.load(Relaxed), context);
                events.destroy(self.stop.load(Relaxed), context);
            });
        }
        self.context.store(0, Relaxed);
        self.put(TAKEN);
    }

    /// Has two events in `context`.
    fn prepare(&self, context: Handle, events: &dyn Events) -> bool {
        if self.context.load(Relaxed) == context {
            return true;
        }
        self.context.store(0, Relaxed);
        let (Some(start), Some(stop)) = (events.create(), events.create()) else { return false };
        self.start.store(start, Relaxed);
        self.stop.store(stop, Relaxed);
        self.context.store(context, Relaxed);
        true
    }

    /// How the measurement ended, of a place that is taken; `None` = it has not.
    fn ended(&self, events: &dyn Events) -> Option<Ended> {
        let (start, stop) = (self.start.load(Relaxed), self.stop.load(Relaxed));
        let ns = match events.query(stop) {
            Query::NotYet => return None,
            Query::Done => events.elapsed_ns(start, stop),
            Query::Failed => {
                self.context.store(0, Relaxed);
                None
            }
        };
        let found = ns.map(|ns| self.measurement(ns)).ok_or_else(|| self.key());
        Some(Ended { card: self.card.load(Relaxed), found })
    }
}

/// A measurement that ended.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ended {
    pub(super) card: usize,
    /// Or whose events failed.
    pub(super) found: Result<Measurement, Key>,
}

/// What became of the wish to measure a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Begun {
    Measured,
    /// All places are taken.
    NoPlace,
    /// The driver refused the launch.
    Refused,
    /// No events could be put around one that went.
    Failed,
}

/// Launches that were on their way when their context was ended, which waits for them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Lost {
    pub(super) card: usize,
    /// When the first of them went.
    pub(super) from: u64,
    /// What they paid together.
    pub(super) paid_ns: u64,
}

/// A [`Sample`] as a number, and back.
pub(super) const fn number_of(sample: Sample) -> u32 {
    match sample {
        Sample::No => 0,
        Sample::First => 1,
        Sample::Chance => 2,
        Sample::Close => 3,
    }
}

pub(super) const fn sample_of(number: u32) -> Sample {
    match number {
        1 => Sample::First,
        2 => Sample::Chance,
        3 => Sample::Close,
        _ => Sample::No,
    }
}

/// Measurements under way. When all places are taken, a launch is not measured.
#[derive(Debug)]
pub(super) struct Sampler {
    slots: [Slot; 16],
}

/// What is to be measured.
#[derive(Clone, Copy, Debug)]
pub(super) struct Measuring {
    pub(super) card: usize,
    pub(super) key: Key,
    pub(super) stream: Handle,
    pub(super) paid_ns: u64,
    pub(super) sample: Sample,
}

/// Runs `f` with the thread's capture mode relaxed.
fn relaxed<T>(events: &dyn Events, f: impl FnOnce() -> T) -> T {
    let before = events.exchange_mode(RELAXED);
    let value = f();
    events.exchange_mode(before);
    value
}

impl Sampler {
    pub(super) const fn new() -> Self {
        Self { slots: [const { Slot::new() }; 16] }
    }

    /// Whether any measurement is under way in a context.
    pub(super) fn flying(&self, context: Handle) -> bool {
        self.slots.iter().any(|s| s.is(FLYING) && s.is_of(context))
    }

    /// A place for a measurement in `context`, taken: one whose events fit, else one without events, else one of the context that
    /// has most of them. Another context's events go with their place, and what it measures there, so that only happens where
    /// this one has no place at all, or two less than that one: contexts by turns must not make events for ever, and those that
    /// launch no more must not keep the others out.
    fn place(&self, context: Handle, events: &dyn Events) -> Option<&Slot> {
        let free = || self.slots.iter().filter(|s| s.is(FREE));
        if let Some(slot) = free().find(|s| s.is_of(context)).or_else(|| free().find(|s| s.is_of(0))) {
            return Some(slot).filter(|s| s.take(FREE));
        }
        let count = |of: Handle| self.slots.iter().filter(|s| s.is_of(of)).count();
        let own = count(context);
        let least = if own == 0 { 1 } else { own + 2 };
        if own + least > self.slots.len() {
            return None;
        }
        let others = self.slots.iter().filter_map(|s| {
            let state = [FREE, FLYING].into_iter().find(|state| s.is(*state))?;
            Some((count(s.context.load(Relaxed)), state == FREE, s, state))
        });
        let (most, _, slot, state) = others.max_by_key(|(count, is_free, ..)| (*count, *is_free))?;
        (most >= least && slot.change(state, LEFT)).then(|| slot.clear(events))?;
        Some(slot)
    }

    /// Launches by `call` between two events.
    pub(super) fn measure(
        &self,
        what: &Measuring,
        events: &dyn Events,
        call: impl FnOnce() -> CUresult,
    ) -> (CUresult, Begun) {
        let context = events.context();
        let unmeasured = |result: CUresult| if result.is_ok() { Begun::Failed } else { Begun::Refused };
        if context == 0 {
            let result = call();
            return (result, unmeasured(result));
        }
        let Some(slot) = self.place(context, events) else { return (call(), Begun::NoPlace) };
        let from = clock::monotonic_ns();
        slot.from.store(from, Relaxed);
        slot.card.store(what.card, Relaxed);
        slot.key.store(what.key.get(), Relaxed);
        slot.paid_ns.store(what.paid_ns, Relaxed);
        slot.sample.store(number_of(what.sample), Relaxed);
        slot.began.store(0, Relaxed);
        let begun = relaxed(events, || {
            slot.prepare(context, events) && events.record(slot.start.load(Relaxed), what.stream)
        });
        let result = call();
        let mut waits = false;
        let measured = begun
            && result.is_ok()
            && relaxed(events, || {
                waits = events.query(slot.start.load(Relaxed)) == Query::NotYet;
                events.record(slot.stop.load(Relaxed), what.stream)
            });
        // Where the stream has not come to the first event by now, it goes from there to the launch at once.
        let host_ns = if waits { 0 } else { clock::monotonic_ns().saturating_sub(from) };
        slot.host_ns.store(host_ns, Relaxed);
        slot.put(if measured { FLYING } else { FREE });
        (result, if measured { Begun::Measured } else { unmeasured(result) })
    }

    /// Shows the measurements of the current context that have ended to `settle`.
    pub(super) fn poll(&self, events: &dyn Events, mut settle: impl FnMut(Ended)) {
        if !self.slots.iter().any(|s| s.is(FLYING)) {
            return;
        }
        let context = events.context();
        relaxed(events, || {
            for slot in &self.slots {
                if !slot.is_of(context) || !slot.take(FLYING) {
                    continue;
                }
                let ended = slot.ended(events);
                slot.put(if ended.is_some() { FREE } else { FLYING });
                ended.into_iter().for_each(&mut settle);
            }
        });
    }

    /// How far the measurements that tell of `key` have come in the current context.
    pub(super) fn progress(&self, key: Key, now_ns: u64, events: &dyn Events) -> Progress {
        let context = events.context();
        let mut progress = Progress::None;
        for slot in &self.slots {
            let tells = key.is_told_by(slot.key(), sample_of(slot.sample.load(Relaxed)));
            if !tells || !slot.is_of(context) || !slot.take(FLYING) {
                continue;
            }
            let mut began = slot.began.load(Relaxed);
            if began == 0 && relaxed(events, || events.query(slot.start.load(Relaxed))) == Query::Done {
                began = now_ns;
                slot.began.store(now_ns, Relaxed);
            }
            slot.put(FLYING);
            progress = progress.max(match began {
                0 => Progress::Queued,
                began => Progress::Running(now_ns.saturating_sub(began)),
            });
        }
        progress
    }

    /// `key` is gone: what is still measured of it is of nobody who could come again.
    pub(super) fn forget(&self, key: Key) {
        for slot in &self.slots {
            let _ = slot.key.compare_exchange(key.get(), Key::FORGOTTEN.get(), Relaxed, Relaxed);
        }
    }

    /// A context may be ending, and its events with it: they are not touched any more until [`Sampler::ended`]. What it has
    /// measured so far is shown to `settle`. 0 = one of the card `card` that is not known.
    pub(super) fn hold(
        &self,
        context: Handle,
        card: usize,
        events: &dyn Events,
        mut settle: impl FnMut(Ended),
    ) {
        for slot in self.of(context, card) {
            if slot.take(FLYING) {
                // It lives, current or not.
                let ended = relaxed(events, || slot.ended(events));
                // One whose events failed has none any more, and is of no context that could give it back.
                slot.put(match ended {
                    None => FLYING_HELD,
                    Some(_) if slot.is_of(0) => FREE,
                    Some(_) => FREE_HELD,
                });
                ended.into_iter().for_each(&mut settle);
            } else if slot.take(FREE) {
                slot.put(FREE_HELD);
            }
            while slot.state.load(Acquire) == LEFT {
                sleep_ns(LEFT_NS);
            }
        }
    }

    /// The context that was held ended, or not: what went with it.
    pub(super) fn ended(&self, context: Handle, card: usize, gone: bool) -> Option<Lost> {
        let mut lost: Option<Lost> = None;
        for slot in self.of(context, card) {
            let (flew, was_free) = (slot.take(FLYING_HELD), slot.take(FREE_HELD));
            if gone && flew {
                let (from, paid_ns) = (slot.from.load(Relaxed), slot.paid_ns.load(Relaxed));
                let so_far = lost.unwrap_or(Lost { card: slot.card.load(Relaxed), from, paid_ns: 0 });
                let paid_ns = so_far.paid_ns.saturating_add(paid_ns);
                lost = Some(Lost { from: so_far.from.min(from), paid_ns, ..so_far });
            }
            if gone && (flew || was_free) {
                slot.context.store(0, Relaxed);
            }
            if flew || was_free {
                slot.put(if flew && !gone { FLYING } else { FREE });
            }
        }
        lost
    }

    fn of(&self, context: Handle, card: usize) -> impl Iterator<Item = &Slot> {
        self.slots.iter().filter(move |slot| {
            let known = slot.context.load(Relaxed);
            known != 0 && (known == context || (context == 0 && slot.card.load(Relaxed) == card))
        })
    }
}
