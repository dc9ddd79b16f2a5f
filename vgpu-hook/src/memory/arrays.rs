//! Arrays and mipmapped arrays.
//!
//! How much one takes the driver says only of arrays with deferred mapping, so one of the same shape is made for the
//! question; it takes nothing. Where the driver has no such arrays (before 11.6) the card is looked at before and
//! after.
//!
//! An array of up to 1 MiB shares a block with others, and nobody says which. So those of a card are charged together,
//! by the blocks that they have. Whether a new one took a block, or the end of one gave a block back, is seen by
//! looking before and after, and held between what is certain: they have at least as many blocks as their sizes fill, without
//! what the driver fills these up with, at most one for each, and none when there are none. Where the look does not say it
//! clearly, a new one took a block, and an end gave none back. Where an image is being loaded for long meanwhile, that may have
//! been the image's doing: then it is charged with both, as far as the arrays have blocks that are not certainly theirs.

use core::ffi::c_uint;
use core::sync::atomic::Ordering::{Relaxed, SeqCst};
use core::sync::atomic::{AtomicU64, fence};

use mullion_accounting::Entry;
use mullion_region::MAX_DEVICES;

use super::alone::{Alone, Change};
use super::blocks::{self, BLOCK, Served};
use super::contexts::bury_object;
use super::looks::From;
use super::{Books, Here, Kind, Pass, charge, counted, here, key_of};
use crate::container::{self, Card, Container};
use crate::cuda::{
    Array3dDescriptor, ArrayDescriptor, ArrayMemoryRequirements, CUarray, CUdevice, CUmipmappedArray,
    CUresult,
};
use crate::driver;

/// `CUDA_ARRAY3D_SPARSE`: its memory is that of the handles mapped to it.
const SPARSE: c_uint = 0x40;
/// `CUDA_ARRAY3D_DEFERRED_MAPPING`: the same.
const DEFERRED: c_uint = 0x80;

/// The small arrays of this process.
#[derive(Debug)]
pub(crate) struct Small {
    /// By card: a [`Group`], packed. One word, since a context that ends takes arrays along while another thread makes one.
    cards: [AtomicU64; MAX_DEVICES],
}

/// The small arrays of one card.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Group {
    count: u64,
    /// What they need together at least, in [`NEED_UNIT`]s, each rounded down.
    needed: u64,
    /// Blocks that are charged for them.
    blocks: u64,
}

/// 64 GiB of small arrays can be counted in these.
const NEED_UNIT: u64 = 4096;
const COUNT_BITS: u32 = 20;
const NEED_BITS: u32 = 24;

impl Group {
    const fn unpack(word: u64) -> Self {
        Self {
            count: word & ((1 << COUNT_BITS) - 1),
            needed: word >> COUNT_BITS & ((1 << NEED_BITS) - 1),
            blocks: word >> (COUNT_BITS + NEED_BITS),
        }
    }

    /// `None` where it is more than can be counted.
    fn pack(self) -> Option<u64> {
        let fits = self.count < 1 << COUNT_BITS && self.needed < 1 << NEED_BITS;
        fits.then_some(self.count | self.needed << COUNT_BITS | self.blocks << (COUNT_BITS + NEED_BITS))
    }

    /// Blocks that they have for certain.
    fn least(self) -> u64 {
        (self.needed * NEED_UNIT).div_ceil(BLOCK).min(self.count)
    }

    /// Between what is certain.
    fn believable(self) -> Self {
        Self { blocks: self.blocks.min(self.count).max(self.least()), ..self }
    }

    /// With one more, which needs `needed` bytes at least and seemed to take `taken` blocks.
    fn with(self, needed: u64, taken: u64) -> Self {
        let needed = self.needed + needed / NEED_UNIT;
        Self { count: self.count + 1, needed, blocks: self.blocks + taken }.believable()
    }

    /// Without one, which seemed to give back blocks.
    fn without(self, needed: u64, given_back: u64) -> Self {
        Self {
            count: self.count.saturating_sub(1),
            needed: self.needed.saturating_sub(needed / NEED_UNIT),
            blocks: self.blocks.saturating_sub(given_back),
        }
        .believable()
    }

    /// Whether one that needs `needed` bytes at least may fit into the blocks that there are.
    fn may_have_room(self, needed: u64) -> bool {
        self.needed * NEED_UNIT + needed <= self.blocks * BLOCK
    }
}

impl Small {
    pub(super) const fn new() -> Self {
        Self { cards: [const { AtomicU64::new(0) }; MAX_DEVICES] }
    }

    fn group(&self, card: &Card) -> Group {
        self.cards
            .get(usize::from(card.index))
            .map_or(Group::default(), |word| Group::unpack(word.load(Relaxed)))
    }

    /// Blocks that are charged and that they may do without.
    pub(super) fn spare(&self, card: &Card) -> u64 {
        let group = self.group(card);
        group.blocks.saturating_sub(group.least())
    }

    /// Changes the group of a card; what it was and is. `None` where it is more than can be counted.
    fn change(&self, card: &Card, change: impl Fn(Group) -> Group) -> Option<(Group, Group)> {
        let word = self.cards.get(usize::from(card.index))?;
        let before = word.fetch_update(Relaxed, Relaxed, |word| change(Group::unpack(word)).pack()).ok()?;
        let before = Group::unpack(before);
        Some((before, change(before)))
    }
}

/// A small array that needs `needed` bytes at least is gone, and seemed to give back blocks; `None` where that cannot be told.
pub(super) fn small_is_gone(container: &Container, card: &Card, needed: u64, given_back: Option<u64>) {
    let Books { small_arrays, measuring, .. } = &container.books;
    let blocks = given_back.unwrap_or(0);
    if blocks == 0 {
        measuring.doubt(card, given_back.is_some());
    }
    if let Some((before, after)) = small_arrays.change(card, |group| group.without(needed, blocks)) {
        card.memory.adjust(before.blocks * BLOCK, after.blocks * BLOCK);
    }
}

/// What one array needs, by the driver's word: the size, filled up to the alignment.
impl ArrayMemoryRequirements {
    const fn at_most(&self) -> u64 {
        self.size as u64
    }

    /// Many that are small need less together than the sum of their sizes filled up.
    const fn at_least(&self) -> u64 {
        (self.size as u64).saturating_sub((self.alignment as u64).saturating_sub(1))
    }
}

/// What an array of this shape needs, by the driver's word. Else why the driver does not make one with deferred mapping, which
/// may be the shape's fault; `None` where it has none, or does not say what they need.
fn needed(
    device: CUdevice,
    shape: &Array3dDescriptor,
    levels: Option<c_uint>,
) -> Result<ArrayMemoryRequirements, Option<CUresult>> {
    let mut question = *shape;
    question.flags |= DEFERRED;
    let mut requirements = ArrayMemoryRequirements::default();
    let mut handle = core::ptr::null_mut();
    if let Some(levels) = levels {
        let make = driver::function!(cuMipmappedArrayCreate: unsafe extern "C" fn(*mut CUmipmappedArray, *const Array3dDescriptor, c_uint) -> CUresult).ok_or(None)?;
        let ask = driver::function!(cuMipmappedArrayGetMemoryRequirements: unsafe extern "C" fn(*mut ArrayMemoryRequirements, CUmipmappedArray, CUdevice) -> CUresult).ok_or(None)?;
        let end =
            driver::function!(cuMipmappedArrayDestroy: unsafe extern "C" fn(CUmipmappedArray) -> CUresult)
                .ok_or(None)?;
        // SAFETY: a shape and a place of ours.
        let result = unsafe { make(&raw mut handle, &raw const question, levels) };
        if !result.is_ok() {
            return Err(Some(result));
        }
        // SAFETY: the array just made.
        let result = unsafe { ask(&raw mut requirements, handle, device) };
        // SAFETY: nobody else knows of it.
        let _ = unsafe { end(handle) };
        return if result.is_ok() { Ok(requirements) } else { Err(None) };
    }
    let make = driver::function!(cuArray3DCreate_v2: unsafe extern "C" fn(*mut CUarray, *const Array3dDescriptor) -> CUresult).ok_or(None)?;
    let ask = driver::function!(cuArrayGetMemoryRequirements: unsafe extern "C" fn(*mut ArrayMemoryRequirements, CUarray, CUdevice) -> CUresult).ok_or(None)?;
    let end = driver::function!(cuArrayDestroy: unsafe extern "C" fn(CUarray) -> CUresult).ok_or(None)?;
    // SAFETY: a shape and a place of ours.
    let result = unsafe { make(&raw mut handle, &raw const question) };
    if !result.is_ok() {
        return Err(Some(result));
    }
    // SAFETY: the array just made.
    let result = unsafe { ask(&raw mut requirements, handle, device) };
    // SAFETY: nobody else knows of it.
    let _ = unsafe { end(handle) };
    if result.is_ok() { Ok(requirements) } else { Err(None) }
}

/// At least so much an array of this shape takes: 16 bytes per element is the most that there is.
fn least(shape: &Array3dDescriptor) -> u64 {
    let side = |side: usize| (side as u64).max(1);
    side(shape.width).saturating_mul(side(shape.height)).saturating_mul(side(shape.depth))
}

/// Makes an array.
///
/// # Safety
/// `place` is null or a place for a handle, `shape` null or a shape.
unsafe fn create(
    kind: Kind,
    place: *mut CUarray,
    shape: *const Array3dDescriptor,
    levels: Option<c_uint>,
    mut real: impl FnMut(*mut CUarray) -> CUresult,
) -> CUresult {
    // SAFETY: as the caller says.
    let shape = unsafe { shape.as_ref() };
    let (now, shape) = match (here(), shape) {
        (Ok(now), Some(shape)) if !place.is_null() && shape.flags & (SPARSE | DEFERRED) == 0 => (now, shape),
        (Err(Pass::Refused(result)), _) => return result,
        _ => return real(place),
    };
    let device = now.container.device(now.card).unwrap_or(0);
    let made = match needed(device, shape, levels) {
        Ok(needed) => match blocks::served(needed.at_most()) {
            Served::Blocks(size) => create_large(now, kind, size, &mut real),
            Served::Piece => create_small(now, kind, needed.at_least(), &mut real),
        },
        Err(why) => create_unknown(now, kind, least(shape), why, &mut real),
    };
    match made {
        Ok(made) => {
            // SAFETY: not null, so the caller's place for a result.
            unsafe { place.write(made) };
            CUresult::SUCCESS
        }
        Err(result) => result,
    }
}

type Made = Result<CUarray, CUresult>;

#[cold]
fn refused(card: &Card) -> Made {
    charge::refused(card);
    Err(CUresult::OUT_OF_MEMORY)
}

fn ask_driver(real: &mut impl FnMut(*mut CUarray) -> CUresult) -> Made {
    let mut made = core::ptr::null_mut();
    container::fault_point();
    let result = real(&raw mut made);
    container::fault_point();
    if result.is_ok() { Ok(made) } else { Err(result) }
}

fn enter(now: Here, kind: Kind, made: CUarray, as_kind: Kind, size: u64) {
    let objects = &now.container.books.objects;
    let key = key_of(kind, made.addr() as u64);
    let entry = Entry { size, card: now.card.index, kind: as_kind as u8, note: now.context };
    bury_object(now, key);
    let _ = objects.insert(key, &entry);
    fence(SeqCst);
    // The context ended while the driver was asked: it took the array along.
    if now.is_over() && objects.take_if(key, |found| *found == entry).is_some() {
        if as_kind == Kind::SmallArray {
            small_is_gone(now.container, now.card, size, None);
        } else {
            now.card.memory.free(size);
        }
    }
}

/// Makes one that gets blocks of its own, `size` bytes of them.
fn create_large(now: Here, kind: Kind, size: u64, real: &mut impl FnMut(*mut CUarray) -> CUresult) -> Made {
    let claim = charge::ask(now.container, now.card, size).ok_or(CUresult::OUT_OF_MEMORY)?;
    let made = match ask_driver(real) {
        Ok(made) => made,
        Err(result) => {
            charge::undo(now.card, claim, result);
            return Err(result);
        }
    };
    charge::settle(now.card, claim);
    enter(now, kind, made, kind, size);
    Ok(made)
}

/// Makes one that shares a block, and needs `needed` bytes of it at least.
fn create_small(now: Here, kind: Kind, needed: u64, real: &mut impl FnMut(*mut CUarray) -> CUresult) -> Made {
    let books = &now.container.books;
    let looking = books.measuring.alone(now.card);
    let paid = charge::advance(now.container, now.card, BLOCK).unwrap_or(0);
    if paid == 0 && !books.small_arrays.group(now.card).may_have_room(needed) {
        return refused(now.card);
    }
    let (made, change) = make_between_looks(now, &looking, paid, real)?;
    enter_small(now, kind, made, paid, needed, blocks_of(&looking, now.card, change, 1))
}

/// Makes one of which the driver does not say what it takes: at least `least` bytes.
fn create_unknown(
    now: Here,
    kind: Kind,
    least: u64,
    why: Option<CUresult>,
    real: &mut impl FnMut(*mut CUarray) -> CUresult,
) -> Made {
    let looking = now.container.books.measuring.alone(now.card);
    let Some(paid) = charge::advance(now.container, now.card, blocks::round_up(least, BLOCK)) else {
        if why.is_some() {
            // Perhaps there is no such array: then the driver's answer counts, and not that there is no room.
            destroy_at_driver(kind, ask_driver(real)?);
        }
        return refused(now.card);
    };
    let (made, change) = make_between_looks(now, &looking, paid, real)?;
    let change = change.and_then(Change::alone);
    let seen = change.map_or(paid, |taken| u64::try_from(taken).unwrap_or(0));
    if seen <= BLOCK && least <= blocks::LARGEST_PIECE {
        return enter_small(now, kind, made, paid, least, change.map(|_| u64::from(seen > 0)));
    }
    // Up to 16 bytes for each element, where 1 was the least, and rows and levels that are filled up.
    let most = blocks::round_up(least.saturating_mul(64), BLOCK);
    let more = blocks::round_up(seen.min(most).max(paid), BLOCK) - paid;
    let Some(claim) = charge::try_ask(now.container, now.card, more) else {
        return take_back(now, kind, made, paid);
    };
    charge::settle(now.card, claim);
    enter(now, kind, made, kind, paid + more);
    Ok(made)
}

/// Makes one for which `paid` bytes are charged already; also by how much more is in use then.
fn make_between_looks(
    now: Here,
    looking: &Alone<'_>,
    paid: u64,
    real: &mut impl FnMut(*mut CUarray) -> CUresult,
) -> Result<(CUarray, Option<Change>), CUresult> {
    let look = || looking.glance(now.container, now.card, From::Here);
    let before = look();
    match ask_driver(real) {
        Ok(made) => Ok((made, looking.change(before, look()))),
        Err(result) => {
            charge::undo_advance(now.card, paid, result);
            Err(result)
        }
    }
}

/// Charges a new small array, for which `paid` bytes are charged already and which seemed to take `taken` blocks; `None` where
/// that cannot be told.
fn enter_small(now: Here, kind: Kind, made: CUarray, paid: u64, needed: u64, taken: Option<u64>) -> Made {
    let Books { small_arrays: small, measuring, .. } = &now.container.books;
    let blocks = taken.unwrap_or(1);
    let Some((before, after)) = small.change(now.card, |group| group.with(needed, blocks)) else {
        return take_back(now, kind, made, paid);
    };
    let due = after.blocks.saturating_sub(before.blocks) * BLOCK;
    if due > paid {
        let _ = small.change(now.card, |group| group.without(needed, blocks));
        return take_back(now, kind, made, paid);
    }
    if blocks > 0 {
        measuring.doubt(now.card, taken.is_some());
    }
    now.card.memory.free(paid - due);
    enter(now, kind, made, Kind::SmallArray, needed);
    Ok(made)
}

/// What there is no room for after all goes back.
#[cold]
fn take_back(now: Here, kind: Kind, made: CUarray, paid: u64) -> Made {
    destroy_at_driver(kind, made);
    now.card.memory.free(paid);
    refused(now.card)
}

/// Blocks that one small array took or gave back when so much `change` was seen: one or none. `None` where that cannot have
/// been its doing alone, or may not have been. `harmless` is the answer with which it is charged no less than with the other.
fn blocks_of(looking: &Alone<'_>, card: &Card, change: Option<Change>, harmless: u64) -> Option<u64> {
    let change = change?;
    if change.bytes == 0 || change.bytes == BLOCK.cast_signed() {
        let blocks = u64::from(change.bytes != 0);
        return (blocks == harmless || looking.believes(card, change)).then_some(blocks);
    }
    if change.alone().is_some() {
        looking.is_disturbed();
    }
    None
}

#[cold]
fn destroy_at_driver(kind: Kind, handle: CUarray) {
    let end = if kind == Kind::Mipmap {
        driver::function!(cuMipmappedArrayDestroy: unsafe extern "C" fn(CUarray) -> CUresult)
    } else {
        driver::function!(cuArrayDestroy: unsafe extern "C" fn(CUarray) -> CUresult)
    };
    if let Some(end) = end {
        // SAFETY: an array that nobody knows of.
        let _ = unsafe { end(handle) };
    }
}

/// `cuArrayCreate`.
///
/// # Safety
/// As `cuArrayCreate_v2`.
pub(crate) unsafe fn array_create(
    real: unsafe extern "C" fn(*mut CUarray, *const ArrayDescriptor) -> CUresult,
    array: *mut CUarray,
    descriptor: *const ArrayDescriptor,
) -> CUresult {
    // SAFETY: null, or the caller's shape.
    let shape = unsafe { descriptor.as_ref() }.map(|flat| Array3dDescriptor {
        width: flat.width,
        height: flat.height,
        depth: 0,
        format: flat.format,
        channels: flat.channels,
        flags: 0,
    });
    let shape = shape.as_ref().map_or(core::ptr::null(), core::ptr::from_ref);
    // SAFETY: the caller's own arguments; the handle goes to a place of ours.
    let real = |place| unsafe { real(place, descriptor) };
    // SAFETY: null, or valid as the caller says.
    unsafe { create(Kind::Array, array, shape, None, real) }
}

/// `cuArray3DCreate`.
///
/// # Safety
/// As `cuArray3DCreate_v2`.
pub(crate) unsafe fn array_3d_create(
    real: unsafe extern "C" fn(*mut CUarray, *const Array3dDescriptor) -> CUresult,
    array: *mut CUarray,
    descriptor: *const Array3dDescriptor,
) -> CUresult {
    // SAFETY: the caller's own arguments; the handle goes to a place of ours.
    let real = |place| unsafe { real(place, descriptor) };
    // SAFETY: null, or valid as the caller says.
    unsafe { create(Kind::Array, array, descriptor, None, real) }
}

/// `cuMipmappedArrayCreate`.
///
/// # Safety
/// As `cuMipmappedArrayCreate`.
pub(crate) unsafe fn mipmap_create(
    real: unsafe extern "C" fn(*mut CUmipmappedArray, *const Array3dDescriptor, c_uint) -> CUresult,
    array: *mut CUmipmappedArray,
    descriptor: *const Array3dDescriptor,
    levels: c_uint,
) -> CUresult {
    // SAFETY: the caller's own arguments; the handle goes to a place of ours.
    let real = |place| unsafe { real(place, descriptor, levels) };
    // SAFETY: null, or valid as the caller says.
    unsafe { create(Kind::Mipmap, array, descriptor, Some(levels), real) }
}

/// `cuArrayDestroy`. Levels and planes of others are in no table, the driver refuses them.
///
/// # Safety
/// As `cuArrayDestroy`.
pub(crate) unsafe fn array_destroy(
    real: unsafe extern "C" fn(CUarray) -> CUresult,
    array: CUarray,
) -> CUresult {
    // SAFETY: the caller's own argument.
    destroy(Kind::Array, array, || unsafe { real(array) })
}

/// `cuMipmappedArrayDestroy`.
///
/// # Safety
/// As `cuMipmappedArrayDestroy`.
pub(crate) unsafe fn mipmap_destroy(
    real: unsafe extern "C" fn(CUmipmappedArray) -> CUresult,
    array: CUmipmappedArray,
) -> CUresult {
    // SAFETY: the caller's own argument.
    destroy(Kind::Mipmap, array, || unsafe { real(array) })
}

fn destroy(kind: Kind, handle: CUarray, real: impl FnOnce() -> CUresult) -> CUresult {
    let Ok(container) = counted() else { return real() };
    let key = key_of(kind, handle.addr() as u64);
    let ended = container.books.contexts.ended();
    let Some(entry) = container.books.objects.take(key) else { return real() };
    let Some(card) = container.card_at(entry.card) else { return real() };
    let is_gone =
        |result: CUresult| result.is_ok() || container.books.is_gone_all_the_same(key, &entry, ended, result);
    if entry.kind == Kind::SmallArray as u8 {
        return destroy_small(container, card, &entry, real, is_gone);
    }
    let _hidden = container.books.measuring.hidden(card);
    container::fault_point();
    let result = real();
    container::fault_point();
    if is_gone(result) {
        card.memory.free(entry.size);
    }
    result
}

fn destroy_small(
    container: &'static Container,
    card: &'static Card,
    entry: &Entry,
    real: impl FnOnce() -> CUresult,
    is_gone: impl FnOnce(CUresult) -> bool,
) -> CUresult {
    let looking = container.books.measuring.alone(card);
    // Its context need not be the current one.
    let look = || looking.glance(container, card, From::Context(entry.note));
    let before = look();
    container::fault_point();
    let result = real();
    container::fault_point();
    if is_gone(result) {
        let Group { count, blocks, .. } = container.books.small_arrays.group(card);
        // Where each has a block, one goes whatever is believed: then no answer is passed over that a later one could be believed for.
        let is_told = |change: &Change| blocks < count || change.alone().is_some();
        let change = if result.is_ok() { looking.change(look(), before).filter(is_told) } else { None };
        let given_back = blocks_of(&looking, card, change, 0);
        small_is_gone(container, card, entry.size, given_back);
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_of_small_arrays_stay_between_what_is_certain() {
        for (case, blocks, needed, count, want) in [
            ("as seen", 3, 4 << 20, 5, 3),
            ("no fewer than they fill", 1, (4 << 20) + NEED_UNIT, 5, 3),
            ("no more than one for each", 9, NEED_UNIT, 2, 2),
            ("none when there are none", 4, 0, 0, 0),
            ("some that need next to nothing", 0, 0, 1, 0),
        ] {
            let group = Group { count, needed: needed / NEED_UNIT, blocks };
            assert_eq!(group.believable(), Group { blocks: want, ..group }, "{case}");
        }
    }

    #[test]
    fn a_group_grows_and_goes() {
        let mut group = Group::default();
        for taken in [1, 1, 0] {
            group = group.with(64 << 10, taken);
        }
        assert_eq!((group.count, group.blocks), (3, 2));
        assert!(group.may_have_room(3 << 20) && !group.may_have_room(4 << 20));
        assert_eq!(group.with(2 << 20, 0).blocks, 2);
        assert_eq!(group.with(4 << 20, 0).blocks, 3);
        assert_eq!(group.without(64 << 10, 1), Group { count: 2, needed: 32, blocks: 1 });
        for _ in 0..3 {
            group = group.without(64 << 10, 0);
        }
        assert_eq!(group, Group::default());
    }

    #[test]
    fn a_group_is_one_word_as_far_as_it_goes() {
        let most =
            Group { count: (1 << COUNT_BITS) - 1, needed: (1 << NEED_BITS) - 1, blocks: (1 << 20) - 1 };
        assert_eq!(most.pack().map(Group::unpack), Some(most));
        assert_eq!(most.with(1, 0).pack(), None, "one array too many");
        assert_eq!(Group { count: 1, ..most }.with(NEED_UNIT, 0).pack(), None, "too much memory");
    }
}
