//! Keeps usage files at their length: they lie on the node's disk, and nobody charges a tenant for it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use mullion_core::facts::PodRef;
use tokio::sync::oneshot::{self, Receiver, error::TryRecvError};
use tracing::warn;

use crate::config::Settings;
use crate::error::Error;
use crate::events::Announcer;
use crate::prepare::{container_folder, files};
use crate::state::Grant;
use crate::world::Shared;

/// How often they are looked at.
const LOOK: Duration = Duration::from_secs(5);

/// Looks at the sizes of all usage files, and cuts those back that are too large.
#[derive(Debug)]
pub struct Bounds {
    settings: Settings,
    shared: Arc<Shared>,
    announcer: Announcer,
    /// Grants whose file was told of: who does it once does it again, and one Event says it.
    told: BTreeSet<String>,
    /// Grants whose file could not be cut, or looked at, since it last was.
    failed: BTreeSet<String>,
    /// By grant, a cut that has not come back.
    cutting: BTreeMap<String, Receiver<Result<(), Error>>>,
}

impl Bounds {
    /// Of the containers of `shared`.
    #[must_use]
    pub fn new(settings: Settings, shared: Arc<Shared>, announcer: Announcer) -> Self {
        let (told, failed, cutting) = Default::default();
        Self { settings, shared, announcer, told, failed, cutting }
    }

    /// Looks again and again.
    pub async fn keep(mut self) {
        loop {
            self.look().await;
            tokio::time::sleep(LOOK).await;
        }
    }

    /// Looks once. Nobody waits for a file that its tenant holds up.
    pub async fn look(&mut self) {
        let grants: BTreeMap<String, (Grant, Option<PodRef>)> = self.shared.read(|w| {
            let pod = |uid: &str| w.ledger.allocation(&uid.into()).map(|fact| fact.pod.clone());
            w.grants.iter().map(|(name, g)| (name.clone(), (g.clone(), pod(&g.allocation)))).collect()
        });
        self.told.retain(|name| grants.contains_key(name));
        self.failed.retain(|name| grants.contains_key(name));
        self.cutting.retain(|name, _| grants.contains_key(name));
        let folder = |grant: &Grant| container_folder(&self.settings, &grant.pod, &grant.container);
        let folders: Vec<PathBuf> = grants.values().map(|(grant, _)| folder(grant)).collect();
        let sizes = tokio::task::spawn_blocking(move || {
            let size = |folder: PathBuf| (files::oversize(&folder), folder);
            folders.into_iter().map(size).collect::<Vec<_>>()
        });
        let Ok(sizes) = sizes.await else { return };
        for ((name, (grant, pod)), (size, folder)) in grants.into_iter().zip(sizes) {
            match self.cutting.get_mut(&name).map(Receiver::try_recv) {
                Some(Err(TryRecvError::Empty)) => continue,
                Some(Ok(Err(error))) => self.fails(&name, &grant, pod.as_ref(), &error),
                Some(Ok(Ok(())) | Err(TryRecvError::Closed)) | None => {}
            }
            self.cutting.remove(&name);
            match size {
                // A cut that worked proves nothing: who writes on is over the bound again, and would be told of each time.
                Ok(None) => {
                    self.failed.remove(&name);
                }
                Ok(Some(over)) => {
                    if self.told.insert(name.clone()) {
                        warn!(
                            pod_uid = grant.pod,
                            container = grant.container,
                            problem = %over,
                            "usage file too large"
                        );
                        if let Some(pod) = &pod {
                            self.announcer.usage_cut(pod, &grant.container, &over);
                        }
                    }
                    match cut(&folder) {
                        Ok(cutting) => {
                            self.cutting.insert(name, cutting);
                        }
                        Err(error) => self.fails(&name, &grant, pod.as_ref(), &error),
                    }
                }
                Err(error) => self.fails(&name, &grant, pod.as_ref(), &error),
            }
        }
    }

    fn fails(&mut self, name: &str, grant: &Grant, pod: Option<&PodRef>, error: &Error) {
        if self.failed.insert(name.to_owned()) {
            let (pod_uid, container) = (&grant.pod, &grant.container);
            warn!(code = error.code(), pod_uid, container, error = %mullion_telemetry::source_chain(error), "usage file not bounded");
            if let (Some(pod), Error::UsageFileNotCut { over, .. }) = (pod, error) {
                self.announcer.usage_not_cut(pod, container, over);
            }
        }
    }
}

/// Cuts in a thread of its own: a tenant can hold it up for long, and an agent that stops waits for its runtime's threads.
fn cut(folder: &Path) -> Result<Receiver<Result<(), Error>>, Error> {
    let (done, cutting) = oneshot::channel();
    let own = folder.to_owned();
    let cut = move || {
        let _ = done.send(files::cut_usage_file(&own));
    };
    let thread = std::thread::Builder::new().name("usage-cut".to_owned());
    thread.spawn(cut).map_err(Error::file("cut", folder))?;
    Ok(cutting)
}
