//! Which node and which card, through the real scheduler.

use std::collections::BTreeSet;

use anyhow::{Result, ensure};
use mullion_e2e::Scope;
use mullion_e2e::pods::{Build, container, pod, slice_pod};

async fn cards_of(scope: &Scope, name: &str) -> Result<BTreeSet<String>> {
    let made = scope.running(name).await?;
    let allocation = scope.allocation(&made).await?;
    Ok(allocation.spec.containers.iter().flat_map(|c| &c.devices).map(|d| d.uuid.clone()).collect())
}

/// Card policies by annotation.
#[tokio::test]
async fn binpack_fills_a_card_and_spread_takes_the_emptiest() -> Result<()> {
    let scope = Scope::new("policies").await?;
    for (policy, want) in [("binpack", 1), ("spread", 3)] {
        let mut cards = BTreeSet::new();
        for n in 0..3 {
            let name = format!("{policy}-{n}");
            let p =
                slice_pod(&name, "5000", "10").on("node-a").annotated("hami.io/gpu-scheduler-policy", policy);
            scope.create(&p).await?;
            cards.extend(cards_of(&scope, &name).await?);
        }
        ensure!(cards.len() == want, "{policy}: {cards:?}");
        for n in 0..3 {
            scope.delete(&format!("{policy}-{n}")).await?;
        }
    }
    scope.remove().await
}

/// FS-12: a container's cards are distinct, sizes count per card, and slots are the ledger's business.
#[tokio::test]
async fn sizes_count_per_card_and_cards_are_distinct() -> Result<()> {
    let scope = Scope::new("per-card").await?;
    let two = [("nvidia.com/gpu", "2"), ("nvidia.com/gpumem", "30000"), ("nvidia.com/gpucores", "10")];
    scope.create(&pod("two", vec![container("main", &two)]).on("node-b")).await?;
    ensure!(cards_of(&scope, "two").await?.len() == 2);
    let never = [
        ("three-cards-of-two", vec![("nvidia.com/gpu", "3"), ("nvidia.com/gpumem", "100")]),
        ("more-than-a-card", vec![("nvidia.com/gpu", "1"), ("nvidia.com/gpumem", "50000")]),
    ];
    for (name, limits) in never {
        scope.create(&pod(name, vec![container("main", &limits)]).on("node-b")).await?;
        let message = scope.unschedulable(name).await?;
        // Fixed texts: no names and no numbers of ours, else the scheduler writes and retries for ever.
        ensure!(!message.contains("MiB") && !message.contains("GPU-"), "{name}: {message}");
    }
    scope.remove().await
}

/// A bare count is a whole card: alone on it, all of it.
#[tokio::test]
async fn a_bare_count_is_a_whole_card() -> Result<()> {
    let scope = Scope::new("whole-card").await?;
    scope.create(&pod("whole", vec![container("main", &[("nvidia.com/gpu", "2")])]).on("node-b")).await?;
    let made = scope.running("whole").await?;
    let allocation = scope.allocation(&made).await?;
    let node = scope.gpu_node("node-b").await?;
    let memory = node.status.map(|s| s.cards[0].memory_mib).unwrap_or_default();
    for device in &allocation.spec.containers[0].devices {
        ensure!((device.memory_mib, device.core_percent) == (memory, 100), "{device:?}, card {memory}");
    }
    scope.create(&slice_pod("beside", "100", "0").on("node-b")).await?;
    scope.unschedulable("beside").await?;
    scope.delete("whole").await?;
    scope.running("beside").await?;
    scope.remove().await
}

/// The admin's wishes in `GPUNode.spec` count at once: a closed node takes nothing new.
#[tokio::test]
async fn a_cordoned_gpu_node_takes_nothing_new() -> Result<()> {
    let scope = Scope::new("cordon").await?;
    let cordon = |wish: &str| {
        let patch = format!(r#"{{"spec":{{"cordon":{wish}}}}}"#);
        scope.lab.kubectl(&["patch", "gpunode", "node-b", "--type=merge", "-p", &patch])
    };
    cordon("true")?;
    let shown = scope.lab.kubectl(&["get", "gn", "node-b", "-o", "wide"])?;
    ensure!(
        shown.contains("CORDON") && shown.split_whitespace().any(|word| word == "true"),
        "a cordoned node looks like any other:\n{shown}"
    );
    let outcome = async {
        scope.create(&slice_pod("waits", "100", "0").on("node-b")).await?;
        scope.unschedulable("waits").await
    }
    .await;
    cordon("null")?;
    outcome?;
    scope.running("waits").await?;
    scope.remove().await
}
