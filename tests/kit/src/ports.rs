use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::io;
use std::net::TcpListener;

/// The first port that is tried. The kernel gives outgoing connections ports from 32768 on, unless
/// `ip_local_port_range` (ip(7)) differs. No outgoing connection can take a lower port before its user binds
/// it.
const FIRST: u16 = 20_000;
const COUNT: u16 = 12_000;
/// The most ports that are tried.
const TRIES: u16 = 100;

/// Returns a TCP port of this host without a listener at this moment, which no outgoing connection takes.
///
/// # Errors
/// No port is free.
pub fn free_port() -> io::Result<u16> {
    let mut last = io::Error::from(io::ErrorKind::AddrInUse);
    for _ in 0..TRIES {
        match TcpListener::bind(("127.0.0.1", random_port())) {
            Ok(listener) => return Ok(listener.local_addr()?.port()),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Returns a random port: processes that ask at the same time get different ones.
fn random_port() -> u16 {
    // Each hasher has new random keys.
    let random = RandomState::new().build_hasher().finish();
    FIRST + u16::try_from(random % u64::from(COUNT)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn free_ports_differ_and_are_no_ports_of_outgoing_connections() {
        let range = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").unwrap();
        let first_outgoing: u16 = range.split_whitespace().next().unwrap().parse().unwrap();
        let ports: BTreeSet<u16> = (0..20).map(|_| free_port().unwrap()).collect();
        assert!(ports.len() > 15, "{ports:?}");
        assert!(ports.iter().all(|port| (FIRST..first_outgoing).contains(port)), "{ports:?}");
    }
}
