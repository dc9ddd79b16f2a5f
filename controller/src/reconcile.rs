//! What the leader looks after: allocations that are over, collide or lead nowhere, pods that wait, pods that went
//! around us, the webhook's certificate.
//!
//! Every room has the same shape: a pure function says what looks wrong, a timer starts a check of that at the API
//! server, and only what the check confirms is acted on. Each may run twice, and starts from nothing.

pub mod certificates;
pub mod poke;
pub mod release;
pub mod unmanaged;
pub mod void;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use mullion_core::units::PodUid;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::cluster::Cluster;
use crate::config::Config;
use crate::error::Error;
use crate::extender::turns::Turns;
use crate::metrics::Metrics;
use crate::store::Store;

/// How long changes are gathered before a room looks at them.
const GATHER: Duration = Duration::from_millis(100);
/// How often a room looks when nothing changes: reads of what is in memory only.
const IDLE: Duration = Duration::from_secs(30);
/// First pause after something failed.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
/// Longest pause after something failed.
const LAST_PAUSE: Duration = Duration::from_mins(1);

/// What the rooms share.
#[derive(Clone, Debug)]
pub struct Context {
    /// The API server.
    pub cluster: Cluster,
    /// What is known.
    pub store: Arc<Store>,
    /// Who is binding which pod just now.
    pub turns: Arc<Turns<PodUid>>,
    /// What is counted.
    pub metrics: Metrics,
    /// Settings.
    pub config: Arc<Config>,
}

impl Context {
    /// Counts the outcome of an action and logs what failed.
    pub fn note<T>(&self, action: &'static str, object: &str, result: &Result<T, Error>) {
        match result {
            Ok(_) => self.metrics.action(action, "ok"),
            Err(error) => {
                self.metrics.action(action, error.code());
                let cause = mullion_telemetry::source_chain(error);
                tracing::warn!(
                    action,
                    object,
                    code = error.code(),
                    error = cause,
                    "action failed, it is tried again"
                );
            }
        }
    }
}

/// Runs every room until `stop`.
pub async fn run(context: &Context, stop: &CancellationToken) {
    tokio::join!(
        release::run(context, stop),
        void::run(context, stop),
        poke::run(context, stop),
        unmanaged::run(context, stop),
        certificates::run(context, stop),
    );
}

/// Calls `pass` with what it remembers, after every change of the store, and again after the time it asks for, until
/// `stop`.
async fn drive<S>(
    context: &Context,
    stop: &CancellationToken,
    mut state: S,
    pass: impl AsyncFn(&Context, &mut S) -> Duration,
) {
    let mut changes = context.store.changes();
    loop {
        changes.mark_unchanged();
        let again = tokio::select! {
            () = stop.cancelled() => return,
            again = pass(context, &mut state) => again,
        };
        let wait = async {
            tokio::select! {
                _ = changes.changed() => {}
                () = tokio::time::sleep(again.min(IDLE)) => {}
            }
            tokio::time::sleep(GATHER).await;
        };
        tokio::select! {
            () = stop.cancelled() => return,
            () = wait => {}
        }
    }
}

/// Since when things look wrong, and when to try them again after a failure.
#[derive(Debug, Default)]
pub struct Patience {
    since: BTreeMap<String, Instant>,
    pauses: BTreeMap<String, (Instant, Duration)>,
}

impl Patience {
    /// Forgets everything that does not look wrong any more.
    pub fn keep(&mut self, wrong: &[String]) {
        let kept: std::collections::BTreeSet<&String> = wrong.iter().collect();
        self.since.retain(|key, _| kept.contains(key));
        self.pauses.retain(|key, _| kept.contains(key));
    }

    /// How long to wait still before `key` may be acted on: until it has looked wrong for `grace`, and until the
    /// pause after its last failure is over. Zero: now.
    pub fn left(&mut self, key: &str, grace: Duration, now: Instant) -> Duration {
        let since = *self.since.entry(key.to_owned()).or_insert(now);
        let mut left = (since + grace).saturating_duration_since(now);
        if let Some((until, _)) = self.pauses.get(key) {
            left = left.max(until.saturating_duration_since(now));
        }
        left
    }

    /// `key` failed: leave it for a while, longer every time.
    pub fn failed(&mut self, key: &str, now: Instant) {
        let pause = self.pauses.get(key).map_or(FIRST_PAUSE, |(_, last)| (*last * 2).min(LAST_PAUSE));
        self.pauses.insert(key.to_owned(), (now + pause, pause));
    }

    /// `key` is done.
    pub fn done(&mut self, key: &str) {
        self.since.remove(key);
        self.pauses.remove(key);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patience() {
        let start = Instant::now();
        let second = |n| start + Duration::from_secs(n);
        let grace = Duration::from_secs(10);
        let mut patience = Patience::default();
        assert_eq!(patience.left("a", grace, start), grace);
        assert_eq!(patience.left("a", grace, second(4)), Duration::from_secs(6));
        assert_eq!(patience.left("a", grace, second(10)), Duration::ZERO);
        for pause in [1, 2, 4, 8, 16, 32, 60, 60] {
            patience.failed("a", second(10));
            assert_eq!(patience.left("a", grace, second(10)), Duration::from_secs(pause));
        }
        patience.keep(&["b".to_owned()]);
        assert_eq!(patience.left("a", grace, second(20)), grace, "what looked right in between starts anew");
        patience.done("a");
        assert_eq!(patience.left("a", grace, second(30)), grace);
    }
}
