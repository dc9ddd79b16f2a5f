//! Memory under a limit: what is charged is what the card gave, family by family, to the last byte.
//!
//! The truth is the fake driver's own count (`fake_cuda_given`), which the library cannot see.
#![cfg(test)]

mod common;
mod sessions;

use std::process::Stdio;

use sessions::{MIB, Place, Session};

/// A family of allocations: what makes one, what ends it, what else has to happen before the card has the memory back.
struct Family {
    name: &'static str,
    make: &'static [&'static str],
    end: &'static [&'static str],
    after: &'static [&'static str],
}

const FAMILIES: [Family; 12] = [
    Family { name: "plain", make: &["alloc {} 7340032"], end: &["free {}"], after: &[] },
    Family { name: "plain, odd size", make: &["alloc {} 3000001"], end: &["free {}"], after: &[] },
    Family { name: "plain, pieces", make: &["alloc {} 700000"], end: &["free {}"], after: &[] },
    Family { name: "plain, small pieces", make: &["alloc {} 65537"], end: &["free {}"], after: &[] },
    Family { name: "pitched", make: &["pitch {} 1000 5000"], end: &["free {}"], after: &[] },
    Family { name: "managed", make: &["managed {} 5242880"], end: &["free {}"], after: &[] },
    Family { name: "array", make: &["array {} 1000 2000"], end: &["destroy-array {}"], after: &[] },
    Family { name: "mipmap", make: &["mipmap {} 1024 1024"], end: &["destroy-mipmap {}"], after: &[] },
    Family { name: "stream-ordered", make: &["async {} 9000000"], end: &["free-async {}"], after: &["sync"] },
    Family {
        name: "stream-ordered, own stream",
        make: &["async-ptsz {} 9000000"],
        end: &["free-async {}"],
        after: &["sync"],
    },
    Family { name: "physical", make: &["create {} 6291456"], end: &["release {}"], after: &[] },
    Family { name: "module", make: &["module {} 5000000"], end: &["unload {}"], after: &[] },
];

fn named(step: &str, name: usize) -> String {
    step.replace("{}", &format!("n{name}"))
}

// HK-06
#[test]
#[ignore = "needs the built library"]
fn every_family_is_charged_what_the_card_gave_and_refused_at_the_edge() {
    const LIMIT: u64 = 192 * MIB;
    for Family { name, make, end, after } in FAMILIES {
        let place = Place::new().limited(LIMIT);
        let mut session = place.ready();
        assert_eq!(session.agree("the start"), 0, "{name}");
        let mut made = 0;
        let mut before = 0;
        let step = loop {
            let step = named(make[0], made);
            let answer = session.ask(&step);
            if answer[0] != 0 {
                assert_eq!(answer, [2, 0], "{name}");
                break session.agree(name) - before;
            }
            made += 1;
            before = session.agree(name);
            assert!(before <= LIMIT && made < 4000, "{name}");
        };
        assert_eq!(step, 0, "{name}: a refusal left something");
        // Whatever it is made of, one more would not fit: blocks of 2 MiB, chunks of 32 MiB.
        let unit = if name.starts_with("stream") { 32 * MIB } else { 8 * MIB };
        assert!(before + unit > LIMIT, "{name}: {before}");
        for index in 0..made {
            for step in end {
                session.done(&named(step, index));
            }
        }
        for step in after {
            session.done(step);
        }
        assert_eq!(session.agree(&format!("{name}, all ended")), 0, "{name}");
        let hot = place.hot().cards[0];
        assert!(hot.limit_hits >= 1 && hot.peak >= before && hot.card_full == 0, "{name}: {hot:?}");
        session.end();
    }
}

#[test]
#[ignore = "needs the built library"]
fn the_last_byte_is_given_and_not_one_more() {
    let place = Place::new().limited(64 * MIB);
    let mut session = place.ready();
    for (case, step) in
        [("plain", "alloc a 67108864"), ("managed", "managed a 67108864"), ("pitched", "pitch a 8192 8192")]
    {
        session.done(step);
        assert_eq!(session.agree(case), 64 * MIB, "{case}");
        session.refused("alloc b 1");
        session.done("free a");
        session.refused("alloc a 67108865");
    }
    session.done("create a 67108864 0");
    session.refused("create b 2097152 0");
    session.done("release a");
    session.refused("create a 69206016 0");
    assert_eq!(session.agree("the end"), 0);
}

#[test]
#[ignore = "needs the built library"]
fn small_allocations_share_blocks_to_the_end() {
    // Two blocks: 4,096 pieces of 1 KiB, and not one more, though the limit leaves no room for a third block.
    let place = Place::new().limited(4 * MIB);
    let mut session = place.ready();
    for index in 0..4000 {
        session.done(&format!("alloc p{index} 1024"));
    }
    assert_eq!(session.agree("4,000 pieces"), 4 * MIB);
    session.refused("alloc big 1048576");
    session.done("alloc last 65536");
    assert_eq!(session.agree("one more piece"), 4 * MIB);
    for index in (0..4000).rev() {
        session.done(&format!("free p{index}"));
    }
    session.agree("all but one freed");
    session.done("free last");
    assert_eq!(session.agree("all freed"), 0);
}

// HK-15
#[test]
#[ignore = "needs the built library"]
fn a_full_card_is_told_from_a_reached_limit() {
    let place = Place::new().limited(64 * MIB);
    let mut session = place.ready();
    session.done("fail cuMemAlloc_v2 2 1");
    assert_eq!(session.ask("alloc a 4194304"), [2, 0]);
    let card = place.hot().cards[0];
    assert_eq!((card.card_full, card.limit_hits), (1, 0));
    session.refused("alloc a 100000000");
    let card = place.hot().cards[0];
    assert_eq!((card.card_full, card.limit_hits), (1, 1));
    // Other errors are neither, and leave nothing charged.
    for step in ["alloc a 4194304", "create a 4194304 0", "managed a 4194304", "array a 1000 2000"] {
        for symbol in ["cuMemAlloc_v2", "cuMemCreate", "cuMemAllocManaged", "cuArray3DCreate_v2"] {
            session.done(&format!("fail {symbol} 999 2"));
        }
        assert_eq!(session.ask(step)[0], 999, "{step}");
        for symbol in ["cuMemAlloc_v2", "cuMemCreate", "cuMemAllocManaged", "cuArray3DCreate_v2"] {
            session.done(&format!("fail {symbol} 999 0"));
        }
    }
    let card = place.hot().cards[0];
    assert_eq!((card.card_full, card.limit_hits), (1, 1));
    assert_eq!(session.agree("errors"), 0);
}

#[test]
#[ignore = "needs the built library"]
fn frees_go_to_the_driver_and_are_counted_once() {
    let place = Place::new().limited(64 * MIB);
    let mut session = place.ready();
    let invalid = session.ask("free 0x1234")[0];
    assert_ne!(invalid, 0, "the driver's answer to an address that it does not know");
    session.done("free 0x0");
    session.done("alloc a 4194304");
    session.done("free a");
    assert_eq!(session.ask("free a")[0], invalid, "freed twice");
    assert_eq!(session.agree("freed twice"), 0);

    session.done("alloc a 4194304");
    session.done("free-elsewhere a");
    assert_eq!(session.agree("freed by a thread without a context"), 0);

    session.done("alloc a 4194304");
    session.done("context other 1");
    assert_eq!(session.used(), 0, "card 1 is empty");
    session.done("free a");
    session.done("destroy-context other");
    session.done("primary 0");
    assert_eq!(session.agree("freed in another card's context"), 0);

    session.done("alloc a 4194304");
    session.done("fail cuMemFree_v2 700 1");
    assert_eq!(session.ask("free a")[0], 700);
    assert_eq!(session.agree("the driver refused to free"), 4 * MIB);
    session.done("free a");
    assert_eq!(session.agree("the end"), 0);
    assert_eq!(session.ask("free-async 0x1234")[0], invalid);
}

// HK-08
#[test]
#[ignore = "needs the built library"]
fn without_a_context_the_driver_answers() {
    let place = Place::new().limited(64 * MIB);
    let mut session = place.session();
    assert_eq!(session.ask("alloc a 512")[0], 3, "before cuInit");
    session.done("init");
    for step in ["alloc a 100000000", "managed a 512", "pitch a 512 512", "array a 64 64", "info"] {
        assert_eq!(session.ask(step)[0], 201, "{step}");
    }
    session.done("primary 0");
    session.done("current 0");
    assert_eq!(session.ask("alloc a 512")[0], 201);
    session.done("primary 0");
    assert_eq!(session.ask("alloc-nowhere")[0], 1);
    assert_eq!(session.ask("alloc a 0")[0], 1);
    assert_eq!(session.agree("nothing"), 0);
}

// HK-07
#[test]
#[ignore = "needs the built library"]
fn the_card_looks_like_the_slice() {
    let place = Place::new().limited(64 * MIB);
    let mut session = place.ready();
    session.done("alloc a 16777216");
    assert_eq!(session.ask("info"), [0, 48 * MIB, 64 * MIB]);
    assert_eq!(session.ask("info-free"), [0, 48 * MIB]);
    assert_eq!(session.ask("info-total"), [0, 64 * MIB]);
    assert_eq!(session.ask("info-none"), [0]);
    assert_eq!(session.ask("total 0"), [0, 64 * MIB]);
    assert_eq!(session.ask("total 1"), [0, 64 * MIB]);
    assert_eq!(session.ask("total 7")[0], 101);

    // Another process of the container sees the same.
    let mut other = place.ready();
    assert_eq!(other.ask("info"), [0, 48 * MIB, 64 * MIB]);
    other.refused("alloc b 50331649");
    other.done("alloc b 50331648");
    assert_eq!(session.ask("info"), [0, 0, 64 * MIB]);
    other.end();

    // A limit beyond the card does not make the card larger.
    let place = Place::new().limited(1 << 40);
    let mut session = place.ready();
    let total = session.ask("info")[2];
    assert!(total < 100 << 30, "{total}");
    assert_eq!(session.ask("total 0"), [0, total]);
}

#[test]
#[ignore = "needs the built library"]
fn host_memory_is_never_limited_and_old_names_are_refused() {
    let place = Place::new().limited(4 * MIB);
    let mut session = place.ready();
    session.done("alloc a 4194304");
    session.done("host h 67108864");
    session.done("create c 67108864 0 2");
    session.done("sparse s 4096 4096");
    assert_eq!(session.ask("alloc-v1 old 512"), [801, 0]);
    assert_eq!(session.agree("host memory"), 4 * MIB);
}

#[test]
#[ignore = "needs the built library"]
fn physical_memory_is_charged_until_handles_and_mappings_are_gone() {
    let place = Place::new().limited(64 * MIB);
    let mut session = place.ready();
    session.done("reserve va 33554432");
    session.done("create h 4194304 0");
    session.done("map va h 0 4194304");
    assert_eq!(session.agree("mapped"), 4 * MIB);
    session.done("release h");
    assert_eq!(session.agree("released, still mapped"), 4 * MIB);
    session.done("retain again va 100");
    session.done("unmap va 4194304 0");
    assert_eq!(session.agree("retained by its address, unmapped"), 4 * MIB);
    session.done("release again");
    assert_eq!(session.agree("all released"), 0);

    // Several mappings go with one call, and each has its own handle.
    for part in 0..8 {
        session.done(&format!("create p{part} 2097152 0"));
        session.done(&format!("map va p{part} {} 2097152", part * 2 * MIB));
        session.done(&format!("release p{part}"));
    }
    assert_eq!(session.agree("eight parts"), 16 * MIB);
    assert_ne!(session.ask("unmap va 1 0")[0], 0);
    assert_eq!(session.agree("the driver refused to unmap"), 16 * MIB);
    session.done("unmap va 16777216 0");
    assert_eq!(session.agree("all unmapped"), 0);

    // The card is the one asked for, not the one of the context.
    session.done("create far 4194304 1");
    assert_eq!(session.agree("memory of card 1"), 0);
    assert_eq!(place.hot().cards[1].total, 4 * MIB);
    assert_ne!(session.ask("release 0x77")[0], 0);
    session.done("fail cuMemRelease 999 1");
    assert_eq!(session.ask("release far")[0], 999);
    assert_eq!(place.hot().cards[1].total, 4 * MIB);
    session.done("release far");
    assert_eq!(place.hot().cards[1].total, 0);
}

#[test]
#[ignore = "needs the built library"]
fn pools_are_charged_with_what_they_hold() {
    let place = Place::new().limited(256 * MIB);
    let mut session = place.ready();
    session.done("default-pool d");
    session.done("keep d 1000000000");
    session.done("async a 1000");
    let chunk = session.agree("a small piece");
    assert!(chunk >= 2 * MIB);
    session.done("free-async a");
    session.done("sync");
    assert_eq!(session.agree("kept by the threshold"), chunk);
    session.done("trim d 0");
    assert_eq!(session.agree("trimmed"), 0);

    // What a pool keeps unused does not stand in the way of others.
    session.done("async a 200000000");
    session.done("free-async a");
    session.done("sync");
    assert!(session.agree("kept") > 190 * MIB);
    session.done("alloc b 209715200");
    assert_eq!(session.agree("the pool gave way"), 200 * MIB);
    session.done("free b");

    session.done("pool p");
    session.done("from-pool x p 40000000");
    let held = session.agree("a pool of the program's");
    session.refused("from-pool y p 300000000");
    assert_eq!(session.agree("refused"), held);
    session.done("destroy-pool p");
    assert_eq!(session.agree("destroyed with an allocation left"), held);
    session.done("free-async x");
    session.done("sync");
    assert_eq!(session.agree("and that freed"), 0);

    session.done("pool h 2");
    session.done("from-pool x h 100000000");
    assert_eq!(session.agree("a pool in the host's memory"), 0);
    session.done("free-async x");
    session.done("destroy-pool h");

    session.done("async a 10000000");
    session.done("free a");
    session.done("sync");
    session.done("trim d 0");
    assert_eq!(session.agree("freed by cuMemFree"), 0);
}

/// What a destroyed pool holds goes with its last allocation: nobody can ask the pool any more, and no later call need come.
#[test]
#[ignore = "needs the built library"]
fn a_destroyed_pool_gives_up_what_it_holds_with_its_last_allocation() {
    let place = Place::new().limited(256 * MIB);
    let mut session = place.ready();
    for (case, last) in [
        ("cuMemFree, which waits", &["free x"][..]),
        ("cuMemFreeAsync, and its stream has come to it", &["free-async x", "sync-stream"]),
        ("cuMemFreeAsync, and all streams have", &["free-async x", "sync"]),
    ] {
        session.done("pool p");
        session.done("from-pool x p 40000000");
        session.done("from-pool y p 90000000");
        let held = session.agree(case);
        assert!(held >= 120 * MIB, "{case}: {held}");
        session.done("destroy-pool p");
        assert_eq!(session.agree(case), held, "{case}: destroyed with two allocations left");
        session.done("free y");
        assert_eq!(session.agree(case), held, "{case}: one left");
        for step in last {
            session.done(step);
        }
        assert_eq!(session.agree(case), 0, "{case}: none left");
        session.done("alloc all 268435456");
        session.done("free all");
    }
}

#[test]
#[ignore = "needs the built library"]
fn graphs_are_charged_when_they_run() {
    let place = Place::new().limited(64 * MIB);
    let mut session = place.ready();
    session.done("graph g 20000000");
    assert_eq!(session.agree("instantiated"), 0);
    session.done("launch g");
    session.done("sync");
    let held = session.agree("launched");
    assert!(held >= 20_000_000);
    session.done("launch g");
    assert_eq!(session.agree("launched again"), held);
    session.done("graph large 100000000");
    session.refused("launch large");
    assert_eq!(session.agree("refused"), 0, "the pool gave way before the refusal");
    session.done("launch g");
    session.done("sync");
    session.done("destroy-graph g");
    session.done("trim-graphs 0");
    assert_eq!(session.agree("trimmed"), 0);
}

#[test]
#[ignore = "needs the built library"]
fn contexts_are_charged_and_take_along_what_was_made_in_them() {
    let place = Place::new().contexts_of(100).limited(512 * MIB);
    let mut session = place.session();
    session.done("init");
    session.done("primary 0");
    assert_eq!(session.agree("the primary context"), 100 * MIB);
    session.done("retain-primary 0");
    assert_eq!(session.agree("retained twice"), 100 * MIB);
    session.done("alloc a 8388608");
    session.done("alloc p 1000");
    session.done("array r 2048 2048");
    session.done("module m 4000000");
    let full = session.agree("things in it");
    session.done("context c 0");
    assert_eq!(session.agree("a second context"), full + 100 * MIB);
    session.done("alloc b 4194304");
    session.done("heap 41943040");
    assert_eq!(session.agree("a larger heap"), full + 100 * MIB + 4 * MIB + 32 * MIB);
    session.done("destroy-context c");
    session.done("primary 0");
    assert_eq!(session.agree("the second context gone"), full);
    session.done("release-primary 0");
    session.done("release-primary 0");
    assert_eq!(session.agree("still retained"), full);
    session.done("reset-primary 0");
    assert_eq!(session.given(), 0);
    assert_eq!(place.hot().cards[0].total, 0);

    // No room for a context is no context.
    let place = Place::new().contexts_of(100).limited(150 * MIB);
    let mut session = place.ready();
    session.refused("context c 0");
    assert_eq!(session.agree("no room for another"), 100 * MIB);
    session.refused("heap 167772160");
    session.agree("no room for a heap");
    let mut second = place.session();
    second.done("init");
    assert_eq!(second.ask("primary 0"), [2]);
    assert_eq!(second.given(), 0);
}

/// Processes race for the last room: never over the limit, and one of them always wins.
#[test]
#[ignore = "needs the built library"]
fn racers_never_pass_the_limit_and_one_always_wins() {
    const LIMIT: u64 = 64 * MIB;
    // 100,000 rounds in all.
    for (processes, rounds) in [(2, 60_000), (3, 20_000), (4, 10_000), (8, 10_000)] {
        let place = Place::new().limited(LIMIT);
        let barrier = place.path("barrier");
        std::fs::write(&barrier, [0; 4096]).unwrap();
        let racers: Vec<_> = (0..processes)
            .map(|_| {
                let mut command = place.command("race");
                command.arg(&barrier).arg(processes.to_string()).arg(rounds.to_string());
                command.arg((LIMIT / 2 + 2 * MIB).to_string()).stdout(Stdio::piped()).spawn().unwrap()
            })
            .collect();
        let mut told = String::new();
        for racer in racers {
            let output = racer.wait_with_output().unwrap();
            assert!(output.status.success(), "{processes} processes: {:?}", output.status);
            told = String::from_utf8(output.stdout).unwrap();
        }
        let told = common::pairs(&told);
        let number = |key: &str| told[key].parse::<u64>().unwrap();
        assert_eq!((number("many"), number("wrong")), (0, 0), "{processes}: {told:?}");
        assert!(number("peak") <= LIMIT, "{processes}: {told:?}");
        assert_eq!(number("won"), rounds, "{processes} processes: a round without a winner");
        let card = place.hot().cards[0];
        assert_eq!(card.total, 0, "{processes}");
    }
}

/// A session that holds `mib`.
fn holder(place: &Place, mib: u64) -> Session {
    let mut session = place.ready();
    session.done(&format!("alloc a {}", mib * MIB));
    session
}

#[test]
#[ignore = "needs the built library"]
fn what_a_killed_process_held_is_free_at_once() {
    let place = Place::new().limited(64 * MIB);
    let mut survivor = place.ready();
    for round in 0..50 {
        let victim = holder(&place, 60);
        if round % 2 == 0 {
            survivor.refused("alloc a 8388608");
        }
        victim.kill();
        survivor.done("alloc a 62914560");
        survivor.done("free a");
    }
    assert_eq!(survivor.used(), 0);
    assert_eq!(place.hot().cards[0].total, 0, "no rest of 50 deaths");
    assert!(place.hot().high_water <= 3, "slots are used again");
}

/// The driver gives back what a dead process held only after a while. The limit is the container's books, which are free
/// at once; until then the card itself holds both.
#[test]
#[ignore = "needs the built library"]
fn memory_that_the_driver_gives_back_late_is_free_for_the_limit_at_once() {
    let mut place = Place::new().limited(64 * MIB);
    place.set("FAKE_CUDA_RELEASE_DELAY_MS", "1000");
    let mut survivor = place.ready();
    holder(&place, 60).kill();
    survivor.done("alloc a 62914560");
    assert_eq!(survivor.agree("the limit has room"), 60 * MIB);
    let on_card = |session: &mut Session| session.ask("given 0")[2];
    assert_eq!(on_card(&mut survivor), 120 * MIB, "the card holds the dead one's as well");
    let begun = std::time::Instant::now();
    while on_card(&mut survivor) != 60 * MIB {
        assert!(begun.elapsed().as_secs() < 20, "the driver never gave it back");
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
}

#[test]
#[ignore = "needs the built library"]
fn memory_of_others_is_charged_to_its_maker_alone() {
    let place = Place::new().limited(64 * MIB);
    let (mut maker, mut user) = (place.ready(), place.ready());
    maker.done("alloc a 33554432");
    let handle = maker.ask("export a");
    assert_eq!(handle[0], 0);
    let words: Vec<_> = handle[1..].iter().map(u64::to_string).collect();
    user.done(&format!("open b {}", words.join(" ")));
    assert_eq!(user.used(), 32 * MIB, "once");
    user.done("alloc c 33554432");
    user.refused("alloc d 2097152");
    user.done("close b");
    assert_eq!(user.used(), 64 * MIB);
    user.done("free c");

    user.done("create h 4194304 0");
    user.done("import i h");
    assert_eq!(user.used(), 36 * MIB, "once");
    user.done("release i");
    assert_eq!(user.used(), 36 * MIB, "an import's end is not the memory's");
    user.done("release h");
    assert_eq!(user.used(), 32 * MIB);
}

#[test]
#[ignore = "needs the built library"]
fn threads_of_a_process_leave_the_books_in_order() {
    let place = Place::new().limited(96 * MIB);
    let mut sessions: Vec<_> = (0..2).map(|_| place.ready()).collect();
    for _ in 0..3 {
        for session in &mut sessions {
            session.tell("hammer");
        }
        for session in &mut sessions {
            assert_eq!(session.hear(), Some(vec![0]));
        }
    }
    for session in &mut sessions {
        session.done("sync");
        session.done("default-pool d");
        session.done("trim d 0");
        assert_eq!(session.given(), 0);
    }
    let hot = place.hot().cards[0];
    assert_eq!(sessions[0].used(), 0, "{hot:?}");
    assert_eq!(hot.total, 0);
    assert!(hot.limit_hits > 0, "the limit was never reached");
    // Where no block fits any more, a small allocation is tried in the blocks that are there; if their room turns out to
    // be in holes too small, the driver takes a block for as long as it takes to give it back.
    let peak = sessions[0].ask("given 0")[3];
    assert!(peak <= 100 * MIB, "the card had given {peak}");
}

/// What a context takes is found by looking at the card, and others of the container work on it meanwhile.
#[test]
#[ignore = "needs the built library"]
fn contexts_made_while_others_work_are_charged_in_full() {
    let place = Place::new().contexts_of(64).limited(1024 * MIB);
    let mut first = place.ready();
    let mut busy: Vec<_> = (0..2).map(|_| place.ready()).collect();
    for session in &mut busy {
        session.tell("hammer");
    }
    let later: Vec<_> = (0..6).map(|_| place.ready()).collect();
    for session in &mut busy {
        assert_eq!(session.hear(), Some(vec![0]));
        session.done("sync");
    }
    let (used, on_card) = (first.used(), first.ask("given 0")[2]);
    assert_eq!(used, on_card, "charged {used}, given {on_card}");
    later.into_iter().for_each(Session::end);
}
