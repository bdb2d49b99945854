//! What an API call changes in the stored objects, or why it is refused.

use shorthorn_types::limits::{BLOCK_BYTES, MAX_MEMBERS};
use shorthorn_types::{NameError, VolumeName};
use thiserror::Error;

use crate::objects::{
    DiskSpec, DiskStatus, Frontend, FrontendError, Metadata, Node, Secret, Volume, VolumeSpec, VolumeState,
    VolumeStatus,
};
use crate::observed::DiskView;
use crate::{NodeName, NodeNameError, Timestamp, World};

/// How many replicas a volume gets where nothing is said.
pub const DEFAULT_REPLICAS: u32 = 3;
/// The largest volume: what Longhorn's directories and ext4 files hold with room to spare.
pub const MAX_VOLUME_BYTES: u64 = 1 << 44;

/// Why a call is refused.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum RequestError {
    /// The volume's name can never work.
    #[error(transparent)]
    VolumeName(#[from] NameError),
    /// The node's name can never work.
    #[error(transparent)]
    NodeName(#[from] NodeNameError),
    /// There is no such frontend.
    #[error(transparent)]
    Frontend(#[from] FrontendError),
    /// The size can never work.
    #[error(
        "a volume of {0} bytes cannot be made: the size must be a multiple of {BLOCK_BYTES}, \
         from {BLOCK_BYTES} to {MAX_VOLUME_BYTES}"
    )]
    Size(u64),
    /// The number of replicas can never work.
    #[error("a volume cannot have {0} replicas: use 1 to {MAX_MEMBERS}")]
    Replicas(u32),
    /// There is no such volume.
    #[error("there is no volume {0}; shorthornctl volume list shows those that are there")]
    NoVolume(String),
    /// There is no such node.
    #[error("there is no node {0}; shorthornctl node list shows those that are there")]
    NoNode(String),
    /// The name is taken by a volume that is something else.
    #[error("volume {name} is there already, with another {differs}; choose another name")]
    Exists {
        /// The name.
        name: String,
        /// What is different.
        differs: &'static str,
    },
    /// The volume is wanted somewhere else.
    #[error("volume {name} is attached to node {node}; detach it there first")]
    AttachedElsewhere {
        /// The volume.
        name: String,
        /// Where it is.
        node: NodeName,
    },
    /// The path of a disk can never work.
    #[error("{0:?} is no absolute path of a directory on the node")]
    DiskPath(String),
    /// The volume is being deleted.
    #[error("volume {0} is being deleted; wait until it is gone")]
    Deleting(String),
}

/// The arguments of a call that makes a volume.
#[derive(Clone, Debug, Default)]
pub struct CreateVolume {
    /// Its name.
    pub name: String,
    /// In bytes.
    pub size_bytes: u64,
    /// 0 takes the default.
    pub number_of_replicas: u32,
    /// Empty takes auto.
    pub frontend: String,
    /// Whether several replicas may be on one node.
    pub replica_soft_anti_affinity: bool,
}

/// What a call comes to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change<T> {
    /// It is so already.
    AlreadySo(T),
    /// This is to be stored.
    Store(T),
}

impl CreateVolume {
    /// The volume to be stored; the same call repeated finds it there.
    ///
    /// # Errors
    /// [`RequestError`] says what to change.
    pub fn apply(
        self,
        world: &World,
        secret: Secret,
        now: Timestamp,
    ) -> Result<Change<Volume>, RequestError> {
        let volume_name = VolumeName::new(&self.name)?;
        let frontend: Frontend =
            if self.frontend.is_empty() { Frontend::Auto } else { self.frontend.parse()? };
        let number_of_replicas =
            if self.number_of_replicas == 0 { DEFAULT_REPLICAS } else { self.number_of_replicas };
        if number_of_replicas as usize > MAX_MEMBERS {
            return Err(RequestError::Replicas(number_of_replicas));
        }
        let size = self.size_bytes;
        if size == 0 || !size.is_multiple_of(BLOCK_BYTES) || size > MAX_VOLUME_BYTES {
            return Err(RequestError::Size(size));
        }
        let spec = VolumeSpec {
            volume_name,
            size,
            number_of_replicas,
            frontend,
            node_id: None,
            replica_soft_anti_affinity: self.replica_soft_anti_affinity,
            secret,
        };
        match world.volumes.get(&self.name) {
            Some(volume) => same_as(volume, &spec).map(|()| Change::AlreadySo(volume.clone())),
            None => Ok(Change::Store(Volume {
                metadata: Metadata::new(self.name, now),
                spec,
                status: VolumeStatus::default(),
            })),
        }
    }
}

fn same_as(volume: &Volume, wanted: &VolumeSpec) -> Result<(), RequestError> {
    let spec = &volume.spec;
    let name = volume.metadata.name.clone();
    if volume.metadata.is_deleting() {
        return Err(RequestError::Deleting(name));
    }
    let differs = if spec.size != wanted.size {
        "size"
    } else if spec.number_of_replicas != wanted.number_of_replicas {
        "number of replicas"
    } else if spec.frontend != wanted.frontend {
        "frontend"
    } else if spec.replica_soft_anti_affinity != wanted.replica_soft_anti_affinity {
        "anti-affinity"
    } else {
        return Ok(());
    };
    Err(RequestError::Exists { name, differs })
}

/// The volume of that name.
///
/// # Errors
/// [`RequestError::NoVolume`], or that the name can never work.
pub fn find<'a>(world: &'a World, name: &str) -> Result<&'a Volume, RequestError> {
    VolumeName::new(name)?;
    world.volumes.get(name).ok_or_else(|| RequestError::NoVolume(name.to_owned()))
}

/// The volume wanted on `node`.
///
/// # Errors
/// [`RequestError`] says what is in the way.
pub fn attach(world: &World, name: &str, node: &str) -> Result<Change<Volume>, RequestError> {
    let node = NodeName::new(node)?;
    let volume = find(world, name)?;
    if volume.metadata.is_deleting() {
        return Err(RequestError::Deleting(name.to_owned()));
    }
    if !world.nodes.contains_key(node.as_str()) {
        return Err(RequestError::NoNode(node.to_string()));
    }
    match &volume.spec.node_id {
        Some(wanted) if *wanted == node => Ok(Change::AlreadySo(volume.clone())),
        Some(wanted) => Err(RequestError::AttachedElsewhere { name: name.to_owned(), node: wanted.clone() }),
        None => {
            let spec = VolumeSpec { node_id: Some(node), ..volume.spec.clone() };
            Ok(Change::Store(Volume { spec, ..volume.clone() }))
        }
    }
}

/// The volume wanted nowhere.
///
/// # Errors
/// [`RequestError::NoVolume`], or that the name can never work.
pub fn detach(world: &World, name: &str) -> Result<Change<Volume>, RequestError> {
    let volume = find(world, name)?;
    if volume.spec.node_id.is_none() {
        return Ok(Change::AlreadySo(volume.clone()));
    }
    let spec = VolumeSpec { node_id: None, ..volume.spec.clone() };
    Ok(Change::Store(Volume { spec, ..volume.clone() }))
}

/// The volume to be deleted, with all its data.
///
/// # Errors
/// [`RequestError::NoVolume`], or that the name can never work.
pub fn delete(world: &World, name: &str, now: Timestamp) -> Result<Change<Volume>, RequestError> {
    let volume = find(world, name)?;
    if volume.metadata.is_deleting() {
        return Ok(Change::AlreadySo(volume.clone()));
    }
    let mut volume = volume.clone();
    volume.metadata.deletion_timestamp = Some(now);
    volume.spec.node_id = None;
    volume.status.state = VolumeState::Deleting;
    Ok(Change::Store(volume))
}

/// The node that is to get a disk at `path`.
///
/// # Errors
/// [`RequestError`] says what can never work.
pub fn check_disk(world: &World, node: &str, path: &str) -> Result<NodeName, RequestError> {
    let name = NodeName::new(node)?;
    if !world.nodes.contains_key(node) {
        return Err(RequestError::NoNode(node.to_owned()));
    }
    let plain = path.split('/').skip(1).all(|part| !part.is_empty() && part != "." && part != "..");
    if !path.starts_with('/') || !plain || path.contains('\0') {
        return Err(RequestError::DiskPath(path.chars().take(200).collect()));
    }
    Ok(name)
}

/// The node with the disk that its agent has prepared.
///
/// # Errors
/// [`RequestError::NoNode`].
pub fn add_disk(
    world: &World,
    node: &NodeName,
    path: &str,
    disk: &DiskView,
) -> Result<Change<Node>, RequestError> {
    let stored = world.nodes.get(node.as_str());
    let mut node = stored.ok_or_else(|| RequestError::NoNode(node.to_string()))?.clone();
    if node.spec.disks.contains_key(path) {
        return Ok(Change::AlreadySo(node));
    }
    node.spec.disks.insert(path.to_owned(), DiskSpec::of_new(disk.total_bytes));
    node.status.disk_status.insert(path.to_owned(), DiskStatus::of(disk));
    Ok(Change::Store(node))
}

#[cfg(test)]
mod tests;
