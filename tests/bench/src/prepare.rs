//! PreStartContainer with many pods at once over all real nodes, and the way of pods from creation to Running.

use std::collections::BTreeMap;
use std::time::Instant;

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::ListParams;
use mullion_e2e::Scope;
use mullion_e2e::pods::{Build, container, pod, slice_pod};
use serde_json::json;

use crate::lab::Status;
use crate::metrics::{self, Histogram};
use crate::pods::{self, Goal, Watch, between};
use crate::report::{Report, Table};
use crate::stats::spread_cells;

/// The agents' port for health and metrics.
const AGENT_PORT: u16 = 9394;
/// How long PreStartContainer took, as the agents count it.
const HISTOGRAM: &str = "mullion_agent_prepare_seconds";

/// Settings.
#[derive(Debug, clap::Args)]
pub struct Options {
    /// Pods created at once; the lab's default nodes have 60 slots.
    #[arg(long, default_value_t = 50)]
    pods: usize,
    /// Pods created one after another.
    #[arg(long, default_value_t = 20)]
    singles: usize,
}

/// Runs the scenario.
///
/// # Errors
/// When not all pods run in time, or an agent has no metrics.
pub async fn run(options: &Options) -> Result<Report> {
    let status = Status::ask()?;
    let scope = Scope::new("bench-prepare").await?;
    let gpu = |name: &str| slice_pod(name, "3000", "5").annotated("hami.io/node-scheduler-policy", "spread");
    let bare = |name: &str| pod(name, vec![container("main", &[])]);

    let before = prepared(&status).await?;
    let at_once = crowd(&scope, options.pods, "gpu", gpu).await?;
    let nodes = nodes_of(&scope).await?;
    let calls = prepared(&status).await?.since(&before);
    let at_once_bare = crowd(&scope, options.pods, "bare", bare).await?;

    let before = prepared(&status).await?;
    let single = one_by_one(&scope, options.singles, "gpu", gpu).await?;
    let single_calls = prepared(&status).await?.since(&before);
    let single_bare = one_by_one(&scope, options.singles, "bare", bare).await?;
    scope.remove().await?;

    let mut to_running = Table::new(&["Creation to Running, ms", "pods", "p50", "p90", "p99", "max"]);
    let samples = [
        ("at once, GPU slice", &at_once),
        ("at once, no GPU", &at_once_bare),
        ("one by one, GPU slice", &single),
        ("one by one, no GPU", &single_bare),
    ];
    for (name, sample) in samples {
        let head = vec![name.to_owned(), sample.len().to_string()];
        to_running.row([head, spread_cells(sample).to_vec()].concat());
    }
    let mut prepare = Table::new(&["PreStartContainer", "calls", "mean, ms", "p50, ms", "p99, ms"]);
    for (name, calls) in [("at once", &calls), ("one by one", &single_calls)] {
        let row = [
            name.to_owned(),
            format!("{:.0}", calls.count),
            format!("{:.2}", calls.mean() * 1e3),
            bounds(calls.quantile(0.5)),
            bounds(calls.quantile(0.99)),
        ];
        prepare.row(row);
    }
    let placed =
        nodes.iter().map(|(node, count)| format!("{count} on {node}")).collect::<Vec<_>>().join(", ");
    Ok(Report {
        title: format!("{} pods at once ({placed}), then {} one by one", options.pods, options.singles),
        tables: vec![prepare, to_running],
        notes: vec![
            "PreStartContainer: from the agents' histogram, so a quantile is known to within its bucket.".to_owned(),
            "The pods without a GPU go the same way through the cluster's own scheduler: what is left is Mullion's share.".to_owned(),
        ],
        values: json!({
            "toRunning": samples.map(|(name, sample)| json!({"case": name, "ms": sample})),
            "prepareBuckets": calls.buckets.iter().map(|(le, count)| json!({"le": le, "count": count})).collect::<Vec<_>>(),
            "nodes": nodes,
        }),
    })
}

fn bounds((low, high): (f64, f64)) -> String {
    format!("{} to {}", low * 1e3, high * 1e3)
}

/// Creates `count` pods at once in the emptied namespace and waits until all run: milliseconds to Running.
async fn crowd(scope: &Scope, count: usize, kind: &str, make: impl Fn(&str) -> Pod) -> Result<Vec<f64>> {
    remove_pods(scope).await?;
    let crowd: Vec<Pod> = (0..count).map(|i| make(&format!("{kind}-{i:03}"))).collect();
    let watch = Watch::open(&scope.pods(), Goal::Running, count).await?;
    let created = pods::create(&scope.pods(), &crowd, count).await?;
    let running = watch.wait().await.with_context(|| format!("{count} {kind} pods at once"))?;
    Ok(between(&created, &running))
}

/// Ends all pods of the namespace and waits until their allocations are gone, too.
async fn remove_pods(scope: &Scope) -> Result<()> {
    let list = scope.pods().list(&ListParams::default()).await?;
    let names: Vec<String> = list.items.iter().map(ResourceExt::name_any).collect();
    futures::future::try_join_all(names.iter().map(|name| scope.delete(name))).await?;
    Ok(())
}

/// Creates pods one after another, each when the one before it is gone: milliseconds to Running.
async fn one_by_one(scope: &Scope, count: usize, kind: &str, make: impl Fn(&str) -> Pod) -> Result<Vec<f64>> {
    remove_pods(scope).await?;
    let mut all = Vec::new();
    for i in 0..count {
        let name = format!("{kind}-single-{i:03}");
        let watch = Watch::open(&scope.pods(), Goal::Running, 1).await?;
        let created = Instant::now();
        scope.create(&make(&name)).await?;
        let running = watch.wait().await.with_context(|| format!("pod {name}"))?;
        all.extend(between(&BTreeMap::from([(name.clone(), created)]), &running));
        scope.delete(&name).await?;
    }
    Ok(all)
}

async fn nodes_of(scope: &Scope) -> Result<BTreeMap<String, usize>> {
    let mut nodes = BTreeMap::new();
    for pod in scope.pods().list(&ListParams::default()).await?.items {
        *nodes.entry(pod.spec.and_then(|spec| spec.node_name).unwrap_or_default()).or_default() += 1;
    }
    Ok(nodes)
}

/// The histogram of all agents together.
async fn prepared(status: &Status) -> Result<Histogram> {
    let mut sum = Histogram::default();
    for node in &status.plan.nodes {
        let scrape = metrics::scrape(&format!("{}:{AGENT_PORT}", node.address())).await?;
        sum = sum.plus(&scrape.histogram(HISTOGRAM, &[]));
    }
    Ok(sum)
}
