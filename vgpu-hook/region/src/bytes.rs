//! Reading and writing fields at fixed offsets without a panicking path.

/// The `N` bytes at `offset`, or `None` where `buffer` ends before them.
pub(crate) fn array<const N: usize>(buffer: &[u8], offset: usize) -> Option<[u8; N]> {
    buffer.get(offset..)?.first_chunk::<N>().copied()
}

pub(crate) fn u32_at(buffer: &[u8], offset: usize) -> Option<u32> {
    array(buffer, offset).map(u32::from_le_bytes)
}

pub(crate) fn i32_at(buffer: &[u8], offset: usize) -> Option<i32> {
    array(buffer, offset).map(i32::from_le_bytes)
}

pub(crate) fn u64_at(buffer: &[u8], offset: usize) -> Option<u64> {
    array(buffer, offset).map(u64::from_le_bytes)
}

/// Copies `field` to `offset`. Every offset is a constant that a const assertion has checked against the buffer's
/// length, so the copy always happens.
pub(crate) fn put(buffer: &mut [u8], offset: usize, field: &[u8]) {
    if let Some(target) = buffer.get_mut(offset..).and_then(|rest| rest.get_mut(..field.len())) {
        target.copy_from_slice(field);
    }
}
