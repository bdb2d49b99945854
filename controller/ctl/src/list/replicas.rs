//! Replicas in a list.

use shorthorn_api::v1;

use super::{Column, Entry, List, column, fields, wide};
use crate::json::ReplicaOutput;
use crate::output::replica_row;

const COLUMNS: [Column; 9] = [
    column("REPLICA"),
    wide("VOLUME"),
    column("NODE"),
    column("DISK"),
    column("STATE"),
    column("MODE"),
    column("ALLOCATED"),
    wide("WANTED"),
    column("MESSAGE"),
];

pub(super) fn list(replicas: Vec<v1::Replica>) -> List {
    let entries = replicas.into_iter().map(entry).collect();
    List { columns: &COLUMNS, entries, if_empty: "No replicas.", warnings: Vec::new() }
}

fn entry(replica: v1::Replica) -> Entry {
    let name = format!("replica/{}", replica.name);
    let [shown, node, disk, state, mode, allocated, message] = replica_row(&replica);
    let wanted = if replica.deleting { "gone" } else { replica.shown_desire_state() };
    let row = [shown, replica.volume.clone(), node, disk, state, mode, allocated, wanted.to_owned(), message];
    Entry { name, rows: vec![row.into()], fields: fields(&ReplicaOutput::from(replica)) }
}
