//! Makes connections for tonic clients: plain to this host, TLS to every other.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin as StdPin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use thiserror::Error;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpStream, lookup_host};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tonic::codegen::http::Uri;
use tonic::codegen::{BoxFuture, Service};

use crate::certificate::Certificate;
use crate::certificate_check::{CertificateCheck, CheckedConnection, Limit, TlsPeer};
use crate::credentials::Credentials;
use crate::pinned::enrolment_config;
use crate::role::Role;
use crate::trust::{Pin, Usage};

/// Addresses of one name that are tried.
const ADDRESSES_MAX: usize = 8;
/// The longest that one address may take to accept, and then to shake hands. An address that is silent must
/// not use up the time of the others.
const ADDRESS_LIMIT: Duration = Duration::from_secs(3);
const PORT: u16 = 80;

/// A connection cannot be made.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum EndpointError {
    /// The text is not an address.
    #[error("{0} has no host: use HOST:PORT")]
    NoHost(Uri),
    /// DNS does not know it.
    #[error("cannot resolve {host}: {error}")]
    Resolve {
        /// The host name of the server.
        host: String,
        /// The error of the resolver.
        error: io::Error,
    },
    /// DNS knows the name, without an address.
    #[error("{0} has no address")]
    NoAddress(String),
    /// The host does not accept connections.
    #[error("cannot connect to {address}: {error}")]
    Connect {
        /// The resolved address of the server.
        address: SocketAddr,
        /// The error of the system.
        error: io::Error,
    },
    /// The other side has another identity, or refuses ours.
    #[error("cannot connect to {address} with TLS: {error}")]
    Handshake {
        /// The resolved address of the server.
        address: SocketAddr,
        /// The error of TLS.
        error: io::Error,
    },
    /// An address of another host without a certificate.
    #[error(
        "{0} is not an address of this host, and this program has no certificate to connect with TLS: {1}"
    )]
    NoIdentity(SocketAddr, &'static str),
    /// Never happens with ring.
    #[error("cannot configure TLS: {0}")]
    Config(#[from] rustls::Error),
}

/// The checks of a connection to another host.
#[derive(Clone)]
enum Mode {
    /// The peer has a certificate of this role.
    Role { credentials: Credentials, expected: Role, config: Arc<ClientConfig> },
    /// The peer is a controller whose CA has a pin.
    Pinned(Arc<ClientConfig>),
    /// None: connections to other hosts are refused, with this remedy.
    Refused(&'static str),
}

/// A connector for `Endpoint::connect_with_connector`. Give the endpoint a URI with the scheme http.
#[derive(Clone)]
pub struct Connector {
    mode: Mode,
    always_tls: bool,
}

impl std::fmt::Debug for Connector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Connector").field("always_tls", &self.always_tls).finish_non_exhaustive()
    }
}

impl Connector {
    /// Connects to a server of the role `expected` with the certificate in `credentials`.
    ///
    /// # Errors
    /// [`rustls::Error`] never happens with ring.
    pub fn new(credentials: &Credentials, expected: Role) -> Result<Connector, rustls::Error> {
        let config = credentials.client_config(expected.clone())?;
        let mode = Mode::Role { credentials: credentials.clone(), expected, config };
        Ok(Connector { mode, always_tls: false })
    }

    /// Connects to a controller whose CA has this pin, without a certificate, always with TLS.
    ///
    /// # Errors
    /// [`rustls::Error`] never happens with ring.
    pub fn pinned(pin: Pin) -> Result<Connector, rustls::Error> {
        Ok(Connector { mode: Mode::Pinned(enrolment_config(pin)?), always_tls: true })
    }

    /// Connects to this host only. The error for other hosts ends with `remedy`.
    #[must_use]
    pub fn loopback_only(remedy: &'static str) -> Connector {
        Connector { mode: Mode::Refused(remedy), always_tls: false }
    }

    /// Uses TLS for addresses of this host too.
    #[must_use]
    pub fn always_tls(self) -> Connector {
        Connector { always_tls: true, ..self }
    }

    /// Connects to the host and port of `uri`.
    ///
    /// # Errors
    /// [`EndpointError`] of the last address that was tried.
    pub async fn connect(&self, uri: &Uri) -> Result<ClientConnection, EndpointError> {
        let host = uri.host().ok_or_else(|| EndpointError::NoHost(uri.clone()))?;
        let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
        let port = uri.port_u16().unwrap_or(PORT);
        // The name is resolved first: "localhost" counts as this host only if it is an address of it.
        let found = lookup_host((host.as_str(), port)).await;
        let found = found.map_err(|error| EndpointError::Resolve { host: host.clone(), error })?;
        let mut result = Err(EndpointError::NoAddress(host.clone()));
        for address in found.take(ADDRESSES_MAX) {
            result = self.connect_to(address).await;
            if result.is_ok() {
                break;
            }
        }
        result
    }

    async fn connect_to(&self, address: SocketAddr) -> Result<ClientConnection, EndpointError> {
        let is_plain = !self.always_tls && address.ip().to_canonical().is_loopback();
        let config = match &self.mode {
            _ if is_plain => None,
            Mode::Role { credentials, config, .. } if credentials.current().identity.is_some() => {
                Some(config)
            }
            Mode::Role { .. } => {
                return Err(EndpointError::NoIdentity(address, "enrol it first"));
            }
            Mode::Pinned(config) => Some(config),
            Mode::Refused(remedy) => return Err(EndpointError::NoIdentity(address, remedy)),
        };
        let failed = |error| EndpointError::Connect { address, error };
        let stream = limited(TcpStream::connect(address)).await.map_err(failed)?;
        stream.set_nodelay(true).map_err(failed)?;
        let Some(config) = config else { return Ok(ClientConnection::Plain(stream)) };
        let shaking = TlsConnector::from(Arc::clone(config)).connect(ServerName::from(address.ip()), stream);
        let shaken = limited(shaking).await;
        let stream =
            shaken.map_err(|error| EndpointError::Handshake { address, error: plain_words(error) })?;
        self.checked(stream, address)
    }

    fn checked(
        &self,
        stream: TlsStream<TcpStream>,
        address: SocketAddr,
    ) -> Result<ClientConnection, EndpointError> {
        let Mode::Role { credentials, expected, .. } = &self.mode else {
            return Ok(ClientConnection::Pinned(Box::new(stream)));
        };
        let failed = |error| EndpointError::Handshake { address, error };
        let leaf = stream.get_ref().1.peer_certificates().and_then(<[_]>::first).cloned();
        let leaf = leaf.ok_or_else(|| failed(io::Error::other("the server has no certificate")))?;
        let certificate = Certificate::from_der(&leaf).map_err(|error| failed(io::Error::other(error)))?;
        let check = CertificateCheck {
            credentials: credentials.clone(),
            leaf: leaf.into_owned(),
            usage: Usage::Server,
            expected: Some(expected.clone()),
            not_after: certificate.not_after,
            generation: None,
            _friend: None,
        };
        let peer = TlsPeer { address, certificate: Some(Arc::new(certificate)) };
        let limit = Limit::Certificate(Box::new(check));
        Ok(ClientConnection::Tls(Box::new(CheckedConnection { stream, limit, peer })))
    }
}

/// The reason of this crate without the words of rustls around it.
fn plain_words(error: io::Error) -> io::Error {
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
    match inner {
        Some(rustls::Error::Other(reason)) => io::Error::new(error.kind(), reason.to_string()),
        _ => error,
    }
}

async fn limited<T>(step: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    let ended = tokio::time::timeout(ADDRESS_LIMIT, step).await;
    ended.unwrap_or_else(|_| Err(io::Error::new(io::ErrorKind::TimedOut, "no answer in time")))
}

impl Service<Uri> for Connector {
    type Response = TokioIo<ClientConnection>;
    type Error = EndpointError;
    type Future = BoxFuture<TokioIo<ClientConnection>, EndpointError>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), EndpointError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let connector = self.clone();
        Box::pin(async move { connector.connect(&uri).await.map(TokioIo::new) })
    }
}

/// The stream of a client of the gRPC interfaces.
#[derive(Debug)]
pub enum ClientConnection {
    /// To this host.
    Plain(TcpStream),
    /// To a server whose CA has the pin of a join token.
    Pinned(Box<TlsStream<TcpStream>>),
    /// To a server with a certificate of the expected role.
    Tls(Box<CheckedConnection<TlsStream<TcpStream>>>),
}

macro_rules! delegate {
    ($self:ident, $stream:ident => $call:expr) => {
        match $self.get_mut() {
            ClientConnection::Plain($stream) => {
                let $stream = StdPin::new($stream);
                $call
            }
            ClientConnection::Pinned($stream) => {
                let $stream = StdPin::new($stream.as_mut());
                $call
            }
            ClientConnection::Tls($stream) => {
                let $stream = StdPin::new($stream.as_mut());
                $call
            }
        }
    };
}

impl AsyncRead for ClientConnection {
    fn poll_read(
        self: StdPin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        delegate!(self, stream => stream.poll_read(context, buffer))
    }
}

impl AsyncWrite for ClientConnection {
    fn poll_write(
        self: StdPin<&mut Self>,
        context: &mut Context<'_>,
        data: &[u8],
    ) -> Poll<io::Result<usize>> {
        delegate!(self, stream => stream.poll_write(context, data))
    }

    fn poll_flush(self: StdPin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        delegate!(self, stream => stream.poll_flush(context))
    }

    fn poll_shutdown(self: StdPin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        delegate!(self, stream => stream.poll_shutdown(context))
    }
}
