//! Which replica reconciles: a Lease, read the way client-go does.
//!
//! Clocks of different machines are never compared: a Lease is up when *we* have seen it unchanged for its whole
//! duration, and we step down when our own clock says that we could not renew in time. Safety never depends on any
//! of this (design, section 3); it only keeps two replicas from doing the same work.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::api::{Api, ObjectMeta, PostParams};
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::cluster::Cluster;
use crate::config;
use crate::error::Error;

/// How often those who do not hold the Lease look at it.
const LOOK: Duration = Duration::from_secs(1);

/// What to do about a Lease that was just read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Move {
    /// There is none: create it as ours.
    Create,
    /// It is ours: renew it.
    Renew,
    /// It is free, or its holder has been silent for its whole duration: take it.
    Take,
    /// Somebody else holds it.
    Wait,
}

/// What was seen of the Lease and what we hold: a state machine without IO.
#[derive(Debug)]
pub struct Election {
    me: String,
    duration: Duration,
    seen: Option<(String, Instant)>,
    until: Option<Instant>,
}

impl Election {
    /// `me` is unique per process; `duration` is the Lease's.
    #[must_use]
    pub const fn new(me: String, duration: Duration) -> Self {
        Self { me, duration, seen: None, until: None }
    }

    /// Judges the Lease as read at `now`: its holder and its resource version.
    pub fn judge(&mut self, lease: Option<(&str, &str)>, now: Instant) -> Move {
        let Some((holder, version)) = lease else { return Move::Create };
        let since = match &self.seen {
            Some((seen, since)) if seen == version => *since,
            _ => {
                self.seen = Some((version.to_owned(), now));
                now
            }
        };
        if holder == self.me {
            Move::Renew
        } else if holder.is_empty() || now.duration_since(since) >= self.duration {
            Move::Take
        } else {
            Move::Wait
        }
    }

    /// Our write of the Lease, begun at `begun`, went through: we lead for two thirds of its duration from then.
    /// The last third is the margin in which we have stopped and nobody else has begun.
    pub fn renewed(&mut self, begun: Instant) {
        self.until = Some(begun + self.duration * 2 / 3);
    }

    /// It is somebody else's now.
    pub const fn lost(&mut self) {
        self.until = None;
    }

    /// Until when we lead.
    #[must_use]
    pub fn until(&self, now: Instant) -> Option<Instant> {
        self.until.filter(|until| *until > now)
    }
}

/// The Lease of this installation.
#[derive(Debug)]
pub struct Elector {
    cluster: Cluster,
    namespace: String,
    settings: config::Lease,
    me: String,
}

impl Elector {
    /// `me` is unique per process.
    #[must_use]
    pub const fn new(cluster: Cluster, namespace: String, settings: config::Lease, me: String) -> Self {
        Self { cluster, namespace, settings, me }
    }

    /// Takes part until `stop`, then gives the Lease back. `leading` says whether we lead.
    pub async fn run(&self, leading: &watch::Sender<bool>, stop: &CancellationToken) {
        let duration = Duration::from_secs(self.settings.duration_seconds.into());
        let pause = Duration::from_secs(self.settings.renew_seconds.into());
        let mut election = Election::new(self.me.clone(), duration);
        loop {
            let until = election.until(Instant::now());
            let deadline = async {
                match until {
                    Some(until) => tokio::time::sleep_until(until).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = stop.cancelled() => break,
                () = deadline => {
                    tracing::warn!(lease = self.settings.name, "could not renew the lease in time");
                    election.lost();
                }
                result = self.attempt(&mut election) => {
                    if let Err(error) = result {
                        let cause = mullion_telemetry::source_chain(&error);
                        tracing::warn!(code = error.code(), error = cause, "lease not renewed");
                    }
                }
            }
            let leads = election.until(Instant::now());
            if leading.send_if_modified(|was| std::mem::replace(was, leads.is_some()) != leads.is_some()) {
                tracing::info!(lease = self.settings.name, leads = leads.is_some(), "leadership changed");
            }
            // The holder writes; the others only look, so that they are not late.
            let next = Instant::now() + if leads.is_some() { pause } else { pause.min(LOOK) };
            tokio::select! {
                () = stop.cancelled() => break,
                () = tokio::time::sleep_until(leads.map_or(next, |until| until.min(next))) => {}
            }
        }
        let led = election.until(Instant::now()).is_some();
        leading.send_replace(false);
        if led && let Err(error) = self.give_back().await {
            tracing::warn!(code = error.code(), "lease not given back");
        }
    }

    fn api(&self) -> Api<Lease> {
        Api::namespaced(self.cluster.client(), &self.namespace)
    }

    async fn read(&self) -> Result<Option<Lease>, Error> {
        let (api, name) = (self.api(), self.settings.name.as_str());
        self.cluster.call("GET", || format!("lease {name}"), api.get_opt(name)).await
    }

    async fn attempt(&self, election: &mut Election) -> Result<(), Error> {
        let found = self.read().await?;
        let begun = Instant::now();
        let lease = found.as_ref().map(|lease| {
            let holder = lease.spec.as_ref().and_then(|spec| spec.holder_identity.as_deref());
            (holder.unwrap_or_default(), lease.metadata.resource_version.as_deref().unwrap_or_default())
        });
        let step = election.judge(lease, begun);
        if step == Move::Wait {
            election.lost();
            return Ok(());
        }
        let written = self.write(found, step, &self.me).await;
        match written {
            Ok(()) => {
                election.renewed(begun);
                Ok(())
            }
            // Somebody else was faster.
            Err(error) if error.status().is_some_and(|s| s.is_conflict() || s.is_already_exists()) => Ok(()),
            Err(error) => Err(error),
        }
    }

    async fn write(&self, found: Option<Lease>, step: Move, holder: &str) -> Result<(), Error> {
        let (api, name) = (self.api(), self.settings.name.clone());
        let mut lease = found.unwrap_or_else(|| Lease {
            metadata: ObjectMeta {
                name: Some(name.clone()),
                namespace: Some(self.namespace.clone()),
                ..ObjectMeta::default()
            },
            spec: None,
        });
        let spec = lease.spec.get_or_insert_with(LeaseSpec::default);
        let now = MicroTime(Timestamp::now());
        if step != Move::Renew {
            spec.acquire_time = Some(now.clone());
            spec.lease_transitions = Some(spec.lease_transitions.unwrap_or(0).saturating_add(1));
        }
        spec.holder_identity = Some(holder.to_owned());
        spec.lease_duration_seconds = i32::try_from(self.settings.duration_seconds).ok();
        spec.renew_time = Some(now);
        let params = PostParams::default();
        let object = || format!("lease {name}");
        if step == Move::Create {
            self.cluster.call("POST", object, api.create(&params, &lease)).await.map(|_| ())
        } else {
            // The lease carries the resource version that was judged.
            self.cluster.call("PUT", object, api.replace(&name, &params, &lease)).await.map(|_| ())
        }
    }

    async fn give_back(&self) -> Result<(), Error> {
        let Some(lease) = self.read().await? else { return Ok(()) };
        let holder = lease.spec.as_ref().and_then(|spec| spec.holder_identity.as_deref());
        if holder != Some(self.me.as_str()) {
            return Ok(());
        }
        self.write(Some(lease), Move::Renew, "").await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEN: Duration = Duration::from_secs(10);

    fn at(start: Instant, seconds: u64) -> Instant {
        start + Duration::from_secs(seconds)
    }

    #[test]
    fn a_silent_holder_is_followed_after_the_whole_duration() {
        let start = Instant::now();
        let mut election = Election::new("me".to_owned(), TEN);
        assert_eq!(election.judge(None, start), Move::Create);
        assert_eq!(election.judge(Some(("other", "1")), start), Move::Wait);
        assert_eq!(election.judge(Some(("other", "1")), at(start, 9)), Move::Wait);
        assert_eq!(election.judge(Some(("other", "2")), at(start, 10)), Move::Wait, "it was renewed");
        assert_eq!(election.judge(Some(("other", "2")), at(start, 19)), Move::Wait);
        assert_eq!(election.judge(Some(("other", "2")), at(start, 20)), Move::Take);
        assert_eq!(election.judge(Some(("", "3")), at(start, 21)), Move::Take, "given back");
        assert_eq!(election.judge(Some(("me", "4")), at(start, 22)), Move::Renew);
    }

    #[test]
    fn we_stop_before_anyone_else_may_begin() {
        let start = Instant::now();
        let mut election = Election::new("me".to_owned(), TEN);
        assert_eq!(election.until(start), None);
        election.renewed(start);
        assert_eq!(election.until(at(start, 6)), Some(start + TEN * 2 / 3));
        assert_eq!(
            election.until(at(start, 7)),
            None,
            "two thirds are over, and nobody may take it before ten"
        );
        election.renewed(at(start, 7));
        election.lost();
        assert_eq!(election.until(at(start, 8)), None);
    }
}
