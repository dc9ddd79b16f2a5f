//! Which host processes a container has, and what each is called inside: by the kernel's word alone.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// How deep a container may nest cgroups of its own before nobody follows any more.
const DEPTH: usize = 8;

/// The processes of one container.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Processes {
    /// Pid in the innermost namespace, by pid on the host.
    pub inside: BTreeMap<u32, i32>,
}

impl Processes {
    /// The host pid of the process that calls itself `pid`; `None` where there is none, or more than one (a container
    /// may nest namespaces of its own).
    #[must_use]
    pub fn host_pid(&self, pid: i32) -> Option<u32> {
        let mut found = self.inside.iter().filter(|(_, inside)| **inside == pid).map(|(host, _)| *host);
        found.next().filter(|_| found.next().is_none())
    }

    /// Whether the host process is the container's.
    #[must_use]
    pub fn has(&self, host_pid: u32) -> bool {
        self.inside.contains_key(&host_pid)
    }

    /// Reads a container's processes; `known` are those of the last look, whose names inside do not change.
    ///
    /// # Errors
    /// When the cgroup cannot be listed.
    pub fn of(cgroup: &Path, proc: &Path, known: &Self) -> io::Result<Self> {
        let mut pids = Vec::new();
        collect(cgroup, DEPTH, &mut pids)?;
        let inside = |pid: u32| match known.inside.get(&pid) {
            Some(inside) => Some(*inside),
            None => inside(proc, pid),
        };
        Ok(Self { inside: pids.into_iter().filter_map(|pid| Some((pid, inside(pid)?))).collect() })
    }
}

/// The cgroup of a container below its pod's: the one that is named after the runtime's id (cgroupfs: the id itself;
/// systemd: `cri-containerd-<id>.scope`, `crio-<id>.scope`).
#[must_use]
pub fn container_cgroup(pod: &Path, container_id: &str) -> Option<PathBuf> {
    let id = container_id.rsplit("://").next().filter(|id| !id.is_empty())?;
    let direct = pod.join(id);
    if direct.is_dir() {
        return Some(direct);
    }
    let named =
        |name: &str| name.strip_suffix(".scope").is_some_and(|n| n == id || n.ends_with(&format!("-{id}")));
    let entries = fs::read_dir(pod).ok()?.flatten();
    entries.into_iter().find(|e| e.file_name().to_str().is_some_and(named)).map(|e| e.path())
}

fn collect(cgroup: &Path, depth: usize, pids: &mut Vec<u32>) -> io::Result<()> {
    let text = match fs::read_to_string(cgroup.join("cgroup.procs")) {
        Ok(text) => text,
        // A threaded cgroup has no list of its own; its processes stand in the one above.
        Err(error) if error.raw_os_error() == Some(nix::errno::Errno::EOPNOTSUPP as i32) => String::new(),
        Err(error) => return Err(error),
    };
    pids.extend(text.lines().filter_map(|line| line.trim().parse::<u32>().ok()).filter(|pid| *pid != 0));
    if depth == 0 {
        return Ok(());
    }
    for entry in fs::read_dir(cgroup)?.flatten() {
        if entry.file_type().is_ok_and(|t| t.is_dir()) {
            // It may end while it is looked at; the container's own cgroup is another matter.
            let _ = collect(&entry.path(), depth - 1, pids);
        }
    }
    Ok(())
}

/// A process's pid in its innermost namespace.
fn inside(proc: &Path, pid: u32) -> Option<i32> {
    let text = fs::read_to_string(proc.join(pid.to_string()).join("status")).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
    line.split_whitespace().next_back()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(proc: &Path, pid: u32, inside: &str) {
        fs::create_dir_all(proc.join(pid.to_string())).unwrap();
        let text = format!("Name:\tpython\nNSpid:\t{pid}{inside}\nVmPeak:\t1 kB\n");
        fs::write(proc.join(pid.to_string()).join("status"), text).unwrap();
    }

    #[test]
    fn a_containers_processes_are_named_as_they_name_themselves() {
        let root = tempfile::tempdir().unwrap();
        let (proc, pod) = (root.path().join("proc"), root.path().join("pod"));
        let group = pod.join("abc");
        fs::create_dir_all(group.join("nested")).unwrap();
        fs::write(group.join("cgroup.procs"), "100\n101\n102\n103\n").unwrap();
        fs::write(group.join("nested/cgroup.procs"), "104\n0\n").unwrap();
        for (pid, inside) in [(100, "\t1"), (101, "\t7"), (102, ""), (104, "\t12\t7")] {
            process(&proc, pid, inside);
        }
        let found = Processes::of(&group, &proc, &Processes::default()).unwrap();
        let want = BTreeMap::from([(100, 1), (101, 7), (102, 102), (104, 7)]);
        assert_eq!(found.inside, want, "103 has ended; 0 is of a namespace that is not seen");
        assert_eq!((found.host_pid(1), found.host_pid(7), found.host_pid(9)), (Some(100), None, None));
        // What was read once is not read again.
        fs::remove_dir_all(proc.join("100")).unwrap();
        assert_eq!(Processes::of(&group, &proc, &found).unwrap(), found);
        assert!(Processes::of(&pod.join("none"), &proc, &found).is_err());
    }

    #[test]
    fn a_containers_cgroup_is_found_by_the_runtimes_id() {
        let pod = tempfile::tempdir().unwrap();
        for name in ["0123", "cri-containerd-4567.scope", "crio-89ab.scope", "crio-conmon-cdef.scope"] {
            fs::create_dir(pod.path().join(name)).unwrap();
        }
        for (id, want) in [
            ("containerd://0123", Some("0123")),
            ("containerd://4567", Some("cri-containerd-4567.scope")),
            ("cri-o://89ab", Some("crio-89ab.scope")),
            ("containerd://567", None),
            ("containerd://", None),
            ("", None),
        ] {
            let found = container_cgroup(pod.path(), id);
            assert_eq!(found, want.map(|w| pod.path().join(w)), "{id}");
        }
    }
}
