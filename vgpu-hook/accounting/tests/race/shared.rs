//! Memory that forked processes share, laid out as the usage file is, with a driver in it that counts what it gave.
#![expect(unsafe_code, reason = "a shared mapping, fork, and a child that ends without unwinding")]

use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use mullion_accounting::{Account, Peers, Slot};
use nix::sys::mman::{MapFlags, ProtFlags, mmap_anonymous};
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{ForkResult, Pid, fork};

/// Slots; the driver's word has eight bits for each.
pub const SLOTS: usize = 8;

/// A slot's owner lives.
pub const HELD: u32 = 1;
/// The owner is dead and the byte free.
pub const FREE: u32 = 0;

/// What all processes see.
#[repr(C)]
#[derive(Debug, Default)]
pub struct Shared {
    pub total: AtomicU64,
    _line: [u64; 7],
    pub slots: [Slot<AtomicU64>; SLOTS],
    pub mark: AtomicU32,
    /// Lock bytes: [`FREE`] or [`HELD`], by the owner or by who reaps.
    pub locks: [AtomicU32; SLOTS],
    /// The driver's truth: what each slot's process really has, eight bits each, so that one look sees all.
    pub given: AtomicU64,
    /// Times that the driver had given more than the limit.
    pub over: AtomicU64,
    pub arrived: AtomicU64,
    pub go: AtomicU64,
    pub winners: AtomicU64,
    pub rounds: AtomicU64,
}

impl Shared {
    /// Zeroed memory that children share.
    pub fn new() -> &'static Self {
        let length = NonZeroUsize::new(size_of::<Self>()).expect("not empty");
        let (prot, flags) = (ProtFlags::PROT_READ | ProtFlags::PROT_WRITE, MapFlags::MAP_SHARED);
        // SAFETY: a new anonymous mapping touches no existing memory.
        let memory = unsafe { mmap_anonymous(None, length, prot, flags) }.expect("memory");
        // SAFETY: the mapping is as large as `Self`, page-aligned and never unmapped; zeros are a `Self`, and all that
        // changes in it is atomic.
        unsafe { memory.cast::<Self>().as_ref() }
    }

    pub fn account(&self, own: usize, limit: u64) -> Account<'_, AtomicU64, AtomicU32> {
        Account::new(&self.total, &self.slots, &self.mark, own, limit).expect("the slot exists")
    }

    /// The driver gives `bytes` to the process of `slot`.
    pub fn give(&self, slot: usize, bytes: u64, limit: u64) {
        let add = bytes << (8 * slot);
        let given = self.given.fetch_add(add, Ordering::SeqCst) + add;
        if given.to_le_bytes().iter().map(|b| u64::from(*b)).sum::<u64>() > limit {
            self.over.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// The driver takes `bytes` back.
    pub fn take_back(&self, slot: usize, bytes: u64) {
        self.given.fetch_sub(bytes << (8 * slot), Ordering::SeqCst);
    }

    /// The driver takes everything of a dead process back.
    pub fn take_all_back(&self, slot: usize) {
        self.given.fetch_and(!(0xff << (8 * slot)), Ordering::SeqCst);
    }

    /// All `count` parties meet.
    pub fn meet(&self, count: u64) {
        let before = self.go.load(Ordering::SeqCst);
        if self.arrived.fetch_add(1, Ordering::SeqCst) + 1 == count {
            self.arrived.store(0, Ordering::SeqCst);
            self.go.fetch_add(1, Ordering::SeqCst);
        }
        let mut looks = 0;
        while self.go.load(Ordering::SeqCst) == before {
            looks += 1;
            if looks > 50 {
                std::thread::yield_now();
            }
            std::hint::spin_loop();
        }
    }
}

/// The other processes, by the stand-ins of their lock bytes.
pub struct Others<'s>(pub &'s Shared);

impl Peers for Others<'_> {
    fn take(&mut self, slot: usize) -> bool {
        self.0.locks[slot].compare_exchange(FREE, HELD, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }
    fn give_back(&mut self, slot: usize) {
        self.0.locks[slot].store(FREE, Ordering::SeqCst);
    }
    fn pause(&mut self, units: u32) {
        std::thread::sleep(std::time::Duration::from_micros(units.into()));
    }
}

/// Runs `body` in a child, which ends with its result.
pub fn child(body: impl FnOnce() -> i32) -> Pid {
    // SAFETY: the child touches only the shared memory and its own stack; it takes no lock that another thread of the
    // parent may have held, and ends by `_exit`.
    match unsafe { fork() }.expect("a child") {
        ForkResult::Parent { child } => child,
        ForkResult::Child => {
            let code = body();
            // SAFETY: ends the process without running anything of the parent's.
            unsafe { nix::libc::_exit(code) }
        }
    }
}

/// Whether the child ended well.
pub fn ended_well(child: Pid) -> bool {
    matches!(waitpid(child, None), Ok(WaitStatus::Exited(_, 0)))
}
