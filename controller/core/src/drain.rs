//! Lists the rest of a drain of a node or disk: each replica and each engine there, and the event that it
//! waits for.
//!
//! The reconcilers of volumes do the work of a drain. A replica in such a place is replaced first, and
//! removed once as many replicas as configured have everything without it. This module only reports their
//! progress. A replica that no reconciler can advance by itself is *held*: the operator has to act.

use std::collections::BTreeSet;

use crate::objects::{ConditionType, DataState, Engine, MemberMode, Node, Replica, Volume, VolumeState};
use crate::observed::{Agents, Detail, InstanceKey};
use crate::{ClusterState, given_up_places};

/// An object that is still on a drained node or disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemainingObject {
    /// The volume of the replica or engine.
    pub volume: String,
    /// The replica; none for the engine.
    pub replica: Option<String>,
    /// True if the drain waits for an action of the operator.
    pub held: bool,
    /// The progress, or the action to take.
    pub message: String,
}

/// The reason why a replica is evicted, the most urgent first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum EvictionReason {
    /// The Replica object is being deleted.
    Deleted,
    /// The node is drained or deleted.
    Node,
    /// The disk is drained.
    Disk,
    /// The replica leaves its place for a better one.
    Location,
}

/// Returns the reason why the replica is evicted, if it is.
#[must_use]
pub fn eviction_reason(cluster: &ClusterState, replica: &Replica) -> Option<EvictionReason> {
    if replica.metadata.is_deleting() {
        return Some(EvictionReason::Deleted);
    }
    let node = cluster.nodes.get(replica.spec.node_id.as_str());
    if node.is_some_and(|node| node.spec.eviction_requested || node.metadata.is_deleting()) {
        return Some(EvictionReason::Node);
    }
    let disk = node.and_then(|node| node.spec.disks.get(&replica.spec.disk_path));
    if disk.is_some_and(|disk| disk.eviction_requested) {
        return Some(EvictionReason::Disk);
    }
    replica.spec.eviction_requested.then_some(EvictionReason::Location)
}

/// Returns true if the replica has to leave its place.
#[must_use]
pub fn is_evicted(cluster: &ClusterState, replica: &Replica) -> bool {
    eviction_reason(cluster, replica).is_some()
}

/// Returns the rest of the drain of `node`, by volume.
#[must_use]
pub fn remaining(cluster: &ClusterState, agents: &Agents, node: &Node) -> Vec<RemainingObject> {
    let name = node.metadata.name.as_str();
    let engines = attached_to(cluster, name).into_iter().map(of_engine);
    let here = replicas_on(cluster, name);
    let here = engines.chain(here.map(|replica| of_replica(cluster, agents, replica)));
    let mut left: Vec<RemainingObject> = here.chain(unknown(cluster, name, None)).collect();
    left.sort_by(|one, other| (&one.volume, &one.replica).cmp(&(&other.volume, &other.replica)));
    left
}

/// Returns the rest of the drain of one disk of `node`, by volume. Engines are on no disk.
#[must_use]
pub fn remaining_on_disk(
    cluster: &ClusterState,
    agents: &Agents,
    node: &Node,
    path: &str,
) -> Vec<RemainingObject> {
    let here = replicas_on(cluster, &node.metadata.name).filter(|replica| replica.spec.disk_path == path);
    let here = here.map(|replica| of_replica(cluster, agents, replica));
    let mut left: Vec<RemainingObject> =
        here.chain(unknown(cluster, &node.metadata.name, Some(path))).collect();
    left.sort_by(|one, other| (&one.volume, &one.replica).cmp(&(&other.volume, &other.replica)));
    left
}

/// The replicas that may be there and that the controller cannot use: nothing moves them.
fn unknown<'a>(
    cluster: &'a ClusterState,
    node: &'a str,
    path: Option<&'a str>,
) -> impl Iterator<Item = RemainingObject> {
    cluster.unknown_replicas_on(node, path).map(|key| RemainingObject {
        volume: key.name.rsplit_once('-').map_or("", |(volume, _)| volume).to_owned(),
        replica: Some(key.name.clone()),
        held: true,
        message: cluster.unknown(key).unwrap_or_default(),
    })
}

fn replicas_on<'a>(cluster: &'a ClusterState, node: &str) -> impl Iterator<Item = &'a Replica> {
    cluster.replicas_on(node)
}

/// Returns the volumes that have an engine on `node`, or are to have one there.
#[must_use]
pub fn attached_to<'a>(cluster: &'a ClusterState, node: &str) -> Vec<&'a str> {
    let engines = cluster.engines_on(node).map(|engine| engine.metadata.name.as_str());
    let volumes = cluster.volumes_on(node).map(|volume| volume.metadata.name.as_str());
    let names: BTreeSet<&str> = engines.chain(volumes).collect();
    let volumes = names.into_iter().filter_map(|name| cluster.volumes.get(name));
    let here = volumes.filter(|volume| is_attached_to(cluster, volume, node));
    here.map(|volume| volume.metadata.name.as_str()).collect()
}

/// Returns true if an engine is on the node, or will be.
#[must_use]
pub fn is_attached_to(cluster: &ClusterState, volume: &Volume, node: &str) -> bool {
    let engine = cluster.engines.get(&volume.metadata.name);
    let runs = engine.filter(|_| volume.status.current_node_id.is_some());
    let wanted = volume.spec.node_id.as_ref().filter(|_| !volume.is_deleting());
    let places = [wanted, runs.and_then(|engine| engine.spec.node_id.as_ref())];
    places.into_iter().flatten().any(|place| place.as_str() == node)
}

fn of_engine(volume: &str) -> RemainingObject {
    let name = volume.to_owned();
    let message = format!(
        "volume {name} is attached here: move its workload to another node, or run shorthornctl volume \
         detach {name}"
    );
    RemainingObject { volume: name, replica: None, held: true, message }
}

/// Returns the progress of a replica that has to leave its node.
#[must_use]
pub fn of_replica(cluster: &ClusterState, agents: &Agents, replica: &Replica) -> RemainingObject {
    let volume = cluster.volumes.get(replica.spec.volume_name.as_str());
    let (held, message) = match volume {
        _ if volume.is_some_and(Volume::is_deleting) => (false, "data is being deleted".to_owned()),
        Some(volume) => of_volume(cluster, agents, volume, replica),
        None => (false, "the volume is gone".to_owned()),
    };
    let name = replica.metadata.name.clone();
    RemainingObject { volume: replica.spec.volume_name.to_string(), replica: Some(name), held, message }
}

fn of_volume(cluster: &ClusterState, agents: &Agents, volume: &Volume, replica: &Replica) -> (bool, String) {
    let name = &volume.metadata.name;
    match (volume.status.state, cluster.engines.get(name)) {
        (VolumeState::Detached, _) => {
            let last = if is_last(cluster, volume, replica) { "; no other replica has its data" } else { "" };
            let message = format!(
                "volume {name} is detached, and replicas are moved only while it is attached{last}: \
                 shorthornctl volume attach {name} --node NODE, or delete it"
            );
            (true, message)
        }
        (VolumeState::Attached | VolumeState::Detaching, Some(engine)) if engine.status.is_serving() => {
            while_served(agents, volume, engine, cluster)
        }
        (VolumeState::Attached, _) => {
            (true, format!("volume {name} is not served: shorthornctl volume why {name}"))
        }
        (state, _) => (false, format!("volume {name} is {}", state.as_str())),
    }
}

fn while_served(agents: &Agents, volume: &Volume, engine: &Engine, cluster: &ClusterState) -> (bool, String) {
    let all: Vec<&Replica> = cluster.replicas_of(&volume.spec.volume_name).collect();
    let mode = |replica: &Replica| {
        engine.status.replica_mode_map.get(&replica.spec.replica_id).map(|member| member.mode)
    };
    let new =
        all.iter().find(|replica| !is_evicted(cluster, replica) && mode(replica) != Some(MemberMode::Member));
    if let Some(new) = new {
        let percent = percent_of_copy(agents, engine, new).map(|percent| format!(", {percent} % done"));
        let place = (&new.metadata.name, &new.spec.node_id, percent.unwrap_or_default());
        return (
            false,
            format!("replica {} on node {} is being rebuilt in its place{}", place.0, place.1, place.2),
        );
    }
    let scheduled =
        volume.status.conditions.get(ConditionType::Scheduled).filter(|scheduled| !scheduled.status);
    match scheduled {
        Some(scheduled) => (true, format!("no other disk can take it: {}", scheduled.message)),
        None => (false, "the replica is being replaced".to_owned()),
    }
}

fn percent_of_copy(agents: &Agents, engine: &Engine, replica: &Replica) -> Option<u64> {
    let agent = agents.get(engine.spec.node_id.as_ref()?)?;
    match &agent.instances.get(&InstanceKey::engine(&engine.spec.volume_name))?.detail {
        Detail::Engine(shown) => Some(shown.copy_of(replica.spec.replica_id)?.percent()),
        Detail::Replica(_) => None,
    }
}

/// Returns true if the replica has everything and no other, as far as is known, does.
#[must_use]
pub fn is_last(cluster: &ClusterState, volume: &Volume, replica: &Replica) -> bool {
    let has_all = |other: &Replica| {
        let was_first = volume.status.first_members.contains(&other.spec.replica_id);
        let status = &other.status;
        status.data == DataState::Present
            && status.failed_at.is_none()
            && (status.healthy_at.is_some() || was_first)
    };
    let mut others = cluster
        .replicas_of(&volume.spec.volume_name)
        .filter(|other| other.spec.replica_id != replica.spec.replica_id)
        .filter(|other| !given_up_places::is_replica_given_up(cluster, other));
    has_all(replica) && !others.any(has_all)
}

#[cfg(test)]
mod tests;
