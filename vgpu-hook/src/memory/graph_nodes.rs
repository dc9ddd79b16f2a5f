//! What the allocation nodes of a graph, and of the graphs within it, ask for.

use mullion_region::MAX_DEVICES;

use super::blocks::{BLOCK, round_up};
use crate::container::{Card, Container};
use crate::cuda::{CUdeviceptr, CUenum, CUgraph, CUgraphNode, CUresult, LOCATION_DEVICE, MemAllocNodeParams};
use crate::driver;
use crate::sys;

/// `CU_GRAPH_NODE_TYPE_GRAPH`.
const CHILD: CUenum = 4;
/// `CU_GRAPH_NODE_TYPE_MEM_ALLOC`.
const ALLOCATION: CUenum = 10;
/// `CU_GRAPH_NODE_TYPE_MEM_FREE`.
const FREE: CUenum = 11;

/// What the allocation nodes of a graph need.
#[derive(Debug)]
pub(super) struct Wanted {
    /// Bytes by card. Allocations that are not there at the same time may share addresses, which count once.
    pub(super) bytes: [u64; MAX_DEVICES],
    /// There may be more: it is looked for after each launch.
    pub(super) is_unforeseen: bool,
    /// Not all of it is freed by the graph.
    pub(super) keeps: bool,
}

impl Wanted {
    /// What the nodes of a graph, and of those within it, ask for; `card` is that of a node that names none.
    pub(super) fn of(container: &'static Container, card: Option<&'static Card>, graph: CUgraph) -> Self {
        let wanted = Self { bytes: [0; MAX_DEVICES], is_unforeseen: false, keeps: false };
        let mut asked = Asked { container, card, wanted, taken: Ranges::new(), freed: Ranges::new() };
        add_asked(&mut asked, graph);
        asked.sum_up();
        asked.wanted
    }
}

/// Addresses of an allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
struct Range {
    start: u64,
    bytes: u64,
    card: u8,
}

/// Ranges, in a mapping of their own that grows.
#[derive(Debug)]
struct Ranges {
    at: *mut Range,
    count: usize,
    room: usize,
}

impl Ranges {
    const fn new() -> Self {
        Self { at: core::ptr::null_mut(), count: 0, room: 0 }
    }

    /// Adds one; whether there was memory for it.
    fn push(&mut self, range: Range) -> bool {
        if self.count == self.room {
            let room = (self.room * 2).max(128);
            let Ok(new) = sys::map_private(room.saturating_mul(size_of::<Range>())) else { return false };
            let mut grown = Self { at: new.cast(), count: self.count, room };
            for (new, old) in grown.all().iter_mut().zip(self.all()) {
                *new = *old;
            }
            core::mem::swap(self, &mut grown);
        }
        self.count += 1;
        if let Some(last) = self.all().last_mut() {
            *last = range;
        }
        true
    }

    fn all(&mut self) -> &mut [Range] {
        if self.at.is_null() {
            return &mut [];
        }
        // SAFETY: the mapping has room for `count` ranges, any bytes are some, and nobody else knows of it.
        unsafe { core::slice::from_raw_parts_mut(self.at, self.count) }
    }
}

impl Drop for Ranges {
    fn drop(&mut self) {
        if !self.at.is_null() {
            // SAFETY: the mapping made by `push`, of which nothing is used any more.
            unsafe { sys::unmap(self.at.cast(), self.room * size_of::<Range>()) };
        }
    }
}

/// Sorts ranges by their addresses, as a heap: the standard library's ways can panic.
fn sort(ranges: &mut [Range]) {
    for top in (0..ranges.len() / 2).rev() {
        sift(ranges, top);
    }
    for end in (1..ranges.len()).rev() {
        exchange(ranges, 0, end);
        sift(ranges.get_mut(..end).unwrap_or_default(), 0);
    }
}

/// Lets one range sink below those that are larger.
fn sift(ranges: &mut [Range], mut at: usize) {
    let start = |ranges: &[Range], at: usize| ranges.get(at).map(|range| range.start);
    loop {
        let [left, right] = [2 * at + 1, 2 * at + 2];
        let larger = if start(ranges, right) > start(ranges, left) { right } else { left };
        if start(ranges, larger) <= start(ranges, at) {
            return;
        }
        exchange(ranges, at, larger);
        at = larger;
    }
}

fn exchange(ranges: &mut [Range], one: usize, other: usize) {
    let (Some(&first), Some(&second)) = (ranges.get(one), ranges.get(other)) else { return };
    for (at, range) in [(one, second), (other, first)] {
        if let Some(place) = ranges.get_mut(at) {
            *place = range;
        }
    }
}

/// Adds the blocks in which the ranges lie, each once, to what their cards need.
fn add_blocks(ranges: &mut [Range], bytes: &mut [u64]) {
    sort(ranges);
    let mut counted = 0;
    // No two cards have the same addresses.
    for range in ranges {
        let start = (range.start & !(BLOCK - 1)).max(counted);
        let end = round_up(range.start.saturating_add(range.bytes), BLOCK);
        if let Some(sum) = bytes.get_mut(usize::from(range.card)) {
            *sum = sum.saturating_add(end.saturating_sub(start));
        }
        counted = counted.max(end);
    }
}

/// What is found on a walk through a graph.
struct Asked {
    container: &'static Container,
    /// The card of a node that names none.
    card: Option<&'static Card>,
    wanted: Wanted,
    taken: Ranges,
    freed: Ranges,
}

impl Asked {
    fn add(&mut self, card: Option<&Card>, bytes: u64) {
        let place = card.and_then(|card| self.wanted.bytes.get_mut(usize::from(card.index)));
        if let Some(sum) = place {
            *sum = sum.saturating_add(bytes);
        }
    }

    /// Adds an allocation; by itself where its addresses are not known.
    fn add_range(&mut self, card: Option<&Card>, start: u64, bytes: u64) {
        let range = card.map(|card| Range { start, bytes, card: card.index });
        if start == 0 || !range.is_some_and(|range| self.taken.push(range)) {
            self.wanted.keeps = true;
            self.add(card, round_up(bytes, BLOCK));
        }
    }

    /// Something could not be read: at least there has to be room for a block.
    #[cold]
    fn add_unforeseen(&mut self) {
        self.wanted.is_unforeseen = true;
        self.wanted.keeps = true;
        self.add(self.card, BLOCK);
    }

    fn sum_up(&mut self) {
        let taken = self.taken.all();
        add_blocks(taken, &mut self.wanted.bytes);
        // A graph frees none of its allocations twice.
        let is_own =
            |freed: &&mut Range| taken.binary_search_by_key(&freed.start, |range| range.start).is_ok();
        let freed = self.freed.all().iter_mut().filter(is_own).count();
        self.wanted.keeps |= freed < taken.len();
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
        } else if found == FREE {
            add_freed_by_node(asked, node);
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
            asked.add_range(card.or(asked.card), parameters.pointer, parameters.bytes as u64);
        }
        _ => asked.add_unforeseen(),
    }
}

/// What is not noted as freed counts as kept.
fn add_freed_by_node(asked: &mut Asked, node: CUgraphNode) {
    let ask = driver::function!(
        cuGraphMemFreeNodeGetParams: unsafe extern "C" fn(CUgraphNode, *mut CUdeviceptr) -> CUresult
    );
    let mut start = 0;
    // SAFETY: a node that frees; the driver writes one address.
    if ask.is_some_and(|ask| unsafe { ask(node, &raw mut start) }.is_ok()) {
        asked.freed.push(Range { start, bytes: 0, card: 0 });
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

#[cfg(test)]
mod tests {
    extern crate std;

    use super::*;

    const fn range(start: u64, bytes: u64, card: u8) -> Range {
        Range { start: start * BLOCK, bytes, card }
    }

    #[test]
    fn addresses_count_once() {
        for (case, ranges, want) in [
            ("none", &mut [][..], [0, 0]),
            ("apart", &mut [range(9, 3 * BLOCK, 0), range(1, 1, 0)], [4, 0]),
            ("the same", &mut [range(1, BLOCK, 0), range(1, 3 * BLOCK, 0), range(1, 1, 0)], [3, 0]),
            ("in parts of what was whole", &mut [range(5, BLOCK, 0), range(1, 9 * BLOCK, 0)], [9, 0]),
            ("overlapping", &mut [range(3, 5 * BLOCK, 0), range(1, 3 * BLOCK, 0)], [7, 0]),
            ("two cards", &mut [range(1, BLOCK + 1, 1), range(8, 1, 0)], [1, 2]),
            (
                "two pieces of a block",
                &mut [
                    Range { start: BLOCK + 512, bytes: 512, card: 0 },
                    Range { start: 2 * BLOCK - 512, bytes: 512, card: 0 },
                ],
                [1, 0],
            ),
            ("absurd", &mut [Range { start: BLOCK, bytes: u64::MAX, card: 0 }], [u64::MAX / BLOCK - 1, 0]),
        ] {
            let mut bytes = [0; 2];
            add_blocks(ranges, &mut bytes);
            assert_eq!(bytes.map(|bytes| bytes / BLOCK), want, "{case}");
        }
    }

    #[test]
    fn ranges_are_sorted_by_their_addresses() {
        for count in [0_u64, 1, 2, 3, 100, 1001] {
            let mut ranges: std::vec::Vec<_> =
                (0..count).map(|index| range(index * 7919 % 131, index, 0)).collect();
            let mut want: std::vec::Vec<_> = ranges.iter().map(|range| range.start).collect();
            want.sort_unstable();
            sort(&mut ranges);
            let found: std::vec::Vec<_> = ranges.iter().map(|range| range.start).collect();
            assert_eq!(found, want, "{count}");
        }
    }

    #[test]
    fn ranges_find_room() {
        let mut ranges = Ranges::new();
        assert!(ranges.all().is_empty());
        for index in 0..1000 {
            assert!(ranges.push(range(1000 - index, 1, 0)));
        }
        let all = ranges.all();
        assert_eq!((all.len(), all[0], all[999]), (1000, range(1000, 1, 0), range(1, 1, 0)));
    }
}
