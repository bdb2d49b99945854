//! Addresses of the node API. The agent requires TLS (`tls`) on an address that other hosts can reach.
//! Connections without TLS come from this host: root at a Unix socket, every user at a loopback address.

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

use crate::serve::paths::absolute;

/// An address as the configuration names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ListenAddress {
    /// A Unix socket, for the same user only.
    Unix(PathBuf),
    /// An address of this host, for this host only, without TLS.
    Tcp(SocketAddr),
    /// An address of this host, with TLS.
    Tls(SocketAddr),
}

impl FromStr for ListenAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<ListenAddress, String> {
        if let Some(path) = text.strip_prefix("unix:") {
            return absolute(path.into()).map(ListenAddress::Unix);
        }
        let syntax = || format!("{text:?} is none of unix:PATH, tcp:ADDRESS:PORT and tls:ADDRESS:PORT");
        let (kind, address) = text.split_once(':').ok_or_else(syntax)?;
        let address = check_tcp(address.parse().map_err(|_| syntax())?)?;
        match kind {
            "tls" => Ok(ListenAddress::Tls(address)),
            "tcp" if address.ip().to_canonical().is_loopback() => Ok(ListenAddress::Tcp(address)),
            "tcp" => Ok(ListenAddress::Tls(address)),
            _ => Err(syntax()),
        }
    }
}

impl fmt::Display for ListenAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ListenAddress::Unix(path) => write!(f, "unix:{}", path.display()),
            ListenAddress::Tcp(address) => write!(f, "tcp:{address}"),
            ListenAddress::Tls(address) => write!(f, "tls:{address}"),
        }
    }
}

/// Returns an error unless the API may be served at `address`.
fn check_tcp(address: SocketAddr) -> Result<SocketAddr, String> {
    if address.ip().is_unspecified() || address.ip().is_multicast() {
        return Err(format!("{address}: name one address of this host, for instance 127.0.0.1"));
    }
    Ok(address)
}

/// Connections without TLS to any of the addresses, as they come.
pub type PlainIncoming = Pin<Box<dyn Stream<Item = io::Result<ClientStream>> + Send>>;

/// Binds all `addresses` without TLS. A socket that an earlier agent has left is replaced. The caller holds
/// the lock that makes sure that no running agent has the socket.
///
/// # Errors
/// Names the address.
pub async fn bind(addresses: &[ListenAddress]) -> io::Result<PlainIncoming> {
    let mut incoming: PlainIncoming = Box::pin(tokio_stream::empty());
    for address in addresses.iter().filter(|address| !matches!(address, ListenAddress::Tls(_))) {
        let one = bind_one(address).await;
        let one = one.map_err(|error| io::Error::new(error.kind(), format!("{address}: {error}")))?;
        tracing::info!(%address, "listening");
        incoming = Box::pin(incoming.merge(one));
    }
    Ok(incoming)
}

async fn bind_one(address: &ListenAddress) -> io::Result<PlainIncoming> {
    match address {
        ListenAddress::Unix(path) => {
            match fs::remove_file(path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
            let listener = UnixListener::bind(path)?;
            fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
            Ok(Box::pin(UnixListenerStream::new(listener).map(|stream| stream.map(ClientStream::Unix))))
        }
        ListenAddress::Tls(_) => Ok(Box::pin(tokio_stream::empty())),
        ListenAddress::Tcp(tcp) => {
            let listener = TcpListenerStream::new(TcpListener::bind(tcp).await?);
            Ok(Box::pin(listener.map(|stream| {
                let stream = stream?;
                stream.set_nodelay(true)?;
                Ok(ClientStream::Tcp(stream))
            })))
        }
    }
}

/// A connection of a client.
#[derive(Debug)]
pub enum ClientStream {
    /// Over a Unix socket.
    Unix(UnixStream),
    /// Over TCP.
    Tcp(TcpStream),
}

impl Connected for ClientStream {
    type ConnectInfo = ();

    fn connect_info(&self) {}
}

impl AsyncRead for ClientStream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            ClientStream::Unix(stream) => Pin::new(stream).poll_read(cx, buffer),
            ClientStream::Tcp(stream) => Pin::new(stream).poll_read(cx, buffer),
        }
    }
}

impl AsyncWrite for ClientStream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            ClientStream::Unix(stream) => Pin::new(stream).poll_write(cx, bytes),
            ClientStream::Tcp(stream) => Pin::new(stream).poll_write(cx, bytes),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            ClientStream::Unix(stream) => Pin::new(stream).poll_flush(cx),
            ClientStream::Tcp(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            ClientStream::Unix(stream) => Pin::new(stream).poll_shutdown(cx),
            ClientStream::Tcp(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_that_other_hosts_reach_has_tls() {
        let shown = |text: &str| text.parse::<ListenAddress>().map(|address| address.to_string());
        for (text, wanted) in [
            ("unix:/run/a.sock", "unix:/run/a.sock"),
            ("tcp:127.0.0.1:9501", "tcp:127.0.0.1:9501"),
            ("tcp:[::1]:9501", "tcp:[::1]:9501"),
            ("tcp:[::ffff:127.0.0.1]:9501", "tcp:[::ffff:127.0.0.1]:9501"),
            ("tcp:10.0.0.1:9501", "tls:10.0.0.1:9501"),
            ("tcp:[fd00::1]:9501", "tls:[fd00::1]:9501"),
            ("tls:127.0.0.1:9501", "tls:127.0.0.1:9501"),
        ] {
            assert_eq!(shown(text), Ok(wanted.to_owned()));
        }
        for bad in ["tls:0.0.0.0:1", "tcp:10.0.0.1", "http:10.0.0.1:1", "10.0.0.1:1", ""] {
            assert!(shown(bad).is_err(), "{bad}");
        }
    }
}
