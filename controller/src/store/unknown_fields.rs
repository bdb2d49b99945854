//! Keeps fields that a later version has stored and this one does not know, when this one writes the object.
//!
//! The kept parts are copied as text. Read as values, numbers of more than 64 bits would be rounded. The
//! feature `arbitrary_precision` of `serde_json` keeps such numbers, and breaks flattened fields.

use std::fmt::Write;

use serde_json::{Map, Value};

/// The fields that identify an item of an array, as in conditions and frontends.
const IDENTITIES: [&str; 3] = ["type", "name", "id"];

/// Returns the text of `new` with the parts of `stored` that this version cannot represent. `known` is
/// `stored` as this version reads and writes it. None: `stored` is not JSON.
pub(super) fn keep(stored: &str, known: &Value, new: &Value) -> Option<String> {
    match (known, new) {
        (Value::Object(known), Value::Object(new)) if stored.trim_start().starts_with('{') => {
            object(stored, known, new)
        }
        (Value::Array(known), Value::Array(new)) if stored.trim_start().starts_with('[') => {
            array(stored, known, new)
        }
        // A word that is read as another one, or a number, that was left alone.
        _ if known == new && is_leaf(stored) => Some(stored.trim().to_owned()),
        _ => Some(new.to_string()),
    }
}

fn is_leaf(stored: &str) -> bool {
    !stored.trim_start().starts_with(['{', '['])
}

fn object(stored: &str, known: &Map<String, Value>, new: &Map<String, Value>) -> Option<String> {
    let stored = members(stored)?;
    let mut kept = Vec::new();
    for (name, value) in new {
        let before = stored.iter().find(|(stored, _)| stored == name).zip(known.get(name));
        let text = match before {
            Some(((_, stored), known)) => keep(stored, known, value)?,
            None => value.to_string(),
        };
        kept.push((name, text));
    }
    // A known field that is not in `new` was taken out.
    let unknown = stored.iter().filter(|(name, _)| !known.contains_key(name) && !new.contains_key(name));
    kept.extend(unknown.map(|(name, text)| (name, (*text).to_owned())));
    let mut text = String::from("{");
    for (at, (name, value)) in kept.iter().enumerate() {
        let comma = if at == 0 { "" } else { "," };
        let _ = write!(text, "{comma}{}:{value}", Value::from(name.as_str()));
    }
    text.push('}');
    Some(text)
}

fn array(stored: &str, known: &[Value], new: &[Value]) -> Option<String> {
    let stored = items(stored)?;
    // Items without an identity keep their place.
    let is_parallel = stored.len() == known.len() && known.len() == new.len();
    let stored_values: Vec<Value> =
        stored.iter().map(|item| serde_json::from_str(item).unwrap_or_default()).collect();
    let mut kept = Vec::new();
    for (at, value) in new.iter().enumerate() {
        let own = identity(value);
        let same = |other: &Value| own.is_some_and(|(name, own)| other.get(name) == Some(own));
        let before = match own {
            Some(_) => stored_values.iter().position(same).zip(known.iter().position(same)),
            None => is_parallel.then_some((at, at)),
        };
        let text = match before
            .and_then(|(stored_at, known_at)| Some((*stored.get(stored_at)?, known.get(known_at)?)))
        {
            Some((stored, known)) => keep(stored, known, value)?,
            None => value.to_string(),
        };
        kept.push(text);
    }
    Some(format!("[{}]", kept.join(",")))
}

/// The field that identifies an item of this version, with its value. The stored item may have an
/// unknown field of another of the names.
fn identity(item: &Value) -> Option<(&'static str, &Value)> {
    IDENTITIES.into_iter().find_map(|name| Some((name, item.get(name)?)))
}

/// Returns the names of a JSON object with the texts of their values.
fn members(text: &str) -> Option<Vec<(String, &str)>> {
    let parts = parts(text, b'{', b'}')?;
    let mut found = Vec::with_capacity(parts.len());
    for part in parts {
        let end = end_of_string(part.as_bytes())?;
        let (name, rest) = part.split_at_checked(end)?;
        found.push((serde_json::from_str(name).ok()?, rest.trim_start().strip_prefix(':')?.trim()));
    }
    Some(found)
}

/// Returns the texts of the items of a JSON array.
fn items(text: &str) -> Option<Vec<&str>> {
    parts(text, b'[', b']')
}

/// Returns the texts between the commas of an object or an array.
fn parts(text: &str, open: u8, close: u8) -> Option<Vec<&str>> {
    let text = text.trim();
    let bytes = text.as_bytes();
    if bytes.first() != Some(&open) || bytes.last() != Some(&close) || bytes.len() < 2 {
        return None;
    }
    let inner = text.get(1..text.len() - 1)?;
    let bytes = inner.as_bytes();
    let (mut found, mut begin, mut depth, mut at) = (Vec::new(), 0, 0_u32, 0);
    while let Some(byte) = bytes.get(at) {
        match byte {
            b'"' => at += end_of_string(bytes.get(at..)?)? - 1,
            b'{' | b'[' => depth += 1,
            b'}' | b']' => depth = depth.checked_sub(1)?,
            b',' if depth == 0 => {
                found.push(inner.get(begin..at)?.trim());
                begin = at + 1;
            }
            _ => {}
        }
        at += 1;
    }
    let last = inner.get(begin..)?.trim();
    if !(last.is_empty() && found.is_empty()) {
        found.push(last);
    }
    (depth == 0).then_some(found)
}

/// Returns the length of the JSON string at the begin of `bytes`, with its quotes.
fn end_of_string(bytes: &[u8]) -> Option<usize> {
    if bytes.first() != Some(&b'"') {
        return None;
    }
    let mut at = 1;
    loop {
        match bytes.get(at)? {
            b'\\' => at += 2,
            b'"' => return Some(at + 1),
            _ => at += 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn kept(stored: &Value, known: &Value, new: &Value) -> Value {
        serde_json::from_str(&keep(&stored.to_string(), known, new).unwrap()).unwrap()
    }

    #[test]
    fn unknown_fields_stay_and_known_ones_get_their_new_values() {
        let stored =
            json!({ "a": 1, "later": [1], "in": { "b": 2, "later": true }, "gone": 3, "word": "levitating" });
        let known = json!({ "a": 1, "in": { "b": 2 }, "gone": 3, "word": "unknown" });
        let new = json!({ "a": 5, "in": { "b": 2 }, "fresh": 1, "word": "unknown" });
        assert_eq!(
            kept(&stored, &known, &new),
            json!({ "a": 5, "later": [1], "in": { "b": 2, "later": true }, "fresh": 1, "word": "levitating" })
        );
        let decided = json!({ "a": 1, "in": {}, "word": "attached" });
        assert_eq!(kept(&stored, &known, &decided)["word"], "attached");
    }

    #[test]
    fn items_of_arrays_keep_unknown_fields() {
        // This version writes conditions that it does not know last.
        let stored = json!({ "conditions": [{ "type": "New", "x": 1 }, { "type": "A", "s": true, "x": [2] }],
            "places": [{ "path": "/a", "x": { "y": 3 } }, { "path": "/b" }] });
        let known = json!({ "conditions": [{ "type": "A", "s": true }, { "type": "New", "x": 1 }],
            "places": [{ "path": "/a" }, { "path": "/b" }] });
        let new = json!({ "conditions": [
            { "type": "B", "s": true }, { "type": "A", "s": false }, { "type": "New", "x": 1 }
        ],
            "places": [{ "path": "/c" }, { "path": "/b" }] });
        assert_eq!(
            kept(&stored, &known, &new),
            json!({ "conditions": [
                { "type": "B", "s": true }, { "type": "A", "s": false, "x": [2] }, { "type": "New", "x": 1 }
            ],
                "places": [{ "path": "/c", "x": { "y": 3 } }, { "path": "/b" }] })
        );
        let fewer = json!({ "conditions": [], "places": [{ "path": "/b" }] });
        assert_eq!(kept(&stored, &known, &fewer), fewer);
        // An unknown field has the name of one that identifies items.
        let stored = json!({ "frontends": [{ "name": "a", "type": "x" }, { "name": "b", "type": "x" }] });
        let known = json!({ "frontends": [{ "name": "a" }, { "name": "b" }] });
        let new = json!({ "frontends": [{ "name": "b" }] });
        assert_eq!(kept(&stored, &known, &new), json!({ "frontends": [{ "name": "b", "type": "x" }] }));
    }

    #[test]
    fn numbers_are_copied_digit_by_digit() {
        let big = "123456789012345678901234567890";
        let stored = format!(
            "{{ \"a\" : 1, \"in\": {{ \"l\\\"a}}ter\" : [ {big}, 0.1000000000000000055511151231257827 ] }}, \
             \"b\": {big}}}"
        );
        let text = keep(&stored, &json!({ "a": 1, "in": {} }), &json!({ "a": 2, "in": {} })).unwrap();
        let expected = format!(
            "{{\"a\":2,\"in\":{{\"l\\\"a}}ter\":[ {big}, 0.1000000000000000055511151231257827 \
             ]}},\"b\":{big}}}"
        );
        assert_eq!(text, expected);
        assert_eq!(keep("{\"a\":1", &json!({}), &json!({})), None);
    }

    fn value() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            "[a\"\\\\\u{e9}{}\\[\\],: ]{0,6}".prop_map(Value::from),
        ];
        leaf.prop_recursive(4, 32, 4, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                prop::collection::btree_map("[ab\"\\\\,:}]{0,3}", inner, 0..4)
                    .prop_map(|fields| Value::Object(fields.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn the_text_is_taken_apart_and_put_together_again(stored in value(), pretty in any::<bool>()) {
            let text = if pretty {
                serde_json::to_string_pretty(&stored)
            } else {
                serde_json::to_string(&stored)
            };
            let same = keep(&text.unwrap(), &stored, &stored).unwrap();
            prop_assert_eq!(serde_json::from_str::<Value>(&same).unwrap(), stored);
        }

        #[test]
        fn a_version_that_knows_nothing_keeps_all(stored in value()) {
            let stored = json!({ "x": stored });
            prop_assert_eq!(kept(&stored, &json!({}), &json!({})), stored);
        }

        #[test]
        fn no_text_is_too_broken(text in ".{0,40}") {
            let _ = keep(&text, &json!({}), &json!({ "a": 1 }));
            let _ = keep(&text, &json!([]), &json!([1]));
        }
    }
}
