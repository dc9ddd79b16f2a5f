//! Stream capture: what a capturing stream is given becomes nodes, and what would wait for it is refused.
//!
//! As in the driver, a refused call (`CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED`) spoils the capture, whose end then answers
//! `CUDA_ERROR_STREAM_CAPTURE_INVALIDATED`. Allocations and context synchronisation are refused to every thread during a global
//! capture, to the capturing thread during a thread-local one, and to nobody during a relaxed one.
#![expect(unsafe_code, reason = "exports entry points under their C names")]

use std::cell::Cell;
use std::ffi::c_uint;
use std::thread::{self, ThreadId};

use crate::abi::{Code, DevicePtr, Handle, Opaque, Out};
use crate::driver::Driver;
use crate::gate::{entry, streamed};
use crate::graph_node::Work;

/// `CUstreamCaptureMode`.
const GLOBAL: c_uint = 0;
const THREAD_LOCAL: c_uint = 1;
const RELAXED: c_uint = 2;

/// `CUstreamCaptureStatus`.
const ACTIVE: c_uint = 1;
const INVALIDATED: c_uint = 2;

/// A capture under way.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Capture {
    graph: Handle,
    mode: c_uint,
    thread: ThreadId,
    origin: Handle,
    spoilt: bool,
}

thread_local! {
    /// What `cuThreadExchangeStreamCaptureMode` set.
    static MODE: Cell<c_uint> = const { Cell::new(GLOBAL) };
}

impl Driver {
    /// Refuses a call that is not safe while a capture is under way.
    pub(crate) fn refuse_during_capture(&mut self) -> Result<(), Code> {
        if self.objects.captures.is_empty() {
            return Ok(());
        }
        let own = MODE.try_with(Cell::get).unwrap_or(GLOBAL);
        if own == RELAXED {
            return Ok(());
        }
        let here = thread::current().id();
        let forbids = |c: &Capture| match c.mode {
            GLOBAL => own == GLOBAL || c.thread == here,
            THREAD_LOCAL => c.thread == here,
            _ => false,
        };
        let mut refused = false;
        for capture in self.objects.captures.values_mut().filter(|c| forbids(c)) {
            capture.spoilt = true;
            refused = true;
        }
        if refused { Err(Code::STREAM_CAPTURE_UNSUPPORTED) } else { Ok(()) }
    }

    /// Refuses to wait for a capturing stream.
    pub(crate) fn refuse_on(&mut self, capture: Option<u64>) -> Result<(), Code> {
        let known = capture.and_then(|c| self.objects.captures.get_mut(&c));
        known.map_or(Ok(()), |capture| {
            capture.spoilt = true;
            Err(Code::STREAM_CAPTURE_UNSUPPORTED)
        })
    }

    pub(crate) fn join_capture(&mut self, stream: Handle, capture: u64) {
        if !self.objects.captures.contains_key(&capture) {
            return;
        }
        if let Some(stream) = self.objects.streams.get_mut(&stream) {
            stream.capture = Some(capture);
        }
    }

    fn add_captured(&mut self, capture: u64, work: Work) -> Result<(), Code> {
        let capture = *self.objects.captures.get(&capture).ok_or(Code::STREAM_CAPTURE_INVALIDATED)?;
        if capture.spoilt {
            return Err(Code::STREAM_CAPTURE_INVALIDATED);
        }
        self.add_node(capture.graph, work).map(|_| ())
    }

    pub(crate) fn capture_kernel(&mut self, capture: u64, ns: u64) -> Result<(), Code> {
        self.add_captured(capture, Work::Kernel(ns))
    }

    pub(crate) fn capture_copy(&mut self, capture: u64) -> Result<(), Code> {
        self.add_captured(capture, Work::Copy)
    }

    pub(crate) fn capture_host(&mut self, capture: u64) -> Result<(), Code> {
        self.add_captured(capture, Work::Host(None, 0))
    }

    pub(crate) fn capture_alloc(
        &mut self,
        capture: u64,
        ordinal: usize,
        size: u64,
    ) -> Result<DevicePtr, Code> {
        let graph = self.objects.captures.get(&capture).ok_or(Code::STREAM_CAPTURE_INVALIDATED)?.graph;
        let address = self.graph_memory(graph, ordinal, size)?;
        self.add_captured(capture, Work::Alloc(address, size))?;
        Ok(address)
    }

    pub(crate) fn capture_free(&mut self, capture: u64, address: DevicePtr) -> Result<(), Code> {
        // Only what a graph allocated can be freed by one.
        if !self.objects.graph_memory.contains_key(&address) {
            return Err(Code::INVALID_VALUE);
        }
        self.add_captured(capture, Work::Free(address))
    }

    fn begin_capture(&mut self, stream: Handle, mode: c_uint, graph: Option<Handle>) -> Result<(), Code> {
        let target = self.target(stream)?;
        if mode > RELAXED {
            return Err(Code::INVALID_VALUE);
        }
        // The legacy default stream cannot be captured.
        let origin = target.stream.ok_or(Code::STREAM_CAPTURE_UNSUPPORTED)?;
        if target.capture.is_some() {
            return Err(Code::ILLEGAL_STATE);
        }
        let graph = graph.unwrap_or_else(|| self.create_graph());
        let id = self.handle().0 as u64;
        let capture = Capture { graph, mode, thread: thread::current().id(), origin, spoilt: false };
        self.objects.captures.insert(id, capture);
        self.join_capture(origin, id);
        Ok(())
    }

    fn end_capture(&mut self, stream: Handle, out: Out<Handle>) -> Result<(), Code> {
        let target = self.target(stream)?;
        let id = target.capture.ok_or(Code::ILLEGAL_STATE)?;
        let capture = *self.objects.captures.get(&id).ok_or(Code::ILLEGAL_STATE)?;
        if capture.origin != stream {
            return Err(Code::STREAM_CAPTURE_UNMATCHED);
        }
        if capture.mode != RELAXED && capture.thread != thread::current().id() {
            return Err(Code::STREAM_CAPTURE_WRONG_THREAD);
        }
        self.objects.captures.remove(&id);
        for stream in self.objects.streams.values_mut().filter(|s| s.capture == Some(id)) {
            stream.capture = None;
        }
        for event in self.objects.events.values_mut().filter(|e| e.capture == Some(id)) {
            event.capture = None;
        }
        if capture.spoilt {
            out.put_if(Handle(0))?;
            return Err(Code::STREAM_CAPTURE_INVALIDATED);
        }
        out.put_if(capture.graph)
    }

    /// Status, id and graph of a stream's capture.
    fn status(&self, stream: Handle) -> Result<(c_uint, u64, Handle), Code> {
        let target = self.target(stream)?;
        let found = target.capture.and_then(|id| self.objects.captures.get(&id).map(|c| (id, c)));
        Ok(found
            .map_or((0, 0, Handle(0)), |(id, c)| (if c.spoilt { INVALIDATED } else { ACTIVE }, id, c.graph)))
    }
}

entry! {
    fn cuThreadExchangeStreamCaptureMode(mode: Out<c_uint>) |_| {
        let wanted = mode.get()?;
        if wanted > RELAXED {
            return Err(Code::INVALID_VALUE);
        }
        mode.put(MODE.try_with(|m| m.replace(wanted)).unwrap_or(GLOBAL))
    }
}

streamed! {
    fn cuStreamBeginCapture / cuStreamBeginCapture_ptsz(stream: Handle) |driver, _| {
        driver.begin_capture(stream, GLOBAL, None)
    }

    fn cuStreamBeginCapture_v2 / cuStreamBeginCapture_v2_ptsz(stream: Handle, mode: c_uint) |driver, _| {
        driver.begin_capture(stream, mode, None)
    }

    fn cuStreamBeginCaptureToGraph / cuStreamBeginCaptureToGraph_ptsz(
        stream: Handle, graph: Handle, _after: Opaque, _edges: Opaque, _count: usize, mode: c_uint,
    ) |driver, _| {
        driver.objects.graphs.get(&graph).ok_or(Code::INVALID_VALUE)?;
        driver.begin_capture(stream, mode, Some(graph))
    }

    fn cuStreamEndCapture / cuStreamEndCapture_ptsz(stream: Handle, out: Out<Handle>) |driver, _| {
        driver.end_capture(stream, out)
    }

    fn cuStreamIsCapturing / cuStreamIsCapturing_ptsz(stream: Handle, status: Out<c_uint>) |driver, _| {
        status.put(driver.status(stream)?.0)
    }

    fn cuStreamGetCaptureInfo / cuStreamGetCaptureInfo_ptsz(
        stream: Handle, status: Out<c_uint>, id: Out<u64>,
    ) |driver, _| {
        let told = driver.status(stream)?;
        status.put(told.0)?;
        id.put_if(told.1)
    }

    fn cuStreamGetCaptureInfo_v2 / cuStreamGetCaptureInfo_v2_ptsz(
        stream: Handle, status: Out<c_uint>, id: Out<u64>, graph: Out<Handle>, after: Out<Handle>, count: Out<usize>,
    ) |driver, _| {
        let told = driver.status(stream)?;
        status.put(told.0)?;
        id.put_if(told.1)?;
        graph.put_if(told.2)?;
        after.put_if(Handle(0))?;
        count.put_if(0)
    }

    fn cuStreamGetCaptureInfo_v3 / cuStreamGetCaptureInfo_v3_ptsz(
        stream: Handle, status: Out<c_uint>, id: Out<u64>, graph: Out<Handle>, after: Out<Handle>, edges: Out<Handle>,
        count: Out<usize>,
    ) |driver, _| {
        let told = driver.status(stream)?;
        status.put(told.0)?;
        id.put_if(told.1)?;
        graph.put_if(told.2)?;
        after.put_if(Handle(0))?;
        edges.put_if(Handle(0))?;
        count.put_if(0)
    }

    fn cuStreamUpdateCaptureDependencies / cuStreamUpdateCaptureDependencies_ptsz(
        stream: Handle, _after: Opaque, _count: usize, _flags: c_uint,
    ) |driver, _| {
        driver.target(stream)?.capture.map(|_| ()).ok_or(Code::ILLEGAL_STATE)
    }

    fn cuStreamUpdateCaptureDependencies_v2 / cuStreamUpdateCaptureDependencies_v2_ptsz(
        stream: Handle, _after: Opaque, _edges: Opaque, _count: usize, _flags: c_uint,
    ) |driver, _| {
        driver.target(stream)?.capture.map(|_| ()).ok_or(Code::ILLEGAL_STATE)
    }
}
