use super::*;
use crate::observed::ObservedReplica;

fn shown(cluster: &ClusterState, agents: &Agents) -> Volume {
    let context =
        Context { cluster, agents, now: now(), random: [7; MAX_MEMBERS], settings: Settings::default() };
    let actions = reconcile(&context, &Key::new(Kind::Volume, "v")).actions;
    let written = actions.iter().find_map(|action| match action {
        Action::Write(object) => match &**object {
            Object::Volume(volume) => Some(volume.clone()),
            _ => None,
        },
        _ => None,
    });
    written.unwrap_or_else(|| cluster.volumes["v"].clone())
}

#[test]
fn a_volume_shows_its_members_its_sizes_and_its_problem() {
    let (mut cluster, mut agents) = (degraded_cluster(), agents(None));
    let mut volume = cluster.volumes["v"].clone();
    volume.metadata.generation = Some(4);
    cluster.insert(volume.into());
    let name = VolumeName::new("v").unwrap();
    for (node, id, allocated_bytes) in [("a", 1, 3 << 29), ("b", 2, 1 << 30)] {
        let detail = Detail::Replica(ObservedReplica { allocated_bytes, ..ObservedReplica::default() });
        let instance = Instance { state: InstanceState::Running, message: None, detail };
        let key = InstanceKey::replica(&name, ReplicaId::from_random(id));
        agents.get_mut(&NodeName::new(node).unwrap()).unwrap().instances.insert(key, instance);
    }
    let volume = shown(&cluster, &agents);
    let display = &volume.status.display;
    let texts = [&display.size, &display.actual_size, &display.replicas, &display.reason];
    assert_eq!(texts, ["0.01Gi", "1.50Gi", "1/2", "ReplicaFailed"]);
    assert_eq!(volume.status.actual_size, Some(3 << 29), "of the largest replica");
    assert!(volume.status.conditions.iter().all(|condition| condition.observed_generation == Some(4)));
    cluster.insert(volume.clone().into());
    assert_eq!(shown(&cluster, &agents).status.display, volume.status.display);
}

/// All replicas are members, and requests wait for one of them.
#[test]
fn a_volume_whose_member_is_slow_is_degraded_and_names_it() {
    let mut cluster = degraded_cluster();
    let slow = ReplicaId::from_random(2);
    cluster.insert(replica(slow, "b", None).into());
    let mut volume = cluster.volumes["v"].clone();
    volume.status.robustness = Robustness::Healthy;
    cluster.insert(volume.into());
    let mut engine = cluster.engines["v"].clone();
    let record = MemberRecord::awaited("late by 9 s, answers PING".to_owned());
    engine.status.replica_mode_map.insert(slow, record);
    cluster.insert(engine.into());
    let agents = agents(None);
    let context = Context {
        cluster: &cluster,
        agents: &agents,
        now: now(),
        random: [7; MAX_MEMBERS],
        settings: Settings::default(),
    };
    let actions = reconcile(&context, &Key::new(Kind::Volume, "v")).actions;
    let event = actions.iter().find_map(|action| match action {
        Action::Emit(event) if event.reason == "Degraded" => Some(&event.message),
        _ => None,
    });
    assert!(
        event.is_some_and(|message| message.contains("is slow (late by 9 s, answers PING)")),
        "{actions:?}"
    );
    let volume = shown(&cluster, &agents);
    assert_eq!(volume.status.robustness, Robustness::Degraded);
    assert_eq!(volume.status.display.reason, "ReplicaSlow");
}

#[test]
fn nothing_is_shown_of_a_start_whose_steps_are_not_stored() {
    let mut cluster = degraded_cluster();
    let mut volume = cluster.volumes["v"].clone();
    volume.status.state = VolumeState::Attaching;
    volume.status.attach_started_at = Some(now());
    cluster.insert(volume.into());
    assert_eq!(shown(&cluster, &agents(None)).status.display, Default::default());
}

#[test]
fn an_engine_of_another_program_is_a_condition_until_it_is_replaced() {
    let (mut cluster, agents) = (degraded_cluster(), agents(None));
    let volume = shown(&cluster, &agents);
    assert!(volume.status.conditions.get(ConditionType::EngineCurrent).is_none(), "it always was current");
    cluster.insert(volume.into());
    // The comparison of an engine takes a moment: the last result stays until then.
    for (compared, needs_upgrade) in
        [(Some(true), true), (None, true), (Some(false), false), (None, false), (Some(true), true)]
    {
        let engine = cluster.engines["v"].clone();
        let status = StoredEngineStatus { needs_upgrade: compared, ..engine.status.clone() };
        cluster.insert(Engine { status, ..engine }.into());
        let volume = shown(&cluster, &agents);
        let current = volume.status.conditions.get(ConditionType::EngineCurrent).unwrap().clone();
        let reason = if needs_upgrade { "EngineNeedsUpgrade" } else { "InstalledProgram" };
        assert_eq!((current.status, current.reason.as_str()), (!needs_upgrade, reason));
        assert_eq!(current.message.contains("shorthornctl upgrade engines"), needs_upgrade);
        cluster.insert(volume.into());
    }
}
