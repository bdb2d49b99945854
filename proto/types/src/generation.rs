use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// The generation of an engine: a higher one fences every lower one.
///
/// The controller raises `attach` by compare-and-swap at every attach. A restart of the engine on the same
/// node, without the controller, raises `restart`. The lock on the engine's state file ensures that at most
/// one process has each pair. If that file is lost, or the controller's store is older than the volume, a
/// pair is used twice. The `nonce`, which every process draws at random, still distinguishes the two. Ordered
/// by attach, then restart, then nonce.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Generation {
    /// The number of the attachment, from 1; 0 is a volume that was never attached.
    pub attach: u64,
    /// The number of the engine process within the attachment.
    pub restart: u32,
    /// The random nonce, below 2^53. It is 0 in generations that were made by no engine, or by engines that
    /// drew none.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub nonce: u64,
}

impl Generation {
    /// A replica that no engine has opened yet.
    pub const NEVER: Generation = Generation::new(0, 0);

    /// The number of random bits of a nonce: as many as a number in JSON has for every reader.
    const NONCE_BITS: u32 = 53;

    /// Creates the generation `attach`.`restart`, below all that an engine draws for this pair.
    #[must_use]
    pub const fn new(attach: u64, restart: u32) -> Generation {
        Generation { attach, restart, nonce: 0 }
    }

    /// Returns the same pair, with the nonce that `random` selects.
    #[must_use]
    pub const fn with_nonce(self, random: u64) -> Generation {
        Generation { nonce: random >> (u64::BITS - Generation::NONCE_BITS), ..self }
    }

    /// Returns the same pair with the given nonce.
    #[must_use]
    pub const fn of_nonce(self, nonce: u64) -> Generation {
        Generation { nonce, ..self }
    }

    /// Returns the generation of an engine; none for [`Generation::NEVER`].
    #[must_use]
    pub fn of_engine(self) -> Option<Generation> {
        Some(self).filter(|generation| *generation != Generation::NEVER)
    }
}

/// An optional generation as stores and sockets have it: [`Generation::NEVER`] is none.
pub(crate) mod or_never {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    use super::Generation;

    pub(crate) fn serialize<S: Serializer>(
        generation: &Option<Generation>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        generation.unwrap_or(Generation::NEVER).serialize(serializer)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<Generation>, D::Error> {
        Generation::deserialize(deserializer).map(Generation::of_engine)
    }
}

/// A text is not a generation, or not a view.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("{0:?} is neither a generation (ATTACH.RESTART#NONCE) nor a view")]
pub struct ParseViewError(pub(crate) String);

impl FromStr for Generation {
    type Err = ParseViewError;

    fn from_str(text: &str) -> Result<Generation, ParseViewError> {
        let parse = || {
            let (pair, nonce) = match text.split_once('#') {
                Some((pair, nonce)) => (pair, u64::from_str_radix(nonce, 16).ok()?),
                None => (text, 0),
            };
            let (attach, restart) = pair.split_once('.')?;
            Some(Generation::new(attach.parse().ok()?, restart.parse().ok()?).of_nonce(nonce))
        };
        parse().ok_or_else(|| ParseViewError(text.to_owned()))
    }
}

#[allow(clippy::trivially_copy_pass_by_ref)] // serde calls it so
const fn is_zero(nonce: &u64) -> bool {
    *nonce == 0
}

impl fmt::Display for Generation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.attach, self.restart)?;
        match self.nonce {
            0 => Ok(()),
            nonce => write!(f, "#{nonce:x}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pair_that_is_used_twice_makes_two_generations() {
        let pair = Generation::new(7, 0);
        let (lower, higher) = (pair.of_nonce(3), pair.of_nonce(0x1f3a));
        assert!(pair < lower && lower < higher && higher < Generation::new(7, 1));
        assert_eq!((pair.to_string(), higher.to_string()), ("7.0".into(), "7.0#1f3a".into()));
        assert_eq!(pair.with_nonce(u64::MAX).nonce, (1 << 53) - 1);
    }

    #[test]
    fn texts_read_back() {
        for generation in [Generation::NEVER, Generation::new(7, 1), Generation::new(7, 1).of_nonce(0x1f3a)] {
            assert_eq!(generation.to_string().parse(), Ok(generation));
        }
        for bad in ["", "7", "7.", ".1", "7.1#", "7.1#x", "-7.1", "7.1 "] {
            assert_eq!(bad.parse::<Generation>(), Err(ParseViewError(bad.to_owned())));
        }
    }

    #[test]
    fn without_a_nonce_the_text_is_that_of_earlier_versions() {
        let (old, new) = (Generation::new(7, 1), Generation::new(7, 1).of_nonce(9));
        let text = r#"{"attach":7,"restart":1}"#;
        assert_eq!(serde_json::to_string(&old).unwrap(), text);
        assert_eq!(serde_json::from_str::<Generation>(text).unwrap(), old);
        let text = serde_json::to_string(&new).unwrap();
        assert_eq!(serde_json::from_str::<Generation>(&text).unwrap(), new);
    }
}
