//! The contract of both exporters' `/metrics`, included by the tests of each: names, kinds, units and labels stand in
//! `docs/metrics.md`, and a label means the same in both, so that series of one join with those of the other (MO-09).

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::Path;

const END: &str = "<!-- end -->\n";

/// What a scrape shows of one name.
#[derive(Debug, Default)]
pub struct Metric {
    pub kind: String,
    pub labels: Vec<String>,
    pub help: String,
    shown: bool,
}

/// By name, without the ending of its kind.
pub type Schema = BTreeMap<String, Metric>;

/// Name, kind, labels and help of each metric. A series that stands twice is refused: whoever scrapes it refuses all of
/// the answer, or keeps one of the two.
pub fn schema(text: &str) -> Schema {
    let mut all = Schema::new();
    let mut series = BTreeSet::new();
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            let (name, help) = rest.split_once(' ').unwrap();
            help.clone_into(&mut all.entry(name.to_owned()).or_default().help);
        } else if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').unwrap();
            kind.clone_into(&mut all.entry(name.to_owned()).or_default().kind);
        } else if !line.starts_with('#') {
            let (one, _) = line.split_at(line.rfind("} ").or_else(|| line.find(' ')).unwrap());
            assert!(series.insert(one), "{one} stands twice");
            let (name, rest) = line.split_at(line.find(['{', ' ']).unwrap());
            let stem = ["_total", "_bucket", "_sum", "_count", "_info"]
                .iter()
                .find_map(|end| name.strip_suffix(end).filter(|stem| all.contains_key(*stem)))
                .unwrap_or(name);
            let labels: Vec<String> = rest
                .trim_start_matches('{')
                .split("\",")
                .filter_map(|part| part.split_once("=\"").map(|(label, _)| label.to_owned()))
                .filter(|label| label != "le")
                .collect();
            let entry = all.get_mut(stem).unwrap();
            assert!(!entry.shown || entry.labels == labels, "{name}: {:?} and {labels:?}", entry.labels);
            (entry.shown, entry.labels) = (true, labels);
        }
    }
    for (name, metric) in &all {
        assert!(metric.shown, "{name} is not shown by anything");
        check_labels(name, &metric.labels);
    }
    all
}

/// One name for one thing, in both exporters; HAMi's names from before v2.10 have their own.
fn check_labels(name: &str, labels: &[String]) {
    let known = [
        "zone",
        "node",
        "namespace",
        "pod",
        "container",
        "container_index",
        "vdevice_index",
        "device_uuid",
        "device_index",
        "device_type",
        "call",
        "outcome",
        "code",
        "action",
        "kind",
        "version",
    ];
    let begins = |with: &[&str]| labels.iter().map(String::as_str).take(with.len()).eq(with.iter().copied());
    if name.starts_with("mullion_") || name.starts_with("hami_") {
        let unknown: Vec<_> = labels.iter().filter(|l| !known.contains(&l.as_str())).collect();
        assert!(unknown.is_empty(), "{name}: {unknown:?} is none of the labels that both exporters have");
    }
    if name.starts_with("mullion_container_") {
        assert!(begins(&["node", "namespace", "pod", "container"]), "{name}: {labels:?}");
    } else if name.starts_with("mullion_") && labels.iter().any(|l| l == "device_uuid") {
        assert!(begins(&["node"]), "{name} names the node of its card: {labels:?}");
    } else if !name.starts_with("mullion_") {
        assert!(begins(&["zone"]), "{name} is HAMi's: {labels:?}");
    }
}

/// What a name says of its unit.
fn unit(name: &str) -> &'static str {
    match name {
        "hami_node_gpu_memory_allocated_ratio" => return "part, 0 to 1",
        "HostGPUMemoryUsage"
        | "Device_memory_desc_of_container"
        | "vGPU_device_memory_limit_in_bytes"
        | "vGPU_device_memory_usage_in_bytes" => return "bytes",
        "HostCoreUtilization" | "Device_utilization_desc_of_container" => return "percent, 0 to 100",
        "Device_last_kernel_of_container" => return "seconds",
        _ => {}
    }
    let ends = [
        ("_bytes", "bytes"),
        ("_seconds", "seconds"),
        ("_percent", "percent"),
        ("_ratio", "percent, 0 to 100"),
        ("_scale", "factor"),
    ];
    ends.into_iter().find(|(end, _)| name.ends_with(end)).map_or("number", |(_, unit)| unit)
}

/// Compares what is shown with the table in `docs/metrics.md` that `maker` makes, or writes that anew.
pub fn compare(all: &Schema, maker: &str) {
    let mut table =
        String::from("| metric | kind | unit | labels | what it is |\n| --- | --- | --- | --- | --- |\n");
    for (name, metric) in all {
        let shown = match metric.kind.as_str() {
            "counter" => format!("{name}_total"),
            "info" => format!("{name}_info"),
            _ => name.clone(),
        };
        let labels = if metric.labels.is_empty() { "none".to_owned() } else { metric.labels.join(", ") };
        let (kind, unit, help) = (&metric.kind, unit(name), metric.help.trim_end_matches('.'));
        writeln!(table, "| `{shown}` | {kind} | {unit} | {labels} | {help} |").unwrap();
    }
    let begin = format!("<!-- made by {maker}; UPDATE_GOLDEN=1 writes it anew -->\n");
    let path = contract();
    let text = std::fs::read_to_string(&path).unwrap();
    let (before, rest) = text.split_once(&begin).unwrap();
    let (found, after) = rest.split_once(END).unwrap();
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        std::fs::write(&path, format!("{before}{begin}{table}{END}{after}")).unwrap();
    } else {
        assert_eq!(found, table, "docs/metrics.md is not what is shown: UPDATE_GOLDEN=1 writes it anew");
    }
}

fn contract() -> std::path::PathBuf {
    let folders = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors();
    let docs = folders.map(|folder| folder.join("docs/metrics.md"));
    docs.into_iter().find(|path| path.exists()).unwrap()
}

/// Labels of a metric in the contract, whichever exporter shows it.
pub fn labels_by_contract(name: &str) -> Vec<String> {
    let text = std::fs::read_to_string(contract()).unwrap();
    let row = text.lines().find(|line| line.starts_with(&format!("| `{name}` | "))).unwrap();
    row.split(" | ").nth(3).unwrap().split(", ").map(str::to_owned).collect()
}
