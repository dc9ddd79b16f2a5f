//! The system call instruction and the numbers, for x86-64 and aarch64.

#![expect(clippy::many_single_char_names, reason = "the six arguments of a system call")]

use core::arch::asm;

/// Makes a system call with up to six arguments; what the kernel returns, a negative error number included.
///
/// # Safety
/// As the system call asks: pointers among `arguments` are valid for what it reads and writes.
#[cfg(target_arch = "x86_64")]
#[inline]
pub(super) unsafe fn syscall(number: isize, arguments: [isize; 6]) -> isize {
    let [a, b, c, d, e, f] = arguments;
    let returned: isize;
    // SAFETY: the kernel keeps all registers but rax, rcx and r11; the stack is not touched.
    unsafe {
        asm!("syscall", inlateout("rax") number => returned, in("rdi") a, in("rsi") b, in("rdx") c, in("r10") d,
            in("r8") e, in("r9") f, lateout("rcx") _, lateout("r11") _, options(nostack));
    }
    returned
}

/// Makes a system call with up to six arguments; what the kernel returns, a negative error number included.
///
/// # Safety
/// As the system call asks: pointers among `arguments` are valid for what it reads and writes.
#[cfg(target_arch = "aarch64")]
#[inline]
pub(super) unsafe fn syscall(number: isize, arguments: [isize; 6]) -> isize {
    let [a, b, c, d, e, f] = arguments;
    let returned: isize;
    // SAFETY: the kernel keeps all registers but x0; the stack is not touched.
    unsafe {
        asm!("svc 0", in("x8") number, inlateout("x0") a => returned, in("x1") b, in("x2") c, in("x3") d, in("x4") e,
            in("x5") f, options(nostack));
    }
    returned
}

/// `struct stat` as far as it is used.
#[cfg(target_arch = "x86_64")]
#[repr(C)]
#[derive(Default)]
pub(super) struct Stat {
    pub(super) device: u64,
    pub(super) inode: u64,
    links: u64,
    pub(super) mode: u32,
    ids: [u32; 3],
    special: u64,
    pub(super) len: i64,
    rest: [u64; 11],
}

/// `struct stat` as far as it is used.
#[cfg(target_arch = "aarch64")]
#[repr(C)]
#[derive(Default)]
pub(super) struct Stat {
    pub(super) device: u64,
    pub(super) inode: u64,
    pub(super) mode: u32,
    ids: [u32; 3],
    special: [u64; 2],
    pub(super) len: i64,
    rest: [u64; 9],
}

#[cfg(target_arch = "x86_64")]
const _: () = assert!(size_of::<Stat>() == 144);
#[cfg(target_arch = "aarch64")]
const _: () = assert!(size_of::<Stat>() == 128);

/// Numbers of `asm/unistd_64.h`.
#[cfg(target_arch = "x86_64")]
pub(super) mod number {
    pub(in crate::sys) const WRITE: isize = 1;
    pub(in crate::sys) const CLOSE: isize = 3;
    pub(in crate::sys) const FSTAT: isize = 5;
    pub(in crate::sys) const MMAP: isize = 9;
    pub(in crate::sys) const MUNMAP: isize = 11;
    pub(in crate::sys) const PREAD64: isize = 17;
    pub(in crate::sys) const PWRITE64: isize = 18;
    pub(in crate::sys) const MADVISE: isize = 28;
    pub(in crate::sys) const NANOSLEEP: isize = 35;
    pub(in crate::sys) const GETPID: isize = 39;
    pub(in crate::sys) const KILL: isize = 62;
    pub(in crate::sys) const FCNTL: isize = 72;
    pub(in crate::sys) const FTRUNCATE: isize = 77;
    pub(in crate::sys) const GETCWD: isize = 79;
    pub(in crate::sys) const FCHMOD: isize = 91;
    pub(in crate::sys) const GETRLIMIT: isize = 97;
    pub(in crate::sys) const FUTEX: isize = 202;
    pub(in crate::sys) const CLOCK_GETTIME: isize = 228;
    pub(in crate::sys) const EXIT_GROUP: isize = 231;
    pub(in crate::sys) const OPENAT: isize = 257;
    pub(in crate::sys) const UNLINKAT: isize = 263;
    pub(in crate::sys) const FALLOCATE: isize = 285;
}

/// Numbers of `asm-generic/unistd.h`.
#[cfg(target_arch = "aarch64")]
pub(super) mod number {
    pub(in crate::sys) const GETCWD: isize = 17;
    pub(in crate::sys) const FCNTL: isize = 25;
    pub(in crate::sys) const UNLINKAT: isize = 35;
    pub(in crate::sys) const FTRUNCATE: isize = 46;
    pub(in crate::sys) const FALLOCATE: isize = 47;
    pub(in crate::sys) const FCHMOD: isize = 52;
    pub(in crate::sys) const OPENAT: isize = 56;
    pub(in crate::sys) const CLOSE: isize = 57;
    pub(in crate::sys) const WRITE: isize = 64;
    pub(in crate::sys) const PREAD64: isize = 67;
    pub(in crate::sys) const PWRITE64: isize = 68;
    pub(in crate::sys) const FSTAT: isize = 80;
    pub(in crate::sys) const EXIT_GROUP: isize = 94;
    pub(in crate::sys) const FUTEX: isize = 98;
    pub(in crate::sys) const NANOSLEEP: isize = 101;
    pub(in crate::sys) const CLOCK_GETTIME: isize = 113;
    pub(in crate::sys) const KILL: isize = 129;
    pub(in crate::sys) const GETRLIMIT: isize = 163;
    pub(in crate::sys) const GETPID: isize = 172;
    pub(in crate::sys) const MUNMAP: isize = 215;
    pub(in crate::sys) const MMAP: isize = 222;
    pub(in crate::sys) const MADVISE: isize = 233;
}
