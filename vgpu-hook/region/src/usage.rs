//! The usage file: HAMi-core's shared region of version 1.2, and our extension behind it.
//!
//! HAMi's part (offsets were printed by a C program compiled against HAMi-core's own header, commit 8f3a89c):
//!
//! | offset | size | field |
//! | ---: | ---: | --- |
//! | 0 | 4 | magic, 19920718 |
//! | 4, 8 | 4, 4 | version 1 . 2 |
//! | 12 | 4 | `sm_init_flag` |
//! | 16 | 8 | `owner_pid` of the semaphore |
//! | 24 | 32 | `sem_t` of glibc |
//! | 56 | 8 | number of cards |
//! | 64 | 16 x 96 | uuids, NUL-padded |
//! | 1600 | 16 x 8 | memory limits in bytes, 0 = none |
//! | 1728 | 16 x 8 | SM limits in percent |
//! | 1856 | 1024 x 1960 | process slots |
//! | 2,008,896 | 4 | `proc_num`, slots in use |
//! | 2,008,900 | 4 | `utilization_switch` |
//! | 2,008,904 | 4 | `recent_kernel` |
//! | 2,008,908 | 4 | `priority` |
//! | 2,008,912 | 8 | `last_kernel_time`, unix seconds |
//! | 2,008,920 | 32 | `sem_t` `sem_postinit` |
//! | 2,008,952 | 1 | byte that every start of HAMi's library zeroes |
//!
//! Ours starts at the next page, 2,011,136, and is 278,528 bytes long: see [`crate::extension`].
//!
//! The agent creates the file and never maps it: a tenant who truncates a mapped file kills the mapper with SIGBUS.

use core::num::NonZeroU64;

use crate::bytes::{i32_at, put, u64_at};
use crate::hami::{self, Header, Layout};
use crate::{CardUuid, CorePercent, Devices, Error, MAX_DEVICES, extension};

/// First word of the file (`MULTIPROCESS_SHARED_REGION_MAGIC_FLAG` of HAMi-core).
pub const MAGIC: u32 = 19_920_718;
/// Major version.
pub const MAJOR: u32 = 1;
/// Minor version.
pub const MINOR: u32 = 2;
/// Process slots.
pub const SLOTS: usize = 1024;
/// Size of a process slot.
pub const SLOT_SIZE: usize = 1960;

/// Offset in a process slot of its status.
pub const STATUS_AT: usize = 1928;
/// Offset in a process slot of [`owner_mark`]. HAMi's library uses neither this word nor the next one, the slot's last.
pub const MARK_AT: usize = 1944;
/// Offset in a process slot of the word that says which process has it, where the lock byte of the slot alone does not
/// tell; else 0.
pub const LIFE_AT: usize = 1952;

/// Offset of the first semaphore.
pub const SEM_AT: usize = 24;
/// Offset of the number of cards.
pub const DEVICE_NUM_AT: usize = 56;
/// Offset of the uuids.
pub const UUIDS_AT: usize = 64;
/// Size of a uuid.
pub const UUID_SIZE: usize = 96;
/// Offset of the memory limits.
pub const LIMITS_AT: usize = 1600;
/// Offset of the SM limits.
pub const SM_LIMITS_AT: usize = 1728;
/// Offset of the process slots; also the length of the header.
pub const SLOTS_AT: usize = 1856;
/// Offset of `proc_num`; also where the tail begins.
pub const PROC_NUM_AT: usize = 2_008_896;
/// Offset of `utilization_switch`.
pub const UTILIZATION_SWITCH_AT: usize = 2_008_900;
/// Offset of `recent_kernel`.
pub const RECENT_KERNEL_AT: usize = 2_008_904;
/// Offset of `priority`.
pub const PRIORITY_AT: usize = 2_008_908;
/// Offset of `last_kernel_time`.
pub const LAST_KERNEL_TIME_AT: usize = 2_008_912;
/// Offset of the second semaphore.
pub const SEM_POSTINIT_AT: usize = 2_008_920;
/// Size of HAMi's struct; its own file has one byte more.
pub const HAMI_LEN: usize = 2_008_952;

/// Offset of the extension.
pub const EXTENSION_AT: usize = 2_011_136;
/// Size of the extension: [`extension::LEN`].
pub const EXTENSION_LEN: usize = extension::LEN;
/// Size of the whole file.
pub const FILE_LEN: usize = EXTENSION_AT + EXTENSION_LEN;

/// Length of the header: all before the process slots.
pub const HEADER_LEN: usize = SLOTS_AT;
/// Length of the tail: all of HAMi's behind the process slots.
pub const TAIL_LEN: usize = HAMI_LEN - PROC_NUM_AT;

/// `utilization_switch` of a new file: follow the SM limit.
pub const UTILIZATION_SWITCH: i32 = 1;
/// `recent_kernel` of a new file.
pub const RECENT_KERNEL: i32 = 2;
/// `CUDA_TASK_PRIORITY` where the user gave none; 0 is high.
pub const DEFAULT_PRIORITY: i32 = 1;

/// `sem_t` of glibc (64-bit, since 2.21) after `sem_init(pshared = 1, value = 1)`: the value in the first word and
/// 128 (`FUTEX_SHARED`) in the third. HAMi's library takes both semaphores where it finds the magic, so they must be
/// free.
const SEM_FREE: [u8; 32] = {
    let mut sem = [0; 32];
    sem[0] = 1;
    sem[8] = 128;
    sem
};

const _: () = {
    assert!(UUIDS_AT + MAX_DEVICES * UUID_SIZE == LIMITS_AT);
    assert!(LIMITS_AT + MAX_DEVICES * 8 == SM_LIMITS_AT && SM_LIMITS_AT + MAX_DEVICES * 8 == SLOTS_AT);
    assert!(SLOTS_AT + SLOTS * SLOT_SIZE == PROC_NUM_AT);
    assert!(SEM_AT + 32 == DEVICE_NUM_AT && SEM_POSTINIT_AT + 32 == HAMI_LEN);
    assert!(LAST_KERNEL_TIME_AT + 8 == SEM_POSTINIT_AT && PRIORITY_AT + 4 == LAST_KERNEL_TIME_AT);
    // The extension starts on a page of its own and clear of the byte that HAMi's library zeroes.
    assert!(EXTENSION_AT.is_multiple_of(4096) && EXTENSION_AT > HAMI_LEN && EXTENSION_AT - HAMI_LEN < 4096);
    assert!(FILE_LEN == 2_289_664);
    // HAMi's slots hold u64 counters that are loaded without a lock.
    assert!(SLOTS_AT.is_multiple_of(8) && SLOT_SIZE.is_multiple_of(8));
    assert!(MARK_AT + 8 == LIFE_AT && LIFE_AT + 8 == SLOT_SIZE);
};

/// Offset of process slot `slot`, or `None` beyond the last.
#[must_use]
pub const fn slot_offset(slot: usize) -> Option<usize> {
    if slot < SLOTS { Some(SLOTS_AT + SLOT_SIZE * slot) } else { None }
}

/// What stands in the mark of slot `slot` when a process of our library wrote it: HAMi's library moves slots about, so it
/// names its place.
#[must_use]
pub const fn owner_mark(slot: usize) -> u64 {
    u64::from_le_bytes(*b"MULLSLOT") ^ slot as u64
}

/// Whether slot `slot` says for itself which process has it: then that process may live although the lock byte is free.
/// `words` is what stands in the slot from [`STATUS_AT`] on.
#[must_use]
pub fn names_its_process(slot: usize, words: &[u8]) -> bool {
    let word = |at: usize| u64_at(words, at - STATUS_AT);
    let in_use = i32_at(words, 0).is_some_and(|status| status != hami::STATUS_FREE);
    in_use && word(MARK_AT) == Some(owner_mark(slot)) && word(LIFE_AT).is_some_and(|life| life != 0)
}

/// The limits of one card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UsageDevice {
    /// Card or MIG instance.
    pub uuid: CardUuid,
    /// Memory limit in bytes. HAMi reads 0 as "no limit", so it cannot be 0.
    pub memory_limit: NonZeroU64,
    /// Share of the SMs.
    pub core: CorePercent,
}

/// What a container's usage file says before its first process runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UsageSpec {
    /// The container's cards in its own order.
    pub devices: Devices<UsageDevice>,
    /// `CUDA_TASK_PRIORITY`; 0 is high.
    pub priority: i32,
}

/// The bytes of a new usage file that are not zero; all else of its [`FILE_LEN`] bytes is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image {
    header: [u8; HEADER_LEN],
    tail: [u8; TAIL_LEN],
    extension: [u8; extension::HEADER_LEN],
}

impl Image {
    /// Where to write what, in this order: the header with its magic comes last, so that a half-written file is not
    /// taken for a whole one.
    #[must_use]
    pub fn writes(&self) -> [(u64, &[u8]); 3] {
        [(EXTENSION_AT as u64, &self.extension), (PROC_NUM_AT as u64, &self.tail), (0, &self.header)]
    }
}

/// The pieces of a new usage file.
#[must_use]
pub fn image(spec: &UsageSpec) -> Image {
    let mut header = [0; HEADER_LEN];
    put(&mut header, 0, &MAGIC.to_le_bytes());
    put(&mut header, 4, &MAJOR.to_le_bytes());
    put(&mut header, 8, &MINOR.to_le_bytes());
    put(&mut header, SEM_AT, &SEM_FREE);
    put(&mut header, DEVICE_NUM_AT, &(spec.devices.len() as u64).to_le_bytes());
    for index in 0..MAX_DEVICES {
        // HAMi's default where no card is.
        put(&mut header, SM_LIMITS_AT + 8 * index, &100_u64.to_le_bytes());
    }
    for (index, device) in spec.devices.iter().enumerate() {
        put(&mut header, UUIDS_AT + UUID_SIZE * index, device.uuid.as_bytes());
        put(&mut header, LIMITS_AT + 8 * index, &device.memory_limit.get().to_le_bytes());
        put(&mut header, SM_LIMITS_AT + 8 * index, &u64::from(device.core.get()).to_le_bytes());
    }
    let mut tail = [0; TAIL_LEN];
    put(&mut tail, UTILIZATION_SWITCH_AT - PROC_NUM_AT, &UTILIZATION_SWITCH.to_le_bytes());
    put(&mut tail, RECENT_KERNEL_AT - PROC_NUM_AT, &RECENT_KERNEL.to_le_bytes());
    put(&mut tail, PRIORITY_AT - PROC_NUM_AT, &spec.priority.to_le_bytes());
    put(&mut tail, SEM_POSTINIT_AT - PROC_NUM_AT, &SEM_FREE);
    Image { header, tail, extension: extension::header() }
}

/// Reads the header and tail of one of our files, of `file_len` bytes, that a tenant may have overwritten: `header` is
/// what lies at offset 0, `tail` at [`PROC_NUM_AT`].
///
/// # Errors
/// [`Error`] names the first field without a meaning, also where the file is of another of HAMi's layouts than
/// [`Layout::V1_2`].
pub fn read_header(file_len: u64, header: &[u8], tail: &[u8]) -> Result<Header, Error> {
    match hami::identify(file_len, header)? {
        Layout::V1_2 => Layout::V1_2.read_header(header, tail),
        other => Err(Error::Layout { found: other.name(), known: Layout::V1_2.name() }),
    }
}
