use serde::{Deserialize, Serialize};

/// A layer of a replica: the head, or a snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WireLayer {
    /// Name of the image file.
    pub image: String,
    /// The content of its `.meta` file, which is copied unchanged.
    pub meta: String,
    /// Size of the image file.
    pub size_bytes: u64,
}

/// The layers of a replica, from the oldest to the head. Their numbers are their places in it. As a text at
/// most [`MAX_LAYERS_TEXT_BYTES`](crate::MAX_LAYERS_TEXT_BYTES) long.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerList {
    /// The layers in the order of their numbers.
    pub layers: Vec<WireLayer>,
}

/// The progress of a replica that is being copied to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CopyState {
    /// For each layer of the list: whether it is whole and durable. The head never is.
    pub done: Vec<bool>,
}

/// Asks where a layer has data, a page at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExtentsQuery {
    /// Index in the chain, from 0 for the oldest layer.
    pub layer: u32,
    /// The first byte.
    pub from_bytes: u64,
}

/// A run of whole blocks that have data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Extent {
    /// The first byte of the extent.
    pub offset_bytes: u64,
    /// The length in bytes: whole blocks.
    pub length_bytes: u64,
}

/// A list of the extents of a layer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExtentsPage {
    /// In order, at most [`ExtentsPage::EXTENTS_MAX`].
    pub extents: Vec<Extent>,
    /// The first byte of the next page, if any.
    #[serde(deserialize_with = "Option::deserialize")] // a text that does not have it is refused
    pub next_bytes: Option<u64>,
}

impl ExtentsPage {
    /// The most extents in one page, so that it fits a control frame.
    pub const EXTENTS_MAX: usize = 200;
}

/// A part of a copy is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CopyEnd {
    /// The layer that is whole; none: everything is, and the replica no longer counts as being rebuilt.
    #[serde(deserialize_with = "Option::deserialize")] // a text that does not have it is refused
    pub layer: Option<u32>,
}

#[cfg(test)]
mod tests {
    use serde::de::DeserializeOwned;

    use super::*;
    use crate::{LayerCheck, RegionsPage};

    /// Returns true if `text` is a `T` only if it has `field`.
    fn needs<T: DeserializeOwned>(text: &str, field: &str) -> bool {
        assert!(serde_json::from_str::<T>(text).is_ok() && text.contains(field), "{text}");
        serde_json::from_str::<T>(&text.replace(field, "unknown")).is_err()
    }

    #[test]
    fn a_field_that_is_missing_does_not_say_none() {
        assert!(needs::<CopyEnd>(r#"{"layer":null}"#, "layer"), "it would end the whole copy");
        assert!(
            needs::<ExtentsPage>(r#"{"extents":[],"next_bytes":null}"#, "next_bytes"),
            "pages would be left out"
        );
        assert!(needs::<RegionsPage>(r#"{"kept":true,"runs":[],"next":null}"#, "next"));
        for field in ["sum", "kept", "next_bytes"] {
            assert!(needs::<LayerCheck>(r#"{"sum":null,"kept":null,"next_bytes":null}"#, field), "{field}");
        }
    }
}
