//! The node API of `node.proto`, on top of instances, disks and devices.

use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;

use shorthorn_api::v1::node_server::Node;
use shorthorn_api::{CLUSTER_HEADER, ViewError, level, nonzero, v1};
use shorthorn_control::ScrubCommand;
use shorthorn_frontend::probe::FrontendReport;
use shorthorn_types::status::Frontend;
use shorthorn_types::{ReplicaId, VolumeName};
use tokio::sync::{broadcast, mpsc, watch};
use tokio_stream::Stream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};

use crate::serve::blocking;
use crate::serve::claim::NodeClaim;
use crate::serve::config::Config;
use crate::serve::csi::DriverState;
use crate::serve::devices;
use crate::serve::directories::directory_of;
use crate::serve::discovery::Discovery;
use crate::serve::disks::{self, Disks};
use crate::serve::error::{NodeError, RpcResult};
use crate::serve::frontends::Frontends;
use crate::serve::host_warnings::HostWarnings;
use crate::serve::instance::{
    Hub, InstanceId, InstanceWatch, Spec, StartOptions, endpoints, rebuild_limits, volume_size,
};
use crate::serve::paths::absolute;
use crate::serve::trash::{self, TrashLimits};
use crate::serve::{longhorn, salvage};

/// The number of events that wait in the connection of a watcher, besides those in the hub.
const WATCH_QUEUE: usize = 16;

/// Serves the node API for the controller.
#[derive(Clone)]
pub struct NodeService {
    pub config: Arc<Config>,
    pub hub: Arc<Hub>,
    pub disks: Arc<Disks>,
    pub frontends: Arc<Frontends>,
    /// The block devices of this host.
    pub discovery: Arc<Discovery>,
    pub host_warnings: Arc<HostWarnings>,
    /// The cluster that it belongs to.
    pub claim: Arc<NodeClaim>,
    /// The CSI driver, if the node has one.
    pub driver: Option<Arc<DriverState>>,
    /// Ends the watches: true when the agent stops.
    pub stopping: watch::Receiver<bool>,
}

fn dead_mounts(driver: &DriverState) -> Vec<v1::DeadMount> {
    let mounts = driver.dead_mounts.all().into_iter();
    mounts.map(|mount| v1::DeadMount { volume: mount.volume.to_string(), pod_uid: mount.pod_uid }).collect()
}

#[tonic::async_trait]
impl Node for NodeService {
    async fn get_node(&self, _: Request<v1::GetNodeRequest>) -> RpcResult<v1::NodeInfo> {
        let frontend = |FrontendReport { kind, usable, reason }| {
            let info = v1::FrontendInfo { usable, reason, ..v1::FrontendInfo::default() };
            info.with_frontend(Frontend::from(kind))
        };
        let reports = self.frontends.get().await?;
        let (device_dir, disks) = (self.config.device_dir.clone(), self.disks.paths());
        let of_longhorn = move || Ok(longhorn::warnings(Path::new(longhorn::PROC), &device_dir, &disks));
        let mut warnings = blocking(of_longhorn).await?;
        let data = self.hub.data_address();
        warnings.extend(self.host_warnings.get(&self.config).await);
        warnings.extend(data.problem);
        Ok(Response::new(v1::NodeInfo {
            name: self.config.node_name.to_string(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            data_address: data.address.map(|address| address.to_string()).unwrap_or_default(),
            frontends: reports.into_iter().map(frontend).collect(),
            zone: self.config.zone.clone().map(String::from).unwrap_or_default(),
            max_volumes: self.config.max_volumes.unwrap_or_default(),
            cluster: self.claim.owner().unwrap_or_default(),
            warnings,
            feature_level: level::NEWEST,
            dead_mounts: self.driver.as_deref().map(dead_mounts).unwrap_or_default(),
        }))
    }

    async fn release_node(
        &self,
        request: Request<v1::ReleaseNodeRequest>,
    ) -> RpcResult<v1::ReleaseNodeResponse> {
        let header = request.metadata().get(CLUSTER_HEADER).and_then(|value| value.to_str().ok());
        let missing = || {
            NodeError::Invalid(format!(
                "the header {CLUSTER_HEADER} has to name the cluster that takes the node over"
            ))
        };
        let to = header.ok_or_else(missing)?.to_owned();
        let (claim, from) = (Arc::clone(&self.claim), request.into_inner().cluster);
        blocking(move || claim.hand_over(&from, &to)).await?;
        Ok(Response::new(v1::ReleaseNodeResponse {}))
    }

    async fn list_instances(
        &self,
        _: Request<v1::ListInstancesRequest>,
    ) -> RpcResult<v1::ListInstancesResponse> {
        Ok(Response::new(v1::ListInstancesResponse { instances: self.hub.table().list() }))
    }

    async fn start_replica(&self, request: Request<v1::StartReplicaRequest>) -> RpcResult<v1::Instance> {
        let request = request.into_inner();
        let (disk, uuid, create) =
            (PathBuf::from(&request.disk_path), request.disk_uuid.clone(), request.create);
        let options = StartOptions { rebind: request.rebind, ..StartOptions::default() };
        let spec = Spec::replica(request, &self.config, self.hub.paths())?;
        self.check_disk(disk.clone(), uuid).await?;
        if create {
            let id = spec.id();
            blocking(move || refuse_trashed(&disk, &id)).await?;
        }
        Ok(Response::new(self.hub.start_instance(spec, options).await?))
    }

    async fn start_engine(&self, request: Request<v1::StartEngineRequest>) -> RpcResult<v1::Instance> {
        let request = request.into_inner();
        let v1::StartEngineRequest { revision, continues, .. } = request;
        let options = StartOptions { revision, continues: nonzero(continues), rebind: false };
        let spec = Spec::engine(request, &self.config, self.hub.paths())?;
        Ok(Response::new(self.hub.start_instance(spec, options).await?))
    }

    async fn grant(&self, request: Request<v1::GrantRequest>) -> RpcResult<v1::GrantResponse> {
        let request = request.into_inner();
        let view = request.view.ok_or_else(|| NodeError::Invalid("the view is missing".into()))?;
        let view = view.try_into().map_err(|error: ViewError| NodeError::from(error))?;
        self.hub.grant(name(&request.volume)?, nonzero(request.attach), view).await?;
        Ok(Response::new(v1::GrantResponse {}))
    }

    async fn update_replicas(
        &self,
        request: Request<v1::UpdateReplicasRequest>,
    ) -> RpcResult<v1::UpdateReplicasResponse> {
        let request = request.into_inner();
        let (volume, replicas) = (name(&request.volume)?, endpoints(request.replicas)?);
        self.hub.update_replicas(volume, nonzero(request.attach), replicas, request.revision).await?;
        Ok(Response::new(v1::UpdateReplicasResponse {}))
    }

    async fn upgrade_engine(
        &self,
        request: Request<v1::UpgradeEngineRequest>,
    ) -> RpcResult<v1::UpgradeEngineResponse> {
        let request = request.into_inner();
        let v1::UpgradeEngineRequest { volume, attach, only_outdated } = request;
        let upgraded = self.hub.upgrade(name(&volume)?, nonzero(attach), only_outdated).await?;
        Ok(Response::new(v1::UpgradeEngineResponse {
            pause_ms: u64::try_from(upgraded.pause.as_millis()).unwrap_or(u64::MAX),
            old_pid: upgraded.old_pid,
            new_pid: upgraded.new_pid,
            already_current: upgraded.old_pid == upgraded.new_pid,
        }))
    }

    async fn scrub(&self, request: Request<v1::ScrubRequest>) -> RpcResult<v1::ScrubResponse> {
        let v1::ScrubRequest { volume, stop, repair, bytes_per_s } = request.into_inner();
        let scrub = (!stop).then_some(ScrubCommand { bytes_per_s: nonzero(bytes_per_s), repair });
        self.hub.scrub(name(&volume)?, scrub).await?;
        Ok(Response::new(v1::ScrubResponse {}))
    }

    async fn fence_replica(
        &self,
        request: Request<v1::FenceReplicaRequest>,
    ) -> RpcResult<v1::FenceReplicaResponse> {
        let request = request.into_inner();
        let replica: ReplicaId = request.replica_id.parse().map_err(NodeError::from)?;
        self.hub.fence(name(&request.volume)?, replica, request.attach).await?;
        Ok(Response::new(v1::FenceReplicaResponse {}))
    }

    async fn set_rebuild_limits(
        &self,
        request: Request<v1::SetRebuildLimitsRequest>,
    ) -> RpcResult<v1::SetRebuildLimitsResponse> {
        let request = request.into_inner();
        let limits = rebuild_limits(request.limits)?;
        self.hub.set_limits(name(&request.volume)?, nonzero(request.attach), limits).await?;
        Ok(Response::new(v1::SetRebuildLimitsResponse {}))
    }

    async fn expand_engine(
        &self,
        request: Request<v1::ExpandEngineRequest>,
    ) -> RpcResult<v1::ExpandEngineResponse> {
        let v1::ExpandEngineRequest { volume, attach, size_bytes } = request.into_inner();
        self.hub.expand(name(&volume)?, nonzero(attach), volume_size(size_bytes)?).await?;
        Ok(Response::new(v1::ExpandEngineResponse {}))
    }

    async fn stop_instance(
        &self,
        request: Request<v1::StopInstanceRequest>,
    ) -> RpcResult<v1::StopInstanceResponse> {
        let request = request.into_inner();
        let id = InstanceId::parse(request.kind(), &request.name)?;
        self.hub.stop_instance(id, nonzero(request.attach), request.force).await?;
        Ok(Response::new(v1::StopInstanceResponse {}))
    }

    type WatchInstancesStream = Pin<Box<dyn Stream<Item = Result<v1::InstanceEvent, Status>> + Send>>;

    async fn watch_instances(
        &self,
        _: Request<v1::WatchInstancesRequest>,
    ) -> RpcResult<Self::WatchInstancesStream> {
        let (sender, events) = mpsc::channel(WATCH_QUEUE);
        let (watch, mut stopping) = (self.hub.table().watch(), self.stopping.clone());
        tokio::spawn(async move {
            tokio::select! {
                () = forward(watch, &sender) => {}
                () = sender.closed() => {}
                _ = stopping.wait_for(|stopping| *stopping) => {}
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(events))))
    }

    async fn list_disks(&self, _: Request<v1::ListDisksRequest>) -> RpcResult<v1::ListDisksResponse> {
        let all = Arc::clone(&self.disks);
        let disks = blocking(move || Ok(all.list())).await?;
        Ok(Response::new(v1::ListDisksResponse { disks }))
    }

    async fn add_disk(&self, request: Request<v1::AddDiskRequest>) -> RpcResult<v1::Disk> {
        let (all, path) = (Arc::clone(&self.disks), request.into_inner().path);
        Ok(Response::new(blocking(move || all.add(&path)).await?))
    }

    async fn remove_disk(
        &self,
        request: Request<v1::RemoveDiskRequest>,
    ) -> RpcResult<v1::RemoveDiskResponse> {
        let (all, path) = (Arc::clone(&self.disks), PathBuf::from(request.into_inner().path));
        blocking(move || all.remove(&path)).await?;
        Ok(Response::new(v1::RemoveDiskResponse {}))
    }

    async fn delete_replica(
        &self,
        request: Request<v1::DeleteReplicaRequest>,
    ) -> RpcResult<v1::DeleteReplicaResponse> {
        let request = request.into_inner();
        let (disk, id) = self.place(request.disk_path, &request.volume, &request.replica_id)?;
        self.check_disk(disk.clone(), request.disk_uuid.clone()).await?;
        let (deleted, limits) = (id.clone(), TrashLimits::of(&self.config));
        let delete = move || disks::delete_replica(&disk, &deleted, limits, &request.record);
        self.hub.while_stopped(&id, delete).await?;
        Ok(Response::new(v1::DeleteReplicaResponse {}))
    }

    async fn list_trash(&self, _: Request<v1::ListTrashRequest>) -> RpcResult<v1::ListTrashResponse> {
        let (all, limits) = (Arc::clone(&self.disks), TrashLimits::of(&self.config));
        Ok(Response::new(blocking(move || Ok(all.trash(limits))).await?))
    }

    async fn restore_replica(
        &self,
        request: Request<v1::RestoreReplicaRequest>,
    ) -> RpcResult<v1::RestoreReplicaResponse> {
        let request = request.into_inner();
        let (disk, id) = self.place(request.disk_path, &request.volume, &request.replica_id)?;
        self.check_disk(disk.clone(), request.disk_uuid.clone()).await?;
        let restored = id.clone();
        let restore = move || trash::restore(&disk, &restored, request.deleted_ms);
        self.hub.while_stopped(&id, restore).await?;
        Ok(Response::new(v1::RestoreReplicaResponse {}))
    }

    async fn remove_trash(
        &self,
        request: Request<v1::RemoveTrashRequest>,
    ) -> RpcResult<v1::RemoveTrashResponse> {
        let request = request.into_inner();
        let (disk, id) = self.place(request.disk_path, &request.volume, &request.replica_id)?;
        self.check_disk(disk.clone(), request.disk_uuid.clone()).await?;
        // Under the same gate as a restore; the replica of that name may run, because it is another
        // directory.
        let removed = id.clone();
        self.hub.beside(&id, move |_| trash::remove(&disk, &removed, request.deleted_ms)).await?;
        Ok(Response::new(v1::RemoveTrashResponse {}))
    }

    async fn inspect_replica(
        &self,
        request: Request<v1::InspectReplicaRequest>,
    ) -> RpcResult<v1::ReplicaInspection> {
        let request = request.into_inner();
        let (disk, id) = self.place(request.disk_path, &request.volume, &request.replica_id)?;
        let directory = directory_of(&disk, &id);
        Ok(Response::new(self.hub.beside(&id, move |runs| salvage::inspect(&directory, runs)).await?))
    }

    async fn salvage_replica(
        &self,
        request: Request<v1::SalvageReplicaRequest>,
    ) -> RpcResult<v1::SalvageReplicaResponse> {
        let request = request.into_inner();
        if request.attach == 0 {
            return Err(NodeError::Invalid("attach is 0: draw a new number for the salvage".into()).into());
        }
        let (disk, id) = self.place(request.disk_path, &request.volume, &request.replica_id)?;
        self.check_disk(disk.clone(), request.disk_uuid.clone()).await?;
        let directory = directory_of(&disk, &id);
        let replica: ReplicaId = request.replica_id.parse().map_err(NodeError::from)?;
        self.hub.while_stopped(&id, move || salvage::salvage(&directory, replica, request.attach)).await?;
        Ok(Response::new(v1::SalvageReplicaResponse {}))
    }

    async fn list_devices(&self, _: Request<v1::ListDevicesRequest>) -> RpcResult<v1::ListDevicesResponse> {
        let (dir, instances) = (self.config.device_dir.clone(), self.hub.table().list());
        let devices = blocking(move || {
            let engine = i32::from(v1::InstanceKind::Engine);
            let runs = |instance: &v1::Instance| instance.kind == engine && instance.known_pid().is_some();
            devices::list(&dir, |volume| instances.iter().any(|engine| runs(engine) && engine.name == volume))
        });
        Ok(Response::new(v1::ListDevicesResponse { devices: devices.await? }))
    }

    async fn discover_devices(
        &self,
        _: Request<v1::DiscoverDevicesRequest>,
    ) -> RpcResult<v1::DiscoverDevicesResponse> {
        Ok(Response::new(v1::DiscoverDevicesResponse { devices: self.discovery.devices().await? }))
    }
}

fn name(volume: &str) -> Result<VolumeName, NodeError> {
    Ok(VolumeName::new(volume)?)
}

impl NodeService {
    async fn check_disk(&self, disk: PathBuf, uuid: String) -> Result<(), NodeError> {
        let disks = Arc::clone(&self.disks);
        blocking(move || disks.check(&disk, &uuid)).await
    }

    /// Returns the disk and the replica that a request is about.
    fn place(
        &self,
        disk_path: String,
        volume: &str,
        replica_id: &str,
    ) -> Result<(PathBuf, InstanceId), NodeError> {
        let id = InstanceId::Replica(name(volume)?, replica_id.parse()?);
        let disk = absolute(disk_path.into()).map_err(NodeError::Invalid)?;
        if !self.disks.has(&disk) {
            return Err(unknown_disk(&disk));
        }
        Ok((disk, id))
    }
}

/// Refuses to make an empty directory for a replica whose data is in the trash.
fn refuse_trashed(disk: &Path, id: &InstanceId) -> Result<(), NodeError> {
    let directory = directory_of(disk, id);
    let is_there = directory.try_exists().map_err(NodeError::at(&directory))?;
    if is_there || !trash::has(disk, id)? {
        return Ok(());
    }
    Err(NodeError::Precondition(format!(
        "the data of the {id} is in the trash of {}: restore it with shorthornctl volume undelete",
        disk.display()
    )))
}

fn unknown_disk(disk: &Path) -> NodeError {
    NodeError::NotFound(format!("{} is not a disk of this node: add it first", disk.display()))
}

/// Sends a watcher the current instances, and then the changes, until it ends or has fallen too far behind.
async fn forward(watch: InstanceWatch, sender: &mpsc::Sender<Result<v1::InstanceEvent, Status>>) {
    let InstanceWatch { now, mut changes } = watch;
    let event =
        |r#type: v1::instance_event::Type, instance| v1::InstanceEvent { r#type: r#type.into(), instance };
    for instance in now {
        if sender.send(Ok(event(v1::instance_event::Type::Set, Some(instance)))).await.is_err() {
            return;
        }
    }
    if sender.send(Ok(event(v1::instance_event::Type::Synced, None))).await.is_err() {
        return;
    }
    loop {
        let next = match changes.recv().await {
            Ok(change) => Ok(change),
            Err(broadcast::error::RecvError::Closed) => return,
            Err(broadcast::error::RecvError::Lagged(missed)) => {
                Err(Status::resource_exhausted(format!("{missed} events were missed: watch again")))
            }
        };
        let last = next.is_err();
        if sender.send(next).await.is_err() || last {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn change(name: &str) -> v1::InstanceEvent {
        let instance = v1::Instance { name: name.into(), ..v1::Instance::default() };
        v1::InstanceEvent { r#type: v1::instance_event::Type::Set.into(), instance: Some(instance) }
    }

    #[tokio::test]
    async fn a_slow_watcher_is_cut_off() {
        let (changes, changed) = broadcast::channel(2);
        let (sender, mut events) = mpsc::channel(16);
        for name in ["a", "b", "c"] {
            changes.send(change(name)).unwrap();
        }
        forward(InstanceWatch { now: Vec::new(), changes: changed }, &sender).await;
        let synced = events.recv().await.unwrap().unwrap();
        assert_eq!(synced.r#type(), v1::instance_event::Type::Synced);
        let cut_off = events.recv().await.unwrap().unwrap_err();
        assert_eq!(cut_off.code(), tonic::Code::ResourceExhausted);
        drop(sender);
        assert!(events.recv().await.is_none());
    }
}
