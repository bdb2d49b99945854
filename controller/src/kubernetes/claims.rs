//! Records in each volume which PersistentVolume keeps it (`controller_core::claimed` decides).

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::PersistentVolume as KubePersistentVolume;
use kube::{Api, Client};
use shorthorn_controller_core::claimed::{self, Claims, PersistentVolume, PersistentVolumePhase};
use shorthorn_controller_core::objects::{Kind, Volume};
use shorthorn_controller_core::requests::RequestError;
use shorthorn_csi::DRIVER_NAME;
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::oneshot;

use super::reflector::{Reflector, ReflectorEvent};
use crate::backoff::wait_after;
use crate::store::{ChangeError, ObjectStore, ObjectStoreError, change};

/// The time for which changes are gathered before volumes are examined: many claims are made or deleted at
/// once.
const DEBOUNCE: Duration = Duration::from_millis(200);

/// Keeps the records of claims up to date, until it is dropped. `first` is notified after the first complete
/// pass.
pub async fn record_claims(client: Client, store: Arc<dyn ObjectStore>, first: oneshot::Sender<()>) {
    let kept = Reflector::new();
    tokio::join!(kept.follow(Api::all(client), ours), record(&kept, store.as_ref(), first));
}

/// Returns the relevant part of a PersistentVolume of Shorthorn's driver.
fn ours(found: &KubePersistentVolume) -> Option<PersistentVolume> {
    let spec = found.spec.as_ref()?;
    let source = spec.csi.as_ref().filter(|source| source.driver == DRIVER_NAME)?;
    let phase = found.status.as_ref().and_then(|status| status.phase.as_deref());
    let claim = spec
        .claim_ref
        .as_ref()
        .and_then(|claim| Some(format!("{}/{}", claim.namespace.as_deref()?, claim.name.as_deref()?)));
    Some(PersistentVolume {
        handle: source.volume_handle.clone(),
        phase: phase.map(PersistentVolumePhase::of_word).unwrap_or_default(),
        deletes: spec.persistent_volume_reclaim_policy.as_deref() == Some("Delete"),
        is_deleting: found.metadata.deletion_timestamp.is_some(),
        claim,
    })
}

async fn record(
    reflector: &Reflector<PersistentVolume>,
    store: &dyn ObjectStore,
    first: oneshot::Sender<()>,
) {
    let mut first = Some(first);
    let (mut changes, mut found) = (store.changes(), reflector.changes());
    // Nothing is recorded before the first complete list of Kubernetes: an existing record stays until then.
    let mut claims: Option<Claims> = None;
    let mut pending = BTreeSet::new();
    let mut failures = 0;
    loop {
        match reflector.changes_since_last() {
            None => {}
            Some(ReflectorEvent::All(all)) => {
                pending = claims.insert(Claims::new(all)).outdated(&store.state())
            }
            Some(ReflectorEvent::Some(changed_names)) => {
                let claims = claims.get_or_insert_default();
                pending.extend(changed_names.into_iter().flat_map(|(name, found)| claims.set(name, found)));
            }
        }
        if let Some(claims) = &claims {
            failures = match record_all(store, claims, &mut pending).await {
                Ok(()) => {
                    // The waiting task may be gone: then the message is not needed any more.
                    if let Some(first) = first.take() {
                        let _ = first.send(());
                    }
                    0
                }
                Err(error) => {
                    tracing::warn!(?error, "the PersistentVolume of a volume is not recorded");
                    failures + 1
                }
            };
        }
        tokio::select! {
            // An error means that the reflector is gone, and with it the controller.
            changed = found.changed() => if changed.is_err() { return },
            outdated = outdated_volumes(&mut changes, store, claims.as_ref()) => pending.extend(outdated),
            () = wait_after(failures) => {}
        }
        tokio::time::sleep(DEBOUNCE).await;
    }
}

/// Waits for a change that outdates the records of some volumes, and returns these volumes.
async fn outdated_volumes(
    changes: &mut tokio::sync::broadcast::Receiver<shorthorn_controller_core::objects::Key>,
    store: &dyn ObjectStore,
    claims: Option<&Claims>,
) -> BTreeSet<String> {
    loop {
        let change = changes.recv().await;
        if matches!(change, Err(RecvError::Closed)) {
            // The store is gone, and with it the controller.
            return std::future::pending().await;
        }
        // Before the first list everything is looked at anyway.
        let Some(claims) = claims else { continue };
        let cluster = store.state();
        match change {
            Ok(key) if key.kind == Kind::Volume => {
                let volume = cluster.volumes.get(&key.name);
                if volume.is_some_and(|volume| claims.is_outdated(volume)) {
                    return BTreeSet::from([key.name]);
                }
            }
            Ok(_) => {}
            Err(_) => return claims.outdated(&cluster),
        }
    }
}

/// Updates the records of these volumes; `pending` keeps those that failed. A refused record does not delay
/// the other volumes.
async fn record_all(
    store: &dyn ObjectStore,
    claims: &Claims,
    pending: &mut BTreeSet<String>,
) -> Result<(), ChangeError<RequestError>> {
    let mut refused = (BTreeSet::new(), None);
    while let Some(name) = pending.first() {
        match change::<Volume, _>(store, |cluster| claimed::recorded(cluster, claims, name)).await {
            // It was deleted meanwhile, or cannot be used. A later change wakes this task.
            Ok(()) | Err(ChangeError::Refused(RequestError::NoVolume(_) | RequestError::LeftOut(_))) => {}
            Err(error @ ChangeError::Store(ObjectStoreError::Unavailable { .. })) => {
                pending.append(&mut refused.0);
                return Err(error);
            }
            Err(error) => {
                refused.0.insert(name.clone());
                refused.1 = Some(error);
            }
        }
        pending.pop_first();
    }
    *pending = refused.0;
    refused.1.map_or(Ok(()), Err)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::store::MemoryStore;

    fn read(driver: &str, phase: &str) -> Option<PersistentVolume> {
        let object = json!({
            "metadata": { "name": "pvc-1" },
            "spec": {
                "csi": { "driver": driver, "volumeHandle": "v" },
                "persistentVolumeReclaimPolicy": "Delete",
                "claimRef": { "namespace": "shop", "name": "orders" },
            },
            "status": { "phase": phase },
        });
        ours(&serde_json::from_value::<KubePersistentVolume>(object).unwrap())
    }

    #[test]
    fn only_bound_volumes_of_this_driver_keep_a_volume() {
        let bound = read(DRIVER_NAME, "Bound").unwrap();
        assert!(bound.keeps() && bound.handle == "v" && bound.claim.as_deref() == Some("shop/orders"));
        assert!(!read(DRIVER_NAME, "Released").unwrap().keeps());
        assert_eq!(read("csi.example.com", "Bound"), None);
        let nfs: Value =
            json!({ "metadata": { "name": "a" }, "spec": { "nfs": { "server": "s", "path": "/" } } });
        assert_eq!(ours(&serde_json::from_value::<KubePersistentVolume>(nfs).unwrap()), None);
    }

    #[tokio::test]
    async fn claims_are_recorded_and_a_deleted_volume_is_skipped() {
        use shorthorn_controller_core::Timestamp;
        use shorthorn_controller_core::objects::Secret;
        use shorthorn_controller_core::requests::{Change, CreateVolume};
        let store = MemoryStore::new();
        let wanted = CreateVolume { name: "v".to_owned(), size_bytes: 1 << 20, ..CreateVolume::default() };
        let made = wanted.apply(&store.state(), Secret::new([1; 32]), Timestamp::now()).unwrap();
        let Change::Store(volume) = made else { panic!("{made:?}") };
        store.put(volume.into()).await.unwrap();
        let bound = |volume: &str| PersistentVolume {
            handle: volume.to_owned(),
            phase: PersistentVolumePhase::Bound,
            ..PersistentVolume::default()
        };
        let kept = [("pvc-1", "v"), ("pvc-2", "w")].map(|(name, volume)| (name.to_owned(), bound(volume)));
        let claims = Claims::new(kept.into());
        let mut pending = BTreeSet::from(["v", "w"].map(str::to_owned));
        record_all(&store, &claims, &mut pending).await.unwrap();
        assert!(pending.is_empty());
        let recorded = |store: &MemoryStore| store.state().volumes["v"].status.persistent_volume.clone();
        assert_eq!(recorded(&store).as_deref(), Some("pvc-1"));
        pending.insert("v".to_owned());
        record_all(&store, &Claims::default(), &mut pending).await.unwrap();
        assert_eq!(recorded(&store), None);
        // A task that waits for the first list is notified after the list is recorded, and not before.
        let reflector = Reflector::new();
        let (sender, mut first) = oneshot::channel();
        let mut recording = std::pin::pin!(record(&reflector, &store, sender));
        assert!(is_pending(recording.as_mut()).await && first.try_recv().is_err());
        reflector.replace(std::collections::BTreeMap::from([(
            "pvc-1".to_owned(),
            read(DRIVER_NAME, "Bound").unwrap(),
        )]));
        tokio::select! {
            () = recording => panic!("it ended"),
            notified = first => notified.unwrap(),
        }
        assert_eq!(recorded(&store).as_deref(), Some("pvc-1"));
    }

    /// Polls it once.
    async fn is_pending(future: std::pin::Pin<&mut impl Future<Output = ()>>) -> bool {
        tokio::select! {
            biased;
            () = future => false,
            () = std::future::ready(()) => true,
        }
    }
}
