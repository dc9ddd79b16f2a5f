//! What `/metrics` shows, by name, label and unit: `docs/metrics.md` is the schema.

#[path = "../../../tests/metrics/schema.rs"]
mod schema;

use std::os::unix::fs::FileExt;
use std::time::Duration;

use mullion_nodeagent::metrics::Metrics;

use mullion_region::extension;
use mullion_region::hami::Layout;

use crate::common::tenant::Tenant;
use crate::common::{MIB, Node, S, container, hami, lines, sample, scrape, scrape_all};
use schema::schema;

// MO-06: a limit is shown from the moment of its promise; that nobody asked for the card yet is a number, no absence.
#[test]
fn a_container_that_has_not_touched_its_card_has_all_series() {
    let mut node = Node::new();
    node.pod("p", &["main"], &[("GPU-0", 4096, 30)]);
    let text = scrape(node.look(Some(&sample(&["GPU-0"], &[], 0))).snapshot);
    let of = r#"node="node-a",namespace="team",pod="p-name",container="main""#;
    for line in [
        format!("mullion_container_hook_attached{{{of}}} 0"),
        format!(r#"mullion_container_memory_limit_bytes{{{of},device_uuid="GPU-0"}} {}"#, 4096 * MIB),
        format!(r#"mullion_container_memory_used_bytes{{{of},device_uuid="GPU-0"}} 0"#),
        format!(r#"mullion_container_core_limit_percent{{{of},device_uuid="GPU-0"}} 30"#),
        format!(r#"mullion_container_limit_hits_total{{{of},device_uuid="GPU-0"}} 0"#),
        // HAMi's labels, in HAMi's order.
        format!(
            r#"hami_vgpu_memory_limit_bytes{{zone="vGPU",namespace="team",pod="p-name",container="main",vdevice_index="0",device_uuid="GPU-0"}} {}"#,
            4096 * MIB
        ),
        r#"hami_vgpu_memory_used_bytes{zone="vGPU",namespace="team",pod="p-name",container="main",vdevice_index="0",device_uuid="GPU-0"} 0"#.to_owned(),
        r#"vGPU_device_memory_usage_in_bytes{zone="vGPU",podnamespace="team",podname="p-name",ctrname="main",vdeviceid="0",deviceuuid="GPU-0"} 0"#.to_owned(),
        r#"hami_host_gpu_memory_used_bytes{zone="vGPU",node="node-a",device_index="0",device_uuid="GPU-0",device_type="NVIDIA-NVIDIA H100 80GB HBM3"} 1048576000"#.to_owned(),
    ] {
        assert!(text.lines().any(|l| l == line), "{line}\nis not in\n{text}");
    }
    assert!(lines(&text, "hami_container_last_kernel_elapsed_seconds").is_empty(), "nothing was launched");
}

// MO-03: two containers of two cards are four series, whatever else lies in the folders.
#[test]
fn an_unknown_file_beside_costs_no_series() {
    let mut node = Node::new();
    node.pod("p", &["one", "two"], &[("GPU-0", 4096, 30), ("GPU-1", 2048, 30)]);
    let driver = sample(&["GPU-0", "GPU-1"], &[], 0);
    let series = |node: &mut Node| {
        let text = scrape(node.look(Some(&driver)).snapshot);
        lines(&text, "hami_vgpu_memory_used_bytes").into_iter().map(str::to_owned).collect::<Vec<_>>()
    };
    let before = series(&mut node);
    assert_eq!(before.len(), 4);
    std::fs::create_dir(node.folder("p", "three")).unwrap();
    std::fs::create_dir(node.settings.containers_dir().join("whatever")).unwrap();
    std::fs::write(node.folder("p", "one").join("core.1234"), "x").unwrap();
    std::fs::write(node.settings.containers_dir().join("p_file"), "x").unwrap();
    assert_eq!(series(&mut node), before);
}

/// A `StatefulSet` makes its pod anew while something of the former one still holds its slice: both would have the same
/// series, and a scrape with one that stands twice is refused as a whole.
#[test]
fn of_two_pods_of_one_name_the_one_that_lives_has_the_series() {
    let mut node = Node::new();
    let limit = |node: &mut Node| {
        let driver = sample(&["GPU-0"], &[], 0);
        let looked = node.look(Some(&driver));
        let looked_after: Vec<_> = looked.snapshot.containers.iter().map(|c| c.pod.uid.clone()).collect();
        let text = scrape(looked.snapshot);
        let mut series: Vec<&str> =
            text.lines().filter(|l| !l.starts_with('#')).map(|l| l.rsplit_once(' ').unwrap().0).collect();
        let all = series.len();
        series.sort_unstable();
        series.dedup();
        assert_eq!(series.len(), all, "{text}");
        let limits = lines(&text, "mullion_container_memory_limit_bytes");
        let limits = limits.iter().map(|l| l.rsplit_once(' ').unwrap().1.parse::<u64>().unwrap() / MIB);
        (limits.collect::<Vec<_>>(), looked_after)
    };
    node.pod_named("web-0", 7, "b", &["main"], &[("GPU-0", 4096, 30)]);
    assert_eq!(limit(&mut node), (vec![4096], vec!["b".to_owned()]));
    // Deleted, and what is left of it shows as long as its name is nobody else's.
    node.world.pods.as_mut().unwrap().remove(&"b".into());
    assert_eq!(limit(&mut node).0, [4096]);
    node.pod_named("web-0", 8, "a", &["main"], &[("GPU-0", 2048, 30)]);
    let both = vec!["a".to_owned(), "b".to_owned()];
    assert_eq!(limit(&mut node), (vec![2048], both.clone()), "the former one is still looked after");
    // After a restart, before the pods are known.
    node.world.pods = None;
    assert_eq!(limit(&mut node), (vec![2048], both));
    // One of HAMi's takes the name.
    node.world.pods = Some(std::collections::BTreeMap::new());
    node.run("h", &["main"]);
    node.world.pods.as_mut().unwrap().get_mut(&"h".into()).unwrap().name = "web-0".to_owned();
    hami::folder(&node.folder("h", "main"));
    hami::write(&node.folder("h", "main").join("x.cache"), Layout::V1_2, "GPU-0", MIB, MIB);
    assert_eq!(limit(&mut node).0, [1]);
}

#[test]
fn what_a_container_did_is_a_row_each_minute() {
    let mut node = Node::new();
    node.pod("p", &["main"], &[("GPU-0", 4096, 30)]);
    let driver = sample(&["GPU-0"], &[], 0);
    assert_eq!(node.look(Some(&driver)).rows, []);
    let mut tenant = Tenant::start(&node.usage_path("p", "main"));
    tenant.hold(0, 300 * MIB);
    let file = node.usage("p", "main");
    file.launch(crate::common::START);
    file.count(0, extension::LIMIT_HITS_AT, 2);
    file.count(0, extension::PEAK_AT, 900 * MIB);
    let mut rows = Vec::new();
    for _ in 0..200 {
        rows.extend(node.look(Some(&driver)).rows);
    }
    let [mullion_audit::Event::UsageMinute { pod, container: name, cards, .. }] = rows.as_slice() else {
        panic!("{rows:?}")
    };
    assert_eq!((pod.uid.as_str(), name.as_str()), ("p", "main"));
    assert_eq!((cards[0].peak_mib, cards[0].used_mib, cards[0].limit_hits), (900, 300, 2));
    assert_eq!(cards[0].first_launch, Some(crate::common::START / S));
    // The container ends: what it did since is not lost.
    file.count(0, extension::LIMIT_HITS_AT, 3);
    let mut rows = node.look(Some(&driver)).rows;
    node.world.grants.clear();
    rows.extend(node.look(Some(&driver)).rows);
    let [mullion_audit::Event::UsageMinute { cards, .. }] = rows.as_slice() else { panic!("{rows:?}") };
    assert_eq!(cards[0].limit_hits, 1);
}

/// What was counted once stands in the log once, however often the agent starts; a container that starts meanwhile is
/// counted from its beginning.
#[test]
fn another_run_of_the_agent_counts_nothing_again() {
    let mut node = Node::new();
    node.pod("p", &["main"], &[("GPU-0", 4096, 30)]);
    let mut hits = std::collections::BTreeMap::new();
    for run in 1..=3 {
        node.anew();
        for look in 0..140 {
            if look == 1 {
                node.usage("p", "main").count(0, extension::LIMIT_HITS_AT, run * 1000);
                let pod = format!("of-run-{run}");
                node.pod(&pod, &["main"], &[("GPU-0", 4096, 30)]);
                node.usage(&pod, "main").count(0, extension::LIMIT_HITS_AT, 7);
            }
            for row in node.look(None).rows {
                if let mullion_audit::Event::UsageMinute { pod, cards, .. } = row {
                    *hits.entry(pod.uid).or_insert(0) += cards[0].limit_hits;
                }
            }
        }
    }
    let all: Vec<_> = hits.iter().map(|(pod, hits)| (pod.as_str(), *hits)).collect();
    assert_eq!(all, [("of-run-1", 7), ("of-run-2", 7), ("of-run-3", 7), ("p", 3000)]);
}

/// A container of HAMi's says in its own file which cards it has: no name makes a series twice, nor one of no card, also
/// while the driver says nothing.
#[test]
fn a_foreign_file_makes_no_series_but_one_of_each_card() {
    let mut node = Node::new();
    for (pod, card) in [("twice", "GPU-0"), ("none", "whatever-I-like")] {
        node.run(pod, &["main"]);
        hami::folder(&node.folder(pod, "main"));
        let path = node.folder(pod, "main").join("x.cache");
        let file = hami::write(&path, Layout::V1_2, card, MIB, MIB);
        file.write_all_at(&2_u64.to_le_bytes(), 56).unwrap();
        file.write_all_at(format!("{card}\0").as_bytes(), 64 + 96).unwrap();
        file.write_all_at(&(7 * MIB).to_le_bytes(), 1600 + 8).unwrap();
    }
    for told in [Some(sample(&["GPU-0"], &[], 0)), None] {
        let text = scrape(node.look(told.as_ref()).snapshot);
        let limits = lines(&text, "mullion_container_memory_limit_bytes");
        assert!(limits.len() == 1 && limits[0].ends_with(&format!(" {MIB}")), "{limits:#?}");
    }
}

/// Everything that can be shown, shown.
fn everything() -> String {
    let mut node = Node::new();
    node.pod("p", &["main"], &[("GPU-0", 4096, 30)]);
    node.pod("gone", &["main"], &[("GPU-0", 4096, 30)]);
    std::fs::remove_file(node.usage_path("gone", "main")).unwrap();
    node.run("h", &["main"]);
    hami::folder(&node.folder("h", "main"));
    hami::write(&node.folder("h", "main").join("x.cache"), Layout::V1_2, "GPU-0", MIB, MIB);
    let me = std::process::id();
    node.processes("p", "main", &[me]);
    node.usage("p", "main").launch(node.unix_ns());
    let driver = sample(&["GPU-0"], &[("GPU-0", me, 300, 40)], node.unix_ns());
    let looked = node.look(Some(&driver));
    assert!(container(&looked.snapshot, "h", "main").limits.is_none());
    let metrics = Metrics::default();
    metrics.prepared(Duration::from_millis(2), Some("HookMissing"));
    metrics.nvml_card_error("nvmlDeviceGetMemoryInfo_v2", "GPU-0");
    metrics.api_write("events");
    scrape_all(&metrics, looked.snapshot)
}

// MO-09: names, labels and units are a contract, and the contract is what is shown; the controller's half is checked in its
// own tests.
#[test]
fn mo_09_the_schema_is_what_is_shown() {
    schema::compare(&schema(&everything()), "nodeagent/tests/monitor/series.rs");
}

// MO-09: a series of an agent joins with one of the controller by labels of the same name.
#[test]
fn mo_09_series_of_both_exporters_join() {
    let all = schema(&everything());
    for (ours, of_the_controller) in [
        ("mullion_container_memory_used_bytes", "mullion_container_memory_allocated_bytes"),
        ("mullion_container_core_used_percent", "mullion_container_core_allocated_percent"),
        ("mullion_card_memory_used_bytes", "hami_gpu_memory_allocated_bytes"),
    ] {
        let mut labels = schema::labels_by_contract(of_the_controller);
        labels.retain(|label| label != "zone");
        assert_eq!(all[ours].labels, labels, "{ours}, {of_the_controller}");
    }
}

/// HAMi's part of the schema, as HAMi itself documents it: label for label.
#[test]
fn hamis_names_have_hamis_labels() {
    let all = schema(&everything());
    let host = "zone, node, device_index, device_uuid, device_type";
    let container = "zone, namespace, pod, container, vdevice_index, device_uuid";
    let old_host = "zone, nodeid, deviceidx, deviceuuid, devicetype";
    let old = "zone, podnamespace, podname, ctrname, vdeviceid, deviceuuid";
    for (name, labels) in [
        ("hami_host_gpu_memory_used_bytes", host),
        ("hami_host_gpu_utilization_ratio", host),
        ("hami_host_gpu_memory_controller_utilization_ratio", "zone, device_index, device_uuid, device_type"),
        ("hami_vgpu_memory_used_bytes", container),
        ("hami_vgpu_memory_limit_bytes", container),
        ("hami_container_device_memory_bytes", container),
        ("hami_container_device_utilization_ratio", container),
        ("hami_container_last_kernel_elapsed_seconds", container),
        ("hami_vgpu_memory_context_bytes", container),
        ("hami_vgpu_memory_module_bytes", container),
        ("hami_vgpu_memory_buffer_bytes", container),
        ("HostGPUMemoryUsage", old_host),
        ("HostCoreUtilization", old_host),
        ("vGPU_device_memory_usage_in_bytes", old),
        ("vGPU_device_memory_limit_in_bytes", old),
        ("Device_utilization_desc_of_container", old),
        ("Device_last_kernel_of_container", old),
        (
            "Device_memory_desc_of_container",
            "zone, podnamespace, podname, ctrname, vdeviceid, deviceuuid, context, module, data, offset",
        ),
    ] {
        assert_eq!(all[name].labels.join(", "), labels, "{name}");
        assert_eq!(all[name].kind, "gauge", "{name}");
    }
}
