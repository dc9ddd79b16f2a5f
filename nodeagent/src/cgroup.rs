//! Whether anything of a pod can still run, as the kernel's cgroups say.
//!
//! The kubelet makes a pod's cgroup before its first container and removes it after its last one; so while the cgroup
//! is there, in any hierarchy, the pod is not over. Where it would be depends on the kubelet's `cgroupRoot` and
//! `cgroupDriver`, and looking in the wrong place would prove every pod over. So nothing is taken on trust: the
//! kubelet's own cgroup of all pods, which is called the same wherever it is, is searched for, and without one nothing is proved.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;

use crate::error::Error;
use crate::world::Witness;

/// How many folders below its start a search goes: a node that is itself a container (`system.slice/docker-….scope/
/// kubelet.slice/kubelet-kubepods.slice`) needs four.
const DEPTH: usize = 6;

/// The cgroups of this machine. Clones share what was found.
#[derive(Clone, Debug)]
pub struct Cgroups {
    mount: PathBuf,
    root: String,
    /// Cgroups of all pods that were found at the last search.
    found: Arc<Mutex<Vec<PathBuf>>>,
}

impl Cgroups {
    /// Hierarchies below `mount`; the kubelet's cgroups are searched for below `root` first, then everywhere.
    #[must_use]
    pub fn new(mount: PathBuf, root: &str) -> Self {
        Self { mount, root: root.trim_matches('/').to_owned(), found: Arc::default() }
    }

    /// The first folder that still stands for the pod; `None` when there is none where kubelets keep their pods.
    ///
    /// # Errors
    /// [`Error::CgroupUnseen`] where no kubelet's cgroup is found, [`Error::File`] where the hierarchies cannot be
    /// listed: then nothing is proved.
    pub fn remains(&self, pod: &str) -> Result<Option<PathBuf>, Error> {
        let known = self.found.lock().clone();
        if let Some(path) = below(&known, pod)? {
            return Ok(Some(path));
        }
        // Absence counts only everywhere: a kubelet that was configured anew puts its pods elsewhere.
        below(&self.search()?, pod)
    }

    /// The cgroups that hold all pods of a kubelet: the first is where pods are expected.
    ///
    /// # Errors
    /// As [`Self::remains`].
    pub fn search(&self) -> Result<Vec<PathBuf>, Error> {
        let listed = |source| Error::file("list the cgroups below", &self.mount)(source);
        let hierarchies = self.hierarchies().map_err(listed)?;
        let mut found = Vec::new();
        for start in [self.root.as_str(), ""] {
            for hierarchy in &hierarchies {
                search(&hierarchy.join(start), DEPTH, &mut found).map_err(listed)?;
            }
        }
        let mut once = Vec::with_capacity(found.len());
        for path in found {
            if !once.contains(&path) {
                once.push(path);
            }
        }
        self.found.lock().clone_from(&once);
        if once.is_empty() {
            return Err(Error::CgroupUnseen { mount: self.mount.clone() });
        }
        Ok(once)
    }

    /// Where pods are expected: what was found before while it is there, else what a search finds.
    ///
    /// # Errors
    /// As [`Self::search`].
    pub fn place(&self) -> Result<PathBuf, Error> {
        let known = self.found.lock().first().cloned();
        if let Some(place) = known.filter(|place| place.is_dir()) {
            return Ok(place);
        }
        self.search()?.into_iter().next().ok_or_else(|| Error::CgroupUnseen { mount: self.mount.clone() })
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
            return Err(io::Error::new(ErrorKind::NotFound, "no cgroup hierarchy is mounted there"));
        }
        all.sort_unstable();
        Ok(all)
    }
}

/// Adds the cgroups of all pods at or below `folder`; what is inside of one belongs to pods and is not looked at.
fn search(folder: &Path, depth: usize, found: &mut Vec<PathBuf>) -> io::Result<()> {
    // `kubepods` below the kubelet's `cgroupRoot`; the systemd driver writes the whole path into each slice's name
    // (`pkg/kubelet/cm` of Kubernetes).
    let is_of_pods =
        |name: &str| matches!(name, "kubepods" | "kubepods.slice") || name.ends_with("-kubepods.slice");
    if folder.file_name().and_then(|n| n.to_str()).is_some_and(is_of_pods) && folder.is_dir() {
        found.push(folder.to_owned());
        return Ok(());
    }
    let entries = match fs::read_dir(folder) {
        Ok(entries) if depth > 0 => entries,
        // Cgroups come and go while they are listed.
        Err(e) if !matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => return Err(e),
        _ => return Ok(()),
    };
    for entry in entries {
        let entry = match entry {
            Ok(entry) => entry,
            Err(e) if gone(&e) => return Ok(()),
            Err(e) => return Err(e),
        };
        if entry.file_type().is_ok_and(|t| t.is_dir()) {
            search(&entry.path(), depth - 1, found)?;
        }
    }
    Ok(())
}

/// Whether a folder of a hierarchy went away while it was looked at.
fn gone(error: &io::Error) -> bool {
    error.kind() == ErrorKind::NotFound || error.raw_os_error() == Some(nix::errno::Errno::ENODEV as i32)
}

/// The pod's folder below the first of `parents` that has one.
fn below(parents: &[PathBuf], pod: &str) -> Result<Option<PathBuf>, Error> {
    for parent in parents {
        for name in names(parent, pod) {
            let path = parent.join(name);
            if path.try_exists().map_err(Error::file("look for the pod's cgroup at", &path))? {
                return Ok(Some(path));
            }
        }
    }
    Ok(None)
}

/// Paths of a pod's cgroup below the cgroup of all pods: by quality-of-service class, as the cgroupfs and the systemd
/// driver name them (`pkg/kubelet/cm` of Kubernetes).
fn names(parent: &Path, pod: &str) -> Vec<String> {
    let parent = parent.file_name().and_then(|n| n.to_str()).unwrap_or_default();
    let classes = ["burstable", "besteffort"];
    let Some(stem) = parent.strip_suffix(".slice") else {
        let classes = classes.map(|c| format!("{c}/pod{pod}"));
        return [format!("pod{pod}")].into_iter().chain(classes).collect();
    };
    let pod = pod.replace('-', "_");
    let classes = classes.map(|c| format!("{stem}-{c}.slice/{stem}-{c}-pod{pod}.slice"));
    [format!("{stem}-pod{pod}.slice")].into_iter().chain(classes).collect()
}

/// A process of the pod, by the cgroups of all processes: a look that does not depend on where cgroups are mounted.
///
/// # Errors
/// When the processes cannot be listed.
pub fn process_of(proc: &Path, pod: &str) -> io::Result<Option<u32>> {
    for entry in fs::read_dir(proc)? {
        let name = entry?.file_name();
        let Some(pid) = name.to_str().and_then(|n| n.parse().ok()) else { continue };
        if is_of_pod(proc, pid, pod) {
            return Ok(Some(pid));
        }
    }
    Ok(None)
}

/// Whether anything of the pod is left, by two witnesses that must agree: a pod whose cgroup is kept where nobody looks
/// has its processes in `proc` all the same.
///
/// # Errors
/// As [`Cgroups::remains`], or when the processes cannot be listed: then nothing is proved.
pub fn alive(cgroups: &Cgroups, proc: &Path, pod: &str) -> Result<Option<Witness>, Error> {
    if let Some(path) = cgroups.remains(pod)? {
        return Ok(Some(Witness::Cgroup { path }));
    }
    let found = process_of(proc, pod).map_err(Error::file("list", proc))?;
    Ok(found.map(|pid| Witness::Running { pid }))
}

/// Where pods' cgroups are seen; `running` is a pod that runs, whose cgroup must show there.
///
/// # Errors
/// [`Error::CgroupUnseen`] where no kubelet keeps pods, [`Error::CgroupElsewhere`] where the running pod's processes show
/// and its cgroup does not.
pub fn place(cgroups: &Cgroups, proc: &Path, running: Option<&str>) -> Result<PathBuf, Error> {
    let place = cgroups.place()?;
    let Some(pod) = running else { return Ok(place) };
    let seen = || Ok::<_, Error>(cgroups.remains(pod)?.is_some());
    // Looked at once more behind the processes: it may just have ended.
    if seen()? || process_of(proc, pod).map_err(Error::file("list", proc))?.is_none() || seen()? {
        return Ok(place);
    }
    Err(Error::CgroupElsewhere { pod: pod.to_owned(), place })
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

    fn mount(v2: bool, paths: &[&str]) -> tempfile::TempDir {
        let mount = tempfile::tempdir().unwrap();
        for path in paths {
            fs::create_dir_all(mount.path().join(path)).unwrap();
        }
        if v2 {
            fs::write(mount.path().join("cgroup.controllers"), "").unwrap();
        }
        mount
    }

    #[test]
    fn a_pods_cgroup_is_seen_wherever_the_kubelet_keeps_it() {
        let escaped = POD.replace('-', "_");
        let qos =
            |stem: &str| format!("{stem}.slice/{stem}-burstable.slice/{stem}-burstable-pod{escaped}.slice");
        for (case, v2, root, path) in [
            (
                "v1, cgroupfs, lab",
                false,
                "/lab/node-a",
                format!("memory/lab/node-a/kubepods/besteffort/pod{POD}"),
            ),
            ("v1, guaranteed", false, "/", format!("cpu,cpuacct/kubepods/pod{POD}")),
            ("v2, systemd", true, "/", qos("kubepods")),
            ("v2, cgroupfs", true, "/", format!("kubepods/burstable/pod{POD}")),
            // kind sets cgroupRoot: /kubelet.
            ("another cgroupRoot, not told", true, "/", format!("kubelet/kubepods/pod{POD}")),
            ("another cgroupRoot, systemd", true, "/", format!("kubelet.slice/{}", qos("kubelet-kubepods"))),
            (
                "another cgroupRoot, systemd, told",
                true,
                "/kubelet",
                format!("kubelet.slice/{}", qos("kubelet-kubepods")),
            ),
            ("told wrong", false, "/lab/node-b", format!("memory/lab/node-a/kubepods/pod{POD}")),
            (
                "a node in a container",
                true,
                "/",
                format!("system.slice/docker-0.scope/kubelet.slice/{}", qos("kubelet-kubepods")),
            ),
        ] {
            let mount = mount(v2, &["pids", &path]);
            let cgroups = Cgroups::new(mount.path().into(), root);
            assert_eq!(cgroups.remains(POD).unwrap(), Some(mount.path().join(&path)), "{case}");
            assert_eq!(cgroups.remains(POD).unwrap(), Some(mount.path().join(&path)), "{case}: from memory");
            fs::remove_dir(mount.path().join(&path)).unwrap();
            assert_eq!(cgroups.remains(POD).unwrap(), None, "{case}: over");
        }
    }

    #[test]
    fn another_pods_cgroup_is_no_ones_else() {
        let mount = mount(true, &["kubepods/pod00000000-6d2e-4f3e-8f1a-0d9b8a7c6e5d"]);
        assert_eq!(Cgroups::new(mount.path().into(), "/").remains(POD).unwrap(), None);
    }

    #[test]
    fn a_kubelet_that_moved_is_found_again() {
        let (before, after) = (format!("a/kubepods/pod{POD}"), format!("b/kubepods/pod{POD}"));
        let mount = mount(true, &["a/kubepods"]);
        let cgroups = Cgroups::new(mount.path().into(), "/a");
        assert_eq!(cgroups.remains(POD).unwrap(), None);
        fs::create_dir_all(mount.path().join(&after)).unwrap();
        assert_eq!(cgroups.remains(POD).unwrap(), Some(mount.path().join(&after)));
        assert_ne!(before, after);
    }

    /// An agent that sees another machine's cgroups, or its own container's alone, must not free anything.
    #[test]
    fn nothing_is_proved_where_no_kubelet_keeps_pods() {
        for (case, paths, code) in [
            ("nothing is mounted", &[][..], "FileFailed"),
            ("no kubelet", &["memory/system.slice", "pids/user.slice"][..], "CgroupUnseen"),
            ("deeper than any", &["memory/1/2/3/4/5/6/7/kubepods"][..], "CgroupUnseen"),
        ] {
            let mount = mount(false, paths);
            let cgroups = Cgroups::new(mount.path().into(), "/");
            assert_eq!(cgroups.remains(POD).unwrap_err().code(), code, "{case}");
        }
        let none = Cgroups::new("/nonexistent".into(), "/");
        assert_eq!(none.remains(POD).unwrap_err().code(), "FileFailed");
    }

    #[test]
    fn both_witnesses_must_say_that_a_pod_is_over() {
        let (mount, proc) = (mount(true, &["kubepods"]), tempfile::tempdir().unwrap());
        let cgroups = Cgroups::new(mount.path().into(), "/");
        let group = mount.path().join(format!("kubepods/burstable/pod{POD}"));
        let process = proc.path().join("17");
        let place = mount.path().join("kubepods");
        let seen = |running| place_code(&cgroups, proc.path(), running);
        assert_eq!(alive(&cgroups, proc.path(), POD).unwrap(), None);
        assert_eq!(seen(Some(POD)), Ok(place.clone()), "it has just ended");
        fs::create_dir_all(&group).unwrap();
        assert!(alive(&cgroups, proc.path(), POD).unwrap().is_some());
        assert_eq!(seen(Some(POD)), Ok(place.clone()));
        fs::remove_dir(&group).unwrap();
        fs::create_dir(&process).unwrap();
        fs::write(process.join("cgroup"), format!("0::/elsewhere/pod{POD}/ctr\n")).unwrap();
        assert!(alive(&cgroups, proc.path(), POD).unwrap().is_some());
        assert_eq!(seen(Some(POD)), Err("CgroupElsewhere"));
        assert_eq!(seen(None), Ok(place));
        fs::remove_dir(mount.path().join("kubepods/burstable")).unwrap();
        fs::remove_dir(mount.path().join("kubepods")).unwrap();
        assert_eq!(seen(None), Err("CgroupUnseen"));
        assert!(alive(&cgroups, &proc.path().join("none"), POD).is_err());
    }

    fn place_code(cgroups: &Cgroups, proc: &Path, running: Option<&str>) -> Result<PathBuf, &'static str> {
        place(cgroups, proc, running).map_err(|e| e.code())
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
        assert!(matches!(process_of(proc.path(), POD), Ok(Some(1 | 2))));
        assert!(matches!(process_of(proc.path(), "another"), Ok(None)));
        assert!(process_of(&proc.path().join("none"), POD).is_err());
    }
}
