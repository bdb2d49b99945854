//! An agent in memory that implements node.proto like a real one, and checks the calls of the controller.

#[path = "agent/service.rs"]
mod service;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard};

use shorthorn_api::v1;
use shorthorn_api::v1::instance_event::Type;
use shorthorn_api::v1::node_server::NodeServer;
use shorthorn_types::status::{EnginePhase, MemberMode};
use tokio::net::UnixListener;
use tokio::sync::broadcast;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::Server;
use tonic::{Code, Status};

type Key = (i32, String);

/// The common state of all agents of a cluster: the truth that the controller must respect.
#[derive(Debug, Default)]
pub struct Truth {
    /// The newest attachment that was started, by volume, with the node and the replicas it was started on.
    attaches: BTreeMap<String, (u64, String, Vec<String>)>,
    /// Replicas that an engine has used: their directories must never be recreated.
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
    /// Answers of the next calls to upgrade an engine. True: nothing was done before that answer.
    fails_upgrades: VecDeque<(Code, bool)>,
    /// Engines that were replaced.
    upgrades: u32,
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

    /// Returns the times of deletion of the directories in the trash.
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

    /// Answers the next calls to upgrade an engine with these codes. True: before anything is done.
    pub fn fail_upgrades(&self, answers: &[(Code, bool)]) {
        self.state().fails_upgrades = answers.iter().copied().collect();
    }

    /// Returns the number of engines that were ever replaced.
    pub fn upgrades(&self) -> u32 {
        self.state().upgrades
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

    pub fn engine(&self, volume: &str, change: impl FnOnce(&mut v1::EngineStatus)) {
        let key = (v1::InstanceKind::Engine.into(), volume.to_owned());
        let mut state = self.state();
        let instance = state.instances.get_mut(&key).unwrap();
        let Some(v1::instance::Detail::Engine(engine)) = &mut instance.detail else { unreachable!() };
        change(engine);
        let changed = instance.clone();
        self.send(Type::Set, changed);
    }

    /// Returns the engine status with which the fake agent answers.
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

    /// Makes each replica that is being rebuilt a member.
    pub fn end_rebuilds(&self) {
        for volume in self.rebuilding() {
            let key = (v1::InstanceKind::Engine.into(), volume);
            let mut state = self.state();
            let Some(instance) = state.instances.get_mut(&key) else { continue };
            let Some(v1::instance::Detail::Engine(engine)) = &mut instance.detail else { continue };
            for member in engine.members.iter_mut().filter(|one| one.known_mode() == MemberMode::Rebuilding) {
                *member = member.clone().with_mode(MemberMode::Member);
                member.copy = None;
            }
            let changed = instance.clone();
            self.send(Type::Set, changed);
        }
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

    /// Gives a command to the engine of that attachment, 0 being any.
    fn order_engine(
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
