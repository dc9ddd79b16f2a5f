//! Definitions and policies on a real API server: every case of `tests/cases` is tried there.
//!
//! Ignored by default: it needs `etcd`, `kube-apiserver` and `kubectl` on PATH, and starts a server of its own:
//! `PATH=$(tests/lab/parts/build):$PATH cargo test -p mullion-crds --test api_server -- --ignored`.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a test program: a panic is how it fails")]

#[expect(dead_code, reason = "a real API server decides every case, not just those of a CEL rule")]
mod common;
#[path = "common/server.rs"]
mod server;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use common::{Case, Cases, read};
use serde_json::{Value, json};
use server::Server;

const NAMESPACE: &str = "mullion-cases";
const NODES: [&str; 2] = ["case-node-a", "case-node-b"];

/// The API server, with what the cases need in it.
struct Cluster {
    server: Server,
    tokens: RefCell<BTreeMap<String, String>>,
    node_uid: String,
}

impl Cluster {
    fn start() -> Self {
        let server = Server::start();
        for file in [
            "crds/gpunodes.yaml",
            "crds/vgpuallocations.yaml",
            "crds/miglayouts.yaml",
            "charts/mullion/namespace.yaml",
            "charts/mullion/rbac.yaml",
            "charts/mullion/admission-policies.yaml",
        ] {
            server.apply_file(file);
        }
        let all = json!(["get", "list", "watch", "create", "update", "patch", "delete"]);
        let mut objects = vec![
            json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}),
            json!({"apiVersion": "v1", "kind": "ServiceAccount",
                "metadata": {"name": "user", "namespace": NAMESPACE}}),
            json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole",
            "metadata": {"name": "user"}, "rules": [
                {"apiGroups": ["mullion.io"], "resources": ["*"], "verbs": all},
                {"apiGroups": [""], "resources": ["pods", "pods/status"], "verbs": all},
                {"apiGroups": [""], "resources": ["pods/binding", "bindings"], "verbs": ["create"]},
            ]}),
            json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding",
                "metadata": {"name": "user"},
                "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "user"},
                "subjects": [{"kind": "ServiceAccount", "name": "user", "namespace": NAMESPACE}]}),
            // kubectl reads what it patches, and patches what the agent replaces.
            json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole",
                "metadata": {"name": "status-by-kubectl"}, "rules": [
                    {"apiGroups": [""], "resources": ["pods/status"], "verbs": ["get"]},
                    {"apiGroups": ["mullion.io"], "resources": ["gpunodes/status", "vgpuallocations/status"],
                        "verbs": ["get", "patch"]}]}),
            json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding",
            "metadata": {"name": "status-by-kubectl"},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "status-by-kubectl"},
            "subjects": [
                    {"kind": "ServiceAccount", "name": "mullion-controller", "namespace": "mullion-system"},
                    {"kind": "ServiceAccount", "name": "mullion-nodeagent", "namespace": "mullion-system"}]}),
        ];
        objects.extend(
            NODES.map(|name| json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}})),
        );
        for object in &objects {
            server.apply(object);
        }
        let node_uid =
            server.kubectl("admin", &["get", "node", NODES[0], "-o", "jsonpath={.metadata.uid}"], None);
        Self { server, tokens: RefCell::default(), node_uid: node_uid.unwrap() }
    }

    /// The token by which kubectl speaks as `who`.
    fn token(&self, who: &str) -> String {
        if who == "admin" {
            return who.to_owned();
        }
        if let Some(token) = self.tokens.borrow().get(who) {
            return token.clone();
        }
        let (account, node) = who.split_once('@').map_or((who, None), |(a, n)| (a, Some(n)));
        let (namespace, name) = match account {
            "agent" => ("mullion-system", "mullion-nodeagent"),
            "controller" => ("mullion-system", "mullion-controller"),
            other => (NAMESPACE, other),
        };
        let mut args = vec!["create", "token", "-n", namespace, name];
        if let Some(node) = node {
            args.extend(["--bound-object-kind=Node", "--bound-object-name", node]);
        }
        let token = self.server.kubectl("admin", &args, None).unwrap().trim().to_owned();
        self.tokens.borrow_mut().insert(who.to_owned(), token.clone());
        token
    }

    fn admin(&self, args: &[&str]) -> Result<String, String> {
        self.server.kubectl("admin", args, None)
    }

    fn create(&self, object: &Value, who: &str) -> Result<String, String> {
        let args = ["create", "-n", NAMESPACE, "--validate=false", "-f", "-"];
        self.server.kubectl(&self.token(who), &args, Some(object.to_string().as_bytes()))
    }

    fn patch(
        &self,
        object: &Value,
        patch: &Value,
        subresource: Option<&str>,
        who: &str,
    ) -> Result<String, String> {
        let (kind, name) = (kind(object), object["metadata"]["name"].as_str().unwrap());
        let patch = format!("--patch={}", patch.to_string().replace("{{node-uid}}", &self.node_uid));
        let subresource = subresource.map(|s| format!("--subresource={s}"));
        let mut args = vec!["patch", "-n", NAMESPACE, kind, name, "--type=json", &patch];
        args.extend(subresource.as_deref());
        self.server.kubectl(&self.token(who), &args, None)
    }

    fn bind(&self, case: &Case, object: &Value) -> Result<String, String> {
        let mut binding = json!({"apiVersion": "v1", "kind": "Binding", "metadata": case.bind,
            "target": {"apiVersion": "v1", "kind": "Node", "name": NODES[0]}});
        let name = object["metadata"]["name"].as_str().unwrap();
        binding["metadata"]["name"] = name.into();
        let collection = case.path.clone().unwrap_or_else(|| format!("pods/{name}/binding"));
        let path = format!("/api/v1/namespaces/{NAMESPACE}/{collection}");
        let args = ["create", "--raw", &path, "-f", "-"];
        self.server.kubectl(&self.token(&case.by), &args, Some(binding.to_string().as_bytes()))
    }

    /// Removes what a case made, finalizers and all.
    fn remove(&self, object: &Value) {
        let (kind, name) = (kind(object), object["metadata"]["name"].as_str().unwrap());
        if object["metadata"].get("finalizers").is_some() {
            let none = json!([{"op": "add", "path": "/metadata/finalizers", "value": []}]);
            // It fails where the object was refused.
            let _ = self.patch(object, &none, None, "admin");
        }
        let args =
            ["delete", "-n", NAMESPACE, kind, name, "--ignore-not-found", "--grace-period=0", "--force"];
        self.admin(&args).unwrap();
    }

    fn attempt(&self, cases: &Cases, case: &Case) -> Result<String, String> {
        let object = cases.created(case);
        let stays = !case.update.is_null() || !case.bind.is_null() || !case.given.is_empty();
        let created = self.create(&object, if stays { "admin" } else { &case.by });
        if !stays {
            return created;
        }
        created.unwrap_or_else(|e| panic!("{}: the object it starts from: {e}", case.name));
        for given in &case.given {
            self.patch(&object, &given.patch, given.subresource.as_deref(), &given.by)
                .unwrap_or_else(|e| panic!("{}: what is given: {e}", case.name));
        }
        if !case.bind.is_null() {
            return self.bind(case, &object);
        }
        self.patch(&object, &case.update, case.subresource.as_deref(), &case.by)
    }

    /// Tries every case of a file; returns what came out otherwise than it should.
    fn run(&self, file: &str) -> Vec<String> {
        let cases = read(file);
        let mut wrong = Vec::new();
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
    let cases = read("policies.yaml");
    for name in ["a pod that says which node", "an agent creates another", "a user decides"] {
        let forged = cases.cases.iter().find(|c| c.name.starts_with(name)).unwrap();
        until("the policies are", &mut || {
            let outcome = cluster.attempt(&cases, forged);
            cluster.remove(&cases.created(forged));
            outcome.is_err()
        });
    }
}

fn until(what: &str, is_so: &mut dyn FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_mins(3);
    while !is_so() {
        assert!(Instant::now() < deadline, "{what} not in force after 3 minutes");
        std::thread::sleep(Duration::from_millis(300));
    }
}

/// A fresh allocation shows a phase, and both its fields can be selected by.
fn reads(cluster: &Cluster) {
    let allocation = read("vgpuallocation.yaml").bases["allocation"].clone();
    cluster.create(&allocation, "admin").unwrap();
    let table = cluster.admin(&["get", "vga", "-n", NAMESPACE]).unwrap();
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
        let names =
            cluster.admin(&["get", "vga", "-n", NAMESPACE, "-o", "name", "--field-selector", selector]);
        assert_eq!(!names.unwrap().is_empty(), found, "{selector}");
    }
    assert!(
        cluster.admin(&["get", "mullion", "-n", NAMESPACE, "-o", "name"]).unwrap().contains("case-3f2b1c0d")
    );
    cluster.remove(&allocation);
}

/// Every rule of the definitions, the policies (WH-06), and a webhook that does not answer (WH-04): who mentions GPUs
/// is refused, and nobody else notices.
#[test]
#[ignore = "needs a cluster's programs on PATH: etcd, kube-apiserver, kubectl"]
fn cases() {
    let cluster = Cluster::start();
    wait_for_policies(&cluster);
    reads(&cluster);
    let files = ["gpunode.yaml", "vgpuallocation.yaml", "miglayout.yaml", "policies.yaml"];
    let mut wrong: Vec<String> = files.iter().flat_map(|file| cluster.run(file)).collect();

    cluster.server.apply_file("charts/mullion/webhook.yaml");
    let cases = read("webhook-down.yaml");
    let refused = cases.cases.iter().find(|c| c.refused.is_some()).unwrap();
    until("the webhook configuration is", &mut || {
        let outcome = cluster.attempt(&cases, refused);
        cluster.remove(&cases.created(refused));
        outcome.is_err()
    });
    wrong.extend(cluster.run("webhook-down.yaml"));
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
