//! The two kube-schedulers that are compared.

use std::fs;
use std::path::PathBuf;
use std::process::Stdio;

use anyhow::{Context, Result, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use tokio::process::{Child, Command};

use crate::lab::{self, Status};
use crate::metrics::{self, Scrape};

/// Name of the scheduler without extenders.
pub const PLAIN: &str = "bench-plain";

/// A kube-scheduler that ends with this value.
#[derive(Debug)]
pub struct Scheduler {
    _process: Child,
    pid: i32,
    port: u16,
    log: PathBuf,
    _folder: tempfile::TempDir,
}

/// A scheduler that is stopped; it goes on when this value is dropped.
#[derive(Debug)]
#[must_use]
pub struct Paused(i32);

impl Scheduler {
    /// Starts one in the controller's network namespace, as the lab's own is.
    ///
    /// # Errors
    /// When the lab's own has no configuration, or the program does not start.
    pub fn start(status: &Status, with_extender: bool, qps: u32) -> Result<Self> {
        let at = lab::file("scheduler.json")?;
        let text = fs::read_to_string(&at).with_context(|| format!("cannot read {}", at.display()))?;
        let original: Value =
            serde_json::from_str(&text).with_context(|| format!("{} is not JSON", at.display()))?;
        let config = configuration(original, with_extender, qps);
        let kubeconfig = config["clientConnection"]["kubeconfig"].as_str().unwrap_or_default();
        let folder = tempfile::tempdir().context("no temporary folder")?;
        let (file, log) = (folder.path().join("config.json"), folder.path().join("log"));
        fs::write(&file, config.to_string()).context("cannot write the scheduler's configuration")?;
        let to = fs::File::create(&log).context("cannot write the scheduler's log")?;
        let holder =
            status.holders.get("controller").context("the lab has no controller: start it with Mullion")?;
        // Its port for health and metrics is not the one of the lab's own.
        let port = if with_extender { 10_261 } else { 10_262 };
        let process = Command::new("nsenter")
            .args([&format!("--target={holder}"), "--net", "--", "kube-scheduler"])
            .arg(format!("--config={}", file.display()))
            .arg(format!("--secure-port={port}"))
            .arg(format!("--authentication-kubeconfig={kubeconfig}"))
            .arg(format!("--authorization-kubeconfig={kubeconfig}"))
            .stdin(Stdio::null())
            .stdout(to.try_clone()?)
            .stderr(to)
            .kill_on_drop(true)
            .spawn()
            .context("cannot start nsenter (package util-linux)")?;
        // nsenter becomes the program, so this is the scheduler's own.
        let pid = process.id().context("kube-scheduler ended at once")?.cast_signed();
        Ok(Self { _process: process, pid, port, log, _folder: folder })
    }

    /// Its process.
    pub const fn pid(&self) -> i32 {
        self.pid
    }

    /// `kubectl get --raw PATH` of its own server, as the lab's administrator.
    pub fn raw(&self, path: &str) -> Command {
        let mut command = Command::new("kubectl");
        command.arg(format!("--server=https://10.97.0.101:{}", self.port));
        // It serves with a certificate that it made itself.
        command.args(["--insecure-skip-tls-verify", "--tls-server-name=", "get", "--raw", path]);
        command.stdin(Stdio::null()).kill_on_drop(true);
        command
    }

    /// Its metrics.
    ///
    /// # Errors
    /// When it does not answer.
    pub async fn metrics(&self) -> Result<Scrape> {
        let output = self.raw("/metrics").output().await.context("cannot start kubectl")?;
        if !output.status.success() {
            bail!("no metrics of kube-scheduler: {}", String::from_utf8_lossy(&output.stderr));
        }
        Ok(metrics::parse(&String::from_utf8_lossy(&output.stdout)))
    }

    /// Stops it.
    ///
    /// # Errors
    /// When it has ended.
    pub fn pause(&self) -> Result<Paused> {
        self.signal(Signal::SIGSTOP)?;
        Ok(Paused(self.pid))
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        kill(Pid::from_raw(self.pid), signal)
            .with_context(|| format!("kube-scheduler has ended; its log ends with\n{}", self.log()))
    }

    /// The end of its log.
    pub fn log(&self) -> String {
        let text = fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(10)..].join("\n")
    }
}

impl Paused {
    /// Lets it go on, and says if that failed.
    ///
    /// # Errors
    /// When it has ended.
    pub fn go_on(self) -> Result<()> {
        kill(Pid::from_raw(self.0), Signal::SIGCONT).context("kube-scheduler has ended")
    }
}

impl Drop for Paused {
    fn drop(&mut self) {
        // A second SIGCONT does nothing.
        let _ = kill(Pid::from_raw(self.0), Signal::SIGCONT);
    }
}

/// The lab's configuration without what would stop a paused scheduler (leader election) or limit it.
fn configuration(mut config: Value, with_extender: bool, qps: u32) -> Value {
    config["leaderElection"]["leaderElect"] = false.into();
    config["clientConnection"]["qps"] = qps.into();
    config["clientConnection"]["burst"] = (2 * qps).into();
    if !with_extender {
        if let Some(config) = config.as_object_mut() {
            config.remove("extenders");
        }
        config["profiles"][0]["schedulerName"] = PLAIN.into();
    }
    config
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_twin_lacks_the_extender_only() {
        let lab = json!({
            "clientConnection": {"kubeconfig": "k", "qps": 200}, "leaderElection": {"leaderElect": true},
            "profiles": [{"schedulerName": "mullion-scheduler"}], "percentageOfNodesToScore": 100, "extenders": [{}],
        });
        let ours = configuration(lab.clone(), true, 9);
        let mut plain = configuration(lab, false, 9);
        assert_eq!(ours["leaderElection"]["leaderElect"], false);
        assert_eq!(plain["profiles"][0]["schedulerName"], PLAIN);
        plain["profiles"] = ours["profiles"].clone();
        plain["extenders"] = ours["extenders"].clone();
        assert_eq!(ours, plain);
    }
}
