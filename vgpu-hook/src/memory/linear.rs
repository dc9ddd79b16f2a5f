//! `cuMemAlloc`, `cuMemAllocPitch`, `cuMemAllocManaged`, `cuMemFree`.

use core::ffi::c_uint;
use core::sync::atomic::Ordering::SeqCst;
use core::sync::atomic::fence;

use mullion_accounting::Entry;

use super::blocks::{self, BLOCK, Entered, Served};
use super::{Here, Kind, Pass, charge, counted, here};
use crate::container::{self, Card, Container};
use crate::cuda::{CUdeviceptr, CUresult};
use crate::driver;
use crate::sys;

/// `cuMemAlloc`.
///
/// # Safety
/// As `cuMemAlloc_v2`.
#[inline]
pub(crate) unsafe fn alloc(
    real: unsafe extern "C" fn(*mut CUdeviceptr, usize) -> CUresult,
    pointer: *mut CUdeviceptr,
    bytes: usize,
) -> CUresult {
    // SAFETY: the caller's own size; the pointer is a place of ours.
    let ask = |place| unsafe { real(place, bytes) };
    // SAFETY: null or the caller's place for a result.
    unsafe { allocate(pointer, bytes as u64, ask) }
}

/// `cuMemAllocManaged`: charged in full, although the driver may keep parts of it in the host's memory. What is on the
/// card at a time cannot be known, and all of it can be.
///
/// # Safety
/// As `cuMemAllocManaged`.
pub(crate) unsafe fn alloc_managed(
    real: unsafe extern "C" fn(*mut CUdeviceptr, usize, c_uint) -> CUresult,
    pointer: *mut CUdeviceptr,
    bytes: usize,
    flags: c_uint,
) -> CUresult {
    // SAFETY: the caller's own arguments; the pointer is a place of ours.
    let ask = |place| unsafe { real(place, bytes, flags) };
    // SAFETY: null or the caller's place for a result.
    unsafe { allocate(pointer, bytes as u64, ask) }
}

/// Row alignment that the driver uses for pitched memory on all cards so far, whatever the attribute says.
const PITCH: u64 = 512;
/// Sizes of an element that the driver knows.
const ELEMENTS: [c_uint; 3] = [4, 8, 16];

/// `cuMemAllocPitch`: charged with the pitch that the driver chose.
///
/// # Safety
/// As `cuMemAllocPitch_v2`.
pub(crate) unsafe fn alloc_pitch(
    real: unsafe extern "C" fn(*mut CUdeviceptr, *mut usize, usize, usize, c_uint) -> CUresult,
    pointer: *mut CUdeviceptr,
    pitch: *mut usize,
    width: usize,
    height: usize,
    element: c_uint,
) -> CUresult {
    let now = match here() {
        Ok(now) if !pointer.is_null() && !pitch.is_null() => now,
        Err(Pass::Refused(result)) => return result,
        // SAFETY: the caller's own arguments.
        _ => return unsafe { real(pointer, pitch, width, height, element) },
    };
    let expected = blocks::round_up(width as u64, PITCH).saturating_mul(height as u64);
    let (mut place, mut row) = (0, 0);
    let mut ask = |place: *mut CUdeviceptr| {
        // SAFETY: the caller's own arguments; the two results go to places of ours.
        unsafe { real(place, &raw mut row, width, height, element) }
    };
    let mut result = take(now, expected, &raw mut place, &mut ask);
    if result == CUresult::OUT_OF_MEMORY && !ELEMENTS.contains(&element) {
        // The driver says what is wrong before it looks for room.
        result = ask(&raw mut place);
        if result.is_ok() {
            free_at_driver(place);
            result = CUresult::OUT_OF_MEMORY;
        }
    }
    if !result.is_ok() {
        return result;
    }
    let actual = (row as u64).saturating_mul(height as u64);
    if actual != expected && !correct(now, place, expected, actual) {
        give_up(place);
        charge::refused(now.card);
        return CUresult::OUT_OF_MEMORY;
    }
    // SAFETY: not null, so the caller's place for a result.
    unsafe { pitch.write(row) };
    // SAFETY: as above.
    unsafe { pointer.write(place) };
    result
}

/// Counts what `ask` gets from the driver.
///
/// # Safety
/// `pointer` is null or a place for a result.
#[inline]
unsafe fn allocate(
    pointer: *mut CUdeviceptr,
    bytes: u64,
    mut ask: impl FnMut(*mut CUdeviceptr) -> CUresult,
) -> CUresult {
    let now = match here() {
        Ok(now) if !pointer.is_null() => now,
        Err(Pass::Refused(result)) => return result,
        _ => return ask(pointer),
    };
    let mut place = 0;
    let result = take(now, bytes, &raw mut place, &mut ask);
    if result.is_ok() {
        // SAFETY: not null, so the caller's place for a result.
        unsafe { pointer.write(place) };
    }
    result
}

/// Claims, asks the driver, settles, and enters the result into the books.
#[inline]
fn take(
    now: Here,
    bytes: u64,
    place: *mut CUdeviceptr,
    ask: &mut impl FnMut(*mut CUdeviceptr) -> CUresult,
) -> CUresult {
    let served = blocks::served(bytes);
    let size = match served {
        Served::Blocks(size) => size,
        Served::Piece => BLOCK,
    };
    let again = || match served {
        Served::Blocks(size) => charge::ask_again(now.container, now.card, size),
        Served::Piece => None,
    };
    let Some(claim) = charge::try_ask(now.container, now.card, size).or_else(again) else {
        return match served {
            Served::Piece => take_piece_of_known_block(now, bytes, place, ask),
            Served::Blocks(_) => {
                charge::refused(now.card);
                CUresult::OUT_OF_MEMORY
            }
        };
    };
    container::fault_point();
    let result = ask(place);
    container::fault_point();
    if !result.is_ok() {
        charge::undo(now.card, claim, result);
        return result;
    }
    // SAFETY: the driver has just written it, or left what was there.
    let address = unsafe { place.read() };
    let (kind, pays) = match served {
        Served::Blocks(_) => (Kind::Blocks, true),
        Served::Piece => match enter(now, address, bytes) {
            Entered::First => (Kind::Piece, true),
            Entered::Another => (Kind::Piece, false),
            Entered::Alone => (Kind::Blocks, true),
        },
    };
    let size = if kind == Kind::Piece { bytes } else { size };
    let entry = Entry { size, card: now.card.index, kind: kind as u8, note: now.context };
    let inserted = now.container.books.pointers.insert(address, &entry);
    // Behind the entry, for what `is_over` relies on.
    if pays {
        charge::settle(now.card, claim);
    } else {
        now.card.memory.undo(claim);
    }
    if inserted.is_ok() {
        if now.any_ends() {
            put_right(now, address, size, kind);
        }
        return result;
    }
    // No memory for the books: what cannot be counted is not given.
    free_at_driver(address);
    give_back(now.container, now.card, address, &entry);
    CUresult::OUT_OF_MEMORY
}

/// The driver has just given an address, which will be entered: what stands under it belongs to a context that is ending (see
/// [`Here::any_ends`]).
#[inline]
pub(super) fn bury(now: Here, address: CUdeviceptr) {
    if now.any_ends() {
        bury_stale(now, address);
    }
}

#[cold]
fn bury_stale(now: Here, address: CUdeviceptr) {
    // Unless it is this thread's context: then the address is another one's by now.
    if now.is_ended() {
        return;
    }
    if let Some(stale) = now.container.books.pointers.take(address) {
        is_gone_with_context(now.container, address, &stale);
    }
}

/// The same after the address was entered. The context itself may have ended while the driver was asked, and what was made in
/// it is gone: then another context's thread may have got the address since, and entered it.
#[cold]
fn put_right(now: Here, address: CUdeviceptr, size: u64, kind: Kind) {
    let own = Entry { size, card: now.card.index, kind: kind as u8, note: now.context };
    let is_over = now.is_ended();
    if let Some(entry) = now.container.books.pointers.take_if(address, |found| (*found == own) == is_over) {
        is_gone_with_context(now.container, address, &entry);
    }
}

/// An address is gone with its context.
#[cold]
pub(super) fn is_gone_with_context(container: &Container, address: CUdeviceptr, entry: &Entry) {
    if let Some(card) = container.card_at(entry.card) {
        give_back(container, card, address, entry);
    }
}

fn enter(now: Here, address: CUdeviceptr, bytes: u64) -> Entered {
    let blocks = now.container.books.blocks.get(usize::from(now.card.index));
    blocks.map_or(Entered::Alone, |blocks| blocks.enter(address, bytes))
}

/// There is no room for another block, but a piece may still fit into one that is paid for. Where the room that there is
/// turns out to be in holes, the driver takes a block beyond the limit, for as long as it takes to give it back.
#[cold]
fn take_piece_of_known_block(
    now: Here,
    bytes: u64,
    place: *mut CUdeviceptr,
    ask: &mut impl FnMut(*mut CUdeviceptr) -> CUresult,
) -> CUresult {
    let refuse = || {
        charge::refused(now.card);
        CUresult::OUT_OF_MEMORY
    };
    let blocks = now.container.books.blocks.get(usize::from(now.card.index));
    // For nothing the driver gives nothing, whatever room there is.
    if bytes > 0 && !blocks.is_some_and(|blocks| blocks.may_have_room(bytes)) {
        return refuse();
    }
    let _hidden = now.container.books.measuring.hidden(now.card);
    let result = ask(place);
    if !result.is_ok() {
        return result;
    }
    // SAFETY: the driver has just written it.
    let address = unsafe { place.read() };
    let entry = Entry { size: bytes, card: now.card.index, kind: Kind::Piece as u8, note: now.context };
    match enter(now, address, bytes) {
        Entered::Another => {
            if now.container.books.pointers.insert(address, &entry).is_ok() {
                // For what `is_over` relies on.
                fence(SeqCst);
                if now.any_ends() {
                    put_right(now, address, bytes, Kind::Piece);
                }
                return result;
            }
            free_at_driver(address);
            give_back(now.container, now.card, address, &entry);
        }
        // The room was in holes too small for it, and the driver took another block.
        Entered::First => {
            free_at_driver(address);
            // Unless another thread has a piece in it by now, for which nobody has paid.
            if blocks.is_some_and(|blocks| !blocks.leave(address, bytes)) {
                now.card.memory.force(BLOCK);
            }
        }
        Entered::Alone => free_at_driver(address),
    }
    refuse()
}

/// Changes the charge of a new allocation to what it really takes. `false` where the limit has no room for that.
#[cold]
fn correct(now: Here, address: CUdeviceptr, expected: u64, actual: u64) -> bool {
    let (Served::Blocks(before), Served::Blocks(after)) = (blocks::served(expected), blocks::served(actual))
    else {
        // Pieces differ within their block only.
        return blocks::served(expected) == blocks::served(actual) || correct_kind(now, address, actual);
    };
    let more = after.saturating_sub(before);
    let Some(claim) = charge::ask_to_the_end(now.container, now.card, more) else { return false };
    charge::settle(now.card, claim);
    // Where the entry went with its context meanwhile, it went as it was.
    let is_there = now.container.books.pointers.swap_size(address, after).is_some();
    now.card.memory.free(if is_there { before.saturating_sub(after) } else { more });
    true
}

/// The pitch made blocks out of a piece, or the other way round.
fn correct_kind(now: Here, address: CUdeviceptr, actual: u64) -> bool {
    let Some(old) = now.container.books.pointers.take(address) else { return false };
    give_back(now.container, now.card, address, &old);
    let size = match blocks::served(actual) {
        Served::Blocks(size) => size,
        Served::Piece => BLOCK,
    };
    let Some(claim) = charge::ask_to_the_end(now.container, now.card, size) else {
        return false;
    };
    let entry = Entry { size, card: now.card.index, kind: Kind::Blocks as u8, note: now.context };
    let inserted = now.container.books.pointers.insert(address, &entry);
    charge::settle(now.card, claim);
    if inserted.is_ok() && now.any_ends() {
        put_right(now, address, size, Kind::Blocks);
    }
    inserted.is_ok()
}

/// Frees what was just allocated and cannot be kept.
#[cold]
fn give_up(address: CUdeviceptr) {
    let Ok(container) = counted() else { return };
    let entry = container.books.pointers.take(address);
    free_at_driver(address);
    if let Some(entry) = entry
        && let Some(card) = container.card_at(entry.card)
    {
        give_back(container, card, address, &entry);
    }
}

#[cold]
fn free_at_driver(address: CUdeviceptr) {
    if let Some(free) = driver::function!(cuMemFree_v2: unsafe extern "C" fn(CUdeviceptr) -> CUresult) {
        // SAFETY: an allocation that nobody knows of.
        let _ = unsafe { free(address) };
    }
}

/// Takes a freed address off the account.
#[inline]
pub(super) fn give_back(container: &Container, card: &Card, address: CUdeviceptr, entry: &Entry) {
    if entry.kind == Kind::Piece as u8 {
        let blocks = container.books.blocks.get(usize::from(card.index));
        if blocks.is_some_and(|blocks| blocks.leave(address, entry.size)) {
            card.memory.free(BLOCK);
        }
    } else if entry.kind == Kind::Blocks as u8 {
        card.memory.free(entry.size);
    } else if entry.kind == Kind::Pooled as u8 {
        container.books.pools.left(entry.note);
    }
}

/// `cuMemFree`.
///
/// # Safety
/// As `cuMemFree_v2`.
#[inline]
pub(crate) unsafe fn free(
    real: unsafe extern "C" fn(CUdeviceptr) -> CUresult,
    pointer: CUdeviceptr,
) -> CUresult {
    // SAFETY: the caller's own argument.
    free_by(pointer, When::Now, || unsafe { real(pointer) })
}

/// When what is freed is free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum When {
    /// At the end of the call.
    Now,
    /// When its stream has come that far.
    InOrder,
}

/// Frees an address by whatever call.
#[inline]
pub(super) fn free_by(pointer: CUdeviceptr, when: When, real: impl FnOnce() -> CUresult) -> CUresult {
    let Ok(container) = counted() else { return real() };
    let Some(entry) = container.books.pointers.take(pointer) else { return free_unknown(container, real) };
    let Some(card) = container.card_at(entry.card) else { return real() };
    if entry.kind != Kind::Blocks as u8 {
        return free_part(container, card, pointer, &entry, when, real);
    }
    let _hidden = container.books.measuring.hidden(card);
    container::fault_point();
    let result = real();
    container::fault_point();
    if result.is_ok() || is_gone(container, pointer, when, result) {
        card.memory.free(entry.size);
    } else {
        put_back(container, pointer, &entry);
    }
    result
}

/// Frees a piece of a block or of a pool.
#[inline]
fn free_part(
    container: &Container,
    card: &Card,
    pointer: CUdeviceptr,
    entry: &Entry,
    when: When,
    real: impl FnOnce() -> CUresult,
) -> CUresult {
    let is_piece = entry.kind == Kind::Piece as u8;
    // Only afterwards it is known whether the block goes.
    let _hidden = is_piece.then(|| container.books.measuring.hidden(card));
    container::fault_point();
    let result = real();
    container::fault_point();
    if result.is_ok() || is_gone(container, pointer, when, result) {
        give_back(container, card, pointer, entry);
        if !is_piece && when == When::Now {
            container.books.pools.observe_all(container);
        }
    } else {
        put_back(container, pointer, entry);
    }
    result
}

/// The driver refused to free: the entry is back, unless its context has ended meanwhile and did not find it.
#[cold]
fn put_back(container: &Container, pointer: CUdeviceptr, entry: &Entry) {
    let _ = container.books.pointers.insert(pointer, entry);
    // As in `Here::is_over`.
    fence(SeqCst);
    // Of what is out of a pool `note` is no context, and it does not go with one.
    if entry.kind != Kind::Pooled as u8
        && container.books.has_ended(entry.note)
        && let Some(entry) = container.books.pointers.take_if(pointer, |found| found == entry)
    {
        is_gone_with_context(container, pointer, &entry);
    }
}

/// Whether a free failed because another thread had freed the same address: without an entry in the table, since that was
/// with this thread. Whoever has got the address since has an entry of its own.
#[inline]
fn is_gone(container: &Container, pointer: CUdeviceptr, when: When, why: CUresult) -> bool {
    // The address was nobody's when the driver was asked, so what the entry stood for was freed before.
    why == CUresult::INVALID_VALUE && (when == When::Now || is_freed(container, pointer))
}

/// How long the thread that got an address may need to enter it into the table, in pauses of 0.1 ms.
const ENTERING: u32 = 50;

/// Whether an address is nobody's, or somebody else's by now. What cannot be freed in a stream's order (a plain allocation) is
/// neither, and fails in the same way.
#[cold]
fn is_freed(container: &Container, pointer: CUdeviceptr) -> bool {
    (0..ENTERING).any(|_| {
        let is_freed = !is_there(pointer) || container.books.pointers.get(pointer).is_some();
        if !is_freed {
            sys::sleep_ns(100_000);
        }
        is_freed
    })
}

#[cold]
fn is_there(pointer: CUdeviceptr) -> bool {
    let ask = driver::function!(
        cuMemGetAddressRange_v2: unsafe extern "C" fn(*mut CUdeviceptr, *mut usize, CUdeviceptr) -> CUresult
    );
    let (mut base, mut size) = (0, 0);
    // SAFETY: the driver writes two numbers; it says no to an address that is none of its own.
    let result = ask.map(|ask| unsafe { ask(&raw mut base, &raw mut size, pointer) });
    // Any other answer is about something else.
    let unknown = [CUresult::INVALID_VALUE, CUresult::NOT_FOUND];
    result.is_none_or(|result| if result.is_ok() { base == pointer } else { !unknown.contains(&result) })
}

/// An address that is in no table: an imported one, one of a graph, or none at all. The driver knows.
#[cold]
fn free_unknown(container: &'static Container, real: impl FnOnce() -> CUresult) -> CUresult {
    let result = real();
    if result.is_ok() {
        container.books.pools.observe_all(container);
        container.books.graphs.observe_all(container);
    }
    result
}
