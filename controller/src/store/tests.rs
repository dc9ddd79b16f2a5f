//! The fold of watches: what vanishes, what cannot be read, what order does not matter.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::Pod;
use mullion_core::facts::Event;
use serde_json::json;

use super::*;
use crate::fixtures::{card, kube_node, node, request};

fn store() -> Store {
    let store = Store::new(Defaults::default());
    store.write(|facts| {
        facts.fold(&Event::NodeObserved(node("n", vec![card("GPU-1", 1000)])));
        facts.fold(&Event::KubeNodeObserved(kube_node("n", 10)));
    });
    store
}

fn pod(uid: &str) -> PodRef {
    PodRef { namespace: "ns".into(), name: format!("pod-{uid}"), uid: uid.into() }
}

/// An allocation as the API server would show it.
fn made(store: &Store, uid: &str, memory: u64) -> VGPUAllocation {
    let Ok(Claim::Held(object)) = store.claim(&pod(uid), &request(memory), &"n".into(), 0) else {
        panic!("no room")
    };
    let mut object = *object;
    object.metadata.uid = Some(format!("allocation-{uid}"));
    object.metadata.resource_version = Some("10".to_owned());
    store.write(|facts| facts.allocation_seen(object.clone()));
    object
}

fn used(store: &Store) -> u64 {
    store.read(|facts| facts.ledger().card_usage(&"n".into()).iter().map(|card| card.used.memory.0).sum())
}

// FS-09: a delete that was missed shows in the next list.
#[test]
fn a_list_ends_what_it_does_not_name() {
    let store = store();
    made(&store, "a", 300);
    made(&store, "b", 500);
    assert_eq!(used(&store), 800);
    store.write(|facts| facts.allocations_listed(&BTreeSet::from(["allocation-b".to_owned()])));
    assert_eq!(used(&store), 500);
    assert!(store.take_gained().contains(&"n".into()));
    store.write(|facts| facts.nodes_listed(&BTreeSet::new()));
    store.write(|facts| facts.gpu_nodes_listed(&BTreeSet::new()));
    store.write(|facts| facts.allocations_listed(&BTreeSet::new()));
    assert_eq!(used(&store), 0);
}

// FS-09: and a tombstone needs nothing but the uid.
#[test]
fn a_delete_needs_no_object() {
    let store = store();
    let object = made(&store, "a", 300);
    store.write(|facts| facts.allocation_gone(&"allocation-a".into()));
    assert_eq!(used(&store), 0);
    store.write(|facts| facts.allocation_seen(object));
    assert_eq!(used(&store), 0, "a late observation does not bring it back");
    assert!(store.read(|facts| facts.allocation_of_pod("a").is_none()));
}

// BL-11: the caches hold what was read last, whatever order answers and watch come in.
#[test]
fn answers_and_watches_agree_in_any_order() {
    let store = store();
    let old = made(&store, "a", 300);
    let mut new = old.clone();
    new.metadata.resource_version = Some("11".to_owned());
    new.status = Some(serde_json::from_value(json!({"phase": "Prepared", "conditions": [{"type": "Prepared",
        "status": "True", "reason": "Prepared", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"}]})).unwrap());
    store.write(|facts| facts.allocation_seen(new.clone()));
    store.write(|facts| facts.allocation_seen(old));
    store.read(|facts| {
        let kept = facts.allocation(&"allocation-a".into()).unwrap();
        assert_eq!(kept.metadata.resource_version.as_deref(), Some("11"));
        assert!(facts.ledger().allocation(&"allocation-a".into()).unwrap().prepared);
    });
}

#[test]
fn the_ledger_equals_a_fresh_fold() {
    let store = Store::new(Defaults::default());
    let gpu_node: mullion_crds::GPUNode = serde_json::from_value(json!({
        "metadata": {"name": "n", "resourceVersion": "1"}, "spec": {},
        "status": {"nodeUID": "u", "observation": 1, "bootId": "b", "agentVersion": "0",
            "conditions": [{"type": "DriverReady", "status": "True", "reason": "r", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"}],
            "cards": [{"uuid": "GPU-1", "index": 0, "minor": 0, "model": "m", "vendor": "nvidia", "architecture": "hopper",
                "memoryMiB": 1000, "pciAddress": "0000:01:00.0", "health": {"state": "Healthy"}}]},
    }))
    .unwrap();
    let kube: k8s_openapi::api::core::v1::Node = serde_json::from_value(json!({
        "metadata": {"name": "n", "uid": "u"}, "status": {"allocatable": {"nvidia.com/gpu": "10"}},
    }))
    .unwrap();
    store.write(|facts| {
        facts.gpu_node_seen(gpu_node);
        facts.node_seen(&kube);
    });
    for (uid, memory) in [("a", 300), ("b", 300)] {
        made(&store, uid, memory);
        assert_eq!(store.read(Facts::drift), 0);
    }
    store.write(|facts| facts.allocation_gone(&"allocation-a".into()));
    assert_eq!(store.read(Facts::drift), 0);
    // What is unaccounted for is part of it.
    store.write(|facts| {
        facts.allocation_unreadable("x".to_owned(), Some("n".to_owned()));
        facts.pod_seen(
            &serde_json::from_value(json!({"metadata": {"name": "c", "namespace": "ns", "uid": "c"},
                "spec": {"nodeName": "n", "containers": [{"name": "main", "resources": {"limits": {"nvidia.com/gpu": "1"}}}]},
                "status": {"phase": "Running", "containerStatuses": [{"name": "main", "image": "i", "imageID": "", "ready": true,
                    "restartCount": 0, "state": {"running": {}}}]}}))
            .unwrap(),
        );
    });
    assert_eq!(store.read(|facts| facts.ledger().unaccounted(&"n".into()).count()), 2);
    assert_eq!(store.read(Facts::drift), 0);
    // A ledger that was fed something that no object says is found out.
    store.write(|facts| facts.fold(&Event::AllocationGone("allocation-b".into())));
    assert!(store.read(Facts::drift) > 0);
}

#[test]
fn readiness_names_what_is_missing() {
    let store = store();
    for source in [Source::GpuNodes, Source::Strangers, Source::Pods, Source::Nodes] {
        assert_eq!(store.ready().unwrap_err().code(), "NotReady");
        store.synced(source);
    }
    let error = store.ready().unwrap_err().to_string();
    assert!(error.contains("VGPUAllocation") && !error.contains("GPUNode"), "{error}");
    store.synced(Source::Allocations);
    assert!(store.ready().is_ok());
}

#[test]
fn the_end_of_a_pod_says_whether_it_was_bound() {
    let store = store();
    let seen = |uid: &str, node: Option<&str>| -> Pod {
        serde_json::from_value(json!({"metadata": {"name": uid, "namespace": "ns", "uid": uid},
            "spec": {"nodeName": node, "containers": []}}))
        .unwrap()
    };
    store.write(|facts| {
        facts.pod_seen(&seen("a", None));
        facts.pod_gone("a".to_owned(), Some(&seen("a", None)));
        facts.pod_gone("b".to_owned(), Some(&seen("b", Some("n"))));
        facts.pod_seen(&seen("c", Some("n")));
        facts.pods_listed(&BTreeSet::new());
    });
    store.read(|facts| {
        let ends = ["a", "b", "c"].map(|uid| facts.departed_bound(uid));
        assert_eq!(ends, [Some(false), Some(true), None]);
        assert_eq!(facts.pods().count(), 0);
    });
}

#[test]
fn gains_are_noted_and_losses_are_not() {
    let store = store();
    store.take_gained();
    made(&store, "a", 300);
    assert!(store.take_gained().is_empty(), "giving is no gain");
    store.write(|facts| facts.fold(&Event::KubeNodeGone("n".into())));
    assert!(store.take_gained().is_empty());
    store.write(|facts| facts.fold(&Event::KubeNodeObserved(kube_node("n", 10))));
    assert_eq!(store.take_gained().len(), 1);
    store.write(|facts| facts.fold(&Event::KubeNodeObserved(kube_node("n", 10))));
    assert!(store.take_gained().is_empty(), "nothing new");
    let again = mullion_core::facts::NodeFact { observation: 2, ..node("n", vec![card("GPU-1", 1000)]) };
    store.write(|facts| facts.fold(&Event::NodeObserved(again)));
    assert!(store.take_gained().is_empty(), "the agent wrote something else");
    let Ok(Claim::Held(_)) = store.claim(&pod("h"), &request(1), &"n".into(), 0) else { panic!("held") };
    store.write(|facts| facts.fold(&Event::HoldEnded("h".into())));
    assert_eq!(store.take_gained().len(), 1, "a bind that failed gives back");
}

// WH-04: who is reported, and who misses nothing.
#[test]
fn strangers_are_pods_that_ask_for_something() {
    for (case, limits, want) in [
        ("asks", json!({"nvidia.com/gpu": "1"}), 1),
        ("asks for what is not served", json!({"nvidia.com/gpu-mem": "1"}), 1),
        ("asks for none", json!({"nvidia.com/gpu": "0"}), 0),
        ("asks for something else", json!({"cpu": "1"}), 0),
    ] {
        let store = store();
        let pod: Pod =
            serde_json::from_value(json!({"metadata": {"name": "p", "namespace": "ns", "uid": "u"},
            "spec": {"schedulerName": "default-scheduler", "containers": [
                {"name": "main", "resources": {"limits": limits}}]}}))
            .unwrap();
        store.write(|facts| facts.stranger_seen(&pod));
        assert_eq!(store.read(|facts| facts.strangers().count()), want, "{case}");
    }
}

// Somebody strips an allocation while its pod runs: the node keeps the cards for the pod, and we place nothing there
// until it has ended.
#[test]
fn a_node_is_closed_while_a_pod_runs_there_without_its_allocation() {
    let seen = |status: serde_json::Value| -> Pod {
        serde_json::from_value(json!({"metadata": {"name": "pod-a", "namespace": "ns", "uid": "a"},
            "spec": {"nodeName": "n", "schedulerName": "mullion-scheduler",
                "initContainers": [{"name": "first"}],
                "containers": [
                    {"name": "main", "resources": {"limits": {"nvidia.com/gpumem": "300"}}},
                    {"name": "log"}]},
            "status": status}))
        .unwrap()
    };
    let status = |phase: &str, name: &str, state: serde_json::Value, restarts: u32| {
        json!({"phase": phase, "containerStatuses": [{"name": name, "image": "i", "imageID": "", "ready": false,
            "restartCount": restarts, "state": state}]})
    };
    let (runs, waits) = (json!({"running": {}}), json!({"waiting": {"reason": "CreateContainerError"}}));
    for (case, status, closed) in [
        ("it runs", status("Running", "main", runs.clone(), 0), true),
        ("nothing of it ran", status("Pending", "main", waits.clone(), 0), false),
        ("it ran and starts again", status("Running", "main", waits, 1), true),
        ("what runs has no GPU", status("Running", "log", runs.clone(), 0), false),
        ("it has ended", status("Succeeded", "main", json!({"terminated": {"exitCode": 0}}), 0), false),
    ] {
        let store = store();
        made(&store, "a", 300);
        store.write(|facts| facts.pod_seen(&seen(status)));
        let fits =
            || store.read(|facts| facts.ledger().fit(&request(1), &"n".into()).map_err(|r| r.code()).err());
        assert_eq!(fits(), None, "{case}: it has its allocation");
        store.write(|facts| facts.allocation_gone(&"allocation-a".into()));
        assert_eq!(fits(), closed.then_some("HoldingsUnknown"), "{case}");
        store.take_gained();
        store.write(|facts| facts.pods_listed(&BTreeSet::new()));
        assert_eq!(fits(), None, "{case}: it is gone");
        assert_eq!(store.take_gained().contains(&"n".into()), closed, "{case}: whoever waits is woken");
    }
}
