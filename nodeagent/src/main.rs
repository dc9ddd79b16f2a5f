//! `mullion-nodeagent`: parses flags, starts telemetry, runs the agent until it is told to stop.

use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{ArgMatches, Args as _, CommandFactory, FromArgMatches, Parser, Subcommand};
use kube::Client;
use mullion_audit::cli::AuditArgs;
use mullion_nodeagent::agent;
use mullion_nodeagent::config::{Args, Settings};
use mullion_nodeagent::error::Error;
use mullion_nodeagent::monitor::reap;
use mullion_telemetry::source_chain;
use tokio::signal::unix::{SignalKind, signal};
use tracing::{error, warn};

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

fn main() -> ExitCode {
    // Started by the agent itself, many times: without a runtime, flags or a log.
    if std::env::args_os().nth(1).is_some_and(|word| word == reap::COMMAND) {
        return reap::run();
    }
    start()
}

#[tokio::main]
async fn start() -> ExitCode {
    let cli = match parse(std::env::args_os()) {
        Ok(cli) => cli,
        Err(refused) => refused.exit(),
    };
    match cli.command {
        Some(Command::Audit(args)) => match mullion_audit::cli::run(&args).await {
            Ok(code) => code,
            Err(failed) => {
                eprintln!("{}: {}", failed.code(), source_chain(&failed));
                ExitCode::from(2)
            }
        },
        Some(Command::Run(args)) => run(&cli.telemetry, *args).await,
        None => run(&cli.telemetry, cli.run).await,
    }
}

/// Reads the command line. A flag of the agent before a command would not reach it, and is refused.
fn parse(words: impl IntoIterator<Item = impl Into<std::ffi::OsString> + Clone>) -> Result<Cli, clap::Error> {
    let mut command = Cli::command();
    let matches = command.try_get_matches_from_mut(words)?;
    if let Some((name, flag)) = misplaced(&matches) {
        let text = format!(
            "--{flag} stands before `{name}` and would be ignored: write it behind `{name}`, or leave the command out"
        );
        return Err(command.error(ErrorKind::ArgumentConflict, text));
    }
    Cli::from_arg_matches(&matches)
}

fn misplaced(matches: &ArgMatches) -> Option<(&str, String)> {
    let name = matches.subcommand_name()?;
    let own = Args::augment_args(clap::Command::new("run"));
    let given = |id: &str| matches.value_source(id) == Some(ValueSource::CommandLine);
    let flag = own.get_arguments().find(|arg| given(arg.get_id().as_str()))?.get_long()?.to_owned();
    Some((name, flag))
}

async fn run(telemetry: &mullion_telemetry::Args, args: Args) -> ExitCode {
    let guard = match mullion_telemetry::init("mullion-nodeagent", env!("CARGO_PKG_VERSION"), telemetry) {
        Ok(guard) => guard,
        Err(failed) => {
            eprintln!("mullion-nodeagent: {}: {}", failed.code(), source_chain(&failed));
            return ExitCode::FAILURE;
        }
    };
    let result = serve(args).await;
    if let Err(failed) = &result {
        error!(code = failed.code(), error = %source_chain(failed), "the agent ends");
    }
    // Spans that are lost are no reason to call a run failed.
    if let Err(failed) = guard.shutdown() {
        warn!(code = failed.code(), error = %source_chain(&failed), "spans lost");
    }
    if result.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

async fn serve(args: Args) -> Result<(), Error> {
    // Another provider in the graph would make the first handshake fail; the error says that one is set already.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let settings = Settings::load(args)?;
    let client = Client::try_default()
        .await
        .map_err(Error::api("find the API server: set KUBECONFIG, or run in a pod with a service account"))?;
    let listen = |kind, name| signal(kind).map_err(|source| Error::Signal { name, source });
    let mut terminate = listen(SignalKind::terminate(), "SIGTERM")?;
    let mut interrupt = listen(SignalKind::interrupt(), "SIGINT")?;
    let stop = async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    };
    agent::run(settings, client, stop).await
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(words: &str) -> Result<Option<String>, String> {
        let cli = parse(words.split_whitespace()).map_err(|e| e.to_string())?;
        Ok(match cli.command {
            Some(Command::Run(args)) => args.node_name,
            Some(Command::Audit(_)) => None,
            None => cli.run.node_name,
        })
    }

    #[test]
    fn no_flag_is_ignored_wherever_it_stands() {
        let named = Ok(Some("x".to_owned()));
        assert_eq!(node("agent --node-name x"), named);
        assert_eq!(node("agent run --node-name x"), named);
        assert_eq!(node("agent --log-format json run --node-name x --log-level debug"), named, "global");
        for words in ["agent --node-name x run", "agent --state-dir /x audit verify"] {
            let refused = node(words).unwrap_err();
            assert!(refused.contains("stands before"), "{words}: {refused}");
        }
    }
}
