//! Nodes of graphs: kinds, parameters, and the graph that each is in.
#![expect(unsafe_code, reason = "exports entry points under their C names")]

use std::ffi::{c_int, c_uint, c_void};

use crate::abi::{
    AllocNode, Code, DevicePtr, Handle, HostFunction, KernelNode, KernelNode2, Location, NodeParams,
    ON_DEVICE, Opaque, Out, PoolProps,
};
use crate::driver::Driver;
use crate::gate::entry;

/// What a node does.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Work {
    /// ns of the whole card.
    Kernel(u64),
    Copy,
    Fill,
    /// The program's function and its argument, as addresses.
    Host(HostFunction, usize),
    Child(Handle),
    Empty,
    /// Address and size.
    Alloc(DevicePtr, u64),
    Free(DevicePtr),
    Event(Handle),
    Other(c_uint),
}

impl Work {
    /// `CUgraphNodeType`.
    pub(crate) fn kind(self) -> c_uint {
        match self {
            Self::Kernel(_) => 0,
            Self::Copy => 1,
            Self::Fill => 2,
            Self::Host(..) => 3,
            Self::Child(_) => 4,
            Self::Empty => 5,
            Self::Event(_) => 7,
            Self::Alloc(..) => 10,
            Self::Free(_) => 11,
            Self::Other(kind) => kind,
        }
    }
}

/// A node and its graph.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Node {
    graph: Handle,
    pub(crate) work: Work,
}

/// `CUDA_HOST_NODE_PARAMS`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct HostNode {
    function: HostFunction,
    data: *mut c_void,
}

impl Driver {
    pub(crate) fn add_node(&mut self, graph: Handle, work: Work) -> Result<Handle, Code> {
        let handle = self.handle();
        self.objects.graphs.get_mut(&graph).ok_or(Code::INVALID_VALUE)?.push(handle);
        self.objects.nodes.insert(handle, Node { graph, work });
        Ok(handle)
    }

    fn add(&mut self, out: Out<Handle>, graph: Handle, work: Work) -> Result<(), Code> {
        out.check()?;
        out.put(self.add_node(graph, work)?)
    }

    pub(crate) fn kernel_work(&self, node: &KernelNode, kernel: Option<Handle>) -> Result<Work, Code> {
        let function = kernel.filter(|_| node.function == Handle(0)).unwrap_or(node.function);
        self.launch_time(function, node.grid, node.block).map(Work::Kernel)
    }

    fn add_alloc(&mut self, out: Out<Handle>, graph: Handle, params: Out<AllocNode>) -> Result<(), Code> {
        out.check()?;
        let mut wanted = params.get()?;
        let ordinal = self.located(wanted.pool.location)?.ok_or(Code::NOT_SUPPORTED)?;
        wanted.address = self.graph_memory(graph, ordinal, wanted.size as u64)?;
        let node = self.add_node(graph, Work::Alloc(wanted.address, wanted.size as u64))?;
        params.put(wanted)?;
        out.put(node)
    }

    fn set_kernel(&mut self, node: Handle, work: Work) -> Result<(), Code> {
        self.objects.nodes.get_mut(&node).ok_or(Code::INVALID_VALUE)?.work = work;
        Ok(())
    }

    /// A node by `cuGraphAddNode`.
    fn add_any(&mut self, out: Out<Handle>, graph: Handle, params: Out<NodeParams>) -> Result<(), Code> {
        let head = params.get()?;
        // The node's own struct starts behind type and padding.
        let body: Out<u64> = params.cast::<u64>().offset(2);
        let work = match head.kind {
            0 => {
                let kernel = body.cast::<KernelNode2>().get()?;
                self.kernel_work(&kernel.first, Some(kernel.kernel))?
            }
            1 => Work::Copy,
            2 => Work::Fill,
            3 => {
                let host = body.cast::<HostNode>().get()?;
                Work::Host(host.function, host.data.expose_provenance())
            }
            4 => Work::Child(body.cast::<Handle>().get()?),
            5 => Work::Empty,
            7 => Work::Event(body.cast::<Handle>().get()?),
            10 => return self.add_alloc(out, graph, body.cast()),
            11 => Work::Free(body.get()?),
            kind @ (6 | 8 | 9 | 12) => Work::Other(kind),
            _ => return Err(Code::NOT_SUPPORTED),
        };
        self.add(out, graph, work)
    }
}

entry! {
    fn cuGraphAddKernelNode(
        out: Out<Handle>, graph: Handle, _after: Opaque, _count: usize, params: Out<KernelNode>,
    ) |driver| {
        let work = driver.kernel_work(&params.get()?, None)?;
        driver.add(out, graph, work)
    }

    fn cuGraphAddKernelNode_v2(
        out: Out<Handle>, graph: Handle, _after: Opaque, _count: usize, params: Out<KernelNode2>,
    ) |driver| {
        let params = params.get()?;
        let work = driver.kernel_work(&params.first, Some(params.kernel))?;
        driver.add(out, graph, work)
    }

    fn cuGraphKernelNodeSetParams(node: Handle, params: Out<KernelNode>) |driver| {
        let work = driver.kernel_work(&params.get()?, None)?;
        driver.set_kernel(node, work)
    }

    fn cuGraphKernelNodeSetParams_v2(node: Handle, params: Out<KernelNode2>) |driver| {
        let params = params.get()?;
        let work = driver.kernel_work(&params.first, Some(params.kernel))?;
        driver.set_kernel(node, work)
    }

    fn cuGraphAddMemcpyNode(
        out: Out<Handle>, graph: Handle, _after: Opaque, _count: usize, _params: Opaque, _context: Handle,
    ) |driver| {
        driver.add(out, graph, Work::Copy)
    }

    fn cuGraphAddMemsetNode(
        out: Out<Handle>, graph: Handle, _after: Opaque, _count: usize, _params: Opaque, _context: Handle,
    ) |driver| {
        driver.add(out, graph, Work::Fill)
    }

    fn cuGraphAddHostNode(
        out: Out<Handle>, graph: Handle, _after: Opaque, _count: usize, params: Out<HostNode>,
    ) |driver| {
        let params = params.get()?;
        driver.add(out, graph, Work::Host(params.function, params.data.expose_provenance()))
    }

    fn cuGraphAddChildGraphNode(
        out: Out<Handle>, graph: Handle, _after: Opaque, _count: usize, child: Handle,
    ) |driver| {
        driver.works(child)?;
        driver.add(out, graph, Work::Child(child))
    }

    fn cuGraphAddEmptyNode(out: Out<Handle>, graph: Handle, _after: Opaque, _count: usize) |driver| {
        driver.add(out, graph, Work::Empty)
    }

    fn cuGraphAddEventRecordNode(
        out: Out<Handle>, graph: Handle, _after: Opaque, _count: usize, event: Handle,
    ) |driver| {
        driver.add(out, graph, Work::Event(event))
    }

    fn cuGraphAddEventWaitNode(
        out: Out<Handle>, graph: Handle, _after: Opaque, _count: usize, _event: Handle,
    ) |driver| {
        driver.add(out, graph, Work::Other(6))
    }

    fn cuGraphAddMemAllocNode(
        out: Out<Handle>, graph: Handle, _after: Opaque, _count: usize, params: Out<AllocNode>,
    ) |driver| {
        driver.add_alloc(out, graph, params)
    }

    fn cuGraphAddMemFreeNode(
        out: Out<Handle>, graph: Handle, _after: Opaque, _count: usize, address: DevicePtr,
    ) |driver| {
        if !driver.objects.graph_memory.contains_key(&address) && !driver.allocs.contains_key(&address) {
            return Err(Code::INVALID_VALUE);
        }
        driver.add(out, graph, Work::Free(address))
    }

    fn cuGraphMemAllocNodeGetParams(node: Handle, params: Out<AllocNode>) |driver| {
        let Some(Work::Alloc(address, size)) = driver.objects.nodes.get(&node).map(|n| n.work) else {
            return Err(Code::INVALID_VALUE);
        };
        let memory = driver.objects.graph_memory.get(&address).ok_or(Code::INVALID_VALUE)?;
        let location = Location { kind: ON_DEVICE, id: c_int::try_from(memory.ordinal).unwrap_or(0) };
        params.put(AllocNode {
            pool: PoolProps {
                kind: 1,
                handle_types: 0,
                location,
                win32: 0,
                max_size: 0,
                usage: 0,
                reserved: [0; 54],
            },
            access: Opaque::null(),
            access_count: 0,
            size: usize::try_from(size).unwrap_or(usize::MAX),
            address,
        })
    }

    fn cuGraphChildGraphNodeGetGraph(node: Handle, graph: Out<Handle>) |driver| {
        match driver.objects.nodes.get(&node).map(|n| n.work) {
            Some(Work::Child(child)) => graph.put(child),
            _ => Err(Code::INVALID_VALUE),
        }
    }

    fn cuGraphMemFreeNodeGetParams(node: Handle, address: Out<DevicePtr>) |driver| {
        match driver.objects.nodes.get(&node).map(|n| n.work) {
            Some(Work::Free(freed)) => address.put(freed),
            _ => Err(Code::INVALID_VALUE),
        }
    }

    fn cuGraphAddNode(
        out: Out<Handle>, graph: Handle, _after: Opaque, _count: usize, params: Out<NodeParams>,
    ) |driver| {
        driver.add_any(out, graph, params)
    }

    fn cuGraphAddNode_v2(
        out: Out<Handle>, graph: Handle, _after: Opaque, _edges: Opaque, _count: usize, params: Out<NodeParams>,
    ) |driver| {
        driver.add_any(out, graph, params)
    }

    fn cuGraphAddNode_v3(
        out: Out<Handle>, graph: Handle, _after: Opaque, _edges: Opaque, _count: usize, params: Out<NodeParams>,
    ) |driver| {
        driver.add_any(out, graph, params)
    }

    fn cuGraphDestroyNode(node: Handle) |driver| {
        let gone = driver.objects.nodes.remove(&node).ok_or(Code::INVALID_VALUE)?;
        if let Some(nodes) = driver.objects.graphs.get_mut(&gone.graph) {
            nodes.retain(|n| *n != node);
        }
        Ok(())
    }

    fn cuGraphNodeGetType(node: Handle, kind: Out<c_uint>) |driver| {
        kind.put(driver.objects.nodes.get(&node).ok_or(Code::INVALID_VALUE)?.work.kind())
    }

    fn cuGraphGetNodes(graph: Handle, nodes: Out<Handle>, count: Out<usize>) |driver| {
        let known = driver.objects.graphs.get(&graph).ok_or(Code::INVALID_VALUE)?;
        let mut given = known.len();
        if !nodes.is_null() {
            given = given.min(count.get()?);
            for (place, node) in known.iter().take(given).enumerate() {
                nodes.put_at(place, *node)?;
            }
        }
        count.put(given)
    }

    fn cuGraphAddDependencies(graph: Handle, _from: Opaque, _to: Opaque, _count: usize) |driver| {
        driver.objects.graphs.get(&graph).map(|_| ()).ok_or(Code::INVALID_VALUE)
    }

    fn cuGraphAddDependencies_v2(graph: Handle, _from: Opaque, _to: Opaque, _edges: Opaque, _count: usize) |driver| {
        driver.objects.graphs.get(&graph).map(|_| ()).ok_or(Code::INVALID_VALUE)
    }
}
