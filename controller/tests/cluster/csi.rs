//! The Controller service of CSI on the real controller, over agents in memory; and over a store alone,
//! if the tests play the reconcilers.

mod creation;
mod kills;
mod lists;
mod store_alone;

use std::collections::{BTreeSet, HashMap};
use std::time::Duration;

use crate::support::cluster::Cluster;
use crate::support::csi::*;
use shorthorn_api::csi::v1;
use shorthorn_api::csi::v1::identity_server::Identity as _;
use shorthorn_api::csi::v1::volume_capability::access_mode::Mode;
use shorthorn_api::csi::v1::volume_capability::{AccessType, BlockVolume};
use shorthorn_csi::{DRIVER_NAME, IdentityService};
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
    let node = IdentityService::new(DRIVER_NAME, env!("CARGO_PKG_VERSION"));
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
async fn capabilities_are_announced_and_other_calls_are_unimplemented() {
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
async fn invalid_publish_and_delete_calls_are_refused() {
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
async fn a_call_over_its_deadline_names_the_obstacle_and_can_be_repeated() {
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
