//! What is let in, what is refused and with which words.

use anyhow::{Result, ensure};
use kube::ResourceExt;
use kube::api::{Patch, PatchParams};
use mullion_e2e::Scope;
use mullion_e2e::pods::{Build, container, pod, slice, slice_pod};
use mullion_e2e::scope::{PATIENCE, eventually};

/// WH-02, WH-03: the API server fills in `default-scheduler`, so both spellings are one.
#[tokio::test]
async fn default_scheduler_is_taken_over_and_others_are_refused() -> Result<()> {
    let scope = Scope::new("scheduler-names").await?;
    for name in [None, Some("default-scheduler"), Some("hami-scheduler"), Some("mullion-scheduler")] {
        let mut p = slice_pod(&format!("named-{}", name.unwrap_or("none")), "1000", "10");
        if let Some(spec) = &mut p.spec {
            spec.scheduler_name = name.map(str::to_owned);
        }
        let made = scope.create(&p).await?;
        let scheduler = made.spec.and_then(|s| s.scheduler_name);
        ensure!(scheduler.as_deref() == Some("mullion-scheduler"), "{name:?} became {scheduler:?}");
    }
    let mut other = slice_pod("other", "1000", "10");
    if let Some(spec) = &mut other.spec {
        spec.scheduler_name = Some("volcano".to_owned());
    }
    let refusal = scope.refusal(&other).await?;
    ensure!(refusal.contains("volcano") && refusal.contains("schedulerName"), "{refusal}");
    let plain = scope.create(&pod("plain", vec![container("main", &[])])).await?;
    let scheduler = plain.spec.and_then(|s| s.scheduler_name);
    ensure!(scheduler.as_deref() == Some("default-scheduler"), "a pod without GPUs became {scheduler:?}");
    scope.remove().await
}

/// WH-09, WH-10, FS-04, and what is not built yet: each refusal names the field and the value.
#[tokio::test]
async fn wrong_wishes_are_refused_with_the_field_and_the_value() -> Result<()> {
    let scope = Scope::new("wrong-wishes").await?;
    let with = |limits: &[(&str, &str)]| pod("wrong", vec![container("main", limits)]);
    let cases = vec![
        ("binary suffix", with(&slice("16Gi", "10")), vec!["nvidia.com/gpumem", "16Gi"]),
        ("fraction", with(&slice("1500m", "10")), vec!["nvidia.com/gpumem", "1500m"]),
        ("too much compute", with(&slice("1000", "101")), vec!["nvidia.com/gpucores", "101"]),
        (
            "memory twice",
            with(&[
                ("nvidia.com/gpu", "1"),
                ("nvidia.com/gpumem", "1"),
                ("nvidia.com/gpumem-percentage", "5"),
            ]),
            vec!["nvidia.com/gpumem", "nvidia.com/gpumem-percentage"],
        ),
        (
            "priority is not built yet",
            with(&[("nvidia.com/gpu", "1"), ("nvidia.com/priority", "1")]),
            vec!["nvidia.com/priority"],
        ),
        ("MIG is not built yet", with(&[("nvidia.com/mig-1g.10gb", "1")]), vec!["nvidia.com/mig-1g.10gb"]),
        // WH-08
        (
            "misspelt",
            with(&[("nvidia.com/gpu", "1"), ("nvidia.com/gpu-mem", "1")]),
            vec!["nvidia.com/gpu-mem"],
        ),
        // FS-04
        (
            "unknown policy",
            slice_pod("wrong", "1000", "10").annotated("hami.io/gpu-scheduler-policy", "pack"),
            vec!["hami.io/gpu-scheduler-policy", "pack", "binpack"],
        ),
        (
            "its own limit lifted",
            slice_pod("wrong", "1000", "10").with_env("GPU_CORE_UTILIZATION_POLICY", "disable"),
            vec!["GPU_CORE_UTILIZATION_POLICY", "disable", "main"],
        ),
        (
            "no priority",
            slice_pod("wrong", "1000", "10").with_env("CUDA_TASK_PRIORITY", "high"),
            vec!["CUDA_TASK_PRIORITY", "high", "main"],
        ),
        (
            "card choice is not built yet",
            slice_pod("wrong", "1000", "10").annotated("nvidia.com/use-gpuuuid", "GPU-1"),
            vec!["nvidia.com/use-gpuuuid"],
        ),
    ];
    for (case, wrong, needles) in cases {
        let refusal = scope.refusal(&wrong).await?;
        for needle in needles {
            ensure!(refusal.contains(needle), "{case}: {needle:?} is missing in {refusal}");
        }
    }
    // WH-09
    let mut placed = slice_pod("placed", "1000", "10");
    if let Some(spec) = &mut placed.spec {
        spec.node_name = Some("node-a".to_owned());
    }
    let refusal = scope.refusal(&placed).await?;
    ensure!(refusal.contains("nodeName") && refusal.contains("node-a"), "{refusal}");
    scope.remove().await
}

/// WH-06: state that a scheduler of another make keeps in annotations is never believed, nor let in.
#[tokio::test]
async fn owned_annotations_are_refused_on_create_and_update() -> Result<()> {
    let scope = Scope::new("owned-annotations").await?;
    let keys = [
        "hami.io/vgpu-node",
        "hami.io/vgpu-devices-allocated",
        "hami.io/vgpu-devices-to-allocate",
        "hami.io/bind-phase",
        "hami.io/bind-time",
    ];
    scope.create(&slice_pod("honest", "1000", "10")).await?;
    for key in keys {
        let refusal = scope.refusal(&slice_pod("forged", "1000", "10").annotated(key, "node-a")).await?;
        ensure!(refusal.contains(key), "create with {key}: {refusal}");
        let patch = serde_json::json!({"metadata": {"annotations": {key: "node-a"}}});
        let outcome = scope.pods().patch("honest", &PatchParams::default(), &Patch::Merge(&patch)).await;
        let Err(error) = outcome else { anyhow::bail!("update with {key} was accepted") };
        ensure!(error.to_string().contains(key), "update with {key}: {error}");
    }
    scope.remove().await
}

/// WH-12: only memory given: one card, compute best effort, and two such pods share a card.
#[tokio::test]
async fn memory_alone_leaves_the_compute_shared() -> Result<()> {
    let scope = Scope::new("memory-alone").await?;
    for name in ["first", "second"] {
        let p = pod(name, vec![container("main", &[("nvidia.com/gpumem", "3000")])])
            .on("node-a")
            .annotated("hami.io/gpu-scheduler-policy", "binpack");
        scope.create(&p).await?;
    }
    let mut cards = Vec::new();
    for name in ["first", "second"] {
        let made = scope.running(name).await?;
        let allocation = scope.allocation(&made).await?;
        let device = &allocation.spec.containers[0].devices[0];
        ensure!(device.memory_mib == 3000 && device.core_percent == 0, "{device:?}");
        cards.push(device.uuid.clone());
    }
    ensure!(cards[0] == cards[1], "binpack put them on {cards:?}");
    scope.remove().await
}

/// WH-04 and design rule 7: with the webhook away, pods that ask for GPUs are refused, all others are not.
#[tokio::test]
async fn without_the_controller_only_gpu_pods_are_refused() -> Result<()> {
    let scope = Scope::new("no-webhook").await?;
    for part in ["controller", "controller-2"] {
        scope.lab.fault(part, "kill")?;
    }
    let refusal = scope.refusal(&slice_pod("gpu", "1000", "10")).await;
    let plain = scope.create(&pod("plain", vec![container("main", &[])])).await;
    for part in ["controller", "controller-2"] {
        scope.lab.fault(part, "restart")?;
    }
    let refusal = refusal?;
    ensure!(refusal.contains("failed calling webhook"), "{refusal}");
    ensure!(plain?.name_any() == "plain");
    eventually("the webhook answers again", PATIENCE, || async {
        scope.create(&slice_pod("gpu", "1000", "10")).await.map(Some)
    })
    .await?;
    scope.running("gpu").await?;
    scope.remove().await
}

/// WH-03, second half: an opted-out namespace never reaches a card unmanaged.
#[tokio::test]
async fn a_pod_of_an_opted_out_namespace_never_gets_a_card() -> Result<()> {
    let scope = Scope::new("opted-out").await?;
    let label = format!("namespace/{}", scope.namespace);
    scope.lab.kubectl(&["label", &label, "mullion.io/webhook=ignore"])?;
    // Past the webhook, with a node of ours: the agent refuses it, since no allocation exists.
    let mut placed = slice_pod("past", "1000", "10");
    if let Some(spec) = &mut placed.spec {
        spec.node_name = Some("node-a".to_owned());
        if let Some(limits) = spec.containers[0].resources.as_mut().and_then(|r| r.limits.as_mut()) {
            // The kubelet counts only what the node has; the sizes exist for the scheduler alone.
            limits.retain(|k, _| k == "nvidia.com/gpu");
        }
    }
    // The label reaches the API server's admission cache with a small delay.
    let made = eventually("the namespace is opted out", PATIENCE, || async {
        scope.create(&placed).await.map(Some)
    })
    .await?;
    scope.event("past", "NoAllocation").await?;
    let phase = scope.pods().get(&made.name_any()).await?.status.and_then(|s| s.phase);
    ensure!(phase.as_deref() != Some("Running"), "it runs");
    scope.remove().await
}

/// A wish that cannot be read and came around the webhook is told by an Event, and costs none that can be: the container is
/// held to its share although it is alone.
#[tokio::test]
async fn a_wish_that_cannot_be_read_is_told_and_costs_no_other() -> Result<()> {
    let scope = Scope::new("muddled").await?;
    let muddled = slice_pod("muddled", "1000", "30")
        .on("node-a")
        .with_env("GPU_CORE_UTILIZATION_POLICY", "force")
        .with_env("CUDA_TASK_PRIORITY", "high");
    let refusal = scope.refusal(&muddled).await?;
    ensure!(refusal.contains("MalformedPriority"), "{refusal}");
    let label = format!("namespace/{}", scope.namespace);
    scope.lab.kubectl(&["label", &label, "mullion.io/webhook=ignore"])?;
    let mut past = muddled;
    if let Some(spec) = &mut past.spec {
        // What the webhook would have filled in.
        spec.scheduler_name = Some("mullion-scheduler".to_owned());
    }
    eventually("the namespace is opted out", PATIENCE, || async { scope.create(&past).await.map(Some) })
        .await?;
    scope.running("muddled").await?;
    let event = scope.event("muddled", "MalformedPriority").await?;
    ensure!(event.contains("\"high\""), "{event}");
    let series = format!("mullion_container_throttled{{node=\"node-a\",namespace=\"{}\"", scope.namespace);
    eventually("it is held to its share", PATIENCE, || async {
        let metrics = scope.metrics_of("node-a")?;
        Ok(metrics.lines().any(|l| l.starts_with(&series) && l.ends_with(" 1")).then_some(()))
    })
    .await?;
    scope.remove().await
}

/// WH-04: a pod that slipped past the webhook to another scheduler is reported on the pod and in a gauge.
#[tokio::test]
async fn an_unmanaged_gpu_pod_is_reported() -> Result<()> {
    let scope = Scope::new("unmanaged").await?;
    let label = format!("namespace/{}", scope.namespace);
    scope.lab.kubectl(&["label", &label, "mullion.io/webhook=ignore"])?;
    let mut lost = slice_pod("lost", "1000", "10");
    if let Some(spec) = &mut lost.spec {
        spec.scheduler_name = Some("default-scheduler".to_owned());
        spec.node_selector = Some([("never".to_owned(), "there".to_owned())].into());
    }
    eventually("a pod past the webhook", PATIENCE, || async {
        let made = scope.create(&lost).await?;
        if made.spec.as_ref().and_then(|s| s.scheduler_name.as_deref()) == Some("default-scheduler") {
            return Ok(Some(()));
        }
        scope.delete("lost").await?;
        Ok(None)
    })
    .await?;
    scope.event("lost", "mullion-scheduler").await?;
    // Whichever of the two leads counts it.
    let mut gauges = Vec::new();
    for part in ["controller", "controller-2"] {
        let metrics = scope.lab.beside_controller(part, &["curl", "-sf", "http://127.0.0.1:9395/metrics"])?;
        let gauge = metrics.lines().find(|l| l.contains("unmanaged_gpu_pods") && !l.starts_with('#'));
        gauges.push(gauge.unwrap_or_default().to_owned());
    }
    ensure!(gauges.iter().filter(|l| l.ends_with(" 1")).count() == 1, "{gauges:?}");
    scope.remove().await
}
