//! An agent in this process that serves node.proto like a real one, and checks the calls of the controller.
//! The simulated agent of controller/core has the rules by which it answers. Engines serve once they start.

#[path = "agent/messages.rs"]
mod messages;
#[path = "agent/service.rs"]
mod service;
#[path = "../../../core/tests/simulation/agent.rs"]
mod simulated;

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
use shorthorn_controller_core::observed::{
    Detail, EngineStatus, Instance, InstanceKey, InstanceKind, InstanceState, MemberStatus, ObservedEngine,
};
use shorthorn_controller_core::{AgentCall, NodeName};
use shorthorn_types::status::MemberMode;
use shorthorn_types::{ReplicaId, View};
use tokio::net::UnixListener;
use tokio::sync::broadcast;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::Server;
use tonic::{Code, Response, Status};

use messages::parsed;
use simulated::{Event, SimAgent, Views, freeze, next, status_of};

/// The common state of all agents of a cluster: the truth that the controller must respect.
#[derive(Debug, Default)]
pub struct Truth {
    /// The newest attachment that was started, by volume, with its node.
    attaches: BTreeMap<String, (u64, String)>,
    /// Replicas that an engine has used: their directories must never be recreated.
    used: BTreeSet<String>,
    /// The views that replicas have stored.
    views: Views,
    /// Forbidden actions of the controller.
    pub violations: Vec<String>,
    /// Every grant that an engine has got, in order.
    pub grants: Vec<View>,
}

#[derive(Debug)]
struct State {
    /// The processes and the directories.
    agent: SimAgent,
    disks: BTreeSet<String>,
    /// The reason why disks cannot be removed; none if they can.
    keeps_disks: Option<String>,
    /// The reason why existing devices cannot be resized.
    keeps_size: Option<String>,
    starts: u32,
    limits: Option<v1::RebuildLimits>,
    trash: Vec<v1::TrashedReplica>,
    /// The committed view in the inspection of each directory.
    inspected: BTreeMap<String, v1::View>,
    /// Answers of the next calls to upgrade an engine. True: nothing was done before that answer.
    fails_upgrades: VecDeque<(Code, bool)>,
    /// Engines that were replaced.
    upgrades: u32,
}

impl State {
    fn new(agent: SimAgent) -> State {
        State {
            agent,
            disks: BTreeSet::new(),
            keeps_disks: None,
            keeps_size: None,
            starts: 0,
            limits: None,
            trash: Vec::new(),
            inspected: BTreeMap::new(),
            fails_upgrades: VecDeque::new(),
            upgrades: 0,
        }
    }
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
            state: Arc::new(Mutex::new(State::new(SimAgent::new(NodeName::new(name).unwrap())))),
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
        state.agent.directories.remove(&name);
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
        self.state().agent.instances.keys().map(|key| key.name.clone()).collect()
    }

    pub fn directories(&self) -> BTreeSet<String> {
        self.state().agent.directories.clone()
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
        self.state().agent.in_use = by.map(ToOwned::to_owned);
    }

    /// Keeps the size of existing devices from now on.
    pub fn keep_device_size(&self, why: &str) {
        self.state().keeps_size = Some(why.to_owned());
    }

    /// Returns the size of the device of a volume.
    pub fn engine_size(&self, volume: &str) -> u64 {
        self.engine_says(volume).size_bytes.unwrap()
    }

    /// Returns the engine of a volume as the fake agent shows it.
    pub fn engine_says(&self, volume: &str) -> ObservedEngine {
        match &self.state().agent.instances[&engine_key(volume)].detail {
            Detail::Engine(engine) => (**engine).clone(),
            Detail::Replica(_) => unreachable!(),
        }
    }

    /// Changes the engine of a volume as the agent reports it, and reports that.
    pub fn engine(&self, volume: &str, change: impl FnOnce(&mut ObservedEngine)) {
        self.order_engine(&mut self.state(), volume, 0, change).unwrap();
    }

    /// Changes the status that the engine of a volume reports.
    pub fn status(&self, volume: &str, change: impl FnOnce(&mut EngineStatus)) {
        self.engine(volume, |engine| change(status_of(engine)));
    }

    fn member(&self, volume: &str, replica_id: &str, change: impl FnOnce(&mut MemberStatus)) {
        let id: ReplicaId = parsed(replica_id);
        self.status(volume, |status| {
            change(status.members.iter_mut().find(|member| member.replica == id).unwrap());
        });
    }

    /// Reports that this replica has left the view of the engine.
    pub fn fail_member(&self, volume: &str, replica_id: &str) {
        self.member(volume, replica_id, |member| fail(member, "connection reset"));
    }

    /// Makes a replica that is being rebuilt, or has failed, a member.
    pub fn end_rebuild(&self, volume: &str, replica_id: &str) {
        self.member(volume, replica_id, make_member);
    }

    /// Freezes the engine, which has lost `lost` and has half of its view left: it waits for the arbiter.
    pub fn freeze(&self, volume: &str, lost: &str) {
        let id: ReplicaId = parsed(lost);
        self.status(volume, |status| {
            let current = status.view.unwrap();
            freeze(status, current, next(current, current.members.without(id)));
        });
        self.member(volume, lost, |member| fail(member, "no answer"));
    }

    /// Returns the volumes whose engines here rebuild a replica.
    pub fn rebuilding(&self) -> Vec<String> {
        let state = self.state();
        let rebuilds = |instance: &Instance| match &instance.detail {
            Detail::Engine(engine) => {
                let mut members = engine.reported.iter().flat_map(|status| &status.members);
                members.any(|member| member.mode == MemberMode::Rebuilding)
            }
            Detail::Replica(_) => false,
        };
        let engines = state.agent.instances.iter().filter(|(_, instance)| rebuilds(instance));
        engines.map(|(key, _)| key.name.clone()).collect()
    }

    /// Makes each replica that is being rebuilt a member.
    pub fn end_rebuilds(&self) {
        for volume in self.rebuilding() {
            // The engine may be gone meanwhile.
            let _ = self.order_engine(&mut self.state(), &volume, 0, |engine| {
                let members = status_of(engine).members.iter_mut();
                members.filter(|member| member.mode == MemberMode::Rebuilding).for_each(make_member);
            });
        }
    }

    /// Sets the rest of the rebuilds of the engine of `volume`, if it runs here.
    pub fn show_progress(&self, volume: &str, left_bytes: u64) {
        let _ = self.order_engine(&mut self.state(), volume, 0, |engine| {
            let copies = status_of(engine).members.iter_mut().filter_map(|member| member.copy.as_mut());
            copies.for_each(|copy| copy.left_bytes = left_bytes);
        });
    }

    /// Restarts the node: every process is gone, every directory stays.
    pub fn reboot(&self) {
        let mut events = Vec::new();
        let mut state = self.state();
        state.agent.restart(&mut events);
        self.send(events);
    }

    pub fn lose_directory(&self, name: &str) {
        assert!(self.state().agent.directories.remove(name), "{name} is not there");
    }

    /// Adds an unknown directory to the disk.
    pub fn leave_over(&self, name: &str) {
        self.state().agent.directories.insert(name.to_owned());
    }

    /// Sets the committed view in the inspection of a replica's directory.
    pub fn set_view(&self, name: &str, view: v1::View) {
        self.state().inspected.insert(name.to_owned(), view);
    }

    pub fn view(&self, name: &str) -> Option<v1::View> {
        self.state().inspected.get(name).cloned()
    }

    pub fn limits(&self) -> Option<v1::RebuildLimits> {
        self.state().limits
    }

    /// Changes the engine of that attachment, 0 being any.
    fn order_engine(
        &self,
        state: &mut State,
        volume: &str,
        attach: u64,
        change: impl FnOnce(&mut ObservedEngine),
    ) -> Result<(), Status> {
        let key = engine_key(volume);
        match state.agent.instances.get(&key).map(|instance| &instance.detail) {
            Some(Detail::Engine(engine)) if attach == 0 || engine.attach == Some(attach) => {}
            _ => return Err(Status::failed_precondition("no such engine")),
        }
        self.change(state, &key, |instance| {
            if let Detail::Engine(engine) = &mut instance.detail {
                change(engine);
            }
        });
        Ok(())
    }

    fn change(&self, state: &mut State, key: &InstanceKey, change: impl FnOnce(&mut Instance)) {
        let mut instance = state.agent.instances[key].clone();
        change(&mut instance);
        let mut events = Vec::new();
        state.agent.set(key.clone(), instance, &mut events);
        self.send(events);
    }

    fn send(&self, events: Vec<Event>) {
        for event in events {
            let (kind, instance) = match event {
                Event::Set(key, instance) => (Type::Set, messages::instance(&key, &instance)),
                Event::Gone(key) => (Type::Gone, messages::name(&key)),
            };
            let event = v1::InstanceEvent { r#type: kind.into(), instance: Some(instance) };
            // Nothing has to watch it.
            let _ = self.events.send(Arc::new(event));
        }
    }

    /// Carries out a call by the rules of the simulated agent.
    fn call(&self, state: &mut State, call: &AgentCall) -> Result<(), Status> {
        let mut events = Vec::new();
        let done = state.agent.call(call, false, &mut self.truth.lock().unwrap().views, &mut events);
        self.send(events);
        done.map_err(Status::failed_precondition)
    }

    /// Starts an instance like a real agent: first it is starting, and a little later it runs. `run` adds the
    /// facts that are known then.
    fn start(
        &self,
        state: &mut State,
        call: &AgentCall,
        run: impl FnOnce(&mut Detail),
    ) -> Result<Response<v1::Instance>, Status> {
        self.call(state, call)?;
        let key = call.instance();
        let answer = messages::instance(&key, &state.agent.instances[&key]);
        if state.agent.instances[&key].state == InstanceState::Starting {
            state.starts += 1;
            self.change(state, &key, |instance| {
                instance.state = InstanceState::Running;
                run(&mut instance.detail);
            });
        }
        Ok(Response::new(answer))
    }
}

fn engine_key(volume: &str) -> InstanceKey {
    InstanceKey { kind: InstanceKind::Engine, name: volume.to_owned() }
}

fn replica_key(name: &str) -> InstanceKey {
    InstanceKey { kind: InstanceKind::Replica, name: name.to_owned() }
}

fn fail(member: &mut MemberStatus, message: &str) {
    (member.mode, member.message) = (MemberMode::Failed, message.to_owned());
}

fn make_member(member: &mut MemberStatus) {
    (member.mode, member.copy) = (MemberMode::Member, None);
    member.message.clear();
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
