//! The data address of this node: the address at which other nodes reach its replicas.
//!
//! It is configured, or it is that of an interface, and then it is followed.

mod choice;
mod netlink;
mod source;

use std::io;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use tokio::sync::watch;

use choice::choose;
pub use choice::{Choice, Interfaces};
use netlink::Netlink;
pub use source::{DataSource, InterfaceFilter, IpNetwork};

/// The time without an address of the last family after which one of the other family is taken. A DHCP client
/// or a router advertisement needs several seconds after a link is up.
const FAMILY_PATIENCE: Duration = Duration::from_secs(20);

/// The data address, to read only.
pub type DataAddress = watch::Receiver<Choice>;

/// Reads the interfaces of this host once.
///
/// # Errors
/// The error of the kernel.
pub async fn interfaces() -> io::Result<Interfaces> {
    Netlink::open()?.read().await
}

/// Holds a change to the other family of addresses back for a while. After a start of the host or of a link,
/// IPv6 addresses are there seconds before DHCP has given an IPv4 address. The change would last, and hosts
/// without IPv6 would not reach this one any more.
#[derive(Debug, Default)]
struct FamilyChange {
    /// The time since which only the other family is there.
    since: Option<Instant>,
}

impl FamilyChange {
    /// Returns the choice to take: `next`, or the last address for some time more.
    fn hold(&mut self, last: Option<IpAddr>, next: Choice, now: Instant) -> Choice {
        let (Some(last), Some(address)) = (last, next.address) else { return next };
        if last.is_ipv4() == address.is_ipv4() {
            self.since = None;
            return next;
        }
        let since = *self.since.get_or_insert(now);
        if now.saturating_duration_since(since) >= FAMILY_PATIENCE {
            self.since = None;
            return next;
        }
        let limit_s = FAMILY_PATIENCE.as_secs();
        let problem = format!(
            "{last} is not usable: without an address of its family, {address} is taken after {limit_s} s"
        );
        Choice { address: Some(last), problem: Some(problem) }
    }
}

/// Follows the data address.
pub struct DataNetwork {
    source: DataSource,
    choice: watch::Sender<Choice>,
    /// None until it could be opened.
    netlink: Option<Netlink>,
    /// The interfaces at the last reading.
    interfaces: Interfaces,
    family_change: FamilyChange,
}

impl DataNetwork {
    /// Finds the address. `last` is that of an earlier agent: replicas still listen on it.
    pub async fn start(source: DataSource, last: Option<IpAddr>) -> DataNetwork {
        let first = match &source {
            DataSource::Off => Choice::default(),
            DataSource::Fixed(address) => Choice { address: Some(*address), problem: None },
            DataSource::Interfaces(_) => Choice { address: last, problem: None },
        };
        let choice = watch::Sender::new(first);
        let interfaces = Interfaces::default();
        let family_change = FamilyChange::default();
        let mut network = DataNetwork { source, choice, netlink: None, interfaces, family_change };
        network.update().await;
        network
    }

    /// Returns a reader of the address.
    pub fn address(&self) -> DataAddress {
        self.choice.subscribe()
    }

    /// Returns the address that replicas should have now.
    pub fn current(&self) -> Option<IpAddr> {
        self.choice.borrow().address
    }

    /// Returns true unless a change to the other family of addresses is held back.
    pub fn is_settled(&self) -> bool {
        self.family_change.since.is_none()
    }

    /// Returns true if the host has the address, on a link that is up or not.
    pub fn has(&self, address: Option<IpAddr>) -> bool {
        self.interfaces.addresses.iter().any(|own| Some(own.address) == address)
    }

    /// Waits for a change of the interfaces; for ever if none is reported.
    pub async fn changed(&mut self) {
        match &mut self.netlink {
            Some(netlink) => {
                if let Err(error) = netlink.changed().await {
                    tracing::warn!("cannot watch the network, so changes are noticed late: {error}");
                    self.netlink = None;
                }
            }
            None => std::future::pending().await,
        }
    }

    /// Reads the interfaces, and chooses the address.
    pub async fn update(&mut self) {
        let read = async {
            if self.netlink.is_none() {
                self.netlink = Some(Netlink::open()?);
            }
            let Some(netlink) = &mut self.netlink else { return Err(io::ErrorKind::NotConnected.into()) };
            netlink.read().await
        };
        match read.await {
            Ok(interfaces) => self.interfaces = interfaces,
            Err(error) => {
                tracing::warn!("the interfaces of this host cannot be read: {error}");
                self.netlink = None;
                return;
            }
        }
        let last = self.choice.borrow().address;
        let Some(next) = choice_of(&self.source, &self.interfaces, last) else { return };
        let next = self.family_change.hold(last, next, Instant::now());
        self.choice.send_if_modified(|choice| {
            if *choice == next {
                return false;
            }
            report(choice, &next);
            *choice = next;
            true
        });
    }
}

/// Returns the data address of a host with these interfaces; None if it is configured off.
pub fn choice_of(source: &DataSource, interfaces: &Interfaces, last: Option<IpAddr>) -> Option<Choice> {
    match source {
        DataSource::Off => None,
        DataSource::Fixed(address) => Some(fixed(*address, interfaces)),
        DataSource::Interfaces(filter) => Some(choose(interfaces, filter, last)),
    }
}

/// Returns the configured address, with a problem if this host does not have it.
fn fixed(address: IpAddr, interfaces: &Interfaces) -> Choice {
    let is_there = address.is_loopback() || interfaces.addresses.iter().any(|own| own.address == address);
    let problem = || {
        format!(
            "this host does not have data_address {address}: correct it in the configuration, or use \
             data_interface"
        )
    };
    Choice { address: Some(address), problem: (!is_there).then(problem) }
}

fn report(before: &Choice, now: &Choice) {
    if before.address != now.address {
        let text = |address: Option<IpAddr>| {
            address.map_or_else(|| "none".to_owned(), |address| address.to_string())
        };
        tracing::info!(
            before = text(before.address),
            now = text(now.address),
            "the data address has changed"
        );
    }
    match &now.problem {
        now if *now == before.problem => {}
        None => tracing::info!("other nodes reach replicas here again"),
        Some(problem) => tracing::warn!("{problem}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::serve::network::choice::InterfaceAddress;

    #[test]
    fn a_configured_address_that_the_host_does_not_have_is_a_problem() {
        let address = "10.1.0.7".parse().unwrap();
        let own = InterfaceAddress {
            interface: "eth1".to_owned(),
            is_link_up: true,
            address,
            is_deprecated: false,
            is_unchecked: false,
            is_secondary: false,
        };
        let there = Interfaces { links: vec![("eth1".to_owned(), true)], addresses: vec![own] };
        assert_eq!(fixed(address, &there), Choice { address: Some(address), problem: None });
        let missing = fixed(address, &Interfaces::default());
        let problem = missing.problem.unwrap();
        assert!(missing.address == Some(address) && problem.contains("data_interface"), "{problem}");
    }

    #[test]
    fn the_family_changes_only_after_some_time_without_the_last_one() {
        let ip = |text: &str| text.parse::<IpAddr>().ok();
        let is = |address: Option<IpAddr>| Choice { address, problem: None };
        let (last, other, sibling) = (ip("10.1.0.7"), ip("fd00::7"), ip("10.1.0.8"));
        let start = Instant::now();
        let mut change = FamilyChange::default();
        // A link comes back: IPv6 is there at once, and DHCP answers later.
        for seconds in [0, 19] {
            let held = change.hold(last, is(other), start + Duration::from_secs(seconds));
            assert!(held.address == last && held.problem.unwrap().contains("fd00::7"), "{seconds} s");
        }
        assert_eq!(change.hold(last, is(last), start + Duration::from_secs(19)), is(last));
        // The next change starts the limit over, and it expires.
        let again = start + Duration::from_secs(30);
        assert_eq!(change.hold(last, is(other), again).address, last);
        assert_eq!(change.hold(last, is(other), again + FAMILY_PATIENCE), is(other));
        assert_eq!(change.hold(other, is(other), again + FAMILY_PATIENCE), is(other));
        // The first address, and one of the same family, are taken at once.
        assert_eq!(change.hold(None, is(other), again), is(other));
        assert_eq!(change.hold(last, is(sibling), again), is(sibling));
    }

    #[tokio::test]
    async fn the_kernel_shows_the_loopback_interface() {
        let interfaces = interfaces().await.unwrap();
        let lo = interfaces.addresses.iter().find(|entry| entry.interface == "lo");
        assert!(lo.is_none_or(|entry| entry.address.is_loopback()), "{interfaces:?}");
        assert!(interfaces.links.iter().any(|(name, _)| name == "lo"), "{interfaces:?}");
    }
}
