//! The order over what the filters leave: the first score that differs decides, the smaller is better.

use std::cmp::Ordering;

use super::zones::Zone;
use super::{DiskCandidate, NodeCandidate, Request};

/// A disk that can be chosen.
pub(super) struct Choice<'a> {
    pub(super) node: &'a NodeCandidate,
    pub(super) disk: &'a DiskCandidate,
    pub(super) zone: &'a Zone,
}

type Score = fn(&Request, &Choice<'_>) -> u64;

/// Zones first, then nodes in them, then disks, then space; before all of that the place that was asked for.
const SCORES: &[Score] = &[locality, used_zone, used_node, used_disk, fuller_zone, fuller_disk];

pub(super) fn compare(request: &Request, one: &Choice<'_>, other: &Choice<'_>) -> Ordering {
    let mut scores = SCORES.iter().map(|score| score(request, one).cmp(&score(request, other)));
    // Names make it definite.
    let names = || (&one.node.name, &one.disk.path).cmp(&(&other.node.name, &other.disk.path));
    scores.find(|order| order.is_ne()).unwrap_or_else(names)
}

/// The node of the attachment, unless it has a replica already.
fn locality(request: &Request, choice: &Choice<'_>) -> u64 {
    let is_local = request.local.as_ref() == Some(&choice.node.name);
    u64::from(!is_local || choice.node.same_volume() > 0)
}

fn used_zone(_: &Request, choice: &Choice<'_>) -> u64 {
    choice.zone.same_volume.into()
}

fn used_node(_: &Request, choice: &Choice<'_>) -> u64 {
    choice.node.same_volume().into()
}

fn used_disk(_: &Request, choice: &Choice<'_>) -> u64 {
    choice.disk.same_volume.into()
}

/// Without it the zones that come first by name would fill up first, and the last one would lag behind for good.
fn fuller_zone(_: &Request, choice: &Choice<'_>) -> u64 {
    u64::MAX - choice.zone.mean_room_bytes
}

fn fuller_disk(request: &Request, choice: &Choice<'_>) -> u64 {
    u64::MAX - choice.disk.room_bytes(request.limits)
}
