//! Memory and CPU of Mullion's programs while nothing happens.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use serde_json::json;

use crate::lab::Status;
use crate::process;
use crate::report::{Report, Table};
use crate::stats::{millis, real};

/// Settings.
#[derive(Debug, clap::Args)]
pub struct Options {
    /// How long to look.
    #[arg(long, default_value_t = 60)]
    seconds: u64,
}

/// Runs the scenario.
///
/// # Errors
/// When none of Mullion's programs runs, or one ends meanwhile.
pub async fn run(options: &Options) -> Result<Report> {
    let status = Status::ask()?;
    let is_ours =
        |name: &str| name.starts_with("agent@") || name.starts_with("scheduler") || is_controller(name);
    let parts: Vec<_> = status.parts.iter().filter(|p| p.state == "running" && is_ours(&p.name)).collect();
    if parts.is_empty() {
        bail!("none of Mullion's programs runs: start the lab without --no-mullion");
    }
    let cpu = || parts.iter().map(|part| process::cpu_millis(part.pid)).collect::<Result<Vec<f64>>>();
    let (before, began) = (cpu()?, Instant::now());
    tokio::time::sleep(Duration::from_secs(options.seconds)).await;
    let (after, elapsed) = (cpu()?, millis(began.elapsed()));

    let mut table = Table::new(&[
        "Program",
        "resident, MiB",
        "of it private, MiB",
        "peak, MiB",
        "threads",
        "CPU, % of one",
    ]);
    let mut values = Vec::new();
    for ((part, before), after) in parts.iter().zip(before).zip(after) {
        let memory = process::memory(part.pid)?;
        let percent = 100.0 * (after - before) / elapsed;
        let mib = |kib: u64| format!("{:.1}", kib_to_mib(kib));
        let sizes = [memory.resident, memory.anonymous, memory.peak].map(mib).to_vec();
        let rest = vec![memory.threads.to_string(), format!("{percent:.2}")];
        table.row([vec![part.name.clone()], sizes, rest].concat());
        values.push(
            json!({"part": part.name, "residentKiB": memory.resident, "anonymousKiB": memory.anonymous,
            "peakKiB": memory.peak, "threads": memory.threads, "cpuPercent": percent}),
        );
    }
    let nodes = status.plan.nodes.len() + status.plan.fake_nodes;
    Ok(Report {
        title: format!("Idle for {} s in a cluster of {nodes} nodes", options.seconds),
        tables: vec![table],
        notes: vec![
            "`scheduler` is the upstream kube-scheduler beside the controller, for comparison.".to_owned(),
        ],
        values: json!(values),
    })
}

fn is_controller(name: &str) -> bool {
    name.starts_with("controller") && name != "controller-manager"
}

fn kib_to_mib(kib: u64) -> f64 {
    real(usize::try_from(kib).unwrap_or(usize::MAX)) / 1024.0
}
