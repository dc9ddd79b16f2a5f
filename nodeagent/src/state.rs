//! `state.db`: what the agent must know again at once after a restart, with the API server and the driver away.
//!
//! It can always be made anew, from the API server and the audit log; so a file that is damaged is thrown away, and a
//! power cut may lose the last milliseconds (the containers that they were about are gone with the boot).

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions, SqliteSynchronous};
use sqlx::{Row as _, SqlitePool};
use tracing::warn;

use crate::error::Error;

/// A grant that was filled: who has it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Grant {
    /// 16 hex digits.
    pub grant: String,
    /// Uid of the allocation.
    pub allocation: String,
    /// Uid of the pod.
    pub pod: String,
    /// The container.
    pub container: String,
    /// The kubelet's device ids, sorted.
    pub device_ids: Vec<String>,
    /// The library applies the limits.
    pub enforced: bool,
    /// Why it does not; `None` also where nobody knows any more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unenforced: Option<Unenforced>,
}

/// Why nothing holds a container to its limits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Unenforced {
    /// Stable code.
    pub code: String,
    /// In words.
    pub message: String,
}

/// Whether the file knows what was known before it was made: on a node that had one before, it was lost.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Rebuild {
    /// The audit log is still to be asked. What it does not know stands here, by grant: what the specs said that lay on the
    /// node, which the first run removed as it could not know of which boot they were.
    Due(BTreeMap<String, Limits>),
    /// It does.
    Done,
}

impl Default for Rebuild {
    /// A file that does not say is a new one.
    fn default() -> Self {
        Self::Due(BTreeMap::new())
    }
}

/// Whether a container has the library, and why not.
pub type Limits = (bool, Option<Unenforced>);

/// Single values, by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Key {
    /// The slots that were offered last.
    Slots,
    /// The boot that the rest is of.
    BootId,
    /// Uid of the Node object.
    NodeUid,
    /// Number of the last inventory.
    Observation,
    /// The `GPUNode` object as last seen or written.
    GpuNode,
    /// Cards with their health.
    Cards,
    /// Pids of processes on cards, by pod.
    CardPids,
    /// Wishes that cannot be read and that were told of.
    MisreadTold,
    /// The settings that name folders of which containers were given files, with their values.
    Folders,
    /// How much of what was known before the file was made is in it: [`Rebuild`].
    Rebuild,
}

impl Key {
    const fn name(self) -> &'static str {
        match self {
            Self::Slots => "slots",
            Self::BootId => "bootId",
            Self::NodeUid => "nodeUID",
            Self::Observation => "observation",
            Self::GpuNode => "gpuNode",
            Self::Cards => "cards",
            Self::CardPids => "cardPids",
            Self::MisreadTold => "misreadTold",
            Self::Folders => "folders",
            Self::Rebuild => "rebuild",
        }
    }
}

const SCHEMA: [&str; 3] = [
    "CREATE TABLE IF NOT EXISTS single (name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT, WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS allocations (uid TEXT PRIMARY KEY, object TEXT NOT NULL) STRICT, WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS grants (name TEXT PRIMARY KEY, allocation TEXT NOT NULL, value TEXT NOT NULL) \
     STRICT, WITHOUT ROWID",
];

/// The open file.
#[derive(Clone, Debug)]
pub struct State {
    pool: SqlitePool,
    path: PathBuf,
}

impl State {
    /// Opens `path`; a file that is damaged is moved aside (`.broken`) and made anew.
    ///
    /// # Errors
    /// [`Error::State`] for a file that cannot be opened and is not damaged (a full disk, a lock), or when not even an
    /// empty one can be made.
    pub async fn open(path: &Path) -> Result<Self, Error> {
        match Self::connect(path).await {
            Ok(state) => Ok(state),
            Err(error) if is_damage(&error) => {
                warn!(code = error.code(), error = %mullion_telemetry::source_chain(&error), "state file made anew");
                let suffixed = |suffix: &str| {
                    let mut name = path.as_os_str().to_owned();
                    name.push(suffix);
                    PathBuf::from(name)
                };
                std::fs::rename(path, suffixed(".broken")).map_err(Error::file("move aside", path))?;
                // They belong to the old file and would damage the new one.
                for suffix in ["-wal", "-shm"] {
                    let _ = std::fs::remove_file(suffixed(suffix));
                }
                Self::connect(path).await
            }
            Err(error) => Err(error),
        }
    }

    async fn connect(path: &Path) -> Result<Self, Error> {
        let failed = |action| move |source| Error::State { path: path.to_owned(), action, source };
        let options = SqliteConnectOptions::new()
            .filename(path)
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal)
            .synchronous(SqliteSynchronous::Normal)
            .busy_timeout(Duration::from_secs(5));
        let pool = SqlitePoolOptions::new()
            .max_connections(1)
            .idle_timeout(None)
            .max_lifetime(None)
            .connect_with(options)
            .await
            .map_err(failed("open"))?;
        let check: String =
            sqlx::query_scalar("PRAGMA quick_check(1)").fetch_one(&pool).await.map_err(failed("check"))?;
        if check != "ok" {
            return Err(failed("check")(sqlx::Error::Decode(check.into())));
        }
        for statement in SCHEMA {
            sqlx::query(statement).execute(&pool).await.map_err(failed("create"))?;
        }
        Ok(Self { pool, path: path.to_owned() })
    }

    fn failed(&self, action: &'static str) -> impl FnOnce(sqlx::Error) -> Error + use<> {
        let path = self.path.clone();
        move |source| Error::State { path, action, source }
    }

    /// A single value; `None` when it was never written or is of another version.
    ///
    /// # Errors
    /// [`Error::State`].
    pub async fn get<T: DeserializeOwned>(&self, key: Key) -> Result<Option<T>, Error> {
        let value: Option<String> = sqlx::query_scalar("SELECT value FROM single WHERE name = ?")
            .bind(key.name())
            .fetch_optional(&self.pool)
            .await
            .map_err(self.failed("read"))?;
        Ok(value.and_then(|v| parse(key.name(), &v)))
    }

    /// Writes a single value.
    ///
    /// # Errors
    /// [`Error::State`], [`Error::StateValue`].
    pub async fn put<T: Serialize + Sync>(&self, key: Key, value: &T) -> Result<(), Error> {
        let value = text(key.name(), value)?;
        sqlx::query(
            "INSERT INTO single VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = excluded.value",
        )
        .bind(key.name())
        .bind(value)
        .execute(&self.pool)
        .await
        .map_err(self.failed("write"))?;
        Ok(())
    }

    /// Every allocation that was kept.
    ///
    /// # Errors
    /// [`Error::State`].
    pub async fn allocations<T: DeserializeOwned>(&self) -> Result<Vec<T>, Error> {
        let rows = sqlx::query("SELECT object FROM allocations ORDER BY uid")
            .fetch_all(&self.pool)
            .await
            .map_err(self.failed("read"))?;
        Ok(rows.iter().filter_map(|r| parse("allocation", r.get::<&str, _>(0))).collect())
    }

    /// Keeps an allocation.
    ///
    /// # Errors
    /// [`Error::State`], [`Error::StateValue`].
    pub async fn put_allocation<T: Serialize + Sync>(&self, uid: &str, object: &T) -> Result<(), Error> {
        let object = text("allocation", object)?;
        sqlx::query(
            "INSERT INTO allocations VALUES (?, ?) ON CONFLICT (uid) DO UPDATE SET object = excluded.object",
        )
        .bind(uid)
        .bind(object)
        .execute(&self.pool)
        .await
        .map_err(self.failed("write"))?;
        Ok(())
    }

    /// Forgets an allocation and its grants, both or neither.
    ///
    /// # Errors
    /// [`Error::State`].
    pub async fn forget(&self, uid: &str) -> Result<(), Error> {
        let mut both = self.pool.begin().await.map_err(self.failed("write"))?;
        for statement in ["DELETE FROM grants WHERE allocation = ?", "DELETE FROM allocations WHERE uid = ?"]
        {
            sqlx::query(statement).bind(uid).execute(&mut *both).await.map_err(self.failed("write"))?;
        }
        both.commit().await.map_err(self.failed("write"))
    }

    /// Every grant that was kept.
    ///
    /// # Errors
    /// [`Error::State`].
    pub async fn grants(&self) -> Result<Vec<Grant>, Error> {
        let rows = sqlx::query("SELECT value FROM grants ORDER BY name")
            .fetch_all(&self.pool)
            .await
            .map_err(self.failed("read"))?;
        Ok(rows.iter().filter_map(|r| parse("grant", r.get::<&str, _>(0))).collect())
    }

    /// Keeps a grant.
    ///
    /// # Errors
    /// [`Error::State`], [`Error::StateValue`].
    pub async fn put_grant(&self, grant: &Grant) -> Result<(), Error> {
        let value = text("grant", grant)?;
        sqlx::query(
            "INSERT INTO grants VALUES (?, ?, ?) ON CONFLICT (name) DO UPDATE SET value = excluded.value",
        )
        .bind(&grant.grant)
        .bind(&grant.allocation)
        .bind(value)
        .execute(&self.pool)
        .await
        .map_err(self.failed("write"))?;
        Ok(())
    }

    /// Writes what is pending and closes the file.
    pub async fn close(&self) {
        self.pool.close().await;
    }
}

/// Whether the file itself is bad. All else passes, and what the file says is wanted then.
fn is_damage(error: &Error) -> bool {
    /// `SQLITE_CORRUPT` and `SQLITE_NOTADB`, <https://www.sqlite.org/rescode.html>.
    const DAMAGE: [i32; 2] = [11, 26];
    match error {
        Error::State { source: sqlx::Error::Database(e), .. } => {
            let code = e.code().and_then(|code| code.parse::<i32>().ok());
            code.is_some_and(|code| DAMAGE.contains(&(code & 0xff)))
        }
        // What `quick_check` found, or text that is none.
        Error::State { source: sqlx::Error::Decode(_) | sqlx::Error::ColumnDecode { .. }, .. } => true,
        _ => false,
    }
}

fn text<T: Serialize>(what: &'static str, value: &T) -> Result<String, Error> {
    serde_json::to_string(value).map_err(|source| Error::StateValue { what, source })
}

fn parse<T: DeserializeOwned>(what: &'static str, value: &str) -> Option<T> {
    let parsed = serde_json::from_str(value).map_err(|source| Error::StateValue { what, source });
    parsed
        .inspect_err(|error| {
            warn!(code = error.code(), error = %mullion_telemetry::source_chain(error), "dropped");
        })
        .ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn grant(name: &str, allocation: &str) -> Grant {
        Grant {
            grant: name.to_owned(),
            allocation: allocation.to_owned(),
            pod: "p".to_owned(),
            container: "c".to_owned(),
            device_ids: vec!["slot-0001".to_owned()],
            enforced: false,
            unenforced: None,
        }
    }

    #[tokio::test]
    async fn what_was_written_is_there_after_a_restart() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state.db");
        let state = State::open(&path).await.unwrap();
        state.put(Key::Slots, &vec!["slot-0000"]).await.unwrap();
        state.put(Key::Observation, &7_i64).await.unwrap();
        state.put(Key::Observation, &8_i64).await.unwrap();
        for (uid, grants) in [("a", ["0a", "0b"]), ("b", ["0c", "0d"])] {
            state.put_allocation(uid, &uid).await.unwrap();
            for name in grants {
                state.put_grant(&grant(name, uid)).await.unwrap();
            }
        }
        state.forget("a").await.unwrap();
        // Killed: not closed.
        drop(state);
        let state = State::open(&path).await.unwrap();
        assert_eq!(state.get::<Vec<String>>(Key::Slots).await.unwrap(), Some(vec!["slot-0000".to_owned()]));
        assert_eq!(state.get::<i64>(Key::Observation).await.unwrap(), Some(8));
        assert_eq!(state.get::<String>(Key::NodeUid).await.unwrap(), None);
        assert_eq!(state.get::<String>(Key::Observation).await.unwrap(), None, "another shape is dropped");
        assert_eq!(state.allocations::<String>().await.unwrap(), ["b"]);
        assert_eq!(state.grants().await.unwrap(), [grant("0c", "b"), grant("0d", "b")]);
    }

    #[tokio::test]
    async fn an_allocation_is_forgotten_with_its_grants_or_not_at_all() {
        let folder = tempfile::tempdir().unwrap();
        let state = State::open(&folder.path().join("state.db")).await.unwrap();
        state.put_allocation("a", &"a").await.unwrap();
        state.put_grant(&grant("0a", "a")).await.unwrap();
        let fails = "CREATE TRIGGER no BEFORE DELETE ON allocations BEGIN SELECT RAISE(ABORT, 'no'); END";
        sqlx::query(fails).execute(&state.pool).await.unwrap();
        assert_eq!(state.forget("a").await.unwrap_err().code(), "StateFailed");
        assert_eq!(state.grants().await.unwrap(), [grant("0a", "a")]);
        assert_eq!(state.allocations::<String>().await.unwrap(), ["a"]);
    }

    /// Slots and grants thrown away at a full disk or a lock would be missing when it is over.
    #[tokio::test]
    async fn a_file_that_is_only_out_of_reach_is_kept() {
        use sqlx::Connection as _;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state.db");
        let state = State::open(&path).await.unwrap();
        state.put(Key::Observation, &8_i64).await.unwrap();
        state.close().await;
        let options = SqliteConnectOptions::new().filename(&path);
        let mut other = sqlx::SqliteConnection::connect_with(&options).await.unwrap();
        sqlx::query("PRAGMA locking_mode = EXCLUSIVE").execute(&mut other).await.unwrap();
        sqlx::query("BEGIN EXCLUSIVE").execute(&mut other).await.unwrap();
        assert_eq!(State::open(&path).await.unwrap_err().code(), "StateFailed");
        drop(other);
        assert!(!folder.path().join("state.db.broken").exists());
        let state = State::open(&path).await.unwrap();
        assert_eq!(state.get::<i64>(Key::Observation).await.unwrap(), Some(8));
    }

    #[tokio::test]
    async fn a_damaged_file_is_made_anew() {
        for (case, bytes) in [
            ("no database", b"not a database, but long enough to be read as one".to_vec()),
            ("zeroes", vec![0; 9000]),
        ] {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("state.db");
            std::fs::write(&path, bytes).unwrap();
            let state = State::open(&path).await.unwrap();
            state.put(Key::Observation, &1_i64).await.unwrap();
            assert!(state.grants().await.unwrap().is_empty(), "{case}");
        }
    }
}
