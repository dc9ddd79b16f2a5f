//! The pool that the graphs of a process have on a card, and what a launch may make it take.
//!
//! The pool is charged with what it holds. Graphs that do not run at the same time share that, so a launch needs room for
//! all that its allocations are only where others may have the memory: where all launches since the pool was last empty
//! went into one stream, and freed what they allocated, the others are over when this one runs; else each of the graphs
//! may have its own, once.

use core::sync::atomic::Ordering::{AcqRel, Relaxed};
use core::sync::atomic::{AtomicBool, AtomicU64};

use mullion_accounting::Claim;

use super::charge;
use super::looks::Followed;
use crate::container::{Card, Container, Held, Lock};
use crate::cuda::{CUdevice, CUenum, CUresult};
use crate::driver;

/// `CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT`.
const RESERVED: CUenum = 2;

/// Where a pool's launches went: nowhere yet, or into several streams, or anything else that may run at the same time.
const NOWHERE: u64 = 0;
pub(super) const SEVERAL: u64 = u64::MAX;

/// The pool of one card.
#[derive(Debug)]
pub(super) struct Pool {
    lock: Lock,
    charged: AtomicU64,
    /// Somebody came in vain to look: the holder looks once more.
    missed: AtomicBool,
    /// The stream of the launches since the pool was last empty.
    stream: AtomicU64,
    /// What the graphs need that were launched since, together.
    sum: AtomicU64,
    /// How often it was empty.
    turn: AtomicU64,
}

/// A launch, as far as it matters to a pool.
pub(super) struct Launch {
    /// Its stream, or [`SEVERAL`].
    pub(super) stream: u64,
    /// It leaves allocations behind that the graph does not free.
    pub(super) keeps: bool,
}

/// What the pool may have to hold with a launch, and how it is to be known if the launch comes to be.
struct Needed {
    bytes: u64,
    /// The stream of the launches before, and with this one.
    streams: [u64; 2],
    sum: u64,
    turn: u64,
}

/// What the driver says that the pool holds.
fn reserved(container: &Container, card: &Card) -> Option<u64> {
    let ask = driver::function!(
        cuDeviceGetGraphMemAttribute: unsafe extern "C" fn(CUdevice, CUenum, *mut u64) -> CUresult
    )?;
    let device = container.device(card)?;
    let mut value = 0;
    // SAFETY: the driver writes one number.
    let result = unsafe { ask(device, RESERVED, &raw mut value) };
    result.is_ok().then_some(value)
}

impl Pool {
    pub(super) const fn new() -> Self {
        Self {
            lock: Lock::new(),
            charged: AtomicU64::new(0),
            missed: AtomicBool::new(false),
            stream: AtomicU64::new(NOWHERE),
            sum: AtomicU64::new(0),
            turn: AtomicU64::new(0),
        }
    }

    /// Brings the charge up to date, unless a launch is at the driver: it may wait for room in its queue, and whoever comes
    /// here must not wait for that. It looks itself when it is done. Whether nobody held the pool.
    pub(super) fn observe(&self, container: &Container, card: &Card) -> bool {
        if let Some(held) = self.lock.try_lock() {
            self.follow(container, card, &held);
            return true;
        }
        self.missed.store(true, Relaxed);
        false
    }

    /// The same; how much more it holds than is charged if it was held.
    pub(super) fn look_at(&self, container: &Container, card: &Card) -> Followed {
        if self.observe(container, card) {
            return Followed::ALL;
        }
        let uncharged = reserved(container, card)
            .map(|reserved| reserved.cast_signed() - self.charged.load(Relaxed).cast_signed());
        Followed { is_all: false, uncharged }
    }

    /// Lets the pool give back what it does not use; whether that was anything. One that is held is left alone.
    pub(super) fn give_way(&self, container: &Container, card: &Card) -> bool {
        self.charged.load(Relaxed) != 0
            && self.lock.try_lock().is_some_and(|held| self.trim(container, card, &held))
    }

    /// In which turn it is.
    pub(super) fn turn(&self) -> u64 {
        self.turn.load(Relaxed)
    }

    /// What is launched into a new stream under this handle may run beside what was launched into the old one.
    pub(super) fn stream_gone(&self, stream: u64) {
        let _ = self.stream.compare_exchange(stream, SEVERAL, Relaxed, Relaxed);
    }

    /// What the pool holds.
    fn follow(&self, container: &Container, card: &Card, _: &Held<'_>) -> u64 {
        let charged = self.charged.load(Relaxed);
        let reserved = reserved(container, card).unwrap_or(charged);
        if charged > reserved {
            container.books.measuring.stir(card);
        }
        if charged != reserved {
            self.charged.store(reserved, Relaxed);
            card.memory.adjust(charged, reserved);
            charge::note_peak(card);
        }
        reserved
    }

    /// Makes the pool give back what it does not use; whether that was anything.
    fn trim(&self, container: &Container, card: &Card, held: &Held<'_>) -> bool {
        let before = self.charged.load(Relaxed);
        let trim = driver::function!(cuDeviceGraphMemTrim: unsafe extern "C" fn(CUdevice) -> CUresult);
        if let (Some(trim), Some(device)) = (trim, container.device(card)) {
            // SAFETY: a device of this process.
            let _ = unsafe { trim(device) };
        }
        self.follow(container, card, held) < before
    }

    /// What the pool may have to hold in all with a launch that needs `bytes`; `first` tells the pool's turn, and answers
    /// whether it would be the graph's first launch in that.
    fn needed(&self, launch: &Launch, bytes: u64, first: &impl Fn(u64) -> bool) -> Needed {
        if self.charged.load(Relaxed) == 0 {
            self.stream.store(NOWHERE, Relaxed);
            self.sum.store(0, Relaxed);
            self.turn.fetch_add(1, Relaxed);
        }
        let turn = self.turn.load(Relaxed);
        let before = self.sum.load(Relaxed);
        let sum = if first(turn) { before.saturating_add(bytes) } else { before };
        let others = self.stream.load(Relaxed);
        let is_alone = [NOWHERE, launch.stream].contains(&others) && !launch.keeps;
        let stream = if is_alone { launch.stream } else { SEVERAL };
        let bytes = if stream == SEVERAL { sum } else { bytes };
        Needed { bytes, streams: [others, stream], sum, turn }
    }

    /// Claims what a launch lacks that needs `bytes`; `None` where the limit has no room for it.
    pub(super) fn part<'c>(
        &'c self,
        container: &Container,
        card: &'c Card,
        launch: &Launch,
        bytes: u64,
        first: impl Fn(u64) -> bool,
    ) -> Option<Part<'c>> {
        let held = self.lock.lock();
        let reserved = self.follow(container, card, &held);
        let mut needed = self.needed(launch, bytes, &first);
        let missing = |needed: &Needed, reserved| needed.bytes.saturating_sub(reserved).min(bytes);
        // All of it first, in case the driver shares less than it could.
        let claims = [bytes, missing(&needed, reserved)];
        let claim =
            claims.into_iter().find_map(|bytes| charge::try_ask(container, card, bytes)).or_else(|| {
                if self.trim(container, card, &held) {
                    needed = self.needed(launch, bytes, &first);
                }
                charge::ask_again(container, card, missing(&needed, self.charged.load(Relaxed)))
            })?;
        // A trim may have changed it.
        let before = self.charged.load(Relaxed);
        Some(Part { card, pool: self, held, claim, before, needed })
    }
}

/// A launch's part on one card, whose pool is held until this goes.
pub(super) struct Part<'c> {
    pub(super) card: &'c Card,
    pool: &'c Pool,
    held: Held<'c>,
    claim: Claim,
    /// What the pool held before the launch.
    before: u64,
    needed: Needed,
}

impl Part<'_> {
    /// The turn of the pool in which this is.
    pub(super) fn turn(&self) -> u64 {
        self.needed.turn
    }

    /// The driver has launched; whether it took no more than was claimed.
    pub(super) fn settle(self, container: &Container) -> bool {
        let Self { card, pool, held, claim, before, needed } = self;
        pool.sum.store(needed.sum, Relaxed);
        // Unless the others' stream is gone meanwhile.
        let [others, stream] = needed.streams;
        let _ = pool.stream.compare_exchange(others, stream, Relaxed, Relaxed);
        let after = reserved(container, card).unwrap_or(before);
        let (grown, claimed) = (after.saturating_sub(before), claim.bytes());
        charge::settle_at(card, claim, grown);
        if after < before {
            container.books.measuring.stir(card);
            card.memory.free(before - after);
        }
        pool.charged.store(after, Relaxed);
        if pool.missed.swap(false, AcqRel) {
            pool.follow(container, card, &held);
        }
        grown <= claimed
    }

    /// The driver has not, but may have taken some of the memory.
    pub(super) fn undo(self, container: &Container, why: CUresult) {
        charge::undo(self.card, self.claim, why);
        self.pool.follow(container, self.card, &self.held);
    }

    /// The driver is not asked.
    pub(super) fn give_up(self) {
        self.card.memory.undo(self.claim);
    }
}
