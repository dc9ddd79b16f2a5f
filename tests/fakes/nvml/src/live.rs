//! What running programs on the simulated CUDA driver have of the cards, see [`fake_state::live`].

use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use fake_state::live::{self, Live, work};

/// Every region that this process looked at. They stay open: closing a descriptor of the file would drop the lock by which
/// others know this process, if it runs the CUDA driver too.
static OPEN: Mutex<Vec<(PathBuf, &'static Live)>> = Mutex::new(Vec::new());

/// A process with something on a card.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Running {
    pub(crate) pid: u32,
    pub(crate) bytes: u64,
}

/// A process's busy share in its newest full sampling window.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Busy {
    pub(crate) pid: u32,
    /// End of the window, µs since 1970.
    pub(crate) at_us: u64,
    pub(crate) percent: u32,
}

/// The region of a state file; none where no program ever ran on its cards.
pub(crate) fn of(state: &Path) -> Option<&'static Live> {
    let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, live)) = open.iter().find(|(path, _)| path == state) {
        return Some(live);
    }
    if !live::path(state).exists() {
        return None;
    }
    let live: &'static Live = Box::leak(Box::new(Live::open(state).ok()?));
    // A slot of its own, so that what this process holds is freed if it dies.
    live.claim(0).ok()?;
    open.push((state.to_owned(), live));
    Some(live)
}

/// The processes of a card that live, each with what it has of the card now.
pub(crate) fn running(live: &Live, card: usize) -> Vec<Running> {
    let shown = asked();
    if shown == Shown::None {
        return Vec::new();
    }
    let found = live.processes(card).into_iter().filter(|p| !p.dead);
    found
        .map(|p| Running {
            pid: if shown == Shown::Host { HOST + p.pid } else { p.pid },
            bytes: if shown == Shown::Unsized { NOT_AVAILABLE } else { p.given },
        })
        .collect()
}

/// `NVML_VALUE_NOT_AVAILABLE`.
const NOT_AVAILABLE: u64 = u64::MAX;

/// What a process's pid on the host is more than here: no pid of Linux is that large, so a mix-up is found.
const HOST: u32 = 1 << 22;

/// How processes are listed: `FAKE_NVML_PROCESSES`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shown {
    /// Those of the caller's pid namespace, by their pids in it.
    Own,
    /// By their pids on the host, as drivers did that know nothing of namespaces.
    Host,
    /// None at all, as in some containers with such a driver.
    None,
    /// By their pids, and nobody says how much memory: Windows' way of driving a card, and missing privileges with MIG.
    Unsized,
}

/// The environment is read by init.
pub(crate) fn asked() -> Shown {
    static ASKED: OnceLock<Shown> = OnceLock::new();
    *ASKED.get_or_init(|| match std::env::var("FAKE_NVML_PROCESSES").as_deref() {
        Ok("host") => Shown::Host,
        Ok("none") => Shown::None,
        Ok("unsized") => Shown::Unsized,
        _ => Shown::Own,
    })
}

/// Who was busy in a window that ended after `since_us`.
pub(crate) fn busy(live: &Live, card: usize, since_us: u64) -> Vec<Busy> {
    let now_us = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_micros();
    let now_us = u64::try_from(now_us).unwrap_or(u64::MAX);
    let now = work::now(live.region());
    let since = now.saturating_sub(now_us.saturating_sub(since_us).saturating_mul(1000));
    let samples = live.samples(card, since).into_iter();
    let samples = samples.map(|s| Busy {
        pid: s.pid,
        at_us: now_us.saturating_sub(now.saturating_sub(s.end) / 1000),
        percent: u32::try_from((s.busy * 100 + work::WINDOW_NS / 2) / work::WINDOW_NS)
            .unwrap_or(100)
            .min(100),
    });
    samples.filter(|s| s.at_us > since_us).collect()
}
