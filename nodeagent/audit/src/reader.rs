use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use jiff::Timestamp;
use sqlx::sqlite::SqliteConnectOptions;
use sqlx::{ConnectOptions as _, Connection as _, QueryBuilder, Row as _, Sqlite, SqliteConnection};

use crate::chain::{Head, Row};
use crate::replay::{HeldAllocation, Holder, NodeLedger, replay};
use crate::{Error, store};

/// How long a reader waits for SQLite's locks; in WAL mode it hardly ever has to.
const PATIENCE: Duration = Duration::from_secs(5);
/// Rows held in memory at a time when the whole log is walked.
const PAGE: u64 = 500;

/// Triggers that the migrations set up: without them SQL would let rows be changed.
const TRIGGERS: [&str; 6] = [
    "event_cards_append",
    "event_cards_no_delete",
    "event_cards_no_update",
    "events_append",
    "events_no_delete",
    "events_no_update",
];

/// Which rows to list. The default is all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Filter {
    /// Not before.
    pub since: Option<Timestamp>,
    /// Not after.
    pub until: Option<Timestamp>,
    /// [`crate::Event::kind`].
    pub kind: Option<String>,
    /// Namespace of the pod.
    pub namespace: Option<String>,
    /// Name of the pod.
    pub pod: Option<String>,
    /// Uid of the pod.
    pub pod_uid: Option<String>,
    /// Uuid of a card or MIG instance.
    pub card: Option<String>,
    /// At most so many, the newest.
    pub limit: Option<u32>,
}

/// What is wrong with a log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// First row concerned, where it is about a row.
    pub seq: Option<u64>,
    /// What is wrong.
    pub problem: Problem,
}

/// A way in which a log is not as its writer left it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Problem {
    /// A row is missing before this one.
    Gap {
        /// The number that was due.
        expected: u64,
    },
    /// The row names another predecessor.
    Predecessor,
    /// The row's columns or cards were changed.
    Changed,
    /// The newest rows are missing.
    CutTail {
        /// Highest number ever written.
        highest: u64,
    },
    /// The row noted elsewhere is missing or another.
    OtherHead {
        /// What was noted.
        expected: Head,
    },
    /// A trigger that refuses changes is gone.
    Unguarded {
        /// Its name.
        trigger: &'static str,
    },
    /// SQLite cannot read it.
    Unreadable {
        /// What it said.
        message: String,
    },
    /// SQLite's own check of its file found something.
    Structure {
        /// What it said.
        message: String,
    },
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(seq) = self.seq {
            write!(f, "row {seq}: ")?;
        }
        match &self.problem {
            Problem::Gap { expected } => write!(f, "row {expected} is missing before it"),
            Problem::Predecessor => write!(f, "it does not follow the row before it"),
            Problem::Changed => write!(f, "it was changed after it was written"),
            Problem::CutTail { highest } => write!(f, "rows up to {highest} were written and are missing"),
            Problem::OtherHead { expected } => write!(f, "it is not the expected {expected}"),
            Problem::Unguarded { trigger } => write!(f, "trigger {trigger}, which refuses changes, is gone"),
            Problem::Unreadable { message } => write!(f, "it cannot be read: {message}"),
            Problem::Structure { message } => write!(f, "the file is damaged: {message}"),
        }
    }
}

/// Result of [`AuditReader::verify`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verification {
    /// Rows that are in order, from the first one on.
    pub rows: u64,
    /// The last row in order.
    pub head: Head,
    /// What is wrong; empty for a log that is as it was written.
    pub findings: Vec<Finding>,
}

impl Verification {
    /// Whether nothing was found.
    #[must_use]
    pub fn is_ok(&self) -> bool {
        self.findings.is_empty()
    }
}

/// A reading end: works on a live file, in the agent's or another process, and never writes a row.
#[derive(Debug)]
pub struct AuditReader {
    connection: SqliteConnection,
    path: PathBuf,
}

impl AuditReader {
    /// Opens an existing log.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::NotALog`], or what SQLite says.
    pub async fn open(path: impl Into<PathBuf>) -> Result<Self, Error> {
        let path = path.into();
        let mut connection = connect(&path).await?;
        if identity(&mut connection).await.map_err(|e| failed(&path, e))?.0 != store::APPLICATION_ID {
            return Err(Error::NotALog { path });
        }
        Ok(Self { connection, path })
    }

    /// The last row.
    ///
    /// # Errors
    /// What SQLite says.
    pub async fn head(&mut self) -> Result<Head, Error> {
        store::head(&mut self.connection).await.map_err(|e| failed(&self.path, e))
    }

    /// The rows that match, oldest first.
    ///
    /// # Errors
    /// What SQLite says.
    pub async fn list(&mut self, filter: &Filter) -> Result<Vec<Row>, Error> {
        let mut query = QueryBuilder::<Sqlite>::new(store::SELECT_EVENTS);
        query.push("WHERE TRUE");
        if let Some(since) = filter.since {
            query.push(" AND e.time_ns >= ").push_bind(nanoseconds(since));
        }
        if let Some(until) = filter.until {
            query.push(" AND e.time_ns <= ").push_bind(nanoseconds(until));
        }
        for (column, wanted) in [
            (" AND e.kind = ", &filter.kind),
            (" AND e.pod_namespace = ", &filter.namespace),
            (" AND e.pod_name = ", &filter.pod),
            (" AND e.pod_uid = ", &filter.pod_uid),
        ] {
            if let Some(wanted) = wanted {
                query.push(column).push_bind(wanted.clone());
            }
        }
        if let Some(card) = &filter.card {
            query.push(" AND e.seq IN (SELECT seq FROM event_cards WHERE card = ").push_bind(card.clone());
            query.push(" OR mig_uuid = ").push_bind(card.clone()).push(")");
        }
        query.push(" ORDER BY e.seq DESC LIMIT ").push_bind(filter.limit.map_or(-1, i64::from));
        let mut rows = self.fetch(query).await?;
        rows.reverse();
        Ok(rows)
    }

    /// What happened to a pod, oldest first; pods of the same name one after the other.
    ///
    /// # Errors
    /// What SQLite says.
    pub async fn pod(&mut self, namespace: &str, name: &str) -> Result<Vec<Row>, Error> {
        let filter =
            Filter { namespace: Some(namespace.to_owned()), pod: Some(name.to_owned()), ..Filter::default() };
        self.list(&filter).await
    }

    /// The uids of pods that begin with `start`, in order, but no more than two: one is clear, two are not.
    ///
    /// # Errors
    /// What SQLite says.
    pub async fn pod_uids_like(&mut self, start: &str) -> Result<Vec<String>, Error> {
        sqlx::query_scalar(
            "SELECT DISTINCT pod_uid FROM events WHERE pod_uid >= ?1 AND pod_uid < ?2 ORDER BY 1 LIMIT 2",
        )
        .bind(start)
        .bind(format!("{start}{}", char::MAX))
        .fetch_all(&mut self.connection)
        .await
        .map_err(|e| failed(&self.path, e))
    }

    /// Who had `card` (or a MIG instance by its own uuid) at `at`: reserved or prepared by then, and not released. A
    /// row stamped exactly `at` counts as happened. Times are the node's clock; where it was set back, rows in between
    /// are ambiguous and the order of rows decides.
    ///
    /// # Errors
    /// What SQLite says, or [`Error::UnknownEvent`].
    pub async fn who_had(&mut self, card: &str, at: Timestamp) -> Result<Vec<Holder>, Error> {
        let at = nanoseconds(at);
        let mut query = QueryBuilder::<Sqlite>::new(store::SELECT_EVENTS);
        query.push("WHERE e.time_ns <= ").push_bind(at);
        query.push(
            " AND e.allocation_uid IN (SELECT h.allocation_uid FROM event_cards c JOIN events h ON h.seq = c.seq \
             WHERE h.allocation_uid IS NOT NULL AND (c.card = ",
        );
        query.push_bind(card.to_owned()).push(" OR c.mig_uuid = ").push_bind(card.to_owned());
        query.push(") AND h.time_ns <= ").push_bind(at);
        query.push(
            " AND NOT EXISTS (SELECT 1 FROM events r WHERE r.allocation_uid = h.allocation_uid \
             AND r.kind IN ('Released', 'AllocationVoided') AND r.time_ns <= ",
        );
        query.push_bind(at).push(")) ORDER BY e.seq");
        Ok(replay(self.fetch(query).await?)?.holders(card))
    }

    /// The cards (and MIG instances) whose uuid begins with `start`, in order: `kubectl get vgpuallocations` shows the
    /// beginning only.
    ///
    /// # Errors
    /// What SQLite says.
    pub async fn cards_like(&mut self, start: &str) -> Result<Vec<String>, Error> {
        // A range, so that the index finds them: a log holds a row per card and event.
        sqlx::query_scalar(
            "SELECT card FROM event_cards WHERE card >= ?1 AND card < ?2 \
             UNION SELECT mig_uuid FROM event_cards WHERE mig_uuid >= ?1 AND mig_uuid < ?2 ORDER BY 1",
        )
        .bind(start)
        .bind(format!("{start}{}", char::MAX))
        .fetch_all(&mut self.connection)
        .await
        .map_err(|e| failed(&self.path, e))
    }

    /// Whether any row is about `card` (or a MIG instance by its own uuid).
    ///
    /// # Errors
    /// What SQLite says.
    pub async fn knows_card(&mut self, card: &str) -> Result<bool, Error> {
        sqlx::query_scalar("SELECT EXISTS (SELECT 1 FROM event_cards WHERE card = ?1 OR mig_uuid = ?1)")
            .bind(card)
            .fetch_one(&mut self.connection)
            .await
            .map_err(|e| failed(&self.path, e))
    }

    /// Grants that `Allocate` answered with, that no container was prepared with, and that were not withdrawn; with when
    /// their row was written. Reads rows about grants alone.
    ///
    /// # Errors
    /// What SQLite says.
    pub async fn open_grants(&mut self) -> Result<BTreeMap<String, Timestamp>, Error> {
        store::open_grants(&mut self.connection).await.map_err(|e| failed(&self.path, e))
    }

    /// Allocations that hold cards by the log's word: reserved or prepared, and neither voided nor released. Reads rows about
    /// such allocations alone.
    ///
    /// # Errors
    /// What SQLite says, or [`Error::UnknownEvent`].
    pub async fn open_allocations(&mut self) -> Result<BTreeMap<String, HeldAllocation>, Error> {
        let mut query = QueryBuilder::<Sqlite>::new(store::SELECT_EVENTS);
        query.push(
            "WHERE e.kind IN ('AllocationReserved', 'Prepared') AND NOT EXISTS (SELECT 1 FROM events r \
             WHERE r.allocation_uid = e.allocation_uid AND r.kind IN ('Released', 'AllocationVoided')) ORDER BY e.seq",
        );
        Ok(replay(self.fetch(query).await?)?.allocations)
    }

    /// Rebuilds the node's ledger from the first row to the last.
    ///
    /// # Errors
    /// What SQLite says, or [`Error::UnknownEvent`].
    pub async fn replay(&mut self) -> Result<NodeLedger, Error> {
        let end = self.head().await?.seq;
        let mut ledger = NodeLedger::default();
        while ledger.seq < end {
            let rows = self.page(ledger.seq, end).await?;
            if rows.is_empty() {
                break;
            }
            for row in rows {
                ledger.apply(row.seq, row.time, &row.event()?);
            }
        }
        Ok(ledger)
    }

    /// Walks the chain from the first row to the last one there is now, and looks at SQLite's own structures and
    /// guards. `expected` is a head noted elsewhere, which must be in the log. What this cannot show: see the crate's
    /// documentation.
    ///
    /// # Errors
    /// Only what keeps the file from being looked at; damage is a finding.
    pub async fn verify(&mut self, expected: Option<Head>) -> Result<Verification, Error> {
        // The head of an empty log is in every log.
        let expected = expected.filter(|head| *head != Head::EMPTY);
        let mut walk = Walk { head: Head::EMPTY, expected, findings: Vec::new() };
        // Both in one statement, so that a writer at work cannot come in between.
        let ends = sqlx::query(
            "SELECT (SELECT max(seq) FROM events) AS last, \
             (SELECT seq FROM sqlite_sequence WHERE name = 'events') AS highest",
        )
        .fetch_one(&mut self.connection)
        .await;
        let (last, highest) = match ends.and_then(|row| Ok((end(&row, "last")?, end(&row, "highest")?))) {
            Ok(ends) => ends,
            Err(e) => return self.unreadable(walk, e),
        };
        while walk.findings.is_empty() && walk.head.seq < last {
            match self.fetch_page(walk.head.seq, last).await {
                Ok(rows) if rows.is_empty() => break,
                Ok(rows) => rows.iter().take_while(|row| walk.step(row)).for_each(drop),
                Err(e) => return self.unreadable(walk, e),
            }
        }
        // The walk clears it where it passes it; a walk that broke off has not looked.
        if let Some(expected) = walk.expected.filter(|_| walk.findings.is_empty()) {
            walk.find(Some(expected.seq), Problem::OtherHead { expected });
        }
        if highest > last {
            walk.find(Some(last + 1), Problem::CutTail { highest });
        }
        match self.guards_and_structure(&mut walk).await {
            Ok(()) => Ok(walk.done()),
            Err(e) => self.unreadable(walk, e),
        }
    }

    async fn guards_and_structure(&mut self, walk: &mut Walk) -> Result<(), sqlx::Error> {
        let there: Vec<String> = sqlx::query_scalar("SELECT name FROM sqlite_schema WHERE type = 'trigger'")
            .fetch_all(&mut self.connection)
            .await?;
        for trigger in TRIGGERS.into_iter().filter(|name| !there.iter().any(|t| t == name)) {
            walk.find(None, Problem::Unguarded { trigger });
        }
        let said: Vec<String> =
            sqlx::query_scalar("PRAGMA integrity_check(10)").fetch_all(&mut self.connection).await?;
        for message in said.into_iter().filter(|line| line != "ok") {
            walk.find(None, Problem::Structure { message });
        }
        Ok(())
    }

    /// Damage ends the walk as a finding; anything else (permissions, locks) is an error.
    fn unreadable(&self, mut walk: Walk, error: sqlx::Error) -> Result<Verification, Error> {
        match failed(&self.path, error) {
            Error::Corrupt { source, .. } => {
                let next = walk.head.seq + 1;
                walk.find(Some(next), Problem::Unreadable { message: source.to_string() });
                Ok(walk.done())
            }
            other => Err(other),
        }
    }

    async fn fetch(&mut self, query: QueryBuilder<Sqlite>) -> Result<Vec<Row>, Error> {
        store::fetch(&mut self.connection, query).await.map_err(|e| failed(&self.path, e))
    }

    async fn page(&mut self, after: u64, end: u64) -> Result<Vec<Row>, Error> {
        self.fetch_page(after, end).await.map_err(|e| failed(&self.path, e))
    }

    /// The next rows behind `after`. Each page is a read transaction of its own: a long one would keep the writer's
    /// WAL from being reused, and rows never change.
    async fn fetch_page(&mut self, after: u64, end: u64) -> Result<Vec<Row>, sqlx::Error> {
        let bound = |number: u64| i64::try_from(number).unwrap_or(i64::MAX);
        let mut query = QueryBuilder::<Sqlite>::new(store::SELECT_EVENTS);
        query.push("WHERE e.seq > ").push_bind(bound(after)).push(" AND e.seq <= ").push_bind(bound(end));
        query.push(" ORDER BY e.seq LIMIT ").push_bind(bound(PAGE));
        store::fetch(&mut self.connection, query).await
    }
}

struct Walk {
    head: Head,
    expected: Option<Head>,
    findings: Vec<Finding>,
}

impl Walk {
    /// Takes one row; `false` ends the walk.
    fn step(&mut self, row: &Row) -> bool {
        let due = self.head.seq + 1;
        let problem = if row.seq != due {
            Problem::Gap { expected: due }
        } else if row.prev_hash != self.head.hash {
            Problem::Predecessor
        } else if row.digest() != row.hash {
            Problem::Changed
        } else {
            self.head = row.head();
            if self.expected == Some(self.head) {
                self.expected = None;
            }
            return true;
        };
        self.find(Some(row.seq), problem);
        false
    }

    fn find(&mut self, seq: Option<u64>, problem: Problem) {
        self.findings.push(Finding { seq, problem });
    }

    fn done(self) -> Verification {
        Verification { rows: self.head.seq, head: self.head, findings: self.findings }
    }
}

fn end(row: &sqlx::sqlite::SqliteRow, column: &str) -> Result<u64, sqlx::Error> {
    let number: Option<i64> = row.try_get(column)?;
    u64::try_from(number.unwrap_or(0)).map_err(|e| sqlx::Error::Decode(e.into()))
}

fn nanoseconds(time: Timestamp) -> i64 {
    let time = time.as_nanosecond();
    i64::try_from(time).unwrap_or(if time < 0 { i64::MIN } else { i64::MAX })
}

fn failed(path: &Path, error: sqlx::Error) -> Error {
    Error::database(path, "read", PATIENCE, error)
}

async fn connect(path: &Path) -> Result<SqliteConnection, Error> {
    match std::fs::metadata(path) {
        Ok(file) if file.is_file() => {}
        Ok(_) => return Err(Error::NotALog { path: path.to_owned() }),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            return Err(Error::NotFound { path: path.to_owned() });
        }
        Err(e) => return Err(Error::io(path, "open", e)),
    }
    let options = SqliteConnectOptions::new().filename(path).read_only(true).busy_timeout(PATIENCE);
    options.connect().await.map_err(|e| failed(path, e))
}

/// The file's application id and the number of its tables.
async fn identity(connection: &mut SqliteConnection) -> Result<(i32, i64), sqlx::Error> {
    let id = sqlx::query_scalar("PRAGMA application_id").fetch_one(&mut *connection).await?;
    let tables =
        sqlx::query_scalar("SELECT count(*) FROM sqlite_schema WHERE tbl_name <> '_sqlx_migrations'")
            .fetch_one(connection)
            .await?;
    Ok((id, tables))
}

/// Refuses a file that is neither an audit log nor an empty database, before a writer changes anything in it.
pub(crate) async fn refuse_foreign(path: &Path) -> Result<(), Error> {
    let mut connection = connect(path).await?;
    let (id, tables) = identity(&mut connection).await.map_err(|e| failed(path, e))?;
    connection.close().await.map_err(|e| failed(path, e))?;
    // An agent that died in its very first start leaves no id, and at most the migrator's own table.
    let own = id == store::APPLICATION_ID || (id == 0 && tables == 0);
    own.then_some(()).ok_or_else(|| Error::NotALog { path: path.to_owned() })
}
