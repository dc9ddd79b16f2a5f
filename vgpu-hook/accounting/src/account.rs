use crate::{Mark, Word};

/// Tries before a claim that meets others is refused.
pub const ATTEMPTS: u32 = 8;
/// Tries in which the settled bytes alone seemed to leave no room before a claim is refused without waiting on.
const FULL: u32 = 2;
/// Different waits: more would make a claim of a high slot wait long.
const WAITS: usize = 64;

/// The two words of one process on one card, as they lie in the usage file.
#[repr(C)]
#[derive(Debug, Default)]
pub struct Slot<W> {
    /// C: bytes that the process holds or asks for.
    pub claimed: W,
    /// B: bytes of the total that stand for the process; never more than C.
    pub settled: W,
}

const _: () = assert!(size_of::<Slot<core::sync::atomic::AtomicU64>>() == 16);

/// The other processes of the container, and time.
pub trait Peers {
    /// Tries to take the lock byte of `slot`; whether it was free. Must not wait.
    fn take(&mut self, slot: usize) -> bool;
    /// Gives the lock byte of `slot` back.
    fn give_back(&mut self, slot: usize);
    /// Waits for about `units` microseconds.
    fn pause(&mut self, units: u32);
}

/// Bytes that were admitted and wait for the driver's word: [`Account::settle`] or [`Account::undo`].
#[must_use = "a claim that is neither settled nor undone stays charged"]
#[derive(Debug, PartialEq, Eq)]
pub struct Claim {
    bytes: u64,
}

impl Claim {
    /// How many bytes.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// No room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refused {
    /// Bytes that the container's processes held or asked for at that time, without the refused ones.
    pub used: u64,
    /// The limit in bytes.
    pub limit: u64,
}

/// How often a claim may still be tried.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tries {
    left: u32,
    full: u32,
}

impl Tries {
    /// `left` tries.
    #[must_use]
    pub const fn new(left: u32) -> Self {
        Self { left, full: 0 }
    }
}

/// One card's memory as one process sees it. Cheap to make and to copy; all state is in the shared words.
#[derive(Debug)]
pub struct Account<'a, W, M> {
    total: &'a W,
    slots: &'a [Slot<W>],
    mark: &'a M,
    mine: &'a Slot<W>,
    own: usize,
    limit: u64,
}

impl<W, M> Clone for Account<'_, W, M> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<W, M> Copy for Account<'_, W, M> {}

#[derive(Clone, Copy, Default)]
struct Sums {
    claimed: u64,
    settled: u64,
}

impl<'a, W: Word, M: Mark> Account<'a, W, M> {
    /// The card whose total is `total` and whose slots are `slots`, seen by the owner of slot `own`; `mark` is one more
    /// than the highest slot ever owned, `limit` in bytes. `None` where there is no such slot.
    #[must_use]
    pub fn new(total: &'a W, slots: &'a [Slot<W>], mark: &'a M, own: usize, limit: u64) -> Option<Self> {
        Some(Self { total, slots, mark, mine: slots.get(own)?, own, limit })
    }

    /// The limit in bytes.
    #[must_use]
    pub const fn limit(&self) -> u64 {
        self.limit
    }

    /// Takes over the own slot, whose lock byte the caller holds: what the last owner left is freed, and the others will
    /// look at the slot from now on. To be called on every card before the first claim on any.
    pub fn open(&self) {
        self.reap(self.own);
        self.mark.raise(u32::try_from(self.own).unwrap_or(u32::MAX).saturating_add(1));
    }

    /// Asks for `bytes` before the driver is asked.
    ///
    /// # Errors
    /// [`Refused`] when they are not free; nothing is charged then.
    #[inline]
    pub fn claim(&self, bytes: u64, peers: &mut impl Peers) -> Result<Claim, Refused> {
        if bytes > self.limit || !self.publish(bytes) {
            return Err(self.refused());
        }
        if self.add_within_limit(bytes) {
            return Ok(Claim { bytes });
        }
        self.claim_by_sum(bytes, peers)
    }

    /// T had no room, perhaps only because of a crash or of a claim that will be refused.
    #[cold]
    #[inline(never)]
    fn claim_by_sum(&self, bytes: u64, peers: &mut impl Peers) -> Result<Claim, Refused> {
        let mut tries = Tries::new(ATTEMPTS);
        let mut answer = self.sum_decides(bytes, &mut tries, peers);
        loop {
            if let Some(answer) = answer {
                return answer;
            }
            peers.pause(self.wait(tries));
            answer = self.attempt(bytes, &mut tries, peers);
        }
    }

    /// One try of [`Self::claim`], which makes several; `None` where another one may help.
    pub fn attempt(
        &self,
        bytes: u64,
        tries: &mut Tries,
        peers: &mut impl Peers,
    ) -> Option<Result<Claim, Refused>> {
        if bytes > self.limit || !self.publish(bytes) {
            return Some(Err(self.refused()));
        }
        if self.add_within_limit(bytes) {
            return Some(Ok(Claim { bytes }));
        }
        self.sum_decides(bytes, tries, peers)
    }

    /// Adds to T whatever it is: the sum of all C decides. What was published in C is taken back with the rest.
    fn sum_decides(
        &self,
        bytes: u64,
        tries: &mut Tries,
        peers: &mut impl Peers,
    ) -> Option<Result<Claim, Refused>> {
        saturating_add(self.total, bytes);
        let sums = self.sums();
        if sums.claimed <= self.limit {
            return Some(Ok(Claim { bytes }));
        }
        self.total.fetch_sub(bytes);
        self.mine.claimed.fetch_sub(bytes);
        let refused = Refused { used: sums.claimed.saturating_sub(bytes), limit: self.limit };
        if self.reap_dead(peers) > 0 {
            // A new state of affairs; each death gives one more try.
            tries.full = 0;
            return None;
        }
        let alone = sums.settled.saturating_add(bytes) > self.limit;
        tries.full = if alone { tries.full + 1 } else { 0 };
        tries.left = tries.left.saturating_sub(1);
        (tries.left == 0 || tries.full == FULL).then_some(Err(refused))
    }

    /// The driver gave what was claimed.
    #[expect(clippy::needless_pass_by_value, reason = "a claim is settled once")]
    #[inline]
    pub fn settle(&self, claim: Claim) {
        let Claim { bytes } = claim;
        self.mine.settled.fetch_add(bytes);
    }

    /// The driver gave `real` bytes for `claim`: more than asked for (then the limit may be passed, and the next claim
    /// is refused) or less.
    ///
    /// The difference first, so that at no time the claim looks settled and is not what the driver gave.
    pub fn settle_at(&self, claim: Claim, real: u64) {
        let claimed = claim.bytes();
        if real > claimed {
            self.force(real - claimed);
            self.settle(claim);
        } else {
            self.undo(Claim { bytes: claimed - real });
            self.settle(Claim { bytes: real });
        }
    }

    /// The driver refused what was claimed.
    #[expect(clippy::needless_pass_by_value, reason = "a claim is undone once")]
    pub fn undo(&self, claim: Claim) {
        let Claim { bytes } = claim;
        self.total.fetch_sub(bytes);
        self.mine.claimed.fetch_sub(bytes);
    }

    /// The driver took back `bytes` that were settled.
    #[inline]
    pub fn free(&self, bytes: u64) {
        self.mine.settled.fetch_sub(bytes);
        self.total.fetch_sub(bytes);
        self.mine.claimed.fetch_sub(bytes);
    }

    /// Charges `bytes` that the driver gave without being asked for memory (contexts, modules), within the limit or not.
    pub fn force(&self, bytes: u64) {
        saturating_add(&self.mine.claimed, bytes);
        saturating_add(self.total, bytes);
        saturating_add(&self.mine.settled, bytes);
    }

    /// What was charged as `old` bytes has `new` bytes now (a pool's reserve), within the limit or not.
    pub fn adjust(&self, old: u64, new: u64) {
        if new > old {
            self.force(new - old);
        } else if new < old {
            self.free(old - new);
        }
    }

    /// Takes what the dead owner of `slot` held off the books. The caller holds the slot's lock byte, so that no owner
    /// can write meanwhile.
    pub fn reap(&self, slot: usize) {
        let Some(slot) = self.slots.get(slot) else { return };
        let settled = slot.settled.swap(0);
        // B is never more than C, unless somebody wrote it.
        self.total.fetch_sub(settled.min(slot.claimed.load()));
        slot.claimed.store(0);
    }

    /// Reaps all slots but the own whose owner is dead; how many that were.
    #[cold]
    pub fn reap_dead(&self, peers: &mut impl Peers) -> usize {
        let mut reaped = 0;
        for (index, slot) in self.in_use().enumerate() {
            let charged = index != self.own && (slot.claimed.load() != 0 || slot.settled.load() != 0);
            if charged && peers.take(index) {
                self.reap(index);
                peers.give_back(index);
                reaped += 1;
            }
        }
        reaped
    }

    /// Bytes that the container's processes hold or ask for; those of dead ones count until they are reaped.
    #[must_use]
    pub fn used(&self) -> u64 {
        self.sums().claimed
    }

    /// Bytes that the container's processes hold; those of dead ones count until they are reaped.
    #[must_use]
    pub fn settled(&self) -> u64 {
        self.sums().settled
    }

    /// Bytes that this process holds or asks for.
    #[must_use]
    pub fn own_used(&self) -> u64 {
        self.mine.claimed.load()
    }

    /// Bytes that this process holds.
    #[must_use]
    pub fn own_settled(&self) -> u64 {
        self.mine.settled.load()
    }

    /// T: never less than what is held, more after a crash.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.total.load()
    }

    /// Whether this process has asked for bytes of which the driver's word is not in yet.
    #[must_use]
    pub fn is_in_flight(&self) -> bool {
        self.mine.claimed.load() != self.mine.settled.load()
    }

    /// Bytes that this process has asked for, of which the driver's word is not in yet.
    #[must_use]
    pub fn own_in_flight(&self) -> u64 {
        self.mine.claimed.load().saturating_sub(self.mine.settled.load())
    }

    /// The same of all processes of the container; what a dead one left counts until it is reaped.
    #[must_use]
    pub fn in_flight(&self) -> u64 {
        let sums = self.sums();
        sums.claimed.saturating_sub(sums.settled)
    }

    /// Adds to C; `false`, and nothing added, where it would wrap.
    #[inline]
    fn publish(&self, bytes: u64) -> bool {
        let fits = self.mine.claimed.fetch_add(bytes).checked_add(bytes).is_some();
        if !fits {
            self.mine.claimed.fetch_sub(bytes);
        }
        fits
    }

    /// Adds to T while that stays within the limit.
    #[inline]
    fn add_within_limit(&self, bytes: u64) -> bool {
        let mut total = self.total.load();
        while let Some(next) = total.checked_add(bytes).filter(|next| *next <= self.limit) {
            match self.total.compare_exchange(total, next) {
                Ok(_) => return true,
                Err(found) => total = found,
            }
        }
        false
    }

    /// How long to wait before the next of `tries`: different for each slot and each thread, twice as long each time.
    /// Together at most 16 ms.
    fn wait(&self, tries: Tries) -> u32 {
        // Threads of one process have the same slot but not the same stack.
        let thread = core::ptr::from_ref(&tries).addr() >> 12;
        let step = 1 + (self.own + thread % 7) % WAITS;
        u32::try_from(step).unwrap_or(1) << ATTEMPTS.saturating_sub(tries.left + 1).min(7)
    }

    fn refused(&self) -> Refused {
        Refused { used: self.used(), limit: self.limit }
    }

    /// The slots that were ever owned, the own among them whatever the mark says.
    #[inline]
    fn in_use(&self) -> impl Iterator<Item = &'a Slot<W>> {
        let mark = usize::try_from(self.mark.load()).unwrap_or(usize::MAX);
        self.slots.iter().take(mark.max(self.own + 1))
    }

    fn sums(&self) -> Sums {
        self.in_use().fold(Sums::default(), |sums, slot| Sums {
            claimed: sums.claimed.saturating_add(slot.claimed.load()),
            settled: sums.settled.saturating_add(slot.settled.load()),
        })
    }
}

/// Adds without wrapping: a number that somebody wrote must not become a small one.
fn saturating_add<W: Word>(word: &W, bytes: u64) {
    let mut value = word.load();
    while let Err(found) = word.compare_exchange(value, value.saturating_add(bytes)) {
        value = found;
    }
}
