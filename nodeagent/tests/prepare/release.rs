//! When a card is free: the pod's cgroup is gone, and the driver, asked, lists nothing of it.
//!
//! The simulated driver takes its state file from the environment, one per process: so its test runs itself again in a
//! process with that variable set.

use std::collections::BTreeMap;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use fake_state::{Error, STATE_ENV, Store, profile, verb};
use mullion_audit::{AuditReader, Filter};
use mullion_crds::vgpuallocation::Kind;
use mullion_nodeagent::events::Announcer;
use mullion_nodeagent::metrics::Metrics;
use mullion_nodeagent::monitor::{Latest, Monitor};
use mullion_nodeagent::nvml::DriverHandle;
use mullion_nodeagent::prepare::library::Library;
use mullion_nodeagent::release::Releaser;
use mullion_nodeagent::world::{ContainerSeen, Driver, PodSeen};
use tokio::sync::mpsc;

use crate::Node;
use crate::withdrawn::api;

/// Long enough for many looks of a release that waits.
const WHILE: Duration = Duration::from_secs(2);
/// A release that can come has come by then, however slow the machine.
const PATIENCE: Duration = Duration::from_secs(20);

impl Node {
    fn releaser(&self, driver: DriverHandle) -> Releaser {
        Releaser {
            client: api(&[]),
            shared: Arc::clone(&self.shared),
            state: self.state.clone(),
            audit: self.audit.clone(),
            driver,
            library: Library::new(&self.settings),
            settings: self.settings.clone(),
            metrics: Arc::default(),
        }
    }

    /// The pod is deleted, and its allocation with it.
    fn delete(&self, pod: &str) {
        self.shared.change(|w| {
            w.pods = Some(BTreeMap::new());
            w.deleted_pods.insert(pod.into());
            w.orphans.insert(format!("uid-of-{pod}").as_str().into());
        });
    }

    async fn is_released(&self) -> bool {
        let mut reader = AuditReader::open(self.settings.state_dir.join("audit.db")).await.unwrap();
        let filter = Filter { kind: Some("Released".to_owned()), ..Filter::default() };
        !reader.list(&filter).await.unwrap().is_empty()
    }

    async fn released(&self) {
        while !self.is_released().await {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

/// What hangs or fails has not said that the card is free; where there is no driver, nothing can be on it.
#[tokio::test]
async fn a_driver_that_does_not_answer_proves_nothing() {
    for (code, free) in [
        ("NVML_NO_ANSWER", false),
        ("NVML_ERROR_TIMEOUT", false),
        ("NVML_ERROR_UNKNOWN", false),
        ("NVML_ERROR_DRIVER_NOT_LOADED", true),
        ("NVML_ERROR_LIBRARY_NOT_FOUND", true),
    ] {
        let node = Node::new(true).await;
        node.checkpoint(&node.pod("bare-pod", &[("main", Kind::App, &["slot-0000"])], true));
        node.prepare(&["slot-0000"]).await.unwrap();
        node.shared.change(|w| w.driver = Driver::Down { code, reason: String::new() });
        node.delete("bare-pod");
        let driver = DriverHandle::start(Some("/nonexistent".into()), Arc::default()).unwrap();
        let released = async {
            tokio::select! {
                () = node.releaser(driver).run() => unreachable!("it goes on"),
                () = node.released() => {}
            }
        };
        let limit = if free { PATIENCE } else { WHILE };
        assert_eq!(tokio::time::timeout(limit, released).await.is_ok(), free, "{code}");
    }
}

/// From the driver's list of a living process to the card that its death leaves taken.
#[test]
fn a_dead_process_that_the_driver_lists_holds_its_card() {
    let exe = std::env::current_exe().unwrap();
    let Some(path) = std::env::var_os(STATE_ENV) else {
        let folder = tempfile::tempdir().unwrap();
        let mut command = Command::new(exe);
        let test = "release::a_dead_process_that_the_driver_lists_holds_its_card";
        command.args(["--exact", test, "--nocapture"]).env(STATE_ENV, folder.path().join("node-a.json"));
        assert!(command.status().unwrap().success(), "see above");
        return;
    };
    let store = Store::create(path, &profile::node("h100x2", "node-a").unwrap()).unwrap();
    store
        .update(|state| {
            "GPU-0".clone_into(&mut state.cards[0].uuid);
            Ok::<_, Error>(())
        })
        .unwrap();
    let fake = |line: &str| {
        verb::apply(&store, &line.split_whitespace().map(str::to_owned).collect::<Vec<_>>()).unwrap();
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let node = Node::new(true).await;
        let driver =
            DriverHandle::start(Some(exe.with_file_name("libnvidia_ml.so")), Arc::default()).unwrap();
        node.checkpoint(&node.pod("bare-pod", &[("main", Kind::App, &["slot-0000"])], true));
        node.prepare(&["slot-0000"]).await.unwrap();
        let mut process = Command::new("sleep").arg("1000").spawn().unwrap();
        let cgroup = node.settings.cgroup_mount.join("kubepods/podbare-pod");
        std::fs::create_dir_all(cgroup.join("id-main")).unwrap();
        std::fs::write(cgroup.join("cgroup.procs"), "").unwrap();
        std::fs::write(cgroup.join("id-main/cgroup.procs"), process.id().to_string()).unwrap();
        let running =
            ContainerSeen { running: Some("containerd://id-main".to_owned()), ..Default::default() };
        let seen = PodSeen { containers: [("main".to_owned(), running)].into(), ..PodSeen::default() };
        node.shared.change(|w| w.pods = Some([("bare-pod".into(), seen)].into()));
        fake(&format!("process 0 {} 3000", process.id()));

        let (facts, _received) = mpsc::unbounded_channel();
        let metrics = Arc::new(Metrics::default());
        let monitor = Monitor {
            shared: Arc::clone(&node.shared),
            driver: driver.clone(),
            settings: node.settings.clone(),
            facts,
            announcer: Announcer::new(api(&[]), Arc::clone(&node.shared), metrics, "node-a".into()),
            latest: Latest::default(),
        };
        let monitor = tokio::spawn(monitor.run());
        let mut bell = node.shared.bell();
        let knows =
            || node.shared.read(|w| w.card_pids.get(&"bare-pod".into()).is_some_and(|p| !p.is_empty()));
        let seen = async {
            while !knows() {
                bell.changed().await.unwrap();
            }
        };
        tokio::time::timeout(Duration::from_secs(20), seen).await.unwrap();

        process.kill().unwrap();
        process.wait().unwrap();
        std::fs::remove_dir_all(&cgroup).unwrap();
        node.delete("bare-pod");
        let releaser = tokio::spawn(node.releaser(driver).run());
        tokio::time::sleep(WHILE).await;
        assert!(!node.is_released().await, "the driver still lists it");
        fake(&format!("process 0 {} 0", process.id()));
        tokio::time::timeout(PATIENCE, node.released()).await.unwrap();
        releaser.abort();
        monitor.abort();
    });
}
