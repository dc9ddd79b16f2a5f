//! The spec: what is in it, and in which files it was found.

use std::path::{Path, PathBuf};

use clap::ValueEnum;
use fake_state::{Card, NodeState};
use serde::Serialize;

/// Oldest CDI version that knows device names that begin with a digit and `hostPath` of device nodes.
const CDI_VERSION: &str = "0.5.0";

/// Where containers get the driver's libraries.
const LIBRARY_FOLDER: &str = "/usr/lib/x86_64-linux-gnu";

/// Libraries of the driver that containers may need; those that the node has are mounted.
const LIBRARIES: [&str; 12] = [
    "libcuda.so",
    "libcudadebugger.so",
    "libnvcuvid.so",
    "libnvidia-allocator.so",
    "libnvidia-cfg.so",
    "libnvidia-encode.so",
    "libnvidia-ml.so",
    "libnvidia-nvvm.so",
    "libnvidia-opencl.so",
    "libnvidia-opticalflow.so",
    "libnvidia-pkcs11.so",
    "libnvidia-ptxjitcompiler.so",
];

/// Programs of the driver, likewise.
const PROGRAMS: [&str; 5] = [
    "nvidia-cuda-mps-control",
    "nvidia-cuda-mps-server",
    "nvidia-debugdump",
    "nvidia-persistenced",
    "nvidia-smi",
];

/// Device nodes of every container; the last is there only where the modesetting module is.
const CONTROL_NODES: [&str; 3] = ["nvidia-uvm", "nvidia-uvm-tools", "nvidiactl"];
const OPTIONAL_NODE: &str = "nvidia-modeset";

const MOUNT_OPTIONS: [&str; 4] = ["ro", "nosuid", "nodev", "bind"];
/// Of the folder in which the simulated driver keeps what it gave to whom.
const SHARED_OPTIONS: [&str; 4] = ["rw", "nosuid", "nodev", "bind"];

/// What this program refuses.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A device node that a device needs is not there.
    #[error("there is no {}: make the device nodes before the spec", path.display())]
    NoDeviceNode {
        /// Where it was looked for.
        path: PathBuf,
    },
    /// A path that a spec cannot hold.
    #[error("{} is not UTF-8: use a folder whose name is", path.display())]
    PathNotText {
        /// The path.
        path: PathBuf,
    },
    /// The spec could not be printed.
    #[error("cannot print the spec as {format}")]
    Print {
        /// JSON or YAML.
        format: &'static str,
        /// What the printer said.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

impl Error {
    /// The stable name of this refusal.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::NoDeviceNode { .. } => "NoDeviceNode",
            Self::PathNotText { .. } => "PathNotText",
            Self::Print { .. } => "SpecPrint",
        }
    }
}

/// How devices are named; the strategies of `nvidia-ctk`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Naming {
    /// `0`, and `0:1` for the second MIG device on it.
    Index,
    /// `GPU-…`, and `MIG-…`.
    Uuid,
}

/// Where the node keeps what the spec refers to.
#[derive(Debug)]
pub struct Sources {
    /// Device nodes.
    pub dev_root: PathBuf,
    /// Libraries and programs.
    pub driver_root: PathBuf,
    /// Program for hooks, if there shall be any.
    pub hooks: Option<PathBuf>,
    /// State file that the driver's libraries in containers share with those of the node. A real driver has its state in
    /// the kernel.
    pub shared_state: Option<PathBuf>,
}

/// A CDI spec.
#[derive(Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Spec {
    cdi_version: &'static str,
    kind: &'static str,
    devices: Vec<Device>,
    container_edits: Edits,
}

#[derive(Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
struct Device {
    name: String,
    container_edits: Edits,
}

#[derive(Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
struct Edits {
    #[serde(skip_serializing_if = "Vec::is_empty")]
    env: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    device_nodes: Vec<DeviceNode>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    hooks: Vec<Hook>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    mounts: Vec<Mount>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
struct DeviceNode {
    path: String,
    host_path: String,
}

#[derive(Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
struct Hook {
    #[serde(rename = "hookName")]
    point: &'static str,
    path: String,
    args: Vec<String>,
}

#[derive(Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
struct Mount {
    host_path: String,
    container_path: String,
    options: [&'static str; 4],
}

impl Spec {
    /// The spec of a node as it is now. Like NVIDIA's it is a snapshot: made anew after every MIG change.
    ///
    /// # Errors
    /// [`Error::NoDeviceNode`] when a card's node is missing, [`Error::PathNotText`].
    pub fn of(state: &NodeState, sources: &Sources, naming: Naming) -> Result<Self, Error> {
        let mut devices = Vec::new();
        for (place, card) in state.listed().enumerate().filter(|(_, c)| !c.lost) {
            let node = sources.node(&format!("nvidia{}", card.minor))?;
            let name = match naming {
                Naming::Index => place.to_string(),
                Naming::Uuid => card.uuid.clone(),
            };
            devices.push(Device::new(name, vec![node.clone()]));
            for gi in &card.mig.instances {
                for ci in &gi.compute {
                    let name = match naming {
                        Naming::Index => format!("{place}:{}", ci.slot),
                        Naming::Uuid => ci.uuid.clone(),
                    };
                    let capabilities = capability_minors(card, gi.id, ci.id);
                    let mut nodes = vec![node.clone()];
                    for minor in capabilities {
                        nodes.push(sources.node(&format!("nvidia-caps/nvidia-cap{minor}"))?);
                    }
                    devices.push(Device::new(name, nodes));
                }
            }
        }
        let mut every: Vec<DeviceNode> = Vec::new();
        for node in devices.iter().flat_map(|d| &d.container_edits.device_nodes) {
            if !every.contains(node) {
                every.push(node.clone());
            }
        }
        devices.push(Device::new("all".to_owned(), every));
        Ok(Self {
            cdi_version: CDI_VERSION,
            kind: "nvidia.com/gpu",
            devices,
            container_edits: sources.common(&state.driver.version)?,
        })
    }

    /// As JSON.
    ///
    /// # Errors
    /// [`Error::Print`].
    pub fn json(&self) -> Result<String, Error> {
        let text = serde_json::to_string_pretty(self);
        text.map_err(|e| Error::Print { format: "JSON", source: e.into() })
    }

    /// As YAML.
    ///
    /// # Errors
    /// [`Error::Print`].
    pub fn yaml(&self) -> Result<String, Error> {
        let text = serde_saphyr::to_string(self);
        text.map_err(|e| Error::Print { format: "YAML", source: e.to_string().into() })
    }
}

impl Device {
    fn new(name: String, device_nodes: Vec<DeviceNode>) -> Self {
        Self { name, container_edits: Edits { device_nodes, ..Edits::default() } }
    }
}

/// Minors of the capability nodes of a GPU instance and its compute instance, fixed by the driver's
/// `mig-minors` table.
fn capability_minors(card: &Card, gi: u32, ci: u32) -> [u32; 2] {
    let access = 3 + 135 * card.minor + 9 * gi;
    [access, access + 1 + ci]
}

impl Sources {
    fn node(&self, name: &str) -> Result<DeviceNode, Error> {
        let path = self.dev_root.join(name);
        if !path.exists() {
            return Err(Error::NoDeviceNode { path });
        }
        Ok(DeviceNode { path: format!("/dev/{name}"), host_path: text(&path)? })
    }

    fn common(&self, driver: &str) -> Result<Edits, Error> {
        let mut device_nodes = Vec::new();
        if self.dev_root.join(OPTIONAL_NODE).exists() {
            device_nodes.push(self.node(OPTIONAL_NODE)?);
        }
        for name in CONTROL_NODES {
            device_nodes.push(self.node(name)?);
        }
        let mut mounts = Vec::new();
        for library in LIBRARIES {
            // A real driver has the file with its version, the simulated one the name that programs ask for.
            for name in [format!("{library}.{driver}"), format!("{library}.1")] {
                if let Some(host) = self.found(LIBRARY_FOLDER, &name) {
                    mounts.push(Mount::new(&host, &format!("{LIBRARY_FOLDER}/{name}"))?);
                    break;
                }
            }
        }
        for program in PROGRAMS {
            if let Some(host) = self.found("/usr/bin", program) {
                mounts.push(Mount::new(&host, &format!("/usr/bin/{program}"))?);
            }
        }
        let hooks = match &self.hooks {
            Some(program) => hooks(program, driver, &mounts)?,
            None => vec![],
        };
        let mut env = vec!["NVIDIA_VISIBLE_DEVICES=void".to_owned()];
        if let Some(state) = &self.shared_state {
            env.push(format!("{}={}", fake_state::STATE_ENV, text(state)?));
            env.push(format!("{}=/dev", fake_state::NODES_ENV));
            let folder = state.parent().unwrap_or(state);
            mounts.push(Mount { options: SHARED_OPTIONS, ..Mount::new(folder, &text(folder)?)? });
        }
        Ok(Edits { env, device_nodes, hooks, mounts })
    }

    /// A file of the driver: directly in its folder, or where a whole root would have it.
    fn found(&self, folder: &str, name: &str) -> Option<PathBuf> {
        let deep = self.driver_root.join(folder.trim_start_matches('/'));
        [self.driver_root.as_path(), &deep].into_iter().map(|f| f.join(name)).find(|p| p.is_file())
    }
}

impl Mount {
    fn new(host: &Path, container: &str) -> Result<Self, Error> {
        Ok(Self { host_path: text(host)?, container_path: container.to_owned(), options: MOUNT_OPTIONS })
    }
}

/// The two hooks that make mounted libraries findable.
fn hooks(program: &Path, driver: &str, mounts: &[Mount]) -> Result<Vec<Hook>, Error> {
    let path = text(program)?;
    let hook = |args: Vec<String>| Hook { point: "createContainer", path: path.clone(), args };
    let mut links = vec!["nvidia-cdi-hook".to_owned(), "create-symlinks".to_owned()];
    for library in ["libcuda.so", "libnvidia-ml.so"] {
        let versioned = format!("{LIBRARY_FOLDER}/{library}.{driver}");
        if mounts.iter().any(|m| m.container_path == versioned) {
            links.push("--link".to_owned());
            links.push(format!("{library}.{driver}::{LIBRARY_FOLDER}/{library}.1"));
        }
    }
    let cache = ["nvidia-cdi-hook", "update-ldcache", "--folder", LIBRARY_FOLDER].map(str::to_owned);
    let mut all = vec![hook(cache.into())];
    if links.len() > 2 {
        all.insert(0, hook(links));
    }
    Ok(all)
}

fn text(path: &Path) -> Result<String, Error> {
    path.to_str().map(str::to_owned).ok_or_else(|| Error::PathNotText { path: path.to_owned() })
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};

    use fake_state::profile;
    use serde_json::{Value, json};

    use super::*;

    struct Node {
        _folder: tempfile::TempDir,
        state: NodeState,
        sources: Sources,
    }

    fn node(profile: &str, nodes: &[&str], files: &[&str]) -> Node {
        let folder = tempfile::tempdir().unwrap();
        let (dev_root, driver_root) = (folder.path().join("dev"), folder.path().join("driver"));
        for path in nodes.iter().map(|n| dev_root.join(n)).chain(files.iter().map(|f| driver_root.join(f))) {
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            File::create(path).unwrap();
        }
        fs::create_dir_all(&driver_root).unwrap();
        let sources = Sources { dev_root, driver_root, hooks: None, shared_state: None };
        Node { _folder: folder, state: profile::node(profile, "node-a").unwrap(), sources }
    }

    const NODES: [&str; 5] = ["nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"];

    fn parsed(node: &Node, naming: Naming) -> Value {
        let spec = Spec::of(&node.state, &node.sources, naming).unwrap();
        let json: Value = serde_json::from_str(&spec.json().unwrap()).unwrap();
        let yaml: Value = serde_saphyr::from_str(&spec.yaml().unwrap()).unwrap();
        assert_eq!(json, yaml, "both forms say the same");
        json
    }

    #[test]
    fn the_spec_has_the_shape_of_nvidias() {
        let node = node("h100x2", &NODES, &["libnvidia-ml.so.1", "README"]);
        let host = |f: &str| node.sources.dev_root.join(f).to_str().unwrap().to_owned();
        let dev = |n: &str| json!({"path": format!("/dev/{n}"), "hostPath": host(n)});
        let library = node.sources.driver_root.join("libnvidia-ml.so.1");
        assert_eq!(
            parsed(&node, Naming::Index),
            json!({
                "cdiVersion": "0.5.0",
                "kind": "nvidia.com/gpu",
                "devices": [
                    {"name": "0", "containerEdits": {"deviceNodes": [dev("nvidia0")]}},
                    {"name": "1", "containerEdits": {"deviceNodes": [dev("nvidia1")]}},
                    {"name": "all", "containerEdits": {"deviceNodes": [dev("nvidia0"), dev("nvidia1")]}},
                ],
                "containerEdits": {
                    "env": ["NVIDIA_VISIBLE_DEVICES=void"],
                    "deviceNodes": [dev("nvidia-uvm"), dev("nvidia-uvm-tools"), dev("nvidiactl")],
                    "mounts": [{
                        "hostPath": library.to_str().unwrap(),
                        "containerPath": "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1",
                        "options": ["ro", "nosuid", "nodev", "bind"],
                    }],
                },
            })
        );
    }

    #[test]
    fn a_whole_driver_root_gives_versioned_libraries_programs_and_hooks() {
        let mut node = node(
            "a100x2",
            &NODES,
            &[
                "usr/lib/x86_64-linux-gnu/libcuda.so.570.124.06",
                "usr/lib/x86_64-linux-gnu/libcuda.so.1",
                "usr/lib/x86_64-linux-gnu/libnvidia-ml.so.535.1",
                "usr/bin/nvidia-smi",
            ],
        );
        node.sources.hooks = Some("/usr/bin/nvidia-cdi-hook".into());
        let edits = parsed(&node, Naming::Uuid)["containerEdits"].clone();
        let inside: Vec<_> =
            edits["mounts"].as_array().unwrap().iter().map(|m| m["containerPath"].clone()).collect();
        assert_eq!(inside, ["/usr/lib/x86_64-linux-gnu/libcuda.so.570.124.06", "/usr/bin/nvidia-smi"]);
        let hook = |args: Value| {
            let path = "/usr/bin/nvidia-cdi-hook";
            json!({"hookName": "createContainer", "path": path, "args": args})
        };
        let link = "libcuda.so.570.124.06::/usr/lib/x86_64-linux-gnu/libcuda.so.1";
        assert_eq!(
            edits["hooks"],
            json!([
                hook(json!(["nvidia-cdi-hook", "create-symlinks", "--link", link])),
                hook(json!(["nvidia-cdi-hook", "update-ldcache", "--folder", "/usr/lib/x86_64-linux-gnu"])),
            ])
        );
    }

    #[test]
    fn the_drivers_in_containers_share_the_nodes_state_where_that_is_asked_for() {
        let mut node = node("h100x2", &NODES, &[]);
        node.sources.shared_state = Some("/run/fake/node-a/state.json".into());
        let edits = parsed(&node, Naming::Index)["containerEdits"].clone();
        assert_eq!(
            edits["env"],
            json!([
                "NVIDIA_VISIBLE_DEVICES=void",
                "MULLION_FAKE_STATE=/run/fake/node-a/state.json",
                "MULLION_FAKE_DEV=/dev"
            ])
        );
        let folder = "/run/fake/node-a";
        let options = ["rw", "nosuid", "nodev", "bind"];
        assert_eq!(
            edits["mounts"],
            json!([{"hostPath": folder, "containerPath": folder, "options": options}])
        );
    }

    #[test]
    fn devices_are_named_by_index_or_uuid_and_lost_ones_left_out() {
        let mut node = node(
            "h100x2",
            &[&NODES[..], &["nvidia-caps/nvidia-cap12", "nvidia-caps/nvidia-cap13"]].concat(),
            &[],
        );
        let card = &mut node.state.cards[0];
        card.mig.current = true;
        let gi = card.create_gpu_instance(9, None).unwrap();
        card.create_compute_instance(gi, 2).unwrap();
        let mig = card.gpu_instance(gi).unwrap().compute[0].uuid.clone();
        let names = |node: &Node, naming| -> Vec<String> {
            let devices = parsed(node, naming)["devices"].clone();
            devices.as_array().unwrap().iter().map(|d| d["name"].as_str().unwrap().to_owned()).collect()
        };
        let (zero, one) = (node.state.cards[0].uuid.clone(), node.state.cards[1].uuid.clone());
        assert_eq!(names(&node, Naming::Index), ["0", "0:0", "1", "all"]);
        assert_eq!(names(&node, Naming::Uuid), [zero, mig, one, "all".to_owned()]);
        let paths = parsed(&node, Naming::Index)["devices"][1]["containerEdits"]["deviceNodes"].clone();
        let paths: Vec<_> = paths.as_array().unwrap().iter().map(|n| n["path"].clone()).collect();
        assert_eq!(paths, ["/dev/nvidia0", "/dev/nvidia-caps/nvidia-cap12", "/dev/nvidia-caps/nvidia-cap13"]);
        node.state.cards[0].lost = true;
        assert_eq!(names(&node, Naming::Index), ["1", "all"]);
    }

    #[test]
    fn a_missing_device_node_is_named() {
        for (case, nodes) in [
            ("nvidia1", vec!["nvidia0", "nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"]),
            ("nvidiactl", vec!["nvidia0", "nvidia1", "nvidia-uvm", "nvidia-uvm-tools"]),
        ] {
            let node = node("h100x2", &nodes, &[]);
            let error = Spec::of(&node.state, &node.sources, Naming::Index).unwrap_err();
            assert_eq!(error.code(), "NoDeviceNode", "{case}");
            assert!(error.to_string().contains(&format!("dev/{case}:")), "{error}");
        }
    }
}
