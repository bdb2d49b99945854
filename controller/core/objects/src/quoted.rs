//! 64-bit numbers as JSON strings, as Longhorn and Kubernetes write sizes: JSON readers round large numbers.

use serde::{Deserialize, Deserializer, Serializer};

pub(super) fn serialize<S: Serializer>(value: &u64, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(value)
}

pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
    let text = String::deserialize(deserializer)?;
    text.parse().map_err(|_| serde::de::Error::custom(format_args!("{text:?} is not a size in bytes")))
}

/// An optional number as the stored objects have it: 0 is none.
pub(super) mod or_zero {
    use serde::{Deserializer, Serializer};

    pub(in super::super) fn serialize<S: Serializer>(
        value: &Option<u64>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        super::serialize(&value.unwrap_or_default(), serializer)
    }

    pub(in super::super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<u64>, D::Error> {
        super::deserialize(deserializer).map(|number| Some(number).filter(|number| *number > 0))
    }
}
