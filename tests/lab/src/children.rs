//! Child processes of a process that is also everybody's reaper.
//!
//! The supervisor is pid 1 of its namespace: orphans of every part (runtime shims, above all) end up with it and must be
//! reaped, while the exit of its own children must reach whoever waits for them. Hence one thread that reaps, and a
//! table of the children somebody cares about. Spawning holds the table's lock, so no exit is seen before its child is known.

use std::collections::BTreeMap;
use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::errno::Errno;
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid, waitpid};
use nix::unistd::Pid;

/// How a child ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// It returned this code.
    Code(i32),
    /// This signal ended it.
    Signal(i32),
}

impl std::fmt::Display for Exit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Code(code) => write!(f, "exit code {code}"),
            Self::Signal(signal) => write!(f, "signal {signal}"),
        }
    }
}

/// The table of children.
#[derive(Debug, Default)]
pub struct Children {
    known: Mutex<BTreeMap<i32, Option<Exit>>>,
    changed: Condvar,
}

impl Children {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<i32, Option<Exit>>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts `command` and remembers it. The returned handle is for its pipes: never wait on it.
    pub fn spawn(&self, command: &mut Command) -> Result<Child> {
        let mut known = self.lock();
        let child = command.spawn().with_context(|| format!("cannot start {command:?}"))?;
        known.insert(child.id().cast_signed(), None);
        Ok(child)
    }

    /// How `pid` ended, `None` while it runs.
    pub fn exit(&self, pid: i32) -> Option<Exit> {
        self.lock().get(&pid).copied().flatten()
    }

    /// Waits for `pid` until `deadline`; its entry stays for later [`Self::exit`] calls until [`Self::forget`].
    pub fn wait(&self, pid: i32, deadline: Instant) -> Option<Exit> {
        let mut known = self.lock();
        loop {
            match known.get(&pid) {
                Some(Some(exit)) => return Some(*exit),
                None => return None,
                Some(None) => {}
            }
            let left = deadline.checked_duration_since(Instant::now())?;
            known = self.changed.wait_timeout(known, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Drops the entry of a child that ended.
    pub fn forget(&self, pid: i32) {
        self.lock().remove(&pid);
    }

    /// Runs `command` to its end and returns what it printed.
    ///
    /// # Errors
    /// When it does not start, takes more than a minute, or fails; the message holds what it wrote to stderr.
    pub fn run(&self, command: &mut Command) -> Result<String> {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = self.spawn(command)?;
        let pid = child.id().cast_signed();
        let stderr = child.stderr.take();
        let reader = std::thread::spawn(move || {
            let mut text = String::new();
            if let Some(mut pipe) = stderr {
                let _ = pipe.read_to_string(&mut text);
            }
            text
        });
        let mut output = String::new();
        if let Some(mut pipe) = child.stdout.take() {
            pipe.read_to_string(&mut output).with_context(|| format!("cannot read from {command:?}"))?;
        }
        let exit = self.wait(pid, Instant::now() + Duration::from_mins(1));
        self.forget(pid);
        let complaint = reader.join().unwrap_or_default();
        match exit {
            Some(Exit::Code(0)) => Ok(output),
            Some(exit) => bail!("{command:?} ended with {exit}: {}", complaint.trim()),
            None => bail!("{command:?} did not end within a minute"),
        }
    }

    /// Reaps for ever. Runs in a thread of its own, once per process.
    pub fn reap(&self) {
        loop {
            // Look without reaping first: the lock must not be held while nothing happens.
            match waitid(Id::All, WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT) {
                Ok(_) => {}
                Err(Errno::EINTR) => continue,
                Err(_) => {
                    std::thread::sleep(Duration::from_millis(20));
                    continue;
                }
            }
            let mut known = self.lock();
            loop {
                let (pid, exit) = match waitpid(Pid::from_raw(-1), Some(WaitPidFlag::WNOHANG)) {
                    Ok(WaitStatus::Exited(pid, code)) => (pid, Exit::Code(code)),
                    Ok(WaitStatus::Signaled(pid, signal, _)) => (pid, Exit::Signal(signal as i32)),
                    _ => break,
                };
                if let Some(entry) = known.get_mut(&pid.as_raw()) {
                    *entry = Some(exit);
                }
            }
            drop(known);
            self.changed.notify_all();
        }
    }
}
