//! The lab as a test sees it: its commands, and the insides of its nodes.

use std::path::PathBuf;
use std::process::{Command, Output};

use anyhow::{Context, Result, bail};

/// Handle on the running lab.
#[derive(Clone, Copy, Debug)]
pub struct Lab;

fn lab_program() -> PathBuf {
    std::env::var_os("MULLION_LAB")
        .map_or_else(|| PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../lab/lab")), PathBuf::from)
}

fn text(what: &str, output: &Output) -> Result<String> {
    let out = String::from_utf8_lossy(&output.stdout).into_owned();
    if output.status.success() {
        return Ok(out);
    }
    bail!("{what}: {}: {out}{}", output.status, String::from_utf8_lossy(&output.stderr))
}

impl Lab {
    /// `lab ARGS…`.
    ///
    /// # Errors
    /// When the command fails; the text has its output.
    pub fn run(self, args: &[&str]) -> Result<String> {
        let output = Command::new(lab_program()).args(args).output().context("start the lab program")?;
        text(&format!("lab {}", args.join(" ")), &output)
    }

    /// `lab fault PART VERB`.
    ///
    /// # Errors
    /// As [`Self::run`].
    pub fn fault(self, part: &str, verb: &str) -> Result<()> {
        self.run(&["fault", part, verb]).map(drop)
    }

    /// Starts every part again that has ended, as a kubelet would: a kube-scheduler that loses its lease (a pause,
    /// an outage of the API server) exits. Gives the names of those that were started.
    ///
    /// # Errors
    /// As [`Self::run`], and when `lab status` is not what it was.
    pub fn revive(self) -> Result<Vec<String>> {
        let status: serde_json::Value = serde_json::from_str(&self.run(&["status", "--json"])?)?;
        let mut revived = Vec::new();
        for part in status["parts"].as_array().context("lab status without parts")? {
            let name = part["name"].as_str().context("a part without a name")?;
            let state = part["state"].as_str().context("a part without a state")?;
            if state != "running" && state != "stopped" {
                self.fault(name, "restart")?;
                revived.push(name.to_owned());
            }
        }
        Ok(revived)
    }

    /// `lab fake NODE VERB…`.
    ///
    /// # Errors
    /// As [`Self::run`].
    pub fn fake(self, node: &str, verb: &[&str]) -> Result<String> {
        self.run(&[&["fake", node], verb].concat())
    }

    /// `kubectl ARGS…`.
    ///
    /// # Errors
    /// When the command fails; the text has its output.
    pub fn kubectl(self, args: &[&str]) -> Result<String> {
        let output = Command::new("kubectl").args(args).output().context("start kubectl")?;
        text(&format!("kubectl {}", args.join(" ")), &output)
    }

    /// What the kubelet of a node says can be allocated of the count resource.
    ///
    /// # Errors
    /// When the node is not there or has not said yet.
    pub fn slots(self, node: &str) -> Result<i64> {
        let text =
            self.kubectl(&["get", "node", node, "-o", r"jsonpath={.status.allocatable.nvidia\.com/gpu}"])?;
        text.trim().parse().with_context(|| format!("allocatable of {node}: {text:?}"))
    }

    /// Runs a command in a node's namespaces, as somebody logged in there would.
    ///
    /// # Errors
    /// When the command fails; the text has its output.
    pub fn on_node(self, node: &str, command: &[&str]) -> Result<String> {
        let mut args = vec!["enter", "--node", node, "--"];
        args.extend_from_slice(command);
        self.run(&args)
    }

    /// Runs a command in the network namespace of a controller (`controller`, `controller-2`).
    ///
    /// # Errors
    /// When the command fails; the text has its output.
    pub fn beside_controller(self, part: &str, command: &[&str]) -> Result<String> {
        let mut args = vec!["enter", "--part", part, "--"];
        args.extend_from_slice(command);
        self.run(&args)
    }

    /// `mullion-nodeagent audit ARGS… --output json` on a node.
    ///
    /// # Errors
    /// When the command fails or prints no JSON.
    pub fn audit(self, node: &str, args: &[&str]) -> Result<serde_json::Value> {
        // 3 is an answer, too: nothing found.
        let mut command = vec!["sh", "-c", "\"$@\" || [ $? = 3 ]", "sh", "mullion-nodeagent", "audit"];
        command.extend_from_slice(args);
        command.extend_from_slice(&["--output", "json"]);
        let out = self.on_node(node, &command)?;
        serde_json::from_str(&out).with_context(|| format!("audit {args:?} on {node} printed {out}"))
    }
}
