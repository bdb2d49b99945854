//! A store that counts the writes.

use std::sync::{Arc, RwLockReadGuard};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use shorthorn_controller_core::ClusterState;
use shorthorn_controller_core::objects::{Key, Kind, Object, Replica, ResourceVersion};
use tokio::sync::broadcast;

use super::{Metrics, Readiness};
use crate::store::{ObjectStore, ObjectStoreError};

/// The time between two checks of a store that does not answer.
const CHECK_EVERY: Duration = Duration::from_secs(5);

/// A store around another one; every write is counted and timed, and shows whether the store answers.
pub struct Metered {
    store: Arc<dyn ObjectStore>,
    metrics: Metrics,
    readiness: Arc<Readiness>,
}

impl std::fmt::Debug for Metered {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Metered").field("readiness", &self.readiness).finish_non_exhaustive()
    }
}

impl Metered {
    /// Returns `store` with counters.
    #[must_use]
    pub fn new(store: Arc<dyn ObjectStore>, metrics: Metrics, readiness: Arc<Readiness>) -> Metered {
        Metered { store, metrics, readiness }
    }

    fn observe<T>(
        &self,
        kind: Kind,
        operation: &'static str,
        started: Instant,
        result: &Result<T, ObjectStoreError>,
    ) {
        let word = match result {
            Ok(_) => "ok",
            Err(ObjectStoreError::Conflict { .. }) => "conflict",
            Err(ObjectStoreError::Unavailable { .. }) => "unavailable",
            Err(ObjectStoreError::Refused { .. }) => "refused",
            Err(_) => "failed",
        };
        self.metrics.wrote(kind, operation, word, started.elapsed());
    }

    fn heard<T>(&self, result: &Result<T, ObjectStoreError>) {
        match result {
            Ok(_) => self.readiness.heard(None),
            // The store says nothing about other writes with that.
            Err(ObjectStoreError::Conflict { .. } | ObjectStoreError::Refused { .. }) => {}
            Err(error) => self.readiness.heard(Some(error.to_string())),
        }
    }

    /// Checks the store while it does not answer, until this is dropped: a controller without work writes
    /// nothing that would show its return. One check is under way at a time, and each has a time limit.
    pub async fn follow(self: Arc<Metered>) {
        loop {
            tokio::time::sleep(CHECK_EVERY).await;
            if self.readiness.is_away() {
                let result = self.store.check().await;
                if self.readiness.is_away() {
                    self.heard(&result);
                }
            }
        }
    }
}

#[async_trait]
impl ObjectStore for Metered {
    fn state(&self) -> RwLockReadGuard<'_, ClusterState> {
        self.store.state()
    }

    async fn put(&self, object: Object) -> Result<Object, ObjectStoreError> {
        let (kind, known, started) = (object.kind(), object.metadata().resource_version, Instant::now());
        let result = self.store.put(object).await;
        self.observe(kind, "put", started, &result);
        // A write without a difference has not reached the store.
        if !result.as_ref().is_ok_and(|stored| stored.metadata().resource_version == known) {
            self.heard(&result);
        }
        result
    }

    async fn remove(&self, key: &Key, version: Option<ResourceVersion>) -> Result<(), ObjectStoreError> {
        let started = Instant::now();
        let result = self.store.remove(key, version).await;
        self.observe(key.kind, "remove", started, &result);
        self.heard(&result);
        result
    }

    async fn check(&self) -> Result<(), ObjectStoreError> {
        self.store.check().await
    }

    fn reserve(&self, replicas: Vec<Replica>) -> bool {
        self.store.reserve(replicas)
    }

    fn forget_reservations(&self, names: &[String]) {
        self.store.forget_reservations(names);
    }

    fn changes(&self) -> broadcast::Receiver<Key> {
        self.store.changes()
    }

    fn cluster(&self) -> &str {
        self.store.cluster()
    }

    fn leader(&self) -> Option<u64> {
        self.store.leader()
    }
}

#[cfg(test)]
mod tests {
    use shorthorn_controller_core::Timestamp;
    use shorthorn_controller_core::objects::{Metadata, Node, NodeSpec, NodeStatus};

    use super::*;
    use crate::metrics::ReadinessPhase;
    use crate::store::MemoryStore;
    use crate::store::failing::FailingStore;

    fn unreachable() -> Arc<FailingStore> {
        Arc::new(FailingStore::unreachable())
    }

    fn node() -> Object {
        let metadata = Metadata::new("a", Timestamp::UNIX_EPOCH);
        Object::Node(Node { metadata, spec: NodeSpec::default(), status: NodeStatus::default() })
    }

    #[test]
    fn the_leader_is_that_of_the_inner_store() {
        let store = Metered::new(unreachable(), Metrics::default(), Arc::default());
        assert_eq!(store.leader(), Some(FailingStore::LEADER));
    }

    #[tokio::test]
    async fn writes_are_counted_and_decide_the_readiness() {
        let (metrics, readiness) = (Metrics::default(), Arc::<Readiness>::default());
        readiness.reached(ReadinessPhase::Leading);
        let count = |operation, result| {
            metrics.store_writes.get(&[("kind", "node"), ("operation", operation), ("result", result)])
        };
        let store = Metered::new(Arc::new(MemoryStore::new()), metrics.clone(), Arc::clone(&readiness));
        store.put(node()).await.unwrap();
        store.put(node()).await.unwrap_err();
        store.remove(&node().key(), ResourceVersion::new(1)).await.unwrap();
        assert_eq!((count("put", "ok"), count("put", "conflict"), count("remove", "ok")), (1, 1, 1));
        assert!(readiness.check().is_ok());
        let away = Metered::new(unreachable(), metrics.clone(), Arc::clone(&readiness));
        away.put(node()).await.unwrap_err();
        assert_eq!(count("put", "unavailable"), 1);
        assert!(readiness.check().unwrap_err().contains("no route"));
        store.put(node()).await.unwrap();
        assert!(readiness.check().is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn a_store_that_answers_again_is_noticed_without_a_write() {
        let readiness = Arc::<Readiness>::default();
        readiness.reached(ReadinessPhase::Leading);
        let away = unreachable();
        let inner: Arc<dyn ObjectStore> = Arc::<FailingStore>::clone(&away);
        let store = Arc::new(Metered::new(inner, Metrics::default(), Arc::clone(&readiness)));
        let following = tokio::spawn(Arc::clone(&store).follow());
        store.put(node()).await.unwrap_err();
        tokio::time::sleep(CHECK_EVERY * 2).await;
        assert!(readiness.check().unwrap_err().contains("still no route"));
        away.recover();
        tokio::time::sleep(CHECK_EVERY * 2).await;
        readiness.check().unwrap();
        following.abort();
    }
}
