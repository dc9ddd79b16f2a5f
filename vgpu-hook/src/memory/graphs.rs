//! Memory of graphs: allocation nodes take it from a pool of the card's own when the graph is launched.
//!
//! The pool is charged with what it holds, like any other. What a launch may add, on each card, is known from the nodes,
//! counted when the graph was instantiated.

use core::ffi::{c_char, c_void};
use core::sync::atomic::Ordering::Relaxed;
use core::sync::atomic::{AtomicBool, AtomicU64};

use mullion_accounting::{Claim, Entry};
use mullion_region::MAX_DEVICES;

use super::arena::{Arena, Entries};
use super::blocks::{BLOCK, round_up};
use super::graph_nodes::Wanted;
use super::{charge, counted};
use crate::container::{self, Card, Container, Held, Lock};
use crate::cuda::{
    CUdevice, CUenum, CUgraph, CUgraphExec, CUgraphNode, CUgraphNodeParams, CUresult, CUstream, CUuint64,
    GraphInstantiateParams, MemAllocNodeParams,
};
use crate::driver;
use crate::launch;

/// `CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT`.
const USED: CUenum = 0;
/// `CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT`.
const RESERVED: CUenum = 2;

/// Of an executable graph's entry: not all of its nodes could be read.
const UNFORESEEN: u8 = 1;

/// The pool of one card.
#[derive(Debug)]
struct Pool {
    lock: Lock,
    charged: AtomicU64,
}

/// The graphs of this process.
#[derive(Debug)]
pub(crate) struct Graphs {
    /// Whether any graph may have an allocation node.
    any: AtomicBool,
    /// Whether any executable graph has one.
    is_any_executable: AtomicBool,
    pools: [Pool; MAX_DEVICES],
    /// By executable graph and card: the bytes of its allocation nodes there. The first of its cards stands under the
    /// graph itself; `note` has a bit for each of the others, `kind` may be [`UNFORESEEN`].
    executables: Entries,
}

/// Key of a graph's bytes on one more card. Addresses of a program's memory are below 2^57.
const fn key_on(handle: u64, card: u8) -> u64 {
    handle ^ (card as u64 + 1) << 58
}

fn attribute(device: CUdevice, which: CUenum) -> Option<u64> {
    let ask = driver::function!(
        cuDeviceGetGraphMemAttribute: unsafe extern "C" fn(CUdevice, CUenum, *mut u64) -> CUresult
    )?;
    let mut value = 0;
    // SAFETY: the driver writes one number.
    let result = unsafe { ask(device, which, &raw mut value) };
    result.is_ok().then_some(value)
}

impl Graphs {
    pub(super) const fn new() -> Self {
        Self {
            any: AtomicBool::new(false),
            is_any_executable: AtomicBool::new(false),
            pools: [const { Pool { lock: Lock::new(), charged: AtomicU64::new(0) } }; MAX_DEVICES],
            executables: Arena::table(),
        }
    }

    /// A graph may get an allocation node from now on.
    #[inline]
    pub(super) fn expect_allocations(&self) {
        if !self.any.load(Relaxed) {
            self.any.store(true, Relaxed);
        }
    }

    fn pool(&self, card: &Card) -> Option<&Pool> {
        self.pools.get(usize::from(card.index))
    }

    /// Brings the charge of a card's pool up to date.
    pub(super) fn observe(&self, container: &Container, card: &Card) {
        if let Some(pool) = self.pool(card) {
            let held = pool.lock.lock();
            follow(container, card, pool, &held);
        }
    }

    /// Lets a card's pool give back what it does not use; whether that was anything.
    pub(super) fn give_way(&self, container: &Container, card: &Card) -> bool {
        let Some(pool) = self.pool(card).filter(|pool| pool.charged.load(Relaxed) != 0) else { return false };
        pool.lock.try_lock().is_some_and(|held| trim(container, card, pool, &held))
    }

    /// As [`Self::observe_all`] without waiting for a pool that is held; whether none was.
    pub(super) fn try_observe_all(&self, container: &Container) -> bool {
        let observe = |card: &Card| {
            let Some(pool) = self.pool(card) else { return true };
            let held = pool.lock.try_lock();
            held.map(|held| follow(container, card, pool, &held)).is_some()
        };
        !self.any.load(Relaxed) || container.cards().all(observe)
    }

    /// After a call with which a launch may have ended. A pool that is held is followed by its holder: a launch may wait
    /// for room in its queue, and whoever synchronises must not wait for that.
    #[inline]
    pub(super) fn observe_launched(&self, container: &Container) {
        if self.is_any_executable.load(Relaxed) {
            self.try_observe_all(container);
        }
    }

    /// What launches of an executable graph may ask for; `None` where it has no allocation node.
    fn wanted(&self, executable: u64) -> Option<Wanted> {
        let first = self.executables.get(executable)?;
        let mut wanted = Wanted { bytes: [0; MAX_DEVICES], is_unforeseen: first.kind == UNFORESEEN };
        for (card, bytes) in (0_u8..).zip(&mut wanted.bytes) {
            if card == first.card {
                *bytes = first.size;
            } else if first.note & 1 << card != 0 {
                *bytes = self.executables.get(key_on(executable, card)).map_or(0, |entry| entry.size);
            }
        }
        Some(wanted)
    }

    fn enter(&self, executable: u64, wanted: &Wanted) {
        let mut first: Option<Entry> = None;
        let kind = if wanted.is_unforeseen { UNFORESEEN } else { 0 };
        for (card, size) in (0_u8..).zip(wanted.bytes).filter(|&(_, size)| size > 0) {
            if let Some(first) = &mut first {
                let entry = Entry { size, card, kind, note: 0 };
                if self.executables.insert(key_on(executable, card), &entry).is_ok() {
                    first.note |= 1 << card;
                }
            } else {
                first = Some(Entry { size, card, kind, note: 0 });
            }
        }
        if let Some(first) = first {
            let _ = self.executables.insert(executable, &first);
            self.is_any_executable.store(true, Relaxed);
        }
    }

    fn leave(&self, executable: u64) -> Option<Wanted> {
        let wanted = self.wanted(executable)?;
        self.executables.take(executable);
        for (card, _) in (0_u8..).zip(wanted.bytes).filter(|&(_, size)| size > 0) {
            self.executables.take(key_on(executable, card));
        }
        Some(wanted)
    }

    /// Takes stock of the cards whose pools hold anything.
    pub(super) fn observe_all(&self, container: &Container) {
        if self.any.load(Relaxed) {
            for card in container.cards() {
                self.observe(container, card);
            }
        }
    }
}

/// What the pool holds, and what of it is used.
fn follow(container: &Container, card: &Card, pool: &Pool, _: &Held<'_>) -> (u64, u64) {
    let Some(device) = container.device(card) else { return (0, 0) };
    let charged = pool.charged.load(Relaxed);
    let reserved = attribute(device, RESERVED).unwrap_or(charged);
    if charged != reserved {
        pool.charged.store(reserved, Relaxed);
        card.memory.adjust(charged, reserved);
        charge::note_peak(card);
    }
    (reserved, attribute(device, USED).unwrap_or(reserved))
}

/// Makes the pool give back what it does not use; whether that was anything.
fn trim(container: &Container, card: &Card, pool: &Pool, held: &Held<'_>) -> bool {
    let before = pool.charged.load(Relaxed);
    let trim = driver::function!(cuDeviceGraphMemTrim: unsafe extern "C" fn(CUdevice) -> CUresult);
    if let (Some(trim), Some(device)) = (trim, container.device(card)) {
        // SAFETY: a device of this process.
        let _ = unsafe { trim(device) };
    }
    follow(container, card, pool, held);
    pool.charged.load(Relaxed) < before
}

/// A graph was instantiated: notes what its launches may ask for.
///
/// # Safety
/// `executable` is a place that the driver has written, or null.
unsafe fn instantiated(result: CUresult, graph: CUgraph, executable: *mut CUgraphExec) -> CUresult {
    let Ok(container) = counted() else { return result };
    let graphs = &container.books.graphs;
    if !result.is_ok() || executable.is_null() || !graphs.any.load(Relaxed) {
        return result;
    }
    let card = container.current_card().or_else(|| container.cards().next());
    let wanted = Wanted::of(container, card, graph);
    // SAFETY: the driver has just written it.
    let handle = unsafe { executable.read() }.addr() as u64;
    graphs.leave(handle);
    if wanted.bytes.iter().any(|&bytes| bytes > 0) {
        graphs.enter(handle, &wanted);
        graphs.observe_all(container);
    }
    result
}

/// A launch's part on one card, whose pool is held until this goes.
struct Part<'c> {
    card: &'c Card,
    pool: &'c Pool,
    held: Held<'c>,
    claim: Claim,
    /// What the pool held before the launch.
    before: u64,
}

/// Claims what a launch lacks on one card; `None` where the limit has no room for it.
fn part<'c>(container: &Container, card: &'c Card, pool: &'c Pool, bytes: u64) -> Option<Part<'c>> {
    let held = pool.lock.lock();
    let (reserved, used) = follow(container, card, pool, &held);
    let whole = round_up(bytes, BLOCK);
    let missing = round_up(bytes.saturating_sub(reserved.saturating_sub(used)), BLOCK);
    let claim =
        [whole, missing].into_iter().find_map(|bytes| charge::try_ask(container, card, bytes)).or_else(
            || trim(container, card, pool, &held).then(|| charge::try_ask(container, card, whole)).flatten(),
        )?;
    // A trim may have changed it.
    let before = pool.charged.load(Relaxed);
    Some(Part { card, pool, held, claim, before })
}

impl Part<'_> {
    /// The driver has launched.
    fn settle(self, container: &Container) {
        let Self { card, pool, held, claim, before } = self;
        let after = container.device(card).and_then(|device| attribute(device, RESERVED)).unwrap_or(before);
        charge::settle_at(card, claim, after.saturating_sub(before));
        if after < before {
            card.memory.free(before - after);
        }
        pool.charged.store(after, Relaxed);
        drop(held);
    }

    /// The driver has not, but may have taken some of the memory.
    fn undo(self, container: &Container, why: CUresult) {
        charge::undo(self.card, self.claim, why);
        follow(container, self.card, self.pool, &self.held);
    }
}

/// Runs `real`, which may make the pools of cards take more.
fn around(executable: CUgraphExec, real: impl FnOnce() -> CUresult) -> CUresult {
    let Ok(container) = counted() else { return real() };
    let graphs = &container.books.graphs;
    let known = if graphs.any.load(Relaxed) { graphs.wanted(executable.addr() as u64) } else { None };
    let Some(wanted) = known else { return real() };
    // Before a pool is held: whoever looks leaves one alone that is.
    container.books.measuring.heed();
    let mut parts = [const { None }; MAX_DEVICES];
    // In the order of cards, as all launches do: two that wait for each other's pools would wait for ever.
    let cards = (0_u8..).zip(wanted.bytes).filter(|&(_, bytes)| bytes > 0);
    let cards = cards.filter_map(|(index, bytes)| Some((container.card_at(index)?, bytes)));
    for (place, (card, bytes)) in parts.iter_mut().zip(cards) {
        let Some(pool) = graphs.pool(card) else { continue };
        *place = part(container, card, pool, bytes);
        if place.is_none() {
            for part in parts.into_iter().flatten() {
                part.card.memory.undo(part.claim);
            }
            charge::refused(card);
            return CUresult::OUT_OF_MEMORY;
        }
    }
    container::fault_point();
    let result = real();
    container::fault_point();
    for part in parts.into_iter().flatten() {
        if result.is_ok() {
            part.settle(container);
        } else {
            part.undo(container, result);
        }
    }
    if wanted.is_unforeseen {
        find_unforeseen(container);
    }
    result
}

/// After a launch that may have taken more than was claimed: where that is over a limit, what is unused of it goes back, and
/// the next claim is refused.
#[cold]
fn find_unforeseen(container: &Container) {
    let graphs = &container.books.graphs;
    graphs.observe_all(container);
    for card in container.cards().filter(|card| card.memory.total() > card.memory.limit()) {
        graphs.give_way(container, card);
    }
}

/// `cuGraphLaunch`.
///
/// # Safety
/// As `cuGraphLaunch`.
pub(crate) unsafe fn graph_launch(
    real: unsafe extern "C" fn(CUgraphExec, CUstream) -> CUresult,
    graph: CUgraphExec,
    stream: CUstream,
) -> CUresult {
    // Memory is asked for when the launch's time has come: none is claimed, and no lock held, while it waits.
    // SAFETY: the caller's own arguments.
    let launch = || around(graph, || unsafe { real(graph, stream) });
    launch::paced_graph(graph, stream, false, launch)
}

/// `cuGraphLaunch` on each thread's own default stream.
///
/// # Safety
/// As `cuGraphLaunch_ptsz`.
pub(crate) unsafe fn graph_launch_ptsz(
    real: unsafe extern "C" fn(CUgraphExec, CUstream) -> CUresult,
    graph: CUgraphExec,
    stream: CUstream,
) -> CUresult {
    // SAFETY: the caller's own arguments.
    let launch = || around(graph, || unsafe { real(graph, stream) });
    launch::paced_graph(graph, stream, true, launch)
}

/// `cuGraphUpload`: prepares a launch, its memory included.
///
/// # Safety
/// As `cuGraphUpload`.
pub(crate) unsafe fn graph_upload(
    real: unsafe extern "C" fn(CUgraphExec, CUstream) -> CUresult,
    graph: CUgraphExec,
    stream: CUstream,
) -> CUresult {
    // SAFETY: the caller's own arguments.
    around(graph, || unsafe { real(graph, stream) })
}

/// `cuGraphExecDestroy`.
///
/// # Safety
/// As `cuGraphExecDestroy`.
pub(crate) unsafe fn graph_exec_destroy(
    real: unsafe extern "C" fn(CUgraphExec) -> CUresult,
    graph: CUgraphExec,
) -> CUresult {
    let known = counted().ok().filter(|container| container.books.graphs.any.load(Relaxed));
    let wanted = known.and_then(|container| container.books.graphs.leave(graph.addr() as u64));
    // SAFETY: the caller's own argument.
    let result = unsafe { launch::graph_exec_destroy(real, graph) };
    if let (Some(container), Some(wanted)) = (known, wanted) {
        if !result.is_ok() {
            container.books.graphs.enter(graph.addr() as u64, &wanted);
        }
        container.books.graphs.observe_all(container);
    }
    result
}

/// `cuGraphInstantiate` with its log, both forms.
///
/// # Safety
/// As `cuGraphInstantiate_v2`.
pub(crate) unsafe fn graph_instantiate(
    real: unsafe extern "C" fn(*mut CUgraphExec, CUgraph, *mut CUgraphNode, *mut c_char, usize) -> CUresult,
    executable: *mut CUgraphExec,
    graph: CUgraph,
    error_node: *mut CUgraphNode,
    log: *mut c_char,
    log_size: usize,
) -> CUresult {
    // SAFETY: the caller's own arguments.
    let result = unsafe { real(executable, graph, error_node, log, log_size) };
    // SAFETY: written by the driver.
    unsafe { instantiated(result, graph, executable) }
}

/// `cuGraphInstantiateWithFlags`.
///
/// # Safety
/// As `cuGraphInstantiateWithFlags`.
pub(crate) unsafe fn graph_instantiate_with_flags(
    real: unsafe extern "C" fn(*mut CUgraphExec, CUgraph, CUuint64) -> CUresult,
    executable: *mut CUgraphExec,
    graph: CUgraph,
    flags: CUuint64,
) -> CUresult {
    // SAFETY: the caller's own arguments.
    let result = unsafe { real(executable, graph, flags) };
    // SAFETY: written by the driver.
    unsafe { instantiated(result, graph, executable) }
}

/// `cuGraphInstantiateWithParams`.
///
/// # Safety
/// As `cuGraphInstantiateWithParams`.
pub(crate) unsafe fn graph_instantiate_with_params(
    real: unsafe extern "C" fn(*mut CUgraphExec, CUgraph, *mut GraphInstantiateParams) -> CUresult,
    executable: *mut CUgraphExec,
    graph: CUgraph,
    parameters: *mut GraphInstantiateParams,
) -> CUresult {
    // SAFETY: the caller's own arguments.
    let result = unsafe { real(executable, graph, parameters) };
    // SAFETY: written by the driver.
    unsafe { instantiated(result, graph, executable) }
}

fn expect() {
    if let Ok(container) = counted() {
        container.books.graphs.expect_allocations();
    }
}

/// `cuGraphAddMemAllocNode`.
///
/// # Safety
/// As `cuGraphAddMemAllocNode`.
pub(crate) unsafe fn graph_add_alloc_node(
    real: unsafe extern "C" fn(
        *mut CUgraphNode,
        CUgraph,
        *const CUgraphNode,
        usize,
        *mut MemAllocNodeParams,
    ) -> CUresult,
    node: *mut CUgraphNode,
    graph: CUgraph,
    dependencies: *const CUgraphNode,
    count: usize,
    parameters: *mut MemAllocNodeParams,
) -> CUresult {
    expect();
    // SAFETY: the caller's own arguments.
    unsafe { real(node, graph, dependencies, count, parameters) }
}

/// `cuGraphAddNode` of CUDA 12.2.
///
/// # Safety
/// As `cuGraphAddNode`.
pub(crate) unsafe fn graph_add_node(
    real: unsafe extern "C" fn(
        *mut CUgraphNode,
        CUgraph,
        *const CUgraphNode,
        usize,
        *mut CUgraphNodeParams,
    ) -> CUresult,
    node: *mut CUgraphNode,
    graph: CUgraph,
    dependencies: *const CUgraphNode,
    count: usize,
    parameters: *mut CUgraphNodeParams,
) -> CUresult {
    expect();
    // SAFETY: the caller's own arguments.
    unsafe { real(node, graph, dependencies, count, parameters) }
}

/// `cuGraphAddNode_v2` and `cuGraphAddNode_v3`.
///
/// # Safety
/// As `cuGraphAddNode_v2`.
pub(crate) unsafe fn graph_add_node_v2(
    real: unsafe extern "C" fn(
        *mut CUgraphNode,
        CUgraph,
        *const CUgraphNode,
        *const c_void,
        usize,
        *mut CUgraphNodeParams,
    ) -> CUresult,
    node: *mut CUgraphNode,
    graph: CUgraph,
    dependencies: *const CUgraphNode,
    edges: *const c_void,
    count: usize,
    parameters: *mut CUgraphNodeParams,
) -> CUresult {
    expect();
    // SAFETY: the caller's own arguments.
    unsafe { real(node, graph, dependencies, edges, count, parameters) }
}

/// `cuDeviceGraphMemTrim`.
///
/// # Safety
/// As `cuDeviceGraphMemTrim`.
pub(crate) unsafe fn graph_mem_trim(
    real: unsafe extern "C" fn(CUdevice) -> CUresult,
    device: CUdevice,
) -> CUresult {
    // SAFETY: the caller's own argument.
    let result = unsafe { real(device) };
    if let Ok(container) = counted()
        && let Some(card) = container.card(device)
    {
        container.books.graphs.observe(container, card);
    }
    result
}
