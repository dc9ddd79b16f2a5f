//! A node of folders, and what stands in them.

pub mod cluster;
pub mod hami;
pub mod tenant;

use std::collections::BTreeMap;
use std::fs;
use std::fs::File;
use std::num::NonZeroU64;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use mullion_core::request::ComputeWishes;
use mullion_crds::gpunode::Card;
use mullion_crds::vgpuallocation::{
    ContainerAllocation, Device, Kind, PodReference, VGPUAllocation, VGPUAllocationSpec,
};
use mullion_nodeagent::audit::Audit;
use mullion_nodeagent::cgroup::Cgroups;
use mullion_nodeagent::config::{Args, Settings};
use mullion_nodeagent::health::Known;
use mullion_nodeagent::metrics::{Metrics, registry};
use mullion_nodeagent::monitor::engine::{Engine, Looked, Now, Places, Rules};
use mullion_nodeagent::monitor::escape::MARGIN;
use mullion_nodeagent::monitor::export::Exporter;
use mullion_nodeagent::monitor::snapshot::{Container, Snapshot};
use mullion_nodeagent::monitor::{Latest, heart, target};
use mullion_nodeagent::nvml::sample::{Busy, CardSample, ProcessMemory, Sample};
use mullion_nodeagent::prepare::files;
use mullion_nodeagent::state::Grant;
use mullion_nodeagent::world::{ContainerSeen, PodSeen, Shared, World};
use mullion_pace::policy::Policy;
use mullion_region::page::{self, Enforcement, PageDevice, PageSpec};
use mullion_region::{CardUuid, CorePercent, Devices, extension, usage};
use prometheus_client::registry::Registry;

/// Seconds in ns.
pub const S: u64 = 1_000_000_000;
/// MiB in bytes.
pub const MIB: u64 = 1 << 20;
/// When all of this happens.
pub const START: u64 = 1_790_000_000 * S;

/// The agent's program.
const PROGRAM: &str = env!("CARGO_BIN_EXE_mullion-nodeagent");
/// Time for the locks of a file, as the agent has it.
const LOCKS: Duration = Duration::from_millis(100);

/// A node.
pub struct Node {
    /// Keeps the tree.
    pub root: tempfile::TempDir,
    /// Where things are.
    pub settings: Settings,
    /// What the agent knows.
    pub world: World,
    /// What looks.
    pub engine: Engine,
    /// Seconds since [`START`], in ns.
    pub passed: u64,
}

/// A slice of one card: uuid, MiB, percent.
pub type Slice<'a> = (&'a str, u64, u8);

impl Node {
    /// One without containers.
    pub fn new() -> Self {
        Self::below(&std::env::temp_dir())
    }

    /// One whose files lie below `folder`.
    pub fn below(folder: &Path) -> Self {
        let root = tempfile::tempdir_in(folder).unwrap();
        let at = |name: &str| root.path().join(name);
        let settings = Settings::load(Args {
            node_name: Some("node-a".to_owned()),
            state_dir: Some(at("state")),
            hook_dir: Some(at("vgpu")),
            cgroup_mount: Some(at("cgroup")),
            ..Args::default()
        })
        .unwrap();
        for folder in ["state/pages", "vgpu/containers", "cgroup/kubepods"] {
            fs::create_dir_all(at(folder)).unwrap();
        }
        fs::write(at("cgroup/cgroup.controllers"), "").unwrap();
        let world = World { node: "node-a".into(), pods: Some(BTreeMap::new()), ..World::default() };
        let engine = patient(&settings, PROGRAM, LOCKS);
        Self { root, settings, world, engine, passed: 0 }
    }

    /// The agent waits for files as long as it does.
    pub fn hurry(&mut self) {
        self.engine = mullion_nodeagent::monitor::engine(&self.settings);
    }

    /// Another run of the agent begins.
    pub fn anew(&mut self) {
        self.engine = patient(&self.settings, PROGRAM, LOCKS);
    }

    /// How long the agent may work at the locks of one file.
    pub fn allow(&mut self, locks: Duration) {
        self.engine = patient(&self.settings, "/bin/false", locks);
    }

    /// A pod of one running container each with the same slices, as `PreStartContainer` leaves it.
    pub fn pod(&mut self, pod: &str, containers: &[&str], slices: &[Slice<'_>]) {
        self.pod_named(&format!("{pod}-name"), 1, pod, containers, slices);
    }

    /// The same with a name of its own, and a place in the order of allocations.
    pub fn pod_named(
        &mut self,
        name: &str,
        sequence: i64,
        pod: &str,
        containers: &[&str],
        slices: &[Slice<'_>],
    ) {
        let device = |(card, mib, percent): &Slice<'_>| Device {
            uuid: (*card).to_owned(),
            memory_mib: i64::try_from(*mib).unwrap(),
            core_percent: u32::from(*percent),
            ..Device::default()
        };
        let spec = VGPUAllocationSpec {
            pod: PodReference { name: name.to_owned(), uid: pod.to_owned() },
            node_name: "node-a".to_owned(),
            sequence,
            containers: containers
                .iter()
                .map(|name| ContainerAllocation {
                    name: (*name).to_owned(),
                    kind: Kind::App,
                    devices: slices.iter().map(device).collect(),
                    ..ContainerAllocation::default()
                })
                .collect(),
            ..VGPUAllocationSpec::default()
        };
        let mut object = VGPUAllocation::new(pod, spec);
        object.metadata.uid = Some(format!("allocation-{pod}"));
        object.metadata.namespace = Some("team".to_owned());
        self.world.see_allocation(object);
        for name in containers {
            let grant = grant_name(pod, name);
            self.write(pod, name, &grant, slices);
            let record = Grant {
                grant: grant.clone(),
                allocation: format!("allocation-{pod}"),
                pod: pod.to_owned(),
                container: (*name).to_owned(),
                device_ids: Vec::new(),
                enforced: true,
                unenforced: None,
            };
            self.world.grants.insert(grant, record);
        }
        self.run(pod, containers);
        let seen = self.world.pods.as_mut().unwrap().get_mut(&pod.into()).unwrap();
        name.clone_into(&mut seen.name);
    }

    /// How a container of a pod wants its share of compute to be held.
    pub fn wish(&mut self, pod: &str, container: &str, wishes: ComputeWishes) {
        let pods = self.world.pods.as_mut().unwrap();
        pods.get_mut(&pod.into()).unwrap().wishes.insert(container.to_owned(), wishes);
    }

    /// A pod's containers run: the runtime's ids are their names.
    pub fn run(&mut self, pod: &str, containers: &[&str]) {
        let seen = PodSeen {
            namespace: "team".to_owned(),
            name: format!("{pod}-name"),
            containers: containers
                .iter()
                .map(|name| {
                    let running = Some(format!("containerd://id-{name}"));
                    ((*name).to_owned(), ContainerSeen { running, ..ContainerSeen::default() })
                })
                .collect(),
            ..PodSeen::default()
        };
        self.world.pods.as_mut().unwrap().insert(pod.into(), seen);
        for name in containers {
            self.processes(pod, name, &[]);
        }
    }

    /// Files of a container that is about to start.
    pub fn write(&self, pod: &str, container: &str, grant: &str, slices: &[Slice<'_>]) {
        let mut cards = Vec::new();
        let mut usages = Vec::new();
        for (card, mib, percent) in slices {
            let uuid = CardUuid::new(card).unwrap();
            let limit = NonZeroU64::new(mib * MIB).unwrap();
            let core = CorePercent::new(*percent).unwrap_or(CorePercent::WHOLE);
            cards.push(PageDevice::new(uuid, limit, core));
            usages.push(usage::UsageDevice { uuid, memory_limit: limit, core });
        }
        let spec = PageSpec {
            sequence: 0,
            heartbeat_ns: 0,
            futex: 0,
            enforcement: Enforcement::Required,
            grant: u64::from_str_radix(grant, 16).unwrap(),
            devices: Devices::from_slice(&cards).unwrap(),
        };
        files::replace(&self.page_path(grant), &page::encode(&spec), 0o644).unwrap();
        let image = usage::image(&usage::UsageSpec {
            devices: Devices::from_slice(&usages).unwrap(),
            priority: usage::DEFAULT_PRIORITY,
        });
        files::usage_file(&self.folder(pod, container), &image).unwrap();
    }

    /// Folder of a container's usage file.
    pub fn folder(&self, pod: &str, container: &str) -> PathBuf {
        self.settings.containers_dir().join(format!("{pod}_{container}"))
    }

    /// A container's usage file.
    pub fn usage_path(&self, pod: &str, container: &str) -> PathBuf {
        self.folder(pod, container).join(files::USAGE_FILE)
    }

    /// A container's usage file, open as its tenant has it.
    pub fn usage(&self, pod: &str, container: &str) -> Usage {
        Usage(File::options().read(true).write(true).open(self.usage_path(pod, container)).unwrap())
    }

    fn page_path(&self, grant: &str) -> PathBuf {
        self.settings.pages_dir().join(grant)
    }

    /// What a container's control page says.
    pub fn page(&self, pod: &str, container: &str) -> PageSpec {
        page::decode(&fs::read(self.page_path(&grant_name(pod, container))).unwrap()).unwrap()
    }

    /// A container's processes, as its cgroup lists them.
    pub fn processes(&self, pod: &str, container: &str, pids: &[u32]) {
        let cgroup = self.root.path().join(format!("cgroup/kubepods/pod{pod}/id-{container}"));
        fs::create_dir_all(&cgroup).unwrap();
        let lines = pids.iter().fold(String::new(), |lines, pid| lines + &pid.to_string() + "\n");
        fs::write(cgroup.join("cgroup.procs"), lines).unwrap();
    }

    /// Unix time, now.
    pub fn unix_ns(&self) -> u64 {
        START + self.passed
    }

    /// A look, `passed` ns after the last one.
    pub fn look_after(&mut self, passed: u64, sample: Option<&Sample>) -> Looked {
        self.passed += passed;
        let now = Now { unix_ns: self.unix_ns(), mono_ns: 100 * S + self.passed };
        let targets = target::targets(&self.world, &self.engine.folders());
        self.engine.look(now, &targets, sample)
    }

    /// A beat of the agent's heart.
    pub fn beat(&self) {
        heart::tend(&self.settings.pages_dir(), &target::targets(&self.world, &[]), 100 * S + self.passed);
    }

    /// A look, a period after the last one.
    pub fn look(&mut self, sample: Option<&Sample>) -> Looked {
        self.look_after(S * 9 / 10, sample)
    }
}

/// An engine that waits for files however busy this machine is.
fn patient(settings: &Settings, program: &str, locks: Duration) -> Engine {
    let places = Places {
        containers: settings.containers_dir(),
        pages: settings.pages_dir(),
        proc: "/proc".into(),
        program: program.into(),
    };
    let cgroups = Cgroups::new(settings.cgroup_mount.clone(), &settings.cgroup_root);
    let patience = Duration::from_secs(400);
    Engine::new(places, Rules { policy: Policy::Default, margin: MARGIN, locks, patience }, cgroups)
}

/// The name of a container's grant.
pub fn grant_name(pod: &str, container: &str) -> String {
    let sum = format!("{pod}/{container}")
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325_u64, |sum, byte| (sum ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
    format!("{sum:016x}")
}

/// The container of that name in a snapshot.
pub fn container<'a>(snapshot: &'a Snapshot, pod: &str, name: &str) -> &'a Container {
    snapshot.containers.iter().find(|c| c.pod.uid == pod && c.container == name).unwrap()
}

/// What `/metrics` says of a look.
pub fn scrape(snapshot: Snapshot) -> String {
    scrape_all(&Metrics::default(), snapshot)
}

/// What `/metrics` says.
pub fn scrape_all(metrics: &Metrics, snapshot: Snapshot) -> String {
    let mut text = String::new();
    prometheus_client::encoding::text::encode(&mut text, &registry_of(metrics, snapshot)).unwrap();
    text
}

/// All that `/metrics` shows.
pub fn registry_of(metrics: &Metrics, snapshot: Snapshot) -> Registry {
    let latest = Latest::default();
    latest.set(snapshot);
    let card = ("GPU-0".to_owned(), Known { card: Card::default(), present: true, ..Known::default() });
    let world = World { cards: Some([card].into()), ..World::default() };
    let exporter = Exporter { latest, node: "node-a".to_owned(), legacy: true };
    let audit = Audit::new("/nonexistent/audit.db".into());
    registry(metrics, &Shared::new(world), audit, exporter)
}

/// Lines of a metric.
pub fn lines<'a>(text: &'a str, name: &str) -> Vec<&'a str> {
    text.lines().filter(|l| l.strip_prefix(name).is_some_and(|rest| rest.starts_with('{'))).collect()
}

/// A usage file in its tenant's hands.
pub struct Usage(pub File);

impl Usage {
    /// A word of ours.
    pub fn put(&self, at: usize, word: u64) {
        self.0.write_all_at(&word.to_le_bytes(), at as u64).unwrap();
    }

    /// A number of HAMi's.
    pub fn put32(&self, at: usize, number: i32) {
        self.0.write_all_at(&number.to_le_bytes(), at as u64).unwrap();
    }

    /// A word of ours.
    pub fn word(&self, at: usize) -> u64 {
        let mut bytes = [0; 8];
        self.0.read_exact_at(&mut bytes, at as u64).unwrap();
        u64::from_le_bytes(bytes)
    }

    /// A number of HAMi's.
    pub fn number(&self, at: usize) -> i32 {
        let mut bytes = [0; 4];
        self.0.read_exact_at(&mut bytes, at as u64).unwrap();
        i32::from_le_bytes(bytes)
    }

    /// Card time is charged.
    pub fn charge(&self, ns: u64) {
        let at = extension::card_offset(0).unwrap() + extension::SPENT_NS_AT;
        self.put(at, self.word(at) + ns);
    }

    /// A card's counter.
    pub fn count(&self, card: usize, field: usize, value: u64) {
        self.put(extension::card_offset(card).unwrap() + field, value);
    }

    /// A process attached.
    pub fn attach(&self) {
        self.put(usage::EXTENSION_AT + extension::ATTACHED_AT, 1);
    }

    /// The container launched a kernel on its first card.
    pub fn launch(&self, at_ns: u64) {
        self.attach();
        self.count(0, extension::FIRST_LAUNCH_AT, at_ns);
        self.count(0, extension::LAST_LAUNCH_AT, at_ns);
    }
}

/// What a driver tells of cards of 80 GiB: processes with card, pid, MiB and percent.
pub fn sample(cards: &[&str], processes: &[(&str, u32, u64, u32)], at_ns: u64) -> Sample {
    let card = |(index, uuid): (usize, &&str)| CardSample {
        uuid: (*uuid).to_owned(),
        index: u32::try_from(index).unwrap(),
        model: "NVIDIA H100 80GB HBM3".to_owned(),
        memory: Some((81_920 * MIB, 1_000 * MIB)),
        utilization: Some((40, 10)),
        processes: Some(
            processes
                .iter()
                .filter(|p| p.0 == *uuid)
                .map(|p| ProcessMemory { pid: p.1, bytes: Some(p.2 * MIB) })
                .collect(),
        ),
        busy: Some(
            processes
                .iter()
                .filter(|p| p.0 == *uuid && p.3 > 0)
                .map(|p| Busy { pid: p.1, at_us: at_ns / 1000, sm: p.3 })
                .collect(),
        ),
        troubles: Vec::new(),
    };
    Sample { cards: cards.iter().enumerate().map(card).collect(), nameless: Vec::new() }
}
