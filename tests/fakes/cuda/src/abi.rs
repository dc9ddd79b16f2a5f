//! The C side: codes, argument types and structs of `cuda.h` 12.9 and 13.0.
#![expect(unsafe_code, reason = "reads and writes through pointers that the C interface hands over")]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

/// A `CUresult` other than success.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Code(pub(crate) c_int);

impl Code {
    pub(crate) const INVALID_VALUE: Self = Self(1);
    pub(crate) const OUT_OF_MEMORY: Self = Self(2);
    pub(crate) const NOT_INITIALIZED: Self = Self(3);
    pub(crate) const NO_DEVICE: Self = Self(100);
    pub(crate) const INVALID_DEVICE: Self = Self(101);
    pub(crate) const INVALID_IMAGE: Self = Self(200);
    pub(crate) const INVALID_CONTEXT: Self = Self(201);
    pub(crate) const FILE_NOT_FOUND: Self = Self(301);
    pub(crate) const OPERATING_SYSTEM: Self = Self(304);
    pub(crate) const INVALID_HANDLE: Self = Self(400);
    pub(crate) const NOT_FOUND: Self = Self(500);
    pub(crate) const NOT_READY: Self = Self(600);
    pub(crate) const PRIMARY_CONTEXT_ACTIVE: Self = Self(708);
    pub(crate) const CONTEXT_IS_DESTROYED: Self = Self(709);
    pub(crate) const HOST_MEMORY_ALREADY_REGISTERED: Self = Self(712);
    pub(crate) const HOST_MEMORY_NOT_REGISTERED: Self = Self(713);
    pub(crate) const NOT_SUPPORTED: Self = Self(801);
    pub(crate) const STREAM_CAPTURE_UNSUPPORTED: Self = Self(900);
    pub(crate) const STREAM_CAPTURE_INVALIDATED: Self = Self(901);
    pub(crate) const STREAM_CAPTURE_UNMATCHED: Self = Self(903);
    pub(crate) const STREAM_CAPTURE_WRONG_THREAD: Self = Self(908);
    pub(crate) const GRAPH_EXEC_UPDATE_FAILURE: Self = Self(910);
    pub(crate) const ILLEGAL_STATE: Self = Self(401);
}

/// Names and texts of the codes that this driver answers (`cuGetErrorName`, `cuGetErrorString`).
pub(crate) const TEXTS: &[(c_int, &CStr, &CStr)] = &[
    (0, c"CUDA_SUCCESS", c"no error"),
    (1, c"CUDA_ERROR_INVALID_VALUE", c"invalid argument"),
    (2, c"CUDA_ERROR_OUT_OF_MEMORY", c"out of memory"),
    (3, c"CUDA_ERROR_NOT_INITIALIZED", c"initialization error"),
    (100, c"CUDA_ERROR_NO_DEVICE", c"no CUDA-capable device is detected"),
    (101, c"CUDA_ERROR_INVALID_DEVICE", c"invalid device ordinal"),
    (200, c"CUDA_ERROR_INVALID_IMAGE", c"device kernel image is invalid"),
    (201, c"CUDA_ERROR_INVALID_CONTEXT", c"invalid device context"),
    (301, c"CUDA_ERROR_FILE_NOT_FOUND", c"file not found"),
    (304, c"CUDA_ERROR_OPERATING_SYSTEM", c"OS call failed or operation not supported on this OS"),
    (400, c"CUDA_ERROR_INVALID_HANDLE", c"invalid resource handle"),
    (401, c"CUDA_ERROR_ILLEGAL_STATE", c"the operation cannot be performed in the present state"),
    (500, c"CUDA_ERROR_NOT_FOUND", c"named symbol not found"),
    (600, c"CUDA_ERROR_NOT_READY", c"device not ready"),
    (700, c"CUDA_ERROR_ILLEGAL_ADDRESS", c"an illegal memory access was encountered"),
    (708, c"CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE", c"cannot set while device is active in this process"),
    (709, c"CUDA_ERROR_CONTEXT_IS_DESTROYED", c"context is destroyed"),
    (
        712,
        c"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
        c"part or all of the requested memory range is already mapped",
    ),
    (
        713,
        c"CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
        c"pointer does not correspond to a registered memory region",
    ),
    (719, c"CUDA_ERROR_LAUNCH_FAILED", c"unspecified launch failure"),
    (801, c"CUDA_ERROR_NOT_SUPPORTED", c"operation not supported"),
    (900, c"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", c"operation not permitted when stream is capturing"),
    (
        901,
        c"CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
        c"operation failed due to a previous error during capture",
    ),
    (903, c"CUDA_ERROR_STREAM_CAPTURE_UNMATCHED", c"capture was not initiated in this stream"),
    (908, c"CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD", c"attempt to terminate a thread-local capture sequence from another thread"),
    (910, c"CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE", c"the graph update was not performed because it included changes which violated constraints specific to instantiated graph update"),
    (999, c"CUDA_ERROR_UNKNOWN", c"unknown error"),
];

/// A pointer argument that the callee writes through, reads, or both; null where the caller says so.
///
/// Only the C interface makes one, and its contract is: null, or valid for as many elements as the caller
/// announces. Null and alignment are checked.
#[repr(transparent)]
#[derive(Debug)]
pub(crate) struct Out<T>(*mut T);

impl<T> Clone for Out<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Out<T> {}

impl<T: Copy> Out<T> {
    /// An argument that is left out.
    pub(crate) fn null() -> Self {
        Self(std::ptr::null_mut())
    }

    /// A pointer that came as a number.
    pub(crate) fn at_address(address: usize) -> Self {
        Self(std::ptr::with_exposed_provenance_mut(address))
    }

    pub(crate) fn is_null(self) -> bool {
        self.0.is_null()
    }

    /// Refuses what cannot be written, so that nothing is done before.
    pub(crate) fn check(self) -> Result<(), Code> {
        self.at(0).map(|_| ())
    }

    fn at(self, index: usize) -> Result<*mut T, Code> {
        let place = self.0.wrapping_add(index);
        if self.0.is_null() || !place.is_aligned() { Err(Code::INVALID_VALUE) } else { Ok(place) }
    }

    pub(crate) fn put(self, value: T) -> Result<(), Code> {
        self.put_at(0, value)
    }

    pub(crate) fn put_at(self, index: usize, value: T) -> Result<(), Code> {
        let target = self.at(index)?;
        // SAFETY: not null, aligned, and by the interface's contract valid for that element.
        unsafe { target.write(value) };
        Ok(())
    }

    /// Writes an argument that may be left out.
    pub(crate) fn put_if(self, value: T) -> Result<(), Code> {
        if self.is_null() { Ok(()) } else { self.put(value) }
    }

    pub(crate) fn get(self) -> Result<T, Code> {
        self.get_at(0)
    }

    pub(crate) fn get_at(self, index: usize) -> Result<T, Code> {
        let source = self.at(index)?;
        // SAFETY: not null, aligned, and by the interface's contract an initialised element.
        Ok(unsafe { source.read() })
    }

    pub(crate) fn cast<U>(self) -> Out<U> {
        Out(self.0.cast())
    }

    /// The argument `count` elements on.
    pub(crate) fn offset(self, count: usize) -> Self {
        Self(self.0.wrapping_add(count))
    }

    pub(crate) fn address(self) -> u64 {
        self.0.addr() as u64
    }
}

impl Out<c_char> {
    /// Writes a string into a buffer of `length` bytes, cut where it does not fit, as the driver does.
    pub(crate) fn put_text(self, length: c_int, text: &str) -> Result<(), Code> {
        let room = usize::try_from(length).map_err(|_| Code::INVALID_VALUE)?;
        let Some(room) = room.checked_sub(1) else { return Err(Code::INVALID_VALUE) };
        let text = &text.as_bytes()[..text.len().min(room)];
        for (place, byte) in text.iter().chain([&0]).enumerate() {
            self.put_at(place, c_char::from_ne_bytes([*byte]))?;
        }
        Ok(())
    }
}

/// A string argument.
#[repr(transparent)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Text(*const c_char);

impl Text {
    /// Its content; null is refused.
    pub(crate) fn read(self) -> Result<String, Code> {
        if self.0.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: not null, and by the interface's contract a string that ends with a null byte.
        let text = unsafe { CStr::from_ptr(self.0) };
        Ok(text.to_string_lossy().into_owned())
    }
}

/// Device address.
pub(crate) type DevicePtr = u64;
/// Ordinal of a device.
pub(crate) type Device = c_int;
/// Any opaque handle: a number that stands for an object, never an address that anyone follows.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Handle(pub(crate) usize);
/// A pointer that is carried and not followed.
pub(crate) type Opaque = Out<u8>;

/// `CUuuid`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Uuid {
    pub(crate) bytes: [u8; 16],
}

/// `CUmemLocation`: 1 device, 2 host, 3 and 4 host NUMA nodes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Location {
    pub(crate) kind: c_uint,
    pub(crate) id: c_int,
}

/// `CU_MEM_LOCATION_TYPE_DEVICE`.
pub(crate) const ON_DEVICE: c_uint = 1;

/// `CUmemAllocationProp`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct AllocationProp {
    pub(crate) kind: c_uint,
    pub(crate) handle_types: c_uint,
    pub(crate) location: Location,
    pub(crate) win32: usize,
    pub(crate) flags: [u8; 8],
}

/// `CUmemPoolProps`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct PoolProps {
    pub(crate) kind: c_uint,
    pub(crate) handle_types: c_uint,
    pub(crate) location: Location,
    pub(crate) win32: usize,
    pub(crate) max_size: usize,
    pub(crate) usage: u16,
    pub(crate) reserved: [u8; 54],
}

/// `CUDA_ARRAY_DESCRIPTOR`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct ArrayDescriptor {
    pub(crate) width: usize,
    pub(crate) height: usize,
    pub(crate) format: c_uint,
    pub(crate) channels: c_uint,
}

/// `CUDA_ARRAY3D_DESCRIPTOR`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Array3dDescriptor {
    pub(crate) width: usize,
    pub(crate) height: usize,
    pub(crate) depth: usize,
    pub(crate) format: c_uint,
    pub(crate) channels: c_uint,
    pub(crate) flags: c_uint,
}

/// `CUDA_ARRAY_MEMORY_REQUIREMENTS`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct MemoryRequirements {
    pub(crate) size: usize,
    pub(crate) alignment: usize,
    pub(crate) reserved: [c_uint; 4],
}

/// `CUlaunchConfig`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct LaunchConfig {
    pub(crate) grid: [c_uint; 3],
    pub(crate) block: [c_uint; 3],
    pub(crate) shared: c_uint,
    pub(crate) stream: Handle,
    pub(crate) attributes: Opaque,
    pub(crate) count: c_uint,
}

/// `CUDA_LAUNCH_PARAMS`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct LaunchParams {
    pub(crate) function: Handle,
    pub(crate) grid: [c_uint; 3],
    pub(crate) block: [c_uint; 3],
    pub(crate) shared: c_uint,
    pub(crate) stream: Handle,
    pub(crate) arguments: Opaque,
}

/// `CUDA_KERNEL_NODE_PARAMS_v1`; the later versions only append.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct KernelNode {
    pub(crate) function: Handle,
    pub(crate) grid: [c_uint; 3],
    pub(crate) block: [c_uint; 3],
    pub(crate) shared: c_uint,
    pub(crate) arguments: Opaque,
    pub(crate) extra: Opaque,
}

/// `CUDA_KERNEL_NODE_PARAMS_v2` and `_v3`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct KernelNode2 {
    pub(crate) first: KernelNode,
    pub(crate) kernel: Handle,
    pub(crate) context: Handle,
}

/// `CUDA_MEM_ALLOC_NODE_PARAMS`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct AllocNode {
    pub(crate) pool: PoolProps,
    pub(crate) access: Opaque,
    pub(crate) access_count: usize,
    pub(crate) size: usize,
    pub(crate) address: DevicePtr,
}

/// Head of `CUgraphNodeParams`; the node's own struct follows.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct NodeParams {
    pub(crate) kind: c_uint,
    pub(crate) reserved: [c_int; 3],
    pub(crate) body: [u64; 29],
    pub(crate) end: u64,
}

/// `CUDA_GRAPH_INSTANTIATE_PARAMS`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct InstantiateParams {
    pub(crate) flags: u64,
    pub(crate) stream: Handle,
    pub(crate) node: Handle,
    pub(crate) result: c_uint,
}

/// `CUmulticastObjectProp`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct MulticastProp {
    pub(crate) devices: c_uint,
    pub(crate) size: usize,
    pub(crate) handle_types: u64,
    pub(crate) flags: u64,
}

/// `CUDA_EXTERNAL_MEMORY_HANDLE_DESC`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExternalMemory {
    pub(crate) kind: c_uint,
    pub(crate) handle: [u64; 2],
    pub(crate) size: u64,
    pub(crate) flags: c_uint,
    pub(crate) reserved: [c_uint; 16],
}

/// `CUDA_EXTERNAL_MEMORY_BUFFER_DESC`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExternalBuffer {
    pub(crate) offset: u64,
    pub(crate) size: u64,
    pub(crate) flags: c_uint,
    pub(crate) reserved: [c_uint; 16],
}

/// `CUipcMemHandle`, `CUipcEventHandle`, `CUmemFabricHandle`, `CUmemPoolPtrExportData`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bytes64 {
    pub(crate) bytes: [u8; 64],
}

/// `CUDA_MEMCPY2D`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Copy2d {
    pub(crate) source: Side2d,
    pub(crate) target: Side2d,
    pub(crate) width: usize,
    pub(crate) height: usize,
}

/// One side of a `CUDA_MEMCPY2D`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Side2d {
    pub(crate) x: usize,
    pub(crate) y: usize,
    pub(crate) kind: c_uint,
    pub(crate) host: u64,
    pub(crate) device: DevicePtr,
    pub(crate) array: Handle,
    pub(crate) pitch: usize,
}

/// `CUdevprop`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct DeviceProperties {
    pub(crate) values: [c_int; 14],
}

/// A callback of the program.
pub(crate) type HostFunction = Option<extern "C" fn(*mut c_void)>;

const _: () = assert!(size_of::<AllocationProp>() == 32);
const _: () = assert!(size_of::<PoolProps>() == 88);
const _: () = assert!(size_of::<LaunchConfig>() == 56);
const _: () = assert!(size_of::<KernelNode2>() == 72);
const _: () = assert!(size_of::<AllocNode>() == 120);
const _: () = assert!(size_of::<NodeParams>() == 256);
const _: () = assert!(size_of::<Copy2d>() == 128);
const _: () = assert!(size_of::<ExternalMemory>() == 104);
