//! Pods per second through kube-scheduler: with Mullion as its extender, and the same scheduler without one.
//!
//! Two kube-schedulers run side by side in the network namespace of the controller, with the configuration that
//! the lab's own scheduler has, but without leader election and with a client limit that does not limit; one of
//! them also without extenders. Each round fills the queue of one of them while it is stopped (SIGSTOP), lets it
//! go on, and watches until the last pod is bound. Creation, and with it the webhook, is not counted.

mod cleanup;
mod profile;
mod scheduler;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use futures::{StreamExt, TryStreamExt};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::ResourceExt;
use kube::api::{Api, ListParams, Patch, PatchParams};
use mullion_e2e::scope::{PATIENCE, eventually};
use mullion_e2e::{Scope, pods as pod};
use serde::Serialize;
use serde_json::json;

use crate::lab::{self, Status};
use crate::metrics::{self, Scrape};
use crate::pods::{self, Goal, Watch};
use crate::process;
use crate::report::{Report, Table};
use crate::stats::{mean, median, quantile, real};
use scheduler::Scheduler;

/// What pods of the plain scheduler ask for: an extended resource that kube-scheduler counts by itself. It has a
/// name of its own so that neither webhook nor controller looks at these pods.
const PLAIN_RESOURCE: &str = "bench.mullion.io/gpu";
/// Pods of the first, uncounted round of each side.
const WARM_UP: usize = 100;
/// Memory and cores of each slice: ten of them fill one of the fake nodes' cards.
const SLICE: (&str, &str) = ("8000", "10");

/// kube-scheduler's own measure of what it does for one pod after the other: filters and scores, extenders included.
const CYCLE: &str = "scheduler_scheduling_algorithm_duration_seconds";

/// What the machine does besides: much of it here means that figures of another run are not comparable.
const REST: &str = "anything else on the machine";

/// Settings.
#[derive(Debug, clap::Args)]
pub struct Options {
    /// Pods per round.
    #[arg(long, default_value_t = 1000)]
    pods: usize,
    /// Rounds of each side; they take turns.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Requests per second that each scheduler's client allows itself. The default does not limit.
    #[arg(long, default_value_t = 5000)]
    qps: u32,
    /// Requests under way at once while pods are created.
    #[arg(long, default_value_t = 16)]
    in_flight: usize,
    /// Folder for CPU profiles of API server and scheduler while the first round of each side drains; read them
    /// with `go tool pprof -top FILE`. Profiling slows that round down.
    #[arg(long)]
    profile: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
enum Side {
    Mullion,
    Plain,
}

impl Side {
    const fn name(self) -> &'static str {
        match self {
            Self::Mullion => "mullion",
            Self::Plain => "plain",
        }
    }

    fn pod(self, name: &str) -> Pod {
        let limits = match self {
            Self::Mullion => pod::slice(SLICE.0, SLICE.1),
            Self::Plain => vec![(PLAIN_RESOURCE, "1")],
        };
        let mut pod = pod::pod(name, vec![pod::container("main", &limits)]);
        if let Some(spec) = &mut pod.spec {
            spec.scheduler_name = Some(match self {
                // The webhook takes it over, as it does a user's pod.
                Self::Mullion => "default-scheduler".to_owned(),
                Self::Plain => scheduler::PLAIN.to_owned(),
            });
            let affinity = json!({"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [{"matchExpressions": [{"key": lab::REAL_NODE_LABEL, "operator": "DoesNotExist"}]}]}}});
            spec.affinity = serde_json::from_value(affinity).ok();
        }
        pod
    }
}

/// What one round gave.
#[derive(Debug, Serialize)]
struct Round {
    side: Side,
    /// Pods per second from the first binding to the last.
    rate: f64,
    /// Pods per second over the first 95 %: without the few that had to be tried again.
    rate_of_most: f64,
    /// Seconds from the first binding to the last.
    seconds: f64,
    /// Seconds from the moment the scheduler went on to the first binding.
    first: f64,
    /// Pods per second while they were created.
    created: f64,
    /// Mean milliseconds in which the scheduler found a node for a pod, one pod at a time.
    cycle: f64,
    /// CPU milliseconds per pod, by program.
    cpu: BTreeMap<&'static str, f64>,
    /// Mean milliseconds per call of the extender, and how many calls per pod.
    calls: BTreeMap<&'static str, (f64, f64)>,
}

/// Runs the scenario.
///
/// # Errors
/// When the lab has no fake nodes, or not all pods are bound in time.
pub async fn run(options: &Options) -> Result<Report> {
    let status = Status::ask()?;
    if status.plan.fake_nodes == 0 {
        bail!("the lab has no fake nodes: start it with `lab up --fake-nodes 200`");
    }
    let bench = Bench::start(options, status).await?;
    let outcome = bench.rounds().await;
    bench.end().await?;
    Ok(report(options, bench.status.plan.fake_nodes, &outcome?))
}

struct Bench<'a> {
    options: &'a Options,
    status: Status,
    scope: Scope,
    schedulers: [(Side, Scheduler); 2],
    // Dropped last: the lab's own scheduler comes back when ours are gone.
    _down: lab::PartDown,
}

impl<'a> Bench<'a> {
    async fn start(options: &'a Options, status: Status) -> Result<Self> {
        let scope = Scope::new("bench-scheduling").await?;
        plain_resource(&scope).await?;
        let down = lab::PartDown::kill(&status, "scheduler")?;
        let start = |side| anyhow::Ok((side, Scheduler::start(&status, side == Side::Mullion, options.qps)?));
        let schedulers = [start(Side::Mullion)?, start(Side::Plain)?];
        for (side, scheduler) in &schedulers {
            // It first learns whom to believe, from the API server.
            eventually(&format!("kube-scheduler ({})", side.name()), PATIENCE, || async {
                scheduler.metrics().await.map(Some)
            })
            .await?;
        }
        Ok(Self { options, status, scope, schedulers, _down: down })
    }

    async fn rounds(&self) -> Result<Vec<Round>> {
        for (side, scheduler) in &self.schedulers {
            self.round(*side, scheduler, "warm", WARM_UP.min(self.options.pods))
                .await
                .context("the first round")?;
        }
        let mut rounds = Vec::new();
        for number in 1..=self.options.rounds {
            for (side, scheduler) in &self.schedulers {
                let round = self.round(*side, scheduler, &number.to_string(), self.options.pods).await?;
                eprintln!("round {number} {:<8} {:7.1} pods/s", side.name(), round.rate);
                rounds.push(round);
            }
        }
        Ok(rounds)
    }

    async fn round(&self, side: Side, scheduler: &Scheduler, number: &str, count: usize) -> Result<Round> {
        let api = self.scope.pods();
        let crowd: Vec<Pod> =
            (0..count).map(|i| side.pod(&format!("{}-{number}-{i:04}", side.name()))).collect();
        cleanup::settle(&self.status).await?;
        let cycles = scheduler.metrics().await?.histogram(CYCLE, &[]);
        let paused = scheduler.pause()?;
        let began = Instant::now();
        pods::create(&api, &crowd, self.options.in_flight).await?;
        let created = real(count) / began.elapsed().as_secs_f64();
        let watch = Watch::open(&api, Goal::Bound, count).await?;
        let (cpu, calls) = (self.cpu(scheduler)?, self.calls().await?);
        let go = Instant::now();
        paused.go_on()?;
        let profiles = match &self.options.profile {
            Some(folder) if number == "1" => profile::start(folder, side.name(), scheduler)?,
            _ => Vec::new(),
        };
        let bound = match watch.wait().await {
            Ok(bound) => bound,
            Err(error) => return Err(self.explain(error, scheduler).await),
        };
        let cpu_after = self.cpu(scheduler)?;
        let calls_after = self.calls().await?;
        let cycles = scheduler.metrics().await?.histogram(CYCLE, &[]).since(&cycles);
        profile::end(profiles).await?;
        cleanup::remove_all(&self.scope).await?;
        let first = bound.values().min().copied().unwrap_or(go);
        let last = bound.values().max().copied().unwrap_or(go);
        let seconds = (last - first).as_secs_f64();
        let mut times: Vec<Instant> = bound.values().copied().collect();
        times.sort_unstable();
        let most = count * 95 / 100;
        let rate_of_most = times.get(most).map_or(0.0, |&at| real(most) / (at - first).as_secs_f64());
        Ok(Round {
            side,
            rate: (real(count) - 1.0) / seconds,
            rate_of_most,
            seconds,
            first: (first - go).as_secs_f64(),
            created,
            cycle: cycles.mean() * 1e3,
            cpu: cpu_after
                .iter()
                .map(|(&name, after)| (name, (after - cpu.get(name).unwrap_or(&0.0)) / real(count)))
                .collect(),
            calls: per_call(&calls, &calls_after, real(count)),
        })
    }

    /// CPU so far of everything that works during a round.
    fn cpu(&self, scheduler: &Scheduler) -> Result<BTreeMap<&'static str, f64>> {
        let mut cpu = BTreeMap::from([("kube-scheduler", process::cpu_millis(scheduler.pid())?)]);
        let other = self.schedulers.iter().find(|(_, other)| other.pid() != scheduler.pid());
        if let Some((_, other)) = other {
            cpu.insert("the other kube-scheduler", process::cpu_millis(other.pid())?);
        }
        for (name, part) in [
            ("kube-apiserver", "apiserver"),
            ("etcd", "etcd"),
            ("mullion-controller", "controller"),
            ("kube-controller-manager", "controller-manager"),
        ] {
            cpu.insert(name, process::cpu_millis(self.status.pid(part)?)?);
        }
        cpu.insert("mullion-bench", process::cpu_millis(i32::try_from(std::process::id())?)?);
        let ours: f64 = cpu.values().sum();
        cpu.insert(REST, process::machine_cpu_millis()? - ours);
        Ok(cpu)
    }

    async fn calls(&self) -> Result<Scrape> {
        metrics::scrape(lab::CONTROLLER_METRICS).await
    }

    async fn explain(&self, error: anyhow::Error, scheduler: &Scheduler) -> anyhow::Error {
        let waiting = self.scope.pods().list(&ListParams::default().fields("spec.nodeName=")).await;
        let waiting = waiting.map(|list| list.items).unwrap_or_default();
        let story = match waiting.first() {
            Some(pod) => self.scope.story(&pod.name_any()).await,
            None => String::new(),
        };
        error.context(format!(
            "{} pods wait; {story}; the scheduler's log ends with\n{}",
            waiting.len(),
            scheduler.log()
        ))
    }

    async fn end(&self) -> Result<()> {
        cleanup::remove_all(&self.scope).await?;
        self.scope.remove().await
    }
}

/// Gives every fake node the resource that plain pods ask for, as many as it has slots.
async fn plain_resource(scope: &Scope) -> Result<()> {
    let nodes: Api<Node> = Api::all(scope.client.clone());
    let fake = nodes.list(&ListParams::default().labels(&format!("!{}", lab::REAL_NODE_LABEL))).await?;
    let name = PLAIN_RESOURCE;
    let requests = fake.items.iter().map(|node| {
        let nodes = nodes.clone();
        async move {
            let slots = node.status.as_ref().and_then(|s| s.allocatable.as_ref()?.get("nvidia.com/gpu"));
            let slots = slots.with_context(|| format!("node {} has no nvidia.com/gpu", node.name_any()))?;
            let patch = json!({"status": {"capacity": {name: slots}, "allocatable": {name: slots}}});
            nodes.patch_status(&node.name_any(), &PatchParams::default(), &Patch::Merge(patch)).await?;
            anyhow::Ok(())
        }
    });
    futures::stream::iter(requests).buffer_unordered(16).try_collect::<()>().await
}

fn per_call(before: &Scrape, after: &Scrape, pods: f64) -> BTreeMap<&'static str, (f64, f64)> {
    const NAME: &str = "mullion_call_duration_seconds";
    let call = |(call, label): (&'static str, &str)| {
        let calls = after.histogram(NAME, &[label]).since(&before.histogram(NAME, &[label]));
        (call, (calls.mean() * 1e3, calls.count / pods))
    };
    [("filter", "call=\"filter\""), ("prioritize", "call=\"prioritize\""), ("bind", "call=\"bind\"")]
        .into_iter()
        .map(call)
        .collect()
}

fn report(options: &Options, nodes: usize, rounds: &[Round]) -> Report {
    let of = |side| rounds.iter().filter(move |round| round.side == side);
    let column = |side, value: fn(&Round) -> f64| of(side).map(value).collect::<Vec<f64>>();
    let (mullion, plain) = (column(Side::Mullion, |r| r.rate), column(Side::Plain, |r| r.rate));
    let ratios: Vec<f64> = mullion.iter().zip(&plain).map(|(ours, theirs)| 100.0 * ours / theirs).collect();

    let mut rates = Table::new(&[
        "",
        "pods/s, median",
        "pods/s, lowest to highest",
        "first 95 %, median",
        "ms to find a node",
        "created/s",
    ]);
    for (name, side) in [("with Mullion", Side::Mullion), ("no extender", Side::Plain)] {
        let rate = column(side, |r| r.rate);
        let range = format!("{:.0} to {:.0}", quantile(&rate, 0.0), quantile(&rate, 1.0));
        let (cycle, created) = (median(&column(side, |r| r.cycle)), median(&column(side, |r| r.created)));
        let most = format!("{:.0}", median(&column(side, |r| r.rate_of_most)));
        let cells =
            [format!("{:.0}", median(&rate)), range, most, format!("{cycle:.2}"), format!("{created:.0}")];
        rates.row([vec![name.to_owned()], cells.to_vec()].concat());
    }
    let (ours, theirs) = (column(Side::Mullion, |r| r.rate_of_most), column(Side::Plain, |r| r.rate_of_most));
    let most: Vec<f64> = ours.iter().zip(&theirs).map(|(ours, theirs)| 100.0 * ours / theirs).collect();
    let range = format!("{:.0} % to {:.0} %", quantile(&ratios, 0.0), quantile(&ratios, 1.0));
    rates.row([
        "ratio, pair by pair".to_owned(),
        format!("{:.0} %", median(&ratios)),
        range,
        format!("{:.0} %", median(&most)),
        String::new(),
    ]);

    let mut cpu = Table::new(&["CPU, ms per pod", "with Mullion", "no extender"]);
    let names: Vec<&str> =
        of(Side::Mullion).next().map(|r| r.cpu.keys().copied().collect()).unwrap_or_default();
    let per_pod = |side, name| mean(&of(side).filter_map(|r| r.cpu.get(name).copied()).collect::<Vec<_>>());
    for name in &names {
        cpu.row([
            (*name).to_owned(),
            format!("{:.2}", per_pod(Side::Mullion, *name)),
            format!("{:.2}", per_pod(Side::Plain, *name)),
        ]);
    }
    let sum = |side| names.iter().filter(|&&name| name != REST).map(|name| per_pod(side, *name)).sum::<f64>();
    cpu.row([
        "the cluster's, in all".to_owned(),
        format!("{:.2}", sum(Side::Mullion)),
        format!("{:.2}", sum(Side::Plain)),
    ]);

    let mut calls = Table::new(&["Extender's call", "ms, mean", "calls per pod"]);
    for name in ["filter", "prioritize", "bind"] {
        let all: Vec<(f64, f64)> = of(Side::Mullion).filter_map(|r| r.calls.get(name).copied()).collect();
        let part = |pick: fn(&(f64, f64)) -> f64| mean(&all.iter().map(pick).collect::<Vec<_>>());
        calls.row([name.to_owned(), format!("{:.2}", part(|c| c.0)), format!("{:.2}", part(|c| c.1))]);
    }
    let cores = std::thread::available_parallelism().map_or(0, std::num::NonZero::get);
    Report {
        title: format!(
            "{} pods on {nodes} fake nodes, {} rounds of each, taking turns, {cores} CPUs",
            options.pods, options.rounds
        ),
        tables: vec![rates, cpu, calls],
        notes: vec![
            format!(
                "Drain of a full queue, from the first binding to the last; both schedulers' clients limited to {} requests/s.",
                options.qps
            ),
            "CPU: while the queue drained, the same CPUs for all programs of the cluster.".to_owned(),
        ],
        values: json!({"rounds": rounds, "ratios": ratios}),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_sides_differ_in_resources_and_scheduler_only() {
        let bare = |side: Side| {
            let mut pod = side.pod("p");
            let spec = pod.spec.as_mut().unwrap();
            spec.scheduler_name = None;
            spec.containers[0].resources = None;
            pod
        };
        assert_eq!(bare(Side::Mullion), bare(Side::Plain));
        assert!(bare(Side::Plain).spec.unwrap().affinity.is_some());
    }

    #[test]
    fn a_report_compares_pair_by_pair() {
        let round = |side, rate| Round {
            side,
            rate,
            rate_of_most: rate,
            seconds: 1.0,
            first: 0.1,
            created: 100.0,
            cycle: 1.0,
            cpu: BTreeMap::from([("etcd", 1.0)]),
            calls: BTreeMap::from([("filter", (0.5, 1.0))]),
        };
        let rounds = [
            round(Side::Mullion, 80.0),
            round(Side::Plain, 100.0),
            round(Side::Mullion, 45.0),
            round(Side::Plain, 50.0),
        ];
        let options = Options { pods: 10, rounds: 2, qps: 1, in_flight: 1, profile: None };
        let report = report(&options, 200, &rounds);
        assert_eq!(report.values["ratios"], json!([80.0, 90.0]));
        assert!(report.to_string().contains("| ratio, pair by pair | 85 % | 80 % to 90 % |"), "{report}");
    }
}
