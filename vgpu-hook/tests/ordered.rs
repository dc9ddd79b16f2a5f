//! Memory in the order of streams, and that of graphs: charged to the right card, as much as the driver takes, when it takes it.
#![cfg(test)]

mod common;
mod sessions;

use sessions::{MIB, Place, Session};

/// A stream allocates from the pool of its own card, whatever the current one is. Before CUDA 12.8 only its context can be asked for.
#[test]
#[ignore = "needs the built library"]
fn an_allocation_is_charged_to_the_card_of_its_stream() {
    for (case, place) in [("CUDA 12.8", Place::new()), ("before", Place::new().without("cuStreamGetDevice"))]
    {
        let place = place.limited(256 * MIB);
        let mut session = place.ready();
        session.done("context c 1");
        session.done("stream far");
        session.done("primary 0");
        session.done("async-in a far 200000000");
        let (charged, given) = place.card(&mut session, 1);
        assert!(charged == given && given >= 200_000_000, "{case}: charged {charged}, given {given}");
        assert_eq!(place.card(&mut session, 0), (0, 0), "{case}");
        session.refused("async-in b far 100000000");
        session.done("async c 200000000");
        session.refused("async d 100000000");
        session.done("free-in a far");
        session.done("free-async c");
        session.done("sync-stream far");
        assert_eq!((place.card(&mut session, 0), place.card(&mut session, 1)), ((0, 0), (0, 0)), "{case}");
    }
}

/// Makes a graph of what is captured, in MiB: each allocation is freed at once but the one of `kept`; then a kernel runs.
fn capture(session: &mut Session, name: &str, allocations: &[u64], kept: Option<u64>, kernel: &str) {
    session.done("stream capturing");
    session.done("capture capturing");
    for mib in allocations {
        session.done(&format!("async-in a-{name} capturing {}", mib * MIB));
        session.done(&format!("free-in a-{name} capturing"));
    }
    if let Some(mib) = kept {
        session.done(&format!("async-in k-{name} capturing {}", mib * MIB));
    }
    session.done(&format!("work m {kernel} capturing"));
    session.done(&format!("captured g-{name} capturing"));
}

fn captured(session: &mut Session, name: &str, allocations: &[u64], kept: Option<u64>, kernel: &str) {
    capture(session, name, allocations, kept, kernel);
    session.done(&format!("instantiate {name} g-{name} 0"));
}

/// A session with a module, whose kernels the graphs launch, and streams `s` and `t`; and what the module takes.
fn with_kernels(place: &Place) -> (Session, u64) {
    let mut session = place.ready();
    for step in ["module m 2000", "stream s", "stream t"] {
        session.done(step);
    }
    let own = session.agree("a module");
    (session, own)
}

#[test]
#[ignore = "needs the built library"]
fn allocations_of_a_graph_that_share_addresses_are_charged_once() {
    let place = Place::new().limited(256 * MIB);
    let (mut session, own) = with_kernels(&place);
    captured(&mut session, "e", &[100; 10], None, "busy_1us");
    session.done("launch e");
    assert_eq!(session.agree("ten times the same"), 100 * MIB + own);
    // The largest of those that share.
    captured(&mut session, "f", &[120, 10, 100], None, "busy_1us");
    session.done("launch f");
    assert_eq!(session.agree("others in its place"), 120 * MIB + own);
    // Apart from one that does not fit there.
    captured(&mut session, "g", &[20, 240], None, "busy_1us");
    session.refused("launch g");
    assert!(session.agree("refused") <= 256 * MIB);
}

#[test]
#[ignore = "needs the built library"]
fn graphs_launched_one_after_the_other_share_what_the_pool_holds() {
    let place = Place::new().limited(256 * MIB);
    let (mut session, own) = with_kernels(&place);
    captured(&mut session, "e", &[150], None, "busy_100ms");
    captured(&mut session, "f", &[140], None, "busy_100ms");
    for round in 0..3 {
        for graph in ["e", "e", "f"] {
            session.done(&format!("launch-in {graph} s"));
            assert_eq!(session.agree("back to back"), 150 * MIB + own, "round {round}");
        }
    }
    // In another stream it may run at the same time.
    session.refused("launch-in f t");
    assert_eq!(session.agree("refused"), 150 * MIB + own);
    // What was refused runs beside nothing.
    session.done("launch-in f s");
    assert_eq!(session.agree("after a refusal"), 150 * MIB + own);
    session.done("sync");
    session.done("launch-in f t");
    assert_eq!(session.agree("all else was over"), 140 * MIB + own);
}

#[test]
#[ignore = "needs the built library"]
fn graphs_launched_at_the_same_time_have_memory_of_their_own() {
    let place = Place::new().limited(256 * MIB);
    let (mut session, own) = with_kernels(&place);
    session.done("stream u");
    for graph in ["e", "f", "g"] {
        captured(&mut session, graph, &[100], None, "busy_300ms");
    }
    session.done("launch-in e s");
    session.done("launch-in f t");
    assert_eq!(session.agree("two at once"), 200 * MIB + own);
    for _ in 0..3 {
        session.done("launch-in e s");
        session.done("launch-in f t");
    }
    assert_eq!(session.agree("again"), 200 * MIB + own);
    session.refused("launch-in g u");
    assert_eq!(session.agree("a third one"), 200 * MIB + own);
    assert!(session.ask("given 0")[3] <= 256 * MIB);
}

#[test]
#[ignore = "needs the built library"]
fn what_a_graph_leaves_is_not_there_for_the_next_one() {
    let place = Place::new().limited(256 * MIB);
    let (mut session, own) = with_kernels(&place);
    captured(&mut session, "e", &[], Some(150), "busy_1us");
    captured(&mut session, "f", &[150], None, "busy_1us");
    session.done("launch-in e s");
    session.refused("launch-in f s");
    assert_eq!(session.agree("left"), 150 * MIB + own);
    session.done("free-in k-e s");
    session.done("launch-in e s");
    assert_eq!(session.agree("its own"), 150 * MIB + own);
    session.done("free k-e");
    session.done("launch-in f s");
    assert_eq!(session.agree("freed"), 150 * MIB + own);
    assert!(session.ask("given 0")[3] <= 256 * MIB);
}

#[test]
#[ignore = "needs the built library"]
fn a_graph_that_is_uploaded_is_charged_then() {
    let place = Place::new().limited(256 * MIB);
    let (mut session, own) = with_kernels(&place);
    // CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD.
    capture(&mut session, "large", &[300], None, "busy_1us");
    session.refused("instantiate large g-large 2");
    assert_eq!(session.agree("refused"), own);
    capture(&mut session, "e", &[150], None, "busy_1us");
    session.done("instantiate e g-e 2");
    assert_eq!(session.agree("instantiated"), 150 * MIB + own);
    session.done("launch-in e s");
    session.done("launch-in e t");
    assert_eq!(session.agree("launched"), 150 * MIB + own);
    session.done("sync");
    captured(&mut session, "f", &[200], None, "busy_1us");
    assert_eq!(session.agree("not yet"), 150 * MIB + own);
    session.done("upload f");
    assert_eq!(session.agree("uploaded"), 200 * MIB + own);
    assert!(session.ask("given 0")[3] <= 256 * MIB);
}

/// An allocation that is captured takes nothing, and is neither the pool's nor anybody's until the graph is launched.
#[test]
#[ignore = "needs the built library"]
fn a_captured_allocation_is_not_the_pools() {
    let place = Place::new().limited(256 * MIB);
    let (mut session, own) = with_kernels(&place);
    let full = 256 * MIB - own;
    session.done(&format!("alloc all {full}"));
    capture(&mut session, "e", &[], Some(200), "busy_1us");
    assert_eq!(session.agree("captured at the limit"), 256 * MIB);
    session.refused("async x 512");
    session.done("free all");

    for round in 0..3 {
        session.done("pool p");
        session.done("keep p 1000000000");
        session.done("from-pool x p 4000000");
        session.done("free-async x");
        session.done("stream capturing");
        session.done("capture capturing");
        session.done("from-pool-in y p capturing 4000000");
        session.done("captured g capturing");
        session.done("destroy-description g");
        session.done("destroy-pool p");
        assert_eq!(session.agree("pool and graph destroyed"), own, "round {round}");
    }
}

/// The address of a captured allocation comes again for another: each is charged as what it is.
#[test]
#[ignore = "needs the built library"]
fn the_address_of_a_captured_allocation_may_be_anothers_next() {
    let place = Place::new().limited(256 * MIB);
    let (mut session, own) = with_kernels(&place);
    for (case, how) in [("launched", 1), ("never launched", 0)] {
        captured(&mut session, "e", &[], Some(50), "busy_1us");
        if how == 1 {
            session.done("launch-in e s");
            assert_eq!(session.agree(case), 50 * MIB + own, "{case}");
            session.done("free k-e");
        }
        session.done("destroy-graph e");
        session.done("destroy-description g-e");
        session.done("trim-graphs 0");
        assert_eq!(session.agree(case), own, "{case}");
        session.done(&format!("alloc b {}", 50 * MIB));
        assert_eq!(session.ask("where k-e"), session.ask("where b"), "{case}: another address");
        session.done("free b");
        assert_eq!(session.agree(case), own, "{case}: all of it freed");
    }
}

/// A destroyed pool whose last allocation was freed in a stream's order stands in nobody's way.
#[test]
#[ignore = "needs the built library"]
fn a_pool_that_is_over_gives_way() {
    let place = Place::new().limited(256 * MIB);
    let mut session = place.ready();
    session.done("pool p");
    session.done("from-pool x p 150000000");
    session.done("destroy-pool p");
    session.done("free-async x");
    session.done(&format!("alloc all {}", 256 * MIB));
    session.done("free all");
    assert_eq!(session.agree("all of it freed"), 0);
}

/// What a pool still holds when it is destroyed stays charged until its streams may have come to their frees: the driver
/// cannot be asked any more.
#[test]
#[ignore = "needs the built library"]
fn what_a_pool_does_not_give_back_as_it_is_destroyed_stays_charged() {
    let place = Place::new().limited(256 * MIB);
    let mut session = place.ready();
    session.done("pool p");
    session.done("keep p 1000000000");
    session.done("from-pool x p 40000000");
    session.done("free-async x");
    let held = session.agree("kept by the threshold");
    // As if a free were still to come.
    session.done("fail cuMemPoolTrimTo 999 1");
    session.done("destroy-pool p");
    assert_eq!(session.used(), held, "destroyed");
    session.done("sync-stream");
    assert_eq!(session.agree("synchronised"), 0);
}
