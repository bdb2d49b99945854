//! Connections of strangers, in waves that are small enough for the ports of the sources.

use std::io::Write;
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::os::fd::AsRawFd;
use std::process::Command;
use std::thread;

use anyhow::{Context, Result, ensure};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, SockaddrIn, bind, connect, socket};
use shorthorn_tests::network::address;

use crate::hosts::Hosts;

/// The connections to all ports together.
pub const STRAYS: usize = 10_000;
const WAVES: usize = 10;
/// The addresses of the first host in addition to its own.
const OTHER_SOURCES: [Ipv4Addr; 3] =
    [Ipv4Addr::new(10, 77, 0, 101), Ipv4Addr::new(10, 77, 0, 102), Ipv4Addr::new(10, 77, 0, 103)];
/// Strays say one of these after the other.
const WORDS: [&[u8]; 4] = [b"", b"\x16\x03\x01\x02\x00\x01\x00", b"GET / HTTP/1.1\r\n\r\n", &[0xa5; 256]];

/// Gives the first host further addresses.
pub fn add_sources(hosts: &Hosts) -> Result<()> {
    hosts.inside(0, || {
        for source in OTHER_SOURCES {
            let mut add = Command::new("ip");
            add.args(["address", "add", &format!("{source}/24"), "dev", "eth0"]);
            ensure!(add.status()?.success(), "{source} cannot be added");
        }
        Ok(())
    })
}

/// Makes all connections from the first host, and calls `between` after each wave. Returns the last wave,
/// which is still open as far as the other side has not closed it.
pub fn all(
    hosts: &Hosts,
    ports: &[SocketAddr],
    mut between: impl FnMut() -> Result<()>,
) -> Result<Vec<TcpStream>> {
    allow_descriptors()?;
    let own: Ipv4Addr = address(0).parse()?;
    let sources = [&[own][..], &OTHER_SOURCES].concat();
    let pairs: Vec<(Ipv4Addr, SocketAddr)> =
        ports.iter().flat_map(|port| sources.iter().map(|source| (*source, *port))).collect();
    let of_pair = STRAYS / WAVES / pairs.len();
    ensure!(of_pair * pairs.len() * WAVES == STRAYS, "{STRAYS} connections cannot be divided into the waves");
    let mut open = Vec::new();
    for _ in 0..WAVES {
        drop(std::mem::take(&mut open));
        open = hosts.inside(0, || wave(&pairs, of_pair))?;
        ensure!(open.len() * WAVES == STRAYS, "a wave of {}", open.len());
        between()?;
    }
    Ok(open)
}

/// Raises the limit of open files to the highest that is permitted.
fn allow_descriptors() -> Result<()> {
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    ensure!(hard >= 4096, "the limit of open files is {hard}: raise it (ulimit -Hn)");
    setrlimit(Resource::RLIMIT_NOFILE, soft.max(hard), hard).context("raising the limit of open files")
}

fn wave(pairs: &[(Ipv4Addr, SocketAddr)], of_pair: usize) -> Result<Vec<TcpStream>> {
    thread::scope(|scope| {
        let make = |pair: &(Ipv4Addr, SocketAddr)| {
            let (source, port) = *pair;
            scope.spawn(move || (0..of_pair).map(|number| stray(source, port, number)).collect())
        };
        let threads: Vec<thread::ScopedJoinHandle<'_, Result<Vec<TcpStream>>>> =
            pairs.iter().map(make).collect();
        let mut open = Vec::new();
        for thread in threads {
            open.extend(thread.join().map_err(|_| anyhow::anyhow!("the thread has panicked"))??);
        }
        Ok(open)
    })
}

/// Connects from `source`, and says a word that no protocol of a port continues.
fn stray(source: Ipv4Addr, port: SocketAddr, number: usize) -> Result<TcpStream> {
    let SocketAddr::V4(port) = port else { anyhow::bail!("{port} is not IPv4") };
    let stream = socket(AddressFamily::Inet, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    bind(stream.as_raw_fd(), &SockaddrIn::from(std::net::SocketAddrV4::new(source, 0)))?;
    connect(stream.as_raw_fd(), &SockaddrIn::from(port)).with_context(|| format!("{source} to {port}"))?;
    let mut stream = TcpStream::from(stream);
    // The other side may have closed it already.
    let _ = stream.write_all(WORDS[number % WORDS.len()]);
    Ok(stream)
}
