//! The second half of a look: writes what was decided into the container's files, and says what was seen of it.

use std::collections::BTreeSet;
use std::num::NonZeroU32;

use mullion_audit::Event as AuditEvent;
use mullion_core::units::AllocationUid;
use mullion_pace::policy;
use mullion_pace::{Observation, Reading, Steer};
use tracing::debug;

use super::{Counted, Engine, FileTurn, Kept, LOCKED_NS, Looked, Now, Scene, Turn, Verdict, minute_row};
use crate::monitor::damage::Fault;
use crate::monitor::escape::{Bypass, Held, bypass};
use crate::monitor::files::Unreadable;
use crate::monitor::hands::Late;
use crate::monitor::mirror::{Writing, Written, mirror};
use crate::monitor::page::Page;
use crate::monitor::snapshot::{Container, Measured};
use crate::monitor::target::{Granted, Target};
use crate::monitor::usage::ContainerUsage;

impl Engine {
    /// Writes what was decided, and says what was seen.
    pub(super) fn act(
        &mut self,
        now: Now,
        elapsed_ns: u64,
        scene: Scene<'_>,
        kept: &mut Kept,
        decision: policy::Decision,
        looked: &mut Looked,
    ) {
        let Scene { target, file, ours, allowance, usage, mut measured, readings, .. } = scene;
        let mut gated = false;
        if allowance.is_used_up {
            kept.locked_ns = now.mono_ns.saturating_add(LOCKED_NS);
        }
        let is_read = file.is_some();
        if let (Some(file), Ok(usage)) = (file, &usage) {
            let pod_uid = target.pod.uid.clone();
            let cards = measured.len();
            let mut writing =
                Writing { pod_uid, file, fields: Vec::new(), page: None, dead: Vec::new(), cards, allowance };
            gated = self.feed_back(now, &mut writing, usage, kept, decision, target);
            if let Some(ours) = &ours {
                mirror(&mut writing, ours, &measured, &mut kept.uncleared, &kept.processes);
            }
            self.write(now, target, kept, writing);
        }
        if let (Some(granted), Ok(usage), true) = (&target.grant, &usage, is_read) {
            self.pace(now, elapsed_ns, granted, usage, kept, decision, &readings, &mut measured);
        }
        let on_cards: BTreeSet<u32> = measured.iter().flat_map(|m| m.pids.iter().copied()).collect();
        if !on_cards.is_empty() && target.grant.is_some() {
            looked.on_cards.entry(target.pod.uid.clone()).or_default().extend(on_cards);
        }
        let bypassed = self.judge(target, usage.as_ref(), &measured, kept, looked);
        if let (Some(granted), Ok(usage)) = (&target.grant, &usage) {
            let busy: Vec<Option<u32>> = measured.iter().map(|m| m.per_mille).collect();
            if let Some(over) = kept.minute.look(now.unix_ns, &usage.cards, &busy) {
                looked.rows.push(minute_row(target, granted, over));
            }
        }
        looked.snapshot.containers.push(Container {
            pod: target.pod.clone(),
            container: target.container.clone(),
            limits: target.grant.as_ref().map(|g| g.limits.clone()),
            usage: usage.map_err(|problem| problem.code()),
            measured,
            bypassed,
            throttled: decision.switch != 0,
            gated,
            succeeded: target.succeeded,
        });
    }

    /// HAMi's fields by which a monitor steers its library. True when the container is held back.
    fn feed_back(
        &self,
        now: Now,
        writing: &mut Writing,
        usage: &ContainerUsage,
        kept: &mut Kept,
        decision: policy::Decision,
        target: &Target,
    ) -> bool {
        let layout = usage.layout;
        if usage.switch != decision.switch {
            writing.push(&layout.utilization_switch(decision.switch));
        }
        let mut recent = usage.recent_kernel;
        if now.mono_ns.saturating_sub(kept.counted_ns) >= policy::COUNTDOWN_STEP_NS {
            kept.counted_ns = now.mono_ns;
            recent = policy::count_down(recent);
        }
        let recent = policy::gate(recent, decision.gated).unwrap_or(recent);
        if recent != usage.recent_kernel {
            writing.push(&layout.recent_kernel(recent));
        }
        if usage.recent_kernel < 0
            && recent >= 0
            && let Some(granted) = &target.grant
        {
            writing.page = Some(self.places.pages.join(&granted.page));
        }
        recent < 0
    }

    /// Writes, unless what a former look wrote is not done yet.
    fn write(&mut self, now: Now, target: &Target, kept: &mut Kept, writing: Writing) {
        let key = target.key();
        // What came late is not taken in: it may be about a file that another one has replaced. Its slots are freed again.
        if writing.is_empty() || matches!(self.writers.late(&key, now.mono_ns), Some(Late::Out(_))) {
            return;
        }
        let written = self.writers.work(&key, now.mono_ns, || writing.run());
        let Late::Came(Written { freed, is_used_up }) = written else { return };
        if let Some(uncleared) = &mut kept.uncleared {
            uncleared.retain(|slot| !freed.contains(slot));
        }
        if is_used_up {
            kept.locked_ns = now.mono_ns.saturating_add(LOCKED_NS);
        }
    }

    /// Moves the scales of a container's cards.
    #[expect(clippy::too_many_arguments, reason = "everything that a step of the loop depends on")]
    fn pace(
        &self,
        now: Now,
        elapsed_ns: u64,
        granted: &Granted,
        usage: &ContainerUsage,
        kept: &mut Kept,
        decision: policy::Decision,
        readings: &[Reading],
        measured: &mut [Measured],
    ) {
        // What was seen is taken in also where the page cannot be opened, for what is new at the next look is told by it.
        let mut observations = Vec::with_capacity(usage.cards.len());
        for ((kept, usage), reading) in kept.cards.iter_mut().zip(&usage.cards).zip(readings) {
            let counted = Counted::of(usage);
            let before = kept.counted.replace(counted).unwrap_or(counted);
            let seen = Observation {
                reading: *reading,
                launched: counted.last_launch_ns != before.last_launch_ns
                    || counted.spent_ns != before.spent_ns,
                waits: counted.waits.saturating_sub(before.waits),
                waited_ns: counted.wait_ns.saturating_sub(before.wait_ns),
                elapsed_ns,
            };
            let spent_ns = counted.spent_ns.saturating_sub(before.spent_ns);
            // A container that runs freely is not measured against its share.
            observations.push(kept.gauge.held(decision.switch != 0, now).then_some((spent_ns, seen)));
        }
        let path = self.places.pages.join(&granted.page);
        let mut page = match Page::open(&path) {
            Ok(page) => page,
            Err(error) => {
                debug!(page = granted.page, %error, "control page not read");
                return;
            }
        };
        let mut scales = Vec::with_capacity(usage.cards.len());
        let devices: Vec<_> = page.spec.devices.iter().copied().collect();
        let cards = kept.cards.iter_mut().zip(observations).zip(measured);
        for (place, ((kept, observed), measured)) in cards.enumerate() {
            let Some(device) = devices.get(place) else { continue };
            let known = kept.steer.filter(|steer| steer.scale() == device.scale.get());
            let steer = known.unwrap_or_else(|| Steer::new(device.scale.get()));
            let steer = match observed {
                Some((spent_ns, seen)) => steer.spent(spent_ns).step(device.core.get().into(), &seen),
                None => Steer::new(steer.scale()),
            };
            kept.steer = Some(steer);
            measured.scale = Some(steer.scale());
            scales.extend(NonZeroU32::new(steer.scale()).map(|scale| (place, scale)));
        }
        if let Err(error) = page.steer(&scales) {
            debug!(page = granted.page, %error, "control page not written");
        }
    }

    /// Whether the container holds more than can be explained, or its file tells nothing, and what that means for its
    /// allocation.
    fn judge(
        &self,
        target: &Target,
        usage: Result<&ContainerUsage, &Unreadable>,
        measured: &[Measured],
        kept: &mut Kept,
        looked: &mut Looked,
    ) -> bool {
        let Some(granted) = target.grant.as_ref().filter(|g| g.enforced) else { return false };
        let fault = usage.err().and_then(Fault::of);
        // A file that is not there says neither.
        if (usage.is_ok() || fault.is_some()) && kept.damage.look(fault, kept.inode) {
            let fault = kept.damage.fault.clone();
            looked.rows.push(file_row(target, granted, fault.as_ref()));
            looked.file_turns.push(FileTurn { target: target.clone(), fault });
        }
        // What a slow file says is not known yet, and no account of nothing.
        let is_slow = matches!(usage, Err(Unreadable::Held { long: false }));
        let usage = usage.ok();
        let held = measured.iter().zip(&granted.limits).enumerate().filter(|_| !is_slow);
        let known: Vec<(&str, Held)> = held
            .filter_map(|(place, (measured, limit))| {
                let held = Held {
                    by_driver: measured.bytes?,
                    processes: measured.processes,
                    by_account: usage.and_then(|u| u.cards.get(place)).map_or(0, |c| c.used),
                    limit: limit.memory,
                };
                Some((measured.card.as_str(), held))
            })
            .collect();
        // A card about which nothing is known hides no bypass of another, and may hide one of its own.
        let all_known = known.len() == granted.limits.len();
        let found = bypass(known, self.rules.margin);
        let is_looked = all_known || found.is_some();
        if is_looked && kept.suspicion.look(found) {
            looked.turns.push(Turn { target: target.clone(), bypass: kept.suspicion.bypass.clone() });
            looked.rows.push(turn_row(target, granted, kept.suspicion.bypass.as_ref()));
        }
        kept.seen_at_work |= usage.is_some_and(|u| u.attached > 0);
        if is_looked && kept.suspicion.is_sure() {
            kept.unsure = None;
        }
        kept.unsure = kept.unsure.and_then(|looks| looks.checked_sub(1));
        let verdict = match (&kept.suspicion.bypass, &kept.damage.fault) {
            (Some(bypass), _) => {
                Verdict::Bypassed { message: format!("container {}: {bypass}", target.container) }
            }
            // A former run of the agent may have seen what this one cannot yet.
            (None, _) if kept.unsure.is_some() => Verdict::Unsure,
            (None, Some(fault)) => {
                Verdict::Damaged { message: format!("container {}: {fault}", target.container) }
            }
            (None, None) if kept.seen_at_work => Verdict::Holds,
            (None, None) => Verdict::Waiting,
        };
        let uid = AllocationUid(granted.allocation.uid.clone());
        // Of several containers the worst counts.
        let worst = match looked.verdicts.remove(&uid) {
            Some(other) if other.rank() >= verdict.rank() => other,
            _ => verdict,
        };
        looked.verdicts.insert(uid, worst);
        kept.suspicion.bypass.is_some()
    }
}

fn turn_row(target: &Target, granted: &Granted, bypass: Option<&Bypass>) -> AuditEvent {
    let (allocation, pod) = (granted.allocation.clone(), target.pod.clone());
    let container = target.container.clone();
    match bypass {
        Some(Bypass { card, held, .. }) => AuditEvent::LimitBypassed {
            allocation,
            pod,
            container,
            card: card.clone(),
            held_mib: held.by_driver >> 20,
            accounted_mib: held.by_account >> 20,
            limit_mib: held.limit >> 20,
            processes: u32::try_from(held.processes).unwrap_or(u32::MAX),
        },
        None => AuditEvent::BypassEnded { allocation, pod, container },
    }
}

fn file_row(target: &Target, granted: &Granted, fault: Option<&Fault>) -> AuditEvent {
    let (allocation, pod) = (granted.allocation.clone(), target.pod.clone());
    let container = target.container.clone();
    match fault {
        Some(Fault { code, .. }) => {
            AuditEvent::UsageFileDamaged { allocation, pod, container, code: (*code).to_owned() }
        }
        None => AuditEvent::UsageFileReadable { allocation, pod, container },
    }
}
