//! The real controller and the real shorthornctl over agents in memory.

use crate::support::cluster::Cluster;

fn condition<'a>(volume: &'a serde_json::Value, kind: &str) -> &'a serde_json::Value {
    let conditions = volume["conditions"].as_array().unwrap();
    conditions.iter().find(|condition| condition["type"] == kind).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_from_creation_to_deletion() {
    let mut cluster = Cluster::start(&["a", "b", "c"]).await;
    let said = cluster.ok(&["volume", "create", "data", "--size", "10GiB"]).await;
    assert!(said.contains("volume data is detached"), "{said}");
    let said = cluster.ok(&["volume", "attach", "data", "--node", "b"]).await;
    assert_eq!(said, "volume data is attached on b: /dev/longhorn/data\n");

    let list = cluster.ok(&["volume", "list"]).await;
    for word in ["data", "10 GiB", "3/3", "attached", "healthy", "/dev/longhorn/data"] {
        assert!(list.contains(word), "{word} in\n{list}");
    }
    let volume = cluster.inspect("data").await;
    assert_eq!(volume["nodeID"], "b");
    assert_eq!(volume["currentNodeID"], "b");
    assert_eq!(volume["attach"], 1);
    assert_eq!(volume["size"], 10u64 << 30);
    assert_eq!(volume["replicas"].as_array().unwrap().len(), 3);
    assert!(!volume.to_string().contains("secret"));
    let yaml = cluster.ok(&["volume", "inspect", "data", "--output", "yaml"]).await;
    assert!(yaml.contains("\nstate: attached\n") && yaml.contains("numberOfReplicas: 3"), "{yaml}");
    let people = cluster.ok(&["volume", "inspect", "data"]).await;
    assert!(people.contains("member"), "{people}");

    let replicas = cluster.ok(&["replica", "list", "--volume", "data", "-o", "json"]).await;
    let replicas: serde_json::Value = serde_json::from_str(&replicas).unwrap();
    let mut nodes: Vec<_> =
        replicas.as_array().unwrap().iter().map(|r| r["nodeID"].as_str().unwrap()).collect();
    nodes.sort_unstable();
    assert_eq!(nodes, ["a", "b", "c"]);
    let nodes = cluster.ok(&["node", "list"]).await;
    assert!(nodes.contains("100 GiB") && nodes.contains("ublk"), "{nodes}");

    assert_eq!(cluster.ok(&["volume", "detach", "data"]).await, "volume data is detached\n");
    assert!(cluster.agents.iter().all(|agent| agent.running().is_empty()));
    cluster.ok(&["volume", "attach", "data", "--node", "c"]).await;
    assert_eq!(cluster.inspect("data").await["attach"], 2);
    // An attached volume is detached first.
    assert_eq!(cluster.ok(&["volume", "delete", "data", "--yes"]).await, "volume data is deleted\n");
    assert!(cluster.agents.iter().all(|agent| agent.running().is_empty() && agent.directories().is_empty()));
    assert_eq!(cluster.fails(&["volume", "inspect", "data"]).await.0, 3);
    cluster.stop_controller().await;
    cluster.check();
}

#[tokio::test(flavor = "multi_thread")]
async fn errors_name_the_remedy() {
    let mut cluster = Cluster::start(&["a"]).await;
    let cases: &[(&[&str], i32, &str)] = &[
        (&["volume", "create", "My", "--size", "1GiB"], 1, "lower-case"),
        (&["volume", "create", "v", "--size", "1000"], 1, "multiple of 4096"),
        (&["volume", "create", "v", "--size", "1GB"], 2, "like 10GiB"),
        (&["volume", "create", "v", "--size", "1GiB", "--replicas", "9"], 1, "1 to 8"),
        (&["volume", "create", "v", "--size", "1GiB", "--frontend", "nvme"], 1, "ublk, nbd, iscsi or socket"),
        (&["volume", "create", "v", "--size", "1GiB"], 1, "replicaSoftAntiAffinity"),
        (&["volume", "create", "v", "--size", "2GiB"], 1, "another size"),
        (&["volume", "create", "big", "--size", "1TiB", "--replicas", "1"], 1, "90.0 GiB more"),
        (&["volume", "attach", "w", "--node", "a"], 3, "no volume w"),
        (&["volume", "attach", "v", "--node", "z"], 3, "no node z"),
        (&["volume", "detach", "w"], 3, "volume list"),
        (&["volume", "delete", "v"], 1, "--yes"),
        (&["replica", "list", "--volume", "w"], 3, "no volume w"),
        (&["disk", "add", "z", "/d"], 3, "no node z"),
        (&["disk", "add", "a", "d"], 1, "absolute path"),
        (&["disk", "add", "a", "/tmpfs"], 1, "use a disk"),
    ];
    for (words, code, hint) in cases {
        let (found, text) = cluster.fails(words).await;
        assert!(found == *code && text.contains(hint), "{words:?}: {found}, {text}");
    }
    cluster.ok(&["volume", "delete", "v", "--yes"]).await;
    cluster.ok(&["volume", "create", "v", "--size", "1GiB", "--soft-anti-affinity"]).await;
    // The same again is not an error.
    cluster.ok(&["volume", "create", "v", "--size", "1GiB", "--soft-anti-affinity"]).await;
    cluster.kill_controller().await;
    let (code, text) = cluster.fails(&["volume", "list"]).await;
    assert!(code == 5 && text.contains("check that shorthorn-controller runs"), "{code}, {text}");
    cluster.check();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_controller_is_refused_the_store() {
    let cluster = Cluster::start(&[]).await;
    let output = cluster.controller_command().output().await.unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && text.contains("in use by another controller"), "{text}");
    cluster.check();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replica_that_leaves_the_view_degrades_the_volume() {
    let cluster = Cluster::start(&["a", "b"]).await;
    cluster.ok(&["volume", "create", "v", "--size", "1GiB", "--replicas", "2"]).await;
    cluster.ok(&["volume", "attach", "v", "--node", "a"]).await;
    let volume = cluster.inspect("v").await;
    assert_eq!(volume["robustness"], "healthy");
    let lost =
        volume["replicas"].as_array().unwrap().iter().find(|replica| replica["nodeID"] == "b").unwrap();
    cluster.agents[0].fail_member("v", lost["replicaID"].as_str().unwrap());
    let volume = cluster.until("v", "degraded", |volume| volume["robustness"] == "degraded").await;
    let healthy = condition(&volume, "Healthy");
    assert_eq!(healthy["reason"], "ReplicaFailed");
    let message = healthy["message"].as_str().unwrap();
    assert!(message.contains("on b left the view (connection reset)"), "{message}");
    assert_eq!(volume["state"], "attached");
    cluster.check();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_device_in_use_is_not_removed() {
    let cluster = Cluster::start(&["a"]).await;
    cluster.ok(&["volume", "create", "v", "--size", "1GiB", "--replicas", "1"]).await;
    cluster.ok(&["volume", "attach", "v", "--node", "a"]).await;
    cluster.agents[0].set_in_use(Some("mount at /mnt"));
    let (code, text) = cluster.fails(&["volume", "detach", "v", "--timeout", "1"]).await;
    assert!(code == 4 && text.contains("in use by mount at /mnt"), "{code}, {text}");
    assert!(cluster.agents[0].running().contains(&"v".to_owned()));
    // A volume that is wanted there again continues under the same number.
    cluster.ok(&["volume", "attach", "v", "--node", "a"]).await;
    assert_eq!(cluster.inspect("v").await["attach"], 1);
    cluster.fails(&["volume", "detach", "v", "--timeout", "1"]).await;
    cluster.agents[0].set_in_use(None);
    cluster.ok(&["volume", "detach", "v"]).await;
    cluster.check();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_restarts_gets_its_volume_back() {
    let cluster = Cluster::start(&["a"]).await;
    cluster.ok(&["volume", "create", "v", "--size", "1GiB", "--replicas", "1"]).await;
    cluster.ok(&["volume", "attach", "v", "--node", "a"]).await;
    cluster.agents[0].reboot();
    // Attached again, and with a higher number: the first engine is fenced.
    let back = |volume: &serde_json::Value| volume["state"] == "attached" && volume["attach"] == 2;
    cluster.until("v", "attached again", back).await;
    cluster.check();
}

#[tokio::test(flavor = "multi_thread")]
async fn lost_data_is_an_error_and_is_never_recreated() {
    let cluster = Cluster::start(&["a", "b", "c"]).await;
    cluster.ok(&["volume", "create", "v", "--size", "1GiB", "--replicas", "3"]).await;
    cluster.ok(&["volume", "attach", "v", "--node", "a"]).await;
    cluster.ok(&["volume", "detach", "v"]).await;
    for agent in &cluster.agents[1..] {
        let name = agent.directories().pop_first().unwrap();
        agent.lose_directory(&name);
    }
    cluster.ok(&["volume", "attach", "v", "--node", "a", "--no-wait"]).await;
    let shown = |volume: &serde_json::Value| volume["robustness"] == "faulted";
    let volume = cluster.until("v", "faulted", shown).await;
    let message = condition(&volume, "Healthy")["message"].as_str().unwrap();
    assert!(message.contains("1 of 3 replicas run and 2 are needed"), "{message}");
    assert!(message.contains("is missing"), "{message}");
    assert!(cluster.agents[1..].iter().all(|agent| agent.directories().is_empty()));
    cluster.ok(&["volume", "detach", "v"]).await;
    cluster.check();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_attached_volume_grows_and_so_does_a_detached_one() {
    let cluster = Cluster::start(&["a", "b"]).await;
    cluster.ok(&["volume", "create", "v", "--size", "1GiB", "--replicas", "2"]).await;
    // Not attached: it is attached with the new size.
    assert_eq!(cluster.ok(&["volume", "expand", "v", "2GiB", "--wait"]).await, "volume v has 2 GiB\n");
    cluster.ok(&["volume", "attach", "v", "--node", "a"]).await;
    let engine_has = |size: u64| {
        let shown = cluster.agents[0].engine_size("v");
        assert_eq!(shown, size);
    };
    engine_has(2 << 30);
    assert_eq!(cluster.ok(&["volume", "expand", "v", "4GiB", "--wait"]).await, "volume v has 4 GiB\n");
    engine_has(4 << 30);
    let volume = cluster.inspect("v").await;
    assert_eq!((&volume["size"], &volume["currentSize"]), (&(4u64 << 30).into(), &(4u64 << 30).into()));
    let nodes = cluster.ok(&["node", "list"]).await;
    assert!(nodes.contains("4 GiB"), "scheduled on the disks: {nodes}");

    // A device that cannot follow while it is in use.
    cluster.agents[0].keep_device_size("the driver is too old");
    let (code, text) = cluster.fails(&["volume", "expand", "v", "6GiB", "--wait"]).await;
    assert!(
        code == 1 && text.contains("attached again") && text.contains("the driver is too old"),
        "{code}, {text}"
    );
    let list = cluster.ok(&["volume", "list"]).await;
    assert!(list.contains("4 GiB, to be 6 GiB"), "{list}");
    let why = cluster.ok(&["volume", "why", "v"]).await;
    assert!(why.contains("is being expanded from 4 GiB to 6 GiB") && why.contains("detach v"), "{why}");
    cluster.ok(&["volume", "detach", "v"]).await;
    cluster.until("v", "expanded", |volume| volume["currentSize"] == 6u64 << 30).await;
    cluster.ok(&["volume", "attach", "v", "--node", "a"]).await;
    engine_has(6 << 30);

    for (size, hint) in [("5GiB", "only grows"), ("1000", "multiple of 4096"), ("1TiB", "can schedule")] {
        let (code, text) = cluster.fails(&["volume", "expand", "v", size]).await;
        assert!(code == 1 && text.contains(hint), "{size}: {code}, {text}");
    }
    assert_eq!(cluster.fails(&["volume", "expand", "w", "5GiB"]).await.0, 3);
    cluster.check();
}
