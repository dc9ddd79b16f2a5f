//! What this crate refuses.

use std::path::PathBuf;

/// A refusal: what was wrong, with its value, and the way out.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The state file or its lock could not be read or written.
    #[error("cannot {action} {}: check that the node's state file exists and its folder is writable", path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// On which file.
        path: PathBuf,
        /// Why it failed.
        #[source]
        source: std::io::Error,
    },
    /// The state file is not one of ours.
    #[error("{} does not hold a node's state: make it anew with the lab", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// Where the parser stopped.
        #[source]
        source: serde_json::Error,
    },
    /// A state could not be written as JSON.
    #[error("cannot print the state of node {node} as JSON")]
    Print {
        /// The node.
        node: String,
        /// What the printer said.
        #[source]
        source: serde_json::Error,
    },
    /// The live file is none, or one of another layout.
    #[error("{} is not a live file of this version: stop the node's programs and delete it", path.display())]
    ForeignLive {
        /// The file.
        path: PathBuf,
    },
    /// More processes than slots.
    #[error("{} has no free slot of {slots}: end some of the node's programs", path.display())]
    LiveFull {
        /// The file.
        path: PathBuf,
        /// How many there are.
        slots: usize,
    },
    /// No card model of that name, or a count that no node has.
    #[error(
        "unknown card profile {profile:?}: use one of {known}, each with an optional count x1 to x16, joined by +"
    )]
    UnknownProfile {
        /// As given.
        profile: String,
        /// The models there are.
        known: String,
    },
    /// No verb, or one that does not exist.
    #[error("unknown verb {verb:?}: usage: {usage}")]
    UnknownVerb {
        /// As given; empty when none was.
        verb: String,
        /// Every verb's form.
        usage: &'static str,
    },
    /// An argument of a verb is missing, superfluous or not what it must be.
    #[error("{verb}: {what} {value:?} is not valid: {hint}; usage: {usage}")]
    BadArgument {
        /// The verb.
        verb: &'static str,
        /// Which argument.
        what: &'static str,
        /// As given; empty when missing.
        value: String,
        /// What would be valid.
        hint: String,
        /// The verb's form.
        usage: &'static str,
    },
    /// The node has no such card.
    #[error("node {node} has no card {card:?}: it has {known}")]
    UnknownCard {
        /// The node.
        node: String,
        /// As given.
        card: String,
        /// The cards there are, `index=uuid`.
        known: String,
    },
    /// A card with processes on it was to be reset.
    #[error("card {card} has processes {pids:?}: end them with `process {card} PID 0` before the reset")]
    CardBusy {
        /// The card's uuid.
        card: String,
        /// Who is on it.
        pids: Vec<u32>,
    },
}

impl Error {
    /// The stable name of this refusal.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::Io { .. } => "StateFileIo",
            Self::Malformed { .. } => "StateFileMalformed",
            Self::Print { .. } => "StatePrint",
            Self::ForeignLive { .. } => "LiveFileForeign",
            Self::LiveFull { .. } => "LiveFileFull",
            Self::UnknownProfile { .. } => "UnknownCardProfile",
            Self::UnknownVerb { .. } => "UnknownVerb",
            Self::BadArgument { .. } => "BadArgument",
            Self::UnknownCard { .. } => "UnknownCard",
            Self::CardBusy { .. } => "CardBusy",
        }
    }
}
