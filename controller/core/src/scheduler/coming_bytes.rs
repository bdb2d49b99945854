//! The bytes that rebuilds in progress will still take. A file system shows them as free, and the last report
//! of it is old: without them, many rebuilds would find the same space.

use std::collections::BTreeMap;

use super::request::NodeCandidate;
use crate::cluster_state::Rebuild;
use crate::objects::Replica;
use crate::observed::{Agents, Detail, InstanceKey, InstanceState, ObservedAgent};
use crate::{ClusterState, NodeName};

/// Counts these bytes on the disks of the candidates. The index has the few rebuilds of each node.
/// Those of the volume whose replicas are `own` do not count: the request has the bytes of one more.
pub(super) fn count(cluster: &ClusterState, agents: &Agents, own: &[&Replica], nodes: &mut [NodeCandidate]) {
    let own = own.iter().map(|own| InstanceKey::replica(&own.spec.volume_name, own.spec.replica_id));
    let own: Vec<InstanceKey> = own.collect();
    let mut reserved: BTreeMap<&NodeName, Vec<&Replica>> = BTreeMap::new();
    for replica in cluster.replicas.coming() {
        reserved.entry(&replica.spec.node_id).or_default().push(replica);
    }
    for node in nodes {
        let mut rebuilds = cluster.rebuilds_on(node.name.as_str()).peekable();
        let agent = rebuilds.peek().and_then(|_| agents.get(&node.name));
        for rebuild in rebuilds.filter(|rebuild| !own.contains(&rebuild.instance)) {
            add(node, &rebuild.disk_path, left_bytes(agent, rebuild));
        }
        for replica in reserved.get(&node.name).into_iter().flatten() {
            let volume = cluster.volumes.get(replica.spec.volume_name.as_str());
            // A new volume has no data.
            let bytes = volume.and_then(|volume| volume.status.actual_size).unwrap_or(0);
            add(node, &replica.spec.disk_path, bytes);
        }
    }
}

/// Returns the bytes that the rebuild still takes: none if its process has ended.
fn left_bytes(agent: Option<&ObservedAgent>, rebuild: &Rebuild) -> u64 {
    let instance = agent.and_then(|agent| agent.instances.get(&rebuild.instance));
    match instance.map(|instance| (instance.state, &instance.detail)) {
        None => rebuild.volume_bytes,
        Some((InstanceState::Starting | InstanceState::Running, Detail::Replica(shown))) => {
            rebuild.volume_bytes.saturating_sub(shown.allocated_bytes)
        }
        Some(_) => 0,
    }
}

fn add(node: &mut NodeCandidate, path: &str, bytes: u64) {
    if let Some(disk) = node.disks.iter_mut().find(|disk| disk.path == path) {
        disk.coming_bytes = disk.coming_bytes.saturating_add(bytes);
    }
}
