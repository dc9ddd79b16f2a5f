//! The table of costs, NVML's samples and single steps of the loop.

use mullion_pace::{
    Correction, Costs, Key, LEAST_NS, MAX_SCALE, MIN_SCALE, Meter, Observation, Progress, Reading,
    SAMPLE_EVERY, SAMPLE_EVERY_YOUNG, SCALE_ONE, Size, Steer, UNKNOWN_NS, guess_ns,
};
use proptest::prelude::*;

const MS: u64 = 1_000_000;
const S: u64 = 1_000_000_000;
const SMALL: Size = Size { blocks: 10, threads: 128 };

fn key(n: u64) -> Key {
    Key::function(0x7000_0000_0000 + n * 64, SMALL)
}

#[test]
fn guesses_count_waves() {
    let resident = 132 * 2048;
    for (case, grid, block, want) in [
        ("one thread", [1, 1, 1], [1, 1, 1], 10_000),
        ("a full card", [1056, 1, 1], [256, 1, 1], 10_000),
        ("one block more", [1057, 1, 1], [256, 1, 1], 20_000),
        ("nothing", [0, 0, 0], [0, 0, 0], 10_000),
        // HK-09: 65536 x 65536 blocks cost HAMi's library nothing.
        ("2^32 blocks", [65_536, 65_536, 1], [256, 1, 1], 40_672_040_000),
        ("all there is", [u32::MAX; 3], [u32::MAX; 3], u64::MAX),
    ] {
        let guess = guess_ns(Size::new(grid, block), resident);
        assert!(guess == want || (want == u64::MAX && guess > S), "{case}: {guess}");
    }
    assert!(guess_ns(SMALL, 0) > 0);
}

#[test]
fn sizes_of_one_function_are_measured_apart() {
    let costs = Costs::new();
    let large = Key::function(0x7000_0000_0000, Size { blocks: 1 << 20, threads: 128 });
    let _ = costs.measured(key(0), 5_000);
    let _ = costs.measured(large, 9 * MS);
    assert_eq!(
        (costs.known(key(0)).map(|k| k.ns), costs.known(large).map(|k| k.ns)),
        (Some(5_000), Some(9 * MS))
    );
    assert_eq!(costs.known(Key::graph(0x7000_0000_0000)).map(|k| k.ns), None);
    costs.forget(large);
    assert_eq!(costs.known(large).map(|k| k.ns), None);
}

#[test]
fn an_unmeasured_function_gets_dearer_with_every_launch() {
    let costs = Costs::new();
    let mut charged = 0;
    for n in 0..5 {
        let progress = if n == 0 { Progress::None } else { Progress::Running(0) };
        let quote = costs.quote(key(1), true, || 10_000, || progress);
        // The first, second, third and fifth are measured.
        assert_eq!((quote.ns, quote.sample, quote.known), (UNKNOWN_NS << n, n != 3, false));
        charged += quote.ns;
        costs.book(&quote);
    }
    // Seen to run for longer than that, or guessed to.
    assert_eq!(costs.quote(key(1), true, || 10_000, || Progress::Running(400 * MS)).ns, 400 * MS);
    assert_eq!(costs.quote(key(1), true, || 700 * MS, || Progress::Running(0)).ns, 700 * MS);
    // The measurement settles all five.
    assert_eq!(costs.measured(key(1), 5_000), Correction::Refund(charged - 5 * 5_000));
    assert_eq!(costs.measured(key(1), 9_000), Correction::None);
    assert_eq!(costs.known(key(1)).map(|k| k.ns), Some(6_000), "a later one counts a quarter");
    let quote = costs.quote(key(2), true, || 0, || Progress::None);
    costs.book(&quote);
    assert_eq!(costs.measured(key(2), 500 * MS), Correction::Charge(500 * MS - UNKNOWN_NS));
}

/// A stream may wait for the program itself, which launches on meanwhile: that must not get dearer and dearer.
#[test]
fn a_measurement_that_waits_in_its_stream_or_fails_does_not_stop_the_others() {
    for (case, progress, want) in
        [("queued", Progress::Queued, UNKNOWN_NS), ("events fail", Progress::None, 10_000)]
    {
        let costs = Costs::new();
        costs.book(&costs.quote(key(1), true, || 10_000, || Progress::None));
        for _ in 0..1000 {
            let quote = costs.quote(key(1), true, || 10_000, || progress);
            assert_eq!(quote.ns, want, "{case}");
            costs.book(&quote);
        }
    }
}

/// A thread may lose its CPU between the event and the launch.
#[test]
fn a_measurement_that_was_far_too_high_is_soon_forgotten() {
    let costs = Costs::new();
    let mut charged = 0;
    let mut launch = || {
        let quote = costs.quote(key(1), true, || 10_000, || Progress::None);
        costs.book(&quote);
        charged += quote.ns;
        charged
    };
    let before = launch();
    assert_eq!(costs.measured(key(1), 300 * MS), Correction::Charge(300 * MS - before));
    let after = launch() - before;
    assert_eq!(after, 300 * MS);
    assert_eq!(costs.measured(key(1), 200_000), Correction::Refund(600 * MS - 400_000));
    assert_eq!(costs.known(key(1)).map(|k| k.ns), Some(200_000));
    // Later as well: each launch is measured then, and the first that was not held up gives back what was charged.
    for _ in 0..8 {
        let _ = costs.measured(key(1), 200_000);
    }
    assert_eq!(costs.measured(key(1), 900 * MS), Correction::None);
    assert!(costs.known(key(1)).is_some_and(|k| k.ns == 900 * MS && k.book()));
    assert_eq!(costs.measured(key(1), 200_000), Correction::Refund(900 * MS - 200_000));
    assert_eq!(costs.known(key(1)).map(|k| k.ns), Some(200_000));
}

/// A kernel whose work depends on its data: short for long, long from now on.
#[test]
fn a_function_that_takes_longer_now_is_charged_so_at_once() {
    let costs = Costs::new();
    let _ = costs.measured(key(1), 3_000);
    let launches = |n| (0..n).filter(|_| costs.known(key(1)).unwrap().book()).count();
    launches(1_000);
    for _ in 0..8 {
        let _ = costs.measured(key(1), 3_000);
    }
    launches(10);
    assert_eq!(costs.measured(key(1), 20 * MS), Correction::None);
    assert_eq!(costs.known(key(1)).map(|k| k.ns), Some(20 * MS));
    assert_eq!(launches(5), 5, "not each is measured");
    // The next one tells that it was so for the launches since the last short one, not for all that ever were.
    assert_eq!(costs.measured(key(1), 20 * MS), Correction::Charge(10 * (20 * MS - 3_000) / 1_000 * 1_000));
    assert_eq!(costs.measured(key(1), 20 * MS), Correction::None, "charged once");
    // However many there were, a second is charged at most.
    launches(1_000);
    let _ = costs.measured(key(1), 500 * MS);
    assert_eq!(costs.measured(key(1), 500 * MS), Correction::Charge(S));
}

/// Two events cannot be closer than that with a kernel between them.
#[test]
fn a_measurement_of_nothing_is_believed_when_it_comes_twice() {
    for (case, known) in [("first", None), ("young", Some(5 * MS))] {
        let costs = Costs::new();
        if let Some(ns) = known {
            let _ = costs.measured(key(1), ns);
        }
        let quote = costs.quote(key(1), true, || 10_000, || Progress::None);
        costs.book(&quote);
        assert_eq!(costs.measured(key(1), 0), Correction::None, "{case}");
        assert_eq!(costs.known(key(1)).map(|k| k.ns), known, "{case}");
        assert!(costs.quote(key(1), true, || 10_000, || Progress::None).sample, "{case}");
        let _ = costs.measured(key(1), 5 * MS);
        assert_eq!(costs.known(key(1)).map(|k| k.ns), Some(5 * MS), "{case}");
        let _ = (costs.measured(key(1), 0), costs.measured(key(1), 0));
        assert_eq!(costs.known(key(1)).map(|k| k.ns), Some(LEAST_NS), "{case}");
    }
}

#[test]
fn what_cannot_be_measured_is_charged_by_its_guess() {
    let costs = Costs::new();
    for _ in 0..20 {
        let quote = costs.quote(key(3), false, || 12_345, || Progress::None);
        assert_eq!((quote.ns, quote.sample), (12_345, false));
        costs.book(&quote);
    }
}

#[test]
fn short_launches_are_measured_seldom_and_long_ones_each() {
    for (cost, times, every) in [
        (5_000, 1, u64::from(SAMPLE_EVERY_YOUNG)),
        (5_000, 8, u64::from(SAMPLE_EVERY)),
        (2 * MS, 8, 8),
        (20 * MS, 8, 1),
    ] {
        let costs = Costs::new();
        for _ in 0..times {
            let _ = costs.measured(key(4), cost);
        }
        let samples = (0..2560)
            .filter(|_| {
                let quote = costs.quote(key(4), true, || 0, || Progress::None);
                costs.book(&quote);
                assert!(quote.known && quote.ns == cost);
                quote.sample
            })
            .count();
        assert_eq!(samples as u64, 2560 / every, "{cost}");
    }
}

#[test]
fn a_full_table_guesses() {
    let costs = Costs::new();
    for n in 0..5_000 {
        let _ = costs.measured(key(n), 1_000 + n);
    }
    let known = (0..5_000).filter(|n| costs.known(key(*n)).is_some()).count();
    assert!((900..=1024).contains(&known), "{known}");
    // The first ones are still there, the last ones are guessed.
    assert_eq!(costs.known(key(0)).map(|k| k.ns), Some(1_000));
    let quote = costs.quote(key(4_999), true, || 777, || Progress::None);
    assert!((quote.ns, quote.sample) == (777, false) || costs.known(key(4_999)).is_some());
    costs.book(&quote);
}

fn present(per_mille: u32) -> Reading {
    Reading::Present { per_mille, covered_ns: 2 * S }
}

fn seen(reading: Reading, launched: bool, waits: u64) -> Observation {
    Observation { reading, launched, waits, waited_ns: waits * 500 * MS, elapsed_ns: 2 * S }
}

#[test]
fn one_step_of_the_loop() {
    let late = Reading::Stale { age_ns: 4 * S };
    let cases = [
        ("at the share", seen(present(300), true, 1), 0),
        ("twice the share", seen(present(600), true, 1), 1),
        ("twice the share without a wait", seen(present(600), true, 0), 1),
        ("half, held back", seen(present(150), true, 1), -1),
        ("half, not held back: it wants no more", seen(present(150), true, 0), 0),
        ("absent and held back", seen(Reading::Absent, true, 1), -1),
        ("absent, launching a little", seen(Reading::Absent, true, 0), 0),
        ("idle", seen(Reading::Absent, false, 0), 0),
        ("late", seen(late, true, 1), 0),
        ("NVML failed", seen(Reading::Missing, true, 1), 0),
        ("too few samples yet", seen(Reading::Gathering, true, 1), 0),
    ];
    for (case, observed, want) in cases {
        let after = Steer::default().step(30, &observed).scale();
        assert_eq!(i32::from(after > SCALE_ONE) - i32::from(after < SCALE_ONE), want, "{case}");
        // 0 and 100 are no limit: nothing to steer.
        for percent in [0, 100] {
            assert_eq!(Steer::default().step(percent, &observed).scale(), SCALE_ONE, "{case}");
        }
    }
    assert_eq!(Steer::new(0).scale(), MIN_SCALE);
}

#[test]
fn waits_count_until_a_reading_is_judged() {
    let nothing =
        Observation { reading: Reading::Gathering, launched: true, waits: 1, waited_ns: S, elapsed_ns: S };
    let steer = Steer::default().step(30, &nothing).step(30, &nothing);
    let low = Observation { waits: 0, waited_ns: 0, ..seen(present(100), true, 0) };
    assert!(steer.step(30, &low).scale() < SCALE_ONE);
}

#[test]
fn a_meter_counts_each_window_once() {
    // The clock of the stamps began long ago.
    const T: u64 = 1_000_000 * S;
    let mut meter = Meter::new();
    assert_eq!(meter.take(S), Reading::Absent);
    // Windows of 500 ms: busy at 100 % in every second one, read twice, from two processes.
    for at in [1000, 2000, 3000, 4000] {
        for _ in 0..2 {
            meter.push(1, T + at * MS, 100);
        }
    }
    meter.push(1, T + 1500 * MS, 0);
    meter.push(2, T + 3500 * MS, 120);
    meter.push(2, 0, 50);
    assert_eq!(meter.window_ns(), 500 * MS);
    let Reading::Present { per_mille, covered_ns } = meter.take(T + 4100 * MS) else { panic!("too few") };
    // Four of seven windows since the first began.
    assert!((560..=575).contains(&per_mille) && covered_ns == 3500 * MS, "{per_mille} {covered_ns}");
    assert_eq!(meter.take(T + 5 * S), Reading::Stale { age_ns: S });
    meter.push(1, T + 4500 * MS, 40);
    assert_eq!(meter.take(T + 5 * S), Reading::Gathering);
    assert_eq!(meter.take(T + 14 * S), Reading::Gathering, "late, perhaps");
    assert_eq!(meter.take(T + 60 * S), Reading::Absent, "no more came: it has stopped");
    meter.push(1, T + 100 * S, 40);
    assert_eq!(meter.take(T + 100 * S), Reading::Gathering, "a pause is not a low reading");
    meter.push(1, T + 102 * S, 40);
    assert!(matches!(meter.take(T + 102 * S), Reading::Present { .. }));
    assert_eq!(meter.take(T + 120 * S), Reading::Absent, "18 s are more than late");
}

proptest! {
    /// Whatever is seen, the scale stays in its bounds and moves by a factor of two per second at most.
    #[test]
    fn the_scale_is_bounded(
        start: u32, percent: u32, per_mille: u32, covered: u64, waits: u64, waited: u64, elapsed: u64,
    ) {
        let reading = Reading::Present { per_mille, covered_ns: covered };
        let observation =
            Observation { reading, launched: true, waits, waited_ns: waited, elapsed_ns: elapsed };
        let steer = Steer::new(start);
        let before = u64::from(steer.scale());
        let after = u64::from(steer.step(percent, &observation).scale());
        prop_assert!((u64::from(MIN_SCALE)..=u64::from(MAX_SCALE)).contains(&after));
        prop_assert!(after <= before * 4 && after + 1 >= before / 4, "{before} -> {after}");
    }

    /// Any samples: no panic, and never more than all the time.
    #[test]
    fn a_meter_takes_anything(samples: Vec<(u32, u64, u32)>, now: u64) {
        let mut meter = Meter::new();
        for (process, at, percent) in samples {
            meter.push(process, at, percent);
        }
        if let Reading::Present { per_mille, .. } = meter.take(now) {
            prop_assert!(per_mille <= 1000);
        }
    }
}
