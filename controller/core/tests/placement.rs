//! Where pods go and why not, rule by rule.

mod common;

use common::{
    card, cards, kube_fact, ledger, mib, node_fact, observed, one, percent, place, pod, slice, uuids, wish,
};
use mullion_core::facts::{AllocationFact, CardFact, CardMode, ContainerKind, Event, KubeNodeFact, NodeFact};
use mullion_core::ledger::{Ledger, Standing};
use mullion_core::placement::Shape;
use mullion_core::refusal::Code;
use mullion_core::request::{PodRequest, Policy};
use mullion_core::score::{NodeScore, Parts, node_score};
use mullion_core::units::{Mib, NodeName};

const A: &str = "node-a";

fn node() -> NodeName {
    A.into()
}

/// The code that refuses `request`, or "fits".
fn verdict(ledger: &Ledger, request: &PodRequest) -> &'static str {
    let checked = Shape::new(request).check(ledger, &node()).err();
    match ledger.fit(request, &node()) {
        Ok(_) => {
            assert_eq!(checked, None);
            "fits"
        }
        Err(refusal) => {
            assert_eq!(checked, Some(refusal.code));
            refusal.code()
        }
    }
}

#[test]
fn the_node_is_looked_at_first() {
    let fact = || node_fact(A, cards(2, 10_000));
    let kube = || kube_fact(A, 20);
    for (case, fact, kube, want) in [
        ("ready", Some(fact()), Some(kube()), "fits"),
        ("nothing known", None, None, "NodeUnknown"),
        ("no GPUNode", None, Some(kube()), "NodeUnknown"),
        ("no Node", Some(fact()), None, "NodeUnknown"),
        (
            "another Node under the old name",
            Some(fact()),
            Some(KubeNodeFact { uid: "other".into(), ..kube() }),
            "NodeReplaced",
        ),
        ("closed", Some(NodeFact { cordoned: true, ..fact() }), Some(kube()), "NodeClosed"),
        ("no driver", Some(NodeFact { driver_ready: false, ..fact() }), Some(kube()), "DriverNotReady"),
        ("no plugin", Some(fact()), Some(kube_fact(A, 0)), "PluginDown"),
        ("too few slots", Some(fact()), Some(kube_fact(A, 1)), "SlotsTaken"),
        ("no cards", Some(node_fact(A, vec![])), Some(kube()), "TooFewCards"),
    ] {
        let mut ledger = Ledger::default();
        for event in fact.map(Event::NodeObserved).into_iter().chain(kube.map(Event::KubeNodeObserved)) {
            ledger.apply(&event);
        }
        assert_eq!(verdict(&ledger, &one(2, mib(10), 0)), want, "{case}");
    }
}

#[test]
fn a_card_takes_what_it_has_room_for() {
    let with = |change: fn(&mut CardFact)| {
        let mut fact = card("GPU-0", 10_000);
        change(&mut fact);
        fact
    };
    let plain = || with(|_| ());
    let exclusive = || with(|c| c.mode = CardMode::Exclusive);
    let scaled = || with(|c| c.cores = 200);
    for (case, card, stands, request, want) in [
        ("room for all of it", plain(), None, one(1, percent(100), 100), "fits"),
        ("room for the rest", plain(), Some((4000, 40)), one(1, mib(6000), 60), "fits"),
        ("one MiB too much", plain(), Some((4000, 40)), one(1, mib(6001), 60), "MemoryShort"),
        ("one percent too much", plain(), Some((4000, 40)), one(1, mib(6000), 61), "CoresShort"),
        ("percent of this card", plain(), Some((4000, 0)), one(1, percent(60), 0), "fits"),
        ("percent of this card, too much", plain(), Some((4000, 0)), one(1, percent(61), 0), "MemoryShort"),
        ("more than the card has", plain(), None, one(1, mib(10_001), 0), "CardTooSmall"),
        (
            "a percent of a card that small is nothing",
            with(|c| c.memory = Mib(50)),
            None,
            one(1, percent(1), 0),
            "CardTooSmall",
        ),
        ("a whole card beside another pod", plain(), Some((1, 0)), one(1, mib(1), 100), "CardExclusive"),
        ("beside a whole card", plain(), Some((1, 100)), one(1, mib(1), 0), "CardExclusive"),
        ("cores scaled up: 100 is a share", scaled(), Some((1, 100)), one(1, mib(1), 100), "fits"),
        ("cores scaled up, used up", scaled(), Some((1, 100)), one(1, mib(1), 100), "fits"),
        ("best effort where compute is left", plain(), Some((1, 99)), one(1, mib(1), 0), "fits"),
        (
            "best effort where none is left",
            with(|c| c.cores = 50),
            Some((1, 50)),
            one(1, mib(1), 0),
            "CoresShort",
        ),
        ("exclusive and empty", exclusive(), None, one(1, mib(1), 0), "fits"),
        ("exclusive and taken", exclusive(), Some((1, 0)), one(1, mib(1), 0), "CardExclusive"),
        ("slots taken", with(|c| c.slots = 1), Some((1, 0)), one(1, mib(1), 0), "CardSlotsTaken"),
        ("no slots at all", with(|c| c.slots = 0), None, one(1, mib(1), 0), "CardSlotsTaken"),
        ("unhealthy", with(|c| c.healthy = false), None, one(1, mib(1), 0), "CardsUnhealthy"),
        ("cordoned", with(|c| c.cordoned = true), None, one(1, mib(1), 0), "CardsClosed"),
        ("in MIG mode", with(|c| c.mode = CardMode::Mig), None, one(1, mib(1), 0), "CardsInMigMode"),
    ] {
        let mut ledger = Ledger::default();
        ledger.apply(&Event::NodeObserved(node_fact(A, vec![card])));
        ledger.apply(&Event::KubeNodeObserved(kube_fact(A, 10)));
        if let Some((memory, cores)) = stands {
            ledger.apply(&observed(&slice("x", "GPU-0", memory, cores)));
        }
        assert_eq!(verdict(&ledger, &request), want, "{case}");
    }
}

// FS-12
#[test]
fn cards_are_counted_one_by_one() {
    let thirds = |number| {
        let slots = |c: CardFact| CardFact { slots: 3, ..c };
        ledger(A, cards(number, 7168).into_iter().map(slots).collect())
    };
    assert_eq!(verdict(&thirds(2), &one(1, mib(8000), 0)), "CardTooSmall", "two cards are not one");
    assert_eq!(verdict(&thirds(2), &one(3, mib(10), 0)), "TooFewCards", "six slots are not three cards");
    let mut full = thirds(1);
    for uid in ["a", "b", "c"] {
        place(&mut full, uid, A, &one(1, mib(10), 0));
    }
    assert_eq!(verdict(&full, &one(1, mib(10), 0)), "SlotsTaken");
    let fact = place(&mut thirds(2), "a", A, &one(2, mib(10), 0));
    assert_eq!(uuids(&fact, "main"), ["GPU-0", "GPU-1"], "distinct, by index");
}

// FS-08
#[test]
fn init_containers_run_one_after_the_other() {
    use ContainerKind::Init;
    let inits = ["i", "j", "k"].map(|name| wish(name, Init, 1, mib(10_240), 0));
    let request = pod(inits.to_vec());
    let mut ledger = ledger(A, vec![card("GPU-0", 15_360)]);
    let first = place(&mut ledger, "a", A, &request);
    assert_eq!(ledger.card_usage(&node())[0].used.memory, Mib(10_240));
    assert_eq!(verdict(&ledger, &request), "MemoryShort");
    ledger.apply(&observed(&AllocationFact { init_done: true, prepared: true, ..first }));
    assert_eq!(verdict(&ledger, &request), "fits");
}

// FS-02: every policy word does what it says, at both levels.
#[test]
fn policies_fill_or_even_out() {
    for (case, card_policy, want) in [
        ("binpack", Policy::Binpack, ["GPU-0", "GPU-0", "GPU-0"]),
        ("spread", Policy::Spread, ["GPU-0", "GPU-1", "GPU-0"]),
    ] {
        let mut ledger = ledger(A, cards(2, 10_000));
        let request = PodRequest { card_policy, ..one(1, mib(1000), 10) };
        let got = ["a", "b", "c"].map(|uid| uuids(&place(&mut ledger, uid, A, &request), "main")[0].clone());
        assert_eq!(got, want, "{case}");
    }
    let mut ledger = ledger(A, cards(2, 10_000));
    ledger.apply(&Event::NodeObserved(node_fact("node-b", cards(2, 10_000))));
    ledger.apply(&Event::KubeNodeObserved(kube_fact("node-b", 20)));
    place(&mut ledger, "a", A, &one(1, mib(1000), 10));
    for (case, node_policy, better) in [("binpack", Policy::Binpack, A), ("spread", Policy::Spread, "node-b")]
    {
        let request = PodRequest { node_policy, ..one(1, mib(1000), 10) };
        let score = |name: &str| ledger.fit(&request, &name.into()).unwrap().score.value;
        let best = if score(A) > score("node-b") { A } else { "node-b" };
        assert_eq!(best, better, "{case}");
    }
}

#[test]
fn binpack_takes_the_fullest_that_still_fits() {
    let mut ledger = ledger(A, cards(3, 10_000));
    ledger.apply(&observed(&slice("full", "GPU-2", 9000, 0)));
    ledger.apply(&observed(&slice("half", "GPU-1", 5000, 0)));
    let request = PodRequest { card_policy: Policy::Binpack, ..one(1, mib(2000), 0) };
    assert_eq!(uuids(&place(&mut ledger, "a", A, &request), "main"), ["GPU-1"]);
}

#[test]
fn an_init_goes_where_the_peak_rises_least() {
    use ContainerKind::{App, Init};
    let ledger = ledger(A, cards(2, 10_000));
    let containers = vec![wish("i", Init, 1, mib(4000), 0), wish("a", App, 1, mib(6000), 0)];
    let placement = ledger.fit(&pod(containers), &node()).unwrap();
    let cards: Vec<_> =
        placement.containers.iter().map(|c| (c.name.as_str(), c.devices[0].uuid.as_str())).collect();
    assert_eq!(cards, [("i", "GPU-0"), ("a", "GPU-0")], "spec order, one card");
    assert_eq!(placement.cards.len(), 1);
}

#[test]
fn what_greed_misses_the_search_finds() {
    use ContainerKind::App;
    // Spread puts the small one on the large card; only the other way round do both fit.
    let mut ledger = ledger(A, vec![card("GPU-0", 4000), card("GPU-1", 10_000)]);
    let containers = vec![wish("small", App, 1, mib(3000), 0), wish("large", App, 1, mib(8000), 0)];
    let fact = place(&mut ledger, "a", A, &pod(containers));
    assert_eq!(
        (uuids(&fact, "small"), uuids(&fact, "large")),
        (vec!["GPU-0".to_owned()], vec!["GPU-1".to_owned()])
    );
    assert_eq!(ledger.standing(&"a".into()), Some(Standing::Holds));
}

// The same with cards of one size, to the last MiB: it is what is used of them that tells them apart.
#[test]
fn the_search_fills_what_is_left_exactly() {
    use ContainerKind::App;
    let mut ledger = ledger(A, cards(2, 10_000));
    ledger.apply(&observed(&slice("x", "GPU-0", 6000, 0)));
    let containers = vec![wish("small", App, 1, mib(4000), 0), wish("large", App, 1, mib(10_000), 0)];
    let fact = place(&mut ledger, "a", A, &pod(containers));
    assert_eq!((uuids(&fact, "small")[0].as_str(), uuids(&fact, "large")[0].as_str()), ("GPU-0", "GPU-1"));
}

#[test]
fn the_containers_of_a_pod_keep_the_rules_among_themselves() {
    use ContainerKind::{App, Init, Sidecar};
    let two = |a, b| pod(vec![wish("a", App, 1, mib(1000), a), wish("b", App, 1, mib(1000), b)]);
    for (case, cards, request, want) in [
        ("two whole cards", 2, two(100, 100), "fits"),
        ("two whole cards of one", 1, two(100, 100), "TooFewTogether"),
        ("a whole card and best effort on one", 1, two(100, 0), "TooFewTogether"),
        ("a whole card and best effort on two", 2, two(100, 0), "fits"),
        ("shares of one card", 1, two(50, 50), "fits"),
        ("shares and too much", 1, two(51, 50), "TooFewTogether"),
        (
            "a whole card for the init, then best effort",
            1,
            pod(vec![wish("i", Init, 1, mib(1000), 100), wish("a", App, 1, mib(1000), 0)]),
            "fits",
        ),
        (
            "a sidecar is beside the init after it",
            1,
            pod(vec![wish("s", Sidecar, 1, mib(1000), 0), wish("i", Init, 1, mib(1000), 100)]),
            "TooFewTogether",
        ),
        (
            "a sidecar is not beside the init before it",
            1,
            pod(vec![wish("i", Init, 1, mib(1000), 100), wish("s", Sidecar, 1, mib(1000), 0)]),
            "fits",
        ),
    ] {
        assert_eq!(verdict(&ledger(A, common::cards(cards, 10_000)), &request), want, "{case}");
    }
}

#[test]
fn a_refusal_names_object_number_and_near_miss() {
    let unhealthy = |c: CardFact| CardFact { healthy: false, ..c };
    let mut cards: Vec<_> = cards(2, 10_000);
    cards.extend([card("GPU-2", 10_000), card("GPU-3", 10_000)].map(unhealthy));
    let mut ledger = ledger("n07", cards);
    for (uid, uuid, memory) in [("a", "GPU-0", 7900), ("b", "GPU-1", 9000)] {
        let fact = slice(uid, uuid, memory, 50);
        ledger.apply(&observed(&AllocationFact { node: "n07".into(), ..fact }));
    }
    for (request, want) in [
        (one(1, mib(3000), 0), "n07: 2 of 4 cards healthy; the best has 2,100 MiB free of 3,000 asked"),
        (
            one(2, mib(2000), 0),
            "n07: 2 of 4 cards healthy; container main asks for 2 cards, 1 can take it; the next best has 1,000 MiB free of 2,000 asked",
        ),
        (one(1, mib(10), 60), "n07: 2 of 4 cards healthy; the best has 50 % of compute free of 60 % asked"),
        (
            one(1, mib(10), 100),
            "n07: 2 of 4 cards healthy; it must be alone on a card, or a pod that must be alone holds it",
        ),
        (one(1, mib(10_001), 0), "n07: 2 of 4 cards healthy; the best has 10,000 MiB in all of 10,001 asked"),
        (
            one(3, mib(10), 0),
            "n07: 2 of 4 cards healthy; container main asks for 3 cards, 2 can take it; see status.cards of GPUNode n07",
        ),
        (
            one(5, mib(10), 0),
            "n07: 2 of 4 cards healthy; container main asks for 5 cards, 2 can take it; lower nvidia.com/gpu",
        ),
        (one(64, mib(10), 0), "n07: 38 slots free on the node of 64 asked"),
    ] {
        assert_eq!(ledger.fit(&request, &"n07".into()).unwrap_err().to_string(), want);
    }
    let text = Ledger::default().fit(&one(1, mib(1), 0), &"n08".into()).unwrap_err().to_string();
    assert!(text.starts_with("n08: ") && text.contains("node agent"), "{text}");
}

#[test]
fn every_code_has_one_fixed_text() {
    let mut seen = std::collections::BTreeSet::new();
    for code in Code::ALL {
        assert!(seen.insert(code.as_str()) && seen.insert(code.reason()), "{code}");
        assert!(!code.reason().contains(|c: char| c.is_ascii_digit()), "{code}");
        assert_eq!(serde_json::to_string(&code).unwrap(), format!("\"{}\"", code.as_str()));
    }
    assert!(Code::ALL.is_sorted(), "the order of the checks is the order of the enum");
}

#[test]
fn a_node_is_scored_with_the_pod_on_it() {
    let mut ledger = ledger(A, cards(2, 10_000));
    let request = one(1, mib(5000), 50);
    let score = ledger.fit(&request, &node()).unwrap().score;
    // 1 of 20 slots, 5000 of 20000 MiB, 50 of 200 percent.
    assert_eq!(score.parts, Parts { slots: 5, memory: 25, cores: 25 });
    assert_eq!(score.value, 18);
    assert_eq!(Shape::new(&request).check(&ledger, &node()), Ok(score));
    place(&mut ledger, "a", A, &request);
    assert_eq!(node_score(Policy::Binpack, &ledger.card_usage(&node())), score);
    assert_eq!(node_score(Policy::Spread, &ledger.card_usage(&node())).value, 82);
    assert_eq!(node_score(Policy::Binpack, &[]), NodeScore::default());
}

/// A pod that was made to be hard ends the search, in a test thread's stack and time.
#[test]
fn the_hardest_pod_costs_little() {
    let cards = (0..64u32).map(|i| CardFact { slots: 128, ..card(&format!("GPU-{i}"), 1000 + u64::from(i)) });
    let ledger = ledger(A, cards.collect());
    let kinds = [ContainerKind::Sidecar, ContainerKind::Init];
    let containers = (0..64u32).map(|i| {
        let kind = kinds[usize::from(i % 2 == 1)];
        wish(&format!("c{i}"), kind, 60, mib(31 + u64::from(i % 7)), 0)
    });
    let hard = pod(containers.collect());
    for request in [hard.clone(), PodRequest { card_policy: Policy::Binpack, ..hard }] {
        // Fits or not: both verdicts agree, and come.
        verdict(&ledger, &request);
    }
}
