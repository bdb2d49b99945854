//! Free capacity for new volumes.

use shorthorn_types::limits::{BLOCK_BYTES, MAX_VOLUME_BYTES};

use super::request::{NodeCandidate, PlacementRequest};
use super::schedule;
use super::zones::Zones;

/// The capacity that is free for further volumes of some kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FreeCapacity {
    /// The bytes for all volumes together: the sum of the bytes that can be scheduled, divided by the number
    /// of replicas.
    pub available_bytes: u64,
    /// The largest single volume in bytes.
    pub largest_bytes: u64,
}

/// Returns the free capacity for volumes of `wanted` replicas; the size in `request` does not matter.
#[must_use]
pub fn free_capacity(request: &PlacementRequest, nodes: &[NodeCandidate], wanted: u32) -> FreeCapacity {
    let largest_bytes = largest(request, nodes, wanted);
    if largest_bytes == 0 {
        return FreeCapacity::default();
    }
    let smallest = PlacementRequest { size_bytes: BLOCK_BYTES, ..request.clone() };
    let choices = Zones::of(nodes).count(&smallest, nodes);
    let rooms = choices.iter().map(|(at, disk_at)| nodes[*at].disks[*disk_at].room_bytes(request.limits));
    let sum: u128 = rooms.map(u128::from).sum();
    let available_bytes = u64::try_from(sum / u128::from(wanted.max(1))).unwrap_or(u64::MAX);
    FreeCapacity {
        available_bytes: (available_bytes / BLOCK_BYTES * BLOCK_BYTES).max(largest_bytes),
        largest_bytes,
    }
}

/// Returns the largest volume that has a place. A size that does not fit rules out all larger ones, so the
/// search halves the interval.
fn largest(request: &PlacementRequest, nodes: &[NodeCandidate], wanted: u32) -> u64 {
    let fits = |blocks: u64| {
        let request = PlacementRequest { size_bytes: blocks * BLOCK_BYTES, ..request.clone() };
        schedule(&request, &mut nodes.to_vec(), 0, wanted).is_ok()
    };
    let (mut fitting, mut above) = (0, MAX_VOLUME_BYTES / BLOCK_BYTES + 1);
    while above - fitting > 1 {
        let middle = fitting.midpoint(above);
        if fits(middle) { fitting = middle } else { above = middle }
    }
    fitting * BLOCK_BYTES
}
