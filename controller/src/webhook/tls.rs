//! The webhook's TLS side: a certificate that can be exchanged while the server runs, and the server.

use std::fmt;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum_server::Handle;
use axum_server::tls_rustls::{RustlsAcceptor, RustlsConfig};
use parking_lot::RwLock;
use rustls::ServerConfig;
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use tokio_util::sync::CancellationToken;

use super::pace::{Limits, Paced};
use crate::error::Error;

/// What errors call it.
const WHAT: &str = "webhook";

/// How long open calls may take to end when the server stops: the API server waits 10 s for a webhook.
const DRAIN: Duration = Duration::from_secs(10);

/// Bytes of a connection that are read before somebody asks for them, headers included; hyper's own bound is 400 KiB,
/// which 512 connections would make 200 MiB.
const READ_AHEAD: usize = 32 << 10;

/// The certificate shown to callers; none at first.
#[derive(Clone, Default)]
pub struct Identity {
    current: Arc<RwLock<Option<Arc<CertifiedKey>>>>,
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Identity").field("loaded", &self.loaded()).finish()
    }
}

impl Identity {
    /// Whether there is a certificate to show.
    #[must_use]
    pub fn loaded(&self) -> bool {
        self.current.read().is_some()
    }

    /// Shows this certificate from now on. Connections that are open keep theirs.
    ///
    /// # Errors
    /// [`Error::CertificateBad`] when the two do not make a pair; the one before stays.
    pub fn load(&self, secret: &str, certificate: &[u8], key: &[u8]) -> Result<(), Error> {
        let bad = |key, reason: String| Error::CertificateBad { secret: secret.to_owned(), key, reason };
        let chain: Vec<CertificateDer<'static>> = CertificateDer::pem_slice_iter(certificate)
            .collect::<Result<_, _>>()
            .map_err(|error| bad("tls.crt", error.to_string()))?;
        let key = PrivateKeyDer::from_pem_slice(key).map_err(|error| bad("tls.key", error.to_string()))?;
        let pair = CertifiedKey::from_der(chain, key, &ring::default_provider())
            .map_err(|error| bad("tls.crt", error.to_string()))?;
        *self.current.write() = Some(Arc::new(pair));
        Ok(())
    }
}

impl ResolvesServerCert for Identity {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        self.current.read().clone()
    }
}

/// Serves `routes` over TLS until `stop`.
///
/// # Errors
/// [`Error::Listen`] when the port is taken, [`Error::Served`] when the server breaks.
pub async fn serve(
    address: SocketAddr,
    routes: Router,
    identity: Identity,
    stop: CancellationToken,
) -> Result<(), Error> {
    let listener = TcpListener::bind(address).map_err(|source| Error::Listen {
        what: WHAT,
        address: address.to_string(),
        source,
    })?;
    serve_on(listener, routes, identity, Limits::default(), stop).await
}

async fn serve_on(
    listener: TcpListener,
    routes: Router,
    identity: Identity,
    limits: Limits,
    stop: CancellationToken,
) -> Result<(), Error> {
    let address = listener.local_addr().map_or_else(|error| error.to_string(), |address| address.to_string());
    let listen = |source| Error::Listen { what: WHAT, address: address.clone(), source };
    let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| listen(std::io::Error::other(error)))?
        .with_no_client_auth()
        .with_cert_resolver(Arc::new(identity));
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    listener.set_nonblocking(true).map_err(listen)?;
    let handle = Handle::new();
    let acceptor =
        RustlsAcceptor::new(RustlsConfig::from_config(Arc::new(config))).handshake_timeout(limits.request);
    let mut server = axum_server::from_tcp(listener)
        .map_err(listen)?
        .acceptor(Paced::new(acceptor, limits))
        .handle(handle.clone());
    server.http_builder().http1().max_buf_size(READ_AHEAD);
    let mut serving =
        std::pin::pin!(server.serve(routes.into_make_service_with_connect_info::<SocketAddr>()));
    // A server that ends by itself is an error at once, not when everything stops.
    let ended = tokio::select! {
        ended = &mut serving => ended,
        () = stop.cancelled() => {
            handle.graceful_shutdown(Some(DRAIN));
            serving.await
        }
    };
    ended.map_err(|source| Error::Served { what: WHAT, address, source })
}

#[cfg(test)]
mod tests;
