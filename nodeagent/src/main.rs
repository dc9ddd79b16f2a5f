//! `mullion-nodeagent`: parses flags, starts telemetry, runs the agent until it is told to stop.

use std::process::ExitCode;

use anyhow::Context;
use clap::{Parser, Subcommand};
use kube::Client;
use mullion_audit::cli::AuditArgs;
use mullion_nodeagent::agent;
use mullion_nodeagent::config::{Args, Settings};
use tokio::signal::unix::{SignalKind, signal};
use tracing::error;

#[derive(Debug, Parser)]
#[command(
    name = "mullion-nodeagent",
    version,
    about = "Gives each container its own slice of this node's GPUs"
)]
struct Cli {
    #[command(flatten)]
    telemetry: mullion_telemetry::Args,
    #[command(flatten)]
    run: Args,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Runs the agent; what happens when no command is given.
    Run(Box<Args>),
    /// Reads the node's audit log.
    Audit(AuditArgs),
}

#[tokio::main]
async fn main() -> ExitCode {
    let cli = Cli::parse();
    let result = match cli.command {
        Some(Command::Audit(args)) => {
            return match mullion_audit::cli::run(&args).await {
                Ok(code) => code,
                Err(failed) => {
                    eprintln!("{}: {}", failed.code(), mullion_telemetry::source_chain(&failed));
                    ExitCode::from(2)
                }
            };
        }
        Some(Command::Run(args)) => run(&cli.telemetry, *args).await,
        None => run(&cli.telemetry, cli.run).await,
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failed) => {
            eprintln!("mullion-nodeagent: {failed:#}");
            ExitCode::FAILURE
        }
    }
}

async fn run(telemetry: &mullion_telemetry::Args, args: Args) -> anyhow::Result<()> {
    let guard = mullion_telemetry::init("mullion-nodeagent", env!("CARGO_PKG_VERSION"), telemetry)?;
    // Another provider in the graph would make the first handshake fail; the error says that one is set already.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let settings = Settings::load(args)?;
    let client = Client::try_default()
        .await
        .context("no way to the API server: set KUBECONFIG, or run in a pod with a service account")?;
    let mut terminate = signal(SignalKind::terminate()).context("cannot listen for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot listen for SIGINT")?;
    let stop = async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    };
    let result = agent::run(settings, client, stop).await;
    if let Err(failed) = &result {
        error!(code = failed.code(), error = %mullion_telemetry::source_chain(failed), "the agent ends");
    }
    guard.shutdown()?;
    Ok(result?)
}
