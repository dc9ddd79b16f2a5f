//! Slow and many callers, over real connections.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Instant;

use axum::routing::post;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

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

/// A whole call; the body is echoed.
const CALL: &[u8] = b"POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\nhi";

struct Server {
    address: SocketAddr,
    client: Arc<ClientConfig>,
    stop: CancellationToken,
}

type Tls = StreamOwned<ClientConnection, TcpStream>;

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
        let routes = webhook.routes_within(BOUNDS).merge(echo);
        tokio::spawn(serve_on(listener, routes, identity, limits, stop.clone()));
        Self { address, client: Arc::new(client), stop }
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
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        stream
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

/// Writes `drops` one by one, for ever, until the other side hangs up; how long that took.
fn drip(mut stream: impl Read + Write, first: &[u8], drops: &[u8]) -> Duration {
    let begun = Instant::now();
    let patience = Duration::from_secs(20);
    let mut failed = stream.write_all(first).and_then(|()| stream.flush()).is_err();
    while !failed && begun.elapsed() < patience {
        std::thread::sleep(Duration::from_millis(50));
        failed = stream.write_all(drops).and_then(|()| stream.flush()).is_err();
        if drops.is_empty() {
            // Nothing more is sent: the end shows to a reader only.
            failed = matches!(stream.read(&mut [0; 64]), Ok(0) | Err(_));
        }
    }
    begun.elapsed()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slow_callers_are_hung_up_on() {
    let server = Server::start(LIMITS);
    let work = tokio::task::spawn_blocking(move || {
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
            assert!(took >= LIMITS.request / 2 && took < soon, "{case}: {took:?}");
        }
        // Between two requests there is more time, and not for ever.
        let mut stream = server.tls();
        call(&mut stream).unwrap();
        std::thread::sleep(LIMITS.request * 2);
        call(&mut stream).unwrap();
        let took = drip(stream, b"", b"");
        assert!(took >= LIMITS.idle / 2 && took < LIMITS.idle * 8, "idle: {took:?}");
        server.stop.cancel();
    });
    work.await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn more_connections_than_there_are_places_are_refused() {
    let server = Server::start(LIMITS);
    let work = tokio::task::spawn_blocking(move || {
        let (mut one, silent) = (server.tls(), server.connect());
        call(&mut one).unwrap();
        // The second place is taken by somebody who says nothing.
        std::thread::sleep(LIMITS.request / 4);
        assert!(call(&mut server.tls()).is_err(), "a third one was served");
        call(&mut one).unwrap();
        let took = drip(silent, b"", b"");
        assert!(took < LIMITS.request * 10, "{took:?}");
        call(&mut server.tls()).unwrap();
        server.stop.cancel();
    });
    work.await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_caller_does_not_get_all_connections() {
    let server = Server::start(Limits { connections: 4, share: 3, ..LIMITS });
    let work = tokio::task::spawn_blocking(move || {
        let silent: Vec<_> = (0..6).map(|_| server.connect_from(66)).collect();
        std::thread::sleep(LIMITS.request / 4);
        call(&mut server.tls_from(2)).unwrap();
        assert!(call(&mut server.tls_from(66)).is_err(), "more than its share");
        drop(silent);
        std::thread::sleep(LIMITS.request / 4);
        call(&mut server.tls_from(66)).unwrap();
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
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_caller_with_many_slow_bodies_keeps_nobody_out() {
    let server = Arc::new(Server::start(Limits {
        connections: 20,
        share: 10,
        request: Duration::from_secs(10),
        ..LIMITS
    }));
    let slow: Vec<_> = (0..8)
        .map(|_| {
            let server = Arc::clone(&server);
            tokio::task::spawn_blocking(move || {
                let mut stream = server.tls_from(66);
                let head = "POST /webhook HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n";
                stream.write_all(head.as_bytes()).unwrap();
                stream.write_all(&vec![b' '; 900_000]).and_then(|()| stream.flush()).unwrap();
                drip(stream, b"", b" ")
            })
        })
        .collect();
    tokio::time::sleep(BOUNDS.reading / 3).await;
    let others = tokio::task::spawn_blocking(move || {
        for length in [100, 500_000] {
            let begun = Instant::now();
            assert_eq!(review(&mut server.tls_from(2), length).unwrap(), "400", "none, and looked at");
            assert!(begun.elapsed() < BOUNDS.reading, "{length}: {:?}", begun.elapsed());
        }
        server.stop.cancel();
    });
    others.await.unwrap();
    for stream in slow {
        // One after the other they have their turn, and time runs for each.
        let took = stream.await.unwrap();
        assert!(took < BOUNDS.patience * 2, "{took:?}");
    }
}
