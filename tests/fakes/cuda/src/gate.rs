//! What every entry point does first.
#![expect(unsafe_code, reason = "notices a fork")]

use std::ffi::c_int;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::abi::Code;
use crate::driver::Driver;

/// An entry point: how often it was called, and the error that its next calls answer.
#[derive(Debug)]
pub(crate) struct Site {
    pub(crate) name: &'static str,
    calls: AtomicU64,
    /// `(calls left << 32) | code`.
    failure: AtomicU64,
}

impl Site {
    pub(crate) const fn new(name: &'static str) -> Self {
        Self { name, calls: AtomicU64::new(0), failure: AtomicU64::new(0) }
    }

    pub(crate) fn calls(&self) -> u64 {
        self.calls.load(Relaxed)
    }

    pub(crate) fn fail(&self, code: u32, calls: u32) {
        self.failure.store(u64::from(calls) << 32 | u64::from(code), SeqCst);
    }

    fn enter(&self) -> Result<(), Code> {
        self.calls.fetch_add(1, Relaxed);
        if self.failure.load(Relaxed) == 0 { Ok(()) } else { self.take_failure() }
    }

    #[cold]
    fn take_failure(&self) -> Result<(), Code> {
        let next = |word: u64| (word >> 32 > 0).then(|| if word >> 32 == 1 { 0 } else { word - (1 << 32) });
        let taken = self.failure.fetch_update(SeqCst, SeqCst, next);
        let code = taken.ok().and_then(|word| c_int::try_from(word & 0xFFFF_FFFF).ok());
        code.map_or(Ok(()), |code| Err(Code(code)))
    }
}

/// 0 before `cuInit`, 1 after it, 2 in a child of a process that was initialised.
static STATE: AtomicU8 = AtomicU8::new(0);

/// Constant work for the hot entry points, see the crate's page.
static STUB: AtomicBool = AtomicBool::new(false);

static DRIVER: Mutex<Option<Driver>> = Mutex::new(None);

#[inline]
pub(crate) fn stub() -> bool {
    STUB.load(Relaxed)
}

pub(crate) fn initialised() -> bool {
    STATE.load(SeqCst) == 1
}

pub(crate) fn driver() -> MutexGuard<'static, Option<Driver>> {
    DRIVER.lock().unwrap_or_else(PoisonError::into_inner)
}

/// `cuInit`: the first call makes the driver.
pub(crate) fn init(site: &Site, make: impl FnOnce() -> Result<Driver, Code>) -> c_int {
    answer(site.enter().and_then(|()| {
        if STATE.load(SeqCst) == 2 {
            return Err(Code::NOT_INITIALIZED);
        }
        wait_in_queue(site);
        let mut driver = driver();
        if driver.is_none() {
            *driver = Some(make()?);
            STUB.store(std::env::var_os("FAKE_CUDA_STUB").is_some_and(|v| v == "1"), SeqCst);
            // SAFETY: the handler only stores to an atomic.
            unsafe { fake_state::live::at_fork(forked) };
            TRACE.store(std::env::var_os("FAKE_CUDA_TRACE").is_some_and(|v| v == "1"), SeqCst);
            SLOW.store(std::env::var_os("FAKE_CUDA_SLOW").is_some(), SeqCst);
            LATE.store(std::env::var_os("FAKE_CUDA_LATE").is_some(), SeqCst);
            STATE.store(1, SeqCst);
        }
        Ok(())
    }))
}

/// The child cannot use its parent's cards; the driver answers `NOT_INITIALIZED` for the rest of its life.
extern "C" fn forked() {
    STATE.store(2, SeqCst);
    STUB.store(false, SeqCst);
}

fn answer(result: Result<(), Code>) -> c_int {
    result.map_or_else(|code| code.0, |()| 0)
}

/// Runs a body with the driver.
pub(crate) fn call(site: &Site, body: impl FnOnce(&mut Driver) -> Result<(), Code>) -> c_int {
    open(site, || driver().as_mut().map_or(Err(Code::NOT_INITIALIZED), body))
}

/// Runs a body that takes the driver itself, or does without.
pub(crate) fn open(site: &Site, body: impl FnOnce() -> Result<(), Code>) -> c_int {
    early(site, || if initialised() { body() } else { Err(Code::NOT_INITIALIZED) })
}

/// Runs a body that needs no `cuInit`.
pub(crate) fn early(site: &Site, body: impl FnOnce() -> Result<(), Code>) -> c_int {
    if stub() {
        return answer(body());
    }
    let code = answer(site.enter().and_then(|()| {
        if SLOW.load(Relaxed) {
            wait_in_queue(site);
        }
        body()
    }));
    if LATE.load(Relaxed) {
        answer_late(site);
    }
    if TRACE.load(Relaxed) {
        trace(site.name, code);
    }
    code
}

/// Whether `FAKE_CUDA_SLOW` names a call.
static SLOW: AtomicBool = AtomicBool::new(false);

/// `FAKE_CUDA_SLOW=SYMBOL:N:US`: the N-th call of a symbol finds its queue full, or `cuInit` a card that is slow to start. It
/// takes so many microseconds before it does anything, in which other threads can call.
#[cold]
fn wait_in_queue(site: &Site) {
    let slow = std::env::var("FAKE_CUDA_SLOW").unwrap_or_default();
    let mut words = slow.split(':');
    let is_named = words.next() == Some(site.name);
    let mut number = || words.next().and_then(|word| word.parse().ok()).unwrap_or(0);
    if is_named && number() == site.calls() {
        std::thread::sleep(Duration::from_micros(number()));
    }
}

/// Whether `FAKE_CUDA_LATE` names a call.
static LATE: AtomicBool = AtomicBool::new(false);

/// `FAKE_CUDA_LATE=SYMBOL:US,…`: a symbol's calls answer so many microseconds after they have done all.
#[cold]
fn answer_late(site: &Site) {
    let late = std::env::var("FAKE_CUDA_LATE").unwrap_or_default();
    let us = late.split(',').filter_map(|one| one.split_once(':')).find(|(name, _)| *name == site.name);
    if let Some((_, us)) = us {
        std::thread::sleep(Duration::from_micros(us.parse().unwrap_or(0)));
    }
}

/// Each call and its answer on stderr with `FAKE_CUDA_TRACE=1`, from `cuInit` on.
static TRACE: AtomicBool = AtomicBool::new(false);

#[cold]
pub(crate) fn trace(name: &str, code: c_int) {
    if TRACE.load(Relaxed) {
        eprintln!("fake-cuda: {name} {code}");
    }
}

/// Declares entry points whose body gets the driver.
macro_rules! entry {
    ($(fn $name:ident($($arg:ident: $ty:ty),* $(,)?) |$driver:pat_param| $body:block)*) => {$(
        #[unsafe(no_mangle)]
        pub(crate) extern "C" fn $name($($arg: $ty),*) -> std::ffi::c_int {
            $crate::gate::call(&$crate::table::site::$name, |$driver| $body)
        }
    )*};
}
pub(crate) use entry;

/// Declares entry points in two flavours of the default stream; the body is told whether it is the thread's own.
macro_rules! streamed {
    ($(fn $name:ident / $own:ident($($arg:ident: $ty:ty),* $(,)?) |$driver:pat_param, $flavour:pat_param| $body:block)*) => {$(
        #[unsafe(no_mangle)]
        pub(crate) extern "C" fn $name($($arg: $ty),*) -> std::ffi::c_int {
            let $flavour = $crate::stream::Default::Legacy;
            $crate::gate::call(&$crate::table::site::$name, |$driver| $body)
        }

        #[unsafe(no_mangle)]
        pub(crate) extern "C" fn $own($($arg: $ty),*) -> std::ffi::c_int {
            let $flavour = $crate::stream::Default::Thread;
            $crate::gate::call(&$crate::table::site::$own, |$driver| $body)
        }
    )*};
}
pub(crate) use streamed;

/// Declares entry points with a way round all bookkeeping for `FAKE_CUDA_STUB=1`.
macro_rules! hot {
    ($(fn $name:ident($($arg:ident: $ty:ty),* $(,)?) quick $quick:block |$driver:pat_param| $body:block)*) => {$(
        #[unsafe(no_mangle)]
        pub(crate) extern "C" fn $name($($arg: $ty),*) -> std::ffi::c_int {
            if $crate::gate::stub() && let Some(code) = $quick {
                return code;
            }
            $crate::gate::call(&$crate::table::site::$name, |$driver| $body)
        }
    )*};
}
pub(crate) use hot;

/// Declares entry points that take the driver themselves.
macro_rules! open_entry {
    ($(fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $body:block)*) => {$(
        #[unsafe(no_mangle)]
        pub(crate) extern "C" fn $name($($arg: $ty),*) -> std::ffi::c_int {
            $crate::gate::open(&$crate::table::site::$name, || $body)
        }
    )*};
}
pub(crate) use open_entry;
