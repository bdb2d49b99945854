//! Notes in each volume which PersistentVolume keeps it (`controller_core::claimed` decides).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::PersistentVolume as KubePersistentVolume;
use kube::{Api, Client};
use shorthorn_controller_core::claimed::{self, Note, PersistentVolume};
use shorthorn_controller_core::objects::{Kind, Volume};
use shorthorn_controller_core::requests::RequestError;
use shorthorn_driver::DRIVER_NAME;
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::oneshot;

use super::mirror::Mirror;
use crate::store::{ChangeError, Store, change};
use crate::work::backoff;

/// How long changes are gathered before all volumes are looked at: many claims are made or deleted at once.
const SETTLE: Duration = Duration::from_millis(200);

/// Keeps what is noted up to date, until it is dropped. `first` hears once everything that Kubernetes has
/// is noted.
pub async fn note_claims(client: Client, store: Arc<dyn Store>, first: oneshot::Sender<()>) {
    let kept = Mirror::new();
    tokio::join!(kept.follow(Api::all(client), ours), note(&kept, store.as_ref(), first));
}

/// What matters of it, if it is of our driver.
fn ours(found: &KubePersistentVolume) -> Option<PersistentVolume> {
    let spec = found.spec.as_ref()?;
    let source = spec.csi.as_ref().filter(|source| source.driver == DRIVER_NAME)?;
    let phase = found.status.as_ref().and_then(|status| status.phase.clone());
    let claim = spec
        .claim_ref
        .as_ref()
        .and_then(|claim| Some(format!("{}/{}", claim.namespace.as_deref()?, claim.name.as_deref()?)));
    Some(PersistentVolume {
        handle: source.volume_handle.clone(),
        phase: phase.unwrap_or_default(),
        deletes: spec.persistent_volume_reclaim_policy.as_deref() == Some("Delete"),
        is_deleting: found.metadata.deletion_timestamp.is_some(),
        claim,
    })
}

async fn note(mirror: &Mirror<PersistentVolume>, store: &dyn Store, first: oneshot::Sender<()>) {
    let mut first = Some(first);
    let (mut changes, mut found) = (store.changes(), mirror.changes());
    let mut kept: Option<BTreeMap<String, Note>> = None;
    let mut failures = 0;
    loop {
        // Nothing is noted before Kubernetes has said what it has: a note that is there stays until then.
        if let Some(all) = mirror.all() {
            let kept = kept.insert(claimed::by_volume(&all));
            failures = match note_all(store, kept).await {
                Ok(()) => {
                    // Whoever has waited may be gone: nothing depends on it any more then.
                    if let Some(first) = first.take() {
                        let _ = first.send(());
                    }
                    0
                }
                Err(error) => {
                    tracing::warn!(?error, "the PersistentVolume of a volume is not noted");
                    failures + 1
                }
            };
        }
        let again = async {
            match failures {
                0 => std::future::pending().await,
                failures => tokio::time::sleep(backoff(failures)).await,
            }
        };
        tokio::select! {
            // An error means that the mirror is gone, and with it the controller.
            changed = found.changed() => if changed.is_err() { return },
            () = volume_differs(&mut changes, store, kept.as_ref()) => {}
            () = again => {}
        }
        tokio::time::sleep(SETTLE).await;
    }
}

/// Waits for a change after which something else is noted in a volume than what is so.
async fn volume_differs(
    changes: &mut tokio::sync::broadcast::Receiver<shorthorn_controller_core::objects::Key>,
    store: &dyn Store,
    kept: Option<&BTreeMap<String, Note>>,
) {
    loop {
        match changes.recv().await {
            Ok(key) if key.kind == Kind::Volume => {
                let world = store.world();
                let volume = world.volumes.get(&key.name);
                let differs = |kept| volume.is_some_and(|volume| claimed::is_outdated(volume, kept));
                if kept.is_some_and(differs) {
                    return;
                }
            }
            Ok(_) => {}
            Err(RecvError::Lagged(_)) => return,
            // The store is gone, and with it the controller.
            Err(RecvError::Closed) => std::future::pending().await,
        }
    }
}

async fn note_all(store: &dyn Store, kept: &BTreeMap<String, Note>) -> Result<(), ChangeError<RequestError>> {
    let outdated = claimed::outdated(&store.world(), kept);
    for name in outdated {
        match change::<Volume, _>(store, |world| claimed::noted(world, kept, &name)).await {
            // It was deleted meanwhile.
            Ok(()) | Err(ChangeError::Refused(RequestError::NoVolume(_))) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
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
    fn those_of_other_drivers_count_for_nothing_and_those_that_are_free_keep_nothing() {
        let bound = read(DRIVER_NAME, "Bound").unwrap();
        assert!(bound.keeps() && bound.handle == "v" && bound.claim.as_deref() == Some("shop/orders"));
        assert!(!read(DRIVER_NAME, "Released").unwrap().keeps());
        assert_eq!(read("csi.example.com", "Bound"), None);
        let nfs: Value =
            json!({ "metadata": { "name": "a" }, "spec": { "nfs": { "server": "s", "path": "/" } } });
        assert_eq!(ours(&serde_json::from_value::<KubePersistentVolume>(nfs).unwrap()), None);
    }

    #[tokio::test]
    async fn a_volume_is_noted_and_one_that_is_gone_is_no_error() {
        use shorthorn_controller_core::Timestamp;
        use shorthorn_controller_core::objects::Secret;
        use shorthorn_controller_core::requests::{Change, CreateVolume};
        let store = MemoryStore::new();
        let wanted = CreateVolume { name: "v".to_owned(), size_bytes: 1 << 20, ..CreateVolume::default() };
        let made = wanted.apply(&store.world(), Secret::new([1; 32]), Timestamp::now()).unwrap();
        let Change::Store(volume) = made else { panic!("{made:?}") };
        store.put(volume.into()).await.unwrap();
        let noted_as = |keeper: &str| Note { keeper: Some(keeper.to_owned()), claim: None };
        let kept = BTreeMap::from([("v", "pvc-1"), ("w", "pvc-2")].map(|(a, b)| (a.to_owned(), noted_as(b))));
        note_all(&store, &kept).await.unwrap();
        let noted = |store: &MemoryStore| store.world().volumes["v"].status.persistent_volume.clone();
        assert_eq!(noted(&store).as_deref(), Some("pvc-1"));
        note_all(&store, &BTreeMap::new()).await.unwrap();
        assert_eq!(noted(&store), None);
        // Whoever waits for the first list hears of it after it is noted, and not before it is there.
        let mirror = Mirror::new();
        let (sender, mut first) = oneshot::channel();
        let mut noting = std::pin::pin!(note(&mirror, &store, sender));
        assert!(is_pending(noting.as_mut()).await && first.try_recv().is_err());
        mirror.replace(BTreeMap::from([("pvc-1".to_owned(), read(DRIVER_NAME, "Bound").unwrap())]));
        tokio::select! {
            () = noting => panic!("it ended"),
            told = first => told.unwrap(),
        }
        assert_eq!(noted(&store).as_deref(), Some("pvc-1"));
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
