use std::io;
use std::os::fd::AsFd;

use nix::sys::socket::{setsockopt, sockopt};

/// TCP probes an idle peer after so many seconds,
const KEEPALIVE_IDLE_S: u32 = 10;
/// so often,
const KEEPALIVE_INTERVAL_S: u32 = 5;
/// and gives up after so many probes without an answer.
const KEEPALIVE_PROBES: u32 = 4;

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

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

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
}
