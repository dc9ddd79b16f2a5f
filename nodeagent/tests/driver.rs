//! The driver's threads and the inventory over the simulated driver library.
//!
//! The library takes its state file from the environment, one per process: so each test runs itself again in a process
//! with that variable set.

#![expect(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use fake_state::{NodeState, STATE_ENV, Store, profile, verb};
use jiff::Timestamp;
use mullion_crds::gpunode::{GPUNodeStatus, HealthState};
use mullion_nodeagent::config::HealthSettings;
use mullion_nodeagent::health::{Turn, take_in};
use mullion_nodeagent::inventory::describe;
use mullion_nodeagent::metrics::Metrics;
use mullion_nodeagent::nvml::{DriverHandle, XidSeen, listen};
use mullion_nodeagent::world::World;
use tokio::sync::mpsc::UnboundedReceiver;

/// Far longer than anything here takes; only a failure waits for it.
const LONG: Duration = Duration::from_secs(20);

struct Node {
    store: Store,
    library: PathBuf,
    driver: DriverHandle,
    world: World,
}

/// The simulated node of this process; `None` in the process that only starts the other one.
fn node(test: &str, cards: &str) -> Option<(Node, tokio::runtime::Runtime)> {
    let exe = std::env::current_exe().unwrap();
    let Some(path) = std::env::var_os(STATE_ENV) else {
        let folder = tempfile::tempdir().unwrap();
        let mut command = Command::new(exe);
        command.args(["--exact", test, "--nocapture"]).env(STATE_ENV, folder.path().join("node-a.json"));
        assert!(command.status().unwrap().success(), "see above");
        return None;
    };
    let store = Store::create(path, &profile::node(cards, "node-a").unwrap()).unwrap();
    let library = exe.with_file_name("libnvidia_ml.so");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let driver = DriverHandle::start(Some(library.clone()), Arc::new(Metrics::default())).unwrap();
    let world = World { node: "node-a".into(), node_uid: "uid".to_owned(), ..World::default() };
    Some((Node { store, library, driver, world }, runtime))
}

impl Node {
    fn fake(&self, line: &str) {
        verb::apply(&self.store, &line.split_whitespace().map(str::to_owned).collect::<Vec<_>>()).unwrap();
    }

    fn state(&self) -> NodeState {
        self.store.read().unwrap()
    }

    /// One look at the driver, as the agent takes it.
    async fn look(&mut self) -> Vec<(String, bool)> {
        let settings =
            HealthSettings { ignored_xids: vec![], poll: Duration::from_secs(5), recovery_checks: 2 };
        let survey = self.driver.survey().await.unwrap();
        let turns = take_in(&mut self.world, &survey, &settings, Timestamp::UNIX_EPOCH);
        self.world.refold_node();
        turns.into_iter().map(|(uuid, turn)| (uuid, turn == Turn::Recovered)).collect()
    }

    fn report(&self) -> GPUNodeStatus {
        describe(&self.world, Timestamp::UNIX_EPOCH)
    }
}

#[test]
fn the_report_is_what_the_driver_tells() {
    let Some((mut node, runtime)) = node("the_report_is_what_the_driver_tells", "h100x4") else { return };
    runtime.block_on(async {
        assert!(node.look().await.is_empty());
        let (state, report) = (node.state(), node.report());
        assert_eq!(report.driver_version.as_ref(), Some(&state.driver.version));
        assert_eq!(report.cards.len(), 4);
        for (seen, card) in report.cards.iter().zip(&state.cards) {
            assert_eq!((&seen.uuid, seen.index, seen.minor), (&card.uuid, card.index, card.minor));
            assert_eq!(
                (&seen.model, seen.vendor.as_str(), seen.architecture.as_str()),
                (&card.model, "nvidia", "hopper")
            );
            assert_eq!(seen.memory_mib, i64::try_from(card.memory_mib).unwrap());
            assert_eq!((seen.sms, seen.numa_node), (Some(card.sms), card.numa_node));
            assert!(card.pci.bus_id.to_lowercase().ends_with(&seen.pci_address), "{}", seen.pci_address);
            assert_eq!(seen.health.state, HealthState::Healthy);
            let mig = seen.mig.as_ref().unwrap();
            assert!(!mig.current && !mig.pending && mig.table.is_some());
            assert_eq!(seen.links.len(), 3);
            for link in &seen.links {
                let fake = card.links.iter().find(|l| l.peer == link.peer).unwrap();
                let nvlink = format!("NVLink{}", fake.nvlinks);
                assert!(fake.nvlinks == 0 || link.kind == nvlink, "{link:?} for {fake:?}");
            }
        }
        // One table for four equal cards, in the driver's own figures (facts: eight-unit grid of H100 80GB).
        let [table] = report.mig_tables.as_slice() else { panic!("{:?}", report.mig_tables) };
        assert_eq!(table.width, 8);
        let row = |id: u32| table.profiles.iter().find(|p| p.gi_profile_id == id).unwrap();
        assert_eq!(
            (row(19).starts.as_slice(), row(19).size, row(19).sms),
            (&[0, 1, 2, 3, 4, 5, 6][..], 1, 16)
        );
        assert_eq!((row(9).starts.as_slice(), row(9).size), (&[0, 4][..], 4));
        assert_eq!((row(0).starts.as_slice(), row(0).size, row(0).sms), (&[0][..], 8, 132));
        // A second look finds nothing new: nothing would be written.
        node.look().await;
        assert_eq!(node.report(), report);
    });
}

#[test]
fn a_lost_card_is_ill_and_comes_back() {
    let Some((mut node, runtime)) = node("a_lost_card_is_ill_and_comes_back", "a100x2") else { return };
    runtime.block_on(async {
        node.look().await;
        assert_eq!(
            node.report().cards[0].sms,
            Some(node.state().cards[0].sms),
            "more than the widest MIG profile has"
        );
        let lost = node.state().cards[1].uuid.clone();
        node.fake("lost 1");
        assert_eq!(node.look().await, [(lost.clone(), false)]);
        assert!(node.look().await.is_empty(), "told once");
        let report = node.report();
        assert_eq!(report.cards.len(), 2, "it stays in the report");
        assert_eq!(report.summary.unwrap().health, "1 unhealthy");
        node.fake("restore 1");
        assert!(node.look().await.is_empty());
        assert_eq!(node.look().await, [(lost.clone(), true)]);
        node.fake("unlist 1");
        node.look().await;
        assert_eq!(node.report().cards.len(), 1, "nobody has it");
    });
}

// DP-10: the driver comes late, or goes for a while; the agent stays.
#[test]
fn a_driver_that_comes_late_is_picked_up() {
    let Some((mut node, runtime)) = node("a_driver_that_comes_late_is_picked_up", "a100") else { return };
    runtime.block_on(async {
        let path = node.store.path().to_owned();
        let aside = path.with_extension("aside");
        std::fs::rename(&path, &aside).unwrap();
        let error = node.driver.survey().await.unwrap_err();
        assert_eq!(error.code(), "NVML_ERROR_DRIVER_NOT_LOADED");
        std::fs::rename(&aside, &path).unwrap();
        node.look().await;
        assert_eq!(node.report().cards.len(), 1);
        node.fake("error nvmlDeviceGetCount_v2 999 1");
        assert_eq!(node.driver.survey().await.unwrap_err().code(), "NVML_ERROR_UNKNOWN");
        node.driver.survey().await.unwrap();
        let missing =
            DriverHandle::start(Some("/nonexistent/libnvidia-ml.so.1".into()), Arc::default()).unwrap();
        assert_eq!(missing.survey().await.unwrap_err().code(), "NVML_ERROR_LIBRARY_NOT_FOUND");
    });
}

#[test]
fn xids_and_processes_are_seen_with_their_card() {
    let Some((node, runtime)) = node("xids_and_processes_are_seen_with_their_card", "h100x2") else { return };
    runtime.block_on(async {
        let cards: Vec<String> = node.state().cards.iter().map(|c| c.uuid.clone()).collect();
        let (_thread, mut xids) = listen(Some(node.library.clone()), Arc::default()).unwrap();
        let seen = xid(&node, &mut xids, "xid 1 79").await;
        assert_eq!((seen.card.as_str(), seen.xid), (cards[1].as_str(), 79));
        node.fake("process 0 4242 100 5");
        let pids =
            node.driver.pids(vec![cards[0].clone(), cards[1].clone(), "GPU-none".to_owned()]).await.unwrap();
        assert_eq!(pids[&cards[0]], [4242]);
        assert!(pids[&cards[1]].is_empty() && pids["GPU-none"].is_empty());
    });
}

/// The next XID, provoked by `line`: events from before the registration are not delivered, so again until one is.
async fn xid(node: &Node, xids: &mut UnboundedReceiver<XidSeen>, line: &str) -> XidSeen {
    let seen = async {
        loop {
            node.fake(line);
            if let Ok(seen) = tokio::time::timeout(Duration::from_millis(200), xids.recv()).await {
                return seen.unwrap();
            }
        }
    };
    tokio::time::timeout(LONG, seen).await.unwrap()
}

// DP-09: two lost cards do not silence the third, and are heard when they are back.
#[test]
fn xids_of_cards_that_were_lost_at_the_start_are_heard_when_they_are_back() {
    let test = "xids_of_cards_that_were_lost_at_the_start_are_heard_when_they_are_back";
    let Some((node, runtime)) = node(test, "h100x4") else { return };
    runtime.block_on(async {
        let cards: Vec<String> = node.state().cards.iter().map(|c| c.uuid.clone()).collect();
        node.fake("remove 0");
        node.fake("remove 1");
        let (_thread, mut xids) = listen(Some(node.library.clone()), Arc::default()).unwrap();
        assert_eq!(xid(&node, &mut xids, "xid 2 79").await.card, cards[2]);
        node.fake("restore 0");
        node.fake("restore 1");
        while xid(&node, &mut xids, "xid 1 79").await.card != cards[1] {}
    });
}
