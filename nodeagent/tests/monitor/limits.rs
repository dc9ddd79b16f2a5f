//! Who lives, what he holds, what is held back, and what no account explains.

use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use mullion_audit::Event;
use mullion_core::request::ComputeWishes;
use mullion_nodeagent::monitor::engine::Verdict;
use mullion_nodeagent::monitor::escape::CALM_LOOKS;
use mullion_region::hami::{Layout, STATUS_FREE, STATUS_RUNNING};
use mullion_region::{extension, usage};

use crate::common::tenant::Tenant;
use crate::common::{MIB, Node, S, container, hami, sample};

const GIB: u64 = 1 << 30;
/// Far longer than anything here takes; only a failure waits for it.
const LONG: Duration = Duration::from_secs(20);

/// Killed processes are gone from the sums with the next look, and from what HAMi's monitor reads; the words that the
/// container's own processes admit by are left to them.
#[test]
fn what_dead_processes_held_is_not_counted_any_more() {
    let mut node = Node::new();
    node.pod("p", &["main"], &[("GPU-0", 4096, 30)]);
    let path = node.usage_path("p", "main");
    let mut tenants: Vec<Tenant> = (0..3).map(|_| Tenant::start(&path)).collect();
    for (slot, tenant) in tenants.iter_mut().enumerate() {
        tenant.hold(slot, (slot as u64 + 1) * 100 * MIB);
    }
    let pids: Vec<u32> = tenants.iter().map(Tenant::pid).collect();
    node.processes("p", "main", &pids);
    let file = node.usage("p", "main");
    file.count(0, extension::TOTAL_AT, 600 * MIB);
    file.count(0, extension::PEAK_AT, 600 * MIB);

    let driver =
        sample(&["GPU-0"], &[("GPU-0", pids[0], 400, 0), ("GPU-0", pids[1], 500, 70)], node.unix_ns() + S);
    let looked = node.look_after(S, Some(&driver));
    let seen = container(&looked.snapshot, "p", "main").usage.clone().unwrap();
    assert_eq!((seen.processes, seen.attached), (3, 3));
    assert_eq!((seen.cards[0].used, seen.cards[0].peak), (600 * MIB, 600 * MIB));
    // What HAMi's monitor reads: pids of the host by the kernel's word, memory by ours, the driver's beside it.
    let v1 = |slot: usize| {
        let at = usize::try_from(Layout::V1_2.slot_offset(slot).unwrap()).unwrap();
        let monitored = usize::try_from(Layout::V1_2.monitor_used(slot, 0, 0).unwrap().offset).unwrap();
        let busy = usize::try_from(Layout::V1_2.sm_util(slot, 0, 0).unwrap().offset).unwrap();
        let status = usize::try_from(Layout::V1_2.status(slot, 0).unwrap().offset).unwrap();
        let total = at + 8 + 32;
        let ints = (file.number(at), file.number(at + 4), file.number(status));
        (ints, file.word(total), file.word(monitored), file.word(busy))
    };
    for (slot, (driver, busy)) in [(400, 0), (500, 70), (0, 0)].into_iter().enumerate() {
        let pid = i32::try_from(pids[slot]).unwrap();
        let bytes = (slot as u64 + 1) * 100 * MIB;
        assert_eq!(v1(slot), ((pid, pid, STATUS_RUNNING), bytes, driver * MIB, busy), "slot {slot}");
    }

    tenants[1].kill();
    node.processes("p", "main", &[pids[0], pids[2]]);
    let looked = node.look(None);
    let seen = container(&looked.snapshot, "p", "main").usage.clone().unwrap();
    assert_eq!((seen.processes, seen.cards[0].used), (2, 400 * MIB));
    assert_eq!(v1(1).0, (0, 0, STATUS_FREE));
    assert_eq!(v1(1).1, 0);
    assert_eq!(v1(2).0.2, STATUS_RUNNING, "the others stay");
    // And off the container's own books, exactly: by a process that the agent starts for it,
    // and ends where it takes five seconds, of which none pass here, however busy this machine is.
    let words = extension::slot_offset(0, 1).unwrap();
    let total = extension::card_offset(0).unwrap() + extension::TOTAL_AT;
    let began = Instant::now();
    while file.word(total) != 400 * MIB {
        assert!(began.elapsed() < LONG, "T is {}", file.word(total));
        node.look_after(0, None);
    }
    // C is the last that is taken away, and the byte is given back after it.
    while !node.engine.is_settled() {
        assert!(began.elapsed() < LONG);
        node.look_after(0, None);
    }
    assert_eq!((file.word(words + extension::CLAIMED_AT), file.word(words + extension::SETTLED_AT)), (0, 0));
    for slot in [0, 2] {
        let at = extension::slot_offset(0, slot).unwrap();
        assert_eq!(file.word(at + extension::SETTLED_AT), (slot as u64 + 1) * 100 * MIB);
    }
    // The next process can have the slot.
    let mut next = Tenant::start(&path);
    next.hold(1, 50 * MIB);
    let looked = node.look(None);
    assert_eq!(container(&looked.snapshot, "p", "main").usage.as_ref().unwrap().cards[0].used, 450 * MIB);
    assert_eq!(v1(1).0.2, STATUS_RUNNING);
}

/// Where a lock goes with the last descriptor (overlayfs), who has closed that is not dead: its slot says which process it
/// is, and only the container's own processes know those pids.
#[test]
fn a_slot_that_names_its_process_is_left_to_the_container() {
    let mut node = Node::new();
    node.pod("p", &["main"], &[("GPU-0", 4096, 30)]);
    let path = node.usage_path("p", "main");
    let (mut named, mut other) = (Tenant::start(&path), Tenant::start(&path));
    named.hold(0, 100 * MIB);
    other.hold(1, 200 * MIB);
    let slot = usage::slot_offset(0).unwrap();
    named.order(&format!("put {} {}", slot + usage::MARK_AT, usage::owner_mark(0)));
    named.order(&format!("put {} {}", slot + usage::LIFE_AT, 1_u64 << 63));
    let file = node.usage("p", "main");
    file.count(0, extension::TOTAL_AT, 300 * MIB);
    let total = extension::card_offset(0).unwrap() + extension::TOTAL_AT;
    // Both locks go; to the agent it is the same whether their owners do.
    named.kill();
    other.kill();
    let began = Instant::now();
    let reaped_to = |node: &mut Node, bytes: u64| {
        while file.word(total) != bytes || !node.engine.is_settled() {
            assert!(began.elapsed() < LONG, "T is {}", file.word(total));
            node.look_after(0, None);
        }
        let seen = container(&node.look(None).snapshot, "p", "main").usage.clone().unwrap();
        (seen.processes, seen.cards[0].used, file.number(slot + usage::STATUS_AT))
    };
    assert_eq!(reaped_to(&mut node, 100 * MIB), (1, 100 * MIB, STATUS_RUNNING));
    assert_ne!(file.number(slot), 0, "the container finds it by its pid");
    // The word that another slot's owner wrote is nobody's.
    file.put(slot + usage::MARK_AT, usage::owner_mark(1));
    assert_eq!(reaped_to(&mut node, 0), (0, 0, STATUS_FREE));
}

/// A container that starts again has another file, and its counters begin anew.
#[test]
fn a_container_that_starts_again_is_another_one() {
    let mut node = Node::new();
    node.pod("p", &["main"], &[("GPU-0", 4096, 30)]);
    node.look(None);
    let file = node.usage("p", "main");
    file.launch(node.unix_ns());
    file.count(0, extension::LIMIT_HITS_AT, 7);
    node.look(None);
    node.write("p", "main", &crate::common::grant_name("p", "main"), &[("GPU-0", 4096, 30)]);
    let looked = node.look(None);
    let seen = container(&looked.snapshot, "p", "main").usage.clone().unwrap();
    assert_eq!((seen.attached, seen.cards[0].limit_hits), (0, 0));
    let [Event::UsageMinute { cards, .. }] = looked.rows.as_slice() else { panic!("{:?}", looked.rows) };
    assert_eq!(cards[0].limit_hits, 7, "what the former one did is not lost");
}

#[test]
fn memory_that_no_account_explains_is_told_after_two_looks_and_taken_back_when_it_is_gone() {
    let mut node = Node::new();
    node.pod("p", &["main", "other"], &[("GPU-0", 4096, 30)]);
    let me = std::process::id();
    for name in ["main", "other"] {
        node.usage("p", name).attach();
    }
    node.processes("p", "main", &[me]);
    let uid = "allocation-p".into();
    let own = sample(&["GPU-0"], &[("GPU-0", me, 900, 0)], node.unix_ns());
    let much = sample(&["GPU-0"], &[("GPU-0", me, 20_000, 0)], node.unix_ns());
    assert_eq!(node.look(Some(&own)).verdicts[&uid], Verdict::Holds, "a context");
    let first = node.look(Some(&much));
    assert!(first.turns.is_empty() && first.verdicts[&uid] == Verdict::Holds, "once proves nothing");
    assert!(node.look(None).turns.is_empty(), "nor does a driver that does not answer");
    let second = node.look(Some(&much));
    let [turn] = second.turns.as_slice() else { panic!("{:?}", second.turns) };
    let text = turn.bypass.as_ref().unwrap().to_string();
    assert_eq!(turn.target.container, "main");
    assert!(text.contains("20000 MiB of card GPU-0") && text.contains("limit of 4096 MiB"), "{text}");
    let Verdict::Bypassed { message } = &second.verdicts[&uid] else { panic!("{:?}", second.verdicts) };
    assert!(message.contains("container main"), "{message}");
    assert!(matches!(
        second.rows.as_slice(),
        [Event::LimitBypassed { held_mib: 20_000, accounted_mib: 0, limit_mib: 4096, processes: 1, .. }]
    ));
    assert!(container(&second.snapshot, "p", "main").bypassed);
    assert!(!container(&second.snapshot, "p", "other").bypassed);
    assert!(node.look(Some(&much)).turns.is_empty(), "told once");
    for _ in 1..CALM_LOOKS {
        assert!(node.look(Some(&own)).turns.is_empty(), "taken back only after a while");
    }
    let back = node.look(Some(&own));
    assert!(matches!(back.turns.as_slice(), [turn] if turn.bypass.is_none()));
    assert!(matches!(back.rows.as_slice(), [Event::BypassEnded { .. }]));
    assert_eq!(back.verdicts[&uid], Verdict::Holds);
}

/// A card about which the driver says nothing hides no bypass of another.
#[test]
fn each_card_is_judged_by_itself() {
    let mut node = Node::new();
    node.pod("p", &["main"], &[("GPU-0", 4096, 30), ("GPU-1", 4096, 30)]);
    let me = std::process::id();
    node.processes("p", "main", &[me]);
    let tell = |mib: u64| {
        let mut told = sample(&["GPU-0", "GPU-1"], &[("GPU-0", me, mib, 0)], 0);
        told.cards[1].processes = None;
        told
    };
    let looks = |node: &mut Node, looks: u8, mib: u64| {
        let last = (0..looks).map(|_| node.look(Some(&tell(mib)))).last().unwrap();
        container(&last.snapshot, "p", "main").bypassed
    };
    assert!(looks(&mut node, 2, 60_000));
    assert!(looks(&mut node, 2 * CALM_LOOKS, 300), "the other card may hide one");
}

#[test]
fn a_damaged_usage_file_is_told_after_two_looks_and_taken_back_with_a_new_file() {
    let mut node = Node::new();
    let slices = [("GPU-0", 4096, 30)];
    node.pod("p", &["main", "other"], &slices);
    for name in ["main", "other"] {
        node.usage("p", name).attach();
    }
    let uid = "allocation-p".into();
    let idle = sample(&["GPU-0"], &[], 0);
    assert_eq!(node.look(Some(&idle)).verdicts[&uid], Verdict::Holds);
    // `echo garbage > usage.cache`, and back before the next look.
    let path = node.usage_path("p", "main");
    let good = std::fs::read(&path).unwrap();
    std::fs::write(&path, "garbage\n").unwrap();
    let first = node.look(Some(&idle));
    assert!(first.file_turns.is_empty() && first.verdicts[&uid] == Verdict::Holds, "once proves nothing");
    std::fs::write(&path, &good).unwrap();
    assert!(node.look(Some(&idle)).file_turns.is_empty());
    std::fs::write(&path, "garbage\n").unwrap();
    assert!(node.look(Some(&idle)).file_turns.is_empty(), "not twice in a row");
    let second = node.look(Some(&idle));
    let [turn] = second.file_turns.as_slice() else { panic!("{:?}", second.file_turns) };
    assert_eq!(turn.target.container, "main");
    let Verdict::Damaged { message } = &second.verdicts[&uid] else { panic!("{:?}", second.verdicts) };
    let fault = turn.fault.as_ref().unwrap();
    for part in ["container main", "/usr/local/vgpu/usage.cache", fault.code, "Restart the container"] {
        assert!(message.contains(part), "{part}: {message}");
    }
    let [Event::UsageFileDamaged { container, code, .. }] = second.rows.as_slice() else {
        panic!("{:?}", second.rows)
    };
    assert_eq!((container.as_str(), code.as_str()), ("main", fault.code));
    assert!(node.look(Some(&idle)).file_turns.is_empty(), "told once");
    // Between two runs of the container it is not there.
    std::fs::remove_file(&path).unwrap();
    for _ in 0..3 {
        let looked = node.look(Some(&idle));
        assert!(looked.file_turns.is_empty());
        assert!(matches!(looked.verdicts[&uid], Verdict::Damaged { .. }), "{:?}", looked.verdicts);
    }
    // Another file takes its place; a number that was free may be given again.
    let between = std::fs::File::create(path.with_extension("between")).unwrap();
    node.write("p", "main", &crate::common::grant_name("p", "main"), &slices);
    drop(between);
    assert!(node.look(Some(&idle)).file_turns.is_empty());
    let back = node.look(Some(&idle));
    assert!(matches!(back.file_turns.as_slice(), [turn] if turn.fault.is_none()), "{:?}", back.file_turns);
    assert!(matches!(back.rows.as_slice(), [Event::UsageFileReadable { .. }]), "{:?}", back.rows);
    assert_eq!(back.verdicts[&uid], Verdict::Holds);
}

/// Each turn is an Event, a write and a row: who spoils his file and mends it makes one a minute, not one a second.
#[test]
fn a_usage_file_that_its_tenant_mends_is_believed_after_a_while() {
    let mut node = Node::new();
    node.pod("p", &["main"], &[("GPU-0", 4096, 30)]);
    let path = node.usage_path("p", "main");
    let good = std::fs::read(&path).unwrap();
    std::fs::write(&path, "garbage\n").unwrap();
    assert_eq!([node.look(None), node.look(None)].map(|l| l.file_turns.len()), [0, 1]);
    std::fs::write(&path, &good).unwrap();
    for _ in 1..CALM_LOOKS {
        assert!(node.look(None).file_turns.is_empty());
    }
    assert_eq!(node.look(None).file_turns.len(), 1);
    assert_eq!(node.look(None).verdicts[&"allocation-p".into()], Verdict::Waiting);
}

// MO-10: all of five containers on one card are held to their share, not only some of them.
#[test]
fn five_containers_on_a_card_are_all_throttled() {
    let mut node = Node::new();
    let pods = ["a", "b", "c", "d", "e"];
    for pod in pods {
        node.pod(pod, &["main"], &[("GPU-0", 1024, 10)]);
        node.usage(pod, "main").put32(usage::UTILIZATION_SWITCH_AT, 0);
    }
    let cards = ["GPU-0"];
    let idle = sample(&cards, &[], 0);
    let looked = node.look(Some(&idle));
    for pod in pods {
        node.usage(pod, "main").launch(node.unix_ns() + S / 2);
        assert!(!container(&looked.snapshot, pod, "main").throttled, "nobody is at work");
    }
    let looked = node.look(Some(&idle));
    for pod in pods {
        assert_eq!(node.usage(pod, "main").number(usage::UTILIZATION_SWITCH_AT), 1, "{pod}");
        assert!(container(&looked.snapshot, pod, "main").throttled, "{pod}");
    }
}

/// A container of HAMi's says in its own file which cards it has and how urgent it is: it is believed about cards on
/// which the driver sees it, and stops nobody elsewhere.
#[test]
fn a_foreign_file_stops_nobody_on_cards_that_it_only_names() {
    let mut node = Node::new();
    node.pod("ours", &["main"], &[("GPU-0", 1024, 30)]);
    node.run("h", &["main"]);
    let folder = node.folder("h", "main");
    hami::folder(&folder);
    let path = folder.join("x.cache");
    hami::write(&path, Layout::V1_2, "GPU-0", MIB, MIB);
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    file.write_all_at(&0_i32.to_le_bytes(), usage::PRIORITY_AT as u64).unwrap();
    let me = std::process::id();
    node.processes("h", "main", &[me]);
    let gated = |node: &mut Node, processes: &[(&str, u32, u64, u32)]| {
        // The second in which the look comes.
        let second = (node.unix_ns() + S * 9 / 10) / S;
        file.write_all_at(&second.to_le_bytes(), usage::LAST_KERNEL_TIME_AT as u64).unwrap();
        node.usage("ours", "main").launch(node.unix_ns());
        let told = sample(&["GPU-0"], processes, node.unix_ns());
        let looked = node.look(Some(&told));
        container(&looked.snapshot, "ours", "main").gated
    };
    assert!(!gated(&mut node, &[]), "it only names the card");
    assert!(gated(&mut node, &[("GPU-0", me, 300, 0)]), "it is there");
}

/// Alone on its card a container runs freely, unless its pod says `force`.
#[test]
fn who_wants_it_is_held_to_its_share_also_alone() {
    let mut node = Node::new();
    for (pod, card) in [("free", "GPU-0"), ("forced", "GPU-1")] {
        node.pod(pod, &["main"], &[(card, 1024, 30)]);
    }
    node.wish("forced", "main", ComputeWishes { force: true, ..ComputeWishes::default() });
    let driver = sample(&["GPU-0", "GPU-1"], &[], 0);
    for _ in 0..3 {
        for pod in ["free", "forced"] {
            node.usage(pod, "main").launch(node.unix_ns() + S / 2);
        }
        node.look(Some(&driver));
    }
    let switch = |pod: &str| node.usage(pod, "main").number(usage::UTILIZATION_SWITCH_AT);
    assert_eq!((switch("free"), switch("forced")), (0, 1));
}

/// Who is held back launches seldom: seen as idle, the others would run freely, and next it would itself.
#[test]
fn whoever_waits_for_its_share_is_at_work() {
    let mut node = Node::new();
    for pod in ["often", "waits"] {
        node.pod(pod, &["main"], &[("GPU-0", 1024, 30)]);
    }
    let driver = sample(&["GPU-0"], &[], 0);
    node.usage("waits", "main").launch(node.unix_ns());
    let mut look = |waited: u64| {
        node.usage("often", "main").launch(node.unix_ns() + S / 2);
        node.usage("waits", "main").count(0, extension::WAIT_NS_AT, waited);
        node.look(Some(&driver));
        ["often", "waits"].map(|pod| node.usage(pod, "main").number(usage::UTILIZATION_SWITCH_AT))
    };
    for second in 1..10 {
        assert_eq!(look(second * S), [1, 1], "after {second} s");
    }
    assert_eq!(look(9 * S), [0, 0], "it waits no more");
}

// MO-10: the low priority alone is held back, and goes on at most two seconds after the high one stopped.
#[test]
fn a_low_priority_waits_for_a_high_one_and_for_nobody_else() {
    let mut node = Node::new();
    for (pod, card) in [("high", "GPU-0"), ("low", "GPU-0"), ("away", "GPU-1")] {
        node.pod(pod, &["main"], &[(card, 1024, 30)]);
    }
    let urgent = ComputeWishes { priority: 0, ..ComputeWishes::default() };
    node.wish("high", "main", urgent);
    // What a tenant writes into its file makes it no more urgent than its pod says.
    node.usage("low", "main").put32(usage::PRIORITY_AT, 0);
    let driver = sample(&["GPU-0", "GPU-1"], &[], 0);
    let recent = |node: &Node, pod: &str| node.usage(pod, "main").number(usage::RECENT_KERNEL_AT);
    for pod in ["high", "low", "away"] {
        node.usage(pod, "main").launch(node.unix_ns());
    }
    let looked = node.look(Some(&driver));
    assert_eq!((recent(&node, "low"), container(&looked.snapshot, "low", "main").gated), (-1, true));
    assert!(recent(&node, "high") >= 0 && recent(&node, "away") >= 0);
    let (closed_since, futex) = (node.unix_ns(), node.page("low", "main").futex);
    // The high one's last launch.
    node.usage("high", "main").launch(closed_since);
    while recent(&node, "low") < 0 {
        node.look(Some(&driver));
    }
    let late = node.unix_ns() - closed_since;
    assert!(late <= 2 * S, "{late} ns");
    assert_ne!(node.page("low", "main").futex, futex, "who waits is woken");
    // A stamp in the future is no launch.
    node.usage("high", "main").launch(node.unix_ns() + 3600 * S);
    node.look(Some(&driver));
    assert!(recent(&node, "low") >= 0);
}

/// The scale follows what the driver measures; a switch that is off, and a driver that is silent, leave it.
#[test]
fn the_pace_is_steered_by_what_the_driver_measures() {
    let mut node = Node::new();
    for pod in ["p", "q"] {
        node.pod(pod, &["main"], &[("GPU-0", 1024, 30)]);
    }
    let me = std::process::id();
    node.processes("p", "main", &[me]);
    let scale = |node: &Node| node.page("p", "main").devices.iter().next().unwrap().scale.get();
    let launch = |node: &Node, pods: &[&str]| {
        for pod in pods {
            let file = node.usage(pod, "main");
            file.launch(node.unix_ns() + S / 2);
            file.charge(S / 2);
        }
    };
    let run = |node: &mut Node, looks: usize, pods: &[&str], driver: bool| {
        for _ in 0..looks {
            launch(node, pods);
            let told = sample(&["GPU-0"], &[("GPU-0", me, 300, 90)], node.unix_ns() + S / 2);
            node.look(driver.then_some(&told));
        }
        scale(node)
    };
    let alone = run(&mut node, 10, &["p"], true);
    assert_eq!(alone, 1 << 16, "alone on its card it runs freely");
    let shared = run(&mut node, 10, &["p", "q"], true);
    assert!(shared > alone, "90 % of the time where 30 % are its: {shared}");
    let page = node.page("p", "main");
    assert_eq!(page.sequence % 2, 0);
    let silent = run(&mut node, 10, &["p", "q"], false);
    assert_eq!(silent, shared, "no driver, no step");
    // Another agent goes on from where the page stands.
    node.anew();
    assert_eq!(run(&mut node, 1, &["p", "q"], false), shared);
    assert!(run(&mut node, 10, &["p", "q"], true) > shared);
}

/// Host memory behind a limit: more than the card has is not "more than can be true".
#[test]
fn a_limit_above_the_card_is_believed() {
    let mut node = Node::new();
    node.pod("p", &["main"], &[("GPU-0", 100_000, 30)]);
    let mut tenant = Tenant::start(&node.usage_path("p", "main"));
    tenant.hold(0, 90 * GIB);
    let looked = node.look(Some(&sample(&["GPU-0"], &[], 0)));
    let seen = container(&looked.snapshot, "p", "main").usage.clone().unwrap();
    assert_eq!((seen.cards[0].used, seen.capped), (90 * GIB, false));
}

/// A file that is not whole any more: the reaper says so and ends, which is all that it can do.
#[test]
fn a_reaper_ends_whatever_its_file_is() {
    let mut node = Node::new();
    node.pod("p", &["main"], &[("GPU-0", 4096, 30)]);
    let path = node.usage_path("p", "main");
    let reap = |path: &std::path::Path| {
        let file = std::fs::File::options().read(true).write(true).open(path).unwrap();
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_mullion-nodeagent"));
        command.arg(mullion_nodeagent::monitor::reap::COMMAND).stdin(file).status().unwrap()
    };
    assert!(reap(&path).success(), "nothing to do");
    node.usage("p", "main").put32(usage::EXTENSION_AT + extension::HIGH_WATER_AT, -1);
    assert!(reap(&path).success(), "a mark beyond all slots");
    node.usage("p", "main").0.set_len(4096).unwrap();
    assert!(!reap(&path).success(), "cut");
    assert!(!reap(std::path::Path::new("/dev/null")).success(), "no plain file");
}
