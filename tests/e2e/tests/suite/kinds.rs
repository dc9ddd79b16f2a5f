//! The API server itself refuses objects of the wrong shape, and writers who are not entitled.

use anyhow::{Context, Result, ensure};
use mullion_e2e::pods::slice_pod;
use mullion_e2e::{Lab, Scope};

/// A token as the agent of `node` has it: bound to the Node object, so that it carries the node's name and uid.
fn agent_of(lab: Lab, node: &str) -> Result<Vec<String>> {
    let uid = lab.kubectl(&["get", "node", node, "-o", "jsonpath={.metadata.uid}"])?;
    let bound = [format!("--bound-object-name={node}"), format!("--bound-object-uid={}", uid.trim())];
    let bound = ["--bound-object-kind=Node", &bound[0], &bound[1]];
    with_token(lab, &bound)
}

/// Arguments that make kubectl come with a token of the agents' service account and nothing else.
fn with_token(lab: Lab, bound: &[&str]) -> Result<Vec<String>> {
    let token =
        lab.kubectl(&[&["create", "token", "-n", "mullion-system", "mullion-nodeagent"], bound].concat())?;
    let server =
        lab.kubectl(&["config", "view", "--minify", "-o", "jsonpath={.clusters[0].cluster.server}"])?;
    Ok(vec![
        "--kubeconfig=/dev/null".to_owned(),
        format!("--server={}", server.trim()),
        "--insecure-skip-tls-verify".to_owned(),
        format!("--token={}", token.trim()),
    ])
}

fn kubectl(scope: &Scope, who: &[String], args: &[&str]) -> Result<String> {
    let mut all: Vec<&str> = who.iter().map(String::as_str).collect();
    all.extend_from_slice(args);
    scope.lab.kubectl(&all)
}

/// More rights than an agent has, so that it is the policies that decide, and for kubectl, which reads what it patches.
fn widen(lab: Lab) -> Result<()> {
    let role = serde_json::json!({"apiVersion": "v1", "kind": "List", "items": [
        {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": {"name": "e2e-wide-agent"},
            "rules": [{"apiGroups": ["mullion.io"], "resources": ["*"], "verbs": ["*"]}]},
        {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding",
            "metadata": {"name": "e2e-wide-agent"},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "e2e-wide-agent"},
            "subjects": [{"kind": "ServiceAccount", "name": "mullion-nodeagent", "namespace": "mullion-system"}]}]});
    let file = std::env::temp_dir().join("mullion-e2e-wide-agent.json");
    std::fs::write(&file, role.to_string())?;
    lab.kubectl(&["apply", "-f", &file.to_string_lossy()]).map(drop)
}

fn narrow(lab: Lab) -> Result<()> {
    lab.kubectl(&["delete", "clusterrolebinding,clusterrole", "e2e-wide-agent", "--ignore-not-found"])
        .map(drop)
}

/// Design section 4, "Who may write": an agent writes its own node's objects and nothing else.
#[tokio::test]
async fn an_agent_writes_only_what_is_its_own() -> Result<()> {
    let scope = Scope::new("agent-rights").await?;
    scope.create(&slice_pod("victim", "1000", "10")).await?;
    let made = scope.running("victim").await?;
    let allocation = scope.allocation(&made).await?;
    let name = allocation.metadata.name.clone().context("no name")?;
    let home = allocation.spec.node_name.clone();
    let other = if home == "node-a" { "node-b" } else { "node-a" };
    let patch = r#"{"status":{"agentVersion":"forged"}}"#;
    narrow(scope.lab)?;
    // What RBAC alone refuses.
    for args in [
        vec!["-n", &scope.namespace, "delete", "vga", &name],
        vec!["-n", "mullion-system", "get", "secrets"],
        vec!["patch", "gpunode", &home, "--type=merge", "-p", r#"{"spec":{"splitCount":99}}"#],
    ] {
        let outcome = kubectl(&scope, &agent_of(scope.lab, &home)?, &args);
        ensure!(outcome.is_err_and(|e| e.to_string().contains("cannot")), "{args:?}: was let through");
    }
    widen(scope.lab)?;
    let cases: Vec<(&str, &str, Vec<&str>)> = vec![
        (
            "status of another node",
            other,
            vec!["patch", "gpunode", &home, "--subresource=status", "--type=merge", "-p", patch],
        ),
        (
            "spec of its own node",
            &home,
            vec!["patch", "gpunode", &home, "--type=merge", "-p", r#"{"spec":{"splitCount":99}}"#],
        ),
        (
            "status of another node's allocation",
            other,
            vec![
                "-n",
                &scope.namespace,
                "patch",
                "vga",
                &name,
                "--subresource=status",
                "--type=merge",
                "-p",
                r#"{"status":{"phase":"Released"}}"#,
            ],
        ),
        (
            "finalizer of another node's allocation",
            other,
            vec![
                "-n",
                &scope.namespace,
                "patch",
                "vga",
                &name,
                "--type=merge",
                "-p",
                r#"{"metadata":{"finalizers":[]}}"#,
            ],
        ),
        ("delete an allocation", &home, vec!["-n", &scope.namespace, "delete", "vga", &name]),
    ];
    for (case, node, args) in cases {
        let outcome = kubectl(&scope, &agent_of(scope.lab, node)?, &args);
        let Err(error) = outcome else { anyhow::bail!("{case}: was let through") };
        let text = error.to_string();
        ensure!(text.contains("orbidden") || text.contains("denied"), "{case}: {text}");
    }
    // The same writer on its own node is let through (nothing changes: the same value).
    let version = scope.gpu_node(&home).await?.status.context("no status")?.agent_version;
    let same = format!(r#"{{"status":{{"agentVersion":"{version}"}}}}"#);
    kubectl(
        &scope,
        &agent_of(scope.lab, &home)?,
        &["patch", "gpunode", &home, "--subresource=status", "--type=merge", "-p", &same],
    )?;
    // A token without a node is nobody.
    let nobody = with_token(scope.lab, &[])?;
    let outcome = kubectl(
        &scope,
        &nobody,
        &["patch", "gpunode", &home, "--subresource=status", "--type=merge", "-p", patch],
    );
    ensure!(outcome.is_err(), "a token without a node was let through");
    narrow(scope.lab)?;
    scope.remove().await
}

/// The columns that on-call questions are answered by.
#[tokio::test]
async fn the_columns_are_there() -> Result<()> {
    let scope = Scope::new("columns").await?;
    scope.create(&slice_pod("shown", "2000", "20")).await?;
    let made = scope.running("shown").await?;
    scope.allocation_phase(&made, mullion_crds::vgpuallocation::Phase::Prepared).await?;
    let nodes = scope.lab.kubectl(&["get", "gn"])?;
    for column in ["USABLE-GPUS", "FREE-MEM", "MIG", "LAYOUT", "HEALTH", "CORDON", "AGE"] {
        ensure!(nodes.lines().next().is_some_and(|l| l.contains(column)), "{column} is missing:\n{nodes}");
    }
    let allocations = scope.lab.kubectl(&["-n", &scope.namespace, "get", "vga"])?;
    for column in ["POD", "NODE", "GPU", "KIND", "MEM(MIB)", "CORES", "PHASE", "AGE"] {
        ensure!(allocations.lines().next().is_some_and(|l| l.contains(column)), "{column}:\n{allocations}");
    }
    ensure!(allocations.contains("shown") && allocations.contains("Prepared"), "{allocations}");
    let all = scope.lab.kubectl(&["get", "mullion", "-A"])?;
    ensure!(all.contains("gpunode") && all.contains("vgpuallocation"), "{all}");
    let selected =
        scope.lab.kubectl(&["get", "vga", "-A", "--field-selector", "spec.pod.name=shown", "-o", "name"])?;
    ensure!(selected.lines().count() == 1, "{selected}");
    scope.remove().await
}

/// What `kubectl apply -k charts/mullion` would apply is what the single files say: nothing that looks like a name
/// was rewritten but the reference to the generated `ConfigMap`, and the API server takes all of it.
#[tokio::test]
async fn the_overlay_says_what_the_files_say() -> Result<()> {
    let scope = Scope::new("overlay").await?;
    let charts = concat!(env!("CARGO_MANIFEST_DIR"), "/../../charts/mullion");
    let text = scope.lab.kubectl(&["kustomize", "--load-restrictor=LoadRestrictionsNone", charts])?;
    let lease = "  resourceNames:\n  - mullion-controller\n  - mullion-scheduler\n";
    ensure!(text.contains(lease), "the Role's leases were renamed:\n{text}");
    let generated = text
        .lines()
        .filter_map(|l| l.trim().strip_prefix("name: mullion-scheduler-config-"))
        .collect::<std::collections::BTreeSet<_>>();
    ensure!(generated.len() == 1, "the ConfigMap and its reference differ: {generated:?}");
    let file = std::env::temp_dir().join("mullion-overlay.yaml");
    // The lab has registered the webhook by URL, which excludes the Service of the manifest.
    let documents: Vec<&str> =
        text.split("\n---\n").filter(|d| !d.contains("kind: MutatingWebhookConfiguration")).collect();
    std::fs::write(&file, documents.join("\n---\n"))?;
    let dry = ["apply", "--server-side", "--force-conflicts", "--dry-run=server", "-f"];
    scope.lab.kubectl(&[&dry[..], &[&file.to_string_lossy()]].concat())?;
    scope.remove().await
}
