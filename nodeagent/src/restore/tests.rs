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
    for (grant, path) in [(with, "/usr/local/vgpu/libvgpu.so"), (without, "/usr/local/vgpu/control.page")] {
        let edits = serde_json::from_value(json!({"mounts": [{"hostPath": "/x", "containerPath": path}]}));
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
        audit.append(AuditEvent::GrantIssued { grant: "x".to_owned(), device_ids: vec![] }).await.unwrap();
        tokio::time::sleep(Duration::from_millis(200)).await;
        assert_eq!(known(), (false, vec![]), "an empty log proves nothing");
        shared.change(|w| {
            w.see_allocation(object("a", "000000000000000a", false));
            w.see_allocation(object("b", "000000000000000b", true));
            w.see_allocation(object("c", "../../../../etc", false));
            w.see_allocation(object("d", "000000000000000d", false));
            // Prepared anew by this run, which its status does not say yet.
            w.grants.insert("000000000000000e".to_owned(), grant("000000000000000e", "d"));
            w.allocations_listed = true;
        });
    });
    assert_eq!(known(), (true, vec!["000000000000000a".to_owned(), "000000000000000e".to_owned()]));
    assert!(shared.read(|w| w.ledger.allocation(&"a".into()).unwrap().prepared));
    let kept = state.grants().await.unwrap();
    assert_eq!(kept, shared.read(|w| w.grants.values().cloned().collect::<Vec<_>>()));
    assert_eq!((kept[0].pod.as_str(), kept[0].container.as_str()), ("pod-a", "main"));
    assert_eq!(state.get(Key::Rebuild).await.unwrap(), Some(Rebuild::Done));
    let told = audit.held(&settings.node).await.unwrap().grants;
    assert_eq!(told, kept, "the new log names them as well");
}

fn grant(name: &str, allocation: &str) -> Grant {
    Grant {
        grant: name.to_owned(),
        allocation: allocation.to_owned(),
        pod: format!("pod-{allocation}"),
        container: "main".to_owned(),
        device_ids: vec!["slot-0000".to_owned()],
        enforced: false,
        unenforced: None,
    }
}

/// An agent may be killed between the row that ends an allocation and forgetting it.
#[tokio::test]
async fn what_the_log_says_is_over_is_not_prepared_by_the_next_run() {
    use mullion_crds::vgpuallocation as v;
    let place = tempfile::tempdir().unwrap();
    let settings = settings(place.path(), "state");
    let state = State::open(&settings.state_dir.join("state.db")).await.unwrap();
    let device = v::Device { uuid: "GPU-0".to_owned(), memory_mib: 9, ..Default::default() };
    let container =
        v::ContainerAllocation { name: "main".to_owned(), devices: vec![device], ..Default::default() };
    let mut world =
        World { node: "n".into(), grants_known: true, allocations_listed: true, ..World::default() };
    for (uid, name) in [("over", "000000000000000a"), ("here", "000000000000000b")] {
        let spec = v::VGPUAllocationSpec {
            pod: v::PodReference { name: "p".to_owned(), uid: format!("pod-{uid}") },
            node_name: "n".to_owned(),
            containers: vec![container.clone()],
            ..Default::default()
        };
        let mut object = VGPUAllocation::new(uid, spec);
        object.metadata.uid = Some(uid.to_owned());
        world.see_allocation(object);
        world.grants.insert(name.to_owned(), grant(name, uid));
        world.mark(&uid.into(), |fact| fact.prepared = true);
    }
    let audit = Audit::new(settings.state_dir.join("audit.db"));
    audit.open(&settings.node).await;
    let over = world.ledger.allocation(&"over".into()).unwrap();
    audit.append(crate::prepare::reserved(over)).await.unwrap();
    audit.append(crate::prepare::prepared(over, &grant("000000000000000a", "over")).unwrap()).await.unwrap();
    let released = AuditEvent::Released {
        allocation: crate::prepare::allocation_ref(over),
        pod: crate::prepare::pod_ref(&over.pod),
        code: "PodGone".to_owned(),
        observation: 1,
    };
    audit.append(released).await.unwrap();
    audit.close().await;
    let shared = Shared::new(world);
    for _ in 0..2 {
        start_log(audit.clone(), Arc::clone(&shared), state.clone(), Rebuild::Done).await;
        audit.close().await;
    }
    let mut reader = mullion_audit::AuditReader::open(settings.state_dir.join("audit.db")).await.unwrap();
    let rows = reader.list(&mullion_audit::Filter::default()).await.unwrap();
    let prepared = rows.iter().filter(|row| row.kind == "Prepared");
    let prepared: Vec<_> = prepared.map(|row| row.allocation_uid.as_deref().unwrap()).collect();
    assert_eq!(prepared, ["over", "here"], "each once");
    let holders = reader.replay().await.unwrap().holders("GPU-0");
    assert_eq!(holders.iter().map(|h| h.allocation.uid.as_str()).collect::<Vec<_>>(), ["here"]);
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
    let mut object = VGPUAllocation::new("a", mullion_crds::vgpuallocation::VGPUAllocationSpec::default());
    object.metadata.uid = Some("a".to_owned());
    (object.spec.node_name, object.spec.pod.uid) = ("n".to_owned(), "pod".to_owned());
    state.put_allocation("a", &object).await.unwrap();
    let pids = BTreeSet::from([4711]);
    shared.change(|w| w.card_pids = [("pod".into(), pids.clone()), ("gone".into(), pids.clone())].into());
    let kept =
        async |state: &State| state.get::<BTreeMap<PodUid, BTreeSet<u32>>>(Key::CardPids).await.unwrap();
    while kept(&state).await.is_none_or(|kept| kept.is_empty()) {
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
    // To a later run in that boot as well, whenever this one is killed.
    assert_eq!(kept(&state).await, Some(BTreeMap::new()));
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
    let mut object = VGPUAllocation::new("here", mullion_crds::vgpuallocation::VGPUAllocationSpec::default());
    object.metadata.uid = Some("here".to_owned());
    object.spec.node_name = "n".to_owned();
    let rows = async || {
        let mut reader = mullion_audit::AuditReader::open(settings.state_dir.join("audit.db")).await.unwrap();
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
