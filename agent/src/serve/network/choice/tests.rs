use proptest::prelude::*;

use super::*;
use crate::serve::network::source::IpNetwork;

fn entry(interface: &str, address: &str) -> InterfaceAddress {
    InterfaceAddress {
        interface: interface.to_owned(),
        is_link_up: true,
        address: address.parse().unwrap(),
        is_deprecated: false,
        is_unchecked: false,
        is_secondary: false,
    }
}

fn deprecated(interface: &str, address: &str) -> InterfaceAddress {
    InterfaceAddress { is_deprecated: true, ..entry(interface, address) }
}

fn unchecked(interface: &str, address: &str) -> InterfaceAddress {
    InterfaceAddress { is_unchecked: true, ..entry(interface, address) }
}

fn secondary(interface: &str, address: &str) -> InterfaceAddress {
    InterfaceAddress { is_secondary: true, ..entry(interface, address) }
}

fn down(interface: &str, address: &str) -> InterfaceAddress {
    InterfaceAddress { is_link_up: false, ..entry(interface, address) }
}

fn host(addresses: Vec<InterfaceAddress>) -> Interfaces {
    let links = addresses.iter().map(|entry| (entry.interface.clone(), entry.is_link_up)).collect();
    Interfaces { links, addresses }
}

fn eth1() -> InterfaceFilter {
    InterfaceFilter { interface: Some("eth1".to_owned()), network: None }
}

fn network(text: &str) -> InterfaceFilter {
    InterfaceFilter { interface: None, network: Some(IpNetwork::parse(text).unwrap()) }
}

fn ip(text: &str) -> Option<IpAddr> {
    (!text.is_empty()).then(|| text.parse().unwrap())
}

#[test]
fn the_best_address_of_a_link_that_is_up_is_chosen() {
    let cases = [
        // Of several, the lowest; of both families, IPv4.
        (vec![entry("eth1", "10.1.0.9"), entry("eth1", "10.1.0.7")], "10.1.0.7"),
        (vec![entry("eth1", "fd00::1"), entry("eth1", "10.1.0.7")], "10.1.0.7"),
        (vec![entry("eth1", "fe80::1"), entry("eth1", "fd00::1")], "fd00::1"),
        // Not those of other interfaces, nor those that other nodes do not reach.
        (vec![entry("eth0", "10.0.0.1"), entry("eth1", "10.1.0.7")], "10.1.0.7"),
        (vec![entry("eth1", "169.254.1.1"), entry("eth1", "127.0.0.1"), entry("eth1", "::1")], ""),
        (vec![unchecked("eth1", "fd00::1"), entry("eth1", "fd00::2")], "fd00::2"),
        // A deprecated one only if no other is there; secondary and temporary ones last of their family.
        (vec![deprecated("eth1", "10.1.0.1"), entry("eth1", "fd00::1")], "fd00::1"),
        (vec![deprecated("eth1", "fd00::1")], "fd00::1"),
        (vec![secondary("eth1", "10.1.0.1"), entry("eth1", "10.1.0.2")], "10.1.0.2"),
        (vec![secondary("eth1", "10.1.0.1"), entry("eth1", "fd00::1")], "10.1.0.1"),
    ];
    for (addresses, wanted) in cases {
        let choice = choose(&host(addresses.clone()), &eth1(), None);
        assert_eq!(choice.address, ip(wanted), "{addresses:?}");
        assert_eq!(choice.problem.is_none(), !wanted.is_empty(), "{choice:?}");
    }
}

#[test]
fn a_network_chooses_among_all_interfaces() {
    let addresses = vec![entry("eth0", "10.0.0.1"), entry("bond0", "10.1.0.7"), entry("eth2", "fd00:1::7")];
    let chosen = |filter: &InterfaceFilter| choose(&host(addresses.clone()), filter, None).address;
    assert_eq!(chosen(&network("10.1.0.0/24")), ip("10.1.0.7"));
    assert_eq!(chosen(&network("fd00:1::/64")), ip("fd00:1::7"));
    let both = InterfaceFilter { interface: Some("eth0".to_owned()), ..network("10.1.0.0/24") };
    assert_eq!(chosen(&both), None);
}

#[test]
fn the_last_address_stays_while_the_host_has_it() {
    let addresses = vec![entry("eth1", "10.1.0.7"), entry("eth1", "10.1.0.9"), entry("eth1", "fd00::1")];
    for last in ["10.1.0.7", "10.1.0.9", "fd00::1"] {
        assert_eq!(choose(&host(addresses.clone()), &eth1(), ip(last)).address, ip(last));
    }
    // When it has gone, the next one is of its family.
    assert_eq!(choose(&host(addresses), &eth1(), ip("fd00::9")).address, ip("fd00::1"));
    // A deprecated one stays only without a better one.
    let renumbered = vec![deprecated("eth1", "fd00:a::1"), entry("eth1", "fd00:b::1")];
    assert_eq!(choose(&host(renumbered), &eth1(), ip("fd00:a::1")).address, ip("fd00:b::1"));
    let expired = vec![deprecated("eth1", "fd00:a::1"), deprecated("eth1", "fd00:b::1")];
    assert_eq!(choose(&host(expired), &eth1(), ip("fd00:b::1")).address, ip("fd00:b::1"));
}

#[test]
fn without_a_link_the_last_address_stays_and_the_problem_is_named() {
    let no_address = Interfaces { links: vec![("eth1".to_owned(), true)], addresses: Vec::new() };
    let is_down = Interfaces { links: vec![("eth1".to_owned(), false)], addresses: Vec::new() };
    let cases = [
        (host(vec![entry("eth0", "10.0.0.1")]), "no interface eth1"),
        (is_down, "eth1 is down"),
        (host(vec![down("eth1", "10.1.0.7")]), "eth1 is down"),
        // The kernel removes IPv6 addresses of a link that is set down, and keeps IPv4 addresses.
        (host(vec![down("eth1", "10.1.0.8")]), "eth1 is down"),
        (no_address, "no interface that is up has a usable address (interface eth1)"),
    ];
    for (interfaces, problem) in cases {
        let choice = choose(&interfaces, &eth1(), ip("10.1.0.7"));
        assert_eq!(choice.address, ip("10.1.0.7"), "{interfaces:?}");
        let found = choice.problem.unwrap();
        assert!(found.contains(problem), "{found}");
    }
    // A node that never had one takes that of the link that is down.
    let first = choose(&host(vec![down("eth1", "10.1.0.7")]), &eth1(), None);
    assert!(first.address == ip("10.1.0.7") && first.problem.is_some(), "{first:?}");
}

#[test]
fn another_link_does_not_take_the_place_of_one_that_is_down() {
    let host = host(vec![down("eth1", "10.1.0.7"), entry("eth2", "10.1.0.8")]);
    let choice = choose(&host, &network("10.1.0.0/24"), ip("10.1.0.7"));
    assert_eq!(choice.address, ip("10.1.0.7"));
    assert!(choice.problem.is_some());
}

fn any_entry() -> impl Strategy<Value = InterfaceAddress> {
    let address = prop_oneof![
        (0u8..4, 0u8..4).prop_map(|(net, host)| IpAddr::from([10, 1, net, host])),
        (0u16..2, 0u16..4).prop_map(|(net, host)| IpAddr::from([0xfd00, net, 0, 0, 0, 0, 0, host])),
        Just("fe80::1".parse().unwrap()),
        Just("127.0.0.1".parse().unwrap()),
    ];
    (prop::sample::select(vec!["eth0", "eth1"]), address, prop::bits::u8::between(0, 4)).prop_map(
        |(interface, address, flags)| InterfaceAddress {
            interface: interface.to_owned(),
            is_link_up: flags & 1 == 0,
            address,
            is_deprecated: flags & 2 != 0,
            is_unchecked: flags & 4 != 0,
            is_secondary: flags & 8 != 0,
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2048))]

    #[test]
    fn a_choice_is_stable_allowed_and_never_forgets(
        addresses in prop::collection::vec(any_entry(), 0..6),
        last in prop::option::of(any_entry().prop_map(|entry| entry.address)),
    ) {
        let host = host(addresses.clone());
        let choice = choose(&host, &eth1(), last);
        // The same facts lead to the same choice, from the new address as well.
        prop_assert_eq!(choose(&host, &eth1(), choice.address).address, choice.address);
        // The order of the addresses does not matter.
        let mut reversed = host.clone();
        reversed.addresses.reverse();
        prop_assert_eq!(choose(&reversed, &eth1(), last).address, choice.address);
        // An address is never lost, and a new one is one of the host's that the filter allows.
        prop_assert!(last.is_none() || choice.address.is_some());
        let is_allowed = |entry: &InterfaceAddress| {
            Some(entry.address) == choice.address && entry.interface == "eth1" && !entry.is_unchecked
        };
        prop_assert!(choice.address == last || addresses.iter().any(is_allowed));
        // Without a problem, the address is on a link that is up.
        let is_up = |entry: &InterfaceAddress| {
            Some(entry.address) == choice.address && entry.is_link_up && entry.interface == "eth1"
        };
        prop_assert!(choice.problem.is_some() || addresses.iter().any(is_up));
    }
}
