//! The processes that take dead ones' charges off containers' books: see [`crate::monitor::reap`].

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use tracing::{debug, warn};

use crate::monitor::reap::COMMAND;
use crate::monitor::target::Key;

/// So many run at once: a tenant who kills his processes all the time must not keep the node busy.
const MOST: usize = 4;
/// How long a container is left alone after a reaper of its file failed: its tenant cut the file.
const PAUSE_NS: u64 = 60_000_000_000;

/// How long one may take: the kernel goes through all locks on a file for each slot, and a tenant can put down any number.
const LONGEST_NS: u64 = 5_000_000_000;

/// Starts them, and buries them.
#[derive(Debug)]
pub struct Reapers {
    program: PathBuf,
    /// Until when a container is left alone, `CLOCK_MONOTONIC` in ns.
    paused: BTreeMap<Key, u64>,
    /// Those that run, and since when, by the same clock.
    running: BTreeMap<Key, (Child, u64)>,
    /// When one was last started for a container, by the same clock.
    started: BTreeMap<Key, u64>,
}

impl Reapers {
    /// They run `program`, which is the agent's own.
    #[must_use]
    pub fn new(program: &Path) -> Self {
        Self {
            program: program.to_owned(),
            running: BTreeMap::new(),
            paused: BTreeMap::new(),
            started: BTreeMap::new(),
        }
    }

    /// Looks for those that have ended, and ends those that take too long.
    pub fn bury(&mut self, now_ns: u64) {
        self.paused.retain(|_, until| *until > now_ns);
        self.started.retain(|_, at| now_ns.saturating_sub(*at) < PAUSE_NS);
        let (running, paused) = (&mut self.running, &mut self.paused);
        running.retain(|key, (child, since_ns)| match child.try_wait() {
            Ok(None) => {
                if now_ns.saturating_sub(*since_ns) > LONGEST_NS {
                    // It is buried at the next look.
                    let _ = child.kill();
                }
                true
            }
            Ok(Some(status)) if status.success() => false,
            ended => {
                // SIGBUS among others: what it is for.
                debug!(pod_uid = key.0, container = key.1, ?ended, "reaper failed");
                paused.insert(key.clone(), now_ns.saturating_add(PAUSE_NS));
                false
            }
        });
    }

    /// Whether none runs.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.running.is_empty()
    }

    /// Starts one for each that wants it, as far as there is room: for those first who have waited longest, so that a few
    /// which always want one do not keep the others from it.
    pub fn start_all(&mut self, mut wanting: Vec<(Key, io::Result<File>)>, now_ns: u64) {
        wanting.sort_by_key(|(key, _)| self.started.get(key).copied());
        for (key, file) in wanting {
            self.start(&key, now_ns, file);
        }
    }

    /// Starts one for a container, unless one runs or failed a moment ago, or enough are at work. `file` is
    /// the container's, with locks of its own.
    fn start(&mut self, key: &Key, now_ns: u64, file: io::Result<File>) {
        if self.running.len() >= MOST || self.running.contains_key(key) || self.paused.contains_key(key) {
            return;
        }
        let started = file.and_then(|file| {
            Command::new(&self.program)
                .arg(COMMAND)
                .env_clear()
                .stdin(Stdio::from(file))
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
        });
        match started {
            Ok(child) => {
                self.started.insert(key.clone(), now_ns);
                self.running.insert(key.clone(), (child, now_ns));
            }
            Err(error) => {
                warn!(program = ?self.program, %error, "no reaper");
                self.paused.insert(key.clone(), now_ns.saturating_add(PAUSE_NS));
            }
        }
    }
}

impl Drop for Reapers {
    fn drop(&mut self) {
        for (child, _) in self.running.values_mut() {
            // What it leaves undone, the next agent's does. Nobody is left to bury it otherwise.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As with a million locks on the file: it would keep others from their places for ever.
    #[test]
    fn whoever_takes_too_long_is_ended_and_left_alone() {
        // It has no end, whatever it is told. One that is written here is busy while another test forks.
        let mut reapers = Reapers::new(Path::new("/usr/bin/yes"));
        let key = ("pod".to_owned(), "main".to_owned());
        let begin = |reapers: &mut Reapers, now_ns| {
            reapers.start_all(vec![(key.clone(), File::open("/dev/null"))], now_ns);
            !reapers.is_idle()
        };
        assert!(begin(&mut reapers, 1));
        reapers.bury(LONGEST_NS);
        assert!(!reapers.is_idle());
        let late = LONGEST_NS + 2;
        while !reapers.is_idle() {
            reapers.bury(late);
        }
        assert!(!begin(&mut reapers, late), "it would take as long again");
        reapers.bury(late + PAUSE_NS);
        assert!(begin(&mut reapers, late + PAUSE_NS));
    }

    /// Tenants can make their files always look as if somebody had died.
    #[test]
    fn whoever_waits_longest_is_next() {
        let mut reapers = Reapers::new(Path::new("/bin/true"));
        let key = |number: u64| (format!("pod-{number:02}"), "main".to_owned());
        let mut served = std::collections::BTreeSet::new();
        for look in 1..=6 {
            let now_ns = look * 1_000_000_000;
            while !reapers.is_idle() {
                reapers.bury(now_ns);
            }
            let wanting = (0..20).map(|number| (key(number), File::open("/dev/null"))).collect();
            reapers.start_all(wanting, now_ns);
            served.extend(reapers.running.keys().cloned());
        }
        assert_eq!(served.len(), 20, "{served:?}");
    }
}
