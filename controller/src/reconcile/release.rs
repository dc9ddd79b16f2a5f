//! Allocations that are over: their pod never got the node, or their node is gone.
//!
//! Where a node lives and its pod was bound, its agent releases, by proof. The controller does it in two cases only:
//! the pod was never bound there (no agent has a part in it), or the node itself is gone, was made anew, or was
//! declared out of service by an admin.

use std::time::Duration;

use jiff::Timestamp;
use kube::ResourceExt;
use mullion_core::facts::AllocationFact;
use mullion_crds::{VGPUAllocation, names};
use serde_json::{Value, json};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::{Context, IDLE, Patience, drive};
use crate::cluster::full_name;
use crate::error::Error;
use crate::store::{Facts, NodeRecord};
use crate::undo::{self, PodState};

/// A pod that has an allocation and no node for this long is not being bound any more: kube-scheduler gives a bind
/// 30 s, and so does every replica's extender.
const UNBOUND: Duration = Duration::from_secs(35);

/// Why an allocation's node does not count any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loss {
    /// There is no Node of that name.
    Gone,
    /// The Node was made anew after the allocation was decided.
    Replaced,
    /// An admin put the out-of-service taint on it.
    OutOfService,
}

impl Loss {
    /// Reason of the condition.
    #[must_use]
    pub const fn reason(self) -> &'static str {
        match self {
            Self::Gone => "NodeGone",
            Self::Replaced => "NodeReplaced",
            Self::OutOfService => "NodeOutOfService",
        }
    }
}

/// What looks wrong with an allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Suspicion {
    /// Its node does not count any more.
    NodeLost(Loss),
    /// Its pod is not on its node, for as far as we have seen.
    NotBound {
        /// How long it may look so before it is checked.
        grace: Duration,
    },
}

/// Whether the Node that is there now is the one that the allocation was decided for.
#[must_use]
pub const fn lost(created: i64, node: Option<&NodeRecord>) -> Option<Loss> {
    match node {
        None => Some(Loss::Gone),
        // Both times come from the API server, in whole seconds.
        Some(node) if node.created > created => Some(Loss::Replaced),
        Some(node) if node.out_of_service => Some(Loss::OutOfService),
        Some(_) => None,
    }
}

/// What looks wrong with an allocation (`fact` and object), by what has been seen.
#[must_use]
pub fn suspect(facts: &Facts, fact: &AllocationFact, allocation: &VGPUAllocation) -> Option<Suspicion> {
    let held_back = allocation.finalizers().iter().any(|f| f == names::FINALIZER);
    if fact.released && !held_back {
        // Over. A pod that still exists owns it; the garbage collector takes it with the pod.
        return None;
    }
    if let Some(loss) = lost(fact.created, facts.node(fact.node.as_str())) {
        return Some(Suspicion::NodeLost(loss));
    }
    if fact.released || fact.prepared {
        return None;
    }
    let grace = match facts.pod(fact.pod.uid.as_str()) {
        Some(pod) => match &pod.node {
            Some(node) if *node == fact.node => return None,
            Some(_) => Duration::ZERO,
            None => UNBOUND,
        },
        None => match facts.departed_bound(fact.pod.uid.as_str()) {
            Some(false) => Duration::ZERO,
            // It was bound, or may have been: its node's agent proves that nothing of it is left. Where that one is
            // down, nothing can be placed there anyway.
            Some(true) | None => return None,
        },
    };
    Some(Suspicion::NotBound { grace })
}

pub(super) async fn run(context: &Context, stop: &CancellationToken) {
    drive(context, stop, Patience::default(), pass).await;
}

async fn pass(context: &Context, patience: &mut Patience) -> Duration {
    let suspects: Vec<(String, VGPUAllocation, Suspicion)> = context.store.read(|facts| {
        let judged =
            facts.allocations().filter_map(|(fact, object)| Some((object, suspect(facts, fact, object)?)));
        judged.map(|(object, why)| (patience_key(object, why), object.clone(), why)).collect()
    });
    patience.keep(&suspects.iter().map(|(uid, ..)| uid.clone()).collect::<Vec<_>>());
    let mut next = IDLE;
    for (uid, object, why) in suspects {
        let grace = match why {
            Suspicion::NodeLost(_) => Duration::ZERO,
            Suspicion::NotBound { grace } => grace,
        };
        let left = patience.left(&uid, grace, Instant::now());
        if !left.is_zero() {
            next = next.min(left);
            continue;
        }
        let result = match why {
            Suspicion::NodeLost(_) => release(context, &object).await,
            Suspicion::NotBound { .. } => undo_unbound(context, &object).await,
        };
        match &result {
            Ok(true) => patience.done(&uid),
            // It looks wrong and is not, or it was not its turn: look again, less and less often.
            Ok(false) => patience.failed(&uid, Instant::now()),
            Err(_) => {
                patience.failed(&uid, Instant::now());
                let action = if matches!(why, Suspicion::NodeLost(_)) { "release" } else { "undo" };
                context.note(action, &full_name(&object), &result);
            }
        }
        if !matches!(result, Ok(true)) {
            next = next.min(patience.left(&uid, grace, Instant::now()));
        }
    }
    next
}

/// What the wait of a suspicion counts for. An allocation in a new version may just have been taken up by a bind
/// ([`crate::cluster::Cluster::take_up`]), which then has as long as any other.
fn patience_key(object: &VGPUAllocation, why: Suspicion) -> String {
    let uid = object.uid().unwrap_or_default();
    match why {
        Suspicion::NodeLost(_) => uid,
        Suspicion::NotBound { .. } => format!("{uid} {}", object.resource_version().unwrap_or_default()),
    }
}

/// Undoes the allocation if its pod is not bound to its node; true when it is gone.
async fn undo_unbound(context: &Context, object: &VGPUAllocation) -> Result<bool, Error> {
    // A bind of that pod that is under way here decides by itself.
    let Some(_turn) = context.turns.try_of(object.spec.pod.uid.as_str().into()) else { return Ok(false) };
    let span =
        mullion_telemetry::pod_span!("undo", object.spec.pod.uid.as_str(), allocation = object.name_any());
    let work = undo::undo(&context.cluster, &context.store, object);
    match tracing::Instrument::instrument(work, span).await {
        Ok(()) => {
            context.metrics.action("undo", "ok");
            Ok(true)
        }
        Err(Error::AllocationInUse { .. }) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Sets `Released` and takes the finalizer off, if the node is really lost; true when done.
async fn release(context: &Context, object: &VGPUAllocation) -> Result<bool, Error> {
    let name = object.spec.node_name.as_str();
    let node = context.cluster.node(name).await?;
    let record = node.as_ref().map(crate::store::Facts::trim);
    let created = object.creation_timestamp().map_or(0, |t| t.0.as_second());
    let Some(loss) = lost(created, record.as_ref()) else { return Ok(false) };
    let span =
        mullion_telemetry::pod_span!("release", object.spec.pod.uid.as_str(), allocation = object.name_any());
    let work = async {
        let mut seen = object.clone();
        if !mullion_crds::facts::allocation(object).released {
            let status = released(object, loss, Timestamp::now());
            match context.cluster.patch_allocation_status(object, &status).await? {
                Some(now) => seen = now,
                None => return Ok(true),
            }
            context.store.write(|facts| facts.allocation_seen(seen.clone()));
        }
        // On a node that was made anew its pod would wait for ever: nothing there will start it. The finalizer is
        // what brings us back here until the eviction is taken; the capacity is free already.
        if loss == Loss::Replaced
            && undo::pod_state(&context.cluster, object).await? == PodState::Bound(name.to_owned())
        {
            let pod = mullion_crds::facts::allocation(object).pod;
            if !context.cluster.evict(&pod).await? {
                return Ok(false);
            }
        }
        if let Some(stripped) = context.cluster.strip_finalizer(&seen).await? {
            context.store.write(|facts| facts.allocation_seen(stripped));
        }
        context.metrics.action("release", "ok");
        tracing::info!(node = name, reason = loss.reason(), "released allocation of a lost node");
        Ok(true)
    };
    tracing::Instrument::instrument(work, span).await
}

/// The status with `Released` set by us.
fn released(object: &VGPUAllocation, loss: Loss, now: Timestamp) -> Value {
    let known = object.status.iter().flat_map(|status| &status.conditions);
    let mut conditions: Vec<Value> =
        known.filter(|c| c.type_ != "Released").filter_map(|c| serde_json::to_value(c).ok()).collect();
    conditions.push(json!({
        "type": "Released",
        "status": "True",
        "reason": loss.reason(),
        "message": format!("node {}: nothing of the pod can be left there", object.spec.node_name),
        "lastTransitionTime": now.to_string(),
    }));
    json!({"phase": "Released", "conditions": conditions})
}

#[cfg(test)]
mod tests;
