//! A HAMi-style pod as it is: what its container has is exactly what its allocation says.

use anyhow::{Context, Result, ensure};
use kube::ResourceExt;
use mullion_crds::vgpuallocation::Phase;
use mullion_e2e::Scope;
use mullion_e2e::pods::{Build, slice_pod};
use mullion_e2e::scope::{PATIENCE, eventually};

#[tokio::test]
async fn a_hami_pod_runs_on_exactly_its_slice() -> Result<()> {
    let scope = Scope::new("demo").await?;
    scope.create(&slice_pod("hami-pod", "3000", "30").on("node-a")).await?;
    let made = scope.running("hami-pod").await?;
    let allocation = scope.allocation_phase(&made, Phase::Prepared).await?;
    let device = allocation.spec.containers[0].devices[0].clone();
    ensure!((device.memory_mib, device.core_percent) == (3000, 30), "{device:?}");
    ensure!(allocation.spec.pod.uid == made.uid().unwrap_or_default());
    ensure!(allocation.spec.node_name == "node-a");

    // Environment: HAMi's names and values, NVIDIA_VISIBLE_DEVICES excepted.
    let env = scope.exec("hami-pod", "main", &["env"])?;
    for line in [
        "CUDA_DEVICE_MEMORY_LIMIT_0=3000m",
        "CUDA_DEVICE_SM_LIMIT=30",
        "CUDA_DEVICE_MEMORY_SHARED_CACHE=/usr/local/vgpu/usage.cache",
        "NVIDIA_VISIBLE_DEVICES=void",
    ] {
        ensure!(env.lines().any(|l| l == line), "{line} is missing in {env}");
    }

    // Device nodes: the one card, by its minor, and no other.
    let node = scope.gpu_node("node-a").await?;
    let status = node.status.context("GPUNode without status")?;
    let card = status.cards.iter().find(|c| c.uuid == device.uuid).context("unknown card")?;
    let nodes = scope.exec("hami-pod", "main", &["sh", "-c", "ls -1 /dev | grep '^nvidia[0-9]' || true"])?;
    ensure!(nodes.trim() == format!("nvidia{}", card.minor), "{nodes:?}, minor {}", card.minor);
    scope.exec("hami-pod", "main", &["test", "-c", "/dev/nvidiactl"])?;
    scope.exec("hami-pod", "main", &["test", "-c", "/dev/nvidia-uvm"])?;

    // Control page: the limits, read-only; usage file: fresh, in HAMi's layout.
    let grant = allocation
        .status
        .as_ref()
        .and_then(|s| s.containers.first())
        .map(|c| c.grant.clone())
        .context("no grant in the status")?;
    // The agent's sign of life may come between the two looks.
    eventually("the container sees the node's page", PATIENCE, || async {
        let path = format!("/var/lib/mullion/pages/{grant}");
        let page = scope.lab.on_node("node-a", &["base64", "-w0", &path])?;
        let inside = scope.exec("hami-pod", "main", &["base64", "-w0", "/usr/local/vgpu/control.page"])?;
        Ok((page.trim() == inside.trim()).then_some(()))
    })
    .await?;
    let write = scope.exec("hami-pod", "main", &["sh", "-c", "echo x >> /usr/local/vgpu/control.page"]);
    ensure!(write.is_err(), "the page can be written in the container");
    let magic = scope.exec(
        "hami-pod",
        "main",
        &["sh", "-c", "head -c4 /usr/local/vgpu/usage.cache | od -An -tx1"],
    )?;
    ensure!(magic.split_whitespace().collect::<String>() == "4ef72f01", "magic {magic:?}");

    // The CDI spec on the node: one device, that grant, that card.
    let spec =
        scope.lab.on_node("node-a", &["cat", &format!("/var/run/cdi/mullion.io-grant-{grant}.json")])?;
    let spec: serde_json::Value = serde_json::from_str(&spec)?;
    ensure!(spec["kind"] == "mullion.io/grant", "{spec}");
    ensure!(spec["devices"].as_array().is_some_and(|d| d.len() == 1) && spec["devices"][0]["name"] == grant);

    // The audit log tells the story, and says who had the card.
    let uid = made.uid().unwrap_or_default();
    let story = scope.lab.audit("node-a", &["pod", &format!("{}/hami-pod", scope.namespace)])?;
    ensure!(story.to_string().contains(&uid), "{story}");
    let now = jiff::Timestamp::now().to_string();
    let holders = scope.lab.audit("node-a", &["who-had", "--card", &device.uuid, "--at", &now])?;
    ensure!(holders.to_string().contains(&uid), "{holders}");

    // Gone: the spec, the page, the usage folder and the allocation.
    scope.delete("hami-pod").await?;
    let left = scope.lab.on_node(
        "node-a",
        &["sh", "-c", &format!("ls /var/run/cdi /var/lib/mullion/pages /usr/local/vgpu/containers | grep -e {grant} -e {uid} || true")],
    )?;
    ensure!(left.trim().is_empty(), "left on the node: {left}");
    let verify = scope.lab.audit("node-a", &["verify"])?;
    ensure!(!verify.to_string().contains("\"ok\":false"), "{verify}");
    scope.remove().await
}
