//! Tests objects that a deletion has left behind, and nodes that come back in the middle of one.

use super::deletion::{all_agents, all_rounds, answers, failure, left_behind_engine, without_b};
use super::detach::{IN_USE, both, leaving_cluster};
use super::*;
use crate::StartReplica;
use crate::objects::VolumeState;
use crate::observed::ObservedReplica;

/// A volume of the name that is deleted again while it waits for the engine of the one before.
#[test]
fn a_volume_that_waits_for_its_name_is_deleted_at_once() {
    let (mut cluster, mut agents) = without_b();
    left_behind_engine(&mut cluster, &agents);
    let wanted = CreateVolume { name: "v".to_owned(), size_bytes: 1 << 20, ..CreateVolume::default() };
    let Ok(Change::Store(mut new)) = wanted.apply(&cluster, Secret::new([1; 32]), now()) else {
        panic!("the volume is refused")
    };
    new.metadata.deletion_timestamp = Some(now());
    cluster.insert(new.into());
    let calls = all_rounds(&mut cluster, &agents);
    assert!(cluster.volumes.is_empty() && calls.is_empty(), "{calls:#?} {:#?}", cluster.volumes);
    assert!(cluster.engines.contains_key("v"), "that of the volume before is still to be stopped");
    answers(&mut agents, "b");
    all_rounds(&mut cluster, &agents);
    all_rounds(&mut cluster, &agents);
    assert!(cluster.engines.is_empty());
}

/// The engine object that a volume had before its undeletion was removed when the volume was on its way to a
/// node.
#[test]
fn an_attachment_whose_engine_object_is_removed_late_gets_another_one() {
    let mut cluster = degraded_cluster();
    let mut volume = cluster.volumes["v"].clone();
    volume.status.state = VolumeState::Attaching;
    cluster.insert(volume.into());
    cluster.remove(&Key::new(Kind::Engine, "v"));
    let agents = all_agents(&cluster);
    act(&mut cluster, &agents, &Key::new(Kind::Volume, "v"));
    assert_eq!(cluster.engines["v"].spec.attach, None);
    assert_eq!(cluster.volumes["v"].status.attach, Some(ATTACH + 1), "no engine has that number yet");
    act(&mut cluster, &agents, &Key::new(Kind::Volume, "v"));
    assert_eq!(cluster.volumes["v"].status.attach, Some(ATTACH + 1), "drawn once");
}

/// The engine has a greater number than its volume, as after a restore of one object. A single number fences
/// it.
#[test]
fn a_number_is_drawn_above_that_of_the_engine() {
    let (mut cluster, mut agents) = (leaving_cluster(), both());
    agents.get_mut(&NodeName::new("a").unwrap()).unwrap().link =
        AgentLink::Down { since: now() - UNREACHABLE_AFTER, reason: "no answer".to_owned() };
    let mut engine = cluster.engines["v"].clone();
    engine.spec.attach = Some(40);
    engine.spec.desire_state = DesireState::Stopped;
    engine.status.current_state = CurrentState::Unknown;
    cluster.insert(engine.into());
    let mut volume = cluster.volumes["v"].clone();
    volume.status.state = VolumeState::Detaching;
    cluster.insert(volume.into());
    act(&mut cluster, &agents, &Key::new(Kind::Volume, "v"));
    assert_eq!(cluster.volumes["v"].status.attach, Some(41));
}

/// The node was absent from before the deletion until after the undeletion: its process has the former secret
/// of the volume.
#[test]
fn the_process_of_a_left_behind_replica_is_stopped_before_an_engine_uses_it() {
    let mut cluster = degraded_cluster();
    let id = ReplicaId::from_random(1);
    let mut back = replica(id, "a", None);
    (back.status.stop_first, back.status.current_state) = (true, CurrentState::Unknown);
    back.status.rebind = true;
    cluster.insert(back.into());
    let mut agents = agents(None);
    let instance = InstanceKey::replica(&VolumeName::new("v").unwrap(), id);
    let observed =
        ObservedReplica { addresses: vec!["tcp:10.0.0.1:7000".to_owned()], ..ObservedReplica::default() };
    let running =
        Instance { state: InstanceState::Running, message: None, detail: Detail::Replica(observed) };
    agents.get_mut(&NodeName::new("a").unwrap()).unwrap().instances.insert(instance.clone(), running);
    let key = Key::new(Kind::Replica, &instance.name);
    let status = |cluster: &ClusterState| cluster.replicas[&key.name].status.clone();
    // A stop that has failed is shown, and tried again.
    let failed = failure("StopInstance", "the process hangs");
    agents.get_mut(&NodeName::new("a").unwrap()).unwrap().failures.insert(instance.clone(), failed.clone());
    act(&mut cluster, &agents, &key);
    assert!(status(&cluster).stop_first && status(&cluster).addresses.is_empty());
    assert_eq!(
        (status(&cluster).current_state, status(&cluster).message),
        (CurrentState::Error, failed.message)
    );
    let actions = act(&mut cluster, &agents, &key);
    let is_stop = |action: &Action| {
        matches!(
            action, Action::Call(_, AgentCall::StopInstance { instance: stopped, .. }) if *stopped == instance
        )
    };
    let [stop, Action::Write(_)] = actions.as_slice() else { panic!("{actions:#?}") };
    assert!(is_stop(stop), "it is stored after the call: {actions:#?}");
    assert!(!status(&cluster).stop_first && status(&cluster).addresses.is_empty());
    // It is gone: another one is started, with the secret of now.
    let mut a = agents.get_mut(&NodeName::new("a").unwrap()).unwrap();
    a.instances.clear();
    a.failures.clear();
    drop(a);
    let actions = act(&mut cluster, &agents, &key);
    let is_start = |action: &Action| {
        matches!(action, Action::Call(_, AgentCall::StartReplica(StartReplica { rebind: true, .. })))
    };
    assert!(actions.iter().any(is_start), "its directory belongs to the secret of before: {actions:#?}");
    // A process that is not wanted is stopped as well.
    let mut rests = replica(id, "a", None);
    rests.spec.desire_state = DesireState::Stopped;
    (rests.status.stop_first, rests.status.current_state) = (true, CurrentState::Stopped);
    cluster.insert(rests.into());
    assert!(act(&mut cluster, &agents, &key).iter().any(is_stop) && !status(&cluster).stop_first);
}

/// The volume has taken long to stop, and the last call about a replica, some time before, has failed.
#[test]
fn a_failure_before_the_deletion_leaves_no_replica_behind() {
    let (mut cluster, mut agents) = without_b();
    answers(&mut agents, "b");
    let key = InstanceKey::replica(&VolumeName::new("v").unwrap(), ReplicaId::from_random(2));
    let failed = failure("StartReplica", "cannot start replica: no space");
    agents.get_mut(&NodeName::new("b").unwrap()).unwrap().failures.insert(key.clone(), failed);
    let mut volume = cluster.volumes["v"].clone();
    volume.metadata.deletion_timestamp = Some(now() - UNREACHABLE_AFTER);
    cluster.insert(volume.into());
    act(&mut cluster, &agents, &Key::new(Kind::Volume, "v"));
    let actions = act(&mut cluster, &agents, &Key::new(Kind::Replica, &key.name));
    let deletes = |action: &Action| matches!(action, Action::Call(_, AgentCall::DeleteReplica { .. }));
    assert!(actions.iter().any(deletes) && cluster.replicas.get(&key.name).is_none(), "{actions:#?}");
}

/// The data waits for an engine on its node that cannot be stopped, and the message says so.
#[test]
fn a_replica_left_behind_names_the_engine_that_it_waits_for() {
    let (mut cluster, mut agents) = without_b();
    all_rounds(&mut cluster, &agents);
    answers(&mut agents, "b");
    let engine = InstanceKey::engine(&VolumeName::new("v").unwrap());
    let detail =
        Detail::Engine(Box::new(ObservedEngine { attach: Some(ATTACH - 1), ..ObservedEngine::default() }));
    let mut b = agents.get_mut(&NodeName::new("b").unwrap()).unwrap();
    b.instances.insert(engine.clone(), Instance { state: InstanceState::Running, message: None, detail });
    b.failures.insert(engine, failure("StopInstance", "/dev/longhorn/v is in use"));
    drop(b);
    let [left] = cluster.replicas.values().cloned().collect::<Vec<_>>().try_into().unwrap();
    act(&mut cluster, &agents, &Key::new(Kind::Replica, &left.metadata.name));
    let message = cluster.replicas[&left.metadata.name].status.message.clone();
    assert!(message.contains("an engine of its deleted volume") && message.contains("in use"), "{message}");
}

/// The engine's node was given up, and answers again when the first data is gone.
#[test]
fn a_node_that_was_given_up_and_is_back_in_the_middle_of_a_deletion_changes_nothing() {
    let (mut cluster, mut agents) = without_b();
    let mut engine = cluster.engines["v"].clone();
    engine.spec.node_id = Some(NodeName::new("b").unwrap());
    engine.status.current_state = CurrentState::Unknown;
    cluster.insert(engine.into());
    let mut b = cluster.nodes["b"].clone();
    b.metadata.deletion_timestamp = Some(now());
    cluster.insert(b.into());
    // Until the first replica is to be deleted.
    for _ in 0..3 {
        act(&mut cluster, &agents, &Key::new(Kind::Volume, "v"));
    }
    assert!(cluster.replicas.values().all(|replica| replica.metadata.is_deleting()), "{cluster:#?}");
    answers(&mut agents, "b");
    let key = InstanceKey::engine(&VolumeName::new("v").unwrap());
    let detail = Detail::Engine(Box::new(crate::example::engine_in(ATTACH, EnginePhase::Serving)));
    let mut b = agents.get_mut(&NodeName::new("b").unwrap()).unwrap();
    b.instances.insert(key.clone(), Instance { state: InstanceState::Running, message: None, detail });
    b.failures.insert(key, failure("StopInstance", IN_USE));
    drop(b);
    let is_about_data =
        |call: &AgentCall| matches!(call, AgentCall::StopInstance { .. } | AgentCall::DeleteReplica { .. });
    for _ in 0..6 {
        for name in cluster.replicas.keys().cloned().collect::<Vec<_>>() {
            for action in act(&mut cluster, &agents, &Key::new(Kind::Replica, &name)) {
                assert!(!matches!(&action, Action::Call(_, call) if !is_about_data(call)), "{action:#?}");
            }
        }
        for action in act(&mut cluster, &agents, &Key::new(Kind::Volume, "v")) {
            assert!(!matches!(&action, Action::Call(..)), "{action:#?}");
        }
    }
    assert!(cluster.volumes.is_empty() && cluster.replicas.values().count() == 0, "{cluster:#?}");
    let engine = &cluster.engines["v"];
    assert!(engine.metadata.is_deleting(), "its process is stopped when its device is not in use any more");
    answers_stop(&mut agents, "b");
    all_rounds(&mut cluster, &agents);
    assert!(cluster.engines.is_empty());
}

/// Lets the stop succeed: the device on that node is no longer in use.
fn answers_stop(agents: &mut Agents, node: &str) {
    agents.get_mut(&NodeName::new(node).unwrap()).unwrap().failures.clear();
}

/// The process of a forgotten replica hangs on its dead disk for a while.
#[test]
fn a_process_on_a_disk_that_is_given_up_is_stopped_until_it_is_gone() {
    let mut cluster = degraded_cluster();
    let mut b = cluster.nodes["b"].clone();
    b.spec.disks.get_mut(DISK).unwrap().lost = true;
    cluster.insert(b.into());
    let mut agents = all_agents(&cluster);
    let volume = VolumeName::new("v").unwrap();
    let [known, forgotten, elsewhere] =
        [2, 8, 9].map(|id| InstanceKey::replica(&volume, ReplicaId::from_random(id)));
    for (key, disk) in [(&known, DISK), (&forgotten, DISK), (&elsewhere, "/var/lib/longhorn2")] {
        let directory = Some(format!("{disk}/replicas/{}", key.name));
        let detail = Detail::Replica(ObservedReplica { directory, ..ObservedReplica::default() });
        let instance = Instance { state: InstanceState::Running, message: None, detail };
        agents.get_mut(&NodeName::new("b").unwrap()).unwrap().instances.insert(key.clone(), instance);
    }
    let decide = |agents: &Agents| {
        let (cluster, settings) = (&cluster, Settings::default());
        let context = Context { cluster, agents, now: now(), random: [0; MAX_MEMBERS], settings };
        reconcile(&context, &Key::new(Kind::Node, "b"))
    };
    let decision = decide(&agents);
    let stop = AgentCall::StopInstance { instance: forgotten.clone(), attach: None };
    let calls: Vec<&Action> =
        decision.actions.iter().filter(|action| matches!(action, Action::Call(..))).collect();
    assert_eq!(calls, [&Action::Call(NodeName::new("b").unwrap(), stop)]);
    assert_eq!(decision.requeue_after, Some(GIVE_UP_CHECK), "a stop that fails is tried again");
    agents.get_mut(&NodeName::new("b").unwrap()).unwrap().instances.remove(&forgotten);
    assert!(!decide(&agents).actions.iter().any(|action| matches!(action, Action::Call(..))));
}
