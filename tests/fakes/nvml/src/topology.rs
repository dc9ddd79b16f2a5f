//! Where cards sit: NUMA nodes, bus and NVLink.
#![expect(unsafe_code, reason = "exports entry points under their C names")]

use std::ffi::{c_uint, c_ulong};

use fake_state::{Card, Link};
use nvml_wrapper_sys::bindings::nvmlPciInfo_t;

use crate::abi::Out;
use crate::code::Code;
use crate::device::pci_info;
use crate::entry;
use crate::handles::Handle;
use crate::session::Session;

/// `NVML_NVLINK_MAX_LINKS`.
const MAX_LINKS: u32 = 18;

/// `nvmlGpuTopologyLevel_t`: the same card, and where the platform cannot say.
const LEVEL_INTERNAL: u32 = 0;
const LEVEL_SYSTEM: u32 = 50;
/// Above a host bridge the chipset does not forward peer traffic in this simulation.
const LEVEL_NODE: u32 = 40;

/// `nvmlGpuP2PCapsIndex_t`: NVLink, and the first value that does not exist.
const P2P_NVLINK: u32 = 2;
const P2P_END: u32 = 5;
/// `nvmlGpuP2PStatus_t`.
const P2P_OK: u32 = 0;
const P2P_CHIPSET: u32 = 1;
const P2P_GPU: u32 = 2;
const P2P_NOT_SUPPORTED: u32 = 5;

/// `nvmlNvLinkCapability_t`: the first value that does not exist, and those that a bridge has
/// (peer to peer, peer atomics, valid).
const CAPABILITIES: u32 = 6;
const BRIDGE_CAPABILITIES: [u32; 3] = [0, 2, 5];

/// `nvmlNvlinkVersion_t` 3.0 and 4.0.
const NVLINK_AMPERE: u32 = 4;
const NVLINK_HOPPER: u32 = 6;
const HOPPER: u32 = 9;

entry! {
    // Answered only where the GPU's memory is a NUMA node of its own, which no card here is: the node near
    // a card is told by its memory affinity.
    fn nvmlDeviceGetNumaNodeId(device: Handle, _node: Out<c_uint>) |session| {
        session.gpu(device)?;
        Err(Code::NOT_SUPPORTED)
    }

    fn nvmlDeviceGetMemoryAffinity(
        device: Handle, size: c_uint, nodes: Out<c_ulong>, _scope: c_uint,
    ) |session| {
        let node = session.gpu(device)?.numa_node.ok_or(Code::NOT_SUPPORTED)?;
        let mut words = vec![0; node as usize / 64];
        words.push(1 << (node % 64));
        put_words(size, nodes, &words)
    }

    fn nvmlDeviceGetCpuAffinity(device: Handle, size: c_uint, cpus: Out<c_ulong>) |session| {
        put_words(size, cpus, &session.gpu(device)?.cpu_affinity)
    }

    fn nvmlDeviceGetCpuAffinityWithinScope(
        device: Handle, size: c_uint, cpus: Out<c_ulong>, _scope: c_uint,
    ) |session| {
        put_words(size, cpus, &session.gpu(device)?.cpu_affinity)
    }

    fn nvmlDeviceGetTopologyCommonAncestor(one: Handle, other: Handle, level: Out<c_uint>) |session| {
        let (one, other) = (session.gpu(one)?, session.gpu(other)?);
        let far = link(one, other).map_or(LEVEL_SYSTEM, |l| l.level);
        level.put(if one.uuid == other.uuid { LEVEL_INTERNAL } else { far })
    }

    fn nvmlDeviceGetP2PStatus(one: Handle, other: Handle, index: c_uint, status: Out<c_uint>) |session| {
        let (one, other) = (session.gpu(one)?, session.gpu(other)?);
        if index >= P2P_END || one.uuid == other.uuid {
            return Err(Code::INVALID_ARGUMENT);
        }
        let (nvlinks, level) = link(one, other).map_or((0, LEVEL_SYSTEM), |l| (l.nvlinks, l.level));
        status.put(match index {
            _ if one.mig.current || other.mig.current => P2P_GPU,
            P2P_NVLINK if nvlinks == 0 => P2P_NOT_SUPPORTED,
            _ if nvlinks > 0 || level < LEVEL_NODE => P2P_OK,
            _ => P2P_CHIPSET,
        })
    }

    fn nvmlDeviceGetNvLinkState(device: Handle, link: c_uint, active: Out<c_uint>) |session| {
        active.put(u32::from(peer(session, device, link)?.is_some()))
    }

    fn nvmlDeviceGetNvLinkVersion(device: Handle, link: c_uint, version: Out<c_uint>) |session| {
        peer(session, device, link)?;
        let hopper = session.gpu(device)?.architecture >= HOPPER;
        version.put(if hopper { NVLINK_HOPPER } else { NVLINK_AMPERE })
    }

    fn nvmlDeviceGetNvLinkCapability(
        device: Handle, link: c_uint, capability: c_uint, result: Out<c_uint>,
    ) |session| {
        if capability >= CAPABILITIES {
            return Err(Code::INVALID_ARGUMENT);
        }
        let active = peer(session, device, link)?.is_some();
        result.put(u32::from(active && BRIDGE_CAPABILITIES.contains(&capability)))
    }

    fn nvmlDeviceGetNvLinkRemotePciInfo_v2(device: Handle, link: c_uint, pci: Out<nvmlPciInfo_t>) |session| {
        pci.put(pci_info(peer(session, device, link)?.ok_or(Code::NOT_SUPPORTED)?))
    }
}

fn link<'a>(from: &'a Card, to: &Card) -> Option<&'a Link> {
    from.links.iter().find(|l| l.peer == to.uuid)
}

/// The card at the other end of an NVLink; none for a link that is down, as to a lost card.
fn peer(session: &Session, device: Handle, link: c_uint) -> Result<Option<&Card>, Code> {
    let card = session.gpu(device)?;
    if link >= MAX_LINKS {
        return Err(Code::INVALID_ARGUMENT);
    }
    if card.links.iter().all(|l| l.nvlinks == 0) {
        return Err(Code::NOT_SUPPORTED);
    }
    let mut before = 0;
    for way in &card.links {
        before += way.nvlinks.min(MAX_LINKS);
        if link < before {
            return Ok(session.card(&way.peer).ok());
        }
    }
    Ok(None)
}

/// Writes a mask into as many words as the caller has.
fn put_words(size: c_uint, target: Out<c_ulong>, words: &[u64]) -> Result<(), Code> {
    if size == 0 {
        return Err(Code::INVALID_ARGUMENT);
    }
    let mask: Vec<c_ulong> = (0..size as usize).map(|i| words.get(i).copied().unwrap_or(0)).collect();
    target.fill(&mask)
}
