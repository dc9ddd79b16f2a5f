//! Why a process is not let at the cards: a limit was asked for and cannot be kept.

use core::ffi::CStr;
use core::fmt::{self, Write as _};
use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::Relaxed;

use super::environment;
use super::uuid;
use crate::cuda::{CUresult, CUuuid};
use crate::sys::{self, Errno};

/// Each is said on stderr, in one line, and ends in the result of `cuInit`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// A variable of the environment is no limit.
    Environment(environment::Error<'static>),
    /// The control page is there but cannot be opened or mapped.
    PageUnreadable(Errno),
    /// The control page is not one.
    PageDamaged(mullion_region::Error),
    /// The driver does not say which cards there are.
    DriverSilent { call: &'static str, result: CUresult },
    /// A card of this process has no limit in the control page.
    CardUnknown { ordinal: i32, uuid: CUuuid },
    /// More cards than the files have room for.
    TooManyCards { found: usize },
    /// The usage file cannot be opened, made or mapped.
    FileUnusable { path: Text, doing: &'static str, errno: Errno },
    /// The usage file is no regular file.
    FileKind { path: Text },
    /// The usage file is something else, damaged or cut.
    FileForeign { path: Text, why: mullion_region::Error },
    /// A process of another library, HAMi's, uses the file, so that nobody counts all of the memory.
    ForeignProcess { path: Text, pid: i32 },
    /// All 1,024 slots are taken.
    SlotsFull { path: Text },
    /// Another process was setting up the file for five seconds.
    FileBusy { path: Text },
    /// The kernel knows no memory that is wiped on fork (before 4.14).
    Kernel(Errno),
    /// No memory for the library's own tables.
    NoMemory(Errno),
}

impl Refusal {
    /// The stable name, in the line on stderr.
    pub(crate) const fn code(&self) -> &'static str {
        match self {
            Self::Environment(_) => "LimitInvalid",
            Self::PageUnreadable(_) => "PageUnreadable",
            Self::PageDamaged(_) => "PageDamaged",
            Self::DriverSilent { .. } => "DriverSilent",
            Self::CardUnknown { .. } => "CardUnknown",
            Self::TooManyCards { .. } => "TooManyCards",
            Self::FileUnusable { .. } => "UsageFileUnusable",
            Self::FileKind { .. } => "UsageFileKind",
            Self::FileForeign { .. } => "UsageFileForeign",
            Self::ForeignProcess { .. } => "ForeignProcess",
            Self::SlotsFull { .. } => "SlotsFull",
            Self::FileBusy { .. } => "UsageFileBusy",
            Self::Kernel(_) => "KernelTooOld",
            Self::NoMemory(_) => "NoMemory",
        }
    }

    /// What `cuInit`, and every later allocation, answers.
    pub(crate) const fn result(&self) -> CUresult {
        match self {
            Self::Environment(_) => CUresult::INVALID_VALUE,
            Self::DriverSilent { result, .. } => *result,
            _ => CUresult::OPERATING_SYSTEM,
        }
    }

    /// Says it on stderr; `consequence` is what follows. A process that asks again and again is told once, and after that
    /// once a minute at most for each [`Self::code`].
    pub(crate) fn say(&self, consequence: &str) {
        if !SAID.is_news(self.code(), sys::process_id(), sys::clock::coarse_ns() / 1_000_000_000) {
            return;
        }
        let mut line = Line::default();
        let _ = write!(line, "{}: {self}; {consequence}", self.code());
        sys::complain(&[line.as_str()]);
    }
}

/// `ENOENT`, `EISDIR`, `ELOOP`.
const NO_ENTRY: Errno = Errno(2);
const IS_DIRECTORY: Errno = Errno(21);
const LINK: Errno = Errno(40);

/// What a process is told that goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Notice {
    /// The usage file is in use, with another limit than the one that was asked for by hand.
    LimitOfFile { path: Text, ordinal: usize, asked: u64, held: u64 },
    /// Not even a context fits.
    LimitBelowContext { limit: u64, needed: u64 },
}

impl Notice {
    const fn code(&self) -> &'static str {
        match self {
            Self::LimitOfFile { .. } => "LimitOfFile",
            Self::LimitBelowContext { .. } => "LimitBelowContext",
        }
    }

    /// Says it on stderr, as often as a refusal is said.
    pub(crate) fn say(&self) {
        if SAID.is_news(self.code(), sys::process_id(), sys::clock::coarse_ns() / 1_000_000_000) {
            let mut line = Line::default();
            let _ = write!(line, "{}: {self}", self.code());
            sys::complain(&[line.as_str()]);
        }
    }
}

impl fmt::Display for Notice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::LimitOfFile { path, ordinal, asked, held } => write!(
                f,
                "usage file {path} is in use and limits card {ordinal} to {held} bytes, not to {asked}: that holds for this \
                 process too; for a limit of its own name another file in CUDA_DEVICE_MEMORY_SHARED_CACHE"
            ),
            Self::LimitBelowContext { limit, needed } => write!(
                f,
                "the limit of {limit} bytes is less than the {needed} bytes that a context takes: no program can use the \
                 card; ask for more"
            ),
        }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Environment(error) => error.fmt(f),
            Self::PageUnreadable(Errno(n)) => {
                write!(f, "{} cannot be read (error {n}): restart the container", super::PAGE_PATH)
            }
            Self::PageDamaged(error) => write!(f, "{}: {error}", super::PAGE_PATH),
            Self::DriverSilent { call, result } => {
                write!(f, "{call} failed with {}, so the card's limit cannot be found", result.0)
            }
            Self::CardUnknown { ordinal, uuid } => {
                let text = uuid::text(*uuid);
                let text = core::str::from_utf8(&text).unwrap_or_default();
                write!(f, "card {ordinal}, {text}, has no limit in {}: leave it out of ", super::PAGE_PATH)?;
                f.write_str("CUDA_VISIBLE_DEVICES or restart the container")
            }
            Self::TooManyCards { found } => write!(
                f,
                "{found} cards in one container, at most {} can be limited: name fewer in CUDA_VISIBLE_DEVICES",
                mullion_region::MAX_DEVICES
            ),
            Self::FileUnusable { path, doing, errno } => {
                write!(f, "usage file {path}: {doing} failed (error {}): ", errno.0)?;
                f.write_str(match *errno {
                    _ if path.is_mounted() => "restart the container",
                    NO_ENTRY => "its directory does not exist: make it or name another file in CUDA_DEVICE_MEMORY_SHARED_CACHE",
                    IS_DIRECTORY => "it is a directory: name a file in CUDA_DEVICE_MEMORY_SHARED_CACHE",
                    LINK => "it is a link: name a file itself in CUDA_DEVICE_MEMORY_SHARED_CACHE",
                    _ => "make its directory writable or name another file in CUDA_DEVICE_MEMORY_SHARED_CACHE",
                })
            }
            Self::FileKind { path } => {
                write!(f, "usage file {path} is not a regular file: name another in ")?;
                f.write_str("CUDA_DEVICE_MEMORY_SHARED_CACHE")
            }
            Self::FileForeign { path, why } => {
                write!(f, "usage file {path}: {why}; ")?;
                f.write_str(if path.is_mounted() {
                    "restart the container"
                } else {
                    "name another file in CUDA_DEVICE_MEMORY_SHARED_CACHE"
                })
            }
            Self::ForeignProcess { path, pid } => write!(
                f,
                "process {pid} uses {path} through another library (HAMi's?), and no one could add both up: end it or \
                 give it another file"
            ),
            Self::SlotsFull { path } => write!(
                f,
                "all {} process slots of {path} are taken: run fewer processes with CUDA",
                mullion_region::usage::SLOTS
            ),
            Self::FileBusy { path } => {
                write!(f, "usage file {path} was being set up by another process for five seconds: try again")
            }
            Self::Kernel(Errno(n)) => {
                write!(f, "MADV_WIPEONFORK failed (error {n}): Linux 4.14 or newer is needed")
            }
            Self::NoMemory(Errno(n)) => write!(f, "no memory for the library's tables (error {n})"),
        }
    }
}

/// Which codes were said, by which process and when.
struct Said([(AtomicU64, AtomicU64); 16]);

static SAID: Said = Said::new();

/// Seconds after which the same is said again.
const AGAIN_AFTER: u64 = 60;

impl Said {
    const fn new() -> Self {
        Self([const { (AtomicU64::new(0), AtomicU64::new(0)) }; 16])
    }

    /// Whether process `pid` is to say `code` at `now`, in seconds since the machine's start; notes that it is said. A
    /// forked child has not said what its parent has. Of two threads at once each may say it.
    fn is_news(&self, code: &str, pid: i32, now: u64) -> bool {
        // FNV-1a; no two codes share a number.
        let step = |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        let code = code.bytes().fold(0xcbf2_9ce4_8422_2325, step);
        let own = |place: &&(AtomicU64, AtomicU64)| {
            let found = place.0.compare_exchange(0, code, Relaxed, Relaxed);
            found.is_ok() || found == Err(code)
        };
        let Some((_, last)) = self.0.iter().find(own) else { return true };
        let pid = u64::from(pid.unsigned_abs());
        let said = last.load(Relaxed);
        let news = said >> 32 != pid || now.saturating_sub(said & 0xffff_ffff) >= AGAIN_AFTER;
        if news {
            last.store(pid << 32 | now & 0xffff_ffff, Relaxed);
        }
        news
    }
}

/// A path to be shown.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Text(pub(crate) &'static CStr);

impl Text {
    /// Whether the agent mounted it: nobody in the container can name another one.
    fn is_mounted(self) -> bool {
        self.0 == super::USAGE
    }
}

/// The longest path that a message repeats.
const SHOWN: usize = 96;

impl fmt::Display for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = self.0.to_bytes();
        write!(f, "{}", path.get(..SHOWN).unwrap_or(path).escape_ascii())
    }
}

impl fmt::Debug for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{self}\"")
    }
}

/// A line being put together without an allocator; what does not fit is left out.
struct Line {
    bytes: [u8; 480],
    len: usize,
}

impl Default for Line {
    fn default() -> Self {
        Self { bytes: [0; 480], len: 0 }
    }
}

impl Line {
    fn as_str(&self) -> &str {
        let bytes = self.bytes.get(..self.len).unwrap_or_default();
        match core::str::from_utf8(bytes) {
            Ok(text) => text,
            // Cut within a character.
            Err(error) => {
                core::str::from_utf8(bytes.get(..error.valid_up_to()).unwrap_or_default()).unwrap_or_default()
            }
        }
    }
}

impl fmt::Write for Line {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for byte in text.bytes() {
            if let Some(place) = self.bytes.get_mut(self.len) {
                *place = byte;
                self.len += 1;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    extern crate std;

    use std::string::ToString as _;

    use super::*;

    #[test]
    fn every_refusal_is_one_short_line_with_a_way_out() {
        let path = Text(c"/tmp/cudevshr.cache");
        let refusals = [
            Refusal::Environment(environment::Error::Value {
                variable: environment::Variable::MemoryLimit(Some(0)),
                value: b"16Gi",
            }),
            Refusal::Environment(environment::Error::Card {
                all: environment::Variable::MemoryLimit(None),
                suffix: b"16",
            }),
            Refusal::PageUnreadable(Errno(13)),
            Refusal::PageDamaged(mullion_region::Error::Magic { what: "control page", found: 1 }),
            Refusal::DriverSilent { call: "cuDeviceGetCount", result: CUresult(999) },
            Refusal::CardUnknown { ordinal: 1, uuid: CUuuid([7; 16]) },
            Refusal::TooManyCards { found: 17 },
            Refusal::FileUnusable { path, doing: "open", errno: Errno(30) },
            Refusal::FileUnusable { path, doing: "open", errno: NO_ENTRY },
            Refusal::FileKind { path },
            Refusal::FileForeign { path, why: mullion_region::Error::Magic { what: "usage file", found: 1 } },
            Refusal::ForeignProcess { path, pid: 12 },
            Refusal::SlotsFull { path },
            Refusal::FileBusy { path },
            Refusal::Kernel(Errno(22)),
            Refusal::NoMemory(Errno(12)),
        ];
        for refusal in refusals {
            let text = refusal.to_string();
            assert!(!text.contains('\n') && text.len() < 300, "{text}");
            assert_ne!(refusal.result(), CUresult::SUCCESS);
            let code = refusal.code();
            assert!(code.chars().all(char::is_alphanumeric) && code.starts_with(char::is_uppercase));
        }
    }

    #[test]
    fn the_way_out_is_one_that_the_reader_can_take() {
        let why = mullion_region::Error::Magic { what: "usage file", found: 1 };
        let (by_hand, mounted) = (Text(c"/etc/passwd"), Text(super::super::USAGE));
        let unusable = |path, errno| Refusal::FileUnusable { path, doing: "opening", errno };
        for (refusal, way) in [
            (
                Refusal::FileForeign { path: by_hand, why },
                "name another file in CUDA_DEVICE_MEMORY_SHARED_CACHE",
            ),
            (Refusal::FileForeign { path: mounted, why }, "restart the container"),
            (unusable(by_hand, NO_ENTRY), "its directory does not exist"),
            (unusable(by_hand, IS_DIRECTORY), "it is a directory"),
            (unusable(by_hand, LINK), "it is a link"),
            (unusable(by_hand, Errno(13)), "make its directory writable"),
            (unusable(mounted, Errno(13)), "restart the container"),
        ] {
            let text = refusal.to_string();
            assert!(text.contains(way) && !text.contains("remove"), "{text}");
        }
        let notices = [
            Notice::LimitOfFile { path: by_hand, ordinal: 0, asked: 1 << 30, held: 4 << 30 },
            Notice::LimitBelowContext { limit: 4, needed: 400 << 20 },
        ];
        for notice in notices {
            assert!(notice.to_string().len() < 300, "{notice}");
        }
    }

    #[test]
    fn the_same_is_said_once_by_each_process_and_once_a_minute_after_that() {
        let said = Said::new();
        for (pid, code, now, want) in [
            (7, "LimitInvalid", 0, true),
            (7, "LimitInvalid", 0, false),
            (7, "LimitInvalid", 59, false),
            (7, "SlotsFull", 59, true),
            (7, "LimitInvalid", 60, true),
            (7, "LimitInvalid", 61, false),
            (8, "LimitInvalid", 61, true),
            (8, "LimitInvalid", 62, false),
            (8, "SlotsFull", 62, true),
        ] {
            assert_eq!(said.is_news(code, pid, now), want, "{code} by {pid} at {now}");
        }
    }

    #[test]
    fn a_line_is_cut_and_a_path_is_escaped() {
        let mut line = Line::default();
        for _ in 0..100 {
            let _ = line.write_str("0123456789");
        }
        assert_eq!(line.as_str().len(), 480);
        assert_eq!(Text(c"/tmp/\x1b[0m").to_string(), r"/tmp/\x1b[0m");
    }
}
