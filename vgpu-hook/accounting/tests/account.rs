//! One process at a time: edges, and words that somebody scribbled over.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use mullion_accounting::{ATTEMPTS, Account, Peers, Refused, Slot};
use proptest::collection::vec;
use proptest::prelude::*;

const LIMIT: u64 = 1 << 30;

#[derive(Debug)]
struct Card {
    total: AtomicU64,
    slots: Vec<Slot<AtomicU64>>,
    mark: AtomicU32,
}

impl Card {
    fn new(slots: usize) -> Self {
        let slots = std::iter::repeat_with(Slot::default).take(slots).collect();
        Self { total: AtomicU64::new(0), slots, mark: AtomicU32::new(0) }
    }

    fn account(&self, own: usize) -> Account<'_, AtomicU64, AtomicU32> {
        Account::new(&self.total, &self.slots, &self.mark, own, LIMIT).unwrap()
    }

    fn opened(&self, own: usize) -> Account<'_, AtomicU64, AtomicU32> {
        let account = self.account(own);
        account.open();
        account
    }

    fn words(&self, slot: usize) -> (u64, u64, u64) {
        let load = |word: &AtomicU64| word.load(Ordering::SeqCst);
        (load(&self.total), load(&self.slots[slot].claimed), load(&self.slots[slot].settled))
    }
}

/// The others: who is dead, and what was asked of them.
#[derive(Default)]
struct Others {
    dead: Vec<usize>,
    held: Vec<usize>,
    pauses: Vec<u32>,
}

impl Peers for Others {
    fn take(&mut self, slot: usize) -> bool {
        let free = self.dead.contains(&slot);
        if free {
            self.held.push(slot);
        }
        free
    }
    fn give_back(&mut self, slot: usize) {
        assert_eq!(self.held.pop(), Some(slot));
    }
    fn pause(&mut self, units: u32) {
        self.pauses.push(units);
    }
}

#[test]
fn the_limit_is_exact_to_the_byte() {
    let card = Card::new(4);
    let account = card.opened(0);
    let mut others = Others::default();
    let claim = account.claim(LIMIT - 1, &mut others).unwrap();
    account.settle(claim);
    assert_eq!(account.claim(2, &mut others), Err(Refused { used: LIMIT - 1, limit: LIMIT }));
    let last = account.claim(1, &mut others).unwrap();
    account.undo(last);
    let last = account.claim(1, &mut others).unwrap();
    account.settle(last);
    assert_eq!(card.words(0), (LIMIT, LIMIT, LIMIT));
    account.free(LIMIT);
    assert_eq!(card.words(0), (0, 0, 0));
    assert_eq!(account.claim(LIMIT + 1, &mut others).unwrap_err().used, 0);
    assert_eq!(account.claim(u64::MAX, &mut others).unwrap_err().used, 0);
    assert_eq!(card.words(0), (0, 0, 0));
}

/// What the driver gave is what counts.
#[test]
fn a_claim_is_settled_at_the_drivers_size() {
    let card = Card::new(1);
    let account = card.opened(0);
    let mut others = Others::default();
    for (claimed, real) in [(1000, 4096), (4096, 1000), (512, 512), (0, 10), (10, 0)] {
        let claim = account.claim(claimed, &mut others).unwrap();
        account.settle_at(claim, real);
        assert_eq!(card.words(0), (real, real, real), "{claimed} asked for");
        account.free(real);
    }
    // A context is there, whatever the limit says; then nothing else fits until it is gone.
    account.force(LIMIT + 5);
    assert_eq!(account.claim(1, &mut others), Err(Refused { used: LIMIT + 5, limit: LIMIT }));
    account.adjust(LIMIT + 5, LIMIT - 1);
    let claim = account.claim(1, &mut others).unwrap();
    account.settle(claim);
    account.adjust(7, 7);
    assert_eq!(account.own_used(), LIMIT);
}

#[test]
fn a_full_card_is_said_to_be_full_without_waiting_on() {
    let card = Card::new(4);
    let (one, two) = (card.opened(0), card.opened(3));
    let mut others = Others::default();
    let claim = one.claim(LIMIT, &mut others).unwrap();
    one.settle(claim);
    assert!(two.claim(1, &mut others).is_err());
    assert_eq!(others.pauses.len(), 1, "twice looked at, once waited");
    assert_eq!(card.words(3), (LIMIT, 0, 0), "nothing of it stays");
}

/// A claim that the other one may have to give up is waited for, longer each time, but not for ever.
#[test]
fn a_claim_in_flight_is_waited_for() {
    let card = Card::new(64);
    let (one, two) = (card.opened(0), card.opened(63));
    let mut others = Others::default();
    let flight = one.claim(LIMIT, &mut others).unwrap();
    assert!(two.claim(1, &mut others).is_err());
    assert_eq!(others.pauses.len(), ATTEMPTS as usize - 1);
    assert!(others.pauses.is_sorted_by(|a, b| a < b), "{:?}", others.pauses);
    assert!(others.pauses.iter().sum::<u32>() <= 16_384, "{:?}", others.pauses);
    one.undo(flight);
    assert!(two.claim(1, &mut others).is_ok());
}

#[test]
fn the_dead_are_reaped_when_room_is_needed() {
    let card = Card::new(8);
    let own = card.opened(0);
    let mut others = Others { dead: vec![2, 5], ..Others::default() };
    for slot in [2, 5] {
        let dead = card.opened(slot);
        let claim = dead.claim(LIMIT / 2, &mut Others::default()).unwrap();
        dead.settle(claim);
    }
    let claim = own.claim(LIMIT, &mut others).unwrap();
    own.settle(claim);
    assert_eq!(card.words(2), (LIMIT, 0, 0));
    assert_eq!(card.words(5), (LIMIT, 0, 0));
    assert!(others.held.is_empty(), "every byte is given back");
}

/// Each point at which a process can die, seen from its successor in the slot and from others.
#[test]
fn a_crash_costs_the_fast_way_never_room() {
    let crash = |at: usize, card: &Card| {
        let slot = &card.slots[1];
        let (half, add) = (LIMIT / 2, |word: &AtomicU64, n| word.fetch_add(n, Ordering::SeqCst));
        if at > 0 {
            add(&slot.claimed, half);
        }
        if at > 1 {
            add(&card.total, half);
        }
        if at > 2 {
            add(&slot.settled, half);
        }
        // While it frees.
        if at > 3 {
            slot.settled.fetch_sub(half, Ordering::SeqCst);
        }
        if at > 4 {
            card.total.fetch_sub(half, Ordering::SeqCst);
        }
    };
    for at in 0..=5 {
        for times in 1..=5 {
            let card = Card::new(8);
            let own = card.opened(0);
            for _ in 0..times {
                card.opened(1);
                crash(at, &card);
            }
            let mut others = Others { dead: vec![1], ..Others::default() };
            let claim =
                own.claim(LIMIT, &mut others).unwrap_or_else(|e| panic!("step {at}, {times} times: {e:?}"));
            own.settle(claim);
            own.free(LIMIT);
            card.opened(1);
            assert_eq!((own.used(), own.own_used()), (0, 0), "step {at}, {times} times");
        }
    }
}

#[test]
fn a_slot_that_is_not_there_has_no_account() {
    let card = Card::new(2);
    assert!(Account::new(&card.total, &card.slots, &card.mark, 2, LIMIT).is_none());
    let account = card.opened(1);
    account.reap(7);
    assert_eq!(card.mark.load(Ordering::SeqCst), 2);
    assert_eq!(card.opened(0).limit(), LIMIT);
    assert_eq!(card.mark.load(Ordering::SeqCst), 2, "only grows");
}

/// Numbers near the ends, where sums wrap.
fn scribble() -> impl Strategy<Value = u64> {
    prop_oneof![
        Just(0),
        0..=2 * LIMIT,
        (0..=LIMIT).prop_map(|n| u64::MAX - n),
        (0..=LIMIT).prop_map(|n| (1 << 63) - n),
        any::<u64>(),
    ]
}

proptest! {
    /// Whatever the words are, nothing panics, and no wrap makes room: what is granted is granted by a T or a sum of C
    /// that was within the limit before.
    #[test]
    fn scribbled_words_grant_nothing_by_wrapping(
        total in scribble(), words in vec((scribble(), scribble()), 4), mark: u32, asks in vec(0..=LIMIT, 1..6),
        dead in vec(0..4_usize, 0..2),
    ) {
        let card = Card::new(4);
        card.total.store(total, Ordering::SeqCst);
        card.mark.store(mark, Ordering::SeqCst);
        for (slot, (claimed, settled)) in card.slots.iter().zip(words) {
            slot.claimed.store(claimed, Ordering::SeqCst);
            slot.settled.store(settled, Ordering::SeqCst);
        }
        let account = card.account(1);
        let mut others = Others { dead, ..Others::default() };
        for bytes in asks {
            let fits = |sum: u64| sum.checked_add(bytes).is_some_and(|sum| sum <= LIMIT);
            match account.claim(bytes, &mut others) {
                Ok(claim) => {
                    // By T as it was, which a reaped slot may have lowered, or by the sum as it is now.
                    let by_sum = account.used() <= LIMIT;
                    prop_assert!(by_sum || fits(account.total().wrapping_sub(bytes)));
                    account.settle(claim);
                    account.free(bytes);
                }
                Err(refused) => prop_assert_eq!(refused.limit, LIMIT),
            }
            account.force(bytes);
            account.adjust(bytes, 0);
            account.reap(0);
            prop_assert!(others.held.is_empty());
        }
    }

    /// One process alone is a counter with a limit.
    #[test]
    fn alone_it_is_a_counter(steps in vec((any::<bool>(), 0..=LIMIT), 0..200)) {
        let card = Card::new(2);
        let account = card.opened(0);
        let mut others = Others::default();
        let mut held = Vec::new();
        for (frees, bytes) in steps {
            if frees && let Some(bytes) = held.pop() {
                account.free(bytes);
            } else {
                let used: u64 = held.iter().sum();
                match account.claim(bytes, &mut others) {
                    Ok(claim) => {
                        prop_assert!(used + bytes <= LIMIT);
                        account.settle(claim);
                        held.push(bytes);
                    }
                    Err(refused) => {
                        prop_assert!(used + bytes > LIMIT);
                        prop_assert_eq!(refused.used, used);
                    }
                }
            }
            let used = held.iter().sum();
            prop_assert_eq!(card.words(0), (used, used, used));
        }
    }
}
