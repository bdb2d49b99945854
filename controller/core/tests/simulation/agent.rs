//! A simulated agent: instances that take time, directories, and a fence.

use std::collections::{BTreeMap, BTreeSet};

use shorthorn_controller_core::objects::{EnginePhase, MemberMode};
use shorthorn_controller_core::observed::{
    Detail, EngineStatus, GrantWanted, Instance, InstanceKey, InstanceKind, InstanceState, MemberStatus,
    ObservedEngine, ObservedReplica,
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

    fn fence(&mut self, replica: &str, attach: u64) {
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
    pub device_used: bool,
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
            device_used: false,
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
            AgentCall::StopInstance { attach, .. } => self.stop(&key, *attach, events),
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
                return Err("the directory is missing".to_owned());
            }
            self.directories.insert(key.name.clone());
            let members = Members::new(start.first_members.iter().copied()).unwrap();
            let first = View { id: ViewId { generation: Generation::NEVER, number: 0 }, members };
            views.stored.insert(key.name.clone(), first);
        }
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
            if self.device_used && engine.phase() != Some(EnginePhase::Stopped) {
                return Err("the device is in use".to_owned());
            }
        }
        self.gone(key, events);
        Ok(())
    }

    fn set(&mut self, key: InstanceKey, instance: Instance, events: &mut Vec<Event>) {
        self.instances.insert(key.clone(), instance.clone());
        events.push(Event::Set(key, Box::new(instance)));
    }

    pub fn gone(&mut self, key: &InstanceKey, events: &mut Vec<Event>) {
        self.instances.remove(key);
        self.strays.remove(key);
        self.maps.remove(key);
        events.push(Event::Gone(key.clone()));
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

    /// Makes progress: starting processes begin to serve, and engines rebuild running replicas, as `runs`
    /// says. Committed views are put into `views`.
    pub fn progress(&mut self, runs: &BTreeSet<String>, views: &mut Views, events: &mut Vec<Event>) {
        for (key, mut instance) in self.instances.clone() {
            let before = instance.clone();
            match &mut instance.detail {
                Detail::Replica(observed) if instance.state == InstanceState::Starting => {
                    instance.state = InstanceState::Running;
                    observed.addresses = vec![format!("tcp:{}:{}", self.name, key.name)];
                }
                Detail::Replica(_) => {}
                Detail::Engine(engine) => {
                    let attach = attach_of(engine);
                    let status = status_of(engine);
                    let takes = |name: &&String| !views.refuses(name, attach);
                    let usable: BTreeSet<String> = runs.iter().filter(takes).cloned().collect();
                    let here = |id: &ReplicaId| usable.contains(&format!("{}-{id}", key.name));
                    if instance.state == InstanceState::Starting {
                        if !start_up(status, &key.name, here, views) {
                            continue;
                        }
                        instance.state = InstanceState::Running;
                    } else {
                        lose_missing(status, &key.name, here, views);
                        start_serving(status, &key.name, here, views);
                    }
                    status.endpoint = Some(format!("/dev/longhorn/{}", key.name).into());
                    engine.size_bytes = self.sizes.get(&(key.clone(), attach)).copied();
                }
            }
            if instance != before {
                self.set(key, instance, events);
            }
        }
    }

    /// Fences engines older than `attach`: the replicas have seen a newer one, and an older one stops for
    /// good.
    pub fn fence(&mut self, volume: &str, newest: u64, events: &mut Vec<Event>) {
        let key = InstanceKey { kind: InstanceKind::Engine, name: volume.to_owned() };
        let Some(instance) = self.instances.get(&key) else { return };
        let Detail::Engine(engine) = &instance.detail else { return };
        if attach_of(engine) < newest && engine.phase() != Some(EnginePhase::Stopped) {
            let mut engine = engine.clone();
            status_of(&mut engine).phase = EnginePhase::Stopped;
            let message = Some("fenced by a newer engine".to_owned());
            let fenced = Instance { state: InstanceState::Error, message, detail: Detail::Engine(engine) };
            self.set(key, fenced, events);
        }
    }

    /// Removes one member from the view of an engine here. More than half continue, half ask the arbiter,
    /// fewer freeze.
    pub fn fail_member(&mut self, which: usize, views: &mut Views, events: &mut Vec<Event>) {
        let engines = self.instances.iter().filter(|(key, _)| key.kind == InstanceKind::Engine);
        let engines: Vec<_> = engines.map(|(key, instance)| (key.clone(), instance.clone())).collect();
        let Some((key, mut instance)) = engines.get(which % engines.len().max(1)).cloned() else { return };
        let Detail::Engine(engine) = &mut instance.detail else { return };
        let current = views.newest.get(&key.name).copied();
        let attach = attach_of(engine);
        let status = status_of(engine);
        let Some(current) = current.filter(|_| status.phase == EnginePhase::Serving) else { return };
        let members: Vec<ReplicaId> = current.members.iter().collect();
        let lost = members[which % members.len()];
        if members.len() < 2 || current.id.generation.attach != attach {
            return;
        }
        let target = next(current, current.members.without(lost));
        // A replica that refuses the engine stores no view of it.
        if target.members.iter().any(|id| views.refuses(&format!("{}-{id}", key.name), attach)) {
            return;
        }
        if let Some(member) = status.members.iter_mut().find(|member| member.replica == lost) {
            member.mode = MemberMode::Failed;
        }
        if 2 * target.members.len() > members.len() {
            views.commit(&key.name, target);
        } else {
            let honoured = ReplicaReport { committed: current, proposed: Vec::new() };
            status.grant_wanted = Some(GrantWanted { view: target, honoured, stored: target.members });
            status.phase = EnginePhase::Frozen;
        }
        self.set(key, instance, events);
    }
}

/// Returns the attachment of an engine. Those of the simulation all report one.
fn attach_of(engine: &ObservedEngine) -> u64 {
    engine.attach.unwrap_or_default()
}

/// Returns the status of an engine. Those of the simulation report one from their start on.
fn status_of(engine: &mut ObservedEngine) -> &mut EngineStatus {
    engine.reported.as_mut().unwrap()
}

fn next(view: View, members: Members) -> View {
    View { id: ViewId { number: view.id.number + 1, ..view.id }, members }
}

fn serve_with_grant(status: &mut EngineStatus, granted: View) {
    status.grant_wanted = None;
    status.phase = EnginePhase::Serving;
    debug_assert_eq!(granted.id.generation.attach, status.generation.attach);
}

/// Starts an engine with the running members of the newest view, if they are enough.
fn start_up(
    status: &mut EngineStatus,
    volume: &str,
    here: impl Fn(&ReplicaId) -> bool,
    views: &mut Views,
) -> bool {
    let all = Members::new(status.members.iter().map(|member| member.replica)).unwrap();
    let current = views.newest.get(volume).copied();
    let old = current.map_or(all, |current| current.members);
    let found = old.filter(|id| all.contains(id) && here(&id));
    if 2 * found.len() <= old.len() {
        return false;
    }
    let generation = status.generation;
    if current.is_some_and(|current| current.id.generation >= generation) {
        // A newer engine, or this one before its death: nothing new comes of it in this simulation.
        if current.is_some_and(|current| current.id.generation > generation) {
            return false;
        }
    } else {
        for id in all.iter().filter(|id| here(id)) {
            views.fence(&format!("{volume}-{id}"), generation.attach);
        }
        views.commit(volume, View { id: ViewId { generation, number: 1 }, members: found });
    }
    for member in &mut status.members {
        let id = member.replica;
        member.mode =
            if views.newest[volume].members.contains(id) { MemberMode::Member } else { MemberMode::Failed };
    }
    status.phase = EnginePhase::Serving;
    true
}

/// Removes members that do not run from the view. More than half continue, half ask the arbiter, fewer wait
/// for them. A replica that is being rebuilt and does not run any more has failed.
fn lose_missing(
    status: &mut EngineStatus,
    volume: &str,
    here: impl Fn(&ReplicaId) -> bool,
    views: &mut Views,
) {
    let current = views.newest.get(volume).copied();
    let Some(current) = current.filter(|_| status.phase == EnginePhase::Serving) else { return };
    if current.id.generation.attach != status.generation.attach {
        return;
    }
    for member in &mut status.members {
        let id = member.replica;
        if member.mode == MemberMode::Rebuilding && !here(&id) {
            member.mode = MemberMode::Failed;
        }
    }
    let target = next(current, current.members.filter(|id| here(&id)));
    let (left, all) = (target.members.len(), current.members.len());
    if left == all || 2 * left < all {
        return;
    }
    for member in &mut status.members {
        let id = member.replica;
        if current.members.contains(id) && !target.members.contains(id) {
            member.mode = MemberMode::Failed;
        }
    }
    if 2 * left > all {
        views.commit(volume, target);
    } else {
        let honoured = ReplicaReport { committed: current, proposed: Vec::new() };
        status.grant_wanted = Some(GrantWanted { view: target, honoured, stored: target.members });
        status.phase = EnginePhase::Frozen;
    }
}

/// Rebuilds replicas that are not members, until they are members.
fn start_serving(
    status: &mut EngineStatus,
    volume: &str,
    here: impl Fn(&ReplicaId) -> bool,
    views: &mut Views,
) {
    let Some(current) = views
        .newest
        .get(volume)
        .copied()
        .filter(|current| current.id.generation.attach == status.generation.attach)
    else {
        return;
    };
    if status.phase != EnginePhase::Serving {
        return;
    }
    let away = |member: &&mut MemberStatus| member.mode != MemberMode::Member && here(&member.replica);
    let Some(member) = status.members.iter_mut().find(away) else { return };
    if member.mode == MemberMode::Rebuilding {
        let grown = current.members.with(member.replica).unwrap();
        // All members of a view store it before it is committed.
        if grown.iter().all(|id| here(&id)) {
            member.mode = MemberMode::Member;
            views.commit(volume, next(current, grown));
        }
    } else {
        member.mode = MemberMode::Rebuilding;
    }
}
