//! Opaque handles: numbers that stand for an identity, never addresses that anyone follows.

use std::ptr;
use std::sync::{Mutex, PoisonError};

/// What a handle stands for. Cards go by uuid, so that a handle outlives changes of the list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Identity {
    Card { card: String },
    Mig { card: String, gi: u32, ci: u32 },
    GpuInstance { card: String, gi: u32 },
    ComputeInstance { card: String, gi: u32, ci: u32 },
    EventSet { number: u64 },
}

/// A handle as it crosses the C interface; any bit pattern may come in.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Handle(usize);

impl Handle {
    /// As the struct fields of the C interface hold it.
    pub(crate) fn pointer<T>(self) -> *mut T {
        ptr::without_provenance_mut(self.0)
    }
}

/// Handles start here, 16 apart: far from real allocations, so a mix-up is found and not followed.
const BASE: usize = 0x4D55_4C4C_0000;
const STEP: usize = 16;

/// Every identity that got a handle in this process. It stays small: ids go round.
static KNOWN: Mutex<Vec<Identity>> = Mutex::new(Vec::new());

/// The handle of an identity; the same one each time.
pub(crate) fn of(identity: Identity) -> Handle {
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    let place = known.iter().position(|k| *k == identity).unwrap_or(known.len());
    if place == known.len() {
        known.push(identity);
    }
    Handle(BASE + STEP * place)
}

/// What a handle stands for; none for one that was never given.
pub(crate) fn identity(handle: Handle) -> Option<Identity> {
    let offset = handle.0.checked_sub(BASE)?;
    let known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    known.get(offset / STEP).filter(|_| offset % STEP == 0).cloned()
}
