use shorthorn_types::{ReplicaId, VolumeName};

use super::*;
use crate::example::{self, Example};
use crate::objects::{
    DataState, DesireState, DiskSpec, Metadata, ReplicaSpec, Secret, StoredReplicaStatus, VolumeState,
};
use crate::observed::{AgentLink, ObservedAgent, ObservedDisk};
use crate::requests::{CreateVolume, SetDisk};
use crate::{Timestamp, given_up_places};

const DISK: &str = "/d";

fn now() -> Timestamp {
    Timestamp::UNIX_EPOCH
}

/// Returns node n with a disk that has the only replica of a volume, if `occupied`.
fn cluster(occupied: bool) -> ClusterState {
    let mut cluster = ClusterState::default();
    let mut node = Node::new("n", now());
    node.spec.disks.insert(DISK.to_owned(), DiskSpec::of_new(1 << 40));
    cluster.insert(node.into());
    if !occupied {
        return cluster;
    }
    let wanted = CreateVolume { name: "v".to_owned(), size_bytes: 1 << 20, ..CreateVolume::default() };
    let Ok(Change::Store(mut volume)) = wanted.apply(&cluster, Secret::new([1; 32]), now()) else {
        panic!("the volume is refused")
    };
    let replica_id = ReplicaId::from_random(1);
    volume.status.state = VolumeState::Detached;
    volume.status.first_members = vec![replica_id];
    cluster.insert(volume.into());
    let volume_name = VolumeName::new("v").unwrap();
    let metadata = Metadata::new(ReplicaSpec::instance_name(&volume_name, replica_id), now());
    let spec = ReplicaSpec {
        volume_name,
        volume_size: 1 << 20,
        replica_id,
        node_id: NodeName::new("n").unwrap(),
        disk_path: DISK.to_owned(),
        disk_id: String::new(),
        desire_state: DesireState::Stopped,
        eviction_requested: false,
    };
    let status = StoredReplicaStatus { data: DataState::Present, ..StoredReplicaStatus::default() };
    cluster.insert(Replica { metadata, spec, status }.into());
    cluster
}

fn agents(problem: Option<&str>) -> Agents {
    let mut agent = ObservedAgent { link: AgentLink::Synced, ..ObservedAgent::new("http://agent", now()) };
    let disk = ObservedDisk { problem: problem.map(str::to_owned), ..ObservedDisk::default() };
    agent.disks.insert(DISK.to_owned(), disk);
    [(NodeName::new("n").unwrap(), agent)].into_iter().collect()
}

fn remove(lost: bool, force: bool) -> RemoveDisk {
    RemoveDisk { node: "n".to_owned(), path: DISK.to_owned(), lost, force }
}

#[test]
fn only_an_empty_disk_is_taken_out_of_use() {
    let refused = remove(false, false).apply(&cluster(true), &agents(None)).unwrap_err();
    assert!(matches!(refused, RequestError::DiskHasReplicas { .. }) && refused.to_string().contains("drain"));
    let Ok(Change::Store(node)) = remove(false, false).apply(&cluster(false), &agents(None)) else {
        panic!("it stays")
    };
    assert!(node.spec.disks.is_empty());
    let Ok(Change::Store(closed)) = remove(false, false).closed(&cluster(false), &agents(None)) else {
        panic!("a replica could still be placed there")
    };
    assert!(!closed.spec.disks[DISK].allow_scheduling);
    let mut cluster_closed = cluster(false);
    cluster_closed.insert(closed.into());
    let again = remove(false, false).closed(&cluster_closed, &agents(None));
    assert!(matches!(again, Ok(Change::AlreadySo(_))));
    assert!(remove(false, false).closed(&cluster(true), &agents(None)).is_err(), "replicas are on it");
    let refused = remove(false, false).leave_trash(2).unwrap_err().to_string();
    assert!(refused.contains("2 directories") && refused.contains("--force"), "{refused}");
    assert!(remove(false, false).leave_trash(0).is_ok() && remove(false, true).leave_trash(2).is_ok());
    let other = RemoveDisk { path: "/other".to_owned(), ..remove(false, false) };
    assert!(matches!(other.apply(&cluster(false), &agents(None)), Err(RequestError::NoDisk { .. })));
}

#[test]
fn a_disk_is_given_up_if_it_cannot_be_used_and_others_have_its_data_or_by_force() {
    let refused =
        |cluster: &ClusterState, problem| remove(true, false).apply(cluster, &agents(problem)).unwrap_err();
    assert!(matches!(refused(&cluster(false), None), RequestError::DiskIsUsable { .. }));
    let last = refused(&cluster(true), Some("it is read-only"));
    assert!(matches!(&last, RequestError::DiskHasLast { volumes, .. } if volumes == "v"), "{last}");
    for change in [
        remove(true, false).apply(&cluster(false), &agents(Some("it is read-only"))),
        remove(true, false).apply(&cluster(false), &Agents::default()),
        remove(true, true).apply(&cluster(true), &agents(None)),
    ] {
        let Ok(Change::Store(node)) = change else { panic!("{change:?}") };
        let disk = &node.spec.disks[DISK];
        assert!(disk.lost && disk.eviction_requested && !disk.allow_scheduling, "{disk:?}");
    }
    let mut cluster = cluster(true);
    let Ok(Change::Store(node)) = remove(true, true).apply(&cluster, &agents(None)) else {
        panic!("it is kept")
    };
    cluster.insert(node.into());
    assert!(cluster.replicas.values().all(|replica| given_up_places::is_disk_given_up(&cluster, replica)));
    assert!(matches!(remove(true, false).apply(&cluster, &agents(None)), Ok(Change::AlreadySo(_))));
    // It is well again.
    let (node, path, allow) = ("n".to_owned(), DISK.to_owned(), Some(true));
    let back = SetDisk { node, path, allow_scheduling: allow, ..SetDisk::default() }.apply(&cluster);
    let Ok(Change::Store(node)) = back else { panic!("{back:?}") };
    assert!(!node.spec.disks[DISK].lost && !node.spec.disks[DISK].eviction_requested);
}

/// Has two of three members on lost disks: the data of the third one is not enough to start.
#[test]
fn a_disk_is_not_given_up_if_too_few_members_are_left_elsewhere() {
    let mut example = Example::new();
    example.volume().status.state = VolumeState::Detached;
    example.engine().status = Default::default();
    example.node("b").spec.disks.get_mut(example::DISK).unwrap().lost = true;
    let give_up = |example: &Example| {
        let (node, path) = ("a".to_owned(), example::DISK.to_owned());
        RemoveDisk { node, path, lost: true, force: false }.apply(&example.cluster, &Agents::default())
    };
    let refused = give_up(&example).unwrap_err();
    assert!(matches!(&refused, RequestError::DiskHasMajority { volumes, .. } if volumes == "v"), "{refused}");
    assert!(refused.to_string().contains("volume salvage"), "{refused}");
    example.replica(3, |replica| replica.status.failed_at = Some(now()));
    assert!(matches!(give_up(&example), Err(RequestError::DiskHasLast { .. })), "the third one is stale");
    example.replica(3, |replica| replica.status.failed_at = None);
    example.node("b").spec.disks.get_mut(example::DISK).unwrap().lost = false;
    assert!(matches!(give_up(&example), Ok(Change::Store(_))));
}

/// A decision has given a replica a place on the disk, and the store is about to write it.
#[test]
fn a_disk_with_a_reserved_place_stays() {
    let mut cluster = cluster(false);
    let replica = self::cluster(true).replicas.values().next().unwrap().clone();
    assert!(cluster.reserve(vec![replica.clone()]));
    for change in [
        remove(false, false).apply(&cluster, &agents(None)),
        remove(false, false).closed(&cluster, &agents(None)),
    ] {
        assert!(matches!(change, Err(RequestError::DiskHasReplicas { .. })), "{change:?}");
    }
    cluster.forget_reservation(&replica.metadata.name);
    assert!(remove(false, false).apply(&cluster, &agents(None)).is_ok());
}

#[test]
fn a_disk_that_its_agent_keeps_is_opened_again() {
    let mut cluster = cluster(false);
    let Ok(Change::Store(closed)) = remove(false, false).closed(&cluster, &agents(None)) else {
        panic!("it is open")
    };
    cluster.insert(closed.into());
    let Ok(Change::Store(open)) = remove(false, false).reopened(&cluster) else {
        panic!("it stays cordoned")
    };
    assert!(open.spec.disks[DISK].allow_scheduling);
    // The operator drains it meanwhile.
    let mut drained = open.clone();
    let disk = drained.spec.disks.get_mut(DISK).unwrap();
    (disk.eviction_requested, disk.allow_scheduling) = (true, false);
    cluster.insert(drained.into());
    assert!(matches!(remove(false, false).reopened(&cluster), Ok(Change::AlreadySo(_))));
}

/// A replica was given a place, and an operator closes the disk before the place is reserved.
#[test]
fn a_place_on_a_disk_that_was_closed_meanwhile_is_not_reserved() {
    let mut cluster = cluster(false);
    let replica = self::cluster(true).replicas.values().next().unwrap().clone();
    let Ok(Change::Store(closed)) = remove(false, false).closed(&cluster, &agents(None)) else {
        panic!("it is open")
    };
    let mut open = cluster.nodes["n"].clone();
    cluster.insert(closed.into());
    assert!(!cluster.reserve(vec![replica.clone()]) && cluster.replicas.coming().next().is_none());
    // The same holds for a disk that is gone, and for a node that is drained.
    let Ok(Change::Store(without)) = remove(false, false).apply(&cluster, &agents(None)) else {
        panic!("nothing is on it")
    };
    cluster.insert(without.into());
    assert!(!cluster.reserve(vec![replica.clone()]));
    open.spec.eviction_requested = true;
    cluster.insert(open.clone().into());
    assert!(!cluster.reserve(vec![replica.clone()]));
    open.spec.eviction_requested = false;
    open.metadata.deletion_timestamp = Some(now());
    cluster.insert(open.clone().into());
    assert!(!cluster.reserve(vec![replica.clone()]), "the node is given up");
    open.metadata.deletion_timestamp = None;
    cluster.insert(open.into());
    assert!(cluster.reserve(vec![replica]));
}
