//! Volume v is attached to node user, and has replicas on the nodes n0, n1, ….

use shorthorn_types::{ReplicaId, VolumeName};

use super::*;
use crate::objects::{
    DataState, DesireState, Discovered, EnginePhase, EngineSpec, Finding, Frontend, MemberRecord, Metadata,
    Node, NodeSpec, NodeStatus, ReplicaSpec, Secret, StoredEngineStatus, StoredReplicaStatus,
};
use crate::requests::{Change, CreateVolume};

fn now() -> Timestamp {
    Timestamp::UNIX_EPOCH
}

fn id(at: u64) -> ReplicaId {
    ReplicaId::from_random(at + 1)
}

fn replica(at: u64, mode: MemberMode) -> Replica {
    let volume_name = VolumeName::new("v").unwrap();
    let is_member = mode == MemberMode::Member;
    Replica {
        metadata: Metadata::new(ReplicaSpec::instance_name(&volume_name, id(at)), now()),
        spec: ReplicaSpec {
            volume_name,
            volume_size: 1 << 30,
            replica_id: id(at),
            node_id: NodeName::new(&format!("n{at}")).unwrap(),
            disk_path: "/disk".to_owned(),
            disk_id: "disk".to_owned(),
            desire_state: DesireState::Running,
            eviction_requested: false,
        },
        status: StoredReplicaStatus {
            data: DataState::Present,
            healthy_at: is_member.then(now),
            failed_at: (!is_member).then(now),
            ..StoredReplicaStatus::default()
        },
    }
}

/// Returns a volume that should have `wanted` replicas, and has one in each of these modes.
fn cluster(wanted: u32, modes: &[MemberMode]) -> ClusterState {
    let mut cluster = ClusterState::default();
    let create = CreateVolume {
        name: "v".to_owned(),
        size_bytes: 1 << 30,
        number_of_replicas: Some(wanted),
        ..CreateVolume::default()
    };
    let Ok(Change::Store(mut volume)) = create.apply(&cluster, Secret::new([1; 32]), now()) else {
        panic!("the volume is refused");
    };
    let node_id = NodeName::new("user").ok();
    volume.spec.node_id.clone_from(&node_id);
    volume.status.current_node_id.clone_from(&node_id);
    volume.status.state = VolumeState::Attached;
    cluster.insert(volume.into());
    let replicas: Vec<Replica> = (0..).zip(modes).map(|(at, mode)| replica(at, *mode)).collect();
    let engine = Engine {
        metadata: Metadata::new("v", now()),
        spec: EngineSpec {
            volume_name: VolumeName::new("v").unwrap(),
            volume_size: 1 << 30,
            node_id,
            desire_state: DesireState::Running,
            attach: Some(1),
            frontend: Frontend::Auto,
            replica_address_map: BTreeMap::new(),
            map_revision: 0,
        },
        status: StoredEngineStatus {
            current_state: CurrentState::Running,
            phase: Some(EnginePhase::Serving),
            replica_mode_map: (0..).zip(modes).map(|(at, mode)| (id(at), MemberRecord::of(*mode))).collect(),
            ..StoredEngineStatus::default()
        },
    };
    cluster.insert(engine.into());
    for replica in replicas {
        cluster.insert(replica.into());
    }
    cluster
}

fn change_volume(cluster: &mut ClusterState, change: impl FnOnce(&mut Volume)) {
    let mut volume = cluster.volumes["v"].clone();
    change(&mut volume);
    cluster.insert(volume.into());
}

fn change_engine(cluster: &mut ClusterState, change: impl FnOnce(&mut StoredEngineStatus)) {
    let mut engine = cluster.engines["v"].clone();
    change(&mut engine.status);
    cluster.insert(engine.into());
}

fn cordon(cluster: &mut ClusterState, node: &str, second: i64) {
    let discovered =
        Discovered { cordoned_since: Some(Timestamp::from_second(second).unwrap()), ..Discovered::default() };
    let spec = NodeSpec { discovered: Some(discovered), ..NodeSpec::default() };
    cluster.insert(Node { metadata: Metadata::new(node, now()), spec, status: NodeStatus::default() }.into());
}

/// Returns the reason why the volume needs the replica of the node; empty if it does not.
fn message_of(cluster: &ClusterState, node: &str) -> String {
    let holds = holds(cluster, node, now() + MOVE_WAIT);
    assert!(holds.iter().all(|hold| hold.volume == "v" && !hold.is_engine), "{holds:?}");
    let mut needed = Needed::default();
    needed.look_at_all(cluster);
    let text = holds.into_iter().map(|hold| hold.message).collect::<String>();
    let by_node = needed.by_node();
    let same = by_node.get(&NodeName::new(node).unwrap()).map(|holds| holds[0].1);
    assert_eq!(same.unwrap_or_default(), text);
    text
}

const MEMBER: MemberMode = MemberMode::Member;
const REBUILDING: MemberMode = MemberMode::Rebuilding;
const FAILED: MemberMode = MemberMode::Failed;

#[test]
fn a_healthy_volume_needs_no_particular_node() {
    for members in 2..=5 {
        let cluster = cluster(members, &vec![MEMBER; members as usize]);
        for at in 0..members {
            assert_eq!(message_of(&cluster, &format!("n{at}")), "", "{at} of {members}");
        }
        assert_eq!(message_of(&cluster, "elsewhere"), "");
    }
}

#[test]
fn the_last_member_of_a_volume_in_use_is_needed() {
    assert!(message_of(&cluster(1, &[MEMBER]), "n0").contains("no other replica has all of its data"));
    assert!(message_of(&cluster(2, &[MEMBER, FAILED]), "n0").contains("no other replica"));
    assert!(message_of(&cluster(3, &[MEMBER, REBUILDING, FAILED]), "n0").contains("no other replica"));
    assert_eq!(message_of(&cluster(3, &[MEMBER, REBUILDING, FAILED]), "n1"), "", "a rebuild starts over");
}

#[test]
fn nodes_that_are_restarted_one_after_another_wait_for_each_others_replicas() {
    let mut returning = cluster(3, &[REBUILDING, MEMBER, MEMBER]);
    let text = message_of(&returning, "n1");
    let expected = "1 of the 2 replicas in the view are on other nodes that stay up, and 2 are needed: the \
                    volume waits for replica v-00000001 on node n0, which does not have all data";
    assert_eq!(text, expected);
    assert_eq!(message_of(&returning, "n0"), "");
    // No replica is coming: the rest of the view is enough.
    change_volume(&mut returning, |volume| {
        let finding = Finding::wrong("NoPlace", "no other node");
        volume.status.conditions.set(ConditionType::Scheduled, finding, now());
    });
    assert_eq!(message_of(&returning, "n1"), "");
    let five = cluster(5, &[MEMBER, MEMBER, MEMBER, REBUILDING, FAILED]);
    assert!(message_of(&five, "n0").contains("2 of the 3 replicas"));
    assert_eq!(message_of(&cluster(5, &[MEMBER, MEMBER, MEMBER, MEMBER, FAILED]), "n0"), "");
}

#[test]
fn half_of_the_view_has_to_be_elsewhere_whatever_the_number_should_be() {
    // Fewer are configured than are in the view, and two of them are on one node.
    let mut shared = cluster(1, &[MEMBER, MEMBER, MEMBER]);
    let mut moved = shared.replicas_of(&VolumeName::new("v").unwrap()).nth(1).unwrap().clone();
    moved.spec.node_id = NodeName::new("n0").unwrap();
    shared.insert(moved.into());
    assert!(
        message_of(&shared, "n0")
            .contains("1 of the 3 replicas in the view are on other nodes that stay up, and 2 are")
    );
    assert_eq!(message_of(&shared, "n2"), "");
    // More are configured.
    assert!(!message_of(&cluster(3, &[MEMBER, MEMBER]), "n0").is_empty());
    // A member without an object is in the view, and does not count.
    let mut forgotten = cluster(2, &[MEMBER, MEMBER]);
    let name = ReplicaSpec::instance_name(&VolumeName::new("v").unwrap(), id(1));
    forgotten.remove(&crate::objects::Key::new(crate::objects::Kind::Replica, &name));
    assert!(!message_of(&forgotten, "n0").is_empty());
}

#[test]
fn a_member_that_does_not_answer_is_not_counted_on() {
    let mut late = cluster(3, &[MEMBER, MEMBER, MEMBER]);
    change_engine(&mut late, |status| {
        let member = MemberRecord::awaited("late by 9 s".to_owned());
        status.replica_mode_map.insert(id(2), member);
    });
    assert!(message_of(&late, "n0").contains("replica v-00000003 on node n2, which does not answer"));
    assert_eq!(message_of(&late, "n2"), "");
}

#[test]
fn of_cordoned_machines_the_first_one_may_restart() {
    let mut both = cluster(3, &[MEMBER, MEMBER, MEMBER]);
    cordon(&mut both, "n1", 10);
    assert_eq!(message_of(&both, "n1"), "");
    assert!(message_of(&both, "n0").contains("node n1, which was cordoned in Kubernetes before"));
    cordon(&mut both, "n0", 20);
    cordon(&mut both, "n2", 20);
    assert_eq!(message_of(&both, "n1"), "");
    for later in ["n0", "n2"] {
        assert!(message_of(&both, later).contains("node n1, which"), "{later}");
    }
    // At the same moment: by their names.
    cordon(&mut both, "n1", 20);
    assert_eq!(message_of(&both, "n0"), "");
    assert!(message_of(&both, "n1").contains("node n0"));
    let mut two = cluster(2, &[MEMBER, MEMBER]);
    cordon(&mut two, "n0", 1);
    assert_eq!(message_of(&two, "n0"), "");
    assert!(message_of(&two, "n1").contains("node n0, which was cordoned"));
}

#[test]
fn a_change_of_a_node_counts_for_the_volumes_with_a_replica_there() {
    let mut cluster = cluster(3, &[MemberMode::Member; 3]);
    let mut needed = Needed::default();
    needed.look_at_all(&cluster);
    assert!(needed.by_node().is_empty());
    for (node, second) in [("n1", 10), ("n2", 20), ("elsewhere", 30)] {
        cordon(&mut cluster, node, second);
        needed.look_at_node(&cluster, node);
        let mut anew = Needed::default();
        anew.look_at_all(&cluster);
        assert_eq!(needed, anew, "{node} is cordoned");
    }
    assert!(!needed.by_node().is_empty());
    for node in ["n1", "n2", "elsewhere"] {
        let mut uncordoned = cluster.nodes[node].clone();
        uncordoned.spec.discovered = None;
        cluster.insert(uncordoned.into());
        needed.look_at_node(&cluster, node);
    }
    assert_eq!(needed, Needed::default());
}

#[test]
fn an_unused_volume_needs_no_node() {
    let mut idle = cluster(1, &[MEMBER]);
    change_volume(&mut idle, |volume| {
        volume.spec.node_id = None;
        volume.status.current_node_id = None;
        volume.status.state = VolumeState::Detached;
    });
    change_engine(&mut idle, |status| *status = StoredEngineStatus::default());
    assert_eq!(message_of(&idle, "n0"), "");
    change_volume(&mut idle, |volume| volume.spec.node_id = NodeName::new("user").ok());
    assert!(message_of(&idle, "n0").contains("no other replica"), "it is about to be attached");
    let mut going = cluster(1, &[MEMBER]);
    change_volume(&mut going, |volume| volume.metadata.deletion_timestamp = Some(now()));
    assert_eq!(message_of(&going, "n0"), "");
}

/// A drain detaches a volume before Kubernetes attaches it to another node. A former failure may be older
/// than the detachment, so only the completion of the detachment counts.
#[test]
fn a_volume_that_was_detached_a_short_time_ago_counts_as_in_use() {
    let mut idle = cluster(2, &[MEMBER, FAILED]);
    change_volume(&mut idle, |volume| {
        volume.spec.node_id = None;
        volume.status.current_node_id = None;
        volume.status.state = VolumeState::Detached;
        let stopping = Finding::wrong("ReplicasStopping", "the replicas are being stopped");
        volume.status.conditions.set(ConditionType::Settled, stopping, now());
    });
    change_engine(&mut idle, |status| *status = StoredEngineStatus::default());
    let held = |cluster: &ClusterState, node: &str, passed| holds(cluster, node, now() + passed);
    let just_now = MOVE_WAIT.checked_sub(Duration::from_secs(1)).unwrap();
    let hold = held(&idle, "n0", just_now).remove(0);
    assert!(hold.message.contains("detached less than 60 s ago") && !hold.is_engine, "{hold:?}");
    assert!(held(&idle, "n1", just_now).is_empty());
    assert!(held(&idle, "n0", MOVE_WAIT).is_empty());
    let mut later = idle.clone();
    change_volume(&mut later, |volume| {
        volume.status.conditions.set(ConditionType::Settled, Finding::Well, now() + MOVE_WAIT);
    });
    assert_eq!(held(&later, "n0", MOVE_WAIT).len(), 1);
}

#[test]
fn an_engine_that_cannot_be_asked_may_need_every_replica() {
    let mut unseen = cluster(3, &[MEMBER, MEMBER, MEMBER]);
    change_engine(&mut unseen, |status| status.current_state = CurrentState::Unknown);
    assert!(message_of(&unseen, "n0").contains("is unreachable"));
    let mut frozen = cluster(3, &[MEMBER, MEMBER, MEMBER]);
    change_engine(&mut frozen, |status| status.phase = Some(EnginePhase::Frozen));
    assert!(message_of(&frozen, "n1").contains("may need each of them"));
    // A starting engine begins with the known view.
    let mut starting = cluster(3, &[FAILED, MEMBER, MEMBER]);
    change_engine(&mut starting, |status| *status = StoredEngineStatus::default());
    change_volume(&mut starting, |volume| volume.status.state = VolumeState::Attaching);
    assert_eq!(message_of(&starting, "n0"), "");
    assert!(message_of(&starting, "n1").contains("1 of the 2 replicas"));
}

#[test]
fn an_engine_is_in_the_way_of_a_restart_and_not_of_a_drain() {
    let attached = cluster(3, &[MEMBER, MEMBER, MEMBER]);
    let holds = holds(&attached, "user", now());
    assert_eq!(holds.len(), 1, "{holds:?}");
    assert!(holds[0].is_engine && holds[0].message.contains("kubectl drain"), "{holds:?}");
    let mut needed = Needed::default();
    needed.look_at(&attached, "v");
    assert!(needed.by_node().is_empty());
    let last = cluster(1, &[MEMBER]);
    needed.look_at(&last, "v");
    let names: Vec<&str> = needed.by_node().into_keys().map(NodeName::as_str).collect();
    assert_eq!(names, ["n0"]);
    needed.look_at(&ClusterState::default(), "v");
    assert_eq!(needed, Needed::default());
}
