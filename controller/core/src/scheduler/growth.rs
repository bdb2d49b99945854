//! Checks whether the disks of a volume's replicas have space for an expansion.

use std::collections::BTreeMap;

use super::filters;
use super::refusal::{PlacementRefusal, Removal};
use super::request::{DiskCandidate, PlacementRequest, SchedulingLimits};
use crate::objects::{Replica, Volume};
use crate::{ClusterState, NodeName};

/// Returns an error unless every disk with a replica of `volume` has room for a size of `size_bytes`. Unknown
/// disks are not considered: their replicas are lost, and will be replaced.
///
/// # Errors
/// [`PlacementRefusal`] names the disks that cannot.
pub fn room_to_grow(
    cluster: &ClusterState,
    volume: &Volume,
    size_bytes: u64,
    limits: SchedulingLimits,
) -> Result<(), PlacementRefusal> {
    let mut wanted: BTreeMap<(&NodeName, &str), u64> = BTreeMap::new();
    for replica in cluster.replicas_of(&volume.spec.volume_name) {
        *wanted.entry(location_of(replica)).or_default() +=
            size_bytes.saturating_sub(replica.spec.volume_size);
    }
    let mut by_node: BTreeMap<NodeName, Removal> = BTreeMap::new();
    let mut request = PlacementRequest { limits, ..PlacementRequest::of(volume, limits) };
    let asked = u32::try_from(wanted.len()).unwrap_or(u32::MAX);
    let mut refused = 0;
    for ((node, path), more_bytes) in &wanted {
        let Some(disk) = disk(cluster, volume, node, path) else { continue };
        request.size_bytes = *more_bytes;
        if let Some((filter, reason)) = filters::lacks_room(&request, &disk) {
            refused += 1;
            let removal = by_node.entry((*node).clone()).or_insert(Removal { filter, reason: String::new() });
            let gap = if removal.reason.is_empty() { "" } else { ", " };
            removal.reason.push_str(&format!("{gap}disk {path} {reason}"));
        }
    }
    if by_node.is_empty() {
        return Ok(());
    }
    Err(PlacementRefusal::of(&request, by_node, asked - refused, asked))
}

fn location_of(replica: &Replica) -> (&NodeName, &str) {
    (&replica.spec.node_id, replica.spec.disk_path.as_str())
}

/// Returns a disk with its scheduled bytes, including those of other volumes that are about to grow.
fn disk(cluster: &ClusterState, volume: &Volume, node: &NodeName, path: &str) -> Option<DiskCandidate> {
    let object = cluster.nodes.get(node.as_str())?;
    let (spec, status) = (object.spec.disks.get(path)?, object.status.disk_status.get(path)?);
    let scheduled = cluster.replicas.scheduled_on(node.as_str()).and_then(|disks| disks.get(path));
    let scheduled = scheduled.map_or(0, |scheduled| u64::try_from(scheduled.bytes).unwrap_or(u64::MAX));
    let others = cluster
        .growing_volumes()
        .filter(|other| other.metadata.name != volume.metadata.name && !other.is_deleting());
    let coming = others.flat_map(|other| {
        let here = cluster.replicas_of(&other.spec.volume_name);
        let here = here.filter(move |replica| location_of(replica) == (node, path));
        here.map(|replica| other.spec.size.saturating_sub(replica.spec.volume_size))
    });
    Some(DiskCandidate {
        path: path.to_owned(),
        uuid: status.disk_uuid.clone(),
        tags: spec.tags.clone(),
        total_bytes: status.storage_maximum,
        reserved_bytes: spec.storage_reserved,
        scheduled_bytes: coming.fold(scheduled, u64::saturating_add),
        ..DiskCandidate::default()
    })
}
