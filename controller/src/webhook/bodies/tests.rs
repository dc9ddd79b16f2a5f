//! Bodies that are large, many, slow or stuck.

use super::*;
use std::net::{IpAddr, Ipv4Addr};

use axum::body::Bytes;

fn piece(length: usize) -> Bytes {
    Bytes::from(vec![b' '; length])
}

/// A body of what comes, without a Content-Length.
fn body(pieces: impl futures::Stream<Item = Bytes> + Send + 'static) -> Body {
    Body::from_stream(pieces.map(Ok::<_, std::io::Error>))
}

/// A body of any length, in pieces.
fn pieces(count: usize, length: usize) -> Body {
    body(futures::stream::iter((0..count).map(move |_| piece(length))))
}

/// A body that is all but whole, and then stops.
fn stuck(length: usize) -> Body {
    let first = futures::stream::once(async move { piece(length) });
    body(first.chain(futures::stream::pending()))
}

/// A body that comes piece by piece, after a first one.
fn dripping(first: usize, count: usize, length: usize, every: Duration) -> Body {
    let first = futures::stream::once(async move { piece(first) });
    let rest = futures::stream::iter(0..count).then(move |_| async move {
        tokio::time::sleep(every).await;
        piece(length)
    });
    body(first.chain(rest))
}

fn from(last: u8) -> Caller {
    IpAddr::from(Ipv4Addr::new(10, 0, 0, last)).into()
}

fn code(taken: Result<(Vec<u8>, Option<Place>), Refused>) -> (u16, &'static str) {
    taken.map_err(|refused| (refused.status.as_u16(), refused.code)).unwrap_err()
}

#[tokio::test(start_paused = true)]
async fn bodies_are_bounded_one_by_one_and_together() {
    let bodies = Bodies::new(Bounds::default());
    assert_eq!(code(bodies.take(pieces(9, 1 << 20), Some(from(1))).await), (413, "BodyTooLarge"));
    assert_eq!(bodies.places.available_permits(), 4, "what was refused takes nothing");
    let mut held = Vec::new();
    for n in 0..4 {
        held.push(bodies.take(pieces(8, 1 << 20), Some(from(n))).await.unwrap());
    }
    assert_eq!(code(bodies.take(pieces(2, 1 << 20), Some(from(9))).await), (503, "TooManyBodies"));
    assert_eq!(bodies.take(pieces(1, 64 << 10), Some(from(9))).await.unwrap().0.len(), 64 << 10, "small");
    held.pop();
    assert!(bodies.take(pieces(2, 1 << 20), Some(from(9))).await.is_ok());
    drop(held);
    assert_eq!((bodies.places.available_permits(), bodies.callers.len()), (4, 0));
    let broken = futures::stream::iter([Ok("{"), Err(std::io::Error::other("reset"))]);
    assert_eq!(code(bodies.take(Body::from_stream(broken), Some(from(1))).await), (400, "MalformedBody"));
}

/// A body has no more memory than is counted for it, however its pieces fall.
#[tokio::test(start_paused = true)]
async fn a_body_takes_no_more_than_it_is_counted_for() {
    let bounds = Bounds::default();
    let bodies = Bodies::new(bounds);
    for (count, length, most) in [
        (1, 10, 20),
        (9, 7_000, bounds.small),
        (64, 1 << 10, bounds.small),
        (65, 1 << 10, bounds.largest),
        (5, 1_000_001, bounds.largest),
        (8, 1 << 20, bounds.largest),
    ] {
        let (body, _place) = bodies.take(pieces(count, length), Some(from(1))).await.unwrap();
        assert_eq!(body.len(), count * length);
        assert!(body.capacity() <= most, "{count} x {length}: {}", body.capacity());
    }
}

/// Who sends over a slow link, as the API server gives 10 s to, and who sends nothing.
#[tokio::test(start_paused = true)]
async fn a_large_body_must_come_on() {
    let bounds = Bounds::default();
    let bodies = Bodies::new(bounds);
    let ms = Duration::from_millis;
    for (case, body) in [
        ("a pod at etcd's limit at 700 KiB/s", dripping(0, 22, 70 << 10, ms(100))),
        ("a pod of 3 MiB at 700 KiB/s", dripping(0, 44, 70 << 10, ms(100))),
        ("packets that were lost", dripping(100 << 10, 4, 1 << 20, ms(500))),
    ] {
        assert!(bodies.take(body, Some(from(1))).await.is_ok(), "{case}");
    }
    for (case, body, most) in [
        ("it stops at once", stuck((64 << 10) + 1), bounds.grace),
        ("it stops just before its end", stuck(bounds.largest - 1), bounds.grace),
        ("byte by byte", dripping(bounds.largest / 2, 1_000, 1, ms(50)), bounds.grace),
        ("just too slow", dripping(100 << 10, 1_000, 6 << 10, ms(10)), bounds.grace * 20),
        ("fast enough, and without end", dripping(100 << 10, 1_000, 7 << 10, ms(10)), bounds.reading),
    ] {
        let begun = Instant::now();
        assert_eq!(code(bodies.take(body, Some(from(1))).await), (408, "BodyTooSlow"), "{case}");
        assert!(begun.elapsed() <= most.min(bounds.reading) + ms(1), "{case}: {:?}", begun.elapsed());
    }
    assert_eq!((bodies.places.available_permits(), bodies.callers.len()), (4, 0));
}

/// Somebody who opens ever more calls with large bodies that never end has one place, and not for long.
#[tokio::test(start_paused = true)]
async fn one_caller_cannot_keep_the_others_out() {
    let bounds = Bounds::default();
    let bodies = Arc::new(Bodies::new(bounds));
    let start = |n| {
        let bodies = Arc::clone(&bodies);
        tokio::spawn(async move { code(bodies.take(stuck(bounds.largest - 1), Some(from(n))).await) })
    };
    let mut slow: Vec<_> = (0..40).map(|_| start(66)).collect();
    tokio::time::sleep(Duration::from_millis(10)).await;
    let begun = Instant::now();
    for n in 0..3 {
        bodies.take(pieces(6, 1 << 20), Some(from(n))).await.unwrap();
        bodies.take(pieces(1, 10_000), Some(from(n))).await.unwrap();
    }
    assert!(begun.elapsed() < Duration::from_millis(100), "{:?}", begun.elapsed());
    // Even four of them, one at each place, keep somebody waiting for no longer than a body may say nothing.
    slow.extend((67..70).map(start));
    tokio::time::sleep(Duration::from_millis(10)).await;
    assert_eq!(bodies.places.available_permits(), 0);
    let begun = Instant::now();
    bodies.take(pieces(6, 1 << 20), Some(from(1))).await.unwrap();
    assert!(begun.elapsed() <= bounds.grace, "{:?}", begun.elapsed());
    let mut ends = Vec::new();
    for task in slow {
        ends.push(task.await.unwrap().1);
    }
    assert!(ends.iter().all(|end| ["BodyTooSlow", "TooManyBodies"].contains(end)), "{ends:?}");
    assert_eq!((bodies.places.available_permits(), bodies.callers.len()), (4, 0));
}

/// One body is read at a time, and whoever has many waits behind each caller that has one.
#[tokio::test(start_paused = true)]
async fn bodies_are_read_one_by_one_and_callers_in_turn() {
    let bodies = Arc::new(Bodies::new(Bounds::default()));
    let done = Arc::new(parking_lot::Mutex::new(Vec::new()));
    let mut tasks = Vec::new();
    for n in [66, 66, 66, 1, 66, 2] {
        let (bodies, done) = (Arc::clone(&bodies), Arc::clone(&done));
        tasks.push(tokio::spawn(async move {
            let reader = bodies.reader(Some(from(n))).await.unwrap();
            assert_eq!(bodies.reader.available_permits(), 0);
            tokio::time::sleep(Duration::from_millis(100)).await;
            done.lock().push(n);
            drop(reader);
        }));
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    for task in tasks {
        task.await.unwrap();
    }
    assert_eq!(*done.lock(), [66, 1, 2, 66, 66, 66]);
    let _reading = bodies.reader(Some(from(1))).await.unwrap();
    let refused = bodies.reader(Some(from(2))).await.unwrap_err();
    assert_eq!((refused.status.as_u16(), refused.code), (503, "TooManyBodies"));
}
