//! A network between VMs, without any set-up on the host.

use std::net::{Ipv4Addr, UdpSocket};
use std::process;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use anyhow::{Context, Result};

/// An Ethernet segment between the VMs that were started with a clone of this value.
/// Each of them gets an address 10.54.7.N/24 on its `eth1`.
#[derive(Debug, Clone)]
pub struct Lan {
    group: Ipv4Addr,
    port: u16,
    members: Arc<AtomicU8>,
}

impl Lan {
    /// Creates a segment that no other one on this machine is joined to.
    pub fn new() -> Result<Self> {
        // QEMU sends frames as multicast datagrams. A port that is free now, with a group made from the
        // process id, collides with no other test.
        let probe = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).context("no free UDP port")?;
        let port = probe.local_addr().context("the address of a UDP socket")?.port();
        let [_, a, b, c] = process::id().to_be_bytes();
        Ok(Self { group: Ipv4Addr::new(239, a, b, c), port, members: Arc::default() })
    }

    /// Returns the host part of the next member's address, from 1.
    pub(crate) fn join(&self) -> u8 {
        self.members.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Returns the address of the member with that host part.
    pub(crate) fn address(host: u8) -> String {
        Ipv4Addr::new(10, 54, 7, host).to_string()
    }

    pub(crate) fn netdev(&self, id: &str) -> String {
        format!("socket,id={id},mcast={}:{},localaddr=127.0.0.1", self.group, self.port)
    }
}
