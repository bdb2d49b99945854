//! Tests the loss of a node with an attached volume.

use crate::support::cluster::{Cluster, LIMIT};
use crate::support::csi::{Caller, create, publish};
use shorthorn_testkit::waiting::wait_for_async;

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_is_taken_off_a_lost_node_once_its_replicas_refuse_the_engine_there() {
    let mut cluster = Cluster::start(&["a", "b", "c"]).await;
    cluster.ok(&["volume", "create", "v", "--size", "1GiB", "--replicas", "3"]).await;
    cluster.ok(&["volume", "attach", "v", "--node", "a"]).await;
    cluster.stop_agent(0);
    cluster.ok(&["volume", "detach", "v"]).await;
    assert_eq!(cluster.agents[0].engine_says("v").attach, Some(1), "the engine still runs there");
    cluster.ok(&["volume", "attach", "v", "--node", "b"]).await;
    let served = cluster.agents[1].engine_says("v");
    assert!(served.attach >= Some(3), "one number fences, and the next one serves: {:?}", served.attach);
    // The old one is deleted as soon as its node is back.
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
    let explains = |shown: &serde_json::Value| shown.to_string().contains("more replicas are needed");
    let shown = cluster.until("v", "the reason of its wait", explains).await;
    assert_eq!(shown["state"], "detaching", "{shown:#}");
    cluster.start_agent(1);
    cluster.until("v", "detached", |shown| shown["state"] == "detached").await;
    cluster.check();
}

/// Kubernetes deletes the attachment of the volume first, and then a pod on another node needs it.
#[tokio::test(flavor = "multi_thread")]
async fn a_volume_of_a_lost_node_is_published_on_another_node() {
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

    // The claim is deleted before the node is back: the deletion does not wait for that, and then everything
    // there is removed.
    csi.unpublish("pvc-1", "b").await.unwrap();
    csi.delete("pvc-1").await.unwrap();
    assert!(cluster.agents[1..].iter().all(|agent| agent.directories().is_empty()));
    cluster.start_agent(0);
    wait_for_async("the node is empty", LIMIT, async || {
        let agent = &cluster.agents[0];
        let left: Vec<_> = agent.running().into_iter().chain(agent.directories()).collect();
        if left.is_empty() { Ok(()) } else { Err(left) }
    })
    .await;
    cluster.check();
}

/// The node is given up: its replicas are recreated elsewhere, and no object of it is left.
#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_never_returns_is_deleted() {
    let mut cluster = Cluster::start(&["a", "b", "c", "d"]).await;
    cluster.ok(&["node", "cordon", "d"]).await;
    cluster.ok(&["volume", "create", "v", "--size", "1GiB", "--replicas", "3"]).await;
    cluster.ok(&["volume", "attach", "v", "--node", "a"]).await;
    let volume = cluster.until("v", "healthy", |shown| shown["robustness"] == "healthy").await;
    let lost =
        volume["replicas"].as_array().unwrap().iter().find(|replica| replica["nodeID"] == "c").unwrap();
    let lost = lost["replicaID"].as_str().unwrap().to_owned();
    cluster.ok(&["node", "uncordon", "d"]).await;

    let delete = ["node", "delete", "c", "--yes"];
    let (code, text) = cluster.fails(&delete).await;
    assert!(code == 1 && text.contains("node c answers"), "{text}");
    let (_, text) = cluster.fails(&["node", "delete", "c"]).await;
    assert!(text.contains("--yes"), "{text}");
    cluster.stop_agent(2);
    cluster.agents[0].fail_member("v", &lost);
    cluster.retry(&["node", "cordon", "c"]).await;
    cluster.retry(&delete).await;
    let has = |shown: &serde_json::Value, node: &str| {
        shown["replicas"].as_array().unwrap().iter().any(|replica| replica["nodeID"] == node)
    };
    cluster.until("v", "on d and not on c", |shown| has(shown, "d") && !has(shown, "c")).await;
    assert!(cluster.ok(&["node", "list"]).await.contains("given up"));
    until_nodes(&cluster, "shown with its flag", |nodes| nodes.contains("--node c=URL")).await;

    // No object names it any more: it is removed.
    cluster.stop_controller().await;
    cluster.agents.remove(2);
    cluster.start_controller().await;
    until_nodes(&cluster, "gone", |nodes| !nodes.contains("\"c\"")).await;
    cluster.check();
}

/// Waits until the list of nodes looks like that.
async fn until_nodes(cluster: &Cluster, what: &str, seen: impl Fn(&str) -> bool) {
    wait_for_async(what, LIMIT, async || {
        let nodes = cluster.ok(&["node", "list", "-o", "json"]).await;
        if seen(&nodes) { Ok(()) } else { Err(nodes) }
    })
    .await;
}
