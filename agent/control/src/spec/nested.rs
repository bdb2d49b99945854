//! Keeps fields of a later version below the top level of a spec.

use serde_json::Value;

/// The field that identifies an item of an array.
const IDENTITY: &str = "replica";

/// Adds the fields of `stored` to `new` that this version does not know. `known` is `stored` as this version
/// reads and writes it. A field that is in `known` and not in `new` was taken out, and stays out.
pub(super) fn keep(stored: &Value, known: &Value, new: &mut Value) {
    match (stored, known, new) {
        (Value::Object(stored), Value::Object(known), Value::Object(new)) => {
            for (name, value) in stored {
                match (known.get(name), new.get_mut(name)) {
                    (None, None) => drop(new.insert(name.clone(), value.clone())),
                    (Some(known), Some(new)) => keep(value, known, new),
                    _ => {}
                }
            }
        }
        (Value::Array(stored), Value::Array(known), Value::Array(new)) => {
            for item in new {
                let Some(identity) = item.get(IDENTITY).cloned() else { continue };
                let same = |other: &&Value| other.get(IDENTITY) == Some(&identity);
                if let (Some(stored), Some(known)) = (stored.iter().find(same), known.iter().find(same)) {
                    keep(stored, known, item);
                }
            }
        }
        _ => {}
    }
}
