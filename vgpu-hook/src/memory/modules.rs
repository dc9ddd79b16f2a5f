//! Modules and libraries: code and globals, charged with what the process has more of after loading, or, where NVML does not
//! say that or the card is not shared, with what the card has less of.
//!
//! Small images share blocks, and nobody says which: the one that opens a block seems to take all of it, its neighbours
//! nothing, and the block goes back with the last of them. So the images of a context are charged together: by what is
//! seen when one is loaded and when one is unloaded. Libraries belong to no context; those of a card are together. The
//! blocks of a group may have images of another one in them, so what is left of the last image of a group is handed on
//! to another group, and is nobody's when the card has no images.
//!
//! With lazy loading (the default since CUDA 12.2) a function's code comes with its first use, which is not seen here.

use core::ffi::{c_char, c_uint, c_void};
use core::sync::atomic::Ordering::SeqCst;
use core::sync::atomic::fence;

use mullion_accounting::Entry;

use super::blocks::{BLOCK, round_up};
use super::contexts::{another_context, any_context, bury_object};
use super::looks::From;
use super::measured::Measurement;
use super::taken::{Taken, Trust};
use super::{Here, Kind, Pass, charge, counted, here, key_of};
use crate::container::{self, Card, Container};
use crate::cuda::{CUlibrary, CUmodule, CUresult};
use crate::driver;
use crate::launch;

/// An image is not believed to take more where a neighbour's doing may be in what was seen: the largest library of kernels
/// known is below 1 GiB.
const MOST: u64 = 1 << 30;

type Unload = unsafe extern "C" fn(*mut c_void) -> CUresult;

/// Images that are charged together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Group {
    count: u64,
    /// Charged for them.
    bytes: u64,
    /// Blocks of that at most that other groups left behind.
    inherited: u64,
}

/// In what images are charged.
const PAGE: u64 = 4096;
const COUNT_BITS: u32 = 20;
/// 1 TiB of pages.
const BYTES_BITS: u32 = 28;
const INHERITED_BITS: u32 = 16;

/// As much of a number as `bits` hold.
const fn within(number: u64, bits: u32) -> u64 {
    let most = (1 << bits) - 1;
    if number < most { number } else { most }
}

impl Group {
    /// From the size of a table's entry.
    const fn unpack(size: u64) -> Self {
        Self {
            count: size & ((1 << COUNT_BITS) - 1),
            bytes: (size >> COUNT_BITS & ((1 << BYTES_BITS) - 1)) * PAGE,
            inherited: size >> (COUNT_BITS + BYTES_BITS),
        }
    }

    const fn pack(self) -> u64 {
        let inherited = within(self.inherited, INHERITED_BITS) << (COUNT_BITS + BYTES_BITS);
        inherited | within(self.bytes / PAGE, BYTES_BITS) << COUNT_BITS | within(self.count, COUNT_BITS)
    }

    /// What is charged for the group that a table's entry stands for.
    pub(super) const fn charged(entry: &Entry) -> u64 {
        Self::unpack(entry.size).bytes
    }

    fn with(self, taken: u64) -> Self {
        Self { count: self.count + 1, bytes: self.bytes + taken, ..self }
    }

    /// Without one, whose end gave back `given_back` bytes.
    fn without(self, given_back: u64) -> Self {
        let bytes = self.bytes.saturating_sub(given_back);
        let inherited = self.inherited.min(bytes.div_ceil(BLOCK));
        Self { count: self.count.saturating_sub(1), bytes, inherited }
    }

    /// With what another group leaves behind.
    fn heir_of(self, left: u64) -> Self {
        // One whose context has just ended has no images.
        if self.count == 0 {
            return self;
        }
        Self { bytes: self.bytes + left, inherited: self.inherited + left.div_ceil(BLOCK), ..self }
    }

    /// Of what another group leaves behind, what these, all of a card together, may have images in: a block each at most,
    /// however often groups leave something.
    fn may_inherit(self, left: u64) -> u64 {
        left.min(self.count.saturating_sub(self.inherited) * BLOCK)
    }
}

/// The key of the group that an image belongs to, and the context that it goes with.
fn group_of(kind: Kind, context: u64, card: &Card) -> (u64, u64) {
    if kind == Kind::Module {
        (key_of(Kind::Images, context), context)
    } else {
        // No context's address.
        (key_of(Kind::Images, u64::from(card.index) + 1), 0)
    }
}

/// Changes the group of an image; what it was and is. Nobody else looks meanwhile, so nobody else changes it.
fn change(
    container: &Container,
    card: &Card,
    (key, note): (u64, u64),
    change: impl FnOnce(Group) -> Group,
) -> (Group, Group) {
    let objects = &container.books.objects;
    let before = objects.take(key).map_or(Group::default(), |entry| Group::unpack(entry.size));
    let after = change(before);
    if after.count > 0 {
        let entry = Entry { size: after.pack(), card: card.index, kind: Kind::Images as u8, note };
        let _ = objects.insert(key, &entry);
    }
    (before, after)
}

/// Another image is gone: changes its group, and hands on what is left behind by the last one of that. What all groups of the
/// card are charged less.
fn leave(container: &Container, card: &Card, group: (u64, u64), given_back: u64) -> u64 {
    let (before, after) = change(container, card, group, |group| group.without(given_back));
    let gone = before.bytes - after.bytes;
    if after.count > 0 { gone } else { gone + hand_on(container, card, group.0, after.bytes) }
}

/// The group under `key` is no more, and `left` bytes are charged for it: hands on what images of others may lie in. What is to
/// be charged no longer.
fn hand_on(container: &Container, card: &Card, key: u64, left: u64) -> u64 {
    let (others, heir) = if left > 0 { other_groups(container, card, key) } else { Default::default() };
    let Some(heir) = heir else { return left };
    let handed_on = others.may_inherit(left);
    let (poor, rich) = change(container, card, heir, |group| group.heir_of(handed_on));
    fence(SeqCst);
    // As below. Not whether it has ended since then: where another one has its handle, the heir is that one's.
    if container.books.has_ended(heir.1) {
        take_off(container, card, heir);
    }
    left - (rich.bytes - poor.bytes)
}

/// The groups of the card together, and one of them, without the one under `key`.
#[cold]
fn other_groups(container: &Container, card: &Card, key: u64) -> (Group, Option<(u64, u64)>) {
    let (mut all, mut found) = (Group::default(), None);
    container.books.objects.drain(
        |other, entry| {
            if entry.kind == Kind::Images as u8 && entry.card == card.index && other != key {
                let Group { count, bytes, inherited } = Group::unpack(entry.size);
                all.count += count;
                all.bytes += bytes;
                all.inherited += inherited;
                found = Some((other, entry.note));
            }
            false
        },
        |_, _| {},
    );
    (all, found)
}

/// A group whose context has ended is charged no longer, but for what images of others may lie in.
#[cold]
fn take_off(container: &Container, card: &Card, (key, _): (u64, u64)) {
    if let Some(group) = container.books.objects.take(key) {
        card.memory.free(hand_on(container, card, key, Group::charged(&group)));
    }
}

/// What was charged for the images that went with a context.
#[derive(Clone, Copy, Debug)]
pub(super) struct Left {
    pub(super) card: &'static Card,
    pub(super) bytes: u64,
}

/// A context that may end: with its images go the blocks that no others lie in, which is seen by looking before and after.
#[derive(Debug)]
pub(super) struct Departure {
    container: &'static Container,
    key: u64,
    /// Where there are images of it, and others on the card.
    measurement: Option<Measurement<'static>>,
}

impl Departure {
    /// To be called before the driver is asked, and before it is known to be asked.
    pub(super) fn begin(container: &'static Container, card: Option<&'static Card>, context: u64) -> Self {
        let key = key_of(Kind::Images, context);
        let mut begun = Self { container, key, measurement: None };
        if let Some(card) = card.filter(|_| container.books.objects.get(key).is_some())
            && other_groups(container, card, key).1.is_some()
        {
            let from = another_context(container, card, context).map_or(From::Nowhere, From::Context);
            let measuring = &container.books.measuring;
            begun.measurement = Some(measuring.begin(container, card, from, card.is_shared()));
        }
        begun
    }

    /// To be called when all that went is off the books, and nobody is told any more that the driver is asked. Puts back what
    /// is in use still of `left`, unless another measurement has ended before and was charged for that.
    pub(super) fn over(mut self, left: Option<Left>) {
        let Some(Left { card, bytes }) = left else { return };
        let settle = |taken: Option<Taken>| {
            let stayed = match taken.filter(|taken| taken.trust != Trust::Busy) {
                // Without a context nothing does.
                _ if any_context(self.container, card).is_none() => 0,
                Some(taken) => taken.more(bytes),
                // What was not seen to go may be under others still.
                None => bytes,
            };
            card.memory.force(stayed);
            card.memory.free(hand_on(self.container, card, self.key, stayed));
        };
        match self.measurement.take() {
            Some(measurement) => measurement.end(|_, taken| settle(taken)),
            None => self.container.books.measuring.unseen(|| settle(None)),
        }
    }
}

impl Drop for Departure {
    /// Nothing of it went.
    fn drop(&mut self) {
        if let Some(measurement) = self.measurement.take() {
            measurement.abandon();
        }
    }
}

/// A thread without a context loads a library: eagerly into the contexts that there are.
#[cold]
fn elsewhere() -> Option<Here> {
    let container = counted().ok()?;
    container.books.measuring.heed();
    let ended = container.books.contexts.ended();
    container
        .cards()
        .find_map(|card| Some(Here { container, card, context: any_context(container, card)?, ended }))
}

/// Charges what `real` loads.
///
/// # Safety
/// `place` is null or a place for a handle.
unsafe fn load(
    kind: Kind,
    place: *mut *mut c_void,
    real: impl FnOnce(*mut *mut c_void) -> CUresult,
    unload: impl FnOnce() -> Option<Unload>,
) -> CUresult {
    let (now, from) = match here() {
        _ if place.is_null() => return real(place),
        Ok(now) => (now, From::Here),
        Err(Pass::Refused(result)) => return result,
        Err(Pass::Driver) => match elsewhere().filter(|_| kind == Kind::Library) {
            Some(now) => (now, From::Context(now.context)),
            None => return real(place),
        },
    };
    let alone = now.card.is_shared();
    let measuring = &now.container.books.measuring;
    let measurement = measuring.begin(now.container, now.card, from, alone);
    let mut loaded = core::ptr::null_mut();
    container::fault_point();
    let result = real(&raw mut loaded);
    container::fault_point();
    if !result.is_ok() {
        measurement.abandon();
        return result;
    }
    let is_refused = measurement.end(|_, taken| {
        let most = |taken: Taken| taken.believed(MOST, now.card.is_shared());
        let taken = round_up(taken.map_or(0, |taken| taken.more(most(taken))), PAGE);
        let claim = charge::ask(now.container, now.card, taken);
        let is_refused = claim.is_none();
        match claim {
            Some(claim) => charge::settle(now.card, claim),
            // Until it is unloaded.
            None => now.card.memory.force(taken),
        }
        let group = group_of(kind, now.context, now.card);
        change(now.container, now.card, group, |group| group.with(taken));
        let entry = Entry { size: taken, card: now.card.index, kind: kind as u8, note: group.1 };
        let key = key_of(kind, loaded.addr() as u64);
        bury_object(now, key);
        let _ = now.container.books.objects.insert(key, &entry);
        fence(SeqCst);
        // The context ended while the driver was asked: it took the image along. Where another one has its handle by now, the
        // image may be in that, and the others of the group are.
        if now.container.books.has_ended(group.1) {
            let _ = now.container.books.objects.take_if(key, |found| *found == entry);
            take_off(now.container, now.card, group);
        }
        is_refused
    });
    if is_refused {
        // Like any other: images that were loaded since may share its blocks.
        if let Some(unload) = unload() {
            // SAFETY: an image that nobody knows of.
            let _ = end(kind, loaded, || unsafe { unload(loaded) });
        }
        return CUresult::OUT_OF_MEMORY;
    }
    // SAFETY: not null, so the caller's place for a result.
    unsafe { place.write(loaded) };
    result
}

fn unload_module() -> Option<Unload> {
    driver::function!(cuModuleUnload: Unload)
}

fn unload_library() -> Option<Unload> {
    driver::function!(cuLibraryUnload: Unload)
}

/// `cuModuleLoad`.
///
/// # Safety
/// As `cuModuleLoad`.
pub(crate) unsafe fn module_load(
    real: unsafe extern "C" fn(*mut CUmodule, *const c_char) -> CUresult,
    module: *mut CUmodule,
    path: *const c_char,
) -> CUresult {
    // SAFETY: the caller's own arguments; the handle goes to a place of ours.
    let ask = |place| unsafe { real(place, path) };
    // SAFETY: null or the caller's place for a result.
    unsafe { load(Kind::Module, module, ask, unload_module) }
}

/// `cuModuleLoadData` and `cuModuleLoadFatBinary`.
///
/// # Safety
/// As `cuModuleLoadData`.
pub(crate) unsafe fn module_load_data(
    real: unsafe extern "C" fn(*mut CUmodule, *const c_void) -> CUresult,
    module: *mut CUmodule,
    image: *const c_void,
) -> CUresult {
    // SAFETY: the caller's own arguments; the handle goes to a place of ours.
    let ask = |place| unsafe { real(place, image) };
    // SAFETY: null or the caller's place for a result.
    unsafe { load(Kind::Module, module, ask, unload_module) }
}

/// `cuModuleLoadDataEx`.
///
/// # Safety
/// As `cuModuleLoadDataEx`.
pub(crate) unsafe fn module_load_data_ex(
    real: unsafe extern "C" fn(
        *mut CUmodule,
        *const c_void,
        c_uint,
        *mut c_uint,
        *mut *mut c_void,
    ) -> CUresult,
    module: *mut CUmodule,
    image: *const c_void,
    count: c_uint,
    options: *mut c_uint,
    values: *mut *mut c_void,
) -> CUresult {
    // SAFETY: the caller's own arguments; the handle goes to a place of ours.
    let ask = |place| unsafe { real(place, image, count, options, values) };
    // SAFETY: null or the caller's place for a result.
    unsafe { load(Kind::Module, module, ask, unload_module) }
}

type LoadLibrary = unsafe extern "C" fn(
    *mut CUlibrary,
    *const c_void,
    *mut c_uint,
    *mut *mut c_void,
    c_uint,
    *mut c_uint,
    *mut *mut c_void,
    c_uint,
) -> CUresult;

/// `cuLibraryLoadData` and `cuLibraryLoadFromFile`.
///
/// # Safety
/// As `cuLibraryLoadData`.
#[expect(clippy::too_many_arguments, reason = "the driver's own")]
pub(crate) unsafe fn library_load(
    real: LoadLibrary,
    library: *mut CUlibrary,
    what: *const c_void,
    jit_options: *mut c_uint,
    jit_values: *mut *mut c_void,
    jit_count: c_uint,
    options: *mut c_uint,
    values: *mut *mut c_void,
    count: c_uint,
) -> CUresult {
    let real = |place| {
        // SAFETY: the caller's own arguments; the handle goes to a place of ours.
        unsafe { real(place, what, jit_options, jit_values, jit_count, options, values, count) }
    };
    // SAFETY: null or the caller's place for a handle.
    unsafe { load(Kind::Library, library, real, unload_library) }
}

/// `cuModuleUnload`.
///
/// # Safety
/// As `cuModuleUnload`.
pub(crate) unsafe fn module_unload(real: Unload, module: CUmodule) -> CUresult {
    // SAFETY: the caller's own argument.
    end(Kind::Module, module, || unsafe { real(module) })
}

/// `cuLibraryUnload`.
///
/// # Safety
/// As `cuLibraryUnload`.
pub(crate) unsafe fn library_unload(real: Unload, library: CUlibrary) -> CUresult {
    // SAFETY: the caller's own argument.
    end(Kind::Library, library, || unsafe { real(library) })
}

fn end(kind: Kind, handle: *mut c_void, real: impl FnOnce() -> CUresult) -> CUresult {
    let Ok(container) = counted() else { return real() };
    let real = || launch::unloading(real);
    let key = key_of(kind, handle.addr() as u64);
    let ended = container.books.contexts.ended();
    let Some(entry) = container.books.objects.take(key) else { return real() };
    let Some(card) = container.card_at(entry.card) else { return real() };
    // Its context need not be the current one.
    let context = if kind == Kind::Module { Some(entry.note) } else { any_context(container, card) };
    let from = context.map_or(From::Nowhere, From::Context);
    let measurement = container.books.measuring.begin(container, card, from, card.is_shared());
    container::fault_point();
    let result = real();
    container::fault_point();
    if !result.is_ok() && !container.books.is_gone_all_the_same(key, &entry, ended, result) {
        measurement.abandon();
        return result;
    }
    measurement.end(|_, taken| {
        // The image went with its context. A group that there is under its handle is on its way out too, or another context's.
        if container.books.contexts.has_ended_since(ended, entry.note) {
            return;
        }
        // What went before this looked is not seen; a large image does not share its blocks.
        let unseen = if result.is_ok() || entry.size <= BLOCK { 0 } else { entry.size };
        let given_back = given_back(taken, entry.size).max(unseen);
        let group = group_of(kind, entry.note, card);
        card.memory.free(leave(container, card, group, given_back));
        fence(SeqCst);
        // The context ended at the same time, and did not find the group while it was out.
        if container.books.has_ended(entry.note) {
            take_off(container, card, group);
        }
    });
    result
}

/// What an image gave back that seemed to take `size`: a neighbour's doing is not taken for more than a block beyond that.
fn given_back(taken: Option<Taken>, size: u64) -> u64 {
    let most = size.saturating_add(BLOCK);
    match taken {
        Some(taken) if taken.trust == Trust::Full => taken.less(u64::MAX),
        Some(taken) if taken.trust == Trust::Card => taken.less(most),
        _ => size,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_are_charged_together_until_the_last_is_gone() {
        let mut group = Group::default();
        for taken in [BLOCK, 0, 0, BLOCK] {
            group = group.with(taken);
        }
        assert_eq!(group, Group { count: 4, bytes: 2 * BLOCK, inherited: 0 });
        assert_eq!(Group::unpack(group.pack()), group);
        // The one that opened the block, and then the last one in it.
        group = group.without(0);
        assert_eq!(group, Group { count: 3, bytes: 2 * BLOCK, inherited: 0 });
        group = group.without(BLOCK);
        assert_eq!(group, Group { count: 2, bytes: BLOCK, inherited: 0 });
        assert_eq!(group.without(BLOCK).without(0), Group::default());
        assert_eq!(group.without(5 * BLOCK).bytes, 0, "more than is charged");
        // What the last one leaves behind lies under images of another group.
        let left = group.without(0).without(0);
        assert_eq!(left, Group { count: 0, bytes: BLOCK, inherited: 0 });
        let heir = Group { count: 1, ..Group::default() }.heir_of(left.bytes);
        assert_eq!(heir, Group { count: 1, bytes: BLOCK, inherited: 1 });
        assert_eq!(Group::default().heir_of(BLOCK), Group::default(), "it ended meanwhile");
    }

    #[test]
    fn what_is_left_behind_again_and_again_has_an_end() {
        let mut stays = Group::default().with(BLOCK).with(0);
        for _ in 0..10 {
            // Its block was not seen to go.
            let left = Group::default().with(BLOCK).without(0);
            stays = stays.heir_of(stays.may_inherit(left.bytes));
            assert_eq!(Group::unpack(stays.pack()), stays);
        }
        assert_eq!(stays, Group { count: 2, bytes: 3 * BLOCK, inherited: 2 });
        assert_eq!(stays.may_inherit(BLOCK), 0);
        // What went may have been any of it.
        stays = stays.without(2 * BLOCK);
        assert_eq!(stays, Group { count: 1, bytes: BLOCK, inherited: 1 });
        assert_eq!(stays.with(0).may_inherit(5 * BLOCK), BLOCK, "room for one more");
    }

    #[test]
    fn a_group_is_one_word_as_far_as_it_goes() {
        let most = Group { count: (1 << 20) - 1, bytes: ((1 << 28) - 1) * PAGE, inherited: (1 << 16) - 1 };
        assert_eq!(Group::unpack(most.pack()), most);
        let more = Group { count: most.count + 1, bytes: most.bytes + PAGE, inherited: most.inherited + 1 };
        assert_eq!(Group::unpack(more.pack()), most);
    }

    #[test]
    fn what_goes_back_is_believed_as_far_as_it_can_be() {
        for (case, bytes, trust, size, want) in [
            ("its own figure", -5 << 20, Some(Trust::Full), 0, 5 << 20),
            ("its own figure grew", 5 << 20, Some(Trust::Full), 3 << 20, 0),
            ("a neighbour freed as well", -900 << 20, Some(Trust::Card), 3 << 20, 5 << 20),
            ("in company", -900 << 20, Some(Trust::Busy), 3 << 20, 3 << 20),
            ("not seen", 0, None, 3 << 20, 3 << 20),
        ] {
            let taken = trust.map(|trust| Taken { bytes, trust });
            assert_eq!(given_back(taken, size), want, "{case}");
        }
    }
}
