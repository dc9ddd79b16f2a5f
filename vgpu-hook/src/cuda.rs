//! The CUDA driver's ABI as far as it is used: types of `cuda.h` 12.9 (unchanged in 13.5), names as there.

use core::ffi::{c_int, c_uint, c_void};

/// `CUresult`.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub(crate) struct CUresult(pub(crate) c_int);

impl CUresult {
    pub(crate) const SUCCESS: Self = Self(0);
    pub(crate) const INVALID_VALUE: Self = Self(1);
    pub(crate) const OUT_OF_MEMORY: Self = Self(2);
    pub(crate) const NOT_INITIALIZED: Self = Self(3);
    pub(crate) const OPERATING_SYSTEM: Self = Self(304);
    pub(crate) const INVALID_HANDLE: Self = Self(400);
    pub(crate) const NOT_FOUND: Self = Self(500);
    pub(crate) const NOT_SUPPORTED: Self = Self(801);

    pub(crate) const fn is_ok(self) -> bool {
        self.0 == 0
    }
}

/// `CUdevice`: an ordinal.
pub(crate) type CUdevice = c_int;
/// `CUdeviceptr` since CUDA 3.2.
pub(crate) type CUdeviceptr = u64;
/// `CUdeviceptr_v1`, of the names without `_v2` that CUDA 3.1 had.
pub(crate) type CUdeviceptrV1 = c_uint;
/// `cuuint64_t`.
pub(crate) type CUuint64 = u64;
/// An enumeration as C passes it.
pub(crate) type CUenum = c_uint;
/// `CUmemGenericAllocationHandle`.
pub(crate) type CUmemGenericAllocationHandle = u64;

macro_rules! handles {
    ($($(#[$doc:meta])* $name:ident)*) => {
        $($(#[$doc])* pub(crate) type $name = *mut c_void;)*
    };
}
handles! {
    CUcontext CUmodule CUfunction CUlibrary CUstream CUevent CUarray CUmipmappedArray CUgraph CUgraphExec CUgraphNode
    CUmemoryPool CUgreenCtx CUdevResourceDesc
}

/// `CUuuid`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct CUuuid(pub(crate) [u8; 16]);

/// `CUDA_ARRAY_DESCRIPTOR` since CUDA 3.2.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ArrayDescriptor {
    pub(crate) width: usize,
    pub(crate) height: usize,
    pub(crate) format: CUenum,
    pub(crate) channels: c_uint,
}

/// `CUDA_ARRAY3D_DESCRIPTOR` since CUDA 3.2.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Array3dDescriptor {
    pub(crate) width: usize,
    pub(crate) height: usize,
    pub(crate) depth: usize,
    pub(crate) format: CUenum,
    pub(crate) channels: c_uint,
    pub(crate) flags: c_uint,
}

/// `CUDA_ARRAY_MEMORY_REQUIREMENTS`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ArrayMemoryRequirements {
    pub(crate) size: usize,
    pub(crate) alignment: usize,
    reserved: [c_uint; 4],
}

/// `CUmemLocation`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct CUmemLocation {
    /// 1 = device, 2 = host, 3 and 4 = host NUMA node.
    pub(crate) kind: CUenum,
    pub(crate) id: c_int,
}

/// `CU_MEM_LOCATION_TYPE_DEVICE`.
pub(crate) const LOCATION_DEVICE: CUenum = 1;

/// `CUmemAllocationProp`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct CUmemAllocationProp {
    pub(crate) kind: CUenum,
    pub(crate) handle_types: CUenum,
    pub(crate) location: CUmemLocation,
    win32: *mut c_void,
    flags: [u8; 8],
}

/// `CUmemPoolProps`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct CUmemPoolProps {
    pub(crate) kind: CUenum,
    pub(crate) handle_types: CUenum,
    pub(crate) location: CUmemLocation,
    win32: *mut c_void,
    pub(crate) max_size: usize,
    reserved: [u8; 56],
}

/// `CUDA_MEM_ALLOC_NODE_PARAMS` (v1 and v2 alike).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct MemAllocNodeParams {
    pub(crate) pool: CUmemPoolProps,
    pub(crate) access: *const c_void,
    pub(crate) access_count: usize,
    pub(crate) bytes: usize,
    pub(crate) pointer: CUdeviceptr,
}

/// `CUgraphNodeParams`: a kind, and a union of which the allocation is read in place.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct CUgraphNodeParams {
    /// 0 = kernel, 10 = allocation, 11 = free, and others.
    pub(crate) kind: CUenum,
    reserved0: [c_int; 3],
    pub(crate) parameters: [i64; 29],
    reserved2: i64,
}

/// `CUlaunchConfig`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct CUlaunchConfig {
    pub(crate) grid: [c_uint; 3],
    pub(crate) block: [c_uint; 3],
    pub(crate) shared_bytes: c_uint,
    pub(crate) stream: CUstream,
    pub(crate) attributes: *mut c_void,
    pub(crate) attribute_count: c_uint,
}

/// `CUDA_LAUNCH_PARAMS`, of a cooperative launch on several devices.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct LaunchParams {
    pub(crate) function: CUfunction,
    pub(crate) grid: [c_uint; 3],
    pub(crate) block: [c_uint; 3],
    pub(crate) shared_bytes: c_uint,
    pub(crate) stream: CUstream,
    pub(crate) parameters: *mut *mut c_void,
}

/// `CUDA_GRAPH_INSTANTIATE_PARAMS`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct GraphInstantiateParams {
    pub(crate) flags: CUuint64,
    pub(crate) upload_stream: CUstream,
    pub(crate) error_node: CUgraphNode,
    pub(crate) result: CUenum,
}

// Sizes printed by a C program compiled with NVIDIA's headers, x86-64 and aarch64 alike.
const _: () = {
    assert!(size_of::<ArrayDescriptor>() == 24 && size_of::<Array3dDescriptor>() == 40);
    assert!(size_of::<ArrayMemoryRequirements>() == 32);
    assert!(size_of::<CUmemLocation>() == 8 && size_of::<CUmemAllocationProp>() == 32);
    assert!(size_of::<CUmemPoolProps>() == 88 && size_of::<MemAllocNodeParams>() == 120);
    assert!(
        size_of::<CUgraphNodeParams>() == 256 && core::mem::offset_of!(CUgraphNodeParams, parameters) == 16
    );
    assert!(size_of::<CUlaunchConfig>() == 56 && core::mem::offset_of!(CUlaunchConfig, stream) == 32);
    assert!(size_of::<LaunchParams>() == 56 && size_of::<GraphInstantiateParams>() == 32);
    assert!(size_of::<CUuuid>() == 16);
};
