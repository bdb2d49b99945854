//! Decides which writes of a batch are allowed, and commits those. All of them are durable, or none is.

use std::collections::BTreeSet;

use serde::Deserialize;
use serde_json::Value;
use shorthorn_controller_core::objects::{Key, Object, ResourceVersion};

use super::file::{StoreFile, name};
use super::group_commit::{Write, WriteResult};
use crate::store::cache::Cache;
use crate::store::{ObjectStoreError, unknown_fields};

/// The file, and the versions in it.
#[derive(Debug)]
pub(super) struct Writer {
    file: StoreFile,
    /// The newest version that was given out.
    revision: u64,
    /// The newest version that was given out before the file was opened.
    opened_at: u64,
    /// Objects of the file that cannot be read. They stay as they are: a new object never replaces one.
    unreadable: BTreeSet<String>,
    /// Objects written since that keep something of a later version.
    with_more: BTreeSet<String>,
    /// Commits since the start of the process.
    commits: u64,
}

/// A write that was decided and is not committed yet.
struct DecidedWrite {
    key: Key,
    name: String,
    /// The object and its text; none: it is removed.
    object: Option<(Object, Vec<u8>)>,
    has_more: bool,
}

impl Writer {
    pub(super) fn new(file: StoreFile, revision: u64, unreadable: BTreeSet<String>) -> Writer {
        Writer { file, revision, opened_at: revision, unreadable, with_more: BTreeSet::new(), commits: 0 }
    }

    pub(super) fn file(&self) -> &StoreFile {
        &self.file
    }

    /// The newest version that was given out, and the number of commits.
    #[cfg(test)]
    pub(super) fn counted(&self) -> (u64, u64) {
        (self.revision, self.commits)
    }

    /// Commits the allowed ones of these writes, and has `cache` show them. Returns the answers in the same
    /// order. No two writes are of one object.
    pub(super) fn commit(&mut self, cache: &Cache, batch: Vec<Write>) -> Vec<WriteResult> {
        let (mut revision, mut decided) = (self.revision, Vec::with_capacity(batch.len()));
        for write in batch {
            let change = self.decide(cache, write, revision + 1);
            revision += u64::from(change.is_ok());
            decided.push(change);
        }
        if revision == self.revision {
            return decided.into_iter().map(|refused| refused.map(|_| None)).collect();
        }
        let changes = decided.iter().flatten().map(|change| {
            let text = change.object.as_ref().map(|(_, text)| text.as_slice());
            (change.name.as_str(), text)
        });
        let committed = self.file.commit(changes, revision);
        if committed.is_ok() {
            (self.revision, self.commits) = (revision, self.commits + 1);
        }
        let answer = |change: Result<DecidedWrite, ObjectStoreError>| {
            let change = change?;
            committed.as_ref().map_err(|error| self.file.write_error(error))?;
            Ok(self.show(cache, change))
        };
        decided.into_iter().map(answer).collect()
    }

    fn decide(&self, cache: &Cache, write: Write, revision: u64) -> Result<DecidedWrite, ObjectStoreError> {
        let key = write.key();
        let name = name(&key);
        match write {
            Write::Remove(_, version) => {
                cache.check(&key, version)?;
                Ok(DecidedWrite { key, name, object: None, has_more: false })
            }
            Write::Put(mut object) => {
                let before = object.metadata().resource_version;
                cache.check(&key, before)?;
                if self.unreadable.contains(&name) {
                    let message = "the store has an object of this name that cannot be read".to_owned();
                    return Err(ObjectStoreError::Refused { key, message });
                }
                object.metadata_mut().resource_version = ResourceVersion::new(revision);
                let text = self.text(&name, before, &object);
                let (text, has_more) = text.map_err(|error| self.file.write_error(&error))?;
                Ok(DecidedWrite { key, name, object: Some((object, text)), has_more })
            }
        }
    }

    /// Has the cache show a committed change; returns the stored object.
    fn show(&mut self, cache: &Cache, change: DecidedWrite) -> Option<Object> {
        if change.has_more {
            self.with_more.insert(change.name);
        } else {
            self.with_more.remove(&change.name);
        }
        let object = change.object.map(|(object, _)| object);
        match &object {
            Some(object) => cache.insert(object.clone()),
            None => cache.remove(&change.key),
        }
        object
    }

    /// The object as it is stored, with whatever a later version has stored of it, and whether that is
    /// anything. `before`: the version that it replaces.
    fn text(
        &self,
        name: &str,
        before: Option<ResourceVersion>,
        object: &Object,
    ) -> Result<(Vec<u8>, bool), redb::Error> {
        let failed = |error: serde_json::Error| redb::Error::Io(error.into());
        let is_since_opening = before.is_some_and(|before| before.get() > self.opened_at);
        let is_ours = is_since_opening && !self.with_more.contains(name);
        if before.is_none() || is_ours {
            return Ok((serde_json::to_vec(object).map_err(failed)?, false));
        }
        let new = serde_json::to_value(object).map_err(failed)?;
        let Some(text) = self.file.stored(name)? else {
            return Ok((serde_json::to_vec(&new).map_err(failed)?, false));
        };
        let stored: Value = serde_json::from_str(&text).map_err(failed)?;
        let known: Object = Object::deserialize(&stored).map_err(failed)?;
        let known = serde_json::to_value(known).map_err(failed)?;
        let kept = unknown_fields::keep(&text, &known, &new)
            .map_or_else(|| serde_json::to_vec(&new).map_err(failed), |kept| Ok(kept.into_bytes()))?;
        Ok((kept, stored != known))
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use redb::Database;
    use redb::backends::InMemoryBackend;
    use shorthorn_controller_core::Timestamp;
    use shorthorn_controller_core::objects::{Kind, Node};

    use super::*;

    fn node(name: &str) -> Object {
        Node::new(name, Timestamp::UNIX_EPOCH).into()
    }

    /// Returns the writer of a file with these texts, and the objects in memory.
    fn writer(texts: &[(&str, &str)]) -> (Writer, Cache) {
        let database = Database::builder().create_with_backend(InMemoryBackend::new()).unwrap();
        let file = StoreFile::over(Path::new("store"), database);
        file.prepare("cluster").unwrap();
        let changes = texts.iter().map(|(name, text)| (*name, Some(text.as_bytes())));
        file.commit(changes, texts.len() as u64).unwrap();
        let (state, unreadable) = file.load().unwrap();
        let (revision, _) = file.prepare("cluster").unwrap();
        (Writer::new(file, revision, unreadable), Cache::new(state))
    }

    #[test]
    fn refused_writes_take_no_version_and_do_not_stop_the_others() {
        let (mut writer, cache) = writer(&[("node/bad", "{")]);
        let batch = vec![
            Write::Put(node("a")),
            Write::Remove(Key::new(Kind::Node, "gone"), ResourceVersion::new(1)),
            Write::Put(node("bad")),
            Write::Put(node("b")),
        ];
        let answers = writer.commit(&cache, batch);
        let versions = answers.iter().flatten().flatten().map(|object| object.metadata().resource_version);
        assert_eq!(versions.collect::<Vec<_>>(), [2, 3].map(ResourceVersion::new));
        assert!(matches!(
            answers[1],
            Err(ObjectStoreError::Conflict { expected, found: None, .. })
                if expected == ResourceVersion::new(1)
        ));
        assert!(matches!(answers[2], Err(ObjectStoreError::Refused { .. })));
        assert_eq!(writer.counted(), (3, 1));
        assert_eq!(cache.state().nodes.keys().collect::<Vec<_>>(), ["a", "b"]);
        assert_eq!(writer.file().stored("node/bad").unwrap().as_deref(), Some("{"));
    }

    #[test]
    fn a_batch_of_refused_writes_needs_no_commit() {
        let (mut writer, cache) = writer(&[]);
        let answers =
            writer.commit(&cache, vec![Write::Remove(Key::new(Kind::Node, "gone"), ResourceVersion::new(1))]);
        assert!(matches!(answers[..], [Err(ObjectStoreError::Conflict { .. })]), "{answers:?}");
        assert_eq!(writer.counted(), (0, 0));
    }

    #[test]
    fn a_removed_object_leaves_the_file_and_the_memory() {
        let (mut writer, cache) = writer(&[]);
        writer.commit(&cache, vec![Write::Put(node("a"))]);
        let answers = writer.commit(&cache, vec![Write::Remove(node("a").key(), ResourceVersion::new(1))]);
        assert!(matches!(answers[..], [Ok(None)]), "{answers:?}");
        assert!(cache.state().nodes.is_empty());
        assert_eq!(writer.file().stored("node/a").unwrap(), None);
    }
}
