//! Files of HAMi's library, in all its layouts.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;

use mullion_region::hami::{Layout, Used, V0_LEN, V1_1_SHIFTED_LEN};
use mullion_region::usage::HAMI_LEN;

/// Sizes and places of a layout: length, minor version, number of cards, uuids, limits, SM limits.
fn places(layout: Layout) -> (usize, i32, u64, u64, u64, u64) {
    match layout {
        Layout::V0 => (V0_LEN, 0, 48, 56, 1592, 1720),
        Layout::V1_1 => (HAMI_LEN, 1, 56, 64, 1600, 1728),
        Layout::V1_2 => (HAMI_LEN, 2, 56, 64, 1600, 1728),
        Layout::V1_1Shifted => (V1_1_SHIFTED_LEN, 1, 88, 96, 1632, 1760),
    }
}

/// A file as HAMi's library leaves it: one card, one process that holds `bytes` of it, and one that has ended.
pub fn write(path: &Path, layout: Layout, card: &str, limit: u64, bytes: u64) -> File {
    let (length, minor, count, uuids, limits, sm_limits) = places(layout);
    let file = File::options().read(true).write(true).create(true).truncate(false).open(path).unwrap();
    file.set_len(length as u64 + 1).unwrap();
    let put = |at: u64, bytes: &[u8]| file.write_all_at(bytes, at).unwrap();
    put(0, &19_920_718_i32.to_le_bytes());
    if layout != Layout::V0 {
        put(4, &1_i32.to_le_bytes());
        put(8, &minor.to_le_bytes());
    }
    put(count, &1_u64.to_le_bytes());
    put(uuids, card.as_bytes());
    put(limits, &limit.to_le_bytes());
    put(sm_limits, &30_u64.to_le_bytes());
    let place = |slot: usize| layout.slot_offset(slot).unwrap();
    for (slot, status, bytes) in [(0, 1, bytes), (1, 0, 7 << 30)] {
        put(place(slot), &17_i32.to_le_bytes());
        let status = layout.status(slot, status).unwrap();
        put(status.offset, &status.bytes);
        let used = layout.used(slot, 0, &Used::of(bytes)).unwrap();
        put(used.offset, &used.bytes);
    }
    let number = layout.proc_num(2);
    put(number.offset, &number.bytes);
    let switch = layout.utilization_switch(1);
    put(switch.offset, &switch.bytes);
    let recent = layout.recent_kernel(0);
    put(recent.offset, &recent.bytes);
    put(recent.offset + 4, &1_i32.to_le_bytes());
    file
}

/// A folder of HAMi's, writable to its tenant.
pub fn folder(path: &Path) {
    fs::create_dir(path).unwrap();
    fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
}
