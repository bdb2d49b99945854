//! Lists in the order of one of their fields.

use std::cmp::Ordering;

use serde_json::Value;

use super::Entry;
use crate::error::CtlError;

/// Sorts by a field as in `-o json`, like `size` or `.status.size` of kubectl. Objects without it come last.
pub(super) fn sort(entries: &mut [Entry], by: &str) -> Result<(), CtlError> {
    let path: Vec<&str> = by.trim_matches(['{', '}']).split('.').filter(|part| !part.is_empty()).collect();
    let of = |entry: &Entry| path.iter().try_fold(&entry.fields, |value, part| value.get(*part)).cloned();
    if path.is_empty() || !entries.is_empty() && entries.iter().all(|entry| of(entry).is_none()) {
        let known = entries.first().and_then(|entry| entry.fields.as_object());
        let known = known.into_iter().flat_map(|fields| fields.iter());
        let known = known.filter(|(_, value)| !value.is_array()).map(|(name, _)| name.as_str());
        let known: Vec<&str> = known.collect();
        let message = format!("--sort-by {by}: unknown field; use one of {}", known.join(", "));
        return Err(CtlError::Refused(message));
    }
    entries.sort_by(|one, other| compare(of(one).as_ref(), of(other).as_ref()));
    Ok(())
}

fn compare(one: Option<&Value>, other: Option<&Value>) -> Ordering {
    let is_nothing = |value: Option<&Value>| value.is_none_or(|value| value.is_null() || *value == "");
    match (is_nothing(one), is_nothing(other)) {
        (true, true) => return Ordering::Equal,
        (true, false) => return Ordering::Greater,
        (false, true) => return Ordering::Less,
        (false, false) => {}
    }
    match (one.and_then(Value::as_f64), other.and_then(Value::as_f64)) {
        (Some(one), Some(other)) => one.total_cmp(&other),
        _ => text(one).cmp(&text(other)),
    }
}

fn text(value: Option<&Value>) -> String {
    match value {
        Some(Value::String(text)) => text.clone(),
        Some(value) => value.to_string(),
        None => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn sorted(by: &str) -> Result<Vec<String>, CtlError> {
        let all = [
            json!({ "name": "a", "size": 10, "node": "", "engine": { "phase": "serving" }, "replicas": [] }),
            json!({ "name": "b", "size": 9, "node": "n2", "engine": null, "replicas": [] }),
            json!(
                { "name": "c", "size": 100, "node": "n1", "engine": { "phase": "frozen" }, "replicas": [] }
            ),
        ];
        let entry = |fields: Value| Entry { name: text(fields.get("name")), fields, rows: Vec::new() };
        let mut entries: Vec<Entry> = all.into_iter().map(entry).collect();
        sort(&mut entries, by)?;
        Ok(entries.into_iter().map(|entry| entry.name).collect())
    }

    #[test]
    fn numbers_sort_as_numbers_and_entries_without_the_field_last() {
        assert_eq!(sorted("size").unwrap(), ["b", "a", "c"]);
        assert_eq!(sorted("{.size}").unwrap(), ["b", "a", "c"]);
        assert_eq!(sorted("node").unwrap(), ["c", "b", "a"]);
        assert_eq!(sorted(".engine.phase").unwrap(), ["c", "a", "b"]);
    }

    #[test]
    fn a_missing_field_is_refused_with_the_existing_ones() {
        let refused = sorted("weight").unwrap_err().to_string();
        assert!(refused.contains("weight") && refused.contains("engine, name, node, size"), "{refused}");
        assert!(sorted(".").is_err());
    }
}
