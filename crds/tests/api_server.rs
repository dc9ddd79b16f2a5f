//! Definitions and policies on a real API server: every case of `tests/cases` is tried there.
//!
//! Ignored by default: it needs a cluster with the manifests applied, `KUBECONFIG` of its administrator and `kubectl`
//! on PATH. In the lab: `tests/lab/lab enter -- cargo test -p mullion-crds --test api_server -- --ignored --exact cases`.

#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test program: a panic is how it fails"
)]

#[expect(dead_code, reason = "a real API server decides every case, not just those of a CEL rule")]
mod common;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io::Write as _;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use common::{Case, Cases, read};
use serde_json::{Value, json};

const NODES: [&str; 2] = ["case-node-a", "case-node-b"];

/// Runs kubectl; the error is what it wrote to stderr.
fn kubectl(args: &[&str], input: Option<&Value>) -> Result<String, String> {
    let mut child = Command::new("kubectl")
        .args(args)
        .stdin(if input.is_some() { Stdio::piped() } else { Stdio::null() })
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("kubectl must be on PATH");
    if let (Some(mut stdin), Some(input)) = (child.stdin.take(), input) {
        stdin.write_all(input.to_string().as_bytes()).unwrap();
    }
    let output = child.wait_with_output().unwrap();
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    if output.status.success() { Ok(out.into_owned()) } else { Err(err.into_owned()) }
}

/// The cluster, with what the cases need in it; taken down at the end.
struct Cluster {
    /// Of this run alone: the one of an earlier run may still be going.
    namespace: String,
    tokens: RefCell<BTreeMap<String, String>>,
    node_uid: String,
}

impl Cluster {
    fn new() -> Self {
        let namespace = format!("mullion-cases-{}", std::process::id());
        let all = json!(["get", "list", "watch", "create", "update", "patch", "delete"]);
        let mut objects = vec![
            json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}),
            json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "user", "namespace": namespace}}),
            json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole",
            "metadata": {"name": namespace}, "rules": [
                {"apiGroups": ["mullion.io"], "resources": ["*"], "verbs": all},
                {"apiGroups": [""], "resources": ["pods", "pods/status"], "verbs": all},
            ]}),
            json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding",
                "metadata": {"name": namespace},
                "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": namespace},
                "subjects": [{"kind": "ServiceAccount", "name": "user", "namespace": namespace}]}),
        ];
        // Nobody's nodes: no pod lands there.
        objects.extend(NODES.map(|name| {
            json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name},
                "spec": {"unschedulable": true}})
        }));
        for object in &objects {
            kubectl(&["apply", "-f", "-"], Some(object)).unwrap();
        }
        let node_uid = kubectl(&["get", "node", NODES[0], "-o", "jsonpath={.metadata.uid}"], None).unwrap();
        Self { namespace, tokens: RefCell::default(), node_uid }
    }

    /// Flags by which kubectl speaks as `who`.
    fn identity(&self, who: &str) -> Vec<String> {
        if who == "admin" {
            return Vec::new();
        }
        let token = self.tokens.borrow().get(who).cloned().unwrap_or_else(|| {
            let (account, node) = who.split_once('@').map_or((who, None), |(a, n)| (a, Some(n)));
            let (namespace, name) = match account {
                "agent" => ("mullion-system", "mullion-nodeagent"),
                "controller" => ("mullion-system", "mullion-controller"),
                other => (self.namespace.as_str(), other),
            };
            let mut args = vec!["create", "token", "-n", namespace, name];
            if let Some(node) = node {
                args.extend(["--bound-object-kind=Node", "--bound-object-name", node]);
            }
            kubectl(&args, None).unwrap().trim().to_owned()
        });
        self.tokens.borrow_mut().insert(who.to_owned(), token.clone());
        // The administrator's client certificate would win over a token.
        let server =
            kubectl(&["config", "view", "--minify", "-o", "jsonpath={.clusters[0].cluster.server}"], None);
        vec![
            "--kubeconfig=/dev/null".to_owned(),
            format!("--server={}", server.unwrap()),
            "--insecure-skip-tls-verify".to_owned(),
            format!("--token={token}"),
        ]
    }

    fn create(&self, object: &Value, who: &str) -> Result<String, String> {
        let identity = self.identity(who);
        let mut args = vec!["create", "-n", &self.namespace, "--validate=false", "-f", "-"];
        args.extend(identity.iter().map(String::as_str));
        kubectl(&args, Some(object))
    }

    fn patch(
        &self,
        object: &Value,
        patch: &Value,
        subresource: Option<&str>,
        who: &str,
    ) -> Result<String, String> {
        let identity = self.identity(who);
        let (kind, name) = (kind(object), object["metadata"]["name"].as_str().unwrap());
        let patch = format!("--patch={}", self.filled(patch));
        let subresource = subresource.map(|s| format!("--subresource={s}"));
        let mut args = vec!["patch", "-n", &self.namespace, kind, name, "--type=json", &patch];
        args.extend(subresource.as_deref());
        args.extend(identity.iter().map(String::as_str));
        kubectl(&args, None)
    }

    fn filled(&self, value: &Value) -> String {
        value.to_string().replace("{{node-uid}}", &self.node_uid)
    }

    /// Removes what a case made, finalizers and all.
    fn remove(&self, object: &Value) {
        let (kind, name) = (kind(object), object["metadata"]["name"].as_str().unwrap());
        if object["metadata"].get("finalizers").is_some() {
            let none = json!([{"op": "add", "path": "/metadata/finalizers", "value": []}]);
            // It fails where the object was refused.
            let _ = self.patch(object, &none, None, "admin");
        }
        let args = [
            "delete",
            "-n",
            &self.namespace,
            kind,
            name,
            "--ignore-not-found",
            "--grace-period=0",
            "--force",
        ];
        kubectl(&args, None).unwrap();
    }

    fn attempt(&self, cases: &Cases, case: &Case) -> Result<String, String> {
        let object = cases.created(case);
        let stays = !case.update.is_null() || !case.given.is_empty();
        let created = self.create(&object, if stays { "admin" } else { &case.by });
        if !stays {
            return created;
        }
        created.unwrap_or_else(|e| panic!("{}: the object it starts from: {e}", case.name));
        for given in &case.given {
            self.patch(&object, &given.patch, given.subresource.as_deref(), &given.by)
                .unwrap_or_else(|e| panic!("{}: what is given: {e}", case.name));
        }
        self.patch(&object, &case.update, case.subresource.as_deref(), &case.by)
    }

    /// Tries every case of a file; returns what came out otherwise than it should.
    fn run(&self, file: &str) -> Vec<String> {
        let cases = read(file);
        let mut wrong = Vec::new();
        // What an earlier run may have left: two of our kinds have no namespace.
        cases.bases.values().for_each(|base| self.remove(base));
        for case in &cases.cases {
            let object = cases.created(case);
            let outcome = self.attempt(&cases, case);
            self.remove(&object);
            match (outcome, &case.refused) {
                (Ok(_), None) => {}
                (Err(error), Some(text)) if error.contains(text.as_str()) => {}
                (Ok(_), Some(text)) => {
                    wrong.push(format!("{file}: {}: taken, not refused: {text}", case.name));
                }
                (Err(error), _) => wrong.push(format!("{file}: {}: {error}", case.name)),
            }
        }
        wrong
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        for what in [
            &["namespace", &self.namespace][..],
            &["clusterrole", &self.namespace],
            &["clusterrolebinding", &self.namespace],
            &["node", NODES[0], NODES[1]],
        ] {
            let args = [&["delete", "--ignore-not-found", "--wait=false"], what].concat();
            let _ = kubectl(&args, None);
        }
    }
}

fn kind(object: &Value) -> &'static str {
    match object["kind"].as_str() {
        Some("GPUNode") => "gpunode",
        Some("VGPUAllocation") => "vgpuallocation",
        Some("MIGLayout") => "miglayout",
        _ => "pod",
    }
}

/// Policies take effect a moment after they are applied.
fn wait_for_policies(cluster: &Cluster) {
    let deadline = Instant::now() + Duration::from_secs(30);
    let cases = read("policies.yaml");
    let forged = cases.cases.iter().find(|c| c.name.starts_with("a pod that says which node")).unwrap();
    while cluster.attempt(&cases, forged).is_ok() {
        cluster.remove(&cases.created(forged));
        assert!(Instant::now() < deadline, "the policies of charts/mullion are not in force");
        std::thread::sleep(Duration::from_millis(300));
    }
}

/// WH-06, and every rule of the definitions.
#[test]
#[ignore = "needs a cluster with Mullion's manifests"]
fn cases() {
    let cluster = Cluster::new();
    wait_for_policies(&cluster);
    let files = ["gpunode.yaml", "vgpuallocation.yaml", "miglayout.yaml", "policies.yaml"];
    let wrong: Vec<String> = files.iter().flat_map(|file| cluster.run(file)).collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    reads(&cluster);
}

/// A fresh allocation shows a phase, and both its fields can be selected by.
fn reads(cluster: &Cluster) {
    let allocation = read("vgpuallocation.yaml").bases["allocation"].clone();
    cluster.remove(&allocation);
    cluster.create(&allocation, "admin").unwrap();
    let table = kubectl(&["get", "vga", "-n", &cluster.namespace], None).unwrap();
    let words: Vec<&str> = table.split_whitespace().collect();
    for word in ["PHASE", "case-node-a", "GPU-1b9e41ad", "vgpu", "6000", "60", "Bound"] {
        assert!(words.contains(&word), "{word} is missing in\n{table}");
    }
    for (selector, found) in [
        ("spec.nodeName=case-node-a", true),
        ("spec.nodeName=case-node-b", false),
        ("spec.pod.name=case", true),
        ("spec.pod.name=other", false),
    ] {
        let names = kubectl(
            &["get", "vga", "-n", &cluster.namespace, "-o", "name", "--field-selector", selector],
            None,
        );
        assert_eq!(!names.unwrap().is_empty(), found, "{selector}");
    }
    assert!(
        kubectl(&["get", "mullion", "-n", &cluster.namespace, "-o", "name"], None)
            .unwrap()
            .contains("case-3f2b1c0d")
    );
    cluster.remove(&allocation);
}

/// WH-04: with every controller stopped, who mentions GPUs is refused and nobody else notices.
#[test]
#[ignore = "needs a cluster whose webhook does not answer"]
fn webhook_down() {
    let cluster = Cluster::new();
    let wrong = cluster.run("webhook-down.yaml");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
