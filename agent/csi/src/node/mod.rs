//! The Node service.
//!
//! A call checks its arguments, takes the gate of its volume, asks for the volume, and does its work on a
//! thread of its own. The gate stays taken until that thread is done, even if the caller is gone or the call
//! has taken too long. A mount that hangs on a frozen volume is still under way, and further calls get
//! ABORTED.

mod expand;
mod kernel_state;
mod publish;
mod stage;
mod stats;

use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use shorthorn_api::csi::v1;
use shorthorn_api::csi::v1::node_server::{Node, NodeServer};
use shorthorn_csi::{
    CsiError, Gates, REQUEST_MAX_BYTES, TOPOLOGY_NODE, TOPOLOGY_ZONE, capability, size_range,
};
use shorthorn_types::VolumeName;
use tokio::sync::oneshot;
use tonic::{Request, Response, Status};

use crate::arguments;
use crate::dead_mounts::DeadMounts;
use crate::volumes::{NodeVolume, NodeVolumes, VolumesError};

/// kubelet gives up after two minutes. It should get the reason before that.
const CALL_LIMIT: Duration = Duration::from_secs(100);

/// The settings of the service on this node.
#[derive(Clone, Debug)]
pub struct NodeOptions {
    /// Name of the node; in a cluster, of its Node object.
    pub node_id: String,
    /// Zone that it is in, if that is known.
    pub zone: Option<String>,
    /// Volumes that may be attached to it; none: any number.
    pub max_volumes: Option<u32>,
    /// Directories that belong to the caller. Mounts in them were made for the caller, who may have them
    /// removed. Elsewhere only the volume itself is unmounted.
    pub roots: Vec<PathBuf>,
}

/// Serves the calls of kubelet to the CSI Node service.
#[derive(Clone)]
pub struct CsiNodeService {
    volumes: Arc<dyn NodeVolumes>,
    options: Arc<NodeOptions>,
    /// For everything that changes something.
    gates: Gates,
    /// Gates for statistics, which kubelet requests each minute and which must not block other calls.
    stats_gates: Gates,
    /// Dead mounts that kubelet knows of.
    dead_mounts: Arc<DeadMounts>,
}

impl std::fmt::Debug for CsiNodeService {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CsiNodeService").field("options", &self.options).finish_non_exhaustive()
    }
}

type RpcResult<T> = Result<Response<T>, Status>;
/// The answer of [`NodeVolumes`].
type VolumeResult = Result<NodeVolume, VolumesError>;

impl CsiNodeService {
    /// Creates the service for the volumes of `volumes`.
    #[must_use]
    pub fn new(volumes: Arc<dyn NodeVolumes>, mut options: NodeOptions) -> CsiNodeService {
        // Mounts are listed by their real paths: MicroK8s has a link in place of the directory.
        for root in &mut options.roots {
            if let Ok(real) = std::fs::canonicalize(&*root) {
                *root = real;
            }
        }
        let (gates, stats_gates, dead_mounts) = Default::default();
        CsiNodeService { volumes, options: Arc::new(options), gates, stats_gates, dead_mounts }
    }

    /// Returns the same service, which records dead mounts of pods in `dead_mounts`.
    #[must_use]
    pub fn with_dead_mounts(self, dead_mounts: Arc<DeadMounts>) -> CsiNodeService {
        CsiNodeService { dead_mounts, ..self }
    }

    /// Returns the service for a gRPC server.
    #[must_use]
    pub fn server(self) -> NodeServer<CsiNodeService> {
        NodeServer::new(self).max_decoding_message_size(REQUEST_MAX_BYTES)
    }

    /// Does `work` on a volume.
    async fn work<T: Send + 'static>(
        &self,
        gates: &Gates,
        volume: VolumeName,
        work: impl FnOnce(&NodeOptions, VolumeResult) -> Result<T, CsiError> + Send + 'static,
    ) -> RpcResult<T> {
        self.work_on(gates, volume, false, work).await
    }

    /// Does `work` on a volume, which takes its size first if it `is_new_here`.
    async fn work_on<T: Send + 'static>(
        &self,
        gates: &Gates,
        volume: VolumeName,
        is_new_here: bool,
        work: impl FnOnce(&NodeOptions, VolumeResult) -> Result<T, CsiError> + Send + 'static,
    ) -> RpcResult<T> {
        let pass = gates.enter(&volume).ok_or_else(|| CsiError::busy(&volume))?;
        let slow = || CsiError::TooSlow(format!("volume {volume}: still under way after {CALL_LIMIT:?}"));
        let limit = tokio::time::sleep(CALL_LIMIT);
        let mut limit = std::pin::pin!(limit);
        let find = async {
            if is_new_here {
                self.volumes.take_size(&volume).await;
            }
            self.volumes.find(&volume).await
        };
        let found = tokio::select! {
            found = find => found,
            () = &mut limit => return Err(slow().into()),
        };
        let (sender, done) = oneshot::channel();
        let options = Arc::clone(&self.options);
        // Not a thread of the runtime: a thread that hangs in the kernel would keep the process from ending.
        let thread = thread::Builder::new().name("csi".into()).spawn(move || {
            let result = work(&options, found);
            drop(pass);
            let _ = sender.send(result);
        });
        thread.map_err(CsiError::system("a thread"))?;
        tokio::select! {
            result = done => Ok(Response::new(result.map_err(|_| slow())??)),
            () = &mut limit => Err(slow().into()),
        }
    }
}

#[tonic::async_trait]
impl Node for CsiNodeService {
    async fn node_stage_volume(
        &self,
        request: Request<v1::NodeStageVolumeRequest>,
    ) -> RpcResult<v1::NodeStageVolumeResponse> {
        let request = request.into_inner();
        let volume = arguments::volume(&request.volume_id)?;
        let staging = arguments::path("staging_target_path", &request.staging_target_path)?;
        let capability = capability(request.volume_capability)?;
        self.work_on(&self.gates, volume, true, move |options, found| {
            stage::stage(options, &found?, &staging, &capability)?;
            Ok(v1::NodeStageVolumeResponse {})
        })
        .await
    }

    async fn node_unstage_volume(
        &self,
        request: Request<v1::NodeUnstageVolumeRequest>,
    ) -> RpcResult<v1::NodeUnstageVolumeResponse> {
        let request = request.into_inner();
        let volume = arguments::volume(&request.volume_id)?;
        let staging = arguments::path("staging_target_path", &request.staging_target_path)?;
        let dead_mounts = Arc::clone(&self.dead_mounts);
        self.work(&self.gates, volume.clone(), move |options, found| {
            stage::unstage(options, found.ok().as_ref(), &staging)?;
            dead_mounts.forget_volume(&volume);
            Ok(v1::NodeUnstageVolumeResponse {})
        })
        .await
    }

    async fn node_publish_volume(
        &self,
        request: Request<v1::NodePublishVolumeRequest>,
    ) -> RpcResult<v1::NodePublishVolumeResponse> {
        let request = request.into_inner();
        let volume = arguments::volume(&request.volume_id)?;
        let target = arguments::path("target_path", &request.target_path)?;
        let capability = capability(request.volume_capability)?;
        if request.staging_target_path.is_empty() {
            // The one missing argument that has another code.
            return Err(CsiError::Precondition("staging_target_path is missing".into()).into());
        }
        let staging = arguments::path("staging_target_path", &request.staging_target_path)?;
        let wanted = publish::PublishRequest { target, staging, capability, read_only: request.readonly };
        let dead_mounts = Arc::clone(&self.dead_mounts);
        self.work(&self.gates, volume.clone(), move |options, found| {
            publish::publish(options, &found?, &wanted)?;
            dead_mounts.forget(&volume, &wanted.target);
            Ok(v1::NodePublishVolumeResponse {})
        })
        .await
    }

    async fn node_unpublish_volume(
        &self,
        request: Request<v1::NodeUnpublishVolumeRequest>,
    ) -> RpcResult<v1::NodeUnpublishVolumeResponse> {
        let request = request.into_inner();
        let volume = arguments::volume(&request.volume_id)?;
        let target = arguments::path("target_path", &request.target_path)?;
        let dead_mounts = Arc::clone(&self.dead_mounts);
        self.work(&self.gates, volume.clone(), move |options, found| {
            publish::unpublish(options, found.ok().as_ref(), &target)?;
            dead_mounts.forget(&volume, &target);
            Ok(v1::NodeUnpublishVolumeResponse {})
        })
        .await
    }

    async fn node_get_volume_stats(
        &self,
        request: Request<v1::NodeGetVolumeStatsRequest>,
    ) -> RpcResult<v1::NodeGetVolumeStatsResponse> {
        let request = request.into_inner();
        let volume = arguments::volume(&request.volume_id)?;
        let path = arguments::volume_path(&request.volume_path)?;
        let dead_mounts = Arc::clone(&self.dead_mounts);
        self.work(&self.stats_gates, volume.clone(), move |options, found| {
            let stats = stats::stats(options, found, path.as_deref());
            if let Some(path) = &path {
                dead_mounts.record(path, &volume, stats.as_ref().is_ok_and(|stats| stats.is_dead));
            }
            stats.map(|stats| stats.answer)
        })
        .await
    }

    async fn node_expand_volume(
        &self,
        request: Request<v1::NodeExpandVolumeRequest>,
    ) -> RpcResult<v1::NodeExpandVolumeResponse> {
        let request = request.into_inner();
        let volume = arguments::volume(&request.volume_id)?;
        let path = arguments::volume_path(&request.volume_path)?;
        let capability = request.volume_capability.map(|wanted| capability(Some(wanted))).transpose()?;
        let required_bytes = size_range(request.capacity_range)?.required_bytes;
        self.work(&self.gates, volume, move |_, found| {
            let capacity_bytes =
                expand::expand(&found?, path.as_deref(), capability.as_ref(), required_bytes)?;
            Ok(v1::NodeExpandVolumeResponse { capacity_bytes })
        })
        .await
    }

    async fn node_get_capabilities(
        &self,
        _: Request<v1::NodeGetCapabilitiesRequest>,
    ) -> RpcResult<v1::NodeGetCapabilitiesResponse> {
        use v1::node_service_capability::{Rpc, Type, rpc};
        // Not VOLUME_MOUNT_GROUP: ext4 and xfs have no mount option for it, and kubelet changes the group by
        // itself.
        let announced = [
            rpc::Type::StageUnstageVolume,
            rpc::Type::GetVolumeStats,
            rpc::Type::ExpandVolume,
            rpc::Type::VolumeCondition,
            rpc::Type::SingleNodeMultiWriter,
        ];
        let capability = |kind: rpc::Type| v1::NodeServiceCapability {
            r#type: Some(Type::Rpc(Rpc { r#type: kind.into() })),
        };
        let capabilities = announced.map(capability).to_vec();
        Ok(Response::new(v1::NodeGetCapabilitiesResponse { capabilities }))
    }

    async fn node_get_info(&self, _: Request<v1::NodeGetInfoRequest>) -> RpcResult<v1::NodeGetInfoResponse> {
        let mut segments = [(TOPOLOGY_NODE.to_owned(), self.options.node_id.clone())].to_vec();
        segments.extend(self.options.zone.clone().map(|zone| (TOPOLOGY_ZONE.to_owned(), zone)));
        Ok(Response::new(v1::NodeGetInfoResponse {
            node_id: self.options.node_id.clone(),
            max_volumes_per_node: self.options.max_volumes.map_or(0, Into::into),
            accessible_topology: Some(v1::Topology { segments: segments.into_iter().collect() }),
        }))
    }
}
