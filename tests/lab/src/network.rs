//! The lab's network: one bridge, a cable to each node and controller, pods behind their node.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::children::Children;
use crate::layout::{API_ADDRESS, NodePlan, controller_address};
use crate::supervisor::Lab;

/// Sets up the bridge in the lab's own namespace.
pub fn bridge(children: &Children) -> Result<()> {
    forward()?;
    ip(children, "link set lo up")?;
    ip(children, "link add lab0 type bridge")?;
    ip(children, &format!("addr add {API_ADDRESS}/24 dev lab0"))?;
    ip(children, "link set lab0 up")
}

/// Lets packets pass between pods and the bridge, in this network namespace.
pub fn forward() -> Result<()> {
    std::fs::write("/proc/sys/net/ipv4/ip_forward", "1").context("cannot switch forwarding on")
}

/// Starts the process that holds a node's mount and network namespaces, and connects it.
pub fn node(lab: &Lab, node: &NodePlan) -> Result<()> {
    let plan = serde_json::to_string(node)?;
    let holder = hold(lab, &node.name, &["--mount", "--net"], &["hold-node", &plan])?;
    connect(&lab.children, holder, &node.link(), &node.address())?;
    // Pods of this node, as seen from the API server and the other nodes.
    ip(&lab.children, &format!("route add {} via {}", node.pod_cidr(), node.address()))
}

/// Starts the process that holds a controller's network namespace, and connects it.
pub fn controller(lab: &Lab, name: &str, index: usize) -> Result<()> {
    let holder = hold(lab, name, &["--net"], &["hold-network"])?;
    connect(&lab.children, holder, &format!("lab-c{index}"), &controller_address(index))
}

/// Starts `unshare FLAGS mullion-lab ARGS`, waits for its word `ready` and remembers it under `name`.
fn hold(lab: &Lab, name: &str, flags: &[&str], args: &[&str]) -> Result<i32> {
    let mut command = Command::new("unshare");
    command.args(flags).arg("--").arg(std::env::current_exe()?).args(args);
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    let mut child = lab.children.spawn(&mut command)?;
    let pid = child.id().cast_signed();
    let mut word = String::new();
    if let Some(pipe) = child.stdout.take() {
        BufReader::new(pipe).read_line(&mut word)?;
    }
    if word.trim() != "ready" {
        bail!("cannot make the namespaces of {name}: {}", word.trim());
    }
    lab.holders.lock().unwrap_or_else(std::sync::PoisonError::into_inner).insert(name.to_owned(), pid);
    Ok(pid)
}

/// Lays a cable from the bridge to the namespace of `holder`.
fn connect(children: &Children, holder: i32, link: &str, address: &str) -> Result<()> {
    ip(children, &format!("link add {link} type veth peer name eth0 netns {holder}"))?;
    ip(children, &format!("link set {link} master lab0 up"))?;
    let inside = |args: &str| {
        let mut command = Command::new("nsenter");
        command.args([&format!("--target={holder}"), "--net", "--", "ip"]).args(args.split(' '));
        children.run(&mut command).map(drop)
    };
    inside("link set lo up")?;
    inside(&format!("addr add {address}/24 dev eth0"))?;
    inside("link set eth0 up")?;
    inside(&format!("route add default via {API_ADDRESS}"))
}

fn ip(children: &Children, args: &str) -> Result<()> {
    children.run(Command::new("ip").args(args.split(' '))).map(drop)
}
