//! `cuInit`, alone and of many at once.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Args;
use hook_bench::{Container, Kind, Program, Setup};
use serde_json::json;

use crate::Files;
use crate::report::{Report, Table};

/// Settings.
#[derive(Debug, Args)]
pub struct Options {
    /// Processes that are attached, and that start at once.
    #[arg(long, default_value_t = 300)]
    processes: usize,
    /// Programs whose `cuInit` is timed, of each kind.
    #[arg(long, default_value_t = 30)]
    programs: usize,
    /// Times that all start at once.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
}

/// Measures both.
///
/// # Errors
/// When a program fails.
pub fn run(files: &Files, options: &Options) -> Result<Report> {
    let mut init = Table::new(&["cuInit, µs", "least", "median", "most", "target"]);
    let mut values = serde_json::Map::new();
    for attached in [0, options.processes] {
        let container = files.container(Setup::default())?;
        eprintln!("cuInit with {attached} processes");
        let _others = start_all(&container, Kind::Hooked, attached)?;
        let (mut alone, mut part) = (Vec::new(), Vec::new());
        let offset = container.offset_of_init()?;
        for _ in 0..options.programs {
            let mut program = Program::start(&mut container.command(Kind::Bare))?;
            program.up()?;
            alone.push(micros(Duration::from_nanos(program.step("init")?)));
            let mut program = Program::start(&mut container.command(Kind::Hooked))?;
            program.up()?;
            part.push(micros(Duration::from_nanos(program.step(&format!("attach {offset}"))?)));
        }
        ensure!(
            container.hot()?.attached == (attached + options.programs) as u64,
            "not every process attached to the container"
        );
        row(&mut init, format!("the library's part, {attached} processes attached"), &part, "1,000");
        if attached == 0 {
            row(&mut init, "the fake driver's part".to_owned(), &alone, "");
        }
        values.insert(format!("attach_us_{attached}"), json!(part));
        values.insert(format!("driver_us_{attached}"), json!(alone));
    }
    let mut starts = Table::new(&["ms", "least", "median", "most", "target"]);
    let kinds = [(Kind::Bare, "without the library"), (Kind::Hooked, "with it")];
    let mut rounds = kinds.map(|_| (Vec::new(), Vec::new()));
    for round in 0..options.rounds {
        for ((kind, _), (all, inits)) in kinds.iter().zip(&mut rounds) {
            eprintln!("round {round}, {kind:?}");
            let container = files.container(Setup::default())?;
            let began = Instant::now();
            let mut programs = started(&container, *kind, options.processes)?;
            let up = Instant::now();
            for program in &mut programs {
                program.tell("init")?;
            }
            for program in &mut programs {
                program.hear()?;
            }
            inits.push(millis(up.elapsed()));
            all.push(millis(began.elapsed()));
            let attached = if *kind == Kind::Hooked { options.processes } else { 0 };
            ensure!(container.hot()?.attached == attached as u64, "not every process attached");
        }
    }
    for ((kind, name), (all, inits)) in kinds.iter().zip(&rounds) {
        let target = if *kind == Kind::Hooked { "1,000" } else { "" };
        row(
            &mut starts,
            format!("{} programs at once, {name}: exec to the last cuInit", options.processes),
            all,
            target,
        );
        row(&mut starts, format!("their cuInit alone, {name}"), inits, "");
        values.insert(format!("starts_ms_{kind:?}"), json!({ "all": all, "inits": inits }));
    }
    Ok(Report {
        title: format!(
            "Starting: {} programs of each kind, {} rounds of {} at once",
            options.programs, options.rounds, options.processes
        ),
        tables: vec![init, starts],
        notes: vec![
            "The library's part is timed in a program whose driver is initialised already.".to_owned(),
        ],
        values: serde_json::Value::Object(values),
    })
}

/// Programs that are up, and have not called `cuInit`.
fn started(container: &Container, kind: Kind, count: usize) -> Result<Vec<Program>> {
    let mut programs = Vec::new();
    for _ in 0..count {
        programs.push(Program::start(&mut container.command(kind))?);
    }
    for program in &mut programs {
        program.up()?;
    }
    Ok(programs)
}

fn start_all(container: &Container, kind: Kind, count: usize) -> Result<Vec<Program>> {
    let mut programs = started(container, kind, count)?;
    for program in &mut programs {
        program.step("init").context("one of many")?;
    }
    Ok(programs)
}

fn micros(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e6
}

fn millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

fn row(table: &mut Table, name: String, sample: &[f64], target: &str) {
    let mut sorted = sample.to_vec();
    sorted.sort_by(f64::total_cmp);
    let at = |place: usize| sorted.get(place).map_or(String::new(), |value| format!("{value:.0}"));
    table.row([name, at(0), at(sorted.len() / 2), at(sorted.len().saturating_sub(1)), target.to_owned()]);
}
