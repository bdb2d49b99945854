//! A node goes away with the volume attached to it.
#![allow(clippy::unwrap_used, reason = "a test ends where something it relies on is not so")]

mod support;

use support::cluster::Cluster;
use support::csi::{Caller, create, publish};

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_is_taken_off_a_lost_node_once_its_replicas_refuse_the_engine_there() {
    let mut cluster = Cluster::start(&["a", "b", "c"]).await;
    cluster.ok(&["volume", "create", "v", "--size", "1GiB", "--replicas", "3"]).await;
    cluster.ok(&["volume", "attach", "v", "--node", "a"]).await;
    cluster.stop_agent(0);
    cluster.ok(&["volume", "detach", "v"]).await;
    assert_eq!(cluster.agents[0].engine_says("v").attach, 1, "the engine still runs there");
    cluster.ok(&["volume", "attach", "v", "--node", "b"]).await;
    let served = cluster.agents[1].engine_says("v");
    assert!(served.attach >= 3, "one number fences, and the next one serves: {}", served.attach);
    // The old one goes as soon as its node is back.
    cluster.start_agent(0);
    cluster
        .until("v", "without its old engine", |_| !cluster.agents[0].running().contains(&"v".to_owned()))
        .await;
    cluster.check();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_whose_data_is_on_the_lost_node_only_waits_for_it() {
    let mut cluster = Cluster::start(&["a", "b", "c"]).await;
    cluster.ok(&["volume", "create", "v", "--size", "1GiB", "--replicas", "3"]).await;
    cluster.ok(&["volume", "attach", "v", "--node", "a"]).await;
    (0..2).for_each(|node| cluster.stop_agent(node));
    cluster.ok(&["volume", "detach", "v", "--no-wait"]).await;
    let told = |shown: &serde_json::Value| shown.to_string().contains("more replicas are needed");
    let shown = cluster.until("v", "told what it waits for", told).await;
    assert_eq!(shown["state"], "detaching", "{shown:#}");
    cluster.start_agent(1);
    cluster.until("v", "detached", |shown| shown["state"] == "detached").await;
    cluster.check();
}

/// As Kubernetes does it: the volume's attachment is deleted, then a pod on another node wants it.
#[tokio::test(flavor = "multi_thread")]
async fn a_pod_comes_back_on_another_node() {
    let mut cluster = Cluster::start(&["a", "b", "c"]).await;
    let mut csi = Caller::new(&cluster.path("csi.sock"));
    csi.create(create("pvc-1")).await.unwrap();
    csi.publish(publish("pvc-1", "a")).await.unwrap();
    cluster.stop_agent(0);
    csi.unpublish("pvc-1", "a").await.unwrap();
    assert!(csi.published("pvc-1").await.is_empty());
    csi.publish(publish("pvc-1", "b")).await.unwrap();
    assert_eq!(csi.published("pvc-1").await, ["b"]);
    assert!(cluster.agents[0].running().contains(&"pvc-1".to_owned()), "the engine still runs there");
    cluster.check();
}
