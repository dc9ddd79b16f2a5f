//! What can be counted and needs no clock.

use anyhow::Result;
use clap::Args;
use hook_bench::{Kind, Program, trace};
use serde_json::json;

use crate::Files;
use crate::report::{Report, Table};

/// Settings.
#[derive(Debug, Args)]
pub struct Options {
    /// Calls among which system calls are looked for.
    #[arg(long, default_value_t = 1_000_000)]
    calls: u32,
}

/// Counts.
///
/// # Errors
/// When a program fails or cannot be traced.
pub fn run(files: &Files, options: &Options) -> Result<Report> {
    let mut table = Table::new(&[
        "One call",
        "instructions in libvgpu.so",
        "in the stub",
        "in the program, libc and vDSO",
        &format!("system calls in {} calls", options.calls),
    ]);
    let mut values = Vec::new();
    for (name, call, setup) in trace::cases() {
        eprintln!("{name}");
        let container = files.container(setup)?;
        let mut program = Program::start(&mut container.command(Kind::Hooked))?;
        program.ready(0, 0)?;
        let counted = trace::instructions_of_one(&container, &mut program, call)?;
        let system_calls = trace::system_calls(&mut program, call, options.calls)?;
        table.row([
            name.to_owned(),
            counted.library.to_string(),
            counted.driver.to_string(),
            counted.elsewhere.to_string(),
            system_calls.to_string(),
        ]);
        values.push(json!({
            "case": name, "library": counted.library, "driver": counted.driver, "elsewhere": counted.elsewhere,
            "system_calls": system_calls,
        }));
    }
    Ok(Report {
        title: "Counted by a tracer".to_owned(),
        tables: vec![table],
        notes: vec![
            "Instructions of the ordinary call: one launch in 61 renews a stamp besides, and one in 256 that has to pay \
             is measured."
                .to_owned(),
        ],
        values: serde_json::Value::Array(values),
    })
}
