//! The nodes of each zone. In a large cluster a placement looks at a part of each zone only.

use std::collections::{BTreeMap, BTreeSet};

use crate::ClusterState;
use crate::objects::{Label, Node};

/// The names of the nodes with disks, by zone. The nodes of no zone are one zone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct NodesByZone {
    /// In the order of their names, so that any part of a zone is found at once.
    names: BTreeMap<Option<Label>, Vec<String>>,
    zone_of: BTreeMap<String, Option<Label>>,
}

impl NodesByZone {
    /// Records the zone of a node; none: the node does not exist. A node without disks is in no zone.
    pub(super) fn set(&mut self, name: &str, node: Option<&Node>) {
        let node = node.filter(|node| !node.spec.disks.is_empty());
        let zone = node.map(|node| node.zone().cloned());
        if self.zone_of.get(name) == zone.as_ref() {
            return;
        }
        if let Some(before) = self.zone_of.remove(name) {
            self.take_out(name, &before);
        }
        if let Some(zone) = zone {
            let names = self.names.entry(zone.clone()).or_default();
            let place = names.partition_point(|other| other.as_str() < name);
            names.insert(place, name.to_owned());
            self.zone_of.insert(name.to_owned(), zone);
        }
    }

    fn take_out(&mut self, name: &str, zone: &Option<Label>) {
        let Some(names) = self.names.get_mut(zone) else { return };
        if let Ok(place) = names.binary_search_by(|other| other.as_str().cmp(name)) {
            names.remove(place);
        }
        if names.is_empty() {
            self.names.remove(zone);
        }
    }
}

impl ClusterState {
    /// Returns about `most` nodes with disks, as many of each zone as of any other, from a place that
    /// `random` chooses. Each zone has at least one among them.
    pub(crate) fn some_nodes(&self, most: usize, random: u64) -> BTreeSet<&str> {
        let zones = &self.index.zones.names;
        let share = most.div_ceil(zones.len().max(1));
        let of_zone = |names: &'_ Vec<String>| {
            let length = u64::try_from(names.len()).unwrap_or(u64::MAX);
            usize::try_from(random.checked_rem(length).unwrap_or(0)).unwrap_or(0)
        };
        let some = zones.values().flat_map(|names| {
            let (before, from) = names.split_at(of_zone(names));
            from.iter().chain(before).take(share)
        });
        some.map(String::as_str).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Timestamp;
    use crate::objects::{DiskSpec, Metadata, NodeSpec, NodeStatus};

    fn cluster(zones: &[(&str, usize)]) -> ClusterState {
        let mut cluster = ClusterState::default();
        for (zone, count) in zones {
            for at in 0..*count {
                let disks = [("/disk".to_owned(), DiskSpec::of_new(0))].into();
                let spec = NodeSpec { zone: zone.parse().ok(), disks, ..NodeSpec::default() };
                let metadata = Metadata::new(format!("{zone}-{at:03}"), Timestamp::UNIX_EPOCH);
                cluster.insert(Node { metadata, spec, status: NodeStatus::default() }.into());
            }
        }
        cluster
    }

    fn of_zone(nodes: &BTreeSet<&str>, zone: &str) -> usize {
        nodes.iter().filter(|name| name.starts_with(zone)).count()
    }

    #[test]
    fn each_zone_has_its_share_whatever_the_random_number() {
        let cluster = cluster(&[("a", 100), ("b", 100), ("c", 3)]);
        for random in [0, 1, 99, 100, 12_345, u64::MAX] {
            let some = cluster.some_nodes(30, random);
            assert_eq!((of_zone(&some, "a"), of_zone(&some, "b"), of_zone(&some, "c")), (10, 10, 3));
        }
        assert_ne!(cluster.some_nodes(30, 1), cluster.some_nodes(30, 50));
    }

    #[test]
    fn nodes_without_disks_make_no_zone() {
        let mut cluster = cluster(&[("a", 2), ("b", 1)]);
        let mut node = cluster.nodes["b-000"].clone();
        node.spec.disks.clear();
        cluster.insert(node.into());
        assert_eq!(cluster.some_nodes(2, 0), BTreeSet::from(["a-000", "a-001"]));
    }

    #[test]
    fn without_zones_all_nodes_are_one() {
        let cluster = cluster(&[("", 50)]);
        assert_eq!(cluster.some_nodes(20, 45).len(), 20);
        assert_eq!(cluster.some_nodes(80, 45).len(), 50);
        assert_eq!(ClusterState::default().some_nodes(20, 7).len(), 0);
    }
}
