//! The simulation: a store, agents, a controller that crashes, and the rules.

mod end;
mod hidden;
mod late;
mod leaders;
mod rules;

use std::collections::{BTreeMap, BTreeSet};

use shorthorn_controller_core::left_out_objects::LeftOut;
use shorthorn_controller_core::lost_node::DeleteNode;
use shorthorn_controller_core::objects::{Key, Kind, Object, ResourceVersion, Secret, Volume};
use shorthorn_controller_core::observed::{CallFailure, InstanceKey, InstanceKind, InstanceState};
use shorthorn_controller_core::reconcile::{Context, Settings, gives_space_away, reconcile};
use shorthorn_controller_core::requests::{self, Change, CreateVolume, SalvageVolume, SetNode};
use shorthorn_controller_core::{
    Action, AgentCall, ClusterState, NodeName, StartReplica, Timestamp, rebalance,
};

use shorthorn_types::View;

use crate::agent::{Event, SimAgent, Views};
use crate::controller::Controller;

pub const NODES: usize = 4;
/// The number of rounds, each with a turn for all, after which a cluster counts as never coming to rest.
const ROUNDS_MAX: u32 = 200;

/// A step; its numbers choose among the existing objects.
#[derive(Clone, Debug)]
pub enum Op {
    Create,
    Attach(usize, usize),
    Detach(usize),
    Delete(usize),
    /// The volume, and the additional GiB.
    Expand(usize, u8),
    /// Makes a decision about an object; its actions are carried out later.
    Decide(usize),
    /// Carries out one action.
    Act(usize),
    CallFails(usize),
    CallUnanswered(usize),
    CallLate(usize),
    LateCallArrives(usize),
    Event(usize),
    EventRepeated(usize),
    EventLost(usize),
    StreamBreaks(usize),
    StreamOpens(usize),
    Progress(usize),
    ProcessDies(usize, usize),
    NodeRestarts(usize),
    /// A node never comes back; at most one does not.
    NodeLost(usize),
    /// The operator deletes the object of the node that is lost, with force or without.
    GiveUp(bool),
    MemberFails(usize, usize),
    Salvage(usize, usize),
    DirectoryLost(usize, usize),
    DeviceUsed(usize, bool),
    Cordon(usize),
    Drain(usize),
    /// Deletes any replica as kubectl delete does.
    DeleteReplica(usize),
    /// Requests a move of a replica to a better place, whether or not one exists, or cancels the request.
    Move(usize, bool),
    Uncordon(usize),
    TimePasses(u8),
    /// The store cannot read an object.
    LeaveOut(usize),
    /// The store can read the object again.
    TakeIn(usize),
    Crash,
    /// Another controller leads. The old one is paused with its decisions.
    TakeOver,
    /// A controller that was paused carries out an action.
    OldLeaderActs(usize),
}

#[derive(Clone, Copy, PartialEq)]
enum Fault {
    None,
    Fails,
    Unanswered,
    Late,
}

#[derive(Debug)]
pub struct Sim {
    store: ClusterState,
    /// The objects that the store cannot read now.
    hidden: BTreeMap<Key, (Object, LeftOut)>,
    revision: u64,
    now: Timestamp,
    nodes: Vec<SimAgent>,
    controller: Controller,
    late: Vec<(NodeName, AgentCall)>,
    leader: u64,
    /// The decisions of controllers that were paused.
    paused: Vec<leaders::Paused>,
    random: u64,
    created: u32,
    /// Every engine start: where.
    started: BTreeMap<(String, u64), NodeName>,
    /// Replicas that an engine was started with.
    used: BTreeSet<String>,
    lost_directories: BTreeSet<String>,
    views: Views,
    /// Every grant that an engine has got, by volume.
    granted: BTreeMap<String, Vec<View>>,
    /// Replicas whose data was deleted.
    deleted: BTreeSet<String>,
    /// The node that never comes back.
    lost: Option<usize>,
    /// The volumes that could not leave their nodes and were wanted there again, and their attachments.
    wanted_back: BTreeMap<String, Option<u64>>,
}

impl Sim {
    pub fn new() -> Sim {
        let now = Timestamp::from_second(1_000_000).unwrap();
        let name = |at: usize| NodeName::new(&format!("n{at}")).unwrap();
        let nodes: Vec<SimAgent> = (0..NODES).map(|at| SimAgent::new(name(at))).collect();
        let mut sim = Sim {
            controller: Controller::start(&nodes, now),
            store: ClusterState::default(),
            hidden: BTreeMap::new(),
            revision: 0,
            now,
            nodes,
            late: Vec::new(),
            leader: 1,
            paused: Vec::new(),
            random: 1,
            created: 0,
            started: BTreeMap::new(),
            used: BTreeSet::new(),
            lost_directories: BTreeSet::new(),
            views: Views::default(),
            granted: BTreeMap::new(),
            deleted: BTreeSet::new(),
            lost: None,
            wanted_back: BTreeMap::new(),
        };
        // The nodes become known: nothing can be asked for before.
        sim.converge();
        sim
    }

    pub fn step(&mut self, op: &Op) {
        match *op {
            Op::Create => self.create(),
            Op::Attach(volume, node) => {
                let node = self.nodes[node].name.clone();
                self.request(volume, |cluster, name| requests::attach(cluster, name, node.as_str()));
            }
            Op::Detach(volume) => self.request(volume, requests::detach),
            Op::Delete(volume) => {
                let now = self.now;
                self.request(volume, |cluster, name| requests::delete(cluster, name, now));
            }
            Op::Expand(volume, gib) => self.request(volume, |cluster, name| {
                let size = requests::find(cluster, name)?.spec.size;
                requests::expand(cluster, name, size + (u64::from(gib) << 30))
            }),
            Op::Salvage(volume, replica) => self.salvage(volume, replica),
            Op::Cordon(node) => {
                self.set_node(node, SetNode { allow_scheduling: Some(false), ..SetNode::default() })
            }
            Op::Drain(node) => {
                self.set_node(node, SetNode { eviction_requested: Some(true), ..SetNode::default() })
            }
            Op::DeleteReplica(replica) => self.delete_replica(replica),
            Op::Move(replica, wanted) => self.move_replica(replica, wanted),
            Op::Uncordon(node) => {
                self.set_node(node, SetNode { allow_scheduling: Some(true), ..SetNode::default() })
            }
            Op::Decide(which) => {
                if let Some(key) = choose(&self.keys(), which) {
                    self.decide(&key);
                }
            }
            Op::Act(which) => self.act(which, Fault::None),
            Op::CallFails(which) => self.act(which, Fault::Fails),
            Op::CallUnanswered(which) => self.act(which, Fault::Unanswered),
            Op::CallLate(which) => self.act(which, Fault::Late),
            Op::LateCallArrives(which) => self.late_call_arrives(which),
            Op::Event(node) => drop(self.controller.read(&self.nodes[node].name, false)),
            Op::EventRepeated(node) => drop(self.controller.read(&self.nodes[node].name, true)),
            Op::EventLost(node) => self.lose_event(node),
            Op::StreamBreaks(node) => self.controller.close(&self.nodes[node].name, self.now),
            Op::StreamOpens(node) => {
                if self.lost != Some(node) && !self.controller.streams.contains_key(&self.nodes[node].name) {
                    self.nodes[node].newest_leader = self.leader;
                    self.controller.open(&self.nodes[node]);
                }
            }
            Op::NodeLost(node) => self.lose_node(node),
            Op::GiveUp(force) => self.give_up(force),
            Op::TimePasses(seconds) => self.now += std::time::Duration::from_secs(seconds.into()),
            Op::LeaveOut(which) => self.leave_out(which),
            Op::TakeIn(which) => self.take_in(which),
            Op::Crash => self.controller = Controller::start(&self.nodes, self.now),
            Op::TakeOver => self.take_over(),
            Op::OldLeaderActs(which) => self.old_leader_acts(which),
            _ => self.hurt(op),
        }
    }

    fn lose_event(&mut self, node: usize) {
        let stream = self.controller.streams.get_mut(&self.nodes[node].name);
        drop(stream.and_then(std::collections::VecDeque::pop_front));
    }

    fn delete_replica(&mut self, which: usize) {
        let names: Vec<String> = self.store.replicas.keys().cloned().collect();
        if let Some(mut replica) = choose(&names, which).map(|name| self.store.replicas[&name].clone())
            && !replica.metadata.is_deleting()
        {
            replica.metadata.deletion_timestamp = Some(self.now);
            assert!(self.put(replica.into()));
        }
    }

    fn move_replica(&mut self, which: usize, wanted: bool) {
        let names: Vec<String> = self.store.replicas.keys().cloned().collect();
        if let Some(name) = choose(&names, which)
            && let Ok(Change::Store(replica)) = rebalance::ask(&self.store, &name, wanted)
        {
            assert!(self.put(replica.into()));
        }
    }

    /// Destroys the node.
    fn lose_node(&mut self, at: usize) {
        if self.lost.is_some() {
            return;
        }
        self.lost = Some(at);
        let node = &mut self.nodes[at];
        node.in_use = None;
        node.instances.clear();
        node.strays.clear();
        self.controller.close(&self.nodes[at].name, self.now);
    }

    fn give_up(&mut self, force: bool) {
        let Some(at) = self.lost else { return };
        let name = self.nodes[at].name.to_string();
        let wanted = DeleteNode { name: name.clone(), confirm: name, force };
        if let Ok(Change::Store(node)) = wanted.apply(&self.store, &self.controller.agents, self.now) {
            assert!(self.put(node.into()));
        }
    }

    /// Does a fault of a node.
    fn hurt(&mut self, op: &Op) {
        let mut events = Vec::new();
        let (Op::Progress(at)
        | Op::ProcessDies(at, _)
        | Op::NodeRestarts(at)
        | Op::MemberFails(at, _)
        | Op::DirectoryLost(at, _)
        | Op::DeviceUsed(at, _)) = *op
        else {
            return;
        };
        let runs = self.running();
        let node = &mut self.nodes[at];
        let all: Vec<InstanceKey> = node.instances.keys().cloned().collect();
        match *op {
            Op::Progress(_) => node.progress(&runs, &mut self.views, &mut events),
            Op::ProcessDies(_, which) => {
                if let Some(key) = choose(&all, which) {
                    node.gone(&key, &mut events);
                }
            }
            Op::NodeRestarts(_) => node.restart(&mut events),
            Op::MemberFails(_, which) => node.fail_member(which, &mut self.views, &mut events),
            Op::DirectoryLost(_, which) => {
                let stopped = |name: &&String| !all.iter().any(|key| key.name == **name);
                let names: Vec<String> = node.directories.iter().filter(stopped).cloned().collect();
                if let Some(name) = choose(&names, which) {
                    node.directories.remove(&name);
                    self.views.forget(&name);
                    self.lost_directories.insert(name);
                }
            }
            Op::DeviceUsed(_, used) => node.in_use = user(used),
            _ => {}
        }
        self.publish(at, events);
    }

    /// Returns the replicas whose processes run.
    fn running(&self) -> BTreeSet<String> {
        let all = self.nodes.iter().flat_map(|node| node.instances.iter());
        let running = all.filter(|(key, instance)| {
            key.kind == InstanceKind::Replica && instance.state == InstanceState::Running
        });
        running.map(|(key, _)| key.name.clone()).collect()
    }

    /// Makes one replica the volume, like an operator.
    fn salvage(&mut self, volume: usize, replica: usize) {
        let names: Vec<String> = self.store.volumes.keys().cloned().collect();
        let Some(name) = choose(&names, volume) else { return };
        let of_it = self.store.replicas_of(&self.store.volumes[&name].spec.volume_name);
        let there = |replica: &&shorthorn_controller_core::objects::Replica| {
            self.nodes.iter().any(|node| node.directories.contains(&replica.metadata.name))
        };
        let ids: Vec<String> =
            of_it.filter(there).map(|replica| replica.spec.replica_id.to_string()).collect();
        let Some(replica) = choose(&ids, replica) else { return };
        let wanted = SalvageVolume {
            name: name.clone(),
            replica,
            confirm: name,
            by: "an operator".to_owned(),
            reason: "a test".to_owned(),
            losses: String::new(),
            known_attach: 0,
            are_all_known: true,
        };
        if let Ok(Change::Store(volume)) = wanted.apply(&self.store, self.now) {
            assert!(self.put(volume.into()));
        }
    }

    fn set_node(&mut self, at: usize, wanted: SetNode) {
        let name = self.nodes[at].name.to_string();
        if let Ok(Change::Store(node)) = (SetNode { name, ..wanted }).apply(&self.store, self.now) {
            assert!(self.put(node.into()));
        }
    }

    fn publish(&mut self, at: usize, events: Vec<Event>) {
        if let Some(stream) = self.controller.streams.get_mut(&self.nodes[at].name) {
            stream.extend(events);
        }
    }

    fn create(&mut self) {
        let name = format!("v{}", self.created);
        // Two replicas need the arbiter, three do not; there is one more node for replacements.
        let number_of_replicas = Some(2 + self.created % 2);
        let wanted =
            CreateVolume { name, size_bytes: 1 << 30, number_of_replicas, ..CreateVolume::default() };
        let Ok(Change::Store(volume)) = wanted.apply(&self.store, Secret::new([7; 32]), self.now) else {
            panic!("a new volume is refused");
        };
        self.created += 1;
        assert!(self.put(volume.into()));
    }

    fn request<E>(
        &mut self,
        which: usize,
        change: impl FnOnce(&ClusterState, &str) -> Result<Change<Volume>, E>,
    ) {
        let names: Vec<String> = self.store.volumes.keys().cloned().collect();
        let Some(name) = choose(&names, which) else { return };
        if let Ok(Change::Store(volume)) = change(&self.store, &name) {
            assert!(self.put(volume.into()));
        }
    }

    fn keys(&self) -> Vec<Key> {
        let nodes = self.nodes.iter().map(|node| Key::new(Kind::Node, node.name.as_str()));
        let keys: BTreeSet<Key> = self.store.keys().chain(nodes).collect();
        keys.into_iter().collect()
    }

    fn decide(&mut self, key: &Key) {
        if self.controller.runs.contains_key(key) {
            return;
        }
        // The shell takes these one at a time.
        let placing = |other: &Key| gives_space_away(&self.store, other);
        if placing(key) && self.controller.runs.keys().any(placing) {
            return;
        }
        let random = std::array::from_fn(|_| {
            self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            self.random >> 16
        });
        let (cluster, agents, now) = (&self.store, &self.controller.agents, self.now);
        // Some rounds of settling, so that replicas that come back at once are kept, and new ones can come
        // up.
        let settings =
            Settings { replica_replace_after: std::time::Duration::from_secs(300), ..Settings::default() };
        let context = Context { cluster, agents, now, random, settings };
        let decision = reconcile(&context, key);
        if !decision.actions.is_empty() {
            self.controller.runs.insert(key.clone(), decision.actions.into());
        }
    }

    fn act(&mut self, which: usize, fault: Fault) {
        let keys: Vec<Key> = self.controller.runs.keys().cloned().collect();
        if let Some(key) = choose(&keys, which) {
            let _ = self.act_on(&key, fault);
        }
    }

    /// Carries out the next action of a run, which ends with the first that fails. False: it did.
    fn act_on(&mut self, key: &Key, fault: Fault) -> bool {
        let Some(run) = self.controller.runs.get_mut(key) else { return false };
        let Some(action) = run.pop_front() else {
            self.controller.runs.remove(key);
            return false;
        };
        let last = run.is_empty();
        let good = match action {
            Action::Write(object) => self.put(*object),
            Action::Remove(key, version) => self.remove(&key, version),
            Action::Call(node, call) => self.call(&node, call, fault),
            Action::Emit(_) => true,
        };
        if !good || last {
            self.controller.runs.remove(key);
        }
        good
    }

    fn put(&mut self, mut object: Object) -> bool {
        let key = object.key();
        if self.hidden.contains_key(&key) || self.store.version(&key) != object.metadata().resource_version {
            return false;
        }
        self.reveal();
        self.check_write(&object);
        self.hide();
        self.revision += 1;
        object.metadata_mut().resource_version = ResourceVersion::new(self.revision);
        self.store.insert(object);
        true
    }

    fn remove(&mut self, key: &Key, version: Option<ResourceVersion>) -> bool {
        if self.store.version(key) != version {
            return false;
        }
        if key.kind == Kind::Replica {
            self.reveal();
            let holder = self.nodes.iter().position(|node| node.directories.contains(&key.name));
            match holder {
                Some(at) if self.lost == Some(at) => self.check_forgotten(&key.name),
                _ => assert!(holder.is_none(), "{key} is forgotten with its directory there"),
            }
            self.hide();
        }
        self.store.remove(key);
        true
    }

    fn call(&mut self, node: &NodeName, call: AgentCall, fault: Fault) -> bool {
        self.reveal();
        let is_good = self.call_agent(node, call, fault);
        self.hide();
        is_good
    }

    fn call_agent(&mut self, node: &NodeName, call: AgentCall, fault: Fault) -> bool {
        if !self.controller.agents.get(node).is_some_and(|agent| agent.is_synced()) {
            return false;
        }
        let result = match fault {
            Fault::Fails => Err("connection reset".to_owned()),
            Fault::Late => {
                self.check_call(node, &call);
                self.late.push((node.clone(), call.clone()));
                Err("timed out".to_owned())
            }
            Fault::None | Fault::Unanswered => {
                self.check_call(node, &call);
                self.arrive(node, &call, false)
            }
        };
        let result = if fault == Fault::Unanswered { Err("timed out".to_owned()) } else { result };
        if let Some(mut agent) = self.controller.agents.get_mut(node) {
            match &result {
                Ok(()) => drop(agent.failures.remove(&call.instance())),
                Err(error) => drop(
                    agent
                        .failures
                        .insert(call.instance(), CallFailure { call: call.name(), message: error.clone() }),
                ),
            }
        }
        result.is_ok()
    }

    fn arrive(&mut self, node: &NodeName, call: &AgentCall, late: bool) -> Result<(), String> {
        let at = self.nodes.iter().position(|other| other.name == *node).unwrap();
        if self.lost == Some(at) {
            return Err("connection reset".to_owned());
        }
        if let AgentCall::StartReplica(StartReplica { create: true, .. }) = call {
            let name = call.instance().name;
            let anew = !self.nodes[at].directories.contains(&name);
            assert!(!anew || !self.used.contains(&name), "the used replica {name} is recreated, empty");
        }
        let mut events = Vec::new();
        let result = self.nodes[at].call(call, late, &mut self.views, &mut events);
        self.publish(at, events);
        if result.is_ok() {
            self.record_done(call);
        }
        if let AgentCall::StartEngine(start) = call {
            self.fence(start.volume.as_str());
        }
        result
    }

    /// Makes replicas serve the newest engine that came to them, and no older one.
    fn fence(&mut self, volume: &str) {
        let key = InstanceKey { kind: InstanceKind::Engine, name: volume.to_owned() };
        let newest = self.started.range((volume.to_owned(), 0)..=(volume.to_owned(), u64::MAX)).next_back();
        let Some(((_, newest), _)) = newest else { return };
        let newest = *newest;
        for at in 0..self.nodes.len() {
            if self.nodes[at].instances.contains_key(&key) {
                let mut events = Vec::new();
                self.nodes[at].fence(volume, newest, &mut events);
                self.publish(at, events);
            }
        }
    }

    /// Lets every part act until none has work left.
    pub fn converge(&mut self) {
        let mut idle = 0;
        for _ in 0..ROUNDS_MAX {
            for at in 0..self.nodes.len() {
                self.step(&Op::StreamOpens(at));
                self.step(&Op::Progress(at));
                while self.controller.read(&self.nodes[at].name.clone(), false) {}
            }
            let mut quiet = true;
            for key in self.keys() {
                self.decide(&key);
                while self.controller.runs.contains_key(&key) {
                    // A call that is refused again and again (a directory is lost) is rest, too.
                    quiet &= !self.act_on(&key, Fault::None);
                }
            }
            // Longer than every time limit of the reconcilers: every wait ends within one round.
            self.now += std::time::Duration::from_secs(60);
            idle = if quiet { idle + 1 } else { 0 };
            if idle == 8 {
                return;
            }
        }
        panic!("the cluster state never comes to rest: {:#?}", self.controller.runs);
    }
}

/// Returns the user of devices, if they are in use.
fn user(is_used: bool) -> Option<String> {
    is_used.then(|| "a mount".to_owned())
}

fn choose<T: Clone>(all: &[T], which: usize) -> Option<T> {
    all.get(which.checked_rem(all.len())?).cloned()
}
