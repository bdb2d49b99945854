//! Tests of each rule with an object that is stored and cannot be used. In all of them, volume v is attached
//! to a and has replicas on a, b and c.

use std::collections::BTreeSet;

use serde_json::json;

use crate::example::{DISK, Example, id, now};
use crate::left_out_objects::LeftOut;
use crate::lost_disk::RemoveDisk;
use crate::lost_node::DeleteNode;
use crate::objects::{CurrentState, DesireState, Key, Kind, Object, Secret, VolumeState};
use crate::observed::{AgentLink, Agents};
use crate::orphans::{self, FoundDirectory};
use crate::reboot::Needed;
use crate::reconcile::{Context, Settings, reconcile};
use crate::requests::{self, CreateVolume, RequestError, SalvageVolume};
use crate::undelete::DeletionRecord;
use crate::{
    Action, AgentCall, ClusterState, Decision, NodeName, Timestamp, csi, drain, given_up_places, reboot,
    undelete,
};

fn key_of(kind: Kind, number: u64) -> Key {
    match kind {
        Kind::Replica => Key::new(kind, format!("v-{}", id(number))),
        Kind::Node => Key::new(kind, "a"),
        Kind::Volume | Kind::Engine => Key::new(kind, "v"),
    }
}

/// The object cannot be used any more, and the controller has started since.
fn leave_out(cluster: &mut ClusterState, kind: Kind, number: u64) {
    let key = key_of(kind, number);
    let raw = match cluster.get(&key) {
        Some(Object::Replica(replica)) => {
            json!({ "spec": { "nodeID": replica.spec.node_id, "diskPath": replica.spec.disk_path } })
        }
        _ => json!({ "spec": { "nodeID": "a" } }),
    };
    cluster.remove(&key);
    cluster.leave_out(key, LeftOut::new(kind, Some(&raw), "damaged", "correct it"));
}

/// The same, and its text says nothing.
fn damage(cluster: &mut ClusterState, kind: Kind, number: u64) {
    let key = key_of(kind, number);
    cluster.remove(&key);
    cluster.leave_out(key, LeftOut::new(kind, None, "damaged", "correct it"));
}

fn without(kind: Kind) -> Example {
    let mut example = Example::new();
    leave_out(&mut example.cluster, kind, 3);
    example
}

const OF_VOLUME: [Kind; 3] = [Kind::Volume, Kind::Engine, Kind::Replica];

#[track_caller]
fn is_left_out<T: std::fmt::Debug>(result: Result<T, RequestError>, kind: Kind) {
    match result {
        Err(error @ RequestError::LeftOut(_)) => {
            let text = error.to_string();
            assert!(text.contains(&key_of(kind, 3).to_string()) && text.contains("correct it"), "{text}");
        }
        other => panic!("{kind:?}: {other:?}"),
    }
}

fn decide(example: &Example, key: &Key) -> Decision {
    let (cluster, agents) = (&example.cluster, &example.agents);
    let context = Context {
        cluster,
        agents,
        now: now(),
        random: [0; shorthorn_types::limits::MAX_MEMBERS],
        settings: Settings::default(),
    };
    reconcile(&context, key)
}

#[test]
fn a_left_out_object_does_not_count_as_missing() {
    let mut cluster = without(Kind::Volume).cluster;
    is_left_out(requests::find(&cluster, "v"), Kind::Volume);
    is_left_out(requests::detach(&cluster, "v"), Kind::Volume);
    is_left_out(
        requests::evict(&without(Kind::Replica).cluster, &key_of(Kind::Replica, 3).name, now()),
        Kind::Replica,
    );
    cluster = without(Kind::Node).cluster;
    is_left_out(requests::find_node(&cluster, "a"), Kind::Node);
    assert!(!given_up_places::is_node_given_up(&cluster, &NodeName::new("a").unwrap()));
    assert!(given_up_places::is_node_given_up(&cluster, &NodeName::new("z").unwrap()));
}

#[test]
fn no_volume_is_created_or_undeleted_beside_its_left_out_objects() {
    for kind in OF_VOLUME {
        let mut cluster = ClusterState::default();
        damage(&mut cluster, kind, 3);
        let wanted = CreateVolume { name: "v".to_owned(), size_bytes: 1 << 30, ..CreateVolume::default() };
        is_left_out(wanted.apply(&cluster, Secret::new([1; 32]), now()), kind);
        is_left_out(undelete::directories(&cluster, "v", &[]), kind);
        let undeleted = undelete::undelete(&cluster, "v", &[], &BTreeSet::new(), Secret::new([1; 32]), now());
        is_left_out(undeleted, kind);
    }
}

/// The losses that the operator has confirmed are those among the known replicas.
#[test]
fn no_replica_is_made_the_volume_beside_one_that_was_left_out() {
    let salvaged = |example: &Example| {
        let wanted = SalvageVolume {
            name: "v".to_owned(),
            replica: id(1).to_string(),
            confirm: "v".to_owned(),
            by: "an operator".to_owned(),
            reason: "a test".to_owned(),
            losses: String::new(),
            known_attach: 0,
            are_all_known: true,
        };
        wanted.apply(&example.cluster, now())
    };
    for kind in [Kind::Engine, Kind::Replica] {
        let mut example = without(kind);
        example.volume().status.state = VolumeState::Detached;
        is_left_out(salvaged(&example), kind);
        example.cluster.forget_left_out(&key_of(kind, 3));
        assert!(salvaged(&example).is_ok(), "{kind:?}");
    }
}

#[test]
fn calls_of_csi_wait_for_a_volume_that_was_left_out() {
    let cluster = without(Kind::Volume).cluster;
    is_left_out(csi::delete(&cluster, "v", now()), Kind::Volume);
    is_left_out(csi::publish(&cluster, "v", "a"), Kind::Volume);
    is_left_out(csi::unpublish(&cluster, "v", Some("a")), Kind::Volume);
    assert!(!csi::is_deleted(&cluster, "v") && !csi::is_away(&cluster, "v", Some("a")));
    assert_eq!(csi::placement(&cluster, "v"), csi::PlacementState::Pending);
    assert!(csi::waits_for(&cluster, "v").contains("correct it"));
    assert!(csi::is_deleted(&cluster, "w") && csi::is_away(&cluster, "w", None));
    // Its engine may write, wherever it was.
    let mut example = without(Kind::Engine);
    let volume = example.volume();
    (volume.spec.node_id, volume.status.state) = (None, VolumeState::Deleting);
    volume.metadata.deletion_timestamp = Some(now());
    assert!(!csi::is_away(&example.cluster, "v", Some("a")));
    assert_eq!(csi::published_node(&example.cluster, &example.cluster.volumes["v"]).unwrap().as_str(), "a");
}

#[test]
fn a_directory_is_not_an_orphan_if_an_object_of_its_volume_was_left_out() {
    let directory = FoundDirectory {
        node: NodeName::new("c").unwrap(),
        disk_path: DISK.to_owned(),
        disk_uuid: None,
        volume: shorthorn_types::VolumeName::new("v").unwrap(),
        replica_id: id(3),
    };
    for kind in OF_VOLUME {
        let mut cluster = ClusterState::default();
        assert_eq!(orphans::orphans(&cluster, vec![directory.clone()]), std::slice::from_ref(&directory));
        damage(&mut cluster, kind, 3);
        assert_eq!(orphans::orphans(&cluster, vec![directory.clone()]), []);
        is_left_out(orphans::find(&cluster, vec![directory.clone()], "c", DISK, &directory.name()), kind);
    }
}

#[test]
fn a_disk_or_node_stays_if_a_replica_may_be_on_it_that_was_left_out() {
    let mut example = without(Kind::Replica);
    let remove =
        |node: &str, lost, force| RemoveDisk { node: node.to_owned(), path: DISK.to_owned(), lost, force };
    let removed = remove("c", false, false).apply(&example.cluster, &example.agents);
    is_left_out(removed, Kind::Replica);
    is_left_out(remove("c", true, false).apply(&example.cluster, &Agents::default()), Kind::Replica);
    // One of the members may be the one that cannot be used.
    is_left_out(remove("b", true, false).apply(&example.cluster, &Agents::default()), Kind::Replica);
    assert!(remove("c", true, true).apply(&example.cluster, &Agents::default()).is_ok(), "by force");
    let conditions = &mut example.node("c").status.conditions;
    *conditions = Default::default();
    let give_up = |cluster: &ClusterState, force| {
        let name = "c".to_owned();
        DeleteNode { name: name.clone(), confirm: name, force }.apply(cluster, &Agents::default(), now())
    };
    example.node("c").spec.allow_scheduling = false;
    is_left_out(give_up(&example.cluster, false), Kind::Replica);
    assert!(give_up(&example.cluster, true).is_ok(), "by force");
    // Its object stays until the replica is known again.
    example.node("c").metadata.deletion_timestamp = Some(now());
    example.agent("c").from_object = true;
    example.agent("c").link = AgentLink::Down { since: Timestamp::MIN, reason: "down".to_owned() };
    let decision = decide(&example, &Key::new(Kind::Node, "c"));
    assert!(!decision.actions.iter().any(|action| matches!(action, Action::Remove(..))), "{decision:#?}");
    example.cluster.forget_left_out(&key_of(Kind::Replica, 3));
    let decision = decide(&example, &Key::new(Kind::Node, "c"));
    assert!(decision.actions.iter().any(|action| matches!(action, Action::Remove(..))), "{decision:#?}");
}

#[test]
fn a_drain_does_not_end_while_a_left_out_replica_may_be_there() {
    let example = without(Kind::Replica);
    let left = drain::remaining(&example.cluster, &example.agents, &example.cluster.nodes["c"]);
    assert!(left.len() == 1 && left[0].held && left[0].message.contains("correct it"), "{left:?}");
    let of_disk =
        drain::remaining_on_disk(&example.cluster, &example.agents, &example.cluster.nodes["c"], DISK);
    assert_eq!(of_disk, left);
    let on_b = drain::remaining_on_disk(&example.cluster, &example.agents, &example.cluster.nodes["b"], DISK);
    assert!(on_b.iter().all(|left| !left.message.contains("correct it")), "{on_b:?}");
}

/// The reason that a run records in its volume, and all else that it does.
fn settled(decision: Decision) -> (Option<String>, Vec<Action>) {
    let (mut reason, mut others) = (None, Vec::new());
    for action in decision.actions {
        match action {
            Action::Write(object) => match *object {
                Object::Volume(volume) => {
                    let about = volume.status.conditions.get(crate::objects::ConditionType::Settled);
                    reason = about.map(|about| about.reason.clone());
                }
                other => others.push(Action::Write(Box::new(other))),
            },
            Action::Emit(_) => {}
            other => others.push(other),
        }
    }
    (reason, others)
}

#[test]
fn a_volume_waits_for_its_engine_that_was_left_out() {
    for state in [VolumeState::Attached, VolumeState::Detaching, VolumeState::Deleting] {
        let mut example = without(Kind::Engine);
        example.volume().status.state = state;
        if state != VolumeState::Attached {
            example.volume().spec.node_id = None;
        }
        if state == VolumeState::Deleting {
            example.volume().metadata.deletion_timestamp = Some(now());
        }
        let (reason, others) = settled(decide(&example, &key_of(Kind::Volume, 0)));
        assert_eq!((reason.as_deref(), others.len()), (Some("ObjectUnknown"), 0), "{state:?}: {others:#?}");
        // The data of a deleted replica stays too.
        example.replica(1, |replica| replica.metadata.deletion_timestamp = Some(now()));
        let decision = decide(&example, &key_of(Kind::Replica, 1));
        let deletes = |action: &Action| matches!(action, Action::Call(_, AgentCall::DeleteReplica { .. }));
        assert!(!decision.actions.iter().any(deletes), "{state:?}: {decision:#?}");
    }
}

#[test]
fn a_replica_that_was_left_out_is_neither_replaced_nor_forgotten_nor_outlived() {
    let mut example = without(Kind::Replica);
    let map = [1, 2, 3].map(|number| {
        let target = crate::ReplicaTarget { addresses: vec![format!("tcp:10.0.0.{number}:1")], local: false };
        (id(number), target)
    });
    example.engine().spec.replica_address_map = map.into();
    let (reason, others) = settled(decide(&example, &key_of(Kind::Volume, 0)));
    assert_eq!((reason.as_deref(), others.len()), (Some("ObjectUnknown"), 0), "{others:#?}");
    // The engine is stopped, and the volume is to be deleted.
    let volume = example.volume();
    volume.metadata.deletion_timestamp = Some(now());
    (volume.spec.node_id, volume.status.state) = (None, VolumeState::Deleting);
    let engine = example.engine();
    (engine.spec.desire_state, engine.status.current_state) = (DesireState::Stopped, CurrentState::Stopped);
    let (reason, others) = settled(decide(&example, &key_of(Kind::Volume, 0)));
    assert_eq!((reason.as_deref(), others.len()), (Some("ObjectUnknown"), 0), "{others:#?}");
    example.cluster.forget_left_out(&key_of(Kind::Replica, 3));
    let (reason, others) = settled(decide(&example, &key_of(Kind::Volume, 0)));
    assert_eq!(
        (reason.as_deref(), others.len()),
        (Some("Deleting"), 2),
        "both replicas are deleted: {others:#?}"
    );
}

#[test]
fn no_engine_is_started_without_the_replicas_that_were_left_out() {
    let mut example = Example::new();
    [1, 2, 3].iter().for_each(|number| leave_out(&mut example.cluster, Kind::Replica, *number));
    let volume = example.volume();
    (volume.status.state, volume.status.attach) = (VolumeState::Attaching, Some(8));
    let (_, others) = settled(decide(&example, &key_of(Kind::Volume, 0)));
    assert!(others.is_empty(), "{others:#?}");
}

#[test]
fn a_left_out_replica_may_be_a_member_unless_its_text_has_failed_at() {
    let mut cluster = Example::new().cluster;
    for (number, raw) in [(1, json!({})), (2, json!({ "status": { "failedAt": "2026-11-26T00:00:00Z" } }))] {
        cluster.remove(&key_of(Kind::Replica, number));
        let left_out = LeftOut::new(Kind::Replica, Some(&raw), "damaged", "correct it");
        cluster.leave_out(key_of(Kind::Replica, number), left_out);
    }
    let members: Vec<String> = cluster.unknown_members_of("v").collect();
    assert!(matches!(&members[..], [one] if one.contains(&id(1).to_string())), "{members:?}");
}

#[test]
fn replicas_and_engine_of_a_left_out_volume_stay() {
    let mut example = Example::new();
    let record =
        DeletionRecord::of(&example.cluster.volumes["v"], &example.cluster.replicas["v-00000001"], true);
    leave_out(&mut example.cluster, Kind::Volume, 0);
    example.replica(1, |replica| {
        replica.metadata.deletion_timestamp = Some(now());
        replica.status.deletion_record = Some(record);
    });
    let decision = decide(&example, &key_of(Kind::Replica, 1));
    let [Action::Write(written)] = &decision.actions[..] else { panic!("{decision:#?}") };
    let Object::Replica(written) = &**written else { panic!("{written:#?}") };
    assert!(written.status.message.contains("correct it") && written.is_left_behind(), "{written:#?}");
    // Its engine looks like one of a deleted volume.
    let engine = example.engine();
    engine.metadata.deletion_timestamp = Some(now());
    (engine.spec.desire_state, engine.status.current_state) = (DesireState::Stopped, CurrentState::Stopped);
    let decision = decide(&example, &key_of(Kind::Engine, 0));
    assert!(!decision.actions.iter().any(|action| matches!(action, Action::Remove(..))), "{decision:#?}");
    // And the node of its process does not stop that.
    example.cluster.remove(&key_of(Kind::Engine, 0));
    let decision = decide(&example, &Key::new(Kind::Node, "a"));
    assert!(!decision.actions.iter().any(|action| matches!(action, Action::Call(..))), "{decision:#?}");
}

fn held(cluster: &ClusterState) -> Vec<&'static str> {
    let mut needed = Needed::default();
    needed.look_at_all(cluster);
    let by_node = needed.by_node();
    let needed_nodes =
        ["a", "b", "c", "d"].into_iter().filter(|node| by_node.contains_key(&NodeName::new(node).unwrap()));
    let needed_nodes: Vec<&str> = needed_nodes.collect();
    let holds = |node: &&&str| reboot::holds(cluster, node, now()).iter().any(|hold| !hold.is_engine);
    let held: Vec<&str> = ["a", "b", "c", "d"].iter().filter(holds).copied().collect();
    assert_eq!(held, needed_nodes, "guard pods follow the same rule");
    held
}

#[test]
fn nodes_that_an_unknown_object_may_need_are_not_safe_to_restart() {
    let mut example = Example::new();
    example.add_node("d");
    assert!(held(&example.cluster).is_empty());
    for (kind, number) in [(Kind::Volume, 0), (Kind::Engine, 0), (Kind::Replica, 3)] {
        let mut known = example.cluster.clone();
        leave_out(&mut known, kind, number);
        assert_eq!(held(&known), ["a", "b", "c"], "{kind:?}");
        let hold = reboot::holds(&known, "b", now()).remove(0);
        assert!(hold.message.contains("not safe") && hold.message.contains("correct it"), "{hold:?}");
        let mut damaged = example.cluster.clone();
        damage(&mut damaged, kind, number);
        assert_eq!(held(&damaged), ["a", "b", "c", "d"], "{kind:?}, whose node is not known");
    }
    // A volume that was refused before it had anything holds nothing up.
    let mut refused = example.cluster.clone();
    let raw = json!({ "spec": { "size": "7" } });
    refused.leave_out(
        Key::new(Kind::Volume, "new"),
        LeftOut::new(Kind::Volume, Some(&raw), "bad size", "correct it"),
    );
    assert!(held(&refused).is_empty());
}

/// Two of three members are needed elsewhere; of the node of one of these it is not known whether it stays.
#[test]
fn a_left_out_node_counts_as_cordoned_before_all_others() {
    let mut cluster = Example::new().cluster;
    leave_out(&mut cluster, Kind::Node, 0);
    assert_eq!(held(&cluster), ["b", "c"]);
    assert!(reboot::holds(&cluster, "b", now())[0].message.contains("node a, whose object cannot be used"));
    let mut needed = Needed::default();
    needed.look_at_all(&Example::new().cluster);
    needed.look_at_node(&cluster, "a");
    let mut anew = Needed::default();
    anew.look_at_all(&cluster);
    assert_eq!(needed, anew);
}
