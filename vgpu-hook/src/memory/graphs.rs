//! Memory of graphs: allocation nodes take it from a pool of the card's own (`graph_pool`) when the graph is launched, or
//! uploaded before that.
//!
//! What a launch may add, on each card, is known from the nodes, read when the graph was instantiated.

use core::ffi::{c_char, c_void};
use core::sync::atomic::AtomicBool;
use core::sync::atomic::Ordering::Relaxed;

use mullion_accounting::Entry;
use mullion_region::MAX_DEVICES;

use super::arena::{Arena, Entries};
use super::charge;
use super::counted;
use super::graph_nodes::Wanted;
use super::graph_pool::{Launch, Pool, SEVERAL};
use super::looks::Followed;
use crate::container::{self, Card, Container};
use crate::cuda::{
    CUdevice, CUgraph, CUgraphExec, CUgraphNode, CUgraphNodeParams, CUresult, CUstream, CUuint64,
    GraphInstantiateParams, MemAllocNodeParams,
};
use crate::launch;

/// `CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD`.
const UPLOAD: CUuint64 = 2;

/// Of an executable graph's entry: not all of its nodes could be read.
const UNFORESEEN: u8 = 1;
/// It does not free all that it allocates.
const KEEPS: u8 = 2;

/// The graphs of this process.
#[derive(Debug)]
pub(crate) struct Graphs {
    /// Whether any graph may have an allocation node.
    any: AtomicBool,
    /// Whether any executable graph has one.
    is_any_executable: AtomicBool,
    pools: [Pool; MAX_DEVICES],
    /// By executable graph and card: the bytes of its allocation nodes there. The first of its cards stands under the
    /// graph itself; `note` has a bit for each of the others, `kind` may be [`UNFORESEEN`] and [`KEEPS`]. Beside each the
    /// pool's turn in which it was launched last.
    executables: Entries,
}

/// Key of a graph's bytes on one more card. Addresses of a program's memory are below 2^57.
const fn key_on(handle: u64, card: u8) -> u64 {
    handle ^ (card as u64 + 1) << 58
}

/// Key of the turn of a card's pool in which a graph was launched.
const fn turn_on(handle: u64, card: u8) -> u64 {
    handle ^ (card as u64 + 17) << 58
}

const _: () = assert!(MAX_DEVICES + 16 < 1 << 6);

impl Graphs {
    pub(super) const fn new() -> Self {
        Self {
            any: AtomicBool::new(false),
            is_any_executable: AtomicBool::new(false),
            pools: [const { Pool::new() }; MAX_DEVICES],
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

    /// Lets a card's pool give back what it does not use; whether that was anything.
    pub(super) fn give_way(&self, container: &Container, card: &Card) -> bool {
        self.pool(card).is_some_and(|pool| pool.give_way(container, card))
    }

    /// Takes stock of all pools but those that launches hold, which look themselves; whether there were none.
    pub(super) fn try_observe_all(&self, container: &Container) -> bool {
        let observe = |card: &Card| self.pool(card).is_none_or(|pool| pool.observe(container, card));
        !self.any.load(Relaxed) || container.cards().map(observe).fold(true, |all, was_free| all & was_free)
    }

    /// The same of the pool on one card; how much more it holds than is charged if it was held.
    pub(super) fn look_at(&self, container: &Container, card: &Card) -> Followed {
        let pool = self.pool(card).filter(|_| self.any.load(Relaxed));
        pool.map_or(Followed::ALL, |pool| pool.look_at(container, card))
    }

    /// After a call with which a launch may have ended.
    #[inline]
    pub(super) fn observe_launched(&self, container: &Container) {
        if self.is_any_executable.load(Relaxed) {
            self.try_observe_all(container);
        }
    }

    /// What launches of an executable graph may ask for; `None` where it has no allocation node.
    fn wanted(&self, executable: u64) -> Option<Wanted> {
        let first = self.executables.get(executable)?;
        let mut wanted = Wanted {
            bytes: [0; MAX_DEVICES],
            is_unforeseen: first.kind & UNFORESEEN != 0,
            keeps: first.kind & KEEPS != 0,
        };
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
        let unforeseen = if wanted.is_unforeseen { UNFORESEEN } else { 0 };
        let kind = unforeseen | if wanted.keeps { KEEPS } else { 0 };
        for (card, size) in (0_u8..).zip(wanted.bytes).filter(|&(_, size)| size > 0) {
            let _ = self.executables.insert(turn_on(executable, card), &Entry::default());
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
            self.executables.take(turn_on(executable, card));
        }
        Some(wanted)
    }

    /// Whether no launch of a graph was in this turn of a card's pool.
    fn is_first(&self, executable: u64, card: &Card, turn: u64) -> bool {
        self.executables.get(turn_on(executable, card.index)).is_none_or(|entry| entry.size != turn)
    }

    /// Notes that a graph is launched in a turn of a card's pool.
    fn launched(&self, executable: u64, card: &Card, turn: u64) {
        let _ = self.executables.swap_size(turn_on(executable, card.index), turn);
    }

    /// As [`Self::try_observe_all`].
    pub(super) fn observe_all(&self, container: &Container) {
        self.try_observe_all(container);
    }
}

/// A graph is instantiated: notes what its launches may ask for.
///
/// # Safety
/// `executable` is a place for the result, or null.
unsafe fn instantiating(
    graph: CUgraph,
    executable: *mut CUgraphExec,
    upload: Option<CUstream>,
    real: impl FnOnce() -> CUresult,
) -> CUresult {
    let Ok(container) = counted() else { return real() };
    let graphs = &container.books.graphs;
    if executable.is_null() || !graphs.any.load(Relaxed) {
        return real();
    }
    let card = container.current_card().or_else(|| container.cards().next());
    let wanted = Wanted::of(container, card, graph);
    let result = match upload {
        // It is there at once, and has no handle yet.
        Some(stream) => around(container, 0, &wanted, handle_of(stream, false), real),
        None => real(),
    };
    if !result.is_ok() {
        return result;
    }
    // SAFETY: the driver has just written it.
    let made = unsafe { executable.read() };
    let handle = made.addr() as u64;
    graphs.leave(handle);
    if wanted.bytes.iter().any(|&bytes| bytes > 0) {
        graphs.enter(handle, &wanted);
        if upload.is_some() {
            // Its pools know it already.
            for card in container.cards() {
                graphs.launched(handle, card, graphs.pool(card).map_or(0, Pool::turn));
            }
        }
        graphs.observe_all(container);
    }
    result
}

/// A stream as pools know it.
fn handle_of(stream: CUstream, per_thread: bool) -> u64 {
    match stream.addr() as u64 {
        0 if per_thread => SEVERAL,
        0 => 1,
        // Under this handle each thread has a stream of its own.
        2 => SEVERAL,
        stream => stream,
    }
}

/// A stream is destroyed, and its handle may be another one's.
pub(crate) fn graph_stream_gone(stream: CUstream) {
    if let Ok(container) = counted()
        && container.books.graphs.is_any_executable.load(Relaxed)
    {
        for pool in &container.books.graphs.pools {
            pool.stream_gone(handle_of(stream, false));
        }
    }
}

/// Runs `real`, which may make the pools of cards take more; `executable` is 0 where there is none yet.
fn around(
    container: &'static Container,
    executable: u64,
    wanted: &Wanted,
    stream: u64,
    real: impl FnOnce() -> CUresult,
) -> CUresult {
    let graphs = &container.books.graphs;
    let launch = Launch { stream, keeps: wanted.keeps };
    // Before a pool is held: whoever looks leaves one alone that is.
    container.books.measuring.heed();
    let mut parts = [const { None }; MAX_DEVICES];
    // In the order of cards, as all launches do: two that wait for each other's pools would wait for ever.
    let cards = (0_u8..).zip(wanted.bytes).filter(|&(_, bytes)| bytes > 0);
    let cards = cards.filter_map(|(index, bytes)| Some((container.card_at(index)?, bytes)));
    for (place, (card, bytes)) in parts.iter_mut().zip(cards) {
        let Some(pool) = graphs.pool(card) else { continue };
        let first = |turn| executable == 0 || graphs.is_first(executable, card, turn);
        *place = pool.part(container, card, &launch, bytes, first);
        if place.is_none() {
            for part in parts.into_iter().flatten() {
                part.give_up();
            }
            charge::refused(card);
            return CUresult::OUT_OF_MEMORY;
        }
    }
    container::fault_point();
    let result = real();
    container::fault_point();
    let mut is_unforeseen = wanted.is_unforeseen;
    for part in parts.into_iter().flatten() {
        if result.is_ok() {
            if executable != 0 {
                graphs.launched(executable, part.card, part.turn());
            }
            is_unforeseen |= !part.settle(container);
        } else {
            part.undo(container, result);
        }
    }
    if is_unforeseen {
        find_unforeseen(container);
    }
    result
}

/// The same for a launch or an upload of a graph that may have allocations.
fn around_launch(executable: CUgraphExec, stream: u64, real: impl FnOnce() -> CUresult) -> CUresult {
    let Ok(container) = counted() else { return real() };
    let graphs = &container.books.graphs;
    let executable = executable.addr() as u64;
    let known = if graphs.any.load(Relaxed) { graphs.wanted(executable) } else { None };
    match known {
        Some(wanted) => around(container, executable, &wanted, stream, real),
        None => real(),
    }
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
    let launch = || around_launch(graph, handle_of(stream, false), || unsafe { real(graph, stream) });
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
    let launch = || around_launch(graph, handle_of(stream, true), || unsafe { real(graph, stream) });
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
    // Stream 0 is the thread's own in one of the two forms.
    let handle = if stream.is_null() { SEVERAL } else { handle_of(stream, false) };
    // SAFETY: the caller's own arguments.
    around_launch(graph, handle, || unsafe { real(graph, stream) })
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
    let ask = || unsafe { real(executable, graph, error_node, log, log_size) };
    // SAFETY: null or the caller's place for a result.
    unsafe { instantiating(graph, executable, None, ask) }
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
    let ask = || unsafe { real(executable, graph, flags) };
    // SAFETY: null or the caller's place for a result.
    unsafe { instantiating(graph, executable, None, ask) }
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
    // SAFETY: null, or the caller's parameters.
    let asked = unsafe { parameters.as_ref() };
    let upload = asked.filter(|asked| asked.flags & UPLOAD != 0).map(|asked| asked.upload_stream);
    // SAFETY: the caller's own arguments.
    let ask = || unsafe { real(executable, graph, parameters) };
    // SAFETY: null or the caller's place for a result.
    unsafe { instantiating(graph, executable, upload, ask) }
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
        && let Some(pool) = container.books.graphs.pool(card)
    {
        pool.observe(container, card);
    }
    result
}
