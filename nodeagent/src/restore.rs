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

use crate::audit::{Audit, Held, carried_over, missed};
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
    let mut kept = shared.read(|w| w.card_pids.clone());
    loop {
        bell.borrow_and_update();
        let pids = shared.read(|w| (w.card_pids != kept).then(|| w.card_pids.clone()));
        if let Some(pids) = pids {
            match state.put(Key::CardPids, &pids).await {
                Ok(()) => kept = pids,
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
    audit.append_many(shared.read(|world| missed(world, &open))).await
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
    if let Err(error) = audit.append(event).await {
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
mod tests {
    use super::*;
    use crate::config::Args;
    use crate::state::Grant;
    use mullion_audit::{AllocationRef, ContainerKind, PodRef, Share};
    use serde_json::json;

    // MO-04
    #[tokio::test]
    async fn a_folder_in_use_cannot_be_moved() {
        let place = tempfile::tempdir().unwrap();
        let state = State::open(&place.path().join("state.db")).await.unwrap();
        let (old, new) = (PathBuf::from("/usr/local/vgpu"), PathBuf::from("/opt/vgpu"));
        keep_folders(&[("hookDir", &old)], &state, true).await.unwrap();
        keep_folders(&[("hookDir", &old)], &state, true).await.unwrap();
        let error = keep_folders(&[("hookDir", &new)], &state, true).await.unwrap_err();
        assert_eq!(error.code(), "FolderMoved");
        let told = error.to_string();
        assert!(
            told.contains("hookDir") && told.contains("/usr/local/vgpu") && told.contains("/opt/vgpu"),
            "{told}"
        );
        // The refusal changed nothing; without containers that use it, the folder may be another one.
        keep_folders(&[("hookDir", &old)], &state, true).await.unwrap();
        keep_folders(&[("hookDir", &new)], &state, false).await.unwrap();
        assert_eq!(keep_folders(&[("hookDir", &old)], &state, true).await.unwrap_err().code(), "FolderMoved");
    }

    /// What the log does not say stands in the spec: whether a container has the library.
    #[tokio::test]
    async fn with_the_state_lost_a_grants_spec_says_whether_its_container_is_held_to_its_limits() {
        let place = tempfile::tempdir().unwrap();
        let settings = Settings::load(Args {
            node_name: Some("n".to_owned()),
            cdi_dir: Some(place.path().join("cdi")),
            state_dir: Some(place.path().to_owned()),
            ..Args::default()
        })
        .unwrap();
        std::fs::create_dir(&settings.cdi_dir).unwrap();
        let (with, without, unknown) = ("000000000000000a", "000000000000000b", "000000000000000c");
        for (grant, path) in [(with, "/usr/local/vgpu/libvgpu.so"), (without, "/usr/local/vgpu/control.page")]
        {
            let edits =
                serde_json::from_value(json!({"mounts": [{"hostPath": "/x", "containerPath": path}]}));
            let spec = cdi::grant_spec(grant, "0.6.0", edits.unwrap());
            let text = serde_json::to_vec(&spec).unwrap();
            std::fs::write(settings.cdi_dir.join(cdi::file_name(grant)), text).unwrap();
        }
        let audit = Audit::new(place.path().join("audit.db"));
        audit.open(&settings.node).await;
        for grant in [with, without, unknown] {
            let prepared = AuditEvent::Prepared {
                allocation: AllocationRef { uid: format!("a-{grant}"), name: "a".to_owned() },
                pod: PodRef { namespace: "t".to_owned(), name: "p".to_owned(), uid: format!("p-{grant}") },
                container: "main".to_owned(),
                container_kind: ContainerKind::App,
                grant: grant.to_owned(),
                device_ids: vec!["slot-0000".to_owned()],
                devices: vec![Share { card: "GPU-0".to_owned(), memory_mib: 1, core_percent: 1, mig: None }],
            };
            audit.append(prepared).await.unwrap();
        }
        for grant in [with, "000000000000000d"] {
            let issued = AuditEvent::GrantIssued { grant: grant.to_owned(), device_ids: Vec::new() };
            audit.append(issued).await.unwrap();
        }
        audit.close().await;

        // Killed before the log was read, which is no loss.
        let path = place.path().join("state.db");
        let state = State::open(&path).await.unwrap();
        let Restored { world, .. } = restore(&settings, &state).await.unwrap();
        assert!(!world.grants_known);
        state.close().await;

        let state = State::open(&path).await.unwrap();
        let Restored { world, rebuild, .. } = restore(&settings, &state).await.unwrap();
        assert!(!world.grants_known);
        let shared = Shared::new(World { allocations_listed: true, ..world });
        start_log(audit, Arc::clone(&shared), state.clone(), rebuild).await;
        assert!(shared.read(|w| w.grants_known));
        let said = |grants: Vec<Grant>| -> Vec<_> {
            grants.into_iter().map(|g| (g.grant, g.enforced, g.unenforced.map(|why| why.code))).collect()
        };
        let want = [
            (with.to_owned(), true, None),
            (without.to_owned(), false, Some("GrantWithoutLibrary".to_owned())),
            (unknown.to_owned(), false, None),
        ];
        assert_eq!(said(shared.read(|w| w.grants.values().cloned().collect())), want);
        assert_eq!(said(state.grants().await.unwrap()), want, "kept");
        let open: Vec<String> = shared.read(|w| w.issued.keys().cloned().collect());
        assert_eq!(open, ["000000000000000d"], "what nobody has filled is still to be looked after");

        // Once is enough: what the next run has forgotten does not come back.
        for uid in [with, without, unknown] {
            state.forget(&format!("a-{uid}")).await.unwrap();
        }
        let Restored { world, rebuild, .. } = restore(&settings, &state).await.unwrap();
        assert!(world.grants_known && rebuild == Rebuild::Done);
    }

    /// Another program may hold the log for a moment, or a disk not answer: what it has is taken in later.
    #[tokio::test]
    async fn a_log_that_cannot_be_read_is_read_later() {
        let place = tempfile::tempdir().unwrap();
        let (path, aside) = (place.path().join("audit.db"), place.path().join("aside"));
        let audit = Audit::new(path.clone());
        audit.open(&"n".into()).await;
        let issued = AuditEvent::GrantIssued { grant: "0123456789abcdef".to_owned(), device_ids: Vec::new() };
        audit.append(issued).await.unwrap();
        audit.close().await;
        let shared = Shared::new(World { node: "n".into(), ..World::default() });
        std::fs::rename(&path, &aside).unwrap();
        let known = || shared.read(|w| w.issued.contains_key("0123456789abcdef"));
        tokio::join!(catch_up(&audit, &shared, &Rebuild::Done), async {
            tokio::time::sleep(Duration::from_millis(200)).await;
            assert!(!known());
            std::fs::rename(&aside, &path).unwrap();
        });
        assert!(known());
    }

    fn settings(place: &Path, state_dir: &str) -> Settings {
        let settings = Settings::load(Args {
            node_name: Some("n".to_owned()),
            cdi_dir: Some(place.join("cdi")),
            state_dir: Some(place.join(state_dir)),
            cgroup_mount: Some(place.join("cgroup")),
            ..Args::default()
        })
        .unwrap();
        for folder in [&settings.cdi_dir, &settings.state_dir, &place.join("cgroup/kubepods")] {
            std::fs::create_dir_all(folder).unwrap();
        }
        std::fs::write(place.join("cgroup/cgroup.controllers"), "").unwrap();
        settings
    }

    /// Writes the spec of a grant as the agent with these settings makes it.
    fn write_spec(settings: &Settings, grant: &str, pod: &str) {
        let page = settings.pages_dir().join(grant);
        let usage = settings.containers_dir().join(format!("{pod}_main/usage.cache"));
        let mount = |host: &Path, container: &str| json!({"hostPath": host, "containerPath": container});
        let mounts = [mount(&page, PAGE_IN_CONTAINER), mount(&usage, USAGE_IN_CONTAINER)];
        let edits = serde_json::from_value(json!({"mounts": mounts})).unwrap();
        let spec = serde_json::to_vec(&cdi::grant_spec(grant, "0.6.0", edits)).unwrap();
        std::fs::write(settings.cdi_dir.join(cdi::file_name(grant)), spec).unwrap();
    }

    // MO-04: nothing in the new folder knows of the old one.
    #[tokio::test]
    async fn the_state_folder_cannot_be_moved_while_containers_have_files_from_it() {
        let place = tempfile::tempdir().unwrap();
        let (old, new) = (settings(place.path(), "old"), settings(place.path(), "new"));
        write_spec(&old, "000000000000000a", "pod");
        let cgroup = place.path().join("cgroup/kubepods/podpod");
        std::fs::create_dir(&cgroup).unwrap();
        let open = async |settings: &Settings| {
            let state = State::open(&settings.state_dir.join("state.db")).await.unwrap();
            restore(settings, &state).await.map(drop)
        };
        let error = open(&new).await.unwrap_err();
        assert_eq!(error.code(), "FolderMoved");
        let told = error.to_string();
        let names = |settings: &Settings| told.contains(&format!("{:?}", settings.state_dir));
        assert!(told.contains("stateDir") && names(&old) && names(&new), "{told}");
        let spec = old.cdi_dir.join(cdi::file_name("000000000000000a"));
        assert!(spec.exists(), "the refusal removed nothing");
        open(&old).await.unwrap();
        // Of a pod that is over a spec is only litter.
        write_spec(&old, "000000000000000a", "pod");
        std::fs::remove_dir(cgroup).unwrap();
        open(&new).await.unwrap();
        assert!(!spec.exists());
    }

    /// One folder, so one event: a disk made anew, or an `rm -rf`.
    #[tokio::test]
    async fn with_state_and_log_lost_grants_are_taken_from_the_allocations() {
        use mullion_crds::vgpuallocation as v;
        let place = tempfile::tempdir().unwrap();
        let settings = settings(place.path(), "state");
        let state = State::open(&settings.state_dir.join("state.db")).await.unwrap();
        let Restored { world, rebuild, .. } = restore(&settings, &state).await.unwrap();
        let shared = Shared::new(world);
        let object = |uid: &str, grant: &str, released: bool| {
            let container = v::ContainerAllocation { name: "main".to_owned(), ..Default::default() };
            let spec = v::VGPUAllocationSpec {
                pod: v::PodReference { name: "p".to_owned(), uid: format!("pod-{uid}") },
                node_name: "n".to_owned(),
                containers: vec![container],
                ..Default::default()
            };
            let mut object = VGPUAllocation::new(uid, spec);
            object.metadata.uid = Some(uid.to_owned());
            let told = v::ContainerStatus {
                name: "main".to_owned(),
                grant: grant.to_owned(),
                device_ids: vec!["slot-0000".to_owned()],
                mig_uuids: Vec::new(),
            };
            let mut status = v::VGPUAllocationStatus { containers: vec![told], ..Default::default() };
            let claim = crate::status::Claim::new("Released", "True", "PodGone", "");
            crate::status::set(
                &mut status,
                if released { std::slice::from_ref(&claim) } else { &[] },
                jiff::Timestamp::UNIX_EPOCH,
            );
            object.status = Some(status);
            object
        };
        let audit = Audit::new(settings.state_dir.join("audit.db"));
        let known = || shared.read(|w| (w.grants_known, w.grants.keys().cloned().collect::<Vec<_>>()));
        tokio::join!(start_log(audit.clone(), Arc::clone(&shared), state.clone(), rebuild), async {
            audit
                .append(AuditEvent::GrantIssued { grant: "x".to_owned(), device_ids: vec![] })
                .await
                .unwrap();
            tokio::time::sleep(Duration::from_millis(200)).await;
            assert_eq!(known(), (false, vec![]), "an empty log proves nothing");
            shared.change(|w| {
                w.see_allocation(object("a", "000000000000000a", false));
                w.see_allocation(object("b", "000000000000000b", true));
                w.see_allocation(object("c", "../../../../etc", false));
                w.allocations_listed = true;
            });
        });
        assert_eq!(known(), (true, vec!["000000000000000a".to_owned()]));
        assert!(shared.read(|w| w.ledger.allocation(&"a".into()).unwrap().prepared));
        let kept = state.grants().await.unwrap();
        assert_eq!(kept, shared.read(|w| w.grants.values().cloned().collect::<Vec<_>>()));
        assert_eq!((kept[0].pod.as_str(), kept[0].container.as_str()), ("pod-a", "main"));
        assert_eq!(state.get(Key::Rebuild).await.unwrap(), Some(Rebuild::Done));
    }

    /// A driver that holds on to a dead process may do so for longer than an agent lives.
    #[tokio::test]
    async fn whose_a_process_on_a_card_was_is_known_to_the_next_run() {
        let place = tempfile::tempdir().unwrap();
        let settings = settings(place.path(), "state");
        let path = settings.state_dir.join("state.db");
        let state = State::open(&path).await.unwrap();
        restore(&settings, &state).await.unwrap();
        let shared = Shared::new(World::default());
        let keeper = tokio::spawn(keep_card_pids(Arc::clone(&shared), state.clone()));
        let mut object =
            VGPUAllocation::new("a", mullion_crds::vgpuallocation::VGPUAllocationSpec::default());
        object.metadata.uid = Some("a".to_owned());
        (object.spec.node_name, object.spec.pod.uid) = ("n".to_owned(), "pod".to_owned());
        state.put_allocation("a", &object).await.unwrap();
        let pids = BTreeSet::from([4711]);
        shared.change(|w| w.card_pids = [("pod".into(), pids.clone()), ("gone".into(), pids.clone())].into());
        while state.get::<BTreeMap<PodUid, BTreeSet<u32>>>(Key::CardPids).await.unwrap().is_none() {
            tokio::task::yield_now().await;
        }
        // Killed: not closed.
        keeper.abort();
        drop(state);
        let state = State::open(&path).await.unwrap();
        let Restored { world, .. } = restore(&settings, &state).await.unwrap();
        assert_eq!(world.card_pids, [("pod".into(), pids)].into(), "of pods that have an allocation here");
        // In another boot the number is another's.
        state.put(Key::BootId, &"another").await.unwrap();
        let Restored { world, .. } = restore(&settings, &state).await.unwrap();
        assert!(world.card_pids.is_empty());
    }

    /// An agent that was killed between forgetting an allocation and its row, or whose log was full just then.
    #[tokio::test]
    async fn what_ended_without_a_row_ends_at_the_next_start() {
        let place = tempfile::tempdir().unwrap();
        let settings = settings(place.path(), "state");
        let state = State::open(&settings.state_dir.join("state.db")).await.unwrap();
        let audit = Audit::new(settings.state_dir.join("audit.db"));
        audit.open(&settings.node).await;
        let reserved = |uid: &str| AuditEvent::AllocationReserved {
            allocation: AllocationRef { uid: uid.to_owned(), name: uid.to_owned() },
            pod: PodRef { namespace: "t".to_owned(), name: "p".to_owned(), uid: format!("pod-{uid}") },
            sequence: 1,
            created: 0,
            containers: Vec::new(),
        };
        audit.append(reserved("gone")).await.unwrap();
        audit.append(reserved("here")).await.unwrap();
        audit.close().await;
        let mut object =
            VGPUAllocation::new("here", mullion_crds::vgpuallocation::VGPUAllocationSpec::default());
        object.metadata.uid = Some("here".to_owned());
        object.spec.node_name = "n".to_owned();
        let rows = async || {
            let mut reader =
                mullion_audit::AuditReader::open(settings.state_dir.join("audit.db")).await.unwrap();
            let rows = reader.list(&mullion_audit::Filter::default()).await.unwrap();
            let of = rows.iter().filter(|row| row.kind != "AgentStarted");
            of.map(|row| (row.kind.clone(), row.allocation_uid.clone().unwrap(), row.code.clone()))
                .collect::<Vec<_>>()
        };
        for _ in 0..2 {
            let mut world = World { node: "n".into(), grants_known: true, ..World::default() };
            world.see_allocation(object.clone());
            world.mark(&"here".into(), |fact| (fact.prepared, fact.init_done) = (true, true));
            world.allocations_listed = true;
            start_log(audit.clone(), Shared::new(world), state.clone(), Rebuild::Done).await;
            audit.close().await;
        }
        let row = |kind: &str, uid: &str, code: Option<&str>| {
            (kind.to_owned(), uid.to_owned(), code.map(str::to_owned))
        };
        let want = [
            row("AllocationReserved", "gone", None),
            row("AllocationReserved", "here", None),
            row("InitDone", "here", None),
            row("Released", "gone", Some("Withdrawn")),
        ];
        assert_eq!(rows().await, want);
    }
}
