//! Reads the interfaces of this host from the kernel, and waits for changes (rtnetlink(7)).

use std::collections::HashMap;
use std::io;
use std::time::Duration;

use futures_util::{Stream, StreamExt, TryStreamExt};
use rtnetlink::packet_core::{NetlinkMessage, NetlinkPayload};
use rtnetlink::packet_route::RouteNetlinkMessage;
use rtnetlink::packet_route::address::{AddressAttribute, AddressFlags, AddressMessage};
use rtnetlink::packet_route::link::{LinkAttribute, LinkFlags, LinkMessage};
use rtnetlink::sys::SocketAddr;
use rtnetlink::{Handle, MulticastGroup};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::serve::network::choice::{InterfaceAddress, Interfaces};

/// The kernel answers at once, unless something is very wrong.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);
/// The most interfaces and addresses that are read: a host of many pods has some thousand.
const ENTRIES_MAX: usize = 65_536;
/// The length of the prefix of an IPv4 address that has no network.
const IPV4_BITS: u8 = 32;
/// The most messages that are dropped at once: those that came while the interfaces were being read.
const BURST_MAX: usize = 4096;

type Messages =
    std::pin::Pin<Box<dyn Stream<Item = (NetlinkMessage<RouteNetlinkMessage>, SocketAddr)> + Send>>;

/// A socket to the kernel's routing tables.
pub struct Netlink {
    handle: Handle,
    messages: Messages,
    task: JoinHandle<()>,
}

impl Drop for Netlink {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Netlink {
    /// Opens the socket, and asks for changes of links and addresses.
    ///
    /// # Errors
    /// The error of the system.
    pub fn open() -> io::Result<Netlink> {
        let groups = [MulticastGroup::Link, MulticastGroup::Ipv4Ifaddr, MulticastGroup::Ipv6Ifaddr];
        let (connection, handle, messages) = rtnetlink::new_multicast_connection(&groups)?;
        Ok(Netlink { handle, messages: Box::pin(messages), task: tokio::spawn(connection) })
    }

    /// Waits until something may have changed.
    ///
    /// # Errors
    /// The socket is gone: open another one.
    pub async fn changed(&mut self) -> io::Result<()> {
        let gone = || io::Error::new(io::ErrorKind::NotConnected, "the netlink socket is closed");
        loop {
            let (message, _) = self.messages.next().await.ok_or_else(gone)?;
            if is_change(&message) {
                break;
            }
        }
        // The reading that follows sees them too.
        for _ in 0..BURST_MAX {
            let Some(next) = futures_util::FutureExt::now_or_never(self.messages.next()) else { break };
            next.ok_or_else(gone)?;
        }
        Ok(())
    }

    /// Reads all interfaces with their addresses.
    ///
    /// # Errors
    /// The error of the kernel, or a kernel that does not answer.
    pub async fn read(&mut self) -> io::Result<Interfaces> {
        let late = |_| io::Error::new(io::ErrorKind::TimedOut, "the kernel does not list the interfaces");
        timeout(ANSWER_LIMIT, self.read_all()).await.map_err(late)?
    }

    async fn read_all(&mut self) -> io::Result<Interfaces> {
        // One after the other: a socket has one list under way at a time, else the kernel answers EBUSY.
        let links = self.handle.link().get().execute().take(ENTRIES_MAX);
        let links = links.try_collect::<Vec<_>>().await.map_err(of_netlink)?;
        let addresses = self.handle.address().get().execute().take(ENTRIES_MAX);
        let addresses = addresses.try_collect::<Vec<_>>().await.map_err(of_netlink)?;
        let links: HashMap<u32, (String, bool)> = links.iter().filter_map(link).collect();
        let addresses = addresses.iter().filter_map(|address| entry(address, &links)).collect();
        Ok(Interfaces { addresses, links: links.into_values().collect() })
    }
}

/// Returns true unless the message is certainly not for this process. After an overrun anything may have
/// changed.
fn is_change(message: &NetlinkMessage<RouteNetlinkMessage>) -> bool {
    match &message.payload {
        NetlinkPayload::InnerMessage(inner) => matches!(
            inner,
            RouteNetlinkMessage::NewLink(_)
                | RouteNetlinkMessage::DelLink(_)
                | RouteNetlinkMessage::NewAddress(_)
                | RouteNetlinkMessage::DelAddress(_)
        ),
        _ => true,
    }
}

fn of_netlink(error: rtnetlink::Error) -> io::Error {
    io::Error::other(error)
}

/// Returns the index and the name of a link, and whether it is up and has a carrier.
fn link(message: &LinkMessage) -> Option<(u32, (String, bool))> {
    let name = message.attributes.iter().find_map(|attribute| match attribute {
        LinkAttribute::IfName(name) => Some(name.clone()),
        _ => None,
    })?;
    let is_up = message.header.flags.contains(LinkFlags::Up | LinkFlags::Running);
    Some((message.header.index, (name, is_up)))
}

fn entry(message: &AddressMessage, links: &HashMap<u32, (String, bool)>) -> Option<InterfaceAddress> {
    let (interface, is_link_up) = links.get(&message.header.index)?;
    let find = |wanted: fn(&AddressAttribute) -> Option<std::net::IpAddr>| {
        message.attributes.iter().find_map(wanted)
    };
    // Of a point-to-point link, the other one is the address of the peer.
    let local = find(|attribute| match attribute {
        AddressAttribute::Local(address) => Some(*address),
        _ => None,
    });
    let address = local.or_else(|| {
        find(|attribute| match attribute {
            AddressAttribute::Address(address) => Some(*address),
            _ => None,
        })
    })?;
    // The header has the first eight flags only.
    let flags = message.attributes.iter().find_map(|attribute| match attribute {
        AddressAttribute::Flags(flags) => Some(*flags),
        _ => None,
    });
    let flags = flags.unwrap_or_else(|| AddressFlags::from_bits_retain(message.header.flags.bits().into()));
    // An address of a service, which moves between hosts, has no network of its own.
    let has_network = !(address.is_ipv4() && message.header.prefix_len == IPV4_BITS);
    let is_tentative = flags.contains(AddressFlags::Tentative) && !flags.contains(AddressFlags::Optimistic);
    Some(InterfaceAddress {
        interface: interface.clone(),
        is_link_up: *is_link_up,
        address,
        is_deprecated: flags.contains(AddressFlags::Deprecated),
        is_unchecked: is_tentative || flags.contains(AddressFlags::Dadfailed),
        is_secondary: flags.contains(AddressFlags::Secondary) || !has_network,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_without_a_network_is_secondary() {
        let links = HashMap::from([(2, ("eth1".to_owned(), true))]);
        let is_secondary = |text: &str, prefix_len: u8| {
            let mut message = AddressMessage::default();
            (message.header.index, message.header.prefix_len) = (2, prefix_len);
            message.attributes.push(AddressAttribute::Local(text.parse().unwrap()));
            entry(&message, &links).unwrap().is_secondary
        };
        assert!(!is_secondary("10.1.0.7", 24));
        assert!(is_secondary("10.1.0.5", 32), "keepalived adds such addresses of services");
        // DHCP gives IPv6 addresses without a network.
        assert!(!is_secondary("fd00::7", 128));
    }
}
