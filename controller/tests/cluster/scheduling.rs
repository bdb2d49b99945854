//! Tests the places of replicas and drains, through the controller process and shorthornctl.

use std::sync::Arc;

use crate::support::agent::FakeAgent;
use crate::support::cluster::{Cluster, LIMIT};
use serde_json::Value;
use shorthorn_api::v1;
use shorthorn_api::v1::controller_client::ControllerClient;
use shorthorn_testkit::metrics::{get, samples, value};
use shorthorn_testkit::waiting::wait_for_async;
use tonic::transport::Endpoint;

fn nodes_of(volume: &Value) -> Vec<String> {
    let replicas = volume["replicas"].as_array().unwrap().iter();
    let mut nodes: Vec<String> =
        replicas.map(|replica| replica["nodeID"].as_str().unwrap().to_owned()).collect();
    nodes.sort();
    nodes
}

fn id_on<'a>(volume: &'a Value, node: &str) -> &'a str {
    let mut replicas = volume["replicas"].as_array().unwrap().iter();
    replicas.find(|replica| replica["nodeID"] == node).unwrap()["replicaID"].as_str().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn tags_zones_and_cordons_restrict_the_places_of_replicas() {
    let cluster = Cluster::start(&["a", "b", "c"]).await;
    cluster.ok(&["node", "set", "a", "--zone", "x"]).await;
    cluster.ok(&["node", "set", "b", "--zone", "x", "--tags", "fast,new"]).await;
    cluster.ok(&["node", "set", "c", "--zone", "y", "--tags", "fast"]).await;
    let create = ["volume", "create", "--size", "1GiB"];
    let with = |words: &[&'static str]| [&create[..], words].concat();
    cluster.ok(&with(&["v", "--replicas", "1", "--node-selector", "fast,new"])).await;
    assert_eq!(nodes_of(&cluster.inspect("v").await), ["b"]);
    cluster.ok(&with(&["w", "--replicas", "2", "--hard-zone-anti-affinity"])).await;
    let volume = cluster.inspect("w").await;
    assert_eq!(nodes_of(&volume)[1], "c", "{volume:#}");
    assert_eq!(volume["replicaZoneSoftAntiAffinity"], false);

    cluster.ok(&["node", "cordon", "b"]).await;
    assert!(cluster.ok(&["node", "list"]).await.contains("cordoned"));
    let (code, text) = cluster.fails(&with(&["u", "--replicas", "1", "--node-selector", "new"])).await;
    assert!(code == 1 && text.contains("3 nodes: 2 lack tag new, 1 is cordoned"), "{text}");
    cluster.ok(&["node", "uncordon", "b"]).await;
    cluster.until("u", "placed", |volume| nodes_of(volume) == ["b"]).await;
    let (code, text) = cluster.fails(&["node", "set", "b", "--tags", "a b"]).await;
    assert!(code == 1 && text.contains("is not a tag or zone"), "{text}");
}

/// More volumes wait than a search adds to the queue in one step.
const WAITING: u32 = 150;

/// Returns the sum of the series with that begin.
fn sum(cluster: &Cluster, begin: &str) -> f64 {
    let shown = samples(&get(cluster.metrics, "/metrics").unwrap().1);
    shown.iter().filter(|(name, _)| name.starts_with(begin)).map(|(_, value)| value).sum()
}

async fn until_sum(cluster: &Cluster, begin: &str, wanted: f64) {
    let enough = async || {
        let now = sum(cluster, begin);
        if now < wanted { Err(now) } else { Ok(()) }
    };
    wait_for_async(&format!("{begin} is {wanted}"), LIMIT, enough).await;
}

/// Waits until no object waits for a run.
async fn until_idle(cluster: &Cluster) {
    let depth = |state: &str| sum(cluster, &format!("shorthorn_controller_queue_depth{{state=\"{state}\""));
    let idle = async || {
        let queued = ["ready", "active"].map(depth);
        if queued == [0.0, 0.0] { Ok(()) } else { Err(queued) }
    };
    wait_for_async("the queue is empty", LIMIT, idle).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn volumes_that_wait_for_a_place_cost_no_work_until_one_may_exist() {
    let cluster = Cluster::start(&["a", "b"]).await;
    for node in ["a", "b"] {
        cluster.ok(&["node", "cordon", node]).await;
    }
    let socket = format!("unix://{}", cluster.path("controller.sock").display());
    let mut api = ControllerClient::new(Endpoint::from_shared(socket).unwrap().connect_lazy());
    for at in 0..WAITING {
        let (name, size_bytes, number_of_replicas) = (format!("v{at}"), 64 << 20, 1);
        let request = v1::CreateVolumeRequest { name, size_bytes, number_of_replicas, ..Default::default() };
        api.create_volume(request).await.unwrap();
    }
    let refused = "shorthorn_controller_reconciles_total{kind=\"volume\"";
    until_sum(&cluster, refused, f64::from(WAITING)).await;
    let last = format!("v{}", WAITING - 1);
    cluster.until(&last, "refused", |volume| volume.to_string().contains("cordoned")).await;
    until_idle(&cluster).await;
    let before = sum(&cluster, refused);
    for zone in ["x", "y", "z"] {
        cluster.ok(&["node", "set", "b", "--zone", zone]).await;
    }
    until_idle(&cluster).await;
    let runs = sum(&cluster, refused) - before;
    assert!(runs < f64::from(WAITING), "three changes of a cordoned node have run {runs} reconcilers");
    cluster.ok(&["node", "uncordon", "a"]).await;
    until_sum(&cluster, "shorthorn_volumes{state=\"detached\"", f64::from(WAITING)).await;
    assert_eq!(nodes_of(&cluster.inspect("v7").await), ["a"]);
    let shown = samples(&get(cluster.metrics, "/metrics").unwrap().1);
    assert_eq!(value(&shown, "shorthorn_replicas{state=\"stopped\"}"), Some(f64::from(WAITING)));
    cluster.check();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_is_added_gets_replicas() {
    let cluster = Cluster::start(&["a"]).await;
    let added = FakeAgent::new("b", Arc::clone(&cluster.truth));
    let serving = added.serve(&cluster.path("b"));
    let address = format!("unix://{}", cluster.path("b").display());
    let (code, text) = cluster.fails(&["node", "add", "b", "--address", "ftp://b:1"]).await;
    assert!(code == 2 && text.contains("is not an address"), "{text}");
    cluster.ok(&["node", "add", "b", "--address", &address]).await;
    cluster.retry(&["disk", "add", "b", "/var/lib/longhorn"]).await;
    cluster.ok(&["volume", "create", "v", "--size", "1GiB", "--replicas", "2"]).await;
    cluster.until("v", "placed", |volume| nodes_of(volume) == ["a", "b"]).await;
    serving.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drained_node_is_left_only_once_another_has_everything() {
    let cluster = Cluster::start(&["a", "b", "c"]).await;
    cluster.ok(&["node", "cordon", "c"]).await;
    cluster.ok(&["volume", "create", "v", "--size", "1GiB", "--replicas", "2"]).await;
    cluster.ok(&["volume", "attach", "v", "--node", "a"]).await;
    let volume = cluster.until("v", "healthy", |volume| volume["robustness"] == "healthy").await;
    let old = id_on(&volume, "b").to_owned();
    let name = format!("v-{old}");

    let text = cluster.ok(&["node", "drain", "b", "--no-wait"]).await;
    assert!(text.contains("1 left on node b") && text.contains(&name), "{text}");
    let (code, text) = cluster.fails(&["node", "drain", "b"]).await;
    assert!(code == 1 && text.contains("(held): no other disk can take it"), "{text}");
    let why = cluster.ok(&["volume", "why", "v"]).await;
    assert!(
        why.contains(&format!("Replica {name} has to leave node b, which is drained, and cannot yet")),
        "{why}"
    );

    cluster.ok(&["node", "uncordon", "c"]).await;
    let volume = cluster.until("v", "three replicas", |volume| nodes_of(volume) == ["a", "b", "c"]).await;
    let new = id_on(&volume, "c").to_owned();
    cluster.until("v", "rebuilding", |volume| volume.to_string().contains("rebuilding")).await;
    let text = cluster.ok(&["node", "drain", "b", "--no-wait"]).await;
    assert!(text.contains(&format!("replica v-{new} on node c is being rebuilt in its place")), "{text}");
    assert!(cluster.agents[1].running().iter().any(|running| running.contains(&name)));
    cluster.agents[0].end_rebuild("v", &new);
    // It is stopped now; the engine finds that it does not answer any more.
    let stopped = |volume: &Value| {
        let mut replicas = volume["replicas"].as_array().unwrap().iter();
        replicas.any(|replica| replica["replicaID"] == *old && replica["currentState"] == "stopped")
    };
    cluster.until("v", "stopped", stopped).await;
    assert!(cluster.agents[1].directories().contains(&name));
    cluster.agents[0].fail_member("v", &old);
    assert!(cluster.ok(&["node", "drain", "b"]).await.contains("nothing is left"));
    let volume = cluster.inspect("v").await;
    assert_eq!(nodes_of(&volume), ["a", "c"]);
    assert_eq!(volume["robustness"], "healthy");
    assert!(cluster.agents[1].directories().is_empty());

    // A user has to move the engine from its node; replicas of a detached volume do not move.
    let (code, text) = cluster.fails(&["node", "drain", "a"]).await;
    assert!(code == 1 && text.contains("engine of volume v (held): volume v is attached here"), "{text}");
    cluster.ok(&["node", "uncordon", "a"]).await;
    cluster.ok(&["volume", "detach", "v"]).await;
    let (code, text) = cluster.fails(&["node", "drain", "c"]).await;
    assert!(code == 1 && text.contains("volume v is detached") && text.contains("volume attach v"), "{text}");
    cluster.check();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_can_be_restarted_if_its_volumes_can_do_without_it() {
    let cluster = Cluster::start(&["a", "b", "c"]).await;
    cluster.ok(&["node", "cordon", "c"]).await;
    cluster.ok(&["volume", "create", "v", "--size", "1GiB", "--replicas", "2"]).await;
    assert!(cluster.ok(&["node", "can-reboot", "a"]).await.contains("node a can be restarted"));
    cluster.ok(&["volume", "attach", "v", "--node", "c"]).await;
    let volume = cluster.until("v", "healthy", |volume| volume["robustness"] == "healthy").await;
    cluster.ok(&["node", "can-reboot", "b", "--wait"]).await;
    let (code, text) = cluster.fails(&["node", "can-reboot", "c"]).await;
    assert!(code == 1 && text.contains("volume v: attached there"), "{text}");
    cluster.ok(&["node", "can-reboot", "c", "--before-drain"]).await;

    let lost = id_on(&volume, "a").to_owned();
    cluster.agents[2].fail_member("v", &lost);
    cluster.until("v", "degraded", |volume| volume["robustness"] == "degraded").await;
    cluster.ok(&["node", "can-reboot", "a"]).await;
    let (code, text) = cluster.fails(&["node", "can-reboot", "b"]).await;
    assert!(code == 1 && text.contains("in use, and no other replica has all of its data"), "{text}");
    let wait = ["node", "can-reboot", "b", "--wait", "--timeout", "0.1"];
    assert_eq!(cluster.fails(&wait).await.0, 4);
    let output = cluster.run(&["-o", "json", "node", "can-reboot", "b"]).await;
    let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(answer["canReboot"] == false && answer["holds"][0]["volume"] == "v", "{answer:#}");
    let (code, text) = cluster.fails(&["node", "can-reboot", "nowhere"]).await;
    assert!(code == 3, "{text}");
    cluster.agents[2].end_rebuild("v", &lost);
    cluster.ok(&["node", "can-reboot", "b", "--wait"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drained_disk_is_replaced_by_another_disk_of_its_node() {
    let cluster = Cluster::start(&["a", "b"]).await;
    cluster.ok(&["volume", "create", "v", "--size", "1GiB", "--replicas", "2"]).await;
    cluster.ok(&["volume", "attach", "v", "--node", "a"]).await;
    let volume = cluster.until("v", "healthy", |volume| volume["robustness"] == "healthy").await;
    let old = id_on(&volume, "b").to_owned();
    let (code, text) = cluster.fails(&["disk", "drain", "b", "/nowhere"]).await;
    assert!(code == 3 && text.contains("node b has no disk /nowhere"), "{text}");
    let drain = ["disk", "drain", "b", "/var/lib/longhorn"];
    let (code, text) = cluster.fails(&drain).await;
    assert!(code == 1 && text.contains("(held): no other disk can take it"), "{text}");
    assert!(text.contains("shorthornctl disk uncordon b /var/lib/longhorn cancels it"), "{text}");
    let why = cluster.ok(&["volume", "why", "v"]).await;
    assert!(
        why.contains("has to leave disk /var/lib/longhorn of node b, which is drained, and cannot yet"),
        "{why}"
    );
    assert!(cluster.ok(&["node", "list"]).await.contains("drained disk"));

    cluster.ok(&["disk", "add", "b", "/mnt/new"]).await;
    let on_new = |volume: &Value| volume.to_string().contains("/mnt/new");
    let volume = cluster.until("v", "on the new disk", on_new).await;
    let mut replicas = volume["replicas"].as_array().unwrap().iter();
    let new = replicas.find(|replica| replica["diskPath"] == "/mnt/new").unwrap();
    assert_eq!(new["nodeID"], "b");
    let new = new["replicaID"].as_str().unwrap().to_owned();
    cluster.until("v", "rebuilding", |volume| volume.to_string().contains("rebuilding")).await;
    cluster.agents[0].end_rebuild("v", &new);
    let stopped = |volume: &Value| {
        let mut replicas = volume["replicas"].as_array().unwrap().iter();
        replicas.any(|replica| replica["replicaID"] == *old && replica["currentState"] == "stopped")
    };
    cluster.until("v", "stopped", stopped).await;
    cluster.agents[0].fail_member("v", &old);
    let text = cluster.ok(&drain).await;
    assert!(text.contains("disk /var/lib/longhorn of node b is drained: nothing is left on it"), "{text}");
    assert_eq!(cluster.inspect("v").await["robustness"], "healthy");
    cluster.ok(&["disk", "uncordon", "b", "/var/lib/longhorn"]).await;
    assert!(!cluster.ok(&["node", "list"]).await.contains("drained"));
    cluster.check();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rebalance_moves_a_few_replicas_at_a_time() {
    let cluster = Cluster::start(&["a", "b", "c"]).await;
    cluster.ok(&["node", "cordon", "c"]).await;
    for volume in ["v", "w"] {
        cluster.ok(&["volume", "create", volume, "--size", "1GiB", "--replicas", "2"]).await;
        cluster.ok(&["volume", "attach", volume, "--node", "a"]).await;
        cluster.until(volume, "healthy", |volume| volume["robustness"] == "healthy").await;
    }
    cluster.ok(&["volume", "create", "idle", "--size", "1GiB", "--replicas", "2"]).await;
    cluster.ok(&["node", "uncordon", "c"]).await;

    let text = cluster.ok(&["rebalance", "--dry-run"]).await;
    assert!(text.contains("0 replicas are being moved, 2 more would be better elsewhere"), "{text}");
    assert!(text.contains("Not checked: 1 volumes, not attached"), "{text}");
    let (code, text) = cluster.fails(&["rebalance", "nowhere"]).await;
    assert!(code == 3 && text.contains("no volume nowhere"), "{text}");
    assert_eq!(cluster.fails(&["rebalance", "--max-moves", "0"]).await.0, 2);

    let begin = ["--output", "json", "rebalance", "--no-wait", "--max-moves", "1"];
    let answer: Value = serde_json::from_str(&cluster.ok(&begin).await).unwrap();
    assert_eq!((&answer["begun"], &answer["moves"][1]["begun"]), (&1.into(), &false.into()), "{answer:#}");
    let moving = answer["moves"][0]["volume"].as_str().unwrap().to_owned();
    let three = |volume: &Value| nodes_of(volume) == ["a", "b", "c"];
    cluster.until(&moving, "three replicas", three).await;
    let why = cluster.ok(&["volume", "why", &moving]).await;
    assert!(why.contains("has to leave node") && why.contains("for a better place"), "{why}");
    let answer: Value = serde_json::from_str(&cluster.ok(&begin).await).unwrap();
    assert_eq!(answer["begun"], 0, "one is on its way: {answer:#}");

    // A replica without a replacement yet stays in its place.
    cluster.ok(&["rebalance", "--cancel"]).await;
    cluster.until(&moving, "two replicas", |volume| nodes_of(volume) == ["a", "b"]).await;
    cluster.check();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_is_cordoned_and_shows_so() {
    let cluster = Cluster::start(&["a"]).await;
    let nodes: serde_json::Value =
        serde_json::from_str(&cluster.ok(&["disk", "list", "-o", "json"]).await).unwrap();
    let path = nodes[0]["disks"][0]["path"].as_str().unwrap().to_owned();
    let uuid = nodes[0]["disks"][0]["diskUUID"].as_str().unwrap();
    let shown = cluster.ok(&["disk", "list"]).await;
    assert!(shown.contains(&path) && shown.contains(uuid) && shown.contains("yes"), "{shown}");
    cluster.ok(&["disk", "cordon", "a", &path]).await;
    assert!(!cluster.ok(&["disk", "list"]).await.contains("yes"));
    cluster.ok(&["disk", "uncordon", "a", &path]).await;
    assert!(cluster.ok(&["disk", "list"]).await.contains("yes"));
    let (code, text) = cluster.fails(&["disk", "cordon", "a", "/elsewhere"]).await;
    assert!(code == 3 && text.contains("has no disk /elsewhere"), "{text}");
}
