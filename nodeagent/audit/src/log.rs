use std::fs::{File, OpenOptions, TryLockError};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use jiff::Timestamp;
use sqlx::migrate::{MigrateError, Migrator};
use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqliteSynchronous};
use sqlx::{ConnectOptions as _, Connection as _, SqliteConnection};
use tokio::sync::{mpsc, oneshot, watch};
use tracing::{info, warn};

use crate::chain::{Head, Row};
use crate::event::{Entry, Event};
use crate::{Error, reader, store};

static MIGRATIONS: Migrator = sqlx::migrate!("../../migrations");

/// Number of a row: from 1, without gaps.
pub type Seq = u64;

/// Events that share one transaction at most: a batch commits within milliseconds, so nobody waits long behind it.
const BATCH: usize = 256;
/// Requests that may wait; further callers wait before they queue.
const QUEUE: usize = 1024;
/// How often a second writer looks whether the first has gone.
const LOCK_POLL: Duration = Duration::from_millis(50);

/// How to open the log for writing.
#[derive(Clone, Debug)]
pub struct Options {
    /// The file; its folder must exist.
    pub path: PathBuf,
    /// Name of this node, written into each row.
    pub node: String,
    /// How long to wait for a former agent to end, and for SQLite's write lock. PreStartContainer has 30 s in all.
    pub busy_timeout: Duration,
}

impl Options {
    /// Options with a wait of 5 s.
    #[must_use]
    pub fn new(path: impl Into<PathBuf>, node: impl Into<String>) -> Self {
        Self { path: path.into(), node: node.into(), busy_timeout: Duration::from_secs(5) }
    }
}

/// Whether the log can be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Health {
    /// The last row.
    pub head: Head,
    /// What keeps it from being written; `None` while all is well.
    pub failure: Option<Failure>,
}

/// Since when and why the log cannot be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// [`Error::code`] of the first error.
    pub code: &'static str,
    /// Its message.
    pub message: String,
    /// When it happened.
    pub since: Timestamp,
    /// Events refused since then.
    pub refused: u64,
}

impl Health {
    /// Whether the last write succeeded.
    #[must_use]
    pub fn is_ok(&self) -> bool {
        self.failure.is_none()
    }
}

type Reply = oneshot::Sender<Result<Vec<Seq>, Error>>;

enum Message {
    Append { entries: Vec<Entry>, reply: Reply },
    Close { done: oneshot::Sender<()> },
}

/// The writing end. Clones write to the same log.
#[derive(Clone)]
pub struct AuditLog {
    messages: mpsc::Sender<Message>,
    health: watch::Receiver<Health>,
    path: Arc<Path>,
}

impl std::fmt::Debug for AuditLog {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AuditLog")
            .field("path", &self.path)
            .field("health", &self.health())
            .finish_non_exhaustive()
    }
}

impl AuditLog {
    /// Opens or makes the log and starts its writer on the current tokio runtime. `clock` stamps the rows.
    ///
    /// # Errors
    /// [`Error::Owned`] while another writer is at work, and every way in which a file can be unfit.
    pub async fn open(
        options: Options,
        clock: impl Fn() -> Timestamp + Send + Sync + 'static,
    ) -> Result<Self, Error> {
        let path = options.path.clone();
        let lock = own(&path, options.busy_timeout).await?;
        if std::fs::metadata(&path).is_ok_and(|file| file.len() > 0) {
            reader::refuse_foreign(&path).await?;
        } else {
            create(&path)?;
        }
        let mut connection = connect(&options).await?;
        migrate(&mut connection, &options).await?;
        let head = store::head(&mut connection)
            .await
            .map_err(|e| Error::database(&path, "read the end of", options.busy_timeout, e))?;
        info!(path = %path.display(), %head, "opened audit log");
        let (health_in, health) = watch::channel(Health { head, failure: None });
        let (messages, inbox) = mpsc::channel(QUEUE);
        let file = identity(&path).map_err(|e| Error::io(&path, "open", e))?;
        let writer = Writer {
            options,
            clock: Box::new(clock),
            connection: Some(connection),
            file,
            health: health_in,
            lock,
        };
        tokio::spawn(writer.run(inbox));
        Ok(Self { messages, health, path: path.into() })
    }

    /// Adds a fact and returns once it is on disk. A fact whose key is there already is answered with the number it
    /// has. An entry is written even where the caller stops waiting.
    ///
    /// # Errors
    /// Nothing was acknowledged: the caller must refuse what it was about to do. As after any failed write, the fact
    /// may still be found in the log later; a fact that was acknowledged is never missing.
    pub async fn append(&self, entry: impl Into<Entry>) -> Result<Seq, Error> {
        let numbers = self.append_many(vec![entry.into()]).await?;
        numbers.first().copied().ok_or_else(|| self.closed())
    }

    /// Adds facts in order, all or none, as [`Self::append`] does.
    ///
    /// # Errors
    /// As [`Self::append`].
    pub async fn append_many(&self, entries: Vec<Entry>) -> Result<Vec<Seq>, Error> {
        let (reply, answer) = oneshot::channel();
        self.messages.send(Message::Append { entries, reply }).await.map_err(|_| self.closed())?;
        answer.await.map_err(|_| self.closed())?
    }

    /// Tries a write without a fact of its own, e.g. to learn whether space is back; one that ends a failure leaves
    /// [`Event::AuditGap`].
    ///
    /// # Errors
    /// As [`Self::append`].
    pub async fn probe(&self) -> Result<(), Error> {
        self.append_many(Vec::new()).await.map(|_| ())
    }

    /// Whether the log can be written, as of the last try.
    #[must_use]
    pub fn health(&self) -> Health {
        self.health.borrow().clone()
    }

    /// [`Self::health`] as it changes.
    #[must_use]
    pub fn health_changes(&self) -> watch::Receiver<Health> {
        self.health.clone()
    }

    /// The file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes what is queued, ends the writer and gives up the lock. Clones get [`Error::Closed`] from then on.
    pub async fn close(self) {
        let (done, closed) = oneshot::channel();
        if self.messages.send(Message::Close { done }).await.is_ok() {
            // An error means that the writer is gone already.
            let _ = closed.await;
        }
    }

    fn closed(&self) -> Error {
        Error::Closed { path: self.path.to_path_buf() }
    }
}

/// Takes the writer's lock, a file of its own: the kernel frees it with the process, and opening and closing the
/// database file itself here would drop SQLite's own locks.
async fn own(path: &Path, patience: Duration) -> Result<File, Error> {
    let mut name = path.as_os_str().to_owned();
    name.push(".lock");
    let lock = PathBuf::from(name);
    let file = OpenOptions::new()
        .create(true)
        .append(true)
        .mode(0o600)
        .open(&lock)
        .map_err(|e| Error::io(path, "lock", e))?;
    let start = Instant::now();
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::WouldBlock) if start.elapsed() < patience => {
                tokio::time::sleep(LOCK_POLL).await;
            }
            Err(TryLockError::WouldBlock) => return Err(Error::Owned { path: path.to_owned(), lock }),
            Err(TryLockError::Error(e)) => return Err(Error::io(path, "lock", e)),
        }
    }
}

/// Makes the empty file, readable by root alone: it holds the names of everybody's pods.
fn create(path: &Path) -> Result<(), Error> {
    match OpenOptions::new().create_new(true).write(true).mode(0o600).open(path) {
        Ok(_) => {}
        Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => {}
        Err(e) => return Err(Error::io(path, "create", e)),
    }
    // The file's name has to survive a power cut too.
    match path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
        Some(folder) => {
            File::open(folder).and_then(|f| f.sync_all()).map_err(|e| Error::io(path, "create", e))
        }
        None => Ok(()),
    }
}

/// Tells files apart, whatever name they have.
fn identity(path: &Path) -> std::io::Result<(u64, u64)> {
    std::fs::metadata(path).map(|file| (file.dev(), file.ino()))
}

async fn connect(options: &Options) -> Result<SqliteConnection, Error> {
    SqliteConnectOptions::new()
        .filename(&options.path)
        .journal_mode(SqliteJournalMode::Wal)
        .synchronous(SqliteSynchronous::Full)
        .busy_timeout(options.busy_timeout)
        .connect()
        .await
        .map_err(|e| Error::database(&options.path, "open", options.busy_timeout, e))
}

async fn migrate(connection: &mut SqliteConnection, options: &Options) -> Result<(), Error> {
    MIGRATIONS.run(connection).await.map_err(|e| match e {
        MigrateError::Execute(e) | MigrateError::ExecuteMigration(e, _) => {
            Error::database(&options.path, "set up", options.busy_timeout, e)
        }
        other => Error::Schema { path: options.path.clone(), source: Arc::new(other) },
    })
}

/// Owns the connection; one task, so rows get their numbers and hashes one after the other.
struct Writer {
    options: Options,
    clock: Box<dyn Fn() -> Timestamp + Send + Sync>,
    /// `None` after a failed write: what state the connection is in is not worth knowing, a new one is clean.
    connection: Option<SqliteConnection>,
    /// The file that was opened.
    file: (u64, u64),
    health: watch::Sender<Health>,
    lock: File,
}

impl Writer {
    async fn run(mut self, mut inbox: mpsc::Receiver<Message>) {
        let mut closing = None;
        while closing.is_none() {
            let Some(message) = inbox.recv().await else { break };
            let mut next = Some(message);
            let mut batch = Vec::new();
            let mut size = 0;
            while let Some(message) = next.take() {
                match message {
                    Message::Append { entries, reply } => {
                        size += entries.len();
                        batch.push((entries, reply));
                        next = (size < BATCH).then(|| inbox.try_recv().ok()).flatten();
                    }
                    Message::Close { done } => closing = Some(done),
                }
            }
            if !batch.is_empty() {
                self.answer(batch).await;
            }
        }
        if let Some(connection) = self.connection.take()
            && let Err(error) = connection.close().await
        {
            // Every row is in the WAL; the next open moves them over.
            warn!(%error, "audit log closed without a checkpoint");
        }
        drop(self.lock);
        if let Some(done) = closing {
            // Nobody waits any more: fine.
            let _ = done.send(());
        }
    }

    /// Commits the batch, then tells each caller. Nobody hears of a number before it is on disk.
    async fn answer(&mut self, batch: Vec<(Vec<Entry>, Reply)>) {
        let (requests, replies): (Vec<_>, Vec<_>) = batch.into_iter().unzip();
        let events: usize = requests.iter().map(Vec::len).sum();
        let answers = match self.write(&requests).await {
            Ok(answers) => answers,
            Err(error) => {
                self.failed(&error, events as u64);
                requests.iter().map(|_| Err(error.clone())).collect()
            }
        };
        for (reply, answer) in replies.into_iter().zip(answers) {
            // A caller that stopped waiting is no error: its fact is written all the same.
            let _ = reply.send(answer);
        }
    }

    fn failed(&self, error: &Error, events: u64) {
        let now = (self.clock)();
        self.health.send_modify(|health| {
            let failure = health.failure.get_or_insert_with(|| {
                warn!(code = error.code(), %error, cause = std::error::Error::source(error).map(tracing::field::display), "audit log cannot be written");
                Failure { code: error.code(), message: error.to_string(), since: now, refused: 0 }
            });
            failure.refused += events;
        });
    }

    /// One transaction for all requests. The inner results are for each request alone; an error out here is
    /// everybody's.
    async fn write(&mut self, requests: &[Vec<Entry>]) -> Result<Vec<Result<Vec<Seq>, Error>>, Error> {
        // A row in a file without a name is lost with the agent, however well it was written.
        if identity(&self.options.path).ok() != Some(self.file) {
            return Err(Error::Replaced { path: self.options.path.clone() });
        }
        let mut connection = match self.connection.take() {
            Some(connection) => connection,
            None => connect(&self.options).await?,
        };
        match self.transact(&mut connection, requests).await {
            Ok((answers, head)) => {
                self.connection = Some(connection);
                self.health.send_modify(|health| {
                    if let Some(failure) = health.failure.take() {
                        info!(
                            code = failure.code,
                            refused = failure.refused,
                            "audit log can be written again"
                        );
                    }
                    health.head = head;
                });
                Ok(answers)
            }
            Err(error) => {
                // It failed already; a failed close says nothing new.
                let _ = connection.close().await;
                Err(error)
            }
        }
    }

    async fn transact(
        &self,
        connection: &mut SqliteConnection,
        requests: &[Vec<Entry>],
    ) -> Result<(Vec<Result<Vec<Seq>, Error>>, Head), Error> {
        let failed = |e| Error::database(&self.options.path, "write", self.options.busy_timeout, e);
        // A deferred transaction that upgrades to a write one can be refused whatever the timeout.
        let mut transaction = connection.begin_with("BEGIN IMMEDIATE").await.map_err(failed)?;
        let mut head = store::head(&mut transaction).await.map_err(failed)?;
        let gap = self.health.borrow().failure.as_ref().map(|failure| Event::AuditGap {
            code: failure.code.to_owned(),
            since: failure.since.to_string(),
            refused: failure.refused,
        });
        if let Some(gap) = gap {
            head = self.add(&mut transaction, head, &gap.into()).await?;
        }
        let mut answers = Vec::with_capacity(requests.len());
        for entries in requests {
            if let Err(refused) = self.check_keys(&mut transaction, entries).await? {
                answers.push(Err(refused));
                continue;
            }
            let mut numbers = Vec::with_capacity(entries.len());
            for entry in entries {
                let known = match &entry.key {
                    Some(key) => store::keyed(&mut transaction, key).await.map_err(failed)?,
                    None => None,
                };
                let seq = if let Some((seq, _)) = known {
                    seq
                } else {
                    head = self.add(&mut transaction, head, entry).await?;
                    head.seq
                };
                numbers.push(seq);
            }
            answers.push(Ok(numbers));
        }
        transaction.commit().await.map_err(failed)?;
        Ok((answers, head))
    }

    async fn add(&self, connection: &mut SqliteConnection, head: Head, entry: &Entry) -> Result<Head, Error> {
        let row = Row::next(
            head,
            (self.clock)(),
            &self.options.node,
            &entry.event,
            entry.key.as_deref(),
            entry.trace_id.as_deref(),
        )?;
        store::insert(connection, &row)
            .await
            .map_err(|e| Error::database(&self.options.path, "write", self.options.busy_timeout, e))?;
        Ok(row.head())
    }

    /// Whether each key of a request is new or names a fact of the same kind. Looked at before anything of the
    /// request is written, so that it is refused whole.
    async fn check_keys(
        &self,
        connection: &mut SqliteConnection,
        entries: &[Entry],
    ) -> Result<Result<(), Error>, Error> {
        for (place, entry) in entries.iter().enumerate() {
            let Some(key) = &entry.key else { continue };
            let kind = entry.event.kind();
            let earlier = entries.iter().take(place).find(|e| e.key.as_ref() == Some(key));
            let existing = match earlier {
                Some(earlier) => Some(earlier.event.kind().to_owned()),
                None => store::keyed(connection, key)
                    .await
                    .map_err(|e| Error::database(&self.options.path, "write", self.options.busy_timeout, e))?
                    .map(|(_, kind)| kind),
            };
            if let Some(existing) = existing.filter(|existing| existing != kind) {
                return Ok(Err(Error::KeyReused { key: key.clone(), existing, kind }));
            }
        }
        Ok(Ok(()))
    }
}
