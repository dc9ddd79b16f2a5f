//! What is changed of a pod: its scheduler, resources that Kubernetes needs to see, and the stamp of this call.
//! Nothing that stands there already.

use std::collections::BTreeMap;

use json_patch::jsonptr::PointerBuf;
use json_patch::{AddOperation, Patch, PatchOperation};
use k8s_openapi::api::core::v1::{Container, Pod};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use mullion_core::request::{CORES, COUNT, MEMORY, MEMORY_PERCENTAGE, PodRequest};
use mullion_crds::names::SCHEDULER;
use mullion_telemetry::trace::{ADMISSION_ANNOTATION, AdmissionStamp};
use serde_json::{Value, json};

/// The patch for a pod that asks for `request`.
#[must_use]
pub fn patch(pod: &Pod, request: &PodRequest, stamp: &AdmissionStamp) -> Patch {
    let mut operations = Vec::new();
    let spec = pod.spec.as_ref();
    if spec.and_then(|s| s.scheduler_name.as_deref()) != Some(SCHEDULER) {
        operations.push(add(&["spec", "schedulerName"], json!(SCHEDULER)));
    }
    let inits = spec.and_then(|s| s.init_containers.as_deref()).unwrap_or_default();
    let apps = spec.map(|s| s.containers.as_slice()).unwrap_or_default();
    for (list, containers) in [("initContainers", inits), ("containers", apps)] {
        for (index, container) in containers.iter().enumerate() {
            let wish = request.containers.iter().find(|wish| wish.name == container.name);
            if let Some(wish) = wish {
                resources(&mut operations, list, index, container, wish.request.count);
            }
        }
    }
    let there = pod.metadata.annotations.as_ref().and_then(|all| all.get(ADMISSION_ANNOTATION));
    let stamped = there.is_some_and(|text| text.parse::<AdmissionStamp>().is_ok());
    match &pod.metadata.annotations {
        _ if stamped => {}
        Some(_) => {
            operations
                .push(add(&["metadata", "annotations", ADMISSION_ANNOTATION], json!(stamp.to_string())));
        }
        None => {
            operations
                .push(add(&["metadata", "annotations"], json!({ADMISSION_ANNOTATION: stamp.to_string()})));
        }
    }
    Patch(operations)
}

/// The kubelet hands out devices by the count resource alone, and Kubernetes wants limit and request of an
/// extended resource both there and equal.
fn resources(
    operations: &mut Vec<PatchOperation>,
    list: &str,
    index: usize,
    container: &Container,
    count: u32,
) {
    let index = index.to_string();
    let resources = container.resources.clone().unwrap_or_default();
    let (limits, requests) = (resources.limits.as_ref(), resources.requests.as_ref());
    let mut wanted: BTreeMap<&str, Quantity> = BTreeMap::new();
    for key in [COUNT, MEMORY, MEMORY_PERCENTAGE, CORES] {
        let written = limits.and_then(|l| l.get(key)).or_else(|| requests.and_then(|r| r.get(key)));
        if let Some(value) = written {
            wanted.insert(key, value.clone());
        }
    }
    wanted.entry(COUNT).or_insert_with(|| Quantity(count.to_string()));
    if container.resources.is_none() {
        let both = json!({"limits": wanted, "requests": wanted});
        operations.push(add(&["spec", list, &index, "resources"], both));
        return;
    }
    for (side, present) in [("limits", limits), ("requests", requests)] {
        let Some(present) = present else {
            operations.push(add(&["spec", list, &index, "resources", side], json!(wanted)));
            continue;
        };
        for (key, value) in wanted.iter().filter(|(key, _)| !present.contains_key(**key)) {
            operations.push(add(&["spec", list, &index, "resources", side, key], json!(value)));
        }
    }
}

fn add(path: &[&str], value: Value) -> PatchOperation {
    PatchOperation::Add(AddOperation { path: PointerBuf::from_tokens(path.iter().copied()), value })
}
