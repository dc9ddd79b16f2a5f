//! The lab's first process: pid 1 of its namespaces. When it ends, however it ends, the kernel ends every part and
//! takes the network and the mounts away; the reaper outside does the rest.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use nix::sched::{CloneFlags, setns, unshare};
use nix::sys::signal::{SigSet, Signal, kill};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};

use crate::children::Children;
use crate::layout::{self, Plan};
use crate::part::{Fault, Parts, Spec, Status};
use crate::{bringup, cgroup, mounts};

/// What a client asks over the control socket; one line of JSON each way.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "lowercase")]
pub enum Request {
    /// The state of everything.
    Status,
    /// A fault on a part.
    Fault {
        /// Its name.
        part: String,
        /// What to do.
        fault: Fault,
    },
}

/// What the supervisor answers.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Reply {
    /// To [`Request::Status`].
    Status(Box<LabStatus>),
    /// Done; a word on how.
    Done(String),
    /// Refused or failed; why.
    Failed(String),
}

/// The state of the lab.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LabStatus {
    /// Whether `lab up` came to its end.
    pub ready: bool,
    /// What was asked for.
    pub plan: Plan,
    /// Node name -> process that holds its namespaces (pid inside the lab).
    pub holders: std::collections::BTreeMap<String, i32>,
    /// Every part.
    pub parts: Vec<Status>,
}

/// The running lab, as its threads share it.
#[derive(Debug)]
pub struct Lab {
    /// What was asked for.
    pub plan: Plan,
    /// Its child processes.
    pub children: Children,
    /// Its parts.
    pub parts: Parts,
    /// Node or controller name -> process that holds its namespaces.
    pub holders: Mutex<std::collections::BTreeMap<String, i32>>,
    ready: AtomicBool,
    began: Instant,
}

impl Lab {
    /// Tells whoever waits in `lab up`, and the supervisor's log.
    pub fn say(&self, text: &str) {
        tell(&format!("= {:5.1}s {text}", self.began.elapsed().as_secs_f32()));
    }

    /// Writes to the supervisor's log.
    pub fn note(&self, text: &str) {
        tell(&format!("- {:5.1}s {text}", self.began.elapsed().as_secs_f32()));
    }

    /// Starts a part.
    pub fn start(&self, name: &str, spec: Spec) -> Result<()> {
        self.parts.start(&self.children, name, spec)
    }

    /// The PATH of parts.
    pub fn path(&self) -> String {
        self.parts.path.clone()
    }

    /// Path of one of the cluster's programs.
    pub fn part(&self, program: &str) -> String {
        self.plan.parts.join(program).to_string_lossy().into_owned()
    }

    /// The process that holds the namespaces of `name`.
    pub fn holder(&self, name: &str) -> Result<i32> {
        let holders = self.holders.lock().unwrap_or_else(PoisonError::into_inner);
        holders.get(name).copied().with_context(|| format!("{name} has no namespaces yet"))
    }

    /// Waits until `probe` gives something, and gives up when `part` died or `limit` passed.
    ///
    /// # Errors
    /// Says what was waited for, with the last lines of the part's log.
    pub fn wait_for<T>(
        &self,
        what: &str,
        part: &str,
        limit: Duration,
        mut probe: impl FnMut() -> Option<T>,
    ) -> Result<T> {
        let deadline = Instant::now() + limit;
        loop {
            if let Some(value) = probe() {
                return Ok(value);
            }
            if let Some(exit) = self.parts.ended(&self.children, part) {
                anyhow::bail!("{part} ended ({exit}) before {what}; its log ends with\n{}", log_tail(part));
            }
            if Instant::now() > deadline {
                anyhow::bail!(
                    "no {what} within {} s; the log of {part} ends with\n{}",
                    limit.as_secs(),
                    log_tail(part)
                );
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

/// The last lines of a part's log.
fn log_tail(part: &str) -> String {
    let text = fs::read(layout::log(part)).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<_> = text.lines().collect();
    lines[lines.len().saturating_sub(15)..].join("\n")
}

/// Writes a line to `lab up`, if it still listens, and to the supervisor's log.
fn tell(line: &str) {
    let _ = writeln!(std::io::stdout(), "{line}");
    let log = fs::OpenOptions::new().create(true).append(true).open(layout::log("supervisor"));
    if let Ok(mut log) = log {
        let _ = writeln!(log, "{line}");
    }
}

/// Runs the lab until it is told to end. Called as pid 1 of new namespaces, standard input a pipe from the reaper.
pub fn run(plan: Plan) -> Result<()> {
    let mut signals = SigSet::empty();
    signals.add(Signal::SIGTERM);
    signals.add(Signal::SIGINT);
    // Before any thread exists, so that all inherit it and only the waiting one sees the signals.
    signals.thread_block().context("cannot block signals")?;
    let outside = mounts::enter_lab()?;
    let path =
        format!("{}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", plan.parts.display());
    let lab = Arc::new(Lab {
        plan,
        children: Children::default(),
        parts: Parts::new(path),
        holders: Mutex::default(),
        ready: AtomicBool::new(false),
        began: Instant::now(),
    });
    std::thread::spawn(move || {
        let _ = signals.wait();
        std::process::exit(0);
    });
    std::thread::spawn(move || {
        // The reaper never writes: what comes is the end of the pipe, and with it the duty to clean up.
        let _ = std::io::stdin().read(&mut [0]);
        end_without_reaper(&outside);
    });
    let reaping = Arc::clone(&lab);
    std::thread::spawn(move || reaping.children.reap());
    let serving = Arc::clone(&lab);
    let listener = UnixListener::bind(layout::control_socket()).context("cannot make the control socket")?;
    std::thread::spawn(move || serve(&serving, &listener));
    if let Err(error) = bringup::run(&lab) {
        tell(&format!("! {}", format!("{error:#}").replace('\n', "\n! ")));
        std::process::exit(1);
    }
    lab.ready.store(true, Ordering::Relaxed);
    tell(". ready");
    loop {
        std::thread::park();
    }
}

/// The reaper was killed: do its work and end. `outside` is a mount namespace without the lab's mounts.
fn end_without_reaper(outside: &fs::File) -> ! {
    // Everyone but the sender, which is pid 1.
    let _ = kill(Pid::from_raw(-1), Signal::SIGKILL);
    // A thread shares its root and working directory with the others and may not leave until it has its own.
    let _ = unshare(CloneFlags::CLONE_FS);
    let _ = setns(outside, CloneFlags::CLONE_NEWNS);
    let _ = cgroup::remove_all(Duration::from_secs(10));
    let _ = fs::remove_dir_all(layout::root());
    std::process::exit(1);
}

fn serve(lab: &Arc<Lab>, listener: &UnixListener) {
    for stream in listener.incoming().flatten() {
        let lab = Arc::clone(lab);
        std::thread::spawn(move || {
            let _ = answer(&lab, &stream);
        });
    }
}

fn answer(lab: &Lab, stream: &UnixStream) -> Result<()> {
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line)?;
    let reply = match serde_json::from_str(&line) {
        Ok(Request::Status) => Reply::Status(Box::new(LabStatus {
            ready: lab.ready.load(Ordering::Relaxed),
            plan: lab.plan.clone(),
            holders: lab.holders.lock().unwrap_or_else(PoisonError::into_inner).clone(),
            parts: lab.parts.status(&lab.children),
        })),
        Ok(Request::Fault { part, fault }) => match lab.parts.fault(&lab.children, &part, fault) {
            Ok(done) => Reply::Done(done),
            Err(error) => Reply::Failed(format!("{error:#}")),
        },
        Err(error) => Reply::Failed(format!("not a request: {error}")),
    };
    let mut stream = stream;
    writeln!(stream, "{}", serde_json::to_string(&reply)?)?;
    Ok(())
}
