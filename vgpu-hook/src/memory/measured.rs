//! What the driver takes from a card without saying how much: found by looking before and after.
//!
//! The difference holds whatever else happened meanwhile, so:
//! * **This process's other threads** must not be between the driver and the books while one looks. Whoever looks asks for
//!   silence: threads wait before they go to the driver, and those that are there already are waited for (C and B of the
//!   account differ while something is asked for, and [`Measuring::hidden`] tells of what goes back), for [`LOOK_NS`] at most.
//!   What they did before and after stands in the books, and is taken out.
//! * **Other processes** do not matter where NVML lists this one with its own figure: that is asked for then. Which entry
//!   is this process's is known by its number, and believed only if the entry came when this process made its first context:
//!   a driver that counts processes as the host does may list another one by that number.
//! * **Where NVML does not list it**, the whole card is looked at: what processes of this container did is known by their books,
//!   what other containers did is not, so a difference is believed only up to what the thing in question can be.
//!
//! Measurements of one card wait for each other, so that each finds its own. One that takes long, as an image that is
//! compiled while it is loaded, is not waited for to its end: those that overlap have one beginning, what was taken
//! since is charged to the first that ends, and the rest to those that follow, so that all of it is charged, once.

use core::sync::atomic::Ordering::{Relaxed, SeqCst};
use core::sync::atomic::{AtomicI64, AtomicU32, AtomicU64};

use mullion_region::MAX_DEVICES;

use super::alone::Alone;
use super::at_driver::{AtDriver, Hidden, Standing};
use super::looks::{self, From, Nvml};
use super::taken::{Taken, Trust};
use super::under_way::UnderWay;
use crate::container::{Card, Container, Held, Lock};
use crate::sys;

const PAUSE_NS: u64 = 100_000;
/// How long one look waits for calls that are at the driver, and for looks that were disturbed: a thread may lose its
/// core in the middle of one. A free that waits for a kernel can take longer.
pub(super) const LOOK_NS: u64 = 100_000_000;
/// The same for a while after a look that waited in vain, since whoever it waited for is likely still there.
pub(super) const LOOK_AFTER_NS: u64 = 1_000_000;
/// The same for a request. Longer than most calls take: those for whom one waited in vain are known by what they asked for
/// together, and others may ask for as much.
const ASK_AFTER_NS: u64 = 10_000_000;
/// How long a measurement may take that another one waits for: a context is made in less, an image may be compiled in more.
pub(super) const TURN_NS: u64 = 2_000_000_000;
/// The same for what is over at once.
const SHORT_TURN_NS: u64 = 20_000_000;
/// How long a call for a small array may take that another one waits for: longer than two looks take that wait in vain.
pub(super) const CALL_NS: u64 = 250_000_000;
/// How often a call lets a measurement go first that came between.
const TRIES: u32 = 16;
/// How long a thread waits for the silence of another one to end: longer than a look takes.
const PATIENCE_NS: u64 = 500_000_000;
/// A wait on a word is looked after so often, in case nobody wakes the waiter.
const SLICE_NS: u64 = 10_000_000;
/// How long something counts as recent.
const RECENT_NS: u64 = 1_000_000_000;

/// The measurements of this process.
#[derive(Debug)]
pub(crate) struct Measuring {
    /// Held while one looks, and while it charges what it saw.
    lock: Lock,
    /// How many look.
    silence: AtomicU32,
    /// By card: calls that give something back.
    hidden: [AtDriver; MAX_DEVICES],
    /// Those of which it is not known on which card.
    anywhere: AtDriver,
    /// By card: calls for small arrays.
    small: [AtDriver; MAX_DEVICES],
    /// When a look was disturbed by another container, coarse ns; 0 = none was.
    pub(super) disturbed_ns: AtomicU64,
    /// This process's number in NVML's lists; 0 = not known.
    own_pid: AtomicU32,
    nvml: Nvml,
    cards: [UnderWay; MAX_DEVICES],
}

pub(super) fn now_ns() -> u64 {
    sys::clock::coarse_ns()
}

/// Ways to look: by CUDA, by NVML, at this process alone.
pub(super) const WAYS: usize = 3;
pub(super) const BY_CUDA: usize = 0;
const BY_NVML: usize = 1;
pub(super) const ALONE: usize = 2;
/// No base.
pub(super) const NONE: i64 = i64::MIN;

/// Bytes in use that stand in no books, by the ways in which that is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Uncounted {
    by: [Option<i64>; WAYS],
    /// Nobody of whom this could be known was between the driver and the books.
    pub(super) is_quiet: bool,
    /// None of this process was.
    pub(super) is_own_quiet: bool,
    /// The calls at the driver, where they were the same before and after the look, and nothing moved in the books.
    pub(super) own: Option<Standing>,
    pub(super) all: Option<Standing>,
}

impl Uncounted {
    /// By one of the ways.
    pub(super) fn seen(&self, way: usize) -> Option<i64> {
        self.by.get(way).copied().flatten()
    }

    /// This process's own figure where none of its calls was at the driver.
    fn own(&self) -> Option<i64> {
        self.seen(ALONE).filter(|_| self.is_own_quiet)
    }
}

pub(super) fn is_recent(at_ns: &AtomicU64) -> bool {
    let at_ns = at_ns.load(Relaxed);
    at_ns != 0 && sys::clock::coarse_ns().saturating_sub(at_ns) < RECENT_NS
}

fn signed(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

/// Silence until this goes.
struct Silence<'m>(&'m Measuring);

impl Drop for Silence<'_> {
    fn drop(&mut self) {
        self.0.silence.fetch_sub(1, SeqCst);
        sys::futex_wake(self.0.silence.as_ptr());
    }
}

/// A measurement that has begun.
#[derive(Debug)]
pub(super) struct Measurement<'c> {
    container: &'static Container,
    card: &'c Card,
    from: From,
    /// Whether the process's own figure is asked for.
    alone: bool,
    /// Numbers that may be this process's and that NVML did not list at the beginning.
    newcomers: [u32; 2],
    /// Whether nothing disturbed the look at the beginning.
    was_quiet: bool,
    /// Charged in advance for what is measured, and so not for what others find meanwhile: all count from a beginning after it.
    paid: u64,
}

impl Measuring {
    pub(super) const fn new() -> Self {
        Self {
            lock: Lock::new(),
            silence: AtomicU32::new(0),
            hidden: [const { AtDriver::new() }; MAX_DEVICES],
            anywhere: AtDriver::new(),
            small: [const { AtDriver::new() }; MAX_DEVICES],
            disturbed_ns: AtomicU64::new(0),
            own_pid: AtomicU32::new(0),
            nvml: Nvml::new(),
            cards: [const { UnderWay::new() }; MAX_DEVICES],
        }
    }

    /// Waits while another thread looks. To be called before the driver is asked for memory, or to take it back.
    #[inline]
    pub(super) fn heed(&self) {
        if self.silence.load(Relaxed) != 0 {
            self.wait_for_end_of_silence();
        }
    }

    #[cold]
    fn wait_for_end_of_silence(&self) {
        let began = now_ns();
        let mut looking = self.silence.load(SeqCst);
        while looking != 0 && now_ns().saturating_sub(began) < PATIENCE_NS {
            let _ = sys::futex_wait(self.silence.as_ptr(), looking, SLICE_NS);
            looking = self.silence.load(SeqCst);
        }
    }

    /// Asks again while nobody else begins, each time that one of this process's claims is no longer at the driver; for as long
    /// as a look waits at most, and not again for those that were waited for in vain.
    #[cold]
    pub(super) fn ask_in_silence<T>(&self, card: &Card, mut ask: impl FnMut() -> Option<T>) -> Option<T> {
        self.silence.fetch_add(1, SeqCst);
        let _silence = Silence(self);
        let began = now_ns();
        let (mut before, mut since_ns, mut asked) = (None, began, 0);
        let under_way = self.under_way(card);
        while now_ns().saturating_sub(began) < LOOK_NS {
            let claims = (card.memory.own_used(), card.memory.own_settled());
            asked = claims.0.saturating_sub(claims.1);
            let is_in_vain = under_way.is_some_and(|other| other.was_asked_in_vain(asked));
            if before != Some(claims) {
                let answer = ask();
                if answer.is_some() {
                    return answer;
                }
                // One may have begun that had not seen the silence.
                (before, since_ns) = (Some(claims), now_ns());
                continue;
            }
            let is_late = now_ns().saturating_sub(since_ns) >= ASK_AFTER_NS;
            if asked == 0 || is_in_vain && is_late {
                // That it is in vain says only who has waited to the end.
                return None;
            }
            sys::sleep_ns(PAUSE_NS);
        }
        if let Some(under_way) = under_way.filter(|_| asked > 0) {
            under_way.asked_in_vain(asked);
        }
        None
    }

    /// Tells those who look of a call by which one thing goes from `card`.
    #[inline]
    pub(super) fn hidden(&self, card: &Card) -> Hidden<'_> {
        self.heed();
        self.hidden.get(usize::from(card.index)).unwrap_or(&self.anywhere).one()
    }

    /// The same of a call by which many things may go; from any card where it is not known from which one.
    pub(super) fn hidden_many(&self, card: Option<&Card>) -> Hidden<'_> {
        self.heed();
        card.and_then(|card| self.hidden.get(usize::from(card.index))).unwrap_or(&self.anywhere).many()
    }

    /// Something on `card` that was charged went without such a call.
    pub(super) fn stir(&self, card: &Card) {
        if let Some(hidden) = self.hidden.get(usize::from(card.index)) {
            hidden.stir();
        }
    }

    fn standing(&self, card: &Card) -> Standing {
        let word = |calls: &[AtDriver]| calls.get(usize::from(card.index)).map(AtDriver::word);
        Standing {
            hidden: word(&self.hidden).unwrap_or_default(),
            anywhere: self.anywhere.word(),
            small: word(&self.small).unwrap_or_default(),
            claimed: card.memory.own_used(),
            settled: card.memory.own_settled(),
            total: card.memory.total(),
            asked: card.memory.in_flight(),
            caller: self.under_way(card).map_or(0, |under_way| under_way.caller.load(SeqCst)),
        }
    }

    fn is_busy(&self, card: &Card, mine: u64) -> bool {
        let standing = self.standing(card);
        standing.is_busy(mine) && !self.stays(card, standing)
    }

    /// Whether these were waited for in vain.
    fn stays(&self, card: &Card, standing: Standing) -> bool {
        self.under_way(card).is_some_and(|under_way| under_way.stays.load(Relaxed) == standing.name())
    }

    /// Looks at the card in silence. `mine` is 1 where a call for a small array is the looker's own.
    pub(super) fn look(
        &self,
        container: &Container,
        card: &Card,
        from: From,
        alone: bool,
        mine: u64,
    ) -> Uncounted {
        self.silence.fetch_add(1, SeqCst);
        let _silence = Silence(self);
        let most = self.under_way(card).map_or(LOOK_NS, UnderWay::patience_ns);
        let began = now_ns();
        let pause = || {
            sys::sleep_ns(PAUSE_NS);
            now_ns().saturating_sub(began) < most
        };
        let mut is_first = true;
        loop {
            while self.is_busy(card, mine) && pause() {}
            let seen = self.look_once(container, card, from, alone, mine);
            let knows_own = seen.seen(ALONE).is_some();
            let is_known = |standing: Option<Standing>| standing.is_some_and(|now| self.stays(card, now));
            if seen.is_quiet || (seen.is_own_quiet && knows_own) || is_known(seen.all) {
                return seen;
            }
            if core::mem::take(&mut is_first) && !knows_own {
                // What a dead process left half done would look busy for ever.
                card.memory.reap_dead(&mut container.peers());
            }
            if !pause() {
                if let Some(under_way) = self.under_way(card) {
                    under_way.in_vain_ns.store(now_ns(), Relaxed);
                    under_way.stays.store(seen.all.map_or(0, Standing::name), Relaxed);
                }
                return seen;
            }
        }
    }

    fn look_once(&self, container: &Container, card: &Card, from: From, alone: bool, mine: u64) -> Uncounted {
        // Who holds a pool is at the driver with it, perhaps for long.
        let follow = || {
            let pools = container.books.pools.look_at(container, card);
            pools.with(container.books.graphs.look_at(container, card))
        };
        let followed = follow();
        let before = self.standing(card);
        let free = looks::free_bytes(&self.nvml, card, from);
        let own = if alone { self.own_bytes(container, card) } else { None };
        // Of one that is held: what it took or gave back by now, and what it does meanwhile, is in the driver's word for it.
        let uncharged = followed.uncharged.filter(|_| followed == follow());
        let after = self.standing(card);
        let own_standing = Some(after.own()).filter(|own| uncharged.is_some() && *own == before.own());
        let is_own_quiet = followed.is_all && own_standing.is_some_and(|own| !own.is_busy(mine));
        // What other processes of the container do shows in the card's figures only.
        let all = own_standing.map(|_| after).filter(|all| *all == before);
        let is_quiet = is_own_quiet && all.is_some_and(|all| all.asked == 0);
        // What was asked for and not got yet, as far as it cannot be waited for, is in the books and not on the card.
        let on_card = free.map(|free| {
            -signed(free) - signed(after.total.saturating_sub(after.asked)) - uncharged.unwrap_or(0)
        });
        let own = own
            .filter(|_| own_standing.is_some())
            .map(|own| signed(own) - signed(after.settled) - uncharged.unwrap_or(0));
        let by = if from == From::Nowhere { [None, on_card, own] } else { [on_card, None, own] };
        Uncounted { by, is_quiet, is_own_quiet, own: own_standing, all }
    }

    /// Has NVML loaded and the card found in it. To be called without a lock: the loader waits for a thread that is
    /// loading a library, whose constructors may make a context.
    pub(super) fn prepare(&self, card: &Card) {
        self.nvml.prepare(card);
    }

    /// For a call that is over at once: in turn with others like it on the card, and with measurements, unless they take
    /// long. No lock of measurements is held meanwhile, and that of such calls is not waited for without end: the call may
    /// wait for work that waits for another thread.
    pub(super) fn alone(&self, card: &Card) -> Alone<'_> {
        let turn = self.under_way(card).and_then(UnderWay::turn);
        let own = is_recent(&self.disturbed_ns) && self.own_pid.load(Relaxed) != 0;
        let mut hidden = self.hide_in_turn(card);
        for _ in 0..TRIES {
            // One may have begun before this call was to be seen; from then on they wait for it.
            let is_late = |other: &UnderWay| other.is_anothers() && !other.takes_longer_than(SHORT_TURN_NS);
            if !self.under_way(card).is_some_and(is_late) {
                break;
            }
            drop(hidden);
            hidden = self.hide_in_turn(card);
        }
        if let Some(turn) = &turn {
            turn.is_of(&hidden);
        }
        Alone { measuring: self, own, hidden: Some(hidden), turn, _held: None }
    }

    fn hide_in_turn(&self, card: &Card) -> Hidden<'_> {
        drop(self.lock_in_turn(card, SHORT_TURN_NS));
        self.heed();
        self.small.get(usize::from(card.index)).unwrap_or(&self.anywhere).one()
    }

    /// Something was seen that one of the calls beside which it was may have done. Whether none of them did for certain, since as
    /// many answers were not believed beside the same calls; else this one is not.
    pub(super) fn has_disbelieved(&self, card: &Card, beside: Standing, mine: u64, has_turn: bool) -> bool {
        let name = beside.name_beside(mine, has_turn);
        let (Some(under_way), Some(name)) = (self.under_way(card), name) else { return false };
        if under_way.beside.swap(name, Relaxed) != name {
            under_way.disbelieved.store(0, Relaxed);
        }
        beside.beside(mine).is_some_and(|calls| under_way.disbelieved.fetch_add(1, Relaxed) >= calls)
    }

    /// This process's bytes on the card, by NVML's list. `None` where they are not known.
    fn own_bytes(&self, container: &Container, card: &Card) -> Option<u64> {
        let pid = match self.own_pid.load(Relaxed) {
            // As the host counts: the agent says it when it has looked, and is right.
            0 => container.own_pids().first().copied().filter(|pid| *pid != 0)?,
            known => known,
        };
        let listing = self.nvml.processes(card)?;
        if listing.names(pid) {
            self.own_pid.store(pid, Relaxed);
            return listing.bytes_of(pid);
        }
        // One that was listed before has no context where it is not.
        (self.own_pid.load(Relaxed) != 0).then_some(0)
    }

    /// Begins to measure what the driver is about to take from `card`, by this process's own figure if `alone` and it
    /// can be had.
    pub(super) fn begin<'c>(
        &self,
        container: &'static Container,
        card: &'c Card,
        from: From,
        alone: bool,
    ) -> Measurement<'c> {
        self.begin_in_turn(container, card, from, alone, false, || 0)
    }

    /// The same for a context, which may be the first of this process on the card. `pay` charges something in advance,
    /// which must not look like something that came while another measurement was under way.
    pub(super) fn begin_context<'c>(
        &self,
        container: &'static Container,
        card: &'c Card,
        other: Option<u64>,
        pay: impl FnOnce() -> Option<u64>,
    ) -> Option<(Measurement<'c>, u64)> {
        let from = other.map_or(From::Nowhere, From::Context);
        let mut paid = None;
        let pay = || {
            paid = pay();
            paid.unwrap_or(0)
        };
        let measurement = self.begin_in_turn(container, card, from, true, other.is_none(), pay);
        let Some(paid) = paid else {
            measurement.abandon();
            return None;
        };
        Some((measurement, paid))
    }

    fn begin_in_turn<'c>(
        &self,
        container: &'static Container,
        card: &'c Card,
        from: From,
        alone: bool,
        is_first: bool,
        pay: impl FnOnce() -> u64,
    ) -> Measurement<'c> {
        let _held = self.lock_in_turn(card, TURN_NS);
        let paid = pay();
        let mut newcomers = [0; 2];
        let seen = self.look(container, card, from, alone, 0);
        let mut bases = [seen.seen(BY_CUDA), seen.seen(BY_NVML), seen.own()];
        if is_first && self.own_pid.load(Relaxed) == 0 {
            if let Some(listing) = self.nvml.processes(card) {
                newcomers = container.own_pids().map(|pid| if listing.names(pid) { 0 } else { pid });
            }
            if let Some(place) = bases.get_mut(ALONE).filter(|_| newcomers != [0; 2]) {
                *place = Some(-signed(card.memory.own_used()));
            }
        }
        if let Some(under_way) = self.under_way(card) {
            let is_only = under_way.begins();
            if !is_only {
                under_way.move_base(-signed(paid));
            }
            for (base, seen) in under_way.base.iter().zip(bases) {
                if is_only || base.load(Relaxed) == NONE {
                    base.store(seen.unwrap_or(NONE), Relaxed);
                }
            }
        }
        Measurement { container, card, from, alone, newcomers, was_quiet: seen.is_quiet, paid }
    }

    /// A block is charged for a small array that may be what another thread's measurement is about to find: because it was seen
    /// to move (`is_clear`), or because no more could be told.
    pub(super) fn doubt(&self, card: &Card, is_clear: bool) {
        if let Some(other) = self.under_way(card).filter(|other| other.is_anothers()) {
            let calls = if is_clear { &other.clear } else { &other.unclear };
            calls.fetch_add(1, Relaxed);
        }
    }

    /// The lock, when no measurement of the card is under way, or none that is worth waiting for.
    fn lock_in_turn(&self, card: &Card, most_ns: u64) -> Held<'_> {
        loop {
            let held = self.lock.lock();
            let Some(other) = self.under_way(card).filter(|other| other.is_anothers()) else { return held };
            if other.takes_longer_than(most_ns) {
                return held;
            }
            let count = other.count.load(Relaxed);
            drop(held);
            let _ = sys::futex_wait(other.count.as_ptr(), count, SLICE_NS);
        }
    }

    /// Calls `what` while nobody looks.
    pub(super) fn unseen<T>(&self, what: impl FnOnce() -> T) -> T {
        let _held = self.lock.lock();
        what()
    }

    fn under_way(&self, card: &Card) -> Option<&UnderWay> {
        self.cards.get(usize::from(card.index))
    }

    /// Makes known which entry of NVML's lists is this process's: one that came with its first context.
    fn meet(&self, card: &Card, newcomers: [u32; 2]) {
        if newcomers == [0; 2] || self.own_pid.load(Relaxed) != 0 {
            return;
        }
        let Some(listing) = self.nvml.processes(card) else { return };
        let came = newcomers.into_iter().find(|pid| *pid != 0 && listing.names(*pid));
        self.own_pid.store(came.unwrap_or(0), Relaxed);
    }
}

impl Measurement<'_> {
    /// Nothing came of it.
    pub(super) fn abandon(self) {
        self.abandon_and(|| ());
    }

    /// The same; `undo` takes off what was charged in advance, before anybody else looks.
    pub(super) fn abandon_and(self, undo: impl FnOnce()) {
        let measuring = &self.container.books.measuring;
        measuring.stir(self.card);
        let _held = measuring.lock.lock();
        undo();
        if let Some(under_way) = measuring.under_way(self.card) {
            under_way.move_base(signed(self.paid));
            under_way.ends();
        }
    }

    /// Ends it: `settle` charges what was taken, before anybody else looks. `None` where nothing could be seen.
    pub(super) fn end<T>(self, settle: impl FnOnce(&Alone<'_>, Option<Taken>) -> T) -> T {
        let Self { container, card, from, alone, newcomers, was_quiet, paid } = self;
        let measuring = &container.books.measuring;
        let held = measuring.lock.lock();
        measuring.stir(card);
        let looking = Alone { measuring, own: false, hidden: None, turn: None, _held: Some(held) };
        measuring.meet(card, newcomers);
        let mut seen = measuring.look(container, card, from, alone, 0);
        seen.is_quiet &= was_quiet;
        let Some(under_way) = measuring.under_way(card) else {
            return settle(&looking, None);
        };
        let [unclear, clear] = [&under_way.unclear, &under_way.clear].map(|calls| calls.swap(0, Relaxed));
        let spare = container.books.small_arrays.spare(card);
        let taken = difference(&seen, &under_way.base).map(|taken| taken.undoubted(unclear, clear, spare));
        // From now on it is charged for what was found.
        under_way.move_base(signed(paid));
        under_way.ends();
        settle(&looking, taken)
    }
}

/// What was taken since the base, by the best of the ways that know both ends.
fn difference(seen: &Uncounted, base: &[AtomicI64; WAYS]) -> Option<Taken> {
    let since = |way: usize| {
        let base = base.get(way)?.load(Relaxed);
        let now = if way == ALONE { seen.own()? } else { seen.seen(way)? };
        (base != NONE).then(|| now.saturating_sub(base))
    };
    let on_card = if seen.is_quiet { Trust::Card } else { Trust::Busy };
    [(ALONE, Trust::Full), (BY_CUDA, on_card), (BY_NVML, on_card)]
        .into_iter()
        .find_map(|(way, trust)| Some(Taken { bytes: since(way)?, trust }))
}

#[cfg(test)]
mod tests {
    extern crate std;

    use super::*;

    fn bases(bases: [i64; WAYS]) -> [AtomicI64; WAYS] {
        bases.map(AtomicI64::new)
    }

    #[test]
    fn the_best_of_the_known_ways_counts() {
        let taken = |bytes, trust| Some(Taken { bytes, trust });
        for (case, base, by, is_quiet, want) in [
            ("alone", [0, NONE, 100], [Some(900), None, Some(400)], true, taken(300, Trust::Full)),
            ("not listed at the end", [0, NONE, 100], [Some(900), None, None], true, taken(900, Trust::Card)),
            ("not listed at first", [0, NONE, NONE], [Some(9), None, Some(400)], true, taken(9, Trust::Card)),
            ("by NVML", [NONE, -50, NONE], [None, Some(250), None], false, taken(300, Trust::Busy)),
            ("given back", [0, NONE, NONE], [Some(-7), None, None], true, taken(-7, Trust::Card)),
            ("looked from two places", [0, NONE, NONE], [None, Some(5), None], true, None),
            ("nothing seen", [NONE; WAYS], [None; WAYS], true, None),
        ] {
            let seen = Uncounted { by, is_quiet, is_own_quiet: true, own: None, all: None };
            assert_eq!(difference(&seen, &bases(base)), want, "{case}");
        }
    }

    #[test]
    fn silence_ends_and_calls_are_told_of() {
        let measuring = Measuring::new();
        measuring.heed();
        let hidden = measuring.hidden_many(None);
        assert_eq!(measuring.anywhere.word().count(), 1);
        drop(hidden);
        assert_eq!(measuring.anywhere.word().count(), 0);
        measuring.silence.store(1, SeqCst);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| measuring.heed());
            std::thread::sleep(std::time::Duration::from_millis(20));
            assert!(!waiting.is_finished(), "it does not heed");
            drop(Silence(&measuring));
        });
    }
}
