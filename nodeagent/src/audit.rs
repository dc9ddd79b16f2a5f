//! The way to the audit log: opened in the background, so that the kubelet is served while the log is still held by an
//! agent that is ending, and tried again for as long as it cannot be opened. Until then nothing that must be audited
//! happens.
//!
//! Facts that nobody waits for go through a queue of their own, which whoever appends takes along: a row that ends something
//! never comes before the one that began it.

mod queue;

use std::collections::BTreeMap;
use std::future::poll_fn;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use jiff::Timestamp;
use mullion_audit::{
    AllocationRef, AuditLog, AuditReader, ContainerKind, Entry, Event, Head, HeldAllocation, Options,
};
use mullion_core::facts::{AllocationFact, ContainerGrant, ContainerKind as CoreKind, DeviceGrant, PodRef};
use mullion_core::ledger::Standing;
use mullion_core::units::{CoreShare, Mib, NodeName};
use parking_lot::Mutex;
use tokio::sync::{mpsc, watch};
use tracing::warn;

use self::queue::{Due, Queue};
use crate::api::traced;
use crate::error::Error;
use crate::prepare::{allocation_ref, pod_ref, prepared, reserved, voided};
use crate::state::Grant;
use crate::world::World;

/// Why an allocation is over that was undone before anything of it was given out.
pub const WITHDRAWN: &str = "Withdrawn";
/// Why one is over that somebody took from the API server, once nothing of its pod is left.
pub const NO_ALLOCATION: &str = "NoAllocation";
/// How long an append waits for the log to be opened.
const PATIENCE: Duration = Duration::from_secs(6);
/// How long [`Audit::check`] waits for it.
const OPENING: Duration = Duration::from_secs(1);
/// Pause between two tries to open it.
const RETRY: Duration = Duration::from_secs(5);
/// Pause between two tries to append what a log that takes no rows refused.
const AGAIN: Duration = Duration::from_secs(5);

#[derive(Clone, Debug, Default)]
enum Log {
    #[default]
    Opening,
    Open(AuditLog),
    Failed(mullion_audit::Error),
}

/// The audit log of the node. Clones share it.
#[derive(Clone, Debug)]
pub struct Audit {
    log: watch::Sender<Log>,
    path: PathBuf,
    queue: Arc<Mutex<Queue>>,
}

impl Audit {
    /// The log at `path`, not opened yet.
    #[must_use]
    pub fn new(path: PathBuf) -> Self {
        Self { log: watch::Sender::new(Log::Opening), path, queue: Arc::default() }
    }

    /// Opens the log, and tries until it can. Returns whether it is a new one.
    pub async fn open(&self, node: &NodeName) -> bool {
        loop {
            match open(Options::new(&self.path, node.as_str())).await {
                Ok(log) => {
                    let new = log.health().head == Head::EMPTY;
                    self.log.send_replace(Log::Open(log));
                    return new;
                }
                Err(error) => {
                    let chain = mullion_telemetry::source_chain(&error);
                    warn!(code = error.code(), error = %chain, "the audit log cannot be opened");
                    self.log.send_replace(Log::Failed(error));
                }
            }
            tokio::time::sleep(RETRY).await;
        }
    }

    /// Adds a fact; on disk when it returns.
    ///
    /// # Errors
    /// [`Error::Audit`]: what was to be audited must not happen.
    pub async fn append(&self, entry: impl Into<Entry>) -> Result<(), Error> {
        self.append_many(vec![entry.into()]).await
    }

    /// Adds facts, all or none, after those that were told before.
    ///
    /// # Errors
    /// As [`Self::append`].
    pub async fn append_many(&self, entries: Vec<Entry>) -> Result<(), Error> {
        let log = self.opened().await;
        let due = self.queue.lock().due();
        let (waiting, passing) = (due.entries.len(), due.passing);
        let result = match log {
            Ok(log) => self.write(&log, due, entries).await,
            Err(error) => Err(error),
        };
        result.map_err(|source| {
            let error = Error::Audit { source };
            if waiting > 0 {
                let waiting = waiting.saturating_sub(passing);
                warn!(
                    code = error.code(), error = %mullion_telemetry::source_chain(&error), waiting, lost = passing,
                    "facts not audited"
                );
            }
            error
        })
    }

    /// Adds the row that a run begins with, before what waits in the queue.
    ///
    /// # Errors
    /// As [`Self::append`].
    pub async fn begin(&self, entry: impl Into<Entry>) -> Result<(), Error> {
        let log = self.opened().await.map_err(|source| Error::Audit { source })?;
        log.append(entry).await.map(drop).map_err(|source| Error::Audit { source })
    }

    /// Appends facts that nobody waits for, in order, until the last sender is gone.
    pub fn append_facts(
        &self,
        facts: mpsc::UnboundedReceiver<Entry>,
    ) -> impl Future<Output = ()> + Send + use<> {
        let audit = self.clone();
        // At once, so that whatever is told from now on keeps its place.
        audit.queue.lock().listen(facts);
        async move {
            loop {
                let told = poll_fn(|cx| audit.queue.lock().poll_told(cx));
                let more = if let Ok(more) = tokio::time::timeout(AGAIN, told).await {
                    more
                } else if audit.waits() && audit.check().await == Some(Ok(())) {
                    true
                } else {
                    continue;
                };
                if audit.waits() {
                    // What goes wrong is told there.
                    let _ = audit.append_many(Vec::new()).await;
                }
                if !more {
                    return;
                }
            }
        }
    }

    fn waits(&self) -> bool {
        !self.queue.lock().is_empty()
    }

    /// In one request: a log that takes rows again in between must not take the later ones alone.
    async fn write(&self, log: &AuditLog, due: Due, entries: Vec<Entry>) -> Result<(), mullion_audit::Error> {
        use mullion_audit::Error::{Encode, KeyReused};
        let all = due.entries.iter().map(|(_, entry)| entry.clone()).chain(entries.iter().cloned()).collect();
        match log.append_many(all).await {
            Ok(_) => self.queue.lock().done(&due.entries),
            Err(KeyReused { .. } | Encode { .. }) if !due.entries.is_empty() => {
                // One of them can never be written. The others must not suffer for it.
                for told in &due.entries {
                    match log.append(told.1.clone()).await {
                        Err(error @ (KeyReused { .. } | Encode { .. })) => {
                            warn!(code = error.code(), %error, "fact not audited");
                        }
                        result => drop(result?),
                    }
                    self.queue.lock().done(std::slice::from_ref(told));
                }
                log.append_many(entries).await?;
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }

    async fn opened(&self) -> Result<AuditLog, mullion_audit::Error> {
        let mut log = self.log.subscribe();
        // Too late is an answer, too: `Opening`.
        let _ = tokio::time::timeout(PATIENCE, log.wait_for(|l| !matches!(l, Log::Opening))).await.is_ok();
        let log = log.borrow().clone();
        match log {
            Log::Open(log) => Ok(log),
            Log::Failed(error) => Err(error),
            Log::Opening => Err(mullion_audit::Error::Closed { path: self.path.clone() }),
        }
    }

    /// Whether the log takes rows, as of the last try.
    #[must_use]
    pub fn is_ok(&self) -> bool {
        matches!(&*self.log.borrow(), Log::Open(log) if log.health().is_ok())
    }

    /// Whether the log takes rows, and why not; one that failed is tried again. `None` while it is being opened.
    pub async fn check(&self) -> Option<Result<(), (&'static str, String)>> {
        let said = |error: &mullion_audit::Error| (error.code(), error.to_string());
        let mut log = self.log.subscribe();
        // At the start it is a matter of milliseconds.
        let _ = tokio::time::timeout(OPENING, log.wait_for(|l| !matches!(l, Log::Opening))).await.is_ok();
        let log = log.borrow().clone();
        match log {
            Log::Opening => None,
            Log::Failed(error) => Some(Err(said(&error))),
            Log::Open(log) if log.health().is_ok() => Some(Ok(())),
            Log::Open(log) => Some(log.probe().await.map_err(|error| said(&error))),
        }
    }

    /// Writes what is queued and gives the log up.
    pub async fn close(&self) {
        if self.is_ok() {
            // What goes wrong is told there.
            let _ = self.append_many(Vec::new()).await;
        }
        let log = self.log.send_replace(Log::Opening);
        if let Log::Open(log) = log {
            log.close().await;
        }
    }

    /// Grants that were answered with and that the log says nothing more of, with when that was, in Unix seconds.
    ///
    /// # Errors
    /// [`Error::Audit`].
    pub async fn open_grants(&self) -> Result<BTreeMap<String, i64>, Error> {
        let path = self.path.clone();
        let read = async move { AuditReader::open(path).await?.open_grants().await };
        let open = read.boxed().await.map_err(|source| Error::Audit { source })?;
        Ok(open.into_iter().map(|(grant, at)| (grant, at.as_second())).collect())
    }

    /// Allocations that hold cards by the log's word.
    ///
    /// # Errors
    /// [`Error::Audit`].
    pub async fn open_allocations(&self) -> Result<BTreeMap<String, HeldAllocation>, Error> {
        let path = self.path.clone();
        let read = async move { AuditReader::open(path).await?.open_allocations().await };
        read.boxed().await.map_err(|source| Error::Audit { source })
    }

    /// What the log says is held on this node: for an agent whose state file is lost.
    ///
    /// # Errors
    /// [`Error::Audit`].
    pub async fn held(&self, node: &NodeName) -> Result<Held, Error> {
        let failed = |source| Error::Audit { source };
        let path = self.path.clone();
        let replay = async move { AuditReader::open(path).await?.replay().await };
        let ledger = replay.boxed().await.map_err(failed)?;
        let (facts, grants) = held(&ledger.allocations, node);
        Ok(Held { facts, grants })
    }
}

/// What an audit log says is held.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Held {
    /// Allocations.
    pub facts: Vec<AllocationFact>,
    /// Grants that are filled.
    pub grants: Vec<Grant>,
}

/// On a thread of its own: the migrator of sqlx makes a future that the compiler cannot prove to be `Send`.
async fn open(options: Options) -> Result<AuditLog, mullion_audit::Error> {
    let path = options.path.clone();
    let runtime = tokio::runtime::Handle::current();
    let opened =
        tokio::task::spawn_blocking(move || runtime.block_on(AuditLog::open(options, Timestamp::now)));
    opened.await.unwrap_or(Err(mullion_audit::Error::Closed { path }))
}

/// What is held on this node, as rows for a log that is new while the agent is not: the former one was removed.
#[must_use]
pub fn carried_over(world: &World) -> Vec<Entry> {
    let mut events = Vec::new();
    for fact in world.ledger.allocations_on(&world.node).filter(|fact| !fact.released) {
        if !matches!(world.ledger.standing(&fact.uid), Some(Standing::Holds | Standing::DeviceGone { .. })) {
            continue;
        }
        events.push(reserved(fact));
        events.extend(world.grants_of(&fact.uid).filter_map(|grant| prepared(fact, grant)));
        if fact.init_done {
            events.push(Event::InitDone { allocation: allocation_ref(fact), pod: pod_ref(&fact.pod) });
        }
    }
    events.into_iter().map(traced).collect()
}

/// Rows that may have been lost on their way into the log: their writer was killed, or the log took none. `open` is what
/// the log says is held; `world` knows better once the API server has listed its allocations. All of them have a key: one
/// that the log has adds nothing.
#[must_use]
pub fn missed(world: &World, open: &BTreeMap<String, HeldAllocation>) -> Vec<Entry> {
    let mut events = Vec::new();
    for fact in world.ledger.allocations_on(&world.node).filter(|fact| !fact.released) {
        events.extend(match world.ledger.standing(&fact.uid) {
            Some(Standing::Holds) => Some(reserved(fact)),
            Some(standing) => voided(fact, &standing),
            None => None,
        });
        if fact.init_done {
            events.push(Event::InitDone { allocation: allocation_ref(fact), pod: pod_ref(&fact.pod) });
        }
    }
    for (uid, held) in open {
        let is_known = world.ledger.allocation(&uid.as_str().into()).is_some();
        // What is left of a grant is looked after by who sweeps.
        if is_known || world.grants_of(&uid.as_str().into()).next().is_some() {
            continue;
        }
        let prepared = held.containers.values().any(|c| c.prepared.is_some());
        events.push(Event::Released {
            allocation: AllocationRef { uid: uid.clone(), name: held.name.clone() },
            pod: held.pod.clone(),
            code: if prepared { NO_ALLOCATION } else { WITHDRAWN }.to_owned(),
            observation: u64::try_from(world.observation).unwrap_or(0),
        });
    }
    events.into_iter().map(traced).collect()
}

/// Every grant of an allocation that is not over, as a row.
#[must_use]
pub fn filled(world: &World) -> Vec<Event> {
    let facts = world.ledger.allocations_on(&world.node).filter(|fact| !fact.released);
    facts.flat_map(|fact| world.grants_of(&fact.uid).filter_map(|grant| prepared(fact, grant))).collect()
}

/// Those of `filled` that the log lacks. They have no key, so `open` says what it has; it was asked after they were found, so
/// an allocation that it does not name is over, and gets no further row.
#[must_use]
pub fn untold(filled: Vec<Event>, open: &BTreeMap<String, HeldAllocation>) -> Vec<Entry> {
    let is_untold = |event: &Event| {
        let Event::Prepared { allocation, container, .. } = event else { return false };
        let held = open.get(&allocation.uid);
        held.is_some_and(|held| held.containers.get(container).is_none_or(|c| c.grant.is_none()))
    };
    filled.into_iter().filter(is_untold).map(traced).collect()
}

fn held(
    allocations: &BTreeMap<String, HeldAllocation>,
    node: &NodeName,
) -> (Vec<AllocationFact>, Vec<Grant>) {
    let mut facts = Vec::new();
    let mut grants = Vec::new();
    for (uid, held) in allocations {
        let containers = held.containers.iter().map(|(name, c)| ContainerGrant {
            name: name.clone(),
            kind: match c.kind {
                ContainerKind::Init => CoreKind::Init,
                ContainerKind::Sidecar => CoreKind::Sidecar,
                ContainerKind::App => CoreKind::App,
            },
            devices: c
                .devices
                .iter()
                .map(|d| DeviceGrant {
                    uuid: d.card.as_str().into(),
                    memory: Mib(d.memory_mib),
                    cores: u8::try_from(d.core_percent).ok().and_then(CoreShare::new).unwrap_or_default(),
                })
                .collect(),
        });
        facts.push(AllocationFact {
            uid: uid.as_str().into(),
            name: held.name.clone(),
            pod: PodRef {
                namespace: held.pod.namespace.clone(),
                name: held.pod.name.clone(),
                uid: held.pod.uid.as_str().into(),
            },
            node: node.clone(),
            sequence: held.sequence,
            created: held.created,
            containers: containers.collect(),
            prepared: held.containers.values().any(|c| c.prepared.is_some()),
            init_done: held.init_done,
            released: false,
        });
        for (container, c) in &held.containers {
            let Some(grant) = &c.grant else { continue };
            grants.push(Grant {
                grant: grant.clone(),
                allocation: uid.clone(),
                pod: held.pod.uid.clone(),
                container: container.clone(),
                device_ids: c.device_ids.clone(),
                // The log does not say; the grant's spec does.
                enforced: false,
                unenforced: None,
            });
        }
    }
    (facts, grants)
}

#[cfg(test)]
mod tests {
    use super::*;
    use mullion_core::facts;
    use mullion_crds::vgpuallocation::{
        ContainerAllocation, Device, Kind, PodReference, VGPUAllocation, VGPUAllocationSpec,
    };

    #[tokio::test]
    async fn a_new_log_gets_what_the_agent_holds_and_gives_it_back() {
        let container = |name: &str, kind| ContainerAllocation {
            name: name.to_owned(),
            kind,
            devices: vec![Device {
                uuid: "GPU-a".to_owned(),
                memory_mib: 3000,
                core_percent: 30,
                ..Device::default()
            }],
            ..ContainerAllocation::default()
        };
        let spec = VGPUAllocationSpec {
            pod: PodReference { name: "p".to_owned(), uid: "pod-uid".to_owned() },
            node_name: "n".to_owned(),
            sequence: 7,
            containers: vec![container("i", Kind::Init), container("a", Kind::App)],
            ..VGPUAllocationSpec::default()
        };
        let mut object = VGPUAllocation::new("p-pod-uid", spec);
        object.metadata.uid = Some("uid".to_owned());
        object.metadata.namespace = Some("default".to_owned());
        let mut world = World { node: "n".into(), ..World::default() };
        world.see_allocation(object);
        let grant = Grant {
            grant: "0123456789abcdef".to_owned(),
            allocation: "uid".to_owned(),
            pod: "pod-uid".to_owned(),
            container: "a".to_owned(),
            device_ids: vec!["slot-0003".to_owned()],
            enforced: false,
            unenforced: None,
        };
        world.grants.insert(grant.grant.clone(), grant.clone());
        world.mark(&"uid".into(), |fact| (fact.prepared, fact.init_done) = (true, true));
        let want: Vec<facts::AllocationFact> = world.ledger.allocations_on(&world.node).cloned().collect();

        let folder = tempfile::tempdir().unwrap();
        let audit = Audit::new(folder.path().join("audit.db"));
        assert!(audit.open(&world.node).await, "new");
        let rows = carried_over(&world);
        let kinds: Vec<&str> = rows.iter().map(|r| r.event.kind()).collect();
        assert_eq!(kinds, ["AllocationReserved", "Prepared", "InitDone"]);
        audit.append_many(rows).await.unwrap();
        let issued = |grant: &str| Event::GrantIssued { grant: grant.to_owned(), device_ids: Vec::new() };
        let open = ["0123456789abcdef", "fedcba9876543210"].map(|grant| issued(grant).into());
        audit.append_many(open.into()).await.unwrap();
        audit.append_many(carried_over(&world)).await.unwrap();
        let Held { facts, grants } = audit.held(&world.node).await.unwrap();
        let open = audit.open_grants().await.unwrap();
        assert_eq!(open.into_keys().collect::<Vec<_>>(), ["fedcba9876543210"], "the other one is filled");
        let plain = |f: &facts::AllocationFact| {
            let mut containers = f.containers.clone();
            containers.sort_by(|a, b| a.name.cmp(&b.name));
            (f.uid.clone(), f.pod.clone(), f.sequence, f.prepared, f.init_done, containers)
        };
        assert_eq!(facts.iter().map(plain).collect::<Vec<_>>(), want.iter().map(plain).collect::<Vec<_>>());
        assert_eq!(grants, [grant]);
        audit.close().await;
        assert!(!audit.open(&world.node).await, "not new any more");
    }
}
