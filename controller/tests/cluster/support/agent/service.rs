//! The interface of an agent for the controller.

use shorthorn_api::v1;
use shorthorn_api::v1::instance_event::Type;
use shorthorn_api::v1::node_server::Node;
use shorthorn_api::{nonempty, nonzero};
use shorthorn_controller_core::objects::RebuildLimits;
use shorthorn_controller_core::observed::{Detail, InstanceKey, InstanceKind};
use shorthorn_controller_core::{AgentCall, StartEngine, StartReplica};
use shorthorn_types::status::{CopyStatus, EnginePhase, ExpansionStatus, Frontend, MemberMode, ScrubStatus};
use shorthorn_types::{Generation, Members, ReplicaId, SECRET_BYTES, Secret, View, ViewId};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};

use super::messages::{self, parsed, targets};
use super::simulated::status_of;
use super::{FakeAgent, disk, engine_key, replica_key};

/// A secret that the rules of an agent do not look at.
const SECRET: Secret = Secret::new([0; SECRET_BYTES]);

#[tonic::async_trait]
impl Node for FakeAgent {
    type WatchInstancesStream = ReceiverStream<Result<v1::InstanceEvent, Status>>;

    async fn get_node(&self, _: Request<v1::GetNodeRequest>) -> Result<Response<v1::NodeInfo>, Status> {
        Ok(Response::new(v1::NodeInfo {
            name: self.name.clone(),
            version: "0.0.1".to_owned(),
            data_address: "127.0.0.1".to_owned(),
            zone: String::new(),
            max_volumes: 0,
            cluster: String::new(),
            warnings: Vec::new(),
            feature_level: shorthorn_api::level::NEWEST,
            dead_mounts: Vec::new(),
            frontends: vec![
                v1::FrontendInfo { usable: true, ..v1::FrontendInfo::default() }
                    .with_frontend(Frontend::Ublk),
            ],
        }))
    }

    async fn release_node(
        &self,
        _: Request<v1::ReleaseNodeRequest>,
    ) -> Result<Response<v1::ReleaseNodeResponse>, Status> {
        Ok(Response::new(v1::ReleaseNodeResponse {}))
    }

    async fn list_instances(
        &self,
        _: Request<v1::ListInstancesRequest>,
    ) -> Result<Response<v1::ListInstancesResponse>, Status> {
        let state = self.state();
        let all = state.agent.instances.iter();
        let instances = all.map(|(key, instance)| messages::instance(key, instance)).collect();
        Ok(Response::new(v1::ListInstancesResponse { instances }))
    }

    async fn start_replica(
        &self,
        request: Request<v1::StartReplicaRequest>,
    ) -> Result<Response<v1::Instance>, Status> {
        let request = request.into_inner();
        self.check_disk(&request.disk_path, &request.disk_uuid);
        let name = format!("{}-{}", request.volume, request.replica_id);
        if request.secret.len() != SECRET_BYTES || request.first_members.is_empty() {
            self.violation(format!("replica {name} gets a bad secret or first view"));
        }
        let used = self.truth.lock().unwrap().used.contains(&name);
        let directory = format!("{}/replicas/{name}", request.disk_path);
        let start = StartReplica {
            volume: parsed(&request.volume),
            replica_id: parsed(&request.replica_id),
            disk_path: request.disk_path,
            disk_uuid: nonempty(request.disk_uuid),
            size_bytes: request.size_bytes,
            first_members: request.first_members.iter().map(|id| parsed(id)).collect(),
            secret: SECRET,
            create: request.create,
            rebind: request.rebind,
            encrypt_in_transit: request.encrypt_in_transit,
        };
        let mut state = self.state();
        if !state.disks.contains(&start.disk_path) {
            return Err(Status::invalid_argument(format!("{} is not a disk", start.disk_path)));
        }
        if !state.agent.directories.contains(&name) {
            if state.trash.iter().any(|trashed| name.ends_with(&trashed.replica_id)) {
                self.violation(format!("{name} is started, and its data is in the trash"));
            }
            if start.create && used {
                self.violation(format!("the used replica {name} is recreated, empty"));
            }
        }
        self.start(&mut state, &AgentCall::StartReplica(start), |detail| {
            if let Detail::Replica(replica) = detail {
                replica.addresses = vec![format!("unix:/run/{name}.sock"), "tcp:127.0.0.1:7000".to_owned()];
                (replica.allocated_bytes, replica.directory) = (4096, Some(directory));
            }
        })
    }

    async fn start_engine(
        &self,
        request: Request<v1::StartEngineRequest>,
    ) -> Result<Response<v1::Instance>, Status> {
        let request = request.into_inner();
        let (attach, replicas) = (request.attach, targets(&request.replicas));
        let members = Members::new(replicas.keys().copied()).unwrap();
        let view = View { id: ViewId { generation: Generation::new(attach, 1), number: 1 }, members };
        {
            let mut truth = self.truth.lock().unwrap();
            let newest = truth.attaches.get(&request.volume).cloned().unwrap_or_default();
            if attach < newest.0 || (attach == newest.0 && newest.1 != self.name) {
                let text = format!("{}: engine {attach} with {members} after {newest:?}", self.name);
                truth.violations.push(text);
            }
            truth.attaches.insert(request.volume.clone(), (attach, self.name.clone()));
            truth.used.extend(replicas.keys().map(|id| format!("{}-{id}", request.volume)));
            truth.views.commit(&request.volume, view);
        }
        let start = StartEngine {
            volume: parsed(&request.volume),
            size_bytes: request.size_bytes,
            attach,
            replicas: replicas.clone(),
            frontend: Frontend::Ublk,
            secret: SECRET,
            granted: None,
            rebuild: RebuildLimits::default(),
            revision: request.revision,
            continues: nonzero(request.continues),
            verify_reads: request.verify_reads,
            encrypt_in_transit: request.encrypt_in_transit,
        };
        self.start(&mut self.state(), &AgentCall::StartEngine(start), |detail| {
            let Detail::Engine(engine) = detail else { return };
            let status = status_of(engine);
            (status.generation, status.view) = (view.id.generation, Some(view));
            for member in &mut status.members {
                member.mode = MemberMode::Member;
                member.address.clone_from(&replicas[&member.replica].addresses[0]);
            }
            status.phase = EnginePhase::Serving;
            status.frontend = Some(Frontend::Ublk);
            status.endpoint = Some(format!("/dev/longhorn/{}", request.volume).into());
        })
    }

    async fn stop_instance(
        &self,
        request: Request<v1::StopInstanceRequest>,
    ) -> Result<Response<v1::StopInstanceResponse>, Status> {
        self.has("StopInstance").await;
        let request = request.into_inner();
        let kind = match request.kind() {
            v1::InstanceKind::Engine => InstanceKind::Engine,
            v1::InstanceKind::Replica | v1::InstanceKind::Unspecified => InstanceKind::Replica,
        };
        let instance = InstanceKey { kind, name: request.name };
        let attach = nonzero(request.attach);
        let call = match request.force {
            true => AgentCall::ForceStopEngine { volume: parsed(&instance.name), attach },
            false => AgentCall::StopInstance { instance, attach },
        };
        self.call(&mut self.state(), &call)?;
        Ok(Response::new(v1::StopInstanceResponse {}))
    }

    async fn grant(&self, request: Request<v1::GrantRequest>) -> Result<Response<v1::GrantResponse>, Status> {
        let request = request.into_inner();
        let view = View::try_from(request.view.unwrap()).unwrap();
        self.truth.lock().unwrap().grants.push(view);
        let (volume, attach, view) = (parsed(&request.volume), request.attach, Box::new(view));
        self.call(&mut self.state(), &AgentCall::Grant { volume, attach, view })?;
        Ok(Response::new(v1::GrantResponse {}))
    }

    async fn update_replicas(
        &self,
        request: Request<v1::UpdateReplicasRequest>,
    ) -> Result<Response<v1::UpdateReplicasResponse>, Status> {
        let v1::UpdateReplicasRequest { volume, attach, replicas, revision } = request.into_inner();
        let replicas = targets(&replicas);
        self.truth.lock().unwrap().used.extend(replicas.keys().map(|id| format!("{volume}-{id}")));
        let mut state = self.state();
        let call = AgentCall::UpdateReplicas { volume: parsed(&volume), attach, replicas, revision };
        self.call(&mut state, &call)?;
        self.order_engine(&mut state, &volume, attach, |engine| {
            let members = status_of(engine).members.iter_mut();
            for member in members.filter(|member| member.mode == MemberMode::Connecting) {
                member.mode = MemberMode::Rebuilding;
                member.copy = Some(CopyStatus { total_bytes: 1000, left_bytes: 250, bytes_per_s: 10 });
            }
        })?;
        Ok(Response::new(v1::UpdateReplicasResponse {}))
    }

    async fn upgrade_engine(
        &self,
        request: Request<v1::UpgradeEngineRequest>,
    ) -> Result<Response<v1::UpgradeEngineResponse>, Status> {
        let v1::UpgradeEngineRequest { volume, attach, only_outdated } = request.into_inner();
        let failure = self.state().fails_upgrades.pop_front();
        if let Some((code, is_before)) = failure.filter(|(_, is_before)| *is_before) {
            return Err(Status::new(code, format!("before: {is_before}")));
        }
        let mut already_current = false;
        self.order_engine(&mut self.state(), &volume, attach, |engine| {
            already_current = only_outdated && engine.needs_upgrade == Some(false);
            engine.needs_upgrade = Some(false);
        })?;
        self.state().upgrades += u32::from(!already_current);
        if let Some((code, _)) = failure {
            return Err(Status::new(code, "the agent has died"));
        }
        let (pause_ms, new_pid) = if already_current { (0, 2) } else { (42, 3) };
        Ok(Response::new(v1::UpgradeEngineResponse { pause_ms, old_pid: 2, new_pid, already_current }))
    }

    async fn scrub(&self, request: Request<v1::ScrubRequest>) -> Result<Response<v1::ScrubResponse>, Status> {
        let request = request.into_inner();
        self.order_engine(&mut self.state(), &request.volume, 0, |engine| {
            let scrub = ScrubStatus { running: !request.stop, ..ScrubStatus::default() };
            status_of(engine).scrub = Some(scrub);
        })?;
        Ok(Response::new(v1::ScrubResponse {}))
    }

    async fn set_rebuild_limits(
        &self,
        request: Request<v1::SetRebuildLimitsRequest>,
    ) -> Result<Response<v1::SetRebuildLimitsResponse>, Status> {
        let request = request.into_inner();
        self.state().limits = request.limits;
        Ok(Response::new(v1::SetRebuildLimitsResponse {}))
    }

    async fn fence_replica(
        &self,
        request: Request<v1::FenceReplicaRequest>,
    ) -> Result<Response<v1::FenceReplicaResponse>, Status> {
        let request = request.into_inner();
        let (volume, replica_id) = (parsed(&request.volume), parsed(&request.replica_id));
        let call = AgentCall::FenceReplica { volume, replica_id, attach: request.attach };
        self.call(&mut self.state(), &call)?;
        Ok(Response::new(v1::FenceReplicaResponse {}))
    }

    async fn expand_engine(
        &self,
        request: Request<v1::ExpandEngineRequest>,
    ) -> Result<Response<v1::ExpandEngineResponse>, Status> {
        let v1::ExpandEngineRequest { volume, attach, size_bytes } = request.into_inner();
        let mut state = self.state();
        let call = AgentCall::ExpandEngine { volume: parsed(&volume), attach, size_bytes };
        self.call(&mut state, &call)?;
        let keeps_size = state.keeps_size.clone();
        self.order_engine(&mut state, &volume, attach, |engine| match keeps_size {
            None => engine.size_bytes = Some(size_bytes),
            message => {
                let expansion = ExpansionStatus { size_bytes, message, next_attach: true };
                status_of(engine).expansion = Some(expansion);
            }
        })?;
        Ok(Response::new(v1::ExpandEngineResponse {}))
    }

    async fn inspect_replica(
        &self,
        request: Request<v1::InspectReplicaRequest>,
    ) -> Result<Response<v1::ReplicaInspection>, Status> {
        let request = request.into_inner();
        let name = format!("{}-{}", request.volume, request.replica_id);
        let state = self.state();
        let is_there = state.agent.directories.contains(&name);
        Ok(Response::new(v1::ReplicaInspection {
            directory: format!("{}/replicas/{name}", request.disk_path),
            missing: !is_there,
            usable: is_there,
            running: state.agent.instances.contains_key(&replica_key(&name)),
            generation: Some(v1::Generation { attach: 1, restart: 1, nonce: 0 }),
            committed: state.inspected.get(&name).cloned(),
            ..v1::ReplicaInspection::default()
        }))
    }

    async fn salvage_replica(
        &self,
        request: Request<v1::SalvageReplicaRequest>,
    ) -> Result<Response<v1::SalvageReplicaResponse>, Status> {
        let request = request.into_inner();
        self.check_disk(&request.disk_path, &request.disk_uuid);
        let name = format!("{}-{}", request.volume, request.replica_id);
        let call = AgentCall::SalvageReplica {
            disk_path: request.disk_path,
            disk_uuid: nonempty(request.disk_uuid),
            volume: parsed(&request.volume),
            replica_id: parsed(&request.replica_id),
            attach: request.attach,
        };
        let mut state = self.state();
        self.call(&mut state, &call)?;
        let view =
            v1::View { attach: request.attach, members: vec![request.replica_id], ..v1::View::default() };
        state.inspected.insert(name, view);
        Ok(Response::new(v1::SalvageReplicaResponse {}))
    }

    async fn watch_instances(
        &self,
        _: Request<v1::WatchInstancesRequest>,
    ) -> Result<Response<Self::WatchInstancesStream>, Status> {
        let (sender, receiver) = mpsc::channel(64);
        // Both under the lock: nothing is missed in between.
        let (now, mut events) = {
            let state = self.state();
            let all = state.agent.instances.iter();
            let all: Vec<_> = all.map(|(key, instance)| messages::instance(key, instance)).collect();
            (all, self.events.subscribe())
        };
        tokio::spawn(async move {
            let set = |instance| v1::InstanceEvent { r#type: Type::Set.into(), instance: Some(instance) };
            let synced = v1::InstanceEvent { r#type: Type::Synced.into(), instance: None };
            for event in now.into_iter().map(set).chain([synced]) {
                if sender.send(Ok(event)).await.is_err() {
                    return;
                }
            }
            while let Ok(event) = events.recv().await {
                if sender.send(Ok((*event).clone())).await.is_err() {
                    return;
                }
            }
        });
        Ok(Response::new(ReceiverStream::new(receiver)))
    }

    async fn list_disks(
        &self,
        _: Request<v1::ListDisksRequest>,
    ) -> Result<Response<v1::ListDisksResponse>, Status> {
        let state = self.state();
        let disks = state.disks.iter().map(|path| disk(path, &state.agent.directories)).collect();
        Ok(Response::new(v1::ListDisksResponse { disks }))
    }

    async fn add_disk(&self, request: Request<v1::AddDiskRequest>) -> Result<Response<v1::Disk>, Status> {
        let path = request.into_inner().path;
        if path.starts_with("/tmpfs") {
            return Err(Status::failed_precondition(format!("{path} is on tmpfs: use a disk")));
        }
        let mut state = self.state();
        state.disks.insert(path.clone());
        Ok(Response::new(disk(&path, &state.agent.directories)))
    }

    async fn remove_disk(
        &self,
        request: Request<v1::RemoveDiskRequest>,
    ) -> Result<Response<v1::RemoveDiskResponse>, Status> {
        let mut state = self.state();
        if let Some(reason) = &state.keeps_disks {
            return Err(Status::failed_precondition(reason.clone()));
        }
        state.disks.remove(&request.into_inner().path);
        Ok(Response::new(v1::RemoveDiskResponse {}))
    }

    async fn delete_replica(
        &self,
        request: Request<v1::DeleteReplicaRequest>,
    ) -> Result<Response<v1::DeleteReplicaResponse>, Status> {
        let request = request.into_inner();
        self.check_disk(&request.disk_path, &request.disk_uuid);
        let name = format!("{}-{}", request.volume, request.replica_id);
        let mut state = self.state();
        if state.agent.instances.contains_key(&replica_key(&name)) {
            self.violation(format!("the running replica {name} is deleted"));
        }
        let replica_id: ReplicaId = parsed(&request.replica_id);
        let engine = state.agent.instances.get(&engine_key(&request.volume));
        if let Some(Detail::Engine(engine)) = engine.map(|instance| &instance.detail)
            && engine.reported.as_ref().is_some_and(|status| status.member(replica_id).is_some())
        {
            self.violation(format!("the replica {name} is deleted, and its engine knows it"));
        }
        let was_there = state.agent.directories.contains(&name);
        let call = AgentCall::DeleteReplica {
            disk_path: request.disk_path.clone(),
            disk_uuid: nonempty(request.disk_uuid.clone()),
            volume: parsed(&request.volume),
            replica_id,
            record: request.record.clone(),
        };
        self.call(&mut state, &call)?;
        if was_there {
            let trashed = v1::TrashedReplica {
                disk_path: request.disk_path,
                disk_uuid: request.disk_uuid,
                volume: request.volume,
                replica_id: request.replica_id,
                deleted_ms: u64::try_from(state.trash.len()).unwrap() + 1,
                record: request.record,
                ..v1::TrashedReplica::default()
            };
            state.trash.push(trashed);
        }
        Ok(Response::new(v1::DeleteReplicaResponse {}))
    }

    async fn list_trash(
        &self,
        _: Request<v1::ListTrashRequest>,
    ) -> Result<Response<v1::ListTrashResponse>, Status> {
        Ok(Response::new(v1::ListTrashResponse {
            replicas: self.state().trash.clone(),
            problems: Vec::new(),
        }))
    }

    async fn restore_replica(
        &self,
        request: Request<v1::RestoreReplicaRequest>,
    ) -> Result<Response<v1::RestoreReplicaResponse>, Status> {
        self.has("RestoreReplica").await;
        let request = request.into_inner();
        self.check_disk(&request.disk_path, &request.disk_uuid);
        let mut state = self.state();
        let is_it = |trashed: &v1::TrashedReplica| {
            trashed.replica_id == request.replica_id && trashed.deleted_ms == request.deleted_ms
        };
        let Some(at) = state.trash.iter().position(is_it) else { return Err(Status::not_found("gone")) };
        let name = format!("{}-{}", request.volume, request.replica_id);
        if !state.trash[at].restored && state.agent.directories.contains(&name) {
            return Err(Status::failed_precondition(format!("{name} is there already")));
        }
        state.trash[at].restored = true;
        state.agent.directories.insert(name);
        Ok(Response::new(v1::RestoreReplicaResponse {}))
    }

    async fn remove_trash(
        &self,
        request: Request<v1::RemoveTrashRequest>,
    ) -> Result<Response<v1::RemoveTrashResponse>, Status> {
        let request = request.into_inner();
        self.check_disk(&request.disk_path, &request.disk_uuid);
        self.state().trash.retain(|trashed| {
            trashed.replica_id != request.replica_id || trashed.deleted_ms != request.deleted_ms
        });
        Ok(Response::new(v1::RemoveTrashResponse {}))
    }

    async fn list_devices(
        &self,
        _: Request<v1::ListDevicesRequest>,
    ) -> Result<Response<v1::ListDevicesResponse>, Status> {
        Ok(Response::new(v1::ListDevicesResponse { devices: Vec::new() }))
    }

    async fn discover_devices(
        &self,
        _: Request<v1::DiscoverDevicesRequest>,
    ) -> Result<Response<v1::DiscoverDevicesResponse>, Status> {
        let device = |name: &str, obstacle: &str| v1::DiscoveredDevice {
            path: format!("/dev/{name}"),
            name: name.to_owned(),
            size_bytes: 8 << 30,
            fits: obstacle.is_empty(),
            obstacles: Some(obstacle.to_owned()).filter(|text| !text.is_empty()).into_iter().collect(),
            ..v1::DiscoveredDevice::default()
        };
        let devices = vec![device("sda", "the device has a signature: dos"), device("sdb", "")];
        Ok(Response::new(v1::DiscoverDevicesResponse { devices }))
    }
}
