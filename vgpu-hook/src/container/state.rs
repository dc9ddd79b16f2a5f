//! What this process is to the container: a page of private memory that a forked child finds zeroed.
//!
//! So a child knows, without a system call and without a handler at fork, that it is not its parent: it owns no slot. A
//! child that shares its parent's memory until it calls exec (`vfork`, `posix_spawn`) sees the parent's page, rightly so. No
//! lock that another thread held at the moment of fork is left behind either: all of them lie here.

#![expect(unsafe_code, reason = "a page shared by all threads")]

use core::ptr::null_mut;
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicI32, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize};

use super::{Container, Refusal};
use crate::cuda::CUresult;
use crate::sys;

/// How far this process has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Nothing was tried.
    New,
    /// A thread is at it.
    Busy,
    /// There is no limit, or none that has to be kept.
    Open,
    /// It has a slot.
    Attached,
    /// A limit is asked for and cannot be kept.
    Refused,
}

const NEW: u32 = 0;
const BUSY: u32 = 1;
const OPEN: u32 = 2;
const ATTACHED: u32 = 3;
const REFUSED: u32 = 4;

/// The page. All zero is a process that has done nothing yet.
#[repr(C)]
#[derive(Debug, Default)]
pub(crate) struct State {
    /// The container with this process's slot.
    pub(crate) container: AtomicPtr<Container>,
    /// The container as one looks at it without a slot.
    pub(crate) view: AtomicPtr<Container>,
    phase: AtomicU32,
    result: AtomicI32,
    /// The thread that is at it, by its thread pointer.
    thread: AtomicUsize,
    /// Held while dead slots are looked for.
    pub(crate) reaping: Lock,
    /// When dead slots were last looked for, coarse ns.
    pub(crate) reaped_ns: AtomicU64,
    /// Look-ups that could not be answered with a wrapper, before there was a file to count them in.
    pub(crate) escapes: AtomicU32,
}

const LEN: usize = 4096;
const _: () = assert!(size_of::<State>() <= LEN);

static PAGE: AtomicPtr<State> = AtomicPtr::new(null_mut());

/// The page, once anything was tried in this process or in the one that it was forked from.
#[inline]
pub(crate) fn get() -> Option<&'static State> {
    let page = PAGE.load(Acquire);
    // SAFETY: null, or a page of atomic words that is never unmapped.
    unsafe { page.as_ref() }
}

/// The page, made if need be.
pub(crate) fn make() -> Result<&'static State, Refusal> {
    if let Some(state) = get() {
        return Ok(state);
    }
    let new = sys::map_private(LEN).map_err(Refusal::NoMemory)?;
    // SAFETY: a mapping of ours.
    if let Err(errno) = unsafe { sys::advise(new, LEN, sys::MADV_WIPEONFORK) } {
        // SAFETY: nothing knows of the mapping.
        unsafe { sys::unmap(new, LEN) };
        return Err(Refusal::Kernel(errno));
    }
    if PAGE.compare_exchange(null_mut(), new.cast(), AcqRel, Acquire).is_err() {
        // SAFETY: another thread's page was first, nothing knows of this one.
        unsafe { sys::unmap(new, LEN) };
    }
    get().ok_or(Refusal::NoMemory(sys::Errno(12)))
}

impl State {
    pub(crate) fn phase(&self) -> Phase {
        match self.phase.load(Acquire) {
            BUSY => Phase::Busy,
            OPEN => Phase::Open,
            ATTACHED => Phase::Attached,
            REFUSED => Phase::Refused,
            _ => Phase::New,
        }
    }

    /// The answer to a refused process's calls.
    pub(crate) fn refused_with(&self) -> CUresult {
        CUresult(self.result.load(Relaxed))
    }

    /// Whether the calling thread is the one that is attaching: the driver called back into a wrapper.
    pub(crate) fn is_mine(&self) -> bool {
        self.thread.load(Relaxed) == thread()
    }

    /// Takes the turn of attaching, after waiting for a thread that has it. A refused process may try again.
    ///
    /// `None` where there is nothing to do: another thread finished, or this one is called back by the driver.
    pub(crate) fn begin(&self) -> Option<Turn<'_>> {
        loop {
            match self.phase.load(Acquire) {
                phase @ (NEW | REFUSED) => {
                    if self.phase.compare_exchange(phase, BUSY, AcqRel, Acquire).is_ok() {
                        self.thread.store(thread(), Relaxed);
                        return Some(Turn { state: self });
                    }
                }
                BUSY if self.is_mine() => return None,
                BUSY => {
                    let _ = sys::futex_wait(self.phase.as_ptr(), BUSY, 50_000_000);
                }
                _ => return None,
            }
        }
    }
}

/// The turn of the thread that attaches.
#[derive(Debug)]
pub(crate) struct Turn<'s> {
    state: &'s State,
}

impl Turn<'_> {
    fn end(self, phase: u32) {
        self.state.thread.store(0, Relaxed);
        self.state.phase.store(phase, Release);
        sys::futex_wake(self.state.phase.as_ptr());
    }

    /// Back to where it was: another time may do better.
    pub(crate) fn give_up(self) {
        self.end(NEW);
    }

    /// There is no limit.
    pub(crate) fn open(self) {
        self.end(OPEN);
    }

    /// This is the container.
    pub(crate) fn attached(self, container: *mut Container) {
        self.state.container.store(container, Release);
        self.end(ATTACHED);
    }

    /// Every call is answered with `result`.
    pub(crate) fn refused(self, result: CUresult) {
        self.state.result.store(result.0, Relaxed);
        self.end(REFUSED);
    }
}

/// A lock between the threads of this process, for rare moments.
#[derive(Debug, Default)]
pub(crate) struct Lock(AtomicU32);

impl Lock {
    /// A free one.
    pub(crate) const fn new() -> Self {
        Self(AtomicU32::new(0))
    }

    /// Waits for it.
    pub(crate) fn lock(&self) -> Held<'_> {
        loop {
            if let Some(held) = self.lock_while(|| true) {
                return held;
            }
        }
    }

    /// Waits for it as long as that is worth it, which is asked every 10 ms.
    #[inline]
    pub(crate) fn lock_while(&self, is_worth_it: impl Fn() -> bool) -> Option<Held<'_>> {
        let mut tries = 0_u32;
        // 0 free, 1 held, 2 held with somebody waiting.
        while self.0.compare_exchange(0, if tries > 40 { 2 } else { 1 }, Acquire, Relaxed).is_err() {
            tries = tries.saturating_add(1);
            if tries <= 40 {
                core::hint::spin_loop();
            } else if self.0.swap(2, Acquire) == 0 {
                return Some(Held(self));
            } else if is_worth_it() {
                let _ = sys::futex_wait(self.0.as_ptr(), 2, 10_000_000);
            } else {
                return None;
            }
        }
        Some(Held(self))
    }

    /// Takes it when nobody has it.
    pub(crate) fn try_lock(&self) -> Option<Held<'_>> {
        // Not `then_some`: what it does not hand out it drops, which would take the lock from its holder.
        self.0.compare_exchange(0, 1, Acquire, Relaxed).is_ok().then(|| Held(self))
    }
}

/// A lock held until this goes.
#[derive(Debug)]
pub(crate) struct Held<'l>(&'l Lock);

impl Drop for Held<'_> {
    fn drop(&mut self) {
        if self.0.0.swap(0, Release) == 2 {
            sys::futex_wake(self.0.0.as_ptr());
        }
    }
}

/// Tells the calling thread from all others that live, without a system call: its thread pointer.
pub(crate) fn thread() -> usize {
    let pointer: usize;
    // SAFETY: the first word at the thread pointer holds the pointer itself (x86-64 ABI, glibc and musl).
    #[cfg(target_arch = "x86_64")]
    unsafe {
        core::arch::asm!("mov {}, fs:0", out(reg) pointer, options(nostack, preserves_flags, readonly));
    }
    // SAFETY: reads a register.
    #[cfg(target_arch = "aarch64")]
    unsafe {
        core::arch::asm!("mrs {}, tpidr_el0", out(reg) pointer, options(nostack, preserves_flags, nomem));
    }
    pointer
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::thread::spawn;
    use std::vec::Vec;

    #[test]
    fn a_lock_that_is_not_got_stays_with_its_holder() {
        let lock = Lock::new();
        let held = lock.lock();
        assert!(lock.try_lock().is_none());
        assert!(lock.try_lock().is_none());
        assert!(lock.lock_while(|| false).is_none());
        drop(held);
        assert!(lock.lock_while(|| false).is_some());
        assert!(lock.try_lock().is_some());
    }

    #[test]
    fn one_thread_of_many_gets_the_turn_and_the_others_see_its_end() {
        let state = Arc::new(State::default());
        let turns = (0..8).map(|_| {
            let state = Arc::clone(&state);
            spawn(move || {
                let turn = state.begin();
                let mine = turn.is_some();
                if let Some(turn) = turn {
                    assert!(state.is_mine() && state.begin().is_none());
                    std::thread::sleep(std::time::Duration::from_millis(20));
                    turn.open();
                }
                assert_eq!(state.phase(), Phase::Open);
                usize::from(mine)
            })
        });
        let turns: Vec<_> = turns.collect();
        assert_eq!(turns.into_iter().map(|t| t.join().unwrap()).sum::<usize>(), 1);
    }

    #[test]
    fn a_refused_process_may_try_again() {
        let state = State::default();
        state.begin().unwrap().refused(CUresult::OPERATING_SYSTEM);
        assert_eq!((state.phase(), state.refused_with()), (Phase::Refused, CUresult::OPERATING_SYSTEM));
        state.begin().unwrap().open();
        assert!(state.begin().is_none());
    }

    #[test]
    fn the_lock_excludes() {
        struct Counted(core::cell::UnsafeCell<u64>);
        // SAFETY: only changed under the lock.
        unsafe impl Sync for Counted {}
        let shared = Arc::new((Lock::default(), Counted(core::cell::UnsafeCell::new(0))));
        let threads: Vec<_> = (0..4)
            .map(|_| {
                let shared = Arc::clone(&shared);
                spawn(move || {
                    for _ in 0..10_000 {
                        let _held = shared.0.lock();
                        // SAFETY: the lock is held.
                        unsafe { *shared.1.0.get() += 1 };
                    }
                })
            })
            .collect();
        for thread in threads {
            thread.join().unwrap();
        }
        // SAFETY: all threads are done.
        assert_eq!(unsafe { *shared.1.0.get() }, 40_000);
        let held = shared.0.try_lock().unwrap();
        assert!(shared.0.try_lock().is_none());
        assert!(shared.0.try_lock().is_none(), "a try that failed has freed it");
        drop(held);
        assert!(shared.0.try_lock().is_some());
    }
}
