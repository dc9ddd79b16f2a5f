//! Threads for work that a tenant can hold up. One long `write`, `fallocate` or `truncate` of his keeps others from writing
//! to his usage file until it is done, which takes seconds, and where he wants it, for ever; on some file systems from
//! reading it, too. Nobody else may wait for that.
//!
//! Work is done one after the other by one thread, and waited for. What takes longer is left to that thread, which ends with
//! it, and another one does the rest: so there is a thread more for each container whose file is held up, and no other.

use std::collections::BTreeMap;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel};
use std::time::{Duration, Instant};

use tracing::warn;

use crate::monitor::target::Key;

/// Work is waited for this long also when others have used up the patience: nearly all takes far less.
const LEAST: Duration = Duration::from_millis(20);

/// Work, and where its result goes.
type Job<T> = (Box<dyn FnOnce() -> T + Send>, Sender<T>);

/// Does work for containers: for each one thing at a time.
#[derive(Debug)]
pub struct Hands<T> {
    worker: Option<Sender<Job<T>>>,
    /// Since when, in the caller's ns, work for a container has not come back.
    out: BTreeMap<Key, (u64, Receiver<T>)>,
    patience: Duration,
    left: Duration,
}

/// What became of work.
#[derive(Debug, PartialEq, Eq)]
pub enum Late<T> {
    /// It is done.
    Came(T),
    /// It is not, so many ns after it was begun.
    Out(u64),
    /// It panicked.
    Lost,
}

impl<T: Send + 'static> Hands<T> {
    /// Hands that are waited for that long, for all containers of a look together.
    #[must_use]
    pub const fn new(patience: Duration) -> Self {
        Self { worker: None, out: BTreeMap::new(), patience, left: patience }
    }

    /// Another look begins: only work for containers that `is_here` counts.
    pub fn begin(&mut self, is_here: impl Fn(&Key) -> bool) {
        self.left = self.patience;
        self.out.retain(|key, _| is_here(key));
    }

    /// Whether all work has come back.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.out.is_empty()
    }

    /// Work for `key` that was not waited for; `None` where there is none.
    pub fn late(&mut self, key: &Key, now_ns: u64) -> Option<Late<T>> {
        let (since_ns, result) = self.out.get(key)?;
        let late = match result.try_recv() {
            Ok(result) => Late::Came(result),
            Err(TryRecvError::Empty) => return Some(Late::Out(now_ns.saturating_sub(*since_ns))),
            Err(TryRecvError::Disconnected) => Late::Lost,
        };
        self.out.remove(key);
        Some(late)
    }

    /// Does `work` for `key`, of which nothing is late. What takes too long to wait for is [`Late::Out`].
    pub fn work(&mut self, key: &Key, now_ns: u64, work: impl FnOnce() -> T + Send + 'static) -> Late<T> {
        let worker = match self.worker.take().map_or_else(start, Ok) {
            Ok(worker) => worker,
            Err(error) => {
                warn!(%error, "no thread for containers' files");
                return Late::Came(work());
            }
        };
        let (answer, result) = channel();
        let from = Instant::now();
        // Whoever panicked takes nothing any more, and the next one has another.
        if worker.send((Box::new(work), answer)).is_err() {
            return Late::Lost;
        }
        let patience = self.left.min(self.patience / 4).max(LEAST);
        let done = result.recv_timeout(patience);
        let took = from.elapsed();
        if took > LEAST {
            self.left = self.left.saturating_sub(took);
        }
        match done {
            Ok(result) => {
                self.worker = Some(worker);
                Late::Came(result)
            }
            Err(RecvTimeoutError::Timeout) => {
                self.out.insert(key.clone(), (now_ns, result));
                Late::Out(0)
            }
            Err(RecvTimeoutError::Disconnected) => Late::Lost,
        }
    }
}

/// A thread that works until nobody has anything for it.
fn start<T: Send + 'static>() -> std::io::Result<Sender<Job<T>>> {
    let (worker, jobs) = channel::<Job<T>>();
    std::thread::Builder::new().name("usage-files".to_owned()).spawn(move || {
        for (work, answer) in jobs {
            // Whose container is gone wants it no more.
            let _ = answer.send(work());
        }
    })?;
    Ok(worker)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(name: &str) -> Key {
        (name.to_owned(), "main".to_owned())
    }

    #[test]
    fn whoever_is_held_up_keeps_nobody_waiting() {
        // A quarter of it for each: only what is held waits so long.
        let mut hands = Hands::new(Duration::from_secs(20));
        assert_eq!(hands.work(&key("a"), 0, || 1), Late::Came(1));
        let (go, gate) = channel::<()>();
        let begun = Instant::now();
        assert_eq!(
            hands.work(&key("a"), 7, move || {
                let _ = gate.recv();
                2
            }),
            Late::Out(0)
        );
        assert_eq!(hands.late(&key("a"), 10), Some(Late::Out(3)));
        assert_eq!(hands.late(&key("b"), 10), None);
        assert_eq!(hands.work(&key("b"), 10, || 3), Late::Came(3));
        assert!(!hands.is_idle());
        go.send(()).unwrap();
        // What comes late is not lost.
        let late = loop {
            match hands.late(&key("a"), 10) {
                Some(Late::Out(3)) => assert!(begun.elapsed() < Duration::from_mins(1)),
                late => break late,
            }
        };
        assert_eq!(late, Some(Late::Came(2)));
        assert!(hands.is_idle());
        assert_eq!(hands.work(&key("a"), 11, || 4), Late::Came(4));
    }

    /// However many tenants hold their files, a look ends.
    #[test]
    fn all_together_are_waited_for_so_long() {
        let mut hands = Hands::new(Duration::from_secs(4));
        let gates: Vec<_> = (0..40).map(|_| channel::<()>()).collect();
        let begun = Instant::now();
        let mut held = Vec::new();
        for (number, (go, gate)) in gates.into_iter().enumerate() {
            held.push(go);
            assert_eq!(
                hands.work(&key(&number.to_string()), 0, move || {
                    let _ = gate.recv();
                }),
                Late::Out(0)
            );
        }
        // A second for each would be 40.
        assert!(begun.elapsed() < Duration::from_secs(25), "{:?}", begun.elapsed());
        hands.begin(|_| false);
        assert!(hands.is_idle(), "whose container is gone");
    }

    #[test]
    fn work_that_panics_costs_its_own_result() {
        let mut hands = Hands::new(Duration::from_secs(20));
        assert_eq!(hands.work(&key("a"), 0, || -> u8 { unreachable!("a bug") }), Late::Lost);
        assert_eq!(hands.late(&key("a"), 0), None);
        assert_eq!(hands.work(&key("a"), 0, || 1), Late::Came(1));
        // Also where nobody waited for it.
        let mut hands = Hands::new(Duration::ZERO);
        let (go, gate) = channel::<()>();
        let late = hands.work(&key("a"), 0, move || -> u8 {
            let _ = gate.recv();
            unreachable!("a bug")
        });
        assert_eq!(late, Late::Out(0));
        go.send(()).unwrap();
        let begun = Instant::now();
        while hands.late(&key("a"), 0) != Some(Late::Lost) {
            assert!(begun.elapsed() < Duration::from_mins(1));
        }
        assert!(hands.is_idle());
    }
}
