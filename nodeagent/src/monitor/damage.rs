//! Whether a container's usage file can be read: without it nobody knows what the container holds, and the library
//! lets no new process at its cards. Pure.
//!
//! A file that its tenant spoiled heals by a restart of the container, which gets another one: that is believed as
//! soon as the damage was. The same file, readable again, is its tenant's work, and each turn is an Event, a write and
//! a row: it is believed as late as the end of a bypass.

use crate::monitor::escape::{CALM_LOOKS, LOOKS};
use crate::monitor::files::Unreadable;
use crate::prepare::USAGE_IN_CONTAINER;

/// Device and inode of a file.
type Inode = (u64, u64);

/// What is wrong with a usage file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The stable name of the reason.
    pub code: &'static str,
    /// The reason in words.
    pub text: String,
}

impl Fault {
    /// What a problem says; `None` where the file is only not there, as while the container is made or removed, or slow.
    #[must_use]
    pub fn of(problem: &Unreadable) -> Option<Self> {
        let passes = matches!(problem, Unreadable::Missing | Unreadable::Held { long: false });
        (!passes).then(|| Self { code: problem.code(), text: mullion_telemetry::source_chain(problem) })
    }
}

impl std::fmt::Display for Fault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { code, text } = self;
        write!(f, "usage file {USAGE_IN_CONTAINER} cannot be used ({code}: {text}). ")?;
        // These keep the agent from the file, not the library, which has it mapped.
        let away = [Unreadable::Locked, Unreadable::Held { long: true }, Unreadable::Broken]
            .map(|problem| problem.code());
        if !away.contains(code) {
            f.write_str("A process that starts in the container is not let at its cards (cuInit fails). ")?;
        }
        f.write_str(
            "What processes hold is not counted. Restart the container, or delete the pod: it then has a new file",
        )
    }
}

/// What is thought of a container's usage file over time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Damage {
    /// Looks in a row that contradict what is thought.
    against: u8,
    /// The file of the last turn.
    inode: Inode,
    /// What is thought.
    pub fault: Option<Fault>,
}

impl Damage {
    /// Takes in a look at the file `inode`; true when what is thought has turned.
    pub fn look(&mut self, seen: Option<Fault>, inode: Inode) -> bool {
        if seen.is_some() == self.fault.is_some() {
            self.against = 0;
            return false;
        }
        self.against = self.against.saturating_add(1);
        let same = self.fault.is_some() && self.inode == inode;
        if self.against < if same { CALM_LOOKS } else { LOOKS } {
            return false;
        }
        *self = Self { against: 0, inode, fault: seen };
        true
    }
}
