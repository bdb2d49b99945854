//! Optional values as files, messages and stored objects have them: 0, or an empty text, is none.

/// A number that readers of JSON do not round, because it is small.
pub mod number {
    use serde::{Deserialize, Deserializer, Serializer};

    /// Writes 0 for none.
    ///
    /// # Errors
    /// That of the serializer.
    pub fn serialize<S: Serializer>(value: &Option<u64>, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u64(value.unwrap_or_default())
    }

    /// Reads 0 as none.
    ///
    /// # Errors
    /// The value is not a number.
    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
        u64::deserialize(deserializer).map(|number| Some(number).filter(|number| *number > 0))
    }
}

/// A 32-bit number.
pub mod count {
    use serde::{Deserialize, Deserializer, Serializer};

    /// Writes 0 for none.
    ///
    /// # Errors
    /// That of the serializer.
    pub fn serialize<S: Serializer>(value: &Option<u32>, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u32(value.unwrap_or_default())
    }

    /// Reads 0 as none.
    ///
    /// # Errors
    /// The value is not such a number.
    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u32>, D::Error> {
        u32::deserialize(deserializer).map(|number| Some(number).filter(|number| *number > 0))
    }
}

/// A text for people, or one that only other programs read.
pub mod text {
    use serde::{Deserialize, Deserializer, Serializer};

    /// Writes an empty text for none.
    ///
    /// # Errors
    /// That of the serializer.
    pub fn serialize<S: Serializer>(value: &Option<String>, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(value.as_deref().unwrap_or_default())
    }

    /// Reads an empty text as none.
    ///
    /// # Errors
    /// The value is not a text.
    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<String>, D::Error> {
        String::deserialize(deserializer).map(|text| Some(text).filter(|text| !text.is_empty()))
    }
}
