//! The library that applies the limits, as files that never change under a container.
//!
//! A new version is not written over the old one but beside it, in a folder named after its content, and a grant's spec
//! mounts that file. So neither an update of the agent nor somebody who copies a new library to the node changes what a
//! running container has loaded or what a restarted one loads.

use std::collections::BTreeSet;
use std::fs;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;
use sha2::{Digest, Sha256};
use tracing::{info, warn};

use crate::config::Settings;
use crate::error::Error;
use crate::prepare::{cdi, files};

/// Name of the library in its folder.
const FILE: &str = "libvgpu.so";
/// Hex digits of the content's SHA-256 that name its folder.
const NAME_DIGITS: usize = 16;
/// The largest file that is taken for a library, in bytes; ours has some hundred KiB.
const MAX_SIZE: u64 = 64 << 20;

/// No library to mount.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unusable {
    /// There is none.
    #[error(
        "{library:?} is not on this node, so no limit can be applied: install it, or set enforcement: report to run \
         without limits"
    )]
    Missing {
        /// Where it was looked for.
        library: PathBuf,
    },
    /// A program in the container would start without it.
    #[error(
        "{library:?} cannot be loaded into a container ({problem}), so no limit can be applied: copy it anew, or set \
         enforcement: report to run without limits"
    )]
    Invalid {
        /// Which file.
        library: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
}

impl Unusable {
    /// The stable name of the problem.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::Missing { .. } => "HookMissing",
            Self::Invalid { .. } => "HookInvalid",
        }
    }

    /// What that means where containers start all the same.
    #[must_use]
    pub fn in_report_mode(&self) -> String {
        match self {
            Self::Missing { library } => {
                format!(
                    "{} is not on this node: containers run without limits until it is installed",
                    library.display()
                )
            }
            Self::Invalid { library, problem } => format!(
                "{} cannot be loaded into a container ({problem}): containers run without limits until it is copied anew",
                library.display()
            ),
        }
    }
}

/// What the source looked like when it was read: device, inode, length, times of content and inode in ns.
type Stamp = (u64, u64, u64, i64, i64);

/// What is known of the source: what it looked like, and what came of it.
type Known = Option<(Stamp, Result<PathBuf, Unusable>)>;

/// Puts versions of the library on the node, and takes away those that nobody needs any more. One for the whole agent:
/// a file in the making has one name.
#[derive(Debug)]
pub struct Library {
    source: PathBuf,
    dir: PathBuf,
    cdi_dir: PathBuf,
    /// Held while a version is installed.
    cache: Mutex<Known>,
    /// Versions that nobody needed at the last sweep.
    suspects: Mutex<BTreeSet<PathBuf>>,
}

impl Library {
    /// Copies the library of `settings` from where it came with the agent to where containers get it.
    #[must_use]
    pub fn new(settings: &Settings) -> Arc<Self> {
        Arc::new(Self {
            source: settings.hook_library.clone(),
            dir: settings.libraries_dir(),
            cdi_dir: settings.cdi_dir.clone(),
            cache: Mutex::default(),
            suspects: Mutex::default(),
        })
    }

    /// The file that a new grant mounts; installs it first if it is a new one.
    ///
    /// # Errors
    /// [`Error::File`] when a good library cannot be installed: that is no reason to run without limits. The inner
    /// error says why there is none to install. [`Error::Broken`] when the look panicked.
    pub async fn current(self: &Arc<Self>) -> Result<Result<PathBuf, Unusable>, Error> {
        self.aside(Self::look).await?
    }

    /// Installs what there is and says in the log what that is: at the start, before a container waits for it.
    pub async fn announce(self: &Arc<Self>) {
        match self.current().await {
            Ok(Ok(library)) => info!(?library, "library"),
            Ok(Err(unusable)) => warn!(code = unusable.code(), error = %unusable, "no library"),
            Err(error) => {
                warn!(code = error.code(), error = %mullion_telemetry::source_chain(&error), "no library");
            }
        }
    }

    /// Removes versions that no grant's spec names, at the second sweep that finds them so: a grant that is being prepared
    /// may name one a moment later.
    ///
    /// # Errors
    /// [`Error::File`], also for a spec that cannot be read, which may name any of them.
    pub async fn sweep(self: &Arc<Self>) -> Result<(), Error> {
        self.aside(Self::remove_unneeded).await?
    }

    /// Runs `work`, which reads and writes files, where nobody waits for it who has something else to do.
    async fn aside<T: Send + 'static>(self: &Arc<Self>, work: fn(&Self) -> T) -> Result<T, Error> {
        let library = Arc::clone(self);
        let done = tokio::task::spawn_blocking(move || work(&library));
        done.await.map_err(|source| Error::Broken { source })
    }

    fn look(&self) -> Result<Result<PathBuf, Unusable>, Error> {
        let failed = || Error::file("read", &self.source);
        let meta = match fs::metadata(&self.source) {
            Ok(meta) => meta,
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                return Ok(Err(Unusable::Missing { library: self.source.clone() }));
            }
            Err(e) => return Err(failed()(e)),
        };
        let mut cache = self.cache.lock();
        if let Some((stamp, known)) = cache.as_ref()
            && *stamp == self::stamp(&meta)
            && known.as_ref().map_or(true, |path| path.exists())
        {
            return Ok(known.clone());
        }
        let invalid = |problem: String| Unusable::Invalid { library: self.source.clone(), problem };
        let found = if !meta.is_file() {
            Err(invalid("it is no file".to_owned()))
        } else if meta.len() > MAX_SIZE {
            Err(invalid(format!("it is larger than {MAX_SIZE} bytes")))
        } else {
            let mut bytes = Vec::new();
            let file = fs::File::open(&self.source).map_err(failed())?;
            (&file).take(MAX_SIZE).read_to_end(&mut bytes).map_err(failed())?;
            let after = file.metadata().map_err(failed())?;
            if self::stamp(&after) != self::stamp(&meta) {
                // Looked at again at the next call.
                return Ok(Err(invalid("it is just being written".to_owned())));
            }
            match check(&bytes) {
                Ok(()) => Ok(self.install(&bytes)?),
                Err(problem) => Err(invalid(problem)),
            }
        };
        *cache = Some((self::stamp(&meta), found.clone()));
        Ok(found)
    }

    /// A file that a power cut left behind under the same name is replaced: bound mounts keep the one that they have.
    fn install(&self, bytes: &[u8]) -> Result<PathBuf, Error> {
        let mut name = hex::encode(Sha256::digest(bytes));
        name.truncate(NAME_DIGITS);
        let folder = self.dir.join(name);
        let path = folder.join(FILE);
        if !fs::read(&path).is_ok_and(|there| there == bytes) {
            files::folder(&folder)?;
            files::replace(&path, bytes, 0o755)?;
            info!(library = ?path, "library installed");
        }
        Ok(path)
    }

    fn remove_unneeded(&self) -> Result<(), Error> {
        let current = self.look()?.ok();
        let mut unneeded = folders(&self.dir);
        unneeded.retain(|folder| current.as_deref().and_then(Path::parent) != Some(folder));
        if !unneeded.is_empty() {
            let named = self.named()?;
            unneeded.retain(|folder| !named.iter().any(|path| path.starts_with(folder)));
        }
        let mut suspects = self.suspects.lock();
        suspects.retain(|folder| unneeded.contains(folder));
        for folder in unneeded {
            if suspects.contains(&folder) {
                files::remove_folder(&folder)?;
                suspects.remove(&folder);
                info!(?folder, "removed a library that no container has");
            } else {
                suspects.insert(folder);
            }
        }
        Ok(())
    }

    /// The files that grants' specs mount.
    fn named(&self) -> Result<BTreeSet<PathBuf>, Error> {
        let mut named = BTreeSet::new();
        let listed = match fs::read_dir(&self.cdi_dir) {
            Ok(listed) => listed,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(named),
            Err(e) => return Err(Error::file("list", &self.cdi_dir)(e)),
        };
        for entry in listed {
            let entry = entry.map_err(Error::file("list", &self.cdi_dir))?;
            if entry.file_name().to_str().is_none_or(|name| cdi::grant_of(name).is_none()) {
                continue;
            }
            let bytes = match fs::read(entry.path()) {
                Ok(bytes) => bytes,
                // Released meanwhile.
                Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
                Err(e) => return Err(Error::file("read", entry.path())(e)),
            };
            let spec: cdi::Spec = serde_json::from_slice(&bytes)
                .map_err(|e| Error::file("read", entry.path())(io::Error::other(e)))?;
            let mounts = spec.devices.iter().flat_map(|d| &d.container_edits.mounts);
            named.extend(mounts.map(|m| PathBuf::from(&m.host_path)));
        }
        Ok(named)
    }
}

fn stamp(meta: &fs::Metadata) -> Stamp {
    let nanoseconds = |s: i64, ns: i64| s.saturating_mul(1_000_000_000).saturating_add(ns);
    let (content, inode) =
        (nanoseconds(meta.mtime(), meta.mtime_nsec()), nanoseconds(meta.ctime(), meta.ctime_nsec()));
    (meta.dev(), meta.ino(), meta.len(), content, inode)
}

/// Folders with the name of a content.
fn folders(dir: &Path) -> BTreeSet<PathBuf> {
    let ours = |name: &str| name.len() == NAME_DIGITS && name.bytes().all(|b| b.is_ascii_hexdigit());
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries.filter(|e| e.file_name().to_str().is_some_and(ours)).map(|e| e.path()).collect()
}

/// What the loader of a container would say: it skips a preload that it cannot use, and the program runs without a
/// limit. Offsets: `Elf64_Ehdr` and `Elf64_Shdr` of the System V ABI; sections stand at the end of what a linker writes,
/// so that half a file lacks them.
fn check(bytes: &[u8]) -> Result<(), String> {
    const SHARED_OBJECT: u16 = 3;
    let machine = match std::env::consts::ARCH {
        "x86_64" => Some(62),
        "aarch64" => Some(183),
        _ => None,
    };
    let short = || "it ends too early".to_owned();
    let field = |at: usize, width: usize| {
        let bytes = bytes.get(at..at.checked_add(width)?)?;
        Some(bytes.iter().rev().fold(0_u64, |n, b| n << 8 | u64::from(*b)))
    };
    let number = |at: usize, width: usize| field(at, width).ok_or_else(short);
    // 64 bits, little-endian.
    if bytes.get(..6) != Some(&[0x7f, b'E', b'L', b'F', 2, 1]) {
        return Err("it is no ELF file of 64 bits".to_owned());
    }
    if number(16, 2)? != u64::from(SHARED_OBJECT) {
        return Err("it is no shared library".to_owned());
    }
    if machine.is_some_and(|m| field(18, 2) != Some(m)) {
        return Err(format!("it is not for {}", std::env::consts::ARCH));
    }
    // e_phoff, e_phentsize, e_phnum; then e_shoff, e_shentsize, e_shnum.
    for (offset, size, count) in [(32, 54, 56), (40, 58, 60)] {
        let end = number(size, 2)?.saturating_mul(number(count, 2)?).saturating_add(number(offset, 8)?);
        if end > bytes.len() as u64 {
            return Err(short());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Args;

    struct Node {
        root: tempfile::TempDir,
        library: Arc<Library>,
    }

    fn settings(root: &Path) -> Settings {
        let at = |name: &str| Some(root.join(name));
        Settings::load(Args {
            node_name: Some("n".to_owned()),
            hook_dir: at("vgpu"),
            hook_library: at("image/libvgpu.so"),
            cdi_dir: at("cdi"),
            ..Args::default()
        })
        .unwrap()
    }

    fn node() -> Node {
        let root = tempfile::tempdir().unwrap();
        for folder in ["vgpu", "image", "cdi"] {
            fs::create_dir(root.path().join(folder)).unwrap();
        }
        Node { library: Library::new(&settings(root.path())), root }
    }

    impl Node {
        fn at(&self, name: &str) -> PathBuf {
            self.root.path().join(name)
        }

        fn put(&self, bytes: &[u8]) {
            files::replace(&self.at("image/libvgpu.so"), bytes, 0o644).unwrap();
        }

        fn current(&self) -> Result<PathBuf, &'static str> {
            self.library.look().unwrap().map_err(|u| u.code())
        }

        fn installed(&self) -> Vec<PathBuf> {
            folders(&self.at("vgpu/lib")).into_iter().collect()
        }
    }

    /// A shared library for this machine as far as its header tells: one segment, one section, at the end.
    fn library(version: u8) -> Vec<u8> {
        let mut bytes = vec![version; 1024];
        bytes[..16].copy_from_slice(b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0");
        let machine = if cfg!(target_arch = "aarch64") { 183 } else { 62 };
        for (at, width, value) in [
            (16, 2, 3_u64),
            (18, 2, machine),
            (32, 8, 64),
            (40, 8, 960),
            (54, 2, 56),
            (56, 2, 1),
            (58, 2, 64),
            (60, 2, 1),
        ] {
            bytes[at..at + width].copy_from_slice(&value.to_le_bytes()[..width]);
        }
        bytes
    }

    // CH-07: an update never swaps the file under a running container.
    #[test]
    fn a_new_version_lies_beside_the_old_one_until_no_spec_names_it() {
        let node = node();
        assert_eq!(node.current(), Err("HookMissing"));
        node.put(&library(1));
        let old = node.current().unwrap();
        assert_eq!(fs::read(&old).unwrap(), library(1));
        let inode = fs::metadata(&old).unwrap().ino();
        let edits = cdi::ContainerEdits {
            mounts: vec![cdi::Mount {
                host_path: old.display().to_string(),
                container_path: "/usr/local/vgpu/libvgpu.so".to_owned(),
                ..cdi::Mount::default()
            }],
            ..cdi::ContainerEdits::default()
        };
        let spec = node.at("cdi/mullion.io-grant-0123456789abcdef.json");
        let text = serde_json::to_vec(&cdi::grant_spec("0123456789abcdef", "0.5.0", edits)).unwrap();
        fs::write(&spec, text).unwrap();

        node.put(&library(2));
        let new = node.current().unwrap();
        assert_ne!(new, old);
        assert_eq!(fs::metadata(&old).unwrap().ino(), inode, "not touched");
        for _ in 0..3 {
            node.library.remove_unneeded().unwrap();
        }
        assert_eq!(node.installed().len(), 2, "a spec names the old one");
        fs::write(&spec, "{").unwrap();
        assert_eq!(node.library.remove_unneeded().unwrap_err().code(), "FileFailed", "may name any");
        fs::remove_file(&spec).unwrap();
        node.library.remove_unneeded().unwrap();
        assert_eq!(node.installed().len(), 2, "a grant may just be on its way");
        node.library.remove_unneeded().unwrap();
        assert_eq!(node.installed(), [new.parent().unwrap()]);
        node.put(&library(1));
        assert_eq!(node.current().unwrap(), old, "the same content, the same name");
    }

    #[test]
    fn what_a_container_could_not_load_is_not_installed() {
        let node = node();
        let whole = library(0);
        let with = |at: usize, byte: u8| {
            let mut bytes = whole.clone();
            bytes[at] = byte;
            bytes
        };
        for (case, bytes) in [
            ("empty", Vec::new()),
            ("half a header", whole[..40].to_vec()),
            ("half a file", whole[..whole.len() / 2].to_vec()),
            ("a script", b"#!/bin/sh\n".to_vec()),
            ("an object file", with(16, 1)),
            ("of another machine", with(18, 8)),
            ("of 32 bits", with(4, 1)),
        ] {
            node.put(&bytes);
            assert_eq!(node.current(), Err("HookInvalid"), "{case}");
        }
        assert!(node.installed().is_empty());
        fs::remove_file(node.at("image/libvgpu.so")).unwrap();
        fs::create_dir(node.at("image/libvgpu.so")).unwrap();
        assert_eq!(node.current(), Err("HookInvalid"), "a folder");
    }

    #[test]
    fn what_a_power_cut_left_is_made_good() {
        let node = node();
        node.put(&library(1));
        let path = node.current().unwrap();
        fs::write(&path, "").unwrap();
        let another_run = Library::new(&settings(node.root.path()));
        assert_eq!(another_run.look().unwrap().unwrap(), path);
        assert_eq!(fs::read(&path).unwrap(), library(1));
        fs::remove_dir_all(node.at("vgpu/lib")).unwrap();
        assert_eq!(another_run.look().unwrap().unwrap(), path, "removed by hand");
        assert!(path.exists());
    }

    /// All parts of the agent have the same one, and ask at the same time, also while a version comes.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn whoever_asks_while_a_version_is_installed_gets_the_whole_of_it() {
        let node = node();
        for version in 1..=5 {
            node.put(&library(version));
            let asked: Vec<_> = (0..16)
                .map(|_| {
                    let one = Arc::clone(&node.library);
                    tokio::spawn(async move {
                        let path = one.current().await.unwrap().unwrap();
                        fs::read(path).unwrap()
                    })
                })
                .collect();
            for answer in asked {
                assert_eq!(answer.await.unwrap(), library(version));
            }
        }
        let made: Vec<_> = node.installed().iter().flat_map(|f| fs::read_dir(f).unwrap()).collect();
        assert_eq!((node.installed().len(), made.len()), (5, 5), "nothing half made stays");
    }

    /// On a runtime with one worker, somebody who waits for a file would keep all others waiting.
    #[tokio::test]
    #[expect(clippy::await_holding_lock, reason = "that others go on meanwhile is what is shown")]
    async fn a_look_that_takes_long_keeps_nobody_else_waiting() {
        let node = node();
        node.put(&library(1));
        let busy = node.library.cache.lock();
        let one = Arc::clone(&node.library);
        let asked = tokio::spawn(async move { one.current().await });
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        assert!(!asked.is_finished());
        drop(busy);
        assert!(asked.await.unwrap().unwrap().is_ok());
    }
}
