//! CUDA's numbers of the cards in this process, and their places in the two files. `CUDA_VISIBLE_DEVICES` may leave out
//! cards and change their order, so they are matched by uuid.

#![expect(unsafe_code, reason = "asks the driver")]

use mullion_region::page::PageSpec;
use mullion_region::{Devices, MAX_DEVICES};

use super::refusal::Refusal;
use super::uuid;
use crate::cuda::{CUdevice, CUresult, CUuuid};
use crate::driver;

/// The cards that CUDA shows to this process, in its order.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Cards {
    uuids: [CUuuid; MAX_DEVICES],
    count: usize,
}

impl Cards {
    pub(super) fn as_slice(&self) -> &[CUuuid] {
        self.uuids.get(..self.count).unwrap_or_default()
    }
}

/// Asks the driver.
pub(super) fn cards() -> Result<Cards, Refusal> {
    let silent = |call, result| Refusal::DriverSilent { call, result };
    let count = driver::function!(cuDeviceGetCount: unsafe extern "C" fn(*mut i32) -> CUresult)
        .ok_or(silent("cuDeviceGetCount", CUresult::NOT_INITIALIZED))?;
    let mut found = 0;
    // SAFETY: the driver writes one number.
    let result = unsafe { count(&raw mut found) };
    if !result.is_ok() {
        return Err(silent("cuDeviceGetCount", result));
    }
    let found = usize::try_from(found).unwrap_or(0);
    if found > MAX_DEVICES {
        return Err(Refusal::TooManyCards { found });
    }
    // Its successor tells MIG instances apart; drivers before 11.4 lack it.
    let name = driver::function!(cuDeviceGetUuid_v2: unsafe extern "C" fn(*mut CUuuid, CUdevice) -> CUresult)
        .or_else(
            || driver::function!(cuDeviceGetUuid: unsafe extern "C" fn(*mut CUuuid, CUdevice) -> CUresult),
        )
        .ok_or(silent("cuDeviceGetUuid", CUresult::NOT_FOUND))?;
    let mut cards = Cards { count: found, ..Cards::default() };
    for (device, place) in (0..).zip(cards.uuids.iter_mut().take(found)) {
        // SAFETY: the driver writes one uuid.
        let result = unsafe { name(place, device) };
        if !result.is_ok() {
            return Err(silent("cuDeviceGetUuid", result));
        }
    }
    Ok(cards)
}

const NONE: u8 = u8::MAX;

/// Places by CUDA's number, and the other way round.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ordinals {
    places: [u8; MAX_DEVICES],
    devices: [u8; MAX_DEVICES],
}

impl Ordinals {
    pub(super) const fn none() -> Self {
        Self { places: [NONE; MAX_DEVICES], devices: [NONE; MAX_DEVICES] }
    }

    /// Matches the cards with the page's.
    ///
    /// # Errors
    /// [`Refusal::CardUnknown`] for a card without an entry: it would have no limit.
    pub(super) fn of(cards: &Cards, spec: &PageSpec) -> Result<Self, Refusal> {
        let known = |uuid| position(&spec.devices, uuid);
        let mut ordinals = Self::none();
        for ((device, uuid), place) in (0_u8..).zip(cards.as_slice()).zip(ordinals.places.iter_mut()) {
            *place = known(*uuid).ok_or(Refusal::CardUnknown { ordinal: device.into(), uuid: *uuid })?;
            if let Some(back) = ordinals.devices.get_mut(usize::from(*place)) {
                *back = device;
            }
        }
        Ok(ordinals)
    }

    #[inline]
    pub(super) fn index(&self, device: CUdevice) -> Option<u8> {
        let place = *self.places.get(usize::try_from(device).ok()?)?;
        (place != NONE).then_some(place)
    }

    pub(super) fn device(&self, index: u8) -> Option<CUdevice> {
        let device = *self.devices.get(usize::from(index))?;
        (device != NONE).then_some(device.into())
    }
}

fn position(devices: &Devices<mullion_region::page::PageDevice>, wanted: CUuuid) -> Option<u8> {
    let at = devices.iter().position(|device| uuid::parse(device.uuid.as_bytes()) == Some(wanted))?;
    u8::try_from(at).ok()
}

#[cfg(test)]
mod tests {
    extern crate std;

    use core::num::NonZeroU64;

    use mullion_region::page::PageDevice;
    use mullion_region::{CardUuid, CorePercent};

    use super::super::file;
    use super::*;

    fn spec(uuids: &[&str]) -> PageSpec {
        let device =
            |text: &&str| PageDevice::new(CardUuid::new(text).unwrap(), NonZeroU64::MIN, CorePercent::WHOLE);
        let devices: std::vec::Vec<_> = uuids.iter().map(device).collect();
        file::page_of(&Devices::from_slice(&devices).unwrap())
    }

    fn visible(uuids: &[&str]) -> Cards {
        let mut cards = Cards { count: uuids.len(), ..Cards::default() };
        for (place, text) in cards.uuids.iter_mut().zip(uuids) {
            *place = uuid::parse(text.as_bytes()).unwrap();
        }
        cards
    }

    const A: &str = "GPU-00000000-0000-0000-0000-00000000000a";
    const B: &str = "GPU-00000000-0000-0000-0000-00000000000b";
    const C: &str = "MIG-00000000-0000-0000-0000-00000000000c";

    #[test]
    fn cards_are_matched_by_uuid_whatever_their_order() {
        let page = spec(&[A, B, C]);
        for (case, cards, want) in [
            ("as in the page", &[A, B, C][..], &[0, 1, 2][..]),
            ("a subset", &[B], &[1]),
            ("another order", &[C, A], &[2, 0]),
            ("none", &[], &[]),
        ] {
            let ordinals = Ordinals::of(&visible(cards), &page).unwrap();
            for (device, place) in (0..).zip(want) {
                assert_eq!(ordinals.index(device), Some(*place), "{case}");
                assert_eq!(ordinals.device(*place), Some(device), "{case}");
            }
            let beyond = CUdevice::try_from(want.len()).unwrap();
            assert_eq!(ordinals.index(beyond), None, "{case}");
            assert_eq!((ordinals.index(-1), ordinals.index(i32::MAX)), (None, None), "{case}");
        }
    }

    #[test]
    fn a_card_that_the_page_lacks_is_refused() {
        let refusal = Ordinals::of(&visible(&[A, B]), &spec(&[A])).unwrap_err();
        assert!(matches!(refusal, Refusal::CardUnknown { ordinal: 1, .. }), "{refusal}");
    }
}
