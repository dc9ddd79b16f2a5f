//! Files that are not what they should be.

use std::fs;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, symlink};

use mullion_audit::Event;
use mullion_nodeagent::monitor::engine::Looked;
use mullion_region::hami::{Layout, PRE_V0_LEN};
use mullion_region::{extension, usage};
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;

use crate::common::tenant::Tenant;
use crate::common::{MIB, Node, S, container, hami, lines, sample, scrape};

const GIB: u64 = 1 << 30;
/// Every question takes longer.
const ONE_QUESTION: std::time::Duration = std::time::Duration::from_nanos(1);

// MO-01: whatever lies in the folders, the good ones are shown and the bad ones counted, each by its reason.
#[test]
fn a_directory_of_everything_shows_the_good_and_counts_the_bad() {
    let mut node = Node::new();
    let folder = |node: &mut Node, pod: &str| {
        node.run(pod, &["main"]);
        let folder = node.folder(pod, "main");
        hami::folder(&folder);
        folder.join("9c1f6a52.cache")
    };
    let good =
        [("v0", Layout::V0), ("v11", Layout::V1_1), ("v11s", Layout::V1_1Shifted), ("v12", Layout::V1_2)];
    for (pod, layout) in good {
        let path = folder(&mut node, pod);
        hami::write(&path, layout, "GPU-0", 4 * GIB, 300 * MIB);
    }
    node.pod("ours", &["main"], &[("GPU-0", 4096, 30)]);

    let cut = folder(&mut node, "cut");
    hami::write(&cut, Layout::V1_2, "GPU-0", GIB, MIB).set_len(1_500_000).unwrap();
    let old = folder(&mut node, "old");
    hami::write(&old, Layout::V0, "GPU-0", GIB, MIB).set_len(PRE_V0_LEN as u64 + 1).unwrap();
    fs::write(folder(&mut node, "empty"), "").unwrap();
    let sparse = folder(&mut node, "sparse");
    fs::File::create(&sparse).unwrap().set_len(GIB).unwrap();
    mkfifo(&folder(&mut node, "fifo"), Mode::from_bits_truncate(0o666)).unwrap();
    let passwd = folder(&mut node, "link");
    symlink("/etc/passwd", &passwd).unwrap();
    fs::create_dir(folder(&mut node, "folder")).unwrap();
    let two = folder(&mut node, "two");
    hami::write(&two, Layout::V1_2, "GPU-0", GIB, MIB);
    fs::write(two.with_file_name("other.cache"), "").unwrap();
    let crowd = folder(&mut node, "crowd");
    for number in 0..600 {
        fs::write(crowd.with_file_name(number.to_string()), "").unwrap();
    }
    let linked = node.folder("linked", "main");
    node.run("linked", &["main"]);
    symlink("/etc", &linked).unwrap();
    // A granted container whose file is gone, or is another thing: its limits are shown all the same.
    for (pod, replace) in [("ours-gone", false), ("ours-link", true)] {
        node.pod(pod, &["main"], &[("GPU-0", 2048, 30)]);
        fs::remove_file(node.usage_path(pod, "main")).unwrap();
        if replace {
            symlink("/etc/passwd", node.usage_path(pod, "main")).unwrap();
        }
    }
    // Of no pod here, or not even a folder.
    fs::create_dir(node.folder("stranger", "main")).unwrap();
    fs::write(node.settings.containers_dir().join("README"), "x").unwrap();
    let passwd_before = fs::read("/etc/passwd").unwrap();

    let looked = node.look(Some(&sample(&["GPU-0"], &[], 0)));
    for (pod, _) in good {
        let seen = container(&looked.snapshot, pod, "main").usage.clone().unwrap();
        let card = &seen.cards[0];
        assert_eq!((card.card.as_str(), card.limit, card.used), ("GPU-0", 4 * GIB, 300 * MIB), "{pod}");
        assert_eq!((card.cores, seen.processes), (30, 1), "{pod}");
    }
    let mut bad: Vec<(&str, &str)> = looked
        .snapshot
        .containers
        .iter()
        .filter_map(|c| Some((c.pod.uid.as_str(), *c.usage.as_ref().err()?)))
        .collect();
    bad.sort_unstable();
    assert_eq!(
        bad,
        [
            ("crowd", "UsageAmbiguous"),
            ("cut", "RegionTooShort"),
            ("empty", "RegionTooShort"),
            ("fifo", "UsageNotPlain"),
            ("folder", "UsageNotPlain"),
            ("link", "UsageLink"),
            ("linked", "UsageLink"),
            ("old", "RegionTooOld"),
            ("ours-gone", "UsageMissing"),
            ("ours-link", "UsageLink"),
            ("sparse", "RegionMagic"),
            ("two", "UsageAmbiguous"),
        ]
    );
    let text = scrape(looked.snapshot);
    assert_eq!(lines(&text, "hami_vgpu_memory_used_bytes").len(), 5, "{text}");
    assert_eq!(lines(&text, "mullion_container_memory_limit_bytes").len(), 7);
    assert!(text.contains(r#"mullion_usage_files_unreadable{node="node-a",code="UsageLink"} 3"#), "{text}");
    assert_eq!(fs::read("/etc/passwd").unwrap(), passwd_before);
}

/// A tenant who writes what he likes: his numbers are cut to what can be true, nobody else's move.
#[test]
fn a_tenant_who_scribbles_hurts_himself_alone() {
    let mut node = Node::new();
    for pod in ["bad", "good"] {
        node.pod(pod, &["main"], &[("GPU-0", 4096, 30)]);
    }
    let mut good = Tenant::start(&node.usage_path("good", "main"));
    good.hold(0, 100 * MIB);
    let mut bad = Tenant::start(&node.usage_path("bad", "main"));
    bad.hold(0, u64::MAX);
    let file = node.usage("bad", "main");
    file.count(0, extension::PEAK_AT, u64::MAX);
    // Other limits, another card, in HAMi's part of the file.
    file.put(usage::LIMITS_AT, u64::MAX);
    file.0.write_all_at(b"GPU-1\0", usage::UUIDS_AT as u64).unwrap();
    let driver = sample(&["GPU-0", "GPU-1"], &[], 0);
    let looked = node.look(Some(&driver));
    let seen = container(&looked.snapshot, "bad", "main").usage.clone().unwrap();
    assert_eq!((seen.cards[0].used, seen.cards[0].peak, seen.capped), (80 * GIB, 80 * GIB, true));
    assert_eq!((seen.cards[0].card.as_str(), seen.cards[0].limit), ("GPU-0", 4 * GIB), "the allocation's");
    let seen = container(&looked.snapshot, "good", "main").usage.clone().unwrap();
    assert_eq!((seen.cards[0].used, seen.capped), (100 * MIB, false));
    let text = scrape(looked.snapshot);
    assert!(
        text.contains(r#"usage_capped{node="node-a",namespace="team",pod="bad-name",container="main"} 1"#),
        "{text}"
    );

    // Fields that mean nothing make the file unreadable, and nothing worse.
    for (at, number, code) in [
        (usage::EXTENSION_AT + extension::HIGH_WATER_AT, -1, "RegionHighWater"),
        (usage::PROC_NUM_AT, 4096, "RegionTooManySlots"),
        (usage::DEVICE_NUM_AT, 99, "RegionTooManyDevices"),
        (0, 0, "RegionMagic"),
    ] {
        file.put32(at, number);
        let looked = node.look(Some(&driver));
        assert_eq!(container(&looked.snapshot, "bad", "main").usage, Err(code));
        assert!(container(&looked.snapshot, "good", "main").usage.is_ok());
    }
}

/// A process that cuts, punches and overwrites its file while it is read: no look fails, and the neighbour's numbers are
/// right in each.
#[test]
fn a_file_that_is_spoiled_while_it_is_read_kills_nobody() {
    let mut node = Node::new();
    for pod in ["bad", "good"] {
        node.pod(pod, &["main"], &[("GPU-0", 4096, 30), ("GPU-1", 4096, 30)]);
    }
    let mut good = Tenant::start(&node.usage_path("good", "main"));
    good.hold(0, 100 * MIB);
    let mut bad = Tenant::start(&node.usage_path("bad", "main"));
    bad.order("spoil");
    let driver = sample(&["GPU-0", "GPU-1"], &[], 0);
    let mut unreadable = 0;
    for _ in 0..400 {
        let looked = node.look(Some(&driver));
        let seen = container(&looked.snapshot, "good", "main").usage.clone().unwrap();
        assert_eq!((seen.cards[0].used, seen.processes, seen.capped), (100 * MIB, 1, false));
        match &container(&looked.snapshot, "bad", "main").usage {
            Ok(seen) => assert!(seen.cards.iter().all(|c| c.used <= 80 * GIB && c.peak <= 80 * GIB)),
            Err(_) => unreadable += 1,
        }
        scrape(looked.snapshot);
    }
    assert!(unreadable > 0, "it was not spoiled");
    bad.kill();
    let meta = fs::metadata(node.usage_path("bad", "main")).unwrap();
    assert!(meta.len() <= usage::FILE_LEN as u64, "the agent never makes it longer");
}

/// Locks of more than one's own byte, up to the end of all files: slots below the high-water mark are told alive, none
/// beyond, and it ends.
#[test]
fn a_lock_over_everything_is_bounded() {
    let mut node = Node::new();
    node.pod("p", &["main"], &[("GPU-0", 4096, 30)]);
    let file = node.usage("p", "main");
    file.put32(usage::EXTENSION_AT + extension::HIGH_WATER_AT, 3);
    let all = nix::libc::flock {
        l_type: i16::try_from(nix::libc::F_WRLCK).unwrap(),
        l_whence: 0,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    };
    nix::fcntl::fcntl(&file.0, nix::fcntl::FcntlArg::F_OFD_SETLK(&all)).unwrap();
    let looked = node.look(None);
    assert_eq!(container(&looked.snapshot, "p", "main").usage.as_ref().unwrap().processes, 3);
}

/// Whoever owns a file may hold a lease on it, and who opens it then waits until that is given back: the tenant's root owns
/// his usage file.
#[test]
#[expect(unsafe_code, reason = "leases have no safe interface")]
fn a_lease_stops_nobody() {
    let mut node = Node::new();
    for pod in ["lessee", "neighbour"] {
        node.pod(pod, &["main"], &[("GPU-0", 4096, 30)]);
    }
    let file = node.usage("lessee", "main");
    // SAFETY: the signal that asks for a lease back is ignored, nothing else.
    unsafe { nix::libc::signal(nix::libc::SIGIO, nix::libc::SIG_IGN) };
    // SAFETY: an open descriptor and two numbers.
    let leased = unsafe { nix::libc::fcntl(file.0.as_raw_fd(), nix::libc::F_SETLEASE, nix::libc::F_WRLCK) };
    assert_eq!(leased, 0, "{}", std::io::Error::last_os_error());
    let from = std::time::Instant::now();
    let looked = node.look(None);
    // The kernel takes a lease back after 45 s (`/proc/sys/fs/lease-break-time`).
    assert!(from.elapsed() < std::time::Duration::from_secs(20), "{:?}", from.elapsed());
    assert_eq!(container(&looked.snapshot, "lessee", "main").usage, Err("UsageLeased"));
    assert!(container(&looked.snapshot, "neighbour", "main").usage.is_ok());
}

/// The kernel goes through all locks of a file for each question about one: who puts down too many is left alone for a
/// minute, and said to have spoiled his file. His neighbours are looked after as ever.
#[test]
fn whoever_puts_down_too_many_locks_is_left_alone() {
    let mut node = Node::new();
    for pod in ["bad", "good"] {
        node.pod(pod, &["main"], &[("GPU-0", 4096, 30)]);
    }
    // One question, so that two locks are too many.
    node.allow(ONE_QUESTION);
    let mut bad = Tenant::start(&node.usage_path("bad", "main"));
    bad.hold(0, 100 * MIB);
    bad.hold(2, 100 * MIB);
    let usage = |looked: &Looked, pod: &str| container(&looked.snapshot, pod, "main").usage.clone();
    let first = node.look(None);
    assert!(first.file_turns.is_empty(), "once proves nothing");
    let second = node.look(None);
    for looked in [&first, &second] {
        assert_eq!(usage(looked, "bad").unwrap_err(), "UsageLocked");
        assert!(usage(looked, "good").is_ok());
    }
    let [Event::UsageFileDamaged { container, code, .. }] = second.rows.as_slice() else {
        panic!("{:?}", second.rows)
    };
    assert_eq!((container.as_str(), code.as_str()), ("main", "UsageLocked"));
    let text = second.file_turns[0].fault.as_ref().unwrap().to_string();
    assert!(text.contains("so many locks") && !text.contains("cuInit"), "{text}");
    // Not even asked again within the minute.
    bad.kill();
    for passed in [20, 20, 15] {
        assert_eq!(usage(&node.look_after(passed * S, None), "bad").unwrap_err(), "UsageLocked");
    }
    assert!(usage(&node.look_after(10 * S, None), "bad").is_ok());
    // Another file is another start of the container.
    let mut bad = Tenant::start(&node.usage_path("bad", "main"));
    for slot in [0, 2] {
        bad.hold(slot, 100 * MIB);
    }
    assert!(usage(&node.look(None), "bad").is_err());
    node.write("bad", "main", &crate::common::grant_name("bad", "main"), &[("GPU-0", 4096, 30)]);
    assert!(usage(&node.look(None), "bad").is_ok());
}

/// What is written for readers of HAMi's fields takes locks, too.
#[test]
fn slots_of_the_dead_are_freed_within_the_same_time() {
    let mut node = Node::new();
    node.pod("p", &["main"], &[("GPU-0", 4096, 30)]);
    node.allow(ONE_QUESTION);
    let file = node.usage("p", "main");
    file.put32(usage::EXTENSION_AT + extension::HIGH_WATER_AT, 64);
    assert!(container(&node.look(None).snapshot, "p", "main").usage.is_ok());
    assert_eq!(container(&node.look(None).snapshot, "p", "main").usage, Err("UsageLocked"));
}

/// As many processes as a container may have are no reason to leave its file alone.
#[test]
fn many_processes_are_not_too_many_locks() {
    let mut node = Node::new();
    node.pod("p", &["main"], &[("GPU-0", 4096, 30)]);
    let file = node.usage("p", "main");
    file.put32(usage::EXTENSION_AT + extension::HIGH_WATER_AT, 1024);
    let owners: Vec<_> = (0..500).map(|_| node.usage("p", "main").0).collect();
    for (slot, owner) in owners.iter().enumerate() {
        assert!(mullion_nodeagent::monitor::files::take_slot(owner, 2 * slot).unwrap());
    }
    for _ in 0..3 {
        let looked = node.look(None);
        assert_eq!(container(&looked.snapshot, "p", "main").usage.as_ref().unwrap().processes, 500);
    }
}

/// An agent that lost whose a grant is does not take the tenant's word for it: its file is none of HAMi's, in which limits,
/// cards and priority stand.
#[test]
fn a_container_whose_grant_is_lost_is_not_read_as_one_of_hamis() {
    let mut node = Node::new();
    for pod in ["lost", "neighbour"] {
        node.pod(pod, &["main"], &[("GPU-0", 4096, 30)]);
    }
    let me = std::process::id();
    node.processes("lost", "main", &[me]);
    node.world.grants.retain(|_, grant| grant.pod != "lost");
    let file = node.usage("lost", "main");
    file.put(usage::LIMITS_AT, 77 * MIB);
    file.put32(usage::PRIORITY_AT, 0);
    let told = sample(&["GPU-0"], &[("GPU-0", me, 300, 90)], node.unix_ns());
    let looked = node.look(Some(&told));
    assert!(!container(&looked.snapshot, "neighbour", "main").gated);
    assert_eq!(container(&looked.snapshot, "lost", "main").usage, Err("UsageMissing"));
    let text = scrape(looked.snapshot);
    let limits = lines(&text, "mullion_container_memory_limit_bytes");
    assert!(!limits.iter().any(|line| line.contains("lost")), "{limits:?}");
}
