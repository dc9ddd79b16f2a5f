#![expect(unsafe_code, reason = "calls wrappers with a fake driver function")]

use core::cell::RefCell;
use core::ffi::c_void;
use core::ptr::null_mut;
use core::sync::atomic::Ordering::Relaxed;
use core::sync::atomic::{AtomicBool, AtomicU32};
use std::boxed::Box;
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};
use std::vec::Vec;

use mullion_pace::policy::{GATED, JUST_LAUNCHED, PERIOD_NS, Policy, UNVOUCHED_GATE_NS};
use mullion_pace::{Key, Measurement, Progress, SCALE_ONE, Sample, Size};

use super::Lane;
use super::capture::Capture;
use super::events::{Events, Handle, Measuring, Query};
use super::lane::{Calm, is_gated};
use super::pacer::{Pacer, Request, STAMP_EVERY};
use crate::container::{CardWords, HamiTail, Page, PageCard};
use crate::cuda::{CUenum, CUresult};
use crate::sys::{clock, futex_wake};

mod measuring;

const MS: u64 = 1_000_000;

/// The files of a container with one card.
struct Files {
    page: Page,
    words: CardWords,
    tail: HamiTail,
}

impl Files {
    /// `percent` 0 is no limit.
    fn new(percent: u64) -> Box<Self> {
        // SAFETY: words and bytes, for all of which zero is a value.
        let files: Box<Self> = unsafe { Box::new_zeroed().assume_init() };
        let card = &files.page.cards[0];
        card.rate.store(percent * 10_000_000, Relaxed);
        card.scale.store(SCALE_ONE, Relaxed);
        card.burst.store(50 * MS, Relaxed);
        files.page.heartbeat.store(clock::monotonic_ns(), Relaxed);
        files.tail.utilization_switch.store(1, Relaxed);
        files.words.tat.store(clock::coarse_ns(), Relaxed);
        files
    }

    fn lane(&self, by_hand: Option<Policy>) -> Given<'_> {
        Given { files: self, by_hand, gate_ns: None }
    }
}

/// With a policy where the limits are given by hand.
#[derive(Clone, Copy)]
struct Given<'a> {
    files: &'a Files,
    by_hand: Option<Policy>,
    /// A gate is believed for so long.
    gate_ns: Option<u64>,
}

impl Lane for Given<'_> {
    fn index(&self) -> usize {
        0
    }
    fn page(&self) -> &Page {
        &self.files.page
    }
    fn card(&self) -> &PageCard {
        &self.files.page.cards[0]
    }
    fn words(&self) -> &CardWords {
        &self.files.words
    }
    fn tail(&self) -> &HamiTail {
        &self.files.tail
    }
    fn by_hand(&self) -> bool {
        self.by_hand.is_some()
    }
    fn policy(&self) -> Policy {
        self.by_hand.unwrap_or_default()
    }
    fn is_gated(&self, now_ns: u64, waited_ns: u64) -> bool {
        let stale = self.gate_ns.map(|ns| waited_ns * UNVOUCHED_GATE_NS / ns);
        is_gated(self, now_ns, stale.unwrap_or(waited_ns))
    }
}

/// A driver whose kernels have run when they are asked for.
#[derive(Default)]
struct Fake {
    log: RefCell<Vec<&'static str>>,
    elapsed: u64,
    running: bool,
    captured: bool,
    /// Whatever is asked of an event, as after a kernel that faulted.
    failing: bool,
    context: Handle,
    mode: AtomicU32,
    created: AtomicU32,
    destroyed: AtomicU32,
    /// Set while an event is destroyed, for some time.
    destroying: Option<&'static AtomicBool>,
}

impl Fake {
    fn new(elapsed: u64) -> Self {
        Self { elapsed, context: 7, ..Self::default() }
    }

    fn say(&self, what: &'static str) {
        assert!(what == "call" || self.mode.load(Relaxed) == 2, "{what} outside of relaxed mode");
        self.log.borrow_mut().push(what);
    }
}

impl Events for Fake {
    fn usable(&self) -> bool {
        true
    }
    fn context(&self) -> Handle {
        self.context
    }
    fn create(&self) -> Option<Handle> {
        self.say("create");
        Some(self.created.fetch_add(1, Relaxed) as Handle + 100)
    }
    fn destroy(&self, _: Handle, context: Handle) {
        assert!(context != 0 && context != self.context);
        self.say("destroy");
        self.destroyed.fetch_add(1, Relaxed);
        if let Some(destroying) = self.destroying {
            destroying.store(true, Relaxed);
            thread::sleep(Duration::from_millis(50));
            destroying.store(false, Relaxed);
        }
    }
    fn record(&self, _: Handle, stream: Handle) -> bool {
        assert_eq!(stream, 1);
        self.say("record");
        true
    }
    fn query(&self, _: Handle) -> Query {
        self.say("query");
        match (self.failing, self.running) {
            (true, _) => Query::Failed,
            (false, true) => Query::NotYet,
            (false, false) => Query::Done,
        }
    }
    fn elapsed_ns(&self, start: Handle, stop: Handle) -> Option<u64> {
        assert_eq!(start + 1, stop);
        Some(self.elapsed)
    }
    fn exchange_mode(&self, mode: CUenum) -> CUenum {
        self.mode.swap(mode, Relaxed)
    }
    fn capturing(&self, _: Handle) -> bool {
        self.captured
    }
    fn resident_threads(&self) -> Option<u64> {
        Some(132 * 2048)
    }
}

fn request() -> Request {
    let size = Size { blocks: 4, threads: 32 };
    Request { key: Key::function(0x1000, size), size: Some(size), stream: 1 }
}

fn measuring() -> Measuring {
    Measuring { card: 0, key: request().key, stream: 1, paid_ns: MS, sample: Sample::Chance }
}

fn pacer(known_ns: Option<u64>) -> Box<Pacer> {
    let pacer = Box::new(Pacer::new());
    if let Some(ns) = known_ns {
        let quote = pacer.costs.quote(request().key, true, || ns, || Progress::None);
        pacer.costs.book(&quote);
        let measurement =
            Measurement { key: request().key, ns, host_ns: 0, paid_ns: quote.ns, sample: quote.sample };
        let _ = pacer.costs.measured(&measurement);
        assert_eq!(pacer.costs.known(request().key).map(|k| k.ns), Some(ns));
    }
    pacer
}

#[test]
fn without_a_limit_a_launch_leaves_its_stamps_and_nothing_else() {
    let (files, pacer, fake) = (Files::new(0), pacer(None), Fake::new(0));
    let tat = files.words.tat.load(Relaxed);
    for _ in 0..3 {
        assert_eq!(
            pacer.launch(&files.lane(None), &request(), &fake, || CUresult::SUCCESS),
            CUresult::SUCCESS
        );
    }
    let first = files.words.first_launch.load(Relaxed);
    assert!(first > 0 && files.words.last_launch.load(Relaxed) >= first);
    assert_eq!(
        files.tail.last_kernel_time.load(Relaxed),
        files.words.last_launch.load(Relaxed) / 1_000_000_000
    );
    // MO-10: priority works without an SM limit, so such a container is seen as active too.
    assert_eq!(files.tail.recent_kernel.load(Relaxed), JUST_LAUNCHED);
    assert_eq!((files.words.tat.load(Relaxed), files.words.waits.load(Relaxed)), (tat, 0));
    assert!(fake.log.borrow().is_empty());
    // At each look of the agent there is a new stamp: who goes on launching is never taken for idle.
    let before = clock::realtime_ns() - PERIOD_NS;
    files.words.last_launch.store(before, Relaxed);
    files.page.heartbeat.fetch_add(PERIOD_NS, Relaxed);
    let _ = pacer.launch(&files.lane(None), &request(), &fake, || CUresult::SUCCESS);
    assert!(files.words.last_launch.load(Relaxed) >= before + PERIOD_NS);
    // HAMi's monitor counts down, the next launch puts it up again.
    files.tail.recent_kernel.store(1, Relaxed);
    let _ = pacer.launch(&files.lane(None), &request(), &fake, || CUresult::SUCCESS);
    assert_eq!(files.tail.recent_kernel.load(Relaxed), JUST_LAUNCHED);
}

#[test]
fn without_a_share_on_any_card_the_card_is_only_asked_for_where_a_stamp_is_due() {
    let (files, calm) = (Files::new(0), Calm::new());
    let launch = || {
        let passes = calm.lets_pass(&files.page, &files.tail);
        if !passes {
            // As the launch's stamp does.
            let due = calm.look(files.page.heartbeat.load(Relaxed));
            files.tail.recent_kernel.store(JUST_LAUNCHED, Relaxed);
            return Some(due);
        }
        None
    };
    let looks = |count: usize| (0..count).filter_map(|_| launch()).collect::<Vec<_>>();
    // The agent's heartbeat moved: cards in turns are all seen, then nearly all launches pass.
    assert_eq!(looks(32), [false; 32]);
    assert_eq!(looks(610), [true; 10]);
    // A heartbeat is seen at once, and so is a gate or HAMi's countdown.
    files.page.heartbeat.fetch_add(1, Relaxed);
    assert_eq!(looks(33), [[false; 32].as_slice(), &[true]].concat());
    assert_eq!(launch(), None);
    files.tail.recent_kernel.store(GATED, Relaxed);
    assert_eq!(launch(), Some(true));
    // Of cards by turns each gets stamps.
    for cards in 2..=9 {
        let mut seen: Vec<usize> = (0..1000).filter(|_| launch().is_some()).map(|at| at % cards).collect();
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), cards, "{seen:?}");
    }
}

#[test]
fn with_a_limit_launches_wait_for_their_share() {
    let (files, pacer, fake) = (Files::new(50), pacer(Some(10 * MS)), Fake::new(10 * MS));
    // An agent that died long ago changes nothing.
    files.page.heartbeat.store(1, Relaxed);
    let begin = Instant::now();
    for _ in 0..8 {
        let _ = pacer.launch(&files.lane(None), &request(), &fake, || CUresult::SUCCESS);
    }
    let (took, waits) = (begin.elapsed(), files.words.waits.load(Relaxed));
    // The first goes at once, each of the others 20 ms after the one before it.
    assert!(took >= Duration::from_millis(120) && took < Duration::from_secs(2), "{took:?}");
    assert!((5..=7).contains(&waits), "{waits}");
    assert!(files.words.wait_ns.load(Relaxed) >= 100 * MS);
}

#[test]
fn a_launch_that_fails_is_given_back() {
    let (files, pacer, fake) = (Files::new(10), pacer(Some(100 * MS)), Fake::new(0));
    for _ in 0..20 {
        let result = pacer.launch(&files.lane(None), &request(), &fake, || CUresult::NOT_FOUND);
        assert_eq!(result, CUresult::NOT_FOUND);
    }
    assert_eq!(files.words.waits.load(Relaxed), 0);
}

#[test]
fn the_first_launch_is_measured_and_settles_what_was_charged() {
    let (files, pacer, mut fake) = (Files::new(50), pacer(None), Fake::new(5_000));
    fake.running = true;
    let lane = files.lane(None);
    let call = |fake: &Fake| {
        let _ = pacer.launch(&lane, &request(), fake, || {
            fake.say("call");
            CUresult::SUCCESS
        });
    };
    call(&fake);
    assert_eq!(*fake.log.borrow(), ["create", "create", "record", "call", "query", "record"]);
    assert!(pacer.sampler.flying(7) && pacer.costs.known(request().key).is_none());
    let charged = files.words.tat.load(Relaxed);
    fake.running = false;
    call(&fake);
    assert_eq!(pacer.costs.known(request().key).map(|k| k.ns), Some(5_000));
    // 5 us instead of a millisecond at 50 %.
    assert!(files.words.tat.load(Relaxed) < charged, "nothing was given back");
    // The events stay for the next measurement.
    for _ in 0..70 {
        call(&fake);
    }
    assert_eq!(fake.created.load(Relaxed), 2);
    // Until their context goes.
    pacer.sampler.hold(7, 0, &fake, |_| {});
    assert_eq!(pacer.sampler.ended(7, 0, true), None);
    for _ in 0..130 {
        call(&fake);
    }
    assert_eq!(fake.created.load(Relaxed), 4);
}

#[test]
fn a_captured_launch_is_neither_charged_nor_measured() {
    let (files, pacer, mut fake) = (Files::new(10), pacer(None), Fake::new(0));
    pacer.captures.add(Capture { stream: 9, context: 7, device: 0, graphics: false });
    fake.captured = true;
    let tat = files.words.tat.load(Relaxed);
    for _ in 0..100 {
        let _ = pacer.launch(&files.lane(None), &request(), &fake, || CUresult::SUCCESS);
    }
    assert_eq!(files.words.tat.load(Relaxed), tat);
    assert!(fake.log.borrow().is_empty());
    // A launch into another stream meanwhile is charged and measured: a capture may last as long as its program likes.
    fake.captured = false;
    let _ = pacer.launch(&files.lane(None), &request(), &fake, || CUresult::SUCCESS);
    assert!(files.words.tat.load(Relaxed) > tat && pacer.sampler.flying(7));
}

#[test]
fn a_stream_that_is_captured_while_its_launch_waits_gets_no_event() {
    let (files, pacer, mut fake) = (Files::new(50), pacer(None), Fake::new(0));
    let lane = files.lane(None);
    assert!(pacer.has_to_pay(&lane, || 1, &fake));
    let paid = pacer.pay(&lane, &request(), &fake);
    assert!(paid.is_sample());
    pacer.captures.add(Capture { stream: 1, context: 7, device: 0, graphics: false });
    fake.captured = true;
    let _ = pacer.measured(&lane, &request(), paid, &fake, || CUresult::SUCCESS);
    assert!(fake.log.borrow().is_empty() && !pacer.sampler.flying(7));
}

/// Launches on another thread while `change` is made; how long it took.
fn meanwhile(
    files: &'static Files,
    pacer: &'static Pacer,
    by_hand: Option<Policy>,
    after_ms: u64,
    change: impl FnOnce(),
) -> Duration {
    let done = Mutex::new(None);
    let begin = Instant::now();
    thread::scope(|scope| {
        scope.spawn(|| {
            let fake = Fake::new(0);
            let _ = pacer.launch(&files.lane(by_hand), &request(), &fake, || CUresult::SUCCESS);
            *done.lock().unwrap() = Some(begin.elapsed());
        });
        thread::sleep(Duration::from_millis(after_ms));
        change();
        files.page.futex.fetch_add(1, Relaxed);
        futex_wake(files.page.futex.as_ptr());
    });
    done.into_inner().unwrap().unwrap()
}

#[test]
fn the_gate_holds_a_launch_until_it_is_opened() {
    let (files, pacer): (&'static Files, &'static Pacer) = (Box::leak(Files::new(0)), Box::leak(pacer(None)));
    for by_hand in [None, Some(Policy::Default)] {
        files.page.heartbeat.store(clock::monotonic_ns(), Relaxed);
        files.tail.recent_kernel.store(GATED, Relaxed);
        let took = meanwhile(files, pacer, by_hand, 150, || files.tail.recent_kernel.store(0, Relaxed));
        assert!(took >= Duration::from_millis(150) && took < Duration::from_millis(400), "{took:?}");
        assert_eq!(files.tail.recent_kernel.load(Relaxed), JUST_LAUNCHED);
        // It is not a share held too tight.
        assert_eq!(files.words.waits.load(Relaxed), 0);
    }
}

#[test]
fn a_dead_agent_blocks_nobody_at_the_gate() {
    for heartbeat in [0, clock::monotonic_ns().saturating_sub(4_000 * MS).max(1)] {
        let (files, pacer, fake) = (Files::new(0), pacer(None), Fake::new(0));
        files.page.heartbeat.store(heartbeat, Relaxed);
        files.tail.recent_kernel.store(GATED, Relaxed);
        let begin = Instant::now();
        let _ = pacer.launch(&files.lane(None), &request(), &fake, || CUresult::SUCCESS);
        assert!(begin.elapsed() < Duration::from_millis(100), "{heartbeat}: {:?}", begin.elapsed());
    }
}

#[test]
fn a_lifted_limit_frees_a_waiting_launch_at_once() {
    let files: &'static Files = Box::leak(Files::new(1));
    let pacer: &'static Pacer = Box::leak(pacer(Some(1_000 * MS)));
    files.words.tat.store(clock::coarse_ns() + 1_900 * MS, Relaxed);
    let took = meanwhile(files, pacer, None, 100, || files.page.cards[0].rate.store(0, Relaxed));
    assert!(took >= Duration::from_millis(90) && took < Duration::from_millis(300), "{took:?}");
}

#[test]
fn a_tenants_word_holds_it_for_two_seconds_at_most() {
    let (files, pacer, fake) = (Files::new(50), pacer(Some(1_000)), Fake::new(0));
    files.words.tat.store(u64::MAX, Relaxed);
    let begin = Instant::now();
    let _ = pacer.launch(&files.lane(None), &request(), &fake, || CUresult::SUCCESS);
    let took = begin.elapsed();
    assert!(took < Duration::from_millis(2_500), "{took:?}");
}

/// HK-09: the policy as a table. With a page the agent decides, by the switch.
#[test]
fn when_the_share_is_enforced() {
    for (by_hand, switch, rate, want) in [
        (Some(Policy::Default), 1, 500_000_000, true),
        (Some(Policy::Default), 0, 500_000_000, false),
        (Some(Policy::Force), 0, 500_000_000, true),
        (Some(Policy::Disable), 1, 500_000_000, false),
        (Some(Policy::Force), 1, 1_000_000_000, false),
        (None, 1, 500_000_000, true),
        (None, 0, 500_000_000, false),
        (None, 1, 0, false),
    ] {
        let files = Files::new(0);
        files.page.cards[0].rate.store(rate, Relaxed);
        files.tail.utilization_switch.store(switch, Relaxed);
        assert_eq!(files.lane(by_hand).terms().is_some(), want, "{by_hand:?}, switch {switch}, rate {rate}");
    }
}

/// What the fake driver function below was called with.
static SEEN: Mutex<Option<(usize, [u32; 7], usize)>> = Mutex::new(None);

unsafe extern "C" fn real_kernel(
    function: *mut c_void,
    gx: u32,
    gy: u32,
    gz: u32,
    bx: u32,
    by: u32,
    bz: u32,
    shared: u32,
    stream: *mut c_void,
    _: *mut *mut c_void,
    _: *mut *mut c_void,
) -> CUresult {
    *SEEN.lock().unwrap() = Some((function.addr(), [gx, gy, gz, bx, by, bz, shared], stream.addr()));
    CUresult(123)
}

unsafe extern "C" fn real_ex(
    _: *const crate::cuda::CUlaunchConfig,
    _: *mut c_void,
    _: *mut *mut c_void,
    _: *mut *mut c_void,
) -> CUresult {
    CUresult::INVALID_VALUE
}

#[test]
fn arguments_and_results_pass_unchanged() {
    let (function, stream) =
        (core::ptr::without_provenance_mut(0x10), core::ptr::without_provenance_mut(0x20));
    for form in [super::kernel, super::kernel_ptsz] {
        // SAFETY: the fake looks at numbers only.
        let result =
            unsafe { form(real_kernel, function, 1, 2, 3, 4, 5, 6, 7, stream, null_mut(), null_mut()) };
        assert_eq!(result, CUresult(123));
        assert_eq!(SEEN.lock().unwrap().take(), Some((0x10, [1, 2, 3, 4, 5, 6, 7], 0x20)));
    }
    // SAFETY: a null configuration is the driver's to refuse.
    let result = unsafe { super::kernel_ex(real_ex, core::ptr::null(), function, null_mut(), null_mut()) };
    assert_eq!(result, CUresult::INVALID_VALUE);
}

/// HK-09: the agent takes waits for a share that is held too tight.
#[test]
fn time_at_the_gate_is_no_wait_for_the_bucket() {
    let files: &'static Files = Box::leak(Files::new(50));
    let pacer: &'static Pacer = Box::leak(pacer(Some(MS)));
    files.words.tat.store(clock::coarse_ns() + 150 * MS, Relaxed);
    let took = meanwhile(files, pacer, None, 50, || {
        files.tail.recent_kernel.store(GATED, Relaxed);
        thread::sleep(Duration::from_millis(500));
        // Others of the container launched meanwhile: it has to wait again.
        files.words.tat.store(clock::coarse_ns() + 100 * MS, Relaxed);
        files.tail.recent_kernel.store(0, Relaxed);
    });
    let waited = files.words.wait_ns.load(Relaxed);
    assert!(took >= Duration::from_millis(600), "{took:?}");
    assert!((100 * MS..400 * MS).contains(&waited), "{waited}");
}

/// HAMi's monitor died while it held somebody back: one launch waits for it, the next ones do not.
#[test]
fn a_gate_that_nobody_looks_after_is_open_once_it_was_waited_for() {
    let (files, pacer, fake) = (Files::new(0), pacer(None), Fake::new(0));
    files.tail.recent_kernel.store(GATED, Relaxed);
    let lane = Given { gate_ns: Some(200 * MS), ..files.lane(Some(Policy::Default)) };
    let launch = || {
        let begin = Instant::now();
        let _ = pacer.launch(&lane, &request(), &fake, || CUresult::SUCCESS);
        begin.elapsed()
    };
    assert!(launch() >= Duration::from_millis(200));
    let again = launch();
    assert!(again < Duration::from_millis(200), "{again:?}");
}

/// What is charged and given back is one account, which the agent reads.
#[test]
fn what_was_spent_is_what_was_charged_in_the_end() {
    let (files, pacer, fake) = (Files::new(50), pacer(None), Fake::new(5_000));
    for _ in 0..1_000 {
        let _ = pacer.launch(&files.lane(None), &request(), &fake, || CUresult::SUCCESS);
        files.page.heartbeat.fetch_add(1, Relaxed);
    }
    let spent = files.words.spent_ns.load(Relaxed);
    assert!((4_900_000..=6_000_000).contains(&spent), "{spent} ns for 1,000 launches of 5 us");
}

#[test]
fn no_charge_is_counted_twice_however_many_threads_launch() {
    const LAUNCHES: u64 = 50_000;
    let files: &'static Files = Box::leak(Files::new(99));
    let pacer: &'static Pacer = Box::leak(pacer(Some(1_000)));
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let fake = Fake::new(1_000);
                for _ in 0..LAUNCHES {
                    // All of it has time, and is told at once.
                    files.words.tat.store(0, Relaxed);
                    files.page.heartbeat.fetch_add(1, Relaxed);
                    let _ = pacer.launch(&files.lane(None), &request(), &fake, || CUresult::SUCCESS);
                }
            });
        }
    });
    let spent = files.words.spent_ns.load(Relaxed);
    assert!(spent <= 4 * LAUNCHES * 1_000, "{spent}");
}

/// Its limit was lifted while it waited: it was neither charged nor counted.
#[test]
fn what_paid_nothing_is_not_given_back() {
    let (files, pacer, fake) = (Files::new(50), pacer(Some(MS)), Fake::new(MS));
    let lane = files.lane(None);
    let quote = || pacer.costs.quote(request().key, true, || 0, || Progress::None);
    // To the one that is measured, which says how many were counted.
    let before = loop {
        let next = quote();
        if next.sample == Sample::Chance {
            break next;
        }
        pacer.costs.book(&next);
    };
    files.page.cards[0].rate.store(0, Relaxed);
    let paid = pacer.pay(&lane, &request(), &fake);
    pacer.give_back(&lane, request().key, paid);
    assert_eq!(quote(), before);
}
