//! The one list of the functions that this library stands in for.
//!
//! Each family has a file of rows. A row says under which name the driver exports the function, since which CUDA
//! version that form of it is what `cuGetProcAddress` answers, what the function charges, and which implementation gets
//! the call. From it come the exported wrapper, and what `dlsym` and `cuGetProcAddress` answer.
//!
//! ```text
//! table! { Cuda;
//!     cuMemAlloc_v2(pointer: *mut CUdeviceptr, bytes: usize) -> CUresult, since 3020, Memory: memory::linear::alloc;
//! }
//! ```
//! An implementation is `unsafe fn(real, arguments…) -> result`: the driver's own function of exactly this name comes
//! first, so that the forms of one function (`_v2`, `_ptds`, `_ptsz`) can share one.

#![expect(unsafe_code, reason = "exported functions, and tables of their addresses")]

mod device;
mod index;
mod launch;
mod memory;
mod nvml;

use core::ffi::c_void;

use crate::cuda::CUresult;
use crate::driver::{Function, Library, Missing};

/// What a function charges against.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Charge {
    /// Nothing: it starts the library, or asks for functions.
    Nothing,
    /// It takes memory of a card, or may.
    Memory,
    /// It gives memory back.
    Release,
    /// It puts work on a card.
    Launch,
    /// It says how large or how full a card is.
    View,
}

/// One exported function.
#[derive(Debug)]
pub(crate) struct Row {
    /// The name in the driver's symbol table.
    pub(crate) symbol: &'static str,
    /// First CUDA version (`major * 1000 + minor * 10`) for which `cuGetProcAddress` answers with this form; 0 = none
    /// does (NVML).
    pub(crate) since: u32,
    /// For whoever reads the table, and its tests.
    #[allow(dead_code, reason = "the implementations know it")]
    pub(crate) charge: Charge,
    /// What the program gets instead.
    pub(crate) wrapper: Wrapper,
    /// The driver's own.
    pub(crate) real: &'static Function,
}

/// The address of a wrapper.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wrapper(pub(crate) *const c_void);
// SAFETY: the address of a function, the same for all threads.
unsafe impl Sync for Wrapper {}

impl Row {
    /// What `cuGetProcAddress` calls it: without the version and the stream flavour.
    pub(crate) fn base(&self) -> &'static [u8] {
        index::base(self.symbol.as_bytes())
    }

    /// Whether it works on each thread's own default stream (`_ptds`, `_ptsz`).
    pub(crate) fn per_thread(&self) -> bool {
        index::is_per_thread(self.symbol)
    }
}

/// What a wrapper returns when the driver has no such function.
pub(crate) trait Absent {
    fn absent(missing: Missing) -> Self;
}

impl Absent for CUresult {
    fn absent(missing: Missing) -> Self {
        match missing {
            Missing::Library => Self::NOT_INITIALIZED,
            Missing::Function => Self::NOT_FOUND,
        }
    }
}

/// Makes `NAMES` and `ROWS` of a family, and its exported functions (see the module's description).
macro_rules! table {
    ($library:ident; $($(#[$attribute:meta])* $symbol:ident($($argument:ident: $type:ty),* $(,)?) -> $result:ty, since $since:literal,
        $charge:ident: $($implementation:ident)::+;)*) => {
        /// The names of `ROWS`, in order.
        pub(super) const NAMES: &[&str] = &[$(stringify!($symbol)),*];
        /// This family's functions.
        pub(super) static ROWS: [$crate::table::Row; NAMES.len()] = [$($crate::table::Row {
            symbol: stringify!($symbol),
            since: $since,
            charge: $crate::table::Charge::$charge,
            wrapper: $crate::table::Wrapper($symbol as unsafe extern "C" fn($($type),*) -> $result as *const ::core::ffi::c_void),
            real: &real::$symbol,
        }),*];
        #[allow(non_upper_case_globals, reason = "the driver's own names")]
        mod real {
            $(pub(super) static $symbol: $crate::driver::Function = $crate::driver::Function::new(
                $crate::driver::Library::$library,
                match ::core::ffi::CStr::from_bytes_with_nul(concat!(stringify!($symbol), "\0").as_bytes()) {
                    Ok(name) => name,
                    Err(_) => c"",
                },
            );)*
        }
        $($(#[$attribute])*
        #[cfg_attr(feature = "preload", unsafe(no_mangle))]
        #[allow(non_snake_case, reason = "the driver's own name")]
        pub(super) unsafe extern "C" fn $symbol($($argument: $type),*) -> $result {
            match real::$symbol.address() {
                Ok(address) => {
                    // SAFETY: the driver's function of this name has this type.
                    let real = unsafe {
                        ::core::mem::transmute::<usize, unsafe extern "C" fn($($type),*) -> $result>(address)
                    };
                    // SAFETY: the program's own arguments.
                    unsafe { $($implementation)::+(real, $($argument),*) }
                }
                Err(missing) => <$result as $crate::table::Absent>::absent(missing),
            }
        })*
    };
}
use table;

/// All families. [`index`] numbers the rows in this order.
static FAMILIES: [&[Row]; 4] = [&device::ROWS, &memory::ROWS, &launch::ROWS, &nvml::ROWS];
const NAMES: [&[&str]; 4] = [device::NAMES, memory::NAMES, launch::NAMES, nvml::NAMES];

/// The row of an exported name.
pub(crate) fn find(symbol: &[u8]) -> Option<&'static Row> {
    let (family, row) = index::find(symbol)?;
    FAMILIES.get(family)?.get(row)
}

/// The forms of the function that `cuGetProcAddress` is asked for as `name`: of all versions and stream flavours. A name
/// with a version of its own (`cuGetProcAddress_v2`) means that form only.
pub(crate) fn forms(name: &[u8]) -> impl Iterator<Item = &'static Row> + Clone {
    let is_base = index::base(name) == name;
    index::forms(index::base(name))
        .filter_map(|(family, row)| FAMILIES.get(family)?.get(row))
        .filter(move |row| is_base || index::without_flavour(row.symbol.as_bytes()) == name)
}

/// All rows.
pub(crate) fn rows() -> impl Iterator<Item = &'static Row> {
    FAMILIES.iter().flat_map(|family| family.iter())
}

/// The library that a name belongs to, if it can be one of a driver's at all: a look-up of any other name costs only
/// this.
pub(crate) fn library_of(symbol: &[u8]) -> Option<Library> {
    match symbol {
        [b'c', b'u', b'A'..=b'Z', ..] => Some(Library::Cuda),
        [b'n', b'v', b'm', b'l', b'A'..=b'Z', ..] => Some(Library::Nvml),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::collections::BTreeMap;
    use std::vec::Vec;

    /// What the list of all driver functions says: symbol to CUDA version and treatment.
    fn listed() -> BTreeMap<&'static str, (u32, &'static str)> {
        include_str!("../tests/driver-functions.txt")
            .lines()
            .filter(|line| !line.is_empty() && !line.starts_with('#'))
            .map(|line| {
                let mut words = line.split(' ');
                let symbol = words.next().unwrap();
                let since = words.next().unwrap().parse().unwrap();
                (symbol, (since, words.next().unwrap()))
            })
            .collect()
    }

    #[test]
    fn every_function_that_takes_memory_or_works_is_in_the_table_or_has_a_reason() {
        let listed = listed();
        let reasons: Vec<&str> = include_str!("../tests/driver-functions.txt")
            .lines()
            .filter_map(|line| line.strip_prefix("#! "))
            .map(|line| line.split_once(": ").unwrap().0)
            .collect();
        assert!(listed.len() > 680, "{}", listed.len());
        let mut used = Vec::new();
        for (&symbol, &(_, what)) in &listed {
            let hooked = find(symbol.as_bytes()).is_some();
            assert_eq!(hooked, what == "hooked", "{symbol}: the list says `{what}`");
            if !matches!(what, "hooked" | "-") {
                assert!(reasons.contains(&what), "{symbol}: no reason `{what}`");
                used.push(what);
            }
        }
        for reason in reasons {
            assert!(used.contains(&reason), "no function is left out because of `{reason}`");
        }
    }

    #[test]
    fn every_row_is_a_function_of_the_driver_with_its_version() {
        let listed = listed();
        for row in rows().filter(|row| library_of(row.symbol.as_bytes()) == Some(Library::Cuda)) {
            let Some(&(since, _)) = listed.get(row.symbol) else {
                panic!("{}: not a function of cuda.h", row.symbol);
            };
            assert_eq!(row.since, since, "{}", row.symbol);
        }
    }

    /// A stream flavour or version left out is a hole: whoever asks for it gets the driver's.
    #[test]
    fn a_function_is_hooked_in_all_its_forms() {
        let listed = listed();
        for (symbol, (_, what)) in &listed {
            let hooked = listed.iter().any(|(other, (_, others))| {
                *others == "hooked" && index::base(other.as_bytes()) == index::base(symbol.as_bytes())
            });
            assert!(
                !hooked || *what == "hooked",
                "{symbol} is left to the driver, other forms of it are not"
            );
        }
    }

    #[test]
    fn forms_of_a_name() {
        for (name, want) in [
            ("cuInit", ["cuInit"].as_slice()),
            (
                "cuGetProcAddress",
                &[
                    "cuGetProcAddress",
                    "cuGetProcAddress_ptsz",
                    "cuGetProcAddress_v2",
                    "cuGetProcAddress_v2_ptsz",
                ],
            ),
            ("cuGetProcAddress_v2", &["cuGetProcAddress_v2", "cuGetProcAddress_v2_ptsz"]),
            ("cuNoSuch", &[]),
            ("", &[]),
        ] {
            let mut found: Vec<&str> = forms(name.as_bytes()).map(|row| row.symbol).collect();
            found.sort_unstable();
            assert_eq!(found, want, "{name}");
        }
    }

    #[test]
    fn every_row_is_found_by_its_name_and_nothing_else_is() {
        for row in rows() {
            let found = find(row.symbol.as_bytes()).unwrap();
            assert!(core::ptr::eq(row, found), "{}", row.symbol);
            assert!(library_of(row.symbol.as_bytes()).is_some(), "{}", row.symbol);
        }
        for name in ["", "cu", "cuNoSuch", "cuInit_v2", "malloc", "cuInit\0"] {
            assert!(find(name.as_bytes()).is_none(), "{name:?}");
        }
    }
}
