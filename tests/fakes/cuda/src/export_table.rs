//! The two private tables that the CUDA runtime asks for: known by their ids, undocumented beyond. Every function in
//! them answers "not supported", which the runtime takes for a driver without the feature.

use std::ffi::c_int;

use crate::abi::Code;

/// Ids as the static runtimes of 12.9 and 13.x pass them.
const IDS: [[u8; 16]; 2] = [
    [0xF8, 0xCF, 0xF9, 0x51, 0x21, 0x46, 0x8B, 0x4E, 0xB9, 0xE2, 0xFB, 0x46, 0x9E, 0x7C, 0x0D, 0xD9],
    [0x6B, 0xD5, 0xFB, 0x6C, 0x5B, 0xF4, 0xE7, 0x4A, 0x89, 0x87, 0xD9, 0x39, 0x12, 0xFD, 0x9D, 0xF9],
];

/// Functions of a table.
const ENTRIES: usize = 63;

/// A table: its size in bytes, then its functions.
#[repr(C)]
struct Table {
    bytes: usize,
    functions: [extern "C" fn() -> c_int; ENTRIES],
}

static TABLE: Table = Table { bytes: size_of::<Table>(), functions: [not_supported; ENTRIES] };

extern "C" fn not_supported() -> c_int {
    Code::NOT_SUPPORTED.0
}

/// The table with that id.
pub(crate) fn find(id: &[u8; 16]) -> Option<*const ()> {
    IDS.contains(id).then(|| (&raw const TABLE).cast())
}
