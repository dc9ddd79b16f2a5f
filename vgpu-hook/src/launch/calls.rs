//! The driver's launch functions.
//!
//! A name with `_ptsz` means the calling thread's own default stream where it is given none; the events of a measurement
//! name that stream by its number.

#![expect(unsafe_code, reason = "calls the driver, and reads the program's arguments")]
#![allow(clippy::missing_safety_doc, reason = "as the driver's function of that name")]

use core::ffi::{c_int, c_uint, c_void};

use mullion_pace::{Key, Size};

use super::events::{Driver, Handle};
use super::pacer::{Paid, Request};
use super::{Lane, Own, PACER};
use crate::container::{self, Gate};
use crate::cuda::{CUfunction, CUgraphExec, CUlaunchConfig, CUresult, CUstream, LaunchParams};

/// `CU_STREAM_LEGACY` and `CU_STREAM_PER_THREAD`.
const LEGACY: Handle = 1;
pub(super) const PER_THREAD: Handle = 2;

pub(super) fn stream_of(stream: CUstream, per_thread: bool) -> Handle {
    match stream.expose_provenance() {
        0 if per_thread => PER_THREAD,
        0 => LEGACY,
        stream => stream,
    }
}

fn handle(pointer: *mut c_void) -> u64 {
    pointer.expose_provenance() as u64
}

/// Where a launch goes.
enum Way {
    /// Straight to the driver.
    Free,
    /// Through the bucket.
    Pays(Own<'static>),
    /// Nowhere.
    Refused(CUresult),
}

/// What every launch passes.
#[inline(always)]
#[expect(clippy::inline_always, reason = "a call here costs as much as all that it does")]
fn way(stream: CUstream, per_thread: bool) -> Way {
    match container::gate() {
        Gate::Limited(container) => match Own::of(container, stream.expose_provenance()) {
            Some(lane) if PACER.has_to_pay(&lane, || stream_of(stream, per_thread), &Driver::HERE) => {
                Way::Pays(lane)
            }
            _ => Way::Free,
        },
        Gate::Open => Way::Free,
        Gate::Refused(refused) => Way::Refused(refused),
    }
}

/// Calls the driver when the launch's time has come. A macro, so that what only some launches need is made where they need
/// it.
macro_rules! launch {
    ($key:expr, $request:expr, $stream:expr, $per_thread:expr, $call:expr) => {
        match way($stream, $per_thread) {
            Way::Free => $call,
            Way::Refused(refused) => refused,
            Way::Pays(lane) => {
                let paid = match pay_known(lane, $key) {
                    Some(paid) => paid,
                    None => pay(lane, &$request),
                };
                if paid.is_sample() {
                    measured(lane, &$request, paid, move || $call)
                } else {
                    let result = $call;
                    if !result.is_ok() {
                        not_launched(lane, $key, paid);
                    }
                    result
                }
            }
        }
    };
}

/// Pays for a launch that need not wait.
#[inline(never)]
fn pay_known(lane: Own<'static>, key: Key) -> Option<Paid> {
    PACER.pay_known(&lane, key)
}

/// Waits until a launch may go.
#[cold]
fn pay(lane: Own<'static>, request: &Request) -> Paid {
    PACER.pay(&lane, request, &Driver::at(request.stream))
}

#[cold]
fn measured(lane: Own<'static>, request: &Request, paid: Paid, call: impl FnOnce() -> CUresult) -> CUresult {
    PACER.measured(&lane, request, paid, &Driver::at(request.stream), call)
}

#[cold]
fn not_launched(lane: Own<'static>, key: Key, paid: Paid) {
    PACER.give_back(&lane, key, paid);
}

#[inline]
fn kernel_key(function: CUfunction, grid: [c_uint; 3]) -> Key {
    // Of the size only the grid counts.
    Key::function(handle(function), Size::new(grid, [1; 3]))
}

#[inline]
fn kernel_request(
    function: CUfunction,
    grid: [c_uint; 3],
    block: [c_uint; 3],
    stream: CUstream,
    per_thread: bool,
) -> Request {
    let size = Size::new(grid, block);
    Request {
        key: Key::function(handle(function), size),
        size: Some(size),
        stream: stream_of(stream, per_thread),
    }
}

/// Launches of a kernel by its numbers; in brackets what a function is given behind its parameters.
macro_rules! kernels {
    ($($(#[$doc:meta])* $name:ident, $per_thread:literal, [$($rest:ident: $type:ty)?];)*) => {$(
        $(#[$doc])*
        #[expect(clippy::too_many_arguments, reason = "the driver's")]
        pub(crate) unsafe fn $name(
            real: unsafe extern "C" fn(
                CUfunction, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, CUstream, *mut *mut c_void
                $(, $type)?
            ) -> CUresult,
            function: CUfunction, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint,
            block_y: c_uint, block_z: c_uint, shared_bytes: c_uint, stream: CUstream,
            parameters: *mut *mut c_void $(, $rest: $type)?
        ) -> CUresult {
            let (grid, block) = ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]);
            launch!(kernel_key(function, grid), kernel_request(function, grid, block, stream, $per_thread), stream, $per_thread, {
                // SAFETY: the program's own arguments.
                unsafe {
                    real(
                        function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes, stream,
                        parameters $(, $rest)?
                    )
                }
            })
        }
    )*};
}
kernels! {
    /// `cuLaunchKernel`.
    kernel, false, [extra: *mut *mut c_void];
    /// `cuLaunchKernel_ptsz`.
    kernel_ptsz, true, [extra: *mut *mut c_void];
    /// `cuLaunchCooperativeKernel`.
    cooperative, false, [];
    /// `cuLaunchCooperativeKernel_ptsz`.
    cooperative_ptsz, true, [];
}

type KernelEx =
    unsafe extern "C" fn(*const CUlaunchConfig, CUfunction, *mut *mut c_void, *mut *mut c_void) -> CUresult;

macro_rules! kernels_ex {
    ($($(#[$doc:meta])* $name:ident, $per_thread:literal;)*) => {$(
        $(#[$doc])*
        pub(crate) unsafe fn $name(
            real: KernelEx,
            config: *const CUlaunchConfig,
            function: CUfunction,
            parameters: *mut *mut c_void,
            extra: *mut *mut c_void,
        ) -> CUresult {
            // SAFETY: null, or the program's configuration.
            let Some(c) = (unsafe { config.as_ref() }) else {
                // SAFETY: the program's own arguments; the driver refuses them.
                return unsafe { real(config, function, parameters, extra) };
            };
            launch!(
                kernel_key(function, c.grid),
                kernel_request(function, c.grid, c.block, c.stream, $per_thread),
                c.stream,
                $per_thread,
                {
                    // SAFETY: the program's own arguments.
                    unsafe { real(config, function, parameters, extra) }
                }
            )
        }
    )*};
}
kernels_ex! {
    /// `cuLaunchKernelEx`.
    kernel_ex, false;
    /// `cuLaunchKernelEx_ptsz`.
    kernel_ex_ptsz, true;
}

/// `cuLaunchCooperativeKernelMultiDevice` (until CUDA 12): pays on every card of the container, and is measured on the card of
/// its first stream as a launch of its first kernel.
pub(crate) unsafe fn cooperative_multi_device(
    real: unsafe extern "C" fn(*mut LaunchParams, c_uint, c_uint) -> CUresult,
    launches: *mut LaunchParams,
    count: c_uint,
    flags: c_uint,
) -> CUresult {
    // SAFETY: the program's own arguments.
    let call = || unsafe { real(launches, count, flags) };
    // SAFETY: null, or the program's array; the driver refuses a count of 0.
    let Some(first) = (unsafe { launches.as_ref() }).filter(|_| count > 0) else { return call() };
    let request = kernel_request(first.function, first.grid, first.block, first.stream, false);
    if let Gate::Limited(container) = container::gate() {
        let current = Own::of(container, first.stream.expose_provenance()).map(|lane| lane.index());
        for lane in Own::all(container).filter(|lane| Some(lane.index()) != current) {
            PACER.admit_only(&lane, &request, &Driver::HERE);
        }
    }
    launch!(request.key, request, first.stream, false, call())
}

/// Threads of a block where the legacy functions were told by `cuFuncSetBlockShape`.
const LEGACY_BLOCK: [c_uint; 3] = [256, 1, 1];

/// `cuLaunch`.
pub(crate) unsafe fn legacy(
    real: unsafe extern "C" fn(CUfunction) -> CUresult,
    function: CUfunction,
) -> CUresult {
    let stream = core::ptr::null_mut();
    launch!(
        kernel_key(function, [1; 3]),
        kernel_request(function, [1; 3], LEGACY_BLOCK, stream, false),
        stream,
        false,
        {
            // SAFETY: the program's own argument.
            unsafe { real(function) }
        }
    )
}

/// `cuLaunchGrid`.
pub(crate) unsafe fn legacy_grid(
    real: unsafe extern "C" fn(CUfunction, c_int, c_int) -> CUresult,
    function: CUfunction,
    width: c_int,
    height: c_int,
) -> CUresult {
    let grid = [width.unsigned_abs(), height.unsigned_abs(), 1];
    let stream = core::ptr::null_mut();
    launch!(
        kernel_key(function, grid),
        kernel_request(function, grid, LEGACY_BLOCK, stream, false),
        stream,
        false,
        {
            // SAFETY: the program's own arguments.
            unsafe { real(function, width, height) }
        }
    )
}

/// `cuLaunchGridAsync`.
pub(crate) unsafe fn legacy_grid_async(
    real: unsafe extern "C" fn(CUfunction, c_int, c_int, CUstream) -> CUresult,
    function: CUfunction,
    width: c_int,
    height: c_int,
    stream: CUstream,
) -> CUresult {
    let grid = [width.unsigned_abs(), height.unsigned_abs(), 1];
    launch!(
        kernel_key(function, grid),
        kernel_request(function, grid, LEGACY_BLOCK, stream, false),
        stream,
        false,
        {
            // SAFETY: the program's own arguments.
            unsafe { real(function, width, height, stream) }
        }
    )
}

/// `cuGraphLaunch`, by `call`, when its time has come. No lock may be held: this can take seconds.
pub(crate) fn paced_graph(
    graph: CUgraphExec,
    stream: CUstream,
    per_thread: bool,
    call: impl FnOnce() -> CUresult,
) -> CUresult {
    launch!(
        Key::graph(handle(graph)),
        Request { key: Key::graph(handle(graph)), size: None, stream: stream_of(stream, per_thread) },
        stream,
        per_thread,
        call()
    )
}

/// `cuGraphExecDestroy`: the handle may come again for another graph.
pub(crate) unsafe fn graph_exec_destroy(
    real: unsafe extern "C" fn(CUgraphExec) -> CUresult,
    graph: CUgraphExec,
) -> CUresult {
    PACER.forget(Key::graph(handle(graph)));
    // SAFETY: the program's own argument.
    unsafe { real(graph) }
}
