//! The status of a condition as Kubernetes writes it, `"True"` or `"False"`; older stores have a bare true or
//! false.

use serde::{Deserialize, Deserializer, Serializer};

#[derive(Deserialize)]
#[serde(untagged)]
enum Stored {
    Word(String),
    Bare(bool),
}

pub(super) fn serialize<S: Serializer>(value: &bool, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(if *value { "True" } else { "False" })
}

pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<bool, D::Error> {
    match Stored::deserialize(deserializer)? {
        Stored::Bare(value) => Ok(value),
        Stored::Word(word) => match word.as_str() {
            "True" => Ok(true),
            "False" | "Unknown" => Ok(false),
            _ => Err(serde::de::Error::custom(format_args!("{word:?} is not a status of a condition"))),
        },
    }
}
