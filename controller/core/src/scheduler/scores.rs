//! Orders the places that pass the filters: the first score that differs decides, and the smaller is better.

use std::cmp::Ordering;

use super::request::{DiskCandidate, NodeCandidate, PlacementRequest, Zone};

/// A disk that can be chosen.
pub(super) struct PlacementChoice<'a> {
    pub(super) node: &'a NodeCandidate,
    pub(super) disk: &'a DiskCandidate,
    pub(super) zone: &'a Zone,
}

type Score = fn(&PlacementRequest, &PlacementChoice<'_>) -> u64;

/// Zones first, then nodes in them, then disks; before all of that the place that was asked for.
const SPREAD: &[(Gain, Score)] =
    &[(Gain::Locality, locality), (Gain::Zone, used_zone), (Gain::Node, used_node), (Gain::Disk, used_disk)];

/// The scores of the room.
const ROOM: &[Score] = &[fuller_zone, fuller_disk];

/// The advantage of a place over another one, the most important first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Gain {
    /// The place is on the node on which the volume is used.
    Locality,
    /// The zone has fewer replicas of the volume.
    Zone,
    /// The node has fewer replicas of the volume.
    Node,
    /// The disk has fewer replicas of the volume.
    Disk,
    /// The disk has more room to schedule.
    Room,
}

/// The scores of a choice, the most important first.
pub(super) type Scores = [u64; SPREAD.len() + ROOM.len()];

/// Returns the scores of a choice. They are computed once for many comparisons.
pub(super) fn scores(request: &PlacementRequest, choice: &PlacementChoice<'_>) -> Scores {
    let mut scores = [0; SPREAD.len() + ROOM.len()];
    let all = SPREAD.iter().map(|(_, score)| score).chain(ROOM);
    for (value, score) in scores.iter_mut().zip(all) {
        *value = score(request, choice);
    }
    scores
}

/// Compares two choices with their scores.
pub(super) fn compare(
    one: &(Scores, PlacementChoice<'_>),
    other: &(Scores, PlacementChoice<'_>),
) -> Ordering {
    // Names decide between equal scores.
    let names = || {
        let ((_, one), (_, other)) = (one, other);
        (&one.node.name, &one.disk.path).cmp(&(&other.node.name, &other.disk.path))
    };
    one.0.cmp(&other.0).then_with(names)
}

/// Compares the spread of the replicas with `one` instead of `other`, and returns the reason of the order;
/// none if equal.
pub(super) fn spread(
    request: &PlacementRequest,
    one: &PlacementChoice<'_>,
    other: &PlacementChoice<'_>,
) -> Option<(Ordering, Gain)> {
    let mut orders =
        SPREAD.iter().map(|(gain, score)| (score(request, one).cmp(&score(request, other)), *gain));
    orders.find(|(order, _)| order.is_ne())
}

/// Returns the node of the attachment, unless it has a replica already.
fn locality(request: &PlacementRequest, choice: &PlacementChoice<'_>) -> u64 {
    let is_local = request.local.as_ref() == Some(&choice.node.name);
    u64::from(!is_local || choice.node.same_volume() > 0)
}

fn used_zone(_: &PlacementRequest, choice: &PlacementChoice<'_>) -> u64 {
    choice.zone.same_volume.into()
}

fn used_node(_: &PlacementRequest, choice: &PlacementChoice<'_>) -> u64 {
    choice.node.same_volume().into()
}

fn used_disk(_: &PlacementRequest, choice: &PlacementChoice<'_>) -> u64 {
    choice.disk.same_volume.into()
}

/// Prefers the zone with more room. Otherwise the zones that come first by name would fill up first, and the
/// last one would lag behind for good.
fn fuller_zone(_: &PlacementRequest, choice: &PlacementChoice<'_>) -> u64 {
    u64::MAX - choice.zone.mean_room_bytes
}

fn fuller_disk(request: &PlacementRequest, choice: &PlacementChoice<'_>) -> u64 {
    u64::MAX - choice.disk.room_bytes(request.limits)
}
