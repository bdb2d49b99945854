//! Checks the invariants after every step, and the conditions at the end.

use shorthorn_controller_core::objects::{
    ConditionType, CurrentState, Engine, MemberMode, Object, Replica, Robustness, Volume, VolumeState,
};
use shorthorn_controller_core::observed::{Detail, InstanceKey, InstanceKind};
use shorthorn_controller_core::{AgentCall, NodeName, StartEngine, drain, given_up_places};
use shorthorn_types::{Generation, Members, View, ViewId};

use super::Sim;
use crate::agent::SimAgent;

impl Sim {
    pub(super) fn check_write(&self, object: &Object) {
        check_reason(object);
        match object {
            Object::Volume(volume) => {
                let stored = self.store.volumes.get(&volume.metadata.name);
                let attach = stored.and_then(|stored| stored.status.attach);
                assert!(volume.status.attach >= attach, "the attach number falls");
                // A salvage draws one for the fence, and its own.
                let is_salvage = stored.is_some_and(|stored| stored.status.salvage != volume.status.salvage)
                    && volume.status.pending_salvage().is_some();
                let next = attach.unwrap_or(0) + if is_salvage { 2 } else { 1 };
                assert!(volume.status.attach <= Some(next), "the attach number jumps");
                let stale = volume.status.arbiter.stale_since();
                assert_eq!(stale, None, "no store is ever restored from a backup here");
                if stored.is_some_and(|stored| stored.status.fenced_attach < volume.status.fenced_attach) {
                    self.check_fence(volume);
                }
                if let Some(stored) = stored {
                    let sizes = |volume: &Volume| (volume.spec.size, volume.current_size_bytes());
                    let ((size, current), (old_size, old_current)) = (sizes(volume), sizes(stored));
                    assert!(old_size <= size && old_current <= current, "{volume:#?} shrinks");
                    assert!(current <= size, "{volume:#?} has more than it should have");
                }
                let detached = volume.status.state == VolumeState::Detached;
                assert!(
                    !detached || !self.has_engine(volume),
                    "a volume is called detached with an engine there"
                );
            }
            Object::Engine(engine) => self.check_engine_write(engine),
            Object::Replica(replica) if replica.is_left_behind() => self.check_left_behind(replica),
            Object::Replica(_) | Object::Node(_) => {}
        }
    }

    /// Checks that only a volume that is deleted for good, and whose engines cannot write any more, leaves a
    /// replica behind.
    fn check_left_behind(&self, replica: &Replica) {
        let name = replica.spec.volume_name.as_str();
        let Some(volume) = self.store.volumes.get(name) else { return };
        assert!(volume.is_deleting() && volume.status.state == VolumeState::Deleting, "{volume:#?}");
        // The object of an engine is deleted once the engine has ended.
        let Some(engine) = self.store.engines.get(name) else { return };
        let is_over = engine.status.current_state == CurrentState::Stopped
            || volume.status.is_fenced(engine.spec.attach)
            || engine.spec.node_id.as_ref().is_some_and(|node| self.is_given_up(node));
        assert!(is_over, "{} is left behind by an engine that may write", replica.metadata.name);
    }

    /// Checks that an engine that is called fenced cannot have a write acknowledged, now or later.
    fn check_fence(&self, volume: &Volume) {
        let name = &volume.metadata.name;
        let Some(newest) = self.views.newest.get(name) else { return };
        let attach = newest.id.generation.attach;
        let node = self.store.engines.get(name).and_then(|engine| engine.spec.node_id.as_ref());
        // The operator says that this node never comes back, and that one replica is the volume.
        let is_given_up = node.is_some_and(|node| self.is_given_up(node)) && volume.status.salvage.is_some();
        if !volume.status.is_fenced(Some(attach)) || is_given_up {
            return;
        }
        // A replica that has lost its directory, also after it has refused, serves no engine any more.
        let is_open =
            |replica: &str| !self.views.refuses(replica, attach) && !self.lost_directories.contains(replica);
        let open = newest.members.filter(|id| is_open(&format!("{name}-{id}")));
        let is_granted = volume
            .status
            .arbiter
            .granted()
            .is_some_and(|granted| granted.id > newest.id && granted.members == open);
        let half = 2 * open.len() == newest.members.len() && !is_granted;
        assert!(
            2 * open.len() < newest.members.len() || half,
            "{name} is called fenced, and {open} of {newest} is not"
        );
    }

    /// Returns true if an engine exists that the controller knows and that may write.
    fn has_engine(&self, volume: &Volume) -> bool {
        let key = InstanceKey::engine(&volume.spec.volume_name);
        self.nodes.iter().any(|node| may_write(node, &key, volume.status.fenced_attach))
    }

    fn check_engine_write(&self, engine: &Engine) {
        let Some(stored) = self.store.engines.get(&engine.metadata.name) else { return };
        let same_map = engine.spec.replica_address_map == stored.spec.replica_address_map;
        let newer = engine.spec.map_revision > stored.spec.map_revision;
        assert!(newer || same_map, "other replicas under the same number");
        let Some(node) =
            stored.spec.node_id.as_ref().filter(|node| engine.spec.node_id.as_ref() != Some(*node))
        else {
            return;
        };
        let volume = &self.store.volumes[engine.spec.volume_name.as_str()].status;
        let harmless =
            stored.status.current_state == CurrentState::Stopped || volume.is_fenced(stored.spec.attach);
        assert!(harmless, "an engine moves that may run");
        let key = InstanceKey::engine(&engine.spec.volume_name);
        let node = self.nodes.iter().find(|other| other.name == *node).unwrap();
        assert!(
            !may_write(node, &key, volume.fenced_attach),
            "the engine of {} moves while it runs",
            key.name
        );
    }

    pub(super) fn check_call(&mut self, node: &NodeName, call: &AgentCall) {
        match call {
            AgentCall::StartEngine(start) => self.check_start(node, start),
            AgentCall::Grant { volume, attach, view } => self.check_grant(volume.as_str(), *attach, **view),
            AgentCall::UpdateReplicas { volume, replicas, .. } => {
                self.used.extend(replicas.keys().map(|id| format!("{volume}-{id}")));
            }
            AgentCall::SalvageReplica { volume, attach, .. } => {
                let stored = &self.store.volumes[volume.as_str()].status;
                let salvage = stored.salvage.as_ref().unwrap();
                assert!(
                    *attach <= salvage.attach && Some(salvage.attach) <= stored.attach,
                    "a salvage is not stored"
                );
                let key = InstanceKey::engine(volume);
                let served = self.nodes.iter().any(|node| may_write(node, &key, stored.fenced_attach));
                assert!(!served, "a volume is salvaged under its engine");
            }
            AgentCall::DeleteReplica { volume, .. } => {
                let replica = self.store.replicas.get(&call.instance().name);
                if replica.is_none_or(Replica::is_left_behind) {
                    // Its volume has gone before it, as only one does whose deletion has begun, with its
                    // engine over.
                    return;
                }
                let stored = &self.store.volumes[volume.as_str()];
                let engine = &self.store.engines[volume.as_str()];
                // A decision about a replaced one may be carried out after its volume is to be deleted.
                let harmless = engine.status.current_state == CurrentState::Stopped
                    || engine.spec.node_id.as_ref().is_some_and(|node| self.is_given_up(node))
                    || stored.status.is_fenced(engine.spec.attach);
                if !stored.metadata.is_deleting() || !harmless {
                    self.check_retirement(&call.instance().name, stored);
                }
            }
            AgentCall::FenceReplica { volume, attach, .. } => {
                let stored = self.store.volumes[volume.as_str()].status.attach;
                assert!(Some(*attach) <= stored, "replicas get attachment {attach} before it is stored");
            }
            AgentCall::StartReplica(_) => {
                let stored = self.store.replicas.get(&call.instance().name);
                let is_recorded = stored.is_none_or(|replica| !replica.was_never_started());
                assert!(
                    is_recorded,
                    "{} is started, and nothing stored says that it may be there",
                    call.instance()
                );
            }
            AgentCall::SetRebuildLimits { .. }
            | AgentCall::ExpandEngine { .. }
            | AgentCall::StopInstance { .. }
            | AgentCall::ForceStopEngine { .. } => {}
        }
    }

    fn check_start(&mut self, node: &NodeName, start: &StartEngine) {
        let StartEngine { volume, attach, replicas, .. } = start;
        let status = &self.store.volumes[volume.as_str()].status;
        let stored = status.attach;
        // A start that was decided before the salvage was requested has a lower number: that engine is
        // stopped before the replica gets the decision.
        assert!(
            status.pending_salvage().is_none_or(|salvage| *attach < salvage.attach),
            "an engine is started before its volume is salvaged"
        );
        assert!(Some(*attach) <= stored, "attachment {attach} is used before it is stored");
        let seen = self.store.engines[volume.as_str()].status.seen_attach;
        assert!(seen < Some(*attach), "a lost engine is started again under its number {attach}");
        let names: Vec<String> = replicas.keys().map(|id| format!("{volume}-{id}")).collect();
        assert!(!names.is_empty(), "an engine is started without replicas");
        self.used.extend(names.iter().cloned());
        let first = self.started.entry((volume.to_string(), *attach)).or_insert_with(|| node.clone());
        assert_eq!(*first, *node, "attachment {attach} of {volume} is used on two nodes");
    }

    /// Returns true if that node is lost, and the operator has said so.
    fn is_given_up(&self, node: &NodeName) -> bool {
        self.lost.is_some_and(|at| self.nodes[at].name == *node)
            && given_up_places::is_node_given_up(&self.store, node)
    }

    /// Checks that a replica is forgotten with its data only if its node is given up, and only if no engine
    /// needs it.
    pub(super) fn check_forgotten(&self, name: &str) {
        let replica = &self.store.replicas[name];
        assert!(self.is_given_up(&replica.spec.node_id), "{name} is forgotten with its directory there");
        let volume = self.store.volumes.get(replica.spec.volume_name.as_str());
        let newest = self.views.newest.get(replica.spec.volume_name.as_str());
        let in_view = newest.is_some_and(|newest| newest.members.contains(replica.spec.replica_id));
        let is_leaving =
            replica.is_left_behind() || volume.is_some_and(|volume| volume.metadata.is_deleting());
        assert!(is_leaving || !in_view, "{name} is forgotten and in view {newest:?}");
    }

    /// Returns true if the volume waits for a lost node that could not be given up.
    fn waits_for_lost(&self, volume: &Volume) -> bool {
        let Some(lost) = self.lost.map(|at| &self.nodes[at].name) else { return false };
        let engine = self.store.engines.get(&volume.metadata.name);
        let is_there = engine.is_some_and(|engine| engine.spec.node_id.as_ref() == Some(lost));
        let mut replicas = self.store.replicas_of(&volume.spec.volume_name);
        !self.is_given_up(lost) && (is_there || replicas.any(|replica| replica.spec.node_id == *lost))
    }

    /// Returns true if a node is lost, and less than half of the newest view is left: the volume needs a
    /// salvage.
    fn is_lost(&self, volume: &Volume) -> bool {
        let living = || self.nodes.iter().enumerate().filter(|(at, _)| self.lost != Some(*at));
        let holds = |id: &shorthorn_types::ReplicaId| {
            let name = format!("{}-{id}", volume.metadata.name);
            living().any(|(_, node)| node.directories.contains(&name))
        };
        let newest = self.views.newest.get(&volume.metadata.name);
        let few = |newest: &View| 2 * newest.members.iter().filter(holds).count() < newest.members.len();
        self.lost.is_some() && newest.is_some_and(few)
    }

    /// Returns true if the volume waits for the lost node. Too few replicas are left to refuse the engine
    /// there, or an operator has chosen a replica there and no other one since.
    fn is_stuck(&self, volume: &Volume) -> bool {
        let Some(gone) = self.lost.map(|at| &self.nodes[at].name) else { return false };
        let status = &volume.status;
        let is_chosen = |replica: &Replica| {
            let chosen = status.pending_salvage().map(|salvage| salvage.replica_id);
            chosen == Some(replica.spec.replica_id) && replica.spec.node_id == *gone
        };
        status.state == VolumeState::Detaching && status.current_node_id.as_ref() == Some(gone)
            || self.store.replicas_of(&volume.spec.volume_name).any(is_chosen)
    }

    /// Returns true if every member of the newest view has lost its data: the remaining data is old, and only
    /// an operator may choose it.
    fn has_lost_every_member(&self, volume: &Volume) -> bool {
        let name = &volume.metadata.name;
        let is_lost =
            |id: shorthorn_types::ReplicaId| self.lost_directories.contains(&format!("{name}-{id}"));
        self.views.newest.get(name.as_str()).is_some_and(|newest| newest.members.iter().all(is_lost))
    }

    /// Returns true if the replica that an operator has chosen is gone: another one has to be chosen.
    fn has_lost_choice(&self, volume: &Volume) -> bool {
        let chosen = volume.status.pending_salvage().map(|salvage| salvage.replica_id);
        let name = chosen.map(|id| format!("{}-{id}", volume.metadata.name));
        name.is_some_and(|name| self.lost_directories.contains(&name))
    }

    /// Checks that a grant is stored before it is sent, is of the attachment that is current then, and comes
    /// after all others.
    fn check_grant(&mut self, volume: &str, attach: u64, view: View) {
        let status = &self.store.volumes[volume].status;
        assert!(Some(attach) <= status.attach, "a grant for an attachment that is not stored");
        let stored = status.arbiter.granted().unwrap();
        assert!(view.id <= stored.id, "view {view} is sent and not stored");
        assert!(view.id.generation.attach <= attach, "an engine of {attach} gets view {view}");
        let granted = self.granted.entry(volume.to_owned()).or_default();
        for other in granted.iter() {
            assert!(*other == view || other.id != view.id, "two grants {other} and {view} of one number");
        }
        granted.push(view);
    }

    /// Checks that data is deleted only while enough others have everything, and it is not of the newest
    /// view.
    fn check_retirement(&self, name: &str, volume: &Volume) {
        let replica = &self.store.replicas[name];
        assert!(replica.metadata.is_deleting(), "{name} is deleted without a request");
        let newest = &self.views.newest[volume.metadata.name.as_str()];
        assert!(!newest.members.contains(replica.spec.replica_id), "{name} is deleted and in view {newest}");
        let key = InstanceKey::engine(&volume.spec.volume_name);
        for engine in self.nodes.iter().filter_map(|node| node.instances.get(&key)) {
            if let Detail::Engine(engine) = &engine.detail
                && engine.is_of(volume.status.attach)
            {
                let known = engine
                    .reported
                    .as_ref()
                    .and_then(|status| status.member(replica.spec.replica_id))
                    .is_some();
                assert!(!known, "{name} is deleted, and its engine knows it");
            }
        }
        let never_member = replica.status.healthy_at.is_none()
            && !volume.status.first_members.contains(&replica.spec.replica_id);
        let has_data = |id: &shorthorn_types::ReplicaId| {
            let name = format!("{}-{id}", volume.metadata.name);
            !self.deleted.contains(&name)
        };
        let holders = newest.members.iter().filter(has_data).count();
        assert!(holders >= 1, "the last replica {name} is deleted");
        let seen = self.store.engines[volume.metadata.name.as_str()].status.replica_mode_map.values();
        let members = seen.filter(|member| member.mode == MemberMode::Member).count();
        let enough = members >= volume.spec.number_of_replicas as usize;
        assert!(never_member || enough, "{name} is deleted before the volume is healthy");
    }

    /// Records a call that has worked.
    pub(super) fn record_done(&mut self, call: &AgentCall) {
        match call {
            AgentCall::DeleteReplica { .. } => drop(self.deleted.insert(call.instance().name)),
            // If an engine waited for the grant, the view is committed now.
            AgentCall::Grant { volume, view, .. }
                if self.views.newest.get(volume.as_str()).is_some_and(|newest| newest.id < view.id) =>
            {
                self.views.commit(volume.as_str(), **view);
            }
            AgentCall::SalvageReplica { volume, replica_id, attach, .. } => {
                let id = ViewId { generation: Generation::new(*attach, 0), number: 0 };
                let members = Members::new([*replica_id]).unwrap();
                let newest = self.views.newest.get(volume.as_str());
                if newest.is_none_or(|newest| newest.id.generation.attach < *attach) {
                    self.views.commit(volume.as_str(), View { id, members });
                }
            }
            _ => {}
        }
    }

    /// Returns the volumes that cannot leave their nodes, because their devices are in use, and that are
    /// served.
    pub(super) fn leaving(&self) -> Vec<(String, Robustness)> {
        let is_leaving = |volume: &&Volume| {
            let engine = &self.store.engines.get(&volume.metadata.name);
            volume.status.state == VolumeState::Detaching
                && !volume.metadata.is_deleting()
                && volume.status.pending_salvage().is_none()
                && engine.is_some_and(|engine| {
                    engine.status.is_serving() && engine.spec.attach == volume.status.attach
                })
        };
        let leaving = self.store.volumes.values().filter(is_leaving);
        leaving.map(|volume| (volume.metadata.name.clone(), volume.status.robustness)).collect()
    }

    /// Checks that a volume that cannot leave its node is repaired.
    pub fn check_used(&self) {
        if self.lost.is_some() || !self.lost_directories.is_empty() {
            return;
        }
        for (name, robustness) in self.leaving() {
            assert_eq!(robustness, Robustness::Healthy, "{:#?}", self.store.volumes[&name]);
            let members = self.views.newest[&name].members;
            let wanted = self.store.volumes[&name].spec.number_of_replicas as usize;
            assert!(members.len() >= wanted, "{name} has only {members}");
        }
    }

    /// Checks that a volume that is wanted again continues with its engine.
    pub fn check_back(&self) {
        for (name, attach) in &self.wanted_back {
            let status = &self.store.volumes[name].status;
            assert_eq!((status.state, status.attach), (VolumeState::Attached, *attach), "{name}");
        }
    }

    /// Checks that objects that were left behind are removed once their node is back or given up.
    fn check_nothing_left_behind(&self) {
        let waits = |node: &NodeName| {
            let lost = self.lost.map(|at| &self.nodes[at].name);
            lost == Some(node) && !self.is_given_up(node)
        };
        let replica =
            self.store.replicas.values().find(|one| one.is_left_behind() && !waits(&one.spec.node_id));
        assert!(replica.is_none(), "{replica:#?} is left behind for ever");
        let has_no_volume = |engine: &&Engine| {
            let is_gone = !self.store.volumes.contains_key(&engine.metadata.name);
            is_gone && !engine.spec.node_id.as_ref().is_some_and(waits)
        };
        let engine = self.store.engines.values().find(has_no_volume);
        assert!(engine.is_none(), "{engine:#?} is left behind for ever");
    }

    pub fn check_converged(&self) {
        self.check_nothing_left_behind();
        for volume in self.store.volumes.values() {
            if volume.metadata.is_deleting() {
                assert!(self.waits_for_lost(volume), "{} is never deleted", volume.metadata.name);
                continue;
            }
            if !self.is_lost(volume) {
                self.check_volume(volume);
            }
        }
        for (_, node) in self.nodes.iter().enumerate().filter(|(at, _)| self.lost != Some(*at)) {
            for key in node.instances.keys() {
                self.check_instance(node, key);
            }
            for name in &node.directories {
                let known = self.store.replicas.get(name);
                assert!(
                    known.is_some_and(|replica| replica.spec.node_id == node.name),
                    "{name} is left over"
                );
            }
        }
    }

    fn check_volume(&self, volume: &Volume) {
        let (spec, status) = (&volume.spec, &volume.status);
        let replicas = self.store.replicas_of(&spec.volume_name);
        let gone = self.lost.map(|at| &self.nodes[at].name);
        if self.is_stuck(volume) {
            return;
        }
        assert!(!volume.is_expanding() || spec.node_id.is_some(), "{volume:#?} never grows");
        let is_lost = |replica: &&Replica| {
            self.lost_directories.contains(&replica.metadata.name) || gone == Some(&replica.spec.node_id)
        };
        let lost = replicas.filter(is_lost).count();
        match &spec.node_id {
            None => {
                assert_eq!(status.state, VolumeState::Detached, "{volume:#?}");
                assert_eq!(status.current_node_id, None);
            }
            Some(_) if self.has_lost_every_member(volume) || self.has_lost_choice(volume) => {}
            Some(_) if lost > 0 && status.state == VolumeState::Attaching => {
                // It waits for a replica that is lost: before its engine was started, or in it.
                let engine = &self.store.engines[volume.metadata.name.as_str()];
                let launched = engine.spec.attach == status.attach || status.pending_salvage().is_some();
                assert!(launched || status.robustness == Robustness::Faulted, "{volume:#?}");
            }
            Some(node) => self.check_attached(volume, node),
        }
    }

    /// Checks a volume that has all that it needs: it serves with the wanted replicas.
    fn check_attached(&self, volume: &Volume, node: &NodeName) {
        let (spec, status) = (&volume.spec, &volume.status);
        let gone = self.lost.map(|at| &self.nodes[at].name);
        assert_eq!(status.state, VolumeState::Attached, "{volume:#?}");
        assert_eq!(status.current_node_id.as_ref(), Some(node));
        let key = InstanceKey::engine(&spec.volume_name);
        let place = self.nodes.iter().find(|other| other.name == *node).unwrap();
        assert!(place.instances.contains_key(&key), "{} has no engine", volume.metadata.name);
        assert!(!volume.is_expanding(), "{volume:#?} never grows");
        for replica in self.store.replicas_of(&spec.volume_name) {
            assert_eq!(replica.spec.volume_size, spec.size, "{replica:#?} is scheduled as something else");
        }
        let given = place.sizes[&(key.clone(), status.attach.unwrap())];
        assert_eq!(given, spec.size, "the engine of {} got {given}", volume.metadata.name);
        assert_eq!(status.robustness, Robustness::Healthy, "{volume:#?}\n{:#?}", self.store.replicas);
        let members = self.views.newest[volume.metadata.name.as_str()].members;
        assert!(members.len() >= spec.number_of_replicas as usize, "{members}");
        // A deleted replica on a node that could not be given up waits for that.
        let waits = |r: &Replica| gone == Some(&r.spec.node_id) && !self.is_given_up(&r.spec.node_id);
        let stale = self
            .store
            .replicas_of(&spec.volume_name)
            .find(|r| !members.contains(r.spec.replica_id) && !waits(r));
        assert!(stale.is_none(), "{stale:#?} is left over beside {members}");
        assert_eq!(members.len(), spec.number_of_replicas as usize, "{volume:#?} has more than it wants");
        let undrained = self
            .store
            .replicas_of(&spec.volume_name)
            .find(|replica| drain::is_evicted(&self.store, replica) && !waits(replica));
        assert!(undrained.is_none(), "{undrained:#?} has not left its node");
    }

    fn check_instance(&self, node: &SimAgent, key: &InstanceKey) {
        let volume = match key.kind {
            InstanceKind::Engine => self.store.volumes.get(&key.name),
            InstanceKind::Replica => {
                let replica = self.store.replicas.get(&key.name);
                replica.and_then(|replica| self.store.volumes.get(replica.spec.volume_name.as_str()))
            }
        };
        let wanted = volume.and_then(|volume| volume.spec.node_id.as_ref());
        match key.kind {
            InstanceKind::Engine => assert_eq!(wanted, Some(&node.name), "{key} is left over"),
            InstanceKind::Replica => {
                let is_stuck = volume.is_some_and(|volume| self.is_stuck(volume));
                assert!(wanted.is_some() || is_stuck, "{key} is left over");
            }
        }
    }
}

/// Checks that everything that is called unknown has the reason for that.
fn check_reason(object: &Object) {
    let has_reason = match object {
        Object::Volume(volume) if volume.status.robustness == Robustness::Unknown => explains(volume),
        Object::Replica(replica) if replica.status.current_state == CurrentState::Unknown => {
            !replica.status.message.is_empty()
        }
        Object::Engine(engine) if engine.status.current_state == CurrentState::Unknown => {
            engine.status.message.is_some()
        }
        _ => true,
    };
    assert!(has_reason, "unknown without a reason: {object:#?}");
}

/// Returns true if the conditions of a volume say why its robustness is unknown.
fn explains(volume: &Volume) -> bool {
    let says = |condition: ConditionType| {
        let condition = volume.status.conditions.get(condition);
        condition.is_some_and(|it| !it.status && !it.reason.is_empty() && !it.message.is_empty())
    };
    match volume.status.state {
        // A volume without places has no data yet.
        VolumeState::Creating => true,
        // Perhaps it never had a place.
        VolumeState::Deleting => says(ConditionType::Healthy) || says(ConditionType::Settled),
        _ => says(ConditionType::Healthy),
    }
}

/// Returns true if that engine is on the node, and no call that came late has made it, and it is not fenced.
fn may_write(node: &SimAgent, key: &InstanceKey, fenced_attach: Option<u64>) -> bool {
    let engine = node.instances.get(key).filter(|_| !node.strays.contains(key));
    engine.is_some_and(|engine| match &engine.detail {
        Detail::Engine(shown) => shown.attach > fenced_attach,
        Detail::Replica(_) => false,
    })
}
