use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// A 64-bit word that several processes share. All operations are sequentially consistent and wrap.
pub trait Word {
    /// Reads.
    fn load(&self) -> u64;
    /// Writes.
    fn store(&self, value: u64);
    /// Writes and gives what was there.
    fn swap(&self, value: u64) -> u64;
    /// Writes `new` where `current` is there.
    ///
    /// # Errors
    /// What is there instead.
    fn compare_exchange(&self, current: u64, new: u64) -> Result<u64, u64>;
    /// Adds and gives what was there.
    fn fetch_add(&self, value: u64) -> u64;
    /// Subtracts and gives what was there.
    fn fetch_sub(&self, value: u64) -> u64;
}

/// A 32-bit word that several processes share and that only grows.
pub trait Mark {
    /// Reads.
    fn load(&self) -> u32;
    /// Writes `value` where less is there.
    fn raise(&self, value: u32);
}

/// A word of a [`Table`](crate::Table): shared by the threads of one process, ordered only as far as the table needs.
pub trait Cell {
    /// Reads without order.
    fn peek(&self) -> u64;
    /// Reads; what its writer wrote before is seen afterwards.
    fn read(&self) -> u64;
    /// Writes without order.
    fn put(&self, value: u64);
    /// Writes; whoever reads it sees all that was written before.
    fn publish(&self, value: u64);
    /// Writes `new` where `current` is there, and says whether; what was written before `current` is seen afterwards.
    fn grab(&self, current: u64, new: u64) -> bool;
    /// What a thread does that looks again and again at a place where another one is busy.
    fn pause() {
        core::hint::spin_loop();
    }
}

impl Word for AtomicU64 {
    #[inline]
    fn load(&self) -> u64 {
        self.load(Ordering::SeqCst)
    }
    #[inline]
    fn store(&self, value: u64) {
        self.store(value, Ordering::SeqCst);
    }
    #[inline]
    fn swap(&self, value: u64) -> u64 {
        self.swap(value, Ordering::SeqCst)
    }
    #[inline]
    fn compare_exchange(&self, current: u64, new: u64) -> Result<u64, u64> {
        self.compare_exchange(current, new, Ordering::SeqCst, Ordering::SeqCst)
    }
    #[inline]
    fn fetch_add(&self, value: u64) -> u64 {
        self.fetch_add(value, Ordering::SeqCst)
    }
    #[inline]
    fn fetch_sub(&self, value: u64) -> u64 {
        self.fetch_sub(value, Ordering::SeqCst)
    }
}

impl Mark for AtomicU32 {
    #[inline]
    fn load(&self) -> u32 {
        self.load(Ordering::SeqCst)
    }
    #[inline]
    fn raise(&self, value: u32) {
        self.fetch_max(value, Ordering::SeqCst);
    }
}

impl Cell for AtomicU64 {
    #[inline]
    fn peek(&self) -> u64 {
        self.load(Ordering::Relaxed)
    }
    #[inline]
    fn read(&self) -> u64 {
        self.load(Ordering::Acquire)
    }
    #[inline]
    fn put(&self, value: u64) {
        self.store(value, Ordering::Relaxed);
    }
    #[inline]
    fn publish(&self, value: u64) {
        self.store(value, Ordering::Release);
    }
    #[inline]
    fn grab(&self, current: u64, new: u64) -> bool {
        self.compare_exchange(current, new, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }
}
