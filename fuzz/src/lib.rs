//! One function per reader of what others wrote: bytes in, and it must neither panic nor contradict itself.
//!
//! `tests/replay.rs` runs each over its corpus (`corpus/TARGET/`) and over mutations of it, with the ordinary tests.
//! `libfuzzer/` is a program around the same functions that looks for new inputs by coverage; `fuzz/run` builds and
//! runs it. What it finds goes into the corpus, so that it stays found.

#![expect(clippy::unwrap_used, reason = "a contradiction is reported by a panic")]

mod agent;
mod controller;
mod core;
mod region;

/// Reads `data` as somebody's input.
pub type Target = fn(&[u8]);

/// Every target by name.
pub const TARGETS: [(&str, Target); 9] = [
    ("admission_review", controller::admission_review),
    ("extender", controller::extender),
    ("wishes", core::wishes),
    ("facts", core::facts),
    ("control_page", region::control_page),
    ("usage_file", region::usage_file),
    ("usage_extension", region::usage_extension),
    ("kubelet_checkpoint", agent::kubelet_checkpoint),
    ("driver_spec", agent::driver_spec),
];

/// The target of that name.
#[must_use]
pub fn target(name: &str) -> Option<Target> {
    TARGETS.iter().find(|(known, _)| *known == name).map(|(_, target)| *target)
}

/// Bytes taken from the front of the input; zero where there are no more.
fn number(data: &mut &[u8]) -> u64 {
    let (head, rest) = data.split_at(data.len().min(8));
    *data = rest;
    let mut bytes = [0; 8];
    bytes[..head.len()].copy_from_slice(head);
    u64::from_le_bytes(bytes)
}

/// A text that goes into an Event, a condition or a log line.
fn sayable(text: &str) {
    assert!(text.len() < 2048, "{} bytes long: {}", text.len(), text.chars().take(200).collect::<String>());
}
