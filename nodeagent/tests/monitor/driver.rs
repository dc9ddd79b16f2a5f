//! Over the simulated driver library.

use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;

use fake_state::{STATE_ENV, Store, profile, verb};
use mullion_nodeagent::metrics::Metrics;
use mullion_nodeagent::nvml::DriverHandle;

use crate::common::tenant::Tenant;
use crate::common::{MIB, Node, container, lines, sample, scrape_all};

/// The simulated cards of this process; `None` in the process that only starts the other one.
fn cards(test: &str, cards: &str) -> Option<(Store, PathBuf)> {
    let exe = std::env::current_exe().unwrap();
    let Some(path) = std::env::var_os(STATE_ENV) else {
        let folder = tempfile::tempdir().unwrap();
        let mut command = Command::new(exe);
        command.args(["--exact", test, "--nocapture"]).env(STATE_ENV, folder.path().join("node-a.json"));
        assert!(command.status().unwrap().success(), "see above");
        return None;
    };
    let store = Store::create(path, &profile::node(cards, "node-a").unwrap()).unwrap();
    Some((store, exe.with_file_name("libnvidia_ml.so")))
}

fn fake(store: &Store, line: &str) {
    verb::apply(store, &line.split_whitespace().map(str::to_owned).collect::<Vec<_>>()).unwrap();
}

// MO-08: what fails on one card costs what it would have told, and nothing of the other card.
#[test]
fn a_failing_query_costs_only_what_it_would_have_told() {
    let Some((store, library)) =
        cards("driver::a_failing_query_costs_only_what_it_would_have_told", "h100x2")
    else {
        return;
    };
    let uuids: Vec<String> = store.read().unwrap().cards.iter().map(|c| c.uuid.clone()).collect();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let metrics = Arc::new(Metrics::default());
    let driver = DriverHandle::start(Some(library), Arc::clone(&metrics)).unwrap();
    let mut node = Node::new();
    for (pod, uuid) in [("a", &uuids[0]), ("b", &uuids[1])] {
        node.pod(pod, &["main"], &[(uuid, 4096, 30)]);
    }
    let mut tenant = Tenant::start(&node.usage_path("a", "main"));
    tenant.hold(0, 700 * MIB);
    node.processes("a", "main", &[tenant.pid()]);
    fake(&store, &format!("process 0 {} 1200 45", tenant.pid()));
    fake(&store, "error nvmlDeviceGetMemoryInfo_v2 999 1");
    let sample = runtime.block_on(driver.sample(0)).unwrap();
    assert_eq!(sample.cards[0].troubles.len(), 1, "{:?}", sample.cards[0]);
    assert!(sample.cards[1].troubles.is_empty());
    let looked = node.look(Some(&sample));
    let seen = container(&looked.snapshot, "a", "main");
    assert_eq!(seen.measured[0].bytes, Some(1200 * MIB));
    assert_eq!(seen.measured[0].by_process[&tenant.pid()], 1200 * MIB);
    assert_eq!(seen.usage.as_ref().unwrap().cards[0].used, 700 * MIB);
    let text = scrape_all(&metrics, looked.snapshot);
    let of = |name: &str| {
        let found = lines(&text, name);
        uuids.iter().map(|u| found.iter().any(|l| l.contains(u.as_str()))).collect::<Vec<_>>()
    };
    assert_eq!(of("hami_host_gpu_memory_used_bytes"), [false, true]);
    assert_eq!(of("mullion_card_memory_bytes"), [false, true]);
    for name in [
        "hami_host_gpu_utilization_ratio",
        "mullion_container_memory_driver_bytes",
        "hami_vgpu_memory_used_bytes",
    ] {
        assert_eq!(of(name), [true, true], "{name}");
    }
    let counted = format!(
        r#"mullion_nvml_errors_total{{node="node-a",call="nvmlDeviceGetMemoryInfo_v2",device_uuid="{}"}} 1"#,
        uuids[0]
    );
    assert_eq!(lines(&text, "mullion_nvml_errors_total"), [counted]);

    // The next look has all of it again.
    let sample = runtime.block_on(driver.sample(0)).unwrap();
    assert!(sample.cards.iter().all(|c| c.troubles.is_empty() && c.memory.is_some()));
    // A card that is lost is there no more, and the other one is whole.
    fake(&store, "lost 0");
    let sample = runtime.block_on(driver.sample(0)).unwrap();
    let looked = node.look(Some(&sample));
    let seen = container(&looked.snapshot, "b", "main");
    assert_eq!(seen.measured[0].bytes, Some(0));
    assert_eq!(container(&looked.snapshot, "a", "main").usage.as_ref().unwrap().cards[0].used, 700 * MIB);
}

/// A container's processes and nobody else's: another's on the same card is not counted to it.
#[test]
fn only_a_containers_own_processes_are_counted() {
    let Some((store, library)) = cards("driver::only_a_containers_own_processes_are_counted", "h100") else {
        return;
    };
    let uuid = store.read().unwrap().cards[0].uuid.clone();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let driver = DriverHandle::start(Some(library), Arc::default()).unwrap();
    let mut node = Node::new();
    node.pod("a", &["main", "side"], &[(&uuid, 4096, 30)]);
    let tenants = ["main", "side"].map(|name| Tenant::start(&node.usage_path("a", name)));
    for (tenant, name) in tenants.iter().zip(["main", "side"]) {
        node.processes("a", name, &[tenant.pid()]);
    }
    fake(&store, &format!("process 0 {} 300 10", tenants[0].pid()));
    fake(&store, &format!("process 0 {} 500 20", tenants[1].pid()));
    fake(&store, "process 0 1 9000 30");
    let sample = runtime.block_on(driver.sample(0)).unwrap();
    let looked = node.look(Some(&sample));
    let bytes = |name: &str| container(&looked.snapshot, "a", name).measured[0].bytes;
    assert_eq!((bytes("main"), bytes("side")), (Some(300 * MIB), Some(500 * MIB)));
    // A container that is not known to run has no processes that are known: nothing is said, and nothing suspected.
    node.world.pods.as_mut().unwrap().get_mut(&"a".into()).unwrap().containers.clear();
    let looked = node.look(Some(&sample));
    assert_eq!(container(&looked.snapshot, "a", "main").measured[0].bytes, None);
}

/// Where the driver does not say how much a process holds, it holds its card all the same, also once it is dead.
#[test]
fn a_process_without_a_figure_is_on_its_card() {
    let mut node = Node::new();
    node.pod("p", &["main"], &[("GPU-0", 4096, 30)]);
    let me = std::process::id();
    node.processes("p", "main", &[me]);
    let mut told = sample(&["GPU-0"], &[("GPU-0", me, 1, 0)], 0);
    told.cards[0].processes.as_mut().unwrap()[0].bytes = None;
    let looked = node.look(Some(&told));
    assert_eq!(looked.on_cards.get("p"), Some(&[me].into()));
}
