//! What a replica must not forget: the generation that holds it, and the views of its volume.

use serde::{Deserialize, Serialize};
use shorthorn_control::ReplicaSpec;
use shorthorn_store::{Provenance, SavedState, Store};
use shorthorn_types::{Generation, ReplicaId, View, ViewId, VolumeName};
use shorthorn_views::ReplicaViews;

use crate::error::ReplicaError;
use crate::executor::Executor;

/// The state, in memory as it is on the disk: every change is saved before it counts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct State {
    volume: VolumeName,
    replica: ReplicaId,
    views: ReplicaViews,
}

impl State {
    /// The state of the replica in `store`.
    ///
    /// A directory that no replica of ours has served yet, new or made by Longhorn, begins in the first view.
    ///
    /// # Errors
    /// Where the directory has lost its state, belongs to another replica, or was changed by somebody else.
    pub fn load(store: &mut Store, spec: &ReplicaSpec) -> Result<State, ReplicaError> {
        match store.load_state()? {
            SavedState::None => State::first(store, spec),
            SavedState::Current(bytes) => State::parse(&bytes, spec),
            SavedState::Outdated(_) => Err(ReplicaError::ChangedByOthers(spec.directory.clone())),
        }
    }

    fn first(store: &mut Store, spec: &ReplicaSpec) -> Result<State, ReplicaError> {
        if store.info().provenance == Provenance::Ours && holds_data(store)? {
            return Err(ReplicaError::StateLost(spec.directory.clone()));
        }
        let id = ViewId { generation: Generation::NEVER, number: 0 };
        let views = ReplicaViews::new(View { id, members: spec.first_members });
        let state = State { volume: spec.volume.clone(), replica: spec.replica, views };
        store.save_state(&state.to_bytes()?)?;
        Ok(state)
    }

    fn parse(bytes: &[u8], spec: &ReplicaSpec) -> Result<State, ReplicaError> {
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
        Ok(state)
    }

    fn to_bytes(&self) -> Result<Vec<u8>, ReplicaError> {
        serde_json::to_vec(self).map_err(ReplicaError::Encode)
    }

    /// Which replica this is.
    pub fn replica(&self) -> ReplicaId {
        self.replica
    }

    /// The views.
    pub fn views(&self) -> &ReplicaViews {
        &self.views
    }

    /// Changes the views, and saves them where they are different then. Where that fails nothing has changed.
    ///
    /// # Errors
    /// What `change` answers, or [`ReplicaError::Store`].
    pub fn change<T, E: Into<ReplicaError>>(
        &mut self,
        executor: &mut Executor,
        change: impl FnOnce(&mut ReplicaViews) -> Result<T, E>,
    ) -> Result<T, ReplicaError> {
        let mut next = self.clone();
        let answer = change(&mut next.views).map_err(Into::into)?;
        if next != *self {
            executor.save_state(&next.to_bytes()?)?;
            *self = next;
        }
        Ok(answer)
    }
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
