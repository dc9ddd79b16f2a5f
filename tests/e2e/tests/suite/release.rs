//! Capacity comes back when, and only when, nothing of the pod is left.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use kube::api::{DeleteParams, ListParams};
use mullion_crds::vgpuallocation::Phase;
use mullion_e2e::Scope;
use mullion_e2e::pods::{Build, pod, running, slice, slice_pod};
use mullion_e2e::scope::{PATIENCE, eventually};

/// FS-10: a pod that waits for memory is placed within seconds of the release, with nobody else's help.
#[tokio::test]
async fn a_release_wakes_the_pod_that_waits_for_it() -> Result<()> {
    let scope = Scope::new("poke").await?;
    scope.create(&slice_pod("one", "30000", "10").on("node-b")).await?;
    scope.create(&slice_pod("two", "30000", "10").on("node-b")).await?;
    scope.running("one").await?;
    scope.running("two").await?;
    scope.create(&slice_pod("waits", "30000", "10").on("node-b")).await?;
    scope.unschedulable("waits").await?;
    scope.delete("one").await?;
    let released = Instant::now();
    scope.running("waits").await?;
    // Generous against a busy machine, far below the five minutes that an unwoken pod sleeps.
    ensure!(released.elapsed() < Duration::from_secs(15), "it took {:?}", released.elapsed());
    scope.remove().await
}

/// A Completed pod keeps its object; its slice is free.
#[tokio::test]
async fn a_completed_pod_frees_its_slice() -> Result<()> {
    let scope = Scope::new("completed").await?;
    let mut p = pod("job", vec![running("main", &slice("30000", "10"), "true")]).on("node-b");
    if let Some(spec) = &mut p.spec {
        spec.restart_policy = Some("Never".to_owned());
    }
    scope.create(&p).await?;
    scope.phase("job", "Succeeded").await?;
    // The audit log has the whole of it, although the container was over before anybody could have seen it run.
    let name = format!("{}/job", scope.namespace);
    eventually("the run is in the audit log", PATIENCE, || async {
        let rows = scope.lab.audit("node-b", &["pod", &name])?;
        let rows = rows.as_array().context("no rows")?;
        let kinds: BTreeSet<&str> = rows.iter().filter_map(|r| r["kind"].as_str()).collect();
        let want = ["AllocationReserved", "Prepared", "ContainerStarted", "Released"];
        Ok(want.iter().all(|kind| kinds.contains(kind)).then_some(()))
    })
    .await?;
    for name in ["next-one", "next-two"] {
        scope.create(&slice_pod(name, "30000", "10").on("node-b")).await?;
    }
    scope.running("next-one").await?;
    scope.running("next-two").await?;
    scope.remove().await
}

/// BL-01, BL-05: a pod deleted between bind and start holds nobody up.
#[tokio::test]
async fn a_pod_deleted_after_bind_frees_its_slice_at_once() -> Result<()> {
    let scope = Scope::new("deleted-early").await?;
    for round in 0..3 {
        let name = format!("early-{round}");
        scope.create(&slice_pod(&name, "40000", "10").on("node-b")).await?;
        eventually("bound", PATIENCE, || async {
            Ok(scope.pods().get(&name).await?.spec.and_then(|s| s.node_name))
        })
        .await?;
        let now = DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::default() };
        scope.pods().delete(&name, &now).await?;
        let other = format!("other-{round}");
        let start = Instant::now();
        scope.create(&slice_pod(&other, "1000", "10").on("node-b")).await?;
        eventually("the next pod is bound", PATIENCE, || async {
            let p = scope.pods().get(&other).await?;
            Ok(p.spec.and_then(|s| s.node_name))
        })
        .await?;
        ensure!(start.elapsed() < Duration::from_secs(2), "round {round}: {:?}", start.elapsed());
        scope.delete(&other).await?;
    }
    scope.remove().await
}

/// A namespace that goes away as a whole leaves nothing, in the cluster and on the nodes.
#[tokio::test]
async fn a_namespace_goes_with_everything_in_it() -> Result<()> {
    let scope = Scope::new("whole-namespace").await?;
    for n in 0..4 {
        scope.create(&slice_pod(&format!("p{n}"), "1000", "5")).await?;
    }
    for n in 0..4 {
        scope.running(&format!("p{n}")).await?;
    }
    scope.lab.kubectl(&["delete", "namespace", &scope.namespace, "--wait=false"])?;
    let namespace = scope.namespace.clone();
    eventually("all of it gone", PATIENCE, || async {
        let left =
            scope.lab.kubectl(&["get", "namespace", &namespace, "--ignore-not-found", "-o", "name"])?;
        Ok(left.trim().is_empty().then_some(()))
    })
    .await?;
    ensure!(scope.allocations().list(&ListParams::default()).await?.items.is_empty());
    Ok(())
}

/// A tenant cannot keep or fake a release: the phase follows the node's proof.
#[tokio::test]
async fn an_allocation_is_prepared_only_by_its_node() -> Result<()> {
    let scope = Scope::new("phases").await?;
    scope.create(&slice_pod("steady", "1000", "5").on("node-a")).await?;
    let made = scope.running("steady").await?;
    let prepared = scope.allocation_phase(&made, Phase::Prepared).await?;
    let finalizers = prepared.metadata.finalizers.unwrap_or_default();
    ensure!(finalizers == ["mullion.io/release"], "{finalizers:?}");
    scope.remove().await
}

/// Decision 0003: somebody who may takes an allocation away while its pod runs. Its node keeps the cards for the pod, so
/// nothing is placed there in vain, and nothing is evicted; when the pod ends all is well again.
#[tokio::test]
async fn a_node_waits_for_a_pod_whose_allocation_was_removed_by_hand() -> Result<()> {
    let scope = Scope::new("stripped").await?;
    scope.create(&slice_pod("robbed", "1000", "10").on("node-b")).await?;
    let made = scope.running("robbed").await?;
    let allocation = scope.allocation_phase(&made, Phase::Prepared).await?;
    let name = allocation.metadata.name.unwrap_or_default();
    let none = kube::api::Patch::Merge(serde_json::json!({"metadata": {"finalizers": null}}));
    scope.allocations().patch(&name, &kube::api::PatchParams::default(), &none).await?;
    scope.allocations().delete(&name, &DeleteParams::default()).await?;
    eventually("the allocation is gone", PATIENCE, || async {
        Ok(scope.allocations().get_opt(&name).await?.is_none().then_some(()))
    })
    .await?;
    scope.create(&slice_pod("next", "1000", "10").on("node-b")).await?;
    let message = scope.unschedulable("next").await?;
    ensure!(message.contains("not known which GPUs are taken"), "{message}");
    scope.create(&slice_pod("elsewhere", "1000", "10").on("node-a")).await?;
    scope.running("elsewhere").await?;
    let told = scope.event("robbed", "takes no new GPU pods until it has ended").await?;
    ensure!(told.contains("AllocationMissing") || told.contains("without its allocation"), "{told}");
    let still = scope.pods().get("robbed").await?;
    ensure!(still.metadata.deletion_timestamp.is_none(), "a pod that works was evicted");
    ensure!(scope.pods().get("next").await?.spec.and_then(|s| s.node_name).is_none(), "bound in vain");
    scope.delete("robbed").await?;
    scope.running("next").await?;
    scope.remove().await
}
