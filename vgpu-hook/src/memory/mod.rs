//! Memory: what each family of allocations charges, and what it gives back.
//!
//! | family | charged | to |
//! | --- | --- | --- |
//! | `cuMemAlloc`, pitched, managed | the driver's blocks (`blocks`) | the current context's card |
//! | arrays, mipmapped arrays | what the driver says they need | the same |
//! | `cuMemAllocAsync`, pools | what the pool holds (`pools`) | the pool's card |
//! | `cuMemCreate` | its size, until handles and mappings are gone | `prop.location`'s card; the host's is free |
//! | graph memory | what the card's graph pool holds | the graph's card |
//! | contexts, green contexts, modules, libraries | what the card has less of (`measured`) | their card |
//! | IPC, imports, external memory, multicast | nothing: its maker is charged | |
//! | host memory | nothing | |
//!
//! The pattern is the same everywhere: claim, ask the driver, settle; or undo. An allocation over the limit is answered
//! with `CUDA_ERROR_OUT_OF_MEMORY` and touches no out-pointer. What is freed is taken out of the table before the driver
//! frees it, because another thread may be given the same address at once, and put back when the driver refuses. A
//! pointer that is not in a table goes to the driver as it is; so does a call on a thread without a context.
//!
//! Not counted: streams, events, local memory that a launch makes the driver take, and what is allocated through
//! private export tables, graphics or video interfaces. The agent compares the whole with NVML.

#![expect(unsafe_code, reason = "calls the driver")]

mod arena;
mod arrays;
mod blocks;
mod charge;
mod contexts;
mod graphs;
mod legacy;
mod linear;
mod measured;
mod modules;
mod pooled;
mod pools;
mod views;
mod virtual_memory;

use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::Relaxed;

use mullion_region::MAX_DEVICES;

use crate::container::{self, Card, Container, Gate};
use crate::cuda::{CUcontext, CUresult};
use crate::driver;

use arena::{Arena, Entries};
pub(crate) use arrays::*;
pub(crate) use contexts::*;
pub(crate) use graphs::*;
pub(crate) use legacy::*;
pub(crate) use linear::*;
pub(crate) use modules::*;
pub(crate) use pooled::*;
pub(crate) use views::*;
pub(crate) use virtual_memory::*;

/// What this process has allocated.
#[derive(Debug)]
pub(crate) struct Books {
    /// By address.
    pointers: Entries,
    /// By handle and [`Kind`].
    objects: Entries,
    /// By card.
    blocks: [blocks::Blocks; MAX_DEVICES],
    /// Contexts seen lately, with their card's place: `context << 4 | place`.
    seen: [AtomicU64; SEEN],
    allocations: virtual_memory::Allocations,
    pools: pools::Pools,
    graphs: graphs::Graphs,
    contexts: contexts::Contexts,
    outlived: arrays::Outlived,
}

/// What stands behind a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum Kind {
    /// Blocks of its own; `note` is the context.
    Blocks = 1,
    /// A piece of a block; not charged by itself. `note` is the context.
    Piece = 2,
    /// Out of a pool; not charged by itself. `note` is the pool's record.
    Pooled = 3,
    Array = 4,
    Mipmap = 5,
    Module = 6,
    Library = 7,
    /// `note` is the context itself.
    Context = 8,
    GreenContext = 9,
}

/// Contexts that are remembered.
const SEEN: usize = 8;

impl Books {
    pub(crate) const fn new() -> Self {
        Self {
            pointers: Arena::table(),
            objects: Arena::table(),
            blocks: [const { blocks::Blocks::new() }; MAX_DEVICES],
            seen: [const { AtomicU64::new(0) }; SEEN],
            allocations: virtual_memory::Allocations::new(),
            pools: pools::Pools::new(),
            graphs: graphs::Graphs::new(),
            contexts: contexts::Contexts::new(),
            outlived: arrays::Outlived::new(),
        }
    }

    fn seen(&self, context: u64) -> Option<&AtomicU64> {
        let place = usize::try_from(context >> 4 ^ context >> 9 ^ context >> 16).unwrap_or(0) % SEEN;
        self.seen.get(place)
    }

    /// A context is about to go: its handle may soon be another's.
    fn forget_context(&self, context: u64) {
        if let Some(place) = self.seen(context) {
            place.store(0, Relaxed);
        }
    }
}

/// The calling thread's context and its card.
#[derive(Clone, Copy)]
struct Here {
    container: &'static Container,
    card: &'static Card,
    context: u64,
}

/// Why a call is not counted.
enum Pass {
    /// It is the driver's alone.
    Driver,
    /// It is answered with this.
    Refused(CUresult),
}

/// The container, if calls are counted.
#[inline]
fn counted() -> Result<&'static Container, Pass> {
    match container::gate() {
        Gate::Limited(container) => Ok(container),
        Gate::Open => Err(Pass::Driver),
        Gate::Refused(result) => Err(Pass::Refused(result)),
    }
}

/// The calling thread's context as the driver knows it; 0 = none.
#[inline]
fn current_context() -> u64 {
    let Some(ask) = driver::function!(cuCtxGetCurrent: unsafe extern "C" fn(*mut CUcontext) -> CUresult)
    else {
        return 0;
    };
    let mut context: CUcontext = core::ptr::null_mut();
    // SAFETY: the driver writes one handle.
    let result = unsafe { ask(&raw mut context) };
    if result.is_ok() { context.addr() as u64 } else { 0 }
}

/// Where an allocation without a device among its arguments goes to. Without a context (HK-08) the driver has to say so.
#[inline]
fn here() -> Result<Here, Pass> {
    let container = counted()?;
    let context = current_context();
    if context == 0 {
        return Err(Pass::Driver);
    }
    if let Some(seen) = container.books.seen(context) {
        let known = seen.load(Relaxed);
        let [place, ..] = known.to_le_bytes();
        if known >> 4 == context
            && let Some(card) = container.card_at(place & 15)
        {
            return Ok(Here { container, card, context });
        }
    }
    look_up(container, context)
}

#[cold]
fn look_up(container: &'static Container, context: u64) -> Result<Here, Pass> {
    let card = container.current_card().ok_or(Pass::Driver)?;
    if let Some(seen) = container.books.seen(context)
        && context < 1 << 60
    {
        seen.store(context << 4 | u64::from(card.index), Relaxed);
    }
    Ok(Here { container, card, context })
}

/// Key of a handle among those of its kind: handles of two kinds could be the same number. Addresses of a program's
/// memory are below 2^57.
const fn key_of(kind: Kind, handle: u64) -> u64 {
    handle ^ (kind as u64) << 58
}
