//! Files that their tenants hold: a `write` of theirs that does not end, a lease that is taken anew.

use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mullion_core::request::ComputeWishes;
use mullion_nodeagent::events::Announcer;
use mullion_nodeagent::monitor::bounds::Bounds;
use mullion_nodeagent::monitor::engine::Verdict;
use mullion_nodeagent::monitor::heart::Heart;
use mullion_nodeagent::prepare::files;
use mullion_nodeagent::world::Shared;
use mullion_region::usage;
use rustix::fs::XattrFlags;

use crate::common::cluster::{cluster, notes};
use crate::common::tenant::Tenant;
use crate::common::{MIB, Node, S, container, sample};

/// Far longer than anything here takes; only a failure waits for it.
const LONG: Duration = Duration::from_secs(20);

fn switch(node: &Node, pod: &str) -> i32 {
    node.usage(pod, "main").number(usage::UTILIZATION_SWITCH_AT)
}

/// The agent writes into each file, but never waits for one.
#[test]
fn a_write_that_does_not_end_keeps_nobody_waiting() {
    let mut node = Node::new();
    for pod in ["bad", "good"] {
        node.pod(pod, &["main"], &[("GPU-0", 4096, 30)]);
        // So that the agent has something to write.
        node.usage(pod, "main").put32(usage::UTILIZATION_SWITCH_AT, 1);
    }
    let mut good = Tenant::start(&node.usage_path("good", "main"));
    good.hold(0, 100 * MIB);
    let mut bad = Tenant::start(&node.usage_path("bad", "main"));
    bad.hold(0, 200 * MIB);
    if !bad.keeps_the_file() {
        return;
    }
    node.hurry();
    let begun = Instant::now();
    let mut all_is_well = false;
    while !all_is_well {
        assert!(begun.elapsed() < LONG);
        let looked = node.look(None);
        let used =
            |pod: &str| container(&looked.snapshot, pod, "main").usage.as_ref().map(|u| u.cards[0].used);
        all_is_well =
            switch(&node, "good") == 0 && [used("bad"), used("good")] == [Ok(200 * MIB), Ok(100 * MIB)];
    }
    assert_eq!(switch(&node, "bad"), 1);
    for _ in 0..20 {
        node.look(None);
    }
    // Who is at work has the file open.
    let held = node.usage_path("bad", "main");
    let open = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    let at_work = open.filter(|fd| std::fs::read_link(fd.path()).is_ok_and(|path| path == held)).count();
    assert!((1..=2).contains(&at_work), "what is held up is not begun anew: {at_work}");
    bad.kill();
    while switch(&node, "bad") == 1 {
        assert!(begun.elapsed() < LONG);
        node.look(None);
    }
}

/// Whoever makes his file too large is told of, and cut back as soon as he lets go of it. Meanwhile the agent does other things.
#[tokio::test]
async fn a_file_that_is_held_is_told_of_and_cut_afterwards() {
    let mut node = Node::new();
    node.pod("bad", &["main"], &[("GPU-0", 4096, 30)]);
    let path = node.usage_path("bad", "main");
    // Blocks without a length.
    let flags = nix::fcntl::FallocateFlags::FALLOC_FL_KEEP_SIZE;
    nix::fcntl::fallocate(&node.usage("bad", "main").0, flags, 0, 64 << 20).unwrap();
    let mut bad = Tenant::start(&path);
    bad.hold(0, 200 * MIB);
    let held = bad.keeps_the_file();
    let (client, mut said) = cluster();
    let shared = Shared::new(std::mem::take(&mut node.world));
    let announcer = Announcer::new(client, Arc::clone(&shared), Arc::default(), "node-a".into());
    let mut bounds = Bounds::new(node.settings.clone(), shared, announcer);
    for _ in 0..3 {
        bounds.look().await;
    }
    let event = tokio::time::timeout(LONG, said.recv()).await.unwrap().unwrap();
    assert_eq!(
        (event["reason"].as_str(), event["regarding"]["name"].as_str()),
        (Some("UsageFileCut"), Some("bad-name"))
    );
    assert!(event["note"].as_str().unwrap().contains("container main"), "{event}");
    let taken = || std::fs::metadata(&path).unwrap().blocks() * 512;
    assert!(!held || taken() >= 64 << 20);
    bad.kill();
    let begun = Instant::now();
    while taken() >= 4 << 20 {
        assert!(begun.elapsed() < LONG, "{} bytes", taken());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    bounds.look().await;
    assert_eq!(notes(&mut said), Vec::<String>::new(), "told once");
}

/// As with more attributes than the kernel names, which XFS keeps on the node's disk, and a tmpfs here.
#[tokio::test]
async fn a_file_that_cannot_be_cut_is_told_of() {
    let mut node = Node::below(Path::new("/dev/shm"));
    node.pod("bad", &["main"], &[("GPU-0", 4096, 30)]);
    let path = node.usage_path("bad", "main");
    for number in 0..400 {
        let name = format!("user.{number:0200}");
        if let Err(error) = rustix::fs::setxattr(&path, name, b"much", XattrFlags::empty()) {
            eprintln!("a tmpfs without attributes: {error}");
            return;
        }
    }
    let (client, mut said) = cluster();
    let shared = Shared::new(std::mem::take(&mut node.world));
    let announcer = Announcer::new(client, Arc::clone(&shared), Arc::default(), "node-a".into());
    let mut bounds = Bounds::new(node.settings.clone(), shared, announcer);
    let mut reasons = Vec::new();
    let begun = Instant::now();
    while reasons.len() < 2 {
        assert!(begun.elapsed() < LONG, "{reasons:?}");
        bounds.look().await;
        tokio::time::sleep(Duration::from_millis(20)).await;
        reasons.extend(notes(&mut said));
    }
    assert!(reasons[0].starts_with("UsageFileCut: the usage file of container main is"), "{reasons:?}");
    assert!(
        reasons[1].starts_with("UsageFileNotCut: ") && reasons[1].ends_with("delete the pod"),
        "{reasons:?}"
    );
    for _ in 0..10 {
        bounds.look().await;
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(notes(&mut said), Vec::<String>::new(), "told once");
}

/// A lease is given back when somebody asks for it, and taken anew before he comes.
#[test]
fn a_lease_that_is_taken_anew_keeps_no_file_long() {
    let mut node = Node::new();
    node.pod("p", &["main"], &[("GPU-0", 4096, 30)]);
    let mut tenant = Tenant::start(&node.usage_path("p", "main"));
    tenant.order("lease");
    node.usage("p", "main").0.write_all_at(b"x", 10 << 20).unwrap();
    tenant.order("lease");
    assert!(files::oversize(&node.folder("p", "main")).unwrap().is_some());
    files::cut_usage_file(&node.folder("p", "main")).unwrap();
    assert_eq!(files::oversize(&node.folder("p", "main")).unwrap(), None);
}

/// However long a look takes: unless it does not come back at all, when nobody may vouch for a gate.
#[tokio::test]
async fn the_heart_beats_while_somebody_looks() {
    let mut node = Node::new();
    node.pod("p", &["main"], &[("GPU-0", 4096, 30)]);
    let shared = Shared::new(std::mem::take(&mut node.world));
    let beats = async |heart: &Heart| {
        let before = node.page("p", "main").heartbeat_ns;
        let _ = tokio::time::timeout(Duration::from_secs(2), heart.beat()).await;
        node.page("p", "main").heartbeat_ns > before
    };
    let heart = Heart::new(node.settings.pages_dir(), shared);
    assert!(beats(&heart).await);
    heart.looked(0);
    assert!(!beats(&heart).await);
}

/// A look that takes long would write an old sign of life over a new one.
#[test]
fn the_sign_of_life_is_the_hearts_alone() {
    let mut node = Node::new();
    node.pod("p", &["main"], &[("GPU-0", 4096, 30)]);
    let me = std::process::id();
    node.processes("p", "main", &[me]);
    let scale = |node: &Node| node.page("p", "main").devices.iter().next().unwrap().scale;
    node.beat();
    let (beat_ns, first) = (node.page("p", "main").heartbeat_ns, scale(&node));
    assert_eq!(beat_ns, 100 * S + node.passed);
    node.wish("p", "main", ComputeWishes { force: true, ..ComputeWishes::default() });
    for _ in 0..10 {
        let file = node.usage("p", "main");
        file.launch(node.unix_ns() + S / 2);
        file.charge(S / 2);
        let told = sample(&["GPU-0"], &[("GPU-0", me, 300, 90)], node.unix_ns() + S / 2);
        node.look(Some(&told));
    }
    assert_ne!(scale(&node), first, "something was written");
    assert_eq!(node.page("p", "main").heartbeat_ns, beat_ns);
}

/// What another run of the agent said of a container stands until this one knows better.
#[test]
fn no_limit_holds_before_the_driver_was_heard() {
    let mut node = Node::new();
    node.pod("p", &["main"], &[("GPU-0", 4096, 30)]);
    node.usage("p", "main").attach();
    let me = std::process::id();
    node.processes("p", "main", &[me]);
    let much = sample(&["GPU-0"], &[("GPU-0", me, 60_000, 0)], node.unix_ns());
    let own = sample(&["GPU-0"], &[("GPU-0", me, 300, 0)], node.unix_ns());
    let uid = "allocation-p".into();
    let say = |node: &mut Node, sample| node.look(sample).verdicts[&uid].clone();
    for _ in 0..3 {
        assert_eq!(say(&mut node, None), Verdict::Unsure);
    }
    assert_eq!(say(&mut node, Some(&much)), Verdict::Unsure, "once proves nothing");
    assert!(matches!(say(&mut node, Some(&much)), Verdict::Bypassed { .. }));
    node.anew();
    assert_eq!(say(&mut node, None), Verdict::Unsure);
    assert_eq!(say(&mut node, Some(&own)), Verdict::Holds);
    assert_eq!(say(&mut node, None), Verdict::Holds, "a driver that is silent for a moment");
    // Of a card that never tells, the library's word alone is known.
    node.anew();
    let said: Vec<Verdict> = (0..30).map(|_| say(&mut node, None)).collect();
    assert_eq!((&said[0], &said[29]), (&Verdict::Unsure, &Verdict::Holds));
}
