//! NVML's lists of processes in their newest form, over the fake NVML: as the older forms, of which `slices` has the tests.
#![cfg(test)]

mod common;
mod sessions;

use common::{pairs, run};
use sessions::{MIB, Place};

// HK-07
#[test]
#[ignore = "needs the built library"]
fn the_detailed_list_shows_the_containers_processes_with_what_they_are_charged() {
    let place = Place::new().limited(64 * MIB);
    // A neighbour on the same card, in no container of ours.
    let mut neighbour = place.command("session");
    neighbour.env_remove("LD_PRELOAD");
    let mut neighbour = sessions::Session::start(neighbour);
    let mut session = place.ready();
    for (session, allocation) in [(&mut neighbour, 128 * MIB), (&mut session, 4 * MIB)] {
        session.done("init");
        session.done("primary 0");
        session.done(&format!("alloc a {allocation}"));
    }
    let text = run(&mut place.command("nvml")).quiet();
    let told = pairs(&text);
    for (key, want) in [
        // NVML's own answers: a size that does not suffice, another version, no list.
        ("details-ask", 7),
        ("details-count", 1),
        ("details", 0),
        ("details-graphics", 0),
        ("details-graphics-count", 0),
        ("details-version", 25),
        ("details-none", 2),
    ] {
        assert_eq!(told.get(key), Some(&want.to_string().as_str()), "{key}: {text}");
    }
    let process = format!("detail-{}", session.child.id());
    assert_eq!(told.get(process.as_str()), Some(&(4 * MIB).to_string().as_str()), "{text}");

    // Without the library both are listed.
    let text = run(place.command("nvml").env_remove("LD_PRELOAD")).quiet();
    assert!(text.contains("details-count 2\n"), "{text}");
}
