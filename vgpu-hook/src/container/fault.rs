//! The shared words, and the points at which a fault-injection build (feature `fault-points`) can be killed.
//!
//! In that build the variable `MULLION_FAULT_POINT=<n>` sends the process SIGKILL at its n-th point: before each change
//! of a shared word and at each [`point`] of claiming and reaping a slot. A test walks through all of them; how many there
//! are says the extra export `mullion_fault_points_passed`. Any other build has none of it.

#![cfg_attr(feature = "fault-points", expect(unsafe_code, reason = "raises a signal"))]

use core::sync::atomic::AtomicU32;
#[cfg(not(feature = "fault-points"))]
use core::sync::atomic::AtomicU64;

/// A shared word.
#[cfg(not(feature = "fault-points"))]
pub(crate) type Word = AtomicU64;
/// The shared high-water mark.
pub(crate) type Mark = AtomicU32;

/// A moment at which a process may die.
#[cfg(not(feature = "fault-points"))]
#[inline]
pub(crate) fn point() {}

#[cfg(feature = "fault-points")]
pub(crate) use injected::{Word, point};

#[cfg(feature = "fault-points")]
mod injected {
    use core::sync::atomic::Ordering::{Relaxed, SeqCst};
    use core::sync::atomic::{AtomicU32, AtomicU64};

    use core::ffi::c_int;

    use crate::sys;

    const SIGKILL: c_int = 9;
    unsafe extern "C" {
        fn raise(signal: c_int) -> c_int;
    }

    /// Points passed.
    static PASSED: AtomicU32 = AtomicU32::new(0);
    /// The deadly one; 0 = not read yet, `u32::MAX` = none.
    static DEADLY: AtomicU32 = AtomicU32::new(0);

    fn deadly() -> u32 {
        match DEADLY.load(Relaxed) {
            0 => {
                let text = sys::environment(c"MULLION_FAULT_POINT").map(core::ffi::CStr::to_bytes);
                let number = text.and_then(|text| core::str::from_utf8(text).ok()?.parse().ok());
                let deadly = number.filter(|n| *n != 0).unwrap_or(u32::MAX);
                DEADLY.store(deadly, Relaxed);
                deadly
            }
            known => known,
        }
    }

    /// A moment at which the process may be told to die.
    pub(crate) fn point() {
        if PASSED.fetch_add(1, Relaxed) + 1 == deadly() {
            // SAFETY: a signal to this very process.
            unsafe { raise(SIGKILL) };
        }
    }

    /// Points passed so far.
    #[cfg_attr(feature = "preload", unsafe(no_mangle))]
    pub extern "C" fn mullion_fault_points_passed() -> u32 {
        PASSED.load(Relaxed)
    }

    /// A shared word, every change of which is a point.
    #[repr(transparent)]
    #[derive(Debug, Default)]
    pub(crate) struct Word(AtomicU64);

    impl mullion_accounting::Word for Word {
        fn load(&self) -> u64 {
            self.0.load(SeqCst)
        }
        fn store(&self, value: u64) {
            point();
            self.0.store(value, SeqCst);
        }
        fn swap(&self, value: u64) -> u64 {
            point();
            self.0.swap(value, SeqCst)
        }
        fn compare_exchange(&self, current: u64, new: u64) -> Result<u64, u64> {
            point();
            self.0.compare_exchange(current, new, SeqCst, SeqCst)
        }
        fn fetch_add(&self, value: u64) -> u64 {
            point();
            self.0.fetch_add(value, SeqCst)
        }
        fn fetch_sub(&self, value: u64) -> u64 {
            point();
            self.0.fetch_sub(value, SeqCst)
        }
    }
}
