//! `PreStartContainer` with a hand-made checkpoint and real files.

#![expect(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

mod cards;
mod release;
mod restart;
mod withdrawn;

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use mullion_audit::{AuditReader, Filter};
use mullion_crds::gpunode::Card;
use mullion_crds::vgpuallocation::{
    ContainerAllocation, Device, Kind, PodReference, VGPUAllocation, VGPUAllocationSpec,
};
use mullion_nodeagent::audit::Audit;
use mullion_nodeagent::checkpoint::{self, Owner};
use mullion_nodeagent::config::{Args, Enforcement, Settings};
use mullion_nodeagent::health::{CardHealth, Known};
use mullion_nodeagent::prepare::Preparer;
use mullion_nodeagent::prepare::driver_files::Finder;
use mullion_nodeagent::prepare::library::Library;
use mullion_nodeagent::state::State;
use mullion_nodeagent::world::{Driver, Shared, World};
use serde_json::Value;

const RESOURCE: &str = "nvidia.com/gpu";

struct Node {
    root: tempfile::TempDir,
    settings: Settings,
    shared: Arc<Shared>,
    state: State,
    audit: Audit,
    preparer: Arc<Preparer>,
}

fn known(index: u32) -> (String, Known) {
    let uuid = format!("GPU-{index}");
    let card = Card { uuid: uuid.clone(), index, minor: index, memory_mib: 81_920, ..Card::default() };
    (uuid, Known { card, present: true, health: CardHealth::default(), ..Known::default() })
}

fn world() -> World {
    let mut world = World {
        node: "node-a".into(),
        cards: Some(BTreeMap::from([known(0), known(1)])),
        driver: Driver::Ready { version: "570".to_owned() },
        grants_known: true,
        ..World::default()
    };
    world.refold_node();
    world
}

impl Node {
    async fn new(driver_spec: bool) -> Self {
        let root = tempfile::tempdir().unwrap();
        let at = |name: &str| root.path().join(name);
        let settings = Settings::load(Args {
            node_name: Some("node-a".to_owned()),
            device_plugin_dir: Some(at("plugins")),
            cdi_dir: Some(at("cdi")),
            driver_cdi_dirs: Some(vec![at("etc-cdi")]),
            state_dir: Some(at("state")),
            hook_dir: Some(at("vgpu")),
            cgroup_mount: Some(at("cgroup")),
            enforcement: Some(Enforcement::Report),
            ..Args::default()
        })
        .unwrap();
        for folder in ["plugins", "cdi", "etc-cdi", "state", "vgpu", "cgroup", "cgroup/kubepods"] {
            std::fs::create_dir(at(folder)).unwrap();
        }
        std::fs::write(at("cgroup/cgroup.controllers"), "").unwrap();
        if driver_spec {
            let device = |i: u32| serde_json::json!({"name": i.to_string(), "containerEdits": {"deviceNodes": [{"path": format!("/dev/nvidia{i}")}]}});
            let spec = serde_json::json!({
                "cdiVersion": "0.6.0", "kind": "nvidia.com/gpu", "devices": [device(0), device(1)],
                "containerEdits": {
                    "env": ["NVIDIA_VISIBLE_DEVICES=all"],
                    "deviceNodes": [{"path": "/dev/nvidiactl"}],
                    "hooks": [{"hookName": "createContainer", "path": "/usr/bin/nvidia-cdi-hook"}],
                },
            });
            std::fs::write(at("etc-cdi/nvidia.yaml"), spec.to_string()).unwrap();
        }
        let shared = Shared::new(world());
        Self::start(root, settings, shared).await
    }

    async fn start(root: tempfile::TempDir, settings: Settings, shared: Arc<Shared>) -> Self {
        let state = State::open(&settings.state_dir.join("state.db")).await.unwrap();
        let audit = Audit::new(settings.state_dir.join("audit.db"));
        audit.open(&settings.node).await;
        let finder =
            Arc::new(Finder::new(settings.driver_cdi_dirs.clone(), settings.state_dir.join("none.yaml")));
        let preparer = Arc::new(Preparer::new(
            settings.clone(),
            Arc::clone(&shared),
            state.clone(),
            audit.clone(),
            finder,
            Library::new(&settings),
        ));
        Self { root, settings, shared, state, audit, preparer }
    }

    /// A pod of these containers (kind, slots of one card each), known to the kubelet and allocated.
    fn pod(&self, pod: &str, containers: &[(&str, Kind, &[&str])], allocated: bool) -> Vec<Owner> {
        let owners: Vec<Owner> = containers
            .iter()
            .map(|(name, _, ids)| Owner {
                pod: pod.into(),
                container: (*name).to_owned(),
                ids: ids.iter().map(|&i| i.to_owned()).collect(),
                grant: Some(grant_name(pod, name)),
            })
            .collect();
        if allocated {
            self.allocate(pod, containers);
        }
        owners
    }

    fn allocate(&self, pod: &str, containers: &[(&str, Kind, &[&str])]) {
        let devices = |ids: &[&str]| {
            let device =
                |i| Device { uuid: format!("GPU-{i}"), memory_mib: 3000, core_percent: 30, mig: None };
            (0..ids.len()).map(device).collect()
        };
        let spec = VGPUAllocationSpec {
            pod: PodReference { name: pod.to_owned(), uid: pod.to_owned() },
            node_name: "node-a".to_owned(),
            sequence: 1,
            containers: containers
                .iter()
                .map(|(name, kind, ids)| ContainerAllocation {
                    name: (*name).to_owned(),
                    kind: *kind,
                    devices: devices(ids),
                    ..ContainerAllocation::default()
                })
                .collect(),
            ..VGPUAllocationSpec::default()
        };
        let mut object = VGPUAllocation::new(&format!("{pod}-a"), spec);
        object.metadata.uid = Some(format!("uid-of-{pod}"));
        object.metadata.namespace = Some("team".to_owned());
        self.shared.change(|w| w.see_allocation(object));
    }

    fn checkpoint(&self, owners: &[Owner]) {
        std::fs::write(self.settings.checkpoint(), checkpoint::write(RESOURCE, owners)).unwrap();
    }

    async fn prepare(&self, ids: &[&str]) -> Result<(), &'static str> {
        self.preparer.prepare(ids.iter().map(|&i| i.to_owned()).collect()).await.map_err(|r| r.code())
    }

    fn spec_path(&self, grant: &str) -> PathBuf {
        self.settings.cdi_dir.join(format!("mullion.io-grant-{grant}.json"))
    }

    fn spec(&self, grant: &str) -> Value {
        serde_json::from_slice(&std::fs::read(self.spec_path(grant)).unwrap()).unwrap()
    }

    async fn audited(&self, kind: &str) -> Vec<String> {
        let mut reader = AuditReader::open(self.settings.state_dir.join("audit.db")).await.unwrap();
        let filter = Filter { kind: Some(kind.to_owned()), ..Filter::default() };
        reader.list(&filter).await.unwrap().into_iter().map(|r| r.container.unwrap_or_default()).collect()
    }
}

fn grant_name(pod: &str, container: &str) -> String {
    let sum = pod
        .bytes()
        .chain(container.bytes())
        .fold(7_u64, |s, b| s.wrapping_mul(1_099_511_628_211) ^ u64::from(b));
    format!("{sum:016x}")
}

#[tokio::test]
async fn a_container_gets_its_nodes_limits_page_and_a_fresh_usage_file() {
    let node = Node::new(true).await;
    let owners = node.pod("pod-1", &[("main", Kind::App, &["slot-0003"])], true);
    node.checkpoint(&owners);
    node.prepare(&["slot-0003"]).await.unwrap();
    let grant = grant_name("pod-1", "main");
    let root = node.root.path().display().to_string();
    let want: Value = serde_json::from_str(
        &include_str!("../golden/grant.json").replace("@ROOT@", &root).replace("@GRANT@", &grant),
    )
    .unwrap();
    assert_eq!(node.spec(&grant), want);
    let page = std::fs::read(node.settings.pages_dir().join(&grant)).unwrap();
    let page = mullion_region::page::decode(&page).unwrap();
    let devices: Vec<_> =
        page.devices.iter().map(|d| (d.uuid.as_str(), d.memory_limit.get() >> 20, d.core.get())).collect();
    assert_eq!((devices, format!("{:016x}", page.grant)), (vec![("GPU-0", 3000, 30)], grant.clone()));

    // A restart: the same grant, the same spec (not even rewritten), another usage file.
    let usage = node.settings.containers_dir().join("pod-1_main/usage.cache");
    let before =
        (std::fs::metadata(node.spec_path(&grant)).unwrap().ino(), std::fs::metadata(&usage).unwrap());
    let held = std::fs::File::open(&usage).unwrap();
    node.prepare(&["slot-0003"]).await.unwrap();
    assert_eq!(std::fs::metadata(node.spec_path(&grant)).unwrap().ino(), before.0);
    assert_ne!(std::fs::metadata(&usage).unwrap().ino(), before.1.ino());
    drop(held);
    assert_eq!(node.state.grants().await.unwrap().len(), 1);
    assert_eq!(node.audited("Prepared").await, ["main", "main"]);
    assert_eq!(node.audited("AllocationReserved").await.len(), 1);
}

// The pod of "Late binding, proved": i1 and s1 share a slot, i2 and a another one.
#[tokio::test]
async fn equal_sets_are_told_apart_by_their_grants() {
    let node = Node::new(true).await;
    let containers: &[(&str, Kind, &[&str])] = &[
        ("i1", Kind::Init, &["slot-0000"]),
        ("s1", Kind::Sidecar, &["slot-0000"]),
        ("i2", Kind::Init, &["slot-0001"]),
        ("a", Kind::App, &["slot-0001"]),
    ];
    let mut owners = node.pod("pod-1", containers, true);
    owners.extend(node.pod("pod-2", &[("main", Kind::App, &["slot-0002"])], true));
    node.checkpoint(&owners);
    node.prepare(&["slot-0000"]).await.unwrap();
    for (container, there) in [("i1", true), ("s1", true), ("i2", false), ("a", false)] {
        assert_eq!(node.spec_path(&grant_name("pod-1", container)).exists(), there, "{container}");
    }
    node.prepare(&["slot-0001"]).await.unwrap();
    assert!(!node.spec_path(&grant_name("pod-2", "main")).exists());
    // After init, an init container that would take more again is refused beside the app that may start.
    node.shared.change(|w| w.mark(&"uid-of-pod-1".into(), |f| f.init_done = true));
    node.prepare(&["slot-0001"]).await.unwrap();
    assert!(node.shared.read(|w| w.refused.is_empty()));
}

#[tokio::test]
async fn twenty_pods_at_once_each_get_their_own() {
    let node = Arc::new(Node::new(true).await);
    let mut owners = Vec::new();
    for n in 0..20 {
        let slot = format!("slot-{n:04}");
        owners.extend(node.pod(&format!("pod-{n}"), &[("main", Kind::App, &[slot.as_str()])], false));
    }
    node.checkpoint(&owners);
    let mut calls = tokio::task::JoinSet::new();
    for n in 0..20 {
        let node = Arc::clone(&node);
        calls.spawn(async move { node.prepare(&[format!("slot-{n:04}").as_str()]).await });
    }
    tokio::time::sleep(Duration::from_millis(50)).await;
    // The watch brings them late and in another order; three fit by cores (30 each), the card takes no fourth.
    for n in (0..20).rev() {
        node.allocate(&format!("pod-{n}"), &[("main", Kind::App, &["x"])]);
    }
    let results = calls.join_all().await;
    let prepared = results.iter().filter(|r| r.is_ok()).count();
    assert_eq!(prepared, 3, "{results:?}");
    assert!(results.iter().all(|r| r.is_ok() || *r == Err("Void")), "{results:?}");
    assert!(node.shared.read(|w| w.ledger.overcommitted().is_empty()));
    assert_eq!(node.audited("Prepared").await.len(), 3);
}

#[tokio::test]
async fn refusals_name_their_reason_and_leave_nothing() {
    // DP-06: both numbers are in the text; the allocation is marked.
    let node = Node::new(true).await;
    let mut owners = node.pod("pod-1", &[("main", Kind::App, &["slot-0000"])], true);
    owners[0].ids = BTreeSet::from(["slot-0000".to_owned(), "slot-0001".to_owned()]);
    node.checkpoint(&owners);
    assert_eq!(node.prepare(&["slot-0000", "slot-0001"]).await, Err("DeviceCountMismatch"));
    let message = node.shared.read(|w| w.refused.values().next().unwrap().message.clone());
    assert!(message.contains("1 cards, the kubelet 2"), "{message}");
    assert!(std::fs::read_dir(&node.settings.cdi_dir).unwrap().next().is_none());
    assert_eq!(node.audited("PrepareRefused").await, ["main"]);

    // No spec of NVIDIA's, and no nvidia-ctk here.
    let node = Node::new(false).await;
    node.checkpoint(&node.pod("pod-1", &[("main", Kind::App, &["slot-0000"])], true));
    assert_eq!(node.prepare(&["slot-0000"]).await, Err("CdiSpecMissing"));

    // A pod of another plugin has no grant of ours.
    let node = Node::new(true).await;
    let mut owners = node.pod("pod-1", &[("main", Kind::App, &["slot-0000"])], true);
    owners[0].grant = None;
    node.checkpoint(&owners);
    assert_eq!(node.prepare(&["slot-0000"]).await, Err("GrantMissing"));

    // The state cannot keep it: nothing starts, and however often it is tried, the log does not say that it might.
    let node = Node::new(true).await;
    node.checkpoint(&node.pod("pod-1", &[("main", Kind::App, &["slot-0000"])], true));
    node.state.close().await;
    for _ in 0..2 {
        assert_eq!(node.prepare(&["slot-0000"]).await, Err("StateFailed"));
    }
    assert_eq!(node.audited("Prepared").await, Vec::<String>::new());
    assert!(std::fs::read_dir(&node.settings.cdi_dir).unwrap().next().is_none());

    // The log cannot take the row: nothing starts.
    let node = Node::new(true).await;
    node.checkpoint(&node.pod("pod-1", &[("main", Kind::App, &["slot-0000"])], true));
    node.audit.close().await;
    let code = node.prepare(&["slot-0000"]).await.unwrap_err();
    assert!(code.starts_with("Audit"), "{code}");
    assert!(std::fs::read_dir(&node.settings.cdi_dir).unwrap().next().is_none());
}

#[tokio::test]
async fn a_checkpoint_that_says_nothing_is_refused_and_one_that_comes_late_is_waited_for() {
    let node = Node::new(true).await;
    assert_eq!(node.prepare(&["slot-0000"]).await, Err("CheckpointUnreadable"), "missing");
    let owners = node.pod("pod-1", &[("main", Kind::App, &["slot-0000"])], true);
    let whole = checkpoint::write(RESOURCE, &owners);
    std::fs::write(node.settings.checkpoint(), &whole[..whole.len() / 2]).unwrap();
    assert_eq!(node.prepare(&["slot-0000"]).await, Err("CheckpointUnreadable"), "truncated");
    let newer = String::from_utf8(whole.clone()).unwrap().replace("PodDeviceEntries", "Entries");
    std::fs::write(node.settings.checkpoint(), newer).unwrap();
    assert_eq!(node.prepare(&["slot-0000"]).await, Err("CheckpointUnreadable"), "of a newer shape");
    node.checkpoint(&[]);
    assert_eq!(node.prepare(&["slot-0000"]).await, Err("OwnerUnknown"));
    let (late, ()) = tokio::join!(node.prepare(&["slot-0000"]), async {
        tokio::time::sleep(Duration::from_millis(100)).await;
        node.checkpoint(&owners);
    });
    late.unwrap();
}

// DP-11: after a restart the same answer comes from the files alone.
#[tokio::test]
async fn after_a_restart_the_same_answer_comes_without_api_server_and_driver() {
    let node = Node::new(true).await;
    let owners = node.pod("pod-1", &[("main", Kind::App, &["slot-0000"])], true);
    node.checkpoint(&owners);
    node.prepare(&["slot-0000"]).await.unwrap();
    let object = node.shared.read(|w| w.allocations.values().next().unwrap().as_ref().clone());
    node.state.put_allocation("uid-of-pod-1", &object).await.unwrap();
    let spec = node.spec(&grant_name("pod-1", "main"));
    node.state.close().await;
    node.audit.close().await;

    let mut world = World { driver: Driver::Unknown, ..world() };
    let state = State::open(&node.settings.state_dir.join("state.db")).await.unwrap();
    for object in state.allocations::<VGPUAllocation>().await.unwrap() {
        world.see_allocation(object);
    }
    for grant in state.grants().await.unwrap() {
        world.mark(&grant.allocation.as_str().into(), |fact| fact.prepared = true);
        world.grants.insert(grant.grant.clone(), grant);
    }
    state.close().await;
    let node = Node::start(node.root, node.settings, Shared::new(world)).await;
    node.prepare(&["slot-0000"]).await.unwrap();
    assert_eq!(node.spec(&grant_name("pod-1", "main")), spec);
}

/// What was issued is known to somebody at any time, also where the kubelet gives a call up that waits for the log.
#[tokio::test]
async fn a_call_that_is_given_up_before_its_row_is_written_loses_no_grant() {
    let node = Node::new(true).await;
    node.checkpoint(&node.pod("pod-1", &[("main", Kind::App, &["slot-0000"])], true));
    let grant = grant_name("pod-1", "main");
    node.shared.change(|w| w.issued.insert(grant.clone(), 0));
    // As it is while another agent still holds the log.
    node.audit.close().await;
    let call = node.prepare(&["slot-0000"]);
    assert!(tokio::time::timeout(Duration::from_secs(1), call).await.is_err(), "it waits");
    assert!(node.shared.read(|w| !w.issued.contains_key(&grant)), "its row is about to be written");
    node.audit.open(&node.settings.node).await;
    let is_filled = || node.shared.read(|w| w.grants.contains_key(&grant));
    for _ in 0..100 {
        if is_filled() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(is_filled());
    assert_eq!(node.audited("Prepared").await, ["main"]);
}

/// The kubelet may give a call up at any moment. What is on disk then has an owner, whose end removes it.
#[tokio::test]
async fn a_call_that_is_given_up_leaves_no_spec_without_an_owner() {
    let node = Node::new(true).await;
    let mut owners = Vec::new();
    let (mut given_up, mut done) = (0, 0);
    let few = 1..=20_u32;
    let many = (5..40).map(|step| step * step * 3);
    for polls in few.chain(many).chain([u32::MAX]) {
        let (pod, slot) = (format!("pod-{polls}"), format!("slot-{:04}", polls % 10_000));
        owners.extend(node.pod(&pod, &[("main", Kind::App, &[slot.as_str()])], true));
        node.checkpoint(&owners);
        let name = grant_name(&pod, "main");
        node.shared.change(|w| w.issued.insert(name.clone(), 0));
        {
            let call = node.preparer.prepare([slot].into());
            tokio::pin!(call);
            let mut over = false;
            for _ in 0..polls {
                if futures::poll!(&mut call).is_ready() {
                    over = true;
                    break;
                }
                tokio::task::yield_now().await;
                std::thread::sleep(Duration::from_micros(5));
            }
            if over { done += 1 } else { given_up += 1 }
        }
        for entry in std::fs::read_dir(&node.settings.cdi_dir).unwrap() {
            let name = entry.unwrap().file_name().into_string().unwrap();
            let grant = name.trim_start_matches("mullion.io-grant-").trim_end_matches(".json").to_owned();
            assert!(node.shared.read(|w| w.grants.contains_key(&grant)), "{name} after {polls} polls");
            let kept = node.state.grants().await.unwrap();
            assert!(kept.iter().any(|g| g.grant == grant), "{name} after {polls} polls");
        }
        // What the log calls filled is not withdrawn later. A row is written even where its call was given up.
        node.audit.append_many(Vec::new()).await.unwrap();
        let mut log = AuditReader::open(node.settings.state_dir.join("audit.db")).await.unwrap();
        let filled =
            log.list(&Filter { kind: Some("Prepared".to_owned()), ..Filter::default() }).await.unwrap();
        let is_filled = filled.iter().any(|row| row.grant.as_ref() == Some(&name));
        assert!(!is_filled || node.shared.read(|w| !w.issued.contains_key(&name)), "after {polls} polls");
        // The next one finds an empty card.
        let uid = format!("uid-of-{pod}");
        node.shared.change(|w| w.mark(&uid.as_str().into(), |f| f.released = true));
    }
    assert!(given_up > 0 && done > 0, "{given_up} given up, {done} done");
}

/// A pod may end while its container is prepared. `Released` in the log is then the last word about it.
#[tokio::test]
async fn what_is_released_meanwhile_is_not_prepared() {
    use sqlx::Connection as _;
    let node = Node::new(true).await;
    node.checkpoint(&node.pod("pod-1", &[("main", Kind::App, &["slot-0000"])], true));
    let options =
        sqlx::sqlite::SqliteConnectOptions::new().filename(node.settings.state_dir.join("state.db"));
    let mut other = sqlx::SqliteConnection::connect_with(&options).await.unwrap();
    sqlx::query("BEGIN IMMEDIATE").execute(&mut other).await.unwrap();
    let uid = "uid-of-pod-1".into();
    let (answer, ()) = tokio::join!(node.prepare(&["slot-0000"]), async {
        // It is decided, and waits for the state file.
        while !node.shared.read(|w| w.ledger.allocation(&uid).is_some_and(|fact| fact.prepared)) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        node.shared.change(|w| w.releasing.insert(uid.clone()));
        sqlx::query("ROLLBACK").execute(&mut other).await.unwrap();
    });
    assert_eq!(answer, Err("Released"));
    assert!(node.audited("Prepared").await.is_empty());
    assert!(std::fs::read_dir(&node.settings.cdi_dir).unwrap().next().is_none());
}
