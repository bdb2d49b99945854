//! Volumes that are not well: the arbiter, replaced replicas, the operator's questions and decisions.

use crate::support::cluster::{Cluster, LIMIT};
use serde_json::Value;
use shorthorn_api::v1;
use shorthorn_testkit::waiting::wait_for_async;
use shorthorn_types::status::{EnginePhase, GrantWanted};
use shorthorn_types::{Generation, Members, ReplicaReport, View, ViewId};
use tokio::time::Instant;

fn replica_on<'a>(volume: &'a Value, node: &str) -> &'a str {
    let replicas = volume["replicas"].as_array().unwrap();
    let found = replicas.iter().find(|replica| replica["nodeID"] == node);
    found.unwrap_or_else(|| panic!("no replica on {node}: {volume:#}"))["replicaID"].as_str().unwrap()
}

async fn attached(cluster: &Cluster, replicas: &str) -> Value {
    cluster.ok(&["volume", "create", "v", "--size", "1GiB", "--replicas", replicas]).await;
    cluster.ok(&["volume", "attach", "v", "--node", "a"]).await;
    cluster.inspect("v").await
}

#[tokio::test(flavor = "multi_thread")]
async fn half_of_a_volume_continues_with_the_grant_of_the_arbiter() {
    let mut cluster = Cluster::start(&["a", "b"]).await;
    let volume = attached(&cluster, "2").await;
    let lost = replica_on(&volume, "b").to_owned();
    // Without the controller no grant is given; once it runs again it grants at once.
    cluster.kill_controller().await;
    cluster.agents[0].freeze("v", &lost);
    assert_eq!(cluster.agents[0].engine_says("v").phase(), Some(EnginePhase::Frozen));
    cluster.start_controller().await;
    let ready = Instant::now();
    let degraded = |volume: &Value| volume["robustness"] == "degraded";
    let volume = cluster.until("v", "degraded", degraded).await;
    println!("granted within {:?} of the start of the controller", ready.elapsed());
    assert_eq!(cluster.agents[0].engine_says("v").phase(), Some(EnginePhase::Serving));
    let granted = volume["granted"].as_str().unwrap();
    assert!(granted.starts_with("1.1/2 of {") && !granted.contains(&lost), "{granted}");
    let grants = cluster.truth.lock().unwrap().grants.clone();
    assert!(!grants.is_empty() && grants.iter().all(|grant| *grant == grants[0]), "{grants:#?}");

    // The other half asks with the former view only: it is refused, and gets the grant.
    cluster.agents[0].status("v", |status| {
        let id = ViewId { generation: Generation::new(1, 2), number: 1 };
        let stored = Members::new([lost.parse().unwrap()]).unwrap();
        let honoured = ReplicaReport { committed: status.view.unwrap(), proposed: Vec::new() };
        status.grant_wanted = Some(GrantWanted { view: View { id, members: stored }, honoured, stored });
        status.phase = EnginePhase::Frozen;
    });
    cluster.until("v", "frozen", |volume| volume["robustness"] == "faulted").await;
    let why = cluster.ok(&["volume", "why", "v"]).await;
    for word in ["is frozen", "the arbiter", "is granted already", "The volume waits for", "volume salvage v"]
    {
        assert!(why.contains(word), "{word} in\n{why}");
    }
    let grants = cluster.truth.lock().unwrap().grants.clone();
    assert!(grants.iter().all(|grant| *grant == grants[0]), "{grants:#?}");
    cluster.check();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replica_that_stays_away_is_replaced_and_deleted_last() {
    let mut cluster = Cluster::start(&["a", "b", "c"]).await;
    let volume = attached(&cluster, "2").await;
    let others =
        ["b", "c"].iter().find(|node| volume.to_string().contains(&format!("\"nodeID\":\"{node}\"")));
    let (kept, lost_node) = ("a", *others.unwrap());
    let lost = replica_on(&volume, lost_node).to_owned();
    let lost_name = format!("v-{lost}");
    let at =
        |cluster: &Cluster, node: &str| cluster.agents.iter().position(|agent| agent.name == node).unwrap();
    cluster.agents[0].fail_member("v", &lost);
    cluster.until("v", "degraded", |volume| volume["robustness"] == "degraded").await;
    // The time begins with a run of the reconciler after the volume was degraded.
    wait_for_async("the controller says when it replaces the replica", LIMIT, async || {
        let why = cluster.ok(&["volume", "why", "v"]).await;
        let words =
            ["degraded", "1 of 2", &lost_name, "connection reset", "The controller replaces the replica in"];
        if words.iter().all(|word| why.contains(word)) { Ok(()) } else { Err(why) }
    })
    .await;
    // The time is over at once for the next controller.
    cluster.kill_controller().await;
    cluster.replace_after_s = 0;
    cluster.start_controller().await;
    let three = |volume: &Value| {
        let replicas = volume["replicas"].as_array().unwrap();
        replicas.iter().any(|replica| replica["mode"] == "rebuilding")
    };
    let volume = cluster.until("v", "rebuilding", three).await;
    assert_eq!(volume["replicas"].as_array().unwrap().len(), 3, "{volume:#}");
    let new_node = if lost_node == "b" { "c" } else { "b" };
    let new = replica_on(&volume, new_node).to_owned();
    let list = cluster.ok(&["volume", "list"]).await;
    assert!(list.contains("1/2 (75 %)"), "{list}");
    let why = cluster.ok(&["volume", "why", "v"]).await;
    assert!(why.contains(&format!("v-{new} on node {new_node} is being rebuilt: 75 % done")), "{why}");
    // Nothing is deleted before the new one has everything.
    assert!(cluster.agents[at(&cluster, lost_node)].directories().contains(&lost_name));
    cluster.agents[0].end_rebuild("v", &new);
    let whole = |volume: &Value| {
        volume["robustness"] == "healthy" && volume["replicas"].as_array().unwrap().len() == 2
    };
    let volume = cluster.until("v", "whole", whole).await;
    replica_on(&volume, kept);
    assert_eq!(replica_on(&volume, new_node), new);
    assert!(!cluster.agents[at(&cluster, lost_node)].directories().contains(&lost_name));
    assert!(cluster.ok(&["volume", "why", "v"]).await.contains("is healthy"));
    cluster.check();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_operator_salvages_a_volume_from_one_replica() {
    let cluster = Cluster::start(&["a", "b"]).await;
    let volume = attached(&cluster, "2").await;
    let (newer, older) = (replica_on(&volume, "a").to_owned(), replica_on(&volume, "b").to_owned());
    let view = |number, ids: &[&String]| v1::View {
        attach: 1,
        restart: 1,
        nonce: 0,
        number,
        members: ids.iter().map(ToString::to_string).collect(),
    };
    cluster.agents[0].set_view(&format!("v-{newer}"), view(2, &[&newer]));
    cluster.agents[1].set_view(&format!("v-{older}"), view(1, &[&newer, &older]));
    let (_, text) =
        cluster.fails(&["volume", "salvage", "v", "--replica", &older, "--yes-i-may-lose-data"]).await;
    assert!(text.contains("is served"), "{text}");
    cluster.ok(&["volume", "detach", "v"]).await;

    let table = cluster.ok(&["volume", "salvage", "v"]).await;
    assert!(table.contains(&format!("With {older}: lacks acknowledged writes of view 1.1/2")), "{table}");
    assert!(table.contains(&format!("With {newer}: no loss is known")), "{table}");
    let (code, text) = cluster.fails(&["volume", "salvage", "v", "--replica", &older]).await;
    assert!(code == 1 && text.contains("--yes-i-may-lose-data"), "{text}");
    let (code, text) =
        cluster.fails(&["volume", "salvage", "v", "--replica", "ffffffff", "--yes-i-may-lose-data"]).await;
    assert!(code == 3 && text.contains("has no replica ffffffff"), "{text}");
    let words =
        ["volume", "salvage", "v", "--replica", &older, "--reason", "a is gone", "--yes-i-may-lose-data"];
    cluster.ok(&words).await;
    let volume = cluster.until("v", "salvaged", |volume| volume["salvage"]["done"] == true).await;
    assert_eq!(volume["attach"], 3);
    assert_eq!(volume["salvage"]["reason"], "a is gone");
    assert!(volume["salvage"]["losses"].as_str().unwrap().contains("view 1.1/2"), "{volume:#}");
    assert_eq!(volume["granted"].as_str().unwrap(), format!("3.0/0 of {{{older}}}"));
    let salvaged = cluster.agents[1].view(&format!("v-{older}")).unwrap();
    assert_eq!((salvaged.attach, salvaged.number, salvaged.members), (3, 0, vec![older]));
    assert_eq!(cluster.agents[0].directories().len(), 1, "the other one is still there");
    cluster.ok(&["volume", "attach", "v", "--node", "b"]).await;
    assert_eq!(cluster.inspect("v").await["attach"], 4);
    cluster.check();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_running_engine_gets_the_changes() {
    let cluster = Cluster::start(&["a", "b"]).await;
    attached(&cluster, "1").await;
    cluster.ok(&["volume", "rebuild-limit", "v", "--bytes-per-s", "10MiB", "--share", "50"]).await;
    let wanted = v1::RebuildLimits { bytes_per_s: 10 << 20, share_percent: 50 };
    wait_for_async("the engine has the limits", LIMIT, async || {
        let limits = cluster.agents[0].limits();
        if limits == Some(wanted) { Ok(()) } else { Err(limits) }
    })
    .await;
    let said = cluster.ok(&["volume", "upgrade-engine", "v"]).await;
    assert!(said.contains("process 3 now, 2 before; requests waited for 42 ms"), "{said}");
    cluster.ok(&["volume", "scrub", "v", "--rate", "1MiB"]).await;
    cluster.until("v", "scrubbed", |volume| volume["scrub"]["running"] == true).await;
    cluster.ok(&["volume", "scrub", "v", "--stop"]).await;
    cluster.until("v", "left alone", |volume| volume["scrub"]["running"] == false).await;
    // Another replica is made, and rebuilt.
    cluster.ok(&["volume", "replicas", "v", "2"]).await;
    let two =
        |volume: &Value| volume["replicas"].as_array().unwrap().iter().any(|r| r["mode"] == "rebuilding");
    cluster.until("v", "rebuilt", two).await;
    assert!(cluster.fails(&["volume", "replicas", "v", "9"]).await.1.contains("use 1 to 8"));
    cluster.check();
}

/// Deleted by mistake, and brought back from the trash of its disks, also if a node answers only later.
#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_volume_is_undeleted_with_its_replicas() {
    let mut cluster = Cluster::start(&["a", "b"]).await;
    let volume = attached(&cluster, "2").await;
    let names = ["a", "b"].map(|node| format!("v-{}", replica_on(&volume, node)));
    cluster.ok(&["volume", "detach", "v"]).await;
    let (_, text) = cluster.fails(&["volume", "undelete", "v"]).await;
    assert!(text.contains("no reachable node has replicas in its trash"), "{text}");
    cluster.ok(&["volume", "delete", "v", "--yes"]).await;
    assert!(cluster.agents.iter().all(|agent| agent.directories().is_empty()));
    let trash = cluster.ok(&["volume", "trash"]).await;
    assert!(names.iter().all(|name| trash.contains(&name[2..])) && trash.contains("yes"), "{trash}");
    assert!(cluster.ok(&["volume", "trash", "w"]).await.contains("trash is empty"));
    let sorted = cluster.ok(&["volume", "trash", "--sort-by", "nodeID", "-o", "name"]).await;
    let nodes: Vec<&str> = sorted.lines().filter_map(|line| line.split(':').next()).collect();
    assert_eq!(nodes, ["trash/a", "trash/b"]);

    cluster.stop_agent(1);
    wait_for_async("node b is lost", LIMIT, async || {
        let nodes = cluster.ok(&["node", "list"]).await;
        if nodes.contains("unreachable") { Ok(()) } else { Err(nodes) }
    })
    .await;
    let (code, text) = cluster.fails(&["volume", "undelete", "v"]).await;
    assert!(
        code == 1 && text.contains("is restored, perhaps incompletely: node b does not list its trash"),
        "{text}"
    );
    assert_eq!(cluster.inspect("v").await["state"], "detached");
    cluster.start_agent(1);
    cluster.retry(&["volume", "undelete", "v"]).await;
    assert!(cluster.agents.iter().all(|agent| agent.directories().len() == 1));
    cluster.ok(&["volume", "attach", "v", "--node", "b"]).await;
    let again = cluster.until("v", "healthy", |volume| volume["robustness"] == "healthy").await;
    assert_eq!(again["attach"], 2, "no engine of the deleted volume is newer");
    let found = ["a", "b"].map(|node| format!("v-{}", replica_on(&again, node)));
    assert_eq!(found, names);
    let (_, text) = cluster.fails(&["volume", "undelete", "v"]).await;
    assert!(
        text.contains("no reachable node has replicas in its trash") || text.contains("already exists"),
        "{text}"
    );

    // After a final deletion nothing can be restored.
    cluster.ok(&["volume", "detach", "v"]).await;
    cluster.ok(&["volume", "delete", "v", "--yes"]).await;
    let (_, text) = cluster.fails(&["volume", "trash", "v", "--remove"]).await;
    assert!(text.contains("--yes"), "{text}");
    let one = names[0].rsplit_once('-').unwrap().1;
    let said = cluster.ok(&["volume", "trash", "v", "--remove", "--replica", one, "--yes"]).await;
    assert!(said.contains("1 directories"), "{said}");
    assert!(!cluster.ok(&["volume", "trash", "v"]).await.contains(one));
    cluster.ok(&["volume", "trash", "v", "--remove", "--yes"]).await;
    let (code, text) = cluster.fails(&["volume", "trash", "v", "--remove", "--yes"]).await;
    assert!(code == 3 && text.contains("no reachable node has replicas of volume v in its trash"), "{text}");
    cluster.check();
}

/// The volume is gone although a node is down, whose data is deleted when it is back; undeleted before, it
/// is the volume's again.
#[tokio::test(flavor = "multi_thread")]
async fn a_deletion_continues_without_a_node_that_is_down() {
    let mut cluster = Cluster::start(&["a", "b"]).await;
    let volume = attached(&cluster, "2").await;
    cluster.ok(&["volume", "detach", "v"]).await;
    cluster.until_stopped().await;
    cluster.stop_agent(1);
    // Within the time after which a node counts as lost.
    cluster.ok(&["volume", "delete", "v", "--yes"]).await;
    assert!(cluster.agents[0].directories().is_empty() && cluster.agents[1].directories().len() == 1);
    let left = cluster.ok(&["replica", "list"]).await;
    assert!(left.contains(replica_on(&volume, "b")) && left.contains("being deleted"), "{left}");
    let (code, text) = cluster.fails(&["volume", "undelete", "v"]).await;
    assert!(code == 1 && text.contains("is restored"), "{text}");
    assert_eq!(cluster.inspect("v").await["replicas"].as_array().unwrap().len(), 2);

    cluster.ok(&["volume", "delete", "v", "--yes"]).await;
    cluster.start_agent(1);
    wait_for_async("the replica on b is deleted", LIMIT, async || {
        let replicas = cluster.ok(&["replica", "list"]).await;
        if replicas.contains("v-") { Err(replicas) } else { Ok(()) }
    })
    .await;
    assert!(cluster.agents[1].directories().is_empty());
    cluster.retry(&["volume", "undelete", "v"]).await;
    assert!(cluster.agents.iter().all(|agent| agent.directories().len() == 1));
    cluster.ok(&["volume", "attach", "v", "--node", "a"]).await;
    cluster.check();
}

/// The data of a node that was given up is there again, without an owner.
#[tokio::test(flavor = "multi_thread")]
async fn leftovers_are_listed_and_deleted_only_by_name() {
    let cluster = Cluster::start(&["a", "b"]).await;
    let volume = attached(&cluster, "1").await;
    let disk = "/var/lib/longhorn";
    assert!(cluster.ok(&["orphan", "list"]).await.contains("belongs to a volume"));
    cluster.agents[1].leave_over("old-0000000a");
    cluster.agents[1].leave_over("old-0000000b");
    let list = cluster.ok(&["orphan", "list"]).await;
    assert!(list.contains("old-0000000a") && list.contains("old-0000000b") && !list.contains("v-"), "{list}");
    let sorted = cluster.ok(&["orphan", "list", "--sort-by", "name", "-o", "name"]).await;
    let expected = ["a", "b"].map(|end| format!("orphan/b:{disk}/old-0000000{end}\n"));
    assert_eq!(sorted.trim_end(), expected.concat().trim_end());
    let (code, text) = cluster.fails(&["orphan", "delete", "b", disk, "old-0000000a"]).await;
    assert!(code == 1 && text.contains("--yes"), "{text}");
    cluster.ok(&["orphan", "delete", "b", disk, "old-0000000a", "--yes"]).await;
    assert_eq!(cluster.agents[1].directories().into_iter().collect::<Vec<_>>(), ["old-0000000b"]);
    assert!(cluster.ok(&["volume", "trash", "old"]).await.contains("0000000a"));
    let used = format!("v-{}", replica_on(&volume, "a"));
    let (code, text) = cluster.fails(&["orphan", "delete", "a", disk, &used, "--yes"]).await;
    assert!(code == 3 && text.contains("is not an orphan"), "{text}");

    let (_, text) = cluster.fails(&["disk", "remove", "a", disk]).await;
    assert!(text.contains("has replicas"), "{text}");
    let (code, text) = cluster.fails(&["disk", "remove", "b", disk]).await;
    assert!(code == 1 && text.contains("has 1 directories, which the controller does not list"), "{text}");
    let (_, text) = cluster.fails(&["disk", "remove", "b", disk, "--lost", "--yes"]).await;
    assert!(text.contains("can be used"), "{text}");
    cluster.ok(&["disk", "remove", "b", disk, "--lost", "--force", "--yes"]).await;
    assert!(cluster.ok(&["disk", "list"]).await.contains("is given up"));
    cluster.ok(&["disk", "remove", "b", disk]).await;
    assert!(!cluster.ok(&["disk", "list"]).await.contains("is given up"));
    cluster.check();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_that_its_agent_does_not_remove_takes_replicas_again() {
    let cluster = Cluster::start(&["a"]).await;
    cluster.agents[0].keep_disks(Some("a directory of another owner is on it"));
    let (_, text) = cluster.fails(&["disk", "remove", "a", "/var/lib/longhorn"]).await;
    assert!(text.contains("of another owner"), "{text}");
    attached(&cluster, "1").await;
    cluster.check();
}
