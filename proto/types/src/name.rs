use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::checked_text;
use crate::limits::MAX_VOLUME_NAME_BYTES;

/// The name of a volume, a DNS label. So it is safe as a file name, a unit name, a device node and a
/// Kubernetes object.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct VolumeName(String);

/// The reason why a text is not a volume name.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum VolumeNameError {
    /// The text is empty or longer than [`MAX_VOLUME_NAME_BYTES`].
    #[error("volume name {0:?} has {1} characters: it needs 1 to 63")]
    Length(String, usize),
    /// The text has a character that is not allowed at its place.
    #[error(
        "volume name {0:?} has {1:?} at position {2}: use lower-case letters, digits and '-', \
         starting and ending with a letter or digit"
    )]
    Character(String, char, usize),
}

impl VolumeName {
    /// Checks `text` and takes it as a name.
    ///
    /// # Errors
    /// [`VolumeNameError`] has the problem and its position.
    pub fn new(text: &str) -> Result<VolumeName, VolumeNameError> {
        if text.is_empty() || text.len() > MAX_VOLUME_NAME_BYTES {
            return Err(VolumeNameError::Length(text.chars().take(80).collect(), text.chars().count()));
        }
        for (at, c) in text.char_indices() {
            let inside = at > 0 && at + c.len_utf8() < text.len();
            if !(c.is_ascii_lowercase() || c.is_ascii_digit() || (c == '-' && inside)) {
                return Err(VolumeNameError::Character(text.to_owned(), c, at));
            }
        }
        Ok(VolumeName(text.to_owned()))
    }
}

checked_text!(VolumeName, VolumeNameError);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn takes_dns_labels_only() {
        for good in ["a", "pvc-1", "0", &"x".repeat(63)] {
            assert!(VolumeName::new(good).is_ok(), "{good}");
        }
        for bad in ["", "-a", "a-", "A", "a/b", "..", "a.b", "é", &"x".repeat(64)] {
            assert!(VolumeName::new(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn errors_name_the_character_and_its_position() {
        let text = VolumeName::new("my_volume").unwrap_err().to_string();
        assert!(text.contains("'_' at position 2"), "{text}");
    }
}
