//! Replaces lost replicas, one at a time, and gives up replaced ones.
//!
//! Replicas that have to leave their node, or whose object was deleted, are replaced in the same way: another
//! one is made first. Members cannot be removed from a view from outside. So once more replicas than
//! configured are members, the process of an unneeded one is stopped. It leaves the view like a failed one,
//! and then it is not needed any more.
//!
//! The reconciler remembers nothing between runs. While fewer replicas than configured are members, every
//! replica is wanted. Once enough are, the other ones are given up: first the engine forgets them, then their
//! data is deleted.

use std::collections::BTreeMap;

use shorthorn_types::ReplicaId;
use shorthorn_types::limits::MAX_MEMBERS;

use super::{VolumeReconciler, surplus};
use crate::ReplicaTarget;
use crate::drain::{self, EvictionReason};
use crate::objects::{
    ConditionType, DesireState, Engine, EngineSpec, Finding, MemberMode, Replica, ReplicaSpec, Volume,
};
use crate::reconcile::rebuilds::{RebuildCounts, is_lost, lost_after, was_never_member};
use crate::reconcile::{Context, REBUILD_CHECK, has_lost_location, health, needs_scheduling, remaining};
use crate::scheduler::{self, NodeCandidate, Placement, PlacementRefusal, PlacementRequest};

/// Returns true if the engine of the current attachment serves, and its status is of that attachment.
fn serves(volume: &Volume, engine: &Engine) -> bool {
    let (spec, status) = (&engine.spec, &engine.status);
    spec.attach == volume.status.attach && status.seen_attach == spec.attach && status.is_serving()
}

/// Returns true if as many replicas as configured are members, so that the others are not needed any more.
fn is_whole<'a>(volume: &Volume, engine: &Engine, replicas: impl Iterator<Item = &'a Replica>) -> bool {
    let is_member = |replica: &&Replica| {
        !replica.metadata.is_deleting() && engine.status.has_member(replica.spec.replica_id)
    };
    replicas.filter(is_member).count() >= volume.spec.number_of_replicas.max(1) as usize
}

/// Returns true if the data of a replica may be deleted while its volume stays. The replica was never a
/// member, or enough others are members, or it is given up; and the engine has forgotten it.
pub(in crate::reconcile) fn may_go(
    context: &Context<'_>,
    volume: &Volume,
    engine: &Engine,
    replica: &Replica,
) -> bool {
    let id = replica.spec.replica_id;
    let is_forgotten = !engine.spec.replica_address_map.contains_key(&id)
        && engine.status.map_revision == engine.spec.map_revision
        && !engine.status.replica_mode_map.contains_key(&id);
    let is_needless = was_never_member(volume, replica)
        || is_whole(volume, engine, context.cluster.replicas_of(&volume.spec.volume_name))
        || has_lost_location(context, replica)
        || surplus::makes_room(context.cluster, volume, engine, replica);
    serves(volume, engine) && is_forgotten && is_needless
}

impl<'a> VolumeReconciler<'a> {
    /// Makes missing replicas, removes surplus ones, and sends the list to the engine.
    pub(super) fn keep_replicas(&mut self, engine: &Engine) {
        // A replica that cannot be used may be a member: it is neither replaced nor forgotten.
        if self.waits_for_unknown() {
            return;
        }
        let live = self.objects.replicas().to_vec();
        if !serves(self.stored, engine) {
            self.want_replicas(DesireState::Running);
            self.send_replica_addresses(engine, &live);
            return;
        }
        let needless = self.needless(engine, &live);
        self.want_needed(engine, &live, &needless);
        let kept: Vec<&Replica> = live
            .iter()
            .copied()
            .filter(|replica| !needless.iter().any(|other| other.spec.replica_id == replica.spec.replica_id))
            .collect();
        self.send_replica_addresses(engine, &kept);
        for replica in &needless {
            self.give_up(engine, replica);
        }
        // The object of one that the engine has forgotten may stay for long: its node does not answer.
        let is_forgotten = |replica: &&Replica| {
            replica.metadata.is_deleting() && may_go(self.context, self.stored, engine, replica)
        };
        if needless.iter().all(is_forgotten) {
            self.replace(engine, &live);
        }
    }

    /// Returns the replicas that are not needed. While enough replicas are members, these are all others.
    /// Otherwise they are new ones that were never used, and those whose node is given up.
    fn needless(&self, engine: &Engine, live: &[&'a Replica]) -> Vec<&'a Replica> {
        let wanted = self.stored.spec.number_of_replicas as usize;
        let is_gone = |replica: &Replica| {
            let modes = &engine.status.replica_mode_map;
            let mode = modes.get(&replica.spec.replica_id).map(|member| member.mode);
            !matches!(mode, Some(MemberMode::Member | MemberMode::Rebuilding))
                && has_lost_location(self.context, replica)
        };
        let has_left = |replica: &Replica| {
            !engine.status.has_member(replica.spec.replica_id)
                && surplus::makes_room(self.context.cluster, self.stored, engine, replica)
        };
        if live.len() <= wanted {
            let needless = |replica: &&Replica| is_gone(replica) || has_left(replica);
            return live.iter().copied().filter(needless).collect();
        }
        // Replicas that are to leave do not make one needless that is to take their place.
        let staying = live.iter().copied().filter(|replica| !self.is_evicted(replica));
        let whole = is_whole(self.stored, engine, staying);
        let needless = |replica: &&&Replica| {
            !engine.status.has_member(replica.spec.replica_id)
                && (whole
                    || (was_never_member(self.stored, replica) && self.is_lost(engine, replica))
                    || is_gone(replica))
        };
        live.iter().filter(needless).copied().collect()
    }

    fn is_evicted(&self, replica: &Replica) -> bool {
        drain::is_evicted(self.context.cluster, replica)
    }

    /// Starts all replicas, except for one that leaves the view. Unneeded ones do not matter: a replica that
    /// was stopped to leave the view must not come back into it.
    fn want_needed(&mut self, engine: &Engine, live: &[&'a Replica], needless: &[&Replica]) {
        let leaving = surplus::leaving(self.context, self.stored, engine, live);
        let leaving = leaving.map(|replica| replica.spec.replica_id);
        for replica in live {
            let id = replica.spec.replica_id;
            if leaving == Some(id) {
                self.want_replica(replica, DesireState::Stopped);
            } else if !needless.iter().any(|needless| needless.spec.replica_id == id) {
                self.want_replica(replica, DesireState::Running);
            }
        }
    }

    fn is_lost(&self, engine: &Engine, replica: &Replica) -> bool {
        is_lost(self.context, self.stored, engine, replica)
    }

    /// Asks for the deletion of a replica once the engine has forgotten it.
    fn give_up(&mut self, engine: &Engine, replica: &Replica) {
        if replica.metadata.is_deleting() || !may_go(self.context, self.stored, engine, replica) {
            return;
        }
        self.ask_for_deletion(replica);
        let (name, node) = (&replica.metadata.name, &replica.spec.node_id);
        let message = format!("replica {name} on {node} is no longer needed: deleting its data");
        self.actions.emit(false, "ReplicaRetired", message);
    }

    /// Places one more replica if one is missing or lost; one at a time.
    fn replace(&mut self, engine: &Engine, live: &[&'a Replica]) {
        let wanted = self.stored.spec.number_of_replicas as usize;
        let (lost, hopeful): (Vec<&'a Replica>, Vec<&'a Replica>) =
            live.iter().copied().partition(|replica| self.is_lost(engine, replica));
        let leaves =
            |replica: &&'a Replica| Some((drain::eviction_reason(self.context.cluster, replica)?, *replica));
        let evicted = hopeful.iter().filter_map(leaves).min_by_key(|(leaves, _)| *leaves);
        if hopeful.iter().filter(|replica| !self.is_evicted(replica)).count() >= wanted {
            self.report_enough();
            self.look_when_lost(&hopeful);
            return;
        }
        // A replica that is being rebuilt, or was not absent for long, comes first.
        if !hopeful.iter().all(|replica| engine.status.has_member(replica.spec.replica_id)) {
            self.look_when_lost(&hopeful);
            return;
        }
        let lost = lost.into_iter().min_by_key(|replica| replica.status.lost_since);
        // Only such runs are taken one at a time with others that place.
        if !needs_scheduling(self.context.cluster, self.stored) {
            return;
        }
        if hopeful.len() >= MAX_MEMBERS {
            self.report_full();
            return;
        }
        if let (None, Some((EvictionReason::Location, replica))) = (lost, evicted)
            && hopeful.len() >= wanted
        {
            self.move_away(replica);
            return;
        }
        match self.place_one_more(engine) {
            Ok(placement) => self.write_replacement(placement, lost, evicted.map(|(_, replica)| replica)),
            Err(refusal) => match self.nodes_may_come() {
                Some(wait) => self.check_places_after(wait),
                // Places exist, and the rebuilds are over soon.
                None if refusal.waits_for_rebuilds() => self.check_places_after(REBUILD_CHECK),
                None => self.report_unschedulable(&refusal),
            },
        }
    }

    /// Places a better substitute for a replica, or cancels the move if no better place is left.
    fn move_away(&mut self, replica: &Replica) {
        let here = (&replica.spec.node_id, replica.spec.disk_path.as_str());
        let mut nodes = scheduler::candidates(self.context.cluster, self.context.agents, self.stored);
        let better = scheduler::better_location(&self.request(), &mut nodes, here, |_| true);
        match (better, self.nodes_may_come()) {
            (Some((_, placement)), _) => self.write_replacement(placement, None, Some(replica)),
            (None, Some(wait)) => self.check_places_after(wait),
            (None, None) => {
                let spec = ReplicaSpec { eviction_requested: false, ..replica.spec.clone() };
                self.actions.write(Replica { spec, ..replica.clone() });
                let message = format!(
                    "replica {} stays on {}: no place is better",
                    replica.metadata.name, replica.spec.node_id
                );
                self.actions.emit(false, "ReplicaStays", message);
            }
        }
    }

    /// Records that an engine cannot have that many replicas, because a replacement exists before the
    /// replaced one is removed.
    fn report_full(&mut self) {
        let message = format!("the volume has {MAX_MEMBERS} replicas, the maximum of an engine");
        self.status.set(ConditionType::Scheduled, Finding::wrong("TooManyReplicas", message));
    }

    fn report_enough(&mut self) {
        if !self.stored.status.conditions.is_true(ConditionType::Scheduled) {
            self.status.set(ConditionType::Scheduled, Finding::Well);
        }
    }

    fn look_when_lost(&mut self, live: &[&Replica]) {
        let left = live.iter().filter_map(|replica| {
            Some(remaining(
                replica.status.lost_since?,
                lost_after(self.context, self.stored, replica),
                self.context.now,
            ))
        });
        if let Some(left) = left.filter(|left| !left.is_zero()).min() {
            self.actions.again_after(left);
        }
    }

    /// Returns a place on a node that has none of the replicas. Once every node was considered, it may be
    /// beside a lost one.
    fn place_one_more(&self, engine: &Engine) -> Result<Placement, PlacementRefusal> {
        let request = self.request();
        let mut nodes = scheduler::candidates(self.context.cluster, self.context.agents, self.stored);
        let rebuilds = RebuildCounts::count(self.context, engine);
        for node in &mut nodes {
            node.is_busy = rebuilds.left(node) == 0;
        }
        let placed = self.place_one(&request, &mut nodes);
        if placed.is_err() && self.nodes_may_come().is_none() {
            self.excuse_lost(&mut nodes);
            return self.place_one(&request, &mut nodes);
        }
        placed
    }

    fn request(&self) -> PlacementRequest {
        PlacementRequest {
            used_bytes: scheduler::taken_bytes(self.context.agents, self.objects.replicas()),
            ..PlacementRequest::of(self.stored, self.context.settings.scheduling)
        }
    }

    fn place_one(
        &self,
        request: &PlacementRequest,
        nodes: &mut [NodeCandidate],
    ) -> Result<Placement, PlacementRefusal> {
        let present = u32::try_from(self.objects.replicas().len()).unwrap_or(u32::MAX - 1);
        scheduler::place_one(request, nodes, present)
    }

    /// Lets replicas that are absent, or have to leave their disk, keep no other away from here on.
    fn excuse_lost(&self, nodes: &mut [NodeCandidate]) {
        let away = |replica: &&&Replica| replica.status.lost_since.is_some() || self.is_evicted(replica);
        for replica in self.objects.replicas().iter().filter(away) {
            let node = nodes.iter_mut().find(|node| node.name == replica.spec.node_id);
            let disks = node.map(|node| &mut node.disks).into_iter().flatten();
            disks.filter(|disk| disk.path == replica.spec.disk_path).for_each(|disk| disk.excused += 1);
        }
    }

    fn write_replacement(&mut self, placement: Placement, lost: Option<&Replica>, evicted: Option<&Replica>) {
        let at = |replica: &Replica| format!("{} on {}", replica.metadata.name, replica.spec.node_id);
        let why = match (lost, evicted) {
            (Some(lost), _) => format!("{} is away", at(lost)),
            (None, Some(evicted)) => match drain::eviction_reason(self.context.cluster, evicted) {
                Some(EvictionReason::Disk) => format!("{} has to leave its disk", at(evicted)),
                Some(EvictionReason::Location) => format!("better placement than that of {}", at(evicted)),
                Some(EvictionReason::Deleted) => format!("{} was deleted", at(evicted)),
                _ => format!("{} has to leave its node", at(evicted)),
            },
            (None, None) => "the volume has fewer than configured".to_owned(),
        };
        let message = format!("a new replica is created on {}: {why}", placement.node);
        self.actions.emit(false, "ReplicaReplaced", message);
        let id = ReplicaId::from_random(self.context.random[0]);
        self.write_replica(placement, id, DesireState::Running);
        self.report_enough();
    }

    /// Sends the engine the addresses of these replicas, which are all that it shall have. The engine keeps
    /// the last known address of a replica that does not run.
    pub(super) fn send_replica_addresses(&mut self, engine: &Engine, replicas: &[&Replica]) {
        let Some(node) = &engine.spec.node_id else { return };
        if self.context.cluster.unknown_replica_of(&self.stored.metadata.name).is_some() {
            return;
        }
        let known = &engine.spec.replica_address_map;
        let targets: BTreeMap<ReplicaId, ReplicaTarget> = most_needed(engine, replicas.iter().copied())
            .into_iter()
            .filter_map(|replica| {
                let id = replica.spec.replica_id;
                let target = health::target(replica, node).ok().or_else(|| known.get(&id).cloned());
                target.map(|target| (id, target))
            })
            .collect();
        let is_there =
            engine.spec.desire_state == DesireState::Running || engine.status.stop_refused.is_some();
        let running = is_there && engine.spec.attach == self.stored.status.attach;
        if running && targets != *known && !targets.is_empty() {
            let map_revision = engine.spec.map_revision + 1;
            let spec = EngineSpec { replica_address_map: targets, map_revision, ..engine.spec.clone() };
            self.actions.write(Engine { spec, ..engine.clone() });
        }
    }
}

/// Returns as many of the replicas as an engine may have. The members come first, then those that have not
/// left the view, those that are there, and those that were lost last.
pub(super) fn most_needed<'a>(
    engine: &Engine,
    replicas: impl Iterator<Item = &'a Replica>,
) -> Vec<&'a Replica> {
    let mut sorted: Vec<&Replica> = replicas.collect();
    sorted.sort_by_key(|replica| {
        let (id, lost_since) = (replica.spec.replica_id, replica.status.lost_since);
        let has_left = replica.status.failed_at.is_some();
        let is_lost = (lost_since.is_some(), std::cmp::Reverse(lost_since));
        (!engine.status.has_member(id), has_left, is_lost, id)
    });
    sorted.truncate(MAX_MEMBERS);
    sorted
}

#[cfg(test)]
mod tests {
    use shorthorn_types::VolumeName;
    use shorthorn_types::status::MemberMode;

    use super::*;
    use crate::objects::{MemberRecord, Metadata, ReplicaSpec, Secret, StoredReplicaStatus};
    use crate::requests::{Change, CreateVolume};
    use crate::{ClusterState, NodeName, Timestamp};

    fn replica(at: u64, lost_since: Option<Timestamp>) -> Replica {
        let replica_id = ReplicaId::from_random(at);
        let spec = ReplicaSpec {
            volume_name: VolumeName::new("v").unwrap(),
            volume_size: 1 << 20,
            replica_id,
            node_id: NodeName::new(&format!("n{at}")).unwrap(),
            disk_path: "/disk".to_owned(),
            disk_id: String::new(),
            desire_state: DesireState::Running,
            eviction_requested: false,
        };
        let status = StoredReplicaStatus { lost_since, ..StoredReplicaStatus::default() };
        let metadata =
            Metadata::new(ReplicaSpec::instance_name(&spec.volume_name, replica_id), Timestamp::UNIX_EPOCH);
        Replica { metadata, spec, status }
    }

    #[test]
    fn an_engine_does_without_the_replica_that_is_lost_longest() {
        let wanted = CreateVolume { name: "v".to_owned(), size_bytes: 1 << 20, ..CreateVolume::default() };
        let created = wanted.apply(&ClusterState::default(), Secret::new([1; 32]), Timestamp::UNIX_EPOCH);
        let Ok(Change::Store(volume)) = created else { panic!("the volume is refused") };
        let mut engine = Engine::of_new(&volume, Timestamp::UNIX_EPOCH);
        let member = |at| (ReplicaId::from_random(at), MemberRecord::of(MemberMode::Member));
        let members = (1..=6).map(member);
        engine.status.replica_mode_map = members.collect();
        let at_s = |seconds: u64| Some(Timestamp::UNIX_EPOCH + std::time::Duration::from_secs(seconds));
        let lost = [(7, at_s(100)), (8, at_s(50)), (9, None)];
        // A member that is lost stays: it may hold the data that the others lack.
        let replicas: Vec<Replica> =
            (1..=6).map(|at| (at, at_s(1))).chain(lost).map(|(at, lost)| replica(at, lost)).collect();
        let kept: Vec<_> =
            most_needed(&engine, replicas.iter()).iter().map(|kept| kept.spec.replica_id).collect();
        let mut expected: Vec<_> = (1..=6).map(ReplicaId::from_random).collect();
        expected.extend([9, 7].map(ReplicaId::from_random));
        assert_eq!(kept, expected);
    }
}
