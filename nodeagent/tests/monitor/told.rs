//! Whom a look is told to.

use std::sync::Arc;
use std::time::Duration;

use mullion_audit::Event;
use mullion_nodeagent::events::Announcer;
use mullion_nodeagent::monitor::engine::Verdict;
use mullion_nodeagent::monitor::escape::CALM_LOOKS;
use mullion_nodeagent::monitor::{Latest, Monitor};
use mullion_nodeagent::nvml::DriverHandle;
use mullion_nodeagent::world::Shared;
use tokio::sync::mpsc::unbounded_channel;

use crate::common::cluster::cluster;
use crate::common::{Node, container, sample};

/// A limit that is passed, and a file that is damaged: an Event on the pod and a row each, when it begins and when it ends.
#[tokio::test]
async fn who_passes_a_limit_or_damages_a_file_is_told_of() {
    let mut node = Node::new();
    node.pod("p", &["main"], &[("GPU-0", 4096, 30)]);
    let me = std::process::id();
    node.processes("p", "main", &[me]);
    let (client, mut said) = cluster();
    let mut same = Node::new();
    same.pod("p", &["main"], &[("GPU-0", 4096, 30)]);
    let shared = Shared::new(std::mem::take(&mut same.world));
    let (facts, mut rows) = unbounded_channel();
    let monitor = Monitor {
        shared: Arc::clone(&shared),
        driver: DriverHandle::start(Some("/nonexistent".into()), Arc::default()).unwrap(),
        settings: node.settings.clone(),
        facts,
        announcer: Announcer::new(client, Arc::clone(&shared), Arc::default(), "node-a".into()),
        latest: Latest::default(),
    };
    let much = sample(&["GPU-0"], &[("GPU-0", me, 60_000, 0)], node.unix_ns());
    let own = sample(&["GPU-0"], &[("GPU-0", me, 300, 0)], node.unix_ns());
    let mut next = async || {
        let event = tokio::time::timeout(Duration::from_secs(20), said.recv()).await.unwrap().unwrap();
        assert_eq!(
            (event["regarding"]["name"].as_str(), event["regarding"]["uid"].as_str()),
            (Some("p-name"), Some("p"))
        );
        let [type_, reason, text] =
            ["type", "reason", "note"].map(|field| event[field].as_str().unwrap().to_owned());
        (type_, reason, text)
    };
    for _ in 0..4 {
        monitor.tell(node.look(Some(&much)));
    }
    let (type_, reason, text) = next().await;
    assert_eq!((type_.as_str(), reason.as_str()), ("Warning", "LimitBypassed"));
    assert!(text.contains("container main") && text.contains("60000 MiB of card GPU-0"), "{text}");
    assert!(matches!(rows.try_recv().unwrap().event, Event::LimitBypassed { held_mib: 60_000, .. }));
    shared.read(|world| {
        let verdicts = world.verdicts.as_ref().unwrap();
        assert!(matches!(verdicts[&"allocation-p".into()], Verdict::Bypassed { .. }), "{verdicts:?}");
        assert!(world.card_pids[&"p".into()].contains(&me), "what a release waits for");
    });
    assert!(container(&monitor.latest.get(), "p", "main").bypassed);
    for _ in 0..CALM_LOOKS {
        monitor.tell(node.look(Some(&own)));
    }
    assert_eq!(next().await.1, "LimitHoldsAgain");
    // What the driver does not list any more holds nothing.
    monitor.tell(node.look(Some(&sample(&["GPU-0"], &[], 0))));
    assert!(shared.read(|world| world.card_pids[&"p".into()].is_empty()));
    std::fs::write(node.usage_path("p", "main"), "garbage\n").unwrap();
    for _ in 0..4 {
        monitor.tell(node.look(Some(&own)));
    }
    let (type_, reason, text) = next().await;
    assert_eq!((type_.as_str(), reason.as_str()), ("Warning", "UsageFileDamaged"));
    assert!(text.contains("container main"), "{text}");
    let kinds: Vec<Event> = std::iter::from_fn(|| rows.try_recv().ok()).map(|entry| entry.event).collect();
    assert!(kinds.iter().any(|event| matches!(event, Event::BypassEnded { .. })), "{kinds:?}");
    assert!(kinds.iter().any(|event| matches!(event, Event::UsageFileDamaged { .. })), "{kinds:?}");
    assert!(said.try_recv().is_err(), "each once");
}
