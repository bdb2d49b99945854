//! Tests single decisions that the simulation rarely makes; everything else is tested there.

use std::collections::BTreeMap;

use shorthorn_types::{ReplicaId, VolumeName};

use super::*;
use crate::objects::{
    ConditionType, Conditions, CurrentState, DataState, DesireState, DiskSpec, DiskStatus, Engine,
    EnginePhase, EngineSpec, Finding, Frontend, MemberMode, MemberRecord, Metadata, Node, NodeSpec,
    NodeStatus, Object, Replica, ReplicaSpec, Secret, StoredEngineStatus, StoredReplicaStatus,
};
use crate::observed::{
    AgentInfo, CallFailure, Detail, Instance, InstanceKey, InstanceState, ObservedDisk, ObservedEngine,
};
use crate::requests::{Change, CreateVolume};
use crate::{Action, AgentCall, StartEngine};

mod deletion;
mod detach;
mod display;
mod grants;
mod losses;
mod rebuilds;
mod returns;
mod starts;

const ATTACH: u64 = 2;

fn now() -> Timestamp {
    Timestamp::UNIX_EPOCH
}

/// Returns a volume whose engine should run on node a, and does not exist yet.
fn cluster() -> ClusterState {
    let wanted = CreateVolume { name: "v".to_owned(), size_bytes: 1 << 20, ..CreateVolume::default() };
    let Ok(Change::Store(volume)) = wanted.apply(&ClusterState::default(), Secret::new([1; 32]), now())
    else {
        panic!("the volume is refused");
    };
    let spec = EngineSpec {
        volume_name: VolumeName::new("v").unwrap(),
        volume_size: 1 << 20,
        node_id: Some(NodeName::new("a").unwrap()),
        desire_state: DesireState::Running,
        attach: Some(ATTACH),
        frontend: Frontend::Auto,
        replica_address_map: BTreeMap::new(),
        map_revision: 0,
    };
    let mut cluster = ClusterState::default();
    cluster.insert(volume.into());
    let metadata = Metadata::new("v", now());
    cluster.insert(Engine { metadata, spec, status: StoredEngineStatus::default() }.into());
    cluster
}

/// Agents of nodes a and b in reach; b shows an engine of the volume for that attachment.
fn agents(on_b: Option<u64>) -> Agents {
    let mut agents = Agents::default();
    for name in ["a", "b"] {
        let mut agent = ObservedAgent::new("http://agent", now());
        agent.link = AgentLink::Synced;
        agent.info = Some(AgentInfo { name: name.to_owned(), ..AgentInfo::default() });
        let disk =
            ObservedDisk { total_bytes: DISK_BYTES, available_bytes: DISK_BYTES, ..ObservedDisk::default() };
        agent.disks.insert(DISK.to_owned(), disk);
        if let Some(attach) = on_b.filter(|_| name == "b") {
            let detail = Detail::Engine(Box::new(ObservedEngine {
                attach: Some(attach),
                ..ObservedEngine::default()
            }));
            let instance = Instance { state: InstanceState::Running, message: None, detail };
            agent.instances.insert(InstanceKey::engine(&VolumeName::new("v").unwrap()), instance);
        }
        agents.insert(NodeName::new(name).unwrap(), agent);
    }
    agents
}

fn decide(cluster: &ClusterState, agents: &Agents) -> Vec<Action> {
    let context =
        Context { cluster, agents, now: now(), random: [0; MAX_MEMBERS], settings: Settings::default() };
    reconcile(&context, &Key::new(Kind::Engine, "v")).actions
}

#[test]
fn a_start_is_stored_before_it_is_asked_for() {
    let actions = decide(&cluster(), &agents(None));
    let [
        Action::Write(object),
        Action::Call(node, AgentCall::StartEngine(StartEngine { attach: ATTACH, .. })),
    ] = actions.as_slice()
    else {
        panic!("{actions:#?}");
    };
    assert_eq!(node.as_str(), "a");
    assert!(
        matches!(&**object, Object::Engine(engine) if engine.status.current_state == CurrentState::Starting)
    );
}

#[test]
fn an_older_engine_elsewhere_is_stopped_and_a_newer_one_left_alone() {
    let stops = |on_b, state| {
        let mut agents = agents(Some(on_b));
        agents.change_all(|agent| agent.instances.values_mut().for_each(|instance| instance.state = state));
        let actions = decide(&cluster(), &agents);
        actions.iter().any(|action| match action {
            Action::Call(node, AgentCall::StopInstance { attach, .. }) => {
                assert_eq!((node.as_str(), *attach), ("b", Some(ATTACH)));
                true
            }
            _ => false,
        })
    };
    // An ended process is known there all the same, as after a reboot of the node.
    for state in [InstanceState::Running, InstanceState::Stopped] {
        assert!(stops(ATTACH - 1, state) && stops(ATTACH, state) && !stops(ATTACH + 1, state));
    }
}

#[test]
fn an_agent_with_another_name_is_asked_for_nothing() {
    let mut agents = agents(None);
    let other = AgentInfo { name: "other".to_owned(), ..AgentInfo::default() };
    agents.change_all(|agent| agent.info = Some(other.clone()));
    let actions = decide(&cluster(), &agents);
    let [Action::Write(object)] = actions.as_slice() else { panic!("{actions:#?}") };
    let Object::Engine(engine) = &**object else { panic!("{object:#?}") };
    let message = engine.status.message.as_deref().unwrap_or_default();
    assert!(message.contains("says that it is node \"other\""), "{message}");
}

#[test]
fn no_place_is_refused_while_nodes_may_still_come() {
    let cluster = cluster();
    let mut agents = agents(None);
    let volume_after = |agents: &Agents, now| {
        let context = Context {
            cluster: &cluster,
            agents,
            now,
            random: [0; MAX_MEMBERS],
            settings: Settings::default(),
        };
        let decision = reconcile(&context, &Key::new(Kind::Volume, "v"));
        let written = decision.actions.iter().find_map(|action| match action {
            Action::Write(object) => match &**object {
                Object::Volume(volume) => Some(volume.clone()),
                _ => None,
            },
            _ => None,
        });
        (written.unwrap().status.conditions, decision.requeue_after)
    };
    agents.change_all(|agent| {
        agent.link = AgentLink::Down { since: now(), reason: "not reached yet".to_owned() }
    });
    let (conditions, again) = volume_after(&agents, now());
    assert_eq!(conditions.get(ConditionType::Settled).unwrap().reason, "WaitingForNodes");
    assert!(conditions.get(ConditionType::Scheduled).is_none());
    assert_eq!(again, Some(UNREACHABLE_AFTER));
    let (conditions, _) = volume_after(&agents, now() + UNREACHABLE_AFTER);
    assert_eq!(conditions.get(ConditionType::Scheduled).unwrap().reason, "NoPlace");
}

/// Returns a new volume of three on the nodes a, b and c, of which c is down.
fn volume_of_three() -> (ClusterState, Agents) {
    let mut cluster = cluster();
    for name in ["a", "b", "c"] {
        cluster.insert(node(name).into());
    }
    let mut down = cluster.nodes["c"].clone();
    down.status.conditions.set(ConditionType::Ready, Finding::wrong("Down", "no answer"), now());
    cluster.insert(down.into());
    (cluster, agents(None))
}

fn decide_volume(cluster: &ClusterState, agents: &Agents, settings: Settings) -> Vec<Object> {
    let random = std::array::from_fn(|at| 100 + at as u64);
    let context = Context { cluster, agents, now: now() + UNREACHABLE_AFTER, random, settings };
    let actions = reconcile(&context, &Key::new(Kind::Volume, "v")).actions;
    let written = actions.into_iter().filter_map(|action| match action {
        Action::Write(object) => Some(*object),
        _ => None,
    });
    written.collect()
}

#[test]
fn a_volume_is_created_with_the_available_places() {
    let (mut cluster, agents) = volume_of_three();
    let written = decide_volume(&cluster, &agents, Settings::default());
    let mut nodes = Vec::new();
    for object in &written {
        match object {
            Object::Replica(replica) => nodes.push(replica.spec.node_id.as_str()),
            // While it is being created, that would say that it cannot be.
            Object::Volume(volume) => {
                assert!(volume.status.conditions.get(ConditionType::Scheduled).is_none(), "{volume:#?}");
            }
            other => panic!("{other:#?}"),
        }
    }
    assert_eq!(nodes, ["a", "b"]);
    written.into_iter().for_each(|object| cluster.insert(object));
    let written = decide_volume(&cluster, &agents, Settings::default());
    let [Object::Volume(volume)] = written.as_slice() else { panic!("{written:#?}") };
    assert_eq!((volume.status.state, volume.status.first_members.len()), (VolumeState::Detached, 2));
    let scheduled = volume.status.conditions.get(ConditionType::Scheduled).unwrap();
    assert!(!scheduled.status && scheduled.message.contains("2 of 3"), "{scheduled:?}");
    let healthy = volume.status.conditions.get(ConditionType::Healthy).unwrap();
    assert_eq!((healthy.status, healthy.reason.as_str()), (false, "NotAttached"), "why nothing is known");

    let (cluster, agents) = volume_of_three();
    let settings = Settings { degraded_creation: false, ..Settings::default() };
    let written = decide_volume(&cluster, &agents, settings);
    let [Object::Volume(volume)] = written.as_slice() else { panic!("{written:#?}") };
    assert_eq!(volume.status.state, VolumeState::Creating);
    assert_eq!(volume.status.conditions.get(ConditionType::Scheduled).unwrap().reason, "NoPlace");
}

const DISK: &str = "/var/lib/longhorn";
const DISK_BYTES: u64 = 1 << 40;

/// Returns a ready node with a disk that has room.
fn node(name: &str) -> Node {
    let mut conditions = Conditions::default();
    conditions.set(ConditionType::Ready, Finding::Well, now());
    let disks = BTreeMap::from([(DISK.to_owned(), DiskSpec::of_new(DISK_BYTES))]);
    let status = DiskStatus { storage_maximum: DISK_BYTES, ..DiskStatus::default() };
    let disk_status = BTreeMap::from([(DISK.to_owned(), status)]);
    Node {
        metadata: Metadata::new(name, now()),
        spec: NodeSpec { allow_scheduling: true, disks, ..NodeSpec::default() },
        status: NodeStatus { conditions, disk_status, ..NodeStatus::default() },
    }
}

fn replica(id: ReplicaId, node: &str, lost_since: Option<Timestamp>) -> Replica {
    let volume_name = VolumeName::new("v").unwrap();
    Replica {
        metadata: Metadata::new(ReplicaSpec::instance_name(&volume_name, id), now()),
        spec: ReplicaSpec {
            volume_name,
            volume_size: 1 << 20,
            replica_id: id,
            node_id: NodeName::new(node).unwrap(),
            disk_path: DISK.to_owned(),
            disk_id: String::new(),
            desire_state: DesireState::Running,
            eviction_requested: false,
        },
        status: StoredReplicaStatus {
            current_state: CurrentState::Running,
            data: DataState::Present,
            healthy_at: Some(now()),
            lost_since,
            ..StoredReplicaStatus::default()
        },
    }
}

/// Returns a cluster in which the volume is attached to a, with one replica there and one on b. The replica
/// on b has been absent for too long; c is free.
fn degraded_cluster() -> ClusterState {
    let mut cluster = cluster();
    let (kept, lost) = (ReplicaId::from_random(1), ReplicaId::from_random(2));
    let here = NodeName::new("a").unwrap();
    let mut volume = cluster.volumes.remove("v").unwrap();
    volume.spec.node_id = Some(here.clone());
    volume.spec.number_of_replicas = 2;
    volume.status.current_node_id = Some(here);
    volume.status.state = VolumeState::Attached;
    volume.status.robustness = Robustness::Degraded;
    volume.status.attach = Some(ATTACH);
    volume.status.first_members = vec![kept, lost];
    cluster.insert(volume.into());
    let mut engine = cluster.engines.remove("v").unwrap();
    engine.status.current_state = CurrentState::Running;
    engine.status.seen_attach = Some(ATTACH);
    engine.status.phase = Some(EnginePhase::Serving);
    engine.status.replica_mode_map = BTreeMap::from([
        (kept, MemberRecord::of(MemberMode::Member)),
        (lost, MemberRecord::of(MemberMode::Failed)),
    ]);
    cluster.insert(engine.into());
    cluster.insert(replica(kept, "a", None).into());
    cluster.insert(replica(lost, "b", Some(now())).into());
    for name in ["a", "b", "c"] {
        cluster.insert(node(name).into());
    }
    cluster
}

#[test]
fn a_replica_is_made_beside_a_lost_one_only_once_every_other_node_was_asked() {
    let cluster = degraded_cluster();
    let mut agents = agents(None);
    let decide = |agents: &Agents, now| {
        let settings = Settings { replica_replace_after: Duration::ZERO, ..Settings::default() };
        let context = Context { cluster: &cluster, agents, now, random: [7; MAX_MEMBERS], settings };
        let decision = reconcile(&context, &Key::new(Kind::Volume, "v"));
        let new = decision.actions.iter().find_map(|action| match action {
            Action::Write(object) => match &**object {
                Object::Replica(new) if new.status.data == DataState::None => {
                    Some(new.spec.node_id.to_string())
                }
                _ => None,
            },
            _ => None,
        });
        (new, decision.requeue_after)
    };
    let c = NodeName::new("c").unwrap();
    let mut free = agents.by_node().values().next().unwrap().clone();
    free.info = Some(AgentInfo { name: "c".to_owned(), ..AgentInfo::default() });
    agents.insert(c.clone(), free);
    assert_eq!(decide(&agents, now()).0.as_deref(), Some("c"));

    let link = AgentLink::Down { since: now(), reason: "not reached yet".to_owned() };
    agents.get_mut(&c).unwrap().link = link;
    assert_eq!(decide(&agents, now()), (None, Some(UNREACHABLE_AFTER)));
    assert_eq!(decide(&agents, now() + UNREACHABLE_AFTER).0.as_deref(), Some("b"));
}

/// Returns [`degraded_cluster`], with the unreachable node b given up, and its replica absent since just now.
fn cluster_without_b() -> (ClusterState, Agents) {
    let mut cluster = degraded_cluster();
    let id = ReplicaId::from_random(2);
    cluster.insert(replica(id, "b", None).into());
    let mut b = cluster.nodes["b"].clone();
    b.metadata.deletion_timestamp = Some(now());
    cluster.insert(b.into());
    let mut agents = agents(None);
    agents.remove(&NodeName::new("b").unwrap());
    (cluster, agents)
}

fn act(cluster: &mut ClusterState, agents: &Agents, key: &Key) -> Vec<Action> {
    let context =
        Context { cluster, agents, now: now(), random: [7; MAX_MEMBERS], settings: Settings::default() };
    let actions = reconcile(&context, key).actions;
    for action in &actions {
        match action {
            Action::Write(object) => cluster.insert(Object::clone(object)),
            Action::Remove(key, _) => cluster.remove(key),
            Action::Call(..) | Action::Emit(_) => {}
        }
    }
    actions
}

#[test]
fn a_replica_of_a_node_that_is_given_up_is_forgotten_at_once_and_then_replaced() {
    let (mut cluster, agents) = cluster_without_b();
    let (volume, node) = (Key::new(Kind::Volume, "v"), Key::new(Kind::Node, "b"));
    let id = ReplicaId::from_random(2);
    let name = ReplicaSpec::instance_name(&VolumeName::new("v").unwrap(), id);
    let key = Key::new(Kind::Replica, &name);
    // First the engine forgets it.
    act(&mut cluster, &agents, &volume);
    assert!(!cluster.replicas.get(&name).unwrap().metadata.is_deleting(), "the engine knows it still");
    let mut engine = cluster.engines["v"].clone();
    assert!(!engine.spec.replica_address_map.contains_key(&id));
    engine.status.map_revision = engine.spec.map_revision;
    engine.status.replica_mode_map.remove(&id);
    cluster.insert(engine.into());
    act(&mut cluster, &agents, &node);
    assert!(cluster.nodes.contains_key("b"), "a replica names it");
    act(&mut cluster, &agents, &volume);
    assert!(cluster.replicas.get(&name).unwrap().metadata.is_deleting());
    let actions = act(&mut cluster, &agents, &key);
    assert!(!actions.iter().any(|action| matches!(action, Action::Call(..))), "{actions:#?}");
    assert!(cluster.replicas.get(&name).is_none());
    act(&mut cluster, &agents, &node);
    assert!(!cluster.nodes.contains_key("b"), "nothing names it any more");
}

#[test]
fn a_replica_that_may_be_in_the_view_stays_although_its_node_is_given_up() {
    let (cluster, agents) = cluster_without_b();
    let id = ReplicaId::from_random(2);
    for (mode, phase) in
        [(MemberMode::Member, EnginePhase::Serving), (MemberMode::Failed, EnginePhase::Frozen)]
    {
        let mut cluster = cluster.clone();
        let mut engine = cluster.engines["v"].clone();
        engine.status.replica_mode_map.insert(id, MemberRecord::of(mode));
        engine.status.phase = Some(phase);
        cluster.insert(engine.into());
        for _ in 0..3 {
            act(&mut cluster, &agents, &Key::new(Kind::Volume, "v"));
        }
        let replica = cluster.replicas.values().find(|replica| replica.spec.replica_id == id).unwrap();
        assert!(!replica.metadata.is_deleting(), "{mode:?} {phase:?}");
    }
}

#[test]
fn deletions_do_not_wait_for_a_node_that_is_given_up() {
    let (mut cluster, agents) = cluster_without_b();
    let mut volume = cluster.volumes["v"].clone();
    volume.metadata.deletion_timestamp = Some(now());
    cluster.insert(volume.into());
    let mut engine = cluster.engines["v"].clone();
    engine.spec.node_id = Some(NodeName::new("b").unwrap());
    engine.spec.desire_state = DesireState::Stopped;
    engine.status.current_state = CurrentState::Unknown;
    cluster.insert(engine.into());
    for _ in 0..4 {
        let keys: Vec<Key> = cluster.keys().filter(|key| key.kind != Kind::Node).collect();
        for key in keys {
            act(&mut cluster, &agents, &key);
        }
    }
    assert!(cluster.volumes.is_empty() && cluster.engines.is_empty(), "{cluster:#?}");
    assert_eq!(cluster.replicas.values().count(), 0);
}

#[test]
fn a_configured_node_stays_until_it_leaves_the_configuration() {
    let (mut cluster, mut agents) = cluster_without_b();
    let b = NodeName::new("b").unwrap();
    cluster.remove(&Key::new(
        Kind::Replica,
        ReplicaSpec::instance_name(&VolumeName::new("v").unwrap(), ReplicaId::from_random(2)),
    ));
    let mut agent = ObservedAgent::new("http://agent", now() - UNREACHABLE_AFTER);
    agent.link = AgentLink::Down { since: now() - UNREACHABLE_AFTER, reason: "no answer".to_owned() };
    agents.insert(b.clone(), agent);
    act(&mut cluster, &agents, &Key::new(Kind::Node, "b"));
    let ready = cluster.nodes["b"].status.conditions.get(ConditionType::Ready).unwrap();
    assert!(ready.message.contains("--node b=URL"), "{ready:?}");
    agents.get_mut(&b).unwrap().from_object = true;
    for _ in 0..2 {
        act(&mut cluster, &agents, &Key::new(Kind::Node, "b"));
        assert!(!cluster.nodes.contains_key("b"), "the node is removed, and does not return");
    }
}

/// The volume has members on a and b, which are drained, and on c. It wants two: with one that stays no
/// member leaves, because it would be wanted again at once.
#[test]
fn no_member_leaves_before_enough_members_can_stay() {
    let mut cluster = degraded_cluster();
    let ids = [1, 2, 3].map(ReplicaId::from_random);
    for (id, name) in ids.into_iter().zip(["a", "b", "c"]) {
        cluster.insert(replica(id, name, None).into());
        let mut drained = node(name);
        drained.spec.eviction_requested = name != "c";
        cluster.insert(drained.into());
    }
    let stopped = |cluster: &ClusterState| {
        let decided = act(&mut cluster.clone(), &agents(None), &Key::new(Kind::Volume, "v"));
        let stopped = decided.iter().filter_map(|action| match action {
            Action::Write(object) => match &**object {
                Object::Replica(replica) if replica.spec.desire_state == DesireState::Stopped => {
                    Some(replica.spec.node_id.to_string())
                }
                _ => None,
            },
            _ => None,
        });
        stopped.collect::<Vec<_>>()
    };
    let members = |cluster: &mut ClusterState, ids: &[ReplicaId]| {
        let mut engine = cluster.engines["v"].clone();
        let modes = ids.iter().map(|id| (*id, MemberRecord::of(MemberMode::Member)));
        engine.status.replica_mode_map = modes.collect();
        cluster.insert(engine.into());
    };
    members(&mut cluster, &ids);
    assert_eq!(stopped(&cluster), Vec::<String>::new());
    cluster.insert(node("d").into());
    let fourth = ReplicaId::from_random(4);
    cluster.insert(replica(fourth, "d", None).into());
    members(&mut cluster, &[ids[0], ids[1], ids[2], fourth]);
    assert_eq!(stopped(&cluster).len(), 1, "one of the drained nodes is left");
}

/// No admission policy has refused `kubectl delete shv`.
#[test]
fn a_volume_with_a_persistent_volume_is_served_despite_its_deletion() {
    let (mut cluster, agents) = (cluster(), agents(None));
    let mut volume = cluster.volumes["v"].clone();
    volume.status.state = VolumeState::Detached;
    volume.status.persistent_volume = Some("pvc-1".to_owned());
    volume.spec.node_id = Some(NodeName::new("a").unwrap());
    volume.metadata.deletion_timestamp = Some(now());
    let decide = |cluster: &ClusterState| {
        let (random, settings) = ([0; MAX_MEMBERS], Settings::default());
        let context = Context { cluster, agents: &agents, now: now(), random, settings };
        reconcile(&context, &Key::new(Kind::Volume, "v")).actions
    };
    let written = |actions: &[Action]| {
        actions.iter().find_map(|action| match action {
            Action::Write(object) => match &**object {
                Object::Volume(volume) => Some(volume.clone()),
                _ => None,
            },
            _ => None,
        })
    };
    let is_reported = |actions: &[Action]| {
        actions.iter().any(|action| matches!(action, Action::Emit(event) if event.reason == "DeletionHeld"))
    };
    cluster.insert(volume.into());
    let actions = decide(&cluster);
    let held = written(&actions).unwrap();
    assert_eq!(held.status.state, VolumeState::Attaching, "it is attached as wanted");
    let accepted = held.status.conditions.get(ConditionType::Accepted).unwrap();
    assert!(!accepted.status && accepted.message.contains("PersistentVolume pvc-1"), "{accepted:?}");
    assert!(is_reported(&actions));
    cluster.insert(held.clone().into());
    assert!(!is_reported(&decide(&cluster)), "it is reported once");
    let mut free = held;
    free.status.persistent_volume = None;
    cluster.insert(free.into());
    assert_eq!(written(&decide(&cluster)).unwrap().status.state, VolumeState::Deleting);
}
