use std::io;
use std::sync::{Arc, Mutex};

use clap::Parser as _;
use tracing::dispatcher::with_default;
use tracing::{info, info_span, warn};

use super::*;
use crate::trace::AdmissionStamp;

const UID: &str = "0b6f7a7e-6a51-4a2e-9a53-3f1d0c8f2b11";
const TRACE: &str = "0b6f7a7e6a514a2e9a533f1d0c8f2b11";

#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl Lines {
    fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }
}

impl io::Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn logged(args: &Args, work: impl FnOnce()) -> String {
    let lines = Lines::default();
    let writer = lines.clone();
    let (dispatch, guard) = build_to("test", "0", args, move || writer.clone()).unwrap();
    with_default(&dispatch, work);
    guard.shutdown().unwrap();
    lines.text()
}

#[test]
fn a_json_line_carries_the_pods_trace() {
    let args = Args { log_format: LogFormat::Json, ..Args::default() };
    let text = logged(&args, || {
        info!("before");
        let outer = pod_span!("bind", UID, node = "node-a");
        let _in = outer.enter();
        let _deeper = info_span!("create allocation").entered();
        info!(gpu = "GPU-1", "created");
    });
    let lines: Vec<serde_json::Value> =
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.len(), 2, "{text}");
    assert_eq!(lines[0].get("trace_id"), None);
    assert_eq!(lines[1]["trace_id"], TRACE);
    assert_eq!(lines[1]["fields"]["gpu"], "GPU-1");
    assert_eq!(lines[1]["fields"]["message"], "created");
    assert_eq!(lines[1]["spans"][0]["name"], "bind");
    assert_eq!(lines[1]["spans"][0]["node"], "node-a");
    assert_eq!(lines[1]["spans"][0]["pod_uid"], UID);
}

#[test]
fn a_text_line_ends_with_the_pods_trace_even_when_only_warnings_are_logged() {
    let args = Args { log_level: "warn".to_owned(), ..Args::default() };
    let text = logged(&args, || {
        let _in = pod_span!("prepare", UID).entered();
        info!("not logged");
        warn!("logged");
    });
    assert_eq!(text.lines().count(), 1, "{text}");
    assert!(text.contains("prepare{pod_uid="), "{text}");
    assert!(text.ends_with(&format!("logged trace_id={TRACE}\n")), "{text}");
}

#[test]
fn trace_ids() {
    for (case, uid, want) in [
        ("a UUID is its bytes", UID, TRACE),
        (
            "a mirror pod's hash is 32 digits, and so are its bytes",
            "d41d8cd98f00b204e9800998ecf8427e",
            "d41d8cd98f00b204e9800998ecf8427e",
        ),
        ("anything else is hashed", "pod-1", "0f066824e0c3c4bd6d80f4c182769fa0"),
        (
            "the nil UUID is no valid trace id",
            "00000000-0000-0000-0000-000000000000",
            "12b9377cbe7e5c94e8a70d9d23929523",
        ),
    ] {
        assert_eq!(trace_id(uid).to_string(), want, "{case}");
    }
    assert_ne!(root_span_id(UID), root_span_id("pod-1"));
    assert_eq!(root_span_id(UID), root_span_id(UID));
    assert_ne!(admission_trace(UID), trace_id(UID), "an admission never lands in a pod's trace");
}

#[test]
fn bad_flags_name_the_way_out() {
    for (case, args, code, hint) in [
        (
            "no filter",
            Args { log_level: "a=b=c".to_owned(), ..Args::default() },
            "LogFilterInvalid",
            "warn,mullion_controller=debug",
        ),
        ("no scheme", endpoint("collector:4317"), "OtlpEndpointScheme", "http://127.0.0.1:4317"),
        ("only a scheme", endpoint("http://"), "OtlpEndpointScheme", "http://127.0.0.1:4317"),
        ("TLS", endpoint("https://collector:4317"), "OtlpEndpointTls", "over http://"),
        ("not a URL", endpoint("http://a b"), "OtlpExporterFailed", "--otlp-endpoint"),
    ] {
        let error = build("test", "0", &args).expect_err(case);
        assert_eq!(error.code(), code, "{case}");
        assert!(error.to_string().contains(hint), "{case}: {error}");
    }
    assert!(build("test", "0", &endpoint("")).is_ok(), "an empty variable in a manifest means off");
}

fn endpoint(url: &str) -> Args {
    Args { otlp_endpoint: Some(url.to_owned()), ..Args::default() }
}

#[test]
fn flags_parse() {
    mod program {
        /// Named as programs name theirs.
        #[derive(clap::Args)]
        pub struct Args {
            #[arg(long)]
            pub other: Option<String>,
        }
    }
    #[derive(clap::Parser)]
    struct Cli {
        #[command(flatten)]
        telemetry: Args,
        #[command(flatten)]
        program: program::Args,
    }
    <Cli as clap::CommandFactory>::command().debug_assert();
    let cli = Cli::parse_from([
        "x",
        "--log-format",
        "json",
        "--log-level",
        "debug",
        "--otlp-endpoint",
        "http://h:1",
    ]);
    assert_eq!(cli.telemetry.log_format, LogFormat::Json);
    assert_eq!(cli.telemetry.log_level, "debug");
    assert_eq!(cli.telemetry.otlp_endpoint.as_deref(), Some("http://h:1"));
    assert_eq!(cli.program.other, None);
    assert!(Cli::try_parse_from(["x", "--log-format", "xml"]).is_err());
}

#[test]
fn a_chain_is_written_once() {
    #[derive(Debug, thiserror::Error)]
    #[error("{text}")]
    struct Link {
        text: &'static str,
        source: Option<Box<Link>>,
    }
    let link = |text, source: Option<Link>| Link { text, source: source.map(Box::new) };
    for (case, error, want) in [
        ("alone", link("a", None), "a"),
        (
            "three",
            link("cannot bind", Some(link("api", Some(link("refused", None))))),
            "cannot bind: api: refused",
        ),
        ("repeated", link("bind: gone", Some(link("gone", None))), "bind: gone"),
        (
            "repeated further down, as kube's and tonic's are",
            link("api: config: gone", Some(link("config", Some(link("gone", None))))),
            "api: config: gone",
        ),
        (
            "a cause that holds what is before it",
            link("call", Some(link("config", Some(link("config: no file", None))))),
            "call: config: no file",
        ),
    ] {
        assert_eq!(source_chain(&error), want, "{case}");
    }
}

#[test]
fn a_stamp_reads_back_and_nothing_else_does() {
    let at = |secs| std::time::SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(secs);
    let stamp = AdmissionStamp::new("705ab4f5-6393-11e8-b7cc-42010a800002", at(1_000), at(1_001));
    assert_eq!(stamp.to_string().parse(), Ok(stamp));
    let trace = admission_trace("705ab4f5-6393-11e8-b7cc-42010a800002");
    for bad in [
        String::new(),
        trace.to_string(),
        format!("{trace}-1"),
        format!("{trace}-1-2-3"),
        format!("{trace}-2-1"),
        format!("{trace}-+1-2"),
        format!("{trace}-1-fffffffffffffffff"),
        format!("{}-1-2", "0".repeat(32)),
        format!("{}-1-2", "é".repeat(16)),
    ] {
        assert!(bad.parse::<AdmissionStamp>().is_err(), "{bad}");
    }
}
