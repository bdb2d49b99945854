//! Mirrors a part of the API server's objects of one kind in memory. A list is followed by a watch from its
//! version, and both are repeated when the watch breaks. Mirrors are for objects that the controller only
//! reads; its own are in the store.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::sync::{Mutex, MutexGuard, PoisonError};

use kube::api::{Api, ListParams, WatchEvent, WatchParams};
use kube::{Resource, ResourceExt};
use serde::de::DeserializeOwned;
use tokio::sync::watch;
use tokio_stream::StreamExt;

use crate::backoff::backoff;
use crate::store::kubernetes::{CallError, PAGE_OBJECTS, SILENCE_LIMIT, WATCH_LIMIT_S, bounded, is_code};

/// The kept part of each object, by name.
#[derive(Debug)]
pub struct Reflector<T> {
    kept: Mutex<ReflectorCache<T>>,
    changed: watch::Sender<()>,
}

#[derive(Debug)]
struct ReflectorCache<T> {
    by_name: BTreeMap<String, T>,
    /// True if everything was listed once.
    is_complete: bool,
    /// The names of the objects changed since the last call; none if a list came since.
    changed_names: Option<BTreeSet<String>>,
}

/// The changes of a reflector.
#[derive(Debug, PartialEq, Eq)]
pub enum ReflectorEvent<T> {
    /// All objects, after a list.
    All(BTreeMap<String, T>),
    /// The changed objects by name; none for a deleted one.
    Some(BTreeMap<String, Option<T>>),
}

/// The reason why a watch does not continue.
enum Broken {
    /// The watch has ended, and the next one continues from the last version.
    Watch(String),
    /// The objects have to be listed again.
    Version(String),
}

impl<T: Clone + PartialEq> Reflector<T> {
    /// Creates an empty reflector.
    pub fn new() -> Reflector<T> {
        let kept = ReflectorCache {
            by_name: BTreeMap::new(),
            is_complete: false,
            changed_names: Some(BTreeSet::new()),
        };
        Reflector { kept: Mutex::new(kept), changed: watch::Sender::new(()) }
    }

    fn kept(&self) -> MutexGuard<'_, ReflectorCache<T>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns all objects, after the first list.
    pub fn all(&self) -> Option<BTreeMap<String, T>> {
        let kept = self.kept();
        kept.is_complete.then(|| kept.by_name.clone())
    }

    /// Returns the changes since the last call, for a single caller; none before the first list is complete.
    pub fn changes_since_last(&self) -> Option<ReflectorEvent<T>> {
        let mut kept = self.kept();
        if !kept.is_complete {
            return None;
        }
        let changed_names = kept.changed_names.replace(BTreeSet::new());
        Some(match changed_names {
            None => ReflectorEvent::All(kept.by_name.clone()),
            Some(names) => ReflectorEvent::Some(
                names.into_iter().map(|name| (name.clone(), kept.by_name.get(&name).cloned())).collect(),
            ),
        })
    }

    /// Hears of every change from now on.
    pub fn changes(&self) -> watch::Receiver<()> {
        self.changed.subscribe()
    }

    pub(super) fn replace(&self, all: BTreeMap<String, T>) {
        *self.kept() = ReflectorCache { by_name: all, is_complete: true, changed_names: None };
        self.changed.send_replace(());
    }

    fn set(&self, name: String, part: Option<T>) {
        let mut kept = self.kept();
        if kept.by_name.get(&name) == part.as_ref() {
            return;
        }
        if let Some(changed_names) = &mut kept.changed_names {
            changed_names.insert(name.clone());
        }
        match part {
            Some(part) => drop(kept.by_name.insert(name, part)),
            None => drop(kept.by_name.remove(&name)),
        }
        drop(kept);
        self.changed.send_replace(());
    }

    /// Follows all objects of a kind, until it is dropped. `part` returns the part to keep of an object, or
    /// none.
    pub async fn follow<K>(&self, api: Api<K>, part: fn(&K) -> Option<T>)
    where
        K: Resource + Clone + Debug + DeserializeOwned,
    {
        let mut failures = 0;
        let mut version: Option<String> = None;
        loop {
            let listed = match version.take() {
                Some(version) => Ok(version),
                None => self.list(&api, part).await,
            };
            match listed {
                Ok(from) => {
                    let mut at = from.clone();
                    match self.watch(&api, part, &mut at).await {
                        Broken::Watch(reason) => {
                            tracing::debug!(resource = api.resource_url(), reason, "watching again");
                            if at != from {
                                failures = 0;
                            }
                            version = Some(at);
                        }
                        Broken::Version(reason) => {
                            tracing::debug!(resource = api.resource_url(), reason, "listing again");
                        }
                    }
                }
                Err(error) => tracing::warn!(resource = api.resource_url(), %error, "cannot list"),
            }
            failures += 1;
            tokio::time::sleep(backoff(failures)).await;
        }
    }

    async fn list<K>(&self, api: &Api<K>, part: fn(&K) -> Option<T>) -> Result<String, CallError>
    where
        K: Resource + Clone + Debug + DeserializeOwned,
    {
        let mut all = BTreeMap::new();
        let mut page = ListParams::default().limit(PAGE_OBJECTS);
        let mut version = None;
        loop {
            let found = bounded(api.list(&page)).await?;
            all.extend(found.items.iter().filter_map(|object| Some((object.name_any(), part(object)?))));
            let version = version.get_or_insert_with(|| found.metadata.resource_version.unwrap_or_default());
            match found.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => page.continue_token = Some(token),
                None => {
                    self.replace(all);
                    return Ok(version.clone());
                }
            }
        }
    }

    /// Takes over the changes of a watch; `version` is updated to the last one.
    async fn watch<K>(&self, api: &Api<K>, part: fn(&K) -> Option<T>, version: &mut String) -> Broken
    where
        K: Resource + Clone + Debug + DeserializeOwned,
    {
        let parameters = WatchParams::default().timeout(WATCH_LIMIT_S);
        let stream = match bounded(api.watch(&parameters, version)).await {
            Ok(stream) => stream,
            Err(error) if is_code(&error, 410) => return Broken::Version(error.to_string()),
            Err(error) => return Broken::Watch(error.to_string()),
        };
        let mut stream = std::pin::pin!(stream);
        loop {
            let event = match tokio::time::timeout(SILENCE_LIMIT, stream.next()).await {
                Ok(Some(Ok(event))) => event,
                Ok(Some(Err(error))) => return Broken::Watch(error.to_string()),
                Ok(None) => return Broken::Watch("the API server ended it".to_owned()),
                Err(_) => return Broken::Watch("the API server is silent".to_owned()),
            };
            let at = match event {
                WatchEvent::Added(object) | WatchEvent::Modified(object) => {
                    self.set(object.name_any(), part(&object));
                    object.resource_version()
                }
                WatchEvent::Deleted(object) => {
                    self.set(object.name_any(), None);
                    object.resource_version()
                }
                WatchEvent::Bookmark(bookmark) => Some(bookmark.metadata.resource_version),
                // Mostly that the version is too old; a list helps against all else too.
                WatchEvent::Error(status) => return Broken::Version(status.message),
            };
            if let Some(at) = at {
                *version = at;
            }
        }
    }
}
