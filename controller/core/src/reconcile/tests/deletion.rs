//! Volumes and replicas that somebody has deleted, and that cannot go yet.

use super::detach::{both, leaving_world, rounds};
use super::*;
use crate::objects::VolumeState;
use crate::observed::GrantWanted;

fn delete(world: &mut World) {
    let mut volume = world.volumes["v"].clone();
    volume.metadata.deletion_timestamp = Some(now());
    world.insert(volume.into());
}

/// Has the engine on node a show something else.
fn engine_shows(agents: &mut Agents, change: impl Fn(&mut EngineView)) {
    let a = agents.by_node.get_mut(&NodeName::new("a").unwrap()).unwrap();
    for instance in a.instances.values_mut() {
        if let Detail::Engine(shown) = &mut instance.detail {
            change(shown);
        }
    }
}

/// The device of a volume is in use that was deleted: nobody who writes to it must lose more than he would
/// otherwise.
#[test]
fn a_volume_that_is_deleted_in_use_is_looked_after_until_it_can_be_stopped() {
    let (mut world, mut agents) = (leaving_world(), both());
    delete(&mut world);
    rounds(&mut world, &mut agents);
    let status = |world: &World| world.volumes["v"].status.clone();
    assert_eq!(
        (status(&world).state, status(&world).robustness),
        (VolumeState::Deleting, Robustness::Healthy)
    );
    let lost = ReplicaId::from_random(2);
    engine_shows(&mut agents, |shown| {
        shown.members.insert(lost, MemberStatus::of(MemberMode::Failed));
    });
    world.insert(replica(lost, "b", Some(now())).into());
    rounds(&mut world, &mut agents);
    assert_eq!(status(&world).robustness, Robustness::Degraded);
    let new = world.replicas.values().find(|replica| replica.spec.node_id.as_str() == "c").cloned();
    let new = new.expect("another one is made in its place");
    // It has come up: the one that it replaces goes, though the volume is to be deleted.
    let running = ReplicaStatus {
        current_state: CurrentState::Running,
        data: DataState::Present,
        addresses: vec!["tcp:10.0.0.3:10000".to_owned()],
        ..new.status.clone()
    };
    world.insert(Replica { status: running, ..new.clone() }.into());
    engine_shows(&mut agents, |shown| {
        shown.members.remove(&lost);
        shown.members.insert(new.spec.replica_id, MemberStatus::of(MemberMode::Member));
    });
    rounds(&mut world, &mut agents);
    let old = world.replicas.values().find(|replica| replica.spec.replica_id == lost).unwrap().clone();
    assert!(old.metadata.is_deleting(), "{old:#?}");
    let actions = act(&mut world, &agents, &Key::new(Kind::Replica, &old.metadata.name));
    let record = actions.iter().find_map(|action| match action {
        Action::Call(_, AgentCall::DeleteReplica { record, .. }) => Some(record.clone()),
        _ => None,
    });
    assert!(record.expect("its data goes").contains("\"withVolume\":false"), "{actions:#?}");
}

#[test]
fn a_volume_that_is_deleted_in_use_goes_on_with_the_grant_of_the_arbiter() {
    let (mut world, mut agents) = (leaving_world(), both());
    delete(&mut world);
    rounds(&mut world, &mut agents);
    let ids = [1, 2].map(ReplicaId::from_random);
    let view = |number, members: &[ReplicaId]| shorthorn_types::View {
        id: shorthorn_types::ViewId { generation: shorthorn_types::Generation::new(ATTACH, 1), number },
        members: shorthorn_types::Members::new(members.iter().copied()).unwrap(),
    };
    let target = view(2, &ids[..1]);
    let honoured = shorthorn_types::ReplicaReport { committed: view(1, &ids), proposed: Vec::new() };
    let wanted = GrantWanted { view: target, honoured, stored: target.members };
    engine_shows(&mut agents, |shown| {
        shown.phase = "frozen".to_owned();
        shown.grant_wanted = Some(Box::new(wanted.clone()));
    });
    let calls = rounds(&mut world, &mut agents);
    assert_eq!(world.volumes["v"].status.arbiter.granted(), Some(target));
    let told = |call: &AgentCall| matches!(call, AgentCall::Grant { view, .. } if **view == target);
    assert!(calls.iter().any(told), "{calls:#?}");
}

/// An engine that stops is not looked after any more, and nothing takes a place for it.
#[test]
fn a_volume_whose_engine_is_over_only_goes() {
    let (mut world, mut agents) = (leaving_world(), both());
    delete(&mut world);
    rounds(&mut world, &mut agents);
    let mut engine = world.engines["v"].clone();
    engine.status = EngineStatus { seen_attach: ATTACH, ..EngineStatus::default() };
    world.insert(engine.into());
    agents.by_node.get_mut(&NodeName::new("a").unwrap()).unwrap().instances.clear();
    rounds(&mut world, &mut agents);
    assert!(world.replicas.values().all(|replica| replica.metadata.is_deleting()));
    assert!(!gives_space_away(&world, &Key::new(Kind::Volume, "v")));
}

/// A volume with as many members as an engine can have, on as many nodes, and a free one.
fn full_world() -> World {
    let mut world = degraded_world();
    let mut volume = world.volumes["v"].clone();
    volume.spec.number_of_replicas = u32::try_from(MAX_MEMBERS).unwrap();
    volume.status.robustness = Robustness::Healthy;
    let ids = (11..=10 + MAX_MEMBERS as u64).map(ReplicaId::from_random);
    volume.status.first_members = ids.clone().collect();
    world.insert(volume.into());
    let mut engine = world.engines["v"].clone();
    engine.status.replica_mode_map.clear();
    for name in world.replicas.keys().cloned().collect::<Vec<_>>() {
        world.remove(&Key::new(Kind::Replica, name));
    }
    for id in ids {
        let name = format!("n{id}");
        world.insert(node(&name).into());
        world.insert(replica(id, &name, None).into());
        engine.status.replica_mode_map.insert(id, MemberStatus::of(MemberMode::Member));
    }
    world.insert(engine.into());
    world
}

/// Agents of all nodes.
fn all_agents(world: &World) -> Agents {
    let mut agents = agents(None);
    let view = agents.by_node.values().next().unwrap().clone();
    for name in world.nodes.keys() {
        let info = Some(AgentInfo { name: name.clone(), ..AgentInfo::default() });
        agents.by_node.insert(NodeName::new(name).unwrap(), AgentView { info, ..view.clone() });
    }
    agents
}

#[test]
fn a_deleted_replica_of_a_volume_with_as_many_as_can_be_leaves_before_its_substitute_is_made() {
    let mut world = full_world();
    let agents = all_agents(&world);
    let deleted = [12, 15].map(ReplicaId::from_random);
    for id in deleted {
        let mut replica =
            world.replicas.values().find(|replica| replica.spec.replica_id == id).unwrap().clone();
        replica.metadata.deletion_timestamp = Some(now());
        world.insert(replica.into());
    }
    let key = Key::new(Kind::Volume, "v");
    let stopped = |world: &World| -> Vec<ReplicaId> {
        let stopped = |replica: &&Replica| replica.spec.desire_state == DesireState::Stopped;
        world.replicas.values().filter(stopped).map(|replica| replica.spec.replica_id).collect()
    };
    for _ in 0..3 {
        act(&mut world, &agents, &key);
    }
    assert_eq!(stopped(&world), deleted[..1], "one at a time");
    let mut engine = world.engines["v"].clone();
    engine.status.replica_mode_map.insert(deleted[0], MemberStatus::of(MemberMode::Failed));
    world.insert(engine.into());
    for _ in 0..3 {
        act(&mut world, &agents, &key);
    }
    assert_eq!(stopped(&world), deleted[..1], "it does not come back, and the other one stays");
    let mut engine = world.engines["v"].clone();
    assert!(!engine.spec.replica_address_map.contains_key(&deleted[0]), "the engine is told");
    engine.status.map_revision = engine.spec.map_revision;
    engine.status.replica_mode_map.remove(&deleted[0]);
    world.insert(engine.into());
    let name = ReplicaSpec::instance_name(&VolumeName::new("v").unwrap(), deleted[0]);
    let actions = act(&mut world, &agents, &Key::new(Kind::Replica, &name));
    let goes = |action: &Action| matches!(action, Action::Call(_, AgentCall::DeleteReplica { .. }));
    assert!(actions.iter().any(goes), "{actions:#?}");
    let mut volume = world.volumes["v"].clone();
    volume.status.robustness = Robustness::Degraded;
    world.insert(volume.into());
    act(&mut world, &agents, &key);
    assert_eq!(world.replicas.values().count(), MAX_MEMBERS, "its substitute is made");
    assert!(stopped(&world).is_empty(), "the other one waits until that has everything");
}

/// A better place is no reason to have fewer copies for a while.
#[test]
fn a_replica_with_a_better_place_does_not_make_room() {
    let mut world = full_world();
    let agents = all_agents(&world);
    let mut moved = world.replicas.values().next().unwrap().clone();
    moved.spec.eviction_requested = true;
    world.insert(moved.into());
    for _ in 0..3 {
        act(&mut world, &agents, &Key::new(Kind::Volume, "v"));
    }
    assert!(world.replicas.values().all(|replica| replica.spec.desire_state == DesireState::Running));
}
