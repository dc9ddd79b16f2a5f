//! What a former run left: the state file first, then the audit log, which knows what the state file has lost. Both lie in
//! one folder and are lost together; then the allocations' status says whose each grant is.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use kube::ResourceExt;
use mullion_audit::Event as AuditEvent;
use mullion_core::facts::Event;
use mullion_core::units::{AllocationUid, PodUid};
use mullion_crds::gpunode::GPUNode;
use mullion_crds::vgpuallocation::VGPUAllocation;
use tracing::{info, warn};

use crate::audit::{Audit, Held, carried_over, filled, missed, untold};
use crate::cgroup::Cgroups;
use crate::config::Settings;
use crate::error::Error;
use crate::prepare::{PAGE_IN_CONTAINER, USAGE_IN_CONTAINER, by_spec, cdi, files};
use crate::release;
use crate::state::{Grant, Key, Limits, Rebuild, State};
use crate::world::{Shared, World};

/// The kernel's name of this boot.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
/// Pause between two tries to read the audit log, at first and at most.
const RETRY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_mins(1));

/// What is known of a former run before anybody is asked.
pub(crate) struct Restored {
    /// The world as it was left.
    pub world: World,
    /// The slots that the kubelet was offered.
    pub offered: Vec<String>,
    /// Whether the audit log must be asked for more.
    pub rebuild: Rebuild,
}

/// Reads the state file.
pub(crate) async fn restore(settings: &Settings, state: &State) -> Result<Restored, Error> {
    keep_state_dir(settings)?;
    let boot_id = std::fs::read_to_string(BOOT_ID).map_err(Error::file("read", BOOT_ID))?;
    let boot_id = boot_id.trim().to_owned();
    let mut world = World { node: settings.node.clone(), boot_id: boot_id.clone(), ..World::default() };
    world.node_uid = state.get(Key::NodeUid).await?.unwrap_or_default();
    world.observation = state.get(Key::Observation).await?.unwrap_or_default();
    world.gpunode = state.get::<GPUNode>(Key::GpuNode).await?;
    let same_boot = state.get::<String>(Key::BootId).await?.as_ref() == Some(&boot_id);
    let mut rebuild: Rebuild = state.get(Key::Rebuild).await?.unwrap_or_default();
    if let Rebuild::Due(said) = &mut rebuild {
        // Kept before the specs are removed: this run may end before the log was asked.
        said.extend(limits_by_specs(&settings.cdi_dir));
        state.put(Key::Rebuild, &rebuild).await?;
    }
    world.grants_known = rebuild == Rebuild::Done;
    if same_boot {
        world.cards = state.get(Key::Cards).await?;
    } else {
        // Minors and uuids of an earlier boot prove nothing; the kubelet asks again for every container.
        release::remove_specs(&settings.cdi_dir)?;
        // No process of an earlier boot is on a card, whoever has its number now.
        state.put(Key::CardPids, &BTreeMap::<PodUid, BTreeSet<u32>>::new()).await?;
        state.put(Key::BootId, &boot_id).await?;
    }
    world.refold_node();
    for object in state.allocations::<VGPUAllocation>().await? {
        if object.spec.node_name == settings.node.as_str() {
            world.see_allocation(object);
        }
    }
    for grant in state.grants().await? {
        world.mark(&grant.allocation.as_str().into(), |fact| fact.prepared = true);
        world.grants.insert(grant.grant.clone(), grant);
    }
    if same_boot {
        let pids: BTreeMap<PodUid, BTreeSet<u32>> = state.get(Key::CardPids).await?.unwrap_or_default();
        world.card_pids = pids.into_iter().filter(|(pod, _)| world.allocation_of(pod).is_some()).collect();
    }
    let folders = [("hookDir", &settings.hook_dir), ("cdiDir", &settings.cdi_dir)];
    keep_folders(&folders, state, same_boot && !world.grants.is_empty()).await?;
    let offered: Vec<String> = state.get(Key::Slots).await?.unwrap_or_default();
    Ok(Restored { world, offered, rebuild })
}

/// Keeps which processes pods have on cards: that alone tells whose a dead one is that the driver still lists, and it may
/// do so for longer than this run of the agent.
pub(crate) async fn keep_card_pids(shared: Arc<Shared>, state: State) {
    let mut bell = shared.bell();
    // What is kept may be of another boot: the first look replaces it, whatever there is.
    let mut kept = None;
    loop {
        bell.borrow_and_update();
        let pids = shared.read(|w| (kept.as_ref() != Some(&w.card_pids)).then(|| w.card_pids.clone()));
        if let Some(pids) = pids {
            match state.put(Key::CardPids, &pids).await {
                Ok(()) => kept = Some(pids),
                Err(error) => {
                    warn!(code = error.code(), error = %mullion_telemetry::source_chain(&error), "processes on cards not kept");
                }
            }
        }
        if bell.changed().await.is_err() {
            return;
        }
    }
}

/// The specs of grants in `cdi_dir`.
fn specs(cdi_dir: &Path) -> impl Iterator<Item = (String, cdi::Spec)> {
    let entries = std::fs::read_dir(cdi_dir).into_iter().flatten().flatten();
    entries.filter_map(|entry| {
        let name = entry.file_name().into_string().ok()?;
        let grant = cdi::grant_of(&name)?.to_owned();
        let spec = serde_json::from_slice(&std::fs::read(entry.path()).ok()?).ok()?;
        Some((grant, spec))
    })
}

/// What the specs in `cdi_dir` say of their grants.
fn limits_by_specs(cdi_dir: &Path) -> BTreeMap<String, Limits> {
    specs(cdi_dir).map(|(grant, spec)| (grant, by_spec(&spec))).collect()
}

/// That another folder was the agent's, its state file cannot say, for that lies in there. The specs of containers that
/// are left do: of what such a container does nothing would be seen any more (MO-04).
fn keep_state_dir(settings: &Settings) -> Result<(), Error> {
    let pages = settings.pages_dir();
    let cgroups = Cgroups::new(settings.cgroup_mount.clone(), &settings.cgroup_root);
    for (_, spec) in specs(&settings.cdi_dir) {
        let folder = |path| Path::new(cdi::mounted_at(&spec, path)?).parent();
        let Some(before) = folder(PAGE_IN_CONTAINER).filter(|before| *before != pages) else { continue };
        let container = folder(USAGE_IN_CONTAINER).and_then(|folder| folder.file_name()?.to_str());
        let Some((pod, _)) = container.and_then(|name| name.split_once('_')) else { continue };
        // What a pod left that is over is in nobody's use.
        if matches!(cgroups.remains(pod), Ok(None)) {
            continue;
        }
        return Err(Error::FolderMoved {
            setting: "stateDir".to_owned(),
            before: before.parent().unwrap_or(before).to_owned(),
            now: settings.state_dir.clone(),
        });
    }
    Ok(())
}

/// Keeps where containers' files are; `in_use` while there may be containers that have some (MO-04).
async fn keep_folders(now: &[(&str, &PathBuf)], state: &State, in_use: bool) -> Result<(), Error> {
    let now: BTreeMap<String, PathBuf> =
        now.iter().map(|(setting, path)| ((*setting).to_owned(), (*path).clone())).collect();
    let before: BTreeMap<String, PathBuf> = state.get(Key::Folders).await?.unwrap_or_default();
    if in_use {
        for (setting, now) in &now {
            if let Some(before) = before.get(setting).filter(|before| *before != now) {
                let (setting, before, now) = (setting.clone(), before.clone(), now.clone());
                return Err(Error::FolderMoved { setting, before, now });
            }
        }
    }
    if before == now { Ok(()) } else { state.put(Key::Folders, &now).await }
}

/// Opens the audit log, writes down that this run has begun, and takes in what a former one knew. Ends when nothing of
/// that is missing any more, so not before the API server has listed this node's allocations.
pub(crate) async fn start_log(audit: Audit, shared: Arc<Shared>, state: State, rebuild: Rebuild) {
    // Neither waits for the other: a log that cannot be opened says nothing for as long as nobody mends it.
    tokio::join!(take_log(&audit, &shared, &rebuild), take_told(&shared, &rebuild));
    if rebuild != Rebuild::Done {
        shared.change(|world| world.grants_known = true);
        let mut retry = Retry::default();
        while let Err(error) = keep_grants(&shared, &state).await {
            retry.after(&error, "what was rebuilt is not kept yet").await;
        }
    }
    let mut retry = Retry::default();
    while let Err(error) = complete(&audit, &shared).await {
        retry.after(&error, "the audit log is not complete yet").await;
    }
}

/// Writes down what a former run could not, and what came to an end while nobody looked.
async fn complete(audit: &Audit, shared: &Shared) -> Result<(), Error> {
    let open = audit.open_allocations().await?;
    audit.append_many(shared.read(|world| missed(world, &open))).await?;
    let filled = shared.read(filled);
    let open = audit.open_allocations().await?;
    audit.append_many(untold(filled, &open)).await
}

/// A step that fails is tried again, after a pause that grows.
struct Retry(Duration);

impl Default for Retry {
    fn default() -> Self {
        Self(RETRY.0)
    }
}

impl Retry {
    async fn after(&mut self, error: &Error, what: &'static str) {
        warn!(code = error.code(), error = %mullion_telemetry::source_chain(error), "{what}");
        tokio::time::sleep(self.0).await;
        self.0 = self.0.saturating_mul(2).min(RETRY.1);
    }
}

/// Opens the audit log and takes in what it knows, and tries until it has.
async fn take_log(audit: &Audit, shared: &Shared, rebuild: &Rebuild) {
    let (node, boot_id) = shared.read(|w| (w.node.clone(), w.boot_id.clone()));
    let new = audit.open(&node).await;
    let event = AuditEvent::AgentStarted { boot_id, agent_version: env!("CARGO_PKG_VERSION").to_owned() };
    if let Err(error) = audit.begin(event).await {
        warn!(code = error.code(), error = %mullion_telemetry::source_chain(&error), "start not audited");
    }
    let rows = if new { shared.read(carried_over) } else { Vec::new() };
    if !rows.is_empty() {
        warn!(
            rows = rows.len(),
            "the audit log is new and the agent is not: what is held is written down again"
        );
        if let Err(error) = audit.append_many(rows).await {
            warn!(code = error.code(), error = %mullion_telemetry::source_chain(&error), "not carried over");
        }
    }
    catch_up(audit, shared, rebuild).await;
}

async fn catch_up(audit: &Audit, shared: &Shared, rebuild: &Rebuild) {
    let mut retry = Retry::default();
    while let Err(error) = take_in(audit, shared, rebuild).await {
        retry.after(&error, "the audit log is not taken in yet").await;
    }
}

/// Takes from the audit log what a lost state file had, and grants that nobody has filled. Doing it again does no harm.
async fn take_in(audit: &Audit, shared: &Shared, rebuild: &Rebuild) -> Result<(), Error> {
    if let Rebuild::Due(said) = rebuild {
        let node = shared.read(|w| w.node.clone());
        let held = audit.held(&node).await?;
        info!(allocations = held.facts.len(), grants = held.grants.len(), "rebuilt from the audit log");
        shared.change(|world| take_held(world, held, said));
    }
    let open = audit.open_grants().await?;
    shared.change_if(|world| {
        for (grant, at) in open {
            // Filled while the log was read.
            if !world.grants.contains_key(&grant) {
                world.issued.entry(grant).or_insert(at);
            }
        }
        false
    });
    Ok(())
}

/// Takes in what the audit log says is held; `said` is what it does not say of grants.
fn take_held(world: &mut World, Held { facts, grants }: Held, said: &BTreeMap<String, Limits>) {
    let mut unlisted = Vec::new();
    for fact in facts {
        if world.allocations.contains_key(&fact.uid) {
            let (prepared, init_done) = (fact.prepared, fact.init_done);
            world.mark(&fact.uid, |f| {
                f.prepared |= prepared;
                f.init_done |= init_done;
            });
        } else {
            unlisted.push(fact.uid.clone());
            world.ledger.apply(&Event::AllocationObserved(fact));
        }
    }
    for grant in grants {
        add_grant(world, grant, said);
    }
    if world.allocations_listed {
        // They went while nobody looked. What may run holds its cards all the same.
        for uid in unlisted {
            world.lose_allocation(&uid);
        }
    }
}

/// Takes in whose each grant is by the status of the allocations, once the API server has listed them.
async fn take_told(shared: &Shared, rebuild: &Rebuild) {
    let mut bell = shared.bell();
    loop {
        bell.borrow_and_update();
        if shared.read(|w| w.allocations_listed) {
            break;
        }
        if bell.changed().await.is_err() {
            return;
        }
    }
    let Rebuild::Due(said) = rebuild else { return };
    shared.change(|world| {
        for object in world.allocations.values().cloned().collect::<Vec<_>>() {
            let uid = AllocationUid(object.uid().unwrap_or_default());
            if world.ledger.allocation(&uid).is_none_or(|fact| fact.released) {
                continue;
            }
            for told in object.status.iter().flat_map(|status| &status.containers) {
                if !cdi::is_grant(&told.grant) || !files::is_plain(&told.name) {
                    continue;
                }
                // Prepared anew by this run, maybe: then the status is behind.
                if world.grants_of(&uid).any(|grant| grant.container == told.name) {
                    continue;
                }
                let grant = Grant {
                    grant: told.grant.clone(),
                    allocation: uid.0.clone(),
                    pod: object.spec.pod.uid.clone(),
                    container: told.name.clone(),
                    device_ids: told.device_ids.clone(),
                    enforced: false,
                    unenforced: None,
                };
                add_grant(world, grant, said);
                world.mark(&uid, |fact| fact.prepared = true);
            }
        }
    });
}

/// Adds a grant of a former run; `said` is what its spec said of the library. What this run knows of it is newer.
fn add_grant(world: &mut World, mut grant: Grant, said: &BTreeMap<String, Limits>) {
    if let Some(limits) = said.get(&grant.grant) {
        (grant.enforced, grant.unenforced) = limits.clone();
    }
    world.grants.entry(grant.grant.clone()).or_insert(grant);
}

/// Keeps what was rebuilt, for the next run.
async fn keep_grants(shared: &Shared, state: &State) -> Result<(), Error> {
    for grant in shared.read(|w| w.grants.clone()).values() {
        state.put_grant(grant).await?;
    }
    state.put(Key::Rebuild, &Rebuild::Done).await
}

#[cfg(test)]
mod tests;
