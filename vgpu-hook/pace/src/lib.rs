//! Pacing of kernel launches: a bucket that refills itself, and the loop that steers it.
//!
//! The library in the container asks [`Bucket`] before each launch. The bucket is one word that all processes of the
//! container share; it fills with time, so nobody has to be alive to fill it. What a launch costs says [`Costs`]: a
//! guess from the grid until the launch was measured, its measured time afterwards. The node's agent compares what NVML
//! shows with the container's share and moves one number, the scale of a launch's cost ([`Steer`]). When the agent
//! dies, the last scale stays.
//!
//! [`policy`] holds HAMi's rules for sharing by priority.
//!
//! # What is measured and what is guessed
//! * The utilisation that NVML shows is time: the share of a window in which the process had a kernel on the card. A
//!   kernel of one block counts as much as one that fills the card. Shares here mean the same.
//! * The cost of a launch is measured by a pair of events around one launch in 64, later in 256, of each function and size of grid,
//!   around more of those that take longer, and around each that takes 10 ms. One that was measured pays what it took, the others
//!   pay the mean.
//!   The time between them contains the time slices of other processes on the card, so it is too high on a busy card;
//!   the scale takes that back.
//! * Where no events can be used ([`guess_ns`]), the cost is a guess that may be wrong by a factor of 10^4. The scale
//!   mends it, by at most a factor of two per second: see `tests/simulator` for how long that takes.
//!
//! # What cannot be limited
//! * A kernel that is running: the driver gives no way to take the card from it. One launch is charged at most
//!   [`AHEAD_NS`] (two seconds) of waiting, so kernels longer than `2 s x share` get more than their share.
//! * Work that is queued already. Before the first measurement of a function some launches pass: at most
//!   [`BURST_LAUNCHES`] of each function that takes longer than a millisecond (more of one that waits for others in its
//!   stream), and unused rate of one burst (50 ms by default).
//! * A process that never asks: one without the library.
//!
//! The crate is `no_std`, uses no floating point and has no `unsafe`. It allocates nothing but in the agent's `Meter`, which is
//! the feature `meter`: the preloaded library has no allocator.

#![no_std]

#[cfg(feature = "meter")]
extern crate alloc;

mod bucket;
mod cost;
mod entry;
#[cfg(feature = "meter")]
mod meter;
pub mod policy;
mod sample;
mod steer;

pub use bucket::{AHEAD_NS, Admission, Bucket, SLICE_NS, Terms};
pub use cost::{
    BURST_LAUNCHES, CLOSE_EVERY_NS, Correction, Costs, GRAPH_CLASS, Key, Known, Measurement, Progress, Quote,
    Sample, Size, UNKNOWN_NS, guess_ns,
};
pub use entry::{LEAST_NS, SAMPLE_EVERY, SAMPLE_EVERY_YOUNG};
#[cfg(feature = "meter")]
pub use meter::Meter;
pub use sample::{MAX_WINDOW_NS, MIN_WINDOW_NS, Reading, STALE_NS};
pub use steer::{MAX_SCALE, MIN_SCALE, Observation, SCALE_ONE, Steer};
