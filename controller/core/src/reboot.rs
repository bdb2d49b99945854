//! Decides whether a node can be restarted, as for maintenance: lists the volumes that would have too few
//! replicas meanwhile.
//!
//! A volume that is not attached needs no node: its data is available again after the restart. One that was
//! detached a short time ago may be on its way to another node, and counts like an attached one. An attached
//! volume needs at least one member of its view elsewhere, and at least half of the view. With fewer its
//! engine stops serving, and no other one can start. Exactly half continues with the arbiter's grant
//! (`views::Arbiter`).
//!
//! While missing members are being rebuilt, half of the configured number, rounded up, has to be elsewhere
//! too. So nodes that are restarted one after another wait for each other's replicas. If the missing ones
//! cannot be scheduled, for example on too few nodes, only the view counts. Otherwise no node could ever be
//! restarted.
//!
//! Machines that are cordoned in Kubernetes are about to restart: their members do not count for machines
//! that were cordoned later, or not at all. Of two concurrent drains, the first one therefore proceeds, and
//! the second one waits.

pub mod guard_pods;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use shorthorn_types::VolumeName;

use crate::objects::{
    ConditionType, CurrentState, Engine, EnginePhase, Key, Kind, MemberMode, Replica, Volume, VolumeState,
};
use crate::{ClusterState, NodeName, Timestamp, drain, left_out_objects};

/// The time after a detach in which the volume may still need its nodes. A drain detaches the volume from one
/// node before Kubernetes attaches it to another one.
pub const MOVE_WAIT: Duration = Duration::from_secs(60);

/// A volume that holds a restart up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hold {
    /// The volume that needs the node.
    pub volume: String,
    /// True if only its engine there is in the way: Kubernetes moves it with the pods that it drains.
    pub is_engine: bool,
    /// The reason, and the event to wait for.
    pub message: String,
}

/// Returns the reasons to delay a restart of `node`, by volume. If empty, it can be restarted.
#[must_use]
pub fn holds(cluster: &ClusterState, node: &str, now: Timestamp) -> Vec<Hold> {
    let replicas = cluster.replicas_on(node).map(|replica| replica.spec.volume_name.as_str());
    let engines = cluster.engines_on(node).map(|engine| engine.metadata.name.as_str());
    let volumes = cluster.volumes_on(node).map(|volume| volume.metadata.name.as_str());
    let names = replicas.chain(engines).chain(volumes).chain(cluster.left_out().volumes());
    let names: BTreeSet<&str> = names.collect();
    let mut holds = Vec::new();
    for name in names {
        let volume = cluster.volumes.get(name);
        if volume.is_some_and(|volume| drain::is_attached_to(cluster, volume, node)) {
            let message = format!(
                "attached there: move the users to another node (kubectl drain), or shorthornctl volume \
                 detach {name}"
            );
            holds.push(Hold { volume: name.to_owned(), is_engine: true, message });
        }
        if let Some(message) = all_holds(cluster, name, Some(now)).remove(node) {
            holds.push(Hold { volume: name.to_owned(), is_engine: false, message });
        }
    }
    holds
}

/// The nodes whose replicas volumes need, kept up to date volume by volume.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Needed {
    /// The needed nodes by volume. Most volumes need no particular node, and are absent.
    by_volume: BTreeMap<String, BTreeMap<NodeName, String>>,
    /// The machines that were cordoned in Kubernetes at the last look, and since when.
    cordoned: BTreeMap<String, Timestamp>,
}

impl Needed {
    /// Looks at one volume again. Whether it was detached a short time ago does not count: nothing would look
    /// at it again when that time is over.
    pub fn look_at(&mut self, cluster: &ClusterState, volume: &str) {
        let holds = all_holds(cluster, volume, None);
        if holds.is_empty() {
            self.by_volume.remove(volume);
        } else {
            self.by_volume.insert(volume.to_owned(), holds);
        }
    }

    /// Looks again at the volumes for which a change of `node` counts: those with a replica there, if it was
    /// cordoned or uncordoned.
    pub fn look_at_node(&mut self, cluster: &ClusterState, node: &str) {
        // An object that cannot be read may need a new node.
        cluster.left_out().volumes().into_iter().for_each(|volume| self.look_at(cluster, volume));
        let since = NodeName::new(node).ok().and_then(|node| cordoned_since(cluster, &node));
        if self.cordoned.get(node).copied() == since {
            return;
        }
        match since {
            Some(since) => drop(self.cordoned.insert(node.to_owned(), since)),
            None => drop(self.cordoned.remove(node)),
        }
        let volumes: BTreeSet<&str> =
            cluster.replicas_on(node).map(|replica| replica.spec.volume_name.as_str()).collect();
        volumes.into_iter().for_each(|volume| self.look_at(cluster, volume));
    }

    /// Looks at all of them again.
    pub fn look_at_all(&mut self, cluster: &ClusterState) {
        self.by_volume.clear();
        let left_out = cluster.left_out().iter().filter(|(key, _)| key.kind == Kind::Node);
        let names = cluster.nodes.keys().chain(left_out.map(|(key, _)| &key.name));
        let since = |name: &String| {
            let node = NodeName::new(name).ok()?;
            Some((name.clone(), cordoned_since(cluster, &node)?))
        };
        self.cordoned = names.filter_map(since).collect();
        let unknown = cluster.left_out().volumes();
        for volume in cluster.volumes.keys().map(String::as_str).chain(unknown) {
            self.look_at(cluster, volume);
        }
    }

    /// Returns the nodes that volumes need, each with the volumes and why.
    #[must_use]
    pub fn by_node(&self) -> BTreeMap<&NodeName, Vec<(&str, &str)>> {
        let mut nodes: BTreeMap<&NodeName, Vec<(&str, &str)>> = BTreeMap::new();
        for (volume, holds) in &self.by_volume {
            for (node, message) in holds {
                nodes.entry(node).or_default().push((volume, message));
            }
        }
        nodes
    }
}

/// A replica that is in the view of the volume, as far as is known.
struct Member<'a> {
    /// None: its object is gone.
    replica: Option<&'a Replica>,
    /// True if requests do not wait for it.
    answers: bool,
}

impl Member<'_> {
    fn is_on(&self, node: &NodeName) -> bool {
        self.replica.is_some_and(|replica| replica.spec.node_id == *node)
    }
}

/// The nodes that the volume of that name needs, each with the reason. At the time `now` it may need them
/// although it is detached.
fn all_holds(cluster: &ClusterState, name: &str, now: Option<Timestamp>) -> BTreeMap<NodeName, String> {
    let known = cluster.volumes.get(name).map(|volume| replica_holds(cluster, volume, now));
    let mut holds = known.unwrap_or_default();
    for (key, left_out) in cluster.left_out().of_volume(name) {
        let message = left_out_objects::refusal(key, left_out);
        let there = cluster.nodes.keys().filter(|node| left_out.may_be_on(node));
        let there = there.filter_map(|node| NodeName::new(node).ok());
        let volume = VolumeName::new(name).ok();
        let replicas = volume.iter().flat_map(|volume| cluster.replicas_of(volume));
        let engine = cluster.engines.get(name).and_then(|engine| engine.spec.node_id.clone());
        let nodes = there.chain(replicas.map(|replica| replica.spec.node_id.clone())).chain(engine);
        holds.extend(nodes.map(|node| (node, format!("not safe, as an object is unknown: {message}"))));
    }
    holds
}

/// The nodes whose replicas the volume needs, each with the reason.
fn replica_holds(
    cluster: &ClusterState,
    volume: &Volume,
    now: Option<Timestamp>,
) -> BTreeMap<NodeName, String> {
    let is_idle = volume.status.state == VolumeState::Detached && volume.spec.node_id.is_none();
    if is_idle && !now.is_some_and(|now| was_detached_lately(volume, now)) {
        return BTreeMap::new();
    }
    let Some(members) = members(cluster, volume) else { return BTreeMap::new() };
    let nodes: BTreeSet<&NodeName> =
        members.iter().filter_map(|member| member.replica).map(|replica| &replica.spec.node_id).collect();
    let hold = |node: &NodeName| {
        let reason = hold(cluster, volume, &members, node)?;
        let lately = format!(
            "the volume was detached less than {} s ago, and may be about to be attached to another node: \
             check again then",
            MOVE_WAIT.as_secs()
        );
        Some((node.clone(), if is_idle { lately } else { reason }))
    };
    nodes.into_iter().filter_map(hold).collect()
}

/// Returns true if the detached volume may have been in use a short time ago. Its detachment was complete
/// when the volume settled.
fn was_detached_lately(volume: &Volume, now: Timestamp) -> bool {
    let settled = volume.status.conditions.get(ConditionType::Settled);
    settled.is_some_and(|settled| {
        let passed_ms = now.as_millisecond().saturating_sub(settled.last_transition_time.as_millisecond());
        Duration::from_millis(passed_ms.max(0).unsigned_abs()) < MOVE_WAIT
    })
}

/// Returns the members of the view. None: the volume has none that it could need.
fn members<'a>(cluster: &'a ClusterState, volume: &'a Volume) -> Option<Vec<Member<'a>>> {
    if volume.is_deleting() {
        return None;
    }
    let replicas: Vec<&Replica> = cluster.replicas_of(&volume.spec.volume_name).collect();
    let engine = cluster.engines.get(&volume.metadata.name).filter(|engine| knows_view(engine));
    match (volume.status.state, engine) {
        (VolumeState::Creating | VolumeState::Deleting, _) => None,
        (VolumeState::Attached | VolumeState::Detaching, Some(engine)) => {
            let members = engine.status.replica_mode_map.iter();
            let members = members.filter(|(_, member)| member.mode == MemberMode::Member);
            let member = |(id, member): (&_, &crate::objects::MemberRecord)| Member {
                replica: replicas.iter().find(|replica| replica.spec.replica_id == *id).copied(),
                answers: !member.awaited,
            };
            Some(members.map(member).collect())
        }
        // The known view of the last engine counts, because the next one begins with it.
        _ => {
            let was_member = |replica: &&Replica| {
                let first = &volume.status.first_members;
                replica.status.failed_at.is_none()
                    && (replica.status.healthy_at.is_some() || first.contains(&replica.spec.replica_id))
            };
            let member = |replica| Member { replica: Some(replica), answers: true };
            Some(replicas.into_iter().filter(was_member).map(member).collect())
        }
    }
}

/// Returns true if the engine has said which replicas are in its view.
fn knows_view(engine: &Engine) -> bool {
    let status = &engine.status;
    let says = matches!(status.current_state, CurrentState::Running | CurrentState::Unknown);
    says && matches!(status.phase, Some(EnginePhase::Serving | EnginePhase::Frozen))
}

/// Returns the reason why the volume needs the replicas on `node`; none if it does not.
fn hold(cluster: &ClusterState, volume: &Volume, members: &[Member<'_>], node: &NodeName) -> Option<String> {
    let name = &volume.metadata.name;
    if let Some(engine) = cluster.engines.get(name).filter(|engine| knows_view(engine)) {
        if engine.status.current_state == CurrentState::Unknown {
            return Some(format!(
                "the engine is unreachable and may need the replica: {}",
                engine.status.problem()
            ));
        }
        if engine.status.phase == Some(EnginePhase::Frozen) {
            return Some(format!(
                "the engine waits for replicas and may need each of them: shorthornctl volume why {name}"
            ));
        }
    }
    let elsewhere = |member: &&Member<'_>| {
        let replica = member.replica.filter(|_| member.answers);
        replica.is_some_and(|replica| {
            let other = &replica.spec.node_id;
            other != node && !is_cordoned_before(cluster, other, node)
        })
    };
    let others = members.iter().filter(elsewhere).count();
    let needed = needed(volume, members.len());
    if others >= needed {
        return None;
    }
    if members.len() == members.iter().filter(|member| member.is_on(node)).count() {
        return Some(format!(
            "the volume is in use, and no other replica has all of its data. Wait for another complete \
             replica, add replicas (shorthornctl volume replicas {name} NUMBER), or detach the volume"
        ));
    }
    let (of, waits) = (members.len(), waits(cluster, volume, members, node));
    Some(format!(
        "{others} of the {of} replicas in the view are on other nodes that stay up, and {needed} are needed: \
         the volume waits for {waits}"
    ))
}

/// Returns the number of members that have to be on other nodes.
fn needed(volume: &Volume, members: usize) -> usize {
    let of_view = members.div_ceil(2).max(1);
    let wanted = volume.spec.number_of_replicas as usize;
    let is_unschedulable =
        volume.status.conditions.get(ConditionType::Scheduled).is_some_and(|scheduled| !scheduled.status);
    if members < wanted && !is_unschedulable { of_view.max(wanted.div_ceil(2)) } else { of_view }
}

/// Returns the condition that has to change before the restart.
fn waits(cluster: &ClusterState, volume: &Volume, members: &[Member<'_>], node: &NodeName) -> String {
    let mut waits = Vec::new();
    for replica in cluster.replicas_of(&volume.spec.volume_name) {
        let (id, place) = (replica.spec.replica_id, &replica.spec.node_id);
        let at = format!("replica {} on node {place}", replica.metadata.name);
        let member =
            members.iter().find(|member| member.replica.is_some_and(|replica| replica.spec.replica_id == id));
        match member {
            _ if place == node => {}
            None => waits.push(format!("{at}, which does not have all data")),
            Some(member) if !member.answers => waits.push(format!("{at}, which does not answer")),
            Some(_) if is_unknown(cluster, place) => {
                waits.push(format!("node {place}, whose object cannot be used: shorthornctl doctor"));
            }
            Some(_) if is_cordoned_before(cluster, place, node) => {
                waits.push(format!("node {place}, which was cordoned in Kubernetes before"));
            }
            Some(_) => {}
        }
    }
    if waits.is_empty() { "another replica".to_owned() } else { waits.join("; ") }
}

/// Returns true if the machine `other` was cordoned before `node`.
fn is_cordoned_before(cluster: &ClusterState, other: &NodeName, node: &NodeName) -> bool {
    match (cordoned_since(cluster, other), cordoned_since(cluster, node)) {
        (Some(other_since), Some(since)) => (other_since, other) < (since, node),
        (other_since, _) => other_since.is_some(),
    }
}

fn is_unknown(cluster: &ClusterState, node: &NodeName) -> bool {
    cluster.unknown(&Key::new(Kind::Node, node.as_str())).is_some()
}

/// A node whose object cannot be used may be cordoned: it counts as the first of all.
fn cordoned_since(cluster: &ClusterState, node: &NodeName) -> Option<Timestamp> {
    if is_unknown(cluster, node) {
        return Some(Timestamp::UNIX_EPOCH);
    }
    cluster.nodes.get(node.as_str())?.spec.discovered.as_ref()?.cordoned_since
}

#[cfg(test)]
mod tests;
