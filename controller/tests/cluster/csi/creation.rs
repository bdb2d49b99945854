//! Creation of volumes.

use std::collections::BTreeSet;

use shorthorn_api::csi::v1;
use shorthorn_api::csi::v1::volume_capability::access_mode::Mode;
use shorthorn_api::csi::v1::volume_capability::{AccessType, MountVolume};
use shorthorn_csi::{TOPOLOGY_NODE, TOPOLOGY_ZONE};
use shorthorn_testkit::waiting::wait_for_async;
use tonic::Code;

use super::{Cases, GIB, caller, parameter, with_mode};
use crate::support::cluster::{Cluster, LIMIT};
use crate::support::csi::*;

type Create = v1::CreateVolumeRequest;

/// A request, and the code and the words of its refusal.
type Case = (&'static str, Create, Code, &'static str);

fn bad_names() -> Vec<Case> {
    let invalid = Code::InvalidArgument;
    vec![
        ("nothing", Create::default(), invalid, "name is missing"),
        ("no name", create(""), invalid, "name is missing"),
        ("a long name", create(&"x".repeat(129)), invalid, "129 bytes"),
        ("a banned character", create("a\u{1}"), invalid, "control character"),
    ]
}

fn bad_capabilities() -> Vec<Case> {
    let group = MountVolume { volume_mount_group: "7".into(), ..MountVolume::default() };
    let group = capability(AccessType::Mount(group), Mode::SingleNodeWriter);
    let with = |capability: v1::VolumeCapability| Create {
        volume_capabilities: vec![block(), capability],
        ..create("v")
    };
    let none = Create { volume_capabilities: Vec::new(), ..create("v") };
    let no_type = v1::VolumeCapability { access_type: None, ..block() };
    let cases = [
        ("no capabilities", none, "volume_capabilities is missing"),
        ("an empty capability", with(v1::VolumeCapability::default()), "access_mode is missing"),
        ("no access type", with(no_type), "access_type is missing"),
        ("an unknown mode", with(with_mode(Mode::Unknown)), "not known"),
        ("readers on many nodes", with(with_mode(Mode::MultiNodeReaderOnly)), "one node at a time"),
        ("a writer among many", with(with_mode(Mode::MultiNodeSingleWriter)), "one node at a time"),
        ("writers on many nodes", with(with_mode(Mode::MultiNodeMultiWriter)), "one node at a time"),
        ("an unknown file system", with(file_system("ntfs")), "ext4 or xfs"),
        ("a mount group", with(group), "volume_mount_group"),
    ];
    cases.map(|(what, request, words)| (what, request, Code::InvalidArgument, words)).into()
}

fn bad_sources() -> Vec<Case> {
    use v1::volume_content_source::{SnapshotSource, Type, VolumeSource};
    let from = |source| Create {
        volume_content_source: Some(v1::VolumeContentSource { r#type: Some(source) }),
        ..create("v")
    };
    let snapshot = Type::Snapshot(SnapshotSource { snapshot_id: "s".into() });
    let volume = Type::Volume(VolumeSource { volume_id: "w".into() });
    [("a snapshot as source", snapshot), ("a volume as source", volume)]
        .map(|(what, source)| (what, from(source), Code::InvalidArgument, "volume_content_source"))
        .into()
}

fn bad_sizes() -> Vec<Case> {
    let sized = |required, limit| Create { capacity_range: range(required, limit), ..create("v") };
    vec![
        ("a negative size", sized(-1, 0), Code::InvalidArgument, "-1"),
        ("a limit below", sized(2, 1), Code::OutOfRange, "limit"),
        ("no size in between", sized(4097, 8191), Code::OutOfRange, "4096"),
        ("too large", sized((1 << 44) + 1, 0), Code::OutOfRange, "largest"),
    ]
}

fn bad_parameters() -> Vec<Case> {
    let with = |key, value| Create { parameters: parameter(key, value), ..create("v") };
    let mutable = Create { mutable_parameters: parameter("numberOfReplicas", "1"), ..create("v") };
    let cases = [
        ("an unknown parameter", with("color", "red"), "color"),
        ("one of Longhorn", with("encrypted", "true"), "encrypted"),
        ("too many replicas", with("numberOfReplicas", "9"), "1 to 8"),
        ("an unknown locality", with("dataLocality", "strict-local"), "best-effort"),
        ("a bad tag", with("nodeSelector", "a/b"), "tag"),
        ("a mutable parameter", mutable, "mutable"),
    ];
    cases.map(|(what, request, words)| (what, request, Code::InvalidArgument, words)).into()
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_volumes_are_not_created() {
    let cluster = Cluster::start(&["a", "b", "c"]).await;
    let mut csi = caller(&cluster);
    let mut table = Cases::default();
    let reached_from = |key: &str, value: &str| Create {
        accessibility_requirements: Some(v1::TopologyRequirement {
            requisite: vec![topology(&[(key, value)])],
            preferred: Vec::new(),
        }),
        ..create("v")
    };
    let places = vec![
        (
            "an unknown topology",
            reached_from("kubernetes.io/hostname", "a"),
            Code::InvalidArgument,
            "topology key",
        ),
        ("no such node", reached_from(TOPOLOGY_NODE, "z"), Code::ResourceExhausted, "topology"),
        ("no such zone", reached_from(TOPOLOGY_ZONE, "z"), Code::ResourceExhausted, "topology"),
    ];
    let cases = [bad_names(), bad_capabilities(), bad_sources(), bad_sizes(), bad_parameters(), places];
    for (what, request, code, words) in cases.into_iter().flatten() {
        table.expect(what, csi.create(request).await, code, words);
        assert!(csi.ids().await.is_empty(), "{what} leaves something behind");
    }
    table.done();
    csi.create(reached_from(TOPOLOGY_NODE, "a")).await.unwrap();
    cluster.check();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_same_name_is_the_same_volume() {
    let cluster = Cluster::start(&["a", "b", "c"]).await;
    let mut csi = caller(&cluster);
    let long = "Ünï name/".repeat(11);
    let mut ids = BTreeSet::new();
    for name in [&*"x".repeat(128), &long, "A", "a", "a ", "volume 1"] {
        let volume = csi.create(create(name)).await.unwrap();
        assert_eq!(csi.create(create(name)).await.unwrap().volume_id, volume.volume_id);
        assert!(ids.insert(volume.volume_id.clone()), "{name:?} is {} too", volume.volume_id);
        let taken = csi.create(create(&volume.volume_id)).await;
        assert_eq!(code(&taken), if name == volume.volume_id { Code::Ok } else { Code::AlreadyExists });
    }
    assert_eq!(csi.ids().await, ids.into_iter().collect::<Vec<_>>());
    let none = csi.create(Create { capacity_range: None, ..create("default") }).await.unwrap();
    assert_eq!(none.capacity_bytes, 10 * GIB);
    let odd = csi.create(Create { capacity_range: range(GIB + 1, GIB + 4096), ..create("odd") }).await;
    assert_eq!(odd.unwrap().capacity_bytes, GIB + 4096);

    let sized = |required, limit| Create { capacity_range: range(required, limit), ..create("a") };
    let with = |key, value| Create { parameters: parameter(key, value), ..create("a") };
    let mut table = Cases::default();
    for (what, request, code) in [
        ("as it is", sized(GIB, GIB), Code::Ok),
        ("smaller will do", sized(GIB / 2, 0), Code::Ok),
        ("no size", Create { capacity_range: None, ..create("a") }, Code::Ok),
        ("as a device", Create { volume_capabilities: vec![block()], ..create("a") }, Code::Ok),
        ("the default said", with("numberOfReplicas", "3"), Code::Ok),
        ("larger", sized(2 * GIB, 2 * GIB), Code::AlreadyExists),
        ("smaller", sized(GIB / 2, GIB / 2), Code::AlreadyExists),
        ("fewer replicas", with("numberOfReplicas", "2"), Code::AlreadyExists),
        ("another frontend", with("frontend", "nbd"), Code::AlreadyExists),
        ("another locality", with("dataLocality", "best-effort"), Code::AlreadyExists),
    ] {
        table.expect(what, csi.create(request).await, code, "");
    }
    table.done();
    cluster.check();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_without_a_place_leaves_nothing_behind() {
    let cluster = Cluster::start(&["a", "b", "c"]).await;
    let mut csi = caller(&cluster);
    let many = Create { parameters: parameter("numberOfReplicas", "4"), ..create("v") };
    let large = Create { capacity_range: range(1 << 40, 0), ..create("v") };
    let tagged = Create { parameters: parameter("diskSelector", "ssd"), ..create("v") };
    for (request, words) in
        [(many, "3 of 4 replicas have a place"), (large, "can schedule 90.0 GiB more"), (tagged, "ssd")]
    {
        for _ in 0..2 {
            let (code, text) = csi.create(request.clone()).await.unwrap_err();
            assert!(code == Code::ResourceExhausted && text.contains(words), "{code:?}: {text}");
            assert!(csi.ids().await.is_empty());
        }
    }
    csi.create(create("v")).await.unwrap();
    // A volume that an operator wants to wait for stays.
    let (code, _) = cluster.fails(&["volume", "create", "w", "--size", "1TiB"]).await;
    assert_eq!(code, 1);
    let (code, _) =
        csi.create(Create { capacity_range: range(1 << 40, 0), ..create("w") }).await.unwrap_err();
    assert_eq!(code, Code::ResourceExhausted);
    assert_eq!(csi.ids().await, ["v", "w"]);
    cluster.check();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_is_created_degraded_and_made_whole_once_there_is_a_place() {
    let mut cluster = Cluster::start(&["a", "b", "c"]).await;
    cluster.stop_controller().await;
    cluster.degraded_creation = true;
    cluster.start_controller().await;
    let mut csi = caller(&cluster);
    cluster.ok(&["node", "cordon", "c"]).await;
    csi.create(create("v")).await.unwrap();
    csi.publish(publish("v", "a")).await.unwrap();
    let replicas = || cluster.agents.iter().map(|agent| agent.directories().len()).collect::<Vec<_>>();
    assert_eq!(replicas(), [1, 1, 0]);
    cluster.ok(&["node", "uncordon", "c"]).await;
    let all_there = async || Some(replicas()).filter(|replicas| *replicas != [1, 1, 1]).map_or(Ok(()), Err);
    wait_for_async("each node has a replica", LIMIT, all_there).await;
    // Without a place for all, nothing is created.
    let nowhere = v1::CreateVolumeRequest { parameters: parameter("diskSelector", "ssd"), ..create("w") };
    assert_eq!(code(&csi.create(nowhere).await), Code::ResourceExhausted);
    cluster.check();
}
