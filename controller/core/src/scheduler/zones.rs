//! Totals of the nodes of a zone.

use std::collections::BTreeMap;

use super::filters;
use super::request::{NodeCandidate, PlacementRequest, Zone};
use crate::Label;

/// The zones of some nodes. Which node is in which is found once, the sums are counted before each choice.
pub(super) struct Zones {
    of_node: Vec<usize>,
    zones: Vec<Zone>,
}

impl Zones {
    pub(super) fn of(nodes: &[NodeCandidate]) -> Zones {
        let mut numbers: BTreeMap<Option<&Label>, usize> = BTreeMap::new();
        let mut of_node = Vec::with_capacity(nodes.len());
        for node in nodes {
            let next = numbers.len();
            of_node.push(*numbers.entry(node.zone.as_ref()).or_insert(next));
        }
        Zones { of_node, zones: vec![Zone::default(); numbers.len()] }
    }

    pub(super) fn of_node(&self, at: usize) -> &Zone {
        &self.zones[self.of_node[at]]
    }

    /// Returns the number of replicas in the zone that has the fewest.
    pub(super) fn least_used(&self) -> u32 {
        self.zones.iter().map(|zone| zone.same_volume).min().unwrap_or(0)
    }

    /// Counts the current replicas, and returns the disks that pass all filters, as indexes of node and disk.
    pub(super) fn count(
        &mut self,
        request: &PlacementRequest,
        nodes: &[NodeCandidate],
    ) -> Vec<(usize, usize)> {
        self.zones.fill(Zone::default());
        for (node, zone) in nodes.iter().zip(&self.of_node).filter(|(node, _)| !node.evicted) {
            let zone = &mut self.zones[*zone];
            zone.same_volume += node.same_volume();
            zone.excused += node.excused();
        }
        // Which nodes can be chosen depends on the sums above.
        let mut choices = Vec::with_capacity(nodes.len());
        let mut rooms = vec![(0u128, 0u128); self.zones.len()];
        for (at, node) in nodes.iter().enumerate() {
            if !filters::takes(request, node, self.of_node(at)) {
                continue;
            }
            for (disk_at, disk) in node.disks.iter().enumerate() {
                if filters::takes_on(request, disk) {
                    let (bytes, disks) = &mut rooms[self.of_node[at]];
                    *bytes += u128::from(disk.room_bytes(request.limits));
                    *disks += 1;
                    choices.push((at, disk_at));
                }
            }
        }
        for (zone, room) in self.zones.iter_mut().zip(rooms) {
            zone.mean_room_bytes = mean(room);
        }
        choices
    }

    /// Follows a replica that was placed on a disk of the node `at`: keeps the choices that still pass all
    /// filters. Only its zone has changed, and no disk can be chosen that could not be chosen before.
    pub(super) fn follow(
        &mut self,
        request: &PlacementRequest,
        nodes: &[NodeCandidate],
        at: usize,
        choices: &mut Vec<(usize, usize)>,
    ) {
        let changed = self.of_node[at];
        if !nodes[at].evicted {
            self.zones[changed].same_volume += 1;
        }
        let zone = self.zones[changed];
        let mut room = (0u128, 0u128);
        choices.retain(|(at, disk_at)| {
            if self.of_node[*at] != changed {
                return true;
            }
            let (node, disk) = (&nodes[*at], &nodes[*at].disks[*disk_at]);
            let is_choice = filters::takes(request, node, &zone) && filters::takes_on(request, disk);
            if is_choice {
                room.0 += u128::from(disk.room_bytes(request.limits));
                room.1 += 1;
            }
            is_choice
        });
        self.zones[changed].mean_room_bytes = mean(room);
    }
}

/// Returns the average of the room on that many disks.
fn mean((bytes, disks): (u128, u128)) -> u64 {
    u64::try_from(bytes.checked_div(disks).unwrap_or(0)).unwrap_or(u64::MAX)
}
