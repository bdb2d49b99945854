//! A store in one file.
//!
//! A write waits in `group_commit` until it is part of a commit. `disk` bounds the waits for the disk.
//! `writer` decides and commits under its lock, and `file` has the tables. `ca` keeps the cluster's CA in the
//! same file.

mod ca;
mod disk;
mod file;
mod group_commit;
mod writer;

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLockReadGuard};
use std::time::Duration;

use async_trait::async_trait;
use shorthorn_controller_core::ClusterState;
use shorthorn_controller_core::objects::{Key, Object, Replica, ResourceVersion};
use tokio::sync::broadcast;

use self::ca::{RedbCa, Saves};
use self::disk::TimedDisk;
use self::file::StoreFile;
use self::group_commit::{GroupCommit, Write, WriteResult};
use self::writer::Writer;
use super::cache::Cache;
use super::{ObjectStore, ObjectStoreError};
use crate::ca_storage::CaStorage;
use crate::random::new_cluster;

/// The longest that a caller waits for the disk. A commit waits for one fsync. A disk that takes longer has
/// failed, and the caller may try again.
const DISK_LIMIT: Duration = Duration::from_secs(30);

/// A store in one file, for one controller at a time. Every write is on the disk before it counts.
#[derive(Debug)]
pub struct RedbStore {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    path: PathBuf,
    /// Drawn when the file was made.
    cluster: String,
    cache: Cache,
    group_commit: GroupCommit,
    disk: TimedDisk<Writer>,
    saves: Saves,
}

impl RedbStore {
    /// Opens the file, and makes it if it is missing.
    ///
    /// # Errors
    /// [`ObjectStoreError::Locked`] if another controller has it; else the problem of the file.
    pub fn open(path: &Path) -> Result<RedbStore, ObjectStoreError> {
        RedbStore::over(StoreFile::open(path)?, DISK_LIMIT)
    }

    /// The store in that file. No caller waits longer for its disk than the limit.
    fn over(file: StoreFile, limit: Duration) -> Result<RedbStore, ObjectStoreError> {
        let path = file.path().to_owned();
        let drawn = new_cluster()
            .map_err(|error| ObjectStoreError::Open { path: path.clone(), message: error.to_string() })?;
        let (revision, cluster) = file.prepare(&drawn)?;
        let (state, unreadable) = file.load()?;
        let inner = Inner {
            cluster,
            cache: Cache::new(state),
            group_commit: GroupCommit::new(path.clone()),
            disk: TimedDisk::new(limit, Writer::new(file, revision, unreadable)),
            saves: Saves::default(),
            path,
        };
        Ok(RedbStore { inner: Arc::new(inner) })
    }

    /// The place for the CA in this file.
    #[must_use]
    pub fn ca_storage(&self) -> Arc<dyn CaStorage> {
        Arc::new(RedbCa(RedbStore { inner: Arc::clone(&self.inner) }))
    }

    /// Runs `write` on a thread that may block. It completes even if the caller is gone, so that memory and
    /// file never differ. A disk that hangs holds up its threads, and no caller longer than the limit.
    async fn blocking<T: Send + 'static>(
        &self,
        write: impl FnOnce(&Inner) -> Result<T, ObjectStoreError> + Send + 'static,
    ) -> Result<T, ObjectStoreError> {
        // No thread waits behind one that hangs already.
        self.inner.disk.check().map_err(|hung| self.inner.hung(hung))?;
        let inner = Arc::clone(&self.inner);
        let writing = tokio::task::spawn_blocking(move || write(&inner));
        match tokio::time::timeout(self.inner.disk.limit(), writing).await {
            Ok(Ok(result)) => result,
            Ok(Err(error)) => {
                Err(ObjectStoreError::Write { path: self.inner.path.clone(), message: error.to_string() })
            }
            Err(_) => Err(self.inner.hung(self.inner.disk.limit())),
        }
    }
}

#[async_trait]
impl ObjectStore for RedbStore {
    fn state(&self) -> RwLockReadGuard<'_, ClusterState> {
        self.inner.cache.state()
    }

    async fn put(&self, object: Object) -> Result<Object, ObjectStoreError> {
        let stored = self.blocking(move |inner| inner.write(Write::Put(object))).await?;
        stored.ok_or_else(|| ObjectStoreError::Write {
            path: self.inner.path.clone(),
            message: "the answer to another write came".to_owned(),
        })
    }

    async fn remove(&self, key: &Key, version: Option<ResourceVersion>) -> Result<(), ObjectStoreError> {
        let key = key.clone();
        self.blocking(move |inner| inner.write(Write::Remove(key, version))).await.map(drop)
    }

    fn reserve(&self, replicas: Vec<Replica>) -> bool {
        self.inner.cache.reserve(replicas)
    }

    fn forget_reservations(&self, names: &[String]) {
        self.inner.cache.forget_reservations(names);
    }

    async fn check(&self) -> Result<(), ObjectStoreError> {
        self.blocking(|inner| inner.disk.access().file().commit_nothing()).await
    }

    fn changes(&self) -> broadcast::Receiver<Key> {
        self.inner.cache.changes()
    }

    fn cluster(&self) -> &str {
        &self.inner.cluster
    }
}

impl Inner {
    /// Returns once the write is durable, or refused.
    fn write(&self, write: Write) -> WriteResult {
        self.group_commit.write(write, |batch| self.disk.access().commit(&self.cache, batch))
    }

    /// The error of a write that has not ended. It may still succeed, and memory has its result then.
    fn hung(&self, waited: Duration) -> ObjectStoreError {
        let (path, waited) = (self.path.display(), waited.as_secs_f64());
        ObjectStoreError::Unavailable {
            message: format!("{path}: a write has not ended within {waited:.1} s: check its disk"),
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
