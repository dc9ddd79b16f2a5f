//! Slow and many callers, over real connections. The server's clock is tokio's paused one: it stands still as long as a
//! thread for blocking work is busy, and callers are such threads. So time passes only where a test says so ([`pass`]),
//! and a limit that is met is never a machine's that was slow.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::body::Body;
use axum::extract::Request;
use axum::middleware::map_request;
use axum::routing::post;
use futures::TryStreamExt;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use tokio::runtime::Handle as Runtime;
use tokio::task::spawn_blocking;
use tokio::time::Instant;

use super::*;
use crate::metrics::Metrics;
use crate::webhook::Webhook;
use crate::webhook::bodies::Bounds;
use crate::webhook::certificate::{Held, Rules, make};
use mullion_core::request::Defaults;

const LIMITS: Limits =
    Limits { connections: 2, share: 2, request: Duration::from_millis(800), idle: Duration::from_secs(3) };

const BOUNDS: Bounds = Bounds {
    small: 10_000,
    largest: 1 << 20,
    places: 2,
    patience: Duration::from_secs(3),
    reading: Duration::from_secs(1),
    grace: Duration::from_millis(600),
    rate: 640 << 10,
};

/// How long, by everybody's clock, something may take that is to happen at once.
const PATIENCE: Duration = Duration::from_secs(20);

/// How far time goes on at a time.
const STEP: Duration = Duration::from_millis(50);

/// A whole call; the body is echoed.
const CALL: &[u8] = b"POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\nhi";

struct Server {
    address: SocketAddr,
    client: Arc<ClientConfig>,
    stop: CancellationToken,
    /// How many bodies have come so far that they are large.
    large: Arc<AtomicUsize>,
}

type Tls = StreamOwned<ClientConnection, TcpStream>;

trait Caller: Read + Write {
    fn socket(&self) -> &TcpStream;

    fn say(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        self.write_all(bytes)?;
        self.flush()
    }

    /// Whether the server has hung up, as far as it shows by now.
    fn is_over(&mut self) -> bool {
        self.socket().set_read_timeout(Some(Duration::from_millis(1))).unwrap();
        let over = match self.read(&mut [0; 64]) {
            Ok(read) => read == 0,
            Err(error) => !matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut),
        };
        self.socket().set_read_timeout(Some(PATIENCE)).unwrap();
        over
    }
}

impl Caller for TcpStream {
    fn socket(&self) -> &TcpStream {
        self
    }
}

impl Caller for Tls {
    fn socket(&self) -> &TcpStream {
        &self.sock
    }
}

impl Server {
    fn start(limits: Limits) -> Self {
        let names = vec!["localhost".to_owned()];
        let rules = Rules { names, ..crate::webhook::certificate::tests::rules() };
        let held: Held = make(&rules, jiff::Timestamp::now().as_second()).unwrap();
        let identity = Identity::default();
        identity.load("s", &held.current.certificate, &held.current.key).unwrap();
        let mut roots = RootCertStore::empty();
        roots.add_parsable_certificates(CertificateDer::pem_slice_iter(&held.ca).map(Result::unwrap));
        let client = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (address, stop) = (listener.local_addr().unwrap(), CancellationToken::new());
        let webhook = Webhook { defaults: Defaults::default(), metrics: Metrics::new() };
        let echo = Router::new().route("/echo", post(|body: axum::body::Bytes| async move { body }));
        let large = Arc::new(AtomicUsize::new(0));
        let seen = Arc::clone(&large);
        let counted = map_request(move |request: Request| std::future::ready(count(request, &seen)));
        let routes = webhook.routes_within(BOUNDS).merge(echo).layer(counted);
        tokio::spawn(serve_on(listener, routes, identity, limits, stop.clone()));
        Self { address, client: Arc::new(client), stop, large }
    }

    fn connect(&self) -> TcpStream {
        self.connect_from(1)
    }

    /// Each address of the loopback network is a caller of its own.
    fn connect_from(&self, last: u8) -> TcpStream {
        let socket = tokio::net::TcpSocket::new_v4().unwrap();
        socket.bind(SocketAddr::from(([127, 0, 0, last], 0))).unwrap();
        let connecting = socket.connect(self.address);
        let stream = tokio::runtime::Handle::current().block_on(connecting).unwrap().into_std().unwrap();
        stream.set_nonblocking(false).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream
    }

    /// Of `count` connections that say nothing those that have a place, which are `places`.
    fn silent(&self, last: u8, count: usize, places: usize) -> Vec<TcpStream> {
        let mut silent: Vec<_> = (0..count).map(|_| self.connect_from(last)).collect();
        at_once("all but some are refused", || {
            silent.retain_mut(|stream| !stream.is_over());
            silent.len() <= places
        });
        assert_eq!(silent.len(), places);
        silent
    }

    fn tls(&self) -> Tls {
        self.tls_from(1)
    }

    fn tls_from(&self, last: u8) -> Tls {
        let name = ServerName::try_from("localhost").unwrap();
        let connection = ClientConnection::new(Arc::clone(&self.client), name).unwrap();
        StreamOwned::new(connection, self.connect_from(last))
    }
}

/// Sends `CALL` and reads its answer.
fn call(stream: &mut Tls) -> std::io::Result<()> {
    stream.write_all(CALL)?;
    let mut answer = Vec::new();
    while !answer.ends_with(b"\r\n\r\nhi") {
        let mut piece = [0; 512];
        match stream.read(&mut piece)? {
            0 => return Err(std::io::ErrorKind::UnexpectedEof.into()),
            n => answer.extend_from_slice(&piece[..n]),
        }
    }
    assert!(answer.starts_with(b"HTTP/1.1 200 "));
    Ok(())
}

/// Adds to `large` when the body of `request` has become a large one.
fn count(request: Request, large: &Arc<AtomicUsize>) -> Request {
    let large = Arc::clone(large);
    request.map(|body| {
        let mut come = 0;
        Body::from_stream(body.into_data_stream().inspect_ok(move |piece| {
            let before = come;
            come += piece.len();
            if before <= BOUNDS.small && come > BOUNDS.small {
                large.fetch_add(1, Ordering::SeqCst);
            }
        }))
    })
}

/// Lets that much of the server's time pass.
fn pass(time: Duration) {
    let runtime = Runtime::current();
    runtime.block_on(runtime.spawn(tokio::time::advance(time))).unwrap();
}

/// Waits for what needs no time to pass.
fn at_once(what: &str, mut is_so: impl FnMut() -> bool) {
    let begun = std::time::Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < PATIENCE, "not so: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Writes `drops` one by one, for ever, until the other side hangs up; how long that took by the server's clock.
fn drip(mut stream: impl Caller, first: &[u8], drops: &[u8]) -> Duration {
    let begun = Instant::now();
    let mut over = stream.say(first).is_err();
    while !over && begun.elapsed() < PATIENCE {
        pass(STEP);
        over = stream.say(drops).is_err() || stream.is_over();
    }
    begun.elapsed()
}

#[tokio::test(start_paused = true)]
async fn slow_callers_are_hung_up_on() {
    let server = Server::start(LIMITS);
    let work = spawn_blocking(move || {
        let soon = LIMITS.request * 10;
        for (case, took) in [
            ("no handshake", drip(server.connect(), b"", b"")),
            ("a handshake that stops", drip(server.connect(), &[22, 3, 1, 2, 0, 1], b"")),
            ("no request", {
                let mut stream = server.tls();
                stream.conn.complete_io(&mut stream.sock).unwrap();
                drip(stream, b"", b"")
            }),
            ("headers, one by one", drip(server.tls(), b"POST /echo HTTP/1.1\r\nhost: x\r\n", b"a: b\r\n")),
            (
                "a body, byte by byte",
                drip(server.tls(), b"POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n\r\n", b"x"),
            ),
            ("a body that stops", {
                drip(server.tls(), b"POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n\r\n", b"")
            }),
        ] {
            assert!(took >= LIMITS.request && took < soon, "{case}: {took:?}");
        }
        // Between two requests there is more time, and not for ever.
        let mut stream = server.tls();
        call(&mut stream).unwrap();
        pass(LIMITS.request * 2);
        call(&mut stream).unwrap();
        let took = drip(stream, b"", b"");
        assert!(took >= LIMITS.idle && took < LIMITS.idle * 5, "idle: {took:?}");
        server.stop.cancel();
    });
    work.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn more_connections_than_there_are_places_are_refused() {
    let server = Server::start(LIMITS);
    let work = spawn_blocking(move || {
        let mut one = server.tls();
        call(&mut one).unwrap();
        // The second place is taken by somebody who says nothing. None of the callers has more than its share.
        let silent = server.silent(2, 2, 1).remove(0);
        assert!(call(&mut server.tls_from(3)).is_err(), "a third one was served");
        call(&mut one).unwrap();
        let took = drip(silent, b"", b"");
        assert!(took < LIMITS.request * 10, "{took:?}");
        call(&mut server.tls_from(3)).unwrap();
        server.stop.cancel();
    });
    work.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn one_caller_does_not_get_all_connections() {
    let server = Server::start(Limits { connections: 4, share: 3, ..LIMITS });
    let work = spawn_blocking(move || {
        let silent = server.silent(66, 6, 3);
        call(&mut server.tls_from(2)).unwrap();
        assert!(call(&mut server.tls_from(66)).is_err(), "more than its share");
        drop(silent);
        at_once("its places are free again", || call(&mut server.tls_from(66)).is_ok());
        server.stop.cancel();
    });
    work.await.unwrap();
}

/// A review that is none, of that many bytes; the status of its answer.
fn review(stream: &mut Tls, length: usize) -> std::io::Result<String> {
    write!(stream, "POST /webhook HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n\r\n")?;
    stream.write_all(&vec![b' '; length])?;
    let mut answer = Vec::new();
    while !answer.contains(&b'\n') {
        let mut piece = [0; 512];
        match stream.read(&mut piece)? {
            0 => return Err(std::io::ErrorKind::UnexpectedEof.into()),
            n => answer.extend_from_slice(&piece[..n]),
        }
    }
    Ok(String::from_utf8_lossy(&answer).split(' ').nth(1).unwrap().to_owned())
}

/// Large bodies that come drop by drop: whoever sends many has no more of the server than whoever sends one, and others
/// are answered at once.
#[tokio::test(start_paused = true)]
async fn a_caller_with_many_slow_bodies_keeps_nobody_out() {
    let limits = Limits { connections: 20, share: 10, request: Duration::from_secs(10), ..LIMITS };
    let server = Arc::new(Server::start(limits));
    let slow: Vec<_> = (0..8)
        .map(|_| {
            let server = Arc::clone(&server);
            spawn_blocking(move || {
                let mut stream = server.tls_from(66);
                // It may be hung up on before all of that is taken.
                let mut body =
                    b"POST /webhook HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n".to_vec();
                body.resize(900_000, b' ');
                let mut over = stream.say(&body).is_err();
                at_once("a slow body is hung up on", || {
                    over = over || stream.say(b" ").is_err() || stream.is_over();
                    over
                });
            })
        })
        .collect();
    let others = spawn_blocking(move || {
        at_once("all of them have a place or wait for one", || server.large.load(Ordering::SeqCst) == 8);
        for length in [100, 500_000] {
            assert_eq!(review(&mut server.tls_from(2), length).unwrap(), "400", "none, and looked at");
        }
        // One after the other they have their turn, and time runs for each.
        for _ in 0..(BOUNDS.patience * 2).as_millis() / STEP.as_millis() {
            pass(STEP);
        }
        server
    });
    let server = others.await.unwrap();
    for stream in slow {
        stream.await.unwrap();
    }
    server.stop.cancel();
}
