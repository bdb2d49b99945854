//! The scheduler: chooses nodes and disks for replicas, or explains why none fits.
//!
//! [`candidates()`] reads the nodes from the cluster state, and [`schedule`] decides over them alone. First
//! comes the table of [`filters`], each entry of which can explain why it removes a node or a disk. Then
//! comes the table of [`scores`], of which the first that differs between two disks decides. A new rule is
//! one more line in one of the tables.

mod better;
mod candidates;
mod filters;
mod growth;
mod refusal;
mod room;
mod sampling;
mod scores;
mod zones;

use std::collections::BTreeMap;

use crate::objects::{DataLocality, Volume};
use crate::{Label, Labels, NodeName};

pub use crate::objects::RESERVED_PERCENT;
pub use better::better_location;
pub(crate) use candidates::largest_room_bytes;
pub use candidates::{candidates, candidates_for_new, taken_bytes};
pub use filters::Filter;
pub use growth::room_to_grow;
pub use refusal::{PlacementRefusal, Removal};
pub use room::{Room, room};
pub use sampling::place;
pub use scores::Gain;
use zones::Zones;

/// The limits of the use of disks, and the rule for cordoned machines, for all volumes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The limit of scheduled bytes, in percent of the bytes that are not reserved. Replicas are sparse, so
    /// more than 100 can work, and can run out of space.
    pub storage_over_provisioning_percentage: u32,
    /// A disk with less than this free, in percent of its size, gets no new replica.
    pub storage_minimal_available_percentage: u32,
    /// True if machines that are cordoned in Kubernetes get no new replica.
    pub disable_scheduling_on_cordoned_node: bool,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
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
    pub limits: Limits,
}

impl PlacementRequest {
    /// Returns the requirements of each replica of `volume`.
    #[must_use]
    pub fn of(volume: &Volume, limits: Limits) -> PlacementRequest {
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
    /// The tags of the node.
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
    /// The disks of the node.
    pub disks: Vec<DiskCandidate>,
}

/// A disk that could take replicas.
#[derive(Clone, Debug)]
pub struct DiskCandidate {
    /// The path of the disk.
    pub path: String,
    /// The identity of the disk.
    pub uuid: String,
    /// The tags of the disk.
    pub tags: Labels,
    /// The reason why the node takes no replica.
    pub refusal: Option<String>,
    /// The size in bytes.
    pub total_bytes: u64,
    /// The free bytes.
    pub available_bytes: u64,
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
    fn same_volume(&self) -> u32 {
        self.disks.iter().map(|disk| disk.same_volume).sum()
    }

    fn excused(&self) -> u32 {
        self.disks.iter().map(|disk| disk.excused).sum()
    }
}

impl DiskCandidate {
    /// Returns the bytes that can still be scheduled.
    #[must_use]
    pub fn room_bytes(&self, limits: Limits) -> u64 {
        let usable = self.total_bytes.saturating_sub(self.reserved_bytes);
        percent_of(limits.storage_over_provisioning_percentage, usable).saturating_sub(self.scheduled_bytes)
    }

    /// Returns the bytes that have to stay free.
    fn minimal_available_bytes(&self, limits: Limits) -> u64 {
        percent_of(limits.storage_minimal_available_percentage, self.total_bytes)
    }
}

/// The state of a zone.
#[derive(Clone, Copy, Debug, Default)]
struct Zone {
    /// The number of replicas of the volume that stay in it.
    same_volume: u32,
    /// The number of these that keep no other one away.
    excused: u32,
    /// The average room on a disk that can be chosen, because zones need not have the same number of disks.
    mean_room_bytes: u64,
}

/// Returns exactly the percentage, rounded down. Avoids 128 bits, whose division would dominate the time of a
/// placement.
fn percent_of(percent: u32, bytes: u64) -> u64 {
    let percent = u64::from(percent);
    (bytes / 100).saturating_mul(percent).saturating_add(bytes % 100 * percent / 100)
}

/// The place of one replica.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// The node of the chosen disk.
    pub node: NodeName,
    /// The disk there.
    pub disk_path: String,
    /// The identity of that disk.
    pub disk_uuid: String,
}

/// Finds places for as many replicas as are missing from `present` to `wanted`. `nodes` has the places of the
/// existing ones, and also has the new ones when this returns.
///
/// # Errors
/// [`PlacementRefusal`] if not all of them have a place; none is taken then.
pub fn schedule(
    request: &PlacementRequest,
    nodes: &mut [NodeCandidate],
    present: u32,
    wanted: u32,
) -> Result<Vec<Placement>, PlacementRefusal> {
    choose(request, nodes, present, wanted, |_, _, _| true)
        .map_err(|(placed, zones)| PlacementRefusal::new(request, nodes, &zones, placed, wanted))
}

/// Finds places that are all `accepted`. The error has the number of replicas before the one without a place.
fn choose(
    request: &PlacementRequest,
    nodes: &mut [NodeCandidate],
    present: u32,
    wanted: u32,
    accepted: fn(&[NodeCandidate], &Zones, usize) -> bool,
) -> Result<Vec<Placement>, (u32, Zones)> {
    let mut zones = Zones::of(nodes);
    if present >= wanted {
        return Ok(Vec::new());
    }
    let mut choices = zones.count(request, nodes);
    let mut placements = Vec::new();
    for placed in present..wanted {
        match best(request, nodes, &zones, &choices) {
            Some((at, disk_at)) if accepted(nodes, &zones, at) => {
                placements.push(take(request, &mut nodes[at], disk_at));
                zones.follow(request, nodes, at, &mut choices);
            }
            _ => return Err((placed, zones)),
        }
    }
    Ok(placements)
}

/// Finds a place for one more replica than the `present` ones.
///
/// # Errors
/// [`PlacementRefusal`] if no place is found.
pub fn place_one(
    request: &PlacementRequest,
    nodes: &mut [NodeCandidate],
    present: u32,
) -> Result<Placement, PlacementRefusal> {
    let mut placements = schedule(request, nodes, present, present.saturating_add(1))?;
    placements.pop().ok_or_else(|| PlacementRefusal::of(request, BTreeMap::new(), present, present))
}

fn take(request: &PlacementRequest, node: &mut NodeCandidate, disk_at: usize) -> Placement {
    let disk = &mut node.disks[disk_at];
    disk.same_volume += 1;
    disk.scheduled_bytes = disk.scheduled_bytes.saturating_add(request.size_bytes);
    disk.available_bytes = disk.available_bytes.saturating_sub(request.used_bytes);
    Placement { node: node.name.clone(), disk_path: disk.path.clone(), disk_uuid: disk.uuid.clone() }
}

/// Returns the best of the disks that pass all filters.
fn best(
    request: &PlacementRequest,
    nodes: &[NodeCandidate],
    zones: &Zones,
    choices: &[(usize, usize)],
) -> Option<(usize, usize)> {
    let scored = choices.iter().map(|(at, disk_at)| {
        let node = &nodes[*at];
        let choice = scores::Choice { node, disk: &node.disks[*disk_at], zone: zones.of_node(*at) };
        ((scores::scores(request, &choice), choice), (*at, *disk_at))
    });
    scored.min_by(|(one, _), (other, _)| scores::compare(one, other)).map(|(_, place)| place)
}

#[cfg(test)]
mod tests;
