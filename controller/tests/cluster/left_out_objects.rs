//! Errors name an object that the store cannot read, and no rule decides without it.

use std::path::Path;

use crate::support::cluster::Cluster;
use crate::support::csi::{Caller, create, publish};
use redb::{Database, TableDefinition};
use tonic::Code;

const OBJECTS: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("objects");

/// Stores another text of the object, and returns the one before.
fn replace(store: &Path, name: &str, text: &[u8]) -> Vec<u8> {
    let database = Database::open(store).unwrap();
    let transaction = database.begin_write().unwrap();
    let before = {
        let mut objects = transaction.open_table(OBJECTS).unwrap();
        let before = objects.insert(name, text).unwrap();
        before.unwrap().value().to_vec()
    };
    transaction.commit().unwrap();
    before
}

#[tokio::test(flavor = "multi_thread")]
async fn an_object_that_cannot_be_read_is_named_and_counts_all_the_same() {
    let mut cluster = Cluster::start(&["a", "b"]).await;
    let store = cluster.path("store.redb");
    let mut csi = Caller::new(&cluster.path("csi.sock"));
    cluster.ok(&["volume", "create", "v", "--size", "1GiB", "--replicas", "2"]).await;
    cluster.ok(&["volume", "create", "u", "--size", "1GiB", "--replicas", "1"]).await;
    cluster.ok(&["volume", "attach", "v", "--node", "a"]).await;
    for (name, key) in [("volume/v", "volume v"), ("engine/v", "engine v")] {
        cluster.stop_controller().await;
        let good = replace(&store, name, b"{ \"half\":");
        cluster.start_controller().await;
        let doctor = cluster.run(&["doctor"]).await;
        let doctor = String::from_utf8_lossy(&doctor.stdout).into_owned();
        assert!(doctor.contains(&format!("{key} cannot be used")), "{doctor}");
        let listed = csi.list(0, "").await.unwrap().entries;
        let shown = |entry: &shorthorn_api::csi::v1::list_volumes_response::Entry| {
            (entry.volume.clone().unwrap().volume_id, entry.status.clone().unwrap().published_node_ids)
        };
        let listed: Vec<_> = listed.iter().map(shown).collect();
        let expected = [("u".to_owned(), Vec::new()), ("v".to_owned(), vec!["a".to_owned()])];
        assert_eq!(listed, expected, "the other volume too, and this one where it may be");
        let first = csi.list(1, "").await.unwrap();
        assert_eq!((shown(&first.entries[0]).0.as_str(), first.next_token.as_str()), ("u", "after:u"));
        let second = csi.list(1, "after:u").await.unwrap();
        assert_eq!((shown(&second.entries[0]).0.as_str(), second.next_token.as_str()), ("v", ""));
        for node in ["a", "b"] {
            let (_, text) = cluster.fails(&["node", "can-reboot", node]).await;
            assert!(text.contains("not safe") && text.contains(key), "{text}");
        }
        if name == "volume/v" {
            for refused in [
                csi.delete("v").await,
                csi.unpublish("v", "a").await,
                csi.publish(publish("v", "b")).await,
                csi.create(create("v")).await.map(drop),
            ] {
                let words = |(code, text): &(Code, String)| *code == Code::Unavailable && text.contains(key);
                assert!(refused.as_ref().is_err_and(words), "{refused:?}");
            }
            let (_, text) = cluster.fails(&["volume", "undelete", "v"]).await;
            assert!(text.contains("restore the store from a backup"), "{text}");
        }
        assert!(cluster.agents[0].running().iter().any(|running| running == "v"), "its engine serves");
        assert!(cluster.agents.iter().all(|agent| agent.directories().len() == 1));
        cluster.stop_controller().await;
        replace(&store, name, &good);
        cluster.start_controller().await;
        cluster.until("v", "healthy", |volume| volume["robustness"] == "healthy").await;
    }
    assert_eq!(csi.ids().await, ["u", "v"]);
    cluster.ok(&["volume", "detach", "v"]).await;
    cluster.ok(&["volume", "delete", "v", "--yes"]).await;
    cluster.ok(&["volume", "delete", "u", "--yes"]).await;
    cluster.check();
}
