//! The lab: a real Kubernetes cluster in namespaces of one machine, with fake NVIDIA drivers and Mullion on it.
//! How to use it and what runs where: `README.md` beside this crate.

mod api;
mod apply;
mod archive;
mod bringup;
mod cards;
mod cgroup;
mod children;
mod client;
mod control_plane;
mod fake_nodes;
mod fakes;
mod images;
mod layout;
mod manifests;
mod mounts;
mod mullion;
mod network;
mod node;
mod part;
mod pki;
mod reap;
mod supervisor;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context, Result, bail};
use clap::{Parser, Subcommand};

use crate::layout::{MAX_CONTROLLERS, NodePlan, Plan};
use crate::part::Fault;

/// A real Kubernetes cluster on one machine, with fake NVIDIA drivers.
#[derive(Debug, Parser)]
#[command(name = "lab")]
struct Args {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Start a lab; returns when it is ready, or takes everything down again.
    Up(Up),
    /// Run a command inside the lab, with KUBECONFIG set and kubectl on PATH.
    Enter {
        /// In the mount and network namespaces of this node.
        #[arg(long)]
        node: Option<String>,
        /// In the namespaces of this part: its node's, or the network of its controller.
        #[arg(long, conflicts_with = "node")]
        part: Option<String>,
        /// The command.
        #[arg(last = true, required = true)]
        command: Vec<OsString>,
    },
    /// Drive the fake driver of a node. Without a node or a verb, lists them.
    Fake {
        /// The node.
        node: Option<String>,
        /// The verb and its arguments; without any, the verbs are listed.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        words: Vec<String>,
    },
    /// Kill, stop, continue or restart a part.
    Fault {
        /// The part, as `lab status` names it.
        part: String,
        /// What to do.
        fault: Fault,
    },
    /// Show what runs.
    Status {
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// Print the log of a part.
    Logs {
        /// The part, as `lab status` names it; without one, the parts are listed.
        part: Option<String>,
        /// Keep printing what comes.
        #[arg(long, short)]
        follow: bool,
    },
    /// End the lab and remove everything of it; copies the logs to `$MULLION_LAB_LOGS` first if that is set.
    Down,
    #[command(hide = true)]
    Reap { plan: String },
    #[command(hide = true)]
    Supervise { plan: String },
    #[command(hide = true)]
    HoldNode { node: String },
    #[command(hide = true)]
    HoldNetwork,
    #[command(hide = true)]
    Become {
        #[arg(last = true, required = true)]
        command: Vec<String>,
    },
}

#[derive(Debug, clap::Args)]
struct Up {
    /// Nodes with a kubelet, named node-a, node-b, …
    #[arg(long, default_value_t = 2)]
    nodes: usize,
    /// Further nodes without a kubelet, named fake-0001 and up, for scale.
    #[arg(long, default_value_t = 0)]
    fake_nodes: usize,
    /// Cards per node: NODE=PROFILE,… or one PROFILE for all [default: node-a=h100x4,node-b=a100x2].
    #[arg(long)]
    cards: Option<String>,
    /// The bare cluster, without Mullion.
    #[arg(long)]
    no_mullion: bool,
    /// How many controller and scheduler pairs.
    #[arg(long, default_value_t = 1)]
    controllers: usize,
    /// Let the schedulers of all pairs decide at once, without leader election, to provoke collisions.
    #[arg(long)]
    all_schedulers_active: bool,
    /// Send the traces of Mullion's parts to this OTLP receiver, such as `http://10.97.0.1:4317`.
    #[arg(long, value_name = "URL")]
    otlp_endpoint: Option<String>,
    /// Folder of Mullion's programs [default: `$CARGO_TARGET_DIR/debug`, else `target/debug`].
    #[arg(long, env = "MULLION_BIN_DIR")]
    bin_dir: Option<PathBuf>,
}

fn main() -> ExitCode {
    match layout::check_name().and_then(|()| run(Args::parse().verb)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("lab: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(verb: Verb) -> Result<()> {
    match verb {
        Verb::Up(up) => client::up(&plan(&up)?),
        Verb::Enter { node, part, command } => client::enter(node.as_deref(), part.as_deref(), &command),
        Verb::Fake { node, words } => client::fake(node.as_deref(), &words),
        Verb::Fault { part, fault } => client::fault(&part, fault),
        Verb::Status { json } => client::print_status(json),
        Verb::Logs { part, follow } => client::logs(part.as_deref(), follow),
        Verb::Down => reap::down(),
        Verb::Reap { plan } => reap::run(&plan),
        Verb::Supervise { plan } => {
            supervisor::run(serde_json::from_str(&plan).context("the plan is malformed")?)
        }
        Verb::HoldNode { node } => hold(|| {
            let node: NodePlan = serde_json::from_str(&node)?;
            mounts::enter_node(&node)?;
            network::forward()
        }),
        Verb::HoldNetwork => hold(|| Ok(())),
        Verb::Become { command } => part::become_program(&command),
    }
}

/// Prepares namespaces, says so, and stays for their sake.
fn hold(prepare: impl FnOnce() -> Result<()>) -> Result<()> {
    if let Err(error) = prepare() {
        println!("{error:#}");
        return Err(error);
    }
    println!("ready");
    loop {
        std::thread::park();
    }
}

/// Root of the repository: the wrapper script says, else where this crate was built.
fn source() -> Result<PathBuf> {
    let here = std::env::var_os("MULLION_LAB_SOURCE").map(PathBuf::from);
    let root = here.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../.."));
    root.canonicalize()
        .with_context(|| format!("no repository at {}: set MULLION_LAB_SOURCE", root.display()))
}

fn plan(up: &Up) -> Result<Plan> {
    if up.controllers == 0 || up.controllers > MAX_CONTROLLERS {
        bail!("--controllers {}: give 1 to {MAX_CONTROLLERS}, or --no-mullion", up.controllers);
    }
    let nodes = cards::plan(up.nodes, up.cards.as_deref())?;
    if client::supervisor_pid().is_ok() {
        bail!("a lab is running already: use it, or end it with `lab down`");
    }
    let source = source()?;
    let bin = match &up.bin_dir {
        Some(dir) => dir.clone(),
        None => std::env::var_os("CARGO_TARGET_DIR")
            .map_or_else(|| source.join("target"), PathBuf::from)
            .join("debug"),
    };
    let bin = std::path::absolute(&bin).context("no working directory")?;
    if !up.no_mullion {
        check_built(&bin)?;
    }
    Ok(Plan {
        nodes,
        fake_nodes: up.fake_nodes,
        mullion: !up.no_mullion,
        controllers: up.controllers,
        all_schedulers_active: up.all_schedulers_active,
        otlp_endpoint: up.otlp_endpoint.clone(),
        parts: parts(&source)?,
        bin,
        source,
    })
}

/// Without Mullion's programs the cluster would come up half, and say so after half a minute.
fn check_built(bin: &Path) -> Result<()> {
    let missing: Vec<_> =
        mullion::PROGRAMS.into_iter().filter(|program| !bin.join(program).exists()).collect();
    if !missing.is_empty() {
        bail!(
            "not in {}: {}. Build them with `. tests/env && build_programs` in the repository, or give their folder \
             (--bin-dir), or --no-mullion for the bare cluster",
            bin.display(),
            missing.join(", ")
        );
    }
    Ok(())
}

/// Builds the cluster's programs, or finds them built.
fn parts(source: &Path) -> Result<PathBuf> {
    let script = source.join("tests/lab/parts/build");
    let output = Command::new(&script).stderr(Stdio::inherit()).output();
    let output = output.with_context(|| format!("cannot run {}", script.display()))?;
    if !output.status.success() {
        bail!("{} failed ({}): what it printed says why", script.display(), output.status);
    }
    Ok(PathBuf::from(String::from_utf8(output.stdout)?.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_that_are_not_built_are_named_with_what_to_run() {
        let dir = std::env::temp_dir().join(format!("lab-programs-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let said = check_built(&dir).unwrap_err().to_string();
        for part in mullion::PROGRAMS.into_iter().chain(["build_programs", "--no-mullion"]) {
            assert!(said.contains(part), "{said}");
        }
        for program in mullion::PROGRAMS {
            std::fs::write(dir.join(program), "").unwrap();
        }
        check_built(&dir).unwrap();
        std::fs::remove_file(dir.join("fake-cdi")).unwrap();
        let said = check_built(&dir).unwrap_err().to_string();
        assert!(said.contains(": fake-cdi. "), "{said}");
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
