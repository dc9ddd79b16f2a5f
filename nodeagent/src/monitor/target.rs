//! Which containers are looked after: those that were given a slice here, and those that HAMi gave one before us.

use std::collections::{BTreeMap, BTreeSet};

use mullion_audit::{AllocationRef, PodRef};
use mullion_core::facts::ContainerKind;
use mullion_core::request::ComputeWishes;
use mullion_core::units::{AllocationUid, PodUid};

use crate::monitor::usage::Limit;
use crate::prepare::{allocation_ref, files};
use crate::world::World;

/// Which container: pod uid and name.
pub type Key = (String, String);

/// A container to look after.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// Its pod.
    pub pod: PodRef,
    /// Its name.
    pub container: String,
    /// The runtime's id while it runs.
    pub running: Option<String>,
    /// How it wants its share of compute to be held.
    pub wishes: ComputeWishes,
    /// What we gave it; `None` for one of HAMi's.
    pub grant: Option<Granted>,
    /// Another pod has its pod's name by now: what is left of this one holds its slice, and its series are the other's.
    pub succeeded: bool,
}

/// What a container was given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Granted {
    /// By which allocation.
    pub allocation: AllocationRef,
    /// Name of its control page.
    pub page: String,
    /// Its cards in its own order.
    pub limits: Vec<Limit>,
    /// The library is mounted into it.
    pub enforced: bool,
}

impl Target {
    /// Which container.
    #[must_use]
    pub fn key(&self) -> Key {
        (self.pod.uid.clone(), self.container.clone())
    }

    /// The folder of its usage file below that of all containers.
    #[must_use]
    pub fn folder(&self) -> String {
        format!("{}_{}", self.pod.uid, self.container)
    }
}

/// Which pod has a name: the one that the API server has, else, of those with a slice, the last one that was placed.
fn heirs(world: &World) -> BTreeMap<(&str, &str), &PodUid> {
    let pods = world.pods.iter().flatten();
    let here = pods.map(|(uid, pod)| ((pod.namespace.as_str(), pod.name.as_str()), (true, 0, uid)));
    let held = world.ledger.allocations_on(&world.node).filter(|fact| !fact.released).map(|fact| {
        let pod = &fact.pod;
        let is_here = world.pods.as_ref().is_some_and(|pods| pods.contains_key(&pod.uid));
        ((pod.namespace.as_str(), pod.name.as_str()), (is_here, fact.sequence, &pod.uid))
    });
    let mut heirs = BTreeMap::new();
    for (name, claim) in here.chain(held) {
        let best = heirs.entry(name).or_insert(claim);
        *best = claim.max(*best);
    }
    heirs.into_iter().map(|(name, (_, _, uid))| (name, uid)).collect()
}

/// Every container to look after; `folders` are the names of the folders that there are.
#[must_use]
pub fn targets(world: &World, folders: &[String]) -> Vec<Target> {
    let running = |pod: &str, container: &str| {
        let pod = world.pods.as_ref()?.get(&PodUid::from(pod))?;
        pod.containers.get(container)?.running.clone()
    };
    let wishes = |pod: &str, container: &str| {
        let pod = world.pods.as_ref()?.get(&PodUid::from(pod))?;
        pod.wishes.get(container).copied()
    };
    let mut targets = Vec::with_capacity(world.grants.len());
    let heirs = heirs(world);
    let succeeded = |namespace: &str, name: &str, uid: &str| {
        heirs.get(&(namespace, name)).is_some_and(|heir| heir.as_str() != uid)
    };
    for grant in world.grants.values() {
        let Some(fact) = world.ledger.allocation(&AllocationUid::from(grant.allocation.as_str())) else {
            continue;
        };
        let Some(container) = fact.containers.iter().find(|c| c.name == grant.container) else { continue };
        if fact.released || container.kind == ContainerKind::Init && fact.init_done {
            continue;
        }
        let limits = container.devices.iter().map(|d| Limit {
            card: d.uuid.0.clone(),
            memory: d.memory.bytes(),
            cores: d.cores.get(),
        });
        targets.push(Target {
            pod: crate::prepare::pod_ref(&fact.pod),
            container: container.name.clone(),
            running: running(&grant.pod, &grant.container),
            wishes: wishes(&grant.pod, &grant.container).unwrap_or_default(),
            grant: Some(Granted {
                allocation: allocation_ref(fact),
                page: grant.grant.clone(),
                limits: limits.collect(),
                enforced: grant.enforced,
            }),
            succeeded: succeeded(&fact.pod.namespace, &fact.pod.name, &grant.pod),
        });
    }
    let ours: BTreeSet<Key> = world.grants.values().map(|g| (g.pod.clone(), g.container.clone())).collect();
    for folder in folders {
        let Some((uid, container)) = folder.split_once('_') else { continue };
        if ours.contains(&(uid.to_owned(), container.to_owned())) || !files::is_plain(container) {
            continue;
        }
        // A folder that belongs to no pod of the node says nothing about anybody.
        let Some(pod) = world.pods.as_ref().and_then(|p| p.get(&PodUid::from(uid))).filter(|p| !p.ended)
        else {
            continue;
        };
        targets.push(Target {
            pod: PodRef { namespace: pod.namespace.clone(), name: pod.name.clone(), uid: uid.to_owned() },
            container: container.to_owned(),
            running: running(uid, container),
            wishes: wishes(uid, container).unwrap_or_default(),
            grant: None,
            succeeded: succeeded(&pod.namespace, &pod.name, uid),
        });
    }
    targets.sort_by_cached_key(Target::key);
    targets
}
