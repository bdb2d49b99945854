use std::sync::{PoisonError, RwLock, RwLockReadGuard};

use shorthorn_controller_core::ClusterState;
use shorthorn_controller_core::objects::{Key, Object, Replica, ResourceVersion};
use tokio::sync::broadcast;

use super::{CHANGES_MAX, ObjectStoreError};

/// The stored objects in memory, and the subscribers to their changes.
#[derive(Debug)]
pub(crate) struct Cache {
    state: RwLock<ClusterState>,
    changes: broadcast::Sender<Key>,
}

impl Cache {
    pub(crate) fn new(state: ClusterState) -> Cache {
        Cache { state: RwLock::new(state), changes: broadcast::Sender::new(CHANGES_MAX) }
    }

    pub(crate) fn state(&self) -> RwLockReadGuard<'_, ClusterState> {
        self.state.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn changes(&self) -> broadcast::Receiver<Key> {
        self.changes.subscribe()
    }

    pub(crate) fn check(&self, key: &Key, expected: Option<ResourceVersion>) -> Result<(), ObjectStoreError> {
        let found = self.state().version(key);
        if found == expected {
            return Ok(());
        }
        Err(ObjectStoreError::Conflict { key: key.clone(), expected, found })
    }

    /// Lets `change` modify the objects; it returns the keys of the modified ones.
    pub(crate) fn change(&self, change: impl FnOnce(&mut ClusterState) -> Vec<Key>) {
        let changed = change(&mut self.state.write().unwrap_or_else(PoisonError::into_inner));
        for key in changed {
            let _ = self.changes.send(key);
        }
    }

    pub(crate) fn reserve(&self, replicas: Vec<Replica>) -> bool {
        self.state.write().unwrap_or_else(PoisonError::into_inner).reserve(replicas)
    }

    pub(crate) fn forget_reservations(&self, names: &[String]) {
        let mut state = self.state.write().unwrap_or_else(PoisonError::into_inner);
        names.iter().for_each(|name| state.forget_reservation(name));
    }

    pub(crate) fn insert(&self, object: Object) {
        let key = object.key();
        self.state.write().unwrap_or_else(PoisonError::into_inner).insert(object);
        // A lack of listeners is not an error.
        let _ = self.changes.send(key);
    }

    pub(crate) fn remove(&self, key: &Key) {
        self.state.write().unwrap_or_else(PoisonError::into_inner).remove(key);
        let _ = self.changes.send(key.clone());
    }
}
