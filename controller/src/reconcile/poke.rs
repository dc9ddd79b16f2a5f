//! Release ⇒ poke: capacity that comes back wakes the pods that it could serve (FS-10).
//!
//! kube-scheduler knows nothing of our ledger: a pod that we refused sleeps until something that it watches changes,
//! for up to five minutes. A patch of the pod's own annotation wakes it on every version. Only pods that would fit
//! are woken, one after the other in a copy of the ledger, so that one free slot does not wake a thousand pods; and
//! each at most once per gain, so that a pod which cannot go there for other reasons is not woken for ever.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use mullion_core::facts::{AllocationFact, Event, PodRef};
use mullion_core::ledger::Ledger;
use mullion_core::request::PodRequest;
use mullion_core::units::{AllocationUid, NodeName, PodUid};
use mullion_crds::names::POKE_ANNOTATION;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::{Context, IDLE, drive};
use crate::store::{Facts, PodRecord};

/// How long a woken pod gets to take the capacity before another is woken for it: kube-scheduler's back-off ends
/// after 10 s.
const ROUND: Duration = Duration::from_secs(5);
/// How long a gain is remembered in any case: a pod that was refused just before it shows that only a moment later.
const LINGER: Duration = Duration::from_secs(15);
/// Most pods that one round wakes.
const MOST: usize = 100;

/// A node that has gained.
#[derive(Debug)]
struct Open {
    since: Instant,
    /// Who was woken for it already.
    woken: BTreeSet<PodUid>,
}

/// Nodes that have gained, and who was woken for each already.
#[derive(Debug, Default)]
pub struct Gains {
    open: BTreeMap<NodeName, Open>,
}

impl Gains {
    /// More has become free on these nodes.
    pub fn add(&mut self, nodes: BTreeSet<NodeName>, now: Instant) {
        for node in nodes {
            self.open.insert(node, Open { since: now, woken: BTreeSet::new() });
        }
    }

    /// Nothing is left to wake anybody for.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.open.is_empty()
    }

    /// Whom to wake now: in the order of `waiting`, each for the first gained node that fits it. A node that fits
    /// nobody new is closed once it has lingered.
    pub fn round(
        &mut self,
        ledger: &Ledger,
        waiting: &[(&PodRef, &PodRequest)],
        now: Instant,
    ) -> Vec<PodRef> {
        let mut woken = Vec::new();
        let mut used: BTreeSet<NodeName> = BTreeSet::new();
        if !waiting.is_empty() {
            let mut ledger = ledger.clone();
            // Giving only makes it less, so a node that refuses a shape once is out for that shape.
            let mut candidates: BTreeMap<&PodRequest, Vec<NodeName>> = BTreeMap::new();
            for (pod, request) in waiting {
                if woken.len() >= MOST {
                    used.extend(self.open.keys().cloned());
                    break;
                }
                let nodes = candidates.entry(*request).or_insert_with(|| self.open.keys().cloned().collect());
                if let Some(node) = self.give(&mut ledger, pod, request, nodes) {
                    used.insert(node);
                    woken.push((*pod).clone());
                }
            }
        }
        self.open.retain(|node, open| used.contains(node) || now < open.since + LINGER);
        woken
    }

    /// The first of `nodes` that fits, with its capacity taken; takes those that do not fit out of `nodes`.
    fn give(
        &mut self,
        ledger: &mut Ledger,
        pod: &PodRef,
        request: &PodRequest,
        nodes: &mut Vec<NodeName>,
    ) -> Option<NodeName> {
        let mut at = 0;
        while let Some(node) = nodes.get(at) {
            let open = self.open.get_mut(node)?;
            if open.woken.contains(&pod.uid) {
                at += 1;
                continue;
            }
            let Ok(placement) = ledger.fit(request, node) else {
                nodes.remove(at);
                continue;
            };
            ledger.apply(&Event::Held(AllocationFact {
                uid: AllocationUid::default(),
                name: String::new(),
                pod: pod.clone(),
                node: node.clone(),
                sequence: ledger.next_sequence(node),
                created: 0,
                containers: placement.containers,
                prepared: false,
                init_done: false,
                released: false,
            }));
            open.woken.insert(pod.uid.clone());
            return Some(node.clone());
        }
        None
    }
}

/// Pods that kube-scheduler has tried and found no node for, in the order in which they are woken.
fn waiting(facts: &Facts) -> Vec<&PodRecord> {
    let mut pods: Vec<&PodRecord> = facts.pods().filter(|pod| pod.waiting() && pod.unschedulable).collect();
    pods.sort_by_key(|pod| (Reverse(pod.priority), pod.created, pod.pod.clone()));
    pods
}

pub(super) async fn run(context: &Context, stop: &CancellationToken) {
    // Whoever leads anew does not know what was missed: every node may have gained.
    let all = context.store.read(|facts| facts.ledger().nodes().cloned().collect());
    let mut gains = Gains::default();
    gains.add(all, Instant::now());
    drive(context, stop, gains, pass).await;
}

async fn pass(context: &Context, gains: &mut Gains) -> Duration {
    let gained = context.store.take_gained();
    gains.add(gained, Instant::now());
    if gains.is_empty() {
        return IDLE;
    }
    let woken: Vec<(PodRef, u64)> = context.store.read(|facts| {
        gains.open.retain(|node, _| !facts.node(node.as_str()).is_some_and(|node| node.unschedulable));
        let pods = waiting(facts);
        let asks = |pod: &'_ &PodRecord| pod.request.as_ref().ok().and_then(Option::as_ref).is_some();
        let asking: Vec<(&PodRef, &PodRequest)> = pods
            .iter()
            .filter(|pod| asks(pod))
            .filter_map(|pod| Some((&pod.pod, pod.request.as_ref().ok()?.as_ref()?)))
            .collect();
        let woken = gains.round(facts.ledger(), &asking, Instant::now());
        let pokes = |pod: &PodRef| facts.pod(pod.uid.as_str()).map_or(0, |record| record.pokes);
        woken.into_iter().map(|pod| (pokes(&pod), pod)).map(|(pokes, pod)| (pod, pokes)).collect()
    });
    for (pod, pokes) in woken {
        let number = pokes.saturating_add(1).to_string();
        let result = context.cluster.annotate_pod(&pod, POKE_ANNOTATION, &number).await;
        context.note("poke", &format!("{}/{}", pod.namespace, pod.name), &result);
        tracing::debug!(pod = pod.name, namespace = pod.namespace, "woke pod");
    }
    if gains.is_empty() { IDLE } else { ROUND }
}

#[cfg(test)]
mod tests;
