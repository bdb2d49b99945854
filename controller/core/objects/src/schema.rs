//! The schemas of custom resources, by which the API server of Kubernetes checks, shows and keeps the
//! objects.
//!
//! The types derive their schemas. This module has stand-ins for types that are texts outside Rust, and
//! converts the result to the structural form that custom resources must have. The API server drops a field
//! that a schema does not know, so a test holds every object against its schema.

use std::borrow::Cow;

use schemars::generate::SchemaSettings;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde_json::{Map, Value};
use shorthorn_types::status;

macro_rules! stand_in {
    ($(#[$doc:meta])* $name:ident, $schema:tt) => {
        $(#[$doc])*
        #[derive(Debug)]
        pub(crate) enum $name {}

        impl JsonSchema for $name {
            fn inline_schema() -> bool {
                true
            }

            fn schema_name() -> Cow<'static, str> {
                stringify!($name).into()
            }

            fn json_schema(_: &mut SchemaGenerator) -> Schema {
                json_schema!($schema)
            }
        }
    };
}

stand_in!(
    /// A point in time as text.
    Time, { "type": "string", "format": "date-time" }
);
stand_in!(
    /// A 64-bit number as text, at most 20 digits.
    Quoted, { "type": "string", "pattern": "^[0-9]{1,20}$" }
);
stand_in!(
    /// The status of a condition.
    Truth, { "type": "string", "enum": ["True", "False", "Unknown"] }
);
stand_in!(
    /// Stands for [`VolumeName`](shorthorn_types::VolumeName).
    VolumeName, { "type": "string", "maxLength": 63, "pattern": "^[a-z0-9]([a-z0-9-]*[a-z0-9])?$" }
);
stand_in!(
    /// The identity of a replica.
    ReplicaId, { "type": "string", "pattern": "^[0-9a-z]{8}$" }
);
stand_in!(
    /// The mode of a replica in its engine.
    MemberMode, { "type": "string", "enum": status::MemberMode::ALL.map(status::MemberMode::as_str) }
);
stand_in!(
    /// The choice of a frontend.
    Frontend, { "type": "string", "enum": frontends() }
);
/// Makes stand-ins for the words of a status.
macro_rules! words {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {$(
        stand_in!(
            $(#[$doc])*
            $name, { "type": "string", "enum": status::$name::WORDS }
        );
    )*};
}
words!(
    /// The stage of a volume's life.
    VolumeState,
    /// The robustness of a volume.
    Robustness,
    /// The rule for a replica on the node of the engine.
    DataLocality,
    /// The desired state of a process.
    DesireState,
    /// The observed state of a process.
    CurrentState,
);
stand_in!(
    /// Stands for [`NodeName`](shorthorn_types::NodeName).
    NodeName, {
        "type": "string",
        "maxLength": 253,
        "pattern": "^[a-z0-9]([a-z0-9-]*[a-z0-9])?(\\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*$"
    }
);
stand_in!(
    /// Stands for [`Label`](shorthorn_types::Label).
    Label, {
        "description":
            "A tag of a node or a disk, or the name of a zone: a value that a Kubernetes label can have.",
        "type": "string",
        "maxLength": 63,
        "pattern": "^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$"
    }
);
stand_in!(
    /// A record that is kept unchanged: no API server may remove anything from it.
    Opaque, { "type": "object", "x-kubernetes-preserve-unknown-fields": true }
);

/// Returns the frontends that an owner can choose.
fn frontends() -> Vec<&'static str> {
    let is_unknown = |word: &str| word == status::Frontend::Unknown.as_str();
    status::Frontend::WORDS.iter().copied().filter(|word| !is_unknown(word)).collect()
}

/// The choice of defaults that the API server fills in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Defaults {
    /// Absent fields of hand-written objects get their defaults, so that people see them.
    Shown,
    /// Objects of reconcilers are kept as written.
    Absent,
}

/// Generates the schema of `T` in the form that Kubernetes accepts in a CRD.
#[must_use]
pub fn structural<T: JsonSchema>(defaults: Defaults) -> Value {
    let settings = SchemaSettings::openapi3().with(|settings| {
        settings.meta_schema = None;
        settings.inline_subschemas = true;
    });
    let mut schema = settings.into_generator().into_root_schema_for::<T>().to_value();
    restructure(&mut schema, defaults);
    schema
}

/// Brings a schema and all below it into the form that a custom resource can have.
fn restructure(schema: &mut Value, defaults: Defaults) {
    let Value::Object(map) = schema else { return };
    unwrap_optional(map);
    gather_words(map);
    for needless in ["title", "nullable", "examples"] {
        map.remove(needless);
    }
    let is_empty = |default: &Value| match default {
        Value::Null => true,
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        _ => false,
    };
    if defaults == Defaults::Absent || map.get("default").is_some_and(is_empty) {
        map.remove("default");
    }
    // Kubernetes knows signed formats only.
    match map.get("format").and_then(Value::as_str) {
        Some("uint64" | "uint32" | "uint") => drop(map.insert("format".to_owned(), "int64".into())),
        Some("uint8" | "uint16") => drop(map.insert("format".to_owned(), "int32".into())),
        _ => {}
    }
    // Sets and lists alike are replaced as a whole.
    map.remove("uniqueItems");
    if let Some(Value::Object(properties)) = map.get_mut("properties") {
        properties.values_mut().for_each(|property| restructure(property, defaults));
    }
    for below in ["items", "additionalProperties"] {
        if let Some(inner) = map.get_mut(below) {
            restructure(inner, defaults);
        }
    }
}

/// Simplifies `anyOf [X, null]` to X: an optional value is omitted, and never null.
fn unwrap_optional(map: &mut Map<String, Value>) {
    let is_null = |choice: &Value| {
        choice.get("type").is_some_and(|kind| kind == "null")
            || choice.get("enum").and_then(Value::as_array).is_some_and(|words| *words == [Value::Null])
    };
    let Some(Value::Array(choices)) = map.get("anyOf") else { return };
    let mut real = choices.iter().filter(|choice| !is_null(choice));
    if let (Some(Value::Object(only)), None) = (real.next().cloned(), real.next()) {
        map.remove("anyOf");
        for (word, value) in only {
            // The description of the field is more specific than that of its type.
            map.entry(word).or_insert(value);
        }
    }
}

/// Turns a choice between words, each with its own description, into a list of words.
fn gather_words(map: &mut Map<String, Value>) {
    let Some(Value::Array(choices)) = map.get("oneOf") else { return };
    let words = |choice: &Value| match (choice.get("const"), choice.get("enum")) {
        (Some(word), None) => Some(vec![word.clone()]),
        (None, Some(Value::Array(words))) => Some(words.clone()),
        _ => None,
    };
    let Some(words) = choices.iter().map(words).collect::<Option<Vec<_>>>() else { return };
    map.remove("oneOf");
    map.insert("type".to_owned(), "string".into());
    map.insert("enum".to_owned(), Value::Array(words.concat()));
}

/// Returns `object` without the fields that an API server with this schema would drop.
#[must_use]
pub fn pruned(schema: &Value, object: &Value) -> Value {
    if schema.get("x-kubernetes-preserve-unknown-fields").is_some_and(|keep| *keep == true) {
        return object.clone();
    }
    match object {
        Value::Object(fields) => {
            let known = |name: &String| {
                let property = schema.get("properties").and_then(|properties| properties.get(name));
                property.or_else(|| schema.get("additionalProperties"))
            };
            let kept = fields
                .iter()
                .filter_map(|(name, value)| known(name).map(|known| (name.clone(), pruned(known, value))));
            Value::Object(kept.collect())
        }
        Value::Array(items) => {
            let inner = schema.get("items").unwrap_or(&Value::Null);
            Value::Array(items.iter().map(|item| pruned(inner, item)).collect())
        }
        other => other.clone(),
    }
}
