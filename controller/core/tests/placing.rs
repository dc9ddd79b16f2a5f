//! Properties of placement: right when it says yes, right when it says no, and the same every time.

mod common;

use common::{allocation, cards, kube_fact, mib, node_fact, observed, percent, pod, share};
use mullion_core::facts::{AllocationFact, CardFact, CardMode, ContainerKind, DeviceGrant, Event};
use mullion_core::ledger::{Ledger, Standing};
use mullion_core::placement::Shape;
use mullion_core::refusal::Code;
use mullion_core::request::{ContainerRequest, ContainerWish, MemoryAsk, PodRequest, Policy};
use mullion_core::units::{Mib, NodeName};
use proptest::prelude::*;

const A: &str = "node-a";

fn kinds() -> impl Strategy<Value = ContainerKind> {
    prop::sample::select(vec![ContainerKind::Init, ContainerKind::Sidecar, ContainerKind::App])
}

fn policies() -> impl Strategy<Value = Policy> {
    prop::sample::select(vec![Policy::Binpack, Policy::Spread])
}

/// Requests that are tight on small cards, so that fits and refusals are both common.
fn requests(containers: usize, count: u32) -> impl Strategy<Value = PodRequest> {
    let memory = prop_oneof![
        4 => (1_u64..=10).prop_map(|m| mib(m * 1000)),
        1 => prop::sample::select(vec![percent(1), percent(50), percent(100)]),
    ];
    let cores = prop::sample::select(vec![0_u8, 0, 20, 25, 50, 50, 60, 100]);
    let container = (kinds(), 1..=count, memory, cores);
    (prop::collection::vec(container, 1..=containers), policies(), policies()).prop_map(
        |(containers, node_policy, card_policy)| {
            let wish = |(at, (kind, count, memory, cores))| {
                let request = ContainerRequest { count, memory, cores: share(cores) };
                ContainerWish { name: format!("c{at}"), kind, request }
            };
            let containers = containers.into_iter().enumerate().map(wish).collect();
            PodRequest { node_policy, card_policy, ..pod(containers) }
        },
    )
}

fn inventory(number: usize) -> impl Strategy<Value = Vec<CardFact>> {
    let mode = prop_oneof![
        8 => Just(CardMode::Shared),
        1 => Just(CardMode::Exclusive),
        1 => Just(CardMode::Mig),
    ];
    let cores = prop_oneof![6 => Just(100_u32), 1 => Just(200), 3 => Just(50)];
    let card = (4_u64..=12, 1_u32..=4, cores, mode, prop::bool::weighted(0.9), prop::bool::weighted(0.05));
    prop::collection::vec(card, 1..=number).prop_map(|drawn| {
        let plain = cards(16, 0);
        let with = |(fact, (memory, slots, cores, mode, healthy, cordoned))| CardFact {
            memory: Mib(memory * 1000),
            slots,
            cores,
            mode,
            healthy,
            cordoned,
            ..fact
        };
        plain.into_iter().zip(drawn).map(with).collect()
    })
}

/// A node on which some of `before` was placed.
fn world(inventory: &[CardFact], before: &[PodRequest]) -> Ledger {
    let mut ledger = Ledger::default();
    ledger.apply(&Event::NodeObserved(node_fact(A, inventory.to_vec())));
    ledger.apply(&Event::KubeNodeObserved(kube_fact(A, 100)));
    for (at, request) in before.iter().enumerate() {
        if let Ok(placement) = ledger.fit(request, &A.into()) {
            let fact = allocation(&format!("b{at}"), &ledger, A, &placement);
            ledger.apply(&observed(&fact));
        }
    }
    ledger
}

/// The containers that run at one time: written down anew, not taken from the code under test.
fn phases(request: &PodRequest) -> Vec<Vec<usize>> {
    let kind = |c: usize| request.containers[c].kind;
    let all = 0..request.containers.len();
    let mut phases = Vec::new();
    for init in all.clone().filter(|&c| kind(c) == ContainerKind::Init) {
        let mut phase: Vec<_> = (0..init).filter(|&c| kind(c) == ContainerKind::Sidecar).collect();
        phase.push(init);
        phases.push(phase);
    }
    phases.push(all.filter(|&c| kind(c) != ContainerKind::Init).collect());
    phases
}

fn device(card: &CardFact, request: &ContainerRequest) -> DeviceGrant {
    let memory = match request.memory {
        MemoryAsk::Mib(memory) => memory,
        MemoryAsk::Percent(p) => Mib(card.memory.0 * u64::from(p.get()) / 100),
    };
    DeviceGrant { uuid: card.uuid.clone(), memory, cores: request.cores }
}

/// Whether the rules allow `chosen` (cards by container), by brute reading of the rules.
fn allowed(ledger: &Ledger, request: &PodRequest, chosen: &[Vec<usize>]) -> bool {
    let usage = ledger.card_usage(&A.into());
    let stands: Vec<AllocationFact> = ledger.allocations_on(&A.into()).cloned().collect();
    usage.iter().enumerate().all(|(at, card)| {
        let fact = &card.card;
        let users: Vec<usize> = (0..chosen.len()).filter(|&c| chosen[c].contains(&at)).collect();
        if users.is_empty() {
            return true;
        }
        let open = fact.healthy && !fact.cordoned && fact.mode != CardMode::Mig;
        let others: Vec<&DeviceGrant> = stands
            .iter()
            .flat_map(|a| &a.containers)
            .flat_map(|c| &c.devices)
            .filter(|d| d.uuid == fact.uuid)
            .collect();
        let slots = if fact.mode == CardMode::Exclusive { fact.slots.min(1) } else { fact.slots };
        let held_alone = fact.cores == 100 && others.iter().any(|d| d.cores.get() == 100);
        let fits = phases(request).iter().all(|phase| {
            let running: Vec<DeviceGrant> = phase
                .iter()
                .filter(|c| users.contains(c))
                .map(|&c| device(fact, &request.containers[c].request))
                .collect();
            let memory: u64 = running.iter().map(|d| d.memory.0).sum();
            let cores: u64 = running.iter().map(|d| u64::from(d.cores.get())).sum();
            let whole = fact.cores == 100 && running.iter().any(|d| d.cores.get() == 100);
            let best_effort = running.iter().any(|d| d.cores.get() == 0);
            running.is_empty()
                || (card.used.slots + running.len() as u64 <= u64::from(slots)
                    && card.used.memory.0 + memory <= fact.memory.0
                    && card.used.cores + cores <= u64::from(fact.cores)
                    && !held_alone
                    && !(whole && (!others.is_empty() || running.len() > 1))
                    && !(best_effort && card.used.cores + cores >= u64::from(fact.cores))
                    && running.iter().all(|d| d.memory.0 > 0))
        });
        open && fits
    })
}

/// Every way to give the containers distinct cards each.
fn any_way(ledger: &Ledger, request: &PodRequest, cards: usize, chosen: &mut Vec<Vec<usize>>) -> bool {
    let Some(wish) = request.containers.get(chosen.len()) else {
        return allowed(ledger, request, chosen);
    };
    (0_u32..1 << cards).filter(|set| set.count_ones() == wish.request.count).any(|set| {
        chosen.push((0..cards).filter(|card| set & (1 << card) != 0).collect());
        let found = any_way(ledger, request, cards, chosen);
        chosen.pop();
        found
    })
}

proptest! {
    #![proptest_config(common::config(8000))]

    #[test]
    fn yes_and_no_are_both_right(
        inventory in inventory(3),
        before in prop::collection::vec(requests(1, 2), 0..3),
        request in requests(4, 2),
    ) {
        let ledger = world(&inventory, &before);
        let fit = ledger.fit(&request, &A.into());
        let possible = any_way(&ledger, &request, inventory.len(), &mut Vec::new());
        prop_assert_eq!(fit.is_ok(), possible, "{:?}", fit);
        match fit {
            Ok(placement) => {
                prop_assert_eq!(placement.containers.len(), request.containers.len());
                let at = |uuid| inventory.iter().position(|c| &c.uuid == uuid).unwrap();
                let mut chosen = Vec::new();
                for (grant, wish) in placement.containers.iter().zip(&request.containers) {
                    prop_assert_eq!((&grant.name, grant.kind), (&wish.name, wish.kind));
                    let cards: Vec<usize> = grant.devices.iter().map(|d| at(&d.uuid)).collect();
                    prop_assert!(cards.is_sorted_by(|a, b| a < b), "distinct and by index");
                    prop_assert_eq!(cards.len(), wish.request.count as usize);
                    for (card, given) in cards.iter().zip(&grant.devices) {
                        prop_assert_eq!(given, &device(&inventory[*card], &wish.request));
                    }
                    chosen.push(cards);
                }
                prop_assert!(allowed(&ledger, &request, &chosen));
                prop_assert!((0..=100).contains(&placement.score.value));
                prop_assert_eq!(Shape::new(&request).check(&ledger, &A.into()), Ok(placement.score));
            }
            Err(refusal) => {
                prop_assert_eq!(Shape::new(&request).check(&ledger, &A.into()), Err(refusal.code));
                prop_assert!(refusal.code >= Code::TooFewCards, "{}", refusal);
                let detail = &refusal.detail;
                prop_assert_eq!(detail.cards_total as usize, inventory.len());
                if matches!(refusal.code, Code::MemoryShort | Code::CardSlotsTaken | Code::CardTooSmall) {
                    prop_assert!(detail.best < detail.asked, "{}", refusal);
                }
                // The code is true: on the node emptied of pods, one that eviction cannot help is still refused.
                if refusal.code.unresolvable() {
                    prop_assert!(world(&inventory, &[]).fit(&request, &A.into()).is_err());
                }
            }
        }
    }

    // FS-13: what filter decided is what bind writes, whatever happens elsewhere in between; and it stands.
    #[test]
    fn bind_gives_what_filter_promised(
        inventory in inventory(4),
        before in prop::collection::vec(requests(2, 2), 0..6),
        elsewhere in prop::collection::vec(requests(2, 2), 0..3),
        request in requests(3, 3),
    ) {
        let mut ledger = world(&inventory, &before);
        let node = NodeName::from(A);
        let promised = ledger.fit(&request, &node);
        ledger.apply(&Event::NodeObserved(node_fact("node-b", inventory.clone())));
        ledger.apply(&Event::KubeNodeObserved(kube_fact("node-b", 100)));
        for (at, other) in elsewhere.iter().enumerate() {
            if let Ok(placement) = ledger.fit(other, &"node-b".into()) {
                let fact = allocation(&format!("e{at}"), &ledger, "node-b", &placement);
                ledger.apply(&observed(&fact));
            }
        }
        prop_assert_eq!(&ledger.fit(&request, &node), &promised);
        let Ok(placement) = promised else { return Ok(()) };
        let fact = allocation("new", &ledger, A, &placement);
        ledger.apply(&Event::Held(fact.clone()));
        prop_assert_eq!(ledger.hold_standing(&fact.pod.uid), Some(Standing::Holds));
        let held = ledger.card_usage(&node);
        ledger.apply(&observed(&fact));
        prop_assert_eq!(ledger.standing(&fact.uid), Some(Standing::Holds));
        prop_assert_eq!(ledger.card_usage(&node), held);
        prop_assert_eq!(&ledger.allocation(&fact.uid).unwrap().containers, &placement.containers);
        prop_assert!(ledger.overcommitted().is_empty());
    }
}
