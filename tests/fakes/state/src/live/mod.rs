//! What the processes of a node really have of its cards, beside the state file: `<state file>.live`.
//!
//! A fixed layout ([`layout`]) that every process maps. A process claims a slot when it starts the driver;
//! the bytes that the card gave it and the work that it handed in stand there, so that the node's NVML shows
//! them and that a card is full for everybody at once.
//!
//! - **Liveness**: a lock byte at `(1 << 40) + slot`, an open-file-description lock that a private mapping of
//!   one page pins, so that it lasts exactly as long as the address space. Whoever can lock the byte of a slot in use may
//!   clear the slot, after the slot's release delay.
//! - **Host pid**: a POSIX lock at `(1 << 41) + slot` of `<state file>.live.pids`; `F_GETLK` answers the holder's pid in the
//!   caller's pid namespace, and 0 for one that is not in it.
//! - **Memory**: the bytes of a card are the sum over its slots; giving is done under the card's lock word, which holds
//!   the slot of its holder, so that clearing a dead slot also frees the locks that it held.
//! - **Work**: see [`work`].
#![expect(unsafe_code, reason = "maps a file that processes share")]

pub mod layout;
mod lock;
pub mod work;

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt};
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::Mutex;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicU64, AtomicUsize};

use nix::libc;

use crate::{Error, store};
use layout::{CARDS, MAGIC, Region, SLOTS, Share, Slot, VERSION};

/// Lock byte of slot 0 for liveness.
const ALIVE: i64 = 1 << 40;
/// Lock byte of slot 0 for the pid.
const PID: i64 = 1 << 41;
/// No slot claimed.
const NONE: usize = usize::MAX;
/// Looks for dead processes are at least this far apart, ns.
const REAP_EVERY: u64 = 5_000_000;

/// The live region of a node, or of this process alone.
#[derive(Debug)]
pub struct Live {
    region: &'static Region,
    path: PathBuf,
    file: Option<File>,
    /// Where the POSIX locks are. A file of its own that stays open: closing any descriptor of a file drops them, and claiming a
    /// slot closes some of the region's.
    pids: Option<File>,
    /// Keeps the liveness lock where a mapping does not (overlayfs).
    pin: std::sync::OnceLock<File>,
    slot: AtomicUsize,
    reaped: AtomicU64,
}

/// A process on a card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LiveProcess {
    /// Its slot.
    pub slot: usize,
    /// In the caller's pid namespace where the lock tells it, else as it knows itself.
    pub pid: u32,
    /// Bytes that the card gave it.
    pub given: u64,
    /// Contexts on the card.
    pub contexts: u64,
    /// Its address space is gone, its memory not yet.
    pub dead: bool,
}

/// Path of the live file of a state file.
#[must_use]
pub fn path(state: &Path) -> PathBuf {
    store::with_suffix(state, ".live")
}

fn io(action: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Error {
    let path = path.to_owned();
    move |source| Error::Io { action, path, source }
}

fn map(file: Option<&File>) -> std::io::Result<&'static Region> {
    use std::os::fd::AsRawFd as _;
    let (flags, fd) = match file {
        Some(file) => (libc::MAP_SHARED, file.as_raw_fd()),
        None => (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE, -1),
    };
    // SAFETY: a new mapping; the file is at least as long as the region.
    let start = unsafe {
        libc::mmap(ptr::null_mut(), size_of::<Region>(), libc::PROT_READ | libc::PROT_WRITE, flags, fd, 0)
    };
    if start == libc::MAP_FAILED {
        return Err(std::io::Error::last_os_error());
    }
    // SAFETY: page aligned, long enough, never unmapped, and every bit pattern of atomics is valid.
    Ok(unsafe { &*start.cast::<Region>() })
}

impl Live {
    /// A region of this process alone.
    ///
    /// # Errors
    /// [`Error::Io`] when the system gives no memory.
    pub fn private() -> Result<Self, Error> {
        let path = PathBuf::from("(private)");
        let region = map(None).map_err(io("map", &path))?;
        region.high_water.store(1, SeqCst);
        let live = Self::with(region, path, None, None);
        live.slot.store(0, SeqCst);
        Ok(live)
    }

    fn with(region: &'static Region, path: PathBuf, file: Option<File>, pids: Option<File>) -> Self {
        Self {
            region,
            path,
            file,
            pids,
            pin: std::sync::OnceLock::new(),
            slot: AtomicUsize::new(NONE),
            reaped: AtomicU64::new(0),
        }
    }

    /// The region of the node with that state file, made where there is none.
    ///
    /// # Errors
    /// [`Error::Io`] when it cannot be made or mapped, [`Error::ForeignLive`] for a file of another layout.
    pub fn open(state: &Path) -> Result<Self, Error> {
        let path = path(state);
        let make = |path: &Path| {
            let mut options = OpenOptions::new();
            options.create(true).read(true).write(true).truncate(false).mode(0o666);
            let file = options.open(path).map_err(io("open", path))?;
            // Containers of other users share the file; only its owner can say so, and the first one is.
            let _ = file.set_permissions(PermissionsExt::from_mode(0o666));
            Ok(file)
        };
        let file = make(&path)?;
        let pids = make(&store::with_suffix(&path, ".pids"))?;
        let length = u64::try_from(size_of::<Region>()).unwrap_or(u64::MAX);
        if file.metadata().map_err(io("look at", &path))?.len() < length {
            // Growing is idempotent: every process makes it the same length.
            file.set_len(length).map_err(io("grow", &path))?;
        }
        let region = map(Some(&file)).map_err(io("map", &path))?;
        match region.magic.load(SeqCst) {
            0 => {
                region.version.store(VERSION, SeqCst);
                region.magic.store(MAGIC, SeqCst);
            }
            MAGIC if region.version.load(SeqCst) == VERSION => {}
            _ => return Err(Error::ForeignLive { path }),
        }
        Ok(Self::with(region, path, Some(file), Some(pids)))
    }

    /// Claims a slot for this process; does nothing when it has one.
    ///
    /// # Errors
    /// [`Error::Io`] when the lock byte cannot be set, [`Error::LiveFull`] when every slot is in use.
    pub fn claim(&self, release_delay_ms: u32) -> Result<(), Error> {
        if self.file.is_none() || self.own().is_some() {
            return Ok(());
        }
        self.reap(work::now(self.region));
        for index in 0..SLOTS {
            let slot = &self.region.slots[index];
            if slot.pid.load(SeqCst) != 0 {
                continue;
            }
            if !self.pin_slot(index)? {
                continue;
            }
            // A slot that is dead but not yet cleared stays taken: its memory is still on the cards.
            if slot.pid.load(SeqCst) != 0 {
                continue;
            }
            slot.clear();
            slot.release_delay_ms.store(release_delay_ms, SeqCst);
            self.region.high_water.fetch_max(u32::try_from(index + 1).unwrap_or(0), SeqCst);
            slot.pid.store(std::process::id(), SeqCst);
            if let Some(pids) = &self.pids {
                let _ = lock::set_pid(pids, PID + offset(index));
            }
            self.slot.store(index, SeqCst);
            return Ok(());
        }
        Err(Error::LiveFull { path: self.path.clone(), slots: SLOTS })
    }

    /// Locks the liveness byte for as long as this address space lives.
    fn pin_slot(&self, index: usize) -> Result<bool, Error> {
        use std::os::fd::AsRawFd as _;
        let open = || OpenOptions::new().read(true).write(true).open(&self.path);
        let file = open().map_err(io("open", &self.path))?;
        if !lock::try_own(&file, ALIVE + offset(index)).map_err(io("lock", &self.path))? {
            return Ok(false);
        }
        // SAFETY: a new mapping of one page, which nobody looks at.
        let page = unsafe {
            libc::mmap(ptr::null_mut(), 4096, libc::PROT_READ, libc::MAP_SHARED, file.as_raw_fd(), 0)
        };
        if page == libc::MAP_FAILED {
            return Err(io("map", &self.path)(std::io::Error::last_os_error()));
        }
        // SAFETY: the page that was just mapped; a forked child must not keep the slot alive.
        unsafe { libc::madvise(page, 4096, libc::MADV_DONTFORK) };
        drop(file);
        let probe = open().map_err(io("open", &self.path))?;
        if lock::is_held(&probe, ALIVE + offset(index)).map_err(io("probe", &self.path))? {
            return Ok(true);
        }
        // The mapping does not hold the file (overlayfs): keep the descriptor.
        let kept = lock::try_own(&probe, ALIVE + offset(index)).map_err(io("lock", &self.path))?;
        if kept {
            let _ = self.pin.set(probe);
        }
        Ok(kept)
    }

    /// This process's slot.
    #[must_use]
    pub fn own(&self) -> Option<usize> {
        let slot = self.slot.load(SeqCst);
        (slot != NONE).then_some(slot)
    }

    /// The mapped words.
    #[must_use]
    pub fn region(&self) -> &'static Region {
        self.region
    }

    /// Whether other processes see this region.
    #[must_use]
    pub fn is_shared(&self) -> bool {
        self.file.is_some()
    }

    pub(crate) fn slots(&self) -> &'static [Slot] {
        let high = self.region.high_water.load(SeqCst) as usize;
        &self.region.slots[..high.min(SLOTS)]
    }

    pub(crate) fn share(&self, card: usize) -> Option<&'static Share> {
        self.region.slots.get(self.own()?)?.cards.get(card)
    }

    /// Gives this process `bytes` of a card that holds `capacity` bytes in all; false when it is full.
    #[must_use]
    pub fn give(&self, card: usize, bytes: u64, capacity: u64) -> bool {
        let Some(share) = self.share(card) else { return false };
        if self.give_once(card, share, bytes, capacity) {
            return true;
        }
        // The memory of processes that died may be due.
        self.reaped.store(0, SeqCst);
        self.reap(work::now(self.region));
        let given = self.give_once(card, share, bytes, capacity);
        if !given {
            self.region.cards[card].full.fetch_add(1, SeqCst);
        }
        given
    }

    fn give_once(&self, card: usize, share: &Share, bytes: u64, capacity: u64) -> bool {
        let _held = self.hold(card);
        let after = self.sum(card).saturating_add(bytes);
        if after > capacity {
            return false;
        }
        share.given.fetch_add(bytes, SeqCst);
        self.region.cards[card].peak.fetch_max(after, SeqCst);
        true
    }

    /// Gives `bytes` back to the card.
    pub fn take_back(&self, card: usize, bytes: u64) {
        if let Some(share) = self.share(card) {
            share.given.fetch_sub(bytes, SeqCst);
        }
    }

    /// Counts a context of this process on a card, or one fewer.
    pub fn count_context(&self, card: usize, more: bool) {
        if let Some(share) = self.share(card) {
            if more {
                share.contexts.fetch_add(1, SeqCst)
            } else {
                share.contexts.fetch_sub(1, SeqCst)
            };
        }
    }

    fn sum(&self, card: usize) -> u64 {
        let given = self.slots().iter().map(|s| s.cards[card].given.load(SeqCst));
        given.fold(0, u64::saturating_add)
    }

    /// Bytes that the card gave, over all processes.
    #[must_use]
    pub fn given(&self, card: usize) -> u64 {
        self.reap(work::now(self.region));
        if card < CARDS { self.sum(card) } else { 0 }
    }

    /// Bytes that the card gave this process.
    #[must_use]
    pub fn given_here(&self, card: usize) -> u64 {
        self.share(card).map_or(0, |s| s.given.load(SeqCst))
    }

    /// The processes that have something of the card and are in this process's pid namespace, as a driver that knows of namespaces
    /// lists them.
    #[must_use]
    pub fn processes(&self, card: usize) -> Vec<LiveProcess> {
        self.reap(work::now(self.region));
        let mut found = Vec::new();
        for (index, slot) in self.slots().iter().enumerate() {
            let Some(share) = slot.cards.get(card) else { break };
            let (given, contexts) = (share.given.load(SeqCst), share.contexts.load(SeqCst));
            let pid = slot.pid.load(SeqCst);
            if pid == 0 || (given == 0 && contexts == 0) {
                continue;
            }
            let dead = slot.died.load(SeqCst) != 0;
            if let Some(pid) = self.pid_of(index) {
                found.push(LiveProcess { slot: index, pid, given, contexts, dead });
            }
        }
        found
    }

    /// The pid of a slot's process in this process's pid namespace; none where that has no such process. A process that lost its lock
    /// is believed, as is this one, whose locks it cannot ask about.
    pub(crate) fn pid_of(&self, index: usize) -> Option<u32> {
        let named = self.region.slots[index].pid.load(SeqCst);
        match self.pids.as_ref().filter(|_| self.own() != Some(index)) {
            None => Some(named),
            Some(pids) => match lock::holder(pids, PID + offset(index)) {
                lock::Holder::Nobody => Some(named),
                lock::Holder::Pid(pid) => Some(pid),
                lock::Holder::Elsewhere => None,
            },
        }
    }

    /// Ends the work of dead processes, frees the locks that they held, and clears their slots when their memory is due.
    pub fn reap(&self, now: u64) {
        static REAPING: Mutex<()> = Mutex::new(());
        let Some(file) = &self.file else { return };
        let last = self.reaped.load(SeqCst);
        if last != 0 && now < last.saturating_add(REAP_EVERY) {
            return;
        }
        // A slot's byte keeps other processes out, this the threads that share the descriptor.
        let Ok(_alone) = REAPING.try_lock() else { return };
        self.reaped.store(now, SeqCst);
        for (index, slot) in self.slots().iter().enumerate() {
            if slot.pid.load(SeqCst) == 0 || self.own() == Some(index) {
                continue;
            }
            let byte = ALIVE + offset(index);
            if matches!(lock::try_own(file, byte), Ok(true)) {
                self.bury(index, slot, now);
                let _ = lock::release_own(file, byte);
            }
        }
    }

    /// What is to be done about a dead process while its byte is held.
    fn bury(&self, index: usize, slot: &Slot, now: u64) {
        if slot.pid.load(SeqCst) == 0 {
            return;
        }
        let first = slot.died.compare_exchange(0, now, SeqCst, SeqCst);
        for card in &slot.cards {
            card.submitted.store(card.done.load(SeqCst), SeqCst);
        }
        self.free_locks(index);
        let due = first.err().unwrap_or(now) + u64::from(slot.release_delay_ms.load(SeqCst)) * 1_000_000;
        if now >= due {
            slot.clear();
            slot.pid.store(0, SeqCst);
        }
    }

    fn free_locks(&self, index: usize) {
        let holder = u32::try_from(index + 1).unwrap_or(0);
        for card in &self.region.cards {
            let _ = card.lock.compare_exchange(holder, 0, SeqCst, SeqCst);
        }
    }

    /// Holds a card against every other process and thread.
    pub(crate) fn hold(&self, card: usize) -> Held {
        let word = &self.region.cards[card].lock;
        // An observer has no slot; it takes a number that nobody else has.
        let me = self.own().map_or(u32::MAX, |s| u32::try_from(s + 1).unwrap_or(u32::MAX));
        let mut turns = 0_u32;
        while word.compare_exchange_weak(0, me, SeqCst, SeqCst).is_err() {
            turns += 1;
            if turns.is_multiple_of(64) {
                std::thread::yield_now();
            }
            if turns.is_multiple_of(4096) {
                self.reaped.store(0, SeqCst);
                self.reap(work::now(self.region));
            }
        }
        Held { word }
    }
}

fn offset(index: usize) -> i64 {
    i64::try_from(index).unwrap_or(0)
}

/// A card held.
#[derive(Debug)]
pub(crate) struct Held {
    word: &'static std::sync::atomic::AtomicU32,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.word.store(0, SeqCst);
    }
}

impl Slot {
    /// Everything but the pid to zero.
    fn clear(&self) {
        for share in &self.cards {
            share.given.store(0, SeqCst);
            share.submitted.store(0, SeqCst);
            share.done.store(0, SeqCst);
            share.contexts.store(0, SeqCst);
            share.next_stretch.store(0, SeqCst);
            for word in share.windows.iter().chain(share.stretches.as_flattened()) {
                word.store(0, SeqCst);
            }
        }
        self.died.store(0, SeqCst);
        self.release_delay_ms.store(0, SeqCst);
    }
}

/// Has `handler` called in every child that this process forks.
///
/// # Safety
/// The handler runs in a child of a process with threads: it must be async-signal-safe.
pub unsafe fn at_fork(handler: extern "C" fn()) {
    // SAFETY: the caller vouches for the handler.
    unsafe { libc::pthread_atfork(None, None, Some(handler_of(handler))) };
}

fn handler_of(handler: extern "C" fn()) -> unsafe extern "C" fn() {
    handler
}
