//! The API server away, the kubelet restarted, the agent killed: what runs goes on.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use kube::ResourceExt;
use mullion_e2e::Scope;
use mullion_e2e::pods::{Build, pod, restarts, running, slice, slice_pod};
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
            let ready = scope.lab.kubectl(&[
                "get",
                "node",
                "node-b",
                "-o",
                r#"jsonpath={.status.conditions[?(@.type=="Ready")].status}"#,
            ])?;
            Ok((scope.lab.slots("node-b")? == 20 && ready.trim() == "True").then_some(()))
        })
        .await
        .with_context(|| format!("round {round}"))?;
        let name = format!("new-{round}");
        scope.create(&slice_pod(&name, "500", "2").on("node-b")).await?;
        scope.running(&name).await.with_context(|| format!("round {round}"))?;
    }
    let steady = scope.running("steady").await?;
    let restarts = restarts(&steady);
    ensure!(restarts == 0, "the steady pod was restarted {restarts} times");
    scope.remove().await
}

/// DP-13: while a node's agent is down its slots are gone, so that an owner's pods wait instead of failing one
/// after the other; they start when it is back, with nobody's help.
#[tokio::test]
async fn a_dead_agent_draws_no_pods() -> Result<()> {
    let scope = Scope::new("no-pod-storm").await?;
    scope.lab.fault("agent@node-b", "kill")?;
    let outcome = async {
        eventually("no slots without the plugin", PATIENCE, || async {
            Ok((scope.lab.slots("node-b")? == 0).then_some(()))
        })
        .await?;
        scope.create_set("patient", 2, &slice_pod("unused", "500", "2").on("node-b")).await?;
        tokio::time::sleep(Duration::from_secs(15)).await;
        let pods = scope.pods().list(&kube::api::ListParams::default()).await?.items;
        ensure!(pods.len() == 2, "{} pods were made", pods.len());
        ensure!(pods.iter().all(|p| p.spec.as_ref().is_some_and(|s| s.node_name.is_none())), "one was bound");
        anyhow::Ok(())
    }
    .await;
    scope.lab.fault("agent@node-b", "restart")?;
    outcome?;
    let pods = scope.pods().list(&kube::api::ListParams::default()).await?.items;
    for p in &pods {
        scope.running(&p.name_any()).await?;
    }
    scope.remove().await
}

/// Design section 4, "Restarts": an agent that is asked to stop first closes its node for new pods; the next one
/// opens it again.
#[tokio::test]
async fn a_planned_stop_closes_the_node_first() -> Result<()> {
    let scope = Scope::new("planned-stop").await?;
    scope.create(&slice_pod("stays", "500", "2").on("node-b")).await?;
    scope.running("stays").await?;
    let status: serde_json::Value = serde_json::from_str(&scope.lab.run(&["status", "--json"])?)?;
    let agent = status["parts"].as_array().and_then(|p| p.iter().find(|p| p["name"] == "agent@node-b"));
    let pid = agent.and_then(|p| p["pid"].as_i64()).context("no agent")?;
    let closed = || async {
        Ok::<_, anyhow::Error>(scope.gpu_node("node-b").await?.status.context("no status")?.closed)
    };
    scope.lab.on_node("node-b", &["kill", "-TERM", &pid.to_string()])?;
    let shut =
        eventually("the node is closed", PATIENCE, || async { Ok(closed().await?.then_some(())) }).await;
    scope.lab.fault("agent@node-b", "restart")?;
    shut?;
    eventually("the node is open again", PATIENCE, || async { Ok((!closed().await?).then_some(())) }).await?;
    scope.create(&slice_pod("next", "500", "2").on("node-b")).await?;
    scope.running("next").await?;
    let stays = scope.running("stays").await?;
    let restarts = restarts(&stays);
    ensure!(restarts == 0, "the running pod was touched");
    scope.remove().await
}
