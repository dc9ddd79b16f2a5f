//! Memory: what each family of allocations charges, and what it gives back.
//!
//! | family | charged | to |
//! | --- | --- | --- |
//! | `cuMemAlloc`, pitched, managed | the driver's blocks (`blocks`) | the current context's card |
//! | arrays, mipmapped arrays | what the driver says they need; small ones by the block (`arrays`) | the same |
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
//! pointer that is not in a table goes to the driver as it is; so does a call on a thread without a context, unless a stream
//! says where it goes, or a library goes into the contexts that there are.
//!
//! Not counted: streams, events, local memory that a launch makes the driver take, and what is allocated through
//! private export tables, graphics or video interfaces. The agent compares the whole with NVML.

#![expect(unsafe_code, reason = "calls the driver")]

mod alone;
mod arena;
mod arrays;
mod at_driver;
mod blocks;
mod charge;
mod context_charge;
mod context_limits;
mod contexts;
mod graph_nodes;
mod graph_pool;
mod graphs;
mod green_contexts;
mod legacy;
mod linear;
mod looks;
mod measured;
mod modules;
mod pooled;
mod pools;
mod taken;
mod under_way;
mod views;
mod virtual_memory;

use core::sync::atomic::Ordering::SeqCst;
use core::sync::atomic::fence;

use mullion_accounting::Entry;
use mullion_region::MAX_DEVICES;

use crate::container::{self, Card, Container, Gate};
use crate::cuda::{CUcontext, CUresult};
use crate::driver;

use arena::{Arena, Entries};
pub(crate) use arrays::*;
pub(crate) use context_limits::*;
pub(crate) use contexts::*;
pub(crate) use graphs::*;
pub(crate) use green_contexts::*;
pub(crate) use legacy::*;
pub(crate) use linear::*;
pub(crate) use looks::within;
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
    allocations: virtual_memory::Allocations,
    pools: pools::Pools,
    graphs: graphs::Graphs,
    contexts: contexts::Contexts,
    small_arrays: arrays::Small,
    measuring: measured::Measuring,
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
    /// An array or a mipmapped one that shares a block; not charged by itself. `size` is what it needs, `note` the context.
    SmallArray = 10,
    /// Images that are charged together (`modules`); `note` is their context.
    Images = 11,
}

impl Books {
    pub(crate) const fn new() -> Self {
        Self {
            pointers: Arena::table(),
            objects: Arena::table(),
            blocks: [const { blocks::Blocks::new() }; MAX_DEVICES],
            allocations: virtual_memory::Allocations::new(),
            pools: pools::Pools::new(),
            graphs: graphs::Graphs::new(),
            contexts: contexts::Contexts::new(),
            small_arrays: arrays::Small::new(),
            measuring: measured::Measuring::new(),
        }
    }

    /// Whether a context has ended lately: what was entered before this is asked, and is not off the books then, stays in them.
    fn has_ended(&self, context: u64) -> bool {
        // Last: another one may have its handle.
        self.contexts.is_among_last(context) && self.objects.get(key_of(Kind::Context, context)).is_none()
    }

    /// The driver did not end an object that was taken out of the table when `ended` contexts had ended: puts it back, unless
    /// it is gone all the same, with its context or by another thread, which did not find it in the table. Whether it is gone.
    fn is_gone_all_the_same(&self, key: u64, entry: &Entry, ended: contexts::Ends, why: CUresult) -> bool {
        if why == CUresult::INVALID_HANDLE {
            return true;
        }
        let _ = self.objects.insert(key, entry);
        // As in `Here::is_over`.
        fence(SeqCst);
        // It may have been counted as ended already, and not yet off the books, when the entry was taken out.
        (self.contexts.has_ended_since(ended, entry.note) || self.has_ended(entry.note))
            && self.objects.take_if(key, |found| found == entry).is_some()
    }
}

/// The calling thread's context and its card.
#[derive(Clone, Copy)]
struct Here {
    container: &'static Container,
    card: &'static Card,
    context: u64,
    /// Contexts of this process that had ended by then.
    ended: contexts::Ends,
}

impl Here {
    /// Whether any context of this process has ended since, or is about to end.
    ///
    /// To be asked when the driver has given an address or a handle, and before the program gets it: only if so, something else
    /// may stand under the same key, of a context that the driver has ended and that the books still have. That context was counted as
    /// about to end before the driver was asked, and is so until nothing of it is in the books: either it is when this is
    /// asked, or nothing is left.
    #[inline]
    fn any_ends(&self) -> bool {
        self.container.books.contexts.any_since(self.ended)
    }

    /// Whether the context has ended since: what a thread made in it meanwhile went with it.
    ///
    /// Whoever ends a context counts it and then looks for what is in it; this thread enters something and then looks at
    /// the count, with a sequentially consistent step in between on both sides: one of them sees the other.
    #[inline]
    fn is_over(&self) -> bool {
        self.any_ends() && self.is_ended()
    }

    #[cold]
    fn is_ended(&self) -> bool {
        self.container.books.contexts.has_ended_since(self.ended, self.context)
    }
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
#[cold]
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

/// The calling thread's context, of those that the books know. A green one stands there as its primary one, which has what is made
/// through it.
#[cold]
fn current_of_several(container: &Container, card: &Card) -> u64 {
    let current = current_context();
    if container.books.objects.get(key_of(Kind::Context, current)).is_some() {
        return current;
    }
    match container.books.contexts.primary_handle(card) {
        0 => current,
        primary => primary,
    }
}

/// Where an allocation without a device among its arguments goes to. Without a context (HK-08) the driver has to say so.
#[inline]
fn here() -> Result<Here, Pass> {
    let container = counted()?;
    // First: a context may end, and another one get its handle, in the silence that is waited for.
    container.books.measuring.heed();
    let ended = container.books.contexts.ended();
    let card = container.current_card().ok_or(Pass::Driver)?;
    let context = match container.books.contexts.only(card) {
        0 => current_of_several(container, card),
        only => only,
    };
    Ok(Here { container, card, context, ended })
}

/// Key of a handle among those of its kind: handles of two kinds could be the same number. Addresses of a program's
/// memory are below 2^57.
const fn key_of(kind: Kind, handle: u64) -> u64 {
    handle ^ (kind as u64) << 58
}
