//! Measurements: their places, what becomes of those that find none or lose it, and how soon they tell of a change.

use super::*;
use crate::launch::events::Begun;

#[test]
fn contexts_by_turns_do_not_make_events_for_ever() {
    let pacer = pacer(None);
    let (mut first, mut second) = (Fake::new(MS), Fake::new(MS));
    (first.context, second.context) = (1, 2);
    for round in 0..100 {
        // Sixteen of the first are under way, then some of each.
        let (running, order) = (round % 3 != 2, [&mut first, &mut second]);
        for fake in order {
            fake.running = running;
            for _ in 0..16 {
                let (result, _) = pacer.sampler.measure(&measuring(), fake, || CUresult::SUCCESS);
                assert_eq!(result, CUresult::SUCCESS);
            }
            pacer.sampler.poll(fake, |_| {});
        }
    }
    let made = first.created.load(Relaxed) + second.created.load(Relaxed);
    // Until each has as many as the other.
    assert!(made <= 2 * (16 + 8), "{made} events");
}

/// A program that warms up on one card, where nobody asks what became of it, and works on another: what it launches there varies,
/// and who finds no place pays as the longest.
#[test]
fn contexts_come_to_have_as_many_places_as_others() {
    for polled in [false, true] {
        let pacer = pacer(None);
        let fakes: Vec<Fake> =
            (1..=3).map(|context| Fake { context, running: true, ..Fake::new(MS) }).collect();
        let measure = |fake: &Fake| pacer.sampler.measure(&measuring(), fake, || CUresult::SUCCESS).1;
        for (at, want) in [(0, 16), (1, 8), (2, 5)] {
            let begun = (0..20).filter(|_| measure(&fakes[at]) == Begun::Measured).count();
            assert_eq!(begun, want, "{at} {polled}");
            if polled {
                pacer.sampler.poll(&Fake { context: fakes[at].context, ..Fake::new(MS) }, |_| {});
            }
        }
    }
}

/// The same, where it launches one at a time.
#[test]
fn measurements_that_stay_in_one_context_do_not_keep_others_out() {
    let (files, pacer) = (Files::new(30), pacer(None));
    let (mut first, mut second) = (Fake::new(MS), Fake::new(5 * MS));
    (first.context, second.context, first.running) = (1, 2, true);
    for _ in 0..16 {
        let _ = pacer.sampler.measure(&measuring(), &first, || CUresult::SUCCESS);
    }
    for _ in 0..3 {
        // It has not come to the launch by the time that the host is through with it.
        second.running = true;
        let _ = pacer.launch(&files.lane(None), &request(), &second, || CUresult::SUCCESS);
        second.running = false;
        pacer.poll(&files.lane(None), &second);
    }
    assert_eq!(pacer.costs.known(request().key).map(|k| k.ns), Some(5 * MS));
}

/// One of two contexts is destroyed again and again; what is measured in the other one goes on, with the same events.
#[test]
fn the_end_of_a_context_touches_no_measurement_elsewhere() {
    let pacer = pacer(None);
    let (mut stays, mut goes) = (Fake::new(MS), Fake::new(MS));
    (stays.context, goes.context) = (1, 2);
    for _ in 0..100 {
        for fake in [&mut stays, &mut goes] {
            fake.running = true;
            let _ = pacer.sampler.measure(&measuring(), fake, || CUresult::SUCCESS);
        }
        pacer.sampler.hold(2, 0, &goes, |_| {});
        let mut seen = 0;
        goes.running = false;
        pacer.sampler.poll(&goes, |_| seen += 1);
        assert_eq!(seen, 0, "a context that is being destroyed was asked");
        let lost = pacer.sampler.ended(2, 0, true);
        assert!(lost.is_some_and(|lost| lost.card == 0 && lost.paid_ns == MS), "{lost:?}");
        stays.running = false;
        pacer.sampler.poll(&stays, |_| seen += 1);
        assert_eq!(seen, 1);
    }
    assert_eq!((stays.created.load(Relaxed), goes.created.load(Relaxed)), (2, 200));
    // One that was given up by one of several goes on.
    stays.running = true;
    let _ = pacer.sampler.measure(&measuring(), &stays, || CUresult::SUCCESS);
    pacer.sampler.hold(0, 0, &stays, |_| {});
    assert_eq!(pacer.sampler.ended(0, 0, false), None);
    let mut seen = 0;
    stays.running = false;
    pacer.sampler.poll(&stays, |_| seen += 1);
    assert_eq!(seen, 1);
}

/// Threads that launch a function for the first time, beside the first of them, which is still at the driver.
#[test]
fn nobody_passes_by_a_guess_beside_a_first_launch() {
    let (files, pacer) = (Files::new(50), pacer(None));
    let (fake, other) = (Fake::new(500 * MS), Fake::new(500 * MS));
    let lane = files.lane(None);
    let paid = pacer.pay(&lane, &request(), &fake);
    assert!(paid.is_sample());
    let result = pacer.measured(&lane, &request(), paid, &fake, || {
        for _ in 0..63 {
            files.words.tat.store(0, Relaxed);
            assert!(pacer.pay(&lane, &request(), &other).ns() >= MS);
        }
        CUresult::SUCCESS
    });
    assert_eq!(result, CUresult::SUCCESS);
}

/// A context all of whose places are in use, for another one was first.
#[test]
fn nobody_passes_by_a_guess_for_want_of_a_place() {
    let (files, pacer) = (Files::new(50), pacer(None));
    let (mut first, mut second) = (Fake::new(MS), Fake::new(500 * MS));
    (first.context, second.context, first.running, second.running) = (1, 2, true, true);
    for _ in 0..16 {
        let _ = pacer.sampler.measure(&measuring(), &first, || CUresult::SUCCESS);
    }
    let lane = files.lane(None);
    let _ = pacer.launch(&lane, &request(), &second, || CUresult::SUCCESS);
    first.running = false;
    pacer.sampler.poll(&first, |_| {});
    let other = Request { key: Key::function(0x2000, Size { blocks: 4, threads: 32 }), ..request() };
    for _ in 0..40 {
        files.words.tat.store(0, Relaxed);
        let paid = pacer.pay(&lane, &other, &second);
        assert!(paid.ns() >= MS);
        if paid.is_sample() {
            let _ = pacer.measured(&lane, &other, paid, &second, || CUresult::SUCCESS);
        }
    }
}

/// What was measured of a context that ends is entered, and what was on its way is charged for the time until its end.
#[test]
fn launches_in_a_context_that_ends_are_paid() {
    let (files, pacer, mut fake) = (Files::new(50), pacer(None), Fake::new(5 * MS));
    let lane = files.lane(None);
    let spent = || files.words.tat.load(Relaxed);
    let launch = |fake: &Fake| {
        files.words.tat.store(clock::coarse_ns(), Relaxed);
        let _ = pacer.launch(&lane, &request(), fake, || CUresult::SUCCESS);
    };
    fake.running = true;
    launch(&fake);
    fake.running = false;
    let elsewhere = Fake { context: 1, ..Fake::new(5 * MS) };
    pacer.sampler.hold(7, 0, &elsewhere, |ended| pacer.enter(&lane, &ended));
    assert_eq!(pacer.sampler.ended(7, 0, true), None);
    assert!(pacer.costs.known(request().key).is_some());

    pacer.costs.forget(request().key);
    fake.running = true;
    launch(&fake);
    let before = spent();
    thread::sleep(Duration::from_millis(20));
    for (gone, least) in [(false, 0), (true, 38 * MS)] {
        pacer.sampler.hold(7, 0, &fake, |_| panic!("it runs"));
        if let Some(lost) = pacer.sampler.ended(7, 0, gone) {
            pacer.lost(&lane, &lost);
        }
        let charged = spent() - before;
        assert!(charged >= least && (gone || charged == 0), "{charged}");
    }
}

/// As of green contexts, of which a card can have more than there are places.
#[test]
fn events_of_contexts_that_lose_their_places_are_destroyed() {
    let pacer = pacer(None);
    let fakes: Vec<Fake> = (1..=17).map(|context| Fake { context, ..Fake::new(MS) }).collect();
    for round in 0..100 {
        for fake in &fakes {
            let (result, _) = pacer.sampler.measure(&measuring(), fake, || CUresult::SUCCESS);
            assert!(result.is_ok());
            // Some are still under way when they lose it.
            if round % 2 == 0 {
                pacer.sampler.poll(fake, |_| {});
            }
        }
    }
    let sum =
        |count: fn(&Fake) -> &AtomicU32| fakes.iter().map(|fake| count(fake).load(Relaxed)).sum::<u32>();
    let (made, gone) = (sum(|fake| &fake.created), sum(|fake| &fake.destroyed));
    assert!(gone > 32 && made - gone <= 32, "{made} events made, {gone} destroyed");
}

#[test]
fn who_ends_a_context_waits_for_those_who_destroy_events_in_it() {
    static DESTROYING: AtomicBool = AtomicBool::new(false);
    let pacer: &'static Pacer = Box::leak(pacer(None));
    for context in 1..=16 {
        let fake = Fake { context, ..Fake::new(MS) };
        let _ = pacer.sampler.measure(&measuring(), &fake, || CUresult::SUCCESS);
    }
    thread::scope(|scope| {
        scope.spawn(|| {
            let fake = Fake { context: 17, destroying: Some(&DESTROYING), ..Fake::new(MS) };
            let _ = pacer.sampler.measure(&measuring(), &fake, || CUresult::SUCCESS);
        });
        while !DESTROYING.load(Relaxed) {
            thread::yield_now();
        }
        let fake = Fake::new(MS);
        for context in 1..=16 {
            pacer.sampler.hold(context, 0, &fake, |_| {});
        }
        assert!(!DESTROYING.load(Relaxed));
    });
}

/// A kernel faulted, and every event of its context fails from then on, until the context is ended.
#[test]
fn a_context_that_ends_after_a_fault_takes_no_place_with_it() {
    let (pacer, mut fake) = (pacer(None), Fake { running: true, ..Fake::new(MS) });
    for _ in 0..16 {
        let _ = pacer.sampler.measure(&measuring(), &fake, || CUresult::SUCCESS);
    }
    fake.failing = true;
    pacer.sampler.hold(7, 0, &fake, |ended| assert!(ended.found.is_err()));
    assert_eq!(pacer.sampler.ended(7, 0, true), None);
    fake.failing = false;
    for _ in 0..16 {
        let (_, begun) = pacer.sampler.measure(&measuring(), &fake, || CUresult::SUCCESS);
        assert_eq!(begun, Begun::Measured);
    }
}

/// New ones for each step: the one before, gone or not, tells how long they are now, whatever was measured of others long ago.
#[test]
fn a_new_graph_is_told_by_those_that_are_measured_first() {
    let first = |sample| Measuring { key: Key::graph(0x5000), sample, ..measuring() };
    for (sample, want) in [(Sample::First, Progress::Queued), (Sample::Chance, Progress::None)] {
        let (pacer, fake) = (pacer(None), Fake { running: true, ..Fake::new(MS) });
        let _ = pacer.sampler.measure(&first(sample), &fake, || CUresult::SUCCESS);
        assert_eq!(pacer.sampler.progress(request().key, 0, &fake), Progress::None);
        assert_eq!(pacer.sampler.progress(Key::graph(0x5040), 0, &fake), want);
        pacer.forget(Key::graph(0x5000));
        assert_eq!(pacer.sampler.progress(Key::graph(0x5040), 0, &fake), want);
    }
}

/// A module is unloaded, which takes a while, beside threads that launch.
#[test]
fn looks_that_an_unloading_calls_for_are_not_used_up_before_its_end() {
    let costs = &crate::launch::PACER.costs;
    let key = Key::function(0xf000, Size { blocks: 4, threads: 32 });
    let launch = || {
        let quote = costs.quote(key, true, || 3_000, || Progress::None);
        costs.book(&quote);
        if quote.sample != Sample::No {
            let (ns, paid_ns, sample) = (3_000, quote.ns, quote.sample);
            let _ = costs.measured(&Measurement { key, ns, host_ns: 0, paid_ns, sample });
        }
        quote.sample
    };
    // Past those of which more are measured.
    while (0..100).any(|_| launch() != Sample::No) {}
    let result = crate::launch::unloading(|| {
        (0..10).for_each(|_| _ = launch());
        CUresult::SUCCESS
    });
    assert_eq!(result, CUresult::SUCCESS);
    assert!((0..4).all(|_| launch() != Sample::No));
}

/// It says nothing of those that go.
#[test]
fn a_launch_that_the_driver_refuses_is_not_one_that_could_not_be_measured() {
    for context in [0, 7] {
        let (pacer, fake) = (pacer(None), Fake { context, ..Fake::new(MS) });
        let (result, begun) = pacer.sampler.measure(&measuring(), &fake, || CUresult::NOT_FOUND);
        assert_eq!((result, begun), (CUresult::NOT_FOUND, Begun::Refused));
    }
    let (pacer, fake) = (pacer(None), Fake::default());
    let (_, begun) = pacer.sampler.measure(&measuring(), &fake, || CUresult::SUCCESS);
    assert_eq!(begun, Begun::Failed);
}

/// A function that took 3 us, launched in batches with pauses, as fast as those allow: the word lags behind then, and nobody
/// would look at the clock.
#[test]
fn a_function_that_takes_longer_now_is_found_out_within_two_rounds_of_stamps() {
    for before in [2_000, 2_040, 2_090] {
        let (files, pacer, mut fake) = (Files::new(30), pacer(None), Fake::new(3_000));
        let lane = files.lane(None);
        let launch = |fake: &Fake, count: u32| {
            for _ in 0..count {
                let _ = pacer.launch(&lane, &request(), fake, || CUresult::SUCCESS);
            }
            pacer.poll(&lane, fake);
        };
        (0..before / 16).for_each(|_| launch(&fake, 16));
        fake.elapsed = 10 * MS;
        let mut launches = 0;
        while pacer.costs.known(request().key).is_none_or(|k| k.ns < 9 * MS) {
            thread::sleep(Duration::from_millis(20));
            launch(&fake, 16);
            launches += 16;
        }
        assert!(launches <= 2 * STAMP_EVERY, "{before}: {launches}");
    }
}

/// As a step of a program with one long function among many: whichever launch of it that is, it comes to be the one that looks at
/// the clock.
#[test]
fn a_function_that_takes_longer_now_is_found_out_wherever_in_a_step_it_is() {
    let other = Request { key: Key::function(0x2000, Size { blocks: 4, threads: 32 }), ..request() };
    for (step, at) in [(64, 0), (64, 37), (32, 30), (48, 17)] {
        let (files, pacer, mut fake) = (Files::new(90), pacer(None), Fake::new(3_000));
        let lane = files.lane(None);
        let run = |fake: &mut Fake, ns| {
            for number in 0..step {
                let (which, elapsed) = if number == at { (&other, ns) } else { (&request(), 3_000) };
                // What is under way is entered before the other one takes its time.
                pacer.poll(&lane, fake);
                fake.elapsed = elapsed;
                let _ = pacer.launch(&lane, which, fake, || CUresult::SUCCESS);
            }
            pacer.poll(&lane, fake);
        };
        for _ in 0..700 {
            run(&mut fake, 3_000);
        }
        let mut steps = 0;
        while pacer.costs.known(other.key).is_none_or(|k| k.ns < 9 * MS) {
            // Three ticks of the coarse clock: it is time for a measurement.
            thread::sleep(Duration::from_millis(13));
            run(&mut fake, 10 * MS);
            steps += 1;
            // Sooner than by the one launch in 256 that is measured anyhow.
            assert!(steps < 100, "the {at}th of {step}");
        }
    }
}
