//! The bucket alone: rates, clamps, hostile words.

#![expect(clippy::cast_precision_loss, reason = "a test: figures are small, and a failure may panic")]

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::thread;

use mullion_pace::{AHEAD_NS, Admission, Bucket, SCALE_ONE, Terms};
use proptest::prelude::*;

const MS: u64 = 1_000_000;
const NOW: u64 = 1_000_000 * MS;

fn terms(percent: u64) -> Terms {
    Terms { scale: SCALE_ONE, rate: percent * 10_000_000, burst: 50 * MS }
}

#[test]
fn a_launch_pays_its_cost_over_the_rate() {
    for (case, percent, cost, scale, want) in [
        ("half a card", 50, 10 * MS, SCALE_ONE, 20 * MS),
        ("a tenth", 10, 10 * MS, SCALE_ONE, 100 * MS),
        ("1 %", 1, 10 * MS, SCALE_ONE, 1000 * MS),
        ("scale 2", 50, 10 * MS, 2 * SCALE_ONE, 40 * MS),
        ("scale 1/4", 50, 10 * MS, SCALE_ONE / 4, 5 * MS),
        ("no cost is the least cost", 50, 0, SCALE_ONE, 2),
        ("scale 0 counts as the smallest", 50, 10 * MS, 0, 304),
        ("more than two seconds", 10, 500 * MS, SCALE_ONE, AHEAD_NS),
        ("cost beyond all", 50, u64::MAX, u32::MAX, AHEAD_NS),
    ] {
        let word = AtomicU64::new(NOW);
        let bucket = Bucket::over(&word);
        let terms = Terms { scale, ..terms(percent) };
        assert_eq!(bucket.admit(NOW, cost, terms), Admission::Go, "{case}");
        assert_eq!(word.load(Relaxed) - NOW, want, "{case}");
        assert_eq!(bucket.admit(NOW, cost, terms), Admission::Wait(want), "{case}");
        assert_eq!(bucket.admit(NOW + want, cost, terms), Admission::Go, "{case}");
    }
}

#[test]
fn no_limit_is_no_word() {
    for (case, rate) in [("rate 0", 0), ("a whole card", 1_000_000_000), ("more than one", u64::MAX)] {
        let word = AtomicU64::new(7);
        let terms = Terms { rate, ..terms(50) };
        for _ in 0..1000 {
            assert_eq!(Bucket::over(&word).admit(NOW, u64::MAX, terms), Admission::Go, "{case}");
        }
        assert_eq!(word.load(Relaxed), 7, "{case}");
    }
}

#[test]
fn no_more_is_saved_than_the_burst() {
    for (case, word) in [("a new file", 0), ("idle for long", NOW - 10_000 * MS)] {
        let word = AtomicU64::new(word);
        let launches =
            (0..1000).take_while(|_| Bucket::over(&word).admit(NOW, MS, terms(50)) == Admission::Go);
        // 50 ms of time at half a card is 25 launches of 1 ms, and one that finds it just spent.
        assert_eq!(launches.count(), 26, "{case}");
    }
}

#[test]
fn a_word_of_the_tenant_blocks_for_two_seconds_at_most() {
    for (case, found) in
        [("all ones", u64::MAX), ("far ahead", NOW + 100 * AHEAD_NS), ("a bit", NOW + AHEAD_NS + 1)]
    {
        let word = AtomicU64::new(found);
        let bucket = Bucket::over(&word);
        assert_eq!(bucket.admit(NOW, MS, terms(50)), Admission::Wait(AHEAD_NS), "{case}");
        // It was cut in the word, so that it comes closer.
        assert_eq!(bucket.admit(NOW + AHEAD_NS / 2, MS, terms(50)), Admission::Wait(AHEAD_NS / 2), "{case}");
        assert_eq!(bucket.admit(NOW + AHEAD_NS, MS, terms(50)), Admission::Go, "{case}");
    }
}

#[test]
fn a_clock_that_goes_back_costs_two_seconds_at_most() {
    let word = AtomicU64::new(0);
    let bucket = Bucket::over(&word);
    assert_eq!(bucket.admit(NOW, 40 * MS, terms(50)), Admission::Go);
    let earlier = NOW / 2;
    assert_eq!(bucket.admit(earlier, MS, terms(50)), Admission::Wait(AHEAD_NS));
    assert_eq!(bucket.admit(earlier + AHEAD_NS, MS, terms(50)), Admission::Go);
}

#[test]
fn a_past_clock_admits_only_what_the_present_would() {
    let word = AtomicU64::new(NOW - 10 * MS);
    let bucket = Bucket::over(&word);
    assert!(bucket.admit_at_past(NOW - 5 * MS, MS, terms(50)));
    assert_eq!(word.load(Relaxed), NOW - 8 * MS);
    // Further ahead than the past allows: nothing is charged, and nothing cut, for that word may be another process's.
    for found in [NOW - 4 * MS, NOW + MS, u64::MAX] {
        word.store(found, Relaxed);
        assert!(!bucket.admit_at_past(NOW - 5 * MS, MS, terms(50)));
        assert_eq!(word.load(Relaxed), found);
    }
    // However old the clock is: one burst, and then the present is asked.
    word.store(0, Relaxed);
    let launches = (0..1000).take_while(|_| bucket.admit_at_past(NOW / 2, MS, terms(50))).count();
    assert_eq!(launches, 26);
    assert!(!bucket.admit_at_past(NOW, MS, Terms { rate: 0, ..terms(50) }), "no limit is not its business");
}

#[test]
fn charge_and_refund_move_the_word_within_its_bounds() {
    let word = AtomicU64::new(NOW);
    let bucket = Bucket::over(&word);
    bucket.charge(NOW, 10 * MS, terms(50));
    assert_eq!(word.load(Relaxed), NOW + 20 * MS);
    bucket.refund(NOW, 10 * MS, terms(50));
    assert_eq!(word.load(Relaxed), NOW);
    bucket.charge(NOW, u64::MAX, terms(1));
    assert_eq!(word.load(Relaxed), NOW + AHEAD_NS);
    word.store(u64::MAX, Relaxed);
    bucket.refund(NOW, 10 * MS, terms(50));
    assert_eq!(word.load(Relaxed), NOW + AHEAD_NS - 20 * MS);
    word.store(5, Relaxed);
    bucket.refund(NOW, 10 * MS, terms(50));
    assert_eq!(word.load(Relaxed), 0);
}

/// Threads together get no more than the rate and the burst.
#[test]
fn racing_threads_get_the_rate_together() {
    let (word, gone) = (AtomicU64::new(0), AtomicU64::new(0));
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for step in 0..20_000_u64 {
                    let now = NOW + step * 50_000;
                    if Bucket::over(&word).admit(now, MS, terms(30)) == Admission::Go {
                        gone.fetch_add(1, Relaxed);
                    }
                }
            });
        }
    });
    // One second of simulated time, and the burst, at 30 % of 1 ms launches. Threads run apart, so the last one out
    // may find time that has passed for it alone: none of it can be spent twice.
    let gone = gone.load(Relaxed);
    assert!((250..=317).contains(&gone), "{gone}");
}

proptest! {
    /// Whatever word, clock, cost and terms: an answer within the bound, no panic, and the word within two seconds.
    #[test]
    fn anything_is_answered_within_the_bound(
        found: u64, now: u64, cost: u64, scale: u32, rate: u64, burst: u64,
    ) {
        let word = AtomicU64::new(found);
        let bucket = Bucket::over(&word);
        let terms = Terms { scale, rate, burst };
        match bucket.admit(now, cost, terms) {
            Admission::Go => {}
            Admission::Wait(ns) => prop_assert!(ns > 0 && ns <= AHEAD_NS),
        }
        if terms.limited() {
            prop_assert!(word.load(Relaxed) <= now.saturating_add(AHEAD_NS));
        }
        bucket.charge(now, cost, terms);
        bucket.refund(now, cost, terms);
    }

    /// Over a long time a container gets its rate, for any rate and cost.
    #[test]
    fn the_rate_is_kept(percent in 1_u64..100, cost in 10_000_u64..10 * MS) {
        let (word, mut now, mut spent) = (AtomicU64::new(NOW), NOW, 0_u64);
        while now < NOW + 20_000 * MS {
            match Bucket::over(&word).admit(now, cost, terms(percent)) {
                Admission::Go => spent += cost,
                Admission::Wait(ns) => now += ns,
            }
        }
        let share = spent as f64 / (20_000 * MS) as f64 * 100.0;
        prop_assert!((share - percent as f64).abs() < 0.5, "{share} of {percent}");
    }
}

/// A launch that is refused, or turns out to be short, gives back what it took and nothing of what others owe: of prices above
/// two seconds two seconds were taken.
#[test]
fn what_is_given_back_is_what_was_taken() {
    for percent in [1, 10, 30, 50] {
        for (paid, due) in
            [(100 * MS, 0), (700 * MS, 5_000), (60_000 * MS, 0), (u64::MAX, 1_000), (5_000, 90_000 * MS)]
        {
            let word = AtomicU64::new(NOW);
            let bucket = Bucket::over(&word);
            let other = AtomicU64::new(NOW);
            assert_eq!(bucket.admit(NOW, paid, terms(percent)), Admission::Go);
            bucket.settle(NOW, paid, due, terms(percent));
            if due > 0 {
                assert_eq!(Bucket::over(&other).admit(NOW, due, terms(percent)), Admission::Go);
            }
            assert_eq!(word.load(Relaxed), other.load(Relaxed), "{percent} %, {paid} paid, {due} due");
        }
    }
}
