//! Tests that a volume that Kubernetes has attached is not detached by hand without force.

use std::sync::Arc;

use shorthorn_api::v1;
use shorthorn_api::v1::controller_server::Controller;
use shorthorn_controller::agents::Fleet;
use shorthorn_controller::api::Api;
use shorthorn_controller::kubernetes::attachments::{Attachment, Attachments};
use shorthorn_controller::metrics::Metrics;
use shorthorn_controller::store::{MemoryStore, ObjectStore};
use shorthorn_controller::work::WorkQueue;
use shorthorn_controller_core::objects::{Object, Secret};
use shorthorn_controller_core::reconcile::Settings;
use shorthorn_controller_core::requests::{Change, CreateVolume};
use shorthorn_controller_core::{NodeName, Timestamp};
use tokio::sync::watch;
use tonic::{Code, Request};

/// The answer of an API server.
struct Says(Result<Option<Attachment>, String>);

#[tonic::async_trait]
impl Attachments for Says {
    async fn of(&self, volume: &str) -> Result<Option<Attachment>, String> {
        assert_eq!(volume, "v");
        self.0.clone()
    }
}

/// Returns a volume v that is wanted on node a.
async fn store() -> Arc<MemoryStore> {
    let store = Arc::new(MemoryStore::new());
    let wanted = CreateVolume { name: "v".to_owned(), size_bytes: 1 << 30, ..CreateVolume::default() };
    let secret = Secret::new([1; 32]);
    let Change::Store(mut volume) = wanted.apply(&store.state(), secret, Timestamp::now()).unwrap() else {
        panic!("the volume is there already");
    };
    volume.spec.node_id = NodeName::new("a").ok();
    volume.status.attach = Some(3);
    store.put(Object::Volume(volume)).await.unwrap();
    store
}

async fn detach(store: &Arc<MemoryStore>, says: Says, force: bool) -> Result<v1::Volume, (Code, String)> {
    let shared: Arc<dyn ObjectStore> = Arc::<MemoryStore>::clone(store);
    let queue = Arc::new(WorkQueue::new());
    let fleet = Fleet::new(&Default::default(), Arc::clone(&shared), queue, Metrics::default()).unwrap();
    let (_stop, stopping) = watch::channel(false);
    let api = Api::new(shared, fleet, stopping, Settings::default()).with_attachments(Arc::new(says));
    let request = v1::DetachVolumeRequest { name: "v".to_owned(), force };
    let answer = api.detach_volume(Request::new(request)).await;
    answer.map(|answer| answer.into_inner()).map_err(|status| (status.code(), status.message().to_owned()))
}

#[tokio::test]
async fn a_volume_that_kubernetes_has_attached_is_detached_by_force_only() {
    let store = store().await;
    let named = || Says(Ok(Some(Attachment { name: "csi-1".to_owned(), node: "a".to_owned() })));
    let silent = || Says(Err("connection refused".to_owned()));
    let (code, text) = detach(&store, named(), false).await.unwrap_err();
    assert_eq!(code, Code::FailedPrecondition);
    for word in ["VolumeAttachment csi-1", "node a", "--force", "No pod on that node"] {
        assert!(text.contains(word), "{text}");
    }
    let (code, text) = detach(&store, silent(), false).await.unwrap_err();
    assert!(code == Code::Unavailable && text.contains("connection refused"), "{text}");
    assert!(store.state().volumes["v"].spec.node_id.is_some());
    detach(&store, named(), true).await.unwrap();
    let spec = store.state().volumes["v"].spec.clone();
    assert_eq!((spec.node_id, spec.forced_detach), (None, Some(3)));
    // A volume that is wanted nowhere needs no question.
    detach(&store, silent(), false).await.unwrap();
}

#[tokio::test]
async fn a_volume_that_kubernetes_does_not_know_is_detached() {
    let store = store().await;
    detach(&store, Says(Ok(None)), false).await.unwrap();
    let spec = store.state().volumes["v"].spec.clone();
    assert_eq!((spec.node_id, spec.forced_detach), (None, None));
}
