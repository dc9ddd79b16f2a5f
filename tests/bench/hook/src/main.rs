//! The figures of `libvgpu.so` in `docs/benchmarks.md`: `tests/bench/run hook`.

mod calls;
#[cfg(target_arch = "x86_64")]
mod counts;
#[path = "../../src/report.rs"]
mod report;
mod starts;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};

use crate::report::{Printing, Report};

/// Measures libvgpu.so over the fake driver's stub, always beside the stub alone.
#[derive(Debug, Parser)]
#[command(name = "mullion-hook-bench")]
struct Args {
    #[command(subcommand)]
    scenario: Scenario,
    /// The library that `vgpu-hook/build` made.
    #[arg(long, global = true, default_value = "libvgpu.so")]
    library: PathBuf,
    /// The fake driver; the one beside this program unless given.
    #[arg(long, global = true)]
    driver: Option<PathBuf>,
    #[command(flatten)]
    printing: Printing,
}

#[derive(Debug, Subcommand)]
enum Scenario {
    /// What allocations, launches and questions for memory cost.
    Calls(calls::Options),
    /// What `cuInit` costs, and starting many programs at once.
    Starts(starts::Options),
    /// Instructions and system calls, counted.
    #[cfg(target_arch = "x86_64")]
    Counts(counts::Options),
}

/// Where everything is.
#[derive(Debug)]
struct Files {
    calls: PathBuf,
    library: PathBuf,
    driver: PathBuf,
}

impl Files {
    fn container(&self, setup: hook_bench::Setup) -> Result<hook_bench::Container> {
        hook_bench::Container::new(&self.calls, &self.library, &self.driver, setup)
    }
}

fn main() -> ExitCode {
    let args = Args::parse();
    args.printing.end("mullion-hook-bench", run(args))
}

fn run(args: Args) -> Result<Report> {
    let calls = hook_bench::program::beside()?;
    let driver = args.driver.unwrap_or_else(|| calls.with_file_name("libcuda.so"));
    let files = Files { calls, library: args.library, driver };
    hook_bench::container::enter_namespace()?;
    let mut report = match args.scenario {
        Scenario::Calls(options) => calls::run(&files, &options)?,
        Scenario::Starts(options) => starts::run(&files, &options)?,
        #[cfg(target_arch = "x86_64")]
        Scenario::Counts(options) => counts::run(&files, &options)?,
    };
    report.notes.push(load()?);
    Ok(report)
}

/// How busy the machine is at the end of a run.
fn load() -> Result<String> {
    let text = std::fs::read_to_string("/proc/loadavg")?;
    let last_minute = text.split(' ').next().context("an empty /proc/loadavg")?;
    let cores = std::thread::available_parallelism()?;
    Ok(format!("Load of the last minute {last_minute} on {cores} cores."))
}
