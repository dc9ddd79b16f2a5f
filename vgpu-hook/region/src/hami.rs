//! The shared regions of HAMi's library: four layouts that run in the field, told apart and read; and the writes by
//! which the agent keeps HAMi's fields of our own file true.
//!
//! Offsets were printed by a C program compiled against the headers of HAMi-core:
//!
//! | | v0 | v1.1, v1.2 | v1.1 shifted |
//! | --- | ---: | ---: | ---: |
//! | in use | until 2024 | until 2026-01, since 2026-04 | between |
//! | size (the file has one byte more) | 1,197,896 | 2,008,952 | 2,008,984 |
//! | number of cards, u64 | 48 | 56 | 88 |
//! | uuids, 16 x 96 | 56 | 64 | 96 |
//! | memory limits, SM limits, 16 x u64 each | 1592, 1720 | 1600, 1728 | 1632, 1760 |
//! | process slots, 1024 | 1848 | 1856 | 1888 |
//! | size of a slot | 1168 | 1960 | 1960 |
//! | `proc_num`, `utilization_switch`, `recent_kernel`, `priority`, i32 | 1,197,880 | 2,008,896 | 2,008,928 |
//! | `last_kernel_time`, u64 | none | 2,008,912 | 2,008,944 |
//! | in a slot: memory per card, 16 x | 8 (40 bytes) | 8 (64 bytes) | 16 (64 bytes) |
//! | in a slot: `monitorused`, 16 x u64 | 648 | 1032 | 1040 |
//! | in a slot: utilisation per card, 16 x | 776 (24 bytes) | 1160 (48 bytes) | 1168 (48 bytes) |
//! | in a slot: status, i32 | 1160 | 1928 | 1936 |
//!
//! A slot starts with pid and hostpid, i32; a card's memory with context, module, data, offset and total, u64; its
//! utilisation with dec, enc and sm, u64. The shifted layout calls itself 1.1 too: size and where the uuids lie tell.
//! Files of 804,681 bytes are older than v0 and refused.

use crate::bytes::{array, i32_at, put, u32_at, u64_at};
use crate::usage::{HAMI_LEN, MAGIC, MAJOR, SLOTS, UUID_SIZE};
use crate::{CardUuid, Devices, Error, MAX_DEVICES};

/// Bytes from the start of a file that [`identify`] and [`Layout::read_header`] need whatever the layout.
pub const HEAD_LEN: usize = 1888;
/// Bytes at [`Layout::tail_offset`] that [`Layout::read_header`] needs whatever the layout.
pub const TAIL_LEN: usize = 24;
/// Size of the struct of v0.
pub const V0_LEN: usize = 1_197_896;
/// Size of the struct of the shifted v1.1.
pub const V1_1_SHIFTED_LEN: usize = 2_008_984;
/// Size of the struct before v0.
pub const PRE_V0_LEN: usize = 804_680;

/// `status` of a slot that nobody uses.
pub const STATUS_FREE: i32 = 0;
/// `status` of a running process.
pub const STATUS_RUNNING: i32 = 1;
/// `status` of a process suspended by HAMi's tool.
pub const STATUS_SUSPENDED: i32 = 2;

const WHAT: &str = "usage file";
/// Size of the part of a card's memory that has a meaning: five words.
const USED_LEN: usize = 40;

/// A layout of HAMi's shared region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Layout {
    /// Without a version; until 2024.
    V0,
    /// 1.1.
    V1_1,
    /// 1.1 with a second semaphore before the cards.
    V1_1Shifted,
    /// 1.2, which our own library writes too.
    V1_2,
}

/// Where the fields of a layout lie.
#[derive(Clone, Copy, Debug)]
struct Offsets {
    len: usize,
    device_num: usize,
    slots: usize,
    slot_size: usize,
    tail: usize,
    used: usize,
    used_size: usize,
    monitor_used: usize,
    util: usize,
    util_size: usize,
    status: usize,
}

impl Offsets {
    const fn uuids(&self) -> usize {
        self.device_num + 8
    }
    const fn limits(&self) -> usize {
        self.uuids() + MAX_DEVICES * UUID_SIZE
    }
    const fn sm_limits(&self) -> usize {
        self.limits() + MAX_DEVICES * 8
    }
    /// Whether the fields follow one another as the compiler laid them.
    const fn agree(&self) -> bool {
        self.sm_limits() + MAX_DEVICES * 8 == self.slots
            && self.slots + SLOTS * self.slot_size == self.tail
            && self.used + MAX_DEVICES * self.used_size == self.monitor_used
            && self.monitor_used + MAX_DEVICES * 8 == self.util
            && self.util + MAX_DEVICES * self.util_size == self.status
            && self.status + 8 <= self.slot_size
            && self.slot_size.is_multiple_of(8)
            && self.slots <= HEAD_LEN
            && self.tail + 16 <= self.len
    }
}

const V0: Offsets = Offsets {
    len: V0_LEN,
    device_num: 48,
    slots: 1848,
    slot_size: 1168,
    tail: 1_197_880,
    used: 8,
    used_size: 40,
    monitor_used: 648,
    util: 776,
    util_size: 24,
    status: 1160,
};
const V1: Offsets = Offsets {
    len: HAMI_LEN,
    device_num: crate::usage::DEVICE_NUM_AT,
    slots: crate::usage::SLOTS_AT,
    slot_size: crate::usage::SLOT_SIZE,
    tail: crate::usage::PROC_NUM_AT,
    used: 8,
    used_size: 64,
    monitor_used: 1032,
    util: 1160,
    util_size: 48,
    status: 1928,
};
const V1_SHIFTED: Offsets = Offsets {
    len: V1_1_SHIFTED_LEN,
    device_num: 88,
    slots: 1888,
    slot_size: 1960,
    tail: 2_008_928,
    used: 16,
    used_size: 64,
    monitor_used: 1040,
    util: 1168,
    util_size: 48,
    status: 1936,
};

const _: () = {
    assert!(V0.agree() && V1.agree() && V1_SHIFTED.agree());
    assert!(V0.tail + 16 == V0_LEN && V1.tail + 56 == HAMI_LEN && V1_SHIFTED.tail + 56 == V1_1_SHIFTED_LEN);
    assert!(V1.limits() == crate::usage::LIMITS_AT && V1.sm_limits() == crate::usage::SM_LIMITS_AT);
    assert!(USED_LEN <= V0.used_size && HEAD_LEN == V1_SHIFTED.slots);
};

/// Tells the layout of a file of `file_len` bytes by its first [`HEAD_LEN`] bytes.
///
/// # Errors
/// [`Error::TooOld`] for a file from before v0, [`Error::TooShort`] for any other size below v1 than v0's,
/// [`Error::Magic`], [`Error::Version`] and [`Error::Unknown`] for a foreign file.
pub fn identify(file_len: u64, head: &[u8]) -> Result<Layout, Error> {
    let is = |len: usize| file_len == len as u64 || file_len == len as u64 + 1;
    let short = |need: usize| Error::TooShort { what: WHAT, need: need as u64, found: file_len };
    let field = |at: usize| {
        u32_at(head, at).ok_or(Error::TooShort { what: WHAT, need: at as u64 + 4, found: head.len() as u64 })
    };
    // An empty or tiny file has no magic that could be wrong.
    let magic = field(0)?;
    if magic != MAGIC {
        return Err(Error::Magic { what: WHAT, found: magic.into() });
    }
    if is(PRE_V0_LEN) {
        return Err(Error::TooOld { found: file_len });
    }
    if is(V0_LEN) {
        return Ok(Layout::V0);
    }
    // HAMi's monitor takes any size between v0 and v1 for v0; HAMi's library writes just the one, and a v1 file that was
    // cut would be misread.
    if file_len < HAMI_LEN as u64 {
        return Err(short(HAMI_LEN));
    }
    let (major, minor) = (field(4)?, field(8)?);
    if major != MAJOR {
        return Err(Error::Version { what: WHAT, found: major, known: MAJOR });
    }
    match minor {
        2 => Ok(Layout::V1_2),
        1 if file_len < V1_1_SHIFTED_LEN as u64 => Ok(Layout::V1_1),
        1 => Ok(match (has_cards(head, &V1), has_cards(head, &V1_SHIFTED)) {
            (true, false) => Layout::V1_1,
            (false, true) => Layout::V1_1Shifted,
            // No card yet: the size alone.
            _ if is(V1_1_SHIFTED_LEN) => Layout::V1_1Shifted,
            _ => Layout::V1_1,
        }),
        found => Err(Error::Unknown { field: "minor version of the usage file", found }),
    }
}

/// Whether the number of cards and the uuids make sense at the places of `offsets`.
fn has_cards(head: &[u8], offsets: &Offsets) -> bool {
    let count = u64_at(head, offsets.device_num).and_then(|n| usize::try_from(n).ok()).unwrap_or_default();
    let uuid = array::<UUID_SIZE>(head, offsets.uuids());
    (1..=MAX_DEVICES).contains(&count) && uuid.is_some_and(|u| CardUuid::from_field(&u, 0).is_ok())
}

/// One card as a usage file names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeaderDevice {
    /// Card or MIG instance.
    pub uuid: CardUuid,
    /// Memory limit in bytes, 0 = none.
    pub memory_limit: u64,
    /// SM limit in percent; any number a tenant wrote.
    pub sm_limit: u64,
}

/// What the header and tail of a usage file say, checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Layout of the file.
    pub layout: Layout,
    /// The cards; each with the limits that the tenant's library applies.
    pub devices: Devices<HeaderDevice>,
    /// Process slots in use, at most [`SLOTS`].
    pub proc_num: usize,
    /// `utilization_switch`: 1 = follow the SM limit, 0 = run freely.
    pub utilization_switch: i32,
    /// `recent_kernel`: counts down from 2 after a launch; negative = blocked.
    pub recent_kernel: i32,
    /// `priority`; 0 is high.
    pub priority: i32,
    /// Unix seconds of the last launch, 0 = none; always 0 in v0, which has no such field.
    pub last_kernel_time: u64,
}

/// One process slot, read. Every number is the tenant's word.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Process {
    /// Pid in the container, 0 = the slot is free.
    pub pid: i32,
    /// Pid on the node, 0 = not known.
    pub hostpid: i32,
    /// [`STATUS_FREE`], [`STATUS_RUNNING`], [`STATUS_SUSPENDED`] or what a tenant wrote.
    pub status: i32,
    /// The cards in the file's order.
    pub cards: [ProcessCard; MAX_DEVICES],
}

/// What one process uses of one card.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProcessCard {
    /// Memory by kind.
    pub used: Used,
    /// `monitorused`: bytes by NVML's word.
    pub monitor_used: u64,
    /// Utilisation of the decoder, percent.
    pub dec_util: u64,
    /// Utilisation of the encoder, percent.
    pub enc_util: u64,
    /// Utilisation of the SMs, percent.
    pub sm_util: u64,
}

/// Memory of one process on one card, bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Used {
    /// Contexts.
    pub context: u64,
    /// Modules; HAMi's library leaves it 0.
    pub module: u64,
    /// Allocations.
    pub data: u64,
    /// HAMi's library leaves it 0.
    pub offset: u64,
    /// All.
    pub total: u64,
}

impl Used {
    /// `bytes` of which nothing is known but their sum: data and total.
    #[must_use]
    pub const fn of(bytes: u64) -> Self {
        Self { context: 0, module: 0, data: bytes, offset: 0, total: bytes }
    }
}

/// Bytes to write and where.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Write<const N: usize> {
    /// Offset in the file.
    pub offset: u64,
    /// What to write there.
    pub bytes: [u8; N],
}

impl Layout {
    const fn offsets(self) -> &'static Offsets {
        match self {
            Self::V0 => &V0,
            Self::V1_1 | Self::V1_2 => &V1,
            Self::V1_1Shifted => &V1_SHIFTED,
        }
    }

    /// The layout's name in logs and metrics.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::V0 => "v0",
            Self::V1_1 => "v1.1",
            Self::V1_1Shifted => "v1.1-shifted",
            Self::V1_2 => "v1.2",
        }
    }

    /// Offset of the tail: `proc_num` and what follows it.
    #[must_use]
    pub const fn tail_offset(self) -> u64 {
        self.offsets().tail as u64
    }

    /// Size of a process slot.
    #[must_use]
    pub const fn slot_size(self) -> usize {
        self.offsets().slot_size
    }

    /// Offset of process slot `slot`, or `None` beyond the last.
    #[must_use]
    pub const fn slot_offset(self, slot: usize) -> Option<u64> {
        let offsets = self.offsets();
        if slot < SLOTS { Some((offsets.slots + offsets.slot_size * slot) as u64) } else { None }
    }

    /// Reads the header and tail: `head` is what lies at offset 0 ([`HEAD_LEN`] bytes suffice), `tail` at
    /// [`Self::tail_offset`] ([`TAIL_LEN`] bytes suffice; v0 has 16).
    ///
    /// # Errors
    /// [`Error`] names the first field without a meaning.
    pub fn read_header(self, head: &[u8], tail: &[u8]) -> Result<Header, Error> {
        let offsets = self.offsets();
        let short = |piece: &[u8], need: usize| Error::TooShort {
            what: WHAT,
            need: need as u64,
            found: piece.len() as u64,
        };
        let word = |at: usize| u64_at(head, at).ok_or(short(head, offsets.slots));
        let number = |at: usize| i32_at(tail, at).ok_or(short(tail, offsets.len.min(TAIL_LEN)));
        let found = word(offsets.device_num)?;
        let count = usize::try_from(found)
            .ok()
            .filter(|n| *n <= MAX_DEVICES)
            .ok_or(Error::TooManyDevices { found })?;
        let mut devices = Devices::new();
        for index in 0..count {
            let uuid = array::<UUID_SIZE>(head, offsets.uuids() + UUID_SIZE * index)
                .ok_or(short(head, offsets.slots))?;
            devices.push(HeaderDevice {
                uuid: CardUuid::from_field(&uuid, index)?,
                memory_limit: word(offsets.limits() + 8 * index)?,
                sm_limit: word(offsets.sm_limits() + 8 * index)?,
            })?;
        }
        let found = number(0)?;
        Ok(Header {
            layout: self,
            devices,
            proc_num: usize::try_from(found)
                .ok()
                .filter(|n| *n <= SLOTS)
                .ok_or(Error::TooManySlots { found })?,
            utilization_switch: number(4)?,
            recent_kernel: number(8)?,
            priority: number(12)?,
            last_kernel_time: match self {
                Self::V0 => 0,
                _ => u64_at(tail, 16).ok_or(short(tail, TAIL_LEN))?,
            },
        })
    }

    /// Reads one process slot: `bytes` is what lies at [`Self::slot_offset`], [`Self::slot_size`] of it.
    ///
    /// # Errors
    /// [`Error::TooShort`] alone: any content of a slot can be read.
    pub fn read_slot(self, bytes: &[u8]) -> Result<Process, Error> {
        let offsets = self.offsets();
        let short = Error::TooShort { what: WHAT, need: offsets.slot_size as u64, found: bytes.len() as u64 };
        let bytes = bytes.get(..offsets.slot_size).ok_or(short)?;
        let word = |at: usize| u64_at(bytes, at).ok_or(short);
        let number = |at: usize| i32_at(bytes, at).ok_or(short);
        let mut cards = [ProcessCard::default(); MAX_DEVICES];
        for (index, card) in cards.iter_mut().enumerate() {
            let used = offsets.used + offsets.used_size * index;
            let util = offsets.util + offsets.util_size * index;
            *card = ProcessCard {
                used: Used {
                    context: word(used)?,
                    module: word(used + 8)?,
                    data: word(used + 16)?,
                    offset: word(used + 24)?,
                    total: word(used + 32)?,
                },
                monitor_used: word(offsets.monitor_used + 8 * index)?,
                dec_util: word(util)?,
                enc_util: word(util + 8)?,
                sm_util: word(util + 16)?,
            };
        }
        Ok(Process { pid: number(0)?, hostpid: number(4)?, status: number(offsets.status)?, cards })
    }

    /// Sets the pid on the node of the process in `slot`; `None` beyond the last slot.
    #[must_use]
    pub fn hostpid(self, slot: usize, hostpid: i32) -> Option<Write<4>> {
        self.in_slot(slot, 4, hostpid.to_le_bytes())
    }

    /// Sets what the process in `slot` uses of `card`; `None` beyond the last slot or card.
    #[must_use]
    pub fn used(self, slot: usize, card: usize, used: &Used) -> Option<Write<USED_LEN>> {
        let mut bytes = [0; USED_LEN];
        for (index, word) in
            [used.context, used.module, used.data, used.offset, used.total].into_iter().enumerate()
        {
            put(&mut bytes, 8 * index, &word.to_le_bytes());
        }
        let offsets = self.offsets();
        self.of_card(slot, card, offsets.used, offsets.used_size, bytes)
    }

    /// Sets what NVML says the process in `slot` uses of `card`, bytes; `None` beyond the last slot or card.
    #[must_use]
    pub fn monitor_used(self, slot: usize, card: usize, bytes: u64) -> Option<Write<8>> {
        self.of_card(slot, card, self.offsets().monitor_used, 8, bytes.to_le_bytes())
    }

    /// Sets the SM utilisation of the process in `slot` on `card`, percent; `None` beyond the last slot or card.
    #[must_use]
    pub fn sm_util(self, slot: usize, card: usize, percent: u64) -> Option<Write<8>> {
        let offsets = self.offsets();
        self.of_card(slot, card, offsets.util + 16, offsets.util_size, percent.to_le_bytes())
    }

    /// Sets the status of `slot`; `None` beyond the last.
    #[must_use]
    pub fn status(self, slot: usize, status: i32) -> Option<Write<4>> {
        self.in_slot(slot, self.offsets().status, status.to_le_bytes())
    }

    /// Frees `slot`, in this order: a reader that skips slots of status 0 sees no half-freed one. `None` beyond the
    /// last.
    #[must_use]
    pub fn free(self, slot: usize) -> Option<(Write<4>, Write<8>)> {
        Some((self.status(slot, STATUS_FREE)?, self.in_slot(slot, 0, [0; 8])?))
    }

    /// Sets the number of slots in use.
    #[must_use]
    pub fn proc_num(self, count: i32) -> Write<4> {
        self.in_tail(0, count)
    }

    /// Sets `utilization_switch`.
    #[must_use]
    pub fn utilization_switch(self, switch: i32) -> Write<4> {
        self.in_tail(4, switch)
    }

    /// Sets `recent_kernel`.
    #[must_use]
    pub fn recent_kernel(self, count: i32) -> Write<4> {
        self.in_tail(8, count)
    }

    fn in_slot<const N: usize>(self, slot: usize, at: usize, bytes: [u8; N]) -> Option<Write<N>> {
        Some(Write { offset: self.slot_offset(slot)? + at as u64, bytes })
    }

    fn of_card<const N: usize>(
        self,
        slot: usize,
        card: usize,
        at: usize,
        size: usize,
        bytes: [u8; N],
    ) -> Option<Write<N>> {
        (card < MAX_DEVICES).then(|| self.in_slot(slot, at + size * card, bytes)).flatten()
    }

    fn in_tail(self, at: u64, number: i32) -> Write<4> {
        Write { offset: self.tail_offset() + at, bytes: number.to_le_bytes() }
    }
}
