//! What holds cards without our knowing which: allocations that cannot be read, and pods that run without theirs. The
//! node takes nothing new, and only as long as that is so.

mod common;

use std::collections::{BTreeMap, BTreeSet};

use common::{cards, config, kube_fact, ledger, mib, node_fact, observed, one, slice, snapshot};
use mullion_core::facts::{AllocationFact, Event};
use mullion_core::ledger::{Ledger, Unaccounted};
use mullion_core::refusal::Code;
use mullion_core::units::{AllocationUid, NodeName, PodUid};
use proptest::prelude::*;

const NODES: [&str; 2] = ["node-a", "node-b"];

fn verdict(ledger: &Ledger, node: &str) -> &'static str {
    let (request, node) = (one(1, mib(10), 0), node.into());
    let shape = mullion_core::placement::Shape::new(&request);
    let checked = shape.check(ledger, &node).err();
    let refused = ledger.fit(&request, &node).err();
    assert_eq!(checked, refused.as_ref().map(|refusal| refusal.code));
    refused.map_or("fits", |refusal| refusal.code())
}

fn two_nodes() -> Ledger {
    let mut ledger = ledger(NODES[0], cards(2, 10_000));
    ledger.apply(&Event::NodeObserved(node_fact(NODES[1], cards(2, 10_000))));
    ledger.apply(&Event::KubeNodeObserved(kube_fact(NODES[1], 20)));
    ledger
}

fn unreadable(uid: &str, node: Option<&str>) -> Event {
    Event::AllocationUnreadable { uid: uid.into(), node: node.map(Into::into) }
}

fn started(pod: &str, node: &str) -> Event {
    Event::PodStarted { pod: pod.into(), node: node.into() }
}

#[test]
fn an_allocation_that_cannot_be_read_closes_its_node() {
    const CLOSED: &str = "HoldingsUnknown";
    for (case, events, a, b) in [
        ("on one node", vec![unreadable("x", Some("node-a"))], CLOSED, "fits"),
        ("nobody knows where", vec![unreadable("x", None)], CLOSED, CLOSED),
        (
            "gone again",
            vec![unreadable("x", Some("node-a")), Event::AllocationGone("x".into())],
            "fits",
            "fits",
        ),
        ("gone before", vec![Event::AllocationGone("x".into()), unreadable("x", None)], "fits", "fits"),
        ("read since", vec![unreadable("x", None), observed(&slice("x", "GPU-0", 10, 0))], "fits", "fits"),
        ("read before", vec![observed(&slice("x", "GPU-0", 10, 0)), unreadable("x", None)], "fits", "fits"),
        (
            "its node became readable",
            vec![unreadable("x", None), unreadable("x", Some("node-b"))],
            "fits",
            CLOSED,
        ),
        (
            "one of two is gone",
            vec![unreadable("x", None), unreadable("y", None), Event::AllocationGone("x".into())],
            CLOSED,
            CLOSED,
        ),
    ] {
        let mut ledger = two_nodes();
        for event in &events {
            let generations = NODES.map(|node| ledger.node_generation(&node.into()));
            let before = NODES.map(|node| verdict(&ledger, node));
            ledger.apply(event);
            assert!(!ledger.apply(event), "{case}: told twice");
            for (at, node) in NODES.into_iter().enumerate() {
                // Verdicts are remembered by generation.
                let same = ledger.node_generation(&node.into()) == generations[at];
                assert!(!same || verdict(&ledger, node) == before[at], "{case}: {node}");
            }
        }
        assert_eq!((verdict(&ledger, "node-a"), verdict(&ledger, "node-b")), (a, b), "{case}");
    }
    assert!(Code::HoldingsUnknown.unresolvable());
}

#[test]
fn a_pod_that_runs_without_its_allocation_closes_its_node_until_it_ends() {
    let own = AllocationFact { prepared: true, ..slice("a", "GPU-0", 4000, 0) };
    let mut ledger = two_nodes();
    ledger.apply(&started("a-pod", "node-a"));
    assert_eq!(verdict(&ledger, "node-a"), "HoldingsUnknown");
    ledger.apply(&observed(&own));
    assert_eq!(verdict(&ledger, "node-a"), "fits", "it has its allocation");
    // Somebody takes the finalizer off and deletes it.
    ledger.apply(&Event::AllocationGone("a".into()));
    assert_eq!(verdict(&ledger, "node-a"), "HoldingsUnknown");
    assert_eq!(verdict(&ledger, "node-b"), "fits");
    let elsewhere = AllocationFact { node: "node-b".into(), ..slice("b", "GPU-0", 10, 0) };
    ledger.apply(&observed(&AllocationFact { pod: own.pod.clone(), ..elsewhere }));
    assert_eq!(
        verdict(&ledger, "node-a"),
        "HoldingsUnknown",
        "one on another node says nothing about this one"
    );
    let unaccounted: Vec<_> = ledger.unaccounted(&"node-a".into()).cloned().collect();
    assert_eq!(unaccounted, [Unaccounted::Pod("a-pod".into())]);
    ledger.apply(&Event::PodEnded("a-pod".into()));
    assert_eq!(verdict(&ledger, "node-a"), "fits");
}

#[derive(Clone, Debug)]
enum Step {
    Observed { allocation: usize, prepared: bool },
    Unreadable { allocation: usize, node: Option<usize> },
    Gone { allocation: usize },
    Started { pod: usize },
    Ended { pod: usize },
}

/// Allocation `n` is of pod `n % 3`, on node `n % 2`; pod `p` starts on node `p % 2`.
fn event(step: &Step) -> Event {
    let uid = |n: usize| AllocationUid::from(format!("{n}"));
    let pod = |p: usize| PodUid::from(format!("pod-{p}"));
    match step {
        Step::Observed { allocation: n, prepared } => {
            let mut fact = slice(&n.to_string(), &format!("GPU-{}", n % 2), 10, 0);
            (fact.pod.uid, fact.node, fact.prepared) = (pod(n % 3), NODES[n % 2].into(), *prepared);
            Event::AllocationObserved(fact)
        }
        Step::Unreadable { allocation, node } => {
            Event::AllocationUnreadable { uid: uid(*allocation), node: node.map(|n| NODES[n].into()) }
        }
        Step::Gone { allocation } => Event::AllocationGone(uid(*allocation)),
        Step::Started { pod: p } => Event::PodStarted { pod: pod(*p), node: NODES[p % 2].into() },
        Step::Ended { pod: p } => Event::PodEnded(pod(*p)),
    }
}

fn steps() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => (0..6_usize, any::<bool>()).prop_map(|(allocation, prepared)| Step::Observed { allocation, prepared }),
        // One object says the same of its node always.
        1 => (0..6_usize).prop_map(|n| Step::Unreadable { allocation: n, node: (n != 5).then_some(n % 2) }),
        1 => (0..6_usize).prop_map(|allocation| Step::Gone { allocation }),
        2 => (0..3_usize).prop_map(|pod| Step::Started { pod }),
        1 => (0..3_usize).prop_map(|pod| Step::Ended { pod }),
    ]
}

/// What must be unaccounted after `steps`, from the steps alone.
fn wanted(steps: &[Step]) -> (BTreeSet<(NodeName, Unaccounted)>, usize) {
    let (mut seen, mut unread, mut gone) = (BTreeSet::new(), BTreeMap::new(), BTreeSet::new());
    let mut running = BTreeSet::new();
    for step in steps {
        match step {
            Step::Observed { allocation, .. } => drop(seen.insert(*allocation)),
            Step::Unreadable { allocation, node } => drop(unread.insert(*allocation, *node)),
            Step::Gone { allocation } => drop(gone.insert(*allocation)),
            Step::Started { pod } => drop(running.insert(*pod)),
            Step::Ended { pod } => drop(running.remove(pod)),
        }
    }
    let mut all = BTreeSet::new();
    let mut nowhere = 0;
    for (n, node) in unread.iter().filter(|(n, _)| !seen.contains(*n) && !gone.contains(*n)) {
        match node {
            Some(node) => {
                all.insert((NODES[*node].into(), Unaccounted::Allocation(n.to_string().as_str().into())));
            }
            None => nowhere += 1,
        }
    }
    for p in running {
        let mut own = seen.difference(&gone).filter(|n| *n % 3 == p && *n % 2 == p % 2);
        if own.next().is_none() {
            all.insert((NODES[p % 2].into(), Unaccounted::Pod(format!("pod-{p}").as_str().into())));
        }
    }
    (all, nowhere)
}

proptest! {
    #![proptest_config(config(2000))]

    #[test]
    fn closed_exactly_as_long_as_something_is_unaccounted(
        steps in prop::collection::vec(steps(), 1..40),
        keys in prop::collection::vec(any::<usize>(), 1..8),
    ) {
        let mut ledger = two_nodes();
        for (at, step) in steps.iter().enumerate() {
            ledger.apply(&event(step));
            let (all, nowhere) = wanted(&steps[..=at]);
            prop_assert_eq!(ledger.unplaced(), nowhere);
            for node in NODES.map(NodeName::from) {
                let here: Vec<_> = all.iter().filter(|(n, _)| *n == node).map(|(_, what)| what).collect();
                prop_assert_eq!(ledger.unaccounted(&node).collect::<Vec<_>>(), here.clone());
                let closed = nowhere > 0 || !here.is_empty();
                prop_assert_eq!(verdict(&ledger, node.as_str()) == "HoldingsUnknown", closed);
            }
        }
        // In another order: what is said of one pod keeps its own, allocations need none.
        let mut lanes: BTreeMap<usize, std::collections::VecDeque<&Step>> = BTreeMap::new();
        for (at, step) in steps.iter().enumerate() {
            let lane = match step {
                Step::Started { pod } | Step::Ended { pod } => *pod,
                _ => 10 + at,
            };
            lanes.entry(lane).or_default().push_back(step);
        }
        let mut mixed = two_nodes();
        let mut turn = 0_usize;
        while !lanes.is_empty() {
            let pick = keys[turn % keys.len()].wrapping_mul(turn | 1) % lanes.len();
            let Some(lane) = lanes.keys().nth(pick).copied() else { break };
            if let Some(step) = lanes.get_mut(&lane).and_then(std::collections::VecDeque::pop_front) {
                mixed.apply(&event(step));
            }
            lanes.retain(|_, steps| !steps.is_empty());
            turn += 1;
        }
        prop_assert_eq!(snapshot(&mixed), snapshot(&ledger));
    }
}
