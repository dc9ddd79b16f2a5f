//! What is written can be read, and what a tenant wrote cannot hurt.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::num::{NonZeroU32, NonZeroU64};

use mullion_region::hami::Header;
use mullion_region::page::{self, Enforcement, PageDevice, PageSpec};
use mullion_region::usage::{self, UsageDevice, UsageSpec};
use mullion_region::{CardUuid, CorePercent, Devices, Error, extension};
use proptest::collection::vec;
use proptest::prelude::*;

fn card() -> impl Strategy<Value = CardUuid> {
    "[A-Za-z0-9/_.-]{1,63}".prop_map(|text| CardUuid::new(&text).unwrap())
}

fn nonzero() -> impl Strategy<Value = NonZeroU64> {
    (1..=u64::MAX).prop_map(|n| NonZeroU64::new(n).unwrap())
}

fn percent() -> impl Strategy<Value = CorePercent> {
    (1_u8..=100).prop_map(|n| CorePercent::new(n).unwrap())
}

prop_compose! {
    fn page_device()(
        uuid in card(), limit in nonzero(), real in proptest::option::of(nonzero()), core in percent(),
        rate: u64, scale in 1..=u32::MAX, burst_ns: u64,
    ) -> PageDevice {
        PageDevice {
            real_memory: real, rate, scale: NonZeroU32::new(scale).unwrap(), burst_ns,
            ..PageDevice::new(uuid, limit, core)
        }
    }
}

prop_compose! {
    fn page_spec()(
        sequence: u64, heartbeat_ns: u64, futex: u32, report: bool, grant: u64,
        devices in vec(page_device(), 0..=16),
    ) -> PageSpec {
        PageSpec {
            sequence, heartbeat_ns, futex, grant,
            enforcement: if report { Enforcement::Report } else { Enforcement::Required },
            devices: Devices::from_slice(&devices).unwrap(),
        }
    }
}

prop_compose! {
    fn usage_device()(uuid in card(), memory_limit in nonzero(), core in percent()) -> UsageDevice {
        UsageDevice { uuid, memory_limit, core }
    }
}

/// The whole file as the agent leaves it.
fn file(spec: &UsageSpec) -> Vec<u8> {
    let mut file = vec![0; usage::FILE_LEN];
    for (offset, bytes) in usage::image(spec).writes() {
        let offset = usize::try_from(offset).unwrap();
        file[offset..offset + bytes.len()].copy_from_slice(bytes);
    }
    file
}

fn read(file: &[u8]) -> Result<Header, Error> {
    let at = |offset: usize| file.get(offset..).unwrap_or_default();
    usage::read_header(file.len() as u64, at(0), at(usage::PROC_NUM_AT))
}

proptest! {
    #[test]
    fn a_page_reads_as_it_was_written(spec in page_spec()) {
        prop_assert_eq!(page::decode(&page::encode(&spec)), Ok(spec));
    }

    #[test]
    fn a_page_of_garbage_is_an_error_or_a_page(
        spec in page_spec(), hits in vec((0..page::LEN, any::<u8>()), 0..64), len in 0..=page::LEN,
    ) {
        let mut bytes = page::encode(&spec);
        for (at, value) in hits {
            bytes[at] = value;
        }
        let _ = page::decode(&bytes[..len]);
        if let Ok(read) = page::decode(&bytes) {
            // What is accepted means something: it survives another round.
            prop_assert_eq!(page::decode(&page::encode(&read)), Ok(read));
        }
    }

    #[test]
    fn noise_is_refused(bytes in vec(any::<u8>(), 0..9000)) {
        prop_assert!(page::decode(&bytes).is_err());
        prop_assert!(read(&bytes).is_err());
        prop_assert!(extension::check(&bytes).is_err());
    }

    #[test]
    fn a_usage_file_reads_as_it_was_written(devices in vec(usage_device(), 0..=16), priority: i32) {
        let spec = UsageSpec { devices: Devices::from_slice(&devices).unwrap(), priority };
        let bytes = file(&spec);
        let header = read(&bytes).unwrap();
        prop_assert_eq!((header.proc_num, header.priority), (0, priority));
        prop_assert_eq!((header.utilization_switch, header.recent_kernel), (1, 2));
        let seen: Vec<_> = header.devices.iter().map(|d| (d.uuid, d.memory_limit, d.sm_limit)).collect();
        let want: Vec<_> =
            devices.iter().map(|d| (d.uuid, d.memory_limit.get(), u64::from(d.core.get()))).collect();
        prop_assert_eq!(seen, want);
        prop_assert_eq!(extension::check(&bytes[usage::EXTENSION_AT..]), Ok(()));
    }

    #[test]
    fn a_header_that_a_tenant_wrote_into_never_panics(
        devices in vec(usage_device(), 0..=16),
        head in vec((0..usage::HEADER_LEN, any::<u8>()), 0..64),
        tail in vec((usage::PROC_NUM_AT..usage::HAMI_LEN, any::<u8>()), 0..16),
    ) {
        let mut bytes = file(&UsageSpec { devices: Devices::from_slice(&devices).unwrap(), priority: 1 });
        for (at, value) in head.into_iter().chain(tail) {
            bytes[at] = value;
        }
        if let Ok(header) = read(&bytes) {
            prop_assert!(header.proc_num <= usage::SLOTS && header.devices.len() <= 16);
        }
    }
}

/// One field damaged at a time; each has its own answer.
#[test]
fn damaged_fields_are_named() {
    let device = PageDevice::new(CardUuid::new("GPU-1").unwrap(), NonZeroU64::MIN, CorePercent::WHOLE);
    let good = page::encode(&PageSpec {
        sequence: 0,
        heartbeat_ns: 0,
        futex: 0,
        enforcement: Enforcement::Required,
        grant: 1,
        devices: Devices::from_slice(&[device]).unwrap(),
    });
    let card = page::DEVICES_AT;
    for (case, at, value, code) in [
        ("other magic", 0, 0_u32, "RegionMagic"),
        ("newer version", page::VERSION_AT, 2, "RegionVersion"),
        ("other length", page::LENGTH_AT, 8192, "RegionLength"),
        ("other entry size", page::DEVICE_SIZE_AT, 64, "RegionUnknown"),
        ("17 cards", page::DEVICE_COUNT_AT, 17, "RegionTooManyDevices"),
        ("a card that is not there", page::DEVICE_COUNT_AT, 2, "RegionCardUuid"),
        ("no enforcement", page::ENFORCEMENT_AT, 0, "RegionUnknown"),
        ("empty uuid", card, 0, "RegionCardUuid"),
        ("no limit", card + page::MEMORY_LIMIT_AT, 0, "RegionZero"),
        ("no cores", card + page::CORE_PERCENT_AT, 0, "RegionCorePercent"),
        ("101 % of cores", card + page::CORE_PERCENT_AT, 101, "RegionCorePercent"),
        ("unknown flag", card + page::FLAGS_AT, 2, "RegionUnknown"),
        ("oversubscribed without memory", card + page::FLAGS_AT, 1, "RegionZero"),
        ("scale 0", card + page::SCALE_AT, 0, "RegionZero"),
    ] {
        let mut bytes = good;
        bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
        assert_eq!(page::decode(&bytes).map_err(|e| e.code()), Err(code), "{case}");
    }
    assert_eq!(page::decode(&good[..4095]).map_err(|e| e.code()), Err("RegionTooShort"));
}

#[test]
fn damaged_usage_files_are_named() {
    let device = UsageDevice {
        uuid: CardUuid::new("GPU-1").unwrap(),
        memory_limit: NonZeroU64::MIN,
        core: CorePercent::WHOLE,
    };
    let good = file(&UsageSpec { devices: Devices::from_slice(&[device]).unwrap(), priority: 1 });
    for (case, at, value, code) in [
        ("other magic", 0, 1_u32, "RegionMagic"),
        ("version 2", 4, 2, "RegionVersion"),
        ("version 1.3", 8, 3, "RegionUnknown"),
        ("17 cards", usage::DEVICE_NUM_AT, 17, "RegionTooManyDevices"),
        ("uuid of bytes that are no text", usage::UUIDS_AT, u32::MAX, "RegionCardUuid"),
        ("1025 processes", usage::PROC_NUM_AT, 1025, "RegionTooManySlots"),
        ("-1 processes", usage::PROC_NUM_AT, u32::MAX, "RegionTooManySlots"),
    ] {
        let mut bytes = good.clone();
        bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
        assert_eq!(read(&bytes).map_err(|e| e.code()), Err(code), "{case}");
    }
    assert_eq!(read(&good[..usage::HAMI_LEN - 1]).map_err(|e| e.code()), Err("RegionTooShort"));
    assert_eq!(usage::slot_offset(1023), Some(usage::PROC_NUM_AT - usage::SLOT_SIZE));
    assert_eq!(usage::slot_offset(1024), None);
}

#[test]
fn more_than_16_cards_do_not_fit() {
    let found = Devices::from_slice(&[(); 17]);
    assert_eq!(found, Err(Error::TooManyDevices { found: 17 }));
}

#[test]
fn values_that_no_file_can_hold_are_refused() {
    for text in ["", "GPU 1", "GPU-\n", "GPU-é", &"x".repeat(64)] {
        assert_eq!(CardUuid::new(text), Err(Error::CardUuid { index: 0 }), "{text:?}");
    }
    for percent in [0, 101, 255] {
        assert!(CorePercent::new(percent).is_err(), "{percent}");
    }
}
