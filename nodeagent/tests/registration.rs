//! The plugin against a kubelet of our own making: a registration server on a Unix socket that does what the
//! kubelet's device manager does with a plugin that registers.

#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test that cannot be set up has failed"
)]

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::FutureExt;
use mullion_audit::{Entry, Event as AuditEvent};
use mullion_nodeagent::audit::Audit;
use mullion_nodeagent::device_plugin::server::{Prepare, Service, options};
use mullion_nodeagent::device_plugin::{KUBELET_SOCKET, SOCKET, run, slots};
use mullion_nodeagent::kubelet::deviceplugin::device_plugin_client::DevicePluginClient;
use mullion_nodeagent::kubelet::deviceplugin::device_plugin_server::DevicePlugin;
use mullion_nodeagent::kubelet::deviceplugin::registration_server::{Registration, RegistrationServer};
use mullion_nodeagent::kubelet::deviceplugin::{
    AllocateRequest, ContainerAllocateRequest, Empty, PreStartContainerRequest, PreferredAllocationRequest,
    RegisterRequest,
};
use mullion_nodeagent::metrics::{Metrics, registry};
use mullion_nodeagent::monitor::Latest;
use mullion_nodeagent::monitor::export::Exporter;
use mullion_nodeagent::prepare::Refusal;
use mullion_nodeagent::world::{Shared, World};
use tokio::net::UnixListener;
use tokio::runtime::Runtime;
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::{Channel, Endpoint, Server};
use tonic::{Code, Request, Response, Status};

/// Far longer than anything here takes; only a failure waits for it.
const LONG: Duration = Duration::from_secs(20);

/// What the kubelet saw.
#[derive(Debug)]
enum Seen {
    Registered { request: RegisterRequest, open: usize },
    Slots(Vec<String>),
    Ended,
}

#[derive(Clone)]
struct Manager {
    dir: PathBuf,
    seen: mpsc::UnboundedSender<Seen>,
    open: Arc<watch::Sender<usize>>,
}

#[tonic::async_trait]
impl Registration for Manager {
    async fn register(&self, request: Request<RegisterRequest>) -> Result<Response<Empty>, Status> {
        let request = request.into_inner();
        let mut client = client(&self.dir.join(&request.endpoint)).await;
        let says = client.get_device_plugin_options(Empty {}).await?.into_inner();
        // DP-05: the same fact told in two places.
        assert_eq!(Some(says), request.options);
        self.seen.send(Seen::Registered { request, open: *self.open.borrow() }).unwrap();
        let (seen, open) = (self.seen.clone(), Arc::clone(&self.open));
        tokio::spawn(async move {
            let Ok(stream) = client.list_and_watch(Empty {}).await else { return };
            open.send_modify(|n| *n += 1);
            let mut stream = stream.into_inner();
            while let Ok(Some(list)) = stream.message().await {
                assert!(list.devices.iter().all(|d| d.health == "Healthy" && d.topology.is_none()));
                let _ = seen.send(Seen::Slots(list.devices.into_iter().map(|d| d.id).collect()));
            }
            open.send_modify(|n| *n -= 1);
            let _ = seen.send(Seen::Ended);
        });
        Ok(Response::new(Empty {}))
    }
}

async fn client(socket: &Path) -> DevicePluginClient<Channel> {
    let endpoint = Endpoint::try_from(format!("unix://{}", socket.display())).unwrap();
    DevicePluginClient::new(endpoint.connect().await.unwrap())
}

/// A kubelet process: its end closes every connection, as a kill does.
struct Kubelet {
    runtime: Option<Runtime>,
    dir: PathBuf,
}

impl Kubelet {
    /// Starts as the real one: empties its folder (the checkpoint excepted), then makes its socket.
    fn start(dir: &Path, seen: &mpsc::UnboundedSender<Seen>) -> Self {
        for entry in std::fs::read_dir(dir).unwrap() {
            let _ = std::fs::remove_file(entry.unwrap().path());
        }
        let runtime = runtime();
        let manager =
            Manager { dir: dir.to_owned(), seen: seen.clone(), open: Arc::new(watch::Sender::new(0)) };
        let socket = dir.join(KUBELET_SOCKET);
        let entered = runtime.enter();
        let listener = UnixListener::bind(socket).unwrap();
        tokio::spawn(
            Server::builder()
                .add_service(RegistrationServer::new(manager))
                .serve_with_incoming(UnixListenerStream::new(listener)),
        );
        drop(entered);
        Self { runtime: Some(runtime), dir: dir.to_owned() }
    }

    /// Ends it; a kill leaves the socket's file behind, a clean stop does not.
    fn end(mut self, clean: bool) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
        if clean {
            std::fs::remove_file(self.dir.join(KUBELET_SOCKET)).unwrap();
        }
    }
}

impl Drop for Kubelet {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.stop_plugin();
    }
}

/// A process of its own, as far as connections go.
fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap()
}

struct Node {
    folder: tempfile::TempDir,
    to_kubelet: mpsc::UnboundedSender<Seen>,
    seen: mpsc::UnboundedReceiver<Seen>,
    slots: watch::Sender<Arc<Vec<String>>>,
    registered: watch::Receiver<bool>,
    plugin: Option<Runtime>,
    facts: (mpsc::UnboundedSender<Entry>, mpsc::UnboundedReceiver<Entry>),
    shared: Arc<Shared>,
}

impl Node {
    fn new() -> Self {
        let (to_kubelet, seen) = mpsc::unbounded_channel();
        let (slots, _) = watch::channel(Arc::new(vec![slots::name(0), slots::name(1)]));
        let (_, registered) = watch::channel(false);
        let (folder, facts) = (tempfile::tempdir().unwrap(), mpsc::unbounded_channel());
        let shared = Shared::new(World::default());
        Self { folder, to_kubelet, seen, slots, registered, plugin: None, facts, shared }
    }

    fn dir(&self) -> &Path {
        self.folder.path()
    }

    fn start_plugin(&mut self) {
        let prepare: Prepare = Arc::new(|ids: BTreeSet<String>| {
            async move { if ids.contains(&slots::name(0)) { Ok(()) } else { Err(Refusal::DriverNotReady) } }
                .boxed()
        });
        let service = Service::new(
            self.slots.subscribe(),
            prepare,
            Arc::clone(&self.shared),
            Arc::new(Metrics::default()),
            self.facts.0.clone(),
        );
        let (sender, registered) = watch::channel(false);
        self.registered = registered;
        let dir = self.dir().to_owned();
        let process = runtime();
        process.spawn(async move { run(dir, service, sender).await.unwrap() });
        self.plugin = Some(process);
    }

    /// Kills it: its connections end with it.
    fn stop_plugin(&mut self) {
        if let Some(process) = self.plugin.take() {
            process.shutdown_background();
        }
    }

    async fn next(&mut self) -> Seen {
        tokio::time::timeout(LONG, self.seen.recv()).await.expect("the kubelet saw nothing").unwrap()
    }

    /// The next registration with its first list; streams of former kubelets may still end in between.
    async fn registration(&mut self) -> Vec<String> {
        loop {
            match self.next().await {
                Seen::Registered { request, open } => {
                    assert_eq!(open, 0, "registered beside an open stream");
                    assert_eq!(
                        (request.version.as_str(), request.endpoint.as_str(), request.resource_name.as_str()),
                        ("v1beta1", SOCKET, "nvidia.com/gpu")
                    );
                    loop {
                        match self.next().await {
                            Seen::Slots(list) => return list,
                            Seen::Ended => {}
                            Seen::Registered { .. } => panic!("registered twice"),
                        }
                    }
                }
                Seen::Slots(_) | Seen::Ended => {}
            }
        }
    }

    async fn stream_ended(&mut self) {
        while !matches!(self.next().await, Seen::Ended) {}
    }

    /// Nothing more comes for a while.
    async fn quiet(&mut self) {
        while let Ok(Some(seen)) = tokio::time::timeout(Duration::from_millis(300), self.seen.recv()).await {
            assert!(!matches!(seen, Seen::Registered { .. }), "registered again: {seen:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_socket_that_appears_is_answered_at_once_and_once() {
    let mut node = Node::new();
    node.start_plugin();
    node.quiet().await;
    let start = Instant::now();
    let _kubelet = Kubelet::start(node.dir(), &node.to_kubelet);
    assert_eq!(node.registration().await, [slots::name(0), slots::name(1)]);
    // The budget is milliseconds; a second tells inotify from polling on any machine.
    assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
    node.slots.send_replace(Arc::new(vec![slots::name(1)]));
    assert!(
        matches!(node.next().await, Seen::Slots(list) if list == [slots::name(1)]),
        "changes go down the same stream"
    );
    assert!(*node.registered.borrow());
    node.quiet().await;
}

// DP-10: all orders, with kills that leave a stale socket behind.
#[tokio::test(flavor = "multi_thread")]
async fn whatever_restarts_in_whatever_order_one_registration_follows() {
    for steps in
        ["kp", "pk", "pkRk", "pkKk", "pkKkKk", "kpPp", "kpRPkp", "kpKPpk", "pkPKkp", "kpPKpk", "kpKkPp"]
    {
        let mut node = Node::new();
        let mut kubelet = None;
        for step in steps.chars() {
            match step {
                'k' => kubelet = Some(Kubelet::start(node.dir(), &node.to_kubelet)),
                'K' | 'R' => kubelet.take().unwrap().end(step == 'R'),
                'p' => node.start_plugin(),
                'P' => {
                    node.stop_plugin();
                    if kubelet.is_some() {
                        node.stream_ended().await;
                    }
                }
                other => panic!("{other}"),
            }
            if kubelet.is_some() && node.plugin.is_some() {
                assert_eq!(node.registration().await.len(), 2, "{steps} at {step}");
            }
        }
        node.quiet().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn allocate_names_a_fresh_grant_per_container_and_nothing_else() {
    let mut node = Node::new();
    node.start_plugin();
    let _kubelet = Kubelet::start(node.dir(), &node.to_kubelet);
    node.registration().await;
    let mut client = client(&node.dir().join(SOCKET)).await;
    let container =
        |ids: &[u32]| ContainerAllocateRequest { devices_ids: ids.iter().map(|i| slots::name(*i)).collect() };
    let request = AllocateRequest { container_requests: vec![container(&[0]), container(&[1, 0])] };
    let mut names = BTreeSet::new();
    for _ in 0..2 {
        for answer in client.allocate(request.clone()).await.unwrap().into_inner().container_responses {
            assert!(
                answer.envs.is_empty()
                    && answer.mounts.is_empty()
                    && answer.devices.is_empty()
                    && answer.annotations.is_empty()
            );
            let [device] = answer.cdi_devices.as_slice() else { panic!("{answer:?}") };
            let grant = device.name.strip_prefix("mullion.io/grant=").unwrap();
            assert!(grant.len() == 16 && grant.bytes().all(|b| b.is_ascii_hexdigit()), "{grant}");
            names.insert(grant.to_owned());
        }
    }
    assert_eq!(names.len(), 4, "a name is never used twice");
    let mut issued = BTreeMap::new();
    while let Ok(entry) = node.facts.1.try_recv() {
        let AuditEvent::GrantIssued { grant, device_ids } = entry.event else { panic!("{entry:?}") };
        issued.insert(grant, device_ids);
    }
    assert_eq!(issued.keys().collect::<Vec<_>>(), names.iter().collect::<Vec<_>>());
    let open: BTreeSet<String> = node.shared.read(|w| w.issued.keys().cloned().collect());
    assert_eq!(open, names, "looked after until they are filled");
    let sets: BTreeSet<Vec<String>> = issued.into_values().collect();
    assert_eq!(sets, [vec![slots::name(0)], vec![slots::name(0), slots::name(1)]].into());
    // BL-09: what is wrong is an error, not a device name.
    let foreign = ContainerAllocateRequest { devices_ids: vec!["GPU-1-0".to_owned()] };
    let wrong = AllocateRequest { container_requests: vec![container(&[0]), foreign] };
    let error = client.allocate(wrong).await.unwrap_err();
    assert!(node.facts.1.try_recv().is_err(), "what was not answered is not written down");
    assert_eq!(error.code(), Code::InvalidArgument);
    assert!(error.message().contains("GPU-1-0"));
    // DP-04: no preference among slots that belong to no card.
    assert!(!options().get_preferred_allocation_available);
    let preferred = client.get_preferred_allocation(PreferredAllocationRequest::default()).await.unwrap_err();
    assert_eq!(preferred.code(), Code::Unimplemented);
    client.pre_start_container(PreStartContainerRequest { devices_ids: vec![slots::name(0)] }).await.unwrap();
    let refused = client.pre_start_container(PreStartContainerRequest { devices_ids: vec![slots::name(1)] });
    let refused = refused.await.unwrap_err();
    assert!(refused.message().starts_with("DriverNotReady: "), "{}", refused.message());
}

/// The slowest calls are those that the kubelet gives up: a histogram without them would show the opposite.
#[tokio::test]
async fn a_call_that_the_kubelet_gives_up_is_measured() {
    let (go, goes) = watch::channel(false);
    let prepare: Prepare = Arc::new(move |_| {
        let mut goes = goes.clone();
        async move {
            goes.wait_for(|go| *go).await.expect("the test holds the other end");
            Err(Refusal::DriverNotReady)
        }
        .boxed()
    });
    let metrics = Arc::new(Metrics::default());
    let (_, slots) = watch::channel(Arc::new(Vec::new()));
    let (facts, _received) = mpsc::unbounded_channel();
    let service = Service::new(slots, prepare, Shared::new(World::default()), Arc::clone(&metrics), facts);
    let request = Request::new(PreStartContainerRequest { devices_ids: vec![slots::name(0)] });
    let call = service.pre_start_container(request);
    assert!(tokio::time::timeout(Duration::from_millis(50), call).await.is_err(), "given up");
    go.send(true).unwrap();
    let audit = Audit::new("/nonexistent/audit.db".into());
    let exporter = Exporter { latest: Latest::default(), node: "node-a".to_owned(), legacy: false };
    let registry = registry(&metrics, &Shared::new(World::default()), audit, exporter);
    let begun = Instant::now();
    loop {
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        let line = |name: &str| text.lines().any(|line| line == name);
        if line("mullion_agent_prepare_seconds_count{node=\"node-a\"} 1") {
            assert!(text.contains("code=\"DriverNotReady\"} 1"), "{text}");
            return;
        }
        assert!(begun.elapsed() < LONG, "{text}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}
