//! Memory in the order of streams, and that of graphs: charged to the right card, as much as the driver takes, when it takes it.
#![cfg(test)]

mod common;
mod sessions;

use sessions::{MIB, Place};

/// Bytes charged for a card, and bytes that it gave to the session.
macro_rules! card {
    ($place:ident, $session:ident, $card:literal) => {
        ($place.hot().cards[$card].total, $session.ask(concat!("given ", $card))[1])
    };
}

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
        let (charged, given) = card!(place, session, 1);
        assert!(charged == given && given >= 200_000_000, "{case}: charged {charged}, given {given}");
        assert_eq!(card!(place, session, 0), (0, 0), "{case}");
        session.refused("async-in b far 100000000");
        session.done("async c 200000000");
        session.refused("async d 100000000");
        session.done("free-in a far");
        session.done("free-async c");
        session.done("sync-stream far");
        assert_eq!((card!(place, session, 0), card!(place, session, 1)), ((0, 0), (0, 0)), "{case}");
    }
}
