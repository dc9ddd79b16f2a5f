//! The node half of an allocation's status: what it should say follows from what the agent knows, and is written when
//! it says something else.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::api::{Patch, PatchParams};
use kube::{Api, Client, ResourceExt};
use mullion_audit::{Entry, Event as AuditEvent};
use mullion_core::facts::{AllocationFact, ContainerKind};
use mullion_core::units::{AllocationUid, PodUid};
use mullion_crds::names::AGENT_MANAGER;
use mullion_crds::vgpuallocation::{ContainerStatus, Phase, VGPUAllocation, VGPUAllocationStatus};
use serde_json::json;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tracing::{debug, warn};

use crate::api::traced;
use crate::config::Settings;
use crate::error::Error;
use crate::metrics::Metrics;
use crate::monitor::engine::Verdict;
use crate::prepare::{allocation_ref, cdi, files, pod_ref};
use crate::state::Grant;
use crate::world::{Shared, World};

/// Containers of a pod that start one after the other are written together.
const COALESCE: Duration = Duration::from_secs(1);
/// Pause between two looks at all allocations.
const LULL: Duration = Duration::from_millis(50);
/// First and longest pause after a failed write.
const PAUSES: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(30));

/// Condition of an allocation whose card failed at some time.
const HEALTHY: &str = "DevicesHealthy";

/// Condition of an allocation's limits.
const ENFORCED: &str = "Enforced";

/// A condition to set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claim {
    kind: &'static str,
    status: &'static str,
    reason: String,
    message: String,
}

impl Claim {
    /// A condition of that type.
    #[must_use]
    pub fn new(kind: &'static str, status: &'static str, reason: &str, message: &str) -> Self {
        Self { kind, status, reason: reason.to_owned(), message: message.to_owned() }
    }
}

/// Puts conditions into a status; those of others stay, times follow the status of each.
pub fn set(status: &mut VGPUAllocationStatus, claims: &[Claim], now: Timestamp) {
    for claim in claims {
        let known = status.conditions.iter_mut().find(|c| c.type_ == claim.kind);
        let moved = known.as_ref().is_none_or(|c| c.status != claim.status);
        let condition = Condition {
            type_: claim.kind.to_owned(),
            status: claim.status.to_owned(),
            reason: claim.reason.clone(),
            message: claim.message.clone(),
            last_transition_time: match &known {
                Some(c) if !moved => c.last_transition_time.clone(),
                _ => Time(now),
            },
            observed_generation: None,
        };
        match known {
            Some(known) => *known = condition,
            None => status.conditions.push(condition),
        }
    }
}

/// What the status should say of an allocation that is not being released; the same as it says where there is nothing
/// to add.
#[must_use]
pub fn desired(world: &World, object: &VGPUAllocation, now: Timestamp) -> VGPUAllocationStatus {
    let old = object.status.clone().unwrap_or_default();
    let uid = AllocationUid(object.uid().unwrap_or_default());
    let is = |kind: &str| old.conditions.iter().any(|c| c.type_ == kind && c.status == "True");
    if is("Released") {
        return old;
    }
    let mut status = old.clone();
    let mut claims = Vec::new();
    let grants: BTreeMap<&str, _> = world.grants_of(&uid).map(|g| (g.container.as_str(), g)).collect();
    for grant in grants.values() {
        let said = ContainerStatus {
            name: grant.container.clone(),
            grant: grant.grant.clone(),
            device_ids: grant.device_ids.clone(),
            mig_uuids: Vec::new(),
        };
        match status.containers.iter_mut().find(|c| c.name == said.name) {
            Some(known) => *known = said,
            None => status.containers.push(said),
        }
    }
    if let Some(refused) = world.refused.get(&uid) {
        claims.push(Claim::new(
            "Prepared",
            if is("Prepared") { "True" } else { "False" },
            refused.code,
            &refused.message,
        ));
        status.phase = if refused.void { Phase::Void } else { Phase::Failed };
    } else if !grants.is_empty() {
        claims.push(Claim::new("Bound", "True", "PodBound", "the pod is bound to this node"));
        claims.push(Claim::new(
            "Prepared",
            "True",
            "GrantsWritten",
            "the node has given a container its devices",
        ));
        let told = old.conditions.iter().find(|c| c.type_ == ENFORCED).map(|c| c.status.as_str());
        // Of an init container that has ended not even the spec is left that could say it.
        let ended =
            |g: &Grant| world.ledger.allocation(&uid).is_some_and(|fact| has_ended(fact, &g.container));
        if grants.values().all(|g| g.enforced || g.unenforced.is_none() && ended(g)) {
            claims.extend(enforced(world, &uid, told.is_some()));
        } else if let Some(why) = grants.values().find_map(|g| g.unenforced.as_ref()) {
            claims.push(Claim::new(ENFORCED, "False", &why.code, &why.message));
        } else if told != Some("False") {
            claims.push(Claim::new(
                ENFORCED,
                "Unknown",
                "NotRecorded",
                "the agent's state was lost, and no spec of the grant is left that says whether the library is mounted",
            ));
        }
        // What a release waits for is found anew after a restart; it was over before.
        let waits = old.conditions.iter().any(|c| c.type_ == "Released");
        status.phase = if waits { Phase::Releasing } else { Phase::Prepared };
    }
    if let Some(witness) = world.waiting.get(&uid) {
        claims.push(Claim::new("Released", "False", witness.code(), &witness.to_string()));
        status.phase = Phase::Releasing;
    }
    let fact = world.ledger.allocation(&uid);
    let init = fact.is_some_and(|f| f.containers.iter().any(|c| c.kind == ContainerKind::Init));
    let pod = world.pods.as_ref().and_then(|p| p.get(&PodUid(object.spec.pod.uid.clone())));
    if init && (is("InitDone") || pod.is_some_and(|p| p.init_done && !p.ended)) {
        claims.push(Claim::new("InitDone", "True", "InitEnded", "every ordinary init container has ended"));
    }
    if !grants.is_empty()
        && let Some(claim) = health(world, object, old.conditions.iter().any(|c| c.type_ == HEALTHY))
    {
        claims.push(claim);
    }
    let known = |claim: &Claim| {
        old.conditions
            .iter()
            // Whom a release waits for is worth a write; there is one for each that is left.
            .any(|c| {
                let same = c.type_ == claim.kind && c.status == claim.status && c.reason == claim.reason;
                same && (c.type_ != "Released" || c.message == claim.message)
            })
    };
    claims.retain(|c| !known(c));
    set(&mut status, &claims, now);
    status
}

fn has_ended(fact: &AllocationFact, container: &str) -> bool {
    let mut init = fact.containers.iter().filter(|c| c.kind == ContainerKind::Init);
    fact.init_done && init.any(|c| c.name == container)
}

/// Whether the limits hold, as far as the monitor has looked; what was said in a former run stays until then.
fn enforced(world: &World, uid: &AllocationUid, told: bool) -> Option<Claim> {
    let verdict = world.verdicts.as_ref().and_then(|v| v.get(uid));
    match verdict {
        Some(Verdict::Holds) => Some(Claim::new(
            ENFORCED,
            "True",
            "LimitsHold",
            "the library applies the limits in each container",
        )),
        Some(Verdict::Bypassed { message }) => Some(Claim::new(ENFORCED, "False", "LimitBypassed", message)),
        Some(Verdict::Damaged { message }) => {
            Some(Claim::new(ENFORCED, "False", "UsageFileDamaged", message))
        }
        Some(Verdict::Unsure) | None if told => None,
        // True only once the library has been seen at work.
        Some(Verdict::Waiting | Verdict::Unsure) | None => Some(Claim::new(
            ENFORCED,
            "Unknown",
            "LibraryMounted",
            "the library that applies the limits is mounted",
        )),
    }
}

/// Tells a prepared allocation about its cards: first when one fails, then whenever that changes.
fn health(world: &World, object: &VGPUAllocation, told: bool) -> Option<Claim> {
    let cards = world.cards.as_ref()?;
    let devices = object.spec.containers.iter().flat_map(|c| &c.devices);
    let ill = devices.filter_map(|d| Some((&d.uuid, cards.get(&d.uuid)?.fault()?))).min();
    match ill {
        Some((uuid, fault)) => {
            Some(Claim::new(HEALTHY, "False", "CardUnhealthy", &format!("card {uuid}: {fault}")))
        }
        None if told => Some(Claim::new(HEALTHY, "True", "CardRecovered", "its cards answer again")),
        None => None,
    }
}

/// Writes an allocation's status, over the version that `object` is.
///
/// # Errors
/// [`Error::Api`]; a conflict and "not found" are errors, too.
pub async fn write(
    client: &Client,
    metrics: &Metrics,
    object: &VGPUAllocation,
    status: &VGPUAllocationStatus,
) -> Result<VGPUAllocation, Error> {
    let (namespace, name) = (object.namespace().unwrap_or_default(), object.name_any());
    let api: Api<VGPUAllocation> = Api::namespaced(client.clone(), &namespace);
    let patch = json!({
        "metadata": {"uid": object.uid(), "resourceVersion": object.resource_version()},
        "status": status,
    });
    let params = PatchParams { field_manager: Some(AGENT_MANAGER.to_owned()), ..PatchParams::default() };
    metrics.api_write("vgpuallocations/status");
    let action = format!("write the status of VGPUAllocation {namespace}/{name}");
    api.patch_status(&name, &params, &Patch::Merge(patch)).await.map_err(Error::api(action))
}

/// Whether the API server says that the object has moved on or is gone: its watch will tell.
#[must_use]
pub fn is_stale(error: &Error) -> bool {
    let Error::Api { source, .. } = error else { return false };
    matches!(source.as_ref(), kube::Error::Api(answer) if answer.is_conflict() || answer.is_not_found())
}

/// Keeps all statuses right.
pub struct Syncer {
    /// The API server.
    pub client: Client,
    /// The world.
    pub shared: Arc<Shared>,
    /// Where files are.
    pub settings: Settings,
    /// Counters.
    pub metrics: Arc<Metrics>,
    /// Facts on their way into the audit log.
    pub facts: mpsc::UnboundedSender<Entry>,
}

impl std::fmt::Debug for Syncer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Syncer").finish_non_exhaustive()
    }
}

/// When an allocation's status is due, and how long to pause after another failure.
#[derive(Clone, Copy, Debug)]
struct Due {
    at: Instant,
    pause: Duration,
}

impl Syncer {
    /// Runs until dropped.
    pub async fn run(self) {
        let mut bell = self.shared.bell();
        let mut due: BTreeMap<AllocationUid, Due> = BTreeMap::new();
        loop {
            bell.borrow_and_update();
            let pending = self.pending();
            due.retain(|uid, _| pending.contains_key(uid));
            let now = Instant::now();
            for (uid, urgent) in &pending {
                let wait = if *urgent { Duration::ZERO } else { COALESCE };
                let entry = due.entry(uid.clone()).or_insert(Due { at: now + wait, pause: PAUSES.0 });
                if *urgent && entry.pause == PAUSES.0 {
                    entry.at = entry.at.min(now);
                }
            }
            let ready: Vec<AllocationUid> =
                due.iter().filter(|(_, d)| d.at <= now).map(|(uid, _)| uid.clone()).collect();
            for uid in ready {
                let result = self.one(&uid).await;
                let Some(entry) = due.get_mut(&uid) else { continue };
                match result {
                    Ok(()) => {
                        due.remove(&uid);
                    }
                    Err(error) => {
                        let stale = is_stale(&error);
                        if !stale {
                            warn!(code = error.code(), error = %mullion_telemetry::source_chain(&error), "status not written");
                        }
                        entry.at = Instant::now() + if stale { PAUSES.0 } else { entry.pause };
                        entry.pause = entry.pause.saturating_mul(2).min(PAUSES.1);
                    }
                }
            }
            let next = due.values().map(|d| d.at).min();
            let ended = match next {
                Some(at) => matches!(tokio::time::timeout_at(at, bell.changed()).await, Ok(Err(_))),
                None => bell.changed().await.is_err(),
            };
            if ended {
                return;
            }
            // A burst of pods rings often.
            tokio::time::sleep(LULL).await;
        }
    }

    /// Allocations whose status is not as it should be, and whether that is urgent (a pod waits for its eviction).
    fn pending(&self) -> BTreeMap<AllocationUid, bool> {
        self.shared.read(|w| {
            let open = w.allocations.iter().filter(|(uid, object)| {
                w.ledger.allocation(uid).is_some_and(|f| !f.released)
                    && !w.orphans.contains(*uid)
                    && object.status.clone().unwrap_or_default() != desired(w, object, Timestamp::UNIX_EPOCH)
            });
            open.map(|(uid, _)| (uid.clone(), w.refused.contains_key(uid))).collect()
        })
    }

    async fn one(&self, uid: &AllocationUid) -> Result<(), Error> {
        let now = Timestamp::now();
        let Some((object, status, fact)) = self.shared.read(|w| {
            let object = w.allocations.get(uid)?.clone();
            let status = desired(w, &object, now);
            Some((object, status, w.ledger.allocation(uid)?.clone()))
        }) else {
            return Ok(());
        };
        let done = |s: &VGPUAllocationStatus| {
            s.conditions.iter().any(|c| c.type_ == "InitDone" && c.status == "True")
        };
        if done(&status) && !object.status.as_ref().is_some_and(done) {
            self.end_init(uid, &fact);
        }
        let written = write(&self.client, &self.metrics, &object, &status).await?;
        debug!(%uid, phase = ?status.phase, "status written");
        self.shared.change(|world| world.see_allocation(written));
        Ok(())
    }

    /// Before others are given what the init containers alone held: a second run of one that needs it back must not
    /// find its grant.
    fn end_init(&self, uid: &AllocationUid, fact: &AllocationFact) {
        let init: Vec<_> = fact.containers.iter().filter(|c| c.kind == ContainerKind::Init).collect();
        let grants: Vec<_> = self.shared.read(|w| {
            let of_init = |g: &&Grant| init.iter().any(|c| c.name == g.container);
            w.grants_of(uid).filter(of_init).map(|g| g.grant.clone()).collect()
        });
        for grant in grants {
            if let Err(error) = files::remove(&self.settings.cdi_dir.join(cdi::file_name(&grant))) {
                warn!(code = error.code(), error = %mullion_telemetry::source_chain(&error), "grant of an init container stays");
            }
        }
        self.shared.change(|world| world.mark(uid, |f| f.init_done = true));
        let event = AuditEvent::InitDone { allocation: allocation_ref(fact), pod: pod_ref(&fact.pod) };
        let _ = self.facts.send(traced(event));
    }
}

#[cfg(test)]
mod tests;
