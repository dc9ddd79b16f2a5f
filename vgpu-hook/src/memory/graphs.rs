//! Memory of graphs: allocation nodes take it from a pool of the card's own when the graph is launched.
//!
//! The pool is charged with what it holds, like any other. What a launch may add is known from the nodes, counted when
//! the graph was instantiated.

use core::ffi::{c_char, c_void};
use core::sync::atomic::Ordering::Relaxed;
use core::sync::atomic::{AtomicBool, AtomicU64};

use mullion_accounting::Entry;
use mullion_region::MAX_DEVICES;

use super::arena::{Arena, Entries};
use super::blocks::{BLOCK, round_up};
use super::{Here, charge, counted, here};
use crate::container::{self, Card, Container, Held, Lock};
use crate::cuda::{
    CUdevice, CUenum, CUgraph, CUgraphExec, CUgraphNode, CUgraphNodeParams, CUresult, CUstream, CUuint64,
    GraphInstantiateParams, LOCATION_DEVICE, MemAllocNodeParams,
};
use crate::driver;
use crate::launch;
use crate::sys;

/// `CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT`.
const USED: CUenum = 0;
/// `CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT`.
const RESERVED: CUenum = 2;
/// `CU_GRAPH_NODE_TYPE_GRAPH`.
const CHILD: CUenum = 4;
/// `CU_GRAPH_NODE_TYPE_MEM_ALLOC`.
const ALLOCATION: CUenum = 10;
/// Graphs within graphs that are looked into.
const DEPTH: u32 = 8;

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
    pools: [Pool; MAX_DEVICES],
    /// By executable graph: the bytes of its allocation nodes on the card that has the most of them; `note` is 1 when
    /// others have some too.
    executables: Entries,
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

/// Bytes that allocation nodes ask for, by card.
struct Asked {
    now: Here,
    bytes: [u64; MAX_DEVICES],
}

impl Asked {
    fn add(&mut self, card: &Card, bytes: u64) {
        if let Some(sum) = self.bytes.get_mut(usize::from(card.index)) {
            *sum = sum.saturating_add(bytes);
        }
    }
}

/// Adds what the allocation nodes of a graph ask for.
fn add_asked(asked: &mut Asked, graph: CUgraph, depth: u32) {
    let nodes = driver::function!(
        cuGraphGetNodes: unsafe extern "C" fn(CUgraph, *mut CUgraphNode, *mut usize) -> CUresult
    );
    let kind = driver::function!(
        cuGraphNodeGetType: unsafe extern "C" fn(CUgraphNode, *mut CUenum) -> CUresult
    );
    let (Some(nodes), Some(kind)) = (nodes, kind) else { return };
    let mut count = 0;
    // SAFETY: without a place for nodes, the driver only counts them.
    let result = unsafe { nodes(graph, core::ptr::null_mut(), &raw mut count) };
    let Some(bytes) = count.checked_mul(size_of::<CUgraphNode>()).filter(|_| result.is_ok() && count > 0)
    else {
        return;
    };
    let Ok(memory) = sys::map_private(bytes) else { return };
    #[expect(clippy::cast_ptr_alignment, reason = "a mapping begins on a page")]
    let list = memory.cast::<CUgraphNode>();
    // SAFETY: room for `count` nodes.
    let result = unsafe { nodes(graph, list, &raw mut count) };
    for index in (0..count).take_while(|_| result.is_ok()) {
        // SAFETY: below `count`.
        let place = unsafe { list.add(index) };
        // SAFETY: the driver has written it.
        let node = unsafe { place.read() };
        let mut found = 0;
        // SAFETY: a node of the graph; the driver writes one number.
        if unsafe { kind(node, &raw mut found) }.is_ok() {
            match found {
                ALLOCATION => add_asked_by_node(asked, node),
                CHILD if depth > 0 => add_asked_by_child(asked, node, depth - 1),
                _ => {}
            }
        }
    }
    // SAFETY: the mapping made above, of which nothing is used any more.
    unsafe { sys::unmap(memory, bytes) };
}

fn add_asked_by_node(asked: &mut Asked, node: CUgraphNode) {
    let ask = driver::function!(
        cuGraphMemAllocNodeGetParams: unsafe extern "C" fn(CUgraphNode, *mut MemAllocNodeParams) -> CUresult
    );
    let mut parameters = core::mem::MaybeUninit::<MemAllocNodeParams>::zeroed();
    match ask {
        // SAFETY: an allocation node; the driver fills in the structure.
        Some(ask) if unsafe { ask(node, parameters.as_mut_ptr()) }.is_ok() => {
            // SAFETY: zeroed, so whole whatever the driver wrote.
            let parameters = unsafe { parameters.assume_init() };
            let location = parameters.pool.location;
            let card =
                if location.kind == LOCATION_DEVICE { asked.now.container.card(location.id) } else { None };
            asked.add(card.unwrap_or(asked.now.card), round_up(parameters.bytes as u64, BLOCK));
        }
        // Not told: what it takes is charged after the launch.
        _ => asked.add(asked.now.card, BLOCK),
    }
}

fn add_asked_by_child(asked: &mut Asked, node: CUgraphNode, depth: u32) {
    let ask = driver::function!(
        cuGraphChildGraphNodeGetGraph: unsafe extern "C" fn(CUgraphNode, *mut CUgraph) -> CUresult
    );
    let mut graph = core::ptr::null_mut();
    // SAFETY: a node with a graph in it; the driver writes one handle.
    if ask.is_some_and(|ask| unsafe { ask(node, &raw mut graph) }.is_ok()) {
        add_asked(asked, graph, depth);
    }
}

/// A graph was instantiated: notes what its launches may ask for.
///
/// # Safety
/// `executable` is a place that the driver has written, or null.
unsafe fn instantiated(result: CUresult, graph: CUgraph, executable: *mut CUgraphExec) -> CUresult {
    let Ok(now) = here() else { return result };
    let graphs = &now.container.books.graphs;
    if !result.is_ok() || executable.is_null() || !graphs.any.load(Relaxed) {
        return result;
    }
    let mut asked = Asked { now, bytes: [0; MAX_DEVICES] };
    add_asked(&mut asked, graph, DEPTH);
    let cards = (0_u8..).zip(asked.bytes).filter(|&(_, size)| size > 0);
    if let Some((card, size)) = cards.clone().max_by_key(|&(_, size)| size) {
        // SAFETY: the driver has just written it.
        let handle = unsafe { executable.read() }.addr() as u64;
        let entry = Entry { size, card, kind: 0, note: u64::from(cards.count() > 1) };
        graphs.executables.take(handle);
        let _ = graphs.executables.insert(handle, &entry);
        graphs.observe_all(now.container);
    }
    result
}

/// Runs `real`, which may make a card's pool take more.
fn around(executable: CUgraphExec, real: impl FnOnce() -> CUresult) -> CUresult {
    let Ok(container) = counted() else { return real() };
    let graphs = &container.books.graphs;
    let known =
        if graphs.any.load(Relaxed) { graphs.executables.get(executable.addr() as u64) } else { None };
    let Some(entry) = known else { return real() };
    let card = container.card_at(entry.card);
    let Some((card, pool)) = card.and_then(|card| Some((card, graphs.pool(card)?))) else { return real() };
    // Before the pool is held: whoever looks waits for it.
    container.books.measuring.heed();
    let held = pool.lock.lock();
    let (reserved, used) = follow(container, card, pool, &held);
    let whole = round_up(entry.size, BLOCK);
    let missing = round_up(entry.size.saturating_sub(reserved.saturating_sub(used)), BLOCK);
    let claim =
        [whole, missing].into_iter().find_map(|bytes| charge::try_ask(container, card, bytes)).or_else(
            || trim(container, card, pool, &held).then(|| charge::try_ask(container, card, whole)).flatten(),
        );
    let Some(claim) = claim else {
        charge::refused(card);
        return CUresult::OUT_OF_MEMORY;
    };
    // A trim may have changed it.
    let before = pool.charged.load(Relaxed);
    container::fault_point();
    let result = real();
    container::fault_point();
    if !result.is_ok() {
        charge::undo(card, claim, result);
        follow(container, card, pool, &held);
        return result;
    }
    let after = container.device(card).and_then(|device| attribute(device, RESERVED)).unwrap_or(before);
    charge::settle_at(card, claim, after.saturating_sub(before));
    if after < before {
        card.memory.free(before - after);
    }
    pool.charged.store(after, Relaxed);
    drop(held);
    if entry.note != 0 {
        graphs.observe_all(container);
    }
    result
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
    let entry = known.and_then(|container| container.books.graphs.executables.take(graph.addr() as u64));
    // SAFETY: the caller's own argument.
    let result = unsafe { launch::graph_exec_destroy(real, graph) };
    if let (Some(container), Some(entry)) = (known, entry) {
        if !result.is_ok() {
            let _ = container.books.graphs.executables.insert(graph.addr() as u64, &entry);
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
