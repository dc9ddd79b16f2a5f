//! The table of costs.

use mullion_pace::{
    Correction, Costs, Key, LEAST_NS, Measurement, Progress, Quote, SAMPLE_EVERY, SAMPLE_EVERY_YOUNG, Sample,
    Size, UNKNOWN_NS, guess_ns,
};

const MS: u64 = 1_000_000;
const S: u64 = 1_000_000_000;
const SMALL: Size = Size { blocks: 10, threads: 128 };

fn key(n: u64) -> Key {
    Key::function(0x7000_0000_0000 + n * 64, SMALL)
}

fn mean(costs: &Costs, key: Key) -> Option<u64> {
    costs.known(key).map(|k| k.ns)
}

fn launch(costs: &Costs, key: Key) -> Quote {
    let quote = costs.quote(key, true, || 10_000, || Progress::None);
    costs.book(&quote);
    quote
}

/// What a launch that went for `quote` says when it took `ns`, on a host that was quick.
fn took(costs: &Costs, key: Key, quote: &Quote, ns: u64) -> Correction {
    costs.measured(&Measurement { key, ns, host_ns: 0, paid_ns: quote.ns, sample: quote.sample })
}

fn picked(mut quote: Quote, sample: Sample) -> Quote {
    quote.sample = sample;
    quote
}

/// Launches once, and measures it.
fn measure(costs: &Costs, key: Key, ns: u64) -> Correction {
    let quote = launch(costs, key);
    let sample = if quote.known { Sample::Chance } else { Sample::First };
    took(costs, key, &picked(quote, sample), ns)
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
    let _ = measure(&costs, key(0), 5_000);
    let _ = measure(&costs, large, 9 * MS);
    assert_eq!((mean(&costs, key(0)), mean(&costs, large)), (Some(5_000), Some(9 * MS)));
    assert_eq!(mean(&costs, Key::graph(0x7000_0000_0000)), None);
    costs.forget(large);
    assert_eq!(mean(&costs, large), None);
}

#[test]
fn an_unmeasured_function_gets_dearer_with_every_launch() {
    let costs = Costs::new();
    let mut quotes = Vec::new();
    for n in 0..5 {
        let progress = if n == 0 { Progress::None } else { Progress::Running(0) };
        let quote = costs.quote(key(1), true, || 10_000, || progress);
        // The first, second, third and fifth are measured.
        let sample = if n == 3 { Sample::No } else { Sample::First };
        assert_eq!((quote.ns, quote.sample, quote.known), (UNKNOWN_NS << n, sample, false));
        costs.book(&quote);
        quotes.push(quote);
    }
    // Seen to run for longer than that, or guessed to.
    assert_eq!(costs.quote(key(1), true, || 10_000, || Progress::Running(400 * MS)).ns, 400 * MS);
    assert_eq!(costs.quote(key(1), true, || 700 * MS, || Progress::Running(0)).ns, 700 * MS);
    // The measurement settles all five; the second one of them has nothing to settle any more.
    let charged: u64 = quotes.iter().map(|q| q.ns).sum();
    assert_eq!(took(&costs, key(1), &quotes[0], 5_000), Correction::Refund(charged - 5 * 5_000));
    assert_eq!(took(&costs, key(1), &quotes[1], 9_000), Correction::None);
    assert_eq!(mean(&costs, key(1)), Some(6_000), "a later one counts a quarter");
    assert_eq!(measure(&costs, key(2), 500 * MS), Correction::Charge(500 * MS - UNKNOWN_NS));
}

/// A stream may wait for the program itself, which launches on meanwhile: that must not get dearer and dearer.
#[test]
fn a_measurement_that_waits_in_its_stream_or_fails_does_not_stop_the_others() {
    for (case, progress, want) in
        [("queued", Progress::Queued, UNKNOWN_NS), ("events fail", Progress::None, 10_000)]
    {
        let costs = Costs::new();
        costs.book(&costs.quote(key(1), true, || 10_000, || Progress::None));
        if progress == Progress::None {
            costs.failed(key(1));
        }
        for _ in 0..1000 {
            let quote = costs.quote(key(1), true, || 10_000, || progress);
            assert_eq!(quote.ns, want, "{case}");
            costs.book(&quote);
        }
    }
}

/// A thread may lose its CPU between the event and the launch, or its code may have to be loaded there first.
#[test]
fn what_the_host_may_have_added_is_not_taken_for_the_cards() {
    let costs = Costs::new();
    let quote = launch(&costs, key(1));
    let slow = |quote: &Quote, ns, host_ns| {
        let (paid_ns, sample) = (quote.ns, quote.sample);
        costs.measured(&Measurement { key: key(1), ns, host_ns, paid_ns, sample })
    };
    assert_eq!(slow(&quote, 5 * MS + 20_000, 5 * MS), Correction::Refund(UNKNOWN_NS - 20_000));
    assert_eq!(mean(&costs, key(1)), Some(20_000));
    // More than the host can have added.
    let quote = picked(launch(&costs, key(1)), Sample::Chance);
    assert_eq!(slow(&quote, 200_000, 150_000).charge_ns(), 30_000);
    assert_eq!(mean(&costs, key(1)), Some(27_500));
    // Far above the mean, and nothing but the host's: it says nothing.
    let (quote, before) = (picked(launch(&costs, key(1)), Sample::Chance), mean(&costs, key(1)));
    assert_eq!(slow(&quote, 100 * MS, 101 * MS), Correction::None);
    assert_eq!(mean(&costs, key(1)), before);
}

/// A program whose launches answer only when the kernel has ended, or whose host takes long for each: then the host's time says
/// nothing. Long launches among short ones are such a program too.
#[test]
fn a_host_that_is_always_slow_is_no_excuse() {
    for (case, ns, host_ns, short) in [
        ("blocking", 20 * MS, 21 * MS, 0),
        ("a slow call", 200_000, 150_000, 0),
        ("short and slow", 60_000, 110_000, 0),
        ("by turns", 20 * MS, 21 * MS, 1),
        ("each fourth", 20 * MS, 21 * MS, 3),
    ] {
        let costs = Costs::new();
        let (mut due, mut charged) = (0, 0_u64);
        for n in 0..2_000 {
            let (ns, host_ns) = if n % (short + 1) == 0 { (ns, host_ns) } else { (10_000, 10_000) };
            let quote = launch(&costs, key(1));
            (due, charged) = (due + ns, charged + quote.ns);
            if quote.sample != Sample::No {
                let (paid_ns, sample) = (quote.ns, quote.sample);
                let correction = costs.measured(&Measurement { key: key(1), ns, host_ns, paid_ns, sample });
                charged = charged.saturating_add_signed(correction.charge_ns());
            }
        }
        assert!((due * 5 / 6..=due * 7 / 6).contains(&charged), "{case}: {charged} ns of {due}");
    }
}

/// Where others had the card, or it was not seen that the host was slow.
#[test]
fn a_measurement_that_was_far_too_high_is_soon_forgotten() {
    let costs = Costs::new();
    let first = launch(&costs, key(1));
    assert_eq!(took(&costs, key(1), &first, 300 * MS), Correction::Charge(300 * MS - first.ns));
    let second = launch(&costs, key(1));
    assert_eq!((second.ns, second.sample), (300 * MS, Sample::Chance));
    assert_eq!(took(&costs, key(1), &second, 200_000), Correction::Refund(600 * MS - 400_000));
    assert_eq!(mean(&costs, key(1)), Some(200_000));
    // Later each launch is measured after one, and pays what it takes.
    for _ in 0..8 {
        let _ = measure(&costs, key(1), 200_000);
    }
    let _ = measure(&costs, key(1), 900 * MS);
    let mut charged = 0;
    for _ in 0..60 {
        let quote = launch(&costs, key(1));
        assert_ne!(quote.sample, Sample::No);
        charged += quote.ns;
        charged = charged.saturating_add_signed(took(&costs, key(1), &quote, 200_000).charge_ns());
    }
    assert_eq!(charged, 60 * 200_000);
}

/// A kernel whose work depends on its data: short for long, long from now on.
#[test]
fn a_function_that_takes_longer_now_is_charged_so_at_once() {
    let costs = Costs::new();
    for _ in 0..9 {
        let _ = measure(&costs, key(1), 3_000);
    }
    for _ in 0..10 {
        launch(&costs, key(1));
    }
    let quote = picked(launch(&costs, key(1)), Sample::Close);
    let due = Correction::Launch { paid_ns: 3_000, due_ns: 20 * MS };
    assert_eq!(took(&costs, key(1), &quote, 20 * MS), due);
    // Each of the next is measured; the fourth one tells that it was so for the ten as well.
    let quote = launch(&costs, key(1));
    assert_eq!((quote.ns, quote.sample), (3_000, Sample::Chance));
    let due = Correction::Launch { paid_ns: 3_000, due_ns: 20 * MS };
    assert_eq!(took(&costs, key(1), &quote, 20 * MS), due);
    let quote = launch(&costs, key(1));
    let due = Correction::Launch { paid_ns: quote.ns, due_ns: 20 * MS };
    assert_eq!(took(&costs, key(1), &quote, 20 * MS), due);
    let quote = launch(&costs, key(1));
    let due_ns = 20 * MS + 10 * (20 * MS - 3_000) / 1_000 * 1_000;
    assert_eq!(took(&costs, key(1), &quote, 20 * MS), Correction::Launch { paid_ns: quote.ns, due_ns });
    assert_eq!(mean(&costs, key(1)), Some(20 * MS));
    let quote = launch(&costs, key(1));
    assert_eq!(took(&costs, key(1), &quote, 20 * MS), Correction::None, "charged once");
}

/// Whether launch number so many is a long one.
type Rhythm = Box<dyn FnMut(u64) -> bool>;

/// Whatever launches take, and in whatever rhythm, what was charged is in the end what they took.
#[test]
#[expect(clippy::cast_precision_loss, reason = "figures are small")]
fn functions_that_vary_are_charged_the_mean() {
    let chance = |one_in: u64| {
        let mut state = 88_172_645_463_325_252_u64;
        move |_: u64| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state.is_multiple_of(one_in)
        }
    };
    let cases: Vec<(&str, u64, u64, Rhythm)> = vec![
        ("by turns", 100_000, 700_000, Box::new(|n| n % 2 == 0)),
        ("by turns", 500_000, 5 * MS, Box::new(|n| n % 2 == 0)),
        ("by turns", 10_000, MS, Box::new(|n| n % 2 == 0)),
        ("by turns", 20_000, 20 * MS, Box::new(|n| n % 2 == 0)),
        ("every eighth", 100_000, 5 * MS, Box::new(|n| n % 8 == 0)),
        ("every 32nd", 5_000, MS, Box::new(|n| n % 32 == 0)),
        ("one in 4", 100_000, 5 * MS, Box::new(chance(4))),
        ("one in 10", 100_000, 2 * MS, Box::new(chance(10))),
        ("one in 10", 10_000, 5 * MS, Box::new(chance(10))),
        ("one in 50", 10_000, 5 * MS, Box::new(chance(50))),
        ("a long phase", 10_000, 2 * MS, Box::new(|n| n / 1000 % 10 == 0)),
    ];
    for (case, short, long, mut is_long) in cases {
        let costs = Costs::new();
        let (mut due, mut charged) = (0_u64, 0_u64);
        // Four are on their way at any time.
        let mut queue = std::collections::VecDeque::new();
        for n in 0..200_000 {
            let ns = if is_long(n) { long } else { short };
            let quote = launch(&costs, key(1));
            due += ns;
            charged += quote.ns;
            queue.push_back((quote, ns));
            while queue.len() > 4 {
                let Some((quote, ns)) = queue.pop_front() else { break };
                if quote.sample == Sample::No {
                    continue;
                }
                let correction = took(&costs, key(1), &quote, ns);
                charged = charged.saturating_add_signed(correction.charge_ns());
            }
        }
        let error = charged as f64 / due as f64 - 1.0;
        println!("{case}, {short} and {long}: {:+.1} %", 100.0 * error);
        // One that really changes is followed with some delay, both ways.
        let most = if case == "a long phase" { 0.25 } else { 0.15 };
        assert!(error.abs() < most, "{case}, {short} and {long}: {error}");
    }
}

/// Two events cannot be closer than that with a kernel between them.
#[test]
fn a_measurement_of_nothing_is_believed_when_it_comes_twice() {
    for (case, known) in [("first", None), ("young", Some(5 * MS))] {
        let costs = Costs::new();
        if let Some(ns) = known {
            let _ = measure(&costs, key(1), ns);
        }
        assert_eq!(measure(&costs, key(1), 0), Correction::None, "{case}");
        assert_eq!(mean(&costs, key(1)), known, "{case}");
        assert_ne!(launch(&costs, key(1)).sample, Sample::No, "{case}");
        let _ = measure(&costs, key(1), 5 * MS);
        assert_eq!(mean(&costs, key(1)), Some(5 * MS), "{case}");
        let _ = (measure(&costs, key(1), 0), measure(&costs, key(1), 0));
        assert_eq!(mean(&costs, key(1)), Some(LEAST_NS), "{case}");
    }
}

/// An empty kernel, of which one launch was held up once.
#[test]
fn measurements_of_nothing_do_not_keep_each_launch_measured() {
    let costs = Costs::new();
    for _ in 0..9 {
        let _ = measure(&costs, key(1), 200);
    }
    let _ = measure(&costs, key(1), 60_000);
    let measured = (0..1_000).filter(|_| {
        let quote = launch(&costs, key(1));
        let measured = quote.sample != Sample::No;
        if measured {
            let _ = took(&costs, key(1), &quote, 200);
        }
        measured
    });
    let measured = measured.count();
    assert!(measured <= 100, "{measured}");
}

/// Graphs that are made anew for each step: known by those before them, and charged what they took although they are gone
/// when that is known.
#[test]
fn a_graph_that_is_launched_once_pays_for_itself() {
    let costs = Costs::new();
    for n in 0..10 {
        let graph = Key::graph(0x5000 + 64 * n);
        let quote = costs.quote(graph, true, || MS, || Progress::None);
        assert_eq!(quote.ns, if n == 0 { MS } else { 20 * MS });
        costs.book(&quote);
        costs.forget(graph);
        let correction = took(&costs, Key::FORGOTTEN, &quote, 20 * MS);
        assert_eq!(correction.charge_ns(), if n == 0 { 19 * 1_000_000 } else { 0 });
        assert_eq!(mean(&costs, graph), None, "nothing is left for the next one of that handle");
    }
}

/// A module is unloaded, and the handle of a short function comes again for a long one.
#[test]
fn after_an_unloading_the_next_launches_tell() {
    let costs = Costs::new();
    for _ in 0..9 {
        let _ = measure(&costs, key(1), 3_000);
    }
    while launch(&costs, key(1)).sample != Sample::No {}
    costs.functions_gone();
    for _ in 0..4 {
        let quote = launch(&costs, key(1));
        assert_ne!(quote.sample, Sample::No);
        let _ = took(&costs, key(1), &quote, 20 * MS);
    }
    assert_eq!(mean(&costs, key(1)), Some(20 * MS));
}

/// None of them is ever launched a second time: while nothing is known they get dearer as launches of one function do.
#[test]
fn graphs_get_dearer_until_one_of_them_was_measured() {
    let costs = Costs::new();
    let ask = |n: u32, progress| {
        let graph = Key::graph(0x5000 + 64 * u64::from(n));
        let quote = costs.quote(graph, true, || MS, || progress);
        costs.book(&quote);
        costs.forget(graph);
        quote
    };
    let first = ask(0, Progress::None);
    assert_eq!(ask(1, Progress::Queued).ns, UNKNOWN_NS, "the first one waits in its stream");
    for n in 2..6 {
        assert_eq!(ask(n, Progress::Running(0)).ns, UNKNOWN_NS << n);
    }
    let _ = took(&costs, Key::FORGOTTEN, &first, 20 * MS);
    assert_eq!(ask(6, Progress::Running(0)).ns, 20 * MS);
    assert_eq!(ask(7, Progress::Running(90 * MS)).ns, 90 * MS, "longer than those before it");
}

#[test]
fn graphs_that_the_driver_refuses_make_no_other_dearer() {
    let costs = Costs::new();
    for n in 0..10 {
        let graph = Key::graph(0x5000 + 64 * n);
        let quote = costs.quote(graph, true, || MS, || Progress::None);
        costs.book(&quote);
        costs.refused(graph, quote.ns);
    }
    let ask = || costs.quote(Key::graph(0x9000), true, || MS, || Progress::Running(0)).ns;
    assert_eq!(ask(), UNKNOWN_NS);
    costs.refused(Key::graph(0x9000), UNKNOWN_NS);
    assert_eq!(ask(), UNKNOWN_NS);
}

/// Where many launches are on their way, the picked ones find no place; the mean is of others.
#[test]
fn a_launch_that_finds_no_place_pays_as_the_longest_where_they_differ() {
    for (long, want) in [(20 * MS, Some(20 * MS)), (120_000, None)] {
        let costs = Costs::new();
        for n in 0..40 {
            let _ = measure(&costs, key(1), if n % 10 == 0 { long } else { 100_000 });
        }
        let paid_ns = launch(&costs, key(1)).ns;
        match (costs.missed(key(1), paid_ns), want) {
            (Correction::Launch { due_ns, .. }, Some(want)) => {
                assert!((want * 9 / 10..=want).contains(&due_ns));
            }
            (correction, want) => assert_eq!((correction, want), (Correction::None, None)),
        }
    }
}

#[test]
fn a_launch_that_the_driver_refuses_is_not_settled_with_the_others() {
    let costs = Costs::new();
    let first = launch(&costs, key(1));
    let refused = launch(&costs, key(1));
    costs.refused(key(1), refused.ns);
    assert_eq!(took(&costs, key(1), &first, 5_000), Correction::Refund(first.ns - 5_000));
}

#[test]
fn what_cannot_be_measured_is_charged_by_its_guess() {
    let costs = Costs::new();
    for _ in 0..20 {
        let quote = costs.quote(key(3), false, || 12_345, || Progress::None);
        assert_eq!((quote.ns, quote.sample), (12_345, Sample::No));
        costs.book(&quote);
    }
}

#[test]
fn short_launches_are_measured_seldom_and_long_ones_each() {
    for (cost, times, every) in [
        (5_000, 1, u64::from(SAMPLE_EVERY_YOUNG)),
        (5_000, 8, u64::from(SAMPLE_EVERY)),
        (2 * MS, 8, 16),
        (20 * MS, 8, 1),
    ] {
        let costs = Costs::new();
        for _ in 0..times {
            let _ = measure(&costs, key(4), cost);
        }
        // Whole blocks, of which each has one.
        for _ in times..u64::from(SAMPLE_EVERY) {
            launch(&costs, key(4));
        }
        let samples = (0..2560)
            .filter(|_| {
                let quote = launch(&costs, key(4));
                assert!(quote.known && quote.ns == cost);
                quote.sample != Sample::No
            })
            .count();
        assert_eq!(samples as u64, 2560 / every, "{cost}");
    }
}

/// Keys that are gone, or were launched once, do not keep others out; of those in use there is an end.
#[test]
#[expect(clippy::cast_precision_loss, reason = "figures are small")]
fn a_full_table_has_room_for_what_is_launched_now() {
    let costs = Costs::new();
    for n in 0..5_000 {
        let _ = measure(&costs, key(n), 1_000 + n);
        if n % 2 == 0 {
            costs.forget(key(n));
        }
    }
    // The first launch may find no place yet.
    for n in 6_000..6_100 {
        for _ in 0..10 {
            let _ = measure(&costs, key(n), 1_000 + n);
        }
        assert_eq!(mean(&costs, key(n)), Some(1_000 + n), "{n}");
    }
    // Those that find no place pay their mean.
    let costs = Costs::new();
    let (mut due, mut charged) = (0, 0_u64);
    for _ in 0..40 {
        for n in 0..3_000 {
            let ns = 1_000_000 + 1_000 * n;
            let quote = launch(&costs, key(n));
            due += ns;
            charged += quote.ns;
            if quote.sample != Sample::No {
                charged = charged.saturating_add_signed(took(&costs, key(n), &quote, ns).charge_ns());
            }
        }
    }
    let error = charged as f64 / due as f64 - 1.0;
    assert!(error.abs() < 0.1, "{error}");
}
