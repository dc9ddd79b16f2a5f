//! Two deciders at once on a full node: never over-given; the loser is evicted and its owner's new pod placed.

use anyhow::{Context, Result, ensure};
use kube::ResourceExt;
use kube::api::ListParams;
use mullion_crds::VGPUAllocation;
use mullion_e2e::Scope;
use mullion_e2e::pods::{Build, slice_pod};
use mullion_e2e::scope::{PATIENCE, eventually};

const CONTROLLER: &str = "--as=system:serviceaccount:mullion-system:mullion-controller";

/// Ends the pause of the schedulers however the test ends.
struct Paused<'a>(&'a Scope);

impl<'a> Paused<'a> {
    fn new(scope: &'a Scope) -> Result<Self> {
        let paused = Self(scope);
        scope.lab.revive()?;
        for part in ["scheduler", "scheduler-2"] {
            scope.lab.fault(part, "stop")?;
        }
        Ok(paused)
    }
}

impl Drop for Paused<'_> {
    fn drop(&mut self) {
        for part in ["scheduler", "scheduler-2"] {
            let _ = self.0.lab.fault(part, "cont");
        }
        // One that lost its lease meanwhile exits at once, and is started again.
        std::thread::sleep(std::time::Duration::from_secs(1));
        let _ = self.0.lab.revive();
    }
}

/// Memory that is free on the fuller card of node-b after this: `free`; on the other: nothing to speak of.
async fn fill_node_b(scope: &Scope, free: i64) -> Result<()> {
    let status = scope.gpu_node("node-b").await?.status.context("no status")?;
    let memory = status.cards[0].memory_mib;
    for (name, size) in [("filler-one", memory - 100), ("filler-two", memory - free)] {
        scope.create(&slice_pod(name, &size.to_string(), "10").on("node-b")).await?;
        scope.running(name).await?;
    }
    Ok(())
}

fn memory_held(allocations: &[VGPUAllocation], node: &str) -> std::collections::BTreeMap<String, i64> {
    let mut held = std::collections::BTreeMap::new();
    for allocation in allocations.iter().filter(|a| a.spec.node_name == node) {
        let prepared = allocation
            .status
            .as_ref()
            .is_some_and(|s| s.conditions.iter().any(|c| c.type_ == "Prepared" && c.status == "True"));
        for device in allocation.spec.containers.iter().flat_map(|c| &c.devices).filter(|_| prepared) {
            *held.entry(device.uuid.clone()).or_default() += device.memory_mib;
        }
    }
    held
}

/// What a paused decider writes when it wakes up: a second allocation that does not fit beside the first, and
/// the binding of its pod. The node refuses the later one, the controller evicts its pod, its owner's new pod
/// is placed where there is room.
#[tokio::test]
async fn a_stale_decision_is_voided_and_its_owner_served_elsewhere() -> Result<()> {
    let scope = Scope::new("stale-decision").await?;
    fill_node_b(&scope, 10_000).await?;
    scope.create(&slice_pod("winner", "9000", "10").on("node-b")).await?;
    let winner = scope.running("winner").await?;
    let won = scope.allocation(&winner).await?;

    let paused = Paused::new(&scope)?;
    scope.create_set("loser", 1, &slice_pod("unused", "9000", "10")).await?;
    let loser = eventually("the set's pod", PATIENCE, || async {
        Ok(scope.pods().list(&ListParams::default().labels("app=loser")).await?.items.pop())
    })
    .await?;
    let uid = loser.uid().unwrap_or_default();
    let mut stale = won.clone();
    stale.metadata = kube::api::ObjectMeta {
        name: Some(mullion_crds::object::allocation_name(&loser.name_any(), &uid)),
        namespace: Some(scope.namespace.clone()),
        finalizers: Some(vec!["mullion.io/release".to_owned()]),
        owner_references: serde_json::from_value(serde_json::json!([
            {"apiVersion": "v1", "kind": "Pod", "name": loser.name_any(), "uid": uid}]))?,
        ..kube::api::ObjectMeta::default()
    };
    stale.status = None;
    stale.spec.pod.name = loser.name_any();
    stale.spec.pod.uid.clone_from(&uid);
    stale.spec.sequence = won.spec.sequence + 1;
    let files = std::env::temp_dir();
    let file = files.join(format!("stale-{uid}.json"));
    std::fs::write(&file, serde_json::to_string(&stale)?)?;
    scope.lab.kubectl(&[CONTROLLER, "create", "-f", &file.to_string_lossy()])?;
    let binding = serde_json::json!({"apiVersion": "v1", "kind": "Binding",
        "metadata": {"name": loser.name_any(), "namespace": scope.namespace, "uid": uid},
        "target": {"apiVersion": "v1", "kind": "Node", "name": "node-b"}});
    std::fs::write(&file, binding.to_string())?;
    let path = format!("/api/v1/namespaces/{}/pods/{}/binding", scope.namespace, loser.name_any());
    scope.lab.kubectl(&["create", "--raw", &path, "-f", &file.to_string_lossy()])?;
    std::fs::remove_file(&file)?;

    eventually("the loser is evicted", PATIENCE, || async {
        let now = scope.pods().get_opt(&loser.name_any()).await?;
        Ok(now
            .is_none_or(|p| p.uid().as_deref() != Some(&uid) || p.metadata.deletion_timestamp.is_some())
            .then_some(()))
    })
    .await
    .context(scope.story(&loser.name_any()).await)?;
    drop(paused);
    let placed = eventually("the owner's new pod runs", PATIENCE, || async {
        let pods = scope.pods().list(&ListParams::default().labels("app=loser")).await?.items;
        Ok(pods.into_iter().find(|p| {
            p.uid().as_deref() != Some(&uid)
                && p.status.as_ref().and_then(|s| s.phase.as_deref()) == Some("Running")
        }))
    })
    .await?;
    ensure!(scope.allocation(&placed).await?.spec.node_name == "node-a");
    let still = scope.running("winner").await?;
    ensure!(still.uid() == winner.uid(), "the winner was touched");
    eventually("the void allocation is gone", PATIENCE, || async {
        let left = scope.allocations().list(&ListParams::default()).await?;
        Ok((!left.items.iter().any(|a| a.spec.pod.uid == uid)).then_some(()))
    })
    .await?;
    scope.remove().await
}

/// Both controllers are asked at the same moment to bind a pod each into room for one.
#[tokio::test]
async fn two_controllers_binding_at_once_never_over_give() -> Result<()> {
    let scope = Scope::new("bind-at-once").await?;
    fill_node_b(&scope, 10_000).await?;
    let status = scope.gpu_node("node-b").await?.status.context("no status")?;
    for round in 0..5 {
        let paused = Paused::new(&scope)?;
        let mut calls = Vec::new();
        for (part, name) in
            [("controller", format!("left-{round}")), ("controller-2", format!("right-{round}"))]
        {
            let made = scope.create(&slice_pod(&name, "9000", "10").on("node-b")).await?;
            let body = serde_json::json!({"PodName": name, "PodNamespace": scope.namespace,
                "PodUID": made.uid().unwrap_or_default(), "Node": "node-b"});
            calls.push((part, body.to_string()));
        }
        // The pods reach both controllers' caches.
        tokio::time::sleep(std::time::Duration::from_millis(500)).await;
        let threads: Vec<_> = calls
            .into_iter()
            .map(|(part, body)| {
                let lab = scope.lab;
                std::thread::spawn(move || {
                    lab.beside_controller(
                        part,
                        &[
                            "curl",
                            "-s",
                            "-m",
                            "30",
                            "-H",
                            "Content-Type: application/json",
                            "-d",
                            &body,
                            "http://127.0.0.1:9396/bind",
                        ],
                    )
                })
            })
            .collect();
        for thread in threads {
            thread.join().map_err(|_| anyhow::anyhow!("a bind call died"))??;
        }
        let names = [format!("left-{round}"), format!("right-{round}")];
        eventually("exactly one of the two runs", PATIENCE, || async {
            let mut running = 0;
            for name in &names {
                let phase = scope.pods().get_opt(name).await?.and_then(|p| p.status).and_then(|s| s.phase);
                running += usize::from(phase.as_deref() == Some("Running"));
            }
            let all = scope.allocations().list(&ListParams::default()).await?;
            for (uuid, held) in memory_held(&all.items, "node-b") {
                let card = status.cards.iter().find(|c| c.uuid == uuid).context("unknown card")?;
                ensure!(held <= card.memory_mib, "{uuid}: {held} MiB given of {}", card.memory_mib);
            }
            ensure!(running < 2, "both run");
            Ok((running == 1).then_some(()))
        })
        .await?;
        drop(paused);
        for name in &names {
            scope.delete(name).await?;
        }
    }
    scope.remove().await
}

/// HA-01, HA-02: leadership goes from one pair to the other and back under load. Each pod is placed once, placing
/// goes on within the lease's time, and a controller that comes back decides only on what it has read since.
#[tokio::test]
async fn leadership_goes_there_and_back_under_load() -> Result<()> {
    let scope = Scope::new("there-and-back").await?;
    for (term, (down, other)) in [("", "-2"), ("-2", ""), ("", "-2")].into_iter().enumerate() {
        scope.lab.revive()?;
        for part in [format!("scheduler{down}"), format!("controller{down}")] {
            scope.lab.fault(&part, "kill")?;
        }
        let begun = std::time::Instant::now();
        for n in 0..5 {
            let name = format!("t{term}-{n}");
            // The API server tries the webhook of the pair that is left by itself.
            eventually("let in", PATIENCE, || async {
                scope.create(&slice_pod(&name, "500", "2")).await.map(Some)
            })
            .await?;
        }
        for n in 0..5 {
            scope.running(&format!("t{term}-{n}")).await?;
        }
        // A scheduler's lease lasts 15 s; beside that only ordinary work may pass.
        ensure!(begun.elapsed() < std::time::Duration::from_secs(45), "term {term}: {:?}", begun.elapsed());
        for part in [format!("controller{down}"), format!("scheduler{down}")] {
            scope.lab.fault(&part, "restart")?;
        }
        let ready = format!("controller{down} is ready again");
        let probe = ["curl", "-sf", "-o", "/dev/null", "http://127.0.0.1:9395/readyz"];
        eventually(&ready, PATIENCE, || async {
            Ok(scope.lab.beside_controller(&format!("controller{down}"), &probe).ok())
        })
        .await?;
        // Both see the same: the ledger of neither differs from a fold of what the API server has.
        for part in [format!("controller{down}"), format!("controller{other}")] {
            let metrics =
                scope.lab.beside_controller(&part, &["curl", "-sf", "http://127.0.0.1:9395/metrics"])?;
            let drift = metrics.lines().find(|l| l.contains("ledger_drift") && !l.starts_with('#'));
            ensure!(drift.is_some_and(|l| l.ends_with(" 0")), "{part}: {drift:?}");
        }
    }
    let all = scope.allocations().list(&ListParams::default()).await?.items;
    ensure!(all.len() == 15, "{} allocations of 15 pods", all.len());
    scope.remove().await
}
