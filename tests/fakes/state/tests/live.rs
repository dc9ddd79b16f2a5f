//! The live region: who holds what, and how time is shared.
#![expect(clippy::expect_used, reason = "a test that cannot be set up has failed")]

use std::sync::atomic::Ordering::SeqCst;

use fake_state::live::layout::SLOTS;
use fake_state::live::work::{WINDOW_NS, move_on, simulate};
use fake_state::live::{Live, path};
use fake_state::{Error, Store, profile};
use tempfile::TempDir;

/// Two programs in one process: each has its own view of the file, its own slot and its own locks.
fn pair() -> (TempDir, Live, Live) {
    let folder = tempfile::tempdir().expect("a folder");
    let state = profile::node("a30", "n").expect("a node");
    let store = Store::create(folder.path().join("node.json"), &state).expect("a state file");
    let open = || {
        let live = Live::open(store.path()).expect("a live file");
        live.claim(0).expect("a slot");
        live
    };
    let (a, b) = (open(), open());
    simulate(a.region());
    (folder, a, b)
}

#[test]
fn a_card_gives_what_it_has_and_no_more() {
    let (_folder, a, b) = pair();
    assert!(a.give(0, 60, 100) && !b.give(0, 41, 100) && b.give(0, 40, 100));
    assert_eq!((a.given(0), a.given_here(0), b.given_here(0)), (100, 60, 40));
    a.take_back(0, 60);
    assert!(b.give(0, 60, 100));
    assert_eq!((a.given(0), a.given(1), b.given(99)), (100, 0, 0));
    assert_eq!(a.region().cards[0].peak.load(SeqCst), 100);
    assert_eq!(a.region().cards[0].full.load(SeqCst), 1);
}

/// One after the other while alone, each half as fast while there are two.
#[test]
fn time_is_shared_by_those_who_have_work() {
    let (_folder, a, b) = pair();
    let wait = |ns| move_on(a.region(), ns);
    let first = a.submit(0, 100);
    wait(40);
    assert!(!a.is_done(0, first));
    let second = b.submit(0, 50);
    // 60 and 50 are left: b ends after 100, then a needs 10 more.
    wait(98);
    assert!(!b.is_done(0, second));
    wait(2);
    assert!(b.is_done(0, second) && !a.is_done(0, first));
    wait(10);
    assert!(a.is_done(0, first));
    let start = 1_000_000_000;
    assert_eq!((a.done_at(0, first), b.done_at(0, second)), (Some(start + 150), Some(start + 140)));
    assert_eq!((a.busy(0), a.busy(1)), (150, 0));
    // An idle stretch adds nothing.
    wait(1000);
    let third = a.submit(0, 5);
    wait(5);
    assert!(a.is_done(0, third));
    assert_eq!(a.busy(0), 155);
}

#[test]
fn samples_are_full_windows_of_the_busy() {
    let (_folder, a, b) = pair();
    let now = move_on(a.region(), 0);
    let start = move_on(a.region(), WINDOW_NS - now % WINDOW_NS);
    let _ = a.submit(0, 2 * WINDOW_NS);
    move_on(a.region(), WINDOW_NS / 2);
    assert!(a.samples(0, 0).is_empty(), "its first window is not over");
    let _ = b.submit(0, WINDOW_NS / 4);
    move_on(a.region(), WINDOW_NS.div_ceil(2));
    let mut busy: Vec<u64> = a.samples(0, 0).iter().map(|s| s.busy).collect();
    busy.sort_unstable();
    assert_eq!(busy.len(), 2);
    let close = |got: u64, want: u64| got.abs_diff(want) <= 4;
    assert!(close(busy[0], WINDOW_NS / 4) && close(busy[1], WINDOW_NS * 3 / 4), "{busy:?}");
    assert!(a.samples(0, 0).iter().all(|s| s.end == start + WINDOW_NS));
    assert_eq!(a.utilization(0), 100);
    assert!(a.samples(0, start + WINDOW_NS).is_empty(), "seen already");
}

#[test]
fn a_file_of_another_layout_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let state = folder.path().join("node.json");
    std::fs::write(path(&state), vec![7_u8; 1 << 16]).expect("a file");
    assert!(matches!(Live::open(&state), Err(Error::ForeignLive { .. })));
}

#[test]
fn slots_of_nobody_are_cleared() {
    let (folder, a, _b) = pair();
    for slot in &a.region().slots {
        slot.pid.store(1, SeqCst);
        slot.cards[0].given.store(1, SeqCst);
    }
    a.region().high_water.store(u32::try_from(SLOTS).expect("a small number"), SeqCst);
    let third = Live::open(&folder.path().join("node.json")).expect("a live file");
    third.claim(0).expect("one of the slots that nobody holds");
    assert!(third.own().is_some_and(|s| s < SLOTS));
}
