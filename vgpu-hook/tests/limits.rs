//! Where a container's limits come from, and what happens where they cannot be kept.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test that cannot be set up has failed"
)]

mod common;
mod sessions;

use std::fs::File;
use std::num::NonZeroU64;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::process::Command;
use std::time::{Duration, Instant};

use fake_state::Store;
use mullion_region::page::{self, Enforcement, PageDevice, PageSpec};
use mullion_region::usage::{self, UsageDevice, UsageSpec};
use mullion_region::{CardUuid, CorePercent, Devices};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use sessions::{MIB, Place, Session, end, in_container, one_line, prepared, start, write_at};

#[test]
#[ignore = "needs the built library"]
fn a_limit_that_is_none_ends_cu_init() {
    for (name, value) in [
        ("CUDA_DEVICE_MEMORY_LIMIT", "16Gi"),
        ("CUDA_DEVICE_MEMORY_LIMIT_0", "1.5g"),
        ("CUDA_DEVICE_MEMORY_LIMIT_1", "99999999999999999999"),
        ("CUDA_DEVICE_MEMORY_LIMIT_0", "4g "),
        ("CUDA_DEVICE_SM_LIMIT", "half"),
    ] {
        let mut place = Place::new();
        place.set(name, value);
        let (result, said) = start(place.command("session"));
        assert_eq!(result, 1, "{name}={value}");
        one_line(&said, "LimitInvalid");
        assert!(said.contains(&format!("{name}=\"{value}\" is ")), "{said}");
    }
    // There are sixteen cards at most: a limit that nobody would hear.
    for name in ["CUDA_DEVICE_MEMORY_LIMIT_16", "CUDA_DEVICE_SM_LIMIT_16", "CUDA_DEVICE_MEMORY_LIMIT0"] {
        let mut place = Place::new();
        place.set(name, "30");
        let (result, said) = start(place.command("session"));
        assert_eq!(result, 1, "{name}");
        one_line(&said, "LimitInvalid");
        assert!(said.contains(&format!("{name} is the limit of no card")), "{said}");
    }
    // No limit, no library to be seen, no file.
    let place = Place::new();
    let (result, said) = start(place.command("session"));
    assert_eq!((result, said.as_str()), (0, ""));
    assert!(!place.usage().exists());
}

#[test]
#[ignore = "needs the built library"]
fn a_process_that_asks_again_and_again_is_told_once() {
    let mut place = Place::new();
    place.set("CUDA_DEVICE_MEMORY_LIMIT", "16Gi");
    let mut command = place.command("session");
    command.stderr(std::process::Stdio::piped());
    let mut session = Session::start(command);
    for _ in 0..50 {
        assert_eq!(session.ask("init")[0], 1);
    }
    let said = end(session);
    one_line(&said, "LimitInvalid");
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

/// Root as anybody else, to whom a file's mode means something.
fn obey_modes() {
    const CAP_DAC_OVERRIDE: nix::libc::c_ulong = 1;
    // SAFETY: no memory is passed. Who is not root need not give it up.
    #[expect(unsafe_code, reason = "prepares the child")]
    unsafe {
        nix::libc::prctl(nix::libc::PR_CAPBSET_DROP, CAP_DAC_OVERRIDE)
    };
}

#[test]
#[ignore = "needs the built library"]
fn why_a_file_by_hand_cannot_be_used_is_said_with_the_way_out() {
    let place = Place::new().limited(64 * MIB);
    let mode = |path: &str, mode| {
        std::fs::set_permissions(place.path(path), std::fs::Permissions::from_mode(mode)).unwrap();
    };
    std::fs::write(place.path("mine"), "").unwrap();
    mode("mine", 0o444);
    for (folder, options, flags) in [
        ("small", "size=64k", MsFlags::empty()),
        ("read-only", "size=64k", MsFlags::MS_RDONLY),
        ("closed", "", MsFlags::empty()),
    ] {
        std::fs::create_dir(place.path(folder)).unwrap();
        if !options.is_empty() {
            mount(Some("none"), &place.path(folder), Some("tmpfs"), flags, Some(options))
                .expect("root can mount a tmpfs");
        }
    }
    mode("closed", 0o555);
    let long = format!("{}/file", "x".repeat(256));
    let checked = std::panic::catch_unwind(|| {
        for (path, want) in [
            ("mine", "opening failed: no permission (error 13): you may not write to it: chmod it, or"),
            ("closed/file", "making it failed: no permission (error 13): make its directory writable"),
            ("read-only/file", "making it failed: read-only file system (error 30): name a file on another"),
            ("small/file", "making room failed: no space on its file system (error 28): free some"),
            ("missing/file", "making it failed: not there (error 2): its directory does not exist"),
            ("mine/file", "opening failed: no directory (error 20): a part of its path"),
            (long.as_str(), "opening failed: name too long (error 36): name a file with a shorter path"),
        ] {
            let mut command = place.command("session");
            command.env("CUDA_DEVICE_MEMORY_SHARED_CACHE", place.path(path));
            prepared(&mut command, || {
                obey_modes();
                Ok(())
            });
            let (result, said) = start(command);
            assert_eq!(result, 304, "{path}: {said}");
            one_line(&said, "UsageFileUnusable");
            assert!(said.contains(want), "{path}: {said}");
            assert!(path == "mine" || !place.path(path).exists(), "{path}: a file was left behind");
        }
    });
    for folder in ["small", "read-only"] {
        umount2(&place.path(folder), MntFlags::MNT_DETACH).unwrap();
    }
    checked.unwrap();
}

#[test]
#[ignore = "needs the built library"]
fn what_a_program_without_stderr_is_told_stays_out_of_the_file() {
    let place = Place::new().limited(64 * MIB);
    // Without the node's state, so that no file of the simulated driver takes the place of stderr.
    let command = |limit: &str| {
        let mut command = place.command("session");
        command.env_remove(fake_state::STATE_ENV).env("FAKE_CUDA_CARDS", "h100");
        command.env("CUDA_DEVICE_MEMORY_LIMIT", limit);
        command
    };
    let mut holder = Session::start(command("64m"));
    holder.done("init");
    let head = || std::fs::read(place.usage()).unwrap()[..usage::SLOTS_AT].to_vec();
    let before = head();
    // It is told that the file has another limit.
    let mut closed = command("32m");
    prepared(&mut closed, || Ok(nix::unistd::close(2)?));
    let mut session = Session::start(closed);
    session.done("init");
    assert!(head() == before, "the head of the usage file was written over");
    assert_eq!(start(command("64m")), (0, String::new()), "another one starts");
    session.end();
    holder.end();
}

/// Answers every call that opens a file or else makes it with `EACCES`, as Linux does for another user's file in a sticky
/// folder such as /tmp (`fs.protected_regular`, which is not a test's to set).
fn refuse_open_or_make() -> std::io::Result<()> {
    use nix::libc;
    let statement = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
    let (load, and, equal, answer) = (0x20, 0x54, 0x15, 0x06);
    let (create, exclusive) = (libc::O_CREAT.unsigned_abs(), libc::O_EXCL.unsigned_abs());
    let mut filter = [
        // The call's number, then the low half of its third argument.
        statement(load, 0, 0, 0),
        statement(equal, 0, 4, u32::try_from(libc::SYS_openat).unwrap_or(0)),
        statement(load, 0, 0, 32),
        statement(and, 0, 0, create | exclusive),
        statement(equal, 0, 1, create),
        statement(answer, 0, 0, libc::SECCOMP_RET_ERRNO | libc::EACCES.unsigned_abs()),
        statement(answer, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: 7, filter: filter.as_mut_ptr() };
    nix::sys::prctl::set_no_new_privs()?;
    // SAFETY: the kernel reads the program, which outlives the call.
    #[expect(unsafe_code, reason = "prepares the child")]
    let result = unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) };
    if result == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

#[test]
#[ignore = "needs the built library"]
fn another_users_file_is_opened_and_never_made() {
    let place = Place::new().limited(64 * MIB);
    // Without the node's state, which the simulated driver opens or makes.
    let simulated = || {
        let mut command = place.command("session");
        command.env_remove(fake_state::STATE_ENV).env("FAKE_CUDA_CARDS", "h100");
        command
    };
    let command = || {
        let mut command = simulated();
        prepared(&mut command, refuse_open_or_make);
        command
    };
    assert_eq!(start(command()), (0, String::new()), "there is no file yet");
    assert!(place.usage().exists());
    let mut holder = Session::start(simulated());
    holder.done("init");
    assert_eq!(start(command()), (0, String::new()), "the file is there");
    assert_eq!(place.hot().high_water, 2, "they share it");
    holder.end();
}

#[test]
#[ignore = "needs the built library"]
fn programs_that_start_at_once_make_one_file() {
    for _ in 0..10 {
        let place = Place::new().limited(64 * MIB);
        let mut sessions: Vec<_> = (0..16).map(|_| place.session()).collect();
        for session in &mut sessions {
            session.tell("init");
        }
        for session in &mut sessions {
            assert_eq!(session.hear().unwrap(), [0]);
        }
        assert_eq!((place.hot().attached, place.hot().high_water), (16, 16));
    }
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

/// What a program sees that makes a context, and what it says on stderr.
fn make_context(mut command: Command) -> (Vec<u64>, Vec<u64>, String) {
    command.stderr(std::process::Stdio::piped());
    let mut session = Session::start(command);
    session.done("init");
    let (made, info) = (session.ask("primary 0"), session.ask("info"));
    (made, info, end(session))
}

#[test]
#[ignore = "needs the built library"]
fn a_limit_that_is_not_in_force_is_told() {
    const MEMORY: &str = "CUDA_DEVICE_MEMORY_LIMIT_0";
    const CORES: &str = "CUDA_DEVICE_SM_LIMIT_0";
    const POLICY: &str = "GPU_CORE_UTILIZATION_POLICY";
    /// The first program's variables, the second one's, and what the second is told.
    type Case =
        (&'static [(&'static str, &'static str)], &'static [(&'static str, &'static str)], &'static str);
    let cases: [Case; 10] = [
        (&[(MEMORY, "64m"), (CORES, "30")], &[(MEMORY, "64m"), (CORES, "30")], ""),
        (&[(MEMORY, "64m")], &[(MEMORY, "32m")], "limits card 0 to 64 MiB, not to 32 MiB: that holds"),
        (
            &[(MEMORY, "64m"), (CORES, "30")],
            &[(MEMORY, "64m"), (CORES, "80")],
            "30 % of the cores, not to 80 %",
        ),
        (
            &[(MEMORY, "64m"), (CORES, "30")],
            &[(MEMORY, "64m")],
            "limits card 0 to 30 % of the cores: that holds",
        ),
        (
            &[(MEMORY, "64m")],
            &[(MEMORY, "64m"), (CORES, "20")],
            "does not limit card 0 to 20 % of the cores: ",
        ),
        (&[(CORES, "30")], &[(MEMORY, "64m"), (CORES, "30")], "does not limit card 0 to 64 MiB: that holds"),
        (
            &[(MEMORY, "64m"), (CORES, "30")],
            &[(CORES, "10")],
            "64 MiB, and limits card 0 to 30 % of the cores, not",
        ),
        (
            &[(MEMORY, "64m"), (CORES, "30")],
            &[(MEMORY, "64m"), (CORES, "10"), (POLICY, "disable")],
            "30 % of the cores: GPU_CORE_UTILIZATION_POLICY=disable lifts that share for this process alone",
        ),
        (&[(MEMORY, "64m")], &[(MEMORY, "64m"), (CORES, "10"), (POLICY, "disable")], ""),
        (
            &[(CORES, "30"), (POLICY, "disable")],
            &[(CORES, "30"), (POLICY, "disable")],
            "30 % of the cores: GPU_CORE_UTILIZATION_POLICY=disable lifts that share for this process alone",
        ),
    ];
    for (first, second, want) in cases {
        let place = Place::new();
        let start = |variables: &[(&str, &str)]| {
            let mut command = place.command("session");
            command.envs(variables.iter().copied()).stderr(std::process::Stdio::piped());
            let mut session = Session::start(command);
            session.done("init");
            session
        };
        let mut holder = start(first);
        let said = end(start(second));
        let mut unread = holder.child.stderr.take().unwrap();
        holder.end();
        let mut told = String::new();
        std::io::Read::read_to_string(&mut unread, &mut told).unwrap();
        assert_eq!(told, "", "nobody used the file before {first:?}");
        if want.is_empty() {
            assert_eq!(said, "", "{first:?} {second:?}");
        } else {
            one_line(&said, "LimitOfFile");
            assert!(said.contains(want), "{first:?} {second:?}: {said}");
        }
    }
    // A card that it adds itself is limited by nobody else.
    let mut place = Place::new();
    place.set(CORES, "30");
    place.set("CUDA_VISIBLE_DEVICES", "1");
    let holder = place.ready();
    let mut other = place.command("session");
    other.env_remove(CORES).env("CUDA_VISIBLE_DEVICES", "0,1");
    other.env("CUDA_DEVICE_SM_LIMIT_0", "20").env("CUDA_DEVICE_SM_LIMIT_1", "30").env(POLICY, "disable");
    let (_, _, said) = make_context(other);
    one_line(&said, "LimitOfFile");
    assert!(said.contains("limits card 1 to 30 %"), "{said}");
    holder.end();
    // Of each card.
    let mut place = Place::new();
    place.set(MEMORY, "64m");
    place.set("CUDA_DEVICE_MEMORY_LIMIT_1", "32m");
    let holder = place.ready();
    let mut other = place.command("session");
    other.env(MEMORY, "1g").env("CUDA_DEVICE_MEMORY_LIMIT_1", "2g");
    let (_, info, said) = make_context(other);
    let lines: Vec<&str> = said.lines().collect();
    assert_eq!(lines.len(), 2, "{said}");
    assert!(
        lines[0].contains("card 0 to 64 MiB, not to 1024 MiB") && lines[1].contains("card 1 to 32 MiB"),
        "{said}"
    );
    assert_eq!(info, [0, 64 * MIB, 64 * MIB]);
    holder.end();
}

/// Nobody reads what it says, or Ctrl-S was typed: it waits, and the others do not.
#[test]
#[ignore = "needs the built library"]
fn whoever_cannot_be_told_keeps_nobody_from_starting() {
    let place = Place::new().limited(64 * MIB);
    let holder = place.ready();
    let (unread, full) = nix::unistd::pipe().unwrap();
    let room = nix::fcntl::fcntl(&full, nix::fcntl::FcntlArg::F_GETPIPE_SZ).unwrap();
    let mut full = File::from(full);
    std::io::Write::write_all(&mut full, &vec![b'x'; usize::try_from(room).unwrap()]).unwrap();
    let mut command = place.command("session");
    command.env("CUDA_DEVICE_MEMORY_LIMIT", "32m").stderr(full);
    let mut waiting = Session::start(command);
    waiting.tell("init");
    // Once it has its slot there is only the line left to be said.
    let deadline = Instant::now() + Duration::from_secs(10);
    while place.hot().high_water < 2 && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(10));
    }
    let (result, said) = start(place.command("session"));
    assert_eq!((result, said.as_str()), (0, ""));
    drop(unread);
    waiting.kill();
    holder.end();
}

#[test]
#[ignore = "needs the built library"]
fn a_limit_of_a_card_that_is_not_there_is_told() {
    let mut place = Place::new();
    place.set("CUDA_VISIBLE_DEVICES", "1");
    let mut command = place.command("session");
    command.env("CUDA_DEVICE_MEMORY_LIMIT_1", "64m");
    let (result, said) = start(command);
    assert_eq!(result, 0);
    one_line(&said, "LimitOfNoCard");
    assert!(said.contains("CUDA_DEVICE_MEMORY_LIMIT_1 limits nothing: this process has 1 card, "), "{said}");
    // Each of them, not only the first.
    let mut command = place.command("session");
    command.env("CUDA_DEVICE_MEMORY_LIMIT_1", "64m").env("CUDA_DEVICE_SM_LIMIT_1", "30");
    command.env("CUDA_DEVICE_MEMORY_LIMIT_2", "64m");
    let (_, said) = start(command);
    for name in ["MEMORY_LIMIT_1", "SM_LIMIT_1", "MEMORY_LIMIT_2"] {
        assert!(said.contains(&format!("CUDA_DEVICE_{name} limits nothing")), "{said}");
    }
    let mut command = place.command("session");
    command.env("CUDA_DEVICE_MEMORY_LIMIT_0", "64m");
    assert_eq!(start(command), (0, String::new()));
}

#[test]
#[ignore = "needs the built library"]
fn a_limit_that_leaves_no_room_for_a_context_is_told() {
    let place = Place::new().contexts_of(64).limited(4);
    let (made, _, said) = make_context(place.command("session"));
    assert_eq!(made[0], sessions::OUT_OF_MEMORY);
    one_line(&said, "LimitBelowContext");
    let want = "card 0: the limit of 4 bytes (CUDA_DEVICE_MEMORY_LIMIT) is less than the 64 MiB that a context takes";
    assert!(said.contains(want), "{said}");
}
