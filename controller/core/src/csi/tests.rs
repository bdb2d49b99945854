use super::*;
use crate::objects::{
    ConditionType, Conditions, CurrentState, DesireState, Engine, EngineSpec, EngineStatus, Finding,
    Metadata, Node, NodeSpec, NodeStatus, SECRET_BYTES, Secret, Volume, VolumeState,
};
use crate::requests::{self, Change, CreateVolume, RequestError};
use crate::{NodeName, Timestamp, World};

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
    NewVolume { wanted, required_bytes, limit_bytes }
}

fn world() -> World {
    let mut world = World::default();
    for name in ["a", "b"] {
        world.insert(
            Node {
                metadata: Metadata::new(name, now()),
                spec: NodeSpec::default(),
                status: NodeStatus { zone: Some("z".parse().unwrap()), ..NodeStatus::default() },
            }
            .into(),
        );
    }
    world
}

/// Makes the volume, and stores it.
fn made(world: &mut World, new: &NewVolume) -> Volume {
    match new.apply(world, secret(), now()).unwrap() {
        Change::Store(volume) => {
            world.insert(volume.clone().into());
            volume
        }
        Change::AlreadySo(volume) => panic!("{volume:?} is there"),
    }
}

fn change(world: &mut World, change: impl FnOnce(&mut Volume)) {
    let mut volume = world.volumes["v"].clone();
    change(&mut volume);
    world.insert(volume.into());
}

/// Attaches a volume to `node`, or has it been there, with its engine.
fn at(world: &mut World, node: &str, state: VolumeState, engine: CurrentState) {
    change(world, |volume| {
        volume.status.state = state;
        volume.status.current_node_id = Some(node_name(node));
    });
    let volume = &world.volumes["v"];
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
            attach: 1,
            frontend: volume.spec.frontend,
            replica_address_map: Default::default(),
            map_revision: 0,
        },
        status: EngineStatus { current_state: engine, ..EngineStatus::default() },
    };
    world.insert(engine.into());
}

fn stored(change: Change<Volume>) -> Volume {
    match change {
        Change::Store(volume) => volume,
        Change::AlreadySo(volume) => panic!("{volume:?} is so already"),
    }
}

#[test]
fn the_same_call_finds_its_volume_and_another_size_does_not() {
    let mut world = world();
    let volume = made(&mut world, &wanted("v", 4096, 0));
    assert_eq!((volume.spec.size, volume.spec.csi_name.as_deref()), (4096, Some("v")));
    let again = |required, limit| wanted("v", required, limit).apply(&world, secret(), now());
    for (required, limit) in [(4096, 0), (1, 4096), (0, 0), (0, 1 << 40)] {
        assert_eq!(again(required, limit), Ok(Change::AlreadySo(volume.clone())), "{required} to {limit}");
    }
    for (required, limit) in [(8192, 0), (8192, 8192)] {
        let exists = RequestError::Exists { name: "v".into(), differs: "size" };
        assert_eq!(again(required, limit), Err(SizedError::Request(exists)));
    }
}

#[test]
fn a_volume_that_somebody_else_calls_so_is_not_taken_for_it() {
    let mut world = world();
    let mapped = made(&mut world, &wanted("A b", 4096, 0));
    let as_it_is = wanted(mapped.spec.volume_name.as_str(), 4096, 0).apply(&world, secret(), now());
    let differs = "name in CSI";
    let name = mapped.spec.volume_name.to_string();
    assert_eq!(as_it_is, Err(SizedError::Request(RequestError::Exists { name: name.clone(), differs })));
    // A caller without a CSI name means the volume by its own name.
    let plain = CreateVolume { name, size_bytes: 4096, ..CreateVolume::default() };
    assert!(matches!(plain.apply(&world, secret(), now()), Ok(Change::AlreadySo(_))));
    let plain = CreateVolume { name: "w".into(), size_bytes: 4096, ..CreateVolume::default() };
    world.insert(stored(plain.apply(&world, secret(), now()).unwrap()).into());
    assert!(matches!(wanted("w", 4096, 0).apply(&world, secret(), now()), Ok(Change::AlreadySo(_))));
}

#[test]
fn only_what_has_no_place_is_undone() {
    let mut world = world();
    made(&mut world, &wanted("v", 4096, 0));
    assert_eq!(placement(&world, "v"), Placement::Pending);
    assert!(matches!(undo(&world, "v", now()), Ok(Change::AlreadySo(_))));
    change(&mut world, |volume| {
        let finding = Finding::wrong("NoPlace", "no disk");
        volume.status.conditions.set(ConditionType::Scheduled, finding, now());
    });
    assert_eq!(placement(&world, "v"), Placement::NoPlace("no disk".into()));
    assert!(stored(undo(&world, "v", now()).unwrap()).metadata.is_deleting());
    // An operator's own waits for its place.
    let mut others = world.clone();
    change(&mut others, |volume| volume.spec.csi_name = None);
    assert!(matches!(undo(&others, "v", now()), Ok(Change::AlreadySo(_))));
    change(&mut world, |volume| volume.status.state = VolumeState::Detached);
    assert_eq!(placement(&world, "v"), Placement::Placed);
    assert!(matches!(undo(&world, "v", now()), Ok(Change::AlreadySo(_))));
    change(&mut world, |volume| volume.metadata.deletion_timestamp = Some(now()));
    assert_eq!(placement(&world, "v"), Placement::Gone);
    assert_eq!(placement(&world, "w"), Placement::Gone);
}

#[test]
fn one_node_at_a_time() {
    let mut world = world();
    made(&mut world, &wanted("v", 4096, 0));
    change(&mut world, |volume| volume.status.state = VolumeState::Detached);
    assert_eq!(publish(&world, "v", "x"), Err(RequestError::NoNode("x".into())));
    let volume = stored(publish(&world, "v", "a").unwrap());
    world.insert(volume.into());
    assert!(matches!(publish(&world, "v", "a"), Ok(Change::AlreadySo(_))));
    let elsewhere = || Err(RequestError::AttachedElsewhere { name: "v".into(), node: node_name("a") });
    assert_eq!(publish(&world, "v", "b"), elsewhere());
    assert_eq!(delete(&world, "v", now()), elsewhere());
    at(&mut world, "a", VolumeState::Attached, CurrentState::Running);
    assert!(is_published(&world, "v", &node_name("a")) && !is_published(&world, "v", &node_name("b")));
    assert_eq!(published_node(&world, &world.volumes["v"]), Some(&node_name("a")));
    // The volume is not wanted at b: nothing changes, and it is not attached there.
    assert!(matches!(unpublish(&world, "v", Some("b")), Ok(Change::AlreadySo(_))));
    assert!(
        is_away(&world, "v", Some("b")) && !is_away(&world, "v", Some("a")) && !is_away(&world, "v", None)
    );
    let volume = stored(unpublish(&world, "v", Some("a")).unwrap());
    assert_eq!(volume.spec.node_id, None);
    world.insert(volume.into());
    // On its way from a its engine may still write.
    at(&mut world, "a", VolumeState::Detaching, CurrentState::Running);
    assert_eq!(publish(&world, "v", "b"), elsewhere());
    assert_eq!(delete(&world, "v", now()), elsewhere());
    assert!(!is_away(&world, "v", None) && !is_published(&world, "v", &node_name("a")));
    at(&mut world, "a", VolumeState::Detached, CurrentState::Stopped);
    assert!(is_away(&world, "v", None) && is_away(&world, "v", Some("a")));
    assert_eq!(published_node(&world, &world.volumes["v"]), None);
    assert!(matches!(publish(&world, "v", "b"), Ok(Change::Store(_))));
    assert!(stored(delete(&world, "v", now()).unwrap()).metadata.is_deleting());
}

#[test]
fn a_volume_that_is_deleted_is_away_once_its_engine_is_stopped() {
    let mut world = world();
    made(&mut world, &wanted("v", 4096, 0));
    change(&mut world, |volume| volume.metadata.deletion_timestamp = Some(now()));
    at(&mut world, "a", VolumeState::Deleting, CurrentState::Running);
    assert!(!is_away(&world, "v", None));
    assert!(matches!(delete(&world, "v", now()), Ok(Change::AlreadySo(_))));
    at(&mut world, "a", VolumeState::Deleting, CurrentState::Stopped);
    assert!(is_away(&world, "v", None) && is_away(&world, "w", None));
    assert_eq!(publish(&world, "v", "a"), Err(RequestError::Deleting("v".into())));
}

#[test]
fn a_volume_without_a_device_cannot_be_published() {
    let mut world = world();
    let plain = CreateVolume {
        name: "v".into(),
        size_bytes: 4096,
        frontend: "socket".into(),
        ..CreateVolume::default()
    };
    world.insert(stored(plain.apply(&world, secret(), now()).unwrap()).into());
    assert_eq!(publish(&world, "v", "a"), Err(RequestError::NoDevice("v".into())));
}

#[test]
fn a_node_takes_as_many_volumes_as_its_agent_says() {
    let mut world = world();
    made(&mut world, &wanted("v", 4096, 0));
    made(&mut world, &wanted("w", 4096, 0));
    let mut node = world.nodes["a"].clone();
    node.status.max_volumes = 1;
    world.insert(node.into());
    assert_eq!((max_volumes(&world, "a"), max_volumes(&world, "b")), (Some(1), None));
    let volume = stored(publish(&world, "w", "a").unwrap());
    world.insert(volume.into());
    let full = || Err(RequestError::NodeFull { node: "a".to_owned(), max_volumes: 1 });
    assert_eq!(publish(&world, "v", "a"), full());
    assert!(publish(&world, "v", "b").is_ok(), "the other node has no limit");
    assert!(matches!(publish(&world, "w", "a"), Ok(Change::AlreadySo(_))), "it is there already");
    // A volume that is leaving, or is being deleted, takes a place until it is gone.
    let mut leaving = world.volumes["w"].clone();
    leaving.spec.node_id = None;
    leaving.status.state = VolumeState::Detaching;
    leaving.status.current_node_id = Some(node_name("a"));
    world.insert(leaving.clone().into());
    assert_eq!(publish(&world, "v", "a"), full());
    leaving.status.state = VolumeState::Detached;
    leaving.status.current_node_id = None;
    world.insert(leaving.into());
    assert!(publish(&world, "v", "a").is_ok());
}

#[test]
fn growing_remembers_what_there_really_is() {
    let mut world = world();
    made(&mut world, &wanted("v", 4096, 0));
    assert_eq!(world.volumes["v"].current_size_bytes(), 4096);
    assert!(matches!(requests::expand(&world, "v", 4096), Ok(Change::AlreadySo(_))));
    assert_eq!(requests::expand(&world, "v", 4097), Err(RequestError::Size(4097)));
    let too_large = requests::MAX_VOLUME_BYTES + 4096;
    assert_eq!(requests::expand(&world, "v", too_large), Err(RequestError::Size(too_large)));
    let volume = stored(requests::expand(&world, "v", 8192).unwrap());
    assert_eq!((volume.spec.size, volume.current_size_bytes()), (8192, 4096));
    world.insert(volume.into());
    let volume = stored(requests::expand(&world, "v", 12288).unwrap());
    assert_eq!((volume.spec.size, volume.current_size_bytes()), (12288, 4096));
    // Objects of earlier versions say nothing.
    let text = serde_json::to_string(&volume).unwrap().replace("\"currentSize\":\"4096\",", "");
    let older: Volume = serde_json::from_str(&text).unwrap();
    assert_eq!((older.status.current_size, older.current_size_bytes()), (0, 12288));
}

#[test]
fn what_is_waited_for_is_said() {
    let mut world = world();
    made(&mut world, &wanted("v", 4096, 0));
    assert_eq!(waits_for(&world, "v"), "volume v is creating");
    at(&mut world, "a", VolumeState::Detaching, CurrentState::Running);
    change(&mut world, |volume| {
        let mut conditions = Conditions::default();
        conditions.set(ConditionType::Settled, Finding::wrong("Detaching", "it is in use"), now());
        volume.status.conditions = conditions;
    });
    assert_eq!(waits_for(&world, "v"), "volume v is detaching, node a: it is in use");
    assert_eq!(waits_for(&world, "w"), "volume w is gone");
}

#[test]
fn nodes_are_known_by_name_and_zone() {
    let mut world = world();
    let mut node = world.nodes["b"].clone();
    node.spec.zone = Some("y".parse().unwrap());
    world.insert(node.into());
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
        assert_eq!(has_node(&world, node, zone), there, "{node:?} {zone:?}");
    }
}
