//! Counts the rebuilds on each node, and decides which volumes need the next place there most.

use std::collections::BTreeMap;
use std::time::Duration;

use super::{Context, NEW_REPLICA_WAIT, needs_scheduling, remaining};
use crate::objects::{ConditionType, Engine, MemberMode, Replica, Volume, VolumeState};
use crate::scheduler::NodeCandidate;
use crate::{NodeName, Rebuild, Selectors};

/// The rebuilds in the cluster, as a volume with that many members counts them.
#[derive(Clone, Debug)]
pub(super) struct RebuildCounts<'a> {
    context: Context<'a>,
    /// The rebuilds of replicas that are about to be stored.
    coming: BTreeMap<NodeName, u32>,
    /// The numbers of other volumes that wait for a place and have fewer members, by the tags that they ask
    /// for. Each is at most the limit of a node.
    needier: BTreeMap<&'a Selectors, u32>,
}

impl<'a> RebuildCounts<'a> {
    /// Counts the rebuilds. Only a volume that is about to place a replica needs that.
    pub(super) fn count(context: &Context<'a>, engine: &Engine) -> RebuildCounts<'a> {
        let (cluster, most) = (context.cluster, context.settings.rebuilds_per_node);
        let own = engine.status.replica_mode_map.values();
        let own = own.filter(|member| member.mode == MemberMode::Member).count();
        let mut needier: BTreeMap<&Selectors, u32> = BTreeMap::new();
        let waiting = cluster.volumes_without_rebuild(u32::try_from(own).unwrap_or(u32::MAX));
        for (members, selectors, volumes) in waiting {
            let is_needier = |(owner, engine): &(&Volume, &Engine)| {
                members < owner.spec.number_of_replicas && waits_for_scheduling(context, owner, engine)
            };
            let count = needier.entry(selectors).or_default();
            // More than a node may have change nothing.
            let found = volumes.filter(is_needier).take(most.saturating_sub(*count) as usize).count();
            *count = count.saturating_add(u32::try_from(found).unwrap_or(u32::MAX));
        }
        // Replicas of new volumes are made, not rebuilt.
        let is_rebuild = |replica: &&Replica| {
            let owner = cluster.volumes.get(replica.spec.volume_name.as_str());
            owner.is_some_and(|owner| owner.status.state != VolumeState::Creating)
        };
        let mut coming = BTreeMap::new();
        for replica in cluster.replicas.coming().filter(is_rebuild) {
            *coming.entry(replica.spec.node_id.clone()).or_default() += 1;
        }
        RebuildCounts { context: *context, coming, needier }
    }

    /// Returns the number of replicas that may still be placed on that node for this volume. Volumes that
    /// need a place more come first, unless the tags that they ask for are not on this node.
    pub(super) fn left(&self, node: &NodeCandidate) -> u32 {
        let stored = self.context.cluster.rebuilds_on(node.name.as_str());
        let stored = stored.filter(|rebuild| self.is_expected(rebuild)).count();
        let coming = self.coming.get(&node.name).copied().unwrap_or(0);
        let there = u32::try_from(stored).unwrap_or(u32::MAX).saturating_add(coming);
        let needier = self.needier.iter().filter(|(selectors, _)| node.has_tags(selectors));
        let needier = needier.fold(0_u32, |sum, (_, count)| sum.saturating_add(*count));
        self.context.settings.rebuilds_per_node.saturating_sub(there).saturating_sub(needier)
    }

    /// Returns false if the volume waits for the new replica no more, as [`is_lost`] decides. So one that
    /// never connects keeps others away for a limited time only.
    fn is_expected(&self, rebuild: &Rebuild) -> bool {
        let limit = new_lost_after(&self.context);
        rebuild.waits_since.is_none_or(|since| !remaining(since, limit, self.context.now).is_zero())
    }
}

/// Returns true if the volume would have a replica made now, because none of the missing ones may come back
/// soon. A volume without any possible place delays no other one.
fn waits_for_scheduling(context: &Context<'_>, volume: &Volume, engine: &Engine) -> bool {
    let scheduled = volume.status.conditions.get(ConditionType::Scheduled);
    let may_come = |replica: &Replica| {
        !engine.status.has_member(replica.spec.replica_id) && !is_lost(context, volume, engine, replica)
    };
    scheduled.is_none_or(|scheduled| scheduled.status)
        && needs_scheduling(context.cluster, volume)
        && context.cluster.unknown_of(&volume.metadata.name).is_none()
        && !context.cluster.replicas_of(&volume.spec.volume_name).any(may_come)
}

/// Returns true if the replica has been away for so long that another takes its place.
pub(super) fn is_lost(context: &Context<'_>, volume: &Volume, engine: &Engine, replica: &Replica) -> bool {
    let mode = engine.status.replica_mode_map.get(&replica.spec.replica_id).map(|member| member.mode);
    if matches!(mode, Some(MemberMode::Member | MemberMode::Rebuilding)) {
        return false;
    }
    // A deleted replica is not waited for.
    let is_over = |since| remaining(since, lost_after(context, volume, replica), context.now).is_zero();
    replica.metadata.is_deleting() || replica.status.lost_since.is_some_and(is_over)
}

/// Returns the time after which a replica that is away is lost.
pub(super) fn lost_after(context: &Context<'_>, volume: &Volume, replica: &Replica) -> Duration {
    if was_never_member(volume, replica) {
        return new_lost_after(context);
    }
    context.settings.replica_replace_after
}

/// Returns the time after which a new replica is lost: it has to be made and found first.
fn new_lost_after(context: &Context<'_>) -> Duration {
    context.settings.replica_replace_after.max(NEW_REPLICA_WAIT)
}

/// Returns true if the replica has had no part in the volume yet.
pub(super) fn was_never_member(volume: &Volume, replica: &Replica) -> bool {
    replica.status.healthy_at.is_none() && !volume.status.first_members.contains(&replica.spec.replica_id)
}
