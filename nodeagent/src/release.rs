//! The end of an allocation: seen over, proved gone, files removed, written down, let go.
//!
//! What starts it is a pod that has ended or is gone, never a deletion timestamp of the allocation (a namespace that is
//! deleted marks allocations while pods run). What frees the capacity is proof: the pod's cgroup is gone in every
//! hierarchy, no process of the node is in one, and none of the pod's is on its cards.

mod sweep;
mod unused;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client, ResourceExt};
use mullion_audit::Event as AuditEvent;
use mullion_core::facts::AllocationFact;
use mullion_core::units::{AllocationUid, PodUid};
use mullion_crds::names::{AGENT_MANAGER, FINALIZER};
use mullion_crds::vgpuallocation::{Phase, VGPUAllocation};
use mullion_telemetry::pod_span;
use serde_json::json;
use tokio::time::Instant;
use tracing::{Instrument, debug, info, warn};

use crate::api::traced;
use crate::audit::Audit;
use crate::cgroup::{self, Cgroups};
use crate::config::Settings;
use crate::error::Error;
use crate::metrics::Metrics;
use crate::nvml::{self, DriverHandle};
use crate::prepare::library::Library;
use crate::prepare::{allocation_ref, cdi, container_folder, files, pod_ref};
use crate::state::State;
use crate::status::{self, Claim};
use crate::world::{Driver, PodSeen, Shared, Witness, World};
pub use sweep::remove_specs;
use sweep::{SWEEP, report};

/// Shortest pause between two looks for proof, or between two tries of a step that fails.
const POLL: Duration = Duration::from_millis(100);
/// Longest one.
const SLOWEST: Duration = Duration::from_secs(5);
/// A pod that is bound here but was never seen: how long its watch may lag before the API server is asked.
const LAG: Duration = Duration::from_secs(3);
/// A release that takes longer is told of: the kubelet's own 30 s for a container to end are over by then.
const LONG: Duration = Duration::from_secs(30);

/// All processes of the node: the agent shares its namespace of them.
const PROC: &str = "/proc";

/// Why an allocation is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// Its pod succeeded or failed.
    PodEnded,
    /// Its pod is deleted.
    PodGone,
}

impl End {
    const fn code(self) -> &'static str {
        match self {
            Self::PodEnded => "PodEnded",
            Self::PodGone => "PodGone",
        }
    }
}

/// What the world says of an allocation's pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Life {
    /// It lives, or nothing is known yet.
    Lives,
    /// It is over.
    Over(End),
    /// It is not among the node's pods and was not seen to go: ask.
    Missing,
}

/// Judges an allocation's pod.
#[must_use]
pub fn life(world: &World, object: &VGPUAllocation) -> Life {
    let pod = PodUid(object.spec.pod.uid.clone());
    if world.deleted_pods.contains(&pod) {
        return Life::Over(End::PodGone);
    }
    match &world.pods {
        None => Life::Lives,
        Some(pods) => match pods.get(&pod) {
            Some(pod) if pod.ended => Life::Over(End::PodEnded),
            Some(_) => Life::Lives,
            None => Life::Missing,
        },
    }
}

/// Releases what is over.
pub struct Releaser {
    /// The API server.
    pub client: Client,
    /// The world.
    pub shared: Arc<Shared>,
    /// The state file.
    pub state: State,
    /// The audit log.
    pub audit: Audit,
    /// The driver.
    pub driver: DriverHandle,
    /// What containers are given.
    pub library: Arc<Library>,
    /// Where things are.
    pub settings: Settings,
    /// Counters.
    pub metrics: Arc<Metrics>,
}

impl std::fmt::Debug for Releaser {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Releaser").finish_non_exhaustive()
    }
}

/// One allocation on its way out.
#[derive(Debug)]
struct Leaving {
    end: End,
    /// Since when it is over.
    since: Instant,
    /// When it is looked at again.
    at: Instant,
    pause: Duration,
}

impl Releaser {
    /// Runs until dropped. Sleeps while nothing is over.
    pub async fn run(self) {
        let cgroups = Cgroups::new(self.settings.cgroup_mount.clone(), &self.settings.cgroup_root);
        self.look(&cgroups).await;
        let mut bell = self.shared.bell();
        let mut leaving: BTreeMap<AllocationUid, Leaving> = BTreeMap::new();
        let mut missing: BTreeMap<AllocationUid, Instant> = BTreeMap::new();
        let mut sweep = Instant::now();
        loop {
            bell.borrow_and_update();
            self.find(&mut leaving, &mut missing).await;
            let now = Instant::now();
            let due: Vec<AllocationUid> =
                leaving.iter().filter(|(_, l)| l.at <= now).map(|(uid, _)| uid.clone()).collect();
            for uid in due {
                let Some(entry) = leaving.get_mut(&uid) else { continue };
                match self.step(&uid, entry.end, &cgroups).await {
                    Ok(None) => {
                        leaving.remove(&uid);
                    }
                    Ok(Some(witness)) => {
                        if entry.since.elapsed() >= LONG {
                            self.tell(&uid, witness);
                        }
                        entry.at = Instant::now() + pause(entry.since.elapsed());
                        entry.pause = POLL;
                    }
                    Err(error) => {
                        if !status::is_stale(&error) {
                            warn!(%uid, code = error.code(), error = %mullion_telemetry::source_chain(&error), "release waits");
                        }
                        if entry.since.elapsed() >= LONG {
                            self.tell(&uid, Witness::Unproved { code: error.code() });
                        }
                        entry.at = Instant::now() + entry.pause;
                        entry.pause = entry.pause.saturating_mul(2).min(SLOWEST);
                    }
                }
            }
            if sweep <= Instant::now() {
                self.tidy(&cgroups).await;
                sweep = Instant::now() + SWEEP;
            }
            let next = leaving.values().map(|l| l.at).chain(missing.values().copied()).chain([sweep]).min();
            if matches!(tokio::time::timeout_at(next.unwrap_or(sweep), bell.changed()).await, Ok(Err(_))) {
                return;
            }
        }
    }

    /// What is done from time to time: looks where cgroups are, and clears away what nobody owns.
    pub async fn tidy(&self, cgroups: &Cgroups) {
        self.look(cgroups).await;
        self.sweep(cgroups).await;
        self.withdraw_unused().await;
        report(self.library.sweep().await);
    }

    /// Finds what is over, and closes it to `PreStartContainer` at once: after that, a cgroup that is gone cannot come
    /// back with a device in it.
    async fn find(
        &self,
        leaving: &mut BTreeMap<AllocationUid, Leaving>,
        missing: &mut BTreeMap<AllocationUid, Instant>,
    ) {
        let mut over = Vec::new();
        let mut absent = Vec::new();
        self.shared.read(|w| {
            leaving.retain(|uid, _| w.allocations.contains_key(uid));
            for (uid, object) in &w.allocations {
                let ours = object.finalizers().iter().any(|f| f == FINALIZER) || w.orphans.contains(uid);
                if !ours || leaving.contains_key(uid) {
                    continue;
                }
                match life(w, object) {
                    Life::Lives => {}
                    Life::Over(end) => over.push((uid.clone(), end)),
                    Life::Missing => absent.push((uid.clone(), Arc::clone(object))),
                }
            }
        });
        missing.retain(|uid, _| absent.iter().any(|(a, _)| a == uid));
        for (uid, object) in absent {
            let now = Instant::now();
            // Between the allocation's creation and the pod's binding this is the rule.
            let lag = if object.metadata.deletion_timestamp.is_some() { Duration::ZERO } else { LAG };
            let ask = *missing.entry(uid.clone()).or_insert(now + lag);
            if ask > now {
                continue;
            }
            match self.is_gone(&object).await {
                Ok(true) => over.push((uid, End::PodGone)),
                Ok(false) => {
                    // Not bound: the controller's. Asked again in a while, in case the watch is behind.
                    missing.insert(uid, now + SLOWEST);
                }
                Err(error) => {
                    debug!(code = error.code(), error = %mullion_telemetry::source_chain(&error), "pod not known");
                    missing.insert(uid, now + LAG);
                }
            }
        }
        if over.is_empty() {
            return;
        }
        self.shared.change(|w| w.releasing.extend(over.iter().map(|(uid, _)| uid.clone())));
        for (uid, end) in over {
            debug!(%uid, code = end.code(), "releasing");
            missing.remove(&uid);
            let now = Instant::now();
            leaving.insert(uid, Leaving { end, since: now, at: now, pause: POLL });
        }
    }

    async fn is_gone(&self, object: &VGPUAllocation) -> Result<bool, Error> {
        let namespace = object.namespace().unwrap_or_default();
        let name = &object.spec.pod.name;
        let api: Api<Pod> = Api::namespaced(self.client.clone(), &namespace);
        let pod = api.get_opt(name).await.map_err(Error::api(format!("read pod {namespace}/{name}")))?;
        Ok(pod.is_none_or(|p| p.uid().as_deref() != Some(object.spec.pod.uid.as_str())))
    }

    /// Says why a slice is not free although its pod is over: in the log, and in the allocation's conditions.
    fn tell(&self, uid: &AllocationUid, witness: Witness) {
        if self.shared.read(|w| w.waiting.get(uid) == Some(&witness)) {
            return;
        }
        warn!(%uid, code = witness.code(), %witness, "release waits");
        self.shared.change(|w| {
            w.waiting.insert(uid.clone(), witness);
        });
    }

    /// One try to release; otherwise what shows that something of the pod is left.
    async fn step(&self, uid: &AllocationUid, end: End, cgroups: &Cgroups) -> Result<Option<Witness>, Error> {
        let Some((object, fact)) =
            self.shared.read(|w| Some((w.allocations.get(uid)?.clone(), w.ledger.allocation(uid)?.clone())))
        else {
            return Ok(None);
        };
        if !fact.released
            && let Some(witness) = self.witness(&fact, cgroups).await?
        {
            return Ok(Some(witness));
        }
        // Waiting is no part of the pod's trace: what begins here is.
        let span = pod_span!("release", fact.pod.uid.as_str(), code = end.code());
        self.finish(uid, &object, &fact, end).instrument(span).await?;
        Ok(None)
    }

    async fn finish(
        &self,
        uid: &AllocationUid,
        object: &VGPUAllocation,
        fact: &AllocationFact,
        end: End,
    ) -> Result<(), Error> {
        if !fact.released {
            self.clean(fact)?;
            let observation = self.shared.read(|w| u64::try_from(w.observation).unwrap_or(0));
            let event = AuditEvent::Released {
                allocation: allocation_ref(fact),
                pod: pod_ref(&fact.pod),
                code: end.code().to_owned(),
                observation,
            };
            self.audit.append(traced(event)).await?;
            self.state.forget(uid.as_str()).await?;
            self.shared.change(|w| {
                w.grants.retain(|_, g| g.allocation != uid.as_str());
                w.waiting.remove(uid);
                w.mark(uid, |f| f.released = true);
            });
        }
        if self.shared.read(|w| w.orphans.contains(uid)) {
            self.shared.change(|w| w.lose_allocation(uid));
        } else {
            self.let_go(object, end).await?;
        }
        info!(namespace = fact.pod.namespace, pod = fact.pod.name, code = end.code(), "released");
        Ok(())
    }

    /// What shows that something of the pod is left, if anything does.
    async fn witness(&self, fact: &AllocationFact, cgroups: &Cgroups) -> Result<Option<Witness>, Error> {
        let pod = fact.pod.uid.as_str();
        let (groups, uid) = (cgroups.clone(), pod.to_owned());
        let alive = tokio::task::spawn_blocking(move || cgroup::alive(&groups, Path::new(PROC), &uid));
        if let Some(witness) = alive.await.map_err(|source| Error::Broken { source })?? {
            return Ok(Some(witness));
        }
        let mut cards: Vec<String> =
            fact.containers.iter().flat_map(|c| &c.devices).map(|d| d.uuid.0.clone()).collect();
        cards.sort_unstable();
        cards.dedup();
        if !fact.prepared {
            return Ok(None);
        }
        let down = self.shared.read(|w| match &w.driver {
            Driver::Down { code, .. } => Some(*code),
            Driver::Unknown | Driver::Ready { .. } => None,
        });
        match down {
            // The cgroup is gone, and without a driver nothing is on a card.
            Some(code) if nvml::is_absence(code) => return Ok(None),
            // One that hangs or fails has proved nothing. Whether it answers again is looked after elsewhere.
            Some(code) => return Ok(Some(Witness::Unproved { code })),
            None => {}
        }
        let pids = match self.driver.pids(cards).await {
            Err(error) if nvml::is_absence(error.code()) => return Ok(None),
            pids => pids?,
        };
        let known = self.shared.read(|w| w.card_pids.get(&fact.pod.uid).cloned().unwrap_or_default());
        let on_card = |pid: &&u32| is_on_card(Path::new(PROC), **pid, pod, &known);
        Ok(pids.iter().find_map(|(card, pids)| {
            pids.iter().find(on_card).map(|pid| Witness::Process { card: card.clone(), pid: *pid })
        }))
    }

    /// Whether proof can be had: the pods' cgroups are where they are looked for. A pod that runs must show there.
    async fn look(&self, cgroups: &Cgroups) {
        let running = self.shared.read(|w| {
            let mut pods = w.pods.iter().flatten().filter(|(_, pod)| !pod.ended);
            let runs = |(uid, pod): &(&PodUid, &PodSeen)| {
                let ours = w.allocation_of(uid).is_some_and(|(fact, _)| fact.prepared);
                ours && pod.containers.values().any(|c| c.running.is_some())
            };
            pods.find(runs).map(|(uid, _)| uid.0.clone())
        });
        let groups = cgroups.clone();
        let seen =
            tokio::task::spawn_blocking(move || cgroup::place(&groups, Path::new(PROC), running.as_deref()));
        let seen = seen.await.unwrap_or_else(|source| Err(Error::Broken { source }));
        let seen = seen
            .map(|place| place.display().to_string())
            .map_err(|error| (error.code(), mullion_telemetry::source_chain(&error)));
        self.shared.change_if(|w| {
            let changed = w.signs.cgroups.as_ref() != Some(&seen);
            if changed && let Err((code, problem)) = &seen {
                warn!(code, error = problem, "pods' cgroups are not seen");
            }
            w.signs.cgroups = Some(seen);
            changed
        });
    }

    fn clean(&self, fact: &AllocationFact) -> Result<(), Error> {
        let grants: Vec<String> =
            self.shared.read(|w| w.grants_of(&fact.uid).map(|g| g.grant.clone()).collect());
        for grant in grants {
            self.remove_grant(&grant)?;
        }
        for container in &fact.containers {
            files::remove_folder(&container_folder(&self.settings, fact.pod.uid.as_str(), &container.name))?;
        }
        Ok(())
    }

    fn remove_grant(&self, grant: &str) -> Result<(), Error> {
        files::remove(&self.settings.cdi_dir.join(cdi::file_name(grant)))?;
        files::remove(&self.settings.pages_dir().join(grant))
    }

    /// Writes the release down and takes off the finalizer.
    async fn let_go(&self, object: &VGPUAllocation, end: End) -> Result<(), Error> {
        let now = Timestamp::now();
        let mut object = object.clone();
        let mut said = object.status.clone().unwrap_or_default();
        if said.phase != Phase::Released {
            said.phase = Phase::Released;
            said.released_observation = Some(self.shared.read(|w| w.observation));
            let claim = Claim::new("Released", "True", end.code(), "nothing of the pod is left on the node");
            status::set(&mut said, &[claim], now);
            object = match status::write(&self.client, &self.metrics, &object, &said).await {
                Ok(object) => object,
                Err(error) => return self.look_again(&object, error).await,
            };
            self.shared.change(|w| w.see_allocation(object.clone()));
        }
        let (namespace, name) = (object.namespace().unwrap_or_default(), object.name_any());
        let others: Vec<&String> = object.finalizers().iter().filter(|f| *f != FINALIZER).collect();
        if others.len() == object.finalizers().len() {
            return Ok(());
        }
        let patch = json!({"metadata": {
            "uid": object.uid(), "resourceVersion": object.resource_version(), "finalizers": others,
        }});
        let params = PatchParams { field_manager: Some(AGENT_MANAGER.to_owned()), ..PatchParams::default() };
        let api: Api<VGPUAllocation> = Api::namespaced(self.client.clone(), &namespace);
        self.metrics.api_write("vgpuallocations");
        let action = format!("take the finalizer off VGPUAllocation {namespace}/{name}");
        match api.patch(&name, &params, &Patch::Merge(patch)).await.map_err(Error::api(action)) {
            Ok(object) => {
                self.shared.change(|w| {
                    // The API server removes it with the last finalizer, and its watch says so later.
                    if object.metadata.deletion_timestamp.is_some() && object.finalizers().is_empty() {
                        w.lose_allocation(&AllocationUid(object.uid().unwrap_or_default()));
                    } else {
                        w.see_allocation(object);
                    }
                });
                Ok(())
            }
            Err(error) => self.look_again(&object, error).await,
        }
    }

    /// After a write that met another one: the newest version for the next try; one that is gone is let go.
    async fn look_again(&self, object: &VGPUAllocation, error: Error) -> Result<(), Error> {
        if !status::is_stale(&error) {
            return Err(error);
        }
        let (namespace, name) = (object.namespace().unwrap_or_default(), object.name_any());
        let api: Api<VGPUAllocation> = Api::namespaced(self.client.clone(), &namespace);
        let found = api.get_opt(&name).await;
        match found.map_err(Error::api(format!("read VGPUAllocation {namespace}/{name}")))? {
            Some(fresh) if fresh.uid() == object.uid() => {
                self.shared.change(|w| w.see_allocation(fresh));
                Err(error)
            }
            _ => {
                let uid = AllocationUid(object.uid().unwrap_or_default());
                self.shared.change(|w| w.lose_allocation(&uid));
                Ok(())
            }
        }
    }
}

/// Pause before proof is looked for again, a part of the time that it was looked for in vain: each look goes through all
/// processes of the node and asks the driver, and a card that hangs may never be proved free.
fn pause(waited: Duration) -> Duration {
    (waited / 16).clamp(POLL, SLOWEST)
}

/// Whether a process that the driver lists is the pod's. One that is dead is told by `known`, the pids that it had on
/// cards: the driver may give memory back later than the kernel lets go of the process.
fn is_on_card(proc: &Path, pid: u32, pod: &str, known: &BTreeSet<u32>) -> bool {
    let is_dead = || !proc.join(pid.to_string()).exists();
    cgroup::is_of_pod(proc, pid, pod) || known.contains(&pid) && is_dead()
}

#[cfg(test)]
mod tests {
    use super::*;
    use mullion_crds::vgpuallocation::{PodReference, VGPUAllocationSpec};

    #[test]
    fn only_a_pod_that_ended_or_is_seen_to_be_gone_starts_a_release() {
        let spec = VGPUAllocationSpec {
            pod: PodReference { name: "p".to_owned(), uid: "uid".to_owned() },
            ..VGPUAllocationSpec::default()
        };
        let object = VGPUAllocation::new("p-1", spec);
        let pods = |list: &[(&str, bool)]| {
            let pod = |(uid, ended): &(&str, bool)| {
                (PodUid::from(*uid), PodSeen { ended: *ended, ..PodSeen::default() })
            };
            Some(list.iter().map(pod).collect::<BTreeMap<_, _>>())
        };
        for (case, pods, deleted, want) in [
            ("pods not listed yet", None, false, Life::Lives),
            ("runs", pods(&[("uid", false)]), false, Life::Lives),
            ("ended", pods(&[("uid", true)]), false, Life::Over(End::PodEnded)),
            ("another pod of that name", pods(&[("new", false)]), false, Life::Missing),
            ("seen to go", pods(&[]), true, Life::Over(End::PodGone)),
        ] {
            let deleted_pods = if deleted { ["uid".into()].into() } else { BTreeSet::default() };
            let world = World { pods, deleted_pods, ..World::default() };
            assert_eq!(life(&world, &object), want, "{case}");
        }
    }

    #[test]
    fn a_release_that_waits_long_is_looked_at_seldom() {
        let (mut at, mut looks) = (Duration::ZERO, Vec::new());
        while at < Duration::from_hours(1) {
            looks.push(at);
            at += pause(at);
        }
        let within = |seconds| looks.iter().filter(|at| at.as_secs() < seconds).count();
        assert!(within(1) >= 10, "one that is over at once ends at once");
        assert!(within(3600) - within(60) <= 750, "{}", within(3600) - within(60));
        assert!(
            looks.windows(2).skip(16).all(|pair| pair[1] <= pair[0].mul_f64(1.0626)),
            "what comes is seen soon"
        );
    }

    #[test]
    fn a_dead_process_that_the_driver_still_lists_holds_the_card() {
        let proc = tempfile::tempdir().unwrap();
        for (pid, pod) in [(10, "ours"), (11, "another")] {
            let folder = proc.path().join(pid.to_string());
            std::fs::create_dir(&folder).unwrap();
            std::fs::write(folder.join("cgroup"), format!("0::/kubepods/pod{pod}/x\n")).unwrap();
        }
        let known = BTreeSet::from([10, 11, 12]);
        for (case, pid, want) in [
            ("it lives", 10, true),
            ("its number is another's now", 11, false),
            ("dead, and still listed", 12, true),
            ("dead, and never ours", 13, false),
        ] {
            assert_eq!(is_on_card(proc.path(), pid, "ours", &known), want, "{case}");
        }
    }
}
