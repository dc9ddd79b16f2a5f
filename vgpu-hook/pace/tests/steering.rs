//! NVML's samples and single steps of the loop.

use mullion_pace::{MAX_SCALE, MIN_SCALE, Meter, Observation, Reading, SCALE_ONE, Steer};
use proptest::prelude::*;

const MS: u64 = 1_000_000;
const S: u64 = 1_000_000_000;

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
        let after = Steer::default().spent(S).step(30, &observed).scale();
        assert_eq!(i32::from(after > SCALE_ONE) - i32::from(after < SCALE_ONE), want, "{case}");
        // 0 and 100 are no limit: nothing to steer.
        for percent in [0, 100] {
            assert_eq!(Steer::default().spent(S).step(percent, &observed).scale(), SCALE_ONE, "{case}");
        }
    }
    assert_eq!(Steer::new(0).scale(), MIN_SCALE);
}

/// Processes of so few launches that their charges are never told: a higher scale would not hold them, and starve the usual
/// program that comes next.
#[test]
fn nothing_is_raised_where_nothing_was_charged() {
    let all = seen(present(1000), true, 1);
    let after = |from: u32| (0..30).fold(Steer::new(from), |steer, _| steer.step(10, &all)).scale();
    assert_eq!([SCALE_ONE / 8, SCALE_ONE, 3 * SCALE_ONE].map(after), [SCALE_ONE, SCALE_ONE, 3 * SCALE_ONE]);
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
    for (at, percent) in [(1000, 100), (1500, 0), (2000, 100), (3000, 100), (4000, 100)] {
        for _ in 0..2 {
            meter.push(1, T + at * MS, percent);
        }
    }
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

#[test]
fn a_clock_that_is_set_back_is_no_end_of_readings() {
    let mut meter = Meter::new();
    let first = |meter: &mut Meter, from: u64, held: bool| {
        (0..20_u64).find(|second| {
            let now = from + second * S;
            meter.push(1, now, 60);
            let reading = meter.take(now + 10 * MS);
            meter.held(held, now + 10 * MS);
            matches!(reading, Reading::Present { .. })
        })
    };
    for held in [false, true] {
        for hours in [9, 8, 5] {
            let seconds = first(&mut meter, hours * 3600 * S, held);
            assert!(seconds.is_some_and(|seconds| seconds <= 5), "{held} {hours}: {seconds:?}");
        }
    }
}

/// A driver that lists the newest window of each process only, asked every 0.9 s about one that pauses before it was asked: how
/// long a window is is not the time between two answers.
#[test]
fn a_pause_makes_no_window_shorter() {
    let mut meter = Meter::new();
    let mut asked = 1_000 * S;
    let mut read = Vec::new();
    for look in 0..60_u64 {
        asked += 900 * MS;
        // In the first half of its time it pauses at times: its last window ended shortly after the answer before.
        let pauses = look < 30 && look % 3 == 2;
        meter.push(1, if pauses { asked - 700 * MS } else { asked - 10 * MS }, 30);
        if let Reading::Present { per_mille, .. } = meter.take(asked)
            && look > 34
        {
            read.push(per_mille);
        }
    }
    assert!(read.len() > 5 && read.iter().all(|r| (285..=315).contains(r)), "{read:?}");
}

proptest! {
    /// Whatever is seen, the scale stays in its bounds and moves by a factor of two per second at most.
    #[test]
    fn the_scale_is_bounded(
        start: u32, percent: u32, per_mille: u32, covered: u64, waits: u64, waited: u64, elapsed: u64, spent: u64,
    ) {
        let reading = Reading::Present { per_mille, covered_ns: covered };
        let observation =
            Observation { reading, launched: true, waits, waited_ns: waited, elapsed_ns: elapsed };
        let steer = Steer::new(start).spent(spent);
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
