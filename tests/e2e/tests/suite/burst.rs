//! Many pods at once: each container its own slice, nothing over-given, nobody waits for another's start.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result, ensure};
use futures::future::try_join_all;
use kube::ResourceExt;
use kube::api::ListParams;
use mullion_crds::vgpuallocation::Phase;
use mullion_e2e::Scope;
use mullion_e2e::pods::{Build, container, pod};

/// 40 containers in 20 pods at once on one node (BL-08, DP-04): every container has its own allocation's limits.
#[tokio::test]
async fn forty_containers_at_once_on_one_node() -> Result<()> {
    let scope = Scope::new("burst").await?;
    // Sizes tell the containers apart: container k of pod n asks for 500 + 20 n + k MiB.
    let ask = |n: usize, k: usize| (500 + 20 * n + k).to_string();
    let limits = |memory: String| {
        vec![
            ("nvidia.com/gpu", "1".to_owned()),
            ("nvidia.com/gpumem", memory),
            ("nvidia.com/gpucores", "2".to_owned()),
        ]
    };
    let made = |n: usize| {
        let containers = (0..2)
            .map(|k| {
                let limits = limits(ask(n, k));
                let limits: Vec<(&str, &str)> = limits.iter().map(|(key, v)| (*key, v.as_str())).collect();
                container(&format!("c{k}"), &limits)
            })
            .collect();
        pod(&format!("burst-{n}"), containers).on("node-a")
    };
    let pods: Vec<_> = (0..20).map(made).collect();
    try_join_all(pods.iter().map(|p| scope.create(p))).await?;
    for n in 0..20 {
        let running = scope.running(&format!("burst-{n}")).await?;
        let allocation = scope.allocation_phase(&running, Phase::Prepared).await?;
        for k in 0..2 {
            let name = format!("c{k}");
            let env =
                scope.exec(&running.name_any(), &name, &["sh", "-c", "echo $CUDA_DEVICE_MEMORY_LIMIT_0"])?;
            ensure!(env.trim() == format!("{}m", ask(n, k)), "burst-{n}/{name} has {env}");
            let given = allocation
                .spec
                .containers
                .iter()
                .find(|c| c.name == name)
                .context("not in the allocation")?;
            ensure!(given.devices[0].memory_mib.to_string() == ask(n, k), "{given:?}");
        }
    }
    let all = scope.allocations().list(&ListParams::default()).await?;
    ensure!(all.items.len() == 20, "{} allocations", all.items.len());
    let node = scope.gpu_node("node-a").await?.status.context("no status")?;
    let mut memory: BTreeMap<&str, i64> = BTreeMap::new();
    let mut cores: BTreeMap<&str, u32> = BTreeMap::new();
    let mut slots: BTreeMap<&str, u32> = BTreeMap::new();
    let mut grants = BTreeSet::new();
    for allocation in &all.items {
        for given in &allocation.spec.containers {
            for device in &given.devices {
                *memory.entry(&device.uuid).or_default() += device.memory_mib;
                *cores.entry(&device.uuid).or_default() += device.core_percent;
                *slots.entry(&device.uuid).or_default() += 1;
            }
        }
        for prepared in allocation.status.iter().flat_map(|s| &s.containers) {
            ensure!(grants.insert(prepared.grant.clone()), "grant {} twice", prepared.grant);
        }
    }
    ensure!(grants.len() == 40, "{} grants", grants.len());
    for card in &node.cards {
        let uuid = card.uuid.as_str();
        ensure!(memory.get(uuid).copied().unwrap_or(0) <= card.memory_mib, "{uuid}: {memory:?}");
        ensure!(cores.get(uuid).copied().unwrap_or(0) <= 100, "{uuid}: {cores:?}");
        ensure!(slots.get(uuid).copied().unwrap_or(0) <= 10, "{uuid}: {slots:?}");
    }
    scope.remove().await
}
