//! Volume v has replicas 1 and 2 on nodes a and b, and is attached to c; a is drained.

use std::collections::BTreeMap;

use shorthorn_types::{ReplicaId, VolumeName};

use super::*;
use crate::objects::{
    CurrentState, DesireState, DiskSpec, EnginePhase, EngineSpec, Finding, Frontend, MemberRecord, Metadata,
    NodeSpec, NodeStatus, ReplicaSpec, Secret, StoredEngineStatus, StoredReplicaStatus,
};
use crate::requests::{Change, CreateVolume};
use crate::{NodeName, Timestamp};

fn now() -> Timestamp {
    Timestamp::UNIX_EPOCH
}

fn id(n: u64) -> ReplicaId {
    ReplicaId::from_random(n)
}

fn replica(n: u64, node: &str) -> Replica {
    let volume_name = VolumeName::new("v").unwrap();
    Replica {
        metadata: Metadata::new(ReplicaSpec::instance_name(&volume_name, id(n)), now()),
        spec: ReplicaSpec {
            volume_name,
            volume_size: 1 << 30,
            replica_id: id(n),
            node_id: NodeName::new(node).unwrap(),
            disk_path: "/disk".to_owned(),
            disk_id: "disk".to_owned(),
            desire_state: DesireState::Running,
            eviction_requested: false,
        },
        status: StoredReplicaStatus {
            data: DataState::Present,
            healthy_at: Some(now()),
            ..StoredReplicaStatus::default()
        },
    }
}

fn cluster() -> ClusterState {
    let mut cluster = ClusterState::default();
    for name in ["a", "b", "c"] {
        let spec = NodeSpec { eviction_requested: name == "a", ..NodeSpec::default() };
        let metadata = Metadata::new(name, now());
        cluster.insert(Node { metadata, spec, status: NodeStatus::default() }.into());
    }
    let wanted = CreateVolume {
        name: "v".to_owned(),
        size_bytes: 1 << 30,
        number_of_replicas: Some(2),
        ..CreateVolume::default()
    };
    let Ok(Change::Store(mut volume)) = wanted.apply(&cluster, Secret::new([1; 32]), now()) else {
        panic!("the volume is refused");
    };
    volume.spec.node_id = Some(NodeName::new("c").unwrap());
    volume.status.current_node_id = volume.spec.node_id.clone();
    volume.status.state = VolumeState::Attached;
    let node_id = volume.spec.node_id.clone();
    cluster.insert(volume.into());
    let members = (1..=2).map(|n| (id(n), MemberRecord::of(MemberMode::Member)));
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
            replica_mode_map: members.collect(),
            ..StoredEngineStatus::default()
        },
    };
    cluster.insert(engine.into());
    cluster.insert(replica(1, "a").into());
    cluster.insert(replica(2, "b").into());
    cluster
}

/// Returns the rest of the drain of a: (held, message) of each.
fn left_on_a(cluster: &ClusterState) -> Vec<(bool, String)> {
    let left = remaining(cluster, &Agents::default(), &cluster.nodes["a"]);
    left.into_iter().map(|left| (left.held, left.message)).collect()
}

fn only(cluster: &ClusterState) -> (bool, String) {
    let left = left_on_a(cluster);
    assert_eq!(left.len(), 1, "{left:?}");
    left.into_iter().next().unwrap()
}

#[test]
fn a_replica_that_is_being_replaced_says_by_whom() {
    let mut cluster = cluster();
    assert_eq!(only(&cluster), (false, "the replica is being replaced".to_owned()));
    cluster.insert(replica(3, "c").into());
    let (held, message) = only(&cluster);
    assert!(!held && message.starts_with("replica v-00000003 on node c is being rebuilt"), "{message}");
}

#[test]
fn a_replica_that_cannot_be_moved_is_held_with_the_reason() {
    let full = || {
        let mut cluster = cluster();
        let volume = cluster.volumes.get_mut("v").unwrap();
        let finding = Finding::wrong("NoPlace", "2 of 3 replicas have a place; b: full");
        volume.status.conditions.set(ConditionType::Scheduled, finding, now());
        cluster
    };
    let (held, message) = only(&full());
    assert!(
        held && message.ends_with("no other disk can take it: 2 of 3 replicas have a place; b: full"),
        "{message}"
    );

    let mut frozen = cluster();
    frozen.engines.get_mut("v").unwrap().status.phase = Some(EnginePhase::Frozen);
    assert_eq!(only(&frozen), (true, "volume v is not served: shorthornctl volume why v".to_owned()));
}

#[test]
fn a_detached_volume_is_held_and_the_last_copy_of_its_data_named() {
    let mut cluster = cluster();
    let volume = cluster.volumes.get_mut("v").unwrap();
    volume.status.state = VolumeState::Detached;
    volume.status.current_node_id = None;
    volume.spec.node_id = None;
    let (held, message) = only(&cluster);
    assert!(held && message.contains("volume attach v --node NODE"), "{message}");
    assert!(!message.contains("no other replica"), "{message}");
    let mut behind = replica(2, "b");
    behind.status.failed_at = Some(now());
    cluster.insert(behind.into());
    assert!(only(&cluster).1.contains("no other replica has its data"));
    let mut behind = replica(1, "a");
    behind.status.failed_at = Some(now());
    cluster.insert(behind.into());
    cluster.insert(replica(2, "b").into());
    assert!(!only(&cluster).1.contains("no other replica"));
}

#[test]
fn a_disk_is_drained_without_its_node() {
    let mut cluster = cluster();
    let mut node = cluster.nodes["a"].clone();
    node.spec.eviction_requested = false;
    let drained = DiskSpec { eviction_requested: true, ..DiskSpec::of_new(1 << 40) };
    node.spec.disks =
        [("/disk".to_owned(), drained), ("/other".to_owned(), DiskSpec::of_new(1 << 40))].into();
    cluster.insert(node.clone().into());
    let mut other = replica(3, "a");
    other.spec.disk_path = "/other".to_owned();
    cluster.insert(other.clone().into());
    assert_eq!(eviction_reason(&cluster, &replica(1, "a")), Some(EvictionReason::Disk));
    assert_eq!(eviction_reason(&cluster, &other), None);
    assert_eq!(eviction_reason(&cluster, &replica(2, "b")), None);
    let remaining = |path: &str| remaining_on_disk(&cluster, &Agents::default(), &node, path);
    assert_eq!(remaining("/disk").len(), 1);
    assert!(
        remaining("/disk")[0].message.contains("v-00000003 on node a is being rebuilt"),
        "{:?}",
        remaining("/disk")
    );
    node.spec.eviction_requested = true;
    cluster.insert(node.into());
    assert_eq!(eviction_reason(&cluster, &other), Some(EvictionReason::Node));
}

#[test]
fn an_engine_holds_its_node() {
    let mut cluster = cluster();
    let here = NodeName::new("a").unwrap();
    let (mut volume, mut engine) = (cluster.volumes["v"].clone(), cluster.engines["v"].clone());
    volume.spec.node_id = Some(here.clone());
    engine.spec.node_id = Some(here);
    cluster.insert(volume.into());
    cluster.insert(engine.into());
    let left = left_on_a(&cluster);
    assert_eq!(left.len(), 2, "{left:?}");
    assert!(left[0].0 && left[0].1.contains("shorthornctl volume detach v"), "{left:?}");
}
