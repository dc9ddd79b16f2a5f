//! Who cannot stay, as a table.

use mullion_core::facts::Event;
use mullion_core::request::Defaults;
use serde_json::json;

use super::*;
use crate::fixtures::{card, kube_node, node};
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
        ("it has none and runs: from before our time", vec![], pod("p", Some("n"), "Running", false), None),
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
