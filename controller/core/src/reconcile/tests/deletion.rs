//! Tests deleted volumes and replicas whose removal has to wait.

use super::detach::{both, leaving_cluster, rounds};
use super::*;
use crate::objects::VolumeState;
use crate::observed::{self, GrantWanted, MemberStatus};

fn delete(cluster: &mut ClusterState) {
    let mut volume = cluster.volumes["v"].clone();
    volume.metadata.deletion_timestamp = Some(now());
    cluster.insert(volume.into());
}

/// Has the engine on node a show something else.
fn engine_shows(agents: &mut Agents, change: impl Fn(&mut observed::EngineStatus)) {
    let mut a = agents.get_mut(&NodeName::new("a").unwrap()).unwrap();
    for instance in a.instances.values_mut() {
        if let Detail::Engine(shown) = &mut instance.detail {
            change(shown.reported.as_mut().unwrap());
        }
    }
}

/// The device of a deleted volume is in use: its user must not lose more than otherwise.
#[test]
fn a_volume_that_is_deleted_in_use_is_repaired_until_it_can_be_stopped() {
    let (mut cluster, mut agents) = (leaving_cluster(), both());
    delete(&mut cluster);
    rounds(&mut cluster, &mut agents);
    let status = |cluster: &ClusterState| cluster.volumes["v"].status.clone();
    assert_eq!(
        (status(&cluster).state, status(&cluster).robustness),
        (VolumeState::Deleting, Robustness::Healthy)
    );
    let lost = ReplicaId::from_random(2);
    engine_shows(&mut agents, |shown| {
        shown.members.retain(|member| member.replica != lost);
        shown.members.push(MemberStatus::of(lost, MemberMode::Failed));
    });
    cluster.insert(replica(lost, "b", Some(now())).into());
    rounds(&mut cluster, &mut agents);
    assert_eq!(status(&cluster).robustness, Robustness::Degraded);
    let new = cluster.replicas.values().find(|replica| replica.spec.node_id.as_str() == "c").cloned();
    let new = new.expect("another one is made in its place");
    // The new replica is a member: the replaced one is removed, although the volume is to be deleted.
    let running = StoredReplicaStatus {
        current_state: CurrentState::Running,
        data: DataState::Present,
        addresses: vec!["tcp:10.0.0.3:10000".to_owned()],
        ..new.status.clone()
    };
    cluster.insert(Replica { status: running, ..new.clone() }.into());
    engine_shows(&mut agents, |shown| {
        shown.members.retain(|member| member.replica != lost);
        shown.members.push(MemberStatus::of(new.spec.replica_id, MemberMode::Member));
    });
    rounds(&mut cluster, &mut agents);
    let old = cluster.replicas.values().find(|replica| replica.spec.replica_id == lost).unwrap().clone();
    assert!(old.metadata.is_deleting(), "{old:#?}");
    let actions = act(&mut cluster, &agents, &Key::new(Kind::Replica, &old.metadata.name));
    let record = actions.iter().find_map(|action| match action {
        Action::Call(_, AgentCall::DeleteReplica { record, .. }) => Some(record.clone()),
        _ => None,
    });
    assert!(record.expect("the data is deleted").contains("\"withVolume\":false"), "{actions:#?}");
}

#[test]
fn a_volume_that_is_deleted_in_use_continues_with_the_grant_of_the_arbiter() {
    let (mut cluster, mut agents) = (leaving_cluster(), both());
    delete(&mut cluster);
    rounds(&mut cluster, &mut agents);
    let ids = [1, 2].map(ReplicaId::from_random);
    let view = |number, members: &[ReplicaId]| shorthorn_types::View {
        id: shorthorn_types::ViewId { generation: shorthorn_types::Generation::new(ATTACH, 1), number },
        members: shorthorn_types::Members::new(members.iter().copied()).unwrap(),
    };
    let target = view(2, &ids[..1]);
    let honoured = shorthorn_types::ReplicaReport { committed: view(1, &ids), proposed: Vec::new() };
    let wanted = GrantWanted { view: target, honoured, stored: target.members };
    engine_shows(&mut agents, |shown| {
        shown.phase = EnginePhase::Frozen;
        shown.grant_wanted = Some(wanted.clone());
    });
    let calls = rounds(&mut cluster, &mut agents);
    assert_eq!(cluster.volumes["v"].status.arbiter.granted(), Some(target));
    let is_grant = |call: &AgentCall| matches!(call, AgentCall::Grant { view, .. } if **view == target);
    assert!(calls.iter().any(is_grant), "{calls:#?}");
}

/// An engine that stops is not looked after any more, and nothing takes a place for it.
#[test]
fn a_deleted_volume_without_an_engine_is_not_repaired() {
    let (mut cluster, mut agents) = (leaving_cluster(), both());
    delete(&mut cluster);
    rounds(&mut cluster, &mut agents);
    let mut engine = cluster.engines["v"].clone();
    engine.status = StoredEngineStatus { seen_attach: Some(ATTACH), ..StoredEngineStatus::default() };
    cluster.insert(engine.into());
    agents.get_mut(&NodeName::new("a").unwrap()).unwrap().instances.clear();
    rounds(&mut cluster, &mut agents);
    assert!(cluster.replicas.values().all(|replica| replica.metadata.is_deleting()));
    assert!(!gives_space_away(&cluster, &Key::new(Kind::Volume, "v")));
}

/// Returns a volume with as many members as an engine can have, on as many nodes, and a free one.
fn full_cluster() -> ClusterState {
    let mut cluster = degraded_cluster();
    let mut volume = cluster.volumes["v"].clone();
    volume.spec.number_of_replicas = u32::try_from(MAX_MEMBERS).unwrap();
    volume.status.robustness = Robustness::Healthy;
    let ids = (11..=10 + MAX_MEMBERS as u64).map(ReplicaId::from_random);
    volume.status.first_members = ids.clone().collect();
    cluster.insert(volume.into());
    let mut engine = cluster.engines["v"].clone();
    engine.status.replica_mode_map.clear();
    for name in cluster.replicas.keys().cloned().collect::<Vec<_>>() {
        cluster.remove(&Key::new(Kind::Replica, name));
    }
    for id in ids {
        let name = format!("n{id}");
        cluster.insert(node(&name).into());
        cluster.insert(replica(id, &name, None).into());
        engine.status.replica_mode_map.insert(id, MemberRecord::of(MemberMode::Member));
    }
    cluster.insert(engine.into());
    cluster
}

/// Agents of all nodes.
pub(super) fn all_agents(cluster: &ClusterState) -> Agents {
    let mut agents = agents(None);
    let agent = agents.by_node().values().next().unwrap().clone();
    for name in cluster.nodes.keys() {
        let info = Some(AgentInfo { name: name.clone(), ..AgentInfo::default() });
        agents.insert(NodeName::new(name).unwrap(), ObservedAgent { info, ..agent.clone() });
    }
    agents
}

#[test]
fn a_volume_at_the_maximum_of_replicas_removes_one_before_it_adds_another() {
    let mut cluster = full_cluster();
    let agents = all_agents(&cluster);
    let deleted = [12, 15].map(ReplicaId::from_random);
    for id in deleted {
        let mut replica =
            cluster.replicas.values().find(|replica| replica.spec.replica_id == id).unwrap().clone();
        replica.metadata.deletion_timestamp = Some(now());
        cluster.insert(replica.into());
    }
    let key = Key::new(Kind::Volume, "v");
    let stopped = |cluster: &ClusterState| -> Vec<ReplicaId> {
        let stopped = |replica: &&Replica| replica.spec.desire_state == DesireState::Stopped;
        cluster.replicas.values().filter(stopped).map(|replica| replica.spec.replica_id).collect()
    };
    for _ in 0..3 {
        act(&mut cluster, &agents, &key);
    }
    assert_eq!(stopped(&cluster), deleted[..1], "one at a time");
    let mut engine = cluster.engines["v"].clone();
    engine.status.replica_mode_map.insert(deleted[0], MemberRecord::of(MemberMode::Failed));
    cluster.insert(engine.into());
    for _ in 0..3 {
        act(&mut cluster, &agents, &key);
    }
    assert_eq!(stopped(&cluster), deleted[..1], "it does not come back, and the other one stays");
    let mut engine = cluster.engines["v"].clone();
    assert!(!engine.spec.replica_address_map.contains_key(&deleted[0]), "the engine gets the change");
    engine.status.map_revision = engine.spec.map_revision;
    engine.status.replica_mode_map.remove(&deleted[0]);
    cluster.insert(engine.into());
    let name = ReplicaSpec::instance_name(&VolumeName::new("v").unwrap(), deleted[0]);
    let actions = act(&mut cluster, &agents, &Key::new(Kind::Replica, &name));
    let is_deletion = |action: &Action| matches!(action, Action::Call(_, AgentCall::DeleteReplica { .. }));
    assert!(actions.iter().any(is_deletion), "{actions:#?}");
    let mut volume = cluster.volumes["v"].clone();
    volume.status.robustness = Robustness::Degraded;
    cluster.insert(volume.into());
    act(&mut cluster, &agents, &key);
    assert_eq!(cluster.replicas.values().count(), MAX_MEMBERS, "its substitute is made");
    assert!(stopped(&cluster).is_empty(), "the other one waits until that has everything");
}

/// A better place is not a reason to have fewer copies for a while.
#[test]
fn a_replica_with_a_better_place_does_not_make_room() {
    let mut cluster = full_cluster();
    let agents = all_agents(&cluster);
    let mut moved = cluster.replicas.values().next().unwrap().clone();
    moved.spec.eviction_requested = true;
    cluster.insert(moved.into());
    for _ in 0..3 {
        act(&mut cluster, &agents, &Key::new(Kind::Volume, "v"));
    }
    assert!(cluster.replicas.values().all(|replica| replica.spec.desire_state == DesireState::Running));
}

/// Returns a volume that is to be deleted, whose replica on b is on a node that does not answer.
pub(super) fn without_b() -> (ClusterState, Agents) {
    let mut cluster = leaving_cluster();
    let mut volume = cluster.volumes["v"].clone();
    volume.metadata.deletion_timestamp = Some(now());
    volume.status.state = VolumeState::Deleting;
    cluster.insert(volume.into());
    let mut engine = cluster.engines["v"].clone();
    engine.spec.desire_state = DesireState::Stopped;
    engine.status = StoredEngineStatus { seen_attach: Some(ATTACH), ..StoredEngineStatus::default() };
    cluster.insert(engine.into());
    let mut agents = agents(None);
    let since = now() - UNREACHABLE_AFTER;
    agents.get_mut(&NodeName::new("b").unwrap()).unwrap().link =
        AgentLink::Down { since, reason: "no answer".to_owned() };
    (cluster, agents)
}

/// Runs some rounds of all reconcilers but those of nodes; returns the calls.
pub(super) fn all_rounds(cluster: &mut ClusterState, agents: &Agents) -> Vec<AgentCall> {
    let mut calls = Vec::new();
    for _ in 0..6 {
        let keys: Vec<Key> = cluster.keys().filter(|key| key.kind != Kind::Node).collect();
        for key in keys {
            calls.extend(act(cluster, agents, &key).into_iter().filter_map(|action| match action {
                Action::Call(_, call) => Some(call),
                _ => None,
            }));
        }
    }
    calls
}

pub(super) fn failure(call: &'static str, message: &str) -> CallFailure {
    CallFailure { call, message: message.to_owned() }
}

pub(super) fn answers(agents: &mut Agents, node: &str) {
    agents.get_mut(&NodeName::new(node).unwrap()).unwrap().link = AgentLink::Synced;
}

#[test]
fn a_deletion_does_not_wait_for_a_node_that_does_not_answer() {
    let (mut cluster, mut agents) = without_b();
    all_rounds(&mut cluster, &agents);
    assert!(cluster.volumes.is_empty() && cluster.engines.is_empty(), "{cluster:#?}");
    let [left] = cluster.replicas.values().cloned().collect::<Vec<_>>().try_into().unwrap();
    assert!(left.is_left_behind() && left.spec.node_id.as_str() == "b", "{left:#?}");
    assert_eq!(
        cluster.replicas_of(&left.spec.volume_name).count(),
        0,
        "another volume of the name has nothing of it"
    );
    // The node is back: the data is moved to the trash, with the record from the deletion of its volume.
    answers(&mut agents, "b");
    let engine = InstanceKey::engine(&left.spec.volume_name);
    let detail =
        Detail::Engine(Box::new(ObservedEngine { attach: Some(ATTACH - 1), ..ObservedEngine::default() }));
    let instance = Instance { state: InstanceState::Running, message: None, detail };
    agents.get_mut(&NodeName::new("b").unwrap()).unwrap().instances.insert(engine.clone(), instance);
    let calls = all_rounds(&mut cluster, &agents);
    let stop = AgentCall::StopInstance { instance: engine, attach: Some(ATTACH) };
    assert!(calls.contains(&stop), "the engine that it had before: {calls:#?}");
    let is_deletion = |call: &&AgentCall| {
        matches!(call, AgentCall::DeleteReplica { record, .. }
        if record.contains("\"withVolume\":true") && Some(record) == left.status.deletion_record.as_ref())
    };
    assert_eq!(calls.iter().filter(is_deletion).count(), 1, "{calls:#?}");
    assert_eq!(cluster.replicas.values().count(), 0);
}

/// The disk is not mounted, for instance.
#[test]
fn a_deletion_does_not_wait_for_a_disk_that_cannot_be_used() {
    let (mut cluster, mut agents) = without_b();
    answers(&mut agents, "b");
    let id = InstanceKey::replica(&VolumeName::new("v").unwrap(), ReplicaId::from_random(2));
    agents
        .get_mut(&NodeName::new("b").unwrap())
        .unwrap()
        .failures
        .insert(id, failure("DeleteReplica", "the disk is not mounted"));
    // Each call to it fails.
    for round in 0..12 {
        if round == 6 {
            assert!(cluster.volumes.contains_key("v"), "it is tried for a while");
            let mut volume = cluster.volumes["v"].clone();
            volume.metadata.deletion_timestamp = Some(now() - UNREACHABLE_AFTER);
            cluster.insert(volume.into());
        }
        let keys: Vec<Key> = cluster.keys().filter(|key| key.kind != Kind::Node).collect();
        for key in keys {
            let is_of_b = cluster.replicas.get(&key.name).is_some_and(|one| one.spec.node_id.as_str() == "b");
            let before = cluster.replicas.get(&key.name).cloned();
            act(&mut cluster, &agents, &key);
            if is_of_b && cluster.replicas.get(&key.name).is_none() {
                cluster.insert(before.unwrap().into());
            }
        }
    }
    assert!(cluster.volumes.is_empty() && cluster.engines.is_empty());
    let left: Vec<_> = cluster.replicas.values().collect();
    assert!(left.len() == 1 && left[0].is_left_behind() && left[0].status.message.contains("not mounted"));
}

#[test]
fn a_replica_of_a_living_volume_is_not_left_behind() {
    let (mut cluster, agents) = without_b();
    let mut volume = cluster.volumes["v"].clone();
    (volume.metadata.deletion_timestamp, volume.status.state) = (None, VolumeState::Detached);
    volume.spec.node_id = None;
    cluster.insert(volume.into());
    for replica in cluster.replicas.values().cloned().collect::<Vec<_>>() {
        let mut replica = replica;
        replica.metadata.deletion_timestamp = Some(now());
        cluster.insert(replica.into());
    }
    all_rounds(&mut cluster, &agents);
    assert_eq!(cluster.replicas.values().filter(|replica| !replica.is_left_behind()).count(), 2);
}

#[test]
fn replicas_left_behind_are_removed_with_a_node_that_is_given_up() {
    let (mut cluster, agents) = without_b();
    all_rounds(&mut cluster, &agents);
    let mut b = cluster.nodes["b"].clone();
    b.metadata.deletion_timestamp = Some(now());
    cluster.insert(b.into());
    act(&mut cluster, &agents, &Key::new(Kind::Node, "b"));
    assert!(cluster.nodes.contains_key("b"), "its data is there");
    all_rounds(&mut cluster, &agents);
    assert_eq!(cluster.replicas.values().count(), 0);
}

/// The engine was on b, and replicas refuse it. Its process is stopped when the node is back, and its name is
/// not free before.
#[test]
fn an_engine_that_is_fenced_is_left_behind_until_its_process_is_stopped() {
    let (mut cluster, mut agents) = without_b();
    left_behind_engine(&mut cluster, &agents);
    let wanted = CreateVolume { name: "v".to_owned(), size_bytes: 1 << 20, ..CreateVolume::default() };
    let made = wanted.apply(&cluster, Secret::new([1; 32]), now()).unwrap();
    let Change::Store(new) = made else { panic!("{made:?}") };
    cluster.insert(new.into());
    all_rounds(&mut cluster, &agents);
    let settled_condition = |cluster: &ClusterState| {
        let settled_condition = cluster.volumes["v"].status.conditions.get(ConditionType::Settled).cloned();
        settled_condition.map(|settled_condition| settled_condition.reason)
    };
    assert_eq!(settled_condition(&cluster).as_deref(), Some("NameInUse"));
    answers(&mut agents, "b");
    let calls = all_rounds(&mut cluster, &agents);
    let stops = |call: &AgentCall| matches!(call, AgentCall::StopInstance { attach: Some(ATTACH), .. });
    assert!(calls.iter().any(stops), "{calls:#?}");
    all_rounds(&mut cluster, &agents);
    assert_eq!(cluster.engines["v"].spec.attach, None, "that of the new volume");
}

/// Equals the case of a node that is given up, but the agent answers: the disk below is gone.
#[test]
fn replicas_of_a_disk_that_is_given_up_are_replaced_and_forgotten() {
    let mut cluster = degraded_cluster();
    let lost = ReplicaId::from_random(2);
    cluster.insert(replica(lost, "b", None).into());
    let mut b = cluster.nodes["b"].clone();
    let disk = b.spec.disks.get_mut(DISK).unwrap();
    (disk.lost, disk.eviction_requested, disk.allow_scheduling) = (true, true, false);
    cluster.insert(b.into());
    let agents = all_agents(&cluster);
    let volume = Key::new(Kind::Volume, "v");
    // The node is unreachable since just now, and its replica is not waited for.
    act(&mut cluster, &agents, &volume);
    let mut engine = cluster.engines["v"].clone();
    assert!(!engine.spec.replica_address_map.contains_key(&lost), "the engine gets the change");
    engine.status.map_revision = engine.spec.map_revision;
    engine.status.replica_mode_map.remove(&lost);
    cluster.insert(engine.into());
    act(&mut cluster, &agents, &volume);
    let name = ReplicaSpec::instance_name(&VolumeName::new("v").unwrap(), lost);
    let actions = act(&mut cluster, &agents, &Key::new(Kind::Replica, &name));
    assert!(cluster.replicas.get(&name).is_none(), "{actions:#?}");
    let deletes = |action: &Action| matches!(action, Action::Call(_, AgentCall::DeleteReplica { .. }));
    assert!(!actions.iter().any(deletes), "nothing is asked of the disk: {actions:#?}");
    let stop =
        actions.iter().position(|action| matches!(action, Action::Call(_, AgentCall::StopInstance { .. })));
    let removed = actions.iter().position(|action| matches!(action, Action::Remove(..)));
    assert!(removed < stop, "a process that hangs holds nothing up: {actions:#?}");
    act(&mut cluster, &agents, &volume);
    let places: Vec<&str> = cluster.replicas.values().map(|replica| replica.spec.node_id.as_str()).collect();
    assert!(places.len() == 2 && !places.contains(&"b"), "{places:?}");
}

#[test]
fn a_member_on_a_disk_that_is_given_up_stays_until_it_is_replaced() {
    let mut cluster = degraded_cluster();
    let kept = ReplicaId::from_random(1);
    let mut a = cluster.nodes["a"].clone();
    a.spec.disks.get_mut(DISK).unwrap().lost = true;
    cluster.insert(a.into());
    let agents = all_agents(&cluster);
    for _ in 0..3 {
        act(&mut cluster, &agents, &Key::new(Kind::Volume, "v"));
    }
    let replica = cluster.replicas.values().find(|replica| replica.spec.replica_id == kept).unwrap();
    assert!(!replica.metadata.is_deleting(), "it may be the only one that has everything");
}

/// Deletes the volume of [`without_b`], whose engine is on b and fenced.
pub(super) fn left_behind_engine(cluster: &mut ClusterState, agents: &Agents) {
    let mut engine = cluster.engines["v"].clone();
    engine.spec.node_id = Some(NodeName::new("b").unwrap());
    engine.status.current_state = CurrentState::Unknown;
    cluster.insert(engine.into());
    let mut volume = cluster.volumes["v"].clone();
    (volume.status.fenced_attach, volume.status.attach) = (Some(ATTACH), Some(ATTACH + 1));
    cluster.insert(volume.into());
    all_rounds(cluster, agents);
    assert!(cluster.volumes.is_empty() && cluster.engines.contains_key("v"), "{cluster:#?}");
}
