//! Keeps a part of the API server's objects of one kind in memory. A list is followed by a watch from its
//! version, and both are repeated when the watch breaks. Reflectors are for objects that the controller only
//! reads; its own are in the store.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::fmt::Debug;
use std::sync::{Mutex, MutexGuard, PoisonError};

use kube::api::{Api, ListParams};
use kube::{Resource, ResourceExt};
use serde::de::DeserializeOwned;
use shorthorn_kube::CallError;
use tokio::sync::watch;

use super::list_watch::{Watch, WatchChange, WatchEnd, list};
use crate::backoff::backoff;

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

    /// Receives every change from now on.
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
        K: Resource + Clone + Debug + DeserializeOwned + Send + 'static,
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
                    let Err(end) = self.watch(&api, part, &mut at).await;
                    // After an error of the API server, the version may not be usable any more.
                    let lists = matches!(end, WatchEnd::Expired(_) | WatchEnd::Refused(_));
                    tracing::debug!(resource = api.resource_url(), %end, lists, "watching again");
                    if !lists {
                        if at != from {
                            failures = 0;
                        }
                        version = Some(at);
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
        let kept = |object: K| Some((object.name_any(), part(&object)?));
        let (all, version) = list(api, ListParams::default(), kept).await?;
        self.replace(all.into_iter().collect());
        Ok(version)
    }

    /// Takes over the changes of a watch; `version` is updated to the last one.
    async fn watch<K>(
        &self,
        api: &Api<K>,
        part: fn(&K) -> Option<T>,
        version: &mut String,
    ) -> Result<Infallible, WatchEnd>
    where
        K: Resource + Clone + Debug + DeserializeOwned + Send + 'static,
    {
        let mut watch = Watch::open(api, version).await?;
        loop {
            let change = watch.next().await?;
            match &change {
                WatchChange::Set(object) => self.set(object.name_any(), part(object)),
                WatchChange::Deleted(object) => self.set(object.name_any(), None),
                WatchChange::Bookmark(_) => {}
            }
            if let Some(at) = change.version() {
                *version = at;
            }
        }
    }
}
