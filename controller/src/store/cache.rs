use std::sync::{PoisonError, RwLock, RwLockReadGuard};

use shorthorn_controller_core::World;
use shorthorn_controller_core::objects::{Key, Object, Replica};
use tokio::sync::broadcast;

use super::{CHANGES_MAX, StoreError};

/// The stored objects in memory, and the subscribers to their changes.
#[derive(Debug)]
pub(super) struct Cache {
    world: RwLock<World>,
    changes: broadcast::Sender<Key>,
}

impl Cache {
    pub(super) fn new(world: World) -> Cache {
        Cache { world: RwLock::new(world), changes: broadcast::Sender::new(CHANGES_MAX) }
    }

    pub(super) fn world(&self) -> RwLockReadGuard<'_, World> {
        self.world.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn changes(&self) -> broadcast::Receiver<Key> {
        self.changes.subscribe()
    }

    pub(super) fn check(&self, key: &Key, expected: u64) -> Result<(), StoreError> {
        let found = self.world().version(key);
        if found == expected {
            return Ok(());
        }
        Err(StoreError::Conflict { key: key.clone(), expected, found })
    }

    /// Lets `change` modify the objects; it returns the keys of the modified ones.
    pub(super) fn change(&self, change: impl FnOnce(&mut World) -> Vec<Key>) {
        let changed = change(&mut self.world.write().unwrap_or_else(PoisonError::into_inner));
        for key in changed {
            let _ = self.changes.send(key);
        }
    }

    pub(super) fn promise(&self, replicas: Vec<Replica>) {
        let mut world = self.world.write().unwrap_or_else(PoisonError::into_inner);
        replicas.into_iter().for_each(|replica| world.promise(replica));
    }

    pub(super) fn forget_promises(&self, names: &[String]) {
        let mut world = self.world.write().unwrap_or_else(PoisonError::into_inner);
        names.iter().for_each(|name| world.forget_promise(name));
    }

    pub(super) fn insert(&self, object: Object) {
        let key = object.key();
        self.world.write().unwrap_or_else(PoisonError::into_inner).insert(object);
        // A lack of listeners is no error.
        let _ = self.changes.send(key);
    }

    pub(super) fn remove(&self, key: &Key) {
        self.world.write().unwrap_or_else(PoisonError::into_inner).remove(key);
        let _ = self.changes.send(key.clone());
    }
}
