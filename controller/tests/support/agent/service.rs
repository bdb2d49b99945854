//! The interface of an agent for the controller.

use shorthorn_api::v1;
use shorthorn_api::v1::instance_event::Type;
use shorthorn_api::v1::node_server::Node;
use shorthorn_types::status::{EnginePhase, Frontend, MemberMode};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};

use super::{FakeAgent, disk};

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
        let instances = self.state().instances.values().cloned().collect();
        Ok(Response::new(v1::ListInstancesResponse { instances }))
    }

    async fn start_replica(
        &self,
        request: Request<v1::StartReplicaRequest>,
    ) -> Result<Response<v1::Instance>, Status> {
        let request = request.into_inner();
        self.check_disk(&request.disk_path, &request.disk_uuid);
        let name = format!("{}-{}", request.volume, request.replica_id);
        if request.secret.len() != 32 || request.first_members.is_empty() {
            self.violation(format!("replica {name} gets a bad secret or first view"));
        }
        let used = self.truth.lock().unwrap().used.contains(&name);
        let mut state = self.state();
        if !state.disks.contains(&request.disk_path) {
            return Err(Status::invalid_argument(format!("{} is not a disk", request.disk_path)));
        }
        if !state.directories.contains(&name) {
            if state.trash.iter().any(|trashed| name.ends_with(&trashed.replica_id)) {
                self.violation(format!("{name} is started, and its data is in the trash"));
            }
            if !request.create {
                return Err(Status::not_found(format!("the directory of {name} is missing")));
            }
            if used {
                self.violation(format!("the used replica {name} is recreated, empty"));
            }
            state.directories.insert(name.clone());
        }
        let status = v1::ReplicaStatus {
            volume: request.volume,
            replica_id: request.replica_id,
            addresses: vec![format!("unix:/run/{name}.sock"), format!("tcp:127.0.0.1:{}", 7000)],
            size_bytes: request.size_bytes,
            allocated_bytes: 4096,
            directory: format!("{}/replicas/{name}", request.disk_path),
            ..v1::ReplicaStatus::default()
        };
        let instance = v1::Instance {
            kind: v1::InstanceKind::Replica.into(),
            name,
            state: v1::InstanceState::Running.into(),
            message: String::new(),
            pid: 1,
            detail: Some(v1::instance::Detail::Replica(status)),
        };
        Ok(Response::new(self.start(&mut state, instance)))
    }

    async fn start_engine(
        &self,
        request: Request<v1::StartEngineRequest>,
    ) -> Result<Response<v1::Instance>, Status> {
        let request = request.into_inner();
        let ids: Vec<String> = request.replicas.iter().map(|replica| replica.replica_id.clone()).collect();
        let this = (request.attach, self.name.clone(), ids.clone());
        {
            let mut truth = self.truth.lock().unwrap();
            let newest = truth.attaches.get(&request.volume).cloned().unwrap_or_default();
            if request.attach < newest.0 || (request.attach == newest.0 && newest.1 != this.1) {
                let text = format!("{}: engine {this:?} after {newest:?}", self.name);
                truth.violations.push(text);
            }
            truth.attaches.insert(request.volume.clone(), this);
            truth.used.extend(ids.iter().map(|id| format!("{}-{id}", request.volume)));
        }
        let mut state = self.state();
        let key = (v1::InstanceKind::Engine.into(), request.volume.clone());
        if let Some(v1::Instance { detail: Some(v1::instance::Detail::Engine(engine)), .. }) =
            state.instances.get(&key)
            && engine.attach != request.attach
        {
            return Err(Status::already_exists("another engine of this volume is there"));
        }
        let member = |replica: &v1::ReplicaAddress| {
            let (replica_id, address) = (replica.replica_id.clone(), replica.addresses[0].clone());
            let member = v1::EngineMember { replica_id, address, ..v1::EngineMember::default() };
            member.with_mode(MemberMode::Member)
        };
        let status = v1::EngineStatus {
            volume: request.volume.clone(),
            generation: Some(v1::Generation { attach: request.attach, restart: 1, nonce: 0 }),
            view: Some(v1::View {
                attach: request.attach,
                restart: 1,
                nonce: 0,
                number: 1,
                members: request.replicas.iter().map(|replica| replica.replica_id.clone()).collect(),
            }),
            members: request.replicas.iter().map(member).collect(),
            endpoint: format!("/dev/longhorn/{}", request.volume),
            size_bytes: request.size_bytes,
            attach: request.attach,
            ..v1::EngineStatus::default()
        }
        .with_phase(EnginePhase::Serving)
        .with_frontend(Frontend::Ublk);
        let instance = v1::Instance {
            kind: v1::InstanceKind::Engine.into(),
            name: request.volume,
            state: v1::InstanceState::Running.into(),
            message: String::new(),
            pid: 2,
            detail: Some(v1::instance::Detail::Engine(status)),
        };
        Ok(Response::new(self.start(&mut state, instance)))
    }

    async fn stop_instance(
        &self,
        request: Request<v1::StopInstanceRequest>,
    ) -> Result<Response<v1::StopInstanceResponse>, Status> {
        self.has("StopInstance").await;
        let request = request.into_inner();
        let mut state = self.state();
        let key = (request.kind, request.name.clone());
        if let Some(v1::Instance { detail: Some(v1::instance::Detail::Engine(engine)), .. }) =
            state.instances.get(&key)
        {
            if request.attach != 0 && engine.attach > request.attach {
                return Ok(Response::new(v1::StopInstanceResponse {}));
            }
            if let Some(by) = &state.in_use {
                return Err(Status::failed_precondition(format!("the device is in use by {by}")));
            }
        }
        if let Some(instance) = state.instances.remove(&key) {
            self.send(Type::Gone, instance);
        }
        Ok(Response::new(v1::StopInstanceResponse {}))
    }

    async fn grant(&self, request: Request<v1::GrantRequest>) -> Result<Response<v1::GrantResponse>, Status> {
        let request = request.into_inner();
        let view = request.view.unwrap();
        self.truth.lock().unwrap().grants.push(view.clone());
        self.order_engine(&request.volume, request.attach, |engine| {
            if engine.grant_wanted.as_ref().is_some_and(|wanted| wanted.view.as_ref() == Some(&view)) {
                engine.grant_wanted = None;
                engine.report_phase(EnginePhase::Serving);
            }
        })?;
        Ok(Response::new(v1::GrantResponse {}))
    }

    async fn update_replicas(
        &self,
        request: Request<v1::UpdateReplicasRequest>,
    ) -> Result<Response<v1::UpdateReplicasResponse>, Status> {
        let request = request.into_inner();
        let ids: Vec<String> = request.replicas.iter().map(|replica| replica.replica_id.clone()).collect();
        let names = ids.iter().map(|id| format!("{}-{id}", request.volume));
        self.truth.lock().unwrap().used.extend(names);
        self.order_engine(&request.volume, request.attach, |engine| {
            engine.members.retain(|member| {
                member.known_mode() == MemberMode::Member || ids.contains(&member.replica_id)
            });
            for replica in &request.replicas {
                if engine.members.iter().any(|member| member.replica_id == replica.replica_id) {
                    continue;
                }
                let copy = Some(v1::CopyStatus { total_bytes: 1000, left_bytes: 250, bytes_per_s: 10 });
                let replica_id = replica.replica_id.clone();
                let member = v1::EngineMember { replica_id, copy, ..v1::EngineMember::default() };
                engine.members.push(member.with_mode(MemberMode::Rebuilding));
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
        self.order_engine(&volume, attach, |engine| {
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
        self.order_engine(&request.volume, 0, |engine| {
            engine.scrub = Some(v1::ScrubStatus { running: !request.stop, ..v1::ScrubStatus::default() });
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
        let name = format!("{}-{}", request.volume, request.replica_id);
        // Every engine of this simulation commits this at its start.
        let newest = self.truth.lock().unwrap().attaches.get(&request.volume).cloned();
        let committed =
            newest.map(|(attach, _, members)| v1::View { attach, restart: 1, nonce: 0, number: 1, members });
        let mut state = self.state();
        let Some(instance) = state.instances.get_mut(&(v1::InstanceKind::Replica.into(), name.clone()))
        else {
            return Err(Status::failed_precondition(format!("{name} does not run here")));
        };
        if let Some(v1::instance::Detail::Replica(replica)) = &mut instance.detail {
            replica.generation = Some(v1::Generation { attach: request.attach, restart: 0, nonce: 0 });
            replica.committed = committed;
        }
        let changed = instance.clone();
        self.send(Type::Set, changed);
        Ok(Response::new(v1::FenceReplicaResponse {}))
    }

    async fn expand_engine(
        &self,
        request: Request<v1::ExpandEngineRequest>,
    ) -> Result<Response<v1::ExpandEngineResponse>, Status> {
        let request = request.into_inner();
        let keeps_size = self.state().keeps_size.clone();
        self.order_engine(&request.volume, request.attach, |engine| match keeps_size {
            None => engine.size_bytes = request.size_bytes,
            Some(message) => {
                let size_bytes = request.size_bytes;
                engine.expansion = Some(v1::Expansion { size_bytes, message, next_attach: true });
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
        let key = (v1::InstanceKind::Replica.into(), name.clone());
        Ok(Response::new(v1::ReplicaInspection {
            directory: format!("{}/replicas/{name}", request.disk_path),
            missing: !state.directories.contains(&name),
            usable: state.directories.contains(&name),
            running: state.instances.contains_key(&key),
            generation: Some(v1::Generation { attach: 1, restart: 1, nonce: 0 }),
            committed: state.views.get(&name).cloned(),
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
        let mut state = self.state();
        if state.instances.contains_key(&(v1::InstanceKind::Replica.into(), name.clone())) {
            return Err(Status::failed_precondition("the replica runs"));
        }
        let view =
            v1::View { attach: request.attach, members: vec![request.replica_id], ..v1::View::default() };
        state.views.insert(name, view);
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
            (state.instances.values().cloned().collect::<Vec<_>>(), self.events.subscribe())
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
        let disks = state.disks.iter().map(|path| disk(path, &state.directories)).collect();
        Ok(Response::new(v1::ListDisksResponse { disks }))
    }

    async fn add_disk(&self, request: Request<v1::AddDiskRequest>) -> Result<Response<v1::Disk>, Status> {
        let path = request.into_inner().path;
        if path.starts_with("/tmpfs") {
            return Err(Status::failed_precondition(format!("{path} is on tmpfs: use a disk")));
        }
        let mut state = self.state();
        state.disks.insert(path.clone());
        Ok(Response::new(disk(&path, &state.directories)))
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
        if state.instances.contains_key(&(v1::InstanceKind::Replica.into(), name.clone())) {
            self.violation(format!("the running replica {name} is deleted"));
            return Err(Status::failed_precondition("the replica runs"));
        }
        let key = (v1::InstanceKind::Engine.into(), request.volume.clone());
        if let Some(v1::instance::Detail::Engine(engine)) =
            state.instances.get(&key).and_then(|instance| instance.detail.as_ref())
            && engine.members.iter().any(|member| member.replica_id == request.replica_id)
        {
            self.violation(format!("the replica {name} is deleted, and its engine knows it"));
        }
        if state.directories.remove(&name) {
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
        if !state.trash[at].restored && state.directories.contains(&name) {
            return Err(Status::failed_precondition(format!("{name} is there already")));
        }
        state.trash[at].restored = true;
        state.directories.insert(name);
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
