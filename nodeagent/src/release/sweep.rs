//! Files of ours that nobody owns: looked for from time to time, and removed once they are old enough.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use mullion_audit::Event as AuditEvent;
use mullion_core::units::AllocationUid;
use tracing::{info, warn};

use super::Releaser;
use crate::cgroup::Cgroups;
use crate::error::Error;
use crate::prepare::{cdi, container_folder, files};
use crate::state::Grant;

/// How often files without an owner are looked for, and how old they must be.
pub(super) const SWEEP: Duration = Duration::from_secs(20);

impl Releaser {
    /// Removes files of ours that nobody owns: left by an agent that was killed, or by an allocation whose finalizer
    /// somebody else took off.
    pub(super) async fn sweep(&self, cgroups: &Cgroups) {
        let (all_known, grants) = self.shared.read(|w| {
            // An orphan known from the audit log alone has no object that a release could start from.
            let bare = |uid: &AllocationUid| w.orphans.contains(uid) && !w.allocations.contains_key(uid);
            let known =
                |uid: &str| w.ledger.allocation(&uid.into()).is_some_and(|f| !f.released && !bare(&f.uid));
            let grants: Vec<_> = w.grants.values().map(|g| (g.clone(), known(&g.allocation))).collect();
            (w.allocations_listed && w.pods.is_some() && w.grants_known, grants)
        });
        if !all_known {
            return;
        }
        for (grant, known) in &grants {
            if *known || !matches!(cgroups.remains(&grant.pod), Ok(None)) {
                continue;
            }
            let folder = container_folder(&self.settings, &grant.pod, &grant.container);
            let removed = self.remove_grant(&grant.grant).and_then(|()| files::remove_folder(&folder));
            let withdrawn = match removed {
                Ok(()) => self.withdraw_bare(grant).await,
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
        self.remove_unowned(cgroups, &grants);
    }

    /// Forgotten only once it is written down, so that a log that takes no row now gets it at a later sweep.
    async fn withdraw_bare(&self, grant: &Grant) -> Result<(), Error> {
        let event =
            AuditEvent::GrantWithdrawn { grant: grant.grant.clone(), code: "NoAllocation".to_owned() };
        self.audit.append(event).await?;
        self.state.forget(&grant.allocation).await
    }

    fn remove_unowned(&self, cgroups: &Cgroups, grants: &[(Grant, bool)]) {
        let owned = |name: &str| grants.iter().any(|(g, _)| g.grant == name);
        let now = SystemTime::now();
        for (path, name) in
            entries(&self.settings.cdi_dir).into_iter().chain(entries(&self.settings.pages_dir()))
        {
            let grant = cdi::grant_of(&name).unwrap_or(&name);
            let ours = grant.len() == 16 && grant.bytes().all(|b| b.is_ascii_hexdigit());
            if ours && !owned(grant) && is_old(&path, now) {
                info!(?path, "removed a file that nobody owns");
                report(files::remove(&path));
            }
        }
        for (path, name) in entries(&self.settings.containers_dir()) {
            let Some((pod, container)) = name.split_once('_') else { continue };
            let owned = grants.iter().any(|(g, _)| g.pod == pod && g.container == container);
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
