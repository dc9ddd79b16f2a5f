//! The private tables that the CUDA runtime asks for: known by their ids, undocumented beyond. Every function in them answers "not
//! supported", which the runtime takes for a driver without the feature; only the table of tools' hooks has to hand
//! out flags, which say that no tool listens.

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::atomic::AtomicU64;

use crate::abi::{Code, Handle, Out};

/// Ids as the static runtimes of 12.9 and 13.x pass them.
const PLAIN: [u8; 16] =
    [0xF8, 0xCF, 0xF9, 0x51, 0x21, 0x46, 0x8B, 0x4E, 0xB9, 0xE2, 0xFB, 0x46, 0x9E, 0x7C, 0x0D, 0xD9];
const RUNTIME: [u8; 16] =
    [0x6B, 0xD5, 0xFB, 0x6C, 0x5B, 0xF4, 0xE7, 0x4A, 0x89, 0x87, 0xD9, 0x39, 0x12, 0xFD, 0x9D, 0xF9];
const TOOLS: [u8; 16] =
    [0xA0, 0x94, 0x79, 0x8C, 0x2E, 0x74, 0x2E, 0x74, 0x93, 0xF2, 0x08, 0x00, 0x20, 0x0C, 0x0A, 0x66];

/// Functions of a table.
const ENTRIES: usize = 63;

type Function = extern "C" fn(Out<*const c_void>, usize) -> c_int;

/// A table: its size in bytes, then its functions.
#[repr(C)]
struct Table {
    bytes: usize,
    functions: [Function; ENTRIES],
}

/// For traces.
const NAMES: [&str; 3] = ["(plain table)", "(runtime table)", "(tools table)"];

static PLAIN_TABLE: Table = Table { bytes: size_of::<Table>(), functions: [not_supported::<0>; ENTRIES] };

/// The second function tells a card's primary context without retaining it.
static RUNTIME_TABLE: Table = Table {
    bytes: size_of::<Table>(),
    functions: {
        let mut functions = [not_supported::<1> as Function; ENTRIES];
        functions[1] = primary_context;
        functions
    },
};

/// The second and the sixth function hand out arrays of flags.
static TOOLS_TABLE: Table = Table {
    bytes: 7 * size_of::<usize>(),
    functions: {
        let mut functions = [not_supported::<2> as Function; ENTRIES];
        functions[1] = callback_flags;
        functions[5] = domain_flags;
        functions
    },
};

static CALLBACKS: [AtomicU64; 1024] = [const { AtomicU64::new(0) }; 1024];
static DOMAINS: [AtomicU64; 2] = [const { AtomicU64::new(0) }; 2];

extern "C" fn not_supported<const TABLE: usize>(_: Out<*const c_void>, _: usize) -> c_int {
    crate::gate::trace(NAMES.get(TABLE).copied().unwrap_or_default(), Code::NOT_SUPPORTED.0);
    Code::NOT_SUPPORTED.0
}

extern "C" fn primary_context(context: Out<*const c_void>, device: usize) -> c_int {
    let driver = crate::gate::driver();
    let primary = driver.as_ref().and_then(|d| d.primaries.get(device & 0xFFFF_FFFF));
    let told = primary.ok_or(Code::INVALID_DEVICE).and_then(|p| context.cast::<Handle>().put(p.handle));
    told.map_or_else(|code| code.0, |()| 0)
}

extern "C" fn callback_flags(flags: Out<*const c_void>, count: usize) -> c_int {
    hand_out(&CALLBACKS, flags, count)
}

extern "C" fn domain_flags(flags: Out<*const c_void>, count: usize) -> c_int {
    hand_out(&DOMAINS, flags, count)
}

fn hand_out(array: &'static [AtomicU64], flags: Out<*const c_void>, count: usize) -> c_int {
    let count = Out::<usize>::at_address(count);
    let given = flags.put_if(array.as_ptr().cast()).and_then(|()| count.put_if(array.len()));
    given.map_or_else(|code| code.0, |()| 0)
}

/// The table with that id.
pub(crate) fn find(id: &[u8; 16]) -> Option<*const ()> {
    let known = [(PLAIN, &PLAIN_TABLE), (RUNTIME, &RUNTIME_TABLE), (TOOLS, &TOOLS_TABLE)];
    known.into_iter().find(|(i, _)| i == id).map(|(_, table)| ptr::from_ref(table).cast())
}
