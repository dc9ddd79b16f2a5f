//! The core's decisions at the size of a large cluster: 1,000 nodes of 8 cards.
//!
//! `cargo bench -p mullion-bench --bench core`

use std::hint::black_box;
use std::process::ExitCode;

use criterion::{BatchSize, Criterion, Throughput};
use mullion_core::facts::{
    AllocationFact, CardFact, CardMode, ContainerGrant, ContainerKind, DeviceGrant, Event, KubeNodeFact,
    NodeFact, PodRef,
};
use mullion_core::ledger::Ledger;
use mullion_core::placement::{Shape, fit};
use mullion_core::request::{ContainerRequest, ContainerWish, MemoryAsk, PodRequest, Policy};
use mullion_core::units::{AllocationUid, CoreShare, GpuUuid, Mib, NodeName, NodeUid, PodUid};

const NODES: u32 = 1000;
const CARDS: u32 = 8;
/// Slices on each card beforehand: half of what fits.
const SLICES: u32 = 5;
/// Memory of a slice: ten fill a card.
const SLICE: Mib = Mib(8000);
/// Memory of an H100 80GB as NVML reports it.
const CARD: Mib = Mib(81_559);

fn node_name(node: u32) -> NodeName {
    NodeName(format!("node-{node:04}"))
}

fn uuid(node: u32, card: u32) -> GpuUuid {
    GpuUuid(format!("GPU-{node:08x}-0000-4000-8000-{card:012x}"))
}

fn node_events(node: u32) -> [Event; 2] {
    let uid = NodeUid(format!("uid-of-{node}"));
    let card = |index| CardFact {
        uuid: uuid(node, index),
        index,
        model: "NVIDIA H100 80GB HBM3".to_owned(),
        memory: CARD,
        cores: 100,
        slots: 10,
        numa_node: Some(index / 4),
        healthy: true,
        cordoned: false,
        mode: CardMode::Shared,
    };
    let fact = NodeFact {
        name: node_name(node),
        node_uid: uid.clone(),
        observation: 1,
        cordoned: false,
        driver_ready: true,
        cards: (0..CARDS).map(card).collect(),
    };
    let kube = KubeNodeFact { name: node_name(node), uid, allocatable_slots: u64::from(CARDS) * 10 };
    [Event::NodeObserved(fact), Event::KubeNodeObserved(kube)]
}

fn allocation(node: u32, card: u32, number: u32) -> AllocationFact {
    let pod = format!("pod-{node}-{card}-{number}");
    let device = DeviceGrant { uuid: uuid(node, card), memory: SLICE, cores: CoreShare::BEST_EFFORT };
    AllocationFact {
        uid: AllocationUid(format!("allocation-of-{pod}")),
        name: pod.clone(),
        pod: PodRef { namespace: "default".to_owned(), name: pod.clone(), uid: PodUid(pod) },
        node: node_name(node),
        sequence: u64::from(number) + 1,
        created: 1_700_000_000,
        containers: vec![ContainerGrant {
            name: "main".to_owned(),
            kind: ContainerKind::App,
            devices: vec![device],
        }],
        prepared: true,
        init_done: false,
        released: false,
    }
}

/// 1,000 nodes, 8,000 cards, 40,000 allocations.
fn half_full() -> Ledger {
    let mut ledger = Ledger::default();
    for node in 0..NODES {
        for event in node_events(node) {
            ledger.apply(&event);
        }
        for card in 0..CARDS {
            for number in 0..SLICES {
                ledger.apply(&Event::AllocationObserved(allocation(node, card, number)));
            }
        }
    }
    ledger
}

fn request(containers: u32, count: u32, memory: Mib) -> PodRequest {
    let wish = |i| ContainerWish {
        name: format!("c{i}"),
        kind: ContainerKind::App,
        request: ContainerRequest { count, memory: MemoryAsk::Mib(memory), cores: CoreShare::BEST_EFFORT },
    };
    PodRequest {
        containers: (0..containers).map(wish).collect(),
        node_policy: Policy::Binpack,
        card_policy: Policy::Spread,
    }
}

/// What filter and prioritize do for one pod: every node is asked.
fn all_nodes(criterion: &mut Criterion, ledger: &Ledger) {
    let nodes: Vec<NodeName> = (0..NODES).map(node_name).collect();
    let mut group = criterion.benchmark_group("1,000 nodes of 8 cards");
    group.throughput(Throughput::Elements(u64::from(NODES)));
    for (case, request) in [
        ("one slice fits", request(1, 1, SLICE)),
        ("four containers of two cards fit", request(4, 2, SLICE)),
        ("refused: memory short everywhere", request(1, 1, Mib(60_000))),
        ("refused: more cards than there are", request(1, 9, SLICE)),
    ] {
        let shape = Shape::new(&request);
        group.bench_function(format!("check, {case}"), |bencher| {
            bencher.iter(|| nodes.iter().filter(|node| shape.check(black_box(ledger), node).is_ok()).count());
        });
        group.bench_function(format!("fit with cards or detail, {case}"), |bencher| {
            bencher.iter(|| nodes.iter().filter(|node| shape.fit(black_box(ledger), node).is_ok()).count());
        });
    }
    group.finish();
}

/// What bind does, and what watches bring.
fn one_node(criterion: &mut Criterion, ledger: &Ledger) {
    let mut group = criterion.benchmark_group("one pod");
    let (wish, node) = (request(1, 1, SLICE), node_name(500));
    group.bench_function("fit on its node", |bencher| bencher.iter(|| fit(black_box(&wish), ledger, &node)));
    let mut changing = ledger.clone();
    let fact = allocation(500, 3, SLICES);
    group.bench_function("allocation observed again", |bencher| {
        bencher.iter(|| changing.apply(black_box(&Event::AllocationObserved(allocation(500, 3, 0)))));
    });
    // A gone allocation never comes back, so each has a uid of its own.
    let mut number = 0_u32;
    group.bench_function("allocation held, observed, gone", |bencher| {
        bencher.iter_batched(
            || {
                number += 1;
                let uid = AllocationUid(format!("fresh-{number}"));
                AllocationFact { uid, ..fact.clone() }
            },
            |fact| {
                let uid = fact.uid.clone();
                changing.apply(&Event::Held(fact.clone()));
                changing.apply(&Event::AllocationObserved(fact));
                changing.apply(&Event::AllocationGone(uid));
            },
            BatchSize::SmallInput,
        );
    });
    group.finish();
    criterion
        .bench_function("replay of 1,000 nodes and 40,000 allocations", |bencher| bencher.iter(half_full));
}

fn main() -> ExitCode {
    let mut criterion = Criterion::default().sample_size(20).configure_from_args();
    let ledger = half_full();
    let found =
        (0..NODES).filter(|&node| fit(&request(1, 1, SLICE), &ledger, &node_name(node)).is_ok()).count();
    if found != NODES as usize {
        eprintln!("only {found} of {NODES} half full nodes take a slice: the figures would mean nothing");
        return ExitCode::FAILURE;
    }
    all_nodes(&mut criterion, &ledger);
    one_node(&mut criterion, &ledger);
    criterion.final_summary();
    ExitCode::SUCCESS
}
