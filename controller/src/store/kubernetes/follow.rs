//! Hears of every change of one kind: a list, then a watch from its version on, and again where that breaks.

use std::sync::Arc;
use std::time::Duration;

use kube::api::{Api, DynamicObject, ListParams, WatchEvent, WatchParams};
use shorthorn_controller_core::objects::{Key, Kind};
use shorthorn_controller_core::{Event, Timestamp};
use thiserror::Error;
use tokio_stream::StreamExt;

use super::calls::{CallError, bounded, is_code};
use super::keys::{FINGERPRINT_ANNOTATION, KeyOfVolume};
use super::order::List;
use super::{ConvertError, Inner, OpenError, Part, convert, is_expired};
use crate::kubernetes::{plural, resource};
use crate::work::backoff;

/// How many objects are asked for at once.
pub(crate) const PAGE_OBJECTS: u32 = 500;
/// After which time the API server ends a watch by itself, in seconds.
pub(crate) const WATCH_LIMIT_S: u32 = 290;
/// The longest silence of a watch: the API server sends a bookmark every minute.
pub(crate) const SILENCE_LIMIT: Duration = Duration::from_secs(150);

/// Why a watch does not go on.
#[derive(Debug, Error)]
enum WatchError {
    /// It ended as it should, or broke: the next one goes on from the last version.
    #[error("{0}")]
    Broken(String),
    /// Everything has to be listed again.
    #[error("{0}")]
    Lost(String),
}

/// Follows a kind from that version on, until it is dropped.
pub(super) async fn follow(inner: Arc<Inner>, kind: Kind, mut version: u64) {
    let mut failures = 0;
    loop {
        let before = version;
        let error = watch(&inner, kind, &mut version).await;
        if version != before {
            failures = 0;
        }
        match error {
            WatchError::Broken(reason) => tracing::debug!(kind = kind.as_str(), reason, "watching again"),
            WatchError::Lost(reason) => {
                tracing::info!(kind = kind.as_str(), reason, "listing again");
                match list(&inner, kind).await {
                    Ok(listed) => version = listed,
                    Err(error) => tracing::warn!(kind = kind.as_str(), %error, "cannot list"),
                }
            }
        }
        failures += 1;
        tokio::time::sleep(backoff(failures)).await;
    }
}

/// Takes in everything of a kind; returns the version of the list.
pub(super) async fn list(inner: &Inner, kind: Kind) -> Result<u64, OpenError> {
    let api = inner.api(kind);
    let mut list = List::default();
    let mut page = ListParams::default().limit(PAGE_OBJECTS);
    loop {
        let found = bounded(api.list(&page)).await.map_err(|error| not_installed(kind, error))?;
        for object in found.items {
            let key = key_of(kind, &object);
            match readable(inner, &key, object).await? {
                Some(object) => list.objects.push(object),
                None => list.unreadable.push(key),
            }
        }
        if list.version == 0 {
            list.version =
                convert::version(found.metadata.resource_version.as_deref()).map_err(OpenError::List)?;
        }
        match found.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => page.continue_token = Some(token),
            None => break,
        }
    }
    let version = list.version;
    let mut order = inner.order();
    inner.cache.change(|world| order.relist(world, kind, list));
    Ok(version)
}

fn not_installed(kind: Kind, error: CallError) -> OpenError {
    if is_code(&error, 404) { OpenError::NotInstalled(plural(kind)) } else { error.into() }
}

fn key_of(kind: Kind, object: &DynamicObject) -> Key {
    Key::new(kind, object.metadata.name.clone().unwrap_or_default())
}

/// The object as the reconcilers see it, once nothing can take it away under their hands.
async fn readable(
    inner: &Inner,
    key: &Key,
    mut object: DynamicObject,
) -> Result<Option<shorthorn_controller_core::objects::Object>, CallError> {
    let is_held = convert::is_held(key.kind, &object.metadata);
    if !is_held && object.metadata.deletion_timestamp.is_some() {
        // Nothing of ours is in it: others hold it.
        return Ok(None);
    }
    // Before it is held: what nothing is made of, whoever made it can take away again.
    if let Err(error) = convert::object(key.kind, &object, &inner.keys) {
        refuse(inner, key, &object, &error).await;
        return Ok(None);
    }
    let is_marked = key.kind != Kind::Volume || has_fingerprint(&object);
    if !is_held || (!is_marked && object.metadata.deletion_timestamp.is_none()) {
        match hold(inner, key, &object).await {
            Ok(held) => object = held,
            // Somebody was first: the watch brings what it is now.
            Err(error) if is_code(&error, 409) || is_code(&error, 404) => return Ok(None),
            Err(error) => return Err(error),
        }
    }
    match convert::object(key.kind, &object, &inner.keys) {
        Ok(object) => Ok(Some(object)),
        Err(error) => {
            refuse(inner, key, &object, &error).await;
            Ok(None)
        }
    }
}

/// Says with a volume what is wrong with it, once; of other kinds, which nobody writes by hand, in the log.
async fn refuse(inner: &Inner, key: &Key, object: &DynamicObject, error: &ConvertError) {
    let status = match (key.kind, error) {
        (Kind::Volume, ConvertError::Part("spec", why)) => {
            convert::refused_status(object, why, Timestamp::now())
        }
        _ => {
            tracing::warn!(%key, %error, "this object is left alone");
            return;
        }
    };
    // None: it says so already.
    let Some(status) = status else { return };
    tracing::warn!(%key, %error, "this object is left alone");
    let version = convert::version(object.metadata.resource_version.as_deref()).unwrap_or(0);
    if let Err(error) = inner.send(key, version, Part::Status(status)).await {
        // Where somebody was first, the watch brings what it is now.
        tracing::debug!(%key, %error, "what is wrong with it is not noted");
        return;
    }
    let message = format!("nothing is done for this volume: {error}");
    let event = Event { about: key.clone(), warning: true, reason: convert::INVALID_SPEC, message };
    inner.events.tell(&event, object.metadata.uid.as_deref().unwrap_or_default());
}

fn has_fingerprint(volume: &DynamicObject) -> bool {
    let annotations = volume.metadata.annotations.as_ref();
    annotations.is_some_and(|annotations| annotations.contains_key(FINGERPRINT_ANNOTATION))
}

/// Adds our finalizer, and in the same write the fingerprint of the key that a volume needs from here on.
async fn hold(inner: &Inner, key: &Key, object: &DynamicObject) -> Result<DynamicObject, CallError> {
    let version = convert::version(object.metadata.resource_version.as_deref()).unwrap_or(0);
    let mut finalizers = object.metadata.finalizers.clone().unwrap_or_default();
    if !finalizers.iter().any(|one| one == convert::FINALIZER) {
        finalizers.push(convert::FINALIZER.to_owned());
    }
    let fingerprint = (key.kind == Kind::Volume).then(|| inner.keys.fingerprint());
    inner.send(key, version, Part::Held { finalizers, fingerprint }).await
}

/// Which keys the volumes need that are there, before there is a key to read them with.
pub(super) async fn keys_of_volumes(
    client: &kube::Client,
    namespace: &str,
) -> Result<Vec<KeyOfVolume>, OpenError> {
    let api: Api<DynamicObject> = Api::namespaced_with(client.clone(), namespace, &resource(Kind::Volume));
    let mut page = ListParams::default().limit(PAGE_OBJECTS);
    let mut volumes = Vec::new();
    loop {
        let found = bounded(api.list(&page)).await.map_err(|error| not_installed(Kind::Volume, error))?;
        volumes.extend(found.items.iter().map(KeyOfVolume::of));
        match found.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => page.continue_token = Some(token),
            None => return Ok(volumes),
        }
    }
}

/// Takes in what changes; `version` is how far it has come.
async fn watch(inner: &Inner, kind: Kind, version: &mut u64) -> WatchError {
    let parameters = WatchParams::default().timeout(WATCH_LIMIT_S);
    let api = inner.api(kind);
    let start = version.to_string();
    let stream = match bounded(api.watch(&parameters, &start)).await {
        Ok(stream) => stream,
        Err(error) if is_code(&error, 410) => return WatchError::Lost(error.to_string()),
        Err(error) => return WatchError::Broken(error.to_string()),
    };
    let mut stream = std::pin::pin!(stream);
    loop {
        let event = match tokio::time::timeout(SILENCE_LIMIT, stream.next()).await {
            Ok(Some(Ok(event))) => event,
            Ok(Some(Err(error))) => return WatchError::Broken(error.to_string()),
            Ok(None) => return WatchError::Broken("the API server ended it".to_owned()),
            Err(_) => return WatchError::Broken("the API server is silent".to_owned()),
        };
        if let Err(error) = take(inner, kind, event, version).await {
            return error;
        }
    }
}

async fn take(
    inner: &Inner,
    kind: Kind,
    event: WatchEvent<DynamicObject>,
    version: &mut u64,
) -> Result<(), WatchError> {
    let lost = |error: ConvertError| WatchError::Lost(error.to_string());
    let (object, is_gone) = match event {
        WatchEvent::Added(object) | WatchEvent::Modified(object) => (object, false),
        WatchEvent::Deleted(object) => (object, true),
        WatchEvent::Bookmark(bookmark) => {
            *version = convert::version(Some(&bookmark.metadata.resource_version)).map_err(lost)?;
            inner.order().heard(kind, *version);
            return Ok(());
        }
        WatchEvent::Error(status) if is_expired(&status) => return Err(WatchError::Lost(status.message)),
        WatchEvent::Error(status) => return Err(WatchError::Broken(status.message)),
    };
    let at = convert::version(object.metadata.resource_version.as_deref()).map_err(lost)?;
    let key = key_of(kind, &object);
    if is_gone {
        let mut order = inner.order();
        inner.cache.change(|world| if order.take_gone(world, &key, at) { vec![key] } else { Vec::new() });
        order.heard(kind, at);
    } else {
        // What was not held is listed again, if it cannot be held now.
        let readable =
            readable(inner, &key, object).await.map_err(|error| WatchError::Lost(error.to_string()))?;
        if let Some(object) = readable {
            inner.take(object);
        }
        inner.order().heard(kind, at);
    }
    *version = at;
    Ok(())
}
