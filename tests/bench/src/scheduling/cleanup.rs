//! Between rounds: everything gone, and quiet again.

use std::time::{Duration, Instant};

use anyhow::Result;
use futures::{StreamExt, TryStreamExt};
use kube::ResourceExt;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams};
use mullion_e2e::Scope;
use mullion_e2e::scope::eventually;
use serde_json::json;

use crate::lab::Status;
use crate::pods::PATIENCE;
use crate::process;

/// CPU milliseconds per second below which the control plane counts as quiet.
const QUIET: f64 = 150.0;

/// Ends all pods of the namespace and what Mullion gave them.
///
/// No kubelet and no agent is behind fake nodes, so nobody else does: pods go without grace, and the finalizers
/// that an agent takes off when it has proved the release are taken off by the lab's administrator, who has the
/// verb `override`.
///
/// # Errors
/// When something stays.
pub async fn remove_all(scope: &Scope) -> Result<()> {
    let (pods, allocations) = (scope.pods(), scope.allocations());
    let now = DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::default() };
    let all = ListParams::default();
    pods.delete_collection(&now, &all).await?;
    eventually("pods gone", PATIENCE, || async {
        let left = pods.list_metadata(&all.clone().limit(1)).await?;
        Ok(left.items.is_empty().then_some(()))
    })
    .await?;
    allocations.delete_collection(&DeleteParams::default(), &all).await?;
    eventually("allocations gone", PATIENCE, || async {
        let left = allocations.list_metadata(&all).await?;
        let strip = left.items.iter().map(|allocation| {
            let allocations = allocations.clone();
            let patch = json!({"metadata": {"finalizers": null}});
            async move {
                let name = allocation.name_any();
                match allocations.patch_metadata(&name, &PatchParams::default(), &Patch::Merge(patch)).await {
                    // The garbage collector was first.
                    Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
                    other => other.map(drop),
                }
            }
        });
        futures::stream::iter(strip).buffer_unordered(16).try_collect::<()>().await?;
        Ok(left.items.is_empty().then_some(()))
    })
    .await
}

/// Waits until the control plane has digested what was done to it, a minute at most.
///
/// # Errors
/// When one of its programs has ended.
pub async fn settle(status: &Status) -> Result<()> {
    let began = Instant::now();
    let used = || -> Result<f64> {
        let parts = ["apiserver", "etcd", "controller-manager", "controller"];
        parts.iter().map(|part| process::cpu_millis(status.pid(part)?)).sum()
    };
    let mut before = used()?;
    while began.elapsed() < Duration::from_mins(1) {
        tokio::time::sleep(Duration::from_secs(1)).await;
        let after = used()?;
        if after - before < QUIET {
            break;
        }
        before = after;
    }
    Ok(())
}
