//! Card models and the nodes made of them.

use crate::state::named_uuid;
use crate::{Card, Driver, Ecc, Error, Link, Mig, NodeState, Pci};

/// Most cards of one node.
const MAX_CARDS: usize = 16;

/// CPUs of one NUMA node.
const CPUS_PER_NUMA: u32 = 32;

/// Bus numbers of the first eight cards, as on common eight-card machines; the next eight sit in domain 1.
const BUSES: [&str; 8] = ["1B", "29", "43", "4E", "9D", "AB", "C3", "D1"];

/// `nvmlGpuTopologyLevel_t`: one `PCIe` switch, same NUMA node, other NUMA node.
const LEVEL_SINGLE: u32 = 10;
const LEVEL_NODE: u32 = 40;
const LEVEL_SYSTEM: u32 = 50;

/// Links between the two cards of a pair (the NVLink bridge of Hopper and Ampere cards).
const BRIDGE_LINKS: u32 = 12;

struct Model {
    profile: &'static str,
    name: &'static str,
    brand: u32,
    architecture: u32,
    compute: (i32, i32),
    device_id: u32,
    subsystem_id: u32,
    memory_mib: u64,
    reserved_mib: u64,
    sms: u32,
    cores: u32,
    table: &'static str,
    pairs: bool,
}

/// `NVML_BRAND_NVIDIA` and `NVML_BRAND_NVIDIA_RTX`.
const BRAND_NVIDIA: u32 = 14;
const BRAND_RTX: u32 = 13;

const fn data_centre(
    (profile, name, device_id): (&'static str, &'static str, u32),
    (memory_mib, reserved_mib): (u64, u64),
    (sms, cores): (u32, u32),
    (architecture, compute): (u32, (i32, i32)),
    table: &'static str,
) -> Model {
    let device_id = device_id << 16 | 0x10DE;
    let (brand, subsystem_id, pairs) = (BRAND_NVIDIA, 0x16C1_10DE, false);
    Model {
        profile,
        name,
        brand,
        architecture,
        compute,
        device_id,
        subsystem_id,
        memory_mib,
        reserved_mib,
        sms,
        cores,
        table,
        pairs,
    }
}

const AMPERE: (u32, (i32, i32)) = (7, (8, 0));
const HOPPER: (u32, (i32, i32)) = (9, (9, 0));
const BLACKWELL: (u32, (i32, i32)) = (10, (12, 0));

const MODELS: &[Model] = &[
    data_centre(("a100", "NVIDIA A100-PCIE-40GB", 0x20F1), (40960, 571), (108, 6912), AMPERE, "a100-40"),
    data_centre(("a100-80", "NVIDIA A100-SXM4-80GB", 0x20B2), (81920, 616), (108, 6912), AMPERE, "a100-80"),
    data_centre(("a100-sxm4", "NVIDIA A100-SXM4-40GB", 0x20B0), (40960, 571), (108, 6912), AMPERE, "a100-40"),
    data_centre(("a30", "NVIDIA A30", 0x20B7), (24576, 310), (56, 3584), AMPERE, "a30"),
    Model {
        pairs: true,
        ..data_centre(
            ("h100", "NVIDIA H100 80GB HBM3", 0x2330),
            (81559, 551),
            (132, 16896),
            HOPPER,
            "h100-80",
        )
    },
    data_centre(("h200", "NVIDIA H200", 0x2335), (143_771, 589), (132, 16896), HOPPER, "h200"),
    Model {
        brand: BRAND_RTX,
        ..data_centre(
            ("rtxpro6000", "NVIDIA RTX PRO 6000 Blackwell Server Edition", 0x2BB5),
            (97887, 636),
            (188, 24064),
            BLACKWELL,
            "rtxpro6000",
        )
    },
];

/// Names that [`node`] takes.
pub fn names() -> impl Iterator<Item = &'static str> {
    MODELS.iter().map(|m| m.profile)
}

/// A node with its cards: `h100x4` is four of the model, `a100x2+a30` two of one and one of another.
///
/// The cards are split over two NUMA nodes, first half and second half; cards 2k and 2k+1 share a `PCIe`
/// switch, and an NVLink bridge on `h100`. Uuids follow from the node's name and the card's index.
///
/// # Errors
/// [`Error::UnknownProfile`] for an unknown model, a count outside 1 to 16 or more than 16 in all.
pub fn node(profile: &str, node_name: &str) -> Result<NodeState, Error> {
    let refused = || Error::UnknownProfile {
        profile: profile.to_owned(),
        known: names().collect::<Vec<_>>().join(", "),
    };
    let mut models = Vec::new();
    for part in profile.split('+') {
        let (name, count) = match part.rsplit_once('x') {
            Some((name, digits)) if !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit()) => {
                (name, digits.parse::<usize>().map_err(|_| refused())?)
            }
            _ => (part, 1),
        };
        let model = MODELS.iter().find(|m| m.profile == name).ok_or_else(refused)?;
        if count == 0 || count + models.len() > MAX_CARDS {
            return Err(refused());
        }
        models.extend(std::iter::repeat_n(model, count));
    }
    let places: Vec<Place> = (0_u32..)
        .zip(&models)
        .map(|(index, model)| Place {
            uuid: format!("GPU-{}", named_uuid(&format!("{index}.{node_name}"))),
            index,
            numa: u32::from(index as usize * 2 >= models.len()),
            model,
        })
        .collect();
    Ok(NodeState {
        node: node_name.to_owned(),
        driver: Driver { version: "570.124.06".to_owned(), nvml: "12.570.124.06".to_owned(), cuda: 12080 },
        cards: places.iter().map(|p| card(p, &places)).collect(),
        next_event: 1,
        events: vec![],
        errors: [].into(),
        latencies: [].into(),
        calls: [].into(),
    })
}

struct Place<'a> {
    uuid: String,
    index: u32,
    numa: u32,
    model: &'a Model,
}

fn card(place: &Place<'_>, all: &[Place<'_>]) -> Card {
    let model = place.model;
    let (domain, bus) = (place.index as usize / BUSES.len(), BUSES[place.index as usize % BUSES.len()]);
    let first = place.numa * CPUS_PER_NUMA;
    Card {
        uuid: place.uuid.clone(),
        index: place.index,
        minor: place.index,
        model: model.name.to_owned(),
        brand: model.brand,
        architecture: model.architecture,
        compute: model.compute,
        pci: Pci {
            bus_id: format!("{domain:08X}:{bus}:00.0"),
            device_id: model.device_id,
            subsystem_id: model.subsystem_id,
        },
        memory_mib: model.memory_mib,
        reserved_mib: model.reserved_mib,
        sms: model.sms,
        cores: model.cores,
        numa_node: Some(place.numa),
        cpu_affinity: vec![((1_u64 << CPUS_PER_NUMA) - 1) << first],
        links: all.iter().filter(|p| p.index != place.index).map(|p| link(place, p)).collect(),
        ecc: Ecc { current: true, pending: true, ..Ecc::default() },
        mig: Mig {
            capable: true,
            current: false,
            pending: false,
            table: model.table.to_owned(),
            last_id: 0,
            instances: vec![],
        },
        processes: vec![],
        memory_utilization: 0,
        temperature_c: 34,
        power_mw: 62_000,
        lost: false,
        present: true,
    }
}

fn link(from: &Place<'_>, to: &Place<'_>) -> Link {
    let pair = from.index / 2 == to.index / 2 && from.numa == to.numa;
    let bridged = pair && from.model.pairs && to.model.pairs;
    let level = match (pair, from.numa == to.numa) {
        (true, _) => LEVEL_SINGLE,
        (false, true) => LEVEL_NODE,
        (false, false) => LEVEL_SYSTEM,
    };
    Link { peer: to.uuid.clone(), nvlinks: if bridged { BRIDGE_LINKS } else { 0 }, level }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn profiles_give_the_cards_asked_for() {
        for (profile, want) in [
            ("h100x4", Some(vec!["NVIDIA H100 80GB HBM3"; 4])),
            ("a100x2", Some(vec!["NVIDIA A100-PCIE-40GB"; 2])),
            ("a100-80", Some(vec!["NVIDIA A100-SXM4-80GB"])),
            ("rtxpro6000", Some(vec!["NVIDIA RTX PRO 6000 Blackwell Server Edition"])),
            ("rtxpro6000x2", Some(vec!["NVIDIA RTX PRO 6000 Blackwell Server Edition"; 2])),
            ("a30x1+h200", Some(vec!["NVIDIA A30", "NVIDIA H200"])),
            ("h100x0", None),
            ("h100x17", None),
            ("h100x16+a30", None),
            ("h100x99999999999999999999", None),
            ("h100x", None),
            ("b200x2", None),
            ("", None),
        ] {
            let got = node(profile, "n").ok();
            let got = got.as_ref().map(|n| n.cards.iter().map(|c| c.model.as_str()).collect::<Vec<_>>());
            assert_eq!(got, want, "{profile}");
        }
    }

    #[test]
    fn identities_are_fixed_by_node_and_index_and_differ() {
        let (a, again, b) = (node("h100x16", "a"), node("h100x16", "a"), node("h100x16", "b"));
        let (a, b) = (a.unwrap(), b.unwrap());
        assert_eq!(a, again.unwrap());
        let uuids: BTreeSet<_> = a.cards.iter().chain(&b.cards).map(|c| &c.uuid).collect();
        assert_eq!(uuids.len(), 32);
        assert!(uuids.iter().all(|u| u.len() == 40 && u.starts_with("GPU-")));
        let buses: BTreeSet<_> = a.cards.iter().map(|c| &c.pci.bus_id).collect();
        assert_eq!(buses.len(), 16);
        assert_eq!(a.cards[0].pci.bus_id, "00000000:1B:00.0");
        assert_eq!(a.cards[0].pci.device_id, 0x2330_10DE);
    }

    #[test]
    fn four_cards_sit_on_two_numa_nodes_in_bridged_pairs() {
        let node = node("h100x4", "node-a").unwrap();
        let numa: Vec<_> = node.cards.iter().map(|c| c.numa_node).collect();
        assert_eq!(numa, [Some(0), Some(0), Some(1), Some(1)]);
        assert_eq!(node.cards[0].cpu_affinity, [0xFFFF_FFFF]);
        assert_eq!(node.cards[3].cpu_affinity, [0xFFFF_FFFF_0000_0000]);
        for (from, links) in [(0, [(12, 10), (0, 50), (0, 50)]), (3, [(0, 50), (0, 50), (12, 10)])] {
            let got: Vec<_> = node.cards[from].links.iter().map(|l| (l.nvlinks, l.level)).collect();
            assert_eq!(got, links, "card {from}");
        }
    }
}
