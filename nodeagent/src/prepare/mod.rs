//! `PreStartContainer`: from a set of device ids to a container's own devices.
//!
//! [`grant`] decides, [`driver_files`] and [`cdi`] say what the runtime is told, [`files`] writes it; this file is the
//! shell: who owns the ids, what is their allocation, log it, write it, remember it, answer.

pub mod cdi;
pub mod driver_files;
pub mod files;
pub mod grant;
pub mod library;
mod turns;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use mullion_audit::{AllocationRef, ContainerKind, Entry, Event as AuditEvent, PodRef, Share};
use mullion_core::facts::{AllocationFact, ContainerKind as CoreKind};
use mullion_core::ledger::Standing;
use mullion_core::request::COUNT;
use tokio::time::Instant;
use tracing::{Instrument, Span, debug, info, instrument, warn};

use crate::audit::Audit;
use crate::checkpoint::{self, Owner};
use crate::config::{Enforcement, Settings};
use crate::error::Error;
use crate::state::{Grant, Limits, State, Unenforced};
use crate::world::{Driver, Refused, Shared};
use driver_files::{DriverSpec, Finder};
pub use grant::{CardView, Given, Question, Refusal, decide};
use library::{Library, Unusable};
use turns::{Ticket, Turns};

/// Where the container finds its control page.
pub const PAGE_IN_CONTAINER: &str = "/usr/local/vgpu/control.page";
/// Where the container finds its usage file.
pub const USAGE_IN_CONTAINER: &str = "/usr/local/vgpu/usage.cache";
/// Where the container finds the library, which its preload file names.
pub const LIBRARY_IN_CONTAINER: &str = "/usr/local/vgpu/libvgpu.so";

/// How long the pod's allocation may take to arrive. A refusal costs the pod 10 to 15 s of back-off, so waiting is
/// better; the kubelet gives a call 30 s.
const PATIENCE: Duration = Duration::from_secs(20);
/// How long the kubelet's checkpoint may be missing or lack the ids: it is written before the pod is admitted.
const CHECKPOINT_PATIENCE: Duration = Duration::from_secs(2);
/// Pause between two looks at it.
const CHECKPOINT_PAUSE: Duration = Duration::from_millis(25);

/// Prepares containers.
#[derive(Debug)]
pub struct Preparer {
    settings: Settings,
    shared: Arc<Shared>,
    state: State,
    audit: Audit,
    finder: Arc<Finder>,
    library: Arc<Library>,
    turns: Turns,
}

impl Preparer {
    /// Puts one together.
    #[must_use]
    pub fn new(
        settings: Settings,
        shared: Arc<Shared>,
        state: State,
        audit: Audit,
        finder: Arc<Finder>,
        library: Arc<Library>,
    ) -> Self {
        Self { settings, shared, state, audit, finder, library, turns: Turns::default() }
    }

    /// Prepares every container that owns exactly `ids`. An init container and a later one of the same pod can share a
    /// set, and the kubelet does not say which of them it is about to start: each has its own grant, so all that may
    /// start are prepared, and one is enough for a good answer.
    ///
    /// What was begun is brought to its end even where the kubelet gives the call up, unless its next one has done so by then.
    ///
    /// # Errors
    /// The [`Refusal`] of the first owner when none may start.
    pub async fn prepare(self: &Arc<Self>, ids: BTreeSet<String>) -> Result<(), Refusal> {
        let this = Arc::clone(self);
        let ticket = self.turns.come();
        let done = tokio::spawn(async move { this.owned_by(ids, ticket).await }.in_current_span()).await;
        done.unwrap_or_else(|source| Err(Refusal::Failed { source: Error::Broken { source } }))
    }

    async fn owned_by(&self, ids: BTreeSet<String>, ticket: Ticket) -> Result<(), Refusal> {
        let deadline = Instant::now() + PATIENCE;
        let mut refused = Vec::new();
        let mut prepared = 0;
        for owner in self.owners(&ids).await? {
            match self.one(&owner, ticket, deadline).await {
                Ok(()) => prepared += 1,
                Err(refusal) => {
                    debug!(pod = %owner.pod, container = owner.container, code = refusal.code(), "owner refused");
                    refused.push((owner, refusal));
                }
            }
        }
        // Beside a container that may start, the others are those whose turn it is not.
        if prepared > 0 {
            return Ok(());
        }
        for (owner, refusal) in &refused {
            self.note(owner, refusal).await;
        }
        refused.into_iter().next().map_or(Ok(()), |(_, refusal)| Err(refusal))
    }

    async fn owners(&self, ids: &BTreeSet<String>) -> Result<Vec<Owner>, Refusal> {
        let deadline = Instant::now() + CHECKPOINT_PATIENCE;
        loop {
            let found = self.look_up(ids).await;
            match found {
                Ok(owners) => return Ok(owners),
                Err(refusal) if Instant::now() >= deadline => return Err(refusal),
                Err(_) => tokio::time::sleep(CHECKPOINT_PAUSE).await,
            }
        }
    }

    async fn look_up(&self, ids: &BTreeSet<String>) -> Result<Vec<Owner>, Refusal> {
        let path = self.settings.checkpoint();
        let bytes = tokio::fs::read(&path)
            .await
            .map_err(|source| Refusal::CheckpointMissing { path: path.clone(), source })?;
        let all = checkpoint::parse(&bytes, COUNT)
            .map_err(|source| Refusal::CheckpointDamaged { path: path.clone(), source })?;
        self.shared.change_if(|world| {
            let known: BTreeSet<String> = all.iter().flat_map(|o| o.ids.iter().cloned()).collect();
            let changed = world.kubelet_ids != known;
            world.kubelet_ids = known;
            changed
        });
        let owners = checkpoint::owners_of(&all, ids);
        if owners.is_empty() {
            let ids = ids.iter().cloned().collect::<Vec<_>>().join(", ");
            return Err(Refusal::OwnerUnknown { path, ids });
        }
        Ok(owners)
    }

    #[instrument(name = "prepare", skip_all, fields(pod_uid = %owner.pod, container = owner.container))]
    async fn one(&self, owner: &Owner, ticket: Ticket, deadline: Instant) -> Result<(), Refusal> {
        mullion_telemetry::in_pod_trace(&Span::current(), owner.pod.as_str());
        if !files::is_plain(owner.pod.as_str()) || !files::is_plain(&owner.container) {
            let (pod, container) = (owner.pod.0.clone(), owner.container.clone());
            return Err(Refusal::NameInvalid { pod, container });
        }
        let Some(grant) = &owner.grant else {
            return Err(Refusal::GrantMissing { pod: owner.pod.clone(), container: owner.container.clone() });
        };
        self.wait(owner, deadline).await;
        let specs = self.finder.find().await;
        let library = self.library.current().await.map_err(|source| Refusal::Failed { source })?;
        // A container that starts again gets the library of its spec, whatever has become of the node's since.
        let keeps = self.standing(grant).is_some_and(|spec| {
            cdi::mounted_at(&spec, LIBRARY_IN_CONTAINER).is_some_and(|path| Path::new(path).exists())
        });
        // Decided and counted under one lock: two calls never give the same capacity twice.
        let (mut given, again) = self.shared.change(|world| {
            let found = world.allocation_of(&owner.pod);
            let (allocation, standing) = match &found {
                Some((fact, standing)) => (Some(*fact), standing.as_ref()),
                None => (None, None),
            };
            let again = world.grants.contains_key(grant);
            let pod = world.pods.as_ref().and_then(|pods| pods.get(&owner.pod));
            let cards = world.card_views();
            let question = Question {
                node: &world.node,
                pod: &owner.pod,
                pod_name: pod.map(|p| (p.namespace.as_str(), p.name.as_str())),
                container: &owner.container,
                ids: owner.ids.len(),
                allocation,
                standing,
                cards: cards.as_ref(),
                enforcement: self.settings.enforcement,
                unusable: library.as_ref().err().filter(|_| !keeps),
            };
            let given = decide(&question, PATIENCE.as_secs())?;
            // Of its capacity nothing may go to an earlier decision from now on, so it counts as prepared at once.
            // Where a step below fails, that errs to the safe side until the agent starts anew.
            world.mark(&given.allocation, |fact| fact.prepared = true);
            Ok((given, again))
        })?;
        let mut turn = self.turns.of(owner.pod.as_str()).await;
        if turn.is_late(grant, ticket) {
            debug!(grant, "a later call prepared it");
            return Ok(());
        }
        let spec = self.spec(&given, grant, &specs, library.as_deref().ok())?;
        let standing = self.standing(grant);
        if standing
            .as_ref()
            .is_some_and(|old| !cdi::still_true(old, &spec, |path| self.is_there(path, &given, grant)))
        {
            return Err(Refusal::GrantChanged { grant: grant.clone() });
        }
        given.enforced = cdi::mounted_at(standing.as_ref().unwrap_or(&spec), LIBRARY_IN_CONTAINER).is_some();
        if !given.enforced && self.settings.enforcement == Enforcement::Required {
            return Err(Refusal::GrantChanged { grant: grant.clone() });
        }
        let record = Grant {
            grant: grant.clone(),
            allocation: given.allocation.0.clone(),
            pod: owner.pod.0.clone(),
            container: owner.container.clone(),
            device_ids: owner.ids.iter().cloned().collect(),
            enforced: given.enforced,
            unenforced: (!given.enforced).then(|| unenforced(library.as_ref().err())),
        };
        // The state first: what it cannot keep must not stand in the log as prepared, once more with each try.
        self.state.put_grant(&record).await.map_err(|source| Refusal::Failed { source })?;
        // Nobody withdraws what the log is about to call filled.
        let (mut issued, mut over) = (None, false);
        self.shared.change_if(|world| {
            // Its pod may have ended since this was decided. In the log `Released` is to be the last word.
            over = world.releasing.contains(&given.allocation);
            issued = if over { None } else { world.issued.remove(grant) };
            false
        });
        if over {
            return Err(Refusal::Released { name: given.name });
        }
        if let Err(refusal) = self.log(&given, grant, owner).await {
            self.shared.change_if(|world| {
                world.issued.extend(issued.map(|at| (grant.clone(), at)));
                false
            });
            return Err(refusal);
        }
        // The agent may be killed wherever it waits, so from here on nothing does: a spec on disk always has an owner, whose
        // release removes it.
        let before = self.shared.change(|world| {
            world.issued.remove(grant);
            world.grants.insert(grant.clone(), record)
        });
        if let Err(refusal) = self.write(&given, grant, standing.is_none().then_some(&spec)) {
            if before.is_none() {
                self.shared.change(|world| world.grants.remove(grant));
            }
            return Err(refusal);
        }
        self.shared.read(|world| turn.wrote(grant, ticket, |grant| world.grants.contains_key(grant)));
        self.shared.change(|world| world.refused.remove(&given.allocation));
        let cards: Vec<&str> = given.devices.iter().map(|d| d.card.uuid.as_str()).collect();
        info!(namespace = given.pod.namespace, pod = given.pod.name, grant, ?cards, again, "prepared");
        Ok(())
    }

    /// Waits for the pod's allocation, and before a first start for the driver's word on the cards.
    async fn wait(&self, owner: &Owner, deadline: Instant) {
        let mut bell = self.shared.bell();
        loop {
            bell.borrow_and_update();
            let ready = self.shared.read(|w| {
                w.allocation_of(&owner.pod)
                    .is_some_and(|(fact, _)| fact.prepared || w.driver != Driver::Unknown)
            });
            if ready || !matches!(tokio::time::timeout_at(deadline, bell.changed()).await, Ok(Ok(()))) {
                return;
            }
        }
    }

    fn spec(
        &self,
        given: &Given,
        grant: &str,
        specs: &[DriverSpec],
        library: Option<&Path>,
    ) -> Result<cdi::Spec, Refusal> {
        if specs.is_empty() {
            return Err(Refusal::CdiSpecMissing { missing: self.finder.missing() });
        }
        let cards: Vec<_> = given.devices.iter().map(|d| d.card.clone()).collect();
        let (version, mut edits) =
            driver_files::edits_for(specs, &cards).map_err(|source| Refusal::CdiDeviceMissing { source })?;
        for variable in grant::environment(given, &self.settings.container, USAGE_IN_CONTAINER) {
            edits.set_variable(variable);
        }
        let mut mount = |host: &Path, container: &str, mode: &str| {
            edits.mounts.retain(|m| m.container_path != container);
            edits.mounts.push(cdi::Mount {
                host_path: host.display().to_string(),
                container_path: container.to_owned(),
                options: [mode, "nosuid", "nodev", "bind"].map(str::to_owned).to_vec(),
                ..cdi::Mount::default()
            });
        };
        let [page, usage, preload] = self.files(given, grant);
        mount(&page, PAGE_IN_CONTAINER, "ro");
        mount(&usage, USAGE_IN_CONTAINER, "rw");
        if let Some(library) = library {
            mount(library, LIBRARY_IN_CONTAINER, "ro");
            mount(&preload, "/etc/ld.so.preload", "ro");
        }
        Ok(cdi::grant_spec(grant, &version, edits))
    }

    /// What [`Self::write`] makes on the host: page, usage file and preload file.
    fn files(&self, given: &Given, grant: &str) -> [PathBuf; 3] {
        let usage = self.container_folder(given).join(files::USAGE_FILE);
        [self.settings.pages_dir().join(grant), usage, self.settings.preload()]
    }

    /// Whether a container that starts now finds what its spec names: what we make ourselves it does.
    fn is_there(&self, path: &str, given: &Given, grant: &str) -> bool {
        let path = Path::new(path);
        path.exists() || self.files(given, grant).iter().any(|ours| ours == path)
    }

    fn container_folder(&self, given: &Given) -> PathBuf {
        container_folder(&self.settings, given.pod.uid.as_str(), &given.container)
    }

    /// First in the log, then on disk: a container that ran is never missing from the log.
    async fn log(&self, given: &Given, grant: &str, owner: &Owner) -> Result<(), Refusal> {
        let share = |d: &grant::GivenDevice| Share {
            card: d.card.uuid.clone(),
            memory_mib: d.memory.0,
            core_percent: u32::from(d.cores.get()),
            mig: None,
        };
        let prepared = AuditEvent::Prepared {
            allocation: AllocationRef { uid: given.allocation.0.clone(), name: given.name.clone() },
            pod: pod_ref(&given.pod),
            container: given.container.clone(),
            container_kind: kind(given.kind),
            grant: grant.to_owned(),
            device_ids: owner.ids.iter().cloned().collect(),
            devices: given.devices.iter().map(share).collect(),
        };
        let reserved = self.shared.read(|w| w.ledger.allocation(&given.allocation).map(reserved));
        let trace = mullion_telemetry::trace_id(owner.pod.as_str()).to_string();
        let entries = reserved.into_iter().chain([prepared]).map(|e| Entry::from(e).traced(trace.clone()));
        self.audit.append_many(entries.collect()).await.map_err(|source| Refusal::Failed { source })?;
        Ok(())
    }

    /// The spec that this grant has already. The runtime may have it in its cache: another content under the same name is
    /// never written.
    fn standing(&self, grant: &str) -> Option<cdi::Spec> {
        let bytes = std::fs::read(self.settings.cdi_dir.join(cdi::file_name(grant))).ok()?;
        // What cannot be read is none of our files, since those are renamed into place whole.
        serde_json::from_slice(&bytes).ok()
    }

    /// Writes the grant's files, and its `spec` where it has none.
    fn write(&self, given: &Given, grant: &str, spec: Option<&cdi::Spec>) -> Result<(), Refusal> {
        let (page, usage) = grant::pages(given, grant, self.settings.enforcement)?;
        let failed = |source| Refusal::Failed { source };
        let [page_path, _, preload] = self.files(given, grant);
        files::folder(&self.settings.pages_dir()).map_err(failed)?;
        files::replace(&page_path, &mullion_region::page::encode(&page), 0o644).map_err(failed)?;
        files::usage_file(&self.container_folder(given), &mullion_region::usage::image(&usage))
            .map_err(failed)?;
        if given.enforced {
            let want = format!("{LIBRARY_IN_CONTAINER}\n");
            if std::fs::read_to_string(&preload).ok().as_deref() != Some(want.as_str()) {
                files::replace(&preload, want.as_bytes(), 0o644).map_err(failed)?;
            }
        }
        let Some(spec) = spec else { return Ok(()) };
        files::folder(&self.settings.cdi_dir).map_err(failed)?;
        let path = self.settings.cdi_dir.join(cdi::file_name(grant));
        let text = serde_json::to_vec_pretty(spec)
            .map_err(|source| failed(Error::StateValue { what: "CDI spec", source }))?;
        files::replace(&path, &text, 0o644).map_err(failed)
    }

    /// Logs a refusal, and marks an allocation that can never be given.
    async fn note(&self, owner: &Owner, refusal: &Refusal) {
        let message = mullion_telemetry::source_chain(refusal);
        let mut allocation = None;
        let mut pod = None;
        self.shared.change_if(|world| {
            let seen = world.pods.as_ref().and_then(|pods| pods.get(&owner.pod));
            pod = seen.map(|p| PodRef {
                namespace: p.namespace.clone(),
                name: p.name.clone(),
                uid: owner.pod.0.clone(),
            });
            let found = world.allocation_of(&owner.pod).map(|(fact, _)| fact.clone());
            let changed = found.as_ref().is_some_and(|fact| {
                let void = matches!(refusal, Refusal::Void { .. });
                if !void && !refusal.fails_allocation() {
                    return false;
                }
                let refused = Refused { code: refusal.code(), message: message.clone(), void };
                world.refused.insert(fact.uid.clone(), refused.clone()) != Some(refused)
            });
            allocation = found;
            changed
        });
        let event = AuditEvent::PrepareRefused {
            allocation: allocation.as_ref().map(allocation_ref),
            pod: allocation.as_ref().map(|a| pod_ref(&a.pod)).or(pod),
            container: Some(owner.container.clone()),
            device_ids: owner.ids.iter().cloned().collect(),
            code: refusal.code().to_owned(),
            message,
        };
        let trace = mullion_telemetry::trace_id(owner.pod.as_str()).to_string();
        if let Err(error) = self.audit.append(Entry::from(event).traced(trace)).await {
            warn!(code = error.code(), error = %mullion_telemetry::source_chain(&error), "refusal not audited");
        }
    }
}

/// The folder of a container's usage file.
#[must_use]
pub fn container_folder(settings: &Settings, pod: &str, container: &str) -> PathBuf {
    settings.containers_dir().join(format!("{pod}_{container}"))
}

/// Whether a grant's container has the library by its spec, and why not.
#[must_use]
pub fn by_spec(spec: &cdi::Spec) -> Limits {
    let enforced = cdi::mounted_at(spec, LIBRARY_IN_CONTAINER).is_some();
    (enforced, (!enforced).then(|| unenforced(None)))
}

/// Why a container starts without the library.
fn unenforced(unusable: Option<&Unusable>) -> Unenforced {
    let (code, message) = match unusable {
        Some(unusable) => (unusable.code(), unusable.in_report_mode()),
        None => (
            "GrantWithoutLibrary",
            "the container first started while the node had no usable library, and what it is given does not change: it runs \
             without limits until its pod is deleted"
                .to_owned(),
        ),
    };
    Unenforced { code: code.to_owned(), message }
}

const fn kind(kind: CoreKind) -> ContainerKind {
    match kind {
        CoreKind::Init => ContainerKind::Init,
        CoreKind::Sidecar => ContainerKind::Sidecar,
        CoreKind::App => ContainerKind::App,
    }
}

/// The pod as the audit log names it.
#[must_use]
pub fn pod_ref(pod: &mullion_core::facts::PodRef) -> PodRef {
    PodRef { namespace: pod.namespace.clone(), name: pod.name.clone(), uid: pod.uid.0.clone() }
}

/// The allocation as the audit log names it.
#[must_use]
pub fn allocation_ref(fact: &AllocationFact) -> AllocationRef {
    AllocationRef { uid: fact.uid.0.clone(), name: fact.name.clone() }
}

/// The audit event of an allocation that fits.
#[must_use]
pub fn reserved(fact: &AllocationFact) -> AuditEvent {
    let container = |c: &mullion_core::facts::ContainerGrant| mullion_audit::ContainerShares {
        name: c.name.clone(),
        kind: kind(c.kind),
        devices: c.devices.iter().map(share).collect(),
    };
    AuditEvent::AllocationReserved {
        allocation: allocation_ref(fact),
        pod: pod_ref(&fact.pod),
        sequence: fact.sequence,
        created: fact.created,
        containers: fact.containers.iter().map(container).collect(),
    }
}

/// The audit event of a grant that was filled before; `None` where the allocation has no such container.
#[must_use]
pub fn prepared(fact: &AllocationFact, grant: &Grant) -> Option<AuditEvent> {
    let container = fact.containers.iter().find(|c| c.name == grant.container)?;
    Some(AuditEvent::Prepared {
        allocation: allocation_ref(fact),
        pod: pod_ref(&fact.pod),
        container: container.name.clone(),
        container_kind: kind(container.kind),
        grant: grant.grant.clone(),
        device_ids: grant.device_ids.clone(),
        devices: container.devices.iter().map(share).collect(),
    })
}

fn share(device: &mullion_core::facts::DeviceGrant) -> Share {
    Share {
        card: device.uuid.0.clone(),
        memory_mib: device.memory.0,
        core_percent: u32::from(device.cores.get()),
        mig: None,
    }
}

/// The audit event of an allocation that lost; `None` for one that did not.
#[must_use]
pub fn voided(fact: &AllocationFact, standing: &Standing) -> Option<AuditEvent> {
    let Standing::Void { by } = standing else { return None };
    Some(AuditEvent::AllocationVoided {
        allocation: allocation_ref(fact),
        pod: pod_ref(&fact.pod),
        code: by.code.as_str().to_owned(),
        message: by.to_string(),
    })
}
