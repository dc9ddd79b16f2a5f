use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Why the audit log could not be written or read. Cloneable, because one failed write answers many callers.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    /// Somebody else holds SQLite's write lock.
    #[error(
        "audit log {path} is locked by another process for longer than {waited:?}: end what holds it open for writing"
    )]
    Busy {
        /// The log.
        path: PathBuf,
        /// How long was waited.
        waited: Duration,
        /// What SQLite said.
        #[source]
        source: Arc<sqlx::Error>,
    },
    /// Another writer is at work.
    #[error("audit log {path} already has a writer (lock on {lock}): only one agent may run per node")]
    Owned {
        /// The log.
        path: PathBuf,
        /// The lock file.
        lock: PathBuf,
    },
    /// No space left.
    #[error(
        "no space left for audit log {path}: free space on its file system; the agent goes on by itself then"
    )]
    DiskFull {
        /// The log.
        path: PathBuf,
        /// What SQLite said.
        #[source]
        source: Arc<sqlx::Error>,
    },
    /// The file is damaged.
    #[error(
        "audit log {path} is damaged: move it away for inspection and restart the agent, it starts a new one"
    )]
    Corrupt {
        /// The log.
        path: PathBuf,
        /// What SQLite said.
        #[source]
        source: Arc<sqlx::Error>,
    },
    /// A row that cannot be understood.
    #[error(
        "row {seq} of the audit log holds no event that this release knows ({kind}): use the release that wrote it"
    )]
    UnknownEvent {
        /// Number of the row.
        seq: u64,
        /// Its kind.
        kind: String,
        /// What the parser said.
        #[source]
        source: Arc<serde_json::Error>,
    },
    /// The file is not an audit log.
    #[error("{path} is not an audit log: give the path of a file that an agent wrote")]
    NotALog {
        /// The file.
        path: PathBuf,
    },
    /// The file does not exist.
    #[error("there is no audit log at {path}: give the right path, or wait for the agent's first start")]
    NotFound {
        /// The file.
        path: PathBuf,
    },
    /// Another schema.
    #[error(
        "audit log {path} has a schema that this release does not know: use the release that wrote it, or a newer one"
    )]
    Schema {
        /// The log.
        path: PathBuf,
        /// What the migrator said.
        #[source]
        source: Arc<sqlx::migrate::MigrateError>,
    },
    /// The file is not the one that was opened.
    #[error(
        "audit log {path} was removed or replaced while the agent writes it: put the file back, or restart the agent to \
         begin a new one"
    )]
    Replaced {
        /// The log.
        path: PathBuf,
    },
    /// The operating system refused.
    #[error("cannot {doing} audit log {path}: check the path, its permissions and its file system (no NFS)")]
    Io {
        /// The log.
        path: PathBuf,
        /// What was being done.
        doing: &'static str,
        /// What the system said.
        #[source]
        source: Arc<std::io::Error>,
    },
    /// SQLite refused.
    #[error("cannot {doing} audit log {path}: check its permissions and its file system (no NFS)")]
    Database {
        /// The log.
        path: PathBuf,
        /// What was being done.
        doing: &'static str,
        /// What SQLite said.
        #[source]
        source: Arc<sqlx::Error>,
    },
    /// A key that names another fact already.
    #[error(
        "audit key {key} names a {existing} already and cannot name a {kind}: give each fact its own key"
    )]
    KeyReused {
        /// The key.
        key: String,
        /// Kind of the row that has it.
        existing: String,
        /// Kind of the refused event.
        kind: &'static str,
    },
    /// An event that cannot be written as JSON.
    #[error("a {kind} cannot be written as JSON")]
    Encode {
        /// Kind of the event.
        kind: &'static str,
        /// What the serialiser said.
        #[source]
        source: Arc<serde_json::Error>,
    },
    /// The writer has stopped.
    #[error("the writer of audit log {path} has stopped: restart the agent")]
    Closed {
        /// The log.
        path: PathBuf,
    },
    /// A value on the command line.
    #[error("{flag} {value:?} is not {want}")]
    Argument {
        /// Name of the flag or argument.
        flag: &'static str,
        /// What was given.
        value: String,
        /// What is accepted, with an example.
        want: &'static str,
    },
    /// The output could not be written.
    #[error("cannot write the output")]
    Output {
        /// What the system said.
        #[source]
        source: Arc<std::io::Error>,
    },
}

/// SQLite's primary result codes, <https://www.sqlite.org/rescode.html>.
mod sqlite {
    pub(super) const BUSY: i32 = 5;
    pub(super) const LOCKED: i32 = 6;
    pub(super) const CORRUPT: i32 = 11;
    pub(super) const FULL: i32 = 13;
    pub(super) const NOTADB: i32 = 26;
    /// Extended: the shared-memory file beside the WAL could not be made larger.
    pub(super) const IOERR_SHMSIZE: i32 = 4874;
}

impl Error {
    /// The stable name of this error, the same in log, Event, metric and CLI.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::Busy { .. } | Self::Owned { .. } => "AuditBusy",
            Self::DiskFull { .. } => "AuditDiskFull",
            Self::Corrupt { .. } => "AuditCorrupt",
            Self::UnknownEvent { .. } => "AuditUnknownEvent",
            Self::NotALog { .. } => "AuditNotALog",
            Self::NotFound { .. } => "AuditNotFound",
            Self::Schema { .. } => "AuditSchema",
            Self::Replaced { .. } => "AuditReplaced",
            Self::Io { .. } | Self::Database { .. } => "AuditIo",
            Self::KeyReused { .. } => "AuditKeyReused",
            Self::Encode { .. } => "AuditEncode",
            Self::Closed { .. } => "AuditClosed",
            Self::Argument { .. } => "AuditArgument",
            Self::Output { .. } => "AuditOutput",
        }
    }

    /// Sorts what SQLite said by what an operator can do about it.
    pub(crate) fn database(path: &Path, doing: &'static str, waited: Duration, error: sqlx::Error) -> Self {
        let path = path.to_owned();
        let source = Arc::new(error);
        let code = match source.as_ref() {
            sqlx::Error::Database(e) => e.code().and_then(|code| code.parse::<i32>().ok()),
            // Text that is not UTF-8, a hash of another length: SQLite itself never stores these here.
            sqlx::Error::ColumnDecode { .. } | sqlx::Error::Decode(_) => Some(sqlite::CORRUPT),
            _ => None,
        };
        match code {
            Some(sqlite::IOERR_SHMSIZE) => Self::DiskFull { path, source },
            Some(code) => match code & 0xff {
                sqlite::BUSY | sqlite::LOCKED => Self::Busy { path, waited, source },
                sqlite::FULL => Self::DiskFull { path, source },
                sqlite::CORRUPT => Self::Corrupt { path, source },
                sqlite::NOTADB => Self::NotALog { path },
                _ => Self::Database { path, doing, source },
            },
            None => Self::Database { path, doing, source },
        }
    }

    pub(crate) fn io(path: &Path, doing: &'static str, source: std::io::Error) -> Self {
        Self::Io { path: path.to_owned(), doing, source: Arc::new(source) }
    }
}
