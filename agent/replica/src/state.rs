//! Durable state of a replica: its generation, and the views of its volume.

use serde::{Deserialize, Serialize};
use shorthorn_control::{ReplicaSpec, Unknown};
use shorthorn_store::{Provenance, SavedState, Store};
use shorthorn_types::{Generation, ReplicaId, View, ViewId, VolumeName};
use shorthorn_views::ReplicaViews;

use crate::error::ReplicaError;

/// The owner of a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Owner {
    pub volume: VolumeName,
    pub replica: ReplicaId,
    /// Fields of its state that a later version has written. They are kept.
    pub unknown: Unknown,
}

impl Owner {
    /// Returns the owner according to the spec. Fields of later versions in its state are still unread.
    pub fn of(spec: &ReplicaSpec) -> Owner {
        Owner { volume: spec.volume.clone(), replica: spec.replica, unknown: Unknown::default() }
    }

    /// Returns the bytes of the views to save.
    pub fn with_views(&self, views: &ReplicaViews) -> Result<Vec<u8>, ReplicaError> {
        let Owner { volume, replica, unknown } = self.clone();
        let state = SavedViews { volume, replica, views: views.clone(), unknown };
        serde_json::to_vec(&state).map_err(ReplicaError::Encode)
    }
}

/// The state that `shorthorn.state` holds.
#[derive(Debug, Serialize, Deserialize)]
struct SavedViews {
    volume: VolumeName,
    replica: ReplicaId,
    views: ReplicaViews,
    /// Fields of a later version.
    #[serde(flatten)]
    unknown: Unknown,
}

/// Loads the views of the replica in `store`. `owner` has the fields of later versions from then on.
///
/// A directory that no replica of ours has served yet, new or made by Longhorn, begins in the first view.
///
/// # Errors
/// The directory has lost its state, belongs to another replica, or was changed by another program.
pub(crate) fn load_views(
    store: &mut Store,
    owner: &mut Owner,
    spec: &ReplicaSpec,
) -> Result<ReplicaViews, ReplicaError> {
    match store.load_state()? {
        SavedState::None => first_views(store, owner, spec),
        SavedState::Current(bytes) => {
            let state = parse(&bytes, spec)?;
            owner.unknown = state.unknown;
            Ok(state.views)
        }
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

fn parse(bytes: &[u8], spec: &ReplicaSpec) -> Result<SavedViews, ReplicaError> {
    let state: SavedViews = serde_json::from_slice(bytes)
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

/// Returns whether anything was ever written to the volume.
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

#[cfg(test)]
mod tests {
    use std::path::Path;

    use shorthorn_store::{CreateOptions, OpenOptions};
    use shorthorn_types::{Members, Secret};

    use super::*;

    fn spec(directory: &Path) -> ReplicaSpec {
        ReplicaSpec {
            volume: "v1".parse().unwrap(),
            replica: ReplicaId::from_random(1),
            directory: directory.to_owned(),
            size_bytes: 1 << 20,
            create: false,
            create_once: false,
            first_members: Members::new([ReplicaId::from_random(1)]).unwrap(),
            secret: Secret::new([1; 32]),
            data_socket: "/data".into(),
            data_address: None,
            control_socket: "/control".into(),
            sum_bytes_per_s: None,
            encrypt_in_transit: false,
            unknown: Unknown::default(),
        }
    }

    /// A later version was installed for a while: nothing that it has recorded is lost, and the replica
    /// starts.
    #[test]
    fn fields_of_a_later_version_are_tolerated_and_kept() {
        let dir = tempfile::tempdir().unwrap();
        let directory = dir.path().join("v1-00000001");
        let created = CreateOptions { size_bytes: 1 << 20, ..CreateOptions::default() };
        let mut store = Store::create(&directory, created).unwrap();
        let spec = spec(&directory);
        let mut owner = Owner::of(&spec);
        let mut views = load_views(&mut store, &mut owner, &spec).unwrap();
        let mut later: serde_json::Value =
            serde_json::from_slice(&owner.with_views(&views).unwrap()).unwrap();
        later["leases"] = serde_json::json!({ "a": [1, 2] });
        later["views"]["witnesses"] = serde_json::json!([]);
        store.save_state(later.to_string().as_bytes()).unwrap();

        let mut owner = Owner::of(&spec);
        assert_eq!(load_views(&mut store, &mut owner, &spec).unwrap(), views);
        views.fence(Generation::new(3, 0)).unwrap();
        store.save_state(&owner.with_views(&views).unwrap()).unwrap();
        let SavedState::Current(bytes) = store.load_state().unwrap() else { panic!("it is not saved") };
        let kept: serde_json::Value = serde_json::from_slice(&bytes).unwrap();
        assert_eq!(kept["leases"]["a"], serde_json::json!([1, 2]), "{kept}");
        assert_eq!(kept["views"]["generation"]["attach"], 3);
        store.close().unwrap();
    }

    /// Makes a directory with data as Longhorn leaves it.
    fn of_longhorn(directory: &Path) {
        let created = CreateOptions { size_bytes: 1 << 20, ..CreateOptions::default() };
        let mut store = Store::create(directory, created).unwrap();
        store.write_at(&[7; 4096], 0, true).unwrap();
        store.close().unwrap();
        for entry in std::fs::read_dir(directory).unwrap() {
            let entry = entry.unwrap();
            if entry.file_name().to_string_lossy().starts_with("shorthorn.") {
                std::fs::remove_file(entry.path()).unwrap();
            }
        }
    }

    #[test]
    fn a_directory_of_longhorn_is_accepted_after_an_interrupted_start_and_a_lost_state_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let directory = dir.path().join("v1-00000001");
        of_longhorn(&directory);
        let spec = spec(&directory);
        let load = |store: &mut Store| load_views(store, &mut Owner::of(&spec), &spec);
        let open = || Store::open(&directory, OpenOptions::default()).unwrap();
        drop(open());
        load(&mut open()).unwrap();
        load(&mut open()).unwrap();
        std::fs::remove_file(directory.join("shorthorn.state")).unwrap();
        for _ in 0..2 {
            assert!(matches!(load(&mut open()), Err(ReplicaError::StateLost(_))));
        }
    }
}
