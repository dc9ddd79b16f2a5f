//! Clocks, through the C library's vDSO path (10.6 ns for a coarse clock, no system call), or by a system call where
//! the C library refuses.

use core::ffi::c_int;

use super::call::{number, syscall};

/// `struct timespec` of 64-bit Linux.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Timespec {
    pub(crate) seconds: i64,
    pub(crate) nanoseconds: i64,
}

const NS: u64 = 1_000_000_000;

impl Timespec {
    pub(crate) fn from_ns(ns: u64) -> Self {
        Self { seconds: (ns / NS).cast_signed(), nanoseconds: (ns % NS).cast_signed() }
    }

    fn ns(self) -> u64 {
        self.seconds.cast_unsigned().wrapping_mul(NS).wrapping_add(self.nanoseconds.cast_unsigned())
    }
}

unsafe extern "C" {
    fn clock_gettime(clock: c_int, time: *mut Timespec) -> c_int;
}

const CLOCK_REALTIME_COARSE: c_int = 5;
const CLOCK_MONOTONIC: c_int = 1;
const CLOCK_MONOTONIC_COARSE: c_int = 6;

fn read(clock: c_int) -> u64 {
    let mut time = Timespec::default();
    // SAFETY: the function fills in the time.
    if unsafe { clock_gettime(clock, &raw mut time) } != 0 {
        // SAFETY: the kernel fills in the time.
        unsafe { syscall(number::CLOCK_GETTIME, [clock as isize, (&raw mut time) as isize, 0, 0, 0, 0]) };
    }
    time.ns()
}

/// `CLOCK_MONOTONIC_COARSE` in ns: as exact as the kernel's tick, 1 to 10 ms.
pub(crate) fn coarse_ns() -> u64 {
    read(CLOCK_MONOTONIC_COARSE)
}

/// `CLOCK_MONOTONIC` in ns.
pub(crate) fn monotonic_ns() -> u64 {
    read(CLOCK_MONOTONIC)
}

/// `CLOCK_REALTIME_COARSE` in ns since 1970.
pub(crate) fn realtime_ns() -> u64 {
    read(CLOCK_REALTIME_COARSE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clocks_go_forward_and_agree() {
        let (coarse, fine) = (coarse_ns(), monotonic_ns());
        assert!(fine >= coarse && fine - coarse < NS, "{coarse} {fine}");
        assert!(realtime_ns() > 1_700_000_000 * NS);
        let time = Timespec::from_ns(5 * NS + 7);
        assert_eq!((time.seconds, time.nanoseconds, time.ns()), (5, 7, 5 * NS + 7));
    }
}
