//! What the lab and each node see of the file system: the machine's own root, with private copies of every folder
//! that a part writes to.

use std::fs::{self, File};
use std::path::Path;

use anyhow::{Context, Result};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};

use crate::layout::{self, NodePlan};

/// Kernel settings that a kubelet insists on. They belong to the whole machine, so each node gets files in their
/// place: the kubelet finds what it wants and writes nothing.
const KERNEL_SETTINGS: &[(&str, &str)] = &[
    ("kernel/keys/root_maxbytes", "25000000"),
    ("kernel/keys/root_maxkeys", "1000000"),
    ("kernel/panic", "10"),
    ("kernel/panic_on_oops", "1"),
    ("vm/overcommit_memory", "1"),
    ("vm/panic_on_oom", "0"),
];

/// Gives this process a mount namespace for the lab and prepares it. Returns the one it came from, in which the
/// lab's folder can be removed: folders that something is mounted on cannot.
pub fn enter_lab() -> Result<File> {
    let outside = File::open("/proc/self/ns/mnt").context("cannot open the mount namespace")?;
    unshare(CloneFlags::CLONE_NEWNS).context("cannot make a mount namespace")?;
    mark("/", MsFlags::MS_PRIVATE | MsFlags::MS_REC)?;
    for dir in ["nodes", "etcd"] {
        tmpfs(&layout::run(dir))?;
    }
    // A private /run: network namespaces, sockets and locks of the parts stay inside.
    let new = layout::run(".run");
    tmpfs(&new)?;
    let inside = new.join(own_name());
    fs::create_dir(&inside).with_context(|| format!("cannot make {}", inside.display()))?;
    bind(layout::root(), &inside)?;
    fs::create_dir(new.join("lock")).context("cannot make /run/lock")?;
    mount(Some(&new), "/run", None::<&str>, MsFlags::MS_MOVE, None::<&str>)
        .context("cannot move the lab's /run in place")?;
    Ok(outside)
}

/// Puts the names of the webhook into the API server's host table.
pub fn hosts(controllers: usize) -> Result<()> {
    let mut text = fs::read_to_string("/etc/hosts").unwrap_or_default();
    for index in 0..controllers {
        text.extend(["\n", &layout::controller_address(index), " ", layout::WEBHOOK_HOST]);
    }
    text.push('\n');
    let file = layout::run("hosts");
    fs::write(&file, text).context("cannot write the host table")?;
    bind(&file, Path::new("/etc/hosts"))
}

/// Prepares a node's mount namespace. Runs first in it.
pub fn enter_node(node: &NodePlan) -> Result<()> {
    mark("/", MsFlags::MS_PRIVATE | MsFlags::MS_REC)?;
    let dir = node.dir();
    for (target, name) in [("/etc", "etc"), ("/var/lib", "var-lib"), ("/usr/local", "usr-local")] {
        overlay(Path::new(target), &dir.join("overlay").join(name))?;
    }
    for (target, name) in [
        ("/etc/cdi", "etc-cdi"),
        ("/usr/local/vgpu", "vgpu"),
        ("/var/lib/kubelet", "kubelet"),
        ("/var/lib/mullion", "mullion"),
        ("/var/log", "log"),
    ] {
        let own = dir.join(name);
        for path in [&own, Path::new(target)] {
            fs::create_dir_all(path).with_context(|| format!("cannot make {}", path.display()))?;
        }
        bind(&own, Path::new(target))?;
    }
    for (setting, value) in KERNEL_SETTINGS {
        let (at, file) = (Path::new("/proc/sys").join(setting), dir.join("kernel").join(setting));
        if let Some(parent) = file.parent() {
            fs::create_dir_all(parent).context("cannot make a folder for kernel settings")?;
        }
        if at.exists() {
            fs::write(&file, value).context("cannot write a kernel setting's file")?;
            bind(&file, &at)?;
        }
    }
    // Last, because it hides the lab's own view of /run.
    let run = dir.join("run");
    for sub in [own_name(), "cdi", "lock", "netns"] {
        fs::create_dir_all(run.join(sub)).with_context(|| format!("cannot make /run/{sub}"))?;
    }
    bind(layout::root(), &run.join(own_name()))?;
    bind(&run, Path::new("/run"))?;
    // As on an ordinary machine: what the kubelet mounts for a pod reaches the runtime and back.
    mark("/", MsFlags::MS_SHARED | MsFlags::MS_REC)
}

/// Name of the lab's folder below `/run`.
fn own_name() -> &'static str {
    layout::root().file_name().and_then(|name| name.to_str()).unwrap_or("mullion-lab")
}

fn mark(at: &str, flags: MsFlags) -> Result<()> {
    mount(None::<&str>, at, None::<&str>, flags, None::<&str>)
        .with_context(|| format!("cannot set propagation of {at}"))
}

fn tmpfs(at: &Path) -> Result<()> {
    fs::create_dir_all(at).with_context(|| format!("cannot make {}", at.display()))?;
    mount(Some("mullion-lab"), at, Some("tmpfs"), MsFlags::empty(), Some("mode=0755"))
        .with_context(|| format!("cannot mount a tmpfs on {}", at.display()))
}

fn bind(from: &Path, to: &Path) -> Result<()> {
    mount(Some(from), to, None::<&str>, MsFlags::MS_BIND | MsFlags::MS_REC, None::<&str>)
        .with_context(|| format!("cannot bind {} on {}", from.display(), to.display()))
}

/// A writable copy of `target` that leaves the machine's own alone.
fn overlay(target: &Path, dir: &Path) -> Result<()> {
    let (upper, work) = (dir.join("upper"), dir.join("work"));
    for path in [upper.as_path(), work.as_path(), target] {
        fs::create_dir_all(path).with_context(|| format!("cannot make {}", path.display()))?;
    }
    let options =
        format!("lowerdir={},upperdir={},workdir={}", target.display(), upper.display(), work.display());
    mount(Some("mullion-lab"), target, Some("overlay"), MsFlags::empty(), Some(options.as_str()))
        .with_context(|| format!("cannot lay a private copy over {}", target.display()))
}
