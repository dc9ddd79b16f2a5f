use std::collections::BTreeSet;

use super::*;
use crate::profile;

fn card(profile: &str, on: bool) -> Card {
    let mut card = profile::node(profile, "node-a").unwrap().cards.remove(0);
    card.mig.current = on;
    card.mig.pending = on;
    card
}

fn at(start: u32, size: u32) -> Placement {
    Placement { start, size }
}

/// Every set of instances that can be reached from an empty card, and those to which nothing can be added.
fn reachable(profile: &str, skip: &[u32]) -> (usize, usize) {
    type Set = BTreeSet<(u32, Placement)>;
    let table = card(profile, true).mig_table().unwrap();
    let (mut seen, mut open, mut maximal) = (BTreeSet::from([Set::new()]), vec![Set::new()], 0);
    while let Some(set) = open.pop() {
        let mut now = card(profile, true);
        now.mig.instances = (1..)
            .zip(&set)
            .map(|(id, &(profile_id, placement))| GpuInstance { id, profile_id, placement, compute: vec![] })
            .collect();
        let mut more = false;
        for row in table.rows.iter().filter(|r| !skip.contains(&r.id)) {
            for placement in now.free_placements(table, row) {
                more = true;
                let mut next = set.clone();
                next.insert((row.id, placement));
                if seen.insert(next.clone()) {
                    open.push(next);
                }
            }
        }
        maximal += usize::from(!more);
    }
    (seen.len(), maximal)
}

/// Oracles from an exact enumeration that knew intervals and engines only.
#[test]
fn grids_reach_exactly_the_layouts_that_exist() {
    for (case, profile, skip, want) in [
        ("A100 without +me and double", "a100", vec![20, 15], (298, 19)),
        ("A100, all profiles", "a100", vec![], (2319, 239)),
        ("H100, all profiles", "h100", vec![], (2319, 239)),
        ("A30 without +me", "a30", vec![21, 6], (26, 5)),
        ("grid of twelve, plain profiles", "rtxpro6000", vec![21, 47, 65, 67, 35, 64, 66, 32], (26, 5)),
    ] {
        assert_eq!(reachable(profile, &skip), want, "{case}");
    }
}

#[test]
fn placements_are_refused_as_the_driver_refuses_them() {
    for (case, profile, taken, (id, placement), want) in [
        ("1g never at 7", "a100", vec![], (19, at(7, 1)), Err(Refusal::InvalidArgument)),
        ("2g never at 6", "a100", vec![], (14, at(6, 2)), Err(Refusal::InvalidArgument)),
        ("3g takes four units", "h100", vec![], (9, at(0, 3)), Err(Refusal::InvalidArgument)),
        ("4g only at 0", "h100", vec![], (5, at(4, 4)), Err(Refusal::InvalidArgument)),
        ("enum is not the id", "a100", vec![], (1, at(0, 2)), Err(Refusal::InvalidArgument)),
        ("double at 6", "h100", vec![], (15, at(6, 2)), Ok(())),
        ("3g at 4 beside 1g", "a100", vec![(19, at(0, 1))], (9, at(4, 4)), Ok(())),
        ("taken", "a100", vec![(9, at(4, 4))], (19, at(6, 1)), Err(Refusal::InsufficientResources)),
        ("second +me", "h100", vec![(20, at(0, 1))], (20, at(1, 1)), Err(Refusal::InsufficientResources)),
        (
            "me.all beside 1g",
            "rtxpro6000",
            vec![(14, at(0, 3))],
            (65, at(3, 3)),
            Err(Refusal::InsufficientResources),
        ),
        ("me.all beside -me", "rtxpro6000", vec![(67, at(0, 3))], (65, at(3, 3)), Ok(())),
        ("A30 2g at 1", "a30", vec![], (5, at(1, 2)), Err(Refusal::InvalidArgument)),
        ("overflowing start", "a100", vec![], (19, at(u32::MAX, u32::MAX)), Err(Refusal::InvalidArgument)),
    ] {
        let mut card = card(profile, true);
        for (id, placement) in taken {
            card.create_gpu_instance(id, Some(placement)).unwrap();
        }
        assert_eq!(card.create_gpu_instance(id, Some(placement)).map(drop), want, "{case}");
    }
}

/// The documented known issue: the driver's own choice of places for 1g, 1g, 2g leaves none for a 3g.
#[test]
fn the_drivers_own_choice_walks_into_the_trap() {
    let mut card = card("a100", true);
    for id in [19, 19, 14] {
        card.create_gpu_instance(id, None).unwrap();
    }
    assert_eq!(card.create_gpu_instance(9, None), Err(Refusal::InsufficientResources));
}

#[test]
fn remaining_counts_what_still_fits() {
    let mut card = card("a100", true);
    let table = card.active_table().unwrap();
    let remaining = |c: &Card| table.rows.iter().map(|r| c.remaining(table, r)).collect::<Vec<_>>();
    assert_eq!(remaining(&card), table.rows.iter().map(|r| r.max).collect::<Vec<_>>());
    card.create_gpu_instance(9, Some(at(4, 4))).unwrap();
    assert_eq!(remaining(&card), [4, 1, 2, 2, 1, 1, 0]);
}

#[test]
fn ids_do_not_follow_from_the_placement_but_uuids_from_the_ids() {
    let mut card = card("h100", true);
    let first = card.create_gpu_instance(19, Some(at(3, 1))).unwrap();
    let ci = card.create_compute_instance(first, 0).unwrap();
    let uuid = card.gpu_instance(first).unwrap().compute[0].uuid.clone();
    assert!(uuid.starts_with("MIG-") && uuid.len() == 40);
    card.destroy_compute_instance(first, ci).unwrap();
    card.destroy_gpu_instance(first).unwrap();
    let second = card.create_gpu_instance(19, Some(at(3, 1))).unwrap();
    assert_ne!(first, second);
    let mut seen = BTreeSet::from([first, second]);
    let mut again = second;
    while again != first {
        card.destroy_gpu_instance(again).unwrap();
        again = card.create_gpu_instance(19, Some(at(3, 1))).unwrap();
        seen.insert(again);
    }
    assert_eq!(seen, (1..=14).collect());
    card.create_compute_instance(first, 0).unwrap();
    assert_eq!(card.gpu_instance(first).unwrap().compute[0].uuid, uuid);
}

#[test]
fn destroy_names_what_is_in_the_way() {
    let mut card = card("a100", true);
    let gi = card.create_gpu_instance(9, None).unwrap();
    let ci = card.create_compute_instance(gi, 2).unwrap();
    assert_eq!(card.destroy_gpu_instance(gi), Err(Refusal::InUse));
    card.processes.push(crate::Process { pid: 7, memory_mib: 1, sm_percent: 0, gpu_instance: Some(gi) });
    assert_eq!(card.destroy_compute_instance(gi, ci), Err(Refusal::InUse));
    card.processes.clear();
    card.destroy_compute_instance(gi, ci).unwrap();
    assert_eq!(card.destroy_compute_instance(gi, ci), Err(Refusal::NotFound));
    card.destroy_gpu_instance(gi).unwrap();
    assert_eq!(card.destroy_gpu_instance(gi), Err(Refusal::NotFound));
}

#[test]
fn compute_instances_share_the_slices_of_their_gpu_instance() {
    let mut card = card("a100", true);
    let seven = card.create_gpu_instance(0, None).unwrap();
    let left = |c: &Card, id| c.compute_remaining(seven, id).unwrap().1;
    assert_eq!([0, 1, 2, 3, 4].map(|id| left(&card, id)), [7, 3, 2, 1, 1]);
    card.create_compute_instance(seven, 2).unwrap();
    assert_eq!([0, 1, 2, 3, 4].map(|id| left(&card, id)), [4, 2, 1, 1, 0]);
    assert_eq!(card.create_compute_instance(seven, 4), Err(Refusal::InsufficientResources));
    assert_eq!(card.create_compute_instance(seven, 9), Err(Refusal::InvalidArgument));
    let p = at(6, 2);
    assert_eq!(card.create_compute_instance_at(seven, 1, Some(p)), Err(Refusal::InvalidArgument));
    card.create_compute_instance_at(seven, 1, Some(at(5, 2))).unwrap();
    assert_eq!(
        card.create_compute_instance_at(seven, 1, Some(at(4, 2))),
        Err(Refusal::InsufficientResources)
    );
    let slots: Vec<_> = card.gpu_instance(seven).unwrap().compute.iter().map(|c| c.slot).collect();
    assert_eq!(slots, [0, 1]);
}

#[test]
fn a_mode_change_waits_for_a_reset_before_hopper() {
    for (case, profile, busy, status, now) in [
        ("Ampere", "a100", false, Err(Refusal::ResetRequired), false),
        ("Ampere in use", "a100", true, Err(Refusal::InUse), false),
        ("Hopper", "h100", false, Ok(()), true),
        ("Hopper in use", "h100", true, Err(Refusal::InUse), false),
    ] {
        let mut card = card(profile, false);
        if busy {
            card.processes.push(crate::Process { pid: 7, memory_mib: 1, sm_percent: 0, gpu_instance: None });
        }
        assert_eq!(card.create_gpu_instance(0, None), Err(Refusal::NotSupported), "{case}");
        assert_eq!(card.set_mig_mode(true), Ok(status), "{case}");
        assert_eq!((card.mig.current, card.mig.pending), (now, true), "{case}");
        card.processes.clear();
        card.reset();
        assert!(card.mig.current, "{case}");
        card.create_gpu_instance(0, None).unwrap();
        assert_eq!(card.set_mig_mode(false), Ok(Err(Refusal::InUse)), "{case}");
        card.reset();
        assert!(!card.mig.current && card.mig.instances.is_empty(), "{case}");
    }
    let mut card = card("a100", false);
    card.mig.capable = false;
    assert_eq!(card.set_mig_mode(true), Err(Refusal::NotSupported));
}
