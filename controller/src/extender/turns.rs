//! One at a time per key: binds of one pod wait for each other, binds of different pods never do.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::OwnedMutexGuard;

type Locks<K> = Arc<Mutex<BTreeMap<K, Arc<tokio::sync::Mutex<()>>>>>;

/// Who is at it, by key. An entry lives as long as somebody holds it or waits for it.
#[derive(Debug)]
pub struct Turns<K: Ord> {
    locks: Locks<K>,
}

impl<K: Ord> Default for Turns<K> {
    fn default() -> Self {
        Self { locks: Arc::default() }
    }
}

/// Having the turn; it ends when this is dropped.
#[derive(Debug)]
pub struct Turn<K: Ord + Clone + Debug> {
    locks: Locks<K>,
    key: K,
    guard: Option<OwnedMutexGuard<()>>,
}

impl<K: Ord + Clone + Debug> Turns<K> {
    /// Waits for the turn of `key`.
    pub async fn of(&self, key: K) -> Turn<K> {
        let lock = Arc::clone(self.locks.lock().entry(key.clone()).or_default());
        // The turn is made before waiting, so that a caller that stops waiting cleans up as well.
        let mut turn = Turn { locks: Arc::clone(&self.locks), key, guard: None };
        turn.guard = Some(lock.lock_owned().await);
        turn
    }

    /// The turn of `key` if nobody has it.
    #[must_use]
    pub fn try_of(&self, key: K) -> Option<Turn<K>> {
        let lock = Arc::clone(self.locks.lock().entry(key.clone()).or_default());
        let mut turn = Turn { locks: Arc::clone(&self.locks), key, guard: None };
        turn.guard = Some(lock.try_lock_owned().ok()?);
        Some(turn)
    }

    /// How many keys are in use.
    #[must_use]
    pub fn len(&self) -> usize {
        self.locks.lock().len()
    }

    /// Nobody is at anything.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl<K: Ord + Clone + Debug> Drop for Turn<K> {
    fn drop(&mut self) {
        let mut locks = self.locks.lock();
        self.guard = None;
        // Whoever waits has a clone of the lock, taken under the same map lock.
        if locks.get(&self.key).is_some_and(|lock| Arc::strong_count(lock) == 1) {
            locks.remove(&self.key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    // BL-08: no pod's bind waits for another pod.
    #[tokio::test(start_paused = true)]
    async fn same_key_waits_and_other_keys_do_not() {
        let turns: Turns<&str> = Turns::default();
        let first = turns.of("a").await;
        assert!(tokio::time::timeout(Duration::from_secs(1), turns.of("a")).await.is_err());
        let other = tokio::time::timeout(Duration::from_secs(1), turns.of("b")).await.unwrap();
        assert_eq!(turns.len(), 2);
        assert!(turns.try_of("a").is_none());
        drop((first, other));
        assert!(turns.is_empty(), "entries go with their users");
        assert!(turns.try_of("a").is_some());
        assert!(turns.is_empty());
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn never_two_at_once() {
        use std::sync::atomic::{AtomicU32, Ordering};
        let (turns, at_it) = (Arc::new(Turns::<u8>::default()), Arc::new(AtomicU32::new(0)));
        let mut tasks = tokio::task::JoinSet::new();
        for _ in 0..200 {
            let (turns, at_it) = (Arc::clone(&turns), Arc::clone(&at_it));
            tasks.spawn(async move {
                let _turn = turns.of(1).await;
                assert_eq!(at_it.fetch_add(1, Ordering::SeqCst), 0);
                tokio::task::yield_now().await;
                at_it.fetch_sub(1, Ordering::SeqCst);
            });
        }
        while let Some(done) = tasks.join_next().await {
            done.unwrap();
        }
        assert!(turns.is_empty());
    }
}
