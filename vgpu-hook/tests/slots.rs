//! Who owns a slot of the usage file: processes that fork, call exec, start and end, many of them, on any file system.
#![cfg(test)]

mod common;
mod sessions;

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use mullion_region::usage::{self, UsageSpec};
use mullion_region::{Devices, extension};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use sessions::{MIB, Place, Session, one_line, start, write_at};

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
fn a_file_named_by_the_folder_is_found_from_another_one() {
    let place = Place::new().limited(64 * MIB);
    let ready = || {
        let mut command = place.command("session");
        command.current_dir(place.path("")).env("CUDA_DEVICE_MEMORY_SHARED_CACHE", "./usage.cache");
        let mut session = Session::start(command);
        session.done("init");
        session.done("primary 0");
        session
    };
    let (mut first, mut second) = (ready(), ready());
    first.done("alloc a 62914560");
    second.done("chdir /");
    second.refused("alloc a 8388608");
    first.kill();
    gets(&mut second, "alloc a 62914560", "the dead keeps its memory");
    second.end();
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
    let mut place = Place::new().limited(64 * MIB);
    // A driver that starts slowly: one after the other they would need 15 s.
    place.set("FAKE_CUDA_SLOW", "cuInit:1:50000");
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

/// With the usage file on an overlay file system, runs a check, which gets the command of a session.
fn on_overlay(check: impl Fn(&dyn Fn() -> Command)) {
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
    let command = || {
        let mut command = place.command("session");
        command.env("CUDA_DEVICE_MEMORY_SHARED_CACHE", merged.join("usage.cache"));
        command
    };
    let checked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| check(&command)));
    umount2(&merged, MntFlags::MNT_DETACH).unwrap();
    checked.unwrap();
}

fn ready(command: Command) -> Session {
    let mut session = Session::start(command);
    session.done("init");
    session.done("primary 0");
    session
}

/// The same program with few descriptors.
fn with_descriptors(count: u32, command: &Command) -> Command {
    let mut limited = Command::new("sh");
    // What the test itself was given is not to count.
    let closed = "exec 3>&- 4>&- 5>&- 6>&- 7>&- 8>&- 9>&-";
    limited
        .args(["-c", &format!("{closed}; ulimit -n {count}; exec \"$0\"")])
        .arg(command.get_program())
        .env_clear();
    limited.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
    limited
}

/// Asks for memory until it is there, which must not take long.
fn gets(session: &mut Session, step: &str, case: &str) {
    let begun = Instant::now();
    while session.ask(step)[0] != 0 {
        assert!(begun.elapsed() < Duration::from_secs(5), "{case}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// `first` holds 60 of 64 MiB: nobody else gets more than there is beside it, until it is killed.
fn another_is_refused_until_it_dies(first: Session, command: Command) {
    let mut second = ready(command);
    assert_eq!(second.used(), 60 * MIB, "no false death");
    second.refused("alloc a 8388608");
    first.kill();
    gets(&mut second, "alloc a 62914560", "the dead keeps its slot");
    second.end();
}

/// On overlayfs the lock does not stay with the mapping: a descriptor is kept, and everything else is the same.
#[test]
#[ignore = "needs the built library"]
fn an_overlay_file_system_works_as_well() {
    on_overlay(|command| {
        let (mut first, mut second) = (ready(command()), ready(command()));
        first.done("alloc a 62914560");
        second.refused("alloc a 8388608");
        // A child that stays holds the descriptor only until it runs for the first time.
        let child = first.ask("fork-stay")[1];
        first.kill();
        gets(&mut second, "alloc a 62914560", "the child keeps its parent's slot");
        let _ = Command::new("kill").args(["-KILL", &child.to_string()]).status();
        second.end();
    });
}

#[test]
#[ignore = "needs the built library"]
fn on_an_overlay_closing_every_descriptor_is_no_death_either() {
    for end in ["", "exec /bin/cat"] {
        on_overlay(|command| {
            let mut first = ready(command());
            first.done("alloc a 62914560");
            first.done("close-all");
            // One that finds a file in use by nobody begins it anew, and one that finds a slot of nobody takes it.
            let mut second = ready(command());
            assert_eq!(second.used(), 60 * MIB, "no false death");
            second.refused("alloc a 8388608");
            first.done("free a");
            first.done("alloc a 62914560");
            second.refused("alloc a 8388608");
            if end.is_empty() {
                first.child.kill().unwrap();
                gets(
                    &mut second,
                    "alloc a 62914560",
                    "a dead process that nobody has waited for keeps its slot",
                );
            } else {
                first.tell(end);
                gets(&mut second, "alloc a 62914560", "exec did not free the slot");
            }
            first.kill();
            second.end();
        });
    }
}

/// Which process has a slot is only known from `/proc` then.
#[test]
#[ignore = "needs the built library"]
fn on_an_overlay_a_process_is_not_dead_because_it_cannot_be_asked_after() {
    on_overlay(|command| {
        let mut first = ready(command());
        first.done("alloc a 62914560");
        first.done("close-all");
        // One finds no descriptor for the question whether anybody uses the file. The most with which it gets so far
        // depends on what the program has open.
        for descriptors in 5..8 {
            let mut poor = Session::start(with_descriptors(descriptors, &command()));
            if poor.ask("init")[0] == 0 {
                poor.done("primary 0");
                poor.refused("alloc a 8388608");
            }
            poor.kill();
        }
        another_is_refused_until_it_dies(first, command());
    });
}

#[test]
#[ignore = "needs the built library"]
fn on_an_overlay_a_process_lives_as_long_as_one_of_its_threads() {
    on_overlay(|command| {
        let mut first = ready(command());
        first.done("alloc a 62914560");
        first.done("close-all");
        first.done("end-first");
        another_is_refused_until_it_dies(first, command());
    });
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
