//! The cgroups under which the kubelets put pods. They outlive namespaces, so they are removed by hand.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::layout;

/// Mount points of every cgroup hierarchy, v1 and v2.
fn hierarchies() -> Result<Vec<(PathBuf, bool)>> {
    let mounts = fs::read_to_string("/proc/self/mounts").context("cannot read /proc/self/mounts")?;
    Ok(parse_mounts(&mounts))
}

/// (mount point, is v2) of each cgroup line of `/proc/mounts`.
fn parse_mounts(mounts: &str) -> Vec<(PathBuf, bool)> {
    let mut found: Vec<(PathBuf, bool)> = mounts
        .lines()
        .filter_map(|line| {
            let mut fields = line.split(' ').skip(1);
            let (at, kind) = (fields.next()?, fields.next()?);
            matches!(kind, "cgroup" | "cgroup2").then(|| (PathBuf::from(at), kind == "cgroup2"))
        })
        .collect();
    found.dedup();
    found
}

/// Makes `/lab/<node>` in every hierarchy.
pub fn create(node: &str) -> Result<()> {
    let all = hierarchies()?;
    let unified_only = all.iter().all(|(_, v2)| *v2);
    for (root, v2) in &all {
        let parent = root.join(layout::cgroup());
        let leaf = parent.join(node);
        if *v2 && !unified_only {
            // A hybrid machine's v2 tree has no controllers; the kubelet does not use it.
            continue;
        }
        fs::create_dir_all(&leaf).with_context(|| format!("cannot make cgroup {}", leaf.display()))?;
        if *v2 {
            for dir in [root, &parent] {
                for controller in ["cpu", "cpuset", "io", "memory", "pids", "hugetlb"] {
                    // A controller that the machine lacks is the kubelet's to complain about.
                    let _ = fs::write(dir.join("cgroup.subtree_control"), format!("+{controller}"));
                }
            }
        } else if root.join("cpuset.cpus").exists() {
            // A new cpuset is empty and takes no process until it is filled.
            for (from, to) in [(root, &parent), (&parent, &leaf)] {
                for file in ["cpuset.cpus", "cpuset.mems"] {
                    let value = fs::read_to_string(from.join(file)).context("cannot read a cpuset")?;
                    fs::write(to.join(file), value.trim()).context("cannot fill a cpuset")?;
                }
            }
        }
    }
    Ok(())
}

/// Removes `/lab` everywhere, depth first; waits up to `patience` for what is still dying in there.
///
/// # Errors
/// Names the cgroups that are left.
pub fn remove_all(patience: Duration) -> Result<()> {
    let deadline = Instant::now() + patience;
    loop {
        let mut left = Vec::new();
        for (root, _) in hierarchies()? {
            remove_tree(&root.join(layout::cgroup()), &mut left);
        }
        if left.is_empty() {
            return Ok(());
        }
        if Instant::now() > deadline {
            bail!("cgroups still in use: {left:?}; end the processes in them and remove them with rmdir");
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn remove_tree(dir: &Path, left: &mut Vec<PathBuf>) {
    let Ok(entries) = fs::read_dir(dir) else { return };
    for entry in entries.flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            remove_tree(&entry.path(), left);
        }
    }
    if fs::remove_dir(dir).is_err() && dir.exists() {
        left.push(dir.to_owned());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_hierarchies() {
        let mounts = "/dev/vda / ext4 rw 0 0\ncgroup /sys/fs/cgroup/cpu cgroup rw,cpu 0 0\n\
                      cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\ntmpfs /sys/fs/cgroup tmpfs rw 0 0\n";
        assert_eq!(
            parse_mounts(mounts),
            [("/sys/fs/cgroup/cpu".into(), false), ("/sys/fs/cgroup/unified".into(), true)]
        );
    }
}
