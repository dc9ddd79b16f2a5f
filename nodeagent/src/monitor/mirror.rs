//! HAMi's fields of our own usage files, for those who read them: HAMi's monitor, and the library in the container, which
//! learns its host pid from there.

use std::collections::BTreeSet;

use mullion_region::hami::{self, Layout};
use tracing::debug;

use crate::monitor::files::{Allowance, Ours, UsageFile};
use crate::monitor::processes::Processes;
use crate::monitor::snapshot::Measured;
use crate::monitor::target::Target;

/// Keeps HAMi's fields of our own file true, for those who read them: what lives, what it uses, and which slots nobody
/// has any more.
pub fn mirror(
    file: &UsageFile,
    ours: &Ours,
    measured: &[Measured],
    kept: &mut Option<BTreeSet<usize>>,
    processes: &Processes,
    target: &Target,
    allowance: &mut Allowance,
) {
    let alive: BTreeSet<usize> = ours.alive.iter().map(|a| a.slot).collect();
    // At the first look, whatever was ever claimed.
    let mut uncleared = kept.take().unwrap_or_else(|| (0..ours.hot.high_water).collect());
    let result = (|| -> std::io::Result<()> {
        for owner in &ours.alive {
            let slot = owner.slot;
            let host = processes.host_pid(owner.process.pid);
            let host_pid = host.and_then(|pid| i32::try_from(pid).ok()).unwrap_or(0);
            if owner.process.hostpid != host_pid
                && host_pid != 0
                && let Some(write) = Layout::V1_2.hostpid(slot, host_pid)
            {
                file.put(&write)?;
            }
            for (card, measured) in measured.iter().enumerate() {
                let Some(old) = owner.process.cards.get(card) else { continue };
                let settled = owner.cards.get(card).map_or(0, |s| s.settled);
                let used = hami::Used::of(settled);
                if old.used != used
                    && let Some(write) = Layout::V1_2.used(slot, card, &used)
                {
                    file.put(&write)?;
                }
                let Some(host) = host else { continue };
                let bytes = measured.by_process.get(&host).copied().unwrap_or(0);
                if old.monitor_used != bytes
                    && let Some(write) = Layout::V1_2.monitor_used(slot, card, bytes)
                {
                    file.put(&write)?;
                }
                let percent = measured.sm_by_process.get(&host).map_or(0, |(_, sm)| u64::from(*sm));
                if old.sm_util != percent
                    && let Some(write) = Layout::V1_2.sm_util(slot, card, percent)
                {
                    file.put(&write)?;
                }
            }
        }
        // A slot that another library took has no byte of ours: it is not dead for that.
        if ours.hot.foreign == 0 {
            let dead: Vec<usize> = uncleared.difference(&alive).copied().collect();
            for slot in dead {
                // Somebody may have it just now: a new owner, or a process that takes its charges off.
                if file.free(slot, measured.len(), allowance)? {
                    uncleared.remove(&slot);
                }
                if allowance.is_used_up {
                    break;
                }
            }
        }
        Ok(())
    })();
    if let Err(error) = result {
        debug!(pod_uid = target.pod.uid, container = target.container, %error, "usage file not mirrored");
    }
    // What lives is looked at again when it is dead.
    uncleared.extend(alive);
    *kept = Some(uncleared);
}
