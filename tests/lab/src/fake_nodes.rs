//! Nodes without a kubelet, for scale: a Node object and, with Mullion, a GPUNode with a filled status.

use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context, Result};
use fake_state::{Card, NodeState};
use serde_json::{Value, json};

use crate::api;

/// Cards of each such node.
const PROFILE: &str = "h100x8";
/// Slots per card, Mullion's default `splitCount`.
const SLOTS: usize = 10;
/// Requests under way at once.
const WORKERS: usize = 4;

/// Makes `count` nodes.
pub fn create(count: usize, with_gpu_nodes: bool) -> Result<()> {
    let next = AtomicUsize::new(1);
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..WORKERS)
            .map(|_| {
                scope.spawn(|| {
                    loop {
                        let number = next.fetch_add(1, Ordering::Relaxed);
                        if number > count {
                            return anyhow::Ok(());
                        }
                        let name = format!("fake-{number:04}");
                        one(&name, with_gpu_nodes).with_context(|| format!("cannot make node {name}"))?;
                    }
                })
            })
            .collect();
        workers
            .into_iter()
            .try_for_each(|worker| worker.join().unwrap_or_else(|_| anyhow::bail!("a worker panicked")))
    })
}

fn one(name: &str, with_gpu_node: bool) -> Result<()> {
    let state = fake_state::profile::node(PROFILE, name)?;
    let node = api::request("POST", "/api/v1/nodes", Some(&node(name, state.cards.len() * SLOTS)))?.json()?;
    if !with_gpu_node {
        return Ok(());
    }
    let uid = node["metadata"]["uid"].as_str().context("a node without a uid")?;
    let since = node["metadata"]["creationTimestamp"].as_str().context("a node without a time")?;
    let kinds = "/apis/mullion.io/v1alpha1/gpunodes";
    let object = json!({"apiVersion": "mullion.io/v1alpha1", "kind": "GPUNode", "metadata": {"name": name}, "spec": {}});
    let mut made = api::request("POST", kinds, Some(&object))?.json()?;
    made["status"] = gpu_node_status(&state, uid, since);
    let path = format!("{kinds}/{name}/status?fieldValidation=Strict");
    api::request("PUT", &path, Some(&made))?.json()?;
    Ok(())
}

/// A Node as its kubelet would have registered it; the API server keeps the status that comes with a creation.
fn node(name: &str, slots: usize) -> Value {
    let resources = json!({
        "cpu": "64", "memory": "512Gi", "ephemeral-storage": "1Ti", "pods": "250", "nvidia.com/gpu": slots.to_string(),
    });
    json!({
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "labels": {"kubernetes.io/arch": "amd64", "kubernetes.io/hostname": name, "kubernetes.io/os": "linux"},
        },
        "status": {
            "allocatable": resources,
            "capacity": resources,
            "conditions": [{"type": "Ready", "status": "True", "reason": "FakeNode"}],
        },
    })
}

/// What an agent would report of such a node.
fn gpu_node_status(state: &NodeState, node_uid: &str, since: &str) -> Value {
    let condition = |kind: &str| json!({"type": kind, "status": "True", "reason": "FakeNode", "message": "", "lastTransitionTime": since});
    let conditions = ["CDISpecFound", "DriverReady", "PluginRegistered"].map(condition);
    json!({
        "nodeUID": node_uid,
        "observation": 1,
        "bootId": node_uid,
        "driverVersion": state.driver.version,
        "agentVersion": env!("CARGO_PKG_VERSION"),
        "cards": state.cards.iter().map(card).collect::<Vec<_>>(),
        "conditions": conditions,
        "summary": {
            "gpus": format!("{0}/{0}", state.cards.len()),
            "freeMemory": format!("{0}Gi/{0}Gi", state.cards.iter().map(|card| card.memory_mib).sum::<u64>() / 1024),
            "mig": "off",
            "health": "Healthy",
        },
    })
}

fn card(card: &Card) -> Value {
    let links: Vec<_> = card
        .links
        .iter()
        .map(|link| json!({"peer": link.peer, "kind": path_kind(link.nvlinks, link.level)}))
        .collect();
    json!({
        "uuid": card.uuid,
        "index": card.index,
        "minor": card.minor,
        "model": card.model,
        "vendor": "nvidia",
        "architecture": architecture(card.architecture),
        "memoryMiB": card.memory_mib,
        "sms": card.sms,
        "numaNode": card.numa_node,
        // NVML gives the domain eight digits, Linux four.
        "pciAddress": card.pci.bus_id.strip_prefix("0000").unwrap_or(&card.pci.bus_id).to_lowercase(),
        "links": links,
        "health": {"state": "Healthy"},
        "mig": {"current": false, "pending": false},
    })
}

/// The path between two cards, in the words of `GPUNode`.
fn path_kind(nvlinks: u32, level: u32) -> String {
    match (nvlinks, level) {
        (1.., _) => format!("NVLink{nvlinks}"),
        (_, 0) => "SameBoard".into(),
        (_, 10) => "SingleSwitch".into(),
        (_, 20) => "MultiSwitch".into(),
        (_, 30) => "HostBridge".into(),
        (_, 40) => "SameNode".into(),
        _ => "System".into(),
    }
}

/// `nvmlDeviceArchitecture_t` in a word.
fn architecture(number: u32) -> &'static str {
    match number {
        7 => "ampere",
        8 => "ada",
        9 => "hopper",
        10 => "blackwell",
        _ => "unknown",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_has_every_card_once() {
        let state = fake_state::profile::node(PROFILE, "fake-0001").unwrap();
        let status = gpu_node_status(&state, "uid", "2026-01-01T00:00:00Z");
        let cards = status["cards"].as_array().unwrap();
        let uuids: std::collections::BTreeSet<_> =
            cards.iter().map(|card| card["uuid"].as_str().unwrap()).collect();
        assert_eq!(uuids.len(), 8);
        assert_eq!(cards[0]["architecture"], "hopper");
        assert!(
            cards.iter().all(|card| card["pciAddress"].as_str().unwrap().starts_with("0000:")),
            "{status}"
        );
    }
}
