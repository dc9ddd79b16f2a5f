//! A card that executes kernels of a known length: one process at a time, in time slices, as cards do without MPS.

use std::collections::VecDeque;

use mullion_pace::Measurement;

/// Time slice of a process while others have work.
const SLICE: u64 = 2_000_000;

#[derive(Debug)]
pub struct Kernel {
    pub left: u64,
    /// Where the launch is measured: what is known of it before it ran.
    pub sample: Option<Measurement>,
    /// When the kernel first ran.
    pub started: Option<u64>,
}

/// A measurement that ended.
#[derive(Debug)]
pub struct Measured {
    pub process: usize,
    pub measurement: Measurement,
}

#[derive(Debug)]
pub struct Card {
    pub now: u64,
    pub queues: Vec<VecDeque<Kernel>>,
    /// Time on the card, per process.
    pub busy: Vec<u64>,
    /// Which processes wait for their queue to get shorter than this.
    pub wake_below: Vec<usize>,
    pub measured: Vec<Measured>,
    current: usize,
    slice_end: u64,
}

impl Card {
    pub fn new(processes: usize) -> Self {
        Self {
            now: 0,
            queues: (0..processes).map(|_| VecDeque::new()).collect(),
            busy: vec![0; processes],
            wake_below: vec![0; processes],
            measured: Vec::new(),
            current: 0,
            slice_end: 0,
        }
    }

    /// Runs on until `to`, or until a process can go on; that process.
    pub fn run_until(&mut self, to: u64) -> Option<usize> {
        let n = self.queues.len();
        while self.now < to {
            if self.queues[self.current].is_empty() || self.now >= self.slice_end {
                let Some(next) =
                    (1..=n).map(|i| (self.current + i) % n).find(|p| !self.queues[*p].is_empty())
                else {
                    self.now = to;
                    return None;
                };
                self.current = next;
                self.slice_end = self.now + SLICE;
            }
            let process = self.current;
            let now = self.now;
            let kernel = self.queues[process].front_mut().unwrap();
            let started = *kernel.started.get_or_insert(now);
            let run = kernel.left.min(to - now).min(self.slice_end - now);
            kernel.left -= run;
            self.busy[process] += run;
            self.now += run;
            if kernel.left == 0 {
                if let Some(measurement) = kernel.sample {
                    let measurement = Measurement { ns: self.now - started, ..measurement };
                    self.measured.push(Measured { process, measurement });
                }
                self.queues[process].pop_front();
                if self.queues[process].len() < self.wake_below[process] {
                    self.wake_below[process] = 0;
                    return Some(process);
                }
            }
        }
        None
    }
}
