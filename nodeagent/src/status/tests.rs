use super::*;
use crate::state::Unenforced;
use crate::world::Witness;
use crate::world::{PodSeen, Refused};
use mullion_crds::vgpuallocation::{ContainerAllocation, Kind, PodReference, VGPUAllocationSpec};

fn object() -> VGPUAllocation {
    let container = |name: &str, kind| ContainerAllocation {
        name: name.to_owned(),
        kind,
        ..ContainerAllocation::default()
    };
    let spec = VGPUAllocationSpec {
        pod: PodReference { name: "p".to_owned(), uid: "pod-uid".to_owned() },
        node_name: "n".to_owned(),
        containers: vec![container("i", Kind::Init), container("a", Kind::App)],
        ..VGPUAllocationSpec::default()
    };
    let mut object = VGPUAllocation::new("p-1", spec);
    object.metadata.uid = Some("uid".to_owned());
    object
}

fn grant(container: &str, enforced: bool) -> Grant {
    Grant {
        grant: format!("grant-of-{container}"),
        allocation: "uid".to_owned(),
        pod: "pod-uid".to_owned(),
        container: container.to_owned(),
        device_ids: vec!["slot-0000".to_owned()],
        enforced,
        unenforced: (!enforced)
            .then(|| Unenforced { code: "HookMissing".to_owned(), message: "no file".to_owned() }),
    }
}

fn says(status: &VGPUAllocationStatus) -> Vec<(String, String, String)> {
    let conditions = status.conditions.iter();
    conditions.map(|c| (c.type_.clone(), c.status.clone(), c.reason.clone())).collect()
}

fn claim(kind: &str, status: &str, reason: &str) -> (String, String, String) {
    (kind.to_owned(), status.to_owned(), reason.to_owned())
}

#[test]
fn nothing_is_written_until_something_happened_and_then_once() {
    let mut world = World { node: "n".into(), ..World::default() };
    let mut object = object();
    world.see_allocation(object.clone());
    let now = Timestamp::UNIX_EPOCH;
    assert_eq!(desired(&world, &object, now), VGPUAllocationStatus::default());
    for container in ["a", "i"] {
        let grant = grant(container, false);
        world.grants.insert(grant.grant.clone(), grant);
    }
    let status = desired(&world, &object, now);
    assert_eq!(status.phase, Phase::Prepared);
    let prepared = [
        claim("Bound", "True", "PodBound"),
        claim("Prepared", "True", "GrantsWritten"),
        claim("Enforced", "False", "HookMissing"),
    ];
    assert_eq!(says(&status), prepared);
    assert_eq!(status.containers.iter().map(|c| c.name.as_str()).collect::<Vec<_>>(), ["a", "i"]);
    object.status = Some(status.clone());
    let later = Timestamp::from_second(1000).unwrap();
    assert_eq!(desired(&world, &object, later), status, "nothing new");
    let pod = PodSeen { init_done: true, ..PodSeen::default() };
    world.pods = Some(BTreeMap::from([("pod-uid".into(), pod)]));
    let status = desired(&world, &object, later);
    assert_eq!(says(&status).last(), Some(&claim("InitDone", "True", "InitEnded")));
    assert_eq!(status.conditions[0].last_transition_time, Time(now), "times of what holds stay");
}

#[test]
fn limits_that_nothing_holds_say_why() {
    let mut world = World { node: "n".into(), ..World::default() };
    let mut object = object();
    world.see_allocation(object.clone());
    let why = |code: &str| Some(Unenforced { code: code.to_owned(), message: format!("because {code}") });
    for (case, of_a, of_i, want) in [
        ("known from the audit log alone", None, None, ("Unknown", "NotRecorded")),
        ("one that cannot be loaded", why("HookInvalid"), None, ("False", "HookInvalid")),
        ("state lost after that", None, None, ("False", "HookInvalid")),
        ("none", why("HookMissing"), why("HookInvalid"), ("False", "HookMissing")),
    ] {
        for (container, unenforced) in [("a", of_a), ("i", of_i)] {
            let grant = Grant { unenforced, ..grant(container, false) };
            world.grants.insert(grant.grant.clone(), grant);
        }
        let status = desired(&world, &object, Timestamp::UNIX_EPOCH);
        let found = says(&status).into_iter().find(|c| c.0 == ENFORCED);
        assert_eq!(found, Some(claim(ENFORCED, want.0, want.1)), "{case}");
        if want.0 == "False" {
            let message = &status.conditions.iter().find(|c| c.type_ == ENFORCED).unwrap().message;
            assert_eq!(message, &format!("because {}", want.1), "{case}");
        }
        object.status = Some(status);
    }
}

/// What a former run saw at work may be anything since, where nobody looks any more.
#[test]
fn limits_that_nobody_can_tell_of_any_more_are_not_said_to_hold() {
    let mut world = World { node: "n".into(), ..World::default() };
    let mut object = object();
    world.see_allocation(object.clone());
    let init_done = |world: &mut World| world.mark(&"uid".into(), |f| f.init_done = true);
    for (case, told, a_enforced, init_ended, want) in [
        ("told that they hold", ("True", "LimitsHold"), false, false, ("Unknown", "NotRecorded")),
        ("told that it is mounted", ("Unknown", "LibraryMounted"), false, false, ("Unknown", "NotRecorded")),
        ("told that they do not", ("False", "HookInvalid"), false, false, ("False", "HookInvalid")),
        ("one of two is known", ("True", "LimitsHold"), true, false, ("Unknown", "NotRecorded")),
        ("the other one has ended", ("True", "LimitsHold"), true, true, ("True", "LimitsHold")),
    ] {
        for (container, enforced) in [("a", a_enforced), ("i", false)] {
            let grant = Grant { unenforced: None, ..grant(container, enforced) };
            world.grants.insert(grant.grant.clone(), grant);
        }
        if init_ended {
            init_done(&mut world);
        }
        let mut status = VGPUAllocationStatus::default();
        set(&mut status, &[Claim::new(ENFORCED, told.0, told.1, "")], Timestamp::UNIX_EPOCH);
        object.status = Some(status);
        let status = desired(&world, &object, Timestamp::UNIX_EPOCH);
        let found = says(&status).into_iter().find(|c| c.0 == ENFORCED);
        assert_eq!(found, Some(claim(ENFORCED, want.0, want.1)), "{case}");
    }
}

#[test]
fn a_release_that_waits_says_for_what() {
    let mut world = World { node: "n".into(), ..World::default() };
    let mut object = object();
    world.see_allocation(object.clone());
    let grant = grant("a", false);
    world.grants.insert(grant.grant.clone(), grant);
    let uid = AllocationUid(object.uid().unwrap());
    world.waiting.insert(uid.clone(), Witness::Process { card: "GPU-7".to_owned(), pid: 4711 });
    let status = desired(&world, &object, Timestamp::UNIX_EPOCH);
    assert_eq!(status.phase, Phase::Releasing);
    assert_eq!(says(&status).last(), Some(&claim("Released", "False", "ProcessOnCard")));
    let message = &status.conditions.last().unwrap().message;
    assert!(message.contains("GPU-7") && message.contains("4711"), "{message}");
    // What it waits for now, and once; after a restart, when nobody knows yet, nothing is taken back.
    object.status = Some(status.clone());
    assert_eq!(desired(&world, &object, Timestamp::UNIX_EPOCH), status);
    world.waiting.clear();
    assert_eq!(desired(&world, &object, Timestamp::UNIX_EPOCH), status);
    for (witness, code, text) in [
        (Witness::Process { card: "GPU-7".to_owned(), pid: 4712 }, "ProcessOnCard", "4712"),
        (Witness::Cgroup { path: "/sys/fs/cgroup/kubepods/pod1".into() }, "CgroupLives", "kubepods/pod1"),
        (Witness::Unproved { code: "DriverSilent" }, "ReleaseUnproved", "DriverSilent"),
    ] {
        world.waiting.insert(uid.clone(), witness);
        let status = desired(&world, &object, Timestamp::UNIX_EPOCH);
        assert_eq!(says(&status).last(), Some(&claim("Released", "False", code)));
        let message = &status.conditions.last().unwrap().message;
        assert!(message.contains(text), "{message}");
    }
}

#[test]
fn limits_are_said_to_hold_once_they_were_seen_to_and_not_before() {
    let mut world = World { node: "n".into(), ..World::default() };
    let mut object = object();
    world.see_allocation(object.clone());
    let grant = grant("a", true);
    world.grants.insert(grant.grant.clone(), grant);
    let bypassed = || Verdict::Bypassed { message: "container a: 9 GiB".to_owned() };
    let damaged = || Verdict::Damaged { message: "container a: RegionMagic".to_owned() };
    for (case, verdict, want) in [
        ("not looked at yet", None, ("Unknown", "LibraryMounted")),
        ("nothing attached", Some(Verdict::Waiting), ("Unknown", "LibraryMounted")),
        ("at work", Some(Verdict::Holds), ("True", "LimitsHold")),
        ("another run of the agent has not looked yet", None, ("True", "LimitsHold")),
        ("more than can be explained", Some(bypassed()), ("False", "LimitBypassed")),
        ("another run again", None, ("False", "LimitBypassed")),
        ("gone", Some(Verdict::Holds), ("True", "LimitsHold")),
        ("its usage file tells nothing", Some(damaged()), ("False", "UsageFileDamaged")),
        ("another run, before its first look", None, ("False", "UsageFileDamaged")),
        ("readable again", Some(Verdict::Holds), ("True", "LimitsHold")),
    ] {
        world.verdicts = verdict.map(|v| BTreeMap::from([("uid".into(), v)]));
        let status = desired(&world, &object, Timestamp::UNIX_EPOCH);
        let found = says(&status).into_iter().find(|c| c.0 == ENFORCED);
        assert_eq!(found, Some(claim(ENFORCED, want.0, want.1)), "{case}");
        object.status = Some(status);
    }
}

// DP-09: the pods of a failed card are told, and told again when it is back; nobody else is.
#[test]
fn a_failed_card_shows_on_its_own_allocations() {
    use crate::health::{Illness, Known};
    use mullion_crds::vgpuallocation::Device;
    let mut world = World { node: "n".into(), ..World::default() };
    let mut object = object();
    object.spec.containers[1].devices = vec![Device { uuid: "A".to_owned(), ..Device::default() }];
    world.see_allocation(object.clone());
    let grant = grant("a", true);
    world.grants.insert(grant.grant.clone(), grant);
    world.cards = Some(BTreeMap::from(["A", "B"].map(|u| (u.to_owned(), Known::default()))));
    let ill = |world: &mut World, uuid: &str, ill: bool| {
        let illness = Illness { xid: Some(79), message: "XID 79".to_owned() };
        world.cards.as_mut().unwrap().get_mut(uuid).unwrap().health.illness = ill.then_some(illness);
    };
    let last = |world: &World, object: &VGPUAllocation| {
        says(&desired(world, object, Timestamp::UNIX_EPOCH)).into_iter().find(|c| c.0 == HEALTHY)
    };
    ill(&mut world, "B", true);
    assert_eq!(last(&world, &object), None, "another card");
    ill(&mut world, "A", true);
    assert_eq!(last(&world, &object), Some(claim(HEALTHY, "False", "CardUnhealthy")));
    object.status = Some(desired(&world, &object, Timestamp::UNIX_EPOCH));
    ill(&mut world, "A", false);
    assert_eq!(last(&world, &object), Some(claim(HEALTHY, "True", "CardRecovered")));
}

// DP-06, DP-12: marked, so that the controller frees the share.
#[test]
fn what_can_never_be_given_is_said() {
    let mut world = World { node: "n".into(), ..World::default() };
    let object = object();
    world.see_allocation(object.clone());
    for (void, phase) in [(false, Phase::Failed), (true, Phase::Void)] {
        let refused = Refused { code: "DeviceGone", message: "gone".to_owned(), void };
        world.refused.insert("uid".into(), refused);
        let status = desired(&world, &object, Timestamp::UNIX_EPOCH);
        assert_eq!((status.phase, says(&status)), (phase, vec![claim("Prepared", "False", "DeviceGone")]));
    }
}
