//! Optional values as the stored objects have them: an empty text is none.
//! [`shorthorn_types::optional`] has further ones.

use std::fmt::Display;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serializer};

/// A value that is a text outside Rust. A text of a later version is none: such values are observed again.
pub(super) mod parsed {
    use super::*;

    pub(in super::super) fn serialize<T: Display, S: Serializer>(
        value: &Option<T>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        match value {
            Some(value) => serializer.collect_str(value),
            None => serializer.serialize_str(""),
        }
    }

    pub(in super::super) fn deserialize<'de, T: FromStr, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<T>, D::Error> {
        Ok(String::deserialize(deserializer)?.parse().ok())
    }
}

/// The phase of an engine as its word. An unknown word is a phase from which nothing follows.
pub(super) mod phase {
    use shorthorn_types::status::EnginePhase;

    use super::*;

    pub(in super::super) fn serialize<S: Serializer>(
        phase: &Option<EnginePhase>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(phase.map(EnginePhase::as_str).unwrap_or_default())
    }

    pub(in super::super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<EnginePhase>, D::Error> {
        Ok(EnginePhase::of_word(&String::deserialize(deserializer)?))
    }
}

/// The frontend of an engine as its word. An unknown word is a frontend of a later version.
pub(super) mod frontend {
    use shorthorn_types::status::Frontend;

    use super::*;

    pub(in super::super) fn serialize<S: Serializer>(
        frontend: &Option<Frontend>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(frontend.map(Frontend::as_str).unwrap_or_default())
    }

    pub(in super::super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<Frontend>, D::Error> {
        let word = String::deserialize(deserializer)?;
        Ok((!word.is_empty()).then(|| Frontend::of_word(&word).unwrap_or(Frontend::Unknown)))
    }
}
