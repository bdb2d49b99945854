//! Lists of volumes, their capabilities, and the room for more.

use shorthorn_api::csi::v1;
use shorthorn_api::csi::v1::volume_capability::access_mode::Mode;
use shorthorn_csi::{TOPOLOGY_NODE, TOPOLOGY_ZONE};
use shorthorn_testkit::waiting::wait_for_async;
use tonic::Code;

use super::{Cases, GIB, caller, parameter, with_mode};
use crate::support::cluster::{Cluster, LIMIT};
use crate::support::csi::*;

#[tokio::test(flavor = "multi_thread")]
async fn volumes_are_listed_page_by_page() {
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
    let mut table = Cases::default();
    for (what, token, code) in
        [("a bad token", "invalid-token", Code::Aborted), ("a worse one", "after:/", Code::Aborted)]
    {
        table.expect(what, csi.list(0, token).await, code, "starting_token");
    }
    table.expect("a negative number", csi.list(-1, "").await, Code::InvalidArgument, "max_entries");
    table.done();
}

#[tokio::test(flavor = "multi_thread")]
async fn capabilities_are_validated_with_the_reason_of_a_refusal() {
    type Validate = v1::ValidateVolumeCapabilitiesRequest;
    let cluster = Cluster::start(&["a", "b", "c"]).await;
    let mut csi = caller(&cluster);
    csi.create(create("v1")).await.unwrap();
    let good = || Validate {
        volume_id: "v1".into(),
        volume_capabilities: vec![file_system("xfs"), block()],
        ..Validate::default()
    };
    let mut table = Cases::default();
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
async fn the_capacity_is_that_of_new_volumes() {
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
    let capacity = async || {
        let answer = csi.capacity(v1::GetCapacityRequest::default()).await.unwrap();
        if answer.available_capacity > 0 { Ok(answer) } else { Err(answer) }
    };
    let answer = wait_for_async("the controller knows the disks", LIMIT, capacity).await;
    let largest = answer.maximum_volume_size.unwrap();
    assert_eq!((answer.available_capacity / GIB, largest / GIB), (90, 90));
    let request = v1::CreateVolumeRequest { capacity_range: range(largest, 0), ..create("v") };
    csi.create(request).await.unwrap();
}
