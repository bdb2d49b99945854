use std::num::NonZeroU64;

use super::*;
use crate::left_out_objects::LeftOut;
use crate::objects::{
    ConditionType, Conditions, CurrentState, DesireState, Engine, EngineSpec, Finding, Frontend, Key, Kind,
    Metadata, Node, NodeSpec, NodeStatus, SECRET_BYTES, Secret, StoredEngineStatus, Volume, VolumeState,
};
use crate::requests::{self, Change, CreateVolume, RequestError};
use crate::{ClusterState, NodeName, Timestamp};

fn now() -> Timestamp {
    Timestamp::UNIX_EPOCH
}

fn secret() -> Secret {
    Secret::new([1; SECRET_BYTES])
}

fn node_name(name: &str) -> NodeName {
    NodeName::new(name).unwrap()
}

fn wanted(csi_name: &str, required_bytes: u64, limit_bytes: u64) -> NewVolume {
    let name = volume_name(csi_name).unwrap().to_string();
    let wanted = CreateVolume { name, csi_name: Some(csi_name.to_owned()), ..CreateVolume::default() };
    let [required_bytes, limit_bytes] = [required_bytes, limit_bytes].map(NonZeroU64::new);
    NewVolume { wanted, required_bytes, limit_bytes }
}

fn cluster() -> ClusterState {
    let mut cluster = ClusterState::default();
    for name in ["a", "b"] {
        cluster.insert(
            Node {
                metadata: Metadata::new(name, now()),
                spec: NodeSpec::default(),
                status: NodeStatus { zone: Some("z".parse().unwrap()), ..NodeStatus::default() },
            }
            .into(),
        );
    }
    cluster
}

/// Makes the volume, and stores it.
fn made(cluster: &mut ClusterState, new: &NewVolume) -> Volume {
    match new.apply(cluster, secret(), now()).unwrap() {
        Change::Store(volume) => {
            cluster.insert(volume.clone().into());
            volume
        }
        Change::AlreadySo(volume) => panic!("{volume:?} is there"),
    }
}

fn change(cluster: &mut ClusterState, change: impl FnOnce(&mut Volume)) {
    let mut volume = cluster.volumes["v"].clone();
    change(&mut volume);
    cluster.insert(volume.into());
}

/// Attaches a volume to `node`, or has it been there, with its engine.
fn at(cluster: &mut ClusterState, node: &str, state: VolumeState, engine: CurrentState) {
    change(cluster, |volume| {
        volume.status.state = state;
        volume.status.current_node_id = Some(node_name(node));
    });
    let volume = &cluster.volumes["v"];
    let desire_state = match engine {
        CurrentState::Stopped => DesireState::Stopped,
        _ => DesireState::Running,
    };
    let engine = Engine {
        metadata: Metadata::new("v", now()),
        spec: EngineSpec {
            volume_name: volume.spec.volume_name.clone(),
            volume_size: volume.spec.size,
            node_id: Some(node_name(node)),
            desire_state,
            attach: Some(1),
            frontend: volume.spec.frontend,
            replica_address_map: Default::default(),
            map_revision: 0,
        },
        status: StoredEngineStatus { current_state: engine, ..StoredEngineStatus::default() },
    };
    cluster.insert(engine.into());
}

fn stored(change: Change<Volume>) -> Volume {
    match change {
        Change::Store(volume) => volume,
        Change::AlreadySo(volume) => panic!("{volume:?} is so already"),
    }
}

#[test]
fn the_same_call_finds_its_volume_and_another_size_does_not() {
    let mut cluster = cluster();
    let volume = made(&mut cluster, &wanted("v", 4096, 0));
    assert_eq!((volume.spec.size, volume.spec.csi_name.as_deref()), (4096, Some("v")));
    let again = |required, limit| wanted("v", required, limit).apply(&cluster, secret(), now());
    for (required, limit) in [(4096, 0), (1, 4096), (0, 0), (0, 1 << 40)] {
        assert_eq!(again(required, limit), Ok(Change::AlreadySo(volume.clone())), "{required} to {limit}");
    }
    for (required, limit) in [(8192, 0), (8192, 8192)] {
        let exists = RequestError::Exists { name: "v".into(), differs: "size" };
        assert_eq!(again(required, limit), Err(SizedError::Request(exists)));
    }
}

#[test]
fn a_volume_with_the_name_from_another_caller_is_not_reused() {
    let mut cluster = cluster();
    let mapped = made(&mut cluster, &wanted("A b", 4096, 0));
    let as_it_is = wanted(mapped.spec.volume_name.as_str(), 4096, 0).apply(&cluster, secret(), now());
    let differs = "name in CSI";
    let name = mapped.spec.volume_name.to_string();
    assert_eq!(as_it_is, Err(SizedError::Request(RequestError::Exists { name: name.clone(), differs })));
    // A caller without a CSI name means the volume by its own name.
    let plain = CreateVolume { name, size_bytes: 4096, ..CreateVolume::default() };
    assert!(matches!(plain.apply(&cluster, secret(), now()), Ok(Change::AlreadySo(_))));
    let plain = CreateVolume { name: "w".into(), size_bytes: 4096, ..CreateVolume::default() };
    cluster.insert(stored(plain.apply(&cluster, secret(), now()).unwrap()).into());
    assert!(matches!(wanted("w", 4096, 0).apply(&cluster, secret(), now()), Ok(Change::AlreadySo(_))));
}

#[test]
fn only_a_volume_without_a_place_is_undone() {
    let mut cluster = cluster();
    made(&mut cluster, &wanted("v", 4096, 0));
    assert_eq!(placement(&cluster, "v"), PlacementState::Pending);
    assert!(matches!(undo(&cluster, "v", now()), Ok(Change::AlreadySo(_))));
    change(&mut cluster, |volume| {
        let finding = Finding::wrong("NoPlace", "no disk");
        volume.status.conditions.set(ConditionType::Scheduled, finding, now());
    });
    assert_eq!(placement(&cluster, "v"), PlacementState::Unschedulable("no disk".into()));
    assert!(stored(undo(&cluster, "v", now()).unwrap()).metadata.is_deleting());
    // An operator's own waits for its place.
    let mut others = cluster.clone();
    change(&mut others, |volume| volume.spec.csi_name = None);
    assert!(matches!(undo(&others, "v", now()), Ok(Change::AlreadySo(_))));
    change(&mut cluster, |volume| volume.status.state = VolumeState::Detached);
    assert_eq!(placement(&cluster, "v"), PlacementState::Scheduled);
    assert!(matches!(undo(&cluster, "v", now()), Ok(Change::AlreadySo(_))));
    change(&mut cluster, |volume| volume.metadata.deletion_timestamp = Some(now()));
    assert_eq!(placement(&cluster, "v"), PlacementState::Gone);
    assert_eq!(placement(&cluster, "w"), PlacementState::Gone);
}

#[test]
fn one_node_at_a_time() {
    let mut cluster = cluster();
    made(&mut cluster, &wanted("v", 4096, 0));
    change(&mut cluster, |volume| volume.status.state = VolumeState::Detached);
    assert_eq!(publish(&cluster, "v", "x"), Err(RequestError::NoNode("x".into())));
    let volume = stored(publish(&cluster, "v", "a").unwrap());
    cluster.insert(volume.into());
    assert!(matches!(publish(&cluster, "v", "a"), Ok(Change::AlreadySo(_))));
    let elsewhere = || Err(RequestError::AttachedElsewhere { name: "v".into(), node: node_name("a") });
    assert_eq!(publish(&cluster, "v", "b"), elsewhere());
    assert_eq!(delete(&cluster, "v", now()), elsewhere());
    at(&mut cluster, "a", VolumeState::Attached, CurrentState::Running);
    assert!(is_published(&cluster, "v", &node_name("a")) && !is_published(&cluster, "v", &node_name("b")));
    assert_eq!(published_node(&cluster, &cluster.volumes["v"]), Some(&node_name("a")));
    // The volume is not wanted at b: nothing changes, and it is not attached there.
    assert!(matches!(unpublish(&cluster, "v", Some("b")), Ok(Change::AlreadySo(_))));
    assert!(
        is_away(&cluster, "v", Some("b"))
            && !is_away(&cluster, "v", Some("a"))
            && !is_away(&cluster, "v", None)
    );
    let volume = stored(unpublish(&cluster, "v", Some("a")).unwrap());
    assert_eq!(volume.spec.node_id, None);
    cluster.insert(volume.into());
    // On its way from a its engine may still write.
    at(&mut cluster, "a", VolumeState::Detaching, CurrentState::Running);
    assert_eq!(publish(&cluster, "v", "b"), elsewhere());
    assert_eq!(delete(&cluster, "v", now()), elsewhere());
    assert!(!is_away(&cluster, "v", None) && !is_published(&cluster, "v", &node_name("a")));
    at(&mut cluster, "a", VolumeState::Detached, CurrentState::Stopped);
    assert!(is_away(&cluster, "v", None) && is_away(&cluster, "v", Some("a")));
    assert_eq!(published_node(&cluster, &cluster.volumes["v"]), None);
    assert!(matches!(publish(&cluster, "v", "b"), Ok(Change::Store(_))));
    assert!(stored(delete(&cluster, "v", now()).unwrap()).metadata.is_deleting());
}

#[test]
fn a_volume_that_is_deleted_is_away_once_its_engine_is_stopped() {
    let mut cluster = cluster();
    made(&mut cluster, &wanted("v", 4096, 0));
    change(&mut cluster, |volume| volume.metadata.deletion_timestamp = Some(now()));
    at(&mut cluster, "a", VolumeState::Deleting, CurrentState::Running);
    assert!(!is_away(&cluster, "v", None));
    assert!(matches!(delete(&cluster, "v", now()), Ok(Change::AlreadySo(_))));
    at(&mut cluster, "a", VolumeState::Deleting, CurrentState::Stopped);
    assert!(is_away(&cluster, "v", None) && is_away(&cluster, "w", None));
    assert_eq!(publish(&cluster, "v", "a"), Err(RequestError::Deleting("v".into())));
}

#[test]
fn a_volume_without_a_device_cannot_be_published() {
    let mut cluster = cluster();
    let plain = CreateVolume {
        name: "v".into(),
        size_bytes: 4096,
        frontend: Frontend::Socket,
        ..CreateVolume::default()
    };
    cluster.insert(stored(plain.apply(&cluster, secret(), now()).unwrap()).into());
    assert_eq!(publish(&cluster, "v", "a"), Err(RequestError::NoDevice("v".into())));
}

#[test]
fn a_node_takes_as_many_volumes_as_its_agent_says() {
    let mut cluster = cluster();
    made(&mut cluster, &wanted("v", 4096, 0));
    made(&mut cluster, &wanted("w", 4096, 0));
    let mut node = cluster.nodes["a"].clone();
    node.status.max_volumes = Some(1);
    cluster.insert(node.into());
    assert_eq!((max_volumes(&cluster, "a"), max_volumes(&cluster, "b")), (Some(1), None));
    let volume = stored(publish(&cluster, "w", "a").unwrap());
    cluster.insert(volume.into());
    let full = || Err(RequestError::NodeFull { node: "a".to_owned(), max_volumes: 1 });
    assert_eq!(publish(&cluster, "v", "a"), full());
    assert!(publish(&cluster, "v", "b").is_ok(), "the other node has no limit");
    assert!(matches!(publish(&cluster, "w", "a"), Ok(Change::AlreadySo(_))), "it is there already");
    // A volume that is leaving, or is being deleted, takes a place until it is gone.
    let mut leaving = cluster.volumes["w"].clone();
    leaving.spec.node_id = None;
    leaving.status.state = VolumeState::Detaching;
    leaving.status.current_node_id = Some(node_name("a"));
    cluster.insert(leaving.clone().into());
    assert_eq!(publish(&cluster, "v", "a"), full());
    leaving.status.state = VolumeState::Detached;
    leaving.status.current_node_id = None;
    cluster.insert(leaving.into());
    assert!(publish(&cluster, "v", "a").is_ok());
}

#[test]
fn an_expansion_keeps_the_current_size_of_the_volume() {
    let mut cluster = cluster();
    made(&mut cluster, &wanted("v", 4096, 0));
    assert_eq!(cluster.volumes["v"].current_size_bytes(), 4096);
    assert!(matches!(requests::expand(&cluster, "v", 4096), Ok(Change::AlreadySo(_))));
    assert_eq!(requests::expand(&cluster, "v", 4097), Err(RequestError::Size(4097)));
    let too_large = requests::MAX_VOLUME_BYTES + 4096;
    assert_eq!(requests::expand(&cluster, "v", too_large), Err(RequestError::Size(too_large)));
    let volume = stored(requests::expand(&cluster, "v", 8192).unwrap());
    assert_eq!((volume.spec.size, volume.current_size_bytes()), (8192, 4096));
    cluster.insert(volume.into());
    let volume = stored(requests::expand(&cluster, "v", 12288).unwrap());
    assert_eq!((volume.spec.size, volume.current_size_bytes()), (12288, 4096));
    // Objects of earlier versions say nothing.
    let text = serde_json::to_string(&volume).unwrap().replace("\"currentSize\":\"4096\",", "");
    let older: Volume = serde_json::from_str(&text).unwrap();
    assert_eq!((older.status.current_size, older.current_size_bytes()), (None, 12288));
}

#[test]
fn the_awaited_state_is_named() {
    let mut cluster = cluster();
    made(&mut cluster, &wanted("v", 4096, 0));
    assert_eq!(waits_for(&cluster, "v"), "volume v is creating");
    at(&mut cluster, "a", VolumeState::Detaching, CurrentState::Running);
    change(&mut cluster, |volume| {
        let mut conditions = Conditions::default();
        conditions.set(ConditionType::Settled, Finding::wrong("Detaching", "it is in use"), now());
        volume.status.conditions = conditions;
    });
    assert_eq!(waits_for(&cluster, "v"), "volume v is detaching, node a: it is in use");
    assert_eq!(waits_for(&cluster, "w"), "volume w is gone");
}

#[test]
fn nodes_are_known_by_name_and_zone() {
    let mut cluster = cluster();
    let mut node = cluster.nodes["b"].clone();
    node.spec.zone = Some("y".parse().unwrap());
    cluster.insert(node.into());
    for (node, zone, there) in [
        (None, None, true),
        (Some("a"), None, true),
        (Some("x"), None, false),
        (None, Some("z"), true),
        (None, Some("x"), false),
        (Some("b"), Some("z"), true),
        (Some("b"), Some("y"), true),
        (Some("a"), Some("y"), false),
    ] {
        assert_eq!(has_node(&cluster, node, zone), there, "{node:?} {zone:?}");
    }
}

#[test]
fn an_object_whose_name_no_volume_can_have_is_not_listed() {
    let mut cluster = ClusterState::default();
    for name in ["b", "a.b", "a", "c"] {
        let left_out = LeftOut::new(Kind::Volume, None, "it is damaged", "correct it");
        cluster.leave_out(Key::new(Kind::Volume, name), left_out);
    }
    assert_eq!(unknown_volumes(&cluster, "").collect::<Vec<_>>(), ["a", "b", "c"]);
    assert_eq!(unknown_volumes(&cluster, "a").collect::<Vec<_>>(), ["b", "c"]);
}
