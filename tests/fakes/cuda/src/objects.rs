//! The tables of everything that has a handle.

use std::collections::{BTreeMap, HashMap};

use crate::abi::{DevicePtr, Handle};
use crate::array::Array;
use crate::capture::Capture;
use crate::driver::Driver;
use crate::graph::Exec;
use crate::graph_memory::{GraphMemory, GraphPool};
use crate::graph_node::Node;
use crate::module::{Function, Module};
use crate::pool::{CardPools, Pool};
use crate::stream::{Event, Stream};
use crate::vmm::{Mapping, Physical};

/// Objects by handle.
#[derive(Debug, Default)]
pub(crate) struct Objects {
    pub(crate) modules: HashMap<Handle, Module>,
    pub(crate) functions: HashMap<Handle, Function>,
    pub(crate) streams: HashMap<Handle, Stream>,
    pub(crate) events: HashMap<Handle, Event>,
    /// Recorded, and not seen to have happened yet.
    pub(crate) pending_events: Vec<Handle>,
    pub(crate) captures: HashMap<u64, Capture>,
    /// Nodes of graphs, in their order.
    pub(crate) graphs: HashMap<Handle, Vec<Handle>>,
    pub(crate) nodes: HashMap<Handle, Node>,
    pub(crate) execs: HashMap<Handle, Exec>,
    pub(crate) graph_memory: HashMap<DevicePtr, GraphMemory>,
    /// By ordinal.
    pub(crate) graph_pools: HashMap<usize, GraphPool>,
    /// The runtime's values by context and key.
    pub(crate) storage: HashMap<(Handle, usize), usize>,
    pub(crate) arrays: HashMap<Handle, Array>,
    pub(crate) pools: HashMap<Handle, Pool>,
    /// By ordinal.
    pub(crate) card_pools: HashMap<usize, CardPools>,
    pub(crate) physical: HashMap<Handle, Physical>,
    /// Reserved address ranges and their sizes.
    pub(crate) reserved: BTreeMap<DevicePtr, u64>,
    pub(crate) mappings: BTreeMap<DevicePtr, Mapping>,
    /// Opened IPC memory: exporter and its address, to the local address.
    pub(crate) opened: HashMap<(u64, DevicePtr), DevicePtr>,
    /// Openings by local address.
    pub(crate) opened_users: HashMap<DevicePtr, u32>,
    /// Sizes of imported external memory.
    pub(crate) external: HashMap<Handle, u64>,
    /// SMs of resource descriptions.
    pub(crate) descriptions: HashMap<Handle, u32>,
    /// Host memory by address: bytes, and whether it was allocated here.
    pub(crate) pinned: BTreeMap<DevicePtr, (u64, bool)>,
}

impl Driver {
    /// Drops what lived in a context.
    pub(crate) fn drop_context_objects(&mut self, context: Handle) {
        let gone: Vec<Handle> = self
            .objects
            .modules
            .iter()
            .filter(|(_, m)| m.context == Some(context))
            .map(|(h, _)| *h)
            .collect();
        for module in gone {
            // It was in the table a moment ago.
            let _ = self.unload(module);
        }
        self.free_context_arrays(context);
        self.objects.opened_users.retain(|address, _| self.allocs.contains_key(address));
        self.objects.opened.retain(|_, address| self.allocs.contains_key(address));
        self.objects.storage.retain(|(owner, _), _| *owner != context);
        self.objects.streams.retain(|_, s| s.context != context);
        self.objects.events.retain(|_, e| e.context != context);
    }
}
