//! The process outside the lab: it holds the lock, starts the lab's process tree, and when that is gone, however it
//! went, removes what namespaces do not take along: cgroups and the lab's folder.
//!
//! It dies last. If it is killed itself, the supervisor sees its pipe close and does the same from inside.

use std::fs::{self, File};
use std::io::{BufRead, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use nix::fcntl::{Flock, FlockArg};
use nix::sys::signal::{SigSet, Signal, kill};
use nix::sys::socket::{getsockopt, sockopt};
use nix::unistd::Pid;

use crate::layout::{self, root};
use crate::{cgroup, client};

/// Runs the lab described by `plan` (JSON, passed on as it is). Standard input is a pipe from `lab up`: its end before
/// the word `keep` means that `lab up` was killed, and the lab goes with it. Standard output goes to `lab up`.
pub fn run(plan: &str) -> Result<()> {
    let mut signals = SigSet::empty();
    signals.add(Signal::SIGTERM);
    signals.add(Signal::SIGINT);
    signals.thread_block().context("cannot block signals")?;
    let Some(_lock) = lock()? else {
        println!("! a lab is running already: use it, or end it with `lab down`");
        std::process::exit(1);
    };
    remove_leftovers()?;
    // Everybody's keys and tokens are in there.
    fs::set_permissions(root(), fs::Permissions::from_mode(0o700))
        .context("cannot close the lab's folder to others")?;
    for dir in ["logs", "fake"] {
        fs::create_dir_all(layout::run(dir))
            .with_context(|| format!("cannot make {}/{dir}", root().display()))?;
    }
    let mut tree = Command::new("unshare")
        .args(["--mount", "--net", "--pid", "--ipc", "--fork", "--kill-child", "--mount-proc", "--"])
        .arg(std::env::current_exe().context("cannot find this program")?)
        .args(["supervise", plan])
        .stdin(Stdio::piped())
        .spawn()
        .context("cannot start unshare (package util-linux)")?;
    let outer = tree.id().cast_signed();
    std::thread::spawn(move || {
        let kept = std::io::stdin().lock().lines().map_while(Result::ok).any(|line| line == "keep");
        if !kept {
            end_tree(outer);
        }
    });
    std::thread::spawn(move || {
        let _ = signals.wait();
        end_tree(outer);
    });
    // Held open as long as this process lives: its end tells the supervisor that we are gone.
    let leash = tree.stdin.take();
    let _ = tree.wait();
    wait_for_supervisor();
    let cleaned = remove_leftovers()
        .and_then(|()| fs::remove_dir_all(root()).context("cannot remove the lab's folder"));
    if let Err(error) = &cleaned {
        let _ = writeln!(std::io::stdout(), "! {error:#}");
    }
    drop(leash);
    cleaned
}

/// The lock on the lab's folder, `None` while a lab runs. One that is just being cleaned up is waited for.
fn lock() -> Result<Option<Flock<File>>> {
    let deadline = Instant::now() + Duration::from_secs(15);
    loop {
        fs::create_dir_all(root())
            .with_context(|| format!("cannot make {}: the lab needs root", root().display()))?;
        let dir = File::open(root()).with_context(|| format!("cannot open {}", root().display()))?;
        let Ok(dir) = Flock::lock(dir, FlockArg::LockExclusiveNonblock) else {
            if client::supervisor_pid().is_ok() || Instant::now() > deadline {
                return Ok(None);
            }
            std::thread::sleep(Duration::from_millis(50));
            continue;
        };
        // The former holder may have removed the folder between our open and our lock.
        let ours = dir.metadata().context("cannot read the lock")?.ino();
        if fs::metadata(root()).is_ok_and(|now| now.ino() == ours) {
            return Ok(Some(dir));
        }
    }
}

/// Whether some reaper holds the lock, that is, a lab runs or is being cleaned up.
fn is_locked() -> bool {
    File::open(root()).is_ok_and(|dir| Flock::lock(dir, FlockArg::LockExclusiveNonblock).is_err())
}

/// Kills the supervisor, or `unshare` when it has not started one yet.
fn end_tree(unshare: i32) {
    match child_of(unshare) {
        // `unshare` ends after its child, which ends after everything in its pid namespace.
        Some(supervisor) => kill(Pid::from_raw(supervisor), Signal::SIGKILL),
        None => kill(Pid::from_raw(unshare), Signal::SIGKILL),
    }
    .ok();
}

/// The first child of a process, by `/proc`.
fn child_of(parent: i32) -> Option<i32> {
    fs::read_dir("/proc").ok()?.flatten().find_map(|entry| {
        let pid: i32 = entry.file_name().to_str()?.parse().ok()?;
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // After the bracketed name: state, parent.
        let of = stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse::<i32>().ok()?;
        (of == parent).then_some(pid)
    })
}

/// Waits until nobody listens on the control socket any more; needed where `unshare` was killed before its child.
fn wait_for_supervisor() {
    let deadline = Instant::now() + Duration::from_secs(20);
    while Instant::now() < deadline {
        let Ok(stream) = UnixStream::connect(layout::control_socket()) else { return };
        if let Ok(peer) = getsockopt(&stream, sockopt::PeerCredentials) {
            let _ = kill(Pid::from_raw(peer.pid()), Signal::SIGKILL);
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Empties the lab's folder and removes its cgroups; the caller holds the lock.
fn remove_leftovers() -> Result<()> {
    wait_for_supervisor();
    cgroup::remove_all(Duration::from_secs(15))?;
    for entry in fs::read_dir(root()).context("cannot read the lab's folder")?.flatten() {
        let path = entry.path();
        let removed = if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            fs::remove_dir_all(&path)
        } else {
            fs::remove_file(&path)
        };
        removed.with_context(|| format!("cannot remove {}", path.display()))?;
    }
    Ok(())
}

/// `lab down`: ends the supervisor and waits until the reaper is done. Says whether there was a lab.
///
/// # Errors
/// When something is left after half a minute.
pub fn down() -> Result<()> {
    if let Ok(to) = std::env::var("MULLION_LAB_LOGS") {
        let copied =
            Command::new("cp").args(["-a", "--", &layout::run("logs").to_string_lossy(), &to]).status();
        if !copied.is_ok_and(|status| status.success()) {
            eprintln!("lab: could not copy the logs to {to}");
        }
    }
    let deadline = Instant::now() + Duration::from_secs(30);
    // A folder that nobody holds is what a killed lab left.
    let was_there = root().exists();
    if let Ok(pid) = client::supervisor_pid() {
        let _ = kill(Pid::from_raw(pid), Signal::SIGTERM);
    }
    let patience = Instant::now() + Duration::from_secs(5);
    while is_locked() && Instant::now() < deadline {
        if Instant::now() > patience
            && let Ok(pid) = client::supervisor_pid()
        {
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    let Some(_lock) = lock()? else {
        anyhow::bail!(
            "the lab is still there after 30 s: see `lab status` and the processes that hold {} open",
            root().display()
        )
    };
    // Nothing, unless the reaper was killed as well.
    remove_leftovers()?;
    fs::remove_dir(root()).context("cannot remove the lab's folder")?;
    eprintln!("lab: {}", if was_there { "ended, and nothing of it is left" } else { "no lab was running" });
    Ok(())
}
