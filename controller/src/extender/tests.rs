//! The wire, as kube-scheduler's Go types write and read it, and what filter and prioritize answer.

use std::sync::Arc;

use axum::body::Body;
use axum::http::Request;
use mullion_core::facts::Event;
use mullion_core::units::Mib;
use serde_json::{Value, json};
use tower::ServiceExt;

use super::*;
use crate::fake_api::FakeApi;
use crate::fixtures::{card, kube_node, node};
use crate::store::Source;

/// What kube-scheduler 1.34 writes for a filter call with `nodeCacheCapable: true` (Go's `ExtenderArgs`).
fn args(limits: &Value, nodes: &[&str]) -> Value {
    json!({
        "Pod": {
            "metadata": {"name": "p", "namespace": "ns", "uid": "0b6f7a7e-6a51-4a2e-9a53-3f1d0c8f2b11",
                "creationTimestamp": "2026-01-01T00:00:00Z"},
            "spec": {"containers": [{"name": "main", "image": "i", "resources": {"limits": limits, "requests": limits}}],
                "schedulerName": "mullion-scheduler"},
            "status": {"phase": "Pending", "qosClass": "BestEffort"},
        },
        "Nodes": null,
        "NodeNames": nodes,
    })
}

fn three_gib() -> Value {
    json!({"nvidia.com/gpu": "1", "nvidia.com/gpumem": "3000"})
}

fn extender(synced: bool) -> Extender {
    let store = Arc::new(Store::new(mullion_core::request::Defaults::default()));
    let sources = [Source::Allocations, Source::GpuNodes, Source::Nodes, Source::Pods];
    for source in sources.into_iter().take(if synced { 4 } else { 3 }) {
        store.synced(source);
    }
    store.write(|facts| {
        for (name, memory) in [("small", 2000), ("half", 8000), ("idle", 8000)] {
            facts.fold(&Event::NodeObserved(node(name, vec![card(&format!("GPU-{name}"), memory)])));
            facts.fold(&Event::KubeNodeObserved(kube_node(name, 10)));
        }
        facts.fold(&Event::NodeObserved(node("dead", vec![card("GPU-dead", 8000)])));
        facts.fold(&Event::KubeNodeObserved(kube_node("dead", 0)));
        let mut hold = held("half");
        hold.containers[0].devices[0].memory = Mib(6000);
        facts.fold(&Event::Held(hold));
    });
    let binder = Arc::new(Binder::new(FakeApi::default().cluster(), Arc::clone(&store), Arc::default()));
    Extender::new(store, binder, Metrics::new())
}

fn held(node: &str) -> mullion_core::facts::AllocationFact {
    let request = crate::fixtures::request(1);
    let pod = mullion_core::facts::PodRef { namespace: "ns".into(), name: "o".into(), uid: "o".into() };
    let mut ledger = mullion_core::ledger::Ledger::default();
    ledger.apply(&Event::NodeObserved(crate::fixtures::node(node, vec![card(&format!("GPU-{node}"), 8000)])));
    ledger.apply(&Event::KubeNodeObserved(kube_node(node, 10)));
    let placement = ledger.fit(&request, &node.into()).unwrap();
    mullion_crds::facts::allocation(&mullion_crds::object::allocation_object(
        &pod,
        &node.into(),
        1,
        &request,
        &placement,
    ))
}

async fn post(extender: Extender, path: &str, body: String) -> (u16, Option<String>, String) {
    let request =
        Request::post(path).header("content-type", "application/json").body(Body::from(body)).unwrap();
    let response = extender.routes().oneshot(request).await.unwrap();
    let length = response.headers().get("content-length").map(|v| v.to_str().unwrap().to_owned());
    let code = response.status().as_u16();
    let bytes = axum::body::to_bytes(response.into_body(), usize::MAX).await.unwrap();
    (code, length, String::from_utf8(bytes.to_vec()).unwrap())
}

#[tokio::test]
async fn filter_answers_in_gos_words() {
    let body = args(&three_gib(), &["small", "half", "idle", "dead", "unknown"]).to_string();
    let (code, _, text) = post(extender(true), "/filter", body).await;
    assert_eq!(code, 200);
    let golden = r#"{"NodeNames":["idle"],"FailedNodes":{"half":"node(s) with too few GPUs that have enough free memory"},"FailedAndUnresolvableNodes":{"dead":"node(s) whose GPU device plugin is not registered","small":"node(s) whose GPUs have less memory than asked even when empty","unknown":"node(s) without a GPUNode"}}"#;
    assert_eq!(text, golden);
}

#[tokio::test]
async fn prioritize_answers_in_gos_words() {
    let body = args(&json!({"nvidia.com/gpumem": "1000"}), &["half", "idle", "dead"]).to_string();
    let (code, _, text) = post(extender(true), "/prioritize", body).await;
    assert_eq!(code, 200);
    let scores: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(scores[0]["Host"], "half");
    let score = |at: usize| scores[at]["Score"].as_i64().unwrap();
    // FS-02: binpack fills the fuller one first, spread the emptier one.
    assert!(score(0) > score(1), "{text}");
    assert_eq!(score(2), 0, "{text}");
    let mut spread = args(&json!({"nvidia.com/gpumem": "1000"}), &["half", "idle"]);
    spread["Pod"]["metadata"]["annotations"] = json!({"hami.io/node-scheduler-policy": "spread"});
    let (_, _, text) = post(extender(true), "/prioritize", spread.to_string()).await;
    let scores: Value = serde_json::from_str(&text).unwrap();
    assert!(scores[0]["Score"].as_i64() < scores[1]["Score"].as_i64(), "{text}");
}

#[tokio::test]
async fn bind_answers_in_gos_words() {
    let body = json!({"PodName": "gone", "PodNamespace": "ns", "PodUID": "u", "Node": "idle"}).to_string();
    let (code, _, text) = post(extender(true), "/bind", body).await;
    assert_eq!(code, 200);
    assert_eq!(text, r#"{"Error":"PodGone: pod ns/gone (uid u) is gone: nothing to bind"}"#);
    assert_eq!(serde_json::to_string(&BindingResult::default()).unwrap(), "{}");
}

#[test]
fn other_spellings_are_read() {
    for (pod, names) in [("Pod", "NodeNames"), ("pod", "nodenames"), ("pod", "nodeNames")] {
        let text = json!({pod: {"metadata": {"uid": "u"}}, names: ["n"]}).to_string();
        let args: ExtenderArgs = serde_json::from_str(&text).unwrap();
        assert_eq!((args.pod_uid(), args.node_count()), ("u", 1), "{text}");
    }
    let text = r#"{"podname":"p","podnamespace":"n","poduid":"u","node":"x"}"#;
    let args: BindingArgs = serde_json::from_str(text).unwrap();
    assert_eq!((args.pod_name.as_str(), args.node.as_str()), ("p", "x"));
}

#[tokio::test]
async fn faults_of_our_own_are_errors_and_nothing_else_is() {
    let all = ["small", "half", "idle"];
    for (case, synced, body, failed, error) in [
        ("not listed yet", false, args(&three_gib(), &all), 0, Some("NotReady: ")),
        (
            "full nodes sent",
            true,
            json!({"Pod": {"metadata": {}}, "Nodes": {"items": []}, "NodeNames": null}),
            0,
            Some("ConfigValueInvalid: "),
        ),
        ("nothing of ours asked", true, args(&json!({"cpu": "1"}), &all), 0, None),
        (
            "wishes that the webhook would have refused",
            true,
            args(&json!({"nvidia.com/gpumem": "1Gi"}), &all),
            3,
            None,
        ),
        ("no candidates", true, args(&three_gib(), &[]), 0, None),
    ] {
        let (code, _, text) = post(extender(synced), "/filter", body.to_string()).await;
        assert_eq!(code, 200, "{case}");
        let answer: Value = serde_json::from_str(&text).unwrap();
        match error {
            Some(start) => assert!(answer["Error"].as_str().unwrap().starts_with(start), "{case}: {text}"),
            None => assert_eq!(answer["Error"], Value::Null, "{case}: {text}"),
        }
        let unresolvable = answer["FailedAndUnresolvableNodes"].as_object().unwrap();
        assert_eq!(unresolvable.len(), failed, "{case}: {text}");
        if failed > 0 {
            assert_eq!(
                unresolvable["idle"],
                "node(s) not tried, since the pod's GPU request is refused (MalformedQuantity)"
            );
        }
    }
    let (code, _, text) = post(extender(true), "/filter", "{".to_owned()).await;
    assert_eq!(code, 400);
    assert!(text.starts_with("MalformedBody: "), "{text}");
    // A pod that the watch has not seen is read from the call, so it is no larger than one that the webhook takes.
    let containers = vec!["{}"; 20_000].join(",");
    let hostile = format!(r#"{{"Pod":{{"spec":{{"containers":[{containers}]}}}},"NodeNames":["idle"]}}"#);
    for path in ["/filter", "/prioritize", "/bind"] {
        let (code, _, text) = post(extender(true), path, hostile.clone()).await;
        assert!(code == 400 && text.starts_with("BodyTooComplex: "), "{path}: {text}");
    }
    let nodes: Vec<String> = (0..15_000).map(|n| format!("node-{n}.example")).collect();
    let nodes: Vec<&str> = nodes.iter().map(String::as_str).collect();
    assert_eq!(post(extender(true), "/filter", args(&three_gib(), &nodes).to_string()).await.0, 200);
    assert_eq!(post(extender(false), "/prioritize", args(&three_gib(), &all).to_string()).await.0, 503);
    let body = json!({"PodName": "p", "PodNamespace": "ns", "PodUID": "u", "Node": "idle"}).to_string();
    assert!(post(extender(false), "/bind", body).await.2.contains("NotReady: "));
}

/// Chunked answers cost kube-scheduler a connection each: over a real socket, the answer must carry its length.
#[tokio::test]
async fn answers_carry_their_length() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, extender(true).routes()).await });
    let body = args(&three_gib(), &["idle"; 1]).to_string();
    let mut socket = tokio::net::TcpStream::connect(address).await.unwrap();
    let head = format!(
        "POST /filter HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    socket.write_all(format!("{head}{body}").as_bytes()).await.unwrap();
    let mut answer = String::new();
    socket.read_to_string(&mut answer).await.unwrap();
    let answer = answer.to_lowercase();
    assert!(answer.contains("content-length: ") && !answer.contains("transfer-encoding"), "{answer}");
}

// FS-13: what filter promised bind gives, and two pods decided before any watch event see each other.
#[tokio::test]
async fn the_decision_is_made_once() {
    let extender = extender(true);
    let store = Arc::clone(&extender.store);
    let request = crate::fixtures::request(4000);
    let node: NodeName = "idle".into();
    let promised = store.read(|facts| facts.ledger().fit(&request, &node)).unwrap();
    let pod =
        |uid: &str| mullion_core::facts::PodRef { namespace: "ns".into(), name: uid.into(), uid: uid.into() };
    let claim = |uid: &str| store.claim(&pod(uid), &request, &node, 0);
    let Ok(crate::store::Claim::Held(first)) = claim("a") else { panic!("held") };
    assert_eq!(mullion_crds::facts::allocation(&first).containers, promised.containers);
    let Ok(crate::store::Claim::Held(second)) = claim("b") else { panic!("held") };
    assert_eq!(first.spec.containers[0].devices[0].uuid, second.spec.containers[0].devices[0].uuid);
    assert_eq!(second.spec.sequence, first.spec.sequence + 1);
    assert_eq!(claim("c").unwrap_err().code(), "MemoryShort");
}

// Design, section 8: a controller killed between its two writes finds the same allocation on the same node, however
// little the pod has left there for others.
#[tokio::test]
async fn a_pod_is_not_in_its_own_way() {
    let extender = extender(true);
    let request = crate::fixtures::request(8000);
    let uid = "0b6f7a7e-6a51-4a2e-9a53-3f1d0c8f2b11";
    let pod = mullion_core::facts::PodRef { namespace: "ns".into(), name: "p".into(), uid: uid.into() };
    let Ok(crate::store::Claim::Held(made)) = extender.store.claim(&pod, &request, &"idle".into(), 0) else {
        panic!("no room")
    };
    let mut made = *made;
    made.metadata.uid = Some("a".to_owned());
    extender.store.write(|facts| facts.allocation_seen(made));
    let limits = json!({"nvidia.com/gpumem": "8000"});
    let ask = |uid: &str| {
        let mut args = args(&limits, &["idle", "half", "small"]);
        args["Pod"]["metadata"]["uid"] = json!(uid);
        serde_json::from_value::<ExtenderArgs>(args).unwrap()
    };
    assert_eq!(extender.filter(&ask(uid)).node_names, Some(vec!["idle".into()]));
    assert_eq!(extender.prioritize(&ask(uid)).unwrap()[0].score, BEST);
    assert_eq!(extender.filter(&ask("another")).node_names, Some(vec![]));
    // Where nothing can start, an allocation changes nothing.
    extender.store.write(|facts| facts.fold(&Event::KubeNodeObserved(kube_node("idle", 0))));
    assert_eq!(extender.filter(&ask(uid)).node_names, Some(vec![]));
}

/// What a pod asks for is what the watch has read; only a pod that it has not shown yet is read from the call.
#[tokio::test]
async fn a_pod_is_read_once() {
    let extender = extender(true);
    let mut call = args(&json!({"nvidia.com/gpumem": "3000"}), &["small", "half", "idle"]);
    let ask = |call: &Value| {
        let args: ExtenderArgs = serde_json::from_value(call.clone()).unwrap();
        extender.filter(&args).node_names.unwrap().len()
    };
    assert_eq!(ask(&call), 1, "not seen yet");
    let seen: Value = args(&json!({"nvidia.com/gpumem": "100"}), &[])["Pod"].clone();
    let pod: k8s_openapi::api::core::v1::Pod = serde_json::from_value(seen).unwrap();
    extender.store.write(|facts| facts.pod_seen(&pod));
    assert_eq!(ask(&call), 3, "resources never change, so this shows where they come from");
    call["Pod"]["metadata"]["resourceVersion"] = json!("2");
    assert_eq!(ask(&call), 1, "a version that the watch has not shown yet");
    call["Pod"]["metadata"]["resourceVersion"] = json!("");
    call["Pod"]["metadata"]["name"] = json!("another");
    assert_eq!(ask(&call), 1, "not the pod of that uid");
    call["Pod"]["spec"]["containers"] = json!("x");
    let broken: ExtenderArgs = serde_json::from_value(call.clone()).unwrap();
    assert!(extender.filter(&broken).error.starts_with("ConfigValueInvalid: "));
    assert_eq!(extender.prioritize(&broken).unwrap_err().code(), "ConfigValueInvalid");
    call["Pod"] = json!({"metadata": {"uid": 7}});
    assert_eq!(post(extender.clone(), "/filter", call.to_string()).await.0, 400);
}
