use std::borrow::Borrow;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::checked_text;

/// The maximum length of a node name, as in Kubernetes.
const MAX_BYTES: usize = 253;

/// The name of a node: a DNS name, as Kubernetes nodes and most hosts have it.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct NodeName(String);

/// The reason why a text is not a node name.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error(
    "{0:?} is not a node name: use 1 to {MAX_BYTES} lower-case letters, digits, '-' and '.', each part \
     starting and ending with a letter or digit"
)]
pub struct NodeNameError(String);

impl NodeName {
    /// Checks `text` and takes it as a name.
    ///
    /// # Errors
    /// [`NodeNameError`].
    pub fn new(text: &str) -> Result<NodeName, NodeNameError> {
        let label = |label: &str| {
            !label.is_empty()
                && !label.starts_with('-')
                && !label.ends_with('-')
                && label.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
        };
        if text.len() > MAX_BYTES || !text.split('.').all(label) {
            return Err(NodeNameError(text.chars().take(80).collect()));
        }
        Ok(NodeName(text.to_owned()))
    }
}

checked_text!(NodeName, NodeNameError);

/// Names are looked up by their text.
impl Borrow<str> for NodeName {
    fn borrow(&self) -> &str {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn takes_dns_names_only() {
        for good in ["a", "node-1", "node-1.example.org", "10.0.0.1"] {
            assert!(NodeName::new(good).is_ok(), "{good}");
        }
        for bad in ["", ".", "a.", "-a", "a-", "A", "a/b", "a_b", "a..b", &"x".repeat(254)] {
            assert!(NodeName::new(bad).is_err(), "{bad}");
        }
    }
}
