//! What the agent writes into usage files. HAMi's fields of our own files are for those who read them: HAMi's monitor, and
//! the library in the container, which learns its host pid from there.

use std::collections::BTreeSet;
use std::path::PathBuf;

use mullion_region::hami::{self, Layout, Write};
use tracing::debug;

use crate::monitor::files::{Allowance, Ours, UsageFile};
use crate::monitor::page::Page;
use crate::monitor::processes::Processes;
use crate::monitor::snapshot::Measured;

/// What is to be written into a container's usage file, a job that the file's tenant can hold up.
#[derive(Debug)]
pub struct Writing {
    /// Whose, for the log.
    pub pod_uid: String,
    /// The file.
    pub file: UsageFile,
    /// Where, and what.
    pub fields: Vec<(u64, Vec<u8>)>,
    /// The control page on which somebody waits for these fields.
    pub page: Option<PathBuf>,
    /// Slots to free, if nobody has them.
    pub dead: Vec<usize>,
    /// Cards of the container.
    pub cards: usize,
    /// What is left for the locks of the file.
    pub allowance: Allowance,
}

/// What became of it.
#[derive(Debug)]
pub struct Written {
    /// Slots that are free now.
    pub freed: Vec<usize>,
    /// There are too many locks on the file.
    pub is_used_up: bool,
}

impl Writing {
    /// Whether there is anything to write.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.fields.is_empty() && self.dead.is_empty() && self.page.is_none()
    }

    /// Another field.
    pub fn push<const N: usize>(&mut self, write: &Write<N>) {
        self.fields.push((write.offset, write.bytes.to_vec()));
    }

    /// Writes.
    #[must_use]
    pub fn run(mut self) -> Written {
        let mut freed = Vec::new();
        if let Err(error) = self.write(&mut freed) {
            debug!(pod_uid = self.pod_uid, %error, "usage file not written");
        }
        Written { freed, is_used_up: self.allowance.is_used_up }
    }

    fn write(&mut self, freed: &mut Vec<usize>) -> std::io::Result<()> {
        let fields = self.fields.iter().try_for_each(|(offset, bytes)| self.file.put(*offset, bytes));
        // Who waits at the gate looks again at once.
        if let Some(Err(error)) =
            self.page.take().map(|page| Page::open(&page).and_then(|mut page| page.ring()))
        {
            debug!(pod_uid = self.pod_uid, %error, "control page not rung");
        }
        fields?;
        for slot in self.dead.drain(..) {
            // Somebody may have it just now: a new owner, or a process that takes its charges off.
            if self.file.free(slot, self.cards, &mut self.allowance)? {
                freed.push(slot);
            }
            if self.allowance.is_used_up {
                break;
            }
        }
        Ok(())
    }
}

/// Enters what keeps HAMi's fields of our own file true, for those who read them: what lives, what it uses, and which slots
/// nobody has any more. `kept` are slots that readers may still count; `None` before the first look.
pub fn mirror(
    writing: &mut Writing,
    ours: &Ours,
    measured: &[Measured],
    kept: &mut Option<BTreeSet<usize>>,
    processes: &Processes,
) {
    let alive: BTreeSet<usize> = ours.alive.iter().map(|a| a.slot).collect();
    // At the first look, whatever was ever claimed.
    let uncleared = kept.get_or_insert_with(|| (0..ours.hot.high_water).collect());
    for owner in &ours.alive {
        let slot = owner.slot;
        let host = processes.host_pid(owner.process.pid);
        let host_pid = host.and_then(|pid| i32::try_from(pid).ok()).unwrap_or(0);
        if owner.process.hostpid != host_pid
            && host_pid != 0
            && let Some(write) = Layout::V1_2.hostpid(slot, host_pid)
        {
            writing.push(&write);
        }
        for (card, measured) in measured.iter().enumerate() {
            let Some(old) = owner.process.cards.get(card) else { continue };
            let settled = owner.cards.get(card).map_or(0, |s| s.settled);
            let used = hami::Used::of(settled);
            if old.used != used
                && let Some(write) = Layout::V1_2.used(slot, card, &used)
            {
                writing.push(&write);
            }
            let Some(host) = host else { continue };
            let bytes = measured.by_process.get(&host).copied().unwrap_or(0);
            if old.monitor_used != bytes
                && let Some(write) = Layout::V1_2.monitor_used(slot, card, bytes)
            {
                writing.push(&write);
            }
            let percent = measured.sm_by_process.get(&host).map_or(0, |(_, sm)| u64::from(*sm));
            if old.sm_util != percent
                && let Some(write) = Layout::V1_2.sm_util(slot, card, percent)
            {
                writing.push(&write);
            }
        }
    }
    // A slot that another library took has no byte of ours: it is not dead for that.
    if ours.hot.foreign == 0 {
        writing.dead.extend(uncleared.difference(&alive));
    }
    // What lives is looked at again when it is dead.
    uncleared.extend(alive);
}
