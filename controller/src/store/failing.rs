//! A store for tests, whose writes fail.

use std::sync::RwLockReadGuard;
use std::sync::atomic::{AtomicBool, Ordering};

use async_trait::async_trait;
use shorthorn_controller_core::ClusterState;
use shorthorn_controller_core::objects::{Key, Object, Replica, ResourceVersion};
use tokio::sync::broadcast;

use super::{MemoryStore, ObjectStore, ObjectStoreError};

/// A store in which every `put` fails, except for objects named [`FailingStore::FITS`].
pub(crate) struct FailingStore {
    stored: MemoryStore,
    put_error: fn() -> ObjectStoreError,
    /// True if a check succeeds. Writes fail all the same.
    is_back: AtomicBool,
}

impl FailingStore {
    /// The name of objects that are stored.
    pub(crate) const FITS: &str = "fits";
    /// The number of the leader.
    pub(crate) const LEADER: u64 = 7;

    /// A store whose disk is full.
    pub(crate) fn full() -> FailingStore {
        FailingStore::new(|| ObjectStoreError::Write { path: "store".into(), message: "no space".to_owned() })
    }

    /// A store that is out of reach.
    pub(crate) fn unreachable() -> FailingStore {
        FailingStore::new(|| ObjectStoreError::Unavailable { message: "no route".to_owned() })
    }

    fn new(put_error: fn() -> ObjectStoreError) -> FailingStore {
        FailingStore { stored: MemoryStore::new(), put_error, is_back: AtomicBool::new(false) }
    }

    /// Has checks succeed from now on.
    pub(crate) fn recover(&self) {
        self.is_back.store(true, Ordering::SeqCst);
    }
}

#[async_trait]
impl ObjectStore for FailingStore {
    fn state(&self) -> RwLockReadGuard<'_, ClusterState> {
        self.stored.state()
    }

    async fn put(&self, object: Object) -> Result<Object, ObjectStoreError> {
        if object.metadata().name == FailingStore::FITS {
            return self.stored.put(object).await;
        }
        Err((self.put_error)())
    }

    async fn remove(&self, key: &Key, version: Option<ResourceVersion>) -> Result<(), ObjectStoreError> {
        self.stored.remove(key, version).await
    }

    async fn check(&self) -> Result<(), ObjectStoreError> {
        if self.is_back.load(Ordering::SeqCst) {
            return Ok(());
        }
        Err(ObjectStoreError::Unavailable { message: "still no route".to_owned() })
    }

    fn reserve(&self, replicas: Vec<Replica>) -> bool {
        self.stored.reserve(replicas)
    }

    fn forget_reservations(&self, names: &[String]) {
        self.stored.forget_reservations(names);
    }

    fn changes(&self) -> broadcast::Receiver<Key> {
        self.stored.changes()
    }

    fn cluster(&self) -> &str {
        self.stored.cluster()
    }

    fn leader(&self) -> Option<u64> {
        Some(FailingStore::LEADER)
    }
}
