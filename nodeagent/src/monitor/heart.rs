//! The sign of life on containers' control pages, apart from the look: no container's depends on how long others' files,
//! or the driver, keep the agent busy. A gate whose page has none for [`HEARTBEAT_DEAD_NS`] opens.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use mullion_pace::policy::HEARTBEAT_DEAD_NS;
use tokio::time::{MissedTickBehavior, interval};
use tracing::debug;

use crate::error::Error;
use crate::monitor::page::Page;
use crate::monitor::target::{Target, targets};
use crate::monitor::{PERIOD, now};
use crate::world::Shared;

/// A look that takes longer than this will not come back, and nobody can vouch for gates that it should open.
const LONGEST_LOOK_NS: u64 = 10 * HEARTBEAT_DEAD_NS;

/// Beats as long as somebody looks.
#[derive(Debug)]
pub struct Heart {
    pages: PathBuf,
    shared: Arc<Shared>,
    /// When the last look ended, `CLOCK_MONOTONIC` in ns.
    looked_ns: AtomicU64,
}

impl Heart {
    /// Of the containers of `shared`, whose control pages lie in `pages`.
    #[must_use]
    pub fn new(pages: PathBuf, shared: Arc<Shared>) -> Self {
        Self { pages, shared, looked_ns: AtomicU64::new(now().mono_ns) }
    }

    /// A look has ended.
    pub fn looked(&self, now_ns: u64) {
        self.looked_ns.store(now_ns, Ordering::Relaxed);
    }

    /// Beats until dropped.
    ///
    /// # Errors
    /// [`Error::Broken`] when a beat panicked.
    pub async fn beat(&self) -> Result<(), Error> {
        let mut ticks = interval(PERIOD);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            let now_ns = now().mono_ns;
            if now_ns.saturating_sub(self.looked_ns.load(Ordering::Relaxed)) > LONGEST_LOOK_NS {
                continue;
            }
            let granted = self.shared.read(|world| targets(world, &[]));
            let pages = self.pages.clone();
            let beat = tokio::task::spawn_blocking(move || tend(&pages, &granted, now_ns));
            beat.await.map_err(|source| Error::Broken { source })?;
        }
    }
}

/// Says on the control pages of `targets` that somebody looks after them.
pub fn tend(pages: &Path, targets: &[Target], now_ns: u64) {
    for granted in targets.iter().filter_map(|target| target.grant.as_ref()) {
        if let Err(error) = Page::open(&pages.join(&granted.page)).and_then(|mut page| page.beat(now_ns)) {
            debug!(page = granted.page, %error, "control page not written");
        }
    }
}
