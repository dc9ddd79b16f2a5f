//! Which containers are looked after: those that were given a slice here, and those that HAMi gave one before us.

use std::collections::BTreeSet;

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
        });
    }
    targets.sort_by_cached_key(Target::key);
    targets
}
