//! While one thread is at the driver for long, the others go on; and what it has by then is charged whatever becomes of it.
#![cfg(test)]

mod common;
mod sessions;

use std::collections::BTreeMap;

use sessions::{MIB, Place, Session};

/// The longest call of the program's other thread, in ms.
fn longest(place: &Place, what: &str) -> u64 {
    let output = place.command("stall").arg(what).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    let longest = text.trim().strip_prefix("longest ").and_then(|ms| ms.parse().ok());
    longest.unwrap_or_else(|| panic!("{what}: {text} {errors}"))
}

/// An image that is compiled while it is loaded: nobody waits for its end, and of many calls one waits at all. Before,
/// each call waited for three seconds.
#[test]
#[ignore = "needs the built library"]
fn arrays_do_not_wait_for_an_image_that_takes_long() {
    let mut place = Place::new().contexts_of(64).limited(4096 * MIB);
    place.set("FAKE_CUDA_LOAD_US", "30000000");
    let longest = longest(&place, "load");
    // The change of a limit waits for the image for two seconds, arrays for a moment; thirty would be its end.
    assert!(longest < 10_000, "{longest} ms");
}

/// A thread waits for room in a queue with a pool in its hand, while another one loads an image.
#[test]
#[ignore = "needs the built library"]
fn allocations_do_not_wait_for_a_pool_that_is_held() {
    let mut place = Place::new().contexts_of(64).limited(4096 * MIB);
    place.set("FAKE_CUDA_SLOW", "cuMemAllocAsync:2:30000000");
    place.set("FAKE_CUDA_LOAD_US", "1000");
    let longest = longest(&place, "pool");
    assert!(longest < 10_000, "{longest} ms");
}

/// What a thread waits for with a pool in its hand may be one that synchronises, or that frees something else.
#[test]
#[ignore = "needs the built library"]
fn nobody_waits_for_a_pool_to_look_at_it() {
    for (what, slow) in [("sync", "cuMemAllocAsync:2:30000000"), ("graph", "cuGraphLaunch:1:30000000")] {
        let mut place = Place::new().limited(4096 * MIB);
        place.set("FAKE_CUDA_SLOW", slow);
        let longest = longest(&place, what);
        assert!(longest < 10_000, "{what}: {longest} ms");
    }
}

/// The loader's lock is held by a thread whose library makes a context as it starts, while another one makes the first
/// context.
#[test]
#[ignore = "needs the built library"]
fn a_library_may_make_a_context_as_it_is_loaded() {
    let place = Place::new().contexts_of(64).limited(4096 * MIB);
    let library = place.path("starts.so");
    let cuda = place.path("libcuda.so.1");
    let source = common::program("stall.c");
    common::compile("cc", &[&source, &cuda], &library, &["-shared", "-fPIC", "-DLIBRARY"]);
    let mut command = place.command("stall");
    command.arg("open").arg(&library);
    assert_eq!(common::run(&mut command).quiet(), "done\n");
}

/// A process is killed while it waits at the driver for a kernel to end, so that its memory can be freed: all of it is
/// free for the others, and nobody has seen more in use than there was.
#[test]
#[ignore = "needs the built library"]
fn what_a_process_was_freeing_goes_with_it() {
    let place = Place::new().limited(64 * MIB);
    let mut session = place.ready();
    session.done("alloc a 2097152");
    for round in 0..4 {
        let mut command = place.command("stall");
        command.arg("free");
        let mut victim = Session::start(command);
        assert_eq!(victim.hear(), Some(vec![0]), "round {round}: it is at the driver");
        let slot = place.slot(1);
        // The kernel's image takes a block.
        assert_eq!((slot.claimed, slot.settled), (34 * MIB, 34 * MIB), "round {round}: it still has it");
        victim.child.kill().unwrap();
        assert_eq!(victim.hear(), None, "round {round}: the driver has answered before it was killed");
        victim.child.wait().unwrap();
        session.done("alloc b 65011712");
        session.done("free b");
        let card = place.hot().cards[0];
        assert_eq!((card.total, session.used()), (2 * MIB, 2 * MIB), "round {round}");
        assert!(card.peak <= 64 * MIB, "round {round}: {}", card.peak);
    }
    session.end();
}

/// What `programs/stall.c` says.
fn told(place: &Place, arguments: &[&str]) -> BTreeMap<String, u64> {
    let text = common::run(place.command("stall").args(arguments)).quiet();
    common::pairs(&text).into_iter().map(|(key, value)| (key.to_owned(), value.parse().unwrap())).collect()
}

/// A thread frees memory that a kernel uses, and waits for the kernel. Each small array was charged a block then, on all cards.
#[test]
#[ignore = "needs the built library"]
fn arrays_beside_a_free_that_waits_are_charged_what_they_take() {
    for card in ["0", "1"] {
        for bytes in ["8388608", "2097152", "4096"] {
            let place = Place::new().limited(512 * MIB);
            let told = told(&place, &["arrays", card, bytes]);
            let case = format!("card {card}, {bytes} bytes freed");
            // One answer may be wrong by what is freed, so one is not believed.
            let most = if card == "0" { 2 * MIB } else { 0 };
            let right = |given: u64| given..=given + most;
            assert!(right(told["given"]).contains(&told["charged"]), "{case}: {}", told["charged"]);
            let left = right(told["given-in-the-end"]);
            assert!(left.contains(&told["left"]), "{case}: {} of {left:?}", told["left"]);
            // A look waits for the free for a tenth of a second, and another one knows that it is in vain.
            assert!(told["longest"] < 1_000, "{case}: {} ms", told["longest"]);
        }
    }
}

/// What goes back between two looks at the card can hide what an array takes, or look like what one gives back.
#[test]
#[ignore = "needs the built library"]
fn what_is_freed_beside_an_array_is_not_taken_for_its_doing() {
    // The driver is asked what an array needs by another one. The first answer beside a free is not believed, a later one is.
    for (end, first, slow) in [
        ("0", "1", "cuArray3DCreate_v2:14"),
        ("0", "0", "cuArray3DCreate_v2:16"),
        ("1", "1", "cuArrayDestroy:9"),
        ("1", "0", "cuArrayDestroy:10"),
    ] {
        let mut place = Place::new().limited(512 * MIB);
        place.set("FAKE_CUDA_SLOW", &format!("{slow}:1300000"));
        place.set("FAKE_CUDA_LATE", "cuMemFree_v2:1500000");
        let told = told(&place, &["ends", end, first]);
        assert_eq!(told["charged"], told["given"], "{slow}");
    }
}

/// Beside a free that waits one array goes and one comes: of the two one answer is not believed, and it is charged for.
#[test]
#[ignore = "needs the built library"]
fn an_answer_that_is_not_believed_is_charged_for() {
    let mut place = Place::new().limited(512 * MIB);
    place.set("FAKE_CUDA_SLOW", "cuMemFree_v2:1:1900000");
    place.set("FAKE_CUDA_LATE", "cuArray3DCreate_v2:1000000,cuMemFree_v2:4000000");
    let told = told(&place, &["credit"]);
    assert!(told["charged"] >= told["given"], "{told:?}");
}

/// An array's end that waits at the driver holds up no other array.
#[test]
#[ignore = "needs the built library"]
fn arrays_do_not_wait_for_the_end_of_one() {
    let mut place = Place::new().limited(512 * MIB);
    place.set("FAKE_CUDA_SLOW", "cuArrayDestroy:2:6000000");
    let told = told(&place, &["ended"]);
    assert!(told["longest"] < 3_000, "{} ms", told["longest"]);
    // It may have given a block back when another one took it.
    assert!((told["given"]..=told["given"] + 2 * MIB).contains(&told["charged"]), "{}", told["charged"]);
}

/// What there is no room for is taken back: others work on meanwhile, and it is charged until it is gone.
#[test]
#[ignore = "needs the built library"]
fn nobody_waits_while_what_was_refused_is_taken_back() {
    for (what, slow, given) in [("heap", "cuCtxSetLimit:2", 248), ("image", "cuModuleUnload:1", 256)] {
        let mut place = Place::new().limited(128 * MIB);
        place.set("FAKE_CUDA_SLOW", &format!("{slow}:6000000"));
        let told = told(&place, &["refused", what]);
        assert!(told["longest"] < 3_000, "{what}: {} ms", told["longest"]);
        assert_eq!((told["left"], told["given"]), (0, given * MIB), "{what}");
    }
}

/// A limit of a context that was refused, and that the driver does not set back, is as it was set.
#[test]
#[ignore = "needs the built library"]
fn a_refused_limit_of_a_context_that_cannot_be_set_back_stays_charged() {
    let mut place = Place::new().contexts_of(64).limited(256 * MIB);
    place.set("FAKE_CUDA_LATE", "cuCtxSetLimit:1500000");
    let told = told(&place, &["kept"]);
    // No more than the limit is told as used.
    assert_eq!((told["charged"], told["given"]), (256 * MIB, 384 * MIB));
    assert_eq!((told["left"], told["given-in-the-end"]), (192 * MIB, 192 * MIB));
}

/// A context is made while an image is loaded for long, or the other way round; each of them may be over first. The context is
/// charged in advance.
#[test]
#[ignore = "needs the built library"]
fn a_context_and_an_image_at_once_are_charged_what_both_take() {
    // µs before and after the image's memory is given, and before the context is made.
    for (first, load, make) in [
        ("image", "1700000", "3000000"),
        ("image", "2500000", "0"),
        ("context", "1500000", "3700000"),
        ("context", "500000", "4500000"),
    ] {
        let mut place = Place::new().contexts_of(64).limited(512 * MIB);
        place.set("FAKE_CUDA_LOAD_US", load);
        place.set("FAKE_CUDA_SLOW", &format!("cuCtxCreate_v2:1:{make}"));
        let told = told(&place, &["both", first]);
        assert_eq!((told["charged"], told["given"]), (228 * MIB, 228 * MIB), "{first} first: {load}, {make}");
    }
}

/// An image's loading is over while a context with images ends, and is measured before that end is. Of what it took nothing was hidden
/// by what went with the context.
#[test]
#[ignore = "needs the built library"]
fn an_image_is_charged_though_a_context_ends_meanwhile() {
    let mut place = Place::new().contexts_of(64).limited(1024 * MIB);
    // Loading takes a little longer than the end of a context waits for it.
    place.set("FAKE_CUDA_LATE", "cuModuleLoadDataEx:2060000");
    place.set("FAKE_CUDA_SLOW", "cuCtxDestroy_v2:1:60000");
    let told = told(&place, &["departure"]);
    assert_eq!(told["charged"], told["given"]);
}

/// Of an image that was refused the block stays that another one has got into.
#[test]
#[ignore = "needs the built library"]
fn what_shares_a_block_with_a_refused_image_is_charged_with_it() {
    let mut place = Place::new().limited(64 * MIB);
    // Longer than the other one's measurement waits.
    place.set("FAKE_CUDA_SLOW", "cuModuleUnload:1:4500000");
    let told = told(&place, &["shares", "67108864"]);
    assert_eq!((told["charged"], told["given"], told["left"]), (2 * MIB, 2 * MIB, 0));
}

/// A thread's end of something comes too late: another thread has ended it, or its context.
#[test]
#[ignore = "needs the built library"]
fn what_another_thread_has_ended_is_charged_no_longer() {
    for (what, slow) in
        [("small", "cuArrayDestroy:2"), ("large", "cuArrayDestroy:2"), ("module", "cuModuleUnload:1")]
    {
        for by in ["thread", "context"] {
            let mut place = Place::new().limited(128 * MIB);
            place.set("FAKE_CUDA_SLOW", &format!("{slow}:400000"));
            let told = told(&place, &["gone", what, by]);
            assert_eq!((told["charged"], told["given"]), (0, 0), "{what}, by its {by}");
        }
    }
}

/// An image is unloaded or loaded while the primary context ends and is made anew, which has its handle again: the images of the
/// new one stay charged.
#[test]
#[ignore = "needs the built library"]
fn what_a_context_has_that_was_made_anew_stays_charged() {
    // Longer than another measurement waits.
    for (what, how, call) in [
        ("other", "FAKE_CUDA_SLOW", "cuModuleUnload:1"),
        ("own", "FAKE_CUDA_SLOW", "cuModuleUnload:1"),
        ("load", "FAKE_CUDA_LATE", "cuModuleLoadDataEx"),
    ] {
        let mut place = Place::new().contexts_of(64).limited(1024 * MIB);
        place.set(how, &format!("{call}:4500000"));
        let told = told(&place, &["anew", what]);
        assert_eq!(told["charged"], told["given"], "{what}: {told:?}");
        assert_eq!(told["left"], told["given-in-the-end"], "{what}: {told:?}");
    }
}

/// What is asked for by a call that stays at the driver is waited for once, before a request is refused for which it leaves no room.
#[test]
#[ignore = "needs the built library"]
fn refusals_do_not_wait_for_a_full_queue_again_and_again() {
    let mut place = Place::new().limited(256 * MIB);
    place.set("FAKE_CUDA_SLOW", "cuMemAllocAsync:2:8000000");
    let told = told(&place, &["refusals"]);
    // A tenth of a second, and little more for nineteen others.
    assert!(told["all"] < 1_000, "{} ms", told["all"]);
}

/// An allocation in a stream's order waits for room in its queue, with its pool in its hand.
#[test]
#[ignore = "needs the built library"]
fn arrays_beside_a_full_queue_are_charged_what_they_take() {
    let mut place = Place::new().limited(512 * MIB);
    place.set("FAKE_CUDA_SLOW", "cuMemAllocAsync:2:5000000");
    let told = told(&place, &["queue"]);
    assert_eq!(told["left"], told["given-in-the-end"]);
    assert!(told["longest"] < 1_000, "{} ms", told["longest"]);
}
