//! Figures of `libvgpu.so` over the fake driver in its stub mode, in which every call costs next to nothing: so what is
//! measured is the library alone.
//!
//! A program, `hook-calls`, calls the driver as applications do. It is run twice at the same time, bare and with the
//! library preloaded, and told in turns to make some calls and say how long they took ([`Program`]). Its
//! instructions and system calls are counted from outside, with the means of a debugger (`trace`, on
//! x86-64).

pub mod container;
pub mod program;
#[cfg(target_arch = "x86_64")]
pub mod trace;

pub use container::{Container, Kind, Setup};
pub use program::{Call, Program};
