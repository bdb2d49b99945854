//! The scheduler: chooses nodes and disks for replicas, or explains why none fits.
//!
//! [`candidates()`] reads the nodes from the cluster state, and [`schedule`] decides over them alone. First
//! comes the table of [`filters`], each entry of which can explain why it removes a node or a disk. Then
//! comes the table of [`scores`], of which the first that differs between two disks decides. A new rule is
//! one more line in one of the tables.

mod better_location;
mod candidates;
mod coming_bytes;
mod filters;
mod free_capacity;
mod growth;
mod refusal;
mod request;
mod sampling;
mod scores;
mod zones;

use std::collections::BTreeMap;

use crate::NodeName;

pub use crate::objects::RESERVED_PERCENT;
pub use better_location::better_location;
pub(crate) use candidates::largest_room_bytes;
pub use candidates::{candidates, candidates_for_new, taken_bytes};
pub use filters::Filter;
pub use free_capacity::{FreeCapacity, free_capacity};
pub use growth::room_to_grow;
pub use refusal::{PlacementRefusal, Removal};
pub use request::{DiskCandidate, NodeCandidate, PlacementRequest, SchedulingLimits};
pub use sampling::place;
pub use scores::Gain;
use zones::Zones;

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
        let choice = scores::PlacementChoice { node, disk: &node.disks[*disk_at], zone: zones.of_node(*at) };
        ((scores::scores(request, &choice), choice), (*at, *disk_at))
    });
    scored.min_by(|(one, _), (other, _)| scores::compare(one, other)).map(|(_, place)| place)
}

#[cfg(test)]
mod tests;
