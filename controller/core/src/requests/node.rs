//! Requests about nodes and their disks.

use super::{Change, RequestError, absent};
use crate::objects::{DiskSpec, DiskStatus, Kind, Node, NodeSpec};
use crate::observed::ObservedDisk;
use crate::{ClusterState, NodeName, Timestamp, labels};

/// Returns the node that is to get a disk at `path`.
///
/// # Errors
/// [`RequestError`] names the value that can never work.
pub fn check_disk(cluster: &ClusterState, node: &str, path: &str) -> Result<NodeName, RequestError> {
    let name = NodeName::new(node)?;
    find_node(cluster, node)?;
    let plain = path.split('/').skip(1).all(|part| !part.is_empty() && part != "." && part != "..");
    if !path.starts_with('/') || !plain || path.contains('\0') {
        return Err(RequestError::DiskPath(path.chars().take(200).collect()));
    }
    Ok(name)
}

/// Returns the node with the disk that its agent has prepared.
///
/// # Errors
/// [`RequestError::NoNode`].
pub fn add_disk(
    cluster: &ClusterState,
    node: &NodeName,
    path: &str,
    disk: &ObservedDisk,
) -> Result<Change<Node>, RequestError> {
    let mut node = find_node(cluster, node.as_str())?.clone();
    if node.spec.disks.contains_key(path) {
        return Ok(Change::AlreadySo(node));
    }
    node.spec.disks.insert(path.to_owned(), DiskSpec::of_new(disk.total_bytes));
    node.status.disk_status.insert(path.to_owned(), DiskStatus::of(disk, None));
    Ok(Change::Store(node))
}

/// The changes of a node by an administrator; none leaves a field unchanged.
#[derive(Clone, Debug, Default)]
pub struct SetNode {
    /// Name of the Node object.
    pub name: String,
    /// True to allow new replicas on the node. That also cancels an eviction.
    pub allow_scheduling: Option<bool>,
    /// True to evict everything from the node, which also forbids new replicas.
    pub eviction_requested: Option<bool>,
    /// All its tags from now on.
    pub tags: Option<Vec<String>>,
    /// The zone; empty for the zone of the agent.
    pub zone: Option<String>,
    /// The address of the agent. With an address, an unknown node is created.
    pub address: Option<String>,
}

impl SetNode {
    /// Returns the node to store.
    ///
    /// # Errors
    /// [`RequestError`] has the remedy.
    pub fn apply(&self, cluster: &ClusterState, now: Timestamp) -> Result<Change<Node>, RequestError> {
        let stored = find_node(cluster, &self.name);
        let mut node = match (stored, &self.address) {
            (Err(RequestError::NoNode(_)), Some(_)) => Node::new(&self.name, now),
            (stored, _) => stored?.clone(),
        };
        let spec = &mut node.spec;
        if let Some(address) = &self.address {
            spec.address.clone_from(address);
        }
        if let Some(allow) = self.allow_scheduling {
            spec.allow_scheduling = allow;
            spec.eviction_requested &= !allow;
        }
        if let Some(evict) = self.eviction_requested {
            spec.eviction_requested = evict;
            spec.allow_scheduling &= !evict;
        }
        if let Some(tags) = &self.tags {
            spec.tags = labels(tags)?;
        }
        if let Some(zone) = &self.zone {
            spec.zone = if zone.is_empty() { None } else { Some(zone.parse()?) };
        }
        let is_so = cluster.nodes.get(&self.name) == Some(&node);
        Ok(if is_so { Change::AlreadySo(node) } else { Change::Store(node) })
    }
}

/// The changes of a disk by an administrator; none leaves a field unchanged.
#[derive(Clone, Debug, Default)]
pub struct SetDisk {
    /// Name of the Node object.
    pub node: String,
    /// The directory there.
    pub path: String,
    /// All its tags from now on.
    pub tags: Option<Vec<String>>,
    /// True to allow new replicas on the disk. That also cancels an eviction.
    pub allow_scheduling: Option<bool>,
    /// True to evict everything from the disk, which also forbids new replicas.
    pub eviction_requested: Option<bool>,
    /// Bytes that replicas leave to others.
    pub reserved_bytes: Option<u64>,
}

impl SetDisk {
    /// Returns the node to store.
    ///
    /// # Errors
    /// [`RequestError`] has the remedy.
    pub fn apply(&self, cluster: &ClusterState) -> Result<Change<Node>, RequestError> {
        let mut spec = find_node(cluster, &self.node)?.spec.clone();
        let missing = || RequestError::NoDisk { node: self.node.clone(), path: self.path.clone() };
        let disk = spec.disks.get_mut(&self.path).ok_or_else(missing)?;
        if let Some(tags) = &self.tags {
            disk.tags = labels(tags)?;
        }
        if let Some(allow) = self.allow_scheduling {
            disk.allow_scheduling = allow;
            disk.eviction_requested &= !allow;
            disk.lost &= !allow;
        }
        if let Some(evict) = self.eviction_requested {
            disk.eviction_requested = evict;
            disk.allow_scheduling &= !evict;
        }
        disk.storage_reserved = self.reserved_bytes.unwrap_or(disk.storage_reserved);
        with_node_spec(cluster, &self.node, spec)
    }
}

/// Returns the node of that name.
///
/// # Errors
/// [`RequestError::NoNode`], or that the name can never work.
pub fn find_node<'a>(cluster: &'a ClusterState, name: &str) -> Result<&'a Node, RequestError> {
    NodeName::new(name)?;
    let missing = || absent(cluster, Kind::Node, name, RequestError::NoNode(name.to_owned()));
    cluster.nodes.get(name).ok_or_else(missing)
}

fn with_node_spec(cluster: &ClusterState, name: &str, spec: NodeSpec) -> Result<Change<Node>, RequestError> {
    let node = find_node(cluster, name)?;
    if spec == node.spec {
        return Ok(Change::AlreadySo(node.clone()));
    }
    Ok(Change::Store(Node { spec, ..node.clone() }))
}
