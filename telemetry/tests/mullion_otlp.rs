//! Traces as a collector sees them. The file's name puts its spans under the target `mullion…`, as ours are.

use std::net::SocketAddr;
use std::time::{Duration, SystemTime};

use fake_otlp::Received;
use mullion_telemetry::trace::{AdmissionStamp, record_admission};
use mullion_telemetry::{
    Args, admission_trace, build, in_admission_trace, in_pod_trace, pod_span, root_span_id, trace_id,
};
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tracing::dispatcher::with_default;
use tracing::{Span, info, info_span};

const UID: &str = "0b6f7a7e-6a51-4a2e-9a53-3f1d0c8f2b11";

#[cfg(test)]
fn collector(runtime: &Runtime) -> (SocketAddr, Received) {
    let received = Received::default();
    let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
    let address = listener.local_addr().unwrap();
    runtime.spawn(fake_otlp::receive(listener, received.clone()));
    (address, received)
}

fn to(address: SocketAddr) -> Args {
    Args { otlp_endpoint: Some(format!("http://{address}")), log_level: "off".to_owned(), ..Args::default() }
}

#[test]
fn two_processes_send_one_trace_for_one_pod() {
    let runtime = Runtime::new().unwrap();
    let (address, received) = collector(&runtime);

    let (controller, controller_guard) = build("mullion-controller", "1", &to(address)).unwrap();
    let (agent, agent_guard) = build("mullion-nodeagent", "1", &to(address)).unwrap();
    with_default(&controller, || {
        // Another pod's span around it must not swallow this one's.
        let _other = pod_span!("filter", "7d0b4c1e-0000-4000-8000-000000000001").entered();
        let _bind = pod_span!("bind", UID, node = "node-a").entered();
        let _inner = info_span!("create allocation").entered();
        info!("created");
    });
    with_default(&agent, || {
        // The pod is known only inside of the span.
        let _prepare = info_span!("prepare").entered();
        info!("looking whose it is");
        in_pod_trace(&Span::current(), UID);
        info!("found");
        drop(info_span!("write spec").entered());
    });
    controller_guard.shutdown().unwrap();
    agent_guard.shutdown().unwrap();

    let spans = received.lock().clone();
    let find = |name: &str| {
        let of_name: Vec<_> = spans.iter().filter(|(_, span)| span.name == name).collect();
        assert_eq!(of_name.len(), 1, "{name} in {spans:?}");
        of_name[0].clone()
    };
    let trace = trace_id(UID).to_bytes().to_vec();
    let root = root_span_id(UID).to_bytes().to_vec();
    let (service, bind) = find("bind");
    assert_eq!(service, "mullion-controller");
    assert_eq!((&bind.trace_id, &bind.parent_span_id), (&trace, &root));
    let (_, inner) = find("create allocation");
    assert_eq!((&inner.trace_id, &inner.parent_span_id), (&trace, &bind.span_id));
    let (service, prepare) = find("prepare");
    assert_eq!(service, "mullion-nodeagent");
    assert_eq!((&prepare.trace_id, &prepare.parent_span_id), (&trace, &root));
    let (_, inner) = find("write spec");
    assert_eq!((&inner.trace_id, &inner.parent_span_id), (&trace, &prepare.span_id));
    assert_ne!(find("filter").1.trace_id, trace);
    assert_eq!(spans.len(), 5, "and nothing else");
}

#[test]
fn the_webhooks_span_appears_in_the_pods_trace_once_the_pod_is_known() {
    const REVIEW: &str = "705ab4f5-6393-11e8-b7cc-42010a800002";
    let runtime = Runtime::new().unwrap();
    let (address, received) = collector(&runtime);
    let at = |millis| SystemTime::UNIX_EPOCH + Duration::from_millis(millis);
    let stamp = AdmissionStamp::new(REVIEW, at(1_000), at(1_007));

    let (dispatch, guard) = build("mullion-controller", "1", &to(address)).unwrap();
    with_default(&dispatch, || {
        let span = info_span!("webhook");
        in_admission_trace(&span, REVIEW);
        drop(span.entered());
        record_admission(UID, &stamp.to_string().parse().unwrap());
    });
    guard.shutdown().unwrap();

    let spans = received.lock().clone();
    let in_trace = |trace: Vec<u8>| spans.iter().find(|(_, span)| span.trace_id == trace).unwrap().1.clone();
    let admission = admission_trace(REVIEW).to_bytes().to_vec();
    assert_eq!(in_trace(admission.clone()).name, "webhook");
    let repeated = in_trace(trace_id(UID).to_bytes().to_vec());
    assert_eq!(repeated.name, "webhook");
    assert_eq!(repeated.end_time_unix_nano - repeated.start_time_unix_nano, 7_000_000);
    assert_eq!(repeated.links[0].trace_id, admission);
    assert_eq!(spans.len(), 2);
}

#[test]
fn nothing_is_sent_by_default() {
    let runtime = Runtime::new().unwrap();
    let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
    let off = Args { otlp_endpoint: None, ..to(listener.local_addr().unwrap()) };
    let (dispatch, guard) = build("mullion-controller", "1", &off).unwrap();
    assert_eq!(format!("{guard:?}"), "Guard { endpoint: None }", "no exporter is there");
    with_default(&dispatch, || {
        drop(pod_span!("bind", UID).entered());
        record_admission(UID, &AdmissionStamp::new("r", SystemTime::now(), SystemTime::now()));
    });
    guard.shutdown().unwrap();
    let quiet =
        runtime.block_on(async { tokio::time::timeout(Duration::from_millis(200), listener.accept()).await });
    assert!(quiet.is_err(), "something connected");
}

#[test]
fn an_unreachable_collector_is_an_error_at_the_end_and_never_before() {
    let runtime = Runtime::new().unwrap();
    // Bound and dropped: nobody listens there.
    let address =
        runtime.block_on(async { TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap() });
    let (dispatch, guard) = build("mullion-controller", "1", &to(address)).unwrap();
    with_default(&dispatch, || drop(pod_span!("bind", UID).entered()));
    // Shut down from inside an async context, as `main` does.
    let error = runtime.block_on(async { guard.shutdown() }).expect_err("nobody took the span");
    assert_eq!(error.code(), "OtlpFlushFailed");
}
