//! Who is woken.

use mullion_core::facts::Event;

use super::*;
use crate::fixtures::{card, kube_node, node, request};

fn ledger(cards: &[(&str, u64)]) -> Ledger {
    let mut ledger = Ledger::default();
    for (name, memory) in cards {
        ledger.apply(&Event::NodeObserved(node(name, vec![card(&format!("GPU-{name}"), *memory)])));
        ledger.apply(&Event::KubeNodeObserved(kube_node(name, 10)));
    }
    ledger
}

fn pods(names: &[&str]) -> Vec<PodRef> {
    let pod = |name: &&str| PodRef { namespace: "ns".into(), name: (*name).into(), uid: (*name).into() };
    names.iter().map(pod).collect()
}

fn names(woken: &[PodRef]) -> Vec<&str> {
    woken.iter().map(|pod| pod.name.as_str()).collect()
}

/// When a node gains, and when it has lingered.
fn times() -> (Instant, Instant) {
    let start = Instant::now();
    (start, start + LINGER)
}

// FS-10: one freed slot wakes one pod, not all of them, and the next only if that one does not take it.
#[test]
fn one_slot_wakes_one_pod() {
    let (ledger, small, large) = (ledger(&[("n", 1000), ("m", 1000)]), request(600), request(2000));
    let pods = pods(&["large", "a", "b", "c"]);
    let waiting: Vec<_> = pods.iter().zip([&large, &small, &small, &small]).collect();
    let (start, late) = times();
    let mut gains = Gains::default();
    gains.add(BTreeSet::from(["n".into()]), start);
    assert_eq!(names(&gains.round(&ledger, &waiting, late)), ["a"], "only the gained node counts");
    assert_eq!(names(&gains.round(&ledger, &waiting, late)), ["b"], "a had its chance");
    assert_eq!(names(&gains.round(&ledger, &waiting, late)), ["c"]);
    assert!(!gains.is_empty());
    assert!(gains.round(&ledger, &waiting, late).is_empty());
    assert!(gains.is_empty(), "nobody new fits: no idle writes");
    gains.add(BTreeSet::from(["n".into(), "m".into()]), late);
    assert_eq!(
        names(&gains.round(&ledger, &waiting, late)),
        ["a", "b"],
        "a new gain, a new chance, one pod per slot"
    );
}

#[test]
fn nobody_waits_nothing_is_kept() {
    let ledger = ledger(&[("n", 1000)]);
    let (start, late) = times();
    let mut gains = Gains::default();
    gains.add(BTreeSet::from(["n".into()]), start);
    assert!(gains.round(&ledger, &[], late).is_empty());
    assert!(gains.is_empty());
}

// FS-10: kube-scheduler's word that a pod was refused may reach us after the gain.
#[test]
fn a_pod_that_shows_late_is_woken_too() {
    let (ledger, request) = (ledger(&[("n", 1000)]), request(600));
    let (start, late) = times();
    let mut gains = Gains::default();
    gains.add(BTreeSet::from(["n".into()]), start);
    assert!(gains.round(&ledger, &[], start).is_empty());
    assert!(!gains.is_empty());
    let pods = pods(&["a"]);
    assert_eq!(names(&gains.round(&ledger, &[(&pods[0], &request)], start)), ["a"]);
    assert!(gains.round(&ledger, &[], late).is_empty() && gains.is_empty());
}

#[test]
fn a_round_is_bounded_and_goes_on() {
    let mut ledger = ledger(&[]);
    let cards: Vec<_> = (0..64)
        .map(|index| mullion_core::facts::CardFact {
            index,
            slots: 100,
            ..card(&format!("GPU-{index}"), 100_000)
        })
        .collect();
    ledger.apply(&Event::NodeObserved(node("n", cards)));
    ledger.apply(&Event::KubeNodeObserved(kube_node("n", 6400)));
    let all: Vec<String> = (0..150).map(|number| format!("p{number:03}")).collect();
    let pods = pods(&all.iter().map(String::as_str).collect::<Vec<_>>());
    let request = request(1);
    let waiting: Vec<_> = pods.iter().map(|pod| (pod, &request)).collect();
    let (start, late) = times();
    let mut gains = Gains::default();
    gains.add(BTreeSet::from(["n".into()]), start);
    assert_eq!(gains.round(&ledger, &waiting, late).len(), MOST);
    assert_eq!(gains.round(&ledger, &waiting, late).len(), 50);
    assert!(gains.round(&ledger, &waiting, late).is_empty() && gains.is_empty());
}
