//! What is under way on one card: measurements, and calls for small arrays.

use core::sync::atomic::Ordering::Relaxed;
use core::sync::atomic::{AtomicI64, AtomicU32, AtomicU64, AtomicUsize};

use super::alone::Turn;
use super::measured::{CALL_NS, LOOK_AFTER_NS, LOOK_NS, NONE, TURN_NS, WAYS, is_recent, now_ns};
use crate::container::{Lock, thread};
use crate::sys;

/// Measurements of one card that have begun and not ended, and from where they count.
#[derive(Debug)]
pub(super) struct UnderWay {
    pub(super) count: AtomicU32,
    /// The thread that began the last one, 0 when that has ended: what it does within its own measurement does not wait for that.
    thread: AtomicUsize,
    /// When the last one began, coarse ns.
    began_ns: AtomicU64,
    /// Not 0 when a measurement waited in vain for those under way: nobody else does.
    is_long: AtomicU32,
    pub(super) base: [AtomicI64; WAYS],
    /// Calls for small arrays meanwhile, of which more was seen than they can do, or by which nothing but a block moved, as it
    /// seemed: in both, what is measured here may hide.
    pub(super) unclear: AtomicU64,
    pub(super) clear: AtomicU64,
    /// Held through a call that is looked at by itself, as long as that is not worth waiting for.
    calls: Lock,
    /// How often it was taken, when last, coarse ns, and for which turn it is not worth waiting.
    turns: AtomicU64,
    turn_ns: AtomicU64,
    long_turn: AtomicU64,
    /// The name of the call that holds it; 0 = none, or it has not begun.
    pub(super) caller: AtomicU64,
    /// When a look waited in vain, coarse ns; 0 = none did.
    pub(super) in_vain_ns: AtomicU64,
    /// For whom a look waited in vain.
    pub(super) stays: AtomicU64,
    /// How much those had asked for whom a request waited for in vain, and when, coarse ns; 0 = none did.
    asked: AtomicU64,
    asked_ns: AtomicU64,
    /// Beside whom answers were not believed, and how many.
    pub(super) beside: AtomicU64,
    pub(super) disbelieved: AtomicU64,
}

impl UnderWay {
    pub(super) const fn new() -> Self {
        Self {
            count: AtomicU32::new(0),
            thread: AtomicUsize::new(0),
            began_ns: AtomicU64::new(0),
            is_long: AtomicU32::new(0),
            base: [const { AtomicI64::new(NONE) }; WAYS],
            unclear: AtomicU64::new(0),
            clear: AtomicU64::new(0),
            calls: Lock::new(),
            turns: AtomicU64::new(0),
            turn_ns: AtomicU64::new(0),
            long_turn: AtomicU64::new(0),
            caller: AtomicU64::new(0),
            in_vain_ns: AtomicU64::new(0),
            stays: AtomicU64::new(0),
            asked: AtomicU64::new(0),
            asked_ns: AtomicU64::new(0),
            beside: AtomicU64::new(0),
            disbelieved: AtomicU64::new(0),
        }
    }

    /// One has begun; whether it is the only one.
    pub(super) fn begins(&self) -> bool {
        self.thread.store(thread(), Relaxed);
        self.began_ns.store(now_ns(), Relaxed);
        let is_only = self.count.fetch_add(1, Relaxed) == 0;
        if is_only {
            self.unclear.store(0, Relaxed);
            self.clear.store(0, Relaxed);
        }
        is_only
    }

    /// What was charged in advance for one counts, or no longer, as charged before the beginning.
    pub(super) fn move_base(&self, bytes: i64) {
        for base in self.base.iter().filter(|base| base.load(Relaxed) != NONE) {
            base.fetch_add(bytes, Relaxed);
        }
    }

    /// One has ended.
    pub(super) fn ends(&self) {
        // This thread waits for those that go on.
        let _ = self.thread.compare_exchange(thread(), 0, Relaxed, Relaxed);
        if self.count.fetch_sub(1, Relaxed) == 1 {
            self.is_long.store(0, Relaxed);
        }
        sys::futex_wake(self.count.as_ptr());
    }

    /// Whether those under way are not worth waiting for by somebody who waits for `most_ns` at most. The time counts from their
    /// beginning: however many wait, each has its turn.
    pub(super) fn takes_longer_than(&self, most_ns: u64) -> bool {
        let is_over = now_ns().saturating_sub(self.began_ns.load(Relaxed)) >= most_ns;
        if is_over && most_ns >= TURN_NS {
            self.is_long.store(1, Relaxed);
        }
        is_over || self.is_long.load(Relaxed) != 0
    }

    /// The turn among calls that are looked at by themselves; `None` where the call that has it takes long. That is waited for
    /// once.
    pub(super) fn turn(&self) -> Option<Turn<'_>> {
        let is_worth_it = || {
            let (turn, began_ns) = (self.turns.load(Relaxed), self.turn_ns.load(Relaxed));
            if now_ns().saturating_sub(began_ns) >= CALL_NS {
                self.long_turn.store(turn, Relaxed);
            }
            self.long_turn.load(Relaxed) != turn
        };
        let held = self.calls.lock_while(is_worth_it)?;
        self.turn_ns.store(now_ns(), Relaxed);
        self.turns.fetch_add(1, Relaxed);
        Some(Turn::new(&self.caller, held))
    }

    /// How long to wait for calls at the driver.
    pub(super) fn patience_ns(&self) -> u64 {
        if is_recent(&self.in_vain_ns) { LOOK_AFTER_NS } else { LOOK_NS }
    }

    /// A request has waited in vain for others who had asked for so much.
    pub(super) fn asked_in_vain(&self, asked: u64) {
        self.asked.store(asked, Relaxed);
        self.asked_ns.store(now_ns(), Relaxed);
    }

    /// Whether a request lately waited in vain for others who had asked for so much. Once less is asked for, not all of them
    /// are there any more.
    pub(super) fn was_asked_in_vain(&self, asked: u64) -> bool {
        let before = self.asked.load(Relaxed);
        if asked < before {
            self.asked_ns.store(0, Relaxed);
        }
        asked == before && is_recent(&self.asked_ns)
    }

    /// Whether a measurement of another thread is under way.
    pub(super) fn is_anothers(&self) -> bool {
        self.count.load(Relaxed) != 0 && self.thread.load(Relaxed) != thread()
    }
}

#[cfg(test)]
mod tests {
    extern crate std;

    use super::*;

    #[test]
    fn whose_own_measurement_has_ended_waits_for_those_of_others() {
        let under_way = UnderWay::new();
        std::thread::scope(|scope| {
            scope.spawn(|| assert!(under_way.begins()));
        });
        assert!(!under_way.begins());
        assert!(!under_way.is_anothers(), "within its own");
        under_way.ends();
        assert!(under_way.is_anothers(), "the first one goes on");
        under_way.ends();
        assert!(!under_way.is_anothers(), "none goes on");
    }

    #[test]
    fn a_wait_in_vain_counts_as_long_as_all_may_be_there() {
        let under_way = UnderWay::new();
        assert!(!under_way.was_asked_in_vain(4), "nobody waited");
        under_way.asked_in_vain(4);
        assert!(!under_way.was_asked_in_vain(6), "somebody else as well");
        assert!(under_way.was_asked_in_vain(4));
        assert!(!under_way.was_asked_in_vain(2), "one of them is gone");
        assert!(!under_way.was_asked_in_vain(4), "and another one has come");
    }
}
