//! A node of its own for each test: the library copied to a folder of the test, because one copy serves one
//! state file per process.
#![allow(dead_code, reason = "each test binary uses its part")]
#![expect(unsafe_code, reason = "the environment names the state file")]
#![expect(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use fake_state::{NodeState, STATE_ENV, Store, profile, verb};
use nvml_wrapper::Nvml;
use nvml_wrapper::error::NvmlError;

static ENVIRONMENT: Mutex<()> = Mutex::new(());

pub struct Node {
    pub nvml: Nvml,
    pub store: Store,
    _folder: tempfile::TempDir,
}

impl Node {
    pub fn new(profile: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let state = profile::node(profile, "node-a").unwrap();
        let store = Store::create(folder.path().join("node-a.json"), &state).unwrap();
        let nvml = open(&folder, Some(store.path().to_owned())).unwrap();
        Self { nvml, store, _folder: folder }
    }

    /// A node whose cards have MIG on.
    pub fn with_mig(profile: &str) -> Self {
        let node = Self::new(profile);
        node.edit(|state| {
            for card in &mut state.cards {
                (card.mig.current, card.mig.pending) = (true, true);
            }
        });
        node
    }

    pub fn fake(&self, line: &str) {
        verb::apply(&self.store, &line.split_whitespace().map(str::to_owned).collect::<Vec<_>>()).unwrap();
    }

    pub fn edit(&self, change: impl FnOnce(&mut NodeState)) {
        self.store
            .update(|state| {
                change(state);
                Ok::<_, fake_state::Error>(())
            })
            .unwrap();
    }

    pub fn state(&self) -> NodeState {
        self.store.read_with_calls().unwrap()
    }

    pub fn uuid(&self, card: usize) -> String {
        self.state().cards[card].uuid.clone()
    }
}

/// Opens a fresh copy of the library with that state file.
pub fn open(folder: &tempfile::TempDir, state: Option<PathBuf>) -> Result<Nvml, NvmlError> {
    let built = std::env::current_exe().unwrap().with_file_name("libnvidia_ml.so");
    let copy = folder.path().join("libnvidia-ml.so.1");
    std::fs::copy(built, &copy).unwrap();
    with_state(state, || Nvml::builder().lib_path(copy.as_os_str()).init())
}

/// Runs something that calls init, with the environment naming that state file.
pub fn with_state<T>(state: Option<PathBuf>, init: impl FnOnce() -> T) -> T {
    let _one_at_a_time = ENVIRONMENT.lock().unwrap_or_else(PoisonError::into_inner);
    match state {
        // SAFETY: the library reads the environment in init alone, which runs under the same lock.
        Some(path) => unsafe { std::env::set_var(STATE_ENV, path) },
        // SAFETY: as above.
        None => unsafe { std::env::remove_var(STATE_ENV) },
    }
    init()
}
