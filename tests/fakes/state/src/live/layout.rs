//! The words of the live file. All of them are atomics, so that any content is a valid value.

use std::sync::atomic::{AtomicU32, AtomicU64};

/// Cards of one node.
pub const CARDS: usize = 16;

/// Processes at once. More than the 1,024 slots of a usage file, so that a test that fills one still runs.
pub const SLOTS: usize = 2048;

/// Sampling windows kept per process and card.
pub const WINDOWS: usize = 32;

/// Stretches of work kept per process and card, for the times of events.
pub const STRETCHES: usize = 32;

/// First bytes of the file: `FAKELIVE` read as a little-endian number.
pub const MAGIC: u64 = u64::from_le_bytes(*b"FAKELIVE");

/// Version of this layout.
pub const VERSION: u32 = 1;

/// The whole file.
#[repr(C)]
#[derive(Debug)]
pub struct Region {
    /// [`MAGIC`] once the rest is valid.
    pub magic: AtomicU64,
    /// [`VERSION`].
    pub version: AtomicU32,
    /// Slots ever claimed; only grows.
    pub high_water: AtomicU32,
    /// Simulated clock in ns; 0 is the real one.
    pub clock: AtomicU64,
    /// Pads the head to a line.
    pub reserved: [AtomicU64; 5],
    /// Cards by the index of the state file.
    pub cards: [CardWords; CARDS],
    /// One per process.
    pub slots: [Slot; SLOTS],
}

/// Words of one card.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct CardWords {
    /// Holder of the card: slot + 1, 0 is free.
    pub lock: AtomicU32,
    /// Pads to eight bytes.
    pub reserved: AtomicU32,
    /// Time up to which the card's work is accounted, ns.
    pub advanced: AtomicU64,
    /// Most bytes ever given at once, over all processes.
    pub peak: AtomicU64,
    /// Calls that found the card full.
    pub full: AtomicU64,
}

/// One process.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct Slot {
    /// As the process knows itself, so in its own pid namespace; 0 is free.
    pub pid: AtomicU32,
    /// Milliseconds that a dead process's memory stays on the cards.
    pub release_delay_ms: AtomicU32,
    /// When somebody first found it dead, ns; 0 while alive.
    pub died: AtomicU64,
    /// Its share of each card.
    pub cards: [Share; CARDS],
}

/// What one process has of one card.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct Share {
    /// Bytes that the card really gave.
    pub given: AtomicU64,
    /// Work handed in so far, ns of the whole card.
    pub submitted: AtomicU64,
    /// Work done so far, ns of the whole card.
    pub done: AtomicU64,
    /// Contexts on the card.
    pub contexts: AtomicU64,
    /// Next place in `stretches`.
    pub next_stretch: AtomicU64,
    /// Busy time by window: `(window number << 32) | ns`.
    pub windows: [AtomicU64; WINDOWS],
    /// Stretches of work: begin, end, and `done` at both.
    pub stretches: [[AtomicU64; 4]; STRETCHES],
}

const _: () = assert!(size_of::<Share>().is_multiple_of(64));
const _: () = assert!(size_of::<Slot>() == 64 + CARDS * size_of::<Share>());
const _: () = assert!(std::mem::offset_of!(Region, cards) == 64);
