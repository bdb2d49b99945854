//! Nodes, and disks, in lists.

use shorthorn_api::v1;

use super::{Column, Entry, List, column, fields, wide};
use crate::output::{disk_row, node_rows};

const NODES: [Column; 12] = [
    column("NODE"),
    column("READY"),
    column("FRONTENDS"),
    column("DISK"),
    column("SIZE"),
    column("AVAILABLE"),
    column("RESERVED"),
    column("SCHEDULED"),
    wide("ZONE"),
    wide("VERSION"),
    wide("ADDRESS"),
    column("MESSAGE"),
];

const DISKS: [Column; 9] = [
    column("NODE"),
    column("DISK"),
    column("UUID"),
    column("SIZE"),
    column("AVAILABLE"),
    column("SCHEDULED"),
    wide("TAGS"),
    column("NEW REPLICAS"),
    column("MESSAGE"),
];

pub(super) fn list(nodes: Vec<v1::NodeObject>) -> List {
    let entries = nodes.into_iter().map(node).collect();
    let if_empty = "No nodes. Add one: shorthornctl node add NAME --address HOST:PORT";
    List { columns: &NODES, entries, if_empty, warnings: Vec::new() }
}

fn node(node: v1::NodeObject) -> Entry {
    let name = format!("node/{}", node.name);
    let more = [node.zone.clone(), node.version.clone(), node.address.clone()];
    let widened = |mut row: Vec<String>| {
        let message = row.pop().unwrap_or_default();
        row.extend(more.iter().cloned().chain([message]));
        row
    };
    let rows = node_rows(&node).into_iter().map(widened).collect();
    Entry { name, rows, fields: fields(&node) }
}

pub(super) fn disks(nodes: Vec<v1::NodeObject>) -> List {
    let of_node = |node: v1::NodeObject| {
        let name = node.name;
        node.disks.into_iter().map(move |found| disk(&name, found))
    };
    let entries = nodes.into_iter().flat_map(of_node).collect();
    let if_empty = "No disks. Add one: shorthornctl disk add NODE PATH";
    List { columns: &DISKS, entries, if_empty, warnings: Vec::new() }
}

fn disk(node: &str, disk: v1::NodeDisk) -> Entry {
    let name = format!("disk/{node}:{}", disk.path);
    let mut row: Vec<String> = disk_row(node, &disk).into();
    row.insert(6, disk.tags.join(","));
    let mut fields = fields(&disk);
    fields["nodeID"] = node.into();
    Entry { name, rows: vec![row], fields }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_have_a_cell_for_each_column() {
        let disk = |path: &str| v1::NodeDisk { path: path.to_owned(), ..v1::NodeDisk::default() };
        let with_disks = v1::NodeObject {
            name: "n".to_owned(),
            zone: "z".to_owned(),
            disks: vec![disk("/a"), disk("/b")],
            ..v1::NodeObject::default()
        };
        let without = v1::NodeObject { name: "m".to_owned(), ..v1::NodeObject::default() };
        let nodes = list(vec![with_disks.clone(), without]);
        for row in nodes.entries.iter().flat_map(|entry| &entry.rows) {
            assert_eq!(row.len(), NODES.len(), "{row:?}");
        }
        assert_eq!(nodes.entries[0].rows[0][8], "z");
        let disks = disks(vec![with_disks]);
        assert_eq!((disks.entries.len(), disks.entries[1].rows[0].len()), (2, DISKS.len()));
        assert_eq!(disks.entries[1].name, "disk/n:/b");
        assert_eq!(disks.entries[1].fields["nodeID"], "n");
    }
}
