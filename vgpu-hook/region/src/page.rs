//! The control page: 4 KiB, agent-owned, read-only in the container at `/usr/local/vgpu/control.page`.
//!
//! Header, at offset 0 (all fields naturally aligned, so that a mapping can be read by atomic loads):
//!
//! | offset | size | field |
//! | ---: | ---: | --- |
//! | 0 | 8 | magic, `MULLPAGE` |
//! | 8 | 4 | version, 1 |
//! | 12 | 4 | length of the page, 4096 |
//! | 16 | 8 | sequence: odd while the agent changes more than one word, grows with every change |
//! | 24 | 8 | heartbeat: `CLOCK_MONOTONIC` in ns when the agent last looked after this page, 0 = never |
//! | 32 | 4 | futex word (`FUTEX_WAIT`, shared): the agent changes and wakes it when waiting launches should look again |
//! | 36 | 4 | enforcement: 1 = required, 2 = report |
//! | 40 | 4 | number of cards |
//! | 44 | 4 | size of a card's entry, 192 |
//! | 48 | 8 | grant: the 16 hex digits of the CDI device as a number |
//! | 56 | 72 | reserved, zero |
//!
//! The entry of card `i`, at `128 + 192 * i`:
//!
//! | offset | size | field |
//! | ---: | ---: | --- |
//! | 0 | 64 | uuid, NUL-padded |
//! | 64 | 8 | memory limit in bytes, never 0 |
//! | 72 | 8 | bytes of real memory behind the limit; 0 unless flag 0 is set |
//! | 80 | 4 | core share in percent, 1..=100 |
//! | 84 | 4 | flags: bit 0 = the limit is oversubscribed |
//! | 88 | 8 | rate: ns of the whole card granted per second of time |
//! | 96 | 4 | scale of a launch's cost, 16.16 fixed point, 65536 = 1.0, never 0 |
//! | 100 | 4 | reserved, zero |
//! | 104 | 8 | burst in ns: how much of unused rate may be saved |
//! | 112 | 80 | reserved, zero |
//!
//! Reserved bytes are ignored by a reader: later releases of version 1 may give them a meaning in which 0 is
//! "as before".

use core::num::{NonZeroU32, NonZeroU64};

use crate::bytes::{array, put, u32_at, u64_at};
use crate::{CardUuid, CorePercent, Devices, Error, MAX_DEVICES};

/// Size of the page in bytes.
pub const LEN: usize = 4096;
/// First eight bytes.
pub const MAGIC: [u8; 8] = *b"MULLPAGE";
/// Version of the layout.
pub const VERSION: u32 = 1;

/// Offset of the version.
pub const VERSION_AT: usize = 8;
/// Offset of the page's length.
pub const LENGTH_AT: usize = 12;
/// Offset of the sequence.
pub const SEQUENCE_AT: usize = 16;
/// Offset of the heartbeat.
pub const HEARTBEAT_AT: usize = 24;
/// Offset of the futex word.
pub const FUTEX_AT: usize = 32;
/// Offset of the enforcement.
pub const ENFORCEMENT_AT: usize = 36;
/// Offset of the number of cards.
pub const DEVICE_COUNT_AT: usize = 40;
/// Offset of the size of a card's entry.
pub const DEVICE_SIZE_AT: usize = 44;
/// Offset of the grant.
pub const GRANT_AT: usize = 48;

/// Offset of the first card's entry.
pub const DEVICES_AT: usize = 128;
/// Size of a card's entry.
pub const DEVICE_SIZE: usize = 192;
/// Size of the uuid in a card's entry.
pub const UUID_SIZE: usize = 64;
/// Offset of the memory limit in a card's entry.
pub const MEMORY_LIMIT_AT: usize = 64;
/// Offset of the real memory in a card's entry.
pub const REAL_MEMORY_AT: usize = 72;
/// Offset of the core share in a card's entry.
pub const CORE_PERCENT_AT: usize = 80;
/// Offset of the flags in a card's entry.
pub const FLAGS_AT: usize = 84;
/// Offset of the rate in a card's entry.
pub const RATE_AT: usize = 88;
/// Offset of the scale in a card's entry.
pub const SCALE_AT: usize = 96;
/// Offset of the burst in a card's entry.
pub const BURST_AT: usize = 104;

/// Flag of a card whose limit is larger than the memory behind it.
pub const FLAG_OVERSUBSCRIBED: u32 = 1;

/// Scale 1.0 in 16.16 fixed point.
pub const SCALE_ONE: NonZeroU32 = NonZeroU32::new(1 << 16).unwrap();
/// Burst of a new page: 50 ms, the longest that a waiting launch sleeps before it looks again.
pub const DEFAULT_BURST_NS: u64 = 50_000_000;

const _: () = {
    assert!(DEVICES_AT + MAX_DEVICES * DEVICE_SIZE <= LEN);
    assert!(GRANT_AT + 8 <= DEVICES_AT && BURST_AT + 8 <= DEVICE_SIZE);
    assert!(CardUuid::MAX < UUID_SIZE && UUID_SIZE == MEMORY_LIMIT_AT);
    // 64-bit words are loaded atomically from a mapping.
    assert!(SEQUENCE_AT.is_multiple_of(8) && HEARTBEAT_AT.is_multiple_of(8) && GRANT_AT.is_multiple_of(8));
    assert!(DEVICES_AT.is_multiple_of(64) && DEVICE_SIZE.is_multiple_of(64));
    assert!(
        MEMORY_LIMIT_AT.is_multiple_of(8)
            && REAL_MEMORY_AT.is_multiple_of(8)
            && RATE_AT.is_multiple_of(8)
            && BURST_AT.is_multiple_of(8)
    );
    assert!(FUTEX_AT.is_multiple_of(4) && SCALE_AT.is_multiple_of(4) && CORE_PERCENT_AT.is_multiple_of(4));
};

const WHAT: &str = "control page";

/// What happens in a container where a limit cannot be applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Enforcement {
    /// The library refuses: no limit, no card.
    Required,
    /// The library lets the call through and the agent reports it.
    Report,
}

impl Enforcement {
    const fn word(self) -> u32 {
        match self {
            Self::Required => 1,
            Self::Report => 2,
        }
    }

    fn from_field(found: u32) -> Result<Self, Error> {
        match found {
            1 => Ok(Self::Required),
            2 => Ok(Self::Report),
            _ => Err(Error::Unknown { field: "enforcement", found }),
        }
    }
}

/// What a container may use of one card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageDevice {
    /// Card or MIG instance.
    pub uuid: CardUuid,
    /// Memory limit in bytes.
    pub memory_limit: NonZeroU64,
    /// Bytes of real memory behind the limit when it is oversubscribed.
    pub real_memory: Option<NonZeroU64>,
    /// Share of the SMs.
    pub core: CorePercent,
    /// ns of the whole card per second of time.
    pub rate: u64,
    /// Scale of a launch's cost, 16.16 fixed point.
    pub scale: NonZeroU32,
    /// Saved rate in ns.
    pub burst_ns: u64,
}

impl PageDevice {
    /// A card with the rate of its core share, scale 1.0 and the default burst, not oversubscribed.
    #[must_use]
    pub fn new(uuid: CardUuid, memory_limit: NonZeroU64, core: CorePercent) -> Self {
        Self {
            uuid,
            memory_limit,
            real_memory: None,
            core,
            rate: rate_of(core),
            scale: SCALE_ONE,
            burst_ns: DEFAULT_BURST_NS,
        }
    }
}

/// The rate that a core share stands for: 1 % is 10 ms of the whole card per second.
#[must_use]
pub fn rate_of(core: CorePercent) -> u64 {
    u64::from(core.get()) * 10_000_000
}

/// Everything a control page says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageSpec {
    /// Odd while a change is under way.
    pub sequence: u64,
    /// `CLOCK_MONOTONIC` in ns.
    pub heartbeat_ns: u64,
    /// Value of the futex word.
    pub futex: u32,
    /// What to do where a limit cannot be applied.
    pub enforcement: Enforcement,
    /// Name of the grant: its 16 hex digits as a number.
    pub grant: u64,
    /// The container's cards in its own order.
    pub devices: Devices<PageDevice>,
}

/// The page's bytes.
#[must_use]
pub fn encode(spec: &PageSpec) -> [u8; LEN] {
    let mut page = [0; LEN];
    put(&mut page, 0, &MAGIC);
    put(&mut page, VERSION_AT, &VERSION.to_le_bytes());
    put(&mut page, LENGTH_AT, &word(LEN).to_le_bytes());
    put(&mut page, SEQUENCE_AT, &spec.sequence.to_le_bytes());
    put(&mut page, HEARTBEAT_AT, &spec.heartbeat_ns.to_le_bytes());
    put(&mut page, FUTEX_AT, &spec.futex.to_le_bytes());
    put(&mut page, ENFORCEMENT_AT, &spec.enforcement.word().to_le_bytes());
    put(&mut page, DEVICE_COUNT_AT, &word(spec.devices.len()).to_le_bytes());
    put(&mut page, DEVICE_SIZE_AT, &word(DEVICE_SIZE).to_le_bytes());
    put(&mut page, GRANT_AT, &spec.grant.to_le_bytes());
    let (_, entries) = page.split_at_mut(DEVICES_AT);
    for (entry, device) in entries.chunks_exact_mut(DEVICE_SIZE).zip(spec.devices.iter()) {
        encode_device(entry, device);
    }
    page
}

fn encode_device(entry: &mut [u8], device: &PageDevice) {
    let flags = if device.real_memory.is_some() { FLAG_OVERSUBSCRIBED } else { 0 };
    put(entry, 0, device.uuid.as_bytes());
    put(entry, MEMORY_LIMIT_AT, &device.memory_limit.get().to_le_bytes());
    put(entry, REAL_MEMORY_AT, &device.real_memory.map_or(0, NonZeroU64::get).to_le_bytes());
    put(entry, CORE_PERCENT_AT, &u32::from(device.core.get()).to_le_bytes());
    put(entry, FLAGS_AT, &flags.to_le_bytes());
    put(entry, RATE_AT, &device.rate.to_le_bytes());
    put(entry, SCALE_AT, &device.scale.get().to_le_bytes());
    put(entry, BURST_AT, &device.burst_ns.to_le_bytes());
}

/// Constants of this page are far below 2^32.
#[expect(clippy::cast_possible_truncation, reason = "page sizes and card counts fit in 13 bits")]
const fn word(value: usize) -> u32 {
    value as u32
}

/// Reads a page that may hold anything.
///
/// # Errors
/// [`Error`] names the first field that is not as [`encode`] writes it. Reserved bytes are not looked at.
pub fn decode(page: &[u8]) -> Result<PageSpec, Error> {
    let short = Error::TooShort { what: WHAT, need: LEN as u64, found: page.len() as u64 };
    let page = page.first_chunk::<LEN>().ok_or(short)?;
    let magic = array::<8>(page, 0).ok_or(short)?;
    if magic != MAGIC {
        return Err(Error::Magic { what: WHAT, found: u64::from_le_bytes(magic) });
    }
    let version = u32_at(page, VERSION_AT).ok_or(short)?;
    if version != VERSION {
        return Err(Error::Version { what: WHAT, found: version, known: VERSION });
    }
    let length = u32_at(page, LENGTH_AT).ok_or(short)?;
    if length != word(LEN) {
        return Err(Error::Length { what: WHAT, found: length, known: word(LEN) });
    }
    let size = u32_at(page, DEVICE_SIZE_AT).ok_or(short)?;
    if size != word(DEVICE_SIZE) {
        return Err(Error::Unknown { field: "size of a card's entry", found: size });
    }
    let count = u32_at(page, DEVICE_COUNT_AT).ok_or(short)?;
    if count > word(MAX_DEVICES) {
        return Err(Error::TooManyDevices { found: count.into() });
    }
    let mut devices = Devices::new();
    let entries = page.get(DEVICES_AT..).ok_or(short)?.chunks_exact(DEVICE_SIZE);
    for (index, entry) in entries.take(count as usize).enumerate() {
        devices.push(decode_device(entry, index, short)?)?;
    }
    Ok(PageSpec {
        sequence: u64_at(page, SEQUENCE_AT).ok_or(short)?,
        heartbeat_ns: u64_at(page, HEARTBEAT_AT).ok_or(short)?,
        futex: u32_at(page, FUTEX_AT).ok_or(short)?,
        enforcement: Enforcement::from_field(u32_at(page, ENFORCEMENT_AT).ok_or(short)?)?,
        grant: u64_at(page, GRANT_AT).ok_or(short)?,
        devices,
    })
}

fn decode_device(entry: &[u8], index: usize, short: Error) -> Result<PageDevice, Error> {
    let uuid = array::<UUID_SIZE>(entry, 0).ok_or(short)?;
    let flags = u32_at(entry, FLAGS_AT).ok_or(short)?;
    let real_memory = NonZeroU64::new(u64_at(entry, REAL_MEMORY_AT).ok_or(short)?);
    // An unknown flag may mean a limit that this reader would not apply.
    let real_memory = match (flags, real_memory) {
        (0, None) => None,
        (FLAG_OVERSUBSCRIBED, Some(bytes)) => Some(bytes),
        (FLAG_OVERSUBSCRIBED, None) => return Err(Error::Zero { index, field: "real memory" }),
        (found, _) => return Err(Error::Unknown { field: "flags of a card", found }),
    };
    Ok(PageDevice {
        uuid: CardUuid::from_field(&uuid, index)?,
        memory_limit: NonZeroU64::new(u64_at(entry, MEMORY_LIMIT_AT).ok_or(short)?)
            .ok_or(Error::Zero { index, field: "memory limit" })?,
        real_memory,
        core: CorePercent::from_field(u32_at(entry, CORE_PERCENT_AT).ok_or(short)?.into())?,
        rate: u64_at(entry, RATE_AT).ok_or(short)?,
        scale: NonZeroU32::new(u32_at(entry, SCALE_AT).ok_or(short)?)
            .ok_or(Error::Zero { index, field: "scale" })?,
        burst_ns: u64_at(entry, BURST_AT).ok_or(short)?,
    })
}
