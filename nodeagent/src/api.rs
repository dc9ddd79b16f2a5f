//! What the API server says about this node: its allocations, its `GPUNode`, its Node and its pods. Each watch keeps
//! the world up to date; what must outlive a restart goes into the state file.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use futures::{Stream, StreamExt, TryStreamExt};
use k8s_openapi::api::core::v1::{ContainerStatus, Node, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::runtime::watcher::{self, Event};
use kube::runtime::{WatchStreamExt, watcher as watch};
use kube::{Api, Client, ResourceExt};
use mullion_audit::{Entry, Event as AuditEvent};
use mullion_core::facts::{AllocationFact, ContainerGrant};
use mullion_core::ledger::Standing;
use mullion_core::request::{ComputeWishes, compute_wishes_as_far_as_read};
use mullion_core::units::{AllocationUid, PodUid};
use mullion_crds::gpunode::GPUNode;
use mullion_crds::vgpuallocation::VGPUAllocation;
use tokio::sync::mpsc;
use tracing::{debug, info, warn};

use crate::audit::WITHDRAWN;
use crate::prepare::{allocation_ref, pod_ref, reserved, voided};
use crate::state::{Key, State};
use crate::world::{ContainerSeen, Misread, PodSeen, Shared};

/// Watches the API server.
pub struct Watches {
    /// The API server.
    pub client: Client,
    /// The world.
    pub shared: Arc<Shared>,
    /// The state file.
    pub state: State,
    /// Facts on their way into the audit log.
    pub facts: mpsc::UnboundedSender<Entry>,
}

impl std::fmt::Debug for Watches {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Watches").finish_non_exhaustive()
    }
}

/// An entry in the trace of its pod.
#[must_use]
pub fn traced(event: AuditEvent) -> Entry {
    let trace = event.pod().map(|p| mullion_telemetry::trace_id(&p.uid).to_string());
    let entry = Entry::from(event);
    match trace {
        Some(trace) => entry.traced(trace),
        None => entry,
    }
}

/// The audit event of an allocation that ended before anything of it was given out: its pod was never bound, and the
/// controller undid it. Without it the log would name the pod as a holder of the card for ever.
fn withdrawn(fact: &AllocationFact, observation: i64) -> AuditEvent {
    AuditEvent::Released {
        allocation: allocation_ref(fact),
        pod: pod_ref(&fact.pod),
        code: WITHDRAWN.to_owned(),
        observation: u64::try_from(observation).unwrap_or(0),
    }
}

impl Watches {
    /// Runs all watches until dropped.
    pub async fn run(self) {
        let node = self.shared.read(|w| w.node.0.clone());
        let here = watcher::Config::default().fields(&format!("spec.nodeName={node}"));
        let named = watcher::Config::default().fields(&format!("metadata.name={node}"));
        let client = || self.client.clone();
        tokio::join!(
            self.allocations(watch(Api::all(client()), here.clone())),
            self.gpunode(watch(Api::all(client()), named.clone())),
            self.node(watch(Api::all(client()), named)),
            self.pods(watch(Api::all(client()), here)),
        );
    }

    async fn allocations(&self, stream: impl Stream<Item = Result<Event<VGPUAllocation>, watcher::Error>>) {
        let mut stream = steady(stream, "allocations");
        let mut listed = BTreeSet::new();
        while let Some(event) = stream.next().await {
            match event {
                Event::Init => listed.clear(),
                Event::InitApply(object) => {
                    listed.insert(uid(&object));
                    self.allocation(object).await;
                }
                Event::Apply(object) => self.allocation(object).await,
                Event::Delete(object) => self.allocation_gone(&uid(&object)).await,
                Event::InitDone => {
                    // What the ledger has from the state file or the audit log alone may be gone, too. Said in the same
                    // moment: what the audit log brings from then on is compared with the list over there.
                    let gone: Vec<AllocationUid> = self.shared.change(|w| {
                        w.allocations_listed = true;
                        let known = w.ledger.allocations_on(&w.node).map(|a| a.uid.clone());
                        known.filter(|uid| !listed.contains(uid)).collect()
                    });
                    for uid in gone {
                        self.allocation_gone(&uid).await;
                    }
                }
            }
        }
    }

    async fn allocation(&self, object: VGPUAllocation) {
        let uid = uid(&object);
        if let Err(error) = self.state.put_allocation(uid.as_str(), &object).await {
            warn!(code = error.code(), error = %mullion_telemetry::source_chain(&error), "allocation not kept");
        }
        let (new, events) = self.shared.change(|world| {
            let new = !world.allocations.contains_key(&uid);
            // An allocation that comes can turn another one void, so all are looked at; the log takes each fact once.
            world.see_allocation(object);
            if !new {
                return (new, Vec::new());
            }
            let facts: Vec<_> = world.ledger.allocations_on(&world.node).collect();
            let events = facts.into_iter().filter_map(|fact| match world.ledger.standing(&fact.uid)? {
                Standing::Holds if fact.uid == uid => Some(reserved(fact)),
                standing => voided(fact, &standing),
            });
            (new, events.collect::<Vec<_>>())
        });
        if new {
            debug!(%uid, "allocation seen");
        }
        for event in events {
            let _ = self.facts.send(traced(event));
        }
    }

    async fn allocation_gone(&self, uid: &AllocationUid) {
        debug!(%uid, "allocation gone");
        let (orphan, withdrawn) = self.shared.change(|world| {
            let held = world.ledger.allocation(uid).filter(|f| !f.released).cloned();
            world.lose_allocation(uid);
            let orphan = world.orphans.contains(uid);
            let withdrawn = held.filter(|_| !orphan).map(|fact| withdrawn(&fact, world.observation));
            (world.ledger.allocation(uid).filter(|_| orphan).map(|f| f.pod.clone()), withdrawn)
        });
        if let Some(event) = withdrawn {
            let _ = self.facts.send(traced(event));
        }
        if let Some(pod) = orphan {
            warn!(
                %uid,
                namespace = pod.namespace,
                pod = pod.name,
                "allocation removed by hand while its pod may run: its cards stay taken on this node until the pod is gone; delete the pod"
            );
        }
        // Its grants stay until the release has removed their files.
        let granted = self.shared.read(|w| w.grants_of(uid).next().is_some());
        if !granted && let Err(error) = self.state.forget(uid.as_str()).await {
            warn!(code = error.code(), error = %mullion_telemetry::source_chain(&error), "allocation not forgotten");
        }
    }

    async fn gpunode(&self, stream: impl Stream<Item = Result<Event<GPUNode>, watcher::Error>>) {
        let mut stream = steady(stream, "gpunode");
        let mut listed = None;
        while let Some(event) = stream.next().await {
            match event {
                Event::Init => listed = None,
                Event::InitApply(object) => listed = Some(object),
                Event::InitDone => self.gpunode_is(listed.take()).await,
                Event::Apply(object) => self.gpunode_is(Some(object)).await,
                Event::Delete(_) => self.gpunode_is(None).await,
            }
        }
    }

    async fn gpunode_is(&self, object: Option<GPUNode>) {
        if let Some(object) = &object
            && let Err(error) = self.state.put(Key::GpuNode, object).await
        {
            warn!(code = error.code(), error = %mullion_telemetry::source_chain(&error), "GPUNode not kept");
        }
        self.shared.change(|world| {
            let theirs = object.as_ref().and_then(|o| o.status.as_ref()).map_or(0, |s| s.observation);
            world.observation = world.observation.max(theirs);
            world.gpunode = object;
            world.gpunode_known = true;
            world.refold_node();
        });
    }

    async fn node(&self, stream: impl Stream<Item = Result<Event<Node>, watcher::Error>>) {
        let mut stream = steady(stream, "node");
        while let Some(event) = stream.next().await {
            let (Event::InitApply(node) | Event::Apply(node)) = event else { continue };
            let uid = node.uid().unwrap_or_default();
            let mut changed = false;
            self.shared.change_if(|world| {
                changed = world.node_uid != uid;
                if changed {
                    world.node_uid.clone_from(&uid);
                    world.refold_node();
                }
                changed
            });
            if changed {
                info!(uid, "Node object");
                if let Err(error) = self.state.put(Key::NodeUid, &uid).await {
                    warn!(code = error.code(), error = %mullion_telemetry::source_chain(&error), "uid not kept");
                }
            }
        }
    }

    async fn pods(&self, stream: impl Stream<Item = Result<Event<Pod>, watcher::Error>>) {
        let mut stream = steady(stream, "pods");
        let mut listed = BTreeMap::new();
        while let Some(event) = stream.next().await {
            match event {
                Event::Init => listed.clear(),
                Event::InitApply(pod) => {
                    listed.insert(PodUid(pod.uid().unwrap_or_default()), seen(&pod));
                }
                Event::InitDone => {
                    let all = std::mem::take(&mut listed);
                    for (uid, pod) in &all {
                        self.started(uid, pod);
                    }
                    self.shared.change(|world| world.pods = Some(all));
                }
                Event::Apply(pod) => {
                    let (uid, pod) = (PodUid(pod.uid().unwrap_or_default()), seen(&pod));
                    self.started(&uid, &pod);
                    self.shared.change_if(|world| {
                        let Some(pods) = world.pods.as_mut() else { return false };
                        pods.insert(uid, pod.clone()) != Some(pod)
                    });
                }
                Event::Delete(pod) => {
                    let uid = PodUid(pod.uid().unwrap_or_default());
                    self.started(&uid, &seen(&pod));
                    self.shared.change_if(|world| {
                        let had = world.allocation_of(&uid).is_some();
                        let new = had && world.deleted_pods.insert(uid.clone());
                        world.pods.as_mut().is_some_and(|p| p.remove(&uid).is_some()) || new
                    });
                }
            }
        }
    }

    /// Each container of ours that runs or ran goes into the log, once per run: one that ends within a second may never be
    /// seen running.
    fn started(&self, uid: &PodUid, pod: &PodSeen) {
        let events: Vec<Entry> = self.shared.read(|w| {
            let Some((fact, _)) = w.allocation_of(uid).filter(|(fact, _)| fact.prepared) else {
                return Vec::new();
            };
            let before = w.pods.as_ref().and_then(|p| p.get(uid));
            let runs = |seen: &PodSeen, name: &str| {
                seen.containers.get(name).map(|c| c.runs.clone()).unwrap_or_default()
            };
            let mut events = Vec::new();
            for ContainerGrant { name, .. } in &fact.containers {
                let known = before.map(|b| runs(b, name)).unwrap_or_default();
                for (id, started) in runs(pod, name).into_iter().filter(|(id, _)| !known.contains_key(id)) {
                    let (allocation, pod) = (allocation_ref(fact), pod_ref(&fact.pod));
                    let event =
                        AuditEvent::ContainerStarted { allocation, pod, container: name.clone(), started };
                    events.push(traced(event).keyed(format!("container/{id}/started")));
                }
            }
            events
        });
        for event in events {
            let _ = self.facts.send(event);
        }
    }
}

fn uid(object: &VGPUAllocation) -> AllocationUid {
    AllocationUid(object.uid().unwrap_or_default())
}

/// A watch that goes on after errors, with a pause that grows.
fn steady<K>(
    stream: impl Stream<Item = Result<Event<K>, watcher::Error>>,
    what: &'static str,
) -> std::pin::Pin<Box<impl Stream<Item = Event<K>>>>
where
    K: kube::Resource + Clone + 'static,
{
    let stream = stream.default_backoff().inspect_err(move |error| {
        warn!(what, error = %mullion_telemetry::source_chain(error), "watch interrupted");
    });
    Box::pin(stream.filter_map(|event| std::future::ready(event.ok())))
}

/// The pod, trimmed.
fn seen(pod: &Pod) -> PodSeen {
    let status = pod.status.as_ref();
    let spec = pod.spec.as_ref();
    let phase = status.and_then(|s| s.phase.as_deref()).unwrap_or_default();
    let of = |list: Option<&Vec<ContainerStatus>>| list.cloned().unwrap_or_default();
    let init = of(status.and_then(|s| s.init_container_statuses.as_ref()));
    let apps = of(status.and_then(|s| s.container_statuses.as_ref()));
    let ordinary = spec.and_then(|s| s.init_containers.as_ref()).into_iter().flatten();
    let mut ordinary = ordinary.filter(|c| c.restart_policy.as_deref() != Some("Always"));
    let ended_well = |name: &str| {
        let state = init.iter().find(|s| s.name == name).and_then(|s| s.state.as_ref());
        state.and_then(|s| s.terminated.as_ref()).is_some_and(|t| t.exit_code == 0)
    };
    let started =
        |s: &ContainerStatus| s.state.as_ref().is_some_and(|s| s.running.is_some() || s.terminated.is_some());
    let containers = init.iter().chain(&apps).map(|s| {
        let running = s.state.as_ref().and_then(|s| s.running.as_ref()).and(s.container_id.clone());
        (s.name.clone(), ContainerSeen { running, runs: runs(s) })
    });
    let (mut wishes, mut misread) = (BTreeMap::new(), Vec::new());
    for container in mullion_crds::pod::view(pod).containers {
        let (wanted, wrong) = compute_wishes_as_far_as_read(&container);
        misread.extend(wrong.into_iter().map(|error| Misread {
            container: container.name.clone(),
            code: error.code(),
            message: error.to_string(),
        }));
        if wanted != ComputeWishes::default() {
            wishes.insert(container.name, wanted);
        }
    }
    PodSeen {
        wishes,
        misread,
        namespace: pod.namespace().unwrap_or_default(),
        name: pod.name_any(),
        ended: matches!(phase, "Succeeded" | "Failed"),
        init_done: apps.iter().any(started) && ordinary.all(|c| ended_well(&c.name)),
        containers: containers.collect(),
    }
}

/// The runs that a container's status tells of. The kubelet gives one that could not be created the state `terminated`,
/// too, without a start or without an id.
fn runs(status: &ContainerStatus) -> BTreeMap<String, Option<String>> {
    let mut runs = BTreeMap::new();
    let mut add = |id: Option<&String>, started: Option<&Time>| {
        if let Some(id) = id.filter(|id| !id.is_empty()) {
            runs.insert(id.clone(), started.map(|t| t.0.to_string()));
        }
    };
    for state in status.last_state.iter().chain(&status.state) {
        if let Some(running) = &state.running {
            add(status.container_id.as_ref(), running.started_at.as_ref());
        }
        if let Some(ended) = state.terminated.as_ref().filter(|t| t.started_at.is_some()) {
            add(ended.container_id.as_ref(), ended.started_at.as_ref());
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::world::World;
    use mullion_crds::vgpuallocation::VGPUAllocationSpec;
    use serde_json::json;

    #[test]
    fn init_is_done_when_every_ordinary_one_ended_well_and_an_app_started() {
        let pod = |inits: serde_json::Value, apps: serde_json::Value| -> Pod {
            serde_json::from_value(json!({
                "metadata": {"name": "p", "namespace": "n", "uid": "u"},
                "spec": {"initContainers": [{"name": "i"}, {"name": "s", "restartPolicy": "Always"}], "containers": [{"name": "a"}]},
                "status": {"phase": "Running", "initContainerStatuses": inits, "containerStatuses": apps},
            }))
            .unwrap()
        };
        let status = |name: &str, state: serde_json::Value| json!({"name": name, "state": state, "ready": false, "restartCount": 0, "image": "", "imageID": "", "containerID": "c-1"});
        let (ok, bad) = (json!({"terminated": {"exitCode": 0}}), json!({"terminated": {"exitCode": 1}}));
        let (running, waiting) = (json!({"running": {}}), json!({"waiting": {}}));
        for (case, init, app, want) in [
            ("all well", &ok, &running, true),
            ("app crashed after", &ok, &bad, true),
            ("init runs", &running, &waiting, false),
            ("init failed", &bad, &waiting, false),
            ("app not started", &ok, &waiting, false),
        ] {
            let seen = seen(&pod(
                json!([status("i", init.clone()), status("s", running.clone())]),
                json!([status("a", app.clone())]),
            ));
            assert_eq!(seen.init_done, want, "{case}");
            assert_eq!(seen.containers["s"].running.as_deref(), Some("c-1"));
        }
    }

    /// Between the list and the last look at it the audit log may bring an allocation that is gone: it must find the list said.
    #[tokio::test]
    async fn the_list_is_said_before_what_it_lacks_is_taken_away() {
        use sqlx::Connection as _;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state.db");
        let state = State::open(&path).await.unwrap();
        let mut world = World { node: "n".into(), ..World::default() };
        let mut object = VGPUAllocation::new("gone", VGPUAllocationSpec::default());
        (object.metadata.uid, object.spec.node_name) = (Some("gone".to_owned()), "n".to_owned());
        world.see_allocation(object);
        let shared = Shared::new(world);
        let service = tower::service_fn(async |_: axum::http::Request<kube::client::Body>| {
            Ok::<_, std::convert::Infallible>(axum::http::Response::new(kube::client::Body::empty()))
        });
        let (facts, _received) = mpsc::unbounded_channel();
        let watches =
            Watches { client: Client::new(service, "default"), shared: Arc::clone(&shared), state, facts };
        // The state file makes whoever forgets wait.
        let options = sqlx::sqlite::SqliteConnectOptions::new().filename(&path);
        let mut other = sqlx::SqliteConnection::connect_with(&options).await.unwrap();
        sqlx::query("BEGIN IMMEDIATE").execute(&mut other).await.unwrap();
        let list = [Event::Init, Event::InitDone].map(Ok);
        tokio::join!(watches.allocations(futures::stream::iter(list)), async {
            while shared.read(|w| w.ledger.allocation(&"gone".into()).is_some()) {
                tokio::task::yield_now().await;
            }
            assert!(shared.read(|w| w.allocations_listed));
            sqlx::query("ROLLBACK").execute(&mut other).await.unwrap();
        });
    }

    #[test]
    fn how_compute_is_to_be_held_is_read_from_the_pod() {
        let container = |name: &str, policy: &str, priority: &str| {
            json!({"name": name, "env": [
                {"name": "GPU_CORE_UTILIZATION_POLICY", "value": policy}, {"name": "CUDA_TASK_PRIORITY", "value": priority}]})
        };
        let containers = [
            container("plain", "default", "1"),
            container("forced", "Force", "0"),
            // Came around the webhook, which refuses them: what is right in them holds.
            container("lifted", "disable", "0"),
            container("muddled", "force", "high"),
        ];
        let pod = json!({"metadata": {"name": "p"}, "spec": {"containers": containers}});
        let seen = seen(&serde_json::from_value(pod).unwrap());
        let wishes = |name: &str, force, priority| (name.to_owned(), ComputeWishes { force, priority });
        let want = [wishes("forced", true, 0), wishes("lifted", false, 0), wishes("muddled", true, 1)];
        assert_eq!(seen.wishes, want.into());
        let misread: Vec<_> = seen.misread.iter().map(|m| (m.container.as_str(), m.code)).collect();
        assert_eq!(misread, [("lifted", "CoreLimitLifted"), ("muddled", "MalformedPriority")]);
        assert!(seen.misread[1].message.contains("\"high\""), "{:?}", seen.misread);
    }

    #[test]
    fn a_run_is_known_by_its_id_also_when_it_was_over_before_anybody_looked() {
        let status = |value: serde_json::Value| -> ContainerStatus {
            let mut status =
                json!({"name": "c", "ready": false, "restartCount": 0, "image": "", "imageID": ""});
            status.as_object_mut().unwrap().extend(value.as_object().unwrap().clone());
            serde_json::from_value(status).unwrap()
        };
        let at = "2026-11-29T10:00:00Z";
        let ended = |id: &str| json!({"terminated": {"exitCode": 0, "containerID": id, "startedAt": at, "finishedAt": at}});
        let failed =
            json!({"terminated": {"exitCode": 128, "reason": "ContainerCannotRun", "containerID": "c-0"}});
        for (case, value, want) in [
            ("waits", json!({"state": {"waiting": {}}}), vec![]),
            ("runs", json!({"containerID": "c-1", "state": {"running": {"startedAt": at}}}), vec!["c-1"]),
            ("was over at once", json!({"containerID": "c-1", "state": ended("c-1")}), vec!["c-1"]),
            (
                "was over at once and is tried again",
                json!({"containerID": "c-1", "state": {"waiting": {}}, "lastState": ended("c-1")}),
                vec!["c-1"],
            ),
            (
                "runs again",
                json!({"containerID": "c-2", "state": {"running": {"startedAt": at}}, "lastState": ended("c-1")}),
                vec!["c-1", "c-2"],
            ),
            ("could not be created", json!({"containerID": "c-0", "state": failed}), vec![]),
        ] {
            let runs = runs(&status(value));
            assert_eq!(runs.keys().collect::<Vec<_>>(), want, "{case}");
            assert!(runs.values().all(|started| started.as_deref() == Some(at)), "{case}");
        }
    }
}
