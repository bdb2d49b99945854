//! Replaces replicas that are lost, one at a time, and gives up those that are replaced.
//!
//! Nothing here is remembered between runs. While fewer replicas than configured are members, every replica is
//! wanted; once enough are, those that are not members are given up: first the engine forgets them, then their
//! data goes.

use std::collections::BTreeMap;

use shorthorn_types::ReplicaId;
use shorthorn_types::limits::MAX_MEMBERS;

use super::Run;
use crate::objects::{
    ConditionType, DesireState, Engine, EngineSpec, Finding, MemberMode, Metadata, Replica, ReplicaSpec,
    Robustness, Volume,
};
use crate::reconcile::{NEW_REPLICA_WAIT, health, remaining};
use crate::scheduler::{self, NodeCandidate, Placement, Refusal, Request};
use crate::{ReplicaTarget, World};

/// Whether the engine of the current attachment serves, and what it says is of that attachment.
fn serves(volume: &Volume, engine: &Engine) -> bool {
    let (spec, status) = (&engine.spec, &engine.status);
    spec.attach == volume.status.attach && status.seen_attach == spec.attach && status.is_serving()
}

/// Whether as many replicas as configured are members, so that the others are not needed any more.
fn is_whole<'a>(volume: &Volume, engine: &Engine, replicas: impl Iterator<Item = &'a Replica>) -> bool {
    let is_member = |replica: &&Replica| {
        !replica.metadata.is_deleting() && engine.status.has_member(replica.spec.replica_id)
    };
    replicas.filter(is_member).count() >= volume.spec.number_of_replicas.max(1) as usize
}

/// Whether the data of a replica may go while its volume stays: it was never a member, or enough others are, and
/// the engine has forgotten it.
pub(in crate::reconcile) fn may_go(
    world: &World,
    volume: &Volume,
    engine: &Engine,
    replica: &Replica,
) -> bool {
    let id = replica.spec.replica_id;
    let is_forgotten = !engine.spec.replica_address_map.contains_key(&id)
        && engine.status.map_revision == engine.spec.map_revision
        && !engine.status.replica_mode_map.contains_key(&id);
    let is_needless = was_never_member(volume, replica)
        || is_whole(volume, engine, world.replicas_of(&volume.spec.volume_name));
    serves(volume, engine) && is_forgotten && is_needless
}

fn was_never_member(volume: &Volume, replica: &Replica) -> bool {
    replica.status.healthy_at.is_none() && !volume.status.first_members.contains(&replica.spec.replica_id)
}

impl<'a> Run<'a> {
    /// The replicas whose deletion was not asked for.
    pub(super) fn live_replicas(&self) -> Vec<&'a Replica> {
        self.replicas.iter().copied().filter(|replica| !replica.metadata.is_deleting()).collect()
    }

    /// Sees to it that there are enough replicas, and no needless ones, and that the engine knows them.
    pub(super) fn keep_replicas(&mut self, engine: &Engine) {
        if !serves(self.stored, engine) {
            self.tell_places(engine, &self.live_replicas());
            return;
        }
        let live = self.live_replicas();
        let needless = self.needless(engine, &live);
        let kept: Vec<&Replica> = live
            .iter()
            .copied()
            .filter(|replica| !needless.iter().any(|other| other.spec.replica_id == replica.spec.replica_id))
            .collect();
        self.tell_places(engine, &kept);
        for replica in &needless {
            self.give_up(engine, replica);
        }
        if needless.is_empty() {
            self.replace(engine, &live);
        }
    }

    /// Those that nobody needs: while enough are members, all others; else new ones that never got anywhere.
    fn needless(&self, engine: &Engine, live: &[&'a Replica]) -> Vec<&'a Replica> {
        let wanted = self.stored.spec.number_of_replicas as usize;
        if live.len() <= wanted {
            return Vec::new();
        }
        let whole = is_whole(self.stored, engine, live.iter().copied());
        let needless = |replica: &&&Replica| {
            !engine.status.has_member(replica.spec.replica_id)
                && (whole || (was_never_member(self.stored, replica) && self.is_lost(engine, replica)))
        };
        live.iter().filter(needless).copied().collect()
    }

    /// Whether the replica has been away for so long that another takes its place.
    fn is_lost(&self, engine: &Engine, replica: &Replica) -> bool {
        let id = replica.spec.replica_id;
        let mode = engine.status.replica_mode_map.get(&id).map(|member| member.mode);
        let mut limit = self.context.settings.replica_replace_after;
        if was_never_member(self.stored, replica) {
            // It has to be made and found first.
            limit = limit.max(NEW_REPLICA_WAIT);
        }
        let is_over = |since| remaining(since, limit, self.context.now).is_zero();
        !matches!(mode, Some(MemberMode::Member | MemberMode::Rebuilding))
            && replica.status.lost_since.is_some_and(is_over)
    }

    /// Asks for the deletion of a replica once the engine has forgotten it.
    fn give_up(&mut self, engine: &Engine, replica: &Replica) {
        if !may_go(self.context.world, self.stored, engine, replica) {
            return;
        }
        let metadata = Metadata { deletion_timestamp: Some(self.context.now), ..replica.metadata.clone() };
        let spec = ReplicaSpec { desire_state: DesireState::Stopped, ..replica.spec.clone() };
        self.decision.write(Replica { metadata, spec, status: replica.status.clone() });
        let (name, node) = (&replica.metadata.name, &replica.spec.node_id);
        let message = format!("replica {name} on {node} is not needed any more: its data is deleted");
        self.decision.emit(self.key(), false, "ReplicaRetired", message);
    }

    /// Places one more replica where one is missing or lost; one at a time.
    fn replace(&mut self, engine: &Engine, live: &[&Replica]) {
        let wanted = self.stored.spec.number_of_replicas as usize;
        let (lost, hopeful): (Vec<&Replica>, Vec<&Replica>) =
            live.iter().copied().partition(|replica| self.is_lost(engine, replica));
        if hopeful.len() >= wanted {
            self.note_enough();
            self.look_when_lost(&hopeful);
            return;
        }
        // One that is being brought up, or has not been away for long, comes first.
        if !hopeful.iter().all(|replica| engine.status.has_member(replica.spec.replica_id)) {
            self.look_when_lost(&hopeful);
            return;
        }
        let lost = lost.into_iter().min_by_key(|replica| replica.status.lost_since);
        // Only runs over a volume that is stored as degraded are taken one at a time with others that place.
        if self.stored.status.robustness != Robustness::Degraded {
            return;
        }
        match self.place_one_more() {
            Ok(placement) => self.write_replacement(placement, lost),
            Err(refusal) => match self.nodes_may_come() {
                Some(wait) => self.decision.again_after(wait),
                None => self.note_no_place(&refusal),
            },
        }
    }

    fn note_enough(&mut self) {
        if !self.stored.status.conditions.is_true(ConditionType::Scheduled) {
            self.next.status.conditions.set(ConditionType::Scheduled, Finding::Well, self.context.now);
        }
    }

    fn look_when_lost(&mut self, live: &[&Replica]) {
        let limit = self.context.settings.replica_replace_after;
        let left = live.iter().filter_map(|replica| replica.status.lost_since);
        let left = left.map(|since| remaining(since, limit, self.context.now));
        if let Some(left) = left.filter(|left| !left.is_zero()).min() {
            self.decision.again_after(left);
        }
    }

    /// A place on a node that has none of the replicas; else, once every node was asked, beside one that is lost.
    fn place_one_more(&self) -> Result<Placement, Refusal> {
        let spec = &self.stored.spec;
        let request = Request { size_bytes: spec.size, soft_anti_affinity: spec.replica_soft_anti_affinity };
        let nodes = scheduler::candidates(self.context.world, self.context.agents, self.stored);
        let wanted = u32::try_from(self.replicas.len() + 1).unwrap_or(u32::MAX);
        let mut elsewhere = nodes.clone();
        let placed = scheduler::place(&request, &mut elsewhere, wanted);
        let placed = if placed.is_err() && self.nodes_may_come().is_none() {
            scheduler::place(&request, &mut self.excuse_lost(nodes), wanted)
        } else {
            placed
        };
        placed.and_then(|placements| {
            let none = Refusal { placed: wanted - 1, wanted, by_node: BTreeMap::new() };
            placements.into_iter().next().ok_or(none)
        })
    }

    /// The same nodes, where replicas that are away keep no other away.
    fn excuse_lost(&self, mut nodes: Vec<NodeCandidate>) -> Vec<NodeCandidate> {
        let away =
            |replica: &&&Replica| replica.metadata.is_deleting() || replica.status.lost_since.is_some();
        for replica in self.replicas.iter().filter(away) {
            if let Some(node) = nodes.iter_mut().find(|node| node.name == replica.spec.node_id) {
                node.excused += 1;
            }
        }
        nodes
    }

    fn write_replacement(&mut self, placement: Placement, lost: Option<&Replica>) {
        let why = lost.map_or_else(
            || "there are fewer than configured".to_owned(),
            |lost| format!("{} on {} is away", lost.metadata.name, lost.spec.node_id),
        );
        let message = format!("a new replica is made on {}: {why}", placement.node);
        self.decision.emit(self.key(), false, "ReplicaReplaced", message);
        let id = ReplicaId::from_random(self.context.random[0]);
        self.write_replica(placement, id, DesireState::Running);
        self.note_enough();
    }

    /// Tells the engine where these replicas are, which are all that it shall have. Of one that does not run the
    /// engine keeps the place that it knows.
    pub(super) fn tell_places(&mut self, engine: &Engine, replicas: &[&Replica]) {
        let Some(node) = &engine.spec.node_id else { return };
        let known = &engine.spec.replica_address_map;
        let mut sorted: Vec<&Replica> = replicas.to_vec();
        // More than an engine can have: those that are lost longest have to go.
        sorted.sort_by_key(|replica| {
            let id = replica.spec.replica_id;
            (!engine.status.has_member(id), std::cmp::Reverse(replica.status.lost_since), id)
        });
        sorted.truncate(MAX_MEMBERS);
        let targets: BTreeMap<ReplicaId, ReplicaTarget> = sorted
            .into_iter()
            .filter_map(|replica| {
                let id = replica.spec.replica_id;
                let target = health::target(replica, node).ok().or_else(|| known.get(&id).cloned());
                target.map(|target| (id, target))
            })
            .collect();
        let running = engine.spec.desire_state == DesireState::Running
            && engine.spec.attach == self.stored.status.attach;
        if running && targets != *known && !targets.is_empty() {
            let map_revision = engine.spec.map_revision + 1;
            let spec = EngineSpec { replica_address_map: targets, map_revision, ..engine.spec.clone() };
            self.decision.write(Engine { spec, ..engine.clone() });
        }
    }
}
