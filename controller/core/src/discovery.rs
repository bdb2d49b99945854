//! Finds the nodes of a Kubernetes cluster that have an agent, and their addresses.
//!
//! An agent registers the CSI driver with the kubelet of its node, under its own name. So each registered
//! driver has an agent. It answers at the address of that machine, and its Node object has the name of the
//! driver there.
//!
//! The findings are stored in the object (`spec.discovered`). The address follows them as long as both are
//! the same: an address that an administrator has changed, or emptied, is never touched again. The time since
//! which a machine is cordoned is stored too. Such a machine gets no new replicas, unless the controller is
//! configured otherwise, and is expected to restart (`reboot`). A Node object stays when its machine leaves
//! the cluster, because its data may come back. Until then its condition says that the agent is unreachable.

use std::collections::BTreeMap;
use std::net::IpAddr;

use thiserror::Error;

use crate::objects::{Discovered, Key, Kind, Node};
use crate::requests::Change;
use crate::{ClusterState, Label, NodeName, NodeNameError, Timestamp};

/// The labels of a machine that give its zone. The first one comes from its agent through kubelet.
const ZONE_LABELS: [&str; 2] = ["topology.shorthorn.io/zone", "topology.kubernetes.io/zone"];
/// The sort of address that nodes use among themselves.
const INTERNAL_IP: &str = "InternalIP";

/// The information that Kubernetes has on a machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Machine {
    /// The address by which other nodes reach the machine.
    pub internal_ip: Option<IpAddr>,
    /// The zone, whose machines may fail together.
    pub zone: Option<Label>,
    /// True if its kubelet is ready.
    pub is_ready: bool,
    /// True if Kubernetes puts no new pods there.
    pub is_cordoned: bool,
}

impl Machine {
    /// Returns the machine with these labels and these addresses, each with its type. Nothing is known of its
    /// kubelet.
    pub fn of<'a>(
        labels: &BTreeMap<String, String>,
        addresses: impl IntoIterator<Item = (&'a str, &'a str)>,
    ) -> Machine {
        let mut internal = addresses.into_iter().filter(|(sort, _)| *sort == INTERNAL_IP);
        let zone = ZONE_LABELS.iter().find_map(|label| labels.get(*label));
        Machine {
            internal_ip: internal.find_map(|(_, address)| address.parse().ok()),
            zone: zone.and_then(|zone| Label::new(zone).ok()),
            is_ready: false,
            is_cordoned: false,
        }
    }
}

/// The information that Kubernetes has on all machines, by their names in Kubernetes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KubernetesCluster {
    /// The existing machines.
    pub machines: BTreeMap<String, Machine>,
    /// The name by which the kubelet of the machine knows the driver.
    pub drivers: BTreeMap<String, String>,
}

/// The reason why an agent is not found.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum NotFound {
    /// The machine has no address yet.
    #[error(
        "node {0} of Kubernetes has no InternalIP: set spec.address of the Node {0} of Shorthorn by hand"
    )]
    NoAddress(String),
    /// The driver has a name that can never work.
    #[error(transparent)]
    Name(#[from] NodeNameError),
    /// Two machines map to the same node name.
    #[error("the agents on {0} and {1} both have the node name {2}: give each agent its own node_name")]
    Twice(String, String, NodeName),
}

/// Returns the addresses of the agents on known machines, and the problems of other machines.
#[must_use]
pub fn agents(
    kubernetes: &KubernetesCluster,
    port: u16,
    now: Timestamp,
) -> (BTreeMap<NodeName, Discovered>, Vec<NotFound>) {
    let mut owners: BTreeMap<NodeName, Vec<&String>> = BTreeMap::new();
    let mut not_found = Vec::new();
    for (machine, driver) in &kubernetes.drivers {
        match NodeName::new(driver) {
            Ok(name) => owners.entry(name).or_default().push(machine),
            Err(error) => not_found.push(error.into()),
        }
    }
    let mut found = BTreeMap::new();
    for (name, machines) in owners {
        let machine = match machines.as_slice() {
            [machine] => *machine,
            [one, other, ..] => {
                not_found.push(NotFound::Twice((*one).clone(), (*other).clone(), name));
                continue;
            }
            [] => continue,
        };
        // A machine that does not exist any more, or yet, has no address.
        let Some(facts) = kubernetes.machines.get(machine) else { continue };
        match facts.internal_ip {
            Some(ip) => {
                let (address, zone) = (url(ip, port), facts.zone.clone());
                let cordoned_since = facts.is_cordoned.then_some(now);
                found.insert(name, Discovered { address, zone, cordoned_since });
            }
            None => not_found.push(NotFound::NoAddress(machine.clone())),
        }
    }
    (found, not_found)
}

fn url(ip: IpAddr, port: u16) -> String {
    format!("http://{}", std::net::SocketAddr::new(ip, port))
}

/// Returns the Node object with the findings.
#[must_use]
pub fn recorded(cluster: &ClusterState, name: &NodeName, found: &Discovered, now: Timestamp) -> Change<Node> {
    let stored = cluster.nodes.get(name.as_str());
    let mut node = stored.cloned().unwrap_or_else(|| Node::new(name.as_str(), now));
    let is_left_out = stored.is_none() && cluster.unknown(&Key::new(Kind::Node, name.as_str())).is_some();
    if node.metadata.is_deleting() || is_left_out {
        return Change::AlreadySo(node);
    }
    let before = node.spec.discovered.take().unwrap_or_default();
    if node.spec.address == before.address {
        node.spec.address.clone_from(&found.address);
    }
    let since = before.cordoned_since.filter(|_| found.cordoned_since.is_some()).or(found.cordoned_since);
    node.spec.discovered = Some(Discovered { cordoned_since: since, ..found.clone() });
    if stored == Some(&node) { Change::AlreadySo(node) } else { Change::Store(node) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::objects::{Metadata, NodeSpec, NodeStatus};

    const PORT: u16 = 9501;

    fn machine(address: &str) -> Machine {
        Machine::of(&BTreeMap::new(), [("Hostname", "10.9.9.9"), ("InternalIP", address)])
    }

    fn kubernetes(entries: &[(&str, &str, &str)]) -> KubernetesCluster {
        let mut kubernetes = KubernetesCluster::default();
        for (name, driver, address) in entries {
            kubernetes.machines.insert((*name).to_owned(), machine(address));
            kubernetes.drivers.insert((*name).to_owned(), (*driver).to_owned());
        }
        kubernetes
    }

    fn stored(change: Change<Node>) -> Node {
        match change {
            Change::Store(node) => node,
            Change::AlreadySo(node) => panic!("{node:?} is not changed"),
        }
    }

    #[test]
    fn agents_are_found_by_their_registered_drivers() {
        let mut all = kubernetes(&[("a", "a", "10.0.0.1"), ("b", "b", "fd00::2")]);
        all.machines.insert("no-driver".to_owned(), machine("10.0.0.3"));
        all.drivers.insert("gone".to_owned(), "gone".to_owned());
        let (found, not_found) = agents(&all, PORT, Timestamp::UNIX_EPOCH);
        let addresses: Vec<_> =
            found.iter().map(|(name, found)| (name.as_str(), found.address.as_str())).collect();
        assert_eq!(addresses, [("a", "http://10.0.0.1:9501"), ("b", "http://[fd00::2]:9501")]);
        assert!(not_found.is_empty(), "{not_found:?}");
    }

    #[test]
    fn the_problem_of_a_machine_is_reported_and_keeps_no_other_one_out() {
        let mut all =
            kubernetes(&[("a", "same", "10.0.0.1"), ("b", "same", "10.0.0.2"), ("c", "C_", "10.0.0.3")]);
        all.machines.insert("d".to_owned(), machine("nonsense"));
        all.drivers.insert("d".to_owned(), "d".to_owned());
        all.machines.insert("e".to_owned(), machine("10.0.0.5"));
        all.drivers.insert("e".to_owned(), "e".to_owned());
        let (found, not_found) = agents(&all, PORT, Timestamp::UNIX_EPOCH);
        assert_eq!(found.keys().map(NodeName::as_str).collect::<Vec<_>>(), ["e"]);
        let words: Vec<String> = not_found.iter().map(ToString::to_string).collect();
        for expected in ["\"C_\"", "node_name", "InternalIP"] {
            assert!(words.iter().any(|text| text.contains(expected)), "{words:?}");
        }
    }

    #[test]
    fn the_zone_that_the_agent_has_reported_comes_first() {
        let labels = |pairs: &[(&str, &str)]| {
            pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
        };
        let zone = |pairs: &[(&str, &str)]| {
            Machine::of(&labels(pairs), []).zone.map(|zone| zone.as_str().to_owned())
        };
        let both = [("topology.kubernetes.io/zone", "cloud"), ("topology.shorthorn.io/zone", "rack")];
        assert_eq!(zone(&both).as_deref(), Some("rack"));
        assert_eq!(zone(&both[..1]).as_deref(), Some("cloud"));
        assert_eq!(zone(&[]), None);
    }

    #[test]
    fn an_address_follows_discovery_until_it_is_set_by_hand() {
        let name = NodeName::new("a").unwrap();
        let found = |address: &str| Discovered { address: address.to_owned(), ..Discovered::default() };
        let (one, two) = (found("http://10.0.0.1:9501"), found("http://10.0.0.2:9501"));
        let now = Timestamp::UNIX_EPOCH;
        let mut cluster = ClusterState::default();
        let made = stored(recorded(&cluster, &name, &one, now));
        assert_eq!((made.spec.address.as_str(), made.spec.allow_scheduling), (one.address.as_str(), true));
        cluster.insert(made.clone().into());
        assert!(matches!(recorded(&cluster, &name, &one, now), Change::AlreadySo(_)));

        let moved = stored(recorded(&cluster, &name, &two, now));
        assert_eq!(moved.spec.address, two.address);

        // An address set by hand, another one or none, stays, and the findings are stored all the same.
        for by_hand in ["http://proxy:1", ""] {
            let mut node = made.clone();
            node.spec.address = by_hand.to_owned();
            node.spec.allow_scheduling = false;
            cluster.insert(node.into());
            let kept = stored(recorded(&cluster, &name, &two, now));
            assert_eq!((kept.spec.address.as_str(), kept.spec.allow_scheduling), (by_hand, false));
            assert_eq!(kept.spec.discovered, Some(two.clone()));
            cluster.insert(kept.into());
            assert!(matches!(recorded(&cluster, &name, &two, now), Change::AlreadySo(_)));
        }
    }

    #[test]
    fn a_machine_is_cordoned_since_it_was_first_seen_so() {
        let name = NodeName::new("a").unwrap();
        let at = |second| Timestamp::from_second(second).unwrap();
        let mut cluster = ClusterState::default();
        let mut since = |is_cordoned: bool, second: i64| {
            let mut all = kubernetes(&[("a", "a", "10.0.0.1")]);
            all.machines.entry("a".to_owned()).and_modify(|machine| machine.is_cordoned = is_cordoned);
            let (found, _) = agents(&all, PORT, at(second));
            if let Change::Store(node) = recorded(&cluster, &name, &found["a"], at(second)) {
                cluster.insert(node.into());
            }
            cluster.nodes["a"].spec.discovered.as_ref().unwrap().cordoned_since
        };
        assert_eq!(since(false, 1), None);
        assert_eq!(since(true, 2), Some(at(2)));
        assert_eq!(since(true, 3), Some(at(2)));
        assert_eq!(since(false, 4), None);
        assert_eq!(since(true, 5), Some(at(5)));
    }

    #[test]
    fn a_node_without_an_address_gets_the_discovered_one() {
        let name = NodeName::new("a").unwrap();
        let found = Discovered { address: "http://10.0.0.1:9501".to_owned(), ..Discovered::default() };
        let mut cluster = ClusterState::default();
        let metadata = Metadata::new("a", Timestamp::UNIX_EPOCH);
        cluster.insert(Node { metadata, spec: NodeSpec::default(), status: NodeStatus::default() }.into());
        let node = stored(recorded(&cluster, &name, &found, Timestamp::UNIX_EPOCH));
        assert_eq!(node.spec.address, found.address);
        assert!(!node.spec.allow_scheduling);
    }
}
