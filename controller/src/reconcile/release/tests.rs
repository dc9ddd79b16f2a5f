//! What looks wrong, as a table; and the exact calls when it is acted on.

use k8s_openapi::api::core::v1::{Node, Pod};
use mullion_core::facts::Event;
use mullion_core::request::Defaults;
use serde_json::json;

use super::*;
use crate::fake_api::{FakeApi, Fault};
use crate::fixtures::{card, context, node as gpu_node};
use crate::store::Store;

const NAME: &str = "vgpuallocations/ns/p-u1";

fn allocation(conditions: &[&str], finalizer: bool) -> serde_json::Value {
    let conditions: Vec<_> = conditions
        .iter()
        .map(|kind| json!({"type": kind, "status": "True", "reason": "r", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"}))
        .collect();
    json!({
        "apiVersion": "mullion.io/v1alpha1", "kind": "VGPUAllocation",
        "metadata": {"name": "p-u1", "namespace": "ns", "uid": "a1", "creationTimestamp": "2026-01-01T00:01:00Z",
            "finalizers": if finalizer { vec!["mullion.io/release"] } else { vec![] }},
        "spec": {"pod": {"name": "p", "uid": "u1"}, "nodeName": "n", "sequence": 1,
            "summary": {"gpu": "GPU-1", "kind": "vgpu", "memoryMiB": 100, "corePercent": 0},
            "containers": [{"name": "main", "kind": "app", "request": {"count": 1, "memoryMiB": 100, "corePercent": 0},
                "devices": [{"uuid": "GPU-1", "memoryMiB": 100, "corePercent": 0}]}]},
        "status": {"phase": "Bound", "conditions": conditions},
    })
}

fn kube_node(created: &str, taint: Option<&str>) -> serde_json::Value {
    let taints: Vec<_> = taint.iter().map(|key| json!({"key": key, "effect": "NoExecute"})).collect();
    json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n", "uid": "nu", "creationTimestamp": created},
        "spec": {"taints": taints}, "status": {"allocatable": {"nvidia.com/gpu": "10"}}})
}

fn pod(node: Option<&str>) -> serde_json::Value {
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p", "namespace": "ns", "uid": "u1"},
        "spec": {"nodeName": node, "schedulerName": "mullion-scheduler", "containers": []}})
}

fn from<T: serde::de::DeserializeOwned>(value: serde_json::Value) -> T {
    serde_json::from_value(value).unwrap()
}

const OLD: &str = "2026-01-01T00:00:00Z";
const NEW: &str = "2026-01-01T00:02:00Z";

#[test]
#[expect(clippy::too_many_lines, reason = "one table")]
fn suspicions() {
    enum End {
        Unbound,
        Bound,
    }
    let not_bound = |seconds| Some(Suspicion::NotBound { grace: Duration::from_secs(seconds) });
    for (case, conditions, finalizer, node, there, end, card_there, want) in [
        ("bound where it should be", vec![], true, Some((OLD, None)), Some(Some("n")), None, true, None),
        ("bound elsewhere", vec![], true, Some((OLD, None)), Some(Some("m")), None, true, not_bound(0)),
        ("not bound yet", vec![], true, Some((OLD, None)), Some(None), None, true, not_bound(35)),
        ("gone, never bound", vec![], true, Some((OLD, None)), None, Some(End::Unbound), true, not_bound(0)),
        ("gone, was bound: the agent's", vec![], true, Some((OLD, None)), None, Some(End::Bound), true, None),
        ("gone, was bound, card gone", vec![], true, Some((OLD, None)), None, Some(End::Bound), false, None),
        ("gone, end not seen: the agent's", vec![], true, Some((OLD, None)), None, None, true, None),
        (
            "prepared and gone: the agent's",
            vec!["Prepared"],
            true,
            Some((OLD, None)),
            None,
            Some(End::Unbound),
            true,
            None,
        ),
        (
            "released, agent about to let go",
            vec!["Released"],
            true,
            Some((OLD, None)),
            None,
            None,
            true,
            None,
        ),
        ("released and let go", vec!["Released"], false, None, None, None, true, None),
        (
            "node gone",
            vec!["Prepared"],
            true,
            None,
            Some(Some("n")),
            None,
            true,
            Some(Suspicion::NodeLost(Loss::Gone)),
        ),
        (
            "node gone before the agent let go",
            vec!["Prepared", "Released"],
            true,
            None,
            None,
            None,
            true,
            Some(Suspicion::NodeLost(Loss::Gone)),
        ),
        (
            "node made anew",
            vec!["Prepared"],
            true,
            Some((NEW, None)),
            None,
            None,
            true,
            Some(Suspicion::NodeLost(Loss::Replaced)),
        ),
        (
            "node out of service",
            vec!["Prepared"],
            true,
            Some((OLD, Some("node.kubernetes.io/out-of-service"))),
            Some(Some("n")),
            None,
            true,
            Some(Suspicion::NodeLost(Loss::OutOfService)),
        ),
        (
            "node only unreachable: a timeout is no proof",
            vec!["Prepared"],
            true,
            Some((OLD, Some("node.kubernetes.io/unreachable"))),
            None,
            None,
            true,
            None,
        ),
    ] {
        let store = Store::new(Defaults::default());
        store.write(|facts| {
            let uuid = if card_there { "GPU-1" } else { "GPU-2" };
            facts.fold(&Event::NodeObserved(gpu_node("n", vec![card(uuid, 1000)])));
            if let Some((created, taint)) = node {
                facts.node_seen(&from::<Node>(kube_node(created, taint)));
            }
            facts.allocation_seen(from(allocation(&conditions, finalizer)));
            if let Some(node) = there {
                facts.pod_seen(&from::<Pod>(pod(node)));
            }
            match end {
                Some(End::Unbound) => facts.pod_gone("u1".to_owned(), Some(&from(pod(None)))),
                Some(End::Bound) => facts.pod_gone("u1".to_owned(), Some(&from(pod(Some("n"))))),
                None => {}
            }
        });
        let found = store.read(|facts| {
            let (fact, object) = facts.allocations().next().unwrap();
            suspect(facts, fact, object)
        });
        assert_eq!(found, want, "{case}");
    }
}

#[tokio::test]
async fn an_allocation_that_led_nowhere_is_undone() {
    for (case, there, fault, want, calls, left) in [
        ("pod gone", None, None, Ok(true), vec!["GET pods/ns/p", "PATCH", "DELETE"], false),
        ("pod unbound", Some(pod(None)), None, Ok(true), vec!["GET pods/ns/p", "PATCH", "DELETE"], false),
        ("pod bound after all", Some(pod(Some("n"))), None, Ok(false), vec!["GET pods/ns/p"], true),
        (
            "pod cannot be read",
            None,
            Some(("GET pods", Fault::Refuse(500))),
            Err("ApiOutcomeUnknown"),
            vec!["GET pods/ns/p"],
            true,
        ),
    ] {
        let api = FakeApi::default();
        let context = context(&api);
        api.put(NAME, allocation(&[], true));
        if let Some(there) = there {
            api.put("pods/ns/p", there);
        }
        if let Some((call, fault)) = fault {
            api.fail(call, fault);
        }
        let object = from(api.get(NAME).unwrap());
        let result = undo_unbound(&context, &object).await;
        assert_eq!(result.as_ref().map_err(Error::code).copied(), want, "{case}");
        let made: Vec<String> =
            api.calls().iter().map(|call| call.replace(&format!(" {NAME}"), "")).collect();
        assert_eq!(made, calls, "{case}");
        assert_eq!(api.get(NAME).is_some(), left, "{case}");
    }
    // A bind of that pod under way here decides by itself.
    let api = FakeApi::default();
    let context = context(&api);
    let turn = context.turns.of("u1".into()).await;
    assert!(!undo_unbound(&context, &from(allocation(&[], true))).await.unwrap());
    assert!(api.calls().is_empty());
    // One that the garbage collector has marked only waits for our finalizer.
    drop(turn);
    let mut marked = allocation(&[], true);
    marked["metadata"]["deletionTimestamp"] = json!(NEW);
    api.put(NAME, marked);
    assert!(undo_unbound(&context, &from(api.get(NAME).unwrap())).await.unwrap());
    assert_eq!(api.calls(), ["GET pods/ns/p".to_owned(), format!("PATCH {NAME}")]);
    assert!(api.get(NAME).is_none());
}

#[tokio::test]
async fn a_lost_node_is_released_by_us_and_only_a_lost_one() {
    let status = format!("PATCH {NAME}/status");
    let strip = format!("PATCH {NAME}");
    let judged = |calls: &[&str]| calls.iter().map(|call| (*call).to_owned()).collect::<Vec<_>>();
    for (case, node, there, done, calls) in [
        ("it is there after all", Some(kube_node(OLD, None)), None, false, judged(&["GET nodes/n"])),
        ("gone", None, None, true, judged(&["GET nodes/n", &status, &strip])),
        (
            "made anew: its pod would wait for ever",
            Some(kube_node(NEW, None)),
            Some(pod(Some("n"))),
            true,
            judged(&["GET nodes/n", &status, "GET pods/ns/p", "POST pods/ns/p/eviction", &strip]),
        ),
        (
            "out of service",
            Some(kube_node(OLD, Some("node.kubernetes.io/out-of-service"))),
            Some(pod(Some("n"))),
            true,
            judged(&["GET nodes/n", &status, &strip]),
        ),
    ] {
        let api = FakeApi::default();
        let context = context(&api);
        api.put(NAME, allocation(&["Prepared"], true));
        if let Some(node) = node {
            api.put("nodes/n", node);
        }
        if let Some(there) = there {
            api.put("pods/ns/p", there);
        }
        let object: VGPUAllocation = from(api.get(NAME).unwrap());
        context.store.write(|facts| facts.allocation_seen(object.clone()));
        assert_eq!(release(&context, &object).await.unwrap(), done, "{case}");
        assert_eq!(api.calls(), calls, "{case}");
        let after: VGPUAllocation = from(api.get(NAME).unwrap());
        let fact = mullion_crds::facts::allocation(&after);
        assert_eq!((fact.released, after.finalizers().is_empty()), (done, done), "{case}");
        assert!(fact.prepared, "{case}: what the agent wrote stays");
        let known = context.store.read(|facts| facts.ledger().allocation(&"a1".into()).unwrap().released);
        assert_eq!(known, done, "{case}: the ledger knows at once");
    }
}

/// An eviction that a disruption budget forbids, or that failed, is tried again.
#[tokio::test]
async fn a_pod_on_a_node_made_anew_is_evicted_in_the_end() {
    for (case, code, want) in
        [("a budget forbids it", 429, Ok(false)), ("it fails", 500, Err("ApiOutcomeUnknown"))]
    {
        let api = FakeApi::default();
        let context = context(&api);
        api.put(NAME, allocation(&["Prepared"], true));
        api.put("nodes/n", kube_node(NEW, None));
        api.put("pods/ns/p", pod(Some("n")));
        context.store.write(|facts| {
            facts.node_seen(&from::<Node>(kube_node(NEW, None)));
            facts.allocation_seen(from(api.get(NAME).unwrap()));
        });
        api.fail("POST pods/ns/p/eviction", Fault::Refuse(code));
        let result = release(&context, &from(api.get(NAME).unwrap())).await;
        assert_eq!(result.as_ref().map_err(Error::code).copied(), want, "{case}");
        let again = context.store.read(|facts| {
            let (fact, object) = facts.allocations().next().unwrap();
            assert!(fact.released, "{case}: the capacity is free all the same");
            suspect(facts, fact, object).map(|_| object.clone())
        });
        assert!(release(&context, &again.unwrap()).await.unwrap(), "{case}");
        assert!(api.get("pods/ns/p").is_none(), "{case}");
    }
}

/// A bind that has just taken up an old allocation has its time: the wait begins anew with each version.
#[tokio::test(start_paused = true)]
async fn an_allocation_that_was_taken_up_is_waited_for_again() {
    let api = FakeApi::default();
    let context = context(&api);
    api.put("pods/ns/p", pod(None));
    let show = |version: &str| {
        let mut object = allocation(&[], true);
        object["metadata"]["resourceVersion"] = json!(version);
        let object: VGPUAllocation = from(object);
        context.store.write(|facts| facts.allocation_seen(object));
    };
    context.store.write(|facts| {
        facts.fold(&Event::NodeObserved(gpu_node("n", vec![card("GPU-1", 1000)])));
        facts.node_seen(&from(kube_node(OLD, None)));
        facts.pod_seen(&from(pod(None)));
    });
    let mut patience = Patience::default();
    show("1");
    pass(&context, &mut patience).await;
    tokio::time::advance(UNBOUND.saturating_sub(Duration::from_secs(1))).await;
    show("2");
    pass(&context, &mut patience).await;
    tokio::time::advance(UNBOUND.saturating_sub(Duration::from_secs(1))).await;
    pass(&context, &mut patience).await;
    assert!(api.calls().is_empty(), "it is younger than a bind may be");
    tokio::time::advance(Duration::from_secs(2)).await;
    pass(&context, &mut patience).await;
    assert_eq!(api.calls().first().map(String::as_str), Some("GET pods/ns/p"));
}
