//! The rule that chooses the data address among the addresses of the interfaces.
//!
//! 1. Only addresses that the configuration allows and that other nodes can reach count. Loopback, link-local
//!    and multicast addresses do not, nor does an address whose check for duplicates is in progress or has
//!    failed.
//! 2. The last address stays while its interface has it, unless it is deprecated and another one is not. A
//!    change costs every volume a reconnection, so a better address alone is not a reason for one.
//! 3. Otherwise the best address on a link that is up is chosen. The order is: not deprecated, the family of
//!    the last address, IPv4, permanent, not secondary, and then the lowest.
//! 4. If no link that is up has an address, the last one stays: its link may come back with it. Only a node
//!    that never had one takes an address on a link that is down.
//!
//! In every case in which replicas cannot be reached the choice has a problem, for the warnings of the node.

use std::cmp::Reverse;
use std::net::IpAddr;

use crate::serve::network::source::InterfaceFilter;

/// An address of an interface of this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InterfaceAddress {
    /// The network interface that has the address, such as eth0.
    pub interface: String,
    /// True if the interface is up and has a carrier.
    pub is_link_up: bool,
    /// The IP address without its prefix.
    pub address: IpAddr,
    /// True if its preferred lifetime has ended (RFC 4862): connections continue, new ones should use
    /// another.
    pub is_deprecated: bool,
    /// The kernel still checks whether another host has it, or has found one.
    pub is_unchecked: bool,
    /// A second IPv4 address of a network, one without a network (/32), or a temporary IPv6 address
    /// (RFC 8981).
    pub is_secondary: bool,
}

/// The interfaces of this host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Interfaces {
    /// The names of all interfaces, and whether each is up and has a carrier.
    pub links: Vec<(String, bool)>,
    /// Every address of every interface.
    pub addresses: Vec<InterfaceAddress>,
}

/// The chosen address.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Choice {
    /// The address; None if the node never had one.
    pub address: Option<IpAddr>,
    /// The reason why other nodes cannot reach it; none if they can.
    pub problem: Option<String>,
}

/// Chooses the data address of this node. `last` is the address that it had so far.
pub fn choose(interfaces: &Interfaces, filter: &InterfaceFilter, last: Option<IpAddr>) -> Choice {
    let usable: Vec<&InterfaceAddress> =
        interfaces.addresses.iter().filter(|entry| is_usable(entry, filter)).collect();
    let up = || usable.iter().copied().filter(|entry| entry.is_link_up);
    let current = usable.iter().copied().filter(|entry| Some(entry.address) == last);
    let current = current.max_by_key(|entry| (entry.is_link_up, !entry.is_deprecated));
    if current.is_some_and(|entry| {
        entry.is_link_up && (!entry.is_deprecated || up().all(|other| other.is_deprecated))
    }) {
        return Choice { address: last, problem: None };
    }
    let rank = |entry: &&InterfaceAddress| {
        let is_of_last_family = last.is_none_or(|last| last.is_ipv4() == entry.address.is_ipv4());
        let family = (is_of_last_family, entry.address.is_ipv4());
        (!entry.is_deprecated, family, !entry.is_secondary, Reverse(entry.address))
    };
    // While the link of the last address is down and still has the address, another link is not used. The
    // operator may have unplugged it for a moment, and every volume would reconnect twice.
    let waits_for_link = current.is_some_and(|entry| !entry.is_link_up);
    if let Some(best) = up().max_by_key(rank).filter(|_| !waits_for_link) {
        return Choice { address: Some(best.address), problem: None };
    }
    let problem = Some(problem(interfaces, filter, last));
    let address = last.or_else(|| usable.iter().copied().max_by_key(rank).map(|entry| entry.address));
    Choice { address, problem }
}

fn is_usable(entry: &InterfaceAddress, filter: &InterfaceFilter) -> bool {
    let is_reachable = match entry.address {
        IpAddr::V4(address) => !address.is_link_local() && !address.is_broadcast(),
        // An address that is written with its interface (fe80::1%eth0) means nothing to another host.
        IpAddr::V6(address) => !address.is_unicast_link_local(),
    };
    is_reachable
        && !entry.is_unchecked
        && !(entry.address.is_loopback() || entry.address.is_unspecified() || entry.address.is_multicast())
        && filter.interface.as_ref().is_none_or(|interface| *interface == entry.interface)
        && filter.network.is_none_or(|network| network.contains(entry.address))
}

fn problem(interfaces: &Interfaces, filter: &InterfaceFilter, last: Option<IpAddr>) -> String {
    let link = filter.interface.as_ref().map(|name| {
        let found = interfaces.links.iter().find(|(link, _)| link == name);
        (name, found.map(|(_, is_up)| *is_up))
    });
    let reason = match link {
        Some((name, None)) => format!("this host has no interface {name}"),
        Some((name, Some(false))) => format!("interface {name} is down or has no carrier"),
        _ => format!("no interface that is up has a usable address ({filter})"),
    };
    match last {
        Some(last) => format!(
            "{reason}: other nodes do not reach replicas here until {last} or another address is there"
        ),
        None => format!("{reason}: other nodes do not reach replicas here until one is there"),
    }
}

#[cfg(test)]
mod tests;
