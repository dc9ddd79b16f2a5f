//! Pods that ask for our resources under another scheduler's name: made while the webhook was away or switched off.
//! They never get what they ask for, and nothing would tell their user so (WH-04, HA-04).

use std::collections::BTreeSet;
use std::time::Duration;

use kube::runtime::events::EventType;
use mullion_core::units::PodUid;
use mullion_crds::names::SCHEDULER;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::{Context, IDLE, Patience, drive};
use crate::config::UnmanagedPods;
use crate::store::{Phase, PodRecord};

/// Reason of the Event.
const REASON: &str = "UnmanagedGPUPod";

#[derive(Debug, Default)]
struct Known {
    told: BTreeSet<PodUid>,
    patience: Patience,
}

pub(super) async fn run(context: &Context, stop: &CancellationToken) {
    let known = tokio::sync::Mutex::new(Known::default());
    drive(context, stop, || async {
        let mut known = known.lock().await;
        pass(context, &mut known).await
    })
    .await;
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
        if known.told.insert(pod.pod.uid.clone()) {
            let note = format!(
                "asks for GPUs but belongs to scheduler {:?}, which gives out none: create it anew so that it gets {SCHEDULER}",
                pod.scheduler
            );
            context.cluster.tell(&pod.pod, EventType::Warning, REASON, "Report", note).await;
            context.metrics.action("report", "ok");
            tracing::warn!(pod = pod.full_name(), scheduler = pod.scheduler, "unmanaged GPU pod");
        }
        if context.config.unmanaged_pods == UnmanagedPods::Evict && pod.owned {
            let uid = pod.pod.uid.0.clone();
            let left = known.patience.left(&uid, Duration::ZERO, Instant::now());
            if left.is_zero() {
                let result = context.cluster.evict(&pod.pod).await;
                context.note("evict", &pod.full_name(), &result);
                known.patience.failed(&uid, Instant::now());
            }
            next = next.min(known.patience.left(&uid, Duration::ZERO, Instant::now()));
        }
    }
    next
}
