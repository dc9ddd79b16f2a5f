//! `libvgpu.so`: holds a container to its slice of a card.
//!
//! The library is preloaded into every program of a container, so it must load everywhere: it is `no_std`, needs no
//! other library, has no constructor and no thread-local storage, and does nothing until a program asks for a CUDA or
//! NVML function. [`table`] is the only list of the functions that it stands in for; each wrapper finds the driver's own
//! function by an ELF look-up ([`driver`]) and hands it to an implementation.
//!
//! Without the feature `preload` this is a plain library: nothing is exported under a driver's name, so that tests can
//! link it beside a real or fake driver.

#![no_std]
#![cfg_attr(
    not(feature = "preload"),
    allow(dead_code, reason = "the exported names are the roots, and they are exported with `preload` only")
)]

#[cfg(test)]
extern crate std;

mod container;
mod cuda;
mod driver;
mod launch;
mod loading;
mod memory;
mod nvml;
mod panic;
mod sys;
mod table;

/// The names that the library exports when it is built to be preloaded: those of the driver's functions in the table, and
/// the loader's.
pub fn exported_names() -> impl Iterator<Item = &'static str> {
    table::rows().map(|row| row.symbol).chain(loading::NAMES)
}
