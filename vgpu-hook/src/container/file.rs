//! The two files: opened, checked, and where the limits are given by hand, made.

#![expect(unsafe_code, reason = "maps files")]
#![expect(clippy::cast_ptr_alignment, reason = "mappings begin on pages")]

use core::ffi::CStr;
use core::num::NonZeroU64;
use core::ptr::null_mut;
use core::sync::atomic::AtomicPtr;
use core::sync::atomic::Ordering::{AcqRel, Acquire};

use mullion_pace::policy::Policy;
use mullion_region::hami::{self, Layout};
use mullion_region::page::{self, Enforcement, PageDevice, PageSpec};
use mullion_region::usage::{self, UsageDevice, UsageSpec};
use mullion_region::{CardUuid, CorePercent, Devices, MAX_DEVICES, extension};

use super::environment::{Limits, Settings};
use super::life;
use super::refusal::{MAKING, Notice, Refusal, Text};
use super::slots::{self, UsageFile};
use super::uuid;
use super::words::{Page, Region};
use crate::cuda::CUuuid;
use crate::sys::{self, Errno, Fd};

/// `O_NONBLOCK`: a pipe at the file's place must not stop the program.
const O_NONBLOCK: i32 = 0o4000;

/// The control page and what it says; `None` where none is mounted.
pub(super) fn open_page(path: &'static CStr) -> Result<Option<(&'static Page, PageSpec)>, Refusal> {
    let fd = match sys::open(path, sys::O_RDONLY | sys::O_CLOEXEC | O_NONBLOCK, 0) {
        Err(Errno::NOENT) => return Ok(None),
        other => other.map_err(Refusal::PageUnreadable)?,
    };
    let result = read_page(fd);
    fd.close();
    result.map(Some)
}

/// The page as mapped, once it is: it is the same one as long as the container lives, and some questions are asked
/// again and again.
static MAPPED: AtomicPtr<Page> = AtomicPtr::new(null_mut());

fn read_page(fd: Fd) -> Result<(&'static Page, PageSpec), Refusal> {
    let mut bytes = [0; page::LEN];
    let len = fd.read_at(&mut bytes, 0).map_err(Refusal::PageUnreadable)?;
    let spec = page::decode(bytes.get(..len).unwrap_or_default()).map_err(Refusal::PageDamaged)?;
    if MAPPED.load(Acquire).is_null() {
        let at = fd.map(page::LEN, 0, false).map_err(Refusal::PageUnreadable)?;
        if MAPPED.compare_exchange(null_mut(), at.cast(), AcqRel, Acquire).is_err() {
            // SAFETY: another thread was first, nothing knows of this mapping.
            unsafe { sys::unmap(at, page::LEN) };
        }
    }
    // SAFETY: a mapping of a page's length that is never unmapped; its words are atomic.
    Ok((unsafe { &*MAPPED.load(Acquire) }, spec))
}

/// A control page of this process's own, for limits given by hand.
pub(super) fn private_page(spec: &PageSpec) -> Result<&'static Page, Refusal> {
    let at = sys::map_private(page::LEN).map_err(Refusal::NoMemory)?;
    // SAFETY: the new mapping is as long as the page.
    unsafe { at.cast::<[u8; page::LEN]>().write(page::encode(spec)) };
    // SAFETY: the mapping is never unmapped; from here on its words are only used atomically.
    Ok(unsafe { &*at.cast::<Page>() })
}

/// A usage file, open and mapped, of which no slot is owned yet.
#[derive(Debug)]
pub(super) struct Opened {
    pub(super) file: UsageFile,
    /// The description that the mapping was made from.
    pub(super) fd: Fd,
}

/// Opens and maps the usage file beside a control page.
pub(super) fn open_mounted(path: &'static CStr) -> Result<Opened, Refusal> {
    let text = Text(path);
    let unusable = |doing, errno| Refusal::FileUnusable { path: text, doing, errno };
    let fd = sys::open(path, sys::O_RDWR | sys::O_CLOEXEC | O_NONBLOCK, 0)
        .map_err(|errno| unusable("opening", errno))?;
    let opened = check(fd, text).and_then(|_| map(fd, path));
    opened.inspect_err(|_| fd.close())
}

/// Flags by which a usage file by hand is opened. In a folder for all, such as /tmp, a link at the name may be anybody's
/// and lead anywhere.
const BY_HAND: i32 = sys::O_RDWR | sys::O_CLOEXEC | sys::O_NOFOLLOW | O_NONBLOCK;
/// How often a file by hand is looked for again where somebody makes and removes it.
const TRIES: usize = 16;

/// Opens the usage file of limits given by hand, makes it if need be, and says what its limits are: those of
/// `settings` where no process uses the file yet, else the ones in the file for the cards that it has. So many cards of the
/// spec, the first ones, are others': see [`tell_of_file`].
///
/// The setting-up byte is held, by the description that comes last, until the slot is taken: it is freed by closing that.
/// It is not the mapping's, of which no copy may be left when the slot's lock is tried.
pub(super) fn open_by_hand(
    path: &'static CStr,
    settings: &Settings,
    cards: &[CUuuid],
) -> Result<(Opened, PageSpec, usize, Fd), Refusal> {
    let (fd, guard, made) = open_locked(path)?;
    let ready = || Ok((set_up(fd, Text(path), settings, cards, made)?, map(fd, path)?));
    match ready() {
        Ok(((spec, others), opened)) => Ok((opened, spec, others, guard)),
        Err(refusal) => {
            guard.close();
            fd.close();
            Err(refusal)
        }
    }
}

/// The file twice: to map it, and with the setting-up byte held. And whether it was made here.
fn open_locked(path: &'static CStr) -> Result<(Fd, Fd, bool), Refusal> {
    let text = Text(path);
    let unusable = |doing, errno| Refusal::FileUnusable { path: text, doing, errno };
    let locked = |guard: Fd| {
        if !guard.status().map_err(|errno| unusable("looking at it", errno))?.is_file() {
            return Err(Refusal::FileKind { path: text });
        }
        if !slots::begin_setup(guard).map_err(|errno| unusable("locking", errno))? {
            return Err(Refusal::FileBusy { path: text });
        }
        Ok(())
    };
    for _ in 0..TRIES {
        let (guard, made) = open_or_make(path).map_err(|(doing, errno)| unusable(doing, errno))?;
        locked(guard).inspect_err(|_| guard.close())?;
        // Who made it may have removed it again, for want of space, and somebody else may have made another one.
        match sys::open(path, BY_HAND, 0) {
            Ok(fd) if is_same(fd, guard) => return Ok((fd, guard, made)),
            Ok(fd) => fd.close(),
            Err(Errno::NOENT) => {}
            Err(errno) => {
                guard.close();
                return Err(unusable("opening it again", errno));
            }
        }
        guard.close();
    }
    Err(Refusal::FileBusy { path: text })
}

fn is_same(one: Fd, other: Fd) -> bool {
    let name = |fd: Fd| fd.status().map(|status| (status.device, status.inode));
    name(one).is_ok_and(|found| name(other) == Ok(found))
}

/// Opens the file, or makes it; never by one call for both: in a folder such as /tmp Linux refuses that for a file of
/// another user (`fs.protected_regular`), which may be written like any other once it is open.
fn open_or_make(path: &CStr) -> Result<(Fd, bool), (&'static str, Errno)> {
    for _ in 0..TRIES {
        match sys::open(path, BY_HAND, 0) {
            Err(Errno::NOENT) => {}
            other => return other.map(|fd| (fd, false)).map_err(|errno| ("opening", errno)),
        }
        match sys::open(path, BY_HAND | sys::O_CREAT | sys::O_EXCL, 0o666) {
            Err(Errno::EXIST) => {}
            other => return other.map(|fd| (fd, true)).map_err(|errno| (MAKING, errno)),
        }
    }
    Err(("opening", Errno::NOENT))
}

/// Opens an existing file for looking at it.
pub(super) fn open_existing(path: &'static CStr) -> Option<(Opened, hami::Header)> {
    let text = Text(path);
    let fd = sys::open(path, sys::O_RDWR | sys::O_CLOEXEC | O_NONBLOCK, 0).ok()?;
    let found = check(fd, text).and_then(|header| Ok((map(fd, path)?, header)));
    fd.close();
    found.ok()
}

fn map(fd: Fd, path: &'static CStr) -> Result<Opened, Refusal> {
    let text = Text(path);
    let unusable = |doing, errno| Refusal::FileUnusable { path: text, doing, errno };
    let status = fd.status().map_err(|errno| unusable("looking at it", errno))?;
    let base = fd.map(usage::FILE_LEN, 0, true).map_err(|errno| unusable("mapping", errno))?;
    // SAFETY: the mapping just made; a child that forked takes nothing of it along, so that it cannot keep the lock.
    unsafe { sys::advise(base, usage::FILE_LEN, sys::MADV_DONTFORK) }
        .map_err(|errno| unusable("mapping", errno))?;
    // SAFETY: a mapping of this length that is never unmapped.
    let region = unsafe { Region::new(base) };
    let file = UsageFile::new(path, status, region).map_err(|errno| unusable("naming", errno))?;
    Ok(Opened { file, fd })
}

/// Reads and checks head, tail and extension of a file of ours.
fn check(fd: Fd, path: Text) -> Result<hami::Header, Refusal> {
    let unusable = |errno| Refusal::FileUnusable { path, doing: "reading", errno };
    let status = fd.status().map_err(unusable)?;
    if !status.is_file() {
        return Err(Refusal::FileKind { path });
    }
    let mut head = [0; hami::HEAD_LEN];
    let mut tail = [0; usage::TAIL_LEN];
    let mut own = [0; extension::HEADER_LEN];
    let head_len = fd.read_at(&mut head, 0).map_err(unusable)?;
    let tail_len = fd.read_at(&mut tail, usage::PROC_NUM_AT as u64).map_err(unusable)?;
    let own_len = fd.read_at(&mut own, usage::EXTENSION_AT as u64).map_err(unusable)?;
    let foreign = |why| Refusal::FileForeign { path, why };
    let header = usage::read_header(
        status.len,
        head.get(..head_len).unwrap_or_default(),
        tail.get(..tail_len).unwrap_or_default(),
    )
    .map_err(foreign)?;
    extension::check(own.get(..own_len).unwrap_or_default()).map_err(foreign)?;
    if status.len < usage::FILE_LEN as u64 {
        let why = mullion_region::Error::TooShort {
            what: "usage file",
            need: usage::FILE_LEN as u64,
            found: status.len,
        };
        return Err(foreign(why));
    }
    Ok(header)
}

/// Makes the file this process's own kind, and decides whose limits count: of so many of the first cards others'. The
/// setting-up byte is held.
fn set_up(
    fd: Fd,
    path: Text,
    settings: &Settings,
    cards: &[CUuuid],
    made: bool,
) -> Result<(PageSpec, usize), Refusal> {
    let unusable = |doing, errno| Refusal::FileUnusable { path, doing, errno };
    let start_over = |hami_slots| start_over(fd, path, settings, cards, hami_slots).map(|spec| (spec, 0));
    let status = fd.status().map_err(|errno| unusable("looking at it", errno))?;
    if status.len == 0 {
        // Everybody who shares the limit may write it, whatever the umask, which is the program's. A file that another
        // user made keeps the mode that it has.
        let _ = fd.set_mode(0o666);
        return start_over(0).inspect_err(|_| {
            // Nobody else uses it: whoever waits for the setting-up byte looks for the file again.
            if made {
                let _ = sys::remove(path.0);
            }
        });
    }
    match check(fd, path) {
        Ok(header) => {
            let mut mark = [0; 4];
            let at = (usage::EXTENSION_AT + extension::HIGH_WATER_AT) as u64;
            fd.read_at(&mut mark, at).map_err(|errno| unusable("reading", errno))?;
            let mark = usize::try_from(u32::from_le_bytes(mark)).unwrap_or(usage::SLOTS);
            if slots::any_owner(fd, mark).map_err(|errno| unusable("locking", errno))? {
                Ok((join(fd, path, &header, settings, cards)?, header.devices.len()))
            } else {
                start_over(header.proc_num)
            }
        }
        Err(_) if half_made(fd, status.len) => start_over(usage::SLOTS),
        Err(refusal) => {
            // HAMi's own file, which only wants the extension. Whether anybody uses it, only its slots tell.
            let count = hami_slots(fd, status.len).ok_or(refusal)?;
            if let Some(pid) = (0..count).find_map(|slot| live_process(fd, slot)) {
                return Err(Refusal::ForeignProcess { path, pid });
            }
            start_over(count)
        }
    }
}

/// Whether a process died while it made the file: it has the size and no magic, and no slot has an owner.
fn half_made(fd: Fd, len: u64) -> bool {
    let mut magic = [0xff; 4];
    let read = fd.read_at(&mut magic, 0);
    len == usage::FILE_LEN as u64
        && read == Ok(4)
        && magic == [0; 4]
        && slots::any_owner(fd, usage::SLOTS) == Ok(false)
}

/// Slots in use of a file of HAMi's v1.1 or v1.2 without our extension.
fn hami_slots(fd: Fd, len: u64) -> Option<usize> {
    let mut head = [0; hami::HEAD_LEN];
    let head_len = fd.read_at(&mut head, 0).ok()?;
    let head = head.get(..head_len)?;
    let layout = hami::identify(len, head).ok()?;
    let mut own = [0; 8];
    let own_len = fd.read_at(&mut own, usage::EXTENSION_AT as u64).ok()?;
    if !matches!(layout, Layout::V1_1 | Layout::V1_2) || own_len != 0 {
        return None;
    }
    let mut tail = [0; hami::TAIL_LEN];
    let tail_len = fd.read_at(&mut tail, usage::PROC_NUM_AT as u64).ok()?;
    layout.read_header(head, tail.get(..tail_len)?).ok().map(|header| header.proc_num)
}

fn live_process(fd: Fd, slot: usize) -> Option<i32> {
    let mut pid = [0; 4];
    let len = fd.read_at(&mut pid, usage::slot_offset(slot)? as u64).ok()?;
    let pid = i32::from_le_bytes(pid);
    (len == 4 && pid > 0 && life::exists(pid)).then_some(pid)
}

/// The entry of a card that is limited by hand.
fn entry(uuid: CardUuid, memory: Option<NonZeroU64>, core: Option<CorePercent>) -> PageDevice {
    PageDevice::new(uuid, memory.unwrap_or(NonZeroU64::MAX), core.unwrap_or(CorePercent::WHOLE))
}

/// What a page would say of these cards.
pub(super) fn page_of(devices: &Devices<PageDevice>) -> PageSpec {
    PageSpec {
        sequence: 0,
        heartbeat_ns: 0,
        futex: 0,
        enforcement: Enforcement::Required,
        grant: 0,
        devices: *devices,
    }
}

/// What a page would say of a file's cards.
pub(super) fn page_of_header(header: &hami::Header) -> PageSpec {
    let mut devices = Devices::new();
    for device in header.devices.iter() {
        let _ = devices.push(entry_of(device));
    }
    page_of(&devices)
}

fn entry_of(device: &hami::HeaderDevice) -> PageDevice {
    let core = u8::try_from(device.sm_limit).ok().and_then(|percent| CorePercent::new(percent).ok());
    entry(device.uuid, NonZeroU64::new(device.memory_limit), core)
}

fn name_of(card: CUuuid) -> Option<CardUuid> {
    CardUuid::new(core::str::from_utf8(&uuid::text(card)).ok()?).ok()
}

/// Nobody uses the file: this process's limits, and all counts from zero.
fn start_over(
    fd: Fd,
    path: Text,
    settings: &Settings,
    cards: &[CUuuid],
    hami_slots: usize,
) -> Result<PageSpec, Refusal> {
    let unusable = |doing, errno| Refusal::FileUnusable { path, doing, errno };
    let many = |_| Refusal::TooManyCards { found: cards.len() };
    let (mut ours, mut theirs) = (Devices::new(), Devices::new());
    for (card, limits) in cards.iter().zip(&settings.cards) {
        let Some(uuid) = name_of(*card) else { continue };
        ours.push(entry(uuid, limits.memory, limits.core)).map_err(many)?;
        theirs
            .push(UsageDevice {
                uuid,
                memory_limit: limits.memory.unwrap_or(NonZeroU64::MAX),
                core: limits.core.unwrap_or(CorePercent::WHOLE),
            })
            .map_err(many)?;
    }
    match fd.allocate(usage::FILE_LEN as u64) {
        Ok(()) => {}
        Err(errno @ (Errno::NOSPC | Errno::DQUOT | Errno::FBIG)) => {
            return Err(unusable("making room", errno));
        }
        // A file system without that request: a store into the mapping may fail then, as into any other.
        Err(_) => {
            let now = fd.status().map_err(|errno| unusable("looking at it", errno))?;
            if now.len < usage::FILE_LEN as u64 {
                fd.truncate(usage::FILE_LEN as u64).map_err(|errno| unusable("making room", errno))?;
            }
        }
    }
    let writing = |errno| unusable("writing", errno);
    // The magic goes first and comes back last: a half-made file is taken for no file of ours.
    write(fd, &[0; 4], 0).map_err(writing)?;
    zero(fd, usage::EXTENSION_AT, extension::LEN).map_err(writing)?;
    zero(fd, usage::SLOTS_AT, hami_slots.min(usage::SLOTS) * usage::SLOT_SIZE).map_err(writing)?;
    let image = usage::image(&UsageSpec { devices: theirs, priority: settings.priority });
    for (offset, bytes) in image.writes() {
        if offset == 0 {
            write(fd, bytes.get(4..).unwrap_or_default(), 4).map_err(writing)?;
        } else {
            write(fd, bytes, offset).map_err(writing)?;
        }
    }
    // HAMi's word for "no limit" is 0, which the image has no way to say.
    for (index, limits) in settings.cards.iter().enumerate().take(cards.len()) {
        if limits.memory.is_none() {
            write(fd, &[0; 8], (usage::LIMITS_AT + 8 * index) as u64).map_err(writing)?;
        }
    }
    write(fd, &usage::MAGIC.to_le_bytes(), 0).map_err(writing)?;
    Ok(page_of(&ours))
}

/// The limits that an entry stands for.
fn limits_of(device: &PageDevice) -> Limits {
    Limits {
        memory: Some(device.memory_limit).filter(|memory| *memory != NonZeroU64::MAX),
        core: Some(device.core).filter(|core| *core != CorePercent::WHOLE),
    }
}

/// Says so where a file's limits are others than those that this process asked for, by card; of the first `others` of its
/// cards, for the rest this process has brought along. Not while the file is being set up: whoever reads stderr may keep this
/// process waiting, and all others with it.
pub(super) fn tell_of_file(
    path: Text,
    spec: &PageSpec,
    others: usize,
    settings: &Settings,
    cards: &[CUuuid],
) {
    for (ordinal, (card, asked)) in cards.iter().zip(settings.cards).enumerate() {
        let is_its = |device: &&PageDevice| uuid::parse(device.uuid.as_bytes()) == Some(*card);
        let Some(held) = spec.devices.iter().take(others).find(is_its).map(limits_of) else { continue };
        // A share that this process lifts for itself is not held.
        let disabled = settings.policy == Policy::Disable;
        let lifted = held.core.is_some() && disabled;
        let same = asked.memory == held.memory && (asked.core == held.core || disabled);
        if lifted || !same {
            Notice::OfFile { path, ordinal, held, asked, lifted }.say();
        }
    }
}

/// Others use the file: its limits count, and cards that it lacks are added.
fn join(
    fd: Fd,
    path: Text,
    header: &hami::Header,
    settings: &Settings,
    cards: &[CUuuid],
) -> Result<PageSpec, Refusal> {
    let unusable = |errno| Refusal::FileUnusable { path, doing: "writing", errno };
    let mut devices = Devices::new();
    let mut known = [None; MAX_DEVICES];
    for (device, place) in header.devices.iter().zip(known.iter_mut()) {
        *place = uuid::parse(device.uuid.as_bytes());
        let _ = devices.push(entry_of(device));
    }
    for (ordinal, card) in cards.iter().enumerate() {
        let (Some(uuid), Some(limits)) = (name_of(*card), settings.cards.get(ordinal)) else { continue };
        if known.contains(&Some(*card)) {
            continue;
        }
        let index = devices.len();
        devices
            .push(entry(uuid, limits.memory, limits.core))
            .map_err(|_| Refusal::TooManyCards { found: index + 1 })?;
        let mut name = [0; usage::UUID_SIZE];
        for (to, from) in name.iter_mut().zip(uuid.as_bytes()) {
            *to = *from;
        }
        let memory = limits.memory.map_or(0, NonZeroU64::get);
        let core = u64::from(limits.core.unwrap_or(CorePercent::WHOLE).get());
        let at = |field: usize, size: usize| (field + size * index) as u64;
        write(fd, &name, at(usage::UUIDS_AT, usage::UUID_SIZE)).map_err(unusable)?;
        write(fd, &memory.to_le_bytes(), at(usage::LIMITS_AT, 8)).map_err(unusable)?;
        write(fd, &core.to_le_bytes(), at(usage::SM_LIMITS_AT, 8)).map_err(unusable)?;
        let count = devices.len() as u64;
        write(fd, &count.to_le_bytes(), usage::DEVICE_NUM_AT as u64).map_err(unusable)?;
    }
    Ok(page_of(&devices))
}

fn write(fd: Fd, mut bytes: &[u8], mut offset: u64) -> Result<(), Errno> {
    while !bytes.is_empty() {
        let written = match fd.write_at(bytes, offset) {
            Ok(0) => return Err(Errno::NOSPC),
            Err(Errno::INTR) => continue,
            other => other?,
        };
        bytes = bytes.get(written..).unwrap_or_default();
        offset += written as u64;
    }
    Ok(())
}

fn zero(fd: Fd, from: usize, len: usize) -> Result<(), Errno> {
    let zeroes = [0; 4096];
    let mut at = from;
    while at < from + len {
        let part = (from + len - at).min(zeroes.len());
        write(fd, zeroes.get(..part).unwrap_or_default(), at as u64)?;
        at += part;
    }
    Ok(())
}
