//! One node: containerd and a kubelet in namespaces of their own.

use std::fs;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::json;

use crate::layout::{self, NodePlan};
use crate::part::Spec;
use crate::pki::Pki;
use crate::supervisor::Lab;
use crate::{cgroup, fakes, network};

/// Label that tells nodes with a kubelet from the ones without.
pub const REAL_NODE_LABEL: &str = "mullion-lab/kubelet=true";

/// Starts the node's containerd and fills its image store.
pub fn runtime(lab: &Lab, node: &NodePlan, images: &Path) -> Result<()> {
    let dir = node.dir();
    for sub in ["config/cni", "containerd", "driver", "dev"] {
        fs::create_dir_all(dir.join(sub)).with_context(|| format!("cannot make {sub} of {}", node.name))?;
    }
    cgroup::create(&node.name)?;
    fs::write(dir.join("config/cni/10-lab.conflist"), cni(node))
        .context("cannot write the CNI configuration")?;
    fs::write(dir.join("config/containerd.toml"), containerd_config(lab, node))
        .context("cannot write containerd's configuration")?;
    fakes::create(lab, node)?;
    network::node(lab, node)?;
    let name = format!("containerd@{}", node.name);
    let config = dir.join("config/containerd.toml").to_string_lossy().into_owned();
    lab.start(&name, inside(lab, node, Spec::new(lab.part("containerd"), ["--config", &config]))?)?;
    let socket = dir.join("run/containerd/containerd.sock");
    lab.wait_for("containerd's socket", &name, Duration::from_secs(30), || {
        UnixStream::connect(&socket).ok()
    })?;
    let images = images.to_string_lossy();
    let import = Spec::new(lab.part("ctr"), ["-n", "k8s.io", "images", "import", "--no-unpack", &images]);
    lab.children
        .run(&mut inside(lab, node, import)?.command(&lab.path()))
        .with_context(|| format!("cannot give {} its images", node.name))?;
    Ok(())
}

/// Starts the node's kubelet.
pub fn kubelet(lab: &Lab, node: &NodePlan, pki: &Pki) -> Result<()> {
    let name = format!("kubelet@{}", node.name);
    let kubeconfig = pki.kubeconfig(
        &format!("kubelet-{}", node.name),
        &format!("system:node:{}", node.name),
        "system:nodes",
    )?;
    let serving = pki.server(&format!("kubelet-{}-serving", node.name), &[&node.address(), &node.name])?;
    let dir = node.dir();
    let config = dir.join("kubelet/config.yaml");
    fs::write(dir.join("config/resolv.conf"), "nameserver 10.96.0.10\n")
        .context("cannot write resolv.conf")?;
    let text = json!({
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": "0.0.0.0",
        "authentication": {"anonymous": {"enabled": false}, "webhook": {"enabled": false}, "x509": {"clientCAFile": pki.path("ca.crt")}},
        "authorization": {"mode": "AlwaysAllow"},
        "tlsCertFile": serving.cert,
        "tlsPrivateKeyFile": serving.key,
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": format!("/{}/{}", layout::cgroup(), node.name),
        "clusterDNS": ["10.96.0.10"],
        "clusterDomain": "cluster.local",
        "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
        "enforceNodeAllocatable": [],
        // Limits that say nothing on a machine shared by all nodes.
        "evictionHard": {"memory.available": "50Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "failCgroupV1": false,
        "failSwapOn": false,
        "imageGCHighThresholdPercent": 100,
        "imageMinimumGCAge": "24h",
        "localStorageCapacityIsolation": false,
        "makeIPTablesUtilChains": false,
        "maxPods": 200,
        // Without CAP_SYS_RESOURCE it could not be lowered.
        "oomScoreAdj": 0,
        // Default 10 s and 5 min: tests wait for allocatable to follow a device plugin.
        "nodeStatusReportFrequency": "5m",
        "nodeStatusUpdateFrequency": "1s",
        "podCIDR": node.pod_cidr(),
        "resolvConf": dir.join("config/resolv.conf"),
        "volumePluginDir": "/var/lib/kubelet/volume-plugins",
    });
    // JSON is YAML; the place is where kubeadm puts it, seen from inside the node.
    fs::write(&config, text.to_string()).context("cannot write the kubelet's configuration")?;
    let args = [
        format!("--config={}", config.display()),
        format!("--kubeconfig={}", kubeconfig.display()),
        format!("--hostname-override={}", node.name),
        format!("--node-ip={}", node.address()),
        format!("--node-labels={REAL_NODE_LABEL}"),
        "--v=2".to_owned(),
    ];
    lab.start(&name, inside(lab, node, Spec::new(lab.part("kubelet"), args))?)
}

/// A program in the node's namespaces.
pub fn inside(lab: &Lab, node: &NodePlan, spec: Spec) -> Result<Spec> {
    Ok(Spec { mounts_of: Some(lab.holder(&node.name)?), ..spec })
}

fn cni(node: &NodePlan) -> String {
    json!({
        "cniVersion": "1.0.0",
        "name": "lab",
        "plugins": [{
            "type": "bridge",
            "bridge": "cni0",
            "isGateway": true,
            "ipMasq": false,
            "hairpinMode": true,
            "ipam": {
                "type": "host-local",
                "dataDir": "/run/cni-ipam",
                "ranges": [[{"subnet": node.pod_cidr()}]],
                "routes": [{"dst": "0.0.0.0/0"}],
            },
        }],
    })
    .to_string()
}

fn containerd_config(lab: &Lab, node: &NodePlan) -> String {
    let dir = node.dir();
    format!(
        r#"version = 3
root = "{dir}/containerd"
state = "/run/containerd"
disabled_plugins = ["io.containerd.internal.v1.opt", "io.containerd.nri.v1.nri"]

[grpc]
address = "/run/containerd/containerd.sock"

[plugins."io.containerd.cri.v1.images"]
snapshotter = "overlayfs"

[plugins."io.containerd.cri.v1.images".pinned_images]
sandbox = "lab.local/pause:1"

[plugins."io.containerd.cri.v1.runtime"]
enable_cdi = true
cdi_spec_dirs = ["/etc/cdi", "/var/run/cdi"]
# Where root lacks CAP_SYS_RESOURCE, runc dies on lowering a score.
restrict_oom_score_adj = true

[plugins."io.containerd.cri.v1.runtime".cni]
bin_dirs = ["/usr/lib/cni"]
conf_dir = "{dir}/config/cni"

[plugins."io.containerd.cri.v1.runtime".containerd]
default_runtime_name = "runc"

[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"

[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
BinaryName = "{runc}"
Root = "/run/runc"
SystemdCgroup = false
"#,
        dir = dir.display(),
        runc = lab.part("runc"),
    )
}
