//! The private tables that the CUDA runtime asks for: known by their ids, undocumented beyond. Most functions in them answer "not
//! supported", which the runtime takes for a driver without the feature. The others are the ones without which it does not get as far
//! as the list of cards: the handle of a primary context, values kept by context, and flags that say that no tool listens.
//!
//! The last table that it asks for lets it check that the driver is NVIDIA's own. That check is not imitated: the runtime finds and asks for
//! every entry point here, starts the driver, reads the cards, and then refuses to go on. Programs that allocate and launch use the driver
//! interface.

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::atomic::AtomicU64;

use crate::abi::{Code, Handle, Out};

/// Ids as the static runtimes of 12.9 and 13.x pass them.
const PLAIN: [u8; 16] =
    [0xF8, 0xCF, 0xF9, 0x51, 0x21, 0x46, 0x8B, 0x4E, 0xB9, 0xE2, 0xFB, 0x46, 0x9E, 0x7C, 0x0D, 0xD9];
const RUNTIME: [u8; 16] =
    [0x6B, 0xD5, 0xFB, 0x6C, 0x5B, 0xF4, 0xE7, 0x4A, 0x89, 0x87, 0xD9, 0x39, 0x12, 0xFD, 0x9D, 0xF9];
const THREADS: [u8; 16] =
    [0x42, 0xD8, 0x5A, 0x81, 0x23, 0xF6, 0xCB, 0x47, 0x82, 0x98, 0xF6, 0xE7, 0x8A, 0x3A, 0xEC, 0xDC];
const STORAGE: [u8; 16] =
    [0xC6, 0x93, 0x33, 0x6E, 0x11, 0x21, 0xDF, 0x11, 0xA8, 0xC3, 0x68, 0xF3, 0x55, 0xD8, 0x95, 0x93];
const PROCESS: [u8; 16] =
    [0x26, 0x3E, 0x88, 0x60, 0x7C, 0xD2, 0x61, 0x43, 0x92, 0xF6, 0xBB, 0xD5, 0x00, 0x6D, 0xFA, 0x7E];
const FLAGS: [u8; 16] =
    [0x21, 0x31, 0x8C, 0x60, 0x97, 0x14, 0x32, 0x48, 0x8C, 0xA6, 0x41, 0xFF, 0x73, 0x24, 0xC8, 0xF2];
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

/// The second and the sixth function hand out arrays of flags; the runtimes want more than 566 and 13 of them.
static TOOLS_TABLE: Table = Table {
    bytes: 7 * size_of::<usize>(),
    functions: {
        let mut functions = [not_supported::<2> as Function; ENTRIES];
        functions[1] = callback_flags;
        functions[5] = domain_flags;
        functions
    },
};

/// Flags that say that nothing listens.
static FLAGS_TABLE: Table =
    Table { bytes: 2 * size_of::<usize>(), functions: [callback_flags as Function; ENTRIES] };

/// Values of the runtime by context and key: put, delete, get. This table has no size. A context that is destroyed takes its values with
/// it; the function that the runtime gives for that case is not called, as it would come back in here.
#[repr(C)]
struct Storage {
    put: extern "C" fn(Handle, usize, usize, usize) -> c_int,
    delete: extern "C" fn(Handle, usize) -> c_int,
    get: extern "C" fn(Out<usize>, Handle, usize) -> c_int,
    end: usize,
}

static STORAGE_TABLE: Storage =
    Storage { put: storage_put, delete: storage_delete, get: storage_get, end: 0 };

fn with_storage(
    context: Handle,
    work: impl FnOnce(&mut crate::objects::Objects, Handle) -> Result<(), Code>,
) -> c_int {
    let mut driver = crate::gate::driver();
    let done = driver.as_mut().ok_or(Code::NOT_INITIALIZED).and_then(|driver| {
        let context = if context == Handle(0) { crate::context::current()?.handle } else { context };
        work(&mut driver.objects, context)
    });
    done.map_or_else(|code| code.0, |()| 0)
}

extern "C" fn storage_put(context: Handle, key: usize, value: usize, _destroy: usize) -> c_int {
    with_storage(context, |objects, context| {
        objects.storage.insert((context, key), value);
        Ok(())
    })
}

extern "C" fn storage_delete(context: Handle, key: usize) -> c_int {
    with_storage(context, |objects, context| {
        objects.storage.remove(&(context, key)).map(|_| ()).ok_or(Code::INVALID_HANDLE)
    })
}

extern "C" fn storage_get(out: Out<usize>, context: Handle, key: usize) -> c_int {
    with_storage(context, |objects, context| {
        out.put(*objects.storage.get(&(context, key)).ok_or(Code::INVALID_HANDLE)?)
    })
}

static CALLBACKS: [AtomicU64; 1024] = [const { AtomicU64::new(0) }; 1024];
static DOMAINS: [AtomicU64; 64] = [const { AtomicU64::new(0) }; 64];

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
    if *id == STORAGE {
        return Some(ptr::from_ref(&STORAGE_TABLE).cast());
    }
    let known = [
        (PLAIN, &PLAIN_TABLE),
        (THREADS, &PLAIN_TABLE),
        (PROCESS, &PLAIN_TABLE),
        (RUNTIME, &RUNTIME_TABLE),
        (FLAGS, &FLAGS_TABLE),
        (TOOLS, &TOOLS_TABLE),
    ];
    known.into_iter().find(|(i, _)| i == id).map(|(_, table)| ptr::from_ref(table).cast())
}
