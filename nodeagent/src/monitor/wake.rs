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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::monitor::page::Page;
    use mullion_region::page::{Enforcement, PageDevice, PageSpec};
    use mullion_region::{CardUuid, CorePercent, Devices};
    use std::num::{NonZeroU32, NonZeroU64};
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::sync::mpsc;

    /// Who waits on the page as the library does, with a read-only mapping of his own, is woken by a scale that lets him
    /// go sooner.
    #[test]
    fn a_waiter_is_woken_by_a_smaller_scale() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("page");
        let device = PageDevice::new(CardUuid::new("GPU-0").unwrap(), NonZeroU64::MIN, CorePercent::WHOLE);
        let spec = PageSpec {
            sequence: 0,
            heartbeat_ns: 0,
            futex: 0,
            enforcement: Enforcement::Required,
            grant: 1,
            devices: Devices::from_slice(&[device]).unwrap(),
        };
        std::fs::write(&path, page::encode(&spec)).unwrap();
        let file = File::open(&path).unwrap();
        let (woken, is_woken) = mpsc::channel();
        let waiter = std::thread::spawn(move || {
            // SAFETY: a fresh read-only mapping of a file that nobody cuts.
            let mapped = unsafe { mmap(None, LENGTH, ProtFlags::PROT_READ, MapFlags::MAP_SHARED, &file, 0) };
            let mapping = Mapping(mapped.unwrap());
            let word = mapping.0.as_ptr().wrapping_byte_add(page::FUTEX_AT).cast::<u32>();
            // SAFETY: inside the mapping, aligned, and only read by atomics.
            let value = unsafe { AtomicU32::from_ptr(word) };
            while value.load(Ordering::SeqCst) == 0 {
                let no_end = std::ptr::null::<libc::timespec>();
                // SAFETY: the word lives as long as the mapping.
                unsafe { libc::syscall(libc::SYS_futex, word, libc::FUTEX_WAIT, 0, no_end) };
            }
            woken.send(()).unwrap();
        });
        let scale = |scale: u32| [(0, NonZeroU32::new(scale).unwrap())];
        let mut page = Page::open(&path).unwrap();
        page.steer(&scale(1 << 17)).unwrap();
        assert_eq!(page.spec.futex, 0, "a larger scale lets nobody go");
        assert!(is_woken.try_recv().is_err());
        let mut page = Page::open(&path).unwrap();
        page.steer(&scale(1 << 16)).unwrap();
        is_woken.recv_timeout(std::time::Duration::from_secs(20)).unwrap();
        waiter.join().unwrap();
        let now = Page::open(&path).unwrap().spec;
        assert_eq!((now.futex, now.sequence, now.heartbeat_ns), (1, 4, 0));
        assert_eq!(now.devices.iter().next().unwrap().scale.get(), 1 << 16);
    }
}
