use super::*;
use crate::objects::{
    DataLocality, DiskSpec, DiskStatus, Frontend, Metadata, Node, NodeSpec, Object, SECRET_BYTES, Secret,
};
use crate::scheduler::SchedulingLimits;
use crate::{NodeName, Timestamp, labels};

fn now() -> Timestamp {
    Timestamp::UNIX_EPOCH
}

fn secret(byte: u8) -> Secret {
    Secret::new([byte; SECRET_BYTES])
}

fn wanted(name: &str) -> CreateVolume {
    CreateVolume { name: name.to_owned(), size_bytes: 1 << 30, ..CreateVolume::default() }
}

fn stored(change: Change<Volume>) -> Volume {
    match change {
        Change::Store(volume) => volume,
        Change::AlreadySo(volume) => panic!("{volume:?} is so already"),
    }
}

fn cluster_with(node: &str, volume: Volume) -> ClusterState {
    let mut cluster = ClusterState::default();
    cluster.insert(Object::Node(Node {
        metadata: Metadata::new(node, now()),
        spec: Default::default(),
        status: Default::default(),
    }));
    cluster.insert(volume.into());
    cluster
}

#[test]
fn a_new_volume_gets_the_defaults_and_the_same_call_finds_it() {
    let volume = stored(wanted("v").apply(&ClusterState::default(), secret(1), now()).unwrap());
    assert_eq!(volume.spec.number_of_replicas, DEFAULT_REPLICAS);
    assert_eq!(volume.spec.frontend, Frontend::Auto);
    let cluster = cluster_with("n", volume.clone());
    // The secret is another one each time, which does not count as a difference.
    let again = wanted("v").apply(&cluster, secret(2), now()).unwrap();
    assert_eq!(again, Change::AlreadySo(volume));
    let other = CreateVolume { number_of_replicas: Some(2), ..wanted("v") };
    let error = other.apply(&cluster, secret(1), now()).unwrap_err();
    assert_eq!(error, RequestError::Exists { name: "v".to_owned(), differs: "number of replicas" });
}

#[test]
fn invalid_requests_for_volumes_are_refused() {
    let refused =
        |wanted: CreateVolume| wanted.apply(&ClusterState::default(), secret(1), now()).unwrap_err();
    assert!(matches!(refused(wanted("V")), RequestError::VolumeName(_)));
    for size_bytes in [0, 4095, 4097, MAX_VOLUME_BYTES + 4096] {
        assert_eq!(refused(CreateVolume { size_bytes, ..wanted("v") }), RequestError::Size(size_bytes));
    }
    assert_eq!(
        refused(CreateVolume { number_of_replicas: Some(9), ..wanted("v") }),
        RequestError::Replicas(9)
    );
    let frontend = CreateVolume { frontend: Frontend::Unknown, ..wanted("v") };
    assert!(matches!(refused(frontend), RequestError::Frontend(_)));
}

#[test]
fn a_refused_attach_names_the_obstacle() {
    let volume = stored(wanted("v").apply(&ClusterState::default(), secret(1), now()).unwrap());
    let cluster = cluster_with("n", volume);
    let attached = stored(attach(&cluster, "v", "n").unwrap());
    let cluster = cluster_with("n", attached.clone());
    assert_eq!(attach(&cluster, "v", "n").unwrap(), Change::AlreadySo(attached));
    let mut both = cluster.clone();
    let mut second = cluster.nodes["n"].clone();
    second.metadata.name = "m".to_owned();
    both.insert(second.into());
    assert!(matches!(attach(&both, "v", "m"), Err(RequestError::AttachedElsewhere { .. })));
    assert_eq!(attach(&cluster, "v", "m"), Err(RequestError::NoNode("m".to_owned())));
    assert_eq!(attach(&cluster, "w", "n"), Err(RequestError::NoVolume("w".to_owned())));
    let gone = stored(delete(&cluster, "v", now()).unwrap());
    assert!(gone.metadata.is_deleting());
    // A store that takes a deletion by a call of its own would drop anything else.
    assert_eq!((&gone.spec, &gone.status), (&cluster.volumes["v"].spec, &cluster.volumes["v"].status));
    let cluster = cluster_with("n", gone);
    assert_eq!(attach(&cluster, "v", "n"), Err(RequestError::Deleting("v".to_owned())));
    assert!(matches!(delete(&cluster, "v", now()), Ok(Change::AlreadySo(_))));
    let again = wanted("v").apply(&cluster, secret(1), now());
    assert_eq!(again, Err(RequestError::Deleting("v".to_owned())));
}

#[test]
fn disk_paths_are_plain() {
    let volume = stored(wanted("v").apply(&ClusterState::default(), secret(1), now()).unwrap());
    let cluster = cluster_with("n", volume);
    assert!(check_disk(&cluster, "n", "/var/lib/longhorn").is_ok());
    for bad in ["", "/", "var", "/a/", "/a//b", "/a/../b", "/a/./b", "/a\0b"] {
        assert!(matches!(check_disk(&cluster, "n", bad), Err(RequestError::DiskPath(_))), "{bad:?}");
    }
}

#[test]
fn objects_read_back_from_json_and_debug_hides_the_secret() {
    let volume = stored(wanted("v").apply(&ClusterState::default(), secret(0xab), now()).unwrap());
    let object = Object::Volume(volume);
    let text = serde_json::to_string(&object).unwrap();
    for name in
        ["\"kind\":\"Volume\"", "\"numberOfReplicas\":3", "\"size\":\"1073741824\"", "resourceVersion"]
    {
        assert!(text.contains(name), "{name} in {text}");
    }
    assert_eq!(serde_json::from_str::<Object>(&text).unwrap(), object);
    assert!(text.contains("abab") && !format!("{object:?}").contains("abab"));
}

/// Returns a cluster with node n, which is in a zone and has the disk /d.
fn cluster_with_disk() -> ClusterState {
    let volume = stored(wanted("v").apply(&ClusterState::default(), secret(1), now()).unwrap());
    let mut cluster = cluster_with("n", volume);
    let mut node = cluster.nodes["n"].clone();
    node.spec.allow_scheduling = true;
    node.status.zone = Some("rack".parse().unwrap());
    node.spec.disks.insert("/d".to_owned(), DiskSpec::of_new(1000));
    cluster.insert(node.into());
    cluster
}

fn texts(texts: &[&str]) -> Option<Vec<String>> {
    Some(texts.iter().map(ToString::to_string).collect())
}

fn name() -> String {
    "n".to_owned()
}

/// Stores a change that has to be one.
fn put(cluster: &mut ClusterState, change: Result<Change<Node>, RequestError>) {
    match change.unwrap() {
        Change::Store(node) => cluster.insert(node.into()),
        Change::AlreadySo(node) => panic!("{node:?} is so already"),
    }
}

#[test]
fn nodes_are_set_in_part() {
    let mut cluster = cluster_with_disk();
    let set =
        SetNode { name: name(), tags: texts(&["fast"]), zone: Some("x".to_owned()), ..SetNode::default() };
    let change = set.apply(&cluster, now());
    put(&mut cluster, change);
    assert!(matches!(set.apply(&cluster, now()), Ok(Change::AlreadySo(_))));
    let cordon = SetNode { name: name(), allow_scheduling: Some(false), ..SetNode::default() };
    let change = cordon.apply(&cluster, now());
    put(&mut cluster, change);
    let node = &cluster.nodes["n"];
    assert!(!node.spec.allow_scheduling && node.spec.tags == labels(["fast"]).unwrap());
    assert_eq!(node.zone().map(|zone| zone.as_str()), Some("x"));
    let change =
        SetNode { name: name(), zone: Some(String::new()), ..SetNode::default() }.apply(&cluster, now());
    put(&mut cluster, change);
    assert_eq!(cluster.nodes["n"].zone().map(|zone| zone.as_str()), Some("rack"));

    let drained = SetNode { name: name(), eviction_requested: Some(true), ..SetNode::default() };
    let uncordon = SetNode { name: name(), allow_scheduling: Some(true), ..SetNode::default() };
    let state = |cluster: &ClusterState| {
        (cluster.nodes["n"].spec.allow_scheduling, cluster.nodes["n"].spec.eviction_requested)
    };
    for (set, result) in [(&uncordon, (true, false)), (&drained, (false, true)), (&uncordon, (true, false))] {
        let change = set.apply(&cluster, now());
        put(&mut cluster, change);
        assert_eq!(state(&cluster), result);
    }

    let bad = SetNode { name: name(), tags: texts(&["a b"]), ..SetNode::default() }.apply(&cluster, now());
    assert!(matches!(bad, Err(RequestError::Label(_))));
    let missing = SetNode { name: "m".to_owned(), ..SetNode::default() }.apply(&cluster, now());
    assert_eq!(missing, Err(RequestError::NoNode("m".to_owned())));
}

#[test]
fn disks_are_set_in_part() {
    let mut cluster = cluster_with_disk();
    let path = || "/d".to_owned();
    let disk = SetDisk { node: name(), path: path(), reserved_bytes: Some(7), ..SetDisk::default() };
    let change = disk.apply(&cluster);
    put(&mut cluster, change);
    let disk = SetDisk { node: name(), path: path(), tags: texts(&["ssd"]), ..SetDisk::default() };
    let change = disk.apply(&cluster);
    put(&mut cluster, change);
    let disk = &cluster.nodes["n"].spec.disks["/d"];
    let expected = DiskSpec {
        allow_scheduling: true,
        eviction_requested: false,
        lost: false,
        storage_reserved: 7,
        tags: labels(["ssd"]).unwrap(),
    };
    assert_eq!(*disk, expected);
    let set = |allow_scheduling, eviction_requested| SetDisk {
        node: name(),
        path: path(),
        allow_scheduling,
        eviction_requested,
        ..SetDisk::default()
    };
    let drain = set(None, Some(true));
    for (set, result) in [(&drain, (false, true)), (&set(Some(true), None), (true, false))] {
        let change = set.apply(&cluster);
        put(&mut cluster, change);
        let disk = &cluster.nodes["n"].spec.disks["/d"];
        assert_eq!((disk.allow_scheduling, disk.eviction_requested), result);
    }
    let missing = SetDisk { node: name(), path: "/e".to_owned(), ..SetDisk::default() }.apply(&cluster);
    assert!(matches!(missing, Err(RequestError::NoDisk { .. })));
}

#[test]
fn a_volume_restricts_the_places_of_its_replicas() {
    let choosy = CreateVolume {
        replica_zone_hard_anti_affinity: true,
        node_selector: vec!["fast".to_owned()],
        disk_selector: vec!["ssd".to_owned()],
        data_locality: DataLocality::BestEffort,
        ..wanted("v")
    };
    let volume = stored(choosy.clone().apply(&ClusterState::default(), secret(1), now()).unwrap());
    let spec = &volume.spec;
    assert!(!spec.replica_zone_soft_anti_affinity && spec.replica_disk_soft_anti_affinity);
    assert_eq!((spec.node_selector.len(), spec.disk_selector.len()), (1, 1));
    let cluster = cluster_with("n", volume.clone());
    assert_eq!(choosy.clone().apply(&cluster, secret(1), now()), Ok(Change::AlreadySo(volume)));
    let differs = |other: CreateVolume| match other.apply(&cluster, secret(1), now()) {
        Err(RequestError::Exists { differs, .. }) => differs,
        other => panic!("{other:?}"),
    };
    let other = CreateVolume { replica_zone_hard_anti_affinity: false, ..choosy.clone() };
    assert_eq!(differs(other), "anti-affinity of zones");
    let other = CreateVolume { replica_disk_hard_anti_affinity: true, ..choosy.clone() };
    assert_eq!(differs(other), "anti-affinity of disks");
    assert_eq!(differs(CreateVolume { node_selector: Vec::new(), ..choosy.clone() }), "node selector");
    assert_eq!(differs(CreateVolume { disk_selector: Vec::new(), ..choosy.clone() }), "disk selector");
    assert_eq!(
        differs(CreateVolume { data_locality: DataLocality::Disabled, ..choosy.clone() }),
        "data locality"
    );
    assert_eq!(differs(CreateVolume { encrypt_in_transit: true, ..choosy }), "encryption in transit");
}

/// The objects are stored as before tags and zones existed.
#[test]
fn objects_of_before_are_read_as_they_were_meant() {
    let disk = r#"{"allowScheduling":true,"storageReserved":"7"}"#;
    let spec = format!(r#"{{"address":"http://a","allowScheduling":true,"disks":{{"/d":{disk}}}}}"#);
    let metadata = r#"{"name":"n","resourceVersion":1,"creationTimestamp":"1970-01-01T00:00:00Z"}"#;
    let node = format!(r#"{{"kind":"Node","metadata":{metadata},"spec":{spec}}}"#);
    let Object::Node(node) = serde_json::from_str(&node).unwrap() else { panic!("no node") };
    assert!(node.spec.tags.is_empty() && node.zone().is_none() && node.spec.disks["/d"].tags.is_empty());
    let spec = format!(
        r#"{{"volumeName":"v","size":"4096","numberOfReplicas":2,"frontend":"auto","secret":"{}"}}"#,
        "ab".repeat(SECRET_BYTES)
    );
    let metadata = metadata.replace("\"n\"", "\"v\"");
    let status = r#"{"state":"detached","robustness":"unknown","attach":3}"#;
    let volume = format!(r#"{{"kind":"Volume","metadata":{metadata},"spec":{spec},"status":{status}}}"#);
    let Object::Volume(volume) = serde_json::from_str(&volume).unwrap() else { panic!("no volume") };
    let spec = volume.spec;
    assert!(!spec.replica_soft_anti_affinity, "hard, as it always was");
    assert!(spec.replica_zone_soft_anti_affinity && spec.replica_disk_soft_anti_affinity);
    assert!(spec.node_selector.is_empty() && spec.disk_selector.is_empty());
    assert_eq!(spec.data_locality, DataLocality::Disabled);
}

/// Returns a cluster in which volume v has a replica on each of two disks of 100 GiB. One of them has
/// scheduled 80 GiB for others.
fn cluster_of_disks(volume: Volume) -> ClusterState {
    use crate::objects::{DesireState, Replica, ReplicaSpec, StoredReplicaStatus};
    use shorthorn_types::ReplicaId;
    let mut cluster = ClusterState::default();
    let place = |cluster: &mut ClusterState, volume: &VolumeName, number: u64, node: &str, size: u64| {
        let replica_id = ReplicaId::from_random(number);
        cluster.insert(Object::Replica(Replica {
            metadata: Metadata::new(ReplicaSpec::instance_name(volume, replica_id), now()),
            spec: ReplicaSpec {
                volume_name: volume.clone(),
                volume_size: size,
                replica_id,
                node_id: NodeName::new(node).unwrap(),
                disk_path: "/d".to_owned(),
                disk_id: "disk".to_owned(),
                desire_state: DesireState::Stopped,
                eviction_requested: false,
            },
            status: StoredReplicaStatus::default(),
        }));
    };
    for node in ["a", "b"] {
        let mut object = Node {
            metadata: Metadata::new(node, now()),
            spec: Default::default(),
            status: Default::default(),
        };
        let spec = DiskSpec { storage_reserved: 0, ..DiskSpec::of_new(100 << 30) };
        object.spec.disks.insert("/d".to_owned(), spec);
        let disk = DiskStatus { storage_maximum: 100 << 30, ..DiskStatus::default() };
        object.status.disk_status.insert("/d".to_owned(), disk);
        cluster.insert(object.into());
        let number = u64::from(node == "b");
        place(&mut cluster, &volume.spec.volume_name, number, node, volume.spec.size);
    }
    place(&mut cluster, &VolumeName::new("other").unwrap(), 9, "b", 80 << 30);
    cluster.insert(volume.into());
    cluster
}

#[test]
fn a_volume_grows_as_far_as_its_disks_can_schedule() {
    const GIB: u64 = 1 << 30;
    let volume = stored(wanted("v").apply(&ClusterState::default(), secret(1), now()).unwrap());
    assert_eq!(
        (volume.status.current_size, volume.current_size_bytes(), volume.is_expanding()),
        (None, GIB, false)
    );
    let mut cluster = cluster_of_disks(volume.clone());
    let ask = |cluster: &ClusterState, size: u64| expand(cluster, "v", size);
    assert_eq!(ask(&cluster, GIB), Ok(Change::AlreadySo(volume)));
    for size in [0, GIB + 512, MAX_VOLUME_BYTES + 4096] {
        assert_eq!(ask(&cluster, size), Err(RequestError::Size(size)));
    }
    let error = ask(&cluster, GIB - 4096).unwrap_err();
    assert!(error.to_string().contains("only grows"), "{error}");
    // 20 GiB are left on b, which has 1 GiB of it already.
    let error = ask(&cluster, 21 * GIB).unwrap_err().to_string();
    for words in [
        "cannot have 22548578304 bytes",
        "1 of 2 replicas",
        "1 has no disk",
        "b: disk /d can schedule 19.0 GiB more, 20.0 GiB are needed",
    ] {
        assert!(error.contains(words), "{words} in {error}");
    }
    let generous =
        SchedulingLimits { storage_over_provisioning_percentage: 200, ..SchedulingLimits::default() };
    assert!(matches!(expand_within(&cluster, "v", 21 * GIB, generous), Ok(Change::Store(_))));
    let grown = stored(ask(&cluster, 10 * GIB).unwrap());
    assert_eq!((grown.spec.size, grown.status.current_size), (10 * GIB, Some(GIB)));
    assert!(grown.is_expanding() && grown.current_size_bytes() == GIB);
    cluster.insert(grown.into());
    // An expansion that has not reached the replicas yet is scheduled all the same, and the volume grows
    // further from its actual size.
    let further = stored(ask(&cluster, 20 * GIB).unwrap());
    assert_eq!((further.spec.size, further.status.current_size), (20 * GIB, Some(GIB)));
    let mut other = cluster.volumes["v"].clone();
    (other.metadata.name, other.spec.volume_name) = ("other".to_owned(), VolumeName::new("other").unwrap());
    (other.spec.size, other.status.current_size) = (85 * GIB, Some(80 * GIB));
    cluster.insert(other.into());
    assert!(
        matches!(ask(&cluster, 16 * GIB), Err(RequestError::NoRoom { .. })),
        "5 GiB are on their way to it"
    );
    assert!(matches!(ask(&cluster, 15 * GIB), Ok(Change::Store(_))));
    let gone = stored(delete(&cluster, "v", now()).unwrap());
    cluster.insert(gone.into());
    assert_eq!(ask(&cluster, 12 * GIB), Err(RequestError::Deleting("v".to_owned())));
    assert_eq!(expand(&cluster, "w", 12 * GIB), Err(RequestError::NoVolume("w".to_owned())));
}

#[test]
fn a_node_is_made_by_its_address() {
    let mut cluster = ClusterState::default();
    let at = |address: &str| SetNode {
        name: "n".to_owned(),
        address: Some(address.to_owned()),
        ..SetNode::default()
    };
    let Ok(Change::Store(node)) = at("http://10.0.0.1:9501").apply(&cluster, now()) else {
        panic!("not made")
    };
    assert_eq!((node.spec.address.as_str(), node.spec.allow_scheduling), ("http://10.0.0.1:9501", true));
    let cordoned = NodeSpec { allow_scheduling: false, ..node.spec.clone() };
    cluster.insert(Node { spec: cordoned, ..node }.into());
    assert!(matches!(at("http://10.0.0.1:9501").apply(&cluster, now()), Ok(Change::AlreadySo(_))));
    let Ok(Change::Store(moved)) = at("unix:///a.sock").apply(&cluster, now()) else { panic!("not moved") };
    assert_eq!((moved.spec.address.as_str(), moved.spec.allow_scheduling), ("unix:///a.sock", false));
    let unnamed = SetNode { name: "N".to_owned(), ..at("http://a:1") };
    assert!(matches!(unnamed.apply(&cluster, now()), Err(RequestError::NodeName(_))));
}

#[test]
fn a_replica_that_is_being_deleted_can_be_salvaged() {
    use crate::objects::{
        CurrentState, DataState, DesireState, Replica, ReplicaSpec, StoredReplicaStatus, VolumeState,
    };
    let mut volume = stored(wanted("v").apply(&ClusterState::default(), secret(1), now()).unwrap());
    (volume.status.state, volume.status.attach) = (VolumeState::Detached, Some(3));
    let replica_id = shorthorn_types::ReplicaId::from_random(1);
    let mut metadata = Metadata::new(format!("v-{replica_id}"), now());
    metadata.deletion_timestamp = Some(now());
    let spec = ReplicaSpec {
        volume_name: volume.spec.volume_name.clone(),
        volume_size: 1 << 30,
        replica_id,
        node_id: NodeName::new("n").unwrap(),
        disk_path: "/disk".to_owned(),
        disk_id: String::new(),
        desire_state: DesireState::Stopped,
        eviction_requested: false,
    };
    let status = StoredReplicaStatus {
        current_state: CurrentState::Stopped,
        data: DataState::Present,
        ..StoredReplicaStatus::default()
    };
    let mut cluster = cluster_with("n", volume);
    cluster.insert(Replica { metadata, spec, status }.into());
    let salvage = SalvageVolume {
        name: "v".to_owned(),
        replica: replica_id.to_string(),
        confirm: "v".to_owned(),
        by: "an operator".to_owned(),
        reason: "a test".to_owned(),
        losses: String::new(),
        known_attach: 41,
        are_all_known: true,
    };
    let salvaged = stored(salvage.apply(&cluster, now()).unwrap());
    let decided = salvaged.status.salvage.clone().unwrap();
    assert_eq!((decided.replica_id, decided.attach), (replica_id, 43), "above all that a replica knows");
    cluster.insert(salvaged.into());
    assert!(matches!(salvage.apply(&cluster, now()), Ok(Change::AlreadySo(_))));
    // An engine has used that number meanwhile, and a replica out of reach may know a newer one.
    let fenced = SalvageVolume { known_attach: 42, ..salvage.clone() };
    assert!(matches!(fenced.apply(&cluster, now()), Ok(Change::AlreadySo(_))), "by the number below");
    let again = SalvageVolume { known_attach: 43, ..salvage.clone() };
    assert_eq!(stored(again.apply(&cluster, now()).unwrap()).status.attach, Some(45));
    let again = SalvageVolume { known_attach: 50, are_all_known: false, ..salvage.clone() };
    assert!(stored(again.apply(&cluster, now()).unwrap()).status.attach > Some(1000));
    let again = SalvageVolume { known_attach: u64::MAX, ..salvage };
    assert!(matches!(again.apply(&cluster, now()), Err(RequestError::NoAttach { .. })));
}

/// An engine that has served may have its device in use: it would not stop, and might serve again.
#[test]
fn nothing_is_salvaged_under_an_engine_that_may_serve_again() {
    use crate::objects::{DesireState, Engine, EnginePhase, VolumeState};
    let mut volume = stored(wanted("v").apply(&ClusterState::default(), secret(1), now()).unwrap());
    (volume.status.state, volume.status.attach) = (VolumeState::Attaching, Some(3));
    let check = |state: VolumeState, phase: Option<EnginePhase>, served_attach| {
        let mut volume = volume.clone();
        volume.status.state = state;
        let mut engine = Engine::of_new(&volume, now());
        (engine.spec.attach, engine.spec.desire_state) = (Some(3), DesireState::Running);
        (engine.status.seen_attach, engine.status.served_attach) = (Some(3), served_attach);
        engine.status.phase = phase;
        let mut cluster = cluster_with("n", volume.clone());
        cluster.insert(engine.into());
        check_salvageable(&cluster, &volume)
    };
    let refused = Err(RequestError::IsServed("v".to_owned()));
    let (frozen, starting) = (Some(EnginePhase::Frozen), Some(EnginePhase::Starting));
    assert_eq!(check(VolumeState::Attaching, frozen, Some(3)), refused, "it has served in this attachment");
    assert_eq!(check(VolumeState::Attaching, starting, Some(3)), refused);
    assert_eq!(
        check(VolumeState::Attaching, frozen, Some(2)),
        Ok(()),
        "it has only served in an earlier one"
    );
    assert_eq!(check(VolumeState::Attaching, frozen, None), Ok(()));
    assert_eq!(check(VolumeState::Detached, None, Some(3)), Ok(()), "no engine is there");
}

#[test]
fn a_volume_is_given_other_places_and_as_many_replicas_as_it_may_have() {
    let volume = stored(wanted("v").apply(&ClusterState::default(), secret(1), now()).unwrap());
    let cluster = cluster_with("n", volume.clone());
    let set = |change: SetVolume| SetVolume { name: "v".to_owned(), ..change }.apply(&cluster);
    let tags = |tag: &str| Some(vec![tag.to_owned()]);
    let changed = stored(
        set(SetVolume {
            number_of_replicas: Some(1),
            node_selector: tags("fast"),
            disk_selector: tags("ssd"),
            data_locality: Some(DataLocality::BestEffort),
            replica_zone_soft_anti_affinity: Some(false),
            ..SetVolume::default()
        })
        .unwrap(),
    );
    let spec = &changed.spec;
    assert_eq!((spec.number_of_replicas, spec.data_locality), (1, DataLocality::BestEffort));
    assert_eq!(
        (&spec.node_selector, &spec.disk_selector),
        (&labels(["fast"]).unwrap(), &labels(["ssd"]).unwrap())
    );
    assert!(!spec.replica_zone_soft_anti_affinity && spec.replica_disk_soft_anti_affinity);
    assert_eq!(set(SetVolume::default()), Ok(Change::AlreadySo(volume)), "an absent setting stays");
    for number in [0, 9] {
        let refused = set(SetVolume { number_of_replicas: Some(number), ..SetVolume::default() });
        assert_eq!(refused, Err(RequestError::Replicas(number)));
    }
    let refused = set(SetVolume { node_selector: tags("a b"), ..SetVolume::default() });
    assert!(matches!(refused, Err(RequestError::Label(_))));
}

#[test]
fn a_replica_is_evicted_while_its_volume_is_served() {
    let mut example = crate::example::Example::new();
    let name = format!("v-{}", crate::example::id(2));
    let Ok(Change::Store(leaving)) = evict(&example.cluster, &name, now()) else { panic!("it is refused") };
    assert!(leaving.metadata.is_deleting());
    example.cluster.insert(leaving.clone().into());
    assert_eq!(evict(&example.cluster, &name, now()), Ok(Change::AlreadySo(leaving)));
    let other = format!("v-{}", crate::example::id(3));
    example.volume().status.state = crate::objects::VolumeState::Detached;
    let refused = evict(&example.cluster, &other, now()).unwrap_err();
    assert!(matches!(&refused, RequestError::NotServed { state: "detached", .. }), "{refused}");
    assert_eq!(evict(&example.cluster, "v-x", now()), Err(RequestError::NoSuchReplica("v-x".to_owned())));
}
