//! Tests the answers of the services to every wrong call, and their announcements, by the tables of the
//! specification.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::collections::BTreeSet;

use common::*;
use shorthorn_api::csi::v1;
use shorthorn_api::csi::v1::volume_capability::access_mode::Mode;
use shorthorn_api::csi::v1::volume_capability::{AccessType, MountVolume};
use shorthorn_api::csi::v1::{node_service_capability, plugin_capability};
use tonic::Code;

#[tokio::test]
async fn identity_reports_name_and_capabilities() {
    let node = Node::new();
    let mut identity = node.serve().await.identity;
    let info = identity.get_plugin_info(v1::GetPluginInfoRequest {}).await.unwrap().into_inner();
    assert_eq!((info.name.as_str(), info.vendor_version.as_str()), ("csi.shorthorn.io", "1.2.3"));
    let probe = identity.probe(v1::ProbeRequest {}).await.unwrap().into_inner();
    assert_eq!(probe.ready, Some(true));
    let request = v1::GetPluginCapabilitiesRequest {};
    let found = identity.get_plugin_capabilities(request).await.unwrap().into_inner().capabilities;
    let mut numbers = BTreeSet::new();
    for capability in found {
        numbers.insert(match capability.r#type.unwrap() {
            plugin_capability::Type::Service(service) => ("service", service.r#type),
            plugin_capability::Type::VolumeExpansion(expansion) => ("expansion", expansion.r#type),
        });
    }
    assert_eq!(numbers, BTreeSet::from([("service", 1), ("service", 2), ("expansion", 1)]));
}

#[tokio::test]
async fn the_node_reports_topology_and_capabilities() {
    let node = Node::new();
    let mut client = node.serve().await.node;
    let info = client.node_get_info(v1::NodeGetInfoRequest {}).await.unwrap().into_inner();
    assert_eq!((info.node_id.as_str(), info.max_volumes_per_node), ("n1", 7));
    let segments = info.accessible_topology.unwrap().segments;
    assert_eq!(segments.len(), 2);
    assert_eq!(segments["topology.shorthorn.io/node"], "n1");
    assert_eq!(segments["topology.shorthorn.io/zone"], "z1");
    let request = v1::NodeGetCapabilitiesRequest {};
    let found = client.node_get_capabilities(request).await.unwrap().into_inner().capabilities;
    let number = |capability: &v1::NodeServiceCapability| match capability.r#type.unwrap() {
        node_service_capability::Type::Rpc(rpc) => rpc.r#type,
    };
    assert_eq!(found.iter().map(number).collect::<Vec<_>>(), [1, 2, 3, 4, 5]);
}

/// Makes a good request wrong.
type Change<T> = Box<dyn Fn(T) -> T>;

/// A table of requests and expected answers.
struct Cases(Vec<String>);

impl Cases {
    fn expect(&mut self, what: &str, answer: Outcome, code: Code) {
        let found = answer.as_ref().err().map_or(Code::Ok, |(code, _)| *code);
        if found != code {
            self.0.push(format!("{what}: {answer:?} instead of {code:?}"));
        }
    }

    fn done(self) {
        assert!(self.0.is_empty(), "{:#?}", self.0);
    }
}

const MISSING: &str = "0123456789";

type Stage = v1::NodeStageVolumeRequest;

/// Returns wrong changes of a good request to stage a volume.
fn wrong_stages() -> impl Iterator<Item = (&'static str, Change<Stage>, Code)> {
    let of_names: [(&str, Change<Stage>, Code); 9] = [
        ("nothing", Box::new(|_| Stage::default()), Code::InvalidArgument),
        ("no volume id", Box::new(|r| Stage { volume_id: String::new(), ..r }), Code::InvalidArgument),
        (
            "a path as a volume id",
            Box::new(|r| Stage { volume_id: "../v1".into(), ..r }),
            Code::InvalidArgument,
        ),
        ("no path", Box::new(|r| Stage { staging_target_path: String::new(), ..r }), Code::InvalidArgument),
        (
            "a relative path",
            Box::new(|r| Stage { staging_target_path: "a/b".into(), ..r }),
            Code::InvalidArgument,
        ),
        (
            "a path upwards",
            Box::new(|r| Stage { staging_target_path: "/a/../b".into(), ..r }),
            Code::InvalidArgument,
        ),
        ("a missing volume", Box::new(|r| Stage { volume_id: MISSING.into(), ..r }), Code::NotFound),
        (
            "a missing volume and no path",
            Box::new(|_| Stage { volume_id: MISSING.into(), ..Stage::default() }),
            Code::InvalidArgument,
        ),
        (
            "a place that does not exist",
            Box::new(|r| Stage { staging_target_path: "/no/such/place".into(), ..r }),
            Code::FailedPrecondition,
        ),
    ];
    of_names.into_iter().chain(wrong_capabilities())
}

fn wrong_capabilities() -> [(&'static str, Change<Stage>, Code); 6] {
    [
        ("no capability", Box::new(|r| Stage { volume_capability: None, ..r }), Code::InvalidArgument),
        (
            "an empty capability",
            Box::new(|r| Stage { volume_capability: Some(v1::VolumeCapability::default()), ..r }),
            Code::InvalidArgument,
        ),
        (
            "no access mode",
            Box::new(|r| Stage {
                volume_capability: Some(v1::VolumeCapability { access_mode: None, ..file_system("ext4") }),
                ..r
            }),
            Code::InvalidArgument,
        ),
        (
            "an unknown access mode",
            Box::new(|r| Stage {
                volume_capability: Some(with_mode(file_system("ext4"), Mode::Unknown)),
                ..r
            }),
            Code::InvalidArgument,
        ),
        (
            "an unknown file system",
            Box::new(|r| Stage { volume_capability: Some(file_system("ntfs")), ..r }),
            Code::InvalidArgument,
        ),
        (
            "a group that is not announced",
            Box::new(|r| Stage {
                volume_capability: Some(capability(
                    AccessType::Mount(MountVolume {
                        volume_mount_group: "7".into(),
                        ..MountVolume::default()
                    }),
                    Mode::SingleNodeWriter,
                )),
                ..r
            }),
            Code::InvalidArgument,
        ),
    ]
}

#[tokio::test]
async fn invalid_staging_calls_are_refused() {
    let mut node = Node::new();
    node.volume("v1");
    let mut client = node.serve().await;
    let staging = node.staging("v1");
    let mut cases = Cases(Vec::new());
    let good = || stage("v1", &staging, file_system("ext4"));
    for (what, change, code) in wrong_stages() {
        cases.expect(what, client.stage(change(good())).await, code);
    }
    cases.expect("a good one", client.stage(good()).await, Code::Ok);
    cases.expect("the same", client.stage(good()).await, Code::Ok);
    let answer = client.stage(stage("v1", &staging, file_system("xfs"))).await;
    cases.expect("another file system", answer, Code::AlreadyExists);
    cases.expect("as a device", client.stage(stage("v1", &staging, block())).await, Code::AlreadyExists);
    let reader = with_mode(file_system("ext4"), Mode::SingleNodeReaderOnly);
    cases.expect("for reading", client.stage(stage("v1", &staging, reader)).await, Code::AlreadyExists);
    cases.done();
}

#[tokio::test]
async fn invalid_publish_calls_are_refused() {
    let mut node = Node::new();
    node.volume("v1");
    let mut client = node.serve().await;
    let (staging, target) = (node.staging("v1"), node.target("p1"));
    let mut cases = Cases(Vec::new());
    let good = || publish("v1", &staging, &target, file_system("ext4"));
    type Publish = v1::NodePublishVolumeRequest;
    let wrong: [(&str, Change<Publish>, Code); 9] = [
        ("nothing", Box::new(|_| Publish::default()), Code::InvalidArgument),
        ("no target", Box::new(|r| Publish { target_path: String::new(), ..r }), Code::InvalidArgument),
        (
            "only an id",
            Box::new(|_| Publish { volume_id: MISSING.into(), ..Publish::default() }),
            Code::InvalidArgument,
        ),
        (
            "no capability, of a missing volume",
            Box::new(|r| Publish { volume_id: MISSING.into(), volume_capability: None, ..r }),
            Code::InvalidArgument,
        ),
        ("the root as target", Box::new(|r| Publish { target_path: "/".into(), ..r }), Code::InvalidArgument),
        (
            "no staging path",
            Box::new(|r| Publish { staging_target_path: String::new(), ..r }),
            Code::FailedPrecondition,
        ),
        (
            "a wrong staging path",
            Box::new(|r| Publish { staging_target_path: "x".into(), ..r }),
            Code::InvalidArgument,
        ),
        ("a missing volume", Box::new(|r| Publish { volume_id: MISSING.into(), ..r }), Code::NotFound),
        (
            "a directory that does not exist",
            Box::new(|r| Publish { target_path: "/no/such/place".into(), ..r }),
            Code::FailedPrecondition,
        ),
    ];
    for (what, change, code) in wrong {
        cases.expect(what, client.publish(change(good())).await, code);
    }
    cases.expect("a good one", client.publish(good()).await, Code::Ok);
    cases.expect("the same", client.publish(good()).await, Code::Ok);
    cases.expect(
        "read-only",
        client.publish(Publish { readonly: true, ..good() }).await,
        Code::AlreadyExists,
    );
    let device = Publish { volume_capability: Some(block()), ..good() };
    cases.expect("as a device", client.publish(device).await, Code::AlreadyExists);
    let kind = Publish { volume_capability: Some(file_system("xfs")), ..good() };
    cases.expect("another file system", client.publish(kind).await, Code::AlreadyExists);
    cases.done();
}

#[tokio::test]
async fn unstaging_and_unpublishing_of_missing_paths() {
    let mut node = Node::new();
    node.volume("v1");
    let mut client = node.serve().await;
    let (staging, target) = (node.staging("v1"), node.target("p1"));
    let mut cases = Cases(Vec::new());
    let empty = std::path::Path::new("");
    for (what, volume, path, code) in [
        ("no volume id", "", target.as_path(), Code::InvalidArgument),
        ("no path", MISSING, empty, Code::InvalidArgument),
        ("nothing there", "v1", target.as_path(), Code::Ok),
        ("a missing volume", MISSING, target.as_path(), Code::Ok),
        ("a directory that does not exist", "v1", std::path::Path::new("/no/such/place"), Code::Ok),
    ] {
        cases.expect(&format!("unpublish, {what}"), client.unpublish(volume, path).await, code);
        cases.expect(&format!("unstage, {what}"), client.unstage(volume, path).await, code);
    }
    cases.expect("nothing staged", client.unstage("v1", &staging).await, Code::Ok);
    assert!(staging.is_dir(), "the caller has made the staging directory, and takes it away");
    cases.done();
}

#[tokio::test]
async fn stats_and_expansion_of_missing_volumes_and_paths() {
    let mut node = Node::new();
    node.volume("v1");
    let mut client = node.serve().await;
    let (staging, target) = (node.staging("v1"), node.target("p1"));
    client.publish(publish("v1", &staging, &target, file_system("ext4"))).await.unwrap();
    let mut cases = Cases(Vec::new());
    let other = node.target("p2");
    for (what, volume, path, code) in [
        ("no volume id", "", "some/path", Code::InvalidArgument),
        ("no path", "v1", "", Code::InvalidArgument),
        ("a missing volume at a relative path", MISSING, "some/path", Code::NotFound),
        ("a missing volume", MISSING, target.to_str().unwrap(), Code::NotFound),
        ("a relative path", "v1", "some/path", Code::NotFound),
        ("another path", "v1", other.to_str().unwrap(), Code::NotFound),
        ("another mount", "v1", "/proc", Code::NotFound),
        ("a directory inside", "v1", target.join("lost+found").to_str().unwrap(), Code::NotFound),
        ("where it is published", "v1", target.to_str().unwrap(), Code::Ok),
        ("where it is staged", "v1", staging.to_str().unwrap(), Code::Ok),
    ] {
        let path = std::path::Path::new(path);
        cases.expect(&format!("stats, {what}"), client.stats(volume, path).await.map(drop), code);
        cases.expect(&format!("expand, {what}"), client.expand(volume, path, 1).await.map(drop), code);
    }
    let range = |required_bytes, limit_bytes| Some(v1::CapacityRange { required_bytes, limit_bytes });
    let request = |capacity_range, volume_capability| v1::NodeExpandVolumeRequest {
        volume_id: "v1".into(),
        volume_path: target.display().to_string(),
        capacity_range,
        volume_capability,
        ..v1::NodeExpandVolumeRequest::default()
    };
    for (what, request, code) in [
        ("no range", request(None, None), Code::Ok),
        ("less than there is", request(range(1, 0), Some(file_system("ext4"))), Code::Ok),
        ("a negative size", request(range(-1, 0), None), Code::InvalidArgument),
        ("more than the limit", request(range(2, 1), None), Code::OutOfRange),
        ("as a device", request(None, Some(block())), Code::InvalidArgument),
    ] {
        let answer = outcome(client.node.node_expand_volume(request).await);
        cases.expect(&format!("expand, {what}"), answer, code);
    }
    cases.done();
}
