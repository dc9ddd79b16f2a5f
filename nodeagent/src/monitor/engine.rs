//! One look after all containers: read, decide, write. It blocks, and is told the time and the driver's sample.

mod act;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use mullion_audit::Event as AuditEvent;
use mullion_core::units::AllocationUid;
use mullion_pace::policy::{self, Activity, Policy, Task};
use mullion_pace::{Reading, Steer};

use crate::cgroup::Cgroups;
use crate::monitor::damage::{Damage, Fault};
use crate::monitor::escape::{Bypass, Suspicion};
use crate::monitor::files::{
    Allowance, Content, Folder, Ours, Read, Reading as FileReading, Unreadable, UsageFile,
};
use crate::monitor::gauge::Gauge;
use crate::monitor::hands::{Hands, Late};
use crate::monitor::minute::Minute;
use crate::monitor::mirror::Written;
use crate::monitor::processes::{Processes, container_cgroup};
use crate::monitor::reapers::Reapers;
use crate::monitor::snapshot::{Card, Measured, Snapshot};
use crate::monitor::target::{Granted, Key, Target};
use crate::monitor::usage::{CardUsage, ContainerUsage, of_foreign, of_ours};
use crate::nvml::sample::{CardSample, Sample};

/// A clock of the container's may run ahead of ours by this much; what was launched later than that was not.
const AHEAD_NS: u64 = 1_000_000_000;

/// Pause between two searches for a container's cgroup.
const SEARCH_NS: u64 = 3_000_000_000;

/// How long a usage file is left alone on which there were too many locks.
const LOCKED_NS: u64 = 60_000_000_000;

/// So many looks a verdict waits for the driver's word: longer than a driver takes to start, or to be given up.
const UNSURE_LOOKS: u8 = 20;

/// Reading a file that takes this long is held up by its tenant, and no accident; until then it says what it last said.
const HELD_NS: u64 = 3_000_000_000;

/// Both clocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Now {
    /// `CLOCK_REALTIME` in ns.
    pub unix_ns: u64,
    /// `CLOCK_MONOTONIC` in ns.
    pub mono_ns: u64,
}

/// Where things are.
#[derive(Clone, Debug)]
pub struct Places {
    /// Folder of the containers' folders.
    pub containers: PathBuf,
    /// Folder of the control pages.
    pub pages: PathBuf,
    /// All processes of the node.
    pub proc: PathBuf,
    /// The agent's program.
    pub program: PathBuf,
}

/// How containers are judged.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    /// When the SM limit applies.
    pub policy: Policy,
    /// Memory in bytes that each process is granted beyond what was accounted for.
    pub margin: u64,
    /// Time of a processor for the locks of one container's file, in one look.
    pub locks: Duration,
    /// How long a look waits for files that tenants hold up, all together, and as long again for what it writes to them.
    pub patience: Duration,
}

/// What is known of an allocation's limits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The driver has not told yet what the container holds, so that what was said of it stands.
    Unsure,
    /// No process of a container has asked for its cards yet.
    Waiting,
    /// The library was seen at work in each container.
    Holds,
    /// A container holds more than can be explained.
    Bypassed {
        /// In words.
        message: String,
    },
    /// A container's usage file cannot be read, so nobody knows.
    Damaged {
        /// In words.
        message: String,
    },
}

impl Verdict {
    /// How bad it is.
    pub(crate) const fn rank(&self) -> u8 {
        match self {
            Self::Holds => 0,
            Self::Waiting => 1,
            Self::Damaged { .. } => 2,
            Self::Unsure => 3,
            Self::Bypassed { .. } => 4,
        }
    }
}

/// A container began or ceased to hold more than can be explained.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Turn {
    /// Which.
    pub target: Target,
    /// What it holds; `None` when that is over.
    pub bypass: Option<Bypass>,
}

/// A container's usage file became unreadable, or can be read again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileTurn {
    /// Whose.
    pub target: Target,
    /// Why it cannot be read; `None` when that is over.
    pub fault: Option<Fault>,
}

/// What a look brought.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Looked {
    /// For whoever asks until the next look.
    pub snapshot: Snapshot,
    /// By allocation.
    pub verdicts: BTreeMap<AllocationUid, Verdict>,
    /// What turned since the last look.
    pub turns: Vec<Turn>,
    /// Which usage files turned since the last look.
    pub file_turns: Vec<FileTurn>,
    /// Facts for the audit log.
    pub rows: Vec<AuditEvent>,
    /// Host pids that the driver lists on cards, by uid of their pod.
    pub on_cards: BTreeMap<String, BTreeSet<u32>>,
    /// All host pids that the driver lists; `None` where it did not answer for each card.
    pub listed: Option<BTreeSet<u32>>,
}

/// What is kept of a container between two looks.
#[derive(Debug, Default)]
struct Kept {
    inode: (u64, u64),
    processes: Processes,
    /// The runtime's id, and the cgroup that belongs to it.
    cgroup: Option<(String, PathBuf)>,
    /// Until when the cgroup is not searched for again, `CLOCK_MONOTONIC` in ns.
    search_ns: u64,
    /// Slots that readers of HAMi's fields may still count, and whose owner may be dead.
    /// `None` before the first look at the file.
    uncleared: Option<BTreeSet<usize>>,
    cards: Vec<KeptCard>,
    suspicion: Suspicion,
    damage: Damage,
    /// For how many looks more nothing is said of what the container holds, unless the driver tells it.
    unsure: Option<u8>,
    /// What the file said when it was last read.
    last: Option<ContainerUsage>,
    /// The library was seen at work, in this run of the container or in a former one.
    seen_at_work: bool,
    minute: Minute,
    /// Until when the file is left alone, for the locks on it: `CLOCK_MONOTONIC` in ns.
    locked_ns: u64,
    /// When HAMi's countdown was last moved, `CLOCK_MONOTONIC` in ns.
    counted_ns: u64,
    granted: Option<Granted>,
    target: Option<Target>,
}

impl Kept {
    /// Of a container that is looked at for the first time, `at_start` by an agent that looks for the first time.
    fn new(at_start: bool) -> Self {
        let minute = if at_start { Minute::resuming() } else { Minute::default() };
        Self { unsure: Some(UNSURE_LOOKS), minute, ..Self::default() }
    }
}

#[derive(Debug, Default)]
struct KeptCard {
    gauge: Gauge,
    steer: Option<Steer>,
    /// The library's counters as of the last look; `None` before the first one.
    counted: Option<Counted>,
}

/// What a container's library counted on one card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Counted {
    waits: u64,
    wait_ns: u64,
    spent_ns: u64,
    last_launch_ns: u64,
}

impl Counted {
    fn of(usage: &CardUsage) -> Self {
        let CardUsage { waits, wait_ns, spent_ns, last_launch_ns, .. } = *usage;
        Self { waits, wait_ns, spent_ns, last_launch_ns }
    }
}

/// What reading a container's file came to.
struct Found {
    /// `None` where it has not come back.
    read: Option<Result<Read, Unreadable>>,
    /// It took longer than anybody waits.
    is_late: bool,
    /// It has not come back for so long, ns.
    out_ns: u64,
}

impl Found {
    /// `is_late` where an earlier look began it.
    fn of(reading: Late<Result<Read, Unreadable>>, is_late: bool) -> Self {
        match reading {
            Late::Came(read) => Self { read: Some(read), is_late, out_ns: 0 },
            Late::Out(out_ns) => Self { read: None, is_late: true, out_ns },
            Late::Lost => Self { read: Some(Err(Unreadable::Broken)), is_late, out_ns: 0 },
        }
    }
}

/// A container while it is looked at.
struct Scene<'a> {
    target: &'a Target,
    /// `None` also where what is known of it is from a former look.
    file: Option<UsageFile>,
    /// `None` also where it took so long to read it that its slots may be others' by now.
    ours: Option<Ours>,
    /// What is left for the locks of the file.
    allowance: Allowance,
    usage: Result<ContainerUsage, Unreadable>,
    measured: Vec<Measured>,
    readings: Vec<Reading>,
    busy_now: bool,
}

/// Looks after all containers of the node.
#[derive(Debug)]
pub struct Engine {
    places: Places,
    rules: Rules,
    cgroups: Cgroups,
    kept: BTreeMap<Key, Kept>,
    reapers: Reapers,
    readers: Hands<Result<Read, Unreadable>>,
    writers: Hands<Written>,
    /// Cards in the order in which they were first seen, and the memory of each in bytes: what a card has does not change
    /// when the driver does not answer.
    cards: Vec<(String, u64)>,
    looked_ns: u64,
}

impl Engine {
    /// One that knows nothing yet.
    #[must_use]
    pub fn new(places: Places, rules: Rules, cgroups: Cgroups) -> Self {
        Self {
            reapers: Reapers::new(&places.program),
            readers: Hands::new(rules.patience),
            writers: Hands::new(rules.patience),
            places,
            rules,
            cgroups,
            kept: BTreeMap::new(),
            cards: Vec::new(),
            looked_ns: 0,
        }
    }

    /// Names of the containers' folders that there are.
    #[must_use]
    pub fn folders(&self) -> Vec<String> {
        let entries = std::fs::read_dir(&self.places.containers).into_iter().flatten().flatten();
        entries.filter_map(|e| e.file_name().into_string().ok()).collect()
    }

    /// Whether nothing that an earlier look started still runs, as of the last look.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        self.reapers.is_idle() && self.readers.is_idle() && self.writers.is_idle()
    }

    /// Looks at `targets` with what the driver told, `None` where it did not answer.
    pub fn look(&mut self, now: Now, targets: &[Target], sample: Option<&Sample>) -> Looked {
        let at_start = self.looked_ns == 0;
        let elapsed_ns = if at_start { 0 } else { now.mono_ns.saturating_sub(self.looked_ns) };
        self.looked_ns = now.mono_ns;
        let cards: BTreeMap<&str, &CardSample> =
            sample.iter().flat_map(|s| &s.cards).map(|c| (c.uuid.as_str(), c)).collect();
        for card in cards.values() {
            let total = card.memory.map_or(0, |m| m.0);
            match self.cards.iter_mut().find(|(uuid, _)| *uuid == card.uuid) {
                Some(known) => known.1 = known.1.max(total),
                None => self.cards.push((card.uuid.clone(), total)),
            }
        }
        let mut looked = Looked::default();
        self.end(targets, &mut looked);
        self.reapers.bury(now.mono_ns);

        let live: BTreeSet<Key> = targets.iter().map(Target::key).collect();
        self.readers.begin(|key| live.contains(key));
        self.writers.begin(|key| live.contains(key));
        let folder = Folder::open(&self.places.containers).ok().map(Arc::new);
        let mut scenes: Vec<Scene<'_>> = Vec::with_capacity(targets.len());
        for target in targets {
            let mut kept = self.kept.remove(&target.key()).unwrap_or_else(|| Kept::new(at_start));
            let found = self.find(now, target, &kept, folder.as_ref());
            scenes.push(self.read(now, target, &mut kept, found, &cards, &mut looked.rows));
            self.kept.insert(target.key(), kept);
        }
        let tasks: Vec<Task> = scenes.iter().map(|scene| self.task(now, scene)).collect();
        let mut dead_charges = Vec::new();
        for (place, scene) in scenes.into_iter().enumerate() {
            let decision =
                policy::decide(&tasks, place).unwrap_or(policy::Decision { switch: 1, gated: false });
            let key = scene.target.key();
            let mut kept = self.kept.remove(&key).unwrap_or_default();
            let dead = scene.ours.as_ref().is_some_and(|ours| ours.dead_charges);
            let file = scene.file.as_ref().filter(|_| dead).map(UsageFile::again);
            self.act(now, elapsed_ns, scene, &mut kept, decision, &mut looked);
            if let Some(file) = file {
                dead_charges.push((key.clone(), file));
            }
            self.kept.insert(key, kept);
        }
        // Not before: they take bytes that `act` looks at.
        self.reapers.start_all(dead_charges, now.mono_ns);
        looked.listed = sample.filter(|s| s.nameless.is_empty()).and_then(|sample| {
            let lists = sample.cards.iter().map(|card| card.processes.as_ref());
            lists.collect::<Option<Vec<_>>>().map(|l| l.into_iter().flatten().map(|p| p.pid).collect())
        });
        looked.snapshot.unix_ns = now.unix_ns;
        looked.snapshot.known = self.cards.iter().map(|(uuid, _)| uuid.clone()).collect();
        looked.snapshot.cards = sample.iter().flat_map(|s| &s.cards).map(Card::of).collect();
        looked
    }

    /// Lets go of containers that are gone, with a last row.
    fn end(&mut self, targets: &[Target], looked: &mut Looked) {
        let live: BTreeMap<Key, bool> = targets.iter().map(|t| (t.key(), t.grant.is_some())).collect();
        let is_gone = |(key, kept): &(&Key, &Kept)| live.get(*key) != Some(&kept.granted.is_some());
        let gone: Vec<Key> = self.kept.iter().filter(is_gone).map(|(key, _)| key.clone()).collect();
        for key in gone {
            let Some(mut kept) = self.kept.remove(&key) else { continue };
            if let (Some(target), Some(granted)) = (&kept.target, &kept.granted)
                && let Some(over) = kept.minute.close()
            {
                looked.rows.push(minute_row(target, granted, over));
            }
        }
    }

    fn memory(&self, card: &str) -> Option<u64> {
        self.cards.iter().find(|(uuid, _)| uuid == card).map(|(_, bytes)| *bytes).filter(|bytes| *bytes > 0)
    }

    /// Reads a container's file.
    fn find(&mut self, now: Now, target: &Target, kept: &Kept, folder: Option<&Arc<Folder>>) -> Found {
        let key = target.key();
        if let Some(late) = self.readers.late(&key, now.mono_ns) {
            return Found::of(late, true);
        }
        let Some(folder) = folder else {
            return Found::of(Late::Came(Err(Unreadable::Missing)), false);
        };
        let reading = FileReading {
            folder: Arc::clone(folder),
            name: target.folder(),
            cards: target.grant.as_ref().map(|granted| granted.limits.len()),
            locked: (now.mono_ns < kept.locked_ns).then_some(kept.inode),
            allowance: Allowance::new(self.rules.locks),
        };
        Found::of(self.readers.work(&key, now.mono_ns, || reading.run()), false)
    }

    /// Takes in everything about one container.
    fn read<'a>(
        &self,
        now: Now,
        target: &'a Target,
        kept: &mut Kept,
        found: Found,
        cards: &BTreeMap<&str, &CardSample>,
        rows: &mut Vec<AuditEvent>,
    ) -> Scene<'a> {
        let (file, content, allowance) = match found.read {
            Some(Ok(Read { file, content, allowance })) => (Some(file), Some(content), allowance),
            Some(Err(problem)) => (None, Some(Err(problem)), Allowance::new(self.rules.locks)),
            None => (None, None, Allowance::new(self.rules.locks)),
        };
        if let Some(file) = &file
            && file.inode() != kept.inode
        {
            // Another file is another start of the container: nothing of what was counted goes on.
            let (counted_ns, seen_at_work, unsure) = (kept.counted_ns, kept.seen_at_work, kept.unsure);
            let suspicion = std::mem::take(&mut kept.suspicion);
            let damage = std::mem::take(&mut kept.damage);
            if let (Some(granted), Some(over)) = (&target.grant, kept.minute.close()) {
                rows.push(minute_row(target, granted, over));
            }
            // The first file that is seen may have been there before.
            let is_first = kept.inode == (0, 0);
            let minute = if is_first { std::mem::take(&mut kept.minute) } else { Minute::default() };
            let inode = file.inode();
            *kept = Kept {
                inode,
                suspicion,
                damage,
                unsure,
                seen_at_work,
                minute,
                counted_ns,
                ..Kept::default()
            };
        }
        kept.target = Some(target.clone());
        kept.granted.clone_from(&target.grant);
        let memory = |card: &str| self.memory(card);
        let mut ours = None;
        let limits = target.grant.as_ref().map_or(&[][..], |granted| &granted.limits);
        let usage = match content {
            Some(Ok(Content::Ours(read))) => {
                let usage = of_ours(&read, limits, memory);
                ours = Some(*read).filter(|_| !found.is_late);
                Ok(usage)
            }
            Some(Ok(Content::Foreign(read))) => Ok(of_foreign(&read, memory)),
            Some(Err(problem)) => Err(problem),
            None if found.out_ns >= HELD_NS => Err(Unreadable::Held { long: true }),
            None => kept.last.take().ok_or(Unreadable::Held { long: false }),
        };
        kept.last = usage.as_ref().ok().cloned();
        let known = self.processes(now, target, kept);
        kept.processes = known.clone().unwrap_or_default();
        let names: Vec<String> = match (&target.grant, &usage) {
            (Some(granted), _) => granted.limits.iter().map(|l| l.card.clone()).collect(),
            (None, Ok(usage)) => usage.cards.iter().map(|c| c.card.clone()).collect(),
            (None, Err(_)) => Vec::new(),
        };
        kept.cards.resize_with(names.len(), KeptCard::default);
        let mut scene = Scene {
            target,
            file,
            ours,
            allowance,
            usage,
            measured: Vec::with_capacity(names.len()),
            readings: Vec::with_capacity(names.len()),
            busy_now: false,
        };
        for (card, name) in kept.cards.iter_mut().zip(names) {
            let sample = cards.get(name.as_str()).copied();
            let (measured, reading, busy_now) = card.gauge.measure(now, name, sample, known.as_ref());
            scene.measured.push(measured);
            scene.readings.push(reading);
            scene.busy_now |= busy_now;
        }
        scene
    }

    /// The container's processes; `None` where they are not known.
    fn processes(&self, now: Now, target: &Target, kept: &mut Kept) -> Option<Processes> {
        let id = target.running.as_ref()?;
        if let Some((known, cgroup)) = &kept.cgroup
            && known == id
            && let Ok(found) = Processes::of(cgroup, &self.places.proc, &kept.processes)
        {
            return Some(found);
        }
        kept.cgroup = None;
        // Where pods' cgroups are not found, all hierarchies are searched for them.
        if now.mono_ns < kept.search_ns {
            return None;
        }
        let pod = self.cgroups.remains(&target.pod.uid).ok().flatten();
        let Some(cgroup) = pod.and_then(|pod| container_cgroup(&pod, id)) else {
            kept.search_ns = now.mono_ns.saturating_add(SEARCH_NS);
            return None;
        };
        let found = Processes::of(&cgroup, &self.places.proc, &kept.processes).ok();
        kept.cgroup = Some((id.clone(), cgroup));
        found
    }

    fn task(&self, now: Now, scene: &Scene<'_>) -> Task {
        let bit = |card: &str| {
            let place = self.cards.iter().position(|(uuid, _)| uuid == card);
            place.and_then(|place| u32::try_from(place).ok()).and_then(|place| 1_u64.checked_shl(place))
        };
        // Of a container that we gave nothing the cards are what its own file says: those count on which the driver sees a
        // process of it.
        let has = |m: &&Measured| scene.target.grant.is_some() || m.processes > 0;
        let cards =
            scene.measured.iter().filter(has).filter_map(|m| bit(&m.card)).fold(0, |all, bit| all | bit);
        let activity = match (&scene.usage, &scene.target.grant) {
            // Who waits for the bucket launches as soon as it may; and who launched since the last look did, however long ago
            // that was.
            (Ok(usage), Some(_)) => {
                let age_ns = age(now, usage);
                let launched = age_ns.is_some() && self.is_new(scene.target, usage, |c| c.last_launch_ns);
                let at_work = launched || self.is_new(scene.target, usage, |c| c.wait_ns);
                Activity::Launched { age_ns: if at_work { Some(0) } else { age_ns } }
            }
            // HAMi's library writes the time once a second, its countdown for others; what says more wins.
            (Ok(usage), None) => match age(now, usage) {
                Some(age) if age <= policy::ACTIVE_NS => Activity::Launched { age_ns: Some(age) },
                _ => Activity::Countdown(usage.recent_kernel),
            },
            (Err(_), _) => Activity::Launched { age_ns: None },
        };
        // HAMi's webhook turned a wish into a variable of its own making, which its library left in the file. In ours,
        // which a tenant can write, nobody looks for it.
        let wishes = scene.target.wishes;
        let priority = match (&scene.usage, &scene.target.grant) {
            (Ok(usage), None) => usage.priority,
            _ => wishes.priority,
        };
        let policy = match self.rules.policy {
            Policy::Default if wishes.force => Policy::Force,
            admins => admins,
        };
        Task { priority, cards, activity, busy: scene.busy_now, policy }
    }

    /// Whether a counter of a container's has grown on some card since the last look. At the first one nobody knows.
    fn is_new(&self, target: &Target, usage: &ContainerUsage, counter: fn(&Counted) -> u64) -> bool {
        let before = self.kept.get(&target.key()).map(|kept| &kept.cards);
        let mut cards = before.into_iter().flatten().zip(&usage.cards);
        cards.any(|(before, now)| {
            before.counted.is_some_and(|before| counter(&Counted::of(now)) > counter(&before))
        })
    }
}

/// Age of a container's last launch; `None` where it never launched, or where what it says is no time.
fn age(now: Now, usage: &ContainerUsage) -> Option<u64> {
    let last = usage.cards.iter().map(|c| c.last_launch_ns).max().filter(|at| *at != 0)?;
    (last <= now.unix_ns.saturating_add(AHEAD_NS)).then(|| now.unix_ns.saturating_sub(last))
}

fn minute_row(
    target: &Target,
    granted: &Granted,
    (start, cards): (u64, Vec<mullion_audit::CardMinute>),
) -> AuditEvent {
    AuditEvent::UsageMinute {
        allocation: granted.allocation.clone(),
        pod: target.pod.clone(),
        container: target.container.clone(),
        start,
        cards,
    }
}
