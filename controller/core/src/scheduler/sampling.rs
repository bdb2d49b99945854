//! Placements in large clusters: a part of the nodes is looked at first.

use super::candidates::some_candidates;
use super::request::{NodeCandidate, PlacementRequest};
use super::zones::Zones;
use super::{Placement, PlacementRefusal, candidates, choose, schedule};
use crate::ClusterState;
use crate::objects::{Replica, Volume};
use crate::observed::Agents;

/// The number of nodes at which a placement looks first. A cluster of up to twice as many is looked at as a
/// whole at once.
const SAMPLED_NODES: usize = 256;

/// Finds places for as many replicas of `volume` as are missing from `present` to `wanted`.
///
/// In a large cluster it looks at some nodes of each zone first, from a place that `random` chooses. Their
/// choice counts only if no other node could spread the replicas better: it may have less room than the best.
/// The cost of a placement would grow with the cluster otherwise.
///
/// # Errors
/// [`PlacementRefusal`] if not all of them have a place among all nodes.
pub fn place(
    cluster: &ClusterState,
    agents: &Agents,
    volume: &Volume,
    request: &PlacementRequest,
    (present, wanted): (u32, u32),
    random: u64,
) -> Result<Vec<Placement>, PlacementRefusal> {
    if cluster.nodes.len() > 2 * SAMPLED_NODES {
        let own: Vec<&Replica> = cluster.replicas_of(&volume.spec.volume_name).collect();
        let part = (SAMPLED_NODES, random);
        let mut nodes = some_candidates(cluster, agents, &own, request.local.as_ref(), part);
        if let Ok(placements) = choose(request, &mut nodes, present, wanted, is_best_spread) {
            return Ok(placements);
        }
    }
    schedule(request, &mut candidates(cluster, agents, volume), present, wanted)
}

/// Returns true if no other node, whether it is among these or not, could spread the replicas better.
fn is_best_spread(nodes: &[NodeCandidate], zones: &Zones, at: usize) -> bool {
    nodes[at].same_volume() == 0 && zones.of_node(at).same_volume == zones.least_used()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;
    use crate::example::{DISK, Example};
    use crate::objects::{DiskStatus, Key, Kind};

    const NODES: usize = 2 * SAMPLED_NODES + 88;

    /// Returns a large cluster with `zones` zones, a volume without replicas, and free disks on the nodes for
    /// which `has_room` is true.
    fn cluster(zones: usize, has_room: impl Fn(usize) -> bool) -> Example {
        let mut example = Example::new();
        for name in ["a", "b", "c"] {
            example.cluster.remove(&Key::new(Kind::Node, name));
        }
        let replicas: Vec<String> = example.cluster.replicas.keys().cloned().collect();
        replicas.iter().for_each(|name| example.cluster.remove(&Key::new(Kind::Replica, name)));
        for at in 0..NODES {
            let name = format!("n{at:03}");
            example.add_node(&name);
            let mut node = example.node(&name).clone();
            node.spec.zone = (zones > 0).then(|| format!("z{}", at % zones).parse().unwrap());
            let storage_maximum = if has_room(at) { 100 << 30 } else { 0 };
            let status = DiskStatus { storage_maximum, ..DiskStatus::default() };
            node.status.disk_status.insert(DISK.to_owned(), status);
            example.cluster.insert(node.into());
        }
        example
    }

    fn placed(example: &Example, random: u64) -> Result<Vec<Placement>, PlacementRefusal> {
        let volume = &example.cluster.volumes["v"];
        let request = PlacementRequest::of(volume, crate::scheduler::SchedulingLimits::default());
        place(&example.cluster, &example.agents, volume, &request, (0, 3), random)
    }

    fn number(placement: &Placement) -> usize {
        placement.node.as_str()[1..].parse().unwrap()
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 32, ..ProptestConfig::default() })]
        #[test]
        fn replicas_are_spread_as_well_as_among_all_nodes(zones in 0..5usize, random in any::<u64>()) {
            let placements = placed(&cluster(zones, |_| true), random).unwrap();
            let mut used = BTreeMap::new();
            for placement in &placements {
                *used.entry(number(placement) % zones.max(1)).or_insert(0) += 1;
            }
            let nodes: std::collections::BTreeSet<usize> = placements.iter().map(number).collect();
            prop_assert_eq!(nodes.len(), 3);
            let best = 3usize.div_ceil(zones.max(1));
            prop_assert!(used.values().all(|count| *count <= best), "{:?}", placements);
        }

        #[test]
        fn the_only_nodes_with_room_are_found(first in 0..NODES - 2, random in any::<u64>()) {
            let has_room = |at: usize| (first..first + 3).contains(&at);
            let mut nodes: Vec<usize> = placed(&cluster(0, has_room), random)
                .unwrap().iter().map(number).collect();
            nodes.sort_unstable();
            prop_assert_eq!(nodes, [first, first + 1, first + 2]);
        }
    }

    #[test]
    fn a_part_of_the_nodes_is_enough_and_all_of_them_explain_a_refusal() {
        let placements: Vec<usize> = placed(&cluster(0, |_| true), 300).unwrap().iter().map(number).collect();
        assert!(placements.iter().all(|at| (300..300 + SAMPLED_NODES).contains(at)), "{placements:?}");
        let refusal = placed(&cluster(0, |at| at < 2), 300).unwrap_err();
        assert_eq!((refusal.placed, refusal.by_node.len()), (2, NODES));
    }

    /// The zone with the fewest replicas has room only outside the part.
    #[test]
    fn a_worse_spread_among_some_nodes_is_not_accepted() {
        let zone_size = NODES / 2;
        let has_room = |at: usize| at.is_multiple_of(2) || at / 2 < 3;
        let random = u64::try_from(zone_size / 2).unwrap();
        let placements = placed(&cluster(2, has_room), random).unwrap();
        assert!(placements.iter().any(|placement| number(placement) % 2 == 1), "{placements:?}");
    }
}
