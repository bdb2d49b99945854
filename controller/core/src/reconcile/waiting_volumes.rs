//! Volumes that wait for a place. Thousands may wait, and nodes change all the time: an event costs the same
//! for any number of volumes. It only starts a search, which runs the reconcilers of a few volumes at a time.

use std::time::Duration;

use super::gives_space_away;
use crate::objects::{ConditionType, Key, Kind, Node};
use crate::scheduler::{self, SchedulingLimits};
use crate::{ClusterState, UsefulRoom};

/// The volumes that a search looks at, at most, to return one batch.
const LOOKED_AT_MAX: usize = 1024;
/// The share of each waiting volume in the time between two checks of all of them. A check of a volume looks
/// at all nodes.
const CHECK_EACH: Duration = Duration::from_millis(10);

/// Returns true if the change of the object `key` may give a place to a volume that waits for one.
#[must_use]
pub fn may_open(cluster: &ClusterState, limits: SchedulingLimits, key: &Key) -> bool {
    let Some(useful) = cluster.least_useful_room() else { return false };
    match key.kind {
        // The replica is gone, from a node that the key does not name.
        Kind::Replica => !cluster.replicas.contains_key(&key.name),
        Kind::Node => cluster.nodes.get(&key.name).is_some_and(|node| takes(cluster, limits, node, useful)),
        Kind::Volume | Kind::Engine => false,
    }
}

/// Returns true if the node has that much room for a replica, as far as its stored object shows.
fn takes(cluster: &ClusterState, limits: SchedulingLimits, node: &Node, useful: UsefulRoom) -> bool {
    let is_cordoned = !node.spec.allow_scheduling || node.spec.eviction_requested;
    let is_machine_cordoned = limits.disable_scheduling_on_cordoned_node && node.is_machine_cordoned();
    let is_ready = node.status.conditions.is_true(ConditionType::Ready);
    is_ready
        && !is_cordoned
        && !is_machine_cordoned
        && !node.metadata.is_deleting()
        && scheduler::largest_room_bytes(cluster, node, limits).is_some_and(|room| useful.is_in(room))
}

/// Returns true if the volume of that name waits for a place. A volume places no other replica while one is
/// rebuilt.
fn waits(cluster: &ClusterState, name: &str) -> bool {
    !cluster.has_rebuild(name) && gives_space_away(cluster, &Key::new(Kind::Volume, name))
}

/// Returns the time until a waiting volume is checked again without an event: `least`, or longer if many
/// wait. So the checks of all of them take a bounded share of the time.
pub(super) fn check_after(cluster: &ClusterState, least: Duration) -> Duration {
    let waiting = u32::try_from(cluster.waiting_volumes()).unwrap_or(u32::MAX);
    CHECK_EACH.saturating_mul(waiting).max(least)
}

/// A search for places. An event during a search starts another one after it: a volume that was looked at
/// before the event is looked at again.
#[derive(Clone, Debug, Default)]
pub struct Search {
    /// The volumes that are left, in reverse order.
    left: Vec<String>,
    is_wanted: bool,
}

impl Search {
    /// Starts a search: a place may have opened.
    pub fn start(&mut self) {
        self.is_wanted = true;
    }

    /// Returns true if volumes may be left to look at.
    #[must_use]
    pub fn is_running(&self) -> bool {
        self.is_wanted || !self.left.is_empty()
    }

    /// Returns the next volumes to reconcile, at most `most`.
    #[must_use]
    pub fn next(&mut self, cluster: &ClusterState, most: usize) -> Vec<Key> {
        if self.left.is_empty() && std::mem::take(&mut self.is_wanted) {
            let names = cluster.incomplete_or_moving_volumes().into_iter().rev();
            self.left = names.map(str::to_owned).collect();
        }
        let mut keys = Vec::new();
        for _ in 0..LOOKED_AT_MAX {
            if keys.len() >= most {
                break;
            }
            let Some(name) = self.left.pop() else { break };
            if waits(cluster, &name) {
                keys.push(Key::new(Kind::Volume, name));
            }
        }
        keys
    }
}

#[cfg(test)]
mod tests;
