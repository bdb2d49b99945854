//! The nodes of the cluster state as the scheduler sees them.

use std::collections::{BTreeMap, btree_map};
use std::iter::Peekable;

use super::coming_bytes;
use super::request::{DiskCandidate, NodeCandidate, SchedulingLimits};
use crate::cluster_state::ScheduledBytes;
use crate::objects::{ConditionType, DiskSpec, DiskStatus, Node, Replica, Volume};
use crate::observed::{Agents, Detail, InstanceKey, ObservedAgent};
use crate::{ClusterState, NodeName};

/// Returns the nodes of the cluster state as candidates for replicas of `volume`.
#[must_use]
pub fn candidates(cluster: &ClusterState, agents: &Agents, volume: &Volume) -> Vec<NodeCandidate> {
    let own: Vec<&Replica> = cluster.replicas_of(&volume.spec.volume_name).collect();
    with_replicas(cluster, agents, &own)
}

/// Returns the nodes of the cluster state as candidates for replicas of a volume that does not exist yet.
#[must_use]
pub fn candidates_for_new(cluster: &ClusterState, agents: &Agents) -> Vec<NodeCandidate> {
    with_replicas(cluster, agents, &[])
}

/// Returns some of the nodes as candidates, equally many of each zone. They are the nodes with a replica of
/// the volume, the node at `local`, and about `most` others from a position that `random` chooses.
pub(super) fn some_candidates(
    cluster: &ClusterState,
    agents: &Agents,
    own: &[&Replica],
    local: Option<&NodeName>,
    (most, random): (usize, u64),
) -> Vec<NodeCandidate> {
    let mut names = cluster.some_nodes(most, random);
    names.extend(own.iter().map(|replica| replica.spec.node_id.as_str()));
    names.extend(local.map(NodeName::as_str));
    let nodes = names.into_iter().filter_map(|name| cluster.nodes.get(name));
    let candidate = |node: &Node| {
        let name = node.metadata.name.as_str();
        candidate(node, agents.by_node().get_key_value(name), cluster.replicas.scheduled_on(name), own)
    };
    let mut candidates: Vec<NodeCandidate> = nodes.filter_map(candidate).collect();
    coming_bytes::count(cluster, agents, own, &mut candidates);
    candidates
}

fn with_replicas(cluster: &ClusterState, agents: &Agents, own: &[&Replica]) -> Vec<NodeCandidate> {
    let mut by_node = Sorted::new(agents.by_node());
    let mut scheduled = Sorted::new(cluster.replicas.scheduled());
    let candidate = |node: &Node| {
        let agent = by_node.get(&node.metadata.name);
        let scheduled = scheduled.get(&node.metadata.name).map(|(_, disks)| disks);
        candidate(node, agent, scheduled, own)
    };
    let mut candidates: Vec<NodeCandidate> = cluster.nodes.values().filter_map(candidate).collect();
    coming_bytes::count(cluster, agents, own, &mut candidates);
    candidates
}

fn candidate(
    node: &Node,
    agent: Option<(&NodeName, &ObservedAgent)>,
    scheduled: Option<&BTreeMap<String, ScheduledBytes>>,
    own: &[&Replica],
) -> Option<NodeCandidate> {
    // A known name is not checked again.
    let name = match agent {
        Some((name, _)) => name.clone(),
        None => NodeName::new(&node.metadata.name).ok()?,
    };
    let agent = agent.map(|(_, agent)| agent);
    let disk = |(path, spec): (&String, &DiskSpec)| {
        let here = |replica: &&&Replica| replica.spec.node_id == name && replica.spec.disk_path == *path;
        let scheduled = scheduled.and_then(|disks| disks.get(path)).copied().unwrap_or_default();
        let same_volume = own.iter().filter(here).count();
        DiskCandidate {
            scheduled_bytes: u64::try_from(scheduled.bytes).unwrap_or(u64::MAX),
            same_volume: u32::try_from(same_volume).unwrap_or(u32::MAX),
            ..disk_candidate(node, agent, path, spec)
        }
    };
    Some(NodeCandidate {
        zone: node.zone().cloned(),
        tags: node.spec.tags.clone(),
        cordoned: !node.spec.allow_scheduling || node.spec.eviction_requested || node.metadata.is_deleting(),
        machine_cordoned: node.is_machine_cordoned(),
        evicted: node.spec.eviction_requested,
        not_ready: not_ready(node, agent),
        is_busy: false,
        disks: node.spec.disks.iter().map(disk).collect(),
        name,
    })
}

/// The entries of a map, for names that are asked for in their order. With many nodes, a search for each
/// would take most of the time of a placement.
struct Sorted<'a, V>(Peekable<btree_map::Iter<'a, NodeName, V>>);

impl<'a, V> Sorted<'a, V> {
    fn new(map: &'a BTreeMap<NodeName, V>) -> Sorted<'a, V> {
        Sorted(map.iter().peekable())
    }

    /// Returns the entry of `name`, which is not before an earlier one.
    fn get(&mut self, name: &str) -> Option<(&'a NodeName, &'a V)> {
        while self.0.next_if(|(other, _)| other.as_str() < name).is_some() {}
        self.0.peek().copied().filter(|(other, _)| other.as_str() == name)
    }
}

/// Returns the most bytes that can be scheduled on one disk of the node, as far as its object shows. None if
/// no disk accepts a replica.
pub(crate) fn largest_room_bytes(
    cluster: &ClusterState,
    node: &Node,
    limits: SchedulingLimits,
) -> Option<u64> {
    let scheduled = cluster.replicas.scheduled_on(&node.metadata.name);
    let room = |(path, spec): (&String, &DiskSpec)| {
        let scheduled = scheduled.and_then(|disks| disks.get(path)).copied().unwrap_or_default();
        let scheduled_bytes = u64::try_from(scheduled.bytes).unwrap_or(u64::MAX);
        let disk = DiskCandidate { scheduled_bytes, ..disk_candidate(node, None, path, spec) };
        disk.refusal.is_none().then(|| disk.room_bytes(limits))
    };
    node.spec.disks.iter().filter_map(room).max()
}

/// Returns the bytes that the copy of a replica will take at once, as far as agents show them.
#[must_use]
pub fn taken_bytes(agents: &Agents, replicas: &[&Replica]) -> u64 {
    let taken = |replica: &&Replica| {
        let agent = agents.get(&replica.spec.node_id)?;
        let key = InstanceKey::replica(&replica.spec.volume_name, replica.spec.replica_id);
        match &agent.instances.get(&key)?.detail {
            Detail::Replica(shown) => Some(shown.allocated_bytes),
            Detail::Engine(_) => None,
        }
    };
    replicas.iter().filter_map(taken).max().unwrap_or(0)
}

/// Returns the disk without its replicas.
fn disk_candidate(node: &Node, agent: Option<&ObservedAgent>, path: &str, spec: &DiskSpec) -> DiskCandidate {
    let status = node.status.disk_status.get(path);
    let seen = agent.and_then(|agent| agent.disks.get(path));
    DiskCandidate {
        path: path.to_owned(),
        uuid: status.map(|status| status.disk_uuid.clone()).unwrap_or_default(),
        tags: spec.tags.clone(),
        refusal: disk_refusal(spec, status),
        total_bytes: status.map_or(0, |status| status.storage_maximum),
        available_bytes: seen.map_or(0, |seen| seen.available_bytes),
        reserved_bytes: spec.storage_reserved,
        ..DiskCandidate::default()
    }
}

fn not_ready(node: &Node, agent: Option<&ObservedAgent>) -> Option<String> {
    match node.status.conditions.get(ConditionType::Ready) {
        Some(ready) if !ready.status => Some(format!("not ready: {}", ready.message)),
        None => Some("agent not reached yet".to_owned()),
        Some(_) if !agent.is_some_and(ObservedAgent::is_synced) => Some("agent unreachable".to_owned()),
        Some(_) => None,
    }
}

fn disk_refusal(spec: &DiskSpec, status: Option<&DiskStatus>) -> Option<String> {
    match status {
        _ if !spec.allow_scheduling || spec.eviction_requested => Some("disk is cordoned".to_owned()),
        None => Some("agent has not reported the disk yet".to_owned()),
        Some(status) => status.problem.clone(),
    }
}
