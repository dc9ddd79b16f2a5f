//! What becomes of the node's cards stands in the audit log, also where the agent ends between two of its files.

use std::sync::Arc;
use std::time::Duration;

use mullion_crds::gpunode::{GPUNode, GPUNodeSpec};
use mullion_nodeagent::config::HealthSettings;
use mullion_nodeagent::events::Announcer;
use mullion_nodeagent::health::{Known, Watcher};
use mullion_nodeagent::inventory::{Publisher, describe};
use mullion_nodeagent::metrics::Metrics;
use mullion_nodeagent::nvml::{DriverHandle, XidSeen};
use mullion_nodeagent::state::Key;
use tokio::sync::mpsc;

use crate::Node;
use crate::withdrawn::api;

type Cards = std::collections::BTreeMap<String, Known>;

impl Node {
    /// Waits until the log has so many rows of a kind, and a moment longer.
    async fn rows(&self, kind: &str, count: usize) {
        let come = async {
            while self.audited(kind).await.len() < count {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), come).await.unwrap();
        tokio::time::sleep(Duration::from_millis(500)).await;
        assert_eq!(self.audited(kind).await.len(), count, "{kind}");
    }

    fn publisher(&self) -> Publisher {
        Publisher {
            client: api(&[]),
            shared: Arc::clone(&self.shared),
            state: self.state.clone(),
            audit: self.audit.clone(),
            metrics: Arc::default(),
            turn: Arc::default(),
        }
    }
}

/// Killed between the report and its row, or told by a log that took none: the row is written all the same, and once.
#[tokio::test]
async fn an_inventory_that_the_api_server_has_comes_into_the_log() {
    let node = Node::new(true).await;
    let report = |observation: i64| {
        node.shared.change(|w| {
            w.node_uid = "uid".to_owned();
            w.gpunode_known = true;
            w.signs.cdi = Some(Ok("x".to_owned()));
            w.signs.cgroups = Some(Ok("x".to_owned()));
            w.signs.audit = Some(Ok(()));
            let mut object = GPUNode::new("node-a", GPUNodeSpec::default());
            object.metadata.uid = Some("object".to_owned());
            w.gpunode = Some(object);
            w.refold_node();
            let mut status = describe(w, jiff::Timestamp::UNIX_EPOCH);
            status.observation = observation;
            w.observation = observation;
            w.gpunode.as_mut().unwrap().status = Some(status);
        });
    };
    report(7);
    for run in 0..2 {
        let publishing = tokio::spawn(node.publisher().run());
        node.rows("InventoryChanged", 1).await;
        publishing.abort();
        assert!(publishing.await.unwrap_err().is_cancelled(), "run {run}");
    }
    let publishing = tokio::spawn(node.publisher().run());
    report(8);
    node.rows("InventoryChanged", 2).await;
    publishing.abort();
}

/// To the next run a card that is ill in the state file is nothing new: so the row comes first.
#[tokio::test]
async fn an_illness_is_kept_once_it_is_in_the_log() {
    let node = Node::new(true).await;
    let ill = async || {
        let cards: Option<Cards> = node.state.get(Key::Cards).await.unwrap();
        cards.is_some_and(|cards| cards["GPU-0"].health.illness.is_some())
    };
    let (xids, received) = mpsc::unbounded_channel();
    let metrics = Arc::new(Metrics::default());
    let watcher = Watcher {
        driver: DriverHandle::start(Some("/nonexistent".into()), Arc::clone(&metrics)).unwrap(),
        xids: received,
        shared: Arc::clone(&node.shared),
        audit: node.audit.clone(),
        state: node.state.clone(),
        settings: HealthSettings {
            ignored_xids: Vec::new(),
            poll: Duration::from_millis(100),
            recovery_checks: 1,
        },
        announcer: Announcer::new(api(&[]), Arc::clone(&node.shared), metrics, "node-a".into()),
    };
    node.block_log(true);
    let watching = tokio::spawn(watcher.run());
    xids.send(XidSeen { card: "GPU-0".to_owned(), xid: 79 }).unwrap();
    let mut bell = node.shared.bell();
    let is_seen = || {
        node.shared.read(|w| w.cards.as_ref().is_some_and(|cards| cards["GPU-0"].health.illness.is_some()))
    };
    while !is_seen() {
        bell.changed().await.unwrap();
    }
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert!(!ill().await, "killed now, the next run would find it ill and tell nobody");
    node.block_log(false);
    node.rows("HealthChanged", 1).await;
    assert!(ill().await);
    watching.abort();
}
