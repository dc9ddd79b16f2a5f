//! What every entry point does first, and the node as one call sees it.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use fake_state::live::Live;
use fake_state::live::layout::CARDS;
use fake_state::{Card, ComputeInstance, GpuInstance, NodeState, STATE_ENV, Store, calls};

use crate::code::Code;
use crate::handles::{self, Handle, Identity};
use crate::live;

struct Library {
    /// Inits without a shutdown.
    users: u32,
    store: Option<Store>,
    cache: Option<Cache>,
    counters: Option<Counters>,
}

/// The state as read last. The open file keeps its inode number from being given to a successor, so an
/// equal stamp means an equal file.
struct Cache {
    _file: File,
    stamp: [i64; 5],
    state: Arc<NodeState>,
}

/// Calls of this process, see [`fake_state::calls`].
struct Counters {
    file: File,
    counts: Vec<u64>,
}

static LIBRARY: Mutex<Library> = Mutex::new(Library { users: 0, store: None, cache: None, counters: None });

fn library() -> MutexGuard<'static, Library> {
    LIBRARY.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Library {
    fn snapshot(&mut self) -> Result<Session, Code> {
        let store = self.store.clone().ok_or(Code::UNINITIALIZED)?;
        let on_disk = fs::metadata(store.path()).map_err(|_| Code::UNKNOWN)?;
        if let Some(cache) = self.cache.as_ref().filter(|c| c.stamp == stamp(&on_disk)) {
            return Ok(Session { store, state: Arc::clone(&cache.state) });
        }
        let file = File::open(store.path()).map_err(|_| Code::UNKNOWN)?;
        let opened = file.metadata().map_err(|_| Code::UNKNOWN)?;
        let mut state = store.read()?;
        if only_with_nodes() {
            for card in &mut state.cards {
                card.present &= Path::new(&format!("/dev/nvidia{}", card.minor)).exists();
            }
        }
        let state = Arc::new(state);
        // A replacement between open and read leaves an old stamp on a new state: read again next time.
        self.cache = Some(Cache { _file: file, stamp: stamp(&opened), state: Arc::clone(&state) });
        Ok(Session { store, state })
    }

    fn count(&mut self, name: &str) {
        if let (Some(counters), Some(place)) = (self.counters.as_mut(), calls::index_of(name))
            && let Some(count) = counters.counts.get_mut(place)
        {
            *count += 1;
            // Counts are for tests and `show`; a full disk must not fail the call that is counted.
            let _ = counters.file.write_all_at(&count.to_ne_bytes(), 8 * place as u64);
        }
    }
}

impl Counters {
    fn open(state: &Path) -> Option<Self> {
        let folder = calls::folder(state);
        fs::create_dir_all(&folder).ok()?;
        let path = folder.join(std::process::id().to_string());
        let file = File::options().create(true).truncate(false).read(true).write(true).open(&path).ok()?;
        let bytes = fs::read(&path).ok()?;
        let mut counts: Vec<u64> = bytes.as_chunks::<8>().0.iter().map(|w| u64::from_ne_bytes(*w)).collect();
        counts.resize(calls::NAMES.len(), 0);
        Some(Self { file, counts })
    }
}

/// In a container a driver lists the cards whose device nodes it finds. `MULLION_FAKE_DEVICE_NODES=1` has this one do so; on the
/// simulated node itself there are none.
fn only_with_nodes() -> bool {
    std::env::var_os("MULLION_FAKE_DEVICE_NODES").is_some_and(|v| v == "1")
}

fn stamp(file: &fs::Metadata) -> [i64; 5] {
    let [dev, ino, size] = [file.dev(), file.ino(), file.size()].map(u64::cast_signed);
    [dev, ino, size, file.mtime(), file.mtime_nsec()]
}

/// Runs an entry point's body between the driver's usual checks.
pub(crate) fn call(name: &str, body: impl FnOnce(&Session) -> Result<(), Code>) -> u32 {
    let answer = enter(name).and_then(|session| body(&session));
    answer.map_or_else(|code| code.0, |()| 0)
}

fn enter(name: &str) -> Result<Session, Code> {
    let before = {
        let mut library = library();
        library.count(name);
        library.current()?
    };
    before.disturb(name)
}

/// `nvmlInit`: each call needs its shutdown; the first finds the state file.
pub(crate) fn init(name: &str) -> u32 {
    let started = library().start(name);
    let answer = started.and_then(|session| {
        session.disturb(name).inspect_err(|_| {
            shutdown();
        })
    });
    answer.map_or_else(|code| code.0, |_| 0)
}

impl Library {
    fn start(&mut self, name: &str) -> Result<Session, Code> {
        if self.users == 0 {
            let path = std::env::var_os(STATE_ENV).ok_or(Code::DRIVER_NOT_LOADED)?;
            let store = Store::open(path).map_err(|_| Code::DRIVER_NOT_LOADED)?;
            self.counters = Counters::open(store.path());
            live::asked();
            self.store = Some(store);
        }
        self.count(name);
        let session = self.snapshot().map_err(|_| Code::DRIVER_NOT_LOADED)?;
        self.users += 1;
        Ok(session)
    }

    fn current(&mut self) -> Result<Session, Code> {
        if self.users == 0 { Err(Code::UNINITIALIZED) } else { self.snapshot() }
    }
}

/// Ends one use of the library; true when it was the last.
pub(crate) fn shutdown() -> bool {
    let mut library = library();
    library.users = library.users.saturating_sub(1);
    if library.users == 0 {
        (library.store, library.cache, library.counters) = (None, None, None);
    }
    library.users == 0
}

/// The node during one call.
#[derive(Debug)]
pub(crate) struct Session {
    store: Store,
    pub(crate) state: Arc<NodeState>,
}

/// A device handle resolved: a card, or a MIG device on it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Device<'a> {
    pub(crate) card: &'a Card,
    pub(crate) mig: Option<(&'a GpuInstance, &'a ComputeInstance)>,
}

impl Session {
    /// The node as it is now.
    pub(crate) fn now() -> Result<Self, Code> {
        library().current()
    }

    /// The live region, and the card's place in it.
    pub(crate) fn live(&self, card: &Card) -> Option<(&'static Live, usize)> {
        let live = live::of(self.store.path())?;
        let place = self.state.cards.iter().position(|c| c.uuid == card.uuid)?;
        (place < CARDS).then_some((live, place))
    }

    /// Bytes of the card that running programs have, those of the dead included until they are released.
    pub(crate) fn live_bytes(&self, card: &Card) -> u64 {
        self.live(card).map_or(0, |(live, place)| live.given(place))
    }

    /// Waits the injected latency, answers the injected error, or gives the node as it is afterwards.
    fn disturb(self, name: &str) -> Result<Self, Code> {
        let wait = self.state.latency_ms(name);
        let session = if wait > 0 {
            thread::sleep(Duration::from_millis(wait));
            Self::now()?
        } else {
            self
        };
        if session.state.has_error(name) {
            // Counted down under the lock: of two calls at once each takes one.
            let code = session.store.update(|state| Ok::<_, Code>(state.take_error(name)))?;
            return code.map_or_else(Self::now, |code| Err(Code(code)));
        }
        Ok(session)
    }

    /// Changes a card in the state file.
    pub(crate) fn change<T>(
        &self,
        uuid: &str,
        change: impl FnOnce(&mut Card) -> Result<T, Code>,
    ) -> Result<T, Code> {
        self.store.update(|state| {
            let card = state.card_mut(uuid).filter(|c| c.present).ok_or(Code::GPU_IS_LOST)?;
            if card.lost { Err(Code::GPU_IS_LOST) } else { change(card) }
        })
    }

    /// A card that answers.
    pub(crate) fn card(&self, uuid: &str) -> Result<&Card, Code> {
        self.state.card(uuid).filter(|c| c.present && !c.lost).ok_or(Code::GPU_IS_LOST)
    }

    /// A card or a MIG device.
    pub(crate) fn device(&self, handle: Handle) -> Result<Device<'_>, Code> {
        match handles::identity(handle) {
            Some(Identity::Card { card }) => Ok(Device { card: self.card(&card)?, mig: None }),
            Some(Identity::Mig { card, gi, ci }) => {
                let card = self.card(&card)?;
                let mig = live(card, gi, ci).ok_or(Code::INVALID_ARGUMENT)?;
                Ok(Device { card, mig: Some(mig) })
            }
            _ => Err(Code::INVALID_ARGUMENT),
        }
    }

    /// A card; a MIG device is refused.
    pub(crate) fn gpu(&self, handle: Handle) -> Result<&Card, Code> {
        self.device(handle)
            .and_then(|d| if d.mig.is_none() { Ok(d.card) } else { Err(Code::INVALID_ARGUMENT) })
    }

    /// A GPU instance; one that was destroyed is not found.
    pub(crate) fn gpu_instance(&self, handle: Handle) -> Result<(&Card, &GpuInstance), Code> {
        let Some(Identity::GpuInstance { card, gi }) = handles::identity(handle) else {
            return Err(Code::INVALID_ARGUMENT);
        };
        let card = self.card(&card)?;
        card.active_table()?;
        Ok((card, card.gpu_instance(gi).ok_or(Code::NOT_FOUND)?))
    }

    /// A compute instance; one that was destroyed is not found.
    pub(crate) fn compute_instance(
        &self,
        handle: Handle,
    ) -> Result<(&Card, &GpuInstance, &ComputeInstance), Code> {
        let Some(Identity::ComputeInstance { card, gi, ci }) = handles::identity(handle) else {
            return Err(Code::INVALID_ARGUMENT);
        };
        let card = self.card(&card)?;
        card.active_table()?;
        let (gi, ci) = live(card, gi, ci).ok_or(Code::NOT_FOUND)?;
        Ok((card, gi, ci))
    }
}

fn live(card: &Card, gi: u32, ci: u32) -> Option<(&GpuInstance, &ComputeInstance)> {
    let gi = card.gpu_instance(gi)?;
    gi.compute.iter().find(|c| c.id == ci).map(|ci| (gi, ci))
}

/// The handle of a card.
pub(crate) fn card_handle(card: &Card) -> Handle {
    handles::of(Identity::Card { card: card.uuid.clone() })
}

/// The handle of a MIG device.
pub(crate) fn mig_handle(card: &Card, gi: u32, ci: u32) -> Handle {
    handles::of(Identity::Mig { card: card.uuid.clone(), gi, ci })
}
