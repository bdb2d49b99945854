//! Follows every change of one kind: a list, then a watch from its version on, and again if that breaks.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use kube::api::{Api, DynamicObject, ListParams};
use shorthorn_controller_core::left_out_objects::LeftOut;
use shorthorn_controller_core::objects::{Key, Kind, Object};
use shorthorn_controller_core::{Event, Timestamp};
use shorthorn_kube::{GROUP, plural, resource};
use thiserror::Error;
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::keys::{FINGERPRINT_ANNOTATION, KeyOfVolume};
use super::order::ObjectList;
use super::remote::Part;
use super::{CallError, ConvertError, Inner, StoreOpenError, bounded, convert, finalizer, is_code};
use crate::backoff::backoff;
use crate::kubernetes::list_watch::{Pages, Watch, WatchChange, WatchEnd};

/// The maximum number of restarts of a list whose version the API server has forgotten.
const LISTS_MAX: u32 = 5;
/// The number of objects that get the finalizer at a time during a list.
const HOLDS_MAX: usize = 16;
/// The wait before objects are tried again whose finalizer could not be set.
const LEFT_OUT_WAIT: Duration = Duration::from_secs(30);

/// The reason why the changes of a kind are not followed any further.
#[derive(Debug, Error)]
enum FollowError {
    /// The next watch continues from the last version.
    #[error("{0}")]
    Broken(WatchEnd),
    /// The objects have to be listed again.
    #[error("{0}")]
    Lost(String),
}

impl From<WatchEnd> for FollowError {
    fn from(end: WatchEnd) -> FollowError {
        match end {
            WatchEnd::Expired(error) => FollowError::Lost(error.to_string()),
            end => FollowError::Broken(end),
        }
    }
}

/// The known state of a kind.
#[derive(Debug)]
pub(super) struct Followed {
    /// The version up to which all changes are known.
    version: u64,
    /// But for these, whose finalizer the API server does not let us set.
    left_out: BTreeSet<Key>,
    /// The time of the next attempt for these objects.
    again_at: Instant,
}

impl Followed {
    fn new(version: u64) -> Followed {
        Followed { version, left_out: BTreeSet::new(), again_at: Instant::now() + LEFT_OUT_WAIT }
    }

    /// Reports an object that is left out, unless it is known.
    fn leave_out(&mut self, key: Key, error: &CallError) {
        tracing::warn!(%key, %error, "cannot set the finalizer of this object, which is left out for now");
        if self.left_out.is_empty() {
            self.again_at = Instant::now() + LEFT_OUT_WAIT;
        }
        self.left_out.insert(key);
    }
}

/// Returns true if the API server refuses this object, rather than every call.
fn is_about_object(error: &CallError) -> bool {
    [400, 403, 422, 500].into_iter().any(|code| is_code(error, code))
}

/// Follows a kind from there on, until it is dropped.
pub(super) async fn follow(inner: Arc<Inner>, kind: Kind, mut followed: Followed) {
    let mut failures = 0;
    loop {
        let before = followed.version;
        let error = watch(&inner, kind, &mut followed).await;
        if followed.version != before {
            failures = 0;
        }
        match error {
            FollowError::Broken(end) => tracing::debug!(kind = kind.as_str(), %end, "watching again"),
            FollowError::Lost(reason) => {
                tracing::info!(kind = kind.as_str(), reason, "listing again");
                match list(&inner, kind).await {
                    Ok(listed) => followed = listed,
                    Err(error) => tracing::warn!(kind = kind.as_str(), %error, "cannot list"),
                }
            }
        }
        failures += 1;
        tokio::time::sleep(backoff(failures)).await;
    }
}

/// Takes in everything of a kind.
pub(super) async fn list(inner: &Arc<Inner>, kind: Kind) -> Result<Followed, StoreOpenError> {
    let mut lists = 1;
    loop {
        match list_once(inner, kind).await {
            // It took so long that the API server has forgotten the version that it began with.
            Err(StoreOpenError::Call(error)) if is_code(&error, 410) && lists < LISTS_MAX => {
                tracing::info!(kind = kind.as_str(), %error, "listing again from the start");
                lists += 1;
            }
            result => return result,
        }
    }
}

async fn list_once(inner: &Arc<Inner>, kind: Kind) -> Result<Followed, StoreOpenError> {
    let api = inner.remote.api(kind);
    let (mut list, mut followed) = (ObjectList::default(), Followed::new(0));
    let mut pages = Pages::new(&api, ListParams::default());
    while let Some(objects) = pages.next().await.map_err(|error| not_installed(kind, error))? {
        if list.version == 0 {
            list.version = convert::version(pages.version()).map_err(StoreOpenError::List)?;
        }
        read_page(inner, kind, objects, &mut list, &mut followed).await?;
    }
    followed.version = list.version;
    inner.known.relist(kind, list);
    Ok(followed)
}

/// Adds a page to a list. Objects that are not held yet get the finalizer side by side.
async fn read_page(
    inner: &Arc<Inner>,
    kind: Kind,
    objects: Vec<DynamicObject>,
    list: &mut ObjectList,
    followed: &mut Followed,
) -> Result<(), CallError> {
    let mut take = |key: Key, read: Result<Read, CallError>| {
        match read? {
            Read::Object(object) => list.objects.push(*object),
            Read::Nothing => list.unreadable.push(key),
            Read::LeftOut(left_out) => drop(list.left_out.insert(key, left_out)),
            Read::NotHeld(left_out, error) => {
                followed.leave_out(key.clone(), &error);
                list.left_out.insert(key, left_out);
            }
        }
        Ok::<(), CallError>(())
    };
    let mut holding = JoinSet::new();
    for object in objects {
        let key = key_of(kind, &object);
        if is_completely_held(kind, &object) {
            take(key.clone(), readable(inner, &key, object).await)?;
            continue;
        }
        if holding.len() >= HOLDS_MAX
            && let Some(Ok((key, read))) = holding.join_next().await
        {
            take(key, read)?;
        }
        let inner = Arc::clone(inner);
        holding.spawn(async move {
            let read = readable(&inner, &key, object).await;
            (key, read)
        });
    }
    for (key, read) in holding.join_all().await {
        take(key, read)?;
    }
    Ok(())
}

/// Adds the volumes that were created after the list of volumes, but before the lists of the objects that
/// belong to them.
pub(super) async fn complete(inner: &Inner) -> Result<(), StoreOpenError> {
    let missing: BTreeSet<String> = {
        let state = inner.known.state();
        let replicas = state.replicas.values().map(|replica| replica.spec.volume_name.as_str());
        let owners = replicas.chain(state.engines.keys().map(String::as_str));
        owners.filter(|name| !state.volumes.contains_key(*name)).map(str::to_owned).collect()
    };
    for name in missing {
        let key = Key::new(Kind::Volume, &name);
        let Some(found) = bounded(inner.remote.api(Kind::Volume).get_opt(&name)).await? else { continue };
        match readable(inner, &key, found).await? {
            Read::Object(volume) => inner.known.take(*volume),
            Read::Nothing => {}
            Read::LeftOut(left_out) | Read::NotHeld(left_out, _) => inner.known.leave_out(key, left_out),
        }
    }
    Ok(())
}

fn not_installed(kind: Kind, error: CallError) -> StoreOpenError {
    if is_code(&error, 404) { StoreOpenError::NotInstalled(plural(kind)) } else { error.into() }
}

fn key_of(kind: Kind, object: &DynamicObject) -> Key {
    Key::new(kind, object.metadata.name.clone().unwrap_or_default())
}

/// An object as the reconcilers see it.
#[derive(Debug)]
enum Read {
    /// The object can be used, and cannot disappear while the reconcilers use it.
    Object(Box<Object>),
    /// The object is about to disappear, and has nothing of ours.
    Nothing,
    /// The object cannot be used.
    LeftOut(LeftOut),
    /// The finalizer of the object cannot be set now. The controller tries again.
    NotHeld(LeftOut, CallError),
}

/// The remedy for an object whose finalizer the API server does not let us set.
const NOT_HELD_REMEDY: &str = "let the controller change it (packaging/deploy/rbac.yaml, admission \
                               webhooks); it tries again every 30 s";

fn left_out(key: &Key, object: &DynamicObject, why: String, remedy: String) -> LeftOut {
    let version = convert::version(object.metadata.resource_version.as_deref()).ok();
    LeftOut::new(key.kind, Some(&object.data), why, remedy).at_version(version)
}

fn unreadable(key: &Key, object: &DynamicObject, error: &ConvertError) -> LeftOut {
    let remedy = format!(
        "correct it (kubectl edit {}.{GROUP} {}), or delete it if it keeps nothing of value",
        plural(key.kind),
        key.name
    );
    left_out(key, object, error.to_string(), remedy)
}

/// Reads an object, and sets our finalizer if it is missing.
async fn readable(inner: &Inner, key: &Key, mut object: DynamicObject) -> Result<Read, CallError> {
    let is_held = finalizer::is_held(key.kind, &object.metadata);
    if !is_held && object.metadata.deletion_timestamp.is_some() {
        // Nothing of ours is in it: others hold it.
        return Ok(Read::Nothing);
    }
    // The check comes before the hold: the creator can remove an invalid object again.
    match convert::object(key.kind, &object, &inner.keys) {
        Ok(read) if is_completely_held(key.kind, &object) => return Ok(Read::Object(Box::new(read))),
        Ok(_) => {}
        Err(error) => {
            refuse(inner, key, &object, &error).await;
            return Ok(Read::LeftOut(unreadable(key, &object, &error)));
        }
    }
    match hold(inner, key, &object).await {
        Ok(held) => object = held,
        Err(error) if is_code(&error, 404) => return Ok(Read::Nothing),
        // Another writer was first: the watch brings the new version.
        Err(error) if is_code(&error, 409) => {
            let (why, remedy) =
                ("the object was changed while the controller set its finalizer", "wait a moment");
            return Ok(Read::LeftOut(left_out(key, &object, why.to_owned(), remedy.to_owned())));
        }
        Err(error) if is_about_object(&error) => {
            let why = format!("the finalizer of the object cannot be set: {error}");
            return Ok(Read::NotHeld(left_out(key, &object, why, NOT_HELD_REMEDY.to_owned()), error));
        }
        Err(error) => return Err(error),
    }
    match convert::object(key.kind, &object, &inner.keys) {
        Ok(object) => Ok(Read::Object(Box::new(object))),
        Err(error) => {
            refuse(inner, key, &object, &error).await;
            Ok(Read::LeftOut(unreadable(key, &object, &error)))
        }
    }
}

/// Reports the problem of an invalid volume in its status, once. Problems of other kinds, which people do not
/// write by hand, are logged.
async fn refuse(inner: &Inner, key: &Key, object: &DynamicObject, error: &ConvertError) {
    let status = match (key.kind, error) {
        (Kind::Volume, ConvertError::Part("spec", why)) => {
            convert::refused_status(object, why, Timestamp::now())
        }
        _ => {
            tracing::warn!(%key, %error, "this object is left out");
            return;
        }
    };
    // None: the status has the refusal already.
    let Some(status) = status else { return };
    tracing::warn!(%key, %error, "this object is left out");
    let version = convert::version(object.metadata.resource_version.as_deref()).unwrap_or(0);
    if let Err(error) = inner.remote.send(key, version, Part::Status(status)).await {
        // If another writer was first, the watch brings the current state.
        tracing::debug!(%key, %error, "the problem of the object is not recorded");
        return;
    }
    let message = format!("the controller does not reconcile this volume until its spec is valid: {error}");
    let event = Event { about: key.clone(), warning: true, reason: convert::INVALID_SPEC, message };
    inner.events.record(&event, object.metadata.uid.as_deref());
}

/// Returns true if the object has our finalizer, and a volume its annotations.
fn is_completely_held(kind: Kind, object: &DynamicObject) -> bool {
    let is_complete = kind != Kind::Volume
        || object.metadata.deletion_timestamp.is_some()
        || has_fingerprint(object)
            && (convert::has_encryption_annotation(object) || !convert::asks_for_encryption(object));
    is_complete && finalizer::is_held(kind, &object.metadata)
}

fn has_fingerprint(volume: &DynamicObject) -> bool {
    let annotations = volume.metadata.annotations.as_ref();
    annotations.is_some_and(|annotations| annotations.contains_key(FINGERPRINT_ANNOTATION))
}

/// Adds our finalizer, and in the same write the annotations of a volume. These are the fingerprint of the
/// key that it needs from here on, and that of encryption.
async fn hold(inner: &Inner, key: &Key, object: &DynamicObject) -> Result<DynamicObject, CallError> {
    let version = convert::version(object.metadata.resource_version.as_deref()).unwrap_or(0);
    let mut finalizers = object.metadata.finalizers.clone().unwrap_or_default();
    if !finalizers.iter().any(|one| one == finalizer::FINALIZER) {
        finalizers.push(finalizer::FINALIZER.to_owned());
    }
    let annotations = (key.kind == Kind::Volume).then(|| inner.annotations_of(object));
    inner.remote.send(key, version, Part::Held { finalizers, annotations }).await
}

/// Returns the keys that existing volumes need, before a key can read them.
pub(super) async fn keys_of_volumes(
    client: &kube::Client,
    namespace: &str,
) -> Result<Vec<KeyOfVolume>, StoreOpenError> {
    let api: Api<DynamicObject> = Api::namespaced_with(client.clone(), namespace, &resource(Kind::Volume));
    let (mut pages, mut volumes) = (Pages::new(&api, ListParams::default()), Vec::new());
    while let Some(page) = pages.next_metadata().await.map_err(|error| not_installed(Kind::Volume, error))? {
        volumes.extend(page.iter().map(|volume| KeyOfVolume::of(&volume.metadata)));
    }
    Ok(volumes)
}

/// Takes in the changes, and keeps `followed` up to date.
async fn watch(inner: &Arc<Inner>, kind: Kind, followed: &mut Followed) -> FollowError {
    match Watch::open(&inner.remote.api(kind), &followed.version.to_string()).await {
        Ok(watch) => take_changes(inner, kind, followed, watch).await,
        Err(end) => end.into(),
    }
}

/// Takes in the changes of a watch until it ends. Objects that are left out are tried again beside it.
/// Neither their calls nor their failures hold up a change, or hide that the watch is silent.
async fn take_changes(
    inner: &Arc<Inner>,
    kind: Kind,
    followed: &mut Followed,
    mut watch: Watch<DynamicObject>,
) -> FollowError {
    let mut retries = Retries::default();
    loop {
        let change = tokio::select! {
            change = watch.next() => change,
            () = tokio::time::sleep_until(followed.again_at),
                if !followed.left_out.is_empty() && retries.running.is_empty() =>
            {
                retries.begin(inner, &followed.left_out);
                continue;
            }
            Some(tried) = retries.running.join_next() => {
                let tried = tried.map_err(|error| FollowError::Lost(error.to_string()));
                match tried.and_then(|(key, tried)| take_tried(inner, key, tried, followed)) {
                    Ok(()) => retries.start_next(inner),
                    Err(error) => return error,
                }
                if retries.running.is_empty() {
                    followed.again_at = Instant::now() + LEFT_OUT_WAIT;
                }
                continue;
            }
        };
        let taken = match change {
            Ok(change) => take(inner, kind, change, followed).await,
            Err(end) => Err(end.into()),
        };
        if let Err(error) = taken {
            return error;
        }
    }
}

/// The result of a new attempt; none if the object is gone.
type Tried = Result<Option<Read>, CallError>;

/// Attempts to set the finalizers of objects that are left out. They end with this value.
#[derive(Default)]
struct Retries {
    waiting: VecDeque<Key>,
    running: JoinSet<(Key, Tried)>,
}

impl Retries {
    fn begin(&mut self, inner: &Arc<Inner>, left_out: &BTreeSet<Key>) {
        self.waiting.extend(left_out.iter().cloned());
        (0..HOLDS_MAX).for_each(|_| self.start_next(inner));
    }

    fn start_next(&mut self, inner: &Arc<Inner>) {
        let Some(key) = self.waiting.pop_front() else { return };
        let inner = Arc::clone(inner);
        self.running.spawn(async move {
            let tried = try_again(&inner, &key).await;
            (key, tried)
        });
    }
}

async fn try_again(inner: &Inner, key: &Key) -> Tried {
    match bounded(inner.remote.api(key.kind).get_opt(&key.name)).await? {
        Some(found) => readable(inner, key, found).await.map(Some),
        None => Ok(None),
    }
}

fn take_tried(inner: &Inner, key: Key, tried: Tried, followed: &mut Followed) -> Result<(), FollowError> {
    if !followed.left_out.contains(&key) {
        // The watch has brought something newer meanwhile.
        return Ok(());
    }
    match tried {
        Ok(Some(Read::Object(object))) => {
            followed.left_out.remove(&key);
            inner.known.take(*object);
            if !inner.known.state().has(&key) {
                // Another controller has set its finalizer, and the watch is past that.
                return Err(FollowError::Lost(format!("{key} got its finalizer meanwhile")));
            }
        }
        Ok(Some(Read::LeftOut(left_out))) => {
            followed.left_out.remove(&key);
            inner.known.leave_out(key, left_out);
        }
        Ok(Some(Read::NotHeld(_, error))) | Err(error) => followed.leave_out(key, &error),
        Ok(Some(Read::Nothing) | None) => {
            followed.left_out.remove(&key);
            inner.known.forget_left_out(&key);
        }
    }
    Ok(())
}

async fn take(
    inner: &Inner,
    kind: Kind,
    change: WatchChange<DynamicObject>,
    followed: &mut Followed,
) -> Result<(), FollowError> {
    let lost = |error: ConvertError| FollowError::Lost(error.to_string());
    let (object, is_gone) = match change {
        WatchChange::Set(object) => (object, false),
        WatchChange::Deleted(object) => (object, true),
        WatchChange::Bookmark(version) => {
            let version = convert::version(Some(&version)).map_err(lost)?;
            followed.version = version;
            inner.known.heard(kind, version);
            return Ok(());
        }
    };
    let at = convert::version(object.metadata.resource_version.as_deref()).map_err(lost)?;
    let key = key_of(kind, &object);
    if is_gone {
        followed.left_out.remove(&key);
        inner.known.take_gone(key, at);
    } else {
        // It is listed again if its finalizer cannot be set now.
        let read =
            readable(inner, &key, object).await.map_err(|error| FollowError::Lost(error.to_string()))?;
        let is_not_held = matches!(read, Read::NotHeld(..));
        if !is_not_held {
            followed.left_out.remove(&key);
        }
        match read {
            Read::Object(object) => inner.known.take(*object),
            Read::Nothing => inner.known.forget_left_out(&key),
            Read::LeftOut(left_out) => inner.known.leave_out(key, left_out),
            Read::NotHeld(left_out, error) => {
                followed.leave_out(key.clone(), &error);
                inner.known.leave_out(key, left_out);
            }
        }
        inner.known.heard(kind, at);
    }
    followed.version = at;
    Ok(())
}

#[cfg(test)]
mod tests;
