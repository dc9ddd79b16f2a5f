//! What the allocation nodes of a graph, and of the graphs within it, ask for.

use mullion_region::MAX_DEVICES;

use super::blocks::{BLOCK, round_up};
use crate::container::{Card, Container};
use crate::cuda::{CUenum, CUgraph, CUgraphNode, CUresult, LOCATION_DEVICE, MemAllocNodeParams};
use crate::driver;
use crate::sys;

/// `CU_GRAPH_NODE_TYPE_GRAPH`.
const CHILD: CUenum = 4;
/// `CU_GRAPH_NODE_TYPE_MEM_ALLOC`.
const ALLOCATION: CUenum = 10;

/// Bytes that allocation nodes ask for, by card.
#[derive(Debug)]
pub(super) struct Wanted {
    pub(super) bytes: [u64; MAX_DEVICES],
    /// There may be more: it is looked for after each launch.
    pub(super) is_unforeseen: bool,
}

impl Wanted {
    /// What the nodes of a graph, and of those within it, ask for; `card` is that of a node that names none.
    pub(super) fn of(container: &'static Container, card: Option<&'static Card>, graph: CUgraph) -> Self {
        let wanted = Self { bytes: [0; MAX_DEVICES], is_unforeseen: false };
        let mut asked = Asked { container, card, wanted };
        add_asked(&mut asked, graph);
        asked.wanted
    }
}

/// What is found on a walk through a graph.
struct Asked {
    container: &'static Container,
    /// The card of a node that names none.
    card: Option<&'static Card>,
    wanted: Wanted,
}

impl Asked {
    fn add(&mut self, card: Option<&Card>, bytes: u64) {
        let place = card.and_then(|card| self.wanted.bytes.get_mut(usize::from(card.index)));
        if let Some(sum) = place {
            *sum = sum.saturating_add(bytes);
        }
    }

    /// Something could not be read: at least there has to be room for a block.
    #[cold]
    fn add_unforeseen(&mut self) {
        self.wanted.is_unforeseen = true;
        self.add(self.card, BLOCK);
    }
}

/// A graph on the way: the head of a mapping of its own, with the nodes behind it. The walk may be as deep as it likes.
#[repr(C)]
struct Level {
    above: *mut Level,
    /// Length of the mapping.
    bytes: usize,
    count: usize,
    next: usize,
}

/// One level more below `top`; `top` itself where there is nothing to walk through.
fn descend(asked: &mut Asked, graph: CUgraph, top: *mut Level) -> *mut Level {
    let nodes = driver::function!(
        cuGraphGetNodes: unsafe extern "C" fn(CUgraph, *mut CUgraphNode, *mut usize) -> CUresult
    );
    let mut count = 0;
    let Some(nodes) =
        // SAFETY: without a place for nodes, the driver only counts them.
        nodes.filter(|nodes| unsafe { nodes(graph, core::ptr::null_mut(), &raw mut count) }.is_ok())
    else {
        asked.add_unforeseen();
        return top;
    };
    if count == 0 {
        return top;
    }
    let bytes = count.saturating_mul(size_of::<CUgraphNode>()).saturating_add(size_of::<Level>());
    let Ok(memory) = sys::map_private(bytes) else {
        asked.add_unforeseen();
        return top;
    };
    #[expect(clippy::cast_ptr_alignment, reason = "a mapping begins on a page")]
    let level = memory.cast::<Level>();
    // SAFETY: room for `count` nodes behind the head.
    if !unsafe { nodes(graph, level.wrapping_add(1).cast(), &raw mut count) }.is_ok() {
        // SAFETY: the mapping made above, of which nothing is used any more.
        unsafe { sys::unmap(memory, bytes) };
        asked.add_unforeseen();
        return top;
    }
    // SAFETY: the mapping begins with room for it.
    unsafe { level.write(Level { above: top, bytes, count, next: 0 }) };
    level
}

/// Adds what the allocation nodes of a graph ask for.
fn add_asked(asked: &mut Asked, graph: CUgraph) {
    let kind = driver::function!(
        cuGraphNodeGetType: unsafe extern "C" fn(CUgraphNode, *mut CUenum) -> CUresult
    );
    let mut top = descend(asked, graph, core::ptr::null_mut());
    // SAFETY: null, or a level that `descend` made and nobody else knows of.
    while let Some(level) = unsafe { top.as_mut() } {
        if level.next == level.count {
            let (above, bytes) = (level.above, level.bytes);
            // SAFETY: the level's mapping, of which nothing is used any more.
            unsafe { sys::unmap(top.cast(), bytes) };
            top = above;
            continue;
        }
        let place = top.wrapping_add(1).cast::<CUgraphNode>().wrapping_add(level.next);
        // SAFETY: a place below `count`, which the driver has written.
        let node = unsafe { place.read() };
        level.next += 1;
        let mut found = 0;
        // SAFETY: a node of the graph; the driver writes one number.
        if !kind.is_some_and(|kind| unsafe { kind(node, &raw mut found) }.is_ok()) {
            asked.add_unforeseen();
        } else if found == ALLOCATION {
            add_asked_by_node(asked, node);
        } else if found == CHILD {
            match child_of(node) {
                Some(child) => top = descend(asked, child, top),
                None => asked.add_unforeseen(),
            }
        }
    }
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
                if location.kind == LOCATION_DEVICE { asked.container.card(location.id) } else { None };
            asked.add(card.or(asked.card), round_up(parameters.bytes as u64, BLOCK));
        }
        _ => asked.add_unforeseen(),
    }
}

fn child_of(node: CUgraphNode) -> Option<CUgraph> {
    let ask = driver::function!(
        cuGraphChildGraphNodeGetGraph: unsafe extern "C" fn(CUgraphNode, *mut CUgraph) -> CUresult
    )?;
    let mut graph = core::ptr::null_mut();
    // SAFETY: a node with a graph in it; the driver writes one handle.
    unsafe { ask(node, &raw mut graph) }.is_ok().then_some(graph)
}
