//! From the driver's lists to what one container does with one card. Pure.

use mullion_pace::{MAX_WINDOW_NS, Meter, Reading};

use crate::monitor::engine::Now;
use crate::monitor::processes::Processes;
use crate::monitor::snapshot::Measured;
use crate::nvml::sample::CardSample;

/// A measurement below this share says nothing of work that goes on: the window may have ended since.
const BUSY_PERCENT: u32 = 50;
/// A process whose newest measurement is older than this is shown as idle: three of a driver's longest windows.
const LISTED_NS: u64 = 3 * MAX_WINDOW_NS;

/// What is kept of one container on one card.
#[derive(Clone, Debug, Default)]
pub struct Gauge {
    meter: Meter,
    /// Utilisation in 1/1000, as it was last known.
    per_mille: u32,
}

impl Gauge {
    /// Tells whether the container is held to its share from now on. True where the last reading says something of that
    /// share.
    pub fn held(&mut self, held: bool, now: Now) -> bool {
        self.meter.held(held, now.unix_ns)
    }

    /// What the driver says of a container on one card, and whether something of it runs now.
    pub fn measure(
        &mut self,
        now: Now,
        card: String,
        sample: Option<&CardSample>,
        processes: Option<&Processes>,
    ) -> (Measured, Reading, bool) {
        let mut measured = Measured { card, ..Measured::default() };
        let (Some(sample), Some(processes)) = (sample, processes) else {
            return (measured, Reading::Missing, false);
        };
        if let Some(list) = &sample.processes {
            let of_us = || list.iter().filter(|p| processes.has(p.pid));
            measured.processes = of_us().count();
            measured.pids = of_us().map(|p| p.pid).collect();
            // One process of which the driver does not say how much makes the sum unknown.
            measured.bytes = of_us().map(|p| p.bytes).try_fold(0_u64, |sum, b| Some(sum.saturating_add(b?)));
            measured.by_process = of_us().filter_map(|p| Some((p.pid, p.bytes?))).collect();
        }
        let Some(busy) = &sample.busy else { return (measured, Reading::Missing, false) };
        let mut busy_now = false;
        for sample in busy.iter().filter(|b| processes.has(b.pid)) {
            let at_ns = sample.at_us.saturating_mul(1000);
            if at_ns > now.unix_ns.saturating_add(MAX_WINDOW_NS) {
                // Of before the clock was set back: a driver tells it again for as long as it has room for it.
                continue;
            }
            self.meter.push(sample.pid, at_ns, sample.sm.min(100));
            let fresh = now.unix_ns.saturating_sub(at_ns) <= MAX_WINDOW_NS;
            busy_now |= fresh && sample.sm >= BUSY_PERCENT;
            let latest = measured.sm_by_process.entry(sample.pid).or_insert((at_ns, 0));
            if at_ns >= latest.0 {
                *latest = (at_ns, sample.sm.min(100));
            }
        }
        measured.sm_by_process.retain(|_, (at_ns, _)| now.unix_ns.saturating_sub(*at_ns) <= LISTED_NS);
        let mut reading = self.meter.take(now.unix_ns);
        // A program with a context is in the driver's list. If none is, because the container runs none or because the
        // driver tells pids that are not ours (of another namespace), its silence says nothing of what they do.
        if reading == Reading::Absent && sample.processes.is_some() && measured.processes == 0 {
            reading = Reading::Missing;
            self.per_mille = 0;
        }
        match reading {
            Reading::Present { per_mille, .. } => self.per_mille = per_mille,
            Reading::Absent => self.per_mille = 0,
            // Who is not listed any more has stopped, or the driver is late: for the loop the difference matters, for people
            // the former is what nearly always happened.
            Reading::Gathering | Reading::Stale { .. }
                if self.meter.age_ns(now.unix_ns).is_none_or(|age_ns| age_ns > LISTED_NS) =>
            {
                self.per_mille = 0;
            }
            Reading::Gathering | Reading::Stale { .. } | Reading::Missing => {}
        }
        measured.per_mille = Some(self.per_mille);
        (measured, reading, busy_now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nvml::sample::{Busy, ProcessMemory};

    /// A program may end at any time, also with too few samples left to judge by.
    #[test]
    fn whoever_stops_is_shown_as_idle_within_seconds() {
        let processes = Processes { inside: [(4711, 1)].into() };
        for busy_for in 1..=8_u64 {
            let mut gauge = Gauge::default();
            let mut shown = Vec::new();
            for second in 100..130_u64 {
                let at_us = second * 1_000_000;
                let busy = (second < 100 + busy_for).then_some(Busy { pid: 4711, at_us, sm: 92 });
                let sample = CardSample {
                    processes: Some(vec![ProcessMemory { pid: 4711, bytes: Some(1 << 20) }]),
                    busy: Some(busy.into_iter().collect()),
                    ..CardSample::default()
                };
                let now = Now { unix_ns: second * 1_000_000_000, mono_ns: second * 1_000_000_000 };
                let (measured, ..) = gauge.measure(now, "GPU-a".into(), Some(&sample), Some(&processes));
                shown.push(measured.per_mille);
            }
            let idle = usize::try_from(busy_for).unwrap_or(0) + 4;
            assert!(shown.iter().skip(idle).all(|shown| *shown == Some(0)), "{busy_for} s: {shown:?}");
        }
    }

    /// What the driver told before says nothing any more, also where it tells it again.
    #[test]
    fn a_clock_that_is_set_back_is_no_end_of_measuring() {
        let processes = Processes { inside: [(4711, 1)].into() };
        let mut gauge = Gauge::default();
        let mut told = Vec::new();
        let mut look = |second: u64, sm: u32| {
            told.push(Busy { pid: 4711, at_us: second * 1_000_000, sm });
            let sample = CardSample {
                processes: Some(vec![ProcessMemory { pid: 4711, bytes: Some(1 << 20) }]),
                busy: Some(told.clone()),
                ..CardSample::default()
            };
            let now = Now { unix_ns: second * 1_000_000_000 + 1, mono_ns: 1 };
            gauge.measure(now, "GPU-a".into(), Some(&sample), Some(&processes))
        };
        for second in 8000..8010 {
            look(second, 90);
        }
        let readings: Vec<_> = (4400..4412).map(|second| look(second, 20)).collect();
        let (shown, reading, busy) = &readings[readings.len() - 1];
        assert!(shown.per_mille.is_some_and(|shown| (195..=215).contains(&shown)), "{shown:?}");
        assert!(!busy && shown.sm_by_process[&4711] == (4411 * 1_000_000_000, 20), "{shown:?}");
        let judged = readings.iter().filter(|(_, reading, _)| matches!(reading, Reading::Present { .. }));
        assert!(judged.count() >= 3 && *reading != Reading::Absent);
    }

    /// With windows of 1/6 s many processes have many samples, and none is left out.
    #[test]
    fn many_busy_processes_are_shown() {
        for count in [1, 8, 40] {
            let processes = Processes { inside: (1..=count).map(|pid| (pid, 1)).collect() };
            let mut gauge = Gauge::default();
            let mut shown = None;
            for second in 100..110_u64 {
                // The driver answers with all windows of the last ten seconds.
                let windows = (100 * 6..=second * 6).map(|window| window * 1_000_000 / 6);
                let busy =
                    windows.flat_map(|at_us| (1..=count).map(move |pid| Busy { pid, at_us, sm: 80 / count }));
                let sample = CardSample { busy: Some(busy.collect()), ..CardSample::default() };
                let now = Now { unix_ns: second * 1_000_000_000, mono_ns: second * 1_000_000_000 };
                shown = gauge.measure(now, "GPU-a".into(), Some(&sample), Some(&processes)).0.per_mille;
            }
            assert!(shown.is_some_and(|shown| (795..=900).contains(&shown)), "{count}: {shown:?}");
        }
    }

    #[test]
    fn silence_about_processes_that_the_driver_does_not_list_says_nothing() {
        let processes = Processes { inside: [(4711, 1)].into() };
        let sample = |pid| CardSample {
            processes: Some(vec![ProcessMemory { pid, bytes: Some(1 << 20) }]),
            busy: Some(Vec::new()),
            ..CardSample::default()
        };
        let read = |pid| {
            let mut gauge = Gauge::default();
            let mut last = Reading::Missing;
            for second in 100..110 {
                let now = Now { unix_ns: second * 1_000_000_000, mono_ns: second * 1_000_000_000 };
                last = gauge.measure(now, "GPU-a".into(), Some(&sample(pid)), Some(&processes)).1;
            }
            last
        };
        assert_eq!(read(4711), Reading::Absent, "listed and idle");
        assert_eq!(read(1), Reading::Missing, "the driver tells another pid");
    }
}
