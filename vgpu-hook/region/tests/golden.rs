//! The bytes of a control page and a usage file, pinned. A change of these files is a change of the contract with
//! running containers. `UPDATE_GOLDEN=1 cargo test -p mullion-region` rewrites them.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::fmt::Write as _;
use std::num::NonZeroU64;
use std::path::Path;

use mullion_region::page::{self, Enforcement, PageDevice, PageSpec};
use mullion_region::usage::{self, UsageDevice, UsageSpec};
use mullion_region::{CardUuid, CorePercent, Devices};

const GIB: u64 = 1 << 30;

fn uuid(text: &str) -> CardUuid {
    CardUuid::new(text).unwrap()
}

fn bytes(count: u64) -> NonZeroU64 {
    NonZeroU64::new(count).unwrap()
}

/// Lines of 16 bytes with their offset; lines of zeros are left out.
fn dump(offset: u64, bytes: &[u8]) -> String {
    let mut text = String::new();
    for (line, chunk) in bytes.chunks(16).enumerate() {
        if chunk.iter().any(|b| *b != 0) {
            write!(text, "{:08x}:", offset + 16 * line as u64).unwrap();
            for byte in chunk {
                write!(text, " {byte:02x}").unwrap();
            }
            text.push('\n');
        }
    }
    text
}

fn check(name: &str, found: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name);
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        std::fs::write(&path, found).unwrap();
    }
    let want = std::fs::read_to_string(&path).unwrap();
    assert_eq!(found, want, "{name} differs");
}

fn spec() -> PageSpec {
    let half = PageDevice::new(
        uuid("GPU-8f2b6a1e-0c57-4d3e-9d1b-2f6a54c0aa01"),
        bytes(20 * GIB),
        CorePercent::new(50).unwrap(),
    );
    let mut more = PageDevice::new(
        uuid("MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f"),
        bytes(96 * GIB),
        CorePercent::WHOLE,
    );
    more.real_memory = Some(bytes(80 * GIB));
    PageSpec {
        sequence: 2,
        heartbeat_ns: 0x0102_0304_0506_0708,
        futex: 7,
        enforcement: Enforcement::Report,
        grant: 0x00c0_ffee_1234_5678,
        devices: Devices::from_slice(&[half, more]).unwrap(),
    }
}

#[test]
fn the_control_page_is_as_pinned() {
    check("control-page.hex", &dump(0, &page::encode(&spec())));
}

#[test]
fn the_usage_file_is_as_pinned() {
    let device = |text: &str, limit, percent| UsageDevice {
        uuid: uuid(text),
        memory_limit: bytes(limit),
        core: CorePercent::new(percent).unwrap(),
    };
    let devices = Devices::from_slice(&[
        device("GPU-8f2b6a1e-0c57-4d3e-9d1b-2f6a54c0aa01", 3000 << 20, 30),
        device("GPU-8f2b6a1e-0c57-4d3e-9d1b-2f6a54c0aa02", 20 * GIB, 100),
    ])
    .unwrap();
    let image = usage::image(&UsageSpec { devices, priority: usage::DEFAULT_PRIORITY });
    let mut writes = image.writes();
    writes.sort_by_key(|(offset, _)| *offset);
    let pieces: String = writes.iter().map(|(offset, bytes)| dump(*offset, bytes)).collect();
    check("usage-file.hex", &pieces);
}
