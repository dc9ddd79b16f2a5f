//! Pods whose allocation cannot be had: it lost against an earlier one, its card is gone, the node failed it, or it
//! is missing altogether. The pod is evicted, so that its owner's next one is placed anew.

use std::time::Duration;

use kube::runtime::events::EventType;
use mullion_core::facts::PodRef;
use mullion_core::ledger::Standing;
use mullion_crds::vgpuallocation::Phase;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::{Context, IDLE, Patience, drive};
use crate::error::Error;
use crate::store::{Facts, Phase as PodPhase, PodRecord};

/// How long a bound pod may be without an allocation before that is checked: our watches are not in step.
const MISSING: Duration = Duration::from_secs(10);

/// Why a pod cannot stay.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Why {
    /// The stable name, reason of the Event.
    pub code: &'static str,
    /// In words.
    pub text: String,
    /// How long it may look so before it is acted on.
    pub grace: Duration,
}

/// Why `pod` cannot stay where it is, by what has been seen.
#[must_use]
pub fn why(facts: &Facts, pod: &PodRecord) -> Option<Why> {
    let node = pod.node.as_ref()?;
    if pod.deleting || pod.phase == PodPhase::Ended || !matches!(pod.request, Ok(Some(_))) {
        return None;
    }
    let Some(object) = facts.allocation_of_pod(pod.pod.uid.as_str()) else {
        let text = format!("bound to node {node} without an allocation, so that its containers cannot start");
        return (pod.phase == PodPhase::Pending).then_some(Why {
            code: "AllocationMissing",
            text,
            grace: MISSING,
        });
    };
    if object.spec.node_name != node.0 {
        // The other one is undone first.
        return None;
    }
    let now = |code, text| Some(Why { code, text, grace: Duration::ZERO });
    match facts.ledger().standing(&crate::cluster::uid(object)) {
        Some(Standing::Void { by }) => {
            now("AllocationVoid", format!("lost against an earlier allocation: {by}"))
        }
        Some(Standing::DeviceGone { uuid }) => {
            now("DeviceGone", format!("card {uuid} is not on node {node} any more"))
        }
        Some(Standing::Holds | Standing::Released) | None => {
            let status = object.status.as_ref().filter(|s| matches!(s.phase, Phase::Failed | Phase::Void))?;
            let reasons = status.conditions.iter().filter(|c| c.status == "False" && !c.message.is_empty());
            let text = reasons.map(|c| format!("{}: {}", c.reason, c.message)).collect::<Vec<_>>().join("; ");
            let text =
                if text.is_empty() { format!("node {node} could not give what was decided") } else { text };
            now("AllocationFailed", text)
        }
    }
}

pub(super) async fn run(context: &Context, stop: &CancellationToken) {
    let patience = tokio::sync::Mutex::new(Patience::default());
    drive(context, stop, || async {
        let mut patience = patience.lock().await;
        pass(context, &mut patience).await
    })
    .await;
}

async fn pass(context: &Context, patience: &mut Patience) -> Duration {
    let out: Vec<(PodRecord, Why)> = context
        .store
        .read(|facts| facts.pods().filter_map(|pod| Some((pod.clone(), why(facts, pod)?))).collect());
    patience.keep(&out.iter().map(|(pod, _)| pod.pod.uid.0.clone()).collect::<Vec<_>>());
    let mut next = IDLE;
    for (pod, why) in out {
        let uid = pod.pod.uid.0.clone();
        let left = patience.left(&uid, why.grace, Instant::now());
        if !left.is_zero() {
            next = next.min(left);
            continue;
        }
        let result = send_away(context, &pod, &why).await;
        context.note("evict", &pod.full_name(), &result);
        // Until the watch says that it is on its way out, it is left alone for longer and longer.
        patience.failed(&uid, Instant::now());
        next = next.min(patience.left(&uid, why.grace, Instant::now()));
    }
    next
}

async fn send_away(context: &Context, pod: &PodRecord, why: &Why) -> Result<(), Error> {
    if why.code == "AllocationMissing" && !missing(context, &pod.pod).await? {
        return Ok(());
    }
    let span = mullion_telemetry::pod_span!("evict", pod.pod.uid.as_str(), code = why.code);
    let work = async {
        if why.code == "AllocationMissing" && !pod.owned {
            let note = format!("{}: delete the pod and create it anew", why.text);
            context.cluster.tell(&pod.pod, EventType::Warning, why.code, "Evict", note).await;
            return Ok(());
        }
        let note = format!("evicted: {}", why.text);
        let evicted = context.cluster.evict(&pod.pod).await?;
        if evicted {
            tracing::info!(pod = pod.full_name(), reason = why.text, "evicted pod");
            context.cluster.tell(&pod.pod, EventType::Warning, why.code, "Evict", note).await;
        } else {
            tracing::warn!(pod = pod.full_name(), "a disruption budget forbids the eviction for now");
        }
        Ok(())
    };
    tracing::Instrument::instrument(work, span).await
}

/// Whether the API server itself knows no allocation of a pod that it still shows as bound.
async fn missing(context: &Context, pod: &PodRef) -> Result<bool, Error> {
    let name = mullion_crds::object::allocation_name(&pod.name, pod.uid.as_str());
    if let Some(found) = context.cluster.allocation(&pod.namespace, &name).await?
        && found.spec.pod.uid == pod.uid.0
    {
        context.store.write(|facts| facts.allocation_seen(found));
        return Ok(false);
    }
    let found = context.cluster.pod(&pod.namespace, &pod.name).await?;
    let same = found.filter(|found| found.metadata.uid.as_deref() == Some(pod.uid.as_str()));
    Ok(same.and_then(|found| found.spec).and_then(|spec| spec.node_name).is_some_and(|node| !node.is_empty()))
}

#[cfg(test)]
mod tests;
