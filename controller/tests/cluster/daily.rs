//! Tests the daily use of shorthornctl: lists, problems, places of replicas. The real programs run over
//! agents in memory.

use crate::support::cluster::{Cluster, LIMIT};
use serde_json::Value;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::time::timeout;

async fn json(cluster: &Cluster, words: &[&str]) -> Value {
    serde_json::from_str(&cluster.ok(words).await).unwrap()
}

fn names(list: &Value) -> Vec<&str> {
    list.as_array().unwrap().iter().map(|one| one["name"].as_str().unwrap()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn lists_are_sorted_and_come_in_pages_and_as_names() {
    let cluster = Cluster::start(&["a", "b"]).await;
    for (name, size) in [("v1", "3GiB"), ("v2", "1GiB"), ("v3", "2GiB")] {
        cluster.ok(&["volume", "create", name, "--size", size, "--replicas", "1"]).await;
    }
    let by_size = json(&cluster, &["volume", "list", "-o", "json", "--sort-by", "size"]).await;
    assert_eq!(names(&by_size), ["v2", "v3", "v1"]);
    let (code, text) = cluster.fails(&["volume", "list", "--sort-by", "colour"]).await;
    assert!(code == 1 && text.contains("colour") && text.contains("robustness"), "{code}, {text}");
    assert_eq!(cluster.ok(&["volume", "list", "-o", "name"]).await, "volume/v1\nvolume/v2\nvolume/v3\n");
    assert_eq!(cluster.ok(&["node", "list", "-o", "name"]).await, "node/a\nnode/b\n");
    assert_eq!(
        cluster.ok(&["disk", "list", "-o", "name"]).await,
        "disk/a:/var/lib/longhorn\ndisk/b:/var/lib/longhorn\n"
    );
    let wide = cluster.ok(&["volume", "list", "-o", "wide"]).await;
    assert!(wide.contains("WORKLOAD") && wide.contains("REASON"), "{wide}");
    assert_eq!(cluster.ok(&["volume", "list", "--namespace", "shop", "-o", "name"]).await, "");

    let first = cluster.run(&["volume", "list", "-o", "name", "--limit", "2"]).await;
    assert_eq!(String::from_utf8_lossy(&first.stdout), "volume/v1\nvolume/v2\n");
    let note = String::from_utf8(first.stderr).unwrap();
    let token = note.trim().rsplit_once("--continue ").unwrap().1;
    let rest = cluster.ok(&["volume", "list", "-o", "name", "--limit", "2", "--continue", token]).await;
    assert_eq!(rest, "volume/v3\n");
    let on_a = json(&cluster, &["replica", "list", "--node", "a", "-o", "json"]).await;
    assert!(on_a.as_array().unwrap().iter().all(|replica| replica["nodeID"] == "a"), "{on_a}");
    assert_eq!(cluster.fails(&["replica", "list", "--node", "z"]).await.0, 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_watched_list_shows_changed_entries() {
    let cluster = Cluster::start(&["a"]).await;
    cluster.ok(&["volume", "create", "v", "--size", "1GiB", "--replicas", "1"]).await;
    let mut child = cluster.ctl(&["volume", "list", "--watch"]).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut until = async |words: &str| {
        loop {
            let line = timeout(LIMIT, lines.next_line()).await.unwrap().unwrap().unwrap();
            if line.contains(words) {
                return line;
            }
        }
    };
    until("NAME").await;
    until("detached").await;
    cluster.ok(&["volume", "attach", "v", "--node", "a"]).await;
    let changed = until("healthy").await;
    assert!(changed.contains("1/1") && changed.contains("attached"), "{changed}");
    child.kill().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn problems_are_on_one_screen_and_in_the_exit_code() {
    let mut cluster = Cluster::start(&["a", "b", "c"]).await;
    cluster.ok(&["volume", "create", "v", "--size", "1GiB", "--replicas", "3"]).await;
    cluster.ok(&["volume", "attach", "v", "--node", "a"]).await;
    let status = cluster.ok(&["status"]).await;
    for words in
        ["1: 1 attached, 1 healthy", "3: 3 ready", "agent 0.0.1 (a, b, c), which differs", "Wrong: nothing"]
    {
        assert!(status.contains(words), "{words} in\n{status}");
    }
    // The agents of these tests are of no release: that is warned of, and nothing fails.
    let checks = json(&cluster, &["doctor", "-o", "json"]).await;
    let outcome = |checks: &Value, name: &str| {
        let check = checks.as_array().unwrap().iter().find(|check| check["name"] == name).unwrap();
        check["outcome"].as_str().unwrap().to_owned()
    };
    assert_eq!(outcome(&checks, "agent-versions"), "warned");
    assert_eq!(
        (outcome(&checks, "volumes"), outcome(&checks, "ctl-version")),
        ("passed".into(), "passed".into())
    );

    let volume = cluster.inspect("v").await;
    let replicas = volume["replicas"].as_array().unwrap();
    let lost = replicas.iter().find(|replica| replica["nodeID"] == "b").unwrap();
    cluster.agents[0].fail_member("v", lost["replicaID"].as_str().unwrap());
    cluster.until("v", "degraded", |volume| volume["robustness"] == "degraded").await;
    let output = cluster.run(&["status", "-o", "json"]).await;
    assert_eq!(output.status.code(), Some(6));
    let status: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&status["well"], &status["volumes"]["degraded"]), (&false.into(), &1.into()));
    assert_eq!(status["wrong"][0]["reason"], "ReplicaFailed");
    cluster.kill_controller().await;
    assert_eq!(cluster.fails(&["status"]).await.0, 5);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_check_that_has_failed_is_in_the_exit_code() {
    let cluster = Cluster::start(&[]).await;
    let output = cluster.run(&["doctor"]).await;
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(6), "{text}");
    assert!(text.contains("failed  agents answer") && text.contains("shorthornctl node add"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_gets_fewer_replicas_and_other_places() {
    let cluster = Cluster::start(&["a", "b", "c"]).await;
    cluster.ok(&["volume", "create", "v", "--size", "1GiB", "--replicas", "3"]).await;
    cluster.ok(&["volume", "attach", "v", "--node", "a"]).await;
    cluster.ok(&["node", "set", "a", "--tags", "fast"]).await;
    cluster.ok(&["node", "set", "c", "--tags", "fast"]).await;
    let said = cluster.ok(&["volume", "set", "v", "--replicas", "2", "--node-selector", "fast"]).await;
    assert!(
        said.contains("should have 2 replicas, on nodes with fast; 1 are removed in succession"),
        "{said}"
    );
    let places = |volume: &Value| {
        let replicas = volume["replicas"].as_array().unwrap().iter();
        let mut nodes: Vec<_> = replicas.map(|one| one["nodeID"].as_str().unwrap().to_owned()).collect();
        nodes.sort_unstable();
        nodes
    };
    let on_b = |volume: &Value| {
        let mut replicas = volume["replicas"].as_array().unwrap().iter();
        replicas.find(|one| one["nodeID"] == "b").cloned().unwrap()
    };
    let stopped = |volume: &Value| on_b(volume)["currentState"] == "stopped";
    let volume = cluster.until("v", "stopping one", stopped).await;
    // Like an engine that gets no more answers from it.
    cluster.agents[0].fail_member("v", on_b(&volume)["replicaID"].as_str().unwrap());
    let volume = cluster.until("v", "two replicas", |volume| places(volume).len() == 2).await;
    assert_eq!(places(&volume), ["a", "c"], "the one whose node lacks the tag went");
    cluster.until("v", "healthy", |volume| volume["robustness"] == "healthy").await;
    for (words, hint) in [
        (["--replicas", "0"], "use 1 to 8"),
        (["--data-locality", "far"], "best-effort"),
        (["--node-selector", "a b"], "a b"),
    ] {
        let (code, text) = cluster.fails(&["volume", "set", "v", words[0], words[1]]).await;
        assert!(code == 1 && text.contains(hint), "{words:?}: {code}, {text}");
    }
    assert_eq!(cluster.fails(&["volume", "set", "v"]).await.0, 2, "nothing is to be changed");
    cluster.check();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replica_is_evicted_once_another_one_has_its_place() {
    let cluster = Cluster::start(&["a", "b", "c"]).await;
    cluster.ok(&["volume", "create", "v", "--size", "1GiB", "--replicas", "2"]).await;
    let replicas = json(&cluster, &["replica", "list", "-o", "json"]).await;
    let leaving = &replicas.as_array().unwrap()[0];
    let (name, node) = (leaving["name"].as_str().unwrap(), leaving["nodeID"].as_str().unwrap());
    let (code, text) = cluster.fails(&["replica", "evict", name]).await;
    assert!(code == 1 && text.contains("attach it first"), "{code}, {text}");
    cluster.ok(&["volume", "attach", "v", "--node", "a"]).await;
    let said = cluster.ok(&["replica", "evict", name, "--no-wait"]).await;
    assert!(said.contains("will be replaced"), "{said}");
    let replaced =
        |volume: &Value| volume["replicas"].as_array().unwrap().iter().any(|one| one["mode"] == "rebuilding");
    let volume = cluster.until("v", "replaced", replaced).await;
    assert!(
        volume["replicas"].as_array().unwrap().iter().any(|one| one["name"] == name),
        "it is still there"
    );
    assert_eq!(cluster.fails(&["replica", "evict", "v-nothing1"]).await.0, 3);
    let detail = json(&cluster, &["node", "inspect", node, "-o", "json"]).await;
    assert_eq!((&detail["name"], &detail["frontendDetails"][0]["name"]), (&node.into(), &"ublk".into()));
    let shown = cluster.ok(&["node", "inspect", "a"]).await;
    assert!(shown.contains("Frontend ublk: usable") && shown.contains("1 of any number"), "{shown}");
    assert_eq!(cluster.fails(&["node", "inspect", "z"]).await.0, 3);
    cluster.check();
}

#[tokio::test(flavor = "multi_thread")]
async fn devices_that_may_become_disks_are_listed() {
    let cluster = Cluster::start(&["a", "b"]).await;
    let fit = cluster.run(&["disk", "discover", "-o", "name"]).await;
    assert!(fit.status.success(), "{fit:?}");
    assert_eq!(String::from_utf8_lossy(&fit.stdout), "device/a:/dev/sdb\ndevice/b:/dev/sdb\n");
    let hint = String::from_utf8_lossy(&fit.stderr);
    assert!(hint.starts_with("devices that do not fit: 2; --all"), "{hint}");
    let table = cluster.ok(&["disk", "discover", "--node", "b", "--all"]).await;
    assert!(table.contains("the device has a signature: dos"), "{table}");
    let all = json(&cluster, &["disk", "discover", "--node", "b", "-o", "json"]).await;
    let all = all.as_array().unwrap();
    assert_eq!((all.len(), &all[1]["nodeID"], &all[1]["fits"]), (2, &"b".into(), &true.into()));
    assert_eq!(cluster.fails(&["disk", "discover", "--node", "z"]).await.0, 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn devices_of_many_nodes_come_in_pages() {
    let names: Vec<String> = (10..45).map(|number| format!("n{number}")).collect();
    let cluster = Cluster::start(&names.iter().map(String::as_str).collect::<Vec<_>>()).await;
    let all = json(&cluster, &["disk", "discover", "-o", "json"]).await;
    let all: Vec<&str> =
        all.as_array().unwrap().iter().filter_map(|device| device["nodeID"].as_str()).collect();
    let expected: Vec<&String> = names.iter().flat_map(|name| [name, name]).collect();
    assert_eq!(all, expected, "two devices of each node");
}
