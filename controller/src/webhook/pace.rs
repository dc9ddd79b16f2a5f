//! Connections that are slow or many cost no more than a bounded part of the server.
//!
//! The port is open to the cluster's network and asks for no client certificate. So a connection has a place only as
//! long as there are any and its caller has not its share of them yet, and keeps it only while its requests come in
//! reasonable time.

use std::collections::BTreeMap;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum_server::accept::Accept;
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, Sleep};

use super::caller::Caller;

/// What connections may cost.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// How many there may be at one time.
    pub(super) connections: usize,
    /// How many of them one caller may have.
    pub(super) share: usize,
    /// How long a TLS handshake may take, and a request from its first byte to the first byte of its answer. For a
    /// connection that is new the time runs at once.
    pub(super) request: Duration,
    /// How long a connection may stay without a new request.
    pub(super) idle: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            // An API server has at most 200 mutating requests under way (`--max-mutating-requests-inflight`), each of
            // which may call us: two of them at their limit, and room.
            connections: 512,
            // The rest is for others when somebody takes all that he can. It is no less, since behind one address (source
            // NAT) may be every API server.
            share: 384,
            // The API server gives the whole call 10 s (`timeoutSeconds` in charts/mullion/webhook.yaml).
            request: Duration::from_secs(10),
            // Go's client closes its own idle connections after 90 s. It must be the first: a request that meets a
            // connection that we are closing fails, and with it the creation of a pod.
            idle: Duration::from_mins(2),
        }
    }
}

/// Gives each connection of an acceptor a place and a pace.
#[derive(Clone, Debug)]
pub(super) struct Paced<A> {
    inner: A,
    limits: Limits,
    places: Arc<Semaphore>,
    callers: Callers,
}

/// How many connections each caller has.
type Callers = Arc<Mutex<BTreeMap<Caller, usize>>>;

/// One connection of a caller, among all.
#[derive(Debug)]
struct Place {
    _permit: OwnedSemaphorePermit,
    callers: Callers,
    caller: Caller,
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut callers = self.callers.lock();
        match callers.get_mut(&self.caller) {
            Some(count) if *count > 1 => *count -= 1,
            _ => {
                callers.remove(&self.caller);
            }
        }
    }
}

impl<A> Paced<A> {
    pub(super) fn new(inner: A, limits: Limits) -> Self {
        let places = Arc::new(Semaphore::new(limits.connections));
        Self { inner, limits, places, callers: Callers::default() }
    }

    /// Nobody waits for a place: those who wait would be without bound themselves.
    fn place(&self, caller: Caller) -> Option<Place> {
        let mut callers = self.callers.lock();
        if callers.get(&caller).is_some_and(|count| *count >= self.limits.share) {
            return None;
        }
        let permit = Arc::clone(&self.places).try_acquire_owned().ok()?;
        *callers.entry(caller).or_default() += 1;
        Some(Place { _permit: permit, callers: Arc::clone(&self.callers), caller })
    }
}

type Accepting<Stream, Service> =
    Pin<Box<dyn Future<Output = io::Result<(PacedStream<Stream>, Service)>> + Send>>;

impl<A, S> Accept<TcpStream, S> for Paced<A>
where
    A: Accept<TcpStream, S>,
    A::Future: Send + 'static,
    A::Stream: Send + 'static,
    A::Service: Send + 'static,
{
    type Stream = PacedStream<A::Stream>;
    type Service = A::Service;
    type Future = Accepting<A::Stream, A::Service>;

    fn accept(&self, stream: TcpStream, service: S) -> Self::Future {
        // One that has no address any more has hung up.
        let peer = match stream.peer_addr() {
            Ok(peer) => peer.ip(),
            Err(error) => return Box::pin(async { Err(error) }),
        };
        let Some(place) = self.place(peer.into()) else {
            let Limits { connections, share, .. } = self.limits;
            let code = "TooManyConnections";
            tracing::warn!(code, %peer, connections, share, "connection refused");
            return Box::pin(async { Err(io::Error::other("too many connections")) });
        };
        let (accepting, limits) = (self.inner.accept(stream, service), self.limits);
        Box::pin(async move {
            let (stream, service) = accepting.await?;
            Ok((PacedStream::new(stream, limits, place), service))
        })
    }
}

/// A connection that ends with an error when it takes too long.
#[derive(Debug)]
pub(super) struct PacedStream<S> {
    stream: S,
    limits: Limits,
    /// A request is being read, or worked on.
    asked: bool,
    until: Pin<Box<Sleep>>,
    _place: Place,
}

impl<S> PacedStream<S> {
    fn new(stream: S, limits: Limits, place: Place) -> Self {
        let until = Box::pin(tokio::time::sleep(limits.request));
        Self { stream, limits, asked: true, until, _place: place }
    }

    /// The time that is left is that of a request, or that between two of them.
    fn turn(&mut self, asked: bool) {
        if self.asked != asked {
            self.asked = asked;
            let left = if asked { self.limits.request } else { self.limits.idle };
            self.until.as_mut().reset(Instant::now() + left);
        }
    }

    /// What was pending stays so, unless it has taken too long.
    fn wait<T>(&mut self, context: &mut Context<'_>, polled: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if polled.is_pending() && self.until.as_mut().poll(context).is_ready() {
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        polled
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for PacedStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let polled = Pin::new(&mut self.stream).poll_read(context, buffer);
        if buffer.filled().len() > before {
            self.turn(true);
        }
        self.wait(context, polled)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for PacedStream<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.stream).poll_write(context, bytes);
        if matches!(polled, Poll::Ready(Ok(1..))) {
            self.turn(false);
        }
        self.wait(context, polled)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let polled = Pin::new(&mut self.stream).poll_flush(context);
        self.wait(context, polled)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let polled = Pin::new(&mut self.stream).poll_shutdown(context);
        self.wait(context, polled)
    }
}
