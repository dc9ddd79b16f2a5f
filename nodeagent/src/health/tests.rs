use super::*;
use mullion_crds::vgpuallocation::{ContainerAllocation, Device, VGPUAllocation, VGPUAllocationSpec};
use std::time::Duration;

fn settings() -> HealthSettings {
    HealthSettings { ignored_xids: vec![13], poll: Duration::from_secs(5), recovery_checks: 3 }
}

fn run(signs: &[Sign]) -> Vec<&'static str> {
    let mut health = CardHealth::default();
    let turn = |sign| match step(&mut health, sign, &settings(), Timestamp::UNIX_EPOCH) {
        None => "",
        Some(Turn::Failed(_)) => "failed",
        Some(Turn::Recovered) => "recovered",
    };
    signs.iter().map(turn).collect()
}

// DP-09, HA-06
#[test]
fn a_card_falls_ill_once_and_comes_back_after_enough_good_looks() {
    use Sign::{Error, Good, Lost, Unlisted, Xid};
    let (lost, error) =
        (Lost("NVML_ERROR_GPU_IS_LOST"), Error("nvmlDeviceGetMemoryInfo_v2", "NVML_ERROR_UNKNOWN"));
    for (case, signs, want) in [
        ("well", vec![Good, Good], vec!["", ""]),
        ("an application's XID", vec![Xid(13), Good], vec!["", ""]),
        ("a critical XID", vec![Xid(79), Good, Good, Good, Good], vec!["failed", "", "", "recovered", ""]),
        ("lost at once", vec![lost.clone()], vec!["failed"]),
        ("XID, then lost: one report", vec![Xid(79), lost.clone(), lost.clone()], vec!["failed", "", ""]),
        (
            "good looks are counted in a row",
            vec![lost.clone(), Good, Good, lost, Good, Good, Good],
            vec!["failed", "", "", "", "", "", "recovered"],
        ),
        ("one error is a hiccup", vec![error.clone(), Good, error.clone(), Good], vec!["", "", "", ""]),
        ("two are not", vec![error.clone(), error], vec!["", "failed"]),
        ("gone from the list", vec![Unlisted, Good, Good, Good], vec!["failed", "", "", "recovered"]),
    ] {
        assert_eq!(run(&signs), want, "{case}");
    }
}

fn survey(cards: &[&str], nameless: usize) -> Survey {
    let card = |uuid: &&str| SeenCard {
        card: Card { uuid: (*uuid).to_owned(), memory_mib: 1000, ..Card::default() },
        table: None,
        trouble: None,
    };
    let trouble = Trouble {
        call: "nvmlDeviceGetUUID",
        code: "NVML_ERROR_GPU_IS_LOST",
        lost: true,
        detail: String::new(),
    };
    Survey {
        driver_version: "570".to_owned(),
        cards: cards.iter().map(card).collect(),
        nameless: vec![trouble; nameless],
    }
}

fn states(world: &World) -> Vec<(String, bool, bool)> {
    let cards = world.cards.iter().flatten();
    cards.map(|(uuid, k)| (uuid.clone(), k.present, k.fault().is_none())).collect()
}

/// An allocation on this node with one container and a slice of `card`.
fn allocation_of_card(card: &str) -> VGPUAllocation {
    let device = Device { uuid: card.to_owned(), memory_mib: 1, ..Device::default() };
    let container =
        ContainerAllocation { name: "c".to_owned(), devices: vec![device], ..ContainerAllocation::default() };
    let spec = VGPUAllocationSpec {
        node_name: "n".to_owned(),
        containers: vec![container],
        ..VGPUAllocationSpec::default()
    };
    let mut object = VGPUAllocation::new("a", spec);
    object.metadata.uid = Some("uid".to_owned());
    object
}

#[test]
fn a_card_that_is_lost_stays_and_one_that_is_not_listed_goes_unless_someone_has_it() {
    let mut world = World { node: "n".into(), ..World::default() };
    let now = Timestamp::UNIX_EPOCH;
    take_in(&mut world, &survey(&["A", "B", "C"], 0), &settings(), now);
    world.refold_node();
    world.see_allocation(allocation_of_card("B"));

    let turns = take_in(&mut world, &survey(&["A", "B"], 1), &settings(), now);
    assert_eq!(turns.keys().collect::<Vec<_>>(), ["C"], "lost, not gone");
    let owned = |s: &str| s.to_owned();
    assert_eq!(
        states(&world),
        [(owned("A"), true, true), (owned("B"), true, true), (owned("C"), true, false)]
    );

    let turns = take_in(&mut world, &survey(&["A"], 0), &settings(), now);
    assert_eq!(turns.keys().collect::<Vec<_>>(), ["B"]);
    assert_eq!(states(&world), [(owned("A"), true, true), (owned("B"), false, false)], "C had nobody");

    for _ in 0..3 {
        take_in(&mut world, &survey(&["A", "B"], 0), &settings(), now);
    }
    assert_eq!(states(&world), [(owned("A"), true, true), (owned("B"), true, true)]);
}

/// A node with a card that a prepared allocation has.
fn node_with_a_pod_on(card: &str, uuids: &[&str]) -> World {
    let mut world = World { node: "n".into(), ..World::default() };
    take_in(&mut world, &placed(uuids), &settings(), Timestamp::UNIX_EPOCH);
    world.refold_node();
    world.see_allocation(allocation_of_card(card));
    world.mark(&"uid".into(), |fact| fact.prepared = true);
    world
}

/// Cards in the places 0, 1, …
fn placed(uuids: &[&str]) -> Survey {
    let mut survey = survey(uuids, 0);
    for (place, seen) in (0_u32..).zip(&mut survey.cards) {
        (seen.card.minor, seen.card.pci_address) = (place, format!("00000000:0{place}:00.0"));
    }
    survey
}

// Design section 4: the pod is evicted instead, and the card stays closed until all its allocations are released.
#[test]
fn the_pods_of_a_replaced_card_go_and_its_successor_is_closed_until_they_have() {
    let now = Timestamp::UNIX_EPOCH;
    let mut world = node_with_a_pod_on("A", &["A", "B"]);
    take_in(&mut world, &placed(&["C", "B"]), &settings(), now);
    let fault = |world: &World, uuid: &str| world.cards.as_ref().unwrap()[uuid].fault();
    assert_eq!(fault(&world, "A").unwrap(), "card C is in its place");
    assert!(fault(&world, "C").unwrap().contains("place of card A"));
    assert_eq!(fault(&world, "B"), None);
    let refused = &world.refused[&"uid".into()];
    assert_eq!((refused.code, refused.void), ("DeviceGone", false));
    world.refold_node();
    assert!(world.card_views().unwrap()[&"A".into()].replaced_by.is_some());
    for _ in 0..5 {
        take_in(&mut world, &placed(&["C", "B"]), &settings(), now);
    }
    assert!(fault(&world, "C").is_some(), "for as long as it takes");
    world.mark(&"uid".into(), |fact| fact.released = true);
    for _ in 0..settings().recovery_checks {
        assert!(fault(&world, "C").is_some());
        take_in(&mut world, &placed(&["C", "B"]), &settings(), now);
    }
    assert_eq!(states(&world), [("B".to_owned(), true, true), ("C".to_owned(), true, true)]);
}

#[test]
fn a_card_that_is_only_away_keeps_its_pods() {
    let mut world = node_with_a_pod_on("A", &["A", "B"]);
    let mut away = placed(&["A", "B"]);
    away.cards.remove(0);
    take_in(&mut world, &away, &settings(), Timestamp::UNIX_EPOCH);
    assert!(world.refused.is_empty());
    assert_eq!(world.cards.as_ref().unwrap()["A"].fault().unwrap(), "the driver does not list it");
}

#[test]
fn an_xid_before_the_first_look_counts_with_it() {
    let now = Timestamp::UNIX_EPOCH;
    let mut world = World { node: "n".into(), ..World::default() };
    let xid = |card: &str| XidSeen { card: card.to_owned(), xid: 79 };
    for card in ["A", "stranger"] {
        assert_eq!(hear(&mut world, xid(card), &settings(), now), (false, None));
    }
    let turns = take_in(&mut world, &survey(&["A", "B"], 0), &settings(), now);
    assert_eq!(turns.keys().collect::<Vec<_>>(), ["A"]);
    assert_eq!(world.cards.as_ref().unwrap()["A"].health.last_xid, Some(79));
    assert!(world.early_xids.is_empty());
    let (changed, turn) = hear(&mut world, xid("B"), &settings(), now);
    assert!(changed && matches!(turn, Some(Turn::Failed(_))));
}
