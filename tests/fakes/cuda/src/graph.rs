//! Graphs; what they are made of stands in `graph_node`.
//!
//! Nodes run in the order in which they were added; a graph's time is the sum of its kernels'. Memory of allocation nodes comes out
//! of the card's graph pool: it is taken in blocks of 2 MiB when a launch needs more than the pool holds, stays there after it is
//! freed, and goes back to the card with `cuDeviceGraphMemTrim` alone. The address of a node is its own for as long as
//! the process lives.
#![expect(unsafe_code, reason = "exports entry points under their C names")]

use std::ffi::{c_int, c_uint};

use crate::abi::{
    Code, Device, DevicePtr, Handle, HostFunction, InstantiateParams, KernelNode, KernelNode2, Opaque, Out,
};
use crate::driver::Driver;
use crate::gate::{entry, open_entry, streamed};
use crate::graph_node::Work;
use crate::memory::{Backing, Kind};
use crate::space::{BLOCK, UNIT, round_up};

/// `CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH`.
const AUTO_FREE: u64 = 1;

/// An executable graph.
#[derive(Clone, Debug)]
pub(crate) struct Exec {
    nodes: Vec<(Handle, Work)>,
    flags: u64,
    /// Frees of its own graph happen before the launch ends.
    enabled: Vec<bool>,
}

/// The memory of an allocation node.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GraphMemory {
    pub(crate) size: u64,
    pub(crate) ordinal: usize,
    in_use: bool,
}

/// A card's graph pool, bytes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct GraphPool {
    used: u64,
    used_high: u64,
    reserved: u64,
    reserved_high: u64,
}

impl Driver {
    pub(crate) fn create_graph(&mut self) -> Handle {
        let handle = self.handle();
        self.objects.graphs.insert(handle, Vec::new());
        handle
    }

    /// Addresses for an allocation node.
    pub(crate) fn graph_memory(&mut self, ordinal: usize, size: u64) -> Result<DevicePtr, Code> {
        if size == 0 {
            return Err(Code::INVALID_VALUE);
        }
        let address = self.space.take(round_up(size, BLOCK), BLOCK)?;
        self.objects.graph_memory.insert(address, GraphMemory { size, ordinal, in_use: false });
        Ok(address)
    }

    fn use_graph_memory(&mut self, address: DevicePtr, auto_free: bool) -> Result<(), Code> {
        let memory = self.objects.graph_memory.get(&address).copied().ok_or(Code::INVALID_VALUE)?;
        if memory.in_use {
            if !auto_free {
                return Err(Code::INVALID_VALUE);
            }
            self.free_graph_address(address)?;
        }
        let pool = self.objects.graph_pools.get(&memory.ordinal).copied().unwrap_or_default();
        let used = pool.used + round_up(memory.size, UNIT);
        let reserved = round_up(used, BLOCK).max(pool.reserved);
        self.charge(memory.ordinal, reserved - pool.reserved)?;
        let pool = self.objects.graph_pools.entry(memory.ordinal).or_default();
        (pool.used, pool.reserved) = (used, reserved);
        pool.used_high = pool.used_high.max(used);
        pool.reserved_high = pool.reserved_high.max(reserved);
        self.objects.graph_memory.insert(address, GraphMemory { in_use: true, ..memory });
        self.record(address, memory.size, Backing::Nothing, memory.ordinal, None, Kind::Graph);
        Ok(())
    }

    /// Frees the memory of an allocation node; its graph may be launched again after that.
    pub(crate) fn free_graph_address(&mut self, address: DevicePtr) -> Result<(), Code> {
        let memory =
            self.objects.graph_memory.get_mut(&address).filter(|m| m.in_use).ok_or(Code::INVALID_VALUE)?;
        memory.in_use = false;
        let memory = *memory;
        self.allocs.remove(&address);
        if let Some(pool) = self.objects.graph_pools.get_mut(&memory.ordinal) {
            pool.used = pool.used.saturating_sub(round_up(memory.size, UNIT));
        }
        Ok(())
    }

    pub(crate) fn works(&self, graph: Handle) -> Result<Vec<(Handle, Work)>, Code> {
        let nodes = self.objects.graphs.get(&graph).ok_or(Code::INVALID_VALUE)?;
        let mut works = Vec::new();
        for handle in nodes {
            match self.objects.nodes.get(handle).map(|n| n.work) {
                Some(Work::Child(child)) => works.extend(self.works(child)?),
                Some(work) => works.push((*handle, work)),
                None => {}
            }
        }
        Ok(works)
    }

    fn instantiate(&mut self, out: Out<Handle>, graph: Handle, flags: u64) -> Result<(), Code> {
        out.check()?;
        let nodes = self.works(graph)?;
        let handle = self.handle();
        let enabled = vec![true; nodes.len()];
        self.objects.execs.insert(handle, Exec { nodes, flags, enabled });
        out.put(handle)
    }

    /// Runs a graph; answers the host functions to call after it.
    fn launch_graph(&mut self, exec: Handle, stream: Handle) -> Result<Hosts, Code> {
        let target = self.target(stream)?;
        let graph = self.objects.execs.get(&exec).cloned().ok_or(Code::INVALID_VALUE)?;
        if let Some(capture) = target.capture {
            let ns = graph.nodes.iter().map(|(_, w)| if let Work::Kernel(ns) = w { *ns } else { 0 }).sum();
            self.capture_kernel(capture, ns)?;
            return Ok(Hosts { functions: Vec::new(), card: 0, mark: 0 });
        }
        let (mut functions, mut events) = (Vec::new(), Vec::new());
        let mut ns = 0_u64;
        for ((_, work), _) in graph.nodes.iter().zip(&graph.enabled).filter(|(_, on)| **on) {
            match *work {
                Work::Kernel(time) => ns = ns.saturating_add(time),
                Work::Alloc(address) => self.use_graph_memory(address, graph.flags & AUTO_FREE != 0)?,
                Work::Free(address) => self.free_address(address)?,
                Work::Host(function, data) => functions.push((function, data)),
                Work::Event(event) => events.push(event),
                _ => {}
            }
        }
        self.submit(&target, ns);
        for event in events {
            self.record_event(event, stream)?;
        }
        let card = self.cards[target.ordinal].index;
        Ok(Hosts { functions, card, mark: self.live.mark(card) })
    }

    fn update(&mut self, exec: Handle, graph: Handle) -> Result<bool, Code> {
        let nodes = self.works(graph)?;
        let known = self.objects.execs.get_mut(&exec).ok_or(Code::INVALID_VALUE)?;
        let kinds = |n: &[(Handle, Work)]| n.iter().map(|(_, w)| w.kind()).collect::<Vec<_>>();
        let same = kinds(&nodes) == kinds(&known.nodes);
        if same {
            known.nodes = nodes;
        }
        Ok(same)
    }

    fn set_exec_kernel(&mut self, exec: Handle, node: Handle, work: Work) -> Result<(), Code> {
        let exec = self.objects.execs.get_mut(&exec).ok_or(Code::INVALID_VALUE)?;
        let found = exec.nodes.iter_mut().find(|(h, _)| *h == node).ok_or(Code::INVALID_VALUE)?;
        found.1 = work;
        Ok(())
    }

    fn graph_attribute(&self, device: Device) -> Result<(usize, GraphPool), Code> {
        let ordinal = self.ordinal(device)?;
        Ok((ordinal, self.objects.graph_pools.get(&ordinal).copied().unwrap_or_default()))
    }
}

/// Host functions of a launch, and the mark after which they run.
struct Hosts {
    functions: Vec<(HostFunction, usize)>,
    card: usize,
    mark: u64,
}

fn launch(exec: Handle, stream: Handle) -> Result<(), Code> {
    let (hosts, live) = {
        let mut guard = crate::gate::driver();
        let driver = guard.as_mut().ok_or(Code::NOT_INITIALIZED)?;
        (driver.launch_graph(exec, stream)?, driver.live)
    };
    if !hosts.functions.is_empty() {
        std::thread::spawn(move || {
            live.wait(hosts.card, hosts.mark);
            for (function, data) in hosts.functions {
                if let Some(function) = function {
                    function(std::ptr::with_exposed_provenance_mut(data));
                }
            }
        });
    }
    Ok(())
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuGraphLaunch(exec: Handle, stream: Handle) -> c_int {
    if crate::gate::stub() {
        return 0;
    }
    crate::gate::open(&crate::table::site::cuGraphLaunch, || launch(exec, stream))
}

open_entry! {
    fn cuGraphLaunch_ptsz(exec: Handle, stream: Handle) {
        launch(exec, stream)
    }
}

entry! {
    fn cuGraphCreate(out: Out<Handle>, flags: c_uint) |driver| {
        out.check()?;
        if flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        out.put(driver.create_graph())
    }

    fn cuGraphDestroy(graph: Handle) |driver| {
        let nodes = driver.objects.graphs.remove(&graph).ok_or(Code::INVALID_VALUE)?;
        for node in nodes {
            driver.objects.nodes.remove(&node);
        }
        Ok(())
    }

    fn cuGraphClone(out: Out<Handle>, graph: Handle) |driver| {
        out.check()?;
        let works = driver.works(graph)?;
        let clone = driver.create_graph();
        for (_, work) in works {
            driver.add_node(clone, work)?;
        }
        out.put(clone)
    }

    fn cuGraphExecKernelNodeSetParams(exec: Handle, node: Handle, params: Out<KernelNode>) |driver| {
        let work = driver.kernel_work(&params.get()?, None)?;
        driver.set_exec_kernel(exec, node, work)
    }

    fn cuGraphExecKernelNodeSetParams_v2(exec: Handle, node: Handle, params: Out<KernelNode2>) |driver| {
        let params = params.get()?;
        let work = driver.kernel_work(&params.first, Some(params.kernel))?;
        driver.set_exec_kernel(exec, node, work)
    }

    fn cuGraphInstantiate(
        out: Out<Handle>, graph: Handle, _node: Out<Handle>, _log: Opaque, _size: usize,
    ) |driver| {
        driver.instantiate(out, graph, 0)
    }

    fn cuGraphInstantiate_v2(
        out: Out<Handle>, graph: Handle, _node: Out<Handle>, _log: Opaque, _size: usize,
    ) |driver| {
        driver.instantiate(out, graph, 0)
    }

    fn cuGraphInstantiateWithFlags(out: Out<Handle>, graph: Handle, flags: u64) |driver| {
        driver.instantiate(out, graph, flags)
    }

    fn cuGraphExecGetFlags(exec: Handle, flags: Out<u64>) |driver| {
        flags.put(driver.objects.execs.get(&exec).ok_or(Code::INVALID_VALUE)?.flags)
    }

    fn cuGraphExecDestroy(exec: Handle) |driver| {
        driver.objects.execs.remove(&exec).map(|_| ()).ok_or(Code::INVALID_VALUE)
    }

    fn cuGraphExecUpdate(exec: Handle, graph: Handle, _node: Out<Handle>, result: Out<c_uint>) |driver| {
        let same = driver.update(exec, graph)?;
        result.put_if(if same { 0 } else { 2 })?;
        if same { Ok(()) } else { Err(Code::GRAPH_EXEC_UPDATE_FAILURE) }
    }

    fn cuGraphExecUpdate_v2(exec: Handle, graph: Handle, result: Out<c_uint>) |driver| {
        let same = driver.update(exec, graph)?;
        result.put_if(if same { 0 } else { 2 })?;
        if same { Ok(()) } else { Err(Code::GRAPH_EXEC_UPDATE_FAILURE) }
    }

    fn cuGraphNodeSetEnabled(exec: Handle, node: Handle, enabled: c_uint) |driver| {
        let exec = driver.objects.execs.get_mut(&exec).ok_or(Code::INVALID_VALUE)?;
        let place = exec.nodes.iter().position(|(h, _)| *h == node).ok_or(Code::INVALID_VALUE)?;
        if let Some(on) = exec.enabled.get_mut(place) {
            *on = enabled != 0;
        }
        Ok(())
    }

    fn cuDeviceGraphMemTrim(device: Device) |driver| {
        let (ordinal, pool) = driver.graph_attribute(device)?;
        let reserved = round_up(pool.used, BLOCK);
        driver.uncharge(ordinal, pool.reserved - reserved);
        driver.objects.graph_pools.entry(ordinal).or_default().reserved = reserved;
        Ok(())
    }

    // 0 and 1: used now and at most; 2 and 3: reserved.
    fn cuDeviceGetGraphMemAttribute(device: Device, attribute: c_uint, value: Opaque) |driver| {
        let (_, pool) = driver.graph_attribute(device)?;
        let told = [pool.used, pool.used_high, pool.reserved, pool.reserved_high];
        value.cast().put(*told.get(attribute as usize).ok_or(Code::INVALID_VALUE)?)
    }

    fn cuDeviceSetGraphMemAttribute(device: Device, attribute: c_uint, value: Opaque) |driver| {
        let ordinal = driver.ordinal(device)?;
        let pool = driver.objects.graph_pools.entry(ordinal).or_default();
        match (attribute, value.cast::<u64>().get()?) {
            (1, 0) => pool.used_high = pool.used,
            (3, 0) => pool.reserved_high = pool.reserved,
            _ => return Err(Code::INVALID_VALUE),
        }
        Ok(())
    }
}

streamed! {
    fn cuGraphInstantiateWithParams / cuGraphInstantiateWithParams_ptsz(
        out: Out<Handle>, graph: Handle, params: Out<InstantiateParams>,
    ) |driver, _| {
        let wanted = params.get()?;
        driver.instantiate(out, graph, wanted.flags)?;
        params.put(InstantiateParams { result: 0, ..wanted })
    }

    fn cuGraphUpload / cuGraphUpload_ptsz(exec: Handle, stream: Handle) |driver, _| {
        driver.target(stream)?;
        driver.objects.execs.get(&exec).map(|_| ()).ok_or(Code::INVALID_VALUE)
    }
}
