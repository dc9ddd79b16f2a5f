//! What a former run left: the state file first, then the audit log, which knows what the state file has lost.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use mullion_audit::Event as AuditEvent;
use mullion_core::facts::Event;
use mullion_crds::gpunode::GPUNode;
use mullion_crds::vgpuallocation::VGPUAllocation;
use tracing::{info, warn};

use crate::audit::{Audit, Held, carried_over};
use crate::config::Settings;
use crate::error::Error;
use crate::prepare::{by_spec, cdi};
use crate::release;
use crate::state::{Key, Limits, Rebuild, State};
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
    let folders = [("hookDir", &settings.hook_dir), ("cdiDir", &settings.cdi_dir)];
    keep_folders(&folders, state, same_boot && !world.grants.is_empty()).await?;
    let offered: Vec<String> = state.get(Key::Slots).await?.unwrap_or_default();
    Ok(Restored { world, offered, rebuild })
}

/// What the specs in `cdi_dir` say of their grants.
fn limits_by_specs(cdi_dir: &Path) -> BTreeMap<String, Limits> {
    let entries = std::fs::read_dir(cdi_dir).into_iter().flatten().flatten();
    let limits = |entry: std::fs::DirEntry| {
        let name = entry.file_name().into_string().ok()?;
        let spec = serde_json::from_slice(&std::fs::read(entry.path()).ok()?).ok()?;
        Some((cdi::grant_of(&name)?.to_owned(), by_spec(&spec)))
    };
    entries.filter_map(limits).collect()
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

/// Opens the audit log, writes down that this run has begun, and takes from it what a former one knew.
pub(crate) async fn start_log(audit: Audit, shared: Arc<Shared>, state: State, rebuild: Rebuild) {
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
    catch_up(&audit, &shared, &state, &rebuild).await;
}

/// Takes in what the audit log knows, and tries until it has.
async fn catch_up(audit: &Audit, shared: &Shared, state: &State, rebuild: &Rebuild) {
    let mut pause = RETRY.0;
    while let Err(error) = take_in(audit, shared, state, rebuild).await {
        warn!(code = error.code(), error = %mullion_telemetry::source_chain(&error), "the audit log is not taken in yet");
        tokio::time::sleep(pause).await;
        pause = pause.saturating_mul(2).min(RETRY.1);
    }
}

/// Takes from the audit log what a lost state file had, and grants that nobody has filled. Doing it again does no harm.
async fn take_in(audit: &Audit, shared: &Shared, state: &State, rebuild: &Rebuild) -> Result<(), Error> {
    if let Rebuild::Due(said) = rebuild {
        take_held(audit, shared, state, said).await?;
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

/// Takes from the audit log what is held; `said` is what the log does not say of grants.
async fn take_held(
    audit: &Audit,
    shared: &Shared,
    state: &State,
    said: &BTreeMap<String, Limits>,
) -> Result<(), Error> {
    let node = shared.read(|w| w.node.clone());
    let Held { facts, grants } = audit.held(&node).await?;
    info!(allocations = facts.len(), grants = grants.len(), "rebuilt from the audit log");
    let grants = shared.change(|world| {
        // What the API server has listed meanwhile is all there is.
        let listed = world.allocations_listed;
        for fact in facts {
            if world.allocations.contains_key(&fact.uid) {
                let (prepared, init_done) = (fact.prepared, fact.init_done);
                world.mark(&fact.uid, |f| {
                    f.prepared |= prepared;
                    f.init_done |= init_done;
                });
            } else if !listed {
                world.ledger.apply(&Event::AllocationObserved(fact));
            }
        }
        for mut grant in grants {
            if let Some(limits) = said.get(&grant.grant) {
                (grant.enforced, grant.unenforced) = limits.clone();
            }
            // What this run knows of it is newer.
            world.grants.entry(grant.grant.clone()).or_insert(grant);
        }
        world.grants_known = true;
        world.grants.clone()
    });
    for grant in grants.values() {
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
        let shared = Shared::new(world);
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
        let state = State::open(&place.path().join("state.db")).await.unwrap();
        let shared = Shared::new(World { node: "n".into(), ..World::default() });
        std::fs::rename(&path, &aside).unwrap();
        let known = || shared.read(|w| w.grants_known && w.issued.contains_key("0123456789abcdef"));
        let rebuild = Rebuild::default();
        tokio::join!(catch_up(&audit, &shared, &state, &rebuild), async {
            tokio::time::sleep(Duration::from_millis(200)).await;
            assert!(!known());
            assert_eq!(state.get(Key::Rebuild).await.unwrap(), None::<Rebuild>);
            std::fs::rename(&aside, &path).unwrap();
        });
        assert!(known());
        assert_eq!(state.get(Key::Rebuild).await.unwrap(), Some(Rebuild::Done));
    }
}
