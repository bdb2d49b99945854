//! The configured source of the data address.

use std::fmt;
use std::net::IpAddr;

/// The source of the address at which other nodes reach replicas.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum DataSource {
    /// None: replicas serve this host only.
    #[default]
    Off,
    /// This address.
    Fixed(IpAddr),
    /// The address that the interfaces of this host have now.
    Interfaces(InterfaceFilter),
}

/// The interfaces and networks that data may use. At least one of the two is set.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct InterfaceFilter {
    /// The name of the interface; None: any.
    pub interface: Option<String>,
    /// The network of the address; None: any.
    pub network: Option<IpNetwork>,
}

impl fmt::Display for InterfaceFilter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.interface, &self.network) {
            (Some(interface), Some(network)) => write!(f, "interface {interface}, network {network}"),
            (Some(interface), None) => write!(f, "interface {interface}"),
            (None, Some(network)) => write!(f, "network {network}"),
            (None, None) => write!(f, "any interface"),
        }
    }
}

/// A network like 10.1.0.0/24 or fd00:1::/64.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IpNetwork {
    address: IpAddr,
    prefix_bits: u8,
}

impl IpNetwork {
    /// Parses `<address>/<bits>`. The bits after the prefix have to be zero, so that a mistyped prefix is
    /// noticed.
    ///
    /// # Errors
    /// The problem, and the form to use.
    pub fn parse(text: &str) -> Result<IpNetwork, String> {
        let wrong = || format!("{text:?} is not a network: write it like 10.1.0.0/24 or fd00:1::/64");
        let (address, prefix_bits) = text.split_once('/').ok_or_else(wrong)?;
        let address: IpAddr = address.parse().map_err(|_| wrong())?;
        let prefix_bits: u8 = prefix_bits.parse().map_err(|_| wrong())?;
        if prefix_bits > width_bits(address) {
            return Err(wrong());
        }
        let network = IpNetwork { address, prefix_bits };
        let first = network.first();
        if first != address {
            return Err(format!("{text:?} has bits after its prefix: the network is {first}/{prefix_bits}"));
        }
        Ok(network)
    }

    /// Returns true if the address is in this network.
    pub fn contains(&self, address: IpAddr) -> bool {
        width_bits(address) == width_bits(self.address)
            && masked(address, self.prefix_bits) == masked(self.address, self.prefix_bits)
    }

    fn first(&self) -> IpAddr {
        let bits = masked(self.address, self.prefix_bits);
        match self.address {
            IpAddr::V4(_) => IpAddr::V4(u32::try_from(bits >> 96).unwrap_or_default().into()),
            IpAddr::V6(_) => IpAddr::V6(bits.into()),
        }
    }
}

impl fmt::Display for IpNetwork {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.prefix_bits)
    }
}

fn width_bits(address: IpAddr) -> u8 {
    if address.is_ipv4() { 32 } else { 128 }
}

/// Returns the bits of the prefix, at the top of the number.
fn masked(address: IpAddr, prefix_bits: u8) -> u128 {
    let bits = match address {
        IpAddr::V4(address) => u128::from(u32::from(address)) << 96,
        IpAddr::V6(address) => u128::from(address),
    };
    let ignored_bits = 128 - u32::from(prefix_bits);
    bits & u128::MAX.checked_shl(ignored_bits).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn networks_have_the_addresses_of_their_prefix() {
        for (network, inside, outside) in [
            ("10.1.0.0/24", "10.1.0.255", "10.1.1.0"),
            ("0.0.0.0/0", "203.0.113.9", "fd00::1"),
            ("10.1.0.7/32", "10.1.0.7", "10.1.0.6"),
            ("fd00:1::/64", "fd00:1::ffff:1", "fd00:1:0:1::1"),
            ("::/0", "fd00::1", "10.1.0.1"),
            ("::1/128", "::1", "::2"),
        ] {
            let parsed = IpNetwork::parse(network).unwrap();
            assert_eq!(parsed.to_string(), network);
            assert!(parsed.contains(inside.parse().unwrap()), "{inside} in {network}");
            assert!(!parsed.contains(outside.parse().unwrap()), "{outside} in {network}");
        }
    }

    #[test]
    fn a_mistyped_network_is_refused_with_a_remedy() {
        for (text, remedy) in [
            ("10.1.0.0", "10.1.0.0/24"),
            ("10.1.0.0/33", "10.1.0.0/24"),
            ("fd00::/129", "fd00:1::/64"),
            ("10.1.0.5/24", "the network is 10.1.0.0/24"),
            ("fd00::1/64", "the network is fd00::/64"),
            ("eth1/24", "10.1.0.0/24"),
        ] {
            let error = IpNetwork::parse(text).unwrap_err();
            assert!(error.contains(remedy), "{text}: {error}");
        }
    }

    proptest! {
        #[test]
        fn every_text_is_refused_or_is_a_network_that_has_its_first_address(text in "[0-9a-f:./]{0,20}") {
            if let Ok(network) = IpNetwork::parse(&text) {
                prop_assert!(network.contains(network.first()));
            }
        }
    }
}
