//! Deleted replicas in the trash, and orphans, in lists.

use shorthorn_api::v1;

use super::{Column, Entry, List, column, fields};
use crate::json::TrashOutput;
use shorthorn_types::HumanBytes;

const TRASH: [Column; 8] = [
    column("VOLUME"),
    column("REPLICA"),
    column("NODE"),
    column("DISK"),
    column("SIZE"),
    column("DELETED"),
    column("EXPIRES"),
    column("UNDELETE"),
];

const ORPHANS: [Column; 4] = [column("NODE"), column("DISK"), column("UUID"), column("DIRECTORY")];

/// Returns the reasons why something on the disks of nodes may be missing from a list.
pub(super) fn unknown(silent_nodes: &[String], problems: Vec<String>) -> Vec<String> {
    let silent = silent_nodes
        .iter()
        .map(|node| format!("node {node} does not answer: there may be more on its disks"));
    silent.chain(problems).collect()
}

/// Returns the trash, by volume.
pub(super) fn list(mut trash: Vec<v1::VolumeTrash>) -> List {
    // Pages come by node.
    trash.sort_by_cached_key(|found| {
        let replica = found.replica.as_ref();
        replica.map(|replica| (replica.volume.clone(), replica.deleted_ms, replica.replica_id.clone()))
    });
    let entries = trash.into_iter().map(trashed).collect();
    List { columns: &TRASH, entries, if_empty: "The trash is empty.", warnings: Vec::new() }
}

fn trashed(trash: v1::VolumeTrash) -> Entry {
    let deleted_ms = trash.replica.as_ref().map_or(0, |replica| replica.deleted_ms);
    let output = TrashOutput::from(trash);
    // A disk may have the directories of several deletions of a replica.
    let name = format!("trash/{}:{}-{}-{deleted_ms}", output.node, output.volume, output.replica_id);
    let undelete = match (output.problem.is_empty(), output.with_volume) {
        (false, _) => output.problem.clone(),
        (true, true) => "yes".to_owned(),
        (true, false) => "no, the volume continued without it".to_owned(),
    };
    let row = vec![
        output.volume.clone(),
        output.replica_id.clone(),
        output.node.clone(),
        output.disk_path.clone(),
        HumanBytes(output.allocated_bytes).to_string(),
        output.deleted.clone(),
        output.expires.clone(),
        undelete,
    ];
    Entry { name, rows: vec![row], fields: fields(&output) }
}

/// Returns the orphans, by node.
pub(super) fn orphans(orphans: Vec<v1::Orphan>) -> List {
    let entries = orphans.into_iter().map(orphan).collect();
    List {
        columns: &ORPHANS,
        entries,
        if_empty: "Every directory belongs to a volume.",
        warnings: Vec::new(),
    }
}

fn orphan(orphan: v1::Orphan) -> Entry {
    let fields = fields(&orphan);
    let v1::Orphan { node, disk_path, disk_uuid, name: directory } = orphan;
    let name = format!("orphan/{node}:{disk_path}/{directory}");
    Entry { name, rows: vec![vec![node, disk_path, disk_uuid, directory]], fields }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::Format;

    #[test]
    fn trash_of_several_pages_is_listed_by_volume() {
        let trash = |node: &str, volume: &str, with_volume| v1::VolumeTrash {
            node: node.to_owned(),
            with_volume,
            replica: Some(v1::TrashedReplica {
                volume: volume.to_owned(),
                replica_id: "0000000a".to_owned(),
                deleted_ms: 1000,
                ..v1::TrashedReplica::default()
            }),
        };
        let list = list(vec![trash("a", "w", true), trash("b", "v", false)]);
        assert_eq!(list.text(Format::Name).unwrap(), "trash/b:v-0000000a-1000\ntrash/a:w-0000000a-1000\n");
        assert!(list.entries.iter().all(|entry| entry.rows[0].len() == TRASH.len()));
        assert_eq!(list.entries[0].fields["nodeID"], "b");
        let table = list.text(Format::Table).unwrap();
        assert!(table.contains("continued without it") && table.contains("yes"), "{table}");
    }

    #[test]
    fn an_orphan_is_named_by_its_place() {
        let [node, disk_path, disk_uuid, name] = ["a", "/d", "u", "v-0000000a"].map(str::to_owned);
        let list = orphans(vec![v1::Orphan { node, disk_path, disk_uuid, name }]);
        assert_eq!(list.text(Format::Name).unwrap(), "orphan/a:/d/v-0000000a\n");
        assert_eq!(list.entries[0].rows[0].len(), ORPHANS.len());
        assert_eq!(unknown(&["n".to_owned()], vec!["p".to_owned()]).len(), 2);
    }
}
