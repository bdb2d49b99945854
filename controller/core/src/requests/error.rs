//! The reasons why a call is refused.

use shorthorn_types::VolumeNameError;
use shorthorn_types::limits::{BLOCK_BYTES, MAX_MEMBERS, MAX_VOLUME_BYTES};
use thiserror::Error;

use crate::objects::{DataLocalityError, UnknownFrontend};
use crate::scheduler::PlacementRefusal;
use crate::{LabelError, NodeName, NodeNameError};

/// The reason why a call is refused.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum RequestError {
    /// A replica knows a number of an attachment that has no successor.
    #[error(
        "volume {name}: a replica reports attachment {known}, which is impossible: inspect the replicas, and \
         remove the one whose state is damaged"
    )]
    NoAttach {
        /// Name of the volume that has the replica.
        name: String,
        /// The attachment in the state of the replica.
        known: u64,
    },
    /// The volume's name can never work.
    #[error(transparent)]
    VolumeName(#[from] VolumeNameError),
    /// The node's name can never work.
    #[error(transparent)]
    NodeName(#[from] NodeNameError),
    /// The frontend does not exist.
    #[error(transparent)]
    Frontend(#[from] UnknownFrontend),
    /// A tag or zone can never work.
    #[error(transparent)]
    Label(#[from] LabelError),
    /// The data locality does not exist.
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
        /// The name of the object.
        name: String,
        /// The name in its spec.
        other: String,
    },
    /// The volume does not exist.
    #[error("no volume {0}; shorthornctl volume list shows all volumes")]
    NoVolume(String),
    /// The node does not exist.
    #[error("no node {0}; shorthornctl node list shows all nodes")]
    NoNode(String),
    /// An object is stored, and the controller cannot use it.
    #[error("{0}")]
    LeftOut(String),
    /// The node has no such disk.
    #[error("node {node} has no disk {path}; shorthornctl node list shows all disks")]
    NoDisk {
        /// The node that was asked for.
        node: String,
        /// The requested path.
        path: String,
    },
    /// The name is taken by a volume that is something else.
    #[error("volume {name} already exists with another {differs}; choose another name")]
    Exists {
        /// The taken name.
        name: String,
        /// The property that differs, such as "number of replicas".
        differs: &'static str,
    },
    /// The volume is wanted somewhere else.
    #[error("volume {name} is attached to node {node}; detach it there first")]
    AttachedElsewhere {
        /// Name of the volume that is attached.
        name: String,
        /// The node of the volume.
        node: NodeName,
    },
    /// The path of a disk can never work.
    #[error("{0:?} is not an absolute path of a directory on the node")]
    DiskPath(String),
    /// The volume is being deleted.
    #[error("volume {0} is being deleted; wait until it is gone")]
    Deleting(String),
    /// The trash has no such volume.
    #[error(
        "no reachable node has replicas in its trash that were deleted with volume {0}; shorthornctl volume \
         trash lists the trash"
    )]
    NothingToUndelete(String),
    /// A volume of the name is half undeleted.
    #[error(
        "replicas of a volume {0} exist from an interrupted undeletion: run shorthornctl volume undelete \
         {0}, or choose another name"
    )]
    HasReplicas(String),
    /// The trash has no such replica.
    #[error(
        "no reachable node has {} of volume {name} in its trash; shorthornctl volume trash lists the trash",
        replica.as_deref().unwrap_or("replicas")
    )]
    NotInTrash {
        /// Name of the volume that was deleted.
        name: String,
        /// The replica; none for any.
        replica: Option<String>,
    },
    /// Kubernetes needs it.
    #[error(
        "volume {name} is PersistentVolume {persistent_volume} in Kubernetes: delete its claim. If the \
         PersistentVolume is released and kept, run kubectl delete pv {persistent_volume}. Then delete the \
         volume if it still exists"
    )]
    IsPersistentVolume {
        /// Name of the volume that Kubernetes needs.
        name: String,
        /// The name of the PersistentVolume that keeps it.
        persistent_volume: String,
    },
    /// Replicas are replaced only while their volume is served.
    #[error(
        "replica {replica} cannot be replaced while volume {name} is {state}: attach it first (shorthornctl \
         volume attach {name} --node NODE)"
    )]
    NotServed {
        /// Name of the volume that is not served.
        name: String,
        /// Name of the Replica object.
        replica: String,
        /// The state of the volume.
        state: &'static str,
    },
    /// The replica does not exist.
    #[error("no replica {0}; shorthornctl replica list shows all replicas")]
    NoSuchReplica(String),
    /// Volumes never shrink.
    #[error("volume {name} has {has} bytes, more than {wanted}: a volume only grows")]
    Shrinks {
        /// Name of the volume that would shrink.
        name: String,
        /// The size that it should have now.
        has: u64,
        /// The requested size in bytes.
        wanted: u64,
    },
    /// The disks of its replicas have no room for more.
    #[error("volume {name} cannot have {wanted} bytes: {refusal}")]
    NoRoom {
        /// Name of the volume to expand.
        name: String,
        /// The requested size in bytes.
        wanted: u64,
        /// The disks, and the reasons.
        refusal: Box<PlacementRefusal>,
    },
    /// The share of copying can never work.
    #[error("invalid share of {0} percent: use 1 to 100")]
    Share(u32),
    /// The volume has no such replica.
    #[error("volume {name} has no replica {replica}; shorthornctl volume salvage {name} lists its replicas")]
    NoReplica {
        /// Name of the volume without that replica.
        name: String,
        /// The requested replica.
        replica: String,
    },
    /// The replica was never seen with data.
    #[error("replica {0} holds no data: salvage with another replica")]
    HoldsNothing(String),
    /// The caller has not confirmed the loss.
    #[error("salvaging volume {0} loses acknowledged writes: confirm it with the name of the volume")]
    NotConfirmed(String),
    /// The volume is usable without a salvage.
    #[error("volume {0} is served and needs no salvage")]
    IsServed(String),
    /// An engine may still serve it.
    #[error("volume {0} is attached: detach it first, so that nothing is written while it is salvaged")]
    IsAttached(String),
    /// No engine has ever opened it.
    #[error("volume {0} was never attached and has no data to salvage")]
    NeverAttached(String),
    /// The node answers: it can be drained.
    #[error(
        "node {0} answers: move its replicas with shorthornctl node drain {0}; delete only a node that never \
         comes back"
    )]
    NodeAnswers(String),
    /// The scheduler could still place new replicas there.
    #[error("node {0} is not cordoned: run shorthornctl node cordon {0}, so that it gets no new replicas")]
    NodeNotCordoned(String),
    /// Engines may still run there.
    #[error(
        "volumes are attached to node {node}: {volumes}; detach each first (shorthornctl volume detach \
         NAME), which fences its engine. If too few replicas are left for that, use --force, and salvage the \
         volume"
    )]
    NodeHasEngines {
        /// The node to remove.
        node: String,
        /// The names of the volumes.
        volumes: String,
    },
    /// Data would be lost.
    #[error("node {node} has the last complete replica of {volumes}; with --force these volumes are lost")]
    NodeHasLast {
        /// The node to remove.
        node: String,
        /// The volumes of the replicas.
        volumes: String,
    },
    /// Volumes could not start by themselves.
    #[error(
        "without node {node}, fewer than half of the complete replicas of {volumes} are left, and these \
         volumes do not start. With --force each volume has to be salvaged (shorthornctl volume salvage NAME)"
    )]
    NodeHasMajority {
        /// The node to remove.
        node: String,
        /// The names of the volumes.
        volumes: String,
    },
    /// The disk still has replicas.
    #[error(
        "disk {path} of node {node} has replicas: move them with shorthornctl disk drain {node} {path}. If \
         the disk never comes back, run shorthornctl disk remove --lost {node} {path}"
    )]
    DiskHasReplicas {
        /// Name of the Node object.
        node: String,
        /// The disk there.
        path: String,
    },
    /// The disk is usable, so it can be drained.
    #[error(
        "disk {path} of node {node} can be used, as its agent reports: shorthornctl disk drain {node} {path} \
         moves its replicas. With --force its replicas are given up anyway"
    )]
    DiskIsUsable {
        /// Name of the Node object.
        node: String,
        /// The disk there.
        path: String,
    },
    /// Data would be lost.
    #[error(
        "disk {path} of node {node} has the last complete replica of {volumes}; with --force these \
         volumes are lost"
    )]
    DiskHasLast {
        /// Name of the Node object.
        node: String,
        /// The disk there.
        path: String,
        /// The volumes of the replicas.
        volumes: String,
    },
    /// The trash of the disk is not empty, and could be neither listed nor deleted any more.
    #[error(
        "the trash of disk {path} of node {node} has {directories} directories, which the controller does \
         not list or delete once the disk is removed. shorthornctl volume trash shows them; volume undelete \
         or volume trash --remove empties the trash. With --force they stay there, and are listed again if \
         the disk is added again"
    )]
    DiskHasTrash {
        /// Name of the Node object.
        node: String,
        /// The disk there.
        path: String,
        /// Count of directories in the trash.
        directories: usize,
    },
    /// Volumes could not start by themselves.
    #[error(
        "without disk {path} of node {node} fewer than half of the complete replicas of {volumes} are left, \
         and these volumes do not start. With --force each volume has to be salvaged (shorthornctl volume \
         salvage NAME)"
    )]
    DiskHasMajority {
        /// Name of the Node object.
        node: String,
        /// The disk there.
        path: String,
        /// The names of the volumes.
        volumes: String,
    },
    /// The directory does not exist, or belongs to a volume.
    #[error(
        "{name} on disk {path} of node {node} is not an orphan; shorthornctl orphan list shows all orphans"
    )]
    NoOrphan {
        /// The name of the node that has the directory.
        node: String,
        /// The disk there.
        path: String,
        /// Name of the directory.
        name: String,
    },
    /// The caller has not confirmed the loss.
    #[error("deleting node {0} gives up the replicas on it: confirm it with the name of the node")]
    NodeNotConfirmed(String),
    /// The node has as many volumes as it takes.
    #[error("node {node} has {max_volumes} volumes attached, the maximum of its agent (max_volumes)")]
    NodeFull {
        /// The node to attach to.
        node: String,
        /// The maximum number of its volumes.
        max_volumes: u32,
    },
    /// The frontend makes no device.
    #[error("volume {0} has the frontend socket, which makes no device that a node could use")]
    NoDevice(String),
    /// Kubernetes has it attached, and would not notice a detach by hand.
    #[error(
        "Kubernetes has volume {name} attached to node {node} (VolumeAttachment {attachment}). Delete the \
         pods that use it: Kubernetes then detaches the volume. With --force the controller detaches it as \
         soon as its device is not in use there. Kubernetes still counts it as attached. No pod on that node \
         gets the volume until it is attached there by hand or the VolumeAttachment is deleted"
    )]
    Published {
        /// Name of the volume that Kubernetes has attached.
        name: String,
        /// The node in Kubernetes that has the volume.
        node: String,
        /// Name of the VolumeAttachment object.
        attachment: String,
    },
    /// The volume is not attached.
    #[error("volume {0} is not attached; shorthornctl volume attach {0} --node NODE")]
    NotAttached(String),
}
