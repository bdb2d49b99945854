//! Requests about existing volumes.

use shorthorn_types::limits::MAX_MEMBERS;

use super::create::{check_share, check_size};
use super::{Change, RequestError, absent, find, find_living, with_spec};
use crate::objects::{DataLocality, Kind, RebuildLimits, Replica, Volume, VolumeSpec, VolumeState};
use crate::scheduler::{self, SchedulingLimits};
use crate::{ClusterState, NodeName, Timestamp, labels};

/// Returns the volume wanted on `node`.
///
/// # Errors
/// [`RequestError`] has the obstacle.
pub fn attach(cluster: &ClusterState, name: &str, node: &str) -> Result<Change<Volume>, RequestError> {
    let node = NodeName::new(node)?;
    let volume = find(cluster, name)?;
    if volume.is_deleting() {
        return Err(RequestError::Deleting(name.to_owned()));
    }
    if !cluster.nodes.contains_key(node.as_str()) {
        let missing = RequestError::NoNode(node.to_string());
        return Err(absent(cluster, Kind::Node, node.as_str(), missing));
    }
    match &volume.spec.node_id {
        Some(wanted) if *wanted == node => Ok(Change::AlreadySo(volume.clone())),
        Some(wanted) => Err(RequestError::AttachedElsewhere { name: name.to_owned(), node: wanted.clone() }),
        None => {
            // An engine there is to continue, even if it was to be stopped by force.
            let stays = volume.status.current_node_id.as_ref() == Some(&node);
            let forced_detach = volume.spec.forced_detach.filter(|_| !stays);
            let spec = VolumeSpec { node_id: Some(node), forced_detach, ..volume.spec.clone() };
            Ok(Change::Store(Volume { spec, ..volume.clone() }))
        }
    }
}

/// Returns the volume wanted nowhere.
///
/// # Errors
/// [`RequestError::NoVolume`], or that the name can never work.
pub fn detach(cluster: &ClusterState, name: &str) -> Result<Change<Volume>, RequestError> {
    let volume = find(cluster, name)?;
    Ok(with_spec(volume, VolumeSpec { node_id: None, ..volume.spec.clone() }))
}

/// Returns the volume wanted nowhere. Its engine is stopped although its device is in use, unless it serves.
///
/// # Errors
/// [`RequestError::NoVolume`], or that the name can never work.
pub fn detach_by_force(cluster: &ClusterState, name: &str) -> Result<Change<Volume>, RequestError> {
    let volume = find(cluster, name)?;
    let forced_detach = volume.status.attach;
    Ok(with_spec(volume, VolumeSpec { node_id: None, forced_detach, ..volume.spec.clone() }))
}

/// Returns the volume that is to be deleted, with all its data, unless Kubernetes needs it.
///
/// # Errors
/// [`RequestError`] has the obstacle.
pub fn delete(cluster: &ClusterState, name: &str, now: Timestamp) -> Result<Change<Volume>, RequestError> {
    let volume = find(cluster, name)?;
    match &volume.status.persistent_volume {
        Some(persistent_volume) if !volume.is_deleting() => Err(RequestError::IsPersistentVolume {
            name: name.to_owned(),
            persistent_volume: persistent_volume.clone(),
        }),
        _ => ask_for_deletion(cluster, name, now),
    }
}

/// Does the same for a caller that handles the PersistentVolume. The data stays until that is released, as
/// far as is known here.
///
/// # Errors
/// [`RequestError::NoVolume`], or that the name can never work.
pub fn ask_for_deletion(
    cluster: &ClusterState,
    name: &str,
    now: Timestamp,
) -> Result<Change<Volume>, RequestError> {
    let volume = find(cluster, name)?;
    if volume.metadata.is_deleting() {
        return Ok(Change::AlreadySo(volume.clone()));
    }
    let mut volume = volume.clone();
    // Nothing else is changed, because a store may need separate calls for a deletion and for other changes.
    volume.metadata.deletion_timestamp = Some(now);
    Ok(Change::Store(volume))
}

/// Returns the volume with another number of replicas. They are made and deleted while it is attached.
///
/// # Errors
/// [`RequestError`] has the obstacle.
pub fn set_replicas(cluster: &ClusterState, name: &str, wanted: u32) -> Result<Change<Volume>, RequestError> {
    SetVolume { name: name.to_owned(), number_of_replicas: Some(wanted), ..SetVolume::default() }
        .apply(cluster)
}

/// The changes of a volume by its owner; none leaves a field unchanged.
#[derive(Clone, Debug, Default)]
pub struct SetVolume {
    /// Name of the Volume object.
    pub name: String,
    /// The wanted number of replicas. Surplus ones are removed one at a time while the volume is attached.
    pub number_of_replicas: Option<u32>,
    /// All tags that a node must have to get a replica from now on. Existing replicas stay.
    pub node_selector: Option<Vec<String>>,
    /// The same for disks.
    pub disk_selector: Option<Vec<String>>,
    /// The rule for a replica on the node of the engine.
    pub data_locality: Option<DataLocality>,
    /// True if several replicas may be on one node.
    pub replica_soft_anti_affinity: Option<bool>,
    /// True if several replicas may be in one zone.
    pub replica_zone_soft_anti_affinity: Option<bool>,
    /// True if several replicas that are on one node may be on one disk.
    pub replica_disk_soft_anti_affinity: Option<bool>,
}

impl SetVolume {
    /// Returns the volume to store.
    ///
    /// # Errors
    /// [`RequestError`] has the remedy.
    pub fn apply(&self, cluster: &ClusterState) -> Result<Change<Volume>, RequestError> {
        let volume = find_living(cluster, &self.name)?;
        let mut spec = volume.spec.clone();
        if let Some(wanted) = self.number_of_replicas {
            if wanted == 0 || wanted as usize > MAX_MEMBERS {
                return Err(RequestError::Replicas(wanted));
            }
            spec.number_of_replicas = wanted;
        }
        if let Some(tags) = &self.node_selector {
            spec.node_selector = labels(tags)?;
        }
        if let Some(tags) = &self.disk_selector {
            spec.disk_selector = labels(tags)?;
        }
        spec.data_locality = self.data_locality.unwrap_or(spec.data_locality);
        for (wanted, field) in [
            (self.replica_soft_anti_affinity, &mut spec.replica_soft_anti_affinity),
            (self.replica_zone_soft_anti_affinity, &mut spec.replica_zone_soft_anti_affinity),
            (self.replica_disk_soft_anti_affinity, &mut spec.replica_disk_soft_anti_affinity),
        ] {
            *field = wanted.unwrap_or(*field);
        }
        Ok(with_spec(volume, spec))
    }
}

/// Returns the replica that has to leave its volume once another one has replaced it.
///
/// # Errors
/// [`RequestError`] has the obstacle.
pub fn evict(cluster: &ClusterState, replica: &str, now: Timestamp) -> Result<Change<Replica>, RequestError> {
    let stored = cluster.replicas.get(replica);
    let missing = || absent(cluster, Kind::Replica, replica, RequestError::NoSuchReplica(replica.to_owned()));
    let stored = stored.ok_or_else(missing)?;
    if stored.metadata.is_deleting() {
        return Ok(Change::AlreadySo(stored.clone()));
    }
    let volume = find_living(cluster, stored.spec.volume_name.as_str())?;
    let state = volume.status.state;
    if !matches!(state, VolumeState::Attached | VolumeState::Attaching) {
        let (name, replica) = (volume.metadata.name.clone(), replica.to_owned());
        return Err(RequestError::NotServed { name, replica, state: state.as_str() });
    }
    let mut replica = stored.clone();
    replica.metadata.deletion_timestamp = Some(now);
    Ok(Change::Store(replica))
}

/// Returns the volume with more bytes, attached or not, if the disks of its replicas have room for them.
/// `status.current_size` shows when it has them.
///
/// # Errors
/// [`RequestError`] has the obstacle.
pub fn expand(cluster: &ClusterState, name: &str, size_bytes: u64) -> Result<Change<Volume>, RequestError> {
    expand_within(cluster, name, size_bytes, SchedulingLimits::default())
}

/// Returns the same, if the disks have room within `limits`.
///
/// # Errors
/// [`RequestError`] has the obstacle.
pub fn expand_within(
    cluster: &ClusterState,
    name: &str,
    size_bytes: u64,
    limits: SchedulingLimits,
) -> Result<Change<Volume>, RequestError> {
    let volume = find_living(cluster, name)?;
    check_size(size_bytes)?;
    let has = volume.spec.size;
    if size_bytes < has {
        return Err(RequestError::Shrinks { name: name.to_owned(), has, wanted: size_bytes });
    }
    if size_bytes == has {
        return Ok(Change::AlreadySo(volume.clone()));
    }
    scheduler::room_to_grow(cluster, volume, size_bytes, limits).map_err(|refusal| RequestError::NoRoom {
        name: name.to_owned(),
        wanted: size_bytes,
        refusal: Box::new(refusal),
    })?;
    let mut volume = volume.clone();
    volume.status.current_size = Some(volume.current_size_bytes());
    volume.spec.size = size_bytes;
    Ok(Change::Store(volume))
}

/// Returns the volume with other limits for copies.
///
/// # Errors
/// [`RequestError`] has the obstacle.
pub fn set_rebuild(
    cluster: &ClusterState,
    name: &str,
    limits: RebuildLimits,
) -> Result<Change<Volume>, RequestError> {
    let volume = find_living(cluster, name)?;
    check_share(limits)?;
    Ok(with_spec(volume, VolumeSpec { rebuild: limits, ..volume.spec.clone() }))
}

/// Returns the node of the engine of an attached volume, and the number of its attachment.
///
/// # Errors
/// [`RequestError::NotAttached`].
pub fn engine_location(cluster: &ClusterState, name: &str) -> Result<(NodeName, u64), RequestError> {
    let volume = find(cluster, name)?;
    let engine = cluster.engines.get(name).filter(|_| volume.status.state == VolumeState::Attached);
    let node = engine.and_then(|engine| engine.spec.node_id.clone());
    node.zip(volume.status.attach).ok_or_else(|| RequestError::NotAttached(name.to_owned()))
}
