//! The fold, rule by rule.

mod common;

use common::{
    allocation, card, cards, grant, granted, kube_fact, ledger, mib, node_fact, observed, one, place, slice,
    snapshot, uuids,
};
use mullion_core::facts::{AllocationFact, CardMode, ContainerKind, Event};
use mullion_core::ledger::{Ledger, Standing};
use mullion_core::refusal::Code;
use mullion_core::units::{AllocationUid, Mib, NodeName, PodUid};

const A: &str = "node-a";

fn node() -> NodeName {
    A.into()
}

/// What is used of the only card: MiB, percent, containers.
fn used(ledger: &Ledger) -> (u64, u64, u64) {
    let used = ledger.card_usage(&node())[0].used;
    (used.memory.0, used.cores, used.slots)
}

/// "holds", "released", "gone", or the code of what is short.
fn standing(ledger: &Ledger, uid: &str) -> &'static str {
    match ledger.standing(&uid.into()) {
        Some(Standing::Holds) => "holds",
        Some(Standing::Released) => "released",
        Some(Standing::DeviceGone { .. }) => "gone",
        Some(Standing::Void { by }) => by.code.as_str(),
        None => "unknown",
    }
}

#[test]
fn a_charge_is_the_peak_over_phases() {
    use ContainerKind::{App, Init, Sidecar};
    let on = |name: &str, kind, memory, cores| grant(name, kind, &[("GPU-0", memory, cores)]);
    for (case, containers, init_done, want, tokens) in [
        ("one app", vec![on("a", App, 3000, 30)], false, (3000, 30, 1), 1),
        ("apps add up", vec![on("a", App, 3000, 30), on("b", App, 2000, 0)], false, (5000, 30, 2), 2),
        // FS-08
        (
            "init containers do not add up",
            vec![on("i", Init, 10_240, 0), on("j", Init, 10_240, 0), on("k", Init, 10_240, 0)],
            false,
            (10_240, 0, 1),
            1,
        ),
        (
            "a large init and a small app",
            vec![on("i", Init, 9000, 10), on("a", App, 2000, 50)],
            false,
            (9000, 50, 1),
            1,
        ),
        (
            "once the inits are done only the rest counts; the kubelet still counts the init's slots",
            vec![on("i", Init, 9000, 10), on("j", Init, 9000, 10), on("a", App, 2000, 50)],
            true,
            (2000, 50, 1),
            1,
        ),
        ("nothing is left after the inits", vec![on("i", Init, 9000, 10)], true, (0, 0, 0), 1),
        (
            "a sidecar stays for later inits and the apps",
            vec![on("s", Sidecar, 1000, 5), on("i", Init, 9000, 10), on("a", App, 2000, 50)],
            false,
            (10_000, 55, 2),
            2,
        ),
        (
            "an init does not run beside a sidecar declared after it",
            vec![on("i", Init, 9000, 10), on("s", Sidecar, 1000, 5), on("a", App, 2000, 50)],
            false,
            (9000, 55, 2),
            2,
        ),
    ] {
        let mut ledger = ledger(A, cards(1, 81_920));
        ledger.apply(&observed(&AllocationFact { init_done, ..granted("x", &containers) }));
        assert_eq!(used(&ledger), want, "{case}");
        assert_eq!(ledger.slots_used(&node()), tokens, "{case}");
        assert!(ledger.overcommitted().is_empty(), "{case}");
    }
}

#[test]
fn the_later_of_two_that_collide_is_void() {
    let prepared = |fact| AllocationFact { prepared: true, ..fact };
    let sequence = |sequence, fact| AllocationFact { sequence, ..fact };
    let created = |created, fact| AllocationFact { created, ..fact };
    let half = |uid| slice(uid, "GPU-0", 6000, 0);
    for (case, a, b, want) in [
        ("both fit", slice("a", "GPU-0", 5000, 50), slice("b", "GPU-0", 5000, 50), ("holds", "holds")),
        (
            "memory: the lower sequence stays",
            sequence(2, half("a")),
            sequence(1, half("b")),
            ("MemoryShort", "holds"),
        ),
        (
            "same sequence: the older stays",
            created(7, half("a")),
            created(6, half("b")),
            ("MemoryShort", "holds"),
        ),
        ("same age: the smaller uid stays", half("a"), half("b"), ("holds", "MemoryShort")),
        (
            "prepared stays whatever its sequence",
            half("a"),
            prepared(sequence(9, half("b"))),
            ("MemoryShort", "holds"),
        ),
        ("cores", slice("a", "GPU-0", 1, 60), slice("b", "GPU-0", 1, 60), ("holds", "CoresShort")),
        (
            "a whole card and a neighbour",
            slice("a", "GPU-0", 1, 100),
            slice("b", "GPU-0", 1, 0),
            ("holds", "CardExclusive"),
        ),
        (
            "a neighbour and a whole card",
            slice("a", "GPU-0", 1, 0),
            slice("b", "GPU-0", 1, 100),
            ("holds", "CardExclusive"),
        ),
        (
            "best effort keeps its place when shares fill the card before it is prepared",
            sequence(1, slice("a", "GPU-0", 1, 0)),
            prepared(sequence(2, slice("b", "GPU-0", 1, 99))),
            ("holds", "holds"),
        ),
        ("a card of another node", half("a"), slice("b", "GPU-9", 1, 1), ("holds", "gone")),
        (
            "released makes room",
            AllocationFact { released: true, ..half("a") },
            half("b"),
            ("released", "holds"),
        ),
    ] {
        for events in [[observed(&a), observed(&b)], [observed(&b), observed(&a)]] {
            let mut ledger = ledger(A, cards(1, 10_000));
            for event in &events {
                assert!(ledger.apply(event), "{case}");
            }
            assert_eq!((standing(&ledger, "a"), standing(&ledger, "b")), want, "{case}");
            let void = ledger.void_on(&node());
            assert_eq!(void.len(), usize::from(want.0.len() > 8) + usize::from(want.1.len() > 8), "{case}");
            assert!(ledger.overcommitted().is_empty(), "{case}");
        }
    }
}

#[test]
fn slots_and_modes_bind_the_fold_too() {
    let slots = |slots, fact| mullion_core::facts::CardFact { slots, ..fact };
    let mode = |mode, fact| mullion_core::facts::CardFact { mode, ..fact };
    let base = || card("GPU-0", 10_000);
    for (case, card, want) in [
        ("two slots", slots(2, base()), ["holds", "holds", "CardSlotsTaken"]),
        ("exclusive", mode(CardMode::Exclusive, base()), ["holds", "CardExclusive", "CardExclusive"]),
        ("mig", mode(CardMode::Mig, base()), ["CardsInMigMode"; 3]),
    ] {
        let mut ledger = ledger(A, vec![card]);
        for uid in ["a", "b", "c"] {
            ledger.apply(&observed(&slice(uid, "GPU-0", 10, 0)));
        }
        assert_eq!(["a", "b", "c"].map(|uid| standing(&ledger, uid)), want, "{case}");
        assert_eq!(ledger.slots_used(&node()), 3, "{case}: the kubelet has admitted all three");
    }
}

#[test]
fn a_void_allocation_holds_once_there_is_room() {
    let mut ledger = ledger(A, cards(1, 10_000));
    ledger.apply(&observed(&slice("a", "GPU-0", 6000, 0)));
    ledger.apply(&observed(&slice("b", "GPU-0", 6000, 0)));
    assert_eq!(ledger.void_on(&node()), [AllocationUid::from("b")]);
    ledger.apply(&Event::AllocationGone("a".into()));
    assert_eq!(ledger.void_on(&node()), []);
    assert_eq!(used(&ledger), (6000, 0, 1));
}

#[test]
fn flags_only_rise_and_gone_is_for_good() {
    let mut ledger = ledger(A, cards(1, 10_000));
    let plain = slice("a", "GPU-0", 6000, 0);
    let prepared = AllocationFact { prepared: true, ..plain.clone() };
    assert!(ledger.apply(&observed(&prepared)));
    assert!(!ledger.apply(&observed(&plain)), "a late observation takes nothing back");
    assert!(ledger.allocation(&"a".into()).unwrap().prepared);
    assert!(ledger.apply(&observed(&AllocationFact { released: true, ..plain.clone() })));
    assert_eq!(used(&ledger), (0, 0, 0));
    // FS-09: usage is back at zero without any resync.
    assert!(ledger.apply(&Event::AllocationGone("a".into())));
    assert!(!ledger.apply(&Event::AllocationGone("a".into())), "a duplicate");
    assert!(!ledger.apply(&observed(&prepared)), "a late observation brings nothing back");
    assert_eq!((standing(&ledger, "a"), ledger.slots_used(&node())), ("unknown", 0));
    assert_eq!(ledger.of_pod(&"a-pod".into()), None);
}

#[test]
fn a_hold_ends_with_its_allocation_or_by_itself() {
    let pod = PodUid::from("a-pod");
    let fact = slice("a", "GPU-0", 6000, 0);
    let hold = AllocationFact { uid: AllocationUid::default(), ..fact.clone() };

    let mut live = ledger(A, cards(1, 10_000));
    assert!(live.apply(&Event::Held(hold.clone())));
    assert!(!live.apply(&Event::Held(hold.clone())), "a duplicate");
    assert_eq!(used(&live), (6000, 0, 1));
    assert_eq!(live.next_sequence(&node()), 2);
    assert_eq!(live.hold_standing(&pod), Some(Standing::Holds));
    assert_eq!(live.allocations_on(&node()).count(), 0);

    let generation = live.generation();
    live.apply(&observed(&fact));
    assert_eq!((used(&live), live.slots_used(&node())), ((6000, 0, 1), 1), "not charged twice");
    assert_eq!(live.hold_of(&pod), None);
    assert_eq!(live.generation(), generation, "nothing changed for any fit");

    // BL-02: ending another pod's hold, or one that is over, touches nothing.
    assert!(!live.apply(&Event::HoldEnded(pod.clone())));
    assert!(!live.apply(&Event::HoldEnded("b-pod".into())));
    assert_eq!(used(&live), (6000, 0, 1));

    // BL-11: a bind that fails leaves nothing behind.
    let mut failed = ledger(A, cards(1, 10_000));
    failed.apply(&Event::Held(hold.clone()));
    assert!(failed.apply(&Event::HoldEnded(pod.clone())));
    assert_eq!((used(&failed), failed.slots_used(&node())), ((0, 0, 0), 0));

    // A hold moves with its pod, and an allocation on another node ends it too.
    let mut moved = ledger(A, cards(1, 10_000));
    moved.apply(&Event::Held(hold));
    moved.apply(&observed(&AllocationFact { node: "node-b".into(), ..fact }));
    assert_eq!((used(&moved), moved.slots_used(&node())), ((0, 0, 0), 0));
    assert_eq!(moved.slots_used(&"node-b".into()), 1);
}

#[test]
fn a_hold_yields_to_an_earlier_allocation_of_another_decider() {
    let mut ledger = ledger(A, cards(1, 10_000));
    let hold = AllocationFact { created: 5, ..slice("a", "GPU-0", 6000, 0) };
    ledger.apply(&Event::Held(hold.clone()));
    ledger.apply(&observed(&AllocationFact { created: 4, ..slice("b", "GPU-0", 6000, 0) }));
    assert!(
        matches!(ledger.hold_standing(&"a-pod".into()), Some(Standing::Void { by }) if by.code == Code::MemoryShort)
    );
    assert_eq!(standing(&ledger, "b"), "holds");
    // The allocation stands where its hold stood.
    ledger.apply(&observed(&hold));
    assert_eq!((standing(&ledger, "a"), standing(&ledger, "b")), ("MemoryShort", "holds"));
}

#[test]
fn a_card_that_is_gone_takes_the_unprepared_with_it() {
    let mut ledger = ledger(A, cards(2, 10_000));
    let two = [grant("main", ContainerKind::App, &[("GPU-0", 1000, 0), ("GPU-1", 1000, 0)])];
    ledger.apply(&observed(&granted("new", &two)));
    ledger.apply(&observed(&AllocationFact { prepared: true, ..granted("runs", &two) }));
    assert_eq!(used(&ledger), (2000, 0, 2));
    ledger.apply(&Event::NodeObserved(node_fact(A, cards(1, 10_000))));
    assert_eq!((standing(&ledger, "new"), standing(&ledger, "runs")), ("gone", "holds"));
    assert_eq!((used(&ledger), ledger.slots_used(&node())), ((1000, 0, 1), 4));
    ledger.apply(&Event::NodeGone(node()));
    assert_eq!((standing(&ledger, "new"), standing(&ledger, "runs")), ("gone", "holds"));
    assert_eq!(ledger.card_usage(&node()), []);
    ledger.apply(&Event::NodeObserved(node_fact(A, cards(2, 10_000))));
    assert_eq!((standing(&ledger, "new"), used(&ledger)), ("holds", (2000, 0, 2)));
}

#[test]
fn a_pod_that_is_made_anew_is_another_pod() {
    let mut ledger = ledger(A, cards(1, 10_000));
    let old = AllocationFact { released: true, ..slice("a", "GPU-0", 6000, 0) };
    let new = AllocationFact { uid: "b".into(), released: false, ..old.clone() };
    ledger.apply(&observed(&old));
    assert_eq!(ledger.of_pod(&"a-pod".into()).unwrap().uid, "a".into());
    ledger.apply(&observed(&new));
    assert_eq!(ledger.of_pod(&"a-pod".into()).unwrap().uid, "b".into(), "the one that is not over");
}

#[test]
fn the_generation_grows_when_a_fit_could_change_and_only_then() {
    let mut ledger = Ledger::default();
    let mut last = 0;
    let fact = slice("a", "GPU-0", 6000, 0);
    let more = mullion_core::facts::NodeFact { observation: 2, ..node_fact(A, cards(1, 10_000)) };
    for (case, event, changed, grows) in [
        ("inventory", Event::NodeObserved(node_fact(A, cards(1, 10_000))), true, true),
        ("the same", Event::NodeObserved(node_fact(A, cards(1, 10_000))), false, false),
        ("the same under a new number", Event::NodeObserved(more), true, false),
        ("the Node", Event::KubeNodeObserved(kube_fact(A, 10)), true, true),
        ("the same Node", Event::KubeNodeObserved(kube_fact(A, 10)), false, false),
        ("a dead plugin", Event::KubeNodeObserved(kube_fact(A, 0)), true, true),
        ("an allocation", observed(&fact), true, true),
        ("prepared", observed(&AllocationFact { prepared: true, ..fact.clone() }), true, false),
        ("released", observed(&AllocationFact { released: true, ..fact.clone() }), true, true),
        ("gone", Event::AllocationGone("a".into()), true, false),
        ("unknown and gone", Event::AllocationGone("b".into()), true, false),
        ("no Node", Event::KubeNodeGone(node()), true, true),
        ("no Node again", Event::KubeNodeGone(node()), false, false),
        ("no GPUNode", Event::NodeGone(node()), true, true),
        ("no GPUNode again", Event::NodeGone(node()), false, false),
    ] {
        assert_eq!(ledger.apply(&event), changed, "{case}");
        assert_eq!(ledger.generation() > last, grows, "{case}");
        if grows && ledger.node(&node()).is_some() {
            assert_eq!(ledger.node_generation(&node()), ledger.generation(), "{case}");
        }
        last = ledger.generation();
    }
    assert_eq!(ledger.nodes().count(), 0, "nothing is left of it");
}

#[test]
fn an_admin_who_lowers_a_card_overcommits_what_runs_and_nothing_else() {
    let mut ledger = ledger(A, cards(1, 10_000));
    ledger.apply(&observed(&AllocationFact { prepared: true, ..slice("runs", "GPU-0", 6000, 0) }));
    ledger.apply(&observed(&slice("new", "GPU-0", 2000, 0)));
    ledger.apply(&Event::NodeObserved(node_fact(A, cards(1, 5000))));
    assert_eq!((standing(&ledger, "runs"), standing(&ledger, "new")), ("holds", "MemoryShort"));
    assert_eq!(ledger.overcommitted()[0].used.memory, Mib(6000));
    assert_eq!(ledger.card_usage(&node())[0].free.memory, Mib(0));
}

#[test]
fn a_hostile_inventory_neither_panics_nor_counts_a_card_twice() {
    let huge = mullion_core::facts::CardFact { slots: u32::MAX, cores: u32::MAX, ..card("GPU-0", u64::MAX) };
    let mut ledger = ledger(A, vec![huge.clone(), huge]);
    assert_eq!(ledger.card_usage(&node()).len(), 1);
    for uid in ["a", "b"] {
        ledger.apply(&observed(&AllocationFact {
            sequence: u64::MAX,
            prepared: true,
            ..slice(uid, "GPU-0", u64::MAX, 100)
        }));
    }
    assert_eq!(ledger.next_sequence(&node()), u64::MAX);
    assert_eq!(ledger.card_usage(&node())[0].used.memory, Mib(u64::MAX), "saturates");
    assert!(ledger.fit(&one(1, mib(1), 0), &node()).is_err());
}

// FS-13: binpack back to back, before any watch event came in.
#[test]
fn holds_pack_two_halves_on_one_card() {
    let mut ledger = ledger(A, cards(2, 10_000));
    let mut request = one(1, mib(5000), 0);
    request.card_policy = mullion_core::request::Policy::Binpack;
    let mut seen = Vec::new();
    for uid in ["a", "b"] {
        let placement = ledger.fit(&request, &node()).unwrap();
        let hold = allocation(uid, &ledger, A, &placement);
        seen.push(uuids(&hold, "main"));
        ledger.apply(&Event::Held(hold));
    }
    assert_eq!(seen, [["GPU-0"], ["GPU-0"]]);
    assert_eq!(used(&ledger), (10_000, 0, 2));
}

// BL-01, BL-05: whoever ends before its Allocate leaves nothing that another pod would wait for.
#[test]
fn the_next_pod_is_placed_as_soon_as_the_last_one_is_released() {
    let mut ledger = ledger(A, cards(1, 10_000));
    let whole = one(1, common::percent(100), 100);
    let first = place(&mut ledger, "a", A, &whole);
    assert_eq!(ledger.fit(&whole, &node()).unwrap_err().code, Code::CardExclusive);
    ledger.apply(&observed(&AllocationFact { released: true, ..first }));
    place(&mut ledger, "b", A, &whole);
    assert_eq!(standing(&ledger, "b"), "holds");
}

#[test]
fn a_clone_is_a_world_of_its_own() {
    let mut ledger = ledger(A, cards(1, 10_000));
    place(&mut ledger, "a", A, &one(1, mib(6000), 0));
    let before = snapshot(&ledger);
    let mut trial = ledger.clone();
    trial.apply(&Event::AllocationGone("a".into()));
    assert!(trial.fit(&one(1, mib(6000), 0), &node()).is_ok());
    assert_eq!(snapshot(&ledger), before);
}
