//! Mullion's own parts, with the manifests, identities and tokens that an installation would give them.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use crate::layout::{self, NodePlan, numbered};
use crate::node::REAL_NODE_LABEL;
use crate::part::{Fault, Spec};
use crate::pki::{write, write_kubeconfig};
use crate::supervisor::Lab;
use crate::{api, apply, fakes, manifests, network, node};

/// How long tokens are asked to be valid.
const TOKEN_LIFE: Duration = Duration::from_hours(24);
/// Namespace of an installation.
const NAMESPACE: &str = "mullion-system";
/// The library that applies limits in containers, as `vgpu-hook/build` leaves it beside the programs.
const HOOK: &str = "libvgpu.so";
/// What must be built before Mullion can be started.
pub const PROGRAMS: [&str; 4] = ["mullion-controller", "mullion-nodeagent", "fake-cdi", "libnvidia_ml.so"];
/// Port for a controller's health.
const CONTROLLER_HEALTH: u16 = 9395;

/// Applies the manifests and returns all documents that were read.
pub fn install(lab: &Lab) -> Result<Vec<Value>> {
    let mut documents = manifests::read(&lab.plan.source.join("crds"))?;
    documents.extend(manifests::read(&lab.plan.source.join("charts/mullion"))?);
    apply::all(&manifests::to_apply(documents.clone()))?;
    Ok(documents)
}

/// Starts all controllers, each with its scheduler in one network namespace.
pub fn controllers(lab: &Lab, documents: &[Value]) -> Result<()> {
    for index in 0..lab.plan.controllers {
        let name = numbered("controller", index);
        network::controller(lab, &name, index)?;
        let kubeconfig = identity(&name, "mullion-controller", None)?;
        let beside = Some(lab.holder(&name)?);
        let controller =
            Spec { network_of: beside, ..Spec::new(program(lab, "mullion-controller")?, [""; 0]) }
                .env("KUBECONFIG", kubeconfig.to_string_lossy())
                .env("POD_NAME", &name)
                .env("MULLION_NAMESPACE", NAMESPACE)
                .env("HOSTNAME", &name);
        lab.start(&name, traced(lab, controller))?;
        let mut config = manifests::scheduler_config(documents)?;
        config["clientConnection"]["kubeconfig"] = kubeconfig.to_string_lossy().into();
        if lab.plan.all_schedulers_active {
            config["leaderElection"]["leaderElect"] = false.into();
        }
        let file = layout::run(&format!("{}.json", numbered("scheduler", index)));
        write(&file, &config.to_string())?;
        let flags = [
            format!("--config={}", file.display()),
            format!("--authentication-kubeconfig={}", kubeconfig.display()),
            format!("--authorization-kubeconfig={}", kubeconfig.display()),
        ];
        let scheduler = Spec { network_of: beside, ..Spec::new(lab.part("kube-scheduler"), flags) };
        lab.start(&numbered("scheduler", index), scheduler)?;
    }
    Ok(())
}

/// With the variable that switches the export of traces on, where the lab was asked for it.
fn traced(lab: &Lab, spec: Spec) -> Spec {
    match &lab.plan.otlp_endpoint {
        Some(endpoint) => spec.env("MULLION_OTLP_ENDPOINT", endpoint),
        None => spec,
    }
}

/// Starts the agent of a node as soon as its kubelet has registered it.
pub fn agent(lab: &Lab, node: &NodePlan) -> Result<()> {
    fakes::write_cdi(lab, node)?;
    let library = node.dir().join("driver/libnvidia-ml.so.1");
    if !library.exists() {
        bail!("{} has no libnvidia_ml.so: build it with `cargo build -p fake-nvml`", lab.plan.bin.display());
    }
    let kubelet = format!("kubelet@{}", node.name);
    let object = lab.wait_for("Node object", &kubelet, Duration::from_mins(1), || {
        api::get(&format!("/api/v1/nodes/{}", node.name)).ok()
    })?;
    let uid = node_uid(&object)?;
    let kubeconfig = identity(&agent_name(&node.name), "mullion-nodeagent", Some((&node.name, &uid)))?;
    let config = node.dir().join("config/agent.yaml");
    let hook = lab.plan.bin.join(HOOK);
    if !hook.exists() {
        lab.say(&format!("no {} in {}: containers run without limits", HOOK, lab.plan.bin.display()));
    }
    let text = json!({
        "apiVersion": "config.mullion.io/v1alpha1",
        "kind": "NodeAgentConfig",
        "cgroupRoot": format!("/{}/{}", layout::cgroup(), node.name),
        "hookLibrary": hook,
        "enforcement": if hook.exists() { "required" } else { "report" },
    });
    write(&config, &text.to_string())?;
    let args = [
        "run".to_owned(),
        format!("--config={}", config.display()),
        format!("--node-name={}", node.name),
        format!("--nvml-library={}", library.display()),
    ];
    let agent = Spec::new(program(lab, "mullion-nodeagent")?, args)
        .env("KUBECONFIG", kubeconfig.to_string_lossy())
        .env(fake_state::STATE_ENV, node.fake_state().to_string_lossy());
    lab.start(&agent_name(&node.name), node::inside(lab, node, traced(lab, agent))?)
}

/// Waits until controllers answer, and every node has slots to give and a `GPUNode` that takes pods. Nodes without a
/// kubelet were made with theirs.
pub fn wait(lab: &Lab) -> Result<()> {
    let limit = Duration::from_mins(1);
    for index in 0..lab.plan.controllers {
        let name = numbered("controller", index);
        let address = format!("{}:{CONTROLLER_HEALTH}", layout::controller_address(index)).parse()?;
        lab.wait_for("ready controller", &name, limit, || is_ready(address).then_some(()))?;
    }
    lab.wait_for("CA of the webhook", "controller", limit, || {
        let configuration = api::get(WEBHOOK_CONFIGURATION).ok()?;
        let bundle = configuration["webhooks"][0]["clientConfig"]["caBundle"].as_str()?;
        (!bundle.is_empty()).then_some(())
    })?;
    for node in &lab.plan.nodes {
        lab.wait_for(&format!("nvidia.com/gpu on {}", node.name), &agent_name(&node.name), limit, || {
            let node = api::get(&format!("/api/v1/nodes/{}", node.name)).ok()?;
            let slots = node["status"]["allocatable"]["nvidia.com/gpu"].as_str()?;
            (slots != "0").then_some(())
        })?;
        let path = format!("/apis/mullion.io/v1alpha1/gpunodes/{}", node.name);
        lab.wait_for(
            &format!("GPUNode of {} that is ready", node.name),
            &agent_name(&node.name),
            limit,
            || takes_pods(&api::get(&path).ok()?).then_some(()),
        )?;
    }
    Ok(())
}

/// Whether a `GPUNode` has been reported and is open: what the controller asks before it places a pod.
fn takes_pods(object: &Value) -> bool {
    let status = &object["status"];
    let says = |kind: &str, word: &str| {
        let conditions = status["conditions"].as_array().into_iter().flatten();
        conditions.filter(|c| c["type"] == kind).any(|c| c["status"] == word)
    };
    let cards = status["cards"].as_array().is_some_and(|cards| !cards.is_empty());
    cards
        && status["closed"] != true
        && ["DriverReady", "PluginRegistered", "CDISpecFound"].iter().all(|kind| says(kind, "True"))
        && !["AuditWritable", "LibraryFound"].iter().any(|kind| says(kind, "False"))
}

const WEBHOOK_CONFIGURATION: &str =
    "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/mullion";

/// Keeps the agents' tokens good for as long as the lab runs. A node that was deleted and registered anew gets what
/// a daemon set would give it: a new token and a new agent, unless the agent is down on purpose.
pub fn keep_tokens(lab: &Arc<Lab>) {
    let lab = Arc::clone(lab);
    std::thread::spawn(move || {
        let selector = REAL_NODE_LABEL.replace('=', "%3D");
        let path = format!("/api/v1/nodes?watch=true&labelSelector={selector}");
        let mut known: BTreeMap<String, (String, Instant)> = BTreeMap::new();
        loop {
            // The watch starts with every node there is, so a broken one loses nothing.
            if let Ok(events) = api::watch(&path, Duration::from_mins(10)) {
                for event in events {
                    if let Err(error) = seen(&lab, &event, &mut known) {
                        lab.note(&format!("agent token: {error:#}"));
                    }
                }
            }
            std::thread::sleep(Duration::from_secs(1));
        }
    });
}

fn seen(lab: &Lab, event: &str, known: &mut BTreeMap<String, (String, Instant)>) -> Result<()> {
    let event: Value = serde_json::from_str(event).context("the watch sent no JSON")?;
    if event["type"] != "ADDED" && event["type"] != "MODIFIED" {
        return Ok(());
    }
    let name = event["object"]["metadata"]["name"].as_str().context("a node without a name")?;
    let uid = node_uid(&event["object"])?;
    let (is_new, is_due) = match known.get(name) {
        // The first token was made when the agent was started.
        None => (false, false),
        Some((before, since)) => (*before != uid, since.elapsed() > TOKEN_LIFE / 2),
    };
    let part = agent_name(name);
    if is_new || is_due {
        token(&part, "mullion-nodeagent", Some((name, &uid)))?;
    } else if known.contains_key(name) {
        return Ok(());
    }
    known.insert(name.to_owned(), (uid, Instant::now()));
    if is_new && lab.parts.ended(&lab.children, &part).is_none() {
        lab.parts.fault(&lab.children, &part, Fault::Restart)?;
        lab.note(&format!("node {name} is a new one: {part} got a new token and was restarted"));
    }
    Ok(())
}

fn node_uid(node: &Value) -> Result<String> {
    Ok(node["metadata"]["uid"].as_str().context("a node without a uid")?.to_owned())
}

fn agent_name(node: &str) -> String {
    format!("agent@{node}")
}

/// A token for `account` and the kubeconfig that reads it, both named after the part `name`.
fn identity(name: &str, account: &str, node: Option<(&str, &str)>) -> Result<PathBuf> {
    let token = token(name, account, node)?;
    let path = layout::run(&format!("{name}.kubeconfig"));
    write_kubeconfig(&path, account, &json!({"tokenFile": token}))?;
    Ok(path)
}

/// Writes a fresh token of `account`, bound to a node's name and uid where one is given.
fn token(name: &str, account: &str, node: Option<(&str, &str)>) -> Result<PathBuf> {
    let mut spec = json!({"expirationSeconds": TOKEN_LIFE.as_secs()});
    if let Some((node, uid)) = node {
        spec["boundObjectRef"] = json!({"apiVersion": "v1", "kind": "Node", "name": node, "uid": uid});
    }
    let request = json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec});
    let path = format!("/api/v1/namespaces/{NAMESPACE}/serviceaccounts/{account}/token");
    let answer = api::request("POST", &path, Some(&request))?.json();
    let answer = answer.with_context(|| format!("no token for {NAMESPACE}/{account}"))?;
    let token = answer["status"]["token"].as_str().context("the API server sent no token")?;
    let file = layout::run(&format!("{name}.token"));
    write(&file, token)?;
    Ok(file)
}

/// One of Mullion's programs.
fn program(lab: &Lab, name: &str) -> Result<String> {
    let path: &Path = &lab.plan.bin.join(name);
    if !path.exists() {
        bail!(
            "{} is missing: build it with `cargo build -p {name}`, or give --bin-dir or --no-mullion",
            path.display()
        );
    }
    Ok(path.to_string_lossy().into_owned())
}

/// Whether a controller says that it is ready.
fn is_ready(address: SocketAddr) -> bool {
    let ask = || -> std::io::Result<String> {
        let limit = Duration::from_secs(1);
        let mut stream = TcpStream::connect_timeout(&address, limit)?;
        stream.set_read_timeout(Some(limit))?;
        stream.write_all(b"GET /readyz HTTP/1.0\r\nHost: controller\r\n\r\n")?;
        let mut answer = String::new();
        stream.take(4096).read_to_string(&mut answer)?;
        Ok(answer)
    };
    ask().is_ok_and(|answer| answer.split(' ').nth(1) == Some("200"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_node_takes_pods_once_its_agent_has_said_so() {
        let node = |closed: bool, registered: &str, library: &str| {
            let condition = |(kind, status): (&str, &str)| json!({"type": kind, "status": status});
            let conditions = [
                ("DriverReady", "True"),
                ("CDISpecFound", "True"),
                ("PluginRegistered", registered),
                ("LibraryFound", library),
            ];
            let cards = [json!({"uuid": "GPU-1"})];
            json!({"status": {"cards": cards, "closed": closed, "conditions": conditions.map(condition)}})
        };
        for (case, object, want) in [
            ("not reported", json!({"spec": {}}), false),
            ("open", node(false, "True", "True"), true),
            ("without limits, as the lab wants it", node(false, "True", "Unknown"), true),
            ("not registered yet", node(false, "False", "True"), false),
            ("no library", node(false, "True", "False"), false),
            ("an agent that ends", node(true, "True", "True"), false),
        ] {
            assert_eq!(takes_pods(&object), want, "{case}");
        }
    }
}
