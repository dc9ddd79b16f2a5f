//! The closed loop in simulated time: the real bucket, costs and steering against a card of known kernels.
//!
//! Every run is decided by its seed. HK-09, MO-10 and the figures of `docs/limits.md` stand here.

#![expect(
    clippy::cast_precision_loss,
    clippy::unwrap_used,
    reason = "a test: figures are small, and a failure may panic"
)]

mod card;
mod neighbours;
mod world;

use mullion_pace::policy::Policy;
use mullion_pace::{AHEAD_NS, Size};
use world::{Container, Habit, MS, Nvml, Outcome, Process, S, Scenario, US, process, run};

/// After this long a container whose launches can be measured is at its share.
const START_UP: u64 = 15 * S;
/// The same where the cost is a guess that is wrong by a factor of 2,000.
const GUESS_START_UP: u64 = 45 * S;
const MEASURE: u64 = 60 * S;

const PLAIN: Nvml =
    Nvml { window: S, late: 0, missing: None, absent: None, newest_only: false, rounds: false };
const SYNC: Habit = Habit::Sync { think: 0 };
const DEEP: Habit = Habit::Deep { depth: 1024 };

fn scenario(containers: Vec<Container>) -> Scenario {
    Scenario {
        seed: 7,
        sms: 132,
        containers,
        nvml: PLAIN,
        events: true,
        policy: Policy::Force,
        agent_dead: 0..0,
        start_up: START_UP,
    }
}

fn tenants(of: &[(u32, Process)]) -> Vec<Container> {
    of.iter().map(|(percent, p)| Container { percent: *percent, processes: vec![*p] }).collect()
}

fn show(name: &str, scenario: &Scenario, outcomes: &[Outcome]) {
    for (c, o) in scenario.containers.iter().zip(outcomes) {
        println!(
            "{name}: limit {} got {:.1} (held {:.1}) start-up excess {:.2} s, starved {} ms, scale {:.2}",
            c.percent,
            o.share,
            o.held,
            o.excess,
            o.starved / MS,
            o.scale
        );
    }
}

/// Runs it; every container is within three points of its share and none is starved.
fn holds(name: &str, scenario: &Scenario) {
    let outcomes = run(scenario, MEASURE);
    show(name, scenario, &outcomes);
    for (c, o) in scenario.containers.iter().zip(&outcomes) {
        let error = (o.share - f64::from(c.percent)).abs();
        assert!(error <= 3.0, "{name}: limit {} got {:.1}", c.percent, o.share);
        assert!(o.excess <= 4.0, "{name}: {:.2} s more than the share in the start-up", o.excess);
        // A kernel is paid for before the next one goes: its length over the share.
        let own = (o.longest_kernel * 100 / u64::from(c.percent)).min(AHEAD_NS);
        assert!(o.starved <= S + own, "{name}: no launch for {} ms", o.starved / MS);
    }
}

/// HK-09: the same share on cards of 20 to 188 SMs.
#[test]
fn a_share_is_the_same_on_every_card() {
    for sms in [20, 80, 132, 188] {
        for percent in [10, 30, 50, 90] {
            let mut s = scenario(tenants(&[(percent, process(DEEP, 500 * US))]));
            s.sms = sms;
            holds(&format!("{sms} SMs, {percent} %"), &s);
        }
    }
}

#[test]
fn kernels_of_any_length_up_to_two_seconds_of_share() {
    for (percent, kernel) in [
        (30, 5 * US),
        (50, 50 * US),
        (10, 5 * MS),
        (30, 20 * MS),
        (50, 100 * MS),
        (10, 150 * MS),
        (30, 500 * MS),
    ] {
        for habit in [SYNC, DEEP] {
            // A launch takes longer than such a kernel: one by one they cannot fill the share.
            if matches!(habit, Habit::Sync { .. }) && kernel < 50 * US {
                continue;
            }
            let depth = if kernel >= 100 * MS { Habit::Deep { depth: 4 } } else { habit };
            let habit = if matches!(habit, Habit::Deep { .. }) { depth } else { habit };
            let s = scenario(tenants(&[(percent, process(habit, kernel))]));
            holds(&format!("{percent} %, kernels of {} us, {habit:?}", kernel / US), &s);
        }
    }
}

/// HK-09: shares on a card that is full.
#[test]
fn two_and_three_tenants_share_a_full_card() {
    let cases: [(&str, &[(u32, Process)]); 6] = [
        ("30/70 deep", &[(30, process(DEEP, 2 * MS)), (70, process(DEEP, 2 * MS))]),
        ("30/70 sync and deep", &[(30, process(SYNC, 5 * MS)), (70, process(DEEP, MS))]),
        ("10/90", &[(10, process(DEEP, MS)), (90, process(DEEP, MS))]),
        ("10/90 sync", &[(10, process(SYNC, 10 * MS)), (90, process(SYNC, 10 * MS))]),
        ("50 alone", &[(50, process(SYNC, 3 * MS))]),
        (
            "33/33/33",
            &[(33, process(DEEP, 3 * MS)), (33, process(SYNC, 8 * MS)), (33, process(DEEP, 200 * US))],
        ),
    ];
    for (name, of) in cases {
        holds(name, &scenario(tenants(of)));
    }
}

#[test]
fn processes_of_one_container_share_its_bucket() {
    let many = |n: usize, percent, p: Process| Container { percent, processes: vec![p; n] };
    holds("8 processes, 10 %, 100 ms", &scenario(vec![many(8, 10, process(SYNC, 100 * MS))]));
    for rounds in [false, true] {
        let mut s = scenario(vec![many(8, 50, process(DEEP, MS))]);
        s.nvml.rounds = rounds;
        holds("8 processes, 50 %, 1 ms", &s);
    }
    holds(
        "4 containers of 2",
        &scenario(vec![
            many(2, 10, process(DEEP, MS)),
            many(2, 20, process(SYNC, 4 * MS)),
            many(2, 30, process(DEEP, 10 * MS)),
            many(2, 40, process(DEEP, 500 * US)),
        ]),
    );
}

/// With short windows the samples of many processes are many: all of them count.
#[test]
fn many_busy_processes_are_seen_and_steered() {
    let tiny = |kernel| Process { size: Size { blocks: 1, threads: 32 }, ..process(SYNC, kernel) };
    for n in [12, 32] {
        let mut s = scenario(vec![
            Container { percent: 30, processes: vec![tiny(20 * MS); n] },
            Container { percent: 70, processes: vec![process(DEEP, MS)] },
        ]);
        s.nvml.window = S / 6;
        s.events = false;
        s.start_up = GUESS_START_UP;
        let outcomes = run(&s, MEASURE);
        show(&format!("{n} processes"), &s, &outcomes);
        for (c, o) in s.containers.iter().zip(&outcomes) {
            let error = (o.share - f64::from(c.percent)).abs();
            assert!(error <= 3.0, "{n} processes: {} got {:.1}", c.percent, o.share);
        }
    }
}

/// A function of which the launches differ by a factor of a hundred: whatever one of them is charged, the scale makes it a share.
#[test]
fn long_and_short_launches_of_one_function_by_turns() {
    let mut load = process(DEEP, 10 * US);
    load.mixed = Some((2, MS));
    let s = scenario(tenants(&[(30, load)]));
    let outcomes = run(&s, MEASURE);
    show("10 us and 1 ms by turns", &s, &outcomes);
    assert!((outcomes[0].share - 30.0).abs() <= 3.0, "{:.1}", outcomes[0].share);
}

#[test]
fn graphs_only() {
    let graph = |nodes, kernel| Process { graph: nodes, ..process(DEEP, kernel) };
    holds("graph of 100 x 20 us, 30 %", &scenario(tenants(&[(30, graph(100, 20 * US))])));
    holds("graph of 1000 x 50 us, 50 %", &scenario(tenants(&[(50, graph(1000, 50 * US))])));
    holds("graphs 30/70", &scenario(tenants(&[(30, graph(100, 20 * US)), (70, graph(300, 20 * US))])));
    // A new one for each step: many could be queued before the first of them has ended.
    for kernel in [2 * MS, 100 * MS, 500 * MS] {
        let load = Process { fresh: true, ..graph(1, kernel) };
        holds(&format!("new graphs of {} ms, 30 %", kernel / MS), &scenario(tenants(&[(30, load)])));
    }
}

/// New ones for each step, short at first: what those took is no measure for the queue that comes.
#[test]
fn new_graphs_that_take_longer_later_get_their_share() {
    for depth in [64, 1024] {
        for dead in [0..0, 0..u64::MAX] {
            let then = Some((5 * S, 500 * MS));
            let load = Process { fresh: true, then, graph: 1, ..process(Habit::Deep { depth }, MS) };
            let mut s = scenario(tenants(&[(30, load)]));
            s.agent_dead = dead;
            holds(&format!("new graphs of 1 ms for 5 s, then of 500 ms, {depth} deep"), &s);
        }
    }
}

#[test]
fn tiny_grids_with_long_kernels() {
    let tiny = |kernel, habit| Process { size: Size { blocks: 1, threads: 32 }, ..process(habit, kernel) };
    holds("1 block, 100 ms, 30 %", &scenario(tenants(&[(30, tiny(100 * MS, SYNC))])));
    holds("1 block, 20 ms, 30/70", &scenario(tenants(&[(30, tiny(20 * MS, DEEP)), (70, process(DEEP, MS))])));
}

#[test]
fn samples_stale_missing_absent_or_short() {
    let load = || tenants(&[(30, process(DEEP, 2 * MS)), (70, process(SYNC, 6 * MS))]);
    let cases = [
        ("windows of 1/6 s", Nvml { window: S / 6, ..PLAIN }),
        ("windows of 1/6 s, the newest of each process", Nvml { window: S / 6, newest_only: true, ..PLAIN }),
        ("up to 9 s late", Nvml { late: 9 * S, ..PLAIN }),
        ("every other call fails", Nvml { missing: Some(2), ..PLAIN }),
        ("one sample in fifty not listed", Nvml { absent: Some(50), window: S / 6, ..PLAIN }),
    ];
    for (name, nvml) in cases {
        let mut s = scenario(load());
        s.nvml = nvml;
        holds(name, &s);
    }
    let mut s = scenario(tenants(&[(30, process(SYNC, 500 * MS))]));
    s.nvml.window = S / 6;
    holds("kernels longer than the window", &s);
}

#[test]
fn a_dead_agent_changes_nothing_and_blocks_nobody() {
    let mut s = scenario(tenants(&[(30, process(DEEP, 2 * MS)), (70, process(SYNC, 6 * MS))]));
    s.agent_dead = 20 * S..50 * S;
    holds("no agent for 30 s", &s);
}

/// A driver that tells the newest window of each process, and a tenant that pauses: its share is the same after a pause as
/// before.
#[test]
fn a_pause_costs_nobody_its_share() {
    for (seed, duty) in [(1, (3, 4)), (2, (7, 9)), (3, (1, 2)), (4, (13, 14))] {
        let pausing = Process { duty, ..process(Habit::Deep { depth: 16 }, MS) };
        let mut s = scenario(tenants(&[(30, pausing)]));
        s.seed = seed;
        s.nvml = Nvml { window: S / 6, newest_only: true, ..PLAIN };
        let outcomes = run(&s, MEASURE);
        show(&format!("at work for {} s of {}", duty.0, duty.1), &s, &outcomes);
        // Its pauses count as time in which it used less than its share.
        let least = 30.0 * duty.0 as f64 / duty.1 as f64;
        assert!((least - 3.0..=33.0).contains(&outcomes[0].share), "{duty:?}: {outcomes:?}");
        assert!((0.6..1.2).contains(&outcomes[0].scale), "{duty:?}: {outcomes:?}");
    }
}

/// Without an agent, or with one that NVML never answers, the measured costs stand alone. On a full card they contain
/// the other tenant's time slices: a container gets less than its share, never more.
#[test]
fn without_an_agent_nobody_gets_more_than_its_share() {
    let mut none = scenario(tenants(&[(30, process(DEEP, 2 * MS)), (70, process(SYNC, 6 * MS))]));
    let mut mute = none.clone();
    none.agent_dead = 0..u64::MAX;
    mute.nvml.missing = Some(1);
    for (name, s) in [("no agent at all", none), ("NVML never answers", mute)] {
        let outcomes = run(&s, MEASURE);
        show(name, &s, &outcomes);
        for (c, o) in s.containers.iter().zip(&outcomes) {
            let limit = f64::from(c.percent);
            assert!(o.share <= limit + 3.0 && o.share >= limit * 0.7, "{name}: {limit} got {:.1}", o.share);
            assert!(o.starved <= S, "{name}: {} ms", o.starved / MS);
        }
    }
    let mut alone = scenario(tenants(&[(30, process(DEEP, 2 * MS))]));
    alone.agent_dead = 0..u64::MAX;
    holds("no agent, alone", &alone);
}

/// A tenant that wants less than its share saves at most the burst, and leaves the scale where it was.
#[test]
fn a_tenant_that_pauses_comes_back_at_its_share() {
    let mut paused = process(DEEP, MS);
    paused.duty = (5, 10);
    let s = scenario(tenants(&[(40, paused)]));
    let outcomes = run(&s, MEASURE);
    show("5 s of 10", &s, &outcomes);
    assert!((outcomes[0].share - 20.0).abs() <= 2.0, "half the time at 40 %: {:.1}", outcomes[0].share);
}

/// Without events the cost is a guess, here too low by a factor of 2,000: the scale finds it, later.
#[test]
fn without_measurements_the_scale_finds_the_cost() {
    let tiny = Process { size: Size { blocks: 1, threads: 32 }, ..process(SYNC, 20 * MS) };
    for (name, load) in [
        ("guess 2,000 x too low", tenants(&[(30, tiny)])),
        ("guess too low, full card", tenants(&[(30, tiny), (70, process(DEEP, MS))])),
    ] {
        let mut s = scenario(load);
        s.events = false;
        s.start_up = GUESS_START_UP;
        let outcomes = run(&s, MEASURE);
        show(name, &s, &outcomes);
        for (c, o) in s.containers.iter().zip(&outcomes) {
            assert!(
                (o.share - f64::from(c.percent)).abs() <= 3.0,
                "{name}: {} got {:.1}",
                c.percent,
                o.share
            );
            assert!(o.excess <= 20.0, "{name}: start-up excess {:.1} s", o.excess);
        }
    }
}

/// What cannot be limited, with its figure; `docs/limits.md` repeats it.
#[test]
fn a_kernel_longer_than_two_seconds_of_share_gets_more() {
    let s = scenario(tenants(&[(10, process(SYNC, 500 * MS))]));
    let outcomes = run(&s, MEASURE);
    show("10 %, kernels of 500 ms", &s, &outcomes);
    // 500 ms in every 2 s: 25 %, whatever the scale.
    assert!((outcomes[0].share - 25.0).abs() <= 3.0, "{:.1}", outcomes[0].share);
}

/// After kernels too long to be limited, short ones are not starved by the scale that tried.
#[test]
fn short_kernels_after_long_ones_get_their_share() {
    let mut load = process(SYNC, 500 * MS);
    load.then = Some((30 * S, MS));
    let mut s = scenario(tenants(&[(10, load)]));
    s.start_up = 45 * S;
    let outcomes = run(&s, MEASURE);
    show("10 %, 500 ms for 30 s, then 1 ms", &s, &outcomes);
    assert!((outcomes[0].share - 10.0).abs() <= 3.0, "{:.1}", outcomes[0].share);
}

/// A function that is short at first and long later, as one whose work depends on its data: with and without an agent, and
/// beside others whose time slices make short kernels look long.
#[test]
fn a_function_that_takes_longer_later_gets_its_share() {
    for (from, to) in [(3 * US, 20 * MS), (3 * US, 500 * US), (MS, 50 * MS), (20 * MS, 10 * US)] {
        for percent in [10, 30] {
            for dead in [0..0, 0..u64::MAX] {
                let mut load = process(Habit::Deep { depth: 16 }, from);
                (load.then, load.same) = (Some((30 * S, to)), true);
                let mut s = scenario(tenants(&[(percent, load)]));
                (s.agent_dead, s.start_up) = (dead, 45 * S);
                holds(&format!("{percent} %, {} us for 30 s, then {} us", from / US, to / US), &s);
            }
        }
    }
    let mut load = process(Habit::Deep { depth: 64 }, 50 * US);
    (load.then, load.same) = (Some((30 * S, 10 * MS)), true);
    let mut s = scenario(tenants(&[(30, load), (70, process(DEEP, MS))]));
    s.start_up = 45 * S;
    holds("30 %, 50 us for 30 s, then 10 ms; full card", &s);
}

/// A function whose launches take very different times, alone and by hand, and on a full card.
#[test]
fn functions_that_vary_get_their_share() {
    for (one_in, short, long) in [
        (2, 500 * US, 5 * MS),
        (4, 100 * US, 5 * MS),
        (4, 10 * US, 10 * MS),
        (10, 100 * US, 2 * MS),
        (10, 100 * US, 20 * MS),
        (10, 50 * US, MS),
    ] {
        let load = |depth| {
            let mut load = process(Habit::Deep { depth }, short);
            load.sometimes = Some((one_in, long));
            load
        };
        let name = format!("one in {one_in}: {} ms instead of {} us", long / MS, short / US);
        // By hand less is better than more: what is long is remembered for longer than what is short.
        for depth in [4, 64, 1024] {
            let mut s = scenario(tenants(&[(30, load(depth))]));
            s.agent_dead = 0..u64::MAX;
            let outcomes = run(&s, MEASURE);
            show(&format!("30 % by hand, {depth} deep, {name}"), &s, &outcomes);
            assert!(
                (23.0..=33.0).contains(&outcomes[0].share) && outcomes[0].starved <= S,
                "{name}: {outcomes:?}"
            );
        }
        holds(&format!("30/70, {name}"), &scenario(tenants(&[(30, load(64)), (70, process(DEEP, MS))])));
    }
}

/// Every so many launches of a function take seven times longer, in a rhythm that the clock may fall in with.
#[test]
fn a_rhythm_makes_no_share_larger() {
    for (short, long) in [(800 * US, 6 * MS), (500 * US, 3_500 * US), (100 * US, 700 * US)] {
        for every in [2, 3, 4, 8] {
            for habit in [SYNC, Habit::Deep { depth: 2 }, Habit::Deep { depth: 8 }] {
                let mut load = process(habit, short);
                load.mixed = Some((every, long));
                let mut s = scenario(tenants(&[(30, load)]));
                s.agent_dead = 0..u64::MAX;
                holds(&format!("one in {every} of {} us, else {} us, {habit:?}", long / US, short / US), &s);
            }
        }
    }
}

/// What cannot be seen: NVML gives whole percent and lists no process below one. The container gets less than a point more
/// for each process, until they are seen.
#[test]
fn many_processes_of_less_than_a_percent_each_get_up_to_a_percent_each() {
    let s = scenario(vec![Container { percent: 5, processes: vec![process(SYNC, 200 * US); 8] }]);
    let outcomes = run(&s, MEASURE);
    show("8 processes, 5 %", &s, &outcomes);
    assert!(outcomes[0].share >= 4.0 && outcomes[0].share <= 13.0, "{:.1}", outcomes[0].share);
}

/// What cannot be limited: a queue built before the first kernel ended.
#[test]
fn a_queue_of_long_kernels_runs_out_first() {
    let s = scenario(tenants(&[(30, process(DEEP, 500 * MS))]));
    let outcomes = run(&s, MEASURE);
    show("30 %, 1024 deep, 500 ms", &s, &outcomes);
    assert!(outcomes[0].excess <= 6.0, "more than ten kernels were queued: {:.2} s", outcomes[0].excess);
}
