//! Grants that no container will use: `Allocate` answered with them, and the pod went before its container started, or
//! the kubelet admitted it no further. Such a grant is a name alone (no file, no slot of ours: those are the kubelet's),
//! so what is left to do is to write down that it is over.

use std::collections::{BTreeMap, BTreeSet};

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::api::ListParams;
use kube::{Api, ResourceExt};
use mullion_audit::Event as AuditEvent;
use mullion_core::request::COUNT;
use mullion_core::units::PodUid;
use tracing::{debug, warn};

use super::Releaser;
use crate::checkpoint::{self, Owner};
use crate::error::Error;
use crate::world::World;

/// How old a grant is before it is asked what became of it, in seconds: the kubelet writes its checkpoint right after
/// `Allocate`, and the pod's watch may lag.
const SETTLED: i64 = 60;

/// What became of old grants that nobody has filled.
#[derive(Debug, Default, PartialEq, Eq)]
struct Fates {
    /// Nobody will: the kubelet's checkpoint has them not, or for a pod that ended or was seen to go.
    over: BTreeSet<String>,
    /// The checkpoint has them for a pod that was not seen: gone, or only not here yet.
    absent: BTreeMap<String, PodUid>,
}

fn fates(world: &World, owners: &[Owner], now: i64) -> Fates {
    let mut fates = Fates::default();
    let Some(pods) = &world.pods else { return fates };
    let is_old = |at: i64| now.saturating_sub(at) >= SETTLED;
    for grant in world.issued.iter().filter(|(_, at)| is_old(**at)).map(|(grant, _)| grant) {
        let owner = owners.iter().find(|o| o.grant.as_ref() == Some(grant));
        match owner.map(|owner| (&owner.pod, pods.get(&owner.pod))) {
            Some((_, Some(pod))) if !pod.ended => {}
            Some((uid, None)) if !world.deleted_pods.contains(uid) => {
                fates.absent.insert(grant.clone(), uid.clone());
            }
            _ => {
                fates.over.insert(grant.clone());
            }
        }
    }
    fates
}

impl Releaser {
    /// Withdraws what nobody will use. What cannot be written down now is found again later, or by the next run, from the
    /// log.
    pub(super) async fn withdraw_unused(&self) {
        self.shared.change_if(|world| {
            let World { issued, grants, .. } = world;
            issued.retain(|grant, _| !grants.contains_key(grant));
            false
        });
        if self.shared.read(|w| w.issued.is_empty()) {
            return;
        }
        // Nothing is concluded from a checkpoint that cannot be read.
        let Ok(bytes) = tokio::fs::read(self.settings.checkpoint()).await else { return };
        let Ok(owners) = checkpoint::parse(&bytes, COUNT) else { return };
        let now = Timestamp::now().as_second();
        let Fates { mut over, absent } = self.shared.read(|w| fates(w, &owners, now));
        if !absent.is_empty() {
            match self.pods_here().await {
                Ok(here) => {
                    over.extend(absent.into_iter().filter(|(_, pod)| !here.contains(pod)).map(|(g, _)| g));
                }
                Err(error) => {
                    debug!(code = error.code(), error = %mullion_telemetry::source_chain(&error), "pods not known");
                }
            }
        }
        for grant in over {
            debug!(grant, "no container will use this grant");
            let event = AuditEvent::GrantWithdrawn { grant: grant.clone(), code: "Unused".to_owned() };
            if let Err(error) = self.audit.append(event).await {
                warn!(code = error.code(), error = %mullion_telemetry::source_chain(&error), "withdrawal not audited");
                return;
            }
            self.shared.change_if(|world| {
                world.issued.remove(&grant);
                false
            });
        }
    }

    /// The pods of this node as the API server has them now: a watch may be behind, or broken off.
    async fn pods_here(&self) -> Result<BTreeSet<PodUid>, Error> {
        let node = &self.settings.node;
        let here = ListParams::default().fields(&format!("spec.nodeName={node}"));
        let api: Api<Pod> = Api::all(self.client.clone());
        let pods = api.list_metadata(&here).await.map_err(Error::api(format!("list pods of node {node}")))?;
        Ok(pods.items.iter().filter_map(|pod| pod.uid().map(PodUid)).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::world::PodSeen;

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
            ("of-a-pod-that-was-seen-to-go", 0),
            ("of-one-that-was-not-seen", 0),
            ("of-one-that-ended", 0),
            ("of-one-that-waits", 0),
            ("admitted-no-further", 0),
            ("just-issued", now - SETTLED + 1),
        ];
        let mut world = World {
            issued: issued.map(|(grant, at)| (grant.to_owned(), at)).into(),
            deleted_pods: BTreeSet::from(["gone".into()]),
            ..World::default()
        };
        let owners = [
            owner("gone", "of-a-pod-that-was-seen-to-go"),
            owner("absent", "of-one-that-was-not-seen"),
            owner("ended", "of-one-that-ended"),
            owner("lives", "of-one-that-waits"),
        ];
        assert_eq!(fates(&world, &owners, now), Fates::default(), "pods are not known yet");
        world.pods = Some(BTreeMap::from([pod("lives", false), pod("ended", true)]));
        let over = ["admitted-no-further", "of-a-pod-that-was-seen-to-go", "of-one-that-ended"];
        let want = Fates {
            over: over.map(str::to_owned).into(),
            absent: [("of-one-that-was-not-seen".to_owned(), "absent".into())].into(),
        };
        assert_eq!(fates(&world, &owners, now), want);
    }
}
