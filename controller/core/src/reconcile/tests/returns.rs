//! Tests objects that a deletion has left behind, and nodes that come back in the middle of one.

use super::deletion::{all_agents, all_rounds, answers, failure, left_behind_engine, without_b};
use super::detach::{IN_USE, both, leaving_world};
use super::*;
use crate::objects::VolumeState;
use crate::observed::ReplicaView;

/// A volume of the name that is deleted again while it waits for the engine of the one before.
#[test]
fn a_volume_that_waits_for_its_name_is_deleted_at_once() {
    let (mut world, mut agents) = without_b();
    left_behind_engine(&mut world, &agents);
    let wanted = CreateVolume { name: "v".to_owned(), size_bytes: 1 << 20, ..CreateVolume::default() };
    let Ok(Change::Store(mut new)) = wanted.apply(&world, Secret::new([1; 32]), now()) else {
        panic!("the volume is refused")
    };
    new.metadata.deletion_timestamp = Some(now());
    world.insert(new.into());
    let calls = all_rounds(&mut world, &agents);
    assert!(world.volumes.is_empty() && calls.is_empty(), "{calls:#?} {:#?}", world.volumes);
    assert!(world.engines.contains_key("v"), "that of the volume before is still to be stopped");
    answers(&mut agents, "b");
    all_rounds(&mut world, &agents);
    all_rounds(&mut world, &agents);
    assert!(world.engines.is_empty());
}

/// The engine object that a volume had before its undeletion was removed when the volume was on its way to a
/// node.
#[test]
fn an_attachment_whose_engine_object_is_removed_late_gets_another_one() {
    let mut world = degraded_world();
    let mut volume = world.volumes["v"].clone();
    volume.status.state = VolumeState::Attaching;
    world.insert(volume.into());
    world.remove(&Key::new(Kind::Engine, "v"));
    let agents = all_agents(&world);
    act(&mut world, &agents, &Key::new(Kind::Volume, "v"));
    assert_eq!(world.engines["v"].spec.attach, 0);
    assert_eq!(world.volumes["v"].status.attach, ATTACH + 1, "no engine has that number yet");
    act(&mut world, &agents, &Key::new(Kind::Volume, "v"));
    assert_eq!(world.volumes["v"].status.attach, ATTACH + 1, "drawn once");
}

/// The engine has a greater number than its volume, as after a restore of one object. A single number fences
/// it.
#[test]
fn a_number_is_drawn_above_that_of_the_engine() {
    let (mut world, mut agents) = (leaving_world(), both());
    agents.get_mut(&NodeName::new("a").unwrap()).unwrap().link =
        Link::Down { since: now() - UNREACHABLE_AFTER, reason: "no answer".to_owned() };
    let mut engine = world.engines["v"].clone();
    engine.spec.attach = 40;
    engine.spec.desire_state = DesireState::Stopped;
    engine.status.current_state = CurrentState::Unknown;
    world.insert(engine.into());
    let mut volume = world.volumes["v"].clone();
    volume.status.state = VolumeState::Detaching;
    world.insert(volume.into());
    act(&mut world, &agents, &Key::new(Kind::Volume, "v"));
    assert_eq!(world.volumes["v"].status.attach, 41);
}

/// The node was absent from before the deletion until after the undeletion: its process has the former secret
/// of the volume.
#[test]
fn the_process_of_a_replica_that_was_left_behind_is_stopped_before_an_engine_is_told_of_it() {
    let mut world = degraded_world();
    let id = ReplicaId::from_random(1);
    let mut back = replica(id, "a", None);
    (back.status.stop_first, back.status.current_state) = (true, CurrentState::Unknown);
    back.status.rebind = true;
    world.insert(back.into());
    let mut agents = agents(None);
    let instance = InstanceKey::replica(&VolumeName::new("v").unwrap(), id);
    let view = ReplicaView { addresses: vec!["tcp:10.0.0.1:7000".to_owned()], ..ReplicaView::default() };
    let running =
        Instance { state: InstanceState::Running, message: String::new(), detail: Detail::Replica(view) };
    agents.get_mut(&NodeName::new("a").unwrap()).unwrap().instances.insert(instance.clone(), running);
    let key = Key::new(Kind::Replica, &instance.name);
    let status = |world: &World| world.replicas[&key.name].status.clone();
    // A stop that has failed is shown, and tried again.
    let failed = failure("StopInstance", "the process hangs");
    agents.get_mut(&NodeName::new("a").unwrap()).unwrap().failures.insert(instance.clone(), failed.clone());
    act(&mut world, &agents, &key);
    assert!(status(&world).stop_first && status(&world).addresses.is_empty());
    assert_eq!((status(&world).current_state, status(&world).message), (CurrentState::Error, failed.message));
    let actions = act(&mut world, &agents, &key);
    let is_stop = |action: &Action| matches!(action, Action::Call(_, AgentCall::StopInstance { instance: stopped, .. }) if *stopped == instance);
    let [stop, Action::Write(_)] = actions.as_slice() else { panic!("{actions:#?}") };
    assert!(is_stop(stop), "it is stored after the call: {actions:#?}");
    assert!(!status(&world).stop_first && status(&world).addresses.is_empty());
    // It is gone: another one is started, with the secret of now.
    let mut a = agents.get_mut(&NodeName::new("a").unwrap()).unwrap();
    a.instances.clear();
    a.failures.clear();
    drop(a);
    let actions = act(&mut world, &agents, &key);
    let is_start =
        |action: &Action| matches!(action, Action::Call(_, AgentCall::StartReplica { rebind: true, .. }));
    assert!(actions.iter().any(is_start), "its directory belongs to the secret of before: {actions:#?}");
    // One that nobody wants to run is stopped as well.
    let mut rests = replica(id, "a", None);
    rests.spec.desire_state = DesireState::Stopped;
    (rests.status.stop_first, rests.status.current_state) = (true, CurrentState::Stopped);
    world.insert(rests.into());
    assert!(act(&mut world, &agents, &key).iter().any(is_stop) && !status(&world).stop_first);
}

/// The volume has taken long to stop, and the last call about a replica, some time before, has failed.
#[test]
fn what_failed_before_a_deletion_leaves_no_replica_behind() {
    let (mut world, mut agents) = without_b();
    answers(&mut agents, "b");
    let key = InstanceKey::replica(&VolumeName::new("v").unwrap(), ReplicaId::from_random(2));
    let failed = failure("StartReplica", "cannot start replica: no space");
    agents.get_mut(&NodeName::new("b").unwrap()).unwrap().failures.insert(key.clone(), failed);
    let mut volume = world.volumes["v"].clone();
    volume.metadata.deletion_timestamp = Some(now() - UNREACHABLE_AFTER);
    world.insert(volume.into());
    act(&mut world, &agents, &Key::new(Kind::Volume, "v"));
    let actions = act(&mut world, &agents, &Key::new(Kind::Replica, &key.name));
    let deletes = |action: &Action| matches!(action, Action::Call(_, AgentCall::DeleteReplica { .. }));
    assert!(actions.iter().any(deletes) && world.replicas.get(&key.name).is_none(), "{actions:#?}");
}

/// The data waits for an engine on its node that cannot be stopped, and the message says so.
#[test]
fn what_is_left_behind_says_which_engine_it_waits_for() {
    let (mut world, mut agents) = without_b();
    all_rounds(&mut world, &agents);
    answers(&mut agents, "b");
    let engine = InstanceKey::engine(&VolumeName::new("v").unwrap());
    let detail = Detail::Engine(Box::new(EngineView { attach: ATTACH - 1, ..EngineView::default() }));
    let mut b = agents.get_mut(&NodeName::new("b").unwrap()).unwrap();
    b.instances
        .insert(engine.clone(), Instance { state: InstanceState::Running, message: String::new(), detail });
    b.failures.insert(engine, failure("StopInstance", "/dev/longhorn/v is in use"));
    drop(b);
    let [left] = world.replicas.values().cloned().collect::<Vec<_>>().try_into().unwrap();
    act(&mut world, &agents, &Key::new(Kind::Replica, &left.metadata.name));
    let message = world.replicas[&left.metadata.name].status.message.clone();
    assert!(message.contains("an engine of its deleted volume") && message.contains("in use"), "{message}");
}

/// The engine's node was given up, and answers again when the first data is gone.
#[test]
fn a_node_that_was_given_up_and_is_back_in_the_middle_of_a_deletion_changes_nothing() {
    let (mut world, mut agents) = without_b();
    let mut engine = world.engines["v"].clone();
    engine.spec.node_id = Some(NodeName::new("b").unwrap());
    engine.status.current_state = CurrentState::Unknown;
    world.insert(engine.into());
    let mut b = world.nodes["b"].clone();
    b.metadata.deletion_timestamp = Some(now());
    world.insert(b.into());
    // Until the first replica is to go.
    for _ in 0..3 {
        act(&mut world, &agents, &Key::new(Kind::Volume, "v"));
    }
    assert!(world.replicas.values().all(|replica| replica.metadata.is_deleting()), "{world:#?}");
    answers(&mut agents, "b");
    let key = InstanceKey::engine(&VolumeName::new("v").unwrap());
    let shown = EngineView { attach: ATTACH, phase: "serving".to_owned(), ..EngineView::default() };
    let detail = Detail::Engine(Box::new(shown));
    let mut b = agents.get_mut(&NodeName::new("b").unwrap()).unwrap();
    b.instances
        .insert(key.clone(), Instance { state: InstanceState::Running, message: String::new(), detail });
    b.failures.insert(key, failure("StopInstance", IN_USE));
    drop(b);
    let is_about_data =
        |call: &AgentCall| matches!(call, AgentCall::StopInstance { .. } | AgentCall::DeleteReplica { .. });
    for _ in 0..6 {
        for name in world.replicas.keys().cloned().collect::<Vec<_>>() {
            for action in act(&mut world, &agents, &Key::new(Kind::Replica, &name)) {
                assert!(!matches!(&action, Action::Call(_, call) if !is_about_data(call)), "{action:#?}");
            }
        }
        for action in act(&mut world, &agents, &Key::new(Kind::Volume, "v")) {
            assert!(!matches!(&action, Action::Call(..)), "{action:#?}");
        }
    }
    assert!(world.volumes.is_empty() && world.replicas.values().count() == 0, "{world:#?}");
    let engine = &world.engines["v"];
    assert!(engine.metadata.is_deleting(), "its process is stopped when its device is not in use any more");
    answers_stop(&mut agents, "b");
    all_rounds(&mut world, &agents);
    assert!(world.engines.is_empty());
}

/// Lets the stop succeed: the device there is not in use any more.
fn answers_stop(agents: &mut Agents, node: &str) {
    agents.get_mut(&NodeName::new(node).unwrap()).unwrap().failures.clear();
}

/// The process of a forgotten replica hangs on its dead disk for a while.
#[test]
fn a_process_on_a_disk_that_is_given_up_is_stopped_until_it_is_gone() {
    let mut world = degraded_world();
    let mut b = world.nodes["b"].clone();
    b.spec.disks.get_mut(DISK).unwrap().lost = true;
    world.insert(b.into());
    let mut agents = all_agents(&world);
    let volume = VolumeName::new("v").unwrap();
    let [known, forgotten, elsewhere] =
        [2, 8, 9].map(|id| InstanceKey::replica(&volume, ReplicaId::from_random(id)));
    for (key, disk) in [(&known, DISK), (&forgotten, DISK), (&elsewhere, "/var/lib/longhorn2")] {
        let directory = format!("{disk}/replicas/{}", key.name);
        let detail = Detail::Replica(ReplicaView { directory, ..ReplicaView::default() });
        let instance = Instance { state: InstanceState::Running, message: String::new(), detail };
        agents.get_mut(&NodeName::new("b").unwrap()).unwrap().instances.insert(key.clone(), instance);
    }
    let decide = |agents: &Agents| {
        let (world, settings) = (&world, Settings::default());
        let context = Context { world, agents, now: now(), random: [0; MAX_MEMBERS], settings };
        reconcile(&context, &Key::new(Kind::Node, "b"))
    };
    let decision = decide(&agents);
    let stop = AgentCall::StopInstance { instance: forgotten.clone(), attach: 0 };
    let calls: Vec<&Action> =
        decision.actions.iter().filter(|action| matches!(action, Action::Call(..))).collect();
    assert_eq!(calls, [&Action::Call(NodeName::new("b").unwrap(), stop)]);
    assert_eq!(decision.look_again, Some(GIVE_UP_CHECK), "a stop that fails is tried again");
    agents.get_mut(&NodeName::new("b").unwrap()).unwrap().instances.remove(&forgotten);
    assert!(!decide(&agents).actions.iter().any(|action| matches!(action, Action::Call(..))));
}
