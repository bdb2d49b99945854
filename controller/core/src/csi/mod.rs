//! Maps the calls of CSI to the stored objects: names, sizes and parameters, and the nodes that may use a
//! volume.
//!
//! The shell has the wire, the waiting and the codes. The changes of calls are decided here, on one state of
//! the cluster state, and stored by compare-and-swap. So no other change comes in between.

mod name;
mod parameters;
mod size;
mod volume_calls;

pub use name::{CsiNameError, MAX_NAME_BYTES, attachment_name, volume_name};
pub use parameters::{PARAMETERS, Parameter, ParameterError, ignored, longhorn_parameters, parameters};
pub use size::{DEFAULT_VOLUME_BYTES, SizeError, fits, size_of_grown, size_of_new};
pub use volume_calls::{
    NewVolume, PlacementState, SizedError, delete, expand, is_away, is_deleted, is_published, is_unknown,
    max_volumes, placement, publish, published_node, published_nodes_of_unknown, undo, unknown_volumes,
    unpublish, waits_for,
};

use crate::ClusterState;

/// Returns true if a node has that name and is in that zone, as far as these are given. Every volume can
/// be reached from it.
#[must_use]
pub fn has_node(cluster: &ClusterState, node: Option<&str>, zone: Option<&str>) -> bool {
    cluster.nodes.values().any(|candidate| {
        // kubelet knows the zone in the agent's configuration, even if an administrator has set another one
        // here.
        let zones = [candidate.spec.zone.as_ref(), candidate.status.zone.as_ref()];
        let in_zone = |zone: &str| zones.into_iter().flatten().any(|own| own.as_str() == zone);
        node.is_none_or(|node| candidate.metadata.name == node) && zone.is_none_or(in_zone)
    })
}

#[cfg(test)]
mod tests;
