//! Usage files, at arm's length: a tenant can write, cut, punch and lock them as he likes. They are read by `pread`,
//! never mapped (cutting a mapped file kills who maps it), and changed by single `pwrite`s of fields that are the
//! agent's to write. Folders of HAMi's containers are writable to tenants as well, so nothing that is no plain file is
//! opened there, and no link is followed.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use mullion_region::extension::{self, Hot, Slot};
use mullion_region::hami::{self, Header, Layout, Process};
use mullion_region::usage::{self, EXTENSION_AT, FILE_LEN, SLOTS};
use nix::fcntl::{FcntlArg, OFlag, OpenHow, ResolveFlag, fcntl, openat2};
use nix::libc;
use nix::time::{ClockId, clock_gettime};

use crate::prepare::files::USAGE_FILE;

/// Why a usage file tells nothing.
#[derive(Debug, thiserror::Error)]
pub enum Unreadable {
    /// It is not there.
    #[error("there is no usage file: the container is being made or removed")]
    Missing,
    /// A link stands in its place.
    #[error("a symbolic link is in the place of the usage file: its tenant put it there; restart the pod")]
    Link,
    /// Something else stands in its place.
    #[error("{what} is in the place of the usage file: its tenant put it there; restart the pod")]
    NotPlain {
        /// What it is.
        what: &'static str,
    },
    /// More than one file may be the usage file, or there are too many to look for it.
    #[error(
        "more than one file is called *.cache, or hundreds lie there: HAMi's library makes one; remove the others"
    )]
    Ambiguous,
    /// So many locks lie on it that looking for those of its slots takes too long.
    #[error(
        "so many locks lie on the usage file that it takes too long to look at them: its tenant put them there"
    )]
    Locked,
    /// Its owner holds a lease on it.
    #[error(
        "a process holds a lease on the usage file (F_SETLEASE), which keeps others from opening it: end that process"
    )]
    Leased,
    /// Reading it takes long.
    #[error(
        "others are kept from the usage file: a process of its tenant writes to it without end; end that process"
    )]
    Held {
        /// So long that it is no accident.
        long: bool,
    },
    /// Reading it panicked.
    #[error("the agent fails at the usage file, which is a fault of its own: report it with the agent's log")]
    Broken,
    /// The system refuses.
    #[error("the usage file cannot be read: see the node's log of its disk")]
    Io {
        /// The system's word.
        source: io::Error,
    },
    /// What is in it is no usage file.
    #[error("the usage file is damaged")]
    Content {
        /// The first field without a meaning.
        source: mullion_region::Error,
    },
}

impl Unreadable {
    /// The stable name, the same in log and metric.
    #[must_use]
    pub const fn code(&self) -> &'static str {
        match self {
            Self::Missing => "UsageMissing",
            Self::Link => "UsageLink",
            Self::NotPlain { .. } => "UsageNotPlain",
            Self::Ambiguous => "UsageAmbiguous",
            Self::Locked => "UsageLocked",
            Self::Leased => "UsageLeased",
            Self::Held { .. } => "UsageHeld",
            Self::Broken => "UsageBroken",
            Self::Io { .. } => "UsageUnreadable",
            Self::Content { source } => source.code(),
        }
    }
}

impl From<mullion_region::Error> for Unreadable {
    fn from(source: mullion_region::Error) -> Self {
        Self::Content { source }
    }
}

impl From<io::Error> for Unreadable {
    fn from(source: io::Error) -> Self {
        match source.raw_os_error() {
            Some(libc::ENOENT | libc::ENOTDIR) => Self::Missing,
            Some(libc::ELOOP) => Self::Link,
            // Nothing else here answers so: opened without waiting, a file has a lease on it.
            Some(libc::EAGAIN) => Self::Leased,
            _ => Self::Io { source },
        }
    }
}

impl From<nix::Error> for Unreadable {
    fn from(errno: nix::Error) -> Self {
        io::Error::from(errno).into()
    }
}

/// How long this thread may work at the locks of one file. The kernel goes through all locks of a file for each question
/// about one, and a tenant can put down any number. By the time that the thread ran: a busy node is nobody's fault.
#[derive(Debug)]
pub struct Allowance {
    left: Duration,
    /// It was not enough.
    pub is_used_up: bool,
}

impl Allowance {
    /// One of so much.
    #[must_use]
    pub const fn new(left: Duration) -> Self {
        Self { left, is_used_up: false }
    }

    /// The answer to a question about locks; `None` where nothing is left for it.
    pub fn ask<T>(&mut self, question: impl FnOnce() -> T) -> Option<T> {
        self.is_used_up |= self.left.is_zero();
        (!self.is_used_up).then(|| {
            let from = thread_time();
            let answer = question();
            self.left = self.left.saturating_sub(thread_time().saturating_sub(from));
            answer
        })
    }
}

fn thread_time() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map(Duration::from).unwrap_or_default()
}

/// An open usage file.
#[derive(Debug)]
pub struct UsageFile {
    file: File,
    length: u64,
    inode: (u64, u64),
}

/// No way out of a folder, and no link.
const BENEATH: ResolveFlag = ResolveFlag::RESOLVE_BENEATH.union(ResolveFlag::RESOLVE_NO_SYMLINKS);

/// Entries of a folder of HAMi's that are looked at: the library makes one or two, and its tenant may make a million.
const MOST_ENTRIES: usize = 256;

/// The folder of all containers' folders, held open.
#[derive(Debug)]
pub struct Folder(OwnedFd);

impl Folder {
    /// Opens it.
    ///
    /// # Errors
    /// The system's word.
    pub fn open(path: &Path) -> io::Result<Self> {
        Ok(Self(File::open(path)?.into()))
    }

    /// The usage file in the folder `name`, one of HAMi's: the one that is called `*.cache`, as HAMi's monitor finds it.
    /// One of ours is none, also where it is not known whose it is: in it stands what its tenant likes.
    ///
    /// # Errors
    /// [`Unreadable`], also when there is none, or more than one.
    pub fn foreign_file(&self, name: &str) -> Result<UsageFile, Unreadable> {
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        let how = OpenHow::new().flags(flags).resolve(BENEATH);
        let folder = openat2(&self.0, name, how)?;
        let mut found = None;
        let entries = std::fs::read_dir(format!("/proc/self/fd/{}", folder.as_raw_fd()))?;
        for (number, entry) in entries.enumerate() {
            if number == MOST_ENTRIES {
                return Err(Unreadable::Ambiguous);
            }
            let file = PathBuf::from(entry?.file_name());
            if file.extension().is_some_and(|e| e == "cache") && found.replace(file).is_some() {
                return Err(Unreadable::Ambiguous);
            }
        }
        let found = found.filter(|file| file != Path::new(USAGE_FILE)).ok_or(Unreadable::Missing)?;
        Self(folder).usage_file(&found)
    }

    /// Opens `name`, a path below, of a plain file. Nothing else is opened: not even looking at a pipe or a device is
    /// without effect.
    ///
    /// # Errors
    /// [`Unreadable`].
    pub fn usage_file(&self, name: &Path) -> Result<UsageFile, Unreadable> {
        let how = OpenHow::new().flags(OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC).resolve(BENEATH);
        let found = File::from(openat2(&self.0, name, how)?);
        let kind = found.metadata()?.file_type();
        if kind.is_symlink() {
            return Err(Unreadable::Link);
        }
        if !kind.is_file() {
            let what = match () {
                () if kind.is_dir() => "a folder",
                () if kind.is_fifo() => "a pipe",
                () if kind.is_socket() => "a socket",
                () => "a device",
            };
            return Err(Unreadable::NotPlain { what });
        }
        // The way to the very file that was looked at.
        let file = reopen(&found)?;
        let meta = file.metadata()?;
        Ok(UsageFile { file, length: meta.len(), inode: (meta.dev(), meta.ino()) })
    }
}

/// Opens once more what `file` is. Without waiting: its owner may hold a lease on it (`F_SETLEASE`), for the end of which
/// an opener waits.
fn reopen(file: &File) -> io::Result<File> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    File::options().read(true).write(true).custom_flags(OFlag::O_NONBLOCK.bits()).open(path)
}

/// What one of our own files says.
#[derive(Clone, Debug, PartialEq)]
pub struct Ours {
    /// HAMi's header and tail.
    pub header: Header,
    /// Our own counters.
    pub hot: Hot,
    /// Slots whose owner lives.
    pub alive: Vec<Alive>,
    /// A dead process's charges still stand in the container's books.
    pub dead_charges: bool,
}

/// A slot whose owner lives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Alive {
    /// Its number.
    pub slot: usize,
    /// What HAMi's fields say of it.
    pub process: Process,
    /// Our own words, by card of the container.
    pub cards: Vec<Slot>,
}

/// What is in a usage file.
#[derive(Debug)]
pub enum Content {
    /// One of ours.
    Ours(Box<Ours>),
    /// One of HAMi's library.
    Foreign(Box<Foreign>),
}

/// Which file to read, a job that its tenant can hold up.
#[derive(Debug)]
pub struct Reading {
    /// The folder of all containers' folders.
    pub folder: Arc<Folder>,
    /// The container's.
    pub name: String,
    /// Cards of a container of ours; `None` for one of HAMi's.
    pub cards: Option<usize>,
    /// A file that is left alone for the locks on it.
    pub locked: Option<(u64, u64)>,
    /// What may be spent on its locks.
    pub allowance: Allowance,
}

/// A file that was found.
#[derive(Debug)]
pub struct Read {
    /// It, open.
    pub file: UsageFile,
    /// What is in it.
    pub content: Result<Content, Unreadable>,
    /// What is left for its locks.
    pub allowance: Allowance,
}

impl Reading {
    /// Reads.
    ///
    /// # Errors
    /// [`Unreadable`] where there is no file to open.
    pub fn run(self) -> Result<Read, Unreadable> {
        let Self { folder, name, cards, locked, mut allowance } = self;
        let file = match cards {
            Some(_) => folder.usage_file(&PathBuf::from(name).join(USAGE_FILE))?,
            None => folder.foreign_file(&name)?,
        };
        let content = match cards {
            _ if locked == Some(file.inode) => Err(Unreadable::Locked),
            Some(cards) => file.ours(cards, &mut allowance).map(|ours| Content::Ours(Box::new(ours))),
            None => file
                .layout()
                .and_then(|layout| file.foreign(layout))
                .map(|foreign| Content::Foreign(Box::new(foreign))),
        };
        Ok(Read { file, content, allowance })
    }
}

/// What a file of HAMi's library says.
#[derive(Clone, Debug, PartialEq)]
pub struct Foreign {
    /// Header and tail.
    pub header: Header,
    /// Slots in use.
    pub processes: Vec<Process>,
}

impl UsageFile {
    /// Device and inode: another one after each `PreStartContainer`.
    #[must_use]
    pub const fn inode(&self) -> (u64, u64) {
        self.inode
    }

    /// Its layout.
    ///
    /// # Errors
    /// [`Unreadable`].
    pub fn layout(&self) -> Result<Layout, Unreadable> {
        let mut head = [0; hami::HEAD_LEN];
        let head = self.some(0, &mut head)?;
        Ok(hami::identify(self.length, head)?)
    }

    /// Reads a file of ours, for a container of `cards` cards.
    ///
    /// # Errors
    /// [`Unreadable`].
    pub fn ours(&self, cards: usize, allowance: &mut Allowance) -> Result<Ours, Unreadable> {
        let mut head = [0; hami::HEAD_LEN];
        let head = self.some(0, &mut head)?;
        let mut tail = [0; hami::TAIL_LEN];
        let tail = self.some(Layout::V1_2.tail_offset(), &mut tail)?;
        let header = usage::read_header(self.length, head, tail)?;
        let mut bytes = [0; extension::NOTES_AT];
        let bytes = self.some(EXTENSION_AT as u64, &mut bytes)?;
        let hot = extension::read_hot(bytes)?;
        let mut alive: Vec<Alive> = Vec::new();
        let mut bytes = vec![0; Layout::V1_2.slot_size()];
        for slot in self.owned(hot.high_water, allowance)? {
            let Some(at) = Layout::V1_2.slot_offset(slot) else { continue };
            let process = Layout::V1_2.read_slot(self.some(at, &mut bytes)?)?;
            alive.push(Alive { slot, process, cards: Vec::with_capacity(cards) });
        }
        let mut dead_charges = false;
        let mut words = vec![0; extension::SLOT_SIZE * hot.high_water];
        for card in 0..cards {
            let Some(at) = extension::card_slots_offset(card) else { continue };
            let words = self.some(at as u64, &mut words)?;
            let mut owners = alive.iter_mut().peekable();
            for (number, slot) in extension::slots(words).enumerate() {
                match owners.next_if(|owner| owner.slot == number) {
                    Some(owner) => owner.cards.push(slot),
                    None => dead_charges |= slot != Slot::default(),
                }
            }
        }
        Ok(Ours { header, hot, alive, dead_charges })
    }

    /// Reads a file of HAMi's library.
    ///
    /// # Errors
    /// [`Unreadable`].
    pub fn foreign(&self, layout: Layout) -> Result<Foreign, Unreadable> {
        let mut head = [0; hami::HEAD_LEN];
        let head = self.some(0, &mut head)?;
        let mut tail = [0; hami::TAIL_LEN];
        let tail = self.some(layout.tail_offset(), &mut tail)?;
        let header = layout.read_header(head, tail)?;
        let mut processes = Vec::new();
        let mut slot = vec![0; layout.slot_size()];
        for number in 0..header.proc_num {
            let Some(at) = layout.slot_offset(number) else { break };
            let process = layout.read_slot(self.some(at, &mut slot)?)?;
            if process.status != hami::STATUS_FREE {
                processes.push(process);
            }
        }
        Ok(Foreign { header, processes })
    }

    /// Slots below `end` that have an owner, lowest first: those whose byte is locked, whatever the file says, and those
    /// whose own words name their process ([`may_live_without_lock`]).
    ///
    /// # Errors
    /// [`Unreadable`], also where there is more to ask than is allowed.
    pub fn owned(&self, end: usize, allowance: &mut Allowance) -> Result<Vec<usize>, Unreadable> {
        let (mut owned, mut named) = (Vec::new(), Vec::new());
        let mut open = vec![(0, end.min(SLOTS))];
        // Whoever asks is told of one lock in the range, and not of the first one.
        while let Some((from, to)) = open.pop() {
            if from >= to {
                continue;
            }
            let mut lock = lock(libc::F_WRLCK, from, to - from);
            let answer = allowance.ask(|| fcntl(&self.file, FcntlArg::F_OFD_GETLK(&mut lock)));
            answer.ok_or(Unreadable::Locked)??;
            if i32::from(lock.l_type) == libc::F_UNLCK {
                continue;
            }
            let base = i64::try_from(extension::LOCK_AT).unwrap_or(i64::MAX);
            let place = |at: i64| usize::try_from(at.saturating_sub(base)).unwrap_or(0).clamp(from, to);
            let first = place(lock.l_start);
            let behind = if lock.l_len == 0 { to } else { place(lock.l_start.saturating_add(lock.l_len)) };
            let behind = behind.max(first + 1).min(to);
            owned.extend(first..behind);
            open.push((from, first));
            open.push((behind, to));
        }
        owned.sort_unstable();
        // Not before: whoever closes the descriptor of its lock has long written who it is.
        for slot in 0..end.min(SLOTS) {
            if owned.binary_search(&slot).is_err() && may_live_without_lock(&self.file, slot)? {
                named.push(slot);
            }
        }
        owned.extend(named);
        owned.sort_unstable();
        Ok(owned)
    }

    /// Frees `slot` for readers of HAMi's fields, while its byte is ours: nobody owns it, and nobody can take it before
    /// that is done. False where somebody has it, or nothing is left to ask. What stands in our own words of it stays: taking
    /// that away needs operations that a file which is not mapped does not offer ([`crate::monitor::reap`]).
    ///
    /// # Errors
    /// The system's word.
    pub fn free(&self, slot: usize, cards: usize, allowance: &mut Allowance) -> io::Result<bool> {
        if !allowance.ask(|| take_slot(&self.file, slot)).unwrap_or(Ok(false))? {
            return Ok(false);
        }
        let done = self.free_held(slot, cards);
        yield_slot(&self.file, slot)?;
        done.map(|()| true)
    }

    /// The file once more, with locks of its own.
    ///
    /// # Errors
    /// The system's word.
    pub fn again(&self) -> io::Result<File> {
        reopen(&self.file)
    }

    fn free_held(&self, slot: usize, cards: usize) -> io::Result<()> {
        let Some((status, pids)) = Layout::V1_2.free(slot) else { return Ok(()) };
        self.put(status.offset, &status.bytes)?;
        self.put(pids.offset, &pids.bytes)?;
        for card in 0..cards {
            if let Some(used) = Layout::V1_2.used(slot, card, &hami::Used::default()) {
                self.put(used.offset, &used.bytes)?;
            }
        }
        Ok(())
    }

    /// Writes a field; a file that was cut is not made longer.
    ///
    /// # Errors
    /// The system's word.
    pub fn put(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let end = offset.saturating_add(bytes.len() as u64);
        if end > self.length || end > FILE_LEN as u64 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.file.write_all_at(bytes, offset)
    }

    /// As much of `buffer` as the file has at `offset`.
    fn some<'a>(&self, offset: u64, buffer: &'a mut [u8]) -> io::Result<&'a [u8]> {
        let mut filled = 0;
        while let Some(rest) = buffer.get_mut(filled..).filter(|rest| !rest.is_empty()) {
            match self.file.read_at(rest, offset + filled as u64) {
                Ok(0) => break,
                Ok(count) => filled += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(buffer.get(..filled).unwrap_or_default())
    }
}

/// Takes a slot's byte; false where somebody has the slot.
///
/// # Errors
/// The system's word.
pub fn take_slot(file: &File, slot: usize) -> io::Result<bool> {
    match fcntl(file, FcntlArg::F_OFD_SETLK(&lock(libc::F_WRLCK, slot, 1))) {
        Ok(_) => {}
        Err(nix::Error::EAGAIN | nix::Error::EACCES) => return Ok(false),
        Err(errno) => return Err(errno.into()),
    }
    let is_free = may_live_without_lock(file, slot).map(|may_live| !may_live);
    if !matches!(is_free, Ok(true)) {
        yield_slot(file, slot)?;
    }
    is_free
}

/// Whether the slot says for itself which process has it, as it does on a file system on which a lock goes with the last
/// descriptor (overlayfs): that process may have closed it, and live. Which one it is only the container's own processes can
/// tell, by its pid in there; they take the slot of a dead one when they need it.
fn may_live_without_lock(file: &File, slot: usize) -> io::Result<bool> {
    let Some(at) = usage::slot_offset(slot) else { return Ok(false) };
    let mut words = [0; usage::SLOT_SIZE - usage::STATUS_AT];
    match file.read_exact_at(&mut words, (at + usage::STATUS_AT) as u64) {
        Ok(()) => Ok(usage::names_its_process(slot, &words)),
        // It was cut.
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
        Err(error) => Err(error),
    }
}

/// Gives a slot's byte back.
///
/// # Errors
/// The system's word.
pub fn yield_slot(file: &File, slot: usize) -> io::Result<()> {
    fcntl(file, FcntlArg::F_OFD_SETLK(&lock(libc::F_UNLCK, slot, 1)))?;
    Ok(())
}

/// A lock of the bytes of `count` slots from `first` on.
fn lock(kind: i32, first: usize, count: usize) -> libc::flock {
    libc::flock {
        l_type: i16::try_from(kind).unwrap_or_default(),
        l_whence: i16::try_from(libc::SEEK_SET).unwrap_or_default(),
        l_start: i64::try_from(extension::LOCK_AT + first as u64).unwrap_or(i64::MAX),
        l_len: i64::try_from(count).unwrap_or(i64::MAX),
        l_pid: 0,
    }
}
