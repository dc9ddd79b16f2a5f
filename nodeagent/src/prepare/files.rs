//! The files of a grant on the host. Everything is written under another name in the same folder and renamed, so that
//! nobody reads half a file.

use std::ffi::CString;
use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use mullion_region::usage;
use nix::fcntl::{OFlag, posix_fallocate};
use nix::unistd::truncate;
use rustix::fs::{listxattr, removexattr};
use rustix::io::Errno;

use crate::error::Error;

/// Name of the usage file in a container's folder.
pub const USAGE_FILE: &str = "usage.cache";

/// Makes a folder that only root writes, with its parents.
///
/// # Errors
/// [`Error::File`], also when something that is no folder has the name.
pub fn folder(path: &Path) -> Result<(), Error> {
    let failed = || Error::file("create", path);
    fs::DirBuilder::new().recursive(true).mode(0o755).create(path).map_err(failed())?;
    let meta = fs::symlink_metadata(path).map_err(failed())?;
    if !meta.is_dir() {
        return Err(failed()(io::ErrorKind::NotADirectory.into()));
    }
    Ok(())
}

/// Writes `bytes` to `path` so that a reader sees the old or the new content and a file of that name is always whole.
/// The extension of the temporary name is `tmp`, which a CDI cache does not read.
///
/// # Errors
/// [`Error::File`].
pub fn replace(path: &Path, bytes: &[u8], mode: u32) -> Result<(), Error> {
    let fresh = temporary(path);
    let write = || -> io::Result<()> {
        let mut file = create(&fresh, mode)?;
        file.write_all(bytes)?;
        fs::rename(&fresh, path)
    };
    write().map_err(|source| {
        let _ = fs::remove_file(&fresh);
        Error::File { action: "write", path: path.to_owned(), source }
    })
}

/// Makes a fresh usage file in `folder`, a new inode each time, so that nothing of a former process is left in it.
/// Tenants may write the file (0666, whatever the umask), not the folder.
///
/// # Errors
/// [`Error::File`].
pub fn usage_file(container: &Path, image: &usage::Image) -> Result<PathBuf, Error> {
    folder(container)?;
    // The file is its tenant's to write and to chmod: as a program that runs as root, no user of the node may reach it.
    fs::set_permissions(container, Permissions::from_mode(0o700)).map_err(Error::file("close", container))?;
    let path = container.join(USAGE_FILE);
    let fresh = temporary(&path);
    let length = i64::try_from(usage::FILE_LEN).unwrap_or(i64::MAX);
    let write = || -> io::Result<()> {
        let file = create(&fresh, 0o666)?;
        // Blocks now, so that a full disk is our error and not a tenant's SIGBUS.
        posix_fallocate(&file, 0, length)?;
        for (at, bytes) in image.writes() {
            file.write_all_at(bytes, at)?;
        }
        fs::rename(&fresh, &path)
    };
    write().map_err(|source| {
        let _ = fs::remove_file(&fresh);
        Error::File { action: "write", path: path.clone(), source }
    })?;
    Ok(path)
}

/// What a usage file may take of the disk beyond its length: what the file system needs to find its blocks.
const SLACK: u64 = 1 << 20;

/// A usage file that is more than it was made as. Nobody charges its tenant for what it takes of the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Oversize {
    /// How long it is, in bytes.
    pub length: u64,
    /// What it takes of the disk, in bytes: blocks can be had without a length (`FALLOC_FL_KEEP_SIZE`).
    pub taken: u64,
    /// It has extended attributes. Whoever may write to a file may give it any, XFS keeps as many as there is room for, and
    /// not each file system counts them among what the file takes.
    pub attributes: bool,
}

impl std::fmt::Display for Oversize {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { length, taken, attributes } = self;
        let with = if *attributes { ", with extended attributes" } else { "" };
        write!(
            f,
            "is {length} bytes long and takes {taken} of the disk{with}, where {} are right",
            usage::FILE_LEN
        )
    }
}

/// What a usage file has too much of. `None` for one that is as it should be, or gone.
///
/// # Errors
/// [`Error::File`].
pub fn oversize(container: &Path) -> Result<Option<Oversize>, Error> {
    let path = container.join(USAGE_FILE);
    let whole = usage::FILE_LEN as u64;
    let look = || -> io::Result<Option<Oversize>> {
        let found = find(&path)?;
        let meta = found.metadata()?;
        let attributes = match attributes(&found) {
            Ok(names) => !names.is_empty(),
            Err(Errno::TOOBIG) => true,
            Err(error) => return Err(error.into()),
        };
        let over = Oversize { length: meta.len(), taken: meta.blocks().saturating_mul(512), attributes };
        let is_over = over.length > whole || over.taken > whole.saturating_add(SLACK) || attributes;
        Ok(is_over.then_some(over))
    };
    match look() {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        result => result.map_err(Error::file("measure", &path)),
    }
}

/// Cuts a usage file that is too large back to its length, and takes the blocks beyond it and its attributes away. A tenant
/// can hold this up: it waits for the end of a write, and of a lease, for which the kernel gives 45 s. Whoever takes leases
/// anew cannot keep it out, as `truncate` asks for the right to write first.
///
/// # Errors
/// [`Error::File`], and [`Error::UsageFileNotCut`] where it is too large all the same.
pub fn cut_usage_file(container: &Path) -> Result<(), Error> {
    let path = container.join(USAGE_FILE);
    let cut = || -> io::Result<()> {
        let found = find(&path)?;
        let meta = found.metadata()?;
        if !meta.is_file() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        // A shorter one is not made longer.
        let length = meta.len().min(usage::FILE_LEN as u64);
        truncate(way(&found).as_str(), i64::try_from(length).unwrap_or(i64::MAX))?;
        match attributes(&found) {
            Ok(names) => names.iter().try_for_each(|name| match removexattr(way(&found), name) {
                Err(error) if error != Errno::NODATA => Err(error.into()),
                _ => Ok(()),
            }),
            // So many that the kernel does not name them: nobody can remove what he cannot name.
            Err(Errno::TOOBIG) => Ok(()),
            Err(error) => Err(error.into()),
        }
    };
    match cut() {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        result => result.map_err(Error::file("cut", &path))?,
    }
    oversize(container)?.map_or(Ok(()), |over| Err(Error::UsageFileNotCut { path, over }))
}

/// The file at `path`, without the right to read or write it, which a lease on it would hold up.
fn find(path: &Path) -> io::Result<File> {
    let flags = (OFlag::O_PATH | OFlag::O_NOFOLLOW).bits();
    OpenOptions::new().read(true).custom_flags(flags).open(path)
}

/// How calls that take no such descriptor find its file.
fn way(found: &File) -> String {
    format!("/proc/self/fd/{}", found.as_raw_fd())
}

/// The names of the attributes that a tenant may have given the file. Fails with [`Errno::TOOBIG`] where they are too many
/// to be named.
fn attributes(found: &File) -> Result<Vec<CString>, Errno> {
    // The kernel names no more.
    let mut list = vec![0_u8; 64 << 10];
    let length = match listxattr(way(found), list.as_mut_slice()) {
        // There are none on this file system, or on what is no file.
        Err(Errno::NOTSUP) => 0,
        result => result?,
    };
    let names = list.get(..length).unwrap_or_default().split(|byte| *byte == 0);
    let own = names.filter(|name| name.starts_with(b"user."));
    Ok(own.filter_map(|name| CString::new(name).ok()).collect())
}

fn create(path: &Path, mode: u32) -> io::Result<File> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    let file = OpenOptions::new().write(true).create_new(true).mode(mode).open(path)?;
    file.set_permissions(Permissions::from_mode(mode))?;
    Ok(file)
}

fn temporary(path: &Path) -> PathBuf {
    let name = path.file_name().and_then(|n| n.to_str()).unwrap_or("file");
    path.with_file_name(format!(".{name}.tmp"))
}

/// The name of the file that one of this temporary name was to become; `None` for any other name.
#[must_use]
pub fn meant_by(temporary: &str) -> Option<&str> {
    temporary.strip_prefix('.')?.strip_suffix(".tmp")
}

/// Removes a file; one that is gone is fine.
///
/// # Errors
/// [`Error::File`].
pub fn remove(path: &Path) -> Result<(), Error> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(Error::file("remove", path)(e)),
        _ => Ok(()),
    }
}

/// Removes a folder with what is in it, following no link; one that is gone is fine.
///
/// # Errors
/// [`Error::File`].
pub fn remove_folder(path: &Path) -> Result<(), Error> {
    match fs::remove_dir_all(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(Error::file("remove", path)(e)),
        _ => Ok(()),
    }
}

/// Whether a pod's uid and a container's name can stand in a path. The kubelet gives nothing else; a damaged
/// checkpoint might.
#[must_use]
pub fn is_plain(name: &str) -> bool {
    let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'.');
    !name.is_empty() && name.len() <= 253 && name.bytes().all(plain) && !name.starts_with('.')
}

#[cfg(test)]
mod tests {
    use super::*;
    use mullion_region::Devices;
    use nix::fcntl::{FallocateFlags, fallocate};
    use rustix::fs::{XattrFlags, setxattr};

    #[test]
    fn a_usage_file_is_a_new_inode_every_time_and_writable_to_all_while_its_folder_is_not() {
        let root = tempfile::tempdir().unwrap();
        let container = root.path().join("containers/p_c");
        let image = usage::image(&usage::UsageSpec { devices: Devices::new(), priority: 1 });
        let first = usage_file(&container, &image).unwrap();
        let before = fs::metadata(&first).unwrap();
        fs::write(&first, b"what a tenant wrote").unwrap();
        // Held open, as by a container: the number is not used again.
        let _held = File::open(&first).unwrap();
        let again = usage_file(&container, &image).unwrap();
        let after = fs::metadata(&again).unwrap();
        assert_eq!(first, again);
        assert_ne!(before.ino(), after.ino());
        assert_eq!((after.len(), after.mode() & 0o777), (usage::FILE_LEN as u64, 0o666));
        assert_eq!(fs::metadata(&container).unwrap().mode() & 0o777, 0o700, "of no use to users of the node");
        let bytes = fs::read(&again).unwrap();
        let header = usage::read_header(after.len(), &bytes, &bytes[usage::PROC_NUM_AT..]).unwrap();
        assert_eq!((header.proc_num, header.devices.len()), (0, 0));
        assert_eq!(fs::read_dir(&container).unwrap().count(), 1, "nothing temporary is left");
    }

    #[test]
    fn a_usage_file_that_its_tenant_made_longer_is_cut_back_and_keeps_what_is_in_it() {
        let root = tempfile::tempdir().unwrap();
        let container = root.path().join("p_c");
        assert_eq!(oversize(&container).unwrap(), None, "gone");
        cut_usage_file(&container).unwrap();
        let image = usage::image(&usage::UsageSpec { devices: Devices::new(), priority: 1 });
        let path = usage_file(&container, &image).unwrap();
        let before = fs::read(&path).unwrap();
        assert_eq!(oversize(&container).unwrap(), None, "as it was made");
        let tenant = OpenOptions::new().write(true).open(&path).unwrap();
        let far = usage::FILE_LEN as u64 + (1 << 20);
        tenant.write_all_at(b"x", far).unwrap();
        let over = oversize(&container).unwrap().unwrap();
        assert_eq!((over.length, over.attributes), (far + 1, false));
        assert!(over.taken < far, "{over}");
        cut_usage_file(&container).unwrap();
        assert_eq!((fs::read(&path).unwrap(), oversize(&container).unwrap()), (before.clone(), None));
        // Blocks beyond the end of a file that is as long as ever, and of one that is shorter.
        for length in [before.len(), 7] {
            tenant.set_len(length as u64).unwrap();
            assert_eq!(oversize(&container).unwrap(), None, "no more than it was given");
            fallocate(&tenant, FallocateFlags::FALLOC_FL_KEEP_SIZE, 0, 64 << 20).unwrap();
            assert!(oversize(&container).unwrap().is_some_and(|over| over.taken >= 64 << 20));
            cut_usage_file(&container).unwrap();
            assert_eq!(oversize(&container).unwrap(), None);
            assert_eq!(fs::read(&path).unwrap(), before[..length]);
        }
        fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink("/dev/null", &path).unwrap();
        assert_eq!(cut_usage_file(&container).unwrap_err().code(), "FileFailed", "nothing else is cut");
    }

    /// XFS keeps as many as there is room for; a tmpfs keeps some, and ext4 a block of them.
    #[test]
    fn attributes_are_taken_away_and_too_many_are_told_of() {
        let memory = Path::new("/dev/shm");
        for root in [tempfile::tempdir(), tempfile::tempdir_in(memory)].map(Result::unwrap) {
            let container = root.path().join("p_c");
            let image = usage::image(&usage::UsageSpec { devices: Devices::new(), priority: 1 });
            let path = usage_file(&container, &image).unwrap();
            let set = |name: &str| setxattr(&path, format!("user.{name}"), b"much", XattrFlags::empty());
            match set("x") {
                Err(Errno::NOTSUP) => continue,
                result => result.unwrap(),
            }
            set("y").unwrap();
            let over = oversize(&container).unwrap().unwrap();
            assert!(over.attributes && over.to_string().contains("with extended attributes"), "{over}");
            cut_usage_file(&container).unwrap();
            assert_eq!(oversize(&container).unwrap(), None);
            // More names than the kernel tells of, where the file system keeps so many.
            let kept = (0..400).take_while(|number| set(&format!("{number:0200}")).is_ok()).count();
            let cut = cut_usage_file(&container);
            if kept == 400 {
                assert_eq!(cut.unwrap_err().code(), "UsageFileNotCut");
            } else {
                cut.unwrap();
            }
            assert_eq!(oversize(&container).unwrap().is_some(), kept == 400);
        }
    }

    #[test]
    fn a_file_in_the_way_of_a_folder_is_an_error() {
        let root = tempfile::tempdir().unwrap();
        fs::write(root.path().join("x"), "").unwrap();
        assert_eq!(folder(&root.path().join("x/y")).unwrap_err().code(), "FileFailed");
        std::os::unix::fs::symlink(root.path(), root.path().join("link")).unwrap();
        assert_eq!(folder(&root.path().join("link")).unwrap_err().code(), "FileFailed");
    }

    #[test]
    fn replacing_keeps_mode_and_leaves_nothing_behind() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("page");
        replace(&path, b"one", 0o644).unwrap();
        replace(&path, b"two", 0o644).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"two");
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o644);
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 1);
        remove(&path).unwrap();
        remove(&path).unwrap();
    }

    #[test]
    fn only_plain_names_stand_in_paths() {
        for (name, want) in [
            ("9c1f6a52-6d2e-4f3e-8f1a-0d9b8a7c6e5d", true),
            ("main", true),
            ("a.b", true),
            ("", false),
            ("..", false),
            ("a/b", false),
            ("a_b", false),
            ("a\0b", false),
        ] {
            assert_eq!(is_plain(name), want, "{name:?}");
        }
    }
}
