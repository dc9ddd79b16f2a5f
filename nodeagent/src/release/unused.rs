//! Grants that no container will use: `Allocate` answered with them, and the pod went before its container started, or
//! the kubelet admitted it no further. Such a grant is a name alone (no file, no slot of ours: those are the kubelet's),
//! so what is left to do is to write down that it is over.

use std::collections::{BTreeMap, BTreeSet};

use jiff::Timestamp;
use mullion_audit::Event as AuditEvent;
use mullion_core::request::COUNT;
use mullion_core::units::PodUid;
use tracing::{debug, warn};

use super::Releaser;
use crate::checkpoint::{self, Owner};
use crate::state::Key;
use crate::world::{PodSeen, World};

/// How old a grant is before it is asked what became of it, in seconds: the kubelet writes its checkpoint right after
/// `Allocate`, and the pod's watch may lag.
const SETTLED: i64 = 60;

/// Grants that nobody will use: old ones that the kubelet's checkpoint has not, or has for a pod that is gone or ended.
fn unused(
    issued: &BTreeMap<String, i64>,
    owners: &[Owner],
    pods: &BTreeMap<PodUid, PodSeen>,
    now: i64,
) -> BTreeSet<String> {
    let lives = |owner: &Owner| pods.get(&owner.pod).is_some_and(|pod| !pod.ended);
    let waiting: BTreeSet<&str> =
        owners.iter().filter(|o| lives(o)).filter_map(|o| o.grant.as_deref()).collect();
    let old = issued.iter().filter(|(_, at)| now.saturating_sub(**at) >= SETTLED).map(|(grant, _)| grant);
    old.filter(|grant| !waiting.contains(grant.as_str())).cloned().collect()
}

/// Takes in what the kubelet gives to whom, and answers with the grants that are over; those are forgotten.
fn settle(world: &mut World, owners: &[Owner], now: i64) -> BTreeSet<String> {
    let filled = |grant: &String| world.grants.contains_key(grant);
    let known: Vec<String> = world.issued.keys().filter(|g| filled(g)).cloned().collect();
    for grant in known {
        world.issued.remove(&grant);
    }
    let Some(pods) = &world.pods else { return BTreeSet::new() };
    let over = unused(&world.issued, owners, pods, now);
    world.issued.retain(|grant, _| !over.contains(grant));
    over
}

impl Releaser {
    /// Withdraws what nobody will use, and keeps what is still open for the next run; `kept` is what is kept already. What
    /// was issued in the seconds before a crash stays open in the log.
    pub(super) async fn withdraw_unused(&self, kept: &mut BTreeMap<String, i64>) {
        if self.shared.read(|w| !w.issued.is_empty()) {
            // Nothing is concluded from a checkpoint that cannot be read.
            let Ok(bytes) = tokio::fs::read(self.settings.checkpoint()).await else { return };
            let Ok(owners) = checkpoint::parse(&bytes, COUNT) else { return };
            let now = Timestamp::now().as_second();
            let mut over = BTreeSet::new();
            self.shared.change_if(|world| {
                over = settle(world, &owners, now);
                false
            });
            for grant in over {
                debug!(grant, "no container will use this grant");
                let event = AuditEvent::GrantWithdrawn { grant, code: "Unused".to_owned() };
                if let Err(error) = self.audit.append(event).await {
                    warn!(code = error.code(), error = %mullion_telemetry::source_chain(&error), "withdrawal not audited");
                }
            }
        }
        let open = self.shared.read(|w| w.issued.clone());
        if open != *kept {
            match self.state.put(Key::Issued, &open).await {
                Ok(()) => *kept = open,
                Err(error) => {
                    warn!(code = error.code(), error = %mullion_telemetry::source_chain(&error), "open grants not kept");
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::Grant;

    #[test]
    fn a_grant_whose_pod_went_before_its_container_started_is_over() {
        let owner = |pod: &str, grant: &str| Owner {
            pod: pod.into(),
            container: "main".to_owned(),
            ids: BTreeSet::from(["slot-0000".to_owned()]),
            grant: Some(grant.to_owned()),
        };
        let pod = |uid: &str, ended| (uid.into(), PodSeen { ended, ..PodSeen::default() });
        let now = 1000;
        let issued = [
            ("of-a-pod-that-is-gone", 0),
            ("of-one-that-ended", 0),
            ("of-one-that-waits", 0),
            ("admitted-no-further", 0),
            ("just-issued", now - SETTLED + 1),
            ("filled", 0),
        ];
        let grant = Grant {
            grant: "filled".to_owned(),
            allocation: "a".to_owned(),
            pod: "lives".to_owned(),
            container: "main".to_owned(),
            device_ids: Vec::new(),
            enforced: true,
            unenforced: None,
        };
        let mut world = World {
            issued: issued.map(|(grant, at)| (grant.to_owned(), at)).into(),
            grants: BTreeMap::from([("filled".to_owned(), grant)]),
            ..World::default()
        };
        let owners = [
            owner("gone", "of-a-pod-that-is-gone"),
            owner("ended", "of-one-that-ended"),
            owner("lives", "of-one-that-waits"),
            owner("lives", "filled"),
        ];
        assert!(settle(&mut world, &owners, now).is_empty(), "pods are not known yet");
        world.pods = Some(BTreeMap::from([pod("lives", false), pod("ended", true)]));
        let over = settle(&mut world, &owners, now);
        let names = |grants: [&str; 3]| BTreeSet::from(grants.map(str::to_owned));
        assert_eq!(over, names(["admitted-no-further", "of-a-pod-that-is-gone", "of-one-that-ended"]));
        assert_eq!(world.issued.keys().collect::<Vec<_>>(), ["just-issued", "of-one-that-waits"]);
        assert!(settle(&mut world, &owners, now).is_empty(), "once");
        // Its pod is deleted: as is the rule for one that never gets its allocation.
        world.pods = Some(BTreeMap::new());
        assert_eq!(settle(&mut world, &owners, now), BTreeSet::from(["of-one-that-waits".to_owned()]));
    }
}
