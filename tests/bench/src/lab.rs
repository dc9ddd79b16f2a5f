//! The lab as `lab status --json` shows it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use serde::Deserialize;

/// Name of the real nodes' label; nodes without it have no kubelet.
pub const REAL_NODE_LABEL: &str = "mullion-lab/kubelet";

/// The state of the lab.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Status {
    /// Node or controller name -> process that holds its namespaces.
    pub holders: BTreeMap<String, i32>,
    /// Every part.
    pub parts: Vec<Part>,
    /// The API server's audit log.
    pub audit_log: PathBuf,
    /// What the lab was asked for.
    pub plan: Plan,
}

/// What the lab was asked for, as far as it matters here.
#[derive(Debug, Deserialize)]
pub struct Plan {
    /// Nodes with a kubelet.
    pub nodes: Vec<Node>,
    /// How many nodes without.
    pub fake_nodes: usize,
}

/// A node with a kubelet.
#[derive(Debug, Deserialize)]
pub struct Node {
    /// Place in the list, which decides its address.
    pub index: usize,
}

impl Node {
    /// Address of its kubelet and agent.
    pub fn address(&self) -> String {
        format!("10.97.0.{}", 11 + self.index)
    }
}

/// A supervised program.
#[derive(Debug, Deserialize)]
pub struct Part {
    /// Its name.
    pub name: String,
    /// Its process inside the lab.
    pub pid: i32,
    /// `running`, `stopped`, or how it ended.
    pub state: String,
}

/// Address of the first controller's health and metrics.
pub const CONTROLLER_METRICS: &str = "10.97.0.101:9395";

impl Status {
    /// Asks the lab.
    ///
    /// # Errors
    /// Outside of a running lab.
    pub fn ask() -> Result<Self> {
        let text = mullion_e2e::Lab.run(&["status", "--json"])?;
        serde_json::from_str(&text).context("`lab status --json` has another shape than mullion-bench knows")
    }

    /// Process of a part that runs.
    ///
    /// # Errors
    /// When it does not run.
    pub fn pid(&self, part: &str) -> Result<i32> {
        match self.parts.iter().find(|p| p.name == part) {
            Some(part) if part.state == "running" => Ok(part.pid),
            Some(found) => bail!("{part} is {}: start it with `lab fault {part} restart`", found.state),
            None => bail!("the lab has no part {part}: is it up with Mullion?"),
        }
    }
}

/// A file in the lab's folder.
///
/// # Errors
/// Outside of `lab enter`.
pub fn file(name: &str) -> Result<PathBuf> {
    let run = std::env::var_os("MULLION_LAB_RUN").context("MULLION_LAB_RUN is not set: use `lab enter`")?;
    Ok(Path::new(&run).join(name))
}

/// A part that is down while this value lives, and started again when it is dropped.
#[derive(Debug)]
pub struct PartDown(&'static str);

impl PartDown {
    /// Kills the part, unless it is down already.
    ///
    /// # Errors
    /// When the lab refuses.
    pub fn kill(status: &Status, part: &'static str) -> Result<Self> {
        if status.pid(part).is_ok() {
            mullion_e2e::Lab.fault(part, "kill")?;
        }
        Ok(Self(part))
    }
}

impl Drop for PartDown {
    fn drop(&mut self) {
        if let Err(error) = mullion_e2e::Lab.fault(self.0, "restart") {
            eprintln!("mullion-bench: {} stays down: {error:#}", self.0);
        }
    }
}
