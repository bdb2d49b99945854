use std::sync::Arc;

use shorthorn_api::csi::v1;
use shorthorn_api::csi::v1::controller_server::{Controller, ControllerServer};
use shorthorn_controller_core::reconcile::Settings;
use shorthorn_csi::{CsiError, Gates, Pass, REQUEST_MAX_BYTES};
use shorthorn_types::VolumeName;
use tokio::sync::{Mutex, watch};
use tokio::time::Instant;
use tonic::{Request, Response, Status};

use super::call::CsiCall;
use super::capacity_cache::CapacityCache;
use super::deadline::wait_limit;
use crate::agents::Fleet;
use crate::counters::Metrics;
use crate::kubernetes::events::EventSender;
use crate::store::ObjectStore;

type Answer<T> = Result<Response<T>, Status>;

/// Serves the Controller calls of CSI: stores the desired state of a volume, and waits until it is reached.
#[derive(Clone)]
pub struct CsiController {
    pub(super) store: Arc<dyn ObjectStore>,
    pub(super) fleet: Arc<Fleet>,
    /// Gates that allow one call at a time on each volume.
    gates: Gates,
    /// Held while a volume is counted and given a place on a node that does not take any number.
    pub(super) counting: Arc<Mutex<()>>,
    /// True once the controller is on its way out: waits end then.
    pub(super) stopping: watch::Receiver<bool>,
    pub(super) settings: Settings,
    pub(super) capacity_cache: Arc<CapacityCache>,
    /// None: only answers and the log report anything.
    pub(super) events: Option<EventSender>,
    metrics: Metrics,
}

impl std::fmt::Debug for CsiController {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CsiController").field("fleet", &self.fleet).finish_non_exhaustive()
    }
}

impl CsiController {
    /// Creates the service. It carries out every write: only a controller that may write serves it.
    #[must_use]
    pub fn new(
        store: Arc<dyn ObjectStore>,
        fleet: Arc<Fleet>,
        stopping: watch::Receiver<bool>,
        settings: Settings,
        metrics: Metrics,
    ) -> CsiController {
        CsiController {
            store,
            fleet,
            gates: Gates::default(),
            counting: Arc::default(),
            stopping,
            settings,
            capacity_cache: Arc::default(),
            events: None,
            metrics,
        }
    }

    /// Sets the recipient of events on volumes.
    #[must_use]
    pub fn with_events(self, events: Option<EventSender>) -> CsiController {
        CsiController { events, ..self }
    }

    /// Returns the service for a gRPC server.
    #[must_use]
    pub fn server(self) -> ControllerServer<CsiController> {
        ControllerServer::new(self).max_decoding_message_size(REQUEST_MAX_BYTES)
    }

    /// Returns the pass for a volume. It is held until the call ends, even if the caller is gone.
    pub(super) fn enter(&self, volume: &VolumeName) -> Result<Pass, CsiError> {
        self.gates.enter(volume).ok_or_else(|| CsiError::busy(volume))
    }
}

/// Returns a request, and the deadline of its answer.
fn opened<T>(request: Request<T>) -> (T, Instant) {
    let deadline = Instant::now() + wait_limit(request.metadata());
    (request.into_inner(), deadline)
}

fn unimplemented<T>(capability: &str) -> Answer<T> {
    Err(Status::unimplemented(format!("the driver does not have the capability {capability}")))
}

#[tonic::async_trait]
impl Controller for CsiController {
    async fn create_volume(
        &self,
        request: Request<v1::CreateVolumeRequest>,
    ) -> Answer<v1::CreateVolumeResponse> {
        let (request, deadline) = opened(request);
        CsiCall::new(&self.metrics, "CreateVolume", &request.name, "")
            .answer(self.create(request, deadline))
            .await
    }

    async fn delete_volume(
        &self,
        request: Request<v1::DeleteVolumeRequest>,
    ) -> Answer<v1::DeleteVolumeResponse> {
        let (request, deadline) = opened(request);
        CsiCall::new(&self.metrics, "DeleteVolume", &request.volume_id, "")
            .answer(self.delete(request, deadline))
            .await
    }

    async fn controller_publish_volume(
        &self,
        request: Request<v1::ControllerPublishVolumeRequest>,
    ) -> Answer<v1::ControllerPublishVolumeResponse> {
        let (request, deadline) = opened(request);
        let call =
            CsiCall::new(&self.metrics, "ControllerPublishVolume", &request.volume_id, &request.node_id);
        call.answer(self.publish(request, deadline)).await
    }

    async fn controller_unpublish_volume(
        &self,
        request: Request<v1::ControllerUnpublishVolumeRequest>,
    ) -> Answer<v1::ControllerUnpublishVolumeResponse> {
        let (request, deadline) = opened(request);
        let call =
            CsiCall::new(&self.metrics, "ControllerUnpublishVolume", &request.volume_id, &request.node_id);
        call.answer(self.unpublish(request, deadline)).await
    }

    async fn validate_volume_capabilities(
        &self,
        request: Request<v1::ValidateVolumeCapabilitiesRequest>,
    ) -> Answer<v1::ValidateVolumeCapabilitiesResponse> {
        let request = request.into_inner();
        let call = CsiCall::new(&self.metrics, "ValidateVolumeCapabilities", &request.volume_id, "");
        call.answer(async { self.validate(request) }).await
    }

    async fn list_volumes(
        &self,
        request: Request<v1::ListVolumesRequest>,
    ) -> Answer<v1::ListVolumesResponse> {
        CsiCall::new(&self.metrics, "ListVolumes", "", "")
            .answer(async { self.list(request.get_ref()) })
            .await
    }

    async fn get_capacity(
        &self,
        request: Request<v1::GetCapacityRequest>,
    ) -> Answer<v1::GetCapacityResponse> {
        CsiCall::new(&self.metrics, "GetCapacity", "", "")
            .answer(async { self.capacity(request.into_inner()) })
            .await
    }

    async fn controller_get_volume(
        &self,
        request: Request<v1::ControllerGetVolumeRequest>,
    ) -> Answer<v1::ControllerGetVolumeResponse> {
        let call = CsiCall::new(&self.metrics, "ControllerGetVolume", &request.get_ref().volume_id, "");
        call.answer(async { self.get(request.get_ref()) }).await
    }

    async fn controller_expand_volume(
        &self,
        request: Request<v1::ControllerExpandVolumeRequest>,
    ) -> Answer<v1::ControllerExpandVolumeResponse> {
        let (request, deadline) = opened(request);
        let call = CsiCall::new(&self.metrics, "ControllerExpandVolume", &request.volume_id, "");
        call.answer(self.expand(request, deadline)).await
    }

    async fn controller_get_capabilities(
        &self,
        _: Request<v1::ControllerGetCapabilitiesRequest>,
    ) -> Answer<v1::ControllerGetCapabilitiesResponse> {
        use v1::controller_service_capability::{Rpc, Type, rpc};
        let announced = [
            rpc::Type::CreateDeleteVolume,
            rpc::Type::PublishUnpublishVolume,
            rpc::Type::ListVolumes,
            rpc::Type::GetCapacity,
            rpc::Type::ExpandVolume,
            rpc::Type::ListVolumesPublishedNodes,
            rpc::Type::GetVolume,
            rpc::Type::SingleNodeMultiWriter,
        ];
        let capability = |kind: rpc::Type| v1::ControllerServiceCapability {
            r#type: Some(Type::Rpc(Rpc { r#type: kind.into() })),
        };
        let capabilities = announced.map(capability).to_vec();
        Ok(Response::new(v1::ControllerGetCapabilitiesResponse { capabilities }))
    }

    async fn create_snapshot(
        &self,
        _: Request<v1::CreateSnapshotRequest>,
    ) -> Answer<v1::CreateSnapshotResponse> {
        unimplemented("CREATE_DELETE_SNAPSHOT")
    }

    async fn delete_snapshot(
        &self,
        _: Request<v1::DeleteSnapshotRequest>,
    ) -> Answer<v1::DeleteSnapshotResponse> {
        unimplemented("CREATE_DELETE_SNAPSHOT")
    }

    async fn list_snapshots(
        &self,
        _: Request<v1::ListSnapshotsRequest>,
    ) -> Answer<v1::ListSnapshotsResponse> {
        unimplemented("LIST_SNAPSHOTS")
    }

    async fn get_snapshot(&self, _: Request<v1::GetSnapshotRequest>) -> Answer<v1::GetSnapshotResponse> {
        unimplemented("GET_SNAPSHOT")
    }

    async fn controller_modify_volume(
        &self,
        _: Request<v1::ControllerModifyVolumeRequest>,
    ) -> Answer<v1::ControllerModifyVolumeResponse> {
        unimplemented("MODIFY_VOLUME")
    }
}
