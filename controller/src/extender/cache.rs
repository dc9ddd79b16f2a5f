//! Verdicts on nodes, remembered by request shape and by the node's generation in the ledger.
//!
//! Since Kubernetes 1.32 every change of any assigned pod retries every pod that an extender refused, so the same
//! question comes again and again while only one node of thousands has changed.

use std::collections::{BTreeMap, HashMap};

use mullion_core::ledger::Ledger;
use mullion_core::placement::Shape;
use mullion_core::refusal::Code;
use mullion_core::request::PodRequest;
use mullion_core::units::NodeName;
use parking_lot::Mutex;

/// How many request shapes are remembered. A shape over 5,000 nodes is about 0.5 MiB.
const SHAPES: usize = 64;

/// Verdicts on nodes that are gone which are not worth looking for.
const SPARE: usize = 64;

/// What is known of a node and a shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It fits, and that well: `0..=100`.
    Fits(i64),
    /// It does not.
    Refused(Code),
}

impl Verdict {
    /// How good the node is; one that does not fit is worth nothing.
    #[must_use]
    pub const fn score(&self) -> i64 {
        match self {
            Self::Fits(score) => *score,
            Self::Refused(_) => 0,
        }
    }
}

#[derive(Debug, Default)]
struct Entry {
    used: u64,
    verdicts: HashMap<NodeName, (u64, Verdict)>,
    /// How many verdicts were left when those on nodes that are gone were last forgotten.
    kept: usize,
}

impl Entry {
    /// Forgets nodes that are gone, once there may be as many of them as there are others.
    fn tidy(&mut self, ledger: &Ledger) {
        if self.verdicts.len() > 2 * self.kept + SPARE {
            self.verdicts.retain(|node, _| ledger.node_generation(node) > 0);
            self.kept = self.verdicts.len();
        }
    }
}

#[derive(Debug, Default)]
struct Shapes {
    clock: u64,
    entries: BTreeMap<PodRequest, Entry>,
}

/// Verdicts by shape and node.
#[derive(Debug, Default)]
pub struct VerdictCache {
    shapes: Mutex<Shapes>,
}

impl VerdictCache {
    /// The verdict on each of `nodes`, in order, and how many of them were remembered.
    pub fn verdicts(
        &self,
        request: &PodRequest,
        nodes: &[NodeName],
        ledger: &Ledger,
    ) -> (Vec<Verdict>, usize) {
        let mut guard = self.shapes.lock();
        let entry = guard.entry(request);
        let shape = Shape::new(request);
        let mut remembered = 0;
        let verdicts = nodes.iter().map(|node| {
            let generation = ledger.node_generation(node);
            // Generation 0: nothing is known of the node, and the answer to that costs nothing.
            if generation > 0
                && let Some((at, verdict)) = entry.verdicts.get(node)
                && *at == generation
            {
                remembered += 1;
                return *verdict;
            }
            let verdict = match shape.check(ledger, node) {
                Ok(score) => Verdict::Fits(score.value),
                Err(code) => Verdict::Refused(code),
            };
            if generation > 0 {
                entry.verdicts.insert(node.clone(), (generation, verdict));
            }
            verdict
        });
        let verdicts = verdicts.collect();
        entry.tidy(ledger);
        (verdicts, remembered)
    }
}

impl Shapes {
    /// The entry of a shape; makes room by forgetting the one that was used longest ago.
    fn entry(&mut self, request: &PodRequest) -> &mut Entry {
        self.clock += 1;
        if !self.entries.contains_key(request) && self.entries.len() >= SHAPES {
            let oldest = self.entries.iter().min_by_key(|(_, entry)| entry.used).map(|(key, _)| key.clone());
            if let Some(oldest) = oldest {
                self.entries.remove(&oldest);
            }
        }
        let clock = self.clock;
        let entry = self.entries.entry(request.clone()).or_default();
        entry.used = clock;
        entry
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::{card, kube_node, node, request};
    use mullion_core::facts::Event;

    fn ledger() -> Ledger {
        let mut ledger = Ledger::default();
        for name in ["a", "b"] {
            ledger.apply(&Event::NodeObserved(node(name, vec![card("GPU-1", 1000)])));
            ledger.apply(&Event::KubeNodeObserved(kube_node(name, 10)));
        }
        ledger
    }

    #[test]
    fn only_changed_nodes_are_worked_out_anew() {
        let (cache, mut ledger) = (VerdictCache::default(), ledger());
        let nodes: Vec<NodeName> = ["a", "b", "nowhere"].map(Into::into).into();
        let request = request(800);
        let (first, remembered) = cache.verdicts(&request, &nodes, &ledger);
        assert_eq!(remembered, 0);
        assert!(matches!(first[0], Verdict::Fits(_)));
        assert_eq!(first[2], Verdict::Refused(Code::NodeUnknown));
        assert_eq!(cache.verdicts(&request, &nodes, &ledger), (first, 2));
        ledger.apply(&Event::NodeObserved(node("b", vec![card("GPU-1", 700)])));
        let (second, remembered) = cache.verdicts(&request, &nodes, &ledger);
        assert_eq!(remembered, 1);
        assert_eq!(second[1], Verdict::Refused(Code::CardTooSmall));
    }

    #[test]
    fn nodes_that_come_and_go_leave_nothing() {
        let (cache, mut ledger) = (VerdictCache::default(), ledger());
        for number in 0..1000 {
            let name = format!("spot-{number}");
            ledger.apply(&Event::NodeObserved(node(&name, vec![card("GPU-1", 1000)])));
            cache.verdicts(&request(1), &[name.as_str().into()], &ledger);
            ledger.apply(&Event::NodeGone(name.as_str().into()));
        }
        let left = cache.shapes.lock().entries[&request(1)].verdicts.len();
        assert!(left <= SPARE + 1, "{left}");
    }

    #[test]
    fn room_is_made_for_new_shapes() {
        let (cache, ledger) = (VerdictCache::default(), ledger());
        let nodes: Vec<NodeName> = vec!["a".into()];
        for memory in 1..=u64::try_from(SHAPES).unwrap() + 5 {
            cache.verdicts(&request(memory), &nodes, &ledger);
            cache.verdicts(&request(1), &nodes, &ledger);
        }
        assert_eq!(cache.shapes.lock().entries.len(), SHAPES);
        assert_eq!(cache.verdicts(&request(1), &nodes, &ledger).1, 1, "a shape in use stays");
        assert_eq!(cache.verdicts(&request(2), &nodes, &ledger).1, 0, "one that is not goes");
    }
}
