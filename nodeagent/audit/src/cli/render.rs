//! Answers as text.

use std::fmt::Write as _;

use serde::Serialize;
use serde_json::{Value, json};

use super::Output;
use crate::{CardMinute, Event, Holder, Row, Verification};

/// A row as JSON and YAML show it.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct RowView<'a> {
    seq: u64,
    time: String,
    kind: &'a str,
    node: &'a str,
    /// Tells pods of one name apart.
    #[serde(skip_serializing_if = "Option::is_none")]
    pod_uid: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    trace_id: Option<&'a str>,
    hash: String,
    /// The event itself; the plain text where it is of a newer release.
    event: Value,
}

impl<'a> RowView<'a> {
    fn new(row: &'a Row) -> Self {
        Self {
            seq: row.seq,
            time: time(row.time),
            kind: &row.kind,
            node: &row.node,
            pod_uid: row.pod_uid.as_deref(),
            trace_id: row.trace_id.as_deref(),
            hash: hex::encode(row.hash),
            event: serde_json::from_str(&row.detail).unwrap_or_else(|_| Value::String(row.detail.clone())),
        }
    }
}

pub(super) fn rows(rows: &[Row], output: Output) -> String {
    if output != Output::Table {
        return document(&rows.iter().map(RowView::new).collect::<Vec<_>>(), output);
    }
    let lines = rows.iter().map(|row| {
        let pod = match (&row.pod_namespace, &row.pod_name) {
            (Some(namespace), Some(name)) => format!("{namespace}/{name}"),
            _ => dash(),
        };
        let mut cards: Vec<&str> =
            row.cards.iter().map(|c| c.mig_uuid.as_deref().unwrap_or(&c.card)).collect();
        cards.dedup();
        [
            row.seq.to_string(),
            time(row.time),
            row.kind.clone(),
            pod,
            row.pod_uid.as_deref().map_or_else(dash, short),
            row.container.clone().unwrap_or_else(dash),
            if cards.is_empty() { dash() } else { cards.join(",") },
            row.memory_mib.map_or_else(dash, |mib| format!("{mib}Mi")),
            row.core_percent.map_or_else(dash, |percent| format!("{percent}%")),
            row.event().map_or_else(|_| row.code.clone().unwrap_or_else(dash), |event| note(&event)),
        ]
    });
    table(["SEQ", "TIME", "KIND", "POD", "UID", "CONTAINER", "CARD", "MEM", "CORES", "NOTE"], lines)
}

pub(super) fn holders(holders: &[Holder], output: Output) -> String {
    if output != Output::Table {
        return document(&holders, output);
    }
    let lines = holders.iter().map(|holder| {
        [
            format!("{}/{}", holder.pod.namespace, holder.pod.name),
            holder.pod.uid.clone(),
            holder.container.clone(),
            format!("{}Mi", holder.share.memory_mib),
            format!("{}%", holder.share.core_percent),
            holder.share.mig.as_ref().and_then(|mig| mig.uuid.clone()).unwrap_or_else(dash),
            if holder.prepared.is_some() { "prepared".to_owned() } else { "reserved".to_owned() },
            time(holder.state_since()),
        ]
    });
    table(["POD", "UID", "CONTAINER", "MEM", "CORES", "MIG", "STATE", "SINCE"], lines)
}

pub(super) fn verification(found: &Verification, output: Output) -> String {
    if output != Output::Table {
        let findings: Vec<_> =
            found.findings.iter().map(|f| json!({"seq": f.seq, "problem": f.to_string()})).collect();
        let view = json!({
            "ok": found.is_ok(), "rows": found.rows, "head": found.head.to_string(), "findings": findings,
        });
        return document(&view, output);
    }
    let mut text = String::new();
    let verdict = if found.is_ok() { "ok" } else { "BROKEN" };
    // Writing to a String cannot fail.
    let _ = writeln!(text, "{verdict}: {} rows in order, head {}", found.rows, found.head);
    for finding in &found.findings {
        let _ = writeln!(text, "{}", printable(&finding.to_string()));
    }
    text
}

/// What is worth saying about an event besides its columns.
fn note(event: &Event) -> String {
    match event {
        Event::AgentStarted { boot_id, agent_version } => format!("version {agent_version}, boot {boot_id}"),
        Event::PluginRegistered { resource, slots } => format!("{resource}, {slots} slots"),
        Event::InventoryChanged { observation, driver_version, cards } => {
            let driver = driver_version.as_deref().unwrap_or("none");
            format!("observation {observation}, driver {driver}, {} cards", cards.len())
        }
        Event::HealthChanged { state, xid, message, .. } => {
            // The driver's own word mostly begins with the number.
            let xid = xid.map(|xid| format!("XID {xid}")).filter(|xid| !begins(message, xid));
            let xid = xid.map(|xid| format!(", {xid}")).unwrap_or_default();
            format!("{state:?}{xid}: {message}")
        }
        Event::AllocationReserved { allocation, .. }
        | Event::ContainerStarted { allocation, .. }
        | Event::InitDone { allocation, .. }
        | Event::BypassEnded { allocation, .. }
        | Event::UsageFileReadable { allocation, .. } => allocation.name.clone(),
        Event::GrantIssued { grant, device_ids } => format!("grant {grant} for {}", device_ids.join(",")),
        Event::GrantWithdrawn { grant, code } => format!("grant {grant}, {code}"),
        Event::Prepared { grant, .. } => format!("grant {grant}"),
        Event::AllocationVoided { code, message, .. } | Event::PrepareRefused { code, message, .. } => {
            format!("{code}: {message}")
        }
        Event::Released { code, .. } | Event::UsageFileDamaged { code, .. } => code.clone(),
        Event::UsageMinute { cards, .. } => cards.iter().map(minute).collect::<Vec<_>>().join("; "),
        Event::LimitBypassed { held_mib, accounted_mib, limit_mib, processes, .. } => format!(
            "{held_mib} MiB held by {processes} {}, {accounted_mib} MiB accounted for, limit {limit_mib} MiB",
            if *processes == 1 { "process" } else { "processes" }
        ),
        Event::AuditGap { code, since, refused } => format!("{code} since {since}, {refused} events refused"),
    }
}

fn minute(card: &CardMinute) -> String {
    let busy = card.mean_utilization.map(|m| format!(", {m} % busy")).unwrap_or_default();
    let hits = if card.limit_hits > 0 { format!(", {} refused", card.limit_hits) } else { String::new() };
    format!("peak {} of {} MiB{busy}{hits}", card.peak_mib, card.limit_mib)
}

/// Whether `text` begins with `word`, and not with a longer one: `XID 79` is not in `XID 790`.
fn begins(text: &str, word: &str) -> bool {
    text.strip_prefix(word).is_some_and(|rest| !rest.starts_with(|c: char| c.is_ascii_digit()))
}

/// The beginning of a UID: enough to tell pods apart, and to ask by.
fn short(uid: &str) -> String {
    uid.chars().take(8).collect()
}

fn time(time: jiff::Timestamp) -> String {
    format!("{time:.9}")
}

fn dash() -> String {
    "-".to_owned()
}

fn document(value: &impl Serialize, output: Output) -> String {
    let text = match output {
        Output::Yaml => serde_saphyr::to_string(value).map_err(|e| e.to_string()),
        Output::Json | Output::Table => serde_json::to_string_pretty(value).map_err(|e| e.to_string()),
    };
    // Every value here has string keys and finite numbers, which both formats can write.
    let mut text = text.unwrap_or_else(|error| format!("\"cannot be written: {error}\""));
    if !text.ends_with('\n') {
        text.push('\n');
    }
    text
}

/// Aligns columns; the last one is as long as it likes.
fn table<const N: usize>(heads: [&str; N], lines: impl Iterator<Item = [String; N]>) -> String {
    let lines: Vec<[String; N]> = lines.map(|line| line.map(|cell| printable(&cell))).collect();
    if lines.is_empty() {
        return String::new();
    }
    let mut widths = heads.map(str::len);
    for line in &lines {
        for (width, cell) in widths.iter_mut().zip(line) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let mut text = String::new();
    let heads = heads.map(str::to_owned);
    for line in std::iter::once(&heads).chain(&lines) {
        let mut row = String::new();
        for (cell, width) in line.iter().zip(widths) {
            // Writing to a String cannot fail.
            let _ = write!(row, "{cell:<width$}  ");
        }
        text.push_str(row.trim_end());
        text.push('\n');
    }
    text
}

/// Shows control characters instead of obeying them: names and messages may come from a stranger's pod.
fn printable(text: &str) -> String {
    text.chars()
        .flat_map(|c| {
            let shown = if c.is_control() { c.escape_default().collect() } else { vec![c] };
            shown.into_iter()
        })
        .collect()
}
