//! Objects as custom resources of Kubernetes.
//!
//! All objects are kept in memory as well, filled by a list and a watch of each kind, and by the answers to
//! own writes. A write is a JSON merge patch of the differences, with the resource version of the decision.
//! It fails with a conflict after any other write, and leaves fields of other writers alone, like labels.
//! Server-side apply does not suffice: it cannot revert a field that another writer has written too, like
//! `spec.nodeID`.
//!
//! Spec and status are two calls. If both differ, the spec comes first. No reconciler needs both at once: if
//! the process dies in between, the next run computes the status from the stored spec. Facts that must be
//! durable before any other step are in a status alone. These are the number of an attachment, a grant, and
//! that an engine may run. A deletion is a call of its own; reconcilers ignore all other changes of an object
//! that is being deleted.

mod convert;
mod finalizer;
mod follow;
mod keys;
mod known;
mod last_write;
mod order;
mod remote;

use std::collections::BTreeMap;
use std::sync::{Arc, RwLockReadGuard};

use async_trait::async_trait;
use k8s_openapi::api::core::v1::Secret as KubernetesSecret;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::Client;
use kube::api::{Api, DynamicObject, ListParams};
use shorthorn_controller_core::ClusterState;
use shorthorn_controller_core::objects::{Key, Kind, Object, Replica, ResourceVersion};
use shorthorn_kube::{KINDS, crds, plural};
use thiserror::Error;
use tokio::sync::broadcast;
use tokio::task::JoinSet;

pub(crate) use self::convert::Parts;
pub(crate) use self::finalizer::FINALIZER;
use self::keys::VolumeKeys;
use self::known::KnownObjects;
use self::last_write::LastWrite;
use self::order::place;
use self::remote::{Part, Remote};
use super::events::EventSender;
use crate::store::{ObjectStore, ObjectStoreError};

pub use self::convert::ConvertError;
pub use self::keys::{FINGERPRINT_ANNOTATION, KEY_NAME};
pub use shorthorn_kube::{CallError, bounded, is_code};

/// The reason why the store cannot be opened.
#[derive(Debug, Error)]
pub enum StoreOpenError {
    /// A call failed.
    #[error("cannot read the objects of Shorthorn: {0}")]
    Call(#[from] CallError),
    /// The custom resources are not installed.
    #[error(
        "the API server does not know {0}: install them with shorthorn-controller crds | kubectl apply -f -"
    )]
    NotInstalled(String),
    /// The API server would drop fields that this release stores.
    #[error(
        "the definition {definition} of the API server is older than this controller, and would drop \
         {lacking}: first run shorthorn-controller crds | kubectl apply -f -"
    )]
    OldDefinition {
        /// Name of the CustomResourceDefinition in the API server.
        definition: String,
        /// The missing fields.
        lacking: String,
    },
    /// A list was interrupted, as by a panic.
    #[error("a list of the API server was cut off: {0}")]
    Ended(String),
    /// The list has no version that can be used.
    #[error("a list of the API server cannot be used: {0}")]
    List(ConvertError),
    /// The Secret has no key.
    #[error(
        "Secret {KEY_NAME} has no field key of 32 bytes: restore it from a backup; without it no engine \
         reaches its replicas"
    )]
    Key,
    /// The Secret does not exist, and volumes need it.
    #[error(
        "Secret {KEY_NAME} is lost, and {count} volumes need it, such as {volume}: restore it from a backup \
         (docs/backup.md); its fingerprint is {fingerprint}. The controller makes no other key, because no \
         engine would reach its replicas with it"
    )]
    KeyLost {
        /// The number of volumes that need it.
        count: usize,
        /// A volume that needs the key.
        volume: String,
        /// Identifies the lost key, if a volume has recorded that.
        fingerprint: String,
    },
    /// The Secret has a key that volumes were not made with.
    #[error(
        "Secret {KEY_NAME} has the key {present}, and {count} volumes, such as {volume}, need the key \
         {needed}: restore that key from a backup (docs/backup.md). With the present key, engines of these \
         volumes cannot reach their replicas"
    )]
    OtherKey {
        /// The number of volumes that need another one.
        count: usize,
        /// A volume that needs the key.
        volume: String,
        /// The fingerprint of its key.
        needed: String,
        /// The fingerprint of the existing key.
        present: String,
    },
    /// The operating system gives no random numbers.
    #[error("cannot get random numbers for Secret {KEY_NAME}: {0}")]
    Random(getrandom::Error),
}

/// The objects of one namespace.
pub struct KubeStore {
    inner: Arc<Inner>,
    leader: Option<u64>,
    /// Ends with this value.
    _following: JoinSet<()>,
}

impl std::fmt::Debug for KubeStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KubeStore").field("namespace", &self.inner.remote.namespace()).finish_non_exhaustive()
    }
}

struct Inner {
    /// Identity of this cluster, which the keys determine.
    cluster: String,
    /// The key of the secrets of volumes.
    keys: VolumeKeys,
    remote: Remote,
    known: KnownObjects,
    last_write: LastWrite,
    events: EventSender,
}

impl KubeStore {
    /// Reads all objects, and follows their changes. `events` reports problems of objects.
    ///
    /// # Errors
    /// [`StoreOpenError`].
    pub async fn open(
        client: Client,
        namespace: &str,
        events: EventSender,
    ) -> Result<KubeStore, StoreOpenError> {
        check_definitions(&client).await?;
        let volumes = follow::keys_of_volumes(&client, namespace).await?;
        let secrets = Api::<KubernetesSecret>::namespaced(client.clone(), namespace);
        let keys = VolumeKeys::open(&secrets, &volumes).await?;
        let inner = Arc::new(Inner {
            cluster: keys.cluster(),
            keys,
            remote: Remote::new(client, namespace),
            known: KnownObjects::new(),
            last_write: LastWrite::default(),
            events,
        });
        let mut listing = JoinSet::new();
        for kind in KINDS {
            let inner = Arc::clone(&inner);
            listing.spawn(async move { (kind, follow::list(&inner, kind).await) });
        }
        let mut lists = Vec::new();
        while let Some(listed) = listing.join_next().await {
            let (kind, followed) = listed.map_err(|error| StoreOpenError::Ended(error.to_string()))?;
            lists.push((kind, followed?));
        }
        follow::complete(&inner).await?;
        let mut following = JoinSet::new();
        for (kind, followed) in lists {
            following.spawn(follow::follow(Arc::clone(&inner), kind, followed));
        }
        Ok(KubeStore { inner, leader: None, _following: following })
    }

    /// The same, whose controller is the leader of that number.
    #[must_use]
    pub fn led_by(self, leader: Option<u64>) -> KubeStore {
        KubeStore { leader, ..self }
    }
}

/// Checks that the API server keeps all fields that this release stores.
async fn check_definitions(client: &Client) -> Result<(), StoreOpenError> {
    let api: Api<CustomResourceDefinition> = Api::all(client.clone());
    for kind in KINDS {
        let definition = crds::definition_name(kind);
        let found = match bounded(api.get_opt(&definition)).await {
            Ok(Some(found)) => found,
            Ok(None) => return Err(StoreOpenError::NotInstalled(plural(kind))),
            Err(error) if is_code(&error, 403) => {
                tracing::warn!(%error, "cannot read {definition}: apply packaging/deploy/rbac.yaml again");
                return Ok(());
            }
            Err(error) => return Err(error.into()),
        };
        let installed = serde_json::to_value(found).unwrap_or_default();
        let lacking = crds::lacking(kind, &installed);
        if !lacking.is_empty() {
            return Err(StoreOpenError::OldDefinition { definition, lacking: lacking.join(", ") });
        }
    }
    Ok(())
}

#[async_trait]
impl ObjectStore for KubeStore {
    fn state(&self) -> RwLockReadGuard<'_, ClusterState> {
        self.inner.known.state()
    }

    async fn put(&self, object: Object) -> Result<Object, ObjectStoreError> {
        let inner = Arc::clone(&self.inner);
        // The write completes even if the caller is gone: the memory learns of it.
        finished(tokio::spawn(async move {
            let known = object.metadata().resource_version;
            let result = inner.put(object).await;
            match &result {
                // Nothing had to be written, which says nothing about writes.
                Ok(stored) if stored.metadata().resource_version == known => result,
                _ => inner.last_write.record(result),
            }
        }))
        .await
    }

    async fn remove(&self, key: &Key, version: Option<ResourceVersion>) -> Result<(), ObjectStoreError> {
        let (inner, key) = (Arc::clone(&self.inner), key.clone());
        finished(tokio::spawn(async move { inner.last_write.record(inner.remove(&key, version).await) }))
            .await
    }

    async fn check(&self) -> Result<(), ObjectStoreError> {
        self.inner.last_write.check()?;
        let one =
            bounded(self.inner.remote.api(Kind::Node).list_metadata(&ListParams::default().limit(1))).await;
        let unavailable = |error: CallError| ObjectStoreError::Unavailable { message: error.to_string() };
        one.map(drop).map_err(unavailable)
    }

    fn reserve(&self, replicas: Vec<Replica>) -> bool {
        self.inner.known.reserve(replicas)
    }

    fn forget_reservations(&self, names: &[String]) {
        self.inner.known.forget_reservations(names);
    }

    fn changes(&self) -> broadcast::Receiver<Key> {
        self.inner.known.changes()
    }

    fn cluster(&self) -> &str {
        &self.inner.cluster
    }

    fn leader(&self) -> Option<u64> {
        self.leader
    }
}

async fn finished<T>(
    task: tokio::task::JoinHandle<Result<T, ObjectStoreError>>,
) -> Result<T, ObjectStoreError> {
    match task.await {
        Ok(result) => result,
        Err(error) => Err(ObjectStoreError::Unavailable { message: error.to_string() }),
    }
}

impl Inner {
    async fn put(&self, object: Object) -> Result<Object, ObjectStoreError> {
        let key = object.key();
        let expected = object.metadata().resource_version;
        // The check follows: a newer version that comes in between is not the base of this write. With an
        // older base the API server refuses it.
        let stored = self.known.state().get(&key);
        self.known.check(&key, expected)?;
        let written = match stored {
            None => self.create(&key, &object).await,
            Some(stored) if object.metadata().is_deleting() && !stored.metadata().is_deleting() => {
                self.ask_for_deletion(&key, stored).await
            }
            Some(stored) => self.update(&key, stored, &object).await,
        };
        match written {
            Ok(object) => Ok(object),
            Err(error) => Err(self.failed(&key, expected, &error).await),
        }
    }

    /// Writes the spec, then the known status: an API server takes no status with a new object.
    async fn create(&self, key: &Key, object: &Object) -> Result<Object, WriteError> {
        let Parts { spec, status } = convert::parts(object)?;
        let mut new = convert::new(object, spec, self.remote.namespace());
        if key.kind == Kind::Volume {
            new.metadata.annotations = Some(self.annotations_of(&new));
        }
        if convert::asks_for_encryption(&new) {
            // A dry run: reconcilers would see a volume that is made and taken back.
            check_encryption_kept(&new, &self.remote.create(key.kind, &new, true).await?)?;
        }
        let made = self.remote.create(key.kind, &new, false).await?;
        check_encryption_kept(&new, &made)?;
        let made = self.take_in(key, &made)?;
        let nothing = convert::parts(&made)?.status;
        match convert::whole_patch(&nothing, &status) {
            Some(change) => self.patch(key, made.metadata().resource_version, Part::Status(change)).await,
            None => Ok(made),
        }
    }

    /// Returns the annotations of a volume that its fields do not keep.
    fn annotations_of(&self, volume: &DynamicObject) -> BTreeMap<String, String> {
        let mut annotations = BTreeMap::from([(FINGERPRINT_ANNOTATION.to_owned(), self.keys.fingerprint())]);
        if convert::asks_for_encryption(volume) {
            annotations.insert(convert::ENCRYPTION_ANNOTATION.to_owned(), "true".to_owned());
        }
        annotations
    }

    async fn update(&self, key: &Key, stored: Object, object: &Object) -> Result<Object, WriteError> {
        let (old, new) = (convert::parts(&stored)?, convert::parts(object)?);
        let mut written = stored;
        if let Some(change) = convert::merge_patch(&old.spec, &new.spec) {
            written = self.patch(key, written.metadata().resource_version, Part::Spec(change)).await?;
        }
        if let Some(change) = convert::whole_patch(&old.status, &new.status) {
            written = self.patch(key, written.metadata().resource_version, Part::Status(change)).await?;
        }
        Ok(written)
    }

    /// Changes one part of an object that still has this version.
    async fn patch(
        &self,
        key: &Key,
        version: Option<ResourceVersion>,
        part: Part,
    ) -> Result<Object, WriteError> {
        let found = self.remote.send(key, place(version), part).await?;
        self.take_in(key, &found)
    }

    /// Requests the deletion; the finalizer keeps the object until `remove`.
    async fn ask_for_deletion(&self, key: &Key, stored: Object) -> Result<Object, WriteError> {
        let version = place(stored.metadata().resource_version);
        match self.remote.delete(key, version).await? {
            Some(left) => self.take_in(key, &left),
            // The object had no finalizer: another client removed it.
            None => {
                self.known.forget(key, version);
                Ok(stored)
            }
        }
    }

    async fn remove(&self, key: &Key, expected: Option<ResourceVersion>) -> Result<(), ObjectStoreError> {
        self.known.check(key, expected)?;
        match self.take_away(key, expected).await {
            Ok(()) => Ok(()),
            Err(error) => Err(self.failed(key, expected, &error).await),
        }
    }

    async fn take_away(&self, key: &Key, expected: Option<ResourceVersion>) -> Result<(), WriteError> {
        let mut left = bounded(self.remote.api(key.kind).get(&key.name)).await?;
        let mut version = convert::version(left.metadata.resource_version.as_deref())?;
        if ResourceVersion::new(version) != expected {
            self.take_in(key, &left)?;
            return Err(WriteError::Changed);
        }
        if left.metadata.deletion_timestamp.is_none() {
            let Some(deleting) = self.remote.delete(key, version).await? else {
                self.known.forget(key, version);
                return Ok(());
            };
            left = deleting;
            version = convert::version(left.metadata.resource_version.as_deref())?;
        }
        let others = left.metadata.finalizers.unwrap_or_default();
        let others: Vec<String> = others.into_iter().filter(|finalizer| finalizer != FINALIZER).collect();
        let is_last = others.is_empty();
        let answer = self.remote.send(key, version, Part::Finalizers(others)).await?;
        if !is_last {
            version = convert::version(answer.metadata.resource_version.as_deref())?;
        }
        // If other finalizers hold it, it is removed for the reconcilers all the same: it has no data any
        // more.
        self.known.forget(key, version);
        Ok(())
    }

    /// Takes over the current state of an object from the API server.
    fn take_in(&self, key: &Key, stored: &DynamicObject) -> Result<Object, WriteError> {
        let object = convert::object(key.kind, stored, &self.keys)?;
        self.known.take(object.clone());
        Ok(object)
    }

    /// After a failed write, memory must not be older than the version in conflict: the next write would
    /// fail too.
    async fn failed(
        &self,
        key: &Key,
        expected: Option<ResourceVersion>,
        error: &WriteError,
    ) -> ObjectStoreError {
        let error = match error {
            WriteError::Call(error) => error,
            WriteError::Changed => {
                return ObjectStoreError::Conflict {
                    key: key.clone(),
                    expected,
                    found: self.known.state().version(key),
                };
            }
            WriteError::Convert(error) => {
                return ObjectStoreError::Refused { key: key.clone(), message: error.to_string() };
            }
            WriteError::Json(error) => {
                return ObjectStoreError::Refused { key: key.clone(), message: error.to_string() };
            }
            WriteError::EncryptionDropped => {
                return ObjectStoreError::Refused { key: key.clone(), message: error.to_string() };
            }
        };
        if is_code(error, 409) || is_code(error, 404) {
            self.refresh(key, expected).await;
        }
        store_error(error, key, expected, self.known.state().version(key))
    }

    async fn refresh(&self, key: &Key, expected: Option<ResourceVersion>) {
        match bounded(self.remote.api(key.kind).get_opt(&key.name)).await {
            Ok(Some(found)) if finalizer::is_held(key.kind, &found.metadata) => {
                if let Err(error) = self.take_in(key, &found) {
                    tracing::debug!(%key, %error, "not refreshed");
                }
            }
            // The watch brings it once it is held.
            Ok(Some(_)) => {}
            Ok(None) => self.known.forget(key, place(expected)),
            // The watch brings it later.
            Err(error) => tracing::debug!(%key, %error, "not refreshed"),
        }
    }
}

/// The reason why a write failed.
#[derive(Debug, Error)]
enum WriteError {
    #[error(transparent)]
    Call(#[from] CallError),
    #[error("the object changed meanwhile")]
    Changed,
    #[error(transparent)]
    Convert(#[from] ConvertError),
    #[error(transparent)]
    Json(#[from] serde_json::Error),
    #[error(
        "the API server drops encryptInTransit, because its definition of volumes is of an earlier release. \
         Apply the definitions (CRDs) of this release first: shorthorn-controller crds | kubectl apply -f -"
    )]
    EncryptionDropped,
}

/// Checks that the answer of the API server has the requested encryption: a definition of an earlier release
/// drops the field.
fn check_encryption_kept(sent: &DynamicObject, answer: &DynamicObject) -> Result<(), WriteError> {
    if convert::asks_for_encryption(sent) && !convert::asks_for_encryption(answer) {
        return Err(WriteError::EncryptionDropped);
    }
    Ok(())
}

/// Returns the error of a write of `key`, of which the cache knows version `found`.
fn store_error(
    error: &CallError,
    key: &Key,
    expected: Option<ResourceVersion>,
    found: Option<ResourceVersion>,
) -> ObjectStoreError {
    let is = |code| is_code(error, code);
    if is(409) || is(404) {
        return ObjectStoreError::Conflict { key: key.clone(), expected, found };
    }
    if is(400) || is(413) || is(422) || is_denied_by_policy(error) {
        return ObjectStoreError::Refused { key: key.clone(), message: error.to_string() };
    }
    ObjectStoreError::Unavailable { message: format!("{key}: {error}") }
}

/// Returns true if a quota or an admission policy refuses this object. Without the right to write, the API
/// server refuses every object with the same code.
fn is_denied_by_policy(error: &CallError) -> bool {
    let text = error.to_string().to_ascii_lowercase();
    is_code(error, 403) && (text.contains("exceeded quota") || text.contains("admission"))
}

#[cfg(test)]
mod tests;
