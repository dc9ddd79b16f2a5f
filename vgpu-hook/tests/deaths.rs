//! Processes that die at any point.
#![cfg(test)]

mod common;
mod sessions;

use std::time::{Duration, Instant};

use sessions::{MIB, Place, Session};

/// Each point at which a process may die, one after the other: the others go on within a second, and nothing of the dead
/// one's charge is left.
#[test]
#[ignore = "needs the built library with fault points"]
fn whoever_dies_at_any_point_leaves_nothing() {
    const LIMIT: u64 = 128 * MIB;
    // Claiming a slot of a dead process; all families; refusals, in which the dead are reaped.
    const STEPS: [&str; 34] = [
        "init",
        "primary 0",
        "alloc a 4194304",
        "alloc p 1000",
        "alloc q 2000",
        "refuse 134217728",
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
        "array t 16 16",
        "array u 16 16",
        "destroy-array t",
        "destroy-array u",
        "module mm 5000000",
        "context c 0",
        "heap 41943040",
        "destroy-context c",
        "primary 0",
        "unload mm",
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
        let mut place = Place::new().contexts_of(4).limited(LIMIT);
        place.library = common::library_with_faults();
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
        survivor.done(&format!("alloc a {}", 124 * MIB));
        assert!(begun.elapsed() < Duration::from_secs(1), "point {point}: {:?}", begun.elapsed());
        assert_eq!(survivor.used(), LIMIT, "point {point}");
        survivor.done("free a");
        // What it only asked for stands in the way of nobody; it is shown until dead slots are looked for again.
        while survivor.used() != 4 * MIB {
            assert!(begun.elapsed() < Duration::from_millis(1500), "point {point}: {}", survivor.used());
            std::thread::sleep(Duration::from_millis(20));
        }
    }
    // A process dies while it reaps another: whoever comes next finishes that.
    let hot = place.hot();
    assert!(hot.high_water <= 4, "{hot:?}");
}
