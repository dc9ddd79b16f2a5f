//! Pods whose allocation cannot be had: it lost against an earlier one, its card is gone, the node failed it, or it
//! is missing altogether. The pod is evicted, so that its owner's next one is placed anew.

use std::collections::BTreeSet;
use std::time::Duration;

use kube::runtime::events::EventType;
use mullion_core::facts::{Event, PodRef};
use mullion_core::ledger::{Ledger, Standing};
use mullion_core::units::PodUid;
use mullion_crds::vgpuallocation::Phase;
use mullion_crds::{VGPUAllocation, facts};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::{Context, IDLE, Patience, drive};
use crate::error::Error;
use crate::store::{Facts, Phase as PodPhase, PodRecord};

/// How long a bound pod may be without an allocation before that is checked: our watches are not in step.
const MISSING: Duration = Duration::from_secs(10);
const MISSING_CODE: &str = "AllocationMissing";

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
        let text = if pod.started {
            format!(
                "runs on node {node} without its allocation, which was removed by hand: the node keeps its GPUs for it and takes no new GPU pods until it has ended"
            )
        } else {
            format!("bound to node {node} without an allocation, so that its containers cannot start")
        };
        let told = pod.started || pod.phase == PodPhase::Pending;
        return told.then_some(Why { code: MISSING_CODE, text, grace: MISSING });
    };
    if object.spec.node_name != node.0 {
        // The other one is undone first.
        return None;
    }
    let standing = facts.ledger().standing(&crate::cluster::uid(object));
    judge(standing, object).map(|(code, text)| Why { code, text, grace: Duration::ZERO })
}

/// Why a bound pod cannot have what its allocation says.
fn judge(standing: Option<Standing>, object: &VGPUAllocation) -> Option<(&'static str, String)> {
    let node = &object.spec.node_name;
    match standing {
        Some(Standing::Void { by }) => {
            Some(("AllocationVoid", format!("lost against an earlier allocation: {by}")))
        }
        Some(Standing::DeviceGone { uuid }) => {
            Some(("DeviceGone", format!("card {uuid} is not on node {node} any more")))
        }
        Some(Standing::Holds | Standing::Released) | None => {
            let status = object.status.as_ref().filter(|s| matches!(s.phase, Phase::Failed | Phase::Void))?;
            let reasons = status.conditions.iter().filter(|c| c.status == "False" && !c.message.is_empty());
            let text = reasons.map(|c| format!("{}: {}", c.reason, c.message)).collect::<Vec<_>>().join("; ");
            let text =
                if text.is_empty() { format!("node {node} could not give what was decided") } else { text };
            Some(("AllocationFailed", text))
        }
    }
}

#[derive(Debug, Default)]
struct Known {
    patience: Patience,
    /// Pods that are only told, and have been.
    told: BTreeSet<PodUid>,
}

pub(super) async fn run(context: &Context, stop: &CancellationToken) {
    drive(context, stop, Known::default(), pass).await;
}

async fn pass(context: &Context, known: &mut Known) -> Duration {
    let out: Vec<(PodRecord, Why)> = context.store.read(|facts| {
        let judged = facts.pods().filter_map(|pod| why(facts, pod).map(|why| (pod, why)));
        judged.map(|(pod, why)| (pod.clone(), why)).collect()
    });
    known.patience.keep(&out.iter().map(|(pod, _)| pod.pod.uid.0.clone()).collect::<Vec<_>>());
    known.told.retain(|uid| out.iter().any(|(pod, _)| pod.pod.uid == *uid));
    let mut next = IDLE;
    for (pod, why) in out {
        let uid = pod.pod.uid.0.clone();
        let left = known.patience.left(&uid, why.grace, Instant::now());
        if !left.is_zero() {
            next = next.min(left);
            continue;
        }
        let result = send_away(context, known, &pod, &why).await;
        if !matches!(result, Ok(false)) {
            context.note("evict", &pod.full_name(), &result);
        }
        // Until the watch says that it is on its way out, it is left alone for longer and longer.
        known.patience.failed(&uid, Instant::now());
        next = next.min(known.patience.left(&uid, why.grace, Instant::now()));
    }
    next
}

/// Evicts `pod` if the API server confirms what was seen; true when it is on its way out.
async fn send_away(context: &Context, known: &mut Known, pod: &PodRecord, why: &Why) -> Result<bool, Error> {
    let confirmed = if why.code == MISSING_CODE {
        missing(context, &pod.pod).await?.then(|| why.text.clone())
    } else {
        confirm(context, pod).await?
    };
    let Some(text) = confirmed else {
        tracing::debug!(pod = pod.full_name(), code = why.code, "not so at the API server: left alone");
        return Ok(false);
    };
    let span = mullion_telemetry::pod_span!("evict", pod.pod.uid.as_str(), code = why.code);
    let work = async {
        if why.code == MISSING_CODE && (!pod.owned || pod.running) {
            // Nobody would make it anew, or it works and a person has to say when it may end. (One that ended and cannot
            // start again without its allocation does not work.) It is told once: an Event is a write.
            if known.told.insert(pod.pod.uid.clone()) {
                let note = format!("{text}: delete the pod and create it anew");
                context.cluster.tell(&pod.pod, EventType::Warning, why.code, "Evict", note).await;
            }
            return Ok(false);
        }
        let note = format!("evicted: {text}");
        let evicted = context.cluster.evict(&pod.pod).await?;
        if evicted {
            tracing::info!(pod = pod.full_name(), reason = text, "evicted pod");
            context.cluster.tell(&pod.pod, EventType::Warning, why.code, "Evict", note).await;
        } else {
            tracing::warn!(pod = pod.full_name(), "a disruption budget forbids the eviction for now");
        }
        Ok(evicted)
    };
    tracing::Instrument::instrument(work, span).await
}

/// Why the API server itself says that `pod` cannot stay; `None` when it can, or is not there any more.
///
/// Our watches are not in step with each other, and while one lists anew the ledger holds what is gone beside what is
/// new: a pod that looks void then may have lost against nobody. So allocations and cards of its node are read and
/// folded afresh.
async fn confirm(context: &Context, pod: &PodRecord) -> Result<Option<String>, Error> {
    let PodRef { namespace, name, uid } = &pod.pod;
    let found = context.cluster.pod(namespace, name).await?;
    let defaults = context.store.read(|facts| *facts.defaults());
    let now = found.as_ref().and_then(|found| PodRecord::read(found, &defaults));
    let Some(now) = now.filter(|now| now.pod.uid == *uid && !now.deleting && now.phase != PodPhase::Ended)
    else {
        return Ok(None);
    };
    let Some(node) = &now.node else { return Ok(None) };
    let objects = context.cluster.allocations_on(node.as_str()).await?;
    let mut ledger = Ledger::default();
    if let Some(fact) = context.cluster.gpu_node(node.as_str()).await?.as_ref().and_then(facts::node) {
        ledger.apply(&Event::NodeObserved(fact));
    }
    for object in &objects {
        ledger.apply(&Event::AllocationObserved(facts::allocation(object)));
    }
    let own = ledger.of_pod(uid).map(|fact| fact.uid.clone());
    let object = objects.iter().find(|object| own.as_ref() == Some(&crate::cluster::uid(object)));
    Ok(object.and_then(|object| judge(ledger.standing(&crate::cluster::uid(object)), object)).map(|(_, t)| t))
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
