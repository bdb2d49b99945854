use std::path::Path;

use shorthorn_store::{CreateOptions, Store};
use shorthorn_types::{Generation, Members, ReplicaId, View, ViewId};
use shorthorn_views::ReplicaViews;

use super::Loaded;
use crate::state::Owner;

/// The size of the volume of [`new_store`].
pub(super) const SIZE: u64 = 16 << 20;

/// Creates the directory of a new replica, and loads its state.
pub(super) fn new_store(directory: &Path) -> (Store, Owner, Loaded) {
    let options = CreateOptions { size_bytes: SIZE, ..CreateOptions::default() };
    let mut store = Store::create(directory, options).unwrap();
    let id = ViewId { generation: Generation::NEVER, number: 0 };
    let committed = View { id, members: Members::default() };
    let unknown = shorthorn_control::Unknown::default();
    let owner = Owner { volume: "v1".parse().unwrap(), replica: ReplicaId::from_random(1), unknown };
    let loaded = Loaded::load(&mut store, &owner, ReplicaViews::new(committed), None).unwrap();
    (store, owner, loaded)
}
