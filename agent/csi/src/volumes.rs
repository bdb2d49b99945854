//! Source of the block devices of volumes.

use std::path::PathBuf;

use shorthorn_types::{DeviceNumber, VolumeName};
use thiserror::Error;

/// The volumes that are attached to this node.
#[tonic::async_trait]
pub trait NodeVolumes: Send + Sync + 'static {
    /// Returns the current state of a volume.
    ///
    /// # Errors
    /// [`VolumesError::NotFound`] if it is not attached to this node.
    async fn find(&self, volume: &VolumeName) -> Result<NodeVolume, VolumesError>;

    /// Makes a device that could not grow while it was in use take the size of its volume now, if it has no
    /// user. Called before a volume is staged. Otherwise the device does not change.
    async fn take_size(&self, _volume: &VolumeName) {}
}

/// An attached volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeVolume {
    /// The device of the volume, if it has one.
    pub device: Option<VolumeDevice>,
    /// True if the volume was attached for reading only.
    pub read_only: bool,
    /// Reported to Kubernetes as the VolumeCondition.
    pub condition: VolumeHealth,
}

/// The block device of a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeDevice {
    /// A node that leads to it.
    pub path: PathBuf,
    /// The device to which the node has to lead.
    pub number: DeviceNumber,
    /// The size that the device has to have.
    pub size_bytes: u64,
}

/// The condition of a volume. The texts are for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VolumeHealth {
    /// The volume has its full redundancy.
    Healthy,
    /// The volume serves, with less redundancy than wanted.
    Degraded(String),
    /// Requests wait: any access to the device hangs until that is over.
    Frozen(String),
}

/// The reason why a volume is not found.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum VolumesError {
    /// The volume is not attached to this node.
    #[error("volume {0} is not attached to this node")]
    NotFound(VolumeName),
    /// The state is not known now; the text has the reason.
    #[error("{0}")]
    Unavailable(String),
}
