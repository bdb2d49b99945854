//! Writes that wait at the same time share one commit: a commit waits for the disk, however much is in it.
//!
//! Each caller puts its write into the queue. One of those that wait commits the writes at the front of the
//! queue, its own or not, and leaves each answer with its caller. All writes of a commit are durable, or none
//! is. They count in the order of the queue, and one commit has at most one write of an object, so that each
//! is compared with the versions that were committed before.

use std::collections::{BTreeSet, VecDeque};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use redb::{Database, ReadableDatabase};
use serde::Deserialize;
use serde_json::Value;
use shorthorn_controller_core::objects::{Key, Object};

use super::super::{StoreError, later};
use super::{Inner, NUMBERS, OBJECTS, name};

/// The most writes in one commit. As many callers can wait as there are threads for them.
const WRITES_MAX: usize = 512;

/// A change of one object.
#[derive(Debug)]
#[allow(clippy::large_enum_variant)] // few wait at a time, and nearly all are of the large kind
pub(super) enum Write {
    Put(Object),
    /// Removes the object if it has that version.
    Remove(Key, u64),
}

impl Write {
    fn key(&self) -> Key {
        match self {
            Write::Put(object) => object.key(),
            Write::Remove(key, _) => key.clone(),
        }
    }
}

/// The stored object; none: it was removed.
type Answer = Result<Option<Object>, StoreError>;

/// The place where the caller of a write finds its answer.
type Slot = Arc<Mutex<Option<Answer>>>;

/// A write, and where its caller finds the answer.
#[derive(Debug)]
struct Waiting {
    write: Write,
    answer: Slot,
}

/// Writes whose commit has not begun.
#[derive(Debug, Default)]
pub(super) struct Queue {
    waiting: VecDeque<Waiting>,
    /// True if a caller commits; all others wait for that.
    is_committing: bool,
}

/// The turn of a caller that commits. Its end wakes all others, also after a panic.
struct Turn<'a> {
    inner: &'a Inner,
    answers: Vec<Slot>,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        for answer in &self.answers {
            lock(answer).get_or_insert_with(|| {
                let message = "the commit of this write was cut off".to_owned();
                Err(StoreError::Write { path: self.inner.path.clone(), message })
            });
        }
        lock(&self.inner.queue).is_committing = false;
        self.inner.committed.notify_all();
    }
}

/// The database, and the state of the caller that commits.
#[derive(Debug)]
pub(super) struct Writer {
    pub(super) database: Database,
    /// The newest version that was given out.
    pub(super) revision: u64,
    /// The newest version that was given out before the file was opened.
    pub(super) opened_at: u64,
    /// Objects written since that keep something of a later version.
    pub(super) with_more: BTreeSet<String>,
    /// Number of commits.
    pub(super) commits: u64,
}

impl Writer {
    pub(super) fn new(database: Database, revision: u64) -> Writer {
        Writer { database, revision, opened_at: revision, with_more: BTreeSet::new(), commits: 0 }
    }
}

/// A write that was decided and is not committed yet.
struct Decided {
    key: Key,
    name: String,
    /// None: it is removed.
    object: Option<Object>,
    text: Vec<u8>,
    has_more: bool,
    answer: Slot,
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Inner {
    /// Returns once the write is durable, or refused.
    pub(super) fn write(&self, write: Write) -> Answer {
        let answer = Slot::default();
        let mut queue = lock(&self.queue);
        queue.waiting.push_back(Waiting { write, answer: Arc::clone(&answer) });
        loop {
            if let Some(answer) = lock(&answer).take() {
                return answer;
            }
            if queue.is_committing {
                queue = self.committed.wait(queue).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            queue.is_committing = true;
            let batch = next_batch(&mut queue.waiting);
            drop(queue);
            let answers = batch.iter().map(|waiting| Arc::clone(&waiting.answer)).collect();
            let turn = Turn { inner: self, answers };
            self.commit(&mut lock(&self.writer), batch);
            drop(turn);
            queue = lock(&self.queue);
        }
    }

    fn commit(&self, writer: &mut Writer, batch: Vec<Waiting>) {
        let _access = self.disk.begin();
        let mut decided = Vec::new();
        for Waiting { write, answer } in batch {
            let revision = writer.revision + 1 + decided.len() as u64;
            match self.decide(writer, write, revision, &answer) {
                Ok(change) => decided.push(change),
                Err(error) => *lock(&answer) = Some(Err(error)),
            }
        }
        if decided.is_empty() {
            return;
        }
        let revision = writer.revision + decided.len() as u64;
        if let Err(error) = commit(&writer.database, &decided, revision) {
            for Decided { answer, .. } in decided {
                *lock(&answer) = Some(Err(self.write_error(&error)));
            }
            return;
        }
        (writer.revision, writer.commits) = (revision, writer.commits + 1);
        for Decided { key, name, object, has_more, answer, .. } in decided {
            match &object {
                Some(object) => self.cache.insert(object.clone()),
                None => self.cache.remove(&key),
            }
            if has_more {
                writer.with_more.insert(name);
            } else {
                writer.with_more.remove(&name);
            }
            *lock(&answer) = Some(Ok(object));
        }
    }

    fn decide(
        &self,
        writer: &Writer,
        write: Write,
        revision: u64,
        answer: &Slot,
    ) -> Result<Decided, StoreError> {
        let (key, answer) = (write.key(), Arc::clone(answer));
        let name = name(&key);
        match write {
            Write::Remove(_, version) => {
                self.cache.check(&key, version)?;
                Ok(Decided { key, name, object: None, text: Vec::new(), has_more: false, answer })
            }
            Write::Put(mut object) => {
                let before = object.metadata().resource_version;
                self.cache.check(&key, before)?;
                if self.unreadable.contains(&name) {
                    let message = "the store has an object of this name that cannot be read".to_owned();
                    return Err(StoreError::Refused { key, message });
                }
                object.metadata_mut().resource_version = revision;
                let text = text(writer, &name, before, &object).map_err(|error| self.write_error(&error));
                let (text, has_more) = text?;
                Ok(Decided { key, name, object: Some(object), text, has_more, answer })
            }
        }
    }
}

/// The writes at the front of the queue, up to the second one of an object.
fn next_batch(queue: &mut VecDeque<Waiting>) -> Vec<Waiting> {
    let (mut keys, mut batch) = (BTreeSet::new(), Vec::new());
    while batch.len() < WRITES_MAX {
        let Some(next) = queue.pop_front() else { break };
        if !keys.insert(next.write.key()) {
            queue.push_front(next);
            break;
        }
        batch.push(next);
    }
    batch
}

/// The object as it is stored, with whatever a later version has stored of it, and whether that is
/// anything. `before`: the version that it replaces.
fn text(writer: &Writer, name: &str, before: u64, object: &Object) -> Result<(Vec<u8>, bool), redb::Error> {
    let failed = |error: serde_json::Error| redb::Error::Io(error.into());
    let is_ours = before > writer.opened_at && !writer.with_more.contains(name);
    if before == 0 || is_ours {
        return Ok((serde_json::to_vec(object).map_err(failed)?, false));
    }
    let new = serde_json::to_value(object).map_err(failed)?;
    let objects = writer.database.begin_read()?.open_table(OBJECTS)?;
    let Some(stored) = objects.get(name)? else {
        return Ok((serde_json::to_vec(&new).map_err(failed)?, false));
    };
    let text =
        std::str::from_utf8(stored.value()).map_err(|error| redb::Error::Io(io::Error::other(error)))?;
    let stored: Value = serde_json::from_str(text).map_err(failed)?;
    let known: Object = Object::deserialize(&stored).map_err(failed)?;
    let known = serde_json::to_value(known).map_err(failed)?;
    let kept = later::keep(text, &known, &new)
        .map_or_else(|| serde_json::to_vec(&new).map_err(failed), |kept| Ok(kept.into_bytes()))?;
    Ok((kept, stored != known))
}

fn commit(database: &Database, changes: &[Decided], revision: u64) -> Result<(), redb::Error> {
    // The default durability: the commit returns when the file is synced.
    let transaction = database.begin_write()?;
    {
        let mut objects = transaction.open_table(OBJECTS)?;
        for Decided { name, object, text, .. } in changes {
            match object {
                Some(_) => drop(objects.insert(name.as_str(), text.as_slice())?),
                None => drop(objects.remove(name.as_str())?),
            }
        }
        transaction.open_table(NUMBERS)?.insert("revision", revision)?;
    }
    transaction.commit()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::atomic::{AtomicBool, Ordering};

    use redb::StorageBackend;
    use redb::backends::InMemoryBackend;
    use shorthorn_controller_core::Timestamp;
    use shorthorn_controller_core::objects::{ConditionType, Finding, Kind, Node};

    use super::super::RedbStore;
    use super::*;
    use crate::store::Store;

    fn node(name: &str) -> Object {
        Node::new(name, Timestamp::UNIX_EPOCH).into()
    }

    /// Puts these writes into the queue, in this order, while another caller commits.
    fn at_once(store: &RedbStore, writes: Vec<Write>) -> Vec<Answer> {
        lock(&store.inner.queue).is_committing = true;
        let mut threads = Vec::new();
        for (before, write) in writes.into_iter().enumerate() {
            let inner = Arc::clone(&store.inner);
            threads.push(std::thread::spawn(move || inner.write(write)));
            while lock(&store.inner.queue).waiting.len() == before {
                std::thread::yield_now();
            }
        }
        drop(Turn { inner: &store.inner, answers: Vec::new() });
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    }

    #[test]
    fn writes_that_wait_share_a_commit_in_their_order() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("store");
        let store = RedbStore::open(&path).unwrap();
        let names: Vec<String> = (0..20).map(|at| format!("n{at:02}")).collect();
        let answers = at_once(&store, names.iter().map(|name| Write::Put(node(name))).collect());
        let versions = answers.into_iter().map(|answer| answer.unwrap().unwrap().metadata().resource_version);
        assert_eq!(versions.collect::<Vec<_>>(), (1..=20).collect::<Vec<_>>());
        assert_eq!(lock(&store.inner.writer).commits, 1);
        drop(store);
        let store = RedbStore::open(&path).unwrap();
        assert_eq!(store.state().nodes.keys().cloned().collect::<Vec<_>>(), names);
        assert_eq!(lock(&store.inner.writer).revision, 20);
    }

    #[test]
    fn of_two_writes_from_one_version_the_first_counts() {
        let directory = tempfile::tempdir().unwrap();
        let store = RedbStore::open(&directory.path().join("store")).unwrap();
        let key = Key::new(Kind::Node, "a");
        let writes =
            vec![Write::Put(node("a")), Write::Put(node("b")), Write::Put(node("a")), Write::Put(node("c"))];
        let mut answers = at_once(&store, writes).into_iter();
        let mut is_stored = || answers.next().unwrap().map(|_| ());
        assert!(is_stored().is_ok() && is_stored().is_ok());
        assert!(matches!(is_stored(), Err(StoreError::Conflict { expected: 0, found: 1, .. })));
        assert!(is_stored().is_ok());
        // A name that is free again by the time of its turn.
        let answers = at_once(&store, vec![Write::Remove(key.clone(), 1), Write::Put(node("a"))]);
        assert!(answers.iter().all(Result::is_ok), "{answers:?}");
        assert_eq!(store.state().version(&key), 5);
    }

    /// A disk that fails from some moment on.
    #[derive(Debug)]
    struct Failing {
        disk: InMemoryBackend,
        fails: Arc<AtomicBool>,
    }

    impl Failing {
        fn check(&self) -> io::Result<()> {
            if self.fails.load(Ordering::Relaxed) { Err(io::Error::other("the disk fails")) } else { Ok(()) }
        }
    }

    impl StorageBackend for Failing {
        fn len(&self) -> io::Result<u64> {
            self.disk.len()
        }
        fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
            self.disk.read(offset, out)
        }
        fn set_len(&self, len: u64) -> io::Result<()> {
            self.check()?;
            self.disk.set_len(len)
        }
        fn sync_data(&self) -> io::Result<()> {
            self.check()?;
            self.disk.sync_data()
        }
        fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
            self.check()?;
            self.disk.write(offset, data)
        }
    }

    #[test]
    fn a_commit_that_fails_counts_for_none_of_its_writes() {
        let fails = Arc::new(AtomicBool::new(false));
        let backend = Failing { disk: InMemoryBackend::new(), fails: Arc::clone(&fails) };
        let database = Database::builder().create_with_backend(backend).unwrap();
        let store = RedbStore::over(Path::new("store"), database).unwrap();
        assert!(at_once(&store, vec![Write::Put(node("a"))]).remove(0).is_ok());
        fails.store(true, Ordering::Relaxed);
        let writes = vec![Write::Put(node("b")), Write::Put(node("c")), Write::Remove(node("a").key(), 1)];
        for answer in at_once(&store, writes) {
            assert!(matches!(&answer, Err(StoreError::Write { .. })), "{answer:?}");
        }
        assert_eq!(store.state().nodes.keys().collect::<Vec<_>>(), ["a"]);
    }

    #[test]
    fn an_object_of_a_later_version_keeps_its_fields_over_many_writes() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("store");
        let store = RedbStore::open(&path).unwrap();
        let stored = at_once(&store, vec![Write::Put(node("a"))]).remove(0).unwrap().unwrap();
        drop(store);
        let mut text = serde_json::to_value(&stored).unwrap();
        text["status"]["levitation"] = 3.into();
        let condition = serde_json::json!({ "type": "Ready", "status": "True", "height": { "cm": 7 },
            "lastTransitionTime": "2026-01-02T03:04:05Z" });
        text["status"]["conditions"] = vec![condition].into();
        text["spec"]["later"] = 1.into();
        let big = "123456789012345678901234567890";
        let bytes = text.to_string().replace("\"later\":1", &format!("\"later\":{big}"));
        let database = Database::open(&path).unwrap();
        let transaction = database.begin_write().unwrap();
        transaction.open_table(OBJECTS).unwrap().insert("node/a", bytes.as_bytes()).unwrap();
        transaction.commit().unwrap();
        drop(database);
        let store = RedbStore::open(&path).unwrap();
        let Some(mut object) = store.state().get(&stored.key()) else { panic!("it cannot be read") };
        let Object::Node(node) = &mut object else { panic!("no node") };
        let away = Finding::wrong("AgentAway", "no answer");
        node.status.conditions.set(ConditionType::Ready, away, Timestamp::UNIX_EPOCH);
        for _ in 0..3 {
            object = at_once(&store, vec![Write::Put(object)]).remove(0).unwrap().unwrap();
        }
        let objects = lock(&store.inner.writer).database.begin_read().unwrap().open_table(OBJECTS).unwrap();
        let stored = objects.get("node/a").unwrap().unwrap();
        let kept: Value = serde_json::from_slice(stored.value()).unwrap();
        assert_eq!(kept["status"]["levitation"], 3);
        let condition = &kept["status"]["conditions"][0];
        assert_eq!((&condition["height"]["cm"], &condition["status"]), (&7.into(), &"False".into()));
        let text = String::from_utf8_lossy(stored.value()).into_owned();
        assert!(text.contains(&format!("\"later\":{big}")), "{text}");
    }
}
