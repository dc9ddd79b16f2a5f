//! The calls that programs make all the time.

use anyhow::{Result, ensure};
use clap::Args;
use hook_bench::{Call, Container, Kind, Program, Setup};
use serde::Serialize;

use crate::Files;
use crate::report::{Report, Table};

/// Settings.
#[derive(Debug, Args)]
pub struct Options {
    /// Samples per case and program, taken in turns; each of about a millisecond.
    #[arg(long, default_value_t = 200)]
    samples: usize,
    /// Runs only the cases whose name contains this.
    #[arg(long)]
    case: Option<String>,
}

/// Length of a sample in ns.
const SAMPLE_NS: u128 = 1_000_000;
/// Calls that go before: tables grow, launches get known, pages come in.
const WARM: u32 = 20_000;

#[derive(Clone, Copy, Debug)]
struct Case {
    name: &'static str,
    call: Call,
    setup: Setup,
    /// Allocations that stay.
    live: usize,
    bytes: usize,
    /// Processes of the container, the measured one included.
    processes: usize,
    target: &'static str,
}

const BLOCK: usize = 2 << 20;
const PIECE: usize = 512;

fn cases() -> Vec<Case> {
    let one = Setup { cards: 1, core: 100, step: BLOCK };
    let pair = Case {
        name: "alloc + free, 2 MiB, 0 live",
        call: Call::Pair(BLOCK),
        setup: one,
        live: 0,
        bytes: BLOCK,
        processes: 1,
        target: "60 ns",
    };
    let pieces = Setup { step: PIECE, ..one };
    let launch = Case { name: "launch, no limit", call: Call::Launch, target: "8 ns above", ..pair };
    let limited = Setup { core: 50, ..one };
    vec![
        pair,
        Case { name: "alloc + free, 2 MiB, 1,000 live", live: 1_000, target: "flat", ..pair },
        Case { name: "alloc + free, 2 MiB, 10,000 live", live: 10_000, target: "flat", ..pair },
        Case { name: "alloc + free, 2 MiB, 100,000 live", live: 100_000, target: "flat", ..pair },
        Case { name: "alloc + free, 2 MiB, 8 processes", processes: 8, target: "flat", ..pair },
        Case { name: "alloc + free, 2 MiB, 64 processes", processes: 64, target: "flat", ..pair },
        Case { name: "alloc + free, 2 MiB, 256 processes", processes: 256, target: "", ..pair },
        Case {
            name: "alloc + free, 512 B, 0 live",
            call: Call::Pair(PIECE),
            bytes: PIECE,
            setup: pieces,
            ..pair
        },
        Case {
            name: "alloc + free, 512 B, 100,000 live",
            call: Call::Pair(PIECE),
            bytes: PIECE,
            setup: pieces,
            live: 100_000,
            target: "flat",
            ..pair
        },
        Case {
            name: "alloc + random free, 2 MiB, 100,000 live",
            call: Call::RandomPair(BLOCK),
            live: 100_000,
            target: "400 ns",
            ..pair
        },
        Case {
            name: "alloc + random free, 512 B, 100,000 live",
            call: Call::RandomPair(PIECE),
            bytes: PIECE,
            setup: pieces,
            live: 100_000,
            target: "400 ns",
            ..pair
        },
        Case { name: "memory info", call: Call::Info, target: "50 ns", ..pair },
        Case { name: "cuCtxGetDevice (not hooked)", call: Call::Device, target: "", ..pair },
        launch,
        Case { name: "launch, no limit, two cards", setup: Setup { cards: 2, ..one }, ..launch },
        Case { name: "launch, 50 %", setup: limited, target: "20 ns above", ..launch },
        Case {
            name: "launch, 50 %, two cards",
            setup: Setup { cards: 2, ..limited },
            target: "20 ns above",
            ..launch
        },
    ]
}

#[derive(Debug, Serialize)]
struct Outcome {
    case: &'static str,
    target: &'static str,
    /// ns for one call, by sample.
    bare: Vec<f64>,
    hooked: Vec<f64>,
}

/// The least and the middle one.
fn least_and_median(sample: &[f64]) -> (f64, f64) {
    let mut sorted = sample.to_vec();
    sorted.sort_by(f64::total_cmp);
    let at = |place: usize| sorted.get(place).copied().unwrap_or(0.0);
    (at(0), at(sorted.len() / 2))
}

/// Measures all cases.
///
/// # Errors
/// When a program fails, or waits where it should not.
pub fn run(files: &Files, options: &Options) -> Result<Report> {
    let mut outcomes = Vec::new();
    for case in cases() {
        if options.case.as_ref().is_none_or(|wanted| case.name.contains(wanted)) {
            eprintln!("{}", case.name);
            outcomes.push(measure(files, &case, options.samples)?);
        }
    }
    let mut table = Table::new(&[
        "ns",
        "stub alone",
        "with libvgpu.so",
        "above the stub",
        "target",
        "median: alone",
        "with",
        "above",
    ]);
    for outcome in &outcomes {
        let ((bare, bare_middle), (hooked, middle)) =
            (least_and_median(&outcome.bare), least_and_median(&outcome.hooked));
        table.row([
            outcome.case.to_owned(),
            format!("{bare:.1}"),
            format!("{hooked:.1}"),
            format!("{:.1}", hooked - bare),
            outcome.target.to_owned(),
            format!("{bare_middle:.1}"),
            format!("{middle:.1}"),
            format!("{:.1}", middle - bare_middle),
        ]);
    }
    let mut notes = vec![
        "The first figures are the least of all samples, which other programs on the machine disturb least."
            .to_owned(),
    ];
    notes.extend(flatness(&outcomes));
    Ok(Report {
        title: format!("Calls, {} samples of each program in turns, one millisecond each", options.samples),
        tables: vec![table],
        notes,
        values: serde_json::to_value(&outcomes)?,
    })
}

/// How much the pairs grow with what lives.
fn flatness(outcomes: &[Outcome]) -> Option<String> {
    let least = |wanted: &str| {
        let outcome = outcomes.iter().find(|outcome| outcome.case.ends_with(wanted))?;
        Some(least_and_median(&outcome.hooked).0)
    };
    let first = least("2 MiB, 0 live")?;
    let growth = |wanted: &str| Some((least(wanted)? / first - 1.0) * 100.0);
    Some(format!(
        "A pair takes {:+.0} % with 100,000 live allocations, {:+.0} % with 64 processes (target: within 20 %).",
        growth("free, 2 MiB, 100,000 live")?,
        growth("64 processes")?
    ))
}

fn measure(files: &Files, case: &Case, samples: usize) -> Result<Outcome> {
    let container = files.container(case.setup)?;
    let others = others(&container, case.processes - 1)?;
    let start = |kind| -> Result<(Program, u32)> {
        let mut program = Program::start(&mut container.command(kind))?;
        program.ready(case.live, case.bytes)?;
        program.call(case.call, WARM)?;
        let count = count(&mut program, case.call)?;
        Ok((program, count))
    };
    let (mut bare, bare_count) = start(Kind::Bare)?;
    let (mut hooked, hooked_count) = start(Kind::Hooked)?;
    let waits = container.hot()?.cards[0].waits;
    let (mut alone, mut with) = (Vec::new(), Vec::new());
    for _ in 0..samples {
        alone.push(sample(&mut bare, case.call, bare_count)?);
        with.push(sample(&mut hooked, case.call, hooked_count)?);
    }
    let hot = container.hot()?;
    ensure!(hot.cards[0].waits == waits, "{}: launches waited, so this is not their cost", case.name);
    let paid = hot.cards[0].spent_ns > 0;
    ensure!(
        paid == (case.setup.core < 100 && case.call == Call::Launch),
        "{}: launches {} for their time",
        case.name,
        if paid { "paid" } else { "did not pay" }
    );
    drop(others);
    Ok(Outcome { case: case.name, target: case.target, bare: alone, hooked: with })
}

/// Other processes of the container: attached, each with an allocation, doing nothing.
fn others(container: &Container, count: usize) -> Result<Vec<Program>> {
    let mut others = Vec::new();
    for _ in 0..count {
        let mut other = Program::start(&mut container.command(Kind::Hooked))?;
        other.ready(1, BLOCK)?;
        others.push(other);
    }
    Ok(others)
}

/// How many calls a sample has.
fn count(program: &mut Program, call: Call) -> Result<u32> {
    let spent = program.call(call, WARM)?.as_nanos().max(1);
    Ok(u32::try_from(SAMPLE_NS * u128::from(WARM) / spent)?.max(1))
}

fn sample(program: &mut Program, call: Call, count: u32) -> Result<f64> {
    Ok(program.call(call, count)?.as_secs_f64() * 1e9 / f64::from(count))
}
