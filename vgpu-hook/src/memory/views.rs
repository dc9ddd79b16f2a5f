//! How large and how full a card looks: as large as the slice, as full as the container has made it.

use super::{Pass, counted, here};
use crate::container::{Card, Container};
use crate::cuda::{CUdevice, CUresult};

/// Free and total bytes of a card whose real size is `physical`.
///
/// A limit above the card's size (memory is oversubscribed) does not make the card look larger than it is.
#[inline]
pub(crate) fn view(limit: u64, used: u64, physical: u64) -> (u64, u64) {
    let total = limit.min(physical);
    (total.saturating_sub(used), total)
}

fn size(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

#[inline]
fn limited_view(
    container: &'static Container,
    card: &'static Card,
    physical: usize,
) -> Option<(usize, usize)> {
    let limit = card.limit()?;
    container.reap_now_and_then(card);
    let (free, total) = view(limit, card.used(), physical as u64);
    Some((size(free), size(total)))
}

/// `cuMemGetInfo`. Either result may be left out.
///
/// # Safety
/// As `cuMemGetInfo_v2`.
#[inline]
pub(crate) unsafe fn info(
    real: unsafe extern "C" fn(*mut usize, *mut usize) -> CUresult,
    free: *mut usize,
    total: *mut usize,
) -> CUresult {
    let Ok(now) = here() else {
        // SAFETY: the caller's own arguments.
        return unsafe { real(free, total) };
    };
    let (mut physical_free, mut physical) = (0, 0);
    // SAFETY: two places of ours.
    let result = unsafe { real(&raw mut physical_free, &raw mut physical) };
    if !result.is_ok() {
        return result;
    }
    let seen = limited_view(now.container, now.card, physical).unwrap_or((physical_free, physical));
    if !free.is_null() {
        // SAFETY: the caller's place for a result.
        unsafe { free.write(seen.0) };
    }
    if !total.is_null() {
        // SAFETY: as above.
        unsafe { total.write(seen.1) };
    }
    result
}

/// `cuDeviceTotalMem`.
///
/// # Safety
/// As `cuDeviceTotalMem_v2`.
pub(crate) unsafe fn device_total(
    real: unsafe extern "C" fn(*mut usize, CUdevice) -> CUresult,
    bytes: *mut usize,
    device: CUdevice,
) -> CUresult {
    // SAFETY: the caller's own arguments.
    let result = unsafe { real(bytes, device) };
    if let Ok(container) = counted()
        && result.is_ok()
        && let Some(limit) = container.card(device).and_then(Card::limit)
    {
        // SAFETY: the driver has just written it.
        let physical = unsafe { bytes.read() };
        // SAFETY: the caller's place for a result.
        unsafe { bytes.write(physical.min(size(limit))) };
    }
    result
}

/// `cuMemGetInfo` of CUDA 3.1, in 32 bits.
///
/// # Safety
/// As `cuMemGetInfo`.
pub(crate) unsafe fn info_v1(
    real: unsafe extern "C" fn(*mut u32, *mut u32) -> CUresult,
    free: *mut u32,
    total: *mut u32,
) -> CUresult {
    // SAFETY: the caller's own arguments.
    let result = unsafe { real(free, total) };
    if let Ok(now) = here()
        && result.is_ok()
        && let Some(limit) = now.card.limit()
    {
        let (left, all) = view(limit, now.card.used(), u64::from(u32::MAX));
        for (place, seen) in [(free, left), (total, all)] {
            if !place.is_null() {
                // SAFETY: the caller's place for a result.
                unsafe { place.write(u32::try_from(seen).unwrap_or(u32::MAX)) };
            }
        }
    }
    result
}

/// `cuDeviceTotalMem` of CUDA 3.1, in 32 bits.
///
/// # Safety
/// As `cuDeviceTotalMem`.
pub(crate) unsafe fn device_total_v1(
    real: unsafe extern "C" fn(*mut u32, CUdevice) -> CUresult,
    bytes: *mut u32,
    device: CUdevice,
) -> CUresult {
    // SAFETY: the caller's own arguments.
    let result = unsafe { real(bytes, device) };
    if let Err(Pass::Refused(refused)) = counted() {
        return refused;
    }
    if let Ok(container) = counted()
        && result.is_ok()
        && let Some(limit) = container.card(device).and_then(Card::limit)
    {
        // SAFETY: the driver has just written it.
        let physical = unsafe { bytes.read() };
        let limit = u32::try_from(limit).unwrap_or(u32::MAX);
        // SAFETY: the caller's place for a result.
        unsafe { bytes.write(physical.min(limit)) };
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_card_looks_like_the_slice() {
        for (case, limit, used, physical, want) in [
            ("a slice in use", 4 << 30, 1 << 30, 80 << 30, (3 << 30, 4 << 30)),
            ("unused", 4 << 30, 0, 80 << 30, (4 << 30, 4 << 30)),
            ("full", 4 << 30, 4 << 30, 80 << 30, (0, 4 << 30)),
            ("more than full, after a limit was lowered", 4 << 30, 5 << 30, 80 << 30, (0, 4 << 30)),
            ("an oversubscribed limit", 100 << 30, 1 << 30, 80 << 30, (79 << 30, 80 << 30)),
        ] {
            assert_eq!(view(limit, used, physical), want, "{case}");
        }
    }
}
