//! The state file: read whole, replaced whole, changed under a lock.

use std::fs::{self, File, OpenOptions};
use std::io::Write as _;
use std::path::{Path, PathBuf};

use nix::fcntl::{Flock, FlockArg};

use crate::{Error, NodeState, calls};

/// Environment variable that names the state file of the node.
pub const STATE_ENV: &str = "MULLION_FAKE_STATE";

/// A node's state file. Readers need no lock: the file is only ever replaced by a complete one.
#[derive(Clone, Debug)]
pub struct Store {
    path: PathBuf,
}

impl Store {
    /// Makes the file, or replaces it, with `state`.
    ///
    /// # Errors
    /// [`Error::Io`] when the folder cannot be made or written.
    pub fn create(path: impl Into<PathBuf>, state: &NodeState) -> Result<Self, Error> {
        let store = Self { path: path.into() };
        if let Some(folder) = store.path.parent() {
            fs::create_dir_all(folder).map_err(io("make", folder))?;
        }
        let _lock = store.lock()?;
        store.write(state)?;
        Ok(store)
    }

    /// An existing file.
    ///
    /// # Errors
    /// [`Error::Io`] when it cannot be read, [`Error::Malformed`] when it is not a node's state.
    pub fn open(path: impl Into<PathBuf>) -> Result<Self, Error> {
        let store = Self { path: path.into() };
        store.read()?;
        Ok(store)
    }

    /// The file's path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The state now.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn read(&self) -> Result<NodeState, Error> {
        let text = fs::read(&self.path).map_err(io("read", &self.path))?;
        serde_json::from_slice(&text).map_err(|source| Error::Malformed { path: self.path.clone(), source })
    }

    /// The state now, with the count of calls of every process that used it.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn read_with_calls(&self) -> Result<NodeState, Error> {
        let mut state = self.read()?;
        state.calls = calls::sum(&self.path)?;
        Ok(state)
    }

    /// Changes the state under the lock; nothing is written when `change` refuses or changes nothing.
    ///
    /// # Errors
    /// What `change` refuses, or as [`Self::open`].
    pub fn update<T, E: From<Error>>(
        &self,
        change: impl FnOnce(&mut NodeState) -> Result<T, E>,
    ) -> Result<T, E> {
        let _lock = self.lock()?;
        let before = self.read()?;
        let mut after = before.clone();
        let answer = change(&mut after)?;
        if after != before {
            self.write(&after)?;
        }
        Ok(answer)
    }

    fn lock(&self) -> Result<Flock<File>, Error> {
        let path = with_suffix(&self.path, ".lock");
        let file = OpenOptions::new().create(true).append(true).open(&path).map_err(io("open", &path))?;
        Flock::lock(file, FlockArg::LockExclusive).map_err(|(_, errno)| io("lock", &path)(errno.into()))
    }

    /// Callers hold the lock, so the temporary name has one writer.
    fn write(&self, state: &NodeState) -> Result<(), Error> {
        let mut text = serde_json::to_vec_pretty(state)
            .map_err(|source| Error::Print { node: state.node.clone(), source })?;
        text.push(b'\n');
        let new = with_suffix(&self.path, ".new");
        let mut file = File::create(&new).map_err(io("create", &new))?;
        file.write_all(&text).map_err(io("write", &new))?;
        drop(file);
        fs::rename(&new, &self.path).map_err(io("replace", &self.path))
    }
}

pub(crate) fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Error + use<> {
    let path = path.to_owned();
    move |source| Error::Io { action, path, source }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile;

    #[test]
    fn writers_in_parallel_lose_no_change() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("node-a.json");
        Store::create(&path, &profile::node("h100x4", "node-a").unwrap()).unwrap();
        let threads: Vec<_> = (0..8)
            .map(|_| {
                let store = Store::open(&path).unwrap();
                std::thread::spawn(move || {
                    for _ in 0..25 {
                        store
                            .update(|s| {
                                let card = s.cards[0].uuid.clone();
                                s.push_xid(&card, 43, None);
                                Ok::<_, Error>(())
                            })
                            .unwrap();
                    }
                })
            })
            .collect();
        for thread in threads {
            thread.join().unwrap();
        }
        let state = Store::open(&path).unwrap().read().unwrap();
        assert_eq!(state.next_event, 201);
        let sequences: Vec<_> = state.events.iter().map(|e| e.sequence).collect();
        assert_eq!(sequences, (1..=200).collect::<Vec<_>>());
    }

    #[test]
    fn a_refused_change_leaves_the_file_alone() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::create(folder.path().join("s"), &profile::node("a30", "n").unwrap()).unwrap();
        let before = fs::read(store.path()).unwrap();
        let refused = store.update(|s| {
            s.cards.clear();
            Err::<(), _>(Error::UnknownVerb { verb: String::new(), usage: "" })
        });
        assert!(refused.is_err());
        assert_eq!(fs::read(store.path()).unwrap(), before);
    }

    #[test]
    fn what_is_not_a_state_is_refused_by_name() {
        let folder = tempfile::tempdir().unwrap();
        for (case, text, want) in [
            ("not JSON", "GPU 0", "StateFileMalformed"),
            ("another object", r#"{"node":"a"}"#, "StateFileMalformed"),
            ("truncated", r#"{"node":"#, "StateFileMalformed"),
        ] {
            let path = folder.path().join("state.json");
            fs::write(&path, text).unwrap();
            assert_eq!(Store::open(&path).unwrap_err().code(), want, "{case}");
        }
        assert_eq!(Store::open(folder.path().join("none")).unwrap_err().code(), "StateFileIo");
    }
}
