//! Start, versions, error texts, and the ways to find an entry point.
#![expect(unsafe_code, reason = "exports entry points under their C names")]

use std::collections::HashMap;
use std::ffi::{c_char, c_int, c_uint};
use std::sync::OnceLock;

use crate::abi::{Code, Opaque, Out, TEXTS, Text, Uuid};
use crate::driver::{Driver, number};
use crate::gate;
use crate::table::{self, Flavour, Row, site};

/// `CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM`.
const PER_THREAD: u64 = 2;

/// `CUdriverProcAddressQueryResult`.
const FOUND: c_uint = 0;
const SYMBOL_NOT_FOUND: c_uint = 1;
const VERSION_NOT_SUFFICIENT: c_uint = 2;

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuInit(flags: c_uint) -> c_int {
    crate::recursion::call_back();
    gate::init(&site::cuInit, || if flags == 0 { Driver::start() } else { Err(Code::INVALID_VALUE) })
}

/// The CUDA version, told before `cuInit` too.
pub(crate) fn version() -> c_int {
    static VERSION: OnceLock<c_int> = OnceLock::new();
    *VERSION.get_or_init(|| {
        let node = crate::cards::Node::find();
        node.map_or_else(
            |_| c_int::try_from(number("FAKE_CUDA_VERSION", 12_090)).unwrap_or(12_090),
            |n| n.version(),
        )
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuDriverGetVersion(out: Out<c_int>) -> c_int {
    gate::early(&site::cuDriverGetVersion, || out.put(version()))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuGetErrorName(code: c_int, text: Out<*const c_char>) -> c_int {
    gate::early(&site::cuGetErrorName, || put_text(code, text, |t| t.1.as_ptr()))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuGetErrorString(code: c_int, text: Out<*const c_char>) -> c_int {
    gate::early(&site::cuGetErrorString, || put_text(code, text, |t| t.2.as_ptr()))
}

type Named = (c_int, &'static std::ffi::CStr, &'static std::ffi::CStr);

fn put_text(
    code: c_int,
    text: Out<*const c_char>,
    pick: impl Fn(&Named) -> *const c_char,
) -> Result<(), Code> {
    let found = TEXTS.iter().find(|t| t.0 == code);
    text.put(found.map_or(std::ptr::null(), pick))?;
    if found.is_some() { Ok(()) } else { Err(Code::INVALID_VALUE) }
}

fn rows() -> &'static HashMap<&'static str, Vec<&'static Row>> {
    static BY_NAME: OnceLock<HashMap<&'static str, Vec<&'static Row>>> = OnceLock::new();
    BY_NAME.get_or_init(|| {
        let mut by_name: HashMap<_, Vec<&Row>> = HashMap::new();
        for row in table::rows() {
            by_name.entry(row.name).or_default().push(row);
        }
        by_name
    })
}

/// The entry point that a program built for CUDA `version` means by `name`: of the rows that this driver knows and that are no
/// newer than asked, the newest; one of the thread's own default stream where that is asked for and there is one.
pub(crate) fn find(name: &str, asked: c_int, flags: u64, driver: c_int) -> Result<&'static Row, c_uint> {
    let known = rows().get(name).into_iter().flatten().filter(|r| r.version <= driver);
    let known: Vec<&&Row> = known.collect();
    if known.is_empty() {
        return Err(SYMBOL_NOT_FOUND);
    }
    let newest = |own: bool| {
        let fits = known.iter().filter(|r| r.version <= asked && (r.flavour != Flavour::Legacy) == own);
        fits.max_by_key(|r| r.version).map(|r| **r)
    };
    let own = if flags & PER_THREAD == 0 { None } else { newest(true) };
    own.or_else(|| newest(false)).ok_or(VERSION_NOT_SUFFICIENT)
}

fn get_proc(
    name: Text,
    out: Out<*const ()>,
    asked: c_int,
    flags: u64,
    status: Out<c_uint>,
) -> Result<(), Code> {
    out.check()?;
    let name = name.read()?;
    if flags > 3 {
        return Err(Code::INVALID_VALUE);
    }
    let found = find(&name, asked, flags, version());
    log(&name, asked, flags, found.as_ref().map_or("-", |r| r.symbol));
    match found {
        Ok(row) => {
            status.put_if(FOUND)?;
            out.put(row.address.0)
        }
        Err(why) => {
            // The interface's own words: success, a null pointer, and the reason in the status.
            status.put_if(why)?;
            out.put(std::ptr::null())
        }
    }
}

/// Adds a request and its answer to the file that `FAKE_CUDA_PROC_LOG` names.
fn log(name: &str, asked: c_int, flags: u64, symbol: &str) {
    use std::io::Write as _;
    let Some(path) = std::env::var_os("FAKE_CUDA_PROC_LOG") else { return };
    if let Ok(mut file) = std::fs::File::options().create(true).append(true).open(path) {
        // A log that cannot be written is missed by the test that reads it.
        let _ = writeln!(file, "{name} {asked} {flags} {symbol}");
    }
}

/// CUDA 11.3 to 11.8: no status.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuGetProcAddress(
    name: Text,
    out: Out<*const ()>,
    version: c_int,
    flags: u64,
) -> c_int {
    gate::early(&site::cuGetProcAddress, || get_proc(name, out, version, flags, no_status()))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuGetProcAddress_v2(
    name: Text,
    out: Out<*const ()>,
    version: c_int,
    flags: u64,
    status: Out<c_uint>,
) -> c_int {
    gate::early(&site::cuGetProcAddress_v2, || get_proc(name, out, version, flags, status))
}

fn no_status() -> Out<c_uint> {
    Out::null()
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuGetExportTable(table: Out<Opaque>, id: Out<Uuid>) -> c_int {
    gate::early(&site::cuGetExportTable, || {
        let found = crate::export_table::find(&id.get()?.bytes).ok_or(Code::NOT_FOUND)?;
        table.cast::<*const ()>().put(found)
    })
}
