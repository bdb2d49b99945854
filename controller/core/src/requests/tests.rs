use super::*;
use crate::objects::{Object, SECRET_BYTES};

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

fn world_with(node: &str, volume: Volume) -> World {
    let mut world = World::default();
    world.insert(Object::Node(Node {
        metadata: Metadata::new(node, now()),
        spec: Default::default(),
        status: Default::default(),
    }));
    world.insert(volume.into());
    world
}

#[test]
fn a_new_volume_gets_the_defaults_and_the_same_call_finds_it() {
    let volume = stored(wanted("v").apply(&World::default(), secret(1), now()).unwrap());
    assert_eq!(volume.spec.number_of_replicas, DEFAULT_REPLICAS);
    assert_eq!(volume.spec.frontend, Frontend::Auto);
    let world = world_with("n", volume.clone());
    // The secret is another one each time, which is no difference.
    let again = wanted("v").apply(&world, secret(2), now()).unwrap();
    assert_eq!(again, Change::AlreadySo(volume));
    let other = CreateVolume { number_of_replicas: 2, ..wanted("v") };
    let error = other.apply(&world, secret(1), now()).unwrap_err();
    assert_eq!(error, RequestError::Exists { name: "v".to_owned(), differs: "number of replicas" });
}

#[test]
fn what_can_never_work_is_refused() {
    let refused = |wanted: CreateVolume| wanted.apply(&World::default(), secret(1), now()).unwrap_err();
    assert!(matches!(refused(wanted("V")), RequestError::VolumeName(_)));
    for size_bytes in [0, 4095, 4097, MAX_VOLUME_BYTES + 4096] {
        assert_eq!(refused(CreateVolume { size_bytes, ..wanted("v") }), RequestError::Size(size_bytes));
    }
    assert_eq!(refused(CreateVolume { number_of_replicas: 9, ..wanted("v") }), RequestError::Replicas(9));
    let frontend = CreateVolume { frontend: "scsi".to_owned(), ..wanted("v") };
    assert!(matches!(refused(frontend), RequestError::Frontend(_)));
}

#[test]
fn attaching_says_what_is_in_the_way() {
    let volume = stored(wanted("v").apply(&World::default(), secret(1), now()).unwrap());
    let world = world_with("n", volume);
    let attached = stored(attach(&world, "v", "n").unwrap());
    let world = world_with("n", attached.clone());
    assert_eq!(attach(&world, "v", "n").unwrap(), Change::AlreadySo(attached));
    let mut both = world.clone();
    let mut second = world.nodes["n"].clone();
    second.metadata.name = "m".to_owned();
    both.insert(second.into());
    assert!(matches!(attach(&both, "v", "m"), Err(RequestError::AttachedElsewhere { .. })));
    assert_eq!(attach(&world, "v", "m"), Err(RequestError::NoNode("m".to_owned())));
    assert_eq!(attach(&world, "w", "n"), Err(RequestError::NoVolume("w".to_owned())));
    let gone = stored(delete(&world, "v", now()).unwrap());
    assert_eq!(gone.spec.node_id, None);
    let world = world_with("n", gone);
    assert_eq!(attach(&world, "v", "n"), Err(RequestError::Deleting("v".to_owned())));
    assert!(matches!(delete(&world, "v", now()), Ok(Change::AlreadySo(_))));
    let again = wanted("v").apply(&world, secret(1), now());
    assert_eq!(again, Err(RequestError::Deleting("v".to_owned())));
}

#[test]
fn disk_paths_are_plain() {
    let volume = stored(wanted("v").apply(&World::default(), secret(1), now()).unwrap());
    let world = world_with("n", volume);
    assert!(check_disk(&world, "n", "/var/lib/longhorn").is_ok());
    for bad in ["", "/", "var", "/a/", "/a//b", "/a/../b", "/a/./b", "/a\0b"] {
        assert!(matches!(check_disk(&world, "n", bad), Err(RequestError::DiskPath(_))), "{bad:?}");
    }
}

#[test]
fn objects_read_back_from_json_and_debug_hides_the_secret() {
    let volume = stored(wanted("v").apply(&World::default(), secret(0xab), now()).unwrap());
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
