//! The file of the store: its tables, and their transactions. docs/formats.md has the format.

use std::collections::BTreeSet;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use redb::{Database, DatabaseError, ReadableDatabase, ReadableTable, TableDefinition};
use serde_json::Value;
use shorthorn_controller_core::ClusterState;
use shorthorn_controller_core::left_out_objects::LeftOut;
use shorthorn_controller_core::objects::{Key, Kind, Object};

use crate::store::ObjectStoreError;

/// `volume/<name>` and so on, to the object as JSON.
pub(super) const OBJECTS: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("objects");
/// `format` and `revision`.
const NUMBERS: TableDefinition<'_, &str, u64> = TableDefinition::new("numbers");
/// `cluster`.
const TEXTS: TableDefinition<'_, &str, &str> = TableDefinition::new("texts");
/// `authority`: the state of the cluster's CA.
const SECRETS: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("secrets");
const AUTHORITY: &str = "authority";
/// Value of `format`. A release raises it if an older controller could no longer read the file.
const FORMAT: u64 = 1;
/// Size of the part of the file that is kept in memory. All objects are there anyway: only writes need its
/// pages.
const CACHE_BYTES: usize = 16 << 20;
/// The remedy for an object that cannot be read.
const REMEDY: &str = "start the release of the controller that stored it, or restore the store from a backup";

/// An open file.
#[derive(Debug)]
pub(super) struct StoreFile {
    path: PathBuf,
    database: Database,
}

impl StoreFile {
    /// Opens the file, and makes it if it is missing.
    ///
    /// # Errors
    /// [`ObjectStoreError::Locked`] if another controller has it; else [`ObjectStoreError::Open`].
    pub(super) fn open(path: &Path) -> Result<StoreFile, ObjectStoreError> {
        let database =
            Database::builder().set_cache_size(CACHE_BYTES).create(path).map_err(|error| match error {
                DatabaseError::DatabaseAlreadyOpen => ObjectStoreError::Locked(path.to_owned()),
                error => ObjectStoreError::Open { path: path.to_owned(), message: error.to_string() },
            })?;
        // It holds the secrets of the volumes.
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))
            .map_err(|error| ObjectStoreError::Open { path: path.to_owned(), message: error.to_string() })?;
        Ok(StoreFile::over(path, database))
    }

    pub(super) fn over(path: &Path, database: Database) -> StoreFile {
        StoreFile { path: path.to_owned(), database }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Makes missing tables, and checks the format. Returns the newest version given out, and the name of the
    /// cluster, which is `drawn` if the file has none yet.
    ///
    /// # Errors
    /// [`ObjectStoreError::Open`] or [`ObjectStoreError::Format`].
    pub(super) fn prepare(&self, drawn: &str) -> Result<(u64, String), ObjectStoreError> {
        prepare(&self.database, drawn).map_err(|damage| damage.at(&self.path))
    }

    /// Loads the objects, and the names of unreadable ones: one bad object is reported, and does not stop the
    /// others.
    ///
    /// # Errors
    /// [`ObjectStoreError::Open`].
    pub(super) fn load(&self) -> Result<(ClusterState, BTreeSet<String>), ObjectStoreError> {
        load(&self.database).map_err(|damage| damage.at(&self.path))
    }

    /// Returns the stored text of an object.
    pub(super) fn stored(&self, name: &str) -> Result<Option<String>, redb::Error> {
        let objects = self.database.begin_read()?.open_table(OBJECTS)?;
        let Some(stored) = objects.get(name)? else { return Ok(None) };
        let text = std::str::from_utf8(stored.value());
        Ok(Some(text.map_err(|error| redb::Error::Io(io::Error::other(error)))?.to_owned()))
    }

    /// Stores the texts under their names, and the newest version given out; all of that durably, or nothing.
    /// A name without a text is removed.
    pub(super) fn commit<'a>(
        &self,
        changes: impl Iterator<Item = (&'a str, Option<&'a [u8]>)>,
        revision: u64,
    ) -> Result<(), redb::Error> {
        // The default durability: the commit returns when the file is synced.
        let transaction = self.database.begin_write()?;
        {
            let mut objects = transaction.open_table(OBJECTS)?;
            for (name, text) in changes {
                match text {
                    Some(text) => drop(objects.insert(name, text)?),
                    None => drop(objects.remove(name)?),
                }
            }
            transaction.open_table(NUMBERS)?.insert("revision", revision)?;
        }
        transaction.commit()?;
        Ok(())
    }

    /// Commits the format that is stored already: the disk has to take it.
    ///
    /// # Errors
    /// [`ObjectStoreError::Write`].
    pub(super) fn commit_nothing(&self) -> Result<(), ObjectStoreError> {
        commit_format(&self.database).map_err(|error| self.write_error(&error))
    }

    /// Returns the state of the cluster's CA; none: no state was saved.
    ///
    /// # Errors
    /// [`ObjectStoreError::Write`].
    pub(super) fn authority(&self) -> Result<Option<Vec<u8>>, ObjectStoreError> {
        authority(&self.database).map_err(|error| self.write_error(&error))
    }

    /// Stores the state of the cluster's CA durably.
    ///
    /// # Errors
    /// [`ObjectStoreError::Write`].
    pub(super) fn save_authority(&self, state: &[u8]) -> Result<(), ObjectStoreError> {
        save_authority(&self.database, state).map_err(|error| self.write_error(&error))
    }

    pub(super) fn write_error(&self, error: &redb::Error) -> ObjectStoreError {
        ObjectStoreError::Write { path: self.path.clone(), message: error.to_string() }
    }
}

pub(super) fn name(key: &Key) -> String {
    format!("{}/{}", key.kind.as_str(), key.name)
}

/// The key of that name; none: this version does not know objects of its kind.
fn key_of(name: &str) -> Option<Key> {
    let (kind, name) = name.split_once('/')?;
    let kinds = [Kind::Volume, Kind::Engine, Kind::Replica, Kind::Node];
    Some(Key::new(kinds.into_iter().find(|known| known.as_str() == kind)?, name))
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
    fn at(self, path: &Path) -> ObjectStoreError {
        let path = path.to_owned();
        match self {
            Damage::Database(error) => ObjectStoreError::Open { path, message: error.to_string() },
            Damage::Format(message) => ObjectStoreError::Format { path, message },
        }
    }
}

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
                    format!("format {other}, and this controller knows {FORMAT}: use a newer controller");
                return Err(Damage::Format(message));
            }
        }
        (numbers.get("revision")?.map_or(0, |value| value.value()), cluster)
    };
    transaction.commit()?;
    Ok((revision, cluster))
}

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

fn commit_format(database: &Database) -> Result<(), redb::Error> {
    let transaction = database.begin_write()?;
    transaction.open_table(NUMBERS)?.insert("format", FORMAT)?;
    transaction.commit()?;
    Ok(())
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

#[cfg(test)]
mod tests {
    use redb::backends::InMemoryBackend;

    use super::*;

    fn file() -> StoreFile {
        let database = Database::builder().create_with_backend(InMemoryBackend::new()).unwrap();
        StoreFile::over(Path::new("store"), database)
    }

    #[test]
    fn the_cluster_and_the_newest_version_stay() {
        let file = file();
        assert_eq!(file.prepare("one").unwrap(), (0, "one".to_owned()));
        file.commit(std::iter::empty(), 7).unwrap();
        assert_eq!(file.prepare("other").unwrap(), (7, "one".to_owned()));
        let transaction = file.database.begin_write().unwrap();
        transaction.open_table(NUMBERS).unwrap().insert("format", FORMAT + 1).unwrap();
        transaction.commit().unwrap();
        assert!(
            matches!(file.prepare("other"), Err(ObjectStoreError::Format { .. })),
            "a later release made it"
        );
    }

    #[test]
    fn a_commit_replaces_and_removes_texts() {
        let file = file();
        file.prepare("one").unwrap();
        file.commit([("node/a", Some(&b"1"[..])), ("node/b", Some(&b"2"[..]))].into_iter(), 2).unwrap();
        file.commit([("node/a", None), ("node/b", Some(&b"3"[..]))].into_iter(), 4).unwrap();
        assert_eq!(file.stored("node/a").unwrap(), None);
        assert_eq!(file.stored("node/b").unwrap().as_deref(), Some("3"));
    }

    #[test]
    fn objects_that_cannot_be_read_are_listed() {
        let file = file();
        file.prepare("one").unwrap();
        let texts = [("node/a", Some(&b"{"[..])), ("unicorn/a", Some(&b"{}"[..]))];
        file.commit(texts.into_iter(), 2).unwrap();
        let (state, unreadable) = file.load().unwrap();
        assert_eq!(unreadable.iter().collect::<Vec<_>>(), ["node/a", "unicorn/a"]);
        assert!(state.nodes.is_empty() && state.unknown(&Key::new(Kind::Node, "a")).is_some());
    }

    #[test]
    fn the_state_of_the_ca_is_none_before_it_was_saved() {
        let file = file();
        assert_eq!(file.authority().unwrap(), None);
        file.save_authority(b"one").unwrap();
        assert_eq!(file.authority().unwrap().as_deref(), Some(&b"one"[..]));
    }

    #[test]
    fn names_lead_back_to_keys() {
        for kind in [Kind::Volume, Kind::Engine, Kind::Replica, Kind::Node] {
            let key = Key::new(kind, "a/b");
            assert_eq!(key_of(&name(&key)), Some(key));
        }
        assert_eq!(key_of("unicorn/a"), None);
    }
}
