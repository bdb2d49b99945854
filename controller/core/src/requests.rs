//! Effects of API calls on stored objects, and reasons to refuse a call.

mod create;
mod error;
mod node;
mod salvage;
mod volume;

pub use crate::objects::DEFAULT_REPLICAS;
pub use create::{CreateVolume, check_stored};
pub use error::RequestError;
pub use node::{SetDisk, SetNode, add_disk, check_disk, find_node};
pub use salvage::{SalvageVolume, check_salvageable};
pub use shorthorn_types::limits::MAX_VOLUME_BYTES;
pub use volume::{
    SetVolume, ask_for_deletion, attach, delete, detach, detach_by_force, engine_location, evict, expand,
    expand_within, set_rebuild, set_replicas,
};

use shorthorn_types::VolumeName;

use crate::ClusterState;
use crate::objects::{Key, Kind, Volume, VolumeSpec};

/// The result of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change<T> {
    /// The state is already the requested one.
    AlreadySo(T),
    /// This is to be stored.
    Store(T),
}

/// Returns the volume of that name.
///
/// # Errors
/// [`RequestError::NoVolume`], or that the name can never work.
pub fn find<'a>(cluster: &'a ClusterState, name: &str) -> Result<&'a Volume, RequestError> {
    VolumeName::new(name)?;
    let missing = || absent(cluster, Kind::Volume, name, RequestError::NoVolume(name.to_owned()));
    cluster.volumes.get(name).ok_or_else(missing)
}

/// The error about an object that is not in the cluster state: `error`, unless it was only left out.
pub(crate) fn absent(cluster: &ClusterState, kind: Kind, name: &str, error: RequestError) -> RequestError {
    cluster.unknown(&Key::new(kind, name)).map_or(error, RequestError::LeftOut)
}

/// # Errors
/// [`RequestError::LeftOut`]: an object of the volume is stored and cannot be used.
pub(crate) fn check_all_known(cluster: &ClusterState, volume: &str) -> Result<(), RequestError> {
    cluster.unknown_of(volume).map_or(Ok(()), |sentence| Err(RequestError::LeftOut(sentence)))
}

fn find_living<'a>(cluster: &'a ClusterState, name: &str) -> Result<&'a Volume, RequestError> {
    let volume = find(cluster, name)?;
    if volume.is_deleting() { Err(RequestError::Deleting(name.to_owned())) } else { Ok(volume) }
}

fn with_spec(volume: &Volume, spec: VolumeSpec) -> Change<Volume> {
    if spec == volume.spec {
        return Change::AlreadySo(volume.clone());
    }
    Change::Store(Volume { spec, ..volume.clone() })
}

#[cfg(test)]
mod tests;
