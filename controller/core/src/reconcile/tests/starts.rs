//! Tests the stored steps of a start, and their times.

use shorthorn_types::{Generation, Members, ReplicaReport, View, ViewId};
use shorthorn_views::Arbiter;

use super::*;
use crate::example::{engine_in, status_of_engine};
use crate::observed::{self, GrantWanted};
use crate::{Decision, StartEngine, StartReplica};

const ID: u64 = 1;

/// Returns the volume in that state, whose replica on node a is wanted and was not seen yet.
fn starting(state: VolumeState) -> ClusterState {
    let mut cluster = super::cluster();
    let mut volume = cluster.volumes.remove("v").unwrap();
    volume.status.state = state;
    volume.status.attach = Some(ATTACH);
    volume.status.attach_started_at = Some(now());
    volume.status.first_members = vec![ReplicaId::from_random(ID)];
    cluster.insert(volume.into());
    let mut engine = cluster.engines.remove("v").unwrap();
    engine.spec.desire_state = DesireState::Stopped;
    cluster.insert(engine.into());
    let replica = super::replica(ReplicaId::from_random(ID), "a", None);
    cluster.insert(Replica { status: StoredReplicaStatus::default(), ..replica }.into());
    cluster
}

fn name() -> String {
    ReplicaSpec::instance_name(&VolumeName::new("v").unwrap(), ReplicaId::from_random(ID))
}

fn decide(cluster: &ClusterState, kind: Kind, name: &str, now: Timestamp) -> Decision {
    let agents = agents(None);
    let settings = Settings::default();
    let context = Context { cluster, agents: &agents, now, random: [0; MAX_MEMBERS], settings };
    reconcile(&context, &Key::new(kind, name))
}

fn written(decision: &Decision) -> Vec<&Replica> {
    let mut replicas = Vec::new();
    for action in &decision.actions {
        if let Action::Write(object) = action
            && let Object::Replica(replica) = &**object
        {
            replicas.push(replica);
        }
    }
    replicas
}

#[test]
fn a_replica_is_stopped_only_after_its_desired_state_was_stored_as_running() {
    let mut cluster = starting(VolumeState::Detaching);
    let first = decide(&cluster, Kind::Volume, "v", now());
    let [recorded] = written(&first)[..] else { panic!("{first:#?}") };
    assert_eq!(recorded.spec.desire_state, DesireState::Running);
    assert_eq!(
        (recorded.status.current_state, recorded.status.data),
        (CurrentState::Starting, DataState::Requested)
    );
    cluster.insert(recorded.clone().into());
    let second = decide(&cluster, Kind::Volume, "v", now());
    let [stopped] = written(&second)[..] else { panic!("{second:#?}") };
    assert_eq!(stopped.spec.desire_state, DesireState::Stopped);
    assert_eq!(
        (stopped.status.current_state, stopped.status.data),
        (CurrentState::Starting, DataState::Requested)
    );
}

#[test]
fn a_start_that_takes_long_is_stored_and_another_one_is_not() {
    let cluster = starting(VolumeState::Attaching);
    let quiet = decide(&cluster, Kind::Replica, &name(), now());
    let [Action::Call(_, AgentCall::StartReplica(StartReplica { create: true, .. }))] =
        quiet.actions.as_slice()
    else {
        panic!("{quiet:#?}")
    };
    assert_eq!(quiet.requeue_after, Some(QUIET_START));
    let slow = decide(&cluster, Kind::Replica, &name(), now() + QUIET_START);
    let [replica] = written(&slow)[..] else { panic!("{slow:#?}") };
    assert_eq!(
        (replica.status.current_state, replica.status.data),
        (CurrentState::Starting, DataState::Requested)
    );
}

#[test]
fn replica_and_engine_are_started_as_their_volume_encrypts() {
    for encrypts in [false, true] {
        let mut cluster = starting(VolumeState::Attaching);
        let mut volume = cluster.volumes.remove("v").unwrap();
        volume.spec.encrypt_in_transit = encrypts;
        cluster.insert(volume.into());
        let mut engine = cluster.engines.remove("v").unwrap();
        engine.spec.desire_state = DesireState::Running;
        cluster.insert(engine.into());
        let started = [(Kind::Replica, name()), (Kind::Engine, "v".to_owned())].map(|(kind, name)| {
            let actions = decide(&cluster, kind, &name, now()).actions;
            let call = actions.into_iter().find_map(|action| match action {
                Action::Call(_, call) => Some(call),
                _ => None,
            });
            match call {
                Some(AgentCall::StartReplica(StartReplica { encrypt_in_transit, .. }))
                | Some(AgentCall::StartEngine(StartEngine { encrypt_in_transit, .. })) => encrypt_in_transit,
                other => panic!("{other:#?}"),
            }
        });
        assert_eq!(started, [encrypts; 2]);
    }
}

#[test]
fn a_replica_that_was_wanted_is_deleted_with_its_directory() {
    let mut cluster = starting(VolumeState::Deleting);
    let mut volume = cluster.volumes.remove("v").unwrap();
    volume.metadata.deletion_timestamp = Some(now());
    cluster.insert(volume.into());
    let mut replica = cluster.get(&Key::new(Kind::Replica, name())).unwrap();
    replica.metadata_mut().deletion_timestamp = Some(now());
    cluster.insert(replica);
    let actions = decide(&cluster, Kind::Replica, &name(), now()).actions;
    let deletes = |action: &Action| matches!(action, Action::Call(_, AgentCall::DeleteReplica { .. }));
    let removes = |action: &Action| matches!(action, Action::Remove(..));
    let (deleted, removed) = (actions.iter().position(deletes), actions.iter().position(removes));
    assert!(deleted.is_some() && deleted < removed, "{actions:#?}");
}

#[test]
fn events_are_emitted_after_their_change_is_stored() {
    let mut cluster = starting(VolumeState::Detached);
    let mut volume = cluster.volumes.remove("v").unwrap();
    volume.spec.node_id = Some(NodeName::new("a").unwrap());
    cluster.insert(volume.into());
    let actions = decide(&cluster, Kind::Volume, "v", now()).actions;
    let [Action::Write(_), Action::Emit(event)] = actions.as_slice() else { panic!("{actions:#?}") };
    assert_eq!(event.reason, "Attaching");
}

#[test]
fn a_volume_that_was_refused_once_is_accepted_when_it_can_be_read() {
    let mut cluster = starting(VolumeState::Detached);
    let mut volume = cluster.volumes.remove("v").unwrap();
    let refused = Finding::wrong("InvalidSpec", "the size");
    volume.status.conditions.set(ConditionType::Accepted, refused, now());
    cluster.insert(volume.into());
    let decision = decide(&cluster, Kind::Volume, "v", now());
    let accepted = decision.actions.iter().any(|action| match action {
        Action::Write(object) => match &**object {
            Object::Volume(volume) => volume.status.conditions.is_true(ConditionType::Accepted),
            _ => false,
        },
        _ => false,
    });
    assert!(accepted, "{decision:#?}");
}

/// Returns the stored status of an engine that has just been started and reports that phase.
fn engine_after(phase: EnginePhase, now: Timestamp) -> Option<StoredEngineStatus> {
    let mut cluster = starting(VolumeState::Attaching);
    let mut engine = cluster.engines.remove("v").unwrap();
    engine.spec.desire_state = DesireState::Running;
    engine.status.current_state = CurrentState::Starting;
    cluster.insert(engine.into());
    let mut agents = agents(None);
    let shown = engine_in(ATTACH, phase);
    let instance =
        Instance { state: InstanceState::Running, message: None, detail: Detail::Engine(Box::new(shown)) };
    let key = InstanceKey::engine(&VolumeName::new("v").unwrap());
    agents.get_mut(&NodeName::new("a").unwrap()).unwrap().instances.insert(key, instance);
    let settings = Settings::default();
    let context = Context { cluster: &cluster, agents: &agents, now, random: [0; MAX_MEMBERS], settings };
    let actions = reconcile(&context, &Key::new(Kind::Engine, "v")).actions;
    actions.into_iter().find_map(|action| match action {
        Action::Write(object) => match *object {
            Object::Engine(engine) if engine.status.seen_attach == Some(ATTACH) => Some(engine.status),
            _ => None,
        },
        _ => None,
    })
}

#[test]
fn an_engine_that_serves_or_cannot_is_stored_at_once_and_one_that_starts_is_not() {
    assert!(engine_after(EnginePhase::Starting, now()).is_none());
    let slow = engine_after(EnginePhase::Starting, now() + QUIET_START).unwrap();
    assert_eq!(slow.served_attach, None);
    assert!(engine_after(EnginePhase::Frozen, now()).is_some());
    assert_eq!(engine_after(EnginePhase::Serving, now()).unwrap().served_attach, Some(ATTACH));
}

/// Returns the health of a volume whose engine is frozen in its start, after that time. The start has
/// recorded the grant as awaited, as taken, or never.
fn health_of_frozen(
    granted: Option<Finding>,
    now_is: Timestamp,
) -> (Robustness, Option<std::time::Duration>) {
    let mut cluster = starting(VolumeState::Attaching);
    let mut volume = cluster.volumes["v"].clone();
    volume.spec.node_id = Some(NodeName::new("a").unwrap());
    volume.status.current_node_id = volume.spec.node_id.clone();
    if let Some(finding) = granted {
        volume.status.conditions.set(ConditionType::Granted, finding, now());
    }
    cluster.insert(volume.into());
    let mut engine = cluster.engines["v"].clone();
    engine.spec.desire_state = DesireState::Running;
    engine.spec.attach = Some(ATTACH);
    engine.status.current_state = CurrentState::Running;
    engine.status.seen_attach = Some(ATTACH);
    engine.status.phase = Some(EnginePhase::Frozen);
    cluster.insert(engine.into());
    let decision = decide(&cluster, Kind::Volume, "v", now_is);
    let volume = decision.actions.iter().find_map(|action| match action {
        Action::Write(object) => match &**object {
            Object::Volume(volume) => Some(volume.status.robustness),
            _ => None,
        },
        _ => None,
    });
    (volume.unwrap_or_else(|| cluster.volumes["v"].status.robustness), decision.requeue_after)
}

#[test]
fn a_granted_engine_that_still_reports_frozen_is_not_faulted_at_once() {
    let (robustness, again) = health_of_frozen(Some(Finding::Well), now());
    assert_ne!(robustness, Robustness::Faulted);
    assert!(again.is_some_and(|again| again <= START_CHECK), "{again:?}");
    assert_eq!(health_of_frozen(Some(Finding::Well), now() + START_CHECK).0, Robustness::Faulted);
    assert_eq!(health_of_frozen(None, now()).0, Robustness::Faulted);
}

fn arbiter_view(attach: u64, number: u32, members: &[u64]) -> View {
    View {
        id: ViewId { generation: Generation::new(attach, 0), number },
        members: Members::new(members.iter().copied().map(ReplicaId::from_random)).unwrap(),
    }
}

/// Returns a volume whose engine on node `a` asks for `target`, while the arbiter has granted `granted` last.
fn asking(granted: Option<View>, target: View, honoured: &ReplicaReport) -> (ClusterState, Agents) {
    let mut cluster = starting(VolumeState::Attaching);
    let mut volume = cluster.volumes["v"].clone();
    volume.spec.node_id = Some(NodeName::new("a").unwrap());
    volume.status.current_node_id = volume.spec.node_id.clone();
    if let Some(granted) = granted {
        volume.status.arbiter = Arbiter::default().ask(1, granted, honoured, &granted.members).unwrap();
    }
    cluster.insert(volume.into());
    let wanted = GrantWanted { view: target, honoured: honoured.clone(), stored: target.members };
    let frozen = status_of_engine(ATTACH, EnginePhase::Frozen);
    let shown = ObservedEngine::of(ATTACH, observed::EngineStatus { grant_wanted: Some(wanted), ..frozen });
    let detail = Detail::Engine(Box::new(shown));
    let instance = Instance { state: InstanceState::Running, message: None, detail };
    let mut agents = agents(None);
    let key = InstanceKey::engine(&VolumeName::new("v").unwrap());
    agents.get_mut(&NodeName::new("a").unwrap()).unwrap().instances.insert(key, instance);
    (cluster, agents)
}

/// Any answer may be lost. The reconciler sends `granted` for as long as the engine asks, and the operator
/// gets one event with this `reason`.
fn sends_the_grant_again((mut cluster, agents): (ClusterState, Agents), granted: View, reason: &str) {
    for time in 0..3 {
        let settings = Settings::default();
        let context =
            Context { cluster: &cluster, agents: &agents, now: now(), random: [0; MAX_MEMBERS], settings };
        let decision = reconcile(&context, &Key::new(Kind::Volume, "v"));
        let calls = decision.actions.iter().filter(
            |action| matches!(action, Action::Call(_, AgentCall::Grant { view, .. }) if **view == granted),
        );
        assert_eq!(calls.count(), 1, "time {time}: {decision:#?}");
        assert!(decision.requeue_after.is_some_and(|again| again <= START_CHECK));
        let emits = |action: &&Action| matches!(action, Action::Emit(event) if event.reason == reason);
        assert_eq!(decision.actions.iter().filter(emits).count(), usize::from(time == 0));
        for action in decision.actions {
            if let Action::Write(object) = action {
                cluster.insert(*object);
            }
        }
    }
}

/// A host that has lost its state file starts an engine that does not know the last grant. The call with the
/// grant fails, or the agent ends before it has passed it on. Only the question, which is still in the
/// status, shows that.
#[test]
fn an_engine_gets_the_grant_to_honour_while_it_asks_for_another() {
    let honoured = ReplicaReport { committed: arbiter_view(1, 1, &[1, 2]), proposed: Vec::new() };
    let granted = arbiter_view(1, 2, &[1]);
    let target = arbiter_view(ATTACH, 1, &[2]);
    sends_the_grant_again(asking(Some(granted), target, &honoured), granted, "NotGranted");
}

#[test]
fn an_engine_gets_its_grant_for_as_long_as_it_asks_for_it() {
    let honoured = ReplicaReport { committed: arbiter_view(1, 1, &[1, 2]), proposed: Vec::new() };
    let target = arbiter_view(ATTACH, 1, &[2]);
    sends_the_grant_again(asking(None, target, &honoured), target, "Granted");
}

fn deleted(mut cluster: ClusterState) -> ClusterState {
    let mut replica = cluster.get(&Key::new(Kind::Replica, name())).unwrap();
    replica.metadata_mut().deletion_timestamp = Some(now());
    cluster.insert(replica);
    cluster
}

/// The object is deleted as kubectl delete does.
#[test]
fn a_deleted_replica_object_stays_in_use_until_it_is_replaced() {
    let cluster = deleted(starting(VolumeState::Attaching));
    let actions = decide(&cluster, Kind::Replica, &name(), now()).actions;
    let [Action::Call(_, AgentCall::StartReplica(_))] = actions.as_slice() else { panic!("{actions:#?}") };
}

#[test]
fn the_data_of_a_deleted_volume_stays_until_its_engine_has_ended() {
    let mut cluster = deleted(starting(VolumeState::Attached));
    let mut volume = cluster.volumes.remove("v").unwrap();
    volume.metadata.deletion_timestamp = Some(now());
    cluster.insert(volume.into());
    let deletes = |cluster: &ClusterState| {
        let actions = decide(cluster, Kind::Replica, &name(), now()).actions;
        actions.iter().any(|action| matches!(action, Action::Call(_, AgentCall::DeleteReplica { .. })))
    };
    assert!(
        !deletes(&cluster),
        "a PersistentVolume may hold the deletion until it is stored that it has begun"
    );
    let mut volume = cluster.volumes.remove("v").unwrap();
    volume.status.state = VolumeState::Deleting;
    cluster.insert(volume.into());
    let woken = concerned(&cluster, &Key::new(Kind::Volume, "v"));
    assert!(woken.contains(&Key::new(Kind::Replica, name())), "{woken:?}");
    assert!(deletes(&cluster), "no engine runs");
    let mut engine = cluster.engines.remove("v").unwrap();
    engine.spec.desire_state = DesireState::Running;
    engine.status.current_state = CurrentState::Running;
    cluster.insert(engine.clone().into());
    assert!(!deletes(&cluster));
    engine.spec.desire_state = DesireState::Stopped;
    cluster.insert(engine.into());
    assert!(!deletes(&cluster), "it is being stopped");
}
