//! The Controller service of CSI on the real controller, over agents in memory; and over a store alone, where
//! the tests play the reconcilers.
#![allow(clippy::unwrap_used, reason = "a test ends where something it relies on is not so")]

mod support;

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use shorthorn_api::csi::v1;
use shorthorn_api::csi::v1::identity_server::Identity as _;
use shorthorn_api::csi::v1::volume_capability::access_mode::Mode;
use shorthorn_api::csi::v1::volume_capability::{AccessType, BlockVolume, MountVolume};
use shorthorn_controller::agents::Fleet;
use shorthorn_controller::csi::CsiController;
use shorthorn_controller::metrics::Metrics;
use shorthorn_controller::store::{MemoryStore, Store};
use shorthorn_controller::work::Queue;
use shorthorn_controller_core::Timestamp;
use shorthorn_controller_core::objects::{
    ConditionType, Finding, Metadata, NEXT_ATTACH, Node, NodeSpec, NodeStatus, Object, Volume, VolumeState,
};
use shorthorn_controller_core::reconcile::Settings;
use shorthorn_csi::{DRIVER_NAME, Identity, TOPOLOGY_NODE, TOPOLOGY_ZONE};
use support::cluster::{Cluster, LIMIT};
use support::csi::*;
use tokio::net::UnixListener;
use tokio::sync::watch;
use tokio::time::{Instant, sleep};
use tokio_stream::wrappers::UnixListenerStream;
use tonic::{Code, Request};

const GIB: i64 = 1 << 30;

fn caller(cluster: &Cluster) -> Caller {
    Caller::new(&cluster.path("csi.sock"))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_from_creation_to_deletion_as_file_system_and_as_device() {
    let mut cluster = Cluster::start(&["a", "b", "c"]).await;
    let mut csi = caller(&cluster);
    for (name, capability) in [("pvc-1", file_system("")), ("pvc-2", block())] {
        let request =
            v1::CreateVolumeRequest { volume_capabilities: vec![capability.clone()], ..create(name) };
        let volume = csi.create(request.clone()).await.unwrap();
        assert_eq!((volume.volume_id.as_str(), volume.capacity_bytes), (name, GIB));
        assert!(volume.accessible_topology.is_empty() && volume.volume_context.is_empty());
        assert_eq!(cluster.inspect(name).await["state"], "detached");
        assert_eq!(csi.create(request).await.unwrap(), volume);
        assert!(csi.published(name).await.is_empty());

        let at = |node| v1::ControllerPublishVolumeRequest {
            volume_capability: Some(capability.clone()),
            ..publish(name, node)
        };
        csi.publish(at("b")).await.unwrap();
        csi.publish(at("b")).await.unwrap();
        assert_eq!(cluster.inspect(name).await["state"], "attached");
        assert!(cluster.agents[1].running().contains(&name.to_owned()));
        assert_eq!(csi.published(name).await, ["b"]);
        let (code, text) = csi.publish(at("c")).await.unwrap_err();
        assert!(code == Code::FailedPrecondition && text.contains("node b"), "{code:?}: {text}");
        let (code, text) = csi.delete(name).await.unwrap_err();
        assert!(code == Code::FailedPrecondition && text.contains("node b"), "{code:?}: {text}");

        // A volume need not be detached from a node without it.
        csi.unpublish(name, "c").await.unwrap();
        csi.unpublish(name, "no-such-node").await.unwrap();
        assert_eq!(csi.published(name).await, ["b"]);
        csi.unpublish(name, "b").await.unwrap();
        assert!(!cluster.agents[1].running().contains(&name.to_owned()));
        csi.unpublish(name, "b").await.unwrap();
        assert!(csi.published(name).await.is_empty());
        csi.publish(at("c")).await.unwrap();
        csi.unpublish(name, "").await.unwrap();
        cluster.until_stopped().await;
        csi.delete(name).await.unwrap();
        csi.delete(name).await.unwrap();
        csi.unpublish(name, "b").await.unwrap();
        assert_eq!(code_of_get(&mut csi, name).await, Code::NotFound);
        assert!(cluster.agents.iter().all(|agent| agent.directories().is_empty()));
    }
    cluster.stop_controller().await;
    cluster.check();
}

async fn code_of_get(csi: &mut Caller, id: &str) -> Code {
    code(&csi.get(id).await)
}

#[tokio::test(flavor = "multi_thread")]
async fn both_sockets_say_the_same_of_the_driver() {
    let cluster = Cluster::start(&[]).await;
    let mut csi = caller(&cluster);
    let node = Identity::new(DRIVER_NAME, env!("CARGO_PKG_VERSION"));
    let info = csi.identity.get_plugin_info(v1::GetPluginInfoRequest {}).await.unwrap().into_inner();
    let same = node.get_plugin_info(Request::new(v1::GetPluginInfoRequest {})).await.unwrap().into_inner();
    assert_eq!((info.name.as_str(), &info), ("csi.shorthorn.io", &same));
    let request = v1::GetPluginCapabilitiesRequest {};
    let found = csi.identity.get_plugin_capabilities(request).await.unwrap().into_inner();
    assert_eq!(found, node.get_plugin_capabilities(Request::new(request)).await.unwrap().into_inner());
    let probe = csi.identity.probe(v1::ProbeRequest {}).await.unwrap().into_inner();
    assert_eq!(probe.ready, Some(true));
    use std::os::unix::fs::PermissionsExt;
    let mode = std::fs::metadata(cluster.path("csi.sock")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_announced_and_what_is_not() {
    use v1::controller_service_capability::Type;
    let cluster = Cluster::start(&[]).await;
    let mut client = caller(&cluster).controller;
    let request = v1::ControllerGetCapabilitiesRequest {};
    let found = client.controller_get_capabilities(request).await.unwrap().into_inner().capabilities;
    let number = |capability: &v1::ControllerServiceCapability| match capability.r#type.unwrap() {
        Type::Rpc(rpc) => rpc.r#type,
    };
    assert_eq!(
        found.iter().map(number).collect::<BTreeSet<_>>(),
        BTreeSet::from([1, 2, 3, 4, 9, 10, 12, 13])
    );
    let codes = [
        client.create_snapshot(v1::CreateSnapshotRequest::default()).await.unwrap_err().code(),
        client.delete_snapshot(v1::DeleteSnapshotRequest::default()).await.unwrap_err().code(),
        client.list_snapshots(v1::ListSnapshotsRequest::default()).await.unwrap_err().code(),
        client.get_snapshot(v1::GetSnapshotRequest::default()).await.unwrap_err().code(),
        client
            .controller_modify_volume(v1::ControllerModifyVolumeRequest::default())
            .await
            .unwrap_err()
            .code(),
    ];
    assert_eq!(codes, [Code::Unimplemented; 5]);
}

/// A table of requests and expected answers.
#[derive(Default)]
struct Cases(Vec<String>);

impl Cases {
    fn expect<T: std::fmt::Debug>(&mut self, what: &str, answer: Outcome<T>, wanted: Code, words: &str) {
        let text = answer.as_ref().err().map(|(_, text)| text.as_str()).unwrap_or_default();
        if code(&answer) != wanted || !text.contains(words) {
            self.0.push(format!("{what}: {answer:?} instead of {wanted:?} with {words:?}"));
        }
    }

    fn done(self) {
        assert!(self.0.is_empty(), "{:#?}", self.0);
    }
}

fn with_mode(mode: Mode) -> v1::VolumeCapability {
    capability(AccessType::Block(BlockVolume {}), mode)
}

fn parameter(key: &str, value: &str) -> HashMap<String, String> {
    HashMap::from([(key.to_owned(), value.to_owned())])
}

#[tokio::test(flavor = "multi_thread")]
async fn creating_what_cannot_be() {
    type Create = v1::CreateVolumeRequest;
    let cluster = Cluster::start(&["a", "b", "c"]).await;
    let mut csi = caller(&cluster);
    let group = MountVolume { volume_mount_group: "7".into(), ..MountVolume::default() };
    let group = capability(AccessType::Mount(group), Mode::SingleNodeWriter);
    let with = |capability: v1::VolumeCapability| Create {
        volume_capabilities: vec![block(), capability],
        ..create("v")
    };
    let with_parameter = |key, value| Create { parameters: parameter(key, value), ..create("v") };
    let source = |r#type| Some(v1::VolumeContentSource { r#type: Some(r#type) });
    let snapshot = v1::volume_content_source::SnapshotSource { snapshot_id: "s".into() };
    let volume = v1::volume_content_source::VolumeSource { volume_id: "w".into() };
    let reached_from = |key: &str, value: &str| Create {
        accessibility_requirements: Some(v1::TopologyRequirement {
            requisite: vec![topology(&[(key, value)])],
            preferred: Vec::new(),
        }),
        ..create("v")
    };
    let invalid = Code::InvalidArgument;
    let cases: Vec<(&str, Create, Code, &str)> = vec![
        ("nothing", Create::default(), invalid, "name is missing"),
        ("no name", create(""), invalid, "name is missing"),
        ("a long name", create(&"x".repeat(129)), invalid, "129 bytes"),
        ("a banned character", create("a\u{1}"), invalid, "control character"),
        (
            "no capabilities",
            Create { volume_capabilities: Vec::new(), ..create("v") },
            invalid,
            "volume_capabilities is missing",
        ),
        ("an empty capability", with(v1::VolumeCapability::default()), invalid, "access_mode is missing"),
        (
            "no access type",
            with(v1::VolumeCapability { access_type: None, ..block() }),
            invalid,
            "access_type is missing",
        ),
        ("an unknown mode", with(with_mode(Mode::Unknown)), invalid, "not known"),
        ("readers on many nodes", with(with_mode(Mode::MultiNodeReaderOnly)), invalid, "one node at a time"),
        ("a writer among many", with(with_mode(Mode::MultiNodeSingleWriter)), invalid, "one node at a time"),
        ("writers on many nodes", with(with_mode(Mode::MultiNodeMultiWriter)), invalid, "one node at a time"),
        ("an unknown file system", with(file_system("ntfs")), invalid, "ext4 or xfs"),
        ("a mount group", with(group), invalid, "volume_mount_group"),
        (
            "a snapshot as source",
            Create {
                volume_content_source: source(v1::volume_content_source::Type::Snapshot(snapshot)),
                ..create("v")
            },
            invalid,
            "volume_content_source",
        ),
        (
            "a volume as source",
            Create {
                volume_content_source: source(v1::volume_content_source::Type::Volume(volume)),
                ..create("v")
            },
            invalid,
            "volume_content_source",
        ),
        ("a negative size", Create { capacity_range: range(-1, 0), ..create("v") }, invalid, "-1"),
        ("a limit below", Create { capacity_range: range(2, 1), ..create("v") }, Code::OutOfRange, "limit"),
        (
            "no size in between",
            Create { capacity_range: range(4097, 8191), ..create("v") },
            Code::OutOfRange,
            "4096",
        ),
        (
            "too large",
            Create { capacity_range: range((1 << 44) + 1, 0), ..create("v") },
            Code::OutOfRange,
            "largest",
        ),
        ("an unknown parameter", with_parameter("color", "red"), invalid, "color"),
        ("one of Longhorn", with_parameter("encrypted", "true"), invalid, "encrypted"),
        ("too many replicas", with_parameter("numberOfReplicas", "9"), invalid, "1 to 8"),
        ("an unknown locality", with_parameter("dataLocality", "strict-local"), invalid, "best-effort"),
        ("a bad tag", with_parameter("nodeSelector", "a/b"), invalid, "tag"),
        (
            "a mutable parameter",
            Create { mutable_parameters: parameter("numberOfReplicas", "1"), ..create("v") },
            invalid,
            "mutable",
        ),
        ("an unknown topology", reached_from("kubernetes.io/hostname", "a"), invalid, "topology key"),
        ("no such node", reached_from(TOPOLOGY_NODE, "z"), Code::ResourceExhausted, "topology"),
        ("no such zone", reached_from(TOPOLOGY_ZONE, "z"), Code::ResourceExhausted, "topology"),
    ];
    let mut table = Cases::default();
    for (what, request, code, words) in cases {
        table.expect(what, csi.create(request).await, code, words);
        assert!(csi.ids().await.is_empty(), "{what} leaves something behind");
    }
    table.done();
    csi.create(reached_from(TOPOLOGY_NODE, "a")).await.unwrap();
    cluster.check();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_same_name_is_the_same_volume() {
    type Create = v1::CreateVolumeRequest;
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
    type Create = v1::CreateVolumeRequest;
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
    tokio::time::timeout(LIMIT, async {
        while replicas() != [1, 1, 1] {
            sleep(Duration::from_millis(20)).await;
        }
    })
    .await
    .unwrap();
    // Without a place for all, nothing is created.
    let nowhere = v1::CreateVolumeRequest { parameters: parameter("diskSelector", "ssd"), ..create("w") };
    assert_eq!(code(&csi.create(nowhere).await), Code::ResourceExhausted);
    cluster.check();
}

#[tokio::test(flavor = "multi_thread")]
async fn publishing_and_deleting_what_cannot_be() {
    type Publish = v1::ControllerPublishVolumeRequest;
    let cluster = Cluster::start(&["a", "b", "c"]).await;
    let mut csi = caller(&cluster);
    csi.create(create("v")).await.unwrap();
    cluster.ok(&["volume", "create", "no-device", "--size", "1GiB", "--frontend", "socket"]).await;
    let invalid = Code::InvalidArgument;
    let good = || publish("v", "a");
    let with = |capability| Publish { volume_capability: capability, ..good() };
    let mut table = Cases::default();
    for (what, request, code, words) in [
        ("nothing", Publish::default(), invalid, "volume_id is missing"),
        ("no volume", publish("", "a"), invalid, "volume_id is missing"),
        ("a long volume", publish(&"x".repeat(129), "a"), invalid, "128"),
        ("no node", publish("v", ""), invalid, "node_id is missing"),
        ("no node of no volume", publish("w", ""), invalid, "node_id is missing"),
        ("a long node", publish("v", &"x".repeat(257)), invalid, "256"),
        ("no capability", with(None), invalid, "volume_capability is missing"),
        (
            "no mode",
            with(Some(v1::VolumeCapability { access_mode: None, ..block() })),
            invalid,
            "access_mode",
        ),
        ("many nodes", with(Some(with_mode(Mode::MultiNodeMultiWriter))), invalid, "one node at a time"),
        ("read-only", Publish { readonly: true, ..good() }, invalid, "PUBLISH_READONLY"),
        ("no such volume", publish("w", "a"), Code::NotFound, "no volume w"),
        ("a name that no volume has", publish("W/1", "a"), Code::NotFound, "W/1"),
        ("no such node", publish("v", "z"), Code::NotFound, "no node z"),
        ("a name that no node has", publish("v", "Z_"), Code::NotFound, "Z_"),
        ("no device", publish("no-device", "a"), invalid, "socket"),
    ] {
        table.expect(what, csi.publish(request).await, code, words);
    }
    for mode in [
        Mode::SingleNodeWriter,
        Mode::SingleNodeReaderOnly,
        Mode::SingleNodeSingleWriter,
        Mode::SingleNodeMultiWriter,
    ] {
        table.expect("a good one", csi.publish(with(Some(with_mode(mode)))).await, Code::Ok, "");
    }
    let long = "x".repeat(129);
    for (id, code) in [("", invalid), (&long, invalid), ("w", Code::Ok), ("W/1", Code::Ok)] {
        table.expect(&format!("delete {id:?}"), csi.delete(id).await, code, "");
        table.expect(&format!("unpublish {id:?}"), csi.unpublish(id, "a").await, code, "");
        let code = if code == Code::Ok { Code::NotFound } else { code };
        table.expect(&format!("get {id:?}"), csi.get(id).await, code, "");
        table.expect(&format!("expand {id:?}"), csi.expand(expand(id, GIB)).await, code, "");
    }
    let node = "x".repeat(257);
    table.expect("unpublish from a long node", csi.unpublish("v", &node).await, invalid, "256");
    table.done();
    cluster.check();
}

#[tokio::test(flavor = "multi_thread")]
async fn volumes_are_listed_page_by_page_and_validated() {
    type Validate = v1::ValidateVolumeCapabilitiesRequest;
    let cluster = Cluster::start(&["a", "b", "c"]).await;
    let mut csi = caller(&cluster);
    for name in ["v1", "v2", "v3", "v4", "v5"] {
        csi.create(create(name)).await.unwrap();
    }
    let (mut token, mut pages) = (String::new(), Vec::new());
    loop {
        let page = csi.list(2, &token).await.unwrap();
        let ids = page.entries.iter().map(|entry| entry.volume.as_ref().unwrap().volume_id.clone());
        pages.push(ids.collect::<Vec<_>>());
        assert!(page.entries.iter().all(|entry| entry.status.is_some()));
        token = page.next_token;
        if token.is_empty() {
            break;
        }
        // A page continues from its place, even if its last volume is gone.
        csi.delete(pages.last().unwrap().last().unwrap()).await.unwrap();
    }
    assert_eq!(pages, [vec!["v1", "v2"], vec!["v3", "v4"], vec!["v5"]]);
    assert!(csi.list(3, "").await.unwrap().next_token.is_empty());

    let good = || Validate {
        volume_id: "v1".into(),
        volume_capabilities: vec![file_system("xfs"), block()],
        ..Validate::default()
    };
    let mut table = Cases::default();
    for (what, token, code) in
        [("a bad token", "invalid-token", Code::Aborted), ("a worse one", "after:/", Code::Aborted)]
    {
        table.expect(what, csi.list(0, token).await, code, "starting_token");
    }
    table.expect("less than nothing", csi.list(-1, "").await, Code::InvalidArgument, "max_entries");
    for (what, request, code, words) in [
        ("nothing", Validate::default(), Code::InvalidArgument, "volume_id"),
        (
            "no capabilities",
            Validate { volume_capabilities: Vec::new(), ..good() },
            Code::InvalidArgument,
            "volume_capabilities",
        ),
        (
            "an empty one",
            Validate { volume_capabilities: vec![v1::VolumeCapability::default()], ..good() },
            Code::InvalidArgument,
            "access_mode",
        ),
        ("no such volume", Validate { volume_id: "w".into(), ..good() }, Code::NotFound, "no volume w"),
    ] {
        table.expect(what, csi.validate(request).await, code, words);
    }
    table.done();
    let request = Validate { parameters: parameter("numberOfReplicas", "3"), ..good() };
    let confirmed = csi.validate(request.clone()).await.unwrap().confirmed.unwrap();
    assert_eq!(confirmed.volume_capabilities, request.volume_capabilities);
    assert_eq!(confirmed.parameters, request.parameters);
    for (request, words) in [
        (
            Validate { volume_capabilities: vec![block(), with_mode(Mode::MultiNodeMultiWriter)], ..good() },
            "one node",
        ),
        (Validate { volume_capabilities: vec![file_system("ntfs")], ..good() }, "ntfs"),
        (Validate { parameters: parameter("numberOfReplicas", "2"), ..good() }, "number of replicas"),
        (Validate { parameters: parameter("color", "red"), ..good() }, "color"),
        (Validate { mutable_parameters: parameter("x", "y"), ..good() }, "mutable"),
        (Validate { volume_context: parameter("x", "y"), ..good() }, "volume_context"),
    ] {
        let answer = csi.validate(request).await.unwrap();
        assert!(answer.confirmed.is_none() && answer.message.contains(words), "{answer:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_room_is_what_can_be_made() {
    type Capacity = v1::GetCapacityRequest;
    let cluster = Cluster::start(&["a", "b", "c"]).await;
    let mut csi = caller(&cluster);
    let with = |key, value| Capacity { parameters: parameter(key, value), ..Capacity::default() };
    let at = |key, value| Capacity {
        accessible_topology: Some(topology(&[(key, value)])),
        ..with("numberOfReplicas", "1")
    };
    // Each of the three nodes has a disk of 100 GiB, of which 10 % stay free.
    for (request, available, largest) in [
        (Capacity::default(), 90, 90),
        (with("numberOfReplicas", "1"), 270, 90),
        (with("numberOfReplicas", "4"), 0, 0),
        (with("diskSelector", "ssd"), 0, 0),
        (at(TOPOLOGY_NODE, "b"), 270, 90),
        (at(TOPOLOGY_NODE, "z"), 0, 0),
        (at(TOPOLOGY_ZONE, "z"), 0, 0),
        (Capacity { volume_capabilities: vec![block()], ..Capacity::default() }, 90, 90),
    ] {
        let answer = csi.capacity(request.clone()).await.unwrap();
        let found = (answer.available_capacity / GIB, answer.maximum_volume_size.unwrap() / GIB);
        assert_eq!(found, (available, largest), "{request:?}");
        assert_eq!(answer.minimum_volume_size, Some(4096));
    }
    let mut table = Cases::default();
    for (what, request) in [
        ("an unknown parameter", with("color", "red")),
        ("an unknown topology", at("kubernetes.io/hostname", "a")),
        (
            "many nodes",
            Capacity {
                volume_capabilities: vec![with_mode(Mode::MultiNodeMultiWriter)],
                ..Capacity::default()
            },
        ),
    ] {
        table.expect(what, csi.capacity(request).await, Code::InvalidArgument, "");
    }
    table.done();
    let sized = |size| v1::CreateVolumeRequest { capacity_range: range(size, 0), ..create("v") };
    let largest = csi.capacity(Capacity::default()).await.unwrap().maximum_volume_size.unwrap();
    assert_eq!(code(&csi.create(sized(largest + 4096)).await), Code::ResourceExhausted);
    csi.create(sized(largest)).await.unwrap();
    assert_eq!(csi.capacity(Capacity::default()).await.unwrap().maximum_volume_size, Some(0));
}

/// Kubernetes schedules no pod whose volume is larger than the room of its node.
#[tokio::test(flavor = "multi_thread")]
async fn a_volume_that_may_begin_with_fewer_replicas_has_room_on_too_few_nodes() {
    let mut cluster = Cluster::start(&["a", "b"]).await;
    cluster.stop_controller().await;
    cluster.degraded_creation = true;
    cluster.start_controller().await;
    let mut csi = caller(&cluster);
    // The controller connects to the agents after it says that it is ready.
    let answer = tokio::time::timeout(LIMIT, async {
        loop {
            let answer = csi.capacity(v1::GetCapacityRequest::default()).await.unwrap();
            if answer.available_capacity > 0 {
                break answer;
            }
            sleep(Duration::from_millis(20)).await;
        }
    });
    let answer = answer.await.unwrap();
    let largest = answer.maximum_volume_size.unwrap();
    assert_eq!((answer.available_capacity / GIB, largest / GIB), (90, 90));
    let request = v1::CreateVolumeRequest { capacity_range: range(largest, 0), ..create("v") };
    csi.create(request).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_that_takes_too_long_says_what_it_waits_for_and_can_be_repeated() {
    let cluster = Cluster::start(&["a", "b", "c"]).await;
    let mut csi = caller(&cluster);
    csi.create(create("v")).await.unwrap();
    csi.publish(publish("v", "a")).await.unwrap();
    cluster.agents[0].set_in_use(Some("mount at /mnt"));
    let mut hasty = Caller { timeout: Duration::from_secs(2), ..csi.clone() };
    for _ in 0..2 {
        let (code, text) = hasty.unpublish("v", "a").await.unwrap_err();
        assert!(
            code == Code::DeadlineExceeded && text.contains("in use by mount at /mnt"),
            "{code:?}: {text}"
        );
        // The volume still exists, and is listed accordingly.
        assert_eq!(csi.published("v").await, ["a"]);
        let (code, text) = csi.publish(publish("v", "b")).await.unwrap_err();
        assert!(code == Code::FailedPrecondition && text.contains("node a"), "{code:?}: {text}");
        assert_eq!(code_of_delete(&mut csi, "v").await, Code::FailedPrecondition);
    }
    cluster.agents[0].set_in_use(None);
    csi.unpublish("v", "a").await.unwrap();
    csi.publish(publish("v", "b")).await.unwrap();
    cluster.check();
}

async fn code_of_delete(csi: &mut Caller, id: &str) -> Code {
    code(&csi.delete(id).await)
}

/// The service over a store in memory, reconciled only by the test.
struct Alone {
    store: Arc<MemoryStore>,
    csi: Caller,
    stop: watch::Sender<bool>,
    _directory: tempfile::TempDir,
}

impl Alone {
    fn start() -> Alone {
        let store = Arc::new(MemoryStore::new());
        let shared: Arc<dyn Store> = Arc::<MemoryStore>::clone(&store);
        let fleet =
            Fleet::new(&Default::default(), Arc::clone(&shared), Arc::new(Queue::new()), Metrics::default())
                .unwrap();
        let (stop, stopping) = watch::channel(false);
        let service = CsiController::new(shared, fleet, stopping, Settings::default(), Metrics::default());
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("csi.sock");
        let incoming = UnixListenerStream::new(UnixListener::bind(&socket).unwrap());
        let router = tonic::transport::Server::builder().add_service(service.server());
        tokio::spawn(router.serve_with_incoming(incoming));
        Alone { store, csi: Caller::new(&socket), stop, _directory: directory }
    }

    /// Waits until the volume looks like that.
    async fn until(&self, seen: impl Fn(&Volume) -> bool) -> Volume {
        let mut changes = self.store.changes();
        let look = async {
            loop {
                let volume = self.store.state().volumes.get("v").cloned();
                if let Some(volume) = volume.filter(|volume| seen(volume)) {
                    return volume;
                }
                changes.recv().await.unwrap();
            }
        };
        tokio::time::timeout(LIMIT, look).await.unwrap()
    }

    async fn change(&self, change: impl FnOnce(&mut Volume)) {
        let mut volume = self.store.state().volumes["v"].clone();
        change(&mut volume);
        self.store.put(Object::Volume(volume)).await.unwrap();
    }

    /// Makes a volume of 1 GiB that has its places.
    async fn volume(&self) {
        let mut csi = self.csi.clone();
        let creating = tokio::spawn(async move { csi.create(create("v")).await });
        self.until(|_| true).await;
        self.change(|volume| volume.status.state = VolumeState::Detached).await;
        creating.await.unwrap().unwrap();
    }

    fn expanding(
        &self,
        required_bytes: i64,
    ) -> tokio::task::JoinHandle<Outcome<v1::ControllerExpandVolumeResponse>> {
        let mut csi = self.csi.clone();
        tokio::spawn(async move { csi.expand(expand("v", required_bytes)).await })
    }
}

#[tokio::test]
async fn a_volume_has_grown_once_its_real_size_says_so() {
    let mut alone = Alone::start();
    alone.volume().await;
    let answer = alone.csi.expand(expand("v", GIB)).await.unwrap();
    assert_eq!((answer.capacity_bytes, answer.node_expansion_required), (GIB, true));
    for (capability, node) in [(Some(file_system("xfs")), true), (None, true), (Some(block()), false)] {
        let has = alone.until(|_| true).await.current_size_bytes();
        let wanted = has + 4096;
        let request = v1::ControllerExpandVolumeRequest {
            capacity_range: range(i64::try_from(wanted - 1).unwrap(), 0),
            volume_capability: capability,
            ..expand("v", 0)
        };
        let mut csi = alone.csi.clone();
        let growing = tokio::spawn(async move { csi.expand(request).await });
        let volume = alone.until(|volume| volume.spec.size == wanted).await;
        assert_eq!(volume.current_size_bytes(), has);
        assert!(!growing.is_finished());
        // Half of the way is not enough.
        alone.change(|volume| volume.status.current_size = wanted - 1).await;
        alone.change(|volume| volume.status.current_size = wanted).await;
        let answer = growing.await.unwrap().unwrap();
        assert_eq!(answer.capacity_bytes, i64::try_from(wanted).unwrap());
        assert_eq!(answer.node_expansion_required, node);
    }
    let mut table = Cases::default();
    let with = |capacity_range| v1::ControllerExpandVolumeRequest { capacity_range, ..expand("v", 0) };
    let many = Some(with_mode(Mode::MultiNodeMultiWriter));
    let invalid = Code::InvalidArgument;
    for (what, request, code, words) in [
        ("nothing", v1::ControllerExpandVolumeRequest::default(), invalid, "volume_id"),
        ("no range", with(None), invalid, "capacity_range is missing"),
        ("an empty range", with(range(0, 0)), invalid, "capacity_range is missing"),
        ("a negative size", with(range(-1, 0)), invalid, "-1"),
        ("a limit below", with(range(2, 1)), Code::OutOfRange, "limit"),
        ("smaller", with(range(4096, 4096)), Code::OutOfRange, "cannot become smaller"),
        ("too large", with(range((1 << 44) + 1, 0)), Code::OutOfRange, "largest"),
        (
            "many nodes",
            v1::ControllerExpandVolumeRequest { volume_capability: many, ..expand("v", GIB) },
            invalid,
            "one node",
        ),
        ("no such volume", expand("w", GIB), Code::NotFound, "no volume w"),
        ("less than there is", expand("v", 1), Code::Ok, ""),
    ] {
        table.expect(what, alone.csi.expand(request).await, code, words);
    }
    table.done();
}

#[tokio::test]
async fn a_volume_that_cannot_grow_in_use_grows_on_its_node_later_and_can_be_taken_away() {
    let alone = Alone::start();
    alone.volume().await;
    let growing = alone.expanding(2 * GIB);
    alone.until(|volume| volume.spec.size > 1 << 30).await;
    // A caller that waits for a size does not block others.
    let mut csi = alone.csi.clone();
    assert_eq!(csi.unpublish("v", "a").await, Ok(()));
    assert!(!growing.is_finished());
    alone
        .change(|volume| {
            volume.status.state = VolumeState::Attached;
            let waits = Finding::wrong(NEXT_ATTACH, "when it is attached again");
            volume.status.conditions.set(ConditionType::Expanded, waits, Timestamp::now());
        })
        .await;
    let block = v1::ControllerExpandVolumeRequest {
        volume_capability: Some(with_mode(Mode::SingleNodeWriter)),
        ..expand("v", 2 * GIB)
    };
    for answer in [growing.await.unwrap(), csi.expand(expand("v", 2 * GIB)).await, csi.expand(block).await] {
        let answer = answer.unwrap();
        assert_eq!((answer.capacity_bytes, answer.node_expansion_required), (2 * GIB, true));
    }
}

#[tokio::test]
async fn one_call_at_a_time_for_each_volume() {
    let alone = Alone::start();
    alone.volume().await;
    let mut csi = alone.csi.clone();
    alone.change(|volume| volume.status.state = VolumeState::Creating).await;
    let creating = tokio::spawn(async move { csi.create(create("v")).await });
    let mut csi = alone.csi.clone();
    let deadline = Instant::now() + LIMIT;
    while code(&csi.unpublish("v", "a").await) != Code::Aborted {
        assert!(Instant::now() < deadline, "the gate is open");
        sleep(Duration::from_millis(5)).await;
    }
    let answers = [
        csi.create(create("v")).await.map(drop),
        csi.expand(expand("v", 2 * GIB)).await.map(drop),
        csi.publish(publish("v", "a")).await,
        csi.unpublish("v", "a").await,
        csi.delete("v").await,
    ];
    for answer in answers {
        let (code, text) = answer.unwrap_err();
        assert!(code == Code::Aborted && text.contains("under way"), "{code:?}: {text}");
    }
    // Other volumes do not wait for it, nor do read-only calls.
    assert_eq!(csi.delete("w").await, Ok(()));
    assert_eq!(csi.ids().await, ["v"]);
    // A caller that goes takes its call along.
    creating.abort();
    alone.change(|volume| volume.status.state = VolumeState::Detached).await;
    let deadline = Instant::now() + LIMIT;
    while code(&csi.unpublish("v", "a").await) == Code::Aborted {
        assert!(Instant::now() < deadline, "the gate is kept");
        sleep(Duration::from_millis(5)).await;
    }
    // So does one whose time is over.
    let mut hasty = Caller { timeout: Duration::from_millis(200), ..csi.clone() };
    let (code, text) = hasty.expand(expand("v", 2 * GIB)).await.unwrap_err();
    assert!(code == Code::DeadlineExceeded && text.contains("volume v is detached"), "{code:?}: {text}");
    alone.change(|volume| volume.status.current_size = 2 << 30).await;
    csi.expand(expand("v", 2 * GIB)).await.unwrap();
}

#[tokio::test]
async fn what_is_detached_or_deleted_meanwhile_is_not_waited_for() {
    let mut alone = Alone::start();
    let mut csi = alone.csi.clone();
    let creating = tokio::spawn(async move { csi.create(create("v")).await });
    let volume = alone.until(|_| true).await;
    alone
        .store
        .remove(&Object::Volume(volume.clone()).key(), volume.metadata.resource_version)
        .await
        .unwrap();
    assert_eq!(code(&creating.await.unwrap()), Code::Aborted);
    alone.volume().await;
    let growing = alone.expanding(2 * GIB);
    alone.until(|volume| volume.spec.size > 1 << 30).await;
    alone.stop.send(true).unwrap();
    assert_eq!(code(&growing.await.unwrap()), Code::Unavailable);
    // A completed one is answered all the same.
    assert_eq!(code(&alone.csi.expand(expand("v", 2 * GIB)).await), Code::Unavailable);
    assert_eq!(alone.csi.expand(expand("v", GIB)).await.unwrap().capacity_bytes, GIB);
}

/// A small generator, so that a failing run can be repeated.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % end
    }
}

/// Makes a call while the controller is killed under it once or twice; repeats it until it works.
async fn under_fire<F: Future<Output = Code> + Send + 'static>(
    cluster: &mut Cluster,
    random: &mut Random,
    what: &str,
    call: impl Fn(Caller) -> F,
) {
    let mut kills = random.below(2) + 1;
    let deadline = Instant::now() + LIMIT;
    loop {
        let calling = tokio::spawn(call(caller(cluster)));
        while kills > 0 {
            kills -= 1;
            // When the kill comes is the random part of this test; nothing waits for it.
            sleep(Duration::from_micros(random.below(25_000))).await;
            cluster.kill_controller().await;
            cluster.start_controller().await;
        }
        match calling.await.unwrap() {
            Code::Ok => return,
            // A connection that broke has no code of ours.
            Code::Unavailable | Code::Unknown | Code::Cancelled | Code::Internal => {}
            code => panic!("{what}: {code:?}"),
        }
        assert!(Instant::now() < deadline, "{what} never works");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_whose_controller_is_killed_is_repeated_to_the_same_end() {
    let mut cluster = Cluster::start(&["a", "b", "c"]).await;
    for seed in 1..=4 {
        let mut random = Random(seed);
        let name = format!("Volume {seed}");
        let request = create(&name);
        under_fire(&mut cluster, &mut random, "create", |mut csi| {
            let request = request.clone();
            async move { code(&csi.create(request).await) }
        })
        .await;
        let ids = caller(&cluster).ids().await;
        let [id] = ids.as_slice() else { panic!("{ids:?}") };
        for node in ["a", "c"] {
            under_fire(&mut cluster, &mut random, "publish", |mut csi| {
                let request = publish(id, node);
                async move { code(&csi.publish(request).await) }
            })
            .await;
            let volume = cluster.inspect(id).await;
            assert_eq!((&volume["state"], &volume["robustness"]), (&"attached".into(), &"healthy".into()));
            under_fire(&mut cluster, &mut random, "unpublish", |mut csi| {
                let id = id.clone();
                async move { code(&csi.unpublish(&id, node).await) }
            })
            .await;
            cluster.until_stopped().await;
        }
        under_fire(&mut cluster, &mut random, "delete", |mut csi| {
            let id = id.clone();
            async move { code(&csi.delete(&id).await) }
        })
        .await;
        assert!(cluster.agents.iter().all(|agent| agent.directories().is_empty()));
        cluster.check();
    }
}

/// The limit is that of NodeGetInfo for kubelet, whose own count can be wrong.
#[tokio::test(flavor = "multi_thread")]
async fn a_node_takes_no_more_volumes_than_its_agent_allows() {
    let alone = Alone::start();
    let status = NodeStatus { max_volumes: 1, ..NodeStatus::default() };
    let node = Node { metadata: Metadata::new("a", Timestamp::now()), spec: NodeSpec::default(), status };
    alone.store.put(Object::Node(node)).await.unwrap();
    alone.volume().await;
    let volume = alone.until(|_| true).await;
    let mut other = Volume { metadata: Metadata::new("w", Timestamp::now()), ..volume };
    other.spec.volume_name = "w".parse().unwrap();
    other.spec.csi_name = Some("w".to_owned());
    alone.store.put(Object::Volume(other)).await.unwrap();
    // Two at once: one of them gets the place, and waits for its reconcilers.
    let (mut one, mut two) = (alone.csi.clone(), alone.csi.clone());
    let refused = tokio::select! {
        answer = async { one.publish(publish("v", "a")).await } => answer,
        answer = async { two.publish(publish("w", "a")).await } => answer,
    };
    let (code, text) = refused.unwrap_err();
    assert!(code == Code::ResourceExhausted && text.contains("max_volumes"), "{code:?}: {text}");
    let cluster = alone.store.state();
    let wanted = cluster.volumes.values().filter(|volume| volume.spec.node_id.is_some()).count();
    assert_eq!(wanted, 1);
}
