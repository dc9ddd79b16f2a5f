//! `docs/metrics.md` is what is shown.

#[path = "../../../tests/metrics/schema.rs"]
mod schema;

use mullion_core::facts::{AllocationFact, ContainerGrant, ContainerKind, DeviceGrant, Event, PodRef};
use mullion_core::units::{CoreShare, Mib};
use schema::{Schema, schema};

use super::*;
use crate::fixtures::{card, kube_node, node};

fn container(name: &str, kind: ContainerKind, card: &str) -> ContainerGrant {
    let device =
        DeviceGrant { uuid: card.into(), memory: Mib(250), cores: CoreShare::new(30).unwrap_or_default() };
    ContainerGrant { name: name.to_owned(), kind, devices: vec![device] }
}

/// Allocation number `sequence` to a pod `p`, whose uid ends with the number.
fn allocation(sequence: u64) -> AllocationFact {
    let uid = format!("pod-{sequence}");
    AllocationFact {
        uid: format!("a-{sequence}").as_str().into(),
        name: format!("p-{sequence}"),
        pod: PodRef { namespace: "team".to_owned(), name: "p".to_owned(), uid: uid.as_str().into() },
        node: "n".into(),
        sequence,
        created: 0,
        containers: vec![
            container("prep", ContainerKind::Init, "GPU-1"),
            container("main", ContainerKind::App, "GPU-1"),
        ],
        prepared: true,
        init_done: true,
        released: false,
    }
}

/// Everything that can be shown, shown, while pods of one name have these allocations.
fn everything_of(allocations: impl IntoIterator<Item = AllocationFact>) -> String {
    let store = Arc::new(Store::new(mullion_core::request::Defaults::default()));
    store.write(|facts| {
        facts.fold(&Event::KubeNodeObserved(kube_node("n", 10)));
        facts.fold(&Event::NodeObserved(node("n", vec![card("GPU-1", 1000)])));
        for allocation in allocations {
            facts.fold(&Event::AllocationObserved(allocation));
        }
    });
    let metrics = Metrics::new();
    metrics.watch_cards(store);
    metrics.call("filter", "ok", 0.001);
    metrics.refusals.get_or_create(&CodeLabels { code: "NodeUnknown" }).inc();
    metrics.action("undo", "ok");
    metrics.invalid_objects.get_or_create(&KindLabels { kind: "Pod" }).inc();
    metrics.watch_errors.get_or_create(&KindLabels { kind: "Pod" }).inc();
    metrics.encode().unwrap()
}

fn everything() -> String {
    everything_of([allocation(1)])
}

// MO-09: one schema for both exporters, and the contract is what is shown.
#[test]
fn mo_09_the_schema_is_what_is_shown() {
    schema::compare(&schema(&everything()), "controller/src/metrics/tests.rs");
}

// MO-09: a series of the controller joins with one of an agent by labels of the same name.
#[test]
fn mo_09_series_of_both_exporters_join() {
    let all: Schema = schema(&everything());
    for (ours, of_the_agent) in [
        ("mullion_container_memory_allocated_bytes", "mullion_container_memory_used_bytes"),
        ("mullion_container_core_allocated_percent", "mullion_container_core_used_percent"),
        ("hami_gpu_memory_allocated_bytes", "mullion_card_memory_used_bytes"),
        ("hami_gpu_core_allocated_ratio", "mullion_card_utilization_percent"),
    ] {
        let labels: Vec<_> = all[ours].labels.iter().filter(|l| *l != "zone").cloned().collect();
        assert_eq!(labels, schema::labels_by_contract(of_the_agent), "{ours}, {of_the_agent}");
    }
}

/// HAMi's part, as HAMi itself documents it: label for label, but for `device_cores`, whose value is no identity.
#[test]
fn hamis_names_have_hamis_labels() {
    let all = schema(&everything());
    let card = "zone, node, device_uuid, device_index, device_type";
    let slice = "zone, namespace, node, pod, container_index, device_uuid";
    for (name, labels) in [
        ("hami_gpu_memory_limit_bytes", card),
        ("hami_gpu_core_limit_ratio", card),
        ("hami_gpu_memory_allocated_bytes", card),
        ("hami_gpu_core_allocated_ratio", card),
        ("hami_gpu_shared_count", card),
        ("hami_node_gpu_memory_allocated_ratio", card),
        ("hami_vgpu_memory_allocated_bytes", slice),
        ("hami_vgpu_core_allocated_ratio", slice),
    ] {
        assert_eq!(all[name].labels.join(", "), labels, "{name}");
        assert_eq!(all[name].kind, "gauge", "{name}");
    }
}

/// Grants that count, with their numbers: an init container that is done does not.
#[test]
fn what_is_granted_is_shown_by_container() {
    let text = everything();
    let of = |name: &str| text.lines().filter(|l| l.starts_with(name)).collect::<Vec<_>>();
    assert_eq!(
        of("mullion_container_memory_allocated_bytes"),
        [
            r#"mullion_container_memory_allocated_bytes{node="n",namespace="team",pod="p",container="main",device_uuid="GPU-1"} 262144000"#
        ]
    );
    assert_eq!(
        of("hami_vgpu_core_allocated_ratio"),
        [
            r#"hami_vgpu_core_allocated_ratio{zone="vGPU",namespace="team",node="n",pod="p",container_index="1",device_uuid="GPU-1"} 30"#
        ]
    );
    let part = of("hami_node_gpu_memory_allocated_ratio");
    assert!(part.len() == 1 && part[0].ends_with("} 0.25"), "{part:?}");
}

// A StatefulSet's pod that was deleted and made anew has the name of the one before, whose cards are not given back yet.
#[test]
fn pods_of_one_name_are_one_series_that_adds_up() {
    let text = everything_of([allocation(1), allocation(2)]);
    schema(&text);
    for (series, sum) in [
        ("mullion_container_memory_allocated_bytes{", 500 << 20),
        ("mullion_container_core_allocated_percent{", 60),
        ("hami_vgpu_memory_allocated_bytes{", 500 << 20),
        ("hami_vgpu_core_allocated_ratio{", 60),
        ("hami_gpu_memory_allocated_bytes{", 500 << 20),
    ] {
        let shown: Vec<_> = text.lines().filter(|line| line.starts_with(series)).collect();
        assert!(shown.len() == 1 && shown[0].ends_with(&format!("}} {sum}")), "{series}: {shown:?}");
    }
    // Where the containers changed places, HAMi's labels, which have the place alone, meet no less.
    let mut other = allocation(2);
    other.containers.reverse();
    other.containers[0].name = "else".to_owned();
    schema(&everything_of([allocation(1), other]));
}

#[test]
#[should_panic(expected = "stands twice")]
fn a_series_that_stands_twice_is_no_scrape() {
    schema("# HELP x X.\n# TYPE x gauge\nx{zone=\"a\"} 1\nx{zone=\"a\"} 2\n");
}
