//! Why a process is not let at the cards: a limit was asked for and cannot be kept.

use core::ffi::CStr;
use core::fmt;

use mullion_region::{CorePercent, MAX_DEVICES};

use super::environment::{self, Limits, Variable};
use super::{said, uuid};
use crate::cuda::{CUresult, CUuuid};
use crate::sys::Errno;

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
        said::say(self.code(), 0, format_args!("{self}; {consequence}"));
    }
}

/// What failed where there was no usage file and none could be made.
pub(super) const MAKING: &str = "making it";

const SHARED_CACHE: &str = "CUDA_DEVICE_MEMORY_SHARED_CACHE";

/// Linux's numbers, with a word for those that are met with.
impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = match self.0 {
            1 | 13 => "no permission",
            2 => "not there",
            5 => "input/output error",
            12 => "no memory",
            20 => "no directory",
            21 => "a directory",
            22 => "invalid argument",
            23 | 24 => "too many open files",
            27 => "larger than `ulimit -f` allows",
            28 => "no space on its file system",
            30 => "read-only file system",
            36 => "name too long",
            37 | 38 | 95 => "not supported",
            40 => "a link",
            116 => "another file by now",
            122 => "quota used up",
            n => return write!(f, "error {n}"),
        };
        write!(f, "{word} (error {})", self.0)
    }
}

/// The way out for a usage file by hand that cannot be used; the name of the variable that names another follows.
fn way_out(doing: &str, Errno(errno): Errno) -> &'static str {
    match errno {
        1 | 13 if doing == MAKING => "make its directory writable or name another file in ",
        1 | 13 => "you may not write to it: chmod it, or name another file in ",
        2 => "its directory does not exist: make it or name another file in ",
        20 => "a part of its path is no directory: name another file in ",
        21 => "it is a directory: name a file in ",
        23 | 24 => "close some or raise `ulimit -n`; it is named by ",
        27 => "raise `ulimit -f`; it is named by ",
        28 | 122 => "free some or name a file elsewhere in ",
        30 | 37 | 38 | 95 => "name a file on another file system in ",
        36 => "name a file with a shorter path in ",
        40 => "it is a link: name a file itself in ",
        _ => "name another file in ",
    }
}

/// What a process is told of its limits that goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Notice {
    /// The usage file is in use, with other limits than those that were asked for by hand; `lifted` where this process
    /// takes no part in the file's share of the cores.
    OfFile { path: Text, ordinal: usize, held: Limits, asked: Limits, lifted: bool },
    /// A variable is the limit of a card that this process does not have.
    OfNoCard { variable: Variable, cards: usize },
    /// Not even a context fits. `by_hand` is what the limit was given by.
    BelowContext { ordinal: usize, by_hand: Option<Variable>, limit: u64, needed: u64 },
}

impl Notice {
    const fn code(&self) -> &'static str {
        match self {
            Self::OfFile { .. } => "LimitOfFile",
            Self::OfNoCard { .. } => "LimitOfNoCard",
            Self::BelowContext { .. } => "LimitBelowContext",
        }
    }

    /// Says it on stderr, as often as a refusal is said; of each card.
    pub(crate) fn say(&self) {
        let card = match *self {
            Self::OfFile { ordinal, .. } | Self::BelowContext { ordinal, .. } => ordinal,
            Self::OfNoCard { variable: Variable::SmLimit(card), .. } => card.unwrap_or(0) + MAX_DEVICES,
            Self::OfNoCard { variable: Variable::MemoryLimit(card), .. } => card.unwrap_or(0),
            Self::OfNoCard { .. } => 0,
        };
        said::say(self.code(), card, format_args!("{self}"));
    }
}

impl fmt::Display for Notice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::OfFile { path, ordinal, held, asked, lifted } => {
                write!(f, "usage file {path} is in use and ")?;
                let memory = |limits: Limits| limits.memory.map(|memory| Size(memory.get()));
                let core = |limits: Limits| limits.core.map(Share);
                let memory_differs = held.memory != asked.memory;
                if memory_differs {
                    limits_card(f, ordinal, memory(held), memory(asked))?;
                }
                if lifted {
                    f.write_str(if memory_differs { ", and " } else { "" })?;
                    limits_card(f, ordinal, core(held), None)?;
                    return f.write_str(
                        ": GPU_CORE_UTILIZATION_POLICY=disable lifts that share for this process alone, not for the others",
                    );
                }
                if held.core != asked.core {
                    f.write_str(if memory_differs { ", and " } else { "" })?;
                    limits_card(f, ordinal, core(held), core(asked))?;
                }
                write!(
                    f,
                    ": that holds for this process too; for limits of its own name another file in {SHARED_CACHE}"
                )
            }
            Self::OfNoCard { variable, cards } => write!(
                f,
                "{variable} limits nothing: this process has {cards} card{}, counted from 0 as CUDA_VISIBLE_DEVICES leaves them",
                if cards == 1 { "" } else { "s" }
            ),
            Self::BelowContext { ordinal, by_hand, limit, needed } => {
                write!(f, "card {ordinal}: the limit of {} (", Size(limit))?;
                match by_hand {
                    Some(variable) => write!(f, "{variable}")?,
                    None => f.write_str("nvidia.com/gpumem")?,
                }
                write!(f, ") is less than the {} that a context takes", Size(needed))?;
                f.write_str(", so no program can use the card: ask for more")
            }
        }
    }
}

/// Says what limit a card has where another one was asked for.
fn limits_card<T: fmt::Display>(
    f: &mut fmt::Formatter<'_>,
    ordinal: usize,
    held: Option<T>,
    asked: Option<T>,
) -> fmt::Result {
    match (held, asked) {
        (Some(held), Some(asked)) => write!(f, "limits card {ordinal} to {held}, not to {asked}"),
        (Some(held), None) => write!(f, "limits card {ordinal} to {held}"),
        (None, Some(asked)) => write!(f, "does not limit card {ordinal} to {asked}"),
        (None, None) => Ok(()),
    }
}

/// A share of the cores, in words.
struct Share(CorePercent);

impl fmt::Display for Share {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} % of the cores", self.0.get())
    }
}

/// An amount of memory, in words.
struct Size(u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            bytes if bytes > 0 && bytes.is_multiple_of(1 << 20) => write!(f, "{} MiB", bytes >> 20),
            bytes => write!(f, "{bytes} bytes"),
        }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Environment(error) => error.fmt(f),
            Self::PageUnreadable(errno) => {
                write!(f, "{} cannot be read: {errno}: restart the container", super::PAGE_PATH)
            }
            Self::PageDamaged(error) => write!(f, "{}: {error}; restart the container", super::PAGE_PATH),
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
                "{found} cards in one container, at most {MAX_DEVICES} can be limited: name fewer in CUDA_VISIBLE_DEVICES"
            ),
            Self::FileUnusable { path, doing, errno } => {
                write!(f, "usage file {path}: {doing} failed: {errno}: ")?;
                if path.is_mounted() {
                    return f.write_str(match errno.0 {
                        23 | 24 => "close some or raise `ulimit -n`",
                        27 => "raise `ulimit -f`",
                        _ => "restart the container",
                    });
                }
                write!(f, "{}{SHARED_CACHE}", way_out(doing, *errno))
            }
            Self::FileKind { path } => {
                write!(f, "usage file {path} is not a regular file: name another in {SHARED_CACHE}")
            }
            Self::FileForeign { path, why } => {
                write!(f, "usage file {path}: {why}; ")?;
                if path.is_mounted() {
                    return f.write_str("restart the container");
                }
                write!(f, "name another file in {SHARED_CACHE}")
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
            Self::Kernel(errno) => {
                write!(f, "MADV_WIPEONFORK failed: {errno}: Linux 4.14 or newer is needed")
            }
            Self::NoMemory(errno) => write!(
                f,
                "no room for the library's tables: {errno}: raise the container's memory limit, or `ulimit -v`"
            ),
        }
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
        let shown = path.get(..SHOWN).unwrap_or(path);
        write!(f, "{}", shown.escape_ascii())?;
        f.write_str(if shown.len() < path.len() { "..." } else { "" })
    }
}

impl fmt::Debug for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{self}\"")
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
            Refusal::FileUnusable { path, doing: "opening", errno: Errno(30) },
            Refusal::FileUnusable { path, doing: MAKING, errno: Errno::NOENT },
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
        let cut = mullion_region::Error::TooShort { what: "usage file", need: 8192, found: 4096 };
        let unusable = |path, doing, errno| Refusal::FileUnusable { path, doing, errno: Errno(errno) };
        for (refusal, way) in [
            (
                Refusal::FileForeign { path: by_hand, why },
                "name another file in CUDA_DEVICE_MEMORY_SHARED_CACHE",
            ),
            (Refusal::FileForeign { path: by_hand, why: cut }, "it was cut; name another file in CUDA_"),
            (Refusal::FileForeign { path: mounted, why: cut }, "it was cut; restart the container"),
            (Refusal::PageDamaged(cut), "it was cut; restart the container"),
            (unusable(by_hand, MAKING, 2), "its directory does not exist"),
            (unusable(by_hand, "opening", 21), "it is a directory"),
            (unusable(by_hand, "opening", 40), "it is a link"),
            (unusable(by_hand, "opening", 13), "no permission (error 13): you may not write to it: chmod it"),
            (unusable(by_hand, MAKING, 13), "no permission (error 13): make its directory writable"),
            (unusable(by_hand, MAKING, 30), "read-only file system (error 30): name a file on another"),
            (unusable(by_hand, "making room", 28), "no space on its file system (error 28): free some"),
            (unusable(by_hand, "opening", 36), "name too long (error 36): name a file with a shorter path"),
            (unusable(by_hand, "opening", 71), "error 71: name another file in"),
            (
                unusable(by_hand, "making room", 27),
                "larger than `ulimit -f` allows (error 27): raise `ulimit -f`",
            ),
            (
                unusable(mounted, "writing", 27),
                "larger than `ulimit -f` allows (error 27): raise `ulimit -f`",
            ),
            (unusable(mounted, "opening", 24), "close some or raise `ulimit -n`"),
            (unusable(mounted, "opening", 13), "no permission (error 13): restart the container"),
        ] {
            let text = refusal.to_string();
            assert!(text.contains(way) && !text.contains("remove"), "{text}");
            assert!(text.matches("restart the container").count() < 2, "{text}");
        }
    }

    fn limits(memory: u64, core: u8) -> Limits {
        Limits { memory: core::num::NonZeroU64::new(memory), core: CorePercent::new(core).ok() }
    }

    #[test]
    fn the_limits_of_a_file_are_told_with_those_that_were_asked_for() {
        const GIB: u64 = 1 << 30;
        let path = Text(c"/f");
        for (held, asked, lifted, want) in [
            (limits(4 * GIB, 0), limits(GIB, 0), false, "limits card 1 to 4096 MiB, not to 1024 MiB: that"),
            (limits(0, 0), limits(GIB, 0), false, "does not limit card 1 to 1024 MiB: that"),
            (limits(GIB, 0), limits(0, 0), false, "limits card 1 to 1024 MiB: that"),
            (
                limits(0, 30),
                limits(0, 80),
                false,
                "limits card 1 to 30 % of the cores, not to 80 % of the cores: that",
            ),
            (limits(0, 30), limits(0, 0), false, "limits card 1 to 30 % of the cores: that"),
            (limits(0, 0), limits(0, 20), false, "does not limit card 1 to 20 % of the cores: that"),
            (
                limits(GIB, 30),
                limits(7, 0),
                false,
                "limits card 1 to 1024 MiB, not to 7 bytes, and limits card 1 to 30 % of the cores: that",
            ),
            (
                limits(0, 30),
                limits(0, 30),
                true,
                "limits card 1 to 30 % of the cores: GPU_CORE_UTILIZATION_POLICY=",
            ),
        ] {
            let text = Notice::OfFile { path, ordinal: 1, held, asked, lifted }.to_string();
            let rest = text.strip_prefix("usage file /f is in use and ").unwrap();
            assert!(rest.starts_with(want), "{text}");
        }
    }

    #[test]
    fn a_notice_fits_a_line() {
        let path = Text(c"/a/path/that/is/longer/than/a/message/repeats/0123456789/0123456789/0123456789/0123456789/0123456789");
        let (held, asked) = (limits(u64::MAX - 1, 30), limits(u64::MAX - 2, 80));
        for notice in [
            Notice::OfFile { path, ordinal: 15, held, asked, lifted: false },
            Notice::OfFile { path, ordinal: 15, held, asked, lifted: true },
            Notice::OfNoCard { variable: Variable::MemoryLimit(Some(15)), cards: 15 },
            Notice::BelowContext {
                ordinal: 15,
                by_hand: Some(Variable::MemoryLimit(Some(15))),
                limit: 4,
                needed: 400 << 20,
            },
        ] {
            let text = notice.to_string();
            assert!(text.len() + notice.code().len() + 2 < said::LONGEST, "{text}");
        }
        let notice = Notice::BelowContext { ordinal: 0, by_hand: None, limit: 100 << 20, needed: 400 << 20 };
        let want =
            "card 0: the limit of 100 MiB (nvidia.com/gpumem) is less than the 400 MiB that a context takes";
        assert!(notice.to_string().starts_with(want), "{notice}");
        let notice = Notice::BelowContext {
            ordinal: 1,
            by_hand: Some(Variable::MemoryLimit(None)),
            limit: 4,
            needed: 9,
        };
        let want = "card 1: the limit of 4 bytes (CUDA_DEVICE_MEMORY_LIMIT) is less";
        assert!(notice.to_string().starts_with(want), "{notice}");
    }

    #[test]
    fn a_path_is_escaped_and_cut() {
        assert_eq!(Text(c"/tmp/\x1b[0m").to_string(), r"/tmp/\x1b[0m");
        let long = Text(c"/0123456789/0123456789/0123456789/0123456789/0123456789/0123456789/0123456789/0123456789/0123456789");
        assert_eq!(long.to_string().strip_suffix("...").map(str::len), Some(SHOWN));
    }
}
