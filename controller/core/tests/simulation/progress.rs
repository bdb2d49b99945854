//! The engines on simulated agents: they start, rebuild replicas, lose members and are fenced.

use std::collections::BTreeSet;

use shorthorn_controller_core::objects::{EnginePhase, MemberMode};
use shorthorn_controller_core::observed::{
    Detail, EngineStatus, Instance, InstanceKey, InstanceKind, InstanceState, MemberStatus,
};
use shorthorn_types::{Members, ReplicaId, View, ViewId};

use crate::agent::{Event, SimAgent, Views, attach_of, freeze, next, status_of};

impl SimAgent {
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
            freeze(status, current, target);
        }
        self.set(key, instance, events);
    }
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
        freeze(status, current, target);
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
