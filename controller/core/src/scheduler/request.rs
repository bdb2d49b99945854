//! The input of a placement: the requirements of the replicas, the nodes with their disks, and the zones.

use crate::objects::{DataLocality, Volume};
use crate::{Label, Labels, NodeName, Selectors};

/// The limits of the use of disks, and the rule for cordoned machines, for all volumes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SchedulingLimits {
    /// The limit of scheduled bytes, in percent of the bytes that are not reserved. Replicas are sparse, so
    /// more than 100 can work, and can run out of space.
    pub storage_over_provisioning_percentage: u32,
    /// A disk with less than this free, in percent of its size, gets no new replica.
    pub storage_minimal_available_percentage: u32,
    /// True if machines that are cordoned in Kubernetes get no new replica.
    pub disable_scheduling_on_cordoned_node: bool,
}

impl Default for SchedulingLimits {
    fn default() -> SchedulingLimits {
        SchedulingLimits {
            storage_over_provisioning_percentage: 100,
            storage_minimal_available_percentage: 10,
            disable_scheduling_on_cordoned_node: true,
        }
    }
}

/// The requirements of a placement.
#[derive(Clone, Debug, Default)]
pub struct PlacementRequest {
    /// The maximum size of each replica in bytes.
    pub size_bytes: u64,
    /// The bytes that each replica takes at once: a new one gets the data of the others.
    pub used_bytes: u64,
    /// True if several replicas may be on one node.
    pub soft_anti_affinity: bool,
    /// True if several replicas may be in one zone. Nodes of no zone count as one zone.
    pub zone_soft_anti_affinity: bool,
    /// True if several replicas may be on one disk.
    pub disk_soft_anti_affinity: bool,
    /// The tags that a node must have.
    pub node_selector: Labels,
    /// The tags that a disk must have.
    pub disk_selector: Labels,
    /// The node that should have a replica, if one should.
    pub local: Option<NodeName>,
    /// The limits of the use of disks, and the rule for cordoned machines.
    pub limits: SchedulingLimits,
}

impl PlacementRequest {
    /// Returns the requirements of each replica of `volume`.
    #[must_use]
    pub fn of(volume: &Volume, limits: SchedulingLimits) -> PlacementRequest {
        let (spec, status) = (&volume.spec, &volume.status);
        let place = spec.node_id.as_ref().or(status.current_node_id.as_ref());
        let place = place.or(spec.preferred_node_id.as_ref());
        PlacementRequest {
            size_bytes: spec.size,
            used_bytes: 0,
            soft_anti_affinity: spec.replica_soft_anti_affinity,
            zone_soft_anti_affinity: spec.replica_zone_soft_anti_affinity,
            disk_soft_anti_affinity: spec.replica_disk_soft_anti_affinity,
            node_selector: spec.node_selector.clone(),
            disk_selector: spec.disk_selector.clone(),
            local: place.filter(|_| spec.data_locality == DataLocality::BestEffort).cloned(),
            limits,
        }
    }
}

/// A node that could take replicas.
#[derive(Clone, Debug)]
pub struct NodeCandidate {
    /// Name of its Node object.
    pub name: NodeName,
    /// The zone, whose nodes may fail together.
    pub zone: Option<Label>,
    /// The tags that [`PlacementRequest::node_selector`] is compared with.
    pub tags: Labels,
    /// True if its administrator wants no new replicas there.
    pub cordoned: bool,
    /// True if its machine is cordoned in Kubernetes.
    pub machine_cordoned: bool,
    /// True if the replicas on the node are about to leave: they keep no other replica out of the zone.
    pub evicted: bool,
    /// The reason why the node cannot make a replica now.
    pub not_ready: Option<String>,
    /// True if the node rebuilds as many replicas as it may.
    pub is_busy: bool,
    /// The disks that its spec lists, usable or not.
    pub disks: Vec<DiskCandidate>,
}

/// A disk that could take replicas.
#[derive(Clone, Debug, Default)]
pub struct DiskCandidate {
    /// The directory that is the disk.
    pub path: String,
    /// The identity of the disk.
    pub uuid: String,
    /// The tags that [`PlacementRequest::disk_selector`] is compared with.
    pub tags: Labels,
    /// The reason why the node takes no replica.
    pub refusal: Option<String>,
    /// The size of the file system in bytes.
    pub total_bytes: u64,
    /// The free bytes of the file system.
    pub available_bytes: u64,
    /// The part of these that rebuilds in progress will take.
    pub coming_bytes: u64,
    /// The bytes that replicas leave to other users.
    pub reserved_bytes: u64,
    /// The sum of the volume sizes of its replicas.
    pub scheduled_bytes: u64,
    /// The number of replicas of this volume on it.
    pub same_volume: u32,
    /// The number of these that are lost and keep no other one away.
    pub excused: u32,
}

impl NodeCandidate {
    pub(super) fn same_volume(&self) -> u32 {
        self.disks.iter().map(|disk| disk.same_volume).sum()
    }

    pub(super) fn excused(&self) -> u32 {
        self.disks.iter().map(|disk| disk.excused).sum()
    }

    /// Returns true if the node and one of its disks have the tags.
    pub(crate) fn has_tags(&self, selectors: &Selectors) -> bool {
        selectors.node.is_subset(&self.tags)
            && self.disks.iter().any(|disk| selectors.disk.is_subset(&disk.tags))
    }
}

impl DiskCandidate {
    /// Returns the bytes that can still be scheduled.
    #[must_use]
    pub fn room_bytes(&self, limits: SchedulingLimits) -> u64 {
        let usable = self.total_bytes.saturating_sub(self.reserved_bytes);
        percent_of(limits.storage_over_provisioning_percentage, usable).saturating_sub(self.scheduled_bytes)
    }

    /// Returns the bytes that have to stay free.
    pub(super) fn minimal_available_bytes(&self, limits: SchedulingLimits) -> u64 {
        percent_of(limits.storage_minimal_available_percentage, self.total_bytes)
    }
}

/// The state of a zone.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Zone {
    /// The number of replicas of the volume that stay in it.
    pub(super) same_volume: u32,
    /// The number of these that keep no other one away.
    pub(super) excused: u32,
    /// The average room on a disk that can be chosen, because zones need not have the same number of disks.
    pub(super) mean_room_bytes: u64,
}

/// Returns exactly the percentage, rounded down. Avoids 128 bits, whose division would dominate the time of a
/// placement.
fn percent_of(percent: u32, bytes: u64) -> u64 {
    let percent = u64::from(percent);
    (bytes / 100).saturating_mul(percent).saturating_add(bytes % 100 * percent / 100)
}
