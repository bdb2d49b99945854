//! Rebalancing: plans moves of replicas to better places, on request.
//!
//! Replicas move only on request, and the only record is `replica.spec.evictionRequested`: such a replica is
//! replaced like one of a drained disk. The volume's reconciler looks for the better place once more when it
//! acts, and cancels the request if none is left. So an old request does no harm.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};

use crate::drain::{self, EvictionReason, RemainingObject};
use crate::objects::{Replica, Robustness, Volume, VolumeState};
use crate::observed::Agents;
use crate::requests::{self, Change, RequestError};
use crate::scheduler::{
    self, DiskCandidate, Gain, NodeCandidate, Placement, PlacementRequest, SchedulingLimits,
};
use crate::{ClusterState, NodeName};

/// A replica that would be better elsewhere.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Move {
    /// Name of its Replica object.
    pub replica: String,
    /// The volume of the replica.
    pub volume: String,
    /// The node that it is on.
    pub from_node: NodeName,
    /// The disk there.
    pub from_disk: String,
    /// The new place.
    pub to: Placement,
    /// The reason for the move.
    pub gain: Gain,
}

/// The moves to make, and those in progress.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RebalancePlan {
    /// The proposed moves, at most one replica of each volume. Moves that separate replicas come first.
    pub moves: Vec<Move>,
    /// Replicas whose move was requested, with the event that each waits for.
    pub under_way: Vec<RemainingObject>,
    /// The number of volumes that were left out, by reason.
    pub left_out: BTreeMap<&'static str, u32>,
}

impl Gain {
    /// Returns the same for people.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Gain::Locality => "to be on the node that uses the volume",
            Gain::Zone => "to be in a zone with fewer replicas of the volume",
            Gain::Node => "to be on a node with fewer replicas of the volume",
            Gain::Disk => "to be on a disk with fewer replicas of the volume",
            Gain::Room => "to be on a disk with more room",
        }
    }
}

/// The input of a plan: a copy of the necessary part of the cluster state, because planning takes a while.
#[derive(Debug)]
pub struct RebalanceInput {
    planner: MovePlanner,
    movable: Vec<Movable>,
    plan: RebalancePlan,
}

/// A volume and its replicas, as far as places matter.
#[derive(Debug)]
struct Movable {
    volume: String,
    request: PlacementRequest,
    locations: Vec<Location>,
}

#[derive(Debug)]
struct Location {
    replica: String,
    node: NodeName,
    disk: String,
}

impl RebalanceInput {
    /// Returns the input of the volumes in `only`, or of all if that is empty.
    ///
    /// # Errors
    /// [`RequestError::NoVolume`] for a volume that does not exist.
    pub fn of(
        cluster: &ClusterState,
        agents: &Agents,
        limits: SchedulingLimits,
        only: &[String],
    ) -> Result<RebalanceInput, RequestError> {
        let only: BTreeSet<&str> = only.iter().map(String::as_str).collect();
        for name in &only {
            requests::find(cluster, name)?;
        }
        let planner = MovePlanner::of(cluster, agents, limits);
        let mut input = RebalanceInput { planner, movable: Vec::new(), plan: RebalancePlan::default() };
        for (name, volume) in &cluster.volumes {
            let replicas: Vec<&Replica> = cluster.replicas_of(&volume.spec.volume_name).collect();
            let movable = Movable::of(agents, limits, volume, &replicas);
            let asked = |replica: &&Replica| {
                drain::eviction_reason(cluster, replica) == Some(EvictionReason::Location)
            };
            if let Some(leaving) = replicas.iter().position(asked) {
                let left = drain::of_replica(cluster, agents, replicas[leaving]);
                input.plan.under_way.push(left);
                input.planner.finish(&movable, leaving, is_replaced(volume, &replicas));
            }
            if only.is_empty() || only.contains(name.as_str()) {
                match left_out(cluster, volume, &replicas) {
                    Some(reason) => *input.plan.left_out.entry(reason).or_default() += 1,
                    None => input.movable.push(movable),
                }
            }
        }
        Ok(input)
    }

    /// Plans the moves. They have to be made one after the other: each relies on those before it, and all on
    /// those in progress.
    #[must_use]
    pub fn plan(mut self) -> RebalancePlan {
        self.plan.moves = self.planner.moves(&self.movable);
        self.plan
    }
}

impl Movable {
    fn of(agents: &Agents, limits: SchedulingLimits, volume: &Volume, replicas: &[&Replica]) -> Movable {
        let used_bytes = scheduler::taken_bytes(agents, replicas);
        let location = |replica: &&Replica| Location {
            replica: replica.metadata.name.clone(),
            node: replica.spec.node_id.clone(),
            disk: replica.spec.disk_path.clone(),
        };
        Movable {
            volume: volume.metadata.name.clone(),
            request: PlacementRequest { used_bytes, ..PlacementRequest::of(volume, limits) },
            locations: replicas.iter().map(location).collect(),
        }
    }
}

/// Requests or cancels the move of this replica to a better place.
///
/// # Errors
/// [`RequestError::NoReplica`] if it is gone.
pub fn ask(cluster: &ClusterState, replica: &str, wanted: bool) -> Result<Change<Replica>, RequestError> {
    let Some(stored) = cluster.replicas.get(replica) else {
        let name = replica.rsplit_once('-').map_or(replica, |(volume, _)| volume).to_owned();
        return Err(RequestError::NoReplica { name, replica: replica.to_owned() });
    };
    let mut next = stored.clone();
    next.spec.eviction_requested = wanted;
    Ok(if next == *stored { Change::AlreadySo(next) } else { Change::Store(next) })
}

/// Returns the reason why no replica of the volume can be moved now; none if one can.
fn left_out(cluster: &ClusterState, volume: &Volume, replicas: &[&Replica]) -> Option<&'static str> {
    let is_leaving = |replica: &&Replica| drain::is_evicted(cluster, replica);
    let is_whole = replicas.len() == volume.spec.number_of_replicas as usize;
    match (volume.status.state, volume.status.robustness) {
        _ if volume.is_deleting() => Some("being deleted"),
        (VolumeState::Attached, _) if replicas.iter().any(is_leaving) => {
            Some("having a replica that leaves its place already")
        }
        (VolumeState::Attached, _) if volume.is_expanding() => Some("being expanded"),
        (VolumeState::Attached, Robustness::Healthy) if is_whole => None,
        (VolumeState::Attached, _) => Some("not healthy"),
        _ => Some("not attached, and replicas are moved only while their volume is"),
    }
}

/// Returns true if the substitute of a replica exists already.
fn is_replaced(volume: &Volume, replicas: &[&Replica]) -> bool {
    let live = replicas.iter().filter(|replica| !replica.metadata.is_deleting()).count();
    live > volume.spec.number_of_replicas as usize
}

/// All nodes, with the replicas of one volume at a time.
#[derive(Debug)]
struct MovePlanner {
    nodes: Vec<NodeCandidate>,
    at: BTreeMap<NodeName, usize>,
    limits: SchedulingLimits,
}

impl MovePlanner {
    fn of(cluster: &ClusterState, agents: &Agents, limits: SchedulingLimits) -> MovePlanner {
        let nodes = scheduler::candidates_for_new(cluster, agents);
        let at = nodes.iter().enumerate().map(|(at, node)| (node.name.clone(), at)).collect();
        MovePlanner { nodes, at, limits }
    }

    /// Returns the moves: first those that separate replicas of one volume, then those from the fullest disk.
    fn moves(&mut self, movable: &[Movable]) -> Vec<Move> {
        let passes: [fn(Gain) -> bool; 2] = [|gain| gain != Gain::Room, |_| true];
        let mut moves = Vec::new();
        let mut moved = BTreeSet::new();
        for wanted in passes {
            let all = movable.iter().enumerate();
            let all =
                all.flat_map(|(at, volume)| (0..volume.locations.len()).map(move |number| (at, number)));
            let keyed =
                |(at, number): (usize, usize)| (self.room_bytes(&movable[at].locations[number]), at, number);
            let mut fullest: BinaryHeap<_> = all.map(keyed).map(Reverse).collect();
            while let Some(Reverse((room_bytes, at, number))) = fullest.pop() {
                if moved.contains(&at) {
                    continue;
                }
                let room_now_bytes = self.room_bytes(&movable[at].locations[number]);
                if room_now_bytes > room_bytes {
                    // Others have left its disk meanwhile: it has time.
                    fullest.push(Reverse((room_now_bytes, at, number)));
                } else if let Some(found) = self.find(&movable[at], number, wanted) {
                    moved.insert(at);
                    moves.push(found);
                }
            }
        }
        moves
    }

    fn room_bytes(&self, location: &Location) -> u64 {
        let node = self.at.get(&location.node).map(|at| &self.nodes[*at]);
        let disk = node.and_then(|node| node.disks.iter().find(|disk| disk.path == location.disk));
        disk.map_or(0, |disk| disk.room_bytes(self.limits))
    }

    fn disk(&mut self, location: &Location) -> Option<&mut DiskCandidate> {
        let node = &mut self.nodes[*self.at.get(&location.node)?];
        node.disks.iter_mut().find(|disk| disk.path == location.disk)
    }

    /// Returns a better place for one of a volume's replicas, which it then has.
    fn find(&mut self, movable: &Movable, number: usize, wanted: fn(Gain) -> bool) -> Option<Move> {
        let Movable { volume, request, locations } = movable;
        for other in locations {
            self.disk(other).into_iter().for_each(|disk| disk.same_volume += 1);
        }
        let here = &locations[number];
        let better = scheduler::better_location(request, &mut self.nodes, (&here.node, &here.disk), wanted);
        let disks = self.nodes.iter_mut().flat_map(|node| &mut node.disks);
        disks.for_each(|disk| disk.same_volume = 0);
        let (gain, to) = better?;
        Some(Move {
            replica: here.replica.clone(),
            volume: volume.clone(),
            from_node: here.node.clone(),
            from_disk: here.disk.clone(),
            to,
            gain,
        })
    }

    /// Counts on a move that was asked for: as if it were over.
    fn finish(&mut self, movable: &Movable, leaving: usize, is_replaced: bool) {
        if !is_replaced {
            // Without any better place it stays.
            let _ = self.find(movable, leaving, |_| true);
        } else if let Some(disk) = self.disk(&movable.locations[leaving]) {
            disk.scheduled_bytes = disk.scheduled_bytes.saturating_sub(movable.request.size_bytes);
        }
    }
}

#[cfg(test)]
mod tests;
