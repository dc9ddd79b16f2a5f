//! HAMi's rules for tasks that share a card.

#![expect(clippy::unwrap_used, reason = "a test: figures are small, and a failure may panic")]

use mullion_pace::policy::{
    ACTIVE_NS, Activity, Decision, GATED, HEARTBEAT_DEAD_NS, JUST_LAUNCHED, PERIOD_NS, Policy, STAMP_NS,
    Task, UNVOUCHED_GATE_NS, count_down, decide, gate, gate_closed,
};

const MS: u64 = 1_000_000;

fn task(priority: i32, cards: u64, active: bool) -> Task {
    let age_ns = active.then_some(200 * MS);
    Task { priority, cards, activity: Activity::Launched { age_ns }, busy: false, policy: Policy::Default }
}

fn all(tasks: &[Task]) -> Vec<(i32, bool)> {
    (0..tasks.len())
        .map(|i| {
            let Decision { switch, gated } = decide(tasks, i).unwrap();
            (switch, gated)
        })
        .collect()
}

/// MO-10.
#[test]
fn who_is_held_to_its_share_and_who_is_gated() {
    let forced = Task { policy: Policy::Force, ..task(1, 1, true) };
    let free = Task { policy: Policy::Disable, ..task(1, 1, true) };
    for (case, tasks, want) in [
        ("five pods of 10 % on one card", vec![task(1, 1, true); 5], vec![(1, false); 5]),
        ("alone", vec![task(1, 1, true)], vec![(0, false)]),
        ("urgent active, other waits", vec![task(0, 1, true), task(1, 1, true)], vec![(0, false), (1, true)]),
        ("urgent idle", vec![task(0, 1, false), task(1, 1, true)], vec![(0, false), (0, false)]),
        ("urgent on another card", vec![task(0, 2, true), task(1, 1, true)], vec![(0, false), (0, false)]),
        (
            "one of two cards shared",
            vec![task(1, 0b11, true), task(1, 0b10, true)],
            vec![(1, false), (1, false)],
        ),
        (
            "two neighbours on two cards",
            vec![task(1, 0b11, false), task(1, 0b01, true), task(1, 0b10, true)],
            vec![(0, false), (0, false), (0, false)],
        ),
        (
            "idle beside two active ones",
            vec![task(1, 1, false), task(1, 1, true), task(1, 1, true)],
            vec![(1, false); 3],
        ),
        ("force and disable", vec![forced, free], vec![(1, false), (0, false)]),
        (
            "below zero is as urgent as zero",
            vec![task(-5, 1, true), task(0, 1, true)],
            vec![(1, false), (1, false)],
        ),
    ] {
        assert_eq!(all(&tasks), want, "{case}");
    }
    assert_eq!(decide(&[], 0), None);
}

/// MO-10: the gate opens at most two seconds after the urgent task's last launch, with a period of 900 ms.
#[test]
fn the_gate_opens_within_two_seconds() {
    let period = PERIOD_NS;
    // The last launch comes just before it would renew the stamp.
    let stamp = 10_000 * MS;
    let last = stamp + STAMP_NS - MS;
    for phase in 0..9 {
        let mut now = last + phase * 100 * MS;
        let opened = loop {
            let age_ns = Some(now - stamp);
            let urgent = Task { activity: Activity::Launched { age_ns }, ..task(0, 1, true) };
            if !decide(&[urgent, task(1, 1, false)], 1).unwrap().gated {
                break now;
            }
            now += period;
        };
        assert!(opened - last <= 2_000 * MS, "opened after {} ms", (opened - last) / MS);
    }
    // A kernel that runs on keeps it closed.
    let running = Task {
        activity: Activity::Launched { age_ns: Some(10 * ACTIVE_NS) },
        busy: true,
        ..task(0, 1, true)
    };
    assert!(decide(&[running, task(1, 1, false)], 1).unwrap().gated);
}

#[test]
fn the_countdown_and_the_gate() {
    for (value, want) in
        [(2, 1), (1, 0), (0, 0), (GATED, GATED), (100, 1), (i32::MAX, 1), (i32::MIN, i32::MIN)]
    {
        assert_eq!(count_down(value), want, "{value}");
    }
    let counted = |n| Task { activity: Activity::Countdown(n), ..task(0, 1, true) };
    assert_eq!([1, 0, -1].map(|n| counted(n).active()), [true, false, false]);
    for (value, gated, want) in [
        (JUST_LAUNCHED, true, Some(GATED)),
        (0, true, Some(GATED)),
        (GATED, true, None),
        (GATED, false, Some(0)),
        (-9, false, Some(0)),
        (1, false, None),
    ] {
        assert_eq!(gate(value, gated), want, "{value} {gated}");
    }
}

#[test]
fn a_dead_agent_closes_no_gate() {
    for (case, recent, age, waited, want) in [
        ("open", 0, Some(0), 0, false),
        ("closed by a live agent", GATED, Some(MS), 3_600_000 * MS, true),
        ("agent just dead", GATED, Some(HEARTBEAT_DEAD_NS + 1), 0, false),
        ("no page", GATED, None, 0, true),
        ("no page, for long", GATED, None, UNVOUCHED_GATE_NS, false),
        ("a tenant's number", i32::MIN, Some(u64::MAX), 0, false),
    ] {
        assert_eq!(gate_closed(recent, age, waited), want, "{case}");
    }
}

#[test]
fn the_policy_in_any_case_of_letters() {
    for (value, want) in [
        ("FORCE", Policy::Force),
        ("Force", Policy::Force),
        (" force\n", Policy::Force),
        ("dISABLE", Policy::Disable),
        ("default", Policy::Default),
        ("", Policy::Default),
        ("forced", Policy::Default),
    ] {
        assert_eq!(Policy::parse(value.as_bytes()), want, "{value:?}");
    }
    for (policy, switch, want) in [
        (Policy::Default, 0, false),
        (Policy::Default, 1, true),
        (Policy::Force, 0, true),
        (Policy::Disable, 1, false),
    ] {
        assert_eq!(policy.throttles(switch), want);
    }
}
