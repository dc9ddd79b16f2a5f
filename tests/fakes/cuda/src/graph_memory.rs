//! Memory of allocation nodes: addresses, and the card's graph pool behind them.
//!
//! As the programming guide has it: of the allocations of one graph those that are not there at the same time may share an
//! address; a launch maps what the pool holds, and graphs that do not run at the same time share that; what a graph has
//! mapped stays so between its launches (`CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT`), and goes back to the card with
//! `cuDeviceGraphMemTrim` alone, but for what is running or was not freed. An address is its graph's until that is
//! destroyed and can be launched no more.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use crate::abi::{Code, DevicePtr, Handle};
use crate::driver::Driver;
use crate::graph_node::Work;
use crate::memory::{Backing, Kind};
use crate::space::{BLOCK, round_up};
use crate::stream::Target;

/// Addresses of allocation nodes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GraphMemory {
    length: u64,
    pub(crate) ordinal: usize,
    /// The executable graph that allocated it, until it is freed.
    user: Option<Handle>,
}

/// An executable graph to which a pool's memory is mapped.
#[derive(Clone, Copy, Debug)]
struct Mapped {
    bytes: u64,
    /// None for the default streams.
    stream: Option<Handle>,
    /// Its last launch has ended when the card has come that far.
    mark: u64,
}

/// A card's graph pool, bytes.
#[derive(Clone, Debug, Default)]
pub(crate) struct GraphPool {
    pub(crate) used: u64,
    pub(crate) used_high: u64,
    pub(crate) reserved: u64,
    pub(crate) reserved_high: u64,
    mapped: HashMap<Handle, Mapped>,
}

/// What is to run, and when.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Beside {
    Nothing,
    /// After all that is in this stream, None for the default ones.
    Stream(Option<Handle>),
}

impl Driver {
    /// Addresses for an allocation node that is added to a graph: those of one that the graph has freed by then, where they
    /// are enough.
    pub(crate) fn graph_memory(
        &mut self,
        graph: Handle,
        ordinal: usize,
        size: u64,
    ) -> Result<DevicePtr, Code> {
        if size == 0 {
            return Err(Code::INVALID_VALUE);
        }
        let length = round_up(size, BLOCK);
        let mut is_free = BTreeMap::new();
        for node in self.objects.graphs.get(&graph).into_iter().flatten() {
            match self.objects.nodes.get(node).map(|node| node.work) {
                Some(Work::Alloc(address, _)) => is_free.insert(address, false),
                Some(Work::Free(address)) => {
                    is_free.get_mut(&address).map(|free| std::mem::replace(free, true))
                }
                _ => None,
            };
        }
        let fits = |address: &DevicePtr| {
            let known = self.objects.graph_memory.get(address);
            known.is_some_and(|known| known.ordinal == ordinal && known.length >= length)
        };
        let again = is_free.into_iter().filter(|(_, free)| *free).map(|(address, _)| address).find(fits);
        if let Some(address) = again {
            return Ok(address);
        }
        let address = self.space.take(length, BLOCK)?;
        self.objects.graph_memory.insert(address, GraphMemory { length, ordinal, user: None });
        Ok(address)
    }

    /// What a graph's allocation nodes need on each card: each address once.
    fn needed(&self, nodes: &[(Handle, Work)]) -> BTreeMap<usize, u64> {
        let address = |(_, work): &(Handle, Work)| {
            if let Work::Alloc(address, _) = work { Some(*address) } else { None }
        };
        let addresses: BTreeSet<_> = nodes.iter().filter_map(address).collect();
        let mut needed = BTreeMap::new();
        for memory in addresses.iter().filter_map(|address| self.objects.graph_memory.get(address)) {
            *needed.entry(memory.ordinal).or_default() += memory.length;
        }
        needed
    }

    /// Bytes of the card's pool that nobody else may have now: of graphs that run, but for those in the same stream, whose turn
    /// is over by then, and of allocations that were not freed. `but` does not count.
    fn busy(&self, ordinal: usize, but: Handle, stream: Beside) -> u64 {
        let card = self.cards[ordinal].index;
        let Some(pool) = self.objects.graph_pools.get(&ordinal) else { return 0 };
        let runs = |exec: &Handle| {
            let of = |mapped: &Mapped| {
                stream != Beside::Stream(mapped.stream) && !self.live.is_done(card, mapped.mark)
            };
            *exec != but && pool.mapped.get(exec).is_some_and(of)
        };
        // Those of one stream run one after the other.
        let mut running: HashMap<Option<Handle>, u64> = HashMap::new();
        for (_, mapped) in pool.mapped.iter().filter(|(exec, _)| runs(exec)) {
            let most = running.entry(mapped.stream).or_default();
            *most = mapped.bytes.max(*most);
        }
        let is_left = |memory: &&GraphMemory| {
            memory.ordinal == ordinal && memory.user.is_some_and(|user| user != but && !runs(&user))
        };
        running.values().sum::<u64>()
            + self.objects.graph_memory.values().filter(is_left).map(|memory| memory.length).sum::<u64>()
    }

    /// Maps what an executable graph needs before it runs in a stream.
    pub(crate) fn map_graph(
        &mut self,
        exec: Handle,
        nodes: &[(Handle, Work)],
        target: &Target,
    ) -> Result<(), Code> {
        for (ordinal, bytes) in self.needed(nodes) {
            let needed = self.busy(ordinal, exec, Beside::Stream(target.stream)) + bytes;
            let known = self.objects.graph_pools.get(&ordinal).map_or(0, |pool| pool.reserved);
            self.charge(ordinal, needed.saturating_sub(known))?;
            let mark = self.live.mark(self.cards[ordinal].index);
            let pool = self.objects.graph_pools.entry(ordinal).or_default();
            pool.mapped.insert(exec, Mapped { bytes, stream: target.stream, mark });
            pool.used = pool.used.max(needed);
            pool.reserved = pool.reserved.max(needed);
            pool.used_high = pool.used_high.max(pool.used);
            pool.reserved_high = pool.reserved_high.max(pool.reserved);
        }
        Ok(())
    }

    /// An executable graph was launched: its memory is its own until the card has done what it was given.
    pub(crate) fn graph_runs(&mut self, exec: Handle) {
        let marks: Vec<u64> = self.cards.iter().map(|card| self.live.mark(card.index)).collect();
        for (ordinal, pool) in &mut self.objects.graph_pools {
            if let (Some(mapped), Some(mark)) = (pool.mapped.get_mut(&exec), marks.get(*ordinal)) {
                mapped.mark = *mark;
            }
        }
    }

    /// An executable graph is gone, and with the last of them all mappings.
    pub(crate) fn unmap_graph(&mut self, exec: Handle) {
        let ordinals: Vec<usize> = self.objects.graph_pools.keys().copied().collect();
        for ordinal in ordinals {
            let left = self.busy(ordinal, Handle(0), Beside::Nothing);
            if let Some(pool) = self.objects.graph_pools.get_mut(&ordinal)
                && pool.mapped.remove(&exec).is_some()
                && pool.mapped.is_empty()
            {
                pool.used = left;
            }
        }
    }

    /// An executable graph allocates: not what its launch before left, unless that is freed for it.
    pub(crate) fn use_graph_memory(
        &mut self,
        exec: Handle,
        address: DevicePtr,
        size: u64,
        auto_free: bool,
    ) -> Result<(), Code> {
        let memory = self.objects.graph_memory.get(&address).copied().ok_or(Code::INVALID_VALUE)?;
        if memory.user.is_some() {
            if !auto_free {
                return Err(Code::INVALID_VALUE);
            }
            self.free_graph_address(address)?;
        }
        self.objects.graph_memory.insert(address, GraphMemory { user: Some(exec), ..memory });
        self.record(address, size, Backing::Nothing, memory.ordinal, None, Kind::Graph);
        Ok(())
    }

    /// Gives up the addresses of nodes that are gone with a graph or an executable one, where nobody else has them.
    pub(crate) fn forget_graph_addresses(&mut self, gone: &[Work]) {
        let address = |work: &Work| if let Work::Alloc(address, _) = work { Some(*address) } else { None };
        let gone: BTreeSet<_> = gone.iter().filter_map(address).collect();
        if gone.is_empty() {
            return;
        }
        let nodes = self.objects.nodes.values().map(|node| &node.work);
        let launched = self.objects.execs.values().flat_map(|exec| exec.nodes.iter().map(|(_, work)| work));
        let there: BTreeSet<_> = nodes.chain(launched).filter_map(address).collect();
        for address in gone.difference(&there) {
            if let Some(memory) = self.objects.graph_memory.get(address).copied()
                && memory.user.is_none()
            {
                self.objects.graph_memory.remove(address);
                self.space.give(*address, memory.length);
            }
        }
    }

    /// Frees the memory of an allocation node; its graph may be launched again after that.
    pub(crate) fn free_graph_address(&mut self, address: DevicePtr) -> Result<(), Code> {
        let memory = self.objects.graph_memory.get_mut(&address).ok_or(Code::INVALID_VALUE)?;
        memory.user.take().ok_or(Code::INVALID_VALUE)?;
        self.allocs.remove(&address);
        Ok(())
    }

    /// Gives back to the card what is not in use.
    pub(crate) fn trim_graph_pool(&mut self, ordinal: usize) {
        let busy = self.busy(ordinal, Handle(0), Beside::Nothing);
        let pool = self.objects.graph_pools.entry(ordinal).or_default();
        let freed = pool.reserved - busy;
        (pool.reserved, pool.used) = (busy, busy);
        self.uncharge(ordinal, freed);
    }
}
