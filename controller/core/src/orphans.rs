//! Finds replica directories without an object. They are on a node or a disk that was given up and is back,
//! or were restored by an undeletion that did not complete. They are deleted only by name, and moved to the
//! trash.

use shorthorn_types::{ReplicaId, VolumeName};

use crate::objects::ReplicaSpec;
use crate::requests::{RequestError, check_all_known};
use crate::{ClusterState, NodeName};

/// A directory that an agent has found.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct FoundDirectory {
    /// The node whose agent has reported the directory.
    pub node: NodeName,
    /// The disk there.
    pub disk_path: String,
    /// The identity of that disk, if it has one.
    pub disk_uuid: Option<String>,
    /// The volume of the data.
    pub volume: VolumeName,
    /// Identity in the name of the directory.
    pub replica_id: ReplicaId,
}

impl FoundDirectory {
    /// Returns the name of the replica.
    #[must_use]
    pub fn name(&self) -> String {
        ReplicaSpec::instance_name(&self.volume, self.replica_id)
    }
}

/// Parses the name of a directory; none if it is not a replica's.
#[must_use]
pub fn parse(name: &str) -> Option<(VolumeName, ReplicaId)> {
    let (volume, id) = name.rsplit_once('-')?;
    Some((VolumeName::new(volume).ok()?, id.parse().ok()?))
}

/// Returns the directories that belong to no replica.
#[must_use]
pub fn orphans(cluster: &ClusterState, found: Vec<FoundDirectory>) -> Vec<FoundDirectory> {
    // A replica that was left out may be in its place, and an engine that was left out may use any of its
    // volume.
    let may_be_known = |directory: &FoundDirectory| cluster.unknown_of(directory.volume.as_str()).is_some();
    let is_known = |directory: &FoundDirectory| {
        cluster.replicas.get(&directory.name()).is_some_and(|replica| {
            let is_same_location =
                replica.spec.node_id == directory.node && replica.spec.disk_path == directory.disk_path;
            // The disk may be mounted elsewhere now.
            is_same_location
                || directory.disk_uuid.is_some() && directory.disk_uuid == replica.spec.disk_uuid()
        })
    };
    let mut orphans: Vec<FoundDirectory> =
        found.into_iter().filter(|directory| !is_known(directory) && !may_be_known(directory)).collect();
    orphans.sort();
    orphans
}

/// Returns the orphan of that name in that place.
///
/// # Errors
/// [`RequestError::NoOrphan`]: it does not exist, or belongs to a volume. [`RequestError::LeftOut`]: it may.
pub fn find(
    cluster: &ClusterState,
    found: Vec<FoundDirectory>,
    node: &str,
    disk_path: &str,
    name: &str,
) -> Result<FoundDirectory, RequestError> {
    let is_meant = |directory: &FoundDirectory| {
        directory.node.as_str() == node && directory.disk_path == disk_path && directory.name() == name
    };
    if let Some((volume, _)) = parse(name) {
        check_all_known(cluster, volume.as_str())?;
    }
    orphans(cluster, found).into_iter().find(is_meant).ok_or_else(|| RequestError::NoOrphan {
        node: node.to_owned(),
        path: disk_path.to_owned(),
        name: name.to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Timestamp;
    use crate::objects::{DesireState, Metadata, Replica, StoredReplicaStatus};

    fn directory(node: &str, disk_path: &str, name: &str) -> FoundDirectory {
        let (volume, replica_id) = parse(name).unwrap();
        let node = NodeName::new(node).unwrap();
        let disk_uuid = Some("u".to_owned());
        FoundDirectory { node, disk_path: disk_path.to_owned(), disk_uuid, volume, replica_id }
    }

    #[test]
    fn only_directories_without_a_replica_at_their_place_are_orphans() {
        let known = directory("a", "/d", "v-00000001");
        let spec = ReplicaSpec {
            volume_name: known.volume.clone(),
            volume_size: 1 << 20,
            replica_id: known.replica_id,
            node_id: known.node.clone(),
            disk_path: known.disk_path.clone(),
            disk_id: String::new(),
            desire_state: DesireState::Stopped,
            eviction_requested: false,
        };
        let metadata = Metadata::new(known.name(), Timestamp::UNIX_EPOCH);
        let mut cluster = ClusterState::default();
        cluster.insert(Replica { metadata, spec, status: StoredReplicaStatus::default() }.into());
        // Of one replica another directory elsewhere is left over, as after a disk was copied.
        let elsewhere = directory("b", "/d", "v-00000001");
        let forgotten = directory("a", "/d", "my-volume-0000000a");
        let found = vec![known.clone(), forgotten.clone(), elsewhere.clone()];
        assert_eq!(orphans(&cluster, found.clone()), [forgotten.clone(), elsewhere]);
        let find = |name: &str| find(&cluster, found.clone(), "a", "/d", name);
        assert_eq!(find("my-volume-0000000a"), Ok(forgotten));
        assert!(matches!(find("v-00000001"), Err(RequestError::NoOrphan { .. })), "it is in use");
        assert!(matches!(find("w-00000001"), Err(RequestError::NoOrphan { .. })));
        let mut replica = cluster.replicas["v-00000001"].clone();
        replica.spec.disk_id = "u".to_owned();
        cluster.insert(replica.into());
        assert_eq!(
            orphans(&cluster, vec![directory("b", "/e", "v-00000001")]),
            [],
            "its disk is mounted elsewhere"
        );
        assert!(parse("v").is_none() && parse("v-1").is_none());
    }
}
