//! Rows of the family `launch`.

#![allow(clippy::wildcard_imports, reason = "the ABI's types")]

use core::ffi::{c_int, c_uint, c_void};

use super::table;
use crate::cuda::*;
use crate::launch;
use crate::memory;

table! { Cuda;
    cuLaunchKernel(function: CUfunction, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint, block_z: c_uint, shared_bytes: c_uint, stream: CUstream, parameters: *mut *mut c_void, extra: *mut *mut c_void) -> CUresult, since 4000, Launch: launch::kernel;
    cuLaunchKernel_ptsz(function: CUfunction, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint, block_z: c_uint, shared_bytes: c_uint, stream: CUstream, parameters: *mut *mut c_void, extra: *mut *mut c_void) -> CUresult, since 7000, Launch: launch::kernel_ptsz;
    cuLaunchKernelEx(config: *const CUlaunchConfig, function: CUfunction, parameters: *mut *mut c_void, extra: *mut *mut c_void) -> CUresult, since 11060, Launch: launch::kernel_ex;
    cuLaunchKernelEx_ptsz(config: *const CUlaunchConfig, function: CUfunction, parameters: *mut *mut c_void, extra: *mut *mut c_void) -> CUresult, since 11060, Launch: launch::kernel_ex_ptsz;
    cuLaunchCooperativeKernel(function: CUfunction, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint, block_z: c_uint, shared_bytes: c_uint, stream: CUstream, parameters: *mut *mut c_void) -> CUresult, since 9000, Launch: launch::cooperative;
    cuLaunchCooperativeKernel_ptsz(function: CUfunction, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint, block_z: c_uint, shared_bytes: c_uint, stream: CUstream, parameters: *mut *mut c_void) -> CUresult, since 9000, Launch: launch::cooperative_ptsz;
    cuLaunchCooperativeKernelMultiDevice(launches: *mut LaunchParams, count: c_uint, flags: c_uint) -> CUresult, since 9000, Launch: launch::cooperative_multi_device;
    cuLaunch(function: CUfunction) -> CUresult, since 2000, Launch: launch::legacy;
    cuLaunchGrid(function: CUfunction, width: c_int, height: c_int) -> CUresult, since 2000, Launch: launch::legacy_grid;
    cuLaunchGridAsync(function: CUfunction, width: c_int, height: c_int, stream: CUstream) -> CUresult, since 2000, Launch: launch::legacy_grid_async;
    cuGraphLaunch(graph: CUgraphExec, stream: CUstream) -> CUresult, since 10000, Launch: memory::graph_launch;
    cuGraphLaunch_ptsz(graph: CUgraphExec, stream: CUstream) -> CUresult, since 10000, Launch: memory::graph_launch_ptsz;
    cuGraphExecDestroy(graph: CUgraphExec) -> CUresult, since 10000, Nothing: memory::graph_exec_destroy;
    cuStreamBeginCapture(stream: CUstream) -> CUresult, since 10000, Nothing: launch::begin_capture_v1;
    cuStreamBeginCapture_ptsz(stream: CUstream) -> CUresult, since 10000, Nothing: launch::begin_capture_v1_ptsz;
    cuStreamBeginCapture_v2(stream: CUstream, mode: CUenum) -> CUresult, since 10010, Nothing: launch::begin_capture;
    cuStreamBeginCapture_v2_ptsz(stream: CUstream, mode: CUenum) -> CUresult, since 10010, Nothing: launch::begin_capture_ptsz;
    cuStreamBeginCaptureToGraph(stream: CUstream, graph: CUgraph, dependencies: *const c_void, edges: *const c_void, count: usize, mode: CUenum) -> CUresult, since 12030, Nothing: launch::begin_capture_to_graph;
    cuStreamBeginCaptureToGraph_ptsz(stream: CUstream, graph: CUgraph, dependencies: *const c_void, edges: *const c_void, count: usize, mode: CUenum) -> CUresult, since 12030, Nothing: launch::begin_capture_to_graph_ptsz;
    cuStreamBeginRecaptureToGraph(stream: CUstream, mode: CUenum, graph: CUgraph, differs: *const c_void, data: *mut c_void) -> CUresult, since 13030, Nothing: launch::begin_recapture;
    cuStreamBeginRecaptureToGraph_ptsz(stream: CUstream, mode: CUenum, graph: CUgraph, differs: *const c_void, data: *mut c_void) -> CUresult, since 13030, Nothing: launch::begin_recapture_ptsz;
    cuStreamBeginCaptureToCig(stream: CUstream, parameters: *mut c_void) -> CUresult, since 13010, Nothing: launch::begin_capture_to_cig;
    cuStreamBeginCaptureToCig_ptsz(stream: CUstream, parameters: *mut c_void) -> CUresult, since 13010, Nothing: launch::begin_capture_to_cig_ptsz;
    cuStreamEndCapture(stream: CUstream, graph: *mut CUgraph) -> CUresult, since 10000, Nothing: launch::end_capture;
    cuStreamEndCapture_ptsz(stream: CUstream, graph: *mut CUgraph) -> CUresult, since 10000, Nothing: launch::end_capture_ptsz;
    cuStreamEndCaptureToCig(stream: CUstream) -> CUresult, since 13010, Nothing: launch::end_capture_to_cig;
    cuStreamEndCaptureToCig_ptsz(stream: CUstream) -> CUresult, since 13010, Nothing: launch::end_capture_to_cig_ptsz;
    cuStreamDestroy(stream: CUstream) -> CUresult, since 2000, Nothing: launch::stream_destroy;
    cuStreamDestroy_v2(stream: CUstream) -> CUresult, since 4000, Nothing: launch::stream_destroy;
}
