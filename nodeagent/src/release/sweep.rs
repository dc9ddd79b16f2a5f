//! Files of ours that nobody owns: looked for from time to time, and removed once they are old enough.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use mullion_audit::Event as AuditEvent;
use mullion_core::facts::AllocationFact;
use mullion_core::units::AllocationUid;
use tracing::{info, warn};

use super::Releaser;
use crate::api::traced;
use crate::audit::NO_ALLOCATION;
use crate::cgroup::Cgroups;
use crate::error::Error;
use crate::prepare::{allocation_ref, cdi, container_folder, files, pod_ref};
use crate::state::Grant;

/// How often files without an owner are looked for, and how old they must be.
pub(super) const SWEEP: Duration = Duration::from_secs(20);

impl Releaser {
    /// Removes files of ours that nobody owns: left by an agent that was killed, or by an allocation whose finalizer
    /// somebody else took off.
    pub(super) async fn sweep(&self, cgroups: &Cgroups) {
        let (all_known, grants) = self.shared.read(|w| {
            let seen = |grant: &Grant| {
                let uid = AllocationUid::from(grant.allocation.as_str());
                let fact = w.ledger.allocation(&uid).filter(|fact| !fact.released);
                // An orphan known from the audit log alone has no object that a release could start from.
                let bare = w.orphans.contains(&uid) && !w.allocations.contains_key(&uid);
                (grant.clone(), fact.is_some() && !bare, fact.filter(|_| bare).cloned())
            };
            let grants: Vec<_> = w.grants.values().map(seen).collect();
            (w.allocations_listed && w.pods.is_some() && w.grants_known, grants)
        });
        if !all_known {
            return;
        }
        for (grant, known, orphan) in &grants {
            if *known || !self.is_over(grant, orphan.as_ref(), cgroups).await {
                continue;
            }
            let folder = container_folder(&self.settings, &grant.pod, &grant.container);
            let removed = self.remove_grant(&grant.grant).and_then(|()| files::remove_folder(&folder));
            let withdrawn = match removed {
                Ok(()) => self.withdraw_bare(grant, orphan.as_ref()).await,
                Err(error) => Err(error),
            };
            match withdrawn {
                Ok(()) => {
                    info!(grant = grant.grant, pod_uid = grant.pod, "removed a grant without an allocation");
                    self.shared.change(|w| {
                        w.grants.remove(&grant.grant);
                        let uid = AllocationUid::from(grant.allocation.as_str());
                        if w.orphans.contains(&uid) {
                            w.lose_allocation(&uid);
                        }
                    });
                }
                Err(error) => {
                    warn!(code = error.code(), error = %mullion_telemetry::source_chain(&error), "not swept");
                }
            }
        }
        let grants: Vec<&Grant> = grants.iter().map(|(grant, ..)| grant).collect();
        self.remove_unowned(cgroups, &grants);
    }

    /// Whether nothing of a grant's pod is left. With an orphan's last grant its cards are given on, so they are looked at.
    async fn is_over(&self, grant: &Grant, orphan: Option<&AllocationFact>, cgroups: &Cgroups) -> bool {
        match orphan {
            Some(fact) => matches!(self.witness(fact, cgroups).await, Ok(None)),
            None => matches!(cgroups.remains(&grant.pod), Ok(None)),
        }
    }

    /// Forgotten only once it is written down, so that a log that takes no row now gets it at a later sweep. An orphan is
    /// held by the log's word as well, until it says that this is over.
    async fn withdraw_bare(&self, grant: &Grant, orphan: Option<&AllocationFact>) -> Result<(), Error> {
        let code = NO_ALLOCATION.to_owned();
        let mut rows =
            vec![AuditEvent::GrantWithdrawn { grant: grant.grant.clone(), code: code.clone() }.into()];
        rows.extend(orphan.map(|fact| {
            let observation = self.shared.read(|w| u64::try_from(w.observation).unwrap_or(0));
            let (allocation, pod) = (allocation_ref(fact), pod_ref(&fact.pod));
            traced(AuditEvent::Released { allocation, pod, code, observation })
        }));
        self.audit.append_many(rows).await?;
        self.state.forget(&grant.allocation).await
    }

    fn remove_unowned(&self, cgroups: &Cgroups, grants: &[&Grant]) {
        let owned = |name: &str| grants.iter().any(|g| g.grant == name);
        let now = SystemTime::now();
        for (path, name) in
            entries(&self.settings.cdi_dir).into_iter().chain(entries(&self.settings.pages_dir()))
        {
            let whole = files::meant_by(&name);
            let meant = whole.unwrap_or(&name);
            let grant = cdi::grant_of(meant).unwrap_or(meant);
            // A file that was not written to its end belongs to nobody, whoever has the grant.
            let owned = whole.is_none() && owned(grant);
            if cdi::is_grant(grant) && !owned && is_old(&path, now) {
                info!(?path, "removed a file that nobody owns");
                report(files::remove(&path));
            }
        }
        for (path, name) in entries(&self.settings.containers_dir()) {
            let Some((pod, container)) = name.split_once('_') else { continue };
            let owned = grants.iter().any(|g| g.pod == pod && g.container == container);
            // HAMi's folders have the same names and other files.
            let ours = path.join(files::USAGE_FILE).exists();
            if ours && !owned && is_old(&path, now) && matches!(cgroups.remains(pod), Ok(None)) {
                info!(?path, "removed a folder that nobody owns");
                report(files::remove_folder(&path));
            }
        }
    }
}

fn entries(folder: &Path) -> Vec<(PathBuf, String)> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter_map(|e| Some((e.path(), e.file_name().into_string().ok()?))).collect()
}

/// A prepare that is under way writes files before it is known.
fn is_old(path: &Path, now: SystemTime) -> bool {
    let modified = std::fs::symlink_metadata(path).and_then(|m| m.modified());
    modified.is_ok_and(|m| now.duration_since(m).is_ok_and(|age| age >= SWEEP))
}

pub(super) fn report(result: Result<(), Error>) {
    if let Err(error) = result {
        warn!(code = error.code(), error = %mullion_telemetry::source_chain(&error), "not removed");
    }
}

/// Removes every CDI spec of ours: what a former boot left names devices that may be others now.
///
/// # Errors
/// [`Error::File`].
pub fn remove_specs(cdi_dir: &Path) -> Result<(), Error> {
    for (path, name) in entries(cdi_dir) {
        if cdi::grant_of(&name).is_some() {
            files::remove(&path)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_boot_removes_specs_of_ours_and_no_others() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["mullion.io-grant-0123456789abcdef.json", "nvidia.yaml"] {
            std::fs::write(folder.path().join(name), "").unwrap();
        }
        remove_specs(folder.path()).unwrap();
        let left: Vec<String> = entries(folder.path()).into_iter().map(|e| e.1).collect();
        assert_eq!(left, ["nvidia.yaml"]);
    }
}
