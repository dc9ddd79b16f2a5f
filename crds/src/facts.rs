//! Objects to facts: the one translation that controller and agent share.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;
use mullion_core::facts::{
    AllocationFact, CardFact, CardMode, ContainerGrant, ContainerKind, DeviceGrant, KubeNodeFact, NodeFact,
    PodRef,
};
use mullion_core::units::{CoreShare, Mib};

use crate::gpunode::{Card, CardWish, GPUNode, HealthState, Mode};
use crate::vgpuallocation::{Kind, VGPUAllocation};

/// Slots of a shared card when the admin wishes nothing else.
pub const DEFAULT_SPLIT_COUNT: u32 = 10;

/// The wishes that hold for a card: by uuid, else by model, else the node's; field by field.
#[must_use]
pub fn wish_for(node: &GPUNode, uuid: &str, model: &str) -> CardWish {
    let by_uuid = node.spec.cards.iter().find(|c| c.uuid.as_deref() == Some(uuid));
    let by_model = node.spec.cards.iter().find(|c| c.uuid.is_none() && c.model.as_deref() == Some(model));
    let layers = [by_uuid.map(|c| &c.wish), by_model.map(|c| &c.wish), Some(&node.spec.all)];
    let layers: Vec<&CardWish> = layers.into_iter().flatten().collect();
    CardWish {
        mode: layers.iter().find_map(|w| w.mode),
        split_count: layers.iter().find_map(|w| w.split_count),
        memory_scaling: layers.iter().find_map(|w| w.memory_scaling),
        core_scaling: layers.iter().find_map(|w| w.core_scaling),
        cordon: layers.iter().find_map(|w| w.cordon),
    }
}

fn card(node: &GPUNode, card: &Card) -> CardFact {
    let wish = wish_for(node, &card.uuid, &card.model);
    let mode = match (wish.mode.unwrap_or_default(), card.mig.as_ref().is_some_and(|m| m.current)) {
        // A card whose MIG mode is on cannot run shared contexts, whatever is wished.
        (Mode::Mig, _) | (_, true) => CardMode::Mig,
        (Mode::Exclusive, false) => CardMode::Exclusive,
        (Mode::Shared, false) => CardMode::Shared,
    };
    let memory = u64::try_from(card.memory_mib).unwrap_or(0);
    CardFact {
        uuid: card.uuid.as_str().into(),
        index: card.index,
        model: card.model.clone(),
        memory: Mib(memory.saturating_mul(u64::from(wish.memory_scaling.unwrap_or(100))) / 100),
        cores: wish.core_scaling.unwrap_or(100),
        slots: if mode == CardMode::Exclusive { 1 } else { wish.split_count.unwrap_or(DEFAULT_SPLIT_COUNT) },
        numa_node: card.numa_node,
        healthy: card.health.state == HealthState::Healthy,
        cordoned: wish.cordon.unwrap_or(false),
        mode,
    }
}

/// A `GPUNode` as a fact; `None` while its agent has not reported yet.
#[must_use]
pub fn node(object: &GPUNode) -> Option<NodeFact> {
    let status = object.status.as_ref()?;
    let says = |kind: &str, word: &str| status.conditions.iter().any(|c| c.type_ == kind && c.status == word);
    let driver_ready = says("DriverReady", "True");
    // Where nothing can be written down, no driver files are known or no limit can be applied, every container would be
    // refused.
    let refuses = ["AuditWritable", "CDISpecFound", "LibraryFound"].iter().any(|kind| says(kind, "False"));
    Some(NodeFact {
        name: object.name_any().into(),
        node_uid: status.node_uid.as_str().into(),
        observation: u64::try_from(status.observation).unwrap_or(0),
        cordoned: status.closed || refuses || object.spec.all.cordon.unwrap_or(false),
        driver_ready,
        cards: status.cards.iter().map(|c| card(object, c)).collect(),
    })
}

/// A Node as a fact. `count` is the name of the count resource.
#[must_use]
pub fn kube_node(object: &Node, count: &str) -> KubeNodeFact {
    let allocatable = object.status.as_ref().and_then(|s| s.allocatable.as_ref());
    let slots = allocatable.and_then(|a| a.get(count)).and_then(|q| whole(&q.0));
    KubeNodeFact {
        name: object.name_any().into(),
        uid: object.uid().unwrap_or_default().into(),
        allocatable_slots: slots.unwrap_or(0),
    }
}

/// A whole quantity as the API server writes it: it makes `1k` of 1000.
fn whole(quantity: &str) -> Option<u64> {
    let end = quantity.find(|c: char| !c.is_ascii_digit()).unwrap_or(quantity.len());
    let (digits, suffix) = quantity.split_at(end);
    let scale = match suffix {
        "" => 1,
        "k" => 1000,
        "M" => 1_000_000,
        _ => return None,
    };
    digits.parse::<u64>().ok()?.checked_mul(scale)
}

impl From<Kind> for ContainerKind {
    fn from(kind: Kind) -> Self {
        match kind {
            Kind::Init => Self::Init,
            Kind::Sidecar => Self::Sidecar,
            Kind::App => Self::App,
        }
    }
}

impl From<ContainerKind> for Kind {
    fn from(kind: ContainerKind) -> Self {
        match kind {
            ContainerKind::Init => Self::Init,
            ContainerKind::Sidecar => Self::Sidecar,
            ContainerKind::App => Self::App,
        }
    }
}

/// A `VGPUAllocation` as a fact.
#[must_use]
pub fn allocation(object: &VGPUAllocation) -> AllocationFact {
    let conditions: BTreeMap<&str, bool> = object
        .status
        .iter()
        .flat_map(|s| &s.conditions)
        .map(|c| (c.type_.as_str(), c.status == "True"))
        .collect();
    let is = |name: &str| conditions.get(name).copied().unwrap_or(false);
    let spec = &object.spec;
    AllocationFact {
        uid: object.uid().unwrap_or_default().into(),
        name: object.name_any(),
        pod: PodRef {
            namespace: object.namespace().unwrap_or_default(),
            name: spec.pod.name.clone(),
            uid: spec.pod.uid.as_str().into(),
        },
        node: spec.node_name.as_str().into(),
        sequence: u64::try_from(spec.sequence).unwrap_or(0),
        created: object.creation_timestamp().map_or(0, |t| t.0.as_second()),
        containers: spec
            .containers
            .iter()
            .map(|c| ContainerGrant {
                name: c.name.clone(),
                kind: c.kind.into(),
                devices: c
                    .devices
                    .iter()
                    .map(|d| DeviceGrant {
                        uuid: d.uuid.as_str().into(),
                        memory: Mib(u64::try_from(d.memory_mib).unwrap_or(0)),
                        cores: u8::try_from(d.core_percent).ok().and_then(CoreShare::new).unwrap_or_default(),
                    })
                    .collect(),
            })
            .collect(),
        prepared: is("Prepared"),
        init_done: is("InitDone"),
        released: is("Released"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn slots_are_read_as_the_api_server_writes_them() {
        for (case, written, want) in [
            ("none", None, 0),
            ("nothing", Some("0"), 0),
            ("some", Some("40"), 40),
            ("1000 in Kubernetes' short form", Some("1k"), 1000),
            ("1280 has none", Some("1280"), 1280),
            ("16 cards at 125", Some("2k"), 2000),
            ("a million", Some("1M"), 1_000_000),
            ("no count", Some("1500m"), 0),
            ("hostile", Some("99999999999999999999k"), 0),
            ("empty", Some(""), 0),
        ] {
            let allocatable = written.map_or_else(|| json!({}), |q| json!({"nvidia.com/gpu": q}));
            let node = json!({"metadata": {"name": "n", "uid": "u"}, "status": {"allocatable": allocatable}});
            let node: Node = serde_json::from_value(node).unwrap();
            assert_eq!(kube_node(&node, "nvidia.com/gpu").allocatable_slots, want, "{case}");
        }
    }

    #[test]
    fn a_node_that_would_refuse_every_container_is_closed() {
        for (case, conditions, closed, spec) in [
            ("all well", json!([("AuditWritable", "True"), ("CDISpecFound", "True")]), false, json!({})),
            ("not known yet", json!([]), false, json!({})),
            ("unknown", json!([("AuditWritable", "Unknown")]), false, json!({})),
            ("nothing can be written down", json!([("AuditWritable", "False")]), true, json!({})),
            ("no driver files", json!([("CDISpecFound", "False")]), true, json!({})),
            ("no library", json!([("LibraryFound", "False")]), true, json!({})),
            ("no library is asked for", json!([("LibraryFound", "Unknown")]), false, json!({})),
            ("the admin closed it", json!([]), true, json!({"cordon": true})),
        ] {
            let conditions: Vec<_> = serde_json::from_value::<Vec<(String, String)>>(conditions)
                .unwrap()
                .into_iter()
                .map(|(kind, status)| {
                    json!({"type": kind, "status": status, "reason": "Test", "message": "",
                           "lastTransitionTime": "2026-11-29T00:00:00Z"})
                })
                .collect();
            let object = json!({"apiVersion": "mullion.io/v1alpha1", "kind": "GPUNode", "metadata": {"name": "n"},
                                "spec": spec, "status": {"conditions": conditions}});
            let object: GPUNode = serde_json::from_value(object).unwrap();
            assert_eq!(node(&object).unwrap().cordoned, closed, "{case}");
        }
    }
}
