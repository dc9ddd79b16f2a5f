//! The one list of entry points: what is exported, and what `cuGetProcAddress` answers.
//!
//! A row is the module that implements it, the symbol, the name that programs ask for, the CUDA version (1000 × major + 10 × minor) from
//! which on the symbol is meant by the name, and its default stream. Names, versions and flavours are those of `cuda.h` and
//! `cudaTypedefs.h` 12.9.79, 13.0.96 and 13.5.37 (`PFN_<name>_v<version>[_ptds|_ptsz]`; the n-th version of a name is its `_v<n>`). Rows of
//! `unsupported.rs` exist, as in the driver, and answer `CUDA_ERROR_NOT_SUPPORTED`.

#![expect(unsafe_code, reason = "exports entry points under their C names")]

use crate::gate::Site;
use crate::{
    array, capture, context, device, external, graph, graph_node, green, init, launch, memory, module, pool,
    stream, transfer, vmm,
};

/// What stream 0 means to a symbol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flavour {
    /// The legacy default stream, or no stream at all.
    Legacy,
    /// The thread's own default stream, in a call that is synchronous to the host.
    Ptds,
    /// The thread's own default stream, in a call with a stream argument.
    Ptsz,
}

/// An entry point's address.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Address(pub(crate) *const ());

// SAFETY: the address of a function is the same for every thread.
unsafe impl Sync for Address {}

/// An entry point.
#[derive(Debug)]
pub(crate) struct Row {
    pub(crate) name: &'static str,
    pub(crate) symbol: &'static str,
    pub(crate) version: i32,
    pub(crate) flavour: Flavour,
    pub(crate) address: Address,
    pub(crate) site: &'static Site,
}

/// Counters and injected errors by symbol.
pub(crate) mod site {
    pub(crate) use super::known::*;
    pub(crate) use super::unsupported_sites::*;
}

/// Every entry point.
pub(crate) fn rows() -> impl Iterator<Item = &'static Row> {
    KNOWN.iter().chain(UNSUPPORTED)
}

macro_rules! row {
    ($module:ident $symbol:ident $name:literal $version:literal $flavour:ident) => {
        Row {
            name: $name,
            symbol: stringify!($symbol),
            version: $version,
            flavour: Flavour::$flavour,
            address: Address(crate::table::$module::$symbol as *const ()),
            site: &site::$symbol,
        }
    };
}

macro_rules! table {
    ($($module:ident $symbol:ident $name:literal $version:literal $flavour:ident;)*) => {
        #[expect(non_upper_case_globals, reason = "named as the symbols")]
        mod known {
            $(pub(crate) static $symbol: super::Site = super::Site::new(stringify!($symbol));)*
        }

        static KNOWN: &[Row] = &[
            $(row! { $module $symbol $name $version $flavour },)*
            // From 12.0 on the name means the call with flags.
            row! { graph cuGraphInstantiateWithFlags "cuGraphInstantiate" 12000 Legacy },
        ];
    };
}

macro_rules! unsupported {
    ($($symbol:ident $name:literal $version:literal $flavour:ident;)*) => {
        #[expect(non_upper_case_globals, reason = "named as the symbols")]
        mod unsupported_sites {
            $(pub(crate) static $symbol: super::Site = super::Site::new(stringify!($symbol));)*
        }

        /// What this driver knows by name only.
        mod unsupported {
            $(
                #[unsafe(no_mangle)]
                pub(crate) extern "C" fn $symbol() -> std::ffi::c_int {
                    $crate::gate::open(&super::site::$symbol, || Err($crate::abi::Code::NOT_SUPPORTED))
                }
            )*
        }

        static UNSUPPORTED: &[Row] = &[$(row! { unsupported $symbol $name $version $flavour },)*];
    };
}

include!("symbols.rs");
include!("unsupported.rs");
