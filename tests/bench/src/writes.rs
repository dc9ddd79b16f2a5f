//! API writes per pod and writer, up to bound and up to Running, from the API server's audit log.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use mullion_e2e::Scope;
use mullion_e2e::pods::{Build, slice_pod};
use serde::Serialize;
use serde_json::json;

use crate::apilog::{Entry, Tail};
use crate::lab::Status;
use crate::pods::{self, Goal, Watch};
use crate::report::{Report, Table};
use crate::stats::real;

/// Settings.
#[derive(Debug, clap::Args)]
pub struct Options {
    /// Pods, created at once.
    #[arg(long, default_value_t = 20)]
    pods: usize,
}

/// In which part of a pod's life a write fell.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
enum Stage {
    /// Up to and with its binding.
    UpToBound,
    /// After it, up to Running.
    UpToRunning,
    /// Later.
    Later,
}

/// Runs the scenario.
///
/// # Errors
/// When not all pods run in time, or the log does not show their bindings.
pub async fn run(options: &Options) -> Result<Report> {
    let status = Status::ask()?;
    let scope = Scope::new("bench-writes").await?;
    let crowd: Vec<Pod> = (0..options.pods)
        .map(|i| {
            slice_pod(&format!("w{i:03}"), "2000", "5").annotated("hami.io/node-scheduler-policy", "spread")
        })
        .collect();
    let log = Tail::start(&status.audit_log)?;
    let watch = Watch::open(&scope.pods(), Goal::Running, options.pods).await?;
    pods::create(&scope.pods(), &crowd, options.pods).await?;
    watch.wait().await?;
    // What follows Running (Events, the agent's last word) also comes to its end.
    tokio::time::sleep(Duration::from_secs(5)).await;
    let entries: Vec<Entry> =
        log.read()?.into_iter().filter(|entry| is_of(entry, &scope.namespace)).collect();
    scope.remove().await?;
    let names: Vec<String> = crowd.iter().map(ResourceExt::name_any).collect();
    let counts = count(&entries, &names)?;
    Ok(report(options.pods, &counts))
}

/// Whether it is a write into the namespace that went through.
fn is_of(entry: &Entry, namespace: &str) -> bool {
    entry.is_write()
        && entry.succeeded()
        && entry.object_ref.as_ref().is_some_and(|object| object.namespace == namespace)
}

/// (writer, verb and resource) -> how often per stage, over all pods.
type Counts = BTreeMap<(String, String), BTreeMap<Stage, usize>>;

fn count(entries: &[Entry], names: &[String]) -> Result<Counts> {
    let mut counts = Counts::new();
    for name in names {
        let own: Vec<&Entry> = entries.iter().filter(|entry| belongs(entry, name)).collect();
        let bound =
            own.iter().find(|entry| entry.what() == "pods/binding").map(|entry| entry.stage_timestamp);
        let bound = bound.with_context(|| format!("the audit log has no binding of pod {name}"))?;
        // The kubelet's last status before the pod was seen running is the one that says so.
        let running = own
            .iter()
            .filter(|e| e.what() == "pods/status" && e.writer() == "kubelet")
            .map(|e| e.stage_timestamp)
            .max();
        let running =
            running.with_context(|| format!("the audit log has no status of pod {name} by a kubelet"))?;
        for entry in own {
            let key = (entry.writer(), format!("{} {}", entry.verb, entry.what()));
            *counts.entry(key).or_default().entry(stage(entry, bound, running)).or_default() += 1;
        }
    }
    Ok(counts)
}

fn stage(entry: &Entry, bound: Timestamp, running: Timestamp) -> Stage {
    if entry.stage_timestamp <= bound {
        Stage::UpToBound
    } else if entry.stage_timestamp <= running {
        Stage::UpToRunning
    } else {
        Stage::Later
    }
}

/// Whether a write is about the pod, its allocation (`POD-…`) or an Event of one of them (`POD.…`, `POD-….…`).
fn belongs(entry: &Entry, pod: &str) -> bool {
    let name = entry.object_ref.as_ref().map_or("", |object| object.name.as_str());
    name.strip_prefix(pod).is_some_and(|rest| rest.is_empty() || rest.starts_with(['-', '.']))
}

fn report(pods: usize, counts: &Counts) -> Report {
    let mut table =
        Table::new(&["Writer", "Write", "per pod, up to bound", "then, up to Running", "after Running"]);
    let mut sums: BTreeMap<Stage, usize> = BTreeMap::new();
    let mut values = Vec::new();
    let per_pod = |count: usize| format!("{:.2}", real(count) / real(pods));
    for ((writer, write), stages) in counts {
        let cell = |stage| stages.get(&stage).copied().unwrap_or(0);
        let cells = [Stage::UpToBound, Stage::UpToRunning, Stage::Later].map(cell);
        if writer != "user" {
            for (&stage, count) in stages {
                *sums.entry(stage).or_default() += count;
            }
        }
        table.row([vec![writer.clone(), write.clone()], cells.map(per_pod).to_vec()].concat());
        values.push(json!({"writer": writer, "write": write, "counts": cells}));
    }
    let sum = |stage| per_pod(sums.get(&stage).copied().unwrap_or(0));
    table.row([
        "all but the user's".to_owned(),
        String::new(),
        sum(Stage::UpToBound),
        sum(Stage::UpToRunning),
        sum(Stage::Later),
    ]);
    Report {
        title: format!("API writes of {pods} pods created at once on the lab's real nodes"),
        tables: vec![table],
        notes: vec!["Successful writes in the audit log; a pod counts as Running with the last status that its kubelet wrote.".to_owned()],
        values: json!({"pods": pods, "writes": values}),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(user: &str, verb: &str, resource: &str, sub: &str, name: &str, second: u32) -> Entry {
        let time = format!("2026-01-01T00:00:{second:02}Z");
        serde_json::from_value(json!({
            "verb": verb, "user": {"username": user}, "stageTimestamp": time,
            "objectRef": {"resource": resource, "subresource": sub, "namespace": "n", "name": name},
            "responseStatus": {"code": 201},
        }))
        .unwrap()
    }

    #[test]
    fn counts_writes_by_stage() {
        let controller = "system:serviceaccount:mullion-system:mullion-controller";
        let entries = [
            entry("kubernetes-admin", "create", "pods", "", "w1", 1),
            entry(controller, "create", "vgpuallocations", "", "w1-abcdef01", 2),
            entry(controller, "create", "pods", "binding", "w1", 3),
            entry(controller, "create", "events", "", "w1.18a", 4),
            entry("system:node:node-a", "patch", "pods", "status", "w1", 6),
            entry(controller, "patch", "vgpuallocations", "status", "w1-abcdef01", 7),
            entry(controller, "create", "pods", "binding", "w12", 1),
        ];
        let counts = count(&entries, &["w1".to_owned()]).unwrap();
        let at = |write: &str, stage| {
            counts.iter().find(|((_, what), _)| what == write).and_then(|(_, c)| c.get(&stage).copied())
        };
        assert_eq!(at("create vgpuallocations", Stage::UpToBound), Some(1));
        assert_eq!(at("create pods/binding", Stage::UpToBound), Some(1), "w12 is another pod");
        assert_eq!(at("create events", Stage::UpToRunning), Some(1));
        assert_eq!(at("patch vgpuallocations/status", Stage::Later), Some(1));
        assert!(count(&entries, &["w2".to_owned()]).is_err(), "no binding");
        let text = report(1, &counts).to_string();
        assert!(text.contains("| all but the user's |  | 2.00 | 2.00 | 1.00 |"), "{text}");
    }
}
