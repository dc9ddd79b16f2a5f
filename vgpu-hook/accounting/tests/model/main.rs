//! Every interleaving of a few processes that claim, free and crash, one operation on one shared word at a time. The
//! code that is stepped is the crate's own.

#![expect(clippy::expect_used, clippy::panic, clippy::unreachable, reason = "helpers of tests")]

mod machine;
mod search;

use machine::{Fault, LIMIT_OF_FAULTS};
use search::{Seen, Setting, Wrong, search};

/// Three processes, two of which fit.
const PLAIN: Setting = Setting {
    processes: 3,
    limit: LIMIT_OF_FAULTS,
    sizes: &[1],
    blocks: 1,
    crashes: 0,
    tries: 1,
    driver_fails: false,
    one_shot: false,
    forgets: true,
    fault: Fault::None,
};
/// One of them fits.
const TIGHT: Setting = Setting { sizes: &[2], ..PLAIN };

/// Never over, T never too low, nobody refused who is alone and fits, all exact when nothing goes on.
fn holds(name: &str, setting: &Setting) -> Seen {
    let start = std::time::Instant::now();
    match search(setting) {
        Ok(seen) => {
            println!("{name}: {} states in {:?}", seen.states, start.elapsed());
            seen
        }
        Err((wrong, trace)) => panic!("{name}: {wrong:?} after\n{}", trace.join("\n")),
    }
}

#[test]
fn three_processes_without_a_crash() {
    holds("2 of 3 fit", &PLAIN);
    holds("1 of 3 fits", &TIGHT);
    holds("the driver fails", &Setting { driver_fails: true, ..TIGHT });
    holds("two sizes", &Setting { processes: 2, sizes: &[1, 2], blocks: 2, tries: 2, ..PLAIN });
}

#[test]
fn three_processes_and_one_crash() {
    holds("2 of 3 fit", &Setting { crashes: 1, ..PLAIN });
    holds("1 of 3 fits", &Setting { crashes: 1, ..TIGHT });
}

#[test]
fn two_processes_and_three_crashes() {
    for (name, sizes) in [("both fit", &[1_u64][..]), ("one fits", &[2]), ("sizes differ", &[1, 2])] {
        holds(name, &Setting { processes: 2, crashes: 3, tries: 2, driver_fails: true, sizes, ..PLAIN });
    }
}

/// Where nothing crashed, T is exact, and then the first of several racers that adds to T has room: in no interleaving
/// does nobody win.
#[test]
fn of_those_who_race_for_the_last_room_one_wins() {
    holds("1 of 3 fits", &Setting { one_shot: true, ..TIGHT });
    holds("sizes differ", &Setting { one_shot: true, sizes: &[1, 2], ..PLAIN });
}

/// The search merges states whose pasts differ only in what the code does not look at. Where it does not, it sees the
/// same memories.
#[test]
fn what_is_forgotten_changes_nothing() {
    for setting in [
        Setting { processes: 2, crashes: 1, tries: 2, ..TIGHT },
        Setting { processes: 2, sizes: &[1, 2], ..PLAIN },
    ] {
        let short = holds("forgetting", &setting);
        let long = holds("remembering", &Setting { forgets: false, ..setting });
        assert_eq!(short.memories, long.memories);
        assert!(short.states < long.states);
    }
}

/// The checks can fail: each mistake is found, and as what it is.
#[test]
fn mistakes_are_found() {
    let two = Setting { processes: 2, crashes: 2, tries: 2, ..TIGHT };
    let three = Setting { crashes: 1, ..TIGHT };
    for (fault, setting, wants) in [
        (Fault::ClaimedAfterTotal, &two, &[Wrong::Over][..]),
        (Fault::TotalAfterSum, &two, &[Wrong::Over]),
        (Fault::ReapByClaimed, &two, &[Wrong::Over, Wrong::TotalTooLow]),
        (Fault::ReapKeepsSettled, &two, &[Wrong::Over, Wrong::TotalTooLow]),
        (Fault::ReapKeepsClaimed, &two, &[Wrong::FalseRefusal]),
        (Fault::TotalBeforeSettled, &two, &[Wrong::Over, Wrong::TotalTooLow]),
        (Fault::TotalNotAtomic, &three, &[Wrong::Over, Wrong::TotalTooLow]),
        (Fault::ClaimNotAtomic, &TIGHT, &[Wrong::Over, Wrong::TotalTooLow]),
        (Fault::MarkStays, &two, &[Wrong::Over]),
        (Fault::LockIsNone, &two, &[Wrong::Over, Wrong::TotalTooLow]),
    ] {
        let found = search(&Setting { fault, ..setting.clone() }).map(|seen| seen.states);
        match found {
            Err((wrong, trace)) => {
                println!("{fault:?}: {wrong:?} after {} steps", trace.len());
                assert!(
                    wants.contains(&wrong),
                    "{fault:?} was found as {wrong:?} after\n{}",
                    trace.join("\n")
                );
            }
            Ok(states) => panic!("{fault:?} was not found in {states} states"),
        }
    }
}
