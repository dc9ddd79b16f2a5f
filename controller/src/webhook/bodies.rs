//! Bodies of calls, taken and read so that nobody takes more memory or time than his share, nor keeps it.
//!
//! Whoever reaches the port may send. A body that is small costs a connection no more than the connection itself; a large
//! one needs a place, of which there are few. A caller gets one at a time, in its turn, and must then send at the pace of
//! a program that has what it sends: the API server's, never that of somebody who holds places to keep others out.
//!
//! What is read from a body is larger than the body, up to the bounds of [`weigh`](crate::weigh), small bodies or large.
//! So one is read at a time, callers in turn, away from the threads that answer kube-scheduler.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::http::StatusCode;
use futures::StreamExt;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout, timeout_at};

use super::Refused;
use super::caller::Caller;
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
    /// How many large bodies are held at one time: 32 MiB of them. With the small ones and what is read from one of them
    /// (`tests/bodies.rs` measures it) they fit into the controller's 512 MiB.
    pub(super) places: usize,
    /// How long a caller waits for a place, and how long for its body to be read: the API server gives the whole call
    /// 10 s.
    pub(super) patience: Duration,
    /// How long a body may take from its place to its end. In a cluster's network it takes some ms.
    pub(super) reading: Duration,
    /// How far a body may be behind `rate`: a lost packet is sent again after 200 ms, and once more after 400 ms.
    pub(super) grace: Duration,
    /// Bytes per second at which a body with a place must come. What comes faster is no credit for later: one that
    /// stops is out after `grace`, however much of it has come.
    pub(super) rate: u64,
}

impl Default for Bounds {
    fn default() -> Self {
        Self {
            small: 64 << 10,
            largest: 8 << 20,
            places: 4,
            patience: Duration::from_secs(6),
            // A pod of 3 MiB at `rate`.
            reading: Duration::from_secs(5),
            grace: Duration::from_millis(600),
            rate: 640 << 10,
        }
    }
}

/// Takes bodies.
#[derive(Debug)]
pub(super) struct Bodies {
    bounds: Bounds,
    places: Arc<Semaphore>,
    callers: Turns<Caller>,
    /// The one that may be read now.
    reader: Arc<Semaphore>,
    readers: Turns<Caller>,
}

/// What a large body holds until it is read, and each while it is read.
#[derive(Debug)]
pub(super) struct Place {
    _place: OwnedSemaphorePermit,
    _turn: Option<Turn<Caller>>,
}

/// When the next bytes of a body must have come.
struct Pace {
    bounds: Bounds,
    end: Instant,
    next: Instant,
}

impl Pace {
    fn new(bounds: Bounds) -> Self {
        let now = Instant::now();
        Self { bounds, end: now + bounds.reading, next: now + bounds.grace }
    }

    fn came(&mut self, bytes: usize) {
        let earned = Duration::from_nanos(bytes as u64 * 1_000_000_000 / self.bounds.rate.max(1));
        self.next = (self.next + earned).min(Instant::now() + self.bounds.grace);
    }

    fn until(&self) -> Instant {
        self.next.min(self.end)
    }
}

impl Bodies {
    pub(super) fn new(bounds: Bounds) -> Self {
        Self {
            bounds,
            places: Arc::new(Semaphore::new(bounds.places)),
            callers: Turns::default(),
            reader: Arc::new(Semaphore::new(1)),
            readers: Turns::default(),
        }
    }

    /// Takes the body of a call from `caller`, each piece against the bounds as it comes: what a caller says its length
    /// will be is worth nothing.
    pub(super) async fn take(
        &self,
        body: Body,
        caller: Option<Caller>,
    ) -> Result<(Vec<u8>, Option<Place>), Refused> {
        let mut taken: Vec<u8> = Vec::new();
        let mut held: Option<(Place, Pace)> = None;
        let mut pieces = body.into_data_stream();
        loop {
            let piece = match &held {
                None => pieces.next().await,
                Some((_, pace)) => timeout_at(pace.until(), pieces.next()).await.map_err(|_| self.slow())?,
            };
            let Some(piece) = piece else { break };
            let piece = piece.map_err(|error| Refused::malformed(format!("it broke off: {error}")))?;
            let length = taken.len() + piece.len();
            if length > self.bounds.largest {
                let text = format!(
                    "longer than {} bytes, which no review of the API server is",
                    self.bounds.largest
                );
                return Err(Refused { status: StatusCode::PAYLOAD_TOO_LARGE, code: "BodyTooLarge", text });
            }
            if length > self.bounds.small && held.is_none() {
                let waited = timeout(self.bounds.patience, turn(&self.callers, caller, &self.places)).await;
                held = Some((waited.ok().flatten().ok_or_else(busy)?, Pace::new(self.bounds)));
            }
            if let Some((_, pace)) = &mut held {
                pace.came(piece.len());
            }
            if length > taken.capacity() {
                // By itself it would double, beyond what is counted. Memory that is not written to costs nothing.
                let room =
                    if held.is_some() { self.bounds.largest } else { (2 * length).min(self.bounds.small) };
                taken.reserve_exact(room.max(length) - taken.len());
            }
            taken.extend_from_slice(&piece);
        }
        Ok((taken, held.map(|(place, _)| place)))
    }

    /// Waits until `caller` may have a body read; no other is, until what is returned is dropped.
    pub(super) async fn reader(&self, caller: Option<Caller>) -> Result<Place, Refused> {
        let waited = timeout(self.bounds.patience, turn(&self.readers, caller, &self.reader)).await;
        waited.ok().flatten().ok_or_else(busy)
    }

    fn slow(&self) -> Refused {
        let Bounds { reading, rate, grace, .. } = self.bounds;
        let text = format!(
            "a large body must come at {rate} bytes per second, be no more than {grace:?} behind that, and take no longer than {reading:?}"
        );
        Refused { status: StatusCode::REQUEST_TIMEOUT, code: "BodyTooSlow", text }
    }
}

/// First `caller`'s turn among its own calls, then a place among everybody's: nobody stands in a queue twice.
async fn turn(turns: &Turns<Caller>, caller: Option<Caller>, places: &Arc<Semaphore>) -> Option<Place> {
    let turn = match caller {
        Some(caller) => Some(turns.of(caller).await),
        None => None,
    };
    Some(Place { _place: Arc::clone(places).acquire_owned().await.ok()?, _turn: turn })
}

fn busy() -> Refused {
    let text = "too many bodies at a time: try again".to_owned();
    Refused { status: StatusCode::SERVICE_UNAVAILABLE, code: "TooManyBodies", text }
}

#[cfg(test)]
mod tests;
