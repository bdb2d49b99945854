//! What a replica must not forget: the generation that holds it, and the views of its volume.

use serde::{Deserialize, Serialize};
use shorthorn_control::ReplicaSpec;
use shorthorn_store::{Provenance, SavedState, Store};
use shorthorn_types::{Generation, ReplicaId, View, ViewId, VolumeName};
use shorthorn_views::ReplicaViews;

use crate::error::ReplicaError;

/// Whose directory it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Owner {
    pub volume: VolumeName,
    pub replica: ReplicaId,
}

impl Owner {
    /// What is saved of the views.
    pub fn with_views(&self, views: &ReplicaViews) -> Result<Vec<u8>, ReplicaError> {
        let Owner { volume, replica } = self.clone();
        let state = State { volume, replica, views: views.clone() };
        serde_json::to_vec(&state).map_err(ReplicaError::Encode)
    }
}

/// The state as it is saved.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct State {
    volume: VolumeName,
    replica: ReplicaId,
    views: ReplicaViews,
}

/// The views of the replica in `store`.
///
/// A directory that no replica of ours has served yet, new or made by Longhorn, begins in the first view.
///
/// # Errors
/// Where the directory has lost its state, belongs to another replica, or was changed by somebody else.
pub(crate) fn load_views(
    store: &mut Store,
    owner: &Owner,
    spec: &ReplicaSpec,
) -> Result<ReplicaViews, ReplicaError> {
    match store.load_state()? {
        SavedState::None => first_views(store, owner, spec),
        SavedState::Current(bytes) => parse(&bytes, spec),
        SavedState::Outdated(_) => Err(ReplicaError::ChangedByOthers(spec.directory.clone())),
    }
}

fn first_views(store: &mut Store, owner: &Owner, spec: &ReplicaSpec) -> Result<ReplicaViews, ReplicaError> {
    if store.info().provenance == Provenance::Ours && holds_data(store)? {
        return Err(ReplicaError::StateLost(spec.directory.clone()));
    }
    let id = ViewId { generation: Generation::NEVER, number: 0 };
    let views = ReplicaViews::new(View { id, members: spec.first_members });
    store.save_state(&owner.with_views(&views)?)?;
    Ok(views)
}

fn parse(bytes: &[u8], spec: &ReplicaSpec) -> Result<ReplicaViews, ReplicaError> {
    let state: State = serde_json::from_slice(bytes)
        .map_err(|source| ReplicaError::State { directory: spec.directory.clone(), source })?;
    if (&state.volume, state.replica) != (&spec.volume, spec.replica) {
        return Err(ReplicaError::OtherReplica {
            directory: spec.directory.clone(),
            volume: state.volume,
            replica: state.replica,
            expected_volume: spec.volume.clone(),
            expected_replica: spec.replica,
        });
    }
    Ok(state.views)
}

/// Whether anything was ever written to the volume.
pub(crate) fn holds_data(store: &Store) -> Result<bool, ReplicaError> {
    for layer in store.layers() {
        let stat = nix::sys::stat::fstat(store.fd(layer.index))
            .map_err(|errno| ReplicaError::system("look at the files of the replica", errno))?;
        if stat.st_blocks > 0 {
            return Ok(true);
        }
    }
    Ok(false)
}
