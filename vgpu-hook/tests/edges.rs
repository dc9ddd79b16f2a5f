//! Seldom taken ways on which memory could be given and not charged, or charged to another card.
#![cfg(test)]

mod common;
mod sessions;

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use common::{pairs, run_within};
use mullion_region::usage;
use sessions::{MIB, OUT_OF_MEMORY, Place, one_line, prepared, start};

#[test]
#[ignore = "needs the built library"]
fn a_pool_of_another_card_is_charged_there() {
    for pool in ["pool-of p 1", "pool p 1 1"] {
        let place = Place::new().limited(128 * MIB);
        let mut session = place.ready();
        session.done(pool);
        session.done("from-pool a p 40000000");
        let (charged, given) = place.card(&mut session, 1);
        assert!(charged == given && given >= 40_000_000, "{pool}: charged {charged}, given {given}");
        assert_eq!(session.agree("memory of card 1"), 0, "{pool}");
        session.refused("from-pool b p 100000000");
        session.done("free-async a");
        session.done("sync");
        session.done("trim p 0");
        assert_eq!(place.card(&mut session, 1), (0, 0), "{pool}");
        assert_eq!(session.agree("all of it freed"), 0, "{pool}");
    }
}

/// Where it is said neither by the pool nor by a context which card is meant, the first one is.
#[test]
#[ignore = "needs the built library"]
fn a_managed_pool_that_is_made_without_a_context_is_counted() {
    let place = Place::new().limited(64 * MIB);
    let mut session = place.session();
    session.done("init");
    session.done("pool p 2 0 2");
    session.done("primary 0");
    session.refused("from-pool a p 100000000");
    session.done("from-pool a p 40000000");
    session.end();
}

#[test]
#[ignore = "needs the built library"]
fn a_graphs_memory_is_charged_to_the_card_of_its_nodes() {
    let place = Place::new().limited(128 * MIB);
    let mut session = place.ready();
    session.done("graph large 200000000 1");
    session.done("graph g 40000000 1");
    assert_eq!(session.ask("launch large"), [OUT_OF_MEMORY]);
    assert_eq!(place.card(&mut session, 1), (0, 0));
    session.done("launch g");
    let (charged, given) = place.card(&mut session, 1);
    assert!(charged == given && given >= 40_000_000, "charged {charged}, given {given}");
    assert_eq!(session.agree("memory of card 1"), 0);
    session.done("sync");
    session.done("trim-graphs 1");
    assert_eq!(place.card(&mut session, 1), (0, 0));
}

#[test]
#[ignore = "needs the built library"]
fn a_graph_with_memory_on_two_cards_is_held_to_both_limits() {
    let mut place = Place::new();
    place.set("CUDA_DEVICE_MEMORY_LIMIT_0", "200m");
    place.set("CUDA_DEVICE_MEMORY_LIMIT_1", "50m");
    let mut session = place.ready();
    for (name, first, second) in [("g", 100, 90), ("h", 250, 40), ("i", 30, 90)] {
        session.done(&format!("graph-on-two {name} {} {}", first * MIB, second * MIB));
        assert_eq!(session.ask(&format!("launch {name}")), [OUT_OF_MEMORY], "{first} and {second} MiB");
        assert_eq!(place.card(&mut session, 0), (0, 0), "{first} and {second} MiB");
        assert_eq!(place.card(&mut session, 1), (0, 0), "{first} and {second} MiB");
    }
    session.done(&format!("graph-on-two fits {} {}", 100 * MIB, 40 * MIB));
    session.done("launch fits");
    assert_eq!(place.card(&mut session, 0), (100 * MIB, 100 * MIB));
    assert_eq!(place.card(&mut session, 1), (40 * MIB, 40 * MIB));
    session.refused(&format!("alloc a {}", 101 * MIB));
    session.done(&format!("alloc b {}", 99 * MIB));
    session.done("destroy-graph fits");
    // The driver gives the same handles again.
    session.done(&format!("graph other {} 1", 11 * MIB));
    assert_eq!(session.ask("launch other"), [OUT_OF_MEMORY]);
}

#[test]
#[ignore = "needs the built library"]
fn a_graphs_memory_is_found_however_deep_it_lies() {
    for depth in [0, 8, 9, 40] {
        let place = Place::new().limited(128 * MIB);
        let mut session = place.ready();
        session.done(&format!("graph-within large {} {depth}", 300 * MIB));
        assert_eq!(session.ask("launch large"), [OUT_OF_MEMORY], "{depth} deep");
        session.done(&format!("graph-within g {} {depth}", 40 * MIB));
        session.done("launch g");
        assert_eq!(place.card(&mut session, 0), (40 * MIB, 40 * MIB), "{depth} deep");
        assert_eq!(session.agree("after the launch"), 40 * MIB, "{depth} deep");
    }
}

#[test]
#[ignore = "needs the built library"]
fn a_graph_that_cannot_be_read_is_charged_after_its_launch() {
    let place = Place::new().limited(128 * MIB);
    let mut session = place.ready();
    session.done("fail cuGraphGetNodes 999 1");
    session.done(&format!("graph g {} 0", 300 * MIB));
    session.done("launch g");
    let (charged, given) = place.card(&mut session, 0);
    // What the graph frees at its end is not kept beyond the limit.
    assert_eq!(charged, given, "after the launch");
    assert!(given <= 128 * MIB, "given {given}");
    session.done("fail cuGraphGetNodes 999 1");
    session.done(&format!("graph-within kept {} 0", 300 * MIB));
    session.done("launch kept");
    assert_eq!(place.card(&mut session, 0), (300 * MIB, 300 * MIB));
    session.refused("alloc a 512");
    assert_eq!(session.ask("launch g"), [OUT_OF_MEMORY]);
}

#[test]
#[ignore = "needs the built library"]
fn a_context_with_users_left_stays_charged() {
    let place = Place::new().contexts_of(100).limited(512 * MIB);
    let mut session = place.ready();
    session.done("context c 0");
    session.done("attach");
    session.done("alloc a 8388608");
    session.done("detach c");
    assert_eq!(session.agree("one of two users gone"), 208 * MIB);
    session.done("detach c");
    assert_eq!(session.agree("both gone"), 100 * MIB);
}

#[test]
#[ignore = "needs the built library"]
fn the_primary_context_that_a_green_one_makes_is_charged() {
    let place = Place::new().contexts_of(100).limited(512 * MIB);
    let mut session = place.session();
    session.done("init");
    session.done("green g 0");
    let (charged, given) = place.card(&mut session, 0);
    assert!(charged == given && given >= 100 * MIB, "charged {charged}, given {given}");
    session.done("primary 0");
    session.agree("the primary context, by its own name");
    session.done("release-primary 0");
    assert_eq!(place.card(&mut session, 0), (given, given));
    session.done("destroy-green g");
    assert_eq!(place.card(&mut session, 0), (0, 0));

    let place = Place::new().contexts_of(100).limited(64 * MIB);
    let mut session = place.session();
    session.done("init");
    assert_eq!(session.ask("green g 0"), [OUT_OF_MEMORY, 0]);
    assert_eq!(place.card(&mut session, 0), (0, 0));
}

#[test]
#[ignore = "needs the built library"]
fn what_is_made_through_a_green_context_is_the_primary_ones() {
    for others in [0, 1] {
        let place = Place::new().contexts_of(64).limited(1024 * MIB);
        let mut session = place.ready();
        for other in 0..others {
            session.done(&format!("context c{other} 0"));
        }
        session.done("green g 0");
        session.done("current g");
        for step in ["heap 134217728", "alloc a 104857600", "array b 4096 4096", "module m 5000000"] {
            session.done(step);
            session.agree(&format!("{step}, beside {others} others"));
        }
        let used = session.used();
        session.done("destroy-green g");
        session.done("primary 0");
        let green = used - session.agree("the green one ended");
        assert!(green > 0 && green < 64 * MIB, "what was made in it stays: {green} of {used}");
        session.done("reset-primary 0");
        session.done("primary 0");
        assert_eq!(session.agree("the primary one ended"), (1 + others) * 64 * MIB);
        session.end();
    }
}

#[test]
#[ignore = "needs the built library"]
fn a_mapping_that_the_driver_refuses_leaves_the_one_at_its_address() {
    let place = Place::new().limited(64 * MIB);
    let mut session = place.ready();
    session.done("reserve va 33554432");
    session.done("create a 33554432 0");
    session.done("map va a 0 33554432");
    session.done("release a");
    session.done("create b 2097152 0");
    assert_ne!(session.ask("map va b 0 2097152")[0], 0);
    assert_eq!(session.agree("there is one already"), 34 * MIB);
    session.done("release b");
    assert_eq!(session.agree("the one that was not mapped released"), 32 * MIB);
    session.done("unmap va 33554432 0");
    assert_eq!(session.agree("all unmapped"), 0);
}

#[test]
#[ignore = "needs the built library"]
fn a_limit_on_the_size_of_files_ends_cu_init_and_not_the_program() {
    let place = Place::new().limited(64 * MIB);
    let small = || {
        let mut command = place.command("session");
        command.env_remove(fake_state::STATE_ENV).env("FAKE_CUDA_CARDS", "h100");
        prepared(&mut command, || {
            let limit = nix::libc::rlimit { rlim_cur: 100 << 10, rlim_max: 100 << 10 };
            // SAFETY: the kernel reads the limit.
            #[expect(unsafe_code, reason = "prepares the child")]
            match unsafe { nix::libc::setrlimit(nix::libc::RLIMIT_FSIZE, &raw const limit) } {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            }
        });
        start(command)
    };
    for case in ["a new file", "a file of others that are gone"] {
        let (result, said) = small();
        assert_eq!(result, 304, "{case}: {said}");
        one_line(&said, "UsageFileUnusable");
        assert!(
            said.contains("larger than `ulimit -f` allows (error 27): raise `ulimit -f`"),
            "{case}: {said}"
        );
        place.ready().end();
    }
    // Where others have made it, the first slots are within reach.
    let holder = place.ready();
    assert_eq!(small(), (0, String::new()));
    holder.end();
}

#[test]
#[ignore = "needs the built library"]
fn a_program_that_is_refused_may_try_for_ever() {
    let place = Place::new().limited(64 * MIB);
    let _first = place.ready();
    // Another library's process that lives has the second slot.
    let file = OpenOptions::new().write(true).open(place.usage()).unwrap();
    let slot = usage::slot_offset(1).unwrap() as u64;
    let status = slot + usage::SLOT_SIZE as u64 - 32;
    for (at, value) in [(slot, std::process::id()), (status, 1), (usage::PROC_NUM_AT as u64, 2)] {
        file.write_all_at(&value.to_le_bytes(), at).unwrap();
    }
    let mut session = place.session();
    assert_ne!(session.ask("init")[0], 0);
    let before = session.ask("files");
    for _ in 0..20 {
        assert_ne!(session.ask("init")[0], 0);
    }
    let after = session.ask("files");
    // The program's own standard I/O may have mapped something.
    assert!(after[1] == before[1] && after[2] <= before[2] + 1, "files and mappings: {before:?} {after:?}");
    assert_eq!((place.hot().foreign, place.hot().refused), (21, 21));
}

#[test]
#[ignore = "needs the built library"]
fn a_link_at_the_usage_files_name_is_not_followed() {
    let place = Place::new().limited(64 * MIB);
    std::fs::write(place.path("somebodys"), "").unwrap();
    std::os::unix::fs::symlink(place.path("somebodys"), place.usage()).unwrap();
    assert_ne!(place.session().ask("init")[0], 0);
    assert_eq!(std::fs::metadata(place.path("somebodys")).unwrap().len(), 0);
}

#[test]
#[ignore = "needs the built library"]
fn what_lies_behind_an_imported_mapping_is_unmapped_with_it() {
    let place = Place::new().limited(128 * MIB);
    let mut session = place.ready();
    session.done("create theirs 2097152");
    session.done("import i theirs");
    session.done("create ours 4194304");
    session.done("reserve va 8388608");
    session.done("map va i 0 2097152");
    session.done("map va ours 2097152 4194304");
    session.done("release ours");
    assert_eq!(session.agree("mapped"), 6 * MIB);
    session.done("unmap va 6291456 0");
    assert_eq!(session.agree("unmapped, and theirs left"), 2 * MIB);
}

#[test]
#[ignore = "needs the built library"]
fn the_size_of_a_range_to_unmap_costs_no_time() {
    let place = Place::new().limited(64 * MIB);
    let mut session = place.ready();
    session.done("create a 4194304");
    session.done("reserve va 33554432");
    session.done("map va a 8388608 4194304");
    session.done("release a");
    let start = Instant::now();
    assert_ne!(session.ask("unmap va 0x800000000000 0")[0], 0);
    assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
    assert_eq!(session.agree("refused"), 4 * MIB);
    session.done("unmap va 4194304 8388608");
    assert_eq!(session.agree("unmapped"), 0);
}

#[test]
#[ignore = "needs the built library"]
fn many_mappings_behind_a_large_one_that_is_not_counted_are_unmapped_with_it() {
    let place = Place::new().limited(512 * MIB);
    let mut session = place.ready();
    session.done("create theirs 16777216");
    session.done("import i theirs");
    session.done("reserve va 1073741824");
    session.done("map va i 0 16777216");
    for piece in 0..70 {
        session.done(&format!("create p{piece} 2097152"));
        session.done(&format!("map va p{piece} {} 2097152", 16 * MIB + piece * 2 * MIB));
        session.done(&format!("release p{piece}"));
    }
    // Behind the range.
    session.done("create behind 2097152");
    session.done(&format!("map va behind {} 2097152", 156 * MIB));
    session.done("release behind");
    assert_ne!(session.ask(&format!("unmap va {} 0", 155 * MIB))[0], 0);
    assert_eq!(session.agree("a part of a mapping is refused"), 158 * MIB);
    session.done(&format!("unmap va {} 0", 156 * MIB));
    assert_eq!(session.agree("theirs and what is behind left"), 18 * MIB);
    session.done(&format!("unmap va 2097152 {}", 156 * MIB));
    assert_eq!(session.agree("theirs left"), 16 * MIB);
}

/// What is retained by its address while another thread unmaps it is there until it is released.
#[test]
#[ignore = "needs the built library"]
fn memory_that_is_retained_while_it_is_unmapped_stays_charged() {
    let place = Place::new().limited(8192 * MIB);
    let text = run_within(&mut place.command("retain"), 60).quiet();
    let told = pairs(&text);
    assert!(told["charged"] == told["given"] && told["retained"] != "0", "{told:?}");
}

/// A stream of one's own says on which card it is, and libraries belong to no context.
#[test]
#[ignore = "needs the built library"]
fn without_a_context_a_stream_or_a_library_takes_no_more_than_there_is() {
    let place = Place::new().limited(128 * MIB);
    let mut session = place.ready();
    session.done("stream s");
    session.done("default-pool p");
    session.done("current");
    session.done("async-in a s 40000000");
    session.refused("async-in b s 120000000");
    session.refused("from-pool-in b p s 120000000");
    session.done("library l 20971520");
    session.refused("library m 83886080");
    session.done("primary 0");
    assert_eq!(session.agree("a pool and a library"), (64 + 20) * MIB);
    session.done("unload-library l");
    assert_eq!(session.agree("the library's end"), 64 * MIB);
}

/// A pool that was destroyed is none, also while what came out of it is left.
#[test]
#[ignore = "needs the built library"]
fn a_destroyed_pool_that_is_named_again_is_charged_once() {
    let place = Place::new().limited(128 * MIB);
    let mut session = place.ready();
    session.done("pool p 1 0");
    session.done("from-pool a p 20000000");
    session.done("destroy-pool p");
    assert_eq!(session.ask("from-pool b p 1000000")[0], 1);
    assert_eq!(session.agree("a pool that is none"), 32 * MIB);
    session.done("free-async a");
    session.done("sync");
    assert_eq!(session.agree("the last of it"), 0);
}

/// Of a pool that was destroyed all is left as long as one allocation is, also one that the driver has refused to free.
#[test]
#[ignore = "needs the built library"]
fn an_allocation_that_stays_keeps_its_destroyed_pool() {
    let place = Place::new().limited(256 * MIB);
    let mut session = place.ready();
    session.done("pool p");
    session.done("from-pool x p 40000000");
    session.done("from-pool y p 90000000");
    session.done("destroy-pool p");
    let held = session.agree("destroyed with two allocations left");
    session.done("fail cuMemFree_v2 999 1");
    assert_eq!(session.ask("free y"), [999]);
    session.done("free x");
    assert_eq!(session.agree("the one that was refused is left"), held);
    session.done("free y");
    assert_eq!(session.agree("none left"), 0);
    session.end();
}

// An image that does not ask for the driver's `utility` part.
#[test]
#[ignore = "needs the built library"]
fn without_nvml_the_first_context_is_charged_as_a_second_one_would_be() {
    let place = Place::new().contexts_of(64).limited(1024 * MIB);
    std::fs::remove_file(place.path("libnvidia-ml.so.1")).unwrap();
    let mut session = place.ready();
    assert_eq!(session.agree("the first context of the container"), 64 * MIB);
    session.done("context c 0");
    assert_eq!(session.agree("the second one"), 128 * MIB);
    session.done("destroy-context c");
    assert_eq!(session.agree("its end"), 64 * MIB);
    let mut another = place.ready();
    assert_eq!(another.used(), 128 * MIB, "that of another process");
    another.end();
    session.end();
}

/// Small images share blocks: which of them seems to take one, and which gives it back, is another one each time.
#[test]
#[ignore = "needs the built library"]
fn small_images_are_charged_by_the_blocks_that_they_have_together() {
    let place = Place::new().contexts_of(64).limited(512 * MIB);
    let mut session = place.ready();
    let mut names: Vec<String> = Vec::new();
    let mut random = 1_u64;
    for round in 0..300 {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let pick = usize::try_from(random >> 33).unwrap();
        if names.len() < 24 || pick % 3 == 0 {
            let name = format!("m{round}");
            session.done(&format!("module {name} {}", 4_000 + pick % 600_000));
            names.push(name);
        } else {
            let name = names.swap_remove(pick % names.len());
            session.done(&format!("unload {name}"));
        }
        session.agree(&format!("round {round}"));
    }
    for name in names {
        session.done(&format!("unload {name}"));
    }
    assert_eq!(session.agree("all of them unloaded"), 64 * MIB);
    session.end();
}

/// Without a context nothing of an image is in use, though there is nobody to say so.
#[test]
#[ignore = "needs the built library"]
fn the_last_context_leaves_nothing_of_its_images_to_a_library() {
    let place = Place::new().limited(512 * MIB);
    std::fs::remove_file(place.path("libnvidia-ml.so.1")).unwrap();
    let mut session = place.ready();
    session.done("library l 1000000");
    let library = session.agree("a library");
    session.done("module m 4000000");
    session.done("reset-primary 0");
    assert_eq!(place.hot().cards[0].total, library);
    session.end();
}

/// The blocks of images that are unloaded may have images of another context, or libraries, in them.
#[test]
#[ignore = "needs the built library"]
fn what_images_leave_behind_is_charged_to_those_that_stay() {
    let place = Place::new().limited(512 * MIB);
    let mut session = place.ready();
    session.done("context c 0");
    for (other, load, unload) in
        [("library", "library l", "unload-library l"), ("module", "module o", "unload o")]
    {
        for image in 0..20 {
            session.done(&format!("module m{image} 1000000"));
            if other == "module" {
                session.done("current c");
            }
            session.done(&format!("{load}{image} 900000"));
            session.done("primary 0");
        }
        session.agree(&format!("{other}: all loaded"));
        for image in 0..20 {
            session.done(&format!("unload m{image}"));
        }
        assert!(session.agree(&format!("{other}: half of them unloaded")) >= 20 * MIB);
        for image in 0..20 {
            session.done(&format!("{unload}{image}"));
            session.agree(&format!("{other}: {image} unloaded"));
        }
        assert_eq!(session.used(), 0, "{other}");
    }
    session.end();
}

/// The same of images that go with their context.
#[test]
#[ignore = "needs the built library"]
fn what_the_images_of_a_context_leave_behind_is_charged_to_those_that_stay() {
    for (ends, stays) in [("destroy-context c", "primary 0"), ("reset-primary 0", "current c")] {
        let place = Place::new().contexts_of(64).limited(512 * MIB);
        let mut session = place.ready();
        session.done("context c 0");
        for image in 0..20 {
            session.done("current c");
            session.done(&format!("module m{image} 1000000"));
            session.done("primary 0");
            session.done(&format!("module o{image} 900000"));
        }
        // Of one image there is more than others may lie in.
        session.done("current c");
        session.done("module large 100000000");
        session.done("primary 0");
        session.done("module large 100000000");
        session.agree("all loaded");
        session.done(stays);
        session.done(ends);
        assert!(session.agree(ends) >= (64 + 100 + 20) * MIB, "{ends}");
        session.end();
    }
}

/// The driver names their sizes filled up to 64 KiB.
#[test]
#[ignore = "needs the built library"]
fn arrays_that_are_tiny_are_charged_the_blocks_that_they_fill() {
    let place = Place::new().limited(4 * MIB);
    let mut session = place.ready();
    for array in 0..1500 {
        session.done(&format!("array a{array} 16 16"));
    }
    assert_eq!(session.agree("a kilobyte each"), 2 * MIB);
    while session.ask("array more 16 16")[0] == 0 {
        session.agree("as many as there is room for");
    }
    session.refused("array more 16 16");
    for array in 0..1500 {
        session.done(&format!("destroy-array a{array}"));
    }
    assert!(session.agree("most of them gone") <= 4 * MIB);
    session.end();
}

/// The driver says of neither how much it took: what only this process can have taken counts whole.
#[test]
#[ignore = "needs the built library"]
fn a_stack_or_an_image_is_charged_however_large_it_is() {
    for (lists, is_own) in [("own", true), ("none", false)] {
        let mut place = Place::new().contexts_of(64).limited(8192 * MIB);
        place.set("FAKE_NVML_PROCESSES", lists);
        let mut session = place.ready();
        for stack in ["8192", "16384", "4096", "1024"] {
            session.done(&format!("stack {stack}"));
            session.agree(&format!("a stack of {stack}, NVML lists {lists}"));
        }
        session.refused("stack 65536");
        assert_eq!(session.agree("a stack that is larger than the limit"), 64 * MIB);
        if is_own {
            session.done("module large 6442450944");
            assert_eq!(session.agree("a large image"), (64 + 6144) * MIB);
            session.refused("module another 6442450944");
            session.agree("one more");
            session.done("unload large");
            assert_eq!(session.agree("its end"), 64 * MIB);
        }
        session.end();
    }
}
