//! Slots of the usage file: which of them this process owns, and which have lost their owner.
//!
//! A slot is owned by whoever holds the write lock of its byte, far behind the end of the file. The lock belongs to the
//! open file description that the mapping of the file was made from, and that mapping is not inherited by a forked
//! child: so the lock stands exactly as long as this address space, whatever descriptors the program closes, and the
//! kernel frees it at SIGKILL and at exec.
//!
//! Not every file system keeps the lock when the last descriptor goes (overlayfs does not): there a descriptor is kept
//! instead, out of the way of the program's own and closed by exec. A program that closes it all the same, as daemons close
//! whatever they have inherited, loses the lock and lives on: so there the slot also says which process it is (`life`), and
//! has lost its owner when that is gone as well. Only the container's own processes can tell: the agent does not know that
//! process by this pid, and leaves such a slot to them. Elsewhere no descriptor stays open. So there is no lock byte of the older
//! kind either by which the agent could learn this process's host pid: it would need one.

#![expect(unsafe_code, reason = "registers a handler at fork")]

use core::ffi::{CStr, c_int, c_void};
use core::sync::atomic::AtomicI32;
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

use mullion_region::{extension, usage};

use super::fault;
use super::life::{self, Life};
use super::refusal::{Refusal, Text};
use super::words::Region;
use crate::driver::elf;
use crate::sys::{self, Errno, Fd, Status};

/// Byte by which a process finds out whether the file system keeps a lock with the mapping alone: `+ pid`, so that no
/// other process's lock is taken for its own.
const PROBE_AT: u64 = 1 << 43;
/// Byte that guards setting up a file by hand.
const SETUP_AT: u64 = 1 << 42;
/// How long to wait for [`SETUP_AT`]: hundreds of processes that start at once on a busy machine take a second to get
/// through. A dead holder's lock is free at once, only a stopped one is waited for in vain.
const SETUP_NS: u64 = 5_000_000_000;
/// Where kept descriptors go, if the process may have so many.
const HIGH: [c_int; 3] = [1000, 500, 100];
const PATH_LEN: usize = 1024;
/// Owned slots that a new process looks at before it takes one that nobody ever had.
const LOOKS: usize = 64;

/// The descriptor that holds the slot's lock, of this process or, in a forked child that has not attached, of its
/// parent; -1 = none.
static KEPT: AtomicI32 = AtomicI32::new(-1);

/// A usage file by name, and as it was found.
#[derive(Debug)]
pub(crate) struct UsageFile {
    path: [u8; PATH_LEN],
    shown: Text,
    device: u64,
    inode: u64,
    pub(crate) region: Region,
}

/// Takes the lock byte `at`; whether it was free.
fn try_byte(fd: Fd, at: u64) -> Result<bool, Errno> {
    match fd.lock(sys::F_OFD_SETLK, sys::F_WRLCK, at) {
        Ok(_) => Ok(true),
        Err(Errno::AGAIN | Errno::ACCES) => Ok(false),
        Err(errno) => Err(errno),
    }
}

fn free_byte(fd: Fd, at: u64) {
    let _ = fd.lock(sys::F_OFD_SETLK, sys::F_UNLCK, at);
}

fn is_held(fd: Fd, at: u64) -> Result<bool, Errno> {
    fd.lock(sys::F_OFD_GETLK, sys::F_WRLCK, at).map(|record| record.kind != sys::F_UNLCK)
}

fn is_owned(fd: Fd, slot: usize) -> Result<bool, Errno> {
    Ok(is_held(fd, byte_of(slot))? || lives_without_lock(fd, slot))
}

/// Takes the byte of a slot; whether it had no owner.
fn try_slot(fd: Fd, slot: usize) -> Result<bool, Errno> {
    if !try_byte(fd, byte_of(slot))? {
        return Ok(false);
    }
    let is_free = !lives_without_lock(fd, slot);
    if !is_free {
        free_byte(fd, byte_of(slot));
    }
    Ok(is_free)
}

/// Whether the process that the slot names has closed the descriptor that its lock was on, and lives.
fn lives_without_lock(fd: Fd, slot: usize) -> bool {
    let word = |at: usize| {
        let mut word = [0; 8];
        let at = usage::slot_offset(slot)? + at;
        (fd.read_at(&mut word, at as u64) == Ok(8)).then(|| u64::from_le_bytes(word))
    };
    let noted = word(usage::LIFE_AT).and_then(Life::unpack);
    let is_ours = |_: &Life| word(usage::MARK_AT) == Some(usage::owner_mark(slot));
    let Some(noted) = noted.filter(is_ours) else { return false };
    // The pid is the lower half.
    let pid = word(0).map_or(0, |pid| i32::try_from(pid & 0x7fff_ffff).unwrap_or(0));
    // Who cannot be asked after is not dead for that.
    pid > 0 && Life::of(pid).map_or(true, |life| life.is_some_and(|life| life.may_be(noted)))
}

const fn byte_of(slot: usize) -> u64 {
    extension::LOCK_AT + slot as u64
}

/// The slots below the high-water mark.
pub(crate) fn in_use(region: Region) -> core::ops::Range<usize> {
    let mark = region.hot().high_water.load(Acquire);
    0..usize::try_from(mark).unwrap_or(usage::SLOTS).min(usage::SLOTS)
}

/// Puts a path behind what stands in `whole` up to `at`; whether there was room.
fn put_at(whole: &mut [u8], at: usize, path: &CStr) -> bool {
    let bytes = path.to_bytes_with_nul();
    let place = whole.get_mut(at..at + bytes.len());
    place.map(|place| place.copy_from_slice(bytes)).is_some()
}

impl UsageFile {
    /// The file at `path`, which `fd` is open on and `region` is mapped from.
    pub(crate) fn new(path: &'static CStr, status: Status, region: Region) -> Result<Self, Errno> {
        // The program may change its folder, and the file is looked for again.
        let mut whole = [0; PATH_LEN];
        let folder = if path.to_bytes().starts_with(b"/") { 0 } else { sys::folder(&mut whole) };
        if !put_at(&mut whole, folder, path) && !put_at(&mut whole, 0, path) {
            return Err(Errno::NAMETOOLONG);
        }
        Ok(Self { path: whole, shown: Text(path), device: status.device, inode: status.inode, region })
    }

    fn path(&self) -> &CStr {
        CStr::from_bytes_until_nul(&self.path).unwrap_or(c"")
    }

    /// Its path for a message, while the process attaches.
    pub(crate) fn text(&self) -> Text {
        self.shown
    }

    fn unusable(&self, doing: &'static str, errno: Errno) -> Refusal {
        Refusal::FileUnusable { path: self.text(), doing, errno }
    }

    fn is_same(&self, fd: Fd) -> bool {
        fd.status().is_ok_and(|status| (status.device, status.inode) == (self.device, self.inode))
    }

    /// Another description of the same file.
    pub(super) fn open_again(&self) -> Result<Fd, Errno> {
        const ESTALE: Errno = Errno(116);
        let fd = sys::open(self.path(), sys::O_RDWR | sys::O_CLOEXEC, 0)?;
        if self.is_same(fd) {
            return Ok(fd);
        }
        fd.close();
        Err(ESTALE)
    }

    /// Takes a slot. `mapped` is the description that the mapping was made from; it is closed.
    ///
    /// The slot's words still hold what its last owner left.
    pub(crate) fn claim(&self, mapped: Fd) -> Result<usize, Refusal> {
        let probe = PROBE_AT + u64::from(sys::process_id().unsigned_abs());
        let taken = try_byte(mapped, probe)
            .map_err(|errno| self.unusable("locking", errno))
            .and_then(|_| self.first_free(mapped));
        fault::point();
        let second = self.open_again().map_err(|errno| self.unusable("opening it again", errno));
        mapped.close();
        let second = second?;
        let held = taken.and_then(|slot| self.hold_on(second, slot, probe)).and_then(|(slot, pinned)| {
            fault::point();
            self.announce(second, slot, pinned).map_err(|errno| self.unusable("writing", errno))?;
            Ok((slot, pinned))
        });
        match held {
            Ok((slot, false)) => {
                keep(second);
                Ok(slot)
            }
            Ok((slot, true)) => {
                second.close();
                Ok(slot)
            }
            Err(refusal) => {
                second.close();
                Err(refusal)
            }
        }
    }

    /// Sees to it that the slot stays this process's now that only the mapping is left of the first description; whether
    /// the mapping alone does.
    fn hold_on(&self, second: Fd, slot: usize, probe: u64) -> Result<(usize, bool), Refusal> {
        let failed = |errno| self.unusable("locking", errno);
        if is_held(second, probe).map_err(failed)? {
            return Ok((slot, true));
        }
        // The slot was lost with the descriptor. Unless another process has it by now, it is ours again.
        let again = try_slot(second, slot).map_err(failed)?;
        Ok((if again { slot } else { self.first_free(second)? }, false))
    }

    /// Locks the byte of the first slot without an owner: those that were given back before those whose owner died,
    /// new ones after them, so that the high-water mark stays low. Each look at an owned byte is a system call that
    /// goes through all locks of the file, so of many only some are looked at, until there are no new ones.
    fn first_free(&self, fd: Fd) -> Result<usize, Refusal> {
        let region = self.region;
        let empty = |slot: &usize| region.hami_slot(*slot).pid.load(Relaxed) == 0;
        let used = in_use(region);
        let claimed = || used.clone().filter(|slot| !empty(slot));
        let count = claimed().count();
        // Others than the last process looked at, whose pid was most likely one less.
        let turn = usize::try_from(sys::process_id().unsigned_abs()).unwrap_or(0) * LOOKS;
        let first = if count > LOOKS { turn % count } else { 0 };
        let some = claimed().chain(claimed()).skip(first).take(LOOKS.min(count));
        let order = used.clone().filter(empty).chain(some).chain(used.end..usage::SLOTS).chain(claimed());
        for slot in order {
            if try_slot(fd, slot).map_err(|errno| self.unusable("locking", errno))? {
                return Ok(slot);
            }
        }
        Err(Refusal::SlotsFull { path: self.text() })
    }

    /// Fills in HAMi's slot, for HAMi's monitor and ours. By writing, not by storing: a full file system then is an
    /// error and not a signal.
    fn announce(&self, fd: Fd, slot: usize, is_pinned: bool) -> Result<(), Errno> {
        let mut image = [0_u8; usage::SLOT_SIZE];
        let mut put = |at: usize, bytes: &[u8]| {
            if let Some(place) = image.get_mut(at..at + bytes.len()) {
                place.copy_from_slice(bytes);
            }
        };
        put(0, &sys::process_id().to_le_bytes());
        put(usage::STATUS_AT, &1_i32.to_le_bytes());
        put(usage::MARK_AT, &usage::owner_mark(slot).to_le_bytes());
        // Else the lock says all.
        if !is_pinned && let Some(life) = Life::own() {
            put(usage::LIFE_AT, &life.pack().to_le_bytes());
        }
        let offset = usage::slot_offset(slot).unwrap_or(usage::SLOTS_AT) as u64;
        if fd.write_at(&image, offset)? != image.len() {
            return Err(Errno::NOSPC);
        }
        let count = i32::try_from(slot + 1).unwrap_or(i32::MAX);
        self.region.hami_tail().proc_num.fetch_max(count, AcqRel);
        Ok(())
    }

    /// Takes the byte of a dead owner's slot; whether it was free. To be given back by [`Self::give_back`].
    pub(super) fn take(fd: Fd, slot: usize) -> bool {
        try_slot(fd, slot).unwrap_or(false)
    }

    /// Gives back a slot whose words were cleared.
    pub(super) fn give_back(&self, fd: Fd, slot: usize) {
        let hami = self.region.hami_slot(slot);
        fault::point();
        hami.status.store(0, Relaxed);
        hami.pid.store(0, Release);
        free_byte(fd, byte_of(slot));
    }

    /// Shows the slots that have an owner, the own one among them. Where the file cannot be opened any more, all that
    /// were ever used.
    pub(super) fn each_owned(&self, mut see: impl FnMut(usize)) {
        let fd = self.open_again().ok();
        for slot in in_use(self.region) {
            if fd.is_none_or(|fd| is_owned(fd, slot).unwrap_or(true)) {
                see(slot);
            }
        }
        if let Some(fd) = fd {
            fd.close();
        }
    }

    /// A live process that another library put into HAMi's slots.
    pub(crate) fn foreign_process(&self) -> Option<i32> {
        let count = self.region.hami_tail().proc_num.load(Acquire);
        (0..usize::try_from(count).unwrap_or(0).min(usage::SLOTS)).find_map(|index| {
            let slot = self.region.hami_slot(index);
            let pid = slot.pid.load(Acquire);
            let ours = slot.mark.load(Relaxed) == usage::owner_mark(index);
            (pid > 0 && slot.status.load(Relaxed) != 0 && !ours && life::exists(pid)).then_some(pid)
        })
    }
}

/// Waits for the byte that guards setting a file up, at most [`SETUP_NS`].
pub(super) fn begin_setup(fd: Fd) -> Result<bool, Errno> {
    let start = sys::clock::monotonic_ns();
    let mut pause = 50_000;
    while !try_byte(fd, SETUP_AT)? {
        if sys::clock::monotonic_ns().saturating_sub(start) > SETUP_NS {
            return Ok(false);
        }
        sys::sleep_ns(pause);
        pause = (pause * 2).min(2_000_000);
    }
    Ok(true)
}

/// Whether any slot below `high_water` has an owner.
pub(super) fn any_owner(fd: Fd, high_water: usize) -> Result<bool, Errno> {
    for slot in 0..high_water.min(usage::SLOTS) {
        if is_owned(fd, slot)? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// In a forked child that attaches: closes what it inherited, so that its parent's locks can end with its parent.
pub(super) fn drop_inherited(file: &UsageFile) {
    let kept = Fd(KEPT.swap(-1, AcqRel));
    if kept.0 >= 0 && file.is_same(kept) {
        kept.close();
    }
}

/// Keeps the descriptor that the slot's lock lives on, out of the way.
fn keep(fd: Fd) {
    close_in_forked_children();
    let high = HIGH.into_iter().find_map(|lowest| fd.duplicate_above(lowest).ok());
    if high.is_some() {
        fd.close();
    }
    KEPT.store(high.unwrap_or(fd).0, Release);
}

/// Where the slot's lock lives on a descriptor, a forked child would keep its parent's slot for it. The C library's own
/// list of handlers closes the child's copy; musl has none, there the child keeps it until it ends or calls exec.
fn close_in_forked_children() {
    static REGISTERED: AtomicI32 = AtomicI32::new(0);
    extern "C" fn child() {
        let kept = Fd(KEPT.swap(-1, AcqRel));
        if kept.0 >= 0 {
            kept.close();
        }
    }
    type Register = unsafe extern "C" fn(
        Option<extern "C" fn()>,
        Option<extern "C" fn()>,
        Option<extern "C" fn()>,
        *mut c_void,
    ) -> c_int;
    if REGISTERED.swap(1, AcqRel) != 0 {
        return;
    }
    if let Some(address) = elf::next_function(c"__register_atfork") {
        // SAFETY: glibc's function of this name has this type since 2.3.2.
        let register = unsafe { core::mem::transmute::<usize, Register>(address) };
        // SAFETY: the handler touches nothing but a word of ours; this library is never unloaded.
        unsafe { register(None, None, Some(child), core::ptr::null_mut()) };
    }
}
