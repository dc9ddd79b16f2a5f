//! Constant work for `FAKE_CUDA_STUB=1`: addresses come off a stack of freed ones or a counter, sizes are not kept, the card is
//! never full. What is neither counted nor checked here is what the benchmarks of the hook subtract.

use std::ffi::c_int;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use std::cell::UnsafeCell;
use std::sync::OnceLock;

use crate::abi::{DevicePtr, Out};

/// Addresses of the stub, apart from all others: each 2 MiB behind the one before, or `FAKE_CUDA_STUB_STEP` bytes.
const FIRST: DevicePtr = 0x6000_0000_0000;
const STEP: DevicePtr = 2 << 20;
/// Freed addresses that are kept.
const KEPT: usize = 1 << 18;
/// What `cuMemGetInfo` says.
const TOTAL: usize = 80 << 30;

struct Stack {
    held: AtomicBool,
    inside: UnsafeCell<Inside>,
}

struct Inside {
    next: DevicePtr,
    length: usize,
    freed: [DevicePtr; KEPT],
}

// SAFETY: `inside` is touched only while `held` is.
#[expect(unsafe_code, reason = "a spin lock of its own: a mutex would double the cost that it is to measure")]
unsafe impl Sync for Stack {}

static STACK: Stack = Stack {
    held: AtomicBool::new(false),
    inside: UnsafeCell::new(Inside { next: FIRST, length: 0, freed: [0; KEPT] }),
};

#[inline]
#[expect(unsafe_code, reason = "see the lock")]
fn with<T>(work: impl FnOnce(&mut Inside) -> T) -> T {
    while STACK.held.compare_exchange_weak(false, true, Acquire, Relaxed).is_err() {
        std::hint::spin_loop();
    }
    // SAFETY: the lock is held, and `work` does not come back here.
    let answer = work(unsafe { &mut *STACK.inside.get() });
    STACK.held.store(false, Release);
    answer
}

#[inline]
pub(crate) fn allocate(address: Out<DevicePtr>, size: usize) -> c_int {
    if address.is_null() || size == 0 {
        return 1;
    }
    let given = with(|inside| {
        let popped = inside.length.checked_sub(1).and_then(|top| inside.freed.get(top).copied());
        if let Some(freed) = popped {
            inside.length -= 1;
            return freed;
        }
        inside.next += step();
        inside.next
    });
    address.put(given).map_or_else(|c| c.0, |()| 0)
}

#[cold]
fn step() -> DevicePtr {
    static ASKED: OnceLock<DevicePtr> = OnceLock::new();
    let asked = || std::env::var("FAKE_CUDA_STUB_STEP").ok()?.parse().ok().filter(|&step| step > 0);
    *ASKED.get_or_init(|| asked().unwrap_or(STEP))
}

/// None for an address that is not the stub's.
#[inline]
pub(crate) fn free(address: DevicePtr) -> Option<c_int> {
    if !(FIRST..FIRST + (1 << 44)).contains(&address) {
        return None;
    }
    with(|inside| {
        if let Some(place) = inside.freed.get_mut(inside.length) {
            *place = address;
            inside.length += 1;
        }
    });
    Some(0)
}

#[inline]
pub(crate) fn info(free: Out<usize>, total: Out<usize>) -> c_int {
    free.put_if(TOTAL).and_then(|()| total.put_if(TOTAL)).map_or_else(|c| c.0, |()| 0)
}
