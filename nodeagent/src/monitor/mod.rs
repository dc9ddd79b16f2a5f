//! Looks after what containers do with their cards: reads their usage files, asks the driver once for all of them,
//! steers the pace of their launches, finds memory that no account explains, and keeps the figures that are scraped.
//!
//! [`target`] says whom to look after, [`files`], [`processes`], [`page`] and [`reap`] touch the outside, [`usage`], [`gauge`],
//! [`escape`], [`damage`] and [`minute`] decide, [`engine`] puts one look together, [`export`] shows the last one. [`hands`] do what
//! a tenant can hold up, [`heart`] tells containers that somebody looks after them, [`bounds`] keeps their files short. This file is the
//! shell around it: when to look, and whom to tell.
//!
//! A usage file is the tenant's. What it says is believed as far as it can be true, about its own container and about no
//! other: limits are the allocation's, processes the kernel's, and the driver's figures stand beside the file's.

pub mod bounds;
pub mod damage;
pub mod engine;
pub mod escape;
pub mod export;
pub mod files;
pub mod gauge;
pub mod hands;
pub mod heart;
pub mod minute;
pub mod mirror;
pub mod page;
pub mod processes;
pub mod reap;
pub mod reapers;
pub mod snapshot;
pub mod target;
pub mod usage;
mod wake;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use mullion_audit::Entry;
use mullion_core::units::PodUid;
use mullion_pace::policy::{self, Policy};
use nix::time::{ClockId, clock_gettime};
use parking_lot::RwLock;
use tokio::sync::mpsc;
use tokio::time::{Instant, MissedTickBehavior, interval_at};
use tracing::{info, warn};

use crate::api::traced;
use crate::cgroup::Cgroups;
use crate::config::Settings;
use crate::error::Error;
use crate::events::Announcer;
use crate::nvml::DriverHandle;
use crate::nvml::sample::Sample;
use crate::world::Shared;
use engine::{Engine, Looked, Now, Places, Rules};
use heart::Heart;
use snapshot::Snapshot;

/// Time between two looks.
pub const PERIOD: Duration = Duration::from_nanos(policy::PERIOD_NS);
/// Measurements of processes are asked for from so long ago on: drivers were seen to enter some 9 s late.
const BACK_US: u64 = 10_000_000;

/// Time of a processor for the locks of one container's file: a container of a thousand processes needs some milliseconds.
const LOCKS: Duration = Duration::from_millis(100);

/// How long a look waits for the driver.
const PATIENCE: Duration = Duration::from_millis(600);

/// How long a look waits for files that tenants hold up.
const PATIENCE_WITH_FILES: Duration = Duration::from_millis(400);

/// A question to the driver that is not answered yet.
type Asked = tokio::task::JoinHandle<Result<Sample, Error>>;

/// The last look, shared with those who show it.
#[derive(Clone, Debug, Default)]
pub struct Latest(Arc<RwLock<Arc<Snapshot>>>);

impl Latest {
    /// What the last look saw.
    #[must_use]
    pub fn get(&self) -> Arc<Snapshot> {
        Arc::clone(&self.0.read())
    }

    /// Takes the place of the last look.
    pub fn set(&self, snapshot: Snapshot) {
        *self.0.write() = Arc::new(snapshot);
    }
}

/// Looks again and again.
pub struct Monitor {
    /// The world.
    pub shared: Arc<Shared>,
    /// The driver.
    pub driver: DriverHandle,
    /// Where things are.
    pub settings: Settings,
    /// Facts on their way into the audit log.
    pub facts: mpsc::UnboundedSender<Entry>,
    /// Events.
    pub announcer: Announcer,
    /// Where the last look goes.
    pub latest: Latest,
}

impl std::fmt::Debug for Monitor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Monitor").finish_non_exhaustive()
    }
}

impl Monitor {
    /// Runs until dropped.
    ///
    /// # Errors
    /// [`Error::Broken`] when a look panicked.
    pub async fn run(self) -> Result<(), Error> {
        let heart = Heart::new(self.settings.pages_dir(), Arc::clone(&self.shared));
        tokio::try_join!(self.look(&heart), heart.beat()).map(|_| ())
    }

    async fn look(&self, heart: &Heart) -> Result<(), Error> {
        let mut engine = Some(engine(&self.settings));
        let mut ticks = interval_at(Instant::now(), PERIOD);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut driver_answers = true;
        let mut asked = None;
        loop {
            ticks.tick().await;
            let Some(mut looking) = engine.take() else { return Ok(()) };
            let sample = match self.sample(&mut asked).await {
                Some(Ok(sample)) => {
                    driver_answers = true;
                    Some(sample)
                }
                Some(Err(error)) => {
                    if std::mem::replace(&mut driver_answers, false) {
                        warn!(code = error.code(), error = %mullion_telemetry::source_chain(&error), "cards are not measured");
                    }
                    None
                }
                None => None,
            };
            let shared = Arc::clone(&self.shared);
            let looked = tokio::task::spawn_blocking(move || {
                let folders = looking.folders();
                let targets = shared.read(|world| target::targets(world, &folders));
                let looked = looking.look(now(), &targets, sample.as_ref());
                (looking, looked)
            });
            let (looking, looked) = looked.await.map_err(|source| Error::Broken { source })?;
            engine = Some(looking);
            heart.looked(now().mono_ns);
            self.tell(looked);
        }
    }

    /// The driver's answer, `None` where it takes longer: a driver that hangs must not keep the sign of life from the
    /// containers' pages. What was asked once is waited for at the next looks.
    async fn sample(&self, asked: &mut Option<Asked>) -> Option<Result<Sample, Error>> {
        let waiting = asked.get_or_insert_with(|| {
            let driver = self.driver.clone();
            let since_us = (now().unix_ns / 1000).saturating_sub(BACK_US);
            tokio::spawn(async move { driver.sample(since_us).await })
        });
        let answer = tokio::time::timeout(PATIENCE, waiting).await.ok()?;
        *asked = None;
        Some(answer.unwrap_or_else(|source| Err(Error::Broken { source })))
    }

    /// Tells of what a look brought: the log, the pods' Events, whoever writes status, and whoever scrapes.
    pub fn tell(&self, looked: Looked) {
        let Looked { snapshot, verdicts, turns, file_turns, rows, on_cards, listed } = looked;
        self.latest.set(snapshot);
        for row in rows {
            let _ = self.facts.send(traced(row));
        }
        for turn in turns {
            let (pod, container) = (&turn.target.pod, &turn.target.container);
            if let Some(bypass) = &turn.bypass {
                warn!(namespace = pod.namespace, pod = pod.name, container, %bypass, "limit bypassed");
            } else {
                info!(namespace = pod.namespace, pod = pod.name, container, "limit holds again");
            }
            let message = turn.bypass.as_ref().map(ToString::to_string);
            self.announcer.limit(pod, container, message.as_deref());
        }
        for turn in file_turns {
            let (pod, container) = (&turn.target.pod, &turn.target.container);
            let (namespace, name) = (&pod.namespace, &pod.name);
            if let Some(fault) = &turn.fault {
                warn!(code = fault.code, namespace, pod = name, container, problem = %fault.text, "usage file damaged");
            } else {
                info!(namespace, pod = name, container, "usage file readable again");
            }
            let message = turn.fault.as_ref().map(ToString::to_string);
            self.announcer.usage_file(pod, container, message.as_deref());
        }
        self.shared.change_if(|world| {
            let pids_before = world.card_pids.clone();
            if let Some(listed) = listed {
                // What the driver does not list any more holds nothing.
                for pids in world.card_pids.values_mut() {
                    pids.retain(|pid| listed.contains(pid));
                }
            }
            for (pod, pids) in on_cards {
                let pod = PodUid::from(pod);
                // It may have gone since it was looked at.
                if world.allocation_of(&pod).is_some() {
                    world.card_pids.entry(pod).or_default().extend(pids);
                }
            }
            let changed = world.verdicts.as_ref() != Some(&verdicts) || world.card_pids != pids_before;
            world.verdicts = Some(verdicts);
            changed
        });
    }
}

/// The engine of a node with these settings.
#[must_use]
pub fn engine(settings: &Settings) -> Engine {
    let places = Places {
        containers: settings.containers_dir(),
        pages: settings.pages_dir(),
        proc: PathBuf::from("/proc"),
        program: PathBuf::from("/proc/self/exe"),
    };
    let policy = if settings.container.disable_core_limit { Policy::Disable } else { Policy::Default };
    let rules = Rules { policy, margin: escape::MARGIN, locks: LOCKS, patience: PATIENCE_WITH_FILES };
    Engine::new(places, rules, Cgroups::new(settings.cgroup_mount.clone(), &settings.cgroup_root))
}

/// Both clocks, now.
#[must_use]
pub fn now() -> Now {
    let ns = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
    let unix = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    // The clock that the library in the container reads, too.
    let mono = clock_gettime(ClockId::CLOCK_MONOTONIC).map(Duration::from).unwrap_or_default();
    Now { unix_ns: ns(unix), mono_ns: ns(mono) }
}
