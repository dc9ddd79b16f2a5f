//! CDI specs, as far as we read and write them. What we do not know is carried along unchanged.
//!
//! Format: the Container Device Interface specification, versions 0.3 to 1.0.

use std::collections::{BTreeMap, BTreeSet};

use mullion_crds::names::GRANT_KIND;
use serde::de::Deserializer;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Lowest version that allows a device's name to begin with a digit.
const LEAST_VERSION: &str = "0.5.0";

/// A CDI spec file.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Spec {
    /// Version of the format.
    pub cdi_version: String,
    /// `vendor/class`.
    pub kind: String,
    /// Edits of every container that gets any device of this file.
    #[serde(default, deserialize_with = "nullable", skip_serializing_if = "ContainerEdits::is_empty")]
    pub container_edits: ContainerEdits,
    /// The devices.
    #[serde(default, deserialize_with = "nullable")]
    pub devices: Vec<Device>,
    /// All other fields.
    #[serde(flatten)]
    pub rest: BTreeMap<String, Value>,
}

/// One device of a spec.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Device {
    /// Name, unique in its kind.
    pub name: String,
    /// Edits of every container that gets it.
    #[serde(default, deserialize_with = "nullable")]
    pub container_edits: ContainerEdits,
    /// All other fields.
    #[serde(flatten)]
    pub rest: BTreeMap<String, Value>,
}

/// What is done to a container.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ContainerEdits {
    /// `NAME=value`.
    #[serde(default, deserialize_with = "nullable", skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<String>,
    /// Device nodes.
    #[serde(default, deserialize_with = "nullable", skip_serializing_if = "Vec::is_empty")]
    pub device_nodes: Vec<DeviceNode>,
    /// Mounts.
    #[serde(default, deserialize_with = "nullable", skip_serializing_if = "Vec::is_empty")]
    pub mounts: Vec<Mount>,
    /// OCI hooks, unread.
    #[serde(default, deserialize_with = "nullable", skip_serializing_if = "Vec::is_empty")]
    pub hooks: Vec<Value>,
    /// All other fields.
    #[serde(flatten)]
    pub rest: BTreeMap<String, Value>,
}

/// A device node.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DeviceNode {
    /// Path in the container, and on the host where `hostPath` does not say otherwise.
    pub path: String,
    /// All other fields.
    #[serde(flatten)]
    pub rest: BTreeMap<String, Value>,
}

/// A mount.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Mount {
    /// Path on the host.
    pub host_path: String,
    /// Path in the container.
    pub container_path: String,
    /// Mount options.
    #[serde(default, deserialize_with = "nullable", skip_serializing_if = "Vec::is_empty")]
    pub options: Vec<String>,
    /// All other fields.
    #[serde(flatten)]
    pub rest: BTreeMap<String, Value>,
}

/// `key: null` and a missing key mean the same to the CDI libraries.
fn nullable<'de, D: Deserializer<'de>, T: Default + Deserialize<'de>>(from: D) -> Result<T, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or_default())
}

impl ContainerEdits {
    /// Whether nothing is done.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Adds what `other` does. An edit that is there already is not repeated (the runtime would mount twice and run a
    /// hook twice); a variable is set to `other`'s value.
    pub fn merge(&mut self, other: &Self) {
        for variable in &other.env {
            self.set_variable(variable.clone());
        }
        for node in &other.device_nodes {
            if !self.device_nodes.iter().any(|n| n.path == node.path) {
                self.device_nodes.push(node.clone());
            }
        }
        for mount in &other.mounts {
            if !self.mounts.iter().any(|m| m.container_path == mount.container_path) {
                self.mounts.push(mount.clone());
            }
        }
        for hook in &other.hooks {
            if !self.hooks.contains(hook) {
                self.hooks.push(hook.clone());
            }
        }
        for (key, value) in &other.rest {
            match (self.rest.get_mut(key), value) {
                (Some(Value::Array(mine)), Value::Array(theirs)) => {
                    for item in theirs {
                        if !mine.contains(item) {
                            mine.push(item.clone());
                        }
                    }
                }
                (Some(_), _) => {}
                (None, value) => {
                    self.rest.insert(key.clone(), value.clone());
                }
            }
        }
    }

    /// Sets a variable, given as `NAME=value`.
    pub fn set_variable(&mut self, variable: String) {
        let name = |v: &str| v.split('=').next().map(str::to_owned);
        match self.env.iter_mut().find(|v| name(v) == name(&variable)) {
            Some(known) => *known = variable,
            None => self.env.push(variable),
        }
    }

    /// The paths of the device nodes with what is behind them.
    fn nodes(&self) -> BTreeSet<String> {
        let behind = |n: &DeviceNode| {
            let host = n.rest.get("hostPath").and_then(Value::as_str).unwrap_or(&n.path);
            format!("{}={host}", n.path)
        };
        self.device_nodes.iter().map(behind).collect()
    }
}

/// The spec file of one grant.
#[must_use]
pub fn grant_spec(grant: &str, driver_version: &str, edits: ContainerEdits) -> Spec {
    Spec {
        cdi_version: newer(driver_version, LEAST_VERSION).to_owned(),
        kind: GRANT_KIND.to_owned(),
        devices: vec![Device { name: grant.to_owned(), container_edits: edits, rest: BTreeMap::new() }],
        ..Spec::default()
    }
}

/// Name of a grant's spec file.
#[must_use]
pub fn file_name(grant: &str) -> String {
    format!("mullion.io-grant-{grant}.json")
}

/// The grant that a spec file of ours is for.
#[must_use]
pub fn grant_of(file_name: &str) -> Option<&str> {
    let grant = file_name.strip_prefix("mullion.io-grant-")?.strip_suffix(".json")?;
    is_grant(grant).then_some(grant)
}

/// Whether that is a grant's name: 16 hex digits.
#[must_use]
pub fn is_grant(name: &str) -> bool {
    name.len() == 16 && name.bytes().all(|b| b.is_ascii_hexdigit())
}

fn newer<'a>(a: &'a str, b: &'a str) -> &'a str {
    let parts = |v: &str| v.split('.').map(|p| p.parse::<u32>().unwrap_or(0)).collect::<Vec<_>>();
    if parts(a) >= parts(b) { a } else { b }
}

/// Whether a grant's spec that the runtime may have read already still gives the container what it gave before: the
/// same nodes, and no mount of a file that is gone. Its text may differ (a newer agent sets another variable); it
/// must then stay as it is.
#[must_use]
pub fn still_true(old: &Spec, new: &Spec, exists: impl Fn(&str) -> bool) -> bool {
    let edits = |spec: &Spec| spec.devices.first().map(|d| d.container_edits.clone()).unwrap_or_default();
    let (old, new) = (edits(old), edits(new));
    old.nodes() == new.nodes() && old.mounts.iter().all(|m| exists(&m.host_path))
}

/// The host's path of what a grant's spec mounts at `path` of the container.
#[must_use]
pub fn mounted_at<'a>(spec: &'a Spec, path: &str) -> Option<&'a str> {
    let mut mounts = spec.devices.iter().flat_map(|d| &d.container_edits.mounts);
    mounts.find(|m| m.container_path == path).map(|m| m.host_path.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn edits(value: Value) -> ContainerEdits {
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn merging_repeats_nothing_and_loses_nothing() {
        let mut all = edits(json!({
            "env": ["A=1", "B=2"],
            "deviceNodes": [{"path": "/dev/nvidiactl", "hostPath": "/fake/nvidiactl"}],
            "mounts": [{"hostPath": "/a", "containerPath": "/a", "options": ["ro"]}],
            "hooks": [{"hookName": "createContainer", "path": "/h", "args": ["x"]}],
            "additionalGids": [44], "intelRdt": {"closID": "a"},
        }));
        all.merge(&edits(json!({
            "env": ["B=3", "C=4=5"],
            "deviceNodes": [{"path": "/dev/nvidiactl"}, {"path": "/dev/nvidia0", "permissions": "rw"}],
            "mounts": [{"hostPath": "/other", "containerPath": "/a"}, {"hostPath": "/b", "containerPath": "/b"}],
            "hooks": [{"hookName": "createContainer", "path": "/h", "args": ["x"]}, {"hookName": "poststop", "path": "/p"}],
            "additionalGids": [44, 45], "intelRdt": {"closID": "b"}, "netDevices": [{"name": "ib0"}],
        })));
        let want = json!({
            "env": ["A=1", "B=3", "C=4=5"],
            "deviceNodes": [{"path": "/dev/nvidiactl", "hostPath": "/fake/nvidiactl"}, {"path": "/dev/nvidia0", "permissions": "rw"}],
            "mounts": [{"hostPath": "/a", "containerPath": "/a", "options": ["ro"]}, {"hostPath": "/b", "containerPath": "/b"}],
            "hooks": [{"hookName": "createContainer", "path": "/h", "args": ["x"]}, {"hookName": "poststop", "path": "/p"}],
            "additionalGids": [44, 45], "intelRdt": {"closID": "a"}, "netDevices": [{"name": "ib0"}],
        });
        assert_eq!(serde_json::to_value(&all).unwrap(), want);
    }

    #[test]
    fn nulls_are_as_good_as_nothing() {
        let spec: Spec = serde_json::from_value(json!({
            "cdiVersion": "0.5.0", "kind": "k/c", "containerEdits": null,
            "devices": [{"name": "0", "containerEdits": {"env": null, "deviceNodes": null, "mounts": null, "hooks": null}}],
        }))
        .unwrap();
        assert!(spec.devices[0].container_edits.is_empty() && spec.container_edits.is_empty());
    }

    #[test]
    fn the_version_is_the_drivers_unless_too_old_for_our_names() {
        for (driver, want) in
            [("0.3.0", "0.5.0"), ("0.5.0", "0.5.0"), ("0.10.0", "0.10.0"), ("1.0.0", "1.0.0"), ("", "0.5.0")]
        {
            assert_eq!(grant_spec("0123456789abcdef", driver, ContainerEdits::default()).cdi_version, want);
        }
    }

    #[test]
    fn file_names_name_their_grant_and_no_others() {
        let grant = "0123456789abcdef";
        assert_eq!(grant_of(&file_name(grant)), Some(grant));
        for name in [
            "nvidia.yaml",
            "mullion.io-grant-0123.json",
            "mullion.io-grant-0123456789abcdef.json.tmp",
            "mullion.io-grant-0123456789abcdeg.json",
        ] {
            assert_eq!(grant_of(name), None, "{name}");
        }
    }

    #[test]
    fn a_spec_stays_true_while_nodes_are_the_same_and_its_files_exist() {
        let spec = |minor: u32, env: &str, library: &str| {
            let edits = edits(json!({
                "env": [env], "deviceNodes": [{"path": format!("/dev/nvidia{minor}")}],
                "mounts": [{"hostPath": library, "containerPath": "/lib/x"}],
            }));
            grant_spec("0123456789abcdef", "0.5.0", edits)
        };
        let exists = |path: &str| path != "/gone";
        for (case, old, new, want) in [
            ("the same", spec(0, "A=1", "/lib"), spec(0, "A=1", "/lib"), true),
            ("a newer agent's variable", spec(0, "A=1", "/lib"), spec(0, "A=2", "/lib"), true),
            ("another card", spec(0, "A=1", "/lib"), spec(1, "A=1", "/lib"), false),
            ("the driver was replaced", spec(0, "A=1", "/gone"), spec(0, "A=1", "/lib2"), false),
        ] {
            assert_eq!(still_true(&old, &new, exists), want, "{case}");
        }
    }
}
