//! Real threads and real processes at the limit: never over, always one winner; and processes that are killed while
//! they claim and free.

#![expect(clippy::expect_used, reason = "helpers of tests")]

mod shared;

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::sys::wait::waitpid;
use shared::{FREE, HELD, Others, SLOTS, Shared, child, ended_well};

/// Room for one of the racers.
const LIMIT: u64 = 100;
const BYTES: u64 = 60;

/// One racer's rounds: all ask at once, who wins gives back when all have their answer.
fn race(shared: &Shared, own: usize, racers: u64, rounds: u64) {
    let account = shared.account(own, LIMIT);
    for _ in 0..rounds {
        shared.meet(racers);
        let claim = account.claim(BYTES, &mut Others(shared)).ok();
        let won = claim.is_some();
        if let Some(claim) = claim {
            shared.give(own, BYTES, LIMIT);
            account.settle(claim);
            shared.winners.fetch_add(1, Ordering::SeqCst);
        }
        shared.meet(racers);
        if own == 0 {
            shared
                .rounds
                .fetch_add(u64::from(shared.winners.swap(0, Ordering::SeqCst) == 1), Ordering::SeqCst);
        }
        if won {
            shared.take_back(own, BYTES);
            account.free(BYTES);
        }
    }
    shared.meet(racers);
}

fn prepare(racers: usize, junk: u64) -> &'static Shared {
    let shared = Shared::new();
    for slot in 0..racers {
        shared.account(slot, LIMIT).open();
        shared.locks[slot].store(HELD, Ordering::SeqCst);
    }
    // What a crash leaves: the sum decides from now on.
    shared.total.store(junk, Ordering::SeqCst);
    shared
}

fn check(shared: &Shared, case: &str, rounds: u64, junk: u64) {
    let load = |word: &std::sync::atomic::AtomicU64| word.load(Ordering::SeqCst);
    assert_eq!(load(&shared.over), 0, "{case}: over the limit");
    assert_eq!(load(&shared.rounds), rounds, "{case}: rounds with one winner");
    assert_eq!((load(&shared.given), load(&shared.total)), (0, junk), "{case}: left at the end");
    assert_eq!(shared.account(0, LIMIT).used(), 0, "{case}: left at the end");
}

#[test]
fn threads_race_for_the_last_room() {
    for (racers, rounds, junk) in
        [(2, 20_000, 0), (5, 8_000, 0), (8, 6_000, 0), (2, 4_000, LIMIT), (6, 500, LIMIT)]
    {
        let shared = prepare(racers, junk);
        std::thread::scope(|scope| {
            for own in 0..racers {
                scope.spawn(move || race(shared, own, racers as u64, rounds));
            }
        });
        check(shared, &format!("{racers} threads, T off by {junk}"), rounds, junk);
    }
}

#[test]
fn processes_race_for_the_last_room() {
    for (racers, rounds, junk) in
        [(2, 40_000, 0), (4, 20_000, 0), (8, 10_000, 0), (2, 20_000, LIMIT), (8, 2_000, LIMIT)]
    {
        let shared = prepare(racers, junk);
        let children: Vec<_> = (0..racers)
            .map(|own| {
                child(|| {
                    race(shared, own, racers as u64, rounds);
                    0
                })
            })
            .collect();
        assert!(children.into_iter().all(ended_well));
        check(shared, &format!("{racers} processes, T off by {junk}"), rounds, junk);
    }
}

/// Threads of one process have one slot.
#[test]
fn threads_of_one_slot_race_for_the_last_room() {
    let shared = prepare(1, 0);
    let (threads, rounds) = (4_u64, 5_000_u64);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                let account = shared.account(0, LIMIT);
                for _ in 0..rounds {
                    shared.meet(threads);
                    let claim = account.claim(BYTES, &mut Others(shared)).ok();
                    if let Some(claim) = claim {
                        shared.give(0, BYTES, LIMIT);
                        account.settle(claim);
                        shared.winners.fetch_add(1, Ordering::SeqCst);
                        shared.meet(threads);
                        shared.take_back(0, BYTES);
                        account.free(BYTES);
                    } else {
                        shared.meet(threads);
                    }
                }
            });
        }
    });
    assert_eq!(shared.winners.load(Ordering::SeqCst), rounds);
    assert_eq!((shared.over.load(Ordering::SeqCst), shared.account(0, LIMIT).used()), (0, 0));
}

/// Claims and frees until it is killed.
fn churn(shared: &Shared, own: usize, mut seed: u64) -> ! {
    let account = shared.account(own, LIMIT);
    account.open();
    let mut held = [0_u64; 4];
    loop {
        for place in &mut held {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            if *place > 0 {
                shared.take_back(own, *place);
                account.free(*place);
                *place = 0;
            } else {
                let bytes = 1 + (seed >> 33) % 50;
                if let Ok(claim) = account.claim(bytes, &mut Others(shared)) {
                    shared.give(own, bytes, LIMIT);
                    account.settle(claim);
                    *place = bytes;
                }
            }
        }
        shared.rounds.fetch_add(1, Ordering::SeqCst);
    }
}

/// Six processes at the limit, of which one is killed every now and then and replaced, at whatever instruction it is.
#[test]
fn a_storm_of_kills_leaves_nothing() {
    let shared = Shared::new();
    let start = |slot: usize, seed: u64| {
        shared.locks[slot].store(HELD, Ordering::SeqCst);
        child(move || churn(shared, slot, seed))
    };
    let mut children: Vec<_> = (0..SLOTS - 2).map(|slot| start(slot, slot as u64)).collect();
    let mut seed = 7_u64;
    let end = Instant::now() + Duration::from_secs(4);
    let mut kills = 0;
    while Instant::now() < end {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(99);
        std::thread::sleep(Duration::from_micros((seed >> 40) % 3000));
        let slot = usize::try_from(seed >> 33).expect("64 bits") % children.len();
        kill(children[slot], Signal::SIGKILL).expect("a child");
        waitpid(children[slot], None).expect("a child");
        shared.take_all_back(slot);
        shared.locks[slot].store(FREE, Ordering::SeqCst);
        // Now and then the others find it dead before it has a successor.
        if kills % 3 == 0 {
            std::thread::sleep(Duration::from_millis(2));
        }
        let mut others = Others(shared);
        while !mullion_accounting::Peers::take(&mut others, slot) {
            std::thread::yield_now();
        }
        children[slot] = start(slot, seed);
        kills += 1;
    }
    for (slot, child) in children.into_iter().enumerate() {
        kill(child, Signal::SIGKILL).expect("a child");
        waitpid(child, None).expect("a child");
        shared.take_all_back(slot);
    }
    // The kernel frees the bytes of the dead, also those that one held to reap another.
    shared.locks.iter().for_each(|lock| lock.store(FREE, Ordering::SeqCst));
    assert_eq!(shared.over.load(Ordering::SeqCst), 0, "over the limit");
    assert!(kills > 100 && shared.rounds.load(Ordering::SeqCst) > 1000, "{kills} kills");
    // The charge is gone: all of the limit is free for one who needs it.
    let last = shared.account(SLOTS - 1, LIMIT);
    last.open();
    let claim = last.claim(LIMIT, &mut Others(shared)).expect("all is free");
    assert_eq!((claim.bytes(), last.used()), (LIMIT, LIMIT));
    last.undo(claim);
}
