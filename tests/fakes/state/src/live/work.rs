//! Time on a card.
//!
//! A card runs the work of one process in the order of its arrival, and shares its time equally among the
//! processes that have work (round robin of slices that are short against any kernel). So a process with `n - 1`
//! rivals progresses at `1/n`; between two arrivals or ends that is linear, and whoever looks at a
//! card first brings its books up to the present. Work is measured in ns of the whole card.

use std::sync::atomic::Ordering::SeqCst;
use std::thread;
use std::time::Duration;

use nix::libc;

use super::Live;
use super::layout::{CARDS, Region, SLOTS, STRETCHES, Share, WINDOWS};

/// Length of NVML's sampling window. The header of NVML says "1/6 to 1 second, depending on the product"; the data-centre
/// cards here use the short one.
pub const WINDOW_NS: u64 = 1_000_000_000 / 6;

/// The busy share of one process in the newest full window in which it was busy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sample {
    /// In the caller's pid namespace, as [`super::LiveProcess::pid`].
    pub pid: u32,
    /// End of the window on the region's clock, ns.
    pub end: u64,
    /// Busy ns of [`WINDOW_NS`].
    pub busy: u64,
}

/// The region's clock in ns: `CLOCK_MONOTONIC`, which the containers of a node share, or the simulated one.
#[must_use]
pub fn now(region: &Region) -> u64 {
    match region.clock.load(SeqCst) {
        0 => monotonic(),
        simulated => simulated,
    }
}

#[expect(unsafe_code, reason = "reads the clock")]
fn monotonic() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: a valid place for the answer.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    u64::try_from(time.tv_sec).unwrap_or(0) * 1_000_000_000 + u64::try_from(time.tv_nsec).unwrap_or(0)
}

impl Share {
    fn pending(&self) -> u64 {
        self.submitted.load(SeqCst).saturating_sub(self.done.load(SeqCst))
    }

    /// `work` done over the stretch `from..to`, during which the kernels of this process were on the card for `work` ns.
    fn progress(&self, work: u64, from: u64, to: u64) {
        let before = self.done.fetch_add(work, SeqCst);
        if !self.prolong(before, work, from, to) {
            let place = self.next_stretch.fetch_add(1, SeqCst);
            let words = &self.stretches[usize::try_from(place).unwrap_or(0) % STRETCHES];
            for (word, value) in words.iter().zip([from, to, before, before + work]) {
                word.store(value, SeqCst);
            }
        }
        let length = (to - from).max(1);
        let mut start = from;
        while start < to {
            let window = start / WINDOW_NS;
            let end = to.min((window + 1) * WINDOW_NS);
            let part = u128::from(work) * u128::from(end - start) / u128::from(length);
            self.add_to_window(window, u64::try_from(part).unwrap_or(0));
            start = end;
        }
    }

    /// Enters work as part of the last stretch, where it goes on from there at the same rate: each look at a card ends a
    /// stretch, and few are kept. Whether it did.
    fn prolong(&self, before: u64, work: u64, from: u64, to: u64) -> bool {
        let Some(place) = self.next_stretch.load(SeqCst).checked_sub(1) else { return false };
        let words = &self.stretches[usize::try_from(place).unwrap_or(0) % STRETCHES];
        let [begin, end, first, last] = words.each_ref().map(|w| w.load(SeqCst));
        let (length, done) = (end.saturating_sub(begin), last.saturating_sub(first));
        // Rates are one in so many, and work is rounded up by a ns.
        let expected = u128::from(done) * u128::from(to - from) / u128::from(length.max(1));
        let same = u128::from(work).abs_diff(expected) <= 1 + expected / 1024;
        if end != from || last != before || !same {
            return false;
        }
        words[1].store(to, SeqCst);
        words[3].store(before + work, SeqCst);
        true
    }

    fn add_to_window(&self, window: u64, busy: u64) {
        let word = &self.windows[usize::try_from(window).unwrap_or(0) % WINDOWS];
        let tag = window << 32;
        let old = word.load(SeqCst);
        let base = if old & !0xFFFF_FFFF == tag { old } else { tag };
        word.store(base + busy, SeqCst);
    }

    /// When `done` reached `target`, by the stretches kept; the oldest of them for what was reached before.
    fn reached(&self, target: u64) -> Option<u64> {
        let next = self.next_stretch.load(SeqCst);
        let kept = next.min(STRETCHES as u64);
        for place in next - kept..next {
            let words = &self.stretches[usize::try_from(place).unwrap_or(0) % STRETCHES];
            let [from, to, before, after] = words.each_ref().map(|w| w.load(SeqCst));
            if after >= target {
                let part = u128::from(to.saturating_sub(from)) * u128::from(target.saturating_sub(before));
                let part = part / u128::from(after.saturating_sub(before).max(1));
                return Some(from + u64::try_from(part).unwrap_or(0));
            }
        }
        None
    }
}

impl Live {
    /// Brings the books of a card up to `now`. The caller holds the card.
    fn advance(&self, card: usize, now: u64) {
        let words = &self.region().cards[card];
        let mut time = words.advanced.load(SeqCst);
        if time == 0 || now < time {
            // First look, or a simulated clock that was set back.
            words.advanced.store(now, SeqCst);
            return;
        }
        while time < now {
            let busy: Vec<(&Share, u64)> = self
                .slots()
                .iter()
                .map(|s| (&s.cards[card], s.cards[card].pending()))
                .filter(|(_, pending)| *pending > 0)
                .collect();
            let Some(shortest) = busy.iter().map(|(_, p)| *p).min() else { break };
            let rivals = u64::try_from(busy.len()).unwrap_or(1);
            let stretch = shortest.saturating_mul(rivals).min(now - time);
            let to = time + stretch;
            for (share, pending) in &busy {
                // Rounding up keeps the end of a stretch from never being reached.
                share.progress(stretch.div_ceil(rivals).min(*pending), time, to);
            }
            time = to;
        }
        words.advanced.store(now, SeqCst);
    }

    /// Hands in `work` ns for this process; answers the mark at which it is done.
    #[must_use]
    pub fn submit(&self, card: usize, work: u64) -> u64 {
        let Some(share) = self.share(card) else { return 0 };
        if work == 0 {
            return share.submitted.load(SeqCst);
        }
        let _held = self.hold(card);
        // Where what is pending may have ended by now, the new work must not begin at that end.
        let now = now(self.region());
        let booked = self.region().cards[card].advanced.load(SeqCst);
        if booked.saturating_add(share.pending()) <= now {
            self.advance(card, now);
        }
        share.submitted.fetch_add(work, SeqCst) + work
    }

    /// The mark of the work handed in last.
    #[must_use]
    pub fn mark(&self, card: usize) -> u64 {
        self.share(card).map_or(0, |s| s.submitted.load(SeqCst))
    }

    /// Whether this process's work up to the mark is done.
    #[must_use]
    pub fn is_done(&self, card: usize, mark: u64) -> bool {
        let Some(share) = self.share(card) else { return true };
        if share.done.load(SeqCst) >= mark {
            return true;
        }
        let _held = self.hold(card);
        self.advance(card, now(self.region()));
        share.done.load(SeqCst) >= mark
    }

    /// When the work up to the mark was done; none while it is not.
    #[must_use]
    pub fn done_at(&self, card: usize, mark: u64) -> Option<u64> {
        if !self.is_done(card, mark) {
            return None;
        }
        self.share(card).and_then(|s| s.reached(mark))
    }

    /// Waits until the work up to the mark is done; a simulated clock is moved on instead.
    pub fn wait(&self, card: usize, mark: u64) {
        let Some(share) = self.share(card) else { return };
        while !self.is_done(card, mark) {
            self.reap(now(self.region()));
            let left = mark.saturating_sub(share.done.load(SeqCst));
            if self.region().clock.load(SeqCst) != 0 {
                self.region().clock.fetch_add(left.max(1), SeqCst);
                continue;
            }
            // Rivals only lengthen it, so this never sleeps past the end by more than the timer's slack.
            thread::sleep(Duration::from_nanos(left.clamp(1_000, 5_000_000)));
        }
    }

    /// Busy ns of the card since its first use, over all processes.
    #[must_use]
    pub fn busy(&self, card: usize) -> u64 {
        self.bring_up(card);
        self.slots().iter().map(|s| s.cards[card].done.load(SeqCst)).sum()
    }

    fn bring_up(&self, card: usize) {
        let now = now(self.region());
        self.reap(now);
        let _held = self.hold(card);
        self.advance(card, now);
    }

    /// One sample for every process that was busy in a full window that ended after `since` (the region's clock): its
    /// newest such window.
    #[must_use]
    pub fn samples(&self, card: usize, since: u64) -> Vec<Sample> {
        if card >= CARDS {
            return Vec::new();
        }
        self.bring_up(card);
        let current = now(self.region()) / WINDOW_NS;
        let mut found = Vec::new();
        for (index, slot) in self.slots().iter().enumerate().take(SLOTS) {
            let newest = slot.cards[card]
                .windows
                .iter()
                .map(|w| w.load(SeqCst))
                .map(|w| (w >> 32, w & 0xFFFF_FFFF))
                .filter(|(window, busy)| *busy > 0 && *window < current && (window + 1) * WINDOW_NS > since)
                .max();
            if let Some((window, busy)) = newest.filter(|_| slot.pid.load(SeqCst) != 0)
                && let Some(pid) = self.pid_of(index)
            {
                found.push(Sample { pid, end: (window + 1) * WINDOW_NS, busy });
            }
        }
        found
    }

    /// Busy share of the card in the newest full window, percent.
    #[must_use]
    pub fn utilization(&self, card: usize) -> u32 {
        if card >= CARDS {
            return 0;
        }
        self.bring_up(card);
        let last = (now(self.region()) / WINDOW_NS).wrapping_sub(1);
        let words = self.slots().iter().flat_map(|s| &s.cards[card].windows).map(|w| w.load(SeqCst));
        let busy: u64 = words.filter(|w| w >> 32 == last).map(|w| w & 0xFFFF_FFFF).sum();
        u32::try_from((busy * 100).div_ceil(WINDOW_NS)).unwrap_or(100).min(100)
    }
}

/// Starts the region's simulated clock, at 1 s; does nothing where it runs.
pub fn simulate(region: &Region) {
    let _ = region.clock.compare_exchange(0, 1_000_000_000, SeqCst, SeqCst);
}

/// Moves a simulated clock on and answers it; 0 with the real one.
pub fn move_on(region: &Region, ns: u64) -> u64 {
    let moved = region.clock.fetch_update(SeqCst, SeqCst, |c| (c != 0).then_some(c + ns));
    moved.map_or(0, |before| before + ns)
}
