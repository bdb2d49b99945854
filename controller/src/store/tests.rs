use shorthorn_controller_core::Timestamp;
use shorthorn_controller_core::objects::{Kind, Metadata, Node};

use super::*;

fn node(name: &str, version: u64) -> Object {
    let resource_version = ResourceVersion::new(version);
    let metadata = Metadata { resource_version, ..Metadata::new(name, Timestamp::UNIX_EPOCH) };
    Object::Node(Node { metadata, spec: Default::default(), status: Default::default() })
}

#[test]
fn a_conflict_names_the_stored_version_and_zero_if_none_is_stored() {
    let key = || Key::new(Kind::Node, "n");
    let conflict = |expected: u64, found: u64| {
        let (expected, found) = (ResourceVersion::new(expected), ResourceVersion::new(found));
        ObjectStoreError::Conflict { key: key(), expected, found }.to_string()
    };
    assert_eq!(conflict(3, 4), "node n was changed meanwhile (version 4, not 3)");
    assert_eq!(conflict(3, 0), "node n was changed meanwhile (version 0, not 3)");
    assert_eq!(conflict(0, 4), "node n was changed meanwhile (version 4, not 0)");
}

/// Checks the contract of every store.
async fn keeps_the_contract(store: &dyn ObjectStore) {
    let key = Key::new(Kind::Node, "n");
    let mut changes = store.changes();
    let first = store.put(node("n", 0)).await.unwrap();
    assert_eq!(changes.recv().await.unwrap(), key);
    assert_eq!(store.state().get(&key), Some(first.clone()));
    // A second one of that name, and a write from an old version.
    assert!(matches!(store.put(node("n", 0)).await, Err(ObjectStoreError::Conflict { .. })));
    let second = store.put(first.clone()).await.unwrap();
    let (before, version) = (first.metadata().resource_version, second.metadata().resource_version);
    assert!(version > before && before.is_some());
    assert!(matches!(store.put(first).await, Err(ObjectStoreError::Conflict { .. })));
    for old in [before, None] {
        assert!(matches!(store.remove(&key, old).await, Err(ObjectStoreError::Conflict { .. })));
    }
    store.remove(&key, version).await.unwrap();
    assert_eq!(store.state().get(&key), None);
    // A re-created object of the name never has a version that was used before.
    let third = store.put(node("n", 0)).await.unwrap();
    assert!(third.metadata().resource_version > version);
}

#[tokio::test]
async fn both_stores_compare_and_swap() {
    keeps_the_contract(&MemoryStore::new()).await;
    let directory = tempfile::tempdir().unwrap();
    keeps_the_contract(&RedbStore::open(&directory.path().join("store")).unwrap()).await;
}

#[tokio::test]
async fn a_file_keeps_objects_and_versions() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("store");
    let store = RedbStore::open(&path).unwrap();
    let kept = store.put(node("kept", 0)).await.unwrap();
    let gone = store.put(node("gone", 0)).await.unwrap();
    store.remove(&gone.key(), gone.metadata().resource_version).await.unwrap();
    assert!(matches!(RedbStore::open(&path), Err(ObjectStoreError::Locked(_))));
    drop(store);

    let store = RedbStore::open(&path).unwrap();
    assert_eq!(store.state().keys().collect::<Vec<_>>(), [kept.key()]);
    assert_eq!(store.state().get(&kept.key()), Some(kept));
    let again = store.put(node("gone", 0)).await.unwrap();
    assert!(again.metadata().resource_version > gone.metadata().resource_version);
}

#[test]
fn files_that_are_not_stores_are_refused_with_a_reason() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("store");
    std::fs::write(&path, "a text of another program").unwrap();
    let text = RedbStore::open(&path).unwrap_err().to_string();
    assert!(text.contains("cannot open the store"), "{text}");
    assert_eq!(std::fs::read(&path).unwrap(), b"a text of another program");
    let missing = RedbStore::open(&directory.path().join("no/such/store")).unwrap_err().to_string();
    assert!(missing.contains("No such file"), "{missing}");
}

#[tokio::test]
async fn fields_of_a_later_controller_stay() {
    use ::redb::ReadableTable;
    const OBJECTS: ::redb::TableDefinition<'_, &str, &[u8]> = ::redb::TableDefinition::new("objects");
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("store");
    drop(RedbStore::open(&path).unwrap().put(node("n", 0)).await.unwrap());
    let raw = |change: &dyn Fn(&mut serde_json::Value)| {
        let database = ::redb::Database::open(&path).unwrap();
        let transaction = database.begin_write().unwrap();
        let mut objects = transaction.open_table(OBJECTS).unwrap();
        let mut object = serde_json::from_slice(objects.get("node/n").unwrap().unwrap().value()).unwrap();
        change(&mut object);
        objects.insert("node/n", serde_json::to_vec(&object).unwrap().as_slice()).unwrap();
        drop(objects);
        transaction.commit().unwrap();
    };
    raw(&|node| node["status"]["levitation"] = serde_json::json!({ "height": 3 }));
    let store = RedbStore::open(&path).unwrap();
    let known = store.state().get(&Key::new(Kind::Node, "n")).unwrap();
    store.put(known).await.unwrap();
    drop(store);
    raw(&|node| assert_eq!(node["status"]["levitation"]["height"], 3, "{node:#}"));
}

#[test]
fn a_store_is_of_one_cluster_for_good() {
    let directory = tempfile::tempdir().unwrap();
    let open = |name: &str| RedbStore::open(&directory.path().join(name)).unwrap().cluster().to_owned();
    let first = open("a");
    assert_eq!(first, open("a"));
    assert_ne!(first, open("b"));
}

#[tokio::test]
async fn one_object_that_cannot_be_read_stops_no_other_and_is_never_replaced() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("store");
    let store = RedbStore::open(&path).unwrap();
    for name in ["bad", "good"] {
        store.put(node(name, 0)).await.unwrap();
    }
    drop(store);
    let table = ::redb::TableDefinition::<&str, &[u8]>::new("objects");
    let bytes = |database: &::redb::Database| {
        let objects = ::redb::ReadableDatabase::begin_read(database).unwrap().open_table(table).unwrap();
        objects.get("node/bad").unwrap().unwrap().value().to_vec()
    };
    let database = ::redb::Database::open(&path).unwrap();
    let write = database.begin_write().unwrap();
    write.open_table(table).unwrap().insert("node/bad", b"{".as_slice()).unwrap();
    write.commit().unwrap();
    drop(database);
    let store = RedbStore::open(&path).unwrap();
    assert_eq!(store.state().nodes.keys().collect::<Vec<_>>(), ["good"]);
    let sentence = store.state().unknown(&Key::new(Kind::Node, "bad")).unwrap();
    assert!(sentence.contains("restore the store from a backup"), "{sentence}");
    let refused = store.put(node("bad", 0)).await.unwrap_err();
    assert!(matches!(&refused, ObjectStoreError::Refused { key, .. } if key.name == "bad"), "{refused}");
    drop(store);
    assert_eq!(bytes(&::redb::Database::open(&path).unwrap()), b"{");
}
