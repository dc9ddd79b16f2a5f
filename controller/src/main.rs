//! `mullion-controller`: reads its settings, starts telemetry, runs until it is told to stop.

use std::process::ExitCode;

use clap::Parser;
use mullion_controller::config::Args;

fn main() -> ExitCode {
    let args = Args::parse();
    match run(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("mullion-controller: {}", mullion_telemetry::source_chain(error.as_ref()));
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> anyhow::Result<()> {
    let telemetry =
        mullion_telemetry::init("mullion-controller", env!("CARGO_PKG_VERSION"), &args.telemetry)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let outcome = runtime.block_on(mullion_controller::app::run(args));
    if let Err(error) = &outcome {
        let cause = mullion_telemetry::source_chain(error);
        tracing::error!(code = error.code(), error = cause, "controller ends");
    }
    telemetry.shutdown()?;
    Ok(outcome?)
}
