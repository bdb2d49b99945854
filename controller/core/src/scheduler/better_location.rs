//! Finds a better place for a replica.

use std::cmp::Ordering;

use super::Placement;
use super::request::{NodeCandidate, PlacementRequest};
use super::scores::{Gain, PlacementChoice, compare, scores, spread};
use super::zones::Zones;
use crate::NodeName;

/// The divisor of a replica's size that gives the minimum gain of a move. Without it, replicas would move in
/// vain between disks whose sizes differ a little.
const WORTH_DIVISOR: u64 = 2;

/// Returns the best place for a replica that is on the disk `path` of `node` now, and the gain, if that is
/// worth a copy. The replicas of its volume must be spread better there, or as well with more even room on
/// the two disks afterwards. Only gains in `wanted` count. If a place is returned, `nodes` has the replica
/// there.
///
/// Each move brings the volume's replicas further apart, or makes the sum of the squares of the disks' room
/// smaller. So moves come to an end, however often this is asked.
pub fn better_location(
    request: &PlacementRequest,
    nodes: &mut [NodeCandidate],
    (node, path): (&NodeName, &str),
    wanted: fn(Gain) -> bool,
) -> Option<(Gain, Placement)> {
    let at = nodes.iter().position(|candidate| candidate.name == *node)?;
    let disk_at = nodes[at].disks.iter().position(|disk| disk.path == path)?;
    take_out(request, nodes, (at, disk_at));
    let better = best(request, nodes, (at, disk_at), wanted);
    let (to, _) = better.unwrap_or(((at, disk_at), Gain::Room));
    let disk = &mut nodes[to.0].disks[to.1];
    disk.same_volume += 1;
    disk.scheduled_bytes = disk.scheduled_bytes.saturating_add(request.size_bytes);
    let placement = Placement {
        disk_path: disk.path.clone(),
        disk_uuid: disk.uuid.clone(),
        node: nodes[to.0].name.clone(),
    };
    better.map(|(_, gain)| (gain, placement))
}

fn take_out(request: &PlacementRequest, nodes: &mut [NodeCandidate], (at, disk_at): (usize, usize)) {
    let disk = &mut nodes[at].disks[disk_at];
    disk.same_volume = disk.same_volume.saturating_sub(1);
    disk.scheduled_bytes = disk.scheduled_bytes.saturating_sub(request.size_bytes);
}

/// Returns the best of the disks that are worth it, for a replica that was taken out of `here`.
fn best(
    request: &PlacementRequest,
    nodes: &[NodeCandidate],
    here: (usize, usize),
    wanted: fn(Gain) -> bool,
) -> Option<((usize, usize), Gain)> {
    let mut zones = Zones::of(nodes);
    let choices = zones.count(request, nodes);
    let choice = |(at, disk_at): (usize, usize)| {
        let node = &nodes[at];
        PlacementChoice { node, disk: &node.disks[disk_at], zone: zones.of_node(at) }
    };
    let worth = |at: (usize, usize)| Some((at, gain(request, &choice(at), &choice(here))?));
    let worth = choices.into_iter().filter(|at| *at != here).filter_map(worth);
    let worth = worth.filter(|(_, gain)| wanted(*gain));
    let scored = worth.map(|(at, gain)| {
        let choice = choice(at);
        ((scores(request, &choice), choice), (at, gain))
    });
    scored.min_by(|(one, _), (other, _)| compare(one, other)).map(|(_, found)| found)
}

/// Returns the gain of `there` over `here`, if that is worth a copy.
fn gain(request: &PlacementRequest, there: &PlacementChoice<'_>, here: &PlacementChoice<'_>) -> Option<Gain> {
    match spread(request, there, here) {
        Some((Ordering::Less, gain)) => Some(gain),
        Some(_) => None,
        None => {
            let room = |choice: &PlacementChoice<'_>| choice.disk.room_bytes(request.limits);
            let worth = request.size_bytes / WORTH_DIVISOR;
            (room(there) > room(here).saturating_add(worth)).then_some(Gain::Room)
        }
    }
}
