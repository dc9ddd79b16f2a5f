//! Streams and events.
//!
//! A card runs a process's work in the order of its arrival (see `fake_state::live::work`), so a stream is a mark in
//! that order: it is done when the work up to its last launch is. The default streams, legacy and per thread, stand for all
//! work of the process on the card.
#![expect(unsafe_code, reason = "exports entry points under their C names")]

use std::ffi::{c_int, c_uint, c_void};
use std::sync::Arc;

use crate::abi::{Code, Device, Handle, HostFunction, Opaque, Out};
use crate::context::{Cell, current};
use crate::driver::Driver;
use crate::gate::{entry, open_entry, streamed};

/// What stream 0 means to an entry point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Default {
    Legacy,
    Thread,
}

/// A created stream.
#[derive(Debug)]
pub(crate) struct Stream {
    pub(crate) context: Handle,
    pub(crate) ordinal: usize,
    mark: u64,
    flags: c_uint,
    priority: c_int,
    /// The capture that it takes part in.
    pub(crate) capture: Option<u64>,
}

/// A created event.
#[derive(Debug)]
pub(crate) struct Event {
    pub(crate) context: Handle,
    timing: bool,
    record: Option<Record>,
    /// Recorded in a capture: what waits for it joins that.
    pub(crate) capture: Option<u64>,
}

/// Where an event was recorded last.
#[derive(Clone, Copy, Debug)]
struct Record {
    card: usize,
    mark: u64,
    at: u64,
    /// When it happened, once that was seen.
    happened: Option<u64>,
}

impl Record {
    fn look(&mut self, live: &fake_state::live::Live) {
        if self.happened.is_none() {
            self.happened = live.done_at(self.card, self.mark).map(|t| t.max(self.at));
        }
    }
}

/// A stream argument resolved.
#[derive(Debug)]
pub(crate) struct Target {
    /// None for the default streams.
    pub(crate) stream: Option<Handle>,
    pub(crate) context: Handle,
    pub(crate) ordinal: usize,
    pub(crate) capture: Option<u64>,
}

/// `CU_STREAM_LEGACY` and `CU_STREAM_PER_THREAD`.
const SPECIAL: [Handle; 3] = [Handle(0), Handle(1), Handle(2)];

impl Driver {
    pub(crate) fn target(&self, stream: Handle) -> Result<Target, Code> {
        if SPECIAL.contains(&stream) {
            let context = current()?;
            return Ok(Target {
                stream: None,
                context: context.handle,
                ordinal: context.ordinal,
                capture: None,
            });
        }
        let known = self.objects.streams.get(&stream).ok_or(Code::INVALID_HANDLE)?;
        let (context, ordinal, capture) = (known.context, known.ordinal, known.capture);
        Ok(Target { stream: Some(stream), context, ordinal, capture })
    }

    fn card(&self, ordinal: usize) -> usize {
        self.cards[ordinal].index
    }

    /// Hands work in on a stream that does not capture.
    pub(crate) fn submit(&mut self, target: &Target, ns: u64) {
        let mark = self.live.submit(self.card(target.ordinal), ns);
        if let Some(stream) = target.stream.and_then(|s| self.objects.streams.get_mut(&s)) {
            stream.mark = mark;
        }
        self.look_at_events();
    }

    /// Notes when the events happened that have: the card does not remember for long.
    fn look_at_events(&mut self) {
        let live = self.live;
        let (events, pending) = (&mut self.objects.events, &mut self.objects.pending_events);
        pending.retain(|event| {
            let Some(record) = events.get_mut(event).and_then(|e| e.record.as_mut()) else { return false };
            record.look(live);
            record.happened.is_none()
        });
    }

    /// The mark up to which the stream's work has to be done.
    fn mark(&self, target: &Target) -> (usize, u64) {
        let card = self.card(target.ordinal);
        let own = target.stream.and_then(|s| self.objects.streams.get(&s)).map(|s| s.mark);
        (card, own.unwrap_or_else(|| self.live.mark(card)))
    }

    fn make_stream(
        &mut self,
        out: Out<Handle>,
        flags: c_uint,
        priority: c_int,
        context: &Arc<Cell>,
    ) -> Result<(), Code> {
        out.check()?;
        if flags > 1 {
            return Err(Code::INVALID_VALUE);
        }
        let handle = self.handle();
        let mark = self.live.mark(self.card(context.ordinal));
        let (context, ordinal) = (context.handle, context.ordinal);
        let stream = Stream { context, ordinal, mark, flags, priority, capture: None };
        self.objects.streams.insert(handle, stream);
        out.put(handle)
    }

    pub(crate) fn record_event(&mut self, event: Handle, stream: Handle) -> Result<(), Code> {
        let target = self.target(stream)?;
        let (card, mark) = self.mark(&target);
        let at = fake_state::live::work::now(self.live.region());
        let happened = self.live.is_done(card, mark).then_some(at);
        let known = self.objects.events.get_mut(&event).ok_or(Code::INVALID_HANDLE)?;
        if known.context != target.context {
            return Err(Code::INVALID_HANDLE);
        }
        known.capture = target.capture;
        if target.capture.is_none() {
            known.record = Some(Record { card, mark, at, happened });
            let pending = &mut self.objects.pending_events;
            if happened.is_none() && !pending.contains(&event) {
                pending.push(event);
            }
        }
        Ok(())
    }

    fn event(&self, event: Handle) -> Result<(Option<Record>, Option<u64>), Code> {
        let event = self.objects.events.get(&event).ok_or(Code::INVALID_HANDLE)?;
        Ok((event.record, event.capture))
    }

    /// When a recorded event happened; none while it did not.
    fn event_time(&self, event: Handle) -> Result<Option<u64>, Code> {
        let event = self.objects.events.get(&event).ok_or(Code::INVALID_HANDLE)?;
        let record = event.record.ok_or(Code::INVALID_HANDLE)?;
        if !event.timing {
            return Err(Code::INVALID_HANDLE);
        }
        let mut record = record;
        record.look(self.live);
        Ok(record.happened)
    }
}

/// Waits for a mark without the driver's lock, then lets pools give back what they keep too much of.
fn wait(find: impl FnOnce(&mut Driver) -> Result<(usize, u64), Code>) -> Result<(), Code> {
    let (live, card, mark) = {
        let mut guard = crate::gate::driver();
        let driver = guard.as_mut().ok_or(Code::NOT_INITIALIZED)?;
        let (card, mark) = find(driver)?;
        (driver.live, card, mark)
    };
    live.wait(card, mark);
    if let Some(driver) = crate::gate::driver().as_mut() {
        driver.synchronised();
    }
    Ok(())
}

fn synchronize_stream(stream: Handle) -> Result<(), Code> {
    wait(|driver| {
        let target = driver.target(stream)?;
        driver.refuse_on(target.capture)?;
        Ok(driver.mark(&target))
    })
}

fn synchronize_context(context: Option<Handle>) -> Result<(), Code> {
    wait(|driver| {
        let ordinal = match context.filter(|c| *c != Handle(0)) {
            None => current()?.ordinal,
            Some(context) => driver.contexts.get(&context).ok_or(Code::INVALID_CONTEXT)?.cell.ordinal,
        };
        driver.refuse_during_capture()?;
        let card = driver.card(ordinal);
        Ok((card, driver.live.mark(card)))
    })
}

/// Calls a function of the program when the work before it is done.
fn launch_host(stream: Handle, function: HostFunction, data: *mut c_void) -> Result<(), Code> {
    let function = function.ok_or(Code::INVALID_VALUE)?;
    let (live, card, mark) = {
        let mut guard = crate::gate::driver();
        let driver = guard.as_mut().ok_or(Code::NOT_INITIALIZED)?;
        let target = driver.target(stream)?;
        if let Some(capture) = target.capture {
            return driver.capture_host(capture);
        }
        let (card, mark) = driver.mark(&target);
        (driver.live, card, mark)
    };
    let data = data.expose_provenance();
    std::thread::spawn(move || {
        live.wait(card, mark);
        function(std::ptr::with_exposed_provenance_mut(data));
    });
    Ok(())
}

open_entry! {
    fn cuStreamSynchronize(stream: Handle) {
        synchronize_stream(stream)
    }

    fn cuStreamSynchronize_ptsz(stream: Handle) {
        synchronize_stream(stream)
    }

    fn cuCtxSynchronize() {
        synchronize_context(None)
    }

    fn cuCtxSynchronize_v2(context: Handle) {
        synchronize_context(Some(context))
    }

    fn cuEventSynchronize(event: Handle) {
        wait(|driver| {
            let (record, capture) = driver.event(event)?;
            driver.refuse_on(capture)?;
            // An event that was never recorded is done.
            Ok(record.map_or((0, 0), |r| (r.card, r.mark)))
        })
    }

    fn cuLaunchHostFunc(stream: Handle, function: HostFunction, data: *mut c_void) {
        launch_host(stream, function, data)
    }

    fn cuLaunchHostFunc_ptsz(stream: Handle, function: HostFunction, data: *mut c_void) {
        launch_host(stream, function, data)
    }
}

entry! {
    fn cuStreamCreate(out: Out<Handle>, flags: c_uint) |driver| {
        let context = current()?;
        driver.make_stream(out, flags, 0, &context)
    }

    fn cuStreamCreateWithPriority(out: Out<Handle>, flags: c_uint, priority: c_int) |driver| {
        let context = current()?;
        driver.make_stream(out, flags, priority.clamp(-5, 0), &context)
    }

    fn cuGreenCtxStreamCreate(out: Out<Handle>, green: Handle, flags: c_uint, priority: c_int) |driver| {
        let context = driver.green_context(green)?;
        driver.make_stream(out, flags, priority.clamp(-5, 0), &context)
    }

    fn cuStreamDestroy_v2(stream: Handle) |driver| {
        driver.objects.streams.remove(&stream).map(|_| ()).ok_or(Code::INVALID_HANDLE)
    }

    fn cuStreamDestroy(stream: Handle) |driver| {
        driver.objects.streams.remove(&stream).map(|_| ()).ok_or(Code::INVALID_HANDLE)
    }

    // 1: no timing.
    fn cuEventCreate(out: Out<Handle>, flags: c_uint) |driver| {
        out.check()?;
        let context = current()?.handle;
        let handle = driver.handle();
        let timing = flags & 2 == 0;
        driver.objects.events.insert(handle, Event { context, timing, record: None, capture: None });
        out.put(handle)
    }

    fn cuEventDestroy_v2(event: Handle) |driver| {
        driver.objects.events.remove(&event).map(|_| ()).ok_or(Code::INVALID_HANDLE)
    }

    fn cuEventDestroy(event: Handle) |driver| {
        driver.objects.events.remove(&event).map(|_| ()).ok_or(Code::INVALID_HANDLE)
    }

    fn cuEventQuery(event: Handle) |driver| {
        let (record, capture) = driver.event(event)?;
        driver.refuse_on(capture)?;
        match record {
            Some(r) if !driver.live.is_done(r.card, r.mark) => Err(Code::NOT_READY),
            _ => Ok(()),
        }
    }

    fn cuEventElapsedTime(out: Out<f32>, start: Handle, end: Handle) |driver| {
        elapsed(driver, out, start, end)
    }

    fn cuEventElapsedTime_v2(out: Out<f32>, start: Handle, end: Handle) |driver| {
        elapsed(driver, out, start, end)
    }
}

streamed! {
    fn cuStreamQuery / cuStreamQuery_ptsz(stream: Handle) |driver, _| {
        let target = driver.target(stream)?;
        driver.refuse_on(target.capture)?;
        let (card, mark) = driver.mark(&target);
        if driver.live.is_done(card, mark) { Ok(()) } else { Err(Code::NOT_READY) }
    }

    fn cuEventRecord / cuEventRecord_ptsz(event: Handle, stream: Handle) |driver, _| {
        driver.record_event(event, stream)
    }

    fn cuEventRecordWithFlags / cuEventRecordWithFlags_ptsz(event: Handle, stream: Handle, _flags: c_uint) |driver, _| {
        driver.record_event(event, stream)
    }

    fn cuStreamWaitEvent / cuStreamWaitEvent_ptsz(stream: Handle, event: Handle, _flags: c_uint) |driver, _| {
        let target = driver.target(stream)?;
        let capture = driver.objects.events.get(&event).ok_or(Code::INVALID_HANDLE)?.capture;
        if let (Some(capture), Some(stream)) = (capture, target.stream) {
            driver.join_capture(stream, capture);
        }
        Ok(())
    }

    fn cuStreamGetFlags / cuStreamGetFlags_ptsz(stream: Handle, flags: Out<c_uint>) |driver, _| {
        let target = driver.target(stream)?;
        flags.put(target.stream.and_then(|s| driver.objects.streams.get(&s)).map_or(0, |s| s.flags))
    }

    fn cuStreamGetPriority / cuStreamGetPriority_ptsz(stream: Handle, priority: Out<c_int>) |driver, _| {
        let target = driver.target(stream)?;
        priority.put(target.stream.and_then(|s| driver.objects.streams.get(&s)).map_or(0, |s| s.priority))
    }

    fn cuStreamGetCtx / cuStreamGetCtx_ptsz(stream: Handle, context: Out<Handle>) |driver, _| {
        context.put(driver.target(stream)?.context)
    }

    fn cuStreamGetDevice / cuStreamGetDevice_ptsz(stream: Handle, device: Out<Device>) |driver, _| {
        device.put(Device::try_from(driver.target(stream)?.ordinal).unwrap_or(0))
    }

    // Ids of the default streams are small, those of created ones their handles.
    fn cuStreamGetId / cuStreamGetId_ptsz(stream: Handle, id: Out<u64>) |driver, flavour| {
        let target = driver.target(stream)?;
        let own = if flavour == Default::Thread || stream == Handle(2) { 2 } else { 1 };
        id.put(target.stream.map_or(own, |s| s.0 as u64))
    }

    fn cuStreamAttachMemAsync / cuStreamAttachMemAsync_ptsz(
        stream: Handle, _address: u64, _length: usize, _flags: c_uint,
    ) |driver, _| {
        driver.target(stream).map(|_| ())
    }

    fn cuStreamGetAttribute / cuStreamGetAttribute_ptsz(stream: Handle, _attribute: c_uint, value: Opaque) |driver, _| {
        driver.target(stream)?;
        value.cast().put(0_u32)
    }

    fn cuStreamSetAttribute / cuStreamSetAttribute_ptsz(stream: Handle, _attribute: c_uint, _value: Opaque) |driver, _| {
        driver.target(stream).map(|_| ())
    }
}

/// Milliseconds between two events.
fn elapsed(driver: &Driver, out: Out<f32>, start: Handle, end: Handle) -> Result<(), Code> {
    let (Some(from), Some(to)) = (driver.event_time(start)?, driver.event_time(end)?) else {
        return Err(Code::NOT_READY);
    };
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        reason = "the interface speaks f32 milliseconds"
    )]
    let ms = (to.saturating_sub(from) as f64 / 1e6) as f32;
    out.put(ms)
}
