//! Tables for people: aligned columns without borders.

use comfy_table::{ContentArrangement, Table, presets};

/// Returns an empty table. Without headers it has no line for them.
pub(super) fn table(headers: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_content_arrangement(ContentArrangement::Dynamic);
    if !headers.is_empty() {
        table.set_header(headers.iter().copied());
    }
    table
}

/// Returns an empty table for a wide screen. Each row is one line, however long its cells are.
pub(super) fn wide_table(headers: &[&str]) -> Table {
    let mut table = table(headers);
    table.set_content_arrangement(ContentArrangement::Disabled);
    table
}
