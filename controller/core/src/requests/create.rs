//! Creation of volumes.

use shorthorn_types::VolumeName;
use shorthorn_types::limits::{BLOCK_BYTES, MAX_MEMBERS, MAX_VOLUME_BYTES};

use super::{Change, RequestError};
use crate::objects::{
    DEFAULT_REPLICAS, DataLocality, Frontend, Metadata, RebuildLimits, Secret, Volume, VolumeSpec,
    VolumeStatus,
};
use crate::{ClusterState, NodeName, Timestamp, labels};

/// The arguments of a call that makes a volume.
#[derive(Clone, Debug, Default)]
pub struct CreateVolume {
    /// Name for the Volume object.
    pub name: String,
    /// The size: a multiple of [`BLOCK_BYTES`], at most [`MAX_VOLUME_BYTES`].
    pub size_bytes: u64,
    /// None: [`DEFAULT_REPLICAS`].
    pub number_of_replicas: Option<u32>,
    /// The choice of the frontend.
    pub frontend: Frontend,
    /// True if several replicas may be on one node.
    pub replica_soft_anti_affinity: bool,
    /// True if all replicas must be in zones of their own; else they are if possible.
    pub replica_zone_hard_anti_affinity: bool,
    /// True if all replicas must be on disks of their own; else they are if possible.
    pub replica_disk_hard_anti_affinity: bool,
    /// The tags that a node must have.
    pub node_selector: Vec<String>,
    /// The tags that a disk must have.
    pub disk_selector: Vec<String>,
    /// The rule for a replica on the node of the engine.
    pub data_locality: DataLocality,
    /// True if replicas compare every read with the sums of its blocks.
    pub verify_reads: bool,
    /// True if connections between nodes are encrypted.
    pub encrypt_in_transit: bool,
    /// The name that a CSI caller gave it; none for other callers.
    pub csi_name: Option<String>,
    /// The node on which the first attachment is expected.
    pub preferred_node: Option<NodeName>,
}

impl CreateVolume {
    /// Returns the volume to store; a repeated call finds it there.
    ///
    /// # Errors
    /// [`RequestError`] has the remedy.
    pub fn apply(
        self,
        cluster: &ClusterState,
        secret: Secret,
        now: Timestamp,
    ) -> Result<Change<Volume>, RequestError> {
        let new = self.sketch(secret, now)?;
        if !cluster.volumes.contains_key(&new.metadata.name) {
            super::check_all_known(cluster, &new.metadata.name)?;
        }
        match cluster.volumes.get(&new.metadata.name) {
            Some(volume) => same_as(volume, &new.spec).map(|()| Change::AlreadySo(volume.clone())),
            // They belong to an interrupted undeletion: a new volume would begin with their data.
            None if cluster.replicas_of(&new.spec.volume_name).next().is_some() => {
                Err(RequestError::HasReplicas(new.metadata.name))
            }
            None => Ok(Change::Store(new)),
        }
    }

    /// Returns the volume as it would be made, regardless of existing ones.
    ///
    /// # Errors
    /// [`RequestError`] has the remedy.
    pub fn sketch(self, secret: Secret, now: Timestamp) -> Result<Volume, RequestError> {
        let metadata = Metadata::new(self.name.clone(), now);
        Ok(Volume { metadata, spec: self.into_spec(secret)?, status: VolumeStatus::default() })
    }

    fn into_spec(self, secret: Secret) -> Result<VolumeSpec, RequestError> {
        let volume_name = VolumeName::new(&self.name)?;
        let number_of_replicas = self.number_of_replicas.unwrap_or(DEFAULT_REPLICAS);
        if number_of_replicas as usize > MAX_MEMBERS {
            return Err(RequestError::Replicas(number_of_replicas));
        }
        check_size(self.size_bytes)?;
        Ok(VolumeSpec {
            volume_name,
            size: self.size_bytes,
            number_of_replicas,
            frontend: self.frontend.chosen()?,
            node_id: None,
            forced_detach: None,
            replica_soft_anti_affinity: self.replica_soft_anti_affinity,
            replica_zone_soft_anti_affinity: !self.replica_zone_hard_anti_affinity,
            replica_disk_soft_anti_affinity: !self.replica_disk_hard_anti_affinity,
            node_selector: labels(&self.node_selector)?,
            disk_selector: labels(&self.disk_selector)?,
            data_locality: self.data_locality,
            verify_reads: self.verify_reads,
            encrypt_in_transit: self.encrypt_in_transit,
            rebuild: RebuildLimits::default(),
            csi_name: self.csi_name,
            preferred_node_id: self.preferred_node,
            secret,
        })
    }
}

pub(super) fn check_size(size_bytes: u64) -> Result<(), RequestError> {
    if size_bytes == 0 || !size_bytes.is_multiple_of(BLOCK_BYTES) || size_bytes > MAX_VOLUME_BYTES {
        return Err(RequestError::Size(size_bytes));
    }
    Ok(())
}

/// Returns an error unless a volume that another client has written is valid.
///
/// # Errors
/// [`RequestError`] has the remedy.
pub fn check_stored(volume: &Volume) -> Result<(), RequestError> {
    let Volume { metadata, spec, .. } = volume;
    if *metadata.name != *spec.volume_name.as_str() {
        return Err(RequestError::OtherName {
            name: metadata.name.clone(),
            other: spec.volume_name.to_string(),
        });
    }
    check_size(spec.size)?;
    if spec.number_of_replicas == 0 || spec.number_of_replicas as usize > MAX_MEMBERS {
        return Err(RequestError::Replicas(spec.number_of_replicas));
    }
    check_share(spec.rebuild)
}

pub(super) fn check_share(limits: RebuildLimits) -> Result<(), RequestError> {
    if (1..=100).contains(&limits.share_percent) {
        Ok(())
    } else {
        Err(RequestError::Share(limits.share_percent))
    }
}

fn same_as(volume: &Volume, wanted: &VolumeSpec) -> Result<(), RequestError> {
    let spec = &volume.spec;
    let name = volume.metadata.name.clone();
    if volume.is_deleting() {
        return Err(RequestError::Deleting(name));
    }
    let differs = if !is_of_name(spec, wanted) {
        "name in CSI"
    } else if spec.size != wanted.size {
        "size"
    } else if spec.number_of_replicas != wanted.number_of_replicas {
        "number of replicas"
    } else if spec.frontend != wanted.frontend {
        "frontend"
    } else if spec.replica_soft_anti_affinity != wanted.replica_soft_anti_affinity {
        "anti-affinity"
    } else if spec.replica_zone_soft_anti_affinity != wanted.replica_zone_soft_anti_affinity {
        "anti-affinity of zones"
    } else if spec.replica_disk_soft_anti_affinity != wanted.replica_disk_soft_anti_affinity {
        "anti-affinity of disks"
    } else if spec.node_selector != wanted.node_selector {
        "node selector"
    } else if spec.disk_selector != wanted.disk_selector {
        "disk selector"
    } else if spec.data_locality != wanted.data_locality {
        "data locality"
    } else if spec.verify_reads != wanted.verify_reads {
        "verification of reads"
    } else if spec.encrypt_in_transit != wanted.encrypt_in_transit {
        "encryption in transit"
    } else {
        return Ok(());
    };
    Err(RequestError::Exists { name, differs })
}

/// Returns true if the volume is the one that a CSI caller means, who may know it by another name. Other
/// callers use its own name.
fn is_of_name(spec: &VolumeSpec, wanted: &VolumeSpec) -> bool {
    let has = spec.csi_name.as_deref().unwrap_or(spec.volume_name.as_str());
    wanted.csi_name.as_deref().is_none_or(|wanted| wanted == has)
}
