mod disk;
mod group;

use std::collections::BTreeSet;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, RwLockReadGuard};
use std::time::Duration;

use async_trait::async_trait;
use redb::{Database, DatabaseError, ReadableDatabase, ReadableTable, TableDefinition};
use serde_json::Value;
use shorthorn_controller_core::ClusterState;
use shorthorn_controller_core::left_out::LeftOut;
use shorthorn_controller_core::objects::{Key, Kind, Object, Replica};
use tokio::sync::broadcast;

use self::disk::Disk;
use self::group::{Queue, Write, Writer};
use super::cache::Cache;
use super::{Store, StoreError};
use crate::keeper::{Keeper, KeeperError};
use crate::random::new_cluster;

/// `volume/<name>` and so on, to the object as JSON.
const OBJECTS: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("objects");
/// `format` and `revision`.
const NUMBERS: TableDefinition<'_, &str, u64> = TableDefinition::new("numbers");
/// `cluster`.
const TEXTS: TableDefinition<'_, &str, &str> = TableDefinition::new("texts");
/// `authority`: the state of the cluster's CA.
const SECRETS: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("secrets");
const AUTHORITY: &str = "authority";
/// Value of `format`. A release raises it if an older controller could no longer read the file.
const FORMAT: u64 = 1;

/// A store in one file, for one controller at a time. Every write is on the disk before it counts.
#[derive(Debug)]
pub struct RedbStore {
    inner: Arc<Inner>,
}

/// The remedy for an object that cannot be read.
const REMEDY: &str = "start the release of the controller that stored it, or restore the store from a backup";

/// Size of the part of the file that is kept in memory. All objects are there anyway: only writes need its
/// pages.
const CACHE_BYTES: usize = 16 << 20;

/// The longest that a caller waits for the disk. A commit waits for one fsync. A disk that takes longer has
/// failed, and the caller may try again.
const DISK_LIMIT: Duration = Duration::from_secs(30);

#[derive(Debug)]
struct Inner {
    path: PathBuf,
    /// Drawn when the file was made.
    cluster: String,
    cache: Cache,
    /// Objects of the file that cannot be read. They stay as they are: a new object never replaces one.
    unreadable: BTreeSet<String>,
    queue: Mutex<Queue>,
    /// A commit has ended.
    committed: Condvar,
    /// The writer, which the caller that commits locks.
    writer: Mutex<Writer>,
    disk: Disk,
    /// The number of states of the CA that were to be saved.
    saves: AtomicU64,
}

impl RedbStore {
    /// Opens the file, and makes it if it is missing.
    ///
    /// # Errors
    /// [`StoreError::Locked`] if another controller has it; else the problem of the file.
    pub fn open(path: &Path) -> Result<RedbStore, StoreError> {
        let database =
            Database::builder().set_cache_size(CACHE_BYTES).create(path).map_err(|error| match error {
                DatabaseError::DatabaseAlreadyOpen => StoreError::Locked(path.to_owned()),
                error => StoreError::Open { path: path.to_owned(), message: error.to_string() },
            })?;
        // It holds the secrets of the volumes.
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))
            .map_err(|error| StoreError::Open { path: path.to_owned(), message: error.to_string() })?;
        RedbStore::over(path, database)
    }

    /// The store in that database.
    fn over(path: &Path, database: Database) -> Result<RedbStore, StoreError> {
        RedbStore::over_disk(path, database, Disk::new(DISK_LIMIT))
    }

    /// The store in that database on `disk`.
    fn over_disk(path: &Path, database: Database, disk: Disk) -> Result<RedbStore, StoreError> {
        let drawn = new_cluster()
            .map_err(|error| StoreError::Open { path: path.to_owned(), message: error.to_string() })?;
        let (revision, cluster) = prepare(&database, &drawn).map_err(|error| error.at(path))?;
        let (state, unreadable) = load(&database).map_err(|error| error.at(path))?;
        let inner = Inner {
            path: path.to_owned(),
            cluster,
            cache: Cache::new(state),
            unreadable,
            queue: Mutex::default(),
            committed: Condvar::new(),
            writer: Mutex::new(Writer::new(database, revision)),
            disk,
            saves: AtomicU64::new(0),
        };
        Ok(RedbStore { inner: Arc::new(inner) })
    }

    /// The place for the CA in this file.
    #[must_use]
    pub fn keeper(&self) -> Arc<dyn Keeper> {
        Arc::new(RedbKeeper(RedbStore { inner: Arc::clone(&self.inner) }))
    }

    /// Runs `write` on a thread that may block. It completes even if the caller is gone, so that memory and
    /// file never differ. A disk that hangs holds up its threads, and no caller longer than the limit.
    async fn blocking<T: Send + 'static>(
        &self,
        write: impl FnOnce(&Inner) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, StoreError> {
        // No thread waits behind one that hangs already.
        self.inner.disk.check().map_err(|hung| self.inner.hung(hung))?;
        let inner = Arc::clone(&self.inner);
        let writing = tokio::task::spawn_blocking(move || write(&inner));
        match tokio::time::timeout(self.inner.disk.limit(), writing).await {
            Ok(Ok(result)) => result,
            Ok(Err(error)) => {
                Err(StoreError::Write { path: self.inner.path.clone(), message: error.to_string() })
            }
            Err(_) => Err(self.inner.hung(self.inner.disk.limit())),
        }
    }
}

#[async_trait]
impl Store for RedbStore {
    fn state(&self) -> RwLockReadGuard<'_, ClusterState> {
        self.inner.cache.state()
    }

    async fn put(&self, object: Object) -> Result<Object, StoreError> {
        let stored = self.blocking(move |inner| inner.write(Write::Put(object))).await?;
        stored.ok_or_else(|| StoreError::Write {
            path: self.inner.path.clone(),
            message: "the answer to another write came".to_owned(),
        })
    }

    async fn remove(&self, key: &Key, version: u64) -> Result<(), StoreError> {
        let key = key.clone();
        self.blocking(move |inner| inner.write(Write::Remove(key, version))).await.map(drop)
    }

    fn reserve(&self, replicas: Vec<Replica>) -> bool {
        self.inner.cache.reserve(replicas)
    }

    fn forget_reservations(&self, names: &[String]) {
        self.inner.cache.forget_reservations(names);
    }

    async fn check(&self) -> Result<(), StoreError> {
        self.blocking(|inner| {
            let writer = inner.writer.lock().unwrap_or_else(PoisonError::into_inner);
            let _access = inner.disk.begin();
            commit_nothing(&writer.database).map_err(|error| inner.write_error(&error))
        })
        .await
    }

    fn changes(&self) -> broadcast::Receiver<Key> {
        self.inner.cache.changes()
    }

    fn cluster(&self) -> &str {
        &self.inner.cluster
    }
}

/// Commits the format that is stored already: the disk has to take it.
fn commit_nothing(database: &Database) -> Result<(), redb::Error> {
    let transaction = database.begin_write()?;
    transaction.open_table(NUMBERS)?.insert("format", FORMAT)?;
    transaction.commit()?;
    Ok(())
}

impl Inner {
    /// The error of a write that has not ended. It may still succeed, and memory has its result then.
    fn hung(&self, waited: Duration) -> StoreError {
        let (path, waited) = (self.path.display(), waited.as_secs_f64());
        StoreError::Unavailable {
            message: format!("{path}: a write has not ended within {waited:.1} s: look at its disk"),
        }
    }

    fn write_error(&self, error: &redb::Error) -> StoreError {
        StoreError::Write { path: self.path.clone(), message: error.to_string() }
    }
}

/// The CA in the file of the store: both have one backup.
#[derive(Debug)]
struct RedbKeeper(RedbStore);

#[async_trait]
impl Keeper for RedbKeeper {
    async fn load(&self) -> Result<Option<Vec<u8>>, KeeperError> {
        let loaded = self.0.blocking(|inner| {
            let writer = inner.writer.lock().unwrap_or_else(PoisonError::into_inner);
            let _access = inner.disk.begin();
            authority(&writer.database).map_err(|error| inner.write_error(&error))
        });
        loaded.await.map_err(|error| KeeperError(error.to_string()))
    }

    async fn save(&self, state: Vec<u8>) -> Result<(), KeeperError> {
        let number = self.0.inner.saves.fetch_add(1, Ordering::SeqCst) + 1;
        let saved = self.0.blocking(move |inner| {
            let writer = inner.writer.lock().unwrap_or_else(PoisonError::into_inner);
            if inner.saves.load(Ordering::SeqCst) != number {
                // It has waited for so long that its caller got an error, and has gone on to another state.
                let message = "another state of the CA was to be stored since".to_owned();
                return Err(StoreError::Unavailable { message });
            }
            let _access = inner.disk.begin();
            save_authority(&writer.database, &state).map_err(|error| inner.write_error(&error))
        });
        saved.await.map_err(|error| KeeperError(error.to_string()))
    }
}

fn authority(database: &Database) -> Result<Option<Vec<u8>>, redb::Error> {
    let secrets = match database.begin_read()?.open_table(SECRETS) {
        Ok(secrets) => secrets,
        Err(redb::TableError::TableDoesNotExist(_)) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    Ok(secrets.get(AUTHORITY)?.map(|state| state.value().to_vec()))
}

fn save_authority(database: &Database, state: &[u8]) -> Result<(), redb::Error> {
    let transaction = database.begin_write()?;
    transaction.open_table(SECRETS)?.insert(AUTHORITY, state)?;
    transaction.commit()?;
    Ok(())
}

/// A problem with the content of a file.
enum Damage {
    Database(redb::Error),
    Format(String),
}

impl<E: Into<redb::Error>> From<E> for Damage {
    fn from(error: E) -> Damage {
        Damage::Database(error.into())
    }
}

impl Damage {
    fn at(self, path: &Path) -> StoreError {
        let path = path.to_owned();
        match self {
            Damage::Database(error) => StoreError::Open { path, message: error.to_string() },
            Damage::Format(message) => StoreError::Format { path, message },
        }
    }
}

/// Makes missing tables, and checks the format. Returns the newest version given out, and the name of the
/// cluster, which is `drawn` if the file has none yet.
fn prepare(database: &Database, drawn: &str) -> Result<(u64, String), Damage> {
    let transaction = database.begin_write()?;
    let (revision, cluster) = {
        transaction.open_table(OBJECTS)?;
        let mut texts = transaction.open_table(TEXTS)?;
        let cluster =
            texts.get("cluster")?.map_or_else(|| drawn.to_owned(), |value| value.value().to_owned());
        texts.insert("cluster", cluster.as_str())?;
        let mut numbers = transaction.open_table(NUMBERS)?;
        let format = numbers.get("format")?.map(|value| value.value());
        match format {
            None => drop(numbers.insert("format", FORMAT)?),
            Some(FORMAT) => {}
            Some(other) => {
                let message =
                    format!("it has format {other}, this controller knows {FORMAT}: use a newer one");
                return Err(Damage::Format(message));
            }
        }
        (numbers.get("revision")?.map_or(0, |value| value.value()), cluster)
    };
    transaction.commit()?;
    Ok((revision, cluster))
}

/// Loads the objects, and the names of unreadable ones: one bad object is reported, and does not stop the
/// others.
fn load(database: &Database) -> Result<(ClusterState, BTreeSet<String>), Damage> {
    let (mut state, mut unreadable) = (ClusterState::default(), BTreeSet::new());
    let objects = database.begin_read()?.open_table(OBJECTS)?;
    for entry in objects.iter()? {
        let (key, value) = entry?;
        match serde_json::from_slice::<Object>(value.value()) {
            Ok(object) => state.insert(object),
            Err(error) => {
                tracing::error!(object = key.value(), %error, "this object cannot be read and is left out");
                unreadable.insert(key.value().to_owned());
                if let Some(key) = key_of(key.value()) {
                    let raw: Option<Value> = serde_json::from_slice(value.value()).ok();
                    let left_out = LeftOut::new(key.kind, raw.as_ref(), error.to_string(), REMEDY);
                    state.leave_out(key, left_out);
                }
            }
        }
    }
    Ok((state, unreadable))
}

fn name(key: &Key) -> String {
    format!("{}/{}", key.kind.as_str(), key.name)
}

/// The key of that name; none: this version does not know objects of its kind.
fn key_of(name: &str) -> Option<Key> {
    let (kind, name) = name.split_once('/')?;
    let kinds = [Kind::Volume, Kind::Engine, Kind::Replica, Kind::Node];
    Some(Key::new(kinds.into_iter().find(|known| known.as_str() == kind)?, name))
}
