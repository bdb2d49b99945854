//! What an API call changes in the stored objects, or why it is refused.

pub use shorthorn_types::limits::MAX_VOLUME_BYTES;
use shorthorn_types::limits::{BLOCK_BYTES, MAX_MEMBERS};
use shorthorn_types::{NameError, VolumeName};
use thiserror::Error;

use crate::objects::{
    DataLocality, DataLocalityError, DataState, DiskSpec, DiskStatus, Frontend, FrontendError, Metadata,
    Node, NodeSpec, RebuildLimits, Salvage, Secret, Volume, VolumeSpec, VolumeState, VolumeStatus,
};
use crate::observed::DiskView;
use crate::scheduler::{self, Limits, Refusal};
use crate::{LabelError, NodeName, NodeNameError, Timestamp, World, labels, salvage};

/// How many replicas a volume gets where nothing is said.
pub const DEFAULT_REPLICAS: u32 = 3;

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
    /// A tag or zone can never work.
    #[error(transparent)]
    Label(#[from] LabelError),
    /// There is no such data locality.
    #[error(transparent)]
    DataLocality(#[from] DataLocalityError),
    /// The size can never work.
    #[error(
        "a volume cannot have {0} bytes: the size must be a multiple of {BLOCK_BYTES}, \
         from {BLOCK_BYTES} to {MAX_VOLUME_BYTES}"
    )]
    Size(u64),
    /// The number of replicas can never work.
    #[error("a volume cannot have {0} replicas: use 1 to {MAX_MEMBERS}")]
    Replicas(u32),
    /// The object and its spec have different names.
    #[error("volume {name} has the volumeName {other}: leave that out")]
    OtherName {
        /// Of the object.
        name: String,
        /// In its spec.
        other: String,
    },
    /// There is no such volume.
    #[error("there is no volume {0}; shorthornctl volume list shows those that are there")]
    NoVolume(String),
    /// There is no such node.
    #[error("there is no node {0}; shorthornctl node list shows those that are there")]
    NoNode(String),
    /// The node has no such disk.
    #[error("node {node} has no disk {path}; shorthornctl node list shows those that are there")]
    NoDisk {
        /// The node.
        node: String,
        /// What was asked for.
        path: String,
    },
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
    /// Members cannot be taken out of a view on demand.
    #[error("volume {name} has {has} replicas, and {wanted} are fewer: only more can be asked for")]
    FewerReplicas {
        /// The volume.
        name: String,
        /// How many it should have now.
        has: u32,
        /// How many were asked for.
        wanted: u32,
    },
    /// Volumes never shrink.
    #[error("volume {name} has {has} bytes, and {wanted} are fewer: a volume only grows")]
    Shrinks {
        /// The volume.
        name: String,
        /// The size that it should have now.
        has: u64,
        /// What was asked for.
        wanted: u64,
    },
    /// The disks of its replicas have no room for more.
    #[error("volume {name} cannot have {wanted} bytes: {refusal}")]
    NoRoom {
        /// The volume.
        name: String,
        /// What was asked for.
        wanted: u64,
        /// Which disks, and why.
        refusal: Box<Refusal>,
    },
    /// The share of copying can never work.
    #[error("a share of {0} percent: use 1 to 100")]
    Share(u32),
    /// The volume has no such replica.
    #[error(
        "volume {name} has no replica {replica}; shorthornctl volume salvage {name} shows those that it has"
    )]
    NoReplica {
        /// The volume.
        name: String,
        /// What was asked for.
        replica: String,
    },
    /// The replica was never seen with data.
    #[error("replica {0} holds nothing: salvage with another one")]
    HoldsNothing(String),
    /// Whoever asks has not confirmed it.
    #[error("salvaging volume {0} loses acknowledged writes: confirm it with the name of the volume")]
    NotConfirmed(String),
    /// The volume can be used as it is.
    #[error("volume {0} is served: there is nothing to salvage")]
    IsServed(String),
    /// An engine may still serve it.
    #[error("volume {0} is attached: detach it first, so that nothing is written while it is salvaged")]
    IsAttached(String),
    /// No engine has ever opened it.
    #[error("volume {0} was never attached: there is nothing in it to salvage")]
    NeverAttached(String),
    /// The node is there: it can be drained.
    #[error(
        "node {0} answers: shorthornctl node drain {0} has everything leave it; only a node that never comes back is deleted"
    )]
    NodeAnswers(String),
    /// New replicas could still go there.
    #[error("node {0} is not cordoned: shorthornctl node cordon {0}, so that nothing new goes there")]
    NodeNotCordoned(String),
    /// Engines may still run there.
    #[error(
        "volumes are attached to node {node}: {volumes}; detach each first (shorthornctl volume detach NAME), which fences its engine"
    )]
    NodeHasEngines {
        /// The node.
        node: String,
        /// Which volumes.
        volumes: String,
    },
    /// Data would be lost.
    #[error(
        "node {node} has the last replica that has everything of {volumes}; with --force these volumes are lost"
    )]
    NodeHasLast {
        /// The node.
        node: String,
        /// Of which volumes.
        volumes: String,
    },
    /// Whoever asks has not confirmed it.
    #[error("deleting node {0} gives up the replicas on it: confirm it with the name of the node")]
    NodeNotConfirmed(String),
    /// The node has as many volumes as it takes.
    #[error(
        "node {node} has {max_volumes} volumes attached, which is the most that its agent allows (max_volumes)"
    )]
    NodeFull {
        /// The node.
        node: String,
        /// How many it takes.
        max_volumes: u32,
    },
    /// Its frontend makes no device.
    #[error("volume {0} has the frontend socket, which makes no device that a node could use")]
    NoDevice(String),
    /// The volume is not attached.
    #[error("volume {0} is not attached; shorthornctl volume attach {0} --node NODE")]
    NotAttached(String),
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
    /// Whether all replicas are in zones of their own; else they are where that can be.
    pub replica_zone_hard_anti_affinity: bool,
    /// Whether all replicas are on disks of their own; else they are where that can be.
    pub replica_disk_hard_anti_affinity: bool,
    /// The tags that a node must have.
    pub node_selector: Vec<String>,
    /// The tags that a disk must have.
    pub disk_selector: Vec<String>,
    /// Empty takes disabled.
    pub data_locality: String,
    /// The name that a CSI caller gave it; none: it is made for somebody else.
    pub csi_name: Option<String>,
    /// Where it is expected to be attached first.
    pub preferred_node: Option<NodeName>,
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
        let new = self.sketch(secret, now)?;
        match world.volumes.get(&new.metadata.name) {
            Some(volume) => same_as(volume, &new.spec).map(|()| Change::AlreadySo(volume.clone())),
            None => Ok(Change::Store(new)),
        }
    }

    /// The volume as it would be, whatever is there.
    ///
    /// # Errors
    /// [`RequestError`] says what to change.
    pub fn sketch(self, secret: Secret, now: Timestamp) -> Result<Volume, RequestError> {
        let metadata = Metadata::new(self.name.clone(), now);
        Ok(Volume { metadata, spec: self.into_spec(secret)?, status: VolumeStatus::default() })
    }

    fn into_spec(self, secret: Secret) -> Result<VolumeSpec, RequestError> {
        let volume_name = VolumeName::new(&self.name)?;
        let frontend: Frontend =
            if self.frontend.is_empty() { Frontend::Auto } else { self.frontend.parse()? };
        let data_locality: DataLocality = if self.data_locality.is_empty() {
            DataLocality::Disabled
        } else {
            self.data_locality.parse()?
        };
        let number_of_replicas =
            if self.number_of_replicas == 0 { DEFAULT_REPLICAS } else { self.number_of_replicas };
        if number_of_replicas as usize > MAX_MEMBERS {
            return Err(RequestError::Replicas(number_of_replicas));
        }
        check_size(self.size_bytes)?;
        Ok(VolumeSpec {
            volume_name,
            size: self.size_bytes,
            number_of_replicas,
            frontend,
            node_id: None,
            replica_soft_anti_affinity: self.replica_soft_anti_affinity,
            replica_zone_soft_anti_affinity: !self.replica_zone_hard_anti_affinity,
            replica_disk_soft_anti_affinity: !self.replica_disk_hard_anti_affinity,
            node_selector: labels(&self.node_selector)?,
            disk_selector: labels(&self.disk_selector)?,
            data_locality,
            rebuild: RebuildLimits::default(),
            csi_name: self.csi_name,
            preferred_node_id: self.preferred_node,
            secret,
        })
    }
}

fn check_size(size_bytes: u64) -> Result<(), RequestError> {
    if size_bytes == 0 || !size_bytes.is_multiple_of(BLOCK_BYTES) || size_bytes > MAX_VOLUME_BYTES {
        return Err(RequestError::Size(size_bytes));
    }
    Ok(())
}

/// Whether a volume that others have written can be worked on.
///
/// # Errors
/// [`RequestError`] says what to change.
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

fn check_share(limits: RebuildLimits) -> Result<(), RequestError> {
    if (1..=100).contains(&limits.share_percent) {
        Ok(())
    } else {
        Err(RequestError::Share(limits.share_percent))
    }
}

fn same_as(volume: &Volume, wanted: &VolumeSpec) -> Result<(), RequestError> {
    let spec = &volume.spec;
    let name = volume.metadata.name.clone();
    if volume.metadata.is_deleting() {
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
    } else {
        return Ok(());
    };
    Err(RequestError::Exists { name, differs })
}

/// Whether a volume is the one that a CSI caller means, who may know it by another name. Others know it by its own.
fn is_of_name(spec: &VolumeSpec, wanted: &VolumeSpec) -> bool {
    let has = spec.csi_name.as_deref().unwrap_or(spec.volume_name.as_str());
    wanted.csi_name.as_deref().is_none_or(|wanted| wanted == has)
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
    // Nothing else: a store may take a deletion and other changes by calls of their own.
    volume.metadata.deletion_timestamp = Some(now);
    Ok(Change::Store(volume))
}

/// The volume with more replicas. They are made while it is attached.
///
/// # Errors
/// [`RequestError`] says what is in the way.
pub fn set_replicas(world: &World, name: &str, wanted: u32) -> Result<Change<Volume>, RequestError> {
    let volume = find_living(world, name)?;
    let has = volume.spec.number_of_replicas;
    if wanted == 0 || wanted as usize > MAX_MEMBERS {
        return Err(RequestError::Replicas(wanted));
    }
    if wanted < has {
        return Err(RequestError::FewerReplicas { name: name.to_owned(), has, wanted });
    }
    let spec = VolumeSpec { number_of_replicas: wanted, ..volume.spec.clone() };
    Ok(with_spec(volume, spec))
}

/// The volume with more bytes, attached or not, where the disks of its replicas are not to promise more than they
/// have. `status.current_size` tells when it has them.
///
/// # Errors
/// [`RequestError`] says what is in the way.
pub fn expand(world: &World, name: &str, size_bytes: u64) -> Result<Change<Volume>, RequestError> {
    expand_within(world, name, size_bytes, Limits::default())
}

/// The same, where disks may promise as much as `limits` say.
///
/// # Errors
/// [`RequestError`] says what is in the way.
pub fn expand_within(
    world: &World,
    name: &str,
    size_bytes: u64,
    limits: Limits,
) -> Result<Change<Volume>, RequestError> {
    let volume = find_living(world, name)?;
    check_size(size_bytes)?;
    let has = volume.spec.size;
    if size_bytes < has {
        return Err(RequestError::Shrinks { name: name.to_owned(), has, wanted: size_bytes });
    }
    if size_bytes == has {
        return Ok(Change::AlreadySo(volume.clone()));
    }
    scheduler::room_to_grow(world, volume, size_bytes, limits).map_err(|refusal| RequestError::NoRoom {
        name: name.to_owned(),
        wanted: size_bytes,
        refusal: Box::new(refusal),
    })?;
    let mut volume = volume.clone();
    volume.status.current_size = volume.current_size_bytes();
    volume.spec.size = size_bytes;
    Ok(Change::Store(volume))
}

/// The volume with other limits for copying.
///
/// # Errors
/// [`RequestError`] says what is in the way.
pub fn set_rebuild(world: &World, name: &str, limits: RebuildLimits) -> Result<Change<Volume>, RequestError> {
    let volume = find_living(world, name)?;
    check_share(limits)?;
    Ok(with_spec(volume, VolumeSpec { rebuild: limits, ..volume.spec.clone() }))
}

fn find_living<'a>(world: &'a World, name: &str) -> Result<&'a Volume, RequestError> {
    let volume = find(world, name)?;
    if volume.metadata.is_deleting() { Err(RequestError::Deleting(name.to_owned())) } else { Ok(volume) }
}

fn with_spec(volume: &Volume, spec: VolumeSpec) -> Change<Volume> {
    if spec == volume.spec {
        return Change::AlreadySo(volume.clone());
    }
    Change::Store(Volume { spec, ..volume.clone() })
}

/// The operator's decision about one replica, with what was known of the losses when it was made.
#[derive(Clone, Debug)]
pub struct SalvageVolume {
    /// The volume.
    pub name: String,
    /// The replica that becomes the volume.
    pub replica: String,
    /// The name once more.
    pub confirm: String,
    /// Who decides.
    pub by: String,
    /// Why.
    pub reason: String,
    /// What is known to be lost by it.
    pub losses: String,
}

impl SalvageVolume {
    /// The volume with a new number of attachment, and a grant of the arbiter for that replica alone: an engine that
    /// does not find it cannot start from any other. Nothing is started before the replica was told.
    ///
    /// # Errors
    /// [`RequestError`] says what is in the way.
    pub fn apply(&self, world: &World, now: Timestamp) -> Result<Change<Volume>, RequestError> {
        let name = || self.name.clone();
        let volume = find_living(world, &self.name)?;
        if self.confirm != self.name {
            return Err(RequestError::NotConfirmed(name()));
        }
        let replica = world
            .replicas_of(&volume.spec.volume_name)
            .find(|replica| {
                replica.spec.replica_id.to_string() == self.replica && !replica.metadata.is_deleting()
            })
            .ok_or_else(|| RequestError::NoReplica { name: name(), replica: self.replica.clone() })?;
        if replica.status.data != DataState::Present {
            return Err(RequestError::HoldsNothing(replica.metadata.name.clone()));
        }
        let replica_id = replica.spec.replica_id;
        let status = &volume.status;
        if status.pending_salvage().is_some_and(|salvage| salvage.replica_id == replica_id) {
            return Ok(Change::AlreadySo(volume.clone()));
        }
        check_salvageable(world, volume)?;
        let attach = status.attach + 1;
        let mut volume = volume.clone();
        volume.status.attach = attach;
        volume.status.attach_started_at = Some(now);
        volume.status.attached_since = attach;
        volume.status.arbiter = salvage::arbiter(attach, replica_id);
        volume.status.salvage = Some(Salvage {
            replica_id,
            attach,
            decided_at: now,
            by: self.by.clone(),
            reason: self.reason.clone(),
            losses: self.losses.clone(),
            done: false,
        });
        Ok(Change::Store(volume))
    }
}

/// Whether a decision about the data of a volume may be made now: no engine serves it.
///
/// # Errors
/// [`RequestError`] says what is in the way.
pub fn check_salvageable(world: &World, volume: &Volume) -> Result<(), RequestError> {
    let name = volume.metadata.name.clone();
    let serving = world.engines.get(&name).is_some_and(|engine| engine.status.is_serving());
    match volume.status.state {
        VolumeState::Creating => Err(RequestError::NeverAttached(name)),
        _ if volume.status.attach == 0 => Err(RequestError::NeverAttached(name)),
        VolumeState::Detached => Ok(()),
        VolumeState::Attaching if !serving => Ok(()),
        VolumeState::Attaching => Err(RequestError::IsServed(name)),
        VolumeState::Attached if serving => Err(RequestError::IsServed(name)),
        VolumeState::Attached | VolumeState::Detaching => Err(RequestError::IsAttached(name)),
        VolumeState::Deleting => Err(RequestError::Deleting(name)),
    }
}

/// Where the engine of an attached volume is, and the number of its attachment.
///
/// # Errors
/// [`RequestError::NotAttached`].
pub fn engine_place(world: &World, name: &str) -> Result<(NodeName, u64), RequestError> {
    let volume = find(world, name)?;
    let engine = world.engines.get(name).filter(|_| volume.status.state == VolumeState::Attached);
    let node = engine.and_then(|engine| engine.spec.node_id.clone());
    let node = node.ok_or_else(|| RequestError::NotAttached(name.to_owned()))?;
    Ok((node, volume.status.attach))
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

/// What an administrator changes of a node; none: it stays as it is.
#[derive(Clone, Debug, Default)]
pub struct SetNode {
    /// Its name.
    pub name: String,
    /// Whether new replicas may go there. Those that were to leave it stay then, too.
    pub allow_scheduling: Option<bool>,
    /// Whether everything is to leave it; nothing new comes to it then.
    pub eviction_requested: Option<bool>,
    /// All its tags from now on.
    pub tags: Option<Vec<String>>,
    /// Its zone; empty: what its agent says.
    pub zone: Option<String>,
    /// Where its agent answers. With it, a node that is not known yet is made.
    pub address: Option<String>,
}

impl SetNode {
    /// The node as it is to be stored.
    ///
    /// # Errors
    /// [`RequestError`] says what to change.
    pub fn apply(&self, world: &World, now: Timestamp) -> Result<Change<Node>, RequestError> {
        let stored = find_node(world, &self.name);
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
        let is_so = world.nodes.get(&self.name) == Some(&node);
        Ok(if is_so { Change::AlreadySo(node) } else { Change::Store(node) })
    }
}

/// What an administrator changes of a disk; none: it stays as it is.
#[derive(Clone, Debug, Default)]
pub struct SetDisk {
    /// The node.
    pub node: String,
    /// The directory there.
    pub path: String,
    /// All its tags from now on.
    pub tags: Option<Vec<String>>,
    /// Whether new replicas may go there. Those that were to leave it stay then, too.
    pub allow_scheduling: Option<bool>,
    /// Whether everything is to leave it; nothing new comes to it then.
    pub eviction_requested: Option<bool>,
    /// Bytes that replicas leave to others.
    pub reserved_bytes: Option<u64>,
}

impl SetDisk {
    /// The node as it is to be stored.
    ///
    /// # Errors
    /// [`RequestError`] says what to change.
    pub fn apply(&self, world: &World) -> Result<Change<Node>, RequestError> {
        let mut spec = find_node(world, &self.node)?.spec.clone();
        let missing = || RequestError::NoDisk { node: self.node.clone(), path: self.path.clone() };
        let disk = spec.disks.get_mut(&self.path).ok_or_else(missing)?;
        if let Some(tags) = &self.tags {
            disk.tags = labels(tags)?;
        }
        if let Some(allow) = self.allow_scheduling {
            disk.allow_scheduling = allow;
            disk.eviction_requested &= !allow;
        }
        if let Some(evict) = self.eviction_requested {
            disk.eviction_requested = evict;
            disk.allow_scheduling &= !evict;
        }
        disk.storage_reserved = self.reserved_bytes.unwrap_or(disk.storage_reserved);
        with_node_spec(world, &self.node, spec)
    }
}

/// The node of that name.
///
/// # Errors
/// [`RequestError::NoNode`], or that the name can never work.
pub fn find_node<'a>(world: &'a World, name: &str) -> Result<&'a Node, RequestError> {
    NodeName::new(name)?;
    world.nodes.get(name).ok_or_else(|| RequestError::NoNode(name.to_owned()))
}

fn with_node_spec(world: &World, name: &str, spec: NodeSpec) -> Result<Change<Node>, RequestError> {
    let node = find_node(world, name)?;
    if spec == node.spec {
        return Ok(Change::AlreadySo(node.clone()));
    }
    Ok(Change::Store(Node { spec, ..node.clone() }))
}

#[cfg(test)]
mod tests;
