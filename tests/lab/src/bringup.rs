//! Brings the lab up, as much at once as the order of things allows.

use std::thread;
use std::time::Duration;

use anyhow::{Result, anyhow};

use crate::layout::{self, NodePlan};
use crate::pki::Pki;
use crate::supervisor::Lab;
use crate::{api, control_plane, fake_nodes, images, mullion, network, node};

/// Starts everything and returns when it is ready.
pub fn run(lab: &std::sync::Arc<Lab>) -> Result<()> {
    let plan = &lab.plan;
    let pki = Pki::create()?;
    network::bridge(&lab.children)?;
    lab.say("starting etcd, the API server and the nodes' runtimes");
    let archive = layout::run("nodes/images.tar");
    thread::scope(|scope| {
        let nodes = scope.spawn(|| {
            images::write(&lab.children, plan, &archive)?;
            for_each(&plan.nodes, |node| node::runtime(lab, node, &archive))?;
            lab.say("runtimes are up and have their images");
            anyhow::Ok(())
        });
        control_plane::apiserver(lab, &pki)?;
        lab.say("the API server is ready");
        control_plane::controllers(lab, &pki)?;
        let mut documents = Vec::new();
        if plan.mullion {
            documents = mullion::install(lab)?;
            lab.say("Mullion's manifests are applied");
        }
        // Before the controllers run: they would follow every step of it.
        if plan.fake_nodes > 0 {
            fake_nodes::create(plan.fake_nodes, plan.mullion)?;
            lab.say(&format!("{} nodes without a kubelet are made", plan.fake_nodes));
        }
        if plan.mullion {
            mullion::controllers(lab, &documents)?;
        }
        join(nodes)
    })?;
    for_each(&plan.nodes, |node| {
        node::kubelet(lab, node, &pki)?;
        if plan.mullion { mullion::agent(lab, node) } else { Ok(()) }
    })?;
    lab.wait_for("default service account", "controller-manager", Duration::from_mins(1), || {
        api::get("/api/v1/namespaces/default/serviceaccounts/default").ok()
    })?;
    for node in &plan.nodes {
        let part = format!("kubelet@{}", node.name);
        lab.wait_for(&format!("Ready condition of {}", node.name), &part, Duration::from_secs(90), || {
            is_ready(&api::get(&format!("/api/v1/nodes/{}", node.name)).ok()?).then_some(())
        })?;
    }
    lab.say(&format!("{} nodes are Ready", plan.nodes.len()));
    if plan.mullion {
        mullion::wait(lab)?;
        mullion::keep_tokens(lab);
        lab.say("Mullion is ready");
    }
    Ok(())
}

/// Does `work` for all nodes at once and returns the first failure.
fn for_each(nodes: &[NodePlan], work: impl Fn(&NodePlan) -> Result<()> + Sync) -> Result<()> {
    thread::scope(|scope| {
        let threads: Vec<_> = nodes.iter().map(|node| scope.spawn(|| work(node))).collect();
        threads.into_iter().try_for_each(join)
    })
}

fn join<T>(thread: thread::ScopedJoinHandle<'_, Result<T>>) -> Result<T> {
    thread.join().unwrap_or_else(|_| Err(anyhow!("a thread of the supervisor panicked: see its log")))
}

/// Whether a Node object says that it is ready.
fn is_ready(node: &serde_json::Value) -> bool {
    node["status"]["conditions"].as_array().is_some_and(|conditions| {
        conditions.iter().any(|condition| condition["type"] == "Ready" && condition["status"] == "True")
    })
}
