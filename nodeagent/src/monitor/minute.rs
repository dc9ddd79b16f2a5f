//! What a container did in a minute, for the audit log: a row when something happened, none for a minute in which
//! nothing did. Pure.

use mullion_audit::CardMinute;

use crate::monitor::usage::CardUsage;

const NS: u64 = 1_000_000_000;

/// What is counted of one card since the last row.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Card {
    /// Counters at the last row; `None` before the first look.
    start: Option<CardUsage>,
    /// As of the last look.
    last: CardUsage,
    /// Most memory seen.
    most: u64,
    /// Sum of readings of utilisation in 1/1000, and how many.
    busy: (u64, u64),
}

/// What is counted of one container since the last row.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Minute {
    /// Number of the minute since 1970.
    number: u64,
    cards: Vec<Card>,
    /// What was counted before the first look was counted by a former run of the agent.
    resumes: bool,
}

impl Minute {
    /// For a container that was there before the agent: usage files are made by an agent that runs, so what the file says at
    /// the first look was counted already, but for the time that no agent ran. A container whose grant the agent learns only later,
    /// as after the loss of its state file, is not known from a new one: what its file counts stands in a row once more.
    #[must_use]
    pub fn resuming() -> Self {
        Self { resumes: true, ..Self::default() }
    }

    /// Takes in a look; answers with the cards of the minute that is over, if anything happened in it. `busy` is what the
    /// driver measured, in 1/1000, `None` where it did not.
    pub fn look(
        &mut self,
        now_ns: u64,
        cards: &[CardUsage],
        busy: &[Option<u32>],
    ) -> Option<(u64, Vec<CardMinute>)> {
        let number = now_ns / (60 * NS);
        let over = if self.number != number && self.number != 0 { self.close() } else { None };
        self.number = number;
        self.cards.resize_with(cards.len(), Card::default);
        for ((kept, now), busy) in self.cards.iter_mut().zip(cards).zip(busy) {
            if kept.start.is_none() {
                // Else what was counted before the first look is this minute's, too: the file is as old as the container.
                let start = if self.resumes { now.clone() } else { CardUsage::default() };
                kept.last = start.clone();
                kept.start = Some(start);
            }
            // Another process's peak within the minute stands in the library's own; a former minute's does, too.
            let peak = if now.peak > kept.last.peak { now.peak } else { 0 };
            kept.most = kept.most.max(now.used).max(peak);
            if let Some(busy) = busy {
                kept.busy = (kept.busy.0 + u64::from(*busy), kept.busy.1 + 1);
            }
            kept.last = now.clone();
        }
        over
    }

    /// Ends the minute now, for a container that is gone.
    pub fn close(&mut self) -> Option<(u64, Vec<CardMinute>)> {
        let mut happened = false;
        let mut cards = Vec::with_capacity(self.cards.len());
        for kept in &mut self.cards {
            let now = &kept.last;
            let start = kept.start.replace(now.clone()).unwrap_or_default();
            // A tenant can set counters back; then this minute's are not known.
            let more = |count: fn(&CardUsage) -> u64| count(now).saturating_sub(count(&start));
            let launched = now.last_launch_ns != start.last_launch_ns;
            let row = CardMinute {
                card: now.card.clone(),
                limit_mib: now.limit >> 20,
                peak_mib: kept.most.div_ceil(1 << 20),
                used_mib: now.used.div_ceil(1 << 20),
                mean_utilization: kept
                    .busy
                    .0
                    .checked_div(kept.busy.1)
                    .map(|m| u32::try_from(m / 10).unwrap_or(100)),
                limit_hits: more(|c| c.limit_hits),
                card_full: more(|c| c.card_full),
                launch_waits: more(|c| c.waits),
                launch_wait_ms: more(|c| c.wait_ns / 1_000_000),
                first_launch: seconds(now.first_launch_ns),
                last_launch: seconds(now.last_launch_ns),
            };
            happened |= launched
                || [row.limit_hits, row.card_full, row.launch_waits].iter().any(|count| *count > 0)
                || now.used != start.used
                || kept.most > now.used
                || row.mean_utilization.is_some_and(|m| m > 0);
            (kept.most, kept.busy) = (now.used, (0, 0));
            cards.push(row);
        }
        happened.then_some((self.number * 60, cards))
    }
}

/// Unix time in whole seconds; `None` for what never was.
fn seconds(ns: u64) -> Option<u64> {
    (ns != 0).then_some(ns / NS)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn usage(used: u64, hits: u64, launched_s: u64) -> Vec<CardUsage> {
        vec![CardUsage {
            card: "GPU-0".to_owned(),
            limit: 4 << 30,
            used: used << 20,
            peak: used << 20,
            limit_hits: hits,
            first_launch_ns: launched_s.min(60) * NS,
            last_launch_ns: launched_s * NS,
            ..CardUsage::default()
        }]
    }

    #[test]
    fn a_minute_in_which_something_happened_is_a_row() {
        let mut minute = Minute::default();
        let mut at = |seconds: u64, cards: &[CardUsage], busy| minute.look(seconds * NS, cards, &[busy]);
        assert_eq!(at(61, &usage(0, 0, 0), Some(0)), None);
        assert_eq!(at(90, &usage(700, 0, 89), Some(400)), None);
        assert_eq!(at(119, &usage(100, 2, 110), Some(200)), None);
        let (start, cards) = at(121, &usage(100, 2, 110), None).unwrap();
        let row = &cards[0];
        assert_eq!((start, row.card.as_str(), row.limit_mib), (60, "GPU-0", 4096));
        assert_eq!((row.peak_mib, row.used_mib, row.limit_hits), (700, 100, 2));
        assert_eq!(
            (row.mean_utilization, row.first_launch, row.last_launch),
            (Some(20), Some(60), Some(110))
        );
        assert_eq!(at(180, &usage(100, 2, 110), None), None, "nothing happened");
        // A tenant sets his counters back.
        assert_eq!(at(200, &usage(0, 0, 0), None), None);
        let (_, cards) = at(241, &usage(0, 0, 0), None).unwrap();
        assert_eq!((cards[0].limit_hits, cards[0].last_launch, cards[0].mean_utilization), (0, None, None));
    }

    #[test]
    fn what_a_former_run_of_the_agent_counted_is_not_counted_again() {
        let mut minute = Minute::resuming();
        assert_eq!(minute.look(61 * NS, &usage(100, 1000, 50), &[None]), None);
        assert_eq!(minute.look(121 * NS, &usage(100, 1000, 50), &[None]), None, "nothing happened");
        assert_eq!(minute.look(122 * NS, &usage(100, 1007, 122), &[None]), None);
        let (_, cards) = minute.close().unwrap();
        assert_eq!((cards[0].limit_hits, cards[0].last_launch), (7, Some(122)));
    }

    /// A tenant writes what he likes into the file.
    #[test]
    fn counts_of_any_size_are_a_row() {
        let mut minute = Minute::default();
        let mut cards = usage(1, u64::MAX, 60);
        (cards[0].card_full, cards[0].waits) = (u64::MAX, u64::MAX);
        assert_eq!(minute.look(61 * NS, &cards, &[None]), None);
        assert_eq!(minute.close().unwrap().1[0].limit_hits, u64::MAX);
    }

    #[test]
    fn a_container_that_ends_within_a_minute_has_its_row() {
        let mut minute = Minute::default();
        assert_eq!(minute.close(), None);
        assert_eq!(minute.look(600 * NS, &usage(5, 0, 600), &[None]), None);
        let (start, cards) = minute.close().unwrap();
        assert_eq!((start, cards[0].peak_mib), (600, 5));
        assert_eq!(minute.close(), None);
    }
}
