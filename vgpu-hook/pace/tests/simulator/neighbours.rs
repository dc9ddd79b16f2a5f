//! In a cluster a container is held to its share only while others are at work: neighbours that come and go.

use mullion_pace::policy::Policy;

use crate::world::{Habit, MS, Outcome, Process, S, process, run};
use crate::{DEEP, SYNC, scenario, show, tenants};

/// One that is always at work and one that comes and goes.
fn visits(habit: Habit, duty: (u64, u64)) -> [Outcome; 2] {
    let guest = Process { duty, ..process(habit, MS) };
    let mut s = scenario(tenants(&[(30, process(habit, MS)), (70, guest)]));
    s.policy = Policy::Default;
    let outcomes = run(&s, 6 * duty.1.max(10) * S);
    show(&format!("neighbour at work for {} s of {}, {habit:?}", duty.0, duty.1), &s, &outcomes);
    outcomes.try_into().unwrap()
}

/// What a container uses while it is alone is no reason to hold it shorter than its share when somebody comes. A visit of a
/// few seconds is too short for the agent to steer by: then the measured costs stand alone, and contain the other's time
/// slices.
#[test]
fn a_neighbour_that_comes_and_goes_leaves_a_container_its_share() {
    for duty in [(1, 1), (15, 30), (5, 10), (3, 6), (3, 10), (2, 10), (2, 5)] {
        for habit in [SYNC, Habit::Deep { depth: 64 }] {
            let [host, guest] = visits(habit, duty);
            let case = format!("{} of {} s, {habit:?}: {host:?} {guest:?}", duty.0, duty.1);
            assert!((host.held - 30.0).abs() <= 3.0, "{case}");
            assert!(guest.held >= 56.0 && guest.held <= 73.0, "{case}");
            assert!((0.4..1.5).contains(&host.scale), "{case}");
        }
    }
}

/// What it queued while it was alone runs out first, here a second of it; that neither ends nor begins what it gets later.
#[test]
fn a_queue_from_before_the_neighbour_came_runs_out_first() {
    for duty in [(15, 30), (5, 10), (3, 6), (3, 10), (2, 10), (2, 5)] {
        let [host, guest] = visits(DEEP, duty);
        let case = format!("{} of {} s: {host:?} {guest:?}", duty.0, duty.1);
        assert!(host.held >= 27.0 && host.held <= 55.0 && guest.held >= 45.0, "{case}");
        assert!((0.1..4.0).contains(&host.scale), "{case}");
    }
}
