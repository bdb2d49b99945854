//! Where the replicas of a volume go, or why nowhere.
//!
//! Filters first, each of which can say why it removes a node or a disk; then one order over what is left.
//! Later filters (tags, zones, minimal free space) are one more entry in the tables of `filters`, later
//! preferences one more element of the tuple in [`rank`].

mod filters;

use std::collections::BTreeMap;
use std::fmt;

use crate::NodeName;
use crate::objects::{ConditionType, Volume};
use crate::observed::Agents;
use crate::world::World;

/// How much of a disk replicas may promise, in percent of what is not reserved. Replicas are sparse, so
/// more than 100 can work, and can run out of space.
pub const OVER_PROVISIONING_PERCENT: u64 = 100;
/// How much of a new disk is left to others, in percent.
pub const RESERVED_PERCENT: u64 = 10;

/// What is wanted.
#[derive(Clone, Debug)]
pub struct Request {
    /// How large each replica can become.
    pub size_bytes: u64,
    /// Whether several replicas may be on one node.
    pub soft_anti_affinity: bool,
}

/// A node that could take replicas.
#[derive(Clone, Debug)]
pub struct NodeCandidate {
    /// Its name.
    pub name: NodeName,
    /// Why it takes none at all.
    pub refusal: Option<String>,
    /// How many replicas of this volume on it are lost and do not keep others away.
    pub excused: u32,
    /// Its disks.
    pub disks: Vec<DiskCandidate>,
}

/// A disk that could take replicas.
#[derive(Clone, Debug)]
pub struct DiskCandidate {
    /// Its path.
    pub path: String,
    /// Its identity.
    pub uuid: String,
    /// Why it takes none at all.
    pub refusal: Option<String>,
    /// Its size.
    pub total_bytes: u64,
    /// What replicas leave to others.
    pub reserved_bytes: u64,
    /// What replicas were promised already.
    pub scheduled_bytes: u64,
    /// How many replicas of this volume are on it.
    pub same_volume: u32,
}

impl NodeCandidate {
    fn same_volume(&self) -> u32 {
        self.disks.iter().map(|disk| disk.same_volume).sum()
    }
}

impl DiskCandidate {
    /// What may still be promised.
    #[must_use]
    pub fn free_bytes(&self) -> u64 {
        let usable = u128::from(self.total_bytes.saturating_sub(self.reserved_bytes));
        let promised = usable * u128::from(OVER_PROVISIONING_PERCENT) / 100;
        u64::try_from(promised).unwrap_or(u64::MAX).saturating_sub(self.scheduled_bytes)
    }
}

/// Where one replica goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// The node.
    pub node: NodeName,
    /// The disk there.
    pub disk_path: String,
    /// The identity of that disk.
    pub disk_uuid: String,
}

/// No place for a replica: why not, by node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// How many replicas have a place.
    pub placed: u32,
    /// How many are wanted.
    pub wanted: u32,
    /// Why each node takes no more.
    pub by_node: BTreeMap<NodeName, String>,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {} replicas have a place; ", self.placed, self.wanted)?;
        if self.by_node.is_empty() {
            return f.write_str("there are no nodes: start the controller with --node NAME=URL");
        }
        for (at, (node, reason)) in self.by_node.iter().enumerate() {
            write!(f, "{}{node}: {reason}", if at == 0 { "" } else { "; " })?;
        }
        Ok(())
    }
}

/// Finds places for the replicas that are missing up to `wanted`; `nodes` says what is there already.
///
/// # Errors
/// [`Refusal`] where not all of them have a place; none is taken then.
pub fn place(request: &Request, nodes: &mut [NodeCandidate], wanted: u32) -> Result<Vec<Placement>, Refusal> {
    let present: u32 = nodes.iter().map(NodeCandidate::same_volume).sum();
    let mut placements = Vec::new();
    for placed in present..wanted {
        let Some((node, disk)) = best(request, nodes) else {
            let by_node = nodes.iter().map(|node| (node.name.clone(), filters::explain(request, node)));
            return Err(Refusal { placed, wanted, by_node: by_node.collect() });
        };
        let name = nodes[node].name.clone();
        let disk = &mut nodes[node].disks[disk];
        disk.same_volume += 1;
        disk.scheduled_bytes = disk.scheduled_bytes.saturating_add(request.size_bytes);
        placements.push(Placement { node: name, disk_path: disk.path.clone(), disk_uuid: disk.uuid.clone() });
    }
    Ok(placements)
}

fn best(request: &Request, nodes: &[NodeCandidate]) -> Option<(usize, usize)> {
    let passing_nodes = nodes.iter().enumerate().filter(|(_, node)| filters::node(request, node).is_ok());
    passing_nodes
        .flat_map(|(at, node)| {
            node.disks.iter().enumerate().map(move |(disk_at, disk)| (at, node, disk_at, disk))
        })
        .filter(|(.., disk)| filters::disk(request, disk).is_ok())
        .min_by_key(|(_, node, _, disk)| rank(node, disk))
        .map(|(at, _, disk_at, _)| (at, disk_at))
}

/// The smallest goes first: unused nodes, then unused disks, then the most free; names make it definite.
fn rank<'a>(node: &'a NodeCandidate, disk: &'a DiskCandidate) -> impl Ord + 'a {
    (
        node.same_volume(),
        disk.same_volume,
        std::cmp::Reverse(disk.free_bytes()),
        node.name.as_str(),
        disk.path.as_str(),
    )
}

/// The nodes of the world as candidates for replicas of `volume`.
#[must_use]
pub fn candidates(world: &World, agents: &Agents, volume: &Volume) -> Vec<NodeCandidate> {
    let mut promised: BTreeMap<(&NodeName, &str), (u64, u32)> = BTreeMap::new();
    for replica in world.replicas.values() {
        let disk = promised.entry((&replica.spec.node_id, &replica.spec.disk_path)).or_default();
        disk.0 = disk.0.saturating_add(replica.spec.volume_size);
        disk.1 += u32::from(replica.spec.volume_name == volume.spec.volume_name);
    }
    let node_candidate = |node: &crate::objects::Node| {
        let name = NodeName::new(&node.metadata.name).ok()?;
        let disks = node.spec.disks.iter().map(|(path, spec)| {
            let status = node.status.disk_status.get(path);
            let (scheduled_bytes, same_volume) = promised.get(&(&name, path)).copied().unwrap_or_default();
            DiskCandidate {
                path: path.clone(),
                uuid: status.map(|status| status.disk_uuid.clone()).unwrap_or_default(),
                refusal: disk_refusal(spec.allow_scheduling, status.map(|status| status.problem.as_str())),
                total_bytes: status.map_or(0, |status| status.storage_maximum),
                reserved_bytes: spec.storage_reserved,
                scheduled_bytes,
                same_volume,
            }
        });
        let disks = disks.collect();
        Some(NodeCandidate { refusal: node_refusal(node, agents, &name), excused: 0, disks, name })
    };
    world.nodes.values().filter_map(node_candidate).collect()
}

fn node_refusal(node: &crate::objects::Node, agents: &Agents, name: &NodeName) -> Option<String> {
    if !node.spec.allow_scheduling {
        return Some("it is closed for new replicas".to_owned());
    }
    let ready = node.status.conditions.get(ConditionType::Ready);
    match ready {
        Some(ready) if !ready.status => return Some(format!("it is not ready: {}", ready.message)),
        None => return Some("its agent has not been reached yet".to_owned()),
        Some(_) => {}
    }
    let synced = agents.get(name).is_some_and(crate::observed::AgentView::is_synced);
    (!synced).then(|| "its agent is out of reach".to_owned())
}

fn disk_refusal(allow_scheduling: bool, problem: Option<&str>) -> Option<String> {
    match problem {
        _ if !allow_scheduling => Some("it is closed for new replicas".to_owned()),
        None => Some("its agent has not reported it yet".to_owned()),
        Some("") => None,
        Some(problem) => Some(problem.to_owned()),
    }
}

#[cfg(test)]
mod tests;
