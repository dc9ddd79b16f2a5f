//! Cards fail and come back; nodes go and are made anew.

use anyhow::{Context, Result, ensure};
use mullion_crds::gpunode::HealthState;
use mullion_e2e::Scope;
use mullion_e2e::pods::{Build, restarts, slice_pod};
use mullion_e2e::scope::{PATIENCE, eventually};

async fn health(scope: &Scope, node: &str, uuid: &str) -> Result<HealthState> {
    let status = scope.gpu_node(node).await?.status.context("no status")?;
    Ok(status.cards.iter().find(|c| c.uuid == uuid).context("card not listed")?.health.state)
}

/// DP-09 and design section 4, "Health": the blast radius of a lost card is that card; it comes back by itself.
#[tokio::test]
async fn a_lost_card_touches_only_its_own_pods_and_comes_back() -> Result<()> {
    let scope = Scope::new("lost-card").await?;
    for name in ["on-one", "on-other"] {
        let p =
            slice_pod(name, "5000", "10").on("node-b").annotated("hami.io/gpu-scheduler-policy", "spread");
        scope.create(&p).await?;
    }
    let first = scope.running("on-one").await?;
    let second = scope.running("on-other").await?;
    let lost = scope.allocation(&first).await?.spec.containers[0].devices[0].uuid.clone();
    let kept = scope.allocation(&second).await?.spec.containers[0].devices[0].uuid.clone();
    ensure!(lost != kept, "both on {lost}");
    ensure!(scope.lab.slots("node-b")? == 20);

    scope.lab.fake("node-b", &["remove", &lost])?;
    eventually("the card is reported", PATIENCE, || async {
        Ok((health(&scope, "node-b", &lost).await? == HealthState::Unhealthy).then_some(()))
    })
    .await?;
    ensure!(health(&scope, "node-b", &kept).await? == HealthState::Healthy);
    scope.event("on-one", &lost).await?;
    ensure!(
        !scope.events_of("on-other").await?.iter().any(|e| e.contains(&lost)),
        "the other pod was told too"
    );
    // Free slots are hidden, slots in use are not: 2 in use, 10 usable on the card that is left.
    eventually("free slots hidden", PATIENCE, || async {
        Ok((scope.lab.slots("node-b")? == 10).then_some(()))
    })
    .await?;
    // Both pods go on, also over a restart of the kubelet.
    scope.lab.fault("kubelet@node-b", "kill")?;
    scope.lab.fault("kubelet@node-b", "restart")?;
    eventually("plugin registered again", PATIENCE, || async {
        Ok((scope.lab.slots("node-b")? == 10).then_some(()))
    })
    .await?;
    let again = scope.running("on-other").await?;
    let restarts = restarts(&again);
    ensure!(restarts == 0, "the pod on the other card was restarted");
    // New pods land on the card that is left.
    scope.create(&slice_pod("new", "1000", "5").on("node-b")).await?;
    let new = scope.running("new").await?;
    ensure!(scope.allocation(&new).await?.spec.containers[0].devices[0].uuid == kept);

    scope.lab.fake("node-b", &["restore", &lost])?;
    eventually("the card is back", PATIENCE, || async {
        let healthy = health(&scope, "node-b", &lost).await? == HealthState::Healthy;
        Ok((healthy && scope.lab.slots("node-b")? == 20).then_some(()))
    })
    .await?;
    scope.remove().await
}

/// A critical XID marks the card; one that an application caused does not.
#[tokio::test]
async fn only_critical_xids_mark_a_card() -> Result<()> {
    let scope = Scope::new("xid").await?;
    let status = scope.gpu_node("node-a").await?.status.context("no status")?;
    let card = status.cards[3].uuid.clone();
    scope.lab.fake("node-a", &["xid", &card, "31"])?;
    scope.lab.fake("node-a", &["xid", &card, "79"])?;
    let marked = eventually("XID 79 is reported", PATIENCE, || async {
        let status = scope.gpu_node("node-a").await?.status.context("no status")?;
        let card = status.cards.into_iter().find(|c| c.uuid == card).context("card not listed")?;
        Ok((card.health.xid == Some(79)).then_some(card))
    })
    .await?;
    ensure!(marked.health.state == HealthState::Unhealthy);
    scope.lab.fake("node-a", &["restore", &card])?;
    eventually("it recovers", PATIENCE, || async {
        Ok((health(&scope, "node-a", &card).await? == HealthState::Healthy).then_some(()))
    })
    .await?;
    scope.remove().await
}

/// MG-14 as far as it goes for slices, and design section 8, "node deleted, or same name with new hardware": no
/// stale uuid is handed out, allocations of the old node end.
#[tokio::test]
async fn a_node_made_anew_with_other_cards_gives_only_those() -> Result<()> {
    let scope = Scope::new("new-hardware").await?;
    scope.create(&slice_pod("old", "5000", "10").on("node-b")).await?;
    let old = scope.running("old").await?;
    let stale = scope.allocation(&old).await?.spec.containers[0].devices[0].uuid.clone();

    scope.lab.fault("kubelet@node-b", "kill")?;
    scope.lab.fault("agent@node-b", "kill")?;
    scope.lab.kubectl(&["delete", "node", "node-b"])?;
    scope.lab.fake("node-b", &["replace", "0"])?;
    scope.lab.fake("node-b", &["replace", "1"])?;
    // The pod is removed by the cluster's garbage collection of pods on nodes that are gone; here at once.
    scope.lab.kubectl(&["-n", &scope.namespace, "delete", "pod", "old", "--grace-period=0", "--force"])?;
    eventually("the allocation of the node that is gone ends", PATIENCE, || async {
        let left = scope.allocations().list(&kube::api::ListParams::default()).await?;
        Ok(left.items.is_empty().then_some(()))
    })
    .await?;
    scope.lab.fault("kubelet@node-b", "restart")?;
    eventually("the node is back", PATIENCE, || async {
        Ok(scope.lab.kubectl(&["get", "node", "node-b", "-o", "name"]).ok())
    })
    .await?;
    scope.lab.fault("agent@node-b", "restart")?;
    eventually("the new cards are reported", PATIENCE, || async {
        let status = scope.gpu_node("node-b").await?.status.context("no status")?;
        let there = status.cards.len() == 2 && status.cards.iter().all(|c| c.uuid != stale);
        Ok((there && scope.lab.slots("node-b")? == 20).then_some(()))
    })
    .await?;
    scope.create(&slice_pod("new", "5000", "10").on("node-b")).await?;
    let new = scope.running("new").await?;
    let given = scope.allocation(&new).await?.spec.containers[0].devices[0].uuid.clone();
    let status = scope.gpu_node("node-b").await?.status.context("no status")?;
    ensure!(given != stale && status.cards.iter().any(|c| c.uuid == given), "{given}");
    scope.remove().await
}

/// DP-12: the card vanishes between bind and start; the start is refused, the owner is served by another card.
#[tokio::test]
async fn a_card_that_vanished_before_the_start_is_never_handed_out() -> Result<()> {
    let scope = Scope::new("gone-before-start").await?;
    // The agent is paused, so that the bound pod does not start before its card is gone.
    scope.lab.fault("agent@node-b", "stop")?;
    let outcome = async {
        scope.create_set("served", 1, &slice_pod("unused", "5000", "10").on("node-b")).await?;
        let allocation = eventually("bound", PATIENCE, || async {
            Ok(scope.allocations().list(&kube::api::ListParams::default()).await?.items.pop())
        })
        .await?;
        let gone = allocation.spec.containers[0].devices[0].uuid.clone();
        scope.lab.fake("node-b", &["unlist", &gone])?;
        anyhow::Ok((gone, allocation))
    }
    .await;
    scope.lab.fault("agent@node-b", "kill")?;
    scope.lab.fault("agent@node-b", "restart")?;
    let (gone, allocation) = outcome?;
    let served = eventually("the owner is served by the other card", PATIENCE * 2, || async {
        for pod in scope.pods().list(&kube::api::ListParams::default()).await?.items {
            let running = pod.status.as_ref().and_then(|s| s.phase.as_deref()) == Some("Running");
            if running && Some(&allocation.spec.pod.uid) != pod.metadata.uid.as_ref() {
                return Ok(Some(scope.allocation(&pod).await?));
            }
        }
        Ok(None)
    })
    .await;
    scope.lab.fake("node-b", &["restore", &gone])?;
    let served = served?;
    ensure!(served.spec.containers[0].devices[0].uuid != gone);
    scope.remove().await
}

/// Design section 4: what was given of a card that is replaced would reach its successor. The pod is evicted and placed anew,
/// and the successor takes nobody until the pod is released.
#[tokio::test]
async fn the_pod_of_a_replaced_card_is_placed_anew() -> Result<()> {
    let scope = Scope::new("replaced-card").await?;
    scope.create_set("served", 1, &slice_pod("unused", "5000", "10").on("node-b")).await?;
    let running = |not: Option<String>| {
        let scope = scope.clone();
        async move {
            for pod in scope.pods().list(&kube::api::ListParams::default()).await?.items {
                let runs = pod.status.as_ref().and_then(|s| s.phase.as_deref()) == Some("Running");
                if runs && pod.metadata.deletion_timestamp.is_none() && pod.metadata.uid != not {
                    return Ok(Some(pod));
                }
            }
            Ok(None)
        }
    };
    let first = eventually("a pod runs", PATIENCE, || running(None)).await?;
    let old = scope.allocation(&first).await?.spec.containers[0].devices[0].uuid.clone();
    scope.lab.fake("node-b", &["replace", &old])?;
    let second = eventually("another pod runs", PATIENCE * 2, || running(first.metadata.uid.clone())).await?;
    let served = scope.allocation(&second).await?.spec.containers[0].devices[0].uuid.clone();
    let name = first.metadata.name.clone().unwrap_or_default();
    let told = scope.events_of(&name).await?;
    ensure!(told.iter().any(|e| e.contains(&old)), "nothing says why: {told:?}");
    eventually("the successor takes pods", PATIENCE, || async {
        let cards = scope.gpu_node("node-b").await?.status.context("no status")?.cards;
        let well = cards.iter().all(|c| c.uuid != old && c.health.state == HealthState::Healthy);
        ensure!(cards.iter().any(|c| c.uuid == served), "{served} is of no card");
        Ok((well && scope.lab.slots("node-b")? == 20).then_some(()))
    })
    .await?;
    scope.remove().await
}
