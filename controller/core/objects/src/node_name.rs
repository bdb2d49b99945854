use std::borrow::Borrow;
use std::fmt;
use std::str::FromStr;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::schema;

/// The maximum length of a node name, as in Kubernetes.
pub const MAX_NODE_NAME_BYTES: usize = 253;

/// The name of a node: a DNS name, as Kubernetes nodes and most hosts have it.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(try_from = "String", into = "String")]
#[schemars(with = "schema::NodeName")]
pub struct NodeName(String);

/// The reason why a text is not a node name.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error(
    "node name {0:?} is not a DNS name: use up to 253 lower-case letters, digits, '-' and '.', \
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
        if text.len() > MAX_NODE_NAME_BYTES || !text.split('.').all(label) {
            return Err(NodeNameError(text.chars().take(80).collect()));
        }
        Ok(NodeName(text.to_owned()))
    }

    /// Returns the name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// Names are looked up by their text.
impl Borrow<str> for NodeName {
    fn borrow(&self) -> &str {
        &self.0
    }
}

impl FromStr for NodeName {
    type Err = NodeNameError;
    fn from_str(text: &str) -> Result<NodeName, NodeNameError> {
        NodeName::new(text)
    }
}

impl TryFrom<String> for NodeName {
    type Error = NodeNameError;
    fn try_from(text: String) -> Result<NodeName, NodeNameError> {
        NodeName::new(&text)
    }
}

impl From<NodeName> for String {
    fn from(name: NodeName) -> String {
        name.0
    }
}

impl fmt::Display for NodeName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for NodeName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.0)
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
