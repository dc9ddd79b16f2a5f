//! Identity by proof: a container gets what its own allocation says, whatever the order of things.

use anyhow::{Context, Result, ensure};
use kube::ResourceExt;
use mullion_crds::vgpuallocation::Phase;
use mullion_e2e::Scope;
use mullion_e2e::pods::{Build, container, pod, running, slice, slice_pod};
use mullion_e2e::scope::{PATIENCE, eventually};

const SHOW: &str = "echo $CUDA_DEVICE_MEMORY_LIMIT_0";
const CHECKPOINT: &str = "/var/lib/kubelet/device-plugins/kubelet_internal_checkpoint";

fn always_restarting(mut c: k8s_openapi::api::core::v1::Container) -> k8s_openapi::api::core::v1::Container {
    c.restart_policy = Some("Always".to_owned());
    c
}

/// Ordinary init containers, a sidecar and the app, each asking for another size (FS-06 with plain ones between).
#[tokio::test]
async fn every_kind_of_container_gets_its_own_slice() -> Result<()> {
    let scope = Scope::new("kinds-of-containers").await?;
    let check = |mib: &str| format!("test \"$CUDA_DEVICE_MEMORY_LIMIT_0\" = {mib}m");
    let p = pod("mixed", vec![container("plain-app", &[]), container("a", &slice("1004", "4"))])
        .on("node-a")
        .with_inits(vec![
            running("plain-init", &[], "test -z \"$CUDA_DEVICE_MEMORY_LIMIT_0\""),
            running("i1", &slice("1001", "1"), &check("1001")),
            always_restarting(container("s1", &slice("1002", "2"))),
            running("i2", &slice("1003", "3"), &check("1003")),
        ]);
    scope.create(&p).await?;
    let made = scope.running("mixed").await?;
    ensure!(scope.exec("mixed", "s1", &["sh", "-c", SHOW])?.trim() == "1002m");
    ensure!(scope.exec("mixed", "a", &["sh", "-c", SHOW])?.trim() == "1004m");
    ensure!(scope.exec("mixed", "plain-app", &["sh", "-c", SHOW])?.trim().is_empty());
    let names: Vec<_> = scope.allocation(&made).await?.spec.containers.into_iter().map(|c| c.name).collect();
    ensure!(names == ["i1", "s1", "i2", "a"], "{names:?}");
    // The folder on the node is named for the container.
    let uid = made.uid().unwrap_or_default();
    scope
        .lab
        .on_node("node-a", &["test", "-f", &format!("/usr/local/vgpu/containers/{uid}_a/usage.cache")])?;
    scope.remove().await
}

/// FS-08: three init containers one after another need the size of one, not the sum.
#[tokio::test]
async fn sequential_init_containers_share_one_card() -> Result<()> {
    let scope = Scope::new("sequential-inits").await?;
    let big = slice("60000", "10");
    let inits = ["one", "two", "three"].map(|n| running(n, &big, "true")).to_vec();
    let p = pod("train", vec![container("main", &[])]).on("node-a").with_inits(inits);
    scope.create(&p).await?;
    let made = scope.running("train").await?;
    let allocation = scope.allocation(&made).await?;
    let cards: std::collections::BTreeSet<_> =
        allocation.spec.containers.iter().flat_map(|c| &c.devices).map(|d| d.uuid.clone()).collect();
    ensure!(cards.len() == 1, "{cards:?}");
    scope.remove().await
}

/// A container that ends with an error gets the same slice each time; so does a crash-looping init container.
#[tokio::test]
async fn restarts_keep_the_slice() -> Result<()> {
    let scope = Scope::new("restarts").await?;
    let crash = "if [ -e /shared/seen ]; then exec sleep 1000; fi; touch /shared/seen; exit 1";
    let mut init = running(
        "i",
        &slice("1100", "5"),
        "if [ -e /shared/init ]; then exit 0; fi; touch /shared/init; exit 1",
    );
    let mut app = running("a", &slice("1200", "5"), crash);
    let mount = serde_json::json!([{"name": "shared", "mountPath": "/shared"}]);
    init.volume_mounts = serde_json::from_value(mount.clone())?;
    app.volume_mounts = serde_json::from_value(mount)?;
    let mut p = pod("crashing", vec![app]).on("node-b").with_inits(vec![init]);
    if let Some(spec) = &mut p.spec {
        spec.volumes = serde_json::from_value(serde_json::json!([{"name": "shared", "emptyDir": {}}]))?;
    }
    scope.create(&p).await?;
    eventually("restarted and running", PATIENCE * 2, || async {
        let pod = scope.pods().get("crashing").await?;
        let status = pod.status.context("no status")?;
        let restarts = status.container_statuses.iter().flatten().map(|c| c.restart_count).sum::<i32>();
        let inits = status.init_container_statuses.iter().flatten().map(|c| c.restart_count).sum::<i32>();
        let ready = status.container_statuses.iter().flatten().all(|c| c.ready);
        Ok((restarts >= 1 && inits >= 1 && ready).then_some(()))
    })
    .await
    .context(scope.story("crashing").await)?;
    ensure!(scope.exec("crashing", "a", &["sh", "-c", SHOW])?.trim() == "1200m");
    scope.remove().await
}

/// A sandbox that is made anew (its pause process died) prepares its containers again, with the same slice.
#[tokio::test]
async fn a_new_sandbox_gets_the_same_slice() -> Result<()> {
    let scope = Scope::new("new-sandbox").await?;
    scope.create(&slice_pod("resandboxed", "1300", "5").on("node-b")).await?;
    let before = scope.running("resandboxed").await?;
    let allocation = scope.allocation_phase(&before, Phase::Prepared).await?;
    let uid = before.uid().unwrap_or_default();
    let kill = format!(
        "find /sys/fs/cgroup/pids -path '*pod{uid}/*' -name cgroup.procs | xargs cat | xargs -r kill -9 || true"
    );
    scope.lab.on_node("node-b", &["sh", "-c", &kill])?;
    eventually("running in a new sandbox", PATIENCE, || async {
        let pod = scope.pods().get("resandboxed").await?;
        let status = pod.status.context("no status")?;
        let again = status.container_statuses.iter().flatten().any(|c| c.restart_count > 0 && c.ready);
        Ok(again.then_some(()))
    })
    .await
    .context(scope.story("resandboxed").await)?;
    ensure!(scope.exec("resandboxed", "main", &["sh", "-c", SHOW])?.trim() == "1300m");
    let after = scope.pods().get("resandboxed").await?;
    ensure!(scope.allocation(&after).await?.spec == allocation.spec);
    scope.remove().await
}

/// The kubelet's record missing, cut short or of another shape: refused with a reason that names the file.
#[tokio::test]
async fn an_unreadable_checkpoint_is_refused_clearly() -> Result<()> {
    let scope = Scope::new("bad-checkpoint").await?;
    let spoils = [
        ("missing", format!("mv {CHECKPOINT} {CHECKPOINT}.kept")),
        (
            "truncated",
            format!("cp {CHECKPOINT} {CHECKPOINT}.kept; head -c 40 {CHECKPOINT}.kept > {CHECKPOINT}"),
        ),
        (
            "newer",
            format!(
                "cp {CHECKPOINT} {CHECKPOINT}.kept; echo '{{\"Data\":{{\"Entries\":[]}}}}' > {CHECKPOINT}"
            ),
        ),
    ];
    // A crash-looping container is prepared at each start, while nothing else makes the kubelet write the file.
    let crash = "if [ -e /shared/stop ]; then exec sleep 1000; fi; sleep 1; exit 1";
    for (case, spoil) in spoils {
        let name = format!("spoilt-{case}");
        let mut app = running("main", &slice("1000", "5"), crash);
        app.volume_mounts =
            serde_json::from_value(serde_json::json!([{"name": "shared", "mountPath": "/shared"}]))?;
        let mut p = pod(&name, vec![app]).on("node-b");
        if let Some(spec) = &mut p.spec {
            spec.volumes = serde_json::from_value(serde_json::json!([{"name": "shared", "emptyDir": {}}]))?;
        }
        scope.create(&p).await?;
        scope.running(&name).await?;
        scope.lab.on_node("node-b", &["sh", "-c", &spoil])?;
        let seen = scope.event(&name, "kubelet_internal_checkpoint").await;
        scope.lab.on_node("node-b", &["mv", &format!("{CHECKPOINT}.kept"), CHECKPOINT])?;
        seen.context(case)?;
        // With the record back it starts again by itself.
        eventually(&format!("{name} starts again"), PATIENCE * 2, || async {
            let pod = scope.pods().get(&name).await?;
            let running = pod.status.iter().flat_map(|s| s.container_statuses.iter().flatten());
            Ok(running
                .into_iter()
                .any(|c| c.state.as_ref().is_some_and(|s| s.running.is_some()))
                .then_some(()))
        })
        .await?;
        scope.delete(&name).await?;
    }
    scope.remove().await
}
