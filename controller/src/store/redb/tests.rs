//! Tests the whole store, on disks that fail or hang too.

use std::io;
use std::sync::Condvar;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use redb::backends::InMemoryBackend;
use redb::{Database, StorageBackend};
use serde_json::Value;
use shorthorn_controller_core::Timestamp;
use shorthorn_controller_core::objects::{ConditionType, Finding, Kind, Node};
use shorthorn_testkit::waiting::wait_for_async;

use super::file::OBJECTS;
use super::*;
use crate::metrics::{Metered, Metrics, Readiness, ReadinessPhase};

const LIMIT: Duration = Duration::from_millis(200);
/// A time limit of waits that is reached only by a hang.
const WAIT: Duration = Duration::from_secs(60);

fn node(name: &str) -> Object {
    Node::new(name, Timestamp::UNIX_EPOCH).into()
}

fn version(number: u64) -> Option<ResourceVersion> {
    ResourceVersion::new(number)
}

/// Puts these writes into the queue, in this order, while another caller commits.
fn at_once(store: &RedbStore, writes: Vec<Write>) -> Vec<WriteResult> {
    let guard = store.inner.group_commit.hold();
    let mut threads = Vec::new();
    for (before, write) in writes.into_iter().enumerate() {
        let inner = Arc::clone(&store.inner);
        threads.push(std::thread::spawn(move || inner.write(write)));
        while store.inner.group_commit.waiting() == before {
            std::thread::yield_now();
        }
    }
    drop(guard);
    threads.into_iter().map(|thread| thread.join().unwrap()).collect()
}

/// The store in a database on that disk.
fn over(disk: impl StorageBackend, limit: Duration) -> RedbStore {
    let database = Database::builder().create_with_backend(disk).unwrap();
    RedbStore::over(StoreFile::over(Path::new("store"), database), limit).unwrap()
}

#[test]
fn writes_that_wait_share_a_commit_in_their_order() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("store");
    let store = RedbStore::open(&path).unwrap();
    let names: Vec<String> = (0..20).map(|at| format!("n{at:02}")).collect();
    let answers = at_once(&store, names.iter().map(|name| Write::Put(node(name))).collect());
    let versions = answers.into_iter().map(|answer| answer.unwrap().unwrap().metadata().resource_version);
    assert_eq!(versions.collect::<Vec<_>>(), (1..=20).map(ResourceVersion::new).collect::<Vec<_>>());
    assert_eq!(store.inner.disk.access().counted(), (20, 1));
    drop(store);
    let store = RedbStore::open(&path).unwrap();
    assert_eq!(store.state().nodes.keys().cloned().collect::<Vec<_>>(), names);
    assert_eq!(store.inner.disk.access().counted(), (20, 0));
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
    let conflict = is_stored();
    assert!(
        matches!(
            conflict,
            Err(ObjectStoreError::Conflict { expected: None, found, .. }) if found == version(1)
        ),
        "{conflict:?}"
    );
    assert!(is_stored().is_ok());
    // A name that is free again by the time of its commit.
    let answers = at_once(&store, vec![Write::Remove(key.clone(), version(1)), Write::Put(node("a"))]);
    assert!(answers.iter().all(Result::is_ok), "{answers:?}");
    assert_eq!(store.state().version(&key), version(5));
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
    let store = over(backend, DISK_LIMIT);
    assert!(at_once(&store, vec![Write::Put(node("a"))]).remove(0).is_ok());
    fails.store(true, Ordering::Relaxed);
    let writes =
        vec![Write::Put(node("b")), Write::Put(node("c")), Write::Remove(node("a").key(), version(1))];
    for answer in at_once(&store, writes) {
        assert!(matches!(&answer, Err(ObjectStoreError::Write { .. })), "{answer:?}");
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
    let text = store.inner.disk.access().file().stored("node/a").unwrap().unwrap();
    let kept: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(kept["status"]["levitation"], 3);
    let condition = &kept["status"]["conditions"][0];
    assert_eq!((&condition["height"]["cm"], &condition["status"]), (&7.into(), &"False".into()));
    assert!(text.contains(&format!("\"later\":{big}")), "{text}");
}

/// A disk whose fsync blocks while the test holds it.
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

#[tokio::test]
async fn a_disk_that_hangs_holds_up_no_caller_and_is_shown() {
    let hangs = Arc::<(Mutex<bool>, Condvar)>::default();
    let backend = Hanging { disk: InMemoryBackend::new(), hangs: Arc::clone(&hangs) };
    let store = over(backend, LIMIT);
    let ca_storage = store.ca_storage();
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
        assert!(matches!(&answer, Err(ObjectStoreError::Unavailable { .. })), "{answer:?}");
    }
    let unready = readiness.check().unwrap_err();
    assert!(unready.contains("has not ended within") && unready.contains("its disk"), "{unready}");
    assert!(store.put(node("x")).await.is_err());
    // From here on, no caller waits.
    let before = Instant::now();
    for name in ["e", "f", "g"] {
        assert!(store.put(node(name)).await.is_err());
    }
    assert!(ca_storage.save(b"{}".to_vec()).await.is_err() && ca_storage.load().await.is_err());
    assert!(before.elapsed() < LIMIT, "{:?}", before.elapsed());
    assert_eq!(store.state().nodes.keys().collect::<Vec<_>>(), ["a"]);
    assert!(began.elapsed() < Duration::from_secs(60));
    let following = tokio::spawn(Arc::clone(&store).follow());
    set(&hangs, false);
    // No write is needed for that.
    wait_for_async("the store is ready again", WAIT, async || readiness.check()).await;
    following.abort();
    // The writes that had begun count once the disk answers.
    store.put(node("h")).await.unwrap();
    let names: Vec<String> = store.state().nodes.keys().cloned().collect();
    assert!(names.contains(&"b".to_owned()) && !names.contains(&"e".to_owned()), "{names:?}");
}

/// A state of the CA waits behind other writes until its caller has given up and saves another state.
#[tokio::test]
async fn an_older_state_of_the_ca_never_replaces_a_later_one() {
    let store = over(InMemoryBackend::new(), LIMIT);
    let ca_storage = store.ca_storage();
    let busy = store.inner.disk.access();
    let late = ca_storage.save(b"older".to_vec()).await;
    assert!(late.is_err(), "other writes hold it up");
    store.inner.saves.begin();
    drop(busy);
    let references = async || match Arc::strong_count(&store.inner) {
        0..=2 => Ok(()),
        more => Err(more),
    };
    wait_for_async("the older write ends", WAIT, references).await;
    assert_eq!(ca_storage.load().await.unwrap(), None);
    ca_storage.save(b"later".to_vec()).await.unwrap();
    assert_eq!(ca_storage.load().await.unwrap().as_deref(), Some(&b"later"[..]));
}
