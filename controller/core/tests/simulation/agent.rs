//! A simulated agent: instances that take time, directories, and a fence.

use std::collections::{BTreeMap, BTreeSet};

use shorthorn_controller_core::objects::{MemberMode, MemberStatus};
use shorthorn_controller_core::observed::{
    Detail, EngineView, GrantWanted, Instance, InstanceKey, InstanceKind, InstanceState, ReplicaView,
};
use shorthorn_controller_core::{AgentCall, NodeName};
use shorthorn_types::{Generation, Members, ReplicaId, ReplicaReport, View, ViewId};

/// What the replicas of a volume have stored, wherever they are: the newest view that is through.
pub type Views = BTreeMap<String, View>;

/// What an agent's stream says of one instance.
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
    /// Of the engines: the newest map of replicas and its number.
    pub maps: BTreeMap<InstanceKey, (u64, BTreeSet<ReplicaId>)>,
}

impl SimAgent {
    pub fn new(name: NodeName) -> SimAgent {
        SimAgent {
            name,
            instances: BTreeMap::new(),
            directories: BTreeSet::new(),
            device_used: false,
            strays: BTreeSet::new(),
            maps: BTreeMap::new(),
        }
    }

    /// Does what the call asks for. The events go to whoever listens.
    pub fn call(&mut self, call: &AgentCall, late: bool, events: &mut Vec<Event>) -> Result<(), String> {
        let key = call.instance();
        match call {
            AgentCall::StartReplica { create, .. } => {
                if !self.directories.contains(&key.name) {
                    if !create {
                        return Err("the directory is missing".to_owned());
                    }
                    self.directories.insert(key.name.clone());
                }
                let detail = Detail::Replica(ReplicaView::default());
                self.start(key, detail, late, events);
                Ok(())
            }
            AgentCall::StartEngine { attach, replicas, revision, continues, .. } => {
                if let Some(Detail::Engine(there)) = self.instances.get(&key).map(|i| &i.detail)
                    && there.attach != *attach
                {
                    let carried = *continues != 0 && (*continues..*attach).contains(&there.attach);
                    if !carried {
                        return Err("another engine is there".to_owned());
                    }
                    self.gone(&key, events);
                }
                if !self.instances.contains_key(&key) {
                    self.maps.insert(key.clone(), (*revision, replicas.keys().copied().collect()));
                }
                let members = replicas.keys().map(|id| (*id, MemberStatus::of(MemberMode::Connecting)));
                let view = EngineView {
                    attach: *attach,
                    phase: "starting".to_owned(),
                    members: members.collect(),
                    ..EngineView::default()
                };
                self.start(key, Detail::Engine(view), late, events);
                Ok(())
            }
            AgentCall::Grant { attach, view, .. } => self.grant(&key, *attach, **view, events),
            AgentCall::UpdateReplicas { attach, replicas, revision, .. } => {
                self.update_replicas(&key, *attach, replicas.keys().copied().collect(), *revision, events)
            }
            AgentCall::SetRebuildLimits { .. } => Ok(()),
            AgentCall::SalvageReplica { .. } => {
                if self.instances.contains_key(&key) {
                    return Err("the replica runs".to_owned());
                }
                if self.directories.contains(&key.name) {
                    Ok(())
                } else {
                    Err("there is no directory".to_owned())
                }
            }
            AgentCall::StopInstance { attach, .. } => self.stop(&key, *attach, events),
            AgentCall::DeleteReplica { .. } => {
                if self.instances.contains_key(&key) {
                    return Err("the replica runs".to_owned());
                }
                self.directories.remove(&key.name);
                Ok(())
            }
        }
    }

    fn start(&mut self, key: InstanceKey, detail: Detail, late: bool, events: &mut Vec<Event>) {
        if self.instances.contains_key(&key) {
            return;
        }
        if late {
            self.strays.insert(key.clone());
        }
        let instance = Instance { state: InstanceState::Starting, message: String::new(), detail };
        self.set(key, instance, events);
    }

    fn stop(&mut self, key: &InstanceKey, attach: u64, events: &mut Vec<Event>) -> Result<(), String> {
        let Some(instance) = self.instances.get(key) else { return Ok(()) };
        if let Detail::Engine(view) = &instance.detail {
            if attach != 0 && view.attach > attach {
                return Ok(());
            }
            if self.device_used && view.phase != "stopped" {
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

    /// The engine of that attachment, if it is here.
    fn engine_of(&self, key: &InstanceKey, attach: u64) -> Result<(Instance, EngineView), String> {
        match self.instances.get(key) {
            Some(instance) => match &instance.detail {
                Detail::Engine(view) if view.attach == attach => Ok((instance.clone(), view.clone())),
                _ => Err("another engine is there".to_owned()),
            },
            None => Err("there is no engine".to_owned()),
        }
    }

    fn grant(
        &mut self,
        key: &InstanceKey,
        attach: u64,
        granted: View,
        events: &mut Vec<Event>,
    ) -> Result<(), String> {
        let (mut instance, mut view) = self.engine_of(key, attach)?;
        if view.grant_wanted.as_ref().is_some_and(|wanted| wanted.view == granted) {
            go_on(&mut view, granted);
            instance.detail = Detail::Engine(view);
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
        let (mut instance, mut view) = self.engine_of(key, attach)?;
        if self.maps.get(key).is_some_and(|(newest, _)| *newest > revision) {
            return Ok(());
        }
        // One that is gone is given up, unless it is in the view.
        view.members.retain(|id, member| member.mode == MemberMode::Member || replicas.contains(id));
        for id in &replicas {
            view.members.entry(*id).or_insert_with(|| MemberStatus::of(MemberMode::Connecting));
        }
        self.maps.insert(key.clone(), (revision, replicas));
        instance.detail = Detail::Engine(view);
        self.set(key.clone(), instance, events);
        Ok(())
    }

    /// Everything that starts comes to serve, and engines bring replicas up that run, as `runs` says. What comes
    /// through is put into `views`.
    pub fn progress(&mut self, runs: &BTreeSet<String>, views: &mut Views, events: &mut Vec<Event>) {
        for (key, mut instance) in self.instances.clone() {
            let before = instance.clone();
            match &mut instance.detail {
                Detail::Replica(view) if instance.state == InstanceState::Starting => {
                    instance.state = InstanceState::Running;
                    view.addresses = vec![format!("tcp:{}:{}", self.name, key.name)];
                }
                Detail::Replica(_) => {}
                Detail::Engine(view) => {
                    let here = |id: &ReplicaId| runs.contains(&format!("{}-{id}", key.name));
                    if instance.state == InstanceState::Starting {
                        if !start_up(view, &key.name, here, views) {
                            continue;
                        }
                        instance.state = InstanceState::Running;
                    } else {
                        lose_missing(view, &key.name, here, views);
                        bring_up(view, &key.name, here, views);
                    }
                    view.endpoint = format!("/dev/longhorn/{}", key.name);
                }
            }
            if instance != before {
                self.set(key, instance, events);
            }
        }
    }

    /// The replicas have seen a newer engine than `attach - 1`: an older one stops for good.
    pub fn fence(&mut self, volume: &str, newest: u64, events: &mut Vec<Event>) {
        let key = InstanceKey { kind: InstanceKind::Engine, name: volume.to_owned() };
        let Some(instance) = self.instances.get(&key) else { return };
        let Detail::Engine(view) = &instance.detail else { return };
        if view.attach < newest && view.phase != "stopped" {
            let view = EngineView { phase: "stopped".to_owned(), ..view.clone() };
            let message = "fenced by a newer engine".to_owned();
            let fenced = Instance { state: InstanceState::Error, message, detail: Detail::Engine(view) };
            self.set(key, fenced, events);
        }
    }

    /// One member leaves the view of an engine here: more than half go on, half ask the arbiter, fewer freeze.
    pub fn fail_member(&mut self, which: usize, views: &mut Views, events: &mut Vec<Event>) {
        let engines = self.instances.iter().filter(|(key, _)| key.kind == InstanceKind::Engine);
        let engines: Vec<_> = engines.map(|(key, instance)| (key.clone(), instance.clone())).collect();
        let Some((key, mut instance)) = engines.get(which % engines.len().max(1)).cloned() else { return };
        let Detail::Engine(view) = &mut instance.detail else { return };
        let Some(current) = views.get(&key.name).copied().filter(|_| view.phase == "serving") else { return };
        let members: Vec<ReplicaId> = current.members.iter().collect();
        let lost = members[which % members.len()];
        if members.len() < 2 || current.id.generation.attach != view.attach {
            return;
        }
        let target = next(current, current.members.without(lost));
        if let Some(member) = view.members.get_mut(&lost) {
            member.mode = MemberMode::Failed;
        }
        if 2 * target.members.len() > members.len() {
            views.insert(key.name.clone(), target);
        } else {
            let honoured = ReplicaReport { committed: current, proposed: Vec::new() };
            view.grant_wanted =
                Some(Box::new(GrantWanted { view: target, honoured, stored: target.members }));
            view.phase = "frozen".to_owned();
        }
        self.set(key, instance, events);
    }
}

fn next(view: View, members: Members) -> View {
    View { id: ViewId { number: view.id.number + 1, ..view.id }, members }
}

fn go_on(view: &mut EngineView, granted: View) {
    view.grant_wanted = None;
    view.phase = "serving".to_owned();
    debug_assert_eq!(granted.id.generation.attach, view.attach);
}

/// An engine that starts takes the members of the newest view that run, if there are enough of them.
fn start_up(
    view: &mut EngineView,
    volume: &str,
    here: impl Fn(&ReplicaId) -> bool,
    views: &mut Views,
) -> bool {
    let all = Members::new(view.members.keys().copied()).unwrap();
    let current = views.get(volume).copied();
    let old = current.map_or(all, |current| current.members);
    let found = old.filter(|id| all.contains(id) && here(&id));
    if 2 * found.len() <= old.len() {
        return false;
    }
    let generation = Generation::new(view.attach, 0);
    if current.is_some_and(|current| current.id.generation >= generation) {
        // A newer engine, or this one before its death: nothing new comes of it in this simulation.
        if current.is_some_and(|current| current.id.generation > generation) {
            return false;
        }
    } else {
        views.insert(volume.to_owned(), View { id: ViewId { generation, number: 1 }, members: found });
    }
    for (id, member) in &mut view.members {
        member.mode =
            if views[volume].members.contains(*id) { MemberMode::Member } else { MemberMode::Failed };
    }
    view.phase = "serving".to_owned();
    true
}

/// Members that do not run leave the view: more than half go on, half ask the arbiter, fewer wait for them. One that is
/// being rebuilt and does not run any more has failed.
fn lose_missing(view: &mut EngineView, volume: &str, here: impl Fn(&ReplicaId) -> bool, views: &mut Views) {
    let Some(current) = views.get(volume).copied().filter(|_| view.phase == "serving") else { return };
    if current.id.generation.attach != view.attach {
        return;
    }
    for (id, member) in &mut view.members {
        if member.mode == MemberMode::Rebuilding && !here(id) {
            member.mode = MemberMode::Failed;
        }
    }
    let target = next(current, current.members.filter(|id| here(&id)));
    let (left, all) = (target.members.len(), current.members.len());
    if left == all || 2 * left < all {
        return;
    }
    for (id, member) in &mut view.members {
        if current.members.contains(*id) && !target.members.contains(*id) {
            member.mode = MemberMode::Failed;
        }
    }
    if 2 * left > all {
        views.insert(volume.to_owned(), target);
    } else {
        let honoured = ReplicaReport { committed: current, proposed: Vec::new() };
        view.grant_wanted = Some(Box::new(GrantWanted { view: target, honoured, stored: target.members }));
        view.phase = "frozen".to_owned();
    }
}

/// Replicas that are not members are rebuilt, then they join.
fn bring_up(view: &mut EngineView, volume: &str, here: impl Fn(&ReplicaId) -> bool, views: &mut Views) {
    let Some(current) =
        views.get(volume).copied().filter(|current| current.id.generation.attach == view.attach)
    else {
        return;
    };
    if view.phase != "serving" {
        return;
    }
    let waiting = view.members.iter_mut().find(|(id, member)| member.mode != MemberMode::Member && here(id));
    let Some((id, member)) = waiting else { return };
    if member.mode == MemberMode::Rebuilding {
        member.mode = MemberMode::Member;
        views.insert(volume.to_owned(), next(current, current.members.with(*id).unwrap()));
    } else {
        member.mode = MemberMode::Rebuilding;
    }
}
