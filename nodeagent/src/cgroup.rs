//! Whether anything of a pod can still run, as the kernel's cgroups say.
//!
//! The kubelet makes a pod's cgroup before its first container and removes it after its last one; so while the cgroup
//! is there, in any hierarchy, the pod is not over.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Where the kubelet puts pods: one folder per hierarchy on v1, one on v2.
#[derive(Clone, Debug)]
pub struct Cgroups {
    mount: PathBuf,
    root: String,
}

impl Cgroups {
    /// Hierarchies below `mount`, pods below the kubelet's `cgroupRoot`.
    #[must_use]
    pub fn new(mount: PathBuf, root: &str) -> Self {
        Self { mount, root: root.trim_matches('/').to_owned() }
    }

    /// The first folder that still stands for the pod; `None` when there is none.
    ///
    /// # Errors
    /// When the hierarchies cannot be listed: then nothing is proved.
    pub fn remains(&self, pod: &str) -> io::Result<Option<PathBuf>> {
        for hierarchy in self.hierarchies()? {
            for name in names(pod) {
                let path = hierarchy.join(&self.root).join(name);
                if path.try_exists()? {
                    return Ok(Some(path));
                }
            }
        }
        Ok(None)
    }

    fn hierarchies(&self) -> io::Result<Vec<PathBuf>> {
        if self.mount.join("cgroup.controllers").exists() {
            return Ok(vec![self.mount.clone()]);
        }
        let mut all = Vec::new();
        for entry in fs::read_dir(&self.mount)? {
            let path = entry?.path();
            // Links such as cpu -> cpu,cpuacct lead to folders of the list.
            if !fs::symlink_metadata(&path)?.is_symlink() && path.is_dir() {
                all.push(path);
            }
        }
        if all.is_empty() {
            return Err(io::Error::new(io::ErrorKind::NotFound, "no cgroup hierarchy is mounted there"));
        }
        Ok(all)
    }
}

/// Paths of a pod's cgroup below the kubelet's root: by quality-of-service class, as the cgroupfs and the systemd driver name them
/// (`pkg/kubelet/cm` of Kubernetes).
fn names(pod: &str) -> Vec<String> {
    let escaped = pod.replace('-', "_");
    let mut names = vec![format!("kubepods/pod{pod}"), format!("kubepods.slice/kubepods-pod{escaped}.slice")];
    for class in ["burstable", "besteffort"] {
        names.push(format!("kubepods/{class}/pod{pod}"));
        names.push(format!("kubepods.slice/kubepods-{class}.slice/kubepods-{class}-pod{escaped}.slice"));
    }
    names
}

/// Whether the process is the pod's, by its cgroup; false for one that is gone.
#[must_use]
pub fn is_of_pod(proc: &Path, pid: u32, pod: &str) -> bool {
    let Ok(text) = fs::read_to_string(proc.join(pid.to_string()).join("cgroup")) else { return false };
    let escaped = pod.replace('-', "_");
    text.lines()
        .any(|line| line.contains(&format!("pod{pod}")) || line.contains(&format!("pod{escaped}.slice")))
}

#[cfg(test)]
mod tests {
    use super::*;

    const POD: &str = "9c1f6a52-6d2e-4f3e-8f1a-0d9b8a7c6e5d";

    #[test]
    fn a_pod_is_over_when_no_hierarchy_has_its_cgroup() {
        let systemd = "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod9c1f6a52_6d2e_4f3e_8f1a_0d9b8a7c6e5d.slice";
        for (case, v2, root, path, gone) in [
            (
                "v1, cgroupfs, lab",
                false,
                "/lab/node-a",
                format!("memory/lab/node-a/kubepods/besteffort/pod{POD}"),
                false,
            ),
            ("v1, guaranteed", false, "/", format!("cpu,cpuacct/kubepods/pod{POD}"), false),
            ("v2, systemd", true, "/", systemd.to_owned(), false),
            ("another pod", true, "/", "kubepods/pod00000000-6d2e-4f3e-8f1a-0d9b8a7c6e5d".to_owned(), true),
            ("another root", false, "/lab/node-b", format!("memory/lab/node-a/kubepods/pod{POD}"), true),
        ] {
            let mount = tempfile::tempdir().unwrap();
            fs::create_dir(mount.path().join("pids")).unwrap();
            fs::create_dir_all(mount.path().join(&path)).unwrap();
            if v2 {
                fs::write(mount.path().join("cgroup.controllers"), "").unwrap();
            }
            let cgroups = Cgroups::new(mount.path().into(), root);
            let remains = cgroups.remains(POD).unwrap();
            assert_eq!(remains.is_none(), gone, "{case}: {remains:?}");
            if let Some(remains) = remains {
                assert_eq!(remains, mount.path().join(path), "{case}");
            }
        }
    }

    #[test]
    fn nothing_is_proved_where_nothing_is_mounted() {
        let mount = tempfile::tempdir().unwrap();
        assert!(Cgroups::new(mount.path().into(), "/").remains(POD).is_err());
        assert!(Cgroups::new(mount.path().join("none"), "/").remains(POD).is_err());
    }

    #[test]
    fn processes_are_told_by_their_cgroup() {
        let proc = tempfile::tempdir().unwrap();
        for (pid, line) in [
            (1, format!("4:memory:/lab/node-a/kubepods/besteffort/pod{POD}/0123\n")),
            (
                2,
                "0::/kubepods.slice/kubepods-pod9c1f6a52_6d2e_4f3e_8f1a_0d9b8a7c6e5d.slice/cri-1.scope\n"
                    .to_owned(),
            ),
            (3, "0::/system.slice/kubelet.service\n".to_owned()),
        ] {
            fs::create_dir(proc.path().join(pid.to_string())).unwrap();
            fs::write(proc.path().join(pid.to_string()).join("cgroup"), line).unwrap();
        }
        let found: Vec<_> = (1..=4).filter(|pid| is_of_pod(proc.path(), *pid, POD)).collect();
        assert_eq!(found, [1, 2]);
    }
}
