//! Asking for room, and what is counted beside it.

use core::sync::atomic::Ordering::Relaxed;

use mullion_accounting::Claim;

use crate::container::{Card, Container};
use crate::cuda::CUresult;

/// Asks for `bytes` of `card`. `None` where the limit has no room for them, which is counted.
#[inline]
pub(super) fn ask(container: &Container, card: &Card, bytes: u64) -> Option<Claim> {
    let claim = ask_to_the_end(container, card, bytes);
    if claim.is_none() {
        refused(card);
    }
    claim
}

/// The same, uncounted.
#[inline]
pub(super) fn ask_to_the_end(container: &Container, card: &Card, bytes: u64) -> Option<Claim> {
    try_ask(container, card, bytes).or_else(|| ask_again(container, card, bytes))
}

/// As [`try_ask`], which was in vain: what other threads have asked for by now may be more than they get, as a piece asks for
/// the block that it may need. None of this thread's own claims may be at the driver: it would wait for itself.
#[cold]
pub(super) fn ask_again(container: &Container, card: &Card, bytes: u64) -> Option<Claim> {
    // Not by T, in which there may be what a crash left.
    if card.memory.settled().saturating_add(bytes) > card.memory.limit() {
        return None;
    }
    container.books.measuring.ask_in_silence(card, || try_ask(container, card, bytes))
}

/// Counts a request that the limit refused.
#[cold]
pub(super) fn refused(card: &Card) {
    card.words.limit_hits.fetch_add(1, Relaxed);
}

/// As [`ask`], uncounted: another try follows.
#[inline]
pub(super) fn try_ask(container: &Container, card: &Card, bytes: u64) -> Option<Claim> {
    // Apart from what follows, which claims again: the peers of the first claim may hold a lock.
    let claim = card.memory.claim(bytes, &mut container.peers());
    match claim {
        Ok(claim) => Some(claim),
        Err(_) => ask_pools(container, card, bytes),
    }
}

/// What this process's own pools hold unused is as good as free: the driver, too, empties them before it refuses.
#[cold]
fn ask_pools(container: &Container, card: &Card, bytes: u64) -> Option<Claim> {
    if bytes > card.memory.limit() || !container.books.pools.give_way(container, card) {
        return None;
    }
    card.memory.claim(bytes, &mut container.peers()).ok()
}

/// The driver gave what was asked for.
#[inline]
pub(super) fn settle(card: &Card, claim: Claim) {
    card.memory.settle(claim);
    note_peak(card);
}

/// The driver gave `real` bytes for a claim.
pub(super) fn settle_at(card: &Card, claim: Claim, real: u64) {
    card.memory.settle_at(claim, real);
    note_peak(card);
}

/// Asks for `bytes` and charges them at once, before the driver is asked: where the card is looked at in between, a claim
/// would look like a call at the driver.
pub(super) fn advance(container: &Container, card: &Card, bytes: u64) -> Option<u64> {
    settle(card, ask_to_the_end(container, card, bytes)?);
    Some(bytes)
}

/// The driver failed, and the bytes were charged in advance.
pub(super) fn undo_advance(card: &Card, bytes: u64, why: CUresult) {
    card.memory.free(bytes);
    note_failure(card, why);
}

/// The driver failed.
#[inline]
pub(super) fn undo(card: &Card, claim: Claim, why: CUresult) {
    card.memory.undo(claim);
    note_failure(card, why);
}

#[inline]
fn note_failure(card: &Card, why: CUresult) {
    // HK-15: the limit had room, the card had not.
    if why == CUresult::OUT_OF_MEMORY {
        card.words.card_full.fetch_add(1, Relaxed);
    }
}

#[inline]
pub(super) fn note_peak(card: &Card) {
    let total = card.memory.total();
    if total > card.words.peak.load(Relaxed) {
        note_higher_peak(card, total);
    }
}

/// T has in it what is asked for and will be refused, and what a crash left: what is held is less.
#[cold]
#[inline(never)]
fn note_higher_peak(card: &Card, total: u64) {
    card.words.peak.fetch_max(total.min(card.memory.settled()), Relaxed);
}
