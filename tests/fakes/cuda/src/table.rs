//! The one list of entry points: what is exported, and what `cuGetProcAddress` answers.
//!
//! A row is the module that implements it, the symbol, the name that programs ask for, the CUDA version (1000 × major + 10 × minor) from
//! which on the symbol is meant by the name, and its default stream. Names, versions and flavours are those of `cuda.h` and
//! `cudaTypedefs.h` 12.9.79, 13.0.96 and 13.5.37 (`PFN_<name>_v<version>[_ptds|_ptsz]`; the n-th version of a name is its `_v<n>`). Rows of
//! `unsupported` exist, as in the driver, and answer `CUDA_ERROR_NOT_SUPPORTED`.

#![expect(unsafe_code, reason = "exports entry points under their C names")]

use crate::gate::Site;
use crate::{
    array, capture, context, device, external, graph, green, init, launch, memory, module, pool, stream,
    transfer, vmm,
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

macro_rules! refusal {
    (unsupported $symbol:ident) => {
        #[unsafe(no_mangle)]
        pub(crate) extern "C" fn $symbol() -> std::ffi::c_int {
            $crate::gate::open(&super::site::$symbol, || Err($crate::abi::Code::NOT_SUPPORTED))
        }
    };
    ($module:ident $symbol:ident) => {};
}

macro_rules! table {
    ($($module:ident $symbol:ident $name:literal $version:literal $flavour:ident;)*) => {
        /// Counters and injected errors by symbol.
        #[expect(non_upper_case_globals, reason = "named as the symbols")]
        pub(crate) mod site {
            $(pub(crate) static $symbol: super::Site = super::Site::new(stringify!($symbol));)*
        }

        /// What this driver knows by name only.
        mod unsupported {
            $(refusal! { $module $symbol })*
        }

        /// Every entry point.
        pub(crate) static ROWS: &[Row] = &[
            $(Row {
                name: $name,
                symbol: stringify!($symbol),
                version: $version,
                flavour: Flavour::$flavour,
                address: Address(crate::table::$module::$symbol as *const ()),
                site: &site::$symbol,
            },)*
            // From 12.0 on the name means the call with flags.
            Row {
                name: "cuGraphInstantiate",
                symbol: "cuGraphInstantiateWithFlags",
                version: 12000,
                flavour: Flavour::Legacy,
                address: Address(crate::table::graph::cuGraphInstantiateWithFlags as *const ()),
                site: &site::cuGraphInstantiateWithFlags,
            },
        ];
    };
}

include!("symbols.rs");
