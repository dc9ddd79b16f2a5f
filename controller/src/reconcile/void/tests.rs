//! Who cannot stay, as a table.

use mullion_core::facts::Event;
use mullion_core::request::Defaults;
use serde_json::json;

use super::*;
use crate::fake_api::FakeApi;
use crate::fixtures::{card, context, kube_node, node};
use crate::store::Store;

fn allocation(name: &str, sequence: u64, memory: u64, phase: &str, uuid: &str) -> serde_json::Value {
    let prepared = if phase == "Prepared" { "True" } else { "False" };
    json!({
        "metadata": {"name": format!("{name}-a"), "namespace": "ns", "uid": format!("a-{name}"), "creationTimestamp": "2026-01-01T00:00:00Z"},
        "spec": {"pod": {"name": name, "uid": name}, "nodeName": "n", "sequence": sequence,
            "summary": {"gpu": uuid, "kind": "vgpu", "memoryMiB": memory, "corePercent": 0},
            "containers": [{"name": "main", "kind": "app", "request": {"count": 1, "memoryMiB": memory, "corePercent": 0},
                "devices": [{"uuid": uuid, "memoryMiB": memory, "corePercent": 0}]}]},
        "status": {"phase": phase, "conditions": [{"type": "Prepared", "status": prepared, "reason": "HookMissing",
            "message": "no libvgpu.so", "lastTransitionTime": "2026-01-01T00:00:00Z"}]},
    })
}

fn pod(name: &str, node: Option<&str>, phase: &str, deleting: bool) -> serde_json::Value {
    let mut pod = json!({"metadata": {"name": name, "namespace": "ns", "uid": name},
        "spec": {"nodeName": node, "schedulerName": "mullion-scheduler", "containers": [
            {"name": "main", "resources": {"limits": {"nvidia.com/gpumem": "600"}}}]},
        "status": {"phase": phase}});
    if deleting {
        pod["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
    }
    pod
}

/// The same with its container running.
fn started(mut pod: serde_json::Value) -> serde_json::Value {
    pod["status"]["containerStatuses"] = json!([{"name": "main", "image": "i", "imageID": "", "ready": true,
        "restartCount": 0, "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}}]);
    pod
}

#[test]
fn who_cannot_stay() {
    let first = allocation("first", 1, 600, "Bound", "GPU-1");
    for (case, allocations, pod, want) in [
        ("it holds", vec![first.clone()], pod("first", Some("n"), "Pending", false), None),
        (
            "it lost",
            vec![first.clone(), allocation("p", 2, 600, "Bound", "GPU-1")],
            pod("p", Some("n"), "Pending", false),
            Some("AllocationVoid"),
        ),
        (
            "what is prepared never loses",
            vec![first.clone(), allocation("p", 2, 600, "Prepared", "GPU-1")],
            pod("p", Some("n"), "Running", false),
            None,
        ),
        (
            "and then the other one does",
            vec![first.clone(), allocation("p", 2, 600, "Prepared", "GPU-1")],
            pod("first", Some("n"), "Pending", false),
            Some("AllocationVoid"),
        ),
        (
            "its card is gone",
            vec![allocation("p", 1, 600, "Bound", "GPU-9")],
            pod("p", Some("n"), "Pending", false),
            Some("DeviceGone"),
        ),
        (
            "the node failed it",
            vec![allocation("p", 1, 600, "Failed", "GPU-1")],
            pod("p", Some("n"), "Pending", false),
            Some("AllocationFailed"),
        ),
        ("it has none", vec![], pod("p", Some("n"), "Pending", false), Some("AllocationMissing")),
        ("it has none, and what runs has no GPU", vec![], pod("p", Some("n"), "Running", false), None),
        (
            "its allocation was removed by hand while it ran",
            vec![],
            started(pod("p", Some("n"), "Running", false)),
            Some("AllocationMissing"),
        ),
        (
            "while its init container ran",
            vec![],
            started(pod("p", Some("n"), "Pending", false)),
            Some("AllocationMissing"),
        ),
        ("it ran and has ended", vec![], started(pod("p", Some("n"), "Failed", false)), None),
        ("it waits", vec![], pod("p", None, "Pending", false), None),
        ("it goes already", vec![], pod("p", Some("n"), "Pending", true), None),
        // BL-05: a pod that has failed is over, not in the way.
        ("it has ended", vec![], pod("p", Some("n"), "Failed", false), None),
    ] {
        let store = Store::new(Defaults::default());
        store.write(|facts| {
            facts.fold(&Event::NodeObserved(node("n", vec![card("GPU-1", 1000)])));
            facts.fold(&Event::KubeNodeObserved(kube_node("n", 10)));
            for object in allocations {
                facts.allocation_seen(serde_json::from_value(object).unwrap());
            }
            facts.pod_seen(&serde_json::from_value(pod.clone()).unwrap());
        });
        let found = store.read(|facts| why(facts, facts.pods().next().unwrap()));
        assert_eq!(found.as_ref().map(|why| why.code), want, "{case}: {found:?}");
        if want == Some("AllocationFailed") {
            assert!(found.unwrap().text.contains("HookMissing: no libvgpu.so"), "{case}");
        }
    }
}

fn gpu_node(memory: u64) -> serde_json::Value {
    json!({"metadata": {"name": "n"}, "spec": {}, "status": {"nodeUID": "u", "observation": 1, "cards": [
        {"uuid": "GPU-1", "index": 0, "minor": 0, "model": "m", "vendor": "nvidia", "architecture": "hopper",
            "memoryMiB": memory, "pciAddress": "0000:01:00.0", "health": {"state": "Healthy"}}]}})
}

/// What our watches show is a reason to look, the API server's word a reason to evict.
#[tokio::test]
async fn nobody_is_evicted_on_hearsay() {
    let first = allocation("first", 1, 600, "Bound", "GPU-1");
    let mut over = first.clone();
    over["status"]["conditions"] = json!([{"type": "Released", "status": "True", "reason": "r", "message": "",
        "lastTransitionTime": "2026-01-01T00:00:00Z"}]);
    let mut elsewhere = first.clone();
    elsewhere["spec"]["nodeName"] = json!("m");
    for (case, others, there, memory, evicted) in [
        ("it lost", vec![first.clone()], pod("p", Some("n"), "Pending", false), 1000, true),
        (
            "the other one was released meanwhile",
            vec![over],
            pod("p", Some("n"), "Pending", false),
            1000,
            false,
        ),
        ("the other one is gone", vec![], pod("p", Some("n"), "Pending", false), 1000, false),
        ("the other one is elsewhere", vec![elsewhere], pod("p", Some("n"), "Pending", false), 1000, false),
        ("the card has grown", vec![first.clone()], pod("p", Some("n"), "Pending", false), 2000, false),
        ("it goes already", vec![first.clone()], pod("p", Some("n"), "Pending", true), 1000, false),
        ("it has ended", vec![first.clone()], pod("p", Some("n"), "Succeeded", false), 1000, false),
        ("another pod of that name", vec![first.clone()], pod("q", Some("n"), "Pending", false), 1000, false),
    ] {
        let api = FakeApi::default();
        let context = context(&api);
        for object in others.into_iter().chain([allocation("p", 2, 600, "Bound", "GPU-1")]) {
            let path = format!("vgpuallocations/ns/{}", object["metadata"]["name"].as_str().unwrap());
            api.put(&path, object);
        }
        api.put("pods/ns/p", there);
        api.put("gpunodes/n", gpu_node(memory));
        // By our watches it lost.
        context.store.write(|facts| {
            facts.fold(&Event::NodeObserved(node("n", vec![card("GPU-1", 1000)])));
            for object in [first.clone(), allocation("p", 2, 600, "Bound", "GPU-1")] {
                facts.allocation_seen(serde_json::from_value(object).unwrap());
            }
            facts.pod_seen(&serde_json::from_value(pod("p", Some("n"), "Pending", false)).unwrap());
        });
        pass(&context, &mut Known::default()).await;
        let calls = api.calls();
        let asked = calls.iter().any(|call| call == "POST pods/ns/p/eviction");
        assert_eq!(asked, evicted, "{case}: {calls:?}");
    }
}

/// It works: a person says when it may end. What its node keeps for it is in nobody's books, so nothing is placed there.
#[tokio::test]
async fn a_pod_that_runs_without_its_allocation_is_told_once_and_left() {
    let api = FakeApi::default();
    let context = context(&api);
    let mut running = started(pod("p", Some("n"), "Running", false));
    running["metadata"]["ownerReferences"] =
        json!([{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": "r", "controller": true}]);
    api.put("pods/ns/p", running.clone());
    context.store.write(|facts| facts.pod_seen(&serde_json::from_value(running).unwrap()));
    let (record, why) = context.store.read(|facts| {
        let record = facts.pods().next().unwrap();
        (record.clone(), why(facts, record).unwrap())
    });
    let mut known = Known::default();
    for _ in 0..3 {
        assert!(!send_away(&context, &mut known, &record, &why).await.unwrap());
    }
    let events = api.events();
    assert!(matches!(events.as_slice(), [event] if event.contains("takes no new GPU pods")), "{events:?}");
    assert!(api.get("pods/ns/p").is_some(), "it is not evicted");
}

/// It worked once and cannot start again, since nobody has an allocation for it: its owner's next one does.
#[tokio::test]
async fn a_pod_that_cannot_start_again_without_its_allocation_is_evicted() {
    let api = FakeApi::default();
    let context = context(&api);
    let mut broken = started(pod("p", Some("n"), "Running", false));
    broken["status"]["containerStatuses"][0]["restartCount"] = json!(5);
    broken["status"]["containerStatuses"][0]["state"] = json!({"waiting": {"reason": "CrashLoopBackOff"}});
    broken["metadata"]["ownerReferences"] =
        json!([{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": "r", "controller": true}]);
    api.put("pods/ns/p", broken.clone());
    context.store.write(|facts| facts.pod_seen(&serde_json::from_value(broken).unwrap()));
    let (record, why) = context.store.read(|facts| {
        let record = facts.pods().next().unwrap();
        (record.clone(), why(facts, record).unwrap())
    });
    assert!(record.started && !record.running);
    assert!(send_away(&context, &mut Known::default(), &record, &why).await.unwrap());
}

/// No idle writes: a pod that only its user can help is told once.
#[tokio::test]
async fn a_bare_pod_without_an_allocation_is_told_once_and_left() {
    let api = FakeApi::default();
    let context = context(&api);
    let bare = pod("p", Some("n"), "Pending", false);
    api.put("pods/ns/p", bare.clone());
    let record = PodRecord::read(&serde_json::from_value(bare).unwrap(), &Defaults::default()).unwrap();
    let why = Why { code: MISSING_CODE, text: "t".to_owned(), grace: MISSING };
    let mut known = Known::default();
    for _ in 0..3 {
        assert!(!send_away(&context, &mut known, &record, &why).await.unwrap());
    }
    assert_eq!(api.events(), ["t: delete the pod and create it anew"]);
    assert!(api.get("pods/ns/p").is_some());
}
