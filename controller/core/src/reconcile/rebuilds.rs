//! Counts the rebuilds on each node, and decides which volumes need the next place there most.

use std::collections::BTreeMap;

use shorthorn_types::ReplicaId;

use super::{Context, remaining};
use crate::objects::{ConditionType, Engine, MemberMode, Replica, Volume, VolumeState};
use crate::{ClusterState, NodeName};

/// The rebuilds in the cluster, as a volume with that many members counts them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Rebuilds {
    by_node: BTreeMap<NodeName, u32>,
    /// The number of other volumes that wait for a place and have fewer members.
    needier: u32,
}

impl Rebuilds {
    /// Looks at every engine that serves and may lack a member. Only a volume that is about to place a
    /// replica needs that.
    pub(super) fn look(context: &Context<'_>, engine: &Engine) -> Rebuilds {
        let cluster = context.cluster;
        let mut rebuilds = Rebuilds::default();
        let own = members(engine);
        for other in cluster.incomplete_engines() {
            let Some(owner) = cluster.volumes.get(&other.metadata.name) else { continue };
            let coming = coming(cluster, owner, other);
            let has_fewer = members(other) < own.min(owner.spec.number_of_replicas);
            let is_needier = has_fewer && coming.is_empty() && waits_for_scheduling(context, owner, other);
            rebuilds.needier += u32::from(is_needier);
            for replica in coming {
                *rebuilds.by_node.entry(replica.spec.node_id.clone()).or_default() += 1;
            }
        }
        // Replicas of new volumes are made, not rebuilt.
        let is_rebuild = |replica: &&Replica| {
            let owner = cluster.volumes.get(replica.spec.volume_name.as_str());
            owner.is_some_and(|owner| owner.status.state != VolumeState::Creating)
        };
        for replica in cluster.replicas.coming().filter(is_rebuild) {
            *rebuilds.by_node.entry(replica.spec.node_id.clone()).or_default() += 1;
        }
        rebuilds
    }

    /// Returns how many more replicas may be placed on that node for this volume. Volumes that need a place
    /// more come first.
    pub(super) fn left(&self, node: &NodeName, most: u32) -> u32 {
        let there = self.by_node.get(node).copied().unwrap_or(0);
        most.saturating_sub(there).saturating_sub(self.needier)
    }
}

/// Returns true if the volume would have a replica made now, because none of the missing ones may come back
/// soon. A volume without any possible place delays no other one.
fn waits_for_scheduling(context: &Context<'_>, volume: &Volume, engine: &Engine) -> bool {
    let scheduled = volume.status.conditions.get(ConditionType::Scheduled);
    let limit = context.settings.replica_replace_after;
    let is_over = |since| remaining(since, limit, context.now).is_zero();
    let may_come = |replica: &Replica| {
        !engine.status.has_member(replica.spec.replica_id) && !replica.status.lost_since.is_some_and(is_over)
    };
    scheduled.is_none_or(|scheduled| scheduled.status)
        && !context.cluster.replicas_of(&volume.spec.volume_name).any(may_come)
}

fn members(engine: &Engine) -> u32 {
    let members = engine.status.replica_mode_map.values();
    u32::try_from(members.filter(|member| member.mode == MemberMode::Member).count()).unwrap_or(u32::MAX)
}

/// Returns the replicas that are being rebuilt, or have been made for that and are not yet.
fn coming<'a>(cluster: &'a ClusterState, volume: &'a Volume, engine: &'a Engine) -> Vec<&'a Replica> {
    let mode = |id: ReplicaId| engine.status.replica_mode_map.get(&id).map(|member| member.mode);
    let is_member = |id: &ReplicaId| mode(*id) == Some(MemberMode::Member);
    let wanted = volume.spec.number_of_replicas as usize;
    // Most volumes have all their members: nothing is looked up for those.
    let modes = &engine.status.replica_mode_map;
    if modes.len() >= wanted && modes.keys().all(is_member) {
        return Vec::new();
    }
    let is_coming = |replica: &&Replica| {
        let id = replica.spec.replica_id;
        let is_new = replica.status.healthy_at.is_none() && !volume.status.first_members.contains(&id);
        match mode(id) {
            Some(MemberMode::Member) => false,
            Some(MemberMode::Rebuilding) => true,
            Some(MemberMode::Failed | MemberMode::Connecting) | None => {
                is_new && !replica.metadata.is_deleting() && replica.status.lost_since.is_none()
            }
        }
    };
    cluster.replicas_of(&volume.spec.volume_name).filter(is_coming).collect()
}
