use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use http::Method;
use http::request::Parts;
use kube::api::WatchEvent;
use serde_json::{Value, json};
use tokio::sync::{Notify, mpsc};
use tokio_stream::wrappers::ReceiverStream;

use super::super::keys::VolumeKeys;
use super::super::known::KnownObjects;
use super::super::last_write::LastWrite;
use super::super::remote::Remote;
use super::*;
use crate::kubernetes::events::events;
use crate::kubernetes::fake_api::{FakeApi, fake_client};
use crate::kubernetes::list_watch::SILENCE_LIMIT;

/// Volumes of an API server, two on a page.
#[derive(Default)]
struct PagedVolumes {
    volumes: Mutex<BTreeMap<String, Value>>,
    /// The number of pages to refuse because their version is forgotten.
    expired: Mutex<u32>,
    /// The volume that cannot be changed.
    frozen: Mutex<Option<String>>,
    /// True if requests for single objects get no answer.
    hangs: AtomicBool,
    /// Notified by a request for a single object.
    asked: Notify,
}

fn refusal(code: u16) -> (u16, Value) {
    (code, json!({ "kind": "Status", "status": "Failure", "message": "no", "reason": "No", "code": code }))
}

impl PagedVolumes {
    fn add(&self, name: &str) {
        let metadata = json!({ "name": name, "uid": format!("uid-{name}"), "resourceVersion": "5",
            "creationTimestamp": "2026-01-01T00:00:00Z" });
        let volume = json!({ "apiVersion": "shorthorn.io/v1alpha1", "kind": "Volume", "metadata": metadata,
            "spec": { "size": "8192" } });
        self.volumes.lock().unwrap().insert(name.to_owned(), volume);
    }

    fn list(&self, query: &str) -> (u16, Value) {
        let volumes = self.volumes.lock().unwrap();
        let from = query.split('&').find_map(|part| part.strip_prefix("continue=")).unwrap_or_default();
        let mut expired = self.expired.lock().unwrap();
        if !from.is_empty() && *expired > 0 {
            *expired -= 1;
            return refusal(410);
        }
        let page: Vec<&Value> = volumes.range(from.to_owned()..).map(|(_, volume)| volume).take(2).collect();
        let next = volumes.range(from.to_owned()..).nth(2).map(|(name, _)| name);
        let metadata = json!({ "resourceVersion": "10", "continue": next });
        (
            200,
            json!({ "apiVersion": "shorthorn.io/v1alpha1", "kind": "VolumeList", "metadata": metadata,
            "items": page }),
        )
    }

    fn change(&self, name: &str, change: &Value) -> (u16, Value) {
        if self.frozen.lock().unwrap().as_deref() == Some(name) {
            return refusal(422);
        }
        let mut volumes = self.volumes.lock().unwrap();
        let Some(volume) = volumes.get_mut(name) else { return refusal(404) };
        for (key, value) in change["metadata"].as_object().unwrap() {
            volume["metadata"][key] = value.clone();
        }
        volume["metadata"]["resourceVersion"] = json!("11");
        (200, volume.clone())
    }
}

impl FakeApi for PagedVolumes {
    async fn answer(&self, head: &Parts, body: &[u8]) -> (u16, Value) {
        let name = head.uri.path().rsplit_once("/volumes").unwrap().1.trim_start_matches('/');
        match (&head.method, name) {
            (&Method::GET, "") => self.list(head.uri.query().unwrap_or_default()),
            (&Method::GET, _) if self.hangs.load(Ordering::Relaxed) => {
                self.asked.notify_one();
                std::future::pending().await
            }
            (&Method::GET, name) => match self.volumes.lock().unwrap().get(name) {
                Some(volume) => (200, volume.clone()),
                None => refusal(404),
            },
            (_, name) => self.change(name, &serde_json::from_slice(body).unwrap()),
        }
    }
}

fn inner(api: &Arc<PagedVolumes>) -> Arc<Inner> {
    let client = fake_client(api);
    let (events, _) = events(client.clone(), "n", "a");
    let keys = VolumeKeys::new(&[7; 32]);
    Arc::new(Inner {
        cluster: keys.cluster(),
        keys,
        remote: Remote::new(client, "n"),
        known: KnownObjects::new(),
        last_write: LastWrite::default(),
        events,
    })
}

fn known(inner: &Inner) -> Vec<String> {
    inner.known.state().volumes.keys().cloned().collect()
}

#[tokio::test]
async fn a_list_that_took_too_long_begins_again_and_ends_after_some_attempts() {
    let api = Arc::<PagedVolumes>::default();
    for name in ["a", "b", "c"] {
        api.add(name);
    }
    *api.expired.lock().unwrap() = LISTS_MAX - 1;
    let followed = list(&inner(&api), Kind::Volume).await.unwrap();
    assert_eq!((followed.version, followed.left_out.len()), (10, 0));
    let inner = inner(&api);
    *api.expired.lock().unwrap() = LISTS_MAX;
    let error = list(&inner, Kind::Volume).await.unwrap_err();
    assert!(matches!(&error, StoreOpenError::Call(error) if is_code(error, 410)), "{error}");
    assert!(known(&inner).is_empty(), "half of a list counts for nothing");
}

#[tokio::test]
async fn an_object_that_cannot_be_marked_is_left_out_and_taken_in_later() {
    let api = Arc::<PagedVolumes>::default();
    for name in ["a", "b", "c"] {
        api.add(name);
    }
    *api.frozen.lock().unwrap() = Some("b".to_owned());
    let inner = inner(&api);
    let mut followed = list(&inner, Kind::Volume).await.unwrap();
    assert_eq!(known(&inner), ["a", "c"]);
    let b = Key::new(Kind::Volume, "b");
    assert_eq!(followed.left_out, BTreeSet::from([b.clone()]));
    let sentence = inner.known.state().unknown(&b).unwrap();
    assert!(sentence.contains("finalizer") && sentence.contains("rbac.yaml"), "{sentence}");
    try_all_again(&inner, &mut followed).await;
    assert_eq!(followed.left_out, BTreeSet::from([b.clone()]), "as long as it is refused");
    assert!(inner.known.state().unknown(&b).is_some());
    *api.frozen.lock().unwrap() = None;
    try_all_again(&inner, &mut followed).await;
    assert!(followed.left_out.is_empty());
    assert_eq!(known(&inner), ["a", "b", "c"]);
    assert_eq!(inner.known.state().unknown(&b), None);
}

/// A client makes volumes too; without the annotation a definition of an earlier release would drop the
/// encryption.
#[tokio::test]
async fn an_encrypted_volume_gets_the_annotation() {
    let api = Arc::<PagedVolumes>::default();
    for name in ["a", "b", "c"] {
        api.add(name);
    }
    let annotations = json!({ FINGERPRINT_ANNOTATION: "f" });
    for name in ["b", "c"] {
        let mut volumes = api.volumes.lock().unwrap();
        let volume = volumes.get_mut(name).unwrap();
        volume["spec"]["encryptInTransit"] = json!(name == "b");
        volume["metadata"]["annotations"] = annotations.clone();
        volume["metadata"]["finalizers"] = json!([finalizer::FINALIZER]);
    }
    let inner = inner(&api);
    list(&inner, Kind::Volume).await.unwrap();
    let volumes = api.volumes.lock().unwrap();
    let has_annotation =
        |name: &str| !volumes[name]["metadata"]["annotations"][convert::ENCRYPTION_ANNOTATION].is_null();
    assert_eq!((has_annotation("a"), has_annotation("b"), has_annotation("c")), (false, true, false));
    assert_eq!(volumes["c"]["metadata"]["resourceVersion"], "5", "it has all that it needs");
}

async fn try_all_again(inner: &Arc<Inner>, followed: &mut Followed) {
    let mut retries = Retries::default();
    retries.begin(inner, &followed.left_out);
    while let Some(tried) = retries.running.join_next().await {
        let (key, tried) = tried.unwrap();
        take_tried(inner, key, tried, followed).unwrap();
        retries.start_next(inner);
    }
}

fn event(api: &PagedVolumes, name: &str, version: &str) -> kube::Result<WatchEvent<DynamicObject>> {
    let mut volume = api.volumes.lock().unwrap()[name].clone();
    volume["metadata"]["resourceVersion"] = json!(version);
    volume["metadata"]["finalizers"] = json!([finalizer::FINALIZER]);
    volume["metadata"]["annotations"] = json!({ FINGERPRINT_ANNOTATION: "f" });
    Ok(serde_json::from_value(json!({ "type": "ADDED", "object": volume })).unwrap())
}

/// The API server does not answer for the object that was left out: events of others are taken in meanwhile.
#[tokio::test(start_paused = true)]
async fn an_object_that_is_tried_again_holds_up_no_event() {
    let api = Arc::<PagedVolumes>::default();
    for name in ["a", "b", "c"] {
        api.add(name);
    }
    *api.frozen.lock().unwrap() = Some("b".to_owned());
    let inner = inner(&api);
    let mut followed = list(&inner, Kind::Volume).await.unwrap();
    api.hangs.store(true, Ordering::Relaxed);
    let (sender, events) = mpsc::channel(4);
    let watched = Arc::clone(&inner);
    let watching = tokio::spawn(async move {
        take_changes(&watched, Kind::Volume, &mut followed, Watch::of(ReceiverStream::new(events))).await
    });
    let mut changes = inner.known.changes();
    api.asked.notified().await;
    let asked = Instant::now();
    api.add("late");
    sender.send(event(&api, "late", "12")).await.unwrap();
    assert_eq!(changes.recv().await.unwrap(), Key::new(Kind::Volume, "late"));
    assert_eq!(asked.elapsed(), Duration::ZERO, "it did not wait for the call");
    drop(sender);
    assert!(matches!(watching.await.unwrap(), FollowError::Broken(WatchEnd::Ended)));
}

#[tokio::test(start_paused = true)]
async fn an_object_that_is_tried_again_does_not_hide_that_the_watch_is_silent() {
    let api = Arc::<PagedVolumes>::default();
    api.add("b");
    *api.frozen.lock().unwrap() = Some("b".to_owned());
    let inner = inner(&api);
    let mut followed = list(&inner, Kind::Volume).await.unwrap();
    let (start, (_sender, events)) = (Instant::now(), mpsc::channel(1));
    let watching = take_changes(&inner, Kind::Volume, &mut followed, Watch::of(ReceiverStream::new(events)));
    let ended = tokio::time::timeout(SILENCE_LIMIT * 4, watching).await.unwrap();
    assert!(matches!(ended, FollowError::Broken(WatchEnd::Silent)));
    assert_eq!(start.elapsed(), SILENCE_LIMIT);
}

#[tokio::test]
async fn a_volume_that_came_between_two_lists_is_fetched() {
    use shorthorn_controller_core::Timestamp;
    use shorthorn_controller_core::objects::{Engine, ResourceVersion};
    let api = Arc::<PagedVolumes>::default();
    api.add("a");
    let inner = inner(&api);
    list(&inner, Kind::Volume).await.unwrap();
    let volume = inner.known.state().volumes["a"].clone();
    let mut late = volume.clone();
    late.metadata.name = "late".to_owned();
    late.spec.volume_name = shorthorn_types::VolumeName::new("late").unwrap();
    for owner in [volume, late] {
        let mut engine = Engine::of_new(&owner, Timestamp::UNIX_EPOCH);
        engine.metadata.resource_version = ResourceVersion::new(12);
        inner.known.take(engine.into());
    }
    api.add("late");
    complete(&inner).await.unwrap();
    assert_eq!(known(&inner), ["a", "late"]);
}
