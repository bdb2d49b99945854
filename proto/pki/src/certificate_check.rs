//! Connections that end once their peer is trusted no more: a handshake says nothing about the hours after
//! it.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use rustls::pki_types::CertificateDer;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Sleep;
use tonic::transport::server::Connected;

use crate::certificate::Certificate;
use crate::connection_slots::{CertifiedConnection, UncertifiedSlot};
use crate::credentials::{Credentials, now};
use crate::role::Role;
use crate::trust::Usage;

/// The client of a connection, as a request's extensions have it.
#[derive(Clone, Debug)]
pub struct TlsPeer {
    /// The address of the client.
    pub address: SocketAddr,
    /// The certificate of the client; none if the client has shown none.
    pub certificate: Option<Arc<Certificate>>,
}

impl TlsPeer {
    /// Returns the role of the client, if the client has shown a certificate.
    #[must_use]
    pub fn role(&self) -> Option<&Role> {
        self.certificate.as_ref().map(|certificate| &certificate.name.role)
    }
}

/// Checks one connection.
#[derive(Debug)]
pub(crate) struct CertificateCheck {
    pub(crate) credentials: Credentials,
    pub(crate) leaf: CertificateDer<'static>,
    pub(crate) usage: Usage,
    pub(crate) expected: Option<Role>,
    /// Seconds since 1970 until which the certificate is valid.
    pub(crate) not_after: u64,
    /// The replacement that was checked last, if any.
    pub(crate) generation: Option<u64>,
    /// Keeps the address of a client known.
    pub(crate) _friend: Option<CertifiedConnection>,
}

impl CertificateCheck {
    /// Costs a read of the clock, and after a replacement a verification.
    fn check(&mut self) -> io::Result<()> {
        let now = now();
        let generation = self.credentials.generation();
        if Some(generation) == self.generation && now.as_secs() <= self.not_after {
            return Ok(());
        }
        let verified = self.credentials.verify(&self.leaf, self.usage, self.expected.as_ref(), now);
        verified.map_err(|error| io::Error::new(io::ErrorKind::PermissionDenied, error))?;
        self.generation = Some(generation);
        Ok(())
    }
}

/// The limit of a connection.
#[derive(Debug)]
pub(crate) enum Limit {
    /// The peer has shown a certificate.
    Certificate(Box<CertificateCheck>),
    /// The peer has shown none: such connections are few and short.
    Stranger { until: Instant, timer: Pin<Box<Sleep>>, _held: UncertifiedSlot },
}

/// A connection whose peer is checked whenever it receives data.
#[derive(Debug)]
pub struct CheckedConnection<T> {
    pub(crate) stream: T,
    pub(crate) limit: Limit,
    pub(crate) peer: TlsPeer,
}

impl<T> CheckedConnection<T> {
    fn check(&mut self) -> io::Result<()> {
        match &mut self.limit {
            Limit::Certificate(check) => check.check(),
            Limit::Stranger { until, .. } if Instant::now() > *until => Err(open_for_too_long()),
            Limit::Stranger { .. } => Ok(()),
        }
    }

    /// The other side.
    pub fn peer(&self) -> &TlsPeer {
        &self.peer
    }
}

fn open_for_too_long() -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, "a connection without a certificate was open for too long")
}

impl<T: AsyncRead + Unpin> AsyncRead for CheckedConnection<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let filled_before = buffer.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(context, buffer);
        if matches!(read, Poll::Ready(Ok(()))) {
            // After the read: data that was under way while the peer lost its trust does not count.
            if let Err(error) = self.check() {
                buffer.set_filled(filled_before);
                return Poll::Ready(Err(error));
            }
        }
        // A client without a certificate that sends nothing, not even the first bytes of HTTP, would keep its
        // place.
        if read.is_pending()
            && let Limit::Stranger { timer, .. } = &mut self.limit
            && timer.as_mut().poll(context).is_ready()
        {
            return Poll::Ready(Err(open_for_too_long()));
        }
        read
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for CheckedConnection<T> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        data: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.check()?;
        Pin::new(&mut self.stream).poll_write(context, data)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

impl<T> Connected for CheckedConnection<T> {
    type ConnectInfo = TlsPeer;
    fn connect_info(&self) -> TlsPeer {
        self.peer.clone()
    }
}
