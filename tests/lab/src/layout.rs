//! Where the lab keeps things, and its addresses.
//!
//! One lab per name and machine: the folder is also the lock (see `reap`). What must be seen from outside (sockets, logs,
//! kubeconfigs, fake driver states) lies on the machine's own filesystem; what containers and etcd write lies in
//! tmpfs mounts that exist only inside the lab.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use anyhow::{Result, bail};

use serde::{Deserialize, Serialize};

/// The API server's address, on the bridge that joins nodes and controllers.
pub const API_ADDRESS: &str = "10.97.0.1";
/// Where a kubeconfig points.
pub const API_URL: &str = "https://10.97.0.1:6443";
/// Host name under which the API server calls the webhook; no kube-proxy, so `/etc/hosts` resolves it.
pub const WEBHOOK_HOST: &str = "mullion-webhook.mullion-system.svc";
/// Most nodes with a kubelet: their addresses are 10.97.0.11 and up.
pub const MAX_NODES: usize = 60;
/// Most controllers: their addresses are 10.97.0.101 and up.
pub const MAX_CONTROLLERS: usize = 20;

/// Variable that names a second lab on one machine, beside the unnamed one; names are short words.
pub const NAME_VARIABLE: &str = "MULLION_LAB_NAME";

static NAME: OnceLock<String> = OnceLock::new();

/// What comes after the fixed part of the lab's names: nothing, or `-<name>`.
fn suffix() -> &'static str {
    NAME.get_or_init(|| {
        std::env::var(NAME_VARIABLE).ok().and_then(|name| parse_name(&name)).unwrap_or_default()
    })
}

/// `-<name>`, empty for the unnamed lab, `None` where the name cannot be part of a path and a cgroup.
fn parse_name(name: &str) -> Option<String> {
    let fits = name.len() <= 20 && name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit());
    fits.then(|| if name.is_empty() { String::new() } else { format!("-{name}") })
}

/// The lab's name, empty for the unnamed one.
pub fn name() -> &'static str {
    suffix().trim_start_matches('-')
}

/// Refuses a lab name that [`suffix`] would not take.
pub fn check_name() -> Result<()> {
    match std::env::var(NAME_VARIABLE) {
        Ok(name) if parse_name(&name).is_none() => {
            bail!("{NAME_VARIABLE}={name:?}: use up to 20 lower-case letters and digits")
        }
        _ => Ok(()),
    }
}

/// The lab's folder.
pub fn root() -> &'static Path {
    static ROOT: OnceLock<PathBuf> = OnceLock::new();
    ROOT.get_or_init(|| PathBuf::from(format!("/run/mullion-lab{}", suffix())))
}

/// Parent of every pod's cgroup, in each hierarchy.
pub fn cgroup() -> String {
    format!("lab{}", suffix())
}

/// What `lab up` was asked for, passed down to the supervisor.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Plan {
    /// Nodes with a kubelet, in order.
    pub nodes: Vec<NodePlan>,
    /// How many nodes without a kubelet.
    pub fake_nodes: usize,
    /// Whether Mullion's own parts run.
    pub mullion: bool,
    /// How many controller and scheduler pairs.
    pub controllers: usize,
    /// Whether every pair's scheduler decides, instead of the one that leads.
    pub all_schedulers_active: bool,
    /// Where Mullion's parts send their traces, if anywhere.
    pub otlp_endpoint: Option<String>,
    /// Folder of the cluster's programs.
    pub parts: PathBuf,
    /// Folder of Mullion's programs.
    pub bin: PathBuf,
    /// Root of the repository.
    pub source: PathBuf,
}

/// One node with a kubelet.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct NodePlan {
    /// Its name in the cluster.
    pub name: String,
    /// Card profile of its fake driver, as `fake_state::profile` names them.
    pub cards: String,
    /// Place in the list, which decides its addresses.
    pub index: usize,
}

impl NodePlan {
    /// Address of the kubelet.
    pub fn address(&self) -> String {
        format!("10.97.0.{}", 11 + self.index)
    }

    /// Subnet of its pods.
    pub fn pod_cidr(&self) -> String {
        format!("10.98.{}.0/24", 11 + self.index)
    }

    /// The node's files, in a tmpfs that exists only inside the lab.
    pub fn dir(&self) -> PathBuf {
        root().join("nodes").join(&self.name)
    }

    /// State file of the node's fake driver, seen from inside and outside.
    pub fn fake_state(&self) -> PathBuf {
        fake_state(&self.name)
    }

    /// Name of the lab's end of the node's network cable.
    pub fn link(&self) -> String {
        format!("lab-n{}", self.index)
    }
}

/// Address of the `index`-th controller.
pub fn controller_address(index: usize) -> String {
    format!("10.97.0.{}", 101 + index)
}

/// `controller`, `controller-2`, …
pub fn numbered(name: &str, index: usize) -> String {
    if index == 0 { name.to_owned() } else { format!("{name}-{}", index + 1) }
}

/// State file of the fake driver of `node`.
pub fn fake_state(node: &str) -> PathBuf {
    run("fake").join(node).join("state.json")
}

/// A path in the lab's folder.
pub fn run(name: &str) -> PathBuf {
    root().join(name)
}

/// The supervisor's control socket.
pub fn control_socket() -> PathBuf {
    run("control.sock")
}

/// Log of a part.
pub fn log(part: &str) -> PathBuf {
    run("logs").join(format!("{part}.log"))
}

/// The API server's audit log, one JSON object per line.
pub fn audit_log() -> PathBuf {
    run("logs").join("apiserver-audit.jsonl")
}

/// Kubeconfig of the cluster's administrator.
pub fn admin_kubeconfig() -> PathBuf {
    run("admin.kubeconfig")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_labs() {
        for (name, want) in
            [("", Some("")), ("two", Some("-two")), ("../x", None), ("A", None), ("a-b", None)]
        {
            assert_eq!(parse_name(name).as_deref(), want, "{name:?}");
        }
    }
}
