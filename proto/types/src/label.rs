use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::checked_text;

/// The maximum length of a label: that of the value of a Kubernetes label.
pub const MAX_LABEL_BYTES: usize = 63;

/// A tag of a node or a disk, or the name of a zone: a value that a Kubernetes label can have.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Label(String);

/// Tags, or the tags of a selector.
pub type Labels = BTreeSet<Label>;

/// The reason why a text is not a label.
#[derive(Debug, Error, PartialEq, Eq)]
#[error(
    "{0:?} is not a tag or zone: use 1 to {MAX_LABEL_BYTES} letters, digits, '-', '_' and '.', starting and \
     ending with a letter or digit"
)]
pub struct LabelError(String);

impl Label {
    /// Checks `text` and takes it as a label.
    ///
    /// # Errors
    /// [`LabelError`].
    pub fn new(text: &str) -> Result<Label, LabelError> {
        let plain = text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte));
        let ends = [text.bytes().next(), text.bytes().next_back()];
        let framed = ends.into_iter().all(|end| end.is_some_and(|byte| byte.is_ascii_alphanumeric()));
        if text.len() > MAX_LABEL_BYTES || !plain || !framed {
            return Err(LabelError(text.chars().take(80).collect()));
        }
        Ok(Label(text.to_owned()))
    }
}

checked_text!(Label, LabelError);

/// Returns the labels of these texts.
///
/// # Errors
/// [`LabelError`] for the first text that is not a label.
pub fn labels(texts: impl IntoIterator<Item = impl AsRef<str>>) -> Result<Labels, LabelError> {
    texts.into_iter().map(|text| Label::new(text.as_ref())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn takes_values_of_kubernetes_labels_only() {
        for good in ["a", "ssd", "eu-west-1a", "Rack_7.b", &"x".repeat(63)] {
            assert!(Label::new(good).is_ok(), "{good}");
        }
        for bad in ["", "-", "a-", ".a", "a b", "a,b", "ü", &"x".repeat(64)] {
            assert!(Label::new(bad).is_err(), "{bad}");
        }
        assert!(labels(["a", "b,"]).is_err());
    }
}
