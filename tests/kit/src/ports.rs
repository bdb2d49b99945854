use std::io;
use std::net::TcpListener;

/// Returns a TCP port of this host without a listener at this moment.
///
/// # Errors
/// No port is free.
pub fn free_port() -> io::Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}
