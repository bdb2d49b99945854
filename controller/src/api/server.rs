use std::pin::Pin;
use std::sync::Arc;

use shorthorn_api::v1::controller_server::Controller;
use shorthorn_api::{nonempty, nonzero, v1};
use shorthorn_controller_core::lost_node::DeleteNode;
use shorthorn_controller_core::objects::{Object, RebuildLimits, Volume, VolumeState};
use shorthorn_controller_core::reconcile::Settings;
use shorthorn_controller_core::requests::{self, Change, CreateVolume, RequestError, SetDisk, SetNode};
use shorthorn_controller_core::{ClusterState, NodeName, Timestamp, drain, reboot};
use shorthorn_pki::address::ServerUrl;
use tokio::sync::{broadcast, mpsc, watch};
use tokio_stream::Stream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};

use super::diagnostics::Diagnostics;
use super::{messages, status};
use crate::agents::{AgentCallError, Fleet};
use crate::kubernetes::attachments::{Attachment, Attachments};
use crate::kubernetes::workloads::Workloads;
use crate::random::new_secret;
use crate::store::{self, ChangeError, ObjectStore, ObjectStoreError};

/// The number of states of a volume that a slow watcher may be behind before the sender waits.
const WATCH_BUFFER: usize = 16;

pub(super) type RpcResult<T> = Result<Response<T>, Status>;

/// Serves the calls of shorthornctl: reads and changes stored objects, and calls agents.
#[derive(Clone)]
pub struct Api {
    pub(super) store: Arc<dyn ObjectStore>,
    pub(super) fleet: Arc<Fleet>,
    /// True once the controller is on its way out: streams end then.
    stopping: watch::Receiver<bool>,
    pub(super) settings: Settings,
    /// None: no Kubernetes has volumes attached.
    attachments: Option<Arc<dyn Attachments>>,
    /// The diagnostics of the controller itself; none if they are not served.
    diagnostics: Option<Diagnostics>,
    /// None: no Kubernetes has workloads.
    pub(super) workloads: Option<Arc<dyn Workloads>>,
}

impl std::fmt::Debug for Api {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Api").field("fleet", &self.fleet).finish_non_exhaustive()
    }
}

impl Api {
    /// Creates the service.
    #[must_use]
    pub fn new(
        store: Arc<dyn ObjectStore>,
        fleet: Arc<Fleet>,
        stopping: watch::Receiver<bool>,
        settings: Settings,
    ) -> Api {
        Api { store, fleet, stopping, settings, attachments: None, diagnostics: None, workloads: None }
    }

    /// Sets the attachments of Kubernetes: a volume that has one is not detached without force.
    #[must_use]
    pub fn with_attachments(self, attachments: Arc<dyn Attachments>) -> Api {
        Api { attachments: Some(attachments), ..self }
    }

    /// Returns the same service with the diagnostics of the controller itself.
    #[must_use]
    pub fn with_diagnostics(self, diagnostics: Diagnostics) -> Api {
        Api { diagnostics: Some(diagnostics), ..self }
    }

    /// Sets the source of the users of volumes.
    #[must_use]
    pub fn with_workloads(self, workloads: Arc<dyn Workloads>) -> Api {
        Api { workloads: Some(workloads), ..self }
    }

    /// Returns an error if Kubernetes uses the volume, so that a detach needs force.
    async fn check_unpublished(&self, name: &str) -> Result<(), Status> {
        let Some(attachments) = &self.attachments else { return Ok(()) };
        let is_wanted = |cluster: &ClusterState| Ok(requests::find(cluster, name)?.spec.node_id.is_some());
        if !is_wanted(&self.store.state()).map_err(|error| status::of_request(&error))? {
            return Ok(());
        }
        let published = attachments.of(name).await.map_err(|error| {
            let message = format!(
                "cannot check in Kubernetes whether volume {name} is attached: {error}; --force detaches it \
                 anyway"
            );
            Status::unavailable(message)
        })?;
        match published {
            Some(Attachment { name: attachment, node }) => {
                let error = RequestError::Published { name: name.to_owned(), node, attachment };
                Err(status::of_request(&error))
            }
            None => Ok(()),
        }
    }

    pub(super) async fn change<T: Into<Object>>(
        &self,
        decide: impl Fn(&ClusterState) -> Result<Change<T>, RequestError>,
    ) -> Result<(), Status> {
        store::change(self.store.as_ref(), decide).await.map_err(|error| match error {
            ChangeError::Refused(error) => status::of_request(&error),
            ChangeError::Store(conflict @ ObjectStoreError::Conflict { .. }) => {
                Status::aborted(format!("too many changes at once: {conflict}; try again"))
            }
            ChangeError::Store(error) => status::of_store(&error),
        })
    }

    pub(super) async fn change_volume(
        &self,
        name: &str,
        decide: impl Fn(&ClusterState) -> Result<Change<Volume>, RequestError>,
    ) -> RpcResult<v1::Volume> {
        self.change(decide).await?;
        self.show(name).map(Response::new)
    }

    pub(super) fn show(&self, name: &str) -> Result<v1::Volume, Status> {
        let cluster = self.store.state();
        let volume = requests::find(&cluster, name).map_err(|error| status::of_request(&error))?;
        Ok(messages::volume(&cluster, &self.fleet.agents(), volume))
    }
}

type PartStream = Pin<Box<dyn Stream<Item = Result<v1::DiagnosticsPart, Status>> + Send>>;
type VolumeStream = Pin<Box<dyn Stream<Item = Result<v1::Volume, Status>> + Send>>;

#[tonic::async_trait]
impl Controller for Api {
    type WatchVolumeStream = VolumeStream;
    type GetDiagnosticsStream = PartStream;

    async fn create_volume(&self, request: Request<v1::CreateVolumeRequest>) -> RpcResult<v1::Volume> {
        let request = request.into_inner();
        let secret = new_secret().map_err(|error| {
            Status::unavailable(format!("cannot get random numbers for the secret: {error}"))
        })?;
        let chosen = request.chosen_frontend();
        let frontend = chosen.map_err(|error| status::of_request(&error.into()))?;
        let locality = messages::data_locality(nonempty(request.data_locality));
        let data_locality = locality.map_err(|error| status::of_request(&error))?.unwrap_or_default();
        let wanted = CreateVolume {
            name: request.name.clone(),
            size_bytes: request.size_bytes,
            number_of_replicas: Some(request.number_of_replicas).filter(|number| *number > 0),
            frontend,
            replica_soft_anti_affinity: request.replica_soft_anti_affinity,
            replica_zone_hard_anti_affinity: !request.replica_zone_soft_anti_affinity.unwrap_or(true),
            replica_disk_hard_anti_affinity: !request.replica_disk_soft_anti_affinity.unwrap_or(true),
            node_selector: request.node_selector,
            disk_selector: request.disk_selector,
            data_locality,
            verify_reads: request.verify_reads,
            encrypt_in_transit: request.encrypt_in_transit,
            csi_name: None,
            preferred_node: None,
        };
        let decide = |cluster: &ClusterState| wanted.clone().apply(cluster, secret.clone(), Timestamp::now());
        self.change_volume(&request.name, decide).await
    }

    async fn get_volume(&self, request: Request<v1::GetVolumeRequest>) -> RpcResult<v1::Volume> {
        self.show(&request.into_inner().name).map(Response::new)
    }

    async fn list_volumes(
        &self,
        request: Request<v1::ListVolumesRequest>,
    ) -> RpcResult<v1::ListVolumesResponse> {
        self.volumes(request.into_inner()).await
    }

    async fn attach_volume(&self, request: Request<v1::AttachVolumeRequest>) -> RpcResult<v1::Volume> {
        let v1::AttachVolumeRequest { name, node } = request.into_inner();
        self.change_volume(&name, |cluster| requests::attach(cluster, &name, &node)).await
    }

    async fn detach_volume(&self, request: Request<v1::DetachVolumeRequest>) -> RpcResult<v1::Volume> {
        let v1::DetachVolumeRequest { name, force } = request.into_inner();
        if force {
            tracing::warn!(volume = name, "detaching by force, even if a VolumeAttachment names the volume");
            return self.change_volume(&name, |cluster| requests::detach_by_force(cluster, &name)).await;
        }
        self.check_unpublished(&name).await?;
        self.change_volume(&name, |cluster| requests::detach(cluster, &name)).await
    }

    async fn delete_volume(&self, request: Request<v1::DeleteVolumeRequest>) -> RpcResult<v1::Volume> {
        let name = request.into_inner().name;
        // Shown as it was before: it may be gone by the time of the answer.
        let shown = self.show(&name)?;
        self.change(|cluster| requests::delete(cluster, &name, Timestamp::now())).await?;
        let shown = v1::Volume { node: String::new(), ..shown };
        Ok(Response::new(shown.with_state(VolumeState::Deleting)))
    }

    async fn list_trash(
        &self,
        request: Request<v1::ListVolumeTrashRequest>,
    ) -> RpcResult<v1::ListVolumeTrashResponse> {
        self.trash(request.into_inner()).await.map(Response::new)
    }

    async fn undelete_volume(
        &self,
        request: Request<v1::UndeleteVolumeRequest>,
    ) -> RpcResult<v1::UndeleteVolumeResponse> {
        self.undelete(&request.into_inner().name).await.map(Response::new)
    }

    async fn remove_trash(
        &self,
        request: Request<v1::RemoveVolumeTrashRequest>,
    ) -> RpcResult<v1::RemoveVolumeTrashResponse> {
        let v1::RemoveVolumeTrashRequest { name, replica_id } = request.into_inner();
        self.empty_trash(&name, &replica_id).await.map(Response::new)
    }

    async fn watch_volume(&self, request: Request<v1::GetVolumeRequest>) -> RpcResult<VolumeStream> {
        let name = request.into_inner().name;
        // Before the first look: no change is missed in between.
        let changes = self.store.changes();
        self.show(&name)?;
        let (sender, receiver) = mpsc::channel(WATCH_BUFFER);
        tokio::spawn(self.clone().watch(name, changes, sender));
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }

    async fn explain_volume(&self, request: Request<v1::GetVolumeRequest>) -> RpcResult<v1::Explanation> {
        self.explain(&request.into_inner().name).map(Response::new)
    }

    async fn set_number_of_replicas(
        &self,
        request: Request<v1::SetNumberOfReplicasRequest>,
    ) -> RpcResult<v1::Volume> {
        let v1::SetNumberOfReplicasRequest { name, number_of_replicas } = request.into_inner();
        self.change_volume(&name, |cluster| requests::set_replicas(cluster, &name, number_of_replicas)).await
    }

    async fn expand_volume(&self, request: Request<v1::ExpandVolumeRequest>) -> RpcResult<v1::Volume> {
        let v1::ExpandVolumeRequest { name, size_bytes } = request.into_inner();
        let limits = self.settings.scheduling;
        self.change_volume(&name, |cluster| requests::expand_within(cluster, &name, size_bytes, limits)).await
    }

    async fn set_volume_rebuild_limits(
        &self,
        request: Request<v1::SetVolumeRebuildLimitsRequest>,
    ) -> RpcResult<v1::Volume> {
        let v1::SetVolumeRebuildLimitsRequest { name, limits } = request.into_inner();
        let limits = limits.unwrap_or_default();
        let share_percent = match limits.share_percent {
            0 => RebuildLimits::default().share_percent,
            percent => percent,
        };
        let limits = RebuildLimits { bytes_per_s: nonzero(limits.bytes_per_s), share_percent };
        self.change_volume(&name, |cluster| requests::set_rebuild(cluster, &name, limits)).await
    }

    async fn scrub_volume(&self, request: Request<v1::ScrubRequest>) -> RpcResult<v1::Volume> {
        self.scrub(request.into_inner()).await
    }

    async fn upgrade_volume_engine(
        &self,
        request: Request<v1::UpgradeVolumeEngineRequest>,
    ) -> RpcResult<v1::UpgradeEngineResponse> {
        self.upgrade(request.into_inner()).await
    }

    async fn inspect_replicas(
        &self,
        request: Request<v1::GetVolumeRequest>,
    ) -> RpcResult<v1::InspectReplicasResponse> {
        let replicas = self.inspect(&request.into_inner().name).await?;
        Ok(Response::new(v1::InspectReplicasResponse { replicas }))
    }

    async fn salvage_volume(&self, request: Request<v1::SalvageVolumeRequest>) -> RpcResult<v1::Volume> {
        self.salvage(request.into_inner()).await
    }

    async fn list_replicas(
        &self,
        request: Request<v1::ListReplicasRequest>,
    ) -> RpcResult<v1::ListReplicasResponse> {
        self.replicas(request.get_ref())
    }

    async fn list_nodes(&self, request: Request<v1::ListNodesRequest>) -> RpcResult<v1::ListNodesResponse> {
        self.nodes(request.get_ref())
    }

    async fn add_disk(&self, request: Request<v1::AddNodeDiskRequest>) -> RpcResult<v1::NodeObject> {
        let v1::AddNodeDiskRequest { node, path } = request.into_inner();
        let name = requests::check_disk(&self.store.state(), &node, &path)
            .map_err(|error| status::of_request(&error))?;
        let disk = self.fleet.add_disk(&name, &path).await.map_err(|error| status::of_call(&error))?;
        self.change(|cluster| requests::add_disk(cluster, &name, &path, &disk)).await?;
        self.show_node(name.as_str()).map(Response::new)
    }

    async fn discover_devices(
        &self,
        request: Request<v1::DiscoverNodeDevicesRequest>,
    ) -> RpcResult<v1::DiscoverNodeDevicesResponse> {
        self.discover(request.into_inner()).await.map(Response::new)
    }

    async fn remove_disk(&self, request: Request<v1::RemoveNodeDiskRequest>) -> RpcResult<v1::NodeObject> {
        self.take_disk_away(request.into_inner()).await.map(Response::new)
    }

    async fn list_orphans(
        &self,
        request: Request<v1::ListOrphansRequest>,
    ) -> RpcResult<v1::ListOrphansResponse> {
        self.orphans(request.into_inner()).await.map(Response::new)
    }

    async fn delete_orphan(
        &self,
        request: Request<v1::DeleteOrphanRequest>,
    ) -> RpcResult<v1::DeleteOrphanResponse> {
        self.trash_orphan(request.into_inner()).await.map(Response::new)
    }

    async fn set_node(&self, request: Request<v1::SetNodeRequest>) -> RpcResult<v1::NodeObject> {
        let v1::SetNodeRequest { name, allow_scheduling, tags, zone, eviction_requested, address } =
            request.into_inner();
        if let Some(address) = &address {
            let url: Result<ServerUrl, _> = address.parse();
            url.map_err(|error| Status::invalid_argument(error.to_string()))?;
        }
        let tags = tags.map(|tags| tags.tags);
        let wanted = SetNode { name, allow_scheduling, eviction_requested, tags, zone, address };
        self.change(|cluster| wanted.apply(cluster, Timestamp::now())).await?;
        self.show_node(&wanted.name).map(Response::new)
    }

    async fn delete_node(&self, request: Request<v1::DeleteNodeRequest>) -> RpcResult<v1::NodeObject> {
        let v1::DeleteNodeRequest { name, confirm, force } = request.into_inner();
        // Shown as it was before: it may be gone by the time of the answer.
        let shown = self.show_node(&name)?;
        let wanted = DeleteNode { name, confirm, force };
        tracing::warn!(node = wanted.name, force, "giving up a node");
        self.change(|cluster| wanted.apply(cluster, &self.fleet.agents(), Timestamp::now())).await?;
        Ok(Response::new(v1::NodeObject { deleting: true, ..shown }))
    }

    async fn take_node(&self, request: Request<v1::TakeNodeRequest>) -> RpcResult<v1::TakeNodeResponse> {
        let v1::TakeNodeRequest { name, from_cluster } = request.into_inner();
        let node = NodeName::new(&name).map_err(|error| Status::invalid_argument(error.to_string()))?;
        let failed = |error: AgentCallError| Status::new(error.code(), format!("node {node}: {error}"));
        let (was, cluster) = self.fleet.cluster_of(&node).await.map_err(failed)?;
        if !from_cluster.is_empty() {
            tracing::warn!(%node, from_cluster, "taking over a node of another cluster");
            self.fleet.take_node(&node, &from_cluster).await.map_err(failed)?;
        }
        Ok(Response::new(v1::TakeNodeResponse { was, cluster }))
    }

    async fn get_drain(&self, request: Request<v1::GetDrainRequest>) -> RpcResult<v1::Drain> {
        let v1::GetDrainRequest { node, disk } = request.into_inner();
        let cluster = self.store.state();
        let node = requests::find_node(&cluster, &node).map_err(|error| status::of_request(&error))?;
        let agents = self.fleet.agents();
        let (eviction_requested, left) = if disk.is_empty() {
            (node.spec.eviction_requested, drain::remaining(&cluster, &agents, node))
        } else {
            let missing = || RequestError::NoDisk { node: node.metadata.name.clone(), path: disk.clone() };
            let spec = node.spec.disks.get(&disk).ok_or_else(|| status::of_request(&missing()))?;
            (spec.eviction_requested, drain::remaining_on_disk(&cluster, &agents, node, &disk))
        };
        let left = left.into_iter().map(drain_left).collect();
        Ok(Response::new(v1::Drain { eviction_requested, left }))
    }

    async fn check_reboot(
        &self,
        request: Request<v1::CheckRebootRequest>,
    ) -> RpcResult<v1::CheckRebootResponse> {
        let node = request.into_inner().node;
        let cluster = self.store.state();
        requests::find_node(&cluster, &node).map_err(|error| status::of_request(&error))?;
        let hold =
            |reboot::Hold { volume, is_engine, message }| v1::RebootHold { volume, message, is_engine };
        let holds = reboot::holds(&cluster, &node, Timestamp::now()).into_iter().map(hold).collect();
        Ok(Response::new(v1::CheckRebootResponse { holds }))
    }

    async fn rebalance(&self, request: Request<v1::RebalanceRequest>) -> RpcResult<v1::RebalanceResponse> {
        self.move_replicas(request.into_inner()).await
    }

    async fn set_volume(&self, request: Request<v1::SetVolumeRequest>) -> RpcResult<v1::Volume> {
        self.change_placement(request.into_inner()).await
    }

    async fn evict_replica(&self, request: Request<v1::EvictReplicaRequest>) -> RpcResult<v1::DrainLeft> {
        self.evict(&request.into_inner().name).await
    }

    async fn inspect_node(&self, request: Request<v1::InspectNodeRequest>) -> RpcResult<v1::NodeDetail> {
        self.node_detail(&request.into_inner().name).map(Response::new)
    }

    async fn get_diagnostics(&self, _: Request<v1::GetDiagnosticsRequest>) -> RpcResult<PartStream> {
        let (sender, receiver) = mpsc::channel(WATCH_BUFFER);
        if let Some(diagnostics) = self.diagnostics.clone() {
            tokio::spawn(diagnostics.send(sender));
        }
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }

    async fn get_overview(&self, _: Request<v1::GetOverviewRequest>) -> RpcResult<v1::Overview> {
        Ok(Response::new(self.overview()))
    }

    async fn examine(&self, _: Request<v1::ExamineRequest>) -> RpcResult<v1::Examination> {
        Ok(Response::new(Api::examine(self)))
    }

    async fn set_disk(&self, request: Request<v1::SetDiskRequest>) -> RpcResult<v1::NodeObject> {
        let v1::SetDiskRequest { node, path, allow_scheduling, tags, reserved_bytes, eviction_requested } =
            request.into_inner();
        let tags = tags.map(|tags| tags.tags);
        let wanted = SetDisk { node, path, tags, allow_scheduling, eviction_requested, reserved_bytes };
        self.change(|cluster| wanted.apply(cluster)).await?;
        self.show_node(&wanted.node).map(Response::new)
    }
}

impl Api {
    pub(super) fn show_node(&self, name: &str) -> Result<v1::NodeObject, Status> {
        let cluster = self.store.state();
        let node = requests::find_node(&cluster, name).map_err(|error| status::of_request(&error))?;
        Ok(messages::node(&cluster, &self.fleet.agents(), node))
    }

    /// Sends the volume whenever its message changes, until it is deleted or the receiver is gone.
    async fn watch(
        mut self,
        name: String,
        mut changes: broadcast::Receiver<shorthorn_controller_core::objects::Key>,
        sender: mpsc::Sender<Result<v1::Volume, Status>>,
    ) {
        let mut last = None;
        loop {
            let shown = self.show(&name);
            let gone = shown.is_err();
            if last.as_ref() != shown.as_ref().ok() || gone {
                last = shown.as_ref().ok().cloned();
                if sender.send(shown).await.is_err() || gone {
                    return;
                }
            }
            tokio::select! {
                // For any number of missed changes, the next look shows the current state.
                change = changes.recv() => if matches!(change, Err(broadcast::error::RecvError::Closed)) {
                    return;
                },
                () = stopped(&mut self.stopping) => {
                    let _ = sender.send(Err(Status::unavailable("the controller is stopping"))).await;
                    return;
                }
                () = sender.closed() => return,
            }
        }
    }
}

pub(super) fn drain_left(left: drain::RemainingObject) -> v1::DrainLeft {
    v1::DrainLeft {
        volume: left.volume,
        replica: left.replica.unwrap_or_default(),
        held: left.held,
        message: left.message,
    }
}

/// Returns once the controller is on its way out.
async fn stopped(stopping: &mut watch::Receiver<bool>) {
    // An error means that the sender is gone, and with it the controller.
    let _ = stopping.wait_for(|stopping| *stopping).await;
}
