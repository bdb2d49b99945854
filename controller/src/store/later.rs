//! Keeps fields that a later version has stored and this one does not know, when this one writes the object.

use serde_json::Value;

/// Keeps in `new` the parts of `stored` that this version cannot represent. `known` is `stored` as this
/// version reads and writes it.
pub(super) fn keep(stored: &Value, known: &Value, new: &mut Value) {
    match (stored, known, new) {
        (Value::Object(stored), Value::Object(known), Value::Object(new)) => {
            for (name, value) in stored {
                match (known.get(name), new.get_mut(name)) {
                    (None, None) => drop(new.insert(name.clone(), value.clone())),
                    (Some(known), Some(new)) => keep(value, known, new),
                    // It was taken out, or has come just now.
                    (Some(_), None) | (None, Some(_)) => {}
                }
            }
        }
        // A word that is read as another one, and was left alone.
        (Value::String(stored), Value::String(known), Value::String(new)) if known == new => {
            new.clone_from(stored);
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn kept(stored: Value, known: Value, mut new: Value) -> Value {
        keep(&stored, &known, &mut new);
        new
    }

    #[test]
    fn what_is_not_known_stays_and_what_is_known_is_as_it_was_decided() {
        let stored =
            json!({ "a": 1, "later": [1], "in": { "b": 2, "later": true }, "gone": 3, "word": "levitating" });
        let known = json!({ "a": 1, "in": { "b": 2 }, "gone": 3, "word": "unknown" });
        let new = json!({ "a": 5, "in": { "b": 2 }, "fresh": 1, "word": "unknown" });
        assert_eq!(
            kept(stored.clone(), known.clone(), new),
            json!({ "a": 5, "later": [1], "in": { "b": 2, "later": true }, "fresh": 1, "word": "levitating" })
        );
        let decided = json!({ "a": 1, "in": {}, "word": "attached" });
        assert_eq!(kept(stored, known, decided)["word"], "attached");
    }
}
