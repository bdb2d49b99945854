//! Tests volumes that are detached, and the treatment of those that cannot be detached yet.

use super::*;
use crate::example::status_of_engine;
use crate::objects::{EnginePhase, Robustness, StoredEngineStatus, Volume, VolumeState};
use crate::observed::{self, MemberStatus};
use crate::requests::{attach, detach, detach_by_force};

pub(super) const IN_USE: &str = "stop: the device is in use: mounted at /mnt";

/// Returns [`degraded_cluster`], with both replicas as members, and the volume not wanted any more.
pub(super) fn leaving_cluster() -> ClusterState {
    let mut cluster = degraded_cluster();
    let lost = ReplicaId::from_random(2);
    cluster.insert(replica(lost, "b", None).into());
    let mut volume = cluster.volumes["v"].clone();
    volume.spec.node_id = None;
    volume.status.robustness = Robustness::Healthy;
    cluster.insert(volume.into());
    let mut engine = cluster.engines["v"].clone();
    engine.status.replica_mode_map.insert(lost, MemberRecord::of(MemberMode::Member));
    engine.status.served_attach = Some(ATTACH);
    engine.status.endpoint = Some("/dev/longhorn/v".to_owned());
    cluster.insert(engine.into());
    cluster
}

/// Agents of a, b and c; a shows the engine with these members.
pub(super) fn agents_with(members: &[(u64, MemberMode)]) -> Agents {
    let mut agents = agents(None);
    let mut free = agents.by_node().values().next().unwrap().clone();
    free.info = Some(AgentInfo { name: "c".to_owned(), ..AgentInfo::default() });
    agents.insert(NodeName::new("c").unwrap(), free);
    let member =
        |(number, mode): &(u64, MemberMode)| MemberStatus::of(ReplicaId::from_random(*number), *mode);
    let status = observed::EngineStatus {
        endpoint: Some("/dev/longhorn/v".into()),
        members: members.iter().map(member).collect(),
        ..status_of_engine(ATTACH, EnginePhase::Serving)
    };
    let detail = Detail::Engine(Box::new(ObservedEngine::of(ATTACH, status)));
    let instance = Instance { state: InstanceState::Running, message: None, detail };
    let key = InstanceKey::engine(&VolumeName::new("v").unwrap());
    agents.get_mut(&NodeName::new("a").unwrap()).unwrap().instances.insert(key, instance);
    agents
}

pub(super) fn both() -> Agents {
    agents_with(&[(1, MemberMode::Member), (2, MemberMode::Member)])
}

fn refuse(agents: &mut Agents) {
    let mut a = agents.get_mut(&NodeName::new("a").unwrap()).unwrap();
    let failure = CallFailure { call: "StopInstance", message: IN_USE.to_owned() };
    a.failures.insert(InstanceKey::engine(&VolumeName::new("v").unwrap()), failure);
}

/// Runs some rounds of the reconcilers of the volume and its engine, with every stop of the engine refused.
/// Returns the calls.
pub(super) fn rounds(cluster: &mut ClusterState, agents: &mut Agents) -> Vec<AgentCall> {
    let mut calls = Vec::new();
    for _ in 0..6 {
        for key in [Key::new(Kind::Volume, "v"), Key::new(Kind::Engine, "v")] {
            let context = Context {
                cluster,
                agents,
                now: now() + REPLICA_REPLACE_AFTER,
                random: [7; MAX_MEMBERS],
                settings: Settings::default(),
            };
            for action in reconcile(&context, &key).actions {
                match action {
                    Action::Write(object) => cluster.insert(*object),
                    Action::Call(_, AgentCall::StopInstance { .. }) => {
                        refuse(agents);
                        break;
                    }
                    Action::Call(_, call) => calls.push(call),
                    Action::Remove(..) | Action::Emit(_) => {}
                }
            }
        }
    }
    calls
}

fn volume(cluster: &ClusterState) -> &Volume {
    &cluster.volumes["v"]
}

fn settled_condition(cluster: &ClusterState) -> String {
    volume(cluster).status.conditions.get(ConditionType::Settled).unwrap().message.clone()
}

fn want(cluster: &mut ClusterState, node: Option<&str>) {
    let mut volume = volume(cluster).clone();
    volume.spec.node_id = node.map(|node| NodeName::new(node).unwrap());
    cluster.insert(volume.into());
}

#[test]
fn a_volume_in_use_stays_attached_if_it_is_wanted_there_again() {
    let (mut cluster, mut agents) = (leaving_cluster(), both());
    rounds(&mut cluster, &mut agents);
    assert_eq!(volume(&cluster).status.state, VolumeState::Detaching);
    assert!(settled_condition(&cluster).contains("mounted at /mnt"), "{}", settled_condition(&cluster));
    assert_eq!(volume(&cluster).status.robustness, Robustness::Healthy);
    want(&mut cluster, Some("a"));
    rounds(&mut cluster, &mut agents);
    let status = &volume(&cluster).status;
    assert_eq!((status.state, status.attach), (VolumeState::Attached, Some(ATTACH)), "{status:#?}");
    let engine = &cluster.engines["v"];
    assert_eq!(engine.spec.desire_state, DesireState::Running);
    assert!(engine.status.is_serving() && engine.status.stop_refused.is_none(), "{:#?}", engine.status);
}

/// Most replicas were destroyed: no process can release a device whose requests wait for ever.
#[test]
fn a_volume_that_is_detached_by_force_stops_its_engine_although_the_device_is_in_use() {
    let (mut cluster, mut agents) = (leaving_cluster(), both());
    rounds(&mut cluster, &mut agents);
    let stops = |cluster: &ClusterState| {
        let calls = decide(cluster, &agents).into_iter().find_map(|action| match action {
            Action::Call(_, call) => Some(call),
            _ => None,
        });
        calls.expect("the stop is repeated")
    };
    assert!(matches!(stops(&cluster), AgentCall::StopInstance { attach: Some(ATTACH), .. }));
    let Change::Store(forced) = detach_by_force(&cluster, "v").unwrap() else { panic!("it was not forced") };
    cluster.insert(forced.into());
    assert!(matches!(detach_by_force(&cluster, "v"), Ok(Change::AlreadySo(_))));
    assert!(matches!(detach(&cluster, "v"), Ok(Change::AlreadySo(_))), "the force stays");
    assert!(matches!(stops(&cluster), AgentCall::ForceStopEngine { attach: Some(ATTACH), .. }));

    let attached = |cluster: &ClusterState, node: &str| {
        let mut cluster = cluster.clone();
        let metadata = Metadata::new(node, now());
        cluster.insert(Node { metadata, spec: NodeSpec::default(), status: NodeStatus::default() }.into());
        let Change::Store(volume) = attach(&cluster, "v", node).unwrap() else { panic!("not attached") };
        volume.spec.is_detached_by_force(Some(ATTACH))
    };
    assert!(attached(&cluster, "c"), "the engine on a has to end first");
    assert!(!attached(&cluster, "a"), "the engine continues");
    // A later attachment has not been detached by force.
    assert!(!volume(&cluster).spec.is_detached_by_force(Some(ATTACH + 1)));
}

#[test]
fn a_volume_that_is_wanted_elsewhere_continues_its_detach() {
    let (mut cluster, mut agents) = (leaving_cluster(), both());
    rounds(&mut cluster, &mut agents);
    want(&mut cluster, Some("c"));
    rounds(&mut cluster, &mut agents);
    assert_eq!(volume(&cluster).status.state, VolumeState::Detaching);
    assert_eq!(cluster.engines["v"].spec.desire_state, DesireState::Stopped);
}

/// The engine has ended, has never been seen, is to make room for a salvage, or its node does not answer.
#[test]
fn an_engine_that_cannot_continue_is_stopped_before_the_next_attachment() {
    type Change = fn(&mut ClusterState, &mut Agents);
    let a = || NodeName::new("a").unwrap();
    let cases: [(&str, Change); 4] = [
        ("ended", |_, agents| {
            let mut a = agents.get_mut(&NodeName::new("a").unwrap()).unwrap();
            a.instances.values_mut().for_each(|instance| instance.state = InstanceState::Stopped);
        }),
        ("lost", |cluster, _| {
            let engine = cluster.engines["v"].clone();
            let status = StoredEngineStatus { lost_attach: Some(ATTACH), ..engine.status.clone() };
            cluster.insert(Engine { status, ..engine }.into());
        }),
        ("salvage", |cluster, _| {
            let mut volume = cluster.volumes["v"].clone();
            volume.status.salvage = Some(crate::objects::Salvage {
                replica_id: ReplicaId::from_random(1),
                attach: ATTACH,
                decided_at: now(),
                by: String::new(),
                reason: String::new(),
                losses: String::new(),
                done: false,
            });
            cluster.insert(volume.into());
        }),
        ("silent", |_, agents| {
            let link = AgentLink::Down { since: now() - UNREACHABLE_AFTER, reason: "no answer".to_owned() };
            agents.get_mut(&NodeName::new("a").unwrap()).unwrap().link = link;
        }),
    ];
    for (case, change) in cases {
        let (mut cluster, mut agents) = (leaving_cluster(), both());
        rounds(&mut cluster, &mut agents);
        want(&mut cluster, Some(a().as_str()));
        change(&mut cluster, &mut agents);
        act(&mut cluster, &agents, &Key::new(Kind::Volume, "v"));
        assert_ne!(volume(&cluster).status.state, VolumeState::Attached, "{case}");
        assert_eq!(cluster.engines["v"].spec.desire_state, DesireState::Stopped, "{case}");
    }
}

/// The replicas may refuse the engine by now: the next one takes the device over, under the number that was
/// drawn.
#[test]
fn a_volume_whose_engine_may_be_fenced_continues_with_the_next_engine() {
    let (mut cluster, mut agents) = (leaving_cluster(), both());
    rounds(&mut cluster, &mut agents);
    let mut drawn = volume(&cluster).clone();
    drawn.status.attach = Some(ATTACH + 1);
    drawn.status.attached_since = Some(1);
    cluster.insert(drawn.into());
    for (id, node) in [(1, "a"), (2, "b")] {
        let mut running = replica(ReplicaId::from_random(id), node, None);
        running.status.addresses = vec![format!("tcp:{node}:10000")];
        cluster.insert(running.into());
    }
    want(&mut cluster, Some("a"));
    let calls = rounds(&mut cluster, &mut agents);
    assert_eq!(volume(&cluster).status.state, VolumeState::Attaching);
    let takes_over = |call: &AgentCall| {
        matches!(
            call, AgentCall::StartEngine(StartEngine { attach, continues: Some(1), .. })
                if *attach == ATTACH + 2
        )
    };
    assert!(calls.iter().any(takes_over), "{calls:#?}");
}

#[test]
fn a_replica_that_is_lost_while_its_volume_cannot_leave_is_replaced() {
    let (mut cluster, mut agents) = (leaving_cluster(), both());
    rounds(&mut cluster, &mut agents);
    let mut agents = {
        let mut fewer = agents_with(&[(1, MemberMode::Member), (2, MemberMode::Failed)]);
        for (node, old) in agents.by_node() {
            fewer.get_mut(node).unwrap().failures.extend(old.failures.clone());
        }
        fewer
    };
    cluster.insert(replica(ReplicaId::from_random(2), "b", Some(now())).into());
    let calls = rounds(&mut cluster, &mut agents);
    let status = &volume(&cluster).status;
    assert_eq!((status.state, status.robustness), (VolumeState::Detaching, Robustness::Degraded));
    let new = cluster.replicas.values().find(|replica| replica.spec.node_id.as_str() == "c");
    let new = new.expect("another one is made").clone();
    // The engine learns of the replica once its process runs.
    assert!(!calls.iter().any(|call| tells_of(call, new.spec.replica_id)), "{calls:#?}");
    let status = StoredReplicaStatus {
        current_state: CurrentState::Running,
        addresses: vec!["tcp:10.0.0.3:10000".to_owned()],
        ..new.status.clone()
    };
    cluster.insert(Replica { status, ..new.clone() }.into());
    let calls = rounds(&mut cluster, &mut agents);
    let notified = calls.iter().filter(|call| tells_of(call, new.spec.replica_id)).count();
    assert_eq!(notified, 1, "{calls:#?}");
}

pub(super) fn tells_of(call: &AgentCall, id: ReplicaId) -> bool {
    matches!(call, AgentCall::UpdateReplicas { replicas, .. } if replicas.contains_key(&id))
}

/// Neither of its replicas has stopped, and one is on a disk that hangs.
#[test]
fn a_volume_is_detached_as_soon_as_its_engine_is_stopped_or_fenced() {
    for fenced in [false, true] {
        let mut cluster = leaving_cluster();
        let mut engine = cluster.engines["v"].clone();
        engine.spec.desire_state = DesireState::Stopped;
        engine.status.current_state = if fenced { CurrentState::Unknown } else { CurrentState::Stopped };
        cluster.insert(engine.into());
        let mut leaving = volume(&cluster).clone();
        leaving.status.state = VolumeState::Detaching;
        leaving.status.fenced_attach = fenced.then_some(ATTACH);
        cluster.insert(leaving.into());
        let key = Key::new(Kind::Volume, "v");
        let agents = agents(None);
        act(&mut cluster, &agents, &key);
        let status = &volume(&cluster).status;
        assert_eq!((status.state, &status.current_node_id), (VolumeState::Detached, &None));
        assert_eq!(status.conditions.get(ConditionType::Healthy).unwrap().reason, "NotAttached");
        assert!(
            settled_condition(&cluster).contains("replicas are being stopped"),
            "{}",
            settled_condition(&cluster)
        );
        assert!(cluster.replicas.values().all(|replica| replica.spec.desire_state == DesireState::Stopped));
        // A request that was not made before a crash is made by the next run.
        cluster.insert(replica(ReplicaId::from_random(2), "b", None).into());
        act(&mut cluster, &agents, &key);
        assert!(cluster.replicas.values().all(|replica| replica.spec.desire_state == DesireState::Stopped));
        for id in [1, 2] {
            let mut stopped = replica(ReplicaId::from_random(id), "b", None);
            stopped.spec.desire_state = DesireState::Stopped;
            stopped.status.current_state = CurrentState::Stopped;
            cluster.insert(stopped.into());
        }
        act(&mut cluster, &agents, &key);
        assert!(volume(&cluster).status.conditions.is_true(ConditionType::Settled));
    }
}

#[test]
fn replicas_are_not_stopped_if_the_next_engine_needs_them() {
    let mut cluster = leaving_cluster();
    want(&mut cluster, Some("c"));
    let mut engine = cluster.engines["v"].clone();
    engine.spec.desire_state = DesireState::Stopped;
    engine.status.current_state = CurrentState::Stopped;
    cluster.insert(engine.into());
    let key = Key::new(Kind::Volume, "v");
    for _ in 0..3 {
        act(&mut cluster, &agents(None), &key);
        assert!(cluster.replicas.values().all(|replica| replica.spec.desire_state == DesireState::Running));
    }
    let status = &volume(&cluster).status;
    assert_eq!((status.state, status.attach), (VolumeState::Attaching, Some(ATTACH + 1)));
    assert_eq!(status.current_node_id, NodeName::new("c").ok());
}

/// The replica that the operator has chosen is gone, so the salvage waits for the operator. The other replica
/// is not needed meanwhile.
#[test]
fn replicas_of_a_detached_volume_stop_also_while_a_salvage_waits() {
    let mut cluster = leaving_cluster();
    let mut engine = cluster.engines["v"].clone();
    engine.spec.desire_state = DesireState::Stopped;
    engine.status.current_state = CurrentState::Stopped;
    cluster.insert(engine.into());
    let mut detached = volume(&cluster).clone();
    detached.status.state = VolumeState::Detached;
    detached.status.salvage = Some(crate::objects::Salvage {
        replica_id: ReplicaId::from_random(3),
        attach: ATTACH,
        decided_at: now(),
        by: String::new(),
        reason: String::new(),
        losses: String::new(),
        done: false,
    });
    cluster.insert(detached.into());
    for _ in 0..2 {
        act(&mut cluster, &agents(None), &Key::new(Kind::Volume, "v"));
    }
    assert!(cluster.replicas.values().all(|replica| replica.spec.desire_state == DesireState::Stopped));
    assert!(
        settled_condition(&cluster).contains("salvage with another one"),
        "{}",
        settled_condition(&cluster)
    );
}
