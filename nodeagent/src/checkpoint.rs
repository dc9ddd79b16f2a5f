//! The kubelet's own record of which container owns which device ids: `kubelet_internal_checkpoint`.
//!
//! The kubelet writes it before it admits a pod, so an id set that it sends us belongs to the entries with
//! exactly that set. Each entry also holds our own answer to `Allocate`, and with it the grant's name: the proof
//! of who may have what. Shape: `pkg/kubelet/cm/devicemanager/checkpoint` of Kubernetes 1.20 and later. The
//! checksum is a hash of Go's own printing and is not looked at; unknown fields are left alone.

use std::collections::{BTreeMap, BTreeSet};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use mullion_core::units::PodUid;
use mullion_crds::names::GRANT_KIND;
use prost::Message;
use serde::Deserialize;

use crate::kubelet::deviceplugin::ContainerAllocateResponse;

/// One container with devices of our resource.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Owner {
    /// Uid of its pod.
    pub pod: PodUid,
    /// Its name.
    pub container: String,
    /// The ids that the kubelet gave it.
    pub ids: BTreeSet<String>,
    /// The grant that we named at `Allocate`: 16 hex digits. `None` when the answer is not one of ours.
    pub grant: Option<String>,
}

/// Why the checkpoint says nothing.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// Not JSON, cut off, or a field that we need is missing or of another shape.
    #[error("is damaged, or of a kubelet whose checkpoint this version does not know")]
    Shape {
        /// Where and why.
        source: serde_json::Error,
    },
    /// An answer of ours that is not what we gave.
    #[error(
        "holds an answer to Allocate for container {container:?} of pod {pod} that is no protobuf message"
    )]
    Answer {
        /// Uid of the pod.
        pod: PodUid,
        /// The container.
        container: String,
    },
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct File {
    data: Data,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Data {
    // Go writes an empty list as null; a missing one is another format.
    #[serde(deserialize_with = "Option::deserialize")]
    pod_device_entries: Option<Vec<Entry>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Entry {
    #[serde(rename = "PodUID")]
    pod: String,
    container_name: String,
    resource_name: String,
    #[serde(rename = "DeviceIDs", deserialize_with = "Option::deserialize")]
    device_ids: Option<BTreeMap<String, Option<Vec<String>>>>,
    #[serde(deserialize_with = "Option::deserialize")]
    alloc_resp: Option<String>,
}

/// The containers that own devices of `resource`.
///
/// # Errors
/// [`CheckpointError`] for anything that is not a whole checkpoint; nothing is guessed from a part of one.
pub fn parse(bytes: &[u8], resource: &str) -> Result<Vec<Owner>, CheckpointError> {
    let file: File = serde_json::from_slice(bytes).map_err(|source| CheckpointError::Shape { source })?;
    let entries = file.data.pod_device_entries.unwrap_or_default();
    entries.into_iter().filter(|e| e.resource_name == resource).map(owner).collect()
}

fn owner(entry: Entry) -> Result<Owner, CheckpointError> {
    let ids = entry.device_ids.unwrap_or_default().into_values().flatten().flatten().collect();
    let pod = PodUid(entry.pod);
    let answer = entry.alloc_resp.unwrap_or_default();
    let answer = STANDARD
        .decode(answer)
        .ok()
        .and_then(|bytes| ContainerAllocateResponse::decode(bytes.as_slice()).ok())
        .ok_or_else(|| CheckpointError::Answer {
            pod: pod.clone(),
            container: entry.container_name.clone(),
        })?;
    Ok(Owner { pod, container: entry.container_name, ids, grant: grant(&answer) })
}

/// The one grant that an answer of ours names.
fn grant(answer: &ContainerAllocateResponse) -> Option<String> {
    let [device] = answer.cdi_devices.as_slice() else { return None };
    let grant = device.name.strip_prefix(GRANT_KIND)?.strip_prefix('=')?;
    let ours = grant.len() == 16 && grant.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
    ours.then(|| grant.to_owned())
}

/// The owners of exactly `ids`.
#[must_use]
pub fn owners_of(owners: &[Owner], ids: &BTreeSet<String>) -> Vec<Owner> {
    owners.iter().filter(|o| o.ids == *ids).cloned().collect()
}

/// A checkpoint as the kubelet writes it, for tests of ours and of others.
#[doc(hidden)]
#[must_use]
pub fn write(resource: &str, owners: &[Owner]) -> Vec<u8> {
    use crate::kubelet::deviceplugin::CdiDevice;
    let entries: Vec<_> = owners
        .iter()
        .map(|o| {
            let cdi_devices =
                o.grant.iter().map(|g| CdiDevice { name: format!("{GRANT_KIND}={g}") }).collect();
            let answer = ContainerAllocateResponse { cdi_devices, ..Default::default() };
            serde_json::json!({
                "PodUID": o.pod.as_str(), "ContainerName": o.container, "ResourceName": resource,
                "DeviceIDs": {"-1": o.ids}, "AllocResp": STANDARD.encode(answer.encode_to_vec()),
            })
        })
        .collect();
    let file = serde_json::json!({
        "Data": {"PodDeviceEntries": entries, "RegisteredDevices": {}}, "Checksum": 1_234_567_u64,
    });
    file.to_string().into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const RESOURCE: &str = "nvidia.com/gpu";

    fn owner(pod: &str, container: &str, ids: &[&str], grant: Option<&str>) -> Owner {
        Owner {
            pod: pod.into(),
            container: container.to_owned(),
            ids: ids.iter().map(|&i| i.to_owned()).collect(),
            grant: grant.map(str::to_owned),
        }
    }

    /// As a kubelet 1.34 wrote it: i1 and s1 of a pod share a set, i2 and a another one.
    #[test]
    fn equal_sets_keep_their_own_grants() {
        let all = [
            owner("p", "i1", &["slot-0000"], Some("00000000000000a1")),
            owner("p", "s1", &["slot-0000"], Some("00000000000000a2")),
            owner("p", "i2", &["slot-0015"], Some("00000000000000a3")),
            owner("p", "a", &["slot-0015"], Some("00000000000000a4")),
        ];
        let read = parse(&write(RESOURCE, &all), RESOURCE).unwrap();
        assert_eq!(read, all);
        let set = BTreeSet::from(["slot-0015".to_owned()]);
        assert_eq!(owners_of(&read, &set), all[2..]);
        assert!(owners_of(&read, &BTreeSet::new()).is_empty());
        let more = BTreeSet::from(["slot-0000".to_owned(), "slot-0015".to_owned()]);
        assert!(owners_of(&read, &more).is_empty(), "a superset is nobody's");
    }

    #[test]
    fn devices_of_several_numa_nodes_are_one_set_and_foreign_resources_are_left_out() {
        let text = r#"{"Data":{"PodDeviceEntries":[
            {"PodUID":"p","ContainerName":"c","ResourceName":"nvidia.com/gpu","DeviceIDs":{"0":["b"],"1":["a"],"2":null},
             "AllocResp":"","New":{"field":1}},
            {"PodUID":"q","ContainerName":"c","ResourceName":"example.com/nic","DeviceIDs":{"-1":["a"]},"AllocResp":"%%"}
            ],"RegisteredDevices":null,"Later":[]},"Checksum":1,"Version":"v2"}"#;
        assert_eq!(parse(text.as_bytes(), RESOURCE).unwrap(), [owner("p", "c", &["a", "b"], None)]);
    }

    #[test]
    fn whatever_is_not_a_whole_checkpoint_is_refused() {
        let entry = |changes: &str| format!(r#"{{"Data":{{"PodDeviceEntries":[{{{changes}}}]}}}}"#);
        let good = r#""PodUID":"p","ContainerName":"c","ResourceName":"nvidia.com/gpu","DeviceIDs":{},"AllocResp":"""#;
        assert!(parse(entry(good).as_bytes(), RESOURCE).is_ok(), "the pattern itself is right");
        assert_eq!(parse(br#"{"Data":{"PodDeviceEntries":null}}"#, RESOURCE).unwrap(), []);
        for (case, text) in [
            ("empty", String::new()),
            ("truncated", entry(good)[..60].to_owned()),
            ("no data", r#"{"Checksum":1}"#.to_owned()),
            ("no entries", r#"{"Data":{"RegisteredDevices":{}}}"#.to_owned()),
            ("another type", r#"{"Data":{"PodDeviceEntries":{}}}"#.to_owned()),
            ("no pod", entry(&good.replace("PodUID", "PodID"))),
            ("no ids", entry(&good.replace("DeviceIDs", "Devices"))),
            ("ids as before 1.20", entry(&good.replace("{}", r#"["a"]"#))),
            ("no answer", entry(&good.replace("AllocResp", "Response"))),
            ("answer no base64", entry(&good.replace(r#""AllocResp":"""#, r#""AllocResp":"%%""#))),
            ("answer no protobuf", entry(&good.replace(r#""AllocResp":"""#, r#""AllocResp":"/////w==""#))),
            ("not text", "\u{0}\u{1}".to_owned()),
        ] {
            assert!(parse(text.as_bytes(), RESOURCE).is_err(), "{case}");
        }
    }

    #[test]
    fn only_one_grant_of_our_kind_counts() {
        use crate::kubelet::deviceplugin::CdiDevice;
        let answer = |names: &[&str]| ContainerAllocateResponse {
            cdi_devices: names.iter().map(|&n| CdiDevice { name: n.to_owned() }).collect(),
            ..Default::default()
        };
        assert_eq!(
            grant(&answer(&["mullion.io/grant=0123456789abcdef"])),
            Some("0123456789abcdef".to_owned())
        );
        for names in [
            &[][..],
            &["mullion.io/grant=0123456789abcdeF"],
            &["mullion.io/grant=0123456789abcde"],
            &["mullion.io/grant=../../../../etc/x"],
            &["mullion.io/grants=0123456789abcdef"],
            &["nvidia.com/gpu=0"],
            &["mullion.io/grant=0123456789abcdef", "mullion.io/grant=0123456789abcdee"],
        ] {
            assert_eq!(grant(&answer(names)), None, "{names:?}");
        }
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            let _ = parse(&bytes, RESOURCE);
        }

        #[test]
        fn no_damage_makes_it_panic_or_invent_an_owner(at in 0_usize..2000, byte in any::<u8>(), cut in any::<bool>()) {
            let all = [
                owner("p", "i1", &["slot-0000", "slot-0001"], Some("00000000000000a1")),
                owner("q", "s1", &["slot-0002"], Some("00000000000000a2")),
            ];
            let mut bytes = write(RESOURCE, &all);
            let at = at % bytes.len();
            if cut {
                bytes.truncate(at);
                prop_assert!(parse(&bytes, RESOURCE).is_err());
            } else {
                bytes[at] = byte;
                prop_assert!(parse(&bytes, RESOURCE).map_or(0, |o| o.len()) <= 2);
            }
        }
    }
}
