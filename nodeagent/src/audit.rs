//! The way to the audit log: opened in the background, so that the kubelet is served while the log is still held by an
//! agent that is ending, and tried again for as long as it cannot be opened. Until then nothing that must be audited
//! happens.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use futures::FutureExt;
use jiff::Timestamp;
use mullion_audit::{AuditLog, AuditReader, ContainerKind, Entry, HeldAllocation, Options};
use mullion_core::facts::{AllocationFact, ContainerGrant, ContainerKind as CoreKind, DeviceGrant, PodRef};
use mullion_core::units::{CoreShare, Mib, NodeName};
use tokio::sync::watch;
use tracing::warn;

use crate::error::Error;
use crate::state::Grant;

/// How long an append waits for the log to be opened.
const PATIENCE: Duration = Duration::from_secs(6);
/// Pause between two tries to open it.
const RETRY: Duration = Duration::from_secs(5);

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
}

impl Audit {
    /// The log at `path`, not opened yet.
    #[must_use]
    pub fn new(path: PathBuf) -> Self {
        Self { log: watch::Sender::new(Log::Opening), path }
    }

    /// Opens the log, and tries until it can.
    pub async fn open(&self, node: &NodeName) {
        loop {
            match open(Options::new(&self.path, node.as_str())).await {
                Ok(log) => {
                    self.log.send_replace(Log::Open(log));
                    return;
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

    /// Adds facts, all or none.
    ///
    /// # Errors
    /// As [`Self::append`].
    pub async fn append_many(&self, entries: Vec<Entry>) -> Result<(), Error> {
        let failed = |source| Error::Audit { source };
        let mut log = self.log.subscribe();
        // Too late is an answer, too: `Opening`.
        let _ = tokio::time::timeout(PATIENCE, log.wait_for(|l| !matches!(l, Log::Opening))).await.is_ok();
        let log = log.borrow().clone();
        match log {
            Log::Open(log) => log.append_many(entries).await.map(drop).map_err(failed),
            Log::Failed(error) => Err(failed(error)),
            Log::Opening => Err(failed(mullion_audit::Error::Closed { path: self.path.clone() })),
        }
    }

    /// Whether the log takes rows, as of the last try.
    #[must_use]
    pub fn is_ok(&self) -> bool {
        matches!(&*self.log.borrow(), Log::Open(log) if log.health().is_ok())
    }

    /// Writes what is queued and gives the log up.
    pub async fn close(&self) {
        let log = self.log.send_replace(Log::Opening);
        if let Log::Open(log) = log {
            log.close().await;
        }
    }

    /// What the log says is held on this node: for an agent whose state file is lost.
    ///
    /// # Errors
    /// [`Error::Audit`].
    pub async fn held(&self, node: &NodeName) -> Result<(Vec<AllocationFact>, Vec<Grant>), Error> {
        let failed = |source| Error::Audit { source };
        let path = self.path.clone();
        let replay = async move { AuditReader::open(path).await?.replay().await };
        let ledger = replay.boxed().await.map_err(failed)?;
        Ok(held(&ledger.allocations, node))
    }
}

/// On a thread of its own: the migrator of sqlx makes a future that the compiler cannot prove to be `Send`.
async fn open(options: Options) -> Result<AuditLog, mullion_audit::Error> {
    let path = options.path.clone();
    let runtime = tokio::runtime::Handle::current();
    let opened =
        tokio::task::spawn_blocking(move || runtime.block_on(AuditLog::open(options, Timestamp::now)));
    opened.await.unwrap_or(Err(mullion_audit::Error::Closed { path }))
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
                // The log does not say; the next preparation does.
                enforced: false,
            });
        }
    }
    (facts, grants)
}
