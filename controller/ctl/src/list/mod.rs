//! Lists of objects, as people, programs and scripts want them.

mod devices;
mod fetch;
mod nodes;
mod replicas;
mod sort;
mod trash;
mod volumes;
mod watch;

use std::fmt::Write as _;

use serde_json::Value;

use super::error::CtlError;
use super::format::Format;
use super::output::for_programs;
use super::table::{table, wide_table};

pub(super) use devices::devices;
pub(super) use fetch::{ListKind, ListOptions, Lister, Order};
pub(super) use watch::watch;

/// A column of a table.
#[derive(Clone, Copy, Debug)]
struct Column {
    header: &'static str,
    /// Shown with `-o wide` only.
    is_wide: bool,
}

const fn column(header: &'static str) -> Column {
    Column { header, is_wide: false }
}

const fn wide(header: &'static str) -> Column {
    Column { header, is_wide: true }
}

/// An object of a list.
#[derive(Clone, Debug, PartialEq)]
struct Entry {
    /// Kind and name, as `-o name` shows it.
    name: String,
    /// All fields, as programs see them.
    fields: Value,
    /// The cells of all its rows, one for each column.
    rows: Vec<Vec<String>>,
}

/// Objects of a kind.
#[derive(Clone, Debug)]
pub(super) struct List {
    columns: &'static [Column],
    entries: Vec<Entry>,
    /// Said instead of an empty table.
    if_empty: &'static str,
    /// Messages for standard error about missing parts of the list.
    pub(super) warnings: Vec<String>,
}

impl List {
    /// Returns the list as text.
    pub(super) fn text(&self, format: Format) -> Result<String, CtlError> {
        match format {
            Format::Table | Format::Wide if self.entries.is_empty() => Ok(self.if_empty.to_owned()),
            Format::Table | Format::Wide => Ok(self.table(format, true)),
            Format::Json | Format::Yaml => {
                let all: Vec<&Value> = self.entries.iter().map(|entry| &entry.fields).collect();
                for_programs(format, &all)
            }
            Format::Name => Ok(self.entries.iter().fold(String::new(), |mut text, entry| {
                let _ = writeln!(text, "{}", entry.name);
                text
            })),
        }
    }

    /// Returns the objects as programs see them.
    pub(super) fn into_fields(self) -> Vec<Value> {
        self.entries.into_iter().map(|entry| entry.fields).collect()
    }

    /// Formats the table for people, with or without the names of the columns.
    fn table(&self, format: Format, has_headers: bool) -> String {
        let shown: Vec<bool> =
            self.columns.iter().map(|column| format == Format::Wide || !column.is_wide).collect();
        let headers = self.columns.iter().zip(&shown).filter(|(_, shown)| **shown);
        let headers: Vec<&str> = headers.map(|(column, _)| column.header).filter(|_| has_headers).collect();
        let mut table = if format == Format::Wide { wide_table(&headers) } else { table(&headers) };
        for row in self.entries.iter().flat_map(|entry| &entry.rows) {
            let cells = row.iter().zip(&shown).filter(|(_, shown)| **shown);
            table.add_row(cells.map(|(cell, _)| if cell.is_empty() { "-" } else { cell.as_str() }));
        }
        table.to_string()
    }
}

/// Returns the fields as programs see them; Null if it has none, which does not happen here.
fn fields(output: &impl serde::Serialize) -> Value {
    serde_json::to_value(output).unwrap_or(Value::Null)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn list() -> List {
        let entry = |name: &str, size: u64| Entry {
            name: format!("volume/{name}"),
            fields: json!({ "name": name, "size": size }),
            rows: vec![vec![name.to_owned(), size.to_string(), "r".to_owned()]],
        };
        const COLUMNS: [Column; 3] = [column("NAME"), column("SIZE"), wide("REASON")];
        let entries = vec![entry("a", 1), entry("b", 2)];
        List { columns: &COLUMNS, entries, if_empty: "nothing", warnings: Vec::new() }
    }

    #[test]
    fn each_format_has_its_own_columns() {
        let list = list();
        let table = list.text(Format::Table).unwrap();
        assert!(table.contains("NAME") && table.contains('2') && !table.contains("REASON"), "{table}");
        assert!(list.text(Format::Wide).unwrap().contains("REASON"));
        assert_eq!(list.text(Format::Name).unwrap(), "volume/a\nvolume/b\n");
        let json: Value = serde_json::from_str(&list.text(Format::Json).unwrap()).unwrap();
        assert_eq!(json[1]["size"], 2);
        assert!(list.text(Format::Yaml).unwrap().contains("size: 2"));
    }

    #[test]
    fn an_empty_list_is_stated_only_in_tables() {
        let list = List { entries: Vec::new(), ..list() };
        assert_eq!(list.text(Format::Wide).unwrap(), "nothing");
        assert_eq!(list.text(Format::Json).unwrap(), "[]");
        assert_eq!(list.text(Format::Name).unwrap(), "");
    }
}
