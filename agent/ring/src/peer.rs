use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, AsRawFd};

use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, SockaddrStorage, bind, listen, setsockopt, socket, sockopt,
};

/// The idle time after which TCP probes a peer.
const KEEPALIVE_IDLE_S: u32 = 10;
/// The time between two probes.
const KEEPALIVE_INTERVAL_S: u32 = 5;
/// The number of probes without an answer after which TCP ends the connection.
const KEEPALIVE_PROBES: u32 = 4;
/// Connections that may wait to be accepted.
const BACKLOG: i32 = 128;

/// Sets up a TCP connection. Small frames are sent at once, and a peer whose host is gone is noticed within
/// 30 s although nothing is sent to it. TCP_USER_TIMEOUT is not set: it would also end a connection to a peer
/// that does not read for a while.
///
/// # Errors
/// The error of setsockopt.
pub fn set_up_tcp(socket: &impl AsFd) -> io::Result<()> {
    setsockopt(socket, sockopt::TcpNoDelay, &true)?;
    setsockopt(socket, sockopt::KeepAlive, &true)?;
    setsockopt(socket, sockopt::TcpKeepIdle, &KEEPALIVE_IDLE_S)?;
    setsockopt(socket, sockopt::TcpKeepInterval, &KEEPALIVE_INTERVAL_S)?;
    setsockopt(socket, sockopt::TcpKeepCount, &KEEPALIVE_PROBES)?;
    Ok(())
}

/// Returns true if the kernel encrypts the data of this socket (kTLS).
pub(crate) fn is_encrypted(socket: &impl AsFd) -> bool {
    let mut name = [0_u8; 16];
    let mut length = libc::socklen_t::try_from(name.len()).unwrap_or(0);
    // SAFETY: name and length are valid for the call, and the kernel writes no more than length bytes.
    let result = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_TCP,
            libc::TCP_ULP,
            name.as_mut_ptr().cast(),
            &raw mut length,
        )
    };
    // An error: no TCP, or no protocol above it.
    result == 0 && name.starts_with(b"tls")
}

/// Listens on `address`, even while this host does not have it. A process has to start while a link is down,
/// or while a new IPv6 address is still checked for duplicates. Connections arrive as soon as the host has
/// the address.
///
/// # Errors
/// The error of the system, for instance for a port that another process uses.
pub fn bind_tcp(address: SocketAddr) -> io::Result<TcpListener> {
    let family = if address.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    let listener = socket(family, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    // As TcpListener::bind does: connections of an earlier process do not hold the port.
    setsockopt(&listener, sockopt::ReuseAddr, &true)?;
    // Of IPv6 sockets too: net/ipv6/ipv6_sockglue.c passes the level on.
    setsockopt(&listener, sockopt::IpFreebind, &true)?;
    bind(listener.as_raw_fd(), &SockaddrStorage::from(address))?;
    listen(&listener, Backlog::new(BACKLOG)?)?;
    Ok(listener.into())
}

#[cfg(test)]
mod tests {
    use std::net::TcpStream;

    use nix::sys::socket::getsockopt;

    use super::*;

    #[test]
    fn an_idle_peer_is_probed() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        set_up_tcp(&stream).unwrap();
        assert!(stream.nodelay().unwrap());
        assert!(getsockopt(&stream, sockopt::KeepAlive).unwrap());
        let idle_s = getsockopt(&stream, sockopt::TcpKeepIdle).unwrap();
        let probing_s = KEEPALIVE_INTERVAL_S * getsockopt(&stream, sockopt::TcpKeepCount).unwrap();
        assert_eq!(idle_s + probing_s, 30);
    }

    #[test]
    fn a_plain_socket_is_not_encrypted() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        assert!(!is_encrypted(&stream));
        assert!(!is_encrypted(&std::os::unix::net::UnixStream::pair().unwrap().0));
        // Needs a kernel with the module.
        if setsockopt(&stream, sockopt::TcpUlp::default(), b"tls").is_ok() {
            assert!(is_encrypted(&stream));
        }
    }

    #[test]
    fn listens_on_an_address_that_the_host_does_not_have() {
        // Addresses of documentation (RFC 5737, RFC 3849): no host has them.
        for address in ["192.0.2.77:0", "[2001:db8::77]:0"] {
            let address: SocketAddr = address.parse().unwrap();
            assert!(TcpListener::bind(address).is_err(), "this host has {address}");
            assert_eq!(bind_tcp(address).unwrap().local_addr().unwrap().ip(), address.ip());
        }
    }

    #[test]
    fn a_port_is_given_once() {
        let first = bind_tcp("127.0.0.1:0".parse().unwrap()).unwrap();
        let address = first.local_addr().unwrap();
        assert_eq!(bind_tcp(address).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        drop(first);
        bind_tcp(address).unwrap();
    }
}
