//! Handles that cross processes: a POSIX descriptor (a sealed memory file that says what it stands for) or the 64 bytes of a fabric
//! handle. The memory stays the exporter's: what is opened with them is not given a second time.
#![expect(unsafe_code, reason = "makes and reads descriptors")]

use std::fs::File;
use std::os::fd::{FromRawFd as _, IntoRawFd as _};
use std::os::unix::fs::FileExt as _;

use crate::abi::{Bytes64, Code, Opaque};

/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR` and `_FABRIC`.
const POSIX: u32 = 1;
const FABRIC: u32 = 8;

const MAGIC: u64 = u64::from_le_bytes(*b"FAKECUDA");

/// What a handle stands for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shared {
    /// Ordinal of the card; none for the host.
    pub(crate) card: Option<usize>,
    pub(crate) size: u64,
}

/// Numbers in 64 bytes.
pub(crate) fn words(values: &[u64]) -> Bytes64 {
    let mut bytes = [0; 64];
    for (place, value) in bytes.chunks_mut(8).zip(values) {
        place.copy_from_slice(&value.to_le_bytes());
    }
    Bytes64 { bytes }
}

/// The first numbers of 64 bytes.
pub(crate) fn read_words<const N: usize>(data: &Bytes64) -> [u64; N] {
    let mut values = [0; N];
    for (value, place) in values.iter_mut().zip(data.bytes.as_chunks::<8>().0) {
        *value = u64::from_le_bytes(*place);
    }
    values
}

/// Writes a handle of that kind to `out`.
pub(crate) fn export(out: Opaque, kind: u32, card: Option<usize>, size: u64) -> Result<(), Code> {
    let content = words(&[MAGIC, card.map_or(u64::MAX, |c| c as u64), size]);
    match kind {
        POSIX => {
            // SAFETY: a name that ends with a null byte.
            let descriptor = unsafe { libc::memfd_create(c"fake-cuda".as_ptr(), libc::MFD_CLOEXEC) };
            if descriptor < 0 {
                return Err(Code::OPERATING_SYSTEM);
            }
            // SAFETY: the descriptor was just opened, and nobody else owns it.
            let file = unsafe { File::from_raw_fd(descriptor) };
            file.write_all_at(&content.bytes, 0).map_err(|_| Code::OPERATING_SYSTEM)?;
            out.cast().put(file.into_raw_fd())
        }
        FABRIC => out.cast().put(content),
        _ => Err(Code::NOT_SUPPORTED),
    }
}

/// Reads a handle of that kind; a descriptor comes as the pointer's value.
pub(crate) fn import(handle: Opaque, kind: u32) -> Result<Shared, Code> {
    let content = match kind {
        POSIX => {
            let descriptor = i32::try_from(handle.address()).map_err(|_| Code::INVALID_VALUE)?;
            // SAFETY: the program's descriptor; it is given back untouched below.
            let file = unsafe { File::from_raw_fd(descriptor) };
            let mut bytes = [0; 64];
            let read = file.read_exact_at(&mut bytes, 0);
            let _ = file.into_raw_fd();
            read.map_err(|_| Code::INVALID_VALUE)?;
            Bytes64 { bytes }
        }
        FABRIC => handle.cast::<Bytes64>().get()?,
        _ => return Err(Code::NOT_SUPPORTED),
    };
    let [magic, card, size] = read_words(&content);
    if magic != MAGIC {
        return Err(Code::INVALID_VALUE);
    }
    Ok(Shared { card: usize::try_from(card).ok().filter(|_| card != u64::MAX), size })
}
