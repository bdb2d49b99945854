//! The places that the operator has given up: nodes and disks that do not come back.

use crate::objects::{Key, Kind, Replica};
use crate::{ClusterState, NodeName};

/// Returns true if the operator has given up the node: its object is to be deleted, or is gone.
#[must_use]
pub fn is_node_given_up(cluster: &ClusterState, node: &NodeName) -> bool {
    match cluster.nodes.get(node.as_str()) {
        Some(node) => node.metadata.is_deleting(),
        // A node whose object was only left out has an object.
        None => cluster.unknown(&Key::new(Kind::Node, node.as_str())).is_none(),
    }
}

/// Returns true if the operator has given up the disk of the replica.
#[must_use]
pub fn is_disk_given_up(cluster: &ClusterState, replica: &Replica) -> bool {
    let node = cluster.nodes.get(replica.spec.node_id.as_str());
    let disk = node.and_then(|node| node.spec.disks.get(&replica.spec.disk_path));
    disk.is_some_and(|disk| disk.lost)
}

/// Returns true if the disk or the node of the replica is given up.
#[must_use]
pub fn is_replica_given_up(cluster: &ClusterState, replica: &Replica) -> bool {
    is_disk_given_up(cluster, replica) || is_node_given_up(cluster, &replica.spec.node_id)
}
