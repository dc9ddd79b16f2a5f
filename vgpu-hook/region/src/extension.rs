//! Our part of the usage file, at [`EXTENSION_AT`]: what the library counts and what it
//! decides by. Version 1; every word is little-endian, naturally aligned and changed by atomic operations only.
//!
//! The hot part, 16 KiB, all that the agent reads each second:
//!
//! | offset | size | field |
//! | ---: | ---: | --- |
//! | 0 | 8 | magic, `MULUSAGE` |
//! | 8 | 4 | version, 1 |
//! | 12 | 4 | length of the extension, 278,528 |
//! | 16 | 4 | high-water mark: one more than the highest slot that was ever claimed |
//! | 24 | 8 | processes that ever attached |
//! | 32 | 8 | slots seen that another library took |
//! | 40 | 8 | escapes: look-ups that could not be answered with a wrapper |
//! | 48 | 8 | processes whose `cuInit` was refused |
//! | 64 | 16 x 256 | cards |
//! | 4160 | | reserved, zero |
//!
//! Card `d`, at `64 + 256 * d`, in cache lines of 64 bytes:
//!
//! | offset | field |
//! | ---: | --- |
//! | 0 | total T: bytes, never less than what the container's processes hold |
//! | 64 | tat of the launch bucket, `CLOCK_MONOTONIC` ns |
//! | 128 | allocations that the limit refused |
//! | 136 | allocations within the limit that the driver refused because the card itself was full |
//! | 144 | highest total seen, bytes |
//! | 152 | launches that waited |
//! | 160 | ns that launches waited |
//! | 168 | first launch, `CLOCK_REALTIME` ns, 0 = none |
//! | 176 | last launch, the same, at most a second late |
//! | 184 | card time charged to launches, ns, an estimate |
//! | 192 | what a context takes of the card, the least that was seen, bytes; 0 = none was |
//!
//! Behind the hot part come the slots, 16 KiB a card: slot `s` of card `d` at `16,384 + 16,384 * d + 16 * s` is
//! claimed C and settled B, both in bytes (`mullion-accounting` says what they mean).
//!
//! A slot belongs to the process that holds the write lock of the slot's byte at [`LOCK_AT`]` + slot`, far behind the
//! end of the file: HAMi's library locks the bytes of its struct and would wait for a byte held among them.

use crate::bytes::{array, put, u32_at, u64_at};
use crate::usage::{EXTENSION_AT, SLOTS};
use crate::{Error, MAX_DEVICES};

/// First eight bytes.
pub const MAGIC: [u8; 8] = *b"MULUSAGE";
/// Version of the layout.
pub const VERSION: u32 = 1;
/// Length of the extension.
pub const LEN: usize = HOT_LEN + MAX_DEVICES * CARD_SLOTS_LEN;
/// Length of the part that the agent reads at every look.
pub const HOT_LEN: usize = 16 * 1024;
/// Length of the header, before the cards.
pub const HEADER_LEN: usize = 64;

/// Offset of the version.
pub const VERSION_AT: usize = 8;
/// Offset of the extension's length.
pub const LENGTH_AT: usize = 12;
/// Offset of the high-water mark, u32.
pub const HIGH_WATER_AT: usize = 16;
/// Offset of the number of processes that ever attached.
pub const ATTACHED_AT: usize = 24;
/// Offset of the number of foreign slots seen.
pub const FOREIGN_AT: usize = 32;
/// Offset of the number of escapes.
pub const ESCAPES_AT: usize = 40;
/// Offset of the number of processes whose `cuInit` was refused.
pub const REFUSED_AT: usize = 48;

/// Offset of the first card.
pub const CARDS_AT: usize = HEADER_LEN;
/// Size of a card.
pub const CARD_SIZE: usize = 256;
/// Offset in a card of the total T.
pub const TOTAL_AT: usize = 0;
/// Offset in a card of the launch bucket's word.
pub const TAT_AT: usize = 64;
/// Offset in a card of the number of refused allocations.
pub const LIMIT_HITS_AT: usize = 128;
/// Offset in a card of the number of allocations that failed because the card was full.
pub const CARD_FULL_AT: usize = 136;
/// Offset in a card of the highest total seen.
pub const PEAK_AT: usize = 144;
/// Offset in a card of the number of launches that waited.
pub const WAITS_AT: usize = 152;
/// Offset in a card of the time that launches waited.
pub const WAIT_NS_AT: usize = 160;
/// Offset in a card of the time of the first launch.
pub const FIRST_LAUNCH_AT: usize = 168;
/// Offset in a card of the time of the last launch.
pub const LAST_LAUNCH_AT: usize = 176;
/// Offset in a card of the card time charged.
pub const SPENT_NS_AT: usize = 184;
/// Offset in a card of what a context takes.
pub const CONTEXT_AT: usize = 192;
/// Offset of what is reserved behind the cards.
pub const NOTES_AT: usize = CARDS_AT + MAX_DEVICES * CARD_SIZE;

/// Offset of the first card's slots.
pub const SLOTS_AT: usize = HOT_LEN;
/// Size of a slot: C and B.
pub const SLOT_SIZE: usize = 16;
/// Offset in a slot of the bytes claimed, C.
pub const CLAIMED_AT: usize = 0;
/// Offset in a slot of the bytes settled, B.
pub const SETTLED_AT: usize = 8;
/// Size of all slots of one card.
pub const CARD_SLOTS_LEN: usize = SLOTS * SLOT_SIZE;

/// Offset in the file of the byte whose open-file-description write lock says that slot 0 is owned.
pub const LOCK_AT: u64 = 1 << 40;
/// Offset in the file of the byte on which slot 0's owner holds a POSIX write lock, by which the agent may find its
/// host pid. Only a hint: the lock is lost when the process closes any descriptor of the file.
pub const HINT_AT: u64 = 1 << 41;

#[expect(clippy::cast_possible_truncation, reason = "278,528")]
const LEN_WORD: u32 = LEN as u32;

const WHAT: &str = "usage file's extension";

const _: () = {
    assert!(LEN == 278_528 && LEN_WORD as usize == LEN && CARD_SLOTS_LEN == 16_384);
    assert!(CARD_SIZE.is_multiple_of(64) && CARDS_AT.is_multiple_of(64) && NOTES_AT == 4160);
    assert!(NOTES_AT <= HOT_LEN && HOT_LEN.is_multiple_of(4096) && EXTENSION_AT.is_multiple_of(4096));
    // T and tat have a cache line each, the counters one.
    assert!(TAT_AT == TOTAL_AT + 64 && LIMIT_HITS_AT == TAT_AT + 64 && SPENT_NS_AT + 8 <= LIMIT_HITS_AT + 64);
    assert!(
        HIGH_WATER_AT.is_multiple_of(4) && ATTACHED_AT.is_multiple_of(8) && LIMIT_HITS_AT.is_multiple_of(8)
    );
    assert!(SLOTS_AT.is_multiple_of(64) && SLOT_SIZE == SETTLED_AT + 8);
    assert!(HINT_AT - LOCK_AT > SLOTS as u64);
};

/// Offset in the file of card `card`, or `None` beyond the last.
#[must_use]
pub const fn card_offset(card: usize) -> Option<usize> {
    if card < MAX_DEVICES { Some(EXTENSION_AT + CARDS_AT + CARD_SIZE * card) } else { None }
}

/// Offset in the file of the slots of card `card`, or `None` beyond the last.
#[must_use]
pub const fn card_slots_offset(card: usize) -> Option<usize> {
    if card < MAX_DEVICES { Some(EXTENSION_AT + SLOTS_AT + CARD_SLOTS_LEN * card) } else { None }
}

/// Offset in the file of slot `slot` of card `card`, or `None` beyond the last.
#[must_use]
pub const fn slot_offset(card: usize, slot: usize) -> Option<usize> {
    match card_slots_offset(card) {
        Some(slots) if slot < SLOTS => Some(slots + SLOT_SIZE * slot),
        _ => None,
    }
}

/// The bytes of a new extension that are not zero.
#[must_use]
pub fn header() -> [u8; HEADER_LEN] {
    let mut header = [0; HEADER_LEN];
    put(&mut header, 0, &MAGIC);
    put(&mut header, VERSION_AT, &VERSION.to_le_bytes());
    put(&mut header, LENGTH_AT, &LEN_WORD.to_le_bytes());
    header
}

/// Checks the extension's header: `bytes` is what lies at [`EXTENSION_AT`].
///
/// # Errors
/// [`Error`] names the first field that is not as [`header`] writes it.
pub fn check(bytes: &[u8]) -> Result<(), Error> {
    let short = Error::TooShort { what: WHAT, need: HEADER_LEN as u64, found: bytes.len() as u64 };
    let bytes = bytes.first_chunk::<HEADER_LEN>().ok_or(short)?;
    let magic = array::<8>(bytes, 0).ok_or(short)?;
    if magic != MAGIC {
        return Err(Error::Magic { what: WHAT, found: u64::from_le_bytes(magic) });
    }
    let version = u32_at(bytes, VERSION_AT).ok_or(short)?;
    if version != VERSION {
        return Err(Error::Version { what: WHAT, found: version, known: VERSION });
    }
    let length = u32_at(bytes, LENGTH_AT).ok_or(short)?;
    if length != LEN_WORD {
        return Err(Error::Length { what: WHAT, found: length, known: LEN_WORD });
    }
    Ok(())
}

/// The hot part, read. Every number is the tenant's word.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Hot {
    /// One more than the highest slot that was ever claimed, at most [`SLOTS`].
    pub high_water: usize,
    /// Processes that ever attached; 0 says that the library never ran.
    pub attached: u64,
    /// Slots seen that another library took.
    pub foreign: u64,
    /// Look-ups that could not be answered with a wrapper.
    pub escapes: u64,
    /// Processes whose `cuInit` was refused.
    pub refused: u64,
    /// The cards in the container's order; those that the container lacks are zero.
    pub cards: [CardHot; MAX_DEVICES],
}

/// One card of the hot part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CardHot {
    /// T: bytes, never less than what the container's processes hold.
    pub total: u64,
    /// The launch bucket's word, `CLOCK_MONOTONIC` ns.
    pub tat: u64,
    /// Allocations that the limit refused.
    pub limit_hits: u64,
    /// Allocations within the limit that the driver refused because the card itself was full.
    pub card_full: u64,
    /// Highest total seen, bytes.
    pub peak: u64,
    /// Launches that waited.
    pub waits: u64,
    /// Time that launches waited, ns.
    pub wait_ns: u64,
    /// First launch, `CLOCK_REALTIME` ns, 0 = none.
    pub first_launch: u64,
    /// Last launch, the same, at most a second late.
    pub last_launch: u64,
    /// Card time charged to launches, ns, an estimate.
    pub spent_ns: u64,
}

/// Reads the hot part: `bytes` is what lies at [`EXTENSION_AT`], [`HOT_LEN`] of it or at least the cards.
///
/// # Errors
/// [`Error`] of [`check`], [`Error::TooShort`], and [`Error::HighWater`] for more slots than there are.
pub fn read_hot(bytes: &[u8]) -> Result<Hot, Error> {
    check(bytes)?;
    let short = Error::TooShort { what: WHAT, need: NOTES_AT as u64, found: bytes.len() as u64 };
    let word = |at: usize| u64_at(bytes, at).ok_or(short);
    let found = u32_at(bytes, HIGH_WATER_AT).ok_or(short)?;
    let high_water = usize::try_from(found).ok().filter(|n| *n <= SLOTS).ok_or(Error::HighWater { found })?;
    let mut cards = [CardHot::default(); MAX_DEVICES];
    for (index, card) in cards.iter_mut().enumerate() {
        let at = CARDS_AT + CARD_SIZE * index;
        *card = CardHot {
            total: word(at + TOTAL_AT)?,
            tat: word(at + TAT_AT)?,
            limit_hits: word(at + LIMIT_HITS_AT)?,
            card_full: word(at + CARD_FULL_AT)?,
            peak: word(at + PEAK_AT)?,
            waits: word(at + WAITS_AT)?,
            wait_ns: word(at + WAIT_NS_AT)?,
            first_launch: word(at + FIRST_LAUNCH_AT)?,
            last_launch: word(at + LAST_LAUNCH_AT)?,
            spent_ns: word(at + SPENT_NS_AT)?,
        };
    }
    Ok(Hot {
        high_water,
        attached: word(ATTACHED_AT)?,
        foreign: word(FOREIGN_AT)?,
        escapes: word(ESCAPES_AT)?,
        refused: word(REFUSED_AT)?,
        cards,
    })
}

/// The words of one slot of one card.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Slot {
    /// C: bytes that the owner holds or is asking for.
    pub claimed: u64,
    /// B: bytes of the total that stand for this slot.
    pub settled: u64,
}

/// The slots of one card from slot 0 on: `bytes` is what lies at [`card_slots_offset`]; as many as it holds whole are
/// read.
pub fn slots(bytes: &[u8]) -> impl Iterator<Item = Slot> {
    bytes.chunks_exact(SLOT_SIZE).take(SLOTS).map(|slot| Slot {
        claimed: u64_at(slot, CLAIMED_AT).unwrap_or_default(),
        settled: u64_at(slot, SETTLED_AT).unwrap_or_default(),
    })
}
