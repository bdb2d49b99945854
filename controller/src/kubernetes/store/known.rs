//! The objects in memory as far as they are known. Versions come in any order, and an older one is ignored.

use std::sync::{Mutex, MutexGuard, PoisonError, RwLockReadGuard};

use shorthorn_controller_core::ClusterState;
use shorthorn_controller_core::left_out_objects::LeftOut;
use shorthorn_controller_core::objects::{Key, Kind, Object, Replica, ResourceVersion};
use tokio::sync::broadcast;

use super::order::{ObjectList, VersionOrder};
use crate::store::ObjectStoreError;
use crate::store::cache::Cache;

/// The known objects, and the versions that were received. Subscribers get each change once.
pub(super) struct KnownObjects {
    cache: Cache,
    order: Mutex<VersionOrder>,
}

impl KnownObjects {
    pub(super) fn new() -> KnownObjects {
        KnownObjects { cache: Cache::new(ClusterState::default()), order: Mutex::default() }
    }

    fn order(&self) -> MutexGuard<'_, VersionOrder> {
        self.order.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn state(&self) -> RwLockReadGuard<'_, ClusterState> {
        self.cache.state()
    }

    pub(super) fn changes(&self) -> broadcast::Receiver<Key> {
        self.cache.changes()
    }

    /// Checks that the known object has this version.
    pub(super) fn check(&self, key: &Key, expected: Option<ResourceVersion>) -> Result<(), ObjectStoreError> {
        self.cache.check(key, expected)
    }

    pub(super) fn reserve(&self, replicas: Vec<Replica>) -> bool {
        self.cache.reserve(replicas)
    }

    pub(super) fn forget_reservations(&self, names: &[String]) {
        self.cache.forget_reservations(names);
    }

    /// Takes an object from a watch or an answer, unless a newer one is known.
    pub(super) fn take(&self, object: Object) {
        let key = object.key();
        let mut order = self.order();
        self.cache.change(|state| if order.take(state, object) { vec![key] } else { Vec::new() });
    }

    /// Takes the deletion of an object at that version in the watch of its kind.
    pub(super) fn take_gone(&self, key: Key, version: u64) {
        let kind = key.kind;
        let mut order = self.order();
        self.cache.change(|state| if order.take_gone(state, &key, version) { vec![key] } else { Vec::new() });
        order.heard(kind, version);
    }

    /// Records the version that the watch of that kind has reached.
    pub(super) fn heard(&self, kind: Kind, version: u64) {
        self.order().heard(kind, version);
    }

    /// Takes all objects of a kind.
    pub(super) fn relist(&self, kind: Kind, list: ObjectList) {
        let mut order = self.order();
        self.cache.change(|state| order.relist(state, kind, list));
    }

    /// Forgets an object of which this controller has removed that version.
    pub(super) fn forget(&self, key: &Key, version: u64) {
        let mut order = self.order();
        self.cache
            .change(|state| if order.remove(state, key, version) { vec![key.clone()] } else { Vec::new() });
    }

    /// The API server has an object of that key which cannot be used.
    pub(super) fn leave_out(&self, key: Key, left_out: LeftOut) {
        let order = self.order();
        self.cache.change(
            |state| {
                if order.leave_out(state, &key, left_out) { vec![key] } else { Vec::new() }
            },
        );
        drop(order);
    }

    /// Forgets that the object of that key was left out, because it has nothing of ours.
    pub(super) fn forget_left_out(&self, key: &Key) {
        self.cache.change(|state| if state.forget_left_out(key) { vec![key.clone()] } else { Vec::new() });
    }
}

#[cfg(test)]
mod tests {
    use shorthorn_controller_core::Timestamp;
    use shorthorn_controller_core::objects::{Metadata, Node};

    use super::*;

    fn node(version: u64) -> Object {
        let resource_version = ResourceVersion::new(version);
        let metadata = Metadata { resource_version, ..Metadata::new("n", Timestamp::UNIX_EPOCH) };
        Object::Node(Node { metadata, spec: Default::default(), status: Default::default() })
    }

    fn count(changes: &mut broadcast::Receiver<Key>) -> usize {
        std::iter::from_fn(|| changes.try_recv().ok()).count()
    }

    #[test]
    fn each_change_is_announced_once_and_older_versions_are_ignored() {
        let known = KnownObjects::new();
        let mut changes = known.changes();
        let key = node(1).key();
        known.take(node(5));
        assert_eq!(count(&mut changes), 1);
        known.take(node(5));
        known.take(node(4));
        assert_eq!((count(&mut changes), known.state().version(&key)), (0, ResourceVersion::new(5)));
        known.take_gone(key.clone(), 6);
        known.take(node(5));
        assert_eq!((count(&mut changes), known.state().version(&key)), (1, None));
        known.take(node(7));
        assert_eq!((count(&mut changes), known.state().version(&key)), (1, ResourceVersion::new(7)));
    }

    /// A key that is announced is reconciled at once: its write may have failed because nothing is there.
    #[test]
    fn a_removal_of_an_unknown_object_is_not_announced() {
        let known = KnownObjects::new();
        let mut changes = known.changes();
        known.take(node(5));
        assert_eq!(count(&mut changes), 1);
        known.forget(&node(1).key(), 5);
        known.forget(&node(1).key(), 5);
        assert_eq!(count(&mut changes), 1);
    }

    #[test]
    fn a_list_under_way_does_not_restore_a_removed_object() {
        let known = KnownObjects::new();
        let key = node(1).key();
        known.take(node(5));
        known.forget(&key, 5);
        known.relist(Kind::Node, ObjectList { version: 4, objects: vec![node(4)], ..ObjectList::default() });
        assert_eq!(known.state().version(&key), None);
        known.relist(Kind::Node, ObjectList { version: 9, objects: vec![node(8)], ..ObjectList::default() });
        assert_eq!(known.state().version(&key), ResourceVersion::new(8));
        assert!(known.check(&key, ResourceVersion::new(7)).is_err());
        assert!(known.check(&key, ResourceVersion::new(8)).is_ok());
    }
}
