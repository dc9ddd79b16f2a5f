//! Whose turn it is to write a grant's files.
//!
//! A call that the kubelet gave up goes on, and the kubelet asks again. So a call may come to its turn when a later one about
//! the same grant has been answered and the container runs: what the earlier one would write then replaced files that are in
//! use.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::{Mutex, MutexGuard};

/// Locks of pods: two calls about one pod write the same files.
const LOCKS: usize = 32;

/// The number of a call, in the order in which they came.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ticket(u64);

/// All turns.
#[derive(Debug, Default)]
pub struct Turns {
    last: AtomicU64,
    pods: [Mutex<BTreeMap<String, Ticket>>; LOCKS],
}

/// One call's, until it is dropped. By grant: the call that wrote its files.
#[derive(Debug)]
pub struct Turn<'a>(Option<MutexGuard<'a, BTreeMap<String, Ticket>>>);

impl Turns {
    /// A call comes.
    pub fn come(&self) -> Ticket {
        Ticket(self.last.fetch_add(1, Ordering::Relaxed) + 1)
    }

    /// Waits until no other call writes files of `pod`.
    pub async fn of(&self, pod: &str) -> Turn<'_> {
        let sum = pod.bytes().fold(0_usize, |sum, byte| sum.wrapping_mul(31).wrapping_add(usize::from(byte)));
        match self.pods.get(sum % LOCKS) {
            Some(lock) => Turn(Some(lock.lock().await)),
            None => Turn(None),
        }
    }
}

impl Turn<'_> {
    /// Whether a call that came later has written the grant's files.
    #[must_use]
    pub fn is_late(&self, grant: &str, ticket: Ticket) -> bool {
        self.0.as_ref().and_then(|written| written.get(grant)).is_some_and(|by| *by > ticket)
    }

    /// The call with this ticket has written the grant's files. Grants that are not `known` any more are forgotten.
    pub fn wrote(&mut self, grant: &str, ticket: Ticket, known: impl Fn(&str) -> bool) {
        if let Some(written) = &mut self.0 {
            written.retain(|grant, _| known(grant));
            written.insert(grant.to_owned(), ticket);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn who_comes_to_his_turn_after_a_later_call_is_late() {
        let turns = Turns::default();
        let [first, second, third] = [turns.come(), turns.come(), turns.come()];
        let mut turn = turns.of("pod").await;
        assert!(!turn.is_late("a", second));
        turn.wrote("a", second, |_| true);
        drop(turn);
        let mut turn = turns.of("pod").await;
        assert_eq!([first, second, third].map(|ticket| turn.is_late("a", ticket)), [true, false, false]);
        assert!(!turn.is_late("b", first), "another container's");
        // What is gone is not kept for ever.
        turn.wrote("b", third, |grant| grant != "a");
        assert!(!turn.is_late("a", first) && turn.is_late("b", first));
    }
}
