//! What launches leave and pay: on which card, and beside streams under capture.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test that cannot be set up has failed"
)]

mod common;
mod sessions;

use common::{pairs, run};
use sessions::{MIB, Place};

#[test]
#[ignore = "needs the built library"]
fn a_capture_stops_no_measurement_elsewhere_and_is_over_when_its_stream_or_context_is_gone() {
    let mut place = Place::new();
    place.set("CUDA_DEVICE_SM_LIMIT", "50");
    place.set("GPU_CORE_UTILIZATION_POLICY", "force");
    let text = run(&mut place.command("captures")).quiet();
    let told = pairs(&text);
    for (when, measured, asked) in [
        ("before", "1", "0"),
        ("beside", "1", "some"),
        ("captured", "0", "some"),
        ("destroyed", "1", "0"),
        ("context-destroyed", "1", "0"),
    ] {
        assert_eq!(told.get(format!("{when}-measured").as_str()), Some(&measured), "{when}: {text}");
        let found = told.get(format!("{when}-asked").as_str()).copied();
        assert!(if asked == "0" { found == Some("0") } else { found > Some("0") }, "{when}: {text}");
    }
}

/// An event in a stream says nothing of the others. Where kernels of several streams wait for each other, what is measured
/// contains the wait: the share is too small then, and the agent's to mend, but it is never too large.
#[test]
#[ignore = "needs the built library"]
fn a_share_is_held_in_several_streams() {
    for (streams, us, least) in
        [("1", "5000", 26.0), ("2", "5000", 26.0), ("4", "5000", 26.0), ("4", "100", 7.0)]
    {
        let found = busy(&["streams", streams, us]);
        assert!((least..=34.0).contains(&found), "{streams} streams, kernels of {us} us: {found} %");
    }
}

/// The card is the stream's, and so are the events: a thread need not have its context current to launch there.
#[test]
#[ignore = "needs the built library"]
fn a_share_is_held_on_a_streams_card_whatever_is_current() {
    for current in ["bare", "other"] {
        let found = busy(&[current, "1", "5000"]);
        assert!((26.0..=34.0).contains(&found), "{current}: {found} %");
    }
}

/// As a kernel whose work depends on its data.
#[test]
#[ignore = "needs the built library"]
fn a_share_is_held_by_a_function_that_was_short_once() {
    let found = busy(&["later", "1", "10000"]);
    assert!((26.0..=34.0).contains(&found), "{found} %");
}

/// As with `CUDA_LAUNCH_BLOCKING=1`, in a debugger or under a profiler: what a launch takes of the host is no excuse then.
#[test]
#[ignore = "needs the built library"]
fn a_share_is_held_by_launches_that_answer_when_the_kernel_has_ended() {
    for (us, least) in [("20000", 26.0), ("500", 15.0)] {
        let mut place = Place::new();
        place.set("FAKE_CUDA_LATE", &format!("cuLaunchKernel:{us}"));
        let found = busy_in(place, &["streams", "1", us]);
        assert!((least..=34.0).contains(&found), "kernels of {us} us: {found} %");
    }
}

/// A program that ends each context with its kernel in it, which the driver waits for.
#[test]
#[ignore = "needs the built library"]
fn a_share_is_held_by_contexts_that_end_with_work_in_them() {
    for how in ["ending", "reset"] {
        let found = busy(&[how, "1", "20000"]);
        assert!((24.0..=34.0).contains(&found), "{how}: {found} %");
    }
}

/// Graphs of which none is launched twice, and more are queued than can be measured.
#[test]
#[ignore = "needs the built library"]
fn a_share_is_held_by_new_graphs() {
    let found = busy(&["graph", "2", "100000"]);
    assert!((24.0..=36.0).contains(&found), "{found} %");
}

/// Percent of the card that a program has which may use 30.
fn busy(words: &[&str]) -> f64 {
    busy_in(Place::new(), words)
}

fn busy_in(mut place: Place, words: &[&str]) -> f64 {
    place.set("CUDA_DEVICE_SM_LIMIT", "30");
    place.set("GPU_CORE_UTILIZATION_POLICY", "force");
    let text = run(place.command("shares").args(words)).quiet();
    pairs(&text)["busy"].parse().unwrap()
}

#[test]
#[ignore = "needs the built library"]
fn each_card_has_the_stamps_of_its_own_launches_and_is_paid_for_them() {
    let used = |share: Option<&str>, cards: &[&str]| {
        let mut place = Place::new().limited(64 * MIB);
        if let Some(share) = share {
            place.set("CUDA_DEVICE_SM_LIMIT", share);
            place.set("GPU_CORE_UTILIZATION_POLICY", "force");
        }
        assert_eq!(run(place.command("cards").args(cards)).quiet(), "");
        let hot = place.hot();
        [&hot.cards[0], &hot.cards[1]].map(|card| (card.first_launch > 0, card.spent_ns > 0))
    };
    for (cards, both) in [(&["0"][..], [true, false]), (&["1"], [false, true]), (&["1", "0", "1"], [true; 2])]
    {
        assert_eq!(used(None, cards), both.map(|used| (used, false)), "{cards:?} without a share");
        assert_eq!(used(Some("90"), cards), both.map(|used| (used, used)), "{cards:?} with a share");
    }
}
