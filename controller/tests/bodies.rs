//! What the bodies cost that grow most when they are read: the controller's container has 512 MiB.

#![expect(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

use std::net::SocketAddr;
use std::process::Command;
use std::{env, fs};

use axum::Router;
use axum::body::Body;
use axum::extract::ConnectInfo;
use axum::http::Request;
use mullion_controller::metrics::Metrics;
use mullion_controller::webhook::Webhook;
use mullion_controller::weigh::{ELEMENTS, OBJECTS, VALUES};
use mullion_core::request::Defaults;
use tower::ServiceExt;

/// MiB that reading may take at its peak, of all bodies that come at the same time.
const MOST: u64 = 160;

fn review(request: &str, top: &str) -> Vec<u8> {
    format!(
        r#"{{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","request":{{"uid":"u","name":"p","namespace":"ns",
        "kind":{{"group":"","version":"v1","kind":"Pod"}},"resource":{{"group":"","version":"v1","resource":"pods"}},
        "operation":"CREATE","userInfo":{{"username":"u"}},{request}"dryRun":false}}{top}}}"#
    )
    .into_bytes()
}

/// Memory of this process, now or at its peak, in MiB.
fn resident(field: &str) -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(field)).unwrap();
    line.trim_start_matches(':').trim().trim_end_matches(" kB").parse::<u64>().unwrap() >> 10
}

/// Five calls of four callers with this body at a time; the worst answer. The peak is counted from here.
async fn ask(webhook: &Router, body: &[u8]) -> (u16, String) {
    fs::write("/proc/self/clear_refs", "5").unwrap();
    let calls = (0..5_u8).map(|n| {
        let mut request = Request::post("/webhook").body(Body::from(body.to_vec())).unwrap();
        request.extensions_mut().insert(ConnectInfo(SocketAddr::from(([10, 0, 0, n % 4], 1))));
        webhook.clone().oneshot(request)
    });
    let answers = futures::future::join_all(calls).await.into_iter().map(Result::unwrap);
    let answer = answers.max_by_key(axum::response::Response::status).unwrap();
    let status = answer.status().as_u16();
    let text = axum::body::to_bytes(answer.into_body(), usize::MAX).await.unwrap();
    (status, String::from_utf8_lossy(&text).into_owned())
}

/// Whether this process has no more heaps than the controller's manifest allows. That is said when a process is started, so
/// otherwise `test` is run again, in a process of its own.
fn is_as_installed(test: &str) -> bool {
    const HEAPS: (&str, &str) = ("MALLOC_ARENA_MAX", "2");
    let manifest = include_str!("../../charts/mullion/controller.yaml");
    assert!(manifest.contains(&format!(r#"{{name: {}, value: "{}"}}"#, HEAPS.0, HEAPS.1)));
    if env::var(HEAPS.0).is_ok_and(|value| value == HEAPS.1) {
        return true;
    }
    let mut again = Command::new(env::current_exe().unwrap());
    again.args(["--exact", test, "--nocapture"]).env(HEAPS.0, HEAPS.1);
    let ended = again.output().unwrap();
    let said = String::from_utf8_lossy(&ended.stdout);
    println!("{said}");
    assert!(said.contains(" 1 passed"), "{}", String::from_utf8_lossy(&ended.stderr));
    false
}

/// The clock stands while bodies are read: who waits for others does not wait too long because a machine is slow.
#[tokio::test(start_paused = true)]
async fn no_body_grows_beyond_its_bound() {
    if !is_as_installed("no_body_grows_beyond_its_bound") {
        return;
    }
    let webhook = Webhook { defaults: Defaults::default(), metrics: Metrics::new() }.routes();
    let many = |element: &str, count: usize| vec![element; count].join(",");
    // Deeper than where elements count for themselves.
    let below = |count: usize| format!("{}{}{}", "[".repeat(5), many(r#"{"":0}"#, count), "]".repeat(5));
    let (elements, objects, values) = (ELEMENTS - 50, OBJECTS - 50, VALUES - 50);
    let pod = |what: &str| review(&format!(r#""object":{{"metadata":{{}},{what}}},"#), "");
    let containers = format!(r#"{{"metadata":{{}},"spec":{{"containers":[{}]}}}}"#, many("{}", elements / 2));
    let mut cases = vec![
        (
            "containers, now and before",
            review(&format!(r#""object":{containers},"oldObject":{containers},"#), ""),
        ),
        ("an unknown key above all", review("", &format!(r#","x":[{}]"#, many("1", values)))),
        ("objects there", review("", &format!(r#","x":{}"#, below(objects)))),
        ("options", review(&format!(r#""options":{},"#, below(objects)), "")),
        (
            "texts of a container",
            pod(&format!(r#""spec":{{"containers":[{{"args":[{}]}}]}}"#, many(r#""a""#, values))),
        ),
        (
            "what managed fields say",
            review(
                &format!(
                    r#""object":{{"metadata":{{"managedFields":[{{"fieldsV1":{{"a":[{}]}}}}]}}}},"#,
                    many(r#"{"":0}"#, objects)
                ),
                "",
            ),
        ),
        ("a spec that is none", pod(&format!(r#""spec":{}"#, below(objects)))),
        ("a long text", pod(&format!(r#""spec":{{"schedulerName":"{}"}}"#, "x".repeat(7 << 20)))),
        ("a long text for a list", pod(&format!(r#""spec":{{"containers":"{}"}}"#, "x".repeat(7 << 20)))),
    ];
    for (path, count) in [
        ("spec.containers", elements),
        ("spec.initContainers", elements),
        ("spec.ephemeralContainers", elements),
        ("spec.volumes", elements),
        ("spec.tolerations", elements),
        ("status.containerStatuses", elements),
        ("metadata.managedFields", elements),
        ("spec.affinity.podAffinity.requiredDuringSchedulingIgnoredDuringExecution", objects),
        ("spec.containers.env", objects),
        ("spec.containers.envFrom", objects),
        ("spec.containers.ports", objects),
        ("spec.containers.volumeMounts", objects),
        ("spec.volumes.projected.sources", objects),
        ("spec.volumes.projected.sources.downwardAPI.items", objects),
    ] {
        let mut inner = format!("[{}]", many("{}", count));
        for key in path.split('.').rev() {
            inner = match key {
                "containers" | "volumes" | "sources" if inner.starts_with('{') => {
                    format!(r#"{{"{key}":[{inner}]}}"#)
                }
                _ => format!(r#"{{"{key}":{inner}}}"#),
            };
        }
        cases.push((path, pod(&inner[1..inner.len() - 1])));
    }
    // What stays with the allocator between two counts as well.
    let before = resident("VmRSS");
    for (case, body) in &mut cases {
        // Those that are small by themselves are no less large when read; padded, they need a place.
        let length = body.len();
        body.resize(length.max(1 << 20), b' ');
        let (status, text) = ask(&webhook, body).await;
        let grown = resident("VmHWM").saturating_sub(before);
        println!("{case}: {length} bytes, {grown} MiB");
        assert!(grown < MOST, "{case}: {grown} MiB");
        assert_eq!(status, 200, "{case} is read: {text}");
    }
    let before = resident("VmRSS");
    for (case, body) in [
        ("small", pod(&format!(r#""spec":{{"containers":[{}]}}"#, many("{}", 21_000)))),
        ("large", pod(&format!(r#""spec":{{"containers":[{}]}}"#, many("{}", 300_000)))),
        ("numbers", review("", &format!(r#","x":[{}]"#, many("1", 4_000_000)))),
    ] {
        let (status, text) = ask(&webhook, &body).await;
        assert!(status == 400 && text.starts_with("BodyTooComplex: "), "{case}: {status} {text}");
    }
    let grown = resident("VmHWM").saturating_sub(before);
    assert!(grown < MOST, "what is refused: {grown} MiB");
}
