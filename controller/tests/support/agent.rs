//! An agent in memory that implements node.proto like a real one, and checks the calls of the controller.

use std::collections::{BTreeMap, BTreeSet};
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard};

use shorthorn_api::v1;
use shorthorn_api::v1::instance_event::Type;
use shorthorn_api::v1::node_server::{Node, NodeServer};
use shorthorn_types::status::{EnginePhase, MemberMode};
use tokio::net::UnixListener;
use tokio::sync::{broadcast, mpsc};
use tokio_stream::StreamExt;
use tokio_stream::wrappers::{ReceiverStream, UnixListenerStream};
use tonic::transport::Server;
use tonic::{Request, Response, Status};

type Key = (i32, String);

/// The common state of all agents of a cluster: the truth that the controller must respect.
#[derive(Debug, Default)]
pub struct Truth {
    /// The newest attachment that was started, by volume, with the node and the replicas it was started on.
    attaches: BTreeMap<String, (u64, String, Vec<String>)>,
    /// Replicas that an engine has used: their directories must never be made anew.
    used: BTreeSet<String>,
    /// Forbidden actions of the controller.
    pub violations: Vec<String>,
    /// Every grant that an engine has got, in order.
    pub grants: Vec<v1::View>,
}

#[derive(Debug, Default)]
struct State {
    instances: BTreeMap<Key, v1::Instance>,
    directories: BTreeSet<String>,
    disks: BTreeSet<String>,
    /// The reason why disks cannot be removed; none if they can.
    keeps_disks: Option<String>,
    in_use: Option<String>,
    /// The reason why existing devices cannot be resized.
    keeps_size: Option<String>,
    starts: u32,
    limits: Option<v1::RebuildLimits>,
    trash: Vec<v1::TrashedReplica>,
    /// The committed view of each directory.
    views: BTreeMap<String, v1::View>,
}

/// An action that happens once.
struct Meanwhile(Pin<Box<dyn Future<Output = ()> + Send>>);

impl std::fmt::Debug for Meanwhile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Meanwhile")
    }
}

/// An agent; clones share it.
#[derive(Clone, Debug)]
pub struct FakeAgent {
    pub name: String,
    state: Arc<Mutex<State>>,
    truth: Arc<Mutex<Truth>>,
    /// Shared: the channel has room for all of them at once, and a benchmark has thousands of agents.
    events: broadcast::Sender<Arc<v1::InstanceEvent>>,
    /// Actions to do once, within the next call of that name, before anything else.
    before: Arc<Mutex<BTreeMap<&'static str, Meanwhile>>>,
    /// Connections that were opened since it last hung up.
    open: Arc<Mutex<Vec<OwnedFd>>>,
}

impl FakeAgent {
    pub fn new(name: &str, truth: Arc<Mutex<Truth>>) -> FakeAgent {
        FakeAgent {
            name: name.to_owned(),
            state: Arc::default(),
            truth,
            events: broadcast::Sender::new(1024),
            before: Arc::default(),
            open: Arc::default(),
        }
    }

    /// Does `work` while the agent has the next call of that name.
    pub fn meanwhile(&self, call: &'static str, work: impl Future<Output = ()> + Send + 'static) {
        self.before.lock().unwrap().insert(call, Meanwhile(Box::pin(work)));
    }

    async fn has(&self, call: &'static str) {
        let meanwhile = self.before.lock().unwrap().remove(call);
        if let Some(Meanwhile(work)) = meanwhile {
            work.await;
        }
    }

    /// Moves the directory of a replica to the trash, as by an earlier call.
    pub fn trash(&self, trashed: v1::TrashedReplica) {
        let mut state = self.state();
        let name = format!("{}-{}", trashed.volume, trashed.replica_id);
        state.directories.remove(&name);
        state.trash.retain(|other| !other.restored || other.replica_id != trashed.replica_id);
        state.trash.push(trashed);
    }

    /// No disk can be removed from now on; none: each can.
    pub fn keep_disks(&self, reason: Option<&str>) {
        self.state().keeps_disks = reason.map(str::to_owned);
    }

    /// When what is in the trash was deleted.
    pub fn trashed(&self) -> Vec<u64> {
        self.state().trash.iter().map(|trashed| trashed.deleted_ms).collect()
    }

    /// Serves until the returned task is aborted; the state outlives that.
    pub fn serve(&self, socket: &Path) -> tokio::task::JoinHandle<()> {
        let _ = std::fs::remove_file(socket);
        let listener = UnixListener::bind(socket).unwrap();
        let service = NodeServer::new(self.clone());
        let open = Arc::clone(&self.open);
        let incoming = UnixListenerStream::new(listener).map(move |accepted| {
            accepted.inspect(|socket| {
                open.lock().unwrap().push(socket.as_fd().try_clone_to_owned().unwrap());
            })
        });
        let server = Server::builder().add_service(service).serve_with_incoming(incoming);
        tokio::spawn(async move { server.await.unwrap() })
    }

    /// Closes all connections.
    pub fn hang_up(&self) {
        for socket in self.open.lock().unwrap().drain(..) {
            // A client that has disconnected needs no message.
            let _ = UnixStream::from(socket).shutdown(Shutdown::Both);
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    fn violation(&self, text: String) {
        self.truth.lock().unwrap().violations.push(format!("{}: {text}", self.name));
    }

    fn check_disk(&self, path: &str, uuid: &str) {
        if uuid != disk(path, &BTreeSet::new()).uuid {
            self.violation(format!("disk {path} is called {uuid:?}"));
        }
    }

    /// Returns the names of running instances.
    pub fn running(&self) -> Vec<String> {
        self.state().instances.keys().map(|(_, name)| name.clone()).collect()
    }

    pub fn directories(&self) -> BTreeSet<String> {
        self.state().directories.clone()
    }

    /// Returns the number of processes that were ever started.
    pub fn starts(&self) -> u32 {
        self.state().starts
    }

    /// Has the device of every engine be in use, or no longer.
    pub fn set_in_use(&self, by: Option<&str>) {
        self.state().in_use = by.map(ToOwned::to_owned);
    }

    /// Keeps the size of existing devices from now on.
    pub fn keep_device_size(&self, why: &str) {
        self.state().keeps_size = Some(why.to_owned());
    }

    /// Returns the size of the device of a volume.
    pub fn engine_size(&self, volume: &str) -> u64 {
        let key = (v1::InstanceKind::Engine.into(), volume.to_owned());
        match &self.state().instances[&key].detail {
            Some(v1::instance::Detail::Engine(engine)) => engine.size_bytes,
            _ => unreachable!(),
        }
    }

    /// Reports that this replica has left the view of the engine.
    pub fn fail_member(&self, volume: &str, replica_id: &str) {
        let key = (v1::InstanceKind::Engine.into(), volume.to_owned());
        let mut state = self.state();
        let instance = state.instances.get_mut(&key).unwrap();
        let Some(v1::instance::Detail::Engine(engine)) = &mut instance.detail else { unreachable!() };
        let member = engine.members.iter_mut().find(|member| member.replica_id == replica_id).unwrap();
        member.report_mode(MemberMode::Failed);
        member.message = "connection reset".to_owned();
        let changed = instance.clone();
        self.send(Type::Set, changed);
    }

    /// Changes the status of the engine of `volume`.
    pub fn engine(&self, volume: &str, change: impl FnOnce(&mut v1::EngineStatus)) {
        let key = (v1::InstanceKind::Engine.into(), volume.to_owned());
        let mut state = self.state();
        let instance = state.instances.get_mut(&key).unwrap();
        let Some(v1::instance::Detail::Engine(engine)) = &mut instance.detail else { unreachable!() };
        change(engine);
        let changed = instance.clone();
        self.send(Type::Set, changed);
    }

    /// Returns the status of the engine of `volume`.
    pub fn engine_says(&self, volume: &str) -> v1::EngineStatus {
        let key = (v1::InstanceKind::Engine.into(), volume.to_owned());
        let state = self.state();
        let Some(v1::instance::Detail::Engine(engine)) = &state.instances[&key].detail else {
            unreachable!()
        };
        engine.clone()
    }

    /// Freezes the engine, which has lost `lost` and has half of its view left: it waits for the arbiter.
    pub fn freeze(&self, volume: &str, lost: &str) {
        self.engine(volume, |engine| {
            let view = |number, ids: Vec<String>| v1::View {
                attach: engine.attach,
                restart: 1,
                nonce: 0,
                number,
                members: ids,
            };
            let all: Vec<String> = engine.members.iter().map(|member| member.replica_id.clone()).collect();
            let left = all.iter().filter(|id| *id != lost).cloned().collect();
            engine.grant_wanted = Some(v1::GrantWanted {
                view: Some(view(2, left)),
                committed: Some(view(1, all.clone())),
                ..v1::GrantWanted::default()
            });
            engine.report_phase(EnginePhase::Frozen);
            for member in engine.members.iter_mut().filter(|member| member.replica_id == lost) {
                member.report_mode(MemberMode::Failed);
                member.message = "no answer".to_owned();
            }
        });
    }

    /// Returns the volumes whose engines here rebuild a replica.
    pub fn rebuilding(&self) -> Vec<String> {
        let state = self.state();
        let engines = state.instances.iter().filter_map(|((_, name), instance)| match &instance.detail {
            Some(v1::instance::Detail::Engine(engine)) => Some((name, engine)),
            _ => None,
        });
        let rebuilding = engines.filter(|(_, engine)| {
            engine.members.iter().any(|member| member.known_mode() == MemberMode::Rebuilding)
        });
        rebuilding.map(|(name, _)| name.clone()).collect()
    }

    /// Sets the rest of the rebuilds of the engine of `volume`, if it runs here.
    pub fn show_progress(&self, volume: &str, left_bytes: u64) {
        let key = (v1::InstanceKind::Engine.into(), volume.to_owned());
        let mut state = self.state();
        let Some(instance) = state.instances.get_mut(&key) else { return };
        let Some(v1::instance::Detail::Engine(engine)) = &mut instance.detail else { return };
        for copy in engine.members.iter_mut().filter_map(|member| member.copy.as_mut()) {
            copy.left_bytes = left_bytes;
        }
        let changed = instance.clone();
        self.send(Type::Set, changed);
    }

    /// Restarts the node: every process is gone, every directory stays.
    pub fn reboot(&self) {
        let gone = std::mem::take(&mut self.state().instances);
        for instance in gone.into_values() {
            self.send(Type::Gone, instance);
        }
    }

    /// Loses a directory.
    pub fn lose_directory(&self, name: &str) {
        assert!(self.state().directories.remove(name), "{name} is not there");
    }

    /// Adds an unknown directory to the disk.
    pub fn leave_over(&self, name: &str) {
        self.state().directories.insert(name.to_owned());
    }

    /// Sets the committed view in the directory of a replica.
    pub fn set_view(&self, name: &str, view: v1::View) {
        self.state().views.insert(name.to_owned(), view);
    }

    pub fn view(&self, name: &str) -> Option<v1::View> {
        self.state().views.get(name).cloned()
    }

    pub fn limits(&self) -> Option<v1::RebuildLimits> {
        self.state().limits
    }

    /// Gives an order to the engine of that attachment, 0 being any.
    fn told(
        &self,
        volume: &str,
        attach: u64,
        change: impl FnOnce(&mut v1::EngineStatus),
    ) -> Result<(), Status> {
        let key = (v1::InstanceKind::Engine.into(), volume.to_owned());
        match self.state().instances.get(&key).and_then(|instance| instance.detail.as_ref()) {
            Some(v1::instance::Detail::Engine(engine)) if attach == 0 || engine.attach == attach => {}
            _ => return Err(Status::failed_precondition("no such engine")),
        }
        self.engine(volume, change);
        Ok(())
    }

    fn send(&self, kind: Type, instance: v1::Instance) {
        let event = v1::InstanceEvent { r#type: kind.into(), instance: Some(instance) };
        // Nothing has to watch it.
        let _ = self.events.send(Arc::new(event));
    }

    /// Starts an instance like a real agent: first it is starting, and a little later it runs.
    fn start(&self, state: &mut State, instance: v1::Instance) -> v1::Instance {
        let key = (instance.kind, instance.name.clone());
        if let Some(there) = state.instances.get(&key) {
            return there.clone();
        }
        state.starts += 1;
        let starting = v1::Instance { state: v1::InstanceState::Starting.into(), ..instance.clone() };
        state.instances.insert(key, instance.clone());
        self.send(Type::Set, starting.clone());
        self.send(Type::Set, instance);
        starting
    }
}

fn disk(path: &str, replicas: &BTreeSet<String>) -> v1::Disk {
    v1::Disk {
        path: path.to_owned(),
        uuid: format!("uuid-of-{path}"),
        filesystem: "ext4".to_owned(),
        total_bytes: 100 << 30,
        available_bytes: 80 << 30,
        problem: String::new(),
        replicas: replicas.iter().cloned().collect(),
        trash_bytes: 0,
    }
}

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
            frontends: vec![v1::FrontendInfo {
                name: "ublk".to_owned(),
                usable: true,
                reason: String::new(),
            }],
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
            return Err(Status::invalid_argument(format!("{} is no disk", request.disk_path)));
        }
        if !state.directories.contains(&name) {
            if state.trash.iter().any(|trashed| name.ends_with(&trashed.replica_id)) {
                self.violation(format!("{name} is started, and its data is in the trash"));
            }
            if !request.create {
                return Err(Status::not_found(format!("the directory of {name} is missing")));
            }
            if used {
                self.violation(format!("the used replica {name} is made anew, empty"));
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
            frontend: "ublk".to_owned(),
            endpoint: format!("/dev/longhorn/{}", request.volume),
            size_bytes: request.size_bytes,
            attach: request.attach,
            ..v1::EngineStatus::default()
        }
        .with_phase(EnginePhase::Serving);
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
        self.told(&request.volume, request.attach, |engine| {
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
        self.told(&request.volume, request.attach, |engine| {
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
        _: Request<v1::UpgradeEngineRequest>,
    ) -> Result<Response<v1::UpgradeEngineResponse>, Status> {
        Ok(Response::new(v1::UpgradeEngineResponse { pause_ms: 42, old_pid: 2, new_pid: 3 }))
    }

    async fn scrub(&self, request: Request<v1::ScrubRequest>) -> Result<Response<v1::ScrubResponse>, Status> {
        let request = request.into_inner();
        self.told(&request.volume, 0, |engine| {
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
        self.told(&request.volume, request.attach, |engine| match keeps_size {
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
            generation: "1.1".to_owned(),
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
        let devices = vec![device("sda", "it has a signature: dos"), device("sdb", "")];
        Ok(Response::new(v1::DiscoverDevicesResponse { devices }))
    }
}
