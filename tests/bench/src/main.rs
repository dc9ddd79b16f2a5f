//! Load drivers for the figures in `docs/benchmarks.md`. They run inside the lab:
//! `tests/lab/lab enter -- mullion-bench SCENARIO`; `tests/bench/run` does all of it.

mod apilog;
mod footprint;
mod idle;
mod lab;
mod metrics;
mod pods;
mod prepare;
mod process;
mod report;
mod scheduling;
mod stats;
mod writes;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use tokio::signal::unix::{SignalKind, signal};

use crate::report::{Printing, Report};

/// Measures Mullion in a running lab.
#[derive(Debug, Parser)]
#[command(name = "mullion-bench")]
struct Args {
    #[command(subcommand)]
    scenario: Scenario,
    #[command(flatten)]
    printing: Printing,
}

#[derive(Debug, Subcommand)]
enum Scenario {
    /// Pods per second through kube-scheduler, with Mullion and without an extender, on the lab's fake nodes.
    Scheduling(scheduling::Options),
    /// API writes per pod and writer, up to bound and up to Running, from the API server's audit log.
    Writes(writes::Options),
    /// PreStartContainer with many pods at once, and how long pods take from creation to Running.
    Prepare(prepare::Options),
    /// Memory and CPU of Mullion's programs while nothing happens.
    Agent(footprint::Options),
    /// API writes of Mullion's identities while nothing happens, from the API server's audit log.
    Idle(idle::Options),
}

#[tokio::main]
async fn main() -> ExitCode {
    let args = Args::parse();
    // On a signal the scenario is dropped, and with it what it has started or stopped.
    let report = tokio::select! {
        report = run(&args.scenario) => report,
        () = told_to_end() => Err(anyhow::anyhow!("ended by a signal")),
    };
    args.printing.end("mullion-bench", report)
}

async fn run(scenario: &Scenario) -> anyhow::Result<Report> {
    match scenario {
        Scenario::Scheduling(options) => scheduling::run(options).await,
        Scenario::Writes(options) => writes::run(options).await,
        Scenario::Prepare(options) => prepare::run(options).await,
        Scenario::Agent(options) => footprint::run(options).await,
        Scenario::Idle(options) => idle::run(options).await,
    }
}

async fn told_to_end() {
    let Ok(mut terminate) = signal(SignalKind::terminate()) else { return std::future::pending().await };
    tokio::select! {
        _ = tokio::signal::ctrl_c() => {}
        _ = terminate.recv() => {}
    }
}
