//! Waits for the disk of the store. The kernel bounds no fsync: a disk that hangs lets no write end and no
//! thread that waits for it. Callers get an error after a limit, and no more threads begin to wait.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The disk, as far as one thread at a time uses it.
#[derive(Debug)]
pub(super) struct Disk {
    limit: Duration,
    /// Begin of the access that has not ended.
    since: Mutex<Option<Instant>>,
}

/// An access; its end is the drop.
#[derive(Debug)]
pub(super) struct Access<'a>(&'a Disk);

impl Drop for Access<'_> {
    fn drop(&mut self) {
        *self.0.since() = None;
    }
}

impl Disk {
    pub(super) fn new(limit: Duration) -> Disk {
        Disk { limit, since: Mutex::default() }
    }

    /// The longest that a caller waits.
    pub(super) fn limit(&self) -> Duration {
        self.limit
    }

    /// Begins an access, under the lock of the writer.
    pub(super) fn begin(&self) -> Access<'_> {
        *self.since() = Some(Instant::now());
        Access(self)
    }

    /// Checks that no access lasts longer than the limit.
    ///
    /// # Errors
    /// The time that it has lasted.
    pub(super) fn check(&self) -> Result<(), Duration> {
        let waited = self.since().map_or(Duration::ZERO, |since| since.elapsed());
        if waited < self.limit { Ok(()) } else { Err(waited) }
    }

    fn since(&self) -> MutexGuard<'_, Option<Instant>> {
        self.since.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::path::Path;
    use std::sync::atomic::Ordering;
    use std::sync::{Arc, Condvar, PoisonError};

    use redb::backends::InMemoryBackend;
    use redb::{Database, StorageBackend};
    use shorthorn_controller_core::Timestamp;
    use shorthorn_controller_core::objects::{Node, Object};

    use super::*;
    use crate::metrics::{Metered, Metrics, Readiness, ReadinessPhase};
    use crate::store::{RedbStore, Store, StoreError};

    const LIMIT: Duration = Duration::from_millis(200);

    /// A disk whose fsync waits while it is told to.
    #[derive(Debug)]
    struct Hanging {
        disk: InMemoryBackend,
        hangs: Arc<(Mutex<bool>, Condvar)>,
    }

    impl StorageBackend for Hanging {
        fn len(&self) -> io::Result<u64> {
            self.disk.len()
        }
        fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
            self.disk.read(offset, out)
        }
        fn set_len(&self, len: u64) -> io::Result<()> {
            self.disk.set_len(len)
        }
        fn sync_data(&self) -> io::Result<()> {
            let (hangs, changed) = &*self.hangs;
            let hangs = hangs.lock().unwrap_or_else(PoisonError::into_inner);
            drop(changed.wait_while(hangs, |hangs| *hangs).unwrap_or_else(PoisonError::into_inner));
            self.disk.sync_data()
        }
        fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
            self.disk.write(offset, data)
        }
    }

    fn set(hangs: &(Mutex<bool>, Condvar), value: bool) {
        *hangs.0.lock().unwrap() = value;
        hangs.1.notify_all();
    }

    fn node(name: &str) -> Object {
        Node::new(name, Timestamp::UNIX_EPOCH).into()
    }

    #[tokio::test]
    async fn a_disk_that_hangs_holds_up_no_caller_and_is_shown() {
        let hangs = Arc::<(Mutex<bool>, Condvar)>::default();
        let backend = Hanging { disk: InMemoryBackend::new(), hangs: Arc::clone(&hangs) };
        let database = Database::builder().create_with_backend(backend).unwrap();
        let store = RedbStore::over_disk(Path::new("store"), database, Disk::new(LIMIT)).unwrap();
        let keeper = store.keeper();
        let readiness = Arc::<Readiness>::default();
        readiness.reached(ReadinessPhase::Leading);
        let store = Arc::new(Metered::new(Arc::new(store), Metrics::default(), Arc::clone(&readiness)));
        store.put(node("a")).await.unwrap();
        set(&hangs, true);
        let began = Instant::now();
        // One hangs in its fsync; the others wait behind it.
        let writing: Vec<_> = ["b", "c", "d"]
            .map(|name| {
                let store = Arc::clone(&store);
                tokio::spawn(async move { store.put(node(name)).await })
            })
            .into();
        for writing in writing {
            let answer = writing.await.unwrap();
            assert!(matches!(&answer, Err(StoreError::Unavailable { .. })), "{answer:?}");
        }
        let unready = readiness.check().unwrap_err();
        assert!(unready.contains("has not ended within") && unready.contains("its disk"), "{unready}");
        assert!(store.put(node("x")).await.is_err());
        // From here on, no caller waits.
        let before = Instant::now();
        for name in ["e", "f", "g"] {
            assert!(store.put(node(name)).await.is_err());
        }
        assert!(keeper.save(b"{}".to_vec()).await.is_err() && keeper.load().await.is_err());
        assert!(before.elapsed() < LIMIT, "{:?}", before.elapsed());
        assert_eq!(store.state().nodes.keys().collect::<Vec<_>>(), ["a"]);
        assert!(began.elapsed() < Duration::from_secs(60));
        let following = tokio::spawn(Arc::clone(&store).follow());
        set(&hangs, false);
        // No write is needed for that.
        let deadline = Instant::now() + Duration::from_secs(60);
        while readiness.check().is_err() {
            assert!(Instant::now() < deadline, "the store does not come back");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        following.abort();
        // The writes that had begun count once the disk answers.
        store.put(node("h")).await.unwrap();
        let names: Vec<String> = store.state().nodes.keys().cloned().collect();
        assert!(names.contains(&"b".to_owned()) && !names.contains(&"e".to_owned()), "{names:?}");
    }

    /// A state of the CA waits behind other writes for so long that its caller goes on to another state.
    #[tokio::test]
    #[allow(clippy::await_holding_lock, reason = "the lock is what the write waits for")]
    async fn an_older_state_of_the_ca_never_replaces_a_later_one() {
        let database = Database::builder().create_with_backend(InMemoryBackend::new()).unwrap();
        let store = RedbStore::over_disk(Path::new("store"), database, Disk::new(LIMIT)).unwrap();
        let keeper = store.keeper();
        let busy = store.inner.writer.lock().unwrap();
        let late = keeper.save(b"older".to_vec()).await;
        assert!(late.is_err(), "other writes hold it up");
        store.inner.saves.fetch_add(1, Ordering::SeqCst);
        drop(busy);
        let deadline = Instant::now() + Duration::from_secs(60);
        while Arc::strong_count(&store.inner) > 2 {
            assert!(Instant::now() < deadline, "the older write does not end");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        assert_eq!(keeper.load().await.unwrap(), None);
        keeper.save(b"later".to_vec()).await.unwrap();
        assert_eq!(keeper.load().await.unwrap().as_deref(), Some(&b"later"[..]));
    }
}
