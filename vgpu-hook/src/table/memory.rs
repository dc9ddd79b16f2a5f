//! Rows of the family `memory`.

#![allow(clippy::wildcard_imports, reason = "the ABI's types")]

use core::ffi::{c_char, c_int, c_uint, c_void};

use super::table;
use crate::cuda::*;
use crate::launch;
use crate::memory;

table! { Cuda;
    cuMemAlloc_v2(pointer: *mut CUdeviceptr, bytes: usize) -> CUresult, since 3020, Memory: memory::alloc;
    cuMemAlloc(pointer: *mut CUdeviceptrV1, bytes: c_uint) -> CUresult, since 2000, Memory: memory::alloc_v1;
    cuMemAllocPitch_v2(pointer: *mut CUdeviceptr, pitch: *mut usize, width: usize, height: usize, element: c_uint) -> CUresult, since 3020, Memory: memory::alloc_pitch;
    cuMemAllocPitch(pointer: *mut CUdeviceptrV1, pitch: *mut c_uint, width: c_uint, height: c_uint, element: c_uint) -> CUresult, since 2000, Memory: memory::alloc_pitch_v1;
    cuMemAllocManaged(pointer: *mut CUdeviceptr, bytes: usize, flags: c_uint) -> CUresult, since 6000, Memory: memory::alloc_managed;
    cuMemFree_v2(pointer: CUdeviceptr) -> CUresult, since 3020, Release: memory::free;
    cuMemFree(pointer: CUdeviceptrV1) -> CUresult, since 2000, Release: memory::free_v1;

    cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> CUresult, since 3020, View: memory::info;
    cuMemGetInfo(free: *mut c_uint, total: *mut c_uint) -> CUresult, since 2000, View: memory::info_v1;
    cuDeviceTotalMem_v2(bytes: *mut usize, device: CUdevice) -> CUresult, since 3020, View: memory::device_total;
    cuDeviceTotalMem(bytes: *mut c_uint, device: CUdevice) -> CUresult, since 2000, View: memory::device_total_v1;

    cuArrayCreate_v2(array: *mut CUarray, descriptor: *const ArrayDescriptor) -> CUresult, since 3020, Memory: memory::array_create;
    cuArrayCreate(array: *mut CUarray, descriptor: *const c_void) -> CUresult, since 2000, Memory: memory::array_v1;
    cuArray3DCreate_v2(array: *mut CUarray, descriptor: *const Array3dDescriptor) -> CUresult, since 3020, Memory: memory::array_3d_create;
    cuArray3DCreate(array: *mut CUarray, descriptor: *const c_void) -> CUresult, since 2000, Memory: memory::array_v1;
    cuArrayDestroy(array: CUarray) -> CUresult, since 2000, Release: memory::array_destroy;
    cuMipmappedArrayCreate(array: *mut CUmipmappedArray, descriptor: *const Array3dDescriptor, levels: c_uint) -> CUresult, since 5000, Memory: memory::mipmap_create;
    cuMipmappedArrayDestroy(array: CUmipmappedArray) -> CUresult, since 5000, Release: memory::mipmap_destroy;

    cuMemAllocAsync(pointer: *mut CUdeviceptr, bytes: usize, stream: CUstream) -> CUresult, since 11020, Memory: memory::alloc_async;
    cuMemAllocAsync_ptsz(pointer: *mut CUdeviceptr, bytes: usize, stream: CUstream) -> CUresult, since 11020, Memory: memory::alloc_async_ptsz;
    cuMemAllocFromPoolAsync(pointer: *mut CUdeviceptr, bytes: usize, pool: CUmemoryPool, stream: CUstream) -> CUresult, since 11020, Memory: memory::alloc_from_pool;
    cuMemAllocFromPoolAsync_ptsz(pointer: *mut CUdeviceptr, bytes: usize, pool: CUmemoryPool, stream: CUstream) -> CUresult, since 11020, Memory: memory::alloc_from_pool_ptsz;
    cuMemFreeAsync(pointer: CUdeviceptr, stream: CUstream) -> CUresult, since 11020, Release: memory::free_async;
    cuMemFreeAsync_ptsz(pointer: CUdeviceptr, stream: CUstream) -> CUresult, since 11020, Release: memory::free_async;
    cuMemPoolCreate(pool: *mut CUmemoryPool, properties: *const CUmemPoolProps) -> CUresult, since 11020, Memory: memory::pool_create;
    cuMemPoolDestroy(pool: CUmemoryPool) -> CUresult, since 11020, Release: memory::pool_destroy;
    cuMemPoolTrimTo(pool: CUmemoryPool, keep: usize) -> CUresult, since 11020, Release: memory::pool_trim;
    cuMemPoolSetAttribute(pool: CUmemoryPool, attribute: c_int, value: *mut c_void) -> CUresult, since 11020, Release: memory::pool_set_attribute;
    cuMemPoolImportFromShareableHandle(pool: *mut CUmemoryPool, handle: *mut c_void, kind: CUenum, flags: CUuint64) -> CUresult, since 11020, Memory: memory::pool_import;
    cuStreamSynchronize(stream: CUstream) -> CUresult, since 2000, Release: memory::stream_synchronize;
    cuStreamSynchronize_ptsz(stream: CUstream) -> CUresult, since 7000, Release: memory::stream_synchronize;
    cuEventSynchronize(event: CUevent) -> CUresult, since 2000, Release: memory::synchronize_on;
    cuCtxSynchronize() -> CUresult, since 2000, Release: memory::context_synchronize;
    cuCtxSynchronize_v2(context: CUcontext) -> CUresult, since 13000, Release: memory::synchronize_on;

    cuMemCreate(handle: *mut CUmemGenericAllocationHandle, size: usize, properties: *const CUmemAllocationProp, flags: CUuint64) -> CUresult, since 10020, Memory: memory::create;
    cuMemRelease(handle: CUmemGenericAllocationHandle) -> CUresult, since 10020, Release: memory::release;
    cuMemRetainAllocationHandle(handle: *mut CUmemGenericAllocationHandle, address: *mut c_void) -> CUresult, since 11000, Memory: memory::retain;
    cuMemMap(pointer: CUdeviceptr, size: usize, offset: usize, handle: CUmemGenericAllocationHandle, flags: CUuint64) -> CUresult, since 10020, Memory: memory::map;
    cuMemUnmap(pointer: CUdeviceptr, size: usize) -> CUresult, since 10020, Release: memory::unmap;

    cuDevicePrimaryCtxRetain(context: *mut CUcontext, device: CUdevice) -> CUresult, since 7000, Memory: memory::primary_retain;
    cuDevicePrimaryCtxRelease_v2(device: CUdevice) -> CUresult, since 11000, Release: launch::primary_release;
    cuDevicePrimaryCtxRelease(device: CUdevice) -> CUresult, since 7000, Release: launch::primary_release;
    cuDevicePrimaryCtxReset_v2(device: CUdevice) -> CUresult, since 11000, Release: launch::primary_reset;
    cuDevicePrimaryCtxReset(device: CUdevice) -> CUresult, since 7000, Release: launch::primary_reset;
    cuCtxCreate(context: *mut CUcontext, flags: c_uint, device: CUdevice) -> CUresult, since 2000, Memory: memory::context_create;
    cuCtxCreate_v2(context: *mut CUcontext, flags: c_uint, device: CUdevice) -> CUresult, since 3020, Memory: memory::context_create;
    cuCtxCreate_v3(context: *mut CUcontext, affinity: *mut c_void, count: c_int, flags: c_uint, device: CUdevice) -> CUresult, since 11040, Memory: memory::context_create_v3;
    cuCtxCreate_v4(context: *mut CUcontext, parameters: *mut c_void, flags: c_uint, device: CUdevice) -> CUresult, since 12050, Memory: memory::context_create_v4;
    cuCtxDestroy_v2(context: CUcontext) -> CUresult, since 4000, Release: launch::context_destroy;
    cuCtxDestroy(context: CUcontext) -> CUresult, since 2000, Release: launch::context_destroy;
    cuCtxDetach(context: CUcontext) -> CUresult, since 2000, Release: launch::context_detach;
    cuCtxSetLimit(limit: CUenum, value: usize) -> CUresult, since 3010, Memory: memory::context_set_limit;
    cuGreenCtxCreate(context: *mut CUgreenCtx, resources: CUdevResourceDesc, device: CUdevice, flags: c_uint) -> CUresult, since 12040, Memory: memory::green_create;
    cuGreenCtxDestroy(context: CUgreenCtx) -> CUresult, since 12040, Release: memory::green_destroy;

    cuModuleLoad(module: *mut CUmodule, path: *const c_char) -> CUresult, since 2000, Memory: memory::module_load;
    cuModuleLoadData(module: *mut CUmodule, image: *const c_void) -> CUresult, since 2000, Memory: memory::module_load_data;
    cuModuleLoadDataEx(module: *mut CUmodule, image: *const c_void, count: c_uint, options: *mut CUenum, values: *mut *mut c_void) -> CUresult, since 2010, Memory: memory::module_load_data_ex;
    cuModuleLoadFatBinary(module: *mut CUmodule, image: *const c_void) -> CUresult, since 2000, Memory: memory::module_load_data;
    cuModuleUnload(module: CUmodule) -> CUresult, since 2000, Release: memory::module_unload;
    cuLibraryLoadData(library: *mut CUlibrary, code: *const c_void, jit_options: *mut CUenum, jit_values: *mut *mut c_void, jit_count: c_uint, options: *mut CUenum, values: *mut *mut c_void, count: c_uint) -> CUresult, since 12000, Memory: memory::library_load;
    cuLibraryLoadFromFile(library: *mut CUlibrary, path: *const c_void, jit_options: *mut CUenum, jit_values: *mut *mut c_void, jit_count: c_uint, options: *mut CUenum, values: *mut *mut c_void, count: c_uint) -> CUresult, since 12000, Memory: memory::library_load;
    cuLibraryUnload(library: CUlibrary) -> CUresult, since 12000, Release: memory::library_unload;

    cuGraphAddMemAllocNode(node: *mut CUgraphNode, graph: CUgraph, dependencies: *const CUgraphNode, count: usize, parameters: *mut MemAllocNodeParams) -> CUresult, since 11040, Memory: memory::graph_add_alloc_node;
    cuGraphAddNode(node: *mut CUgraphNode, graph: CUgraph, dependencies: *const CUgraphNode, count: usize, parameters: *mut CUgraphNodeParams) -> CUresult, since 12020, Memory: memory::graph_add_node;
    cuGraphAddNode_v2(node: *mut CUgraphNode, graph: CUgraph, dependencies: *const CUgraphNode, edges: *const c_void, count: usize, parameters: *mut CUgraphNodeParams) -> CUresult, since 12030, Memory: memory::graph_add_node_v2;
    cuGraphAddNode_v3(node: *mut CUgraphNode, graph: CUgraph, dependencies: *const CUgraphNode, edges: *const c_void, count: usize, parameters: *mut CUgraphNodeParams) -> CUresult, since 13040, Memory: memory::graph_add_node_v2;
    cuGraphInstantiate(executable: *mut CUgraphExec, graph: CUgraph, error_node: *mut CUgraphNode, log: *mut c_char, log_size: usize) -> CUresult, since 10000, Memory: memory::graph_instantiate;
    cuGraphInstantiate_v2(executable: *mut CUgraphExec, graph: CUgraph, error_node: *mut CUgraphNode, log: *mut c_char, log_size: usize) -> CUresult, since 11000, Memory: memory::graph_instantiate;
    cuGraphInstantiateWithFlags(executable: *mut CUgraphExec, graph: CUgraph, flags: CUuint64) -> CUresult, since 11040, Memory: memory::graph_instantiate_with_flags;
    cuGraphInstantiateWithParams(executable: *mut CUgraphExec, graph: CUgraph, parameters: *mut GraphInstantiateParams) -> CUresult, since 12000, Memory: memory::graph_instantiate_with_params;
    cuGraphInstantiateWithParams_ptsz(executable: *mut CUgraphExec, graph: CUgraph, parameters: *mut GraphInstantiateParams) -> CUresult, since 12000, Memory: memory::graph_instantiate_with_params;
    cuGraphUpload(graph: CUgraphExec, stream: CUstream) -> CUresult, since 11010, Memory: memory::graph_upload;
    cuGraphUpload_ptsz(graph: CUgraphExec, stream: CUstream) -> CUresult, since 11010, Memory: memory::graph_upload;
    cuDeviceGraphMemTrim(device: CUdevice) -> CUresult, since 11040, Release: memory::graph_mem_trim;
}
