//! Containers, their processes, the driver's samples and the agent, in simulated time.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::sync::atomic::AtomicU64;

use mullion_pace::policy::{self, Activity, PERIOD_NS, Policy, STAMP_NS, Task};
use mullion_pace::{
    Admission, Bucket, CLOSE_EVERY_NS, Costs, Key, MAX_WINDOW_NS, Measurement, Meter, Observation, Progress,
    Reading, SCALE_ONE, SLICE_NS, Sample, Size, Steer, Terms, guess_ns,
};

use crate::card::{Card, Kernel};

pub const US: u64 = 1_000;
pub const MS: u64 = 1_000_000;
pub const S: u64 = 1_000_000_000;

/// `CLOCK_MONOTONIC_COARSE` of a kernel with 250 ticks per second.
const TICK: u64 = 4 * MS;
/// A sleeper wakes this much late.
const SLACK: u64 = 60 * US;
/// The agent's period.
pub const PERIOD: u64 = PERIOD_NS;
/// Launches after which a process looks at its stamps, as in the library.
const STAMP_EVERY: u32 = 61;
/// A sample of so many percent shows a container at work, as in the agent.
const BUSY_PERCENT: u32 = 50;
const BURST: u64 = 50 * MS;

#[derive(Clone, Copy, Debug)]
pub enum Habit {
    /// Launch, wait for the end, think, launch.
    Sync { think: u64 },
    /// Launch every 4 us until `depth` are queued.
    Deep { depth: usize },
}

#[derive(Clone, Copy, Debug)]
pub struct Process {
    pub habit: Habit,
    /// Mean length of a kernel; each one is up to a fifth longer or shorter.
    pub kernel: u64,
    pub size: Size,
    /// A graph of this many such kernels is what is launched; 0 = kernels one by one.
    pub graph: u64,
    /// A new graph for each launch, which is destroyed at once.
    pub fresh: bool,
    /// After this long the kernels are this long instead.
    pub then: Option<(u64, u64)>,
    /// They are of the same function as before.
    pub same: bool,
    /// At work only in the first so many seconds of each so many.
    pub duty: (u64, u64),
    /// One launch in so many, by chance, takes this long instead, by the same function.
    pub sometimes: Option<(u64, u64)>,
    /// One launch in so many takes this long instead, by the same function.
    pub mixed: Option<(u64, u64)>,
}

impl Process {
    fn at_work(&self, since: u64) -> bool {
        since % (self.duty.1 * S) < self.duty.0 * S
    }
}

pub fn process(habit: Habit, kernel: u64) -> Process {
    Process {
        habit,
        kernel,
        size: Size { blocks: 4096, threads: 256 },
        graph: 0,
        fresh: false,
        then: None,
        same: false,
        duty: (1, 1),
        sometimes: None,
        mixed: None,
    }
}

#[derive(Clone, Debug)]
pub struct Container {
    pub percent: u32,
    pub processes: Vec<Process>,
}

/// How NVML answers.
#[derive(Clone, Copy, Debug)]
pub struct Nvml {
    pub window: u64,
    /// The driver makes its samples readable in bunches; the longest time between two.
    pub late: u64,
    /// One call in this many fails.
    pub missing: Option<u64>,
    /// One sample in this many is never listed.
    pub absent: Option<u64>,
    /// An answer has the newest sample of each process and no others.
    pub newest_only: bool,
    /// Percentages are rounded to the nearest instead of down.
    pub rounds: bool,
}

#[derive(Clone, Debug)]
pub struct Scenario {
    pub seed: u64,
    pub sms: u64,
    pub containers: Vec<Container>,
    pub nvml: Nvml,
    /// Events can be used to measure launches.
    pub events: bool,
    /// When a container is held to its share; `Force` is always.
    pub policy: Policy,
    /// No agent in this time.
    pub agent_dead: std::ops::Range<u64>,
    /// Left out of the figures.
    pub start_up: u64,
}

/// What was seen of one container.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Share of the card after the start-up, in percent.
    pub share: f64,
    /// The same over the time in which all were at work, and it was held to its share.
    pub held: f64,
    /// Time on the card in the start-up beyond the share, in s.
    pub excess: f64,
    /// Longest time without a launch while a process waited for one, after the start-up.
    pub starved: u64,
    pub longest_kernel: u64,
    pub scale: f64,
}

/// Measurements that may be under way in a process.
const PLACES: usize = 16;

pub struct Random(u64);

impl Random {
    pub fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) % n.max(1)
    }
}

struct Proc {
    container: usize,
    plan: Process,
    costs: Box<Costs>,
    waiting_since: Option<u64>,
    /// First measurements under way: when they were launched.
    flying: BTreeMap<u64, u64>,
    /// When it was last time to measure a launch.
    sampled: u64,
    window_busy: u64,
    /// Launches.
    count: u64,
    /// Charged, and not in the container's word yet.
    spent: i64,
    /// The heartbeat that it saw last, and the launches until it looks at its stamps all the same.
    beat: u64,
    left: u32,
}

struct Cont {
    tat: AtomicU64,
    scale: u32,
    steer: Steer,
    meter: Meter,
    waits: u64,
    waited: u64,
    launches: u64,
    spent: u64,
    last_go: u64,
    starved: u64,
    longest: u64,
    busy_at_start: u64,
    switch: i32,
    /// When it last stamped that it launched.
    stamp: Option<u64>,
    /// The same at the agent's last look.
    seen: Option<u64>,
    /// The newest sample that shows it at work.
    busy_at: u64,
    /// Time on the card and time, while all were at work and it was held.
    held: (u64, u64),
    busy_before: u64,
}

impl Cont {
    fn task(&self, now: u64, policy: Policy) -> Task {
        // As in the agent: whoever waited or launched since the last look is at work.
        let at_work = self.waited > 0 || self.stamp != self.seen;
        let age_ns = if at_work { Some(0) } else { self.stamp.map(|at| now - at) };
        Task {
            priority: 1,
            cards: 1,
            activity: Activity::Launched { age_ns },
            busy: now - self.busy_at <= MAX_WINDOW_NS,
            policy,
        }
    }
}

/// Runs a scenario for its start-up and `measure` after it.
#[expect(clippy::too_many_lines, reason = "one loop over the three kinds of events")]
pub fn run(scenario: &Scenario, measure: u64) -> Vec<Outcome> {
    let mut random = Random(scenario.seed.wrapping_mul(2) + 1);
    let mut procs = Vec::new();
    for (container, c) in scenario.containers.iter().enumerate() {
        for plan in &c.processes {
            procs.push(Proc {
                container,
                plan: *plan,
                costs: Box::new(Costs::new()),
                waiting_since: None,
                flying: BTreeMap::new(),
                sampled: 0,
                window_busy: 0,
                count: 0,
                spent: 0,
                beat: 0,
                left: 0,
            });
        }
    }
    let mut conts: Vec<Cont> = scenario
        .containers
        .iter()
        .map(|_| Cont {
            tat: AtomicU64::new(0),
            scale: SCALE_ONE,
            steer: Steer::default(),
            meter: Meter::new(),
            waits: 0,
            waited: 0,
            launches: 0,
            spent: 0,
            last_go: 0,
            starved: 0,
            longest: 0,
            busy_at_start: 0,
            switch: 1,
            stamp: None,
            seen: None,
            busy_at: 0,
            held: (0, 0),
            busy_before: 0,
        })
        .collect();
    let terms = |percent: u32, scale| Terms { scale, rate: u64::from(percent) * 10_000_000, burst: BURST };
    let mut card = Card::new(procs.len());
    // The clock starts late, so that a word of 0 lies in the past.
    let zero = 100 * S;
    card.now = zero;
    let end = zero + scenario.start_up + measure;
    let mut events: BinaryHeap<Reverse<(u64, usize)>> =
        (0..procs.len()).map(|p| Reverse((zero + random.below(10 * MS), p))).collect();
    let (mut next_agent, mut last_agent) = (zero + PERIOD, zero);
    let mut next_window = zero + scenario.nvml.window;
    let (mut next_second, mut told) = (zero + S, zero);
    // Samples: when they can be read, container, process, time stamp, percent.
    let mut listed: Vec<(u64, usize, usize, u64, u32)> = Vec::new();
    let mut bunch = 0;
    let mut start_noted = false;

    while card.now < end {
        let next_host = events.peek().map_or(u64::MAX, |Reverse((t, _))| *t);
        let next = next_host.min(next_agent).min(next_window).min(next_second).min(end);
        if let Some(process) = card.run_until(next) {
            let think = match procs[process].plan.habit {
                Habit::Sync { think } => think + 5 * US,
                Habit::Deep { .. } => 4 * US,
            };
            events.push(Reverse((card.now + think, process)));
            settle(&mut card, &mut procs, &conts, scenario, terms);
            continue;
        }
        let now = next;
        if !start_noted && now >= zero + scenario.start_up {
            start_noted = true;
            for (i, c) in conts.iter_mut().enumerate() {
                c.busy_at_start = busy(&card, &procs, i);
                c.starved = 0;
            }
        }
        if now == next_second || now == next_agent {
            next_second = zero + (now - zero) / S * S + S;
            // What was so since it was last told.
            let together = procs.iter().all(|p| p.plan.at_work(told - zero));
            for (i, c) in conts.iter_mut().enumerate() {
                let busy = busy(&card, &procs, i);
                if together && c.switch != 0 && told >= zero + scenario.start_up {
                    c.held = (c.held.0 + busy - c.busy_before, c.held.1 + now - told);
                }
                c.busy_before = busy;
            }
            told = now;
        }
        if now == next_window {
            next_window += scenario.nvml.window;
            if now > bunch {
                bunch = now + random.below(scenario.nvml.late + 1);
            }
            let half = if scenario.nvml.rounds { scenario.nvml.window / 2 } else { 0 };
            for (p, proc) in procs.iter_mut().enumerate() {
                let used = card.busy[p] - proc.window_busy;
                proc.window_busy = card.busy[p];
                // Some utilisation, or the process is not listed.
                let percent = u32::try_from((used * 100 + half) / scenario.nvml.window).unwrap().min(100);
                let lost = scenario.nvml.absent.is_some_and(|n| random.below(n) == 0);
                if percent > 0 && !lost {
                    listed.push((bunch, proc.container, p, now, percent));
                }
            }
        } else if now == next_agent {
            next_agent += PERIOD;
            let alive = !scenario.agent_dead.contains(&(now - zero));
            let answered = scenario.nvml.missing.is_none_or(|n| random.below(n) != 0);
            if alive {
                if answered {
                    let newest: BTreeMap<usize, u64> =
                        listed.iter().filter(|l| l.0 <= now).map(|l| (l.2, l.3)).collect();
                    listed.retain(|(readable, c, p, at, percent)| {
                        if *readable > now {
                            return true;
                        }
                        if !scenario.nvml.newest_only || newest.get(p) == Some(at) {
                            conts[*c].meter.push(u32::try_from(*p).unwrap(), *at, *percent);
                            if *percent >= BUSY_PERCENT {
                                conts[*c].busy_at = conts[*c].busy_at.max(*at);
                            }
                        }
                        false
                    });
                }
                let tasks: Vec<Task> = conts.iter().map(|c| c.task(now, scenario.policy)).collect();
                for (i, c) in conts.iter_mut().enumerate() {
                    c.switch = policy::decide(&tasks, i).unwrap().switch;
                    c.seen = c.stamp;
                    let reading = if answered { c.meter.take(now) } else { Reading::Missing };
                    let seen = Observation {
                        reading,
                        launched: c.launches > 0,
                        waits: c.waits,
                        waited_ns: c.waited,
                        elapsed_ns: now - last_agent,
                    };
                    c.steer = if c.meter.held(c.switch != 0, now) {
                        c.steer.spent(c.spent).step(scenario.containers[i].percent, &seen)
                    } else {
                        Steer::new(c.scale)
                    };
                    c.scale = c.steer.scale();
                    (c.waits, c.waited, c.launches, c.spent) = (0, 0, 0, 0);
                }
                last_agent = now;
            }
        } else if let Some(Reverse((_, p))) = events.pop() {
            let proc = &mut procs[p];
            let (plan, container) = (proc.plan, proc.container);
            if !plan.at_work(now - zero) {
                proc.waiting_since = None;
                let round = plan.duty.1 * S;
                events.push(Reverse((now + round - (now - zero) % round, p)));
                continue;
            }
            let cont = &mut conts[container];
            if proc.waiting_since.is_none() {
                if proc.left == 0 || proc.beat != last_agent {
                    (proc.left, proc.beat) = (STAMP_EVERY, last_agent);
                    // It only grows: what was given back is made up for first.
                    if let Ok(ns) = u64::try_from(proc.spent) {
                        cont.spent += ns;
                        proc.spent = 0;
                    }
                    if cont.stamp.is_none_or(|at| now - at >= STAMP_NS) {
                        cont.stamp = Some(now);
                    }
                }
                proc.left -= 1;
            }
            let terms = terms(scenario.containers[container].percent, cont.scale);
            let size = plan.size;
            let later = u64::from(!plan.same && plan.then.is_some_and(|(at, _)| now - zero >= at));
            let one = if plan.fresh { proc.count } else { later };
            let handle = 0x7f00_0000_0000 + ((p as u64) << 32) + 64 * one;
            let key = if plan.graph > 0 { Key::graph(handle) } else { Key::function(handle, size) };
            // The kernels of a graph are not known one by one.
            let guess = || if plan.graph > 0 { MS } else { guess_ns(size, scenario.sms * 2048) };
            let tells = |measured: Measurement| key.is_told_by(measured.key, measured.sample);
            let measuring = card.queues[p].iter().filter(|k| k.sample.is_some_and(tells));
            let come = measuring
                .map(|kernel| kernel.started.map_or(Progress::Queued, |at| Progress::Running(now - at)));
            let progress = || come.max().unwrap_or(Progress::None);
            let throttled = scenario.policy.throttles(cont.switch);
            let quote = throttled.then(|| proc.costs.quote(key, scenario.events, guess, progress));
            let coarse = now / TICK * TICK;
            let admission =
                quote.map_or(Admission::Go, |quote| Bucket::over(&cont.tat).admit(coarse, quote.ns, terms));
            match admission {
                Admission::Wait(ns) => {
                    if proc.waiting_since.is_none() {
                        cont.waits += 1;
                        proc.waiting_since = Some(now);
                    }
                    // A first measurement under way is looked after sooner.
                    let slice = if proc.flying.is_empty() { SLICE_NS } else { MS };
                    let sleep = ns.min(slice) + SLACK;
                    cont.waited += sleep;
                    events.push(Reverse((now + sleep, p)));
                }
                Admission::Go => {
                    if let Some(quote) = &quote {
                        proc.costs.book(quote);
                        if plan.fresh {
                            proc.costs.forget(key);
                        }
                        proc.spent += i64::try_from(quote.ns).unwrap();
                        if scenario.events && quote.known && now - proc.sampled >= CLOSE_EVERY_NS {
                            proc.costs.measure_soon(quote);
                            proc.sampled = now;
                        }
                    }
                    cont.launches += 1;
                    proc.count += 1;
                    if let Some(since) = proc.waiting_since.take() {
                        cont.starved = cont.starved.max(now - since.max(cont.last_go));
                    }
                    cont.last_go = now;
                    let then = plan.then.filter(|(at, _)| now - zero >= *at).map(|(_, kernel)| kernel);
                    let mixed = plan.mixed.filter(|(every, _)| proc.count.is_multiple_of(*every));
                    let kernel = mixed.map(|(_, kernel)| kernel).or(then).unwrap_or(plan.kernel);
                    let mean = kernel * plan.graph.max(1);
                    let mean = match plan.sometimes {
                        Some((one_in, ns)) if random.below(one_in) == 0 => ns,
                        _ => mean,
                    };
                    let left = mean * 4 / 5 + random.below(mean * 2 / 5 + 1);
                    cont.longest = cont.longest.max(left);
                    let has_place =
                        card.queues[p].iter().filter(|kernel| kernel.sample.is_some()).count() < PLACES;
                    let picked = quote.filter(|quote| quote.sample != Sample::No && has_place);
                    if let Some(quote) = quote.filter(|quote| quote.sample == Sample::Chance && !has_place) {
                        let more = proc.costs.missed(key, quote.ns);
                        Bucket::over(&cont.tat).correct(coarse, more, terms);
                        proc.spent += more.charge_ns();
                    }
                    let key = if plan.fresh { Key::FORGOTTEN } else { key };
                    let sample = picked.map(|quote| Measurement {
                        key,
                        ns: 0,
                        host_ns: 0,
                        paid_ns: quote.ns,
                        sample: quote.sample,
                    });
                    if sample.is_some_and(|sample| sample.sample == Sample::First) {
                        proc.flying.entry(key.get()).or_insert(now);
                    }
                    card.queues[p].push_back(Kernel { left, sample, started: None });
                    match plan.habit {
                        Habit::Sync { .. } => card.wake_below[p] = 1,
                        Habit::Deep { depth } if card.queues[p].len() >= depth => card.wake_below[p] = depth,
                        Habit::Deep { .. } => events.push(Reverse((now + 4 * US, p))),
                    }
                }
            }
        }
        settle(&mut card, &mut procs, &conts, scenario, terms);
    }
    let seconds = |ns: u64| ns as f64 / S as f64;
    conts
        .iter()
        .enumerate()
        .map(|(i, c)| Outcome {
            share: seconds(busy(&card, &procs, i) - c.busy_at_start) * 100.0 / seconds(measure),
            held: seconds(c.held.0) * 100.0 / seconds(c.held.1.max(1)),
            excess: seconds(c.busy_at_start)
                - seconds(scenario.start_up) * f64::from(scenario.containers[i].percent) / 100.0,
            starved: c.starved,
            longest_kernel: c.longest,
            scale: f64::from(c.scale) / 65536.0,
        })
        .collect()
}

fn busy(card: &Card, procs: &[Proc], container: usize) -> u64 {
    procs.iter().zip(&card.busy).filter(|(p, _)| p.container == container).map(|(_, b)| b).sum()
}

/// What the library does when it finds a measurement finished.
fn settle(
    card: &mut Card,
    procs: &mut [Proc],
    conts: &[Cont],
    scenario: &Scenario,
    terms: impl Fn(u32, u32) -> Terms,
) {
    for done in card.measured.drain(..) {
        let proc = &mut procs[done.process];
        proc.flying.remove(&done.measurement.key.get());
        let cont = &conts[proc.container];
        let terms = terms(scenario.containers[proc.container].percent, cont.scale);
        let (bucket, coarse) = (Bucket::over(&cont.tat), card.now / TICK * TICK);
        let correction = proc.costs.measured(&done.measurement);
        if scenario.policy.throttles(cont.switch) {
            bucket.correct(coarse, correction, terms);
            proc.spent += correction.charge_ns();
        }
    }
}
