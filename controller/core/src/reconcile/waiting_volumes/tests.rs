//! Tests which events start a search for places, and which volumes it finds.

use std::collections::BTreeSet;

use super::*;
use crate::Timestamp;
use crate::objects::{
    DiskSpec, DiskStatus, Finding, Metadata, NodeSpec, NodeStatus, Robustness, Secret, VolumeState,
};
use crate::requests::{Change, CreateVolume};

const GIB: u64 = 1 << 30;
const DISK: &str = "/disk";

fn cluster(volumes: usize) -> ClusterState {
    let mut cluster = ClusterState::default();
    for at in 0..volumes {
        insert(&mut cluster, &format!("v{at:03}"), 10 * GIB);
    }
    cluster
}

/// Inserts a volume that is being created.
fn insert(cluster: &mut ClusterState, name: &str, size_bytes: u64) {
    let wanted = CreateVolume { name: name.to_owned(), size_bytes, ..CreateVolume::default() };
    let made = wanted.apply(cluster, Secret::new([1; 32]), Timestamp::UNIX_EPOCH);
    let Ok(Change::Store(volume)) = made else { panic!("the volume is refused") };
    cluster.insert(volume.into());
}

fn node(total_bytes: u64) -> Node {
    let mut node = Node::new("a", Timestamp::UNIX_EPOCH);
    node.status.conditions.set(ConditionType::Ready, Finding::Well, Timestamp::UNIX_EPOCH);
    let disk = DiskSpec { storage_reserved: 0, ..DiskSpec::of_new(total_bytes) };
    node.spec.disks.insert(DISK.to_owned(), disk);
    let status = DiskStatus { storage_maximum: total_bytes, ..DiskStatus::default() };
    node.status.disk_status.insert(DISK.to_owned(), status);
    node
}

fn opens(cluster: &mut ClusterState, node: Node) -> bool {
    cluster.insert(node.into());
    may_open(cluster, SchedulingLimits::default(), &Key::new(Kind::Node, "a"))
}

#[test]
fn only_a_node_with_room_for_the_smallest_waiting_volume_starts_a_search() {
    assert!(!opens(&mut cluster(0), node(100 * GIB)), "no volume waits");
    let mut cluster = cluster(2);
    assert!(opens(&mut cluster, node(10 * GIB)));
    assert!(!opens(&mut cluster, node(9 * GIB)));
    insert(&mut cluster, "small", GIB);
    assert!(opens(&mut cluster, node(9 * GIB)));
    cluster.remove(&Key::new(Kind::Volume, "small"));
    assert!(!opens(&mut cluster, node(9 * GIB)));
    let with = |change: fn(&mut Node)| {
        let mut changed = node(100 * GIB);
        change(&mut changed);
        changed
    };
    for closed in [
        with(|node| node.spec.allow_scheduling = false),
        with(|node| node.spec.eviction_requested = true),
        with(|node| {
            node.status.conditions.set(ConditionType::Ready, Finding::wrong("x", "x"), Timestamp::UNIX_EPOCH)
        }),
        with(|node| node.status.disk_status.get_mut(DISK).unwrap().problem = Some("read-only".to_owned())),
        with(|node| node.spec.disks.get_mut(DISK).unwrap().allow_scheduling = false),
        with(|node| node.spec.disks.clear()),
    ] {
        assert!(!opens(&mut cluster, closed));
    }
    assert!(opens(&mut cluster, node(100 * GIB)));
    assert!(
        may_open(&cluster, SchedulingLimits::default(), &Key::new(Kind::Replica, "gone-r1")),
        "its place is free"
    );
    assert!(!may_open(&cluster, SchedulingLimits::default(), &Key::new(Kind::Node, "gone")));
}

#[test]
fn a_search_checks_each_waiting_volume_once_after_the_last_event() {
    let mut cluster = cluster(100);
    let mut search = Search::default();
    assert!(!search.is_running() && search.next(&cluster, 30).is_empty());
    search.start();
    let first = search.next(&cluster, 30);
    assert_eq!((first.len(), first[0].name.as_str()), (30, "v000"));
    // Another event, and one of the volumes gets its place.
    search.start();
    search.start();
    let mut placed = cluster.volumes["v050"].clone();
    placed.status.state = VolumeState::Detached;
    cluster.insert(placed.into());
    let mut seen: Vec<String> = Vec::new();
    let mut batches = 0;
    while search.is_running() {
        batches += 1;
        seen.extend(search.next(&cluster, 30).into_iter().map(|key| key.name));
        assert!(batches < 20, "it never ends");
    }
    let distinct: BTreeSet<&String> = seen.iter().collect();
    assert_eq!((seen.len(), distinct.len()), (69 + 99, 99), "the rest of one round, and one more");
    assert!(!seen.contains(&"v050".to_owned()));
}

#[test]
fn many_waiting_volumes_are_checked_less_often() {
    let least = Duration::from_secs(5);
    assert_eq!(check_after(&cluster(10), least), least);
    assert_eq!(check_after(&cluster(1000), least), CHECK_EACH * 1000);
    let mut served = cluster(0);
    insert(&mut served, "v", GIB);
    let mut volume = served.volumes["v"].clone();
    (volume.status.state, volume.status.robustness) = (VolumeState::Attached, Robustness::Degraded);
    served.insert(volume.clone().into());
    assert_eq!(served.waiting_volumes(), 1);
    volume.status.robustness = Robustness::Healthy;
    served.insert(volume.into());
    assert_eq!((served.waiting_volumes(), served.least_useful_room()), (0, None));
}

#[test]
fn a_node_that_is_drained_makes_its_volumes_wait() {
    let mut cluster = cluster(0);
    let spec = NodeSpec { eviction_requested: true, ..NodeSpec::default() };
    let metadata = Metadata::new("b", Timestamp::UNIX_EPOCH);
    cluster.insert(Node { metadata, spec, status: NodeStatus::default() }.into());
    assert_eq!(cluster.least_useful_room(), Some(UsefulRoom::Any));
    assert!(opens(&mut cluster, node(GIB)), "any room may be enough");
}
