//! What the limit refuses, and what it must not.
#![cfg(test)]

mod common;
mod sessions;

use common::{pairs, run_within};
use sessions::{MIB, OUT_OF_MEMORY, Place};

/// A context for which there is no room, and which the driver does not take back, is there.
#[test]
#[ignore = "needs the built library"]
fn a_refused_context_that_cannot_be_ended_stays_charged() {
    let place = Place::new().contexts_of(64).limited(32 * MIB);
    let mut session = place.session();
    session.done("init");
    session.done("fail cuDevicePrimaryCtxRelease_v2 999 1");
    assert_eq!(session.ask("primary 0"), [OUT_OF_MEMORY]);
    assert_eq!(place.card(&mut session, 0), (64 * MIB, 64 * MIB));
    session.done("primary 0");
    assert_eq!(place.card(&mut session, 0), (64 * MIB, 64 * MIB), "it is active");
    session.refused("alloc a 512");
    session.done("reset-primary 0");
    assert_eq!(place.card(&mut session, 0), (0, 0));
    session.end();

    let place = Place::new().contexts_of(64).limited(80 * MIB);
    let mut session = place.ready();
    for (what, end) in [("green", "cuGreenCtxDestroy"), ("context", "cuCtxDestroy_v2")] {
        session.done(&format!("fail {end} 999 1"));
        session.refused(&format!("{what} c 0"));
        let (charged, given) = place.card(&mut session, 0);
        assert_eq!(charged, given, "{what}");
    }
    session.end();
}

/// How often all that is left was refused, as memory of a kind, beside threads that take pieces.
fn refused_beside_pieces(place: &Place, arguments: &[&str]) -> u64 {
    let mut command = place.command("pieces");
    command.args(arguments);
    pairs(&run_within(&mut command, 120).quiet())["refused"].parse().unwrap()
}

/// While it is not known whether a piece needs another block, it asks for one: nothing is refused for that.
#[test]
#[ignore = "needs the built library"]
fn what_is_left_can_be_had_beside_threads_that_take_pieces() {
    for (kind, limit, rounds) in [
        ("plain", 64, 2000),
        ("async", 66, 1000),
        ("graph", 66, 500),
        ("array", 4, 500),
        ("context", 130, 50),
    ] {
        let place = Place::new().contexts_of(if kind == "context" { 64 } else { 0 }).limited(limit * MIB);
        let refused = refused_beside_pieces(&place, &[kind, &rounds.to_string()]);
        // One that was about to ask may do so in the moment that counts.
        assert!(refused <= 2, "{kind}: {refused} of {rounds}");
    }
}

/// Pieces ask for as much as a call did for which a request waited in vain; that one is over.
#[test]
#[ignore = "needs the built library"]
fn what_is_left_can_be_had_once_a_call_that_stayed_is_over() {
    let mut place = Place::new().limited(66 * MIB);
    place.set("FAKE_CUDA_SLOW", "cuMemAllocManaged:1:150000");
    place.set("FAKE_CUDA_LATE", "cuMemAlloc_v2:20000");
    let refused = refused_beside_pieces(&place, &["async", "60", "after"]);
    // A piece may be on its way when that is forgotten: until it is there, some are refused.
    assert!(refused <= 4, "{refused} of 60");
}

/// A process that is killed at the driver leaves what it had asked for in the total, for as long as the file lives.
#[test]
#[ignore = "needs the built library"]
fn what_is_left_can_be_had_after_a_process_died_at_the_driver() {
    let mut place = Place::new().limited(66 * MIB);
    let mut keeper = place.session();
    keeper.done("init");
    place.set("FAKE_CUDA_SLOW", "cuMemAlloc_v2:1:60000000");
    let mut victim = place.ready();
    victim.tell("alloc a 31457280");
    while place.hot().cards[0].total < 30 * MIB {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    victim.kill();
    place.set("FAKE_CUDA_SLOW", "none:1:1");
    let refused = refused_beside_pieces(&place, &["plain", "3000"]);
    assert!(refused <= 2, "{refused} of 3000");
    keeper.end();
}

/// What the driver refuses for its shape is refused so at a full limit, too.
#[test]
#[ignore = "needs the built library"]
fn an_array_that_there_cannot_be_is_not_a_want_of_memory() {
    let place = Place::new().limited(64 * MIB);
    let mut session = place.ready();
    session.done(&format!("alloc all {}", 64 * MIB));
    assert_eq!(session.ask("array-of a 16 16 0x77")[0], 1);
    session.refused("array-of b 16 16 0x20");
    session.agree("nothing came of it");
    session.end();
}

/// With no byte left, what the driver refuses anyway is refused as by the driver.
#[test]
#[ignore = "needs the built library"]
fn a_wrong_argument_is_one_at_a_full_limit_too() {
    const INVALID_VALUE: u64 = 1;
    let place = Place::new().limited(64 * MIB);
    let mut session = place.ready();
    for full in [false, true] {
        for step in ["alloc a 0", "managed a 0", "pitch a 1000 10 3", "pitch a 1000 10000 3"] {
            assert_eq!(session.ask(step)[0], INVALID_VALUE, "{step}, full: {full}");
        }
        if !full {
            session.done(&format!("alloc all {}", 64 * MIB));
        }
    }
    session.refused("alloc b 1");
    session.refused("pitch b 1000 10000 4");
    assert_eq!(session.agree("all of it"), 64 * MIB);
}

/// The most that was held is told, and not what was asked for besides or what a crash has left in the sum.
#[test]
#[ignore = "needs the built library"]
fn the_peak_is_of_what_was_held() {
    let place = Place::new().limited(256 * MIB);
    let mut session = place.ready();
    session.done(&format!("alloc a {}", 40 * MIB));
    // As after a process that was killed between its claim and the driver's answer.
    let total = mullion_region::extension::card_offset(0).unwrap() + mullion_region::extension::TOTAL_AT;
    sessions::write_at(&place.usage(), &(140 * MIB).to_le_bytes(), total);
    session.done(&format!("alloc b {}", 60 * MIB));
    assert_eq!(place.hot().cards[0].peak, 100 * MIB);
    session.refused(&format!("alloc c {}", 200 * MIB));
    session.done(&format!("alloc d {}", 2 * MIB));
    assert_eq!(place.hot().cards[0].peak, 102 * MIB);
}
