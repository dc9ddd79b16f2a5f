//! Pods that ask for our resources under another scheduler's name: made while the webhook was away or switched off.
//! They never get what they ask for, and nothing would tell their user so (WH-04, HA-04).

use std::collections::BTreeSet;
use std::time::Duration;

use kube::runtime::events::EventType;
use mullion_core::units::PodUid;
use mullion_crds::names::{OPT_OUT, OPT_OUT_LABELS, SCHEDULER};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::{Context, IDLE, Patience, drive};
use crate::config::UnmanagedPods;
use crate::error::Error;
use crate::store::{Phase, PodRecord};

/// Reason of the Event.
const REASON: &str = "UnmanagedGPUPod";

#[derive(Debug, Default)]
struct Known {
    told: BTreeSet<PodUid>,
    patience: Patience,
}

pub(super) async fn run(context: &Context, stop: &CancellationToken) {
    drive(context, stop, Known::default(), pass).await;
    // Another replica counts from now on.
    context.metrics.unmanaged_gpu_pods.set(0);
}

async fn pass(context: &Context, known: &mut Known) -> Duration {
    let pods: Vec<PodRecord> = context.store.read(|facts| {
        facts.strangers().filter(|pod| !pod.deleting && pod.phase == Phase::Pending).cloned().collect()
    });
    context.metrics.unmanaged_gpu_pods.set(i64::try_from(pods.len()).unwrap_or(i64::MAX));
    let uids: BTreeSet<PodUid> = pods.iter().map(|pod| pod.pod.uid.clone()).collect();
    known.told.retain(|uid| uids.contains(uid));
    known.patience.keep(&uids.iter().map(|uid| uid.0.clone()).collect::<Vec<_>>());
    let mut next = IDLE;
    for pod in pods {
        let evicts = context.config.unmanaged_pods == UnmanagedPods::Evict && pod.owned;
        if known.told.contains(&pod.pod.uid) && !evicts {
            continue;
        }
        let uid = pod.pod.uid.0.clone();
        if known.patience.left(&uid, Duration::ZERO, Instant::now()).is_zero() {
            match judge(context, known, &pod, evicts).await {
                Ok(()) => {}
                Err(error) => context.note::<()>("report", &pod.full_name(), &Err(error)),
            }
            known.patience.failed(&uid, Instant::now());
        }
        if evicts || !known.told.contains(&pod.pod.uid) {
            next = next.min(known.patience.left(&uid, Duration::ZERO, Instant::now()));
        }
    }
    next
}

/// Tells a pod what it misses, once, and evicts it if that is wished and helps: in a namespace that has opted out its
/// next one would come back the same way, for ever.
async fn judge(context: &Context, known: &mut Known, pod: &PodRecord, evicts: bool) -> Result<(), Error> {
    let opted_out = context.cluster.opted_out(&pod.pod.namespace).await?;
    if known.told.insert(pod.pod.uid.clone()) {
        let first = if opted_out {
            let labels = OPT_OUT_LABELS.map(|label| format!("{label}={OPT_OUT}"));
            format!("its namespace has opted out: take off its label {} and ", labels.join(" or "))
        } else {
            String::new()
        };
        let note = format!(
            "asks for GPUs but belongs to scheduler {:?}, which gives out none of Mullion's: {first}create the pod anew so that it gets {SCHEDULER}",
            pod.scheduler
        );
        context.cluster.tell(&pod.pod, EventType::Warning, REASON, "Report", note).await;
        context.metrics.action("report", "ok");
        tracing::warn!(pod = pod.full_name(), scheduler = pod.scheduler, opted_out, "unmanaged GPU pod");
    }
    if evicts && !opted_out {
        let result = context.cluster.evict(&pod.pod).await;
        context.note("evict", &pod.full_name(), &result);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use k8s_openapi::api::core::v1::Pod;
    use serde_json::json;

    use super::*;
    use crate::config::Config;
    use crate::fake_api::FakeApi;

    // WH-04, HA-04: every pod is told once; evicted only where its next one comes through the webhook.
    #[tokio::test(start_paused = true)]
    async fn who_is_told_and_who_is_evicted() {
        for (case, mode, owned, labels, evicted) in [
            ("report", UnmanagedPods::Report, true, json!({}), false),
            ("evict", UnmanagedPods::Evict, true, json!({}), true),
            ("nobody would make it anew", UnmanagedPods::Evict, false, json!({}), false),
            ("our way out", UnmanagedPods::Evict, true, json!({"mullion.io/webhook": "ignore"}), false),
            ("HAMi's way out", UnmanagedPods::Evict, true, json!({"hami.io/webhook": "ignore"}), false),
            ("no way out", UnmanagedPods::Evict, true, json!({"mullion.io/webhook": "yes"}), true),
        ] {
            let api = FakeApi::default();
            let config = Arc::new(Config { unmanaged_pods: mode, ..Config::default() });
            let context = Context { config, ..crate::fixtures::context(&api) };
            let owners = json!([{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": "r", "controller": owned}]);
            let pod = json!({"metadata": {"name": "p", "namespace": "ns", "uid": "u", "ownerReferences": owners},
                "spec": {"schedulerName": "default-scheduler", "containers": [
                    {"name": "main", "resources": {"limits": {"nvidia.com/gpu": "1"}}}]},
                "status": {"phase": "Pending"}});
            api.put("pods/ns/p", pod.clone());
            // kube reads a cluster's namespaces under this path.
            api.put("namespaces/ns", json!({"metadata": {"name": "ns", "labels": labels}}));
            let pod: Pod = serde_json::from_value(pod).unwrap();
            context.store.write(|facts| facts.stranger_seen(&pod));
            let mut known = Known::default();
            for _ in 0..3 {
                pass(&context, &mut known).await;
                tokio::time::advance(Duration::from_mins(2)).await;
            }
            let events = api.events();
            assert_eq!(events.len(), 1, "{case}: {events:?}");
            // The way out that helps.
            assert!(
                events[0].ends_with("create the pod anew so that it gets mullion-scheduler"),
                "{events:?}"
            );
            let opted_out = labels.to_string().contains("ignore");
            assert_eq!(events[0].contains("take off its label"), opted_out, "{case}: {events:?}");
            assert_eq!(api.get("pods/ns/p").is_none(), evicted, "{case}: {:?}", api.calls());
            assert_eq!(context.metrics.unmanaged_gpu_pods.get(), 1, "{case}");
        }
    }
}
