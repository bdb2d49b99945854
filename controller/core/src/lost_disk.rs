//! Takes a disk out of use that is empty, or that does not come back.
//!
//! The operator declares a disk lost: it is gone, mounted read-only, or fails. Its replicas are replaced
//! then. The controller removes them once the engine of their volume serves without them and has forgotten
//! them, or with their volume. It does not wait for their data on the disk. Everything else takes its usual
//! course: a replica there that is still a member is replaced first. If the disk comes back, its data has no
//! owner ([`crate::orphans`]).

use crate::objects::{Node, Replica};
use crate::observed::{Agents, ObservedDisk};
use crate::requests::{Change, RequestError, find_node};
use crate::surviving_replicas::Losses;
use crate::{ClusterState, NodeName};

/// The operator's decision to remove a disk.
#[derive(Clone, Debug, Default)]
pub struct RemoveDisk {
    /// Name of the Node object.
    pub node: String,
    /// The directory there.
    pub path: String,
    /// True if it does not come back, with all that is on it.
    pub lost: bool,
    /// True to override the checks. For a lost disk: even if its agent sees no problem, and if volumes lose
    /// the last complete replica. Otherwise: even if its trash is not empty.
    pub force: bool,
}

impl RemoveDisk {
    /// Returns the node to store.
    ///
    /// # Errors
    /// [`RequestError`] has the obstacle.
    pub fn apply(&self, cluster: &ClusterState, agents: &Agents) -> Result<Change<Node>, RequestError> {
        let node = find_node(cluster, &self.node)?;
        let (name, path) = (|| self.node.clone(), || self.path.clone());
        let mut node = node.clone();
        let Some(disk) = node.spec.disks.get_mut(&self.path) else {
            return Err(RequestError::NoDisk { node: name(), path: path() });
        };
        if !self.lost {
            if self.replicas(cluster).next().is_some() || self.scheduled(cluster).next().is_some() {
                return Err(RequestError::DiskHasReplicas { node: name(), path: path() });
            }
            self.check_all_known(cluster)?;
            node.spec.disks.remove(&self.path);
            node.status.disk_status.remove(&self.path);
            return Ok(Change::Store(node));
        }
        if disk.lost {
            return Ok(Change::AlreadySo(node));
        }
        if self.is_usable(agents) && !self.force {
            return Err(RequestError::DiskIsUsable { node: name(), path: path() });
        }
        if !self.force {
            self.check_all_known(cluster)?;
        }
        let lost = Losses::of(cluster, self.replicas(cluster), |replica| self.is_on_it(replica));
        if let (Some(sentence), false) = (lost.unknown(cluster), self.force) {
            return Err(RequestError::LeftOut(sentence));
        }
        if let (Some(volumes), false) = (lost.everything(), self.force) {
            return Err(RequestError::DiskHasLast { node: name(), path: path(), volumes });
        }
        if let (Some(volumes), false) = (lost.too_many(), self.force) {
            return Err(RequestError::DiskHasMajority { node: name(), path: path(), volumes });
        }
        (disk.lost, disk.eviction_requested, disk.allow_scheduling) = (true, true, false);
        Ok(Change::Store(node))
    }

    /// Returns the node with the disk closed for new replicas, so that none is placed there while its agent
    /// removes it.
    ///
    /// # Errors
    /// [`RequestError`] has the obstacle.
    pub fn closed(&self, cluster: &ClusterState, agents: &Agents) -> Result<Change<Node>, RequestError> {
        self.apply(cluster, agents)?;
        let mut node = find_node(cluster, &self.node)?.clone();
        match node.spec.disks.get_mut(&self.path).filter(|disk| disk.allow_scheduling) {
            Some(disk) => disk.allow_scheduling = false,
            None => return Ok(Change::AlreadySo(node)),
        }
        Ok(Change::Store(node))
    }

    /// Returns the node with the disk open for new replicas again, after its agent has refused to remove it.
    ///
    /// # Errors
    /// [`RequestError`] has the obstacle.
    pub fn reopened(&self, cluster: &ClusterState) -> Result<Change<Node>, RequestError> {
        let mut node = find_node(cluster, &self.node)?.clone();
        match node.spec.disks.get_mut(&self.path).filter(|disk| !disk.allow_scheduling && !disk.lost) {
            Some(disk) if !disk.eviction_requested => disk.allow_scheduling = true,
            _ => return Ok(Change::AlreadySo(node)),
        }
        Ok(Change::Store(node))
    }

    /// Checks that the directories in the disk's trash may be left there. After the removal, the controller
    /// does not list or delete them any more. `directories` is their number.
    ///
    /// # Errors
    /// [`RequestError::DiskHasTrash`].
    pub fn leave_trash(&self, directories: usize) -> Result<(), RequestError> {
        if directories == 0 || self.force {
            return Ok(());
        }
        let (node, path) = (self.node.clone(), self.path.clone());
        Err(RequestError::DiskHasTrash { node, path, directories })
    }

    /// Returns the stored replicas on the disk.
    fn replicas<'a>(&'a self, cluster: &'a ClusterState) -> impl Iterator<Item = &'a Replica> {
        cluster.replicas_on(&self.node).filter(|replica| replica.spec.disk_path == self.path)
    }

    /// The replicas that are about to be stored with a place on it.
    fn scheduled<'a>(&'a self, cluster: &'a ClusterState) -> impl Iterator<Item = &'a Replica> {
        cluster.replicas.coming().filter(|replica| self.is_on_it(replica))
    }

    fn is_on_it(&self, replica: &Replica) -> bool {
        replica.spec.node_id.as_str() == self.node && replica.spec.disk_path == self.path
    }

    /// # Errors
    /// [`RequestError::LeftOut`]: a replica may be on it that the controller cannot use.
    fn check_all_known(&self, cluster: &ClusterState) -> Result<(), RequestError> {
        let unknown =
            cluster.unknown_replicas_on(&self.node, Some(&self.path)).find_map(|key| cluster.unknown(key));
        unknown.map_or(Ok(()), |sentence| Err(RequestError::LeftOut(sentence)))
    }

    /// Returns true if the agent of the disk is in reach and reports no problem of the disk.
    fn is_usable(&self, agents: &Agents) -> bool {
        let agent = NodeName::new(&self.node).ok().and_then(|name| agents.get(&name));
        let disk = agent.filter(|agent| agent.is_synced()).and_then(|agent| agent.disks.get(&self.path));
        disk.is_some_and(ObservedDisk::is_usable)
    }
}

#[cfg(test)]
mod tests;
