//! The two files that a container with a GPU slice sees, byte by byte.
//!
//! * [`page`]: the **control page**, 4 KiB, written by the node's agent and mounted read-only. It holds what the
//!   container may use.
//! * [`usage`]: the **usage file**, writable by the tenant and fresh at every container start. It is HAMi's v1.2
//!   shared region byte for byte, with an [`extension`] of our own behind it, so that HAMi's monitor can read it. What
//!   is read back from it is a tenant's word: every reader here checks and never panics.
//! * [`hami`]: readers for the shared regions of HAMi's own library, all layouts of it that are in use, and the writes
//!   by which the agent keeps HAMi's fields of our file up to date.
//!
//! The crate is `no_std`, allocates nothing and has no `unsafe`: it turns values into bytes and bytes into values.
//! Who maps, reads or writes the files decides elsewhere. All numbers are little-endian, which is what both supported
//! targets (x86-64 and aarch64) use in memory.

#![no_std]

mod bytes;
mod devices;
mod error;
pub mod extension;
pub mod hami;
pub mod page;
pub mod usage;

pub use devices::{CardUuid, CorePercent, Devices};
pub use error::Error;

/// Cards that one container can have. HAMi's shared region has 16 device slots (`CUDA_DEVICE_MAX_COUNT`), and the
/// control page follows it so that a card has the same index in both files.
pub const MAX_DEVICES: usize = 16;
