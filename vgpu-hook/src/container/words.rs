//! The two files as mapped: words that other processes change at any time, so all of them atomic.
//!
//! Offsets are those of `mullion-region`; a const assertion ties each to it.

#![expect(unsafe_code, reason = "gives mapped memory its types")]

use core::mem::offset_of;
use core::sync::atomic::{AtomicI32, AtomicU32, AtomicU64};

use mullion_accounting::Slot;
use mullion_region::{MAX_DEVICES, extension, page, usage};

use super::fault::{Mark, Word};
use crate::sys;

/// A card's entry of the control page.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct PageCard {
    uuid: [u8; page::UUID_SIZE],
    pub(crate) memory_limit: AtomicU64,
    pub(crate) real_memory: AtomicU64,
    pub(crate) core_percent: AtomicU32,
    flags: AtomicU32,
    pub(crate) rate: AtomicU64,
    pub(crate) scale: AtomicU32,
    reserved: u32,
    pub(crate) burst: AtomicU64,
    rest: [u8; 80],
}

/// The control page. A limit given by hand has one of its own, in private memory, so that nobody has to tell the two
/// apart.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct Page {
    magic: [u8; 8],
    version: u32,
    len: u32,
    pub(crate) sequence: AtomicU64,
    pub(crate) heartbeat: AtomicU64,
    pub(crate) futex: AtomicU32,
    enforcement: AtomicU32,
    card_count: AtomicU32,
    card_size: AtomicU32,
    grant: AtomicU64,
    reserved: [u8; 72],
    pub(crate) cards: [PageCard; MAX_DEVICES],
    rest: [u8; 896],
}

/// A card's words in the extension of the usage file.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct CardWords {
    /// T.
    pub(crate) total: Word,
    line0: [u64; 7],
    pub(crate) tat: AtomicU64,
    line1: [u64; 7],
    pub(crate) limit_hits: AtomicU64,
    pub(crate) card_full: AtomicU64,
    pub(crate) peak: AtomicU64,
    pub(crate) waits: AtomicU64,
    pub(crate) wait_ns: AtomicU64,
    pub(crate) first_launch: AtomicU64,
    pub(crate) last_launch: AtomicU64,
    pub(crate) spent_ns: AtomicU64,
    /// What a context took of this card, the least that was seen; 0 = none was.
    pub(crate) context_bytes: AtomicU64,
    line3: [u64; 7],
}

/// Head and cards of the extension.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct Hot {
    magic: [u8; 8],
    version: u32,
    len: u32,
    pub(crate) high_water: Mark,
    reserved0: u32,
    pub(crate) attached: AtomicU64,
    pub(crate) foreign: AtomicU64,
    pub(crate) escapes: AtomicU64,
    pub(crate) refused: AtomicU64,
    reserved1: u64,
    pub(crate) cards: [CardWords; MAX_DEVICES],
}

/// HAMi's process slot, as far as it is used here. The agent writes the rest.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct HamiSlot {
    pub(crate) pid: AtomicI32,
    pub(crate) host_pid: AtomicI32,
    middle: [u8; 1920],
    pub(crate) status: AtomicI32,
    padding: u32,
    seqlock: AtomicU64,
    /// [`usage::owner_mark`] of this slot when a process of this library wrote it; HAMi's library never does.
    pub(crate) mark: AtomicU64,
    /// Which process has the slot, where its lock alone does not tell; else 0.
    life: AtomicU64,
}

/// What follows HAMi's slots.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct HamiTail {
    pub(crate) proc_num: AtomicI32,
    pub(crate) utilization_switch: AtomicI32,
    pub(crate) recent_kernel: AtomicI32,
    pub(crate) priority: AtomicI32,
    pub(crate) last_kernel_time: AtomicU64,
}

const _: () = {
    assert!(size_of::<Page>() == page::LEN && size_of::<PageCard>() == page::DEVICE_SIZE);
    assert!(
        offset_of!(Page, sequence) == page::SEQUENCE_AT && offset_of!(Page, heartbeat) == page::HEARTBEAT_AT
    );
    assert!(offset_of!(Page, futex) == page::FUTEX_AT && offset_of!(Page, cards) == page::DEVICES_AT);
    assert!(offset_of!(PageCard, memory_limit) == page::MEMORY_LIMIT_AT);
    assert!(offset_of!(PageCard, core_percent) == page::CORE_PERCENT_AT);
    assert!(offset_of!(PageCard, rate) == page::RATE_AT && offset_of!(PageCard, scale) == page::SCALE_AT);
    assert!(offset_of!(PageCard, burst) == page::BURST_AT);
    assert!(size_of::<CardWords>() == extension::CARD_SIZE);
    assert!(offset_of!(CardWords, tat) == extension::TAT_AT);
    assert!(offset_of!(CardWords, limit_hits) == extension::LIMIT_HITS_AT);
    assert!(offset_of!(CardWords, card_full) == extension::CARD_FULL_AT);
    assert!(offset_of!(CardWords, peak) == extension::PEAK_AT);
    assert!(offset_of!(CardWords, spent_ns) == extension::SPENT_NS_AT);
    assert!(offset_of!(CardWords, context_bytes) == extension::CONTEXT_AT);
    assert!(
        offset_of!(Hot, high_water) == extension::HIGH_WATER_AT
            && offset_of!(Hot, cards) == extension::CARDS_AT
    );
    assert!(
        offset_of!(Hot, attached) == extension::ATTACHED_AT
            && offset_of!(Hot, refused) == extension::REFUSED_AT
    );
    assert!(size_of::<Slot<Word>>() == extension::SLOT_SIZE);
    assert!(size_of::<HamiSlot>() == usage::SLOT_SIZE && offset_of!(HamiSlot, life) == usage::LIFE_AT);
    assert!(offset_of!(HamiSlot, status) == usage::STATUS_AT && offset_of!(HamiSlot, mark) == usage::MARK_AT);
    assert!(
        offset_of!(HamiTail, last_kernel_time) + usage::PROC_NUM_AT == usage::LAST_KERNEL_TIME_AT
            && offset_of!(HamiTail, priority) + usage::PROC_NUM_AT == usage::PRIORITY_AT
    );
};

/// A usage file mapped in whole, for as long as the process lives.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Region {
    base: *const u8,
}
// SAFETY: all that is reached through it is atomic.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    /// # Safety
    /// `base` is a mapping of [`usage::FILE_LEN`] bytes that only [`Self::unmap`] ends.
    pub(crate) const unsafe fn new(base: *const u8) -> Self {
        Self { base }
    }

    /// # Safety
    /// Nothing refers to the region any more, nor will.
    pub(crate) unsafe fn unmap(self) {
        // SAFETY: a mapping of this length, as `new` was told.
        unsafe { sys::unmap(self.base.cast_mut(), usage::FILE_LEN) };
    }

    /// # Safety
    /// `offset` is where a `T` of atomic words lies, inside the file and aligned.
    unsafe fn at<T>(self, offset: usize) -> &'static T {
        // SAFETY: inside the mapping, as the caller says.
        let place = unsafe { self.base.add(offset) };
        // SAFETY: the words are atomic, and the mapping stays.
        unsafe { &*place.cast::<T>() }
    }

    pub(crate) fn hot(self) -> &'static Hot {
        // SAFETY: the extension begins on a page of its own.
        unsafe { self.at(usage::EXTENSION_AT) }
    }

    /// The slots of card `card`.
    pub(crate) fn slots(self, card: usize) -> &'static [Slot<Word>; usage::SLOTS] {
        let offset = extension::card_slots_offset(card.min(MAX_DEVICES - 1)).unwrap_or(usage::EXTENSION_AT);
        // SAFETY: an offset of the layout.
        unsafe { self.at(offset) }
    }

    pub(crate) fn hami_slot(self, slot: usize) -> &'static HamiSlot {
        let offset = usage::slot_offset(slot.min(usage::SLOTS - 1)).unwrap_or(usage::SLOTS_AT);
        // SAFETY: an offset of the layout.
        unsafe { self.at(offset) }
    }

    pub(crate) fn hami_tail(self) -> &'static HamiTail {
        // SAFETY: an offset of the layout.
        unsafe { self.at(usage::PROC_NUM_AT) }
    }
}
