//! Follows one agent: its stream of instances, and from time to time its disks.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use shorthorn_api::v1;
use shorthorn_api::v1::instance_event::Type;
use shorthorn_controller_core::objects::{Key, Kind};
use shorthorn_controller_core::observed::{AgentLink, Detail, Instance, InstanceKey, InstanceKind};
use shorthorn_controller_core::reconcile::is_noticeable;
use shorthorn_controller_core::{NodeName, Timestamp};
use tokio::time::Instant;
use tonic::{Status, Streaming};

use super::{CALL_LIMIT, Client, Fleet, cluster, convert, limited};
use crate::backoff::backoff;

/// The shortest interval of reading the free space and the health of disks.
const DISKS_EVERY: Duration = Duration::from_secs(30);
/// The agents whose disks are read per second, at most: more would cost an idle controller of 5,000 nodes
/// over 5 % of a core.
const LOOKS_PER_S_MAX: u32 = 80;
/// The longest wait before an agent is tried again: a volume may be frozen until it is back.
const RECONNECT_MAX: Duration = Duration::from_millis(500);
/// The maximum time for an agent to show all of its objects. An agent that has just started looks at all of
/// its processes first.
const SYNC_LIMIT: Duration = Duration::from_secs(30);

/// Follows the agent of `node` for ever; reconnects, ever later, if that breaks.
pub(super) async fn follow(fleet: Arc<Fleet>, node: NodeName) {
    let mut failures = 0;
    loop {
        let Ok(mut client) = fleet.client(&node) else { return };
        let error = match sync(&fleet, &node, &mut client).await {
            Ok(stream) => {
                failures = 0;
                listen(&fleet, &node, &mut client, stream).await
            }
            Err(error) => error,
        };
        failures += 1;
        lose(&fleet, &node, &error);
        tokio::time::sleep(backoff(failures).min(RECONNECT_MAX)).await;
    }
}

fn lose(fleet: &Fleet, node: &NodeName, error: &Status) {
    let reason = reason(error);
    let mut was_synced = false;
    fleet.change(node, |agent| {
        was_synced = agent.is_synced();
        let since = match agent.link {
            AgentLink::Down { since, .. } => since,
            AgentLink::Synced => Timestamp::now(),
        };
        agent.link = AgentLink::Down { since, reason: reason.clone() };
    });
    if was_synced {
        tracing::warn!(%node, reason, "the agent is unreachable");
        fleet.wake_all(node);
    }
}

/// Returns the error down to the message of the system, because "transport error" alone does not help.
fn reason(error: &Status) -> String {
    let mut innermost: Option<&dyn std::error::Error> = std::error::Error::source(error);
    while let Some(source) = innermost.and_then(std::error::Error::source) {
        innermost = Some(source);
    }
    let text = innermost.map_or_else(|| error.message().to_owned(), ToString::to_string);
    if text.is_empty() { error.code().to_string() } else { text }
}

/// Takes over the complete report of the agent, and returns the stream of the later changes.
async fn sync(
    fleet: &Fleet,
    node: &NodeName,
    client: &mut Client,
) -> Result<Streaming<v1::InstanceEvent>, Status> {
    let (version, warnings) = take_over(fleet, node, client).await?;
    let mut stream = client.watch_instances(v1::WatchInstancesRequest {}).await?.into_inner();
    let everything = collect(&mut stream);
    let instances = tokio::time::timeout(SYNC_LIMIT, everything)
        .await
        .map_err(|_| Status::deadline_exceeded("the agent does not finish showing its instances"))??;
    fleet.change(node, |agent| {
        agent.failures.clear();
        agent.instances = instances;
        agent.link = AgentLink::Synced;
    });
    tracing::info!(%node, version, "the agent is reachable");
    for warning in warnings {
        tracing::warn!(%node, "{warning}");
    }
    fleet.wake_all(node);
    Ok(stream)
}

/// Takes over the identity and the disks of the agent; returns its version and its warnings.
async fn take_over(
    fleet: &Fleet,
    node: &NodeName,
    client: &mut Client,
) -> Result<(String, Vec<String>), Status> {
    let _asking = fleet.connections.ask_for_disks(node).await;
    let mut second = client.clone();
    // Both at once: their frames share the wake-ups of the connection.
    let (info, disks) = tokio::try_join!(
        client.get_node(limited(v1::GetNodeRequest {}, CALL_LIMIT)),
        second.list_disks(limited(v1::ListDisksRequest {}, CALL_LIMIT)),
    )?;
    let (info, disks) = (info.into_inner(), disks.into_inner());
    cluster::check(&info, fleet.store.cluster())?;
    let (version, warnings) = (info.version.clone(), info.warnings.clone());
    fleet.change(node, |agent| {
        agent.info = Some(convert::info(info));
        agent.disks = disks.disks.into_iter().map(convert::disk).collect();
    });
    Ok((version, warnings))
}

async fn collect(
    stream: &mut Streaming<v1::InstanceEvent>,
) -> Result<BTreeMap<InstanceKey, Instance>, Status> {
    let mut instances = BTreeMap::new();
    loop {
        let event = stream.message().await?.ok_or_else(|| Status::unavailable("the stream ended"))?;
        match (event.r#type(), event.instance.map(convert::instance)) {
            (Type::Synced, _) => return Ok(instances),
            (Type::Set, Some(Some((key, instance)))) => drop(instances.insert(key, instance)),
            (Type::Gone, Some(Some((key, _)))) => drop(instances.remove(&key)),
            _ => {}
        }
    }
}

/// Takes over the changes, until the stream ends.
async fn listen(
    fleet: &Fleet,
    node: &NodeName,
    client: &mut Client,
    mut stream: Streaming<v1::InstanceEvent>,
) -> Status {
    let next_look = || Instant::now() + looks_every(fleet.connections.count());
    let look_at_disks = tokio::time::sleep_until(next_look());
    tokio::pin!(look_at_disks);
    loop {
        tokio::select! {
            event = stream.message() => match event {
                Ok(Some(event)) => take(fleet, node, event),
                Ok(None) => return Status::unavailable("the agent ended the stream"),
                Err(error) => return error,
            },
            () = &mut look_at_disks => match take_over(fleet, node, client).await {
                Ok(_) => {
                    fleet.queue.add([Key::new(Kind::Node, node.as_str())]);
                    look_at_disks.as_mut().reset(next_look());
                }
                Err(error) => return error,
            },
        }
    }
}

/// Returns the interval of reading the disks of each agent, for a number of agents.
fn looks_every(agents: usize) -> Duration {
    let agents = u32::try_from(agents).unwrap_or(u32::MAX);
    DISKS_EVERY.max(Duration::from_secs(1) * agents / LOOKS_PER_S_MAX)
}

fn take(fleet: &Fleet, node: &NodeName, event: v1::InstanceEvent) {
    let kind = event.r#type();
    let Some((key, instance)) = event.instance.and_then(convert::instance) else { return };
    let object = Key::new(
        match key.kind {
            InstanceKind::Engine => Kind::Engine,
            InstanceKind::Replica => Kind::Replica,
        },
        &key.name,
    );
    let volume = volume_to_look_at(fleet, node, &key, &instance);
    fleet.change(node, |agent| match kind {
        Type::Set => drop(agent.instances.insert(key, instance)),
        Type::Gone => drop(agent.instances.remove(&key)),
        Type::Synced | Type::Unspecified => {}
    });
    fleet.queue.add([object].into_iter().chain(volume));
}

/// Returns the volume whose reconciler reads this instance itself. The arbiter reads the question of an
/// engine. Fencing on a lost node reads the generation that a replica refuses, and the display reads
/// allocated bytes.
fn volume_to_look_at(fleet: &Fleet, node: &NodeName, key: &InstanceKey, now: &Instance) -> Option<Key> {
    let Detail::Replica(now) = &now.detail else { return Some(Key::new(Kind::Volume, &key.name)) };
    let refuses_the_same = fleet.agents().get(node).is_some_and(|agent| {
        let before = agent.instances.get(key).map(|before| &before.detail);
        matches!(before, Some(Detail::Replica(before)) if before.attach == now.attach)
    });
    let cluster = fleet.store.state();
    let volume = cluster.replicas.get(&key.name)?.spec.volume_name.as_str();
    let stored = cluster.volumes.get(volume).map(|volume| volume.status.actual_size);
    // The volume takes as much as its largest replica: a smaller one does not change that.
    let has_grown = stored.is_some_and(|stored_bytes| {
        Some(now.allocated_bytes) > stored_bytes && is_noticeable(stored_bytes, now.allocated_bytes)
    });
    if refuses_the_same && !has_grown {
        return None;
    }
    Some(Key::new(Kind::Volume, volume))
}

#[cfg(test)]
mod tests {
    use shorthorn_controller_core::objects::{
        CurrentState, DesireState, Metadata, Replica, ReplicaSpec, StoredReplicaStatus,
    };
    use shorthorn_controller_core::observed::{InstanceState, ObservedReplica};
    use shorthorn_types::{ReplicaId, VolumeName};

    use super::*;
    use crate::counters::Metrics;
    use crate::queue::WorkQueue;
    use crate::store::{MemoryStore, ObjectStore};

    #[test]
    fn the_disks_of_many_agents_are_read_less_often() {
        assert_eq!((looks_every(3), looks_every(2_400)), (DISKS_EVERY, DISKS_EVERY));
        assert_eq!(looks_every(5_000), Duration::from_millis(62_500));
    }

    #[tokio::test]
    async fn a_volume_is_reconciled_if_a_replica_refuses_other_engines_than_before() {
        let (volume_name, replica_id) = (VolumeName::new("v").unwrap(), ReplicaId::from_random(1));
        let key = InstanceKey::replica(&volume_name, replica_id);
        let node = NodeName::new("a").unwrap();
        let spec = ReplicaSpec {
            volume_name,
            volume_size: 1 << 20,
            replica_id,
            node_id: node.clone(),
            disk_path: "/disk".to_owned(),
            disk_id: String::new(),
            desire_state: DesireState::Running,
            eviction_requested: false,
        };
        let status =
            StoredReplicaStatus { current_state: CurrentState::Running, ..StoredReplicaStatus::default() };
        let store = MemoryStore::new();
        let metadata = Metadata::new(&key.name, Timestamp::now());
        store.put(Replica { metadata, spec, status }.into()).await.unwrap();
        let known = BTreeMap::from([(node.clone(), "unix:///run/agent.sock".parse().unwrap())]);
        let fleet =
            Fleet::new(&known, Arc::new(store), Arc::new(WorkQueue::new()), Metrics::default()).unwrap();
        let shown = |attach, allocated_bytes| Instance {
            state: InstanceState::Running,
            message: None,
            detail: Detail::Replica(ObservedReplica {
                attach: Some(attach),
                allocated_bytes,
                ..ObservedReplica::default()
            }),
        };
        let volume = Some(Key::new(Kind::Volume, "v"));
        assert_eq!(volume_to_look_at(&fleet, &node, &key, &shown(1, 0)), volume);
        fleet.change(&node, |agent| drop(agent.instances.insert(key.clone(), shown(1, 0))));
        assert_eq!(volume_to_look_at(&fleet, &node, &key, &shown(1, 4096)), None, "its size changes nothing");
        assert_eq!(volume_to_look_at(&fleet, &node, &key, &shown(2, 0)), volume);
    }
}
