//! The operating system: raw system calls, and the few functions taken from the C library.
//!
//! System calls are made directly, so that `errno` of the program is never touched and no symbol version is needed.
//! Taken from the C library: `clock_gettime` (`GLIBC_2.17`, through the vDSO), `getauxval` (`GLIBC_2.16`), `getenv`,
//! `environ` and `dl_iterate_phdr` (`GLIBC_2.2.5`), and `memcpy` and its like, which the compiler calls.

#![expect(unsafe_code, reason = "system calls and functions of the C library")]
#![expect(
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    reason = "arguments of system calls, on 64-bit machines only"
)]

mod call;
pub(crate) mod clock;

use core::ffi::{CStr, c_char, c_int, c_ulong, c_void};
use core::sync::atomic::{AtomicUsize, Ordering::Acquire, Ordering::Release};

use call::{number, syscall};

/// A failed system call: the positive error number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Errno(pub(crate) i32);

impl Errno {
    /// No such file.
    pub(crate) const NOENT: Self = Self(2);
    /// Interrupted by a signal.
    pub(crate) const INTR: Self = Self(4);
    /// Try again: a lock is held, or a futex word has changed.
    pub(crate) const AGAIN: Self = Self(11);
    /// Permission denied; a held lock on some file systems.
    pub(crate) const ACCES: Self = Self(13);
    /// It is there already.
    pub(crate) const EXIST: Self = Self(17);
    /// Too many open files.
    pub(crate) const MFILE: Self = Self(24);
    /// The file would be too large.
    pub(crate) const FBIG: Self = Self(27);
    /// No space on the device.
    pub(crate) const NOSPC: Self = Self(28);
    /// The name is too long.
    pub(crate) const NAMETOOLONG: Self = Self(36);
    /// The disk quota is used up.
    pub(crate) const DQUOT: Self = Self(122);
}

const _: () = assert!(size_of::<usize>() == 8);

fn check(returned: isize) -> Result<usize, Errno> {
    usize::try_from(returned).map_err(|_| Errno(i32::try_from(-returned).unwrap_or(i32::MAX)))
}

/// An open file. It is closed by [`Fd::close`] only: descriptors of a preloaded library live as long as they are needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fd(pub(crate) c_int);

pub(crate) const O_RDONLY: c_int = 0;
pub(crate) const O_RDWR: c_int = 2;
pub(crate) const O_CREAT: c_int = 0o100;
/// With [`O_CREAT`]: only a file that is made by the call.
pub(crate) const O_EXCL: c_int = 0o200;
#[cfg(target_arch = "x86_64")]
pub(crate) const O_NOFOLLOW: c_int = 0o400_000;
#[cfg(target_arch = "aarch64")]
pub(crate) const O_NOFOLLOW: c_int = 0o100_000;
pub(crate) const O_CLOEXEC: c_int = 0o2_000_000;
const AT_FDCWD: isize = -100;

/// The program's own, whether it has them open or not: what it, the C library or this library says is written to these.
const STANDARD: c_int = 3;

/// Opens `path`; `mode` counts with [`O_CREAT`] and is narrowed by the program's umask. The descriptor is none of the
/// standard ones, also where the program has closed those: else lines meant for stderr would be written into the file.
pub(crate) fn open(path: &CStr, flags: c_int, mode: u32) -> Result<Fd, Errno> {
    // SAFETY: `path` is a NUL-terminated string that outlives the call.
    let fd = unsafe {
        syscall(number::OPENAT, [AT_FDCWD, path.as_ptr() as isize, flags as isize, mode as isize, 0, 0])
    };
    let fd = check(fd).map(|fd| Fd(c_int::try_from(fd).unwrap_or(-1)))?;
    if fd.0 >= STANDARD {
        return Ok(fd);
    }
    let moved = fd.duplicate_above(STANDARD).map_err(|_| Errno::MFILE);
    fd.close();
    moved
}

/// A write beyond the program's limit on the size of files (`ulimit -f`) raises a signal that ends it: here it is an error.
fn within_file_limit(end: u64) -> Result<(), Errno> {
    const RLIMIT_FSIZE: isize = 1;
    let mut limits = [u64::MAX; 2];
    // SAFETY: the kernel fills in the limit in force and the one up to which it may be raised.
    unsafe { syscall(number::GETRLIMIT, [RLIMIT_FSIZE, (&raw mut limits) as isize, 0, 0, 0, 0]) };
    let [in_force, _] = limits;
    if end > in_force { Err(Errno::FBIG) } else { Ok(()) }
}

/// Writes the program's folder into `into`, with a slash behind it; the length, 0 where it has no path that can be told.
pub(crate) fn folder(into: &mut [u8]) -> usize {
    let (at, len) = (into.as_mut_ptr() as isize, into.len().cast_signed());
    // SAFETY: the kernel writes at most `len` bytes into `into`.
    let told = check(unsafe { syscall(number::GETCWD, [at, len, 0, 0, 0, 0]) }).unwrap_or(0);
    // The NUL is counted. Outside of the program's root it is `(unreachable)/...`.
    if !into.starts_with(b"/") {
        return 0;
    }
    match into.get_mut(told.saturating_sub(2)..told) {
        Some([b'/', _]) => told - 1,
        Some([_, end]) => {
            *end = b'/';
            told
        }
        _ => 0,
    }
}

/// Removes the name `path` of a file.
pub(crate) fn remove(path: &CStr) -> Result<(), Errno> {
    // SAFETY: `path` is a NUL-terminated string that outlives the call.
    check(unsafe { syscall(number::UNLINKAT, [AT_FDCWD, path.as_ptr() as isize, 0, 0, 0, 0]) })?;
    Ok(())
}

impl Fd {
    pub(crate) fn close(self) {
        // SAFETY: the descriptor is ours and no longer used.
        unsafe { syscall(number::CLOSE, [self.0 as isize, 0, 0, 0, 0, 0]) };
    }

    /// Reads at `offset` into `into`; the number of bytes, 0 at the end of the file.
    pub(crate) fn read_at(self, into: &mut [u8], offset: u64) -> Result<usize, Errno> {
        let (at, len) = (into.as_mut_ptr() as isize, into.len().cast_signed());
        // SAFETY: the kernel writes at most `len` bytes into `into`.
        check(unsafe {
            syscall(number::PREAD64, [self.0 as isize, at, len, offset.cast_signed() as isize, 0, 0])
        })
    }

    /// Writes `from` at `offset`; the number of bytes written.
    pub(crate) fn write_at(self, from: &[u8], offset: u64) -> Result<usize, Errno> {
        within_file_limit(offset + from.len() as u64)?;
        let (at, len) = (from.as_ptr() as isize, from.len().cast_signed());
        // SAFETY: the kernel reads `len` bytes of `from`.
        check(unsafe {
            syscall(number::PWRITE64, [self.0 as isize, at, len, offset.cast_signed() as isize, 0, 0])
        })
    }

    /// Appends `from` (for stderr).
    pub(crate) fn write(self, from: &[u8]) -> Result<usize, Errno> {
        let (at, len) = (from.as_ptr() as isize, from.len().cast_signed());
        // SAFETY: the kernel reads `len` bytes of `from`.
        check(unsafe { syscall(number::WRITE, [self.0 as isize, at, len, 0, 0, 0]) })
    }

    pub(crate) fn truncate(self, len: u64) -> Result<(), Errno> {
        within_file_limit(len)?;
        // SAFETY: no memory is passed.
        check(unsafe {
            syscall(number::FTRUNCATE, [self.0 as isize, len.cast_signed() as isize, 0, 0, 0, 0])
        })?;
        Ok(())
    }

    /// Gives the first `len` bytes real blocks, so that a store into a mapping cannot fail for want of space.
    pub(crate) fn allocate(self, len: u64) -> Result<(), Errno> {
        within_file_limit(len)?;
        // SAFETY: no memory is passed.
        check(unsafe {
            syscall(number::FALLOCATE, [self.0 as isize, 0, 0, len.cast_signed() as isize, 0, 0])
        })?;
        Ok(())
    }

    pub(crate) fn set_mode(self, mode: u32) -> Result<(), Errno> {
        // SAFETY: no memory is passed.
        check(unsafe { syscall(number::FCHMOD, [self.0 as isize, mode as isize, 0, 0, 0, 0]) })?;
        Ok(())
    }

    pub(crate) fn status(self) -> Result<Status, Errno> {
        let mut status = call::Stat::default();
        // SAFETY: the kernel fills in the structure, whose layout is this architecture's.
        check(unsafe { syscall(number::FSTAT, [self.0 as isize, (&raw mut status) as isize, 0, 0, 0, 0]) })?;
        Ok(Status {
            device: status.device,
            inode: status.inode,
            mode: status.mode,
            len: u64::try_from(status.len).unwrap_or(0),
        })
    }

    /// One `fcntl` on one byte: [`F_OFD_SETLK`] or [`F_OFD_GETLK`]. The record as the kernel left it.
    pub(crate) fn lock(self, command: c_int, kind: i16, at: u64) -> Result<Record, Errno> {
        let mut record = Record { kind, whence: 0, start: at.cast_signed(), len: 1, pid: 0 };
        // SAFETY: the kernel reads, and for a query fills in, the record.
        check(unsafe {
            syscall(number::FCNTL, [self.0 as isize, command as isize, (&raw mut record) as isize, 0, 0, 0])
        })?;
        Ok(record)
    }

    /// A copy of the descriptor at or above `lowest`, closed by exec.
    pub(crate) fn duplicate_above(self, lowest: c_int) -> Result<Self, Errno> {
        const F_DUPFD_CLOEXEC: isize = 1030;
        // SAFETY: no memory is passed.
        let fd = check(unsafe {
            syscall(number::FCNTL, [self.0 as isize, F_DUPFD_CLOEXEC, lowest as isize, 0, 0, 0])
        })?;
        Ok(Self(c_int::try_from(fd).unwrap_or(-1)))
    }

    /// Maps `len` bytes from `offset`, shared.
    pub(crate) fn map(self, len: usize, offset: u64, writable: bool) -> Result<*mut u8, Errno> {
        let protection = PROT_READ | if writable { PROT_WRITE } else { 0 };
        let arguments =
            [0, len.cast_signed(), protection, MAP_SHARED, self.0 as isize, offset.cast_signed() as isize];
        // SAFETY: a new mapping at an address of the kernel's choice overlaps nothing.
        check(unsafe { syscall(number::MMAP, arguments) }).map(core::ptr::with_exposed_provenance_mut)
    }
}

/// What `fstat` says, as far as it is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Status {
    pub(crate) device: u64,
    pub(crate) inode: u64,
    pub(crate) mode: u32,
    pub(crate) len: u64,
}

impl Status {
    /// A regular file, not a directory, pipe or device.
    pub(crate) const fn is_file(&self) -> bool {
        self.mode & 0o170_000 == 0o100_000
    }
}

/// `struct flock` of 64-bit Linux.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Record {
    pub(crate) kind: i16,
    pub(crate) whence: i16,
    pub(crate) start: i64,
    pub(crate) len: i64,
    pub(crate) pid: i32,
}

pub(crate) const F_OFD_GETLK: c_int = 36;
pub(crate) const F_OFD_SETLK: c_int = 37;
pub(crate) const F_WRLCK: i16 = 1;
pub(crate) const F_UNLCK: i16 = 2;

const PROT_READ: isize = 1;
const PROT_WRITE: isize = 2;
const MAP_SHARED: isize = 1;
const MAP_PRIVATE: isize = 2;
const MAP_ANONYMOUS: isize = 0x20;
const MAP_NORESERVE: isize = 0x4000;

/// Private memory, zeroed, given by the kernel page by page as it is touched.
pub(crate) fn map_private(len: usize) -> Result<*mut u8, Errno> {
    let flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    // SAFETY: a new mapping at an address of the kernel's choice overlaps nothing.
    check(unsafe { syscall(number::MMAP, [0, len.cast_signed(), PROT_READ | PROT_WRITE, flags, -1, 0]) })
        .map(core::ptr::with_exposed_provenance_mut)
}

/// # Safety
/// `at..at + len` is a mapping of ours that nothing uses any more.
pub(crate) unsafe fn unmap(at: *mut u8, len: usize) {
    // SAFETY: as the caller says.
    unsafe { syscall(number::MUNMAP, [at as isize, len.cast_signed(), 0, 0, 0, 0]) };
}

pub(crate) const MADV_DONTFORK: c_int = 10;
pub(crate) const MADV_WIPEONFORK: c_int = 18;

/// # Safety
/// `at..at + len` is a mapping of ours, and `advice` one of the two above, which take nothing from this process.
pub(crate) unsafe fn advise(at: *mut u8, len: usize, advice: c_int) -> Result<(), Errno> {
    // SAFETY: as the caller says.
    check(unsafe { syscall(number::MADVISE, [at as isize, len.cast_signed(), advice as isize, 0, 0, 0]) })?;
    Ok(())
}

/// Sleeps until `word`, in memory shared between processes, is woken, `timeout_ns` are over, or at once when it is not
/// `expected`.
pub(crate) fn futex_wait(word: *const u32, expected: u32, timeout_ns: u64) -> Result<(), Errno> {
    const FUTEX_WAIT: isize = 0;
    let timeout = clock::Timespec::from_ns(timeout_ns);
    let arguments = [word as isize, FUTEX_WAIT, expected as isize, (&raw const timeout) as isize, 0, 0];
    // SAFETY: the kernel reads the word, with a fault answered as an error, and the time.
    check(unsafe { syscall(number::FUTEX, arguments) })?;
    Ok(())
}

/// Wakes all that wait for `word`.
pub(crate) fn futex_wake(word: *const u32) {
    const FUTEX_WAKE: isize = 1;
    // SAFETY: the kernel only uses the address.
    unsafe { syscall(number::FUTEX, [word as isize, FUTEX_WAKE, i32::MAX as isize, 0, 0, 0]) };
}

/// The process, as this pid namespace counts.
pub(crate) fn process_id() -> i32 {
    // SAFETY: no argument.
    i32::try_from(unsafe { syscall(number::GETPID, [0; 6]) }).unwrap_or(0)
}

pub(crate) fn sleep_ns(ns: u64) {
    let time = clock::Timespec::from_ns(ns);
    // SAFETY: the kernel reads the time; what is left of it is not asked for.
    unsafe { syscall(number::NANOSLEEP, [(&raw const time) as isize, 0, 0, 0, 0, 0]) };
}

/// Ends the process with SIGABRT's exit, without running anything of the program.
pub(crate) fn abort() -> ! {
    const SIGABRT: isize = 6;
    // SAFETY: a signal to this very process.
    unsafe { syscall(number::KILL, [process_id() as isize, SIGABRT, 0, 0, 0, 0]) };
    loop {
        // SAFETY: ends all threads.
        unsafe { syscall(number::EXIT_GROUP, [134, 0, 0, 0, 0, 0]) };
    }
}

/// Says one line on stderr, in one write; `parts` are put together, a newline is added. Cut at 512 bytes.
pub(crate) fn complain(parts: &[&str]) {
    let mut line = [0_u8; 512];
    let mut len = 0;
    for byte in ["mullion: "].iter().chain(parts).flat_map(|part| part.bytes()) {
        if let Some(slot) = line.get_mut(len)
            && len + 1 < 512
        {
            *slot = byte;
            len += 1;
        }
    }
    if let Some(slot) = line.get_mut(len) {
        *slot = b'\n';
        len += 1;
    }
    let _ = Fd(2).write(line.get(..len).unwrap_or(&[]));
}

unsafe extern "C" {
    fn getenv(name: *const c_char) -> *const c_char;
    static environ: *const *const c_char;
}

/// An environment variable, as the program left it. It is copied or read at once: the program may change it later.
pub(crate) fn environment(name: &CStr) -> Option<&'static CStr> {
    // SAFETY: `name` is NUL-terminated.
    let value = unsafe { getenv(name.as_ptr()) };
    // SAFETY: a value that is not null is a NUL-terminated string, which stays until the program changes its environment.
    (!value.is_null()).then(|| unsafe { CStr::from_ptr(value) })
}

/// All of the environment, `NAME=value` each.
pub(crate) fn variables() -> impl Iterator<Item = &'static CStr> {
    // SAFETY: the C library's variable, which it and the program may change at any time.
    let mut next = unsafe { (&raw const environ).read_volatile() };
    core::iter::from_fn(move || {
        if next.is_null() {
            return None;
        }
        // SAFETY: a place of the list; the last one is null, and none behind it is looked at.
        let variable = unsafe { next.read_volatile() };
        if variable.is_null() {
            next = core::ptr::null();
            return None;
        }
        // SAFETY: within the list, of which this was not the last place.
        next = unsafe { next.add(1) };
        // SAFETY: a NUL-terminated string, which stays until the program changes its environment.
        Some(unsafe { CStr::from_ptr(variable) })
    })
}

/// A loaded image, as `dl_iterate_phdr` tells of it (`struct dl_phdr_info`, whose newer fields are not used).
#[repr(C)]
#[derive(Debug)]
pub(crate) struct Loaded {
    pub(crate) base: usize,
    pub(crate) name: *const c_char,
    pub(crate) headers: *const c_void,
    pub(crate) header_count: u16,
}

type Callback = unsafe extern "C" fn(*const Loaded, usize, *mut c_void) -> c_int;
type Iterate = unsafe extern "C" fn(Callback, *mut c_void) -> c_int;

unsafe extern "C" {
    fn dl_iterate_phdr(callback: Callback, data: *mut c_void) -> c_int;
    fn getauxval(kind: c_ulong) -> c_ulong;
}

/// What the kernel told the program at its start; 0 when it did not.
pub(crate) fn auxiliary(kind: c_ulong) -> usize {
    // SAFETY: a look-up in a table that does not change.
    usize::try_from(unsafe { getauxval(kind) }).unwrap_or(0)
}

/// The C library's own function, not that of a sanitizer that stands in for it and is not ready when the first look-ups
/// are made.
fn iterate() -> Iterate {
    static ITERATE: AtomicUsize = AtomicUsize::new(0);
    let known = match ITERATE.load(Acquire) {
        0 => {
            let found = crate::driver::elf::of_the_c_library(b"dl_iterate_phdr")
                .unwrap_or_else(|| (dl_iterate_phdr as Iterate as *const c_void).expose_provenance());
            ITERATE.store(found, Release);
            found
        }
        known => known,
    };
    // SAFETY: the address of a function of this name and type.
    unsafe { core::mem::transmute::<usize, Iterate>(known) }
}

/// Shows all loaded images to `see`, in the order of loading, until it returns true. The loader's lock is held.
pub(crate) fn each_image<F: FnMut(&Loaded) -> bool>(mut see: F) {
    unsafe extern "C" fn show<F: FnMut(&Loaded) -> bool>(
        image: *const Loaded,
        _: usize,
        see: *mut c_void,
    ) -> c_int {
        // SAFETY: this is the closure passed below, which outlives the call.
        let see = unsafe { &mut *see.cast::<F>() };
        // SAFETY: the loader passes a valid structure, valid for this call.
        let image = unsafe { &*image };
        c_int::from(see(image))
    }
    let iterate = iterate();
    // SAFETY: the callback gets the closure that it expects.
    unsafe { iterate(show::<F>, (&raw mut see).cast()) };
}
