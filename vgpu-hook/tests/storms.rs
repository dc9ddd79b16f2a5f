//! Threads of one process that take and give memory all at once: the books are right whenever all of them wait, and the
//! card never gives more than the limit.
#![cfg(test)]

mod common;
mod sessions;

use sessions::{MIB, Place};

const BLOCK: u64 = 2 * MIB;

/// What the process had when all threads waited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Quiet {
    given: u64,
    charged: u64,
    /// Arrays that share blocks, and what they need by the driver's word.
    arrays: u64,
    needed: u64,
}

/// What `programs/storm.c` said.
#[derive(Debug)]
struct Storm {
    points: Vec<Quiet>,
    last: Quiet,
    wrong: u64,
    /// How often the program itself found that the two were not the same.
    off: u64,
    refused: u64,
    peak: u64,
}

/// A storm that hangs ends; one on a slow machine takes ten times what it takes on an idle one, and more.
const PATIENCE_S: u64 = 300;

fn storm(place: &Place, what: &str, seed: u32, rounds: u32) -> Storm {
    let mut command = place.command("storm");
    command.arg(what).arg(seed.to_string()).arg(rounds.to_string());
    let text = common::run_within(&mut command, PATIENCE_S).quiet();
    let numbers = |line: &str| -> Option<Quiet> {
        let numbers: Vec<u64> = line.split(' ').skip(1).map(|n| n.parse().unwrap()).collect();
        let [given, charged, arrays, needed] = numbers.try_into().ok()?;
        Some(Quiet { given, charged, arrays, needed })
    };
    let points: Vec<Quiet> = text.lines().filter_map(numbers).collect();
    let told = common::pairs(&text);
    let number = |key: &str| told[key].parse().unwrap();
    Storm {
        last: *points.last().unwrap(),
        points,
        wrong: number("wrong"),
        off: number("off"),
        refused: number("refused"),
        peak: number("peak"),
    }
}

/// Blocks of small arrays are shared, and the driver tells nobody how: they are charged what they need by its word, in
/// whole blocks, or the blocks that were seen to go, whichever is more. So no block is missing, and what is charged too
/// much is less than one rounding.
#[test]
#[ignore = "needs the built library"]
fn arrays_of_all_shapes_among_all_else_are_never_charged_too_little() {
    const LIMIT: u64 = 128 * MIB;
    for seed in [1, 2, 3] {
        let place = Place::new().limited(LIMIT);
        let storm = storm(&place, "mix", seed, 20_000);
        for point in &storm.points {
            let Quiet { given, charged, arrays, needed } = *point;
            assert!(charged >= given, "seed {seed}: charged too little: {point:?} of {storm:#?}");
            // Two threads whose small allocations are the first in a block at the same time may both pay for it.
            let twice = 8 * BLOCK;
            let most = (needed.div_ceil(BLOCK) * BLOCK).min(arrays * BLOCK) + twice;
            assert!(charged <= given + most, "seed {seed}: charged too much: {point:?} of {storm:#?}");
        }
        assert_eq!((storm.last.given, storm.last.charged), (0, 0), "seed {seed}: {storm:#?}");
        assert_eq!(storm.wrong, 0, "seed {seed}: {storm:#?}");
        assert!(storm.refused > 0, "seed {seed}: the limit was never reached: {storm:#?}");
        // A small allocation for which no block fits any more is tried in the blocks that are there: one of each thread
        // may take a block for as long as it takes to give it back.
        assert!(storm.peak <= LIMIT + 8 * BLOCK, "seed {seed}: {storm:#?}");
    }
}

/// A look at the card beside a neighbour that works says little: then each array is charged a block at most.
#[test]
#[ignore = "needs the built library"]
fn arrays_beside_a_neighbour_are_charged_a_block_each_at_most() {
    for processes in ["own", "none"] {
        let mut place = Place::new().contexts_of(64).limited(512 * MIB);
        place.set("FAKE_NVML_PROCESSES", processes);
        let _neighbour = place.busy("neighbour.cache");
        let storm = storm(&place, "mix", 7, 20_000);
        // What the neighbour adds to the context's figure, or takes from it, stays with the context.
        let context = storm.points[0].charged;
        assert!(processes == "none" || context == 64 * MIB, "{context}");
        for Quiet { given, charged, arrays, .. } in &storm.points {
            let least = given - 64 * MIB + context;
            // By its own figure a process is charged what it has; until that is asked for, a block too much for an array.
            let most = if processes == "own" { arrays.min(&8) + 8 } else { arrays + 8 };
            let right = least..=least + most * BLOCK;
            assert!(right.contains(charged), "{processes}: {charged} of {right:?}: {storm:#?}");
        }
        let end = (storm.last.given, storm.last.charged, storm.wrong);
        assert_eq!(end, (64 * MIB, context, 0), "{processes}: {storm:#?}");
    }
}

/// Two threads load images while two others allocate: what an image took is told from what they took, and, where NVML
/// shows the process to itself, from what another container takes.
#[test]
#[ignore = "needs the built library"]
fn modules_loaded_at_once_are_charged_each_its_own() {
    for (processes, beside) in
        [("own", true), ("own", false), ("host", false), ("none", false), ("unsized", false)]
    {
        // By its first context the library finds the process in NVML's list, so that is not empty.
        let mut place = Place::new().contexts_of(64).limited(1024 * MIB);
        place.set("FAKE_NVML_PROCESSES", processes);
        let _neighbour = beside.then(|| place.busy("neighbour.cache"));
        let storm = storm(&place, "modules", 4, 2_000);
        for point in &storm.points {
            assert_eq!(point.charged, point.given, "{processes}, beside another: {beside}: {storm:#?}");
        }
        assert_eq!(
            (storm.last.given, storm.wrong),
            (64 * MIB, 0),
            "{processes}, beside another: {beside}: {storm:#?}"
        );
    }
}

/// Which of two images that are loaded at the same time took what cannot be seen; together they are charged what they
/// took, and so is the one that stays when the other goes, whichever it is.
#[test]
#[ignore = "needs the built library"]
fn of_two_modules_loaded_at_once_the_one_that_stays_is_charged_its_own() {
    for processes in ["own", "none"] {
        let mut place = Place::new().contexts_of(64).limited(1024 * MIB);
        place.set("FAKE_NVML_PROCESSES", processes);
        // Long enough for the two to overlap.
        place.set("FAKE_CUDA_LOAD_US", "300");
        let storm = storm(&place, "pairs", 6, 1_000);
        assert_eq!((storm.off, storm.wrong), (0, 0), "{processes}: {storm:#?}");
    }
}

#[test]
#[ignore = "needs the built library"]
fn contexts_and_their_limits_are_charged_in_full_among_threads_that_allocate() {
    for (processes, beside) in [("own", true), ("own", false), ("none", false)] {
        let mut place = Place::new().contexts_of(24).limited(2048 * MIB);
        place.set("FAKE_NVML_PROCESSES", processes);
        let _neighbour = beside.then(|| place.busy("neighbour.cache"));
        let storm = storm(&place, "contexts", 9, 10_000);
        for point in &storm.points {
            assert_eq!(point.charged, point.given, "{processes}, beside another: {beside}: {storm:#?}");
        }
        let end = (storm.last.given, storm.wrong);
        assert_eq!(end, (24 * MIB, 0), "{processes}, beside another: {beside}: {storm:#?}");
    }
}

/// A call that waits at the driver is not waited for without end, and what it does later is not taken for what an image
/// took.
#[test]
#[ignore = "needs the built library"]
fn a_free_that_waits_for_a_kernel_shifts_no_figure() {
    for processes in ["own", "none"] {
        let mut place = Place::new().contexts_of(64).limited(1024 * MIB);
        place.set("FAKE_NVML_PROCESSES", processes);
        let storm = storm(&place, "waiting", 8, 20);
        for point in &storm.points {
            assert_eq!(point.charged, point.given, "{processes}: {storm:#?}");
        }
        assert_eq!((storm.last.given, storm.wrong), (64 * MIB, 0), "{processes}: {storm:#?}");
    }
}

/// Two threads free one address at the same time, which the driver takes from one of them: it is taken off the books
/// once. In the second and third case another thread gets the addresses meanwhile.
#[test]
#[ignore = "needs the built library"]
fn an_address_freed_by_two_threads_is_taken_off_once() {
    for (what, rounds) in [("frees", 40_000), ("reused", 8_000), ("raced", 8_000)] {
        let place = Place::new().limited(512 * MIB);
        let storm = storm(&place, what, 5, rounds);
        assert_eq!((storm.last.given, storm.last.charged), (0, 0), "{what}: {storm:#?}");
        assert_eq!((storm.off, storm.wrong), (0, 0), "{what}: {storm:#?}");
    }
}

/// An image is loaded for longer than anybody waits for. What other threads' arrays took meanwhile is charged to them,
/// whether the image comes or fails, and stays so when the image is unloaded.
#[test]
#[ignore = "needs the built library"]
fn arrays_made_while_an_image_is_loaded_are_charged_when_it_fails_or_is_unloaded() {
    for processes in ["own", "none"] {
        let mut place = Place::new().contexts_of(64).limited(1024 * MIB);
        place.set("FAKE_NVML_PROCESSES", processes);
        place.set("FAKE_CUDA_LOAD_US", "20000");
        let storm = storm(&place, "overlaps", 3, 64);
        for Quiet { given, charged, arrays, needed } in &storm.points {
            // What an image took at the same moment as an array is charged to both.
            let most = needed.div_ceil(BLOCK).min(*arrays) * BLOCK;
            let right = *given..=given + most;
            assert!(right.contains(charged), "{processes}: {charged} of {right:?}: {storm:#?}");
        }
        assert_eq!((storm.last.given, storm.last.charged), (64 * MIB, 64 * MIB), "{processes}: {storm:#?}");
        assert_eq!((storm.wrong, storm.refused), (0, 0), "{processes}: {storm:#?}");
    }
}

/// Many mappings go in one call, and another thread maps something into the same range as soon as the driver has agreed: that
/// is none of those that go.
#[test]
#[ignore = "needs the built library"]
fn what_is_mapped_while_a_range_is_unmapped_stays_charged() {
    let place = Place::new().limited(64 * MIB);
    let storm = storm(&place, "maps", 4, 2_000);
    assert_eq!((storm.off, storm.wrong), (0, 0), "{storm:#?}");
    assert_eq!((storm.last.given, storm.last.charged), (0, 0), "{storm:#?}");
}

/// What lies in a context is off the books later than the driver has taken it back: another context's thread gets such an address
/// meanwhile. It is charged for its own, and when it has freed that, for nothing.
#[test]
#[ignore = "needs the built library"]
fn addresses_of_a_context_that_ends_are_entered_once_when_they_are_given_again() {
    let place = Place::new().limited(16 << 30);
    let storm = storm(&place, "ended", 2, 20);
    assert_eq!((storm.off, storm.wrong), (0, 0), "{storm:#?}");
    assert_eq!((storm.last.given, storm.last.charged), (0, 0), "{storm:#?}");
}

/// Two threads take the same away, and the one that finds it in the books comes second at the driver.
#[test]
#[ignore = "needs the built library"]
fn what_another_thread_takes_away_first_is_charged_no_longer() {
    for (seed, call) in [(1, "cuMemUnmap"), (2, "cuGreenCtxDestroy")] {
        let mut place = Place::new().limited(512 * MIB);
        place.set("FAKE_CUDA_SLOW", &format!("{call}:1:400000"));
        let storm = storm(&place, "doubled", seed, 1);
        assert_eq!((storm.off, storm.wrong), (0, 0), "{call}: {storm:#?}");
        assert_eq!((storm.last.given, storm.last.charged), (0, 0), "{call}: {storm:#?}");
    }
}
