//! Streams under capture: what is launched into one does not run, so it is neither charged nor measured.
//!
//! The driver knows of every stream whether it is captured, also of one that joined a capture by waiting for an event. It
//! is asked only while a capture is under way, for the question costs as much as all else that a launch passes. What is
//! kept here are the streams on which captures began, and the contexts of these: a capture ends on the stream that it
//! began on, or goes with it or with its context. One that ends in a way that is not seen (a thread that ends while its own
//! default stream is captured) makes each launch ask, and changes nothing else.

#![expect(unsafe_code, reason = "calls the driver")]
#![allow(clippy::missing_safety_doc, reason = "as the driver's function of that name")]

use core::ffi::{c_int, c_uint, c_void};
use core::ptr::with_exposed_provenance_mut;
use core::sync::atomic::Ordering::{AcqRel, Relaxed, Release};
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicUsize};

use super::PACER;
use super::calls::{PER_THREAD, stream_of};
use super::events::{Driver, Events, Handle, current_device};
use crate::cuda::{CUcontext, CUdevice, CUenum, CUgraph, CUresult, CUstream};
use crate::driver::function;
use crate::memory;

/// A capture under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Capture {
    /// The stream that it began on, and has to end on.
    pub(super) stream: Handle,
    pub(super) context: Handle,
    pub(super) device: CUdevice,
    /// Into the command list of a graphics API. The driver does not say that it tells of such a capture when it is asked.
    pub(super) graphics: bool,
}

/// A place's stream while it is free, and while a thread fills it in or takes it.
const FREE: Handle = 0;
const TAKEN: Handle = Handle::MAX;

#[derive(Debug)]
struct Place {
    stream: AtomicUsize,
    context: AtomicUsize,
    device: AtomicI32,
    graphics: AtomicBool,
}

impl Place {
    const fn new() -> Self {
        Self {
            stream: AtomicUsize::new(FREE),
            context: AtomicUsize::new(0),
            device: AtomicI32::new(0),
            graphics: AtomicBool::new(false),
        }
    }

    fn capture(&self) -> Option<Capture> {
        let stream = self.stream.load(Relaxed);
        (stream != FREE && stream != TAKEN).then(|| Capture {
            stream,
            context: self.context.load(Relaxed),
            device: self.device.load(Relaxed),
            graphics: self.graphics.load(Relaxed),
        })
    }
}

/// The captures of a process.
#[derive(Debug)]
pub(super) struct Captures {
    /// How many: one word for the launches to look at.
    count: AtomicU32,
    /// Those among them that had no place.
    unplaced: AtomicU32,
    places: [Place; 16],
}

impl Captures {
    pub(super) const fn new() -> Self {
        Self { count: AtomicU32::new(0), unplaced: AtomicU32::new(0), places: [const { Place::new() }; 16] }
    }

    /// Whether any capture is under way.
    #[inline]
    pub(super) fn any(&self) -> bool {
        self.count.load(Relaxed) != 0
    }

    /// Whether a launch into `stream` is captured instead of run. To be asked where there is [any](Self::any) capture.
    #[cold]
    pub(super) fn hold(&self, stream: Handle, events: &impl Events) -> bool {
        let mut known = self.places.iter().filter_map(Place::capture);
        // Under that handle every thread has a stream of its own.
        let graphics =
            stream != PER_THREAD && known.any(|capture| capture.graphics && capture.stream == stream);
        graphics || events.capturing(stream)
    }

    pub(super) fn add(&self, capture: Capture) {
        self.count.fetch_add(1, AcqRel);
        let free = |place: &&Place| place.stream.compare_exchange(FREE, TAKEN, AcqRel, Relaxed).is_ok();
        let Some(place) = self.places.iter().find(free) else {
            self.unplaced.fetch_add(1, Relaxed);
            return;
        };
        place.context.store(capture.context, Relaxed);
        place.device.store(capture.device, Relaxed);
        place.graphics.store(capture.graphics, Relaxed);
        place.stream.store(capture.stream, Release);
    }

    /// Takes out one capture of those that `wanted` is true for.
    pub(super) fn take(&self, wanted: impl Fn(&Capture) -> bool) -> Option<Capture> {
        self.places.iter().find_map(|place| {
            let capture = place.capture().filter(&wanted)?;
            place.stream.compare_exchange(capture.stream, TAKEN, AcqRel, Relaxed).ok()?;
            place.stream.store(FREE, Release);
            less(&self.count);
            Some(capture)
        })
    }

    /// The capture that began on `stream` has ended. A program may end what it never began.
    pub(super) fn end(&self, stream: Handle, graphics: bool) {
        let of = |capture: &Capture| capture.stream == stream && capture.graphics == graphics;
        if self.take(of).is_none() && less(&self.unplaced) {
            less(&self.count);
        }
    }

    /// A capture has begun on `stream`, which can have one only. What else is known of the handle began on a stream that
    /// is gone.
    fn began(&self, stream: Handle) {
        // Under this handle every thread has a stream of its own.
        if stream == PER_THREAD {
            return;
        }
        let of = |capture: &Capture| capture.stream == stream;
        while self.places.iter().filter_map(Place::capture).filter(of).nth(1).is_some() {
            if self.take(of).is_none() {
                return;
            }
        }
    }

    /// All captures are gone that `gone` is true for.
    fn gone(&self, gone: impl Fn(&Capture) -> bool) {
        while self.any() && self.take(&gone).is_some() {}
    }
}

/// Takes one off, where there is one; whether there was.
fn less(word: &AtomicU32) -> bool {
    word.fetch_update(AcqRel, Relaxed, |n| n.checked_sub(1)).is_ok()
}

/// Counts a capture from before it begins, so that no launch takes it for none.
fn begin(stream: Handle, graphics: bool, real: impl FnOnce() -> CUresult) -> CUresult {
    let captures = &PACER.captures;
    let device = current_device().unwrap_or(-1);
    captures.add(Capture { stream, context: Driver::HERE.context(), device, graphics });
    let result = real();
    if result.is_ok() {
        captures.began(stream);
    } else {
        captures.end(stream, graphics);
    }
    result
}

/// `real` ends a capture on `stream`, perhaps by failing: a capture that was broken has no graph.
fn end(stream: Handle, real: impl FnOnce() -> CUresult) -> CUresult {
    let result = real();
    // Any stream of a capture but the one that it began on is refused, and so is another thread: then it goes on.
    if result.is_ok() || !Driver::HERE.capturing(stream) {
        PACER.captures.end(stream, false);
    }
    result
}

type Begin = unsafe extern "C" fn(CUstream, CUenum) -> CUresult;
type BeginToGraph =
    unsafe extern "C" fn(CUstream, CUgraph, *const c_void, *const c_void, usize, CUenum) -> CUresult;
/// With a callback for nodes that differ, and what it is given: both only pass through.
type BeginAgain = unsafe extern "C" fn(CUstream, CUenum, CUgraph, *const c_void, *mut c_void) -> CUresult;

macro_rules! forms {
    ($per_thread:literal: $begin_v1:ident, $begin:ident, $to_graph:ident, $again:ident, $to_graphics:ident, $end:ident, $end_graphics:ident) => {
        /// `cuStreamBeginCapture` of CUDA 10.0.
        pub(crate) unsafe fn $begin_v1(
            real: unsafe extern "C" fn(CUstream) -> CUresult,
            stream: CUstream,
        ) -> CUresult {
            // SAFETY: the program's own argument.
            begin(stream_of(stream, $per_thread), false, || unsafe { real(stream) })
        }

        /// `cuStreamBeginCapture_v2`.
        pub(crate) unsafe fn $begin(real: Begin, stream: CUstream, mode: CUenum) -> CUresult {
            // SAFETY: the program's own arguments.
            begin(stream_of(stream, $per_thread), false, || unsafe { real(stream, mode) })
        }

        /// `cuStreamBeginCaptureToGraph`.
        pub(crate) unsafe fn $to_graph(
            real: BeginToGraph,
            stream: CUstream,
            graph: CUgraph,
            dependencies: *const c_void,
            edges: *const c_void,
            count: usize,
            mode: CUenum,
        ) -> CUresult {
            begin(stream_of(stream, $per_thread), false, || {
                // SAFETY: the program's own arguments.
                unsafe { real(stream, graph, dependencies, edges, count, mode) }
            })
        }

        /// `cuStreamBeginRecaptureToGraph`.
        pub(crate) unsafe fn $again(
            real: BeginAgain,
            stream: CUstream,
            mode: CUenum,
            graph: CUgraph,
            differs: *const c_void,
            data: *mut c_void,
        ) -> CUresult {
            begin(stream_of(stream, $per_thread), false, || {
                // SAFETY: the program's own arguments.
                unsafe { real(stream, mode, graph, differs, data) }
            })
        }

        /// `cuStreamBeginCaptureToCig`.
        pub(crate) unsafe fn $to_graphics(
            real: unsafe extern "C" fn(CUstream, *mut c_void) -> CUresult,
            stream: CUstream,
            parameters: *mut c_void,
        ) -> CUresult {
            // SAFETY: the program's own arguments.
            begin(stream_of(stream, $per_thread), true, || unsafe { real(stream, parameters) })
        }

        /// `cuStreamEndCapture`.
        pub(crate) unsafe fn $end(
            real: unsafe extern "C" fn(CUstream, *mut CUgraph) -> CUresult,
            stream: CUstream,
            graph: *mut CUgraph,
        ) -> CUresult {
            // SAFETY: the program's own arguments.
            end(stream_of(stream, $per_thread), || unsafe { real(stream, graph) })
        }

        /// `cuStreamEndCaptureToCig`.
        pub(crate) unsafe fn $end_graphics(
            real: unsafe extern "C" fn(CUstream) -> CUresult,
            stream: CUstream,
        ) -> CUresult {
            // SAFETY: the program's own argument.
            let result = unsafe { real(stream) };
            if result.is_ok() {
                PACER.captures.end(stream_of(stream, $per_thread), true);
            }
            result
        }
    };
}
forms! { false: begin_capture_v1, begin_capture, begin_capture_to_graph, begin_recapture, begin_capture_to_cig, end_capture, end_capture_to_cig }
forms! { true: begin_capture_v1_ptsz, begin_capture_ptsz, begin_capture_to_graph_ptsz, begin_recapture_ptsz, begin_capture_to_cig_ptsz, end_capture_ptsz, end_capture_to_cig_ptsz }

/// Whether what is put into `stream` is certainly captured: what cannot be told counts as run, and is charged.
pub(crate) fn is_captured(stream: CUstream, per_thread: bool) -> bool {
    if !PACER.captures.any() {
        return false;
    }
    let ask = function!(cuStreamIsCapturing: unsafe extern "C" fn(CUstream, *mut CUenum) -> CUresult);
    let stream = with_exposed_provenance_mut(stream_of(stream, per_thread));
    let mut status = 0;
    // SAFETY: the program's own stream, and a place for the answer.
    ask.is_some_and(|ask| unsafe { ask(stream, &raw mut status) }.is_ok()) && status != 0
}

/// `cuStreamDestroy`, both forms: a capture that began on the stream goes with it.
pub(crate) unsafe fn stream_destroy(
    real: unsafe extern "C" fn(CUstream) -> CUresult,
    stream: CUstream,
) -> CUresult {
    let captures = &PACER.captures;
    // Before: once the stream is gone, its handle may be another thread's new one.
    let handle = stream_of(stream, false);
    let ended = if captures.any() { captures.take(|capture| capture.stream == handle) } else { None };
    memory::graph_stream_gone(stream);
    // SAFETY: the program's own argument.
    let result = unsafe { real(stream) };
    if !result.is_ok()
        && let Some(ended) = ended
    {
        captures.add(ended);
    }
    result
}

/// `cuCtxDestroy`, both forms: captures go with their streams.
pub(crate) unsafe fn context_destroy(
    real: unsafe extern "C" fn(CUcontext) -> CUresult,
    context: CUcontext,
) -> CUresult {
    // SAFETY: as the caller says.
    let result = unsafe { memory::context_destroy(real, context) };
    context_ended(result, context)
}

/// `cuCtxDetach`, which destroys a context that nobody else attached to.
pub(crate) unsafe fn context_detach(
    real: unsafe extern "C" fn(CUcontext) -> CUresult,
    context: CUcontext,
) -> CUresult {
    // SAFETY: as the caller says.
    let result = unsafe { memory::context_detach(real, context) };
    context_ended(result, context)
}

fn context_ended(result: CUresult, context: CUcontext) -> CUresult {
    if result.is_ok() {
        PACER.captures.gone(|capture| capture.context == context.expose_provenance());
    }
    result
}

/// `cuDevicePrimaryCtxRelease`, both forms: the last one destroys the context.
pub(crate) unsafe fn primary_release(
    real: unsafe extern "C" fn(CUdevice) -> CUresult,
    device: CUdevice,
) -> CUresult {
    // SAFETY: as the caller says.
    let result = unsafe { memory::primary_end(real, device) };
    primary_ended(result.is_ok() && PACER.captures.any() && !is_active(device), device);
    result
}

/// `cuDevicePrimaryCtxReset`, both forms.
pub(crate) unsafe fn primary_reset(
    real: unsafe extern "C" fn(CUdevice) -> CUresult,
    device: CUdevice,
) -> CUresult {
    // SAFETY: as the caller says.
    let result = unsafe { memory::primary_end(real, device) };
    primary_ended(result.is_ok(), device);
    result
}

/// Forgets the captures of the card's other contexts as well: hardly a program has both, and then a captured launch is
/// charged as if it ran.
fn primary_ended(ended: bool, device: CUdevice) {
    if ended {
        PACER.captures.gone(|capture| capture.device == device);
    }
}

/// Whether a card has a primary context.
fn is_active(device: CUdevice) -> bool {
    type State = unsafe extern "C" fn(CUdevice, *mut c_uint, *mut c_int) -> CUresult;
    let Some(ask) = function!(cuDevicePrimaryCtxGetState: State) else { return false };
    let (mut flags, mut active) = (0, 0);
    // SAFETY: two places for the answer.
    let result = unsafe { ask(device, &raw mut flags, &raw mut active) };
    result.is_ok() && active != 0
}

#[cfg(test)]
mod tests {
    use core::ptr::{null_mut, without_provenance_mut};

    use super::*;

    /// The only test that uses the process's captures: no other one sees them.
    #[test]
    fn a_capture_ends_with_its_stream_its_context_or_a_failed_end() {
        unsafe extern "C" fn begin(_: CUstream, _: CUenum) -> CUresult {
            CUresult::SUCCESS
        }
        unsafe extern "C" fn refuse_begin(_: CUstream, _: CUenum) -> CUresult {
            CUresult::INVALID_VALUE
        }
        // `CUDA_ERROR_STREAM_CAPTURE_INVALIDATED`: the stream is out of capture mode, there is no graph.
        unsafe extern "C" fn broken(_: CUstream, _: *mut CUgraph) -> CUresult {
            CUresult(901)
        }
        unsafe extern "C" fn destroy(_: CUstream) -> CUresult {
            CUresult::SUCCESS
        }
        unsafe extern "C" fn refuse_destroy(_: CUstream) -> CUresult {
            CUresult::INVALID_VALUE
        }
        unsafe extern "C" fn end_device(_: CUdevice) -> CUresult {
            CUresult::SUCCESS
        }
        let [one, two] = [0x10, 0x20].map(without_provenance_mut);
        let captures = &PACER.captures;
        let started = |stream| {
            // SAFETY: the functions above look at nothing.
            assert!(unsafe { begin_capture(begin, stream, 0) }.is_ok());
            assert!(captures.any());
        };

        // SAFETY: as above.
        assert!(!unsafe { begin_capture(refuse_begin, one, 0) }.is_ok());
        assert!(!captures.any(), "one that never began");

        started(one);
        // SAFETY: as above.
        let result = unsafe { end_capture(broken, one, null_mut()) };
        assert!(result == CUresult(901) && !captures.any(), "an end without a graph");

        started(one);
        // SAFETY: as above.
        assert!(!unsafe { stream_destroy(refuse_destroy, one) }.is_ok());
        assert!(captures.any(), "the driver kept the stream");
        // A stream that joined the capture began none.
        // SAFETY: as above.
        assert!(unsafe { stream_destroy(destroy, two) }.is_ok());
        assert!(captures.any(), "another stream");
        // SAFETY: as above.
        assert!(unsafe { stream_destroy(destroy, one) }.is_ok());
        assert!(!captures.any(), "a stream that is gone");

        // Without a driver there is no current context: its handle is 0, its card -1.
        started(one);
        // SAFETY: as above.
        let _ = unsafe { context_destroy(destroy, two) };
        assert!(captures.any(), "another context");
        // SAFETY: as above.
        let _ = unsafe { context_destroy(destroy, null_mut()) };
        assert!(!captures.any(), "a context that is gone");

        for end in [primary_release, primary_reset] {
            started(one);
            // SAFETY: as above.
            let _ = unsafe { end(end_device, -1) };
            assert!(!captures.any(), "a primary context that is gone");
        }

        // Gone unseen: the handle's next capture is the only one.
        started(one);
        started(one);
        // SAFETY: as above.
        let _ = unsafe { end_capture(broken, one, null_mut()) };
        assert!(!captures.any());
        // Of the threads' own streams each has one.
        for _ in 0..2 {
            // SAFETY: as above.
            assert!(unsafe { begin_capture_ptsz(begin, null_mut(), 0) }.is_ok());
        }
        for left in [true, false] {
            // SAFETY: as above.
            let _ = unsafe { end_capture_ptsz(broken, null_mut(), null_mut()) };
            assert_eq!(captures.any(), left);
        }
    }

    #[test]
    fn more_captures_than_places_are_counted_too() {
        let captures = Captures::new();
        for stream in 1..=20 {
            captures.add(Capture { stream: stream * 16, context: 0, device: 0, graphics: false });
        }
        for stream in 1..=20 {
            assert!(captures.any());
            captures.end(stream * 16, false);
        }
        assert!(!captures.any());
        captures.end(16, false);
        assert!(!captures.any(), "what never began");
    }
}
