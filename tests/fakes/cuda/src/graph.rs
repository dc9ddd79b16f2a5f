//! Graphs; what they are made of stands in `graph_node`.
//!
//! Nodes run in the order in which they were added; a graph's time is the sum of its kernels'. Their memory: `graph_memory`.
#![expect(unsafe_code, reason = "exports entry points under their C names")]

use std::ffi::{c_int, c_uint};

use crate::abi::{
    Code, Device, Handle, HostFunction, InstantiateParams, KernelNode, KernelNode2, Opaque, Out,
};
use crate::driver::Driver;
use crate::gate::{entry, open_entry, streamed};
use crate::graph_memory::GraphPool;
use crate::graph_node::Work;

/// `CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH`.
const AUTO_FREE: u64 = 1;
/// `CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD`.
const UPLOAD: u64 = 2;

/// An executable graph.
#[derive(Clone, Debug)]
pub(crate) struct Exec {
    pub(crate) nodes: Vec<(Handle, Work)>,
    flags: u64,
    /// Frees of its own graph happen before the launch ends.
    enabled: Vec<bool>,
}

impl Driver {
    pub(crate) fn create_graph(&mut self) -> Handle {
        let handle = self.handle();
        self.objects.graphs.insert(handle, Vec::new());
        handle
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
        if flags & UPLOAD != 0 {
            // The stream that it is uploaded in does not matter here: it is a new graph.
            self.map_graph(handle, &nodes, &self.target(Handle(0))?)?;
        }
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
        self.map_graph(exec, &graph.nodes, &target)?;
        let (mut functions, mut events) = (Vec::new(), Vec::new());
        let mut ns = 0_u64;
        for ((_, work), _) in graph.nodes.iter().zip(&graph.enabled).filter(|(_, on)| **on) {
            match *work {
                Work::Kernel(time) => ns = ns.saturating_add(time),
                Work::Alloc(address, size) => {
                    self.use_graph_memory(exec, address, size, graph.flags & AUTO_FREE != 0)?;
                }
                Work::Free(address) => self.free_address(address)?,
                Work::Host(function, data) => functions.push((function, data)),
                Work::Event(event) => events.push(event),
                _ => {}
            }
        }
        self.submit(&target, ns);
        self.graph_runs(exec);
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
        Ok((ordinal, self.objects.graph_pools.get(&ordinal).cloned().unwrap_or_default()))
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
        let gone: Vec<Work> =
            nodes.iter().filter_map(|node| driver.objects.nodes.remove(node)).map(|node| node.work).collect();
        driver.forget_graph_addresses(&gone);
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
        let gone = driver.objects.execs.remove(&exec).ok_or(Code::INVALID_VALUE)?;
        driver.unmap_graph(exec);
        let gone: Vec<Work> = gone.nodes.iter().map(|(_, work)| *work).collect();
        driver.forget_graph_addresses(&gone);
        Ok(())
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
        let ordinal = driver.ordinal(device)?;
        driver.trim_graph_pool(ordinal);
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
        let target = driver.target(stream)?;
        let graph = driver.objects.execs.get(&exec).cloned().ok_or(Code::INVALID_VALUE)?;
        driver.map_graph(exec, &graph.nodes, &target)
    }
}
