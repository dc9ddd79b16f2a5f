//! A simulated `libcuda.so.1`: the driver of NVIDIA cards for everything that takes memory or time of a card.

#![expect(non_snake_case, non_upper_case_globals, reason = "the names of the C interface")]

mod abi;
mod cards;
mod context;
mod device;
mod driver;
mod export_table;
mod gate;
mod graph;
mod green;
mod init;
mod launch;
mod memory;
mod module;
mod objects;
mod pool;
mod recursion;
mod space;
mod stream;
mod stub;
mod table;
mod transfer;
mod truth;
