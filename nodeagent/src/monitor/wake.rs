//! Wakes who waits on a control page's futex word: a futex of a file is named by an address in a mapping of it.

#![expect(
    unsafe_code,
    reason = "a mapping of the agent's own page, and a system call that libc does not wrap"
)]

use std::fs::File;
use std::io;
use std::num::NonZeroUsize;
use std::ptr::NonNull;

use mullion_region::page;
use nix::libc::{self, c_void};
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};

const LENGTH: NonZeroUsize = NonZeroUsize::new(page::LEN).unwrap();

struct Mapping(NonNull<c_void>);

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours alone, of this length, and nothing refers to it any more.
        let _ = unsafe { munmap(self.0, page::LEN) };
    }
}

/// Wakes all waiters of the page in `file`, which only the agent can cut: a page that others may cut must not be
/// mapped. Without `FUTEX_PRIVATE_FLAG`, since the waiters are other processes.
///
/// # Errors
/// The system's word.
pub fn all(file: &File) -> io::Result<()> {
    // SAFETY: a fresh mapping that overlaps nothing; it is only named to the kernel and never looked into.
    let mapped = unsafe { mmap(None, LENGTH, ProtFlags::PROT_READ, MapFlags::MAP_SHARED, file, 0) };
    let mapping = Mapping(mapped?);
    let word = mapping.0.as_ptr().wrapping_byte_add(page::FUTEX_AT);
    // SAFETY: the call reads the word's address and wakes; the mapping lives until after it.
    let woken = unsafe { libc::syscall(libc::SYS_futex, word, libc::FUTEX_WAKE, i32::MAX) };
    if woken < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
