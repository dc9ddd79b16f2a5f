//! Parts: the supervised programs of the lab. Nothing restarts one but a command.

use std::collections::BTreeMap;
use std::fs;
use std::process::{Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};

use crate::children::{Children, Exit};
use crate::layout;

/// How to start a part, each time the same way.
#[derive(Clone, Debug, Default)]
pub struct Spec {
    /// Program and arguments.
    pub argv: Vec<String>,
    /// Environment beyond PATH.
    pub env: Vec<(String, String)>,
    /// Process whose network namespace it runs in.
    pub network_of: Option<i32>,
    /// Process whose mount namespace it runs in.
    pub mounts_of: Option<i32>,
}

/// The supervisor's own program (it is pid 1 of the lab), also when the file was replaced since.
const THIS_PROGRAM: &str = "/proc/1/exe";

impl Spec {
    /// A program with its arguments.
    pub fn new(program: impl Into<String>, args: impl IntoIterator<Item = impl Into<String>>) -> Self {
        let words = std::iter::once(program.into()).chain(args.into_iter().map(Into::into));
        Self { argv: words.collect(), ..Self::default() }
    }

    /// With a variable in its environment.
    #[must_use]
    pub fn env(mut self, name: &str, value: impl Into<String>) -> Self {
        self.env.push((name.to_owned(), value.into()));
        self
    }

    /// The command that starts it; `nsenter` replaces itself, so its process id is the program's.
    pub fn command(&self, path: &str) -> Command {
        let mut argv = Vec::new();
        if let Some(pid) = self.mounts_of {
            argv.extend([
                "nsenter".to_owned(),
                format!("--target={pid}"),
                "--mount".into(),
                "--net".into(),
                "--".into(),
            ]);
        } else if let Some(pid) = self.network_of {
            argv.extend(["nsenter".to_owned(), format!("--target={pid}"), "--net".into(), "--".into()]);
        }
        argv.extend([THIS_PROGRAM.to_owned(), "become".into(), "--".into()]);
        argv.extend(self.argv.iter().cloned());
        let mut command = Command::new(&argv[0]);
        command.args(&argv[1..]).env_clear().env("PATH", path).env("HOME", "/root");
        // Tells whose process it is.
        command.env(layout::NAME_VARIABLE, layout::name());
        command.envs(self.env.iter().map(|(name, value)| (name, value))).current_dir("/");
        command
    }
}

/// Turns this process into a part. The supervisor blocks the signals that it waits for, a child inherits that, and a
/// program that cannot hear SIGTERM never ends as it would in an installation.
pub fn become_program(argv: &[String]) -> Result<()> {
    let (program, rest) = argv.split_first().context("no program is given")?;
    nix::sys::signal::SigSet::empty().thread_set_mask().context("cannot unblock the signals")?;
    let error = std::os::unix::process::CommandExt::exec(Command::new(program).args(rest));
    Err(error).with_context(|| format!("cannot start {program}"))
}

/// What `lab fault` does to a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Fault {
    /// SIGKILL; it stays dead until `restart`.
    Kill,
    /// SIGSTOP.
    Stop,
    /// SIGCONT.
    Cont,
    /// SIGKILL if it is alive, then start it again the same way.
    Restart,
}

/// One part as `lab status` shows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Status {
    /// Name, as `lab fault` takes it.
    pub name: String,
    /// Process id inside the lab; the last one when it is dead.
    pub pid: i32,
    /// `running`, `stopped`, or how it ended.
    pub state: String,
    /// How often it was started.
    pub starts: u32,
}

#[derive(Debug)]
struct Part {
    spec: Spec,
    pid: i32,
    starts: u32,
}

/// All parts.
#[derive(Debug)]
pub struct Parts {
    pub(crate) path: String,
    parts: Mutex<BTreeMap<String, Part>>,
}

impl Parts {
    /// No part yet; `path` is the PATH that all get.
    pub fn new(path: String) -> Self {
        Self { path, parts: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Part>> {
        self.parts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts a new part.
    pub fn start(&self, children: &Children, name: &str, spec: Spec) -> Result<()> {
        let mut parts = self.lock();
        if parts.contains_key(name) {
            bail!("part {name} exists already");
        }
        let pid = spawn(children, name, &spec, &self.path)?;
        parts.insert(name.to_owned(), Part { spec, pid, starts: 1 });
        Ok(())
    }

    /// How a part ended, `None` while it runs.
    pub fn ended(&self, children: &Children, name: &str) -> Option<Exit> {
        children.exit(self.lock().get(name)?.pid)
    }

    /// Applies a fault.
    ///
    /// # Errors
    /// When there is no such part, or it is dead and the fault needs it alive.
    pub fn fault(&self, children: &Children, name: &str, fault: Fault) -> Result<String> {
        let mut parts = self.lock();
        let names = parts.keys().cloned().collect::<Vec<_>>().join(", ");
        let part = parts.get_mut(name).with_context(|| format!("no part {name:?}: the parts are {names}"))?;
        let alive = children.exit(part.pid).is_none();
        let signal = match fault {
            Fault::Kill | Fault::Restart => Signal::SIGKILL,
            Fault::Stop => Signal::SIGSTOP,
            Fault::Cont => Signal::SIGCONT,
        };
        if alive {
            kill(Pid::from_raw(part.pid), signal)
                .with_context(|| format!("cannot send {signal} to {name}"))?;
        } else if fault != Fault::Restart {
            bail!("{name} is not running: start it with `lab fault {name} restart`");
        }
        if matches!(fault, Fault::Kill | Fault::Restart)
            && children.wait(part.pid, Instant::now() + Duration::from_secs(20)).is_none()
        {
            bail!("{name} (pid {}) did not end within 20 s of SIGKILL", part.pid);
        }
        if fault == Fault::Restart {
            let before = part.pid;
            part.pid = spawn(children, name, &part.spec, &self.path)?;
            part.starts += 1;
            children.forget(before);
        }
        Ok(format!("{name}: pid {}", part.pid))
    }

    /// Every part's state.
    pub fn status(&self, children: &Children) -> Vec<Status> {
        self.lock()
            .iter()
            .map(|(name, part)| {
                let state = match children.exit(part.pid) {
                    Some(exit) => format!("ended ({exit})"),
                    None if is_stopped(part.pid) => "stopped".to_owned(),
                    None => "running".to_owned(),
                };
                Status { name: name.clone(), pid: part.pid, state, starts: part.starts }
            })
            .collect()
    }
}

fn spawn(children: &Children, name: &str, spec: &Spec, path: &str) -> Result<i32> {
    let at = layout::log(name);
    let log = fs::OpenOptions::new().create(true).append(true).open(&at);
    let log = log.with_context(|| format!("cannot open {}", at.display()))?;
    let mut command = spec.command(path);
    command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
    // A group of its own: a terminal's Ctrl-C must not reach a part.
    std::os::unix::process::CommandExt::process_group(&mut command, 0);
    Ok(children.spawn(&mut command)?.id().cast_signed())
}

/// Whether a process is in state T, by `/proc`.
fn is_stopped(pid: i32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The name in brackets may hold spaces and brackets; the state follows the last one.
    stat.rsplit_once(')').is_some_and(|(_, rest)| rest.trim_start().starts_with('T'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_in_a_node_starts_through_nsenter() {
        let spec = Spec { mounts_of: Some(7), ..Spec::new("/x/kubelet", ["--v=2"]) };
        let command = spec.command("/x");
        let words: Vec<_> = command.get_args().map(|word| word.to_string_lossy().into_owned()).collect();
        assert_eq!(command.get_program(), "nsenter");
        assert_eq!(
            words,
            ["--target=7", "--mount", "--net", "--", THIS_PROGRAM, "become", "--", "/x/kubelet", "--v=2"]
        );
    }
}
