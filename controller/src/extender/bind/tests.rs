//! Bind against a fake API server: every outcome that the network can leave us with, with the exact calls.

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use mullion_core::facts::Event;
use mullion_core::request::Defaults;
use serde_json::{Value, json};

use super::*;
use crate::fake_api::{FakeApi, Fault};
use crate::fixtures::{card, kube_node, node};
use crate::store::Source;

const POST_A: &str = "POST vgpuallocations/ns";
const GET_A: &str = "GET vgpuallocations/ns/p-uid-p";
const PATCH_A: &str = "PATCH vgpuallocations/ns/p-uid-p";
const DELETE_A: &str = "DELETE vgpuallocations/ns/p-uid-p";
const BIND: &str = "POST pods/ns/p/binding";
const GET_P: &str = "GET pods/ns/p";

struct World {
    api: FakeApi,
    store: Arc<Store>,
    binder: Arc<Binder>,
}

fn pod_json(name: &str, uid: &str, memory: u64) -> Value {
    let memory = memory.to_string();
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "namespace": "ns", "uid": uid},
        "spec": {"schedulerName": "mullion-scheduler", "containers": [{"name": "main", "resources":
            {"limits": {"nvidia.com/gpu": "1", "nvidia.com/gpumem": memory}}}]},
    })
}

fn world() -> World {
    let api = FakeApi::default();
    let store = Arc::new(Store::new(Defaults::default()));
    for source in [Source::Allocations, Source::GpuNodes, Source::Nodes, Source::Pods] {
        store.synced(source);
    }
    store.write(|facts| {
        for name in ["n1", "n2"] {
            facts.fold(&Event::NodeObserved(node(name, vec![card(&format!("GPU-{name}"), 1000)])));
            facts.fold(&Event::KubeNodeObserved(kube_node(name, 10)));
        }
    });
    let binder = Arc::new(Binder::new(api.cluster(), Arc::clone(&store), Arc::default()));
    let world = World { api, store, binder };
    world.pod("p", "uid-p", 600);
    world
}

impl World {
    /// A pod, on the server and in our caches.
    fn pod(&self, name: &str, uid: &str, memory: u64) {
        let object = pod_json(name, uid, memory);
        self.api.put(&format!("pods/ns/{name}"), object.clone());
        let pod: Pod = serde_json::from_value(object).unwrap();
        self.store.write(|facts| facts.pod_seen(&pod));
    }

    async fn bind(&self, name: &str, uid: &str, node: &str) -> Result<(), Error> {
        self.binder
            .bind(&BindingArgs {
                pod_name: name.to_owned(),
                pod_namespace: "ns".to_owned(),
                pod_uid: uid.to_owned(),
                node: node.to_owned(),
            })
            .await
    }

    /// MiB that the ledger counts on a node.
    fn used(&self, node: &str) -> u64 {
        self.store.read(|facts| facts.ledger().card_usage(&node.into()).iter().map(|c| c.used.memory.0).sum())
    }

    /// Whether the allocation bears our finalizer, and nothing else.
    fn held_back(&self) -> bool {
        let object = self.api.get("vgpuallocations/ns/p-uid-p").unwrap();
        object["metadata"]["finalizers"] == json!(["mullion.io/release"])
    }

    fn holds(&self) -> usize {
        self.store.read(|facts| facts.ledger().holds().count())
    }
}

fn code(result: &Result<(), Error>) -> &'static str {
    result.as_ref().map_or_else(Error::code, |()| "ok")
}

#[tokio::test(start_paused = true)]
async fn two_writes_and_nothing_else() {
    let world = world();
    world.bind("p", "uid-p", "n1").await.unwrap();
    assert_eq!(world.api.calls(), [POST_A, BIND]);
    let object = world.api.get("vgpuallocations/ns/p-uid-p").unwrap();
    assert_eq!(object["spec"]["nodeName"], "n1");
    assert_eq!(object["spec"]["pod"], json!({"name": "p", "uid": "uid-p"}));
    assert_eq!(object["metadata"]["finalizers"], json!(["mullion.io/release"]));
    assert_eq!(object["metadata"]["ownerReferences"][0]["blockOwnerDeletion"], Value::Null);
    assert_eq!(world.api.get("pods/ns/p").unwrap()["spec"]["nodeName"], "n1");
    assert_eq!((world.used("n1"), world.holds()), (600, 0));
}

#[tokio::test(start_paused = true)]
async fn outcomes() {
    struct Case {
        name: &'static str,
        faults: &'static [(&'static str, Fault)],
        code: &'static str,
        calls: &'static [&'static str],
        used: u64,
    }
    let undone: &[&str] = &[POST_A, BIND, GET_P, PATCH_A, DELETE_A];
    for Case { name: case, faults, code: want, calls, used } in [
        Case {
            name: "allocation refused",
            faults: &[(POST_A, Fault::Refuse(403))],
            code: "ApiRefused",
            calls: &[POST_A],
            used: 0,
        },
        Case {
            name: "allocation unknown and not there",
            faults: &[(POST_A, Fault::Silent)],
            code: "ApiTimeout",
            calls: &[POST_A, GET_A],
            used: 0,
        },
        Case {
            name: "allocation unknown and there",
            faults: &[(POST_A, Fault::DoneAndSilent)],
            code: "ok",
            calls: &[POST_A, GET_A, PATCH_A, BIND],
            used: 600,
        },
        Case {
            name: "allocation answered 500 and there",
            faults: &[(POST_A, Fault::DoneBut(500))],
            code: "ok",
            calls: &[POST_A, GET_A, PATCH_A, BIND],
            used: 600,
        },
        Case {
            name: "allocation unknown, look-up fails",
            faults: &[(POST_A, Fault::Silent), (GET_A, Fault::Refuse(500))],
            code: "ApiOutcomeUnknown",
            calls: &[POST_A, GET_A],
            used: 0,
        },
        Case {
            name: "binding unknown and done",
            faults: &[(BIND, Fault::DoneAndSilent)],
            code: "ok",
            calls: &[POST_A, BIND, GET_P],
            used: 600,
        },
        Case {
            name: "binding answered 503 and done",
            faults: &[(BIND, Fault::DoneBut(503))],
            code: "ok",
            calls: &[POST_A, BIND, GET_P],
            used: 600,
        },
        Case {
            name: "binding unknown and not done",
            faults: &[(BIND, Fault::Silent)],
            code: "BindUndone",
            calls: undone,
            used: 0,
        },
        Case {
            name: "binding refused",
            faults: &[(BIND, Fault::Refuse(403))],
            code: "BindUndone",
            calls: undone,
            used: 0,
        },
        Case {
            name: "binding unknown, pod cannot be read: the allocation stays until it can",
            faults: &[(BIND, Fault::Silent), (GET_P, Fault::Refuse(500))],
            code: "ApiOutcomeUnknown",
            calls: &[POST_A, BIND, GET_P],
            used: 600,
        },
        Case {
            name: "undo fails half way: the allocation stays until it works",
            faults: &[(BIND, Fault::Silent), (DELETE_A, Fault::Refuse(500))],
            code: "ApiOutcomeUnknown",
            calls: undone,
            used: 600,
        },
    ] {
        let world = world();
        for (call, fault) in faults {
            world.api.fail(call, *fault);
        }
        let result = world.bind("p", "uid-p", "n1").await;
        assert_eq!(code(&result), want, "{case}: {result:?}");
        assert_eq!(world.api.calls(), calls, "{case}");
        assert_eq!(world.used("n1"), used, "{case}");
        assert_eq!(world.holds(), 0, "{case}: no hold outlives its bind");
        // Whatever happened, the next try ends well.
        world.bind("p", "uid-p", "n1").await.unwrap_or_else(|error| panic!("{case}: {error}"));
        assert_eq!(world.api.get("pods/ns/p").unwrap()["spec"]["nodeName"], "n1", "{case}");
        assert_eq!((world.used("n1"), world.held_back()), (600, true), "{case}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_went_away() {
    // BL-01: nothing stays locked when a pod goes while it is bound.
    let world = world();
    world.api.remove("pods/ns/p");
    let result = world.bind("p", "uid-p", "n1").await;
    assert_eq!(code(&result), "BindUndone");
    assert_eq!(world.api.calls(), [POST_A, BIND, GET_P, PATCH_A, DELETE_A]);
    assert_eq!(world.used("n1"), 0);
    world.pod("q", "uid-q", 600);
    world.bind("q", "uid-q", "n1").await.unwrap();

    // Another pod has the name by now.
    let other = pod_json("p", "uid-new", 100);
    world.api.put("pods/ns/p", other);
    world.api.calls();
    let result = world.bind("p", "uid-p", "n2").await;
    assert_eq!(code(&result), "BindUndone");
    assert_eq!(world.used("n2"), 0);

    // One that was never seen is read first.
    world.api.calls();
    assert_eq!(code(&world.bind("x", "uid-x", "n1").await), "PodGone");
    assert_eq!(world.api.calls(), ["GET pods/ns/x"]);
    world.api.put("pods/ns/y", pod_json("y", "uid-y", 100));
    world.bind("y", "uid-y", "n1").await.unwrap();
    assert_eq!(world.api.calls(), ["GET pods/ns/y", POST_A, "POST pods/ns/y/binding"]);
}

/// A controller killed between its two writes: what the next one finds.
async fn after_a_crash(world: &World) {
    world.api.fail(BIND, Fault::Silent);
    world.api.fail(GET_P, Fault::Silent);
    assert!(world.bind("p", "uid-p", "n1").await.is_err());
    world.api.calls();
}

#[tokio::test(start_paused = true)]
async fn the_same_node_again_finds_the_allocation() {
    let world = world();
    after_a_crash(&world).await;
    world.bind("p", "uid-p", "n1").await.unwrap();
    assert_eq!(world.api.calls(), [PATCH_A, BIND], "known from the watch");

    // Before the watch has shown it: found by its name.
    let fresh = self::world();
    let made = world.api.get("vgpuallocations/ns/p-uid-p").unwrap();
    fresh.api.put("vgpuallocations/ns/p-uid-p", made);
    fresh.bind("p", "uid-p", "n1").await.unwrap();
    assert_eq!(fresh.api.calls(), [POST_A, GET_A, PATCH_A, BIND]);
    assert_eq!((fresh.used("n1"), fresh.holds()), (600, 0));
}

#[tokio::test(start_paused = true)]
async fn another_node_undoes_the_stale_one_first() {
    let world = world();
    after_a_crash(&world).await;
    world.bind("p", "uid-p", "n2").await.unwrap();
    assert_eq!(world.api.calls(), [GET_P, PATCH_A, DELETE_A, POST_A, BIND]);
    assert_eq!((world.used("n1"), world.used("n2")), (0, 600));

    // The same, before the watch has shown it.
    let fresh = self::world();
    let mut made = world.api.get("vgpuallocations/ns/p-uid-p").unwrap();
    made["metadata"]["uid"] = json!("stale");
    made["spec"]["nodeName"] = json!("n1");
    made["spec"]["containers"][0]["devices"][0]["uuid"] = json!("GPU-n1");
    fresh.api.put("vgpuallocations/ns/p-uid-p", made);
    fresh.bind("p", "uid-p", "n2").await.unwrap();
    assert_eq!(fresh.api.calls(), [POST_A, GET_A, GET_P, PATCH_A, DELETE_A, POST_A, BIND]);
    assert_eq!((fresh.used("n1"), fresh.used("n2"), fresh.holds()), (0, 600, 0));
}

#[tokio::test(start_paused = true)]
async fn what_a_node_has_acted_on_is_never_undone() {
    let world = world();
    after_a_crash(&world).await;
    let mut made = world.api.get("vgpuallocations/ns/p-uid-p").unwrap();
    made["status"] = json!({"phase": "Prepared", "conditions": [{"type": "Prepared", "status": "True",
        "reason": "Prepared", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"}]});
    world.api.put("vgpuallocations/ns/p-uid-p", made);
    // Our cache still shows it as untouched; the version that the write names does not.
    let result = world.bind("p", "uid-p", "n2").await;
    assert_eq!(code(&result), "AllocationInUse");
    assert_eq!(world.api.calls(), [GET_P, PATCH_A, GET_A]);
    assert!(world.api.get("vgpuallocations/ns/p-uid-p").is_some());
}

#[tokio::test(start_paused = true)]
async fn no_room_is_no_write() {
    let world = world();
    world.pod("q", "uid-q", 600);
    world.bind("p", "uid-p", "n1").await.unwrap();
    world.api.calls();
    let result = world.bind("q", "uid-q", "n1").await;
    assert_eq!(code(&result), "MemoryShort");
    assert!(world.api.calls().is_empty());
    assert_eq!(code(&world.bind("p", "uid-p", "n1").await), "ok", "a bind of what is bound is no error");
}

// BL-08: 20 pods on one node, each call slow: nobody waits for anybody.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn binds_of_different_pods_run_at_once() {
    let world = Arc::new(world());
    let mut tasks = tokio::task::JoinSet::new();
    for number in 0..20 {
        let (name, uid) = (format!("w{number}"), format!("w{number:07}-uid"));
        world.pod(&name, &uid, 100);
        let (world, node) = (Arc::clone(&world), if number % 2 == 0 { "n1" } else { "n2" });
        tasks.spawn(async move { world.bind(&name, &uid, node).await });
    }
    let mut bound = 0;
    while let Some(done) = tasks.join_next().await {
        done.unwrap().unwrap();
        bound += 1;
    }
    assert_eq!((bound, world.used("n1"), world.used("n2"), world.holds()), (20, 1000, 1000, 0));
    assert!(world.binder.turns.is_empty());
    // BL-02: each has a record of its own, and no card is over-given.
    assert!(world.store.read(|facts| facts.ledger().overcommitted().is_empty()));
}

#[tokio::test(start_paused = true)]
async fn the_same_pod_twice_at_once_is_bound_once() {
    let world = Arc::new(world());
    let (first, second) = tokio::join!(world.bind("p", "uid-p", "n1"), world.bind("p", "uid-p", "n1"));
    first.unwrap();
    second.unwrap();
    let calls = world.api.calls();
    assert_eq!(calls.iter().filter(|call| *call == POST_A).count(), 1, "{calls:?}");
    assert_eq!(world.used("n1"), 600);
}

#[tokio::test(start_paused = true)]
async fn a_decider_that_was_first_wins() {
    // Another controller's allocation arrives, with the same sequence and earlier, while ours is being created.
    let world = world();
    world.bind("p", "uid-p", "n1").await.unwrap();
    let theirs = world.api.get("vgpuallocations/ns/p-uid-p").unwrap();
    let loser = self::world();
    loser.api.fail(POST_A, Fault::DoneAndSilent);
    let store = Arc::clone(&loser.store);
    let arrive = async move {
        tokio::time::sleep(Duration::from_millis(50)).await;
        let mut object = theirs;
        object["metadata"]["uid"] = json!("theirs");
        object["metadata"]["creationTimestamp"] = json!("2025-12-31T00:00:00Z");
        object["metadata"]["name"] = json!("other");
        object["spec"]["pod"] = json!({"name": "other", "uid": "uid-other"});
        let object: VGPUAllocation = serde_json::from_value(object).unwrap();
        store.write(|facts| facts.allocation_seen(object));
    };
    let (result, ()) = tokio::join!(loser.bind("p", "uid-p", "n1"), arrive);
    assert_eq!(code(&result), "MemoryShort", "{result:?}");
    assert!(loser.api.get("vgpuallocations/ns/p-uid-p").is_none(), "ours is undone before anything is bound");
    assert_eq!(loser.api.get("pods/ns/p").unwrap()["spec"]["nodeName"], Value::Null);
}

#[tokio::test(start_paused = true)]
async fn a_bind_that_kube_scheduler_has_given_up_writes_nothing() {
    let world = world();
    let turn = world.binder.turns.of("uid-p".into()).await;
    let late = async {
        tokio::time::sleep(LATEST + Duration::from_secs(1)).await;
        drop(turn);
    };
    let (result, ()) = tokio::join!(world.bind("p", "uid-p", "n1"), late);
    assert_eq!(code(&result), "BindTooLate");
    assert!(world.api.calls().is_empty());
    world.bind("p", "uid-p", "n1").await.unwrap();
}

/// Between the look at the allocation and the look at the pod another replica binds it: it is left alone.
#[tokio::test(start_paused = true)]
async fn what_another_replica_binds_meanwhile_is_not_undone() {
    let world = world();
    after_a_crash(&world).await;
    let seen: VGPUAllocation =
        serde_json::from_value(world.api.get("vgpuallocations/ns/p-uid-p").unwrap()).unwrap();
    let mut made = world.api.get("vgpuallocations/ns/p-uid-p").unwrap();
    made["metadata"]["labels"] = json!({"touched": "yes"});
    world.api.put("vgpuallocations/ns/p-uid-p", made);
    let mut pod = world.api.get("pods/ns/p").unwrap();
    pod["spec"]["nodeName"] = json!("n1");
    world.api.put("pods/ns/p", pod);
    let result = undo::remove(&world.binder.cluster, &world.store, &seen).await;
    assert_eq!(code(&result), "AllocationInUse");
    assert_eq!(world.api.calls(), [PATCH_A, GET_A, GET_P]);
    assert!(world.held_back());
}

/// After a long outage the leader has judged an old allocation to lead nowhere, just when another replica binds its pod to
/// it. Whichever of the two writes comes first, the pod is never left bound without an allocation.
#[tokio::test(start_paused = true)]
async fn an_undo_and_a_bind_of_the_same_allocation_do_not_cross() {
    let path = "vgpuallocations/ns/p-uid-p";
    // The bind first: the undo goes by what was read before, and finds the pod bound.
    let world = world();
    after_a_crash(&world).await;
    let judged: VGPUAllocation = serde_json::from_value(world.api.get(path).unwrap()).unwrap();
    world.bind("p", "uid-p", "n1").await.unwrap();
    world.api.calls();
    let undone = undo::remove(&world.binder.cluster, &world.store, &judged).await;
    assert_eq!(code(&undone), "AllocationInUse");
    assert_eq!(world.api.calls(), [PATCH_A, GET_A, GET_P]);
    assert!(world.held_back() && world.api.get(path).is_some());

    // The undo first, whole or half way: the bind sees it and makes a new one.
    for half in [true, false] {
        let world = self::world();
        after_a_crash(&world).await;
        let old = world.api.get(path).unwrap();
        let leader = world.api.cluster();
        let judged: VGPUAllocation = serde_json::from_value(old.clone()).unwrap();
        let stripped = leader.strip_finalizer(&judged).await.unwrap().unwrap();
        if !half {
            leader.delete_allocation(&stripped).await.unwrap();
        }
        world.api.calls();
        world.bind("p", "uid-p", "n1").await.unwrap();
        let calls = world.api.calls();
        assert_eq!(calls.first().map(String::as_str), Some(PATCH_A), "{calls:?}");
        let made = world.api.get(path).unwrap();
        assert_ne!(made["metadata"]["uid"], old["metadata"]["uid"], "half: {half}");
        assert!(world.held_back(), "half: {half}");
        assert_eq!((world.used("n1"), world.holds()), (600, 0), "half: {half}");
    }
}

// A message names the wish once, and its cause once.
#[test]
fn a_request_that_cannot_be_taken_is_said_once() {
    let source = mullion_core::request::RequestError::MemoryTwice { container: "main".to_owned() };
    let error = Error::Request { pod: "ns/p".to_owned(), source: Box::new(source) };
    let said = mullion_telemetry::source_chain(&error);
    assert_eq!(said.matches("container main").count(), 1, "{said}");
}
