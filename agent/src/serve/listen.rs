//! Where the node API is served. All connections to the agent are made here, so that what they have to
//! prove is decided in one place.

use std::fmt;
use std::fs;
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::pin::Pin;
use std::str::FromStr;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio_stream::wrappers::{TcpListenerStream, UnixListenerStream};
use tokio_stream::{Stream, StreamExt};
use tonic::transport::server::Connected;

use crate::serve::config::{absolute, check_tcp};

/// An address as the configuration names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ListenAddress {
    /// A Unix socket, for the same user only.
    Unix(PathBuf),
    /// One address of this host.
    Tcp(SocketAddr),
}

impl FromStr for ListenAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<ListenAddress, String> {
        if let Some(path) = text.strip_prefix("unix:") {
            return absolute(path.into()).map(ListenAddress::Unix);
        }
        let syntax = || format!("{text:?} is neither unix:PATH nor tcp:ADDRESS:PORT");
        let address = text.strip_prefix("tcp:").ok_or_else(syntax)?;
        check_tcp(address.parse().map_err(|_| syntax())?).map(ListenAddress::Tcp)
    }
}

impl fmt::Display for ListenAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ListenAddress::Unix(path) => write!(f, "unix:{}", path.display()),
            ListenAddress::Tcp(address) => write!(f, "tcp:{address}"),
        }
    }
}

/// Connections to any of the addresses, as they come.
pub type Incoming = Pin<Box<dyn Stream<Item = io::Result<Connection>> + Send>>;

/// Binds all `addresses`. A socket that an earlier agent has left is replaced: the caller holds the lock that
/// makes sure that it is none that lives.
///
/// # Errors
/// Names the address.
pub async fn bind(addresses: &[ListenAddress]) -> io::Result<Incoming> {
    let mut incoming: Incoming = Box::pin(tokio_stream::empty());
    for address in addresses {
        let one = bind_one(address).await;
        let one = one.map_err(|error| io::Error::new(error.kind(), format!("{address}: {error}")))?;
        tracing::info!(%address, "listening");
        incoming = Box::pin(incoming.merge(one));
    }
    Ok(incoming)
}

async fn bind_one(address: &ListenAddress) -> io::Result<Incoming> {
    match address {
        ListenAddress::Unix(path) => {
            match fs::remove_file(path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
            let listener = UnixListener::bind(path)?;
            fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
            Ok(Box::pin(UnixListenerStream::new(listener).map(|stream| stream.map(Connection::Unix))))
        }
        ListenAddress::Tcp(tcp) => {
            if !tcp.ip().is_loopback() {
                tracing::warn!(%address, "every client that reaches this address can control this node");
            }
            let listener = TcpListenerStream::new(TcpListener::bind(tcp).await?);
            Ok(Box::pin(listener.map(|stream| {
                let stream = stream?;
                stream.set_nodelay(true)?;
                Ok(Connection::Tcp(stream))
            })))
        }
    }
}

/// A connection of a client.
#[derive(Debug)]
pub enum Connection {
    /// Over a Unix socket.
    Unix(UnixStream),
    /// Over TCP.
    Tcp(TcpStream),
}

impl Connected for Connection {
    type ConnectInfo = ();

    fn connect_info(&self) {}
}

impl AsyncRead for Connection {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Connection::Unix(stream) => Pin::new(stream).poll_read(cx, buffer),
            Connection::Tcp(stream) => Pin::new(stream).poll_read(cx, buffer),
        }
    }
}

impl AsyncWrite for Connection {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Connection::Unix(stream) => Pin::new(stream).poll_write(cx, bytes),
            Connection::Tcp(stream) => Pin::new(stream).poll_write(cx, bytes),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Connection::Unix(stream) => Pin::new(stream).poll_flush(cx),
            Connection::Tcp(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Connection::Unix(stream) => Pin::new(stream).poll_shutdown(cx),
            Connection::Tcp(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}
