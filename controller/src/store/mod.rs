//! Stores of objects.

pub(crate) mod cache;
mod change;
#[cfg(test)]
pub(crate) mod failing;
mod memory;
mod redb;
mod unknown_fields;

use std::path::PathBuf;
use std::sync::RwLockReadGuard;

use async_trait::async_trait;
use shorthorn_controller_core::ClusterState;
use shorthorn_controller_core::objects::{Key, Object, Replica, ResourceVersion};
use thiserror::Error;
use tokio::sync::broadcast;

pub use self::change::{ChangeError, change};
pub use self::memory::MemoryStore;
pub use self::redb::RedbStore;

/// The number of changes that a slow listener may be behind before it is notified that it missed some.
pub const CHANGES_MAX: usize = 4096;

/// Objects with versions. A write names the version that it was made from, and fails with
/// [`ObjectStoreError::Conflict`] if another write came in between.
#[async_trait]
pub trait ObjectStore: Send + Sync + 'static {
    /// Returns all stored objects, as of the last write. The guard must not be held across an await.
    fn state(&self) -> RwLockReadGuard<'_, ClusterState>;

    /// Stores the object durably if the stored version is still its own (none for a new one), and returns it
    /// with its new version.
    async fn put(&self, object: Object) -> Result<Object, ObjectStoreError>;

    /// Removes the object durably if it still has this version.
    async fn remove(&self, key: &Key, version: Option<ResourceVersion>) -> Result<(), ObjectStoreError>;

    /// Reserves the places of replicas that are about to be stored. False: one of them takes no replica any
    /// more, and none is reserved.
    #[must_use]
    fn reserve(&self, replicas: Vec<Replica>) -> bool;

    /// Drops the reservations of replicas that are stored, or will not be.
    fn forget_reservations(&self, names: &[String]);

    /// Checks that the store takes writes. Called while it does not answer, so that its return is noticed
    /// without a write.
    async fn check(&self) -> Result<(), ObjectStoreError> {
        Ok(())
    }

    /// Returns the key of everything that is written from now on.
    fn changes(&self) -> broadcast::Receiver<Key>;

    /// Returns the cluster whose volumes it keeps: the same for every controller with this store, and for no
    /// other.
    fn cluster(&self) -> &str;

    /// The number of this leader, which rises with every leader; none: the store has one controller at a
    /// time.
    fn leader(&self) -> Option<u64> {
        None
    }
}

/// The reason why a store has failed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ObjectStoreError {
    /// Another write came first: the caller has to read again.
    #[error(
        "{key} was changed meanwhile (version {}, not {})",
        .found.map_or(0, ResourceVersion::get), .expected.map_or(0, ResourceVersion::get)
    )]
    Conflict {
        /// The object to write.
        key: Key,
        /// The version that the write was made from; none: a new object.
        expected: Option<ResourceVersion>,
        /// The stored version; none: no object is stored.
        found: Option<ResourceVersion>,
    },
    /// The store does not answer now. The write may have succeeded all the same. Try again.
    #[error("the store is unreachable: {message}")]
    Unavailable {
        /// The failed request and the error.
        message: String,
    },
    /// The store does not take this object, however often it is tried.
    #[error("{key} cannot be stored: {message}")]
    Refused {
        /// The object to write.
        key: Key,
        /// The reason of the refusal.
        message: String,
    },
    /// Another controller has the file.
    #[error(
        "{0} is in use by another controller: stop that controller, or give each one a --store of its own"
    )]
    Locked(PathBuf),
    /// The file cannot be opened.
    #[error("cannot open the store {path}: {message}")]
    Open {
        /// Path of the database.
        path: PathBuf,
        /// The error of the database or the system.
        message: String,
    },
    /// The file exists and is not a store of this version.
    #[error("the store {path} cannot be used: {message}")]
    Format {
        /// Path of the database.
        path: PathBuf,
        /// The problem of the file.
        message: String,
    },
    /// A write failed. The store refuses more of them until it is opened again.
    #[error(
        "cannot write the store {path}: {message}; free space or replace the disk, and start the controller \
         again"
    )]
    Write {
        /// Path of the database.
        path: PathBuf,
        /// The error of the database or the system.
        message: String,
    },
}

#[cfg(test)]
mod tests;
