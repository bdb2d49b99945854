use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use http::Method;
use http::request::Parts;
use serde_json::{Value, json};
use shorthorn_controller_core::Timestamp;
use shorthorn_controller_core::objects::{Node, Secret};
use shorthorn_controller_core::requests::CreateVolume;

use super::last_write::DOUBT_LIMIT;
use super::*;
use crate::kubernetes::events::events;
use crate::kubernetes::fake_api::{FakeApi, fake_client};
use crate::metrics::{Metered, Metrics, Readiness, ReadinessPhase};

/// An API server that takes new objects and their status. Lists are empty.
#[derive(Default)]
struct OneObject {
    /// The object that was written last.
    stored: Mutex<Option<Value>>,
    /// True if it refuses every write.
    refuses_writes: AtomicBool,
    /// True if its definition of volumes has no encryption.
    is_old: AtomicBool,
}

impl FakeApi for OneObject {
    async fn answer(&self, head: &Parts, body: &[u8]) -> (u16, Value) {
        if head.method == Method::GET {
            let metadata = json!({ "resourceVersion": "1" });
            let kind = "PartialObjectMetadataList";
            return (
                200,
                json!({ "apiVersion": "meta.k8s.io/v1", "kind": kind, "metadata": metadata, "items": [] }),
            );
        }
        if self.refuses_writes.load(Ordering::Relaxed) {
            let status = json!({ "kind": "Status", "status": "Failure", "message": "no right", "code": 403 });
            return (403, status);
        }
        let written: Value = serde_json::from_slice(body).unwrap();
        let mut stored = self.stored.lock().unwrap();
        let object = match head.method {
            Method::POST => {
                let mut object = written;
                object["metadata"]["uid"] = json!("uid");
                object["metadata"]["creationTimestamp"] = json!("2026-01-01T00:00:00Z");
                object["metadata"]["resourceVersion"] = json!("5");
                if self.is_old.load(Ordering::Relaxed) {
                    object["spec"].as_object_mut().unwrap().remove("encryptInTransit");
                }
                if head.uri.query().is_some_and(|query| query.contains("dryRun=All")) {
                    return (201, object);
                }
                object
            }
            _ => {
                let mut object = stored.clone().unwrap();
                object["status"] = written["status"].clone();
                object["metadata"]["resourceVersion"] = json!("6");
                object
            }
        };
        *stored = Some(object.clone());
        (200, object)
    }
}

fn store(api: &Arc<OneObject>) -> KubeStore {
    let client = fake_client(api);
    let (events, _) = events(client.clone(), "n", "a");
    let keys = VolumeKeys::new(&[7; 32]);
    let inner = Inner {
        cluster: keys.cluster(),
        keys,
        remote: Remote::new(client, "n"),
        known: KnownObjects::new(),
        last_write: LastWrite::default(),
        events,
    };
    KubeStore { inner: Arc::new(inner), leader: None, _following: JoinSet::new() }
}

fn node(name: &str) -> Object {
    Node::new(name, Timestamp::UNIX_EPOCH).into()
}

#[tokio::test(start_paused = true)]
async fn a_controller_whose_writes_fail_is_not_ready() {
    let (api, readiness) = (Arc::<OneObject>::default(), Arc::<Readiness>::default());
    readiness.reached(ReadinessPhase::Leading);
    let store = Arc::new(Metered::new(Arc::new(store(&api)), Metrics::default(), Arc::clone(&readiness)));
    let following = tokio::spawn(Arc::clone(&store).follow());
    api.refuses_writes.store(true, Ordering::Relaxed);
    store.put(node("a")).await.unwrap_err();
    tokio::time::sleep(DOUBT_LIMIT - Duration::from_secs(1)).await;
    let unready = readiness.check().unwrap_err();
    assert!(unready.contains("the last write failed") && unready.contains("no right"), "{unready}");
    // No client writes any more, and reads work.
    tokio::time::sleep(DOUBT_LIMIT).await;
    readiness.check().unwrap();
    store.put(node("a")).await.unwrap_err();
    readiness.check().unwrap_err();
    // So does a write that needs no call.
    api.refuses_writes.store(false, Ordering::Relaxed);
    let known = store.put(node("b")).await.unwrap();
    api.refuses_writes.store(true, Ordering::Relaxed);
    store.put(node("a")).await.unwrap_err();
    store.put(known).await.unwrap();
    readiness.check().unwrap_err();
    // A conflict says nothing about the writes of other objects.
    let mut old = Node::new("a", Timestamp::UNIX_EPOCH);
    old.metadata.resource_version = ResourceVersion::new(3);
    assert!(matches!(store.put(old.into()).await, Err(ObjectStoreError::Conflict { .. })));
    readiness.check().unwrap_err();
    api.refuses_writes.store(false, Ordering::Relaxed);
    store.put(node("a")).await.unwrap();
    readiness.check().unwrap();
    following.abort();
}

fn volume(encrypt_in_transit: bool) -> Object {
    let name = "v".to_owned();
    let wanted = CreateVolume { name, size_bytes: 1 << 30, encrypt_in_transit, ..CreateVolume::default() };
    wanted.sketch(Secret::new([1; 32]), Timestamp::UNIX_EPOCH).unwrap().into()
}

#[tokio::test]
async fn a_volume_whose_encryption_the_api_server_drops_is_refused_and_not_created() {
    let api = Arc::<OneObject>::default();
    let store = store(&api);
    api.is_old.store(true, Ordering::Relaxed);
    let error = store.put(volume(true)).await.unwrap_err();
    assert!(matches!(error, ObjectStoreError::Refused { .. }), "{error:?}");
    let remedy = "Apply the definitions (CRDs) of this release first";
    assert!(error.to_string().contains(remedy), "{error}");
    assert_eq!(*api.stored.lock().unwrap(), None);
    assert!(store.state().volumes.is_empty());
    api.is_old.store(false, Ordering::Relaxed);
    store.put(volume(true)).await.unwrap();
    assert!(store.state().volumes["v"].spec.encrypt_in_transit);
    assert_eq!(api.stored.lock().unwrap().as_ref().unwrap()["spec"]["encryptInTransit"], true);
}

#[tokio::test]
async fn a_volume_stays_encrypted_after_a_definition_has_dropped_the_field() {
    let api = Arc::<OneObject>::default();
    let store = store(&api);
    store.put(volume(true)).await.unwrap();
    let mut stored = api.stored.lock().unwrap().clone().unwrap();
    assert_eq!(stored["spec"].as_object_mut().unwrap().remove("encryptInTransit"), Some(json!(true)));
    stored["metadata"]["resourceVersion"] = json!("9");
    let stored: DynamicObject = serde_json::from_value(stored).unwrap();
    let Object::Volume(found) = store.inner.take_in(&Key::new(Kind::Volume, "v"), &stored).unwrap() else {
        panic!("another kind")
    };
    let version = ResourceVersion::new(9);
    assert_eq!((found.metadata.resource_version, found.spec.encrypt_in_transit), (version, true));
}

#[tokio::test]
async fn a_volume_without_encryption_needs_no_new_definition() {
    let api = Arc::<OneObject>::default();
    api.is_old.store(true, Ordering::Relaxed);
    let store = store(&api);
    store.put(volume(false)).await.unwrap();
    assert!(!store.state().volumes["v"].spec.encrypt_in_transit);
}
