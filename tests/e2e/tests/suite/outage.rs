//! The API server away, the kubelet restarted, the agent killed: what runs goes on.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use kube::ResourceExt;
use mullion_e2e::Scope;
use mullion_e2e::pods::{Build, pod, running, slice, slice_pod};
use mullion_e2e::scope::{PATIENCE, eventually};

/// How long the API server is away; the soak waits the full two minutes.
fn outage() -> Duration {
    Duration::from_secs(
        std::env::var("MULLION_OUTAGE_SECONDS").ok().and_then(|t| t.parse().ok()).unwrap_or(25),
    )
}

/// Design section 8, "API server or etcd away": a container that crashes meanwhile starts again on its slice.
#[tokio::test]
async fn a_container_restarts_on_its_slice_without_the_api_server() -> Result<()> {
    let scope = Scope::new("api-away").await?;
    // Ends by itself every 5 s; each start leaves its limit in the volume.
    let script = "echo $CUDA_DEVICE_MEMORY_LIMIT_0 >> /shared/starts; sleep 5; exit 1";
    let mut app = running("main", &slice("1700", "5"), script);
    app.volume_mounts =
        serde_json::from_value(serde_json::json!([{"name": "shared", "mountPath": "/shared"}]))?;
    let mut p = pod("restarts", vec![app]).on("node-a");
    if let Some(spec) = &mut p.spec {
        spec.volumes = serde_json::from_value(serde_json::json!([{"name": "shared", "emptyDir": {}}]))?;
    }
    scope.create(&p).await?;
    let made = scope.running("restarts").await?;
    let uid = made.uid().unwrap_or_default();
    let starts = || -> Result<Vec<String>> {
        let file = format!("/var/lib/kubelet/pods/{uid}/volumes/kubernetes.io~empty-dir/shared/starts");
        Ok(scope.lab.on_node("node-a", &["cat", &file])?.lines().map(str::to_owned).collect())
    };
    scope.lab.fault("apiserver", "stop")?;
    let before = starts();
    tokio::time::sleep(Duration::from_secs(2)).await;
    // An agent that starts while the API server is away answers from its own record.
    let killed =
        scope.lab.fault("agent@node-a", "kill").and_then(|()| scope.lab.fault("agent@node-a", "restart"));
    tokio::time::sleep(outage()).await;
    let after = starts();
    scope.lab.fault("apiserver", "cont")?;
    // The schedulers lost their leases meanwhile; whatever exited for that is started again.
    tokio::time::sleep(Duration::from_secs(3)).await;
    scope.lab.revive()?;
    killed?;
    let (before, after) = (before?, after?);
    ensure!(after.len() > before.len(), "no start during the outage: {before:?} {after:?}");
    ensure!(after.iter().all(|limit| limit == "1700m"), "{after:?}");
    // On return the ledger equals a fresh list: a new pod is placed and started.
    scope.create(&slice_pod("after", "1000", "5").on("node-a")).await?;
    scope.running("after").await?;
    scope.remove().await
}

/// DP-10, DP-11: the kubelet and the agent restart in any order; running containers are untouched and the
/// plugin is registered again.
#[tokio::test]
async fn restarts_of_kubelet_and_agent_in_any_order() -> Result<()> {
    let scope = Scope::new("restart-orders").await?;
    scope.create(&slice_pod("steady", "1000", "5").on("node-b")).await?;
    scope.running("steady").await?;
    let orders: [&[(&str, &str)]; 4] = [
        &[("kubelet@node-b", "kill"), ("kubelet@node-b", "restart")],
        &[("agent@node-b", "kill"), ("agent@node-b", "restart")],
        &[
            ("kubelet@node-b", "kill"),
            ("agent@node-b", "kill"),
            ("kubelet@node-b", "restart"),
            ("agent@node-b", "restart"),
        ],
        &[
            ("agent@node-b", "kill"),
            ("kubelet@node-b", "kill"),
            ("agent@node-b", "restart"),
            ("kubelet@node-b", "restart"),
        ],
    ];
    for (round, order) in orders.iter().enumerate() {
        for (part, verb) in *order {
            scope.lab.fault(part, verb)?;
        }
        eventually("20 slots", PATIENCE, || async {
            let slots = scope.lab.kubectl(&[
                "get",
                "node",
                "node-b",
                "-o",
                r"jsonpath={.status.allocatable.nvidia\.com/gpu}",
            ])?;
            let ready = scope.lab.kubectl(&[
                "get",
                "node",
                "node-b",
                "-o",
                r#"jsonpath={.status.conditions[?(@.type=="Ready")].status}"#,
            ])?;
            Ok((slots.trim() == "20" && ready.trim() == "True").then_some(()))
        })
        .await
        .with_context(|| format!("round {round}"))?;
        let name = format!("new-{round}");
        scope.create(&slice_pod(&name, "500", "2").on("node-b")).await?;
        scope.running(&name).await.with_context(|| format!("round {round}"))?;
    }
    let steady = scope.running("steady").await?;
    let restarts: i32 = steady
        .status
        .iter()
        .flat_map(|s| s.container_statuses.iter().flatten())
        .map(|c| c.restart_count)
        .sum();
    ensure!(restarts == 0, "the steady pod was restarted {restarts} times");
    scope.remove().await
}
