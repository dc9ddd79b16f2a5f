//! A process and its container: where limits come from, who owns a slot, and what happens to one that dies.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test that cannot be set up has failed"
)]

mod common;
mod sessions;

use std::fs::File;
use std::io::Write;
use std::num::NonZeroU64;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use fake_state::Store;
use mullion_region::page::{self, Enforcement, PageDevice, PageSpec};
use mullion_region::usage::{self, UsageDevice, UsageSpec};
use mullion_region::{CardUuid, CorePercent, Devices, extension};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use sessions::{MIB, Place, Session, in_container};

/// What `cuInit` answers, and what is said on stderr.
fn start(command: Command) -> (u64, String) {
    let mut command = command;
    command.stderr(std::process::Stdio::piped());
    let mut session = Session::start(command);
    let result = session.ask("init")[0];
    // Fail closed: a program that does not look at the result gets no memory either.
    if result != 0 {
        session.ask("primary 0");
        assert_ne!(session.ask("alloc a 512")[0], 0);
    }
    let mut child = session.child;
    drop(child.stdin.take());
    child.kill().unwrap();
    let output = child.wait_with_output().unwrap();
    (result, String::from_utf8(output.stderr).unwrap())
}

fn one_line(text: &str, code: &str) {
    assert!(text.starts_with(&format!("mullion: {code}: ")), "{text:?}");
    assert_eq!(text.lines().count(), 1, "{text}");
}

#[test]
#[ignore = "needs the built library"]
fn a_limit_that_is_none_ends_cu_init() {
    for (name, value) in [
        ("CUDA_DEVICE_MEMORY_LIMIT", "16Gi"),
        ("CUDA_DEVICE_MEMORY_LIMIT_0", "1.5g"),
        ("CUDA_DEVICE_MEMORY_LIMIT_1", "99999999999999999999"),
        ("CUDA_DEVICE_SM_LIMIT", "half"),
    ] {
        let mut place = Place::new();
        place.set(name, value);
        let (result, said) = start(place.command("session"));
        assert_eq!(result, 1, "{name}={value}");
        one_line(&said, "LimitInvalid");
        assert!(said.contains(&format!("{name}={value} ")), "{said}");
    }
    // No limit, no library to be seen, no file.
    let place = Place::new();
    let (result, said) = start(place.command("session"));
    assert_eq!((result, said.as_str()), (0, ""));
    assert!(!place.usage().exists());
}

fn card_uuid(place: &Place, index: usize) -> String {
    let state = Store::open(place.path("node.json")).unwrap().read().unwrap();
    state.cards[index].uuid.clone()
}

/// Writes both files as the agent does.
fn mount_files(place: &Place, limits: &[(usize, u64)], enforcement: Enforcement) {
    let entry = |(index, limit): &(usize, u64)| {
        let uuid = CardUuid::new(&card_uuid(place, *index)).unwrap();
        (uuid, NonZeroU64::new(*limit).unwrap())
    };
    let cards: Vec<_> = limits.iter().map(entry).collect();
    let devices: Vec<_> =
        cards.iter().map(|(uuid, limit)| PageDevice::new(*uuid, *limit, CorePercent::WHOLE)).collect();
    let spec = PageSpec {
        sequence: 0,
        heartbeat_ns: 0,
        futex: 0,
        enforcement,
        grant: 7,
        devices: Devices::from_slice(&devices).unwrap(),
    };
    std::fs::write(place.path("control.page"), page::encode(&spec)).unwrap();
    let devices: Vec<_> = cards
        .iter()
        .map(|(uuid, limit)| UsageDevice { uuid: *uuid, memory_limit: *limit, core: CorePercent::WHOLE })
        .collect();
    let image = usage::image(&UsageSpec { devices: Devices::from_slice(&devices).unwrap(), priority: 1 });
    let file = File::create(place.usage()).unwrap();
    file.set_len(usage::FILE_LEN as u64).unwrap();
    for (offset, bytes) in image.writes() {
        file.write_all_at(bytes, offset).unwrap();
    }
}

fn mounted(place: &Place) -> Command {
    let mut command = place.command("session");
    in_container(&mut command, place.path("").as_path());
    command
}

// HK-11
#[test]
#[ignore = "needs the built library"]
fn the_page_counts_whatever_the_environment_says() {
    let place = Place::new();
    mount_files(&place, &[(0, 64 * MIB), (1, 32 * MIB)], Enforcement::Required);
    for (case, variables) in [
        ("nothing set", &[][..]),
        ("more asked for", &[("CUDA_DEVICE_MEMORY_LIMIT_0", "999g"), ("CUDA_DEVICE_MEMORY_LIMIT", "0")]),
        ("nonsense", &[("CUDA_DEVICE_MEMORY_LIMIT", "16Gi")]),
        ("another file", &[("CUDA_DEVICE_MEMORY_SHARED_CACHE", "/nowhere/usage.cache")]),
    ] {
        let mut command = mounted(&place);
        command.env_remove("CUDA_DEVICE_MEMORY_SHARED_CACHE");
        command.envs(variables.iter().copied());
        let mut session = Session::start(command);
        session.done("init");
        session.done("primary 0");
        assert_eq!(session.ask("info"), [0, 64 * MIB, 64 * MIB], "{case}");
        assert_eq!(session.ask("total 1"), [0, 32 * MIB], "{case}");
        session.done("alloc a 67108864");
        session.refused("alloc b 2097152");
        session.end();
    }
    assert_eq!(place.hot().attached, 4);
}

#[test]
#[ignore = "needs the built library"]
fn cards_are_told_by_uuid_whatever_cuda_calls_them() {
    // The page has them the other way round, and the program sees one of them only.
    let mut place = Place::new();
    mount_files(&place, &[(1, 32 * MIB), (0, 64 * MIB)], Enforcement::Required);
    let mut session = Session::start(mounted(&place));
    session.done("init");
    assert_eq!(session.ask("total 0"), [0, 64 * MIB]);
    assert_eq!(session.ask("total 1"), [0, 32 * MIB]);
    session.end();
    place.set("CUDA_VISIBLE_DEVICES", "1");
    let mut session = Session::start(mounted(&place));
    session.done("init");
    assert_eq!(session.ask("count"), [0, 1]);
    assert_eq!(session.ask("total 0"), [0, 32 * MIB]);
    session.done("primary 0");
    session.done("alloc a 33554432");
    let totals = place.hot().cards.map(|card| card.total);
    assert_eq!(totals[..2], [32 * MIB, 0]);

    // A card without an entry has no limit: it is not for this container.
    let place = Place::new();
    mount_files(&place, &[(0, 64 * MIB)], Enforcement::Required);
    let (result, said) = start(mounted(&place));
    assert_eq!(result, 304);
    one_line(&said, "CardUnknown");
}

#[test]
#[ignore = "needs the built library"]
fn what_cannot_be_kept_is_refused_or_reported_by_the_page() {
    /// A case, what is done to the files, and the name of what is said.
    type Damage = (&'static str, fn(&Place), &'static str);
    let damages: [Damage; 6] = [
        ("no usage file", |place| std::fs::remove_file(place.usage()).unwrap(), "UsageFileUnusable"),
        (
            "cut",
            |place| File::options().write(true).open(place.usage()).unwrap().set_len(4096).unwrap(),
            "UsageFileForeign",
        ),
        (
            "emptied",
            |place| File::options().write(true).open(place.usage()).unwrap().set_len(0).unwrap(),
            "UsageFileForeign",
        ),
        (
            "another file",
            |place| std::fs::write(place.usage(), vec![b'x'; usage::FILE_LEN]).unwrap(),
            "UsageFileForeign",
        ),
        (
            "its extension damaged",
            |place| write_at(&place.usage(), b"SCRIBBLE", usage::EXTENSION_AT),
            "UsageFileForeign",
        ),
        ("the page damaged", |place| write_at(&place.path("control.page"), b"SCRIBBLE", 0), "PageDamaged"),
    ];
    for (case, damage, code) in damages {
        for enforcement in [Enforcement::Required, Enforcement::Report] {
            let place = Place::new();
            mount_files(&place, &[(0, 64 * MIB), (1, 64 * MIB)], enforcement);
            damage(&place);
            let begun = Instant::now();
            let (result, said) = start(mounted(&place));
            assert!(begun.elapsed() < Duration::from_secs(2), "{case}");
            one_line(&said, code);
            // A page that cannot be read cannot say `report`.
            let refused = enforcement == Enforcement::Required || code == "PageDamaged";
            assert_eq!(result, if refused { 304 } else { 0 }, "{case}: {said}");
        }
    }
}

fn write_at(path: &Path, bytes: &[u8], offset: usize) {
    File::options().write(true).open(path).unwrap().write_all_at(bytes, offset as u64).unwrap();
}

// HK-04
#[test]
#[ignore = "needs the built library"]
fn a_file_by_hand_that_cannot_be_used_is_said_at_once() {
    for (case, path, code) in [
        ("its directory is missing", "missing/usage.cache", "UsageFileUnusable"),
        ("it is a directory", "", "UsageFileUnusable"),
        ("it is a pipe", "pipe", "UsageFileKind"),
        ("it is something else", "other", "UsageFileForeign"),
        ("it is too short", "short", "UsageFileForeign"),
    ] {
        let mut place = Place::new().limited(64 * MIB);
        nix::unistd::mkfifo(&place.path("pipe"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        std::fs::write(place.path("other"), vec![b'x'; 3 << 20]).unwrap();
        std::fs::write(place.path("short"), usage::MAGIC.to_le_bytes()).unwrap();
        place.set("CUDA_DEVICE_MEMORY_SHARED_CACHE", place.path(path).to_str().unwrap());
        let begun = Instant::now();
        let (result, said) = start(place.command("session"));
        assert!(begun.elapsed() < Duration::from_secs(2), "{case}");
        assert_eq!(result, 304, "{case}: {said}");
        one_line(&said, code);
    }
    // Being set up by a process that was stopped.
    let place = Place::new().limited(64 * MIB);
    let holder = File::create(place.usage()).unwrap();
    lock_byte(&holder, 1 << 42);
    let begun = Instant::now();
    let (result, said) = start(place.command("session"));
    assert!(begun.elapsed() < Duration::from_secs(8));
    assert_eq!(result, 304);
    one_line(&said, "UsageFileBusy");
}

/// Takes an open-file-description lock.
fn lock_byte(file: &File, at: i64) {
    let record = nix::libc::flock {
        l_type: i16::try_from(nix::libc::F_WRLCK).unwrap(),
        l_whence: 0,
        l_start: at,
        l_len: 1,
        l_pid: 0,
    };
    nix::fcntl::fcntl(file, nix::fcntl::FcntlArg::F_OFD_SETLK(&record)).unwrap();
}

#[test]
#[ignore = "needs the built library"]
fn the_first_process_sets_the_limits_and_the_file_is_writable_by_all() {
    let place = Place::new().limited(64 * MIB);
    let first = place.ready();
    assert_eq!(std::fs::metadata(place.usage()).unwrap().mode() & 0o777, 0o666);
    let mut command = place.command("session");
    command.env("CUDA_DEVICE_MEMORY_LIMIT", "999g");
    let mut second = Session::start(command);
    second.done("init");
    assert_eq!(second.ask("total 0"), [0, 64 * MIB], "the file wins while somebody uses it");
    first.kill();
    second.kill();
    let mut command = place.command("session");
    command.env("CUDA_DEVICE_MEMORY_LIMIT", "32m");
    let mut third = Session::start(command);
    third.done("init");
    assert_eq!(third.ask("total 0"), [0, 32 * MIB], "nobody used it any more");
}

#[test]
#[ignore = "needs the built library"]
fn processes_that_see_other_cards_share_one_file() {
    let mut place = Place::new();
    place.set("CUDA_DEVICE_MEMORY_LIMIT_0", "64m");
    place.set("CUDA_VISIBLE_DEVICES", "1");
    let mut first = place.ready();
    first.done("alloc a 4194304");
    let mut command = place.command("session");
    command.env("CUDA_VISIBLE_DEVICES", "0,1").env("CUDA_DEVICE_MEMORY_LIMIT_1", "999g");
    let mut second = Session::start(command);
    second.done("init");
    assert_eq!(second.ask("total 1"), [0, 64 * MIB], "card 1 has the limit that the first gave it");
    assert_eq!(second.ask("total 0"), [0, 64 * MIB]);
    second.done("primary 1");
    assert_eq!(second.used(), 4 * MIB);
    second.done("primary 0");
    assert_eq!(second.used(), 0);
}

/// A region of HAMi's library: its size, its header, one process.
fn hami_file(path: &Path, pid: i32) {
    let image = usage::image(&UsageSpec { devices: Devices::new(), priority: 1 });
    let mut file = File::create(path).unwrap();
    file.write_all(&vec![0; usage::HAMI_LEN + 1]).unwrap();
    for (offset, bytes) in image.writes() {
        if offset < usage::EXTENSION_AT as u64 {
            file.write_all_at(bytes, offset).unwrap();
        }
    }
    hami_process(path, 0, pid);
}

fn hami_process(path: &Path, slot: usize, pid: i32) {
    let at = usage::slot_offset(slot).unwrap();
    write_at(path, &pid.to_le_bytes(), at);
    write_at(path, &1_i32.to_le_bytes(), at + 1928);
    let count = i32::try_from(slot + 1).unwrap();
    write_at(path, &count.to_le_bytes(), usage::PROC_NUM_AT);
}

#[test]
#[ignore = "needs the built library"]
fn a_process_of_hamis_library_is_not_overlooked() {
    let place = Place::new().limited(64 * MIB);
    // A file that nobody uses any more gets the extension.
    hami_file(&place.usage(), 0x7fff_fff0);
    let mut session = place.ready();
    session.done("alloc a 67108864");
    session.kill();

    let place = Place::new().limited(64 * MIB);
    let alive = i32::try_from(std::process::id()).unwrap();
    hami_file(&place.usage(), alive);
    let (result, said) = start(place.command("session"));
    assert_eq!(result, 304);
    one_line(&said, "ForeignProcess");

    // In a file of ours: whoever comes later refuses.
    let place = Place::new().limited(64 * MIB);
    let first = place.ready();
    hami_process(&place.usage(), 1, alive);
    let (result, said) = start(place.command("session"));
    assert_eq!(result, 304);
    one_line(&said, "ForeignProcess");
    assert_eq!(place.hot().foreign, 1);
    assert_eq!(place.hot().refused, 1);
    first.end();
}

#[test]
#[ignore = "needs the built library"]
fn a_forked_child_is_another_process() {
    let place = Place::new().limited(64 * MIB);
    let mut session = place.ready();
    session.done("alloc a 33554432");
    session.tell("fork");
    // The child: attached anew at its first call, with nothing of its parent's.
    for step in ["init", "primary 0"] {
        session.tell(step);
        session.hear().unwrap();
    }
    session.tell("info");
    let info = session.hear().unwrap();
    session.tell("alloc c 33554433");
    let refused = session.hear().unwrap();
    session.tell("end");
    assert_eq!(session.hear(), Some(vec![0]), "the child ended well");
    // The driver refuses a child of a process that has started it, and so there is nothing to limit; a driver that does not
    // would see the limit hold.
    assert!(info[0] == 3 || info == [0, 32 * MIB, 64 * MIB], "{info:?}");
    assert_ne!(refused[0], 0);
    assert_eq!(session.agree("its parent goes on"), 32 * MIB);
    session.done("free a");

    session.done("spawn");
    assert_eq!(session.ask("vfork"), [0], "a child in its parent's memory is its parent");
    session.agree("spawned and vforked");
}

#[test]
#[ignore = "needs the built library"]
fn a_child_that_stays_does_not_keep_its_parents_slot() {
    let place = Place::new().limited(64 * MIB);
    let mut parent = place.ready();
    parent.done("alloc a 62914560");
    let child = parent.ask("fork-stay")[1];
    parent.kill();
    let mut next = place.ready();
    next.done("alloc a 67108864");
    assert_eq!(next.used(), 64 * MIB);
    let _ = Command::new("kill").args(["-KILL", &child.to_string()]).status();
}

#[test]
#[ignore = "needs the built library"]
fn exec_gives_the_slot_up_and_closing_every_descriptor_does_not() {
    let place = Place::new().limited(64 * MIB);
    let mut session = place.ready();
    session.done("alloc a 62914560");
    session.done("close-all");
    let mut other = place.ready();
    other.refused("alloc b 8388608");
    assert_eq!(other.used(), 60 * MIB, "no false death");
    session.tell("exec /bin/cat");
    // The driver's memory is gone with the address space, and so is the charge.
    let begun = Instant::now();
    while other.ask("alloc b 62914560")[0] != 0 {
        assert!(begun.elapsed() < Duration::from_secs(2), "exec did not free the slot");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
#[ignore = "needs the built library"]
fn threads_that_start_at_once_attach_once() {
    for _ in 0..10 {
        let place = Place::new().limited(64 * MIB);
        let mut session = place.session();
        session.done("threads");
        assert_eq!((place.hot().attached, place.hot().high_water), (1, 1));
        session.end();
    }
}

#[test]
#[ignore = "needs the built library"]
fn slots_are_used_again_whatever_the_pid() {
    let place = Place::new().limited(64 * MIB);
    for _ in 0..20 {
        let mut session = place.ready();
        session.done("alloc a 67108864");
        session.kill();
    }
    let hot = place.hot();
    assert_eq!(hot.high_water, 1, "each took over the dead one's slot");
    // A slot whose pid belongs to a living process that never was its owner.
    let at = usage::slot_offset(0).unwrap();
    write_at(&place.usage(), &std::process::id().to_le_bytes(), at);
    let mut session = place.ready();
    session.done("alloc a 67108864");
    assert_eq!(place.slot(0).claimed, 64 * MIB);
}

#[test]
#[ignore = "needs the built library"]
fn a_file_scribbled_over_by_its_tenant_neither_crashes_nor_grants() {
    let place = Place::new().limited(64 * MIB);
    let mut session = place.ready();
    session.done("alloc a 33554432");
    let card = extension::card_offset(0).unwrap();
    let junk = [0xff_u8; 8];
    for (case, at) in [
        ("T", card),
        ("the high-water mark", usage::EXTENSION_AT + extension::HIGH_WATER_AT),
        ("C of a slot without an owner", extension::slot_offset(0, 500).unwrap()),
        ("B of one", extension::slot_offset(0, 700).unwrap() + 8),
        ("HAMi's number of processes", usage::PROC_NUM_AT),
        ("HAMi's slots", usage::slot_offset(5).unwrap()),
        ("the magic", 0),
    ] {
        write_at(&place.usage(), &junk, at);
        session.refused("alloc b 67108864");
        assert_eq!(session.ask("info")[0], 0, "{case}");
        session.done("alloc b 4194304");
        session.done("free b");
    }
    session.done("free a");
    session.end();

    // Cut while it is mapped: the tenant's own processes die of it, and only those.
    let place = Place::new().limited(64 * MIB);
    let mut session = place.ready();
    File::options().write(true).open(place.usage()).unwrap().set_len(4096).unwrap();
    session.tell("alloc a 4194304");
    let _ = session.hear();
    let mut child = session.child;
    drop(child.stdin.take());
    let _ = child.wait().unwrap();
}

// HK-02
#[test]
#[ignore = "needs the built library"]
fn three_hundred_processes_start_at_once() {
    let place = Place::new().limited(64 * MIB);
    let mut sessions: Vec<_> = (0..300).map(|_| place.session()).collect();
    // All are up and wait for the word.
    for session in &mut sessions {
        session.done("pid");
    }
    let begun = Instant::now();
    for session in &mut sessions {
        session.tell("init");
    }
    for session in &mut sessions {
        assert_eq!(session.hear().unwrap()[0], 0);
    }
    let took = begun.elapsed();
    let hot = place.hot();
    assert_eq!((hot.attached, hot.high_water), (300, 300));
    // Wide: the machine of the tests may be busy. The figure is measured in the benchmarks.
    assert!(took < Duration::from_secs(10), "{took:?}");
    sessions[17].done("primary 0");
    sessions[17].done("alloc a 67108864");
    sessions[250].done("primary 0");
    sessions[250].refused("alloc a 2097152");
}

#[test]
#[ignore = "needs the built library"]
fn past_the_last_slot_cu_init_fails() {
    let mut place = Place::new().limited(64 * MIB);
    // Without the node's state each process is cheap.
    place.set("MULLION_FAKE_STATE", "");
    place.set("FAKE_CUDA_CARDS", "h100");
    let mut sessions = Vec::new();
    let mut refused = 0;
    for _ in 0..1100 {
        let mut command = place.command("session");
        command.env_remove("MULLION_FAKE_STATE").stderr(std::process::Stdio::null());
        let mut session = Session::start(command);
        match session.ask("init")[0] {
            0 => {}
            304 => refused += 1,
            other => panic!("{other}"),
        }
        sessions.push(session);
    }
    assert_eq!((sessions.len(), refused), (1100, 76));
    let hot = place.hot();
    assert_eq!((hot.high_water, hot.refused, hot.attached), (1024, 76, 1024));
    // One gone is one to come.
    sessions.swap_remove(10).kill();
    let last = sessions.last_mut().unwrap();
    assert_eq!(last.ask("init")[0], 0);
    for session in sessions {
        session.kill();
    }
}

/// On overlayfs the lock does not stay with the mapping: a descriptor is kept, and everything else is the same.
#[test]
#[ignore = "needs the built library"]
fn an_overlay_file_system_works_as_well() {
    let place = Place::new().limited(64 * MIB);
    for name in ["lower", "upper", "work", "merged"] {
        std::fs::create_dir(place.path(name)).unwrap();
    }
    let options = format!(
        "lowerdir={},upperdir={},workdir={}",
        place.path("lower").display(),
        place.path("upper").display(),
        place.path("work").display()
    );
    let merged = place.path("merged");
    mount(Some("overlay"), &merged, Some("overlay"), MsFlags::empty(), Some(options.as_str()))
        .expect("an overlay can be mounted by root");
    let file = merged.join("usage.cache");
    let command = || {
        let mut command = place.command("session");
        command.env("CUDA_DEVICE_MEMORY_SHARED_CACHE", &file);
        command
    };
    let checked = std::panic::catch_unwind(|| {
        let mut first = Session::start(command());
        let mut second = Session::start(command());
        for session in [&mut first, &mut second] {
            session.done("init");
            session.done("primary 0");
        }
        first.done("alloc a 62914560");
        second.refused("alloc a 8388608");
        // A child that stays holds the descriptor only until it runs for the first time.
        let child = first.ask("fork-stay")[1];
        first.kill();
        let begun = Instant::now();
        while second.ask("alloc a 62914560")[0] != 0 {
            assert!(begun.elapsed() < Duration::from_secs(5), "the child keeps its parent's slot");
            std::thread::sleep(Duration::from_millis(20));
        }
        let _ = Command::new("kill").args(["-KILL", &child.to_string()]).status();
        second.end();
    });
    umount2(&merged, MntFlags::MNT_DETACH).unwrap();
    checked.unwrap();
}

/// The library in which a process can be killed at each change of a shared word
/// (`MULLION_HOOK_FEATURES=fault-points vgpu-hook/build FOLDER/fault-points`).
fn with_fault_points() -> PathBuf {
    let target = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    common::built().join("fault-points").join(target).join("libvgpu.so")
}

/// Each point at which a process may die, one after the other: the others go on within a second, and nothing of the dead
/// one's charge is left.
#[test]
#[ignore = "needs the built library with fault points"]
fn whoever_dies_at_any_point_leaves_nothing() {
    const LIMIT: u64 = 64 * MIB;
    // Claiming a slot of a dead process; all families; refusals, in which the dead are reaped.
    const STEPS: [&str; 24] = [
        "init",
        "primary 0",
        "alloc a 4194304",
        "alloc p 1000",
        "alloc q 2000",
        "refuse 67108864",
        "create h 4194304 0",
        "reserve va 4194304",
        "map va h 0 4194304",
        "release h",
        "unmap va 4194304 0",
        "array r 1000 2000",
        "destroy-array r",
        "async s 1000000",
        "free-async s",
        "sync",
        "graph g 3000000",
        "launch g",
        "trim-graphs 0",
        "managed m 4194304",
        "free a",
        "free p",
        "free q",
        "free m",
    ];
    let run = |session: &mut Session| {
        for step in STEPS {
            let (step, expected) = match step.strip_prefix("refuse ") {
                Some(size) => (format!("alloc x {size}"), 2),
                None => (step.to_owned(), 0),
            };
            session.tell(&step);
            match session.hear() {
                Some(answer) => assert_eq!(answer[0], expected, "{step}"),
                None => return false,
            }
        }
        true
    };
    let place = || {
        let mut place = Place::new().limited(LIMIT);
        place.library = with_fault_points();
        place
    };
    let total = {
        let place = place();
        let mut whole = place.session();
        assert!(run(&mut whole));
        whole.ask("points")[1]
    };
    assert!(total > 60, "{total} points");
    let place = place();
    let mut survivor = place.ready();
    for point in 1..=total {
        // A dead process's slot, for the next one to reap when it claims it.
        let mut command = place.command("session");
        command.env("MULLION_FAULT_POINT", point.to_string()).stderr(std::process::Stdio::null());
        let mut victim = Session::start(command);
        run(&mut victim);
        let _ = victim.child.kill();
        victim.child.wait().unwrap();
        let begun = Instant::now();
        survivor.done("alloc a 67108864");
        assert!(begun.elapsed() < Duration::from_secs(1), "point {point}: {:?}", begun.elapsed());
        assert_eq!(survivor.used(), LIMIT, "point {point}");
        survivor.done("free a");
        // What it only asked for stands in the way of nobody; it is shown until dead slots are looked for again.
        while survivor.used() != 0 {
            assert!(begun.elapsed() < Duration::from_millis(1500), "point {point}: {}", survivor.used());
            std::thread::sleep(Duration::from_millis(20));
        }
    }
    // A process dies while it reaps another: whoever comes next finishes that.
    let hot = place.hot();
    assert!(hot.high_water <= 4, "{hot:?}");
}
