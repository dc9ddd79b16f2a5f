//! Writes the CDI spec of a simulated node, in the shape that `nvidia-ctk cdi generate` gives.

mod spec;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use clap::Parser;
use fake_state::Store;

use spec::{Naming, Sources, Spec};

/// Writes a CDI spec of kind nvidia.com/gpu for the cards of a simulated node.
#[derive(Debug, Parser)]
#[command(version)]
struct Args {
    /// State file of the node.
    #[arg(long, env = fake_state::STATE_ENV)]
    state: PathBuf,
    /// Folder with the node's device nodes: nvidia0, nvidiactl and so on.
    #[arg(long)]
    dev_root: PathBuf,
    /// Folder with the driver's libraries, or a root that holds them under usr/lib/x86_64-linux-gnu.
    #[arg(long)]
    driver_root: PathBuf,
    /// How devices are named.
    #[arg(long, value_enum, default_value_t = Naming::Index)]
    naming: Naming,
    /// Program for the createContainer hooks; none are written without it.
    #[arg(long)]
    hooks: Option<PathBuf>,
    /// Containers see the state file and write to its folder: what their drivers are given counts on the node.
    #[arg(long)]
    share_state: bool,
    /// File to write, as YAML when its name ends in .yaml or .yml, else as JSON.
    #[arg(long)]
    output: PathBuf,
}

fn main() -> Result<()> {
    let args = Args::parse();
    let state = Store::open(&args.state).and_then(|s| s.read());
    let state = state.map_err(|e| coded(e.code(), e))?;
    let sources = Sources {
        dev_root: absolute(&args.dev_root)?,
        driver_root: absolute(&args.driver_root)?,
        hooks: args.hooks,
        shared_state: args.share_state.then(|| absolute(&args.state)).transpose()?,
    };
    let yaml = args.output.extension().is_some_and(|e| e == "yaml" || e == "yml");
    let text = Spec::of(&state, &sources, args.naming)
        .and_then(|spec| if yaml { spec.yaml() } else { spec.json() })
        .map_err(|e| coded(e.code(), e))?;
    replace(&args.output, &text)
}

/// An error under its stable name.
fn coded(code: &'static str, error: impl std::error::Error + Send + Sync + 'static) -> anyhow::Error {
    anyhow::Error::new(error).context(code)
}

/// Hosts' paths in a spec are absolute.
fn absolute(path: &Path) -> Result<PathBuf> {
    fs::canonicalize(path).with_context(|| format!("cannot find {}", path.display()))
}

/// A runtime that watches the folder sees a whole spec or none: what it reads ends in .json or .yaml.
fn replace(output: &Path, text: &str) -> Result<()> {
    let new = output.with_extension("new");
    fs::write(&new, text).with_context(|| format!("cannot write {}", new.display()))?;
    fs::rename(&new, output).with_context(|| format!("cannot replace {}", output.display()))
}
