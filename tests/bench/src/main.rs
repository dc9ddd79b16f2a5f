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

use clap::{Parser, Subcommand, ValueEnum};
use tokio::signal::unix::{SignalKind, signal};

use crate::report::Report;

/// Measures Mullion in a running lab.
#[derive(Debug, Parser)]
#[command(name = "mullion-bench")]
struct Args {
    #[command(subcommand)]
    scenario: Scenario,
    /// How to print the figures.
    #[arg(long, global = true, value_enum, default_value_t = Output::Table)]
    output: Output,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Output {
    /// Markdown tables.
    Table,
    /// JSON, with every single measurement.
    Json,
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
    match report.and_then(|report| print(&report, args.output)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("mullion-bench: {error:#}");
            ExitCode::FAILURE
        }
    }
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

fn print(report: &Report, output: Output) -> anyhow::Result<()> {
    match output {
        Output::Table => print!("{report}"),
        Output::Json => println!("{}", serde_json::to_string_pretty(report)?),
    }
    Ok(())
}
