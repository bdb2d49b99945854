//! Nonces and proofs, and their text.

use std::fmt;

use serde::{Deserialize, Serialize};
use shorthorn_types::{from_hex, hex};
use thiserror::Error;

use crate::mac::{MAC_BYTES, Mac};

/// Random bytes that one end draws again for every connection: 64 lower-case hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Nonce([u8; MAC_BYTES]);

/// An HMAC-SHA-256 made with the volume's secret, or with a key derived from it: 64 lower-case hexadecimal
/// digits. Not comparable: [`Session`](crate::Session) and [`Hello`](crate::Hello) compare in a time that
/// does not depend on the difference.
#[derive(Clone, Copy, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Proof([u8; MAC_BYTES]);

/// A text is not a nonce or a proof.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("a nonce or a proof is not 64 lower-case hexadecimal digits")]
pub struct HexError;

impl Nonce {
    /// Makes a nonce of these random bytes.
    #[must_use]
    pub const fn new(random: [u8; MAC_BYTES]) -> Nonce {
        Nonce(random)
    }
}

impl Proof {
    pub(crate) fn of(mac: &Mac) -> Proof {
        Proof(mac.digest())
    }

    /// Compares in a time that does not reveal the place of the difference.
    pub(crate) fn is(&self, mac: &Mac) -> bool {
        mac.is(&self.0)
    }
}

impl TryFrom<String> for Nonce {
    type Error = HexError;
    fn try_from(text: String) -> Result<Nonce, HexError> {
        bytes(&text).map(Nonce)
    }
}

impl From<Nonce> for String {
    fn from(nonce: Nonce) -> String {
        hex(&nonce.0)
    }
}

impl TryFrom<String> for Proof {
    type Error = HexError;
    fn try_from(text: String) -> Result<Proof, HexError> {
        bytes(&text).map(Proof)
    }
}

impl From<Proof> for String {
    fn from(proof: Proof) -> String {
        hex(&proof.0)
    }
}

impl fmt::Debug for Nonce {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex(&self.0))
    }
}

impl fmt::Debug for Proof {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex(&self.0))
    }
}

fn bytes(text: &str) -> Result<[u8; MAC_BYTES], HexError> {
    from_hex(text).and_then(|bytes| bytes.try_into().ok()).ok_or(HexError)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_of_nonces_are_all_checked() {
        let text =
            serde_json::to_string(&Nonce::new(std::array::from_fn(|at| u8::try_from(at * 8 + 3).unwrap())))
                .unwrap();
        assert_eq!(text.len(), 2 + 2 * MAC_BYTES);
        assert_eq!(serde_json::to_string(&serde_json::from_str::<Nonce>(&text).unwrap()).unwrap(), text);
        for bad in [
            String::new(),
            "0".repeat(63),
            "0".repeat(65),
            "0".repeat(66),
            "A".repeat(64),
            format!("{}\n", "0".repeat(63)),
        ] {
            assert_eq!(Nonce::try_from(bad.clone()), Err(HexError), "{bad:?}");
        }
    }
}
