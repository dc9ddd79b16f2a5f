//! Reads a node's cards through NVML, without `unsafe`.

use std::collections::BTreeMap;

use mullion_crds::gpunode::{Card, CardMig, Link, MigEngines, MigProfile, MigTable};
use nvml_wrapper::enum_wrappers::device::TopologyLevel;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};
use sha2::{Digest, Sha256};

use crate::nvml::{SeenCard, Survey, Trouble, sys};

/// Highest number of `NVLink` lanes of a card (`NVML_NVLINK_MAX_LINKS`).
const MOST_LINKS: u32 = 18;
/// `NVML_AFFINITY_SCOPE_NODE`.
const SCOPE_NODE: u32 = 0;
/// Values of `NVML_GPU_INSTANCE_PROFILE_*` to ask for; unknown ones are answered with "not supported".
const PROFILES: std::ops::Range<u32> = 0..32;

/// What does not change while a card is up: read once per card and driver.
#[derive(Debug, Default)]
pub struct Cache {
    fixed: BTreeMap<String, Fixed>,
}

#[derive(Clone, Debug)]
struct Fixed {
    card: Card,
    table: Option<MigTable>,
    /// MIG mode when it was read: the driver lists other profiles with another mode.
    mig: Option<(bool, bool)>,
    /// Cards that were seen with it: links depend on them.
    beside: usize,
}

/// Reads all cards.
///
/// # Errors
/// [`Trouble`] when the driver as a whole does not answer; a single card's trouble is part of the survey.
pub fn survey(nvml: &Nvml, cache: &mut Cache) -> Result<Survey, Trouble> {
    let whole = |call| move |error: NvmlError| Trouble::new(call, &error);
    let driver_version = nvml.sys_driver_version().map_err(whole("nvmlSystemGetDriverVersion"))?;
    let count = nvml.device_count().map_err(whole("nvmlDeviceGetCount_v2"))?;
    let mut found = Survey { driver_version, ..Survey::default() };
    for index in 0..count {
        match seen(nvml, index, count, cache) {
            Ok(card) => found.cards.push(card),
            Err(trouble) => found.nameless.push(trouble),
        }
    }
    link(nvml, &mut found, cache);
    Ok(found)
}

fn seen(nvml: &Nvml, index: u32, count: u32, cache: &mut Cache) -> Result<SeenCard, Trouble> {
    let device =
        nvml.device_by_index(index).map_err(|e| Trouble::new("nvmlDeviceGetHandleByIndex_v2", &e))?;
    let uuid = device.uuid().map_err(|e| Trouble::new("nvmlDeviceGetUUID", &e))?;
    let mode = match device.mig_mode() {
        Ok(mode) => Some((mode.current != 0, mode.pending != 0)),
        Err(_) => None,
    };
    let known = cache.fixed.get(&uuid).filter(|f| f.mig == mode && f.card.index == index);
    let fixed = match known {
        Some(fixed) => fixed.clone(),
        None => read(&device, index, &uuid, mode).map_err(|e| Trouble::new(e.0, &e.1))?,
    };
    let beside = count as usize;
    let mut card = fixed.card.clone();
    card.links = if fixed.beside == beside { card.links } else { Vec::new() };
    // Asks the card itself, not the driver's memory: a card that fell off the bus answers here.
    let trouble = device.memory_info().err().map(|e| Trouble::new("nvmlDeviceGetMemoryInfo_v2", &e));
    let seen = SeenCard { card, table: fixed.table.clone(), trouble };
    cache.fixed.insert(uuid, Fixed { mig: mode, ..fixed });
    Ok(seen)
}

type Failed = (&'static str, NvmlError);

fn read(device: &Device<'_>, index: u32, uuid: &str, mode: Option<(bool, bool)>) -> Result<Fixed, Failed> {
    let table = mode.and_then(|_| table(device));
    let named = |call: &'static str| move |e: NvmlError| (call, e);
    let pci = device.pci_info().map_err(named("nvmlDeviceGetPciInfo_v3"))?;
    let memory = device.memory_info().map_err(named("nvmlDeviceGetMemoryInfo_v2"))?;
    let widest = table.as_ref().and_then(|t| t.profiles.iter().map(|p| p.sms).max());
    let card = Card {
        uuid: uuid.to_owned(),
        index,
        minor: device.minor_number().map_err(named("nvmlDeviceGetMinorNumber"))?,
        model: device.name().map_err(named("nvmlDeviceGetName"))?,
        vendor: "nvidia".to_owned(),
        architecture: device
            .architecture()
            .map_or_else(|_| "unknown".to_owned(), |a| format!("{a:?}").to_lowercase()),
        memory_mib: i64::try_from(memory.total >> 20).unwrap_or(i64::MAX),
        sms: sms(device).or(widest),
        numa_node: numa_node(device, &pci.bus_id),
        pci_address: pci_address(&pci.bus_id),
        mig: mode.map(|(current, pending)| CardMig {
            current,
            pending,
            table: table.as_ref().map(|t| t.hash.clone()),
            instances: Vec::new(),
        }),
        ..Card::default()
    };
    Ok(Fixed { card, table, mig: mode, beside: 0 })
}

/// Streaming multiprocessors. NVML has no call for a whole card's: its cores by the cores that one has, which go by
/// compute capability (CUDA programming guide, table of compute capabilities).
fn sms(device: &Device<'_>) -> Option<u32> {
    let capability = device.cuda_compute_capability().ok()?;
    let per_sm = match (capability.major, capability.minor) {
        (3, _) => 192,
        (6 | 8, 0) | (7, _) => 64,
        (5..=12, _) => 128,
        _ => return None,
    };
    device.num_cores().ok().map(|cores| cores / per_sm).filter(|n| *n > 0)
}

/// The card's NUMA node: NVML's word, else the kernel's.
fn numa_node(device: &Device<'_>, bus_id: &str) -> Option<u32> {
    let mask = device.memory_affinity(4, SCOPE_NODE).ok();
    let nodes = mask.into_iter().flatten().enumerate().filter(|(_, word)| *word != 0);
    let first =
        nodes.map(|(place, word)| u32::try_from(place).unwrap_or(0) * 64 + word.trailing_zeros()).next();
    first.or_else(|| {
        let path = format!("/sys/bus/pci/devices/{}/numa_node", pci_address(bus_id));
        std::fs::read_to_string(path).ok()?.trim().parse().ok()
    })
}

/// NVML's `00000000:1B:00.0` as the kernel spells it, `0000:1b:00.0`.
fn pci_address(bus_id: &str) -> String {
    let lower = bus_id.to_lowercase();
    match lower.split_once(':') {
        Some((domain, rest)) if domain.len() == 8 && domain.starts_with("0000") => {
            format!("{}:{rest}", domain.get(4..).unwrap_or(domain))
        }
        _ => lower,
    }
}

/// The card's GPU instance profiles; `None` where the driver lists none (drivers around 535 do so with MIG off).
fn table(device: &Device<'_>) -> Option<MigTable> {
    let profiles = PROFILES.filter_map(|value| Some(row(value, &sys::profile(device, value).ok()?)));
    let profiles: Vec<MigProfile> = profiles.collect();
    let width = profiles.iter().flat_map(|p| p.starts.iter().map(|s| s + p.size)).max()?;
    let mut table = MigTable { hash: String::new(), width, profiles };
    let text = serde_json::to_vec(&table).unwrap_or_default();
    table.hash = hex::encode(Sha256::digest(text).get(..8).unwrap_or_default());
    Some(table)
}

fn row(value: u32, profile: &sys::Profile) -> MigProfile {
    let info = &profile.info;
    let size = profile.placements.first().map_or(info.slices, |p| p.1);
    let mut starts: Vec<u32> = profile.placements.iter().map(|p| p.0).collect();
    starts.sort_unstable();
    MigProfile {
        gi_profile_id: info.id,
        gi_enum: value,
        ci_profile_id: None,
        name: info.name.strip_prefix("MIG ").unwrap_or(&info.name).to_owned(),
        memory_mib: i64::try_from(info.memory_mib).unwrap_or(i64::MAX),
        sms: info.sms,
        size,
        starts,
        max_count: info.instances,
        engines: MigEngines { copy: info.copy, dec: info.dec, enc: info.enc, jpeg: info.jpeg, ofa: info.ofa },
        flags: flag(value).map(str::to_owned).into_iter().collect(),
    }
}

/// What is special about a profile, by NVML's enum (`NVML_GPU_INSTANCE_PROFILE_*` of nvml.h).
const fn flag(value: u32) -> Option<&'static str> {
    match value {
        7 | 8 => Some("me"),
        9 => Some("double"),
        10..=12 | 17 => Some("gfx"),
        13 | 14 => Some("noMe"),
        15 | 16 => Some("meAll"),
        _ => None,
    }
}

/// Reads the links of cards that have none yet, once per set of cards.
fn link(nvml: &Nvml, found: &mut Survey, cache: &mut Cache) {
    let count = found.cards.len();
    let peers: Vec<(String, u32, String)> =
        found.cards.iter().map(|s| (s.card.uuid.clone(), s.card.index, s.card.pci_address.clone())).collect();
    for seen in &mut found.cards {
        let Some(fixed) = cache.fixed.get_mut(&seen.card.uuid) else { continue };
        if fixed.beside != count {
            let Ok(device) = nvml.device_by_index(seen.card.index) else { continue };
            let others = peers.iter().filter(|p| p.0 != seen.card.uuid);
            fixed.card.links = links(nvml, &device, others);
            fixed.beside = count;
        }
        seen.card.links.clone_from(&fixed.card.links);
    }
}

fn links<'a>(
    nvml: &Nvml,
    device: &Device<'_>,
    others: impl Iterator<Item = &'a (String, u32, String)>,
) -> Vec<Link> {
    let mut lanes: BTreeMap<String, u32> = BTreeMap::new();
    for number in 0..MOST_LINKS {
        let lane = device.link_wrapper_for(number);
        match lane.is_active() {
            Ok(true) => {}
            Ok(false) => continue,
            Err(_) => break,
        }
        if let Ok(remote) = lane.remote_pci_info() {
            *lanes.entry(pci_address(&remote.bus_id)).or_default() += 1;
        }
    }
    let link = |(uuid, index, address): &(String, u32, String)| {
        let kind = match lanes.get(address) {
            Some(count) => format!("NVLink{count}"),
            None => {
                level(device.topology_common_ancestor(nvml.device_by_index(*index).ok()?).ok()?).to_owned()
            }
        };
        Some(Link { peer: uuid.clone(), kind })
    };
    let mut links: Vec<Link> = others.filter_map(link).collect();
    links.sort_by(|a, b| a.peer.cmp(&b.peer));
    links
}

const fn level(level: TopologyLevel) -> &'static str {
    match level {
        TopologyLevel::Internal => "SameBoard",
        TopologyLevel::Single => "SingleSwitch",
        TopologyLevel::Multiple => "MultiSwitch",
        TopologyLevel::HostBridge => "HostBridge",
        TopologyLevel::Node => "SameNode",
        TopologyLevel::System => "System",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_spelled_as_the_kernel_does() {
        for (nvml, want) in [
            ("00000000:1B:00.0", "0000:1b:00.0"),
            ("0000:1B:00.0", "0000:1b:00.0"),
            ("00010000:00:1E.0", "00010000:00:1e.0"),
            ("", ""),
        ] {
            assert_eq!(pci_address(nvml), want);
        }
    }
}
