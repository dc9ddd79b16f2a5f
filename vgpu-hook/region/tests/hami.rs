//! HAMi's regions as C compilers lay them out (`golden/hami.c`), read and written by our offsets; and what a tenant may
//! have written instead.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::path::Path;

use mullion_region::hami::{self, HEAD_LEN, Header, Layout, Process, ProcessCard, TAIL_LEN, Used};
use mullion_region::usage::{self, FILE_LEN, SLOTS};
use mullion_region::{Error, extension};
use proptest::collection::vec;
use proptest::prelude::*;

const V1_LAYOUTS: [(&str, Layout); 4] = [
    ("v0", Layout::V0),
    ("v1.1", Layout::V1_1),
    ("v1.1-shifted", Layout::V1_1Shifted),
    ("v1.2", Layout::V1_2),
];

/// A file as its dump gives it.
fn golden(name: &str) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/golden/hami-{name}.hex"));
    let text = std::fs::read_to_string(path).unwrap();
    let mut lines = text.lines();
    let length = lines.next().and_then(|line| line.strip_prefix("length ")).unwrap();
    let mut file = vec![0; length.parse().unwrap()];
    for line in lines {
        let (at, bytes) = line.split_once(':').unwrap();
        let at = usize::from_str_radix(at, 16).unwrap();
        for (index, byte) in bytes.split_whitespace().enumerate() {
            file[at + index] = u8::from_str_radix(byte, 16).unwrap();
        }
    }
    file
}

fn at(file: &[u8], offset: u64, len: usize) -> &[u8] {
    let rest = file.get(usize::try_from(offset).unwrap()..).unwrap_or_default();
    &rest[..len.min(rest.len())]
}

/// As the agent reads a file: only the pieces that it needs.
fn header(file: &[u8]) -> Result<Header, Error> {
    let head = at(file, 0, HEAD_LEN);
    let layout = hami::identify(file.len() as u64, head)?;
    layout.read_header(head, at(file, layout.tail_offset(), TAIL_LEN))
}

fn slot(file: &[u8], layout: Layout, slot: usize) -> Process {
    layout.read_slot(at(file, layout.slot_offset(slot).unwrap(), layout.slot_size())).unwrap()
}

/// The process that `golden/hami.c` writes.
fn process(base: u64, util: u64) -> Process {
    let mut cards = [ProcessCard::default(); 16];
    for (card, index) in cards.iter_mut().take(2).zip(0..) {
        let n = base * 100 + index * 10;
        *card = ProcessCard {
            used: Used { context: n + 1, module: n + 2, data: n + 3, offset: n + 4, total: n + 5 },
            monitor_used: n + 6,
            dec_util: util + index + 7,
            enc_util: util + index + 17,
            sm_util: util + index + 27,
        };
    }
    let pid = i32::try_from(base).unwrap() + 1;
    Process { pid, hostpid: pid + 1, status: hami::STATUS_RUNNING, cards }
}

// MO-01: each layout that runs in the field is told apart and read.
#[test]
fn every_layout_is_read_as_the_compiler_laid_it() {
    for (name, layout) in V1_LAYOUTS {
        let file = golden(name);
        let read = header(&file).unwrap();
        assert_eq!((read.layout, layout.name()), (layout, name));
        let cards: Vec<_> =
            read.devices.iter().map(|d| (d.uuid.as_str(), d.memory_limit, d.sm_limit)).collect();
        let want = [
            ("GPU-8f2b6a1e-0c57-4d3e-9d1b-2f6a54c0aa01", 3000 << 20, 30),
            ("GPU-8f2b6a1e-0c57-4d3e-9d1b-2f6a54c0aa02", 20 << 30, 100),
        ];
        assert_eq!(cards, want, "{name}");
        assert_eq!((read.proc_num, read.utilization_switch, read.recent_kernel), (SLOTS, 1, 2), "{name}");
        assert_eq!(read.priority, 1, "{name}");
        let last = if layout == Layout::V0 { 0 } else { 1_764_453_600 };
        assert_eq!(read.last_kernel_time, last, "{name}");
        assert_eq!(slot(&file, layout, 0), process(1000, 0), "{name}");
        assert_eq!(slot(&file, layout, 1023), process(2000, 50), "{name}");
        assert_eq!(slot(&file, layout, 1), Process::default(), "{name}");
        assert_eq!(layout.slot_offset(1024), None, "{name}");
    }
}

/// What the agent writes lands in the fields that HAMi's monitor reads, and nowhere else.
#[test]
fn what_the_agent_mirrors_is_what_the_compiler_would_write() {
    fn put<const N: usize>(file: &mut [u8], write: Option<hami::Write<N>>) {
        let write = write.unwrap();
        let offset = usize::try_from(write.offset).unwrap();
        file[offset..offset + N].copy_from_slice(&write.bytes);
    }
    for (name, layout) in V1_LAYOUTS {
        let want = golden(name);
        let mut file = want.clone();
        for slot in [0, 1023] {
            let (status, pids) = layout.free(slot).unwrap();
            put(&mut file, Some(status));
            put(&mut file, Some(pids));
            for card in 0..2 {
                put(&mut file, layout.used(slot, card, &Used::default()));
                put(&mut file, layout.monitor_used(slot, card, 0));
                put(&mut file, layout.sm_util(slot, card, 0));
            }
            let freed = self::slot(&file, layout, slot);
            assert_eq!((freed.pid, freed.hostpid, freed.status), (0, 0, 0), "{name}");
            assert!(freed.cards.iter().all(|c| c.used == Used::default() && c.monitor_used == 0), "{name}");
        }
        for (slot, process) in [(0, process(1000, 0)), (1023, process(2000, 50))] {
            put(&mut file, layout.status(slot, process.status));
            put(&mut file, layout.hostpid(slot, process.hostpid));
            let pid = layout.hostpid(slot, 0).unwrap().offset - 4;
            file[usize::try_from(pid).unwrap()..][..4].copy_from_slice(&process.pid.to_le_bytes());
            for (index, card) in process.cards.iter().take(2).enumerate() {
                put(&mut file, layout.used(slot, index, &card.used));
                put(&mut file, layout.monitor_used(slot, index, card.monitor_used));
                put(&mut file, layout.sm_util(slot, index, card.sm_util));
            }
        }
        for (write, field) in [
            (layout.proc_num(5), "proc_num"),
            (layout.utilization_switch(0), "utilization_switch"),
            (layout.recent_kernel(-1), "recent_kernel"),
        ] {
            put(&mut file, Some(write));
            assert!(file != want, "{name}: {field}");
        }
        let read = header(&file).unwrap();
        assert_eq!((read.proc_num, read.utilization_switch, read.recent_kernel), (5, 0, -1), "{name}");
        put(&mut file, Some(layout.proc_num(1024)));
        put(&mut file, Some(layout.utilization_switch(1)));
        put(&mut file, Some(layout.recent_kernel(2)));
        assert!(file == want, "{name}: some other byte changed");
        let beyond = (layout.used(1024, 0, &Used::of(1)), layout.used(0, 16, &Used::of(1)));
        assert_eq!(beyond, (None, None), "{name}");
        assert_eq!((layout.monitor_used(0, 16, 1), layout.sm_util(1024, 0, 1)), (None, None), "{name}");
    }
}

// MO-01: files of every length and of other libraries; each bad one says why it is bad.
#[test]
fn other_files_are_refused_by_reason() {
    let [v0, v1, shifted, v2] = V1_LAYOUTS.map(|(name, _)| golden(name));
    let code = |file: &[u8]| header(file).map(|h| h.layout.name()).map_err(|e| e.code());
    let cut = |file: &[u8], len: usize| code(&file[..len]);
    assert_eq!(code(&golden("pre-v0")), Err("RegionTooOld"), "early 2024");
    assert_eq!(code(&[]), Err("RegionTooShort"), "empty");
    assert_eq!(code(&[0; 4096]), Err("RegionMagic"), "zeros");
    assert_eq!(code(b"root:x:0:0:root:/root:/bin/bash\n"), Err("RegionMagic"), "another file");
    assert_eq!(cut(&v2, 4), Err("RegionTooShort"), "the magic alone");
    assert_eq!(cut(&v2, v2.len() - 1), Ok("v1.2"), "without the byte behind it");
    assert_eq!(cut(&v2, v2.len() - 2), Err("RegionTooShort"), "v1.2 cut");
    assert_eq!(
        cut(&v2, 1_500_000),
        Err("RegionTooShort"),
        "v1.2 cut to a size that HAMi's monitor takes for v0"
    );
    assert_eq!(cut(&v0, v0.len() - 1), Ok("v0"), "without the byte behind it");
    assert_eq!(cut(&v0, v0.len() - 2), Err("RegionTooShort"), "v0 cut");
    // Longer files are legal: ours is, and so may be a sparse one of 1 GiB.
    let head = |file: &[u8], len| hami::identify(len, at(file, 0, HEAD_LEN));
    assert_eq!(head(&v2, FILE_LEN as u64), Ok(Layout::V1_2));
    assert_eq!(head(&v2, 1 << 30), Ok(Layout::V1_2));
    assert_eq!(head(&v1, 1 << 30), Ok(Layout::V1_1), "by the uuids");
    assert_eq!(head(&shifted, 1 << 30), Ok(Layout::V1_1Shifted), "by the uuids");
    assert_eq!(head(&v1, 2_008_985), Ok(Layout::V1_1), "the shifted size, the plain uuids");
    // Before the first process named its cards, the size tells.
    let mut early = shifted.clone();
    early[88] = 0;
    assert_eq!(head(&early, 2_008_985), Ok(Layout::V1_1Shifted));
    assert_eq!(head(&early, 2_008_953), Ok(Layout::V1_1));
    let patched = |at: usize, value: u32| {
        let mut file = v2.clone();
        file[at..at + 4].copy_from_slice(&value.to_le_bytes());
        code(&file)
    };
    assert_eq!(patched(4, 2), Err("RegionVersion"), "version 2");
    assert_eq!(patched(8, 3), Err("RegionUnknown"), "version 1.3");
    assert_eq!(patched(usage::DEVICE_NUM_AT, 17), Err("RegionTooManyDevices"), "17 cards");
    assert_eq!(patched(usage::DEVICE_NUM_AT, 3), Err("RegionCardUuid"), "a card without a uuid");
    assert_eq!(patched(usage::PROC_NUM_AT, 1025), Err("RegionTooManySlots"), "1025 processes");
    // A file that is not ours is not read as ours.
    let ours = usage::read_header(v1.len() as u64, &v1, at(&v1, usage::PROC_NUM_AT as u64, TAIL_LEN));
    assert_eq!(ours, Err(Error::Layout { found: "v1.1", known: "v1.2" }));
}

#[test]
fn every_error_says_what_to_do_and_has_a_code() {
    let old = Error::TooOld { found: 804_681 };
    assert!(old.to_string().contains("804681 bytes") && old.to_string().contains("restart the pod"));
    assert_eq!(Error::HighWater { found: 2000 }.code(), "RegionHighWater");
    assert!(Error::Layout { found: "v0", known: "v1.2" }.to_string().contains("v0"));
}

/// A hot part with all words set.
fn hot_bytes(high_water: u32) -> Vec<u8> {
    let mut bytes = vec![0; extension::HOT_LEN];
    bytes[..extension::HEADER_LEN].copy_from_slice(&extension::header());
    let mut word = |at: usize, value: u64| bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
    word(extension::HIGH_WATER_AT, high_water.into());
    word(extension::ATTACHED_AT, 2);
    word(extension::FOREIGN_AT, 3);
    word(extension::ESCAPES_AT, 4);
    word(extension::REFUSED_AT, 5);
    for card in 0..16 {
        let at = extension::card_offset(card).unwrap() - usage::EXTENSION_AT;
        let n = 100 * card as u64;
        for (index, field) in [
            extension::TOTAL_AT,
            extension::TAT_AT,
            extension::LIMIT_HITS_AT,
            extension::CARD_FULL_AT,
            extension::PEAK_AT,
            extension::WAITS_AT,
            extension::WAIT_NS_AT,
            extension::FIRST_LAUNCH_AT,
            extension::LAST_LAUNCH_AT,
            extension::SPENT_NS_AT,
        ]
        .into_iter()
        .enumerate()
        {
            word(at + field, n + index as u64);
        }
    }
    bytes
}

#[test]
fn the_hot_part_is_read_field_by_field() {
    let hot = extension::read_hot(&hot_bytes(7)).unwrap();
    assert_eq!((hot.high_water, hot.attached, hot.foreign, hot.escapes, hot.refused), (7, 2, 3, 4, 5));
    for (card, n) in hot.cards.iter().zip((0..).step_by(100)) {
        let words = [
            card.total,
            card.tat,
            card.limit_hits,
            card.card_full,
            card.peak,
            card.waits,
            card.wait_ns,
            card.first_launch,
            card.last_launch,
            card.spent_ns,
        ];
        assert_eq!(words.to_vec(), (n..n + 10).collect::<Vec<_>>());
    }
    assert_eq!(extension::read_hot(&hot_bytes(1024)).map(|h| h.high_water), Ok(1024));
    assert_eq!(extension::read_hot(&hot_bytes(1025)), Err(Error::HighWater { found: 1025 }));
    let cut = extension::read_hot(&hot_bytes(1)[..extension::NOTES_AT - 65]);
    assert_eq!(cut.map_err(|e| e.code()), Err("RegionTooShort"));
}

#[test]
fn the_offsets_of_the_extension_are_the_contract() {
    assert_eq!((usage::EXTENSION_AT, FILE_LEN), (2_011_136, 2_289_664));
    assert_eq!(extension::card_offset(1), Some(2_011_136 + 64 + 256));
    assert_eq!(extension::card_offset(16), None);
    assert_eq!(extension::card_slots_offset(2), Some(2_011_136 + 16_384 + 2 * 16_384));
    assert_eq!(extension::slot_offset(15, 1023), Some(FILE_LEN - 16));
    assert_eq!((extension::slot_offset(0, 1024), extension::slot_offset(16, 0)), (None, None));
    let bytes: Vec<u8> = (1_u64..=5).flat_map(u64::to_le_bytes).collect();
    let slots: Vec<_> = extension::slots(&bytes).map(|s| (s.claimed, s.settled)).collect();
    assert_eq!(slots, [(1, 2), (3, 4)], "half a slot is none");
    assert_eq!(extension::slots(&vec![0; 20_000]).count(), SLOTS);
}

proptest! {
    #[test]
    fn no_bytes_make_a_reader_panic(
        len in 0..3_000_000_u64, head in vec(any::<u8>(), 0..2000), tail in vec(any::<u8>(), 0..64),
        slot in vec(any::<u8>(), 0..2100),
    ) {
        let _ = hami::identify(len, &head);
        let _ = usage::read_header(len, &head, &tail);
        let _ = extension::read_hot(&head);
        let _ = extension::check(&tail);
        extension::slots(&slot).for_each(drop);
        for (_, layout) in V1_LAYOUTS {
            let _ = layout.read_header(&head, &tail);
            prop_assert_eq!(layout.read_slot(&slot).is_ok(), slot.len() >= layout.slot_size());
        }
    }

    #[test]
    fn damage_is_an_error_or_a_header(
        which in 0..4_usize, hits in vec((0..HEAD_LEN, any::<u8>()), 0..32), ends in vec((0..TAIL_LEN, any::<u8>()), 0..8),
    ) {
        let (name, layout) = V1_LAYOUTS[which];
        let mut file = golden(name);
        let tail = usize::try_from(layout.tail_offset()).unwrap();
        for (at, value) in hits.into_iter().chain(ends.into_iter().map(|(at, value)| (tail + at, value))) {
            if let Some(byte) = file.get_mut(at) {
                *byte = value;
            }
        }
        if let Ok(read) = header(&file) {
            prop_assert!(read.proc_num <= SLOTS && read.devices.len() <= 16);
        }
    }

    #[test]
    fn a_damaged_hot_part_is_an_error_or_read(hits in vec((0..extension::HOT_LEN, any::<u8>()), 0..64), len in 0..=extension::HOT_LEN) {
        let mut bytes = hot_bytes(3);
        for (at, value) in hits {
            bytes[at] = value;
        }
        let _ = extension::read_hot(&bytes[..len]);
        if let Ok(hot) = extension::read_hot(&bytes) {
            prop_assert!(hot.high_water <= SLOTS);
        }
    }
}
