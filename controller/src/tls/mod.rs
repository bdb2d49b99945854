//! The cluster's CA in the controller: certificates for this controller, nodes and administrators.
//!
//! Only the controller that leads has the CA. Each change is stored before its result leaves the controller.

mod packed;
mod renew;
mod service;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use shorthorn_api::v1;
use shorthorn_controller_core::NodeName;
use shorthorn_pki::{
    Authority, AuthorityError, Bundle, BundleError, CertificateNameError, ClusterId, Credentials, Pin, Role,
    Trust, UnixTime,
};
use thiserror::Error;
use tokio::sync::{Notify, RwLock};

pub use self::service::TlsApi;
pub use crate::ca_storage::{CaStorage, CaStorageError};

/// The largest state, as it is stored, of a CA that signs and makes tokens. A Secret has room for 1 MiB, and
/// a revocation shall always find some.
const RECORDS_MAX_BYTES: usize = 800_000;

/// The CA cannot be used, or refuses.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum CaError {
    /// The state of the CA cannot be loaded or stored.
    #[error("the cluster's CA: {0}")]
    CaStorage(#[from] CaStorageError),
    /// The CA refuses, or its state is damaged.
    #[error(transparent)]
    Authority(#[from] AuthorityError),
    /// The certificate of this controller does not fit.
    #[error(transparent)]
    Bundle(#[from] BundleError),
    /// The id of the cluster cannot be a part of a certificate.
    #[error(transparent)]
    Name(#[from] CertificateNameError),
    /// The rest of the place is for revocations.
    #[error("the CA has records of too many certificates and tokens: wait until some expire")]
    Full,
    /// The stored CA is of another cluster.
    #[error(
        "the stored CA belongs to cluster {found}, and the store to cluster {expected}: restore both from \
         the same backup"
    )]
    OtherCluster {
        /// The cluster of the CA.
        found: ClusterId,
        /// The cluster of the store.
        expected: ClusterId,
    },
}

/// Details that a node has shown of its certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NodeSeen {
    pub(crate) trust_version: u64,
    pub(crate) signer_pin: String,
}

/// The CA, and the certificate of this controller.
pub struct Tls {
    ca_storage: Arc<dyn CaStorage>,
    /// Held for writing while a change is stored: changes have an order.
    authority: RwLock<Authority>,
    /// The end of the CA that signs, in seconds since 1970, for readers that must not wait for a store.
    authority_end_s: AtomicU64,
    credentials: Credentials,
    seen: Mutex<BTreeMap<NodeName, NodeSeen>>,
    /// Nodes for which the trust list was made newer. Once for each: one that lies makes no endless work.
    newer: Mutex<BTreeSet<NodeName>>,
    /// Nodes have to be looked at now.
    changed: Notify,
}

impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tls").field("credentials", &self.credentials).finish_non_exhaustive()
    }
}

pub(crate) fn now() -> UnixTime {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    UnixTime::since_unix_epoch(since.unwrap_or_default())
}

impl Tls {
    /// Loads the CA of `cluster`, or makes it, and makes a certificate for this controller.
    ///
    /// # Errors
    /// [`CaError`]; a CA that is lost or damaged is never replaced.
    pub async fn open(ca_storage: Arc<dyn CaStorage>, cluster: &str) -> Result<Arc<Tls>, CaError> {
        let expected = ClusterId::new(cluster)?;
        let stored = ca_storage.load().await?.map(read).transpose()?;
        // A cluster whose volume key was recreated has another id. Its CA is of use to enrolled nodes only.
        let kept = stored.filter(|stored| *stored.cluster() == expected || !enrolled(stored).1.is_empty());
        let mut authority = match kept {
            Some(stored) => stored,
            None => {
                let made = Authority::create(expected.clone(), now())?;
                ca_storage.save(stored_form(&made)?).await?;
                tracing::warn!(pin = %made.pin()?, "created the cluster's CA: back it up (docs/security.md)");
                made
            }
        };
        if *authority.cluster() != expected {
            return Err(CaError::OtherCluster { found: authority.cluster().clone(), expected });
        }
        let identity = authority.issue(&Role::Controller, now())?;
        let bundle = Bundle { identity: Some(identity), trust: authority.trust()? };
        Ok(Arc::new(Tls {
            ca_storage,
            authority_end_s: AtomicU64::new(authority.expires_at_s()),
            authority: RwLock::new(authority),
            credentials: Credentials::new(bundle)?,
            seen: Mutex::default(),
            newer: Mutex::default(),
            changed: Notify::new(),
        }))
    }

    /// The certificate of this controller, and the CAs that it trusts.
    #[must_use]
    pub fn credentials(&self) -> &Credentials {
        &self.credentials
    }

    /// Changes the CA, stores it, and uses the changed trust list. Nothing changes if the change or the store
    /// fails.
    pub(crate) async fn change<T>(
        &self,
        change: impl FnOnce(&mut Authority) -> Result<T, AuthorityError> + Send,
    ) -> Result<T, CaError> {
        let mut authority = self.authority.write().await;
        let mut changed = authority.clone();
        let result = change(&mut changed)?;
        let state = stored_form(&changed)?;
        let is_new_trust = changed.trust()?.version() != authority.trust()?.version();
        if !is_new_trust && state.len() > RECORDS_MAX_BYTES {
            return Err(CaError::Full);
        }
        if let Err(error) = self.ca_storage.save(state).await {
            self.take_stored(&mut authority).await;
            return Err(error.into());
        }
        self.set(&mut authority, changed);
        if is_new_trust {
            self.take_certificate(&mut authority)?;
            self.changed.notify_one();
        }
        Ok(result)
    }

    fn set(&self, authority: &mut Authority, changed: Authority) {
        self.authority_end_s.store(changed.expires_at_s(), Ordering::Relaxed);
        *authority = changed;
    }

    /// Continues with the stored state after a store that has failed. The store may have come about although
    /// the answer is lost, or an administrator has changed the state: every later store would fail too.
    async fn take_stored(&self, authority: &mut Authority) {
        let stored = match self.ca_storage.load().await {
            Ok(Some(state)) => read(state),
            Ok(None) => return,
            Err(error) => Err(error.into()),
        };
        let taken = stored.and_then(|stored| {
            if stored.cluster() != authority.cluster() {
                let (found, expected) = (stored.cluster().clone(), authority.cluster().clone());
                return Err(CaError::OtherCluster { found, expected });
            }
            self.set(authority, stored);
            self.take_certificate(authority)
        });
        if let Err(error) = taken {
            tracing::warn!(%error, "the stored CA cannot be read again");
        }
    }

    /// Returns the ends of the CA that signs and of this controller's certificate, in seconds since 1970.
    /// Does not wait for a change that is being stored.
    pub fn expiry_s(&self) -> (u64, u64) {
        let authority_s = self.authority_end_s.load(Ordering::Relaxed);
        let current = self.credentials.current();
        let own = current.identity.as_ref().map_or(0, |identity| identity.certificate().not_after);
        (authority_s, own)
    }

    /// Reads the CA.
    pub(crate) async fn read_authority<T>(&self, read: impl FnOnce(&Authority) -> T) -> T {
        read(&*self.authority.read().await)
    }

    /// A new certificate for this controller, if its own is due.
    async fn renew_own(&self) -> Result<(), CaError> {
        let is_due = {
            let current = self.credentials.current();
            current.identity.as_ref().is_none_or(|identity| identity.certificate().is_due(now()))
        };
        if is_due {
            self.take_certificate(&mut *self.authority.write().await)?;
            tracing::info!("the certificate of this controller is renewed");
        }
        Ok(())
    }

    /// Certificates of controllers are not stored, so neither is this change.
    fn take_certificate(&self, authority: &mut Authority) -> Result<(), CaError> {
        let identity = authority.issue(&Role::Controller, now())?;
        let bundle = Bundle { identity: Some(identity), trust: authority.trust()? };
        Ok(self.credentials.replace(bundle)?)
    }

    fn newer(&self) -> MutexGuard<'_, BTreeSet<NodeName>> {
        self.newer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn seen(&self) -> MutexGuard<'_, BTreeMap<NodeName, NodeSeen>> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Enrolled nodes that have not shown the present trust list.
    pub(crate) async fn nodes_behind(&self) -> Vec<String> {
        self.read_authority(|authority| self.behind(authority)).await
    }

    /// The same for a CA that is locked.
    pub(crate) fn behind(&self, authority: &Authority) -> Vec<String> {
        let (version, enrolled) = enrolled(authority);
        let seen = self.seen();
        let has_it = |node: &NodeName| seen.get(node).is_some_and(|seen| seen.trust_version == version);
        enrolled.into_iter().filter(|node| !has_it(node)).map(String::from).collect()
    }
}

/// The CA in these stored bytes.
pub(crate) fn read(stored: Vec<u8>) -> Result<Authority, CaError> {
    let state = packed::unpack(stored).map_err(|error| AuthorityError::Stored(error.to_string()))?;
    Ok(Authority::from_json(&state)?)
}

/// The bytes to store for the CA.
fn stored_form(authority: &Authority) -> Result<Vec<u8>, CaError> {
    let packed = packed::pack(authority.to_json()?);
    Ok(packed.map_err(|error| AuthorityError::Stored(error.to_string()))?)
}

/// The version of the trust list, and the nodes with a certificate that is valid.
fn enrolled(authority: &Authority) -> (u64, BTreeSet<NodeName>) {
    let version = authority.trust().map_or(0, |trust| trust.version());
    let now_s = now().as_secs();
    let valid = authority
        .issued()
        .iter()
        .filter(|issued| issued.not_after >= now_s && !authority.is_revoked(&issued.serial));
    let nodes = valid.filter_map(|issued| match &issued.role {
        Role::Node(name) => Some(name.clone()),
        _ => None,
    });
    (version, nodes.collect())
}

/// A trust list as a message.
pub(crate) fn trust_message(trust: &Trust) -> v1::TrustList {
    v1::TrustList {
        cluster: trust.cluster().to_string(),
        version: trust.version(),
        authorities: trust.authorities().iter().map(|der| der.to_vec()).collect(),
        revoked: trust.revoked().iter().map(ToString::to_string).collect(),
    }
}

pub(crate) fn pin_texts(trust: &Trust) -> Vec<String> {
    trust.pins().iter().map(Pin::to_string).collect()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use async_trait::async_trait;
    use shorthorn_metrics::{MetricsPage, MetricsSource};

    use super::*;
    use crate::metrics::{ControllerMetrics, Metrics};
    use crate::store::RedbStore;

    /// Keeps nothing, and fails on request.
    #[derive(Default)]
    struct Broken(std::sync::atomic::AtomicBool);

    #[async_trait]
    impl CaStorage for Broken {
        async fn load(&self) -> Result<Option<Vec<u8>>, CaStorageError> {
            Ok(None)
        }

        async fn save(&self, _: Vec<u8>) -> Result<(), CaStorageError> {
            if self.0.load(std::sync::atomic::Ordering::SeqCst) {
                return Err(CaStorageError("full".to_owned()));
            }
            Ok(())
        }
    }

    #[tokio::test]
    async fn a_change_that_cannot_be_stored_has_no_effect() {
        let ca_storage = Arc::new(Broken::default());
        let kept: Arc<dyn CaStorage> = Arc::<Broken>::clone(&ca_storage);
        let tls = Tls::open(kept, "c0ffee").await.unwrap();
        let node = Role::node("a").unwrap();
        tls.change(|authority| authority.issue(&node, now())).await.unwrap();
        ca_storage.0.store(true, std::sync::atomic::Ordering::SeqCst);
        let revoked = tls.change(|authority| authority.revoke(|_| true, now())).await;
        assert!(matches!(revoked, Err(CaError::CaStorage(_))), "{revoked:?}");
        assert_eq!(tls.read_authority(|authority| authority.revoked().len()).await, 0);
        assert!(tls.credentials().current().trust.revoked().is_empty());
        assert_eq!(tls.nodes_behind().await, ["a"]);
    }

    /// Never ends a store after the first.
    #[derive(Default)]
    struct Hanging(std::sync::atomic::AtomicBool);

    #[async_trait]
    impl CaStorage for Hanging {
        async fn load(&self) -> Result<Option<Vec<u8>>, CaStorageError> {
            Ok(None)
        }

        async fn save(&self, _: Vec<u8>) -> Result<(), CaStorageError> {
            if self.0.swap(true, Ordering::SeqCst) {
                std::future::pending::<()>().await;
            }
            Ok(())
        }
    }

    #[tokio::test]
    async fn metrics_do_not_wait_for_a_store_of_the_ca() {
        let tls = Tls::open(Arc::<Hanging>::default(), "c0ffee").await.unwrap();
        let end_s = tls.read_authority(Authority::expires_at_s).await;
        let changing = Arc::clone(&tls);
        let issuing = tokio::spawn(async move {
            changing.change(|authority| authority.issue(&Role::node("a").unwrap(), now())).await
        });
        while tls.authority.try_read().is_ok() {
            tokio::task::yield_now().await;
        }
        let metrics = ControllerMetrics::new(Metrics::default(), Arc::default());
        metrics.show_tls(Arc::clone(&tls));
        let mut page = MetricsPage::default();
        let filling = metrics.fill(&mut page);
        tokio::time::timeout(Duration::from_secs(20), filling).await.expect("it waits");
        let shown = page.text().unwrap();
        assert!(shown.contains(&format!("{{certificate=\"ca\"}} {end_s}\n")), "{shown}");
        issuing.abort();
    }

    /// Has a CA of a day ago.
    struct Old;

    #[async_trait]
    impl CaStorage for Old {
        async fn load(&self) -> Result<Option<Vec<u8>>, CaStorageError> {
            let yesterday = UnixTime::since_unix_epoch(Duration::from_secs(now().as_secs() - 24 * 3600));
            let made = Authority::create(ClusterId::new("c0ffee").unwrap(), yesterday).unwrap();
            Ok(Some(stored_form(&made).unwrap()))
        }

        async fn save(&self, _: Vec<u8>) -> Result<(), CaStorageError> {
            Ok(())
        }
    }

    #[tokio::test]
    async fn the_end_of_a_replaced_ca_is_known() {
        let tls = Tls::open(Arc::new(Old), "c0ffee").await.unwrap();
        let before = tls.expiry_s().0;
        tls.change(|authority| authority.begin_roll_over(now())).await.unwrap();
        assert_eq!(tls.expiry_s().0, before);
        tls.change(Authority::switch_signer).await.unwrap();
        assert!(tls.expiry_s().0 > before);
        assert_eq!(tls.expiry_s().0, tls.read_authority(Authority::expires_at_s).await);
    }

    #[tokio::test]
    async fn the_ca_of_a_file_is_made_once() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("store.redb");
        let mut pins = Vec::new();
        for _ in 0..2 {
            let store = RedbStore::open(&path).unwrap();
            let cluster = crate::store::ObjectStore::cluster(&store).to_owned();
            let tls = Tls::open(store.ca_storage(), &cluster).await.unwrap();
            pins.push(tls.read_authority(|authority| authority.pin().unwrap()).await);
            let node = Role::node("a").unwrap();
            tls.change(|authority| authority.issue(&node, now())).await.unwrap();
            let other = Tls::open(store.ca_storage(), "another").await;
            assert!(matches!(other, Err(CaError::OtherCluster { .. })), "{other:?}");
        }
        assert_eq!(pins[0], pins[1]);
    }
}
