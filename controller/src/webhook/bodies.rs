//! Bodies of calls, read so that nobody takes more memory than his share, nor keeps it.
//!
//! Whoever reaches the port may send. A body that is small costs a connection no more than the connection itself; a large
//! one needs a place, of which there are few. A caller gets one at a time, in its turn, and must then send at the pace of
//! a program that has what it sends: the API server's, never that of somebody who holds places to keep others out.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::http::StatusCode;
use futures::StreamExt;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout_at};

use super::Refused;
use crate::extender::turns::{Turn, Turns};

/// What bodies may cost.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    /// Bytes that each connection may send without a place. A review of an ordinary pod has some 10 KiB; with all
    /// connections (`Limits::connections`) that is 32 MiB.
    pub(super) small: usize,
    /// Largest body taken. The API server takes objects of 3 MiB (its `MaxRequestBodyBytes`), and a review may carry one
    /// twice, as it was and as it is to be: 6 MiB, and as much again as half of one for the rest and for escapes.
    pub(super) largest: usize,
    /// How many large bodies are held at one time: 32 MiB of them fit into the controller's 512 MiB beside what is read
    /// from them.
    pub(super) places: usize,
    /// How long a caller waits for a place: the API server gives the whole call 10 s.
    pub(super) patience: Duration,
    /// How long a body may take from its place to its end. In a cluster's network it takes some ms.
    pub(super) reading: Duration,
}

impl Default for Bounds {
    fn default() -> Self {
        Self {
            small: 64 << 10,
            largest: 8 << 20,
            places: 4,
            patience: Duration::from_secs(6),
            reading: Duration::from_secs(1),
        }
    }
}

/// Reads bodies.
#[derive(Debug)]
pub(super) struct Bodies {
    bounds: Bounds,
    places: Arc<Semaphore>,
    callers: Turns<IpAddr>,
}

/// What a large body holds until its answer is made.
#[derive(Debug)]
pub(super) struct Place {
    _place: OwnedSemaphorePermit,
    _turn: Option<Turn<IpAddr>>,
}

impl Bodies {
    pub(super) fn new(bounds: Bounds) -> Self {
        Self { bounds, places: Arc::new(Semaphore::new(bounds.places)), callers: Turns::default() }
    }

    /// Reads the body of a call from `caller`, each piece against the bounds as it comes: what a caller says its length
    /// will be is worth nothing.
    pub(super) async fn read(
        &self,
        body: Body,
        caller: Option<IpAddr>,
    ) -> Result<(Vec<u8>, Option<Place>), Refused> {
        let mut read: Vec<u8> = Vec::new();
        let mut place: Option<(Place, Instant)> = None;
        let mut pieces = body.into_data_stream();
        loop {
            let piece = match &place {
                None => pieces.next().await,
                Some((_, until)) => timeout_at(*until, pieces.next()).await.map_err(|_| self.slow())?,
            };
            let Some(piece) = piece else { break };
            let piece = piece.map_err(|error| Refused::malformed(format!("it broke off: {error}")))?;
            let length = read.len() + piece.len();
            if length > self.bounds.largest {
                let text = format!(
                    "longer than {} bytes, which no review of the API server is",
                    self.bounds.largest
                );
                return Err(Refused { status: StatusCode::PAYLOAD_TOO_LARGE, code: "BodyTooLarge", text });
            }
            if length > self.bounds.small && place.is_none() {
                place = Some((self.place(caller).await?, Instant::now() + self.bounds.reading));
            }
            read.extend_from_slice(&piece);
        }
        Ok((read, place.map(|(place, _)| place)))
    }

    async fn place(&self, caller: Option<IpAddr>) -> Result<Place, Refused> {
        let waiting = async {
            let turn = match caller {
                Some(caller) => Some(self.callers.of(caller).await),
                None => None,
            };
            Some((turn, Arc::clone(&self.places).acquire_owned().await.ok()?))
        };
        let waited = tokio::time::timeout(self.bounds.patience, waiting).await;
        let (turn, place) = waited.ok().flatten().ok_or_else(|| Refused {
            status: StatusCode::SERVICE_UNAVAILABLE,
            code: "TooManyBodies",
            text: "too many large bodies at a time: try again".to_owned(),
        })?;
        Ok(Place { _place: place, _turn: turn })
    }

    fn slow(&self) -> Refused {
        let text = format!("a large body that takes longer than {:?}", self.bounds.reading);
        Refused { status: StatusCode::REQUEST_TIMEOUT, code: "BodyTooSlow", text }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    /// A body of any length, in pieces, without a Content-Length.
    fn pieces(count: usize, piece: usize) -> Body {
        let all =
            (0..count).map(move |_| Ok::<_, std::io::Error>(axum::body::Bytes::from(vec![b' '; piece])));
        Body::from_stream(futures::stream::iter(all))
    }

    /// A body that is all but whole, and then stops.
    fn stuck(length: usize) -> Body {
        let first = futures::stream::once(async move {
            Ok::<_, std::io::Error>(axum::body::Bytes::from(vec![b' '; length]))
        });
        Body::from_stream(first.chain(futures::stream::pending()))
    }

    fn from(last: u8) -> IpAddr {
        Ipv4Addr::new(10, 0, 0, last).into()
    }

    fn code(read: Result<(Vec<u8>, Option<Place>), Refused>) -> (u16, &'static str) {
        read.map_err(|refused| (refused.status.as_u16(), refused.code)).unwrap_err()
    }

    #[tokio::test(start_paused = true)]
    async fn bodies_are_bounded_one_by_one_and_together() {
        let bodies = Bodies::new(Bounds::default());
        assert_eq!(code(bodies.read(pieces(9, 1 << 20), Some(from(1))).await), (413, "BodyTooLarge"));
        assert_eq!(bodies.places.available_permits(), 4, "what was refused takes nothing");
        let mut held = Vec::new();
        for n in 0..4 {
            held.push(bodies.read(pieces(8, 1 << 20), Some(from(n))).await.unwrap());
        }
        assert_eq!(code(bodies.read(pieces(2, 1 << 20), Some(from(9))).await), (503, "TooManyBodies"));
        assert_eq!(bodies.read(pieces(1, 64 << 10), Some(from(9))).await.unwrap().0.len(), 64 << 10, "small");
        held.pop();
        assert!(bodies.read(pieces(2, 1 << 20), Some(from(9))).await.is_ok());
        drop(held);
        assert_eq!((bodies.places.available_permits(), bodies.callers.len()), (4, 0));
        let broken = futures::stream::iter([Ok("{"), Err(std::io::Error::other("reset"))]);
        assert_eq!(code(bodies.read(Body::from_stream(broken), Some(from(1))).await), (400, "MalformedBody"));
    }

    /// Somebody who opens ever more calls with large bodies that never end has one place, and not for long.
    #[tokio::test(start_paused = true)]
    async fn one_caller_cannot_keep_the_others_out() {
        let bounds = Bounds::default();
        let bodies = Arc::new(Bodies::new(bounds));
        let mut slow: Vec<_> = (0..40)
            .map(|_| {
                let bodies = Arc::clone(&bodies);
                tokio::spawn(
                    async move { code(bodies.read(stuck(bounds.largest - 1), Some(from(66))).await) },
                )
            })
            .collect();
        tokio::time::sleep(Duration::from_millis(10)).await;
        let begun = Instant::now();
        for n in 0..3 {
            bodies.read(pieces(6, 1 << 20), Some(from(n))).await.unwrap();
            bodies.read(pieces(1, 10_000), Some(from(n))).await.unwrap();
        }
        assert!(begun.elapsed() < Duration::from_millis(100), "{:?}", begun.elapsed());
        // Even four of them, one at each place, keep somebody waiting for no longer than a body may take.
        slow.extend((67..70).map(|n| {
            let bodies = Arc::clone(&bodies);
            tokio::spawn(async move { code(bodies.read(stuck(bounds.largest - 1), Some(from(n))).await) })
        }));
        tokio::time::sleep(Duration::from_millis(10)).await;
        assert_eq!(bodies.places.available_permits(), 0);
        let begun = Instant::now();
        bodies.read(pieces(6, 1 << 20), Some(from(1))).await.unwrap();
        assert!(begun.elapsed() <= bounds.reading, "{:?}", begun.elapsed());
        let mut ends = Vec::new();
        for task in slow {
            ends.push(task.await.unwrap().1);
        }
        assert!(ends.iter().all(|end| ["BodyTooSlow", "TooManyBodies"].contains(end)), "{ends:?}");
        assert_eq!((bodies.places.available_permits(), bodies.callers.len()), (4, 0));
    }
}
