use std::sync::{Mutex, PoisonError, RwLockReadGuard};

use async_trait::async_trait;
use shorthorn_controller_core::ClusterState;
use shorthorn_controller_core::objects::{Key, Object, Replica, ResourceVersion};
use tokio::sync::broadcast;

use super::cache::Cache;
use super::{ObjectStore, ObjectStoreError};

/// A store in memory alone; for tests and simulation.
#[derive(Debug)]
pub struct MemoryStore {
    cache: Cache,
    revision: Mutex<u64>,
    leader: Option<u64>,
}

impl MemoryStore {
    /// Creates an empty store.
    #[must_use]
    pub fn new() -> MemoryStore {
        MemoryStore { cache: Cache::new(ClusterState::default()), revision: Mutex::new(0), leader: None }
    }

    /// Returns the store with the number of the leader that uses it.
    #[must_use]
    pub fn led_by(self, leader: u64) -> MemoryStore {
        MemoryStore { leader: Some(leader), ..self }
    }
}

impl Default for MemoryStore {
    fn default() -> MemoryStore {
        MemoryStore::new()
    }
}

#[async_trait]
impl ObjectStore for MemoryStore {
    fn state(&self) -> RwLockReadGuard<'_, ClusterState> {
        self.cache.state()
    }

    async fn put(&self, mut object: Object) -> Result<Object, ObjectStoreError> {
        let mut revision = self.revision.lock().unwrap_or_else(PoisonError::into_inner);
        self.cache.check(&object.key(), object.metadata().resource_version)?;
        *revision += 1;
        object.metadata_mut().resource_version = ResourceVersion::new(*revision);
        self.cache.insert(object.clone());
        Ok(object)
    }

    async fn remove(&self, key: &Key, version: Option<ResourceVersion>) -> Result<(), ObjectStoreError> {
        let _revision = self.revision.lock().unwrap_or_else(PoisonError::into_inner);
        self.cache.check(key, version)?;
        self.cache.remove(key);
        Ok(())
    }

    fn reserve(&self, replicas: Vec<Replica>) -> bool {
        self.cache.reserve(replicas)
    }

    fn forget_reservations(&self, names: &[String]) {
        self.cache.forget_reservations(names);
    }

    fn changes(&self) -> broadcast::Receiver<Key> {
        self.cache.changes()
    }

    fn cluster(&self) -> &str {
        "in-memory"
    }

    fn leader(&self) -> Option<u64> {
        self.leader
    }
}
