//! Volumes in a list.

use shorthorn_api::v1;
use shorthorn_types::HumanBytes;

use super::{Column, Entry, List, column, fields, wide};
use crate::json::VolumeOutput;
use crate::output;

const COLUMNS: [Column; 15] = [
    column("NAME"),
    column("NAMESPACE"),
    column("PVC"),
    column("SIZE"),
    column("REPLICAS"),
    column("STATE"),
    column("ROBUSTNESS"),
    column("NODE"),
    wide("WORKLOAD"),
    wide("ACTUAL"),
    wide("PV"),
    column("DEVICE"),
    wide("CREATED"),
    wide("NEEDS-UPGRADE"),
    wide("REASON"),
];

pub(super) fn list(volumes: Vec<v1::Volume>) -> List {
    List {
        columns: &COLUMNS,
        entries: volumes.into_iter().map(entry).collect(),
        if_empty: "No volumes. Create one: shorthornctl volume create NAME --size 10GiB",
        warnings: Vec::new(),
    }
}

fn entry(volume: v1::Volume) -> Entry {
    let (namespace, claim) = volume.claim.split_once('/').unwrap_or_default();
    let wrong = volume.conditions.iter().find(|condition| !condition.status);
    let actual = if volume.actual_size_bytes == 0 {
        String::new()
    } else {
        HumanBytes(volume.actual_size_bytes).to_string()
    };
    let row = vec![
        volume.name.clone(),
        namespace.to_owned(),
        claim.to_owned(),
        output::size(&volume),
        output::members(&volume),
        volume.shown_state().to_owned(),
        volume.shown_robustness().to_owned(),
        volume.current_node.clone(),
        output::workloads(&volume.workloads),
        actual,
        volume.persistent_volume.clone(),
        volume.endpoint.clone(),
        volume.created.clone(),
        needs_upgrade(&volume).to_owned(),
        wrong.map(|wrong| wrong.reason.clone()).unwrap_or_default(),
    ];
    Entry {
        name: format!("volume/{}", volume.name),
        rows: vec![row],
        fields: fields(&VolumeOutput::from(volume)),
    }
}

/// Returns a word if the engine of a volume has one to be replaced; empty without an engine.
fn needs_upgrade(volume: &v1::Volume) -> &'static str {
    let is_attached = !volume.current_node.is_empty();
    match volume.engine.as_ref().filter(|_| is_attached).map(|engine| engine.needs_upgrade) {
        Some(Some(true)) => "yes",
        Some(Some(false)) => "no",
        Some(None) => "unknown",
        None => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_engine_that_is_not_compared_is_not_current() {
        let cell = |needs_upgrade, node: &str| {
            let engine = Some(v1::Engine { needs_upgrade, ..v1::Engine::default() });
            needs_upgrade_of(v1::Volume { engine, current_node: node.to_owned(), ..v1::Volume::default() })
        };
        let needs = [Some(true), Some(false), None].map(|needs_upgrade| cell(needs_upgrade, "n1"));
        assert_eq!(needs, ["yes", "no", "unknown"]);
        assert_eq!(cell(None, ""), "", "the volume is detached");
    }

    fn needs_upgrade_of(volume: v1::Volume) -> String {
        let at = COLUMNS.iter().position(|column| column.header == "NEEDS-UPGRADE").unwrap();
        entry(volume).rows[0][at].clone()
    }

    #[test]
    fn a_row_has_a_cell_for_each_column_and_shows_claim_and_workload() {
        let workload = |pod: &str| v1::Workload {
            kind: "Deployment".to_owned(),
            name: "web".to_owned(),
            pod: pod.to_owned(),
            phase: "Running".to_owned(),
        };
        let entry = entry(v1::Volume {
            name: "v".to_owned(),
            claim: "shop/orders".to_owned(),
            workloads: vec![workload("web-1"), workload("web-2")],
            ..v1::Volume::default()
        });
        let row = &entry.rows[0];
        assert_eq!(row.len(), COLUMNS.len());
        assert_eq!(row[1..3], ["shop", "orders"]);
        assert_eq!(row[8], "Deployment/web");
        assert_eq!(entry.fields["namespace"], "shop");
        assert_eq!(entry.fields["workloads"][1]["pod"], "web-2");
    }
}
