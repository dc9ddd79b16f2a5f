//! What reaches the controller's ports: reviews by whoever reaches the webhook, calls by kube-scheduler.

use std::cell::OnceCell;
use std::convert::Infallible;
use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use http::{Request, Response};
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Pod;
use kube::Client;
use mullion_controller::cluster::Cluster;
use mullion_controller::extender::Extender;
use mullion_controller::extender::bind::Binder;
use mullion_controller::metrics::Metrics;
use mullion_controller::store::{Source, Store};
use mullion_controller::webhook::Webhook;
use mullion_core::request::Defaults;
use serde_json::{Value, json};
use tokio::runtime::Runtime;
use tower::{ServiceExt, service_fn};

struct Server {
    runtime: Runtime,
    webhook: Router,
    extender: Router,
}

thread_local! {
    static SERVER: OnceCell<Server> = const { OnceCell::new() };
}

impl Server {
    fn start() -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let webhook = Webhook { defaults: Defaults::default(), metrics: Metrics::new() }.routes();
        // Nothing is at the API server: every bind ends in a refusal.
        let nothing = service_fn(|_: Request<kube::client::Body>| async {
            let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 404,
                "reason": "NotFound", "message": "nothing is here"});
            let mut answer = Response::new(Body::from(status.to_string()));
            *answer.status_mut() = http::StatusCode::NOT_FOUND;
            Ok::<_, Infallible>(answer)
        });
        let cluster = runtime.block_on(async { Cluster::new(Client::new(nothing, "default"), "fuzz") });
        let store = Arc::new(Store::new(Defaults::default()));
        store.write(|facts| {
            for event in crate::core::node("n", 2) {
                facts.fold(&event);
            }
        });
        for source in [Source::Allocations, Source::GpuNodes, Source::Nodes, Source::Pods] {
            store.synced(source);
        }
        let binder = Arc::new(Binder::new(cluster, Arc::clone(&store), Arc::default()));
        let extender = Extender::new(store, binder, Metrics::new()).routes();
        Self { runtime, webhook, extender }
    }

    fn ask(&self, router: &Router, path: &str, body: &[u8]) -> (u16, Vec<u8>) {
        let request = Request::post(path).body(Body::from(body.to_vec())).unwrap();
        self.runtime.block_on(async {
            let answer = router.clone().oneshot(request).await.unwrap();
            let status = answer.status().as_u16();
            let bytes = axum::body::to_bytes(answer.into_body(), usize::MAX).await.unwrap();
            (status, bytes.to_vec())
        })
    }
}

fn with<T>(work: impl FnOnce(&Server) -> T) -> T {
    SERVER.with(|server| work(server.get_or_init(Server::start)))
}

/// An `AdmissionReview`: an answer comes whatever it is; a pod that is let in can be read after the patch, and a second
/// look changes nothing.
pub fn admission_review(data: &[u8]) {
    let ask = |body: &[u8]| with(|server| server.ask(&server.webhook, "/webhook", body));
    let (status, answer) = ask(data);
    assert!([200, 400, 413].contains(&status), "{status}");
    if status != 200 {
        return;
    }
    let answer: Value = serde_json::from_slice(&answer).unwrap();
    // What nobody reads is not looked at, so it need not be UTF-8; here all of it would have to be. The API server writes nothing else.
    let Ok(mut review) = serde_json::from_slice::<Value>(data) else { return };
    assert_eq!(answer["response"]["uid"], review["request"]["uid"]);
    crate::sayable(answer["response"]["status"]["message"].as_str().unwrap_or_default());
    let Some(text) = answer["response"]["patch"].as_str() else { return };
    assert_eq!(answer["response"]["allowed"], true);
    let bytes: ByteString = serde_json::from_value(json!(text)).unwrap();
    let patch: json_patch::Patch = serde_json::from_slice(&bytes.0).unwrap();
    let object = &mut review["request"]["object"];
    // A name that stands twice in the text means one thing to us and another here; the API server writes none twice.
    if json_patch::patch(object, &patch).is_err() {
        return;
    }
    let pod: Pod = serde_json::from_value(object.clone()).unwrap();
    let scheduler = pod.spec.and_then(|spec| spec.scheduler_name);
    assert_eq!(scheduler.as_deref(), Some(mullion_crds::names::SCHEDULER));
    let (status, again) = ask(review.to_string().as_bytes());
    assert_eq!(status, 200);
    let again: Value = serde_json::from_slice(&again).unwrap();
    assert_eq!(again["response"]["allowed"], true, "{again}");
    if let Some(text) = again["response"]["patch"].as_str() {
        let bytes: ByteString = serde_json::from_value(json!(text)).unwrap();
        let patch: json_patch::Patch = serde_json::from_slice(&bytes.0).unwrap();
        assert!(patch.0.is_empty(), "the second look changes {patch}");
    }
}

/// A call of kube-scheduler; its first byte says which.
pub fn extender(data: &[u8]) {
    let Some((which, body)) = data.split_first() else { return };
    let path = ["/filter", "/prioritize", "/bind"][usize::from(which % 3)];
    let (status, answer) = with(|server| server.ask(&server.extender, path, body));
    assert!([200, 400, 503].contains(&status), "{path}: {status}");
    if status == 200 {
        let answer: Value = serde_json::from_slice(&answer).unwrap();
        crate::sayable(answer["Error"].as_str().unwrap_or_default());
        // kube-scheduler writes the reasons into the pod's condition: few, and none of our caller's making.
        let reasons = [&answer["FailedNodes"], &answer["FailedAndUnresolvableNodes"]];
        let all = reasons.into_iter().filter_map(Value::as_object).flat_map(serde_json::Map::values);
        let mut distinct: Vec<&str> = all.filter_map(Value::as_str).collect();
        distinct.sort_unstable();
        distinct.dedup();
        assert!(distinct.len() <= 2 && distinct.iter().all(|reason| reason.starts_with("node(s) ")));
    }
}
