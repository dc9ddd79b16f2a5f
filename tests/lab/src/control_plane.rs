//! etcd, the API server, the controller manager and the cluster's own scheduler.

use std::fs;
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::json;

use crate::layout::{self, API_ADDRESS};
use crate::part::Spec;
use crate::pki::Pki;
use crate::supervisor::Lab;
use crate::{api, mounts};

/// Starts etcd and the API server, and returns when it is ready.
pub fn apiserver(lab: &Lab, pki: &Pki) -> Result<()> {
    let data = format!("--data-dir={}", layout::run("etcd/data").display());
    let etcd = [
        "--name=lab",
        &data,
        "--listen-client-urls=http://127.0.0.1:2379",
        "--advertise-client-urls=http://127.0.0.1:2379",
        "--listen-peer-urls=http://127.0.0.1:2380",
        "--initial-advertise-peer-urls=http://127.0.0.1:2380",
        "--initial-cluster=lab=http://127.0.0.1:2380",
        "--unsafe-no-fsync",
        "--quota-backend-bytes=4294967296",
        "--log-level=warn",
    ];
    lab.start("etcd", Spec::new(lab.part("etcd"), etcd))?;
    let address = SocketAddr::from(([127, 0, 0, 1], 2379));
    lab.wait_for("etcd's port", "etcd", Duration::from_secs(20), || {
        TcpStream::connect_timeout(&address, Duration::from_millis(200)).ok()
    })?;
    mounts::hosts(if lab.plan.mullion { lab.plan.controllers } else { 0 })?;
    start(lab, pki)?;
    let admin = pki.kubeconfig("admin", "kubernetes-admin", "system:masters")?;
    let proxy = [
        format!("--kubeconfig={}", admin.display()),
        "proxy".to_owned(),
        format!("--unix-socket={}", layout::run("api.sock").display()),
    ];
    lab.start("api-proxy", Spec::new(lab.part("kubectl"), proxy))?;
    lab.wait_for("ready API server", "apiserver", Duration::from_secs(90), || {
        api::request("GET", "/readyz", None).ok().filter(|answer| answer.code == 200)
    })?;
    Ok(())
}

fn start(lab: &Lab, pki: &Pki) -> Result<()> {
    let policy = layout::run("audit-policy.json");
    // Who wrote what: benchmarks count from it, one line per finished request.
    let rules = json!({
        "apiVersion": "audit.k8s.io/v1",
        "kind": "Policy",
        "omitStages": ["RequestReceived", "ResponseStarted"],
        "rules": [{"level": "Metadata"}],
    });
    fs::write(&policy, rules.to_string()).context("cannot write the audit policy")?;
    let serving = pki.apiserver()?;
    let kubelet = pki.client("apiserver-kubelet", "kube-apiserver-kubelet-client", "system:masters")?;
    let file = |path: &Path| path.to_string_lossy().into_owned();
    let flags = [
        ("advertise-address", API_ADDRESS.to_owned()),
        ("allow-privileged", "true".into()),
        ("audit-log-path", file(&layout::audit_log())),
        ("audit-policy-file", file(&policy)),
        ("authorization-mode", "Node,RBAC".into()),
        ("bind-address", "0.0.0.0".into()),
        ("client-ca-file", file(&pki.path("ca.crt"))),
        // Nodes without a kubelet must stay usable.
        ("disable-admission-plugins", "TaintNodesByCondition".into()),
        ("enable-admission-plugins", "NodeRestriction".into()),
        ("endpoint-reconciler-type", "none".into()),
        ("etcd-servers", "http://127.0.0.1:2379".into()),
        ("kubelet-certificate-authority", file(&pki.path("ca.crt"))),
        ("kubelet-client-certificate", file(&kubelet.cert)),
        ("kubelet-client-key", file(&kubelet.key)),
        ("kubelet-preferred-address-types", "InternalIP".into()),
        ("requestheader-allowed-names", "front-proxy-client".into()),
        ("requestheader-client-ca-file", file(&pki.path("front-proxy-ca.crt"))),
        ("requestheader-extra-headers-prefix", "X-Remote-Extra-".into()),
        ("requestheader-group-headers", "X-Remote-Group".into()),
        ("requestheader-username-headers", "X-Remote-User".into()),
        ("secure-port", "6443".into()),
        ("service-account-issuer", "https://kubernetes.default.svc".into()),
        ("service-account-key-file", file(&pki.path("sa.pub"))),
        ("service-account-signing-key-file", file(&pki.path("sa.key"))),
        ("service-cluster-ip-range", "10.96.0.0/16".into()),
        ("tls-cert-file", file(&serving.cert)),
        ("tls-private-key-file", file(&serving.key)),
    ];
    lab.start("apiserver", Spec::new(lab.part("kube-apiserver"), arguments(&flags)))
}

/// Starts the controller manager and the cluster's own scheduler; the API server is ready.
pub fn controllers(lab: &Lab, pki: &Pki) -> Result<()> {
    let file = |path: &Path| path.to_string_lossy().into_owned();
    let manager = pki.kubeconfig("controller-manager", "system:kube-controller-manager", "")?;
    let flags = [
        ("authentication-kubeconfig", file(&manager)),
        ("authorization-kubeconfig", file(&manager)),
        // The one would taint nodes without a kubelet as gone, the other writes to every new node for nothing.
        ("controllers", "*,-node-lifecycle-controller,-ttl-controller".into()),
        ("kube-api-burst", "400".into()),
        ("kube-api-qps", "200".into()),
        ("kubeconfig", file(&manager)),
        ("leader-elect", "false".into()),
        ("root-ca-file", file(&pki.path("ca.crt"))),
        ("service-account-private-key-file", file(&pki.path("sa.key"))),
        ("use-service-account-credentials", "true".into()),
    ];
    lab.start("controller-manager", Spec::new(lab.part("kube-controller-manager"), arguments(&flags)))?;
    let scheduler = pki.kubeconfig("kube-scheduler", "system:kube-scheduler", "")?;
    let flags = [
        ("authentication-kubeconfig", file(&scheduler)),
        ("authorization-kubeconfig", file(&scheduler)),
        ("kubeconfig", file(&scheduler)),
        ("leader-elect", "false".into()),
    ];
    lab.start("kube-scheduler", Spec::new(lab.part("kube-scheduler"), arguments(&flags)))
}

fn arguments(flags: &[(&str, String)]) -> Vec<String> {
    flags.iter().map(|(name, value)| format!("--{name}={value}")).collect()
}
