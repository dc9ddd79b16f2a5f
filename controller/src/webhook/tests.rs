//! Decision tables of the webhook, and the wire.

use axum::body::Body;
use axum::http::Request;
use k8s_openapi::api::core::v1::Pod;
use mullion_telemetry::trace::ADMISSION_ANNOTATION;
use serde_json::{Value, json};
use tower::ServiceExt;

use super::*;

/// A pod with one container of these limits.
fn pod(limits: &Value) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": "p", "namespace": "ns"},
        "spec": {"schedulerName": "default-scheduler", "containers": [
            {"name": "main", "image": "i", "resources": {"limits": limits, "requests": limits}},
        ]},
    })
}

fn gpu() -> Value {
    pod(&json!({"nvidia.com/gpu": "1", "nvidia.com/gpumem": "3000", "nvidia.com/gpucores": "30"}))
}

fn review_of(object: &Value) -> Value {
    json!({
        "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
        "request": {
            "uid": "705ab4f5-6393-11e8-b7cc-42010a800002",
            "kind": {"group": "", "version": "v1", "kind": "Pod"},
            "resource": {"group": "", "version": "v1", "resource": "pods"},
            "name": "p", "namespace": "ns", "operation": "CREATE",
            "userInfo": {"username": "u"}, "object": object, "oldObject": null, "dryRun": false,
        },
    })
}

async fn post(body: Vec<u8>) -> (u16, Value) {
    let webhook = Webhook { defaults: Defaults::default(), metrics: Metrics::new() };
    let request = Request::post("/webhook").header("content-type", "application/json").body(Body::from(body));
    let response = webhook.routes().oneshot(request.unwrap()).await.unwrap();
    let code = response.status().as_u16();
    let bytes = axum::body::to_bytes(response.into_body(), usize::MAX).await.unwrap();
    let text = String::from_utf8(bytes.to_vec()).unwrap();
    (code, serde_json::from_str(&text).unwrap_or(Value::String(text)))
}

/// The answer to a review of `object`, and the object after the patch.
async fn judged(object: &Value) -> (Value, Value) {
    let (code, answer) = post(review_of(object).to_string().into_bytes()).await;
    assert_eq!(code, 200);
    let response = answer["response"].clone();
    assert_eq!(response["uid"], "705ab4f5-6393-11e8-b7cc-42010a800002");
    let mut after = object.clone();
    if let Some(text) = response["patch"].as_str() {
        assert_eq!(response["patchType"], "JSONPatch");
        let bytes: k8s_openapi::ByteString = serde_json::from_value(json!(text)).unwrap();
        let patch: json_patch::Patch = serde_json::from_slice(&bytes.0).unwrap();
        json_patch::patch(&mut after, &patch).unwrap();
    }
    (response, after)
}

fn with(mut object: Value, path: &str, value: Value) -> Value {
    *object.pointer_mut(path).unwrap_or_else(|| panic!("no {path}")) = value;
    object
}

// WH-02, WH-03: what is done with each scheduler name, with and without GPUs. "" is what a client may leave out; the
// API server then fills in default-scheduler, and both are treated alike.
#[tokio::test]
async fn scheduler_names() {
    for (name, asks, allowed, becomes) in [
        ("", true, true, "mullion-scheduler"),
        ("default-scheduler", true, true, "mullion-scheduler"),
        ("hami-scheduler", true, true, "mullion-scheduler"),
        ("mullion-scheduler", true, true, "mullion-scheduler"),
        ("volcano", true, false, "volcano"),
        ("", false, true, ""),
        ("default-scheduler", false, true, "default-scheduler"),
        ("hami-scheduler", false, true, "hami-scheduler"),
        ("mullion-scheduler", false, true, "mullion-scheduler"),
        ("volcano", false, true, "volcano"),
    ] {
        let object = if asks { gpu() } else { pod(&json!({"cpu": "1"})) };
        let object = with(object, "/spec/schedulerName", json!(name));
        let (response, after) = judged(&object).await;
        assert_eq!(response["allowed"], allowed, "{name} {asks}: {response}");
        assert_eq!(after["spec"]["schedulerName"], becomes, "{name} {asks}");
        if !asks {
            assert_eq!(after, object, "{name}: a pod without GPUs is never touched");
        }
        if !allowed {
            let message = response["status"]["message"].as_str().unwrap();
            for part in ["OtherScheduler", "schedulerName", "volcano", "drop"] {
                assert!(message.contains(part), "{message}");
            }
        }
    }
}

#[tokio::test]
async fn refusals_name_field_value_and_way_out() {
    let annotated = |key: &str, value: &str| {
        let mut object = gpu();
        object["metadata"]["annotations"] = json!({key: value});
        object
    };
    let limits = |limits: Value| pod(&limits);
    let (mut privileged, mut on_node) = (gpu(), gpu());
    privileged["spec"]["containers"][0]["securityContext"] = json!({"privileged": true});
    on_node["spec"]["nodeName"] = json!("n1");
    let mut cases = vec![
        // WH-09
        ("nodeName", on_node, "NodeNameSet", vec!["spec.nodeName", "n1", "nodeSelector"]),
        ("privileged", privileged, "PrivilegedContainer", vec!["main", "privileged", "drop"]),
        // WH-10
        (
            "binary suffix",
            limits(json!({"nvidia.com/gpumem": "16Gi"})),
            "MalformedQuantity",
            vec!["16Gi", "16384"],
        ),
        ("fraction", limits(json!({"nvidia.com/gpu": "1500m"})), "MalformedQuantity", vec!["1500m"]),
        (
            "overflow",
            limits(json!({"nvidia.com/gpumem": "4294967296"})),
            "QuantityOutOfRange",
            vec!["4294967296"],
        ),
        // FS-04
        (
            "policy typo",
            annotated("hami.io/gpu-scheduler-policy", "pack"),
            "UnknownPolicy",
            vec!["pack", "binpack", "spread"],
        ),
        (
            "wish not served",
            annotated("nvidia.com/use-gputype", "H100"),
            "UnsupportedAnnotation",
            vec!["use-gputype", "H100"],
        ),
        // WH-08
        (
            "misspelt",
            limits(json!({"nvidia.com/gpu-mem": "1"})),
            "UnsupportedResource",
            vec!["nvidia.com/gpu-mem"],
        ),
        (
            "resource as annotation",
            annotated("nvidia.com/gpumem", "3000"),
            "ResourceAsAnnotation",
            vec!["resources.limits"],
        ),
        (
            "contradiction",
            limits(json!({"nvidia.com/gpumem": "1", "nvidia.com/gpumem-percentage": "1"})),
            "MemoryAskedTwice",
            vec![],
        ),
        ("mig", limits(json!({"nvidia.com/mig-1g.10gb": "1"})), "UnsupportedResource", vec!["mig-1g.10gb"]),
    ];
    // WH-06: every key that belongs to the system.
    for key in [
        "hami.io/vgpu-node",
        "hami.io/vgpu-devices-allocated",
        "hami.io/vgpu-devices-to-allocate",
        "hami.io/bind-phase",
        "hami.io/bind-time",
        "mullion.io/anything",
    ] {
        cases.push((key, annotated(key, "x"), "OwnedAnnotation", vec![key, "drop"]));
    }
    for (case, object, code, parts) in cases {
        let (response, after) = judged(&object).await;
        assert_eq!(response["allowed"], false, "{case}");
        assert_eq!(response["status"]["code"], 422, "{case}");
        assert_eq!(response["status"]["reason"], code, "{case}");
        assert_eq!(after, object, "{case}: no patch");
        let message = response["status"]["message"].as_str().unwrap();
        assert!(message.starts_with(&format!("{code}: ")), "{case}: {message}");
        for part in parts {
            assert!(message.contains(part), "{case}: {message} lacks {part}");
        }
    }
}

#[tokio::test]
async fn resources_that_kubernetes_needs_are_filled_in() {
    for (case, resources, want) in [
        (
            "memory only (WH-12)",
            json!({"limits": {"nvidia.com/gpumem": "3000"}, "requests": {"nvidia.com/gpumem": "3000"}}),
            json!({"limits": {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "3000"},
                "requests": {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "3000"}}),
        ),
        (
            "limits only",
            json!({"limits": {"nvidia.com/gpu": "2", "cpu": "1"}}),
            json!({"limits": {"nvidia.com/gpu": "2", "cpu": "1"}, "requests": {"nvidia.com/gpu": "2"}}),
        ),
        (
            "requests only",
            json!({"requests": {"nvidia.com/gpucores": "30"}}),
            json!({"limits": {"nvidia.com/gpu": "1", "nvidia.com/gpucores": "30"},
                "requests": {"nvidia.com/gpu": "1", "nvidia.com/gpucores": "30"}}),
        ),
        (
            "everything there",
            json!({"limits": {"nvidia.com/gpu": "1"}, "requests": {"nvidia.com/gpu": "1"}}),
            json!({"limits": {"nvidia.com/gpu": "1"}, "requests": {"nvidia.com/gpu": "1"}}),
        ),
    ] {
        let mut object = gpu();
        object["spec"]["containers"][0]["resources"] = resources;
        // FS-06: containers are found by name, wherever they stand.
        object["spec"]["initContainers"] = json!([{"name": "prep", "image": "i"}]);
        let (response, after) = judged(&object).await;
        assert_eq!(response["allowed"], true, "{case}: {response}");
        assert_eq!(after["spec"]["containers"][0]["resources"], want, "{case}");
        assert_eq!(after["spec"]["initContainers"], object["spec"]["initContainers"], "{case}");
        serde_json::from_value::<Pod>(after).unwrap();
    }
    let mut object = pod(&json!({}));
    object["spec"]["containers"][0] = json!({"name": "main", "image": "i"});
    object["spec"]["initContainers"] =
        json!([{"name": "load", "resources": {"limits": {"nvidia.com/gpumem": "5k"}}}]);
    let (_, after) = judged(&object).await;
    let both = json!({"nvidia.com/gpu": "1", "nvidia.com/gpumem": "5k"});
    assert_eq!(after["spec"]["initContainers"][0]["resources"], json!({"limits": both, "requests": both}));
    assert_eq!(after["spec"]["containers"], object["spec"]["containers"]);
}

#[tokio::test]
async fn a_second_call_changes_nothing() {
    let (_, once) = judged(&gpu()).await;
    assert!(once["metadata"]["annotations"][ADMISSION_ANNOTATION].is_string());
    let (response, twice) = judged(&once).await;
    assert_eq!(response["allowed"], true, "{response}");
    assert_eq!(once, twice);
    // Whatever else stands there is no stamp.
    let mut forged = gpu();
    forged["metadata"]["annotations"] = json!({ADMISSION_ANNOTATION: "x"});
    assert_eq!(
        judged(&forged).await.1["metadata"]["annotations"][ADMISSION_ANNOTATION].as_str().unwrap().len(),
        66
    );
}

#[tokio::test]
async fn warnings() {
    let mut object = pod(&json!({"cpu": "1"}));
    object["metadata"]["annotations"] = json!({"nvidia.com/gpumem": "3000"});
    let (response, after) = judged(&object).await;
    assert_eq!((&response["allowed"], &after), (&json!(true), &object));
    assert!(response["warnings"][0].as_str().unwrap().contains("resources.limits"), "{response}");
    let mut object = pod(&json!({"cpu": "1"}));
    object["metadata"]["annotations"] = json!({"hami.io/vgpu-node": "n1"});
    let (response, _) = judged(&object).await;
    assert_eq!(response["allowed"], true);
    assert!(response["warnings"][0].as_str().unwrap().contains("hami.io/vgpu-node"), "{response}");
    let (response, _) = judged(&pod(&json!({"nvidia.com/gpu": "0"}))).await;
    assert_eq!(response["allowed"], true, "none of something is nothing");
}

#[tokio::test]
async fn what_is_not_ours_passes() {
    for (case, path, value) in [
        ("update", "/request/operation", json!("UPDATE")),
        ("another kind", "/request/kind/kind", json!("PodTemplate")),
        ("deletion", "/request/object", Value::Null),
    ] {
        let review = with(review_of(&gpu()), path, value);
        let (code, answer) = post(review.to_string().into_bytes()).await;
        assert_eq!((code, &answer["response"]["allowed"]), (200, &json!(true)), "{case}: {answer}");
        assert_eq!(answer["response"]["patch"], Value::Null, "{case}");
    }
}

#[tokio::test]
async fn hostile_bodies_get_an_answer() {
    let deep = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
    for (case, body) in [
        ("empty", Vec::new()),
        ("text", b"hello".to_vec()),
        ("no request", br#"{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview"}"#.to_vec()),
        ("not UTF-8", vec![0xff, 0xfe, 0x00]),
        ("deep", deep[..60_000].to_owned().into_bytes()),
        ("array", b"[]".to_vec()),
        ("a long value", json!({"request": "x".repeat(100_000)}).to_string().into_bytes()),
    ] {
        let (code, answer) = post(body).await;
        assert_eq!(code, 400, "{case}");
        let text = answer.as_str().unwrap();
        assert!(text.starts_with("MalformedBody: ") && text.len() < 1000, "{case}: {answer}");
    }
    let (code, answer) = post(deep.into_bytes()).await;
    assert!(code == 400 && answer.as_str().unwrap().starts_with("BodyTooComplex: "), "{answer}");
    for (case, path, value, want) in [
        ("containers are no list", "/spec/containers", json!("x"), "PodUnreadable"),
        ("no containers", "/spec/containers", json!([]), "NoContainers"),
        ("containers are a long text", "/spec/containers", json!("x".repeat(100_000)), "PodUnreadable"),
        ("a number as name", "/spec/containers/0/name", json!(7), "PodUnreadable"),
        (
            "long value",
            "/spec/containers/0/resources/limits/nvidia.com~1gpu",
            json!("9".repeat(100_000)),
            "MalformedQuantity",
        ),
    ] {
        let (response, _) = judged(&with(gpu(), path, value)).await;
        assert_eq!(response["allowed"], false, "{case}");
        assert_eq!(response["status"]["reason"], want, "{case}: {response}");
        assert!(response["status"]["message"].as_str().unwrap().len() < 1000, "{case}");
    }
    // A pod at the API server's limit of 3 MiB still gets in, twice in one review.
    let mut large = gpu();
    large["metadata"]["annotations"] = json!({"note": "x".repeat(3 << 20)});
    let mut review = review_of(&large);
    review["request"]["oldObject"] = large;
    let (code, answer) = post(review.to_string().into_bytes()).await;
    assert_eq!((code, &answer["response"]["allowed"]), (200, &json!(true)));
}

/// While a body is read, the threads that answer kube-scheduler do their work, even where there is one only.
#[tokio::test]
async fn reading_holds_up_nobody() {
    let mut object = gpu();
    object["spec"]["containers"][0]["env"] = json!(vec![json!({}); 20_000]);
    let mut asked = Box::pin(post(review_of(&object).to_string().into_bytes()));
    let mut turns = 0;
    let (code, _) = loop {
        tokio::select! {
            biased;
            answer = &mut asked => break answer,
            () = tokio::task::yield_now() => turns += 1,
        }
    };
    assert!(code == 200 && turns > 100, "{code}, {turns}");
}
