//! `kill -9` at random moments while pods come and go: afterwards all records agree and nothing is left.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use base64::Engine as _;
use kube::ResourceExt;
use kube::api::{DeleteParams, ListParams};
use mullion_crds::VGPUAllocation;
use mullion_crds::vgpuallocation::Phase;
use mullion_e2e::Scope;
use mullion_e2e::pods::{Build, slice_pod};
use mullion_e2e::scope::{PATIENCE, eventually};
use mullion_nodeagent::kubelet::podresources::ListPodResourcesRequest;
use mullion_nodeagent::kubelet::podresources::pod_resources_lister_client::PodResourcesListerClient;
use tonic::transport::Endpoint;

/// A small generator of its own (`SplitMix64`), so that a round can be repeated from its printed seed.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (z ^ (z >> 31)) % sides
    }
}

fn setting(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).ok().and_then(|t| t.parse().ok()).unwrap_or(otherwise)
}

/// Everything that says who has what on a node agrees, and nothing speaks of pods that are gone.
async fn records_agree(scope: &Scope, node: &str) -> Result<()> {
    let pods: BTreeSet<String> = kube::Api::<k8s_openapi::api::core::v1::Pod>::all(scope.client.clone())
        .list(&ListParams::default().fields(&format!("spec.nodeName={node}")))
        .await?
        .items
        .into_iter()
        .filter(|p| {
            !matches!(p.status.as_ref().and_then(|s| s.phase.as_deref()), Some("Succeeded" | "Failed"))
        })
        .filter_map(|p| p.uid())
        .collect();
    let allocations = kube::Api::<VGPUAllocation>::all(scope.client.clone())
        .list(&ListParams::default().fields(&format!("spec.nodeName={node}")))
        .await?
        .items;
    let mut grants = BTreeSet::new();
    for allocation in &allocations {
        let released = allocation.status.as_ref().is_some_and(|s| s.phase == Phase::Released);
        ensure!(
            released || pods.contains(&allocation.spec.pod.uid),
            "{}: allocation {} is of a pod that is gone or ended: {:?}",
            node,
            allocation.name_any(),
            allocation.status
        );
        if !released {
            grants.extend(allocation.status.iter().flat_map(|s| &s.containers).map(|c| c.grant.clone()));
        }
    }
    let list = |folder: &str| -> Result<BTreeSet<String>> {
        Ok(scope
            .lab
            .on_node(node, &["sh", "-c", &format!("ls -1 {folder} 2>/dev/null || true")])?
            .lines()
            .map(str::to_owned)
            .collect())
    };
    let specs: BTreeSet<String> = list("/var/run/cdi")?
        .into_iter()
        .filter_map(|f| f.strip_prefix("mullion.io-grant-")?.strip_suffix(".json").map(str::to_owned))
        .collect();
    ensure!(specs == grants, "{node}: CDI specs {specs:?}, grants in status {grants:?}");
    let pages = list("/var/lib/mullion/pages")?;
    ensure!(pages == grants, "{node}: control pages {pages:?}, grants in status {grants:?}");
    for folder in list("/usr/local/vgpu/containers")? {
        let uid = folder.split('_').next().unwrap_or_default();
        ensure!(pods.contains(uid), "{node}: usage folder {folder} of a pod that is gone");
    }
    kubelet_agrees(scope, node, &pods, &grants)?;
    pod_resources_agree(scope, node, &pods, &allocations).await?;
    // Who holds each card by the audit log: the pods of the allocations, and nobody else.
    let held: BTreeSet<String> = allocations
        .iter()
        .filter(|a| a.status.as_ref().is_some_and(|s| s.phase == Phase::Prepared))
        .map(|a| a.spec.pod.uid.clone())
        .collect();
    let mut holders = BTreeSet::new();
    let now = jiff::Timestamp::now().to_string();
    for card in scope.gpu_node(node).await?.status.context("no status")?.cards {
        let answer = scope.lab.audit(node, &["who-had", "--card", &card.uuid, "--at", &now])?;
        for holder in answer.as_array().context("no list of holders")? {
            holders.insert(holder["pod"]["uid"].as_str().context("a holder without a pod")?.to_owned());
        }
    }
    ensure!(holders == held, "{node}: the audit log names {holders:?}, the allocations {held:?}");
    let verify = scope.lab.audit(node, &["verify"])?;
    ensure!(verify["ok"] != serde_json::Value::Bool(false), "{node}: {verify}");
    Ok(())
}

/// The kubelet's own record of device ids has exactly the grants that the allocations show, for pods that live.
fn kubelet_agrees(
    scope: &Scope,
    node: &str,
    pods: &BTreeSet<String>,
    grants: &BTreeSet<String>,
) -> Result<()> {
    let text =
        scope.lab.on_node(node, &["cat", "/var/lib/kubelet/device-plugins/kubelet_internal_checkpoint"])?;
    let record: serde_json::Value = serde_json::from_str(&text)?;
    let mut known = BTreeSet::new();
    for entry in record["Data"]["PodDeviceEntries"].as_array().into_iter().flatten() {
        let uid = entry["PodUID"].as_str().context("an entry without a pod")?;
        if entry["ResourceName"] != "nvidia.com/gpu" || !pods.contains(uid) {
            continue;
        }
        let answer = base64::engine::general_purpose::STANDARD
            .decode(entry["AllocResp"].as_str().context("an entry without an answer")?)?;
        let answer = String::from_utf8_lossy(&answer).into_owned();
        let (_, grant) = answer.split_once("mullion.io/grant=").context("an answer without a grant")?;
        known.insert(grant.chars().take(16).collect::<String>());
    }
    ensure!(known == *grants, "{node}: the kubelet knows {known:?}, the allocations {grants:?}");
    Ok(())
}

/// What the kubelet tells monitors (`PodResources`) is what the allocations show: each container that runs has its ids, and
/// nobody else has any.
async fn pod_resources_agree(
    scope: &Scope,
    node: &str,
    pods: &BTreeSet<String>,
    allocations: &[VGPUAllocation],
) -> Result<()> {
    let run = std::env::var("MULLION_LAB_RUN").context("MULLION_LAB_RUN: run the tests with `lab enter`")?;
    let socket = format!("unix://{run}/nodes/{node}/kubelet/pod-resources/kubelet.sock");
    let channel = Endpoint::try_from(socket)?.connect().await.context("the kubelet's PodResources")?;
    let answer = PodResourcesListerClient::new(channel).list(ListPodResourcesRequest {}).await?.into_inner();
    let mut told: BTreeMap<(String, String, String), BTreeSet<String>> = BTreeMap::new();
    for pod in answer.pod_resources {
        for container in pod.containers {
            for devices in container.devices.into_iter().filter(|d| d.resource_name == "nvidia.com/gpu") {
                let whose = (pod.namespace.clone(), pod.name.clone(), container.name.clone());
                told.entry(whose).or_default().extend(devices.device_ids);
            }
        }
    }
    // Pods that are on their way out are still told of for a while.
    let live: BTreeSet<(String, String)> =
        kube::Api::<k8s_openapi::api::core::v1::Pod>::all(scope.client.clone())
            .list(&ListParams::default().fields(&format!("spec.nodeName={node}")))
            .await?
            .items
            .into_iter()
            .filter(|p| {
                p.metadata.deletion_timestamp.is_none() && p.uid().is_some_and(|uid| pods.contains(&uid))
            })
            .map(|p| (p.namespace().unwrap_or_default(), p.name_any()))
            .collect();
    told.retain(|(namespace, pod, _), _| live.contains(&(namespace.clone(), pod.clone())));
    let mut shown = BTreeMap::new();
    for allocation in allocations {
        let whose = (allocation.namespace().unwrap_or_default(), allocation.spec.pod.name.clone());
        if !live.contains(&whose) || !pods.contains(&allocation.spec.pod.uid) {
            continue;
        }
        for container in allocation.status.iter().flat_map(|s| &s.containers) {
            let ids: BTreeSet<String> = container.device_ids.iter().cloned().collect();
            shown.insert((whose.0.clone(), whose.1.clone(), container.name.clone()), ids);
        }
    }
    ensure!(told == shown, "{node}: PodResources tells {told:?}, the allocations {shown:?}");
    Ok(())
}

/// Rounds of pods coming and going while a part is killed. `MULLION_STORM_ROUNDS` (default 3) for each part,
/// `MULLION_STORM_SEED` repeats a run.
#[tokio::test]
async fn killed_parts_leave_nothing_behind() -> Result<()> {
    let scope = Scope::new("storm").await?;
    let rounds = setting("MULLION_STORM_ROUNDS", 3);
    let seed = setting("MULLION_STORM_SEED", 20_261_129);
    println!("storm: seed {seed}, {rounds} rounds");
    let mut dice = Dice(seed);
    let parts = ["agent@node-a", "controller", "kubelet@node-a", "scheduler", "containerd@node-a"];
    let mut failed_by_kubelet = 0_u32;
    for round in 0..rounds {
        // Every round kills each part once, in an order of its own.
        let mut order: Vec<&str> = parts.to_vec();
        for k in (1..order.len()).rev() {
            let other = usize::try_from(dice.roll(k as u64 + 1)).unwrap_or(0);
            order.swap(k, other);
        }
        for (step, part) in order.iter().enumerate() {
            for n in 0..3 {
                let name = format!("s-{round}-{step}-{n}");
                // While a controller is down its webhook refuses GPU pods: try until it is back.
                eventually("a pod is let in", PATIENCE, || async {
                    scope
                        .create(
                            &slice_pod(&name, "700", "3")
                                .annotated("hami.io/node-scheduler-policy", "spread"),
                        )
                        .await
                        .map(Some)
                })
                .await?;
            }
            tokio::time::sleep(Duration::from_millis(dice.roll(1500))).await;
            scope.lab.fault(part, "kill")?;
            tokio::time::sleep(Duration::from_millis(200 + dice.roll(800))).await;
            scope.lab.fault(part, "restart")?;
            if step > 0 {
                for n in 0..3 {
                    let name = format!("s-{round}-{}-{n}", step - 1);
                    let gone = scope.pods().delete(&name, &DeleteParams::default()).await;
                    if let Err(error) = gone {
                        ensure!(error.to_string().contains("not found"), "{error}");
                    }
                }
            }
        }
        // All that still exists runs, or was failed by the kubelet itself in its restart gap and says so.
        eventually("all pods run or are explained", PATIENCE * 2, || async {
            for p in scope.pods().list(&ListParams::default()).await?.items {
                let status = p.status.clone().unwrap_or_default();
                let phase = status.phase.clone().unwrap_or_default();
                let explained = phase == "Failed"
                    && matches!(
                        status.reason.as_deref(),
                        Some("UnexpectedAdmissionError" | "OutOfnvidia.com/gpu")
                    );
                if phase != "Running" && !explained && p.metadata.deletion_timestamp.is_none() {
                    anyhow::bail!("{} is {phase}: {:?} {:?}", p.name_any(), status.reason, status.message);
                }
            }
            Ok(Some(()))
        })
        .await?;
        let left = scope.pods().list(&ListParams::default()).await?.items;
        for p in &left {
            failed_by_kubelet +=
                u32::from(p.status.as_ref().and_then(|s| s.phase.as_deref()) == Some("Failed"));
        }
        for node in ["node-a", "node-b"] {
            eventually(&format!("records of {node} agree"), PATIENCE, || async {
                records_agree(&scope, node).await.map(Some)
            })
            .await
            .with_context(|| format!("round {round}, seed {seed}"))?;
        }
    }
    println!("storm: {failed_by_kubelet} pods were failed by the kubelet itself in its restart gaps");
    scope.remove().await?;
    for node in ["node-a", "node-b"] {
        eventually(&format!("nothing is left on {node}"), PATIENCE, || async {
            records_agree(&scope, node).await.map(Some)
        })
        .await?;
    }
    Ok(())
}
