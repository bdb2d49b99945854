use std::fmt;
use std::num::NonZeroU64;

use serde::{Deserialize, Serialize};

use crate::Timestamp;

/// The version of a stored object. A store raises it with every write.
pub type ResourceVersion = NonZeroU64;

/// The kinds of objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// [`super::Volume`]
    Volume,
    /// [`super::Engine`]
    Engine,
    /// [`super::Replica`]
    Replica,
    /// [`super::Node`]
    Node,
}

impl Kind {
    /// Returns the word in keys and messages.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Kind::Volume => "volume",
            Kind::Engine => "engine",
            Kind::Replica => "replica",
            Kind::Node => "node",
        }
    }
}

/// The identity of an object in a store.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    /// The kind, within which the name is unique.
    pub kind: Kind,
    /// The name, which is unique within the kind.
    pub name: String,
}

impl Key {
    /// Creates the key of the object `name` of `kind`.
    #[must_use]
    pub fn new(kind: Kind, name: impl Into<String>) -> Key {
        Key { kind, name: name.into() }
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.kind.as_str(), self.name)
    }
}

/// The fields that every object has.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Metadata {
    /// Unique within the kind.
    pub name: String,
    /// The uid, which distinguishes it from other objects of the name, if the store has uids.
    #[serde(default, with = "shorthorn_types::optional::text", skip_serializing_if = "Option::is_none")]
    pub uid: Option<String>,
    /// The version that a write compares with the stored one; none if the object is not stored yet.
    #[serde(with = "version_or_zero")]
    pub resource_version: Option<ResourceVersion>,
    /// The number that the store raises with every change of the spec, if it counts these.
    #[serde(default, with = "shorthorn_types::optional::number", skip_serializing_if = "Option::is_none")]
    pub generation: Option<u64>,
    /// The time of creation.
    pub creation_timestamp: Timestamp,
    /// The time of the request to delete it, which the reconcilers carry out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deletion_timestamp: Option<Timestamp>,
}

impl Metadata {
    /// Creates the metadata of an object that is about to be made.
    #[must_use]
    pub fn new(name: impl Into<String>, now: Timestamp) -> Metadata {
        Metadata {
            name: name.into(),
            uid: None,
            resource_version: None,
            generation: None,
            creation_timestamp: now,
            deletion_timestamp: None,
        }
    }

    /// Returns true if its deletion was asked for.
    #[must_use]
    pub const fn is_deleting(&self) -> bool {
        self.deletion_timestamp.is_some()
    }
}

/// The stored form of a version: 0 is none.
mod version_or_zero {
    use serde::{Deserialize, Deserializer, Serializer};

    use super::ResourceVersion;

    pub fn serialize<S: Serializer>(
        version: &Option<ResourceVersion>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.serialize_u64(version.map_or(0, ResourceVersion::get))
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<ResourceVersion>, D::Error> {
        u64::deserialize(deserializer).map(ResourceVersion::new)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_generation_that_the_store_does_not_count_is_not_written_and_zero_is_none() {
        let new = Metadata::new("v", Timestamp::UNIX_EPOCH);
        let mut written = serde_json::to_value(&new).unwrap();
        assert!(written.get("generation").is_none(), "{written}");
        written["generation"] = 0.into();
        assert_eq!(serde_json::from_value::<Metadata>(written).unwrap(), new);
        let counted = Metadata { generation: Some(4), ..new };
        let written = serde_json::to_value(&counted).unwrap();
        assert_eq!(written["generation"], 4);
        assert_eq!(serde_json::from_value::<Metadata>(written).unwrap(), counted);
    }

    #[test]
    fn the_version_is_a_number_as_in_earlier_releases_and_zero_is_none() {
        let text = |version: &str| {
            format!(
                r#"{{"name":"v","resourceVersion":{version},"creationTimestamp":"1970-01-01T00:00:00Z"}}"#
            )
        };
        let new = Metadata::new("v", Timestamp::UNIX_EPOCH);
        let stored = Metadata { resource_version: ResourceVersion::new(7), ..new.clone() };
        let last = Metadata { resource_version: Some(ResourceVersion::MAX), ..new.clone() };
        for (metadata, version) in [(new, "0"), (stored, "7"), (last, "18446744073709551615")] {
            assert_eq!(serde_json::from_str::<Metadata>(&text(version)).unwrap(), metadata);
            assert_eq!(serde_json::to_string(&metadata).unwrap(), text(version));
        }
        for version in ["null", "-1", r#""7""#] {
            assert!(serde_json::from_str::<Metadata>(&text(version)).is_err(), "{version}");
        }
        let without = r#"{"name":"v","creationTimestamp":"1970-01-01T00:00:00Z"}"#;
        assert!(serde_json::from_str::<Metadata>(without).is_err());
    }

    #[test]
    fn the_uid_of_a_store_without_uids_is_not_written_and_an_empty_one_is_none() {
        let new = Metadata::new("v", Timestamp::UNIX_EPOCH);
        let mut written = serde_json::to_value(&new).unwrap();
        assert!(written.get("uid").is_none(), "{written}");
        written["uid"] = "".into();
        assert_eq!(serde_json::from_value::<Metadata>(written).unwrap(), new);
        let known = Metadata { uid: Some("u".to_owned()), ..new };
        let written = serde_json::to_value(&known).unwrap();
        assert_eq!(written["uid"], "u");
        assert_eq!(serde_json::from_value::<Metadata>(written).unwrap(), known);
    }
}
