//! The reconcilers, which derive the next small actions from the stored and observed state.

mod engine;
mod health;
mod node;
mod rebuilds;
mod replica;
mod volume;
pub mod waiting_volumes;

use std::time::Duration;

use shorthorn_types::limits::MAX_MEMBERS;

use crate::objects::{EnginePhase, Key, Kind, Replica, Robustness, Volume, VolumeState};
use crate::observed::{AgentLink, Agents, ObservedAgent};
use crate::scheduler::SchedulingLimits;
use crate::{ClusterState, Decision, NodeName, Timestamp, drain, given_up_places};

pub use self::volume::is_noticeable;

/// The time without an answer after which the objects of a node count as unknown. It is longer than a restart
/// of the agent or of the controller.
pub const UNREACHABLE_AFTER: Duration = Duration::from_secs(10);
/// The time that an attach waits for slow replicas before it continues without them, if it can. A process
/// needs a second to start, and a busy node several.
pub const REPLICA_WAIT: Duration = Duration::from_secs(20);
/// The minimum time between two attachments that replace a lost engine, so that one that always dies does not
/// keep the node busy.
pub const ENGINE_RETRY: Duration = Duration::from_secs(10);
/// The duration of a start after which its single steps are stored. A good start is over sooner, and its
/// steps are not read. With Kubernetes each would be a call.
pub const QUIET_START: Duration = Duration::from_secs(5);
/// The delay before checking a requested start that is not in the agent's stream yet. The agent reports a
/// start within a second, unless its stream has broken.
pub const START_CHECK: Duration = Duration::from_secs(10);
/// The delay before checking a grant again that an engine has got and still waits for. The requests of the
/// volume wait for it.
pub const GRANT_CHECK: Duration = Duration::from_secs(1);
/// The delay before checking the space of full disks again, because no event reports deleted files.
pub const SPACE_CHECK: Duration = Duration::from_secs(60);
/// The default time that a replica may be absent before it is replaced. A reboot takes less, and a copy of
/// the whole volume costs more than that wait.
pub const REPLICA_REPLACE_AFTER: Duration = Duration::from_secs(600);
/// The default number of simultaneous rebuilds on a node.
pub const REBUILDS_PER_NODE: u32 = 5;
/// The delay before checking whether a node has completed enough rebuilds to take another one.
pub const REBUILD_CHECK: Duration = Duration::from_secs(5);
/// The delay before checking whether anything is left on a node that is given up.
pub const GIVE_UP_CHECK: Duration = Duration::from_secs(10);
/// The minimum time for a new replica before its rebuild begins. It covers the start of its process and a
/// connection of the engine.
pub const NEW_REPLICA_WAIT: Duration = Duration::from_secs(120);

/// The administrator's settings for all volumes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// The time that a replica may be absent before it is replaced.
    pub replica_replace_after: Duration,
    /// The limits of the use of disks.
    pub scheduling: SchedulingLimits,
    /// True if a volume is created with the replicas that have a place, if that is one at least.
    pub degraded_creation: bool,
    /// The number of rebuilds on a node above which no substitute of a lost replica is placed there.
    pub rebuilds_per_node: u32,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            replica_replace_after: REPLICA_REPLACE_AFTER,
            scheduling: SchedulingLimits::default(),
            degraded_creation: true,
            rebuilds_per_node: REBUILDS_PER_NODE,
        }
    }
}

/// The input of a decision.
#[derive(Clone, Copy, Debug)]
pub struct Context<'a> {
    /// The stored state.
    pub cluster: &'a ClusterState,
    /// The observed agents.
    pub agents: &'a Agents,
    /// The time.
    pub now: Timestamp,
    /// Fresh random numbers, for the ids of new replicas.
    pub random: [u64; MAX_MEMBERS],
    /// The settings for all volumes.
    pub settings: Settings,
}

/// Decides the actions for one object.
#[must_use]
pub fn reconcile(context: &Context<'_>, key: &Key) -> Decision {
    match key.kind {
        Kind::Volume => volume::reconcile(context, &key.name),
        Kind::Engine => engine::reconcile(context, &key.name),
        Kind::Replica => replica::reconcile(context, &key.name),
        Kind::Node => node::reconcile(context, &key.name),
    }
}

/// Returns true if a decision about `key` may schedule replicas. The shell takes such decisions one at a
/// time. It reserves the space of the new replicas before the next decision, so that two volumes never get
/// the same space.
#[must_use]
pub fn gives_space_away(cluster: &ClusterState, key: &Key) -> bool {
    key.kind == Kind::Volume
        && cluster.volumes.get(&key.name).is_some_and(|volume| needs_scheduling(cluster, volume))
}

/// Returns true if the stored volume may be given a place: only such decisions are taken one at a time.
fn needs_scheduling(cluster: &ClusterState, volume: &Volume) -> bool {
    let is_evicted =
        || cluster.replicas_of(&volume.spec.volume_name).any(|replica| drain::is_evicted(cluster, replica));
    match (volume.status.state, volume.status.robustness) {
        (VolumeState::Creating, _)
        | (VolumeState::Attached | VolumeState::Detaching, Robustness::Degraded) => true,
        (VolumeState::Attached | VolumeState::Detaching, Robustness::Healthy) => is_evicted(),
        (VolumeState::Deleting, Robustness::Degraded) => is_held(cluster, volume),
        (VolumeState::Deleting, Robustness::Healthy) => is_held(cluster, volume) && is_evicted(),
        _ => false,
    }
}

/// Returns true if a user waits for a run over `key`: for an attachment, a detachment, or the arbiter. Such
/// runs come before all others, so that a fail-over does not wait for rebuilds.
#[must_use]
pub fn is_urgent(cluster: &ClusterState, key: &Key) -> bool {
    let name = match key.kind {
        Kind::Volume | Kind::Engine => key.name.as_str(),
        Kind::Replica => {
            let Some(replica) = cluster.replicas.get(&key.name) else { return false };
            replica.spec.volume_name.as_str()
        }
        Kind::Node => return false,
    };
    let Some(volume) = cluster.volumes.get(name) else { return false };
    let (wanted, current) = (&volume.spec.node_id, &volume.status.current_node_id);
    let is_moving = matches!(volume.status.state, VolumeState::Attaching | VolumeState::Detaching)
        || wanted.is_some() && wanted != current;
    is_moving
        || cluster.engines.get(name).is_some_and(|engine| engine.status.phase == Some(EnginePhase::Frozen))
}

/// Returns true if a volume that is to be deleted continues for now, because its device is in use.
fn is_held(cluster: &ClusterState, volume: &Volume) -> bool {
    let engine = cluster.engines.get(&volume.metadata.name);
    engine.is_some_and(|engine| engine.status.stop_refused.is_some())
}

/// Returns the objects whose reconcilers look at the object `key`, that one included: they run when it
/// changes. Volumes that wait for a place are not among them; see [`waiting_volumes`].
#[must_use]
pub fn concerned(cluster: &ClusterState, key: &Key) -> Vec<Key> {
    let mut keys = vec![key.clone()];
    match key.kind {
        Kind::Volume => {
            keys.push(Key::new(Kind::Engine, &key.name));
            // Its replicas are deleted only once it is stored that the deletion has begun.
            let deleted = cluster.volumes.get(&key.name);
            let deleted = deleted.filter(|volume| volume.status.state == VolumeState::Deleting);
            let replicas =
                deleted.into_iter().flat_map(|volume| cluster.replicas_of(&volume.spec.volume_name));
            keys.extend(replicas.map(|replica| Key::new(Kind::Replica, &replica.metadata.name)));
        }
        Kind::Engine => {
            keys.push(Key::new(Kind::Volume, &key.name));
            if let Some(engine) = cluster.engines.get(&key.name) {
                let replicas = cluster.replicas_of(&engine.spec.volume_name);
                keys.extend(replicas.map(|replica| Key::new(Kind::Replica, &replica.metadata.name)));
            }
        }
        Kind::Replica => match cluster.replicas.get(&key.name) {
            Some(replica) => keys.push(Key::new(Kind::Volume, replica.spec.volume_name.as_str())),
            // The replica is gone: its volume continues its deletion.
            None => {
                let volume = key.name.rsplit_once('-').map_or("", |(volume, _)| volume);
                keys.push(Key::new(Kind::Volume, volume));
            }
        },
        Kind::Node => {
            // Replicas that were to leave the node may stay now.
            keys.extend(cluster.replicas_on(&key.name).flat_map(|replica| {
                let volume = Key::new(Kind::Volume, replica.spec.volume_name.as_str());
                // A replica that is being deleted is dropped if its node is given up.
                let replica =
                    replica.metadata.is_deleting().then(|| Key::new(Kind::Replica, &replica.metadata.name));
                std::iter::once(volume).chain(replica)
            }));
            let engines = cluster.engines_on(&key.name);
            keys.extend(engines.flat_map(|engine| {
                // An engine of a deleted volume is deleted with its node.
                let engine_key =
                    engine.metadata.is_deleting().then(|| Key::new(Kind::Engine, &engine.metadata.name));
                std::iter::once(Key::new(Kind::Volume, &engine.metadata.name)).chain(engine_key)
            }));
        }
    }
    keys
}

/// The reachability of a node.
pub(crate) enum Reachability<'a> {
    /// The agent is reachable, and its reports are up to date.
    Reachable(&'a ObservedAgent),
    /// The agent has been unreachable for a short time. The reconciler concludes nothing yet, and runs again
    /// after this duration.
    Uncertain(Duration),
    /// The agent does not answer; the reason for people.
    Unreachable(String),
}

fn reachability<'a>(context: &Context<'a>, node: &NodeName) -> Reachability<'a> {
    reachability_of(context.agents, context.now, node)
}

pub(crate) fn reachability_of<'a>(agents: &'a Agents, now: Timestamp, node: &NodeName) -> Reachability<'a> {
    let Some(agent) = agents.get(node) else {
        return Reachability::Unreachable(format!(
            "the address of the agent of node {node} is unknown: start the controller with --node \
             {node}=URL, or set spec.address of the Node object"
        ));
    };
    match (&agent.link, &agent.info) {
        (AgentLink::Synced, Some(info)) if info.name != node.as_str() => Reachability::Unreachable(format!(
            "the agent at {} says that it is node {:?}, not {node}: correct --node {node}=URL",
            agent.address, info.name
        )),
        (AgentLink::Synced, _) => Reachability::Reachable(agent),
        (AgentLink::Down { since, reason }, _) => {
            let left = remaining(*since, UNREACHABLE_AFTER, now);
            if left.is_zero() {
                Reachability::Unreachable(format!(
                    "the agent of node {node} at {} is unreachable ({reason})",
                    agent.address
                ))
            } else {
                Reachability::Uncertain(left)
            }
        }
    }
}

/// Returns the rest of the time in which the steps of an attachment are not stored; zero if they are.
fn quiet_left(context: &Context<'_>, volume: Option<&Volume>) -> Duration {
    let attaching = volume.filter(|volume| volume.status.state == VolumeState::Attaching);
    let start = attaching.and_then(|volume| volume.status.attach_started_at);
    start.map_or(Duration::ZERO, |start| remaining(start, QUIET_START, context.now))
}

/// Returns true if the node does not answer, and the operator has given it up.
fn is_given_up(context: &Context<'_>, node: &NodeName) -> bool {
    given_up_places::is_node_given_up(context.cluster, node)
        && matches!(reachability(context, node), Reachability::Unreachable(_))
}

/// Returns true if the data of the replica is not waited for, because its node or its disk is given up.
fn has_lost_location(context: &Context<'_>, replica: &Replica) -> bool {
    is_given_up(context, &replica.spec.node_id) || given_up_places::is_disk_given_up(context.cluster, replica)
}

/// Returns the rest of `limit` since `start`. If the clock was set back, no time counts as passed.
fn remaining(start: Timestamp, limit: Duration, now: Timestamp) -> Duration {
    let passed_ms = now.as_millisecond().saturating_sub(start.as_millisecond()).max(0);
    limit.saturating_sub(Duration::from_millis(passed_ms.unsigned_abs()))
}

#[cfg(test)]
mod tests;
