use std::fmt;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::{from_hex, hex};

/// The length of a volume's secret in bytes.
pub const SECRET_BYTES: usize = 32;

/// The key that engine and replicas of one volume prove to each other. It is never shown: `Debug` hides it,
/// and no view of the API has it.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Secret([u8; SECRET_BYTES]);

/// A stored secret is damaged. Does not say how: the text may be most of the secret.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("a volume secret is not 64 hexadecimal digits")]
pub struct SecretError;

impl Secret {
    /// Makes a secret of these random bytes.
    #[must_use]
    pub const fn new(random: [u8; SECRET_BYTES]) -> Secret {
        Secret(random)
    }

    /// Returns the bytes, for the agents.
    #[must_use]
    pub const fn bytes(&self) -> &[u8; SECRET_BYTES] {
        &self.0
    }
}

impl TryFrom<String> for Secret {
    type Error = SecretError;
    fn try_from(text: String) -> Result<Secret, SecretError> {
        // Upper case was always accepted.
        let bytes = from_hex(&text.to_ascii_lowercase()).and_then(|bytes| bytes.try_into().ok());
        bytes.map(Secret).ok_or(SecretError)
    }
}

impl From<Secret> for String {
    fn from(secret: Secret) -> String {
        hex(&secret.0)
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(hidden)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_stored_as_hex_and_never_debugged() {
        let secret = Secret::new(std::array::from_fn(|i| u8::try_from(i * 7 % 256).unwrap()));
        let text = serde_json::to_string(&secret).unwrap();
        assert_eq!(serde_json::from_str::<Secret>(&text).unwrap(), secret);
        assert_eq!(format!("{secret:?}"), "Secret(hidden)");
        assert_eq!(Secret::try_from(String::from(secret.clone()).to_ascii_uppercase()), Ok(secret));
        assert!(serde_json::from_str::<Secret>("\"00ff\"").is_err());
        assert!(serde_json::from_str::<Secret>(&format!("\"{}\"", "zz".repeat(32))).is_err());
    }
}
