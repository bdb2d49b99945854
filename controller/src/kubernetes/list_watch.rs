//! The only list-and-watch of the controller: a list in pages, then the changes after its version.
//!
//! Callers decide when to list again, because they need different guarantees. docs/dependencies.md compares
//! them with those of `kube::runtime::watcher`.

use std::fmt::Debug;
use std::pin::Pin;
use std::time::Duration;

use kube::api::{Api, ListParams, WatchEvent, WatchParams};
use kube::core::{ObjectList, PartialObjectMeta, Status};
use kube::{Resource, ResourceExt};
use serde::de::DeserializeOwned;
use shorthorn_kube::{CallError, bounded, is_code};
use thiserror::Error;
use tokio::time::Instant;
use tokio_stream::{Stream, StreamExt};

/// The number of objects in a page of 2 to 6 MB, which the API server makes in one go.
const PAGE_OBJECTS: u32 = 2000;
/// The time after which the API server ends a watch, in seconds.
const WATCH_LIMIT_S: u32 = 290;
/// The longest silence of a watch: the API server sends a bookmark every minute.
pub(crate) const SILENCE_LIMIT: Duration = Duration::from_secs(150);

/// A list, page by page.
pub(crate) struct Pages<'a, K> {
    api: &'a Api<K>,
    parameters: ListParams,
    version: Option<String>,
    is_complete: bool,
}

impl<'a, K: Clone + Debug + DeserializeOwned> Pages<'a, K> {
    /// Begins a list of the objects that `parameters` select.
    pub(crate) fn new(api: &'a Api<K>, parameters: ListParams) -> Pages<'a, K> {
        let parameters = ListParams { limit: parameters.limit.or(Some(PAGE_OBJECTS)), ..parameters };
        Pages { api, parameters, version: None, is_complete: false }
    }

    /// Requests the next page; none after the last one.
    pub(crate) async fn next(&mut self) -> Result<Option<Vec<K>>, CallError> {
        if self.is_complete {
            return Ok(None);
        }
        let found = bounded(self.api.list(&self.parameters)).await?;
        Ok(Some(self.items_of(found)))
    }

    /// Requests the metadata of the objects of the next page; none after the last one.
    pub(crate) async fn next_metadata(&mut self) -> Result<Option<Vec<PartialObjectMeta<K>>>, CallError> {
        if self.is_complete {
            return Ok(None);
        }
        let found = bounded(self.api.list_metadata(&self.parameters)).await?;
        Ok(Some(self.items_of(found)))
    }

    fn items_of<T: Clone>(&mut self, found: ObjectList<T>) -> Vec<T> {
        if self.version.is_none() {
            self.version = found.metadata.resource_version;
        }
        match found.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => self.parameters.continue_token = Some(token),
            None => self.is_complete = true,
        }
        found.items
    }

    /// Returns the version of the list: a watch from there has all later changes.
    pub(crate) fn version(&self) -> Option<&str> {
        self.version.as_deref()
    }
}

/// Lists all pages, and returns the kept parts and the version of the list.
pub(crate) async fn list<K, T>(
    api: &Api<K>,
    parameters: ListParams,
    part: impl Fn(K) -> Option<T>,
) -> Result<(Vec<T>, String), CallError>
where
    K: Clone + Debug + DeserializeOwned,
{
    let (mut pages, mut all) = (Pages::new(api, parameters), Vec::new());
    while let Some(page) = pages.next().await? {
        all.extend(page.into_iter().filter_map(&part));
    }
    Ok((all, pages.version().unwrap_or_default().to_owned()))
}

/// A change of the listed objects.
#[derive(Debug)]
pub(crate) enum WatchChange<K> {
    /// The object was created or changed.
    Set(K),
    /// The object was deleted; this is its last state.
    Deleted(K),
    /// All changes up to this version were sent.
    Bookmark(String),
}

impl<K: ResourceExt> WatchChange<K> {
    /// Returns the version from which a watch continues after this change.
    pub(crate) fn version(&self) -> Option<String> {
        match self {
            WatchChange::Set(object) | WatchChange::Deleted(object) => object.resource_version(),
            WatchChange::Bookmark(version) => Some(version.clone()),
        }
    }
}

/// The reason why a watch does not continue.
#[derive(Debug, Error)]
pub(crate) enum WatchEnd {
    /// The time limit of the watch has passed. The next one continues from the last version.
    #[error("the API server ended the watch")]
    Ended,
    /// The connection is probably dead: bookmarks are missing.
    #[error("the API server is silent")]
    Silent,
    /// The API server has forgotten the version: the objects have to be listed again.
    #[error("{0}")]
    Expired(CallError),
    /// The API server has sent another error instead of a change.
    #[error("{0}")]
    Refused(CallError),
    /// The call has failed, or the connection broke.
    #[error("{0}")]
    Failed(#[from] CallError),
}

/// A watch from one version on.
pub(crate) struct Watch<K> {
    events: Pin<Box<dyn Stream<Item = kube::Result<WatchEvent<K>>> + Send>>,
    silent_at: Instant,
}

impl<K: Resource + Clone + Debug + DeserializeOwned + Send + 'static> Watch<K> {
    /// Watches all objects.
    pub(crate) async fn open(api: &Api<K>, version: &str) -> Result<Watch<K>, WatchEnd> {
        let parameters = WatchParams::default().timeout(WATCH_LIMIT_S);
        Ok(Watch::of(bounded(api.watch(&parameters, version)).await.map_err(refused)?))
    }
}

impl<K: Resource + Clone + Debug + DeserializeOwned + Send + 'static> Watch<PartialObjectMeta<K>> {
    /// Watches the metadata of the objects that `field_selector` selects.
    pub(crate) async fn open_metadata(
        api: &Api<K>,
        field_selector: &str,
        version: &str,
    ) -> Result<Watch<PartialObjectMeta<K>>, WatchEnd> {
        let parameters = WatchParams::default().fields(field_selector).timeout(WATCH_LIMIT_S);
        Ok(Watch::of(bounded(api.watch_metadata(&parameters, version)).await.map_err(refused)?))
    }
}

fn refused(error: CallError) -> WatchEnd {
    if is_code(&error, 410) { WatchEnd::Expired(error) } else { WatchEnd::Failed(error) }
}

fn is_expired(status: &Status) -> bool {
    status.code == 410 || status.reason == "Expired"
}

impl<K> Watch<K> {
    /// Reads the events of a stream.
    pub(crate) fn of(events: impl Stream<Item = kube::Result<WatchEvent<K>>> + Send + 'static) -> Watch<K> {
        Watch { events: Box::pin(events), silent_at: Instant::now() + SILENCE_LIMIT }
    }

    /// Waits for the next change. No change is lost if the wait is dropped.
    pub(crate) async fn next(&mut self) -> Result<WatchChange<K>, WatchEnd> {
        let event = tokio::time::timeout_at(self.silent_at, self.events.next()).await;
        let event = event.map_err(|_| WatchEnd::Silent)?.ok_or(WatchEnd::Ended)?;
        self.silent_at = Instant::now() + SILENCE_LIMIT;
        match event.map_err(CallError::from)? {
            WatchEvent::Added(object) | WatchEvent::Modified(object) => Ok(WatchChange::Set(object)),
            WatchEvent::Deleted(object) => Ok(WatchChange::Deleted(object)),
            WatchEvent::Bookmark(bookmark) => Ok(WatchChange::Bookmark(bookmark.metadata.resource_version)),
            WatchEvent::Error(status) => {
                let is_expired = is_expired(&status);
                let error = CallError::from(kube::Error::Api(status));
                Err(if is_expired { WatchEnd::Expired(error) } else { WatchEnd::Refused(error) })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::Pod;
    use serde_json::{Value, json};

    use super::*;

    fn watch(events: &[Value]) -> Watch<Pod> {
        let events: Vec<_> =
            events.iter().map(|event| Ok(serde_json::from_value(event.clone()).unwrap())).collect();
        Watch::of(tokio_stream::iter(events))
    }

    fn error(code: u16, reason: &str) -> Value {
        let status = json!({ "status": "Failure", "message": "m", "reason": reason, "code": code });
        json!({ "type": "ERROR", "object": status })
    }

    #[tokio::test]
    async fn changes_have_the_version_to_continue_from() {
        let pod = |version: &str| json!({ "metadata": { "name": "p", "resourceVersion": version } });
        let bookmark = json!({ "kind": "Pod", "apiVersion": "v1", "metadata": { "resourceVersion": "9" } });
        let mut watch = watch(&[
            json!({ "type": "ADDED", "object": pod("5") }),
            json!({ "type": "DELETED", "object": pod("7") }),
            json!({ "type": "BOOKMARK", "object": bookmark }),
        ]);
        let mut versions = Vec::new();
        let end = loop {
            match watch.next().await {
                Ok(change) => versions.push(change.version().unwrap()),
                Err(end) => break end,
            }
        };
        assert_eq!(versions, ["5", "7", "9"]);
        assert!(matches!(end, WatchEnd::Ended), "{end}");
    }

    #[tokio::test]
    async fn only_a_forgotten_version_is_reported_as_expired() {
        for (code, reason, is_forgotten) in
            [(410, "Gone", true), (400, "Expired", true), (500, "Internal", false)]
        {
            let end = watch(&[error(code, reason)]).next().await.unwrap_err();
            assert_eq!(matches!(end, WatchEnd::Expired(_)), is_forgotten, "{code} {reason}: {end}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn silence_ends_a_watch_even_if_the_wait_was_dropped_between() {
        let mut watch = Watch::<Pod>::of(tokio_stream::pending());
        let start = Instant::now();
        let short = tokio::time::timeout(SILENCE_LIMIT / 2, watch.next()).await;
        assert!(short.is_err(), "it ended early");
        assert!(matches!(watch.next().await, Err(WatchEnd::Silent)));
        assert_eq!(start.elapsed(), SILENCE_LIMIT);
    }
}
