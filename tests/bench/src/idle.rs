//! API writes of Mullion's identities while nothing happens, from the API server's audit log.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::Result;
use serde_json::json;

use crate::apilog::{Entry, Tail};
use crate::lab::Status;
use crate::report::{Report, Table};

/// Settings.
#[derive(Debug, clap::Args)]
pub struct Options {
    /// How long to look.
    #[arg(long, default_value_t = 300)]
    seconds: u64,
    /// How long to wait first, so that what happened before comes to its end.
    #[arg(long, default_value_t = 30)]
    quiet: u64,
}

/// Runs the scenario.
///
/// # Errors
/// When the audit log cannot be read.
pub async fn run(options: &Options) -> Result<Report> {
    let status = Status::ask()?;
    tokio::time::sleep(Duration::from_secs(options.quiet)).await;
    let log = Tail::start(&status.audit_log)?;
    tokio::time::sleep(Duration::from_secs(options.seconds)).await;
    Ok(report(options.seconds, &log.read()?))
}

fn report(seconds: u64, entries: &[Entry]) -> Report {
    let mut counts: BTreeMap<[String; 3], usize> = BTreeMap::new();
    for entry in entries.iter().filter(|entry| entry.is_mullions() && entry.is_write()) {
        let name = entry.object_ref.as_ref().map(|object| object.name.clone()).unwrap_or_default();
        *counts.entry([entry.writer(), format!("{} {}", entry.verb, entry.what()), name]).or_default() += 1;
    }
    let mut table = Table::new(&["Writer", "Write", "Object", "times"]);
    for (key, count) in &counts {
        table.row([key.to_vec(), vec![count.to_string()]].concat());
    }
    let others = counts.keys().filter(|key| !key[1].ends_with(" leases")).count();
    let objects: std::collections::BTreeSet<_> = counts.keys().map(|key| &key[2]).collect();
    Report {
        title: format!(
            "{seconds} idle seconds: {} objects written, {others} of them no leases",
            objects.len()
        ),
        tables: vec![table],
        notes: vec!["Attempts count, whether they went through or not.".to_owned()],
        values: json!(
            counts
                .iter()
                .map(|([writer, write, object], count)| {
                    json!({"writer": writer, "write": write, "object": object, "times": count})
                })
                .collect::<Vec<_>>()
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_writes_than_leases_stand_out() {
        let entry = |user: &str, verb: &str, resource: &str, name: &str| -> Entry {
            serde_json::from_value(json!({
                "verb": verb, "user": {"username": format!("system:serviceaccount:{user}")},
                "objectRef": {"resource": resource, "name": name},
                "stageTimestamp": "2026-01-01T00:00:00Z",
            }))
            .unwrap()
        };
        let lease = entry("mullion-system:mullion-controller", "update", "leases", "mullion-scheduler");
        let entries = [
            lease.clone(),
            lease,
            entry("mullion-system:mullion-nodeagent", "patch", "gpunodes", "node-a"),
            entry("mullion-system:mullion-nodeagent", "watch", "pods", ""),
            entry("kube-system:other", "update", "leases", "foreign"),
        ];
        let text = report(300, &entries).to_string();
        assert!(text.contains("2 objects written, 1 of them no leases"), "{text}");
        assert!(text.contains("| update leases | mullion-scheduler | 2 |"), "{text}");
        assert!(!text.contains("foreign") && !text.contains("watch"), "{text}");
    }
}
