//! An agent in memory: node.proto as a real agent keeps it, with checks of what the controller may ask for.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};

use shorthorn_proto::v1;
use shorthorn_proto::v1::instance_event::Type;
use shorthorn_proto::v1::node_server::{Node, NodeServer};
use tokio::net::UnixListener;
use tokio::sync::{broadcast, mpsc};
use tokio_stream::wrappers::{ReceiverStream, UnixListenerStream};
use tonic::transport::Server;
use tonic::{Request, Response, Status};

type Key = (i32, String);

/// What all agents of a cluster have in common: the truth that the controller must respect.
#[derive(Debug, Default)]
pub struct Truth {
    /// The newest attachment that was started, by volume, with the node and the replicas it was started on.
    attaches: BTreeMap<String, (u64, String, Vec<String>)>,
    /// Replicas that an engine has used: their directories must never be made anew.
    used: BTreeSet<String>,
    /// What the controller did that it must not do.
    pub violations: Vec<String>,
}

#[derive(Debug, Default)]
struct State {
    instances: BTreeMap<Key, v1::Instance>,
    directories: BTreeSet<String>,
    disks: BTreeSet<String>,
    in_use: Option<String>,
    starts: u32,
}

/// One agent; clones are the same.
#[derive(Clone, Debug)]
pub struct FakeAgent {
    pub name: String,
    state: Arc<Mutex<State>>,
    truth: Arc<Mutex<Truth>>,
    events: broadcast::Sender<v1::InstanceEvent>,
}

impl FakeAgent {
    pub fn new(name: &str, truth: Arc<Mutex<Truth>>) -> FakeAgent {
        FakeAgent {
            name: name.to_owned(),
            state: Arc::default(),
            truth,
            events: broadcast::Sender::new(1024),
        }
    }

    /// Serves until the returned task is aborted; the state outlives that.
    pub fn serve(&self, socket: &Path) -> tokio::task::JoinHandle<()> {
        let _ = std::fs::remove_file(socket);
        let listener = UnixListener::bind(socket).unwrap();
        let service = NodeServer::new(self.clone());
        let server =
            Server::builder().add_service(service).serve_with_incoming(UnixListenerStream::new(listener));
        tokio::spawn(async move { server.await.unwrap() })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    fn violation(&self, text: String) {
        self.truth.lock().unwrap().violations.push(format!("{}: {text}", self.name));
    }

    /// Names of what runs.
    pub fn running(&self) -> Vec<String> {
        self.state().instances.keys().map(|(_, name)| name.clone()).collect()
    }

    pub fn directories(&self) -> BTreeSet<String> {
        self.state().directories.clone()
    }

    /// How many processes were ever started.
    pub fn starts(&self) -> u32 {
        self.state().starts
    }

    /// Has the device of every engine be in use, or no longer.
    pub fn set_in_use(&self, by: Option<&str>) {
        self.state().in_use = by.map(ToOwned::to_owned);
    }

    /// The engine says that this replica left its view.
    pub fn fail_member(&self, volume: &str, replica_id: &str) {
        let key = (v1::InstanceKind::Engine.into(), volume.to_owned());
        let mut state = self.state();
        let instance = state.instances.get_mut(&key).unwrap();
        let Some(v1::instance::Detail::Engine(engine)) = &mut instance.detail else { unreachable!() };
        let member = engine.members.iter_mut().find(|member| member.replica_id == replica_id).unwrap();
        (member.mode, member.message) = ("failed".to_owned(), "connection reset".to_owned());
        let changed = instance.clone();
        self.send(Type::Set, changed);
    }

    /// The node restarts: every process is gone, every directory stays.
    pub fn reboot(&self) {
        let gone = std::mem::take(&mut self.state().instances);
        for instance in gone.into_values() {
            self.send(Type::Gone, instance);
        }
    }

    /// A directory is lost.
    pub fn lose_directory(&self, name: &str) {
        assert!(self.state().directories.remove(name), "{name} is not there");
    }

    fn send(&self, kind: Type, instance: v1::Instance) {
        let _ = self.events.send(v1::InstanceEvent { r#type: kind.into(), instance: Some(instance) });
    }

    /// As a real agent does: the start is under way first, and done a little later.
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
            frontends: vec![v1::FrontendInfo {
                name: "ublk".to_owned(),
                usable: true,
                reason: String::new(),
            }],
        }))
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
        let name = format!("{}-{}", request.volume, request.replica_id);
        if request.secret.len() != 32 || !request.first_members.contains(&request.replica_id) {
            self.violation(format!("replica {name} gets a bad secret or first view"));
        }
        let used = self.truth.lock().unwrap().used.contains(&name);
        let mut state = self.state();
        if !state.disks.contains(&request.disk_path) {
            return Err(Status::invalid_argument(format!("{} is no disk", request.disk_path)));
        }
        if !state.directories.contains(&name) {
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
            generation: String::new(),
            directory: format!("{}/replicas/{name}", request.disk_path),
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
            if request.attach < newest.0 || (request.attach == newest.0 && newest != this) {
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
        let member = |replica: &v1::ReplicaAddress| v1::EngineMember {
            replica_id: replica.replica_id.clone(),
            address: replica.addresses[0].clone(),
            mode: "member".to_owned(),
            message: String::new(),
        };
        let status = v1::EngineStatus {
            volume: request.volume.clone(),
            phase: "serving".to_owned(),
            generation: format!("{}.1", request.attach),
            view: format!("{}.1/1", request.attach),
            members: request.replicas.iter().map(member).collect(),
            frontend: "ublk".to_owned(),
            endpoint: format!("/dev/longhorn/{}", request.volume),
            size_bytes: request.size_bytes,
            attach: request.attach,
        };
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
                if sender.send(Ok(event)).await.is_err() {
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

    async fn delete_replica(
        &self,
        request: Request<v1::DeleteReplicaRequest>,
    ) -> Result<Response<v1::DeleteReplicaResponse>, Status> {
        let request = request.into_inner();
        let name = format!("{}-{}", request.volume, request.replica_id);
        let mut state = self.state();
        if state.instances.contains_key(&(v1::InstanceKind::Replica.into(), name.clone())) {
            self.violation(format!("the running replica {name} is deleted"));
            return Err(Status::failed_precondition("the replica runs"));
        }
        if state.instances.contains_key(&(v1::InstanceKind::Engine.into(), request.volume.clone())) {
            self.violation(format!("the replica {name} of an attached volume is deleted"));
        }
        state.directories.remove(&name);
        Ok(Response::new(v1::DeleteReplicaResponse {}))
    }

    async fn list_devices(
        &self,
        _: Request<v1::ListDevicesRequest>,
    ) -> Result<Response<v1::ListDevicesResponse>, Status> {
        Ok(Response::new(v1::ListDevicesResponse { devices: Vec::new() }))
    }
}
