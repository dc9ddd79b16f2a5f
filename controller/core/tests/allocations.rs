//! How often the hot paths ask the allocator for memory. Counts, unlike times, are the same on every machine and at
//! every load: this is the gate for the core's speed. About a third of the controller's CPU under load is the allocator.
//!
//! A count that falls is a reason to lower the bound here; one that rises, to look why.

mod common;

use allocation_counter::measure;
use common::{allocation, card, kube_fact, mib, node_fact, observed, one, place, wish};
use mullion_core::facts::{AllocationFact, CardFact, ContainerKind, Event};
use mullion_core::ledger::Ledger;
use mullion_core::placement::Shape;
use mullion_core::units::NodeName;

const NODES: u32 = 1000;
const CARDS: u32 = 8;

fn name(node: u32) -> String {
    format!("node-{node:04}")
}

/// 1,000 nodes of 8 cards, with one slice on each card.
fn cluster() -> Ledger {
    let mut ledger = Ledger::default();
    for node in 0..NODES {
        let fact = |index| CardFact { index, ..card(&format!("GPU-{node}-{index}"), 80_000) };
        ledger.apply(&Event::NodeObserved(node_fact(&name(node), (0..CARDS).map(fact).collect())));
        ledger.apply(&Event::KubeNodeObserved(kube_fact(&name(node), 80)));
        for slice in 0..CARDS {
            place(&mut ledger, &format!("{node}-{slice}"), &name(node), &one(1, mib(8000), 10));
        }
    }
    ledger
}

/// Allocations in `work`, of which there may be `most`.
fn bounded<T>(case: &str, most: u64, work: impl FnOnce() -> T) -> T {
    let mut result = None;
    let count = measure(|| result = Some(work())).count_total;
    assert!(count <= most, "{case}: {count} allocations, {most} before");
    // A bound that is far off guards nothing.
    assert!(count * 4 >= most * 3, "{case}: {count} allocations are left of {most}: lower the bound");
    // A bound that is far off guards nothing.

    let Some(result) = result else { unreachable!("it was measured") };
    result
}

#[test]
fn hot_paths_allocate_no_more_than_they_did() {
    let mut ledger = cluster();
    let nodes: Vec<NodeName> = (0..NODES).map(|node| name(node).as_str().into()).collect();
    let (slice, large, many) = (one(1, mib(8000), 10), one(1, mib(79_000), 10), one(9, mib(10), 0));
    let four =
        common::pod((0..4).map(|i| wish(&format!("c{i}"), ContainerKind::App, 2, mib(8000), 10)).collect());
    let shape = bounded("a request is made ready", 8, || Shape::new(&slice));
    for (case, request, fit, most) in [
        ("a slice fits", &slice, 1000, 7000),
        ("four containers of two cards fit", &four, 1000, 16_000),
        ("too large everywhere", &large, 0, 8000),
        ("more cards than there are", &many, 0, 10_000),
    ] {
        let shape = Shape::new(request);
        let fitting = bounded(&format!("filter over 1,000 nodes: {case}"), most, || {
            nodes.iter().filter(|node| shape.check(&ledger, node).is_ok()).count()
        });
        assert_eq!(fitting, fit, "{case}");
    }
    let placement = bounded("bind decides", 14, || shape.fit(&ledger, &nodes[500]).unwrap());
    let fact = allocation("fresh", &ledger, &name(500), &placement);
    let prepared = AllocationFact { prepared: true, ..fact.clone() };
    let seen = observed(&fact);
    for (case, event, most) in [
        ("a hold", Event::Held(fact.clone()), 22),
        ("its allocation", seen.clone(), 23),
        ("the same again", seen, 0),
        ("it is prepared", observed(&prepared), 22),
        ("its pod starts", Event::PodStarted { pod: fact.pod.uid.clone(), node: nodes[500].clone() }, 6),
        ("its pod ends", Event::PodEnded(fact.pod.uid.clone()), 2),
        ("it is gone", Event::AllocationGone(fact.uid.clone()), 5),
        ("a report that is known", Event::NodeObserved(ledger.node(&nodes[500]).unwrap().clone()), 1),
    ] {
        bounded(case, most, || ledger.apply(&event));
    }
}
