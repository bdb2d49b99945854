//! A simulated agent: the rules by which it answers the calls of a controller. progress.rs has the engines on
//! it. The fake agent of controller/tests/cluster/support serves the same rules with the API of node.proto.

use std::collections::{BTreeMap, BTreeSet};

use shorthorn_controller_core::objects::{EnginePhase, MemberMode};
use shorthorn_controller_core::observed::{
    Detail, EngineStatus, GrantWanted, Instance, InstanceKey, InstanceState, MemberStatus, ObservedEngine,
    ObservedReplica,
};
use shorthorn_controller_core::{AgentCall, NodeName, StartEngine, StartReplica};
use shorthorn_types::{Generation, Members, ReplicaId, ReplicaReport, View, ViewId};

/// The stored state of all replicas, wherever they are.
#[derive(Debug, Default)]
pub struct Views {
    /// The newest committed view of each volume.
    pub newest: BTreeMap<String, View>,
    /// The newest committed view that each replica knows.
    stored: BTreeMap<String, View>,
    /// The oldest attachment that each replica takes.
    fences: BTreeMap<String, u64>,
}

impl Views {
    /// Records a committed view: all its members have stored it.
    pub fn commit(&mut self, volume: &str, view: View) {
        self.newest.insert(volume.to_owned(), view);
        self.stored.extend(view.members.iter().map(|id| (format!("{volume}-{id}"), view)));
    }

    /// Forgets the directory of a replica, with all its records.
    pub fn forget(&mut self, replica: &str) {
        self.stored.remove(replica);
        self.fences.remove(replica);
    }

    pub fn fence(&mut self, replica: &str, attach: u64) {
        let fence = self.fences.entry(replica.to_owned()).or_default();
        *fence = attach.max(*fence);
    }

    pub fn refuses(&self, replica: &str, attach: u64) -> bool {
        self.fences.get(replica).is_some_and(|fence| *fence > attach)
    }
}

/// An event of one instance in an agent's stream.
#[derive(Clone, Debug)]
pub enum Event {
    Set(InstanceKey, Box<Instance>),
    Gone(InstanceKey),
}

#[derive(Clone, Debug)]
pub struct SimAgent {
    pub name: NodeName,
    pub instances: BTreeMap<InstanceKey, Instance>,
    /// Names of the replica directories.
    pub directories: BTreeSet<String>,
    /// The user of all devices, which keeps their engines from being stopped.
    pub in_use: Option<String>,
    /// Instances that a call made which its caller had given up.
    pub strays: BTreeSet<InstanceKey>,
    /// The size that each engine has got, by attachment.
    pub sizes: BTreeMap<(InstanceKey, u64), u64>,
    /// The newest map of replicas of each engine, and its number.
    pub maps: BTreeMap<InstanceKey, (u64, BTreeSet<ReplicaId>)>,
    /// Number of the newest leader that has called. Calls of older ones change nothing.
    pub newest_leader: u64,
}

impl SimAgent {
    pub fn new(name: NodeName) -> SimAgent {
        SimAgent {
            name,
            instances: BTreeMap::new(),
            directories: BTreeSet::new(),
            in_use: None,
            strays: BTreeSet::new(),
            sizes: BTreeMap::new(),
            maps: BTreeMap::new(),
            newest_leader: 0,
        }
    }

    /// Carries out the call. The events are sent to the listeners.
    pub fn call(
        &mut self,
        call: &AgentCall,
        late: bool,
        views: &mut Views,
        events: &mut Vec<Event>,
    ) -> Result<(), String> {
        let key = call.instance();
        match call {
            AgentCall::StartReplica(start) => self.start_replica(key, start, late, views, events),
            AgentCall::StartEngine(start) => self.start_engine(key, start, late, events),
            AgentCall::Grant { attach, view, .. } => self.grant(&key, *attach, **view, events),
            AgentCall::UpdateReplicas { attach, replicas, revision, .. } => {
                self.update_replicas(&key, *attach, replicas.keys().copied().collect(), *revision, events)
            }
            AgentCall::SetRebuildLimits { .. } => Ok(()),
            AgentCall::FenceReplica { attach, .. } => self.fence_replica(&key, *attach, views, events),
            AgentCall::ExpandEngine { attach, size_bytes, .. } => self.expand(&key, *attach, *size_bytes),
            AgentCall::SalvageReplica { .. } => {
                if self.instances.contains_key(&key) {
                    return Err("the replica runs".to_owned());
                }
                if self.directories.contains(&key.name) {
                    Ok(())
                } else {
                    Err("the directory does not exist".to_owned())
                }
            }
            AgentCall::StopInstance { attach, .. } | AgentCall::ForceStopEngine { attach, .. } => {
                self.stop(&key, *attach, events)
            }
            AgentCall::DeleteReplica { .. } => {
                if self.instances.contains_key(&key) {
                    return Err("the replica runs".to_owned());
                }
                self.directories.remove(&key.name);
                views.forget(&key.name);
                Ok(())
            }
        }
    }

    fn start_replica(
        &mut self,
        key: InstanceKey,
        start: &StartReplica,
        late: bool,
        views: &mut Views,
        events: &mut Vec<Event>,
    ) -> Result<(), String> {
        if !self.directories.contains(&key.name) {
            if !start.create {
                return Err(format!("the directory of {} is missing", key.name));
            }
            self.directories.insert(key.name.clone());
            views.stored.remove(&key.name);
        }
        // A directory out of the trash has no view here, either.
        views.stored.entry(key.name.clone()).or_insert_with(|| {
            let members = Members::new(start.first_members.iter().copied()).unwrap();
            View { id: ViewId { generation: Generation::NEVER, number: 0 }, members }
        });
        self.start(key, Detail::Replica(ObservedReplica::default()), late, events);
        Ok(())
    }

    fn start_engine(
        &mut self,
        key: InstanceKey,
        start: &StartEngine,
        late: bool,
        events: &mut Vec<Event>,
    ) -> Result<(), String> {
        let attach = start.attach;
        if let Some(Detail::Engine(there)) = self.instances.get(&key).map(|i| &i.detail)
            && there.attach != Some(attach)
        {
            let carried = start.continues.is_some_and(|since| (since..attach).contains(&attach_of(there)));
            if !carried {
                return Err("another engine is there".to_owned());
            }
            self.gone(&key, events);
        }
        // Kept while the agent has a spec of the engine, which a start that comes late must not make smaller.
        let size = self.sizes.entry((key.clone(), attach)).or_default();
        *size = (*size).max(start.size_bytes);
        if !self.instances.contains_key(&key) {
            self.maps.insert(key.clone(), (start.revision, start.replicas.keys().copied().collect()));
        }
        let members = start.replicas.keys().map(|id| MemberStatus::of(*id, MemberMode::Connecting));
        let generation = Generation::new(attach, 0);
        let starting = EngineStatus::starting(start.volume.clone(), generation, start.size_bytes);
        let engine = ObservedEngine::of(attach, EngineStatus { members: members.collect(), ..starting });
        self.start(key, Detail::Engine(Box::new(engine)), late, events);
        Ok(())
    }

    fn fence_replica(
        &mut self,
        key: &InstanceKey,
        attach: u64,
        views: &mut Views,
        events: &mut Vec<Event>,
    ) -> Result<(), String> {
        let Some(mut instance) = self.instances.get(key).cloned() else {
            return Err("it does not run".to_owned());
        };
        let Detail::Replica(observed) = &mut instance.detail else {
            return Err("it is not a replica".to_owned());
        };
        views.fence(&key.name, attach);
        observed.attach = Some(views.fences[&key.name]);
        let committed = views.stored[&key.name];
        observed.views = Some(Box::new(ReplicaReport { committed, proposed: Vec::new() }));
        self.set(key.clone(), instance, events);
        Ok(())
    }

    fn start(&mut self, key: InstanceKey, detail: Detail, late: bool, events: &mut Vec<Event>) {
        if self.instances.contains_key(&key) {
            return;
        }
        if late {
            self.strays.insert(key.clone());
        }
        let instance = Instance { state: InstanceState::Starting, message: None, detail };
        self.set(key, instance, events);
    }

    fn stop(
        &mut self,
        key: &InstanceKey,
        attach: Option<u64>,
        events: &mut Vec<Event>,
    ) -> Result<(), String> {
        let Some(instance) = self.instances.get(key) else { return Ok(()) };
        if let Detail::Engine(engine) = &instance.detail {
            if attach.is_some() && engine.attach > attach {
                return Ok(());
            }
            if let Some(by) = &self.in_use
                && engine.phase() != Some(EnginePhase::Stopped)
            {
                return Err(format!("the device is in use by {by}"));
            }
        }
        self.gone(key, events);
        Ok(())
    }

    pub fn set(&mut self, key: InstanceKey, instance: Instance, events: &mut Vec<Event>) {
        self.instances.insert(key.clone(), instance.clone());
        events.push(Event::Set(key, Box::new(instance)));
    }

    pub fn gone(&mut self, key: &InstanceKey, events: &mut Vec<Event>) {
        self.instances.remove(key);
        self.strays.remove(key);
        self.maps.remove(key);
        events.push(Event::Gone(key.clone()));
    }

    /// Restarts the node: every process is gone, every directory stays.
    pub fn restart(&mut self, events: &mut Vec<Event>) {
        self.in_use = None;
        let all: Vec<InstanceKey> = self.instances.keys().cloned().collect();
        all.iter().for_each(|key| self.gone(key, events));
    }

    /// Returns the engine of that attachment, if it is here.
    fn engine_of(&self, key: &InstanceKey, attach: u64) -> Result<(Instance, Box<ObservedEngine>), String> {
        match self.instances.get(key) {
            Some(instance) => match &instance.detail {
                Detail::Engine(engine) if engine.attach == Some(attach) => {
                    Ok((instance.clone(), engine.clone()))
                }
                _ => Err("another engine is there".to_owned()),
            },
            None => Err("the engine does not run".to_owned()),
        }
    }

    /// Grows the device some time later.
    fn expand(&mut self, key: &InstanceKey, attach: u64, size_bytes: u64) -> Result<(), String> {
        self.engine_of(key, attach)?;
        let size = self.sizes.entry((key.clone(), attach)).or_default();
        *size = (*size).max(size_bytes);
        Ok(())
    }

    fn grant(
        &mut self,
        key: &InstanceKey,
        attach: u64,
        granted: View,
        events: &mut Vec<Event>,
    ) -> Result<(), String> {
        let (mut instance, mut engine) = self.engine_of(key, attach)?;
        if engine.grant_wanted().is_some_and(|wanted| wanted.view == granted) {
            serve_with_grant(status_of(&mut engine), granted);
            instance.detail = Detail::Engine(engine);
            self.set(key.clone(), instance, events);
        }
        Ok(())
    }

    fn update_replicas(
        &mut self,
        key: &InstanceKey,
        attach: u64,
        replicas: BTreeSet<ReplicaId>,
        revision: u64,
        events: &mut Vec<Event>,
    ) -> Result<(), String> {
        let (mut instance, mut engine) = self.engine_of(key, attach)?;
        if self.maps.get(key).is_some_and(|(newest, _)| *newest > revision) {
            return Ok(());
        }
        // A missing replica is given up, unless it is in the view.
        let status = status_of(&mut engine);
        let stays =
            |member: &MemberStatus| member.mode == MemberMode::Member || replicas.contains(&member.replica);
        status.members.retain(stays);
        let new: Vec<_> = replicas.iter().filter(|id| status.member(**id).is_none()).collect();
        status.members.extend(new.into_iter().map(|id| MemberStatus::of(*id, MemberMode::Connecting)));
        // Rebuilds begin in this order.
        status.members.sort_by_key(|member| member.replica);
        self.maps.insert(key.clone(), (revision, replicas));
        instance.detail = Detail::Engine(engine);
        self.set(key.clone(), instance, events);
        Ok(())
    }
}

/// Returns the attachment of an engine. Those of simulated agents all report one.
pub fn attach_of(engine: &ObservedEngine) -> u64 {
    engine.attach.unwrap_or_default()
}

/// Returns the status of an engine. Those of simulated agents report one from their start on.
pub fn status_of(engine: &mut ObservedEngine) -> &mut EngineStatus {
    engine.reported.as_mut().unwrap()
}

pub fn next(view: View, members: Members) -> View {
    View { id: ViewId { number: view.id.number + 1, ..view.id }, members }
}

/// Freezes an engine that has half of its view left. It waits for the arbiter.
pub fn freeze(status: &mut EngineStatus, current: View, target: View) {
    let honoured = ReplicaReport { committed: current, proposed: Vec::new() };
    status.grant_wanted = Some(GrantWanted { view: target, honoured, stored: target.members });
    status.phase = EnginePhase::Frozen;
}

fn serve_with_grant(status: &mut EngineStatus, granted: View) {
    status.grant_wanted = None;
    status.phase = EnginePhase::Serving;
    debug_assert_eq!(granted.id.generation.attach, status.generation.attach);
}
