//! What the tests of the ledger and of placement share.
#![allow(dead_code, reason = "each test binary uses its part")]
#![expect(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

use std::collections::BTreeMap;

use mullion_core::facts::{
    AllocationFact, CardFact, CardMode, ContainerGrant, ContainerKind, DeviceGrant, Event, KubeNodeFact,
    NodeFact, PodRef,
};
use mullion_core::ledger::{Ledger, Standing, Unaccounted, Usage};
use mullion_core::placement::Placement;
use mullion_core::request::{ContainerRequest, ContainerWish, MemoryAsk, PodRequest, Policy};
use mullion_core::units::{AllocationUid, CoreShare, GpuUuid, Mib, NodeName, NodeUid, Percent, PodUid};
use proptest::prelude::ProptestConfig;
use proptest::test_runner::RngSeed;

/// `cases` from a fixed seed, so that a failure comes again; `PROPTEST_CASES` and `PROPTEST_RNG_SEED` override.
pub fn config(cases: u32) -> ProptestConfig {
    let mut config = ProptestConfig { failure_persistence: None, ..ProptestConfig::default() };
    if std::env::var_os("PROPTEST_CASES").is_none() {
        config.cases = cases;
    }
    if std::env::var_os("PROPTEST_RNG_SEED").is_none() {
        config.rng_seed = RngSeed::Fixed(0x6d75_6c6c_696f_6e00);
    }
    config
}

/// A healthy shared card: 100 percent of cores, 10 slots.
pub fn card(uuid: &str, memory: u64) -> CardFact {
    let digits: String = uuid.chars().filter(char::is_ascii_digit).collect();
    CardFact {
        uuid: uuid.into(),
        index: digits.parse().unwrap_or(0),
        model: "NVIDIA H100 80GB HBM3".to_owned(),
        memory: Mib(memory),
        cores: 100,
        slots: 10,
        numa_node: None,
        healthy: true,
        cordoned: false,
        mode: CardMode::Shared,
    }
}

/// `number` cards `GPU-0`, `GPU-1`, … of that size.
pub fn cards(number: u32, memory: u64) -> Vec<CardFact> {
    (0..number).map(|i| card(&format!("GPU-{i}"), memory)).collect()
}

pub fn node_fact(name: &str, cards: Vec<CardFact>) -> NodeFact {
    NodeFact {
        name: name.into(),
        node_uid: NodeUid(format!("{name}-uid")),
        observation: 1,
        cordoned: false,
        driver_ready: true,
        cards,
    }
}

pub fn kube_fact(name: &str, allocatable_slots: u64) -> KubeNodeFact {
    KubeNodeFact { name: name.into(), uid: NodeUid(format!("{name}-uid")), allocatable_slots }
}

/// A ledger with one node, every slot of whose cards the kubelet offers.
pub fn ledger(name: &str, cards: Vec<CardFact>) -> Ledger {
    let slots = cards.iter().map(|c| u64::from(c.slots)).sum();
    let mut ledger = Ledger::default();
    ledger.apply(&Event::NodeObserved(node_fact(name, cards)));
    ledger.apply(&Event::KubeNodeObserved(kube_fact(name, slots)));
    ledger
}

pub fn share(percent: u8) -> CoreShare {
    CoreShare::new(percent).unwrap()
}

pub fn mib(memory: u64) -> MemoryAsk {
    MemoryAsk::Mib(Mib(memory))
}

pub fn percent(percent: u8) -> MemoryAsk {
    MemoryAsk::Percent(Percent::new(percent).unwrap())
}

pub fn wish(name: &str, kind: ContainerKind, count: u32, memory: MemoryAsk, cores: u8) -> ContainerWish {
    ContainerWish {
        name: name.to_owned(),
        kind,
        request: ContainerRequest { count, memory, cores: share(cores) },
    }
}

/// A pod of one app container.
pub fn one(count: u32, memory: MemoryAsk, cores: u8) -> PodRequest {
    pod(vec![wish("main", ContainerKind::App, count, memory, cores)])
}

/// HAMi's default policies.
pub fn pod(containers: Vec<ContainerWish>) -> PodRequest {
    PodRequest { containers, node_policy: Policy::Binpack, card_policy: Policy::Spread }
}

/// An allocation of the pod `<uid>-pod` as a decider with `ledger`'s knowledge writes it.
pub fn allocation(uid: &str, ledger: &Ledger, node: &str, placement: &Placement) -> AllocationFact {
    let node = NodeName::from(node);
    AllocationFact { sequence: ledger.next_sequence(&node), node, ..granted(uid, &placement.containers) }
}

/// An allocation on `node-a` with sequence 1.
pub fn granted(uid: &str, containers: &[ContainerGrant]) -> AllocationFact {
    AllocationFact {
        uid: uid.into(),
        name: format!("{uid}-name"),
        pod: PodRef {
            namespace: "team-a".to_owned(),
            name: format!("{uid}-pod"),
            uid: PodUid(format!("{uid}-pod")),
        },
        node: "node-a".into(),
        sequence: 1,
        created: 0,
        containers: containers.to_vec(),
        prepared: false,
        init_done: false,
        released: false,
    }
}

pub fn grant(name: &str, kind: ContainerKind, devices: &[(&str, u64, u8)]) -> ContainerGrant {
    let device = |&(uuid, memory, percent): &(&str, u64, u8)| DeviceGrant {
        uuid: GpuUuid::from(uuid),
        memory: Mib(memory),
        cores: share(percent),
    };
    ContainerGrant { name: name.to_owned(), kind, devices: devices.iter().map(device).collect() }
}

/// An allocation of one app container on one card.
pub fn slice(uid: &str, card: &str, memory: u64, cores: u8) -> AllocationFact {
    granted(uid, &[grant("main", ContainerKind::App, &[(card, memory, cores)])])
}

pub fn observed(fact: &AllocationFact) -> Event {
    Event::AllocationObserved(fact.clone())
}

/// Fits and observes; panics when it does not fit.
pub fn place(ledger: &mut Ledger, uid: &str, node: &str, request: &PodRequest) -> AllocationFact {
    let placement = ledger.fit(request, &node.into()).unwrap();
    let fact = allocation(uid, ledger, node, &placement);
    ledger.apply(&observed(&fact));
    fact
}

/// The cards of one container of an allocation.
pub fn uuids(fact: &AllocationFact, container: &str) -> Vec<String> {
    let container = fact.containers.iter().find(|c| c.name == container).unwrap();
    container.devices.iter().map(|d| d.uuid.to_string()).collect()
}

/// Everything of a ledger that a decision can see.
#[derive(Debug, PartialEq)]
pub struct Snapshot {
    pub cards: BTreeMap<(NodeName, GpuUuid), Usage>,
    pub nodes: BTreeMap<NodeName, (u64, u64)>,
    pub standings: BTreeMap<AllocationUid, Option<Standing>>,
    pub facts: Vec<AllocationFact>,
    pub order: Vec<AllocationUid>,
    pub unaccounted: BTreeMap<NodeName, Vec<Unaccounted>>,
    pub unplaced: usize,
}

pub fn snapshot(ledger: &Ledger) -> Snapshot {
    let nodes: Vec<NodeName> = ledger.nodes().cloned().collect();
    let mut snapshot = Snapshot {
        cards: BTreeMap::new(),
        nodes: BTreeMap::new(),
        standings: ledger.allocations().map(|a| (a.uid.clone(), ledger.standing(&a.uid))).collect(),
        facts: ledger.allocations().cloned().collect(),
        order: Vec::new(),
        unaccounted: BTreeMap::new(),
        unplaced: ledger.unplaced(),
    };
    for node in nodes {
        for usage in ledger.card_usage(&node) {
            snapshot.cards.insert((node.clone(), usage.card.uuid), usage.used);
        }
        let unaccounted: Vec<_> = ledger.unaccounted(&node).cloned().collect();
        snapshot.unaccounted.insert(node.clone(), unaccounted);
        snapshot.order.extend(ledger.allocations_on(&node).map(|a| a.uid.clone()));
        snapshot.nodes.insert(node.clone(), (ledger.slots_used(&node), ledger.next_sequence(&node)));
    }
    snapshot
}
