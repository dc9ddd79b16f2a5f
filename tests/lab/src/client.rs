//! What the commands other than `up` do: they talk to the running lab.

use std::ffi::OsString;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use nix::sys::socket::{getsockopt, sockopt};

use crate::layout::{self, Plan};
use crate::part::Fault;
use crate::supervisor::{LabStatus, Reply, Request};

fn connect() -> Result<UnixStream> {
    UnixStream::connect(layout::control_socket()).context("no lab is running: start one with `lab up`")
}

/// The supervisor's process id as this process sees it: 1 inside the lab.
pub fn supervisor_pid() -> Result<i32> {
    let peer = getsockopt(&connect()?, sockopt::PeerCredentials)
        .context("cannot ask who serves the control socket")?;
    Ok(peer.pid())
}

fn ask(request: &Request) -> Result<Reply> {
    let mut stream = connect()?;
    writeln!(stream, "{}", serde_json::to_string(request)?)?;
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line)?;
    match serde_json::from_str(&line).context("the supervisor ended before it answered")? {
        Reply::Failed(why) => bail!(why),
        reply => Ok(reply),
    }
}

fn status() -> Result<LabStatus> {
    match ask(&Request::Status)? {
        Reply::Status(status) => Ok(*status),
        other => bail!("unexpected answer of the supervisor: {other:?}"),
    }
}

/// `lab up`: starts the reaper, relays progress until the lab is ready, and then lets go of it.
pub fn up(plan: &Plan) -> Result<()> {
    let mut reaper = Command::new("setsid")
        .arg(std::env::current_exe().context("cannot find this program")?)
        .arg("reap")
        .arg(serde_json::to_string(plan)?)
        .current_dir("/")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .context("cannot start setsid (package util-linux)")?;
    // Closing it before `keep` is written takes the lab down: that is what our death does.
    let mut leash = reaper.stdin.take().context("no pipe to the reaper")?;
    let progress = reaper.stdout.take().context("no pipe from the reaper")?;
    let mut complaint = Vec::new();
    for line in BufReader::new(progress).lines() {
        let line = line?;
        match line.split_at_checked(2) {
            Some((". ", _)) => {
                writeln!(leash, "keep").context("the lab's reaper is gone")?;
                return Ok(());
            }
            Some(("! ", text)) => complaint.push(text.to_owned()),
            Some(("= ", text)) => eprintln!("lab: {text}"),
            _ => eprintln!("lab: {line}"),
        }
    }
    drop(leash);
    let _ = reaper.wait();
    if complaint.is_empty() {
        complaint.push("the lab ended while it was coming up".to_owned());
    }
    bail!(complaint.join("\n"))
}

/// Whose namespaces a part runs in, by its name; `None` for the lab's own.
fn home(part: &str) -> Option<String> {
    if let Some((_, node)) = part.split_once('@') {
        return Some(node.to_owned());
    }
    let number = part.strip_prefix("controller").or_else(|| part.strip_prefix("scheduler"))?;
    let is_pair = number.strip_prefix('-').map_or(number.is_empty(), |digits| digits.parse::<u32>().is_ok());
    is_pair.then(|| format!("controller{number}"))
}

/// `lab enter`: becomes `command` inside the lab, or inside one of its nodes, or where a part runs.
pub fn enter(node: Option<&str>, part: Option<&str>, command: &[OsString]) -> Result<()> {
    let supervisor = supervisor_pid()?;
    let status = status()?;
    let here = std::env::current_dir().context("no working directory")?;
    let mut enter = Command::new("nsenter");
    enter.arg(format!("--target={supervisor}")).args(["--mount", "--net", "--pid", "--ipc"]);
    enter.arg(format!("--wdns={}", here.display())).arg("--");
    if let Some(part) = part
        && !status.parts.iter().any(|known| known.name == part)
    {
        bail!("no part {part:?}: `lab status` lists them");
    }
    if let Some(name) = node.map(str::to_owned).or_else(|| home(part?)) {
        let names = status.holders.keys().cloned().collect::<Vec<_>>().join(", ");
        let holder =
            status.holders.get(&name).with_context(|| format!("no node {name:?}: there are {names}"))?;
        enter.args(["nsenter", &format!("--target={holder}"), "--net"]);
        if !name.starts_with("controller") {
            enter.arg("--mount");
        }
        enter.arg(format!("--wdns={}", here.display())).arg("--");
    }
    let plan = &status.plan;
    let own = [&plan.parts, &plan.bin, &plan.source.join("tests/lab")].map(|dir| dir.display().to_string());
    let path = std::env::var("PATH").unwrap_or_default();
    enter.env("PATH", format!("{}:{path}", own.join(":"))).env("KUBECONFIG", layout::admin_kubeconfig());
    // Whatever runs in there finds the lab again, without building it, and leaves no cache at home.
    enter.env("MULLION_LAB_BIN", std::env::current_exe()?).env("KUBECACHEDIR", layout::run("kube-cache"));
    enter.env("MULLION_LAB_RUN", layout::root());
    enter.args(command);
    Err(enter.exec()).context("cannot start nsenter (package util-linux)")
}

/// `lab fault`.
pub fn fault(part: &str, fault: Fault) -> Result<()> {
    match ask(&Request::Fault { part: part.to_owned(), fault })? {
        Reply::Done(done) => println!("{done}"),
        other => bail!("unexpected answer of the supervisor: {other:?}"),
    }
    Ok(())
}

/// `lab status`.
pub fn print_status(json: bool) -> Result<()> {
    // A reader that has seen enough (`| grep -q`) is no reason to break.
    let mut out = std::io::stdout().lock();
    let pid = supervisor_pid()?;
    let status = status()?;
    if json {
        let mut value = serde_json::to_value(&status)?;
        value["supervisor"] = pid.into();
        value["kubeconfig"] = serde_json::to_value(layout::admin_kubeconfig())?;
        value["auditLog"] = serde_json::to_value(layout::audit_log())?;
        let _ = writeln!(out, "{}", serde_json::to_string_pretty(&value)?);
        return Ok(());
    }
    let _ = writeln!(out, "supervisor  {pid}{}", if status.ready { "" } else { " (still coming up)" });
    let _ = writeln!(out, "kubeconfig  {}", layout::admin_kubeconfig().display());
    let _ = writeln!(out, "audit log   {}", layout::audit_log().display());
    let _ = writeln!(out, "logs        {}", layout::run("logs").display());
    for node in &status.plan.nodes {
        let _ = writeln!(
            out,
            "node        {} {} pods {} cards {}",
            node.name,
            node.address(),
            node.pod_cidr(),
            node.cards
        );
    }
    if status.plan.mullion {
        for index in 0..status.plan.controllers {
            let _ = writeln!(
                out,
                "controller  {} {}",
                layout::numbered("controller", index),
                layout::controller_address(index)
            );
        }
    }
    let _ = writeln!(out, "{:<24} {:>8} {:>7} STATE", "PART", "PID", "STARTS");
    for part in &status.parts {
        let _ = writeln!(out, "{:<24} {:>8} {:>7} {}", part.name, part.pid, part.starts, part.state);
    }
    Ok(())
}

/// `lab logs`.
pub fn logs(part: Option<&str>, follow: bool) -> Result<()> {
    let log = part.map(layout::log);
    let Some(log) = log.filter(|log| log.exists()) else {
        let parts = status()?.parts;
        let names: Vec<_> = parts.iter().map(|part| part.name.as_str()).collect();
        let names = format!("the parts are supervisor, {}", names.join(", "));
        match part {
            Some(part) => bail!("no log of {part:?}: {names}"),
            None => bail!("whose log? {names}"),
        }
    };
    let mut show = Command::new(if follow { "tail" } else { "cat" });
    if follow {
        show.args(["-n", "50", "-F"]);
    }
    Err(show.arg(log).exec()).context("cannot show the log")
}

/// `lab fake`: changes the state of a node's fake driver.
pub fn fake(node: Option<&str>, words: &[String]) -> Result<()> {
    let at = node.map(layout::fake_state);
    let (Some(at), [_, ..]) = (at.filter(|at| at.exists()), words) else {
        let nodes: Vec<_> = status()?.plan.nodes.into_iter().map(|node| node.name).collect();
        bail!(fake_usage(node, &nodes));
    };
    let store = fake_state::Store::open(at)?;
    println!("{}", fake_state::verb::apply(&store, words)?.trim_end());
    Ok(())
}

/// What `lab fake` says where it was not told what to do, or to whom.
fn fake_usage(node: Option<&str>, nodes: &[String]) -> String {
    let wrong = match node {
        Some(node) if !nodes.iter().any(|known| known == node) => {
            format!("no node {node:?} with a fake driver; ")
        }
        _ => String::new(),
    };
    let verbs = fake_state::verb::USAGE.replace(" | ", "\n  ");
    format!(
        "{wrong}usage: lab fake NODE VERB …\nnodes: {}\nverbs (CARD is an index or a uuid):\n  {verbs}",
        nodes.join(", ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fake_without_a_node_or_a_verb_lists_them() {
        let nodes = ["node-a".to_owned(), "node-b".to_owned()];
        for (node, wrong) in [(None, false), (Some("node-a"), false), (Some("xid"), true)] {
            let said = fake_usage(node, &nodes);
            assert_eq!(said.contains("no node \"xid\""), wrong, "{said}");
            for part in ["node-a, node-b", "\n  xid CARD CODE [GI CI]\n", "\n  show"] {
                assert!(said.contains(part), "{said}");
            }
        }
    }

    #[test]
    fn parts_have_homes() {
        for (part, want) in [
            ("kubelet@node-a", Some("node-a")),
            ("controller", Some("controller")),
            ("scheduler-2", Some("controller-2")),
            ("controller-manager", None),
            ("etcd", None),
        ] {
            assert_eq!(home(part).as_deref(), want, "{part}");
        }
    }
}
