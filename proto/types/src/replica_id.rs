use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use thiserror::Error;

const DIGITS: u32 = 8;
const BASE: u64 = 36;

/// The identity of one replica, drawn at random when it is made and never used again.
///
/// Written as eight characters of `0-9a-z`, the suffix that Longhorn gives replica directories
/// (`<volume>-<8 alphanumeric>`).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ReplicaId(u64);

/// The reason why a text is not a replica id.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("replica id {0:?} is not eight characters of 0-9 and a-z")]
pub struct ReplicaIdError(String);

impl ReplicaId {
    /// The number of different ids.
    pub const COUNT: u64 = BASE.pow(DIGITS);

    /// Returns the id that `random` selects.
    #[must_use]
    pub const fn from_random(random: u64) -> ReplicaId {
        ReplicaId(random % Self::COUNT)
    }
}

impl FromStr for ReplicaId {
    type Err = ReplicaIdError;
    fn from_str(text: &str) -> Result<ReplicaId, ReplicaIdError> {
        let good = |c: char| c.is_ascii_digit() || c.is_ascii_lowercase();
        if text.chars().count() != DIGITS as usize || !text.chars().all(good) {
            return Err(ReplicaIdError(text.chars().take(80).collect()));
        }
        u64::from_str_radix(text, 36).map(ReplicaId).map_err(|_| ReplicaIdError(text.to_owned()))
    }
}

impl TryFrom<String> for ReplicaId {
    type Error = ReplicaIdError;
    fn try_from(text: String) -> Result<ReplicaId, ReplicaIdError> {
        text.parse()
    }
}

impl From<ReplicaId> for String {
    fn from(id: ReplicaId) -> String {
        id.to_string()
    }
}

impl fmt::Display for ReplicaId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = [b'0'; DIGITS as usize];
        let mut rest = self.0;
        for digit in text.iter_mut().rev() {
            *digit = b"0123456789abcdefghijklmnopqrstuvwxyz"[(rest % BASE) as usize];
            rest /= BASE;
        }
        f.write_str(std::str::from_utf8(&text).map_err(|_| fmt::Error)?)
    }
}

impl fmt::Debug for ReplicaId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn text_and_back(random: u64) {
            let id = ReplicaId::from_random(random);
            prop_assert_eq!(id.to_string().parse(), Ok(id));
        }
    }

    #[test]
    fn refuses_other_texts() {
        for bad in ["", "1234567", "123456789", "ABCDEFGH", "abc-efgh", "+1234567"] {
            assert!(bad.parse::<ReplicaId>().is_err(), "{bad}");
        }
    }
}
