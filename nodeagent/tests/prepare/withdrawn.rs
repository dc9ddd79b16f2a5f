//! Grants that no container will use, from the kubelet's `Allocate` to the row that says so.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::sync::Arc;

use axum::http::{Request, Response};
use futures::FutureExt;
use kube::Client;
use kube::client::Body;
use mullion_audit::{AuditReader, Entry, Event, Filter};
use mullion_crds::vgpuallocation::Kind;
use mullion_nodeagent::api::traced;
use mullion_nodeagent::cgroup::Cgroups;
use mullion_nodeagent::device_plugin::server::{Prepare, Service};
use mullion_nodeagent::kubelet::deviceplugin::device_plugin_server::DevicePlugin;
use mullion_nodeagent::kubelet::deviceplugin::{AllocateRequest, ContainerAllocateRequest};
use mullion_nodeagent::metrics::Metrics;
use mullion_nodeagent::nvml::DriverHandle;
use mullion_nodeagent::prepare::library::Library;
use mullion_nodeagent::prepare::{allocation_ref, pod_ref, reserved};
use mullion_nodeagent::release::Releaser;
use mullion_nodeagent::state::Grant;
use mullion_nodeagent::world::{Driver, PodSeen, Shared};
use serde_json::json;
use tokio::sync::{mpsc, watch};
use tower::service_fn;

use crate::{Node, world};

/// An API server that lists pods of these uids, and does nothing else.
pub fn api(pods: &[&str]) -> Client {
    let items: Vec<_> = pods.iter().map(|uid| json!({"metadata": {"name": uid, "uid": uid}})).collect();
    let list = json!({
        "apiVersion": "meta.k8s.io/v1", "kind": "PartialObjectMetadataList", "metadata": {}, "items": items,
    });
    let service = service_fn(move |request: Request<Body>| {
        let is_list =
            request.uri().to_string().starts_with("/api/v1/pods?&fieldSelector=spec.nodeName%3Dnode-a");
        let (status, body) = if is_list { (200, list.to_string()) } else { (500, request.uri().to_string()) };
        let answer = Response::builder().status(status).body(Body::from(body.into_bytes())).unwrap();
        async move { Ok::<_, Infallible>(answer) }
    });
    Client::new(service, "default")
}

impl Node {
    /// What the agent does from time to time, while the API server has these pods.
    async fn tidy(&self, pods: &[&str]) {
        let metrics = Arc::new(Metrics::default());
        let releaser = Releaser {
            client: api(pods),
            shared: Arc::clone(&self.shared),
            state: self.state.clone(),
            audit: self.audit.clone(),
            driver: DriverHandle::start(Some("/nonexistent".into()), Arc::clone(&metrics)).unwrap(),
            library: Library::new(&self.settings),
            settings: self.settings.clone(),
            metrics,
        };
        let settings = &self.settings;
        releaser.tidy(&Cgroups::new(settings.cgroup_mount.clone(), &settings.cgroup_root)).await;
    }

    /// `Allocate` for one container, as the kubelet calls it: the grant's name.
    async fn issue(&self, slot: &str) -> String {
        let prepare: Prepare = Arc::new(|_| async { Ok(()) }.boxed());
        let (facts, received) = mpsc::unbounded_channel();
        let (_, slots) = watch::channel(Arc::new(Vec::new()));
        let service = Service::new(slots, prepare, Arc::clone(&self.shared), Arc::default(), facts);
        let devices_ids = vec![slot.to_owned()];
        let container_requests = vec![ContainerAllocateRequest { devices_ids }];
        let request = tonic::Request::new(AllocateRequest { container_requests });
        let answer = service.allocate(request).await.unwrap().into_inner();
        drop(service);
        self.audit.append_facts(received).await;
        let name = &answer.container_responses[0].cdi_devices[0].name;
        name.split_once('=').unwrap().1.to_owned()
    }

    /// Another run of the agent, with these pods in its watch.
    async fn restart(self, pods: &[&str]) -> Self {
        self.state.close().await;
        self.audit.close().await;
        let seen = |uid: &&str| ((*uid).into(), PodSeen::default());
        let mut world = world();
        world.pods = Some(pods.iter().map(seen).collect());
        world.allocations_listed = true;
        let node = Self::start(self.root, self.settings, Shared::new(world)).await;
        let open = node.audit.open_grants().await.unwrap();
        let grants = node.state.grants().await.unwrap();
        node.shared.change(|w| {
            w.issued = open;
            w.grants = grants.into_iter().map(|g| (g.grant.clone(), g)).collect();
        });
        node
    }

    /// Time passes for the grants that are open.
    fn pass(&self) {
        self.shared.change(|w| w.issued.values_mut().for_each(|at| *at -= 1000));
    }

    fn open(&self) -> BTreeSet<String> {
        self.shared.read(|w| w.issued.keys().cloned().collect())
    }

    /// Rows `GrantWithdrawn` of the log: grant and code.
    async fn withdrawn(&self) -> Vec<(String, String)> {
        let mut reader = AuditReader::open(self.settings.state_dir.join("audit.db")).await.unwrap();
        let filter = Filter { kind: Some("GrantWithdrawn".to_owned()), ..Filter::default() };
        let rows = reader.list(&filter).await.unwrap();
        rows.into_iter().map(|row| (row.grant.unwrap(), row.code.unwrap())).collect()
    }

    /// The log takes no rows from now on, or again.
    pub fn block_log(&self, block: bool) {
        let log = self.settings.state_dir.join("audit.db");
        let aside = log.with_extension("aside");
        if block { std::fs::rename(log, aside) } else { std::fs::rename(aside, log) }.unwrap();
    }
}

#[tokio::test]
async fn a_grant_that_nobody_will_use_is_withdrawn_once_over_restarts_and_a_full_disk() {
    let node = Node::new(true).await;
    let mut owners = Vec::new();
    let mut grants = BTreeMap::new();
    for (pod, slot) in [("runs", "slot-0000"), ("waits", "slot-0001"), ("goes", "slot-0002")] {
        let mut owner = node.pod(pod, &[("main", Kind::App, &[slot])], pod == "runs");
        let grant = node.issue(slot).await;
        owner[0].grant = Some(grant.clone());
        grants.insert(pod, grant);
        owners.extend(owner);
    }
    node.checkpoint(&owners);
    node.prepare(&["slot-0000"]).await.unwrap();
    let lonely = node.issue("slot-0003").await;

    // Killed right after: nothing but the log knows of what was issued. The state file has not even what was filled.
    node.state.forget("uid-of-runs").await.unwrap();
    let node = node.restart(&["runs", "waits"]).await;
    let open: BTreeSet<String> = [&grants["waits"], &grants["goes"], &lonely].map(Clone::clone).into();
    assert_eq!(node.open(), open);
    node.tidy(&["runs", "waits"]).await;
    assert_eq!(node.withdrawn().await, [], "too young");

    // The watch may be behind: what it has not is asked for.
    node.pass();
    let unused = |grant: &String| (grant.clone(), "Unused".to_owned());
    node.tidy(&["runs", "waits", "goes"]).await;
    assert_eq!(node.withdrawn().await, [unused(&lonely)]);

    // A log that takes no row loses none.
    node.block_log(true);
    node.tidy(&["runs", "waits"]).await;
    assert!(node.open().contains(&grants["goes"]));
    node.block_log(false);
    node.tidy(&["runs", "waits"]).await;
    let want = [unused(&lonely), unused(&grants["goes"])];
    assert_eq!(node.withdrawn().await, want);
    assert_eq!(node.open(), [grants["waits"].clone()].into());

    let node = node.restart(&["runs", "waits"]).await;
    node.pass();
    node.tidy(&["runs", "waits"]).await;
    assert_eq!(node.withdrawn().await, want);
    assert_eq!(node.open(), [grants["waits"].clone()].into());
}

/// A state file that cannot be written for a while is tried again, and costs the log one row.
#[tokio::test]
async fn a_grant_that_cannot_be_forgotten_is_withdrawn_once() {
    let node = Node::new(true).await;
    let grant = bare_grant();
    node.state.put_grant(&grant).await.unwrap();
    let node = node.restart(&[]).await;
    node.state.close().await;
    for _ in 0..3 {
        node.tidy(&[]).await;
        assert!(node.shared.read(|w| w.grants.contains_key(&grant.grant)));
    }
    let want = [(grant.grant.clone(), "NoAllocation".to_owned())];
    assert_eq!(node.withdrawn().await, want);
    let node = node.restart(&[]).await;
    node.tidy(&[]).await;
    assert_eq!(node.withdrawn().await, want);
    assert_eq!(node.state.grants().await.unwrap(), []);
}

/// With the state lost, nobody knows whose a file is until the audit log was asked.
#[tokio::test]
async fn what_has_no_owner_stays_until_grants_are_known() {
    let node = Node::new(true).await;
    let node = node.restart(&[]).await;
    let files = [
        node.spec_path("0123456789abcdef"),
        node.settings.pages_dir().join("0123456789abcdef"),
        node.settings.containers_dir().join("pod_main/usage.cache"),
        // An agent that was killed while it wrote them left them so.
        node.settings.cdi_dir.join(".mullion.io-grant-0123456789abcdef.json.tmp"),
        node.settings.pages_dir().join(".0123456789abcdef.tmp"),
    ];
    for file in &files {
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        std::fs::write(file, "").unwrap();
        for path in [file, file.parent().unwrap()] {
            std::fs::File::open(path).unwrap().set_modified(std::time::SystemTime::UNIX_EPOCH).unwrap();
        }
    }
    let left = || files.iter().filter(|file| file.exists()).count();
    node.shared.change(|w| w.grants_known = false);
    node.tidy(&[]).await;
    assert_eq!(left(), files.len());
    node.shared.change(|w| w.grants_known = true);
    node.tidy(&[]).await;
    assert_eq!(left(), 0);
}

/// A grant of an allocation that is not there.
fn bare_grant() -> Grant {
    Grant {
        grant: "0123456789abcdef".to_owned(),
        allocation: "gone".to_owned(),
        pod: "pod".to_owned(),
        container: "main".to_owned(),
        device_ids: Vec::new(),
        enforced: true,
        unenforced: None,
    }
}

/// One whose allocation was taken away by hand, likewise.
#[tokio::test]
async fn a_grant_without_an_allocation_is_forgotten_only_once_that_is_written_down() {
    let node = Node::new(true).await;
    let grant = bare_grant();
    node.state.put_grant(&grant).await.unwrap();
    let node = node.restart(&[]).await;
    node.block_log(true);
    node.tidy(&[]).await;
    assert_eq!(node.state.grants().await.unwrap(), std::slice::from_ref(&grant));
    assert!(node.shared.read(|w| w.grants.contains_key(&grant.grant)));
    node.block_log(false);
    node.tidy(&[]).await;
    assert_eq!(node.withdrawn().await, [(grant.grant.clone(), "NoAllocation".to_owned())]);
    assert_eq!(node.state.grants().await.unwrap(), []);
    assert!(node.shared.read(|w| w.grants.is_empty()));
}

/// State lost, and the allocation taken away while the agent was down: the log must not name the pod for ever.
#[tokio::test]
async fn an_orphan_that_the_log_alone_knows_ends_there() {
    let node = Node::new(true).await;
    let containers: &[(&str, Kind, &[&str])] =
        &[("main", Kind::App, &["slot-0000"]), ("side", Kind::Sidecar, &["slot-0001"])];
    node.checkpoint(&node.pod("bare-pod", containers, true));
    node.prepare(&["slot-0000"]).await.unwrap();
    node.prepare(&["slot-0001"]).await.unwrap();
    let node = node.restart(&[]).await;
    let held = node.audit.held(&node.settings.node).await.unwrap();
    let uid = "uid-of-bare-pod".into();
    node.shared.change(|w| {
        for fact in held.facts {
            w.ledger.apply(&mullion_core::facts::Event::AllocationObserved(fact));
        }
        w.lose_allocation(&uid);
        assert!(w.orphans.contains(&uid));
    });
    let holders = async || {
        let mut reader = AuditReader::open(node.settings.state_dir.join("audit.db")).await.unwrap();
        reader.replay().await.unwrap().holders("GPU-0").len()
    };
    // A driver that has not answered yet is no proof.
    let ready = node.shared.change(|w| {
        std::mem::replace(&mut w.driver, Driver::Down { code: "NVML_NO_ANSWER", reason: String::new() })
    });
    node.tidy(&[]).await;
    assert_eq!((holders().await, node.shared.read(|w| w.grants.len())), (2, 2));
    node.shared.change(|w| w.driver = ready);
    node.tidy(&[]).await;
    assert!(node.shared.read(|w| w.ledger.allocation(&uid).is_none() && w.grants.is_empty()));
    assert_eq!(holders().await, 0);
    assert_eq!(node.audited("Released").await.len(), 1);
}

fn issued(grant: &str) -> Event {
    Event::GrantIssued { grant: grant.to_owned(), device_ids: Vec::new() }
}

/// While the log takes no rows, nothing that says who holds a card is lost, and of the rest nothing is heaped up.
#[tokio::test]
async fn facts_that_are_true_once_wait_for_a_log_that_is_full() {
    let node = Node::new(true).await;
    let (facts, received) = mpsc::unbounded_channel();
    let appending = tokio::spawn(node.audit.append_facts(received));
    node.block_log(true);
    let passing = Event::PluginRegistered { resource: "r".to_owned(), slots: 1 };
    for event in [issued("a"), passing.clone(), issued("b"), passing] {
        facts.send(event.into()).unwrap();
    }
    // It takes along whatever was told before.
    node.audit.append_many(Vec::new()).await.unwrap_err();
    node.block_log(false);
    assert!(node.audited("GrantIssued").await.is_empty());
    drop(facts);
    appending.await.unwrap();
    assert_eq!(node.audited("GrantIssued").await.len(), 2);
    assert_eq!(node.audited("PluginRegistered").await.len(), 0);
}

/// Whoever appends by himself must not come before what was told earlier, be it refused or only on its way.
#[tokio::test]
async fn the_row_that_ends_something_comes_after_the_one_that_began_it() {
    for full in [true, false] {
        let node = Node::new(true).await;
        node.allocate("pod-1", &[("main", Kind::App, &["slot-0000"])]);
        let fact = node.shared.read(|w| w.ledger.allocation(&"uid-of-pod-1".into()).cloned()).unwrap();
        let released = Event::Released {
            allocation: allocation_ref(&fact),
            pod: pod_ref(&fact.pod),
            code: "PodGone".to_owned(),
            observation: 1,
        };
        let (facts, received) = mpsc::unbounded_channel();
        let appending = tokio::spawn(node.audit.append_facts(received));
        if full {
            node.block_log(true);
        }
        facts.send(traced(reserved(&fact))).unwrap();
        // A key that names something else already is refused for good, and keeps nobody else away.
        facts.send(Entry::from(issued("a")).keyed("key")).unwrap();
        facts.send(Entry::from(released.clone()).keyed("key")).unwrap();
        facts.send(issued("b").into()).unwrap();
        if full {
            node.audit.append(released.clone()).await.unwrap_err();
            node.block_log(false);
        }
        node.audit.append(released).await.unwrap();
        drop(facts);
        appending.await.unwrap();
        let mut reader = AuditReader::open(node.settings.state_dir.join("audit.db")).await.unwrap();
        let rows = reader.list(&Filter::default()).await.unwrap();
        let mut kinds: Vec<&str> = rows.iter().map(|row| row.kind.as_str()).collect();
        kinds.retain(|kind| *kind != "AuditGap");
        assert_eq!(kinds, ["AllocationReserved", "GrantIssued", "GrantIssued", "Released"], "full: {full}");
        assert_eq!(reader.replay().await.unwrap().holders("GPU-0"), []);
    }
}
